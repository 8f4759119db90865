"""The imaginary plane: rents machines of the JSON provider, and serves on the one it rented.

Translates the provider's refusals into error classes; knows no runtime. The machine's processes
are processes of this computer, kept by the local plane's own code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.billing import RunningCost, cost_since
from forge.parts.planes.capacity_plane import (
    CapacitySettings,
    Census,
    Offer,
    Order,
    Quota,
    Rental,
    RentalMarket,
    expiry_of,
    is_ours,
    rental_name,
)
from forge.parts.planes.plane import Finding, Instance, Launch, Room
from forge.parts.planes.this_computer import ThisComputer
from tests.imaginary.world import ImaginaryWorld, ProviderError

_CLASS_OF_STATUS: dict[int, ErrorClass] = {
    401: "AUTH",
    403: "DENIED",
    404: "NOT_FOUND",
    409: "EXISTS",
    429: "QUOTA",
    503: "CAPACITY",
}


class ImaginarySettings(CapacitySettings):
    """The keys of this plane."""

    imaginary_world: str = Field(description="The JSON file that is the provider.")
    port: int = Field(ge=1024, le=65535, description="The loopback end of the tunnel.")


class ImaginaryPlane:
    """One rented TPU and what runs on it."""

    vocabulary: Mapping[str, str] = {
        "hardware": "tpu",
        "order": "tpu",
        "rental": "tpu",
        "destroy": "destroy",
        "rented": "TPU machine",
        "place": "the rented TPU machine",
        "machine": "process on the rented TPU machine",
        "cost": "The TPU machine is billed by the hour, the call costs nothing",
        "payer": "project",
        "quota_rule": "Spot draws on a quota of its own",
        "quota_where": "the provider's console",
    }
    read_back_s = 1.2
    settle_s = 3.0

    def __init__(
        self, paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
    ) -> None:
        self._host = ThisComputer(paths, label, journal)
        self._load = load
        marks = dict(part.split("=", 1) for part in label.split(";"))
        self._rig, self._owner = marks["rig"], marks["owner"]

    @property
    def _world(self) -> ImaginaryWorld:
        return ImaginaryWorld(Path(cast(ImaginarySettings, self._load()).imaginary_world))

    @property
    def hard_stop(self) -> str:
        return "the provider deletes it" if self._world.look()["hard_stop"] else ""

    # Capacity

    async def offers(self) -> Sequence[Offer]:
        return [
            Offer(
                zone=zone,
                market="on-demand",
                price_per_hour_usd=facts["price"],
                price_source="the world's price list",
                available="unknown",
                how_known="the provider tells only on a create",
            )
            for zone, facts in self._world.offers().items()
        ]

    async def quota(self, zone: str, market: RentalMarket) -> Quota:
        limit, used = self._world.offers()[zone]["quota"]
        return Quota(name="TPUs per project and region", limit=limit, used=used)

    async def create(self, order: Order) -> None:
        try:
            self._world.create(order.name, order.zone, dict(order.labels), order.life_s)
        except ProviderError as error:
            raise _mutation_fault(error) from None

    async def census(self) -> Census:
        rentals: list[Rental] = []
        unread: list[str] = []
        for zone in self._world.offers():
            try:
                rentals += [self._rental(raw) for raw in self._world.list_zone(zone)]
            except ProviderError:
                unread.append(zone)
        return Census(rentals, unread)

    async def describe(self, name: str, zone: str) -> Rental:
        try:
            return self._rental(self._world.get(name, zone))
        except ProviderError as error:
            status = _CLASS_OF_STATUS.get(error.status, "UNREACHABLE")
            raise RigError(status, error.message) from None

    async def destroy(self, rental: Rental) -> None:
        try:
            self._world.delete(rental.provider_id)
        except ProviderError as error:
            raise _mutation_fault(error) from None
        finding = await self._host.find()
        if finding.instance is not None:  # a machine takes its processes along
            await self._host.stop(finding.instance)

    async def cost_so_far(self) -> RunningCost | None:
        """What our machine costs, whatever runs on it; None when there surely is none."""
        census = await self.census()
        for rental in census.rentals:
            if is_ours(rental.labels, self._rig, self._owner) and rental.kind == "machine":
                return cost_since(
                    f"{rental.name} in {rental.zone}",
                    rental.created_unix,
                    rental.price_per_hour_usd,
                    expiry_of(rental.labels),
                    time.time(),
                )
        if census.unread:
            raise RigError("UNREACHABLE", f"not read: {', '.join(census.unread)}", "list_tpus()")
        return None

    def _rental(self, raw: dict[str, Any]) -> Rental:
        price = self._world.offers()[raw["zone"]]["price"]
        return Rental(**{"price_per_hour_usd": price, **raw})

    # Serving

    async def _machine(self) -> Rental:
        """Our running machine, read now: nothing is sent to an address that only was ours."""
        for rental in (await self.census()).rentals:
            ours = is_ours(rental.labels, self._rig, self._owner)
            if ours and rental.name == rental_name(self._rig, self._owner):
                if rental.state == "running":
                    return rental
        raise RigError("NOT_FOUND", "this rig has no running TPU machine", "find_tpu()")

    async def room(self, disk_folder: Path) -> Room:
        return Room(16_000_000_000, 16_000_000_000, 100_000_000_000)

    async def check_port(self, port: int) -> None:
        await self._machine()
        await self._host.check_port(port)

    async def start(self, launch: Launch, serve_id: str, job_id: str) -> Instance:
        await self._machine()
        return await self._host.start(launch, serve_id, job_id)

    async def mark_ready(self, instance: Instance) -> Instance:
        return await self._host.mark_ready(instance)

    async def find(self) -> Finding:
        """What runs on the machine, and beside it what is billed whether or not anything runs."""
        finding = await self._host.find()
        try:
            machine = await self._machine()
            note = f"{machine.name} in {machine.zone} is rented and billed until it is destroyed"
        except RigError as error:
            note = error.what
        return Finding(finding.instance, (*finding.notes, note))

    async def stop(self, instance: Instance) -> None:
        await self._host.stop(instance)

    async def logs(self, instance: Instance | None, lines: int) -> str:
        return await self._host.logs(instance, lines)

    async def endpoint(self, instance: Instance) -> str:
        await self._machine()
        return await self._host.endpoint(instance)


def _mutation_fault(error: ProviderError) -> RigError:
    """A refusal by its status; anything else was sent and its fate is not known."""
    return RigError(_CLASS_OF_STATUS.get(error.status, "UNKNOWN"), error.message)
