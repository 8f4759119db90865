"""gpu-vllm-g6-2b: Gemma 4 E2B through vLLM on one NVIDIA L4 of EC2 (g6).

The machine boots vLLM's container by itself and is reached through Systems Manager; no port is
open. As an MCP server it speaks stdio; `python3 server.py --help` lists the other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.ec2_rig import AWS_REQUIREMENTS, EC2_COMMANDS
from forge.parts.assembly.ec2_vllm_rig import (
    EC2_VLLM_TOOLSETS,
    Ec2VllmSettings,
    RentedEc2Vllm,
    ec2_vllm_runtime,
)
from forge.parts.assembly.rented_machine import RENTED_OFF_BY_DEFAULT
from forge.parts.assembly.rig import Rig

RIG = Rig(
    name="gpu-vllm-g6-2b",
    about=(
        "Serves Gemma 4 E2B with vLLM on one rented NVIDIA L4 of AWS EC2 (g6), which is billed "
        "from its launch until it is terminated."
    ),
    order=(
        "Usual order: get_system_status, estimate_deployment_cost, find_gpu, get_job until found, "
        "wait_for_vllm_ready until state is ready, query_gemma4, plan_destroy, "
        "destroy_gpu_instance."
    ),
    settings=Ec2VllmSettings,
    plane_words={"cold_boot": "A cold boot is expected to take about 10 minutes"},
    make_plane=RentedEc2Vllm,
    make_runtime=ec2_vllm_runtime,
    toolsets=EC2_VLLM_TOOLSETS,
    off_by_default=(*RENTED_OFF_BY_DEFAULT, "power"),
    runtime_requirements=AWS_REQUIREMENTS,
    programs=("ec2_boot", "ssm_tunnel", "loadgen", "triage", "probe", "plan", "judge"),
    commands=EC2_COMMANDS,
    twin="gpu-jax-g6-2b",
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
