"""The tensors of a Gemma 4's text half by name and shape, and which stored ones they are.

Knows no files, no element types and no values.

Names and shapes: transformers 5.24, modeling_gemma4.py, as its save_pretrained writes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.gemma4.refusal import WeightsRefused

TensorShape = tuple[int, ...]

EMBEDDING_TENSOR = "embed_tokens.weight"
TABLE_TENSOR = "embed_tokens_per_layer.weight"
HEAD_TENSOR = "lm_head.weight"
# Around the text half: of the whole model, of a causal one, of the text model saved by itself.
WRAPPER_PREFIXES = ("model.language_model.", "model.", "")
# What stands beside the text half in a whole model; gemma4_unified has `vision_embedder`.
_TENSOR_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.") + (
    "vision_embedder.",
)


def model_tensors(config: Gemma4Config) -> dict[str, TensorShape]:
    """Every tensor that the forward pass reads, with its shape; matrices are [out, in].

    Names as they are behind the wrapper's prefix: `embed_tokens.weight`, `layers.3.mlp.…`.
    """
    tensors: dict[str, TensorShape] = {
        EMBEDDING_TENSOR: (config.vocabulary, config.hidden),
        "norm.weight": (config.hidden,),
    }
    if config.per_layer:
        packed = len(config.layers) * config.per_layer
        tensors[TABLE_TENSOR] = (config.per_layer_vocabulary, packed)
        tensors["per_layer_model_projection.weight"] = (packed, config.hidden)
        tensors["per_layer_projection_norm.weight"] = (config.per_layer,)
    for layer in config.layers:
        for name, shape in _tensor_layer(config, layer).items():
            tensors[f"layers.{layer.index}.{name}"] = shape
    return tensors


def is_linear_tensor(name: str, shape: TensorShape) -> bool:
    """Whether it is the matrix of what transformers calls a Linear; no table, no experts."""
    return len(shape) == 2 and name not in (EMBEDDING_TENSOR, TABLE_TENSOR, HEAD_TENSOR)


def match_tensors(config: Gemma4Config, stored: Mapping[str, TensorShape]) -> dict[str, str]:
    """{name in the model: name in the file}; a stored head stands under HEAD_TENSOR.

    Towers are passed over, and so are keys and values that a file holds for layers which read
    another layer's (transformers passes over them as well).
    Raises WeightsRefused that names a tensor which is missing, unknown or of another shape.
    """
    wanted = model_tensors(config)
    prefix = _tensor_prefix(stored)
    unread = _tensor_unread(config)
    found: dict[str, str] = {}
    for name, shape in stored.items():
        if _tensor_of_tower(name):
            continue
        bare = name.removeprefix(prefix)
        if name == HEAD_TENSOR:
            expected = wanted[EMBEDDING_TENSOR]
        elif name.startswith(prefix) and bare in wanted:
            expected = wanted[bare]
        elif name.startswith(prefix) and bare in unread:
            continue
        else:
            raise WeightsRefused(f"the tensor {name[:200]!r} is unknown: nothing would read it")
        if shape != expected:
            raise WeightsRefused(
                f"the tensor {name!r} has the shape {list(shape)}, the config asks for"
                f" {list(expected)}"
            )
        found[bare] = name
    missing = [name for name in wanted if name not in found]
    if missing:
        raise WeightsRefused(
            f"{len(missing)} of {len(wanted)} tensors are missing, {prefix + missing[0]!r} first"
        )
    return found


def _tensor_layer(config: Gemma4Config, layer: LayerConfig) -> dict[str, TensorShape]:
    """The tensors of one layer, without its number."""
    hidden, inner = config.hidden, layer.intermediate
    q_width = layer.heads * layer.head_dim
    kv_width = layer.kv_heads * layer.head_dim
    tensors: dict[str, TensorShape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (hidden, q_width),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
    }
    if layer.owner:
        tensors["self_attn.k_proj.weight"] = (kv_width, hidden)
        tensors["self_attn.k_norm.weight"] = (layer.head_dim,)
        if not layer.k_is_v:
            tensors["self_attn.v_proj.weight"] = (kv_width, hidden)
    if config.per_layer:
        tensors["per_layer_input_gate.weight"] = (config.per_layer, hidden)
        tensors["per_layer_projection.weight"] = (hidden, config.per_layer)
        tensors["post_per_layer_input_norm.weight"] = (hidden,)
    if config.experts:
        experts, width = config.experts, config.expert_intermediate
        tensors["router.proj.weight"] = (experts, hidden)
        tensors["router.scale"] = (hidden,)
        tensors["router.per_expert_scale"] = (experts,)
        tensors["experts.gate_up_proj"] = (experts, 2 * width, hidden)
        tensors["experts.down_proj"] = (experts, hidden, width)
        tensors["post_feedforward_layernorm_1.weight"] = (hidden,)
        tensors["pre_feedforward_layernorm_2.weight"] = (hidden,)
        tensors["post_feedforward_layernorm_2.weight"] = (hidden,)
    return tensors


def _tensor_prefix(stored: Mapping[str, TensorShape]) -> str:
    """The one prefix under which the embedding lies."""
    found = [prefix for prefix in WRAPPER_PREFIXES if prefix + EMBEDDING_TENSOR in stored]
    if len(found) != 1:
        names = ", ".join(prefix + EMBEDDING_TENSOR for prefix in WRAPPER_PREFIXES)
        raise WeightsRefused(f"{len(found)} text models are in the weights: one of {names} is read")
    return found[0]


def _tensor_of_tower(name: str) -> bool:
    """Whether it belongs to what sees or hears."""
    return name.removeprefix("model.").startswith(_TENSOR_TOWERS)


def _tensor_unread(config: Gemma4Config) -> frozenset[str]:
    """What a file may hold for layers without keys of their own, though nothing reads it.

    transformers 5.24, Gemma4TextModel: `_keys_to_ignore_on_load_unexpected`.
    """
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return frozenset(
        f"layers.{layer.index}.self_attn.{part}.weight"
        for layer in config.layers
        if not layer.owner
        for part in parts
    )
