"""What every rig on EC2 has to name: the account, the machine, its image, its disk and its place.

Knows no call. Whether the credentials are of that account, and what is there, others ask.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import CapacitySettings, RentalMarket, listed

EC2_MARKETS: tuple[RentalMarket, ...] = ("spot", "on-demand")
EC2_HOME = "us-east-1"  # whom to ask about what belongs to no region; every account has it
# Where is looked without ZONES: the regions that the price table has figures of for these machines.
EC2_REGIONS = ("us-east-1", "us-east-2", "us-west-2")
# A zone such as us-east-1a. Local and Wavelength zones (us-east-1-bos-1a) are none here: they
# belong to a region by another name than their own, and have none of these machines.
_EC2_ZONE = re.compile(r"[a-z]{2}(?:-[a-z]{2,12}){1,3}-[0-9]{1,2}[a-z]")
# Fields whose default a rig changes together: they have to be of one machine.
Ec2InstanceType = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9-]{1,15}\.[a-z0-9-]{2,16}$",
        description="The instance type to rent.",
    ),
]
Ec2Chip = Annotated[str, Field(pattern=r"^[a-z0-9]{2,12}$", description="Its chip, for prices.")]
Ec2ImagePath = Annotated[
    str,
    Field(
        max_length=300,
        pattern=r"^/aws/service(?:/[A-Za-z0-9_.-]{1,100}){2,12}$",
        description="Public SSM parameter that names the image; looked up in each region.",
    ),
]


class Ec2Settings(CapacitySettings):
    """The keys of the account and of the machine's place in it."""

    aws_account: str = Field(
        pattern=r"^[0-9]{12}$",
        description="The AWS account that pays, 12 digits; other accounts' credentials are refused",
    )
    aws_profile: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_@:/. +-]{0,120}$",
        description="Profile of ~/.aws to take credentials from; empty: the SDK's own search.",
    )
    instance_type: Ec2InstanceType = "g6.xlarge"
    chip: Ec2Chip = "l4"
    ami_parameter: Ec2ImagePath = (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    )
    instance_profile: str = Field(
        default="gemma4-rig",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_+=,.@-]{0,63}$",  # IAM's, without a mark in front
        description="Instance profile that the machine runs as; set-up makes it and its role.",
    )
    subnet: str = Field(
        default="",
        pattern=r"^(?:subnet-[0-9a-f]{8,17})?$",
        description="The subnet, then ZONES must name its zone; empty: each zone's default subnet.",
    )
    root_disk_gb: int = Field(
        default=150, ge=30, le=2000, description="Size of the root disk in GB."
    )
    root_disk_type: Literal["gp3"] = Field(default="gp3", description="Type of the root disk.")
    public_ip: bool = Field(
        default=True,
        description="The machine's way out, nothing may come in; 0 needs a NAT gateway or VPC "
        "endpoints in the subnet.",
    )
    spot_max_price: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Most that spot may cost in USD an hour; 0: up to the price on demand.",
    )

    @property
    def project(self) -> str:
        """Who pays, by the name that the parts of all providers ask for."""
        return self.aws_account


def ec2_markets(settings: Ec2Settings) -> list[RentalMarket]:
    """The ways of renting of MARKETS, in its order; without any, spot and then on-demand.

    Raises RigError INVALID for a word that is none.
    """
    words = listed(settings.markets)
    strange = [word for word in words if word not in EC2_MARKETS]
    if strange:
        known = " or ".join(EC2_MARKETS)
        raise RigError(
            "INVALID", f"MARKETS: {', '.join(strange)} is not {known}", "correct it in tpu.env"
        )
    return [one for word in words for one in EC2_MARKETS if one == word] or list(EC2_MARKETS)


def ec2_zones(settings: Ec2Settings) -> list[str]:
    """The availability zones of ZONES, in its order; empty: all zones of EC2_REGIONS.

    Raises RigError INVALID for a word that is no availability zone.
    """
    words = listed(settings.zones)
    strange = [word for word in words if not _EC2_ZONE.fullmatch(word)]
    if strange:
        raise RigError(
            "INVALID",
            f"ZONES: {', '.join(strange)} is no availability zone such as us-east-1a",
            "correct it in tpu.env",
        )
    return words


def ec2_home_region(settings: Ec2Settings) -> str:
    """The region that has the rig's secret and answers what concerns all regions: that of the first
    of ZONES. Raises RigError INVALID as ec2_zones does."""
    zones = ec2_zones(settings)
    return region_of(zones[0]) if zones else EC2_REGIONS[0]


def ec2_cautions(settings: Ec2Settings) -> tuple[str, ...]:
    """What these settings leave a machine without, in sentences."""
    found = []
    if not settings.public_ip:
        found.append(
            "PUBLIC_IP is 0: without a NAT gateway or VPC endpoints in its subnet the machine "
            "reaches neither Systems Manager nor an image, and nobody reaches it"
        )
    return tuple(found)
