"""How many bytes a model's weights take, and how many of them one decode step reads.

Knows shapes and encodings only: no cache, no chip, no engine's overhead, no price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge.parts.knowledge.geometry import Geometry


@dataclass(frozen=True, slots=True)
class WeightEncoding:
    """Bytes per parameter of one way to store weights.

    linear: attention, MLP and expert matrices and the PLE gates, that is, what gets quantised.
    embedding: the token embedding, which is also the tied head, or an untied one.
    ple: the per-layer-embedding table.
    other: norms, router and the PLE model projection.
    """

    linear: float
    embedding: float
    ple: float
    other: float


# Group-quantised 4-bit: 32 weights share one 2-byte scale, 4/8 + 2/32 = 0.5625 bytes each
# (compressed-tensors w4a16 with group 32; ggml block_q4_0 is 18 bytes per 32 weights).
# ggml block_q6_K is 210 bytes per 256 weights: Google's GGUF files keep both tables in it.
_INT4_GROUP32_BYTES = 0.5625
_Q6_K_BYTES = 210 / 256

WEIGHT_ENCODINGS: dict[str, WeightEncoding] = {
    "f32": WeightEncoding(4.0, 4.0, 4.0, 4.0),
    "bf16": WeightEncoding(2.0, 2.0, 2.0, 2.0),
    "fp16": WeightEncoding(2.0, 2.0, 2.0, 2.0),
    "fp8": WeightEncoding(1.0, 2.0, 2.0, 2.0),
    "int8": WeightEncoding(1.0, 2.0, 2.0, 2.0),
    "w4a16": WeightEncoding(_INT4_GROUP32_BYTES, 2.0, 2.0, 2.0),
    "q4_0": WeightEncoding(_INT4_GROUP32_BYTES, _Q6_K_BYTES, _Q6_K_BYTES, 2.0),
}


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by group; `total` is what transformers counts (buffers are not parameters)."""

    embed: int
    ple_table: int
    ple_gates: int
    ple_projection: int
    attention: int
    mlp: int
    experts: int
    router: int
    norms: int
    head: int

    @property
    def linear(self) -> int:
        """What an encoding quantises."""
        return self.attention + self.mlp + self.experts + self.ple_gates

    @property
    def other(self) -> int:
        """What stays at 16 bits beside the embeddings."""
        return self.ple_projection + self.router + self.norms

    @property
    def total(self) -> int:
        """All text parameters."""
        return self.linear + self.other + self.embed + self.ple_table + self.head


def parameter_counts(geometry: Geometry) -> ParameterCounts:
    """Parameters of the text model, by group.

    Per layer, with D hidden, H heads, h head width, K width of a token's keys, I MLP width:
    attention 2*D*H*h + D*K*(2, or 1 where values come from keys; 0 in sharing layers),
    mlp 3*D*I, PLE gates 2*D*P, experts 3*E*D*X, router D*E + D + E.
    Once: embedding V*D, PLE table Vp*L*P, PLE projection D*L*P, head V*D if untied.
    Source: transformers 5.24 modeling_gemma4 (and llama, mistral, qwen2, qwen3, gemma3), checked
    against models built on the meta device.
    """
    g = geometry
    per_layer = [_layer_attention(g, layer) for layer in range(g.layers)]
    mlp = sum(
        3 * g.hidden * g.mlp_width(layer) + (2 * g.mlp_width(layer) + g.hidden if g.mlp_bias else 0)
        for layer in range(g.layers)
    )
    moe_layers = g.layers if g.experts else 0
    # Experts bring three more norms of hidden width, PLE one per layer and one of its own width.
    block_norms = g.block_norms + (3 if g.experts else 0) + (1 if g.ple_dim else 0)
    return ParameterCounts(
        embed=g.vocab * g.hidden,
        ple_table=g.ple_vocab * g.layers * g.ple_dim,
        ple_gates=g.layers * 2 * g.hidden * g.ple_dim,
        ple_projection=g.hidden * g.layers * g.ple_dim,
        attention=sum(matrices for matrices, _ in per_layer),
        mlp=mlp,
        experts=moe_layers * 3 * g.experts * g.hidden * g.expert_width,
        router=moe_layers * (g.hidden * g.experts + g.hidden + g.experts),
        norms=sum(norms for _, norms in per_layer)
        + g.layers * block_norms * g.hidden
        + g.hidden
        + g.ple_dim,
        head=0 if g.tied else g.vocab * g.hidden,
    )


def weight_bytes(
    geometry: Geometry,
    encoding: str,
    *,
    ple_encoding: str | None = None,
    duplicate_head: bool = False,
    dead_kv: bool = False,
) -> int:
    """Bytes of the text weights in `encoding` (a key of WEIGHT_ENCODINGS), towers apart.

    B_linear*(attention + mlp + experts + PLE gates) + B_embed*(embedding + untied head)
    + B_ple*table + B_other*(PLE projection + router + norms).
    ple_encoding: hold the PLE table as that encoding holds its linear weights (engines that
      repack it: int4 is "w4a16").
    duplicate_head: add a 16-bit copy of a tied head, as the -w4a16-ct exports carry on disk.
    dead_kv: add the k/v projections that Google's plain export ships for sharing layers and that
      nothing reads (they are loaded by engines that do not know better).
    Source: accounting of xbill9/gemma4-dev's reported files and residents (2026-08-20), median
    error 0.0 % over ten figures that it was not fitted to.
    Raises ValueError for an unknown encoding.
    """
    store = _weight_encoding(encoding)
    counts = parameter_counts(geometry)
    size = (
        store.linear * counts.linear
        + store.embedding * (counts.embed + counts.head)
        + store.other * counts.other
        + ple_bytes(geometry, encoding, ple_encoding=ple_encoding)
    )
    if duplicate_head and geometry.tied:
        size += 2 * counts.embed
    if dead_kv:
        size += store.linear * _dead_kv_parameters(geometry)
    return math.ceil(size)


def ple_bytes(geometry: Geometry, encoding: str, *, ple_encoding: str | None = None) -> int:
    """Bytes of the per-layer-embedding table, 0 for a model without one.

    It is gathered row by row, so it may stay in host memory or on disk: llama.cpp maps it, and
    transformers' memory-mapped checkpoint never faults most of it in. On a chip that holds
    everything it counts in full.
    """
    per_row = _weight_encoding(encoding).ple
    if ple_encoding is not None:
        per_row = _weight_encoding(ple_encoding).linear
    return math.ceil(per_row * parameter_counts(geometry).ple_table)


def step_bytes(geometry: Geometry, encoding: str, *, streams: int = 1) -> int:
    """Bytes of weights that one decode step reads for `streams` sequences at once.

    All weights but the PLE table (a gather of a few rows), and of the experts the share that
    `streams` independent choices of top_k touch: 1 - (1 - top_k/experts)^streams. The embedding
    counts once: it is read as the tied head; an untied one makes the embedding a gather.
    Source: the capacity formulas checked against xbill9/gemma4-dev's measured 4.514 GB (E2B
    bf16, T4G, 2026-08) and 1.407 GB (q4_0). KV reads come on top.
    Raises ValueError for an unknown encoding or fewer than one stream.
    """
    if streams < 1:
        raise ValueError(f"streams must be at least 1, not {streams}")
    store = _weight_encoding(encoding)
    counts = parameter_counts(geometry)
    touched = 1.0
    if geometry.experts:
        touched = 1 - (1 - geometry.top_k / geometry.experts) ** streams
    dense = counts.attention + counts.mlp + counts.ple_gates
    return math.ceil(
        store.linear * (dense + touched * counts.experts)
        + store.embedding * (counts.embed if geometry.tied else counts.head)
        + store.other * counts.other
    )


def _weight_encoding(encoding: str) -> WeightEncoding:
    try:
        return WEIGHT_ENCODINGS[encoding]
    except KeyError:
        known = ", ".join(WEIGHT_ENCODINGS)
        raise ValueError(f"encoding {encoding!r} is not known; known: {known}") from None


def _layer_attention(geometry: Geometry, layer: int) -> tuple[int, int]:
    """(matrices with their biases, norm weights) of one layer's attention."""
    g = geometry
    q_width = g.heads * g.head_width(layer)
    projections = 0
    if layer < g.owners:
        projections = 1 if g.k_eq_v and g.is_full(layer) else 2
    kv_width = projections * g.kv_width(layer)
    matrices = 2 * g.hidden * q_width + g.hidden * kv_width
    matrices += (q_width + kv_width if g.qkv_bias else 0) + (g.hidden if g.out_bias else 0)
    norms = (2 if layer < g.owners else 1) * g.head_width(layer) if g.head_norms else 0
    return matrices, norms


def _dead_kv_parameters(geometry: Geometry) -> int:
    shared = range(geometry.owners, geometry.layers)
    return sum(2 * geometry.hidden * geometry.kv_width(layer) for layer in shared)
