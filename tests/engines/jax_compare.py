"""What the engine's tests compare with: a checkpoint's own forward pass, and transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.weight_files import open_weights
from forge.engines.jax.cache import empty_state, state_shapes
from forge.engines.jax.model import Params, prompt_logits
from forge.engines.jax.params import place_params
from forge.engines.serving.slot_engine import Sampling, SlotEngine, StepToken

NEAR = 1e-3  # how far a logit may lie from transformers' in f32
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
GREEDY = Sampling(temperature=0.0, logprobs=20)


def opened(folder: Path, dtype: jnp.dtype = F32) -> tuple[Params, Gemma4Config]:
    """A checkpoint's weights on the device, and its config."""
    config = read_config(folder)
    return place_params(open_weights(folder, config), dtype, lambda share: None), config


def logits_at_once(params: Params, config: Gemma4Config, ids: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of one prompt, by a forward pass that is traced anew."""
    dtype = params["embed_tokens.weight"].dtype
    caches = empty_state(state_shapes(config, 1, len(ids), dtype)).caches

    def run(params: Params, ids: jax.Array) -> jax.Array:
        return prompt_logits(params, config, ids, caches)

    told: np.ndarray = np.asarray(jax.jit(run)(params, jnp.asarray(ids, jnp.int32)))
    return told


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """log softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    told: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return told


def read(engine: SlotEngine, slot: int, prompt: Sequence[int], sampling: Sampling) -> StepToken:
    """The first token of the answer to `prompt`, in `slot`."""
    engine.begin(slot, prompt, sampling)
    while (first := engine.prefill(slot)) is None:
        pass
    return first


def answer(
    engine: SlotEngine, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
) -> list[StepToken]:
    """`count` tokens of the answer to `prompt` alone in slot 0, fewer at the context's end."""
    told = [read(engine, 0, prompt, sampling)]
    while len(told) < count:
        more = engine.decode([0], count - len(told))[0]
        if not more:
            break
        told += more
    engine.end(0)
    return told[:count]


def worst_difference(told: Sequence[StepToken], logits: np.ndarray) -> float:
    """How far the told log probabilities lie from those of `logits` [len(told), vocabulary]."""
    wanted = log_probabilities(logits)
    return max(
        abs(wanted[step, token] - value)
        for step, told_here in enumerate(told)
        for token, value in (*told_here.top, (told_here.token, told_here.logprob or 0.0))
    )
