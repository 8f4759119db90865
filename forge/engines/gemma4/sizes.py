"""What a Gemma 4 takes: bytes of weights and caches, bytes and operations of a step, and its bound.

Knows no files, no device and no engine's code. Bytes are bytes; an operation is one multiplication
or one addition, so that a weight costs two of them per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forge.engines.gemma4.config import Gemma4Config, LayerConfig
from forge.engines.gemma4.tensor_names import EMBEDDING_TENSOR, TABLE_TENSOR, model_tensors
from forge.engines.gemma4.weight_forms import WeightForm, stored_bytes

DTYPE_BYTES = {"f32": 4, "bf16": 2}
KV_BYTES = DTYPE_BYTES | {"int8": 1}  # of one number of keys and values
# The order in which people read them.
_SIZES_GROUPS = (
    *("embedding", "per-layer table", "per-layer projection", "per-layer gates"),
    *("attention", "MLP", "router", "experts", "norms"),
)
_SIZES_SCALES = {"int8": 4}  # bytes beside the numbers of one key or value of one head
_SIZES_F32 = 4  # sums, norms, softmax and logits are f32 whatever the weights are
_SIZES_KEY_BLOCK = 256  # keys that attention takes at once, as forge.engines.jax.attention does
_SIZES_UNPACKED = 512  # inputs that a CPU unpacks at once, as forge.engines.jax.quantised does


@dataclass(frozen=True)
class DecodeCost:
    """One decode step of some streams: bytes it reads, and operations.

    weights: every matrix once, of the experts those that are expected to be taken. gathered: the
    rows of the two embedding tables. cache: keys and values of all layers, the sharing ones too.
    """

    weights: float
    gathered: int
    cache: int
    flops: int

    @property
    def read(self) -> float:
        """All bytes that have to come from memory."""
        return self.weights + self.gathered + self.cache


def parameter_groups(config: Gemma4Config) -> dict[str, int]:
    """Elements of the weights by group; the head is the embedding and counts once.

    Beside transformers' parameters this counts the layer scalars, which are buffers there.
    """
    counted = dict.fromkeys(_SIZES_GROUPS, 0)
    for name, shape in model_tensors(config).items():
        counted[_sizes_group(name)] += math.prod(shape)
    return {group: elements for group, elements in counted.items() if elements}


def weight_group_bytes(
    config: Gemma4Config, element_bytes: int, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, int]:
    """Bytes of the weights by group, each tensor in its form; without `forms` all are plain."""
    counted = dict.fromkeys(_SIZES_GROUPS, 0)
    for name, shape in model_tensors(config).items():
        form = forms[name] if forms else "plain"
        counted[_sizes_group(name)] += stored_bytes(config, shape, form, element_bytes)
    return {group: size for group, size in counted.items() if size}


def seen_tokens(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Tokens of `context` that a layer looks at, and that an owner keeps: the window at most."""
    return min(context, config.window) if layer.sliding else context


def cached_elements(config: Gemma4Config, context: int) -> dict[str, int]:
    """Elements of one slot's keys and values: rings of sliding owners, full length of full ones.

    Only owners keep any. An engine may round a length up to whole blocks.
    """
    kept = {"sliding": 0, "full": 0}
    for layer in config.layers:
        if layer.owner:
            kind = "sliding" if layer.sliding else "full"
            kept[kind] += _sizes_token(layer) * seen_tokens(config, layer, context)
    return kept


def cached_bytes(config: Gemma4Config, context: int, kv_dtype: str) -> dict[str, int]:
    """Bytes of one slot's keys and values, by kind as `cached_elements`; of int8 with scales."""
    kept = {"sliding": 0, "full": 0}
    for layer in config.layers:
        if layer.owner:
            kind = "sliding" if layer.sliding else "full"
            kept[kind] += _sizes_token_bytes(layer, kv_dtype) * seen_tokens(config, layer, context)
    return kept


def marks_bytes(config: Gemma4Config, slots: int) -> int:
    """What sampling keeps of each conversation: a mark and an int32 count per vocabulary entry."""
    return slots * config.vocabulary * 5


def decode_cost(
    config: Gemma4Config,
    element_bytes: int,
    streams: int,
    context: int,
    forms: Mapping[str, WeightForm] | None = None,
    *,
    kv_dtype: str | None = None,
) -> DecodeCost:
    """One step of `streams` conversations with `context` tokens each, all in one dispatch.

    Weights are read in their `forms`: a packed matrix is unpacked on its way. kv_dtype: of keys and
    values; None: their numbers have `element_bytes` too.
    Of E experts, `streams` independent choices of k take E * (1 - (1 - k/E)**streams).
    """
    groups = parameter_groups(config)
    stored = weight_group_bytes(config, element_bytes, forms)
    table = stored.pop("per-layer table", 0)
    experts = stored.pop("experts", 0)
    untouched = (1 - config.experts_used / config.experts) ** streams if experts else 0.0
    read = sum(stored.values()) + experts * (1 - untouched)
    row = config.hidden + (len(config.layers) * config.per_layer if table else 0)

    def token(layer: LayerConfig) -> int:
        if kv_dtype is None:
            return _sizes_token(layer) * element_bytes
        return _sizes_token_bytes(layer, kv_dtype)

    cache = sum(token(layer) * seen_tokens(config, layer, context) for layer in config.layers)
    matrices = groups["embedding"] + groups.get("per-layer projection", 0)
    matrices += sum(_sizes_layer_matrices(config, layer) for layer in config.layers)
    attention = sum(_sizes_attention(config, layer, context) for layer in config.layers)
    return DecodeCost(
        weights=read,
        gathered=streams * row * element_bytes,
        cache=streams * cache,
        flops=streams * (2 * matrices + attention),
    )


def prompt_flops(config: Gemma4Config, tokens: int) -> int:
    """Operations of taking a prompt of `tokens`, up to the first token of the answer.

    Layers that share keys, and the head, run for the last token alone: nothing reads what they
    would say of the others.
    """
    groups = parameter_groups(config)
    once = groups.get("per-layer projection", 0)
    owners = sum(_sizes_layer_matrices(config, layer) for layer in config.layers if layer.owner)
    sharing = sum(_sizes_layer_matrices(config, layer) for layer in config.layers) - owners
    attention = 0
    for layer in config.layers:
        if layer.owner:
            window = min(tokens, config.window) if layer.sliding else tokens
            # 1 + 2 + … up to the window, and the window from there on.
            pairs = window * (window + 1) // 2 + (tokens - window) * window
            attention += 4 * layer.heads * layer.head_dim * pairs
        else:
            attention += _sizes_attention(config, layer, tokens)
    last = sharing + groups["embedding"]
    return 2 * (tokens * (owners + once) + last) + attention


def temporary_bytes(
    config: Gemma4Config, chunk: int, slots: int, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, int]:
    """An estimate of what a dispatch needs beside weights and caches, by what it is for.

    A prompt's chunk: two copies of one layer's scores (a block of keys at a time), three of the
    widest MLP's inner rows, two of the per-layer inputs. A decode: three rows of logits a stream.
    With packed weights a block of the widest, unpacked. All f32. A compiler may need less or more;
    `make aot` says what some of them do.
    """
    unpacked = {}
    if forms and "packed" in forms.values():
        widest = max(
            min(shape[-1], _SIZES_UNPACKED) * shape[0]
            for name, shape in model_tensors(config).items()
            if forms[name] == "packed"
        )
        unpacked["unpacked weights"] = _SIZES_F32 * widest
    scores = max(layer.heads for layer in config.layers) * max(_SIZES_KEY_BLOCK, chunk)
    inner = max(layer.intermediate for layer in config.layers)
    return {
        "attention of a chunk": 2 * _SIZES_F32 * chunk * scores,
        "MLP of a chunk": 3 * _SIZES_F32 * chunk * inner,
        "per-layer inputs of a chunk": (
            2 * _SIZES_F32 * chunk * len(config.layers) * config.per_layer
        ),
        "logits of a decode": 3 * _SIZES_F32 * slots * config.vocabulary,
    } | unpacked


def bound_tokens_per_s(
    cost: DecodeCost, streams: int, bandwidth: float, flop_rate: float | None = None
) -> float:
    """Output tokens a second that no engine can exceed: all streams' together.

    bandwidth in bytes/s, flop_rate in operations/s (None: not known, memory alone bounds).
    """
    seconds = cost.read / bandwidth
    if flop_rate is not None:
        seconds = max(seconds, cost.flops / flop_rate)
    return streams / seconds


def _sizes_group(name: str) -> str:
    """The group of a tensor by its name."""
    if name == EMBEDDING_TENSOR:
        return "embedding"
    if name == TABLE_TENSOR:
        return "per-layer table"
    if name == "per_layer_model_projection.weight":
        return "per-layer projection"
    if ".per_layer_" in name:
        return "per-layer gates"
    for part, group in ((".mlp.", "MLP"), (".experts.", "experts"), (".router.", "router")):
        if part in name:
            return group
    return "attention" if "_proj.weight" in name else "norms"


def _sizes_token(layer: LayerConfig) -> int:
    """Elements of one token's keys and values in that layer."""
    return 2 * layer.kv_heads * layer.head_dim


def _sizes_token_bytes(layer: LayerConfig, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in that layer, with their scales."""
    scales = 2 * layer.kv_heads * _SIZES_SCALES.get(kv_dtype, 0)
    return _sizes_token(layer) * KV_BYTES[kv_dtype] + scales


def _sizes_attention(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Operations of one token's scores and sums: two products of two operations per element."""
    return 4 * layer.heads * layer.head_dim * seen_tokens(config, layer, context)


def _sizes_layer_matrices(config: Gemma4Config, layer: LayerConfig) -> int:
    """Elements of a layer's matrices that one token passes through."""
    prefix = f"layers.{layer.index}."
    total = 0
    for name, shape in model_tensors(config).items():
        if name.startswith(prefix) and len(shape) > 1:
            used = (config.experts_used, *shape[1:]) if ".experts." in name else shape
            total += math.prod(used)
    return total
