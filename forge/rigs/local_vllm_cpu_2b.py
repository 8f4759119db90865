"""local-vllm-cpu-2b: Gemma 4 E2B through vLLM's CPU backend on this computer.

The same runtime that rented accelerators get, where nothing is rented. vLLM pins its own PyTorch,
so it lives in an environment of its own. As an MCP server it speaks stdio;
`python3 server.py --help` lists the other commands.
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
from forge.parts.runtimes.vllm_cpu import VLLM_CPU_REQUIREMENTS, VllmCpu, VllmCpuSettings
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.diagnosis import DiagnosisToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.vllm_query import VllmQueryToolset
from forge.parts.toolsets.vllm_tools import VllmBenchToolset, VllmInstallToolset
from forge.parts.toolsets.work import JobsToolset


class LocalVllmSettings(ThisComputerSettings, VllmCpuSettings, DiagnosisSettings):
    """Every key that this rig's tpu.env may hold."""


def local_vllm_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> VllmCpu:
    """The runtime over this rig's own settings."""

    def settings() -> LocalVllmSettings:
        return cast(LocalVllmSettings, load())

    return VllmCpu(settings, lambda: settings().port, paths)


RIG = Rig(
    name="local-vllm-cpu-2b",
    about=(
        "Serves Gemma 4 E2B, or the small embedded SmolLM2-135M, with vLLM on the CPU of this "
        "computer. Nothing is rented and nothing is billed."
    ),
    order=(
        "Usual order: get_system_status, install_vllm once, serve_model, wait_for_vllm_ready "
        "until state is ready, verify_model_health, query_gemma4, stop_model."
    ),
    settings=LocalVllmSettings,
    plane_words={},
    make_plane=lambda paths, label, journal, _load: ThisComputer(paths, label, journal),
    make_runtime=local_vllm_runtime,
    toolsets=(
        ServingToolset,
        ModelToolset,
        VllmInstallToolset,
        VllmQueryToolset,
        JobsToolset,
        MetricsToolset,
        BenchmarkToolset,
        VllmBenchToolset,
        ReportsToolset,
        PlanningToolset,
        ProbingToolset,
        DiagnosisToolset,
    ),
    runtime_requirements=VLLM_CPU_REQUIREMENTS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
