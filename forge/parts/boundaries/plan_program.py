"""Runs plan.py, the planner's own program beside server.py, over one question.

The tables of models, chips, engines and prices stand there alone; knows no tool and no rig.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program
from forge.parts.knowledge.plan_answer import PlanAnswer, PlanQuestion

PLAN_PROGRAM = "plan.py"
_PLAN_PATIENCE_S = 20.0  # arithmetic of a few milliseconds after the start of a Python
_PLAN_BYTES = 1_000_000


async def asked_plan(program: Path, question: PlanQuestion) -> PlanAnswer:
    """What `program` (plan.py) answers to `question`, a refused deployment included.

    Raises the RigError that the question's own fault is (INVALID), and NOT_FOUND where the program
    is missing, TIMEOUT, or INTERNAL: then nothing was planned.
    """
    if not program.is_file():
        raise RigError(
            "NOT_FOUND", f"{program.name} is not beside server.py", "restore the rig's folder"
        )
    done = await run_program(
        # As a module, because Python keeps no bytecode of scripts.
        [sys.executable, "-m", program.stem, "--question"],
        folder=program.parent,
        timeout_s=_PLAN_PATIENCE_S,
        given=json.dumps(dataclasses.asdict(question)).encode(),
        output_limit=_PLAN_BYTES,
    )
    try:
        answer = TypeAdapter(PlanAnswer).validate_json(done.stdout)
    except ValidationError:
        answer = PlanAnswer()
    if answer.fault is not None:
        fault = answer.fault
        raise RigError(fault.error_class, fault.what, fault.next_step)
    if answer.plan is None:
        said = done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
        raise RigError("INTERNAL", f"{program.name} gave no answer: {said}")
    return answer
