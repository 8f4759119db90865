"""One holder at a time: between tasks, between processes, and after a holder was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.locks import held_lock

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
    import asyncio, sys
    from pathlib import Path
    from forge.parts.ground.locks import held_lock

    async def hold():
        async with held_lock(Path("."), "serving"):
            print("held", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        print("left", flush=True)

    asyncio.run(hold())
"""


class LocksTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def holder(self) -> subprocess.Popen[str]:
        """Another process that holds the lock until it gets a line."""
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self.addCleanup(process.wait)
        self.addCleanup(process.stdin.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "held\n")
        return process

    def release(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    async def test_busy_while_another_process_holds_it(self) -> None:
        process = self.holder()
        with self.assertRaises(RigError) as caught:
            async with held_lock(self.folder, "serving", wait_s=0.2):
                self.fail("two holders at once")
        self.assertEqual(caught.exception.error_class, "BUSY")
        self.assertIn("serving", caught.exception.what)
        self.assertEqual(caught.exception.next_step, "get_system_status()")
        async with held_lock(self.folder, "another purpose", wait_s=0):
            pass
        self.release(process)
        async with held_lock(self.folder, "serving", wait_s=10):
            pass

    async def test_waiting_ends_as_soon_as_it_is_free(self) -> None:
        process = self.holder()
        waiter = asyncio.create_task(self.once())
        await asyncio.sleep(0.2)
        self.assertFalse(waiter.done())
        self.release(process)
        await asyncio.wait_for(waiter, 10)

    async def once(self) -> None:
        async with held_lock(self.folder, "serving", wait_s=20):
            pass

    async def test_a_killed_holder_blocks_nobody(self) -> None:
        process = self.holder()
        process.send_signal(signal.SIGKILL)
        process.wait()
        async with held_lock(self.folder, "serving", wait_s=5):
            pass

    async def test_tasks_of_one_process_take_turns(self) -> None:
        inside = 0
        most = 0
        rounds = 0

        async def work() -> None:
            nonlocal inside, most, rounds
            async with held_lock(self.folder, "serving", wait_s=30):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.01)
                inside -= 1
                rounds += 1

        await asyncio.gather(*(work() for _ in range(8)))
        self.assertEqual((most, rounds), (1, 8))

    async def test_a_cancelled_waiter_leaves_nothing_locked(self) -> None:
        async with held_lock(self.folder, "serving"):
            waiter = asyncio.create_task(self.once())
            await asyncio.sleep(0.1)
            waiter.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiter
        async with held_lock(self.folder, "serving", wait_s=0):
            pass

    async def test_an_error_inside_frees_it(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            async with held_lock(self.folder, "serving"):
                raise ZeroDivisionError
        async with held_lock(self.folder, "serving", wait_s=0):
            pass

    async def test_its_file_is_private(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        async with held_lock(self.folder / "new", "serving"):
            path = self.folder / "new" / "serving.lock"
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)

    async def test_what_cannot_be_locked_is_denied(self) -> None:
        (self.folder / "serving.lock").mkdir()
        with self.assertRaises(RigError) as caught:
            async with held_lock(self.folder, "serving", wait_s=0.1):
                self.fail("a folder was locked as a file")
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertIn("serving.lock", caught.exception.what)


if __name__ == "__main__":
    unittest.main()
