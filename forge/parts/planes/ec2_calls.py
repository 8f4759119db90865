"""The calls of EC2 that a plane needs: reading machines and volumes, the one launch, the ends.

Knows what each asks and when its answer means that nothing is there; what things are, others read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.planes.capacity_plane import MANAGED_BY, Rental
from forge.parts.planes.ec2_catalogue import on_demand_price, spot_prices
from forge.parts.planes.ec2_order import (
    GROUP_WORDS,
    ec2_group_name,
    ec2_group_tags,
    refuse_group,
)
from forge.parts.planes.ec2_things import (
    EC2_ENDED,
    ec2_market,
    ec2_state,
    ec2_tags,
    instance_rental,
    instance_zone,
    marked_as,
    volume_rental,
    volume_users,
)

EC2_READ_S = 5.0  # what a plane's read may take
_LAUNCH_S = 10.0  # a launch answers within seconds; one of unknown fate is looked for afterwards
_LAUNCH_PAUSE_S = 2.0
_SEEN_S, _SEEN_PAUSE_S = 5.0, 0.5  # seconds for looking after an order of unknown fate
_PRICES_S = 3.0  # a thing is told without its price rather than late
_PRICES_KEPT_S = 300.0  # spot prices move in steps of minutes to hours
# What passes by itself: an instance profile or a security group that was made so lately that EC2
# does not know it everywhere (EC2's user guide, "eventual consistency", 2026).
_NOT_KNOWN_YET = ("iamInstanceProfile", "Invalid IAM Instance Profile", "InvalidGroup.NotFound")


class Ec2Calls:
    """EC2 of one region for one account. Raises what Aws raises, unless it says otherwise."""

    def __init__(self, aws: Aws, region: str) -> None:
        self.aws, self.region = aws, region

    # Reading

    async def machines(self, **filters: str) -> list[dict[str, Any]]:
        """The machines that match all filters, terminated ones too. A filter's name has underscores
        for its dashes, `tag_x` is the tag x; a star in a value stands for itself."""
        found = await self._listed("describe_instances", "Reservations", filters)
        machines = [one for reservation in found for one in reservation.get("Instances", [])]
        return [one for one in machines if _has_tags(one, filters)]

    async def volumes(self, **filters: str) -> list[dict[str, Any]]:
        """The volumes that match, as `machines`; what is deleted is not among them."""
        found = await self._listed("describe_volumes", "Volumes", filters)
        return [one for one in found if _has_tags(one, filters) and one.get("State") != "deleted"]

    async def machine(self, provider_id: str) -> dict[str, Any] | None:
        """The machine of that id; None where EC2 says that there is none (any more)."""
        call = ("ec2", self.region, "describe_instances", "Reservations")
        try:
            found = await self.aws.read_all(*call, EC2_READ_S, InstanceIds=[provider_id])
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return None
            raise
        return next((one for each in found for one in each.get("Instances", [])), None)

    async def volume(self, provider_id: str) -> dict[str, Any] | None:
        """The volume of that id; None where there is none."""
        call = ("ec2", self.region, "describe_volumes", "Volumes")
        try:
            found = await self.aws.read_all(*call, EC2_READ_S, VolumeIds=[provider_id])
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return None
            raise
        return next((one for one in found if one.get("State") != "deleted"), None)

    async def of_token(self, token: str) -> list[dict[str, Any]]:
        """The machines that an order with that client token made, in any state."""
        return await self.machines(client_token=token)

    async def regions(self) -> list[str]:
        """The regions that the account has enabled."""
        answer = await self.aws.read("ec2", self.region, "describe_regions", EC2_READ_S)
        return sorted(str(one["RegionName"]) for one in answer.get("Regions", []))

    async def console(self, provider_id: str) -> str:
        """The console's text, its newest 64 kB; empty while there is none. Machines that are no
        Nitro ones tell it late."""
        call = ("ec2", self.region, "get_console_output", EC2_READ_S)
        try:
            answer = await self.aws.read(*call, InstanceId=provider_id, Latest=True)
        except RigError as error:
            if "UnsupportedOperation" not in error.what:
                raise
            answer = await self.aws.read(*call, InstanceId=provider_id)
        return str(answer.get("Output") or "")

    # What a launch needs

    async def subnet(self, zone: str, wished: str) -> tuple[str, str]:
        """(a subnet of the zone, its VPC): the wished one, or the zone's default. Raises INVALID
        where there is none, and for a wished one of another zone."""
        wanted = {"availability_zone": zone, "default_for_az": "true"}
        filters = {"subnet_id": wished} if wished else wanted
        found = await self._listed("describe_subnets", "Subnets", filters)
        if not found:
            raise RigError(
                "INVALID",
                f"{zone} has no {f'subnet {wished}' if wished else 'default subnet'}; nothing was "
                "rented",
                "aws ec2 create-default-subnet makes one, or set SUBNET and ZONES in tpu.env",
            )
        there = str(found[0].get("AvailabilityZone"))
        if there != zone:
            raise RigError(
                "INVALID",
                f"SUBNET {wished} is in {there}, not in {zone}; nothing was rented",
                f"set ZONES={there} in tpu.env, or empty SUBNET",
            )
        return str(found[0]["SubnetId"]), str(found[0]["VpcId"])

    async def group(self, vpc: str, labels: Mapping[str, str]) -> str:
        """The id of the rig's security group in a VPC, made where it is missing. It lets nothing
        in, and everything out, which is how EC2 makes one. Raises DENIED as `refuse_group`."""
        name = ec2_group_name(labels)
        found = await self._group(name, vpc)
        if found is None:
            tags = [{"ResourceType": "security-group", "Tags": ec2_group_tags(labels)}]
            call = ("ec2", self.region, "create_security_group", EC2_READ_S)
            given = {"GroupName": name, "Description": GROUP_WORDS, "VpcId": vpc}
            try:
                made = await self.aws.change(*call, **given, TagSpecifications=tags)
                return str(made["GroupId"])
            except RigError as error:
                # Another process of this rig was faster, or the answer was lost.
                if error.error_class not in ("EXISTS", "UNKNOWN"):
                    raise
                found = await self._group(name, vpc)
                if found is None:
                    raise
        refuse_group(found, labels)
        return str(found["GroupId"])

    # Changing

    async def launch(self, parameters: Mapping[str, Any], until: float) -> dict[str, Any]:
        """The machine that RunInstances made, or that an order with the same token had made.

        Sent once; again, with the same token, only after EC2 refused it for something that it does
        not know yet, until `until` (of time.monotonic). Raises UNKNOWN where its fate is not known
        and nothing of its token is to be seen.
        """
        while True:
            left = max(3.0, until - time.monotonic())
            call = ("ec2", self.region, "run_instances", min(_LAUNCH_S, left))
            try:
                answer = await self.aws.change(*call, **parameters)
                made: list[dict[str, Any]] = answer.get("Instances", [])
                if not made:
                    raise RigError("UNKNOWN", "EC2 took the order and told of no machine")
                return made[0]
            except RigError as error:
                if error.error_class in ("UNKNOWN", "EXISTS"):
                    found = await self._seen(str(parameters["ClientToken"]))
                    if found is None:
                        raise
                    return found
                young = any(words in error.what for words in _NOT_KNOWN_YET)
                if not young or time.monotonic() + _LAUNCH_PAUSE_S >= until:
                    raise
            await asyncio.sleep(_LAUNCH_PAUSE_S)

    async def terminate(self, provider_id: str, timeout_s: float) -> None:
        """Terminate, and return once it is going or gone; a call that gave no answer is settled by
        a look. Raises UNKNOWN where it may go on."""
        call = ("ec2", self.region, "terminate_instances", timeout_s)
        try:
            answer = await self.aws.change(*call, InstanceIds=[provider_id])
            for one in answer.get("TerminatingInstances", []):
                state = (one.get("CurrentState") or {}).get("Name")
                if one.get("InstanceId") == provider_id and state in EC2_ENDED:
                    return
            raise RigError("UNKNOWN", f"EC2 took the end of {provider_id} and does not end it")
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return
            if error.error_class != "UNKNOWN" or not await self._ending(provider_id):
                raise

    async def delete_volume(self, provider_id: str, timeout_s: float) -> None:
        """Delete a volume that hangs on nothing."""
        call = ("ec2", self.region, "delete_volume", timeout_s)
        try:
            await self.aws.change(*call, VolumeId=provider_id)
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return
            if error.error_class != "UNKNOWN" or await self.volume(provider_id) is not None:
                raise

    async def switch(self, provider_id: str, on: bool, timeout_s: float) -> None:
        """Start or stop a machine; returns when EC2 took the order."""
        operation = "start_instances" if on else "stop_instances"
        await self.aws.change("ec2", self.region, operation, timeout_s, InstanceIds=[provider_id])

    async def _listed(
        self, operation: str, key: str, filters: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        call = ("ec2", self.region, operation, key)
        return await self.aws.read_all(*call, EC2_READ_S, Filters=_filters(filters))

    async def _group(self, name: str, vpc: str) -> dict[str, Any] | None:
        filters = _filters({"group_name": name, "vpc_id": vpc})
        call = ("ec2", self.region, "describe_security_groups", "SecurityGroups")
        found = await self.aws.read_all(*call, EC2_READ_S, Filters=filters)
        return next((one for one in found if one.get("GroupName") == name), None)

    async def _seen(self, token: str) -> dict[str, Any] | None:
        """What an order of unknown fate made; None if nothing is to be seen for a while."""
        until = time.monotonic() + _SEEN_S
        while True:
            try:
                found = await self.of_token(token)
            except RigError:
                found = []
            if found:
                return found[0]
            if time.monotonic() >= until:
                return None
            await asyncio.sleep(_SEEN_PAUSE_S)

    async def _ending(self, provider_id: str) -> bool:
        try:
            now = await self.machine(provider_id)
        except RigError:
            return False
        return now is not None and ec2_state(now) in EC2_ENDED


class Ec2Prices:
    """What machines cost now, in USD an hour: spot as EC2 tells it, kept for five minutes, on
    demand by the table of `chip`."""

    def __init__(self) -> None:
        self._spot: dict[tuple[str, str], tuple[float, Mapping[str, tuple[float, str]]]] = {}

    async def of(self, calls: Ec2Calls, machine: Any, chip: str) -> float | None:
        """None where nobody knows it, or it cannot be read now."""
        zone, kind = instance_zone(machine), str(machine.get("InstanceType", ""))
        if ec2_market(machine) != "spot":
            return on_demand_price(chip, kind, zone)[0]
        key = (calls.region, kind)
        at, prices = self._spot.get(key, (float("-inf"), {}))
        if time.monotonic() > at + _PRICES_KEPT_S:
            with suppress(RigError, TimeoutError):
                async with asyncio.timeout(_PRICES_S):
                    prices = await spot_prices(calls.aws, kind, calls.region)
                self._spot[key] = (time.monotonic(), prices)
        return prices.get(zone, (None, ""))[0]


async def held_in_region(
    calls: Ec2Calls, prices: Ec2Prices, chip: str
) -> tuple[list[Rental], list[str]]:
    """(what a region has with our mark, what of it cannot be read).

    A volume that hangs on one of these machines goes with it and is not counted beside it.
    """
    mark, account = {"tag_managed_by": MANAGED_BY}, calls.aws.account
    machines, volumes = await asyncio.gather(calls.machines(**mark), calls.volumes(**mark))
    live = [one for one in machines if ec2_state(one) != "terminated"]
    hosts = {str(one.get("InstanceId")) for one in live}
    rentals: list[Rental] = []
    unread: list[str] = []
    for one in [*live, *(v for v in volumes if not volume_users(v) & hosts)]:
        try:
            if "InstanceId" in one:
                price = await prices.of(calls, one, chip)
                rentals.append(instance_rental(one, account, price))
            else:
                rentals.append(volume_rental(one, account))
        except RigError as error:  # it is told, and does not hide the others
            unread.append(clean(f"something of ours in {calls.region} ({error.what})", 200))
    return rentals, unread


async def made_by_request(
    calls: Ec2Calls, request: SweepRequest, token: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the machines of one request in any state, its volumes that hang on none of them).

    Looked for by the tag, and where that shows nothing by the client token: tags are lost soon
    after an end, and either may be seen before the other.
    """
    intent = {"tag_intent": request.intent}
    found, volumes = await asyncio.gather(calls.machines(**intent), calls.volumes(**intent))
    machines = [one for one in found if marked_as(one, request.labels)]
    machines = machines or await calls.of_token(token)
    hosts = {str(one.get("InstanceId")) for one in machines}
    return machines, [
        one for one in volumes if marked_as(one, request.labels) and not volume_users(one) & hosts
    ]


def _filters(given: Mapping[str, str]) -> list[dict[str, Any]]:
    """Filters as EC2 takes them."""
    found = []
    for key, value in given.items():
        name = f"tag:{_tag_of(key)}" if key.startswith("tag_") else key.replace("_", "-")
        found.append({"Name": name, "Values": [value]})
    return found


def _tag_of(key: str) -> str:
    return key.removeprefix("tag_").replace("_", "-")


def _has_tags(thing: Mapping[str, Any], filters: Mapping[str, str]) -> bool:
    """Whether the tags are those of the filters, letter by letter."""
    tags = ec2_tags(thing)
    return all(tags.get(_tag_of(k)) == v for k, v in filters.items() if k.startswith("tag_"))
