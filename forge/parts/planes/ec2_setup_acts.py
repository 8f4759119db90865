"""What a rig wants of an AWS account once, and what was found of it: words for people, and calls.

Knows no call's meaning and does none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.parts.planes.capacity_plane import MANAGED_BY

SETUP_TAGS = ({"Key": "managed-by", "Value": MANAGED_BY},)  # the mark of what is ours


@dataclass(frozen=True)
class SetupWish:
    """What a rig wants of the account. `rig` is its slug, `profile` names the instance profile and
    its role, `secret` the token's secret, `bucket` the cache's, both empty for none; `region` has
    these two."""

    rig: str
    account: str
    profile: str
    secret: str
    bucket: str
    region: str

    @property
    def policy(self) -> str:
        """The inline policy's name: each rig has its own in a role that several may share."""
        return f"{MANAGED_BY}-{self.rig}"


@dataclass(frozen=True)
class SetupCall:
    """One call that changes something, as `Aws.change` takes it."""

    service: str
    region: str
    operation: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class SetupAct:
    """What would be done, in words, and the calls that do it, in order."""

    words: str
    calls: Sequence[SetupCall]


@dataclass(frozen=True)
class SetupLook:
    """What stays as it is, in words, and what would be done about the rest."""

    there: list[str] = field(default_factory=list)
    acts: list[SetupAct] = field(default_factory=list)

    def act(self, words: str, *calls: SetupCall) -> None:
        self.acts.append(SetupAct(words, calls))
