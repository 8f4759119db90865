"""Matrices that a checkpoint stores as packed 4-bit integers: where they lie, what they stand for.

Knows no files but by the places of their tensors, and no device.

Format: compressed-tensors 0.20.1, compressors/pack_quantized: for each matrix [n, k] of a module X
`X.weight_packed` int32 [n, k/8], eight integers plus 8 in each word, the first in the lowest bits;
`X.weight_scale` bf16 [n, k/group]; `X.weight_shape` int64 [2], n and k. A weight is its integer
times its group's scale, rounded to bf16 (quantization/lifecycle/forward_helpers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forge.engines.gemma4.config import PackedRule
from forge.engines.gemma4.refusal import WeightsRefused
from forge.engines.gemma4.safetensors_header import StoredTensor

PACKED_IN_WORD = 8
PACKED_OFFSET = 8  # what is added to an integer of -8..7, so that none is negative
_PACKED_ENDING = ".weight_packed"
# Beside the words: ending, element type.
_PACKED_PARTS = ((".weight_scale", "BF16"), (".weight_shape", "I64"))


@dataclass(frozen=True)
class PackedPlace:
    """Where a packed matrix lies. `shape` is [n, k] of what it stands for, by its words."""

    words: StoredTensor
    scales: StoredTensor
    stated: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[0], self.words.shape[1] * PACKED_IN_WORD

    @property
    def size(self) -> int:
        """Bytes."""
        return self.words.size + self.scales.size + self.stated.size


class PackedMatrix(NamedTuple):
    """A packed matrix as views of its file: words uint32 [n, k/8], scales bf16 [n, k/group]."""

    words: np.ndarray[Any, np.dtype[Any]]
    scales: np.ndarray[Any, np.dtype[Any]]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def packed_places(
    found: Mapping[str, StoredTensor], rule: PackedRule | None
) -> tuple[dict[str, StoredTensor], dict[str, PackedPlace]]:
    """(tensors that lie plainly, packed matrices under the names that they would have plainly).

    Raises WeightsRefused that names a packed matrix whose parts do not fit each other.
    """
    plain, packed = dict(found), {}
    for name, words in found.items():
        if not name.endswith(_PACKED_ENDING):
            continue
        module = name.removesuffix(_PACKED_ENDING)
        if rule is None:
            raise WeightsRefused(f"{name!r} is packed, and config.json has no quantization_config")
        if module + ".weight" in found:
            raise WeightsRefused(f"{module + '.weight'!r} is stored packed and plainly")
        if words.element != "I32" or len(words.shape) != 2:
            raise WeightsRefused(f"{name!r} has to be a matrix of I32")
        rows, columns = words.shape[0], words.shape[1] * PACKED_IN_WORD
        if columns % rule.group:
            raise WeightsRefused(f"{name!r}: {columns} columns are no whole groups of {rule.group}")
        parts = []
        for (ending, element), shape in zip(
            _PACKED_PARTS, ((rows, columns // rule.group), (2,)), strict=True
        ):
            part = found.get(module + ending)
            if part is None:
                raise WeightsRefused(f"{module + ending!r} is missing beside {name!r}")
            if part.element != element or part.shape != shape:
                raise WeightsRefused(
                    f"{module + ending!r} is {part.element} {list(part.shape)}, beside {name!r} it"
                    f" has to be {element} {list(shape)}"
                )
            parts.append(part)
            del plain[module + ending]
        del plain[name]
        packed[module + ".weight"] = PackedPlace(words, *parts)
    return plain, packed


def is_packed_by(rule: PackedRule, name: str) -> bool:
    """Whether the matrix that would plainly be stored as `name` is one that the config packs."""
    module = name.removesuffix(".weight")
    return _packed_fits(rule.targets, module) and not _packed_fits(rule.ignored, module)


def unpacked_matrix(matrix: PackedMatrix) -> np.ndarray[Any, np.dtype[Any]]:
    """What it stands for: [n, k] bf16, bit for bit as compressed-tensors unpacks it."""
    rows, groups = matrix.scales.shape
    pairs = np.arange(256)  # the two integers of each byte, the lower half first
    integers = np.stack([pairs & 15, pairs >> 4], axis=-1).astype(np.float32) - PACKED_OFFSET
    # Integers below 16 times 8 bits of a scale are exact in f32: bf16 rounds once.
    values = integers[matrix.words.astype("<u4", copy=False).view(np.uint8)]
    values = values.reshape(rows, groups, -1)
    values *= matrix.scales.astype(np.float32)[:, :, None]
    unpacked: np.ndarray[Any, np.dtype[Any]] = values.reshape(rows, -1).astype(matrix.scales.dtype)
    return unpacked


def _packed_fits(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of them names the module, which is a Linear."""
    for pattern in patterns:
        if pattern.startswith("re:") and re.match(pattern[3:], module):
            return True
        if pattern in (module, "Linear"):
            return True
    return False
