"""How fast a model decodes on a chip: the roofline, and the same with an engine's constants.

Knows no memory sizes and no price. Nothing here was fitted to make it agree: constants come from
the engines' profiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.memory import parameter_counts, step_bytes
from forge.parts.knowledge.planner_engines import EngineProfile


def active_parameters(geometry: Geometry) -> float:
    """Parameters that one token passes through: without the PLE table, and with top_k experts.

    An untied embedding is a gather and does not count either.
    """
    counts = parameter_counts(geometry)
    idle = float(counts.ple_table + (0 if geometry.tied else counts.embed))
    if geometry.experts:
        idle += counts.experts * (1 - geometry.top_k / geometry.experts)
    return counts.total - idle


def kv_read_bytes(geometry: Geometry, context: int, element_bytes: float) -> float:
    """Bytes of cache that one decode step reads for one stream with `context` tokens behind it.

    Every layer reads, the sharing ones too; sliding layers read their window at most.
    """
    total = 0.0
    for layer in range(geometry.layers):
        seen = context if geometry.is_full(layer) else min(context, geometry.window or context)
        total += 2 * geometry.kv_width(layer) * element_bytes * seen
    return total


def expanded_bytes(geometry: Geometry, streams: int = 1) -> float:
    """Bytes of the bf16 pass that a 4-bit path without a fused kernel adds to every step.

    Attention, MLP and the experts that `streams` tokens touch; the small PLE gates are left out.
    """
    counts = parameter_counts(geometry)
    touched = 0.0
    if geometry.experts:
        touched = 1 - (1 - geometry.top_k / geometry.experts) ** streams
    return 2.0 * (counts.attention + counts.mlp + touched * counts.experts)


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Decode and prompt times of one model on one kind of device, or several of them together.

    bandwidth: GB/s of all devices. compute: TFLOP/s of all devices, None where nobody knows it.
    profile None is the roofline: all of the bandwidth, all of the compute, no engine, no host.
    Traffic between devices costs nothing here, so with several of them it is a ceiling either way.
    """

    geometry: Geometry
    encoding: str
    bandwidth: float
    compute: float | None
    profile: EngineProfile | None = None
    kv_element_bytes: float = 2

    def read_bytes(self, streams: int, context: int) -> float:
        """Bytes that one decode step moves for `streams` streams of `context` tokens."""
        total = float(step_bytes(self.geometry, self.encoding, streams=streams))
        if self.profile is not None and self.profile.reference_int4 and self.encoding == "w4a16":
            total += expanded_bytes(self.geometry, streams)
        return total + streams * kv_read_bytes(self.geometry, context, self.kv_element_bytes)

    def device_ms(self, streams: int, context: int) -> float:
        """A decode step without the host: the slower one of moving and computing, and t0."""
        profile = self.profile
        share = 1.0 if profile is None else profile.efficiency.value
        ms = self.read_bytes(streams, context) / (share * self.bandwidth * 1e6)
        if self.compute is not None:
            ms = max(ms, streams * self._token_flop_ms(self.compute))
        return ms + (0.0 if profile is None else profile.step_overhead.value)

    def step_ms(self, streams: int, context: int) -> float:
        """Time per output token in ms: the device's step and the host's share h(streams)."""
        host = 0.0 if self.profile is None else self.profile.host.ms(streams)
        return self.device_ms(streams, context) + host

    def prefill_ms(self, prompt: int) -> float | None:
        """Compute time of one prompt in ms; None where the chip's compute is unmeasured."""
        return None if self.compute is None else prompt * self._token_flop_ms(self.compute)

    def single_tokens_per_s(self, context: int) -> float:
        """Output tokens per second of one stream while it decodes."""
        return 1000 / self.step_ms(1, context)

    def tokens_per_s(self, streams: int, prompt: int, output: int) -> float:
        """Output tokens per second of `streams` streams, each `prompt` tokens in, `output` out.

        streams x output / ((output - 1) x step + streams x prefill), the step at half the output.
        Prompts cost nothing where the chip's compute is unmeasured.
        """
        step = self.step_ms(streams, prompt + output // 2)
        prompts = streams * (self.prefill_ms(prompt) or 0.0)
        return 1000 * streams * output / (max(1, output - 1) * step + prompts)

    def best_streams(self, limit: int, prompt: int, output: int) -> int:
        """The number of streams, up to `limit`, with the most output: powers of two and the limit.

        The smallest one that comes within 5 % of the most: more would only wait longer.
        """
        tried = sorted({min(limit, 1 << power) for power in range(limit.bit_length() + 1)})
        rates = {streams: self.tokens_per_s(streams, prompt, output) for streams in tried}
        enough = 0.95 * max(rates.values())
        return min(streams for streams, rate in rates.items() if rate >= enough)

    def _token_flop_ms(self, compute: float) -> float:
        """ms of compute for one token, forward: two operations a parameter."""
        share = 1.0 if self.profile is None else self.profile.prefill_share.value
        return 2 * active_parameters(self.geometry) / (share * compute * 1e9)
