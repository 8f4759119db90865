"""Jobs: real detached workers, their records, and what is told of those that were killed.

The worker's file is a small script with a few kinds of work; the store, the process and the
signals are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import tempfile
import textwrap
import time
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil

from forge.parts.ground import jobs as part
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobStore, work_on_job
from forge.parts.ground.process import LABEL_VARIABLE, find_labelled, process_label
from forge.parts.ground.state import write_json

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
    import asyncio, json, os, subprocess, sys
    from pathlib import Path
    from forge.parts.ground.errors import RigError
    from forge.parts.ground.jobs import JobStore, work_on_job
    from forge.parts.ground.process import run_program

    here = Path(__file__).parent

    async def counting(progress):
        for percent in (25, 50, 75):
            progress.update(percent=percent, message=f"at {percent}", phase="count")
            await asyncio.sleep(0.02)
        return {"sum": 150, "asked": progress.record.arguments}

    async def forever(progress):
        progress.update(message="begun")
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.5)
            (here / "undone").write_text("tidy")
        return {}

    async def stubborn(progress):
        progress.update(message="begun")
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                pass

    async def attached(progress):
        progress.update(message="begun")
        await run_program([sys.executable, "-c", (
            "import os, signal, time; signal.signal(15, signal.SIG_IGN);"
            "open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid');"
            "time.sleep(30)")], timeout_s=40, folder=here)
        return {}

    async def refusing(progress):
        raise RigError("CAPACITY", "no room for hf_AAAAAAAAAA11", "free some")

    async def crashing(progress):
        raise ZeroDivisionError("the detail hf_AAAAAAAAAA11")

    async def leaving(progress):
        os._exit(9)

    runners = {k: v for k, v in globals().items() if asyncio.iscoroutinefunction(v)}
    store = JobStore(here / "jobs", json.loads((here / "prefix.json").read_text()))
    assert sys.argv[1] == "job"
    kind = sys.argv[2].partition("-")[0]
    record = asyncio.run(work_on_job(store, sys.argv[2], runners[kind]))
    sys.exit(0 if record.state == "done" else 1)
"""


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.prefix = f"rig=test;owner={os.getpid()}-{time.monotonic_ns()}"
        (self.folder / "prefix.json").write_text(json.dumps(self.prefix))
        self.server = self.folder / "server.py"
        self.server.write_text(textwrap.dedent(SERVER))
        self.store = JobStore(self.folder / "jobs", self.prefix)
        path = os.pathsep.join([str(ROOT), *sys.path])
        patch = mock.patch.dict(os.environ, {"PYTHONPATH": path})
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.end_workers)

    def end_workers(self) -> None:
        for process in psutil.process_iter():
            label = process_label(process.pid)
            if label is not None and label.startswith(self.prefix):
                os.kill(process.pid, signal.SIGKILL)

    def begin(self, kind: str, **arguments: object) -> JobRecord:
        job = self.store.new(kind, dict(arguments), ["count", "rest"])
        self.store.start_worker(job, self.server)
        return job

    async def until(self, what: Callable[[], object], why: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            self.assertLess(time.monotonic(), deadline, why)
            await asyncio.sleep(0.02)

    async def finished(self, job: JobRecord) -> JobRecord:
        await self.until(lambda: self.store.read(job.id).finished, "the job did not end")
        return self.store.read(job.id)

    async def begun(self, kind: str) -> JobRecord:
        job = self.begin(kind)
        await self.until(lambda: self.store.read(job.id).message == "begun", "it did not begin")
        return self.store.read(job.id)


class LifeTest(Case):
    async def test_from_queued_to_done(self) -> None:
        job = self.begin("counting", model="/models/hf_AAAAAAAAAA11/x")
        self.assertEqual((job.state, job.phase, job.phases), ("queued", "count", ["count", "rest"]))
        end = await self.finished(job)
        self.assertEqual((end.state, end.percent, end.remaining_s), ("done", 100.0, 0.0))
        self.assertEqual(end.result["sum"], 150)
        self.assertEqual(
            (end.created_at, end.message, end.phase), (job.created_at, "at 75", "count")
        )
        self.assertGreater(end.seconds, 0.05)
        self.assertGreater(end.finished_at, end.created_at)
        await self.until(lambda: not find_labelled(self.store.label(job.id)), "the worker stays")

    async def test_arguments_arrive_as_they_were_given(self) -> None:
        """A path that looks like a secret must not become another path on its way."""
        given = {"model": "/models/hf_AAAAAAAAAA11/x", "n": 1.5, "list": ["a"], "none": None}
        job = self.begin("counting", **given)
        self.assertEqual(self.store.read(job.id).arguments, given)
        end = await self.finished(job)
        self.assertEqual(end.arguments, given)

    async def test_an_anticipated_failure_keeps_class_and_words(self) -> None:
        end = await self.finished(self.begin("refusing"))
        self.assertEqual(end.state, "failed")
        assert end.error is not None
        self.assertEqual(end.error.error_class, "CAPACITY")
        self.assertEqual(end.error.text, "CAPACITY no room for [redacted]. Next: free some")
        self.assertNotIn("AAAAAAAAAA11", (self.folder / "jobs" / f"{end.id}.json").read_text())

    async def test_a_crash_is_internal_and_its_traceback_is_in_the_log_alone(self) -> None:
        end = await self.finished(self.begin("crashing"))
        assert end.error is not None
        self.assertEqual((end.state, end.error.error_class), ("failed", "INTERNAL"))
        self.assertTrue(end.error.text.startswith("INTERNAL "))
        self.assertNotIn("ZeroDivision", end.error.text)
        log = self.store.log(end.id).read_text()
        self.assertIn("ZeroDivisionError", log)
        self.assertNotIn("AAAAAAAAAA11", log)
        self.assertIn(str(self.store.log(end.id)), end.error.text)

    async def test_files_are_private(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        end = await self.finished(self.begin("counting"))
        for path in (self.folder / "jobs" / f"{end.id}.json", self.store.log(end.id)):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600, path)
        self.assertEqual(stat.S_IMODE(self.store.folder.stat().st_mode), 0o700)

    async def test_a_job_is_worked_on_once(self) -> None:
        end = await self.finished(self.begin("counting"))

        async def never(_: JobProgress) -> dict[str, object]:
            self.fail("a finished job was run again")

        with self.assertRaises(RigError) as caught:
            await work_on_job(self.store, end.id, never)
        self.assertEqual(caught.exception.error_class, "EXISTS")
        self.assertEqual(self.store.read(end.id), end)

    async def test_ids_are_unique_and_sort_by_time(self) -> None:
        jobs = [self.store.new("serve", {}, []) for _ in range(30)]
        self.assertEqual(len({job.id for job in jobs}), 30)
        self.assertEqual(len({job.phase for job in jobs}), 1)
        self.assertEqual([job.id for job in self.store.all()], [job.id for job in reversed(jobs)])

    async def test_nothing_can_be_started_where_no_record_can_be_written(self) -> None:
        (self.folder / "jobs").write_text("a file in the folder's place")
        with self.assertRaises(RigError) as caught:
            self.store.new("counting", {}, [])
        self.assertEqual(caught.exception.error_class, "DENIED")


class PhaseTest(Case):
    """The times of phases, with the hands of both clocks moved by the test."""

    def setUp(self) -> None:
        super().setUp()
        self.now, self.wall = 100.0, 5000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.wall)
        patch = mock.patch.object(part, "time", clock)
        patch.start()
        self.addCleanup(patch.stop)
        self.job = self.store.new("serve", {}, ["count", "rest"])

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    def on_disk(self) -> tuple[str, float, dict[str, float]]:
        record = json.loads((self.folder / "jobs" / f"{self.job.id}.json").read_text())
        return record["phase"], record["phase_started_unix"], record["phase_seconds"]

    def test_before_a_worker_came_no_phase_has_begun(self) -> None:
        self.assertEqual(self.on_disk(), ("count", 0.0, {}))

    def test_each_phase_begins_where_the_one_before_ends(self) -> None:
        progress = JobProgress(self.store, self.job)
        self.passes(3)
        progress.update(state="running")
        self.assertEqual(self.on_disk(), ("count", 5003.0, {}))
        self.passes(2)
        progress.update(message="still counting", percent=10.0)
        self.assertEqual(self.on_disk(), ("count", 5003.0, {}))
        self.passes(2.5)
        progress.update(phase="rest")
        self.assertEqual(self.on_disk(), ("rest", 5007.5, {"count": 4.5}))
        self.passes(1)
        progress.update(phase="rest", message="the same phase once more")
        self.assertEqual(self.on_disk(), ("rest", 5007.5, {"count": 4.5}))

    def test_the_last_phase_is_closed_however_the_job_ends(self) -> None:
        for state in ("done", "failed", "cancelled"):
            with self.subTest(state):
                self.job = self.store.new("serve", {}, ["count", "rest"])
                progress = JobProgress(self.store, self.job)
                progress.update(state="running")
                self.passes(2)
                progress.update(phase="rest")
                begun = self.wall
                self.passes(7)
                progress.update(state=state, finished_at="now")
                self.assertEqual(self.on_disk(), ("rest", begun, {"count": 2.0, "rest": 7.0}))

    def test_a_phase_that_is_entered_again_adds_to_its_time(self) -> None:
        progress = JobProgress(self.store, self.job)
        progress.update(state="running")
        for phase, seconds in (("rest", 1.0), ("count", 2.0), ("rest", 4.0), ("count", 8.0)):
            self.passes(seconds)
            progress.update(phase=phase)
        self.assertEqual(self.on_disk()[2], {"count": 5.0, "rest": 10.0})

    def test_a_wall_clock_that_was_set_back_changes_no_duration(self) -> None:
        progress = JobProgress(self.store, self.job)
        progress.update(state="running")
        self.passes(3)
        self.wall -= 86_400
        progress.update(phase="rest")
        self.assertEqual(self.on_disk()[2], {"count": 3.0})

    def test_a_job_without_phases_is_timed_as_a_whole(self) -> None:
        self.job = self.store.new("counting", {}, [])
        progress = JobProgress(self.store, self.job)
        progress.update(state="running")
        self.passes(3)
        progress.update(state="done")
        self.assertEqual((self.on_disk()[2], progress.record.seconds), ({}, 3.0))

    def test_a_record_of_an_older_version_has_no_phase_times(self) -> None:
        path = self.folder / "jobs" / f"{self.job.id}.json"
        fields = json.loads(path.read_text())
        del fields["phase_seconds"], fields["phase_started_unix"]
        write_json(path, fields)
        old = self.store.read(self.job.id)
        self.assertEqual((old.phase_seconds, old.phase_started_unix), ({}, 0.0))


class RealPhaseTest(Case):
    async def test_a_real_worker_writes_its_phases_down(self) -> None:
        before = time.time()
        end = await self.finished(self.begin("counting"))
        self.assertEqual(set(end.phase_seconds), {"count"})
        self.assertGreaterEqual(end.phase_seconds["count"], 0.06)  # three naps of 0.02 s
        self.assertLessEqual(end.phase_seconds["count"], end.seconds)
        self.assertTrue(before <= end.phase_started_unix <= time.time())


class EndTest(Case):
    async def test_cancel_lets_the_worker_undo_what_it_began(self) -> None:
        job = await self.begun("forever")
        self.assertEqual(job.state, "running")
        end = await self.store.cancel(job.id)
        self.assertEqual(end.state, "cancelled")
        self.assertIn("undone", end.message)
        self.assertEqual((self.folder / "undone").read_text(), "tidy")
        self.assertIsNone(process_label(job.worker_pid or 0))
        self.assertEqual(self.store.read(job.id), end)

    async def test_a_second_cancel_does_not_break_off_the_undoing(self) -> None:
        job = await self.begun("forever")
        other = JobStore(self.folder / "jobs", self.prefix)
        first = asyncio.create_task(self.store.cancel(job.id))
        await asyncio.sleep(0.25)  # in the midst of the undoing, which takes half a second
        ends = [await other.cancel(job.id), await first]
        self.assertEqual([end.state for end in ends], ["cancelled", "cancelled"])
        self.assertEqual((self.folder / "undone").read_text(), "tidy")

    async def test_a_worker_that_will_not_go_is_killed(self) -> None:
        job = await self.begun("stubborn")
        end = await self.store.cancel(job.id, patience_s=0.3)
        self.assertEqual(end.state, "cancelled")
        self.assertIsNone(process_label(job.worker_pid or 0))

    async def test_cancel_takes_the_workers_program_along(self) -> None:
        job = await self.begun("attached")
        await self.until(lambda: (self.folder / "pid").exists(), "the program did not start")
        pid = int((self.folder / "pid").read_text())
        end = await self.store.cancel(job.id)
        self.assertEqual(end.state, "cancelled")
        await self.until(lambda: not psutil.pid_exists(pid), "the program is left")

    async def test_a_killed_worker_is_lost_and_says_so(self) -> None:
        job = await self.begun("forever")
        os.kill(job.worker_pid or 0, signal.SIGKILL)
        end = await self.finished(job)
        self.assertEqual(end.state, "lost")
        self.assertIn("killed", end.message)
        self.assertIsNone(self.store.active("forever"))
        self.assertEqual((await self.store.cancel(job.id)).state, "lost")

    async def test_what_a_killed_worker_had_started_is_ended_by_cancel(self) -> None:
        job = await self.begun("attached")
        await self.until(lambda: (self.folder / "pid").exists(), "the program did not start")
        pid = int((self.folder / "pid").read_text())
        os.kill(job.worker_pid or 0, signal.SIGKILL)
        self.assertEqual((await self.finished(job)).state, "lost")
        self.assertTrue(psutil.pid_exists(pid), "nothing is left to be ended")
        self.assertEqual((await self.store.cancel(job.id, patience_s=0.3)).state, "lost")
        await self.until(lambda: process_label(pid) is None, "the killed worker's program goes on")

    async def test_a_worker_that_left_without_a_word_is_lost(self) -> None:
        self.assertEqual((await self.finished(self.begin("leaving"))).state, "lost")

    async def test_a_pid_that_now_belongs_to_another_job_is_not_this_one_alive(self) -> None:
        """A reused pid: the record of a dead job names the worker of another one."""
        other = await self.begun("forever")
        job = self.store.new("forever", {}, [])
        self.store.write(
            job.model_copy(update={"state": "running", "worker_pid": other.worker_pid})
        )
        self.assertEqual(self.store.read(job.id).state, "lost")
        self.assertEqual((await self.store.cancel(job.id)).state, "lost")
        self.assertEqual(self.store.read(other.id).state, "running", "the stranger was touched")

    async def test_a_young_job_is_queued_and_an_old_one_without_worker_is_lost(self) -> None:
        job = self.store.new("forever", {}, [])
        self.assertEqual(self.store.read(job.id).state, "queued")
        for seconds in (-3600.0, 11.0, 86_400.0):  # an hour "in the future": the clock was set back
            old = job.model_copy(update={"created_unix": time.time() - seconds})
            self.store.write(old)
            with self.subTest(seconds=seconds):
                self.assertEqual(self.store.read(job.id).state, "lost")

    async def test_an_old_queued_job_whose_worker_lives_is_not_lost(self) -> None:
        """A worker that is slow to import: known by its label before it has written a word."""
        job = self.store.new("forever", {}, [])
        self.store.write(job.model_copy(update={"created_unix": time.time() - 60}))
        slow = self.folder / "slow.py"
        slow.write_text("import time; time.sleep(30)")
        pid = self.store.start_worker(job, slow)
        self.assertEqual(self.store.read(job.id).state, "queued")
        self.assertEqual((await self.store.cancel(job.id)).state, "cancelled")
        self.assertIsNone(process_label(pid))

    async def test_a_job_cancelled_before_its_worker_came_is_not_run(self) -> None:
        job = self.store.new("counting", {}, [])
        self.assertEqual((await self.store.cancel(job.id)).state, "cancelled")
        pid = self.store.start_worker(job, self.server)
        await self.until(lambda: process_label(pid) is None, "the worker stays")
        end = self.store.read(job.id)
        self.assertEqual((end.state, end.result), ("cancelled", {}))

    async def test_cancelling_what_is_finished_changes_nothing(self) -> None:
        end = await self.finished(self.begin("counting"))
        self.assertEqual(await self.store.cancel(end.id), end)

    async def test_there_is_no_such_job(self) -> None:
        for act in (self.store.cancel("x-1"), asyncio.to_thread(self.store.read, "x-1")):
            with self.assertRaises(RigError) as caught:
                await act
            self.assertEqual(caught.exception.error_class, "NOT_FOUND")


class StoreTest(Case):
    async def test_two_stores_see_the_same_jobs(self) -> None:
        other = JobStore(self.folder / "jobs", self.prefix)
        job = await self.begun("forever")
        seen = other.active("forever")
        assert seen is not None
        self.assertEqual((seen.id, seen.state), (job.id, "running"))
        self.assertIsNone(other.active("counting"))
        self.assertEqual((await other.cancel(job.id)).state, "cancelled")
        self.assertEqual(self.store.read(job.id).state, "cancelled")

    async def test_a_reader_never_sees_less_than_was_there(self) -> None:
        """Progress only grows while a worker writes and two stores read."""
        job = self.begin("counting")
        seen: list[float] = []
        while not (record := self.store.read(job.id)).finished:
            seen.append(record.percent)
            await asyncio.sleep(0.001)
        self.assertEqual(seen, sorted(seen))

    async def test_a_damaged_record_is_told_and_the_others_stay(self) -> None:
        good, bad = self.store.new("serve", {}, []), self.store.new("serve", {}, [])
        path = self.folder / "jobs" / f"{bad.id}.json"
        for content in ("", "{", "[]", '{"id": 7}', '{"id": "x", "kind": "y", "state": "odd"}'):
            path.write_text(content)
            with self.subTest(content=content):
                self.assertEqual([job.id for job in self.store.all()], [good.id])
                with self.assertRaises(RigError) as caught:
                    self.store.read(bad.id)
                self.assertEqual(caught.exception.error_class, "NOT_FOUND")

    async def test_a_record_of_a_later_version_is_still_read(self) -> None:
        job = self.store.new("serve", {}, [])
        path = self.folder / "jobs" / f"{job.id}.json"
        write_json(path, json.loads(path.read_text()) | {"invented_later": 1})
        self.assertEqual(self.store.read(job.id), job)

    async def test_what_a_worker_writes_is_clean(self) -> None:
        job = self.store.new("serve", {}, [])
        progress = JobProgress(self.store, job)
        progress.update(message="\x1b[31mhf_AAAAAAAAAA11\x00", result={"log": "x" * 1_000_000})
        record = self.store.read(job.id)
        self.assertEqual(record.message, "[redacted]")
        self.assertLess(len(record.result["log"]), 40_000)

    async def test_old_jobs_are_forgotten_with_their_logs_but_no_unfinished_one(self) -> None:
        worker = await self.begun("forever")
        # As old as can be: nothing has been written for long.
        os.utime(self.folder / "jobs" / f"{worker.id}.json", (1, 1))
        self.store.write(worker.model_copy(update={"created_unix": 1.0}))
        old = []
        for number in range(part._JOBS_KEPT + 10):
            job = self.store.new("serve", {}, [])
            self.store.log(job.id).write_text("log")
            self.store.write(
                job.model_copy(update={"state": "done", "created_unix": 1000.0 + number})
            )
            old.append(job.id)
        last = self.store.new("serve", {}, [])
        kept = {job.id for job in self.store.all()}
        self.assertIn(worker.id, kept)
        self.assertIn(last.id, kept)
        self.assertEqual(len(kept), part._JOBS_KEPT + 1)
        self.assertEqual(kept - {worker.id, last.id}, set(old[-(part._JOBS_KEPT - 1) :]))
        logs = {path.stem for path in (self.folder / "jobs").glob("*.log")}
        self.assertEqual(logs, kept - {last.id})

    async def test_an_empty_store(self) -> None:
        self.assertEqual(JobStore(self.folder / "none", "x").all(), [])
        self.assertIsNone(JobStore(self.folder / "none", "x").active("serve"))

    async def test_a_label_says_whose_job_it_is(self) -> None:
        job = await self.begun("forever")
        environment = psutil.Process(job.worker_pid).environ()
        self.assertEqual(environment[LABEL_VARIABLE], f"{self.prefix};role=job;id={job.id}")


if __name__ == "__main__":
    unittest.main()
