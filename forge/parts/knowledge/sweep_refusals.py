"""For how long a refused request keeps its place from being asked again, in a file of the state.

Knows no provider, no wording and no order of zones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.parts.ground.state import read_json, write_json
from forge.parts.knowledge.refusal_answer import Refusal, RefusalReason, RefusalScope

# How long a refusal keeps its place from being asked again, in seconds. No provider publishes how
# long a stockout lasts; unless a source is named, each length is a choice, with its reason.
STOCKOUT_REMEMBERED_S = 180.0  # capacity is handed back by the minute; one more call costs nothing
EXPIRED_REMEMBERED_S = 600.0  # the provider itself found nothing during a whole wait
TRANSIENT_REMEMBERED_S = 120.0  # about the time that a provider's own retries take to give up
QUOTA_REMEMBERED_S = 3600.0  # an increase is granted by request, within hours at the earliest
PRICE_REMEMBERED_S = 900.0  # spot prices move in steps of minutes to hours
NOT_OFFERED_REMEMBERED_S = 86400.0  # a catalogue changes by announcement, not by the hour
REMEMBERED_S: dict[RefusalReason, float] = {
    "stockout": STOCKOUT_REMEMBERED_S,
    "expired": EXPIRED_REMEMBERED_S,
    "transient": TRANSIENT_REMEMBERED_S,
    "quota": QUOTA_REMEMBERED_S,
    "price": PRICE_REMEMBERED_S,
    "not offered": NOT_OFFERED_REMEMBERED_S,
}


def region_of(zone: str) -> str:
    """The region of a zone: `us-east5-a` is in `us-east5`, `us-east-1a` in `us-east-1`."""
    if found := re.fullmatch(r"([a-z]+-[a-z]+\d+)-[a-z0-9]+", zone):
        return found[1]
    found = re.fullmatch(r"([a-z]+(?:-[a-z]+)+-\d+)[a-z]", zone)
    return found[1] if found else zone


@dataclass(frozen=True)
class RememberedRefusal:
    """One refusal that still holds. Times are Unix seconds; `place` is what `scope` says."""

    project: str
    machine: str
    market: str
    scope: RefusalScope
    place: str
    reason: RefusalReason
    at: float
    until: float

    def holds_for(self, project: str, machine: str, zone: str, market: str) -> bool:
        """Whether it speaks of that request; the project and the kind of machine must be its."""
        if (self.project, self.machine, self.market) != (project, machine, market):
            return False
        place = {"zone": zone, "region": region_of(zone)}.get(self.scope, "")
        return self.place == place

    def told(self, now: float) -> str:
        """In words, such as "stockout 3 min ago"."""
        minutes = max(0.0, now - self.at) / 60
        return f"{self.reason} {minutes:.0f} min ago" if minutes >= 1 else f"{self.reason} just now"


@dataclass
class RefusalMemory:
    """The refusals that still hold, in a file of the state folder, so that a restart keeps them."""

    path: Path
    kept: list[RememberedRefusal] = field(default_factory=list)

    def load(self, now: float) -> None:
        """Read the file; what is over, from the future, or not readable as a refusal is left out.

        Raises RigError DENIED where the file is there and cannot be read.
        """
        entries = (read_json(self.path) or {}).get("refusals", [])
        found = (
            [_remembered_refusal(entry) for entry in entries] if isinstance(entries, list) else []
        )
        self.kept = [r for r in found if r is not None and r.at <= now < r.until]

    def remember(
        self, project: str, machine: str, zone: str, market: str, refusal: Refusal, now: float
    ) -> None:
        """Keep a refusal for as long as its reason is kept, and write it down."""
        length = REMEMBERED_S.get(refusal.reason)
        if length is None:
            return
        places = {"zone": zone, "region": region_of(zone)}
        new = RememberedRefusal(
            project=project,
            machine=machine,
            market=market,
            scope=refusal.scope,
            place=places.get(refusal.scope, ""),
            reason=refusal.reason,
            at=now,
            until=now + length,
        )
        same = (new.project, new.machine, new.market, new.scope, new.place)
        self.kept = [
            r
            for r in self.kept
            if r.until > now and (r.project, r.machine, r.market, r.scope, r.place) != same
        ]
        self.kept.append(new)
        write_json(self.path, {"v": 1, "refusals": [asdict(r) for r in self.kept]})

    def holding(
        self, project: str, machine: str, zone: str, market: str, now: float
    ) -> Sequence[RememberedRefusal]:
        """What still speaks against that request, the longest lasting first."""
        found = [
            r for r in self.kept if r.until > now and r.holds_for(project, machine, zone, market)
        ]
        return sorted(found, key=lambda r: -r.until)


def _remembered_refusal(entry: Any) -> RememberedRefusal | None:
    """An entry of the file as a refusal; None for anything else, since a file may be damaged."""
    try:
        refusal = RememberedRefusal(**entry)
        lasts = REMEMBERED_S[refusal.reason]
        # A longer life than its reason has is damage too, and would shut a place for ever.
        good = refusal.until - refusal.at <= lasts
    except (TypeError, KeyError):
        return None
    return refusal if good else None
