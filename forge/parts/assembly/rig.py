"""A rig is a plane, a runtime and toolsets under one name; this makes an MCP server of them.

The server comes up even when tpu.env is at fault: then every tool says so, until it is mended.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.parts.assembly.guarded_tool import GuardedTool, guarded
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobRunner, JobStore
from forge.parts.ground.journal import Journal
from forge.parts.ground.names import slug_of
from forge.parts.ground.redact import clean
from forge.parts.ground.settings import (
    SETTINGS_FILE,
    RigSettings,
    asks_for_read_only,
    load_settings,
)
from forge.parts.ground.state import RigPaths, installation_id, rig_paths
from forge.parts.planes.plane import ServingPlane
from forge.parts.runtimes.runtime import Runtime
from forge.parts.toolsets.help import HelpToolset
from forge.parts.toolsets.toolset import RigContext, ToolMethod, Toolset

RIG_VERSION = "0.1.0"


@dataclass(frozen=True)
class RigCommand:
    """One more command of a rig's server.py: a line of help, and what runs (`yes`: do not ask).

    `undo` is what runs instead with --undo; a command without it has no such option.
    """

    help: str
    run: Callable[[AssembledRig, bool], Coroutine[Any, Any, int]]
    undo: Callable[[AssembledRig, bool], Coroutine[Any, Any, int]] | None = None


@dataclass(frozen=True)
class Rig:
    """One rig: what it is called, what it is made of, and its two sentences for people.

    `about` says what it serves, where and at what cost; `order` the usual order of its tools.
    `make_plane` gets the folders, the owner's label, the journal and the settings (a callable,
    because they are read anew when tpu.env changes); `make_runtime` the settings and the folders.
    `off_by_default` are toolsets that load through RIG_TOOLSETS only. `commands` are further ones
    of server.py, by name. `programs` lie beside server.py as files of their own, and run in
    processes of their own. `twin` is the rig on the same hardware with another runtime: reports
    name it, because the two are to be compared.
    """

    name: str
    about: str
    order: str
    settings: type[RigSettings]
    plane_words: dict[str, str]
    make_plane: Callable[[RigPaths, str, Journal, Callable[[], RigSettings]], ServingPlane]
    make_runtime: Callable[[Callable[[], RigSettings], RigPaths], Runtime]
    toolsets: Sequence[type[Toolset]]
    runtime_requirements: Sequence[str] = ()
    programs: Sequence[str] = ("loadgen", "triage", "probe", "plan", "judge")
    off_by_default: Sequence[str] = ()
    commands: Mapping[str, RigCommand] = field(default_factory=dict)
    twin: str = ""


class SettingsSource:
    """Reads a rig's settings when they are asked for, and again when tpu.env has changed."""

    def __init__(self, kind: type[RigSettings], folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._known: tuple[int, RigSettings] | None = None

    def __call__(self) -> RigSettings:
        try:
            stamp = (self._folder / SETTINGS_FILE).stat().st_mtime_ns
        except OSError:
            stamp = -1
        if self._known is None or self._known[0] != stamp:
            self._known = (stamp, load_settings(self._kind, self._folder))
        return self._known[1]


class AssembledRig:
    """A rig in its folder, with its state: the toolsets are made, nothing is started."""

    def __init__(self, rig: Rig, server_file: Path) -> None:
        self.rig = rig
        self.folder = server_file.parent
        paths = rig_paths(rig.name, self.folder)
        owner = _owner_or_none(paths)
        prefix = f"rig={rig.name};owner={owner or 'none'}"
        journal = Journal(paths.state / "journal.jsonl")
        source = SettingsSource(rig.settings, self.folder)
        plane = rig.make_plane(paths, prefix, journal, source)
        runtime = rig.make_runtime(source, paths)
        self.context = RigContext(
            rig=rig.name,
            version=server_version(server_file),
            load=source,
            paths=paths,
            server_file=server_file,
            journal=journal,
            jobs=JobStore(paths.jobs, prefix),
            plane=plane,
            runtime=runtime,
            vocabulary={**plane.vocabulary, **runtime.vocabulary, **rig.plane_words},
            owner=owner,
            extras={"about": rig.about, "order": rig.order, "twin": rig.twin},
        )
        self.toolsets: list[Toolset] = [kind(self.context) for kind in rig.toolsets]
        self.toolsets.append(HelpToolset(self.context, self.listing))
        self.every_toolset = False  # the command line of a person reaches all of them

    def listing(self) -> list[tuple[str, list[ToolMethod]]]:
        """The loaded toolsets by name, each with its tools."""
        wanted = self._wanted_toolsets()
        return [(t.toolset_name, t.tool_methods()) for t in self.toolsets if wanted(t)]

    def _wanted_toolsets(self) -> Callable[[Toolset], bool]:
        try:
            choice = self.context.settings.rig_toolsets
        except RigError:  # tpu.env is at fault; the environment may still say what to load
            choice = os.environ.get("RIG_TOOLSETS") or "default"
        names = {name.strip() for name in choice.split(",")}
        return lambda toolset: (
            self.every_toolset
            or "all" in names
            or toolset.toolset_name in names
            or (
                "default" in names
                and toolset.on_by_default
                and toolset.toolset_name not in self.rig.off_by_default
            )
        )

    def _read_only(self) -> bool:
        """Whether what changes something is refused. RigError where that has another cause."""
        if not self.context.owner:
            # What a server without an owner's id starts, the next one could not know again.
            raise RigError(
                "DENIED",
                f"the state folder {self.context.paths.state} could not be written when this "
                "server started",
                "free some disk space or make it writable (XDG_STATE_HOME), then restart this "
                "server",
            )
        try:
            return self.context.settings.rig_read_only
        except RigError:
            # tpu.env is at fault. What needs a value of it says so itself; stopping needs none.
            return asks_for_read_only(self.folder)

    def tools(self) -> list[GuardedTool]:
        """The tools of the loaded toolsets. Raises ValueError on two tools of one name."""
        tools = [
            guarded(method, self._read_only) for _, methods in self.listing() for method in methods
        ]
        names = [tool.name for tool in tools]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two tools of one name: {', '.join(sorted(twice))}")
        return tools

    def job_runners(self) -> dict[str, JobRunner]:
        """What a worker runs for each kind of job, over all toolsets, loaded or not."""
        return {kind: run for t in self.toolsets for kind, run in t.job_runners().items()}

    def server(self) -> Any:
        """The MCP server of this rig, with its logging redacted."""
        from mcp.server.mcpserver import MCPServer

        log_redacted()
        tools: list[Any] = list(self.tools())
        try:
            name = self.context.settings.mcp_server_name or slug_of(self.rig.name)
        except RigError as error:
            print(clean(str(error)), file=sys.stderr, flush=True)
            name = slug_of(self.rig.name)
        return MCPServer(
            name,
            title=self.rig.name,
            instructions=f"{self.rig.about} {self.rig.order}",
            version=self.context.version,
            tools=tools,
            log_level="WARNING",
        )


def _owner_or_none(paths: RigPaths) -> str:
    """This installation's id, or "". Without a writable home the server still comes up and answers;
    what would start something is then refused by its own first write."""
    try:
        return installation_id(paths)
    except (RigError, OSError):
        return ""


def server_version(server_file: Path) -> str:
    """The rig version and the first 12 hex digits of server.py's SHA-256: what a report cites."""
    return f"{RIG_VERSION}+{hashlib.sha256(server_file.read_bytes()).hexdigest()[:12]}"


class _RedactedLines(logging.Formatter):
    """A formatter that lets no secret into standard error, also not in a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record), 8000)


def log_redacted() -> None:
    """Send all logging to standard error, redacted. Before the SDK sets up its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactedLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
