"""In which form each tensor is served: plain, as packed 4-bit integers, or as 8-bit integers.

Knows no files, no values and no device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.tensor_names import TensorShape, model_tensors

WeightForm = Literal["plain", "packed", "int8"]
QUANTIZATIONS = ("none", "int8")
UNPACKINGS = ("step", "load")
_FORM_SCALE_BYTES = {"packed": 2, "int8": 4}  # bf16 as stored; f32 for the scale of a row


def weight_forms(
    config: Gemma4Config, packed: Collection[str], quantization: str = "none", unpack: str = "step"
) -> dict[str, WeightForm]:
    """The form of each tensor by name. `packed`: those that are stored so.

    int8 is for the matrices of attention, MLPs, experts and per-layer gates. The embedding, which
    is the head, stays plain: its error would be the logits' own. So do the table, of which a step
    reads a few rows, and what is small: norms, the router, the per-layer projection.
    Raises ModelRefused where int8 is asked for and the checkpoint is packed already.
    """
    if config.packed and quantization != "none":
        raise ModelRefused(
            f"the checkpoint's matrices are packed 4-bit integers: {quantization} is made of bf16"
            " or f32 ones"
        )
    forms: dict[str, WeightForm] = {}
    for name in model_tensors(config):
        if name in packed and unpack == "step":
            forms[name] = "packed"
        else:
            forms[name] = "int8" if quantization == "int8" and is_int8_tensor(name) else "plain"
    return forms


def is_int8_tensor(name: str) -> bool:
    """Whether quantising makes integers of it: the matrices of which a layer is made."""
    if not name.startswith("layers.") or "norm" in name or ".router." in name:
        return False
    return name.endswith(("_proj.weight", "_proj", "_gate.weight", "_projection.weight"))


def stored_bytes(config: Gemma4Config, shape: TensorShape, form: WeightForm, element: int) -> int:
    """Bytes of a tensor in that form; `element` is the size of a plain element."""
    elements = math.prod(shape)
    if form == "plain":
        return elements * element
    group = shape[-1]
    if form == "packed" and config.packed:
        group = config.packed.group
    integers = elements // 2 if form == "packed" else elements
    return integers + elements // group * _FORM_SCALE_BYTES[form]


def forms_title(forms: Mapping[str, WeightForm], dtype: str) -> str:
    """The forms in a few words for people."""
    names = {"packed": "packed 4-bit integers", "int8": "8-bit integers"}
    found = [words for form, words in names.items() if form in forms.values()]
    return " and ".join([*found, dtype])
