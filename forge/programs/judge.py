"""Says whether the figures of a benchmark report can be true of the chip that they are told of.

    python3 judge.py REPORT.json

The report gate: arithmetic over the house's tables of models and chips, from below only, so that no
honest figure is refused. Offline; of all packages it needs pydantic alone. Exit status: 0
plausible, 1 a cell cannot be true, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from pydantic import ValidationError

from forge.parts.ground.redact import printable, redact
from forge.parts.ground.schema_faults import schema_faults
from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.judge_answer import (
    JUDGE_BYTES,
    JudgeAnswer,
    JudgeQuestion,
    KnownSubject,
    SubjectQuestion,
)
from forge.parts.knowledge.report_checks import (
    implied_work,
    judged_report,
    peak_of_hardware,
    refusal_of_report,
    subject_of_model,
    work_of_subject,
)
from forge.parts.knowledge.report_schema import BenchReport


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="judge.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 plausible, 1 a cell cannot be true, 2 wrong usage.",
    )
    parser.add_argument("report", nargs="?", type=Path, help="a report's file")
    parser.add_argument(
        "--question",
        action="store_true",
        help="read a question as one JSON object from standard input, and answer in JSON",
    )
    arguments = parser.parse_args(argv)
    if arguments.question == (arguments.report is not None):
        parser.error("give a report's file, or --question")
    name = "standard input" if arguments.question else printable(str(arguments.report))[:300]
    try:
        if arguments.question:
            return _answered(_bounded(sys.stdin.buffer.read(JUDGE_BYTES + 1)))
        with arguments.report.open("rb") as file:
            report = BenchReport.model_validate_json(_bounded(file.read(JUDGE_BYTES + 1)))
    except ValidationError as error:
        kind = "question" if arguments.question else "report"
        faults = "; ".join(schema_faults(error)[:3])
        print(f"judge.py: {name} is no {kind}: {redact(printable(faults))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"judge.py: {name}: {error.strerror}", file=sys.stderr)
        return 2
    text, plausible = judgement_text(report)
    print(redact(printable(text)))
    return 0 if plausible else 1


def _bounded(data: bytes) -> bytes:
    if len(data) > JUDGE_BYTES:
        raise OSError(errno.EFBIG, f"above {JUDGE_BYTES:,} bytes")
    return data


def _answered(data: bytes) -> int:
    """Answer the question `data` on standard output, in UTF-8 whatever the locale is."""
    answer = judge_answer(JudgeQuestion.model_validate_json(data))
    sys.stdout.buffer.write(answer.model_dump_json(exclude_none=True).encode() + b"\n")
    return 0


def judge_answer(question: JudgeQuestion) -> JudgeAnswer:
    """What the tables and the gate say to `question`."""
    if question.report is not None:
        return JudgeAnswer(report=judged_report(question.report))
    assert question.subject is not None  # the question's own promise
    return JudgeAnswer(subject=_known_subject(question.subject))


def _known_subject(asked: SubjectQuestion) -> KnownSubject:
    slot = HARDWARE_SLOTS.get(asked.slot)
    subject = subject_of_model(
        asked.model,
        asked.encoding,
        asked.geometry,
        kv_dtype=asked.kv_dtype,
        max_model_len=asked.max_model_len,
    )
    return KnownSubject(subject=subject, chip=asked.slot if slot is None else slot.chip)


def judgement_text(report: BenchReport) -> tuple[str, bool]:
    """What the gate says of `report`, for people, and whether every cell of it can be true."""
    lines, bad, judged = [], 0, 0
    for cell in report.cells:
        implied = implied_work(report, cell)
        if implied is None:
            lines.append(f"  {cell.id:<24} {cell.status}: {cell.reason}")
            continue
        judged += 1
        bad += bool(implied.checks)
        shares = (("compute", implied.flops_share), ("bandwidth", implied.bytes_share))
        known = ", ".join(
            f"{share:.1%} of the {what}" for what, share in shares if share is not None
        )
        lines.append(f"  {cell.id:<24} {known or 'no share is known'}")
        lines += [f"    cannot be: {check}" for check in implied.checks]
    if refusal := refusal_of_report(report):
        verdict = f"no evidence: {refusal}"
    elif bad:
        verdict = f"{bad} of {judged} cells cannot be true; the others stand"
    elif judged:
        verdict = f"plausible: nothing speaks against the {judged} cells that have figures"
    else:
        verdict = "nothing to judge: no cell has figures"
    return "\n".join([*_told_of(report), *lines, verdict]), not bad


def _told_of(report: BenchReport) -> list[str]:
    """What the figures are told of, and what it can do at most."""
    subject, hardware = report.subject, report.hardware
    peak = peak_of_hardware(hardware, subject.encoding)
    known = [
        f"{value:,.0f} {unit}"
        for value, unit in ((peak.tflops, "TFLOP/s"), (peak.gbs, "GB/s"))
        if value
    ]
    lines = [
        f"{report.run.id}: {report.run.kind}, {subject.model} ({subject.encoding}) by"
        f" {report.engine.name} on {hardware.devices} x {hardware.chip}",
        f"peak: {', '.join(known) or 'unknown, so that no share can be told'}",
    ]
    if work_of_subject(subject) is None:
        lines.append("the model is in no table: its figures are held against each other alone")
    return lines


if __name__ == "__main__":
    sys.exit(main())
