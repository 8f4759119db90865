"""One answer on its way: tokens from the scheduler become text, ends, log probabilities and times.

Lives between two threads: the scheduler's calls it, the event loop's reads its deltas. Knows no
form of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forge.engines.serving.serving_metrics import ServingMetrics
from forge.engines.serving.slot_engine import Sampling, StepToken
from forge.engines.serving.token_text import TextStream, TokenText

FinishReason = Literal["stop", "length"]
_MOST_TOGETHER = 256  # tokens of one delta, about


@dataclass(frozen=True)
class ToldToken:
    """A token with its log probabilities; `offset` is the character of the answer it begins at."""

    step: StepToken
    offset: int


@dataclass(frozen=True)
class AnswerDelta:
    """What is new of an answer. `tokens` is empty unless log probabilities were asked for.

    `completion_tokens` counts all so far, the one that ended the answer included. `fault` says why
    nothing follows; `left` that the client has gone.
    """

    text: str = ""
    tokens: tuple[ToldToken, ...] = ()
    completion_tokens: int = 0
    finish: FinishReason | None = None
    fault: str = ""
    left: bool = False

    @property
    def last(self) -> bool:
        return self.finish is not None or bool(self.fault) or self.left


class Generation:
    """A job for the scheduler, and the stream of its deltas for one event loop: the one that runs
    when it is made.

    `ends` are tokens that end the answer and are no part of its text; a text of `stops` ends it
    likewise.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limit: int,
        *,
        ends: frozenset[int],
        stops: Sequence[str],
        token_text: TokenText,
        metrics: ServingMetrics,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.limit = limit
        self._ends = ends
        self._text = TextStream(token_text, stops)
        self._metrics = metrics
        self._produced = 0
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[AnswerDelta] = asyncio.Queue()
        self._arrived = time.monotonic()
        self._first = 0.0

    async def next_delta(self) -> AnswerDelta:
        """The next piece of the answer; none follows the one that is `last`.

        What has piled up behind a slow client comes as one piece, up to a bound.
        """
        delta = await self._deltas.get()
        begun = delta.completion_tokens
        while not self._deltas.empty() and delta.completion_tokens - begun < _MOST_TOGETHER:
            delta = _joined(delta, self._deltas.get_nowait())
        if not self._deltas.empty():
            await asyncio.sleep(0)  # a full queue never waits, and the others want their turn
        return AnswerDelta(left=True) if self._left else delta

    def leave(self) -> None:
        """The client has gone: wakes whoever waits for the next delta."""
        self._left = True
        self._deltas.put_nowait(AnswerDelta(left=True))

    def seated(self) -> None:
        self._metrics.queued(time.monotonic() - self._arrived)

    def take(self, tokens: Sequence[StepToken]) -> bool:
        if not self._produced:
            self._first = time.monotonic()
            self._metrics.first_token(self._first - self._arrived, len(self.prompt))
        begun = self._produced
        texts: list[str] = []
        told: list[ToldToken] = []
        finish: FinishReason | None = None
        for step in tokens:
            told.append(ToldToken(step, self._text.characters))
            self._produced += 1
            if step.token in self._ends:
                finish = "stop"
            else:
                texts.append(self._text.take(step.token))
                if self._text.stopped_by is None and self._produced == self.limit:
                    finish = "length"
            if finish is not None:
                texts.append(self._text.finish())
            if self._text.stopped_by is not None:
                finish = "stop"
            if finish is not None:
                break
        self._metrics.tokens(self._produced - begun)
        self._put(
            AnswerDelta(
                text="".join(texts),
                tokens=tuple(told) if self.sampling.logprobs >= 0 else (),
                completion_tokens=self._produced,
                finish=finish,
            )
        )
        if finish is not None:
            now = time.monotonic()
            self._metrics.ended(finish)
            self._metrics.answered(now - self._arrived, now - self._first, self._produced)
        return finish is not None

    def fail(self, words: str) -> None:
        self._put(AnswerDelta(completion_tokens=self._produced, fault=words))
        self._metrics.ended("error")

    def cancelled(self) -> None:
        self._metrics.ended("abort")

    def _put(self, delta: AnswerDelta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)


def _joined(delta: AnswerDelta, following: AnswerDelta) -> AnswerDelta:
    return replace(
        following, text=delta.text + following.text, tokens=delta.tokens + following.tokens
    )
