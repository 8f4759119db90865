"""What rigs that rent a machine of Google's for vLLM have in common: values, tools, commands.

Knows no plane: the modules beside it put one under this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from forge.parts.assembly.rig import RigCommand
from forge.parts.assembly.take_down import take_down
from forge.parts.boundaries.google_logs import LoggedMachine, rig_log_text
from forge.parts.ground.journal import Journal
from forge.parts.ground.names import slug_of
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.hosted_serving import HostedServing
from forge.parts.planes.plane import PlaneNeed
from forge.parts.runtimes.vllm_docker import VllmDocker, VllmDockerSettings
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.cloud_diagnosis import (
    CloudDiagnosisToolset,
    CloudLogResource,
    CloudLogSeverity,
)
from forge.parts.toolsets.deployment import DeploymentToolset, boot_paths
from forge.parts.toolsets.google_tools import (
    GoogleProjectToolset,
    GoogleQuotaToolset,
    GoogleTokenSettings,
)
from forge.parts.toolsets.load_record import LoadMatrixToolset
from forge.parts.toolsets.machine_tools import MachineAddressToolset, MachineConsoleToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.rented_serving import RentedServingToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.toolset import Toolset
from forge.parts.toolsets.vllm_query import VllmQueryToolset
from forge.parts.toolsets.work import JobsToolset

# Secret Manager and Cloud Logging. gcloud does the rest.
GOOGLE_REQUIREMENTS = ("google-cloud-logging>=3.17,<4", "google-cloud-secret-manager>=2.32,<3")
RENTED_PROGRAMS = ("boot", "loadgen", "triage", "probe", "plan")
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
    DeploymentToolset,
    LoadMatrixToolset,
    MachineAddressToolset,
    VllmQueryToolset,
    ReportsToolset,
    PlanningToolset,
    ProbingToolset,
)
# 28 tools is what clients take well; these load through RIG_TOOLSETS.
RENTED_OFF_BY_DEFAULT = tuple(
    "address completions deployment loads metrics planning probes queued quota reports".split()
)
RENTED_COMMANDS: Mapping[str, RigCommand] = {
    "take-down": RigCommand("show, ask about and destroy everything that this rig rents", take_down)
}


class RentedVllmSettings(VllmDockerSettings, GoogleTokenSettings, DiagnosisSettings):
    """The keys of such a rig beside its plane's."""

    project: str


class RentedVllmPlane(HostedServing):
    """The half of the plane that serves vLLM on the machine which the other half rents."""

    log_kind: Literal["gce_instance", "tpu_worker"] = "gce_instance"

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        super().__init__(paths, label, journal)
        self._values = cast(Callable[[], RentedVllmSettings], load)
        self._program = paths.programs / "boot.py"  # it goes out with every machine

    def host_program(self) -> bytes:
        return self._program.read_bytes()

    def local_port(self) -> int:
        return self._values().port

    def served_model(self) -> str:
        return self._values().model_name

    async def read_cloud_logs(
        self, minutes: int, severity: CloudLogSeverity, resource: CloudLogResource
    ) -> str:
        """The log store's entries of this rig's machine, the present one or the last."""
        record = self.record()
        machine = LoggedMachine(self.log_kind, record.name, record.zone, record.provider_id)
        return await rig_log_text(self._values().project, machine, minutes, severity, resource)

    def boot_paths(self) -> Mapping[str, Path]:
        """The files of a machine's metadata by key, written already or not."""
        return boot_paths(self._paths.state, self._program)

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        raise NotImplementedError


def rented_vllm_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> VllmDocker:
    """The runtime over the rig's own settings; its documents bear the rig's name."""
    return VllmDocker(cast(Callable[[], VllmDockerSettings], load), slug_of(paths.state.name))
