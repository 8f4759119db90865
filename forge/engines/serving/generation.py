"""One answer on its way: tokens from the scheduler become its parts, its end, figures and times.

Lives between two threads: the scheduler's calls it, the event loop's reads its deltas. Knows no
form of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forge.engines.serving.answer_parser import AnswerParser
from forge.engines.serving.call_syntax import ToolCall
from forge.engines.serving.serving_metrics import ServingMetrics
from forge.engines.serving.slot_engine import Sampling, StepToken, TokenConstraint

FinishReason = Literal["stop", "length", "tool_calls"]
_MOST_TOGETHER = 256  # tokens of one delta, about


@dataclass(frozen=True)
class ToldToken:
    """A token with its log probabilities; `offset` is the character of the text it begins at."""

    step: StepToken
    offset: int


@dataclass(frozen=True)
class ToldCall:
    """A call of a tool: which of the answer's it is, from 0, its id, and its arguments as JSON."""

    index: int
    identity: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerDelta:
    """What is new of an answer. `tokens` is empty unless log probabilities were asked for.

    `text` is what the model says, `thought` what it thinks. `completion_tokens` counts all so far,
    the one that ended the answer included, and `thought_tokens` those of thoughts among them.
    `fault` says why nothing follows; `left` that the client has gone.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[ToldCall, ...] = ()
    tokens: tuple[ToldToken, ...] = ()
    completion_tokens: int = 0
    thought_tokens: int = 0
    finish: FinishReason | None = None
    fault: str = ""
    left: bool = False

    @property
    def last(self) -> bool:
        return self.finish is not None or bool(self.fault) or self.left


class Generation:
    """A job for the scheduler, and the stream of its deltas for one event loop: the one that runs
    when it is made.

    `ends` are tokens that end the answer and are no part of it; `parser`, which is this answer's
    alone, may end it likewise. `constraint` says what may come next, if anything does. `cached` are
    the prompt's tokens that the engine had, once it is seated.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limit: int,
        *,
        ends: frozenset[int],
        parser: AnswerParser,
        metrics: ServingMetrics,
        constraint: TokenConstraint | None = None,
        cache_salt: str = "",
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.limit = limit
        self.constraint = constraint
        self.cache_salt = cache_salt
        self.cached = 0
        self._ends = ends
        self._parser = parser
        self._metrics = metrics
        self._produced = 0
        self._calls = 0
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[AnswerDelta] = asyncio.Queue()
        self._arrived = time.monotonic()
        self._first = 0.0

    async def next_delta(self) -> AnswerDelta:
        """The next piece of the answer; none follows the one that is `last`.

        What has piled up behind a slow client comes as one piece, up to a bound.
        """
        deltas = [await self._deltas.get()]
        begun = deltas[0].completion_tokens
        while not self._deltas.empty() and deltas[-1].completion_tokens - begun < _MOST_TOGETHER:
            deltas.append(self._deltas.get_nowait())
        if not self._deltas.empty():
            await asyncio.sleep(0)  # a full queue never waits, and the others want their turn
        return AnswerDelta(left=True) if self._left else joined_deltas(deltas)

    def leave(self) -> None:
        """The client has gone: wakes whoever waits for the next delta."""
        self._left = True
        self._deltas.put_nowait(AnswerDelta(left=True))

    def seated(self, held: int) -> None:
        self.cached = held
        self._metrics.queued(time.monotonic() - self._arrived)

    def take(self, tokens: Sequence[StepToken]) -> bool:
        if not self._produced:
            self._first = time.monotonic()
            self._metrics.first_token(self._first - self._arrived, len(self.prompt))
        begun = self._produced
        told: list[ToldToken] = []
        finish: Literal["stop", "length"] | None = None
        for step in tokens:
            told.append(ToldToken(step, self._parser.characters))
            self._produced += 1
            if step.token in self._ends:
                finish = "stop"
            else:
                self._parser.take(step.token)
                if self._produced == self.limit:
                    finish = "length"
            if finish is not None or self._parser.over:
                self._parser.finish()
            if self._parser.over:
                finish = "stop"
            if finish is not None:
                break
        self._metrics.tokens(self._produced - begun)
        parts = self._parser.parts()
        self._metrics.calls(len(parts.calls), parts.broken)
        self._put(
            AnswerDelta(
                text=parts.content,
                thought=parts.thought,
                calls=tuple(self._told_call(call) for call in parts.calls),
                tokens=tuple(told) if self.sampling.logprobs >= 0 else (),
                completion_tokens=self._produced,
                thought_tokens=self._parser.thought_tokens,
                finish="tool_calls" if finish == "stop" and self._parser.calls_made else finish,
            )
        )
        if finish is not None:
            now = time.monotonic()
            self._metrics.ended(finish)
            self._metrics.answered(now - self._arrived, now - self._first, self._produced)
        return finish is not None

    def _told_call(self, call: ToolCall) -> ToldCall:
        told = ToldCall(self._calls, f"call_{uuid.uuid4().hex}", call.name, call.arguments)
        self._calls += 1
        return told

    def fail(self, words: str) -> None:
        self._put(AnswerDelta(completion_tokens=self._produced, fault=words))
        self._metrics.ended("error")

    def cancelled(self) -> None:
        self._metrics.ended("abort")

    def _put(self, delta: AnswerDelta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)


def joined_deltas(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """Some that follow each other, at least one, as one."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        thought="".join(delta.thought for delta in deltas),
        calls=tuple(call for delta in deltas for call in delta.calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
    )
