"""The shape of a model in a GGUF file, in the words of a config.json.

Knows the two formats' names for the same things, and no arithmetic.
"""

from __future__ import annotations

from forge.parts.boundaries.gguf_file import GgufFile
from forge.parts.knowledge.geometry import FULL_LAYER, SLIDING_LAYER, Geometry
from forge.parts.knowledge.geometry_config import geometry_from_config


def gguf_geometry(file: GgufFile) -> Geometry:
    """The geometry of the model in `file`, which must be a Gemma 4, Llama, Qwen 2 or Qwen 3.

    Source: llama.cpp b11434, conversion/ (what it writes) and src/models/ (what it reads).
    Raises ValueError that says what is missing or not understood.
    """
    config = gguf_config(file)
    return geometry_from_config(config)


def gguf_config(file: GgufFile) -> dict[str, object]:
    """What a config.json would say of the model in `file`. Raises ValueError as gguf_geometry."""
    architecture = file.architecture
    if architecture == "gemma4":
        return _gemma4_config(file)
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"the architecture {architecture[:60]} is not understood")
    common = _common_config(file) | {"model_type": architecture}
    heads = file.values("attention.head_count_kv") or file.values("attention.head_count")
    width = file.values("attention.key_length")
    return common | {
        "num_key_value_heads": _only(heads, "head_count_kv"),
        **({"head_dim": int(width[0])} if width else {}),
        # Source of the fields that a plain decoder may leave out: its own defaults.
        "attention_bias": False,
    }


def _common_config(file: GgufFile) -> dict[str, object]:
    names = {tensor.name for tensor in file.tensors}
    return {
        "hidden_size": _only(file.values("embedding_length"), "embedding_length"),
        "num_hidden_layers": _only(file.values("block_count"), "block_count"),
        "num_attention_heads": _only(file.values("attention.head_count"), "head_count"),
        "intermediate_size": int((file.values("feed_forward_length") or (0,))[0]),
        "vocab_size": file.vocabulary,
        "tie_word_embeddings": "output.weight" not in names,
    }


def _gemma4_config(file: GgufFile) -> dict[str, object]:
    layers = _only(file.values("block_count"), "block_count")
    slides = file.values("attention.sliding_window_pattern")
    if len(slides) != layers:
        raise ValueError("sliding_window_pattern does not list the layers")
    kinds = [SLIDING_LAYER if sliding else FULL_LAYER for sliding in slides]
    heads = file.values("attention.head_count_kv")
    by_layer = heads if len(heads) == layers else heads * layers
    near = [int(by_layer[n]) for n in range(layers) if slides[n]] or [int(by_layer[0])]
    far = [int(by_layer[n]) for n in range(layers) if not slides[n]] or near
    shared = file.largest("attention.shared_kv_layers")
    names = {tensor.name for tensor in file.tensors}
    owners = [n for n in range(layers - shared) if not slides[n]]
    k_eq_v = bool(owners) and f"blk.{owners[0]}.attn_v.weight" not in names
    widths = file.values("feed_forward_length")
    experts = file.largest("expert_count")
    return _common_config(file) | {
        "model_type": "gemma4_text",
        "layer_types": kinds,
        "sliding_window": file.largest("attention.sliding_window"),
        "num_key_value_heads": _only(tuple(near), "head_count_kv of windowed layers"),
        "num_global_key_value_heads": _only(tuple(far), "head_count_kv of full layers"),
        "attention_k_eq_v": k_eq_v,
        "head_dim": file.largest("attention.key_length_swa"),
        "global_head_dim": file.largest("attention.key_length"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": file.largest("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.vocabulary,
        "use_double_wide_mlp": bool(shared) and len(set(widths)) > 1,
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": file.largest("expert_used_count") or None,
        "moe_intermediate_size": file.largest("expert_feed_forward_length") or None,
    }


def _only(values: tuple[int | float | bool, ...], what: str) -> int:
    """The one value that all layers have. Raises ValueError where there is none, or several."""
    if len(set(values)) != 1:
        raise ValueError(f"{what} is {'missing' if not values else 'not the same in all layers'}")
    return int(values[0])
