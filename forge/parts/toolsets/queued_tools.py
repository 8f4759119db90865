"""The tools of the Cloud TPU API's own words: whether a request was granted, and that one exists.

Knows the plane by its verbs alone.
"""

from __future__ import annotations

from typing import cast

from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.planes.capacity_plane import CapacityPlane, Rental
from forge.parts.toolsets.capacity import (
    Hours,
    Market,
    RentAnyway,
    WaitMinutes,
    Zone,
    prepare_rental,
)
from forge.parts.toolsets.capacity_search import rented_beside_none
from forge.parts.toolsets.machine_tools import ConsolePlane
from forge.parts.toolsets.rental import Rentals
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool


class AvailabilityOutcome(Outcome):
    """This rig's one request."""

    exists: bool
    granted: bool
    name: str = ""
    zone: str = ""
    state: str = ""


class QueuedResourceToolset(Toolset):
    """Is it granted, make sure that it exists."""

    toolset_name = "queued"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        words = context.vocabulary
        self._find = f"find_{words['hardware']}"
        verbs = (self._find, f"list_{words['rental']}s", f"describe_{words['rental']}")
        self.rentals = Rentals(context, cast(CapacityPlane, context.plane), verbs)

    @rig_tool(name="check_tpu_availability", title="Is the request granted", effect="reads")
    async def check_availability(self) -> AvailabilityOutcome:
        """Whether this rig's request has become a {rented}: state and place of the one that it
        has, or that it has none. Creates nothing and costs nothing."""
        try:
            machine = await cast(ConsolePlane, self.context.plane).machine()
        except RigError as error:
            if error.error_class != "NOT_FOUND":
                raise
            return self._available(None, error.what)
        return self._available(machine, "")

    @rig_tool(name="manage_queued_resource", title="Make sure of the request", effect="changes")
    async def manage(
        self,
        zone: Zone,
        hours: Hours = 1.0,
        market: Market = "",
        wait_minutes: WaitMinutes = 30,
        override: RentAnyway = False,
    ) -> AvailabilityOutcome:
        """Make sure that this rig has a request in a zone: tells of the one that exists, in any
        zone, or creates it as create_{order} does (COSTS MONEY once it is granted). Touches nothing
        of another rig and never makes a second."""
        checked_name("zone", "zone", zone)
        mine, _, _ = await self.rentals.census()
        if mine:
            return self._available(mine[0], "")
        await prepare_rental(self.context, hours, override)
        valid_s = round(wait_minutes * 60)
        order = (zone, hours, market, valid_s)
        created = await rented_beside_none(self.context, self.rentals, *order)
        return self._available(created.rental, "")

    def _available(self, machine: Rental | None, why: str) -> AvailabilityOutcome:
        if machine is None:
            return AvailabilityOutcome(
                summary=f"There is no request of this rig: {why}.",
                next_step=f"{self._find}()",
                exists=False,
                granted=False,
            )
        granted = machine.state == "running"
        words = "granted" if granted else f"not granted ({machine.state})"
        ready = f"wait_for_{self.context.vocabulary['ready']}_ready(wait_s=50)"
        return AvailabilityOutcome(
            summary=f"{machine.name} in {machine.zone} is {words}.",
            next_step=ready if granted else "check_tpu_availability() in a minute",
            exists=True,
            granted=granted,
            name=machine.name,
            zone=machine.zone,
            state=machine.state,
        )
