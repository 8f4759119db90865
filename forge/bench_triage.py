"""How well and how fast the failure bank reads logs: `make bench-triage`.

Over the cases that the tests use, in three forms each: share with the right kind, with the deciding
line quoted, with the words that an answer needs; false alarms on healthy logs; milliseconds per
megabyte. `--cases FILE` adds entries of one's own, a JSON object a line with text, kind and must.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.parts.boundaries.log_triage import triage_log
from forge.parts.knowledge.failures import failure_bank
from forge.parts.knowledge.log_answer import NO_FAILURE
from forge.parts.toolsets.diagnosis import matched_outcome
from tests.failure_forms import (
    FORMS,
    FailureCase,
    all_cases,
    in_form,
    ordinary_lines,
    read_cases,
)

AIM_MB_PER_S = 20.0
_MEASURED_LINES = 300_000  # about 25 MB of ordinary log
_HEALTHY = "healthy"


@dataclass
class TriageTally:
    """Counts over one set of cases in one form."""

    cases: int = 0
    kind: int = 0
    line: int = 0
    must: int = 0
    false_alarms: int = 0


def given_cases(path: Path) -> list[FailureCase]:
    """Entries of a file, a JSON object a line: text, kind, must. Their deciding line is unknown."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        must = tuple(str(word) for word in entry["must"])
        found.append(FailureCase("given", str(entry["kind"]), must, str(entry["text"]), ""))
    return found


def judged(case: FailureCase, form: str, tally: TriageTally) -> str:
    """Count `case` in `form`; returns what was wrong, empty where nothing was."""
    answer = triage_log(in_form(case.text, form))
    tally.cases += 1
    if not answer.failures:
        kind, line, told = _HEALTHY, "", NO_FAILURE
    else:
        outcome = matched_outcome(answer, "")
        kind, line = outcome.kind, outcome.line
        told = json.dumps(outcome.model_dump(exclude={"also_seen"}), ensure_ascii=False)
    missing = [
        word for word in case.must if not any(w.lower() in told.lower() for w in word.split("|"))
    ]
    tally.kind += kind == case.kind
    tally.line += case.line in line and (bool(line) or case.kind == _HEALTHY)
    tally.must += not missing
    tally.false_alarms += case.kind == _HEALTHY and bool(answer.failures)
    faults = [f"got {kind}"] if kind != case.kind else []
    faults += [f"lacks {', '.join(missing)}"] if missing else []
    faults += ["quotes another line"] if case.line not in line else []
    return "; ".join(faults)


def measured_speed(runs: int = 3) -> tuple[float, float]:
    """(MB, best seconds) for a log of ordinary lines with a failure at its end."""
    ordinary = "\n".join(ordinary_lines(_MEASURED_LINES))
    data = f"{ordinary}\n{all_cases()[0].text}\n".encode()
    best = float("inf")
    for _ in range(runs):
        begun = time.perf_counter()
        if not triage_log(data).failures:
            raise RuntimeError("the failure at the end of the measured log was not found")
        best = min(best, time.perf_counter() - begun)
    return len(data) / 1e6, best


def run_triage(sets: dict[str, Sequence[FailureCase]]) -> tuple[dict[str, Any], list[str]]:
    """The figures of every set and form, and what was wrong, a line each."""
    figures: dict[str, Any] = {}
    wrong = []
    for name, cases in sets.items():
        for form in FORMS:
            tally = TriageTally()
            for case in cases:
                if case.kind == _HEALTHY and form == "nested":
                    continue  # under tracebacks a log is healthy no more
                if fault := judged(case, form, tally):
                    wrong.append(f"{name}, {form}: {case.name}: {fault}")
            figures[f"{name} {form}"] = {
                "cases": tally.cases,
                "kind": tally.kind,
                "line": tally.line,
                "must": tally.must,
                "false_alarms": tally.false_alarms,
            }
    return figures, wrong


def main() -> int:
    """Print the table for people, end with one line of JSON. Status 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="make bench-triage", description=__doc__)
    parser.add_argument("--cases", type=Path, help="further entries, a JSON object a line")
    arguments = parser.parse_args()
    sets: dict[str, Sequence[FailureCase]] = {
        "own": all_cases(),
        _HEALTHY: read_cases(_HEALTHY),
    }
    if arguments.cases is not None:
        sets["given"] = given_cases(arguments.cases)
    figures, wrong = run_triage(sets)
    megabytes, seconds = measured_speed()
    print(f"{len(failure_bank().signatures)} signatures")
    print(f"{'':18}{'cases':>8}{'kind':>8}{'line':>8}{'must':>8}{'false alarms':>14}")
    for name, row in figures.items():
        shares = [f"{100 * row[k] / (row['cases'] or 1):.1f}%" for k in ("kind", "line", "must")]
        cells = "".join(f"{share:>8}" for share in shares)
        print(f"{name:18}{row['cases']:8}{cells}{row['false_alarms']:14}")
    rate = megabytes / seconds
    print(
        f"{1000 * seconds / megabytes:.1f} ms/MB, {rate:.0f} MB/s over {megabytes:.0f} MB "
        f"(aim: {AIM_MB_PER_S:.0f} MB/s)"
    )
    for line in wrong:
        print(f"WRONG {line}")
    summary = {
        "bench": "triage",
        "signatures": len(failure_bank().signatures),
        "results": figures,
        "wrong": len(wrong),
        "ms_per_mb": round(1000 * seconds / megabytes, 2),
        "mb_per_s": round(rate, 1),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
