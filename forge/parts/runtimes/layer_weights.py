"""Projections that some layers of a checkpoint have and others lack though they should have them.

For engines that serve such a checkpoint with whatever lies in memory. Reads names, no tensors.
"""

from __future__ import annotations

import re

from forge.parts.boundaries.checkpoint import Checkpoint
from forge.parts.knowledge.geometry import Geometry

_LAYER_PROJECTION = re.compile(
    r"(?P<prefix>(?:model\.|language_model\.)*layers\.)(?P<layer>\d+)\.(?P<name>\S+_proj\.weight)"
)


def absent_projections(checkpoint: Checkpoint) -> list[str]:
    """The names of the projections that are missing, in the order of the layers.

    What one layer has, all must have, but for keys and values: sharing layers own none, and full
    layers may take their values from their keys (transformers 5.24, modeling_gemma4). Towers apart.
    Empty where the shape is not understood.
    """
    geometry = checkpoint.geometry
    found: dict[int, set[str]] = {}
    prefix = ""
    for tensor in checkpoint.tensors:
        match = _LAYER_PROJECTION.fullmatch(tensor.name)
        if match is not None:
            prefix = match["prefix"]
            found.setdefault(int(match["layer"]), set()).add(match["name"])
    if geometry is None or not found:
        return []
    everything = sorted(set().union(*found.values()))
    return [
        f"{prefix}{layer}.{name}"
        for layer in range(geometry.layers)
        for name in everything
        if name not in found.get(layer, set()) and not _does_without(geometry, layer, name)
    ]


def _does_without(geometry: Geometry, layer: int, name: str) -> bool:
    """Whether that layer needs no such projection."""
    if name == "self_attn.k_proj.weight":
        return layer >= geometry.owners
    if name == "self_attn.v_proj.weight":
        return layer >= geometry.owners or (geometry.k_eq_v and geometry.is_full(layer))
    return False
