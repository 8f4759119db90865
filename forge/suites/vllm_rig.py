"""What is vLLM's own in a rig: its environment, its key, its flags, its plain completions.

The shared suites with what differs, and a suite of vLLM's tools. All against the fake vLLM.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from forge.suites.fake_engine import write_safetensors, write_tiny_folder
from forge.suites.fake_vllm import FakeVllm
from forge.suites.folders import FolderSuite
from forge.suites.keyed_server import KeyedServerSuite
from forge.suites.serving import ServingSuite
from forge.suites.start_faults import StartFaultSuite

# The rig's own names of the tools that the shared suites call by the first rig's.
VLLM_WORDS = {
    "wait_for_model_ready": "wait_for_vllm_ready",
    "get_server_logs": "get_vllm_logs",
    "get_endpoint": "get_vllm_endpoint",
    "run_benchmark": "run_vllm_benchmark",
}


class VllmServingSuite(ServingSuite):
    """The whole way, and what holds for every start."""

    async def test_the_flags_and_the_environment_of_a_start(self) -> None:
        settings = {"MAX_MODEL_LEN": "512", "MAX_NUM_SEQS": "3", "RESERVED_CORES": "1"}
        settings |= {"ENFORCE_EAGER": "1", "KV_CACHE_GIB": "2", "DTYPE": "float32"}
        secrets = {"HF_TOKEN": "hf_" + "A" * 34, "VLLM_PLUGINS": "evil", "LD_PRELOAD": ""}
        with mock.patch.dict("os.environ", {**settings, **secrets}):
            async with self.in_process() as client:
                await self.serve(client)
                await self.answer(client, "stop_model")
        start = self.engine.starts()[-1]
        argv, environment = start["argv"], start["environment"]
        for option, value in (
            ("--served-model-name", self.model),
            ("--host", "127.0.0.1"),
            ("--max-model-len", "512"),
            ("--max-num-seqs", "3"),
            ("--dtype", "float32"),
            ("--chat-template-content-format", "string"),
            ("--tool-call-parser", "gemma4"),
            ("--reasoning-parser", "gemma4"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        self.assertIn("--enforce-eager", argv)
        for name, value in (
            ("VLLM_TARGET_DEVICE", "cpu"),
            ("VLLM_CPU_KVCACHE_SPACE", "2"),
            ("VLLM_CPU_NUM_OF_RESERVED_CPU", "1"),
            ("VLLM_HOST_IP", "127.0.0.1"),
            ("SPT_NOENV", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DO_NOT_TRACK", "1"),
        ):
            self.assertEqual(environment[name], value, name)
        self.assertFalse([name for name in environment if name in secrets], "a secret went along")


class VllmStartFaultSuite(StartFaultSuite):
    """What the environment and the checkpoint lack is told in vLLM's words."""

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        words = "Following weights were not initialized from checkpoint: {'model.norm.weight'}"
        self.engine.script(log=f"ValueError: {words}")
        async with self.in_process() as client:
            await self._fails(client, "INVALID", "not whole", "model.norm.weight")
            self.engine.script()
            await self.serve(client)

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        assert isinstance(self.engine, FakeVllm)
        try:
            async with self.in_process() as client:
                self.engine.set_version("vllm", "0.31.0+cpu")
                await self._fails(client, "NOT_FOUND", "0.31.0", "0.32.0", "install_vllm()")
                self.engine.set_version("vllm", "")
                await self._fails(client, "NOT_FOUND", "no vLLM", "install_vllm()")
        finally:
            self.engine.set_version("vllm", "0.32.0+cpu")

    async def test_without_its_environment_it_says_how_to_get_it(self) -> None:
        with mock.patch.dict("os.environ", VLLM_ENV=str(self.place / "nothing here")):
            async with self.in_process() as client:
                text = await self._fails(client, "NOT_FOUND", "not installed", "nothing here")
                self.assertTrue(text.rstrip(".").endswith("install_vllm()"), text)


class VllmFolderSuite(FolderSuite):
    """The sum has vLLM's own summands."""

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "huge")
        table = {"model.embed_tokens_per_layer.weight": [1_000_000_000_000]}
        weights = {"model.embed_tokens.weight": [1_500_000_000_000]}
        write_safetensors(folder / "model.safetensors", table | weights)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(folder))
            for words in (
                "needs 5003.27 GB",  # 5 TB in bf16, 1 GiB of cache, and vLLM itself
                "weights 5000.00",
                "KV cache 1.07",
                "vLLM 2.20",
                "2000.00 GB of the weights are the per-layer embedding table",
                "not subtracted",
            ):
                self.assertIn(words, text)
        self.assertEqual(self.processes(), [])

    async def test_projections_that_vllm_would_not_miss(self) -> None:
        """0.32.0 serves such a checkpoint with whatever lies in memory."""
        folder = write_tiny_folder(self.place / "models" / "holed")
        whole = {f"model.layers.{n}.mlp.up_proj.weight": [4, 4] for n in range(3)}
        write_safetensors(folder / "model.safetensors", whole)
        async with self.in_process() as client:
            details = await self.answer(client, "serve_model", model=str(folder), wait_s=50)
            self.assertEqual(details["state"], "ready")
            await self.answer(client, "stop_model")
            del whole["model.layers.1.mlp.up_proj.weight"]
            write_safetensors(folder / "model.safetensors", whole)
            text = await self.refusal(client, "serve_model", "INVALID", model=str(folder))
            self.assertIn("model.layers.1.mlp.up_proj.weight", text)


class VllmToolSuite(KeyedServerSuite):
    """The key, the plain completion, and an installation that is not needed."""

    key_file = "vllm-api-key"

    async def test_a_plain_completion(self) -> None:
        async with self.in_process() as client:
            text = await self.refusal(client, "query_vllm", "NOT_FOUND", prompt="Once")
            self.assertIn("serve_model()", text)
            await self.serve(client)
            self.engine.script(answer="one two three four")
            answer = await self.answer(client, "query_vllm", prompt="zero", max_tokens=3)
            self.assertEqual((answer["text"], answer["completion_tokens"]), ("one two three", 3))
            self.assertEqual(answer["finish_reason"], "length")
            self.engine.script(fault="status 500", words="out of pages")
            text = await self.refusal(client, "query_vllm", "INTERNAL", prompt="zero")
            self.assertIn("out of pages", text)

    async def test_what_is_installed_is_not_installed_again(self) -> None:
        assert isinstance(self.engine, FakeVllm)
        before = sorted(path for path in self.engine.environment.rglob("*"))
        async with self.in_process() as client:
            outcome = await self.answer(client, "install_vllm")
            self.assertEqual(outcome["state"], "installed")
            self.assertEqual(outcome["folder"], str(self.engine.environment))
        self.assertEqual(sorted(self.engine.environment.rglob("*")), before)
        await self.until(lambda: not self.processes(), "an earlier test's worker is still there")

    async def test_a_folder_of_somebody_elses_is_not_touched(self) -> None:
        mine = self.place / "mine"
        mine.mkdir()
        (mine / "thesis.txt").write_text("mine")
        try:
            with mock.patch.dict("os.environ", VLLM_ENV=str(mine)):
                async with self.in_process() as client:
                    text = await self.refusal(client, "install_vllm", "EXISTS")
                    self.assertIn(str(mine), text)
            self.assertEqual([path.name for path in Path(mine).iterdir()], ["thesis.txt"])
        finally:
            shutil.rmtree(mine)
        self.assertEqual(self.processes(), [])
