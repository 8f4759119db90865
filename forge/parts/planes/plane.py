"""What a plane is to the toolsets: a place where a model server can be started, found and stopped.

Planes know no runtime: a runtime hands over a `Launch`, a plane runs it somewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel, Field


@dataclass(frozen=True)
class Launch:
    """What a runtime wants run: the argument list, its environment, and the port it will serve."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    port: int
    model: str
    served_name: str


class Instance(BaseModel):
    """A model server that this rig started, as recorded and as the process table confirms it.

    `state` is "starting" until a generation succeeded, then "ready". `resolved` has the values that
    the engine itself reported for this start, by its own names.
    """

    serve_id: str
    job_id: str
    state: Literal["starting", "ready"] = "starting"
    model: str
    served_name: str
    port: int
    pid: int | None = None
    log: str = ""
    started_at: str = ""
    resolved: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """What the place has to offer now, in bytes: memory that can be had, and free disk."""

    memory_available: int
    memory_total: int
    disk_free: int


@dataclass(frozen=True)
class Finding:
    """What the plane found: a live instance, and everything about the past that must be told.

    silent_end: one line on a server that is gone although nobody stopped it, empty otherwise. Where
    its log gives no reason, this line is all that a diagnosis has.
    """

    instance: Instance | None
    notes: Sequence[str] = field(default_factory=tuple)
    silent_end: str = ""


@dataclass(frozen=True)
class PlaneNeed:
    """One thing that a plane needs on this computer (a program, a login), and how to get it."""

    name: str
    present: bool
    detail: str
    remedy: str = ""


@runtime_checkable
class NeedyPlane(Protocol):
    """The optional verb of planes that need more than this computer itself."""

    async def plane_needs(self) -> Sequence[PlaneNeed]: ...


class ServingPlane(Protocol):
    """The verbs of a plane that runs a model server."""

    vocabulary: Mapping[str, str]

    async def room(self, disk_folder: Path) -> Room: ...
    async def check_port(self, port: int) -> None: ...
    async def start(self, launch: Launch, serve_id: str, job_id: str) -> Instance: ...
    async def mark_ready(self, instance: Instance) -> Instance: ...
    async def find(self) -> Finding: ...
    async def stop(self, instance: Instance) -> None: ...
    async def logs(self, instance: Instance | None, lines: int) -> str: ...
    async def endpoint(self, instance: Instance) -> str: ...
