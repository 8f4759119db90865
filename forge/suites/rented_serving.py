"""The shared suites over a model on a rented machine: its answers, measuring, diagnosis."""

from __future__ import annotations

from mcp import Client

from forge.suites.answer_faults import AnswerFaultSuite
from forge.suites.diagnosing import DiagnosingSuite
from forge.suites.measuring import MeasuringSuite
from forge.suites.rented_case import RentedCase


class RentedAnswerFaultSuite(RentedCase, AnswerFaultSuite):
    """Every fault of an answer, through the tunnel."""


class RentedMeasuringSuite(RentedCase, MeasuringSuite):
    """A benchmark through the tunnel, with the reports, the planner and the probes loaded."""

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}


class RentedDiagnosingSuite(RentedCase, DiagnosingSuite):
    """A boot that fails is explained by the boot's own console and the container's log."""

    async def failed_start(self, client: Client) -> None:
        await self.created(client)
        await self.refusal(client, "wait_for_model_ready", "INTERNAL", wait_s=50)
