"""What is the JAX engine's own in a rig: its flags, its key, its refusals, the random Gemma 4.

The shared suites with what differs, and a suite of the embedded model and the key. All against the
fake engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from unittest import mock

from forge.suites.fake_engine import write_safetensors, write_tiny_folder
from forge.suites.fake_jax_server import FakeJax
from forge.suites.folders import FolderSuite
from forge.suites.keyed_server import KeyedServerSuite
from forge.suites.serving import ServingSuite
from forge.suites.settings_faults import SettingsSuite
from forge.suites.start_faults import StartFaultSuite

# The rig's own names of the tools that the shared suites call by the first rig's.
JAX_WORDS = {"wait_for_model_ready": "wait_for_jax_ready", "get_server_logs": "get_jax_logs"}


class JaxServingSuite(ServingSuite):
    """The whole way, and what holds for every start."""

    async def test_the_flags_and_the_environment_of_a_start(self) -> None:
        assert isinstance(self.engine, FakeJax)
        settings = {"MAX_MODEL_LEN": "512", "SLOTS": "3", "DTYPE": "bfloat16"}
        hostile = {"HF_TOKEN": "hf_" + "A" * 34, "XLA_FLAGS": "--xla_force_host", "LD_PRELOAD": ""}
        accelerator = {"JAX_PLATFORMS": "cuda,tpu"}
        with mock.patch.dict("os.environ", {**settings, **hostile, **accelerator}):
            async with self.in_process() as client:
                await self.serve(client)
                await self.answer(client, "stop_model")
        options = self.engine.options()
        for option, value in (
            ("--model", self.model),
            ("--served-model-name", self.model),
            ("--host", "127.0.0.1"),
            ("--port", str(self.port)),
            ("--max-model-len", "512"),
            ("--slots", "3"),
            ("--dtype", "bf16"),
        ):
            self.assertEqual(options[option], value, option)
        self.assertTrue(options["--compile-cache"].startswith(str(self.place / "cache")))
        environment = self.engine.starts()[-1]["environment"]
        self.assertEqual(environment["JAX_PLATFORMS"], "cpu", "an accelerator would be taken")
        self.assertFalse([name for name in environment if name in hostile], "a secret went along")

    async def test_float32_is_what_it_computes_in_unless_told_otherwise(self) -> None:
        assert isinstance(self.engine, FakeJax)
        async with self.in_process() as client:
            await self.serve(client)
            details = await self.answer(client, "get_model_details")
        self.assertEqual(details["dtype"], "float32")
        engine = hashlib.sha256((self.rig_folder / "jax_server.py").read_bytes()).hexdigest()
        self.assertEqual(
            details["resolved"], {"jax_server_sha256": engine[:16], "max_model_len": "4096"}
        )
        self.assertEqual(self.engine.options()["--dtype"], "f32")


class JaxStartFaultSuite(StartFaultSuite):
    """What the packages and the checkpoint lack is told in the engine's words."""

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        """The engine makes none up: it refuses the checkpoint, says so, and ends."""
        words = "layers.3.mlp.up_proj.weight is missing"
        self.engine.script(refuses=words)
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "ended while it was loading", words)
            self.assertIn(words, await self.text(client, "get_server_logs"))
            self.engine.script()
            await self.serve(client)

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        assert isinstance(self.engine, FakeJax)
        install = "launch.py install"
        try:
            async with self.in_process() as client:
                self.engine.set_version("jax", "0.9.9")
                await self._fails(client, "NOT_FOUND", "jax", "0.9.9", "0.10.2", install)
                self.engine.set_version("jax", "0.10.2")
                self.engine.set_version("starlette", "")
                await self._fails(client, "NOT_FOUND", "starlette", "not installed", install)
        finally:
            self.engine.set_version("jax", "0.10.2")
            self.engine.set_version("starlette", "1.10.0")

    async def test_without_the_engines_file_nothing_starts(self) -> None:
        program = self.rig_folder / "jax_server.py"
        text = program.read_bytes()
        program.unlink()
        try:
            async with self.in_process() as client:
                await self._fails(client, "NOT_FOUND", "jax_server.py", "the rig's folder")
        finally:
            program.write_bytes(text)


class JaxFolderSuite(FolderSuite):
    """The sum has this engine's own summands, and models that it does not compute are refused."""

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "huge")
        table = {"model.embed_tokens_per_layer.weight": [1_000_000_000_000]}
        weights = {"model.embed_tokens.weight": [1_500_000_000_000]}
        write_safetensors(folder / "model.safetensors", table | weights)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(folder))
            for words in (
                "weights 10000.00",  # 10 TB in float32, no part of it forgiven
                "KV cache 0.00",
                "Python and JAX",
                "4000.00 GB of the weights are the per-layer embedding table",
                "not subtracted",
            ):
                self.assertIn(words, text)
        self.assertEqual(self.processes(), [])

    async def test_another_model_or_packed_weights_are_refused_before_anything_starts(self) -> None:
        starts = len(self.engine.starts())
        async with self.in_process() as client:
            for key, value, words in (
                ("model_type", "llama", "model_type is llama"),
                ("quantization_config", {"quant_method": "gptq"}, "quantised"),
            ):
                folder = write_tiny_folder(self.place / "models" / f"other {key}")
                path = folder / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
                text = await self.refusal(client, "serve_model", "INVALID", model=str(folder))
                self.assertIn(words, text)
        self.assertEqual(len(self.engine.starts()), starts)


class JaxSettingsSuite(SettingsSuite):
    """Its number format is another one than the other local rigs'."""

    defaulted = ("DTYPE", "float32")


class JaxRigSuite(KeyedServerSuite):
    """The key, and a model that says of itself that it means nothing."""

    key_file = "jax-api-key"

    async def test_the_key_is_in_no_variable_of_the_server(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
        key = self.engine.headers()["Authorization"].partition(" ")[2]
        given = self.engine.starts()[-1]["environment"].values()
        self.assertNotIn(key, "\n".join(given))

    async def test_the_embedded_model_is_made_here_and_says_that_it_means_nothing(self) -> None:
        assert isinstance(self.engine, FakeJax)
        async with self.in_process() as client:
            await self.serve(client, model="embedded")
            options = self.engine.options()
            self.assertEqual(options["--served-model-name"], "random-gemma-4")
            folder = Path(options["--model"])
            details = await self.answer(client, "get_model_details")
            self.assertIn("its answers mean nothing", details["beside"])
            status = await self.answer(client, "get_system_status")
            self.assertIn("its answers mean nothing", status["memory"])
            endpoint = await self.answer(client, "get_endpoint")
            self.assertEqual(endpoint["model"], "random-gemma-4")
            await self.answer(client, "stop_model")
            made = self._hashes(folder)
            await self.serve(client, model="embedded")
        self.assertEqual(self._hashes(folder), made, "what is there was made anew")
        self.assertIn("model.safetensors", made)

    def _hashes(self, folder: Path) -> dict[str, tuple[str, int]]:
        return {
            path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in folder.iterdir()
        }
