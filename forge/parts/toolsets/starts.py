"""What every start of a model has: its clock and history, its refusals, the proof of its end.

Knows no way of starting: a process here and a machine elsewhere have parts of their own.
"""

from __future__ import annotations

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
_FIRST_TOKEN_PATIENCE_S = 600.0
_STARTS_REMEMBERED = 5
LINES_OF_A_START = 2000


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


class StartClock:
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


def serve_call(context: RigContext) -> str:
    """The call that gets a model served on this rig: a start here, a machine elsewhere."""
    return context.vocabulary.get("serve", "serve_model()")


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


async def prove_first_token(context: RigContext, instance: Instance, address: str) -> None:
    """Prove readiness by a generation: a port that answers may still fail every request."""
    answer = await context.chat_client(address).chat(
        instance.served_name,
        "Say hello.",
        max_tokens=4,
        temperature=0.0,
        timeout_s=_FIRST_TOKEN_PATIENCE_S,
    )
    if answer.broke_off or not answer.completion_tokens:
        why = answer.broke_off or "it generated no token"
        raise RigError(
            "INTERNAL", f"the server answers but cannot generate: {why}", logs_call(context)
        )


async def with_resolved(context: RigContext, instance: Instance, address: str) -> Instance:
    """`instance` with what the engine reports of itself, while the log still has its start."""
    values: dict[str, str] = {}
    with suppress(RigError):  # a served model is no failure because it says little of itself
        log = await context.plane.logs(instance, LINES_OF_A_START)
        client = context.chat_client(address)
        values = dict(await context.runtime.resolved(client, log))
    return instance.model_copy(update={"resolved": values})


async def explained_end(context: RigContext, log: str) -> RigError:
    """Why a start ended, by its log: by the failure bank, or by the line that most likely says."""
    why, step = deciding_line(log), logs_call(context)
    with suppress(RigError):  # a bank that cannot be asked must not hide the log's own words
        answer = await triaged_log(context.beside("triage.py"), log)
        for failure in answer.failures[:1]:
            why = f"{failure.line} ({failure.kind}: {failure.cause})"
            changes = "; or ".join(str(change) for change in failure.changes[:2])
            step = f"{changes}; analyze_logs() has the rest"
    return RigError("INTERNAL", f"the model server ended while it was loading: {why}", step)


def deciding_line(log: str) -> str:
    """The line of a log that most likely says why: the last that names an error, else the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        if any(word in line for word in ("Error", "error:", "Killed", "Exception", "FATAL")):
            return line[:400]
    return lines[-1][:400] if lines else "it wrote nothing"
