"""Shapes and checkpoints, against transformers' own configs and models."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.knowledge.figures import Figure, unmeasured_figure
from forge.parts.knowledge.geometry import FULL_LAYER, SLIDING_LAYER, Geometry
from forge.parts.knowledge.geometry_config import geometry_from_config
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import GEMMA4, checkpoint_for_repo, model_for_slot

# The sizes in transformers' own vocabulary, typed in from the tables that the project's data was
# taken from: a second writing, so that a slip in either shows.
HF_FIELDS: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": ([SLIDING_LAYER] * 4 + [FULL_LAYER]) * 7,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    "E4B": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "layer_types": ([SLIDING_LAYER] * 5 + [FULL_LAYER]) * 7,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    "12B": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ([SLIDING_LAYER] * 5 + [FULL_LAYER]) * 8,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "layer_types": ([SLIDING_LAYER] * 5 + [FULL_LAYER]) * 5,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31B": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "layer_types": ([SLIDING_LAYER] * 5 + [FULL_LAYER]) * 10,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
}


def gemma4_config(size: str) -> Any:
    """transformers' config object of one size."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**HF_FIELDS[size])


def saved(config: Any) -> dict[str, Any]:
    """What transformers writes into config.json for a config object."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # it reports every file that it writes
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        text = Path(folder, "config.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def older_spelling(config: dict[str, Any], size: str) -> dict[str, Any]:
    """The same file as the hub's Gemma 4 repositories spell it."""
    config = {key: value for key, value in config.items() if key != "per_layer_config"}
    heads = HF_FIELDS[size].get("num_global_key_value_heads")
    return config | {"global_head_dim": 512, "num_global_key_value_heads": heads}


class TestGemma4Configs(unittest.TestCase):
    def test_every_size_as_transformers_writes_it(self) -> None:
        for size, model in GEMMA4.items():
            with self.subTest(size):
                config = saved(gemma4_config(size))
                self.assertIn("per_layer_config", config)
                self.assertEqual(geometry_from_config(config), model.geometry)

    def test_every_size_in_the_older_spelling(self) -> None:
        for size, model in GEMMA4.items():
            with self.subTest(size):
                config = older_spelling(saved(gemma4_config(size)), size)
                self.assertEqual(geometry_from_config(config), model.geometry)

    def test_wrapped_as_the_multimodal_checkpoints_are(self) -> None:
        from transformers import Gemma4Config

        config = saved(Gemma4Config(text_config=gemma4_config("E2B")))
        self.assertEqual(config["model_type"], "gemma4")
        self.assertEqual(geometry_from_config(config), GEMMA4["E2B"].geometry)
        config["text_config"] = older_spelling(config["text_config"], "E2B")
        self.assertEqual(geometry_from_config(config), GEMMA4["E2B"].geometry)

    def test_the_unified_config_that_the_12b_uses(self) -> None:
        from transformers import Gemma4UnifiedTextConfig

        fields = {
            key: value
            for key, value in HF_FIELDS["12B"].items()
            if key != "hidden_size_per_layer_input"
        }
        config = saved(Gemma4UnifiedTextConfig(**fields))
        self.assertEqual(config["model_type"], "gemma4_unified_text")
        self.assertEqual(geometry_from_config(config), GEMMA4["12B"].geometry)

    def test_global_kv_heads_count_only_where_keys_are_values(self) -> None:
        # transformers reads the field under attention_k_eq_v alone; its module shows the width.
        import torch
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        fields = HF_FIELDS["12B"] | {"attention_k_eq_v": False}
        ours = geometry_from_config(older_spelling(saved(Gemma4TextConfig(**fields)), "12B"))
        with torch.device("meta"):
            theirs = Gemma4ForCausalLM(Gemma4TextConfig(**fields))
        full = fields["layer_types"].index(FULL_LAYER)
        k_proj = theirs.model.layers[full].self_attn.k_proj
        self.assertEqual(ours.kv_width(full), k_proj.out_features)
        self.assertNotEqual(ours.kv_width(full), GEMMA4["12B"].geometry.kv_width(full))

    def test_the_last_layer_is_full_whatever_the_file_says(self) -> None:
        from transformers import Gemma4TextConfig

        config = older_spelling(saved(gemma4_config("12B")), "12B")
        config["layer_types"] = [SLIDING_LAYER] * 5 + [FULL_LAYER] + [SLIDING_LAYER] * 42
        theirs = Gemma4TextConfig(**(HF_FIELDS["12B"] | {"layer_types": config["layer_types"]}))
        self.assertEqual(list(geometry_from_config(config).layer_types), theirs.layer_types)

    def test_parameters_that_owners_and_sharers_have_match_the_modules(self) -> None:
        # Per layer, against the module tree: which layers own keys and values, and how wide.
        import torch
        from transformers import Gemma4ForCausalLM

        for size in ("E2B", "26B-A4B"):
            geometry = GEMMA4[size].geometry
            with torch.device("meta"):
                model = Gemma4ForCausalLM(gemma4_config(size))
            for index, layer in enumerate(model.model.layers):
                attention = layer.self_attn
                owns = hasattr(attention, "k_proj")
                self.assertEqual(owns, index < geometry.owners, (size, index))
                if owns:
                    self.assertEqual(attention.k_proj.out_features, geometry.kv_width(index))
                width = geometry.heads * geometry.head_width(index)
                self.assertEqual(attention.q_proj.out_features, width)
                self.assertEqual(layer.mlp.up_proj.out_features, geometry.mlp_width(index))


class TestPlainConfigs(unittest.TestCase):
    """Decoders other than Gemma 4; a small Llama is served for tests."""

    def test_smollm2(self) -> None:
        # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json
        geometry = geometry_from_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "attention_bias": False,
                "hidden_act": "silu",
                "hidden_size": 576,
                "intermediate_size": 1536,
                "model_type": "llama",
                "num_attention_heads": 9,
                "num_hidden_layers": 30,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
                "vocab_size": 49152,
            }
        )
        self.assertEqual(geometry.head_dim, 64)
        self.assertEqual(geometry.layer_types, (FULL_LAYER,) * 30)
        self.assertIsNone(geometry.window)
        self.assertTrue(geometry.tied)
        self.assertFalse(geometry.head_norms)

    def test_an_untied_llama_without_grouped_heads(self) -> None:
        from transformers import LlamaConfig

        config = saved(LlamaConfig(num_hidden_layers=3))
        del config["num_key_value_heads"], config["head_dim"]
        geometry = geometry_from_config(config)
        self.assertEqual(geometry.kv_heads, config["num_attention_heads"])
        self.assertEqual(geometry.head_dim, config["hidden_size"] // config["num_attention_heads"])
        self.assertFalse(geometry.tied)

    def test_windows_where_each_family_has_them(self) -> None:
        from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config, Qwen3Config

        mistral = geometry_from_config(saved(MistralConfig(num_hidden_layers=3)))
        self.assertEqual(mistral.layer_types, (SLIDING_LAYER,) * 3)
        self.assertEqual(mistral.window, MistralConfig().sliding_window)
        newer = geometry_from_config(saved(MistralConfig(num_hidden_layers=3, sliding_window=None)))
        self.assertEqual(newer.layer_types, (FULL_LAYER,) * 3)

        for family in (Qwen2Config, Qwen3Config):
            unused = saved(family(num_hidden_layers=4))
            self.assertEqual(geometry_from_config(unused).layer_types, (FULL_LAYER,) * 4)
            used = family(num_hidden_layers=4, use_sliding_window=True, max_window_layers=1)
            without = {k: v for k, v in saved(used).items() if k != "layer_types"}
            for config in (saved(used), without):
                geometry = geometry_from_config(config)
                self.assertEqual(list(geometry.layer_types), used.layer_types)
                self.assertEqual(geometry.window, used.sliding_window)

        gemma3 = Gemma3TextConfig(num_hidden_layers=8, sliding_window=512)
        for drop in ({"layer_types"}, set()):
            config = {k: v for k, v in saved(gemma3).items() if k not in drop}
            self.assertEqual(list(geometry_from_config(config).layer_types), gemma3.layer_types)

    def test_a_window_without_layer_types_does_not_touch_llama(self) -> None:
        from transformers import LlamaConfig

        config = saved(LlamaConfig(num_hidden_layers=2)) | {"sliding_window": 128}
        self.assertEqual(geometry_from_config(config).layer_types, (FULL_LAYER,) * 2)


class TestRefusals(unittest.TestCase):
    """A wrong shape costs a boot, so what is not understood is named and refused."""

    def refused(self, config: dict[str, Any], *named: str) -> None:
        with self.assertRaises(ValueError) as caught:
            geometry_from_config(config)
        for word in named:
            self.assertIn(word, str(caught.exception))

    def setUp(self) -> None:
        self.written = saved(gemma4_config("E2B"))
        self.older = older_spelling(self.written, "E2B")

    def test_other_model_types(self) -> None:
        from transformers import DeepseekV3Config, Gemma2Config, GPT2Config, MixtralConfig

        for config in (GPT2Config(), MixtralConfig(), DeepseekV3Config(), Gemma2Config()):
            self.refused(saved(config), "model_type", config.model_type)
        self.refused({"hidden_size": 64}, "model_type", "None")
        self.refused({"text_config": 7}, "text_config")

    def test_the_assistant_that_owns_no_cache(self) -> None:
        # gemma-4-E2B-it-assistant: every layer shares, so it cannot serve by itself.
        self.refused(self.older | {"num_kv_shared_layers": 35}, "35 of 35", "shar")

    def test_each_missing_field_is_named(self) -> None:
        for field in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "sliding_window",
            "layer_types",
            "global_head_dim",
            "vocab_size_per_layer_input",
        ):
            with self.subTest(field):
                self.refused({k: v for k, v in self.older.items() if k != field}, field)
        moe = saved(gemma4_config("26B-A4B"))
        for field in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            with self.subTest(field):
                self.refused(moe | {field: None}, field)

    def test_wrong_types(self) -> None:
        for field, value in (
            ("hidden_size", "1536"),
            ("hidden_size", True),
            ("hidden_size", 1536.0),
            ("hidden_size", 0),
            ("num_kv_shared_layers", -1),
            ("use_double_wide_mlp", "yes"),
            ("layer_types", "full_attention"),
            ("use_bidirectional_attention", "all"),
        ):
            with self.subTest(field=field, value=value):
                self.refused(self.older | {field: value}, field)

    def test_layer_types_that_do_not_fit(self) -> None:
        self.refused(self.older | {"layer_types": [FULL_LAYER]}, "layer_types", "1", "35")
        chunked = ["chunked_attention", *self.older["layer_types"][1:]]
        self.refused(self.older | {"layer_types": chunked}, "chunked_attention")

    def test_a_sharing_layer_needs_an_owner_of_its_type(self) -> None:
        # transformers refuses the same arrangement when it builds the model.
        late = [SLIDING_LAYER] * 34 + [FULL_LAYER]
        self.refused(self.older | {"layer_types": late}, "owner")

    def test_per_layer_config_beyond_what_is_understood(self) -> None:
        for change, word in (
            ({"04": {"head_dim": 512, "intermediate_size": 9}}, "intermediate_size"),
            ({"04": {"head_dim": 256}}, "per_layer_config"),
            ({"00": {"head_dim": 512}}, "per_layer_config"),
            ({"99": {"head_dim": 512}}, "99"),
            ({"x": {"head_dim": 512}}, "x"),
            ({"04": 512}, "04"),
        ):
            with self.subTest(word=word, change=change):
                overrides = self.written["per_layer_config"] | change
                self.refused(self.written | {"per_layer_config": overrides}, word)
        self.refused(self.written | {"per_layer_config": []}, "per_layer_config")

    def test_experts_in_a_plain_family(self) -> None:
        from transformers import LlamaConfig

        config = saved(LlamaConfig(num_hidden_layers=2))
        self.refused(config | {"num_local_experts": 8}, "num_local_experts")

    def test_head_counts_that_do_not_divide(self) -> None:
        self.refused(self.older | {"num_key_value_heads": 3}, "8 heads over 3")
        from transformers import LlamaConfig

        config = saved(LlamaConfig(num_hidden_layers=2))
        self.refused(
            config | {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
            "head_dim",
        )


class TestCatalogue(unittest.TestCase):
    def test_geometry_cannot_be_changed(self) -> None:
        geometry = GEMMA4["E2B"].geometry
        with self.assertRaises(dataclasses.FrozenInstanceError):
            geometry.hidden = 1  # type: ignore[misc]
        self.assertFalse(hasattr(geometry, "__dict__"))

    def test_layers_of_each_kind(self) -> None:
        # sliding and full layers, and the owners among them, as published for each size
        expected = {
            "E2B": (28, 7, 12, 3),
            "E4B": (35, 7, 20, 4),
            "12B": (40, 8, 40, 8),
            "26B-A4B": (25, 5, 25, 5),
            "31B": (50, 10, 50, 10),
        }
        for size, counts in expected.items():
            types = GEMMA4[size].geometry.layer_types
            owning = types[: GEMMA4[size].geometry.owners]
            found = (
                types.count(SLIDING_LAYER),
                types.count(FULL_LAYER),
                owning.count(SLIDING_LAYER),
                owning.count(FULL_LAYER),
            )
            self.assertEqual(found, counts, size)

    def test_towers_of_e2b_are_what_transformers_builds(self) -> None:
        import torch
        from transformers import Gemma4AudioConfig, Gemma4VisionConfig
        from transformers.models.gemma4 import modeling_gemma4

        with torch.device("meta"):
            vision = modeling_gemma4.Gemma4VisionModel(Gemma4VisionConfig())
            audio = modeling_gemma4.Gemma4AudioModel(Gemma4AudioConfig())
        model = GEMMA4["E2B"]
        for tower, module in ((model.vision_tower, vision), (model.audio_tower, audio)):
            parameters = sum(weight.numel() for weight in module.parameters())
            self.assertEqual(tower.known("tower"), 2 * parameters)

    def test_slots_and_repositories_are_found(self) -> None:
        self.assertIs(model_for_slot("26b"), GEMMA4["26B-A4B"])
        with self.assertRaisesRegex(ValueError, "'7b'.*2b, 4b, 12b, 26b, 31b"):
            model_for_slot("7b")
        model, checkpoint = checkpoint_for_repo("google/gemma-4-E2B-it-qat-q4_0-unquantized")
        self.assertIs(model, GEMMA4["E2B"])
        self.assertEqual((checkpoint.label, checkpoint.stored), ("q4_0", "bf16"))
        with self.assertRaisesRegex(ValueError, "google/gemma-4-E3B-it"):
            checkpoint_for_repo("google/gemma-4-E3B-it")

    def test_the_26b_has_no_w4a16_and_every_other_size_has(self) -> None:
        exists = {
            size: {c.exists for c in model.checkpoints if c.label == "w4a16"}
            for size, model in GEMMA4.items()
        }
        self.assertEqual(exists.pop("26B-A4B"), {False})
        self.assertEqual(set(map(frozenset, exists.values())), {frozenset({True})})

    def test_checkpoints_are_unique_sourced_and_sized_by_known_encodings(self) -> None:
        every = [c for model in GEMMA4.values() for c in model.checkpoints]
        self.assertEqual(len({c.repo for c in every}), len(every))
        for checkpoint in every:
            self.assertTrue(checkpoint.source and checkpoint.date, checkpoint.repo)
            self.assertIn(checkpoint.stored, WEIGHT_ENCODINGS, checkpoint.repo)
            self.assertRegex(checkpoint.date, r"^20\d\d(-\d\d){0,2}$")


class TestFigures(unittest.TestCase):
    def test_a_value_needs_a_source_and_a_date(self) -> None:
        for source, date in (("", "2026"), ("a page", ""), ("", "")):
            with self.assertRaisesRegex(ValueError, "819 GB/s"):
                Figure(819, "GB/s", source, date)

    def test_unmeasured_is_said_by_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "audio tower is unmeasured"):
            unmeasured_figure("bytes").known("audio tower")

    def test_a_geometry_without_its_window_is_refused(self) -> None:
        shape = GEMMA4["12B"].geometry
        with self.assertRaisesRegex(ValueError, "window"):
            dataclasses.replace(shape, window=None)
        self.assertIsInstance(dataclasses.replace(shape, window=4096), Geometry)


if __name__ == "__main__":
    unittest.main()
