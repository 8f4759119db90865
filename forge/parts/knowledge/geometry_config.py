"""Reads the shape of a decoder from a checkpoint's config.json.

Knows nothing about bytes, chips or which checkpoints exist.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.parts.knowledge.geometry import FULL_LAYER, SLIDING_LAYER, Geometry

# Model types whose shapes were checked against transformers 5.24. Others are refused: a wrong
# shape gives a wrong memory plan, and that costs a boot.
GEMMA4_MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
PLAIN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text")


def geometry_from_config(config: Mapping[str, object]) -> Geometry:
    """The geometry that a checkpoint's config.json describes.

    Takes Gemma 4 configs bare or wrapped in `text_config`, with `global_head_dim` and
    `num_global_key_value_heads` (what transformers reads) or with `per_layer_config` (what it
    writes), and the plain decoders of PLAIN_MODEL_TYPES. Fields that only training, sampling or
    the towers use are ignored, quantisation too: that is the encoding, not the shape.
    Raises ValueError that names the field which is missing or not understood.
    """
    text = _config_text_half(config)
    model_type = text.get("model_type", config.get("model_type"))
    if model_type in GEMMA4_MODEL_TYPES:
        return _gemma4_geometry(text, config)
    if model_type in PLAIN_MODEL_TYPES:
        return _plain_geometry(text, config, str(model_type))
    known = ", ".join(GEMMA4_MODEL_TYPES + PLAIN_MODEL_TYPES)
    raise ValueError(f"model_type {model_type!r} is not understood; known: {known}")


def _gemma4_geometry(text: Mapping[str, object], config: Mapping[str, object]) -> Geometry:
    """transformers 5.24, Gemma4TextConfig and Gemma4UnifiedTextConfig."""
    if text.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention 'all' is not understood")
    layer_types = _config_layer_types(text, _config_layers(text))
    # transformers forces the last layer to full attention, whatever the file says.
    layer_types = (*layer_types[:-1], FULL_LAYER)
    k_eq_v = _config_flag(text, "attention_k_eq_v")
    kv_heads = _config_int(text, "num_key_value_heads")
    head_dim = _config_int(text, "head_dim")
    global_head_dim, global_kv_heads = _gemma4_full_layers(
        text, layer_types, head_dim, kv_heads, k_eq_v
    )
    ple_dim = _config_int(text, "hidden_size_per_layer_input", 0)
    moe = _config_flag(text, "enable_moe_block")
    bias = _config_flag(text, "attention_bias")
    return Geometry(
        layer_types=layer_types,
        hidden=_config_int(text, "hidden_size"),
        intermediate=_config_int(text, "intermediate_size"),
        heads=_config_int(text, "num_attention_heads"),
        kv_heads=kv_heads,
        global_kv_heads=global_kv_heads,
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        vocab=_config_int(text, "vocab_size"),
        window=_config_int(text, "sliding_window") if SLIDING_LAYER in layer_types else None,
        kv_shared_layers=_config_int(text, "num_kv_shared_layers", 0),
        k_eq_v=k_eq_v,
        ple_dim=ple_dim,
        ple_vocab=_config_int(text, "vocab_size_per_layer_input") if ple_dim else 0,
        double_wide_mlp=_config_flag(text, "use_double_wide_mlp"),
        experts=_config_int(text, "num_experts") if moe else 0,
        top_k=_config_int(text, "top_k_experts") if moe else 0,
        expert_width=_config_int(text, "moe_intermediate_size") if moe else 0,
        tied=_config_tied(text, config, True),
        qkv_bias=bias,
        out_bias=bias,
    )


def _gemma4_full_layers(
    text: Mapping[str, object],
    layer_types: tuple[str, ...],
    head_dim: int,
    kv_heads: int,
    k_eq_v: bool,
) -> tuple[int, int]:
    """Head width and kv heads of the full layers, from whichever spelling the file has."""
    overrides = text.get("per_layer_config")
    if overrides is None:
        width = _config_int(text, "global_head_dim")
        # transformers honours the count only where keys double as values.
        heads = _config_int(text, "num_global_key_value_heads", kv_heads) if k_eq_v else kv_heads
        return width, heads
    if not isinstance(overrides, Mapping):
        raise ValueError("per_layer_config is not understood: not an object")
    shapes = {index: (head_dim, kv_heads) for index in range(len(layer_types))}
    for key, override in overrides.items():
        index = int(key) if str(key).isdigit() else -1
        if index not in shapes or not isinstance(override, Mapping):
            raise ValueError(f"per_layer_config[{key!r}] is not understood")
        for setting in override:
            if setting not in ("head_dim", "num_key_value_heads"):
                raise ValueError(f"per_layer_config[{key!r}] sets {setting!r}: not understood")
        shapes[index] = (
            _config_int(override, "head_dim", head_dim),
            _config_int(override, "num_key_value_heads", kv_heads),
        )
    full = {shapes[i] for i, kind in enumerate(layer_types) if kind == FULL_LAYER}
    sliding = {shapes[i] for i, kind in enumerate(layer_types) if kind == SLIDING_LAYER}
    if len(full) != 1 or sliding - {(head_dim, kv_heads)}:
        raise ValueError("per_layer_config gives layers of one type different heads")
    return full.pop()


def _plain_geometry(
    text: Mapping[str, object], config: Mapping[str, object], model_type: str
) -> Geometry:
    """transformers 5.24: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 text configs."""
    for key in ("num_local_experts", "num_experts"):
        if text.get(key):
            raise ValueError(f"{key} in a {model_type} config is not understood")
    gemma = model_type.startswith("gemma3")
    hidden = _config_int(text, "hidden_size")
    heads = _config_int(text, "num_attention_heads")
    kv_heads = _config_int(text, "num_key_value_heads", heads)
    if text.get("head_dim") is None and hidden % heads:
        raise ValueError(f"head_dim is missing, and hidden_size {hidden} / {heads} is no integer")
    head_dim = _config_int(text, "head_dim", hidden // heads)
    layer_types = _plain_layer_types(text, model_type)
    bias = _config_flag(text, "attention_bias")
    return Geometry(
        layer_types=layer_types,
        hidden=hidden,
        intermediate=_config_int(text, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        global_kv_heads=kv_heads,
        head_dim=head_dim,
        global_head_dim=head_dim,
        vocab=_config_int(text, "vocab_size"),
        window=_config_int(text, "sliding_window") if SLIDING_LAYER in layer_types else None,
        tied=_config_tied(text, config, gemma),
        block_norms=4 if gemma else 2,
        head_norms=gemma or model_type == "qwen3",
        qkv_bias=bias or model_type == "qwen2",
        out_bias=bias,
        mlp_bias=_config_flag(text, "mlp_bias"),
    )


def _plain_layer_types(text: Mapping[str, object], model_type: str) -> tuple[str, ...]:
    """The types as written, or as transformers would work them out for that family."""
    layers = _config_layers(text)
    if text.get("layer_types") is not None:
        return _config_layer_types(text, layers)
    if model_type.startswith("gemma3"):
        every = _config_int(text, "_sliding_window_pattern", 0) or _config_int(
            text, "sliding_window_pattern"
        )
        return tuple(SLIDING_LAYER if (i + 1) % every else FULL_LAYER for i in range(layers))
    if text.get("sliding_window") is None or model_type == "llama":
        return (FULL_LAYER,) * layers
    if model_type == "mistral":
        return (SLIDING_LAYER,) * layers
    if not _config_flag(text, "use_sliding_window"):
        return (FULL_LAYER,) * layers
    first = _config_int(text, "max_window_layers")
    return tuple(FULL_LAYER if i < first else SLIDING_LAYER for i in range(layers))


def _config_text_half(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise ValueError("text_config is not understood: not an object")
    return text


def _config_layer_types(text: Mapping[str, object], layers: int) -> tuple[str, ...]:
    listed = text.get("layer_types")
    if not isinstance(listed, list | tuple):
        raise ValueError("layer_types is missing")
    if len(listed) != layers:
        raise ValueError(f"layer_types has {len(listed)} entries for {layers} layers")
    return tuple(str(kind) for kind in listed)


def _config_int(text: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = text.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} {value!r} is not understood: not a count")
    if value == 0 and default != 0:
        raise ValueError(f"{key} 0 is not understood")
    return value


def _config_layers(text: Mapping[str, object]) -> int:
    layers = _config_int(text, "num_hidden_layers")
    if layers > 1000:  # a list is made of them: a damaged config must not cost gigabytes
        raise ValueError(f"num_hidden_layers {layers} is beyond any real model")
    return layers


def _config_flag(text: Mapping[str, object], key: str) -> bool:
    value = text.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} {value!r} is not understood: not true or false")
    return bool(value)


def _config_tied(text: Mapping[str, object], config: Mapping[str, object], default: bool) -> bool:
    """The text half decides; a wrapped file may state it outside only."""
    for half in (text, config):
        if half.get("tie_word_embeddings") is not None:
            return _config_flag(half, "tie_word_embeddings")
    return default
