"""local-jax-cpu-2b: Gemma 4 E2B through the JAX engine that the rig carries, on this computer.

The engine is a file of its own, jax_server.py: what rented accelerators will get, where nothing is
rented. As an MCP server the rig speaks stdio; `python3 server.py --help` lists the other commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import Rig
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.this_computer import ThisComputer, ThisComputerSettings
from forge.parts.runtimes.jax_serve import (
    JAX_SERVE_REQUIREMENTS,
    JAX_SERVER,
    JaxServe,
    JaxServeSettings,
)
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.diagnosis import DiagnosisToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.work import JobsToolset


class LocalJaxSettings(ThisComputerSettings, JaxServeSettings, DiagnosisSettings):
    """Every key that this rig's tpu.env may hold."""


def local_jax_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> JaxServe:
    """The runtime over this rig's own settings."""

    def settings() -> LocalJaxSettings:
        return cast(LocalJaxSettings, load())

    return JaxServe(settings, lambda: settings().port, paths)


RIG = Rig(
    name="local-jax-cpu-2b",
    about=(
        "Serves Gemma 4 E2B, any other Gemma 4 in a folder, or a small random one for trying "
        "things out (its answers mean nothing), with the JAX engine that the rig carries, on the "
        "CPU of this computer. Nothing is rented and nothing is billed."
    ),
    order=(
        "Usual order: get_system_status, serve_model, wait_for_jax_ready until state is ready, "
        "verify_model_health, query_gemma4, stop_model."
    ),
    settings=LocalJaxSettings,
    plane_words={},
    make_plane=lambda paths, label, journal, _load: ThisComputer(paths, label, journal),
    make_runtime=local_jax_runtime,
    toolsets=(
        ServingToolset,
        ModelToolset,
        JobsToolset,
        MetricsToolset,
        BenchmarkToolset,
        ReportsToolset,
        PlanningToolset,
        ProbingToolset,
        DiagnosisToolset,
    ),
    runtime_requirements=JAX_SERVE_REQUIREMENTS,
    programs=("loadgen", "triage", "probe", "plan", "judge", JAX_SERVER),
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
