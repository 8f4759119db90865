"""The JAX runtime without a model server: launch, memory, key, log, and the random Gemma 4.

What it says of memory, metrics and checkpoints is held against the engine's own code. What a served
model answers is tried by the rig's suite and by tests/real/test_jax_rig.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from forge.demo import MEANS_NOTHING as DEMO_MEANS_NOTHING
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_files import open_weights
from forge.engines.jax.cache import state_shapes
from forge.engines.jax.params import param_shapes
from forge.engines.serving.scheduler_job import SchedulerView
from forge.engines.serving.serving_metrics import ServingMetrics
from forge.parts.boundaries.load_prompts import PromptMaker
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import redact
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.jax_log import jax_loading_step
from forge.parts.runtimes.jax_serve import (
    JAX_SERVE_REQUIREMENTS,
    JaxServe,
    JaxServeSettings,
    jax_environment,
)
from forge.parts.runtimes.random_gemma4 import MEANS_NOTHING, write_random_gemma4
from forge.parts.runtimes.random_tokenizer import random_pieces, sayable_tokens
from forge.parts.runtimes.runtime import ServedModel
from forge.suites.fake_engine import write_safetensors
from tests.parts.test_transformers_serve import CREDENTIALS, LLAMA, write_model

ROOT = Path(__file__).resolve().parents[2]
PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)
# A ring of 8 tokens, and a window wider than most contexts of these tests.
GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 64,
}
JAX_FILE = "jax_server.py"
LOG = """\
/state/logs/serve-1.log (last 5 lines at most, 0 bytes before them)
jax_server: listening on 127.0.0.1:8020, serving m
jax_server:   3% placing weights
jax_server:  40% compiling prefill of 16
"""


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        self.reports: list[tuple[float, str]] = []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "JAX_", "XLA_"))}
        own = {"HF_HOME": str(self.folder / "hf"), "JAX_PLATFORMS": "cuda,tpu"}
        patch = mock.patch.dict(os.environ, kept | own, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        programs = self.folder / "rig"
        programs.mkdir()
        (programs / "jax_server.py").write_text("print('an engine')\n")
        self.paths = RigPaths(self.folder / "state", self.folder / "cache", programs)
        self.runtime = self.make_runtime()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def make_runtime(self, **values: Any) -> JaxServe:
        settings = JaxServeSettings(**{"model_name": "embedded", **values})
        return JaxServe(lambda: settings, lambda: 8123, self.paths)

    def report(self, fraction: float, words: str) -> None:
        self.reports.append((fraction, words))

    def written(self, config: dict[str, Any]) -> Path:
        """A model folder with this config."""
        folder = write_model(self.folder / f"m{len(list(self.folder.glob('m*')))}")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def measured(self, runtime: JaxServe | None = None, **changes: Any) -> ServedModel:
        """A folder of the small Gemma 4, with its config changed, as the runtime sizes it."""
        model = (runtime or self.runtime).local_model(str(self.written({**GEMMA, **changes})))
        assert model is not None
        return model

    def launched(self, **values: Any) -> Launch:
        runtime = self.make_runtime(**values)
        return runtime.launch(self.measured(runtime))


class LaunchTest(Case):
    def test_the_argument_list(self) -> None:
        launch = self.launched(max_model_len=2048, slots=3, dtype="bfloat16")
        self.assertEqual(launch.argv[:2], [sys.executable, str(self.paths.programs / JAX_FILE)])
        options = dict(zip(launch.argv[2::2], launch.argv[3::2], strict=True))
        self.assertEqual(
            options,
            {
                "--model": launch.model,
                "--served-model-name": launch.model,
                "--host": "127.0.0.1",
                "--port": "8123",
                "--slots": "3",
                "--max-model-len": "2048",
                "--dtype": "bf16",
                "--api-key-file": str(self.paths.state / "jax-api-key"),
                "--compile-cache": str(self.paths.cache / "jax"),
                "--prefix-cache-gb": "0",
            },
        )
        self.assertEqual((launch.port, launch.served_name), (8123, launch.model))
        plain = self.launched().argv
        self.assertEqual(plain[plain.index("--dtype") + 1], "f32")

    def test_the_engine_knows_every_option(self) -> None:
        """The real program's own parser, as a process; it refuses the folder, which is no model."""
        launch = self.launched()
        program = [sys.executable, "-m", "forge.programs.jax_server"]
        done = subprocess.run(
            [*program, *launch.argv[2:]], cwd=ROOT, env=self.shell(), capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertNotIn("usage:", done.stderr)
        self.assertRegex(done.stderr, r"\Ajax_server: .+\n\Z")

    def shell(self) -> dict[str, str]:
        """An environment in which the forge can be imported."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return {**jax_environment(), "PYTHONPATH": path}

    def test_no_accelerator_no_network_no_credential(self) -> None:
        hostile = {"XLA_FLAGS": "--xla_gpu_autotune_level=4", "LIBTPU_INIT_ARGS": "x"}
        with mock.patch.dict(os.environ, {**CREDENTIALS, **hostile, "PYTHONPATH": "/packages"}):
            environment = dict(self.launched().environment)
        self.assertFalse({*CREDENTIALS, *hostile} & set(environment))
        self.assertFalse(set(CREDENTIALS.values()) & set(environment.values()))
        for name, value in (
            ("JAX_PLATFORMS", "cpu"),
            ("HF_HUB_OFFLINE", "1"),
            ("DO_NOT_TRACK", "1"),
            ("PYTHONUNBUFFERED", "1"),
            ("PYTHONPATH", "/packages"),
            ("PATH", os.environ["PATH"]),
        ):
            self.assertEqual(environment[name], value, name)

    def test_jax_itself_sees_processors_alone_there(self) -> None:
        program = "import jax; print({device.platform for device in jax.devices()})"
        done = subprocess.run(
            [sys.executable, "-c", program], env=self.shell(), capture_output=True, text=True
        )
        self.assertEqual(done.stdout, "{'cpu'}\n", done.stderr)

    def test_settings_have_bounds(self) -> None:
        for bad in (
            {"dtype": "float16"},
            {"max_model_len": 63},
            {"max_model_len": 262_145},
            {"slots": 0},
            {"slots": 65},
            {"query_timeout_s": 0},
        ):
            with self.subTest(bad=bad), self.assertRaises(ValueError):
                self.make_runtime(**bad)


class KeyTest(Case):
    """One key for an installation, in one file, in no argument and no text."""

    def test_it_is_made_once_for_this_user_alone_and_told_to_nobody(self) -> None:
        launch = self.launched()
        options = dict(zip(launch.argv[2::2], launch.argv[3::2], strict=True))
        path = Path(options["--api-key-file"])
        key = path.read_text().strip()
        self.assertRegex(key, r"^sk-[0-9a-f]{48}$")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertEqual((self.runtime.api_key(), self.make_runtime().api_key()), (key, key))
        self.assertNotIn(key, json.dumps([list(launch.argv), dict(launch.environment)]))
        self.assertEqual(redact(f"key={key}."), "key=[redacted].")

    def test_a_state_that_cannot_be_read(self) -> None:
        self.runtime.key_file.mkdir(parents=True)
        with self.assertRaises(RigError) as caught:
            self.runtime.launch(self.measured())
        self.assertEqual(caught.exception.error_class, "DENIED")


class MemoryTest(Case):
    def test_the_summands(self) -> None:
        model = self.measured()
        self.assertEqual(model.size_on_disk, 4000)
        self.assertEqual(list(model.memory_needed), ["weights", "KV cache", "Python and JAX"])
        self.assertEqual(model.memory_needed["weights"], 4000)
        # Keys and values of a window of 8 tokens 8 wide and of 4096 tokens 16 wide, in f32, and
        # 5 bytes for each entry of the vocabulary; 4 slots.
        each = 2 * 4 * (8 * 8 + 4096 * 16) + 64 * 5
        self.assertEqual(model.memory_needed["KV cache"], 4 * each)
        self.assertGreater(model.memory_needed["Python and JAX"], 10**8)
        self.assertEqual((model.architecture, model.beside), ("Gemma4ForCausalLM", ""))
        self.assertEqual(model.context, 4096)

    def test_half_the_width_is_half_the_weights(self) -> None:
        halves = self.measured(self.make_runtime(dtype="bfloat16"))
        self.assertEqual(halves.memory_needed["weights"], 2000)

    def test_the_engine_holds_just_that(self) -> None:
        """Against the engine's own shapes, at lengths around its window and its blocks of keys."""
        folder = self.folder / "random"
        write_random_gemma4(folder)
        config = read_config(folder)
        for length in (64, 127, 128, 129, 255, 256, 257, 512, 513, 4096, 5000):
            for slots, dtype, kind in ((1, "float32", jnp.float32), (5, "bfloat16", jnp.bfloat16)):
                with self.subTest(length=length, slots=slots, dtype=dtype):
                    runtime = self.make_runtime(max_model_len=length, slots=slots, dtype=dtype)
                    model = runtime.local_model(str(folder))
                    assert model is not None
                    state = state_shapes(config, slots, length, jnp.dtype(kind))
                    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
                    self.assertEqual(model.memory_needed["KV cache"], held)
                    placed = param_shapes(config, jnp.dtype(kind)).values()
                    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in placed)
                    self.assertEqual(model.memory_needed["weights"], weights)

    def test_the_other_halves_of_a_release_and_a_stored_head_are_not_counted(self) -> None:
        folder = self.written(GEMMA)
        shapes = {
            "model.language_model.embed_tokens.weight": [10, 10],
            "model.vision_tower.patch.weight": [1000],
            "model.audio_tower.layers.0.x": [1000],
            "model.embed_vision.embedding_projection.weight": [1000],
            "embed_audio.x": [1000],
            "vision_embedder.x": [1000],
            "lm_head.weight": [10, 10],
        }
        write_safetensors(folder / "model.safetensors", shapes)
        model = self.runtime.local_model(str(folder))
        assert model is not None
        self.assertEqual(model.memory_needed["weights"], 400)
        self.assertEqual(model.size_on_disk, 5 * 4000 + 800)

    def test_the_per_layer_table_is_told_and_never_subtracted(self) -> None:
        folder = self.written(GEMMA)
        name = "model.language_model.embed_tokens_per_layer.weight"
        write_safetensors(folder / "model.safetensors", {name: [1000, 5000], "w": [10]})
        model = self.runtime.local_model(str(folder))
        assert model is not None
        self.assertEqual(model.memory_needed["weights"], 4 * 5_000_010)
        self.assertIn("0.02 GB of the weights are the per-layer embedding table", model.beside)

    def test_what_the_engine_would_refuse_is_refused_before_it_starts(self) -> None:
        packed = {**GEMMA, "quantization_config": {"quant_method": "awq"}}
        for config, words in (
            (LLAMA, "model_type is llama"),
            ({"model_type": "gemma3_text"}, "model_type is gemma3_text"),
            ({}, "model_type is None"),
            (packed, "quantised"),
            ({**GEMMA, "sliding_window": "wide"}, "sliding_window"),
            ({**GEMMA, "num_hidden_layers": 4}, "layer_types"),
        ):
            folder = self.written(config)
            with self.subTest(words), self.assertRaises(RigError) as caught:
                self.runtime.local_model(str(folder))
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn(words, caught.exception.what)
            self.assertIn(str(folder), caught.exception.what)
            self.assertTrue(caught.exception.next_step)

    def test_a_context_beyond_the_models_positions(self) -> None:
        runtime = self.make_runtime(max_model_len=1024)
        self.measured(runtime, max_position_embeddings=1024)
        wrapped = {"model_type": "gemma4", "text_config": {**GEMMA, "max_position_embeddings": 512}}
        for config in ({**GEMMA, "max_position_embeddings": 512}, wrapped):
            with self.assertRaises(RigError) as caught:
                runtime.local_model(str(self.written(config)))
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertEqual(caught.exception.next_step, "set MAX_MODEL_LEN to 512 or less")

    def test_unsafe_and_unfinished_folders_are_refused(self) -> None:
        for name, content, error_class in (
            ("pytorch_model.bin", b"\x80", "DENIED"),
            ("tokenizer_config.json", b'{"auto_map": {}}', "DENIED"),
            ("x.incomplete", b"", "INVALID"),
            ("model.safetensors", b"\0", "INVALID"),
        ):
            folder = self.written(GEMMA)
            (folder / name).write_bytes(content)
            with self.subTest(name), self.assertRaises(RigError) as caught:
                self.runtime.local_model(str(folder))
            self.assertEqual(caught.exception.error_class, error_class)

    def test_a_model_by_its_hub_id(self) -> None:
        for name in ("../x", "a/b/c", "http://x/y", "x\n", ""):
            with self.subTest(name=ascii(name)), self.assertRaises(RigError):
                self.runtime.local_model(name)
        self.assertIsNone(self.runtime.local_model("org/name"))
        snapshot = self.folder / "hf/hub/models--org--name/snapshots/1"
        write_model(snapshot)
        (snapshot / "config.json").write_text(json.dumps(GEMMA))
        model = self.runtime.local_model("org/name")
        assert model is not None
        self.assertEqual((model.name, model.folder), ("org/name", snapshot))
        (snapshot / "model.safetensors").unlink()
        self.assertIsNone(self.runtime.local_model("org/name"), "half a download is none")


class NeedsTest(Case):
    async def test_they_are_what_this_interpreter_really_has(self) -> None:
        needs = {need.name: need for need in await self.runtime.needs()}
        for line in JAX_SERVE_REQUIREMENTS:
            name = re.split(r"[\[=<>]", line)[0]
            need = needs[f"package {name.replace('huggingface-hub', 'huggingface_hub')}"]
            version = importlib.metadata.version(name)
            self.assertTrue(need.present, name)
            self.assertIn(need.detail, (version, "there"))
            self.assertIn("launch.py install", need.remedy)
        self.assertTrue(needs["file jax_server.py"].present)
        missing = [need.name for need in needs.values() if not need.present and not need.only_for]
        self.assertEqual(missing, [])

    async def test_a_release_that_was_never_tried_and_a_file_that_is_gone(self) -> None:
        info = self.folder / "site" / "jax-0.9.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.9.0\n")
        self.runtime.program.unlink()
        path = os.pathsep.join([str(self.folder / "site"), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
            needs = {need.name: need for need in await self.runtime.needs()}
        self.assertFalse(needs["version of jax"].present)
        self.assertIn("0.9.0", needs["version of jax"].detail)
        self.assertFalse(needs["file jax_server.py"].present)
        self.assertFalse(needs["file jax_server.py"].only_for, "a start would go on without it")


class RandomModelTest(Case):
    """The embedded model: what it is made of, and that it is made whole or not at all."""

    async def test_it_is_made_once_and_says_what_it_is(self) -> None:
        self.assertIsNone(self.runtime.local_model("embedded"))
        model = await self.runtime.fetch_model("embedded", PLENTY, self.report)
        self.assertIn(MEANS_NOTHING, model.beside)
        self.assertIn(DEMO_MEANS_NOTHING, model.beside, "the demo would take it for a fault")
        launch = self.runtime.launch(model)
        self.assertEqual((launch.model, launch.served_name), ("embedded", "random-gemma-4"))
        before = {path: path.stat().st_mtime_ns for path in model.folder.iterdir()}
        self.assertEqual(await self.runtime.fetch_model("embedded", PLENTY, self.report), model)
        self.assertEqual({p: p.stat().st_mtime_ns for p in model.folder.iterdir()}, before)
        self.assertEqual(self.runtime.local_model("embedded"), model)
        self.assertEqual(len(self.reports), 1)

    async def test_many_at_once_make_one(self) -> None:
        made = await asyncio.gather(
            *(self.make_runtime().fetch_model("embedded", PLENTY, self.report) for _ in range(4))
        )
        self.assertEqual(len({model.folder for model in made}), 1)
        self.assertEqual(len(self.reports), 1)
        left = [p.name for p in made[0].folder.parent.iterdir() if p.name.endswith(".partial")]
        self.assertEqual(left, [])

    async def test_without_room_nothing_is_left(self) -> None:
        room = Room(memory_available=10**12, memory_total=10**12, disk_free=10**8)
        with self.assertRaises(RigError) as caught:
            await self.runtime.fetch_model("embedded", room, self.report)
        self.assertEqual(caught.exception.error_class, "CAPACITY")
        # A disk that is full only once it is being written to: files may not pass one megabyte.
        program = (
            "import asyncio, resource, signal, sys\n"
            "from pathlib import Path\n"
            "from forge.parts.ground.errors import RigError\n"
            "from forge.parts.planes.plane import Room\n"
            "from forge.parts.runtimes.random_gemma4 import make_random_gemma4\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))\n"
            "making = make_random_gemma4(Path(sys.argv[1]), Room(0, 0, 10**12), lambda *_: None)\n"
            "try: asyncio.run(making)\n"
            "except RigError as error: print(error.error_class)\n"
        )
        self.assertEqual(self.python(program, str(self.paths.cache)), "CAPACITY\n")
        models = self.paths.cache / "models"
        self.assertEqual([path.name for path in models.iterdir() if path.is_dir()], [])

    def python(self, program: str, *arguments: str, **environment: str) -> str:
        """What a program prints that can import the forge."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_two_processes_make_the_same_bytes(self) -> None:
        program = (
            "import sys; from pathlib import Path\n"
            "from forge.parts.runtimes.random_gemma4 import write_random_gemma4\n"
            "write_random_gemma4(Path(sys.argv[1]))\n"
        )
        made = [self.folder / name for name in ("one", "two")]
        for number, folder in enumerate(made):
            self.python(program, str(folder), PYTHONHASHSEED=str(number))
        hashes = [
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
            for folder in made
        ]
        self.assertEqual(hashes[0], hashes[1])
        self.assertEqual(len(hashes[0]), 7)


class RandomFilesTest(unittest.TestCase):
    """The files themselves, written once for all of these tests."""

    folder: ClassVar[Path]
    tokenizer: ClassVar[Tokenizer]
    pieces: ClassVar[dict[str, int]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name) / "random"
        write_random_gemma4(cls.folder)
        text = (cls.folder / "tokenizer.json").read_text(encoding="utf-8")
        cls.tokenizer = Tokenizer.from_str(text)
        cls.pieces = random_pieces(text)

    def test_the_engine_understands_every_key_and_finds_every_tensor(self) -> None:
        config = read_config(self.folder)
        self.assertEqual(config.vocabulary, len(self.pieces))
        kinds = {(layer.sliding, layer.owner) for layer in config.layers}
        self.assertEqual(len(kinds), 4, "a kind of layer that E2B has is missing")
        self.assertTrue(config.per_layer and config.softcap)
        self.assertEqual(config.eos, (self.pieces["<eos>"], self.pieces["<turn|>"]))
        weights = open_weights(self.folder, config)
        self.assertEqual(set(weights), set(model_tensors(config)))
        parameters = sum(view.size for view in weights.values())
        self.assertTrue(10_000_000 < parameters < 40_000_000, parameters)

    def test_numbers_are_finite_and_of_the_size_that_training_leaves(self) -> None:
        for name, view in open_weights(self.folder, read_config(self.folder)).items():
            values = np.asarray(view, np.float32)
            self.assertTrue(np.isfinite(values).all(), name)
            self.assertTrue(values.any(), f"{name} is all zeros")
            self.assertLess(float(np.abs(values).max()), 8.0, name)

    def test_what_spells_no_text_is_not_said(self) -> None:
        config = read_config(self.folder)
        table = np.asarray(open_weights(self.folder, config)["embed_tokens.weight"], np.float32)
        said = set(sayable_tokens(self.pieces))
        rows = set(np.flatnonzero(table.any(axis=1)).tolist())
        self.assertEqual(rows, said)
        unsaid = {piece for piece, number in self.pieces.items() if number not in said}
        self.assertLessEqual({"<eos>", "<turn|>", "<|turn>", "<0x00>", "<0xFF>"}, unsaid)
        self.assertFalse([piece for piece in unsaid if not re.fullmatch(r"<.+>", piece)])

    def test_any_text_comes_back_from_its_tokens(self) -> None:
        for text in (
            "The sky is blue.",
            "Zürich, 東京 and a ✓ 😀",
            "a  b\n\tc",
            "<0x41> < <| |> <turn",
            "x" * 300,
        ):
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            self.assertEqual(self.tokenizer.decode(encoded.ids, skip_special_tokens=False), text)
            self.assertNotIn(self.pieces["<unk>"], encoded.ids)

    def test_turns_are_gemma_4s(self) -> None:
        template = (self.folder / "chat_template.jinja").read_text()
        messages = [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "good day"},
        ]
        rendered = (
            ImmutableSandboxedEnvironment()
            .from_string(template)
            .render(messages=messages, bos_token="<bos>", add_generation_prompt=True)
        )
        self.assertEqual(
            rendered,
            "<bos><|turn>system\nbe short<turn|>\n<|turn>user\nhello<turn|>\n"
            "<|turn>model\ngood day<turn|>\n<|turn>model\n",
        )
        ids = self.tokenizer.encode(rendered, add_special_tokens=False).ids
        self.assertEqual(ids[:2], [2, self.pieces["<|turn>"]])
        self.assertEqual(ids.count(self.pieces["<turn|>"]), 3)

    def test_ids_of_the_first_tokens_are_gemma_4s(self) -> None:
        first = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
        self.assertEqual([self.pieces[piece] for piece in first], [0, 1, 2, 3, 4])

    def test_prompts_of_the_load_generator_are_as_many_tokens_as_words(self) -> None:
        """Else its prompts would miss the length that a cell asks for, and the cell would fail."""
        maker = PromptMaker("any seed", 500)
        for index in range(20):
            text = maker.text(index).decode()
            tokens = len(self.tokenizer.encode(text, add_special_tokens=False).ids)
            self.assertAlmostEqual(tokens, len(text.split()), delta=12)

    def test_the_file_is_laid_out_as_safetensors_wants_it(self) -> None:
        data = (self.folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        self.assertEqual(length % 8, 0)
        header = json.loads(data[8 : 8 + length])
        self.assertEqual(header.pop("__metadata__"), {"format": "pt"})
        end = 0
        for name, entry in header.items():
            begin, finish = entry["data_offsets"]
            self.assertEqual(begin, end, name)
            self.assertEqual(finish - begin, 2 * int(np.prod(entry["shape"])), name)
            end = finish
        self.assertEqual(len(data), 8 + length + end)


class EngineWordsTest(unittest.TestCase):
    """What is read of the engine, against what it says."""

    def test_the_line_that_tells_how_far_loading_is(self) -> None:
        self.assertEqual(jax_loading_step(LOG), "compiling prefill of 16 (40 %)")
        self.assertEqual(jax_loading_step(""), "importing JAX")
        self.assertEqual(jax_loading_step("jax_server: 5% a heading\n"), "importing JAX")
        self.assertEqual(jax_loading_step("\n".join(LOG.splitlines()[:2])), "importing JAX")
        long = jax_loading_step(f"heading\njax_server:   1% {'x' * 999}\n")
        self.assertEqual(long, f"{'x' * 160} (1 %)")

    def test_its_metrics_have_these_names(self) -> None:
        view = SchedulerView("serving", 1.0, "", 0, 0, 0.0, {})
        page = ServingMetrics(lambda: view).page().decode()
        settings = JaxServeSettings(model_name="embedded")
        paths = RigPaths(Path("s"), Path("c"))
        for use, name in JaxServe(lambda: settings, lambda: 1, paths).metric_names.items():
            self.assertRegex(page, rf"(?m)^{name} [\d.]+$", use)


if __name__ == "__main__":
    unittest.main()
