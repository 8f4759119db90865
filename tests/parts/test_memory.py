"""The arithmetic of memory, against transformers' modules and against what others reported.

Rows of reported figures give the figure as its source printed it and the tolerance that its
rounding or its fit allows; a row that our formula was fitted to says so.
"""

from __future__ import annotations

import math
import re
import unittest
from collections import Counter
from typing import Any

from forge.parts.knowledge.cache_bytes import kv_bytes, kv_bytes_per_token, kv_ring_bytes
from forge.parts.knowledge.geometry import FULL_LAYER, Geometry
from forge.parts.knowledge.geometry_config import geometry_from_config
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import (
    WEIGHT_ENCODINGS,
    ParameterCounts,
    parameter_counts,
    ple_bytes,
    step_bytes,
    weight_bytes,
)
from forge.parts.knowledge.models import GEMMA4, checkpoint_for_repo
from tests.parts.test_models import HF_FIELDS, gemma4_config, saved

GIB = 2**30
MIB = 2**20
SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")

# Which group a parameter of transformers' modules belongs to, by its name, first match wins.
GROUPS = (
    ("ple_table", r"embed_tokens_per_layer"),
    ("embed", r"embed_tokens"),
    ("ple_gates", r"per_layer_input_gate|layers\.\d+\.per_layer_projection"),
    ("ple_projection", r"per_layer_model_projection"),
    ("norms", r"norm"),
    ("attention", r"self_attn"),
    ("experts", r"experts\.(gate_up|down)_proj"),
    ("router", r"router"),
    ("mlp", r"mlp"),
    ("head", r"lm_head"),
)


def shape(size: str) -> Geometry:
    return GEMMA4[size].geometry


def on_meta(model_class: Any, config: Any) -> Any:
    """A real model without storage: shapes and names, no bytes."""
    import torch

    with torch.device("meta"):
        return model_class(config)


def counted(model: Any) -> Counter[str]:
    groups: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        for group, pattern in GROUPS:
            if re.search(pattern, name):
                groups[group] += weight.numel()
                break
        else:
            raise AssertionError(f"{name} belongs to no group")
    return groups


class TestParameterCounts(unittest.TestCase):
    """Group by group against models built by transformers on the meta device."""

    def same(self, model: Any, counts: ParameterCounts) -> None:
        theirs = counted(model)
        for group, _ in GROUPS:
            self.assertEqual(getattr(counts, group), theirs[group], group)
        self.assertEqual(counts.total, sum(weight.numel() for weight in model.parameters()))

    def test_every_gemma4_size(self) -> None:
        from transformers import Gemma4ForCausalLM

        for size in SIZES:
            with self.subTest(size):
                model = on_meta(Gemma4ForCausalLM, gemma4_config(size))
                self.same(model, parameter_counts(shape(size)))

    def test_small_variants_of_gemma4(self) -> None:
        # Features in combinations that no published size has.
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        base = {
            "vocab_size": 512,
            "vocab_size_per_layer_input": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 8,
        }
        moe = {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        }
        equal = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        shared = {"num_kv_shared_layers": 4, "use_double_wide_mlp": True}
        no_ple = {"hidden_size_per_layer_input": 0}
        for change in (
            {},
            no_ple | moe,
            moe | {"hidden_size_per_layer_input": 16},
            equal | shared,
            shared | moe | equal,
            no_ple | {"attention_bias": True},
            {"tie_word_embeddings": False},
        ):
            with self.subTest(change=change):
                config = Gemma4TextConfig(**(base | change))
                geometry = geometry_from_config(saved(config))
                self.same(on_meta(Gemma4ForCausalLM, config), parameter_counts(geometry))

    def test_plain_decoders(self) -> None:
        import transformers as hf

        small = {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
        for model_class, config in (
            (hf.LlamaForCausalLM, hf.LlamaConfig(**small)),
            (hf.LlamaForCausalLM, hf.LlamaConfig(**small, tie_word_embeddings=True)),
            (hf.LlamaForCausalLM, hf.LlamaConfig(**small, attention_bias=True, mlp_bias=True)),
            (hf.MistralForCausalLM, hf.MistralConfig(**small)),
            (hf.Qwen2ForCausalLM, hf.Qwen2Config(**{**small, "head_dim": 16})),
            (hf.Qwen3ForCausalLM, hf.Qwen3Config(**small)),
            (hf.Qwen3ForCausalLM, hf.Qwen3Config(**small, attention_bias=True)),
            (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**small)),
        ):
            with self.subTest(config=type(config).__name__):
                geometry = geometry_from_config(saved(config))
                self.same(on_meta(model_class, config), parameter_counts(geometry))

    def test_smollm2_has_the_parameters_in_its_name(self) -> None:
        import transformers as hf

        config = hf.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        geometry = geometry_from_config(saved(config))
        self.assertAlmostEqual(parameter_counts(geometry).total / 1e6, 135, delta=1)

    def test_text_parameters_as_published(self) -> None:
        # billions, and of these the PLE table (capacity notes of 2026-11-29)
        for size, total, table in (
            ("E2B", 4.629, 2.349),
            ("E4B", 7.463, 2.819),
            ("12B", 11.907, 0),
            ("26B-A4B", 25.233, 0),
            ("31B", 30.697, 0),
        ):
            counts = parameter_counts(shape(size))
            self.assertAlmostEqual(counts.total / 1e9, total, delta=0.0005, msg=size)
            self.assertAlmostEqual(counts.ple_table / 1e9, table, delta=0.0005, msg=size)


class TestWeights(unittest.TestCase):
    def close(self, predicted: float, reported: float, percent: float, what: str = "") -> None:
        error = 100 * (predicted / reported - 1)
        self.assertLessEqual(abs(error), percent, f"{what}: {predicted:.6g}, {error:+.2f} %")

    def test_the_table_of_sizes_and_encodings(self) -> None:
        # GB, to the printed digit
        table = {
            "E2B": (9.26, 7.39, 6.58, 3.33),
            "E4B": (14.93, 10.98, 9.25, 5.14),
            "12B": (23.81, 12.91, 8.15, 6.96),
            "26B-A4B": (50.47, 25.98, 15.27, 14.40),
            "31B": (61.39, 32.11, 19.29, 17.63),
        }
        for size, row in table.items():
            for encoding, gigabytes in zip(("bf16", "fp8", "w4a16", "q4_0"), row, strict=True):
                found = weight_bytes(shape(size), encoding) / 1e9
                self.assertAlmostEqual(found, gigabytes, delta=0.0051, msg=(size, encoding))

    def test_bf16_is_the_size_of_the_module(self) -> None:
        import torch
        from transformers import Gemma4ForCausalLM

        for size in SIZES:
            model = on_meta(Gemma4ForCausalLM, gemma4_config(size)).to(torch.bfloat16)
            stored = sum(weight.nbytes for weight in model.parameters())
            self.assertEqual(weight_bytes(shape(size), "bf16"), stored, size)

    def test_f32_is_twice_bf16_and_fp16_the_same(self) -> None:
        for size in SIZES:
            bf16 = weight_bytes(shape(size), "bf16")
            self.assertEqual(weight_bytes(shape(size), "f32"), 2 * bf16)
            self.assertEqual(weight_bytes(shape(size), "fp16"), bf16)
            self.assertEqual(weight_bytes(shape(size), "int8"), weight_bytes(shape(size), "fp8"))

    def test_residents_predicted_before_they_were_seen(self) -> None:
        # xbill9/gemma4-dev, 2026-08; kind P of the calibration, tolerances from its error column
        e2b, g12, g26, g31 = shape("E2B"), shape("12B"), shape("26B-A4B"), shape("31B")
        vision = GEMMA4["E2B"].vision_tower.known("vision")
        self.close(weight_bytes(e2b, "bf16") / 1e9, 9.26, 0.1, "E2B bf16, JAX on T4G")
        tpu = weight_bytes(e2b, "bf16", dead_kv=True) + vision
        self.close(tpu / GIB, 8.97, 0.1, "E2B bf16, vLLM on TPU")
        self.close(weight_bytes(e2b, "w4a16") / 1e9, 6.62, 0.7, "E2B w4a16, JAX")
        packed = weight_bytes(e2b, "w4a16", ple_encoding="w4a16")
        self.close(packed / 1e9, 3.11, 3.1, "E2B w4a16 with int4 PLE")
        twelve = weight_bytes(g12, "fp8") + GEMMA4["12B"].vision_tower.known("towers")
        self.close(twelve / 1e9, 13.4, 3.0, "12B fp8")
        self.close(weight_bytes(g12, "w4a16") / 1e9, 8.15, 0.1, "12B w4a16, JAX")
        self.close(weight_bytes(g26, "w4a16") / 1e9, 15.27, 0.1, "26B w4a16, repacked")
        self.close(weight_bytes(g31, "w4a16") / 1e9, 19.3, 0.1, "31B w4a16, JAX")
        read = weight_bytes(g31, "w4a16", duplicate_head=True)
        self.close(read / 1e9, 22.11, 0.1, "31B w4a16, text tensors on disk")
        self.close(weight_bytes(g31, "bf16") / 1e9, 62, 1.0, "31B bf16, rounded")

    def test_files_that_the_formulas_were_fitted_to(self) -> None:
        # kind F: they show that the parts add up, not that the formula foresees
        e2b, model = shape("E2B"), GEMMA4["E2B"]
        towers = model.vision_tower.known("vision") + model.audio_tower.known("audio")
        whole = weight_bytes(e2b, "bf16", dead_kv=True) + towers
        self.close(whole / 1e9, 10.25, 0.15, "E2B bf16 file")
        ct = weight_bytes(e2b, "w4a16", duplicate_head=True) + towers
        self.close(ct / 1e9, 8.32, 0.2, "E2B w4a16-ct file")
        table = ple_bytes(e2b, "q4_0") / 3.35e9
        self.close(100 * table, 58, 0.9, "PLE share of the E2B GGUF")
        small = GEMMA4["12B"].vision_tower.known("towers")
        self.close((weight_bytes(shape("12B"), "bf16") + small) / 1e9, 23.9, 0.1, "12B")
        disk = weight_bytes(shape("12B"), "w4a16", duplicate_head=True) + small
        self.close(disk / 1e9, 10.26, 0.1, "12B w4a16-ct file")
        moe = GEMMA4["26B-A4B"].vision_tower.known("vision")
        self.close((weight_bytes(shape("26B-A4B"), "bf16") + moe) / 1e9, 51.61, 0.1, "26B file")
        lazy = step_bytes(e2b, "bf16") + model.vision_tower.known("vision") + 0.8e9
        self.close(lazy / 1e9, 5.71, 0.4, "E2B peak RSS in transformers, .8 GB of runtime")

    def test_gguf_files_to_the_byte_count_on_the_hub(self) -> None:
        # E4B, 12B and 31B were not in the calibration: the formula meets them for the first time.
        for size, repo in (
            ("E2B", "google/gemma-4-E2B-it-qat-q4_0-gguf"),
            ("E4B", "google/gemma-4-E4B-it-qat-q4_0-gguf"),
            ("12B", "google/gemma-4-12B-it-qat-q4_0-gguf"),
            ("31B", "google/gemma-4-31B-it-qat-q4_0-gguf"),
        ):
            file = checkpoint_for_repo(repo)[1].file.known(repo)
            predicted = weight_bytes(shape(size), "q4_0")
            self.close(predicted, file, 0.5, repo)
            # the file holds tokenizer and metadata too, so it is never the smaller one
            self.assertLess(predicted, file, repo)

    def test_the_31b_w4a16_file_as_quoted_in_public(self) -> None:
        model, checkpoint = checkpoint_for_repo("google/gemma-4-31B-it-qat-w4a16-ct")
        disk = weight_bytes(model.geometry, "w4a16", duplicate_head=True)
        disk += int(model.vision_tower.known("vision"))
        self.close(disk, checkpoint.file.known("file"), 0.3)

    def test_gguf_block_sizes_are_ggmls(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for kind, per_weight in (
            (GGMLQuantizationType.Q4_0, WEIGHT_ENCODINGS["q4_0"].linear),
            (GGMLQuantizationType.Q6_K, WEIGHT_ENCODINGS["q4_0"].embedding),
            (GGMLQuantizationType.Q6_K, WEIGHT_ENCODINGS["q4_0"].ple),
        ):
            weights, size = GGML_QUANT_SIZES[kind]
            self.assertEqual(per_weight, size / weights)

    def test_extras_change_what_they_say_and_nothing_else(self) -> None:
        twelve, e2b = shape("12B"), shape("E2B")
        plain = weight_bytes(twelve, "w4a16")
        # no sharing layer, no PLE table: nothing to add, nothing to repack
        self.assertEqual(weight_bytes(twelve, "w4a16", dead_kv=True), plain)
        self.assertEqual(weight_bytes(twelve, "w4a16", ple_encoding="w4a16"), plain)
        dead = weight_bytes(e2b, "bf16", dead_kv=True) - weight_bytes(e2b, "bf16")
        self.assertAlmostEqual(dead / 1e6, 37.7, delta=0.05)
        untied = geometry_from_config(saved(gemma4_config("E2B")) | {"tie_word_embeddings": False})
        self.assertEqual(
            weight_bytes(untied, "bf16"), weight_bytes(e2b, "bf16", duplicate_head=True)
        )
        self.assertEqual(
            weight_bytes(untied, "bf16"), weight_bytes(untied, "bf16", duplicate_head=True)
        )

    def test_an_unknown_encoding_is_named_with_the_known_ones(self) -> None:
        for call in (
            lambda: weight_bytes(shape("E2B"), "nf4"),
            lambda: step_bytes(shape("E2B"), "nf4"),
            lambda: ple_bytes(shape("E2B"), "bf16", ple_encoding="nf4"),
        ):
            with self.assertRaisesRegex(ValueError, "'nf4'.*bf16.*q4_0"):
                call()


class TestStep(unittest.TestCase):
    def test_the_table_of_reads_per_step(self) -> None:
        # GB of one stream, to the printed digit: bf16 and 4 bit
        for size, bf16, w4a16 in (
            ("E2B", 4.56, 1.88),
            ("E4B", 9.29, 3.62),
            ("12B", 23.8, 8.15),
            ("26B-A4B", 7.65, 3.23),
            ("31B", 61.4, 19.3),
        ):
            self.assertAlmostEqual(step_bytes(shape(size), "bf16") / 1e9, bf16, delta=0.0151)
            self.assertAlmostEqual(step_bytes(shape(size), "w4a16") / 1e9, w4a16, delta=0.0051)

    def test_reads_that_were_measured(self) -> None:
        # xbill9/gemma4-dev: 4.514 on a T4G and L4 (P, 1 %), 1.407 for q4_0 (F)
        self.assertAlmostEqual(step_bytes(shape("E2B"), "bf16") / 1e9, 4.514, delta=0.047)
        self.assertAlmostEqual(step_bytes(shape("E2B"), "q4_0") / 1e9, 1.407, delta=0.001)

    def test_what_llama_cpp_puts_on_the_card(self) -> None:
        # 1,341 MiB of device weights for E2B q4_0 on the 1650 Ti; 1,618 with cache and buffers
        device = weight_bytes(shape("E2B"), "q4_0") - ple_bytes(shape("E2B"), "q4_0")
        self.assertAlmostEqual(device / MIB, 1341, delta=1)
        self.assertLess(device / MIB, 1618)
        self.assertLessEqual(abs(device - step_bytes(shape("E2B"), "q4_0")), 2)

    def test_a_dense_model_without_tables_reads_everything(self) -> None:
        for size in ("12B", "31B"):
            for encoding in WEIGHT_ENCODINGS:
                whole = weight_bytes(shape(size), encoding)
                self.assertEqual(step_bytes(shape(size), encoding), whole)
                self.assertEqual(step_bytes(shape(size), encoding, streams=64), whole)

    def test_an_untied_embedding_is_a_gather(self) -> None:
        import transformers as hf

        config = hf.LlamaConfig(
            num_hidden_layers=2, vocab_size=1000, hidden_size=64, num_attention_heads=4, head_dim=16
        )
        geometry = geometry_from_config(saved(config))
        model = on_meta(hf.LlamaForCausalLM, config)
        rest = sum(w.numel() for n, w in model.named_parameters() if "embed_tokens" not in n)
        self.assertEqual(step_bytes(geometry, "f32"), 4 * rest)

    def test_streams_touch_more_experts_until_all_are_read(self) -> None:
        moe = shape("26B-A4B")
        reads = [step_bytes(moe, "bf16", streams=n) for n in (1, 2, 8, 64, 1000)]
        self.assertEqual(reads, sorted(set(reads)))
        self.assertAlmostEqual(reads[-1], weight_bytes(moe, "bf16"), delta=2)
        # 8 of 128 each: two streams miss an expert with probability (15/16)^2
        experts = 2 * parameter_counts(moe).experts
        self.assertAlmostEqual(reads[1] - reads[0], experts * (1 / 16) * (15 / 16), delta=2)
        with self.assertRaisesRegex(ValueError, "streams"):
            step_bytes(moe, "bf16", streams=0)

    def test_the_ple_table_is_the_difference(self) -> None:
        for size in ("E2B", "E4B"):
            for encoding in WEIGHT_ENCODINGS:
                apart = weight_bytes(shape(size), encoding) - step_bytes(shape(size), encoding)
                self.assertAlmostEqual(ple_bytes(shape(size), encoding), apart, delta=2)
        self.assertEqual(ple_bytes(shape("31B"), "bf16"), 0)


class TestCache(unittest.TestCase):
    def test_kib_per_token(self) -> None:
        # kind I: 16-bit cache, all owners at full length / full-attention owners alone
        for size, uniform, ring, fixed in (
            ("E2B", 18, 6, 6.3),
            ("E4B", 56, 16, 21),
            ("12B", 336, 16, 336),
            ("26B-A4B", 220, 20, 210),
            ("31B", 880, 80, 838.9),
        ):
            geometry = shape(size)
            self.assertEqual(kv_bytes_per_token(geometry, 2, "uniform") / 1024, uniform, size)
            self.assertEqual(kv_bytes_per_token(geometry, 2, "ring") / 1024, ring, size)
            self.assertAlmostEqual(kv_ring_bytes(geometry, 2) / 1e6, fixed, delta=0.5, msg=size)

    def test_a_real_cache_of_transformers_has_these_tensors(self) -> None:
        # A small E2B and a small 12B, run for real: what the cache holds after a prompt.
        import torch
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        small = {
            "vocab_size": 256,
            "vocab_size_per_layer_input": 256,
            "hidden_size": 32,
            "intermediate_size": 32,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_attention_heads": 4,
        }
        for like, changes in (
            ("E2B", {"hidden_size_per_layer_input": 8}),
            ("12B", {"num_key_value_heads": 2, "num_hidden_layers": 6}),
        ):
            fields = HF_FIELDS[like] | small | changes
            fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
            fields["sliding_window"] = 64
            config = Gemma4TextConfig(**fields, dtype="float32")
            model = Gemma4ForCausalLM(config).eval()
            tokens = 24  # below the window: every owner keeps all of them
            with torch.no_grad():
                cache = model(torch.arange(tokens)[None], use_cache=True).past_key_values
            held = sum(
                layer.keys.nbytes + layer.values.nbytes
                for layer in cache.layers
                if getattr(layer, "keys", None) is not None
            )
            geometry = geometry_from_config(saved(config))
            self.assertEqual(kv_bytes(geometry, tokens, 1, 4, "uniform"), held, like)
            self.assertEqual(kv_bytes(geometry, tokens, 1, 4, "ring"), held, like)

    def test_pools_that_vllm_reported_on_tpus(self) -> None:
        # Pool = visible x utilisation - 8.97 GiB resident; tokens in whole blocks.
        # Tolerance 0.1 %: utilisation and residents are known to three digits.
        per_token = kv_bytes_per_token(shape("E2B"), 2, "uniform")
        for chip, utilisation, block, reported in (
            ("v5e", 0.92, 32, 321_400),
            ("v5e", 0.95, 32, 348_896),
            ("v6e", 0.90, 128, 8_713 * 128),
            ("v6e", 0.92, 64, 1_151_744),
        ):
            visible = ACCELERATORS[chip].visible_memory.known(chip)
            pool = (visible * utilisation - 8.97) * GIB
            tokens = math.floor(pool / (block * per_token)) * block
            self.assertAlmostEqual(tokens / reported, 1, delta=0.001, msg=(chip, utilisation))

    def test_the_v6e_pool_from_predicted_weights(self) -> None:
        geometry = shape("E2B")
        resident = weight_bytes(geometry, "bf16", dead_kv=True)
        resident += int(GEMMA4["E2B"].vision_tower.known("vision"))
        visible = ACCELERATORS["v6e"].visible_memory.known("v6e")
        tokens = (visible * 0.92 * GIB - resident) / kv_bytes_per_token(geometry, 2, "uniform")
        self.assertAlmostEqual(tokens / 1_151_744, 1, delta=0.001)

    def test_fifteen_kib_cannot_be_right(self) -> None:
        # The 2026-07 article's 15 KiB leaves its own 8,713 blocks 17 % short of the pool.
        pool = (31.24 * 0.90 - 8.97) * GIB
        self.assertAlmostEqual(8_713 * 128 * 18 * 1024 / pool, 1, delta=0.001)
        self.assertLess(8_713 * 128 * 15 * 1024 / pool, 0.85)

    def test_other_peoples_pools(self) -> None:
        # vllm issue 43308: 31B on an A100, about 50 GB of pool, 55 K tokens before hybrid caches
        tokens = 50e9 / kv_bytes_per_token(shape("31B"), 2, "uniform")
        self.assertAlmostEqual(tokens / 55_000, 1, delta=0.01)
        # E4B on a v6e at .9: queueing set in between 8,192 x 16 and 8,192 x 64
        e4b = shape("E4B")
        resident = weight_bytes(e4b, "bf16") + GEMMA4["E2B"].vision_tower.known("vision")
        tokens = (31.24 * 0.90 * GIB - resident) / kv_bytes_per_token(e4b, 2, "uniform")
        self.assertAlmostEqual(tokens / 266_200, 1, delta=0.023)

    def test_rings_grow_like_uniform_up_to_the_window_and_slower_beyond(self) -> None:
        for size in SIZES:
            geometry = shape(size)
            window = geometry.window or 0
            for context in (0, 1, window - 1, window):
                self.assertEqual(
                    kv_bytes(geometry, context, 1, 2, "ring"),
                    kv_bytes(geometry, context, 1, 2, "uniform"),
                    (size, context),
                )
            step = kv_bytes(geometry, window + 1, 1, 2, "ring") - kv_bytes(
                geometry, window, 1, 2, "ring"
            )
            self.assertEqual(step, kv_bytes_per_token(geometry, 2, "ring"))
            self.assertEqual(
                kv_bytes(geometry, 32768, 1, 2, "ring"),
                kv_ring_bytes(geometry, 2) + 32768 * kv_bytes_per_token(geometry, 2, "ring"),
            )

    def test_slots_and_cache_types_scale(self) -> None:
        geometry = shape("26B-A4B")
        one = kv_bytes(geometry, 4096, 1, 2, "ring")
        self.assertEqual(kv_bytes(geometry, 4096, 7, 2, "ring"), 7 * one)
        self.assertEqual(kv_bytes(geometry, 4096, 1, 1, "ring"), one // 2)
        self.assertEqual(kv_bytes(geometry, 4096, 1, 4, "ring"), 2 * one)

    def test_a_model_without_windows_has_no_ring(self) -> None:
        import transformers as hf

        geometry = geometry_from_config(saved(hf.LlamaConfig(num_hidden_layers=2)))
        self.assertEqual(set(geometry.layer_types), {FULL_LAYER})
        self.assertEqual(kv_ring_bytes(geometry, 2), 0)
        for context in (1, 4096):
            self.assertEqual(
                kv_bytes(geometry, context, 2, 2, "ring"),
                kv_bytes(geometry, context, 2, 2, "uniform"),
            )

    def test_refusals(self) -> None:
        geometry = shape("E2B")
        for context, slots in ((-1, 1), (1, 0)):
            with self.assertRaisesRegex(ValueError, "context.*slots"):
                kv_bytes(geometry, context, slots, 2, "uniform")
        with self.assertRaisesRegex(ValueError, "'paged'.*uniform, ring"):
            kv_bytes_per_token(geometry, 2, "paged")  # type: ignore[arg-type]


if __name__ == "__main__":
    unittest.main()
