"""Runs triage.py, the failure bank's own program beside server.py, over a provider's refusal.

Whatever the text, the answer comes within bounds or not at all; knows no sweep and no provider.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.process import run_program
from forge.parts.knowledge.refusal_answer import REFUSAL_CHARACTERS, Refusal, RefusalReader

# The built program took 0.1 s, with both cores busy (2026-11-30). A request may live while this is
# waited for, so it is far below the time after which it is left.
_REFUSAL_PATIENCE_S = 20.0


async def asked_refusal(program: Path, text: str, error_class: ErrorClass | None = None) -> Refusal:
    """What `program` (triage.py) reads in a provider's text; its last 20,000 characters count.

    Raises RigError NOT_FOUND where the program is missing, TIMEOUT, or INTERNAL: nothing was read.
    """
    if not program.is_file():
        raise RigError(
            "NOT_FOUND", f"{program.name} is not beside server.py", "restore the rig's folder"
        )
    known = [] if error_class is None else ["--error-class", error_class]
    done = await run_program(
        # As a module, because Python keeps no bytecode of scripts.
        [sys.executable, "-m", program.stem, "--refusal", *known, "--json", "-"],
        folder=program.parent,
        timeout_s=_REFUSAL_PATIENCE_S,
        given=text[-REFUSAL_CHARACTERS:].encode("utf-8", "replace"),
    )
    try:
        return TypeAdapter(Refusal).validate_json(done.stdout)
    except ValidationError:
        said = done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
        raise RigError("INTERNAL", f"{program.name} gave no answer: {said}") from None


def refusal_reader(program: Path) -> RefusalReader:
    """What a sweep reads refusals with: `program` (triage.py), asked anew for each."""

    async def read(text: str, error_class: ErrorClass | None) -> Refusal:
        return await asked_refusal(program, text, error_class)

    return read
