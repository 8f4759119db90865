"""What EC2 offers an account: zones, prices, quotas, and the image that fits a machine.

Knows reads alone. What is rented, and what an order is made of, others know.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.prices import prices_for
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import Offer, Quota, RentalMarket
from forge.parts.planes.ec2_image import MachineImage, image_of_parameter
from forge.parts.planes.ec2_settings import EC2_REGIONS, Ec2Settings, ec2_markets, ec2_zones

# Service Quotas' codes, in vCPUs of a region, by the letters that an instance type begins with: on
# demand, and spot. As recalled (2026-11-29), and named alike by many public programs.
EC2_QUOTAS: dict[str, dict[RentalMarket, str]] = {
    "g": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    "vt": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    "inf": {"on-demand": "L-1945791B", "spot": "L-B5D1601B"},
}
_QUOTA_FAMILIES = {"g": ("g", "gr", "vt"), "vt": ("g", "gr", "vt"), "inf": ("inf",)}
_COUNTED_STATES = ("pending", "running")  # a stopped machine uses up no quota
_CATALOGUE_KEPT_S = 3600.0  # a catalogue changes by announcement
_ON_THE_LIST = "the zone has it on its list; whether one is free only a request tells"

KeptT = TypeVar("KeptT")


@dataclass(frozen=True)
class InstanceFacts:
    """An instance type: vCPUs, the architectures it boots, its memory in MiB."""

    vcpus: int
    architectures: tuple[str, ...]
    memory_mib: int


@dataclass(frozen=True)
class _Region:
    """What a region said: zones with the type, subnets' zones, and spot prices with their source,
    or why there are none."""

    listing: frozenset[str]
    subnets: frozenset[str]
    spot: dict[str, tuple[float, str]] | str


class Ec2Catalogue:
    """Reads what EC2 has on its lists. `clock` gives the moment, in seconds; `look_s` is how long
    the calls of one look may take together."""

    look_s = 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str, str], tuple[float, Any]] = {}

    async def offers(self, aws: Aws, settings: Ec2Settings) -> list[Offer]:
        """Each wished zone and way of renting, in that order; without ZONES all zones of
        EC2_REGIONS that have the type.

        A region that cannot be read makes its zones unknown. Raises what every region raised.
        """
        zones, markets = ec2_zones(settings), ec2_markets(settings)
        regions = list(dict.fromkeys(map(region_of, zones))) or list(EC2_REGIONS)
        answers = await asyncio.gather(
            *(
                self._in_time(self._region(aws, settings, one, "spot" in markets))
                for one in regions
            ),
            return_exceptions=True,
        )
        found = dict(zip(regions, map(_answer_or_refusal, answers), strict=True))
        refusals = [one for one in found.values() if isinstance(one, RigError)]
        if len(refusals) == len(found):
            raise refusals[0]
        wished = zones or [
            zone
            for one in found.values()
            if not isinstance(one, RigError)
            for zone in sorted(one.listing & one.subnets)
        ]
        return [
            _offer(settings, zone, market, found[region_of(zone)])
            for zone in wished
            for market in markets
        ]

    async def quota(
        self, aws: Aws, settings: Ec2Settings, zone: str, market: RentalMarket
    ) -> Quota:
        """The vCPU quota of the zone's region, in machines of this type: `limit` less `used` is how
        many more of them fit.

        Raises UNKNOWN for a family whose quota is not known here.
        """
        region, kind = region_of(zone), settings.instance_type
        family = _family(kind)
        code = EC2_QUOTAS.get(family, {}).get(market, "")
        if not code:
            raise RigError("UNKNOWN", f"the quota of {kind} as {market} is not known here")
        quota, running, sizes = await self._in_time(
            self._quota_and_use(aws, region, kind, code, market)
        )
        vcpus = sizes[kind]
        used = sum(sizes[one] * count for one, count in running.items())
        limit = int(float(quota["Value"])) // vcpus
        room = max(0, int(float(quota["Value"])) - used) // vcpus
        name = f"{code} {quota.get('QuotaName', '')} in {region}, of {vcpus} vCPUs each"
        return Quota(name, limit, limit - room)

    async def machine_image(self, aws: Aws, settings: Ec2Settings, region: str) -> MachineImage:
        """The image that AMI_PARAMETER means in a region now, fit for the type and the disk.

        Raises INVALID where the parameter is gone (with what is there instead), where the type does
        not boot it or the disk is too small for it.
        """
        image, facts = await asyncio.gather(
            image_of_parameter(aws, settings.ami_parameter, region),
            self._in_time(self.instance_facts(aws, settings.instance_type, region)),
        )
        if image.architecture not in facts.architectures:
            boots = ", ".join(facts.architectures)
            raise RigError(
                "INVALID",
                f"{settings.instance_type} boots {boots}, and AMI_PARAMETER names an image for "
                f"{image.architecture}; nothing was started",
                "name the other architecture's image in tpu.env",
            )
        if settings.root_disk_gb < image.disk_gb:
            raise RigError(
                "INVALID",
                f"ROOT_DISK_GB is {settings.root_disk_gb}, and the image {image.name} needs "
                f"{image.disk_gb}; nothing was started",
                f"set ROOT_DISK_GB to {image.disk_gb} or more in tpu.env",
            )
        return image

    async def instance_facts(self, aws: Aws, instance_type: str, region: str) -> InstanceFacts:
        """What an instance type has, kept for an hour. Raises INVALID where there is no such."""
        return (await self._types(aws, region, {instance_type}))[instance_type]

    async def _region(self, aws: Aws, settings: Ec2Settings, region: str, spot: bool) -> _Region:
        kind = settings.instance_type
        listing, subnets, prices = await asyncio.gather(
            self._keep(
                ("listing", kind, region),
                lambda: aws.read_all(
                    "ec2",
                    region,
                    "describe_instance_type_offerings",
                    "InstanceTypeOfferings",
                    LocationType="availability-zone",
                    Filters=[{"Name": "instance-type", "Values": [kind]}],
                ),
            ),
            aws.read_all(
                "ec2",
                region,
                "describe_subnets",
                "Subnets",
                Filters=_wanted_subnets(settings),
            ),
            _spot_or_reason(aws, kind, region) if spot else _no_spot(),
        )
        return _Region(
            frozenset(str(one["Location"]) for one in listing),
            frozenset(str(one["AvailabilityZone"]) for one in subnets),
            prices,
        )

    async def _types(self, aws: Aws, region: str, kinds: Iterable[str]) -> dict[str, InstanceFacts]:
        wanted = sorted(kinds)
        answer = await self._keep(
            ("types", ",".join(wanted), region),
            lambda: aws.read(
                "ec2",
                region,
                "describe_instance_types",
                InstanceTypes=wanted,
            ),
        )
        found = {
            str(one["InstanceType"]): InstanceFacts(
                int(one["VCpuInfo"]["DefaultVCpus"]),
                tuple(map(str, one["ProcessorInfo"]["SupportedArchitectures"])),
                int(one.get("MemoryInfo", {}).get("SizeInMiB", 0)),
            )
            for one in answer.get("InstanceTypes", [])
        }
        if missing := [one for one in wanted if one not in found]:
            raise RigError("UNKNOWN", f"{region} does not describe {', '.join(missing)}")
        return found

    async def _quota_and_use(
        self, aws: Aws, region: str, kind: str, code: str, market: RentalMarket
    ) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
        """The quota, how many of each type use it now, and the vCPUs of those types."""
        quota, running, own = await asyncio.gather(
            self._quota(aws, region, code),
            self._running(aws, region, _family(kind), market),
            self.instance_facts(aws, kind, region),
        )
        others = {one for one in running if one != kind}
        facts = {**(await self._types(aws, region, others) if others else {}), kind: own}
        return quota, running, {one: facts[one].vcpus for one in facts}

    async def _quota(self, aws: Aws, region: str, code: str) -> dict[str, Any]:
        """The account's own value; where none was ever set for it, everybody's."""

        async def ask(operation: str) -> dict[str, Any]:
            wanted: dict[str, Any] = {"ServiceCode": "ec2", "QuotaCode": code}
            return await aws.read("service-quotas", region, operation, **wanted)

        try:
            answer = await ask("get_service_quota")
        except RigError as error:
            if "NoSuchResource" not in error.what:
                raise
            answer = await ask("get_aws_default_service_quota")
        quota = answer.get("Quota", {})
        if not isinstance(quota, dict) or "Value" not in quota:
            raise RigError("UNKNOWN", f"the quota {code} has no value in {region}")
        return quota

    async def _running(
        self, aws: Aws, region: str, family: str, market: RentalMarket
    ) -> dict[str, int]:
        """How many of each type of those families count against the quota, anybody's."""
        reservations = await aws.read_all(
            "ec2",
            region,
            "describe_instances",
            "Reservations",
            Filters=[{"Name": "instance-state-name", "Values": list(_COUNTED_STATES)}],
        )
        counts: dict[str, int] = {}
        for one in (thing for each in reservations for thing in each.get("Instances", [])):
            kind, spot = str(one.get("InstanceType", "")), one.get("InstanceLifecycle") == "spot"
            if _family(kind) in _QUOTA_FAMILIES[family] and spot == (market == "spot"):
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    async def _in_time(self, look: Awaitable[KeptT]) -> KeptT:
        try:
            async with asyncio.timeout(self.look_s):
                return await look
        except TimeoutError:
            how = f"AWS did not answer within {self.look_s:g} s"
            raise RigError("TIMEOUT", how, "check this computer's network, then repeat") from None

    async def _keep(self, key: tuple[str, str, str], read: Callable[[], Awaitable[KeptT]]) -> KeptT:
        at, value = self._kept.get(key, (0.0, None))
        if value is None or self._clock() >= at + _CATALOGUE_KEPT_S:
            value = await read()
            self._kept[key] = (self._clock(), value)
        kept: KeptT = value
        return kept


async def spot_prices(aws: Aws, instance_type: str, region: str) -> dict[str, tuple[float, str]]:
    """By zone, what spot costs now in USD an hour, and where that is from; read, never reckoned."""
    history = await aws.read_all(
        "ec2",
        region,
        "describe_spot_price_history",
        "SpotPriceHistory",
        InstanceTypes=[instance_type],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC),  # what holds at that moment: one entry a zone
    )
    newest: dict[str, Any] = {}
    for one in history:
        zone = str(one["AvailabilityZone"])
        if one.get("InstanceType") == instance_type and (
            zone not in newest or one["Timestamp"] > newest[zone]["Timestamp"]
        ):
            newest[zone] = one
    return {
        zone: (
            float(one["SpotPrice"]),
            f"EC2's spot price since {one['Timestamp']:%Y-%m-%d %H:%M} UTC; without the disk",
        )
        for zone, one in newest.items()
    }


def on_demand_price(chip: str, instance_type: str, zone: str) -> tuple[float | None, str]:
    """(USD an hour, where that is from). The disk, the address and traffic are not in it."""
    region = region_of(zone)
    for price in prices_for(chip, region=region, provisioning="on-demand"):
        if (price.provider, price.machine) == ("aws", instance_type) and price.rate.value:
            return price.rate.value, f"{price.rate.source}, {price.rate.date}; without the disk"
    return None, f"no price of {instance_type} on-demand in {region} is known here"


def _offer(
    settings: Ec2Settings, zone: str, market: RentalMarket, found: _Region | RigError
) -> Offer:
    available, how = _availability(settings, zone, found)
    if market == "on-demand":
        price, source = on_demand_price(settings.chip, settings.instance_type, zone)
    elif isinstance(found, RigError):
        price, source = None, f"the spot prices could not be read ({found.error_class})"
    elif isinstance(found.spot, str):
        price, source = None, found.spot
    else:
        price, source = found.spot.get(zone, (None, "EC2 tells no spot price of the zone"))
        if price and 0 < settings.spot_max_price < price and available != "no":
            available, how = (
                "no",
                f"its spot price is over SPOT_MAX_PRICE={settings.spot_max_price}",
            )
    return Offer(zone, market, price, source, available, how)


def _availability(
    settings: Ec2Settings, zone: str, found: _Region | RigError
) -> tuple[Literal["no", "unknown"], str]:
    """Never "yes": the lists do not tell what is free."""
    if isinstance(found, RigError):
        return "unknown", f"the region's lists could not be read ({found.error_class})"
    if zone not in found.listing:
        return "no", f"the zone does not have {settings.instance_type} on its list, or is none"
    if zone not in found.subnets:
        lack = f"{settings.subnet} is not in it" if settings.subnet else "it has no default subnet"
        return "no", f"the zone has it on its list, and {lack}"
    return "unknown", _ON_THE_LIST


def _answer_or_refusal(answer: _Region | BaseException) -> _Region | RigError:
    if isinstance(answer, BaseException) and not isinstance(answer, RigError):
        raise answer
    return answer


def _family(instance_type: str) -> str:
    """The letters that the type begins with: g of g4dn.xlarge."""
    found = re.match(r"[a-z]+", instance_type)
    return found[0] if found else ""


def _wanted_subnets(settings: Ec2Settings) -> list[dict[str, Any]]:
    """As filters: a subnet of another region is no fault there, but absent."""
    if settings.subnet:
        return [{"Name": "subnet-id", "Values": [settings.subnet]}]
    return [{"Name": "default-for-az", "Values": ["true"]}]


async def _no_spot() -> str:
    return "spot is not among MARKETS"


async def _spot_or_reason(
    aws: Aws, instance_type: str, region: str
) -> dict[str, tuple[float, str]] | str:
    try:
        return await spot_prices(aws, instance_type, region)
    except RigError as error:
        return f"the spot prices could not be read ({error.error_class})"
