"""One act of a program on a machine through Systems Manager.

AWS's real SDK, an account on loopback, and the script itself under a real shell, as the machine's
agent runs it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.bundle import bundle
from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.ssm_shell import (
    SSM_ARGUMENTS_LIMIT,
    SSM_OUTPUT_LIMIT,
    SSM_SCRIPT_LIMIT,
    SsmShell,
    ssm_script,
)
from forge.parts.ground.errors import RigError
from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_world import CallFault

ROOT = Path(__file__).resolve().parents[2]
REGION, ZONE = "us-east-1", "us-east-1a"
STRANGER = "i-0123456789abcdef0"
PATIENCE_S = 60.0  # of an act that shall end, on a busy machine; no test measures it
CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
CORPUS = (
    *("; touch P #", "$(touch P)", "`touch P`", "a\nb", "a\rb", "--help", "-x", "../../etc/passwd"),
    *(
        "{0.__class__}",
        "{{x}}",
        "{{ ssm:parameter }}",
        "'\"\\",
        "ＡＢＣ",
        "a\u202eb",
        "%0a",
        "",
        " ",
    ),
)
# What a machine runs in these tests: it says what it was given, and does what it is told.
PROGRAM = b'''#!/usr/bin/env python3
"""A program with all that a real one has at its head."""

from __future__ import annotations

import base64
import json
import os
import sys
import time

act, data = sys.argv[1:]
given = json.loads(base64.urlsafe_b64decode(data))
if act == "flood":
    print("x" * given["size"])
    print("the last line")
else:
    print("act", act, json.dumps(given, sort_keys=True))
    print("a remark", file=sys.stderr)
    print("\\u00e9 {braces} and \\"quotes\\" 'too'")
if act == "fail":
    print("it cannot be done: \\x1b[31mthe disk is full", file=sys.stderr)
    sys.exit(given.get("status", 3))
if act == "sleep":
    time.sleep(given["seconds"])
    print("it slept")
if act == "place":
    print(oct(os.stat(sys.argv[0]).st_mode & 0o777), os.path.dirname(sys.argv[0]))
'''


class SsmCase(unittest.IsolatedAsyncioTestCase):
    """An account with one machine, whose agent runs scripts in a folder of this test."""

    cloud: FakeAws
    shell_program = "/bin/sh"

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = FakeAws()
        cls.cloud.start()
        cls.addClassCleanup(cls.cloud.stop)

    def setUp(self) -> None:
        self.cloud.renew()
        self.cloud.script.invocation_hidden = 0
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        (self.bin / "python3").symlink_to(sys.executable)
        self.running: list[subprocess.Popen[str]] = []
        self.started, self.over = threading.Event(), threading.Event()
        self.cloud.run_command, self.cloud.end_command = self.agent, self.agent_ends
        self.cloud.agent_online = lambda _machine: True
        self.machine = self.cloud.put_machine(ZONE, "rig-1")
        self.aws = Aws(self.cloud.account, environment=self.cloud.environment(self.folder))
        self.shell = SsmShell(self.aws, REGION)
        self.addCleanup(self.agent_ends, self.machine)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])

    def agent(self, machine: str, script: str) -> tuple[str, str, int]:
        """As the SSM agent: the script in a file, by sh, nothing in the environment but a PATH."""
        path = self.folder / "_script.sh"
        path.write_text(script, encoding="utf-8")
        child = subprocess.Popen(
            [self.shell_program, str(path)],
            cwd=self.folder,
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(child)
        self.started.set()
        if self.over.is_set():  # it was cancelled before it began
            self.agent_ends(machine)
        stdout, stderr = child.communicate()
        return stdout, stderr, child.returncode

    def agent_ends(self, _machine: str) -> None:
        """A cancelled command's processes are killed, as the agent does it."""
        self.over.set()
        for child in self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)

    def says(self, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        """The agent says just that."""
        self.cloud.run_command = lambda _machine, _script: (stdout, stderr, code)

    async def act(
        self,
        act: str = "status",
        timeout_s: float = PATIENCE_S,
        program: bytes = PROGRAM,
        **given: Any,
    ) -> str:
        return await self.shell.run(self.machine, program, act, given, timeout_s)

    async def refused(self, work: Any) -> RigError:
        with self.assertRaises(RigError) as raised:
            await work
        return raised.exception

    def count(self, action: str) -> int:
        return len(self.cloud.sent(action))

    def sent(self) -> dict[str, Any]:
        [request] = self.cloud.sent("SendCommand")
        return request.parameters


class OnTheMachineTest(SsmCase):
    async def test_the_program_gets_its_act_and_its_arguments(self) -> None:
        text = await self.act("logs", lines=200, name="vllm", all=True)
        said = json.dumps({"all": True, "limit": SSM_OUTPUT_LIMIT, "lines": 200, "name": "vllm"})
        self.assertEqual(text, f"act logs {said}\na remark\né {{braces}} and \"quotes\" 'too'\n")

    def test_whatever_the_arguments_hold_is_data(self) -> None:
        for text in CORPUS:
            with self.subTest(text):
                said, remarks, code = self.agent("", ssm_script(PROGRAM, "logs", {"text": text}))
                line = said.splitlines()[0].removeprefix("act logs ")
                self.assertEqual(json.loads(line), {"limit": SSM_OUTPUT_LIMIT, "text": text})
                self.assertEqual((remarks, code), ("", 0))
        self.assertEqual(list(self.folder.rglob("P")), [])

    async def test_nothing_of_it_stays_on_the_machine(self) -> None:
        said = await self.act("place")
        mode, home = said.splitlines()[-1].split()
        self.assertEqual((mode, Path(home).parent), ("0o600", self.temporary))
        await self.refused(self.act("fail"))
        self.assertEqual(list(self.temporary.iterdir()), [])

    async def test_a_program_that_fails_is_told_by_its_last_line(self) -> None:
        error = await self.refused(self.act("fail", status=4))
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn(f"`fail` on {self.machine} failed (status 4)", error.what)
        self.assertIn("it cannot be done: the disk is full", error.what)
        self.assertNotIn("\x1b", str(error))

    async def test_a_program_that_arrives_changed_is_not_run(self) -> None:
        whole = self.agent

        def meddle(machine: str, script: str) -> tuple[str, str, int]:
            packed = re.search(r"printf %s (\S+) \|", script)
            assert packed is not None
            other = base64.b64encode(b"print('something else')").decode()
            return whole(machine, script.replace(packed[1], other))

        def cut(machine: str, script: str) -> tuple[str, str, int]:
            return whole(machine, re.sub(r"(printf %s \S{40})\S+ \|", r"\1 |", script))

        for wrong in (meddle, cut):
            self.cloud.run_command = wrong
            error = await self.refused(self.act())
            self.assertEqual(error.error_class, "UNREACHABLE")
            self.assertIn("did not arrive as it was sent", error.what)

    async def test_a_machine_without_python_says_so(self) -> None:
        (self.bin / "python3").unlink()
        (self.bin / "python3").write_text("#!/bin/sh\necho 'no such interpreter' >&2\nexit 127\n")
        (self.bin / "python3").chmod(0o755)
        error = await self.refused(self.act())
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("(status 127): no such interpreter", error.what)

    async def test_a_machine_without_room_says_so(self) -> None:
        (self.bin / "mktemp").write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
        (self.bin / "mktemp").chmod(0o755)
        error = await self.refused(self.act())
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("No space left on device", error.what)


class UnderBashTest(SsmCase):
    """Where the machine's sh is bash."""

    shell_program = "/bin/bash"

    async def test_it_runs_and_fails_as_under_sh(self) -> None:
        self.assertIn("a remark", await self.act())
        error = await self.refused(self.act("fail", status=4))
        self.assertIn("failed (status 4): it cannot be done", error.what)
        self.assertEqual(list(self.temporary.iterdir()), [])


class OutputTest(SsmCase):
    """SSM passes on the first 24,000 characters, so that a log's end would be lost."""

    async def test_the_program_is_told_how_much_it_may_print(self) -> None:
        for asked, told in ((None, SSM_OUTPUT_LIMIT), (500, 500), (10**9, SSM_OUTPUT_LIMIT)):
            given = {} if asked is None else {"limit": asked}
            said = await self.act("logs", **given)
            self.assertIn(f'{{"limit": {told}}}', said)
        self.assertLess(SSM_OUTPUT_LIMIT, 24_000)

    async def test_what_fits_comes_whole(self) -> None:
        said = await self.act("flood", size=SSM_OUTPUT_LIMIT)
        self.assertEqual(said, "x" * SSM_OUTPUT_LIMIT + "\nthe last line\n")

    async def test_a_cut_is_said(self) -> None:
        said = await self.act("flood", size=30_000)
        self.assertNotIn("the last line", said)
        self.assertTrue(said.startswith("x" * 20_000))
        self.assertTrue(said.endswith("the end is missing here …]\n"), said[-200:])

    async def test_a_cut_without_a_mark_is_said_too(self) -> None:
        for text in ("x" * 24_000, "x\n---Output truncated---"):
            self.says(text)
            self.assertIn("the end is missing here", await self.act())

    async def test_a_failure_whose_end_was_cut_says_so(self) -> None:
        self.says("first line\n" + "x" * 30_000, code=1)
        error = await self.refused(self.act())
        self.assertIn("SSM left out what came after it", error.what)
        self.assertNotIn("truncated", error.what)
        self.assertLess(len(error.what), 600)

    async def test_a_failure_without_a_word(self) -> None:
        self.says(code=9)
        error = await self.refused(self.act())
        self.assertIn("failed (status 9): it said nothing", error.what)


class RequestTest(SsmCase):
    """What goes out."""

    async def test_one_command_for_that_very_machine(self) -> None:
        await self.act("logs", timeout_s=50.5)
        sent = self.sent()
        self.assertEqual(sent["InstanceIds"], [self.machine])
        self.assertEqual(sent["DocumentName"], "AWS-RunShellScript")
        self.assertEqual(sent["Parameters"]["executionTimeout"], ["51"])
        self.assertEqual(sent["TimeoutSeconds"], 30)
        self.assertEqual(sent["Comment"], "gemma4-rigs logs")

    async def test_the_account_is_proven_before_a_command_goes_out(self) -> None:
        self.cloud.script.account = "999999999999"
        self.shell = SsmShell(Aws(self.cloud.account, environment=self.fresh()), REGION)
        error = await self.refused(self.act())
        self.assertEqual((error.error_class, self.count("SendCommand")), ("DENIED", 0))

    def fresh(self) -> dict[str, str]:
        """A login of its own, which has proven nothing yet."""
        known = self.cloud.environment(self.folder)
        return {**known, "AWS_SESSION_TOKEN": f"made-up {self.id()}"}

    def test_the_script_is_the_same_but_for_its_four_values(self) -> None:
        one = ssm_script(PROGRAM, "logs", {"text": "$(touch P) {{x}}"})
        two = ssm_script(b"print(1)\n", "status", {})
        lines = list(zip(one.splitlines(), two.splitlines(), strict=True))
        self.assertEqual([index for index, (a, b) in enumerate(lines) if a != b], [4, 5, 9])
        self.assertNotIn("{{", one)  # SSM would put a parameter of its own there
        self.assertTrue(one.isascii())

    def test_the_arguments_do_not_look_like_a_web_token(self) -> None:
        self.assertNotIn("eyJ", ssm_script(PROGRAM, "logs", {}).splitlines()[9])

    def test_it_is_valid_shell(self) -> None:
        for shell in ("/bin/sh", "/bin/bash"):
            given = ssm_script(PROGRAM, "logs", {"x": "'"})
            done = subprocess.run([shell, "-n"], input=given, text=True, capture_output=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    async def test_what_is_no_act_or_no_machine_is_not_sent(self) -> None:
        for text in (*CORPUS, "Logs", "logs2", "a" * 32):
            with self.subTest(text):
                self.assertEqual((await self.refused(self.act(text))).error_class, "INVALID")
                work = self.shell.run(text, PROGRAM, "status", {}, PATIENCE_S)
                self.assertEqual((await self.refused(work)).error_class, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_secret_is_not_sent(self) -> None:
        error = await self.refused(self.act(text=CANARY))
        self.assertEqual(error.error_class, "DENIED")
        self.assertNotIn("Canary", str(error))
        self.assertEqual(self.cloud.requests, [])

    async def test_what_is_too_long_is_not_sent(self) -> None:
        long = {"text": "x" * SSM_ARGUMENTS_LIMIT}
        self.assertEqual((await self.refused(self.act(**long))).error_class, "INVALID")
        program = b"# " + os.urandom(SSM_SCRIPT_LIMIT).hex().encode()
        error = await self.refused(self.act(program=program))
        self.assertEqual(error.error_class, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    def test_the_programs_that_the_rigs_send_fit(self) -> None:
        for name in ("ec2_boot", "ec2_llama_boot"):
            program = bundle(f"forge.programs.{name}", ROOT).render("", contents=True)
            script = ssm_script(program.encode(), "status", {"text": "x" * 4000})
            self.assertLess(len(script), SSM_SCRIPT_LIMIT * 2 // 3)


class FateTest(SsmCase):
    """A command that was sent is never sent again; what became of it is said."""

    async def test_an_agent_that_is_not_online_is_unreachable(self) -> None:
        self.cloud.agent_online = lambda _machine: False
        self.assertFalse(await self.shell.online(self.machine))
        error = await self.refused(self.act())
        self.assertEqual(error.error_class, "UNREACHABLE")
        self.assertIn("(InvalidInstanceId)", error.what)
        self.assertIn("AmazonSSMManagedInstanceCore", error.next_step)

    async def test_online(self) -> None:
        self.assertTrue(await self.shell.online(self.machine))
        self.assertFalse(await self.shell.online(STRANGER))
        self.assertFalse(await SsmShell(self.aws, "us-west-2").online(self.machine))

    async def test_a_result_that_is_not_there_at_first_is_waited_for(self) -> None:
        self.cloud.script.invocation_hidden = 3
        self.assertIn("a remark", await self.act())
        self.assertGreater(self.count("GetCommandInvocation"), 3)
        self.assertEqual(self.count("SendCommand"), 1)

    async def test_reads_that_fail_in_between_are_repeated(self) -> None:
        for fault in (
            {"code": "", "lost": "cut", "times": 3},  # all attempts of one look
            {"code": "ThrottlingException", "times": 3},
        ):
            self.cloud.script.faults[:] = [CallFault("GetCommandInvocation", **fault)]
            self.assertIn("a remark", await self.act())
        self.assertEqual(self.count("SendCommand"), 2)

    async def test_a_command_that_does_not_end_is_unknown_and_told_to_end(self) -> None:
        error = await self.refused(self.act("sleep", timeout_s=2.0, seconds=300))
        self.assertEqual(error.error_class, "UNKNOWN")
        [command] = self.cloud.ssm.commands.values()
        self.assertIn(command.id, error.what)
        self.assertIn("may have been done all the same", error.what)
        self.assertEqual(command.status, "Cancelled")
        self.assertEqual((self.count("SendCommand"), self.count("CancelCommand")), (1, 1))
        self.assertTrue(self.started.wait(PATIENCE_S))
        self.running[0].wait(PATIENCE_S)  # and it has ended

    async def test_a_result_that_never_shows_is_unknown(self) -> None:
        self.cloud.script.invocation_hidden = 10_000
        error = await self.refused(self.act(timeout_s=2.0))
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertEqual((self.count("SendCommand"), self.count("CancelCommand")), (1, 1))

    async def test_a_cancel_that_is_refused_changes_nothing_of_the_answer(self) -> None:
        self.cloud.script.faults.append(CallFault("CancelCommand", code="AccessDeniedException"))
        error = await self.refused(self.act("sleep", timeout_s=1.0, seconds=300))
        self.assertEqual(error.error_class, "UNKNOWN")
        [command] = self.cloud.ssm.commands.values()
        self.assertIn(command.id, error.what)

    async def test_a_client_that_leaves_tells_the_command_to_end(self) -> None:
        call = asyncio.create_task(self.act("sleep", seconds=300))
        while not self.started.is_set():
            await asyncio.sleep(0.02)
        while not self.count("GetCommandInvocation"):
            await asyncio.sleep(0.02)
        call.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await call
        self.assertEqual((self.count("SendCommand"), self.count("CancelCommand")), (1, 1))
        self.running[0].wait(PATIENCE_S)

    async def test_an_answer_to_the_send_that_does_not_come_is_unknown_and_not_repeated(
        self,
    ) -> None:
        await self.aws.check_account()
        self.cloud.script.faults.append(CallFault("SendCommand", code="", lost="cut", after=True))
        error = await self.refused(self.act())
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertEqual(self.count("SendCommand"), 1)
        self.assertEqual(len(self.cloud.ssm.commands), 1)

    async def test_a_result_that_may_not_be_read_says_so(self) -> None:
        self.cloud.script.faults.append(
            CallFault("GetCommandInvocation", code="AccessDeniedException")
        )
        error = await self.refused(self.act())
        self.assertEqual(error.error_class, "DENIED")
        [command] = self.cloud.ssm.commands.values()
        self.assertIn(command.id, error.what)
        self.assertIn("ssm:GetCommandInvocation", error.what)
        self.assertEqual(self.count("CancelCommand"), 1)

    async def ended(self, status: str, code: int = -1) -> RigError:
        """What a command that SSM ended like this is told as."""
        self.cloud.run_command = self.held
        self.release = threading.Event()
        self.addCleanup(self.release.set)
        call = asyncio.create_task(self.refused(self.act()))
        while not self.cloud.ssm.commands:
            await asyncio.sleep(0.02)
        with self.cloud.lock:
            [command] = self.cloud.ssm.commands.values()
            command.status, command.code = status, code
        self.release.set()
        return await call

    def held(self, _machine: str, _script: str) -> tuple[str, str, int]:
        self.release.wait(PATIENCE_S)
        return "", "", 0

    async def test_a_command_that_was_not_delivered_is_unreachable(self) -> None:
        error = await self.ended("Undeliverable")
        self.assertEqual(error.error_class, "UNREACHABLE")
        self.assertIn("did not reach the machine (Undeliverable)", error.what)

    async def test_a_command_that_ssm_never_began_is_unreachable(self) -> None:
        error = await self.ended("Failed")
        self.assertEqual(error.error_class, "UNREACHABLE")

    async def test_a_command_that_ran_out_of_its_time_is_unknown(self) -> None:
        error = await self.ended("TimedOut", 137)
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertIn("was ended by SSM (ExecutionTimedOut)", error.what)

    async def test_a_command_that_somebody_cancelled_is_unknown(self) -> None:
        error = await self.ended("Cancelled")
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertIn("was ended by SSM (Cancelled)", error.what)


if __name__ == "__main__":
    unittest.main()
