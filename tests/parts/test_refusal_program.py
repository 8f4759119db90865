"""A provider's refusal through triage.py in a process of its own: answers, and programs that fail.

The program is the real one, started as a rig starts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import get_args
from unittest import mock

import psutil

from forge.parts.boundaries.refusal_program import asked_refusal, refusal_reader
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.knowledge.refusal_answer import REFUSAL_CHARACTERS, Refusal
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepWish
from forge.parts.planes.sweep import CapacitySweep
from forge.sweep_market import MarketModel, SimulatedClock, SimulatedMarket
from tests.parts.test_sweep_refusals import HINTED, TEXTS
from tests.rig_programs import write_programs

PATIENCE_S = 60.0


class ProgramCase(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_programs(self.folder)
        self.program = self.folder / "triage.py"

    async def refused(self, text: str = HINTED) -> RigError:
        with self.assertRaises(RigError) as caught:
            await asked_refusal(self.program, text, "CAPACITY")
        return caught.exception


class AnswerTest(ProgramCase):
    async def test_the_process_says_what_the_function_says(self) -> None:
        by_reason: dict[str, str] = {}
        for text, reason, _ in TEXTS:
            by_reason.setdefault(reason, text)
        cases: list[tuple[str, ErrorClass | None]] = [(t, None) for t in by_reason.values()]
        cases += [(HINTED, "CAPACITY"), (HINTED, "DENIED"), (HINTED, "UNKNOWN"), ("", "QUOTA")]
        cases += [("\x00 \u2028 GPU_STOCKOUT é", None), ("unheard of " + "y" * 3000, "INTERNAL")]
        for text, error_class in cases:
            with self.subTest(text[:60], error_class=error_class):
                read = await asked_refusal(self.program, text, error_class)
                self.assertEqual(read, read_refusal(text, error_class))

    async def test_an_answer_keeps_its_types_over_the_wire(self) -> None:
        refusal = await refusal_reader(self.program)(HINTED, "CAPACITY")
        self.assertIsInstance(refusal, Refusal)
        self.assertEqual(refusal.hints, ("us-east5-a", "us-east5-b"))
        self.assertFalse(refusal.stops)
        project = await asked_refusal(self.program, "Quota 'GPUS_ALL_REGIONS' exceeded.")
        self.assertTrue(project.stops)

    async def test_of_a_text_without_end_the_end_counts(self) -> None:
        text = "Quota 'GPUS_ALL_REGIONS' exceeded. " + "x " * REFUSAL_CHARACTERS + "\nGPU_STOCKOUT"
        self.assertEqual((await asked_refusal(self.program, text)).reason, "stockout")
        lone = "\ud800\x1b[31m code: GPU_STOCKOUT"
        self.assertEqual((await asked_refusal(self.program, lone)).reason, "stockout")

    async def test_a_secret_in_the_text_is_in_no_answer_and_in_no_argument(self) -> None:
        secret = "hf_" + "Canary0123456789" * 2
        for text in (f"ZONE_RESOURCE_POOL_EXHAUSTED token={secret}", f"unheard of {secret}"):
            self.assertNotIn(secret, repr(await asked_refusal(self.program, text)))
        self.program.write_text("import sys; sys.exit(' '.join(sys.argv))")
        self.assertNotIn(secret, (await self.refused(f"GPU_STOCKOUT {secret}")).what)


class FaultTest(ProgramCase):
    async def test_a_missing_program_is_named(self) -> None:
        self.program.unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("triage.py", error.what)

    async def test_a_program_that_answers_nonsense_is_no_answer(self) -> None:
        good = json.dumps({"reason": "stockout", "scope": "zone", "said": "x"})
        weather = good.replace("stockout", "weather")
        for text in ("print('{}')", "print('[1]')", f"print('{weather}')", f"print('{good}' * 2)"):
            with self.subTest(text):
                self.program.write_text(text)
                self.assertEqual((await self.refused()).error_class, "INTERNAL")
        self.program.write_text("import sys; sys.exit('broken in two')")
        self.assertIn("broken in two", (await self.refused()).what)
        self.program.write_text("")
        self.assertEqual((await self.refused()).error_class, "INTERNAL")

    async def test_a_program_that_never_answers_is_killed(self) -> None:
        self.program.write_text(
            "import os, pathlib, time\n"
            "pathlib.Path('pid').write_text(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        module = "forge.parts.boundaries.refusal_program"
        self.enterContext(mock.patch(f"{module}._REFUSAL_PATIENCE_S", 2.0))
        self.assertEqual((await self.refused()).error_class, "TIMEOUT")
        self.assertFalse(psutil.pid_exists(int((self.folder / "pid").read_text())))

    async def test_a_reading_that_is_given_up_leaves_no_process(self) -> None:
        self.program.write_text(
            "import os, pathlib, time\n"
            "path = pathlib.Path('pid')\n"
            "path.with_suffix('.new').write_text(str(os.getpid()))\n"
            "path.with_suffix('.new').rename(path)\n"
            "time.sleep(600)\n"
        )
        reading = asyncio.create_task(asked_refusal(self.program, HINTED))
        async with asyncio.timeout(PATIENCE_S):
            while not (self.folder / "pid").exists():
                await asyncio.sleep(0.05)
        reading.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await reading
        self.assertFalse(psutil.pid_exists(int((self.folder / "pid").read_text())))


class SweepTest(ProgramCase):
    """A sweep that reads through the program; with the program gone it still leaves nothing."""

    def sweep(self, market: SimulatedMarket, told: list[str]) -> CapacitySweep:
        wish = SweepWish(
            project="p",
            machine="m",
            name_stem="rig",
            places=market.places[:3],
            deadline_unix=market.clock.now() + 4 * 3600,
            life_s=3600,
            most_requests=3,
        )
        reader = refusal_reader(self.program)
        folder = self.folder / "sweep"
        return CapacitySweep(market, wish, folder, market.clock, told.append, reader=reader)

    async def test_a_market_is_swept_with_the_program_and_without_it(self) -> None:
        refusing = MarketModel(
            scarce_s=1e9, free_s=1e-6, queues=0.0, no_quota=0.0, ask_fails=0.0, ask_times_out=0.0
        )
        for gone in (False, True):
            if gone:
                self.program.unlink()
            with self.subTest(gone=gone):
                clock, told = SimulatedClock(), list[str]()
                market = SimulatedMarket(1, clock, refusing)
                with self.assertRaises(RigError) as caught:
                    await self.sweep(market, told).run()
                self.assertEqual(caught.exception.error_class, "CAPACITY")
                self.assertEqual(sum("stockout" in line for line in told), 3, told)
                self.assertEqual(sum("could not be read" in line for line in told), 3 * gone, told)
                self.assertEqual(market.twins(), 0)
                self.assertEqual(market.alive(clock.now() + 600), [])
                (self.folder / "sweep" / "sweep_refusals.json").unlink()


class CommandTest(ProgramCase):
    def run_it(self, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, str(self.program), *words],
            input=given,
            capture_output=True,
            timeout=PATIENCE_S,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def test_people_get_the_reason_the_words_and_the_hint(self) -> None:
        done = self.run_it("--refusal", given=HINTED.encode())
        told = done.stdout.decode()
        self.assertEqual(done.returncode, 1)
        for words in ("stockout (of the zone)", HINTED, "names: us-east5-a, us-east5-b"):
            self.assertIn(words, told)
        done = self.run_it("--refusal", "--error-class", "DENIED", "-", given=b"no")
        self.assertIn("permission (of the zone): no\n  no other place", done.stdout.decode())

    def test_the_status_says_it_without_words(self) -> None:
        self.assertEqual(self.run_it("--refusal", given=b"never heard of\n").returncode, 0)
        self.assertEqual(self.run_it("--refusal", "--error-class", "WEATHER").returncode, 2)
        self.assertEqual(self.run_it("--refusal", "absent.txt").returncode, 2)

    def test_every_class_of_the_rig_is_known_to_the_program(self) -> None:
        told = self.run_it("--help").stdout.decode()
        for error_class in get_args(ErrorClass):
            self.assertIn(error_class, told)


if __name__ == "__main__":
    unittest.main()
