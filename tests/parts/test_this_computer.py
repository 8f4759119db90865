"""The local plane with real processes, ports, files and other people's listeners.

A "model server" here is a tiny program that listens; what the plane believes of it comes from the
process table, as in earnest.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import psutil

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.ports import listener_pids
from forge.parts.ground.process import LABEL_VARIABLE, process_label
from forge.parts.ground.state import RigPaths, write_json
from forge.parts.planes import this_computer as part
from forge.parts.planes.plane import Instance, Launch
from forge.parts.planes.this_computer import (
    ThisComputer,
    tail_of_file,
)

LISTENER = """
    import socket, sys, time
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()
    print("listening", listener.getsockname()[1], flush=True)
    time.sleep(60)
"""
# As a server that forks its workers: the child listens, the leader only waits.
FORKING = """
    import subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
    time.sleep(60)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_closed(port: int, timeout_s: float) -> bool:
    """Whether nothing listens on `port` any more, within `timeout_s` seconds."""
    for _ in range(int(timeout_s / 0.1) + 1):
        if not listener_pids(port):
            return True
        await asyncio.sleep(0.1)
    return False


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.paths = RigPaths(state=self.folder / "state", cache=self.folder / "cache")
        self.prefix = f"rig=test;owner={os.getpid()}-{time.monotonic_ns()}"
        self.journal = Journal(self.paths.state / "journal.jsonl")
        self.plane = ThisComputer(self.paths, self.prefix, self.journal)
        self.addCleanup(self.end_servers)

    def end_servers(self) -> None:
        for process in psutil.process_iter():
            label = process_label(process.pid)
            if label is not None and label.startswith(self.prefix):
                os.kill(process.pid, signal.SIGKILL)

    def launch(self, script: str = LISTENER, port: int = 0, *more: str) -> Launch:
        port = port or free_port()
        argv = [sys.executable, "-uc", textwrap.dedent(script), str(port), *more]
        return Launch(argv, {"PATH": os.environ["PATH"]}, port, "a-model", "served-name")

    def stranger(self, port: int = 0) -> tuple[subprocess.Popen[str], int]:
        """Another user's program, so to say: no label, listens where it likes."""
        process = subprocess.Popen(
            [sys.executable, "-uc", textwrap.dedent(LISTENER), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process, int(process.stdout.readline().split()[1])

    async def listening(self, instance: Instance) -> str:
        """The endpoint, once the server has come up."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return await self.plane.endpoint(instance)
            except RigError as error:
                if error.error_class != "UNREACHABLE" or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def ended(self, instance: Instance) -> None:
        """Wait until the server's process is gone and collected."""
        deadline = time.monotonic() + 20
        while psutil.pid_exists(instance.pid or 0):
            process_label(instance.pid or 0)  # collects ended children
            self.assertLess(time.monotonic(), deadline, "the server did not end")
            await asyncio.sleep(0.02)

    async def refused(self, error_class: str, call: Callable[[], object]) -> RigError:
        with self.assertRaises(RigError) as caught:
            await call()  # type: ignore[misc]
        self.assertEqual(caught.exception.error_class, error_class, caught.exception)
        return caught.exception

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.journal.entries()]


class LifeTest(Case):
    async def test_start_find_ready_stop(self) -> None:
        launch = self.launch()
        instance = await self.plane.start(launch, "serve-1", "job-1")
        self.assertEqual((instance.state, instance.model), ("starting", "a-model"))
        self.assertEqual((instance.serve_id, instance.job_id), ("serve-1", "job-1"))
        self.assertEqual(process_label(instance.pid or 0), f"{self.prefix};role=server;id=serve-1")
        self.assertEqual((await self.plane.find()).instance, instance)
        self.assertEqual(await self.listening(instance), f"http://127.0.0.1:{launch.port}")

        ready = await self.plane.mark_ready(instance)
        self.assertEqual((await self.plane.find()).instance, ready)
        self.assertEqual(ready.state, "ready")

        await self.plane.stop(ready)
        self.assertFalse(psutil.pid_exists(instance.pid or 0))
        finding = await self.plane.find()
        self.assertEqual((finding.instance, tuple(finding.notes)), (None, ()))
        self.assertTrue(await wait_until_closed(launch.port, 5))
        self.assertEqual(
            self.events(),
            [
                "server start intended",
                "server started",
                "server ready",
                "server stop intended",
                "server stopped",
            ],
        )

    async def test_another_server_of_the_rig_sees_and_stops_the_same(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        other = ThisComputer(self.paths, self.prefix, self.journal)
        self.assertEqual((await other.find()).instance, instance)
        await other.stop(instance)
        self.assertIsNone((await self.plane.find()).instance)

    async def test_another_rig_and_another_installation_see_nothing(self) -> None:
        await self.plane.start(self.launch(), "serve-1", "job-1")
        elsewhere = RigPaths(state=self.folder / "other", cache=self.folder)
        for prefix in (self.prefix + "0", self.prefix[:-1], "rig=test;owner=someone"):
            plane = ThisComputer(elsewhere, prefix, Journal(self.folder / "j"))
            self.assertIsNone((await plane.find()).instance, prefix)

    async def test_stopping_what_is_gone_is_as_good_as_stopping_it(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        os.kill(instance.pid or 0, signal.SIGKILL)
        await self.plane.stop(instance)
        await self.plane.stop(instance)
        self.assertFalse((self.paths.state / "server.json").exists())

    async def test_stop_ends_the_servers_children_too(self) -> None:
        launch = self.launch(FORKING, 0, textwrap.dedent(LISTENER))
        instance = await self.plane.start(launch, "serve-1", "job-1")
        await self.listening(instance)
        await self.plane.stop(instance)
        self.assertTrue(await wait_until_closed(launch.port, 5), "a child still listens")

    async def test_workers_that_outlive_their_killed_leader_are_found_and_stopped(self) -> None:
        """vLLM's engine and worker stay in the leader's group, others make groups of their own."""
        apart = FORKING.replace("sys.argv[1]])", "sys.argv[1]], process_group=0)")
        self.assertNotEqual(apart, FORKING)
        for script in (FORKING, apart):
            with self.subTest(apart=script is apart):
                await self.leader_killed(self.launch(script, 0, textwrap.dedent(LISTENER)))

    async def leader_killed(self, launch: Launch) -> None:
        instance = await self.plane.start(launch, "serve-1", "job-1")
        await self.listening(instance)
        assert instance.pid is not None
        os.kill(instance.pid, signal.SIGKILL)
        await self.ended(instance)
        finding = await self.plane.find()
        assert finding.instance is not None
        self.assertNotEqual(finding.instance.pid, instance.pid)
        self.assertEqual(finding.instance.state, "starting", "a headless server is not ready")
        self.assertIn("live on", finding.notes[0])
        await self.plane.stop(finding.instance)
        self.assertTrue(await wait_until_closed(launch.port, 5), "the worker still listens")
        self.assertIsNone((await self.plane.find()).instance)

    async def test_the_intent_is_written_before_the_act(self) -> None:
        """A start that fails leaves its intent, no process, and a truthful answer."""
        launch = self.launch()
        broken = Launch(["/no/such/program"], {}, launch.port, "a-model", "x")
        await self.refused("NOT_FOUND", lambda: self.plane.start(broken, "serve-1", "job-1"))
        self.assertEqual(self.events(), ["server start intended"])
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertIn("broken off before its process existed", finding.notes[0])

    async def test_no_journal_no_server(self) -> None:
        self.journal.path.mkdir(parents=True)
        launch = self.launch()
        await self.refused("DENIED", lambda: self.plane.start(launch, "serve-1", "job-1"))
        self.assertIsNone((await self.plane.find()).instance)
        await self.plane.check_port(launch.port)

    async def test_files_are_private(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        for path in (self.paths.state / "server.json", Path(instance.log), self.journal.path):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600, path)
        for path in (self.paths.state, self.paths.logs):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o700, path)

    async def test_the_newest_logs_are_kept(self) -> None:
        self.paths.logs.mkdir(parents=True)
        for number in range(9):
            path = self.paths.logs / f"old-{number}.log"
            path.write_text("")
            os.utime(path, (number, number))
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        names = sorted(path.name for path in self.paths.logs.iterdir())
        self.assertEqual(names, ["old-5.log", "old-6.log", "old-7.log", "old-8.log", "serve-1.log"])
        await self.plane.stop(instance)


class TruthTest(Case):
    """What is told after something was killed, lost or damaged."""

    async def test_a_server_that_ended_by_itself(self) -> None:
        instance = await self.plane.start(self.launch("pass"), "serve-1", "job-1")
        await self.ended(instance)
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertIn(f"(pid {instance.pid}) has ended by itself", finding.notes[0])
        self.assertIn(instance.log, finding.notes[0])

    async def test_a_pid_that_belongs_to_somebody_else_now(self) -> None:
        instance = await self.plane.start(self.launch("pass"), "serve-1", "job-1")
        await self.ended(instance)
        process, _ = self.stranger()
        write_json(self.paths.state / "server.json", {**instance.model_dump(), "pid": process.pid})
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertIn(f"pid {process.pid} now belongs to another process", finding.notes[0])
        await self.plane.stop(instance.model_copy(update={"pid": process.pid}))
        self.assertIsNone(process.poll(), "the stranger was touched")

    async def test_a_server_whose_starter_was_killed_before_it_wrote_the_pid(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        write_json(self.paths.state / "server.json", {**instance.model_dump(), "pid": None})
        self.assertEqual((await self.plane.find()).instance, instance)

    async def test_a_server_without_any_record_is_adopted_by_its_label(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        await self.listening(instance)
        (self.paths.state / "server.json").unlink()
        finding = await self.plane.find()
        adopted = finding.instance
        assert adopted is not None
        self.assertEqual(
            (adopted.serve_id, adopted.pid, adopted.port), ("serve-1", instance.pid, instance.port)
        )
        self.assertEqual(adopted.state, "starting")
        self.assertIn("no record", finding.notes[0])
        await self.plane.stop(adopted)
        self.assertFalse(psutil.pid_exists(instance.pid or 0))

    async def test_a_damaged_record_is_put_aside_and_the_server_adopted(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        record = self.paths.state / "server.json"
        for content in ("", "{", "[]", "{}", '{"serve_id": 7}', '{"state": "odd"}'):
            record.write_text(content)
            with self.subTest(content=content):
                found = (await self.plane.find()).instance
                assert found is not None
                self.assertEqual(found.pid, instance.pid)
                self.assertFalse(record.exists())
                self.assertEqual(record.with_suffix(".damaged").read_text(), content)

    async def test_nothing_was_ever_started(self) -> None:
        finding = await self.plane.find()
        self.assertEqual((finding.instance, tuple(finding.notes)), (None, ()))
        error = await self.refused("NOT_FOUND", lambda: self.plane.logs(None, 10))
        self.assertEqual(error.next_step, "serve_model()")


class PortTest(Case):
    async def test_a_free_port_is_good_and_stays_free(self) -> None:
        port = free_port()
        await self.plane.check_port(port)
        await self.plane.check_port(port)

    async def test_a_port_in_use_is_named_with_its_owner_and_nothing_starts(self) -> None:
        process, port = self.stranger()
        launch = self.launch(port=port)
        for call in (
            lambda: self.plane.check_port(port),
            lambda: self.plane.start(launch, "serve-1", "job-1"),
        ):
            error = await self.refused("EXISTS", call)
            self.assertIn(f"port {port} is in use by", error.what)
            self.assertIn(f"(pid {process.pid})", error.what)
            self.assertIn("PORT", error.next_step)
        self.assertEqual(self.events(), [])
        self.assertIsNone(process.poll())

    async def test_a_listener_on_all_addresses_counts_too(self) -> None:
        with socket.socket() as listener:
            listener.bind(("0.0.0.0", 0))
            listener.listen()
            port = listener.getsockname()[1]
            await self.refused("EXISTS", lambda: self.plane.check_port(port))

    async def test_connections_that_linger_do_not_block_a_restart(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = listener.getsockname()
            with socket.create_connection(address) as client:
                accepted, _ = listener.accept()
                accepted.close()  # the server's side closes first: its port lingers
                self.assertEqual(client.recv(1), b"")
        await self.plane.check_port(address[1])

    def test_only_a_sensible_port_is_a_setting(self) -> None:
        for port, good in ((1023, False), (1024, True), (65535, True), (65536, False)):
            with self.subTest(port=port):
                if good:
                    self.assertEqual(part.ThisComputerSettings(port=port).port, port)
                else:
                    with self.assertRaises(ValueError):
                        part.ThisComputerSettings(port=port)


class EndpointTest(Case):
    """No byte of a prompt goes to a stranger: the address is proven before it is given."""

    async def test_not_listening_yet(self) -> None:
        launch = self.launch("import time; time.sleep(60)")
        instance = await self.plane.start(launch, "serve-1", "job-1")
        error = await self.refused("UNREACHABLE", lambda: self.plane.endpoint(instance))
        self.assertIn(f"port {launch.port} yet", error.what)

    async def test_a_stranger_on_the_port_of_our_living_server(self) -> None:
        launch = self.launch("import time; time.sleep(60)")
        instance = await self.plane.start(launch, "serve-1", "job-1")
        process, _ = self.stranger(launch.port)
        error = await self.refused("DENIED", lambda: self.plane.endpoint(instance))
        self.assertIn(f"(pid {process.pid})", error.what)

    async def test_a_stranger_on_the_port_of_our_dead_server(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        await self.listening(instance)
        os.kill(instance.pid or 0, signal.SIGKILL)
        self.assertTrue(await wait_until_closed(instance.port, 5))
        self.stranger(instance.port)
        await self.refused("NOT_FOUND", lambda: self.plane.endpoint(instance))

    async def test_a_listening_child_is_the_servers_own(self) -> None:
        launch = self.launch(FORKING, 0, textwrap.dedent(LISTENER))
        instance = await self.plane.start(launch, "serve-1", "job-1")
        self.assertEqual(await self.listening(instance), f"http://127.0.0.1:{launch.port}")

    async def test_another_label_under_the_pid(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        await self.listening(instance)
        other = instance.model_copy(update={"serve_id": "serve-2"})
        await self.refused("NOT_FOUND", lambda: self.plane.endpoint(other))


class LogTest(Case):
    def write(self, content: bytes) -> Path:
        path = self.folder / "x.log"
        path.write_bytes(content)
        return path

    def test_the_last_lines(self) -> None:
        path = self.write(b"one\ntwo\nthree\n")
        self.assertEqual(tail_of_file(path, 2)[0], "two\nthree")
        self.assertEqual(tail_of_file(path, 99)[0], "one\ntwo\nthree")
        self.assertEqual(tail_of_file(self.write(b"one\ntwo"), 1)[0], "two")
        self.assertEqual(tail_of_file(self.write(b""), 5), ("", 0))
        self.assertEqual(tail_of_file(self.write(b"\n\n\n"), 5)[0], "")

    def test_of_a_progress_bar_only_its_last_state_stays(self) -> None:
        bar = b"\r".join(b"loading %3d%%" % percent for percent in range(101))
        text, _ = tail_of_file(self.write(b"start\n" + bar + b"\nready\r\nend\n"), 10)
        self.assertEqual(text, "start\nloading 100%\nready\nend")

    def test_30_mb_are_not_read_and_the_end_is_whole(self) -> None:
        with (self.folder / "x.log").open("wb") as file:
            file.write(b"FIRST\n")
            file.write((b"y" * 99 + b"\n") * 300_000)
            file.write(b"the error\n")
        text, before = tail_of_file(self.folder / "x.log", 3)
        self.assertEqual(text, "\n".join(["y" * 99, "y" * 99, "the error"]))
        self.assertGreater(before, 29_900_000)
        text, _ = tail_of_file(self.folder / "x.log", 1_000_000)
        self.assertLess(len(text), 400_001)
        self.assertTrue(text.endswith("the error"))

    def test_one_endless_line(self) -> None:
        text, before = tail_of_file(self.write(b"z" * 5_000_000 + b"END"), 10)
        self.assertTrue(text.endswith("zEND"))
        self.assertEqual(len(text), 400_000)
        self.assertEqual(before, 4_600_003)

    def test_any_bytes(self) -> None:
        text, _ = tail_of_file(self.write(bytes(range(256)) + b"\nlast"), 10)
        self.assertTrue(text.endswith("\nlast"))
        text.encode()

    async def test_the_server_that_runs_and_the_last_one(self) -> None:
        script = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(60)"
        instance = await self.plane.start(self.launch(script), "serve-1", "job-1")
        while "err" not in Path(instance.log).read_text():
            await asyncio.sleep(0.02)
        for given in (instance, None):
            text = await self.plane.logs(given, 10)
            self.assertTrue(text.startswith(f"{instance.log} (last 10 lines"))
            self.assertEqual(text.split("\n")[1:], ["out", "err"])


class RoomTest(Case):
    async def test_it_is_what_the_system_says_at_most(self) -> None:
        room = await self.plane.room(self.folder / "not" / "there" / "yet")
        memory = psutil.virtual_memory()
        self.assertLessEqual(room.memory_total, memory.total)
        self.assertTrue(0 < room.memory_available <= room.memory_total)
        free = psutil.disk_usage(str(self.folder)).free
        self.assertAlmostEqual(room.disk_free, free, delta=2e9)

    def group(self, path: str, limit: str, current: str = "0", stat_rows: str = "") -> None:
        """The kernel's files of a control group, with its own forms of content."""
        (self.folder / "proc/self").mkdir(parents=True, exist_ok=True)
        (self.folder / "proc/self/cgroup").write_text(f"0::{path}\n")
        group = self.folder / "sys/fs/cgroup" / path.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(stat_rows)

    def test_a_control_groups_limit_and_use_without_its_page_cache(self) -> None:
        rows = "anon 100\nfile 900\ninactive_file 300\nactive_file 600\n"
        for path in ("/", "/user.slice/a.scope", "/docker/0123"):
            self.group(path, "8000000000", "2000", rows)
            self.assertEqual(part._control_group_memory(self.folder), (8_000_000_000, 1700))

    def test_no_limit_no_group_no_sense(self) -> None:
        self.assertEqual(part._control_group_memory(self.folder), (None, 0))
        self.group("/a", "max", "5000")
        self.assertEqual(part._control_group_memory(self.folder), (None, 0))
        for limit, current in (("", "1"), ("many", "1"), ("5", ""), ("5", "x")):
            self.group("/a", limit, current)
            self.assertEqual(part._control_group_memory(self.folder), (None, 0))
        (self.folder / "proc/self/cgroup").write_text("")
        self.assertEqual(part._control_group_memory(self.folder), (None, 0))

    def test_the_tightest_group_above_counts_too(self) -> None:
        self.group("/pod", "9000", "8000")
        self.group("/pod/inner", "max", "5")
        self.assertEqual(part._control_group_memory(self.folder), (9000, 8000))
        self.group("/pod/inner", "4000", "3500")
        self.assertEqual(part._control_group_memory(self.folder), (4000, 3500))
        self.group("/pod/inner", "4000", "500")
        self.assertEqual(part._control_group_memory(self.folder), (9000, 8000))

    def test_of_several_hierarchies_the_unified_one_counts(self) -> None:
        self.group("/a", "7000", "10", "inactive_file 3\n")
        (self.folder / "proc/self/cgroup").write_text("4:memory:/old\n1:name=systemd:/x\n0::/a\n")
        self.assertEqual(part._control_group_memory(self.folder), (7000, 7))


class LabelTest(Case):
    async def test_the_label_is_exact_and_the_environment_is_the_launchs(self) -> None:
        instance = await self.plane.start(self.launch(), "serve-1", "job-1")
        environment = psutil.Process(instance.pid).environ()
        self.assertEqual(environment.pop(LABEL_VARIABLE), self.plane.label("serve-1"))
        environment.pop("LC_CTYPE", None)  # Python's own coercion of the C locale
        self.assertEqual(set(environment), {"PATH"})

    async def test_the_journal_tells_what_was_started(self) -> None:
        launch = self.launch()
        instance = await self.plane.start(launch, "serve-1", "job-1")
        intent, started = self.journal.entries()
        self.assertEqual((intent["serve_id"], intent["port"]), ("serve-1", launch.port))
        self.assertEqual(intent["argv"][-1], str(launch.port))
        self.assertEqual(started["pid"], instance.pid)
        json.dumps([intent, started])


if __name__ == "__main__":
    unittest.main()
