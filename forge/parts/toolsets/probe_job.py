"""The probe job: a plan on disk, probe.py in a process of its own, a report at the end.

Whatever is cancelled or killed, what was found until then is kept; what was not asked is untested.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from forge.parts.boundaries.probe_plan import (
    PROBE_EVENTS_FILE,
    PROBE_PLAN_FILE,
    PROBE_PROGRAM,
    ProbePlan,
)
from forge.parts.boundaries.probe_store import ProbeStore
from forge.parts.boundaries.report_store import benchmarks_folders
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.process import run_program
from forge.parts.ground.state import private_folder, write_private
from forge.parts.knowledge.probe_report import (
    MOST_EXCHANGES,
    ProbeFinding,
    ProbeGroup,
    ProbeReport,
    compared_greedy,
)
from forge.parts.toolsets.benchmark_job import PROBE_JOB
from forge.parts.toolsets.following import require_ready
from forge.parts.toolsets.probe_cases import GREEDY_BASELINE_CASE, PROBE_BY_NAME, planned_probes
from forge.parts.toolsets.probe_facts import known_facts, probe_frame
from forge.parts.toolsets.probe_found import ProbeFound, found_so_far
from forge.parts.toolsets.reports import private_setting_values
from forge.parts.toolsets.starts import logs_call
from forge.parts.toolsets.toolset import RigContext

_PROBE_FRAME_FILE = "frame.json"
# A key travels in the environment, under a name by which the redactor knows its value for a secret.
_PROBE_KEY_VARIABLE = "RIG_MODEL_API_KEY"
_PROBE_READ_EVERY_S = 0.2
_PROBE_BEYOND_S = 600.0  # beyond what all answers together may take: then the program itself hangs


class _ProbeFrame(BaseModel):
    """A report's head, and the report whose greedy answers are to be compared with; on disk, so
    that a killed probe can still be reported."""

    model_config = ConfigDict(extra="forbid")

    head: dict[str, Any]
    baseline: str = ""


@dataclass
class _ProbeUnderWay:
    """One run: its folder's plan and frame, and what was found."""

    plan: ProbePlan
    frame: _ProbeFrame
    found: ProbeFound

    @property
    def folder(self) -> Path:
        return self.found.folder

    def report(self, state: str, missing: str, seconds: float) -> ProbeReport:
        """The report as it stands; what was not asked is untested, with `missing` as its reason."""
        found, baseline = self.found, self.frame.baseline
        asked = {finding.case for finding in found.findings}
        planned = [PROBE_BY_NAME[name] for name in self.plan.cases if name in PROBE_BY_NAME]
        wanted: list[tuple[str, ProbeGroup]] = [(case.name, case.group) for case in planned]
        if baseline:
            wanted.append((GREEDY_BASELINE_CASE, "determinism"))
        unasked = [
            ProbeFinding(case=name, group=group, verdict="untested", detail=missing)
            for name, group in wanted
            if name not in asked
        ]
        head = self.frame.head
        run = {**head["run"], "state": state, "duration_s": round(seconds, 1)}
        return ProbeReport.model_validate(
            {
                **head,
                "run": run,
                "context_limit": self.plan.facts.context_limit,
                "limit_source": self.plan.facts.limit_source,
                "findings": [f.model_dump() for f in (*found.findings, *unasked)],
                "greedy_set": found.greedy_set,
                "greedy": [text.model_dump() for text in found.greedy],
                "baseline": baseline,
            }
        )


class ProbeJob:
    """The probe job of one rig."""

    def __init__(self, context: RigContext) -> None:
        self._context = context

    @property
    def store(self) -> ProbeStore:
        """The probe reports: in the state folder, and in the rig's own folder in a checkout."""
        context = self._context
        return ProbeStore(benchmarks_folders(context.paths.state, context.server_file.parent))

    def require_program(self) -> Path:
        """The program that asks. Raises RigError NOT_FOUND where it is missing."""
        program = self._context.beside(PROBE_PROGRAM)
        if not program.is_file():
            raise RigError(
                "NOT_FOUND", f"{PROBE_PROGRAM} is not beside server.py", "restore the rig's folder"
            )
        return program

    @property
    def _runs(self) -> Path:
        return self._context.paths.state / "probes"

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Have every planned case asked and save the report.

        Raises RigError UNREACHABLE where not even a plain question is answered: then nothing that
        a probe finds would be about the probe's matter; PARTIAL where the program failed.
        """
        run = await self._begin(progress)
        begun, fault = time.monotonic(), ""
        try:
            fault = await self._watched(run, progress)
        except asyncio.CancelledError:
            # What was found is kept, and the job still ends as cancelled.
            if result := self._kept(run, "cancelled", time.monotonic() - begun):
                progress.update(result=result)
            raise
        if run.found.barred:
            self._forget(run.folder)
            raise RigError(
                "UNREACHABLE",
                f"not even a plain question is answered ({run.found.barred})",
                f"verify_model_health(), then {logs_call(self._context)}",
            )
        if fault:
            result = self._kept(run, "killed", run.found.seconds)
            progress.update(result=result)
            kept = result.get("report", "nothing")
            raise RigError("PARTIAL", f"{fault}; kept: {kept}", "probe_capabilities()")
        if run.frame.baseline:
            run.found.findings.append(self._compared(run))
        result = self._saved(run.report("complete", "-", run.found.seconds), run.folder)
        progress.update(message=f"saved as {result['report']}")
        return result

    async def _begin(self, progress: JobProgress) -> _ProbeUnderWay:
        """Write the run's folder: plan, frame, and a file for the events."""
        context, arguments = self._context, progress.record.arguments
        self.require_program()
        instance = await require_ready(context)
        address = await context.plane.endpoint(instance)
        plan = ProbePlan(
            base_url=address,
            model=instance.served_name,
            cases=[case.name for case in planned_probes(arguments["cases"])],
            timeout_s=float(arguments["timeout_s"]),
            facts=await known_facts(context, context.chat_client(address), instance),
            api_key_variable=_PROBE_KEY_VARIABLE if context.runtime.api_key() else "",
            parent_pid=os.getpid(),
        )
        head = await probe_frame(context, instance, address)
        frame = _ProbeFrame(head=head, baseline=str(arguments["baseline"]))
        folder = private_folder(self._runs / progress.record.id)
        write_private(folder / PROBE_PLAN_FILE, plan.model_dump_json(indent=1))
        write_private(folder / _PROBE_FRAME_FILE, frame.model_dump_json(indent=1))
        write_private(folder / PROBE_EVENTS_FILE, "")
        progress.update(message="a plain question first")
        return _ProbeUnderWay(plan, frame, ProbeFound(folder))

    async def _watched(self, run: _ProbeUnderWay, progress: JobProgress) -> str:
        """Run the program to its end while its events are followed; returns what went wrong."""
        argv = [sys.executable, str(self.require_program()), str(run.folder)]
        answers = MOST_EXCHANGES * len(run.plan.cases) * run.plan.timeout_s
        variable = run.plan.api_key_variable
        key = {variable: self._context.runtime.api_key()} if variable else {}
        running = run_program(
            argv, timeout_s=answers + _PROBE_BEYOND_S, environment={**os.environ, **key}
        )
        program = asyncio.create_task(running)
        try:
            while not program.done():
                await asyncio.wait({program}, timeout=_PROBE_READ_EVERY_S)
                self._follow(run, progress)
            done = await program
        finally:
            if not program.done():  # cancelled: the program's group goes before anything else
                program.cancel()
                await asyncio.wait({program})
        self._follow(run, progress)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return f"{PROBE_PROGRAM} ended with status {done.returncode}: {last[:300]}"
        return "" if run.found.ended or run.found.barred else "the probes ended early"

    def _follow(self, run: _ProbeUnderWay, progress: JobProgress) -> None:
        """Tell in the job's record what is new."""
        total = len(run.plan.cases)
        for event in run.found.news():
            case = PROBE_BY_NAME.get(event.case)
            if case is None:
                continue
            number = run.plan.cases.index(case.name)
            title = f"{case.title} ({number + 1} of {total})"
            if event.event == "begun":
                percent = round(100 * number / total, 1)
                result = found_so_far(run.found.findings)
                progress.update(phase=case.group, message=title, percent=percent, result=result)
            elif event.event == "asking":
                beside = "" if title.startswith(event.what) else f": {event.what}"
                progress.update(message=f"{title}{beside}")

    def _compared(self, run: _ProbeUnderWay) -> ProbeFinding:
        """The greedy answers against those of the baseline."""
        baseline = run.frame.baseline
        try:
            now = run.report("complete", "-", run.found.seconds)
            verdict, detail = compared_greedy(now, self.store.read(baseline))
            if not run.found.greedy:
                verdict, detail = ("untested", "this run has no greedy answers to compare")
        except RigError as error:
            verdict, detail = "untested", error.what
        return ProbeFinding(
            case=GREEDY_BASELINE_CASE, group="determinism", verdict=verdict, detail=detail[:1900]
        )

    def _kept(self, run: _ProbeUnderWay, state: str, seconds: float) -> dict[str, Any]:
        """Save what a run that was cut short had found, and forget its folder; the job's result,
        empty where there was nothing."""
        run.found.news()
        if not run.found.worth_keeping:
            self._forget(run.folder)
            return {}
        run.found.cut_short(state)
        missing = f"the probe was {state} before its turn"
        return self._saved(run.report(state, missing, seconds), run.folder)

    def _saved(self, report: ProbeReport, folder: Path) -> dict[str, Any]:
        private = private_setting_values(self._context.settings)
        saved = self.store.save(report, private)
        self._forget(folder)
        self._context.journal.append("probe_saved", report=saved.name)
        return {
            **found_so_far(saved.report.findings),
            "report": saved.name,
            "report_file": str(saved.files[-1]),
        }

    def salvage(self) -> list[str]:
        """Save what killed jobs had found; returns one sentence for each."""
        notes = []
        for folder in sorted(self._runs.glob(f"{PROBE_JOB}-*")):
            if not self._is_over(folder.stem):
                continue
            try:
                run = _read_run(folder)
                if result := self._kept(run, "killed", run.found.seconds):
                    notes.append(f"the killed probe {folder.stem} was saved as {result['report']}")
            except (FileNotFoundError, NotADirectoryError, ValidationError, KeyError):
                self._forget(folder)
                notes.append(f"the killed probe {folder.stem} left nothing usable")
            except (RigError, OSError) as error:
                notes.append(f"the killed probe {folder.stem} could not be saved: {error}")
        return notes

    def _is_over(self, job_id: str) -> bool:
        try:
            return self._context.jobs.read(job_id).finished
        except RigError:
            return True

    def _forget(self, folder: Path) -> None:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.unlink(missing_ok=True)


def _read_run(folder: Path) -> _ProbeUnderWay:
    """The run in `folder`, its events read. Raises OSError or ValidationError for what is none."""
    plan = ProbePlan.model_validate_json((folder / PROBE_PLAN_FILE).read_bytes())
    frame = _ProbeFrame.model_validate_json((folder / _PROBE_FRAME_FILE).read_bytes())
    found = ProbeFound(folder)
    found.news()
    return _ProbeUnderWay(plan, frame, found)
