"""A model folder as it lies on disk: is it whole, is it safe to load, how many bytes does it hold.

Reads headers only, never a tensor, and knows nothing of who will load it.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import json_object
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.geometry_config import geometry_from_config

# Formats that run code when they are loaded (pickle). facts: CVE-2025-32434, CVE-2026-24747.
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# Sizes in bytes of the safetensors element types: https://github.com/huggingface/safetensors
_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATING = ("F64", "F32", "F16", "BF16")
_HEADER_LIMIT = 100_000_000  # bytes; the format's own upper bound


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor by name: element type, number of elements, bytes on disk."""

    name: str
    element_type: str
    elements: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed every check. `size` is the sum of the tensors' bytes on disk."""

    folder: Path
    config: dict[str, Any]
    geometry: Geometry | None
    geometry_fault: str
    tensors: tuple[CheckpointTensor, ...]

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else "unknown"

    def loaded_size(self, element_bytes: int) -> int:
        """Bytes when every floating tensor is held in `element_bytes` a number, others as they are.

        This is what a loader that casts to one type allocates; sharing of tied tensors is on disk
        already, because a tied head is not stored twice.
        """
        return sum(
            tensor.elements * element_bytes if tensor.element_type in _FLOATING else tensor.size
            for tensor in self.tensors
        )

    def per_layer_embedding_size(self, element_bytes: int) -> int:
        """Bytes of Gemma 4's per-layer embedding table, a gather that may stay in page cache."""
        return sum(
            tensor.elements * element_bytes
            for tensor in self.tensors
            if tensor.name.endswith("embed_tokens_per_layer.weight")
        )


def _refused(folder: Path, why: str, next_step: str) -> RigError:
    return RigError("INVALID", f"the model folder {folder} cannot be served: {why}", next_step)


def _safetensors_header(path: Path) -> list[CheckpointTensor]:
    """The tensors that `path` announces; RigError when the file is shorter than it announces."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size):
            raise _refused(path.parent, f"{path.name} is cut off or damaged", "download it again")
        header = json_object(file.read(length))
    if header is None:
        raise _refused(path.parent, f"the header of {path.name} is damaged", "download it again")
    tensors, end = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            element_type, shape = str(entry["dtype"]), entry["shape"]
            begin, finish = entry["data_offsets"]
            elements = math.prod(shape)
            known = _ELEMENT_BYTES.get(element_type)
            counts = all(type(number) is int and number >= 0 for number in (*shape, begin, finish))
            if not counts or (known and elements * known != finish - begin):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise _refused(
                path.parent, f"{path.name} describes {name[:80]} in no known way", "check the file"
            ) from None
        if known is None:
            raise _refused(
                path.parent,
                f"{path.name} holds elements of an unknown type {element_type[:20]}",
                "use a release in bf16, f16, f32 or an integer type",
            )
        tensors.append(CheckpointTensor(name, element_type, elements, finish - begin))
        end = max(end, finish)
    if 8 + length + end > size:
        missing = 8 + length + end - size
        raise _refused(
            path.parent, f"{path.name} lacks its last {missing} bytes", "let the download finish"
        )
    return tensors


# The files by which a release can ask its loader for code of its own.
_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)


def _config_of(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise _refused(folder, "it has no config.json", "give a folder made by save_pretrained")
    config = json_object((folder / "config.json").read_bytes())
    if config is None:
        raise _refused(folder, "its config.json is no JSON object", "download it again")
    for name in _CONFIGURATIONS:
        if "auto_map" in _settings_in(folder / name):
            raise RigError(
                "DENIED",
                f"{folder / name} asks for code of its own (auto_map), and no rig runs such code",
                "use a release whose architecture the runtime knows by itself",
            )
    return config


def _settings_in(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none."""
    return (json_object(path.read_bytes()) if path.is_file() else None) or {}


def has_chat_template(folder: Path) -> bool:
    """Whether a chat template lies in the folder, as a file or within the tokenizer's settings."""
    if any(folder.glob("chat_template.jinja")) or any(folder.glob("chat_template.json")):
        return True
    return bool(_settings_in(folder / "tokenizer_config.json").get("chat_template"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check that `folder` is a whole, safe Hugging Face folder, and measure it.

    Raises RigError INVALID or DENIED, each with what to do: no folder, half-downloaded (missing
    shard, `.incomplete` file, cut-off tensors), pickled weights, `auto_map`, no tokenizer, no chat
    template, a file that cannot be read.
    """
    try:
        return _checked_folder(folder)
    except OSError as error:
        where = Path(error.filename or folder).name
        why = f"{where} cannot be read ({error.strerror})"
        raise _refused(folder, why, "make it readable, or let the download finish") from None


def _checked_folder(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise _refused(folder, "there is no such folder", "check MODEL_NAME")
    names = sorted(path.name for path in folder.iterdir())
    pending = [name for name in names if name.endswith((".incomplete", ".part", ".tmp"))]
    if pending:
        raise _refused(
            folder, f"{pending[0]} shows an unfinished download", "let the download finish"
        )
    config = _config_of(folder)
    shards = [folder / name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.lower().endswith(_PICKLED_SUFFIXES)]
    if pickled:
        raise RigError(
            "DENIED",
            f"{folder / pickled[0]} is a pickle, which runs code when it is loaded",
            "use safetensors, and move this file out of the folder",
        )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _settings_in(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _refused(folder, f"{index.name} is damaged", "download it again")
        wanted = {str(name) for name in weight_map.values()}
        missing = sorted(wanted - {path.name for path in shards})
        if missing:
            raise _refused(
                folder,
                f"{len(missing)} of {len(wanted)} files are missing, {missing[0][:80]} first",
                "let the download finish",
            )
        # Some releases hold the same weights a second time under another name.
        shards = [path for path in shards if path.name in wanted]
    if not shards:
        raise _refused(folder, "it holds no .safetensors file", "download the weights")
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer.model").exists():
        raise _refused(folder, "it holds no tokenizer", "download tokenizer.json as well")
    if not has_chat_template(folder):
        raise _refused(
            folder,
            "it has no chat template, so chat requests would fail",
            "use an instruction-tuned release (-it), or add chat_template.jinja",
        )
    tensors = tuple(tensor for path in shards for tensor in _safetensors_header(path))
    try:
        geometry, fault = geometry_from_config(config), ""
    except ValueError as error:
        geometry, fault = None, str(error)
    return Checkpoint(folder, config, geometry, fault, tensors)
