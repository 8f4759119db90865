"""A report as text for people and for models: one table, the doubtful cells named under it."""

from __future__ import annotations

from forge.parts.knowledge.report_compare import CellChange, unusable_cell
from forge.parts.knowledge.report_schema import BenchCell, BenchReport, Distribution

_MOST_ROWS = 80  # of the text form; a larger grid is to be looked at as a heat map
_MOST_DOUBTS = 12


def report_subject_line(report: BenchReport) -> str:
    """Model, hardware, runtime and day in one line: the title of a plot and of a table."""
    engine = f"{report.engine.name} {report.engine.version}".strip()
    chips = f"{report.hardware.devices} x " if report.hardware.devices > 1 else ""
    return (
        f"{report.subject.model} ({report.subject.encoding}) on {chips}{report.hardware.slot}, "
        f"{engine}, {report.run.date}"
    )


def report_caveats(report: BenchReport) -> list[str]:
    """What a reader must know before using any figure, one sentence each."""
    run = report.run
    found = []
    if run.retracted:
        found.append(f"RETRACTED: {run.retracted}")
    if run.kind != "measured":
        found.append(f"{run.kind}, from {run.origin}")
    found += [f"correction: {text}" for text in run.corrections]
    if report.token_source != "usage":
        found.append(f"tokens counted from: {report.token_source}")
    if len(report.cells) < report.planned_cells:
        found.append(f"cut short: {len(report.cells)} of {report.planned_cells} cells")
    short = sum(cell.short_sample for cell in report.cells if cell.status == "ok")
    if short:
        found.append(f"{short} cells had fewer requests than the rule asks")
    if report.workload.prompts == "repeated":
        found.append("prompts were repeated: a prefix cache may have answered them")
    return found


def report_as_text(report: BenchReport) -> str:
    """The whole report as markdown, bounded; failed cells with their reason, never as zeros."""
    work, kv = report.workload, report.subject.kv_dtype
    lines = [
        f"# {report.run.id}",
        "",
        report_subject_line(report),
        f"Load: {work.name} by {work.tool} {work.tool_version}".rstrip()
        + f", prompts {work.prompts}, client at {work.vantage}; KV {kv.value} ({kv.evidence})",
        *(f"Note: {text}" for text in report_caveats(report)),
        "",
        "| cell | out tok/s | req/s | TTFT ms | TPOT ms | done | cv | $/M out | state |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(report, cell) for cell in report.cells[:_MOST_ROWS]]
    hidden = len(report.cells) - _MOST_ROWS
    if hidden > 0:
        lines.append(f"\n{hidden} more cells: show_report(view='heatmap') has them all.")
    doubts = [f"- {cell.id}: {why}" for cell in report.cells if (why := unusable_cell(cell))]
    if doubts:
        lines += ["", "Not to be used:", *doubts[:_MOST_DOUBTS]]
        if len(doubts) > _MOST_DOUBTS:
            lines.append(f"- and {len(doubts) - _MOST_DOUBTS} more")
    lines += ["", *(f"{text}" for text in report.notes)]
    lines += ["TTFT and TPOT are medians (mean where marked ~). '-' is not measured."]
    return "\n".join(lines)


def _row(report: BenchReport, cell: BenchCell) -> str:
    m = cell.metrics
    if m is None:
        return f"| {cell.id} | - | - | - | - | - | - | - | {cell.status} |"
    cost = None
    if report.price is not None and m.output_tps:
        cost = report.price.usd_per_hour / 3600 / m.output_tps * 1e6
    done = f"{m.requests_completed}/{m.requests_sent}" if m.requests_sent else "-"
    state = "ok" if not unusable_cell(cell) else "not to be used"
    state += ", short sample" if cell.short_sample else ""
    cv = "-" if cell.cv is None else f"{cell.cv:.1%}"
    figures = [figure_text(value) for value in (m.output_tps, m.request_rps)]
    times = [_middle_text(value) for value in (m.ttft_ms, m.tpot_ms)]
    price = "-" if cost is None else f"{cost:.3g}"
    return f"| {cell.id} | {' | '.join(figures + times)} | {done} | {cv} | {price} | {state} |"


def _middle_text(sample: Distribution | None) -> str:
    if sample is None:
        return "-"
    if sample.median is not None:
        return figure_text(sample.median)
    return f"~{figure_text(sample.mean)}"


def figure_text(value: float | None) -> str:
    """A figure to three significant digits, with thousands apart; '-' for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def change_as_text(change: CellChange) -> str:
    """One line of a comparison: both figures, the relative difference, the noise beside it."""
    noise = "noise unknown" if change.noise is None else f"noise ±{change.noise:.1%}"
    verdict = "" if change.noise is None else f": {change.verdict}"
    return (
        f"{change.cell} {change.figure}: {figure_text(change.first)} → "
        f"{figure_text(change.second)} ({change.change:+.1%}, {noise}){verdict}"
    )
