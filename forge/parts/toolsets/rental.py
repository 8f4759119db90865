"""The acts of renting: a create that never makes twins, a destroy that never hits a namesake.

Journals every intent before the call and believes nothing that was not read back. Knows no tool.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.locks import held_lock
from forge.parts.planes.capacity_plane import (
    Census,
    Offer,
    Order,
    Rental,
    listed,
    rental_labels,
)
from forge.parts.planes.rented_record import MachineRecord
from forge.parts.toolsets.rental_book import RentalBook, stamp_unix

# After these the provider itself has refused: nothing is on its way, and one look is enough.
_REFUSALS: tuple[ErrorClass, ...] = (
    *("CAPACITY", "QUOTA", "DENIED", "AUTH", "INVALID", "EXISTS", "BUSY"),
)
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Created:
    """A machine that was read back after its create call; `note` is what the call itself said."""

    rental: Rental
    intent: str
    estimate_usd: float | None
    note: str = ""


@dataclass(frozen=True)
class Ended:
    """How a destruction ended. `gone`: reading showed it; else the provider is at it (`error` None)
    or the thing may stay and go on costing money (`error` says why)."""

    rental: Rental
    gone: bool
    error: RigError | None = None


class Rentals(RentalBook):
    """The acts of renting, under one lock of the rig."""

    # Creating

    async def create(self, zone: str, hours: float, market: str = "", valid_s: int = 0) -> Created:
        """One machine in `zone` that ends after `hours`, or a RigError and none. `market` empty:
        the preferred one that is on offer there. `valid_s`: how long the order may wait.

        Refuses before the call: over budget, unknown price, no hard stop, quota, a machine of ours
        anywhere, a namesake of somebody else's, a place that cannot be read, a create whose fate is
        not settled. Afterwards only what is read back counts: UNKNOWN when that shows nothing yet.
        """
        offer = await self._offer(zone, market)
        estimate = self.within_budget(offer, hours)
        async with held_lock(self._context.paths.state, "capacity"):
            await self.refuse_second()
            await self._refuse_quota(offer)
            order = self._order(offer, hours, valid_s)
            self._note("create intended", order, estimate_usd=estimate, life_s=order.life_s)
            self.book.write(MachineRecord(order.name, zone, order.intent, offer.market))
            return await self._called(order, estimate)

    async def _refuse_quota(self, offer: Offer) -> None:
        """Raise RigError QUOTA where none is left. A quota that cannot be read says nothing."""
        try:
            quota = await self._plane.quota(offer.zone, offer.market)
        except RigError as error:
            if error.error_class == "AUTH":
                raise
            return
        if quota.used >= quota.limit:
            raise RigError(
                "QUOTA",
                f"{quota.name} for {offer.zone} allows {quota.limit}, and {quota.used} are in use",
                f"ask the provider for more, or {self._find}() in another region",
            )

    async def _offer(self, zone: str, market: str) -> Offer:
        order = [market] if market else listed(self.settings.markets)
        here = [offer for offer in await self._plane.offers() if offer.zone == zone]
        for wanted in order:
            for offer in here:
                if offer.market == wanted:
                    return offer
        if here and not order:
            return here[0]
        how = f" as {' or '.join(order)}" if order else ""
        raise RigError(
            "NOT_FOUND", f"the machine is not on offer in {zone}{how}", f"{self._find}()"
        )

    def within_budget(self, offer: Offer, hours: float) -> float | None:
        """What `hours` of `offer` cost in USD, or the refusal that the settings want."""
        settings = self.settings
        if hours > settings.max_hours:
            raise RigError(
                "DENIED",
                f"hours: {hours:g} are more than MAX_HOURS={settings.max_hours:g}; nothing was "
                "created",
                "ask for fewer hours",
            )
        if not self._hard_stop_of(offer) and not settings.no_hard_stop_ok:
            raise RigError(
                "DENIED",
                "this provider never ends a machine by itself, so a forgotten one is billed for "
                "ever; nothing was created",
                "the user may set NO_HARD_STOP_OK=1",
            )
        if offer.price_per_hour_usd is None:
            if settings.unknown_price_ok:
                return None
            raise RigError(
                "DENIED",
                f"the price in {offer.zone} is not known ({offer.price_source}), so no budget can "
                "hold; nothing was created",
                "try later, or the user may set UNKNOWN_PRICE_OK=1",
            )
        estimate = round(offer.price_per_hour_usd * hours, 2)
        if offer.price_per_hour_usd * hours > settings.budget_usd:
            raise RigError(
                "DENIED",
                f"{hours:g} h at {offer.price_per_hour_usd:g} USD an hour are {estimate:g} USD, "
                f"over BUDGET_USD={settings.budget_usd:g}; nothing was created",
                "ask for fewer hours, or the user may raise BUDGET_USD",
            )
        return estimate

    def _hard_stop_of(self, offer: Offer) -> str:
        """How the provider ends a machine of that market by itself; empty where it does not."""
        without = getattr(type(self._plane), "endless_markets", ())
        return "" if offer.market in without else self._plane.hard_stop

    async def refuse_second(self) -> None:
        """Under the lock: settle what is unsettled, then refuse unless nothing of ours exists."""
        mine, _, census = await self.census()
        if census.unread:
            raise RigError(
                "UNKNOWN",
                f"{', '.join(census.unread)} cannot be read, so a machine of ours there cannot be "
                "ruled out; nothing was created",
                f"{self._list}() until all places answer",
            )
        self._settle(mine)
        for rental in mine:
            if rental.kind in ("machine", "request"):
                raise RigError(
                    "EXISTS",
                    f"{rental.name} exists already in {rental.zone} ({rental.state}, intent "
                    f"{rental.labels.get('intent')}); a rig has one machine",
                    f"{self._describe}(name='{rental.name}', zone='{rental.zone}')",
                )
        for rental in census.rentals:
            if rental.name == self.name and rental.kind == "machine" and not self.ours(rental):
                raise RigError(
                    "DENIED",
                    f"a machine named {rental.name} in {rental.zone} is somebody else's; it stays "
                    "untouched and nothing was created",
                    "give this rig a project of its own",
                )

    def _settle(self, mine: Sequence[Rental]) -> None:
        """Close every create of unknown fate by what was just read; UNKNOWN while one is too young.

        A killed server leaves the same trace as a timed-out call: an intent without an end.
        """
        # A disk may be seen before its machine is, so it proves nothing.
        seen = {one.labels.get("intent") for one in mine if one.kind in ("machine", "request")}
        for intent, entry in self._unsettled().items():
            age = self.clock() - stamp_unix(str(entry.get("at")))
            if intent in seen:
                self._close(intent, str(entry.get("zone")), "created")
            elif 0 <= age < self._plane.settle_s:
                raise RigError(
                    "UNKNOWN",
                    f"the create {intent} in {entry.get('zone')} may still come to life; it is "
                    f"settled {self._plane.settle_s - age:.0f} s from now at the latest",
                    f"{self._list}()",
                )
            else:
                self._close(intent, str(entry.get("zone")), "absent")

    def _order(self, offer: Offer, hours: float, valid_s: int) -> Order:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        intent = f"create-{stamp}-{secrets.token_hex(3)}"
        life = round(hours * 3600)
        # Where a request waits for capacity, its life begins when it is granted.
        queued = offer.market in getattr(type(self._plane), "queued_markets", ())
        valid_s = valid_s if queued else 0
        over = int(self.clock()) + valid_s + life
        labels = rental_labels(self._context.rig, self._context.owner, intent, over)
        return Order(self.name, offer.zone, intent, labels, life, offer.market, valid_s)

    async def _called(self, order: Order, estimate: float | None) -> Created:
        """Send the order and read back what came of it, whatever the call itself said."""
        said: RigError | None = None
        try:
            await self._plane.create(order)
        except RigError as error:
            said = error
        refused = said is not None and said.error_class in _REFUSALS
        rental = await self._seen(order, patience_s=0.0 if refused else self._plane.read_back_s)
        if rental is not None:
            self._close(order.intent, order.zone, "created")
            self.record(rental)
            note = "" if said is None else f"the call itself ended with: {said.what}"
            return Created(rental, order.intent, estimate, note)
        if said is not None and refused:
            self._close(order.intent, order.zone, "refused", error_class=said.error_class)
            self.book.forget(order.name)
            raise self._with_step(said)
        self._note("create unknown", order, why=said.what if said is not None else "not seen")
        why = said.what if said is not None else "it was accepted and is not to be seen"
        raise RigError(
            "UNKNOWN",
            f"whether {order.name} was created in {order.zone} is not known ({why}; intent "
            f"{order.intent}); no other create goes out before that is settled",
            f"{self._list}() until it shows, or {self._plane.settle_s:.0f} s have passed",
        )

    async def _seen(self, order: Order, patience_s: float) -> Rental | None:
        """The machine of this very order; None if it does not show within `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                rental = await self._plane.describe(order.name, order.zone)
                # A disk that a half-made machine left behind is no machine.
                same = rental.labels.get("intent") == order.intent and self.ours(rental)
                if same and rental.kind in ("machine", "request"):
                    return rental
            except RigError:
                pass  # not there, or not to be read: either way not seen
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(_LOOK_EVERY_S)

    # Destroying

    def subject(self, rental: Rental) -> dict[str, str]:
        """What a token is bound to: the rig and that very thing, so that no namesake passes."""
        return {
            "act": "destroy",
            "rig": self._context.rig,
            **{
                key: str(getattr(rental, key))
                for key in ("kind", "project", "zone", "name", "provider_id", "created_at")
            },
        }

    async def planned(self, name: str, zone: str, token: str) -> Rental | None:
        """The thing that `token` was given for, read again; None when it is gone everywhere.

        Raises RigError DENIED on any difference. Of a thing that was recreated, the token is void.
        """
        subject = await self.tokens.check(token)
        if (subject["name"], subject["zone"]) != (name, zone) or subject["act"] != "destroy":
            raise RigError(
                "DENIED",
                f"the token was given for {subject['name']} in {subject['zone']}; nothing was "
                "destroyed",
                f"plan_destroy(name='{name}', zone='{zone}')",
            )
        try:
            rental = await self.describe(name, zone)
        except RigError as error:
            if error.error_class == "NOT_FOUND" and await self._gone_everywhere(subject):
                return None
            raise
        if self.subject(rental) != subject:
            await self.tokens.revoke(token)
            raise RigError(
                "DENIED",
                f"{name} in {zone} is not what the plan showed: it was created anew at "
                f"{rental.created_at}; nothing was destroyed",
                f"plan_destroy(name='{name}', zone='{zone}')",
            )
        return rental

    async def _gone_everywhere(self, subject: dict[str, str]) -> bool:
        census = await self._plane.census()
        if census.unread:
            raise RigError(
                "UNKNOWN", f"{', '.join(census.unread)} cannot be read", f"{self._list}()"
            )
        return all(rental.provider_id != subject["provider_id"] for rental in census.rentals)

    async def destroy(self, name: str, zone: str, token: str) -> Ended | None:
        """End the planned thing and read back that it is gone; None when it was gone before.

        Raises RigError DENIED (token, plan), the provider's own refusal, or UNKNOWN while the thing
        is still to be seen: then it may still cost money.
        """
        async with held_lock(self._context.paths.state, "capacity"):
            rental = await self.planned(name, zone, token)
            if rental is None:
                self.book.forget(name)
                await self.tokens.revoke(token)
                return None
            await self.tokens.redeem(token, self.subject(rental))
            ended = await self._ended(rental)
            if ended.error is not None:
                raise ended.error
            return ended

    async def _ended(self, rental: Rental) -> Ended:
        """End that very thing and read back what became of it."""
        self._context.journal.append("destroy intended", **self.subject(rental))
        said: RigError | None = None
        try:
            await self._plane.destroy(rental)
        except RigError as error:
            said = error
        if said is not None and said.error_class in _REFUSALS:
            return Ended(rental, False, self._with_step(said))
        left = await self._left(rental)
        if left is not None and left != "stopping":
            where = {"name": rental.name, "zone": rental.zone}
            self._context.journal.append("destroy unknown", **where, state=left)
            return Ended(rental, False, self._still_there(rental, left, said))
        # A provider takes a minute or more to end what it has accepted to end.
        event = "destroyed" if left is None else "destroy accepted"
        self._context.journal.append(event, **self.subject(rental))
        self.book.forget(rental.name)
        gone = getattr(self._plane, "machine_gone", None)
        if gone is not None and rental.kind == "machine":
            await gone()
        return Ended(rental, left is None)

    # Orphans

    async def orphans(self) -> tuple[list[tuple[Rental, list[str]]], Census]:
        """(what nobody seems to need any more, each with its reasons; the census)."""
        mine, _, census = await self.census()
        found = [(rental, self.orphan_reasons(rental, mine)) for rental in mine]
        return [(rental, why) for rental, why in found if why], census

    def reap_subject(self, rentals: Sequence[Rental]) -> dict[str, str]:
        """What a token for reaping is bound to: these very things, no other and none less."""
        marks = sorted(f"{r.kind}/{r.zone}/{r.name}/{r.provider_id}" for r in rentals)
        return {"act": "reap", "rig": self._context.rig, "things": " ".join(marks)}

    async def reap(self, token: str) -> list[Ended]:
        """End every orphan of the list that `token` was given for.

        Raises RigError DENIED when the orphans are not exactly the listed ones any more, but for
        those that are gone since.
        """
        async with held_lock(self._context.paths.state, "capacity"):
            given = await self.tokens.check(token)
            listed_then = set(given.get("things", "").split())
            now = [rental for rental, _ in (await self.orphans())[0]]
            subject = self.reap_subject(now)
            if given["act"] != "reap" or not set(subject["things"].split()) <= listed_then:
                await self.tokens.revoke(token)
                raise RigError(
                    "DENIED",
                    "the orphans are not those of the list any more; nothing was destroyed",
                    "list_orphans()",
                )
            await self.tokens.redeem(token, given)
            return [await self._ended(rental) for rental in now]

    async def _left(self, rental: Rental) -> str | None:
        """The state in which the very thing is still to be seen after a while; None: it is gone."""
        deadline = time.monotonic() + self._plane.read_back_s
        while True:
            try:
                now = await self._plane.describe(rental.name, rental.zone)
                if self.subject(now) != self.subject(rental):
                    return None
                left: str = now.state
            except RigError as error:
                if error.error_class == "NOT_FOUND":
                    return None
                left = f"unreadable ({error.error_class})"
            if time.monotonic() >= deadline:
                return left
            await asyncio.sleep(_LOOK_EVERY_S)

    def _still_there(self, rental: Rental, left: str, said: RigError | None) -> RigError:
        place = f"name='{rental.name}', zone='{rental.zone}'"
        how = "was accepted" if said is None else f"ended with: {said.what}"
        return RigError(
            "UNKNOWN",
            f"the deletion of {rental.name} {how}, but it is still there ({left}) and may go on "
            "costing money",
            f"{self._describe}({place}); if it stays, plan_destroy({place}) again",
        )
