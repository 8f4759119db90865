"""Closed grammars for every identifier that a tool takes. What does not match is refused by name.

Knows forms only: whether a thing of that name exists is somebody else's question.
"""

from __future__ import annotations

import re

from forge.parts.ground.errors import invalid_parameter

# What a string may be, by kind: the expression (always matched whole) and its wording for people.
_GRAMMARS: dict[str, tuple[re.Pattern[str], str]] = {
    "resource": (
        re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"),
        "1 to 63 lower-case letters, digits and dashes, a letter first",
    ),
    "zone": (
        re.compile(r"[a-z]{2,12}(?:-[a-z]{2,14}){1,2}-?[0-9]{1,2}-?[a-z]"),
        "a zone such as us-east5-b",
    ),
    "job": (
        re.compile(r"[a-z]{3,16}-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"),
        "a job's id as a tool gave it, such as serve-20260131-120000-1a2b3c",
    ),
    "token": (re.compile(r"[0-9a-f]{32}"), "the 32 characters that plan_destroy gave"),
    "model": (
        re.compile(
            r"embedded"
            r"|[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
            r"|(?:/[A-Za-z0-9._+@=][A-Za-z0-9 ._+@=-]{0,200}){1,20}"
        ),
        "'embedded', a Hugging Face id such as google/gemma-4-E2B-it, or an absolute folder",
    ),
}
_TEXT_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def checked_name(kind: str, parameter: str, value: str) -> str:
    """`value` if it is wholly of the grammar `kind`; else INVALID with the parameter's name."""
    pattern, wording = _GRAMMARS[kind]
    if len(value) > 4096 or ".." in value or not pattern.fullmatch(value):
        raise invalid_parameter(parameter, f"must be {wording}")
    return value


def checked_text(parameter: str, value: str, limit: int, *, empty_ok: bool = False) -> str:
    """Free text for a model: 1 to `limit` characters, no control characters but newline and tab.

    Free text is data: it never becomes part of an argument list, a path or a shell string.
    """
    if len(value) > limit:
        raise invalid_parameter(parameter, f"at most {limit} characters, this has {len(value)}")
    if not value.strip() and not (empty_ok and not value):
        raise invalid_parameter(parameter, "is empty")
    if _TEXT_FORBIDDEN.search(value):
        raise invalid_parameter(parameter, "holds control characters or broken Unicode")
    return value


def slug_of(name: str) -> str:
    """The published form of a rig's name: underscores become dashes (``q4_0`` -> ``q4-0``).

    Three clients refuse an underscore in a plugin's, extension's or skill's name.
    """
    return name.replace("_", "-")
