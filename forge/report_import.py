"""Results of other load generators as reports, kind `imported`: python3 -m forge.report_import

Takes files of `vllm bench serve --save-result`, guidellm and aiperf; what is no figure is dropped,
what the gate finds impossible is marked, and a run that is mostly impossible is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.report_store import ReportStore, SavedReport
from forge.parts.boundaries.report_vllm import ImportFacts, without_texts
from forge.parts.ground.errors import RigError
from forge.parts.ground.schema_faults import schema_faults
from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.report_checks import (
    judged_report,
    refusal_of_report,
    subject_of_model,
)
from forge.parts.knowledge.report_schema import BenchReport, run_id_of
from forge.report_adapters import ADAPTERS

_FILE_LIMIT = 200_000_000  # bytes; a detailed file of a long sweep


def import_report(
    tool: str, documents: Sequence[dict[str, Any]], facts: ImportFacts
) -> BenchReport:
    """The report of one or more result files of one run.

    Raises ValueError that says which fact is missing, what of a file was not understood, or that
    two files hold the same cell.
    """
    results = [ADAPTERS[tool](document, facts) for document in documents]
    first = results[0]
    date = facts.date or first.date
    if not date:
        raise ValueError("the files do not say the day of the measurement: give --date")
    subject = subject_of_model(facts.model, facts.encoding)
    cells = [cell for result in results for cell in result.cells]
    fields = {
        "run": {
            "id": run_id_of(date, subject.short, facts.engine, facts.hardware),
            "date": date,
            "kind": "imported",
            "origin": facts.origin,
        },
        "subject": subject.model_dump(),
        "hardware": {
            "slot": facts.hardware,
            "chip": HARDWARE_SLOTS[facts.hardware].chip,
            "devices": HARDWARE_SLOTS[facts.hardware].devices,
        },
        "engine": {"name": facts.engine, "version": facts.engine_version},
        "workload": {
            "name": f"{first.tool} default",
            "tool": first.tool,
            "tool_version": first.tool_version,
            "api": first.api,
            "prompts": first.prompts,
        },
        "token_source": facts.token_source or first.token_source,
        "planned_cells": len(cells),
        "cells": [cell.model_dump() for cell in cells],
        "notes": [first.note],
    }
    try:
        return BenchReport.model_validate(fields)
    except ValidationError as error:
        raise ValueError("; ".join(schema_faults(error))) from None


def save_import(tool: str, files: Sequence[Path], facts: ImportFacts, folder: Path) -> SavedReport:
    """Read, judge and write to `folder`/reports, the files' figures beside it in `folder`/runs.

    Raises ValueError for what cannot be read, and for a report that the gate refuses whole.
    """
    documents = [document for path in files for document in _documents(path)]
    report = import_report(tool, documents, facts)
    refusal = refusal_of_report(report)
    if refusal:
        raise ValueError(f"refused: {refusal}")
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "source.jsonl"
        lines = [json.dumps(without_texts(document)) for document in documents]
        raw.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return asyncio.run(ReportStore([folder], judged_here).save(report, raw))


async def judged_here(report: BenchReport) -> BenchReport:
    """The gate as a store takes it, in this process: the forge needs no program for that."""
    return judged_report(report)


def _documents(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one a line as --append-result writes them."""
    if path.stat().st_size > _FILE_LIMIT:
        raise ValueError(f"{path.name} is above {_FILE_LIMIT:,} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        found = [json.loads(text)]
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not found or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{path.name} holds no JSON object")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 after writing a report, 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python3 -m forge.report_import", description=__doc__)
    parser.add_argument("tool", choices=sorted(ADAPTERS))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", required=True, help="repository id of the weights")
    parser.add_argument("--encoding", required=True, help="of the weights: bf16, w4a16, ...")
    parser.add_argument("--hardware", required=True, choices=sorted(HARDWARE_SLOTS))
    parser.add_argument("--engine", required=True, help="the runtime slot: vllm, jax, ...")
    parser.add_argument("--origin", required=True, help="where the file was published")
    parser.add_argument("--date", default="", help="YYYY-MM-DD, where the file has none")
    parser.add_argument("--engine-version", default="")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--input-tokens", type=int)
    parser.add_argument("--output-tokens", type=int)
    parser.add_argument("--token-source", default="", help="usage, client-tokenizer, chunks, ...")
    parser.add_argument("--into", type=Path, default=Path("benchmarks/imported"))
    given = vars(parser.parse_args(argv))
    tool, files, into = given.pop("tool"), given.pop("files"), given.pop("into")
    try:
        saved = save_import(tool, files, ImportFacts(**given), into)
    except (ValueError, OSError, RigError) as error:
        print(f"not imported: {error}", file=sys.stderr)
        return 1
    for path in saved.files:
        print(f"wrote {path}")
    for cell in saved.report.cells:
        if cell.implied is not None and cell.implied.checks:
            print(f"marked {cell.id}: {cell.implied.checks[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
