"""A rig that serves llama.cpp, built there, on the GPU machine which it rents from EC2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from forge.parts.assembly.ec2_rig import EC2_TOOLSETS, RentedEc2, RentedEc2Settings
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.ec2_settings import Ec2Chip, Ec2ImagePath, Ec2InstanceType
from forge.parts.runtimes.llama_machine import LlamaMachine, LlamaMachineSettings
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.gpu_machine import BuildProgressToolset
from forge.parts.toolsets.rented_serving import RentedProgramToolset
from forge.parts.toolsets.toolset import Toolset

EC2_LLAMA_TOOLSETS: Sequence[type[Toolset]] = (
    SearchingCapacityToolset,
    RentedProgramToolset,
    *EC2_TOOLSETS,
    BuildProgressToolset,
)


class Ec2LlamaSettings(RentedEc2Settings, LlamaMachineSettings):
    """Every key that the tpu.env of such a rig may hold.

    A machine that is not spoken of in tpu.env is one that GPU_ARCH's own default is for.
    """

    instance_type: Ec2InstanceType = "g5g.2xlarge"
    chip: Ec2Chip = "t4g"
    ami_parameter: Ec2ImagePath = (
        "/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    )


class RentedEc2Llama(RentedEc2):
    """EC2, and llama-server there."""

    boot_program = "ec2_llama_boot.py"
    server_kind = "server"


def ec2_llama_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> LlamaMachine:
    """The runtime over the rig's own settings."""
    del paths
    return LlamaMachine(cast(Callable[[], LlamaMachineSettings], load))
