"""Puts an engine on as many devices as are asked for: parts of one model, copies of it, or both.

Knows no programs and no requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.partition import refuse_uneven
from forge.engines.jax.engine import JaxEngine
from forge.engines.jax.mesh import DeviceGroup
from forge.engines.serving.replicated_engine import ReplicatedEngine
from forge.engines.serving.slot_engine import EngineFault, SlotEngine


def engine_on_devices(
    folder: Path, tensor_parallel: int, data_parallel: int, **settings: Any
) -> SlotEngine:
    """`data_parallel` copies of the model, each on `tensor_parallel` devices in JAX's order.

    settings: as JaxEngine has them; slots are each copy's own, prefix_cache_gb is shared out. One
    device is JAX's default one.
    Raises as JaxEngine does, ModelRefused where the model does not come out even, EngineFault
    where there are too few devices.
    """
    wanted = tensor_parallel * data_parallel
    if wanted == 1:
        return JaxEngine(folder, **settings)
    config = read_config(folder)
    refuse_uneven(config, tensor_parallel)
    devices = jax.local_devices()
    if len(devices) < wanted:
        raise EngineFault(
            f"tensor parallel {tensor_parallel} times data parallel {data_parallel} takes {wanted}"
            f" devices; here are {len(devices)} ({devices[0].device_kind})"
        )
    settings["prefix_cache_gb"] = settings.get("prefix_cache_gb", 0.0) / data_parallel
    groups = [
        DeviceGroup(config, devices[first : first + tensor_parallel])
        for first in range(0, wanted, tensor_parallel)
    ]
    original = JaxEngine(folder, group=groups[0], **settings)
    if data_parallel == 1:
        return original
    copies = [JaxEngine(folder, group=group, original=original, **settings) for group in groups[1:]]
    return ReplicatedEngine([original, *copies])
