"""RIG_READ_ONLY=1: what changes something is refused at the call, not only left out of a list."""

from __future__ import annotations

from typing import ClassVar
from unittest import mock

from mcp import Client

from forge.suites.catalogue import PROTOCOL_MODES, listed_tools
from forge.suites.rig_case import RigCase, rig_under_test


class ReadOnlySuite(RigCase):
    """The gate stands before every mutating tool, in process and over stdio, and moves at once."""

    stopping_tool: ClassVar[str] = "stop_model"

    async def nothing_is_waited_for(self, client: Client) -> None:
        """Waiting for a model is allowed, and tells that there is none."""
        waited = await self.answer(client, "wait_for_model_ready", wait_s=0)
        self.assertEqual(waited["state"], "stopped")

    async def stop(self, client: Client) -> None:
        """End what serves, by the rig's tool."""
        await self.answer(client, self.stopping_tool)

    def _mutating(self) -> list[str]:
        return [name for name, effect in rig_under_test().tools.items() if effect != "reads"]

    async def _all_refused(self, client: Client) -> None:
        mutating = self._mutating()
        self.assertGreaterEqual(len(mutating), 3)
        for tool in mutating:
            good = {"job_id": "serve-20260101-000000-abcdef"} if tool == "cancel_job" else {}
            for arguments in (good, {"nonsense": 1}):
                text = await self.refusal(client, tool, "DENIED", **arguments)
                self.assertIn(tool, text)
                self.assertIn("read-only", text)
        await self.assert_all_gone()
        self.assertEqual(self.journal(), [])

    async def test_in_process_in_both_modes(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            for mode in PROTOCOL_MODES:
                async with self.in_process(mode) as client:
                    await self._all_refused(client)

    async def test_over_stdio(self) -> None:
        async with self.over_stdio("legacy", extra={"RIG_READ_ONLY": "1"}) as client:
            await self._all_refused(client)

    async def test_looking_is_allowed_and_the_list_stays_whole(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="true"):
            async with self.in_process() as client:
                self.assertEqual(len(await listed_tools(client)), len(rig_under_test().tools))
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["settings"]["RIG_READ_ONLY"], "True (environment)")
                await self.nothing_is_waited_for(client)

    async def test_the_file_moves_the_gate_while_the_server_runs(self) -> None:
        values = self.good_settings()
        try:
            async with self.in_process() as client:
                await self.serve(client)
                self.write_settings(**values, RIG_READ_ONLY="1")
                await self.refusal(client, self.stopping_tool, "DENIED")
                # A typing error in the file must not open the gate.
                self.write_settings(**values, RIG_READ_ONLY="1", DTIPE="float32")
                await self.refusal(client, self.stopping_tool, "DENIED")
                self.write_settings(**values, RIG_READ_ONLY="1")
                self.assertEqual(len(self.processes("server")), 1)
                await self.answer(client, "query_gemma4", prompt="still there?")
                self.write_settings(**values, RIG_READ_ONLY="0")
                await self.stop(client)
                await self.assert_all_gone()
        finally:
            self.write_settings(**values)
            for file in self.state.rglob("journal.jsonl"):
                file.unlink()
