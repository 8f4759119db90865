"""What a start remembers, forecasts and refuses. That a model really comes up, the rigs show."""

from __future__ import annotations

import json
import os
import random
import stat
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobStore
from forge.parts.planes.plane import Room
from forge.parts.runtimes.runtime import Need, ServedModel
from forge.parts.toolsets import startup as part
from forge.parts.toolsets.startup import (
    StartHistory,
    deciding_line,
    memory_verdict,
    refuse_missing,
    refuse_oversize,
)

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

    def begin(self, typical: dict[str, float] | None) -> part._StartClock:
        store = JobStore(self.folder / "jobs", "x")
        self.progress = JobProgress(store, store.new("serve", {}, PHASES))
        self.progress.update(state="running", phase="")
        return part._StartClock(self.progress, PHASES, typical)

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
    """The line of a log that says why, below the header that the plane puts there."""

    def test_the_last_error_wins_over_the_last_line(self) -> None:
        log = "header Error\nstart\nValueError: first\nOSError: [Errno 28] the disk is full\nbye\n"
        self.assertEqual(deciding_line(log), "OSError: [Errno 28] the disk is full")

    def test_words_that_name_an_end(self) -> None:
        for line in ("Killed", "FATAL: x", "an Exception was raised", "error: unknown option"):
            self.assertEqual(deciding_line(f"header\n{line}\nlast\n"), line)

    def test_otherwise_the_last_line(self) -> None:
        self.assertEqual(deciding_line("header\nfirst\nlast\n\n"), "last")

    def test_silence(self) -> None:
        for log in ("", "header", "header\n\n  \n"):
            self.assertEqual(deciding_line(log), "it wrote nothing")

    def test_it_is_short(self) -> None:
        self.assertEqual(len(deciding_line("header\nError " + "x" * 10_000)), 400)


if __name__ == "__main__":
    unittest.main()
