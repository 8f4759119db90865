"""Where probe reports lie: beside the benchmark reports, under the same rules of writing.

Knows no verdict; what a report is, the knowledge section says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from forge.parts.boundaries.report_store import (
    MOST_REPEATS,
    checked_report_name,
    read_beneath,
    scrubbed_value,
    write_new_file,
)
from forge.parts.ground.errors import RigError
from forge.parts.ground.schema_faults import schema_faults
from forge.parts.knowledge.probe_report import ProbeReport
from forge.parts.knowledge.report_schema import run_id_of

PROBES_FOLDER = "probes"


@dataclass(frozen=True)
class SavedProbe:
    """What `ProbeStore.save` wrote: the run's id and its files, the first in the state folder."""

    name: str
    report: ProbeReport
    files: tuple[Path, ...]


class ProbeStore:
    """The probes/ folders below a rig's benchmarks folders. New reports go into every one of them;
    reading prefers the last."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folder / PROBES_FOLDER for folder in folders)

    def read(self, name: str, parameter: str = "name") -> ProbeReport:
        """The probe report of that run id.

        Raises RigError INVALID for a name outside the grammar, NOT_FOUND, or PARTIAL with the
        reason for a file that is no valid report.
        """
        checked_report_name(parameter, name)
        for folder in reversed(self.folders):
            text = read_beneath(folder, f"{name}.json")
            if text is None:
                continue
            try:
                report = ProbeReport.model_validate_json(text)
            except ValidationError as error:
                faults = "; ".join(schema_faults(error)[:3])
                raise RigError("PARTIAL", f"{name} is no valid probe report: {faults}") from None
            if report.run.id != name:
                raise RigError("PARTIAL", f"{name} holds the run {report.run.id}")
            return report
        raise RigError("NOT_FOUND", f"there is no probe report {name}", "probe_capabilities()")

    def save(self, report: ProbeReport, private: Sequence[str] = ()) -> SavedProbe:
        """Write `report` under the first free repeat of its day.

        Secrets, addresses, absolute paths and the `private` values are taken out of every text.
        Raises RigError DENIED where a folder cannot be written.
        """
        run = report.run
        for repeat in range(1, MOST_REPEATS + 1):
            name = run_id_of(
                run.date, report.subject.short, report.engine.name, report.hardware.slot, repeat
            )
            if any(os.path.lexists(folder / f"{name}.json") for folder in self.folders):
                continue
            fields = report.model_dump(mode="json", exclude_none=True)
            fields["run"]["id"] = name
            hidden = [value for value in private if value not in name]
            final = ProbeReport.model_validate(scrubbed_value(fields, hidden))
            text = probe_as_json(final)
            files = []
            for number, folder in enumerate(self.folders):
                target = folder / f"{name}.json"
                # The first folder decides: two jobs that end at once get two names.
                if not write_new_file(target, text) and number == 0:
                    break
                files.append(target)
            else:
                return SavedProbe(name, final, tuple(files))
        raise RigError("EXISTS", f"{MOST_REPEATS} probes of this kind on one day")


def probe_as_json(report: ProbeReport) -> str:
    """The text of a report's file: the schema's order, what is unknown left out."""
    fields = report.model_dump(mode="json", exclude_none=True)
    return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"
