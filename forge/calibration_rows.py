"""The rows of the planner's calibration: what others reported, and the call that predicts it.

Reported figures are typed in with their source; predictions are calls of the planner, evaluated
when the table is printed. Kinds: P a priori or out of sample, F fitted (the planner's constants
come from this very figure), I identity (the reporter's own arithmetic, repeated), S the source is
wrong, X the model fails. A row keeps its kind; nothing was refitted to make a median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from forge.parts.knowledge.cache_bytes import kv_bytes_per_token, kv_ring_bytes
from forge.parts.knowledge.engine_profiles import cuda_overhead_bytes, engine_profile
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import ple_bytes, step_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.planner_engines import GIB_BYTES
from forge.parts.knowledge.planner_fit import planned_model
from forge.parts.knowledge.planner_memory import (
    cache_pool_bytes,
    hybrid_pages,
    resident_parts,
    tpu_block_tokens,
    uniform_blocks,
)

CalibrationKind = Literal["P", "F", "I", "S", "X"]


class ReportOrigin(NamedTuple):
    """Who printed a figure, and when."""

    source: str
    date: str


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One reported figure. `figure` names it with its unit; `reported` is in that unit.

    origin: who reported it and when. note: why an S or X row is one, or what a reader needs.
    """

    kind: CalibrationKind
    figure: str
    reported: float
    origin: ReportOrigin
    predict: Callable[[], float]
    note: str = ""


GB, KIB, MIB = 1e9, 1024, 2**20
V6E_ARTICLE = ReportOrigin("dev.to, Self-Hosted Gemma 4 on TPU v6e", "2026-07-25")
V6E_GRID = ReportOrigin("xbill9/gemma4-dev, v6e grid of vLLM", "2026-07-25")
RUN_ARTICLE = ReportOrigin("dev.to, 12B Gemma 4 on Cloud Run", "2026")
_VLLM_ISSUE = ReportOrigin("vLLM issue 43308", "2026")
_METAL_ISSUE = ReportOrigin("vllm-metal issue 563", "2026")
_READ_BACK = 8.97 * GIB_BYTES  # resident bytes of E2B that vLLM printed on v5e and v6e
_ISSUE_POOL = 50e9  # "about 50 GB" of cache in vLLM issue 43308


def from_dev(date: str) -> ReportOrigin:
    """The predecessor's public repository, at the date of the report within it."""
    return ReportOrigin("xbill9/gemma4-dev", date)


def shape_of(size: str) -> Geometry:
    """The geometry of a size, read when the row is evaluated."""
    return GEMMA4[size].geometry


def resident_bytes(size: str, encoding: str, runtime: str, chip: str) -> float:
    """Bytes that the planner keeps on a device for a size under an engine."""
    towers = planned_model(size).towers
    profile = engine_profile(runtime, chip)
    return sum(resident_parts(shape_of(size), encoding, profile, towers).values())


def _tower(size: str) -> float:
    return GEMMA4[size].vision_tower.known("vision")


def _towers(size: str) -> float:
    return _tower(size) + GEMMA4[size].audio_tower.known("audio")


def _visible(chip: str) -> float:
    return ACCELERATORS[chip].visible_memory.known(chip)


def _per_token(size: str) -> float:
    return kv_bytes_per_token(shape_of(size), 2, "uniform")


def _tpu_blocks(chip: str, utilization: float, resident: float, longest: int) -> int:
    pool = cache_pool_bytes(_visible(chip), utilization, resident)
    return uniform_blocks(pool, _per_token("E2B"), tpu_block_tokens(longest))


def _tpu_tokens(chip: str, utilization: float, resident: float, longest: int) -> int:
    return _tpu_blocks(chip, utilization, resident, longest) * tpu_block_tokens(longest)


def _plain_tpu_tokens(size: str, resident: float, geometry: Geometry | None = None) -> float:
    """Tokens on a v6e at .90, in whole tokens; residents of E4B and 12B were not read back."""
    per_token = kv_bytes_per_token(geometry or shape_of(size), 2, "uniform")
    return cache_pool_bytes(_visible("v6e"), 0.90, resident) / per_token


def _gpu_pool(chip: str, size: str, encoding: str, runtime: str, batched: int) -> float:
    resident = resident_bytes(size, encoding, runtime, chip)
    return cache_pool_bytes(_visible(chip), 0.90, resident, cuda_overhead_bytes(batched))


def _gpu_blocks(
    chip: str, size: str, encoding: str, runtime: str, batched: int, kv: float
) -> float:
    pool = _gpu_pool(chip, size, encoding, runtime, batched)
    return pool / hybrid_pages(shape_of(size), kv).block_bytes


def _hybrid_tokens(size: str, pool: float, longest: int, batched: int) -> float:
    pages = hybrid_pages(shape_of(size), 2)
    return pages.streams(pool / pages.block_bytes, longest, 2 * batched) * longest


WEIGHT_ROWS: tuple[CalibrationRow, ...] = (
    CalibrationRow(
        "P",
        "E2B bf16 resident, JAX engine on a T4G, GB",
        9.26,
        from_dev("2026-08"),
        lambda: resident_bytes("E2B", "bf16", "jax", "t4g") / GB,
        "text without the dead K/V of the 20 sharing layers",
    ),
    CalibrationRow(
        "P",
        "E2B bf16 resident, vLLM on TPU, GiB",
        8.97,
        from_dev("2026-08-10"),
        lambda: resident_bytes("E2B", "bf16", "vllm", "v6e") / GIB_BYTES,
        "text, vision, 37.7 MB of dead K/V; no audio tower",
    ),
    CalibrationRow(
        "S",
        "E2B bf16 on v6e, the article's 5.5 to 6 GiB",
        5.75,
        V6E_ARTICLE,
        lambda: (weight_bytes(shape_of("E2B"), "bf16") + _tower("E2B")) / GIB_BYTES,
        "it left out the 4.4 GiB of per-layer embeddings; 8.97 were read back",
    ),
    CalibrationRow(
        "F",
        "E2B bf16 checkpoint file, GB",
        10.25,
        from_dev("2026-08-20"),
        lambda: (weight_bytes(shape_of("E2B"), "bf16", dead_kv=True) + _towers("E2B")) / GB,
        "circular: the audio tower was first sized by this difference",
    ),
    CalibrationRow(
        "F",
        "E2B w4a16-ct checkpoint file, GB",
        8.32,
        from_dev("2026-09-04"),
        lambda: (weight_bytes(shape_of("E2B"), "w4a16", duplicate_head=True) + _towers("E2B")) / GB,
        "embeddings stay bf16, and a second bf16 head is on disk",
    ),
    CalibrationRow(
        "P",
        "E2B w4a16 resident, JAX engine, GB",
        6.62,
        from_dev("2026-07-29"),
        lambda: resident_bytes("E2B", "w4a16", "jax", "v6e") / GB,
        "6.56 on inf2",
    ),
    CalibrationRow(
        "P",
        "E2B w4a16 with an int4 per-layer table, JAX engine, GB",
        3.11,
        from_dev("2026-07-29"),
        lambda: weight_bytes(shape_of("E2B"), "w4a16", ple_encoding="w4a16") / GB,
    ),
    CalibrationRow(
        "F",
        "E2B q4_0 GGUF file, GB",
        3.35,
        from_dev("2026-09-02"),
        lambda: weight_bytes(shape_of("E2B"), "q4_0") / GB,
        "some 16 MB of tokenizer and metadata are not modelled",
    ),
    CalibrationRow(
        "F",
        "E2B q4_0, per-layer table's share of the file, %",
        58,
        from_dev("2026-09-03"),
        lambda: 100 * ple_bytes(shape_of("E2B"), "q4_0") / (3.35 * GB),
    ),
    CalibrationRow(
        "F",
        "12B bf16 weights, GB",
        23.9,
        from_dev("2026-08-20"),
        lambda: resident_bytes("12B", "bf16", "vllm", "l4") / GB,
        "the towers' 0.1 GB is this difference",
    ),
    CalibrationRow(
        "X",
        "12B bf16 on an L4 'before KV', GiB",
        21.61,
        RUN_ARTICLE,
        lambda: resident_bytes("12B", "bf16", "vllm", "l4") / GIB_BYTES,
        "no model size: how far torch got before the card's 22.03 GiB were full",
    ),
    CalibrationRow(
        "P",
        "12B fp8, GB",
        13.4,
        RUN_ARTICLE,
        lambda: resident_bytes("12B", "fp8", "vllm", "l4") / GB,
        "the bf16 embedding's 2.0 GB stay; the 12.0 named there as well would be 7 % low",
    ),
    CalibrationRow(
        "P",
        "12B w4a16 resident, JAX engine on v6e, GB",
        8.15,
        from_dev("2026-08"),
        lambda: resident_bytes("12B", "w4a16", "jax", "v6e") / GB,
        "'about 6 GB' elsewhere leaves out the tied bf16 embedding",
    ),
    CalibrationRow(
        "F",
        "12B w4a16-ct checkpoint file, GB",
        10.26,
        from_dev("2026-08-20"),
        lambda: (weight_bytes(shape_of("12B"), "w4a16", duplicate_head=True) + _tower("12B")) / GB,
        "a second bf16 head is on disk",
    ),
    CalibrationRow(
        "P",
        "26B-A4B w4a16, repacked, resident, GB",
        15.27,
        from_dev("2026-08-20"),
        lambda: resident_bytes("26B-A4B", "w4a16", "jax", "v6e") / GB,
    ),
    CalibrationRow(
        "F",
        "26B-A4B bf16 checkpoint file, GB",
        51.61,
        from_dev("2026-08-20"),
        lambda: (weight_bytes(shape_of("26B-A4B"), "bf16") + _tower("26B-A4B")) / GB,
        "the vision tower was sized by this difference",
    ),
    CalibrationRow(
        "P",
        "31B w4a16 resident, JAX engine, GB",
        19.3,
        from_dev("2026-08"),
        lambda: resident_bytes("31B", "w4a16", "jax", "v6e") / GB,
    ),
    CalibrationRow(
        "P",
        "31B w4a16 text tensors read from the host, GB",
        22.11,
        from_dev("2026-08"),
        lambda: weight_bytes(shape_of("31B"), "w4a16", duplicate_head=True) / GB,
        "resident and a second head",
    ),
    CalibrationRow(
        "P",
        "31B bf16, GB",
        62,
        from_dev("2026-08-20"),
        lambda: weight_bytes(shape_of("31B"), "bf16") / GB,
        "rounded by the reporter",
    ),
    CalibrationRow(
        "X",
        "E2B q4_0 in llama.cpp on a GTX 1650 Ti, MiB",
        1618,
        from_dev("2026-09-03"),
        lambda: resident_bytes("E2B", "q4_0", "llamacpp", "1650ti") / MIB,
        "weights only; the other 277 MiB are cache and buffers, which its -c and -np decide",
    ),
    CalibrationRow(
        "F",
        "E2B bf16 in transformers on a CPU, peak RSS, GB",
        5.71,
        from_dev("2026-09-04"),
        lambda: (
            (
                step_bytes(shape_of("E2B"), "bf16")
                + _tower("E2B")
                + engine_profile("pytorch", "cpu").overhead.value
            )
            / GB
        ),
        "0.8 GB of Python and torch were fitted here; the per-layer table stays in the page cache",
    ),
)

KV_ROWS: tuple[CalibrationRow, ...] = (
    CalibrationRow(
        "I",
        "E2B bf16 cache, all 15 owning layers, KiB a token",
        18,
        from_dev("2026-08-10"),
        lambda: kv_bytes_per_token(shape_of("E2B"), 2, "uniform") / KIB,
    ),
    CalibrationRow(
        "S",
        "E2B bf16 cache, the article's 15 KiB a token",
        15,
        V6E_ARTICLE,
        lambda: kv_bytes_per_token(shape_of("E2B"), 2, "uniform") / KIB,
        "3 of the 15 layers are 512 wide",
    ),
    CalibrationRow(
        "I",
        "E4B bf16 cache, KiB a token",
        56,
        from_dev("2026-08-20"),
        lambda: kv_bytes_per_token(shape_of("E4B"), 2, "uniform") / KIB,
    ),
    CalibrationRow(
        "I",
        "12B bf16 cache, uniform, KiB a token",
        336,
        from_dev("2026-08-20"),
        lambda: kv_bytes_per_token(shape_of("12B"), 2, "uniform") / KIB,
    ),
    CalibrationRow(
        "I",
        "31B bf16 cache, full layers only, KiB a token",
        80,
        from_dev("2026-08-20"),
        lambda: kv_bytes_per_token(shape_of("31B"), 2, "ring") / KIB,
    ),
    CalibrationRow(
        "I",
        "31B sliding rings, MB a stream",
        838.9,
        from_dev("2026-08-20"),
        lambda: kv_ring_bytes(shape_of("31B"), 2) / 1e6,
    ),
    CalibrationRow(
        "P",
        "v5e E2B at .92, tokens in blocks of 32",
        321_400,
        from_dev("2026-08-09"),
        lambda: _tpu_tokens("v5e", 0.92, _READ_BACK, 16_384),
        "from the resident 8.97 GiB that were read back",
    ),
    CalibrationRow(
        "P",
        "v5e E2B at .95, tokens in blocks of 32",
        348_896,
        from_dev("2026-08-09"),
        lambda: _tpu_tokens("v5e", 0.95, _READ_BACK, 16_384),
    ),
    CalibrationRow(
        "P",
        "v6e E2B at .90, blocks of 128",
        8_713,
        V6E_ARTICLE,
        lambda: _tpu_blocks("v6e", 0.90, _READ_BACK, 65_536),
        "28.12 GiB are 8.97 of weights and 19.15 of cache; there is no 6 GiB workspace",
    ),
    CalibrationRow(
        "S",
        "v6e E2B at .90, the article's cache, GiB",
        16.3,
        V6E_ARTICLE,
        lambda: _tpu_tokens("v6e", 0.90, _READ_BACK, 65_536) * _per_token("E2B") / GIB_BYTES,
        "15 instead of 18 KiB a token (and its own product is 15.95)",
    ),
    CalibrationRow(
        "P",
        "v6e E2B at .92, tokens in blocks of 64",
        1_151_744,
        from_dev("2026-08-10"),
        lambda: _tpu_tokens("v6e", 0.92, _READ_BACK, 32_768),
    ),
    CalibrationRow(
        "P",
        "the same, from predicted weights",
        1_151_744,
        from_dev("2026-08-10"),
        lambda: _tpu_tokens("v6e", 0.92, resident_bytes("E2B", "bf16", "vllm", "v6e"), 32_768),
    ),
    CalibrationRow(
        "F",
        "T4G vLLM E2B, printed 'GPU KV cache size', tokens, from 32,266 blocks",
        329_579,
        from_dev("2026-08"),
        lambda: hybrid_pages(shape_of("E2B"), 2).printed_tokens(32_266, 16_384, 2 * 2048),
        "integer-consistent; tokens in flight are 2 x 2048",
    ),
    CalibrationRow(
        "P",
        "T4G vLLM E2B, cache from 32,266 blocks, GiB",
        2.95,
        from_dev("2026-08"),
        lambda: 32_266 * hybrid_pages(shape_of("E2B"), 2).block_bytes / GIB_BYTES,
    ),
    CalibrationRow(
        "F",
        "T4G vLLM E2B, printed concurrency at 16,384",
        20.12,
        from_dev("2026-08"),
        lambda: hybrid_pages(shape_of("E2B"), 2).streams(32_266, 16_384, 2 * 2048),
    ),
    CalibrationRow(
        "F",
        "T4G vLLM E2B, cache a priori at .9, all towers, GiB",
        2.95,
        from_dev("2026-08"),
        lambda: _gpu_pool("t4g", "E2B", "bf16", "vllm", 2048) / GIB_BYTES,
        "the overhead of .6 GiB was fitted here",
    ),
    CalibrationRow(
        "F",
        "MI300X E2B at 32,768, tokens, reading A: 16,384 in flight, 1,146,983 blocks",
        9_026_017,
        from_dev("2026-09-16"),
        lambda: hybrid_pages(shape_of("E2B"), 2).printed_tokens(1_146_983, 32_768, 2 * 8192),
        "105.0 GiB: needs 8192 batched tokens and a utilization of about .60",
    ),
    CalibrationRow(
        "F",
        "MI300X E2B at 32,768, tokens, reading B: 32,768 in flight, 1,693,480 blocks",
        9_026_017,
        from_dev("2026-09-16"),
        lambda: hybrid_pages(shape_of("E2B"), 2).printed_tokens(1_693_480, 32_768, 2 * 16_384),
        "155.0 GiB: vLLM 0.32's default from 160 GiB on; .90 leaves 7.9 GiB for activations",
    ),
    CalibrationRow(
        "I",
        "MI300X E2B, concurrency at 32,768",
        275.45,
        from_dev("2026-09-16"),
        lambda: hybrid_pages(shape_of("E2B"), 2).streams(1_693_480, 32_768, 2 * 16_384),
    ),
    CalibrationRow(
        "P",
        "MI300X E2B, tokens a priori at .90, 32,768 in flight, overhead .6 GiB",
        9_026_017,
        from_dev("2026-09-16"),
        lambda: _hybrid_tokens(
            "E2B", _gpu_pool("mi300x", "E2B", "bf16", "vllm", 2048), 32_768, 16_384
        ),
        "the activations of 16,384 batched tokens are not in it",
    ),
    CalibrationRow(
        "X",
        "MI300X E2B, the same pool with 8192 batched tokens, concurrency at 32,768",
        275.45,
        from_dev("2026-09-16"),
        lambda: hybrid_pages(shape_of("E2B"), 2).streams(1_693_480, 32_768, 2 * 8192),
        "a what-if, not a prediction: one flag would give 48 % more streams",
    ),
    CalibrationRow(
        "X",
        "MI300X E2B, tokens a priori at .90 without the hybrid cache (18 KiB)",
        9_026_017,
        from_dev("2026-09-16"),
        lambda: (
            uniform_blocks(_gpu_pool("mi300x", "E2B", "bf16", "vllm", 2048), _per_token("E2B"), 16)
            * 16
        ),
        "excluded: such totals are multiples of 16, and 9,026,017 is odd",
    ),
    CalibrationRow(
        "F",
        "L4 12B fp8 with an fp8 cache, blocks",
        13_278,
        RUN_ARTICLE,
        lambda: _gpu_blocks("l4", "12B", "fp8", "vllm", 4096, 1),
        "the overhead of 1.2 GiB was fitted on the two L4 boots",
    ),
    CalibrationRow(
        "P",
        "L4 12B fp8 with a bf16 cache, blocks",
        6_695,
        RUN_ARTICLE,
        lambda: _gpu_blocks("l4", "12B", "fp8", "vllm", 4096, 2),
    ),
    CalibrationRow(
        "F",
        "L4 12B, cache implied by 13,278 fp8 blocks against 6,695 bf16 blocks, GiB",
        6.538,
        RUN_ARTICLE,
        lambda: 13_278 * hybrid_pages(shape_of("12B"), 1).block_bytes / GIB_BYTES,
        "the two boots agree",
    ),
    CalibrationRow(
        "P",
        "A100 80 GB, 31B 4-bit, vLLM 0.20 without hybrid cache, tokens of about 50 GB",
        55_000,
        _VLLM_ISSUE,
        lambda: _ISSUE_POOL / _per_token("31B"),
    ),
    CalibrationRow(
        "P",
        "A100 80 GB, 31B 4-bit, vLLM 0.21 with hybrid cache, tokens at 262,144",
        525_000,
        _VLLM_ISSUE,
        lambda: _hybrid_tokens("31B", _ISSUE_POOL, 262_144, 2048),
        "an A100 keeps 2048 batched tokens",
    ),
    CalibrationRow(
        "P",
        "vllm-metal 31B, tokens at 32,768 with hybrid cache (35,552 before)",
        143_300,
        _METAL_ISSUE,
        lambda: _hybrid_tokens("31B", 35_552 * _per_token("31B"), 32_768, 2048),
        "2 x 2048 in flight are assumed",
    ),
    CalibrationRow(
        "P",
        "vllm-metal 26B-A4B, tokens at 32,768 with hybrid cache (171,536 before)",
        664_200,
        _METAL_ISSUE,
        lambda: _hybrid_tokens("26B-A4B", 171_536 * _per_token("26B-A4B"), 32_768, 2048),
        "2 x 2048 in flight are assumed",
    ),
    CalibrationRow(
        "P",
        "v6e E4B at .9, tokens: the knee between 8192 x 32 fitting or not",
        266_240,
        V6E_GRID,
        lambda: _plain_tpu_tokens("E4B", weight_bytes(shape_of("E4B"), "bf16") + _tower("E2B")),
        "queueing was seen to start between 16 and 64 streams; E2B's vision tower stands in",
    ),
    CalibrationRow(
        "X",
        "v6e 12B at .9, tokens (about 8.7 K inferred from saturation)",
        8_700,
        V6E_GRID,
        lambda: _plain_tpu_tokens("12B", resident_bytes("12B", "bf16", "vllm", "v6e")),
        "fails by 2: an untied copy of the head (1.9 GiB) and padded full-layer heads would do it",
    ),
    CalibrationRow(
        "X",
        "v6e 12B, the same with an untied head and 8 KV heads on full layers",
        8_700,
        V6E_GRID,
        lambda: _plain_tpu_tokens(
            "12B",
            weight_bytes(shape_of("12B"), "bf16", duplicate_head=True) + _tower("12B"),
            replace(shape_of("12B"), global_kv_heads=8),
        ),
        "a hypothesis only, nobody has looked",
    ),
)
