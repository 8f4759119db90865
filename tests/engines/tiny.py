"""Tiny random Gemma 4 checkpoints of each size's shape, and what transformers says to token ids.

E2B and E4B shapes have per-layer tables and shared keys, one and two key heads, double-wide and
plain MLPs; the 12B's takes values from keys in full layers; the 26B-A4B's has experts beside that.
No tokenizer: prompts are numbers. Few layers, for compiling takes most of the tests' time. Weights
are far from their start values, so that each rule counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny_gemma4

SHAPES = ("e2b", "e4b", "12b", "moe")
VOCABULARY = 512
WINDOW = 8
_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "float32",
}
_TABLES: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_VALUES_FROM_KEYS: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    # Narrow heads, for scores are not scaled: twice as wide, rounding is amplified ten times here.
    "head_dim": 16,
    "global_head_dim": 32,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "e2b": _TABLES
    | {
        "num_hidden_layers": 5,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
    },
    "e4b": _TABLES
    | {
        "num_hidden_layers": 6,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 2,
    },
    "12b": _VALUES_FROM_KEYS,
    "moe": _VALUES_FROM_KEYS
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}


def make_checkpoint(
    folder: Path, shape: str, *, wrapped: bool = False, legacy: bool = False, **changes: Any
) -> Path:
    """Write a checkpoint of `shape` into `folder` and return it; the same call, the same bytes.

    wrapped: as Gemma4ForConditionalGeneration without towers, as published. legacy: the sizes of
    full layers as global_head_dim and num_global_key_value_heads, as published, where transformers
    5.24 writes per_layer_config. changes: other fields of the text config.
    """
    import torch
    from transformers import (
        Gemma4Config,
        Gemma4ForCausalLM,
        Gemma4ForConditionalGeneration,
        Gemma4TextConfig,
    )

    fields = _COMMON | _SHAPES[shape] | changes
    torch.manual_seed(8)
    config = Gemma4TextConfig(**fields)
    model: Any = Gemma4ForCausalLM(config).eval()
    tiny_gemma4._shaken(model, 9)
    if wrapped:
        outer = Gemma4Config(
            text_config=config, vision_config=None, audio_config=None, tie_word_embeddings=True
        )
        whole: Any = Gemma4ForConditionalGeneration(outer).eval()
        whole.model.language_model.load_state_dict(model.model.state_dict(), strict=True)
        whole.tie_weights()
        model = whole
    model.save_pretrained(folder)
    if legacy:
        path = folder / "config.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        text = told.get("text_config", told)
        del text["per_layer_config"]
        for name in ("global_head_dim", "num_global_key_value_heads"):
            text[name] = fields.get(name)
        path.write_text(json.dumps(told), encoding="utf-8")
    return folder


class Reference:
    """transformers' model of a checkpoint on the CPU, in f32 or another of torch's dtypes."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = loaded.eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits [tokens, vocabulary] at every position of one prompt."""
        import torch

        with torch.no_grad():
            told = self._model(input_ids=torch.tensor([list(ids)])).logits[0]
        values: np.ndarray = told.float().numpy()
        return values


def some_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids, none of them padding; another seed, another prompt."""
    generator = np.random.default_rng(1000 + seed)
    return [int(i) for i in generator.integers(3, VOCABULARY, size=length)]
