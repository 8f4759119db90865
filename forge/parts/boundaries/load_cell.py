"""One cell of a benchmark: calibrate once, warm up, put the load on, and say what came of it.

Knows no file and no process; every event goes to whoever listens.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from forge.parts.boundaries.load_client import LoadClient
from forge.parts.boundaries.load_events import StreamRecord
from forge.parts.boundaries.load_figures import MeasuredLoad, cell_of_load, time_per_token
from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan
from forge.parts.boundaries.load_prompts import PromptMaker, RequestForm
from forge.parts.knowledge.report_schema import (
    BenchCell,
    ClientHealth,
    health_of_client,
    quantile_of,
)
from forge.parts.knowledge.token_fit import TokenFit

_RAMP_LIMIT_S = 10.0
_WARM_UP_TOKENS = 16
_LAG_TICK_S = 0.01
_IN_FLIGHT_LIMIT = 1024  # of an open loop; beyond it requests wait, and their schedule tells
_PROBE_TRIES = 3

LoadTell = Callable[[dict[str, Any]], None]


class ClientGauge:
    """How well this process kept up: share of a core, lag of the loop, chunks read together."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._begun = time.perf_counter()
        self._cpu = time.process_time()
        self._arm()

    def _arm(self) -> None:
        self._due = time.perf_counter() + _LAG_TICK_S
        self._timer = asyncio.get_running_loop().call_later(_LAG_TICK_S, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(0.0, time.perf_counter() - self._due))
        self._arm()

    def stop(self, records: list[StreamRecord]) -> ClientHealth:
        """Health since the gauge was made, over `records`."""
        self._timer.cancel()
        wall = max(time.perf_counter() - self._begun, 1e-9)
        self._lags.append(max(0.0, time.perf_counter() - self._due))
        gaps = sum(max(0, len(r.arrivals) - 1) for r in records)
        return health_of_client(
            cpu_share=(time.process_time() - self._cpu) / wall,
            loop_lag_p99_ms=1000 * quantile_of(sorted(self._lags), 0.99),
            coalesced=sum(r.coalesced for r in records) / gaps if gaps else 0.0,
        )


class Calibration:
    """What was learnt of the server: the form of request it takes, and words to tokens."""

    def __init__(self, plan: LoadPlan, client: LoadClient) -> None:
        self.form = RequestForm(plan.model, plan.temperature)
        self.fit: TokenFit | None = None
        self._client = client
        self._seed = f"{plan.seed}/calibration"

    async def learn(self) -> str:
        """Ask twice, with few and with many words; returns what went wrong, or nothing."""
        points: list[tuple[int, float]] = []
        for words in (16, 160):
            record = await self._ask(words)
            if record.fault:
                return f"the first requests failed: {record.fault}"
            points.append((words, float(record.prompt_tokens or 0)))
        try:
            self.fit = TokenFit.through(points[0], points[1])
        except ValueError as error:
            return str(error)
        return ""

    async def _ask(self, words: int) -> StreamRecord:
        prompt = PromptMaker(self._seed, words).text(0)
        for _ in range(_PROBE_TRIES):
            record = await self._client.ask(self.form.body(prompt, 4))
            if record.http_status in (400, 422):
                for form in self.form.plainer_forms():
                    again = await self._client.ask(form.body(prompt, 4))
                    if again.completed:
                        self.form = form
                        return again
                return record
            if record.completed:
                break
        return record


class CellLoad:
    """Cell `number` of a plan: warm up, load, and say what came of it. Never raises for what a
    server does."""

    def __init__(self, plan: LoadPlan, number: int, client: LoadClient, tell: LoadTell) -> None:
        self._plan, self._cell = plan, plan.cells[number]
        self._client, self._tell = client, tell
        # The number, because a repeat of the cell must not find its prompts in a cache.
        self._seed = f"{plan.seed}/{number}/{self._cell.cell_id}"
        self._load = MeasuredLoad()
        self._count = 0  # requests of this cell, warm-ups included: the number of the next prompt
        self._begun = 0  # requests within the window
        self._started = 0
        self._window_from: float | None = None
        self._window_to: float | None = None
        self._faults_in_row = 0

    async def run(self, calibration: Calibration) -> BenchCell:
        """The finished cell, ok or failed with its reason."""
        fault = "" if calibration.fit is not None else await calibration.learn()
        if fault or calibration.fit is None:
            return self._cell.cell(status="failed", reason=fault)
        self._form = calibration.form
        words = calibration.fit.words_for(self._cell.input_tokens)
        if words < 1:
            least = f"{calibration.fit.template:.0f}"
            reason = f"the chat template and the prompt's frame take {least} tokens already"
            return self._cell.cell(status="infeasible", reason=reason)
        self._prompts = PromptMaker(self._seed, words)
        warm = await self._warm_up()
        good = [record for record in warm if record.completed]
        if not good:
            return self._cell.cell(status="failed", reason=f"every warm-up failed: {warm[0].fault}")
        seen = statistics.fmean(float(record.prompt_tokens or 0) for record in good)
        fit = calibration.fit.moved_through(words, seen)
        self._prompts = PromptMaker(self._seed, fit.words_for(self._cell.input_tokens))
        resent = self._client.resent
        gauge = ClientGauge()
        await (self._closed(_ramp_of(good, self._cell)) if self._cell.concurrency else self._open())
        health = gauge.stop(self._load.records)
        if self._client.resent > resent:
            again = self._client.resent - resent
            told = "requests went again: the server had closed a kept connection"
            self._load.marks.append(f"{again} {told}")
        if not calibration.form.ignore_eos:
            self._load.marks.append("the server refuses ignore_eos: outputs end when they end")
        return cell_of_load(self._cell, self._load, health, self._plan.limits)

    async def _warm_up(self) -> list[StreamRecord]:
        """At least three requests of this cell's shape, as many at once as the cell will have."""
        streams = self._cell.concurrency or 1
        wanted = max(self._plan.warmups, streams)
        tokens = min(self._cell.output_tokens, _WARM_UP_TOKENS)
        await self._client.connect(streams)
        records: list[StreamRecord] = []

        async def stream() -> None:
            while self._count < wanted and not _warm_up_failed(records):
                body = self._next_body(tokens)
                record = await self._client.ask(body)
                records.append(record)
                self._tell_request("warm-up", None, record)

        await asyncio.gather(*(stream() for _ in range(streams)))
        return records

    def _next_body(self, tokens: int) -> bytes:
        self._count += 1
        return self._form.body(self._prompts.text(self._count), tokens)

    async def _one(self, due: float | None) -> None:
        record = await self._client.ask(self._next_body(self._cell.output_tokens))
        self._load.records.append(record)
        self._load.scheduled.append(due)
        ramp = self._window_from is None or record.sent < self._window_from
        self._tell_request("ramp" if ramp else "measured", due, record)
        if record.completed:
            self._faults_in_row = 0
        else:
            self._faults_in_row += 1
            await asyncio.sleep(min(1.0, 0.02 * self._faults_in_row))  # a dead server stays alone

    def _given_up(self) -> bool:
        return self._faults_in_row >= max(10, 2 * (self._cell.concurrency or 1))

    async def _closed(self, ramp_s: float) -> None:
        """`concurrency` streams, each sending its next request when the last one is answered."""
        streams = self._cell.concurrency or 1

        async def stream(number: int) -> None:
            await asyncio.sleep(ramp_s * number / streams)
            self._started += 1
            if self._started == streams:
                self._window_from = time.perf_counter()
            while self._another():
                await self._one(None)

        await asyncio.gather(*(stream(number) for number in range(streams)))
        start = self._window_from or 0.0
        end = self._window_to or start
        last = max((record.ended for record in self._load.records), default=end)
        if end - start < 0.5 * (last - start):
            # So few requests that there was no span of full load: then the drain counts too.
            end, self._load.whole_run = last, True
        self._load.window = (start, end)

    def _another(self) -> bool:
        """Whether a stream may begin another request; the first refusal closes the window."""
        now = time.perf_counter()
        if self._window_to is None and self._window_from is not None:
            late = now - self._window_from >= self._cell.seconds
            if late or self._begun >= self._cell.requests or self._given_up():
                self._window_to = now
            else:
                self._begun += 1
        return self._window_to is None and not self._given_up()

    async def _open(self) -> None:
        """Requests at seeded random (Poisson) moments, whether or not the earlier ones are done."""
        rate = self._cell.rate_rps or 1.0
        source = random.Random(f"{self._seed}/arrivals")
        slots = asyncio.Semaphore(_IN_FLIGHT_LIMIT)
        tasks: set[asyncio.Task[None]] = set()
        start = due = time.perf_counter() + 0.05 + source.expovariate(rate)
        self._window_from = start

        async def request(at: float) -> None:
            async with slots:
                await self._one(at)

        for _ in range(self._cell.requests):
            if due - start > self._cell.seconds or self._given_up():
                break
            while (left := due - time.perf_counter()) > 0:  # a loop's timer may be a little early
                await asyncio.sleep(left)
            task = asyncio.create_task(request(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += source.expovariate(rate)
        backlog = len(tasks)
        await asyncio.gather(*tasks)
        last = max((record.ended for record in self._load.records), default=start)
        self._load.window = (start, max(last, start))
        sent = len(self._load.records)
        if backlog > 0.5 * sent:
            self._load.marks.append(
                f"no steady state: {backlog} of {sent} requests were open when the last one went"
            )

    def _tell_request(self, phase: str, due: float | None, record: StreamRecord) -> None:
        """One line of raw data: everything that the figures are made of."""
        times = record.arrivals
        line: dict[str, Any] = {
            "event": "request",
            "phase": phase,
            "sent": round(record.sent, 6),
            "ended": round(record.ended, 6),
            "first": round(times[0], 6) if times else None,
            "gaps_us": [round(1e6 * (b - a)) for a, b in zip(times, times[1:], strict=False)],
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "coalesced": record.coalesced,
            "finish": record.finish_reason,
        }
        if due is not None:
            line["due"] = round(due, 6)
        if record.fault:
            line["fault"] = record.fault[:500]
        self._tell(line)


def _warm_up_failed(records: list[StreamRecord]) -> bool:
    """Whether it is clear that no warm-up will succeed: two failures and nothing else."""
    return len(records) >= 2 and not any(record.completed for record in records)


def _ramp_of(warm: list[StreamRecord], cell: LoadCellPlan) -> float:
    """Seconds over which the streams start: one answer's length, so that their phases spread."""
    first = statistics.median(record.arrivals[0] - record.sent for record in warm)
    steps = [step for step in map(time_per_token, warm) if step is not None]
    whole = first + (statistics.median(steps) if steps else 0.0) * cell.output_tokens
    return min(_RAMP_LIMIT_S, whole) if (cell.concurrency or 1) > 1 else 0.0
