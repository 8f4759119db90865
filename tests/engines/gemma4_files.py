"""Small Gemma 4 folders made without transformers: config.json as a dict, weights as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.tensor_names import model_tensors

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
ELEMENTS: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
}


def text_config(**changes: Any) -> dict[str, Any]:
    """E2B's features at a hundredth of its size, as transformers 5.24 writes them."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "max_position_embeddings": 1024,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 4,
        "num_experts": None,
        "num_hidden_layers": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "pad_token_id": 0,
        "per_layer_config": {"2": {"head_dim": 64}, "4": {"head_dim": 64}, "7": {"head_dim": 64}},
        "rms_norm_eps": 1e-06,
        "rope_parameters": ROPE,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "transformers_version": "5.24.0",
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": True,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
    } | changes


def moe_config(**changes: Any) -> dict[str, Any]:
    """The sparse one: experts, values from keys in full layers, no tables, nothing shared."""
    shapes = {str(layer): {"head_dim": 64, "num_key_value_heads": 1} for layer in (2, 4, 7)}
    return (
        text_config(
            attention_k_eq_v=True,
            enable_moe_block=True,
            hidden_size_per_layer_input=0,
            moe_intermediate_size=32,
            num_experts=8,
            num_key_value_heads=2,
            num_kv_shared_layers=0,
            per_layer_config=shapes,
            top_k_experts=2,
            use_double_wide_mlp=False,
        )
        | changes
    )


def smaller(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a few kilobytes of weights, for tests that write thousands of them."""
    shapes = {layer: shape | {"head_dim": 8} for layer, shape in config["per_layer_config"].items()}
    return dict(config) | {
        "head_dim": 4,
        "hidden_size": 8,
        "hidden_size_per_layer_input": 2 if config["hidden_size_per_layer_input"] else 0,
        "intermediate_size": 6,
        "per_layer_config": shapes,
        "vocab_size": 16,
        "vocab_size_per_layer_input": 16,
    }


def legacy(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same with `global_head_dim`, as transformers reads and the hub's releases spell it."""
    old = {key: value for key, value in config.items() if key != "per_layer_config"}
    first = next(iter(config["per_layer_config"].values()))
    old["global_head_dim"] = first["head_dim"]
    old["num_global_key_value_heads"] = first.get("num_key_value_heads")
    return old | changes


def wrapped(text: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The whole model's config around a text half."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {"hidden_size": 16, "model_type": "gemma4_audio"},
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": text["dtype"],
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": {key: text[key] for key in text if key != "architectures"},
        "tie_word_embeddings": True,
        "transformers_version": "5.24.0",
        "video_token_id": 258884,
        "vision_config": {"hidden_size": 16, "model_type": "gemma4_vision"},
    } | changes


def write_config(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> Path:
    """Write config.json (and generation_config.json) into `folder`, made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        text = json.dumps(generation)
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def random_tensors(
    config: Gemma4Config, prefix: str = "model.", element: str = "F32"
) -> dict[str, Any]:
    """Random values for every tensor of `config`, under stored names."""
    generator = np.random.default_rng(8)
    return {
        prefix + name: generator.standard_normal(shape, np.float32).astype(ELEMENTS[element])
        for name, shape in model_tensors(config).items()
    }


def safetensors_bytes(tensors: Mapping[str, Any]) -> bytes:
    """A file of the format that holds these arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    kinds = {np.dtype(kind): name for name, kind in ELEMENTS.items()}
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    return with_header(header, body)


def with_header(header: Mapping[str, Any] | bytes, body: bytes) -> bytes:
    """A file with any header before `body`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def model_folder(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    prefix: str = "model.",
    element: str = "F32",
    more: Mapping[str, Any] | None = None,
) -> tuple[Path, Gemma4Config]:
    """A whole folder with one weights file; `more` are further tensors by stored name."""
    write_config(folder, text_config() if config is None else config)
    read = read_config(folder)
    tensors = random_tensors(read, prefix, element) | dict(more or {})
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder, read
