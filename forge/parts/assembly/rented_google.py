"""What rigs that rent a machine of Google's have in common: its log, its metadata, their packages.

Knows no plane and no engine: the modules beside it put both to this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

from forge.parts.assembly.rented_machine import RentedMachine
from forge.parts.boundaries.google_logs import LoggedMachine, rig_log_text
from forge.parts.planes.plane import PlaneNeed
from forge.parts.toolsets.cloud_diagnosis import CloudLogResource, CloudLogSeverity
from forge.parts.toolsets.deployment import boot_paths

# Secret Manager and Cloud Logging. gcloud does the rest.
GOOGLE_REQUIREMENTS = ("google-cloud-logging>=3.17,<4", "google-cloud-secret-manager>=2.32,<3")


class GoogleValues(Protocol):
    """The key that this part reads; the plane's settings have it."""

    project: str


class RentedGooglePlane(RentedMachine):
    """A rented machine that writes to Cloud Logging and boots by its metadata."""

    log_kind: Literal["gce_instance", "tpu_worker"] = "gce_instance"

    async def read_cloud_logs(
        self, minutes: int, severity: CloudLogSeverity, resource: CloudLogResource
    ) -> str:
        """The log store's entries of this rig's machine, the present one or the last."""
        record = self.record()
        machine = LoggedMachine(self.log_kind, record.name, record.zone, record.provider_id)
        return await rig_log_text(self._project(), machine, minutes, severity, resource)

    def _project(self) -> str:
        return cast(GoogleValues, self._values()).project

    def boot_paths(self) -> Mapping[str, Path]:
        """The files of a machine's metadata by key, written already or not."""
        return boot_paths(self._paths.state, self._program)

    async def plane_needs(self) -> Sequence[PlaneNeed]:
        raise NotImplementedError
