"""The jobs toolset: follow and cancel long work that any server of the rig has started."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobRecord
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_CANCEL_PATIENCE_S = 45.0  # a search proves that its request is gone: several calls of a provider

JobId = Annotated[str, Field(max_length=64, description="The id that the starting tool gave.")]


class JobOutcome(Outcome):
    """A job as it stands."""

    job_id: str
    kind: str
    state: str
    phase: str = ""
    phases: list[str] = Field(default_factory=list)
    percent: float = 0.0
    remaining_s: float | None = None
    seconds: float = 0.0
    result: dict[str, Any] = Field(default_factory=dict)
    error: str = ""


class JobsToolset(Toolset):
    """Follow, cancel."""

    toolset_name = "jobs"

    @rig_tool(title="Follow a job", effect="reads")
    async def get_job(self, ctx: Caller, job_id: JobId, wait_s: WaitSeconds = 0) -> JobOutcome:
        """Where a job is: phase, percentage, seconds left, result or error. Waits up to wait_s
        seconds (50 at most) for its end, with progress; call it again while state is 'running'."""
        checked_name("job", "job_id", job_id)
        return job_outcome(await follow_job(self.context, job_id, wait_s, ctx))

    @rig_tool(title="Cancel a job", effect="destroys")
    async def cancel_job(self, job_id: JobId) -> JobOutcome:
        """End a job that is queued or running and undo what it began, such as a half-started
        {server}. A job that is finished stays as it is. Takes seconds."""
        checked_name("job", "job_id", job_id)
        job = await self.context.jobs.cancel(job_id, _CANCEL_PATIENCE_S)
        finding = await self.context.plane.find()
        if finding.instance is not None and finding.instance.job_id == job_id:
            if finding.instance.state == "starting" and job.state in ("cancelled", "lost"):
                await self.context.plane.stop(finding.instance)
        refuse_left_over(self.context, job)
        return job_outcome(job)


def refuse_left_over(context: RigContext, job: JobRecord) -> None:
    """Raise RigError UNKNOWN where a job that was ended could not undo what it had begun."""
    left = getattr(context.plane, "left_by_job", None)
    if left is None or job.state not in ("cancelled", "lost") or context.jobs.active(job.kind):
        return
    what = left()
    if what:
        raise RigError(
            "UNKNOWN",
            f"the job was ended, but {what} is not proven gone: it may exist and cost money",
            f"list_{context.vocabulary['rental']}s()",
        )


def job_outcome(job: JobRecord) -> JobOutcome:
    """The record as a tool's answer."""
    if not job.finished:
        summary = f"{job.id} is {job.state}: {progress_sentence(job)}."
        step = f"get_job(job_id='{job.id}', wait_s=50)"
    else:
        summary = f"{job.id} is {job.state}{': ' + job.message if job.message else ''}."
        step = "get_system_status()"
    return JobOutcome(
        summary=summary,
        next_step=step,
        job_id=job.id,
        kind=job.kind,
        state=job.state,
        phase=job.phase,
        phases=job.phases,
        percent=job.percent,
        remaining_s=job.remaining_s,
        seconds=job.seconds,
        result=job.result,
        error=job.error.text if job.error is not None else "",
    )
