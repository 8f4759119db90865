"""The record of a model server with real processes and ports: who counts as it, and who listens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.ports import listening_ports
from forge.parts.ground.process import LABEL_VARIABLE, process_label
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import Instance
from forge.parts.planes.server_book import ServerBook
from forge.suites.witness import free_port

PREFIX = "rig=some-rig;owner=0123456789abcdef"
LISTENER = """
import socket, sys, time
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
time.sleep(600)
"""
IDLER = "import time; time.sleep(600)"


class BookCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.book = ServerBook(RigPaths(self.folder, self.folder / "cache"), PREFIX)
        self.file = self.folder / "server.json"

    def process(self, text: str, *words: str, label: str = "") -> int:
        """A process of its own group, under `label`, that lives until the test ends."""
        child = subprocess.Popen(
            [sys.executable, "-c", text, *words],
            env={**os.environ, LABEL_VARIABLE: label},
            start_new_session=True,
        )
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        self.until(lambda: process_label(child.pid) == label)
        return child.pid

    def until(self, holds: object) -> None:
        assert callable(holds)
        deadline = time.monotonic() + 30
        while not holds():
            self.assertLess(time.monotonic(), deadline, "it never came to be")
            time.sleep(0.02)

    def instance(self, pid: int | None, port: int = 0, serve_id: str = "serve-1") -> Instance:
        return Instance(
            serve_id=serve_id,
            job_id="",
            state="ready",
            model="embedded",
            served_name="embedded",
            port=port,
            pid=pid,
        )

    def refusal(self, instance: Instance) -> RigError:
        with self.assertRaises(RigError) as caught:
            self.book.address(instance)
        return caught.exception


class TestRecord(BookCase):
    def test_what_was_written_is_read_and_is_for_this_user_alone(self) -> None:
        self.assertIsNone(self.book.read())
        self.book.write(self.instance(4711, 8017))
        self.assertEqual(self.book.read(), self.instance(4711, 8017))
        self.assertEqual(self.file.stat().st_mode & 0o077, 0)

    def test_a_damaged_record_is_put_aside(self) -> None:
        for text in ("", "[]", '{"serve_id": 1}', json.dumps({"port": "x"})):
            with self.subTest(text):
                self.file.write_text(text)
                self.assertIsNone(self.book.read())
                self.assertFalse(self.file.exists())
                self.assertEqual((self.folder / "server.damaged").read_text(), text)

    def test_only_the_record_of_that_server_is_forgotten(self) -> None:
        self.book.write(self.instance(4711))
        self.book.forget("serve-2")
        self.assertTrue(self.file.exists())
        self.book.forget("serve-1")
        self.assertFalse(self.file.exists())
        self.book.forget("serve-1")


class TestLive(BookCase):
    def test_a_process_with_the_exact_label_is_the_server(self) -> None:
        pid = self.process(IDLER, label=self.book.label("serve-1"))
        self.book.write(self.instance(pid))
        self.assertEqual(self.book.live(), self.instance(pid))

    def test_any_other_process_under_that_pid_is_not(self) -> None:
        labels = (
            "",
            self.book.label("serve-2"),
            self.book.label("serve-1") + "0",
            self.book.label("serve-1").replace("some-rig", "some-rig-2"),
            self.book.label("serve-1").replace("owner=0", "owner=1"),
        )
        for label in labels:
            with self.subTest(label):
                self.book.write(self.instance(self.process(IDLER, label=label)))
                self.assertIsNone(self.book.live())

    def test_without_a_pid_or_a_process_nothing_lives(self) -> None:
        self.assertIsNone(self.book.live())
        self.book.write(self.instance(None))
        self.assertIsNone(self.book.live())
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        child.wait()
        self.book.write(self.instance(child.pid))
        self.assertIsNone(self.book.live())


class TestAddress(BookCase):
    def test_the_server_s_own_port_is_its_address(self) -> None:
        port = free_port()
        pid = self.process(LISTENER, str(port), label=self.book.label("serve-1"))
        self.until(lambda: port in listening_ports(pid))
        self.assertEqual(self.book.address(self.instance(pid, port)), f"http://127.0.0.1:{port}")

    def test_one_that_does_not_listen_yet(self) -> None:
        pid = self.process(IDLER, label=self.book.label("serve-1"))
        error = self.refusal(self.instance(pid, free_port()))
        self.assertEqual(error.error_class, "UNREACHABLE")

    def test_a_stranger_on_the_port_gets_nothing(self) -> None:
        pid = self.process(IDLER, label=self.book.label("serve-1"))
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            port = int(stranger.getsockname()[1])
            error = self.refusal(self.instance(pid, port))
        self.assertEqual(error.error_class, "DENIED")
        self.assertIn(f"(pid {os.getpid()})", error.what)

    def test_one_that_is_gone_or_somebody_else_s(self) -> None:
        port = free_port()
        other = self.process(LISTENER, str(port), label=self.book.label("serve-2"))
        self.until(lambda: port in listening_ports(other))
        for pid in (None, other):
            error = self.refusal(self.instance(pid, port))
            self.assertEqual(error.error_class, "NOT_FOUND")


if __name__ == "__main__":
    unittest.main()
