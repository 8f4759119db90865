"""The seam between what serves and what computes: an engine with slots, one dispatch at a time.

The scheduler drives it from one thread; it knows no HTTP, no text and no array library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# How far loading has come: a share from 0 to 1, and what is done right now, for people.
LoadReport = Callable[[float, str], None]
# Which tokens may come next: bit n % 8 of byte n // 8 is set where token n may. Whole words of 32.
TokenMask = bytes
MOST_LOGPROBS = 20  # alternatives of one token, as OpenAI's chat API bounds top_logprobs


class TokenConstraint(Protocol):
    """What the tokens of one answer must be. Whatever it raises breaks off that answer alone."""

    def mask(self) -> TokenMask:
        """Which tokens may come next, at least one; the same until one is taken."""

    def take(self, token: int) -> None:
        """`token` is the next of the answer. Raises where it may not be."""


class EngineFault(Exception):
    """The engine cannot go on; the message says why and is fit for a log."""


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen.

    temperature 0 takes the likeliest token; top_k 0, top_p 1 and min_p 0 are off. The repetition
    penalty (1 is off) looks at prompt and answer, presence and frequency (0 is off) at the answer
    alone, as in vLLM and OpenAI's API. The same seed, prompt and settings give the same tokens in
    any company, and under the same masks. logprobs: how many alternatives are told beside the
    chosen token, -1 for no log probability at all. Log probabilities are those of the model, before
    temperature, penalties and masks.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int = -1


@dataclass(frozen=True)
class StepToken:
    """One token that was chosen; `top` holds the likeliest (token, log probability) in order."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EngineLimits:
    """What an engine was started with: conversations at once, tokens of each, the vocabulary.

    `chunk` is the most prompt tokens that one prefill takes, `steps` the most that one decode does.
    """

    slots: int
    context: int
    vocabulary: int
    chunk: int
    steps: int


class SlotEngine(Protocol):
    """A loaded model that answers up to `limits.slots` conversations at once.

    All calls come from one thread. A slot is free, then begun, then prefilled chunk by chunk until
    the first token comes, then decoded until it is ended. Any slot may be ended at any time.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def load(self, report: LoadReport) -> None:
        """Map and place the weights and compile every shape. Raises EngineFault."""

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        """Give the free `slot` a conversation: at least one token, fewer than limits.context.

        Gives how many of its first tokens the engine has from earlier ones with the same salt, and
        does not read again: fewer than all, 0 where it keeps nothing.
        """

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        """Take the prompt's next chunk; the first token of the answer once the prompt is whole.

        Where that comes it is one that `mask` allows.
        """

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        """Up to `steps` further tokens for each of `slots`, at least one; all are prefilled.

        A slot whose conversation has reached limits.context tokens gets none. What comes after a
        stop is the caller's to drop. `masks`, by slot, hold for the first token, so that with any
        of them there is one token for each, whatever `steps` says.
        """

    def end(self, slot: int) -> None:
        """Free the slot; whatever it held can be overwritten."""

    def counters(self) -> Mapping[str, float]:
        """Figures for the metrics page: compiled_shapes, compiles_after_start, kv_bytes and more.

        What only ever grows ends in _total.
        """
