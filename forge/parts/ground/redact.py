"""Everything that leaves the rig passes here: secrets out, control characters out, bounded.

Knows the shapes of secrets and the values in this process's environment; knows no tool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

TEXT_LIMIT = 32_000  # characters of one result; a client's own limit is about 25,000 tokens

# Shapes of credentials that may stand in logs. Sources: the providers' own token formats.
_SECRET_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{8,}"
    r"|ya29\.[A-Za-z0-9_.\-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|\bdop_v1_[a-f0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_\-]{16,}"
    r"|(?i:bearer)\s+[A-Za-z0-9._~+/\-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
# C0 and C1 but newline and tab, DEL, bidirectional and zero-width marks, lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of environment variables whose names speak of secrets, longest first.

    Values under 8 characters are left out: they would black out ordinary words.
    """
    source = os.environ if environment is None else environment
    found = {v for k, v in source.items() if _SECRET_NAMES.search(k) and len(v) >= 8}
    return tuple(sorted(found, key=len, reverse=True))


def redact(text: str) -> str:
    """`text` with known secret values and credential shapes replaced by ``[redacted]``."""
    for value in secret_values():
        text = text.replace(value, "[redacted]")
    return _SECRET_SHAPES.sub("[redacted]", text)


def printable(text: str) -> str:
    """`text` without terminal sequences, control and bidirectional characters and surrogates."""
    return _UNPRINTABLE.sub("", _ANSI_SEQUENCE.sub("", text.replace("\r\n", "\n")))


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` in at most about `limit` characters: a third from its head, the rest from its tail.

    What was cut is named, because the end of a log is where the error stands and its beginning is
    where the version stands.
    """
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """Redacted, printable and clipped: the form in which any text goes out."""
    # Clipped generously first, so that 30 MB of log never go through the expressions.
    return clip(redact(printable(clip(text, 8 * limit))), limit)


def clean_value(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """`clean` over every string (keys too) of a JSON value; other scalars pass through."""
    if isinstance(value, str):
        return clean(value, limit)
    if isinstance(value, Mapping):
        return {clean(str(k), 200): clean_value(v, limit) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean_value(v, limit) for v in value]
    return value
