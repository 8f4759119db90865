"""Gemma 4's forward pass: new tokens of some conversations through some of the layers.

Knows no sampling, no slots and no compiling. Params are the checkpoint's tensors by name. Facts:
transformers 5.24, models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.jax.attention import KeyView, attend
from forge.engines.jax.cache import Caches, cached_view, closed_ring, widened_view, written
from forge.engines.jax.experts import through_experts
from forge.engines.jax.kept_rows import KeptRows, kept_length, kept_rows_like
from forge.engines.jax.linear import project
from forge.engines.jax.mesh import gathered, kept_in_place
from forge.engines.jax.rules import (
    blended_inputs,
    capped_logits,
    chosen_experts,
    context_scale,
    embedding_scale,
    gelu,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    router_input,
    scaled_stream,
    table_scale,
)

# Arrays; what `project` and the experts take may be a Weight in another form.
Params = Mapping[str, Any]
_Weight = Callable[[str], Any]


class NewTokens(NamedTuple):
    """Tokens to be taken, of the conversations in rows first..first+batch of the caches.

    ids, positions [batch, tokens] int32, positions rising by one; `real` is false for padding,
    which comes last.
    """

    ids: jax.Array
    positions: jax.Array
    real: jax.Array
    first: jax.Array | int


def owner_layers(config: Gemma4Config) -> tuple[LayerConfig, ...]:
    """The layers with keys and values of their own; in every Gemma 4 these come first."""
    return tuple(layer for layer in config.layers if layer.owner)


def sharing_layers(config: Gemma4Config) -> tuple[LayerConfig, ...]:
    """The layers that read an owner's: they write nothing, so a prompt's last token is enough."""
    return tuple(layer for layer in config.layers if not layer.owner)


def embedded(
    params: Params, config: Gemma4Config, ids: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The stream's start [batch, tokens, hidden] and each layer's own input, f32.

    The inputs are [batch, tokens, layers, per_layer]; None where the model has none.
    """
    table = params["embed_tokens.weight"]
    scale = embedding_scale(config.hidden, table.dtype)
    x = table[ids].astype(jnp.float32) * scale
    if not config.per_layer:
        return x, None
    shape = (*ids.shape, len(config.layers), config.per_layer)
    rows = params["embed_tokens_per_layer.weight"][ids].astype(jnp.float32).reshape(shape)
    context = project(x, params["per_layer_model_projection.weight"]) * context_scale(config.hidden)
    context = rms_norm(
        context.reshape(shape), params["per_layer_projection_norm.weight"], config.norm_eps
    )
    return x, blended_inputs(context, rows * table_scale(config.per_layer, table.dtype))


def queries_of(
    weight: _Weight,
    layer: LayerConfig,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    eps: float,
) -> jax.Array:
    """Normed and turned queries [batch, tokens, heads, head_dim]."""
    raw = project(x, weight("self_attn.q_proj.weight"))
    raw = raw.reshape(*x.shape[:2], layer.heads, layer.head_dim)
    return rotate(rms_norm(raw, weight("self_attn.q_norm.weight"), eps), tables)


def keys_and_values(
    weight: _Weight,
    layer: LayerConfig,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Keys, normed and turned, and values, normed without weight: [batch, kv, tokens, head_dim].

    Where `k_is_v` the values are made of what k_proj gave, before its norm.
    """
    shape = (*x.shape[:2], layer.kv_heads, layer.head_dim)
    raw = project(x, weight("self_attn.k_proj.weight")).reshape(shape)
    values = raw
    if not layer.k_is_v:
        values = project(x, weight("self_attn.v_proj.weight")).reshape(shape)
    keys = rotate(rms_norm(raw, weight("self_attn.k_norm.weight"), eps), tables)
    return keys.transpose(0, 2, 1, 3), rms_norm(values, None, eps).transpose(0, 2, 1, 3)


def feed_forward(weight: _Weight, config: Gemma4Config, x: jax.Array) -> jax.Array:
    """What the MLP, and beside it the experts, add to the stream x."""
    eps = config.norm_eps
    inner = rms_norm(x, weight("pre_feedforward_layernorm.weight"), eps)
    gate = gelu(project(inner, weight("mlp.gate_proj.weight")))
    dense = project(
        gate * project(inner, weight("mlp.up_proj.weight")), weight("mlp.down_proj.weight")
    )
    if config.experts:
        dense = rms_norm(dense, weight("post_feedforward_layernorm_1.weight"), eps)
        stream = x.reshape(-1, config.hidden)
        scores = project(
            router_input(stream, weight("router.scale"), eps), weight("router.proj.weight")
        )
        ids, shares = chosen_experts(scores, config.experts_used, weight("router.per_expert_scale"))
        sparse = through_experts(
            rms_norm(stream, weight("pre_feedforward_layernorm_2.weight"), eps),
            ids,
            shares,
            weight("experts.gate_up_proj"),
            weight("experts.down_proj"),
        )
        sparse = rms_norm(sparse, weight("post_feedforward_layernorm_2.weight"), eps)
        dense = dense + sparse.reshape(x.shape)
    return rms_norm(dense, weight("post_feedforward_layernorm.weight"), eps)


def own_input_added(weight: _Weight, x: jax.Array, own: jax.Array, eps: float) -> jax.Array:
    """The stream with a layer's own input [batch, tokens, per_layer] let in through its gate."""
    gate = gelu(project(x, weight("per_layer_input_gate.weight"))) * own
    answer = project(gate, weight("per_layer_projection.weight"))
    return x + rms_norm(answer, weight("post_per_layer_input_norm.weight"), eps)


def through_layers(
    params: Params,
    config: Gemma4Config,
    layers: Sequence[LayerConfig],
    new: NewTokens,
    stream: tuple[jax.Array, jax.Array | None],
    caches: Caches,
) -> tuple[jax.Array, Caches]:
    """The stream after `layers`, and the caches with the new tokens in them.

    `stream` is as `embedded` gives it, or as earlier layers left it. New keys go into the caches
    before these are read, but for a sliding layer and several new tokens: its ring must not lose
    what the first of them still sees, so there they stand beside what the ring held.
    """
    x, inputs = stream
    eps = config.norm_eps
    tables = {}
    for layer in layers:
        if layer.sliding not in tables:
            theta, rotated = (
                (config.sliding_theta, 1.0)
                if layer.sliding
                else (config.full_theta, config.full_rotated)
            )
            frequencies = rotary_frequencies(layer.head_dim, theta, rotated)
            tables[layer.sliding] = rotary_tables(new.positions, frequencies)
    before = new.positions[:, 0]
    after = before + jnp.maximum(jnp.sum(new.real, axis=1, dtype=jnp.int32), 1)
    keys, values = dict(caches.keys), dict(caches.values)
    views: dict[int, KeyView] = {}

    def keep(index: int, ring: bool, fresh_keys: KeptRows, fresh_values: KeptRows) -> None:
        """Put an owner's new keys and values into its cache, and its view where others find it."""
        if ring and kept_length(fresh_keys) > 1:
            held = cached_view(keys[index], values[index], new.first, before)
            # Padding is in view too, at positions after all that is real: only it sees it.
            wide = widened_view(held, fresh_keys, fresh_values, new.positions)
            turn = (new.first, before, after)
            keys[index] = closed_ring(keys[index], wide.keys, *turn)
            values[index] = closed_ring(values[index], wide.values, *turn)
            views[index] = wide
        else:
            place = (new.first, new.positions, new.real)
            keys[index] = written(keys[index], fresh_keys, *place)
            values[index] = written(values[index], fresh_values, *place)

    for layer in layers:

        def weight(name: str, prefix: str = f"layers.{layer.index}.") -> Any:
            return params[prefix + name]

        turned = tables[layer.sliding]
        normed = rms_norm(x, weight("input_layernorm.weight"), eps)
        queries = queries_of(weight, layer, normed, turned, eps)
        if layer.owner:
            cache = keys[layer.index]
            made, told = keys_and_values(weight, layer, normed, turned, eps)
            fresh = (kept_rows_like(cache, rows) for rows in (made, told))
            keep(layer.index, layer.sliding, *fresh)
        source = layer.source
        if source not in views:
            views[source] = cached_view(keys[source], values[source], new.first, after)
        window = config.window if layer.sliding else None
        drawn = attend(queries, new.positions, views[source], window)
        drawn = project(drawn.reshape(*x.shape[:2], -1), weight("self_attn.o_proj.weight"))
        x = x + rms_norm(drawn, weight("post_attention_layernorm.weight"), eps)
        x = x + feed_forward(weight, config, x)
        if inputs is not None:
            x = own_input_added(weight, x, inputs[:, :, layer.index], eps)
        x = scaled_stream(x, weight("layer_scalar"))
    return x, kept_in_place(Caches(keys, values))


def logits_of(params: Params, config: Gemma4Config, x: jax.Array) -> jax.Array:
    """Logits [..., vocabulary] f32 of the last layer's stream; the head is the embedding."""
    normed = rms_norm(x, params["norm.weight"], config.norm_eps)
    logits = gathered(project(normed, params["embed_tokens.weight"]))
    return capped_logits(logits, config.softcap)


def prompt_logits(
    params: Params, config: Gemma4Config, ids: jax.Array, caches: Caches
) -> jax.Array:
    """Logits [tokens, vocabulary] f32 at every position of one prompt, ids [tokens], at once.

    For tests and comparisons: serving never needs more than the last one. `caches` have at least
    one row, of any content, as long as the prompt.
    """
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
    new = NewTokens(ids[None], positions, jnp.ones(positions.shape, jnp.bool_), 0)
    stream = embedded(params, config, new.ids)
    x, _ = through_layers(params, config, config.layers, new, stream, caches)
    return logits_of(params, config, x)[0]
