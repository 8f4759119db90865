"""What a machine that builds its model server on EC2 can meet: compiler, disk, source, GPU.

Each is told by the line that decides, in the wait, in the build's progress and in the diagnosis;
the machine is billed all the same, and it still ends.
"""

from __future__ import annotations

from typing import Any

from mcp import Client

from forge.suites.ec2_build_case import BUILDING_PROGRAMS, Ec2BuildCase
from forge.suites.ec2_fault_case import Ec2FaultCase


class Ec2BuildFaultSuite(Ec2FaultCase, Ec2BuildCase):
    """A failed build is no start, is not repeated by itself, and costs until it is ended."""

    async def told(self, client: Client, words: str, **orders: Any) -> str:
        """The words of a boot that fails so; they hold `words`, and so does the diagnosis."""
        self.hosts.orders = {"build_files": 8, **orders}
        await self.created(client)
        text = await self.refusal(client, "wait_for_model_ready", "INTERNAL", wait_s=50)
        self.assertIn(words, text)
        found = await self.answer(client, "analyze_logs")
        self.assertTrue(found["found"], found)
        self.assertIn(words, found["line"])
        status = await self.answer(client, "get_system_status")
        self.assertNotEqual(status["state"], "ready")
        self.assertTrue(status["cost"]["billed"], "it is billed all the same")
        self.assertEqual(self.host().llama.starts(), [], "it was started all the same")
        await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
        self.assert_marked(1)
        self.assertTrue((self.host().root / "var/lib/gemma4/end").read_text().strip())
        return text

    async def test_builds_that_fail_are_told_and_still_end(self) -> None:  # I08, B01, B02, B05
        refused = 'error: identifier "__hfma2" is undefined'
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"build": f"ggml/src/ggml-cuda/fattn.cu(12): {refused}"}, refused),
            ({"disk_full": True}, "No space left on device"),
            ({"killed": True}, "Killed signal terminated program cc1plus"),
        )
        for orders, words in cases:
            with self.subTest(words):
                async with self.in_process() as client:
                    await self.told(client, words, **orders)
                    built = await self.answer(client, "get_build_progress")
                    self.assertEqual(built["state"], "failed", built)
                    self.assertIn(words, " ".join(built["log"]))
                    self.assertLess(built["files"], built["of"])
                    self.assertEqual(built["next_step"], "analyze_logs()")
                    self.assertEqual(self.built(self.host()), 1, "it was repeated by itself")
                self.forget_everything()
                self.few_regions()

    async def test_a_source_that_is_not_to_be_had_or_is_another(self) -> None:  # B03, A43
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"source": "ERROR: No matching distribution found for the source"}, "No matching"),
            ({"network": False}, "from versions: none"),
        )
        for orders, words in cases:
            with self.subTest(words):
                async with self.in_process() as client:
                    await self.told(client, words, **orders)
                    self.assertEqual(self.built(self.host()), 0)
                self.forget_everything()
                self.few_regions()

    async def test_another_gpu_is_told_before_anything_is_built(self) -> None:  # B04
        for orders, words in (({"gpu": "g6"}, "8.9"), ({"gpu": "absent"}, "GPU")):
            with self.subTest(words):
                async with self.in_process() as client:
                    await self.told(client, words, **orders)
                called = {argv[0] for argv in self.host().programs()}
                self.assertEqual(called & BUILDING_PROGRAMS, set(), called)
                self.assertEqual(self.host().hub.asked, [])
                self.forget_everything()
                self.few_regions()
