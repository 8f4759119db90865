"""What a machine of the Cloud TPU API is to be: the rig's values, and the one command that asks.

Knows what goes into the command and nothing of what comes back; who may ask, and when, others know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from forge.parts.boundaries.gcloud import GcloudCall, GcloudFlag
from forge.parts.ground.errors import RigError
from forge.parts.planes.capacity_plane import Order, RentalMarket, listed
from forge.parts.planes.google_settings import NO_ADDRESS_CAUTION, GoogleSettings, account_email
from forge.parts.planes.tpu_catalogue import TPU_API_ZONES

QUEUED_RESOURCES = ("compute", "tpus", "queued-resources")
# gcloud's words for the ways of renting that this plane asks for, the one with an end first.
TPU_MARKETS: tuple[RentalMarket, ...] = ("flex-start", "spot", "on-demand")
# Nothing ends these on the provider's side: --max-run-duration is for flex-start alone (the flag's
# own help, gcloud 528).
ENDLESS_TPU_MARKETS: tuple[RentalMarket, ...] = ("spot", "on-demand")

_TPU_WAIT_S = 7200  # how long a request whose order names no time may stay in its queue


class CloudTpuSettings(GoogleSettings):
    """The keys of a rig on the Cloud TPU API. Without MARKETS it is flex-start alone, because
    nothing else has an end."""

    accelerator_type: str = Field(
        default="v5litepod-1",
        pattern=r"^v[0-9]{1,2}[a-z]{0,12}-[1-9][0-9]{0,3}$",
        description="The accelerator type to rent, as this API spells it.",
    )
    runtime_version: str = Field(
        default="v2-alpha-tpuv5-lite",
        pattern=r"^[a-z0-9][a-z0-9.-]{1,80}$",
        description="The machine's system, as this API spells it.",
    )
    chip: str = Field(
        default="v5e", pattern=r"^[a-z0-9]{2,12}$", description="Its chip, for prices and quotas."
    )


def tpu_zones(settings: CloudTpuSettings) -> list[str]:
    """The zones of ZONES, else all that are known to have the chip. Raises RigError INVALID."""
    zones = listed(settings.zones) or list(TPU_API_ZONES.get(settings.chip, ()))
    if not zones:
        what = f"no zone of the Cloud TPU API with {settings.chip} is known here"
        raise RigError("INVALID", what, "name them in ZONES of tpu.env")
    return zones


def tpu_markets(settings: CloudTpuSettings) -> list[RentalMarket]:
    """The ways of renting of MARKETS, in its order; without any, flex-start. Raises INVALID."""
    words = listed(settings.markets) or ["flex-start"]
    strange = [word for word in words if word not in TPU_MARKETS]
    if strange:
        known = ", ".join(TPU_MARKETS)
        raise RigError("INVALID", f"MARKETS: {', '.join(strange)} is none of {known}")
    return [one for word in words for one in TPU_MARKETS if one == word]


def tpu_hard_stop(settings: CloudTpuSettings) -> str:
    """How the provider ends a machine in the markets of the settings; empty where it does not."""
    markets = tpu_markets(settings)
    without = [market for market in markets if market in ENDLESS_TPU_MARKETS]
    if len(without) == len(markets):
        return ""
    but = f"; as {' or '.join(without)} it would never end by itself" if without else ""
    return f"the Cloud TPU API deletes a flex-start machine at --max-run-duration{but}"


def tpu_account(settings: CloudTpuSettings) -> str:
    """The e-mail of the service account that the machine runs as. Raises RigError INVALID without
    one: this API would take the project's default account."""
    if not settings.service_account:
        raise RigError(
            "INVALID",
            "SERVICE_ACCOUNT is empty, and the Cloud TPU API would let the machine act as the "
            "project's default account, which may do nearly everything; nothing was asked for",
            "name a service account of its own in tpu.env",
        )
    return account_email(settings)


def tpu_cautions(settings: CloudTpuSettings) -> tuple[str, ...]:
    """What these settings leave a machine without, in sentences."""
    found = []
    if not settings.service_account:
        found.append("SERVICE_ACCOUNT is empty: nothing will be asked for before it is named")
    if not settings.external_ip:
        found.append(NO_ADDRESS_CAUTION)
    return tuple(found)


def tpu_order_call(
    settings: CloudTpuSettings, order: Order, boot: Mapping[str, Path]
) -> GcloudCall:
    """The whole request in one call: labels, what is booted, the end of its wait and, where there
    is one, of its life. Queued resource and node have the order's name.

    Raises RigError DENIED for a way of renting without an end, unless the settings want that;
    INVALID for one that is none, and without a service account.
    """
    flags: dict[str, GcloudFlag] = {
        "zone": order.zone,
        "node-id": order.name,
        "accelerator-type": settings.accelerator_type,
        "runtime-version": settings.runtime_version,
        "valid-until-duration": f"{order.valid_s or _TPU_WAIT_S}s",
        "labels": order.labels,
        "metadata-from-file": boot,
        "service-account": tpu_account(settings),
        # The widest scope: what the account itself may do is the limit.
        "scopes": "https://www.googleapis.com/auth/cloud-platform",
        "async": True,
    }
    if settings.network:
        flags["network"] = settings.network
    if settings.subnet:
        flags["subnetwork"] = settings.subnet
    if not settings.external_ip:
        flags["internal-ips"] = True
    command, more = _tpu_market_flags(order, settings.no_hard_stop_ok)
    return GcloudCall((*command, "create"), order.name, {**flags, **more})


def tpu_leave_url(project: str, zone: str, name: str) -> str:
    """The address whose DELETE ends the machine from within: its request with its node. Deleting
    the node alone would leave a dead request, which holds its quota."""
    place = f"projects/{project}/locations/{zone}/queuedResources/{name}"
    return f"https://tpu.googleapis.com/v2/{place}?force=true"


def _tpu_market_flags(
    order: Order, no_hard_stop_ok: bool
) -> tuple[tuple[str, ...], dict[str, GcloudFlag]]:
    """The command group and the flags of a way of renting.

    gcloud 528's alpha --spot sends a spot tier beside the model STANDARD, and the API is reported
    to refuse that. So a spot request goes by the released command, whose body has the tier alone.
    """
    market = order.market
    if market == "flex-start":
        model = {"provisioning-model": market, "max-run-duration": f"{order.life_s}s"}
        return ("alpha", *QUEUED_RESOURCES), {**model}
    if market not in TPU_MARKETS:
        raise RigError("INVALID", f"the Cloud TPU API is not asked for {market} machines here")
    if not no_hard_stop_ok:
        raise RigError(
            "DENIED",
            f"the Cloud TPU API never ends a machine that is rented as {market}, so a forgotten "
            "one is billed for ever; nothing was asked for",
            "rent it as flex-start, or the user may set NO_HARD_STOP_OK=1",
        )
    return QUEUED_RESOURCES, {"spot": True} if market == "spot" else {}
