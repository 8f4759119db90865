"""Several engines of one model as one: conversations are spread over them, and all decode at once.

Knows no array library and no devices: each replica is an engine of its own, with its own slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from forge.engines.serving.slot_engine import (
    EngineLimits,
    LoadReport,
    Sampling,
    SlotEngine,
    StepToken,
    TokenMask,
)

ReplicaResult = TypeVar("ReplicaResult")

# Counted in the whole process: what the others compile after one was loaded is no late compiling.
_OF_THE_LAST_LOADED = "compiles_after_start"


class ReplicatedEngine:
    """A SlotEngine of `replicas` with equal limits: slot s is slot s // n of replica s % n.

    So the lowest slots, which are given away first, are one of each. Prompts are read one after
    the other, as they are asked for; a decode runs at once in all replicas that have a part in it.
    Every replica has a thread of its own, which alone calls it.
    """

    def __init__(self, replicas: Sequence[SlotEngine]) -> None:
        self._replicas = tuple(replicas)
        self._threads = [ThreadPoolExecutor(1, "replica") for _ in self._replicas]

    @property
    def limits(self) -> EngineLimits:
        one = self._replicas[0].limits
        return replace(one, slots=one.slots * len(self._replicas))

    def load(self, report: LoadReport) -> None:
        """Load the first replica, whose weights the others may copy, then all of these at once."""
        count = len(self._replicas)
        shares = [0.0] * count
        telling = threading.Lock()

        def load_one(number: int) -> None:
            def told(share: float, doing: str) -> None:
                with telling:
                    shares[number] = share
                    report(sum(shares) / count, f"{doing} (copy {number + 1} of {count})")

            self._replicas[number].load(told)

        for numbers in ((0,), range(1, count)):
            _replica_results([self._threads[n].submit(load_one, n) for n in numbers])

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        replica, its_slot = self._place(slot)
        begin = self._replicas[replica].begin
        return self._asked(replica, begin, its_slot, prompt, sampling, cache_salt)

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        replica, its_slot = self._place(slot)
        return self._asked(replica, self._replicas[replica].prefill, its_slot, mask)

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        masks = masks or {}
        steps = 1 if masks else steps
        parts: dict[int, list[int]] = {}
        parts_masks: dict[int, dict[int, TokenMask]] = {}
        for slot in slots:
            replica, its_slot = self._place(slot)
            parts.setdefault(replica, []).append(its_slot)
            if slot in masks:
                parts_masks.setdefault(replica, {})[its_slot] = masks[slot]
        under_way = [
            self._threads[replica].submit(
                self._replicas[replica].decode, its_slots, steps, parts_masks.get(replica)
            )
            for replica, its_slots in parts.items()
        ]
        return {
            its_slot * len(self._replicas) + replica: tokens
            for replica, answers in zip(parts, _replica_results(under_way), strict=True)
            for its_slot, tokens in answers.items()
        }

    def end(self, slot: int) -> None:
        replica, its_slot = self._place(slot)
        self._asked(replica, self._replicas[replica].end, its_slot)

    def counters(self) -> Mapping[str, float]:
        """The replicas' counters, added up."""
        each = [self._asked(n, one.counters) for n, one in enumerate(self._replicas)]
        return {
            name: (min if name == _OF_THE_LAST_LOADED else sum)(told[name] for told in each)
            for name in each[0]
        }

    def _place(self, slot: int) -> tuple[int, int]:
        """The replica of `slot`, and which of its own slots that is."""
        its_slot, replica = divmod(slot, len(self._replicas))
        return replica, its_slot

    def _asked(
        self, replica: int, call: Callable[..., ReplicaResult], *arguments: object
    ) -> ReplicaResult:
        """What a call of that replica, in its own thread, returns or raises."""
        return self._threads[replica].submit(call, *arguments).result()


def _replica_results(under_way: Sequence[Future[ReplicaResult]]) -> list[ReplicaResult]:
    """What all of them returned, once all have ended; raises what the first that failed raised."""
    wait(under_way)
    return [one.result() for one in under_way]
