"""tpu-vllm-v6e1-2b: Gemma 4 E2B through vLLM on one TPU v6e chip of Compute Engine.

The machine boots vLLM's container by itself and is reached through a tunnel. As an MCP server it
speaks stdio; `python3 server.py --help` lists the other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.compute_engine_rig import ComputeEngineVllmSettings, RentedComputeEngine
from forge.parts.assembly.rented_google import GOOGLE_REQUIREMENTS
from forge.parts.assembly.rented_machine import RENTED_COMMANDS, RENTED_OFF_BY_DEFAULT
from forge.parts.assembly.rented_vllm import (
    RENTED_PROGRAMS,
    RENTED_TPU_WORDS,
    RENTED_VLLM_TOOLSETS,
    rented_vllm_runtime,
)
from forge.parts.assembly.rig import Rig

RIG = Rig(
    name="tpu-vllm-v6e1-2b",
    about=(
        "Serves Gemma 4 E2B with vLLM on one rented TPU v6e chip of Google Compute Engine, which "
        "is billed from its grant until it is deleted."
    ),
    order=(
        "Usual order: get_system_status, estimate_deployment_cost, find_tpu_vm, get_job until "
        "found, wait_for_vllm_ready until state is ready, query_gemma4, plan_destroy, "
        "destroy_tpu_vm_instance."
    ),
    settings=ComputeEngineVllmSettings,
    plane_words=RENTED_TPU_WORDS,
    make_plane=RentedComputeEngine,
    make_runtime=rented_vllm_runtime,
    toolsets=RENTED_VLLM_TOOLSETS,
    off_by_default=RENTED_OFF_BY_DEFAULT,
    runtime_requirements=GOOGLE_REQUIREMENTS,
    programs=RENTED_PROGRAMS,
    commands=RENTED_COMMANDS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
