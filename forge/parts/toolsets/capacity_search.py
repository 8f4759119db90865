"""Finding a machine: census, catalogue, quota, budget and the sweep as one job.

Knows no provider: the plane offers, asks, looks and cancels. What was found is written down, so
that every later tool acts where it was found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, cast

from pydantic import Field

from forge.parts.boundaries.refusal_program import refusal_reader
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobRunner
from forge.parts.ground.locks import held_lock
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.knowledge.sweep_plan import (
    PassedOver,
    SweepPlace,
    SweepRecord,
    SweepWish,
    open_places,
)
from forge.parts.planes.capacity_plane import (
    Offer,
    Rental,
    RentalMarket,
    listed,
    rental_labels,
)
from forge.parts.planes.rented_record import SWEEP_FOLDER
from forge.parts.planes.sweep import CapacitySweep
from forge.parts.planes.sweep_plane import SweepPlane, WallClock
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.capacity import (
    CapacityToolset,
    Hours,
    RentAnyway,
    prepare_rental,
)
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence
from forge.parts.toolsets.rental import Created, Rentals
from forge.parts.toolsets.toolset import RigContext, rig_tool

SWEEP_JOB = "sweep"
SWEEP_PHASES = ("places", "capacity")
_QUOTA_READS = 3  # reads of the provider's tool, each a process

Zones = Annotated[
    list[Annotated[str, Field(max_length=40)]],
    Field(max_length=30, description="Zones to ask, in order; empty: ZONES of the settings."),
]


class SearchOutcome(Outcome):
    """Where a search stands. A machine that was found is billed."""

    state: str
    job_id: str
    said: str = Field(description="What the search did last.")
    zone: str = ""
    name: str = ""
    market: str = ""
    waited_s: float | None = None
    asked: list[str] = Field(
        default_factory=list, description="Each request so far: place, how it ended, why."
    )


class SearchingCapacityToolset(CapacityToolset):
    """The capacity tools of planes where a machine has to be looked for."""

    toolset_name = "capacity"

    def job_runners(self) -> dict[str, JobRunner]:
        return {SWEEP_JOB: self.run_search}

    @rig_tool(name="find_{hardware}", title="Find a {rented} and take it", effect="changes")
    async def find(  # type: ignore[override]
        self,
        ctx: Caller,
        zones: Zones = [],  # noqa: B006  # the schema's default; never changed
        wait_minutes: Annotated[
            float, Field(ge=1, le=1440, description="Give up after so many minutes.")
        ] = 120,
        budget_usd: Annotated[
            float, Field(ge=0, le=10_000, description="Most it may cost; 0: BUDGET_USD.")
        ] = 0,
        hours: Hours = 1.0,
        wait_s: WaitSeconds = 0,
        override: RentAnyway = False,
    ) -> SearchOutcome:
        """Look for a zone that has a {rented} and take it there, as a job: asks zone after zone, at
        most one live request, follows the provider's hints, gives up after wait_minutes. COSTS
        MONEY from the moment one is granted, at most hours times its price; a queued request costs
        nothing. A search under way is followed instead of beginning a second."""
        for zone in zones:
            checked_name("zone", "zones", zone)
        job = await self._search_begun(list(zones), wait_minutes, budget_usd, hours, override)
        return self._searched(await follow_job(self.context, job.id, wait_s, ctx))

    async def _search_begun(
        self, zones: list[str], wait_minutes: float, budget_usd: float, hours: float, override: bool
    ) -> JobRecord:
        """The search under way, or a new one after every refusal that can be known at once."""
        context = self.context
        async with held_lock(context.paths.state, "searching"):
            active = context.jobs.active(SWEEP_JOB)
            if active is not None:
                return active
            self._refuse_money(budget_usd, hours)
            async with held_lock(context.paths.state, "capacity"):
                await self.rentals.refuse_second()
                self.rentals.book.forget_gone()
            await prepare_rental(context, hours, override)
            arguments = {
                "zones": zones,
                "wait_s": wait_minutes * 60,
                "budget_usd": budget_usd or self.rentals.settings.budget_usd,
                "hours": hours,
            }
            job = context.jobs.new(SWEEP_JOB, arguments, SWEEP_PHASES)
            context.journal.append("search asked", job=job.id, **arguments)
            context.jobs.start_worker(job, context.server_file)
            return job

    async def _rented(self, zone: str, hours: float, market: str, valid_s: int) -> Created:
        return await rented_beside_none(self.context, self.rentals, zone, hours, market, valid_s)

    def _refuse_plan(self, rental: Rental) -> None:
        if rental.kind == "machine":  # a search whose request vanishes asks in the next place
            refuse_beside_search(self.context, "it would rent another one in its place")

    def _refuse_money(self, budget_usd: float, hours: float) -> None:
        settings = self.rentals.settings
        if budget_usd > settings.budget_usd:
            raise RigError(
                "DENIED",
                f"budget_usd: {budget_usd:g} is over BUDGET_USD={settings.budget_usd:g}; nothing "
                "was asked for",
                "name less, or the user may raise BUDGET_USD",
            )
        if hours > settings.max_hours:
            raise RigError(
                "DENIED",
                f"hours: {hours:g} are more than MAX_HOURS={settings.max_hours:g}; nothing was "
                "asked for",
                "ask for fewer hours",
            )

    # The job

    async def run_search(self, progress: JobProgress) -> dict[str, Any]:
        """The worker's part: choose the places, sweep, write down what was found."""
        context, given = self.context, progress.record.arguments
        progress.update(phase="places", message="reading the catalogue and the quotas")
        wish = await self._wish(given)

        def tell(sentence: str) -> None:
            progress.update(phase="capacity", message=sentence.rstrip("."))

        tell(f"{len(wish.places)} places to ask, {len(wish.passed_over)} left out")
        sweep = CapacitySweep(
            cast(SweepPlane, self.plane),
            wish,
            context.paths.state / SWEEP_FOLDER,
            WallClock(),
            tell,
            context.journal,
            reader=refusal_reader(context.beside("triage.py")),
        )
        record = await sweep.run()
        assert record.found is not None
        with suppress(RigError):  # the sweep's own record names it as well
            found = record.found
            self.rentals.record(await self.plane.describe(found.request.name, found.zone))
        return _search_result(record)

    async def _wish(self, given: Mapping[str, Any]) -> SweepWish:
        settings, context = self.rentals.settings, self.context
        hours, clock = float(given["hours"]), WallClock()
        offers = await self.plane.offers()
        zones = list(given["zones"]) or listed(settings.zones)
        zones = zones or list(dict.fromkeys(offer.zone for offer in offers))
        markets = listed(settings.markets) or list(dict.fromkeys(o.market for o in offers))
        wished = [SweepPlace(zone, market) for market in markets for zone in zones]
        # Where the catalogue lacks it a request would be refused, as if the order were at fault.
        there = [offer for offer in offers if offer.available != "no"]
        offered = {SweepPlace(o.zone, o.market): o.price_per_hour_usd for o in there}
        dear = self._too_dear(offers, hours, float(given["budget_usd"]))
        affordable = [place for place in wished if place not in dear]
        quotas = await self._quotas_left([place for place in affordable if place in offered])
        places, others = open_places(affordable, offered, quotas)
        over = [PassedOver(place, dear[place], "over budget") for place in wished if place in dear]
        life, now = round(hours * 3600), clock.now()
        return SweepWish(
            project=str(getattr(settings, "project", "")),
            machine=context.vocabulary["rented"],
            name_stem=self.rentals.name,
            places=places,
            deadline_unix=now + float(given["wait_s"]),
            life_s=life,
            labels=rental_labels(context.rig, context.owner, "", int(now) + life),
            passed_over=[*others, *over],
        )

    def _too_dear(
        self, offers: Sequence[Offer], hours: float, budget_usd: float
    ) -> dict[SweepPlace, str]:
        """The places that the settings or this search's budget forbid, and why."""
        dear: dict[SweepPlace, str] = {}
        for offer in offers:
            try:
                cost = self.rentals.within_budget(offer, hours)
            except RigError as error:
                dear[SweepPlace(offer.zone, offer.market)] = error.what
                continue
            if cost is not None and cost > budget_usd:
                why = f"{cost:g} USD are over the {budget_usd:g} of this search"
                dear[SweepPlace(offer.zone, offer.market)] = why
        return dear

    async def _quotas_left(self, places: Sequence[SweepPlace]) -> dict[SweepPlace, int]:
        """How many machines may still be had in each place; what cannot be read is left out."""
        gate = asyncio.Semaphore(_QUOTA_READS)

        async def left(place: SweepPlace) -> int | None:
            try:
                async with gate:
                    quota = await self.plane.quota(place.zone, cast(RentalMarket, place.market))
            except RigError as error:
                if error.error_class == "AUTH":
                    raise
                return None
            return quota.limit - quota.used

        found = await asyncio.gather(*(left(place) for place in places))
        return {p: n for p, n in zip(places, found, strict=True) if n is not None}

    # The answer

    def _searched(self, job: JobRecord) -> SearchOutcome:
        if job.error is not None:
            words, _, step = job.error.text.partition(" Next: ")
            raise RigError(job.error.error_class, words.partition(" ")[2], step)
        result = job.result
        words = progress_sentence(job)
        if job.state == "done":
            words = f"found {result['name']} in {result['zone']} ({result['market']}); it is billed"
            step = f"wait_for_{self.context.vocabulary['ready']}_ready(wait_s=50)"
        else:
            step = f"get_job(job_id='{job.id}', wait_s=50); cancel_job ends the search"
        return SearchOutcome(
            summary=f"Search {job.id}: {words}.",
            next_step=step if job.state in ("done", "queued", "running") else f"{self._find}()",
            state=job.state,
            job_id=job.id,
            said=job.message,
            **result,
        )


async def rented_beside_none(
    context: RigContext, rentals: Rentals, zone: str, hours: float, market: str, valid_s: int
) -> Created:
    """`Rentals.create`, or RigError BUSY beside a search. The two would make twins: a search waits
    for the next place without a request that could be seen."""
    async with held_lock(context.paths.state, "searching"):
        refuse_beside_search(context, "nothing was created")
        return await rentals.create(zone, hours, market, valid_s)


def refuse_beside_search(context: RigContext, why: str) -> None:
    """Raise RigError BUSY while a search is under way; `why` is what would go wrong."""
    active = context.jobs.active(SWEEP_JOB)
    if active is not None:
        raise RigError(
            "BUSY",
            f"the search {active.id} is under way; {why}",
            f"get_job(job_id='{active.id}'), or cancel_job(job_id='{active.id}'), which ends it "
            "and what it asked for",
        )


def _search_result(record: SweepRecord) -> dict[str, Any]:
    """What the job's record keeps of a sweep that found."""
    found = record.found
    assert found is not None
    return {
        "zone": found.zone,
        "name": found.request.name,
        "market": found.request.market,
        "waited_s": record.waited_s,
        "asked": [
            f"{attempt.zone} ({attempt.market}): {attempt.ended}"
            + (f", {attempt.said}" if attempt.said else "")
            for attempt in record.attempts
        ],
    }
