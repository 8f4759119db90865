"""The half of a rented machine's plane that serves on it, over the rig's own values and program.

Knows no provider and no engine: the modules beside it put both under this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

from forge.parts.assembly.rig import RigCommand
from forge.parts.assembly.take_down import take_down
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.hosted_serving import HostedServing

# 28 tools is what clients take well; these load through RIG_TOOLSETS.
RENTED_OFF_BY_DEFAULT = tuple(
    "address completions deployment loads metrics planning probes queued quota reports".split()
)
RENTED_COMMANDS: Mapping[str, RigCommand] = {
    "take-down": RigCommand("show, ask about and destroy everything that this rig rents", take_down)
}


class MachineValues(Protocol):
    """The keys that this half reads; the runtime's settings have them."""

    port: int
    model_name: str


class RentedMachine(HostedServing):
    """HostedServing over the settings. `boot_program` goes out with every machine, and acts on it
    afterwards."""

    boot_program = "boot.py"

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        super().__init__(paths, label, journal)
        self._values = cast(Callable[[], MachineValues], load)
        self._program: Path = paths.programs / self.boot_program

    def host_program(self) -> bytes:
        return self._program.read_bytes()

    def local_port(self) -> int:
        return self._values().port

    def served_model(self) -> str:
        return self._values().model_name
