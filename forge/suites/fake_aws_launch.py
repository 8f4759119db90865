"""A launch in the fake AWS: what refuses it, one machine for one client token, what it gives.

Capacity faults are the script's and come before; here are offers, quotas, prices, profiles, disks.
Knows no HTTP and nothing of what comes after a launch.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from forge.suites.fake_aws_machine import FakeLives, FakeMachine
from forge.suites.fake_aws_moto import Ec2Operation
from forge.suites.fake_aws_places import offered_zones, vcpus_of
from forge.suites.fake_aws_world import AwsRefusal, aws_tags, known_refusal

_USER_DATA_BYTES = 16_384  # bytes, before base64
_FAMILY_QUOTAS = {  # family letters of an instance type -> quota codes on demand and spot
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "inf": ("L-1945791B", "L-B5D1601B"),
}


@dataclass
class FakeLaunches(FakeLives):
    """EC2's RunInstances."""

    _tokens: dict[tuple[str, str], tuple[str, Any]] = field(default_factory=dict)

    def launch_place(self, region: str, parameters: dict[str, Any]) -> dict[str, str]:
        """What a fault of a launch is looked up by: its zone, market and type."""
        backend = self.model(region)
        nics = parameters.get("NetworkInterfaces") or [{}]
        subnet = parameters.get("SubnetId") or nics[0].get("SubnetId")
        zone = parameters.get("Placement", {}).get("AvailabilityZone", "")
        for name, subnets in backend.subnets.items():
            if subnet and subnet in subnets:
                zone = name
        market = parameters.get("InstanceMarketOptions", {}).get("MarketType", "on-demand")
        kind = str(parameters.get("InstanceType", ""))
        return {"zone": zone or f"{region}a", "market": market, "type": kind}

    def repeats(self, region: str, operation: Ec2Operation) -> bool:
        """Whether a launch with this client token was made before."""
        token = str(operation.parameters.get("ClientToken", ""))
        return operation.action == "RunInstances" and (region, token) in self._tokens

    def do_RunInstances(self, region: str, operation: Ec2Operation) -> Any:
        given = operation.parameters
        token = str(given.get("ClientToken", ""))
        shape = json.dumps({**given, "ClientToken": ""}, sort_keys=True)
        if self.repeats(region, operation):
            known, reservation = self._tokens[region, token]
            if known != shape:
                words = (
                    "Arguments on this idempotent request are inconsistent with arguments used in "
                    "previous request(s)."
                )
                raise AwsRefusal("IdempotentParameterMismatch", words)
            return reservation
        place = self.launch_place(region, given)
        user_data = base64.b64decode(given.get("UserData", "") or "")
        if len(user_data) > _USER_DATA_BYTES:
            raise AwsRefusal("InvalidParameterValue", "User data is limited to 16384 bytes")
        self._check_profile(given)
        self._check_offer(region, place)
        self._check_disk(region, given)
        self._check_price(given, place)
        if not given.get("DryRun"):
            self.check_quota(region, place, int(given.get("MaxCount", 1)))
        reservation = operation.do()
        for instance in reservation.instances:
            machine = FakeMachine(region, instance, place["market"], user_data=user_data)
            machine.unseen = self.world.script.unseen
            self.machines[machine.id] = machine
            self._dress(machine, given)
            self.leave(machine, "pending", "running", self.world.script.pending_s)
        if token:
            self._tokens[region, token] = (shape, reservation)
        return reservation

    def _check_profile(self, given: dict[str, Any]) -> None:
        profile = given.get("IamInstanceProfile")
        if not profile:
            return
        name = str(profile.get("Name") or str(profile.get("Arn", "")).rsplit("/", 1)[-1])
        known = {one.name for one in self.moto.iam().instance_profiles.values()}
        if self.world.script.profile_hidden > 0:
            self.world.script.profile_hidden -= 1
            known = set()
        if name not in known:
            raise known_refusal("InvalidParameterValue", profile=name)

    def _check_offer(self, region: str, place: dict[str, str]) -> None:
        zones = offered_zones(region, place["type"], self.world.script.unlisted)
        if vcpus_of(place["type"]) == 0:
            words = f"Invalid value '{place['type']}' for InstanceType."
            raise AwsRefusal("InvalidParameterValue", words)
        if place["zone"] not in zones:
            others = ", ".join(zones)
            raise known_refusal(
                "Unsupported", type=place["type"], zone=place["zone"], others=others
            )

    def _check_price(self, given: dict[str, Any], place: dict[str, str]) -> None:
        options = given.get("InstanceMarketOptions", {}).get("SpotOptions", {})
        price = self.world.spot_price(place["zone"], place["type"])
        if options.get("MaxPrice") and price is not None and float(options["MaxPrice"]) < price:
            raise known_refusal("SpotMaxPriceTooLow", price=options["MaxPrice"], least=str(price))

    def _check_disk(self, region: str, given: dict[str, Any]) -> None:
        least = self.world.script.image_gb
        for one in given.get("BlockDeviceMappings") or []:
            size = one.get("Ebs", {}).get("VolumeSize")
            image = self.model(region).amis.get(given.get("ImageId"))
            root = image is not None and one.get("DeviceName") == image.root_device_name
            if root and size is not None and int(size) < least:
                snapshot = image.ebs_snapshot.id
                raise AwsRefusal(
                    "InvalidBlockDeviceMapping",
                    f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size "
                    f">= {least}GB",
                )

    def check_quota(self, region: str, place: dict[str, str], count: int) -> None:
        spot = place["market"] == "spot"
        code = quota_code(place["type"], spot)
        if not code:
            return
        limit = self.world.quota(region, code)
        taken = sum(
            vcpus_of(one.type)
            for one in self.machines.values()
            if one.region == region
            and one.state in ("pending", "running")
            and quota_code(one.type, one.market == "spot") == code
        )
        if taken + count * vcpus_of(place["type"]) > limit:
            which = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
            raise known_refusal(which, limit=str(int(limit)))

    def _dress(self, machine: FakeMachine, given: dict[str, Any]) -> None:
        """What a launch gives besides: all tags, groups, a root volume, a spot request."""
        model = machine.model
        tags = {
            str(one.get("ResourceType")): aws_tags(one.get("Tags"))
            for one in given.get("TagSpecifications") or []
        }
        model.launch_time = self.moment()
        model.client_token = given.get("ClientToken", "")
        nics = given.get("NetworkInterfaces") or []
        for place, nic in model.nics.items():
            nic.add_tags(tags.get("network-interface", {}))
            asked = nics[place] if place < len(nics) else {}
            nic.delete_on_termination = asked.get("DeleteOnTermination", True) is True
            if not model.security_groups:
                model.security_groups = list(nic.group_set)
        if model.root_device_name not in model.block_device_mapping:
            model.add_block_device(
                self.world.script.image_gb, model.root_device_name, None, False, True, None, "gp3"
            )
        for _device, block in model.get_block_device_mapping:
            block.attach_time = self.moment()
            attachment = self.moto.ec2(machine.region).volumes[block.volume_id].attachment
            attachment.attach_time = block.attach_time
            attachment.delete_on_termination = block.delete_on_termination
        model.spot_instance_request_id = None
        model.spot_tags = tags.get("spot-instances-request", {})
        if machine.market == "spot":
            machine.spot_request = f"sir-{self.world.serial():08x}"
            model.spot_instance_request_id = machine.spot_request


def quota_code(instance_type: str, spot: bool) -> str:
    """The service quota that counts this type's vCPUs; "" where the fake counts none."""
    family = "inf" if instance_type.startswith("inf") else instance_type[:1]
    codes = _FAMILY_QUOTAS.get("g" if family == "v" else family)
    return codes[1 if spot else 0] if codes else ""
