"""Where the Cloud TPU API hands out which chip, under which quota, and what it costs there.

Tables and pure functions over gcloud's JSON. Knows no queued resource and no command.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from forge.parts.boundaries.gcloud_answers import GcloudAnswer, field_text
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.prices import prices_for
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import RentalMarket

# Where the Cloud TPU API hands a chip out, in the order of a wish: Google's page of regions and
# zones for TPUs, as read in 2026; us-west4-a first, the only zone that people report to have taken
# a flex-start v5litepod-1. A zone that is not among them may have it since; tpu.env names it then.
TPU_API_ZONES: dict[str, tuple[str, ...]] = {
    "v5e": ("us-west4-a", "us-central1-a", "us-south1-a", "us-west1-c", "europe-west4-b"),
    "v6e": (
        *("europe-west4-a", "us-east5-a", "us-east5-b", "us-east1-d", "asia-northeast1-b"),
        "us-central1-b",
    ),
}
# The zones of a flex-start through this API, after the same page; Compute Engine has others.
TPU_FLEX_ZONES: dict[str, tuple[str, ...]] = {
    "v5e": ("us-west4-a", "us-central1-a"),
    "v6e": ("asia-northeast1-b", "us-east5-a"),
}
# Quota ids of tpu.googleapis.com, in chips, the preemptible first: flex-start and spot draw on it.
# Five public programs name them alike (2026).
TPU_QUOTAS: dict[str, tuple[str, str]] = {
    "v5e": (
        "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI",
        "TPUV5sLitepodPerProjectPerZoneForTPUAPI",
    ),
    "v6e": (
        "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI",
        "TPUV6EPerProjectPerZoneForTPUAPI",
    ),
}
PREEMPTIBLE_MARKETS: tuple[RentalMarket, ...] = ("flex-start", "spot")
TPU_NO_LIMIT = 1_000_000  # machines: what an unlimited quota (-1) counts as

_TPU_SIZE = re.compile(r"(v\d+[a-z]*)-(\d+)")
_CORE_COUNTED = ("v2", "v3", "v4", "v5p")  # their types count cores, two to a chip

# In the words of a refusal for a zone that the API does not have, or not for this project.
_NO_SUCH_ZONE = "is not found or access is unauthorized"


def tpu_chips(accelerator: str) -> int:
    """How many chips an accelerator type has: 4 of v5litepod-4. Raises INVALID."""
    matched = _TPU_SIZE.fullmatch(accelerator)
    if matched is None or int(matched[2]) < 1:
        raise RigError("INVALID", f"{accelerator[:40]!r} is no accelerator type such as v6e-1")
    size = int(matched[2])
    return max(1, size // 2) if matched[1] in _CORE_COUNTED else size


def tpu_family(accelerator: str) -> str:
    """What an accelerator type is without its size: v5litepod of v5litepod-4."""
    return accelerator.rpartition("-")[0]


def tpu_price(
    chip: str, accelerator: str, zone: str, market: RentalMarket
) -> tuple[float | None, str]:
    """(USD an hour, where that is from). Traffic and disks are not in it."""
    if market == "reserved":
        return None, "a reservation is paid for whether it is used or not"
    region = region_of(zone)
    for price in prices_for(chip, region=region, provisioning=market):
        if price.provider == "google" and price.rate.value is not None:
            figure = round(price.rate.value * tpu_chips(accelerator), 4)
            return figure, f"{price.rate.source}, {price.rate.date}"
    return None, f"no price of {chip} as {market} in {region} is known here"


def tpu_limit(info: Any, zone: str) -> int | None:
    """The limit, in chips, that a quota's description has for a zone; None is no limit (-1).

    Of several entries the first that applies counts: they stand in order, the most specific first.
    An entry without a value is a 0, which Google's JSON leaves out. Raises UNKNOWN where none
    applies.
    """
    entries = info.get("dimensionsInfos") if isinstance(info, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("details"), dict):
            continue
        named, places = field_text(entry, "dimensions", "zone"), entry.get("applicableLocations")
        if named == zone or (not named and (not places or zone in places)):
            value = field_text(entry, "details", "value") or "0"
            if re.fullmatch(r"-?\d+", value):
                return None if value == "-1" else int(value)
    raise RigError("UNKNOWN", f"the quota's description has no value for {zone}")


def lacks_zone(error: RigError) -> bool:
    """Whether the API has no such zone for this project: then nothing of it can be there either."""
    return _NO_SUCH_ZONE in error.what


def tpu_availability(
    answer: GcloudAnswer | RigError, chip: str, accelerator: str, zone: str, market: RentalMarket
) -> tuple[Literal["no", "unknown"], str]:
    """(Whether one can be had, how that is known), from a zone's list of accelerator types. Never
    "yes": the list does not tell what is free."""
    if isinstance(answer, RigError):
        if lacks_zone(answer):
            return "no", "the API has no such zone for this project"
        return "unknown", f"the zone's list could not be read ({answer.error_class})"
    if not any(field_text(one, "type") == accelerator for one in answer.things()):
        return "no", f"the zone does not have {accelerator} on its list"
    how = f"the zone has {accelerator} on its list; whether one is free only a request tells"
    if market == "flex-start" and zone not in TPU_FLEX_ZONES.get(chip, ()):
        how += "; Google's page of zones (2026) does not name it for flex-start"
    return "unknown", how
