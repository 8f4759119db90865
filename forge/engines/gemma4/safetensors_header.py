"""Reads what one safetensors file says it holds, and whether its bytes can be that.

Knows no model: names are any, values are never looked at.

Format: https://github.com/huggingface/safetensors, "Format": 8 bytes of little-endian length N, N
bytes of JSON, then the tensors' bytes without holes.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from forge.engines.gemma4.model_folder import json_object
from forge.engines.gemma4.refusal import ModelRefused, WeightsRefused, shown_value

# Bytes of an element. Only the floats are read; the others are known so that towers may use them.
_HEADER_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # bytes; the format's own bound


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `begin` is its first byte in the file, `size` its bytes."""

    path: Path
    element: str
    shape: tuple[int, ...]
    begin: int
    size: int


def safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the file at `path`, by name.

    Raises WeightsRefused where the file is cut off, where tensors overlap or leave holes, and where
    a shape does not fit its bytes.
    """
    try:
        with path.open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(0)
            opening = file.read(8)
            length = struct.unpack("<Q", opening)[0] if len(opening) == 8 else whole + 1
            if length > min(_HEADER_LIMIT, whole - 8):
                raise WeightsRefused(f"{path.name} is cut off or no safetensors file")
            text = file.read(length)
    except OSError as error:
        raise WeightsRefused(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        entries = json_object(text, f"the header of {path.name}")
    except ModelRefused as refusal:
        raise WeightsRefused(str(refusal)) from None
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _header_tensor(path, start, name, entry) for name, entry in entries.items()}
    _header_tiles(path, tensors, start, whole)
    return tensors


def _header_tensor(path: Path, start: int, name: str, entry: object) -> StoredTensor:
    where = f"{path.name} describes {name[:200]!r} as {shown_value(entry)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightsRefused(f"{where}: not as the format has it")
    element, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(element, str) or element not in _HEADER_ELEMENT_BYTES:
        raise WeightsRefused(f"{where}: the element type is unknown")
    if not (_header_counts(shape) and _header_counts(offsets) and len(offsets) == 2):
        raise WeightsRefused(f"{where}: shape and offsets have to be lists of counts")
    begin, end = offsets
    if end - begin != math.prod(shape) * _HEADER_ELEMENT_BYTES[element]:
        raise WeightsRefused(f"{where}: that shape takes other bytes")
    return StoredTensor(path, element, tuple(shape), start + begin, end - begin)


def _header_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _header_tiles(path: Path, tensors: dict[str, StoredTensor], start: int, whole: int) -> None:
    """Refuse a file whose tensors do not lie end to end from the header to the file's end."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].size)):
        if tensor.begin != at:
            fault = "overlaps what lies before it" if tensor.begin < at else "leaves a hole"
            raise WeightsRefused(f"{path.name}: {name[:200]!r} {fault}")
        at += tensor.size
    if at > whole:
        raise WeightsRefused(f"{path.name} lacks its last {at - whole} bytes")
    if at < whole:
        raise WeightsRefused(f"{path.name} has {whole - at} bytes too many")
