"""The rules of Gemma 4's text model that hold for one token at a time, one small function each.

Knows neither the order of layers, nor attention, nor caches. Activations are f32 everywhere; only
weights have the serving dtype. Facts: transformers 5.24, models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# x and what is made of it: [..., width] f32. Weights: one array, f32 or bf16.


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; the weight is not 1 + w as in Gemma 3.

    Without `weight` it only brings x to length sqrt(width).
    """
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight.astype(jnp.float32)


def embedding_scale(hidden: int, dtype: jnp.dtype) -> float:
    """sqrt(hidden), rounded to the weights' dtype as transformers does: 39.25 for E2B in bf16."""
    return float(np.asarray(hidden**0.5, dtype=dtype))


def table_scale(per_layer: int, dtype: jnp.dtype) -> float:
    """What a row of the per-layer table is multiplied with: sqrt of a layer's share of it."""
    return float(np.asarray(per_layer**0.5, dtype=dtype))


def context_scale(hidden: int) -> float:
    """What the projection of the embedding into the layers' inputs is multiplied with."""
    return float(hidden**-0.5)


def blended_inputs(context: jax.Array, table: jax.Array) -> jax.Array:
    """A layer's own input: context and table row, added and brought back to the length of one."""
    return (context + table) * float(0.5**0.5)


def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, `gelu_pytorch_tanh`."""
    activated: jax.Array = jax.nn.gelu(x, approximate=True)
    return activated


def scaled_stream(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """The whole residual stream times the layer's own scalar [1], at the end of the layer."""
    return x * scalar.astype(jnp.float32)


def capped_logits(logits: jax.Array, softcap: float) -> jax.Array:
    """cap · tanh(logits / cap); cap 0 leaves them alone."""
    return jnp.tanh(logits / softcap) * softcap if softcap else logits


def rotary_frequencies(head_dim: int, theta: float, rotated: float) -> np.ndarray:
    """Angle per position of each of the head_dim/2 pairs, f32; those not rotated have 0.

    `rotated` is the share of pairs that turn: 1 in sliding layers, 0.25 in full ones. In both the
    exponent's denominator is the whole head_dim (transformers' rope types "default" and
    "proportional").
    """
    turning = int(rotated * head_dim // 2)
    exponents = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.zeros(head_dim // 2, dtype=np.float32)
    frequencies[:turning] = 1.0 / np.float32(theta) ** exponents
    return frequencies


def rotary_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [batch, tokens, 1, pairs] of `positions` [batch, tokens]."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the pairs (i, i + head_dim/2) of x [batch, tokens, heads, head_dim] by their angles."""
    cosine, sine = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def router_input(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """What the router sees of the stream x: normed without weight, times scale / sqrt(hidden)."""
    return rms_norm(x, None, eps) * scale.astype(jnp.float32) * float(x.shape[-1] ** -0.5)


def chosen_experts(
    scores: jax.Array, used: int, per_expert_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The `used` likeliest experts of each token and their shares: ids int32, shares f32.

    scores [tokens, experts]. Softmax over all experts, the chosen ones brought to a sum of one,
    then each times its own scale.
    """
    shares, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), used)
    shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return ids, shares * per_expert_scale.astype(jnp.float32)[ids]
