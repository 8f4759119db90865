"""Diagnosis on the rig: its own failed starts, pasted logs, and triage.py by itself.

Which signatures there are and what they say is tested where they are made.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys

from mcp import Client

from forge.suites.rig_case import RigCase

_KV = (
    "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that "
    "can be stored in KV cache (20480)."
)
_OLD_LIBRARY = (
    "The checkpoint you are trying to load has model type `gemma9` but Transformers does not "
    "recognize this architecture."
)


class DiagnosingSuite(RigCase):
    """The line, the cause, the change; and nothing where nothing is wrong."""

    async def failed_start(self, client: Client) -> None:
        """Start what will fail, and see it fail."""
        await self.refusal(client, "serve_model", "INTERNAL", wait_s=50)

    async def test_a_failed_start_is_explained(self) -> None:
        self.engine.script(crash=_OLD_LIBRARY)
        async with self.in_process() as client:
            await self.failed_start(client)
            done = self.journal()
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertIn("gemma9", found["line"])
            self.assertTrue(found["changes"])
            again = await self.answer(client, "suggest_sre_remediation")
            self.assertEqual(again["kind"], found["kind"])
            self.assertTrue(again["steps"])
        self.assertEqual(self.journal(), done, "advice did something")
        await self.until(lambda: not self.processes("server"), "what failed still runs")

    async def test_a_healthy_log_and_no_log_at_all(self) -> None:
        async with self.in_process() as client:
            if not list(self.rig_state.glob("logs/*.log")):
                await self.refusal(client, "analyze_logs", "NOT_FOUND")
            await self.serve(client)
            found = await self.answer(client, "analyze_logs")
        self.assertEqual(found["summary"], "no failure found")

    async def test_the_starts_are_shown_by_phase(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            shown = await client.call_tool("get_boot_timeline", {})
        words = "".join(item.text for item in shown.content if item.type == "text")
        for phase in self.assembled().context.runtime.phases:
            self.assertIn(phase, words)
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(b"\x89PNG"))

    async def test_a_pasted_log_in_both_protocol_modes(self) -> None:
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                found = await self.answer(client, "analyze_logs", text=f"noise\n{_KV}\n")
                self.assertEqual(found["kind"], "kv_cache_too_small")
                self.assertEqual(found["line"], _KV)
                self.assertEqual(found["changes"][0]["to_value"], "20480")
                self.assertTrue(found["will_not_help"])

    def test_triage_needs_nothing_but_python(self) -> None:
        program = str(self.rig_folder / "triage.py")
        cases: tuple[tuple[list[str], str, int, str], ...] = (
            (["-"], f"noise\n{_KV}\n", 1, "--max-model-len: 65536 -> 20480"),
            (["--json", "-"], _KV, 1, '"kind": "kv_cache_too_small"'),
            ([], "all is well\n", 0, "no failure found"),
            ([str(self.place / "absent.log")], "", 2, ""),
        )
        for words, log, status, wanted in cases:
            with self.subTest(words=words):
                done = subprocess.run(
                    # -I -S: no package, no path but the program's own.
                    [sys.executable, "-I", "-S", program, *words],
                    input=log,
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(wanted, done.stdout)
                self.assertNotIn("Traceback", done.stderr)
        answer = json.loads(
            subprocess.run(
                [sys.executable, "-I", "-S", program, "--json"],
                input=b"\xff\x00" * 1000 + _KV.encode(),
                capture_output=True,
            ).stdout
        )
        self.assertEqual(answer["failures"][0]["kind"], "kv_cache_too_small")

    async def test_a_rig_without_its_triage_says_so(self) -> None:
        program = self.rig_folder / "triage.py"
        kept = program.read_bytes()
        program.unlink()
        self.addCleanup(program.write_bytes, kept)
        async with self.in_process() as client:
            text = await self.refusal(client, "analyze_logs", "NOT_FOUND", text="x")
        self.assertIn("triage.py", text)
