"""Figures for /metrics, in the text form of Prometheus and under names in the style of vLLM's.

Knows no request: whoever serves tells what happened. A registry of its own, so that two servers in
one process do not share figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from forge.engines.serving.scheduler_job import SchedulerView

RequestEnd = Literal["stop", "length", "abort", "error"]
_REQUEST_ENDS: tuple[RequestEnd, ...] = ("stop", "length", "abort", "error")
# Seconds: a token of a fast accelerator at one end, a long answer of a slow processor at the other.
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class ServingMetrics:
    """What happened so far, and through `view` what is going on. Any thread may tell."""

    def __init__(self, view: Callable[[], SchedulerView]) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_NowCollector(view))
        self._prompt = _counter(registry, "engine_prompt_tokens", "Tokens of prompts read.")
        self._generated = _counter(registry, "engine_generation_tokens", "Tokens generated.")
        self._ended = Counter(
            "engine_request_success",
            "Requests by what ended them.",
            ["finished_reason"],
            registry=registry,
        )
        for end in _REQUEST_ENDS:
            self._ended.labels(end)  # a figure that is 0 is there
        self._refused = Counter(
            "engine_requests_refused", "Requests refused, by status.", ["status"], registry=registry
        )
        self._calls = Counter(
            "engine_tool_calls",
            "Calls of tools in answers; a broken one was none in its syntax, or was cut off.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("made", "broken"):
            self._calls.labels(outcome)
        self._queue = _histogram(
            registry, "engine_request_queue_time_seconds", "Wait for a slot.", _WAIT_BUCKETS
        )
        self._ttft = _histogram(
            registry, "engine_time_to_first_token_seconds", "Time to first token.", _WAIT_BUCKETS
        )
        self._tpot = _histogram(
            registry,
            "engine_request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _TOKEN_BUCKETS,
        )
        self._e2e = _histogram(
            registry, "engine_e2e_request_latency_seconds", "Time to last token.", _WAIT_BUCKETS
        )

    def queued(self, seconds: float) -> None:
        """A request has got its slot after `seconds` in the queue."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """A prompt is read and the first token there, `seconds` after the request came."""
        self._prompt.inc(prompt_tokens)
        self._ttft.observe(seconds)

    def tokens(self, count: int) -> None:
        """`count` tokens were generated."""
        self._generated.inc(count)

    def calls(self, made: int, broken: int) -> None:
        """Calls of tools were read from an answer, or should have been and could not."""
        self._calls.labels("made").inc(made)
        self._calls.labels("broken").inc(broken)

    def answered(self, seconds: float, after_first_s: float, tokens: int) -> None:
        """An answer of `tokens` was complete `seconds` after its request came."""
        self._e2e.observe(seconds)
        if tokens > 1:
            self._tpot.observe(after_first_s / (tokens - 1))

    def ended(self, how: RequestEnd) -> None:
        """A request that was taken is over."""
        self._ended.labels(how).inc()

    def refused(self, status: int) -> None:
        """A request was not taken."""
        self._refused.labels(str(status)).inc()

    def page(self) -> bytes:
        """All of it in the text format 0.0.4."""
        return generate_latest(self._registry)


def _counter(registry: CollectorRegistry, name: str, words: str) -> Counter:
    return Counter(name, words, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, words: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(name, words, buckets=buckets, registry=registry)


class _NowCollector:
    """What is read at the moment of asking."""

    def __init__(self, view: Callable[[], SchedulerView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        now = self._view()
        figures = {
            "num_requests_running": (now.running, "Requests that hold a slot."),
            "num_requests_waiting": (now.waiting, "Requests that wait for a slot."),
            "kv_cache_usage_perc": (
                now.kv_used_share,
                "Tokens held of those there is room for, 0 to 1.",
            ),
            **{name: (value, "Of the engine itself.") for name, value in now.counters.items()},
        }
        for name, (value, words) in figures.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"engine_{name}", words, value=value)
        yield CounterMetricFamily(
            "engine_requests_constrained",
            "Requests with a shape to keep to that got a slot.",
            value=now.constrained,
        )
        yield CounterMetricFamily(
            "engine_mask_seconds", "Time spent on which tokens may come next.", value=now.mask_s
        )
