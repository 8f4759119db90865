"""gpu-llamacpp-g5g-2b-q4_0: Gemma 4 E2B in q4_0 through llama.cpp on one NVIDIA T4G of EC2 (g5g).

The machine builds llama-server for its own GPU at its first boot and is reached through Systems
Manager; no port is open. As an MCP server it speaks stdio; `python3 server.py --help` lists the
other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.ec2_llama_rig import (
    EC2_LLAMA_TOOLSETS,
    Ec2LlamaSettings,
    RentedEc2Llama,
    ec2_llama_runtime,
)
from forge.parts.assembly.ec2_rig import AWS_REQUIREMENTS, EC2_COMMANDS
from forge.parts.assembly.rented_machine import RENTED_OFF_BY_DEFAULT
from forge.parts.assembly.rig import Rig

RIG = Rig(
    name="gpu-llamacpp-g5g-2b-q4_0",
    about=(
        "Serves Gemma 4 E2B, quantised to q4_0, with llama.cpp on one rented NVIDIA T4G of AWS EC2 "
        "(g5g, Graviton2), which is billed from its launch until it is terminated. The machine "
        "builds the server itself."
    ),
    order=(
        "Usual order: get_system_status, estimate_deployment_cost, find_gpu, get_job until found, "
        "verify_gpu_arch, get_build_progress, wait_for_model_ready until state is ready, "
        "query_gemma4, plan_destroy, destroy_gpu_instance."
    ),
    settings=Ec2LlamaSettings,
    plane_words={
        "cold_boot": "The first boot builds the server, which may take an hour; a start after a "
        "stop takes minutes"
    },
    make_plane=RentedEc2Llama,
    make_runtime=ec2_llama_runtime,
    toolsets=EC2_LLAMA_TOOLSETS,
    off_by_default=(*RENTED_OFF_BY_DEFAULT, "power", "console"),
    runtime_requirements=AWS_REQUIREMENTS,
    programs=("ec2_llama_boot", "ssm_tunnel", "loadgen", "triage", "probe", "plan", "judge"),
    commands=EC2_COMMANDS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
