"""What a container on a rented machine is given beyond an ordinary one, each with its reason.

Tables, so that documents and argument lists cannot differ. Knows no chip, no image and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNTRIED_GRANT = "not tried on the hardware by this project"


@dataclass(frozen=True)
class ContainerGrant:
    """Words of docker's argument list, why they are there, and what that rests on."""

    options: Sequence[str]
    reason: str
    source: str


# They take away: what a program in the container may not do, whatever it is.
NO_CAPABILITIES_GRANT = ContainerGrant(
    ("--cap-drop", "ALL"),
    "root in the container has none of root's rights that are not named here",
    UNTRIED_GRANT,
)
NO_NEW_RIGHTS_GRANT = ContainerGrant(
    ("--security-opt", "no-new-privileges"),
    "no program of the image can gain rights through its owner or mode",
    UNTRIED_GRANT,
)


def told_grants(grants: Sequence[ContainerGrant]) -> list[str]:
    """Each grant in one line for people: its words, its reason, its source."""
    return [f"{' '.join(g.options)}: {g.reason} ({g.source})" for g in grants]
