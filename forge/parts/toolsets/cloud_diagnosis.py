"""Diagnosis over the provider's own log store, for rigs whose plane can read one."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.toolsets.diagnosis import DiagnosisOutcome, DiagnosisToolset
from forge.parts.toolsets.toolset import rig_tool

CloudLogSeverity = Literal["DEFAULT", "INFO", "WARNING", "ERROR", "CRITICAL"]
CloudLogResource = Literal["machine", "service", "all"]


class CloudLogPlane(Protocol):
    """The verb of a plane that can read the provider's logs of this rig's own resources."""

    async def read_cloud_logs(
        self, minutes: int, severity: CloudLogSeverity, resource: CloudLogResource
    ) -> str: ...


class CloudDiagnosisToolset(DiagnosisToolset):
    """Diagnosis, and the provider's logs as one more source."""

    @rig_tool(title="Analyse the provider's log", effect="reads")
    async def analyze_cloud_logging(
        self,
        minutes: Annotated[int, Field(ge=1, le=10_080, description="How far to look back.")] = 60,
        severity: Annotated[
            CloudLogSeverity, Field(description="The least severity read; DEFAULT reads all.")
        ] = "DEFAULT",
        resource: Annotated[
            CloudLogResource, Field(description="This rig's machine, its service, or both.")
        ] = "all",
    ) -> DiagnosisOutcome:
        """Read the provider's log entries of this rig's own resources and answer as analyze_logs
        does: the deciding line, cause, change. Takes seconds; reading costs nothing within the
        provider's free share. Changes nothing."""
        reader = getattr(self.context.plane, "read_cloud_logs", None)
        if reader is None:
            raise RigError("INTERNAL", "this rig's plane has no log store", "analyze_logs()")
        text = str(await reader(minutes, severity, resource))
        return await self.diagnosed(text, f"the provider's log, {minutes} min")
