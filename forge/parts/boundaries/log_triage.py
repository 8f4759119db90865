"""A log's bytes to its answer: what triage.py does, in one function.

Knows the failure bank and how logs are cut into rows; knows no file and no server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge.parts.boundaries.log_text import log_lines
from forge.parts.ground.redact import redact
from forge.parts.knowledge.failure_bank import LogLines, quoted_line, unexplained_rows
from forge.parts.knowledge.failures import failure_bank
from forge.parts.knowledge.log_answer import LogAnswer

_EXCERPT_CHARACTERS = 6_000  # about 2,000 tokens: small models are served with 4,096
_ROWS_BESIDE = 3  # rows of context on each side of an error row
_UNEXPLAINED_SHOWN = 5
# One word without blanks, as long as that, is a key or an encoded file, not a message.
_BLOB_ROW = re.compile(r"\S{60,}")


def triage_log(data: bytes | str) -> LogAnswer:
    """What `data` says: known failures, else the errors that none of them explains."""
    log = log_lines(data)
    matches = failure_bank().diagnose(log)
    if matches:
        return LogAnswer(len(log.rows), tuple(match.answer for match in matches))
    rows = unexplained_rows(log)
    shown = tuple(quoted_line(log.text(row)) for row in rows[-_UNEXPLAINED_SHOWN:])
    return LogAnswer(len(log.rows), (), shown, len(rows), log_excerpt(log, rows) if rows else "")


def log_excerpt(log: LogLines, rows: Sequence[int]) -> str:
    """The error rows with three rows around each, the last ones first kept, at most 6,000
    characters; redacted, and without rows that are one long word."""
    wanted = sorted({n for r in rows for n in range(r - _ROWS_BESIDE, r + _ROWS_BESIDE + 1)})
    texts = [log.text(n) for n in wanted if 0 <= n < len(log.rows)]
    kept: list[str] = []
    size = 0
    for text in reversed(redact("\n".join(texts)).split("\n")):
        line = text.strip()[:600]
        if not line or _BLOB_ROW.fullmatch(line):
            continue
        size += len(line) + 1
        if size > _EXCERPT_CHARACTERS:
            break
        kept.append(line)
    return "\n".join(reversed(kept))
