"""The plane of a local rig: this computer. Nothing is rented; a machine is a process and its port.

The model server is detached on purpose, carries an exact label, and is adopted by any later server.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal, utc_now
from forge.parts.ground.ports import listener_name, listening_ports
from forge.parts.ground.process import (
    find_labelled,
    labelled_family,
    labelled_leaders,
    process_label,
    spawn_detached,
    stop_detached,
)
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths, private_folder
from forge.parts.planes.plane import Finding, Instance, Launch, Room
from forge.parts.planes.server_book import ServerBook

_LOGS_KEPT = 5
_STOP_PATIENCE_S = 10.0


class ThisComputerSettings(RigSettings):
    """The keys of this plane."""

    port: int = Field(ge=1024, le=65535, description="The loopback port of the model server.")


def tail_of_file(path: Path, lines: int, byte_limit: int = 400_000) -> tuple[str, int]:
    """The last `lines` lines of `path` within its last `byte_limit` bytes, and the bytes before."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - byte_limit))
        text = file.read().decode("utf-8", "replace")
    # A progress bar rewrites its line with carriage returns: only its last state is worth a line.
    rows = [row.rstrip("\r").rsplit("\r", 1)[-1] for row in text.split("\n")]
    kept = "\n".join(rows[-(lines + 1) :] if rows[-1] == "" else rows[-lines:])
    return kept.strip("\n"), max(0, size - len(kept.encode()))


class ThisComputer:
    """Starts, finds and stops the one model server of a rig on this computer."""

    vocabulary: Mapping[str, str] = {
        "place": "this computer",
        "machine": "process",
        "cost": "It costs nothing",
    }

    def __init__(self, paths: RigPaths, label_prefix: str, journal: Journal) -> None:
        self._paths = paths
        self._book = ServerBook(paths, label_prefix)
        self._journal = journal

    def label(self, serve_id: str) -> str:
        """The exact label of the model server `serve_id`."""
        return self._book.label(serve_id)

    async def room(self, disk_folder: Path) -> Room:
        """Memory that a new process can get without swapping, and free disk, in bytes.

        The smaller of what the system and what the control group (a container's limit) allow.
        """
        import psutil

        memory = psutil.virtual_memory()
        available, total = memory.available, memory.total
        limit, used = _control_group_memory()
        if limit is not None and limit < total:
            available, total = min(available, max(0, limit - used)), limit
        existing = disk_folder
        while not existing.exists():
            existing = existing.parent
        return Room(available, total, psutil.disk_usage(str(existing)).free)

    async def check_port(self, port: int) -> None:
        """Raise RigError EXISTS when something listens on `port` of this computer already."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the model server will: a port in TIME_WAIT is free, a listening one is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise RigError(
                    "EXISTS",
                    f"port {port} is in use by {listener_name(port)}, which this rig did not "
                    f"start and will not touch ({error.strerror})",
                    "stop that program, or set PORT in tpu.env (or the environment) to a free one",
                ) from None

    async def start(self, launch: Launch, serve_id: str, job_id: str) -> Instance:
        """Start the model server detached. The intent is on disk before the process is.

        Raises RigError DENIED, EXISTS or NOT_FOUND; then nothing runs.
        """
        await self.check_port(launch.port)
        log = private_folder(self._paths.logs) / f"{serve_id}.log"
        instance = Instance(
            serve_id=serve_id,
            job_id=job_id,
            model=launch.model,
            served_name=launch.served_name,
            port=launch.port,
            log=str(log),
            started_at=utc_now(),
        )
        self._journal.append(
            "server start intended", serve_id=serve_id, argv=list(launch.argv), port=launch.port
        )
        self._book.write(instance)
        pid = spawn_detached(
            launch.argv,
            label=self.label(serve_id),
            environment=launch.environment,
            log=log,
            folder=private_folder(self._paths.state),
        )
        instance = instance.model_copy(update={"pid": pid})
        self._book.write(instance)
        self._journal.append("server started", serve_id=serve_id, pid=pid)
        self._forget_old_logs()
        return instance

    async def mark_ready(self, instance: Instance) -> Instance:
        """Record that a generation succeeded on `instance`."""
        instance = instance.model_copy(update={"state": "ready"})
        self._book.write(instance)
        self._journal.append("server ready", serve_id=instance.serve_id)
        return instance

    async def find(self) -> Finding:
        """The live model server of this rig, if any, and what became of a recorded one.

        The process table decides: a recorded pid counts only with its exact label, and a server
        whose starter was killed before it could write the pid is found by label and adopted.
        """
        record = self._book.read()
        if record is None:
            return self._adopt_unrecorded()
        label = self.label(record.serve_id)
        if self._book.carries_label(record):
            return Finding(record)
        for pid in find_labelled(label) if record.pid is None else ():
            return Finding(record.model_copy(update={"pid": pid}))
        # An engine that was killed may leave its workers behind: 2.3 GB of them in vLLM's case.
        for pid in labelled_family(label):
            left = record.model_copy(update={"pid": pid, "state": "starting"})
            note = f"{record.serve_id} was killed, and processes of it live on; stopping ends them"
            return Finding(left, (note,))
        if record.pid is None:
            note = f"the start of {record.serve_id} was broken off before its process existed"
        elif process_label(record.pid) is None and not _pid_exists(record.pid):
            note = f"the model server {record.serve_id} (pid {record.pid}) has ended by itself"
        else:
            note = (
                f"the model server {record.serve_id} has ended; pid {record.pid} now belongs to "
                "another process, which this rig does not touch"
            )
        gone = note if record.pid is not None else ""
        return Finding(None, (f"{note}; its log is {record.log}",), gone)

    def _adopt_unrecorded(self) -> Finding:
        """A server of this rig that runs without a record (state folder deleted): adopt or none."""
        prefix = self._book.label("")
        for pid, label in labelled_leaders(prefix):
            instance = Instance(
                serve_id=label.removeprefix(prefix),
                job_id="",
                model="unknown (its record is gone)",
                served_name="",
                port=min(listening_ports(pid), default=0),
                pid=pid,
                log="",
            )
            note = f"process {pid} carries this rig's label but no record; it can be stopped"
            return Finding(instance, (note,))
        return Finding(None)

    async def stop(self, instance: Instance) -> None:
        """End the model server and forget its record; gone already is as good as stopped.

        Raises RigError UNKNOWN when it is still there after SIGKILL.
        """
        label = self.label(instance.serve_id)
        with suppress(RigError):  # a full disk must not keep a process alive
            self._journal.append("server stop intended", serve_id=instance.serve_id)
        pids = find_labelled(label)
        if instance.pid is not None and self._book.carries_label(instance):
            pids = [instance.pid, *[pid for pid in pids if pid != instance.pid]]
        for pid in pids:
            if not await stop_detached(pid, label, _STOP_PATIENCE_S):
                raise RigError(
                    "UNKNOWN", f"process {pid} did not end on SIGKILL", "get_system_status()"
                )
        self._book.forget(instance.serve_id)
        with suppress(RigError):
            self._journal.append("server stopped", serve_id=instance.serve_id, pids=pids)

    async def logs(self, instance: Instance | None, lines: int) -> str:
        """The last `lines` lines of the server's log, or of the newest one. NOT_FOUND if none."""
        path = Path(instance.log) if instance is not None and instance.log else None
        if path is None:
            known = sorted(self._paths.logs.glob("*.log"), key=lambda p: p.stat().st_mtime)
            path = known[-1] if known else None
        if path is None or not path.exists():
            raise RigError("NOT_FOUND", "no model server has been started yet", "serve_model()")
        text, before = tail_of_file(path, lines)
        return f"{path} (last {lines} lines at most, {before} bytes before them)\n{text}"

    async def endpoint(self, instance: Instance) -> str:
        """The address of `instance`, after a proof that its own process listens there.

        Raises RigError UNREACHABLE while it does not listen yet, DENIED when another program does.
        """
        return self._book.address(instance)

    def _forget_old_logs(self) -> None:
        known = sorted(self._paths.logs.glob("*.log"), key=lambda p: p.stat().st_mtime)
        for path in known[:-_LOGS_KEPT]:
            path.unlink(missing_ok=True)


def _pid_exists(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _control_group_memory(root: Path = Path("/")) -> tuple[int | None, int]:
    """(limit, used) in bytes of the control group with the least room; limit None if there is none.

    A group's limit holds for all groups within it, so those above this process's own count as well.
    Source: the kernel's cgroup-v2 documentation, memory.max and memory.current.
    """
    top = root / "sys/fs/cgroup"
    try:
        line = (root / "proc/self/cgroup").read_text().splitlines()[-1]
        group = top / line.split(":", 2)[2].lstrip("/")
    except (OSError, IndexError):
        return None, 0
    limits = [
        found
        for folder in (group, *group.parents)
        if folder.is_relative_to(top) and (found := _group_limit(folder)) is not None
    ]
    return min(limits, key=lambda found: found[0] - found[1], default=(None, 0))


def _group_limit(group: Path) -> tuple[int, int] | None:
    """(limit, used without page cache) of one control group; None where it has no limit."""
    try:
        limit = int((group / "memory.max").read_text())
        inactive = 0
        for row in (group / "memory.stat").read_text().splitlines():
            if row.startswith("inactive_file "):
                inactive = int(row.split()[1])
        return limit, int((group / "memory.current").read_text()) - inactive
    except (OSError, IndexError, ValueError):
        return None
