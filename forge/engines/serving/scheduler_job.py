"""What a scheduler takes and tells: a job and its place, why one is not taken, what is going on.

Knows no engine's work, no text and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from forge.engines.serving.slot_engine import Sampling, StepToken, TokenConstraint

SchedulerPhase = Literal["loading", "serving", "draining", "closed", "failed"]


class SchedulerJob(Protocol):
    """One conversation. Its methods are called by the scheduler's thread alone.

    `prompt` has at least one token; with `limit`, the most tokens that may be answered, it fits the
    engine's context. `take` that says True, `fail` and `cancelled` are the last call.
    """

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def limit(self) -> int: ...

    @property
    def constraint(self) -> TokenConstraint | None: ...

    @property
    def cache_salt(self) -> str: ...

    def seated(self, held: int) -> None:
        """A slot was found, and the prompt is read from now on, but for its first `held` tokens."""

    def take(self, tokens: Sequence[StepToken]) -> bool:
        """The answer goes on by `tokens`. True: it is over, and the slot can be given away."""

    def fail(self, words: str) -> None:
        """The answer breaks off; `words` say why."""

    def cancelled(self) -> None:
        """Its ticket was cancelled, and it holds nothing any more."""


class QueueFull(Exception):
    """As many conversations wait as may wait. `retry_after_s`: about when a place will be free."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotServing(Exception):
    """The engine is not there yet, or no longer; the message says what it does instead."""


class Ticket:
    """A job's place: in the queue, then in a slot, then nowhere. For its scheduler's eyes alone."""

    def __init__(self, job: SchedulerJob) -> None:
        self.job = job
        self.slot = -1
        self.read = 0  # tokens of the prompt
        self.prefilled = False
        self.produced = 0  # tokens of the answer
        self.cancelled = False
        self.seated_at = 0.0


@dataclass(frozen=True)
class SchedulerView:
    """What is going on now. `kv_used_share`: of all the tokens that the slots could hold.

    `constrained` counts the conversations with a constraint that got a slot so far; `mask_s` is how
    long their masks took.
    """

    phase: SchedulerPhase
    progress: float
    doing: str
    running: int
    waiting: int
    kv_used_share: float
    counters: Mapping[str, float]
    constrained: int = 0
    mask_s: float = 0.0
