"""What a batch's programs take of its requests, and what is told of what they chose.

Knows no conversation and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from forge.engines.jax.mesh import DeviceGroup, placed_on
from forge.engines.jax.sampling import SamplingMasks, SamplingRows
from forge.engines.jax.steps import ChosenTokens, mask_words
from forge.engines.serving.slot_engine import Sampling, StepToken, TokenMask


def sampling_rows(samplings: Sequence[Sampling]) -> SamplingRows:
    """The settings of each row of a batch, as the programs take them."""

    def column(kind: Any, values: list[float]) -> Any:
        return np.asarray(values, kind)

    return SamplingRows(
        temperature=column(np.float32, [s.temperature for s in samplings]),
        top_k=column(np.int32, [s.top_k for s in samplings]),
        top_p=column(np.float32, [s.top_p for s in samplings]),
        min_p=column(np.float32, [s.min_p for s in samplings]),
        repetition=column(np.float32, [s.repetition_penalty for s in samplings]),
        presence=column(np.float32, [s.presence_penalty for s in samplings]),
        frequency=column(np.float32, [s.frequency_penalty for s in samplings]),
        seed=column(np.uint32, [s.seed & 0xFFFFFFFF for s in samplings]),
        logprobs=column(np.int32, [s.logprobs for s in samplings]),
    )


class BatchMasks:
    """The masks of a batch as the programs take them.

    Without any it is one array of each size that stays on the device: 16 rows of 262,144 tokens
    are 512 KiB, which an answer without a mask should not carry there at every step.
    """

    def __init__(self, vocabulary: int, sizes: Sequence[int], group: DeviceGroup | None) -> None:
        self._vocabulary = vocabulary
        self._none = {
            size: SamplingMasks(*placed_on(group, (self._words(size), self._unmasked(size))))
            for size in sizes
        }

    def of(self, batch: int, masks: Mapping[int, TokenMask]) -> SamplingMasks:
        """`masks` by row. A token of the model that a mask has no bit for is not allowed."""
        if not masks:
            return self._none[batch]
        words, masked = self._words(batch), self._unmasked(batch)
        for row, mask in masks.items():
            told = np.frombuffer(mask, "<u4")[: words.shape[1]]
            words[row, : len(told)], masked[row] = told, True
        return SamplingMasks(words, masked)

    def _words(self, batch: int) -> Any:
        return np.zeros((batch, mask_words(self._vocabulary)), np.uint32)

    def _unmasked(self, batch: int) -> Any:
        return np.zeros(batch, np.bool_)


class ToldTokens:
    """What a program chose, fetched from the device array by array, when it is asked for."""

    def __init__(self, chosen: ChosenTokens) -> None:
        self._chosen = chosen

    @cached_property
    def tokens(self) -> Any:
        return np.asarray(self._chosen.tokens)

    @cached_property
    def logprobs(self) -> Any:
        return np.asarray(self._chosen.logprobs)

    @cached_property
    def tops(self) -> tuple[Any, Any]:
        return np.asarray(self._chosen.top_ids), np.asarray(self._chosen.top_logprobs)

    def token(self, place: tuple[int, ...], sampling: Sampling) -> StepToken:
        """The token at (step, row), or (row,), with as much beside it as its request wants."""
        token = int(self.tokens[place])
        if sampling.logprobs < 0:
            return StepToken(token)
        top: tuple[tuple[int, float], ...] = ()
        if sampling.logprobs > 0:
            ids, values = (array[place][: sampling.logprobs].tolist() for array in self.tops)
            top = tuple(zip(ids, values, strict=True))
        return StepToken(token, float(self.logprobs[place]), top)
