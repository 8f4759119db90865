"""The figures of one cell, from the records of its requests: facts in, a report's cell out.

Only requests that completed count. Knows neither connections nor clocks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.parts.boundaries.load_events import StreamRecord
from forge.parts.boundaries.load_plan import LEAST_SECONDS, LoadCellPlan
from forge.parts.knowledge.report_schema import (
    BenchCell,
    CellMetrics,
    ClientHealth,
    GoodputLimits,
    distribution_of,
)

PROMPT_TOLERANCE = 0.05  # of the mean prompt length, against what was asked for
LEAST_SUCCESS = 0.5  # below it a cell has failed, whatever the survivors' latencies are
_ERROR_KINDS = 20


@dataclass
class MeasuredLoad:
    """What a cell's load left. Times are seconds of one clock.

    `window` is the span for which rates are given: in a closed loop from the moment when all
    streams ran to the moment when the first of them found no request left, in an open one the whole
    run. Requests begun before it (the ramp) count for rates within it and for no latency.
    `scheduled` has one entry a record: when an open loop should have sent it.
    """

    records: list[StreamRecord] = field(default_factory=list)
    scheduled: list[float | None] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)
    whole_run: bool = False  # the window had to be the whole run, ramp and drain included
    marks: list[str] = field(default_factory=list)

    def counted(self) -> list[tuple[float | None, StreamRecord]]:
        """The requests begun within or after the window's start, with their schedule."""
        pairs = zip(self.scheduled, self.records, strict=True)
        return [pair for pair in pairs if pair[1].sent >= self.window[0]]


def cell_of_load(
    plan: LoadCellPlan, load: MeasuredLoad, client: ClientHealth, limits: GoodputLimits
) -> BenchCell:
    """The cell that `load` amounts to: ok with metrics, or failed with the reason."""
    counted = load.counted()
    done = [(due, r) for due, r in counted if r.completed]
    errors = Counter(r.fault[:120] for _, r in counted if not r.completed)
    reason = _cell_failure(plan, [r for _, r in counted], [r for _, r in done], errors)
    if reason:
        return plan.cell(status="failed", reason=reason[:2000], client=client)
    metrics = _cell_metrics(plan, load, counted, done, limits)
    metrics = metrics.model_copy(update={"errors": dict(errors.most_common(_ERROR_KINDS))})
    marks = [*load.marks, *_cell_marks(metrics, client)]
    if load.whole_run:
        marks.append("rates are over the whole run, ramp and drain included")
    # A window that ends because the time is over ends a little early or late.
    short = len(counted) < plan.least and load.window[1] - load.window[0] < 0.98 * LEAST_SECONDS
    return plan.cell(
        status="ok", metrics=metrics, client=client, marks=marks[:10], short_sample=short
    )


def _cell_failure(
    plan: LoadCellPlan,
    counted: Sequence[StreamRecord],
    done: Sequence[StreamRecord],
    errors: Counter[str],
) -> str:
    if len(done) < LEAST_SUCCESS * len(counted) or not done:
        listed = "; ".join(f"{count} x {fault}" for fault, count in errors.most_common(3))
        return f"{len(done)} of {len(counted)} requests completed: {listed or 'none was sent'}"
    lengths = [r.prompt_tokens for r in done if r.prompt_tokens is not None]
    mean = statistics.fmean(lengths)
    off = mean / plan.input_tokens - 1
    if abs(off) > PROMPT_TOLERANCE:
        return (
            f"the prompts had {mean:.0f} tokens by the server's count, {off:+.0%} off the "
            f"{plan.input_tokens} asked for"
        )
    return ""


def _cell_marks(metrics: CellMetrics, client: ClientHealth) -> list[str]:
    marks = list(client.faults())
    sent, done = metrics.requests_sent or 0, metrics.requests_completed or 0
    if done < sent:
        marks.append(f"{sent - done} of {sent} requests failed; latencies are of the others")
    if metrics.short_outputs:
        marks.append(f"{metrics.short_outputs} of {done} outputs ended before the length asked for")
    if metrics.cached_tokens:
        marks.append(f"the server took {metrics.cached_tokens} prompt tokens from its cache")
    return marks


def _cell_metrics(
    plan: LoadCellPlan,
    load: MeasuredLoad,
    counted: Sequence[tuple[float | None, StreamRecord]],
    done: Sequence[tuple[float | None, StreamRecord]],
    limits: GoodputLimits,
) -> CellMetrics:
    records = [r for _, r in done]
    ttft = [1000 * (r.arrivals[0] - r.sent) for r in records]
    tpot = [1000 * value for value in map(time_per_token, records) if value is not None]
    gaps = [
        1000 * (b - a) for r in records for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)
    ]
    due_done = [(due, r) for due, r in done if due is not None]
    start, end = load.window
    seconds = max(end - start, 1e-9)
    # All that completed, the ramp's requests too: their tokens were made within the window.
    completed = [r for r in load.records if r.completed]
    shares = [_share_within(r, start, end) for r in completed]
    requests = sum(shares)
    output = sum(s * (r.completion_tokens or 0) for s, r in zip(shares, completed, strict=True))
    prompt = sum(s * (r.prompt_tokens or 0) for s, r in zip(shares, completed, strict=True))
    busy = sum(max(0.0, min(r.ended, end) - max(r.sent, start)) for r in load.records)
    good = sum(within_limits(r, limits) for r in records)
    cached = [r.cached_tokens for r in records if r.cached_tokens is not None]
    tpot_ms = distribution_of(tpot)
    return CellMetrics(
        duration_s=seconds,
        requests_sent=len(counted),
        requests_completed=len(records),
        request_rps=requests / seconds,
        output_tps=output / seconds,
        total_tps=(output + prompt) / seconds,
        per_stream_tps=1000 / tpot_ms.median if tpot_ms and tpot_ms.median else None,
        achieved_concurrency=busy / seconds,
        ttft_ms=distribution_of(ttft),
        tpot_ms=tpot_ms,
        icl_ms=distribution_of(gaps),
        e2e_ms=distribution_of([1000 * (r.arrivals[-1] - r.sent) for r in records]),
        ttft_from_schedule_ms=distribution_of([1000 * (r.arrivals[0] - d) for d, r in due_done]),
        e2e_from_schedule_ms=distribution_of([1000 * (r.arrivals[-1] - d) for d, r in due_done]),
        goodput_rps=good / len(records) * requests / seconds,
        prompt_tokens=distribution_of([float(r.prompt_tokens or 0) for r in records]),
        completion_tokens=distribution_of([float(r.completion_tokens or 0) for r in records]),
        cached_tokens=sum(cached) if cached else None,
        short_outputs=sum((r.completion_tokens or 0) < plan.output_tokens for r in records),
    )


def time_per_token(record: StreamRecord) -> float | None:
    """Seconds per output token after the first: (last - first content) / (tokens - 1).

    None for a single token. Chunks are not counted: one may hold several tokens.
    """
    tokens = record.completion_tokens or 0
    if tokens < 2 or not record.arrivals:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (tokens - 1)


def within_limits(record: StreamRecord, limits: GoodputLimits) -> bool:
    """Whether a completed request kept every limit that is set."""
    tpot = time_per_token(record)
    measured = (
        (limits.ttft_ms, 1000 * (record.arrivals[0] - record.sent)),
        (limits.tpot_ms, None if tpot is None else 1000 * tpot),
        (limits.e2e_ms, 1000 * (record.arrivals[-1] - record.sent)),
    )
    return all(value is None or limit is None or value <= limit for limit, value in measured)


def _share_within(record: StreamRecord, start: float, end: float) -> float:
    """Which share of a request's output came within a span, 0 to 1."""
    times = record.arrivals
    if start <= times[0] and times[-1] <= end:
        return 1.0
    return sum(start <= at <= end for at in times) / len(times)
