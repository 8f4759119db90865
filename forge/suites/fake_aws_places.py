"""Where the fake AWS has what: which zones offer a type, the public images and their parameters.

Zones and types are moto's tables, which were read from AWS. Knows no script and no machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from typing import Any

# Public parameters of machine images, by path without its last word; the last word is ami-id, and
# image_id for Neuron's. Root devices: Ubuntu's are /dev/sda1, Amazon Linux's /dev/xvda.
_NEURON_KINDS = ("multi-framework", "pytorch-2.9", "base")
_PUBLIC_IMAGES: dict[str, tuple[str, str]] = {  # path -> architecture and root device
    **{
        f"/aws/service/deeplearning/ami/{path}/latest/ami-id": (path.split("/")[0], root)
        for path, root in (
            ("x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04", "/dev/sda1"),
            ("x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04", "/dev/sda1"),
            ("x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023", "/dev/xvda"),
            ("x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04", "/dev/sda1"),
            ("arm64/base-oss-nvidia-driver-gpu-ubuntu-22.04", "/dev/sda1"),
            ("arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04", "/dev/sda1"),
            ("arm64/base-oss-nvidia-driver-gpu-amazon-linux-2023", "/dev/xvda"),
            ("arm64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04", "/dev/sda1"),
        )
    },
    **{
        f"/aws/service/neuron/dlami/{kind}/ubuntu-24.04/latest/image_id": ("x86_64", "/dev/sda1")
        for kind in _NEURON_KINDS
    },
}
_IMAGE_OWNER = "898082745236"  # the account that owns the Deep Learning AMIs


def image_parameters() -> tuple[str, ...]:
    """The paths of the public parameters that exist."""
    return tuple(_PUBLIC_IMAGES)


def image_of(region: str, parameter: str) -> str:
    """The image that a parameter names in a region."""
    return f"ami-0{hashlib.sha256(f'{region} {parameter}'.encode()).hexdigest()[:16]}"


def fill_region(backend: Any, region: str, size_gb: int) -> None:
    """Puts the public images, of that size, into moto's model of a region."""
    from moto.ec2.models.amis import Ami

    class PublicImage(Ami):
        __module__ = Ami.__module__  # moto reads the service's name from it

        @property
        def block_device_mappings(self) -> list[dict[str, Any]]:
            disk = {"VolumeSize": size_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
            ebs = {"SnapshotId": self.ebs_snapshot.id, "Encrypted": False, **disk}
            return [{"DeviceName": self.root_device_name, "Ebs": ebs}]

    for parameter, (architecture, root) in _PUBLIC_IMAGES.items():
        one = image_of(region, parameter)
        title = parameter.split("/")[-3].replace("-", " ")
        backend.amis[one] = PublicImage(
            backend,
            one,
            name=f"Deep Learning {title} 20261101",
            owner_id=_IMAGE_OWNER,
            owner_alias="amazon",
            public=True,
            virtualization_type="hvm",
            architecture=architecture,
            hypervisor="xen",
            root_device_type="ebs",
            root_device_name=root,
            region_name=f"{region}a",
        )


def offered_zones(region: str, instance_type: str, unlisted: Set[tuple[str, str]]) -> list[str]:
    """The zones of a region that list a type, without what the script took off the list."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    zones = {one["Location"] for one in rows if one["InstanceType"] == instance_type}
    return sorted(zone for zone in zones if (zone, instance_type) not in unlisted)


def vcpus_of(instance_type: str) -> int:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    known = INSTANCE_TYPES.get(instance_type, {})
    return int(known.get("VCpuInfo", {}).get("DefaultVCpus", 0))
