"""Attention of new tokens over the keys in their view, taken in blocks.

Knows no weights, no layers and no caches. Which key a query sees follows from two positions and the
window alone, so padding, a stale entry, or a neighbour in the batch can never matter: a key that is
not seen adds an exact zero. The softmax is taken block by block (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"), so that neither time nor memory follows the length of
a cache, but what is in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.jax.kept_rows import KeptRows, kept_length, numbers_and_scales

KEY_BLOCK = 256  # keys taken at once
_NOTHING_SEEN = -1e30  # stands for minus infinity, whose differences are no numbers


class KeyView(NamedTuple):
    """The keys that `batch` conversations may see in one layer.

    keys, values: [rows, kv_heads, length, head_dim], of which rows first..first+batch are theirs;
    plain or int8. A length beyond KEY_BLOCK is a multiple of it. positions [batch, length] int32:
    where each key stands in its conversation, negative for an entry that holds nothing. used
    int32: no conversation has a key at this entry or beyond.
    """

    keys: KeptRows
    values: KeptRows
    first: jax.Array | int
    positions: jax.Array
    used: jax.Array | int


class _Softmax(NamedTuple):
    """A softmax under way. Axes: batch, kv head, query head of it, token; `total` has head_dim."""

    highest: jax.Array
    weight: jax.Array
    total: jax.Array


def whole_blocks(length: int) -> int:
    """The least length of a view that holds `length` keys."""
    return length if length <= KEY_BLOCK else -(-length // KEY_BLOCK) * KEY_BLOCK


def visible(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Whether a token at position `query` sees the one at `key`: not later, and near enough.

    A sliding layer sees `window` tokens, the token itself among them. Negative positions are
    never seen.
    """
    seen = (key <= query) & (key >= 0)
    return seen if window is None else seen & (query - key < window)


def key_scores(queries: jax.Array, keys: jax.Array, precision: lax.Precision) -> jax.Array:
    """Plain products: no 1/sqrt(head_dim), for queries and keys are normed (scaling is 1.0)."""

    def plainly(queries: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.einsum("bkgtd,bksd->bkgts", queries, keys, precision=precision)

    if queries.shape[3] > 1:
        return plainly(queries, keys)
    # One token is as slow as the reading of its keys.
    scores: jax.Array = lax.platform_dependent(
        queries, keys, cpu=_key_scores_on_cpu, default=plainly
    )
    return scores


def _key_scores_on_cpu(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Keys first, as weights are in `project`, for XLA repacks the second factor at every call.

    The barrier keeps it from swapping them back. One token over 4,096 keys of 512, 8 heads: 1.7 ms
    of processor time for all of `attend` instead of 6.6 (2 cores of an AMD EPYC, Zen 4).
    """
    product = jnp.einsum("bksd,bkgtd->bksgt", keys, queries)
    kept: jax.Array = lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept.transpose(0, 1, 3, 4, 2)


def _softmax_block(
    so_far: _Softmax, queries: jax.Array, keys: KeptRows, values: KeptRows, seen: jax.Array
) -> _Softmax:
    """Take one block of keys [batch, kv, s, head_dim] into the softmax; seen [batch, tokens, s]."""
    keys, key_scales = numbers_and_scales(keys)
    values, value_scales = numbers_and_scales(values)
    # f32 means f32 on chips that would else round factors to bf16; bf16 and int8 lose nothing.
    exact = keys.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    seen = seen[:, None, None]
    scores = key_scores(queries, keys.astype(jnp.float32), precision)
    if key_scales is not None:
        scores = scores * key_scales[:, :, None, None]
    scores = jnp.where(seen, scores, _NOTHING_SEEN)
    highest = jnp.maximum(so_far.highest, jnp.max(scores, axis=-1))
    shares = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0.0)
    fade = jnp.exp(so_far.highest - highest)
    drawn = shares if value_scales is None else shares * value_scales[:, :, None, None]
    found = jnp.einsum("bkgts,bksd->bkgtd", drawn, values.astype(jnp.float32), precision=precision)
    return _Softmax(
        highest,
        so_far.weight * fade + jnp.sum(shares, axis=-1),
        so_far.total * fade[..., None] + found,
    )


def attend(
    queries: jax.Array, positions: jax.Array, view: KeyView, window: int | None
) -> jax.Array:
    """What each new token draws from the keys it sees: [batch, tokens, heads, head_dim] f32.

    queries: [batch, tokens, heads, head_dim] f32, of tokens at `positions` [batch, tokens]. Heads
    that follow each other share a key head. `window` None sees all.
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = jax.tree.leaves(view.keys)[0].shape[1]
    block = min(KEY_BLOCK, kept_length(view.keys))
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    shape = grouped.shape[:-1]
    start = _Softmax(
        jnp.full(shape, _NOTHING_SEEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )

    def take(number: jax.Array, so_far: _Softmax) -> _Softmax:
        entry = number * block

        def cut(rows: jax.Array) -> jax.Array:
            corner = (view.first, 0, entry, 0)[: rows.ndim]
            return lax.dynamic_slice(rows, corner, (batch, kv_heads, block, *rows.shape[3:]))

        places = lax.dynamic_slice_in_dim(view.positions, entry, block, axis=1)
        return _softmax_block(
            so_far,
            grouped,
            jax.tree.map(cut, view.keys),
            jax.tree.map(cut, view.values),
            visible(positions[:, :, None], places[:, None, :], window),
        )

    blocks = (view.used + block - 1) // block
    softmax: _Softmax = lax.fori_loop(0, blocks, take, start)
    drawn = softmax.total / softmax.weight[..., None]
    return drawn.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, head_dim)
