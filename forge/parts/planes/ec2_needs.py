"""What a rig on EC2 needs of this computer and of the account: credentials, plugin, profile.

Only looks; what set-up makes, it names set-up for. Knows no plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.ssm_plugin import find_ssm_plugin
from forge.parts.ground.errors import RigError
from forge.parts.planes.ec2_settings import EC2_HOME, Ec2Settings
from forge.parts.planes.plane import PlaneNeed

_SET_UP = "a person runs: python3 server.py set-up"


async def aws_needs(
    settings: Ec2Settings, environment: Mapping[str, str] | None = None
) -> Sequence[PlaneNeed]:
    """Each need with what was seen. `environment` is for tests, as in `Aws`."""
    aws = Aws(settings.aws_account, settings.aws_profile, environment)
    return await asyncio.gather(
        _aws_credentials(aws), _ssm_plugin_here(environment), _instance_profile(aws, settings)
    )


async def _aws_credentials(aws: Aws) -> PlaneNeed:
    name = f"AWS credentials, of account {aws.account}"
    try:
        await aws.check_account()
    except RigError as error:
        return PlaneNeed(name, False, error.what, error.next_step)
    return PlaneNeed(name, True, f"profile {aws.profile}" if aws.profile else "there")


async def _ssm_plugin_here(environment: Mapping[str, str] | None) -> PlaneNeed:
    name = "session-manager-plugin, for the way into the machine"
    try:
        plugin = await find_ssm_plugin(environment)
    except RigError as error:
        return PlaneNeed(name, False, error.what, error.next_step)
    caution = f"; {plugin.caution}" if plugin.caution else ""
    return PlaneNeed(name, True, f"{plugin.version}, {plugin.path}{caution}")


async def _instance_profile(aws: Aws, settings: Ec2Settings) -> PlaneNeed:
    """Without it Systems Manager never sees the machine: then nobody reaches it."""
    profile = settings.instance_profile
    name = f"instance profile {profile}, with a role"
    try:
        found = await aws.read("iam", EC2_HOME, "get_instance_profile", InstanceProfileName=profile)
    except RigError as error:
        if error.error_class == "NOT_FOUND":
            return PlaneNeed(name, False, "there is none in this account", _SET_UP)
        return PlaneNeed(name, False, error.what, error.next_step or _SET_UP)
    roles = [str(one.get("RoleName", "")) for one in found["InstanceProfile"].get("Roles", [])]
    if not roles:
        return PlaneNeed(name, False, "it is there, and has no role", _SET_UP)
    return PlaneNeed(name, True, f"role {roles[0]}")
