"""Starting programs: bounds, bad bytes, timeouts, and that nothing is left behind.

Every program here is a real one. Who is alive is asked of the process table, never of the part.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
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

from forge.parts.ground import process as part
from forge.parts.ground.errors import RigError
from forge.parts.ground.process import (
    LABEL_VARIABLE,
    find_labelled,
    process_label,
    run_program,
    spawn_detached,
    stop_detached,
)

ROOT = Path(__file__).resolve().parents[2]
# Ends by itself, so that a failing test leaves nothing for long.
SLEEPER = "import time; time.sleep(30)"


def python(script: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script)]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(what: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return what()


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        # Unique a test, so that no other run's process is ever met.
        self.label = f"test={os.getpid()};id={self.id()};at={time.monotonic_ns()}"
        self.addCleanup(self.end_own_processes)

    def end_own_processes(self) -> None:
        for pid in part.labelled_family(self.label):
            os.kill(pid, signal.SIGKILL)

    def refused(self, error_class: str, caught: RigError) -> str:
        self.assertEqual(caught.error_class, error_class)
        return str(caught)

    def read_pids(self, name: str, count: int) -> list[int]:
        """The pids that a program of the test wrote into `name`, once they are all there."""
        path = self.folder / name
        self.assertTrue(
            until(lambda: path.exists() and len(path.read_text().split()) == count),
            "the program of the test did not come up",
        )
        return [int(word) for word in path.read_text().split()]


class RunTest(Case):
    async def test_status_and_both_streams(self) -> None:
        done = await run_program(
            python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"),
            timeout_s=20,
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (3, "out\n", "err\n"))
        self.assertEqual(done.dropped, 0)

    async def test_a_program_ended_by_a_signal_says_so(self) -> None:
        done = await run_program(
            python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)"), timeout_s=20
        )
        self.assertEqual(done.returncode, -signal.SIGTERM)

    async def test_arguments_are_never_read_by_a_shell(self) -> None:
        hostile = [
            "$(touch P)",
            "`touch P`",
            "; touch P #",
            "a\nb",
            "*",
            "--help",
            "'\"\\",
            " ",
            "",
        ]
        done = await run_program(
            [*python("import sys; print(ascii(sys.argv[1:]))"), *hostile],
            timeout_s=20,
            folder=self.folder,
        )
        self.assertEqual(done.stdout.strip(), ascii(hostile))
        self.assertEqual(list(self.folder.iterdir()), [])

    async def test_standard_input_is_closed(self) -> None:
        begun = time.monotonic()
        done = await run_program(["cat"], timeout_s=20)
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        self.assertLess(time.monotonic() - begun, 10)

    async def test_it_is_a_session_of_its_own(self) -> None:
        done = await run_program(
            python("import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))"), timeout_s=20
        )
        self.assertEqual(done.stdout, "True\n")

    async def test_environment_and_folder_are_the_given_ones(self) -> None:
        done = await run_program(
            [
                "/bin/sh",
                "-c",
                'echo "$ONE|$HOME|$(pwd -P)"',
            ],
            timeout_s=20,
            environment={"ONE": "1"},
            folder=self.folder,
        )
        self.assertEqual(done.stdout.strip(), f"1||{self.folder.resolve()}")

    async def test_a_missing_program_is_named(self) -> None:
        with self.assertRaises(RigError) as caught:
            await run_program(["no-such-program-anywhere", "x"], timeout_s=5)
        self.assertIn("no-such-program-anywhere", self.refused("NOT_FOUND", caught.exception))

    async def test_what_cannot_be_started_is_an_error_and_not_a_crash(self) -> None:
        plain = self.folder / "plain.txt"
        plain.write_text("no program")
        for argv in ([str(plain)], [str(self.folder)], ["echo", "a\0b"], ["echo", "\ud800"]):
            with self.subTest(argv=ascii(argv)), self.assertRaises(RigError) as caught:
                await run_program(argv, timeout_s=5)
            self.refused("NOT_FOUND", caught.exception)
        with self.assertRaises(RigError):
            await run_program(["echo"], timeout_s=5, folder=self.folder / "absent")

    async def test_all_bytes_come_through_replaced_not_raised(self) -> None:
        done = await run_program(
            python("import os; os.write(1, bytes(range(256))); os.write(2, b'\\xff\\x00\\xc3')"),
            timeout_s=20,
        )
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stdout, bytes(range(256)).decode("utf-8", "replace"))
        self.assertIn("\ufffd", done.stderr)
        done.stdout.encode()  # no lone surrogate is in it


class OutputTest(Case):
    async def test_30_mb_keep_head_and_tail_while_the_loop_lives(self) -> None:
        script = """
            import os
            os.write(1, b"FIRST LINE\\n")
            block = b"x" * 999_999 + b"\\n"
            for _ in range(30):
                rest = block
                while rest:
                    rest = rest[os.write(1, rest):]
            os.write(1, b"LAST LINE\\n")
        """
        gaps: list[float] = []

        async def heartbeat() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        heart = asyncio.create_task(heartbeat())
        before = psutil.Process().memory_info().rss
        done = await run_program(python(script), timeout_s=60)
        heart.cancel()
        self.assertTrue(done.stdout.startswith("FIRST LINE\n"))
        self.assertTrue(done.stdout.endswith("LAST LINE\n"))
        written = 30_000_000 + len("FIRST LINE\n") + len("LAST LINE\n")
        self.assertEqual(done.dropped, written - part.OUTPUT_LIMIT)
        self.assertIn(f"{done.dropped} bytes left out", done.stdout)
        self.assertLess(len(done.stdout), part.OUTPUT_LIMIT + 100)
        self.assertLess(psutil.Process().memory_info().rss - before, 50e6)
        self.assertGreater(len(gaps), 3)
        self.assertLess(max(gaps), 1.0, "the event loop stood still")

    async def test_both_streams_at_once_do_not_block_each_other(self) -> None:
        script = """
            import os
            for _ in range(100):
                os.write(2, b"e" * 10_000)
                os.write(1, b"o" * 10_000)
        """
        done = await run_program(python(script), timeout_s=30)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.dropped, 2 * (1_000_000 - part.OUTPUT_LIMIT))

    async def test_limits_at_their_edges(self) -> None:
        for size in (0, 1, 299, 300, 301, 1000):
            done = await run_program(
                python(f"import os; os.write(1, b'a' * {size})"), timeout_s=20, output_limit=300
            )
            with self.subTest(size=size):
                self.assertEqual(done.stdout.count("a"), min(size, 300))
                self.assertEqual(done.dropped, max(0, size - 300))

    async def test_a_character_cut_in_two_by_the_limit_is_replaced(self) -> None:
        done = await run_program(
            python("import os; os.write(1, 'é'.encode() * 1000)"), timeout_s=20, output_limit=300
        )
        self.assertEqual(set(done.stdout.split("\n")[0]), {"é"})
        done = await run_program(
            python("import os; os.write(1, b'a' + 'é'.encode() * 1000)"),
            timeout_s=20,
            output_limit=300,
        )
        self.assertEqual(set(done.stdout.split("\n")[0]), {"a", "é", "\ufffd"})


class InputTest(Case):
    async def test_what_is_given_arrives_whole_and_then_ends(self) -> None:
        script = """
            import hashlib, sys
            print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())
        """
        data = bytes(range(256)) * 40_000  # 10 MB, far beyond a pipe's buffer
        done = await run_program(python(script), timeout_s=30, given=data)
        self.assertEqual(done.stdout.strip(), hashlib.sha256(data).hexdigest())

    async def test_a_program_that_does_not_read_ends_all_the_same(self) -> None:
        for script in ("print('no')", "import sys; sys.stdin.close(); print('no')"):
            done = await run_program(python(script), timeout_s=30, given=b"x" * 5_000_000)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "no"))

    async def test_one_that_hangs_on_its_input_is_stopped(self) -> None:
        with self.assertRaises(RigError) as caught:
            await run_program(python(SLEEPER), timeout_s=0.5, given=b"x" * 5_000_000)
        self.assertEqual(caught.exception.error_class, "TIMEOUT")


class EndTest(Case):
    """The program, what it started, and what that started: all gone after the call."""

    FAMILY = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(30)"
        child = subprocess.Popen([sys.executable, "-c", inner])
        with open("pids.part", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename("pids.part", "pids")
        time.sleep(30)
    """

    async def test_timeout_ends_program_and_grandchild(self) -> None:
        begun = time.monotonic()
        with self.assertRaises(RigError) as caught:
            await run_program(python(self.FAMILY), timeout_s=1, folder=self.folder)
        self.assertLess(time.monotonic() - begun, 10)
        self.assertIn("1 s", self.refused("TIMEOUT", caught.exception))
        for pid in self.read_pids("pids", 2):
            self.assertTrue(until(lambda pid=pid: not alive(pid)), f"{pid} is left")

    async def test_cancellation_ends_program_and_grandchild(self) -> None:
        task = asyncio.create_task(
            run_program(python(self.FAMILY), timeout_s=30, folder=self.folder)
        )
        pids = await asyncio.to_thread(self.read_pids, "pids", 2)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        for pid in pids:
            self.assertTrue(until(lambda pid=pid: not alive(pid)), f"{pid} is left")

    async def test_no_zombie_stays(self) -> None:
        await run_program(["true"], timeout_s=10)
        with self.assertRaises(RigError):
            await run_program(python(SLEEPER), timeout_s=0.5)
        children = psutil.Process().children()
        self.assertEqual([c for c in children if c.status() == psutil.STATUS_ZOMBIE], [])

    async def test_a_grandchild_that_holds_the_pipes_does_not_delay_a_success(self) -> None:
        begun = time.monotonic()
        done = await run_program(["/bin/sh", "-c", "sleep 30 & echo $!; exit 4"], timeout_s=20)
        self.assertLess(time.monotonic() - begun, 10)
        self.assertEqual(done.returncode, 4)
        self.assertTrue(until(lambda: not alive(int(done.stdout))), "the grandchild is left")

    async def test_a_daemon_that_left_the_group_does_not_turn_success_into_failure(self) -> None:
        script = f"""
            import subprocess, sys
            daemon = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
            print(daemon.pid, flush=True)
        """
        done = await run_program(python(script), timeout_s=20)
        os.kill(int(done.stdout), signal.SIGKILL)  # alive, or this raises
        self.assertEqual(done.returncode, 0)

    async def test_many_at_once(self) -> None:
        async def one(number: int) -> str:
            return (await run_program(["echo", str(number)], timeout_s=30)).stdout.strip()

        self.assertEqual(
            await asyncio.gather(*map(one, range(20))), [str(number) for number in range(20)]
        )
        self.assertEqual(part._attached_groups, set())

    async def test_a_server_ended_by_a_signal_takes_its_programs_along(self) -> None:
        """The real thing in another process: os._exit skips every finally."""
        script = f"""
            import asyncio
            from forge.parts.ground.process import leave_on_signals, run_program
            family = {textwrap.dedent(self.FAMILY)!r}
            leave_on_signals()
            asyncio.run(run_program([{sys.executable!r}, "-c", family], timeout_s=30))
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with self.subTest(signal=number.name):
                (self.folder / "pids").unlink(missing_ok=True)
                server = subprocess.Popen(
                    python(script),
                    cwd=self.folder,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                )
                pids = await asyncio.to_thread(self.read_pids, "pids", 2)
                server.send_signal(number)
                self.assertEqual(server.wait(10), 128 + number)
                for pid in pids:
                    self.assertTrue(until(lambda pid=pid: not alive(pid)), f"{pid} is left")


class DetachedTest(Case):
    def spawn(self, script: str, label: str = "", **environment: str) -> int:
        return spawn_detached(
            python(script),
            label=label or self.label,
            environment={"PATH": os.environ["PATH"], **environment},
            log=self.folder / "logs" / "x.log",
            folder=self.folder,
        )

    async def test_it_runs_labelled_and_its_output_lands_in_a_private_log(self) -> None:
        script = """
            import os, sys, time
            print("to stdout", sorted(k for k in os.environ if k.startswith("GEMMA4")), flush=True)
            print("to stderr", os.environ["A"], sys.stdin.read() == "", file=sys.stderr, flush=True)
            time.sleep(30)
        """
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        pid = self.spawn(script, A="b")
        log = self.folder / "logs" / "x.log"
        self.assertTrue(until(lambda: "stderr" in log.read_text()))
        self.assertEqual(log.read_text(), f"to stdout ['{LABEL_VARIABLE}']\nto stderr b True\n")
        self.assertEqual(stat.S_IMODE(log.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(log.parent.stat().st_mode), 0o700)
        self.assertEqual(os.getpgid(pid), pid)
        self.assertEqual(process_label(pid), self.label)
        self.assertEqual(find_labelled(self.label), [pid])

    async def test_one_that_becomes_another_program_keeps_its_label_all_the_while(self) -> None:
        """A tunnel's program does: between the two the kernel shows no environment of it."""
        again = self.folder / "again.sh"
        again.write_text('test "$1" -lt 1500 && exec /bin/sh "$0" $(($1 + 1))\nexec sleep 30\n')
        pid = spawn_detached(
            ["/bin/sh", str(again), "0"],
            label=self.label,
            environment={"PATH": os.environ["PATH"]},
            log=self.folder / "logs" / "x.log",
            folder=self.folder,
        )
        seen: list[str | None] = []
        while "sleep" not in " ".join(psutil.Process(pid).cmdline()):
            seen.append(process_label(pid))
        self.assertGreater(len(seen), 100)
        self.assertEqual(set(seen), {self.label})

    async def test_it_outlives_the_one_that_started_it(self) -> None:
        script = f"""
            import os, sys
            from pathlib import Path
            from forge.parts.ground.process import leave_on_signals, spawn_detached
            leave_on_signals()
            here = Path.cwd()
            pid = spawn_detached([sys.executable, "-c", {SLEEPER!r}], label={self.label!r},
                environment=os.environ, log=here / "x.log", folder=here)
            print(pid, flush=True)
            os.kill(os.getpid(), 15)
        """
        done = subprocess.run(
            python(script),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=30,
        )
        self.assertEqual(done.returncode, 128 + signal.SIGTERM, done.stderr)
        pid = int(done.stdout)
        self.assertEqual(find_labelled(self.label), [pid])
        self.assertTrue(await stop_detached(pid, self.label, 5))
        self.assertFalse(alive(pid))

    async def test_a_link_in_the_logs_place_is_refused_and_nothing_starts(self) -> None:
        target = self.folder / "precious"
        target.write_text("kept")
        (self.folder / "logs").mkdir()
        (self.folder / "logs" / "x.log").symlink_to(target)
        with self.assertRaises(RigError) as caught:
            self.spawn(SLEEPER)
        self.refused("DENIED", caught.exception)
        self.assertEqual(target.read_text(), "kept")
        self.assertEqual(find_labelled(self.label), [])

    async def test_what_cannot_be_started_is_named(self) -> None:
        for argv, error_class, word in (
            (["/no/such/program"], "NOT_FOUND", "/no/such/program"),
            ([sys.executable, "a\0b"], "DENIED", "null"),
            ([str(self.folder)], "DENIED", str(self.folder)),
        ):
            with self.subTest(argv=argv), self.assertRaises(RigError) as caught:
                spawn_detached(
                    argv,
                    label=self.label,
                    environment={},
                    log=self.folder / "x.log",
                    folder=self.folder,
                )
            self.assertIn(word, self.refused(error_class, caught.exception))

    async def test_ended_children_are_gone_and_no_zombies(self) -> None:
        pid = self.spawn("pass")
        gone = until(lambda: process_label(pid) is None and not psutil.pid_exists(pid))
        self.assertTrue(gone, "it was not collected")

    async def test_another_ones_zombie_carries_no_label(self) -> None:
        """A dead worker whose parent still runs: in the table, and yet not alive."""
        script = f"""
            import os, subprocess, sys, time
            child = subprocess.Popen([sys.executable, "-c", "pass"],
                env={{"{LABEL_VARIABLE}": {self.label!r}}}, start_new_session=True)
            print(child.pid, flush=True)
            time.sleep(30)
        """
        parent = subprocess.Popen(python(script), stdout=subprocess.PIPE, text=True)
        self.addCleanup(parent.wait)
        self.addCleanup(parent.kill)
        assert parent.stdout is not None
        self.addCleanup(parent.stdout.close)
        pid = int(parent.stdout.readline())
        zombie = psutil.Process(pid)
        self.assertTrue(until(lambda: zombie.status() == psutil.STATUS_ZOMBIE))
        self.assertIsNone(process_label(pid))
        self.assertEqual(find_labelled(self.label), [])
        self.assertTrue(await stop_detached(pid, self.label, 1))

    async def test_labels_match_whole(self) -> None:
        pid = self.spawn(SLEEPER, label=self.label)
        other = self.spawn(SLEEPER, label=self.label + "0")
        self.addCleanup(os.kill, other, signal.SIGKILL)
        self.assertEqual(find_labelled(self.label), [pid])
        self.assertEqual(find_labelled(self.label + "0"), [other])
        self.assertEqual(find_labelled(self.label[:-1]), [])

    async def test_the_oldest_comes_first(self) -> None:
        first = self.spawn(SLEEPER)
        time.sleep(0.05)
        second = self.spawn(SLEEPER)
        self.assertEqual(find_labelled(self.label), [first, second])

    async def test_processes_of_others_have_no_label(self) -> None:
        self.assertIsNone(process_label(1))
        self.assertIsNone(process_label(2**30))
        plain = subprocess.Popen(python(SLEEPER))
        self.addCleanup(plain.wait)
        self.addCleanup(plain.kill)
        self.assertIsNone(process_label(plain.pid))

    async def test_a_pid_that_belongs_to_another_label_is_never_touched(self) -> None:
        """A pid given to another process since: simulated by asking with another label."""
        pid = self.spawn(SLEEPER)
        self.assertTrue(await stop_detached(pid, self.label + ";other", 0.2))
        self.assertTrue(alive(pid))
        self.assertEqual(process_label(pid), self.label)

    async def test_stop_is_gentle_first(self) -> None:
        script = """
            import signal, sys, time
            def leave(*_):
                print("tidied up", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, leave)
            print("up", flush=True)
            time.sleep(30)
        """
        pid = self.spawn(script)
        log = self.folder / "logs" / "x.log"
        self.assertTrue(until(lambda: log.read_text() == "up\n"))
        self.assertTrue(await stop_detached(pid, self.label, 10))
        self.assertEqual(log.read_text(), "up\ntidied up\n")
        self.assertFalse(alive(pid))

    async def test_stop_ends_what_ignores_sigterm_with_its_group(self) -> None:
        pid = self.spawn(EndTest.FAMILY)
        pids = self.read_pids("pids", 2)
        self.assertEqual(pids[0], pid)
        begun = time.monotonic()
        self.assertTrue(await stop_detached(pid, self.label, 0.5))
        self.assertGreater(time.monotonic() - begun, 0.4)
        for each in pids:
            self.assertTrue(until(lambda each=each: not alive(each)), f"{each} is left")

    async def test_stop_also_ends_a_worker_that_outlives_its_leader(self) -> None:
        """The leader goes on SIGTERM; one child ignores it, another has a session of its own."""
        script = f"""
            import subprocess, sys, time
            deaf = "import signal, time; signal.signal(15, 1); print(1); time.sleep(30)"
            pipes = {{"stdout": subprocess.PIPE, "text": True}}
            a = subprocess.Popen([sys.executable, "-uc", deaf], **pipes)
            b = subprocess.Popen([sys.executable, "-uc", deaf], start_new_session=True, **pipes)
            a.stdout.readline(), b.stdout.readline()
            with open("pids.part", "w") as file:
                file.write(f"{{a.pid}} {{b.pid}}")
            import os
            os.rename("pids.part", "pids")
            {SLEEPER}
        """
        pid = self.spawn(script)
        pids = self.read_pids("pids", 2)
        self.assertTrue(await stop_detached(pid, self.label, 10))
        for each in (pid, *pids):
            self.assertTrue(until(lambda each=each: not alive(each)), f"{each} is left")

    async def test_stopping_twice_is_fine(self) -> None:
        pid = self.spawn(SLEEPER)
        self.assertTrue(await stop_detached(pid, self.label, 5))
        self.assertTrue(await stop_detached(pid, self.label, 5))


if __name__ == "__main__":
    unittest.main()
