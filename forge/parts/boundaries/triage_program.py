"""Runs triage.py, the failure bank's own program beside server.py, over one log.

In a process of its own: a hostile log of any size can be timed out and costs this server nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program
from forge.parts.knowledge.log_answer import LOG_BYTES, LogAnswer

_TRIAGE_PATIENCE_S = 45.0  # under every client's limit for one call; 32 MB take about a second
_ANSWER_BYTES = 4_000_000


async def triaged_log(program: Path, data: bytes | str) -> LogAnswer:
    """What `program` (triage.py) answers about the log `data`, of any bytes, 32 MB at most.

    Raises RigError NOT_FOUND where the program is missing, TIMEOUT, or INTERNAL.
    """
    if not program.is_file():
        raise RigError(
            "NOT_FOUND", f"{program.name} is not beside server.py", "restore the rig's folder"
        )
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    if len(raw) > LOG_BYTES:
        gap = f"\n[… {len(raw) - LOG_BYTES} bytes left out …]\n".encode()
        raw = raw[: LOG_BYTES // 4] + gap + raw[LOG_BYTES // 4 - LOG_BYTES :]
    done = await run_program(
        # As a module, because Python keeps no bytecode of scripts.
        [sys.executable, "-m", program.stem, "--json", "-"],
        folder=program.parent,
        timeout_s=_TRIAGE_PATIENCE_S,
        given=raw,
        output_limit=_ANSWER_BYTES,
    )
    try:
        return TypeAdapter(LogAnswer).validate_json(done.stdout)
    except ValidationError:
        said = done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
        raise RigError("INTERNAL", f"{program.name} gave no answer: {said}") from None
