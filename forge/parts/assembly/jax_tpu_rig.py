"""A rig that serves with the JAX engine, without a container, on the TPU machine which it rents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from forge.parts.assembly.rented_machine import RentedMachine
from forge.parts.assembly.rented_tpu import RentedTpu
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths, private_folder, write_private
from forge.parts.planes.host_plane import HostCommand
from forge.parts.planes.tpu_order import CloudTpuSettings
from forge.parts.runtimes.jax_machine import (
    JAX_ENGINE_FILE,
    JaxMachine,
    JaxMachineSettings,
    packed_engine,
)
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset
from forge.parts.toolsets.cloud_diagnosis import CloudDiagnosisToolset
from forge.parts.toolsets.deployment import BOOT_FOLDER, DeploymentToolset
from forge.parts.toolsets.google_tools import GoogleQuotaToolset
from forge.parts.toolsets.jax_engine import JaxEngineToolset
from forge.parts.toolsets.jax_planning import JaxPlanningToolset
from forge.parts.toolsets.machine_tools import MachineAddressToolset, MachineConsoleToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.queued_tools import QueuedResourceToolset
from forge.parts.toolsets.rental_costs import CostToolset
from forge.parts.toolsets.rented_serving import RentedProgramToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.second_opinion import DiagnosisSettings
from forge.parts.toolsets.toolset import Toolset
from forge.parts.toolsets.work import JobsToolset

JAX_TPU_PROGRAMS = ("jax_boot", "jax_server", "loadgen", "triage", "probe", "plan", "judge")
JAX_TPU_TOOLSETS: Sequence[type[Toolset]] = (
    SearchingCapacityToolset,
    RentedProgramToolset,
    JaxEngineToolset,
    ModelToolset,
    JobsToolset,
    MetricsToolset,
    BenchmarkToolset,
    CloudDiagnosisToolset,
    CostToolset,
    GoogleQuotaToolset,
    MachineConsoleToolset,
    DeploymentToolset,
    MachineAddressToolset,
    ReportsToolset,
    JaxPlanningToolset,
    ProbingToolset,
    QueuedResourceToolset,
)
_ENGINE_KEY = "gemma4-engine"  # of the metadata, where the machine's program looks for it
# The machine's program with what it is to lay down beside it: one text, as its Python reads it.
_DELIVERED = "GEMMA4_DELIVERY = {delivery!r}\nexec(compile({program!r}, 'jax_boot.py', 'exec'))\n"


class JaxTpuSettings(CloudTpuSettings, JaxMachineSettings, DiagnosisSettings):
    """Every key that the tpu.env of such a rig may hold."""


class RentedJaxTpu(RentedTpu):
    """The Cloud TPU API, and jax_server.py on the machine that is rented through it. The engine
    goes out with the machine's metadata, so that a machine serves by itself when it is granted."""

    boot_program = "jax_boot.py"
    server_kind = "server"
    vocabulary: Mapping[str, str] = {
        **RentedTpu.vocabulary,
        "machine": "model server on the rented TPU machine",
    }

    @property
    def _packed(self) -> Path:
        return self._paths.state / BOOT_FOLDER / "engine.b85"

    def boot_files(self) -> Mapping[str, Path]:
        private_folder(self._packed.parent)
        write_private(self._packed, packed_engine(self._paths.programs / JAX_ENGINE_FILE))
        return {**super().boot_files(), _ENGINE_KEY: self._packed}

    def boot_paths(self) -> Mapping[str, Path]:
        return {**super().boot_paths(), _ENGINE_KEY: self._packed}

    def host_program(self) -> bytes:
        return RentedMachine.host_program(self)  # whether or not a boot was planned from here

    async def deliver(self, release: Mapping[str, Any], timeout_s: float) -> str:
        """What the machine says to a release of the engine that is laid down there, over ssh's
        input. Raises RigError as act_on_host does."""
        self.machine_changed()
        packed = packed_engine(self._paths.programs / JAX_ENGINE_FILE)
        delivery = json.dumps({"release": release, "engine": packed})
        text = _DELIVERED.format(delivery=delivery, program=self.host_program().decode())
        command = HostCommand(text.encode(), "deploy", {})
        return await self.run_on_host(await self.running_machine(), command, timeout_s)


def jax_tpu_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> JaxMachine:
    """The runtime over the rig's own settings; its engine lies beside server.py."""
    return JaxMachine(cast(Callable[[], JaxMachineSettings], load), paths)
