"""local-pytorch-cpu-2b: Gemma 4 E2B through PyTorch (transformers serve) on this computer's CPU.

The reference implementation and the rig of the demo: nothing is rented, stopping is a complete
teardown. As an MCP server it speaks stdio; `python3 server.py --help` lists the other commands.
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
from forge.parts.runtimes.transformers_serve import (
    TRANSFORMERS_SERVE_REQUIREMENTS,
    TransformersServe,
    TransformersServeSettings,
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


class LocalPytorchSettings(ThisComputerSettings, TransformersServeSettings, DiagnosisSettings):
    """Every key that this rig's tpu.env may hold."""


def local_pytorch_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> TransformersServe:
    """The runtime over this rig's own settings."""

    def settings() -> LocalPytorchSettings:
        return cast(LocalPytorchSettings, load())

    return TransformersServe(settings, lambda: settings().port, paths.cache)


RIG = Rig(
    name="local-pytorch-cpu-2b",
    about=(
        "Serves Gemma 4 E2B, or the small embedded SmolLM2-135M, with PyTorch (transformers serve) "
        "on the CPU of this computer. Nothing is rented and nothing is billed."
    ),
    order=(
        "Usual order: get_system_status, serve_model, wait_for_model_ready until state is ready, "
        "verify_model_health, query_gemma4, stop_model."
    ),
    settings=LocalPytorchSettings,
    plane_words={},
    make_plane=lambda paths, label, journal, _load: ThisComputer(paths, label, journal),
    make_runtime=local_pytorch_runtime,
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
    runtime_requirements=TRANSFORMERS_SERVE_REQUIREMENTS,
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
