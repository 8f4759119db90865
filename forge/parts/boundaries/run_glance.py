"""The newest benchmark or probe of a folder in one line, without the schema of a whole report.

For a look in passing: it checks nothing, and a file that it cannot read is said to be so.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.redact import clean
from forge.parts.ground.state import json_object

_GLANCE_BYTES = 8_000_000  # of one file; a report of a whole grid stays below it
_GLANCE_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})-[a-z0-9][a-z0-9._-]{0,100}\.json", re.ASCII)


@dataclass(frozen=True)
class RunGlance:
    """A run by name and day, and what it found in one line."""

    name: str
    date: str
    line: str


def newest_run(folder: Path) -> RunGlance | None:
    """The newest run among the files of `folder`, named after NAMING.md; None where there is none.

    Newest is the latest day in the name, and of one day the file that was written last.
    """
    found: list[tuple[str, int, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                named = _GLANCE_NAME.fullmatch(entry.name)
                if named and entry.is_file(follow_symlinks=False):
                    changed = entry.stat(follow_symlinks=False).st_mtime_ns
                    found.append((named[1], changed, entry.name))
    except OSError:
        return None
    if not found:
        return None
    day, _, file = max(found)
    return RunGlance(file.removesuffix(".json"), day, _glance_line(folder / file))


def _glance_line(path: Path) -> str:
    fields = json_object(_small_file(path)) or {}
    try:
        subject = f"{fields['subject']['model']} ({fields['subject']['encoding']})"
        place = f"{fields['engine']['name']}, {fields['hardware']['slot']}"
        words = _probe_words(fields) if "findings" in fields else _bench_words(fields)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "the file cannot be read as a report"
    return clean(f"{subject}, {place}: {words}", 300)


def _small_file(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            state = os.fstat(file.fileno())
            whole = stat.S_ISREG(state.st_mode) and state.st_size <= _GLANCE_BYTES
            return file.read(_GLANCE_BYTES) if whole else b""
    except OSError:
        return b""


def _bench_words(fields: dict[str, Any]) -> str:
    """How many cells gave figures, and the best output rate among those that may be believed."""
    if fields["run"].get("retracted"):
        return "RETRACTED"
    cells = [cell for cell in fields["cells"] if _is_believed(cell)]
    rates = [(float(c["metrics"].get("output_tps") or 0.0), str(c["id"])) for c in cells]
    best, cell = max(rates, default=(0.0, ""))
    words = f"{len(cells)} of {int(fields['planned_cells'])} cells usable"
    return f"{words}, at best {best:.1f} output tokens/s at {cell}" if best else words


def _is_believed(cell: dict[str, Any]) -> bool:
    """Measured, by a client that kept up, and not beyond what the chip can do."""
    kept_up = (cell.get("client") or {}).get("trustworthy", True)
    return bool(
        cell["status"] == "ok" and kept_up and not (cell.get("implied") or {}).get("checks")
    )


def _probe_words(fields: dict[str, Any]) -> str:
    verdicts = Counter(str(finding["verdict"]) for finding in fields["findings"])
    state = str(fields["run"].get("state", "complete"))
    cut = "" if state == "complete" else f" ({state})"
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) + cut
