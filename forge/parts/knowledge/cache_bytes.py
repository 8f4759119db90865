"""How many bytes the keys and values of a model's sequences take.

Knows shapes and layouts only: no weights, no chip, no engine's pages.
"""

from __future__ import annotations

import math
from typing import Literal

from forge.parts.knowledge.geometry import Geometry

# "uniform": every owning layer keeps the whole context (vLLM on TPU, transformers' plain cache).
# "ring": sliding layers keep only their window (the JAX engine, llama.cpp's SWA cache).
KvLayout = Literal["uniform", "ring"]


def kv_bytes_per_token(geometry: Geometry, dtype_bytes: float, layout: KvLayout) -> float:
    """Bytes by which one more token grows one sequence's cache, once past the window.

    2 * kv heads * head width * dtype_bytes, over the owning layers; sharing layers own nothing.
    Layers whose values come from their keys still cache both: keys are rotated, values normed.
    "ring" counts the full-attention owners only; below the window a ring grows like "uniform".
    Source: transformers 5.24 modeling_gemma4; E2B 18 KiB, agreeing with vLLM's 8,713 blocks of
    128 tokens on a v6e (dev.to article, 2026-07-25, which itself says 15 KiB).
    Raises ValueError for an unknown layout.
    """
    if layout not in ("uniform", "ring"):
        raise ValueError(f"KV layout {layout!r} is not known; known: uniform, ring")
    owners = range(geometry.owners)
    return sum(
        2 * geometry.kv_width(layer) * dtype_bytes
        for layer in owners
        if layout == "uniform" or geometry.is_full(layer)
    )


def kv_ring_bytes(geometry: Geometry, dtype_bytes: float) -> int:
    """Bytes that one sequence's full sliding windows take, the fixed part of the ring layout."""
    sliding = sum(
        2 * geometry.kv_width(layer)
        for layer in range(geometry.owners)
        if not geometry.is_full(layer)
    )
    return math.ceil(sliding * dtype_bytes * (geometry.window or 0))


def kv_bytes(
    geometry: Geometry, context: int, slots: int, dtype_bytes: float, layout: KvLayout
) -> int:
    """Bytes of cache for `slots` sequences of `context` tokens each.

    uniform: slots * context * bytes per token.
    ring: slots * (min(context, window) * sliding owners + context * full owners).
    Raises ValueError for a negative context, no slots or an unknown layout.
    """
    if context < 0 or slots < 1:
        raise ValueError(f"context {context} and slots {slots} must be >= 0 and >= 1")
    grown = context * kv_bytes_per_token(geometry, dtype_bytes, layout)
    if layout == "ring" and geometry.window:
        filled = min(context, geometry.window) / geometry.window
        grown += filled * kv_ring_bytes(geometry, dtype_bytes)
    return math.ceil(slots * grown)
