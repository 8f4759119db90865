"""Continuous batching: one thread drives the engine, and every conversation gets its turn.

Knows no text, no HTTP and no array library: a job says what it wants and takes tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from forge.engines.serving.scheduler_job import (
    NotServing,
    QueueFull,
    SchedulerJob,
    SchedulerPhase,
    SchedulerView,
    Ticket,
)
from forge.engines.serving.slot_engine import (
    EngineFault,
    EngineLimits,
    LoadReport,
    SlotEngine,
    StepToken,
    TokenMask,
)

_NEWEST_WEIGHT = 0.1  # of the conversation that ended last, in the mean length of one
_COUNTERS_EVERY_S = 1.0
_STOPPING = "the server is stopping"


class Scheduler:
    """Hands slots out in the order of arrival and keeps all of them busy.

    Each turn reads a chunk's worth of prompts, the oldest first, and decodes once for all that are
    read, so that a long prompt cannot hold up the others' answers, nor they it; short ones share a
    turn. While one that has a constraint answers, a dispatch gives one token of each, for the next
    mask follows from it: that costs every token 0.3 to 0.7 ms more (4 rows on 2 busy cores of an
    AMD EPYC, Zen 4), whatever the model's size. `queue` is how many conversations may wait beyond
    those that have a slot. Every public method may be called from any thread.
    """

    def __init__(
        self, engine: SlotEngine, queue: int, report: LoadReport = lambda share, doing: None
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._report = report
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards all that follows
        self._phase: SchedulerPhase = "loading"
        self._progress, self._doing = 0.0, "starting"
        self._limits: EngineLimits | None = None
        self._counters: Mapping[str, float] = {}
        self._waiting: deque[Ticket] = deque()
        self._withdrawn: list[Ticket] = []  # cancelled in the queue, and not told yet
        self._seats: list[Ticket] = []  # in the order of their seating
        self._free: list[int] = []
        self._aborting = False
        self._seconds_each = 1.0  # how long a conversation holds its slot, about
        self._counted_at = 0.0
        self._constrained = 0
        self._mask_s = 0.0

    def start(self) -> None:
        """Load the engine and serve, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        """The engine's limits. Raises NotServing before it is loaded."""
        with self._wake:
            if self._limits is None:
                raise NotServing(self._said())
            return self._limits

    def submit(self, job: SchedulerJob) -> Ticket:
        """Queue `job`. Raises QueueFull, or NotServing while loading and after the end."""
        with self._wake:
            if self._phase != "serving" or self._limits is None:
                raise NotServing(self._said())
            slots = self._limits.slots
            if len(self._waiting) + len(self._seats) >= slots + self._queue:
                until_free = self._seconds_each * (len(self._waiting) + 1) / slots
                raise QueueFull(max(1, min(60, round(until_free))))
            ticket = Ticket(job)
            self._waiting.append(ticket)
            self._wake.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more: its slot is freed before the next dispatch."""
        with self._wake:
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._withdrawn.append(ticket)
            self._wake.notify_all()

    def drain(self) -> None:
        """Take no new job; what is under way or waits is still answered."""
        with self._wake:
            if self._phase in ("loading", "serving"):
                self._phase = "draining"
            self._wake.notify_all()

    def abort(self) -> None:
        """Drain, but break off what is under way and what waits, before the next dispatch."""
        self.drain()
        with self._wake:
            self._aborting = True
            self._wake.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Abort, and whether the thread has ended within `timeout_s`: loading and a dispatch cannot
        be broken off."""
        self.abort()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float) -> bool:
        """Drain, and whether all was answered and the thread has ended within `timeout_s`."""
        self.drain()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def view(self) -> SchedulerView:
        """What is going on, for the pages of health and metrics."""
        with self._wake:
            room = self._limits.slots * self._limits.context if self._limits else 0
            held = sum(len(seat.job.prompt) + seat.produced for seat in self._seats)
            return SchedulerView(
                phase=self._phase,
                progress=self._progress,
                doing=self._said(),
                running=len(self._seats),
                waiting=len(self._waiting),
                kv_used_share=held / room if room else 0.0,
                counters=self._counters,
                constrained=self._constrained,
                mask_s=self._mask_s,
            )

    def _said(self) -> str:
        if self._phase == "loading":
            return f"the model is being loaded, {self._progress:.0%}: {self._doing}"
        if self._phase == "failed":
            return f"the engine has failed: {self._doing}"
        return {"draining": _STOPPING, "closed": "the server has stopped"}.get(self._phase, "ready")

    def _run(self) -> None:
        """The thread: load, then turn after turn until there is nothing left to do."""
        try:
            self._engine.load(self._loading)
            with self._wake:
                self._limits = self._engine.limits
                self._free = list(range(self._limits.slots))
                self._progress, self._doing = 1.0, "loaded"
                if self._phase == "loading":
                    self._phase = "serving"
            while self._has_work():
                self._turn()
            for seat in self._seats:  # those that are broken off
                self._engine.end(seat.slot)
        except EngineFault as fault:
            self._end_all("failed", str(fault))
        except Exception as error:
            self._end_all("failed", f"{type(error).__name__}: {error}")
            raise  # no foreseen fault: the trace belongs into the log
        else:
            self._end_all("closed", "")

    def _loading(self, share: float, doing: str) -> None:
        with self._wake:
            self._progress, self._doing = share, doing
        self._report(share, doing)

    def _end_all(self, phase: SchedulerPhase, why: str) -> None:
        with self._wake:
            self._phase, self._doing = phase, why
            left = [*self._withdrawn, *self._waiting, *self._seats]
            self._withdrawn.clear()
            self._waiting.clear()
            self._seats.clear()
            words = self._said() if phase == "failed" else _STOPPING
        for ticket in left:
            _tell_end(ticket, words)

    def _has_work(self) -> bool:
        """Wait for something to do; False when draining has come to its end."""
        with self._wake:
            while not self._aborting:
                if self._waiting or self._seats or self._withdrawn:
                    return True
                self._count()
                if self._phase == "draining":
                    return False
                self._wake.wait()
        return False

    def _count(self) -> None:
        """Keep the engine's counters for whoever asks: the engine itself is this thread's alone."""
        self._counters = dict(self._engine.counters())
        self._counted_at = time.monotonic()

    def _turn(self) -> None:
        """Free, fill, read, decode once."""
        with self._wake:
            gone, self._withdrawn = self._withdrawn, []
        for seat in [seat for seat in self._seats if seat.cancelled]:
            self._leave(seat)
            gone.append(seat)
        for ticket in gone:
            _tell_end(ticket, "")
        self._fill()
        self._read()
        masks = self._masks([seat for seat in self._seats if seat.prefilled])
        read = [seat for seat in self._seats if seat.prefilled]
        if read:
            steps = 1 if masks else self._steps(read)
            answers = self._engine.decode([seat.slot for seat in read], steps, masks)
            for seat in read:
                self._give(seat, answers.get(seat.slot, ()))
        if time.monotonic() - self._counted_at > _COUNTERS_EVERY_S:
            self._count()

    def _read(self) -> None:
        """Read the next pieces of prompts, one chunk's worth of tokens in all."""
        room = chunk = self._engine.limits.chunk
        for seat in [seat for seat in self._seats if not seat.prefilled]:
            piece = min(chunk, len(seat.job.prompt) - seat.read)
            if piece > room:
                return  # the first always fits
            room -= piece
            masks = self._masks([seat])
            if seat not in self._seats:
                continue
            seat.read += piece
            first = self._engine.prefill(seat.slot, masks.get(seat.slot))
            if first is not None:
                seat.prefilled = True
                self._give(seat, [first])

    def _masks(self, seats: Sequence[Ticket]) -> dict[int, TokenMask]:
        """What may come next, by slot, for those that have a constraint. One whose constraint
        fails is broken off."""
        masks = {}
        for seat in seats:
            if seat.job.constraint is None:
                continue
            begun = time.monotonic()
            try:
                masks[seat.slot] = seat.job.constraint.mask()
            except Exception as error:
                self._break_off(seat, error)
            self._mask_s += time.monotonic() - begun
        return masks

    def _steps(self, read: Sequence[Ticket]) -> int:
        """How many tokens to decode: one while a prompt is being read, whose first token is waited
        for; else no more than anybody needs, and where others wait for a slot, no more than the one
        needs that will free the next."""
        if len(read) < len(self._seats):
            return 1
        left = [seat.job.limit - seat.produced for seat in read]
        wanted = min(left) if self._waiting else max(left)
        return min(self._engine.limits.steps, wanted)

    def _fill(self) -> None:
        """Seat those that wait, first come, first served."""
        while self._free:
            with self._wake:
                if not self._waiting:
                    return
                seat = self._waiting.popleft()
                seat.slot = self._free.pop(0)
                self._seats.append(seat)
            seat.seated_at = time.monotonic()
            try:
                job = seat.job
                seat.read = self._engine.begin(seat.slot, job.prompt, job.sampling, job.cache_salt)
                job.seated(seat.read)
                self._constrained += job.constraint is not None
            except EngineFault:
                raise
            except Exception as error:
                self._break_off(seat, error)

    def _give(self, seat: Ticket, tokens: Sequence[StepToken]) -> None:
        """Hand over the tokens that the job may have, and free its slot when it is over."""
        tokens = tokens[: seat.job.limit - seat.produced]
        seat.produced += len(tokens)
        try:
            if not tokens:
                raise RuntimeError("the engine gave no token")
            if seat.job.constraint is not None:
                for step in tokens:
                    seat.job.constraint.take(step.token)
            over = seat.job.take(tokens)
        except Exception as error:
            self._break_off(seat, error)
            return
        if over or seat.produced >= seat.job.limit:
            took = time.monotonic() - seat.seated_at
            self._seconds_each += _NEWEST_WEIGHT * (took - self._seconds_each)
            self._leave(seat)

    def _break_off(self, seat: Ticket, error: Exception) -> None:
        """What one job's own fault ends is that job alone."""
        self._leave(seat)
        _tell_end(seat, f"{type(error).__name__}: {error}")

    def _leave(self, seat: Ticket) -> None:
        with self._wake:
            self._seats.remove(seat)
        self._engine.end(seat.slot)
        self._free.append(seat.slot)
        self._free.sort()  # low slots first: an engine may need less for few of them


def _tell_end(ticket: Ticket, words: str) -> None:
    """Say why a job ends that has no end of its own; one that cannot even take that harms none."""
    with contextlib.suppress(Exception):
        if ticket.cancelled:
            ticket.job.cancelled()
        else:
            ticket.job.fail(words)
