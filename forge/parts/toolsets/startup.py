"""How a model server comes up: the phases of the serve job, their progress and the time left.

Puts a runtime on a plane; the tools around it are in the serving toolset.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.parts.boundaries.triage_program import triaged_log
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.journal import utc_now
from forge.parts.ground.state import private_folder
from forge.parts.planes.plane import Instance, Room
from forge.parts.runtimes.runtime import Need, ServedModel
from forge.parts.toolsets.toolset import RigContext

SERVE_JOB = "serve"  # the kind of job that starts the model
# Under this key of RigContext.extras a rig with a planner has what refuses a model by its plan.
PLAN_CHECK = "plan_check"
PlanCheck = Callable[[str, bool], Awaitable[None]]
_LOAD_PATIENCE_S = 3600.0
_FIRST_TOKEN_PATIENCE_S = 600.0
_STARTS_REMEMBERED = 5
_LINES_OF_A_START = 2000


class StartHistory:
    """Durations of this rig's earlier starts, by model and phase: the source of every time left."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, model: str, seconds: dict[str, float]) -> None:
        private_folder(self._path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o600), "a", encoding="utf-8") as file:
            file.write(json.dumps({"model": model, "at": utc_now(), "seconds": seconds}) + "\n")

    def typical(self, model: str) -> dict[str, float] | None:
        """Median seconds a phase over the last starts of `model`; None before the first one."""
        starts: list[dict[str, float]] = []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return None
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["model"] == model:
                    starts.append({str(k): float(v) for k, v in entry["seconds"].items()})
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        recent = starts[-_STARTS_REMEMBERED:]
        if not recent:
            return None
        return {
            phase: statistics.median([start.get(phase, 0.0) for start in recent])
            for phase in recent[-1]
        }


class _StartClock:
    """Writes phase, percentage and time left into the job's record as the start goes on."""

    def __init__(
        self, progress: JobProgress, phases: Sequence[str], typical: dict[str, float] | None
    ) -> None:
        self._progress = progress
        self._phases = list(phases)
        self._typical = typical
        self._phase_begun = time.monotonic()
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str, message: str) -> None:
        self._close_phase()
        self._progress.update(phase=phase, message=message, **self._forecast(phase, 0.0))

    def tick(self, fraction: float | None, message: str) -> None:
        """Progress within the phase; `fraction` None means: judge by the clock."""
        phase = self._progress.record.phase
        self._progress.update(message=message, **self._forecast(phase, fraction))

    def finish(self) -> dict[str, float]:
        self._close_phase()
        return self.seconds

    def _close_phase(self) -> None:
        now = time.monotonic()
        if self._progress.record.state == "running" and self._progress.record.phase:
            self.seconds[self._progress.record.phase] = round(now - self._phase_begun, 2)
        self._phase_begun = now

    def _forecast(self, phase: str, fraction: float | None) -> dict[str, Any]:
        elapsed = time.monotonic() - self._phase_begun
        index = self._phases.index(phase)
        if self._typical is None:
            within = fraction or 0.0
            return {"percent": round(100 * (index + within) / len(self._phases), 1)}
        expected = self._typical.get(phase, 0.0)
        left_here = max(0.0, expected - elapsed)
        later = sum(self._typical.get(p, 0.0) for p in self._phases[index + 1 :])
        before = sum(self.seconds.values()) + elapsed
        remaining = left_here + later
        percent = 100 * before / max(before + remaining, 1e-6)
        return {"percent": round(min(percent, 99.0), 1), "remaining_s": round(remaining, 1)}


def logs_call(context: RigContext) -> str:
    """The call that reads the model server's log, under the name that the tool has on this rig."""
    return f"get_{context.vocabulary['logs']}()"


def refuse_missing(needs: Sequence[Need]) -> None:
    """Raise RigError NOT_FOUND that lists every missing need with its remedy."""
    missing = [need for need in needs if not need.present and not need.only_for]
    if missing:
        listed = "; ".join(f"{need.name}: {need.detail}" for need in missing)
        remedies = " and ".join(dict.fromkeys(need.remedy for need in missing if need.remedy))
        raise RigError("NOT_FOUND", f"something is missing here: {listed}", remedies)


def memory_verdict(model: ServedModel, room: Room) -> tuple[bool, str]:
    """Whether `model` fits into `room`, and the sum behind it, in GB (1e9 bytes)."""
    parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in model.memory_needed.items())
    text = (
        f"needs {model.memory_total / 1e9:.2f} GB ({parts}), "
        f"{room.memory_available / 1e9:.2f} of {room.memory_total / 1e9:.2f} GB are available"
    )
    if model.beside:
        text += f"; {model.beside}"
    return model.memory_total <= room.memory_available, text


def refuse_oversize(model: ServedModel, room: Room) -> None:
    """Raise RigError CAPACITY when `model` does not fit, before anything is started."""
    fits, text = memory_verdict(model, room)
    if not fits:
        raise RigError(
            "CAPACITY",
            f"{model.name} does not fit: {text}",
            "free memory, lower MAX_MODEL_LEN, or serve a smaller model (MODEL_NAME=embedded)",
        )


async def refuse_planned(context: RigContext, model: str, override: bool) -> None:
    """Refuse what cannot work by the rig's plan, before anything is started or downloaded.

    `override` lets an estimate pass, arithmetic never. A rig without a planner refuses nothing
    here; the sum of the checkpoint itself is taken once the weights are there. Raises RigError.
    """
    check: PlanCheck | None = context.extras.get(PLAN_CHECK)
    if check is not None:
        await check(model, override)


class Startup:
    """The serve job of one rig."""

    def __init__(self, context: RigContext) -> None:
        self._context = context
        self.history = StartHistory(context.paths.state / "starts.jsonl")

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Bring the model up to its first token. On any failure nothing is left running."""
        context, name = self._context, str(progress.record.arguments["model"])
        environment, weights, load, first_token = context.runtime.phases
        clock = _StartClock(progress, context.runtime.phases, self.history.typical(name))
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
            await self._first_token(instance, address, clock)
            instance = await self._with_resolved(instance, address)
            instance = await context.plane.mark_ready(instance)
        except BaseException as error:
            await asyncio.shield(self._undo(serve_id, instance, error))
            raise
        seconds = clock.finish()
        with suppress(OSError, RigError):  # a full disk must not turn a served model into a failure
            self.history.add(name, seconds)
        return {"endpoint": address, "model": name, "seconds": seconds}

    async def _weights(self, name: str, clock: _StartClock) -> ServedModel:
        context = self._context
        model = context.runtime.local_model(name)
        if model is None:
            room = await context.plane.room(context.paths.cache)
            model = await context.runtime.fetch_model(name, room, clock.tick)
        refuse_oversize(model, await context.plane.room(context.paths.cache))
        return model

    async def _until_it_listens(self, instance: Instance, clock: _StartClock) -> str:
        """The endpoint once the health path answers. RigError INTERNAL when the process dies."""
        plane, deadline = self._context.plane, time.monotonic() + _LOAD_PATIENCE_S
        while time.monotonic() < deadline:
            finding = await plane.find()
            # Workers may outlive their leader for a moment: then another process is found.
            if finding.instance is None or finding.instance.pid != instance.pid:
                raise await self._explained_end(instance)
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

    async def _with_resolved(self, instance: Instance, address: str) -> Instance:
        """`instance` with what the engine reports of itself, while the log still has its start."""
        context = self._context
        values: dict[str, str] = {}
        with suppress(RigError):  # a served model is no failure because it says little of itself
            log = await context.plane.logs(instance, _LINES_OF_A_START)
            client = context.chat_client(address)
            values = dict(await context.runtime.resolved(client, log))
        return instance.model_copy(update={"resolved": values})

    async def _explained_end(self, instance: Instance) -> RigError:
        """Why the process ended: by the failure bank, or by the line that most likely says it."""
        context = self._context
        log = await context.plane.logs(instance, _LINES_OF_A_START)
        why, step = deciding_line(log), logs_call(context)
        with suppress(RigError):  # a bank that cannot be asked must not hide the log's own words
            answer = await triaged_log(context.beside("triage.py"), log.partition("\n")[2])
            for failure in answer.failures[:1]:
                why = f"{failure.line} ({failure.kind}: {failure.cause})"
                changes = "; or ".join(str(change) for change in failure.changes[:2])
                step = f"{changes}; analyze_logs() has the rest"
        return RigError("INTERNAL", f"the model server ended while it was loading: {why}", step)

    async def _refuse_incomplete(self, instance: Instance) -> None:
        fault = self._context.runtime.loading_fault(await self._context.plane.logs(instance, 2000))
        if fault:
            raise RigError(
                "INVALID",
                f"the checkpoint {instance.model} is not whole: {fault}",
                "download it again, or serve another one",
            )

    async def _first_token(self, instance: Instance, address: str, clock: _StartClock) -> None:
        """Prove readiness by a generation: a port that answers may still fail every request."""
        del clock
        answer = await self._context.chat_client(address).chat(
            instance.served_name,
            "Say hello.",
            max_tokens=4,
            temperature=0.0,
            timeout_s=_FIRST_TOKEN_PATIENCE_S,
        )
        if answer.broke_off or not answer.completion_tokens:
            why = answer.broke_off or "it generated no token"
            raise RigError(
                "INTERNAL",
                f"the server answers but cannot generate: {why}",
                logs_call(self._context),
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


def deciding_line(log: str) -> str:
    """The line of a log that most likely says why: the last that names an error, else the last."""
    lines = [line.strip() for line in log.splitlines()[1:] if line.strip()]
    for line in reversed(lines):
        if any(word in line for word in ("Error", "error:", "Killed", "Exception", "FATAL")):
            return line[:400]
    return lines[-1][:400] if lines else "it wrote nothing"
