"""How arrays lie on several devices that run one model together: along one axis with a name.

Knows no programs and no slots. Programs are written for one device; XLA's partitioner cuts them by
where their arguments lie, and puts the devices' sums and gathers in. With one device there is no
mesh, and every function here gives back what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.partition import split_axis

_MESH_AXIS = "tensor"
_MESH_CACHE_HEADS = 1  # the axis of key heads, in all that is kept of keys and values
_MESH_TURNED = "turned_"  # of a packed weight: inputs first, where matrices have their outputs

MeshTree = TypeVar("MeshTree")


class DeviceGroup:
    """Devices that hold one copy of a model together, each a part of every large tensor.

    What goes where follows from where a leaf stands in its tree: under a tensor's name it is a
    weight, or a part of one (a packed weight's scales); under a layer's number it is of a cache,
    [rows, kv_heads, …]; all else is whole on every device.
    """

    def __init__(self, config: Gemma4Config, devices: Sequence[Any]) -> None:
        self._config = config
        self._mesh = jax.sharding.Mesh(np.array(devices), (_MESH_AXIS,))

    @property
    def ways(self) -> int:
        """How many devices."""
        return self._mesh.size

    def shardings(self, tree: Any) -> Any:
        """Where each leaf of `tree` lies: arrays, or their shapes."""
        return jax.tree_util.tree_map_with_path(self._sharding, tree)

    def placed(self, tree: MeshTree) -> MeshTree:
        """`tree` on these devices, from the host or from other devices."""
        moved: MeshTree = jax.device_put(tree, self.shardings(tree))
        return moved

    def zeros(self, shapes: MeshTree) -> MeshTree:
        """Zeros of these shapes; no device ever holds another's part."""
        made: MeshTree = jax.tree.map(
            lambda shape, where: jnp.zeros(shape.shape, shape.dtype, device=where),
            shapes,
            self.shardings(shapes),
        )
        return made

    def scope(self) -> AbstractContextManager[Any]:
        """Within it, what is traced is traced for these devices."""
        return jax.set_mesh(self._mesh)

    def _sharding(self, path: Sequence[Any], leaf: Any) -> Any:
        return jax.sharding.NamedSharding(self._mesh, _mesh_spec(self._axis(path, leaf.shape)))

    def _axis(self, path: Sequence[Any], shape: Sequence[int]) -> int | None:
        """Along which axis a leaf of that shape is split; None where it is whole everywhere."""
        keys = [step.key for step in path if isinstance(step, jax.tree_util.DictKey)]
        if not keys:
            return None
        axis: int | None = _MESH_CACHE_HEADS
        if isinstance(keys[0], str):
            axis = split_axis(self._config, keys[0], self.ways)
            parts = [step.name for step in path if isinstance(step, jax.tree_util.GetAttrKey)]
            if axis is not None and any(name.startswith(_MESH_TURNED) for name in parts):
                axis = 1 - axis
        # What of a packed weight has no such axis belongs to all parts alike.
        if axis is None or axis >= len(shape) or shape[axis] % self.ways:
            return None
        return axis


def placed_on(group: DeviceGroup | None, tree: MeshTree) -> MeshTree:
    """`tree` on the devices of `group`, or on JAX's default device."""
    placed: MeshTree = jax.device_put(tree) if group is None else group.placed(tree)
    return placed


def kept_in_place(caches: MeshTree) -> MeshTree:
    """Caches that go on lying where they came from.

    Else the partitioner spreads two key heads over two of four devices, as queries are, and brings
    the whole cache back to all four at the end of every decode.
    """
    if not _mesh_here():
        return caches
    ways = jax.sharding.get_abstract_mesh().size

    def held(cache: jax.Array) -> jax.Array:
        uneven = cache.shape[_MESH_CACHE_HEADS] % ways
        return _mesh_lying(cache, None if uneven else _MESH_CACHE_HEADS)

    kept: MeshTree = jax.tree.map(held, caches)
    return kept


def gathered(x: jax.Array) -> jax.Array:
    """x [..., n], each device's part of n beside the others', whole on every device.

    Both are asked for. Of the whole alone, the partitioner gathers the weights that x is a product
    of: 0.8 GB for E2B's head at every step (libtpu 0.0.42, v5e).
    """
    if not _mesh_here():
        return x
    return _mesh_lying(_mesh_lying(x, x.ndim - 1), None)


def summed_over_parts(
    function: Callable[..., jax.Array], whole: tuple[Any, ...], parts: tuple[Any, ...]
) -> jax.Array:
    """The sum of `function(first, *whole, *parts)` over the devices, each with its own parts.

    Every leaf of `parts` is split along its first axis, and `first` counts the rows before a
    device's own; the partitioner has no say within. With one device it is function(None, …).
    """
    if not _mesh_here():
        return function(None, *whole, *parts)
    anywhere, split = _mesh_spec(None), _mesh_spec(0)

    def here(whole: tuple[Any, ...], parts: tuple[Any, ...]) -> jax.Array:
        rows = jax.tree.leaves(parts)[0].shape[0]
        told = function(lax.axis_index(_MESH_AXIS) * rows, *whole, *parts)
        total: jax.Array = lax.psum(told, _MESH_AXIS)  # type: ignore[no-untyped-call]
        return total

    summed = jax.shard_map(here, in_specs=(anywhere, split), out_specs=anywhere, check_vma=False)
    total: jax.Array = summed(whole, parts)
    return total


def _mesh_spec(axis: int | None) -> jax.sharding.PartitionSpec:
    """Split along that axis, or whole everywhere."""
    names = () if axis is None else (*[None] * axis, _MESH_AXIS)
    return jax.sharding.PartitionSpec(*names)  # type: ignore[no-untyped-call]


def _mesh_lying(x: jax.Array, axis: int | None) -> jax.Array:
    """x, split along that axis or whole everywhere, whatever the partitioner would rather have."""
    here: jax.Array = lax.with_sharding_constraint(x, _mesh_spec(axis))  # type: ignore[no-untyped-call]
    return here


def _mesh_here() -> bool:
    """Whether what is traced right now is traced for several devices."""
    return bool(jax.sharding.get_abstract_mesh().size > 1)
