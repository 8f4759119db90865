"""Weights from a hub: the rig's download through the real `huggingface_hub`, a hub on loopback.

What is downloaded is then started with the fake `transformers serve`: here the way to the weights
is tested, and each way in which it can fail.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from forge.suites.fake_engine import write_safetensors, write_tiny_folder
from forge.suites.rig_case import RigCase, RigUnderTest, use_rig
from tests.fake_hub import REPOSITORY, FakeHub, fake_hub

RIG_FOLDER = Path(__file__).resolve().parent.parent / "local-pytorch-cpu-2b"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY03"
WEIGHTS = "model.safetensors"


def setUpModule() -> None:
    use_rig(RigUnderTest(RIG_FOLDER, {}))


class HubDownloadTests(RigCase):
    """serve_model with a repository's name, from nothing to a model that answers."""

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.source = write_tiny_folder(self.place / "hub" / self.id().rpartition(".")[2])
        self.weights_of(500_000)
        self.home = self.place / "hub-cache" / self.id().rpartition(".")[2]

    def weights_of(self, numbers: int) -> None:
        """Weights of so many numbers of four bytes, beside a few that the model needs."""
        shapes = {"model.embed_tokens.weight": [64, 16], "model.filler": [numbers]}
        write_safetensors(self.source / WEIGHTS, shapes)

    @asynccontextmanager
    async def with_hub(self, **environment: str) -> Any:
        """(client, hub): a server whose workers ask the hub on loopback and no other."""
        with fake_hub(self.source) as hub:
            values = {"HF_ENDPOINT": hub.url, "HF_HOME": str(self.home), **environment}
            with mock.patch.dict("os.environ", values):
                async with self.in_process() as client:
                    yield client, hub

    def asked_for(self, hub: FakeHub, name: str) -> list[str]:
        """The Range headers of every GET of the file `name`."""
        return [
            wanted
            for method, path, wanted, _ in hub.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]

    async def test_a_repository_is_downloaded_and_served(self) -> None:
        (self.source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        (self.source / "README.md").write_text("words")
        async with self.with_hub(HF_TOKEN=CANARY) as (client, hub):
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "stopped")
            await self.refusal(client, "get_job", "INVALID", job_id=REPOSITORY)
            outcome = await self.serve(client, model=REPOSITORY)
            self.assertEqual(outcome["model"], REPOSITORY)
            folder = Path(self.engine.starts()[-1]["argv"][1])
            self.assertTrue(folder.is_relative_to(self.home))
            self.assertEqual((folder / WEIGHTS).read_bytes(), (self.source / WEIGHTS).read_bytes())
            self.assertFalse((folder / "pytorch_model.bin").exists(), "a pickle was fetched")
            self.assertFalse((folder / "README.md").exists())
            self.assertTrue(any(CANARY in auth for *_, auth in hub.requests), "no token was sent")
            self.assertNotIn(CANARY, str(self.engine.starts()[-1]["environment"]))
            details = await self.answer(client, "get_model_details")
            self.assertEqual((details["model"], details["folder"]), (REPOSITORY, str(folder)))
            await self.answer(client, "stop_model")
            # Once it is here, the hub is not asked again.
            before = len(hub.requests)
            hub.down = True
            await self.serve(client, model=REPOSITORY)
            self.assertEqual(len(hub.requests), before)
        for path in self.state.rglob("*"):
            if path.is_file():
                self.assertNotIn(CANARY.encode(), path.read_bytes(), str(path))

    async def test_a_transfer_that_breaks_goes_on_where_it_stopped(self) -> None:
        self.weights_of(4_000_000)
        async with self.with_hub() as (client, hub):
            hub.breaks, hub.breaks_after = 1, 12_000_000  # the client keeps pieces of 10 MB
            await self.serve(client, model=REPOSITORY)
            wanted = self.asked_for(hub, WEIGHTS)
            self.assertEqual(wanted[0], "")
            self.assertRegex(wanted[1], r"bytes=[1-9]\d+-")
            folder = Path(self.engine.starts()[-1]["argv"][1])
            self.assertEqual((folder / WEIGHTS).read_bytes(), (self.source / WEIGHTS).read_bytes())

    async def test_a_download_that_failed_is_taken_up_by_the_next_start(self) -> None:
        async with self.with_hub() as (client, hub):
            hub.breaks, hub.breaks_after = 100, 0
            text = await self.refusal(
                client, "serve_model", "UNREACHABLE", model=REPOSITORY, wait_s=50
            )
            self.assertIn("MODEL_NAME=embedded", text)
            await self.assert_all_gone()
            hub.breaks = 0
            await self.serve(client, model=REPOSITORY)

    async def test_a_worker_killed_in_mid_download_leaves_a_download_that_goes_on(self) -> None:
        async with self.with_hub() as (client, hub):
            hub.breaks, hub.breaks_after = 100, 700_000
            begun = await self.answer(client, "serve_model", model=REPOSITORY)
            await self.until(lambda: hub.sent.get(WEIGHTS), "the transfer never began")
            (worker,) = self.processes("job")
            os.kill(worker, signal.SIGKILL)
            await self.until(lambda: not self.processes("job"), "it did not die")
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "lost")
            hub.breaks = 0
            await self.serve(client, model=REPOSITORY)
            folder = Path(self.engine.starts()[-1]["argv"][1])
            self.assertEqual((folder / WEIGHTS).read_bytes(), (self.source / WEIGHTS).read_bytes())

    async def test_a_gated_repository(self) -> None:
        async with self.with_hub() as (client, hub):
            hub.gated = True
            text = await self.refusal(client, "serve_model", "AUTH", model=REPOSITORY, wait_s=50)
            self.assertIn("licence", text)
            self.assertIn("hf auth login", text)
            await self.assert_all_gone()

    async def test_a_repository_that_is_not_there(self) -> None:
        async with self.with_hub() as (client, _hub):
            text = await self.refusal(
                client, "serve_model", "NOT_FOUND", model="nobody/nothing", wait_s=50
            )
            self.assertIn("nobody/nothing", text)
            self.assertIn("MODEL_NAME", text)

    async def test_nothing_but_pickles(self) -> None:
        (self.source / WEIGHTS).rename(self.source / "pytorch_model.bin")
        async with self.with_hub() as (client, hub):
            text = await self.refusal(client, "serve_model", "DENIED", model=REPOSITORY, wait_s=50)
            self.assertIn("no safetensors", text)
            self.assertEqual([path for _, path, *_ in hub.requests if "/resolve/" in path], [])

    async def test_larger_than_the_disk(self) -> None:
        async with self.with_hub() as (client, hub):
            hub.sizes[WEIGHTS] = 10**16
            text = await self.refusal(
                client, "serve_model", "CAPACITY", model=REPOSITORY, wait_s=50
            )
            self.assertIn("10000000.00 GB", text)
            self.assertIn("HF_HOME", text)
            self.assertEqual([path for _, path, *_ in hub.requests if "/resolve/" in path], [])

    async def test_the_disk_fills_up_while_it_downloads(self) -> None:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, 900_000))"
        self.write_runner("small.py", limit)
        with fake_hub(self.source) as hub:
            values = {"HF_ENDPOINT": hub.url, "HF_HOME": str(self.home)}
            with mock.patch.dict("os.environ", values):
                async with self.in_process(server_file="small.py") as client:
                    text = await self.refusal(
                        client, "serve_model", "CAPACITY", model=REPOSITORY, wait_s=50
                    )
                    self.assertIn(" Next: ", text)
                async with self.in_process() as client:
                    await self.serve(client, model=REPOSITORY)

    async def test_a_hub_that_is_out_of_order_or_away(self) -> None:
        async with self.with_hub() as (client, hub):
            hub.down = True
            await self.refusal(client, "serve_model", "UNREACHABLE", model=REPOSITORY, wait_s=50)
        with mock.patch.dict("os.environ", HF_ENDPOINT=hub.url, HF_HOME=str(self.home)):
            async with self.in_process() as client:
                text = await self.refusal(
                    client, "serve_model", "UNREACHABLE", model=REPOSITORY, wait_s=50
                )
                self.assertIn("MODEL_NAME=embedded", text)

    async def test_code_of_its_own_in_the_download(self) -> None:
        config = self.source / "config.json"
        config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoModel": "x.Y"},', 1))
        async with self.with_hub() as (client, _hub):
            text = await self.refusal(client, "serve_model", "DENIED", model=REPOSITORY, wait_s=50)
            self.assertIn("auto_map", text)
            shutil.rmtree(self.home)
