"""Where reports lie and how they are read and written: plain names, no links, nothing overwritten.

Knows no tool and no chip's peak; whoever opens a store says what judges the reports that go in.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.redact import clean, redact
from forge.parts.ground.schema_faults import schema_faults
from forge.parts.ground.state import write_private
from forge.parts.knowledge.report_schema import RUN_ID_PATTERN, BenchReport, run_id_of

REPORT_LIMIT = 8_000_000  # bytes; a grid of MOST_CELLS stays below it
_RUN_ID = re.compile(RUN_ID_PATTERN)
MOST_REPEATS = 999
# Four numbers that read as an address of another machine; loopback and "any" say nothing.
FOREIGN_ADDRESS = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.~…-])/(?:[^\s/:'\",]+/)+([^\s/:'\",]+)")


# Works out what can be true in a report: judge.py beside a server, the gate itself in the forge.
ReportJudge = Callable[[BenchReport], Awaitable[BenchReport]]


@dataclass(frozen=True)
class StoredReport:
    """A report's name and what it holds, or why it cannot be used."""

    name: str
    report: BenchReport | None
    fault: str = ""


@dataclass(frozen=True)
class SavedReport:
    """What `ReportStore.save` wrote: the run's id and the report's files, the first in the state
    folder."""

    name: str
    report: BenchReport
    files: tuple[Path, ...]


def checked_report_name(parameter: str, value: str) -> str:
    """`value` if it is wholly a run id after NAMING.md; else INVALID with the parameter's name."""
    if len(value) > 120 or ".." in value or not _RUN_ID.fullmatch(value):
        raise invalid_parameter(
            parameter, "must be a report's name such as 2026-08-06-gemma4-e2b-vllm-v5e1"
        )
    return value


class ReportStore:
    """The benchmarks folders of a rig: each has reports/ and runs/. New ones go into every folder,
    reading prefers the last (a checkout's copy may have been corrected since). `judge` is the gate:
    nothing is written that has not passed it."""

    def __init__(self, folders: Sequence[Path], judge: ReportJudge) -> None:
        self.folders = tuple(folders)
        self._judge = judge

    def names(self) -> list[str]:
        """The run ids that there are, newest first. Files of another form are left out."""
        found: set[str] = set()
        for folder in self.folders:
            try:
                entries = os.listdir(folder / "reports")
            except OSError:
                continue
            stems = (name[:-5] for name in entries if name.endswith(".json"))
            found |= {stem for stem in stems if _RUN_ID.fullmatch(stem)}
        return sorted(found, key=_by_day_and_repeat, reverse=True)

    def read(self, name: str) -> BenchReport:
        """The report of that run id.

        Raises RigError INVALID for a name outside the grammar, NOT_FOUND, or PARTIAL with the
        reason for a file that is no valid report.
        """
        checked_report_name("name", name)
        for folder in reversed(self.folders):
            text = read_beneath(folder / "reports", f"{name}.json")
            if text is None:
                continue
            try:
                report = BenchReport.model_validate_json(text)
            except ValidationError as error:
                faults = "; ".join(schema_faults(error)[:3])
                raise RigError("PARTIAL", f"{name} is no valid report: {faults}") from None
            if report.run.id != name:
                raise RigError("PARTIAL", f"{name} holds the run {report.run.id}")
            return report
        raise RigError("NOT_FOUND", f"there is no report {name}", "list_reports()")

    def stored(self, names: Sequence[str]) -> list[StoredReport]:
        """Each named report, or its fault: one damaged file does not hide the others."""
        found = []
        for name in names:
            try:
                found.append(StoredReport(name, self.read(name)))
            except RigError as error:
                found.append(StoredReport(name, None, error.what))
        return found

    async def save(
        self, report: BenchReport, raw: Path | None = None, private: Sequence[str] = ()
    ) -> SavedReport:
        """Write `report` under the first free repeat of its day, with a copy of its raw data.

        The gate judges it first. Secrets, addresses, absolute paths and the `private` values are
        taken out of every text. Raises RigError DENIED where a folder cannot be written, and
        PARTIAL with the raw data's place where nothing could judge it: then nothing is written.
        """
        judged = await self._judged(report, raw)
        for repeat in range(1, MOST_REPEATS + 1):
            name = run_id_of(
                report.run.date,
                report.subject.short,
                report.engine.name,
                report.hardware.slot,
                repeat,
            )
            if any(os.path.lexists(f / "reports" / f"{name}.json") for f in self.folders):
                continue
            fields = judged.model_dump(mode="json", exclude_none=True)
            fields["run"]["id"] = name
            private = [value for value in private if value not in name]
            raw_text = "" if raw is None else _scrubbed(_raw_text(raw), private)
            if raw is not None:
                fields["raw"] = [*fields["raw"], _raw_record(name, raw.suffix, raw_text)]
            final = BenchReport.model_validate(scrubbed_value(fields, private))
            text = report_as_json(final)
            files = []
            for number, folder in enumerate(self.folders):
                target = folder / "reports" / f"{name}.json"
                # The first folder decides: two jobs that end at once get two names.
                if not write_new_file(target, text) and number == 0:
                    break
                if raw is not None:
                    write_private(folder / final.raw[-1].path, raw_text)
                files.append(target)
            else:
                return SavedReport(name, final, tuple(files))
        raise RigError("EXISTS", f"{MOST_REPEATS} runs of this kind on one day")

    async def _judged(self, report: BenchReport, raw: Path | None) -> BenchReport:
        try:
            return await self._judge(report)
        except RigError as error:
            kept = "" if raw is None else f"; the raw data is kept in {raw}"
            why = f"no report was written, because nothing could judge it: {error.what}{kept}"
            raise RigError("PARTIAL", why, error.next_step) from error


def report_as_json(report: BenchReport) -> str:
    """The text of a report's file: the schema's order, what is unknown left out."""
    fields = report.model_dump(mode="json", exclude_none=True)
    return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"


def _by_day_and_repeat(name: str) -> tuple[str, str, int]:
    stem, _, repeat = name.partition("--r")
    return stem[:10], stem[10:], int(repeat or 1)


def read_beneath(folder: Path, name: str) -> str | None:
    """The text of `name` in `folder`, opened relative to it and following no link at either step;
    None where there is no such regular file."""
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, dir_fd=inside)
    except OSError:
        return None
    finally:
        os.close(inside)
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            return None
        data = file.read(REPORT_LIMIT + 1)
    if len(data) > REPORT_LIMIT:
        raise RigError("PARTIAL", f"{name} is above {REPORT_LIMIT:,} bytes")
    return data.decode("utf-8", "replace")


def write_new_file(target: Path, text: str) -> bool:
    """Write `target` in one step unless something of that name is there; then False."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    write_private(part, text)
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError as error:
        raise RigError("DENIED", f"{target} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return True


def _raw_text(raw: Path) -> str:
    try:
        return raw.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RigError("NOT_FOUND", f"the raw data {raw.name}: {error.strerror}") from error


def _raw_record(name: str, suffix: str, text: str) -> dict[str, Any]:
    data = text.encode()
    path = f"runs/{name}/requests{suffix if re.fullmatch(r'[.][a-z]{1,8}', suffix) else '.txt'}"
    return {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _scrubbed(text: str, private: Sequence[str]) -> str:
    for value in sorted(private, key=len, reverse=True):
        text = text.replace(value, "[private]")
    text = FOREIGN_ADDRESS.sub("[address]", redact(text))
    return _ABSOLUTE_PATH.sub(r"…/\1", text)


def scrubbed_value(value: Any, private: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _scrubbed(clean(value, 2000), private)
    if isinstance(value, dict):
        return {
            scrubbed_value(key, private): scrubbed_value(item, private)
            for key, item in value.items()
        }
    return [scrubbed_value(item, private) for item in value] if isinstance(value, list) else value


def benchmarks_folders(state: Path, rig_folder: Path) -> tuple[Path, ...]:
    """Where a rig's reports go: its state folder, and its own folder where that is a checkout.

    An installed plugin is a copy that the next update replaces, so nothing is kept in it.
    """
    folders = [state / "benchmarks"]
    if (rig_folder / ".git").exists() or (rig_folder.parent / ".git").exists():
        folders.append(rig_folder / "benchmarks")
    return tuple(folders)
