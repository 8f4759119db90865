"""Runs judge.py, the report gate's own program beside server.py, over one question.

The tables of models and chips stand there alone; knows no tool and no folder of reports.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program
from forge.parts.knowledge.judge_answer import (
    JUDGE_BYTES,
    JudgeAnswer,
    JudgeQuestion,
    KnownSubject,
    SubjectQuestion,
)
from forge.parts.knowledge.report_schema import BenchReport

JUDGE_PROGRAM = "judge.py"
_JUDGE_PATIENCE_S = 20.0  # the longest report takes a few seconds, a usual one that of a Python


async def asked_subject(program: Path, question: SubjectQuestion) -> KnownSubject:
    """What `program` (judge.py) knows of what is served.

    Raises RigError NOT_FOUND where the program is missing, TIMEOUT, or INTERNAL.
    """
    answer, said = await _asked_judge(program, JudgeQuestion(subject=question))
    if answer.subject is None:
        raise _no_judgement(program, said)
    return answer.subject


async def asked_judgement(program: Path, report: BenchReport) -> BenchReport:
    """`report` as `program` (judge.py) judges it: `implied` anew in every cell, and of a measured
    report each cell that cannot be true as a failed one.

    Raises RigError NOT_FOUND where the program is missing, TIMEOUT, or INTERNAL, also where what
    came back is another report: then nothing was judged.
    """
    answer, said = await _asked_judge(program, JudgeQuestion(report=report))
    judged = answer.report
    if judged is None:
        raise _no_judgement(program, said)
    same_cells = [cell.id for cell in judged.cells] == [cell.id for cell in report.cells]
    if not same_cells or judged.model_copy(update={"cells": report.cells}) != report:
        raise _no_judgement(program, "it gave another report back")
    return judged


def _no_judgement(program: Path, said: str) -> RigError:
    return RigError("INTERNAL", f"{program.name} gave no answer: {said}")


async def _asked_judge(program: Path, question: JudgeQuestion) -> tuple[JudgeAnswer, str]:
    """The program's answer, empty where it gave none, and what it said beside it."""
    if not program.is_file():
        raise RigError(
            "NOT_FOUND", f"{program.name} is not beside server.py", "restore the rig's folder"
        )
    done = await run_program(
        # As a module, because Python keeps no bytecode of scripts.
        [sys.executable, "-m", program.stem, "--question"],
        folder=program.parent,
        timeout_s=_JUDGE_PATIENCE_S,
        given=question.model_dump_json(exclude_none=True).encode(),
        output_limit=JUDGE_BYTES,
    )
    try:
        answer = JudgeAnswer.model_validate_json(done.stdout)
    except ValidationError:
        answer = JudgeAnswer()
    return answer, done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
