"""What differs between two reports, and which of their cells may be ranked against each other.

Knows no files; whether a figure is plausible is the gate's verdict, stored in the cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from forge.parts.knowledge.report_schema import BenchCell, BenchReport, Distribution

# What a comparison is about: exactly that may differ, everything else must be the same.
CompareQuestion = Literal["build", "hardware", "runtime"]
NOISE_WIDTH = 2.0  # standard deviations; beyond them a difference is taken for one


@dataclass(frozen=True, slots=True)
class CellChange:
    """One figure of one cell in both reports. change: second over first, less 1.

    noise: 2 x root of the summed squared variations; None where a cell ran once only.
    """

    cell: str
    figure: str
    first: float
    second: float
    change: float
    noise: float | None

    @property
    def verdict(self) -> str:
        """'better', 'worse' or 'same within the noise'; 'noise unknown' after single runs."""
        if self.noise is None:
            return "noise unknown"
        if abs(self.change) <= self.noise:
            return "same within the noise"
        rises = self.figure == "output_tps" or self.figure == "request_rps"
        return "better" if (self.change > 0) == rises else "worse"


@dataclass(frozen=True, slots=True)
class ReportComparison:
    """blocking: why nothing may be ranked. also_differs: what a reader must keep in mind.

    changes: the cells that can be compared; left_out: the other cells, with the reason.
    """

    blocking: tuple[str, ...]
    also_differs: tuple[str, ...]
    changes: tuple[CellChange, ...]
    left_out: tuple[str, ...]


def comparability_key(report: BenchReport, cell: BenchCell) -> tuple[str, str, str, str, str]:
    """Workload, cell, model, encoding, token counting: cells are ranked only if these agree."""
    subject = report.subject
    return (report.workload.name, cell.id, subject.model, subject.encoding, report.token_source)


def unusable_cell(cell: BenchCell) -> str:
    """Why a cell's figures may not be used for a ranking, or ''."""
    if cell.status != "ok":
        return f"{cell.status}: {cell.reason}"
    if cell.client is not None and not cell.client.trustworthy:
        return f"client not trustworthy ({'; '.join(cell.client.faults()) or 'marked'})"
    if cell.implied is not None and cell.implied.checks:
        return f"implausible: {cell.implied.checks[0]}"
    return ""


def compared_reports(
    first: BenchReport, second: BenchReport, question: CompareQuestion
) -> ReportComparison:
    """Compare two reports under one question. With anything blocking there are no changes."""
    blocking, differs = _differences(first, second, question)
    if blocking:
        return ReportComparison(tuple(blocking), tuple(differs), (), ())
    theirs = {cell.id: cell for cell in second.cells}
    changes: list[CellChange] = []
    left_out: list[str] = []
    for cell in first.cells:
        other = theirs.pop(cell.id, None)
        if other is None:
            left_out.append(f"{cell.id}: only in {first.run.id}")
            continue
        reasons = [
            f"{report.run.id} {why}"
            for report, one in ((first, cell), (second, other))
            if (why := unusable_cell(one))
        ]
        if reasons:
            left_out.append(f"{cell.id}: {'; '.join(reasons)}")
        else:
            changes += _cell_changes(cell, other)
    left_out += [f"{name}: only in {second.run.id}" for name in theirs]
    return ReportComparison((), tuple(differs), tuple(changes), tuple(left_out))


def _differences(
    first: BenchReport, second: BenchReport, question: CompareQuestion
) -> tuple[list[str], list[str]]:
    """(what forbids a ranking, what else differs), each as 'what: first against second'."""
    one, two = first, second
    must: list[tuple[str, object, object]] = [
        ("workload", one.workload.name, two.workload.name),
        ("prompts", one.workload.prompts, two.workload.prompts),
        ("API", one.workload.api, two.workload.api),
        ("model", one.subject.model, two.subject.model),
        ("encoding", one.subject.encoding, two.subject.encoding),
        ("token counting", one.token_source, two.token_source),
    ]
    may: list[tuple[str, object, object]] = [
        ("load generator", one.workload.tool, two.workload.tool),
        ("its version", one.workload.tool_version, two.workload.tool_version),
        ("ignore_eos", one.workload.ignore_eos, two.workload.ignore_eos),
        ("temperature", one.workload.temperature, two.workload.temperature),
        ("vantage", one.workload.vantage, two.workload.vantage),
        ("KV type", one.subject.kv_dtype.value, two.subject.kv_dtype.value),
        ("maximum length", one.subject.max_model_len, two.subject.max_model_len),
        ("engine version", one.engine.version, two.engine.version),
        ("server build", one.engine.server, two.engine.server),
        ("image", one.engine.image_digest, two.engine.image_digest),
        ("kind", one.run.kind, two.run.kind),
    ]
    hardware = (
        "hardware",
        f"{one.hardware.devices} x {one.hardware.chip}",
        f"{two.hardware.devices} x {two.hardware.chip}",
    )
    (may if question == "hardware" else must).append(hardware)
    runtime = ("runtime", one.engine.name, two.engine.name)
    (may if question == "runtime" else must).append(runtime)
    blocking = [f"{what}: {a} against {b}" for what, a, b in must if a != b]
    if one.token_source == two.token_source == "unknown":
        blocking.append("token counting: unknown in both, so it is not known to be the same")
    for report in (one, two):
        if report.run.retracted:
            blocking.append(f"{report.run.id} is retracted: {report.run.retracted}")
    return blocking, [f"{what}: {a or '-'} against {b or '-'}" for what, a, b in may if a != b]


def _cell_changes(first: BenchCell, second: BenchCell) -> list[CellChange]:
    assert first.metrics is not None and second.metrics is not None
    one, two = first.metrics, second.metrics
    noise = None
    if first.cv is not None and second.cv is not None:
        noise = NOISE_WIDTH * math.hypot(first.cv, second.cv)
    pairs = [
        ("output_tps", one.output_tps, two.output_tps, noise),
        ("request_rps", one.request_rps, two.request_rps, noise),
        # The stored variation is that of the rate; it says nothing about the latencies.
        ("ttft_ms", _middle(one.ttft_ms), _middle(two.ttft_ms), None),
        ("tpot_ms", _middle(one.tpot_ms), _middle(two.tpot_ms), None),
    ]
    changes = [
        CellChange(first.id, figure, a, b, b / a - 1, spread)
        for figure, a, b, spread in pairs
        if a and b is not None
    ]
    rates = {change.figure for change in changes}
    return [c for c in changes if c.figure != "request_rps" or "output_tps" not in rates]


def _middle(sample: Distribution | None) -> float | None:
    """The median, or the mean where a source gives no other."""
    if sample is None:
        return None
    return sample.median if sample.median is not None else sample.mean
