"""Tests of sizes: against the planner's figures for the five real ones, and counted one by one."""

from __future__ import annotations

import json
import math
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.explain import explain_text
from forge.engines.gemma4.memory_speed import read_speed
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.sizes import (
    bound_tokens_per_s,
    cached_bytes,
    cached_elements,
    decode_cost,
    marks_bytes,
    parameter_groups,
    prompt_flops,
    temporary_bytes,
)
from forge.engines.gemma4.tensor_names import model_tensors
from forge.parts.knowledge.cache_bytes import kv_bytes, kv_bytes_per_token, kv_ring_bytes
from forge.parts.knowledge.memory import parameter_counts, step_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.planner_speed import active_parameters, kv_read_bytes
from tests.engines.gemma4_files import (
    FULL,
    SLIDING,
    model_folder,
    moe_config,
    text_config,
    with_header,
    write_config,
)


def real_config(layers: int, every: int, **sizes: Any) -> dict[str, Any]:
    """A config.json of a real size, spelt as releases spell it."""
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        **sizes,
    }


# facts/engines.md 1.6, from the `gemma` 4.0.1 wheel (12B: gemma4-pt-claude 0.2.0), 2026-11-29.
REAL = {
    "E2B": real_config(
        35,
        5,
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
    ),
    "E4B": real_config(
        42,
        6,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
        hidden_size_per_layer_input=256,
    ),
    "12B": real_config(
        48,
        6,
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=1024,
    ),
    "26B-A4B": real_config(
        30,
        6,
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "31B": real_config(
        60,
        6,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
    ),
}
# The same table: text parameters, bytes read a token in bf16, growth of the cache in KiB a token,
# its capped part in MB. Rounded there.
FACTS = {
    "E2B": (4.63e9, 4.56e9, 6, 6.3),
    "E4B": (7.46e9, 9.29e9, 16, 21),
    "12B": (11.91e9, 23.8e9, 16, 336),
    "26B-A4B": (25.2e9, 7.65e9, 20, 210),
    "31B": (30.7e9, 61.4e9, 80, 839),
}


def config_of(stated: dict[str, Any]) -> Gemma4Config:
    with tempfile.TemporaryDirectory() as folder:
        return read_config(write_config(Path(folder), stated))


class AgainstThePlanner(unittest.TestCase):
    """The planner reckons from a Geometry of its own: two ways to the same bytes."""

    configs: dict[str, Gemma4Config]

    @classmethod
    def setUpClass(cls) -> None:
        cls.configs = {name: config_of(stated) for name, stated in REAL.items()}

    def test_all_sizes_are_compared(self) -> None:
        self.assertEqual(set(self.configs), set(GEMMA4))

    def test_parameters_by_group(self) -> None:
        """Layer scalars are tensors here; the planner counts parameters, and they are buffers."""
        for name, config in self.configs.items():
            with self.subTest(model=name):
                mine = parameter_groups(config)
                theirs = parameter_counts(GEMMA4[name].geometry)
                self.assertEqual(mine["embedding"], theirs.embed)
                self.assertEqual(mine.get("per-layer table", 0), theirs.ple_table)
                self.assertEqual(mine.get("per-layer projection", 0), theirs.ple_projection)
                self.assertEqual(mine.get("per-layer gates", 0), theirs.ple_gates)
                self.assertEqual(mine["attention"], theirs.attention)
                self.assertEqual(mine["MLP"], theirs.mlp)
                self.assertEqual(mine.get("experts", 0), theirs.experts)
                self.assertEqual(mine.get("router", 0), theirs.router)
                self.assertEqual(mine["norms"] - len(config.layers), theirs.norms)
                self.assertEqual(sum(mine.values()) - len(config.layers), theirs.total)

    def test_bytes_of_weights(self) -> None:
        for name, config in self.configs.items():
            for dtype, size in (("f32", 4), ("bf16", 2)):
                mine = size * (sum(parameter_groups(config).values()) - len(config.layers))
                self.assertEqual(mine, weight_bytes(GEMMA4[name].geometry, dtype))

    def test_bytes_of_caches(self) -> None:
        for name, config in self.configs.items():
            geometry = GEMMA4[name].geometry
            for context in (1, 100, 511, 512, 513, 1024, 4096, 131072):
                with self.subTest(model=name, context=context):
                    mine = 3 * 2 * sum(cached_elements(config, context).values())
                    self.assertEqual(mine, kv_bytes(geometry, context, 3, 2, "ring"))

    def test_growth_and_rings_of_a_cache(self) -> None:
        for name, config in self.configs.items():
            geometry = GEMMA4[name].geometry
            short, long = (cached_elements(config, n) for n in (50_000, 50_001))
            self.assertEqual(
                2 * (long["full"] - short["full"]), kv_bytes_per_token(geometry, 2, "ring")
            )
            self.assertEqual(2 * long["sliding"], kv_ring_bytes(geometry, 2))

    def test_bytes_of_a_step(self) -> None:
        for name, config in self.configs.items():
            geometry = GEMMA4[name].geometry
            scalars = 2 * len(config.layers)
            for streams in (1, 2, 4, 16, 64):
                for context in (0, 700, 5000):
                    with self.subTest(model=name, streams=streams, context=context):
                        cost = decode_cost(config, 2, streams, context)
                        theirs = step_bytes(geometry, "bf16", streams=streams)
                        self.assertAlmostEqual(cost.weights - scalars, theirs, delta=1)
                        read = streams * kv_read_bytes(geometry, context, 2)
                        self.assertEqual(cost.cache, read)

    def test_operations_of_a_token(self) -> None:
        """The planner takes two per parameter, norms and scalars among them: 0.02 % at most."""
        for name, config in self.configs.items():
            mine = decode_cost(config, 2, 1, 0).flops
            theirs = 2 * active_parameters(GEMMA4[name].geometry)
            self.assertLess(mine, theirs)
            self.assertAlmostEqual(mine / theirs, 1, delta=2e-4)

    def test_the_facts_table(self) -> None:
        for name, (parameters, read, growing, capped) in FACTS.items():
            with self.subTest(model=name):
                config = self.configs[name]
                total = sum(parameter_groups(config).values())
                self.assertAlmostEqual(total / parameters, 1, delta=0.002)
                self.assertAlmostEqual(decode_cost(config, 2, 1, 0).weights / read, 1, delta=0.005)
                kept = cached_elements(config, 200_000)
                self.assertEqual(2 * kept["full"] / 200_000, growing * 1024)
                self.assertAlmostEqual(2 * kept["sliding"] / 1e6 / capped, 1, delta=0.02)


class CountedOneByOne(unittest.TestCase):
    """The same figures from loops over tokens, layers and tensors."""

    configs: dict[str, Gemma4Config]

    @classmethod
    def setUpClass(cls) -> None:
        cls.configs = {"e2b": config_of(text_config()), "moe": config_of(moe_config())}

    def seen(self, config: Gemma4Config, layer: LayerConfig, position: int) -> int:
        """Tokens that the one at `position` sees: itself and what lies before it."""
        first = max(0, position - config.window + 1) if layer.sliding else 0
        return len(range(first, position + 1))

    def through_layer(self, config: Gemma4Config, layer: LayerConfig, position: int) -> float:
        """Operations of one token in one layer."""
        total = 4.0 * layer.heads * layer.head_dim * self.seen(config, layer, position)
        for name, shape in model_tensors(config).items():
            if name.startswith(f"layers.{layer.index}.") and len(shape) > 1:
                used = config.experts_used / config.experts if ".experts." in name else 1
                total += 2 * math.prod(shape) * used
        return total

    def test_a_prompt(self) -> None:
        for config in self.configs.values():
            packed = len(config.layers) * config.per_layer
            for tokens in (1, 7, 8, 9, 30):
                total = 2.0 * config.hidden * (config.vocabulary + tokens * packed)
                for position in range(tokens):
                    for layer in config.layers:
                        if layer.owner or position == tokens - 1:
                            total += self.through_layer(config, layer, position)
                self.assertAlmostEqual(prompt_flops(config, tokens), total)

    def test_a_step_is_what_its_last_token_costs(self) -> None:
        for config in self.configs.values():
            packed = len(config.layers) * config.per_layer
            for position in (0, 5, 40):
                total = 2.0 * config.hidden * (config.vocabulary + packed)
                for layer in config.layers:
                    total += self.through_layer(config, layer, position)
                cost = decode_cost(config, 4, 1, position + 1)
                self.assertAlmostEqual(cost.flops, total)
                self.assertAlmostEqual(decode_cost(config, 4, 5, position + 1).flops, 5 * total)

    def test_bytes_of_a_step(self) -> None:
        config = self.configs["e2b"]
        table = math.prod(model_tensors(config)["embed_tokens_per_layer.weight"])
        cost = decode_cost(config, 4, 3, 20)
        total = sum(math.prod(shape) for shape in model_tensors(config).values())
        self.assertEqual(cost.weights, 4 * (total - table))
        self.assertEqual(cost.gathered, 3 * 4 * (64 + 8 * 16))
        self.assertEqual(cost.cache, 3 * 4 * 2 * (5 * 32 * 8 + 3 * 64 * 20))
        self.assertEqual(cost.read, cost.weights + cost.gathered + cost.cache)

    def test_experts_that_streams_take(self) -> None:
        config = self.configs["moe"]
        experts = parameter_groups(config)["experts"]
        rest = sum(parameter_groups(config).values()) - experts
        for streams, share in ((1, 0.25), (2, 0.4375), (1000, 1.0)):
            cost = decode_cost(config, 1, streams, 1)
            self.assertAlmostEqual(cost.weights, rest + share * experts)

    def test_caches_of_owners_alone(self) -> None:
        kept = cached_elements(self.configs["e2b"], 100)
        self.assertEqual(kept, {"sliding": 3 * 2 * 32 * 8, "full": 2 * 2 * 64 * 100})
        short = cached_elements(self.configs["e2b"], 5)
        self.assertEqual(short, {"sliding": 3 * 2 * 32 * 5, "full": 2 * 2 * 64 * 5})

    def test_bytes_of_caches_and_of_the_scales_beside_int8(self) -> None:
        config = self.configs["e2b"]
        for kv_dtype, size, scales in (("f32", 4, 0), ("bf16", 2, 0), ("int8", 1, 2 * 4)):
            sliding, full = 3 * (2 * 32 * size + scales), 2 * (2 * 64 * size + scales)
            kept = cached_bytes(config, 100, kv_dtype)
            self.assertEqual(kept, {"sliding": 8 * sliding, "full": 100 * full})
            read = decode_cost(config, 2, 3, 100, kv_dtype=kv_dtype).cache
            # Three layers that share read an owner's too: two sliding ones and a full one.
            self.assertEqual(read, 3 * (8 * sliding // 3 * 5 + 100 * full // 2 * 3))
        self.assertEqual(
            decode_cost(config, 2, 3, 100), decode_cost(config, 2, 3, 100, kv_dtype="bf16")
        )

    def test_the_planner_knows_of_no_scales(self) -> None:
        """Its int8 is a byte a number: of E2B 0.9 % less at 4,096 tokens, just the scales."""
        kept = sum(cached_bytes(config_of(REAL["E2B"]), 4096, "int8").values())
        planned = kv_bytes(GEMMA4["E2B"].geometry, 4096, 1, 1, "ring")
        self.assertEqual(kept - planned, 8 * (12 * 512 + 3 * 4096))
        self.assertAlmostEqual(1 - planned / kept, 0.009, places=3)

    def test_marks_and_temporaries(self) -> None:
        config = self.configs["e2b"]
        self.assertEqual(marks_bytes(config, 4), 4 * 512 * (1 + 4))
        parts = temporary_bytes(config, 16, 4)
        self.assertEqual(parts["attention of a chunk"], 2 * 4 * 4 * 16 * 256)
        self.assertEqual(parts["MLP of a chunk"], 3 * 4 * 16 * 256)
        self.assertEqual(parts["per-layer inputs of a chunk"], 2 * 4 * 16 * 8 * 16)
        self.assertEqual(parts["logits of a decode"], 3 * 4 * 4 * 512)

    def test_the_bound(self) -> None:
        cost = decode_cost(self.configs["e2b"], 4, 2, 10)
        self.assertEqual(bound_tokens_per_s(cost, 2, cost.read), 2.0)
        self.assertEqual(bound_tokens_per_s(cost, 2, cost.read, cost.flops), 2.0)
        self.assertEqual(bound_tokens_per_s(cost, 2, cost.read, cost.flops / 4), 0.5)
        self.assertEqual(bound_tokens_per_s(cost, 2, cost.read / 8, cost.flops), 0.25)


class MemorySpeed(unittest.TestCase):
    def test_it_is_a_speed(self) -> None:
        speed = read_speed()
        self.assertGreater(speed, 1e6)
        self.assertLess(speed, 1e14)


class Explained(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def explained(self, **how: Any) -> tuple[list[str], dict[str, Any]]:
        """The lines for people, and the last line's figures."""
        *lines, last = explain_text(self.folder, **{"bandwidth_gb_s": 20.0} | how).splitlines()
        return lines, json.loads(last)

    def test_the_figures_are_those_of_the_sizes(self) -> None:
        _, config = model_folder(self.folder, element="BF16")
        _, told = self.explained(slots=3, context=64, chunk=16, gflop_s=100)
        groups = parameter_groups(config)
        self.assertEqual(told["weights_bytes"], {name: 4 * n for name, n in groups.items()})
        self.assertEqual(told["stored_bytes"], 2 * sum(groups.values()))
        kept = cached_elements(config, 64)
        self.assertEqual(told["kv_bytes"], {kind: 3 * 4 * n for kind, n in kept.items()})
        self.assertEqual(told["temporary_bytes"], temporary_bytes(config, 16, 3))
        self.assertEqual([step["streams"] for step in told["steps"]], [1, 3])
        for step in told["steps"]:
            cost = decode_cost(config, 4, step["streams"], 32)
            self.assertEqual(step["weights_read"], cost.weights)
            self.assertEqual(step["rows_read"], cost.gathered)
            self.assertEqual(step["kv_read"], cost.cache)
            self.assertEqual(step["flops"], cost.flops)
            bound = bound_tokens_per_s(cost, step["streams"], 20e9, 100e9)
            self.assertEqual(step["bound_tokens_per_s"], round(bound, 3))
        self.assertEqual(told["prompt_flops"], prompt_flops(config, 32))
        parts = ("weights_bytes", "kv_bytes", "temporary_bytes")
        total = sum(size for part in parts for size in told[part].values())
        self.assertEqual(told["total_bytes"], total + told["marks_bytes"])

    def test_the_table_says_the_same(self) -> None:
        model_folder(self.folder)
        lines, told = self.explained(slots=2, context=64, dtype="bf16")
        table = "\n".join(lines)
        for figure in (
            *told["weights_bytes"].values(),
            *told["kv_bytes"].values(),
            *(step["kv_read"] for step in told["steps"]),
            told["total_bytes"],
        ):
            self.assertIn(f"{figure:,}", table)
        self.assertIn("weights as bf16", table)
        self.assertIn("memory: 20.0 GB/s, as given; compute: not given", table)
        self.assertIn("8 layers: 5 sliding over 8 tokens; 3 full, 5 own keys and values", table)

    def test_bf16_takes_half(self) -> None:
        model_folder(self.folder)
        _, f32 = self.explained(dtype="f32")
        _, bf16 = self.explained(dtype="bf16")
        for name, size in f32["weights_bytes"].items():
            self.assertEqual(size, 2 * bf16["weights_bytes"][name])
        self.assertEqual(f32["kv_bytes"]["full"], 2 * bf16["kv_bytes"]["full"])

    def test_int8_keys_and_values_and_kept_prefixes(self) -> None:
        _, config = model_folder(self.folder)
        _, plain = self.explained(slots=2, context=64)
        lines, told = self.explained(slots=2, context=64, kv_dtype="int8", prefix_cache_gb=1.5)
        self.assertEqual((plain["kv_dtype"], told["kv_dtype"]), ("f32", "int8"))
        kept = cached_bytes(config, 64, "int8")
        self.assertEqual(told["kv_bytes"], {kind: 2 * size for kind, size in kept.items()})
        less = sum(plain["kv_bytes"].values()) - sum(told["kv_bytes"].values())
        self.assertEqual(plain["total_bytes"] - told["total_bytes"], less)
        self.assertEqual(told["weights_bytes"], plain["weights_bytes"])
        self.assertLess(told["steps"][0]["kv_read"], plain["steps"][0]["kv_read"])
        self.assertEqual((plain["prefix_cache_bytes"], told["prefix_cache_bytes"]), (0, 15 * 10**8))
        table = "\n".join(lines)
        for words in ("full layers' keys and values, int8", "8 tokens, int8", "1,500,000,000"):
            self.assertIn(words, table)

    def test_one_slot_has_one_column(self) -> None:
        model_folder(self.folder, moe_config())
        lines, told = self.explained(slots=1)
        self.assertEqual(len(told["steps"]), 1)
        self.assertIn("2 of 8 experts a token", "\n".join(lines))

    def test_memory_is_measured_where_no_speed_is_given(self) -> None:
        model_folder(self.folder)
        lines, told = self.explained(bandwidth_gb_s=None)
        self.assertTrue(told["bandwidth_measured"])
        self.assertGreater(told["bandwidth_bytes_per_s"], 1e6)
        self.assertIn("measured now with all cores", "\n".join(lines))

    def test_a_real_size_without_its_weights(self) -> None:
        """E2B's header before nine gigabytes of nothing: a sparse file that is never read."""
        config = read_config(write_config(self.folder, REAL["E2B"]))
        header: dict[str, Any] = {}
        end = 0
        for name, shape in model_tensors(config).items():
            begin, end = end, end + 2 * math.prod(shape)
            header[f"model.language_model.{name}"] = {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        content = with_header(header, b"")
        with (self.folder / "model.safetensors").open("wb") as file:
            file.write(content)
            file.truncate(len(content) + end)
        _, told = self.explained(dtype="bf16", slots=4, context=4096)
        geometry = GEMMA4["E2B"].geometry
        scalars = 2 * geometry.layers
        self.assertEqual(
            sum(told["weights_bytes"].values()) - scalars, weight_bytes(geometry, "bf16")
        )
        self.assertEqual(told["stored_bytes"], end)
        self.assertEqual(sum(told["kv_bytes"].values()), kv_bytes(geometry, 4096, 4, 2, "ring"))

    def test_what_cannot_be_explained(self) -> None:
        model_folder(self.folder)
        for how in ({"dtype": "int8"}, {"slots": 0}, {"context": 0}, {"chunk": 0}):
            with self.assertRaises(ValueError):
                self.explained(**how)
        write_config(self.folder, text_config(attention_bias=True))
        with self.assertRaisesRegex(ModelRefused, "attention_bias"):
            self.explained()
        write_config(self.folder, text_config(hidden_size=32))
        with self.assertRaisesRegex(ModelRefused, "shape"):
            self.explained()
