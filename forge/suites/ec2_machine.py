"""A machine on EC2 that serves, from all sides: what it runs, its GPU, console, address, power.

It is served once for all of these tests, which leave it as they found it.
"""

from __future__ import annotations

import json
import urllib.request

from forge.suites.ec2_orders import Ec2OrderCase
from forge.suites.rented_case import IMAGE_DIGEST_NOW


class Ec2MachineSuite(Ec2OrderCase):
    """One machine that serves."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        return {**super().good_settings(), "MARKETS": "on-demand"}  # a spot one cannot be stopped

    async def asyncTearDown(self) -> None:
        self.host().script()
        await super().asyncTearDown()

    async def test_what_the_machine_was_told_to_run(self) -> None:
        """The image by the digest that its tag had, the limits of tpu.env, the address loopback."""
        argv = self.engine.starts()[-1]["argv"]
        run = next(words for words in self.host().programs() if words[:2] == ["docker", "run"])
        self.assertIn(IMAGE_DIGEST_NOW, " ".join(run))
        self.assertRegex(run[run.index("--publish") + 1], r"^127\.0\.0\.1:\d+:8000$")
        self.assertIn("--gpus", run)
        self.assertNotIn("--privileged", run)
        self.assertNotIn(
            "host", [run[at + 1] for at, word in enumerate(run) if word == "--network"]
        )
        self.assertIn("google/gemma-4-E2B-it", argv)
        for flag, value in (("--max-model-len", "32768"), ("--tool-call-parser", "gemma4")):
            self.assertEqual(argv[argv.index(flag) + 1], value)
        self.assertTrue(self.host().container()["State"]["Running"])
        self.assertEqual(self.engine.starts()[-1]["environment"]["HF_TOKEN"], "given")

    async def test_the_boot_went_through_its_phases(self) -> None:
        async with self.in_process() as client:
            log = await self.text(client, "get_tpu_vm_serial_log", lines=2000)
            short = await self.text(client, "get_tpu_vm_serial_log", lines=3)
        marks = [line.partition("GEMMA4-BOOT ")[2].split() for line in log.splitlines()]
        done = dict.fromkeys(words[0] for words in marks if words[1:2] == ["done"])
        self.assertEqual(list(done), list(self.assembled().context.runtime.phases), log)
        self.assertIn("GEMMA4-END", log.partition("GEMMA4-BOOT ")[0], "its end came first")
        self.assertLess(len(short.splitlines()), 6, short)

    async def test_the_gpu_is_the_one_that_the_rig_is_made_for(self) -> None:
        async with self.in_process() as client:
            good = await self.answer(client, "verify_gpu_arch")
            self.assertEqual((good["fits"], good["compute_capability"]), (True, "8.9"))
            self.assertEqual((good["name"], good["wanted"]), ("NVIDIA L4", "8.9"))
            self.assertGreater(good["memory_mib"], 22_000)
            self.assertTrue(good["driver"] and good["cuda_driver"])
            self.host().script(gpu="g4dn")
            bad = await self.answer(client, "verify_gpu_arch")
            self.assertEqual((bad["fits"], bad["compute_capability"]), (False, "7.5"))
            self.assertIn("plan_destroy", bad["next_step"])
            self.host().script(driver=False)
            await self.refusal(client, "verify_gpu_arch", "INTERNAL")

    async def test_its_address_is_a_tunnel_that_carries_no_token_for_all_to_see(self) -> None:
        async with self.in_process() as client:
            model = await self.answer(client, "get_endpoint")
            machine = (await client.call_tool("get_endpoint", {})).structured_content or {}
        self.assertEqual(model["base_url"], f"http://127.0.0.1:{self.port}/v1")
        self.assertEqual(machine["tunnel"], f"http://127.0.0.1:{self.port}")
        with urllib.request.urlopen(f"{model['base_url']}/models", timeout=20) as answer:
            (served,) = json.loads(answer.read())["data"]
        self.assertEqual(served["id"], model["model"])
        (tunnel,) = self.tunnels()
        words = " ".join(tunnel.cmdline())
        self.assertIn(self.cloud.machines()[0].id, words)
        self.assertNotIn("made-up-session-token", words)
        sessions = self.cloud.sent("StartSession")
        documents = {one.parameters["DocumentName"] for one in sessions}
        self.assertEqual(documents, {"AWS-StartPortForwardingSession"})

    async def test_the_container_is_stopped_and_comes_back(self) -> None:
        async with self.in_process() as client:
            await self.answer(client, "manage_vllm_docker", action="stop")
            await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertIn("was stopped by this rig", " ".join(status["notes"]))
            text = await self.refusal(client, "wait_for_model_ready", "NOT_FOUND", wait_s=50)
            self.assertIn("exited", text)
            self.assertIn("manage_vllm_docker(action='start')", text)
            self.assertTrue(status["cost"]["billed"], "a stopped container is no stopped machine")
            await self.answer(client, "manage_vllm_docker", action="start")
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")

    async def test_a_stopped_machine_boots_again_and_serves(self) -> None:
        async with self.in_process() as client:
            host = self.host()
            end = (host.root / "var/lib/gemma4/end").read_text()
            stopped = await self.answer(client, "stop_gpu_instance")
            self.assertIn("start_gpu_instance()", stopped["next_step"])
            await self.until(lambda: not self.processes("server"), "it was not switched off")
            self.assertFalse(host.on)
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertTrue(status["cost"]["billed"], "its disk is billed")
            await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            self.assertEqual(len(self.rented()["instances"]), 1)
            started = await self.answer(client, "start_gpu_instance")
            self.assertEqual(started["ends_at"], stopped["ends_at"])
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual((host.root / "var/lib/gemma4/end").read_text(), end)
            pulls = [words for words in host.programs() if words[:2] == ["docker", "pull"]]
            self.assertEqual(len(pulls), 1, "what was pulled lies on its disk")
