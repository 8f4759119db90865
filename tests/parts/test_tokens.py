"""Confirmation tokens: bound, short-lived, used once, across processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.tokens import TOKEN_LIFE_S, TokenStore

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = {"act": "destroy", "name": "a", "provider_id": "17"}

# Waits for a line, so that all processes go at once, then tries to redeem.
REDEEM = """
import asyncio, json, sys
from pathlib import Path
from forge.parts.ground.errors import RigError
from forge.parts.ground.tokens import TokenStore
store = TokenStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    asyncio.run(store.redeem(sys.argv[2], json.loads(sys.argv[3])))
    print("redeemed")
except RigError as error:
    print(error)
"""


class TokensTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name) / "state"
        self.now = 1_000_000.0
        self.store = TokenStore(self.folder, lambda: self.now)

    async def asyncSetUp(self) -> None:
        # unittest runs the loop in debug mode, which reports every slow step on standard error.
        asyncio.get_running_loop().slow_callback_duration = 60

    async def refused(self, act: object, error_class: str = "DENIED") -> str:
        with self.assertRaises(RigError) as caught:
            await act  # type: ignore[misc]
        self.assertEqual(caught.exception.error_class, error_class)
        return caught.exception.what

    async def test_a_token_gives_back_what_it_was_bound_to(self) -> None:
        token = await self.store.issue(SUBJECT)
        self.assertRegex(token, r"\A[0-9a-f]{32}\Z")
        self.assertEqual(await self.store.check(token), SUBJECT)
        self.assertEqual(await self.store.check(token), SUBJECT, "a check uses nothing up")
        await self.store.redeem(token, SUBJECT)

    async def test_it_is_used_once(self) -> None:
        token = await self.store.issue(SUBJECT)
        await self.store.redeem(token, SUBJECT)
        self.assertIn("used", await self.refused(self.store.redeem(token, SUBJECT)))
        self.assertIn("used", await self.refused(self.store.check(token)))

    async def test_it_lives_five_minutes_and_not_a_second_more(self) -> None:
        self.assertEqual(TOKEN_LIFE_S, 300)
        token = await self.store.issue(SUBJECT)
        self.now += 299.9
        await self.store.check(token)
        self.now += 0.1
        self.assertIn("older", await self.refused(self.store.redeem(token, SUBJECT)))

    async def test_a_clock_that_was_set_back_makes_no_token_younger(self) -> None:
        token = await self.store.issue(SUBJECT)
        self.now -= 3600
        await self.refused(self.store.redeem(token, SUBJECT))

    async def test_another_subject_is_refused_and_ends_the_token(self) -> None:
        for other in ({**SUBJECT, "provider_id": "18"}, {"act": "destroy"}, {**SUBJECT, "x": ""}):
            with self.subTest(other=other):
                token = await self.store.issue(SUBJECT)
                await self.refused(self.store.redeem(token, other))
                self.assertIn("void", await self.refused(self.store.redeem(token, SUBJECT)))

    async def test_a_new_token_for_the_same_thing_ends_the_earlier_one(self) -> None:
        first = await self.store.issue(SUBJECT)
        elsewhere = await self.store.issue({**SUBJECT, "name": "b"})
        second = await self.store.issue(SUBJECT)
        await self.refused(self.store.check(first))
        await self.store.check(second)
        await self.store.check(elsewhere)

    async def test_what_is_no_token_is_refused_by_its_form(self) -> None:
        for value in ("", "0" * 31, "0" * 33, "A" * 32, "../" * 10, "0" * 31 + "\n", "\ud800" * 32):
            with self.subTest(value=value):
                await self.refused(self.store.check(value), "INVALID")
                await self.refused(self.store.redeem(value, SUBJECT), "INVALID")
        self.assertIn("no such", await self.refused(self.store.check("0" * 32)))

    async def test_revoking(self) -> None:
        token = await self.store.issue(SUBJECT)
        await self.store.revoke(token)
        await self.store.revoke("0" * 32)
        self.assertIn("void", await self.refused(self.store.redeem(token, SUBJECT)))

    async def test_another_store_of_the_folder_shares_them(self) -> None:
        token = await self.store.issue(SUBJECT)
        other = TokenStore(self.folder, lambda: self.now)
        await other.redeem(token, SUBJECT)
        await self.refused(self.store.redeem(token, SUBJECT))

    async def test_the_file_is_private_and_does_not_hold_the_token(self) -> None:
        token = await self.store.issue(SUBJECT)
        path = self.folder / "tokens.json"
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.folder.stat().st_mode & 0o777, 0o700)
        self.assertNotIn(token, path.read_text())

    async def test_a_damaged_file_gives_no_token_and_stops_nobody(self) -> None:
        for damage in ("", "[]", "{", '{"x": 1}', json.dumps({"x": {"issued": 1}})):
            with self.subTest(damage=damage):
                token = await self.store.issue(SUBJECT)
                (self.folder / "tokens.json").write_text(damage)
                await self.refused(self.store.check(token))
                await self.store.check(await self.store.issue(SUBJECT))

    async def test_what_is_old_is_forgotten(self) -> None:
        for number in range(5):
            await self.store.issue({"number": str(number)})
        self.now += 90_000
        await self.store.issue(SUBJECT)
        self.assertEqual(len(json.loads((self.folder / "tokens.json").read_text())), 1)

    async def test_of_twenty_tasks_one_redeems(self) -> None:
        token = await self.store.issue(SUBJECT)
        acts = [self.store.redeem(token, SUBJECT) for _ in range(20)]
        results = await asyncio.gather(*acts, return_exceptions=True)
        self.assertEqual(results.count(None), 1)
        self.assertTrue(all(isinstance(r, RigError) for r in results if r is not None))

    async def test_of_four_processes_one_redeems(self) -> None:
        store = TokenStore(self.folder)
        token = await store.issue(SUBJECT)
        argv = [sys.executable, "-c", REDEEM, str(self.folder), token, json.dumps(SUBJECT)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        runners = [
            subprocess.Popen(
                argv, text=True, cwd=ROOT, stdin=pipes["stdin"], stdout=pipes["stdout"]
            )
            for _ in range(4)
        ]
        for runner in runners:
            assert runner.stdout is not None
            self.assertEqual(runner.stdout.readline(), "ready\n")
        for runner in runners:
            assert runner.stdin is not None
            runner.stdin.write("\n")
            runner.stdin.flush()
        said = [runner.communicate(timeout=30)[0].strip() for runner in runners]
        self.assertEqual(said.count("redeemed"), 1, said)
        self.assertEqual(sum(line.startswith("DENIED the token was used") for line in said), 3)


if __name__ == "__main__":
    unittest.main()
