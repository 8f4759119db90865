"""tpu-jax-v5e1-2b with the real engine: deployed, measured, compared, diagnosed, taken down.

The cloud, its gcloud and its machine are those of the rig's own suite; on the machine the engine's
own file runs, over a small Gemma 4 of random numbers, on this computer's processor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from mcp import Client

from forge.parts.runtimes.random_gemma4 import write_random_gemma4
from forge.suites.jax_tpu_case import JAX_TPU_WORDS, JaxTpuCase, JaxTpuProvider
from forge.suites.rented_tpu import WEST
from forge.suites.rig_case import RigUnderTest, use_rig

RIG_FOLDER = Path(__file__).resolve().parents[2] / "tpu-jax-v5e1-2b"
WEIGHTS = "google/gemma-4-E2B-it-qat-w4a16-ct"
WAITS_AT_MOST = 12  # of 50 seconds: a first start compiles every shape
SMALL = {"SLOTS": "2", "MAX_MODEL_LEN": "256", "RIG_TOOLSETS": "all"}  # few shapes to compile
POSITIONS = 512  # that the checkpoint says it has


def setUpModule() -> None:
    folder = tempfile.TemporaryDirectory(prefix="random-gemma4-")
    unittest.addModuleCleanup(folder.cleanup)
    model = Path(folder.name) / "model"
    write_random_gemma4(model)
    config = json.loads((model / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = POSITIONS
    (model / "config.json").write_text(json.dumps(config))
    RealEngineProvider.checkpoint = str(model)
    use_rig(
        RigUnderTest(
            RIG_FOLDER,
            {},
            make_engine=RealEngineProvider,
            make_model=lambda _folder: Path(WEIGHTS),
            words=JAX_TPU_WORDS,
        )
    )


class RealEngineProvider(JaxTpuProvider):
    """Machines that run the engine's own file, whose Hub has that one checkpoint."""

    checkpoint = ""

    def renew(self) -> None:
        super().renew()
        self.hosts.minute_s = 20.0  # an engine that compiles needs its time
        path = os.pathsep.join(sys.path)
        self.hosts.orders = {"checkpoint": self.checkpoint, "real_engine": path}


class RealEngineStoryTests(JaxTpuCase):
    """One machine, with the engine that goes out to it."""

    async def waited(self, client: Client) -> Any:
        """The result of waiting for a start to end, well or not."""
        for _ in range(WAITS_AT_MOST):
            result = await client.call_tool("wait_for_jax_ready", {"wait_s": 50})
            if result.is_error or (result.structured_content or {})["state"] != "starting":
                break
        return result

    async def ready(self, client: Client, /) -> dict[str, Any]:
        result = await self.waited(client)
        told: dict[str, Any] = result.structured_content or {}
        self.assertEqual(told.get("state"), "ready", result.content)
        return told

    async def test_deployed_measured_compared_diagnosed_and_taken_down(self) -> None:
        with mock.patch.dict("os.environ", SMALL):
            async with self.in_process() as client:
                job = await self.found(client, zones=[WEST], hours=1)
                self.assertEqual(job["state"], "done", job)
                await self._deployed(client)
                first, second = [await self._measured(client) for _ in range(2)]
                told = await self.text(client, "compare_reports", first=first, second=second)
                self.assertIn(first, told)
                await self._diagnosed(client)
                (machine,) = (await self.answer(client, "list_queued_resources"))["rentals"]
                gone = await self.destroyed(client, machine)
                self.assertTrue(gone["gone"], gone)
                await self.assert_all_gone()

    async def _deployed(self, client: Client) -> None:
        await self.ready(client)
        said = await self.answer(client, "query_gemma4", prompt="Say hello.", max_tokens=8)
        self.assertEqual(said["completion_tokens"], 8, said)
        measured = await self.answer(
            client, "query_gemma4_with_stats", prompt="hello", max_tokens=16
        )
        self.assertTrue(measured["complete"], measured)
        marks = self.marks(self.host())
        steps = [words for phase, state, words in marks if phase == "compile"]
        self.assertGreater(len(steps), 3, marks)
        done = [phase for phase, state, _ in marks if state == "done"]
        self.assertEqual(done, list(self.assembled().context.runtime.phases))
        compiled = (self.host().root / "var/lib/gemma4/cache/jax").iterdir()
        self.assertTrue(list(compiled), "nothing was kept of what was compiled")

    async def _measured(self, client: Client) -> str:
        small = {"context_tokens": [32], "output_tokens": 8, "requests_per_cell": 4}
        begun = await self.answer(
            client, "run_benchmark", concurrency=[1, 2], seconds_per_cell=5, **small
        )
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        name = str(job["result"]["report"])
        (path,) = self.state.rglob(f"{name}.json")
        cells = json.loads(path.read_text())["cells"]
        self.assertEqual([cell["concurrency"] for cell in cells], [1, 2])
        return name

    async def _diagnosed(self, client: Client) -> None:
        """A release that the engine refuses is explained in its words, and gone back from."""
        with mock.patch.dict("os.environ", MAX_MODEL_LEN=str(2 * POSITIONS)):
            async with self.in_process() as changed:
                await self.answer(changed, "deploy_jax_server")
                result = await self.waited(changed)
        self.assertTrue(result.is_error, result.content)
        self.assertIn(f"the model has {POSITIONS} positions", str(result.content))
        found = await self.answer(client, "analyze_logs")
        self.assertTrue(found["line"], found)
        await self.answer(client, "deploy_jax_server", rollback=True)
        await self.ready(client)
        await self.answer(client, "query_gemma4", prompt="again", max_tokens=4)


if __name__ == "__main__":
    unittest.main()
