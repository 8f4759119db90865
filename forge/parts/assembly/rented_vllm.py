"""What rigs that rent a machine of Google's for vLLM have in common: values, tools, runtime.

Knows no plane: the modules beside it put one under this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from forge.parts.ground.names import slug_of
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.runtimes.vllm_tpu_docker import VllmTpuDocker, VllmTpuDockerSettings
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.cloud_diagnosis import CloudDiagnosisToolset
from forge.parts.toolsets.deployment import ClusterDeploymentToolset
from forge.parts.toolsets.google_tools import (
    GoogleProjectToolset,
    GoogleQuotaToolset,
)
from forge.parts.toolsets.load_record import LoadMatrixToolset
from forge.parts.toolsets.machine_tools import MachineAddressToolset, MachineConsoleToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.rental_costs import HubTokenSettings
from forge.parts.toolsets.rented_serving import RentedServingToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.toolset import Toolset
from forge.parts.toolsets.vllm_query import VllmQueryToolset
from forge.parts.toolsets.work import JobsToolset

RENTED_PROGRAMS = ("boot", "loadgen", "triage", "probe", "plan", "judge")
RENTED_VLLM_TOOLSETS: Sequence[type[Toolset]] = (
    SearchingCapacityToolset,
    RentedServingToolset,
    ModelToolset,
    JobsToolset,
    MetricsToolset,
    BenchmarkToolset,
    CloudDiagnosisToolset,
    GoogleProjectToolset,
    GoogleQuotaToolset,
    MachineConsoleToolset,
    ClusterDeploymentToolset,
    LoadMatrixToolset,
    MachineAddressToolset,
    VllmQueryToolset,
    ReportsToolset,
    PlanningToolset,
    ProbingToolset,
)
RENTED_TPU_WORDS = {"cold_boot": "A cold boot takes about 10 minutes"}


class RentedVllmSettings(VllmTpuDockerSettings, HubTokenSettings, DiagnosisSettings):
    """The keys of such a rig beside its plane's."""


def rented_vllm_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> VllmTpuDocker:
    """The runtime over the rig's own settings; its documents bear the rig's name."""
    return VllmTpuDocker(cast(Callable[[], VllmTpuDockerSettings], load), slug_of(paths.state.name))
