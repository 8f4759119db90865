"""server.py's commands, run as programs and in process, and the server over its real transports."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import ClassVar
from unittest import mock

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from forge.parts.assembly.command_line import _typed_arguments, run_rig
from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import RigError
from forge.rigs.local_pytorch_cpu_2b import RIG

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys
from pathlib import Path
from forge.parts.assembly.command_line import run_rig
from forge.rigs.local_pytorch_cpu_2b import RIG
sys.exit(run_rig(RIG, Path(__file__)))
"""
SECRET = "hf_" + "Zq9" * 11


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Case(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = Path(place.name)
        self.folder = self.place / "rig"
        self.folder.mkdir()
        self.server = self.folder / "server.py"
        self.server.write_text(SERVER)
        self.port = free_port()
        self.settings(MODEL_NAME="embedded", PORT=str(self.port))
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "HOME": str(self.place / "home"),
            "XDG_STATE_HOME": str(self.place / "state"),
            "XDG_CACHE_HOME": str(self.place / "cache"),
        }
        patch = mock.patch.dict(os.environ, self.environment, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        # `call` makes signals end the process; that must not outlive the test.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def settings(self, **values: str) -> None:
        text = "".join(f"{key}={value}\n" for key, value in values.items())
        (self.folder / "tpu.env").write_text(text)

    def run_here(self, *argv: str) -> tuple[int, str, str]:
        """Exit status, output and errors of a command, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run_rig(RIG, self.server, list(argv))
            except SystemExit as leaving:
                status = int(leaving.code or 0)
        return status, out.getvalue(), err.getvalue()

    def start(self, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(self.server), *argv],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            self.addCleanup(stream.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process


class CallTest(Case):
    def test_the_list_of_tools(self) -> None:
        status, out, _ = self.run_here("call", "list")
        self.assertEqual(status, 0)
        for tool in AssembledRig(RIG, self.server).tools():
            self.assertRegex(out, rf"(?m)^{tool.name} .*\({tool.effect}\)$")

    def test_a_call_prints_the_text_or_the_structure(self) -> None:
        status, out, err = self.run_here("call", "get_system_status")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("embedded is stopped", out.split("\n")[0])
        status, out, _ = self.run_here("call", "get_system_status", "--json")
        value = json.loads(out)
        self.assertEqual((status, value["state"], value["rig"]), (0, "stopped", RIG.name))
        self.assertEqual(value["settings"]["PORT"], f"{self.port} (tpu.env)")

    def test_a_failed_call_is_status_1_and_speaks_on_stderr(self) -> None:
        status, out, err = self.run_here("call", "query_gemma4", "prompt=Hi")
        self.assertEqual((status, out), (1, ""))
        self.assertTrue(err.startswith("NOT_FOUND no model is being served"), err)
        self.assertIn("Next: serve_model()", err)

    def test_the_gate_is_the_same_as_a_clients(self) -> None:
        for words, beginning in (
            (["serve_model", "modell=x"], "INVALID modell: "),
            (["serve_model", "wait_s=99"], "INVALID wait_s: "),
            (["serve_model", "wait_s=soon"], "INVALID wait_s: "),
            (["serve_model", "model=../x"], "INVALID model: "),
            (["serve_model", "model=7"], "INVALID model: "),
            (["get_job", "job_id=x"], "INVALID job_id: "),
            (["query_gemma4"], "INVALID prompt: "),
            (["get_server_logs", "lines=0"], "INVALID lines: "),
        ):
            with self.subTest(words=words):
                status, out, err = self.run_here("call", *words)
                self.assertEqual((status, out), (1, ""))
                self.assertTrue(err.startswith(beginning), err)
        with mock.patch.dict(os.environ, {"RIG_READ_ONLY": "1"}):
            status, _, err = self.run_here("call", "stop_model")
            self.assertEqual((status, err.split()[0]), (1, "DENIED"))

    def test_what_is_no_tool_and_what_is_no_argument(self) -> None:
        status, _, err = self.run_here("call", f"nope\x1b[31m{SECRET}")
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("NOT_FOUND no tool nope[redacted]; there are: "), err)
        self.assertIn("serve_model", err)
        status, _, err = self.run_here("call", "get_job", SECRET)
        self.assertEqual(
            (status, err), (1, "INVALID '[redacted]' is not key=value. Next: add the '='\n")
        )

    def test_values_become_what_the_schema_says(self) -> None:
        kinds = {"i": "integer", "n": "number", "b": "boolean", "s": "string"}
        schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
        self.assertEqual(
            _typed_arguments(schema, ["i=7", "n=0.5", "b=true", "s=7"]),
            {"i": 7, "n": 0.5, "b": True, "s": "7"},
        )
        self.assertEqual(
            _typed_arguments(schema, ["s=a=b", "s2=", "i=seven", "unknown=1"]),
            {"s": "a=b", "s2": "", "i": "seven", "unknown": "1"},
        )
        for word in ("word", "", "--x"):
            with self.assertRaises(RigError):
                _typed_arguments(schema, [word])

    def test_make_sees_the_status(self) -> None:
        """As a program: what a Makefile gets."""
        process = self.start("call", "get_endpoint")
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (1, ""))
        self.assertTrue(err.startswith("NOT_FOUND "), err)


class CommandTest(Case):
    def test_usage(self) -> None:
        status, out, _ = self.run_here("--help")
        self.assertEqual(status, 0)
        for command in ("call", "docs", "skill-zip", "env", "preflight", "job", "http"):
            self.assertIn(command, out)
        for wrong in (["nope"], ["call"], ["job"], ["http", "--port", "x"]):
            self.assertEqual(self.run_here(*wrong)[0], 2)

    def test_env_is_what_a_shell_can_read(self) -> None:
        status, out, _ = self.run_here("env")
        self.assertEqual(status, 0)
        done = subprocess.run(
            ["/bin/sh", "-c", f'eval {shlex.quote(out)}; echo "$MODEL_NAME $PORT"'],
            capture_output=True,
            text=True,
            env={},
        )
        self.assertEqual(done.stdout, f"embedded {self.port}\n")

    def test_a_fault_in_tpu_env_is_told_once_and_clearly(self) -> None:
        self.settings(MODEL_NAME="embedded")
        status, out, err = self.run_here("env")
        self.assertEqual((status, out), (1, ""))
        self.assertEqual(err.count("\n"), 1)
        self.assertIn("PORT is missing", err)
        self.assertNotIn("Traceback", err)

    def test_the_server_answers_although_tpu_env_is_at_fault(self) -> None:
        (self.folder / "tpu.env").unlink()
        status, out, _ = self.run_here("call", "get_system_status")
        self.assertEqual(status, 0)
        self.assertIn("cannot be read", out)
        status, _, err = self.run_here("call", "serve_model")
        self.assertEqual((status, err.split()[0]), (1, "INVALID"))

    def test_preflight_counts_what_is_missing(self) -> None:
        for prepare, missing in (
            (lambda: None, ()),
            (lambda: (self.folder / "tpu.env").write_text("garbage\n"), ("settings",)),
            (lambda: self.settings(MODEL_NAME="/no/folder", PORT=str(self.port)), ("model",)),
        ):
            prepare()
            status, out, _ = self.run_here("preflight")
            lines = out.strip().split("\n")
            gaps = [line for line in lines if line.startswith("MISSING")]
            for word in missing:
                self.assertTrue(any(line.startswith(f"MISSING {word}") for line in gaps), out)
            self.assertEqual(status, 1 if gaps else 0)
            self.assertEqual(lines[-1], f"{len(gaps)} missing." if gaps else "Everything is there.")
            self.assertEqual(out.count("get it: "), len(gaps))

    def test_preflight_sees_a_port_in_use(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", self.port))
            listener.listen()
            status, out, _ = self.run_here("preflight")
        self.assertEqual(status, 1)
        self.assertIn(f"MISSING port: port {self.port} is in use", out)

    def test_docs_and_the_packed_skill(self) -> None:
        status, out, _ = self.run_here("docs")
        self.assertEqual(status, 0)
        self.assertIn("wrote GemmaTools.md\n", out)
        self.assertEqual(self.run_here("docs")[:2], (0, ""))
        status, out, _ = self.run_here("skill-zip")
        self.assertEqual(status, 0)
        self.assertTrue(Path(out.removeprefix("wrote ").strip()).exists())

    def test_a_worker_for_a_job_that_is_not_there(self) -> None:
        for job_id, error_class in (
            ("serve-20260101-000000-abcdef", "NOT_FOUND"),
            ("../../x", "INVALID"),
            ("x\n", "INVALID"),
        ):
            status, _, err = self.run_here("job", job_id)
            self.assertEqual((status, err.split()[0]), (1, error_class))

    def test_a_worker_for_a_kind_that_the_rig_does_not_know(self) -> None:
        job = AssembledRig(RIG, self.server).context.jobs.new("dance", {}, [])
        status, _, err = self.run_here("job", job.id)
        self.assertEqual((status, err.split()[0]), (1, "INVALID"))


class TransportTest(Case):
    EXPECTED: ClassVar[set[str]] = {"serve_model", "stop_model", "query_gemma4", "get_help"}

    def test_over_stdio_in_both_protocol_modes(self) -> None:
        async def session(mode: str) -> set[str]:
            parameters = StdioServerParameters(
                command=sys.executable, args=[str(self.server)], env=self.environment
            )
            async with Client(stdio_client(parameters), mode=mode) as client:
                result = await client.call_tool("get_help", {})
                self.assertFalse(result.is_error)
                return {tool.name for tool in (await client.list_tools()).tools}

        for mode in ("legacy", "auto"):
            with self.subTest(mode=mode):
                self.assertLessEqual(self.EXPECTED, asyncio.run(session(mode)))

    def test_the_end_of_input_is_the_end(self) -> None:
        process = self.start()
        begun = time.monotonic()
        out, _ = process.communicate("", timeout=60)
        self.assertEqual((process.returncode, out), (0, ""))
        self.assertLess(time.monotonic() - begun, 20)

    def test_over_http_on_loopback_for_this_computer_alone(self) -> None:
        port = free_port()
        process = self.start("http", "--port", str(port))
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                self.assertLess(time.monotonic(), deadline)
                self.assertIsNone(process.poll(), "the server ended")
                time.sleep(0.1)

        async def session() -> set[str]:
            async with Client(f"http://127.0.0.1:{port}/mcp") as client:
                return {tool.name for tool in (await client.list_tools()).tools}

        self.assertLessEqual(self.EXPECTED, asyncio.run(session()))
        body = '{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
        for name, value in (("Host", "evil.example"), ("Origin", "http://evil.example")):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            headers = {
                "Content-Type": "application/json",
                "Accept": "application/json",
                name: value,
            }
            connection.request("POST", "/mcp", body, headers)
            status = connection.getresponse().status
            connection.close()
            self.assertTrue(400 <= status < 500, f"{name}: {status}")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(20), 128 + signal.SIGTERM)


if __name__ == "__main__":
    unittest.main()
