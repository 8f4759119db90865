"""local-llamacpp-cpu-2b-q4_0: Gemma 4 E2B in q4_0 through llama.cpp on this computer's processor.

Four bits a weight instead of sixteen: the smallest of the local rigs. Nothing is rented. As an MCP
server it speaks stdio; `python3 server.py --help` lists the other commands.
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
from forge.parts.runtimes.llama_server import (
    LLAMA_SERVER_REQUIREMENTS,
    LlamaServer,
    LlamaServerSettings,
)
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.diagnosis import DiagnosisToolset
from forge.parts.toolsets.llama import LlamaToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.work import JobsToolset


class LocalLlamaSettings(ThisComputerSettings, LlamaServerSettings, DiagnosisSettings):
    """Every key that this rig's tpu.env may hold."""


def local_llama_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> LlamaServer:
    """The runtime over this rig's own settings."""

    def settings() -> LocalLlamaSettings:
        return cast(LocalLlamaSettings, load())

    return LlamaServer(settings, lambda: settings().port, paths.cache)


RIG = Rig(
    name="local-llamacpp-cpu-2b-q4_0",
    about=(
        "Serves Gemma 4 E2B in q4_0, or the small embedded SmolLM2-135M, with llama.cpp on the CPU "
        "of this computer. Nothing is rented and nothing is billed."
    ),
    order=(
        "Usual order: get_system_status, build_llama_server once, serve_model, "
        "wait_for_model_ready until state is ready, verify_model_health, query_gemma4, stop_model."
    ),
    settings=LocalLlamaSettings,
    plane_words={},
    make_plane=lambda paths, label, journal, _load: ThisComputer(paths, label, journal),
    make_runtime=local_llama_runtime,
    toolsets=(
        ServingToolset,
        ModelToolset,
        LlamaToolset,
        JobsToolset,
        MetricsToolset,
        BenchmarkToolset,
        ReportsToolset,
        PlanningToolset,
        ProbingToolset,
        DiagnosisToolset,
    ),
    runtime_requirements=LLAMA_SERVER_REQUIREMENTS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
