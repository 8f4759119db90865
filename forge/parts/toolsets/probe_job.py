"""The probe job: case after case, a draft on disk after each, a report at the end.

Whatever is cancelled or killed, what was found until then is kept; what was not asked is untested.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan
from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.boundaries.probe_store import ProbeStore
from forge.parts.boundaries.report_store import benchmarks_folders
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.state import json_object, private_folder, read_json, write_json
from forge.parts.knowledge.models import checkpoint_for_repo
from forge.parts.knowledge.probe_report import (
    PROBE_VERDICTS,
    ProbeFinding,
    ProbeGroup,
    ProbeReport,
    ProbeRunFacts,
    compared_greedy,
    probe_table,
)
from forge.parts.planes.plane import Instance
from forge.parts.toolsets.benchmark_frame import benchmark_frame
from forge.parts.toolsets.probe_asking import ProbeAsker, ProbeFacts, barred
from forge.parts.toolsets.probe_cases import (
    GREEDY_BASELINE_CASE,
    ProbeCase,
    planned_probes,
)
from forge.parts.toolsets.probe_greedy import GREEDY_PROMPTS, GREEDY_SET, GREEDY_TOKENS
from forge.parts.toolsets.reports import private_setting_values
from forge.parts.toolsets.serving import require_ready
from forge.parts.toolsets.toolset import RigContext

PROBE_JOB = "probe"
_LIMIT_KEYS = (
    "max_model_len",
    "context_length",
    "max_context_length",
    "context_window",
)
_SIGHT_KEYS = ("modalities", "input_modalities", "capabilities")
_SIGHT_WORDS = {"image", "vision", "multimodal"}
# Settings that say nothing about what is served.
_SETTINGS_BESIDE = ("rig_", "mcp_", "port", "query_timeout", "hf_token")


@dataclass
class _Run:
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
            if run.findings:
                progress.update(result=self._finish(run, "cancelled"))
            raise
        return self._finish(run, "complete")

    async def _begin(self, progress: JobProgress) -> _Run:
        context, arguments = self._context, progress.record.arguments
        instance = await require_ready(context)
        client = ProbeClient(await context.plane.endpoint(instance))
        listed = await _listed_model(client, instance)
        facts = _known_facts(context, instance, listed)
        asker = ProbeAsker(client, instance.served_name, float(arguments["timeout_s"]), facts)
        progress.update(message="a plain question first")
        plain = barred(await asker.ask("a plain question", "Say hello.", 8))
        if plain is not None:
            raise RigError(
                "UNREACHABLE",
                f"not even a plain question is answered ({plain.detail})",
                "verify_model_health(), then get_server_logs()",
            )
        return _Run(
            job_id=progress.record.id,
            planned=planned_probes(arguments["cases"]),
            frame=await probe_frame(context, instance, client.base_url),
            asker=asker,
            baseline=str(arguments["baseline"]),
            begun=time.monotonic(),
            findings=[],
        )

    async def _ask_all(self, run: _Run, progress: JobProgress) -> None:
        for number, case in enumerate(run.planned):
            progress.update(
                phase=case.group,
                message=f"{case.title} ({number + 1} of {len(run.planned)})",
                percent=round(100 * number / len(run.planned), 1),
                result=found_so_far(run.findings),
            )
            run.findings.append(await self._found(run, case))
            draft = run.report("killed", "the probe was killed before its turn")
            write_json(
                self._draft(run.job_id),
                draft.model_dump(mode="json", exclude_none=True),
            )
        if run.baseline:
            run.findings.append(self._compared(run))

    async def _found(self, run: _Run, case: ProbeCase) -> ProbeFinding:
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

    def _compared(self, run: _Run) -> ProbeFinding:
        """The greedy answers against those of the baseline."""
        try:
            now = run.report("complete", "-")
            verdict, detail = compared_greedy(now, self.store.read(run.baseline))
            if not run.asker.greedy:
                verdict, detail = (
                    "untested",
                    "this run has no greedy answers to compare",
                )
        except RigError as error:
            verdict, detail = "untested", error.what
        return ProbeFinding(
            case=GREEDY_BASELINE_CASE,
            group="determinism",
            verdict=verdict,
            detail=detail[:1900],
        )

    def _finish(self, run: _Run, state: str) -> dict[str, Any]:
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
            except (RigError, ValidationError) as error:
                draft.unlink(missing_ok=True)
                notes.append(f"the killed probe {draft.stem} left nothing usable: {error}"[:300])
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


async def probe_frame(context: RigContext, instance: Instance, base_url: str) -> dict[str, Any]:
    """Run, subject, hardware and engine of a probe report: those of a benchmark of this server."""
    load = LoadCellPlan(
        concurrency=1,
        input_tokens=1,
        output_tokens=GREEDY_TOKENS,
        requests=len(GREEDY_PROMPTS),
        seconds=1,
    )
    plan = LoadPlan(base_url=base_url, model=instance.served_name, cells=[load])
    frame = await benchmark_frame(context, instance, plan)
    run = {k: v for k, v in frame["run"].items() if k in ProbeRunFacts.model_fields}
    return {
        "run": run,
        "subject": frame["subject"],
        "hardware": frame["hardware"],
        "engine": frame["engine"],
        "settings": _served_settings(context),
    }


def _served_settings(context: RigContext) -> dict[str, str]:
    """The settings that say how the model is served; of a folder its name alone."""
    settings = context.settings
    private = set(private_setting_values(settings))
    found = {}
    for name, value in settings.model_dump(mode="json", exclude_none=True).items():
        text = str(value)
        if not name.startswith(_SETTINGS_BESIDE) and text not in private:
            found[name.upper()] = (PurePosixPath(text).name if text[:1] == "/" else text)[:120]
    return found


async def _listed_model(client: ProbeClient, instance: Instance) -> dict[str, Any]:
    """What the server's model list says of the served model; empty where it says nothing."""
    try:
        listed = (await client.get_json("/v1/models")).get("data")
    except RigError:
        return {}
    entries = [item for item in listed if isinstance(item, dict)] if type(listed) is list else []
    own = [item for item in entries if item.get("id") == instance.served_name]
    return (own or (entries if len(entries) == 1 else [{}]))[0]


def _known_facts(context: RigContext, instance: Instance, listed: dict[str, Any]) -> ProbeFacts:
    """Limit and sight: the server's own word first, then the rig's settings and files."""
    facts = ProbeFacts()
    for key in _LIMIT_KEYS:
        if type(listed.get(key)) is int and listed[key] > 0:
            facts.context_limit, facts.limit_source = listed[key], f"the server's {key}"
            break
    else:
        limit = getattr(context.settings, "max_model_len", None)
        if type(limit) is int and limit > 0:
            facts.context_limit, facts.limit_source = limit, "MAX_MODEL_LEN"
    facts.vision, facts.vision_source = _claimed_sight(context, instance, listed)
    return facts


def _claimed_sight(
    context: RigContext, instance: Instance, listed: dict[str, Any]
) -> tuple[bool | None, str]:
    """Whether the model claims to see, and who says so; None where nobody says anything."""
    for key in _SIGHT_KEYS:
        words = listed.get(key)
        if isinstance(words, list):
            sees = bool(_SIGHT_WORDS & {str(word).lower() for word in words})
            # A list of abilities may leave out what it does not know of; one of inputs does not.
            if sees or "modalities" in key:
                return sees, f"the server's {key}"
    try:
        local = context.runtime.local_model(instance.model)
        config = None if local is None else json_object((local.folder / "config.json").read_bytes())
    except (RigError, OSError):
        config = None
    if config is not None:
        return bool(config.get("vision_config")), "its config.json"
    try:
        checkpoint_for_repo(instance.model)
    except ValueError:
        return None, "nobody says"
    return True, "every Gemma 4 release has it"
