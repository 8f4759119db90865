"""Reaching a rented machine while something goes wrong, and what goes out with it when it is made.

One machine serves all tests of the class; each puts right what it broke. Witnesses: the prompts
that the model servers got, the arguments of every program, the machine's own metadata.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from unittest import mock

from forge.suites.rented_case import IMAGE_DIGEST_NOW
from forge.suites.rented_fault_case import STRANGER, WESTERN, RentedFaultCase

# What a container of ours may never be given, whatever a reason says.
_NEVER_GRANTED = ("--privileged", "--net=host", "--network=host", "docker.sock", "--pid=host")
_NEVER_SERVED = ("--trust-remote-code", "--api-key", "--load-format", "--allowed-local-media-path")


class ReachingFaultSuite(RentedFaultCase):
    """No prompt to a stranger, no act on one, and what cannot be reached is told apart."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def asyncTearDown(self) -> None:
        self.engine.script()
        self.host().script()
        await super().asyncTearDown()

    def prompts(self) -> int:
        return len(self.engine.requests())

    async def test_what_went_out_with_the_machine(self) -> None:  # A05, A08, A11, A14, A28, A43
        machine = self.machine_at_google()
        items = {one["key"]: one["value"] for one in machine["metadata"]["items"]}
        self.assertEqual(set(items), {"startup-script", "gemma4-boot"})
        self.assertEqual(items["startup-script"], (self.rig_folder / "boot.py").read_text())
        document = json.loads(items["gemma4-boot"])
        self.assertTrue(document["image"].endswith(f"@{IMAGE_DIGEST_NOW}"), document["image"])
        argv = document["container"]
        self.assertIn(document["image"], argv)
        for word in (*_NEVER_GRANTED, *_NEVER_SERVED):
            self.assertNotIn(word, " ".join(argv))
        self.assertFalse([word for word in argv if word.startswith("HF_TOKEN=")])
        published = [argv[i + 1] for i, word in enumerate(argv) if word in ("-p", "--publish")]
        published += [word.partition("=")[2] for word in argv if word.startswith("--publish=")]
        self.assertEqual([one.split(":")[0] for one in published], ["127.0.0.1"])
        (account,) = machine["serviceAccounts"]
        self.assertEqual(account["email"], "gemma4-rig@fake-proj.iam.gserviceaccount.com")
        self.assert_marked(1)
        (disk,) = self.google.compute.disks.values()
        self.assertIn(f"intent:{machine['labels']['intent']}", disk["description"])

    async def test_every_privilege_has_its_reason(self) -> None:  # A08
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                plan = await self.answer(client, "get_vllm_deployment_config", zone=WESTERN)
        argv, told = plan["container_argv"], " ".join(plan["privileges"])
        grants = [word for word in argv if re.match(r"--(?:device|cap-add|ulimit|shm-size)", word)]
        self.assertGreater(len(grants), 0)
        for grant in grants:
            self.assertIn(grant.partition("=")[2] or argv[argv.index(grant) + 1], told)

    async def test_what_a_machine_is_told_is_data(self) -> None:  # A02, A04
        async with self.in_process() as client:
            for action in ("status", "restart"):
                await self.answer(client, "manage_vllm_docker", action=action)
            await self.text(client, "get_vllm_docker_logs", lines=7)
            await self.ready(client)
        commands = [
            word.partition("=")[2]
            for words in self.provider().called("compute", "ssh")
            for word in words
            if word.startswith("--command=")
        ]
        self.assertGreaterEqual(len(commands), 3)
        for command in commands:
            act = re.fullmatch(r"sudo python3 - ([a-z_]+) ([A-Za-z0-9_=-]+)", command)
            assert act is not None, command
            self.assertIsInstance(json.loads(base64.urlsafe_b64decode(act[2])), dict)
        self.assertEqual(self.provider().called("compute", "firewall-rules"), [])
        # One positional, the name; every value in one piece with its flag; the project in all.
        for words in self.provider().called("compute"):
            mine = words[: words.index("--")] if "--" in words else words
            flags = [word for word in mine if word.startswith("-")]
            self.assertIn("--project=fake-proj", flags, words)
            places = [word for word in mine if not word.startswith("-")]
            for word in places:
                self.assertRegex(word, r"\A[a-z0-9-]+\Z")

    async def test_a_machine_that_cannot_be_reached(self) -> None:  # D21, D22, D47, A34
        async with self.in_process() as client:
            for fault in ("refused", "timeout", "key", "Host key verification failed."):
                with self.subTest(fault=fault):
                    self.host().script(ssh=fault)
                    text = await self.refusal(client, "get_vllm_docker_logs", "UNREACHABLE")
                    self.assertIn(" Next: ", text)
                    console = await self.text(client, "get_tpu_vm_serial_log")
                    self.assertIn("GEMMA4-BOOT ready done", console)

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
            for pid in self.processes("tunnel"):
                self.module.os.kill(pid, 9)
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
        async with self.in_process() as client:
            await self.serve(client)

    async def _nothing_for_a_namesake(self) -> None:
        async with self.in_process() as client:
            await self.ready(client)
            with self.google.lock:
                own = self.google.compute.instances.copy()
                (place,) = own
                self.google.compute.instances[place] = {
                    **own[place],
                    "id": "4711",
                    "labels": dict(STRANGER),
                }
            before = self.prompts()
            await self.until(lambda: not self._tunnel_holds(), "the tunnel outlives its machine")
            for tool, arguments in (
                ("query_gemma4", {"prompt": "a secret plan"}),
                ("manage_vllm_docker", {"action": "rm"}),
                ("get_vllm_endpoint", {}),
            ):
                await self.refusal(client, tool, "NOT_FOUND", **arguments)
            self.assertEqual(self.prompts(), before)
            status = await self.answer(client, "get_system_status")
            self.assertIn("labels", str(status["notes"]))

    def _tunnel_holds(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
