"""The status toolset: one look at everything that a rig has, where each half may be missing.

Reads only. A half that cannot be read says why and hides no other; knows no engine and no machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar, cast

from forge.parts.boundaries.run_glance import newest_run
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobRecord
from forge.parts.ground.redact import clean
from forge.parts.ground.settings import RigSettings, origin_of_settings
from forge.parts.planes.billing import BilledPlane, RunningCost
from forge.parts.planes.plane import Finding, Instance, Room
from forge.parts.toolsets.engine_load import EngineLoad, load_of, metrics_of
from forge.parts.toolsets.starts import SERVE_JOB, memory_verdict
from forge.parts.toolsets.status_outcome import (
    CostHalf,
    LastRun,
    MachineHalf,
    StatusOutcome,
    StatusSituation,
    StatusState,
    age_words,
    status_lines,
    status_step,
)
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_READ_PATIENCE_S = 5.0  # what a plane's read may take at most; on this computer: milliseconds
_LOAD_LOOK_S = 0.8  # an engine too busy to answer that soon is said to be so
_SOON_S = 900.0  # a machine that ends within that time is noted

HalfT = TypeVar("HalfT")


class StatusToolset(Toolset):
    """Look at everything."""

    toolset_name = "status"

    @rig_tool(title="Status of the rig", effect="reads")
    async def get_system_status(self) -> StatusOutcome:
        """One look at this rig on {place}: state, model and endpoint, memory and disk, requests and
        KV cache in use where {engine} counts them, what is billed and until when, jobs, the last
        benchmark and probe, each setting with where it came from, and one next step. Read this
        first. It changes nothing, and what cannot be read says why. Takes under a second, and up
        to 10 only where a provider is slow to answer."""
        return await system_status(self.context)


@dataclass(frozen=True)
class _StatusReading:
    """What was read. A half that is None has its reason in `why`, by the half's name."""

    jobs: Sequence[JobRecord]
    finding: Finding | None
    room: Room | None
    cost: RunningCost | None
    settings: RigSettings | None
    why: Mapping[str, str]

    @property
    def instance(self) -> Instance | None:
        return None if self.finding is None else self.finding.instance

    @property
    def start(self) -> JobRecord | None:
        """The start of a model that is under way."""
        return next((j for j in self.jobs if j.kind == SERVE_JOB and not j.finished), None)

    @property
    def work(self) -> JobRecord | None:
        """Any other job that is under way, such as a benchmark."""
        return next((j for j in self.jobs if j.kind != SERVE_JOB and not j.finished), None)

    @property
    def model(self) -> str:
        """What is served, being started, or would be served."""
        if self.instance is not None:
            return self.instance.model
        if self.start is not None:
            return str(self.start.arguments.get("model", ""))
        return str(getattr(self.settings, "model_name", ""))


async def system_status(context: RigContext) -> StatusOutcome:
    """The rig as it is now. Each half is read by itself, in bounded time, and raises nothing."""
    reading = await _read_halves(context)
    state, address, silent = await _state_of(context, reading)
    load = await _engine_load(context, address)
    benchmarks = context.paths.state / "benchmarks"
    (bench, _), (probe, _), (memory, no_memory) = await asyncio.gather(
        _half(asyncio.to_thread(newest_run, benchmarks / "reports")),
        _half(asyncio.to_thread(newest_run, benchmarks / "probes")),
        _half(asyncio.to_thread(_memory_line, context, reading)),
    )
    machine, cost = _machine_half(context, reading), _cost_half(context, reading)
    sentence = _status_sentence(context, reading, state, address)
    situation, job = _situation(context, reading, state, bool(silent))
    instance = reading.instance
    return StatusOutcome(
        summary="\n".join(status_lines(sentence, machine, load, cost)),
        next_step=status_step(situation, context.vocabulary, job),
        rig=context.rig,
        state=state,
        model=reading.model,
        endpoint=f"{address}/v1" if address else "",
        pid=instance.pid if instance is not None else None,
        started_at=instance.started_at if instance is not None else "",
        machine=machine,
        load=load,
        cost=cost,
        last_benchmark=LastRun(**vars(bench)) if bench is not None else None,
        last_probe=LastRun(**vars(probe)) if probe is not None else None,
        jobs=[f"{job.id}: {job.state}, {job.phase}" for job in reading.jobs[:5]],
        notes=[*_notes(context, reading), *([silent] if silent else [])],
        memory=memory or no_memory,
        settings=_settings_with_origin(reading.settings),
    )


async def _half(reading: Awaitable[HalfT]) -> tuple[HalfT | None, str]:
    """What `reading` gives, or None and why not. Nothing that it raises hides the other halves."""
    try:
        async with asyncio.timeout(_READ_PATIENCE_S):
            return await reading, ""
    except TimeoutError:
        return None, f"no answer within {_READ_PATIENCE_S:g} s"
    except RigError as error:
        return None, error.what
    except Exception as error:
        print(clean(traceback.format_exc()), file=sys.stderr, flush=True)
        return None, f"it could not be read ({type(error).__name__}, see standard error)"


async def _read_halves(context: RigContext) -> _StatusReading:
    # Jobs before the plane: a start that ends between the two looks is then called "starting",
    # while the other way round what it brought up would be called left half-started.
    jobs, no_jobs = await _half(asyncio.to_thread(context.jobs.all))
    (
        (finding, no_finding),
        (room, no_room),
        (cost, no_cost),
        (settings, fault),
    ) = await asyncio.gather(
        _half(context.plane.find()),
        _half(context.plane.room(context.paths.cache)),
        _half(_running_cost(context)),
        _half(_settings_now(context)),
    )
    why = {"jobs": no_jobs, "plane": no_finding, "room": no_room, "cost": no_cost}
    return _StatusReading(jobs or [], finding, room, cost, settings, why | {"settings": fault})


async def _settings_now(context: RigContext) -> RigSettings:
    return context.settings


def _bills(context: RigContext) -> bool:
    """Whether the plane has the verb that says what is billed."""
    # By the class: a look at the instance would read properties, which may want good settings.
    return hasattr(type(context.plane), "cost_so_far")


def _boots_itself(context: RigContext) -> bool:
    """Whether what serves is started by its machine: then no start is left half-done here."""
    return bool(getattr(type(context.plane), "boots_itself", False))


async def _running_cost(context: RigContext) -> RunningCost | None:
    if _bills(context):
        return await cast(BilledPlane, context.plane).cost_so_far()
    if "rental" in context.vocabulary:
        raise RigError("NOT_FOUND", "this rig's plane cannot say what is billed")
    return None


async def _state_of(context: RigContext, reading: _StatusReading) -> tuple[StatusState, str, str]:
    """The state, the address of a ready model, and why one that should answer does not."""
    instance = reading.instance
    if reading.start is not None:
        return "starting", "", ""
    if reading.finding is None:
        return "unknown", "", ""
    if instance is None:
        return "stopped", "", ""
    if instance.state != "ready":
        return ("starting" if _boots_itself(context) else "failed"), "", ""
    address, why = await _half(context.plane.endpoint(instance))
    if address is None:
        return "failed", "", f"it runs but does not answer: {why}"
    return "ready", address, ""


async def _engine_load(context: RigContext, address: str) -> EngineLoad:
    if not address and context.runtime.metric_names:
        return EngineLoad(missing=["no model is ready"])
    page, why = await _half(metrics_of(context, address, _LOAD_LOOK_S))
    if page is None:
        return EngineLoad(missing=[why])
    return load_of(context, page)


def _situation(
    context: RigContext, reading: _StatusReading, state: StatusState, silent: bool
) -> tuple[StatusSituation, str]:
    """What the next step is for, and the job that it is about."""
    cost, work = reading.cost, reading.work
    if reading.start is not None:
        return "starting", reading.start.id
    if reading.settings is None:
        return "settings", ""
    if state == "unknown":
        return "unread", ""
    if cost is not None and cost.expires_unix is not None and cost.expires_unix < time.time():
        return "over", ""
    if state == "starting":
        return "starting", ""
    if state == "stopped" and _boots_itself(context) and cost is not None:
        return "over", ""
    if state == "stopped":
        gone = _bills(context) and cost is None and not reading.why["cost"]
        return ("no machine" if gone and "hardware" in context.vocabulary else "stopped"), ""
    if state == "failed":
        return ("silent" if silent else "half-started"), ""
    return ("busy", work.id) if work is not None else ("ready", "")


def _notes(context: RigContext, reading: _StatusReading) -> list[str]:
    """What must be told: of the past, of faults, and of halves that could not be read."""
    place, why, cost = context.vocabulary["place"], reading.why, reading.cost
    notes = list(reading.finding.notes) if reading.finding is not None else []
    if why["plane"]:
        notes.append(f"what runs on {place} is not known: {why['plane']}")
    if why["jobs"]:
        notes.append(f"the jobs are not known: {why['jobs']}")
    half = reading.instance is not None and reading.instance.state != "ready"
    if half and not reading.start and not _boots_itself(context):
        notes.append("a half-started model server is left of a killed start")
    last = next((job for job in reading.jobs if job.kind == SERVE_JOB), None)
    if last is not None and last.state == "lost":
        notes.append(f"job {last.id} is lost: {last.message}")
    if last is not None and last.state == "failed" and reading.instance is None:
        notes.append(f"the last start failed: {last.message}")
    if cost is not None and cost.expires_unix is not None:
        left = cost.expires_unix - time.time()
        if left < 0:
            notes.append(f"the time of {cost.what} is over since {age_words(-left)}")
        elif left < _SOON_S:
            notes.append(f"{cost.what} ends in {age_words(left)}")
    if why["settings"]:
        notes.append(why["settings"])
    return notes


def _machine_half(context: RigContext, reading: _StatusReading) -> MachineHalf:
    place, room = context.vocabulary["place"], reading.room
    if room is None:
        return MachineHalf(place=place, missing=reading.why["room"])
    return MachineHalf(
        place=place,
        memory_available_gb=round(room.memory_available / 1e9, 2),
        memory_total_gb=round(room.memory_total / 1e9, 2),
        disk_free_gb=round(room.disk_free / 1e9, 1),
    )


def _cost_half(context: RigContext, reading: _StatusReading) -> CostHalf:
    cost = reading.cost
    if reading.why["cost"]:
        return CostHalf(billed=None, missing=reading.why["cost"])
    if cost is None:
        return CostHalf(billed=False)
    ends, used = "", None
    if cost.expires_unix is not None:
        ends = datetime.fromtimestamp(cost.expires_unix, UTC).isoformat(timespec="seconds")
        whole = cost.hours + (cost.expires_unix - time.time()) / 3600
        used = round(cost.hours / whole, 3) if whole > cost.hours else 1.0
    return CostHalf(
        billed=True,
        what=cost.what,
        hours=round(cost.hours, 3),
        usd_per_hour=cost.usd_per_hour,
        usd_so_far=None if cost.usd is None else round(cost.usd, 4),
        ends_at=ends,
        life_used=used,
        missing="" if cost.usd is not None else "nobody knows its price",
    )


def _status_sentence(
    context: RigContext, reading: _StatusReading, state: StatusState, address: str
) -> str:
    detail, instance = "", reading.instance
    if reading.start is not None:
        detail = f" ({reading.start.phase}, {reading.start.percent:.0f} %)"
    elif state == "ready" and instance is not None:
        detail = f" at {address}/v1{_since(instance.started_at)}"
    model = reading.model or "no model"
    return f"{context.rig} {context.version}: {model} is {state}{detail}."


def _since(stamp: str) -> str:
    """How long ago a UTC stamp was, in words; empty where it cannot be read."""
    try:
        begun = datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return ""
    return f", started {age_words(time.time() - begun)} ago"


def _memory_line(context: RigContext, reading: _StatusReading) -> str:
    if not reading.model or reading.room is None:
        return ""
    room = reading.room
    free = f"{room.memory_available / 1e9:.1f} of {room.memory_total / 1e9:.1f} GB available"
    try:
        model = context.runtime.local_model(reading.model)
    except RigError as error:
        return f"{free}; {error.what}"
    if model is None:
        return f"{free}; the weights of {reading.model} are not there yet"
    return f"{free}; {reading.model} {memory_verdict(model, room)[1]}"


def _settings_with_origin(settings: RigSettings | None) -> dict[str, str]:
    if settings is None:
        return {}
    origins = origin_of_settings(settings)
    values = settings.model_dump(mode="json")
    return {name.upper(): f"{value} ({origins[name]})" for name, value in values.items()}
