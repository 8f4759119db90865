"""The reports toolset: list, show as text or plot, compare; and how a benchmark's report is saved.

Runs no benchmark; a figure that cannot be compared is said to be so, not ranked.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from forge.parts.boundaries.judge_program import JUDGE_PROGRAM, asked_judgement
from forge.parts.boundaries.report_store import (
    ReportStore,
    SavedReport,
    StoredReport,
    benchmarks_folders,
    checked_report_name,
)
from forge.parts.ground.errors import invalid_parameter
from forge.parts.ground.redact import clean
from forge.parts.ground.results import Outcome
from forge.parts.ground.settings import RigSettings
from forge.parts.knowledge.report_compare import (
    CompareQuestion,
    compared_reports,
    unusable_cell,
)
from forge.parts.knowledge.report_schema import BenchReport
from forge.parts.toolsets.caller import Picture
from forge.parts.toolsets.report_plots import plot_curves, plot_heatmap
from forge.parts.toolsets.report_text import (
    change_as_text,
    figure_text,
    report_as_text,
    report_caveats,
    report_subject_line,
)
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

# Settings whose values say whose machine it was; a report must not.
_PRIVATE_SETTINGS = re.compile(r"project|account|profile|instance|bucket|network|subnet|email|host")
_LEAST_PRIVATE = 4  # characters; shorter values would black out ordinary words

ReportName = Annotated[str, Field(max_length=120, description="A name that list_reports gave.")]
ReportView = Annotated[
    Literal["text", "curves", "heatmap"], Field(description="A table, or one of two pictures.")
]


class ReportLine(BaseModel):
    """One report in a list. best: its highest usable output rate, with the cell."""

    name: str
    about: str = ""
    kind: str = ""
    cells: str = ""
    best: str = ""
    caveats: list[str] = Field(default_factory=list)
    fault: str = ""


class ReportList(Outcome):
    """The reports of this rig, newest first."""

    reports: list[ReportLine]
    total: int


class ComparisonOutcome(Outcome):
    """Two reports side by side. Without `ranked` there are no changes, and `blocking` says why."""

    ranked: bool
    question: str
    blocking: list[str] = Field(default_factory=list, description="What forbids a ranking.")
    also_differs: list[str] = Field(default_factory=list)
    changes: list[str] = Field(default_factory=list, description="Second against first.")
    left_out: list[str] = Field(default_factory=list, description="Cells not compared, and why.")


class ReportsToolset(Toolset):
    """List, show, compare."""

    toolset_name = "reports"

    @rig_tool(title="List benchmark reports", effect="reads")
    async def list_reports(
        self,
        limit: Annotated[int, Field(ge=1, le=100, description="How many, newest first.")] = 20,
    ) -> ReportList:
        """The benchmark reports of this rig, newest first: what was measured on what, how many
        cells succeeded, the best usable rate, and what speaks against using it."""
        store = report_store(self.context)
        names = await asyncio.to_thread(store.names)
        found = await asyncio.to_thread(store.stored, names[:limit])
        return report_list(found, len(names))

    @rig_tool(title="Show a benchmark report", effect="reads", structured=False)
    async def show_report(self, name: ReportName, view: ReportView = "text") -> list[str | Picture]:
        """One report: as a table ('text'), as a plot of throughput and latency against concurrency
        ('curves'), or as a plot of throughput over concurrency and prompt length ('heatmap').
        Failed cells are shown as failed. Plots come as a PNG image and take some seconds."""
        checked_report_name("name", name)
        report = await asyncio.to_thread(report_store(self.context).read, name)
        if view == "text":
            return [clean(report_as_text(report))]
        draw = plot_curves if view == "curves" else plot_heatmap
        picture = await asyncio.to_thread(draw, report)
        text = "; ".join([report_subject_line(report), *report_caveats(report)])
        return [clean(text), Picture(picture)]

    @rig_tool(title="Compare two benchmark reports", effect="reads")
    async def compare_reports(
        self,
        first: ReportName,
        second: ReportName,
        question: Annotated[
            CompareQuestion,
            Field(description="What may differ: the build alone, the hardware, or the runtime."),
        ] = "build",
    ) -> ComparisonOutcome:
        """Compare two reports cell by cell, relative differences with the noise beside them. They
        are ranked only if workload, model, encoding and token counting agree, and the hardware and
        the runtime unless they are the question; otherwise the answer names what differs."""
        for parameter, value in (("first", first), ("second", second)):
            checked_report_name(parameter, value)
        if first == second:
            raise invalid_parameter("second", "is the same report as first")
        store = report_store(self.context)
        return comparison_outcome(store.read(first), store.read(second), question)


def report_store(context: RigContext) -> ReportStore:
    """The reports of the rig: in its state folder, and in its own folder in a checkout."""
    folders = benchmarks_folders(context.paths.state, context.server_file.parent)
    return ReportStore(folders, partial(asked_judgement, context.beside(JUDGE_PROGRAM)))


async def save_report(
    context: RigContext, report: BenchReport, raw: Path | None = None
) -> SavedReport:
    """Save a finished report under the first free name of its day; the answer has the final one.

    report: its run.id may be any repeat of the day, it is chosen anew here. raw: the requests as
    JSON lines, copied beside it with their hash. What the gate finds impossible becomes a failed
    cell. Raises RigError DENIED where it cannot be written, PARTIAL where it cannot be judged.
    """
    run = report.run.model_copy(update={"rig": report.run.rig or context.rig})
    engine = report.engine.model_copy(update={"server": report.engine.server or context.version})
    complete = report.model_copy(update={"run": run, "engine": engine})
    private = private_setting_values(context.settings)
    saved = await report_store(context).save(complete, raw, private)
    context.journal.append("report_saved", report=saved.name, cells=len(saved.report.cells))
    return saved


def private_setting_values(settings: RigSettings) -> list[str]:
    """The values that no report may hold: project, account, bucket and so on."""
    return [
        value
        for name, value in settings.model_dump(mode="json").items()
        if isinstance(value, str)
        and len(value) >= _LEAST_PRIVATE
        and _PRIVATE_SETTINGS.search(name)
        and value not in ("127.0.0.1", "localhost")
    ]


def report_list(found: list[StoredReport], total: int) -> ReportList:
    """The tool's answer from what was read."""
    lines = [
        ReportLine(name=item.name, fault=item.fault)
        if item.report is None
        else _report_line(item.report)
        for item in found
    ]
    if not lines:
        return ReportList(
            summary="There are no reports yet.",
            next_step="run a benchmark with save_result=true",
            reports=[],
            total=0,
        )
    return ReportList(
        summary=f"{len(lines)} of {total} reports, newest first.",
        next_step=f"show_report(name='{lines[0].name}')",
        reports=lines,
        total=total,
    )


def _report_line(report: BenchReport) -> ReportLine:
    usable = [cell for cell in report.cells if not unusable_cell(cell)]
    rated = [(c.metrics.output_tps, c.id) for c in usable if c.metrics and c.metrics.output_tps]
    rate, cell = max(rated, default=(0.0, ""))
    return ReportLine(
        name=report.run.id,
        about=report_subject_line(report),
        kind=report.run.kind,
        cells=f"{len(usable)} usable of {report.planned_cells} planned",
        best=f"{figure_text(rate)} output tokens/s at {cell}" if cell else "",
        caveats=report_caveats(report),
    )


def comparison_outcome(
    first: BenchReport, second: BenchReport, question: CompareQuestion
) -> ComparisonOutcome:
    """The tool's answer about two reports."""
    result = compared_reports(first, second, question)
    names = f"{first.run.id} and {second.run.id}"
    if result.blocking:
        summary = f"Not ranked: {names} differ in {'; '.join(result.blocking)}."
        step = "list_reports() for a pair that agrees"
    elif not result.changes:
        summary, step = f"{names} have no usable cell in common.", "list_reports()"
    else:
        cells = len({change.cell for change in result.changes})
        known = sum(change.noise is not None for change in result.changes)
        summary = f"{names} compared in {cells} cells, {known} figures with known noise."
        step = "" if known else "repeat both runs before believing a small difference"
    return ComparisonOutcome(
        summary=summary,
        next_step=step,
        ranked=bool(result.changes),
        question=question,
        blocking=list(result.blocking),
        also_differs=list(result.also_differs),
        changes=[change_as_text(change) for change in result.changes],
        left_out=list(result.left_out),
    )
