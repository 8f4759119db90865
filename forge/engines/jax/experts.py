"""The sparse half of a 26B-A4B layer: each token through its few experts, each expert read once.

Knows no layers and no attention. Pairs of token and expert are sorted by expert and taken in blocks
of one expert each, as many as there are: no expert without a token is read, none has a bound.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.jax.linear import project
from forge.engines.jax.mesh import summed_over_parts
from forge.engines.jax.quantised import Weight
from forge.engines.jax.rules import gelu

_EXPERT_ROWS_MOST = 64


def expert_block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: what an expert can expect of evenly spread pairs, as a power of two."""
    rows = 1
    while rows * experts < pairs and rows < _EXPERT_ROWS_MOST:
        rows *= 2
    return rows


def through_experts(
    x: jax.Array, ids: jax.Array, shares: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """Sum of each token's experts' answers, weighted by its shares: [tokens, hidden] f32.

    x [tokens, hidden] f32, ids and shares [tokens, used]; gate_up [experts, 2 · width, hidden] with
    the gate's rows first, down [experts, hidden, width]. A token's sum is taken in its own order of
    experts, whatever company it has. Of several devices each reads its own experts alone.
    """
    return summed_over_parts(_through_own_experts, (x, ids, shares), (gate_up, down))


def _through_own_experts(
    first: jax.Array | None,
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    gate_up: Weight,
    down: Weight,
) -> jax.Array:
    """`through_experts` of those from number `first` on; None where all are here."""
    tokens, used = ids.shape
    pairs, experts = tokens * used, gate_up.shape[0]
    block = expert_block_rows(pairs, experts)
    if first is not None:
        own = (ids >= first) & (ids < first + experts)
        ids = jnp.where(own, ids - first, experts)  # sorted last, counted nowhere, and so not taken
    flat = ids.reshape(pairs)
    order = jnp.argsort(flat, stable=True)
    taken = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    pair_ends = jnp.cumsum(taken)
    block_ends = jnp.cumsum((taken + block - 1) // block)

    def take(number: jax.Array, answers: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(block_ends, number, side="right").astype(jnp.int32)
        blocks_left = block_ends[expert] - number
        blocks = (taken[expert] + block - 1) // block
        start = pair_ends[expert] - taken[expert] + (blocks - blocks_left) * block
        places = start + jnp.arange(block, dtype=jnp.int32)
        rows = x[order[jnp.minimum(places, pairs - 1)] // used]
        both = project(rows, _weight_of_expert(gate_up, expert))
        gate, up = jnp.split(both, 2, axis=-1)
        answer = project(gelu(gate) * up, _weight_of_expert(down, expert))
        # The last block of an expert may reach into the next one's pairs: those are dropped.
        return answers.at[jnp.where(places < pair_ends[expert], order[places], pairs)].set(
            answer, mode="drop"
        )

    answers = lax.fori_loop(0, block_ends[-1], take, jnp.zeros((pairs, x.shape[-1]), jnp.float32))
    return jnp.sum(answers.reshape(tokens, used, -1) * shares[..., None], axis=1)


def _weight_of_expert(weights: Weight, expert: jax.Array) -> Any:
    """One expert's matrix, in whatever form all of them are."""

    def one_of(array: jax.Array) -> jax.Array:
        one: jax.Array = lax.dynamic_index_in_dim(array, expert, keepdims=False)
        return one

    return jax.tree.map(one_of, weights)
