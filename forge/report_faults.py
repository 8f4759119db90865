"""What is wrong with a report file in the tree; the roll-up and `make check` ask.

Rigs do not carry this: what a rig saves has gone through the schema and the gate already.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from forge.naming import RUNTIME_SLOTS
from forge.parts.boundaries.report_store import FOREIGN_ADDRESS, REPORT_LIMIT
from forge.parts.ground.redact import redact
from forge.parts.ground.schema_faults import schema_faults
from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.report_checks import implied_work, refusal_of_report
from forge.parts.knowledge.report_schema import BenchReport


def report_faults(path: Path) -> list[str]:
    """Everything that is wrong with a report file, in words; empty for a good one.

    Size, JSON, schema, name against run id, slots, plausibility, addresses and secrets, and the
    hash of each raw file that is there (raw files need not travel with their report).
    """
    try:
        if path.is_symlink() or path.stat().st_size > REPORT_LIMIT:
            return [f"is a link, or above {REPORT_LIMIT:,} bytes"]
        text = path.read_text(encoding="utf-8")
        report = BenchReport.model_validate_json(text)
    except (OSError, UnicodeDecodeError) as error:
        return [f"cannot be read: {error}"]
    except ValidationError as error:
        return schema_faults(error)
    faults = []
    if path.stem != report.run.id:
        faults.append(f"the file's name is not the run's id {report.run.id}")
    if redact(text) != text:
        faults.append("holds something of the shape of a secret")
    address = FOREIGN_ADDRESS.search(text)
    if address is not None:
        faults.append(f"holds an address ({address[0]})")
    faults += _record_faults(report)
    for raw in report.raw:
        faults += _raw_faults(path.parent.parent / raw.path, raw.path, raw.sha256)
    return faults


def _record_faults(report: BenchReport) -> list[str]:
    """What the schema cannot see: slots, evidence, and figures against the chip."""
    faults = []
    slot = HARDWARE_SLOTS.get(report.hardware.slot)
    if slot is None or slot.chip != report.hardware.chip:
        faults.append(f"hardware {report.hardware.slot}/{report.hardware.chip} is not in the table")
    if report.engine.name not in RUNTIME_SLOTS:
        faults.append(f"runtime {report.engine.name} is not permitted")
    if report.run.kind == "measured" and not report.raw:
        faults.append("is measured and names no raw data")
    refusal = refusal_of_report(report)
    if refusal:
        return [*faults, refusal]
    for cell in report.cells:
        implied = implied_work(report, cell)
        if report.run.kind == "measured" and implied is not None and implied.checks:
            faults.append(f"cell {cell.id} is ok and cannot be: {implied.checks[0]}")
        elif cell.implied != implied:
            faults.append(f"cell {cell.id}: the gate's figures in it are stale or missing")
    return faults


def _raw_faults(path: Path, name: str, sha256: str) -> list[str]:
    if path.is_symlink():
        return [f"raw data {name} is a link"]
    if not path.exists():
        return []
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return [] if found == sha256 else [f"raw data {name} has another hash"]
