"""Which part of a Gemma 4 each of several devices holds, when they serve one copy of it together.

Knows no devices and no array library. As in Megatron-LM (Shoeybi et al. 2019, "Megatron-LM"): query
heads and the MLP's inner rows are split, so that a layer's devices have to add up their answers
twice, after attention and after the MLP. The vocabulary is split; of the experts each device has
some. What is small is whole everywhere: norms, the router, the per-layer gates and projections, and
key heads that do not come out even. E2B has one key head.
"""

from __future__ import annotations

from dataclasses import replace

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.tensor_names import EMBEDDING_TENSOR, TABLE_TENSOR

_PARTITION_HEADS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
# By the end of a tensor's name: the axis that is split. Matrices are [out, in], experts' [e, …].
_PARTITION_AXES = {
    "self_attn.q_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
    "experts.gate_up_proj": 0,
    "experts.down_proj": 0,
}


def refuse_uneven(config: Gemma4Config, ways: int) -> None:
    """Raises ModelRefused that names what of the model does not come out even in `ways` parts."""
    sizes = {"entries of the vocabulary": config.vocabulary}
    if config.per_layer:
        sizes["entries of the per-layer table"] = config.per_layer_vocabulary
    if config.experts:
        sizes["experts"] = config.experts
    for layer in config.layers:
        sizes[f"query heads of layer {layer.index}"] = layer.heads
        sizes[f"MLP rows of layer {layer.index}"] = layer.intermediate
    for what, size in sizes.items():
        if size % ways:
            raise ModelRefused(
                f"tensor parallel: the {size} {what} do not divide among {ways} devices"
            )


def keys_are_split(layer: LayerConfig, ways: int) -> bool:
    """Whether each device has its own key heads of that layer, and not all of them."""
    return layer.kv_heads % ways == 0


def split_axis(config: Gemma4Config, name: str, ways: int) -> int | None:
    """The axis along which the tensor `name` is split; None where it is whole everywhere."""
    if name in (EMBEDDING_TENSOR, TABLE_TENSOR):
        return 0
    if not name.startswith("layers."):
        return None
    _, index, rest = name.split(".", 2)
    if rest in _PARTITION_HEADS:
        return 0 if keys_are_split(config.layers[int(index)], ways) else None
    return _PARTITION_AXES.get(rest)


def device_part(config: Gemma4Config, ways: int) -> Gemma4Config:
    """What one of `ways` devices holds, as a model of that size: for reckoning, not for running.

    Its experts are told as narrower ones, for all devices know all experts' router. Logits, and
    what sampling remembers, have the whole vocabulary on every device.
    """
    layers = tuple(
        replace(
            layer,
            heads=layer.heads // ways,
            kv_heads=layer.kv_heads // ways if keys_are_split(layer, ways) else layer.kv_heads,
            intermediate=layer.intermediate // ways,
        )
        for layer in config.layers
    )
    return replace(
        config,
        layers=layers,
        vocabulary=config.vocabulary // ways,
        per_layer_vocabulary=config.per_layer_vocabulary // ways,
        expert_intermediate=config.expert_intermediate // ways,
    )
