"""A GGUF file as it lies on disk: is it whole, what model is in it, how many bytes does it hold.

Reads the header only, within bounds, and knows nothing of who will load it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from forge.parts.ground.errors import RigError

GgufValue = int | float | bool | str | tuple[int | float | bool, ...]

# The layout, and each type's block of elements and its bytes: docs/gguf.md and ggml.h of
# https://github.com/ggml-org/ggml, and GGML_QUANT_SIZES of the PyPI package gguf 0.19.0.
_TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
# Bounds far beyond any real model: a damaged length must cost neither memory nor time. E2B's
# header, with 262,144 pieces and 514,906 merges, has about 16 MB.
_GGUF_HEADER_LIMIT = 256_000_000
_KEYS_LIMIT, _TENSORS_LIMIT, _ELEMENTS_LIMIT = 10_000, 100_000, 20_000_000
_TEXT_KEPT, _ARRAY_KEPT = 1_000_000, 1024  # what is longer is passed over (vocabularies)
_READ_AT_ONCE = 1 << 22
_PER_LAYER_TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor by name: its type's name, number of elements, bytes on disk."""

    name: str
    type_name: str
    elements: int
    size: int


@dataclass(frozen=True)
class KvLayer:
    """One layer that keeps keys and values: elements of a token, and the window it looks back.

    `window` is None where the layer sees the whole context.
    """

    width: int
    window: int | None


@dataclass(frozen=True)
class GgufFile:
    """A file that passed every check. `metadata` lacks what is too long to be a parameter."""

    path: Path
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def per_layer_embedding_size(self) -> int:
        """Bytes of Gemma 4's per-layer embedding table; 0 where there is none."""
        return sum(tensor.size for tensor in self.tensors if tensor.name == _PER_LAYER_TABLE)

    @property
    def encoding(self) -> str:
        """The type that holds most bytes of the matrices; embedding tables do not count."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            if "_embd" not in tensor.name:
                sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size
        return max(sizes, key=lambda name: sizes[name], default="none")

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was trained to look back over."""
        return self._count("context_length")

    @property
    def block_count(self) -> int | None:
        return self._count("block_count")

    @property
    def vocabulary(self) -> int | None:
        """Entries of the token embedding, from its shape (the key is not always there)."""
        width = self._count("embedding_length")
        table = next((t for t in self.tensors if t.name == "token_embd.weight"), None)
        return table.elements // width if table is not None and width else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.metadata.get("tokenizer.chat_template"))

    def kv_layers(self) -> tuple[KvLayer, ...]:
        """The layers that keep keys and values, in order; empty where the keys do not tell.

        A layer's width is kv heads * (key length + value length). The last `shared_kv_layers` keep
        none. Layers are windowed only as `sliding_window_pattern` lists them; where a window stands
        without such a list every layer counts in full, which is never too little.
        Source: llama.cpp b11434, src/models/gemma4.cpp and src/llama-hparams.cpp.
        """
        blocks, heads = self._count("block_count"), self.values("attention.head_count")
        kv_heads = self.values("attention.head_count_kv") or heads
        hidden = self._count("embedding_length")
        if not blocks or not heads or not kv_heads or not hidden or blocks > _TENSORS_LIMIT:
            return ()
        usual = hidden // max(1, int(heads[0]))
        full = [self._count(f"attention.{half}_length") or usual for half in ("key", "value")]
        near = [
            self._count(f"attention.{half}_length_swa") or size
            for half, size in zip(("key", "value"), full, strict=True)
        ]
        pattern = self.values("attention.sliding_window_pattern")
        window = self._count("attention.sliding_window")
        layers = []
        for number in range(blocks - (self._count("attention.shared_kv_layers") or 0)):
            slides = bool(window and len(pattern) > 1 and pattern[number % len(pattern)])
            width = int(kv_heads[number % len(kv_heads)]) * sum(near if slides else full)
            layers.append(KvLayer(width, window if slides else None))
        return tuple(layers)

    def largest(self, key: str) -> int:
        """The largest value of the architecture's `key` over all layers; 0 where it is absent."""
        return max((int(value) for value in self.values(key)), default=0)

    def _value(self, key: str) -> GgufValue | None:
        return self.metadata.get(f"{self.architecture}.{key}")

    def _count(self, key: str) -> int | None:
        value = self._value(key)
        return value if type(value) is int and 0 <= value < 1 << 40 else None

    def values(self, key: str) -> tuple[int | float | bool, ...]:
        """The architecture's `key`: a value for each layer, or one for all; empty if absent."""
        value = self._value(key)
        if isinstance(value, tuple):
            return value
        return (value,) if isinstance(value, int) else ()


class _GgufFault(ValueError):
    """Why a file is refused; the words are made a RigError where the path is known."""


class _GgufHead:
    """The header's bytes, read as far as they are asked for, never beyond _GGUF_HEADER_LIMIT."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = bytearray()
        self.position = 0

    def _fill(self, end: int) -> None:
        if end > _GGUF_HEADER_LIMIT:
            raise _GgufFault("its header is beyond all bounds")
        self._data += self._file.read(max(end - len(self._data), _READ_AT_ONCE))
        if end > len(self._data):
            raise _GgufFault("it is cut off within its header")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self.position + size
        if end > len(self._data):
            self._fill(end)
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken

    def number(self, form: str) -> int | float | bool:
        """The next number of the struct format `form`."""
        value: int | float | bool = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, limit: int, of_what: str) -> int:
        """The next length. Raises _GgufFault when it is beyond `limit`."""
        (value,) = _U64.unpack(self.take(8))
        if value > limit:
            raise _GgufFault(f"it announces {value} {of_what}, which no model has")
        return int(value)

    def text(self) -> str:
        length = self.count(_GGUF_HEADER_LIMIT, "bytes of text")
        return self.take(length).decode("utf-8", "replace")

    def pass_texts(self, count: int) -> None:
        """Go past `count` strings; a vocabulary has hundreds of thousands, so nothing is kept.

        A string that ends beyond what is read is seen at the next one, or by whoever reads next.
        """
        position, unpack = self.position, _U64.unpack_from
        for _ in range(count):
            if position + 8 > len(self._data):
                self._fill(position + 8)
            position += 8 + unpack(self._data, position)[0]
        if position > len(self._data):
            self._fill(position)
        self.position = position


def _gguf_refused(path: Path, why: str, next_step: str = "") -> RigError:
    step = next_step or "download it again and compare its SHA-256"
    return RigError("INVALID", f"the GGUF file {path} cannot be served: {why}", step)


def read_gguf(path: Path) -> GgufFile:
    """Check that `path` is one whole GGUF file with a text model in it, and measure it.

    Raises RigError INVALID, each with what to do: no file, another format, cut off, damaged, an
    unknown layout or tensor type, one part of several, no model (a projector, an adapter).
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            metadata, tensors = _checked_header(_GgufHead(file), size)
    except _GgufFault as fault:
        raise _gguf_refused(path, str(fault)) from None
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise _gguf_refused(path, why, "check MODEL_NAME: the absolute path of a .gguf") from None
    found = GgufFile(path, metadata, tuple(tensors))
    _refuse_other_than_a_model(found)
    return found


def _refuse_other_than_a_model(found: GgufFile) -> None:
    kind = str(found.metadata.get("general.type", "model"))
    if kind != "model" or found.architecture == "clip":
        what = "a projector for pictures or sound" if found.architecture == "clip" else kind
        raise _gguf_refused(found.path, f"it holds {what[:40]}, no model", "give the model's file")
    parts = found.metadata.get("split.count")
    if type(parts) is int and parts > 1:
        raise _gguf_refused(
            found.path, f"it is one of {parts} parts", "join them with llama-gguf-split --merge"
        )
    if not found.tensors:
        raise _gguf_refused(found.path, "it holds a vocabulary and no weights", "give the model")


def _checked_header(head: _GgufHead, size: int) -> tuple[dict[str, GgufValue], list[GgufTensor]]:
    if head.take(4) != b"GGUF":
        raise _GgufFault("it is no GGUF file (its first four bytes are not GGUF)")
    version = int(head.number("<I"))
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise _GgufFault(
            "it is written for big-endian computers"
            if swapped
            else f"its layout is {version}, and 2 and 3 are known"
        )
    tensor_count = head.count(_TENSORS_LIMIT, "tensors")
    metadata: dict[str, GgufValue] = {}
    seen: set[str] = set()
    for _ in range(head.count(_KEYS_LIMIT, "keys")):
        key = head.text()
        if key in seen:
            raise _GgufFault(f"its key {key[:80]} stands twice")
        seen.add(key)
        value = _read_gguf_value(head, int(head.number("<I")), key)
        if value is not None:
            metadata[key] = value
    if not isinstance(metadata.get("general.architecture"), str):
        raise _GgufFault("it names no architecture")
    return metadata, _read_tensors(head, tensor_count, metadata, size)


def _read_gguf_value(head: _GgufHead, kind: int, key: str) -> GgufValue | None:
    """The next value of type `kind`; None where it is too long to be a parameter."""
    if kind in _SCALARS:
        return head.number(_SCALARS[kind])
    if kind == _STRING:
        text = head.text()
        return text if len(text) <= _TEXT_KEPT else None
    if kind != _ARRAY:
        raise _GgufFault(f"its key {key[:80]} is of an unknown type {kind}")
    element = int(head.number("<I"))
    count = head.count(_ELEMENTS_LIMIT, f"elements of {key[:80]}")
    if element == _STRING:
        head.pass_texts(count)
        return None
    if element not in _SCALARS:
        raise _GgufFault(f"its key {key[:80]} is a list of an unknown type {element}")
    form = _SCALARS[element][1]
    raw = head.take(count * struct.calcsize(f"<{form}"))
    return struct.unpack(f"<{count}{form}", raw) if count <= _ARRAY_KEPT else None


def _read_tensors(
    head: _GgufHead, count: int, metadata: Mapping[str, GgufValue], size: int
) -> list[GgufTensor]:
    """The tensors that the header announces, each within the file's `size` bytes."""
    tensors, places = [], []
    names: set[str] = set()
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _GgufFault("its alignment is no power of two")
    for _ in range(count):
        name = head.text()
        if name in names:
            raise _GgufFault(f"its tensor {name[:80]} stands twice")
        names.add(name)
        tensor, offset = _read_tensor(head, name)
        if offset % alignment:
            raise _GgufFault(f"its tensor {name[:80]} is not aligned to {alignment} bytes")
        tensors.append(tensor)
        places.append(offset + tensor.size)
    begin = -(-head.position // alignment) * alignment
    missing = begin + max(places, default=0) - size
    if places and missing > 0:
        raise _GgufFault(f"it lacks its last {missing} bytes")
    return tensors


def _read_tensor(head: _GgufHead, name: str) -> tuple[GgufTensor, int]:
    """One tensor and its place in bytes after the header."""
    dimensions = int(head.number("<I"))
    if not 1 <= dimensions <= 4:
        raise _GgufFault(f"its tensor {name[:80]} has {dimensions} dimensions")
    shape = [head.count(1 << 40, f"elements of {name[:80]}") for _ in range(dimensions)]
    kind = int(head.number("<I"))
    if kind not in _TENSOR_TYPES:
        raise _GgufFault(f"its tensor {name[:80]} is of an unknown type {kind}")
    type_name, block, block_bytes = _TENSOR_TYPES[kind]
    elements = 1
    for extent in shape:
        elements *= extent
    if shape[0] % block or not elements:
        raise _GgufFault(f"its tensor {name[:80]} has a shape that {type_name} cannot hold")
    offset = head.count(1 << 50, f"bytes before {name[:80]}")
    return GgufTensor(name, type_name, elements, elements // block * block_bytes), offset
