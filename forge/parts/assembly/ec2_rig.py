"""EC2 as the plane of a rig that serves a model on the GPU machine which it rents there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from forge.parts.assembly.ec2_setup_command import SET_UP_COMMAND
from forge.parts.assembly.rented_machine import RENTED_COMMANDS, RentedMachine
from forge.parts.assembly.rig import RigCommand
from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.ec2 import Ec2
from forge.parts.planes.ec2_needs import aws_needs
from forge.parts.planes.ec2_settings import Ec2Settings, ec2_home_region
from forge.parts.planes.plane import PlaneNeed
from forge.parts.toolsets.aws_tools import AwsProjectToolset
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.deployment import DeploymentToolset, boot_document_file
from forge.parts.toolsets.diagnosis import DiagnosisToolset
from forge.parts.toolsets.gpu_machine import GpuMachineToolset, PowerToolset
from forge.parts.toolsets.load_record import LoadMatrixToolset
from forge.parts.toolsets.machine_tools import MachineConsoleToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.planning import PlanningToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.rental_costs import HubTokenSettings, QuotaToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.toolset import Toolset
from forge.parts.toolsets.work import JobsToolset

# AWS's SDK: EC2, Systems Manager, Secrets Manager, Service Quotas.
AWS_REQUIREMENTS = ("boto3>=1.44,<2",)
EC2_COMMANDS: Mapping[str, RigCommand] = {**RENTED_COMMANDS, "set-up": SET_UP_COMMAND}
EC2_TOOLSETS: Sequence[type[Toolset]] = (
    ModelToolset,
    JobsToolset,
    MetricsToolset,
    BenchmarkToolset,
    DiagnosisToolset,
    AwsProjectToolset,
    QuotaToolset,
    MachineConsoleToolset,
    GpuMachineToolset,
    PowerToolset,
    DeploymentToolset,
    LoadMatrixToolset,
    ReportsToolset,
    PlanningToolset,
    ProbingToolset,
)


class RentedEc2Settings(Ec2Settings, HubTokenSettings, DiagnosisSettings):
    """The keys of such a rig beside its runtime's."""


class RentedEc2(Ec2, RentedMachine):
    """EC2, and a model server on the machine that is rented there."""

    vocabulary: Mapping[str, str] = {**Ec2.vocabulary, "serve": "find_gpu()"}

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        RentedMachine.__init__(self, paths, label, journal, load)
        values = cast(Callable[[], Ec2Settings], load)
        Ec2.__init__(self, values, self._boot_files, paths.programs / "ssm_tunnel.py")

    def _boot_files(self) -> Mapping[str, Path]:
        document = boot_document_file(self._paths.state)
        return {"boot-program": self._program, "gemma4-boot": document}

    def boot_words(self) -> Mapping[str, str]:
        """What the machine has to know of the account beside the runtime's own document."""
        return {"region": ec2_home_region(self._settings())}

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        """Credentials of the account, the plugin for the way in, the machine's profile."""
        try:
            settings = self._settings()
        except RigError:
            return []  # the settings' own row says what is wrong with them
        found = await aws_needs(settings)
        return [*found, *(PlaneNeed("caution", True, words) for words in self.cautions())]
