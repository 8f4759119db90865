"""What a machine on Compute Engine is to be: the rig's values, and the command that asks for it.

Knows what goes into the command and nothing of what comes back; who may ask, and when, others know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from forge.parts.boundaries.gcloud import GcloudCall, GcloudFlag
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.planes.capacity_plane import Order, RentalMarket, listed
from forge.parts.planes.compute_things import COMPUTE_MODELS, disk_mark
from forge.parts.planes.google_settings import NO_ADDRESS_CAUTION, GoogleSettings, account_email

# A wait for capacity in seconds: at most two hours (Google's page of flex-start VMs, 2026), and not
# less than 90 s, as recalled; a longer one than was asked for does no harm.
_WAIT_LONGEST_S, _WAIT_SHORTEST_S = 7200, 90


class ComputeEngineSettings(GoogleSettings):
    """The keys of a rig on Compute Engine."""

    machine_type: str = Field(
        default="ct6e-standard-1t",
        pattern=r"^[a-z][a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){1,4}$",
        description="The machine type to rent.",
    )
    chip: str = Field(
        default="v6e", pattern=r"^[a-z0-9]{2,12}$", description="Its chip, for prices."
    )
    image_family: str = Field(
        default="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
        pattern=r"^[a-z][a-z0-9-]{1,62}$",
        description="The boot disk's image family.",
    )
    image_project: str = Field(
        default="ubuntu-os-accelerator-images",
        pattern=r"^[a-z][a-z0-9.:-]{1,62}$",
        description="The project that publishes that family.",
    )
    boot_disk_gb: int = Field(
        default=200, ge=50, le=2000, description="Size of the boot disk in GB."
    )
    boot_disk_type: str = Field(
        default="hyperdisk-balanced",
        pattern=r"^[a-z][a-z0-9-]{1,40}$",
        description="Type of the boot disk; v6e machines take no pd-* disks.",
    )
    reservation: str = Field(
        default="",
        pattern=r"^[a-z0-9-]{0,63}$",
        description="The reservation to rent from, for the market 'reserved'.",
    )


def compute_cautions(settings: ComputeEngineSettings) -> tuple[str, ...]:
    """What these settings leave a machine without, in sentences."""
    found = []
    if not settings.service_account:
        found.append(
            "SERVICE_ACCOUNT is empty: the machine runs as nobody, so it can read no secret, save "
            "no cache and delete itself not at all"
        )
    if not settings.external_ip:
        found.append(NO_ADDRESS_CAUTION)
    return tuple(found)


def wished_markets(settings: ComputeEngineSettings) -> list[RentalMarket]:
    """The ways of renting of MARKETS, in its order; without any, all that these settings allow.

    Raises RigError INVALID for a word that is none, and for a reservation without its name.
    """
    words = listed(settings.markets)
    strange = [word for word in words if word not in COMPUTE_MODELS]
    if strange:
        known = ", ".join(COMPUTE_MODELS)
        raise RigError("INVALID", f"MARKETS: {', '.join(strange)} is none of {known}")
    if "reserved" in words and not settings.reservation:
        raise RigError("INVALID", "MARKETS has 'reserved', and RESERVATION names none")
    unnamed = {"reserved"} if not settings.reservation else set()
    return [one for one in COMPUTE_MODELS if one not in unnamed and not words] or [
        one for word in words for one in COMPUTE_MODELS if one == word
    ]


def compute_order_call(
    settings: ComputeEngineSettings, order: Order, boot: Mapping[str, Path]
) -> GcloudCall:
    """The whole create in one call: labels, hard stop, what is booted, and a disk that goes with
    the machine and bears the labels in its description."""
    disk = {
        "boot": "yes",
        "auto-delete": "yes",
        "name": order.name,
        "size": f"{settings.boot_disk_gb}GB",
        "type": settings.boot_disk_type,
        "image-family": settings.image_family,
        "image-project": settings.image_project,
        "description": disk_mark(order.labels),
    }
    flags: dict[str, GcloudFlag] = {
        "zone": order.zone,
        "machine-type": settings.machine_type,
        "provisioning-model": COMPUTE_MODELS[order.market],
        "max-run-duration": f"{order.life_s}s",
        "instance-termination-action": "DELETE",
        "maintenance-policy": "TERMINATE",
        "create-disk": [f"{key}={value}" for key, value in disk.items()],
        "labels": order.labels,
        "metadata-from-file": boot,
        "async": True,
        **_market_flags(order, settings),
        **_network_flags(settings),
    }
    account = account_email(settings)
    flags["service-account"] = account or False
    flags["scopes"] = ["cloud-platform"] if account else False
    return GcloudCall(("compute", "instances", "create"), order.name, flags)


def _market_flags(order: Order, settings: ComputeEngineSettings) -> dict[str, GcloudFlag]:
    if order.market == "reserved":
        if not settings.reservation:
            raise invalid_parameter("market", "'reserved' needs RESERVATION in tpu.env")
        return {"reservation-affinity": "specific", "reservation": settings.reservation}
    flags: dict[str, GcloudFlag] = {"reservation-affinity": "none"}
    if order.market == "flex-start":
        wait = min(max(order.valid_s, _WAIT_SHORTEST_S), _WAIT_LONGEST_S) if order.valid_s else 0
        flags["request-valid-for-duration"] = f"{wait}s"
    return flags


def _network_flags(settings: ComputeEngineSettings) -> dict[str, GcloudFlag]:
    flags: dict[str, GcloudFlag] = {}
    if settings.network:
        flags["network"] = settings.network
    if settings.subnet:
        flags["subnet"] = settings.subnet
    if not settings.external_ip:
        flags["address"] = False
    return flags
