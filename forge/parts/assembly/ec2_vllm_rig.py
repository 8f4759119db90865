"""A rig that serves vLLM in a container on the GPU machine which it rents from EC2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from forge.parts.assembly.ec2_rig import EC2_TOOLSETS, RentedEc2, RentedEc2Settings
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.runtimes.vllm_cuda_docker import VllmCudaDocker, VllmCudaDockerSettings
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.machine_tools import MachineAddressToolset
from forge.parts.toolsets.rented_serving import RentedServingToolset
from forge.parts.toolsets.toolset import Toolset
from forge.parts.toolsets.vllm_query import VllmQueryToolset

EC2_VLLM_TOOLSETS: Sequence[type[Toolset]] = (
    SearchingCapacityToolset,
    RentedServingToolset,
    *EC2_TOOLSETS,
    MachineAddressToolset,
    VllmQueryToolset,
)


class Ec2VllmSettings(RentedEc2Settings, VllmCudaDockerSettings):
    """Every key that the tpu.env of such a rig may hold."""


class RentedEc2Vllm(RentedEc2):
    """EC2, and vLLM in a container there."""

    boot_program = "ec2_boot.py"
    vocabulary: Mapping[str, str] = {**RentedEc2.vocabulary, "docker": "vllm_docker"}


def ec2_vllm_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> VllmCudaDocker:
    """The runtime over the rig's own settings."""
    del paths
    return VllmCudaDocker(cast(Callable[[], VllmCudaDockerSettings], load))
