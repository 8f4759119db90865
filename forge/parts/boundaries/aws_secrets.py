"""Secrets Manager for one secret of a rig: saved from here, never read back.

Knows names, tags and versions; a payload goes in and comes out of nothing. Knows no tool and not
what the secret is for.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError, invalid_parameter

_AWS_SECRET_S = 15.0  # seconds for a change
_AWS_SECRET_LOOKS, _AWS_SECRET_PAUSE_S = 4, 0.7  # what was written shows after a moment
# Secrets Manager's own grammar of a name.
_AWS_SECRET_NAME = re.compile(r"[A-Za-z0-9/_+=.@-]{1,512}")
_AWS_SECRET_LIMIT = 65_536  # bytes: its limit of a payload


@dataclass(frozen=True)
class AwsSecretState:
    """One secret without its payload: `arn` names it for a policy, `current` is the id of the
    version that is read without naming one (empty: none yet), `ours`: it carries the mark."""

    region: str
    name: str
    arn: str
    ours: bool
    current: str


@dataclass(frozen=True)
class SavedAwsSecret:
    """A version that was written and read back; `made`: the secret was not there before."""

    state: AwsSecretState
    made: bool


async def save_aws_secret(
    aws: Aws, region: str, name: str, payload: str, labels: Mapping[str, str]
) -> SavedAwsSecret:
    """Make `payload` what is read of a secret, which is made where it is not there.

    Only a secret with the tag managed-by of `labels` gets a version: somebody else's is DENIED.
    Only the store's own "not found" leads to a new secret. Raises INVALID, AUTH, DENIED, BUSY,
    EXISTS (somebody wrote at the same moment), UNREACHABLE, TIMEOUT; UNKNOWN where a version may
    have been written all the same.
    """
    if not 0 < len(payload.encode()) <= _AWS_SECRET_LIMIT:
        raise invalid_parameter("payload", f"must have 1 to {_AWS_SECRET_LIMIT} bytes")
    try:
        known = await aws_secret_state(aws, region, name, labels["managed-by"])
    except RigError as error:
        if error.error_class != "NOT_FOUND":
            raise
        known = None
    if known is not None and not known.ours:
        raise RigError(
            "DENIED",
            f"the secret {name} in {region} lacks the tag managed-by={labels['managed-by']}: it is "
            "somebody's who may read it elsewhere",
            f"name another secret in tpu.env, or a person tags it: aws secretsmanager tag-resource "
            f"--region {region} --secret-id {name} "
            f"--tags Key=managed-by,Value={labels['managed-by']}",
        )
    token = _secret_version_token(aws.account, region, name, known)
    asked: dict[str, Any] = {"ClientRequestToken": token, "SecretString": payload}
    if known is None:
        tags = [{"Key": key, "Value": value} for key, value in labels.items()]
        asked = {**asked, "Name": name, "Tags": tags}
    else:
        asked = {**asked, "SecretId": known.arn}
    operation = "create_secret" if known is None else "put_secret_value"
    await aws.change("secretsmanager", region, operation, _AWS_SECRET_S, **asked)
    state = await _secret_read_back(aws, region, name, labels["managed-by"], token)
    return SavedAwsSecret(state, known is None)


async def aws_secret_state(aws: Aws, region: str, name: str, mark: str) -> AwsSecretState:
    """What is known of a secret without reading it; `mark` is the managed-by that makes it ours.

    Raises NOT_FOUND where the store says so, DENIED for one that waits for its deletion, and what
    `Aws.read` raises.
    """
    if not _AWS_SECRET_NAME.fullmatch(name):
        raise invalid_parameter("secret", "must be 1 to 512 letters, digits and /_+=.@-")
    found = await aws.read("secretsmanager", region, "describe_secret", SecretId=name)
    if found.get("DeletedDate"):
        raise RigError(
            "DENIED",
            f"the secret {name} in {region} waits for its deletion and takes nothing",
            f"a person runs: aws secretsmanager restore-secret --region {region} "
            f"--secret-id {name}; or name another secret in tpu.env",
        )
    tags = {one.get("Key"): one.get("Value") for one in found.get("Tags", [])}
    stages = found.get("VersionIdsToStages", {})
    current = next((one for one, names in stages.items() if "AWSCURRENT" in names), "")
    return AwsSecretState(region, name, found["ARN"], tags.get("managed-by") == mark, current)


async def _secret_read_back(
    aws: Aws, region: str, name: str, mark: str, token: str
) -> AwsSecretState:
    """The secret once it shows the version `token`. Whatever else is read, it was written."""
    seen = "another version is the current one"
    for look in range(_AWS_SECRET_LOOKS):
        if look:
            await asyncio.sleep(_AWS_SECRET_PAUSE_S)
        try:
            state = await aws_secret_state(aws, region, name, mark)
        except RigError as error:
            seen = error.what
            continue
        if state.current == token:
            return state
    raise RigError(
        "UNKNOWN",
        f"a version of {name} in {region} was written and is not to be seen: {seen}",
        "look at the secret in AWS's console before anything is repeated",
    )


def _secret_version_token(
    account: str, region: str, name: str, known: AwsSecretState | None
) -> str:
    """The new version's id, from what it follows: the same attempt twice is one version, and two
    writers at once do not overwrite each other. Nothing of the payload is in it."""
    before = known.current if known is not None else ""
    text = f"gemma4-rigs {account} {region} {name} {before}"
    return hashlib.sha256(text.encode()).hexdigest()
