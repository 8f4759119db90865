"""Everything that leaves the rig passes here: secrets out, control characters out, bounded.

Knows the shapes of secrets and the values in this process's environment; knows no tool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TEXT_LIMIT = 32_000  # characters of one result; a client's own limit is about 25,000 tokens

# Shapes of credentials that may stand in logs. Sources: the providers' own token formats. One
# expression each: with its fixed beginning it is searched for ten times faster than as a branch.
_SECRET_SHAPES = (
    re.compile(r"hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"),  # not hf_transfer or hf_overrides
    re.compile(r"ya29\.[A-Za-z0-9_.\-]{8,}"),
    re.compile(r"AKIA[A-Z0-9]{12,}"),
    re.compile(r"ASIA[A-Z0-9]{12,}"),
    re.compile(r"dop_v1_[a-f0-9]{16,}"),
    re.compile(r"sk-(?<![A-Za-z0-9]sk-)[A-Za-z0-9_\-]{16,}"),
    re.compile(r"AIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"eyJ[A-Za-z0-9_\-.]{20,}"),  # a JSON web token
    re.compile(r"bearer\s+[A-Za-z0-9._~+/\-]{8,}=*", re.I),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
)
_ADDRESS_LOGIN = re.compile(r"://[^\s/@:]+:[^\s/@]+@")
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
# C0 and C1 but newline and tab, DEL, bidirectional and zero-width marks, lone surrogates, tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of environment variables whose names speak of secrets, longest first.

    Values under 8 characters are left out: they would black out ordinary words.
    """
    source = os.environ if environment is None else environment
    found = {v.strip() for k, v in source.items() if _SECRET_NAMES.search(k)}
    return tuple(sorted((v for v in found if len(v) >= 8), key=len, reverse=True))


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` with known secret values and credential shapes replaced by ``[redacted]``.

    `values` are those of `secret_values()`, where the caller has many texts and reads them once.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, "[redacted]")
    for shape in _SECRET_SHAPES:
        text = shape.sub("[redacted]", text)
    return _ADDRESS_LOGIN.sub("://[redacted]@", text)


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


def clean(text: str, limit: int = TEXT_LIMIT, values: Sequence[str] | None = None) -> str:
    """Redacted, printable and clipped: the form in which any text goes out."""
    # Clipped generously first, so that 30 MB of log never go through the expressions.
    return clip(redact(printable(clip(text, 8 * limit)), values), limit)


def clean_value(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """`clean` over every string (keys too) of a JSON value; other scalars pass through.

    Bounded in every direction: a list or mapping keeps limit/16 items, a quarter of that with each
    level down, but 10 at least; and what is nested more than 20 deep becomes a remark.
    """
    return _clean_value(value, limit, 0, secret_values())


def _clean_value(value: Any, limit: int, depth: int, values: Sequence[str]) -> Any:
    if isinstance(value, str):
        return clean(value, limit, values)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth > 20:
        return "[… nested too deep …]"
    room = max(10, limit >> (4 + 2 * depth))
    if isinstance(value, Mapping):
        pairs = _fewer(list(value.items()), room, lambda left: ("…", left))
        return {
            clean(str(k), 200, values): _clean_value(v, limit, depth + 1, values) for k, v in pairs
        }
    return [_clean_value(v, limit, depth + 1, values) for v in _fewer(list(value), room, str)]


def _fewer(items: list[Any], room: int, remark: Callable[[str], Any]) -> list[Any]:
    """At most `room` of `items`, a third from the head; among texts a remark tells the gap."""
    if len(items) <= room:
        return items
    head, tail = items[: room // 3], items[room // 3 - room :]
    texts = all(isinstance(i[-1] if isinstance(i, tuple) else i, str) for i in head)
    left_out = [remark(f"[… {len(items) - room} items left out …]")] if texts else []
    return [*head, *left_out, *tail]
