"""From a load's results file to a report: what was measured, on what, and what is missing.

Reads the file of a run that ended, was cancelled or was killed alike; a torn last line harms
nothing. Knows no process.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.load_plan import LOAD_RESULTS_FILE, LoadPlan
from forge.parts.knowledge.report_schema import BenchCell, BenchReport, CellStatus


@dataclass
class LoadProgress:
    """What a results file says so far; `read` takes in what has been added since.

    cells: by number in the plan. current: the cell that runs, and since when it has had how many
    measured requests.
    """

    folder: Path
    cells: dict[int, BenchCell] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    current: int | None = None
    requests: int = 0
    loop: str = ""
    python: str = ""
    ignore_eos: bool | None = None
    connect_ms: float | None = None
    _offset: int = 0

    def read(self) -> LoadProgress:
        """Take in every whole line that was not read yet."""
        try:
            with (self.folder / LOAD_RESULTS_FILE).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            # Most lines are requests, long and of no use here but for their number.
            if line.startswith(b'{"event":"request"'):
                self.requests += b'"phase":"measured"' in line[:60]
                continue
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, ValidationError):
                continue
        return self

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "begin":
                self.loop, self.python = str(event["loop"]), str(event["python"])
            case "cell begins":
                self.current, self.requests = int(event["cell"]), 0
            case "cell":
                number = int(event["cell"])
                self.cells[number] = BenchCell.model_validate(event["result"])
                self.seconds[number] = float(event["seconds"])
                self.current = None
            case "end":
                self.ignore_eos, self.connect_ms = event["ignore_eos"], event["connect_ms"]

    def forecast(self, plan: LoadPlan) -> dict[str, Any]:
        """The job's message, percentage and seconds left, the latter from finished cells."""
        total, done = len(plan.cells), len(self.cells)
        if self.current is None:
            # The hundredth per cent is the report's.
            percent = min(99.0, 100 * done / total)
            return {"message": f"{done} of {total} cells done", "percent": percent}
        cell = plan.cells[self.current]
        within = min(0.99, self.requests / cell.requests)
        doing = f"{self.requests} requests done" if self.requests else "warming up"
        text = f"cell {self.current + 1} of {total} ({cell.cell_id}), {doing}"
        percent = min(99.0, round(100 * (done + within) / total, 1))
        changes: dict[str, Any] = {"message": text, "percent": percent}
        if self.seconds:
            typical = statistics.fmean(self.seconds.values())
            changes["remaining_s"] = round(typical * (total - done - within), 1)
        return changes


def merged_cells(plan: LoadPlan, found: LoadProgress, missing: str) -> list[BenchCell]:
    """One cell for each load of the plan: of repeats the middle one, with their variation.

    What was not measured is a cell too, with `missing` as its reason.
    """
    groups: dict[str, list[int]] = {}
    for number, cell in enumerate(plan.cells):
        groups.setdefault(cell.cell_id, []).append(number)
    merged = []
    for numbers in groups.values():
        tried = [found.cells[number] for number in numbers if number in found.cells]
        good = [cell for cell in tried if cell.status == "ok"]
        if good:
            merged.append(_middle_cell(good, tried))
        elif tried:
            merged.append(tried[-1])
        else:
            status: CellStatus = "interrupted" if found.current in numbers else "not_run"
            merged.append(plan.cells[numbers[0]].cell(status=status, reason=missing))
    return merged


def _middle_cell(good: list[BenchCell], tried: list[BenchCell]) -> BenchCell:
    """The cell with the median output rate; an untrustworthy one only if all are."""
    ordered = sorted([cell for cell in good if cell.trusted] or good, key=_output_rate)
    middle = ordered[(len(ordered) - 1) // 2]
    marks = list(middle.marks)
    if len(ordered) < len(tried):
        failed = [cell.reason for cell in tried if cell.status != "ok"]
        why = failed[0] if failed else "the client could not keep up"
        marks.append(f"{len(tried) - len(ordered)} of {len(tried)} repeats are left out: {why}")
    rates = [_output_rate(cell) for cell in ordered]
    mean = statistics.fmean(rates)
    cv = statistics.stdev(rates) / mean if len(rates) > 1 and mean else None
    return middle.model_copy(
        update={"repeats": len(ordered), "cv": cv, "marks": [mark[:2000] for mark in marks[-10:]]}
    )


def _output_rate(cell: BenchCell) -> float:
    return (cell.metrics.output_tps if cell.metrics is not None else None) or 0.0


def report_of_load(
    frame: dict[str, Any], plan: LoadPlan, found: LoadProgress, missing: str, seconds: float
) -> BenchReport:
    """The report of a load. frame: run, subject, hardware and engine, as `benchmark_frame` gave."""
    cells = merged_cells(plan, found, missing)
    workload = {
        **frame["workload"],
        "ignore_eos": found.ignore_eos,
        "rtt_ms": found.connect_ms,
    }
    notes = [
        *frame.get("notes", []),
        f"client: {found.loop or 'unknown'} loop, Python {found.python or 'unknown'}",
        "closed-loop rates are over the span in which all streams ran; latencies leave out the "
        "requests begun before it",
    ]
    return BenchReport.model_validate(
        {
            **frame,
            "run": {**frame["run"], "duration_s": round(seconds, 1)},
            "workload": workload,
            "token_source": "usage",
            "planned_cells": len(cells),
            "cells": [cell.model_dump() for cell in cells],
            "notes": notes,
        }
    )


def cell_lines(report: BenchReport) -> list[str]:
    """Each cell in one line, for a job's result: what was measured, or why not."""
    lines = []
    for cell in report.cells:
        m = cell.metrics
        if m is None or m.ttft_ms is None:
            lines.append(f"{cell.id}: {cell.status}: {cell.reason}")
            continue
        tpot = "-" if m.tpot_ms is None else f"{m.tpot_ms.median:.4g} ms"
        text = (
            f"{cell.id}: {m.output_tps or 0:.4g} output tokens/s, median ttft "
            f"{m.ttft_ms.median:.4g} ms, tpot {tpot}, {m.requests_completed}/{m.requests_sent} done"
        )
        trust = "" if cell.trusted else "UNTRUSTWORTHY (the client was the bottleneck)"
        short = "short sample" if cell.short_sample else ""
        lines.append("; ".join(part for part in (text, trust, short, *cell.marks) if part))
    return lines
