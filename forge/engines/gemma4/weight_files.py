"""Opens a model folder's weights: the text half's tensors as views of the mapped files.

Knows no device and copies nothing: a page is read from disk when somebody looks at it.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.model_folder import folder_json, has_model_file, model_file
from forge.engines.gemma4.packed_tensors import (
    PackedMatrix,
    PackedPlace,
    is_packed_by,
    packed_places,
)
from forge.engines.gemma4.refusal import ModelRefused, WeightsRefused
from forge.engines.gemma4.safetensors_header import StoredTensor, safetensors_header
from forge.engines.gemma4.tensor_names import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    is_linear_tensor,
    match_tensors,
)

WeightArray = np.ndarray[Any, np.dtype[Any]]
WeightPlace = StoredTensor | PackedPlace

_WEIGHTS_FILE = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_WEIGHTS_COMPARED = 1 << 24  # bytes at once: what a comparison may take for itself
_WEIGHTS_FLOATS = ("BF16", "F32", "F16")


def stored_tensors(folder: Path, config: Gemma4Config) -> dict[str, WeightPlace]:
    """Where each of the text half's tensors lies, by its name in the model. Reads headers only.

    One file, or several with an index; each in any of bf16, f16 and f32, and matrices packed as
    and where the config says.
    Raises WeightsRefused that names the file or the tensor.
    """
    try:
        found = _weights_headers(folder)
    except WeightsRefused:
        raise
    except ModelRefused as refusal:
        raise WeightsRefused(str(refusal)) from None
    plain, packed = packed_places(found, config.packed)
    places: dict[str, WeightPlace] = {**plain, **packed}
    names = match_tensors(config, {name: place.shape for name, place in places.items()})
    if config.own_head and HEAD_TENSOR not in names:
        raise WeightsRefused(
            f"{HEAD_TENSOR} is missing: tie_word_embeddings = False in config.json"
        )
    for bare, name in names.items():
        if name in packed and not is_linear_tensor(bare, packed[name].shape):
            raise WeightsRefused(f"{name!r} is packed, which this engine does not read")
        if config.packed and bare != HEAD_TENSOR and is_linear_tensor(bare, places[name].shape):
            if is_packed_by(config.packed, name) != (name in packed):
                stored, meant = ("plain", "packed") if name in plain else ("packed", "plain")
                raise WeightsRefused(f"{name!r} is stored {stored}, config.json says {meant}")
        if name in plain and plain[name].element not in _WEIGHTS_FLOATS:
            raise WeightsRefused(
                f"the tensor {name!r} has elements of type {plain[name].element}; this engine"
                f" reads {', '.join(_WEIGHTS_FLOATS)}"
            )
    return {bare: places[name] for bare, name in names.items()}


def open_weights(folder: Path, config: Gemma4Config) -> Mapping[str, WeightArray | PackedMatrix]:
    """The text half's tensors by name (`layers.3.self_attn.q_proj.weight`), as they are stored.

    Read-only views of the mapped files, in the element type of the file (bf16 as
    ml_dtypes.bfloat16). The format aligns tensors to 8 bytes at best, so a view may not start
    where a device wants it. Files stay mapped as long as a view of them lives.
    A stored head is passed over where it is the embedding byte for byte, and refused otherwise:
    these models tie them, and transformers 5.24 unties what a file holds twice.
    Raises WeightsRefused.
    """
    places = stored_tensors(folder, config)
    mapped: dict[Path, memoryview] = {}

    def view(place: StoredTensor) -> WeightArray:
        if place.path not in mapped:
            mapped[place.path] = _weights_mapped(place.path)
        return _weights_view(mapped[place.path], place)

    opened: dict[str, WeightArray | PackedMatrix] = {}
    for name, place in places.items():
        if isinstance(place, StoredTensor):
            opened[name] = view(place)
            continue
        if tuple(view(place.stated)) != place.shape:
            raise WeightsRefused(f"{name} is {list(place.shape)}, beside it stands another shape")
        opened[name] = PackedMatrix(view(place.words), view(place.scales))
    head = opened.pop(HEAD_TENSOR, None)
    if head is not None and not _weights_equal(head, opened[EMBEDDING_TENSOR]):
        raise WeightsRefused(f"{HEAD_TENSOR} is another matrix than {EMBEDDING_TENSOR}")
    return opened


def _weights_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of all files, by their stored names."""
    if not has_model_file(folder, _WEIGHTS_INDEX):
        return safetensors_header(model_file(folder, _WEIGHTS_FILE))
    if has_model_file(folder, _WEIGHTS_FILE):
        raise WeightsRefused(f"{folder} has {_WEIGHTS_FILE} and an index: remove what is not meant")
    listed = folder_json(folder, _WEIGHTS_INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise WeightsRefused(f"{_WEIGHTS_INDEX} has no weight_map")
    found: dict[str, StoredTensor] = {}
    for name in {str(file): None for file in listed.values()}:
        if not name.endswith(".safetensors"):
            raise WeightsRefused(f"{_WEIGHTS_INDEX} names {name[:200]!r}: no safetensors file")
        here = safetensors_header(model_file(folder, name))
        promised = {tensor for tensor, where in listed.items() if where == name}
        odd = sorted(promised ^ set(here))
        if odd:
            raise WeightsRefused(f"{_WEIGHTS_INDEX} and {name} disagree over {odd[0][:200]!r}")
        found |= here
    return found


def _weights_mapped(path: Path) -> memoryview:
    """The whole file, read-only."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"{path.name} cannot be mapped: {error}") from None


def _weights_view(mapped: memoryview, place: StoredTensor) -> WeightArray:
    """The tensor's bytes as an array of its own element type and shape."""
    import ml_dtypes

    kinds: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}
    kinds |= {"I32": np.uint32, "I64": np.int64}  # packed words have no sign
    kind = np.dtype(kinds[place.element])
    elements = place.size // kind.itemsize
    return np.frombuffer(mapped, kind, elements, place.begin).reshape(place.shape)


def _weights_equal(one: WeightArray | PackedMatrix, other: WeightArray | PackedMatrix) -> bool:
    """Whether both are arrays that hold the same bytes, looked at piece by piece."""
    if isinstance(one, PackedMatrix) or isinstance(other, PackedMatrix) or one.dtype != other.dtype:
        return False
    first, second = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(first[at : at + _WEIGHTS_COMPARED], second[at : at + _WEIGHTS_COMPARED])
        for at in range(0, first.size, _WEIGHTS_COMPARED)
    )
