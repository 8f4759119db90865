"""benchmarks/ROLLUP.md and the report schema, from all reports in the tree: python3 -m forge.rollup

Best and typical figures per model, hardware and runtime, each with its report; imported figures
and those of older builds are marked. What the gate doubts is never a best figure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.bench_local import RESULTS_FILE, table_lines
from forge.parts.knowledge.report_compare import unusable_cell
from forge.parts.knowledge.report_schema import BenchCell, BenchReport
from forge.parts.toolsets.report_text import figure_text, report_caveats
from forge.report_faults import report_faults

_LOCAL_TABLE = re.compile(r"(<!-- built: bench-local -->\n).*?(<!-- end -->)", re.S)
ROLLUP_FILE = "benchmarks/ROLLUP.md"
SCHEMA_FILE = "benchmarks/report.schema.json"
# What a row calls typical: the cell nearest to this load, in factors of two.
TYPICAL_STREAMS, TYPICAL_PROMPT = 8, 1024


@dataclass(frozen=True)
class FoundReport:
    """A report in the tree. path is relative to the root; older_build: its server has changed."""

    path: str
    report: BenchReport
    older_build: bool


def report_paths(root: Path) -> list[Path]:
    """Every report file of the rigs and of benchmarks/imported, sorted."""
    found = [*root.glob("*/benchmarks/reports/*.json")]
    found += root.glob("benchmarks/imported/reports/*.json")
    return sorted(found)


def tree_faults(root: Path) -> list[str]:
    """What is wrong with the reports of a tree, as 'path: fault'; for `make check`.

    Each report's own faults; one run in two places; a superseded run that is not there; the roll-up
    and the schema file out of date.
    """
    faults = []
    homes: dict[str, str] = {}
    for path in report_paths(root):
        name = path.relative_to(root).as_posix()
        found = report_faults(path)
        faults += [f"{name}: {fault}" for fault in found]
        if path.stem in homes:
            faults.append(f"{name}: the same run lies in {homes[path.stem]}")
        homes[path.stem] = name
    if faults:
        return faults
    for found_report in read_tree(root):
        report = found_report.report
        if report.run.supersedes and report.run.supersedes not in homes:
            faults.append(f"{found_report.path}: supersedes {report.run.supersedes}: not there")
    for name, text in rollup_files(root).items():
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            faults.append(f"{name}: out of date, run make rollup")
    return faults


def read_tree(root: Path) -> list[FoundReport]:
    """The valid reports of a tree, by path; damaged ones are `tree_faults`' business."""
    found = []
    for path in report_paths(root):
        try:
            report = BenchReport.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValueError, OSError):
            continue
        older = report.run.kind == "measured" and not _is_current_build(report, path)
        found.append(FoundReport(path.relative_to(root).as_posix(), report, older))
    return found


def _is_current_build(report: BenchReport, path: Path) -> bool:
    """Whether the rig's server.py still has the hash that the report cites."""
    server = path.parent.parent.parent / "server.py"
    if not server.exists():
        return False
    digest = hashlib.sha256(server.read_bytes()).hexdigest()
    cited = report.engine.server.partition("+")[2]
    return bool(cited) and digest.startswith(cited)


def rollup_files(root: Path) -> dict[str, str]:
    """The text of each file that `make rollup` writes, by path. The same tree, the same text."""
    schema = BenchReport.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    files = {
        ROLLUP_FILE: rollup_text(read_tree(root)),
        SCHEMA_FILE: json.dumps(schema, indent=1) + "\n",
    }
    results, readme = root / RESULTS_FILE, root / "README.md"
    if results.exists() and readme.exists():
        table = "\n".join(local_table(json.loads(results.read_text(encoding="utf-8"))))
        text = readme.read_text(encoding="utf-8")
        files["README.md"] = _LOCAL_TABLE.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)
    return files


def local_table(results: Mapping[str, Any]) -> list[str]:
    """What `make bench-local` measured, as the README has it."""
    machine, load = results["machine"], results["workload"]
    rate = results["bandwidth_bytes_per_s"] / 1e9
    head = (
        f"{results['date']}, {machine['cores']} cores ({machine['system']}), which read"
        f" {rate:.1f} GB/s from memory; SmolLM2-135M-Instruct, prompts of {load['input']} tokens,"
        f" answers of {load['output']}; one run, ± is the spread of its repeats:"
    )
    return [head, "", *table_lines(results)]


def rollup_text(found: Sequence[FoundReport]) -> str:
    """ROLLUP.md: one row a model, encoding, hardware, runtime and kind; then every report."""
    superseded = {item.report.run.supersedes for item in found if item.report.run.supersedes}
    live = [
        item
        for item in found
        if not item.report.run.retracted and item.report.run.id not in superseded
    ]
    groups: dict[tuple[str, str, str, str, str], list[FoundReport]] = {}
    for item in live:
        report = item.report
        key = (
            report.subject.short,
            report.subject.encoding,
            report.hardware.slot,
            report.engine.name,
            report.run.kind,
        )
        groups.setdefault(key, []).append(item)
    lines = [
        "# Measured so far",
        "",
        "Written by `make rollup` from the reports in the tree; do not edit.",
        "",
        "Best is the highest output rate of all usable cells. Typical is the usable cell nearest to"
        f" {TYPICAL_STREAMS} streams of {TYPICAL_PROMPT:,} prompt tokens. A cell c8-i1024-o128 has"
        " 8 streams, 1,024 prompt tokens and 128 output tokens. Cells that failed, that the"
        " plausibility gate doubts, or whose client was the bottleneck, are left out. Rows are not"
        " a ranking: workloads and cells differ; `compare_reports` says what may be compared.",
        "",
        "*imported*: published by others, see the report's origin and corrections. *older build*:"
        " the rig's server has changed since.",
        "",
        "| model | weights | hardware | runtime | best tok/s | typical tok/s | TTFT ms | TPOT ms |"
        " $/M output at best | marks | report |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [_group_row(key, groups[key]) for key in sorted(groups)]
    lines += rows or ["| nothing yet | | | | | | | | | | |"]
    lines += ["", "## Reports", "", "| report | cells | usable | what speaks against it |"]
    lines += ["|---|---|---|---|"]
    for item in found:
        report = item.report
        usable = sum(not unusable_cell(cell) for cell in report.cells)
        words = [*report_caveats(report)]
        words += ["older build"] if item.older_build else []
        words += ["superseded"] if report.run.id in superseded else []
        doubted = [c.id for c in report.cells if c.implied is not None and c.implied.checks]
        words += [f"impossible: {', '.join(doubted)}"] if doubted else []
        against = _cell_text("; ".join(words))
        lines.append(f"| {_link(item)} | {report.planned_cells} | {usable} | {against} |")
    return "\n".join(lines) + "\n"


def _group_row(key: tuple[str, str, str, str, str], items: Sequence[FoundReport]) -> str:
    short, encoding, slot, runtime, kind = key
    pairs = [
        (item, cell)
        for item in items
        for cell in item.report.cells
        if not unusable_cell(cell) and cell.metrics and cell.metrics.output_tps
    ]
    head = f"| {short} | {encoding} | {slot} | {runtime}"
    if not pairs:
        all_links = ", ".join(_link(item) for item in items)
        return f"{head} | - | - | - | - | - | {kind}, no usable cell | {all_links} |"
    best_item, best = max(pairs, key=lambda pair: _output_rate(pair[1]))
    typical_item, typical = min(pairs, key=lambda pair: _distance(pair[1]))
    m = typical.metrics
    assert m is not None
    times = [
        figure_text((d.median if d.median is not None else d.mean) if d else None)
        for d in (m.ttft_ms, m.tpot_ms)
    ]
    price = best_item.report.price
    cost = None if price is None else price.usd_per_hour / 3600 / _output_rate(best) * 1e6
    marks = [kind] if kind != "measured" else []
    marks += ["older build"] if best_item.older_build or typical_item.older_build else []
    marks += ["single run"] if best.repeats == 1 else []
    marks += ["short sample"] if best.short_sample or typical.short_sample else []
    links = [_link(best_item)]
    links += [_link(typical_item)] if typical_item is not best_item else []
    return (
        f"{head} | {figure_text(_output_rate(best))} ({best.id})"
        f" | {figure_text(_output_rate(typical))} ({typical.id}) | {times[0]} | {times[1]}"
        f" | {figure_text(cost)} | {', '.join(marks)} | {', '.join(links)} |"
    )


def _output_rate(cell: BenchCell) -> float:
    return (cell.metrics.output_tps or 0.0) if cell.metrics else 0.0


def _distance(cell: BenchCell) -> float:
    """How far a cell is from the typical load, in doublings; open loops come after all others."""
    if cell.concurrency is None:
        return math.inf
    streams = abs(math.log2(cell.concurrency / TYPICAL_STREAMS))
    return streams + abs(math.log2(cell.input_tokens / TYPICAL_PROMPT))


def _link(item: FoundReport) -> str:
    path = item.path.removeprefix("benchmarks/") if item.path.startswith("benchmarks/") else ""
    return f"[{item.report.run.id}]({path or '../' + item.path})"


def _cell_text(text: str) -> str:
    """Text that stays within one cell of a markdown table."""
    return " ".join(text.replace("|", "/").split()) or "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Write what differs, or with --check only say so; 1 when something was stale."""
    parser = argparse.ArgumentParser(prog="python3 -m forge.rollup", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, name every fault")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    arguments = parser.parse_args(argv)
    if arguments.check:
        faults = tree_faults(arguments.root)
        print("\n".join(faults) or "the reports are in order")
        return 1 if faults else 0
    for name, text in rollup_files(arguments.root).items():
        path = arguments.root / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
