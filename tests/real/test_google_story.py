"""The whole story once with the real gcloud: find, serve, ask, measure, take down.

gcloud is the installed program, the cloud a fake on loopback, through a wrapper that notes each
call; the machines boot and serve a scripted vLLM. Without gcloud the test is skipped, by name.
"""

from __future__ import annotations

import shutil
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from mcp import Client

from forge.suites.fake_google import gcloud_wrapper
from forge.suites.google_case import GoogleCase, GoogleProvider
from forge.suites.rented_shared import RENTED_WORDS
from forge.suites.rig_case import RigUnderTest, use_rig

RIG_FOLDER = Path(__file__).resolve().parents[2] / "tpu-vllm-v6e1-2b"
GCLOUD = shutil.which("gcloud")


def setUpModule() -> None:
    use_rig(
        RigUnderTest(
            RIG_FOLDER,
            {},
            make_engine=RealGcloudProvider,
            make_model=lambda _folder: Path("google/gemma-4-E2B-it"),
            words=RENTED_WORDS,
        )
    )


class RealGcloudProvider(GoogleProvider):
    """The provider with the installed gcloud. One too old for FLEX_START is led to its alpha
    command for that one create; the wrapper that does so exists in tests alone."""

    def install(self) -> None:
        super().install()
        assert GCLOUD is not None
        self.argv_file = gcloud_wrapper(self.hosts.bin, GCLOUD)


@unittest.skipIf(GCLOUD is None, "gcloud is not installed")
class RealGcloudStoryTests(GoogleCase):
    """Seconds a call: the patience of the tools is what a real one has."""

    async def followed(self, client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
        """A job that `tool` begins, to its end."""
        begun = await self.answer(client, tool, **arguments)
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        return job

    async def test_find_serve_ask_measure_and_take_down(self) -> None:
        self.google.script.stockout = {"europe-west4-a"}
        self.google.script.hint = ("us-east5-b",)
        zones = ["europe-west4-a", "us-east5-b"]
        with mock.patch.dict("os.environ", HF_TOKEN="hf_" + "R" * 34, MARKETS="flex-start"):
            async with self.in_process() as client:
                await self.answer(client, "save_hf_token")
                job = await self.followed(client, "find_tpu_vm", zones=zones, hours=1)
                self.assertEqual(job["result"]["zone"], "us-east5-b")
                self._marked()
                await self.ready(client)
                said = await self.answer(
                    client, "query_gemma4", prompt="What is the capital of France?"
                )
                self.assertEqual(said["text"], "Paris.")
                log = await self.text(client, "get_vllm_docker_logs", lines=20)
                self.assertIn("Application startup complete", log)
                small = {"context_tokens": [32], "output_tokens": 4, "requests_per_cell": 2}
                await self.followed(client, "run_vllm_benchmark", concurrency=[1, 8, 32], **small)
                healthy = await self.answer(client, "analyze_logs")
                self.assertEqual(healthy["summary"], "no failure found")
                (machine,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
                await self._taken_down(client, machine)
        self._heard()

    async def _taken_down(self, client: Client, machine: Mapping[str, Any]) -> None:
        await self.destroyed(client, machine)
        await self.assert_all_gone()
        orphans = await self.answer(client, "list_orphans")
        self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
        status = await self.answer(client, "get_system_status")
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)

    def _marked(self) -> None:
        """What gcloud sent carries the labels and both ends."""
        sent = [one.body for one in self.google.sent("POST", "/instances")]
        orders = [body for body in sent if body and "machineType" in body]
        self.assertEqual(len(orders), 2, "one order in each zone")
        for body in orders:
            self.assertEqual(body["labels"]["rig"], self.module.RIG.name)
            self.assertTrue(body["labels"]["owner"] and body["labels"]["expires"])
            self.assertEqual(body["scheduling"]["provisioningModel"], "FLEX_START")
            self.assertTrue(body["scheduling"]["maxRunDuration"])

    def _heard(self) -> None:
        """No argument of gcloud's had the token, and every call named its project."""
        calls = self.provider().called()
        self.assertTrue(calls)
        for words in calls:
            self.assertNotIn("hf_R", " ".join(words))
        acts = [words for words in calls if words[:1] == ["compute"]]
        self.assertTrue(all("--project=fake-proj" in " ".join(words) for words in acts))


if __name__ == "__main__":
    unittest.main()
