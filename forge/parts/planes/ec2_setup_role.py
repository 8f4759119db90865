"""The role of a rig's machines and its instance profile: what of them is there, and what would be.

Knows its own by the mark. Changes nothing by itself.
"""

from __future__ import annotations

import json
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.planes.capacity_plane import MANAGED_BY
from forge.parts.planes.ec2_settings import EC2_HOME
from forge.parts.planes.ec2_setup_acts import SETUP_TAGS, SetupCall, SetupLook, SetupWish

SSM_MACHINE_POLICY = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"


def trust_of_machines() -> dict[str, Any]:
    """Who may take the role on: EC2's machines alone."""
    allowed = {
        "Effect": "Allow",
        "Principal": {"Service": "ec2.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    return {"Version": "2012-10-17", "Statement": [allowed]}


def rights_of_machine(wish: SetupWish) -> dict[str, Any]:
    """Beside Systems Manager's: to read that one secret, and the rig's own part of that bucket.
    Without statements where the rig names neither."""
    statements: list[dict[str, Any]] = []
    if wish.secret:
        # Secrets Manager ends an ARN with a dash and six characters of its own.
        arn = f"arn:aws:secretsmanager:{wish.region}:{wish.account}:secret:{wish.secret}-??????"
        statements.append(
            {"Effect": "Allow", "Action": "secretsmanager:GetSecretValue", "Resource": arn}
        )
    if wish.bucket:
        arn = f"arn:aws:s3:::{wish.bucket}"
        own = {"StringLike": {"s3:prefix": [f"{wish.rig}/*"]}}
        statements += [
            {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": arn, "Condition": own},
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject"],
                "Resource": f"{arn}/{wish.rig}/*",
            },
        ]
    return {"Version": "2012-10-17", "Statement": statements}


class SetupRole:
    """Looks at role and profile; both bear the same name."""

    def __init__(self, aws: Aws, wish: SetupWish) -> None:
        self._aws = aws
        self._wish = wish

    async def look(self, found: SetupLook) -> None:
        """Into `found`: what is there, and what would be made. Raises DENIED where one of them is
        somebody else's, or is not as it is made here."""
        await self._look_at_role(found)
        await self._look_at_profile(found)

    async def _look_at_role(self, found: SetupLook) -> None:
        name, role = self._wish.profile, await self._role()
        if role is None:
            trust = json.dumps(trust_of_machines())
            about = "Machines that the gemma4 rigs rent"
            found.act(
                f"role {name}, which only EC2's machines take on",
                self._iam(
                    "create_role",
                    RoleName=name,
                    AssumeRolePolicyDocument=trust,
                    Description=about,
                    Tags=list(SETUP_TAGS),
                ),
            )
        elif role.get("AssumeRolePolicyDocument") != trust_of_machines():
            raise _other_than_made(f"the role {name}", "others than EC2's machines may take it on")
        else:
            found.there.append(f"role {name}")
        core = "the right to be reached through Systems Manager (AmazonSSMManagedInstanceCore)"
        if role is not None and SSM_MACHINE_POLICY in await self._attached():
            found.there.append(core)
        else:
            attached = {"RoleName": name, "PolicyArn": SSM_MACHINE_POLICY}
            found.act(core, self._iam("attach_role_policy", **attached))
        await self._look_at_rights(found, await self._rights() if role is not None else None)

    async def _look_at_rights(self, found: SetupLook, now: Any) -> None:
        wish, rights = self._wish, rights_of_machine(self._wish)
        own = {"RoleName": wish.profile, "PolicyName": wish.policy}
        uses = [f"to read the secret {wish.secret}"] if wish.secret else []
        uses += [f"to keep {wish.rig}/ in the bucket {wish.bucket}"] if wish.bucket else []
        words = f"the right {' and '.join(uses)} (policy {wish.policy})"
        if not uses:
            if now is not None:
                gone = f"policy {wish.policy} goes: neither HF_SECRET nor CACHE_BUCKET is set"
                found.act(gone, self._iam("delete_role_policy", **own))
        elif now == rights:
            found.there.append(words)
        else:
            text = json.dumps(rights)
            found.act(words, self._iam("put_role_policy", **own, PolicyDocument=text))

    async def _look_at_profile(self, found: SetupLook) -> None:
        name = self._wish.profile
        profile = await self._profile()
        joined = self._iam("add_role_to_instance_profile", InstanceProfileName=name, RoleName=name)
        roles = [one["RoleName"] for one in (profile or {}).get("Roles", [])]
        if profile is None:
            made = self._iam(
                "create_instance_profile", InstanceProfileName=name, Tags=list(SETUP_TAGS)
            )
            found.act(f"instance profile {name} with that role", made, joined)
        elif not roles:
            found.act(f"the role in the instance profile {name}", joined)
        elif roles == [name]:
            found.there.append(f"instance profile {name} with that role")
        else:
            raise _other_than_made(f"the instance profile {name}", f"it has the role {roles[0]}")

    async def look_back(self, found: SetupLook) -> None:
        """Into `found`: what would be taken back, and what stays because it is not this rig's."""
        wish, name = self._wish, self._wish.profile
        try:
            role, profile = await self._role(), await self._profile()
        except RigError as error:
            if error.error_class != "DENIED":
                raise
            found.there.append(error.what)
            return
        if role is None and profile is None:
            return
        policies = await self._inline() if role is not None else []
        others = [one for one in policies if one != wish.policy]
        if wish.policy in policies:
            found.act(
                f"policy {wish.policy} of the role {name}",
                self._iam("delete_role_policy", RoleName=name, PolicyName=wish.policy),
            )
        if others:
            found.there.append(
                f"role and instance profile {name}: {', '.join(others)} in it is not this rig's"
            )
            return
        calls: list[SetupCall] = []
        if profile is not None:
            of_profile = {"InstanceProfileName": name}
            for one in profile.get("Roles", []):
                taken = {**of_profile, "RoleName": one["RoleName"]}
                calls.append(self._iam("remove_role_from_instance_profile", **taken))
            calls.append(self._iam("delete_instance_profile", **of_profile))
        if role is not None:
            for arn in await self._attached():
                calls.append(self._iam("detach_role_policy", RoleName=name, PolicyArn=arn))
            calls.append(self._iam("delete_role", RoleName=name))
        found.act(f"role and instance profile {name}", *calls)

    async def _role(self) -> dict[str, Any] | None:
        """The role, None where there is none. Raises DENIED for one without the mark."""
        name = self._wish.profile
        answer = await self._iam_read("get_role", RoleName=name)
        return None if answer is None else _ours(answer["Role"], f"the role {name}")

    async def _profile(self) -> dict[str, Any] | None:
        name = self._wish.profile
        answer = await self._iam_read("get_instance_profile", InstanceProfileName=name)
        if answer is None:
            return None
        return _ours(answer["InstanceProfile"], f"the instance profile {name}")

    async def _attached(self) -> list[str]:
        name = self._wish.profile
        answer = await self._iam_read("list_attached_role_policies", RoleName=name)
        return [str(one["PolicyArn"]) for one in (answer or {}).get("AttachedPolicies", [])]

    async def _inline(self) -> list[str]:
        answer = await self._iam_read("list_role_policies", RoleName=self._wish.profile)
        return [str(one) for one in (answer or {}).get("PolicyNames", [])]

    async def _rights(self) -> Any:
        own = {"RoleName": self._wish.profile, "PolicyName": self._wish.policy}
        answer = await self._iam_read("get_role_policy", **own)
        return None if answer is None else answer["PolicyDocument"]

    async def _iam_read(self, operation: str, **named: str) -> dict[str, Any] | None:
        """None where there is no such thing."""
        try:
            wanted: dict[str, Any] = {**named}
            return await self._aws.read("iam", EC2_HOME, operation, **wanted)
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return None
            raise

    def _iam(self, operation: str, **parameters: Any) -> SetupCall:
        return SetupCall("iam", EC2_HOME, operation, parameters)


def _ours(thing: dict[str, Any], what: str) -> dict[str, Any]:
    if {"Key": "managed-by", "Value": MANAGED_BY} in thing.get("Tags", []):
        return thing
    raise RigError(
        "DENIED",
        f"{what} is somebody else's: it lacks the tag managed-by={MANAGED_BY}",
        "INSTANCE_PROFILE in tpu.env with another name, or a person tags it",
    )


def _other_than_made(what: str, why: str) -> RigError:
    return RigError(
        "DENIED",
        f"{what} is not as set-up makes it: {why}; nothing was changed",
        "a person looks at it in AWS's console, or names another INSTANCE_PROFILE in tpu.env",
    )
