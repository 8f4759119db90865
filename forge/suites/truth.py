"""What the records say against what is so: dead processes, strangers, damaged files, a full disk.

The process table decides. Nothing of a stranger's is touched, and no prompt reaches him.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.suites.rig_case import RigCase
from forge.suites.witness import LABEL_IN_ENVIRONMENT


@contextmanager
def stranger_process(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not the rig's; it must still live at the end, or the test fails."""
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(program, start_new_session=True, env={**os.environ, **environment})
    try:
        yield process
        if process.poll() is not None:
            raise AssertionError("a process that is not the rig's was killed")
    finally:
        process.kill()
        process.wait()


@contextmanager
def stranger_on(port: int) -> Iterator[list[bytes]]:
    """A listener on `port` that belongs to this test; the list holds whatever it was sent."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", port))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                try:
                    received.append(connection.recv(65536))
                except OSError:
                    received.append(b"")

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


class TruthSuite(RigCase):
    """The rig tells what is so, and never takes a stranger's for its own."""

    @property
    def record(self) -> Path:
        """The record of the model server."""
        return self.rig_state / "server.json"

    def rewrite_record(self, **changes: Any) -> None:
        """Change fields of the model server's record behind the rig's back."""
        self.record.write_text(json.dumps({**json.loads(self.record.read_text()), **changes}))

    async def kill_model_server(self) -> int:
        """SIGKILL to the model server, as the system does when memory runs out."""
        (pid,) = self.processes("server")
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: not self.processes("server"), "it did not die")
        return pid

    async def test_the_model_server_died(self) -> None:
        async with self.in_process() as client, self.in_process() as other:
            await self.serve(client)
            pid = await self.kill_model_server()
            for each in (client, other):
                status = await self.answer(each, "get_system_status")
                self.assertEqual((status["state"], status["pid"]), ("stopped", None))
                self.assertIn(f"pid {pid}", " ".join(status["notes"]))
                self.assertIn("ended by itself", " ".join(status["notes"]))
                text = await self.refusal(each, "query_gemma4", "NOT_FOUND", prompt="hello")
                self.assertIn("ended by itself", text)
                await self.refusal(each, "verify_model_health", "NOT_FOUND")
                waited = await self.answer(each, "wait_for_model_ready")
                self.assertEqual(waited["state"], "stopped")

    async def test_the_worker_died_while_it_started_the_model(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            (worker,) = self.processes("job")
            os.kill(worker, signal.SIGKILL)
            await self.until(lambda: not self.processes("job"), "it did not die")
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "lost")
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "failed")
            self.assertEqual([status["pid"]], self.processes("server"))
            self.assertIn("half-started", " ".join(status["notes"]))
            await self.refusal(client, "serve_model", "EXISTS")
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_another_process_under_the_recorded_pid(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            await self.kill_model_server()
            label = "rig=local-pytorch-cpu-2b;owner=0123456789abcdef;role=server;id=other"
            for environment in ({}, {LABEL_IN_ENVIRONMENT: label}):
                with stranger_process(**environment) as stranger:
                    self.rewrite_record(pid=stranger.pid)
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual((status["state"], status["pid"]), ("stopped", None))
                    self.assertIn("another process", " ".join(status["notes"]))
                    await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
                    await self.answer(client, "stop_model")

    async def test_a_job_record_with_a_strangers_pid(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            path = self.rig_state / "jobs" / f"{begun['job_id']}.json"
            for pid in self.processes("job"):
                os.kill(pid, signal.SIGKILL)
            await self.until(lambda: not self.processes("job"), "the worker did not die")
            with stranger_process() as stranger:
                record = json.loads(path.read_text())
                path.write_text(json.dumps({**record, "worker_pid": stranger.pid}))
                job = await self.answer(client, "cancel_job", job_id=begun["job_id"])
                self.assertIn(job["state"], ("cancelled", "lost"))
            await self.assert_all_gone()

    async def test_a_stranger_holds_the_port(self) -> None:
        with stranger_on(self.port) as received:
            async with self.in_process() as client:
                text = await self.refusal(client, "serve_model", "EXISTS")
                self.assertIn(str(self.port), text)
                self.assertIn(f"pid {os.getpid()}", text)
                self.assertIn("PORT", text)
                self.assertEqual(self.processes(), [])
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["state"], "stopped")
        self.assertEqual(b"".join(received), b"")
        async with self.in_process() as client:
            await self.serve(client)

    async def test_a_stranger_at_the_address_gets_no_prompt(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            with stranger_on(port) as received:
                self.rewrite_record(port=port)
                for tool, arguments in (
                    ("query_gemma4", {"prompt": "a secret question"}),
                    ("query_gemma4_with_stats", {"prompt": "a secret question"}),
                    ("verify_model_health", {}),
                    ("get_endpoint", {}),
                ):
                    text = await self.refusal(client, tool, "DENIED", **arguments)
                    self.assertIn(str(port), text)
                status = await self.answer(client, "get_system_status")
                self.assertEqual((status["state"], status["endpoint"]), ("failed", ""))
            self.assertEqual(received, [], "a stranger was spoken to")
            stopped = await self.answer(client, "stop_model")
            self.assertEqual(stopped["state"], "stopped")
            await self.assert_all_gone()

    async def test_a_damaged_record_hides_no_process(self) -> None:
        for number, damage in enumerate(
            (b"", b"{", b"[]", b'"text"', b"\xff\x00", b'{"pid": "x"}')
        ):
            with self.subTest(damage):
                async with self.in_process() as client:
                    if number == 0:
                        await self.serve(client)
                    self.record.write_bytes(damage)
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual([status["pid"]], self.processes("server"))
                    self.assertIn("no record", " ".join(status["notes"]))
                    await self.refusal(client, "serve_model", "EXISTS")
        async with self.in_process() as client:
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_a_damaged_job_record_is_told_and_harms_no_other(self) -> None:
        async with self.in_process() as client:
            outcome = await self.serve(client)
            good = self.rig_state / "jobs" / f"{outcome['job_id']}.json"
            for number, damage in enumerate((b"", b"{", b"[1]", b"\xff", b'{"id": 5}')):
                name = f"serve-20260101-00000{number}-abcdef"
                good.with_name(f"{name}.json").write_bytes(damage)
                await self.refusal(client, "get_job", "NOT_FOUND", job_id=name)
                await self.refusal(client, "cancel_job", "NOT_FOUND", job_id=name)
            job = await self.answer(client, "get_job", job_id=outcome["job_id"])
            self.assertEqual(job["state"], "done")
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "ready")

    async def test_a_torn_and_a_foreign_line_in_the_journal(self) -> None:
        self.rig_state.mkdir(parents=True, exist_ok=True)
        journal = self.rig_state / "journal.jsonl"
        journal.unlink(missing_ok=True)
        with journal.open("ab") as file:
            file.write(b'{"v": 99, "event": "from the future"}\n\xff\xfe\x00 binary\n{"v": 1, "ev')
        async with self.in_process() as client:
            await self.serve(client)
        lines = journal.read_bytes().splitlines()
        self.assertIn(b'{"v": 1, "ev', lines, "the torn line was changed")
        whole = [json.loads(line) for line in lines if line.startswith(b'{"v": 1, "at"')]
        events = [entry["event"] for entry in whole]
        self.assertEqual(events.count("server ready"), 1)
        self.assertLess(events.index("server start intended"), events.index("server started"))
        journal.write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in whole))

    async def test_the_whole_state_folder_vanished_while_it_served(self) -> None:
        import shutil

        async with self.in_process() as client:
            await self.serve(client)
            (pid,) = self.processes("server")
            shutil.rmtree(self.rig_state)
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["pid"], pid)
            await self.answer(client, "stop_model")
            await self.assert_all_gone()
