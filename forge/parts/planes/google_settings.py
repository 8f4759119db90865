"""What every rig on Google Cloud has to name, whichever of its services rents the machine.

Knows no service and no command.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from forge.parts.planes.capacity_plane import CapacitySettings

NO_ADDRESS_CAUTION = (
    "EXTERNAL_IP is 0: without Cloud NAT in its subnet the machine can pull no image"
)

# What tools say of whoever pays, where every plane of Google's says the same.
GOOGLE_WORDS: Mapping[str, str] = {
    "payer": "project",
    "quota_rule": "Spot and flex-start draw on the preemptible quota",
    "quota_where": "Google Cloud console, Quotas",
}


class GoogleSettings(CapacitySettings):
    """The keys of the project and of the machine's place in it."""

    project: str = Field(
        pattern=r"^(?:[a-z][a-z0-9.-]{1,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]$",
        description="The Google Cloud project that pays.",
    )
    service_account: str = Field(
        default="",
        pattern=r"^(?:[a-z][a-z0-9-]{4,28}[a-z0-9](?:@[a-z0-9.-]{4,120})?)?$",
        description="What the machine runs as: its e-mail, or its name in the project. As nobody "
        "it could read no secret.",
    )
    network: str = Field(
        default="",
        pattern=r"^[a-z0-9-]{0,63}$",
        description="The network; empty: the project's default.",
    )
    subnet: str = Field(
        default="", pattern=r"^[a-z0-9-]{0,63}$", description="The subnet; empty: the default."
    )
    external_ip: bool = Field(
        default=True,
        description="0 gives the machine no external address: then the subnet needs Cloud NAT, or "
        "no image can be pulled.",
    )


def account_email(settings: GoogleSettings) -> str:
    """The e-mail of the service account that the machine runs as; empty for none."""
    name = settings.service_account
    if not name or "@" in name:
        return name
    # A project of a domain (example.com:name) turns round in an address.
    domain, colon, project = settings.project.rpartition(":")
    return f"{name}@{project}{'.' if colon else ''}{domain}.iam.gserviceaccount.com"
