"""What serving takes of a device's memory, and the refusal of a start that would need more.

Knows no device: how much there is, it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.packed_tensors import PackedPlace
from forge.engines.gemma4.partition import device_part
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.sizes import (
    DTYPE_BYTES,
    cached_bytes,
    marks_bytes,
    temporary_bytes,
    weight_group_bytes,
)
from forge.engines.gemma4.weight_files import stored_tensors
from forge.engines.gemma4.weight_forms import WeightForm, weight_forms

_NEED_BLOCK = 256  # tokens: a shorter context is offered in whole blocks of keys


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of what is kept, and an estimate of what dispatches need for a while.

    `forms`: of each tensor by name. dtype "f32" or "bf16": of plain weights; kv_dtype that or
    "int8": of caches. `chunk`: most prompt tokens of one dispatch. `ways`: the devices of which
    each has a part; all is then of one of them, and `config` of its part.
    """

    config: Gemma4Config
    forms: Mapping[str, WeightForm]
    dtype: str
    kv_dtype: str
    slots: int
    context: int
    chunk: int
    ways: int = 1

    @property
    def element(self) -> int:
        """Bytes of a plain element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of the weights by group."""
        return weight_group_bytes(self.config, self.element, self.forms)

    @property
    def caches(self) -> dict[str, int]:
        """Bytes of all slots' keys and values, of sliding and of full layers."""
        kept = cached_bytes(self.config, self.context, self.kv_dtype)
        return {kind: self.slots * size for kind, size in kept.items()}

    @property
    def marks(self) -> int:
        """Bytes of what sampling remembers: the whole vocabulary on each device."""
        return self.ways * marks_bytes(self.config, self.slots)

    @property
    def temporaries(self) -> dict[str, int]:
        """Bytes that dispatches need for a while."""
        return temporary_bytes(self.config, min(self.chunk, self.context), self.slots, self.forms)

    @property
    def total(self) -> int:
        """Bytes of all of it, as if it were needed at once."""
        kept = sum(self.weights.values()) + sum(self.caches.values()) + self.marks
        return kept + sum(self.temporaries.values())


def memory_need(
    folder: Path,
    *,
    dtype: str,
    slots: int,
    context: int,
    chunk: int,
    kv_dtype: str = "auto",
    quantization: str = "none",
    unpack: str = "step",
    ways: int = 1,
) -> MemoryNeed:
    """What serving the model of `folder` would take, by its config and its weights' headers.

    Of each device, where it is split among `ways`. kv_dtype "auto" is `dtype`. Raises ModelRefused.
    """
    config = read_config(folder)
    places = stored_tensors(folder, config)
    packed = [name for name, place in places.items() if isinstance(place, PackedPlace)]
    forms = weight_forms(config, packed, quantization, unpack)
    part = device_part(config, ways)
    kept = dtype if kv_dtype == "auto" else kv_dtype
    return MemoryNeed(part, forms, dtype, kept, slots, context, chunk, ways)


def refuse_beyond(need: MemoryNeed, limit: int) -> None:
    """Raise ModelRefused where `need` is more than `limit` bytes: the sum, and what would fit."""
    if need.total <= limit:
        return
    parts = (
        (sum(need.weights.values()), "weights"),
        (sum(need.caches.values()), f"keys and values of {need.slots} slots of {need.context:,}"),
        (need.marks, "sampling"),
        (sum(need.temporaries.values()), "one dispatch"),
    )
    terms = " + ".join(f"{_need_gb(size)} {what}" for size, what in parts)
    raise ModelRefused(
        f"this needs {_need_gb(need.total)} GB of memory, {_need_gb(need.total - limit)} GB more"
        f" than the {_need_gb(limit)} GB that may be used: {terms}. {_need_advice(need, limit)}"
    )


def _need_advice(need: MemoryNeed, limit: int) -> str:
    """What would fit, changing one thing; the least of both where one alone does not do."""

    def most(high: int, made: Callable[[int], MemoryNeed]) -> int:
        """The most of 0..high with which it fits; 0 where not even 1 does."""
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if made(middle).total <= limit else (low, middle - 1)
        return low

    slots = most(need.slots, lambda n: replace(need, slots=n))
    blocks = most(need.context // _NEED_BLOCK, lambda n: replace(need, context=n * _NEED_BLOCK))
    ways = [f"--slots {slots}"] if slots else []
    if blocks:
        ways.append(f"--max-model-len {blocks * _NEED_BLOCK}")
    if ways:
        return f"It fits with {' or with '.join(ways)}"
    least = replace(need, slots=1, context=min(need.context, _NEED_BLOCK))
    if least.total <= limit:
        return f"It fits with --slots 1 --max-model-len {least.context}"
    return f"One slot of {least.context} tokens would still need {_need_gb(least.total)} GB"


def _need_gb(size: int) -> str:
    """Bytes in units of 10^9, with three figures behind the point."""
    return f"{size / 1e9:.3f}"
