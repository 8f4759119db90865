"""What Compute Engine's zones, regions and images look like, and the words of their refusals.

Descriptions alone: they hold no state, and know of machines only what kinds there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.suites.fake_google_world import GoogleRefusal, GoogleWorld, zone_region

SERIAL_BUFFER = 1_048_576  # characters of a serial port that are kept
# What the provider says of an operation of its own, by the operation's type.
SYSTEM_MESSAGES = {
    "compute.instances.preempted": "Instance was preempted.",
    "compute.instances.guestTerminate": "Instance terminated by guest OS shutdown.",
}
MACHINE_TYPES = ("ct6e-standard-1t", "ct6e-standard-4t", "g2-standard-8", "n2-standard-2")


def zone_entry(link: Callable[[str], str], zone: str) -> dict[str, Any]:
    """A zone as the API shows it."""
    region = link(f"regions/{zone_region(zone)}")
    return {"name": zone, "status": "UP", "selfLink": link(f"zones/{zone}"), "region": region}


def region_entry(world: GoogleWorld, link: Callable[[str], str], region: str) -> dict[str, Any]:
    """A region with its quotas: none is left where the script says so for one of its zones."""
    full = any(zone_region(zone) == region for zone in world.script.quota)
    quotas = [
        {"metric": metric, "limit": 0.0 if full else limit, "usage": 0.0}
        for metric, limit in world.script.limits.items()
    ]
    self_link = link(f"regions/{region}")
    return {"name": region, "status": "UP", "selfLink": self_link, "quotas": quotas}


def machine_types(link: Callable[[str], str], zone: str) -> list[dict[str, Any]]:
    """The machine types of a zone; every zone has all of them."""
    return [
        {
            "name": name,
            "zone": zone,
            "guestCpus": 44,
            "memoryMb": 180_224,
            "selfLink": link(f"zones/{zone}/machineTypes/{name}"),
        }
        for name in MACHINE_TYPES
    ]


def image_entry(base: str, project: str, rest: str) -> dict[str, Any]:
    """The newest image of the family that ends the path `rest`, in the form that was asked for."""
    family = rest.rsplit("/", 1)[-1]
    name = f"{family}-v20260101"
    image = {
        "name": name,
        "family": family,
        "diskSizeGb": "10",
        "status": "READY",
        "selfLink": f"{base}/compute/v1/projects/{project}/global/images/{name}",
    }
    return {"image": image} if "imageFamilyViews" in rest else image


def quota_error(zone: str) -> dict[str, Any]:
    """An operation's error for a used up quota."""
    region = zone_region(zone)
    info = {
        "metricName": "compute.googleapis.com/tpus_per_tpu_family",
        "limitName": "TPUS-PER-TPU-FAMILY-per-project-region",
        "dimensions": {"region": region, "tpu_family": "CT6E"},
        "limit": 0,
    }
    what = f"Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region {region}."
    return {"code": "QUOTA_EXCEEDED", "message": what, "errorDetails": [{"quotaInfo": info}]}


def stockout_error(world: GoogleWorld, zone: str, body: dict[str, Any]) -> dict[str, Any]:
    """An operation's error for a zone without free machines, with the script's hint or without."""
    machine, hint = str(body.get("machineType", "")).rsplit("/", 1)[-1], world.script.hint
    if not hint:
        place = f"projects/{world.project}/zones/{zone}"
        what = f"The zone '{place}' does not have enough resources available to fulfill the "
        what += "request.  Try a different zone, or try again later."
        return {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": what}
    what = f"A {machine} VM instance is currently unavailable in the {zone} zone. Consider trying "
    what += f"your request in the {', '.join(hint)} zone(s), which currently has capacity to "
    what += "accommodate your request."
    seen = {"vmType": machine, "zone": zone, "zonesAvailable": ",".join(hint)}
    info = {"reason": "resource_availability", "metadatas": seen}
    code = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    return {"code": code, "message": what, "errorDetails": [{"errorInfo": info}]}


def serial_output(text: str, start: int) -> dict[str, Any]:
    """A serial port's text from `start` on: what is older than the buffer is gone, and a negative
    start counts from the end."""
    oldest = max(0, len(text) - SERIAL_BUFFER)
    start = max(oldest, len(text) + start if start < 0 else start)
    read = {"contents": text[start:], "start": str(start), "next": str(max(start, len(text)))}
    return {"kind": "compute#serialPortOutput", **read}


def quota_info(world: GoogleWorld, path: str) -> dict[str, Any]:
    """A quota's description, as the Cloud Quotas API has it: by region, or by zone for the Cloud
    TPU API; none is left where the script says so. Raises GoogleRefusal for what is not there."""
    parts = path.strip("/").split("/")
    service, name = parts[-3], parts[-1]
    limits = world.script.quotas
    if name not in limits:
        what = f"Quota info {name} for service {service} was not found."
        raise GoogleRefusal(404, "NOT_FOUND", what, "notFound")
    zonal = service.startswith("tpu.")
    places = world.script.zones if zonal else sorted(map(zone_region, world.script.zones))
    infos: list[dict[str, Any]] = []
    for place in dict.fromkeys(places):
        full = any(place in (zone, zone_region(zone)) for zone in world.script.quota)
        dimensions = {"zone" if zonal else "region": place}
        if "FAMILY" in name:
            dimensions["tpu_family"] = "CT6E"
        details = {"value": "0" if full else str(limits[name])}
        one = {"dimensions": dimensions, "details": details, "applicableLocations": [place]}
        infos.append(one)
    return {
        "name": path.strip("/").partition("/")[2],
        "quotaId": name,
        "service": service,
        "isPrecise": True,
        "dimensionsInfos": infos,
    }
