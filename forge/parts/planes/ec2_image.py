"""Which image a public parameter of Systems Manager means in a region, and what is there instead.

Knows no machine and no settings.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError

_IMAGE_READ_S = 5.0  # seconds for each of two reads
_NEIGHBOUR_PAGES, _NEIGHBOUR_S = 30, 5.0  # of ten parameters each; seconds for all of them
_IMAGE_ID = re.compile(r"ami-[0-9a-f]{8,17}")


@dataclass(frozen=True)
class MachineImage:
    """The image of a region: what its root disk is called, and the least size of that in GB."""

    image_id: str
    root_device: str
    architecture: str
    name: str
    disk_gb: int


async def image_of_parameter(aws: Aws, parameter: str, region: str) -> MachineImage:
    """The image that `parameter` names in a region now; asked anew each time, images go.

    Raises INVALID where the parameter is gone, with those most like it that are there, NOT_FOUND
    where its image is.
    """
    image_id = await _image_id(aws, parameter, region)
    answer = await aws.read(
        "ec2", region, "describe_images", timeout_s=_IMAGE_READ_S, ImageIds=[image_id]
    )
    image = next((one for one in answer.get("Images", []) if one.get("ImageId") == image_id), None)
    if image is None or image.get("State", "available") != "available":
        raise RigError(
            "NOT_FOUND",
            f"{parameter} names {image_id} in {region}, and EC2 does not have that image",
            "another AMI_PARAMETER in tpu.env, or another region",
        )
    root = str(image.get("RootDeviceName", ""))
    sizes = {
        one.get("DeviceName"): one.get("Ebs", {}).get("VolumeSize", 0)
        for one in image.get("BlockDeviceMappings", [])
    }
    if not root:
        raise RigError("UNKNOWN", f"EC2 does not tell the root device of {image_id} in {region}")
    return MachineImage(
        image_id,
        root,
        str(image.get("Architecture", "")),
        str(image.get("Name", image_id)),
        int(sizes.get(root) or 0),
    )


async def _image_id(aws: Aws, parameter: str, region: str) -> str:
    try:
        answer = await aws.read(
            "ssm", region, "get_parameter", timeout_s=_IMAGE_READ_S, Name=parameter
        )
    except RigError as error:
        if "ParameterNotFound" not in error.what:
            raise
        near = await _neighbours(aws, parameter, region)
        raise RigError(
            "INVALID",
            f"AMI_PARAMETER is gone in {region}, or never was: {parameter}; nothing was started",
            f"set it in tpu.env to one that is there: {', '.join(near)}"
            if near
            else "find another among Systems Manager's public parameters, under /aws/service",
        ) from None
    value = str(answer.get("Parameter", {}).get("Value", ""))
    if not _IMAGE_ID.fullmatch(value):
        raise RigError("INVALID", f"AMI_PARAMETER names no image in {region}: {parameter}")
    return value


async def _neighbours(aws: Aws, parameter: str, region: str) -> Sequence[str]:
    """The parameters most like it that are there; none where they cannot be read."""
    folder = parameter.rsplit("/", 3)[0]  # what stands before KIND/latest/ami-id
    leaf = "/".join(parameter.rsplit("/", 2)[1:])
    names: list[str] = []
    token = ""
    ends = time.monotonic() + _NEIGHBOUR_S
    for _ in range(_NEIGHBOUR_PAGES):
        left = ends - time.monotonic()
        if left <= 0:
            break
        more = {"NextToken": token} if token else {}
        try:
            page = await aws.read(
                *("ssm", region, "get_parameters_by_path"),
                timeout_s=left,
                **{"Path": folder, "Recursive": True, **more},
            )
        except RigError:
            break
        names += [str(one["Name"]) for one in page.get("Parameters", [])]
        token = str(page.get("NextToken") or "")
        if not token:
            break
    alike = [one for one in names if one.endswith(f"/{leaf}")]
    return difflib.get_close_matches(parameter, alike, 4, 0.0)
