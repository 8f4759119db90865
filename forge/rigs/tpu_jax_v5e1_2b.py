"""tpu-jax-v5e1-2b: Gemma 4 E2B in w4a16 through the JAX engine on one TPU v5e chip.

The machine gets jax_server.py at its boot and is reached through a tunnel. As an MCP server it
speaks stdio; `python3 server.py --help` lists the other commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.jax_tpu_rig import (
    JAX_TPU_PROGRAMS,
    JAX_TPU_TOOLSETS,
    JaxTpuSettings,
    RentedJaxTpu,
    jax_tpu_runtime,
)
from forge.parts.assembly.rented_google import GOOGLE_REQUIREMENTS
from forge.parts.assembly.rented_machine import RENTED_COMMANDS, RENTED_OFF_BY_DEFAULT
from forge.parts.assembly.rig import Rig

RIG = Rig(
    name="tpu-jax-v5e1-2b",
    about=(
        "Serves Gemma 4 E2B, in 4-bit weights, with this project's own JAX engine on one rented "
        "TPU v5e chip, which is billed from its grant until it is deleted. No container, no "
        "Hugging Face token."
    ),
    order=(
        "Usual order: get_system_status, estimate_deployment_cost, find_tpu, get_job until "
        "found, wait_for_jax_ready until state is ready, query_gemma4, plan_destroy, "
        "destroy_queued_resource."
    ),
    settings=JaxTpuSettings,
    plane_words={"cold_boot": "A cold boot fetches 8.3 GB and compiles each shape"},
    make_plane=RentedJaxTpu,
    make_runtime=jax_tpu_runtime,
    toolsets=JAX_TPU_TOOLSETS,
    off_by_default=(*RENTED_OFF_BY_DEFAULT, "console"),
    runtime_requirements=GOOGLE_REQUIREMENTS,
    programs=JAX_TPU_PROGRAMS,
    commands=RENTED_COMMANDS,
    twin="tpu-vllm-v5e1-2b-w4a16",
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
