"""What a rig on EC2 writes down while something goes wrong, and servers that end before they could.

What is asserted is what the next server makes of it: no machine that nobody knows of, no twin.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from forge.suites.ec2_fault_case import FAR, FIRST, Ec2FaultCase
from forge.suites.fake_aws_world import CallFault
from forge.suites.raw_stdio import raw_server


class Ec2RecordFaultSuite(Ec2FaultCase):
    """What is written down and is damaged, and servers that end before they could write."""

    boots = False

    async def test_what_half_a_record_tells(self) -> None:  # D39
        """Tags win over a journal that is damaged; what it does not know any more is told."""
        async with self.in_process() as client:
            machine = await self.created(client)
            path = self.rig_state / "journal.jsonl"
            path.write_text('{"v": 1, "event": "create int' + "\n\x00\n[]\n" + '{"v": 99}\n')
            (self.rig_state / "machine.json").write_text("{half")
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(found["name"], machine["name"])
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
            (orphan,) = (await self.answer(client, "list_orphans"))["orphans"]
            self.assertIn("this installation's journal does not know it", orphan["reasons"])
            await self.destroyed(client, machine)
        self.assertEqual(self.rented(), {})

    async def test_a_damaged_search_hides_no_machine(self) -> None:  # D39
        async with self.in_process() as client:
            machine = await self.created(client)
            (self.rig_state / "machine.json").unlink()
            (self.rig_state / "sweep").mkdir(exist_ok=True)
            (self.rig_state / "sweep" / "sweep.json").write_text('{"v": 1, "live": 7}')
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "unknown")
            self.assertIn("damaged", str(status["notes"]))
            ended = await self.destroyed(client, machine)
            self.assertTrue(ended["gone"])
        self.assertEqual(self.rented(), {})

    async def test_no_journal_no_machine(self) -> None:  # D38
        async with self.in_process() as client:
            await self.answer(client, "list_orphans")
            path = self.rig_state / "journal.jsonl"
            path.mkdir(parents=True)
            await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=FIRST)
            fault = await self.refusal(client, "find_tpu_vm", "DENIED")
            self.assertIn("journal", fault)
        self.assertEqual(self.asked(), [])

    async def test_a_cancelled_call_is_settled_by_the_next(self) -> None:  # D34
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        async with self.in_process() as client:
            call = asyncio.ensure_future(client.call_tool("create_gpu_instance", {"zone": FIRST}))
            await self.until(self.rented, "nothing was asked for")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(found["zone"], FIRST)
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
        self.assert_marked(1)

    async def test_the_server_ends_in_the_middle_of_a_create(self) -> None:  # D35, D36, D37, A31
        for way in ("end of input", "SIGKILL"):  # SIGTERM goes the way of the first
            with self.subTest(way=way):
                await self._ends_in_a_create(way)
                self.forget_everything()

    async def _ends_in_a_create(self, way: str) -> None:
        self.few_regions()
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            call = {"name": "create_gpu_instance", "arguments": {"zone": FIRST}}
            server.send("tools/call", call)
            await self.until(self.rented, "nothing was asked for")
            if way == "end of input":
                server.close_input()
            else:
                os.kill(server.process.pid, signal.SIGKILL)
            await self.until(lambda: server.process.poll() is not None, "the server stays")
        self.assert_marked(1)
        journal = [entry for entry in self.journal() if entry["event"].startswith("create ")]
        self.assertEqual([entry["event"] for entry in journal], ["create intended"])
        async with self.in_process() as client:
            status = await self.answer(client, "get_system_status")
            self.assertTrue(status["cost"]["billed"], status)
            fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
            self.assertIn(str(journal[0]["intent"]), fault)
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            await self.destroyed(client, found)
        self.assertEqual(self.rented(), {})

    async def test_a_state_folder_that_is_nobody_elses(self) -> None:  # A16, A49
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        async with self.in_process() as client:
            machine = await self.created(client)
            where = {"name": machine["name"], "zone": machine["zone"]}
            await self.answer(client, "plan_destroy", **where)
        kept = [path for path in self.state.rglob("*") if path.is_file()]
        self.assertGreater(len(kept), 4)
        for path in kept:
            self.assertEqual(path.stat().st_mode & 0o077, 0, path)
        for folder in {path.parent for path in kept}:
            self.assertEqual(folder.stat().st_mode & 0o077, 0, folder)
        tokens = json.loads(Path(self.rig_state / "tokens.json").read_text())
        self.assertEqual(len(tokens), 1)
