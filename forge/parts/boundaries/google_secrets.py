"""Secret Manager for one secret of a rig: saved from here, never read back.

Knows names, labels and versions; a payload goes in and comes out of nothing. Knows no tool and not
what the secret is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forge.parts.boundaries.google_clients import call_google, google_access
from forge.parts.ground.errors import RigError, invalid_parameter

SECRET_CALL_S = 25.0  # seconds for all requests of one save together
# Seconds for each; and no retries of the library's own: what a repeat may do, the caller knows.
_SECRET_REQUEST: Mapping[str, Any] = {"retry": None, "timeout": 8.0}
# Secret Manager's own grammar of a secret's id, and Compute Engine's of a project's.
_SECRET_ID = re.compile(r"[A-Za-z0-9_-]{1,255}")
_SECRET_PROJECT = re.compile(r"(?:[a-z][a-z0-9.-]{1,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_SECRET_VERSION = re.compile(r".+/versions/([0-9]{1,9})")
_SECRET_LIMIT = 65_536  # bytes: Secret Manager's limit of a payload


@dataclass(frozen=True)
class SecretState:
    """One secret without its payload. `enabled` are the numbers of the versions that can be read,
    the newest first; None where the list was refused or did not come. `ours`: it carries the mark.
    """

    project: str
    name: str
    ours: bool
    enabled: tuple[int, ...] | None


@dataclass(frozen=True)
class SavedSecret:
    """A version that was added and read back; `made`: the secret was not there before."""

    state: SecretState
    version: int
    made: bool


async def save_secret(
    project: str,
    name: str,
    payload: bytes,
    labels: Mapping[str, str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = SECRET_CALL_S,
) -> SavedSecret:
    """Add `payload` as the newest version of a secret, which is made where it is not there.

    Only a secret with the label managed-by of `labels` gets a version: somebody else's is DENIED.
    Older versions stay as they are. Only the store's own "not found" leads to a new secret. Raises
    INVALID, AUTH, DENIED, UNREACHABLE; UNKNOWN where a version may have been added all the same.
    """
    path = _secret_path(project, name)
    if not 0 < len(payload) <= _SECRET_LIMIT:
        raise invalid_parameter("payload", f"must have 1 to {_SECRET_LIMIT} bytes")
    mark = labels["managed-by"]
    try:
        known = await secret_state(project, name, mark, environment=environment)
    except RigError as error:
        if error.error_class != "NOT_FOUND":
            raise
        known = None
    if known is not None and not known.ours:
        raise _foreign_secret(project, name, mark)

    def work() -> SavedSecret:
        client = _secret_client(environment)
        made = known is None and _make_secret(client, project, name, labels)
        asked = {"parent": path, "payload": {"data": payload}}
        added = client.add_secret_version(request=asked, **_SECRET_REQUEST)
        found = client.get_secret_version(request={"name": added.name}, **_SECRET_REQUEST)
        version = _version_number(found.name)
        if found.name != added.name or found.state.name != "ENABLED" or not version:
            raise RigError(
                "UNKNOWN",
                f"the new version of {name} is not there as it should be",
                "look at the secret in Google Cloud's console before anything is repeated",
            )
        state = SecretState(project, name, True, _enabled_versions(client, path))
        return SavedSecret(state, version, made)

    return await call_google(work, project=project, change=True, timeout_s=timeout_s)


async def secret_state(
    project: str,
    name: str,
    mark: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = SECRET_CALL_S,
) -> SecretState:
    """What is known of a secret without reading it; `mark` is the managed-by that makes it ours.

    Raises NOT_FOUND where the store says so, and what `save_secret` raises.
    """
    path = _secret_path(project, name)

    def work() -> SecretState:
        client = _secret_client(environment)
        found = client.get_secret(request={"name": path}, **_SECRET_REQUEST)
        ours = found.labels.get("managed-by") == mark
        return SecretState(project, name, ours, _enabled_versions(client, path))

    return await call_google(work, project=project, change=False, timeout_s=timeout_s)


def _secret_path(project: str, name: str) -> str:
    if not _SECRET_PROJECT.fullmatch(project):
        raise invalid_parameter("project", "must be the id of a Google Cloud project")
    if not _SECRET_ID.fullmatch(name):
        raise invalid_parameter("secret", "must be 1 to 255 letters, digits, dashes, underscores")
    return f"projects/{project}/secrets/{name}"


def _secret_client(environment: Mapping[str, str] | None) -> Any:
    access = google_access(environment)
    from google.api_core.client_options import ClientOptions
    from google.cloud.secretmanager_v1 import SecretManagerServiceClient

    options = ClientOptions(api_endpoint=access.endpoint) if access.endpoint else None
    # HTTP, in tests as in earnest: gRPC would not speak to a plain loopback server.
    return SecretManagerServiceClient(
        credentials=access.credentials, transport="rest", client_options=options
    )


def _make_secret(client: Any, project: str, name: str, labels: Mapping[str, str]) -> bool:
    """Whether it was made here. Raises DENIED where somebody else was faster."""
    from google.api_core.exceptions import Conflict

    secret = {"replication": {"automatic": {}}, "labels": dict(labels)}
    asked = {"parent": f"projects/{project}", "secret_id": name, "secret": secret}
    try:
        client.create_secret(request=asked, **_SECRET_REQUEST)
        return True
    except Conflict:
        path = f"projects/{project}/secrets/{name}"
        found = client.get_secret(request={"name": path}, **_SECRET_REQUEST)
    if found.labels.get("managed-by") != labels["managed-by"]:
        raise _foreign_secret(project, name, labels["managed-by"])
    return False


def _foreign_secret(project: str, name: str, mark: str) -> RigError:
    return RigError(
        "DENIED",
        f"the secret {name} in {project} lacks the label managed-by={mark}: it is somebody's who "
        "may read its newest version elsewhere",
        f"name another secret in tpu.env, or a person marks it: gcloud secrets update {name} "
        f"--update-labels=managed-by={mark} --project={project}",
    )


def _enabled_versions(client: Any, path: str) -> tuple[int, ...] | None:
    """None where it cannot be said: that must not make a save look like a failure."""
    with suppress(Exception):
        asked = {"parent": path, "filter": "state:ENABLED", "page_size": 100}
        listed = client.list_secret_versions(request=asked, **_SECRET_REQUEST)
        numbers = (_version_number(one.name) for one in listed if one.state.name == "ENABLED")
        return tuple(sorted((number for number in numbers if number), reverse=True))
    return None


def _version_number(path: str) -> int:
    """The number at the end of a version's path; 0 where there is none."""
    matched = _SECRET_VERSION.fullmatch(path)
    return int(matched[1]) if matched else 0
