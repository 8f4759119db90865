"""analyze_cloud_logging over a plane with a log store in memory, through a real client."""

from __future__ import annotations

import os
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import RigError
from forge.parts.planes.this_computer import ThisComputer
from forge.parts.toolsets.cloud_diagnosis import CloudDiagnosisToolset
from tests.diagnosed_rig import assembled, diagnosed_rig
from tests.failure_forms import in_form, read_cases


class LoggedPlane(ThisComputer):
    """This computer with a provider's log store beside it; notes what it was asked for."""

    entries = ""
    asked: list[tuple[int, str, str]] = []

    async def read_cloud_logs(self, minutes: int, severity: str, resource: str) -> str:
        self.asked.append((minutes, severity, resource))
        if not self.entries:
            raise RigError("DENIED", "the account may not read the log", "get_help()")
        return self.entries


class TestCloudLogs(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        place = Path(self.enterContext(tempfile.TemporaryDirectory()))
        state = {"XDG_STATE_HOME": str(place / "s"), "XDG_CACHE_HOME": str(place / "c")}
        self.enterContext(mock.patch.dict(os.environ, state))
        (place / "rig").mkdir()
        assembled(place / "rig")
        rig = replace(
            diagnosed_rig(),
            toolsets=(CloudDiagnosisToolset,),
            make_plane=lambda paths, label, journal, _load: LoggedPlane(paths, label, journal),
        )
        self.rig = AssembledRig(rig, place / "rig" / "server.py")
        LoggedPlane.entries, LoggedPlane.asked = "", []

    async def called(self, **arguments: Any) -> Any:
        async with Client(self.rig.server()) as client:
            return await client.call_tool("analyze_cloud_logging", arguments)

    async def test_entries_are_read_by_the_same_bank(self) -> None:
        for case in read_cases("serve")[:8]:
            LoggedPlane.entries = in_form(case.text, "buried")
            result = await self.called(minutes=15, severity="ERROR", resource="service")
            self.assertFalse(result.is_error, result.content)
            self.assertEqual(result.structured_content["kind"], case.kind)
            self.assertIn(case.line, result.structured_content["line"])
        self.assertEqual(set(LoggedPlane.asked), {(15, "ERROR", "service")})

    async def test_healthy_entries_and_none_at_all(self) -> None:
        LoggedPlane.entries = read_cases("healthy")[0].text
        result = await self.called()
        self.assertEqual(result.structured_content["summary"], "no failure found")
        LoggedPlane.entries = ""
        result = await self.called()
        self.assertTrue(result.content[0].text.startswith("DENIED "))

    async def test_what_is_out_of_bounds_is_refused_by_name_and_nothing_is_read(self) -> None:
        for name, value in (
            ("minutes", 0),
            ("minutes", 10_081),
            ("severity", "x OR name~.*"),
            ("resource", "projects/other"),
            ("filter", "severity>=ERROR"),
        ):
            result = await self.called(**{name: value})
            self.assertTrue(result.content[0].text.startswith(f"INVALID {name}: "), name)
        self.assertEqual(LoggedPlane.asked, [])

    async def test_a_plane_without_a_log_store_says_so(self) -> None:
        rig = replace(diagnosed_rig(), toolsets=(CloudDiagnosisToolset,))
        self.rig = AssembledRig(rig, self.rig.folder / "server.py")
        result = await self.called()
        self.assertTrue(result.content[0].text.startswith("INTERNAL "))


if __name__ == "__main__":
    unittest.main()
