"""Rules of Gemma 4's architecture, each broken on purpose: what a comparison of logits must see.

Every fault is a wrong function in the place of a right one, or a wrong config, or wrong weights.
The forward pass is traced anew with each, so these live with few layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.jax import attention, model, rules
from forge.engines.jax.model import Params
from tests.engines.jax_compare import NEAR, logits_at_once, opened
from tests.engines.tiny import WINDOW, Reference, make_checkpoint, some_prompt

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Owners of both kinds, and a reader that could take the wrong one; values from keys, and experts.
# Norms forgive a wrong scale but for their epsilon: 1e-6 as published would hide two of the rules.
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "e2b": {
        "num_hidden_layers": 4,
        "layer_types": [_SLIDING, _FULL, _FULL, _FULL],
        "num_kv_shared_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-3,
    },
    "moe": {"num_hidden_layers": 2, "layer_types": [_SLIDING, _FULL]},
}

Broken = Callable[[], AbstractContextManager[Any]]


def patched(module: Any, name: str, changed: Callable[..., Any]) -> Broken:
    return lambda: mock.patch.object(module, name, changed)


def in_model(name: str, changed: Callable[..., Any]) -> Broken:
    """A rule of model.py replaced by a wrong one."""
    return patched(model, name, changed)


def constant(value: float) -> Callable[..., float]:
    return lambda *arguments: value


def norm_left_out_in(name: str) -> Broken:
    """The function `name` of model.py with norms that do nothing."""
    whole = getattr(model, name)

    def without(*arguments: Any) -> Any:
        with in_model("rms_norm", lambda x, weight, eps: x)():
            return whole(*arguments)

    return in_model(name, without)


def visible_with(change: int, causal: bool = True) -> Broken:
    """Windows longer by `change`; not causal: a token also sees those after it."""

    def seen(query: Any, key: Any, window: int | None) -> Any:
        mask = (key >= 0) & ((key <= query) if causal else True)
        return mask if window is None else mask & (query - key < window + change)

    return patched(attention, "visible", seen)


def scaled_scores() -> Broken:
    plain = attention.key_scores

    def scaled(queries: Any, keys: Any, precision: Any) -> Any:
        return plain(queries, keys, precision) / math.sqrt(keys.shape[-1])

    return patched(attention, "key_scores", scaled)


def frequencies_of_what_turns(head_dim: int, theta: float, rotated: float) -> np.ndarray:
    """The wrong denominator: what turns instead of the whole head."""
    frequencies = np.zeros(head_dim // 2, np.float32)
    turning = int(rotated * head_dim // 2)
    frequencies[:turning] = theta ** -(np.arange(turning) / turning)
    return frequencies


def neighbours_turned(x: Any, tables: Any) -> Any:
    """Pairs (2i, 2i+1) instead of (i, i + half)."""
    cosine, sine = tables
    first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def norm_of_gemma3(x: Any, weight: Any, eps: float) -> Any:
    return rules.rms_norm(x, None if weight is None else 1 + weight, eps)


def values_not_normed(x: Any, weight: Any, eps: float) -> Any:
    return x if weight is None else rules.rms_norm(x, weight, eps)


def values_from_normed_keys(weight: Any, layer: Any, x: Any, tables: Any, eps: float) -> Any:
    """A `k_is_v` layer whose values are made of the keys after their norm."""
    keys, values = _KEYS_AND_VALUES(weight, layer, x, tables, eps)
    if layer.k_is_v:
        scale = weight("self_attn.k_norm.weight")
        values = rules.rms_norm(values * scale, None, eps)
    return keys, values


_KEYS_AND_VALUES = model.keys_and_values


def heads_dealt_in_turn(queries: Any, positions: Any, view: Any, window: Any) -> Any:
    """Query heads 0, 2, … share the first key head instead of the first half."""
    heads, kv_heads = queries.shape[2], view.keys.shape[1]
    order = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    told = attention.attend(queries[:, :, order], positions, view, window)
    return told[:, :, np.argsort(order)]


def not_renormalised(scores: Any, used: int, scale: Any) -> Any:
    shares, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), used)
    return ids, shares * scale[ids]


def first_source(config: Gemma4Config) -> Gemma4Config:
    """Layers without keys read the first owner of their kind instead of the last one."""
    first = {layer.sliding: layer.index for layer in reversed(config.layers)}
    return dataclasses.replace(
        config,
        layers=tuple(
            layer if layer.owner else dataclasses.replace(layer, source=first[layer.sliding])
            for layer in config.layers
        ),
    )


@dataclasses.dataclass(frozen=True)
class Fault:
    """One broken rule."""

    name: str
    broken: Broken = nullcontext
    config: Callable[[Gemma4Config], Gemma4Config] = lambda config: config
    params: Callable[[Params], Params] = lambda params: params


def configured(**changes: Any) -> Callable[[Gemma4Config], Gemma4Config]:
    return lambda config: dataclasses.replace(config, **changes)


def weights(change: Callable[[str, Any], Any]) -> Callable[[Params], Params]:
    return lambda params: {name: change(name, array) for name, array in params.items()}


def halves_swapped(name: str, array: Any) -> Any:
    if not name.endswith("experts.gate_up_proj"):
        return array
    gate, up = jnp.split(array, 2, axis=1)
    return jnp.concatenate([up, gate], axis=1)


def inputs_of_other_layers(context: Any, table: Any) -> Any:
    return jnp.roll(rules.blended_inputs(context, table), 1, axis=-2)


DENSE_FAULTS = (
    Fault("window longer by one", visible_with(1)),
    Fault("window shorter by one", visible_with(-1)),
    Fault("later tokens seen", visible_with(0, causal=False)),
    Fault("scores over the root of the head's width", scaled_scores()),
    Fault("rope: wrong denominator", in_model("rotary_frequencies", frequencies_of_what_turns)),
    Fault("rope: neighbours paired", in_model("rotate", neighbours_turned)),
    Fault("rope: one theta for all", config=configured(full_theta=10_000.0)),
    Fault("rope: all of a full layer turns", config=configured(full_rotated=1.0)),
    Fault("another layer's keys", config=first_source),
    Fault("queries not normed", norm_left_out_in("queries_of")),
    Fault("keys and values not normed", norm_left_out_in("keys_and_values")),
    Fault("values not normed", in_model("rms_norm", values_not_normed)),
    Fault("norms with 1 + weight", in_model("rms_norm", norm_of_gemma3)),
    Fault("heads dealt in turn", in_model("attend", heads_dealt_in_turn)),
    Fault("embedding not scaled", in_model("embedding_scale", constant(1.0))),
    Fault("table not scaled", in_model("table_scale", constant(1.0))),
    Fault("context not scaled", in_model("context_scale", constant(1.0))),
    Fault(
        "context and table not brought back",
        in_model("blended_inputs", lambda context, table: context + table),
    ),
    Fault("inputs of the layer before", in_model("blended_inputs", inputs_of_other_layers)),
    Fault("GELU exact", in_model("gelu", lambda x: jax.nn.gelu(x, approximate=False))),
    Fault("layer's scalar left out", in_model("scaled_stream", lambda x, scalar: x)),
    Fault("no soft cap", config=configured(softcap=0.0)),
)
SPARSE_FAULTS = (
    Fault("values from normed keys", in_model("keys_and_values", values_from_normed_keys)),
    Fault("router's scale left out", in_model("router_input", lambda x, scale, eps: x)),
    Fault(
        "router's input as long as the stream",
        in_model("router_input", lambda x, scale, eps: rules.rms_norm(x, scale, eps)),
    ),
    Fault("shares not renormalised", in_model("chosen_experts", not_renormalised)),
    Fault(
        "experts' own scale left out",
        in_model(
            "chosen_experts", lambda s, used, scale: rules.chosen_experts(s, used, scale * 0 + 1)
        ),
    ),
    Fault("one expert too few", config=configured(experts_used=1)),
    Fault("gate and up swapped", params=weights(halves_swapped)),
    Fault("the MLP alone", in_model("through_experts", lambda x, *others: x * 0)),
)


def check_faults(test: TestCase, shape: str, folder: Path, faults: tuple[Fault, ...]) -> None:
    """The right forward pass is near transformers, and with each of `faults` it is not."""
    make_checkpoint(folder, shape, **FEW_LAYERS[shape])
    ids = some_prompt(2 * WINDOW + 1)
    want = Reference(folder).logits(ids)
    params, config = opened(folder)
    test.assertLess(np.abs(logits_at_once(params, config, ids) - want).max(), NEAR)
    for fault in faults:
        with test.subTest(fault=fault.name), fault.broken():
            told = logits_at_once(fault.params(params), fault.config(config), ids)
            test.assertGreater(np.abs(told - want).max(), NEAR)
