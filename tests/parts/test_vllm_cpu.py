"""The vLLM runtime without a model server: the plan of a launch, memory, the key, the log's words.

vLLM's environment is a fake one; the embedded model's conversion runs a real program that stands in
for transformers. What a served model answers is tried by the rig's suite and by tests/real.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import redact
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes import embedded_model
from forge.parts.runtimes.runtime import ServedModel
from forge.parts.runtimes.vllm_cpu import VllmCpu, VllmCpuSettings
from forge.parts.runtimes.vllm_install import default_vllm_folder
from forge.parts.runtimes.vllm_log import resolved_engine_values
from forge.suites.fake_engine import write_safetensors
from forge.suites.fake_vllm import FakeVllm
from tests.parts.test_transformers_serve import CREDENTIALS, LLAMA, write_model

PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)
GIB = 1 << 30
GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "vocab_size": 64,
}
# A start of vLLM 0.32.0 on 2026-11-30, shortened to what matters.
REAL_LOG = """\
/state/logs/serve-1.log (last 2000 lines at most, 0 bytes before them)
(APIServer pid=6521) INFO 11-30 01:47:02 [model.py:733] Resolved architecture: Gemma4ForCausalLM
(APIServer pid=6521) INFO 11-30 01:47:02 [model.py:2152] Using max model len 512
(EngineCore pid=6706) INFO 11-30 01:47:11 [core.py:133] Initializing a V1 LLM engine (v0.32.0) \
with config: model='tiny', trust_remote_code=False, dtype=torch.float32, max_seq_len=512
(EngineCore pid=6706) INFO 11-30 01:47:11 [ompmultiprocessing.py:185] \tlocal_rank=0, \
core ids=[0, 1]
(Worker pid=6859) INFO 11-30 01:47:19 [cpu_model_runner.py:68] Starting to load model tiny...
(Worker pid=6859) INFO 11-30 01:47:20 [cpu_worker.py:260] Explicitly set (1.0/9.46) GiB for KV \
cache on node 0.
(EngineCore pid=6706) INFO 11-30 01:47:20 [kv_cache_utils.py:2327] CPU KV cache size: 419,430 \
tokens, Maximum concurrency for 512 tokens per request: 819.20x
(EngineCore pid=6706) INFO 11-30 01:47:23 [core.py:402] init engine (profile, create kv cache, \
warmup model) took 3.14 s
"""

# A start of 2026-11-30 that failed, likewise.
FAILED_LOG = """\
(Worker pid=21794) INFO 11-30 02:09:27 [cpu_model_runner.py:68] Starting to load model holed...
(Worker pid=21794) ERROR 11-30 02:09:28 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=21794) ERROR 11-30 02:09:28 [multiproc_executor.py:953]     raise ValueError(
(Worker pid=21794) ERROR 11-30 02:09:28 [multiproc_executor.py:953] ValueError: Following weights \
were not initialized from checkpoint: {'model.layers.2.self_attn.q_norm.weight'}
(EngineCore pid=21771) ERROR 11-30 02:09:30 [core.py:1510] EngineCore failed to start.
(EngineCore pid=21771) ERROR 11-30 02:09:30 [core.py:1510] Exception: WorkerProc initialization \
failed due to an exception in a background process. See stack trace for root cause.
Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        self.reports: list[tuple[float, str]] = []
        places = {"HF_HOME": str(self.folder / "hf"), "XDG_DATA_HOME": str(self.folder / "data")}
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PIP_", "VLLM_", "CXX"))
        }
        patch = mock.patch.dict(os.environ, kept | places, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.paths = RigPaths(self.folder / "state", self.folder / "cache")
        self.fake = FakeVllm(self.folder / "fake")
        self.runtime = self.make_runtime()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def make_runtime(self, **values: Any) -> VllmCpu:
        chosen = {"model_name": "embedded", "vllm_env": str(self.fake.environment), **values}
        settings = VllmCpuSettings(**chosen)
        return VllmCpu(lambda: settings, lambda: 8123, self.paths)

    def report(self, fraction: float, words: str) -> None:
        self.reports.append((fraction, words))

    def measured(self, config: dict[str, Any], runtime: VllmCpu | None = None) -> ServedModel:
        """A model folder with this config, as the runtime sizes it."""
        folder = self.folder / f"m{len(list(self.folder.glob('m*')))}"
        write_model(folder)
        (folder / "config.json").write_text(json.dumps(config))
        model = (runtime or self.runtime).local_model(str(folder))
        assert model is not None
        return model

    def launched(self, config: dict[str, Any], **values: Any) -> Launch:
        runtime = self.make_runtime(**values)
        return runtime.launch(self.measured(config, runtime))


class PlanTest(Case):
    def test_the_argument_list(self) -> None:
        launch = self.launched(LLAMA, max_model_len=2048, max_num_seqs=3, dtype="float32")
        argv = list(launch.argv)
        self.assertEqual(
            argv[:4],
            [str(self.fake.environment / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve"],
        )
        self.assertEqual(argv[4], launch.model)
        for option, value in (
            ("--host", "127.0.0.1"),
            ("--port", "8123"),
            ("--dtype", "float32"),
            ("--max-model-len", "2048"),
            ("--max-num-seqs", "3"),
            ("--served-model-name", launch.served_name),
            ("--chat-template-content-format", "string"),
            ("--shutdown-timeout", "5"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        self.assertEqual((launch.port, launch.served_name), (8123, launch.model))
        self.assertFalse([word for word in argv if "trust" in word or "api-key" in word])
        for absent in ("--tool-call-parser", "--reasoning-parser"):
            self.assertNotIn(absent, argv)
        self.assertIn("--enforce-eager", argv)
        self.assertNotIn("--enforce-eager", self.launched(LLAMA, enforce_eager=False).argv)

    def test_only_gemma_4_gets_its_parsers_and_only_a_wrapped_one_the_override(self) -> None:
        plain = list(self.launched(GEMMA).argv)
        self.assertIn("--enable-auto-tool-choice", plain)
        for option in ("--tool-call-parser", "--reasoning-parser"):
            self.assertEqual(plain[plain.index(option) + 1], "gemma4")
        self.assertNotIn("--hf-overrides", plain)
        wrapped = {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": GEMMA,
        }
        argv = list(self.launched(wrapped).argv)
        self.assertEqual(
            json.loads(argv[argv.index("--hf-overrides") + 1]),
            {"architectures": ["Gemma4ForCausalLM"]},
        )

    def test_the_embedded_model_is_served_under_its_own_name(self) -> None:
        write_model(self.folder / "cache" / "models" / "SmolLM2-135M-Instruct")
        model = self.runtime.local_model("embedded")
        assert model is not None
        launch = self.runtime.launch(model)
        self.assertEqual((launch.model, launch.served_name), ("embedded", "SmolLM2-135M-Instruct"))

    def test_the_environment_is_offline_on_loopback_and_without_credentials(self) -> None:
        with mock.patch.dict(os.environ, CREDENTIALS | {"PYTHONPATH": "/of/the/server"}):
            environment = dict(self.launched(LLAMA, reserved_cores=1).environment)
        self.assertFalse({*CREDENTIALS, "PYTHONPATH"} & set(environment))
        self.assertFalse(set(CREDENTIALS.values()) & set(environment.values()))
        for name, value in (
            ("VLLM_TARGET_DEVICE", "cpu"),
            ("VLLM_CPU_NUM_OF_RESERVED_CPU", "1"),
            ("VLLM_HOST_IP", "127.0.0.1"),
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DO_NOT_TRACK", "1"),
            ("SPT_NOENV", "1"),
            ("VLLM_CACHE_ROOT", str(self.folder / "cache" / "vllm")),
            ("PATH", os.environ["PATH"]),
        ):
            self.assertEqual(environment[name], value, name)

    def test_settings_have_bounds(self) -> None:
        for bad in (
            {"dtype": "float16"},
            {"max_model_len": 63},
            {"max_num_seqs": 0},
            {"kv_cache_gib": -1},
            {"reserved_cores": -1},
            {"vllm_env": "relative/folder"},
            {"vllm_env": "/with\na line"},
            {"query_timeout_s": 0},
        ):
            with self.subTest(bad=bad), self.assertRaises(ValueError):
                self.make_runtime(**bad)

    def test_where_the_environment_is(self) -> None:
        self.assertEqual(self.runtime.environment().folder, self.fake.environment)
        self.assertEqual(self.make_runtime(vllm_env="").environment().folder, default_vllm_folder())


class KeyTest(Case):
    """One key for an installation, in one file, in no argument and no text."""

    def test_it_is_made_once_and_for_this_user_alone(self) -> None:
        key = self.runtime.api_key()
        self.assertRegex(key, r"^sk-[0-9a-f]{48}$")
        self.assertEqual(stat.S_IMODE(self.runtime.key_file.stat().st_mode), 0o600)
        self.assertEqual(self.make_runtime().api_key(), key)
        self.assertEqual([p.name for p in self.paths.state.iterdir()], ["vllm-api-key"])
        other = RigPaths(self.folder / "other", self.folder / "cache")
        settings = VllmCpuSettings(model_name="embedded")
        self.assertNotEqual(VllmCpu(lambda: settings, lambda: 1, other).api_key(), key)

    def test_many_at_once_agree(self) -> None:
        keys: list[str] = []
        begin = threading.Barrier(8)

        def make() -> None:
            begin.wait()
            keys.append(self.make_runtime().api_key())

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(keys), 8)
        self.assertEqual(len(set(keys)), 1)

    def test_the_server_gets_it_by_the_environment_alone(self) -> None:
        launch = self.launched(GEMMA)
        key = self.runtime.api_key()
        self.assertEqual(launch.environment["VLLM_API_KEY"], key)
        self.assertNotIn(key, json.dumps(list(launch.argv)))

    def test_should_it_ever_get_into_a_text_the_redactor_takes_it_out(self) -> None:
        self.assertEqual(redact(f"key={self.runtime.api_key()}."), "key=[redacted].")

    def test_a_state_that_cannot_be_written_or_read(self) -> None:
        self.paths.state.parent.mkdir(exist_ok=True)
        self.paths.state.write_text("a file")
        with self.assertRaises(RigError) as caught:
            self.runtime.api_key()
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.paths.state.unlink()
        self.runtime.key_file.mkdir(parents=True)
        with self.assertRaises(RigError) as caught:
            self.runtime.api_key()
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertIn(str(self.runtime.key_file), caught.exception.what)


class MemoryTest(Case):
    def test_the_summands(self) -> None:
        model = self.measured(LLAMA)
        self.assertEqual(model.size_on_disk, 4000)
        self.assertEqual(
            list(model.memory_needed), ["weights", "KV cache", "Python, torch and vLLM"]
        )
        self.assertEqual(model.memory_needed["weights"], 2000)
        self.assertEqual(model.memory_needed["KV cache"], GIB)
        self.assertGreater(model.memory_needed["Python, torch and vLLM"], 10**9)
        self.assertEqual(model.memory_total, sum(model.memory_needed.values()))

    def test_the_cache_is_reckoned_in_whole_gibibytes_and_vllm_gets_the_same(self) -> None:
        # 2 layers x (k + v) x 2 heads x 16 wide x 2 bytes = 256 bytes a token.
        for values, gib in (
            ({"max_model_len": 65_536, "max_num_seqs": 64}, 1),
            ({"max_model_len": 65_536, "max_num_seqs": 65}, 2),
            ({"max_model_len": 65_536, "max_num_seqs": 64, "dtype": "float32"}, 2),
            ({"max_model_len": 262_144, "max_num_seqs": 256}, 16),
            ({"kv_cache_gib": 7}, 7),
        ):
            with self.subTest(values=values):
                runtime = self.make_runtime(**values)
                model = self.measured(LLAMA, runtime)
                self.assertEqual(model.memory_needed["KV cache"], gib * GIB)
                given = runtime.launch(model).environment["VLLM_CPU_KVCACHE_SPACE"]
                self.assertEqual(given, str(gib))

    def test_a_shape_that_is_not_understood_gets_one(self) -> None:
        model = self.measured({"model_type": "mamba"})
        self.assertEqual(model.memory_needed["KV cache"], GIB)

    def test_weights_beyond_all_memory_are_measured_by_their_headers(self) -> None:
        folder = write_model(self.folder / "huge")
        write_safetensors(folder / "model.safetensors", {"w": [2_500_000_000_000]})
        model = self.runtime.local_model(str(folder))
        assert model is not None
        self.assertEqual(model.memory_needed["weights"], 5 * 10**12)

    def test_unsafe_and_unfinished_folders_are_refused(self) -> None:
        for number, (name, content, error_class) in enumerate(
            (
                ("pytorch_model.bin", b"\x80", "DENIED"),
                ("config.json", b'{"auto_map": {}}', "DENIED"),
                ("x.incomplete", b"", "INVALID"),
                ("model.safetensors", b"\0", "INVALID"),
            )
        ):
            folder = write_model(self.folder / f"bad{number}")
            (folder / name).write_bytes(content)
            with self.subTest(name), self.assertRaises(RigError) as caught:
                self.runtime.local_model(str(folder))
            self.assertEqual(caught.exception.error_class, error_class)

    def test_names_are_checked_and_what_is_not_there_is_none(self) -> None:
        for name in ("../x", "/a/../b", "-x", "a/b/c", "http://x/y", "x\n", ""):
            with self.subTest(name=ascii(name)), self.assertRaises(RigError) as caught:
                self.runtime.local_model(name)
            self.assertTrue(caught.exception.what.startswith("model: "))
        self.assertIsNone(self.runtime.local_model("embedded"))
        self.assertIsNone(self.runtime.local_model("org/name"))
        snapshot = self.folder / "hf/hub/models--org--name/snapshots/1"
        write_model(snapshot)
        model = self.runtime.local_model("org/name")
        assert model is not None
        self.assertEqual(model.folder, snapshot)
        (snapshot / "model.safetensors").unlink()
        self.assertIsNone(self.runtime.local_model("org/name"), "half a download is none")
        (snapshot / "weights.bin").write_bytes(b"\x80")
        with self.assertRaises(RigError):
            self.runtime.local_model("org/name")


class NeedsTest(Case):
    async def test_without_an_environment_the_next_step_is_to_install_it(self) -> None:
        needs = {need.name: need for need in await self.runtime.needs()}
        need = needs["vLLM in an environment of its own"]
        self.assertEqual((need.present, need.remedy, need.only_for), (False, "install_vllm()", ""))

    async def test_with_one_everything_is_named(self) -> None:
        self.fake.install()
        needs = {need.name: need for need in await self.runtime.needs()}
        self.assertTrue(needs["vLLM in an environment of its own"].present)
        for name in ("program pip", "credential for the Hugging Face Hub"):
            self.assertTrue(needs[name].only_for, name)
        self.assertTrue(needs["package huggingface_hub"].only_for)

    async def test_a_compiler_is_needed_unless_it_starts_eagerly(self) -> None:
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        with mock.patch.dict(os.environ, PATH=str(bin_folder)):
            for eager in (False, True):
                runtime = self.make_runtime(enforce_eager=eager)
                (need,) = [n for n in await runtime.needs() if n.name == "C++ compiler"]
                self.assertFalse(need.present)
                self.assertIn("ENFORCE_EAGER=1", need.remedy)
                self.assertEqual(bool(need.only_for), eager)
            for name in ("g++", "clang++", "my-c++"):
                program = bin_folder / name
                program.write_text("#!/bin/sh\n")
                program.chmod(0o755)
                with mock.patch.dict(os.environ, CXX=name if name == "my-c++" else ""):
                    (need,) = [n for n in await runtime.needs() if n.name == "C++ compiler"]
                self.assertEqual((need.present, need.detail), (True, str(program)))
                program.unlink()


# Stands for the Python of vLLM's environment when the embedded model is converted.
_CONVERTER = """\
#!{python}
import os, pathlib, sys, time
_, folder, file, target = sys.argv[1], *sys.argv[3:]
pathlib.Path({notes!r}).write_text(f"{{os.getpid()}} {{folder}}/{{file}}")
{act}
"""
_MAKES_IT = """
import shutil
shutil.copytree({made!r}, target)
"""


class EmbeddedTest(Case):
    """The GGUF file becomes a folder in vLLM's environment, and by nobody else."""

    def converter(self, act: str) -> Path:
        """An environment whose Python does `act`; returns where it notes its pid and its source."""
        notes, python = self.folder / "notes", self.fake.environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(_CONVERTER.format(python=sys.executable, notes=str(notes), act=act))
        python.chmod(0o755)
        return notes

    def fetched(self) -> Path:
        """The GGUF file as if it were fetched already; its hash is taken for the right one."""
        gguf = self.folder / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        gguf.parent.mkdir(parents=True)
        gguf.write_bytes(b"GGUF")
        digest = embedded_model._file_sha256(gguf)
        patch = mock.patch.object(embedded_model, "_EMBEDDED_SHA256", digest)
        patch.start()
        self.addCleanup(patch.stop)
        return gguf

    async def test_it_is_converted_once(self) -> None:
        gguf = self.fetched()
        made = write_model(self.folder / "made")
        notes = self.converter(_MAKES_IT.format(made=str(made)))
        model = await self.runtime.fetch_model("embedded", PLENTY, self.report)
        self.assertEqual(model.folder.name, "SmolLM2-135M-Instruct")
        self.assertTrue(notes.read_text().endswith(str(gguf)))
        notes.unlink()
        again = await self.runtime.fetch_model("embedded", PLENTY, self.report)
        self.assertEqual(again, model)
        self.assertFalse(notes.exists(), "it was converted twice")

    async def test_why_it_failed_is_told_and_nothing_is_left(self) -> None:
        self.fetched()
        for words, error_class in (("no gguf here", "INTERNAL"), ("No space left", "CAPACITY")):
            self.converter(f"raise SystemExit({words!r})")
            with self.subTest(words), self.assertRaises(RigError) as caught:
                await self.runtime.fetch_model("embedded", PLENTY, self.report)
            self.assertEqual(caught.exception.error_class, error_class)
            self.assertIsNone(self.runtime.local_model("embedded"))
            (self.fake.environment / "bin" / "python").unlink()
            (self.fake.environment / "bin").rmdir()

    def test_cancelling_ends_the_conversion(self) -> None:
        self.fetched()
        notes = self.converter("time.sleep(600)")

        async def begin_and_leave() -> int:
            task = asyncio.create_task(self.runtime.fetch_model("embedded", PLENTY, self.report))
            while not notes.exists() or not notes.read_text():
                await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return int(notes.read_text().split()[0])

        # As a job's worker does: the loop ends, and with it what still runs on it.
        pid = asyncio.run(begin_and_leave())
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)

    async def test_the_hub_needs_its_package(self) -> None:
        with (
            mock.patch("forge.parts.runtimes.vllm_cpu.find_spec", return_value=None),
            self.assertRaises(RigError) as caught,
        ):
            await self.runtime.fetch_model("org/name", PLENTY, self.report)
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertIn("launch.py install", caught.exception.next_step)


class LogTest(Case):
    def test_what_vllm_settled_on(self) -> None:
        self.assertEqual(
            resolved_engine_values(REAL_LOG),
            {
                "architecture": "Gemma4ForCausalLM",
                "max_model_len": "512",
                "dtype": "float32",
                "kv_cache_gib": "1.0",
                "kv_cache_tokens": "419430",
                "max_concurrency": "819.20",
                "cores": "0, 1",
                "engine_start_s": "3.14",
            },
        )

    def test_what_the_log_does_not_say_is_left_out(self) -> None:
        self.assertEqual(resolved_engine_values(""), {})
        self.assertEqual(resolved_engine_values("it crashed\n" * 9), {})
        half = REAL_LOG.partition("(Worker")[0]
        self.assertEqual(
            set(resolved_engine_values(half)), {"architecture", "max_model_len", "dtype", "cores"}
        )

    def test_the_last_start_counts(self) -> None:
        later = REAL_LOG.replace("max model len 512", "max model len 1024")
        self.assertEqual(resolved_engine_values(REAL_LOG + later)["max_model_len"], "1024")

    def test_the_line_that_tells_how_far_loading_is(self) -> None:
        step = self.runtime.loading_step
        self.assertEqual(step("header\n"), "importing torch")
        self.assertEqual(step(""), "importing torch")
        self.assertEqual(
            step(REAL_LOG), "init engine (profile, create kv cache, warmup model) took 3.14 s"
        )
        self.assertEqual(step("header\n\tlocal words \n\n"), "local words")
        self.assertEqual(len(step("header\n" + "x" * 999)), 160)

    def test_weights_that_the_checkpoint_lacks(self) -> None:
        self.assertEqual(self.runtime.loading_fault(REAL_LOG), "")
        fault = self.runtime.loading_fault(
            "ValueError: Following weights were not initialized from checkpoint: "
            "{'model.layers.1.mlp.gate_up_proj.weight'}\n"
        )
        self.assertIn("model.layers.1.mlp.gate_up_proj.weight", fault)
        self.assertIn("q_norm", self.runtime.loading_fault(FAILED_LOG))

    def test_metrics_have_the_engines_own_names(self) -> None:
        self.assertTrue(all(n.startswith("vllm:") for n in self.runtime.metric_names.values()))
        self.assertEqual(self.runtime.metric_names["kv_used_share"], "vllm:kv_cache_usage_perc")


if __name__ == "__main__":
    unittest.main()
