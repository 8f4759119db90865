"""What the rented rigs tell vLLM, held against vLLM 0.32.0 itself, in its CPU release.

Its own parser takes every argument list that a container may get, and its own registries know what
they name. It builds Gemma 4 12B for fp8 without weights: what stands in memory before the first one
is read is what the planner says of that. Nothing is served, and no GPU is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

from forge.parts.knowledge.memory import parameter_counts
from forge.parts.knowledge.models import GEMMA4
from forge.parts.runtimes.vllm_cuda_docker import (
    CUDA_ENVIRONMENT,
    VllmCudaDockerSettings,
    cuda_container,
)
from forge.parts.runtimes.vllm_install import (
    VllmEnvironment,
    default_vllm_folder,
    unsteered_environment,
)
from forge.parts.runtimes.vllm_tpu_docker import VllmTpuDockerSettings, tpu_container

CACHE = Path(os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real")
MODEL = "google/gemma-4-E2B-it"
LIMIT_S = 300
PARSE = """
import json, sys
import vllm
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
known = {option for action in parser._actions for option in action.option_strings}
read = []
for argv in json.loads(sys.stdin.read()):
    found = parser.parse_args(argv)
    validate_parsed_serve_args(found)
    read.append({name: value for name, value in vars(found).items()
                 if isinstance(value, (str, int, float, bool, dict, type(None)))})
ToolParserManager.get_tool_parser("gemma4")
ReasoningParserManager.get_reasoning_parser("gemma4")
print(json.dumps({"version": vllm.__version__, "read": read, "known": sorted(known),
                  "quantizations": list(QUANTIZATION_METHODS), "variables": list(
                      envs.environment_variables)}, default=str))
"""
BUILD = """
import collections, json, sys
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

folder, quantization, place = sys.argv[1:]
asked = EngineArgs(model=folder, quantization=quantization, dtype="bfloat16", enforce_eager=True,
                   max_model_len=256, load_format="dummy", skip_tokenizer_init=True)
config = asked.create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "file://" + place, 0, "gloo")
    initialize_model_parallel(1, 1)
    with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = initialize_model(vllm_config=config, model_config=config.model_config)
sizes = collections.Counter()
for parameter in model.parameters():
    sizes[parameter.device.type] += parameter.numel() * parameter.element_size()
print(json.dumps(sizes))
"""


class VllmFlagsTests(unittest.TestCase):
    """One environment for all of them: installed where it is not there yet."""

    environment: ClassVar[VllmEnvironment]
    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="vllm-flags-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.environment = VllmEnvironment(CACHE / default_vllm_folder().name)
        if not asyncio.run(cls.environment.usable()):
            CACHE.mkdir(parents=True, exist_ok=True)
            room = shutil.disk_usage(CACHE).free
            asyncio.run(cls.environment.install(room, lambda *told: None))

    def asked(self, script: str, *arguments: str, given: str = "") -> dict[str, Any]:
        """The JSON on the last line that vLLM's own Python prints for `script`."""
        surroundings = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            [str(self.environment.python), "-c", script, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=self.folder,
            env=unsteered_environment()
            | surroundings
            | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(self.folder)},
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def test_its_own_parser_takes_every_argument_list(self) -> None:
        wanted: list[tuple[list[str], dict[str, Any]]] = []
        for values in (
            {},
            {"vision": True},
            {"model_revision": "a" * 40, "max_model_len": 4096, "gpu_memory_utilization": 0.85},
        ):
            tpu = VllmTpuDockerSettings(model_name=MODEL, **values)  # type: ignore[arg-type]
            wanted.append((list(tpu_container(tpu).argv), {"max_num_batched_tokens": 4096}))
        for vision, eager, cache, made in itertools.product(
            (False, True), (False, True), ("auto", "fp8"), ("", "fp8")
        ):
            cuda = VllmCudaDockerSettings(
                model_name=MODEL,
                vision=vision,
                enforce_eager=eager,
                kv_cache_dtype=cache,  # type: ignore[arg-type]
                quantization=made,  # type: ignore[arg-type]
                max_num_seqs=8,
            )
            read = {
                "enforce_eager": eager,
                "kv_cache_dtype": cache,
                "quantization": "fp8_per_tensor" if made else None,
                "limit_mm_per_prompt": {"image": 4, "audio": 1} if vision else {},
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                "gpu_memory_utilization": 0.9,
                "max_model_len": 65_536,
            }
            wanted.append((list(cuda_container(cuda).argv), read))
        given = json.dumps([argv[2:] for argv, _ in wanted])  # after `vllm serve`
        told = self.asked(PARSE, given=given)
        self.assertTrue(told["version"].startswith("0.32.0"), told["version"])
        for (argv, expected), found in zip(wanted, told["read"], strict=True):
            self.assertEqual(argv[:2], ["vllm", "serve"])
            self.assertEqual(found["model_tag"], MODEL, argv)
            self.assertEqual((found["host"], found["port"]), ("0.0.0.0", 8000))
            self.assertEqual(
                (found["tool_call_parser"], found["reasoning_parser"]), ("gemma4",) * 2
            )
            for name, value in expected.items():
                self.assertEqual(found[name], value, (name, argv))
            for word in argv:
                if word.startswith("--"):
                    self.assertIn(word.replace("_", "-"), told["known"])
        self.assertIn("fp8_per_tensor", told["quantizations"])
        # The folder that keeps what was compiled is one that this release knows.
        self.assertIn("VLLM_CACHE_ROOT", told["variables"])
        self.assertLess(
            {name for name in CUDA_ENVIRONMENT if name.startswith("VLLM_")}, set(told["variables"])
        )
        self.assertIn("VLLM_ENABLE_CUDA_COMPATIBILITY", told["variables"])

    def test_12b_for_fp8_holds_its_embedding_before_a_weight_is_read(self) -> None:
        shape = GEMMA4["12B"].geometry
        full = {n for n, kind in enumerate(shape.layer_types) if kind == "full_attention"}
        config = {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "dtype": "bfloat16",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": len(shape.layer_types),
            "layer_types": list(shape.layer_types),
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "per_layer_config": {
                str(n): {
                    "head_dim": shape.global_head_dim,
                    "num_key_value_heads": shape.global_kv_heads,
                }
                for n in sorted(full)
            },
            "attention_k_eq_v": shape.k_eq_v,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": shape.window,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0,
        }
        place = self.folder / "12b"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        sizes = self.asked(BUILD, str(place), "fp8_per_tensor", str(self.folder / "meeting"))
        counts = parameter_counts(shape)
        # Nothing that is to be made eight-bit is there in bf16; it comes a matrix at a time.
        self.assertAlmostEqual(sizes["cpu"] / 2, counts.embed + counts.other, delta=20_000)
        self.assertAlmostEqual(sizes["meta"] / 2, counts.linear, delta=0.005 * counts.linear)
        self.assertLess(sizes["cpu"], 2.1e9)
        self.assertGreater(sizes["meta"], 21e9)


if __name__ == "__main__":
    unittest.main()
