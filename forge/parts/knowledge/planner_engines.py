"""What the planner must be told of an engine: its shares, overheads and ways with memory.

Types only; the values stand in the engines' profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB_BYTES = 2**30
# imported: read off a report or a source text. fitted: chosen so that the named figures come out.
# borrowed: another engine's value, for want of one. placeholder: a guess that nothing supports yet.
EngineBasis = Literal["imported", "fitted", "borrowed", "placeholder"]
# "hybrid" is vLLM's paged cache for two kinds of layers; the other two are the memory module's.
EngineKvLayout = Literal["uniform", "ring", "hybrid"]
EngineTower = Literal["vision", "audio"]


@dataclass(frozen=True, slots=True)
class EngineValue:
    """One constant of an engine: the number, how it was come by, from what, and when."""

    value: float
    basis: EngineBasis
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class HostCurve:
    """Milliseconds that host and scheduler add to a decode step, by streams: h(c).

    points: (streams, ms), rising. One stream costs nothing extra: that is in the step's overhead.
    Beyond the last point the last ratio goes on, which is a guess and is called one.
    """

    points: tuple[tuple[int, float], ...]
    basis: EngineBasis
    source: str
    date: str

    def ms(self, streams: int) -> float:
        """h(streams) in ms: linear between points, proportional beyond the last; 0 without any."""
        known = ((1, 0.0), *self.points)
        if streams <= 1 or not self.points:
            return 0.0
        last_streams, last_ms = known[-1]
        if streams > last_streams:
            return last_ms * streams / last_streams
        for (low, low_ms), (high, high_ms) in zip(known, known[1:], strict=False):
            if streams <= high:
                return low_ms + (high_ms - low_ms) * (streams - low) / (high - low)
        return last_ms

    def reaches(self, streams: int) -> bool:
        """Whether `streams` lies within what was measured."""
        return streams <= 1 or (bool(self.points) and streams <= self.points[-1][0])


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine on one family of chips.

    efficiency: share of the memory's peak bandwidth that a decode step reaches.
    step_overhead: ms of a decode step that move no weights. host: h(c) on top, for c streams.
    prefill_share: share of peak compute that a prompt reaches.
    overhead: bytes that the engine holds beside weights and cache, inside its share of memory.
    utilization: the share of visible memory that it takes; reserve: bytes that must stay outside.
    layout: how its cache lies. towers: which of them it loads, with `dead_kv` the unused K/V
      projections of the plain E2B and E4B exports too.
    ple_on_host: the PLE table (and the embedding's gather) stays in the host's memory.
    encodings: what it can load; an encoding outside is refused softly, with `encodings_source`.
    reference_int4: 4-bit weights are expanded to bf16 in every step: packed read + one bf16 pass.
    tpu_blocks: its cache comes in the blocks that vLLM on a TPU derives from the longest sequence.
    wide_kv: a one-byte cache takes two bytes a number all the same.
    static_slots: caches of all streams are made at the start; otherwise requests wait for pages.
    max_streams: streams that decode together; 0 without a limit of its own. max_devices: over
      how many devices it splits a model.
    """

    name: str
    efficiency: EngineValue
    step_overhead: EngineValue
    host: HostCurve
    prefill_share: EngineValue
    overhead: EngineValue
    utilization: EngineValue
    reserve: EngineValue
    layout: EngineKvLayout
    towers: tuple[EngineTower, ...]
    encodings: tuple[str, ...]
    encodings_source: str
    dead_kv: bool = False
    ple_on_host: bool = False
    reference_int4: bool = False
    tpu_blocks: bool = False
    wide_kv: bool = False
    static_slots: bool = False
    max_streams: int = 0
    max_devices: int = 1
    caveat: str = ""
