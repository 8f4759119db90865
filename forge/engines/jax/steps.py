"""The few programs that an engine runs, each of one shape: what they compute, for which shapes.

Knows no requests and compiles nothing: `engine_programs` lists what an engine compiles when it
starts, for the chip that is here or for one that is not. Nothing in them looks at a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.weight_forms import WeightForm
from forge.engines.jax.cache import EngineState, moved_row, stand_in, state_shapes
from forge.engines.jax.model import (
    NewTokens,
    Params,
    embedded,
    logits_of,
    owner_layers,
    sharing_layers,
    through_layers,
)
from forge.engines.jax.params import param_shapes
from forge.engines.jax.prefix_chunks import chunk_put_back, chunk_taken_out, kept_chunk_shapes
from forge.engines.jax.sampling import SamplingMasks, SamplingRows, sample_step
from forge.engines.serving.slot_engine import MOST_LOGPROBS

_BUCKET_STEP = 2  # a chunk is padded to the next of 16, 32, 64, …: less than twice too long
_LEAST_BUCKET = 16


class ChosenTokens(NamedTuple):
    """What was chosen for each row: tokens int32, their log probabilities, and the likeliest 20."""

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


# What one step of a decode hands the next: state, last tokens, their positions, all choices.
StepCarry = tuple[EngineState, jax.Array, jax.Array, ChosenTokens]


@dataclass(frozen=True)
class EngineProgram:
    """One program of one shape. `donated`: the arguments whose memory the results take over."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]


def chunk_buckets(chunk: int) -> tuple[int, ...]:
    """The lengths that pieces of a prompt are padded to, rising; the last one is `chunk`."""
    buckets = []
    length = _LEAST_BUCKET
    while length < chunk:
        buckets.append(length)
        length *= _BUCKET_STEP
    return (*buckets, chunk)


def batch_sizes(slots: int) -> tuple[int, ...]:
    """How many rows a decode takes: 1, 2, 4, … and all of them."""
    sizes = []
    size = 1
    while size < slots:
        sizes.append(size)
        size *= 2
    return (*sizes, slots)


def take_chunk(
    config: Gemma4Config,
    params: Params,
    state: EngineState,
    row: jax.Array,
    ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[EngineState, jax.Array]:
    """Take the next `count` of a prompt's tokens, ids [bucket], into `row`; `start` came before.

    Only layers that own keys are run. Gives the stream [1, 1, hidden] f32 of the last of them.
    """
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)
    real = places < count
    new = NewTokens(ids[None], (start + places)[None], real[None], row)
    stream = embedded(params, config, new.ids)
    x, caches = through_layers(params, config, owner_layers(config), new, stream, state.caches)
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1) & (start > 0)
    seen = seen.at[0, jnp.where(real, ids, config.vocabulary)].set(True, mode="drop")
    seen = lax.dynamic_update_slice_in_dim(state.seen, seen, row, 0)
    last = lax.dynamic_slice_in_dim(x, count - 1, 1, axis=1)
    return EngineState(caches, seen, state.counts), last


def finish_prompt(
    config: Gemma4Config,
    params: Params,
    state: EngineState,
    row: jax.Array,
    stream: jax.Array,
    token: jax.Array,
    position: jax.Array,
    settings: SamplingRows,
    masks: SamplingMasks,
) -> tuple[EngineState, ChosenTokens]:
    """The first token of an answer, from the prompt's last token, which stands at `position`.

    `stream` [1, 1, hidden] is what `take_chunk` left of it; arrays of the result are [1, …].
    """
    ids, positions = token[None, None], position[None, None]
    new = NewTokens(ids, positions, jnp.ones((1, 1), jnp.bool_), row)
    _, inputs = embedded(params, config, ids)
    x, _ = through_layers(
        params, config, sharing_layers(config), new, (stream, inputs), state.caches
    )
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1)
    counts = jnp.zeros((1, config.vocabulary), jnp.int32)
    logits = logits_of(params, config, x[:, 0])
    *chosen, counts = sample_step(logits, settings, seen, counts, position[None] + 1, masks)
    counts = lax.dynamic_update_slice_in_dim(state.counts, counts, row, 0)
    return EngineState(state.caches, state.seen, counts), ChosenTokens(*chosen)


def decode_rows(
    config: Gemma4Config,
    context: int,
    most_steps: int,
    params: Params,
    state: EngineState,
    tokens: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    settings: SamplingRows,
    masks: SamplingMasks,
    steps: jax.Array,
) -> tuple[EngineState, ChosenTokens]:
    """`steps` further tokens, at most `most_steps`, for the active ones of the first rows.

    tokens, positions, active [batch]: the last token of each conversation and its position. `masks`
    hold for the first token alone: where a row has one, more steps mean nothing. Arrays
    of the result are [most_steps, batch, …]; those of a row mean nothing from where its context is
    full, or where it is not active: nothing of such a row changes.
    """
    batch = tokens.shape[0]
    blank = ChosenTokens(
        jnp.zeros((most_steps, batch), jnp.int32),
        jnp.zeros((most_steps, batch), jnp.float32),
        jnp.zeros((most_steps, batch, MOST_LOGPROBS), jnp.int32),
        jnp.zeros((most_steps, batch, MOST_LOGPROBS), jnp.float32),
    )

    def step(number: jax.Array, carried: StepCarry) -> StepCarry:
        state, tokens, positions, told = carried
        alive = active & (positions + 1 < context)
        new = NewTokens(tokens[:, None], positions[:, None], alive[:, None], 0)
        stream = embedded(params, config, new.ids)
        x, caches = through_layers(params, config, config.layers, new, stream, state.caches)
        logits = logits_of(params, config, x[:, 0])
        *chosen, _ = sample_step(
            logits, settings, state.seen[:batch], state.counts[:batch], positions + 1, masks
        )
        # Counted here and not by sampling: in place, and only for rows that go on.
        counts = state.counts.at[jnp.arange(batch), chosen[0]].add(alive.astype(jnp.int32))
        state = EngineState(caches, state.seen, counts)
        told = ChosenTokens(
            *(all_of.at[number].set(one) for all_of, one in zip(told, chosen, strict=True))
        )
        tokens = jnp.where(alive, chosen[0], tokens)
        return state, tokens, jnp.where(alive, positions + 1, positions), told

    state, _, _, told = lax.fori_loop(0, steps, step, (state, tokens, positions, blank))
    return state, told


def settings_shapes(batch: int) -> SamplingRows:
    """The sampling settings of `batch` rows, as shapes."""
    kinds: dict[str, Any] = {"top_k": jnp.int32, "logprobs": jnp.int32, "seed": jnp.uint32}
    return SamplingRows(
        *(stand_in((batch,), kinds.get(name, jnp.float32)) for name in SamplingRows._fields)
    )


def mask_shapes(batch: int, vocabulary: int) -> SamplingMasks:
    """The masks of `batch` rows, as shapes."""
    return SamplingMasks(
        stand_in((batch, mask_words(vocabulary)), jnp.uint32), stand_in((batch,), jnp.bool_)
    )


def mask_words(vocabulary: int) -> int:
    """How many words of 32 bits the mask of one row has."""
    return -(-vocabulary // 32)


def engine_programs(
    config: Gemma4Config,
    *,
    slots: int,
    context: int,
    dtype: jnp.dtype,
    chunk: int = 256,
    steps: int = 1,
    kv_dtype: jnp.dtype | None = None,
    keeps_prefixes: bool = False,
    forms: Mapping[str, WeightForm] | None = None,
) -> Iterator[EngineProgram]:
    """Every program of such an engine, with the shapes that it is compiled for.

    kv_dtype: of keys and values; None is `dtype`, that of the weights. `forms`: of each tensor by
    name; all are plain without it.
    """
    params = param_shapes(config, dtype, forms)
    state = state_shapes(config, slots, context, kv_dtype or dtype)
    number = stand_in((), jnp.int32)
    stream = stand_in((1, 1, config.hidden), jnp.float32)
    for bucket in chunk_buckets(min(chunk, context)):
        ids = stand_in((bucket,), jnp.int32)
        yield EngineProgram(
            f"prefill of {bucket}",
            partial(take_chunk, config),
            (params, state, number, ids, number, number),
            (1,),
        )
    one_mask = mask_shapes(1, config.vocabulary)
    yield EngineProgram(
        "first token",
        partial(finish_prompt, config),
        (params, state, number, stream, number, number, settings_shapes(1), one_mask),
        (1,),
    )
    for batch in batch_sizes(slots):
        whole = stand_in((batch,), jnp.int32)
        active = stand_in((batch,), jnp.bool_)
        masks = mask_shapes(batch, config.vocabulary)
        yield EngineProgram(
            f"decode of {batch}",
            partial(decode_rows, config, context, steps),
            (params, state, whole, whole, active, settings_shapes(batch), masks, number),
            (1,),
        )
    if slots > 1:
        yield EngineProgram("moving a row", moved_row, (state, number, number), (0,))
    if keeps_prefixes:
        size = min(chunk, context)
        kept, ids = kept_chunk_shapes(state, size), stand_in((size,), jnp.int32)
        taking = partial(chunk_taken_out, size)
        yield EngineProgram("taking a chunk out", taking, (state, number, number), ())
        back = (state, number, ids, number, kept)
        yield EngineProgram("putting a chunk back", chunk_put_back, back, (0,))
