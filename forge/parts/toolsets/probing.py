"""The probes toolset: after a model is up, ask what a 200 can hide, as a job with a report.

What is asked stands in the probe modules; this one starts the job and tells where it stands.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.jobs import JobRecord, JobRunner
from forge.parts.ground.locks import held_lock
from forge.parts.ground.results import Outcome
from forge.parts.knowledge.probe_report import ProbeGroup, ProbeVerdict
from forge.parts.toolsets.benchmark_job import PROBE_JOB, unfinished_measurement
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence, require_ready
from forge.parts.toolsets.probe_cases import PROBE_GROUPS, planned_probes
from forge.parts.toolsets.probe_job import ProbeJob
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_ALL_PROBE_GROUPS: list[ProbeGroup] = list(PROBE_GROUPS)

ProbeGroups = Annotated[
    list[ProbeGroup],
    Field(min_length=1, max_length=5, description="What to probe; all by default."),
]


class ProbeOutcome(Outcome):
    """Where a probe stands. `table` has a line for each case that was judged: case, verdict, what
    was seen. A 'silent' verdict is a 200 that hides that the wish was ignored."""

    job_id: str
    state: str
    percent: float = 0.0
    counts: dict[str, int] = Field(default_factory=dict, description="How many of each verdict.")
    verdicts: dict[str, ProbeVerdict] = Field(default_factory=dict)
    table: list[str] = Field(default_factory=list)
    report: str = Field(default="", description="Its name, for a later baseline.")
    report_file: str = Field(default="", description="Where the raw evidence is.")
    notes: list[str] = Field(default_factory=list)


class ProbingToolset(Toolset):
    """Probe."""

    toolset_name = "probes"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        self._job = ProbeJob(context)

    def job_runners(self) -> dict[str, JobRunner]:
        return {PROBE_JOB: self._job.run}

    @rig_tool(title="Probe what the model can do", effect="changes")
    async def probe_capabilities(
        self,
        ctx: Caller,
        cases: ProbeGroups = _ALL_PROBE_GROUPS,
        baseline: Annotated[
            str,
            Field(
                max_length=120,
                description="Name of an earlier probe report to compare greedy answers with.",
            ),
        ] = "",
        timeout_s: Annotated[
            float, Field(ge=1, le=3600, description="Longest wait for one answer, in seconds.")
        ] = 300,
        wait_s: WaitSeconds = 0,
    ) -> ProbeOutcome:
        """Ask the served model what a 200 can hide: five tool-calling scenarios; a JSON schema with
        thinking on and off, enforced or merely obeyed; one picture, if it claims vision; six greedy
        prompts twice, byte for byte, and against baseline (another build or KV type); a context at
        the limit and one token above. Verdicts: pass, fail, silent (ignored under a 200),
        unsupported, untested. A job of some 40 requests, seconds on a GPU and minutes on a CPU,
        during which the {server} is busy; cancel_job keeps what was found. {cost}."""
        self._job.require_program()
        if baseline:
            self._check_baseline(baseline, cases)
        await require_ready(self.context)
        arguments = {"cases": list(cases), "baseline": baseline, "timeout_s": timeout_s}
        async with held_lock(self.context.paths.state, "benchmark"):
            notes = self._job.salvage()
            job = self._begin(arguments)
        return probe_outcome(await follow_job(self.context, job.id, wait_s, ctx), notes)

    def _check_baseline(self, baseline: str, cases: list[ProbeGroup]) -> None:
        if "determinism" not in cases:
            raise invalid_parameter("baseline", "compares greedy answers: cases lacks determinism")
        self._job.store.read(baseline, "baseline")

    def _begin(self, arguments: dict[str, Any]) -> JobRecord:
        active = unfinished_measurement(self.context)
        if active is not None:
            raise RigError(
                "BUSY",
                f"{active.id} is running ({progress_sentence(active)}) and needs the server alone",
                f"get_job(job_id='{active.id}', wait_s=50)",
            )
        groups = [group for group in PROBE_GROUPS if group in arguments["cases"]]
        job = self.context.jobs.new(PROBE_JOB, arguments, groups)
        self.context.journal.append("probe asked", job=job.id)
        self.context.jobs.start_worker(job, self.context.server_file)
        return job


def probe_outcome(job: JobRecord, notes: list[str]) -> ProbeOutcome:
    """The job as the tool's answer."""
    result = job.result
    counts = dict(result.get("counts", {}))
    report = str(result.get("report", ""))
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing yet"
    if not job.finished:
        planned = len(planned_probes(job.arguments["cases"]))
        summary = f"{planned} probes by {job.id}: {progress_sentence(job)}; so far {found}."
        step = f"get_job(job_id='{job.id}', wait_s=50)"
    elif job.state == "done":
        summary = f"{sum(counts.values())} probes: {found}; saved as {report}."
        step = f"read {result.get('report_file', '')} for the evidence"
        if "greedy_repeats" in result.get("verdicts", {}):
            again = f"probe_capabilities(cases=['determinism'], baseline='{report}')"
            step = f"after a change of build or KV type, {again}"
    else:
        why = job.error.text if job.error is not None else job.message
        summary = f"The probe {job.id} is {job.state}: {why}; found: {found}."
        step = "get_system_status()"
    return ProbeOutcome(
        summary=summary,
        next_step=step,
        job_id=job.id,
        state=job.state,
        percent=job.percent,
        counts=counts,
        verdicts=dict(result.get("verdicts", {})),
        table=[str(line) for line in result.get("table", [])],
        report=report,
        report_file=str(result.get("report_file", "")),
        notes=notes,
    )
