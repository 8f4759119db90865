"""Weights on the device: from views of a checkpoint's files, one tensor at a time.

Knows no layers. The only place that decides how a tensor lies in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.packed_tensors import PACKED_IN_WORD, PackedMatrix, unpacked_matrix
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_forms import WeightForm
from forge.engines.jax.cache import stand_in
from forge.engines.jax.mesh import DeviceGroup, placed_on
from forge.engines.jax.quantised import Int8Weight, PackedWeight, Weight, quantised_rows

_PARAMS_ALIGNED = 64  # bytes; from such an address JAX on a CPU takes an array over without a copy


def param_shapes(
    config: Gemma4Config, dtype: jnp.dtype, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, Any]:
    """The placed tensors of such a model, by name, as shapes; without `forms` all are plain."""
    shapes: dict[str, Any] = {}
    for name, shape in model_tensors(config).items():
        form = forms[name] if forms else "plain"
        shapes[name] = stand_in(shape, dtype)
        if form == "int8":
            scales = stand_in(shape[:-1], jnp.float32)
            shapes[name] = Int8Weight(stand_in(shape, jnp.int8), scales, dtype)
        elif form == "packed":
            assert config.packed is not None  # nothing else makes a tensor packed
            rows, columns = shape
            words = stand_in((columns // PACKED_IN_WORD, rows), jnp.uint32)
            scales = stand_in((columns // config.packed.group, rows), jnp.bfloat16)
            shapes[name] = PackedWeight(words, scales, dtype)
    return shapes


def place_params(
    weights: Mapping[str, np.ndarray | PackedMatrix],
    dtype: jnp.dtype,
    placed: Callable[[float], None],
    forms: Mapping[str, WeightForm] | None = None,
    group: DeviceGroup | None = None,
) -> dict[str, Weight]:
    """The tensors on `group`, or on the default device; `placed` hears the share of bytes done.

    Plain ones in `dtype`, others in their form of `forms`; without `forms` all become plain.
    A tensor is placed, and its pages of the file forgotten, before the next one is read. So memory
    rises to the weights themselves and, on a device of its own, one tensor on its way there: by
    451 MiB for 468 MiB of f32 weights on a CPU, where some stay in the file, and by 243 MiB for the
    same in bf16, 234 MiB (Linux, jax 0.10.2).
    """
    total = sum(view.nbytes for view in weights.values())
    done = 0
    params: dict[str, Weight] = {}
    for name, view in weights.items():
        made = _params_formed(view, dtype, forms[name] if forms else "plain")
        params |= placed_on(group, {name: made})
        jax.block_until_ready(params[name])  # type: ignore[no-untyped-call]
        for part in view if isinstance(view, PackedMatrix) else (view,):
            _params_pages_forgotten(part)
        done += view.nbytes
        placed(done / total)
    return params


def _params_formed(view: np.ndarray | PackedMatrix, dtype: jnp.dtype, form: WeightForm) -> Any:
    """A stored tensor as it is served, in numpy's arrays."""
    if form == "packed":
        assert isinstance(view, PackedMatrix)
        words, scales = (np.ascontiguousarray(part.T) for part in view)
        return PackedWeight(words, scales, dtype)  # type: ignore[arg-type]
    plain = unpacked_matrix(view) if isinstance(view, PackedMatrix) else view
    if form == "int8":
        return Int8Weight(*quantised_rows(plain), dtype)  # type: ignore[arg-type]
    return _params_converted(plain, dtype)


def _params_converted(view: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """The tensor in `dtype`: itself, or a new array at an address that JAX takes over as it is."""
    if view.dtype == dtype:
        return view
    size = view.size * dtype.itemsize
    room = np.empty(size + _PARAMS_ALIGNED, np.uint8)
    start = -room.ctypes.data % _PARAMS_ALIGNED
    converted: np.ndarray = room[start : start + size].view(dtype).reshape(view.shape)
    np.copyto(converted, view, casting="unsafe")
    return converted


def _params_pages_forgotten(view: np.ndarray) -> None:
    """Let the system drop the pages of a mapped file that were read for `view`.

    They count as this process's memory until then. An array that JAX took over where it lies in
    the file finds its pages again.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = view.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    page = begin - begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, page, begin + view.nbytes - page)
