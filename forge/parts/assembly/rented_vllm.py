"""What rigs that rent a machine of Google's for vLLM have in common: values, tools, commands.

Knows no plane: the modules beside it put one under this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from forge.parts.assembly.rented_machine import RentedMachine
from forge.parts.boundaries.google_logs import LoggedMachine, rig_log_text
from forge.parts.ground.names import slug_of
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import PlaneNeed
from forge.parts.runtimes.vllm_tpu_docker import VllmTpuDocker, VllmTpuDockerSettings
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.cloud_diagnosis import (
    CloudDiagnosisToolset,
    CloudLogResource,
    CloudLogSeverity,
)
from forge.parts.toolsets.deployment import ClusterDeploymentToolset, boot_paths
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

# Secret Manager and Cloud Logging. gcloud does the rest.
GOOGLE_REQUIREMENTS = ("google-cloud-logging>=3.17,<4", "google-cloud-secret-manager>=2.32,<3")
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

    project: str


class RentedVllmPlane(RentedMachine):
    """And what Google's planes have in common beside."""

    log_kind: Literal["gce_instance", "tpu_worker"] = "gce_instance"

    async def read_cloud_logs(
        self, minutes: int, severity: CloudLogSeverity, resource: CloudLogResource
    ) -> str:
        """The log store's entries of this rig's machine, the present one or the last."""
        record = self.record()
        machine = LoggedMachine(self.log_kind, record.name, record.zone, record.provider_id)
        return await rig_log_text(self._project(), machine, minutes, severity, resource)

    def _project(self) -> str:
        return cast(RentedVllmSettings, self._values()).project

    def boot_paths(self) -> Mapping[str, Path]:
        """The files of a machine's metadata by key, written already or not."""
        return boot_paths(self._paths.state, self._program)

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        raise NotImplementedError


def rented_vllm_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> VllmTpuDocker:
    """The runtime over the rig's own settings; its documents bear the rig's name."""
    return VllmTpuDocker(cast(Callable[[], VllmTpuDockerSettings], load), slug_of(paths.state.name))
