"""What a rented machine would cost, and where the account may have one: the same on every provider.

Knows the plane by its verbs alone, and no provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, cast, get_args

from pydantic import BaseModel, Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.capacity_plane import (
    CapacityPlane,
    CapacitySettings,
    Offer,
    RentalMarket,
    listed,
)
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

# Each place is a program of about a second; three at a time finish within a read's own 5 seconds,
# and so many places within a client's patience.
_QUOTAS_AT_ONCE = 3
_QUOTA_PLACES = 24
_NOT_IN_ESTIMATE = (
    "the boot disk, an external address and traffic",
    "what stays when the machine is gone: a bucket, a secret (cents a month)",
    "taxes, discounts, and prices that moved since their date",
)


class HubTokenSettings(RigSettings):
    """The keys of save_hf_token. The secret's name and who pays, other parts' settings have."""

    hf_token_file: str = Field(
        default="",
        max_length=1000,
        description="File of mode 0600 with the Hugging Face token, for save_hf_token.",
    )


class QuotaRow(BaseModel):
    """How many of this rig's machines the project may have in a place."""

    zone: str
    market: str
    quota: str
    limit: int
    used: int
    free: int


class QuotaOutcome(Outcome):
    """Quotas by place, those with room first."""

    places: list[QuotaRow]
    unread: list[str] = Field(description="Places that were not read, and why: not known.")


class CostRow(BaseModel):
    """What one machine would cost in a place."""

    zone: str
    market: str
    usd: float | None = Field(description="For all hours; null: nobody knows the price.")
    usd_per_hour: float | None
    price_source: str
    allowed: bool = Field(description="Within BUDGET_USD and MAX_HOURS.")


class CostOutcome(Outcome):
    """An estimate from dated prices, cheapest first. Not an offer."""

    hours: float
    places: list[CostRow]
    budget_usd: float
    max_hours: float
    not_included: list[str]


class CostToolset(Toolset):
    """What a machine would cost."""

    toolset_name = "project"

    @property
    def _rents(self) -> CapacityPlane:
        return cast(CapacityPlane, self.context.plane)

    @rig_tool(title="Estimate the cost", effect="reads")
    async def estimate_deployment_cost(
        self,
        hours: Annotated[float, Field(ge=0.1, le=168, description="Life of the machine.")] = 1.0,
        zone: Annotated[str, Field(max_length=40, description="One zone; empty: all.")] = "",
    ) -> CostOutcome:
        """What one {rented} would cost for so many hours, by zone and way of renting: hours by
        price, each with its source and date, against BUDGET_USD and MAX_HOURS. Hours in which
        nobody asks are billed too; waiting in a queue is not. Rents nothing and costs nothing."""
        if zone:
            checked_name("zone", "zone", zone)
        offers = [one for one in await self._rents.offers() if zone in ("", one.zone)]
        return self._estimated(offers, hours, zone)

    def _estimated(self, offers: list[Offer], hours: float, zone: str) -> CostOutcome:
        find = f"find_{self.context.vocabulary['hardware']}()"
        if not offers:
            raise RigError("NOT_FOUND", f"no offer {f'in {zone}' if zone else 'is known'}", find)
        limits = cast(CapacitySettings, self.context.settings)
        rows = [_cost_row(offer, hours, limits) for offer in offers]
        rows.sort(key=lambda row: float("inf") if row.usd is None else row.usd)
        best = rows[0]
        told = f"{best.usd:.2f} USD" if best.usd is not None else "nobody knows the price"
        return CostOutcome(
            summary=f"{hours:g} h from {told} ({best.market}, {best.zone}); "
            f"{sum(row.allowed for row in rows)} of {len(rows)} places are within the limits.",
            next_step=find,
            hours=hours,
            places=rows,
            budget_usd=limits.budget_usd,
            max_hours=limits.max_hours,
            not_included=list(_NOT_IN_ESTIMATE),
        )


class QuotaToolset(Toolset):
    """Where the account may rent."""

    toolset_name = "quota"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        self._plane = cast(CapacityPlane, context.plane)

    @property
    def _limits(self) -> CapacitySettings:
        return cast(CapacitySettings, self.context.settings)

    @rig_tool(title="Zones with quota", effect="reads")
    async def get_zones_with_quota(self) -> QuotaOutcome:
        """The {payer}'s quota for a {rented} in every zone and way of renting that has it on offer,
        those with room first, and what could not be read. Quota is permission, not capacity: a zone
        with quota may be sold out. Takes up to 45 seconds; changes and costs nothing."""
        offers = await self._plane.offers()
        return await self._quotas((offer.zone, offer.market) for offer in offers)

    @rig_tool(title="Check the quota of a zone", effect="reads")
    async def check_quota(
        self, zone: Annotated[str, Field(max_length=40, description="One zone, as ZONES has it.")]
    ) -> QuotaOutcome:
        """The {payer}'s quota for a {rented} in one zone, for each of the rig's ways of renting:
        limit, used, free. {quota_rule}. Takes seconds; changes
        and costs nothing."""
        checked_name("zone", "zone", zone)
        markets = listed(self._limits.markets) or [one.market for one in await self._plane.offers()]
        return await self._quotas((zone, cast(RentalMarket, market)) for market in markets)

    async def _quotas(self, places: Iterable[tuple[str, RentalMarket]]) -> QuotaOutcome:
        """The quotas of `places`. Raises the first refusal where nothing at all was read."""
        wanted = [place for place in dict.fromkeys(places) if place[1] in get_args(RentalMarket)]
        read, left = wanted[:_QUOTA_PLACES], wanted[_QUOTA_PLACES:]
        gate = asyncio.Semaphore(_QUOTAS_AT_ONCE)
        found = await asyncio.gather(*(self._quota(zone, market, gate) for zone, market in read))
        rows = [row for row in found if isinstance(row, QuotaRow)]
        refusals = [error for error in found if isinstance(error, RigError)]
        if refusals and not rows:
            raise refusals[0]
        unread = [
            f"{zone} {market}: {row.error_class} {row.what}"
            for (zone, market), row in zip(read, found, strict=True)
            if isinstance(row, RigError)
        ]
        unread += [f"{zone} {market}: not asked, too many places" for zone, market in left]
        rows.sort(key=lambda row: row.free <= 0)
        return self._quota_outcome(rows, unread)

    async def _quota(
        self, zone: str, market: RentalMarket, gate: asyncio.Semaphore
    ) -> QuotaRow | RigError:
        async with gate:
            try:
                quota = await self._plane.quota(zone, market)
            except RigError as error:
                return error
        return QuotaRow(
            zone=zone,
            market=market,
            quota=quota.name,
            limit=quota.limit,
            used=quota.used,
            free=max(0, quota.limit - quota.used),
        )

    def _quota_outcome(self, rows: list[QuotaRow], unread: list[str]) -> QuotaOutcome:
        roomy = [row for row in rows if row.free > 0]
        told = f"{len(roomy)} of {len(rows)} places have quota left"
        told += f", {len(unread)} were not read." if unread else "."
        find = f"find_{self.context.vocabulary['hardware']}()"
        step = (
            find if roomy else f"a person requests more ({self.context.vocabulary['quota_where']})"
        )
        return QuotaOutcome(summary=told, next_step=step, places=rows, unread=unread)


def secret_name(settings: RigSettings) -> str:
    """The secret of HF_SECRET. Raises RigError INVALID where it names none."""
    name = str(getattr(settings, "hf_secret", ""))
    if not name:
        raise RigError("INVALID", "HF_SECRET in tpu.env names no secret", "set HF_SECRET=hf-token")
    return name


def _cost_row(offer: Offer, hours: float, limits: CapacitySettings) -> CostRow:
    """Hours by price; `allowed` as a create would judge it."""
    price = offer.price_per_hour_usd
    usd = None if price is None else round(hours * price, 4)
    affordable = limits.unknown_price_ok if usd is None else usd <= limits.budget_usd
    return CostRow(
        zone=offer.zone,
        market=offer.market,
        usd=usd,
        usd_per_hour=price,
        price_source=offer.price_source,
        allowed=affordable and hours <= limits.max_hours,
    )
