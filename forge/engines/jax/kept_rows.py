"""Two forms in which keys and values are kept: plain numbers, and int8 with a scale for each row.

Knows neither attention nor where in a cache a row lies. A row is one token's key or value in one
head; its scale is its largest magnitude over 127, so that no number of it is off by more than half
a scale. Scales are f32: 4 bytes beside 256 or 512.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

_KEPT_LARGEST = 127  # the same on both sides of zero


class Int8Rows(NamedTuple):
    """numbers [rows, kv_heads, length, head_dim] int8, scales [rows, kv_heads, length] f32."""

    numbers: jax.Array
    scales: jax.Array


KeptRows: TypeAlias = jax.Array | Int8Rows


def kept_rows_like(cache: KeptRows, new: jax.Array) -> KeptRows:
    """`new` [batch, kv_heads, tokens, head_dim] f32 in the form that `cache` has."""
    if isinstance(cache, Int8Rows):
        return int8_rows(new)
    return new.astype(cache.dtype)


def int8_rows(rows: jax.Array) -> Int8Rows:
    """Rows [..., head_dim] f32 as int8, each with its own scale."""
    scales = jnp.max(jnp.abs(rows), axis=-1) / _KEPT_LARGEST
    divisors = jnp.where(scales > 0, scales, 1)[..., None]
    return Int8Rows(jnp.round(rows / divisors).astype(jnp.int8), scales)


def kept_length(cache: KeptRows) -> int:
    """For how many tokens a cache has room."""
    leaf: Any = jax.tree.leaves(cache)[0]
    return int(leaf.shape[2])


def numbers_and_scales(rows: KeptRows) -> tuple[jax.Array, jax.Array | None]:
    """What is kept, and what [..., tokens] it has to be multiplied with; None where it is plain."""
    return rows if isinstance(rows, Int8Rows) else (rows, None)
