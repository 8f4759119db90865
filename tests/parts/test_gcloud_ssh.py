"""The way onto a rented machine: one act of a program over ssh, its refusals, and the tunnel.

gcloud is its stand-in, which runs the ssh on PATH. Where a machine really does something, it is a
sandbox of forge.suites.fake_host; where ssh's words are what matters, a small program says them.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import tempfile
import time
import unittest
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, GcloudFlag
from forge.parts.boundaries.gcloud_ssh import (
    HOST_ARGUMENTS_LIMIT,
    GcloudShell,
    host_arguments,
)
from forge.parts.ground.errors import RigError
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_world import GoogleRefusal
from forge.suites.fake_host import FakeHost, FakeHosts

PROJECT, ZONE, TPU_ZONE = "fake-proj", "us-east5-b", "us-west4-a"
PATIENCE_S = 60.0
TPU = ("compute", "tpus", "tpu-vm", "ssh")
CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
# What a machine runs in these tests: it says what it was given, and does what it is told.
PROGRAM = b'''#!/usr/bin/env python3
"""A program with all that a real one has at its head."""

from __future__ import annotations

import base64
import json
import sys

act, data = sys.argv[1:]
given = json.loads(base64.urlsafe_b64decode(data))
print("act", act, json.dumps(given, sort_keys=True))
print("a remark", file=sys.stderr)
print("\\u00e9 and \\"quotes\\" 'too'")
if act == "flood":
    print("x" * given["size"])
    print("the last line")
if act == "fail":
    print("it cannot be done: \\x1b[31mthe disk is full", file=sys.stderr)
    sys.exit(given.get("status", 3))
if act == "crash":
    raise RuntimeError("out of ideas")
'''


class ShellCase(unittest.IsolatedAsyncioTestCase):
    """A fake Google, the stand-in for gcloud, and a machine by the name of rig-1."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        self.bin = self.folder / "bin"
        self.journal = fake_gcloud(self.bin)
        self.surroundings = self.cloud.environment(self.folder, str(self.bin))
        self.gcloud = Gcloud(PROJECT, environment=self.surroundings)
        self.shell = GcloudShell(self.gcloud)

    async def create(self, name: str = "rig-1") -> None:
        flags: dict[str, GcloudFlag] = {
            "zone": ZONE,
            "machine-type": "ct6e-standard-1t",
            "image-family": "x",
            "image-project": "y",
            "async": True,
        }
        await self.gcloud.change(GcloudCall(("compute", "instances", "create"), name, flags), 60)

    async def create_node(self, name: str = "rig-1") -> None:
        flags: dict[str, GcloudFlag] = {
            "zone": TPU_ZONE,
            "node-id": name,
            "accelerator-type": "v5litepod-1",
            "runtime-version": "v2-alpha-tpuv5-lite",
            "async": True,
        }
        create = ("compute", "tpus", "queued-resources", "create")
        await self.gcloud.change(GcloudCall(create, name, flags), 60)
        self.cloud.advance(60)

    def calls(self) -> list[list[str]]:
        return [json.loads(line)[1:] for line in self.journal.read_text().splitlines()]

    async def act(self, act: str = "status", zone: str = ZONE, **given: str | int | bool) -> str:
        return await self.shell.run("rig-1", zone, PROGRAM, act, given, PATIENCE_S)

    async def refused(self, act: str = "status", zone: str = ZONE, **given: Any) -> RigError:
        with self.assertRaises(RigError) as raised:
            await self.act(act, zone, **given)
        return raised.exception


class OnAMachineTest(ShellCase):
    """The program runs in a machine's sandbox, with its input and its streams."""

    def setUp(self) -> None:
        super().setUp()
        self.hosts = self.enterContext(FakeHosts(self.cloud, self.folder / "hosts"))
        for name in ("ssh", "ssh-keygen"):
            (self.bin / name).symlink_to(self.hosts.bin / name)

    async def host(self) -> FakeHost:
        await self.create()
        return await asyncio.to_thread(self.hosts.host, "rig-1")

    async def test_the_act_the_arguments_and_both_streams_in_order(self) -> None:
        await self.host()
        text = await self.act("logs", lines=20, who='it\'s "me" $(touch x); é', all=True)
        first, second, third = text.splitlines()
        self.assertEqual(
            first,
            'act logs {"all": true, "lines": 20, "who": "it\'s \\"me\\" $(touch x); \\u00e9"}',
        )
        self.assertEqual(second, "a remark")
        self.assertEqual(third, "é and \"quotes\" 'too'")
        again = await self.act("logs")  # the key is known now
        self.assertTrue(again.startswith("act logs {}\n"), again)

    async def test_how_gcloud_is_called(self) -> None:
        await self.host()
        await self.act("logs", lines=20)
        (call,) = [words for words in self.calls() if "ssh" in words]
        command = next(word for word in call if word.startswith("--command="))
        word = command.removeprefix("--command=sudo python3 - logs ")
        self.assertRegex(word, r"^[A-Za-z0-9_=-]+$")
        self.assertEqual(json.loads(base64.urlsafe_b64decode(word)), {"lines": 20})
        expected = {
            *("compute", "ssh", f"--zone={ZONE}", "--tunnel-through-iap"),
            *("--strict-host-key-checking=no", f"--project={PROJECT}", "--quiet", "rig-1"),
            *("--ssh-flag=-oBatchMode=yes", "--ssh-flag=-oConnectTimeout=20", command),
        }
        self.assertEqual(set(call), expected)
        self.assertNotIn("import json", self.journal.read_text())

    async def test_it_runs_as_root_in_the_machine_and_not_here(self) -> None:
        host = await self.host()
        program = b"import os; print(os.environ['GEMMA4_ROOT'], os.getcwd())"
        text = await self.shell.run("rig-1", ZONE, program, "status", {}, PATIENCE_S)
        self.assertEqual(text.split(), [str(host.root), str(host.root / "root")])
        self.assertEqual(host.programs()[-1][:3], ["sudo", "python3", "-"])

    async def test_a_program_that_fails_is_told_by_its_last_line(self) -> None:
        await self.host()
        error = await self.refused("fail", status=9)
        self.assertEqual(error.error_class, "INTERNAL", error)
        self.assertIn("`fail` on rig-1 failed (status 9)", error.what)
        self.assertIn("it cannot be done: the disk is full", error.what)
        error = await self.refused("crash")
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("RuntimeError: out of ideas", error.what)

    async def test_a_status_of_255_is_a_broken_connection(self) -> None:
        await self.host()
        error = await self.refused("fail", status=255)
        self.assertEqual(error.error_class, "UNREACHABLE", error)
        self.assertIn("may have been done", error.what)

    async def test_the_output_is_bounded_and_its_end_is_kept(self) -> None:
        await self.host()
        text = await self.act("flood", size=3_000_000)
        self.assertLess(len(text), 70_000)
        self.assertTrue(text.endswith("the last line\n"))
        self.assertIn("bytes left out", text)

    async def test_a_machine_without_sudo_for_us(self) -> None:
        host = await self.host()
        host.script(sudo="sudo: a password is required")
        error = await self.refused()
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("a password is required", error.what)

    async def test_a_machine_that_does_not_answer_yet_that_knows_no_key_that_is_off(self) -> None:
        host = await self.host()
        for order, words in (
            ("refused", "still starts"),
            ("timeout", "still starts"),
            ("key", "does not know the ssh key yet"),
        ):
            host.script(ssh=order)
            error = await self.refused()
            self.assertEqual(error.error_class, "UNREACHABLE", order)
            self.assertIn(words, error.what)
        host.script()
        self.cloud.compute.shut_down("rig-1")
        self.assertEqual((await self.refused()).error_class, "UNREACHABLE")

    async def test_a_machine_that_is_gone(self) -> None:
        await self.create("rig-2")
        error = await self.refused()
        self.assertEqual(error.error_class, "NOT_FOUND", error)

    async def test_a_node_is_reached_through_alpha_and_its_worker(self) -> None:
        await self.create_node()
        shell = GcloudShell(self.gcloud, TPU)
        text = await shell.run("rig-1", TPU_ZONE, PROGRAM, "status", {}, PATIENCE_S)
        self.assertTrue(text.startswith("act status {}\n"), text)
        call = self.calls()[-1]
        self.assertEqual(call[:5], ["alpha", *TPU])
        self.assertIn("--worker=0", call)
        self.assertIn("--tunnel-through-iap", call)
        same = GcloudShell(self.gcloud, ("alpha", *TPU)).tunnel_argv("rig-1", TPU_ZONE, 8000, 8000)
        self.assertEqual(same[1:6], ["alpha", *TPU])

    async def test_a_node_whose_connection_breaks_is_no_success(self) -> None:
        """gcloud tries ten times, and only the first has the program: the rest end with 0."""
        await self.create_node()
        program = self.folder / "hosts" / "bin" / "ssh"
        real = program.with_name("real-ssh")
        program.rename(real)
        mark = self.folder / "once"
        program.write_text(
            f"#!/bin/sh\nif [ ! -e {mark} ]; then touch {mark}; cat >/dev/null; exit 255; fi\n"
            f'exec {real} "$@"\n'
        )
        program.chmod(0o755)
        shell = GcloudShell(self.gcloud, TPU)
        with self.assertRaises(RigError) as raised:
            await shell.run("rig-1", TPU_ZONE, PROGRAM, "restart", {}, PATIENCE_S)
        self.assertEqual(raised.exception.error_class, "UNREACHABLE", raised.exception)
        self.assertIn("did not reach the machine", raised.exception.what)


class RefusalTest(ShellCase):
    """The words of ssh and gcloud, said by small programs, as what one can do about them."""

    async def say(self, words: str, status: int = 255, out: str = "") -> RigError:
        source = f"#!/bin/sh\ncat >/dev/null\nprintf '%s' '{out}'\ncat >&2 <<'END'\n{words}\nEND\n"
        (self.bin / "ssh").write_text(f"{source}exit {status}\n")
        (self.bin / "ssh").chmod(0o755)
        (self.folder / ".ssh").mkdir(exist_ok=True)
        for end in ("", ".pub"):
            (self.folder / ".ssh" / f"google_compute_engine{end}").write_text("ssh-rsa AAAA\n")
        return await self.refused()

    async def test_the_words(self) -> None:
        await self.create()
        iap = "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting"
        closed = "Connection closed by UNKNOWN port 65535"
        cases = (
            (f"{iap} [4003: 'failed to connect to backend'].", "UNREACHABLE", "35.235.240.0/20"),
            (f"{iap} [4033: 'not authorized'].\n{closed}", "DENIED", "iap.tunnelResourceAccessor"),
            (f"{iap} [4047: 'Failed to lookup instance'].\n{closed}", "UNREACHABLE", "state"),
            ("u@h: Permission denied (publickey).", "UNREACHABLE", "osAdminLogin"),
            ("u@h: Permission denied (publickey,password).", "UNREACHABLE", "wait a minute"),
            ("ssh: connect to host h port 22: Connection refused", "UNREACHABLE", "wait"),
            ("ssh: connect to host h port 22: Connection timed out", "UNREACHABLE", "wait"),
            (
                "kex_exchange_identification: Connection closed by remote host",
                "UNREACHABLE",
                "wait",
            ),
            ("something that nobody has seen before", "UNREACHABLE", ""),
        )
        for words, error_class, step in cases:
            with self.subTest(words):
                error = await self.say(words)
                self.assertEqual(error.error_class, error_class, error)
                self.assertIn(step, error.next_step)
                self.assertIn(words.splitlines()[0][-20:].strip("'].\n"), error.what)

    async def test_a_success_that_printed_nothing_is_none(self) -> None:
        await self.create()
        error = await self.say("", status=0)
        self.assertEqual(error.error_class, "UNREACHABLE")
        error = await self.say("", status=0, out="GEMMA4-HOST 0000")
        self.assertEqual(error.error_class, "UNREACHABLE", "a mark of somebody else's")

    async def test_what_should_start_the_program_is_not_there(self) -> None:
        await self.create()
        error = await self.say("bash: line 1: sudo: command not found", status=127)
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertIn("did not start (status 127): bash: line 1: sudo", error.what)

    async def test_text_of_the_machine_is_bounded_and_without_secrets(self) -> None:
        await self.create()
        error = await self.say(f"\x1b[31mno {CANARY} " + "y" * 100_000, status=5)
        self.assertLess(len(str(error)), 1000)
        self.assertNotIn(CANARY, str(error))
        self.assertNotIn("\x1b", str(error))

    async def test_a_key_that_may_not_be_put_anywhere(self) -> None:
        await self.create()
        answer = self.cloud.compute.answer

        def refusing(method: str, path: str, query: Any, body: dict[str, Any]) -> dict[str, Any]:
            if path.endswith(("/setCommonInstanceMetadata", "/setMetadata")):
                what = "Required 'compute.instances.setMetadata' permission for 'rig-1'"
                raise GoogleRefusal(403, "PERMISSION_DENIED", what, "forbidden")
            return answer(method, path, query, body)

        self.cloud.compute.answer = refusing  # type: ignore[method-assign]
        (self.bin / "ssh").write_text("#!/bin/sh\nexit 0\n")
        (self.bin / "ssh-keygen").write_text('#!/bin/sh\nfor f; do :; done; echo k > "$f.pub"\n')
        for name in ("ssh", "ssh-keygen"):
            (self.bin / name).chmod(0o755)
        error = await self.refused()
        self.assertEqual(error.error_class, "DENIED", error)
        self.assertIn("may not put its ssh key on the machine", error.what)
        self.assertIn("compute.instanceAdmin.v1", error.next_step)

    async def test_a_key_that_is_new_and_reaches_nobody(self) -> None:
        await self.create()
        (self.bin / "ssh").write_text("#!/bin/sh\nexit 255\n")
        (self.bin / "ssh-keygen").write_text('#!/bin/sh\nfor f; do :; done; echo k > "$f.pub"\n')
        for name in ("ssh", "ssh-keygen"):
            (self.bin / name).chmod(0o755)
        error = await self.refused()
        self.assertEqual(error.error_class, "UNREACHABLE", error)
        self.assertIn("does not know the ssh key yet", error.what)

    async def test_no_ssh_no_gcloud_no_login(self) -> None:
        await self.create()
        tools = self.folder / "tools"
        tools.mkdir()
        bare = Gcloud(PROJECT, environment={**self.surroundings, "PATH": str(tools)})
        (tools / "gcloud").symlink_to(self.bin / "gcloud")
        (self.folder / ".ssh").mkdir()
        (self.folder / ".ssh" / "google_compute_engine").touch()
        (self.folder / ".ssh" / "google_compute_engine.pub").write_text("k\n")
        self.shell = GcloudShell(bare)
        error = await self.refused()
        self.assertEqual(error.error_class, "DENIED", error)
        self.assertIn("no ssh program", error.what)
        (self.folder / "token").write_text("expired")
        self.assertEqual((await self.refused()).error_class, "AUTH")
        (tools / "gcloud").unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "DENIED")
        self.assertIn("gcloud is not installed", error.what)
        with self.assertRaises(RigError) as raised:
            self.shell.tunnel_argv("rig-1", ZONE, 8000, 8000)
        self.assertEqual(raised.exception.error_class, "DENIED")

    async def test_another_project_and_a_command_that_gcloud_does_not_know(self) -> None:
        self.shell = GcloudShell(Gcloud("other-project", environment=self.surroundings))
        self.assertEqual((await self.refused()).error_class, "DENIED")
        self.shell = GcloudShell(self.gcloud, ("compute", "sssh"))
        self.assertEqual((await self.refused()).error_class, "INVALID")
        self.shell = GcloudShell(self.gcloud, flags={"no-such-flag": "x"})
        with self.assertRaises(RigError) as raised:
            await self.act()
        self.assertEqual(raised.exception.error_class, "INVALID")

    async def test_no_end_is_awaited_for_ever_and_nothing_is_left(self) -> None:
        await self.create()
        pid = self.folder / "pid"
        await self.say("", status=0)
        (self.bin / "ssh").write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 300\n")
        with self.assertRaises(RigError) as raised:
            await self.shell.run("rig-1", ZONE, PROGRAM, "status", {}, 3)
        self.assertEqual(raised.exception.error_class, "TIMEOUT")
        self.assertIn("`status` within 3 s", raised.exception.what)
        gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        with suppress(psutil.NoSuchProcess):
            self.assertIn(psutil.Process(int(pid.read_text())).status(), gone)


class ArgumentTest(ShellCase):
    """What may be said to a machine at all; refused before any program starts."""

    async def test_forms(self) -> None:
        for act in ("", "Status", "a b", "--help", "-", "rm;reboot", "a" * 40, "a\nb", "$(x)"):
            self.assertEqual((await self.refused(act)).error_class, "INVALID", act)
        for name in ("", "-x", "a b", "user@host", "../x", "a;b", "projects/x"):
            with self.assertRaises(RigError) as raised:
                await self.shell.run(name, ZONE, PROGRAM, "status", {}, PATIENCE_S)
            self.assertIn(raised.exception.error_class, ("INVALID",), name)
            with self.assertRaises(RigError):
                self.shell.tunnel_argv(name, ZONE, 8000, 8000)
        self.assertEqual((await self.refused(zone="--help")).error_class, "INVALID")
        error = await self.refused(token=CANARY)
        self.assertEqual(error.error_class, "DENIED")
        self.assertNotIn(CANARY, str(error))
        self.assertEqual((await self.refused(text="x" * 9000)).error_class, "INVALID")
        self.assertEqual(self.calls(), [])

    def test_arguments_as_one_word(self) -> None:
        given: dict[str, str | int | bool] = {"lines": 200, "text": "ü\n", "yes": True}
        word = host_arguments(given)
        self.assertEqual(json.loads(base64.urlsafe_b64decode(word)), given)
        self.assertFalse(word.startswith("eyJ"), "it would be taken for a web token")
        self.assertEqual(json.loads(base64.urlsafe_b64decode(host_arguments({}))), {})
        longest = host_arguments({"t": "x" * 5980})
        self.assertLessEqual(len(longest), HOST_ARGUMENTS_LIMIT)

    def test_the_tunnels_command(self) -> None:
        argv = self.shell.tunnel_argv("rig-1", ZONE, 18000, 8000)
        self.assertEqual(argv[0], str(self.bin / "gcloud"))
        cut = argv.index("--")
        self.assertIn("rig-1", argv[:cut])
        self.assertIn("--tunnel-through-iap", argv[:cut])
        self.assertIn("--quiet", argv[:cut])
        self.assertEqual(
            argv[cut + 1 :],
            ["-N", "-L", "127.0.0.1:18000:127.0.0.1:8000", "-oExitOnForwardFailure=yes"]
            + ["-oServerAliveInterval=15"],
        )
        for bad in (0, -1, 65536):
            for ports in ((bad, 8000), (8000, bad)):
                with self.assertRaises(RigError) as raised:
                    self.shell.tunnel_argv("rig-1", ZONE, *ports)
                self.assertEqual(raised.exception.error_class, "INVALID")


class TunnelTest(ShellCase):
    """The tunnel's command carries a port for as long as it runs, and for as long as it can."""

    def setUp(self) -> None:
        super().setUp()
        self.hosts = self.enterContext(FakeHosts(self.cloud, self.folder / "hosts"))
        for name in ("ssh", "ssh-keygen"):
            (self.bin / name).symlink_to(self.hosts.bin / name)

    async def asyncSetUp(self) -> None:
        await self.create()
        self.host = await asyncio.to_thread(self.hosts.host, "rig-1")
        image = "vllm/vllm-tpu:nightly"
        self.run_argv = [
            *("docker", "run", "--detach", "--name", "vllm"),
            *("--publish", f"127.0.0.1:{self.host.port}:8000", image, "vllm", "serve", "m"),
        ]
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])

    async def opened(self) -> asyncio.subprocess.Process:
        argv = self.shell.tunnel_argv("rig-1", ZONE, self.port, 8000)
        log = (self.folder / "tunnel.log").open("wb")
        self.addCleanup(log.close)
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=self.surroundings,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=log,
            stdout=log,
            start_new_session=True,
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: asyncio.subprocess.Process) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def ask(self, path: str = "/v1/models") -> Any:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            line.request("GET", path)
            return json.loads(line.getresponse().read())
        finally:
            line.close()

    async def answered(self) -> Any:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(self.ask)
            except (OSError, http.client.HTTPException):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def test_it_leads_to_the_container_and_ends_with_the_machine(self) -> None:
        started = await asyncio.to_thread(self.host.run, *self.run_argv)
        self.assertEqual(started.returncode, 0, started.stderr)
        process = await self.opened()
        self.assertEqual((await self.answered())["data"][0]["id"], "m")
        many = await asyncio.gather(*(asyncio.to_thread(self.ask) for _ in range(8)))
        self.assertEqual(len(many), 8)
        await asyncio.to_thread(self.host.run, "docker", "stop", "vllm")
        with self.assertRaises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(self.ask)  # the tunnel stands, nobody is behind it
        self.assertIsNone(process.returncode)
        self.cloud.preempt("rig-1")
        self.assertEqual(await asyncio.wait_for(process.wait(), PATIENCE_S), 255)
        self.assertIn("Broken pipe", (self.folder / "tunnel.log").read_text())

    async def test_a_port_that_is_taken(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", self.port))
            one.listen()
            process = await self.opened()
            self.assertEqual(await asyncio.wait_for(process.wait(), PATIENCE_S), 255)
        self.assertIn("Address already in use", (self.folder / "tunnel.log").read_text())

    async def test_a_machine_that_is_off(self) -> None:
        self.cloud.compute.shut_down("rig-1")
        process = await self.opened()
        self.assertNotEqual(await asyncio.wait_for(process.wait(), PATIENCE_S), 0)


if __name__ == "__main__":
    unittest.main()
