"""Does a model fit on a piece of hardware under an engine, and on what ground does it not.

Every refusal says whether it is arithmetic, that is, bytes that must be there and are not, or an
estimate that somebody may override. Knows no speed and no tool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.engine_profiles import (
    cuda_overhead_bytes,
    engine_profile,
    vllm_batched_tokens,
)
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS, Accelerator
from forge.parts.knowledge.memory import ple_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4, checkpoint_for_repo, model_for_slot
from forge.parts.knowledge.plan_answer import MAX_PLANNED_CONTEXT
from forge.parts.knowledge.planner_engines import GIB_BYTES, EngineProfile, EngineTower
from forge.parts.knowledge.planner_memory import (
    KV_ELEMENT_BYTES,
    ON_LOAD_SINCE,
    ON_LOAD_TRIED,
    QUANTIZED_ON_LOAD,
    CacheRoom,
    cache_pool_bytes,
    cache_room,
    device_shard,
    loading_extra,
    resident_parts,
    tpu_block_tokens,
)

_CLASS_DEFAULT = "transformers 5.24, the class's default"
# Tokens of one conversation by size, and who says so.
_POSITIONS: Mapping[str, tuple[int, str]] = {
    "E2B": (131_072, _CLASS_DEFAULT),
    "E4B": (131_072, _CLASS_DEFAULT),
    "12B": (131_072, "its config.json by recipes.vllm.ai, 2026; its card says up to 256 K"),
}
_ASYNC_BATCHES = 2  # vLLM schedules the next batch while one runs
_MADE_FROM = ("bf16", "fp16", "f32")  # what eight-bit weights are made of while loading
FindingKind = Literal["arithmetic", "estimate"]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What is to be served: its shape, its towers in bytes, and how its weights are stored.

    size: a key of GEMMA4, empty for another model. unknown_towers: parts whose size nobody gave.
    """

    name: str
    size: str
    geometry: Geometry
    towers: Mapping[EngineTower, int]
    stored: str
    unknown_towers: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class FitRequest:
    """One question to the planner. Zero or empty means: the engine's or the hardware's own.

    runtime: a runtime slot ("vllm"). hardware: a hardware slot ("v6e1") or a chip ("h100").
    encoding: how the weights lie in memory, a key of WEIGHT_ENCODINGS. kv_dtype: "auto" or a key of
    KV_ELEMENT_BYTES. context: tokens of one stream, prompt and answer. streams: at once.
    utilization: share of memory given to the engine. batched_tokens: max_num_batched_tokens of
    vLLM. memory_gib: memory of one device that is free; physical_gib: that it has.
    quantize_on_load: None means: wherever no checkpoint of that encoding is published.
    """

    model: PlannedModel
    encoding: str
    runtime: str
    hardware: str
    context: int
    streams: int = 1
    kv_dtype: str = "auto"
    utilization: float = 0.0
    batched_tokens: int = 0
    memory_gib: float = 0.0
    physical_gib: float = 0.0
    quantize_on_load: bool | None = None


@dataclass(frozen=True, slots=True)
class FitFinding:
    """One reason against a plan: arithmetic cannot be overridden, an estimate can."""

    kind: FindingKind
    text: str


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """How memory is spent on one device, in bytes, and what speaks against it.

    resident: weights by part. extra: more of it while loading. usable: what the engine may take of
    `visible`. pool: what is left for the cache, negative when nothing is. room: what it holds.
    kv_element_bytes: bytes that one cached number really takes.
    """

    profile: EngineProfile
    chip: Accelerator
    devices: int
    visible: float
    usable: float
    resident: Mapping[str, int]
    extra: Mapping[str, int]
    overhead: float
    pool: float
    room: CacheRoom
    kv_element_bytes: float
    in_flight: int
    findings: tuple[FitFinding, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.findings

    @property
    def arithmetic(self) -> bool:
        """Whether some refusal cannot be overridden."""
        return any(finding.kind == "arithmetic" for finding in self.findings)

    @property
    def streams(self) -> int:
        """Whole streams of the asked context that are resident at once."""
        limit = self.profile.max_streams
        held = math.floor(self.room.streams)
        return min(held, limit) if limit else held


def planned_model(name: str) -> PlannedModel:
    """A Gemma 4 by size ("E2B"), model slot ("2b") or repository; ValueError for anything else."""
    by_size = {size.lower(): size for size in GEMMA4}
    stored, missing = "bf16", ""
    if name.lower() in by_size:
        model = GEMMA4[by_size[name.lower()]]
    elif "/" in name or ":" in name:
        model, checkpoint = checkpoint_for_repo(name)
        stored = checkpoint.stored
        missing = "" if checkpoint.exists else f"{name} does not exist ({checkpoint.source})"
    else:
        model = model_for_slot(name.lower())
        name = next(key for key, value in GEMMA4.items() if value is model)
    size = next(key for key, value in GEMMA4.items() if value is model)
    figures: dict[EngineTower, int | float | None] = {
        "vision": model.vision_tower.value,
        "audio": model.audio_tower.value,
    }
    return PlannedModel(
        name=name if name.lower() not in by_size else size,
        size=size,
        geometry=model.geometry,
        towers={tower: int(value) for tower, value in figures.items() if value is not None},
        stored=stored,
        unknown_towers=tuple(tower for tower, value in figures.items() if value is None),
        missing=missing,
    )


def planned_hardware(name: str) -> tuple[Accelerator, int]:
    """The chip and the number of devices of a hardware slot, or of a chip's own name (one)."""
    if name in HARDWARE_SLOTS:
        slot = HARDWARE_SLOTS[name]
        return ACCELERATORS[slot.chip], slot.devices
    if name in ACCELERATORS:
        return ACCELERATORS[name], 1
    known = ", ".join(dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]))
    raise ValueError(f"hardware {name!r} is not known; known: {known}")


def is_quantized_on_load(request: FitRequest) -> bool:
    """Whether the engine makes the encoding itself, from a bf16 checkpoint that it loads first."""
    model = request.model
    if request.encoding not in QUANTIZED_ON_LOAD or model.stored == request.encoding:
        return False
    if request.quantize_on_load is not None:
        return request.quantize_on_load
    if model.name != model.size:  # a checkpoint was named, and it is not stored like that
        return True
    return not is_published(request)


def is_published(request: FitRequest) -> bool:
    """Whether some checkpoint of that model stores its weights in the asked encoding."""
    known = GEMMA4[request.model.size].checkpoints if request.model.size else ()
    stored = {entry.stored for entry in known if entry.exists} | {request.model.stored}
    return request.encoding in stored


def fit_verdict(request: FitRequest) -> FitVerdict:
    """Weigh one request, on one device of the hardware.

    Raises ValueError for an unknown hardware, engine, encoding or cache type, for heads that do
    not divide over the devices, and for a chip whose memory is neither in the table nor given.
    """
    chip, devices = planned_hardware(request.hardware)
    profile = engine_profile(request.runtime, chip.chip)
    devices = min(devices, profile.max_devices)
    visible_gib = request.memory_gib or chip.visible_memory.known(
        f"the memory of {chip.name} (give memory_gib)"
    )
    visible = visible_gib * GIB_BYTES
    utilization = request.utilization or profile.utilization.value
    batched = request.batched_tokens or vllm_batched_tokens(visible_gib)
    in_flight = batched * _ASYNC_BATCHES
    overhead = profile.overhead.value
    if profile.layout == "hybrid":
        overhead = cuda_overhead_bytes(batched) if chip.chip != "cpu" else overhead
    element = kv_element_bytes(request, profile)
    model = request.model
    resident = resident_parts(
        model.geometry, request.encoding, profile, model.towers, devices=devices
    )
    extra = loading_extra(
        model.geometry,
        request.encoding,
        profile,
        from_bf16=is_quantized_on_load(request),
        devices=devices,
    )
    usable = min(visible * utilization, visible - profile.reserve.value)
    pool = cache_pool_bytes(usable / GIB_BYTES, 1.0, sum(resident.values()), overhead)
    room = cache_room(
        device_shard(model.geometry, devices),
        pool,
        request.context,
        element,
        profile.layout,
        in_flight=in_flight,
        block=tpu_block_tokens(request.context) if profile.tpu_blocks else 1,
    )
    verdict = FitVerdict(
        profile,
        chip,
        devices,
        visible,
        usable,
        resident,
        extra,
        overhead,
        pool,
        room,
        element,
        in_flight if profile.layout == "hybrid" else 0,
        (),
    )
    physical = (request.physical_gib or visible_gib) * GIB_BYTES
    findings = _arithmetic_findings(request, verdict, physical)
    findings += _estimate_findings(request, verdict, utilization)
    return replace(verdict, findings=tuple(findings))


def kv_element_bytes(request: FitRequest, profile: EngineProfile) -> float:
    """Bytes that one cached number takes: "auto" follows the weights, never below 16 bits."""
    if request.kv_dtype == "auto":
        return 4 if request.encoding == "f32" else 2
    if request.kv_dtype not in KV_ELEMENT_BYTES:
        known = ", ".join(("auto", *KV_ELEMENT_BYTES))
        raise ValueError(f"kv_dtype {request.kv_dtype!r} is not known; known: {known}")
    size = KV_ELEMENT_BYTES[request.kv_dtype]
    return max(2, size) if profile.wide_kv else size


def _arithmetic_findings(
    request: FitRequest, verdict: FitVerdict, physical: float
) -> list[FitFinding]:
    """Bytes without which no engine of this kind can run: bare text weights, and a bare cache."""
    geometry, devices = request.model.geometry, verdict.devices

    def text_weights(encoding: str) -> float:
        table = ple_bytes(geometry, encoding) if verdict.profile.ple_on_host else 0
        return (weight_bytes(geometry, encoding) - table) / devices

    has = f"{_gb(physical)} that {verdict.chip.name} has"
    need = text_weights(request.encoding)
    if need > physical:
        return [
            FitFinding(
                "arithmetic", f"the {request.encoding} text weights alone take {_gb(need)} of {has}"
            )
        ]
    # Whatever the layout, a stream keeps at least its windows and its full layers.
    slots = request.streams if verdict.profile.static_slots else 1
    shard = device_shard(geometry, devices)
    cache = kv_bytes(shard, request.context, slots, verdict.kv_element_bytes, "ring")
    if need + cache > physical:
        text = f"text weights {_gb(need)} and the cache of {slots} x {request.context} tokens"
        return [FitFinding("arithmetic", f"{text} {_gb(cache)} exceed the {has}")]
    return []


def _estimate_findings(
    request: FitRequest, verdict: FitVerdict, utilization: float
) -> list[FitFinding]:
    """What experience speaks against: the engine's share, overheads, reserves, known gaps."""
    profile, found = verdict.profile, []
    resident = sum(verdict.resident.values())
    peak = resident + sum(verdict.extra.values())
    if verdict.extra and peak > verdict.visible:
        text = f"loading holds {_gb(peak)} at its peak ({_named(verdict.extra)} for a while)"
        text = f"{text}, and {_gb(verdict.visible)} are there"
        if is_quantized_on_load(request):
            text = (
                f"{request.encoding} is made while loading, with the bf16 model built first:"
                f" {text}; {ON_LOAD_TRIED}; {ON_LOAD_SINCE}"
            )
        found.append(text)
    if is_quantized_on_load(request) and request.model.stored not in _MADE_FROM:
        found.append(
            f"{request.model.name} holds {request.model.stored}, and {request.encoding} is made of"
            " 16-bit weights alone"
        )
    if verdict.room.streams < 1:
        found.append(
            f"of {_gb(verdict.usable)} for the engine, {_gb(resident)} of weights and"
            f" {_gb(verdict.overhead)} of overhead leave {_gb(max(0.0, verdict.pool))} for a cache"
            f" of which one stream of {request.context} tokens needs"
            f" {_gb(verdict.room.stream_bytes)}"
        )
    elif verdict.streams < request.streams:
        why = "the others wait for room"
        if profile.max_streams == 1:
            why = "it answers one request at a time"
        elif profile.static_slots:
            why = "it makes room for all of them at the start"
        found.append(
            f"{verdict.streams} of {request.streams} streams of {request.context} tokens are"
            f" resident at once; {why}"
        )
    left = verdict.visible * (1 - utilization)
    if left < profile.reserve.value * 0.995 and utilization < 1:
        found.append(
            f"utilization {utilization:g} leaves {_gb(left)} for compiled programs, and"
            f" {_gb(profile.reserve.value)} are needed ({profile.reserve.source})"
        )
    if request.encoding not in profile.encodings:
        loads = ", ".join(profile.encodings)
        found.append(
            f"{profile.name} is not known to load {request.encoding}, only {loads}"
            f" ({profile.encodings_source})"
        )
    if request.model.missing:
        found.append(request.model.missing)
    limit, source = _POSITIONS.get(request.model.size, (MAX_PLANNED_CONTEXT, _CLASS_DEFAULT))
    if request.context > limit:
        found.append(
            f"{request.model.name} takes {limit} positions ({source}; the checkpoint's config.json"
            " decides)"
        )
    return [FitFinding("estimate", text) for text in found]


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _named(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
