"""What a plane gives to reach into a machine that it rents: its boot, a command on it, a tunnel.

Knows no runtime: what is run there and what a boot's lines mean, others know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge.parts.planes.capacity_plane import Rental

HostValue = str | int | bool


@dataclass(frozen=True)
class HostCommand:
    """One act of the fixed program `program` (Python source, sent as the command's input).

    `act` is one of the program's words; `arguments` are data and reach it as one JSON object.
    """

    program: bytes
    act: str
    arguments: Mapping[str, HostValue]


@dataclass(frozen=True)
class Tunnel:
    """The command that carries a loopback port of this computer to one of the machine's, for as
    long as it runs. It asks nothing and tries no second time."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class HostPlane(Protocol):
    """The verbs. All are about that very machine, named by a Rental that was just read.

    `boot_text` is the boot as the provider or the machine tells it, the newest part at its end and
    at most 200 kB; it raises UNREACHABLE while there is nothing to read yet. `run_on_host` returns
    what the command printed (both streams, 64 kB at most); it raises UNREACHABLE where the machine
    was not reached, DENIED where the provider forbids it, TIMEOUT, and INTERNAL with the last line
    where the command itself failed. `ended_why` says in one line what became of a machine that is
    there no more or does not run any more: taken back, its time over, deleted by whom; empty where
    the provider does not tell.
    """

    async def boot_text(self, rental: Rental) -> str: ...
    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str: ...
    async def ended_why(self, name: str, zone: str, provider_id: str) -> str: ...
    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel: ...
