"""tpu-vllm-v5e1-2b-q4_0: the q4_0-trained Gemma 4 E2B on vLLM and one TPU v5e chip.

The machine boots vLLM's container by itself and is reached through a tunnel. As an MCP server it
speaks stdio; `python3 server.py --help` lists the other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.parts.assembly.cloud_tpu_rig import CloudTpuVllmSettings, RentedCloudTpu
from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rented_google import GOOGLE_REQUIREMENTS
from forge.parts.assembly.rented_machine import RENTED_COMMANDS, RENTED_OFF_BY_DEFAULT
from forge.parts.assembly.rented_vllm import (
    RENTED_PROGRAMS,
    RENTED_TPU_WORDS,
    RENTED_VLLM_TOOLSETS,
    rented_vllm_runtime,
)
from forge.parts.assembly.rig import Rig
from forge.parts.toolsets.queued_tools import QueuedResourceToolset

RIG = Rig(
    name="tpu-vllm-v5e1-2b-q4_0",
    about=(
        "Keeps the record of what Gemma 4 E2B's q4_0-trained weights do on vLLM and one rented TPU "
        "v5e chip: they did not load when it was tried, so nothing is rented without an override."
    ),
    order=(
        "Usual order: get_system_status, estimate_deployment_cost, find_tpu, get_job until "
        "found, wait_for_vllm_ready until state is ready, query_gemma4, plan_destroy, "
        "destroy_queued_resource."
    ),
    settings=CloudTpuVllmSettings,
    plane_words=RENTED_TPU_WORDS,
    make_plane=RentedCloudTpu,
    make_runtime=rented_vllm_runtime,
    toolsets=(*RENTED_VLLM_TOOLSETS, QueuedResourceToolset),
    off_by_default=RENTED_OFF_BY_DEFAULT,
    runtime_requirements=GOOGLE_REQUIREMENTS,
    programs=RENTED_PROGRAMS,
    commands=RENTED_COMMANDS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
