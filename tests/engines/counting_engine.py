"""A small deterministic SlotEngine in plain Python: each token depends on all that came before it.

So any mix-up of slots, any lost or doubled chunk, and any token out of turn changes all that
follows. It keeps the seam's rules and raises EngineFault where they are broken.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge.engines.serving.slot_engine import (
    EngineFault,
    EngineLimits,
    LoadReport,
    Sampling,
    StepToken,
    TokenMask,
)


def mixed(sampling: Sampling, tokens: Sequence[int], before: int | None = None) -> int:
    """A number made of all tokens in their order, of the seed and the temperature; `before` is that
    of the tokens ahead of these."""
    if before is None:
        seed = 0 if sampling.temperature == 0 else sampling.seed
        before = zlib.crc32(f"{seed} {sampling.temperature}".encode())
    return zlib.crc32(" ".join(map(str, (*tokens, ""))).encode(), before)


def told_step(token: int, sampling: Sampling, vocabulary: int) -> StepToken:
    """`token` with as many made-up alternatives as are asked for, itself the first."""
    if sampling.logprobs < 0:
        return StepToken(token)
    likely = [(token + n) % vocabulary for n in range(sampling.logprobs)]
    return StepToken(token, -0.5, tuple((other, -0.5 - n) for n, other in enumerate(likely)))


def answer_alone(
    prompt: Sequence[int], sampling: Sampling, count: int, vocabulary: int
) -> list[StepToken]:
    """The first `count` tokens that follow `prompt` when nobody else is served."""
    answer: list[StepToken] = []
    state = mixed(sampling, prompt)
    for _ in range(count):
        answer.append(told_step(state % vocabulary, sampling, vocabulary))
        state = mixed(sampling, [answer[-1].token], state)
    return answer


def allowed_tokens(mask: TokenMask) -> list[int]:
    """The tokens whose bits are set in `mask`."""
    bits = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if bits >> token & 1]


@dataclass
class _Talk:
    prompt: Sequence[int]
    sampling: Sampling
    state: int
    cache_salt: str
    taken: int = 0  # tokens of the prompt
    produced: int = 0  # tokens of the answer; from the first on it is decoded


class CountingEngine:
    """`forced` maps a prompt's tokens to the answer that is given instead of the counted one.

    `gate` is waited for before each dispatch: a test that clears it holds the engine, and so does
    the dispatch number `hold_after` when it is done. `fault`, once set, is what the next raises.
    `log` has every dispatch: ("prefill", slot) and ("decode", slots, steps). `loading` is waited
    for in `load`. `keeps`: the whole chunks of prompts are in `kept`, each behind its salt and all
    that came before, and none of them is read a second time.
    """

    def __init__(
        self,
        slots: int = 3,
        context: int = 64,
        vocabulary: int = 100,
        chunk: int = 8,
        steps: int = 4,
        forced: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        keeps: bool = False,
    ) -> None:
        self._limits = EngineLimits(slots, context, vocabulary, chunk, steps)
        self.forced = dict(forced or {})
        self.gate = threading.Event()
        self.gate.set()
        self._keeps = keeps
        self.kept: set[tuple[str | int, ...]] = set()
        self.held = 0  # tokens of prompts that were kept, of all begun so far
        self.loading = threading.Event()
        self.loading.set()
        self.hold_after = 0
        self.fault: Exception | None = None
        self.log: list[tuple[object, ...]] = []
        self.talks: dict[int, _Talk] = {}
        self._thread = 0

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def load(self, report: LoadReport) -> None:
        self._thread = threading.get_ident()
        report(0.25, "half of a half")
        if not self.loading.wait(30):
            raise EngineFault("nobody let the engine load")
        if self.fault is not None:
            raise self.fault
        report(1.0, "loaded")

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        self._checked(slot not in self.talks and 0 <= slot < self._limits.slots, "slot taken")
        self._checked(0 < len(prompt) < self._limits.context, "prompt of a wrong length")
        if min(prompt) < 0:
            raise ValueError("no token has a negative number")
        chunk, held = self._limits.chunk, 0
        while held + chunk < len(prompt) and (cache_salt, *prompt[: held + chunk]) in self.kept:
            held += chunk
        self.held += held
        state = mixed(sampling, prompt[:held])
        self.talks[slot] = _Talk(tuple(prompt), sampling, state, cache_salt, held)
        return held

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        self._dispatch("prefill", slot)
        talk = self.talks[slot]
        self._checked(not talk.produced, "prefilled twice")
        piece = talk.prompt[talk.taken :][: self._limits.chunk]
        talk.state = mixed(talk.sampling, piece, talk.state)
        talk.taken += len(piece)
        if self._keeps and talk.taken % self._limits.chunk == 0:
            self.kept.add((talk.cache_salt, *talk.prompt[: talk.taken]))
        return None if talk.taken < len(talk.prompt) else self._step(talk, mask)

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        self._dispatch("decode", tuple(slots), steps)
        self._checked(0 < steps <= self._limits.steps, f"{steps} steps")
        self._checked(steps == 1 or not masks, "several steps under a mask")
        self._checked(len(slots) == len(set(slots)) > 0, "slots named twice, or none")
        told = {}
        for slot in slots:
            talk = self.talks[slot]
            self._checked(talk.produced > 0, "decoded before it was prefilled")
            room = self._limits.context - len(talk.prompt) - talk.produced
            mask = (masks or {}).get(slot)
            told[slot] = [self._step(talk, mask) for _ in range(min(steps, room))]
        return told

    def end(self, slot: int) -> None:
        self._checked(True, "")
        self.talks.pop(slot, None)

    def counters(self) -> Mapping[str, float]:
        figures = {"compiled_shapes": 7, "compiles_after_start": 0, "kv_bytes": 4096}
        return figures | ({"prefix_cache_hits_total": self.held} if self._keeps else {})

    def _step(self, talk: _Talk, mask: TokenMask | None) -> StepToken:
        forced = self.forced.get(tuple(talk.prompt))
        token = talk.state % self._limits.vocabulary
        if forced is not None:
            token = forced[talk.produced % len(forced)]
        elif mask is not None:
            allowed = allowed_tokens(mask)
            token = allowed[talk.state % len(allowed)]
        talk.produced += 1
        talk.state = mixed(talk.sampling, [token], talk.state)
        return told_step(token, talk.sampling, self._limits.vocabulary)

    def _dispatch(self, *what: object) -> None:
        if not self.gate.wait(30):
            raise EngineFault("nobody let the engine go on")
        self.log.append(what)
        if len(self.log) == self.hold_after:
            self.gate.clear()
        self._checked(True, "")
        if self.fault is not None:
            raise self.fault

    def _checked(self, good: bool, words: str) -> None:
        if self._thread != threading.get_ident():
            raise EngineFault("called from another thread than the one that loaded")
        if not good:
            raise EngineFault(words)
