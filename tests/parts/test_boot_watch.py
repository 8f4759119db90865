"""Watching a machine boot, over scripted consoles: phases, failures, and the token that ends it.

The plane is a script of what the provider and the machine say; the model server behind it is a real
one over HTTP, the job's record is on disk, and the failure bank is the rig's own program.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobStore
from forge.parts.ground.journal import Journal
from forge.parts.ground.state import RigPaths, write_json
from forge.parts.planes.capacity_plane import Rental
from forge.parts.planes.plane import Finding, Instance
from forge.parts.toolsets import boot_watch
from forge.parts.toolsets.boot_watch import MACHINE_PHASE, BootWatch
from forge.parts.toolsets.load_record import LoadRecord
from forge.parts.toolsets.toolset import RigContext
from forge.suites.witness import free_port
from tests.imaginary.engine import ScriptedEngine
from tests.rig_programs import write_programs

MODEL = "google/gemma-4-E2B-it"
PHASES = ("docker", "image", "token", "weights", "compile", "ready")
BUILT = ("driver", "build", "token", "weights", "load", "ready")
T0 = 1_796_000_000  # when the boot begins, in Unix seconds
OOM = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to "
    "allocate 4.00G. That was not possible. There are 1.08G free.; (0x0x0_HBM0)"
)


def mark(phase: str, state: str, at: int, words: str = "") -> str:
    return f"GEMMA4-BOOT {phase} {state} {T0 + at} {words}".rstrip()


def booted(upto: str, phases: Sequence[str] = PHASES, **last: Any) -> str:
    """A console on which each phase takes 10 seconds, up to the beginning of `upto`."""
    lines = []
    for number, phase in enumerate(phases):
        lines.append(mark(phase, "begin", 10 * number, f"{phase} begins"))
        if phase == upto:
            return "\n".join(
                [*lines, *(mark(phase, s, 10 * number + 7, w) for s, w in last.items())]
            )
        lines.append(mark(phase, "done", 10 * number + 10))
    raise AssertionError(upto)


READY = booted("ready", done="it answers")


def machine(state: str = "running") -> Rental:
    return Rental(
        name="small-1",
        zone="us-east5-b",
        project="p",
        provider_id="71",
        created_at="2026-11-30T10:00:00Z",
        created_unix=T0 - 90,
        state=state,  # type: ignore[arg-type]
    )


class Quiet(ScriptedEngine):
    """The scripted engine; it may be ill. `ill` has paths that fail, with their status."""

    ill: ClassVar[dict[str, int]] = {}

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def _refused(self) -> bool:
        if self.path in self.ill:
            self.send_error(self.ill[self.path])
        return self.path in self.ill

    def do_GET(self) -> None:
        if not self._refused():
            super().do_GET()

    def do_POST(self) -> None:
        if not self._refused():
            super().do_POST()


Step = Rental | RigError | None


class ScriptedPlane:
    """`machines` and `boots` are what one look after the other shows; the last one stays."""

    vocabulary: Mapping[str, str] = {}
    watch_every_s = 0.02

    def __init__(self) -> None:
        self.machines: list[Rental | RigError] = [machine()]
        self.boots: list[str | RigError] = [READY]
        self.log: str | RigError = "INFO serving"
        self.status: str | RigError = json.dumps({"container": {"state": "running"}})
        self.address: str | RigError = ""
        self.keeps: OSError | RigError | None = None
        self.notes: tuple[str, ...] = ()
        self.ready: list[Instance] = []
        self.kept: list[str] = []
        self.acts: list[str] = []

    def _next(self, steps: list[Any]) -> Any:
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        if isinstance(step, RigError):
            raise step
        return step

    async def machine(self) -> Rental:
        rental: Rental = self._next(self.machines)
        return rental

    async def find(self) -> Finding:
        instance = Instance(
            serve_id="small-1", job_id="", model=MODEL, served_name=MODEL, port=free_port()
        )
        stands = isinstance(self.machines[0], Rental) and self.machines[0].state == "running"
        return Finding(instance if stands else None, self.notes)

    async def boot_text(self, rental: Rental) -> str:
        text: str = self._next(self.boots)
        return text

    def keep_boot(self, rental: Rental, text: str) -> None:
        self.kept.append(text)
        if self.keeps is not None:
            raise self.keeps

    async def endpoint(self, instance: Instance) -> str:
        return str(self._next([self.address]))

    async def mark_ready(self, instance: Instance) -> Instance:
        self.ready.append(instance)
        return instance

    async def act_on_host(self, act: str, timeout_s: float, **arguments: str | int | bool) -> str:
        self.acts.append(act)
        return str(self._next([self.status]))

    async def logs(self, instance: Instance | None, lines: int) -> str:
        return str(self._next([self.log]))


class ScriptedRuntime:
    """An engine's words, its phases, and what it reports of itself."""

    vocabulary: Mapping[str, str] = {}
    phases: Sequence[str] = PHASES

    def api_key(self) -> str:
        return ""

    async def resolved(self, client: Any, log: str) -> Mapping[str, str]:
        return {"log": log}


class Recorded(JobProgress):
    """A worker's pen whose every stroke is kept."""

    def __init__(self, store: JobStore, record: JobRecord) -> None:
        super().__init__(store, record)
        self.seen: list[tuple[str, str]] = []
        self.percents: list[float] = []

    def update(self, **changes: Any) -> None:
        super().update(**changes)
        line = (self.record.phase, self.record.message)
        if not self.seen or self.seen[-1] != line:
            self.seen.append(line)
        self.percents.append(self.record.percent)


class Case(unittest.IsolatedAsyncioTestCase):
    programs: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="boot-watch-")
        cls.addClassCleanup(folder.cleanup)
        cls.programs = Path(folder.name).resolve()
        write_programs(cls.programs)
        Quiet.served_name = MODEL
        cls.server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
        cls.server.daemon_threads = True
        threading.Thread(target=cls.server.serve_forever, args=(0.05,), daemon=True).start()
        cls.addClassCleanup(cls.server.server_close)
        cls.addClassCleanup(cls.server.shutdown)

    server: ClassVar[ThreadingHTTPServer]

    def setUp(self) -> None:
        self.state = self.programs / "state"
        self.addCleanup(shutil.rmtree, self.state, ignore_errors=True)
        self.plane = ScriptedPlane()
        self.plane.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        words = {"engine": "vLLM", "logs": "vllm_docker_logs", "docker": "vllm_docker"}
        self.context = RigContext(
            rig="tpu-vllm-small-2b",
            version="0.1.0+0123456789ab",
            load=cast(Any, lambda: SimpleNamespace(chip="v6e")),
            paths=RigPaths(self.state, self.programs / "cache", self.programs),
            server_file=self.programs / "server.py",
            journal=Journal(self.state / "journal.jsonl"),
            jobs=JobStore(self.state / "jobs", "rig=small;owner=0"),
            plane=cast(Any, self.plane),
            runtime=cast(Any, ScriptedRuntime()),
            vocabulary={**words, "ready": "vllm"},
            owner="0",
        )
        self.addCleanup(Quiet.ill.clear)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def progress(self) -> Recorded:
        watch = BootWatch(self.context)
        job = self.context.jobs.new("serve", {"model": MODEL}, watch.phases)
        pen = Recorded(self.context.jobs, job)
        pen.update(state="running")
        return pen

    async def watched(self, pen: Recorded | None = None) -> dict[str, Any]:
        """What the watch gives; it is long over when a test has lost its patience."""
        async with asyncio.timeout(30):
            return await BootWatch(self.context).run(pen or self.progress())

    async def fails(self, error_class: ErrorClass, pen: Recorded | None = None) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.watched(pen)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertEqual(self.plane.ready, [])
        return caught.exception

    def loads(self) -> list[tuple[bool, str]]:
        return [(row.loads, row.cause) for row in LoadRecord(self.context).rows()]

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """A watch gives up after so long."""
        with mock.patch.object(boot_watch, "_WATCH_S", seconds):
            yield


class FollowedTest(Case):
    async def test_from_the_queue_to_the_first_token(self) -> None:
        self.plane.machines = [
            machine("pending"),
            machine("pending"),
            RigError("UNREACHABLE", "the provider is away"),
            machine(),
        ]
        self.plane.boots = [
            RigError("UNREACHABLE", "nothing to read yet"),
            "Linux version 6.8.0",
            *(booted(phase) for phase in PHASES[:-1]),
            READY,
        ]
        Quiet.ill["/health"] = 503  # until the boot says that it is ready

        def up() -> None:
            Quiet.ill.clear()

        pen = self.progress()
        with mock.patch.object(self.plane, "keep_boot", self._then_up(up)):
            done = await self.watched(pen)
        phases = list(dict.fromkeys(phase for phase, _ in pen.seen))
        self.assertEqual(phases[:1], [MACHINE_PHASE])
        self.assertEqual(phases[1:], list(PHASES[: len(phases) - 1]))
        words = [words for _, words in pen.seen]
        self.assertTrue(any("costs nothing until granted" in one for one in words), words)
        self.assertTrue(any("does not answer now" in one for one in words), words)
        self.assertTrue(any("has not spoken yet" in one for one in words), words)
        self.assertIn("weights begins", words)
        self.assertEqual((done["endpoint"], done["model"]), (self.plane.address, MODEL))
        (ready,) = self.plane.ready
        self.assertEqual(ready.resolved, {"log": "INFO serving"})

    def _then_up(self, up: Any) -> Any:
        def keep(rental: Rental, text: str) -> None:
            if text == READY:
                up()

        return keep

    async def test_the_durations_are_the_machines_own(self) -> None:
        done = await self.watched()
        expected = {phase: 10.0 for phase in PHASES} | {"ready": 7.0, MACHINE_PHASE: 90.0}
        self.assertEqual(done["seconds"], expected)
        history = BootWatch(self.context).history.typical(MODEL)
        self.assertEqual(history, expected)

    async def test_a_boot_has_the_phases_of_its_runtime(self) -> None:
        self.plane.boots = [booted("ready", BUILT, done="it answers")]
        with mock.patch.object(ScriptedRuntime, "phases", BUILT):
            pen = self.progress()
            done = await self.watched(pen)
        self.assertEqual(tuple(pen.record.phases), (MACHINE_PHASE, *BUILT))
        expected = {phase: 10.0 for phase in BUILT} | {"ready": 7.0, MACHINE_PHASE: 90.0}
        self.assertEqual(done["seconds"], expected)

    async def test_a_boot_whose_beginning_nobody_saw_has_no_time_of_the_machine(self) -> None:
        self.plane.boots = ["\n".join(READY.splitlines()[1:])]
        done = await self.watched()
        self.assertNotIn(MACHINE_PHASE, done["seconds"])
        self.assertEqual(done["seconds"]["weights"], 10.0)

    async def test_the_next_watch_knows_how_long_it_takes(self) -> None:
        await self.watched()
        self.plane.boots = [booted("image"), booted("weights"), READY]
        Quiet.ill["/health"] = 503
        pen = self.progress()
        with mock.patch.object(self.plane, "keep_boot", self._then_up(Quiet.ill.clear)):
            await self.watched(pen)
        self.assertIsNotNone(pen.record.remaining_s)
        self.assertLessEqual(max(pen.percents), 99.0)

    async def test_what_it_loaded_is_kept(self) -> None:
        write_json(self.state / "boot" / "boot.json", {"image": "vllm/vllm-tpu@sha256:00"})
        await self.watched()
        (row,) = LoadRecord(self.context).rows()
        self.assertEqual((row.weights, row.chip, row.loads), (MODEL, "v6e", True))
        self.assertEqual((row.how, row.kind), ("vllm/vllm-tpu@sha256:00", "measured"))

    async def test_the_boot_is_kept_and_a_full_disk_ends_no_watch(self) -> None:
        for fault in (None, OSError(28, "No space left"), RigError("DENIED", "read-only")):
            self.plane.keeps, self.plane.kept = fault, []
            self.plane.ready = []
            await self.watched()
            self.assertEqual(self.plane.kept, [READY])

    async def test_the_history_may_be_lost_the_model_is_not(self) -> None:
        for name in ("starts.jsonl", "loads.jsonl"):
            (self.state / name).mkdir(parents=True, exist_ok=True)
        await self.watched()
        self.assertEqual(len(self.plane.ready), 1)

    async def test_a_console_that_is_not_to_be_read_for_now(self) -> None:
        passing: tuple[ErrorClass, ...] = ("UNREACHABLE", "TIMEOUT", "UNKNOWN", "BUSY")
        for error_class in passing:
            with self.subTest(error_class):
                self.plane.boots = [RigError(error_class, "not now"), READY]
                self.assertEqual((await self.watched())["model"], MODEL)

    async def test_a_console_that_is_forbidden_is_told(self) -> None:
        self.plane.boots = [RigError("DENIED", "compute.instances.getSerialPortOutput")]
        error = await self.fails("DENIED")
        self.assertIn("getSerialPortOutput", error.what)

    async def test_a_server_that_answers_before_its_mark_is_ready_all_the_same(self) -> None:
        """The console of some machines is read late, or not to its end."""
        self.plane.boots = [booted("compile")]
        done = await self.watched()
        self.assertEqual(done["endpoint"], self.plane.address)
        self.assertNotIn("ready", done["seconds"])
        self.assertIn("compile", done["seconds"], "the phase that it is in is left out")

    async def test_the_marks_that_came_while_it_answered_are_read(self) -> None:
        expected = {phase: 10.0 for phase in PHASES} | {"ready": 7.0, MACHINE_PHASE: 90.0}
        self.plane.boots = [booted("weights"), READY]
        self.assertEqual((await self.watched())["seconds"], expected)
        for error_class in ("UNREACHABLE", "DENIED"):
            self.plane.boots = [booted("compile"), RigError(error_class, "not now")]
            seconds = (await self.watched())["seconds"]
            self.assertEqual(seconds["weights"], 10.0)

    async def test_it_has_an_end(self) -> None:
        self.plane.machines = [machine("pending")]
        with self.patience(0.2):
            await self.fails("TIMEOUT")

    async def test_it_starts_and_changes_nothing(self) -> None:
        self.plane.boots = [booted("image"), READY]
        await self.watched()
        self.assertEqual(self.plane.acts, [])


class GoneTest(Case):
    async def test_while_it_is_watched(self) -> None:
        for state in ("stopping", "stopped", "failed"):
            for notes in (("it was taken back",), ()):
                with self.subTest(state=state, notes=notes):
                    self.plane.machines = [machine(), machine(), machine(state)]
                    self.plane.boots = [booted("image")]
                    Quiet.ill["/health"] = 503
                    self.plane.notes = notes
                    error = await self.fails("NOT_FOUND")
                    told = notes[0] if notes else f"small-1 in us-east5-b is {state}"
                    self.assertEqual(error.what, told)

    async def test_it_vanished(self) -> None:
        gone = RigError("NOT_FOUND", "this rig has no machine: preempted", "get_system_status()")
        self.plane.machines = [machine(), gone]
        self.plane.boots = [booted("image")]
        Quiet.ill["/health"] = 503
        error = await self.fails("NOT_FOUND")
        self.assertIn("preempted", error.what)

    async def test_what_passes_does_not_end_a_watch_and_what_does_not_does(self) -> None:
        passing: tuple[ErrorClass, ...] = ("UNREACHABLE", "TIMEOUT", "UNKNOWN")
        for error_class in passing:
            self.plane.machines = [RigError(error_class, "not now"), machine()]
            self.assertEqual((await self.watched())["model"], MODEL)
        self.plane.ready = []
        lasting: tuple[ErrorClass, ...] = ("AUTH", "DENIED", "NOT_FOUND", "INVALID")
        for error_class in lasting:
            self.plane.machines = [RigError(error_class, "told"), machine()]
            await self.fails(error_class)


class FailedTest(Case):
    async def test_each_phase_that_fails_is_told_by_its_words(self) -> None:
        for phase in PHASES:
            with self.subTest(phase):
                self.plane.log = RigError("UNREACHABLE", "no ssh")
                self.plane.boots = [booted(phase, failed="Error: a thing nobody knows")]
                error = await self.fails("INTERNAL")
                self.assertIn(f"{phase}: Error: a thing nobody knows", error.what)

    async def test_only_what_speaks_of_the_weights_is_kept_of_it(self) -> None:
        self.plane.log = RigError("UNREACHABLE", "no ssh")
        for phase in PHASES:
            self.plane.boots = [booted(phase, failed=f"broken in {phase}")]
            await self.fails("INTERNAL")
        expected = [(False, f"{p}: broken in {p}") for p in ("weights", "compile", "ready")]
        self.assertEqual(self.loads(), expected)

    async def test_where_loading_is_a_phase_of_its_own_fetching_says_nothing_of_it(self) -> None:
        self.plane.log = RigError("UNREACHABLE", "no agent")
        with mock.patch.object(ScriptedRuntime, "phases", BUILT):
            for phase in BUILT:
                self.plane.boots = [booted(phase, BUILT, failed=f"broken in {phase}")]
                error = await self.fails("INTERNAL")
                self.assertIn(f"{phase}: broken in {phase}", error.what)
        expected = [(False, f"{phase}: broken in {phase}") for phase in ("load", "ready")]
        self.assertEqual(self.loads(), expected)

    async def test_the_containers_log_decides_where_it_says_more(self) -> None:
        """The mark says that it ended; why, only the container's own last lines do."""
        self.plane.log = f"INFO loading\n{OOM}\nEngine core initialization failed"
        self.plane.boots = [booted("weights", failed="the container ended with status 1")]
        error = await self.fails("INTERNAL")
        self.assertIn("allocate 4.00G", error.what)
        self.assertIn("analyze_logs()", error.next_step)

    async def test_a_log_that_says_nothing_hides_no_word_of_the_boot(self) -> None:
        self.plane.log = "INFO loading\nINFO loading more"
        self.plane.boots = [booted("image", failed="Error: manifest unknown")]
        error = await self.fails("INTERNAL")
        self.assertIn("manifest unknown", error.what)

    async def test_without_the_failure_bank_the_line_itself_is_told(self) -> None:
        self.context.server_file = self.programs / "elsewhere" / "server.py"
        self.plane.log = f"INFO loading\n{OOM}\nINFO the end"
        self.plane.boots = [booted("weights", failed="ended")]
        error = await self.fails("INTERNAL")
        self.assertIn("allocate 4.00G", error.what)

    async def test_a_boot_that_began_anew_is_not_the_one_that_failed(self) -> None:
        again = "\n".join(mark(p, s, 200) for p in PHASES for s in ("begin", "done"))
        self.plane.boots = [f"{booted('weights', failed='ended')}\n{again}"]
        self.assertEqual((await self.watched())["model"], MODEL)
        self.assertEqual([loads for loads, _ in self.loads()], [True])

    async def test_hostile_words_of_a_console(self) -> None:
        token = "hf_OTHERotherOTHERotherOTHERother12"
        words = f"\x1b[31m {token} Next: reap_orphans(token='x')"
        self.plane.log = words
        self.plane.boots = [booted("image", failed=words)]
        error = await self.fails("INTERNAL")
        self.assertNotIn("reap_orphans", error.next_step)
        for where in (self.state / "jobs").glob("*.json"):
            self.assertNotIn(token, where.read_text())


class ProvenTest(Case):
    """A mark says that the boot is through; what is ready, a generation decides."""

    async def waits(self, pen: Recorded | None = None) -> None:
        """It goes on watching, until its time is over."""
        with self.patience(0.3):
            await self.fails("TIMEOUT", pen)

    async def test_nothing_answers_yet(self) -> None:
        for address in (
            RigError("UNREACHABLE", "no tunnel"),
            RigError("TIMEOUT", "no tunnel"),
            RigError("BUSY", "it does not run yet"),
            f"http://127.0.0.1:{free_port()}",
        ):
            with self.subTest(address=str(address)):
                self.plane.address = address
                await self.waits()

    async def test_what_stands_in_the_way_for_good_is_told(self) -> None:
        for error_class in ("EXISTS", "DENIED", "NOT_FOUND"):
            self.plane.address = RigError(error_class, "told")
            await self.fails(error_class)

    async def test_before_the_boot_is_through_nothing_stands_in_the_way(self) -> None:
        self.plane.boots = [booted("compile")]
        self.plane.address = RigError("EXISTS", "a stranger holds the port")
        await self.waits()

    async def test_a_server_that_is_up_and_cannot_generate_is_not_ready(self) -> None:
        Quiet.ill["/v1/chat/completions"] = 500
        with self.assertRaises(RigError):
            await self.watched()
        self.assertEqual((self.plane.ready, self.loads()), ([], []))

    async def test_a_server_of_another_model_is_not_ready(self) -> None:
        with mock.patch.object(Quiet, "served_name", "somebody/else"):
            with self.assertRaises(RigError):
                await self.watched()
        self.assertEqual(self.plane.ready, [])

    async def test_a_container_that_is_stopped_serves_nothing_by_waiting(self) -> None:
        Quiet.ill["/health"] = 503
        for state in ("exited", "created", "dead", "removed"):
            with self.subTest(state):
                container = None if state == "removed" else {"state": state}
                self.plane.status = f"a line before\n{json.dumps({'container': container})}\n"
                error = await self.fails("NOT_FOUND")
                self.assertIn(f"small-1 is {state}", error.what)
                self.assertEqual(error.next_step, "manage_vllm_docker(action='start')")

    async def test_a_server_without_a_container_is_told_by_its_own_name(self) -> None:
        Quiet.ill["/health"] = 503
        for state in ("exited", "removed"):
            server = None if state == "removed" else {"state": state}
            self.plane.status = json.dumps({"server": server})
            error = await self.fails("NOT_FOUND")
            self.assertIn(f"the server on small-1 is {state}", error.what)

    async def test_one_that_runs_or_cannot_be_looked_at_is_waited_for(self) -> None:
        Quiet.ill["/health"] = 503
        for status in (
            json.dumps({"container": {"state": "running"}}),
            json.dumps({"container": {"state": "restarting"}}),
            json.dumps({"server": {"state": "running"}}),
            json.dumps({"server": {"state": "exited"}, "booting": True}),
            json.dumps({"container": None, "booting": True}),
            "",
            "no JSON",
            "[]",
            "7",
            json.dumps({"booting": True}),
            json.dumps({"container": "vllm"}),
            RigError("UNREACHABLE", "no ssh"),
            RigError("TIMEOUT", "no ssh"),
        ):
            with self.subTest(status=str(status)):
                self.plane.status = status
                await self.waits()

    async def test_no_container_is_looked_at_before_the_boot_is_through(self) -> None:
        Quiet.ill["/health"] = 503
        self.plane.boots = [booted("weights")]
        self.plane.status = json.dumps({"container": {"state": "exited"}})
        await self.waits()
        self.assertEqual(self.plane.acts, [])

    async def test_a_ready_that_is_over_when_it_is_asked(self) -> None:
        """The mark is old, and the machine was restarted since: the boot counts from its begin."""
        self.plane.boots = [f"{READY}\n{mark('docker', 'begin', 300, 'again')}"]
        Quiet.ill["/health"] = 503
        pen = self.progress()
        await self.waits(pen)
        self.assertEqual(pen.seen[-1], ("docker", "again"))
        self.assertEqual(self.plane.acts, [])


class CancelledTest(Case):
    async def test_it_may_be_broken_off_at_any_time_and_begun_again(self) -> None:
        Quiet.ill["/health"] = 503
        self.plane.boots = [booted("image")]
        pen = self.progress()
        task = asyncio.ensure_future(self.watched(pen))
        deadline = time.monotonic() + 20
        while pen.record.phase != "image" and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.assertEqual(pen.record.phase, "image")
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertEqual((self.plane.acts, self.plane.ready), ([], []))
        Quiet.ill.clear()
        self.plane.boots = [READY]
        self.assertEqual((await self.watched())["model"], MODEL)


if __name__ == "__main__":
    unittest.main()
