"""Serving on a machine that is rented: what serves is found through the provider and a tunnel.

The machine starts its model server by itself at boot, so nothing is started from here. Knows no
provider (the plane's other half reads, destroys and reaches in) and no runtime.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import Journal, utc_now
from forge.parts.ground.locks import held_lock
from forge.parts.ground.ports import listener_name, listener_pids, listening_ports
from forge.parts.ground.process import (
    find_labelled,
    labelled_leaders,
    process_label,
    spawn_detached,
    stop_detached,
)
from forge.parts.ground.redact import clean
from forge.parts.ground.state import RigPaths, private_folder, read_json, write_json, write_private
from forge.parts.planes.billing import RunningCost, cost_since
from forge.parts.planes.capacity_plane import Rental, expiry_of, is_ours
from forge.parts.planes.host_plane import HostCommand, Tunnel
from forge.parts.planes.plane import Finding, Instance, Launch, Room
from forge.parts.planes.rented_record import MachineBook, MachineRecord

MACHINE_FRESH_S = 10.0  # a machine that was read so lately is not read again: a read takes 1 to 3 s
_SERVED_FILE = "served.json"
_TUNNEL_UP_S = 40.0  # key exchange through IAP takes seconds; gcloud's own start 1 to 6
_TUNNEL_STOP_S = 5.0
_LOGS_S = 45.0
_HOST_LINES_LIMIT = 2000
_BOOT_KEPT = 200_000  # characters
_BOOTS_KEPT = 5


class HostedServing(ABC):
    """ServingPlane and BilledPlane for a plane that rents one machine and reaches into it.

    `port` of the settings is the tunnel's end on this computer, `remote_port` the one on the
    machine. `host_program` is the fixed program that acts on the machine.
    """

    boots_itself = True
    server_kind = "container"  # what serves on the machine, in a word
    remote_port = 8000
    watch_every_s = 5.0

    def __init__(self, paths: RigPaths, label: str, journal: Journal) -> None:
        self._paths, self._label, self._journal = paths, label, journal
        marks = dict(part.split("=", 1) for part in label.split(";"))
        self._rig, self._owner = marks["rig"], marks["owner"]
        self._book = MachineBook(paths.state)
        self._seen: tuple[float, object, Finding, Rental | None] | None = None
        self._reading = asyncio.Lock()

    @abstractmethod
    async def describe(self, name: str, zone: str) -> Rental: ...
    @abstractmethod
    async def boot_text(self, rental: Rental) -> str: ...
    @abstractmethod
    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str: ...
    @abstractmethod
    async def ended_why(self, name: str, zone: str, provider_id: str) -> str: ...
    @abstractmethod
    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel: ...
    @abstractmethod
    def host_program(self) -> bytes: ...
    @abstractmethod
    def local_port(self) -> int: ...
    @abstractmethod
    def served_model(self) -> str: ...

    # The machine

    async def machine(self) -> Rental:
        """This rig's machine as it is now. Raises RigError NOT_FOUND, with what became of it, or
        what reading it raised."""
        finding, rental = await self._look()
        if rental is None:
            notes = f": {'; '.join(finding.notes)}" if finding.notes else ""
            raise RigError("NOT_FOUND", f"this rig has no machine{notes}", "get_system_status()")
        return rental

    async def running_machine(self) -> Rental:
        """The machine, if it runs. Raises RigError BUSY while it only will."""
        rental = await self.machine()
        if rental.state == "pending":
            raise RigError(
                "BUSY",
                f"{rental.name} in {rental.zone} does not run yet ({rental.state})",
                "get_system_status()",
            )
        if rental.state != "running":
            raise RigError(
                "NOT_FOUND",
                f"{rental.name} in {rental.zone} does not run any more ({rental.state})",
                "get_system_status()",
            )
        return rental

    def record(self) -> MachineRecord:
        """Where this rig's machine is or was on record. RigError NOT_FOUND where none ever was."""
        record = self._book.read()
        if record is None:
            raise RigError("NOT_FOUND", "this rig has no machine on record", "get_system_status()")
        return record

    async def machine_gone(self) -> None:
        """The machine was destroyed: what led to it ends, and what served on it is forgotten."""
        self.mark_unready()
        await self.close_tunnels()

    def left_by_job(self) -> str:
        """What a search that was ended could not prove gone; empty where it left nothing."""
        live = self._book.live()
        return "" if live is None else f"{live.name} in {live.zone}"

    def machine_changed(self) -> None:
        """Whoever created or destroyed a machine says so, and the next look reads it anew."""
        self._seen = None

    async def find(self) -> Finding:
        """The machine that serves or will serve, and what became of one that does so no more."""
        finding, _ = await self._look()
        return finding

    async def _look(self) -> tuple[Finding, Rental | None]:
        async with self._reading:
            record, seen = self._book.read(), self._seen
            # Another process of this rig may have written since.
            known = (record, read_json(self._paths.state / _SERVED_FILE))
            fresh = seen is not None and time.monotonic() - seen[0] < MACHINE_FRESH_S
            if seen is None or not fresh or seen[1] != known:
                seen = (time.monotonic(), known, *await self._read_machine(record))
                self._seen = seen
            return seen[2], seen[3]

    async def _read_machine(self, record: MachineRecord | None) -> tuple[Finding, Rental | None]:
        if record is None:
            return Finding(None), None
        try:
            rental = await self.describe(record.name, record.zone)
        except RigError as error:
            if error.error_class != "NOT_FOUND":
                raise
            return await self._vanished(record.name, record.zone, record.provider_id), None
        if rental.kind == "disk":  # all that is left of it
            gone = await self._vanished(record.name, record.zone, record.provider_id)
            left = f"its disk {rental.name} in {rental.zone} is left and billed: list_orphans()"
            return replace(gone, notes=(*gone.notes, left)), None
        if not is_ours(rental.labels, self._rig, self._owner):
            note = f"{rental.name} in {rental.zone} does not carry this rig's labels any more"
            return Finding(None, (note,)), None
        if rental.state in ("stopped", "failed"):
            why = await self._why(rental.name, rental.zone, rental.provider_id)
            note = f"{rental.name} in {rental.zone} is {rental.state}{why}; it may still be billed"
            return Finding(None, (note,), note), rental
        served = read_json(self._paths.state / _SERVED_FILE) or {}
        # What was done to an earlier machine says nothing of this one.
        note = str(served.get("note", "")) if served.get("intent") == record.intent else ""
        return Finding(self._instance(rental), (note,) if note else ()), rental

    async def _vanished(self, name: str, zone: str, provider_id: str) -> Finding:
        if not provider_id:
            return Finding(None, (f"{name} was asked for in {zone} and is not to be seen there",))
        why = await self._why(name, zone, provider_id)
        note = (
            f"{name} in {zone} is gone although this rig did not destroy it{why}; to have one "
            "again, look for it anew"
        )
        return Finding(None, (note,), note)

    async def _why(self, name: str, zone: str, provider_id: str) -> str:
        try:
            why = await self.ended_why(name, zone, provider_id)
        except RigError as error:
            why = f"the provider does not tell why: {error.what}"
        return f" ({clean(why, 400)})" if why else ""

    def _instance(self, rental: Rental) -> Instance:
        served = read_json(self._paths.state / _SERVED_FILE) or {}
        instance = Instance(
            serve_id=rental.name,
            job_id="",
            model=self.served_model(),
            served_name=self.served_model(),
            port=self.local_port(),
            started_at=rental.created_at,
        )
        if rental.state != "running" or served.get("provider_id") != rental.provider_id:
            return instance
        try:
            known = Instance.model_validate(served["instance"])
        except (KeyError, ValueError):
            return instance
        return known.model_copy(update={"port": self.local_port()})

    async def mark_ready(self, instance: Instance) -> Instance:
        """Record that the machine generated with the model that was asked for."""
        rental = await self.machine()
        ready = instance.model_copy(update={"state": "ready", "started_at": utc_now()})
        data = {"provider_id": rental.provider_id, "instance": ready.model_dump()}
        write_json(self._paths.state / _SERVED_FILE, data)
        self._journal.append("server ready", serve_id=instance.serve_id)
        self.machine_changed()
        return ready

    def mark_unready(self, note: str = "") -> None:
        """Record that what served was stopped or started anew, so that it has to prove itself.
        `note` is told of the machine until it has."""
        (self._paths.state / _SERVED_FILE).unlink(missing_ok=True)
        with suppress(RigError, OSError):  # on a full disk it is only not told
            record = self._book.read() if note else None
            if record is not None:
                told = {"intent": record.intent, "note": note}
                write_json(self._paths.state / _SERVED_FILE, told)
        self.machine_changed()

    async def cost_so_far(self) -> RunningCost | None:
        """What the machine costs; None where this rig has none."""
        _, rental = await self._look()
        if rental is None or rental.state == "pending":
            return None
        what, price = f"{rental.name} in {rental.zone}", rental.price_per_hour_usd
        if rental.state in ("stopped", "failed"):  # its chips are free again, its disk is not
            what, price = f"what is left of {what}, its disk at least", None
        expires = expiry_of(rental.labels)
        return cost_since(what, rental.created_unix, price, expires, time.time())

    # What serves on it

    async def act_on_host(self, act: str, timeout_s: float, **arguments: str | int | bool) -> str:
        """What the fixed program printed for `act` on the running machine."""
        self.machine_changed()  # ssh goes by a name: whose that is now is read, not remembered
        command = HostCommand(self.host_program(), act, arguments)
        return await self.run_on_host(await self.running_machine(), command, timeout_s)

    async def logs(self, instance: Instance | None, lines: int) -> str:
        """The server's last lines, both streams, after a line that says where they are from."""
        del instance
        rental = await self.running_machine()
        text = await self.act_on_host("logs", _LOGS_S, lines=min(lines, _HOST_LINES_LIMIT))
        where = f"{self.server_kind} on {rental.name} in {rental.zone}"
        return f"{where} (last {lines} lines at most)\n{text}"

    async def evidence(self) -> str:
        """What a diagnosis reads: the boot, the server's last lines, what became of a machine
        that is gone; each after a line that says where it is from. RigError NOT_FOUND for none."""
        finding, rental = await self._look()
        parts = [f"# {note}" for note in finding.notes]
        if rental is not None:
            for what, reading in (
                ("boot", self.boot_text(rental)),
                (self.server_kind, self.act_on_host("logs", _LOGS_S, lines=_HOST_LINES_LIMIT)),
            ):
                try:
                    parts += [f"# {what} of {rental.name} in {rental.zone}", await reading]
                except RigError as error:
                    parts.append(f"# the {what} could not be read: {error.what}")
        else:
            kept = sorted(self._paths.logs.glob("boot-*.log"), key=lambda p: p.stat().st_mtime)
            parts += [f"# {p.name}, as last seen\n{p.read_text('utf-8')}" for p in kept[-1:]]
        if not parts:
            raise RigError("NOT_FOUND", "this rig had no machine yet", "get_system_status()")
        return "\n".join(parts)

    def keep_boot(self, rental: Rental, text: str) -> None:
        """Keep what the boot said, for when the machine is gone and its console with it."""
        path = private_folder(self._paths.logs) / f"boot-{rental.name}.log"
        write_private(path, clean(text, _BOOT_KEPT))
        kept = sorted(self._paths.logs.glob("boot-*.log"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-_BOOTS_KEPT]:
            old.unlink(missing_ok=True)

    async def endpoint(self, instance: Instance) -> str:
        """The loopback address of the tunnel to this rig's own machine, opened where it is not.

        Raises RigError NOT_FOUND, BUSY, UNREACHABLE (the machine takes no tunnel), EXISTS or
        DENIED (another program holds the port): no byte of a prompt goes to a stranger.
        """
        del instance
        rental = await self.running_machine()
        async with held_lock(self._paths.state, "tunnel", wait_s=_TUNNEL_UP_S):
            return await self._tunnelled(rental)

    async def _tunnelled(self, rental: Rental) -> str:
        port, label = self.local_port(), self._tunnel_label(rental)
        for pid in find_labelled(label):
            if port in listening_ports(pid):
                return f"http://127.0.0.1:{port}"
        await self.close_tunnels()
        self.machine_changed()  # a tunnel leads to a name, as ssh does
        rental = await self.running_machine()
        label = self._tunnel_label(rental)
        if listener_pids(port):
            raise RigError(
                "EXISTS",
                f"port {port} of this computer is in use by {listener_name(port)}, which this rig "
                "did not start and will not touch",
                "stop that program, or set PORT in tpu.env (or the environment) to a free one",
            )
        command = self.tunnel(rental, port, self.remote_port)
        log = private_folder(self._paths.state) / "tunnel.log"
        log.unlink(missing_ok=True)
        self._journal.append("tunnel intended", machine=rental.name, zone=rental.zone, port=port)
        pid = spawn_detached(
            command.argv,
            label=label,
            environment=command.environment,
            log=log,
            folder=private_folder(self._paths.state),
        )
        return await self._until_open(pid, label, port, log)

    async def _until_open(self, pid: int, label: str, port: int, log: Path) -> str:
        deadline = time.monotonic() + _TUNNEL_UP_S
        while time.monotonic() < deadline:
            if port in listening_ports(pid):
                return f"http://127.0.0.1:{port}"
            if process_label(pid) is None:
                break
            await asyncio.sleep(0.1)
        said = log.read_text("utf-8", errors="replace").strip()[-600:] if log.exists() else ""
        await stop_detached(pid, label, _TUNNEL_STOP_S)
        raise RigError(
            "UNREACHABLE",
            f"no tunnel to the machine came up: {clean(said, 600) or 'it said nothing'}",
            "wait until the machine has booted; analyze_logs() knows what may be missing",
        )

    def _tunnel_label(self, rental: Rental) -> str:
        return f"{self._label};role=tunnel;id={rental.provider_id}"

    async def close_tunnels(self) -> None:
        """End every tunnel of this rig, also those to machines that are gone."""
        for pid, label in labelled_leaders(f"{self._label};role=tunnel;id="):
            await stop_detached(pid, label, _TUNNEL_STOP_S)

    # What a rented machine does by itself

    async def room(self, disk_folder: Path) -> Room:
        del disk_folder
        raise RigError("NOT_FOUND", "the machine's memory and disk are read on it, not from here")

    async def check_port(self, port: int) -> None:
        """Raise RigError EXISTS when another program holds the tunnel's end."""
        if listener_pids(port) and not labelled_leaders(f"{self._label};role=tunnel;id="):
            raise RigError("EXISTS", f"port {port} is in use by {listener_name(port)}", "set PORT")

    async def start(self, launch: Launch, serve_id: str, job_id: str) -> Instance:
        del launch, serve_id, job_id
        raise RigError("INVALID", "a rented machine starts its model server itself, at boot")

    async def stop(self, instance: Instance) -> None:
        """Nothing to end on this computer but the tunnel; the machine is destroyed by its plan."""
        del instance
        await self.close_tunnels()
