"""Predicted against reported, for every figure that the planner was ever held against.

`python3 -m forge.calibration` prints the table, the medians over the P rows, what fails and why,
and ends with one line of JSON. It fits nothing; its status is 1 when a median misses its aim.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge.calibration_rows import KV_ROWS, WEIGHT_ROWS, CalibrationRow
from forge.calibration_rows_speed import CONCURRENCY_ROWS, MONEY_ROWS, SINGLE_ROWS

CALIBRATION_GROUPS: Mapping[str, Sequence[CalibrationRow]] = {
    "weights": WEIGHT_ROWS,
    "KV": KV_ROWS,
    "single stream": SINGLE_ROWS,
    "concurrency": CONCURRENCY_ROWS,
    "money": MONEY_ROWS,
}
# Aims for the median absolute error over a group's P rows, in %. Money has no P row.
CALIBRATION_AIMS: Mapping[str, float] = {
    "weights": 1.0,
    "KV": 1.0,
    "single stream": 5.0,
    "concurrency": 10.0,
}


def error_percent(row: CalibrationRow) -> float:
    """How far the prediction is above the report, in % of the report."""
    return 100 * (row.predict() / row.reported - 1)


def kind_counts(rows: Sequence[CalibrationRow]) -> dict[str, int]:
    """Rows by kind, all five kinds named."""
    return {kind: sum(row.kind == kind for row in rows) for kind in "PFISX"}


def median_errors() -> dict[str, float]:
    """The median absolute error in % over the P rows, by group; groups without one are left out."""
    return {
        group: statistics.median(abs(error_percent(row)) for row in rows if row.kind == "P")
        for group, rows in CALIBRATION_GROUPS.items()
        if any(row.kind == "P" for row in rows)
    }


def calibration_text() -> str:
    """The table for people: every row, the medians, the failures with their reasons."""
    lines = ["P a priori or out of sample, F fitted, I identity, S source wrong, X model fails"]
    for group, rows in CALIBRATION_GROUPS.items():
        lines += ["", f"{group}", f"{'':4}{'predicted':>12}{'reported':>12}{'error':>9}  figure"]
        for row in rows:
            predicted = row.predict()
            lines.append(
                f"{row.kind:4}{predicted:>12.5g}{row.reported:>12.5g}"
                f"{error_percent(row):>+8.1f}%  {row.figure}"
                f" [{row.origin.source}, {row.origin.date}]"
            )
    lines += ["", "median absolute error over the P rows"]
    for group, median in median_errors().items():
        rows = [row for row in CALIBRATION_GROUPS[group] if row.kind == "P"]
        within = [sum(abs(error_percent(row)) <= limit for row in rows) for limit in (5, 15)]
        lines.append(
            f"  {group}: {median:.1f} % over {len(rows)} rows (aim {CALIBRATION_AIMS[group]:g} %);"
            f" {within[0]} within 5 %, {within[1]} within 15 %"
        )
    for kind, title in (("X", "where the model fails"), ("S", "where the source is wrong")):
        lines += ["", title]
        for rows in CALIBRATION_GROUPS.values():
            lines += [f"  {row.figure}: {row.note}" for row in rows if row.kind == kind]
    return "\n".join(lines)


def calibration_summary() -> dict[str, object]:
    """What the last line holds: medians, counts, machine and versions. No path, no host name."""
    everything = [row for rows in CALIBRATION_GROUPS.values() for row in rows]
    digest = hashlib.sha256()
    folder = Path(__file__).parent / "parts" / "knowledge"
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return {
        "target": "calibrate",
        "median_error_percent": {
            group: round(value, 3) for group, value in median_errors().items()
        },
        "aims_percent": dict(CALIBRATION_AIMS),
        "rows": len(everything),
        "kinds": kind_counts(everything),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "knowledge": digest.hexdigest()[:12],
        },
    }


def main() -> int:
    """Print the table and the line of JSON; 0 when every aim is met."""
    print(calibration_text())
    print(json.dumps(calibration_summary()))
    medians = median_errors()
    return int(any(medians[group] > aim for group, aim in CALIBRATION_AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
