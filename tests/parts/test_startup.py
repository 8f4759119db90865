"""What a start remembers, forecasts and refuses. That a model really comes up, the rigs show.

Refusals by the plan go through a real client; nothing is started or downloaded in them.
"""

from __future__ import annotations

import json
import os
import random
import stat
import tempfile
import time
import types
import unittest
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from mcp import Client

from forge.parts.assembly.rig import Rig
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobStore
from forge.parts.knowledge.planner import plan_of
from forge.parts.knowledge.planner_fit import FitRequest, planned_model
from forge.parts.knowledge.planner_refusal import plan_sum
from forge.parts.planes.plane import Room
from forge.parts.planes.this_computer import ThisComputer
from forge.parts.runtimes.runtime import Need, ServedModel
from forge.parts.runtimes.vllm_cuda_log import CUDA_PHASE_WORDS
from forge.parts.toolsets import starts as part
from forge.parts.toolsets.boot_timeline import (
    BootRecord,
    boot_picture,
    boot_records,
    boot_table,
    standing_still,
)
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.starts import (
    StartHistory,
    deciding_line,
    memory_verdict,
    refuse_missing,
    refuse_oversize,
)
from forge.parts.toolsets.work import JobsToolset
from forge.rigs.local_pytorch_cpu_2b import RIG
from forge.suites.fake_engine import write_tiny_folder
from forge.suites.witness import rig_processes
from tests.rig_folder import RigFolderCase
from tests.rig_programs import write_programs

PHASES = ("environment", "weights", "load", "first token")


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class HistoryTest(Case):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.folder / "state" / "starts.jsonl"
        self.history = StartHistory(self.path)

    def test_before_the_first_start_nothing_is_known(self) -> None:
        self.assertIsNone(self.history.typical("a"))
        self.history.add("b", {"load": 1.0})
        self.assertIsNone(self.history.typical("a"))

    def test_the_median_of_the_last_five_by_phase_and_model(self) -> None:
        for seconds in (100.0, 100.0, 1.0, 2.0, 3.0, 50.0, 4.0):
            self.history.add("a", {"load": seconds, "first token": seconds / 10})
            self.history.add("b", {"load": 7.0})
        self.assertEqual(self.history.typical("a"), {"load": 3.0, "first token": 0.3})
        self.assertEqual(self.history.typical("b"), {"load": 7.0})

    def test_another_server_reads_what_this_one_wrote(self) -> None:
        self.history.add("a", {"load": 2.0})
        self.assertEqual(StartHistory(self.path).typical("a"), {"load": 2.0})

    def test_phases_that_changed_since(self) -> None:
        self.history.add("a", {"old": 9.0, "load": 4.0})
        self.history.add("a", {"load": 2.0, "new": 1.0})
        self.assertEqual(self.history.typical("a"), {"load": 3.0, "new": 0.5})

    def test_damaged_lines_cost_themselves_only(self) -> None:
        self.history.add("a", {"load": 2.0})
        with self.path.open("a") as file:
            for line in (
                "",
                "{",
                "[]",
                "7",
                '{"model": "a"}',
                '{"model": "a", "seconds": 7}',
                '{"model": "a", "seconds": {"load": "x"}}',
                '{"model": "a", "seconds": {"load": null}}',
            ):
                file.write(line + "\n")
        self.history.add("a", {"load": 4.0})
        self.assertEqual(self.history.typical("a"), {"load": 3.0})

    def test_bytes_that_are_no_text_are_no_crash(self) -> None:
        self.history.add("a", {"load": 2.0})
        with self.path.open("ab") as file:
            file.write(b"\xff\xfe\x00\n")
        self.history.add("a", {"load": 4.0})
        self.assertEqual(self.history.typical("a"), {"load": 3.0})

    def test_it_is_private(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        self.history.add("a", {"load": 2.0})
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)


class ClockTest(Case):
    """The forecast, with the hands of the clock moved by the test."""

    def setUp(self) -> None:
        super().setUp()
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        patch = mock.patch.object(part, "time", clock)
        patch.start()
        self.addCleanup(patch.stop)

    def begin(self, typical: dict[str, float] | None) -> part.StartClock:
        store = JobStore(self.folder / "jobs", "x")
        self.progress = JobProgress(store, store.new("serve", {}, PHASES))
        self.progress.update(state="running", phase="")
        return part.StartClock(self.progress, PHASES, typical)

    def shown(self) -> tuple[float, float | None]:
        record = self.progress.record
        return record.percent, record.remaining_s

    def test_without_a_history_phases_are_equal_and_no_time_is_promised(self) -> None:
        clock = self.begin(None)
        for index, phase in enumerate(PHASES):
            clock.enter(phase, f"in {phase}")
            self.assertEqual(self.shown(), (25.0 * index, None))
            self.assertEqual(
                (self.progress.record.phase, self.progress.record.message), (phase, f"in {phase}")
            )
            clock.tick(0.5, "half")
            self.assertEqual(self.shown(), (25.0 * index + 12.5, None))

    def test_with_a_history_the_time_left_is_what_is_left_of_it(self) -> None:
        clock = self.begin({"environment": 1.0, "weights": 0.0, "load": 8.0, "first token": 1.0})
        clock.enter("environment", "")
        self.assertEqual(self.shown(), (0.0, 10.0))
        self.now += 1
        clock.enter("weights", "")
        clock.enter("load", "")
        self.assertEqual(self.shown(), (10.0, 9.0))
        self.now += 4
        clock.tick(None, "loading")
        self.assertEqual(self.shown(), (50.0, 5.0))

    def test_what_takes_longer_than_usual_never_shows_less_than_nothing(self) -> None:
        clock = self.begin({"environment": 1.0, "weights": 0.0, "load": 8.0, "first token": 1.0})
        clock.enter("load", "")
        for _ in range(20):
            self.now += 10
            clock.tick(None, "")
            percent, left = self.shown()
            self.assertEqual(left, 1.0)
            self.assertLessEqual(percent, 99.0)

    def test_the_percentage_never_goes_back(self) -> None:
        source = random.Random(13)
        for typical in (None, dict.fromkeys(PHASES, 5.0), {"load": 3.0}, {}):
            clock = self.begin(typical)
            last = 0.0
            for phase in PHASES:
                clock.enter(phase, "")
                for fraction in (0.0, 0.2, 0.9):
                    percent, left = self.shown()
                    self.assertGreaterEqual(percent, last)
                    self.assertTrue(0 <= percent <= 100)
                    self.assertTrue(left is None or left >= 0)
                    last = percent
                    self.now += source.random() * 8
                    clock.tick(fraction, "")

    def test_each_phase_is_timed_for_the_next_start(self) -> None:
        clock = self.begin(None)
        for seconds, phase in enumerate(PHASES, start=1):
            clock.enter(phase, "")
            self.now += seconds
        self.assertEqual(clock.finish(), dict(zip(PHASES, (1.0, 2.0, 3.0, 4.0), strict=True)))

    def test_a_clock_that_was_set_back_does_no_harm(self) -> None:
        """Durations come from the monotonic clock: the wall clock may jump by a day."""
        clock = self.begin(dict.fromkeys(PHASES, 5.0))
        clock.enter("environment", "")
        with mock.patch("time.time", return_value=1.0):
            self.now += 2
            clock.tick(None, "")
        self.assertEqual(self.shown(), (10.0, 18.0))

    def test_what_is_shown_is_on_disk(self) -> None:
        clock = self.begin(None)
        clock.enter("load", "on the way")
        record = json.loads(next((self.folder / "jobs").glob("*.json")).read_text())
        self.assertEqual((record["phase"], record["message"]), ("load", "on the way"))


def model(**needed: int) -> ServedModel:
    return ServedModel("a-model", Path("/m"), "X", 1, needed, "a remark beside")


class VerdictTest(unittest.TestCase):
    def test_it_fits_to_the_last_byte_and_not_one_further(self) -> None:
        for free, fits in ((2_999_999_999, False), (3_000_000_000, True)):
            room = Room(memory_available=free, memory_total=8 * 10**9, disk_free=0)
            needed = model(weights=2 * 10**9, cache=10**9)
            self.assertIs(memory_verdict(needed, room)[0], fits)
            if fits:
                refuse_oversize(needed, room)
            else:
                with self.assertRaises(RigError) as caught:
                    refuse_oversize(needed, room)
                self.assertEqual(caught.exception.error_class, "CAPACITY")
                self.assertIn("embedded", caught.exception.next_step)

    def test_the_sum_is_shown_with_its_parts(self) -> None:
        room = Room(memory_available=5 * 10**9, memory_total=8 * 10**9, disk_free=0)
        _, text = memory_verdict(model(weights=2 * 10**9, cache=500_000_000), room)
        self.assertEqual(
            text,
            "needs 2.50 GB (weights 2.00 + cache 0.50), 5.00 of 8.00 GB are available; "
            "a remark beside",
        )

    def test_everything_missing_is_named_once_with_its_remedy(self) -> None:
        refuse_missing([Need("a", True, "1.0", "make install")])
        with self.assertRaises(RigError) as caught:
            refuse_missing(
                [
                    Need("there", True, "1.0", "nothing"),
                    Need("torch", False, "not installed", "make install"),
                    Need("gguf", False, "not installed", "make install"),
                    Need("disk", False, "full", "free some"),
                ]
            )
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertIn(
            "torch: not installed; gguf: not installed; disk: full", caught.exception.what
        )
        self.assertEqual(caught.exception.next_step, "make install and free some")


class DecidingLineTest(unittest.TestCase):
    """The line of a log that says why."""

    def test_the_last_error_wins_over_the_last_line(self) -> None:
        log = "start\nValueError: first\nOSError: [Errno 28] the disk is full\nbye\n"
        self.assertEqual(deciding_line(log), "OSError: [Errno 28] the disk is full")

    def test_words_that_name_an_end(self) -> None:
        for line in ("Killed", "FATAL: x", "an Exception was raised", "error: unknown option"):
            self.assertEqual(deciding_line(f"{line}\nlast\n"), line)

    def test_otherwise_the_last_line(self) -> None:
        self.assertEqual(deciding_line("first\nlast\n\n"), "last")

    def test_silence(self) -> None:
        for log in ("", "\n", "\n\n  \n"):
            self.assertEqual(deciding_line(log), "it wrote nothing")

    def test_it_is_short(self) -> None:
        self.assertEqual(len(deciding_line("Error " + "x" * 10_000)), 400)


class TimelineTest(RigFolderCase):
    """Phases of starts that came up, that failed and that go on."""

    def setUp(self) -> None:
        super().setUp()
        self.context = self.assembled(RIG).context
        self.history = StartHistory(self.context.paths.state / "starts.jsonl")

    def job(self, **fields: Any) -> JobRecord:
        """A record of a start of the embedded model, as its worker would have left it."""
        jobs = self.context.jobs
        made = jobs.new("serve", {"model": "embedded"}, PHASES)
        jobs.write(made.model_copy(update=fields))
        return jobs.read(made.id)

    def under_way(self, phase: str, ago_s: float, before: dict[str, float]) -> JobRecord:
        """A start whose worker lives and which has been in `phase` for `ago_s` seconds."""
        job = self.job_under_way(self.context.jobs, "serve", {"model": "embedded"}, PHASES)
        changes = {
            "phase": phase,
            "phase_seconds": before,
            "phase_started_unix": time.time() - ago_s,
            "created_unix": time.time() - ago_s - sum(before.values()) - 1,
        }
        self.context.jobs.write(job.model_copy(update=changes))
        return self.context.jobs.read(job.id)

    def test_each_phase_is_compared_with_itself_alone(self) -> None:
        usual = {"environment": 1.0, "weights": 2.0, "load": 30.0, "first token": 3.0}
        self.history.add("embedded", usual)
        self.history.add("another", dict.fromkeys(PHASES, 0.1))
        for phase, least in usual.items():
            for ago_s, stands in ((least - 0.9, False), (least + 60, True)):
                with self.subTest(phase=phase, ago_s=ago_s):
                    # However long the phases before took: they are over.
                    job = self.under_way(phase, ago_s, {"environment": 500.0, "weights": 500.0})
                    if phase in ("environment", "weights"):
                        job = self.rewritten(job, phase_seconds={})
                    said = standing_still(self.context)
                    self.assertEqual(bool(said), stands, said)
                    if stands:
                        self.assertIn(f"in '{phase}' for {least + 60:.0f} s", said)
                        self.assertIn(f"1 earlier starts (longest {least:.0f} s)", said)
                    self.rewritten(job, state="cancelled")

    def rewritten(self, job: JobRecord, **changes: Any) -> JobRecord:
        changed = job.model_copy(update=changes)
        self.context.jobs.write(changed)
        return changed

    def test_nothing_to_compare_with_says_nothing(self) -> None:
        self.under_way("load", 900.0, {})
        self.assertEqual(standing_still(self.context), "")
        self.history.add("another", dict.fromkeys(PHASES, 1.0))
        self.history.add("embedded", {"environment": 1.0})
        self.assertEqual(standing_still(self.context), "")

    def test_a_record_without_phase_times_falls_back_to_the_two_moments_on_record(self) -> None:
        self.history.add("embedded", {"environment": 1.0, "weights": 1.0, "load": 8.0})
        job = self.under_way("load", 0.0, {})
        self.rewritten(job, phase_started_unix=0.0, created_unix=time.time() - 60)
        self.assertIn("'environment + weights + load' for 60 s", standing_still(self.context))
        self.context.journal.append("server start intended", serve_id=job.id)
        self.assertEqual(standing_still(self.context), "")

    def test_a_clock_that_was_set_back_claims_nothing(self) -> None:
        self.history.add("embedded", dict.fromkeys(PHASES, 1.0))
        self.under_way("load", -3600.0, {})
        self.assertEqual(standing_still(self.context), "")
        self.assertEqual(boot_records(self.context)[-1].seconds["load"], 0.0)

    def test_starts_that_failed_or_were_cancelled_have_their_phases(self) -> None:
        spent = {"environment": 1.0, "weights": 4.0, "load": 7.0}
        for state in ("failed", "cancelled"):
            self.job(state=state, phase="load", phase_seconds=spent, seconds=12.2)
        self.job(state="failed", phase="load", seconds=12.2)  # of an older version
        records = boot_records(self.context)
        self.assertEqual([r.seconds for r in records], [spent, spent, {}])
        lines = boot_table(records).splitlines()
        self.assertIn("failed in phase 'load'  embedded  12.0 s", lines[2])
        self.assertIn("environment 1.0, weights 4.0, load 7.0", lines[2])
        self.assertIn("failed in phase 'load'  embedded  12.2 s", lines[6])
        self.assertTrue(boot_picture(records).startswith(b"\x89PNG"))

    def test_the_start_under_way_is_shown_with_the_phase_that_it_is_in(self) -> None:
        self.under_way("load", 30.0, {"environment": 1.0})
        (record,) = boot_records(self.context)
        self.assertEqual(record.outcome, "running")
        self.assertEqual(record.seconds["environment"], 1.0)
        self.assertGreaterEqual(record.seconds["load"], 30.0)

    def test_the_phases_of_a_rented_gpu_machine_are_told_apart(self) -> None:
        """They are the most that a start has: the machine's own and those of its boot."""
        names = ["machine", *CUDA_PHASE_WORDS]
        start = BootRecord("t", "m", "ready", {name: 10.0 for name in names})
        legend, _, _, bar = boot_table([start]).splitlines()
        signs = [entry.split(" ", 1)[0] for entry in legend.removeprefix("legend: ").split(", ")]
        colours = [entry.rpartition("(")[2] for entry in legend.split(", ")]
        self.assertEqual(len(set(signs)), len(names))
        self.assertEqual(len(set(colours)), len(names))
        self.assertEqual([sign for sign, _ in groupby(bar.strip())], signs)


class SmallMachine(ThisComputer):
    """This computer with the memory of another: 8 GB of which 6 are free, or what is set."""

    free, total = 6 * 10**9, 8 * 10**9

    async def room(self, disk_folder: Path) -> Room:
        return Room(self.free, self.total, 500 * 10**9)


def small_rig(*toolsets: type, plane: type[SmallMachine] = SmallMachine) -> Rig:
    return replace(
        RIG,
        make_plane=lambda paths, label, journal, _load: plane(paths, label, journal),
        toolsets=toolsets,
    )


class PlanRefusalTest(RigFolderCase):
    """serve_model on a machine that is too small, before anything is started or downloaded."""

    toolsets: Sequence[type] = (ServingToolset, JobsToolset, PlanningToolset)

    def setUp(self) -> None:
        super().setUp()
        write_programs(self.folder)

    async def called(self, rig: Rig, **arguments: Any) -> tuple[bool, str]:
        """Whether serve_model succeeded, and its text; whatever it began is ended."""
        async with Client(self.assembled(rig).server()) as client:
            result = await client.call_tool("serve_model", arguments)
            if not result.is_error:
                await client.call_tool("stop_model", {})
        return not result.is_error, str(getattr(result.content[0], "text", ""))

    async def refused(self, rig: Rig, **arguments: Any) -> str:
        """The text of a refusal, after a look that nothing was begun: no job, no intent."""
        succeeded, text = await self.called(rig, **arguments)
        self.assertFalse(succeeded, text)
        context = self.assembled(rig).context
        self.assertEqual((context.jobs.all(), context.journal.entries()), ([], []))
        self.assertEqual(rig_processes(self.folder / "STATE"), [])
        return text

    async def test_31b_is_refused_with_every_summand_and_no_override_helps(self) -> None:
        for override in (False, True):
            text = await self.refused(
                small_rig(*self.toolsets), model="google/gemma-4-31B-it", override=override
            )
            self.assertTrue(text.startswith("CAPACITY google/gemma-4-31B-it in bf16 on cpu"), text)
            self.assertIn("text weights alone take 61.39 GB of 8.00 GB", text)
            self.assertIn("arithmetic, no override", text)
            for summand in ("text weights 61.39", "vision tower", "the engine 0.80", "the cache"):
                self.assertIn(summand, text)
            self.assertNotIn("override=true", text)
            self.assertIn("Next: take a rig on 'v5p1'", text)

    async def test_what_an_estimate_refuses_an_override_lets_pass(self) -> None:
        class Fair(SmallMachine):
            free, total = 10 * 10**9, 12 * 10**9

        rig = small_rig(*self.toolsets, plane=Fair)
        text = await self.refused(rig, model="google/gemma-4-E2B-it")
        self.assertIn("an estimate, which may be overridden", text)
        self.assertIn("text weights 4.56 + per-layer embedding table 4.70", text)
        self.assertIn("Next: free memory or ", text)
        self.assertIn("override=true tries it all the same", text)
        succeeded, text = await self.called(rig, model="google/gemma-4-E2B-it", override=True)
        # What stops it now is no plan: that the packages are there, or the start itself.
        self.assertTrue(succeeded or text.startswith("NOT_FOUND something is missing"), text)

    async def test_the_model_of_the_settings_is_judged_like_one_that_was_named(self) -> None:
        path = self.folder / "tpu.env"
        path.write_text(path.read_text().replace("embedded", "google/gemma-4-31B-it"))
        text = await self.refused(small_rig(*self.toolsets))
        self.assertIn("CAPACITY google/gemma-4-31B-it", text)

    async def test_the_change_that_would_do_is_in_the_words_of_the_rig(self) -> None:
        class Tight(SmallMachine):
            free = total = 25 * 10**9

        text = await self.refused(
            small_rig(*self.toolsets, plane=Tight), model="google/gemma-4-12B-it"
        )
        self.assertRegex(text, r"Next: set MAX_MODEL_LEN=\d+ or take a rig on ")

    async def test_what_the_planner_does_not_know_it_does_not_refuse(self) -> None:
        class Tiny(SmallMachine):
            free = total = 10**9

        folder = str(write_tiny_folder(self.folder / "tiny"))
        for name in ("embedded", folder, "nobody/knows-this-one"):
            with self.subTest(name):
                succeeded, text = await self.called(
                    small_rig(*self.toolsets, plane=Tiny), model=name
                )
                self.assertTrue(succeeded or text.startswith("NOT_FOUND something is"), text)

    async def test_a_folder_that_does_not_fit_is_refused_by_its_own_sum(self) -> None:
        class Dust(SmallMachine):
            free = total = 10**6

        folder = str(write_tiny_folder(self.folder / "tiny"))
        text = await self.refused(
            small_rig(*self.toolsets, plane=Dust), model=folder, override=True
        )
        self.assertTrue(text.startswith(f"CAPACITY {folder} does not fit: needs "), text)

    async def test_a_rig_without_a_planner_and_one_in_no_table_serve_as_before(self) -> None:
        unplanned = small_rig(ServingToolset, JobsToolset)
        nameless = replace(small_rig(*self.toolsets), name="somewhere-odd")
        for rig in (unplanned, nameless):
            with self.subTest(rig.name, toolsets=len(rig.toolsets)):
                succeeded, text = await self.called(rig, model="google/gemma-4-31B-it")
                self.assertTrue(succeeded or text.startswith("NOT_FOUND something is"), text)

    async def test_a_planner_that_is_not_loaded_as_tools_still_refuses(self) -> None:
        with mock.patch.dict(os.environ, RIG_TOOLSETS="serving"):
            async with Client(self.assembled(small_rig(*self.toolsets)).server()) as client:
                names = {tool.name for tool in (await client.list_tools()).tools}
            self.assertNotIn("plan_deployment", names)
            await self.refused(small_rig(*self.toolsets), model="google/gemma-4-31B-it")

    def test_the_sum_adds_up(self) -> None:
        for name, runtime, hardware in (
            ("google/gemma-4-31B-it", "pytorch", "cpu"),
            ("google/gemma-4-12B-it", "vllm", "v5e1"),
            ("google/gemma-4-26B-A4B-it", "vllm", "v6e4"),
        ):
            model = planned_model(name)
            plan = plan_of(FitRequest(model, model.stored, runtime, hardware, 8192, memory_gib=16))
            words = plan_sum(plan)
            total, listed = words.removeprefix("in all ").split(" GB", 1)
            figures = listed.partition("(")[2].partition(")")[0].split(" + ")
            summed = sum(float(figure.rpartition(" ")[2]) for figure in figures)
            self.assertAlmostEqual(float(total), summed, delta=0.005 * len(figures) + 0.005)
            self.assertEqual("devices" in words, plan.verdict.devices > 1, words)


if __name__ == "__main__":
    unittest.main()
