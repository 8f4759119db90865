"""What Compute Engine offers: zones, chips, prices, quotas, and what a zone has on its list.

Knows no command: whether a zone lists a machine type, it is told by whoever can ask.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.parts.boundaries.gcloud_answers import field_text
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.prices import prices_for
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import RentalMarket

# Where v6e is handed out, in the order of a wish: Google's page of regions and zones for TPUs, as
# read in 2026. A zone that is not among them may have it since; tpu.env names it then.
V6E_ZONES = (
    "europe-west4-a",
    "us-east5-a",
    "us-east5-b",
    "us-east1-d",
    "asia-northeast1-b",
    "us-central1-b",
)
# Compute Engine's quotas of v6e chips, by region; spot and flex-start draw on the preemptible one,
# and flex-start falls back to the other (Google's page of provisioning models, 2026).
SPOT_CHIP_QUOTA = "PREEMPTIBLE-TPU-V6E-per-project-region"
FAMILY_CHIP_QUOTA = "TPUS-PER-TPU-FAMILY-per-project-region"
CHIP_QUOTA_FAMILY = "CT6E"
_CHIPS = re.compile(r"ct\w+-\w+-(\d+)t")
_LISTS_S = 5.0  # seconds for all zones together: what a plane's read may take
_LISTS_AT_ONCE = 4
_LISTS_KEPT_S = 3600.0  # a catalogue changes by announcement


@dataclass(frozen=True)
class Listing:
    """What a zone's list says of the machine: never "yes", because it does not tell what is
    free."""

    available: Literal["no", "unknown"]
    how: str


class ComputeCatalogue:
    """Whether zones have a machine type on their list. `clock` gives the moment, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], tuple[float, Listing]] = {}

    async def look(
        self, machine_type: str, zones: Sequence[str], has: Callable[[str, str], Awaitable[bool]]
    ) -> dict[str, Listing]:
        """Each zone's listing, kept for an hour. Several zones are read at once, for five seconds
        in all; a zone that was not read by then is unknown. Raised is what each of them would say:
        AUTH, DENIED, INVALID."""
        now, room = self._clock(), asyncio.Semaphore(_LISTS_AT_ONCE)

        async def one(zone: str) -> Listing:
            async with room:
                return await _listing(machine_type, zone, has)

        found: dict[str, Listing] = {}
        tasks: dict[str, asyncio.Task[Listing]] = {}
        for zone in zones:
            at, listing = self._kept.get((machine_type, zone), (0.0, None))
            if listing is not None and now < at + _LISTS_KEPT_S:
                found[zone] = listing
            else:
                tasks[zone] = asyncio.create_task(one(zone))
        try:
            if tasks:
                await asyncio.wait(
                    tasks.values(), timeout=_LISTS_S, return_when=asyncio.FIRST_EXCEPTION
                )
            for zone, task in tasks.items():
                found[zone] = task.result() if task.done() else _UNREAD_LISTING
                if found[zone] is not _UNREAD_LISTING:
                    self._kept[machine_type, zone] = (now, found[zone])
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return found


_UNREAD_LISTING = Listing("unknown", "the zone's list could not be read in time")


async def _listing(
    machine_type: str, zone: str, has: Callable[[str, str], Awaitable[bool]]
) -> Listing:
    try:
        if await has(machine_type, zone):
            how = "the zone has it on its list; whether one is free only a request tells"
            return Listing("unknown", how)
        return Listing("no", "the zone does not have the machine type on its list")
    except RigError as error:
        if f"zones/{zone}' was not found" in error.what or "Unknown zone" in error.what:
            return Listing("no", "there is no such zone")
        if error.error_class in ("AUTH", "DENIED", "INVALID"):
            raise
        return _UNREAD_LISTING


def quota_limit(info: Any, region: str, family: str = "") -> int:
    """The limit that a quota's description has for a region, in chips; -1 is no limit.

    An entry that names the region counts before one that only applies there. Raises UNKNOWN where
    neither is told: that is no zero.
    """
    entries = info.get("dimensionsInfos") if isinstance(info, dict) else None
    general: int | None = None
    for entry in entries if isinstance(entries, list) else []:
        if field_text(entry, "dimensions", "tpu_family") not in ("", family):
            continue
        value = field_text(entry, "details", "value")
        if not re.fullmatch(r"-?\d+", value):
            continue
        if field_text(entry, "dimensions", "region") == region:
            return int(value)
        places = entry.get("applicableLocations")
        if isinstance(places, list) and region in places:
            general = int(value)
    if general is None:
        raise RigError("UNKNOWN", f"the quota's description has no value for {region}")
    return general


def compute_chips(machine_type: str) -> int:
    """How many chips a TPU machine type has: 1 of ct6e-standard-1t. 1 where its name has none."""
    found = _CHIPS.fullmatch(machine_type)
    return int(found[1]) if found else 1


def compute_price(
    chip: str, machine_type: str, zone: str, market: RentalMarket
) -> tuple[float | None, str]:
    """(USD an hour, where that is from). The boot disk and traffic are not in it."""
    if market == "reserved":
        return None, "a reservation is paid for whether it is used or not"
    region, chips = region_of(zone), compute_chips(machine_type)
    for price in prices_for(chip, region=region, provisioning=market):
        if price.provider == "google" and price.rate.value is not None:
            source = f"{price.rate.source}, {price.rate.date}; without the disk"
            return round(price.rate.value * chips, 4), source
    return None, f"no price of {chip} as {market} in {region} is known here"
