"""The one exception that a tool raises on purpose, and the closed set of its classes.

Knows nothing about MCP: the guarded tool of the assembly turns it into the client's error text.
"""

from __future__ import annotations

from typing import Literal

ErrorClass = Literal[
    "INVALID",
    "DENIED",
    "NOT_FOUND",
    "EXISTS",
    "QUOTA",
    "CAPACITY",
    "AUTH",
    "UNKNOWN",
    "TIMEOUT",
    "UNREACHABLE",
    "PARTIAL",
    "BUSY",
    "CANCELLED",
    "INTERNAL",
]


class RigError(Exception):
    """An anticipated failure: its class, what happened and why, and the next step.

    `str()` gives the text that a client sees: ``CLASS what. Next: step``. The class is always the
    first word, so that an agent can branch on it without reading prose.
    """

    def __init__(self, error_class: ErrorClass, what: str, next_step: str = "") -> None:
        super().__init__(error_class, what, next_step)
        self.error_class: ErrorClass = error_class
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.error_class} {self.what.rstrip('.')}."
        return f"{text} Next: {self.next_step}" if self.next_step else text


def invalid_parameter(parameter: str, why: str) -> RigError:
    """The refusal of one argument, by its name. The value is never repeated: it may be a secret."""
    return RigError("INVALID", f"{parameter}: {why}; nothing was started")
