"""What gcloud left behind (status, output, error text) as a parsed answer.

Pure functions. Knows gcloud's JSON and its warnings, no command and no resource of a rig; what an
error text means is read in gcloud_refusals.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from forge.parts.boundaries.gcloud_refusals import (
    GCLOUD_TEXT_QUOTED,
    GCLOUD_TEXT_READ,
    gcloud_fate,
    gcloud_line,
    gcloud_refusal,
    usage_refusal,
)
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean, printable


@dataclass(frozen=True)
class GcloudAnswer:
    """A success. `value` is the parsed JSON, None where a change printed nothing.

    `warnings` are gcloud's own, each in one line. `unread` says what a list could not read though
    gcloud ended with success: with anything in it, nothing can be said to be absent. Compute Engine
    tells it; a Cloud TPU list over all zones (`-`) drops a zone without a word (gcloud 528, seen
    2026-11-30), so that only a list of each zone is a whole one.
    """

    value: Any
    warnings: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def things(self) -> list[dict[str, Any]]:
        """The value as a list of objects. Raises UNKNOWN where it is anything else, also null."""
        if isinstance(self.value, list) and all(isinstance(one, dict) for one in self.value):
            return self.value
        raise _unreadable("a list of objects was expected")

    def thing(self) -> dict[str, Any]:
        """The value as one object, also where a list holds just that. Raises UNKNOWN."""
        found = self.value
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, dict):
            return found
        raise _unreadable("one object was expected")


def field_text(thing: Any, *path: str | int) -> str:
    """The text at `path` in an answer; empty where any step is absent, null or of another kind."""
    found = _field_at(thing, path)
    return found if isinstance(found, str) else str(found) if type(found) in (int, float) else ""


def field_labels(thing: Any, *path: str | int) -> dict[str, str]:
    """The labels at `path`, those with a text for a value; empty where there are none."""
    found = _field_at(thing, path)
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _field_at(thing: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        if isinstance(thing, dict) and isinstance(step, str):
            thing = thing.get(step)
        elif isinstance(thing, list) and isinstance(step, int) and step < len(thing):
            thing = thing[step]
        else:
            return None
    return thing


def read_gcloud(
    returncode: int, stdout: str, stderr: str, *, change: bool, project: str, dropped: int = 0
) -> GcloudAnswer:
    """The answer of an ended gcloud. `change` is whether the command changes anything.

    `dropped` is how many bytes of its output were not kept. Raises RigError with the classes of
    `gcloud_refusal`; INVALID for a command that this gcloud does not know (status 2, nothing was
    sent); UNKNOWN where a success cannot be read, which is never an empty list.
    """
    if returncode == 2:
        raise usage_refusal(gcloud_line(stderr))
    if returncode < 0 or returncode > 128:
        how = f"gcloud ended by signal {abs(returncode) % 128} before it answered"
        raise gcloud_fate(how, change)
    if returncode:
        raise gcloud_refusal(stderr or stdout, change=change, project=project)
    warnings = _warnings_of(stderr)
    text = stdout.strip()
    if not text and change:
        return GcloudAnswer(None, warnings)
    if dropped:
        raise _unreadable(f"it is too large, {dropped} bytes of it were not kept")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _unreadable("it is not whole JSON") from None
    unread = tuple(one for one in warnings if "Some requests did not succeed" in one)
    for warning in unread:
        # A list that was refused ends with success and [], only this warning tells it.
        refusal = gcloud_refusal(warning, change=change, project=project)
        if refusal.error_class in ("DENIED", "AUTH", "INVALID"):
            raise refusal
    return GcloudAnswer(value, warnings, unread)


def _warnings_of(stderr: str) -> tuple[str, ...]:
    """gcloud's warnings, each with the lines that belong to it. A note is no warning."""
    kept = printable(stderr[:GCLOUD_TEXT_READ])
    parts = re.split(r"^(?=[A-Z]{4,}:)", kept, flags=re.M)
    lines = (clean(" ".join(part.split()), GCLOUD_TEXT_QUOTED) for part in parts)
    return tuple(line for line in lines if line.startswith("WARNING:"))


def _unreadable(why: str) -> RigError:
    return RigError(
        "UNKNOWN",
        f"gcloud ended with success, but its answer cannot be read: {why}",
        "read the state again; if it stays so, gcloud components update",
    )
