"""What the engine keeps of its conversations between dispatches: keys, values and token counts.

Knows no weights and no sampling. Only layers that own keys and values have a cache; a sliding
layer's is a ring as long as the window, a full layer's as long as the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.jax.attention import KeyView, whole_blocks
from forge.engines.jax.kept_rows import Int8Rows, KeptRows, kept_length


class Caches(NamedTuple):
    """Keys and values of each owner layer, by its index: [rows, kv_heads, length, head_dim]."""

    keys: dict[int, KeptRows]
    values: dict[int, KeptRows]


class EngineState(NamedTuple):
    """All that lives on the device beside the weights; every compiled step takes and gives it.

    seen [rows, vocabulary] bool: tokens of each conversation's prompt. counts [rows, vocabulary]
    int32: how often each is in its answer.
    """

    caches: Caches
    seen: jax.Array
    counts: jax.Array


def stand_in(shape: Sequence[int], dtype: Any) -> Any:
    """An array's shape and dtype, in the place of an array where something is compiled for it."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]


def cache_length(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Tokens that an owner's cache holds: the window or the context, in whole blocks of keys."""
    return whole_blocks(min(config.window, context) if layer.sliding else context)


def state_shapes(config: Gemma4Config, slots: int, context: int, dtype: jnp.dtype) -> EngineState:
    """The engine's state as shapes: what is compiled for, and what `empty_state` makes.

    `dtype` is that of keys and values; int8 ones have their scales beside them.
    """

    def owned(layer: LayerConfig) -> Any:
        shape = (slots, layer.kv_heads, cache_length(config, layer, context), layer.head_dim)
        numbers = stand_in(shape, dtype)
        if dtype == jnp.int8:
            return Int8Rows(numbers, stand_in(shape[:3], jnp.float32))
        return numbers

    owners = [layer for layer in config.layers if layer.owner]
    marks = (slots, config.vocabulary)
    return EngineState(
        Caches({o.index: owned(o) for o in owners}, {o.index: owned(o) for o in owners}),
        stand_in(marks, jnp.bool_),
        stand_in(marks, jnp.int32),
    )


def empty_state(shapes: EngineState) -> EngineState:
    """Zeros of these shapes on the default device."""
    made: EngineState = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return made


def kv_bytes(shapes: EngineState) -> int:
    """Bytes of all keys and values and their scales, of all slots."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.caches))


def held_positions(length: int, held: jax.Array) -> jax.Array:
    """Position of what each entry of a cache of `length` holds; negative where nothing yet.

    Of each conversation `held` [batch] int32 tokens were taken: an entry has the latest of them
    whose position is its own number modulo the length. Result [batch, length]. A full layer's
    cache is as long as the context, and so no entry is ever overwritten.
    """
    last = held[:, None] - 1
    return last - (last - jnp.arange(length, dtype=jnp.int32)) % length


def cached_view(
    keys: KeptRows, values: KeptRows, first: jax.Array | int, held: jax.Array
) -> KeyView:
    """What caches show that hold `held` [batch] tokens of the conversations from row `first`."""
    length = kept_length(keys)
    used = jnp.minimum(jnp.max(held), length)
    return KeyView(keys, values, first, held_positions(length, held), used)


def widened_view(ring: KeyView, keys: KeptRows, values: KeptRows, places: jax.Array) -> KeyView:
    """What a ring showed, and beside it new tokens at `places` [batch, tokens].

    keys, values [batch, kv_heads, tokens, head_dim] of the new tokens. A copy of these rows.
    """
    batch = places.shape[0]
    width = kept_length(ring.keys) + kept_length(keys)
    spare = whole_blocks(width) - width

    def widen(cache: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(cache, ring.first, batch)
        wide = jnp.concatenate([old, new], axis=2)
        return jnp.pad(wide, ((0, 0), (0, 0), (0, spare), (0, 0))[: wide.ndim])

    positions = jnp.concatenate([ring.positions, places], axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1)
    wide_keys, wide_values = (
        jax.tree.map(widen, kept, new) for kept, new in ((ring.keys, keys), (ring.values, values))
    )
    return KeyView(wide_keys, wide_values, 0, positions, width)


def closed_ring(
    cache: KeptRows, wide: KeptRows, first: jax.Array | int, before: jax.Array, after: jax.Array
) -> KeptRows:
    """The cache of a ring with what it holds after new tokens, picked from the `wide` rows.

    `wide` is of `widened_view`; the conversations had `before` [batch] tokens and have `after`.
    All is read from `wide`, for a cache that is read while it is written is copied whole by XLA.
    """
    length = kept_length(cache)
    places = held_positions(length, after)
    fresh = places - before[:, None]
    entries = jnp.where(fresh >= 0, length + fresh, jnp.arange(length, dtype=jnp.int32))

    def close(cache: jax.Array, wide: jax.Array) -> jax.Array:
        picked = entries[:, None, :, None] if wide.ndim == 4 else entries[:, None]
        rows = jnp.take_along_axis(wide, picked, axis=2)
        return lax.dynamic_update_slice_in_dim(cache, rows, first, 0)

    closed: KeptRows = jax.tree.map(close, cache, wide)
    return closed


def written(
    cache: KeptRows, new: KeptRows, first: jax.Array | int, positions: jax.Array, real: jax.Array
) -> KeptRows:
    """The cache with `new` [batch, kv_heads, tokens, head_dim] in rows first..first+batch.

    positions, real [batch, tokens]: what is not real is not written. No two of a conversation's
    tokens may fall on one entry.
    """
    batch, length = positions.shape[0], kept_length(cache)
    entries = jnp.where(real, positions % length, length)  # beyond the end: dropped
    rows = first + jnp.arange(batch, dtype=jnp.int32)[:, None]

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, entries].set(jnp.swapaxes(new, 1, 2), mode="drop")

    whole: KeptRows = jax.tree.map(write, cache, new)
    return whole


def moved_row(state: EngineState, source: jax.Array, target: jax.Array) -> EngineState:
    """The state with row `target` overwritten by row `source`, in every array."""

    def move(array: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(array, source, 1)
        return lax.dynamic_update_slice_in_dim(array, row, target, 0)

    moved: EngineState = jax.tree.map(move, state)
    return moved
