"""What transformers 5.24 writes is what is read here: configs, names, shapes, every bit.

The models are built on transformers' meta device where only shapes are asked for.
"""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_files import open_weights
from tests.engines.gemma4_files import FULL, SLIDING, moe_config, text_config, write_config

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "sliding_window": 8} | {
    "num_attention_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
}
TABLES = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32}


def setUpModule() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def random_settings(seed: int) -> dict[str, Any]:
    """Settings of a text half that transformers takes, in its own (the legacy) spelling."""
    pick = random.Random(seed)
    layers = pick.randint(2, 9)
    kinds = [pick.choice((SLIDING, SLIDING, FULL)) for _ in range(layers)]
    kinds[-1] = FULL
    if pick.random() < 0.2:
        kinds[-1] = SLIDING  # to be forced
    settings: dict[str, Any] = SIZES | {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_key_value_heads": pick.choice((1, 2, 4)),
        "num_global_key_value_heads": pick.choice((None, 1, 2)),
        "attention_k_eq_v": pick.random() < 0.5,
        "use_double_wide_mlp": pick.random() < 0.5,
        "hidden_size_per_layer_input": pick.choice((0, 4)),
        "vocab_size_per_layer_input": 32,
        "enable_moe_block": pick.random() < 0.3,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "rms_norm_eps": pick.choice((1e-6, 1e-5)),
        "sliding_window": pick.choice((4, 8)),
    }
    forced = [*kinds[:-1], FULL]
    sharing = 0
    for count in range(1, layers):
        if set(forced[:-count]) == set(forced) and pick.random() < 0.5:
            sharing = count
    return settings | {"num_kv_shared_layers": sharing}


class SavedCase(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def assert_as_in(self, config: Any, read: Gemma4Config) -> None:
        """`read` says what transformers' own config and modules say."""
        self.assertEqual(read.hidden, config.hidden_size)
        self.assertEqual(read.vocabulary, config.vocab_size)
        self.assertEqual(read.window, config.sliding_window)
        self.assertEqual(read.positions, config.max_position_embeddings)
        self.assertEqual(read.norm_eps, config.rms_norm_eps)
        self.assertEqual(read.softcap, config.final_logit_softcapping or 0.0)
        ropes = config.rope_parameters
        self.assertEqual(read.sliding_theta, ropes[SLIDING]["rope_theta"])
        self.assertEqual(read.full_theta, ropes[FULL]["rope_theta"])
        self.assertEqual(read.full_rotated, ropes[FULL]["partial_rotary_factor"])
        self.assertEqual(read.per_layer, getattr(config, "hidden_size_per_layer_input", 0))
        moe = getattr(config, "enable_moe_block", False)
        self.assertEqual(read.experts, config.num_experts if moe else 0)
        self.assertEqual(read.experts_used, config.top_k_experts if moe else 0)
        self.assertEqual((read.bos, read.pad), (config.bos_token_id, config.pad_token_id))
        for layer in read.layers:
            kind = config.layer_types[layer.index]
            theirs = config.per_layer_config[layer.index]
            self.assertEqual(layer.sliding, kind == SLIDING)
            self.assertEqual(layer.head_dim, theirs.head_dim)
            self.assertEqual(layer.kv_heads, theirs.num_key_value_heads)
            mode = config.kv_sharing_modes[layer.index]
            self.assertEqual(layer.owner, mode != "reuse")
            source = config.kv_sharing_modes[layer.source]
            if not layer.owner:  # transformers calls the layer whose keys others read "store"
                self.assertEqual(source, "store")
                self.assertEqual(config.layer_types[layer.source], kind)


class Configs(SavedCase):
    def test_random_models_have_the_shapes_that_transformers_builds(self) -> None:
        """60 random architectures, read in both spellings; modules built without memory."""
        for seed in range(60):
            settings = random_settings(seed)
            with self.subTest(settings=settings):
                config = transformers.Gemma4TextConfig(**settings, dtype="float32")
                with torch.device("meta"):
                    model: Any = transformers.Gemma4ForCausalLM(config)
                config.save_pretrained(self.folder)
                read = read_config(self.folder)
                self.assert_as_in(config, read)
                plain = {"model_type": "gemma4_text", "dtype": "float32"} | settings
                self.assertEqual(read_config(write_config(self.folder, plain)), read)
                shapes = {
                    name.removeprefix("model."): tuple(value.shape)
                    for name, value in model.state_dict().items()
                    if name != "lm_head.weight"
                }
                self.assertEqual(model_tensors(read), shapes)

    def test_defaults_of_both_classes(self) -> None:
        for kind in (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig):
            config: Any = kind()
            plain = {"model_type": config.model_type, "dtype": "bfloat16"}
            read = read_config(write_config(self.folder, plain))
            self.assert_as_in(config, read)
            config.dtype = "bfloat16"
            config.save_pretrained(self.folder)
            self.assertEqual(read_config(self.folder), read)

    def test_every_key_that_transformers_writes_is_known(self) -> None:
        """The configs of these tests are what transformers writes, key by key."""
        for stated in (text_config(), moe_config()):
            settings = {
                key: value
                for key, value in stated.items()
                if key not in ("architectures", "model_type", "transformers_version")
            }
            shapes = settings.pop("per_layer_config")
            config = transformers.Gemma4TextConfig(
                **settings, per_layer_config={int(key): shape for key, shape in shapes.items()}
            )
            config.save_pretrained(self.folder)
            written = json.loads((self.folder / "config.json").read_text("utf-8"))
            version = {"transformers_version": transformers.__version__}
            del stated["architectures"]
            self.assertEqual(written, stated | version)


class Weights(SavedCase):
    def model(self, kind: str, dtype: str = "float32") -> Any:
        """A small model of one of the ways in which transformers saves them."""
        torch.manual_seed(8)
        sharing = {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4}
        e2b = SIZES | TABLES | sharing | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        e2b |= {"num_key_value_heads": 1}
        plain = SIZES | sharing | {"num_key_value_heads": 2, "num_global_key_value_heads": 1}
        plain |= {"attention_k_eq_v": True, "pad_token_id": 0}
        sparse = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4}
        sparse |= {"top_k_experts": 2, "moe_intermediate_size": 8}
        text = transformers.Gemma4TextConfig(**e2b)
        unified = transformers.Gemma4UnifiedTextConfig(**plain)
        made: Any
        if kind == "causal":
            made = transformers.Gemma4ForCausalLM(text)
        elif kind == "text":
            made = transformers.Gemma4TextModel(text)
        elif kind == "sparse":
            made = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**plain | sparse))
        elif kind == "unified causal":
            made = transformers.Gemma4UnifiedForCausalLM(unified)
        elif kind == "unified":
            seen = transformers.Gemma4UnifiedVisionConfig(
                mm_embed_dim=16, mm_posemb_size=8, output_proj_dims=16, patch_size=2
            )
            heard = transformers.Gemma4UnifiedAudioConfig()
            made = transformers.Gemma4UnifiedForConditionalGeneration(
                transformers.Gemma4UnifiedConfig(
                    text_config=unified, vision_config=seen, audio_config=heard
                )
            )
        else:
            tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            eye = tower | {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
            made = transformers.Gemma4ForConditionalGeneration(
                transformers.Gemma4Config(
                    text_config=text,
                    vision_config=transformers.Gemma4VisionConfig(
                        **eye, position_embedding_size=16
                    ),
                    audio_config=transformers.Gemma4AudioConfig(**tower, output_proj_dims=16),
                )
            )
        return made.to(getattr(torch, dtype)).eval()

    def assert_opens(self, model: Any) -> None:
        """The folder's tensors are the model's text half, bit for bit."""
        read = read_config(self.folder)
        opened = open_weights(self.folder, read)
        self.assertEqual(set(opened), set(model_tensors(read)))
        state = model.state_dict()
        prefixes = ("model.language_model.", "model.", "")
        prefix = next(name for name in prefixes if name + "embed_tokens.weight" in state)
        for name, view in opened.items():
            theirs = state[prefix + name].contiguous()
            self.assertEqual(tuple(theirs.shape), view.shape)
            raw = theirs.reshape(-1).view(torch.uint8).numpy()
            np.testing.assert_array_equal(view.reshape(-1).view(np.uint8), raw, name)

    def test_each_kind_of_model(self) -> None:
        for kind in ("causal", "text", "sparse", "unified causal", "unified", "whole"):
            for dtype in ("float32", "bfloat16"):
                with self.subTest(kind=kind, dtype=dtype):
                    model = self.model(kind, dtype)
                    model.save_pretrained(self.folder)
                    self.assertEqual(read_config(self.folder).stored_dtype, dtype)
                    self.assert_opens(model)

    def test_sharded(self) -> None:
        model = self.model("whole", "bfloat16")
        model.save_pretrained(self.folder, max_shard_size="20KB")
        self.assertTrue((self.folder / "model.safetensors.index.json").exists())
        self.assertGreater(len(list(self.folder.glob("*.safetensors"))), 2)
        self.assert_opens(model)

    def test_ends_that_transformers_writes(self) -> None:
        model = self.model("causal")
        model.generation_config.eos_token_id = [1, 17]
        model.save_pretrained(self.folder)
        self.assertEqual(read_config(self.folder).eos, (1, 17))
