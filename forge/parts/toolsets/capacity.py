"""The capacity toolset: find, create, list, describe and destroy what a rig rents, and its orphans.

Names come from the plane's words: hardware, order, rental and destroy in tool names, rented in
prose (`find_tpu`, `create_g4dn_instance`, `terminate_g4dn_instance`; "TPU machine").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, cast

from pydantic import BaseModel, Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.ground.tokens import TOKEN_LIFE_S
from forge.parts.knowledge.load_matrix import refuse_unloadable
from forge.parts.planes.capacity_plane import CapacityPlane, Offer, Rental, expiry_of
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.consent import ask_user
from forge.parts.toolsets.rental import Created, Ended, Rentals
from forge.parts.toolsets.rental_book import utc_stamp
from forge.parts.toolsets.starts import refuse_planned
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_VERBS = ("offers", "quota", "create", "census", "describe", "destroy")

ResourceName = Annotated[str, Field(max_length=63, description="The exact name, as listed.")]
Zone = Annotated[str, Field(max_length=40, description="The exact zone, as listed.")]
Hours = Annotated[
    float, Field(ge=0.25, le=168, description="Life in hours; hard_stop tells what ends it.")
]
Market = Annotated[
    Literal["", "flex-start", "spot", "on-demand", "reserved"],
    Field(description="How to rent; empty: the preferred way of MARKETS."),
]
WaitMinutes = Annotated[
    float, Field(ge=0, le=120, description="How long a queued order may wait, where it can.")
]
RentAnyway = Annotated[
    bool,
    Field(description="Rent what an estimate or others' trials say will not work."),
]
ReapToken = Annotated[str, Field(max_length=64, description="What list_orphans gave.")]
PlanToken = Annotated[str, Field(max_length=64, description="What plan_destroy gave for it.")]


class OfferRow(BaseModel):
    """One place that has the machine on its list."""

    zone: str
    market: str
    price_per_hour_usd: float | None = Field(description="Null when nobody knows it.")
    price_source: str
    available: Literal["yes", "no", "unknown"]
    how_known: str


class RentalRow(BaseModel):
    """Something rented, as the provider reports it now. Money in USD, times in UTC."""

    kind: str
    name: str
    zone: str
    project: str
    provider_id: str
    state: str
    created_at: str
    age_hours: float
    price_per_hour_usd: float | None
    cost_so_far_usd: float | None = Field(description="Age by price; null: price not known.")
    ends_at: str = Field(description="When its time is over; empty: it carries no expiry.")


class OffersOutcome(Outcome):
    """Where the machine is on offer, the most promising place first."""

    offers: list[OfferRow]
    budget_usd: float
    max_hours: float
    hard_stop: str = Field(description="What ends a machine after its hours; empty: nothing.")


class CreateOutcome(Outcome):
    """A machine that exists now, proven by reading it back."""

    machine: RentalRow
    intent: str = Field(description="The id of this create in the journal and in its labels.")
    estimate_usd: float | None = Field(description="Most that it costs until its hard stop.")
    hard_stop: str
    note: str = ""


class RentalsOutcome(Outcome):
    """What this rig rents, in all places."""

    rentals: list[RentalRow]
    others: int = Field(description="Things in the project that are not this rig's; not shown.")
    unread: list[str] = Field(description="Places that did not answer: nothing is known of them.")


class RentalOutcome(Outcome):
    """One rented thing."""

    rental: RentalRow


class PlanOutcome(Outcome):
    """What would be destroyed, what would stay, and the token that destroying takes."""

    goes: RentalRow
    stays: list[RentalRow]
    token: str
    token_life_s: float


class DestroyOutcome(Outcome):
    """What was destroyed, and whether reading back shows that it is gone already."""

    gone: bool = Field(description="false: the provider accepted it and is at it.")
    destroyed: RentalRow | None = Field(description="Null when it was gone before.")


class OrphanRow(RentalRow):
    """Something of ours that nobody seems to need, and why."""

    reasons: list[str]


class OrphansOutcome(Outcome):
    """What costs money for nothing."""

    orphans: list[OrphanRow]
    unread: list[str]
    token: str = Field(description="For reap_orphans; empty where there is nothing to reap.")


class ReapOutcome(Outcome):
    """What was destroyed, each proven gone or being ended, and what was not."""

    destroyed: list[RentalRow]
    stopping: list[str] = Field(description="Those that the provider is still ending, by name.")
    left: list[str] = Field(description="By name, with the reason: it may still cost money.")


# Under this key of RigContext.extras a rig whose machines boot by themselves has what writes down
# what the next one is to boot.
BOOT_ORDER = "boot_order"
BootOrderWriter = Callable[[int], Awaitable[None]]


async def prepare_rental(context: RigContext, hours: float, override: bool) -> None:
    """Everything that can be refused or settled before a machine is asked for."""
    settings, engine = context.settings, context.vocabulary.get("engine", "")
    model = str(getattr(settings, "model_name", ""))
    refuse_unloadable(model, engine, str(getattr(settings, "chip", "")), override)
    await refuse_planned(context, model, override)
    writer: BootOrderWriter | None = context.extras.get(BOOT_ORDER)
    if writer is not None:
        await writer(round(hours * 3600))


class CapacityToolset(Toolset):
    """Find, create, list, describe, plan, destroy, orphans."""

    toolset_name = "capacity"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        # By the class: isinstance would read the plane's properties, which may want good settings.
        lacking = [verb for verb in _VERBS if not hasattr(type(context.plane), verb)]
        if lacking:
            raise TypeError(f"{context.rig}: its plane cannot rent, it lacks {', '.join(lacking)}")
        self.plane = cast(CapacityPlane, context.plane)
        words = context.vocabulary
        self._create = f"create_{words['order']}"
        self._find = f"find_{words['hardware']}"
        self._list = f"list_{words['rental']}s"
        self._describe = f"describe_{words['rental']}"
        self._destroy = f"{words['destroy']}_{words['rental']}"
        self.rentals = Rentals(context, self.plane, (self._find, self._list, self._describe))

    @rig_tool(name="find_{hardware}", title="Find a {rented}", effect="reads")
    async def find(self) -> OffersOutcome:
        """Where a {rented} can be had: each zone with its price an hour, whether it is free and how
        that is known, recent refusals included. Looks only: creates nothing and costs nothing."""
        offers = await self.rentals.offers()
        return self._offered(offers)

    @rig_tool(name="create_{order}", title="Create a {rented}", effect="changes")
    async def create(
        self,
        zone: Zone,
        hours: Hours = 1.0,
        market: Market = "",
        wait_minutes: WaitMinutes = 30,
        override: RentAnyway = False,
    ) -> CreateOutcome:
        """Rent one {rented} in a zone. COSTS MONEY: its price an hour from now until it is
        destroyed, or until its `hours` are over. Refuses what the rig's model does not fit into,
        what is over BUDGET_USD and MAX_HOURS, and when this rig has one anywhere.
        Takes up to 50 seconds; UNKNOWN means that it may exist: look, do not repeat."""
        checked_name("zone", "zone", zone)
        await prepare_rental(self.context, hours, override)
        valid_s = round(wait_minutes * 60)
        return self._created(await self._rented(zone, hours, market, valid_s))

    @rig_tool(name="list_{rental}s", title="List what this rig rents", effect="reads")
    async def list_rentals(self) -> RentalsOutcome:
        """Everything this rig rents, in all zones, with state, age and cost so far. What belongs to
        others is counted and not shown."""
        mine, others, census = await self.rentals.census()
        cost = sum(self.rentals.cost_so_far(rental) or 0.0 for rental in mine)
        return RentalsOutcome(
            summary=f"{len(mine)} of this rig ({cost:.2f} USD so far), {others} of others.",
            next_step=f"{self._describe}(name=…, zone=…)" if mine else f"{self._find}()",
            rentals=[self._row(rental) for rental in mine],
            others=others,
            unread=list(census.unread),
        )

    @rig_tool(name="describe_{rental}", title="Describe a {rented}", effect="reads")
    async def describe(self, name: ResourceName, zone: Zone) -> RentalOutcome:
        """One {rented} of this rig as the provider reports it now: state, age, cost so far, end of
        its time. Refuses what is not this rig's."""
        checked_name("resource", "name", name)
        checked_name("zone", "zone", zone)
        rental = await self.rentals.describe(name, zone)
        return RentalOutcome(
            summary=f"{self._sentence(rental)}.",
            next_step=f"plan_destroy(name='{name}', zone='{zone}') when it is not needed any more",
            rental=self._row(rental),
        )

    @rig_tool(title="Plan a destruction", effect="reads")
    async def plan_destroy(self, name: ResourceName, zone: Zone) -> PlanOutcome:
        """What would be destroyed, with its age and cost so far, and what would stay. Destroys
        nothing; gives the single-use token that destroying takes, good for 5 minutes and for that
        very {rented} alone. Show the user what goes before using it."""
        checked_name("resource", "name", name)
        checked_name("zone", "zone", zone)
        rental = await self.rentals.describe(name, zone)
        self._refuse_plan(rental)
        mine, _, _ = await self.rentals.census()
        token = await self.rentals.tokens.issue(self.rentals.subject(rental))
        return self._planned(rental, mine, token)

    @rig_tool(name="{destroy}_{rental}", title="Destroy a {rented}", effect="destroys")
    async def destroy(
        self, ctx: Caller, name: ResourceName, zone: Zone, token: PlanToken
    ) -> DestroyOutcome:
        """DELETES a {rented} of this rig and the disk in it, for good; its billing ends. Takes the
        token of plan_destroy, refuses when anything differs from the plan, asks the user where the
        client can. UNKNOWN means that it is still there and may still cost money."""
        for kind, value in (("resource", name), ("zone", zone), ("token", token)):
            checked_name(kind, "name" if kind == "resource" else kind, value)
        rental = await self.rentals.planned(name, zone, token)
        if rental is not None and self.rentals.settings.destroy_asks_user:
            consent = await ask_user(ctx, self._question(rental))
            await self._heed(consent, token)
        return self._destroyed(name, zone, await self.rentals.destroy(name, zone, token))

    @rig_tool(title="List orphans", effect="reads")
    async def list_orphans(self) -> OrphansOutcome:
        """What this rig rents and nobody seems to need: past its time, stopped, without a machine,
        unknown to the journal; each with the reason. Looks in all zones and deletes nothing; gives
        the single-use token that reap_orphans takes for exactly these."""
        found, census = await self.rentals.orphans()
        things = [rental for rental, _ in found]
        token = await self.rentals.tokens.issue(self.rentals.reap_subject(things)) if things else ""
        return self._orphaned(found, census.unread, token)

    @rig_tool(title="Destroy the orphans", effect="destroys")
    async def reap_orphans(self, ctx: Caller, token: ReapToken) -> ReapOutcome:
        """DELETES every orphan that list_orphans showed, for good, and proves for each that it is
        gone. Refuses when there is another one by now; asks the user where the client can. What
        could not be ended is told by name: it may still cost money."""
        checked_name("token", "token", token)
        if self.rentals.settings.destroy_asks_user:
            consent = await ask_user(ctx, "Delete all orphans that were listed, for good?")
            await self._heed(consent, token)
        return self._reaped(await self.rentals.reap(token))

    async def _rented(self, zone: str, hours: float, market: str, valid_s: int) -> Created:
        return await self.rentals.create(zone, hours, market, valid_s)

    def _refuse_plan(self, rental: Rental) -> None:
        """Raise RigError where destroying `rental` would not be the end of it."""

    def _offered(self, offers: list[Offer]) -> OffersOutcome:
        good = [offer for offer in offers if offer.available != "no"]
        settings = self.rentals.settings
        step = f"{self._create}(zone='{good[0].zone}', hours=1)" if good else "try again later"
        return OffersOutcome(
            summary=f"{len(good)} of {len(offers)} zones may have one; nothing was created.",
            next_step=step,
            offers=[OfferRow(**vars(offer)) for offer in offers],
            budget_usd=settings.budget_usd,
            max_hours=settings.max_hours,
            hard_stop=self.plane.hard_stop,
        )

    def _created(self, created: Created) -> CreateOutcome:
        row = self._row(created.rental)
        most = "unknown" if created.estimate_usd is None else f"{created.estimate_usd:.2f} USD"
        note = f" ({created.note}; reading it back shows it)" if created.note else ""
        return CreateOutcome(
            summary=f"Created {row.name} in {row.zone}, project {row.project}: {row.state}, ends "
            f"at {row.ends_at}, at most {most}{note}.",
            next_step=f"{self._describe}(name='{row.name}', zone='{row.zone}')",
            machine=row,
            intent=created.intent,
            estimate_usd=created.estimate_usd,
            hard_stop=self.plane.hard_stop,
            note=created.note,
        )

    def _planned(self, rental: Rental, mine: Sequence[Rental], token: str) -> PlanOutcome:
        subject = self.rentals.subject(rental)
        arguments = f"name='{rental.name}', zone='{rental.zone}', token='{token}'"
        return PlanOutcome(
            summary=f"Would be destroyed: {self._sentence(rental)}. Nothing was destroyed yet.",
            next_step=f"ask the user, then {self._destroy}({arguments})",
            goes=self._row(rental),
            stays=[self._row(r) for r in mine if self.rentals.subject(r) != subject],
            token=token,
            token_life_s=TOKEN_LIFE_S,
        )

    def _question(self, rental: Rental) -> str:
        """What the user is asked. The same words at every asking, so no age and no running cost."""
        price = rental.price_per_hour_usd
        money = "an unknown price" if price is None else f"{price:g} USD"
        return (
            f"Delete the {rental.kind} {rental.name} in {rental.zone} of project {rental.project} "
            f"for good? Created {rental.created_at}, id {rental.provider_id}, {money} an hour."
        )

    async def _heed(self, consent: str, token: str) -> None:
        """Raise CANCELLED, and make the token worthless, when the user refused."""
        if consent == "refused":
            await self.rentals.tokens.revoke(token)
            raise RigError(
                "CANCELLED",
                "the user did not agree; nothing was destroyed and the token is void",
                "do not ask again unless the user wants it",
            )

    def _destroyed(self, name: str, zone: str, ended: Ended | None) -> DestroyOutcome:
        if ended is None:
            words = f"{name} in {zone} was gone already; no place has it any more."
        elif ended.gone:
            words = f"Destroyed: {self._sentence(ended.rental)}. Reading back shows it gone."
        else:
            what = self._sentence(ended.rental)
            words = f"The provider accepted it and is ending {what}; until it is gone it may cost"
            words += " money. That takes a minute or two."
        step = "list_orphans()"
        if ended is not None and not ended.gone:
            step = f"{self._describe}(name='{name}', zone='{zone}') until NOT_FOUND"
        return DestroyOutcome(
            summary=words,
            next_step=step,
            gone=ended is None or ended.gone,
            destroyed=None if ended is None else self._row(ended.rental),
        )

    def _orphaned(
        self, found: Sequence[tuple[Rental, list[str]]], unread: Sequence[str], token: str
    ) -> OrphansOutcome:
        costs = sum(rental.price_per_hour_usd or 0.0 for rental, _ in found)
        step = f"ask the user, then reap_orphans(token='{token}')" if found else ""
        places = f"; not read: {', '.join(unread)}" if unread else ""
        return OrphansOutcome(
            summary=f"{len(found)} orphans, {costs:.2f} USD an hour{places}.",
            next_step=step,
            orphans=[
                OrphanRow(**self._row(rental).model_dump(), reasons=why) for rental, why in found
            ],
            unread=list(unread),
            token=token,
        )

    def _reaped(self, ended: Sequence[Ended]) -> ReapOutcome:
        left = [
            f"{one.rental.name} in {one.rental.zone}: {one.error}" for one in ended if one.error
        ]
        done = [one for one in ended if one.error is None]
        going = [one.rental.name for one in done if not one.gone]
        return ReapOutcome(
            summary=f"{len(done)} orphans are destroyed ({len(going)} of them still being ended by "
            f"the provider), {len(left)} are left.",
            next_step="list_orphans()",
            destroyed=[self._row(one.rental) for one in done],
            stopping=going,
            left=left,
        )

    def _row(self, rental: Rental) -> RentalRow:
        expiry = expiry_of(rental.labels)
        ends = "" if expiry is None else utc_stamp(expiry)
        return RentalRow(
            **rental.model_dump(exclude={"labels", "created_unix"}),
            age_hours=self.rentals.age_hours(rental),
            cost_so_far_usd=self.rentals.cost_so_far(rental),
            ends_at=ends,
        )

    def _sentence(self, rental: Rental) -> str:
        cost = self.rentals.cost_so_far(rental)
        money = "cost not known" if cost is None else f"{cost:.2f} USD so far"
        return (
            f"{rental.kind} {rental.name} in {rental.zone}, project {rental.project}: "
            f"{rental.state}, {self.rentals.age_hours(rental):.1f} h old, {money}"
        )
