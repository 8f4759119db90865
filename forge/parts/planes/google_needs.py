"""What a rig on Google Cloud needs of this computer: gcloud and its login, other logins, ssh.

Tells a missing `gcloud auth login` from missing application-default credentials: the two are kept
apart by Google, and a person who did one often lacks the other. Knows no plane.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall
from forge.parts.boundaries.google_clients import google_access
from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import PlaneNeed

_LOGIN_READ_S = 15.0  # a person waits for it, not a client


async def google_needs(
    project: str, region: str, environment: Mapping[str, str] | None = None
) -> Sequence[PlaneNeed]:
    """Each need with what was seen. `region` is one that the rig uses: reading it proves login,
    project and the Compute Engine API in one call."""
    gcloud = Gcloud(project, environment=environment)
    return [
        await _gcloud_itself(gcloud),
        await _gcloud_login(gcloud, region),
        await asyncio.to_thread(_client_login, environment),
        PlaneNeed(
            "ssh",
            shutil.which("ssh") is not None,
            shutil.which("ssh") or "none on PATH",
            "on Debian: apt install openssh-client",
        ),
    ]


async def _gcloud_itself(gcloud: Gcloud) -> PlaneNeed:
    try:
        return PlaneNeed("gcloud", True, await gcloud.version(_LOGIN_READ_S))
    except RigError as error:
        return PlaneNeed("gcloud", False, error.what, error.next_step)


async def _gcloud_login(gcloud: Gcloud, region: str) -> PlaneNeed:
    name = f"gcloud's login, for project {gcloud.project}"
    try:
        await gcloud.read(GcloudCall(("compute", "regions", "describe"), region), _LOGIN_READ_S)
    except RigError as error:
        return PlaneNeed(name, False, error.what, error.next_step or "gcloud auth login")
    return PlaneNeed(name, True, f"it reads {region}")


def _client_login(environment: Mapping[str, str] | None) -> PlaneNeed:
    """Secret Manager and Cloud Logging are asked through Google's client libraries."""
    name = "application-default credentials, for secrets and logs"
    try:
        google_access(environment)
    except RigError as error:
        return PlaneNeed(
            name, False, error.what, error.next_step or "gcloud auth application-default login"
        )
    except ImportError as error:
        return PlaneNeed(name, False, f"package {error.name} is not installed", "make install")
    return PlaneNeed(name, True, "there")
