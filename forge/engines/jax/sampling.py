"""Chooses the next token of every row of a batch at once, on the device, from its logits.

Knows no model and no requests. A row's choice follows from its logits, settings, seed and position
alone, whatever rows stand beside it. Nothing is sorted: a row's cut is found among its 256
likeliest tokens, or by bisection where it lies beyond. What no row asks for is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.serving.slot_engine import MOST_LOGPROBS

SAMPLING_NEAR = 256  # likeliest tokens among which a cut is looked for first
SAMPLING_BLOCK = 512  # tokens of a block; first a block is drawn, then a token of it
_SAMPLING_FARTHEST = 0x7F800000  # the bits of infinity, the greatest distance there is
_SAMPLING_TINY = 1e-38  # keeps a division by a share that is 0 from making no number


class SamplingRows(NamedTuple):
    """The settings of each row, arrays [b]; what they mean is told at the engine's `Sampling`.

    f32: temperature, top_p, min_p, repetition, presence, frequency; int32: top_k, logprobs (how
    many alternatives, -1 for no log probability); uint32: seed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array
    logprobs: jax.Array


class SamplingMasks(NamedTuple):
    """Which tokens each row may get: `words` uint32 [b, ceil(V / 32)], token n at bit n % 32 of
    word n // 32; `masked` bool [b], false where a row may get any and its words mean nothing."""

    words: jax.Array
    masked: jax.Array


class SamplingCut(NamedTuple):
    """What of each row may be drawn, arrays [b].

    All tokens nearer than `reach` f32, and of those exactly there the ones up to id `last` int32.
    """

    reach: jax.Array
    last: jax.Array


def sample_step(
    logits: jax.Array,
    rows: SamplingRows,
    seen: jax.Array,
    counts: jax.Array,
    position: jax.Array,
    masks: SamplingMasks,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """One token for each row: (tokens, logprob, top_ids, top_logprobs, counts).

    logits [b, V] f32. seen [b, V] bool: tokens of the prompt. counts [b, V] int32: how often each
    is in the answer; comes back with the chosen one counted. position [b] int32: where the token
    will stand; with the seed it makes the random numbers. tokens [b] int32; logprob [b] and
    top_logprobs [b, 20] f32 are those of `logits`, zeros where no row wants them: the model's own,
    before penalties and masks, as in vLLM ("raw_logprobs", its default).
    """
    wanted = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    adjusted = lax.cond(
        jnp.any(wanted), _penalised, lambda logits, *_: logits, logits, rows, seen, counts
    )
    adjusted = lax.cond(
        jnp.any(masks.masked), _only_allowed, lambda logits, _: logits, adjusted, masks
    )
    highest, likeliest = _likeliest(adjusted)
    drawn = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: _drawn(_distances(adjusted, highest, rows.temperature), rows, position),
        lambda: likeliest,
    )
    tokens = jnp.where(rows.temperature > 0, drawn, likeliest)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    logprob, top_ids, top_logprobs = _told(logits, tokens, rows.logprobs)
    return tokens, logprob, top_ids, top_logprobs, counts.at[batch, tokens].add(1)


def _in_blocks(values: jax.Array, filling: float) -> jax.Array:
    """values [b, V] as [b, blocks, SAMPLING_BLOCK], the last one filled up."""
    batch, size = values.shape
    missing = -size % SAMPLING_BLOCK
    whole = jnp.pad(values, ((0, 0), (0, missing)), constant_values=filling)
    return whole.reshape(batch, -1, SAMPLING_BLOCK)


def _block_of(blocks: jax.Array, number: jax.Array) -> jax.Array:
    """Block `number` [b] of each row of [b, blocks, SAMPLING_BLOCK]."""
    return jnp.take_along_axis(blocks, number[:, None, None], axis=1)[:, 0]


def _token_of(block: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """The id at `place` of `block`, [b] each; one that exists even where logits are no numbers."""
    return jnp.minimum(block * SAMPLING_BLOCK + place, size - 1).astype(jnp.int32)


def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest logit of each row [b, V], and the lowest id that has it: [b] each.

    argmax over all is slow on a CPU, the maximum is not: 16 rows of 262,144 take 19 and 0.6 ms of
    processor time. So it looks for the block first.
    """
    blocks = _in_blocks(logits, -jnp.inf)
    highest = jnp.max(blocks, axis=-1)
    block = jnp.argmax(highest, axis=-1)
    place = jnp.argmax(_block_of(blocks, block), axis=-1)
    return jnp.max(highest, axis=-1), _token_of(block, place, logits.shape[-1])


def _penalised(
    logits: jax.Array, rows: SamplingRows, seen: jax.Array, counts: jax.Array
) -> jax.Array:
    """Logits after the penalties, in vLLM's order and form: repetition, frequency, presence.

    The repetition penalty divides a positive logit and multiplies a negative one (Keskar et al.
    2019, "CTRL", as vLLM and transformers have it); the others are OpenAI's: subtracted.
    """
    answered = counts > 0
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen | answered, repeated, logits)
    logits = logits - rows.frequency[:, None] * counts.astype(jnp.float32)
    return logits - rows.presence[:, None] * answered.astype(jnp.float32)


def _only_allowed(logits: jax.Array, masks: SamplingMasks) -> jax.Array:
    """Logits with -inf, a share of exactly 0, where a masked row's bit is not set."""
    bits = (masks.words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[-1]] == 1
    return jnp.where(allowed | ~masks.masked[:, None], logits, -jnp.inf)


def _distances(logits: jax.Array, highest: jax.Array, temperature: jax.Array) -> jax.Array:
    """How far each token lies below its row's likeliest, over the temperature: [b, V], 0 or more.

    A token's share of the whole is exp(-distance) over the sum of these.
    """
    return (highest[:, None] - logits) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def _drawn(distances: jax.Array, rows: SamplingRows, position: jax.Array) -> jax.Array:
    """A token of each row, drawn from what its settings leave: [b] int32.

    By the largest of shares with Gumbel noise, twice: which block of ids, then which id in it. So
    few random numbers are needed, and a token that was cut off can never win.
    """
    size = distances.shape[-1]
    cut = lax.cond(
        jnp.any(_restricted(rows)), lambda: cut_of(distances, rows), lambda: _no_cut(rows, size)
    )
    kept = _kept(distances, jnp.arange(size, dtype=jnp.int32), cut)
    blocks = _in_blocks(jnp.where(kept, distances, jnp.inf), jnp.inf)
    shares = jnp.sum(jnp.exp(-blocks), axis=-1)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (SAMPLING_BLOCK + shares.shape[-1],))

    noises = jax.vmap(noise)(rows.seed, position)
    block = jnp.argmax(noises[:, SAMPLING_BLOCK:] + jnp.log(shares), axis=-1)
    place = jnp.argmax(noises[:, :SAMPLING_BLOCK] - _block_of(blocks, block), axis=-1)
    return _token_of(block, place, size)


def _restricted(rows: SamplingRows) -> jax.Array:
    """Which rows [b] draw, and not from all tokens."""
    some = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    return some & (rows.temperature > 0)


def _no_cut(rows: SamplingRows, size: int) -> SamplingCut:
    """All of `size` tokens may be drawn."""
    return SamplingCut(
        jnp.full(rows.top_k.shape, jnp.inf, jnp.float32),
        jnp.full(rows.top_k.shape, size, jnp.int32),
    )


def _kept(distances: jax.Array, ids: jax.Array, cut: SamplingCut) -> jax.Array:
    """Which tokens [b, …] the cut leaves."""
    reach, last = cut.reach[:, None], cut.last[:, None]
    return (distances < reach) | ((distances == reach) & (ids <= last))


def cut_of(distances: jax.Array, rows: SamplingRows) -> SamplingCut:
    """Where top_k, then top_p of what it leaves, then min_p end the row's tokens.

    Tokens come in the order of distance, and of id where that is equal. top_p keeps a token if
    those before it have less than that share; min_p, if its share is at least that much of the
    likeliest one's. The likeliest token is always kept.
    """
    near, fits = _near_cut(distances, rows)
    restricted = _restricted(rows)
    far = lax.cond(jnp.all(fits | ~restricted), lambda: near, lambda: _far_cut(distances, rows))
    cut = _chosen_cut(fits, near, far)
    return _chosen_cut(restricted, cut, _no_cut(rows, distances.shape[-1]))


def _chosen_cut(first: jax.Array, one: SamplingCut, other: SamplingCut) -> SamplingCut:
    """The rows of `one` where `first` [b], else those of `other`."""
    return SamplingCut(
        jnp.where(first, one.reach, other.reach), jnp.where(first, one.last, other.last)
    )


def _most_tokens(rows: SamplingRows, size: int) -> jax.Array:
    """How many tokens top_k leaves of `size`."""
    return jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)


def _least_likely(rows: SamplingRows) -> jax.Array:
    """The distance at which a share is min_p of the likeliest one's; infinite where that is off."""
    return -jnp.log(rows.min_p)


def _near_cut(distances: jax.Array, rows: SamplingRows) -> tuple[SamplingCut, jax.Array]:
    """The cut among the likeliest tokens, and for which rows [b] it lies there."""
    size = distances.shape[-1]
    width = min(SAMPLING_NEAR, size)
    nearest, ids = lax.top_k(-distances, width)
    nearest = -nearest
    shares = jnp.exp(-nearest)
    most = _most_tokens(rows, size)
    within = jnp.arange(width) < most[:, None]
    # The whole is known of these few, or of all; not of a top_k between.
    known = (most <= width) | (most >= size)
    total = jnp.where(
        most <= width,
        jnp.sum(jnp.where(within, shares, 0.0), axis=-1),
        jnp.sum(jnp.exp(-distances), axis=-1),
    )
    before = jnp.cumsum(shares, axis=-1) - shares
    enough = jnp.where(rows.top_p < 1, rows.top_p * total, jnp.inf)
    kept = within & (before < enough[:, None]) & (nearest <= _least_likely(rows)[:, None])
    count = jnp.maximum(jnp.sum(kept.astype(jnp.int32), axis=-1), 1)
    fits = known & ((count < width) | (most <= width))
    place = (count - 1)[:, None]
    cut = SamplingCut(
        jnp.take_along_axis(nearest, place, axis=-1)[:, 0],
        jnp.take_along_axis(ids, place, axis=-1)[:, 0].astype(jnp.int32),
    )
    return cut, fits


def _far_cut(distances: jax.Array, rows: SamplingRows) -> SamplingCut:
    """The same cut wherever it lies: the nearest of three, and how many at its end are kept."""
    size = distances.shape[-1]
    most = _most_tokens(rows, size)

    def tokens(inside: jax.Array) -> jax.Array:
        return jnp.sum(inside.astype(jnp.int32), axis=-1)

    def share(inside: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(inside, jnp.exp(-distances), 0.0), axis=-1)

    reach_k = _least_reach(lambda reach: tokens(distances <= reach[:, None]) >= most, most)
    ties_k = most - tokens(distances < reach_k[:, None])
    total = share(distances < reach_k[:, None]) + ties_k * jnp.exp(-reach_k)
    enough = rows.top_p * total
    reach_p = _least_reach(lambda reach: share(distances <= reach[:, None]) >= enough, most)
    missing = enough - share(distances < reach_p[:, None])
    ties_p = jnp.ceil(missing / jnp.maximum(jnp.exp(-reach_p), _SAMPLING_TINY))
    ties_p = jnp.clip(ties_p, 1, size).astype(jnp.int32)
    reach_p = jnp.where(rows.top_p < 1, reach_p, jnp.inf)

    reach = jnp.minimum(jnp.minimum(reach_k, reach_p), _least_likely(rows))
    ties = jnp.minimum(
        jnp.where(reach == reach_k, ties_k, size), jnp.where(reach == reach_p, ties_p, size)
    )
    tied = distances == reach[:, None]
    ids = jnp.arange(size, dtype=jnp.int32)
    last = _least_holding(
        size - 1, lambda last: tokens(tied & (ids <= last[:, None])) >= ties, most
    )
    return SamplingCut(reach, last)


def _least_reach(holds: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The least distance of each row [b] at which `holds`, which stays true farther out."""

    def distance(bits: jax.Array) -> jax.Array:
        # The order of floats that are 0 or more is the order of their bits.
        return lax.bitcast_convert_type(bits, jnp.float32)

    return distance(_least_holding(_SAMPLING_FARTHEST, lambda bits: holds(distance(bits)), like))


def _least_holding(
    highest: int, holds: Callable[[jax.Array], jax.Array], like: jax.Array
) -> jax.Array:
    """The least of 0..highest for each row at which `holds`; `highest` where it never does.

    By bisection; `like` is any int32 array [b].
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        good = holds(middle)
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    ends = (jnp.zeros_like(like), jnp.full_like(like, highest))
    found: jax.Array = lax.fori_loop(0, highest.bit_length(), halve, ends)[1]
    return found


def _told(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The chosen tokens' log probabilities [b], and the likeliest ids and theirs [b, 20]."""
    shape = (*tokens.shape, MOST_LOGPROBS)
    no_top = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def none() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return jnp.zeros(tokens.shape, jnp.float32), no_top

    def some() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        whole = jax.nn.logsumexp(logits, axis=-1)

        def likeliest() -> tuple[jax.Array, jax.Array]:
            best, ids = lax.top_k(logits, MOST_LOGPROBS)
            return ids.astype(jnp.int32), best - whole[:, None]

        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return chosen - whole, lax.cond(jnp.any(wanted > 0), likeliest, lambda: no_top)

    logprob, (top_ids, top_logprobs) = lax.cond(jnp.any(wanted >= 0), some, none)
    return logprob, top_ids, top_logprobs
