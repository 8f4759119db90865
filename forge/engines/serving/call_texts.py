"""The texts that a call may have, as terminals of llguidance's dialect of Lark: JSON Schema's
lengths, patterns and formats.

Knows no call and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Of a string's formats; regular expressions of RFC 3339 and RFC 9562, without calendars.
_CALL_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CALL_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_CALL_FORMATS: Mapping[str, str] = {
    "date": _CALL_DATE,
    "time": _CALL_TIME,
    "date-time": f"{_CALL_DATE}T{_CALL_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]{1,20}:[!#-;=?-\[\]_a-z~]+",
}


class CallGrammarRefused(Exception):
    """A tool's schema says what cannot be kept to; the message names the place and the keyword."""


def call_text(asks: Mapping[str, Any], place: str) -> str:
    """The body of Lark's terminal for the texts that a string's keywords `asks` allow.

    Raises CallGrammarRefused with `place` and the keyword.
    """
    least, most = (call_count(asks, name, place) for name in ("minLength", "maxLength"))
    check_call_bounds(least, most, place)
    parts = [] if least is None and most is None else [f"/(?s:.{call_times(least, most)})/"]
    if "pattern" in asks:
        parts.append(_call_pattern(asks["pattern"], place))
    if "format" in asks:
        if asks["format"] not in _CALL_FORMATS:
            known = ", ".join(_CALL_FORMATS)
            words = f"{place}: format {json.dumps(asks['format'])[:40]} is none of {known}"
            raise CallGrammarRefused(words)
        parts.append(f"/{_CALL_FORMATS[asks['format']]}/")
    return " & ".join(parts) or "/(?s:.*)/"


def call_count(asks: Mapping[str, Any], name: str, place: str) -> int | None:
    """The keyword `name`, a number of letters or items; None: not given. CallGrammarRefused."""
    value = asks.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise CallGrammarRefused(f"{place}: {name} must be a whole number")
    return value


def check_call_bounds(least: int | None, most: int | None, place: str) -> None:
    """Raises CallGrammarRefused where nothing is between both; None is no bound."""
    if most is not None and most < (least or 0):
        raise CallGrammarRefused(f"{place}: at least {least} and at most {most} cannot be")


def call_times(least: int | None, most: int | None) -> str:
    """Lark's and a pattern's "so many times"; None is no bound."""
    return f"{{{least or 0},{'' if most is None else most}}}"


def _call_pattern(pattern: Any, place: str) -> str:
    """Lark's terminal for texts in which `pattern` is found: JSON Schema's patterns are not held to
    the ends of a text unless they say so."""
    from llguidance import regex_to_lark

    if not isinstance(pattern, str):
        raise CallGrammarRefused(f"{place}: pattern must be a text")
    first = pattern.startswith("^")
    last = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[first : len(pattern) - last]
    outer = re.sub(r"\\.|\[(\\.|[^\]])*\]", "", inner)
    while (less := re.sub(r"\([^()]*\)", "", outer)) != outer:
        outer = less
    if (first or last) and "|" in outer:
        raise CallGrammarRefused(f"{place}: pattern {pattern[:60]!r}: put what ^ or $ is for in ()")
    whole = f"{'' if first else '(?s:.*)'}({inner}){'' if last else '(?s:.*)'}"
    return f"/{regex_to_lark(whole, 'dw')}/"
