"""The chips that `make aot` compiles for, and how their compilers are found without one of them.

Knows no model and compiles nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge.launch import install

AotPlatform = Literal["tpu", "cuda"]

# libtpu off a TPU: not to ask a metadata server (29 s a key), several at once, no log folder.
_LIBTPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
_NVCC = "nvidia-cuda-nvcc-cu12==12.9.86"  # ptxas and libdevice
# What XLA asks of a card; its own list has neither of these two.
# https://github.com/openxla/xla, xla/stream_executor/device_description.proto
_CUDA_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {card}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class AotChip:
    """One chip. name: as in ACCELERATORS. topology: in its compiler's words. target: what the
    compiler has to be told of it, empty where it knows the chip.
    """

    name: str
    platform: AotPlatform
    topology: str
    target: str = ""

    def description(self) -> Any:
        """JAX's description of a machine with one such chip, whose devices can be compiled for."""
        from jax.experimental import topologies

        told: dict[str, Any] = {"topology": self.topology, "target_config": self.target}
        if self.platform == "tpu":
            told = {"topology_name": self.topology, "chips_per_host_bounds": [1, 1, 1]}
        return topologies.get_topology_desc(platform=self.platform, **told)


def _cuda_chip(name: str, title: str, card: str) -> AotChip:
    return AotChip(name, "cuda", "1x1x1", _CUDA_TARGET.format(card=card, name=title))


CHIPS = {
    chip.name: chip
    for chip in (
        AotChip("v5e", "tpu", "v5e:1x1"),
        AotChip("v6e", "tpu", "v6e:1x1"),
        # CUDA C++ Programming Guide 12.9, compute capabilities 8.9 and 7.5; NVIDIA's data sheets of
        # the L4 (7,424 cores, 300 GB/s) and the T4 (2,560 cores, 320 GB/s); read 2026-11-30.
        _cuda_chip(
            "l4",
            "NVIDIA L4",
            "cuda_compute_capability { major: 8 minor: 9 } core_count: 58 fpus_per_core: 128"
            " threads_per_core_limit: 1536 shared_memory_per_core: 102400"
            " shared_memory_per_block_optin: 101376 l2_cache_size: 50331648"
            " memory_bandwidth: 300000000000 clock_rate_ghz: 2.04 device_memory_size: 23654532382",
        ),
        _cuda_chip(
            "t4",
            "Tesla T4",
            "cuda_compute_capability { major: 7 minor: 5 } core_count: 40 fpus_per_core: 64"
            " threads_per_core_limit: 1024 shared_memory_per_core: 65536"
            " shared_memory_per_block_optin: 65536 l2_cache_size: 4194304"
            " memory_bandwidth: 320000000000 clock_rate_ghz: 1.59 device_memory_size: 15633680957",
        ),
    )
}


def compiler_requirements(platform: AotPlatform) -> list[str]:
    """The packages with that platform's compiler, in the releases that the installed JAX wants."""
    if platform == "cuda":
        release = importlib.metadata.version("jax")
        return [f"jax-cuda12-plugin=={release}", f"jax-cuda12-pjrt=={release}", _NVCC]
    for line in importlib.metadata.requires("jax") or ():
        found = re.match(r"(libtpu==[\w.*]+)\s*;.*extra == \"tpu\"", line)
        if found:
            return [found[1]]
    raise SystemExit("the installed jax names no libtpu")


def compiler_environment(platform: AotPlatform) -> tuple[str, dict[str, str]]:
    """(what it is, with its version; the environment in which JAX finds it), installed if lacking.

    In a folder of the cache, not beside JAX: there every start of JAX would look for the chip.
    """
    wanted = compiler_requirements(platform)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"requirements-{platform}.txt"
        file.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        packages = install([file])
    first = wanted[0].partition("==")[0]
    (found,) = importlib.metadata.distributions(name=first, path=[str(packages)])
    settings = {"JAX_PLATFORMS": "cpu", **_compiler_settings(platform, packages)}
    return f"{first} {found.version}", {**os.environ, **settings}


def _compiler_settings(platform: AotPlatform, packages: Path) -> Mapping[str, str]:
    if platform == "tpu":
        return {**_LIBTPU_SETTINGS, "TPU_LIBRARY_PATH": str(packages / "libtpu/libtpu.so")}
    # Without a card there is nothing to try kernels on; Triton's products need such trials.
    flags = f"--xla_gpu_cuda_data_dir={packages / 'nvidia/cuda_nvcc'}"
    flags += " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    places = [str(packages), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(places)}
