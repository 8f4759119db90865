"""What a model takes of a device under an engine: weights, loading peak, cache pool, streams.

Knows no speed and no price, and decides nothing: it lists summands in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forge.parts.knowledge.cache_bytes import kv_bytes, kv_bytes_per_token
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.memory import parameter_counts, ple_bytes, weight_bytes
from forge.parts.knowledge.planner_engines import (
    GIB_BYTES,
    EngineKvLayout,
    EngineProfile,
    EngineTower,
)

KV_ELEMENT_BYTES: Mapping[str, float] = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "f32": 4}
QUANTIZED_ON_LOAD = ("fp8", "int8")  # what vLLM can make of a bf16 checkpoint while loading
# What is known of that: one trial, and a source that nobody has tried on such a card.
ON_LOAD_TRIED = "an L4 was full at 21.61 GiB that way (dev.to, 12B Gemma 4 on Cloud Run, 2026-05)"
ON_LOAD_SINCE = (
    "by its source vLLM 0.32.0 quantises each layer as it is read and may need less, which nobody "
    "is known to have tried there"
)
_VLLM_BASE_BLOCK = 16  # tokens of the smallest cache block on a GPU
_TPU_SEQUENCE_BLOCKS = 512  # vLLM on a TPU cuts the longest sequence into that many blocks


def device_shard(geometry: Geometry, devices: int) -> Geometry:
    """The geometry of one device's share of attention under tensor parallelism, for its cache.

    A single KV head is not split but repeated on every device (E2B). Raises ValueError where the
    query heads do not divide.
    """
    if geometry.heads % devices:
        raise ValueError(f"{geometry.heads} heads do not divide over {devices} devices")
    return replace(
        geometry,
        heads=geometry.heads // devices,
        kv_heads=max(1, geometry.kv_heads // devices),
        global_kv_heads=max(1, geometry.global_kv_heads // devices),
    )


def resident_parts(
    geometry: Geometry,
    encoding: str,
    profile: EngineProfile,
    towers: Mapping[EngineTower, int],
    *,
    devices: int = 1,
) -> dict[str, int]:
    """Bytes of weights that stay on one device, by part; what goes to the host is left out.

    towers: bytes of the vision and audio parts in bf16, of which the engine loads its own. With
    several devices an even split is assumed. Raises ValueError for an unknown encoding.
    """
    table = ple_bytes(geometry, encoding)
    text = weight_bytes(geometry, encoding) - table
    parts: dict[str, int] = {"text weights": text}
    if table and not profile.ple_on_host:
        parts["per-layer embedding table"] = table
    dead = weight_bytes(geometry, encoding, dead_kv=True) - table - text
    if dead and profile.dead_kv and encoding in ("f32", "bf16", "fp16"):
        parts["unused K/V projections of the plain export"] = dead
    for tower in profile.towers:
        if towers.get(tower):
            parts[f"{tower} tower"] = towers[tower]
    return {name: math.ceil(size / devices) for name, size in parts.items()}


def loading_extra(
    geometry: Geometry, encoding: str, profile: EngineProfile, *, from_bf16: bool, devices: int = 1
) -> dict[str, int]:
    """Bytes that one device holds while loading, on top of the resident ones, by reason.

    from_bf16: the whole bf16 text is taken to stand there before anything is quantised: an L4 was
    full on the way from 12B's bf16 to fp8 (see ON_LOAD_TRIED). By its source vLLM 0.32.0 does
    otherwise: built with its CPU release and fp8_per_tensor, 12B's shape holds 2.01 GB (embedding
    and norms) before a weight is read, and 21.83 GB of matrices come one at a time and are made
    eight-bit at once (2026-11-30). No GPU was at hand to see its peak, so the larger one counts.
    The -w4a16-ct exports carry a bf16 copy of the tied head until it is tied.
    """
    extra: dict[str, int] = {}
    if from_bf16:
        extra["bf16 weights before quantisation"] = weight_bytes(geometry, "bf16") - weight_bytes(
            geometry, encoding
        )
    elif encoding == "w4a16" and geometry.tied and not profile.ple_on_host:
        extra["second copy of the tied head"] = 2 * parameter_counts(geometry).embed
    return {name: math.ceil(size / devices) for name, size in extra.items()}


def cache_pool_bytes(
    visible_gib: float, utilization: float, resident: float, overhead: float = 0.0
) -> float:
    """Bytes left for the cache: visible memory x utilization - resident - overhead; may be < 0."""
    return visible_gib * GIB_BYTES * utilization - resident - overhead


def tpu_block_tokens(max_model_len: int) -> int:
    """Tokens of a cache block that vLLM on a TPU derives from the longest sequence: 16 at least.

    Source: xbill9/gemma4-dev, SERVING-PARAMS, 2026-08: 32, 64 and 128 for 16k, 32k and 64k.
    """
    blocks = math.ceil(max_model_len / _TPU_SEQUENCE_BLOCKS)
    return max(16, 1 << max(0, blocks - 1).bit_length())


def uniform_blocks(pool: float, per_token: float, block: int) -> int:
    """Whole blocks of `block` tokens in a pool of bytes."""
    return max(0, math.floor(pool / (block * per_token)))


@dataclass(frozen=True, slots=True)
class HybridPages:
    """vLLM's cache for a model with two kinds of layers: one page size for both.

    block_bytes: bytes of one block, which is a page for each layer of a group.
    full_tokens, sliding_tokens: tokens in a page of either kind. groups: sliding groups beside the
    one of full layers; window: tokens that sliding layers see.
    """

    block_bytes: float
    full_tokens: int
    sliding_tokens: int
    groups: int
    window: int

    def blocks_of(self, context: int, in_flight: int) -> int:
        """Blocks that one request of `context` tokens reserves.

        in_flight: max_num_batched_tokens x batches at once (2 with asynchronous scheduling).
        Sliding layers keep window - 1 + in_flight tokens: a large batch undoes the window.
        """
        held = min(self.window - 1 + in_flight, context)
        sliding = self.groups * (math.ceil(held / self.sliding_tokens) + 1)
        return math.ceil(context / self.full_tokens) + (sliding if self.groups else 0)

    def streams(self, blocks: float, context: int, in_flight: int) -> float:
        """Requests of `context` tokens that `blocks` hold at once, with the fraction."""
        return blocks / self.blocks_of(context, in_flight)

    def printed_tokens(self, blocks: float, context: int, in_flight: int) -> int:
        """What vLLM prints as "GPU KV cache size": its concurrency x max_model_len.

        It moves with max_num_batched_tokens, and is no size of any pool.
        """
        return int(self.streams(blocks, context, in_flight) * context)


def hybrid_pages(geometry: Geometry, element_bytes: float) -> HybridPages:
    """How vLLM's hybrid cache manager lays out this model.

    A page is the larger one of a 16-token block of either kind; the other kind gets more tokens
    into it. Groups have as many layers as the rarer kind. Source: vLLM 0.32; agrees with a T4G
    boot to the integer (329,579 tokens printed for 32,266 blocks; xbill9/gemma4-dev, 2026-08).
    """
    owners = range(geometry.owners)
    full = [layer for layer in owners if geometry.is_full(layer)]
    sliding = [layer for layer in owners if not geometry.is_full(layer)]
    per_token = {
        kind: 2 * geometry.kv_width(layers[0]) * element_bytes if layers else 0.0
        for kind, layers in (("full", full), ("sliding", sliding))
    }
    page = _VLLM_BASE_BLOCK * max(per_token.values())
    group = min((len(layers) for layers in (full, sliding) if layers), default=1)
    return HybridPages(
        block_bytes=group * page,
        full_tokens=round(page / per_token["full"]) if full else 1,
        sliding_tokens=round(page / per_token["sliding"]) if sliding else 1,
        groups=math.ceil(len(sliding) / group),
        window=geometry.window or 0,
    )


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """A pool seen from one context length: bytes a stream, streams that fit, and tokens resident.

    streams carries its fraction. tokens: uniform layouts hold that many at any length; the others
    only at this one. per_token: bytes that one more token of a long conversation takes.
    """

    layout: EngineKvLayout
    stream_bytes: float
    per_token: float
    streams: float
    tokens: int
    detail: str


def cache_room(
    geometry: Geometry,
    pool: float,
    context: int,
    element_bytes: float,
    layout: EngineKvLayout,
    *,
    in_flight: int = 0,
    block: int = 1,
) -> CacheRoom:
    """What a pool of bytes on one device holds at `context` tokens a stream.

    geometry is the device's shard. in_flight matters for "hybrid" only, block (tokens that are
    given out together) for "uniform". A negative pool holds nothing. Raises ValueError for an
    unknown layout.
    """
    pool = max(0.0, pool)
    if layout == "hybrid":
        pages = hybrid_pages(geometry, element_bytes)
        need = pages.blocks_of(context, in_flight)
        blocks = math.floor(pool / pages.block_bytes)
        return CacheRoom(
            layout,
            need * pages.block_bytes,
            kv_bytes_per_token(geometry, element_bytes, "ring"),
            blocks / need,
            int(blocks / need * context),
            f"{blocks} blocks of {pages.block_bytes / 1024:.0f} KiB, {need} a stream with"
            f" {in_flight} tokens in flight",
        )
    if layout == "uniform":
        per_token = kv_bytes_per_token(geometry, element_bytes, "uniform")
        blocks = uniform_blocks(pool, per_token, block)
        need = math.ceil(context / block)
        return CacheRoom(
            layout,
            need * block * per_token,
            per_token,
            blocks / need,
            blocks * block,
            f"{per_token / 1024:g} KiB a token over all layers that own a cache"
            + (f", {blocks} blocks of {block} tokens" if block > 1 else ""),
        )
    one = kv_bytes(geometry, context, 1, element_bytes, layout)
    streams = pool / one
    return CacheRoom(
        layout,
        one,
        kv_bytes_per_token(geometry, element_bytes, "ring"),
        streams,
        math.floor(streams) * context,
        "sliding layers keep their window, full layers the whole context",
    )
