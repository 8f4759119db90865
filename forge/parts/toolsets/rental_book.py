"""What this rig rents, as the provider has it and as the journal remembers it: looking only.

Judges ownership by exact labels, ages, costs and orphans. Creates nothing and destroys nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.tokens import TokenStore
from forge.parts.planes.capacity_plane import (
    CapacityPlane,
    CapacitySettings,
    Census,
    Offer,
    Order,
    Rental,
    expiry_of,
    is_ours,
    rental_name,
)
from forge.parts.planes.rented_record import MachineBook, MachineRecord
from forge.parts.toolsets.toolset import RigContext

_REFUSAL_REMEMBERED_S = 1800.0  # capacity comes and goes: an older stockout says nothing
_JOURNAL_DEPTH = 5000


class RentalBook:
    """What this rig rents. `clock` gives Unix seconds; tokens use the same."""

    def __init__(
        self,
        context: RigContext,
        plane: CapacityPlane,
        words: tuple[str, str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._plane = plane
        self._find, self._list, self._describe = words
        self.tokens = TokenStore(context.paths.state, clock)
        self.book = MachineBook(context.paths.state)

    @property
    def clock(self) -> Callable[[], float]:
        return self.tokens.clock

    @property
    def settings(self) -> CapacitySettings:
        """The rig's values. Raises RigError INVALID while they are at fault or lack the budget."""
        settings = self._context.settings
        if not isinstance(settings, CapacitySettings):
            raise RigError("INTERNAL", "the settings of this rig have no budget")
        return settings

    @property
    def name(self) -> str:
        return rental_name(self._context.rig, self._context.owner)

    def ours(self, rental: Rental) -> bool:
        return is_ours(rental.labels, self._context.rig, self._context.owner)

    # Looking

    async def offers(self) -> list[Offer]:
        """The plane's offers, cheapest first, with this rig's own recent refusals worked in."""
        refused = self._recent_refusals()
        offers = [
            replace(offer, available="no", how_known=refused[offer.zone])
            if offer.zone in refused
            else offer
            for offer in await self._plane.offers()
        ]
        rank = {"yes": 0, "unknown": 1, "no": 2}
        price = [(rank[o.available], o.price_per_hour_usd or float("inf"), o.zone) for o in offers]
        return [offer for _, offer in sorted(zip(price, offers, strict=True), key=lambda p: p[0])]

    async def census(self) -> tuple[list[Rental], int, Census]:
        """(ours, the number of others, the census itself), over all places and kinds."""
        census = await self._plane.census()
        mine = [rental for rental in census.rentals if self.ours(rental)]
        return mine, len(census.rentals) - len(mine), census

    async def describe(self, name: str, zone: str) -> Rental:
        """Our thing of that name as it is now. DENIED for somebody else's, NOT_FOUND for none."""
        try:
            rental = await self._plane.describe(name, zone)
        except RigError as error:
            if error.error_class != "NOT_FOUND":
                raise
            raise RigError(
                "NOT_FOUND", f"there is no {name} in {zone}", f"{self._list}()"
            ) from None
        if not self.ours(rental):
            raise RigError(
                "DENIED",
                f"{name} in {zone} does not carry this rig's labels: it is somebody else's and "
                "stays untouched",
                f"{self._list}()",
            )
        return rental

    def record(self, rental: Rental) -> None:
        """Write down that this machine is the rig's: every later tool acts in its zone."""
        intent = rental.labels.get("intent", "")
        self.book.write(
            MachineRecord(
                rental.name,
                rental.zone,
                intent,
                rental.market,
                rental.provider_id,
                rental.created_at,
            )
        )

    def cost_so_far(self, rental: Rental) -> float | None:
        """USD from its creation until now, by the hour; None where the price is not known."""
        if rental.price_per_hour_usd is None:
            return None
        return round(self.age_hours(rental) * rental.price_per_hour_usd, 4)

    def age_hours(self, rental: Rental) -> float:
        return round(max(0.0, self.clock() - rental.created_unix) / 3600, 3)

    def orphan_reasons(self, rental: Rental, mine: Sequence[Rental]) -> list[str]:
        """Why nobody seems to need this thing of ours any more; empty when somebody does."""
        reasons = []
        expiry = expiry_of(rental.labels)
        if expiry is None:
            reasons.append("it carries no expiry")
        elif expiry < self.clock():
            reasons.append(f"its time was over at {utc_stamp(expiry)}")
        machines = {other.name for other in mine if other.kind == "machine"}
        if rental.kind not in ("machine", "request") and rental.name not in machines:
            reasons.append("its machine is gone")
        if rental.state in ("stopped", "failed"):
            reasons.append(f"it is {rental.state} and still there")
        if rental.labels.get("intent") not in self._intents():
            reasons.append("this installation's journal does not know it")
        return reasons

    def _with_step(self, said: RigError) -> RigError:
        """The provider's refusal with the next step that its class calls for."""
        steps: dict[ErrorClass, str] = {
            "CAPACITY": f"{self._find}(), then another zone",
            "QUOTA": f"{self._find}(), then another region, or ask the provider for quota",
            "AUTH": "the user must log in again",
            "DENIED": "the user must grant that permission",
        }
        return RigError(
            said.error_class, said.what, said.next_step or steps.get(said.error_class, "")
        )

    # The journal

    def _note(self, event: str, order: Order, **fields: Any) -> None:
        self._context.journal.append(
            event, intent=order.intent, name=order.name, zone=order.zone, **fields
        )

    def _close(self, intent: str, zone: str, outcome: str, **fields: Any) -> None:
        self._context.journal.append(
            "create settled", intent=intent, zone=zone, outcome=outcome, **fields
        )

    def _intents(self) -> set[str]:
        entries = self._context.journal.entries(_JOURNAL_DEPTH)
        return {str(e.get("intent")) for e in entries if e["event"] == "create intended"}

    def _unsettled(self) -> dict[str, dict[str, Any]]:
        """The entry of every intent without an end, by intent."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._context.journal.entries(_JOURNAL_DEPTH):
            if entry["event"] == "create intended":
                found[str(entry.get("intent"))] = entry
            elif entry["event"] == "create settled":
                found.pop(str(entry.get("intent")), None)
        return found

    def _recent_refusals(self) -> dict[str, str]:
        """For each zone that refused us lately and not served us since: when and why, in words."""
        found: dict[str, str] = {}
        for entry in self._context.journal.entries(_JOURNAL_DEPTH):
            if entry["event"] != "create settled":
                continue
            zone, age = str(entry.get("zone")), self.clock() - stamp_unix(str(entry.get("at")))
            found.pop(zone, None)
            reason = entry.get("error_class")
            if reason in ("CAPACITY", "QUOTA") and 0 <= age < _REFUSAL_REMEMBERED_S:
                found[zone] = f"refused this rig {age / 60:.0f} min ago ({reason})"
        return found


def stamp_unix(stamp: str) -> float:
    """Unix seconds of a journal's stamp; 0 for one that cannot be read, which makes it old."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def utc_stamp(seconds: float) -> str:
    """Unix seconds as an ISO 8601 stamp in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
