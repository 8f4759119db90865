"""Ending what is rented while something goes wrong, and servers that end in the middle of an act.

What is asserted is what goes on costing money: what was deleted and what was not, what was said
about it, and what the next server finds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.suites.raw_stdio import raw_server
from forge.suites.rented_fault_case import EASTERN, STRANGER, WESTERN, RentedFaultCase


class _Every(set[str]):
    """Whatever is asked for is in it: names that are not known beforehand."""

    def __contains__(self, _name: object) -> bool:
        return True


class EndingFaultSuite(RentedFaultCase):
    """Nothing is called gone that is not, and nothing of anybody else's goes."""

    boots = False

    async def planned(self, client: Client, machine: dict[str, Any]) -> dict[str, str]:
        """What destroying that machine takes: its place and a fresh token."""
        where = {"name": str(machine["name"]), "zone": str(machine["zone"])}
        plan = await self.answer(client, "plan_destroy", **where)
        return {**where, "token": str(plan["token"])}

    def clock(self, shift_s: float) -> Any:
        """While it lasts, new servers of this process read a clock that is wrong by so much."""
        wrong = (lambda: time.time() + shift_s,)
        return mock.patch.object(self.module.Rentals.__init__, "__defaults__", wrong)

    async def test_a_cancel_that_does_nothing_stops_the_search_by_name(self) -> None:  # D08
        self.google.script.never = {WESTERN}
        self.google.script.stubborn = _Every()
        async with self.in_process() as client:
            begun = await self.answer(client, "find_tpu_vm", zones=[WESTERN, EASTERN])
            ended = await self.finished(client, begun["job_id"])
            self.assertTrue(ended["error"].startswith("UNKNOWN "), ended)
            (name,) = self.rented()["instances"]
            self.assertIn(f"{name} in {WESTERN} of project fake-proj may exist", ended["error"])
            self.assertEqual(self.asked(), [WESTERN])
            self.google.script.stubborn = set()
            await self.destroyed(client, {"name": name, "zone": WESTERN})
        self.assertEqual(self.rented(), {})

    async def test_a_search_is_ended_and_what_it_asked_for_with_it(self) -> None:  # A30, D34
        """Destroying its request would only send it to the next place."""
        self.google.script.never = {WESTERN}
        async with self.in_process() as client:
            begun = await self.answer(client, "find_tpu_vm", zones=[WESTERN])
            (name,) = (await self.until(self.rented, "nothing was asked for"))["instances"]
            where = {"name": name, "zone": WESTERN}
            fault = await self.refusal(client, "plan_destroy", "BUSY", **where)
            self.assertIn(f"cancel_job(job_id='{begun['job_id']}')", fault)
            self.assertEqual(self.deletions(), [])
            ended = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(ended["state"], "cancelled")
        self.assertEqual(self.rented(), {})
        self.assertEqual(set(self.asked()), {WESTERN})

    async def test_without_the_token_of_that_very_thing(self) -> None:  # A24
        async with self.in_process() as client:
            machine = await self.created(client)
            good = await self.planned(client, machine)
            strange = {**good, "token": "0" * 32}
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **strange)
            await self.refusal(
                client, "destroy_tpu_vm_instance", "INVALID", **{**good, "token": ""}
            )
            elsewhere = {**good, "zone": EASTERN}
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **elsewhere)
            await self.refusal(client, "reap_orphans", "DENIED", token=good["token"])
            self.assertEqual(self.deletions(), [])
            good = await self.planned(client, machine)
            await self.answer(client, "destroy_tpu_vm_instance", **good)
            self.assertEqual(len(self.deletions()), 1)
            await self.created(client)
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertIn("used already", fault)
        self.assertEqual(len(self.deletions()), 1)
        self.assert_marked(1)

    async def test_a_clock_that_was_put_forward_or_back(self) -> None:  # D40, A24, A33
        with self.clock(-3600):
            async with self.in_process() as client:
                machine = await self.created(client, hours=2)
        # The provider counts the life by its own clock, from its own beginning.
        ends = self.machine_at_google()["scheduling"]
        self.assertEqual(ends["maxRunDuration"]["seconds"], "7200")
        self.assertNotIn("terminationTime", ends)
        async with self.in_process() as client:
            good = await self.planned(client, machine)
        for shift in (86_400, -3600):
            with self.clock(shift):
                async with self.in_process() as client:
                    await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
        self.assertEqual(self.deletions(), [])
        async with self.in_process() as client:
            await self.answer(client, "destroy_tpu_vm_instance", **good)
        self.assertEqual(self.rented(), {})

    async def test_only_what_bears_all_three_marks_is_ours(self) -> None:  # A26, A27, D55
        mine = self.assembled().context
        labels = {"managed-by": "gemma4-rigs", "rig": mine.rig, "owner": mine.owner}
        strangers = {
            "of-another-owner": STRANGER,
            "of-a-sibling": {**labels, "rig": f"{mine.rig}-q4_0"},
            "of-a-shorter-name": {**labels, "rig": mine.rig[:-1]},
            "unlabelled": {},
            mine.rig: {"rig": mine.rig},
            f"{mine.rig}-node": {**labels, "owner": f"{mine.owner}x"},
        }
        for name, found in strangers.items():
            self.planted(name, found)
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual((listing["rentals"], listing["others"]), ([], len(strangers)))
            self.assertEqual((await self.answer(client, "list_orphans"))["orphans"], [])
            for name in strangers:
                for tool in ("describe_tpu_vm_instance", "plan_destroy"):
                    await self.refusal(client, tool, "DENIED", name=name, zone=WESTERN)
            # Nothing of the rig's own is there, so nothing of somebody else's is taken for it.
            for tool in ("manage_vllm_docker", "get_vllm_docker_logs", "get_tpu_vm_serial_log"):
                await self.refusal(client, tool, "NOT_FOUND")
            await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            machine = await self.created(client)
            await self.destroyed(client, machine)
        self.assertEqual(sorted(self.rented()["instances"]), sorted(strangers))
        self.assertEqual(self.provider().called("compute", "ssh"), [])
        self.assertEqual(len(self.deletions()), 1)

    async def test_gone_before_and_gone_twice(self) -> None:  # D43
        async with self.in_process() as client:
            good = await self.planned(client, await self.created(client))
            with self.google.lock:
                self.google.compute.instances.clear()
                self.google.compute.disks.clear()
            self.google.script.unreachable = {EASTERN}
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "UNKNOWN", **good)
            self.assertIn(EASTERN, fault)
            self.google.script.unreachable = set()
            outcome = await self.answer(client, "destroy_tpu_vm_instance", **good)
            self.assertIn("was gone already; no place has it", outcome["summary"])
        self.assertEqual(self.deletions(), [])

    async def test_accepted_and_still_there(self) -> None:  # D44, D45, A50
        async with self.in_process() as client:
            machine = await self.created(client)
            with self.patience(delete_s=1.5, read_back_s=0.5):
                self.google.script.stubborn = {machine["name"]}
                good = await self.planned(client, machine)
                fault = await self.refusal(client, "destroy_tpu_vm_instance", "UNKNOWN", **good)
                self.assertIn("still there (running)", fault)
                self.google.script.stubborn = set()
                self.google.script.operation_s = 120.0
                good = await self.planned(client, machine)
                outcome = await self.answer(client, "destroy_tpu_vm_instance", **good)
                self.assertFalse(outcome["gone"], "it is called gone while it is still there")
                self.assertIn("until it is gone it may cost money", outcome["summary"])
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
            self.google.advance(121)
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual(listing["rentals"], [])
        self.assertEqual(self.asked(), [WESTERN])

    async def test_made_anew_under_the_same_name(self) -> None:  # D46, A24
        async with self.in_process() as client:
            machine = await self.created(client)
            good = await self.planned(client, machine)
            with self.google.lock:
                found = self.machine_at_google()
                found.update(id="4711", creationTimestamp=self.google.world.stamp())
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertEqual(self.deletions(), [])
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            await self.destroyed(client, machine)
        self.assertEqual(self.rented(), {})

    async def test_a_deletion_that_asks_and_one_that_only_helps(self) -> None:  # D19
        """Whatever status the program ends with, only what is read back counts."""
        async with self.in_process() as client:
            machine = await self.created(client)
            for fault in ({"asks": True}, {"said": "NAME\n    gcloud compute\n", "status": 0}):
                self.gcloud.mend()
                self.gcloud.fault("compute", "instances", "delete", instead=True, **fault)
                with self.patience(read_back_s=0.5):
                    good = await self.planned(client, machine)
                    text = await self.refusal(client, "destroy_tpu_vm_instance", "UNKNOWN", **good)
                self.assertIn("still there (running)", text)
                await self.assert_none_left(*self.gcloud.pids())
            self.assertEqual(self.deletions(), [])
            self.assert_marked(1)

    async def test_a_grant_that_comes_when_nobody_waits(self) -> None:  # D41, A28
        self.google.script.queue_s = 5400.0
        async with self.in_process() as client:
            machine = await self.created(client, market="flex-start", wait_minutes=120)
            self.assertEqual(machine["state"], "pending")
        self.google.advance(5401)
        async with self.in_process() as client:
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual((found["name"], found["state"]), (machine["name"], "running"))
            self.assert_marked(1)
            self.google.advance(3601)
            self.assertEqual(self.rented(), {})
            status = await self.answer(client, "get_system_status")
            self.assertIn("gone although this rig did not destroy it", str(status["notes"]))
        self.google.script.never = {WESTERN}
        async with self.in_process() as client:
            await self.created(client, market="flex-start", wait_minutes=10)
            self.google.advance(601)
        self.assertEqual(self.rented(), {})

    async def test_what_half_a_record_tells(self) -> None:  # D39
        """Labels win over a journal that is damaged; what it does not know any more is told."""
        async with self.in_process() as client:
            machine = await self.created(client)
            path = self.rig_state / "journal.jsonl"
            path.write_text('{"v": 1, "event": "create int' + "\n\x00\n[]\n" + '{"v": 99}\n')
            (self.rig_state / "machine.json").write_text("{half")
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(found["name"], machine["name"])
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
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
            await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=WESTERN)
            fault = await self.refusal(client, "find_tpu_vm", "DENIED")
            self.assertIn("journal", fault)
        self.assertEqual(self.asked(), [])

    async def test_a_cancelled_call_is_settled_by_the_next(self) -> None:  # D34
        self.gcloud.fault("compute", "instances", "create", hangs=True)
        async with self.in_process() as client:
            call = asyncio.ensure_future(
                client.call_tool("create_tpu_vm_instance", {"zone": WESTERN})
            )
            await self.until(self.rented, "nothing was asked for")
            call.cancel()
            try:
                await self.assert_none_left(*self.gcloud.pids())
            finally:
                self.end_spoilt()
                await asyncio.gather(call, return_exceptions=True)
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(found["zone"], WESTERN)
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
        self.assert_marked(1)

    async def test_the_server_ends_in_the_middle_of_a_create(self) -> None:  # D35, D36, D37, A31
        for way in ("end of input", "SIGKILL"):  # SIGTERM goes the way of the first
            with self.subTest(way=way):
                await self._ends_in_a_create(way)
                self.forget_everything()

    async def _ends_in_a_create(self, way: str) -> None:
        self.gcloud.mend()
        self.gcloud.fault("compute", "instances", "create", hangs=True)
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            call = {"name": "create_tpu_vm_instance", "arguments": {"zone": WESTERN}}
            server.send("tools/call", call)
            await self.until(self.rented, "nothing was asked for")
            (pid,) = self.gcloud.pids()
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            if way == "end of input":
                server.close_input()
            else:
                os.kill(server.process.pid, signal.SIGKILL)
            await self.until(lambda: server.process.poll() is not None, "the server stays")
            if way == "SIGKILL":  # nothing can be done by who is killed
                for one in family:
                    with suppress(psutil.NoSuchProcess):  # one may end with the one before it
                        one.kill()
            await self.assert_none_left(*(one.pid for one in family))
        self.gcloud.mend()
        self.assert_marked(1)
        journal = [entry for entry in self.journal() if entry["event"].startswith("create ")]
        self.assertEqual([entry["event"] for entry in journal], ["create intended"])
        async with self.in_process() as client:
            status = await self.answer(client, "get_system_status")
            self.assertTrue(status["cost"]["billed"], status)
            fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
            self.assertIn(str(journal[0]["intent"]), fault)
            (found,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            await self.destroyed(client, found)
        self.assertEqual(self.rented(), {})

    async def test_a_state_folder_that_is_nobody_elses(self) -> None:  # A16, A49
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        async with self.in_process() as client:
            await self.planned(client, await self.created(client))
        kept = [path for path in self.state.rglob("*") if path.is_file()]
        self.assertGreater(len(kept), 4)
        for path in kept:
            self.assertEqual(path.stat().st_mode & 0o077, 0, path)
        for folder in {path.parent for path in kept}:
            self.assertEqual(folder.stat().st_mode & 0o077, 0, folder)
        tokens = json.loads(Path(self.rig_state / "tokens.json").read_text())
        self.assertEqual(len(tokens), 1)
