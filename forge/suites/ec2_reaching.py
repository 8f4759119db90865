"""Reaching a machine on EC2 while something goes wrong, and what goes out with it at its launch.

One machine serves all tests of the class; each puts right what it broke. Witnesses: the prompts
that the model server got, every command of Systems Manager, the launch as it was sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from forge.suites.ec2_fault_case import FIRST, SOMEBODY_ELSE, Ec2FaultCase
from forge.suites.fake_aws_world import CallFault
from forge.suites.rented_case import IMAGE_DIGEST_NOW

# What a container of ours may never be given, whatever a reason says.
_REFUSED_GRANTS = ("--privileged", "--net=host", "--network=host", "docker.sock", "--pid=host")
_REFUSED_FLAGS = ("--trust-remote-code", "--api-key", "--load-format", "--allowed-local-media-path")


class Ec2ReachingFaultSuite(Ec2FaultCase):
    """No prompt to a stranger, no act on one, and what cannot be reached is told apart."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def asyncTearDown(self) -> None:
        self.engine.script()
        self.host().script()
        self.cloud.script.faults = []
        await super().asyncTearDown()

    def prompts(self) -> int:
        return len(self.engine.requests())

    async def test_what_went_out_with_the_machine(self) -> None:  # A05, A08, A11, A14, A28, A43
        self.assert_orders_are_marked()
        self.assert_marked(1)
        self.assert_nothing_comes_in(self.ours_alone().id)
        (order,) = self.orders()
        parts = order.parts()
        self.assertNotIn(b"set -x", b"".join(part.text for part in parts.values()))
        (file,) = json.loads(parts["cloud-config"].text.partition(b"\n")[2])["write_files"]
        document = json.loads(file["content"])
        self.assertTrue(document["image"].endswith(f"@{IMAGE_DIGEST_NOW}"), document["image"])
        argv = document["container"]
        self.assertIn(document["image"], argv)
        for word in (*_REFUSED_GRANTS, *_REFUSED_FLAGS):
            self.assertNotIn(word, " ".join(argv))
        self.assertFalse([word for word in argv if word.startswith("HF_TOKEN=")])
        published = [argv[i + 1] for i, word in enumerate(argv) if word in ("-p", "--publish")]
        published += [word.partition("=")[2] for word in argv if word.startswith("--publish=")]
        self.assertEqual([one.split(":")[0] for one in published], ["127.0.0.1"])

    async def test_every_privilege_has_its_reason(self) -> None:  # A08
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                plan = await self.answer(client, "get_vllm_deployment_config", zone=FIRST)
        argv, told = plan["container_argv"], " ".join(plan["privileges"])
        wanted = r"--(?:device|gpus|cap-add|ulimit|shm-size|ipc)"
        grants = [word for word in argv if re.match(wanted, word)]
        self.assertGreater(len(grants), 0)
        for grant in grants:
            self.assertIn(grant.partition("=")[2] or argv[argv.index(grant) + 1], told)

    async def test_what_a_machine_is_told_is_data(self) -> None:  # A02, A04
        """One script, whose program is checked by its hash; an act is a word and base64."""
        async with self.in_process() as client:
            for action in ("status", "restart"):
                await self.answer(client, "manage_vllm_docker", action=action)
            await self.text(client, "get_vllm_docker_logs", lines=7)
            await self.ready(client)
        sent = [one.parameters for one in self.cloud.sent("SendCommand")]
        self.assertGreaterEqual(len(sent), 3)
        digest = hashlib.sha256((self.rig_folder / "ec2_boot.py").read_bytes()).hexdigest()
        rest = set()
        for given in sent:
            self.assertEqual(given["InstanceIds"], [self.ours_alone().id])
            self.assertEqual(given["DocumentName"], "AWS-RunShellScript")
            (script,) = given["Parameters"]["commands"]
            act = re.search(r'program\.py" ([a-z_]+) ([A-Za-z0-9_=-]+) 2>&1$', script, re.M)
            assert act is not None, script
            self.assertIsInstance(json.loads(base64.urlsafe_b64decode(act[2])), dict)
            self.assertIn(digest, script)
            rest.add(script.replace(act[0], ""))
        self.assertEqual(len(rest), 1, "an argument is a part of the script")

    async def test_a_machine_that_cannot_be_reached(self) -> None:  # I07, D21, D22, D47, A34
        """Its agent is offline, or nobody may send it anything; its console is still read."""
        denied = CallFault("SendCommand", "AccessDeniedException")
        async with self.in_process() as client:
            for error_class, words, orders, faults in (
                ("UNREACHABLE", "InvalidInstanceId", {"agent": False}, []),
                ("DENIED", "ssm:SendCommand", {}, [denied]),
            ):
                with self.subTest(words):
                    self.host().script(**orders)
                    self.cloud.script.faults = faults
                    text = await self.refusal(client, "get_vllm_docker_logs", error_class)
                    self.assertIn(words, text)
                    self.assertIn(" Next: ", text)
                    console = await self.text(client, "get_console_log")
                    self.assertIn("GEMMA4-BOOT ready done", console)

    async def test_no_tunnel_where_the_agent_is_offline_or_the_plugin_is_gone(self) -> None:  # D01
        async with self.in_process() as client:
            await self.ready(client)
            self._end_tunnels()
            await self.until(lambda: not self._tunnel_holds(), "the tunnel stays")
            before = self.prompts()
            self.host().script(agent=False)
            text = await self.refusal(client, "query_gemma4", "UNREACHABLE", prompt="hello")
            self.assertIn("is not connected", text)
            self.host().script()
            plugin = self.provider().bin / "session-manager-plugin"
            plugin.rename(plugin.with_suffix(".away"))
            try:
                text = await self.refusal(client, "query_gemma4", "UNREACHABLE", prompt="hello")
                self.assertIn("session-manager-plugin", text)
                self.assertIn("install", text)
            finally:
                plugin.with_suffix(".away").rename(plugin)
            self.assertEqual(self.prompts(), before)
            await self.answer(client, "query_gemma4", prompt="hello")

    async def test_a_command_that_runs_at_the_deadline(self) -> None:  # I11, D49
        """It is told to end, its fate is not known, its id is told, and it is not sent again."""
        before, over = len(self.cloud.sent("SendCommand")), threading.Event()
        self.addCleanup(over.set)

        def goes_on() -> tuple[str, str, int]:
            over.wait(60)
            return "", "", 0

        with self._commands_end(goes_on), mock.patch.object(self.module, "_LOGS_S", 1.5):
            async with self.in_process() as client:
                text = await self.refusal(client, "get_vllm_docker_logs", "UNKNOWN")
        (sent,) = self.cloud.sent("SendCommand")[before:]
        (cancelled,) = self.cloud.sent("CancelCommand")
        self.assertEqual(cancelled.parameters["InstanceIds"], sent.parameters["InstanceIds"])
        self.assertIn(cancelled.parameters["CommandId"], text)
        self.assertIn("was told to", text)

    @contextmanager
    def _commands_end(self, how: Callable[[], tuple[str, str, int]]) -> Iterator[None]:
        """While it lasts, whatever is sent to a machine ends as `how` says, and is not run."""
        before, self.cloud.run_command = self.cloud.run_command, lambda _one, _script: how()
        try:
            yield
        finally:
            self.cloud.run_command = before

    async def test_24_000_characters_of_a_command_and_its_end_is_there(self) -> None:  # I10, D48
        """What a machine is asked for is a tail that fits; where more came, that is said."""
        self.engine.script(log="a word of noise\n" * 20_000 + "the last line of the noise")
        async with self.in_process() as client:
            await self.answer(client, "manage_vllm_docker", action="restart")
            await self.ready(client)
            log = await self.text(client, "get_vllm_docker_logs", lines=2000)
            self.assertIn("the last line of the noise", log)
            self.assertNotIn("SSM passes on", log)
            flood = "a word\n" * 6000, "", 0  # of a program that keeps to no limit
            with self._commands_end(lambda: flood):
                log = await self.text(client, "get_vllm_docker_logs", lines=2000)
            self.assertIn("the end is missing here", log)
            self.assertLess(len(log), 40_000)

    async def test_a_server_that_is_down_on_a_machine_that_is_up(self) -> None:  # D21
        async with self.in_process() as client:
            await self.answer(client, "manage_vllm_docker", action="stop")
            await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertTrue(status["cost"]["billed"], "a stopped container ends no billing")
            await self.answer(client, "manage_vllm_docker", action="start")
            await self.ready(client)

    async def test_a_stranger_at_this_end_of_the_tunnel(self) -> None:  # D24, A48
        async with self.in_process() as client:
            await self.ready(client)
            self._end_tunnels()
            await self.until(lambda: not self.processes("tunnel"), "the tunnel stays")
            before = self.prompts()
            with socket.create_server(("127.0.0.1", self.port)) as stranger:
                stranger.settimeout(0.5)
                await self.refusal(client, "query_gemma4", "EXISTS", prompt="a secret plan")
                with self.assertRaises(TimeoutError):
                    stranger.accept()
            self.assertEqual(self.prompts(), before)
            await self.answer(client, "query_gemma4", prompt="hello")

    async def test_a_name_that_somebody_else_has_now(self) -> None:  # A48, D12, D46
        """The rig's machine is gone, and a stranger's has its name a moment later, sooner than the
        rig would look at it again by itself."""
        with mock.patch.object(self.module, "MACHINE_FRESH_S", 60.0):
            await self._nothing_for_a_namesake()
        self.forget_everything()
        self.few_regions()
        async with self.in_process() as client:
            await self.serve(client)

    async def _nothing_for_a_namesake(self) -> None:
        async with self.in_process() as client:
            await self.ready(client)
            own = self.ours_alone()
            tags = {key: value for key, value in own.tags.items() if key != "Name"}
            self.cloud.take_away(own.id)
            self.planted(own.name, {**tags, **SOMEBODY_ELSE})
            before, sent = self.prompts(), len(self.cloud.sent("SendCommand"))
            await self.until(lambda: not self._tunnel_holds(), "the tunnel outlives its machine")
            for tool, arguments in (
                ("query_gemma4", {"prompt": "a secret plan"}),
                ("manage_vllm_docker", {"action": "rm"}),
                ("get_vllm_endpoint", {}),
            ):
                await self.refusal(client, tool, "NOT_FOUND", **arguments)
            self.assertEqual(self.prompts(), before)
            self.assertEqual(len(self.cloud.sent("SendCommand")), sent)
            status = await self.answer(client, "get_system_status")
            self.assertIn("labels", str(status["notes"]))

    def _end_tunnels(self) -> None:
        for pid in self.processes("tunnel"):
            self.module.os.kill(pid, 9)

    def _tunnel_holds(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
