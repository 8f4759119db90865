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
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.jax.cache import stand_in
from forge.engines.jax.mesh import DeviceGroup, placed_on

_PARAMS_ALIGNED = 64  # bytes; from such an address JAX on a CPU takes an array over without a copy


def param_shapes(config: Gemma4Config, dtype: jnp.dtype) -> dict[str, Any]:
    """The placed tensors of such a model, by name, as shapes."""
    return {name: stand_in(shape, dtype) for name, shape in model_tensors(config).items()}


def place_params(
    weights: Mapping[str, np.ndarray],
    dtype: jnp.dtype,
    placed: Callable[[float], None],
    group: DeviceGroup | None = None,
) -> dict[str, jax.Array]:
    """The tensors in `dtype` on `group`, or on the default device.

    `placed` hears the share of bytes done.

    A tensor is placed, and its pages of the file forgotten, before the next one is read. So memory
    rises to the weights themselves and, on a device of its own, one tensor on its way there: by
    451 MiB for 468 MiB of f32 weights on a CPU, where some stay in the file, and by 243 MiB for the
    same in bf16, 234 MiB (Linux, jax 0.10.2).
    """
    total = sum(view.nbytes for view in weights.values())
    done = 0
    params: dict[str, jax.Array] = {}
    for name, view in weights.items():
        converted: Any = _params_converted(view, dtype)
        params |= placed_on(group, {name: converted})
        params[name].block_until_ready()
        _params_pages_forgotten(view)
        done += view.nbytes
        placed(done / total)
    return params


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
