"""What tools that start or wait have in common: outcomes, a job that is followed, a ready server.

Knows no tool and no way of starting.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobRecord
from forge.parts.ground.results import Outcome
from forge.parts.planes.plane import Instance
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.starts import SERVE_JOB, serve_call
from forge.parts.toolsets.toolset import RigContext

WAIT_LIMIT_S = 50.0  # no call relies on a client's patience: the strictest gives 60 s

ServingState = Literal["stopped", "starting", "ready", "failed"]
WaitSeconds = Annotated[
    float, Field(ge=0, le=WAIT_LIMIT_S, description="Seconds to wait for progress, 0 to 50.")
]


class ServeOutcome(Outcome):
    """Where a start stands."""

    state: ServingState
    job_id: str = ""
    model: str = ""
    phase: str = ""
    percent: float = 0.0
    remaining_s: float | None = Field(
        default=None, description="From this rig's own earlier starts; null before the first one."
    )
    endpoint: str = ""
    seconds: float = Field(default=0.0, description="Seconds since the start began.")


class EndpointOutcome(Outcome):
    """The address of the served model."""

    base_url: str
    model: str = Field(description="The name to send as 'model' in requests.")


async def follow_job(context: RigContext, job_id: str, wait_s: float, ctx: Caller) -> JobRecord:
    """The record of `job_id` when it is finished or `wait_s` seconds are over; sends progress."""
    deadline = time.monotonic() + min(wait_s, WAIT_LIMIT_S)
    told, sent = "", -1.0
    while True:
        job = context.jobs.read(job_id)
        sentence = progress_sentence(job)
        if sentence != told or job.percent > sent:
            # The protocol wants every notification to be higher than the one before.
            told, sent = sentence, min(100.0, max(job.percent, sent + 0.01))
            await ctx.report_progress(sent, 100, sentence)
        if job.finished or time.monotonic() >= deadline:
            return job
        await asyncio.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def progress_sentence(job: JobRecord) -> str:
    """One line on where an unfinished job is: phase, what it does, time left when known."""
    if job.finished:
        return f"{job.state}: {job.message}" if job.message and job.state != "done" else job.state
    left = "" if job.remaining_s is None else f", about {job.remaining_s:.0f} s left"
    return f"{job.phase}: {job.message}{left}"


async def require_ready(context: RigContext) -> Instance:
    """The ready model server; else a RigError that says what there is and what to do."""
    active = context.jobs.active(SERVE_JOB)
    finding = await context.plane.find()
    if finding.instance is not None and finding.instance.state == "ready":
        return finding.instance
    if active is not None:
        raise RigError(
            "BUSY",
            f"the model is still starting ({progress_sentence(active)})",
            f"get_job(job_id='{active.id}', wait_s=50)",
        )
    if finding.instance is not None and getattr(type(context.plane), "boots_itself", False):
        raise RigError(
            "BUSY",
            f"{finding.instance.serve_id} has not proven yet that it serves the model",
            f"wait_for_{context.vocabulary['ready']}_ready(wait_s=50)",
        )
    notes = f" ({'; '.join(finding.notes)})" if finding.notes else ""
    raise RigError("NOT_FOUND", f"no model is being served{notes}", serve_call(context))
