"""What a refused request for a machine means: the form that triage.py prints and a sweep reads.

Knows the classes of errors, no wording and no provider.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from forge.parts.ground.errors import ErrorClass

RefusalReason = Literal[
    "stockout",
    "expired",
    "not offered",
    "price",
    "quota",
    "transient",
    "permission",
    "auth",
    "usage",
    "unknown",
]
RefusalScope = Literal["zone", "region", "market", "project"]

STOPPING_REASONS: tuple[RefusalReason, ...] = ("permission", "auth", "usage")

# What a class allows its text to refine it to, its own meaning first. A class that is not here
# says nothing about the reason, and the text decides.
CLASS_READINGS: dict[ErrorClass, tuple[RefusalReason, ...]] = {
    "CAPACITY": ("stockout", "expired", "not offered", "price"),
    "QUOTA": ("quota",),
    "DENIED": ("permission", "usage", "auth"),
    "AUTH": ("auth", "permission"),
    "INVALID": ("usage", "not offered", "transient"),
    "UNKNOWN": ("unknown",),
    "TIMEOUT": ("unknown",),
    "UNREACHABLE": ("unknown",),
    "PARTIAL": ("unknown",),
    "CANCELLED": ("unknown",),
    "EXISTS": ("unknown",),
    "BUSY": ("transient",),
}
REFUSAL_CHARACTERS = 20_000  # that are read of a text, its last ones; providers' own have 2,000


@dataclass(frozen=True)
class Refusal:
    """A provider's refusal, read. `hints` are the zones that it named as having capacity.

    `said` is the deciding line, redacted; `kind` the signature that matched, empty where only the
    error's class was understood.
    """

    reason: RefusalReason
    scope: RefusalScope
    said: str
    kind: str = ""
    hints: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether the sweep ends with it: no other place would answer differently."""
        return self.reason in STOPPING_REASONS or self.scope == "project"


# What reads a provider's text: the text, and what the plane made of it, if anything. A RigError
# means that nothing was read.
RefusalReader = Callable[[str, ErrorClass | None], Awaitable[Refusal]]


def class_refusal(error_class: ErrorClass | None, said: str) -> Refusal:
    """What an error's class says by itself, where no text tells more; `said` as it may be quoted.

    Without a class, or with one whose fate is not known, that is "unknown": then nothing may be
    taken for absent before it was read.
    """
    readings = CLASS_READINGS.get(error_class, ()) if error_class is not None else ()
    reason = readings[0] if readings else "transient" if error_class == "INTERNAL" else "unknown"
    return Refusal(reason, "region" if reason == "quota" else "zone", said)
