"""What a machine on EC2 is to be: the parameters of the one call that asks for it.

Knows what goes into the call and nothing of what comes back; who may ask, and when, others know.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.planes.capacity_plane import Order, RentalMarket, rental_name
from forge.parts.planes.ec2_settings import EC2_MARKETS, Ec2Settings
from forge.parts.planes.ec2_things import ec2_tags

GROUP_WORDS = "gemma4-rigs: nothing may come in"
_TAGGED = ("instance", "volume", "network-interface")
_TOKEN_LENGTH = 64  # characters: EC2's limit of a client token


@dataclass(frozen=True)
class Ec2Place:
    """Where a machine is put, as it was read: its image and that image's own root device, the
    subnet and the security group."""

    image: str
    root_device: str
    subnet: str
    group: str


def ec2_client_token(intent: str, instance_type: str, zone: str) -> str:
    """The client token of an order: with it EC2 makes at most one machine, however often it is
    sent, and finds it again. Type and zone are in it: EC2 refuses one token for two orders."""
    text = f"{intent}\n{instance_type}\n{zone}"
    return hashlib.sha256(text.encode()).hexdigest()[:_TOKEN_LENGTH]


def ec2_group_name(labels: Mapping[str, str]) -> str:
    """The name of the rig's security group, one in each VPC."""
    return rental_name(labels["rig"], labels["owner"])


def ec2_group_tags(labels: Mapping[str, str]) -> list[dict[str, str]]:
    """The security group's tags: the marks of a rig. It costs nothing and outlives machines, so it
    has neither an intent nor an end."""
    marks = {key: labels[key] for key in ("managed-by", "rig", "owner")}
    return ec2_tag_list({"Name": ec2_group_name(labels), **marks})


def ec2_tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as EC2 takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def refuse_group(group: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Raise RigError DENIED for a security group that is not this rig's, or that lets anything in:
    a machine of the rig is reached through Systems Manager alone."""
    tags, name = ec2_tags(group), f"{group.get('GroupName')} ({group.get('GroupId')})"
    if any(tags.get(key) != labels[key] for key in ("managed-by", "rig", "owner")):
        raise RigError(
            "DENIED",
            f"the security group {name} does not carry this rig's marks: it is somebody else's; "
            "nothing was rented",
            "a person renames or removes it",
        )
    if group.get("IpPermissions"):
        raise RigError(
            "DENIED",
            f"somebody opened the security group {name} to the outside; nothing was rented",
            "a person takes its inbound rules away",
        )


def refuse_market(market: str) -> None:
    """Raise RigError INVALID for a way of renting that EC2 has not."""
    if market not in EC2_MARKETS:
        raise invalid_parameter("market", f"EC2 rents as {' or '.join(EC2_MARKETS)}")


def launch_parameters(
    settings: Ec2Settings, order: Order, place: Ec2Place, user_data: bytes
) -> dict[str, Any]:
    """The whole order as the parameters of RunInstances: marks on all that it makes, an encrypted
    disk that goes with the machine, metadata for the machine itself alone (IMDSv2, one hop), and a
    shutdown that terminates. Raises RigError INVALID as `refuse_market`."""
    refuse_market(order.market)
    tags = ec2_tag_list({"Name": order.name, **order.labels})
    disk = {
        "VolumeSize": settings.root_disk_gb,
        "VolumeType": settings.root_disk_type,
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    network = {
        "DeviceIndex": 0,
        "SubnetId": place.subnet,
        "Groups": [place.group],
        "AssociatePublicIpAddress": settings.public_ip,
        "DeleteOnTermination": True,
    }
    tagged = (*_TAGGED, "spot-instances-request") if order.market == "spot" else _TAGGED
    parameters: dict[str, Any] = {
        "ImageId": place.image,
        "InstanceType": settings.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": ec2_client_token(order.intent, settings.instance_type, order.zone),
        "IamInstanceProfile": {"Name": settings.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        "BlockDeviceMappings": [{"DeviceName": place.root_device, "Ebs": disk}],
        "NetworkInterfaces": [network],
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in tagged],
        "UserData": user_data,
    }
    if order.market == "spot":
        # One-time: nothing asks again for a machine that was taken back.
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        if settings.spot_max_price:
            spot["MaxPrice"] = f"{settings.spot_max_price:g}"
        parameters["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    return parameters


def launch_words(region: str, profile: str, parameters: Mapping[str, Any]) -> list[str]:
    """RunInstances' parameters as the words of the AWS CLI, for people: the same order, without
    what the machine boots and without the token, which is made at the call."""
    words = ["aws", "ec2", "run-instances", "--region", region]
    words += ["--profile", profile] if profile else []
    for key, value in parameters.items():
        if key in ("UserData", "ClientToken", "MinCount"):
            continue
        flag = "count" if key == "MaxCount" else re.sub(r"(?<=.)([A-Z])", r"-\1", key).lower()
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        words += [f"--{flag}", text]
    return words


def shown_place(settings: Ec2Settings, zone: str, labels: Mapping[str, str]) -> Ec2Place:
    """Where an order would be put, without a look at it: the CLI looks the image up by itself."""
    return Ec2Place(
        image=f"resolve:ssm:{settings.ami_parameter}",
        root_device="ROOT-DEVICE-OF-THE-IMAGE",
        subnet=settings.subnet or f"DEFAULT-SUBNET-OF-{zone}",
        group=f"SECURITY-GROUP-{ec2_group_name(labels)}",
    )


def order_of(request: SweepRequest) -> Order:
    """A sweep's request as the order that it is."""
    return Order(
        name=request.name,
        zone=request.zone,
        intent=request.intent,
        labels=request.labels,
        life_s=request.life_s,
        market=cast(RentalMarket, request.market),
    )
