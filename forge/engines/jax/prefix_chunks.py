"""Whole chunks of a prompt's keys and values, taken out of a row of the caches and put into one.

Knows no tokens' meaning and no budget. A chunk is kept as the tokens that it added: a full layer's
all of them, a ring's as many as it still holds. So a ring as it was after any chunk is what that
chunk and those before it put into it, to the bit, and no ring is ever kept whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.jax.cache import Caches, EngineState, stand_in


def _prefix_entries(cache: jax.Array, chunk: int, end: jax.Array) -> jax.Array:
    """Where a cache holds the chunk that ends before position `end`, or what is left of it."""
    length = cache.shape[2]
    count = min(chunk, length)
    return (end - count + jnp.arange(count, dtype=jnp.int32)) % length


def chunk_taken_out(chunk: int, state: EngineState, row: jax.Array, end: jax.Array) -> Caches:
    """The last `chunk` tokens of the `end` that row holds, each array [tokens, kv_heads, …].

    Only right after they were taken: later ones overwrite what a ring holds of them.
    """

    def taken_out(cache: jax.Array) -> jax.Array:
        return cache[row, :, _prefix_entries(cache, chunk, end)]

    kept: Caches = jax.tree.map(taken_out, state.caches)
    return kept


def chunk_put_back(
    state: EngineState, row: jax.Array, ids: jax.Array, end: jax.Array, kept: Caches
) -> EngineState:
    """The state with a kept chunk in `row`, and its tokens, ids [chunk], among those seen there.

    The first chunk of a conversation forgets what the row had seen, as reading it would.
    """
    chunk = ids.shape[0]

    def put_back(cache: jax.Array, piece: jax.Array) -> jax.Array:
        return cache.at[row, :, _prefix_entries(cache, chunk, end)].set(piece)

    caches: Caches = jax.tree.map(put_back, state.caches, kept)
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1) & (end > chunk)
    seen = seen.at[0, ids].set(True)
    return EngineState(
        caches, lax.dynamic_update_slice_in_dim(state.seen, seen, row, 0), state.counts
    )


def kept_chunk_shapes(state: EngineState, chunk: int) -> Caches:
    """What `chunk_taken_out` gives for a state of these shapes, as shapes."""
    number = stand_in((), jnp.int32)
    shapes: Any = jax.eval_shape(partial(chunk_taken_out, chunk), state, number, number)
    kept: Caches = shapes
    return kept
