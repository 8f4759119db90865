"""The probe job: case after case, a draft on disk after each, a report at the end.

Whatever is cancelled or killed, what was found until then is kept; what was not asked is untested.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.boundaries.probe_store import ProbeStore
from forge.parts.boundaries.report_store import benchmarks_folders
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.state import private_folder, read_json, write_json
from forge.parts.knowledge.probe_report import (
    PROBE_VERDICTS,
    ProbeFinding,
    ProbeGroup,
    ProbeReport,
    compared_greedy,
    probe_table,
)
from forge.parts.toolsets.benchmark_job import PROBE_JOB
from forge.parts.toolsets.probe_asking import ProbeAsker, barred_judgement
from forge.parts.toolsets.probe_cases import GREEDY_BASELINE_CASE, ProbeCase, planned_probes
from forge.parts.toolsets.probe_facts import known_facts, probe_frame
from forge.parts.toolsets.probe_greedy import GREEDY_SET
from forge.parts.toolsets.reports import private_setting_values
from forge.parts.toolsets.serving import require_ready
from forge.parts.toolsets.startup import logs_call
from forge.parts.toolsets.toolset import RigContext


@dataclass
class _ProbeUnderWay:
    """One job under way: what is planned, what the frame of its report is, what was found."""

    job_id: str
    planned: list[ProbeCase]
    frame: dict[str, Any]
    asker: ProbeAsker
    baseline: str
    begun: float
    findings: list[ProbeFinding]

    def report(self, state: str, missing: str) -> ProbeReport:
        """The report as it stands; what was not asked is untested, with `missing` as its reason."""
        asked = {finding.case for finding in self.findings}
        wanted: list[tuple[str, ProbeGroup]] = [(case.name, case.group) for case in self.planned]
        if self.baseline:
            wanted.append((GREEDY_BASELINE_CASE, "determinism"))
        unasked = [
            ProbeFinding(case=name, group=group, verdict="untested", detail=missing)
            for name, group in wanted
            if name not in asked
        ]
        facts = self.asker.facts
        run = {**self.frame["run"], "state": state}
        run["duration_s"] = round(time.monotonic() - self.begun, 1)
        return ProbeReport.model_validate(
            {
                **self.frame,
                "run": run,
                "context_limit": facts.context_limit,
                "limit_source": facts.limit_source,
                "findings": [f.model_dump() for f in (*self.findings, *unasked)],
                "greedy_set": GREEDY_SET if self.asker.greedy else "",
                "greedy": [text.model_dump() for text in self.asker.greedy],
                "baseline": self.baseline,
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

    @property
    def _drafts(self) -> Path:
        return self._context.paths.state / "probes"

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Ask every planned case and save the report.

        Raises RigError UNREACHABLE where not even a plain question is answered: then nothing that
        a probe finds would be about the probe's matter.
        """
        run = await self._begin(progress)
        try:
            await self._ask_all(run, progress)
        except asyncio.CancelledError:
            # What was found is kept, and the job still ends as cancelled.
            if any(finding.evidence for finding in run.findings):
                progress.update(result=self._finish(run, "cancelled"))
            raise
        result = self._finish(run, "complete")
        progress.update(message=f"saved as {result['report']}")
        return result

    async def _begin(self, progress: JobProgress) -> _ProbeUnderWay:
        context, arguments = self._context, progress.record.arguments
        instance = await require_ready(context)
        client = ProbeClient(await context.plane.endpoint(instance), context.runtime.api_key())
        facts = await known_facts(context, client, instance)
        asker = ProbeAsker(client, instance.served_name, float(arguments["timeout_s"]), facts)
        progress.update(message="a plain question first")
        plain = barred_judgement(await asker.ask("a plain question", "Say hello.", 8))
        if plain is not None:
            raise RigError(
                "UNREACHABLE",
                f"not even a plain question is answered ({plain.detail})",
                f"verify_model_health(), then {logs_call(context)}",
            )
        return _ProbeUnderWay(
            job_id=progress.record.id,
            planned=planned_probes(arguments["cases"]),
            frame=await probe_frame(context, instance, client.base_url),
            asker=asker,
            baseline=str(arguments["baseline"]),
            begun=time.monotonic(),
            findings=[],
        )

    async def _ask_all(self, run: _ProbeUnderWay, progress: JobProgress) -> None:
        total = len(run.planned)
        for number, case in enumerate(run.planned):
            title = f"{case.title} ({number + 1} of {total})"
            progress.update(
                phase=case.group,
                message=title,
                percent=round(100 * number / total, 1),
                result=found_so_far(run.findings),
            )

            def tell(what: str, title: str = title) -> None:
                progress.update(message=title if title.startswith(what) else f"{title}: {what}")

            run.asker.tell = tell
            run.findings.append(await self._found(run, case))
            draft = run.report("killed", "the probe was killed before its turn")
            write_json(self._draft(run.job_id), draft.model_dump(mode="json", exclude_none=True))
        if run.baseline:
            run.findings.append(self._compared(run))

    async def _found(self, run: _ProbeUnderWay, case: ProbeCase) -> ProbeFinding:
        """Ask one case. A cancelled one leaves its evidence, untested, before it is given up."""
        asker, begun = run.asker, time.monotonic()
        asker.exchanges = []
        try:
            judged = await case.run(asker)
        except asyncio.CancelledError:
            run.findings.append(
                ProbeFinding(
                    case=case.name,
                    group=case.group,
                    verdict="untested",
                    detail="the probe was cancelled in the middle of it",
                    evidence=asker.exchanges,
                )
            )
            raise
        return ProbeFinding(
            case=case.name,
            group=case.group,
            verdict=judged.verdict,
            detail=judged.detail[:1900],
            seconds=round(time.monotonic() - begun, 3),
            evidence=asker.exchanges,
        )

    def _compared(self, run: _ProbeUnderWay) -> ProbeFinding:
        """The greedy answers against those of the baseline."""
        try:
            now = run.report("complete", "-")
            verdict, detail = compared_greedy(now, self.store.read(run.baseline))
            if not run.asker.greedy:
                verdict, detail = ("untested", "this run has no greedy answers to compare")
        except RigError as error:
            verdict, detail = "untested", error.what
        return ProbeFinding(
            case=GREEDY_BASELINE_CASE, group="determinism", verdict=verdict, detail=detail[:1900]
        )

    def _finish(self, run: _ProbeUnderWay, state: str) -> dict[str, Any]:
        """Save the report and forget the draft; returns the job's result."""
        report = run.report(state, f"the probe was {state} before its turn")
        return self._saved(report, self._draft(run.job_id))

    def _saved(self, report: ProbeReport, draft: Path) -> dict[str, Any]:
        private = private_setting_values(self._context.settings)
        saved = self.store.save(report, private)
        draft.unlink(missing_ok=True)
        self._context.journal.append("probe_saved", report=saved.name)
        return {
            **found_so_far(saved.report.findings),
            "report": saved.name,
            "report_file": str(saved.files[-1]),
        }

    def salvage(self) -> list[str]:
        """Save what killed jobs had found; returns one sentence for each."""
        notes = []
        for draft in sorted(self._drafts.glob(f"{PROBE_JOB}-*.json")):
            if not self._is_over(draft.stem):
                continue
            try:
                report = ProbeReport.model_validate(read_json(draft) or {})
                name = self._saved(report, draft)["report"]
                notes.append(f"the killed probe {draft.stem} was saved as {name}")
            except ValidationError:
                draft.unlink(missing_ok=True)
                notes.append(f"the killed probe {draft.stem} left nothing usable")
            except RigError as error:
                notes.append(f"the killed probe {draft.stem} could not be saved: {error.what}")
        return notes

    def _is_over(self, job_id: str) -> bool:
        try:
            return self._context.jobs.read(job_id).finished
        except RigError:
            return True

    def _draft(self, job_id: str) -> Path:
        return private_folder(self._drafts) / f"{job_id}.json"


def found_so_far(findings: Sequence[ProbeFinding]) -> dict[str, Any]:
    """A job's result: the table, each case's verdict, and how often each verdict was given."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "table": probe_table(list(findings)),
        "verdicts": {finding.case: finding.verdict for finding in findings},
        "counts": {verdict: counts[verdict] for verdict in PROBE_VERDICTS if counts[verdict]},
    }
