"""Watching a rented machine come up: its grant, its boot phase by phase, its first token.

Starts and changes nothing, so that it may be broken off and begun again at any time. Knows no
provider and no engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any, Protocol, cast

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.state import read_json
from forge.parts.knowledge.boot_marks import BootState, boot_state
from forge.parts.planes.capacity_plane import Rental
from forge.parts.planes.plane import Finding, Instance
from forge.parts.toolsets.load_record import LoadRecord
from forge.parts.toolsets.starts import (
    StartClock,
    StartHistory,
    explained_end,
    prove_first_token,
    with_resolved,
)
from forge.parts.toolsets.toolset import RigContext

MACHINE_PHASE = "machine"  # from the order to the first word of the boot
_WATCH_S = 3 * 3600.0  # a queue of two hours and a cold boot of half an hour, rounded up
_LOADING = ("compile", "load", "ready")  # phases whose failure speaks of the weights
_STATUS_S = 30.0  # for one look at the container through ssh
_READY_EVERY_S = 15.0  # between two tries of a server whose boot has not said that it is ready


class BootingPlane(Protocol):
    """The verbs of a plane whose machines boot their model server by themselves."""

    watch_every_s: float

    async def machine(self) -> Rental: ...
    async def find(self) -> Finding: ...
    async def boot_text(self, rental: Rental) -> str: ...
    def keep_boot(self, rental: Rental, text: str) -> None: ...
    async def endpoint(self, instance: Instance) -> str: ...
    async def mark_ready(self, instance: Instance) -> Instance: ...
    async def act_on_host(
        self, act: str, timeout_s: float, **arguments: str | int | bool
    ) -> str: ...


class BootWatch:
    """The job that follows a boot to the first token of the model that was asked for."""

    def __init__(self, context: RigContext) -> None:
        self._context = context
        self._plane = cast(BootingPlane, context.plane)
        self.history = StartHistory(context.paths.state / "starts.jsonl")
        self._model = ""

    @property
    def phases(self) -> tuple[str, ...]:
        return (MACHINE_PHASE, *self._context.runtime.phases)

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Follow the boot. Raises RigError: what the boot says failed, with its diagnosis;
        NOT_FOUND when the machine goes away; TIMEOUT."""
        model = self._model = str(progress.record.arguments["model"])
        clock = StartClock(progress, self.phases, self.history.typical(model))
        clock.enter(MACHINE_PHASE, "reading the machine")
        deadline, tried = time.monotonic() + _WATCH_S, 0.0
        while time.monotonic() < deadline:
            rental = await self._machine()
            if rental is None or rental.state == "pending":
                clock.tick(None, _queued_words(rental))
            else:
                boot = await self._boot(rental)
                await self._follow(boot, clock, progress)
                if boot.ready or (boot.phase and time.monotonic() - tried > _READY_EVERY_S):
                    tried = time.monotonic()
                    address = await self._served(boot.ready)
                    if address:
                        return await self._done(model, address, rental, boot, clock)
            await asyncio.sleep(self._plane.watch_every_s)
        raise RigError(
            "TIMEOUT", f"the machine was not ready after {_WATCH_S / 3600:g} h", "analyze_logs()"
        )

    async def _machine(self) -> Rental | None:
        """The machine now; None while a passing fault keeps it from being read."""
        try:
            rental = await self._plane.machine()
        except RigError as error:
            if error.error_class in ("UNREACHABLE", "TIMEOUT", "UNKNOWN"):
                return None
            raise
        if rental.state in ("stopping", "stopped", "failed"):
            notes = "; ".join((await self._plane.find()).notes)
            raise RigError(
                "NOT_FOUND",
                notes or f"{rental.name} in {rental.zone} is {rental.state}",
                "list_orphans()",
            )
        return rental

    async def _boot(self, rental: Rental) -> BootState:
        try:
            text = await self._plane.boot_text(rental)
            with suppress(OSError, RigError):  # a full disk ends no watch
                self._plane.keep_boot(rental, text)
            return boot_state(text, self._context.runtime.phases)
        except RigError as error:
            if error.error_class in ("UNREACHABLE", "TIMEOUT", "UNKNOWN", "BUSY"):
                return boot_state("", self._context.runtime.phases)
            raise

    async def _follow(self, boot: BootState, clock: StartClock, progress: JobProgress) -> None:
        if boot.failed:
            # Where loading has a phase of its own, that of the weights only fetches them.
            if boot.phase in _LOADING or (boot.phase == "weights" and "load" not in self.phases):
                self._note_load(False, boot.failed)
            log = ""
            with suppress(RigError):  # the boot's own words stand without it
                instance = (await self._plane.find()).instance
                log = await self._context.plane.logs(instance, 400)
            raise await explained_end(self._context, f"{log}\n{boot.failed}")
        if boot.phase in self.phases and boot.phase != progress.record.phase:
            clock.enter(boot.phase, boot.words or boot.phase)
        else:
            clock.tick(None, boot.words or "the machine runs, its boot has not spoken yet")

    async def _served(self, must: bool) -> str:
        """The address once a generation by the right model succeeded; empty while there is none.

        `must`: the boot says that it is ready, so what fails now is told after a last try.
        """
        context = self._context
        instance = (await self._plane.find()).instance
        if instance is None:
            return ""
        try:
            address = await self._plane.endpoint(instance)
            if not await context.chat_client(address).healthy():
                if must:
                    await self._refuse_stopped(instance.serve_id)
                return ""
            await prove_first_token(context, instance, address)
        except RigError as error:
            if error.error_class in ("UNREACHABLE", "TIMEOUT", "BUSY") or not must:
                return ""
            raise
        await self._plane.mark_ready(await with_resolved(context, instance, address))
        return address

    def _note_load(self, loads: bool, cause: str) -> None:
        """Whether these weights load here is worth keeping, whatever it cost to learn."""
        context = self._context
        image = str((read_json(context.paths.state / "boot" / "boot.json") or {}).get("image", ""))
        with suppress(OSError, RigError):
            LoadRecord(context).add(self._model, image, loads, cause)

    async def _refuse_stopped(self, machine: str) -> None:
        """Raise RigError NOT_FOUND where the boot was through once and its server is stopped or
        gone now: then nothing comes up by waiting. One that boots again after a stop of its machine
        is waited for, though the console still shows the boot before."""
        try:
            told = json.loads((await self._plane.act_on_host("status", _STATUS_S)).splitlines()[-1])
            kind = "container" if "container" in told else "server"
            booting = told.get("booting") is True
            state = str((told[kind] or {}).get("state", "removed"))
        except (ValueError, IndexError, KeyError, TypeError, AttributeError):
            return  # what cannot be read proves nothing
        if state in ("removed", "exited", "created", "dead") and not booting:
            start = f"manage_{self._context.vocabulary['docker']}(action='start')"
            what = f"the {kind} on {machine} is {state}, so it serves nothing until it is started"
            raise RigError("NOT_FOUND", what, start)

    async def _done(
        self, model: str, address: str, rental: Rental, boot: BootState, clock: StartClock
    ) -> dict[str, Any]:
        """The job's result; the durations are those that the machine's own marks tell."""
        clock.finish()
        self._note_load(True, "")
        seconds = await self._seconds(rental, boot)
        if boot.began_unix:
            seconds = {MACHINE_PHASE: max(0.0, boot.began_unix - rental.created_unix), **seconds}
        with suppress(OSError, RigError):  # a full disk must not turn a served model into a failure
            self.history.add(model, {name: round(value, 1) for name, value in seconds.items()})
        return {"endpoint": address, "model": model, "seconds": seconds}

    async def _seconds(self, rental: Rental, boot: BootState) -> dict[str, float]:
        """How long each phase took. A server that answers before its boot has said so is read once
        more, and what the boot then still is in took until now."""
        if not boot.ready:
            with suppress(RigError):
                boot = max(boot, await self._boot(rental), key=lambda one: len(one.seconds))
        seconds = dict(boot.seconds)
        for one in boot.phases:
            if one.state == "running" and one.begin_unix is not None:
                seconds[one.phase] = max(0.0, time.time() - one.begin_unix)
        return seconds


def _queued_words(rental: Rental | None) -> str:
    if rental is None:
        return "the provider does not answer now; looking again"
    return f"still queued in {rental.zone}, costs nothing until granted"
