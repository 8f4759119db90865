"""ssm_tunnel.py as the process that it is: AWS's real SDK, an account on loopback, and a stand-in
for AWS's session-manager-plugin on PATH that really carries a port.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from forge.parts.boundaries.ssm_plugin import SSM_PLUGIN, find_ssm_plugin
from forge.parts.ground.errors import RigError
from forge.suites.fake_aws import FAKE_AWS_PROFILE, FakeAws
from forge.suites.fake_aws_world import CallFault
from tests.forge_copy import package_folders

ROOT = Path(__file__).resolve().parents[1]
REGION, ZONE = "us-east-1", "us-east-1a"
STRANGER = "i-0123456789abcdef0"
PATIENCE_S = 60.0
ANSWER = b"the model's answer"

# The plugin: it notes how it was started, and carries connections to the machine's port, which here
# is a port of this computer. Its arguments are those that awscli 1.46.3 gives the real one.
PLUGIN = r"""#!{python} -SE
import json, os, socket, sys, threading
here = {here!r}
words = sys.argv[1:]
if words == ["--version"]:
    exec(open(here + "/version.py").read())
    sys.exit()
session = json.loads(os.environ[words[0]])
note = dict(argv=sys.argv, pid=os.getpid(), session=session)
note["cmdline"] = open("/proc/self/cmdline").read() if os.path.exists("/proc") else ""
with open(here + "/calls.jsonl", "a") as journal:
    journal.write(json.dumps(note) + "\n")
exec(open(here + "/instead.py").read())
asked = json.loads(words[4])["Parameters"]
door = socket.create_server(("127.0.0.1", int(asked["localPortNumber"][0])))


def carry(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


while True:
    line, _ = door.accept()
    other = socket.create_connection(("127.0.0.1", int(asked["portNumber"][0])))
    for pair in ((line, other), (other, line)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


class _Model(BaseHTTPRequestHandler):
    """What serves on the machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass


class TunnelCase(unittest.TestCase):
    cloud: FakeAws

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = FakeAws()
        cls.cloud.start()
        cls.addClassCleanup(cls.cloud.stop)

    def setUp(self) -> None:
        self.cloud.renew()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.plugin = self.bin / SSM_PLUGIN
        self.plugin.write_text(PLUGIN.format(python=sys.executable, here=str(self.folder)))
        self.plugin.chmod(0o755)
        self.version('print("1.2.764.0")')
        (self.folder / "instead.py").write_text("")
        self.machine = self.cloud.put_machine(ZONE, "rig-1")
        self.local = free_port()
        own = self.cloud.environment(self.folder)
        self.environment = {
            **own,
            "PATH": str(self.bin),
            "HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join([*package_folders(), str(ROOT)]),
        }

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])

    def version(self, text: str) -> None:
        """What the plugin does when it is asked for its release."""
        (self.folder / "version.py").write_text(text)

    def words(self, *more: str, machine: str = "", remote: int = 8000) -> list[str]:
        given = [machine or self.machine, REGION, str(remote), str(self.local), *more]
        return [sys.executable, "-m", "forge.programs.ssm_tunnel", *given]

    def run_tunnel(self, *more: str, **given: Any) -> subprocess.CompletedProcess[str]:
        return self.run_words(self.words(*more, **given))

    def run_words(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def started(self, words: list[str]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        return child

    def until(self, true: Callable[[], Any], child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            self.assertIsNone(child.poll(), "it ended")
            self.assertLess(time.monotonic(), deadline, "it did not come")
            time.sleep(0.05)

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, action: str) -> int:
        return len(self.cloud.sent(action))


class CarryTest(TunnelCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.remote = int(self.server.server_address[1])

    def opened(self, *more: str) -> subprocess.Popen[bytes]:
        child = self.started(self.words(*more, remote=self.remote))
        self.until(self.listens, child)
        return child

    def listens(self) -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", self.local)) == 0

    def test_the_local_port_leads_to_the_machines_until_sigterm(self) -> None:
        child = self.opened()
        with build_opener(ProxyHandler({})).open(
            f"http://127.0.0.1:{self.local}/", None, 20
        ) as got:
            self.assertEqual(got.read(), ANSWER)
        child.send_signal(signal.SIGTERM)
        self.assertEqual(child.wait(PATIENCE_S), -signal.SIGTERM)
        self.assertFalse(self.listens())

    def test_the_process_becomes_the_plugin(self) -> None:
        child = self.opened()
        [call] = self.calls()
        self.assertEqual(call["pid"], child.pid)

    def test_the_plugin_ends_by_a_broken_pipe_as_any_program(self) -> None:
        # Python ignores that signal, and what a program ignores, its successor does.
        said = 'if [ "$1" = --version ]; then echo 1.2.764.0; exit; fi'
        self.plugin.write_text(f"#!/bin/sh\n{said}\nkill -PIPE $$\nexit 7\n")
        self.assertEqual(self.run_tunnel().returncode, -signal.SIGPIPE)

    def test_the_plugin_is_started_as_the_aws_cli_does_it(self) -> None:
        self.opened()
        [call] = self.calls()
        plugin, variable, region, operation, profile, request, address = call["argv"]
        self.assertEqual(Path(plugin), self.plugin)
        self.assertEqual(variable, "AWS_SSM_START_SESSION_RESPONSE")
        self.assertEqual((region, operation, profile), (REGION, "StartSession", ""))
        self.assertEqual(address, self.cloud.base)
        self.assertEqual(
            json.loads(request),
            {
                "Target": self.machine,
                "DocumentName": "AWS-StartPortForwardingSession",
                "Parameters": {
                    "portNumber": [str(self.remote)],
                    "localPortNumber": [str(self.local)],
                },
            },
        )
        self.assertEqual(sorted(call["session"]), ["SessionId", "StreamUrl", "TokenValue"])
        self.assertIn(call["session"]["SessionId"], self.cloud.ssm.sessions)

    def test_the_token_stands_in_no_argument_and_no_output(self) -> None:
        child = self.opened()
        [call] = self.calls()
        token = call["session"]["TokenValue"]
        self.assertGreater(len(token), 20)
        self.assertNotIn(token, call["cmdline"])
        child.terminate()
        said, _ = child.communicate(timeout=PATIENCE_S)
        self.assertEqual(said, b"")

    def test_one_session_of_that_machine_and_port(self) -> None:
        self.opened()
        [session] = self.cloud.ssm.sessions.values()
        self.assertEqual((session.machine, session.port), (self.machine, self.remote))
        self.assertEqual((self.count("StartSession"), self.count("TerminateSession")), (1, 0))

    def test_a_profile_is_used_and_handed_on(self) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del self.environment[name]
        self.opened(FAKE_AWS_PROFILE)
        self.assertEqual(self.calls()[0]["argv"][4], FAKE_AWS_PROFILE)

    def test_the_plugins_own_end_is_the_programs(self) -> None:
        (self.folder / "instead.py").write_text("sys.exit(5)")
        self.assertEqual(self.run_tunnel().returncode, 5)


class RefusedTest(TunnelCase):
    """Where no tunnel comes: one line that says why, and no session is left."""

    def refused(self, status: int, *more: str, **given: Any) -> str:
        done = self.run_tunnel(*more, **given)
        self.assertEqual((done.returncode, done.stdout), (status, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertEqual(self.calls(), [])
        return done.stderr

    def test_a_missing_plugin_says_what_to_install(self) -> None:
        self.plugin.unlink()
        said = self.refused(3)
        for word in ("no session-manager-plugin on PATH", "sudo dpkg -i", "brew install --cask"):
            self.assertIn(word, said)
        self.assertEqual(self.cloud.requests, [])

    def test_a_plugin_that_would_show_the_token_is_not_used(self) -> None:
        self.version('print("1.2.497.0")')
        said = self.refused(3)
        self.assertIn("1.2.497.0, which shows a session's token to every user", said)
        self.assertIn("brew install --cask", said)
        self.assertEqual(self.cloud.requests, [])

    def test_a_machine_that_is_not_online(self) -> None:
        said = self.refused(1, machine=STRANGER)
        self.assertTrue(said.startswith("UNREACHABLE "), said)
        self.assertIn("(TargetNotConnected)", said)

    def test_useless_credentials(self) -> None:
        self.cloud.script.credentials = "expired"
        self.assertTrue(self.refused(1).startswith("AUTH "))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del self.environment[name]
        self.assertTrue(self.refused(1).startswith("AUTH "))
        self.assertTrue(self.refused(1, "nobody").startswith("AUTH "))

    def test_a_session_is_asked_for_once(self) -> None:
        for fault in (
            {"code": "InternalServerError", "message": "x"},
            {"code": "", "lost": "cut", "after": True},
            {"code": "ThrottlingException"},
        ):
            with self.subTest(fault):
                before = self.count("StartSession")
                self.cloud.script.faults[:] = [CallFault("StartSession", **fault)]
                self.refused(1)
                self.assertEqual(self.count("StartSession") - before, 1)

    def test_a_session_whose_plugin_cannot_be_started_is_ended(self) -> None:
        self.version(f'os.unlink({str(self.plugin)!r}); print("1.2.764.0")')
        said = self.refused(1)
        self.assertIn("cannot be started: No such file or directory", said)
        [session] = self.cloud.ssm.sessions.values()
        self.assertFalse(session.open)

    def test_an_older_plugin_is_used_with_a_word(self) -> None:
        self.version('print("1.2.650.0")')
        (self.folder / "instead.py").write_text("sys.exit(0)")
        done = self.run_tunnel()
        self.assertEqual((done.returncode, len(self.calls())), (0, 1))
        self.assertIn("release 1.2.650.0 is older than 1.2.764.0", done.stderr)

    def test_sigterm_ends_it_before_a_session_is_there_too(self) -> None:
        self.cloud.script.faults.append(CallFault("StartSession", code="", lost="hold"))
        child = self.started(self.words())
        self.until(lambda: self.count("StartSession"), child)
        child.send_signal(signal.SIGTERM)
        self.assertEqual(child.wait(PATIENCE_S), -signal.SIGTERM)
        self.assertEqual(self.calls(), [])


class UsageTest(TunnelCase):
    def test_wrong_usage_is_status_2_and_nothing_is_asked(self) -> None:
        good = [self.machine, REGION, "8000", "18000"]
        for place, wrong in (
            *((0, text) for text in ("", "rig-1", "i-XYZ", "--help-me", f"{self.machine}\n")),
            *((1, text) for text in ("", "us-east-1a", "us-east-1.example.com", "-x")),
            *((2, text) for text in ("0", "65536", "-1", "8000a", "1e3", "٣")),
            (3, "0"),
        ):
            with self.subTest(wrong):
                words = [wrong if place == number else word for number, word in enumerate(good)]
                done = self.run_words([sys.executable, "-m", "forge.programs.ssm_tunnel", *words])
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertNotIn("Traceback", done.stderr)
        self.assertEqual((self.cloud.requests, self.calls()), ([], []))

    def test_too_few_and_too_many_arguments(self) -> None:
        program = [sys.executable, "-m", "forge.programs.ssm_tunnel"]
        for words in (program, self.words()[:-1], self.words("one", "two")):
            self.assertEqual(self.run_words(words).returncode, 2)
        self.assertEqual(self.cloud.requests, [])

    def test_help_needs_neither_plugin_nor_credentials(self) -> None:
        self.plugin.unlink()
        done = self.run_words([sys.executable, "-m", "forge.programs.ssm_tunnel", "--help"])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for word in ("instance", "region", "remote_port", "local_port", "profile", "exit status"):
            self.assertIn(word, done.stdout)


class PluginTest(TunnelCase):
    """The look for the plugin, which a preflight shares with the program."""

    def find(self) -> Any:
        return asyncio.run(find_ssm_plugin(self.environment))

    def test_releases(self) -> None:
        for version, cautious in (
            ("1.2.498.0", True),
            ("1.2.536.0", True),
            ("1.2.763.9", True),
            ("1.2.764.0", False),
            ("1.2.1000", False),
            ("1.3", False),
            ("2", False),
        ):
            with self.subTest(version):
                self.version(f"print({version!r})")
                found = self.find()
                self.assertEqual((found.path, found.version), (str(self.plugin), version))
                self.assertEqual(bool(found.caution), cautious)

    def test_what_is_too_old_or_does_not_say(self) -> None:
        for text in (
            'print("1.2.497.0")',
            'print("1.2.497")',
            'print("1.1.9999.0")',
            'print("0")',
            "",
            'print("The Session Manager plugin was installed successfully.")',
            'print("1.2.764.0-beta")',
            'print("9" * 100000)',
            'print("1.2.764.0"); sys.exit(1)',
            "os.kill(os.getpid(), 9)",
        ):
            with self.subTest(text), self.assertRaises(RigError) as raised:
                self.version(text)
                self.find()
            self.assertEqual(raised.exception.error_class, "DENIED")
            self.assertIn("brew install", raised.exception.next_step)
            self.assertLess(len(str(raised.exception)), 700)

    def test_what_cannot_be_run_is_none(self) -> None:
        self.plugin.chmod(0o644)
        with self.assertRaises(RigError) as raised:
            self.find()
        self.assertEqual(raised.exception.error_class, "NOT_FOUND")

    def test_a_plugin_of_another_architecture_is_said(self) -> None:
        self.plugin.write_bytes(b"\x7fELF" + b"\0" * 60)
        with self.assertRaises(RigError) as raised:
            self.find()
        self.assertIn("cannot be started", raised.exception.what)

    def test_the_path_of_the_environment_counts(self) -> None:
        self.environment["PATH"] = os.pathsep.join(["/nonexistent", str(self.bin)])
        self.assertEqual(self.find().path, str(self.plugin))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    unittest.main()
