"""How a model server comes up on this computer: the phases of the serve job.

Puts a runtime on a plane; the tools around it are in the serving toolset.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.planes.plane import Instance
from forge.parts.runtimes.runtime import ServedModel
from forge.parts.toolsets.starts import (
    LINES_OF_A_START,
    StartClock,
    StartHistory,
    explained_end,
    logs_call,
    prove_first_token,
    refuse_missing,
    refuse_oversize,
    with_resolved,
)
from forge.parts.toolsets.toolset import RigContext

_LOAD_PATIENCE_S = 3600.0


class Startup:
    """The serve job of one rig."""

    def __init__(self, context: RigContext) -> None:
        self._context = context
        self.history = StartHistory(context.paths.state / "starts.jsonl")

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Bring the model up to its first token. On any failure nothing is left running."""
        context, name = self._context, str(progress.record.arguments["model"])
        environment, weights, load, first_token = context.runtime.phases
        clock = StartClock(progress, context.runtime.phases, self.history.typical(name))
        serve_id = progress.record.id
        instance: Instance | None = None
        try:
            clock.enter(environment, "checking packages")
            refuse_missing(await context.runtime.needs())
            clock.enter(weights, "looking for the weights")
            model = await self._weights(name, clock)
            clock.enter(load, f"starting {context.vocabulary['engine']}")
            launch = context.runtime.launch(model)
            instance = await context.plane.start(launch, serve_id, progress.record.id)
            address = await self._until_it_listens(instance, clock)
            clock.enter(first_token, "asking for the first token")
            await prove_first_token(context, instance, address)
            instance = await with_resolved(context, instance, address)
            instance = await context.plane.mark_ready(instance)
        except BaseException as error:
            await asyncio.shield(self._undo(serve_id, instance, error))
            raise
        seconds = clock.finish()
        with suppress(OSError, RigError):  # a full disk must not turn a served model into a failure
            self.history.add(name, seconds)
        return {"endpoint": address, "model": name, "seconds": seconds}

    async def _weights(self, name: str, clock: StartClock) -> ServedModel:
        context = self._context
        model = context.runtime.local_model(name)
        if model is None:
            room = await context.plane.room(context.paths.cache)
            model = await context.runtime.fetch_model(name, room, clock.tick)
        refuse_oversize(model, await context.plane.room(context.paths.cache))
        return model

    async def _until_it_listens(self, instance: Instance, clock: StartClock) -> str:
        """The endpoint once the health path answers. RigError INTERNAL when the process dies."""
        plane, deadline = self._context.plane, time.monotonic() + _LOAD_PATIENCE_S
        while time.monotonic() < deadline:
            finding = await plane.find()
            # Workers may outlive their leader for a moment: then another process is found.
            if finding.instance is None or finding.instance.pid != instance.pid:
                log = await plane.logs(instance, LINES_OF_A_START)
                raise await explained_end(self._context, log.partition("\n")[2])
            try:
                address = await plane.endpoint(instance)
                if await self._context.chat_client(address).healthy():
                    await self._refuse_incomplete(instance)
                    return address
            except RigError as error:
                if error.error_class != "UNREACHABLE":
                    raise
            clock.tick(None, self._context.runtime.loading_step(await plane.logs(instance, 5)))
            await asyncio.sleep(0.25)
        raise RigError(
            "TIMEOUT",
            f"the model did not load in {_LOAD_PATIENCE_S:.0f} s",
            logs_call(self._context),
        )

    async def _refuse_incomplete(self, instance: Instance) -> None:
        fault = self._context.runtime.loading_fault(await self._context.plane.logs(instance, 2000))
        if fault:
            raise RigError(
                "INVALID",
                f"the checkpoint {instance.model} is not whole: {fault}",
                "download it again, or serve another one",
            )

    async def _undo(self, serve_id: str, instance: Instance | None, error: BaseException) -> None:
        """Stop what this start began, also a process whose pid was not yet written down."""
        finding = await self._context.plane.find()
        found = finding.instance
        if found is not None and found.serve_id == serve_id:
            await self._context.plane.stop(found)
        elif instance is not None:
            await self._context.plane.stop(instance)
        self._context.journal.append("start failed", serve_id=serve_id, why=str(error)[:500])
