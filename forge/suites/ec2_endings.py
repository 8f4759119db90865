"""Ending what is rented on EC2 while something goes wrong, and what others ended.

What is asserted is what goes on costing money: what was ended and what was not, what was said about
it, and what the next server finds.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest import mock

from mcp import Client

from forge.suites.ec2_fault_case import FAR, FIRST, SECOND, SOMEBODY_ELSE, Ec2FaultCase
from forge.suites.fake_aws_machine import FakeMachine
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, CallFault


class _EveryId(set[str]):
    """Whatever is asked for is in it: ids that are not known beforehand."""

    def __contains__(self, _id: object) -> bool:
        return True


class Ec2EndingFaultSuite(Ec2FaultCase):
    """Nothing is called gone that is not, and nothing of anybody else's goes."""

    boots = False

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}

    async def planned(self, client: Client, machine: dict[str, Any]) -> dict[str, str]:
        """What destroying that machine takes: its place and a fresh token."""
        where = {"name": str(machine["name"]), "zone": str(machine["zone"])}
        plan = await self.answer(client, "plan_destroy", **where)
        return {**where, "token": str(plan["token"])}

    def clock(self, shift_s: float) -> Any:
        """While it lasts, new servers of this process read a clock that is wrong by so much."""
        wrong = (lambda: time.time() + shift_s,)
        return mock.patch.object(self.module.Rentals.__init__, "__defaults__", wrong)

    def let_go(self, machine: FakeMachine) -> None:
        """What stayed in shutting-down is terminated now."""
        with self.cloud.lock:
            self.cloud.script.stubborn = set()
            machine.then_at = 0.0

    # Searches

    async def test_a_search_whose_machine_does_not_go_is_told_by_its_name(self) -> None:  # D08
        self.cloud.script.pending_s, self.cloud.script.stubborn = 9999.0, _EveryId()
        async with self.in_process() as client:
            begun = await self.answer(client, "find_tpu_vm", zones=[FIRST, FAR])
            (name,) = (await self.until(self.rented, "nothing was asked for"))["instances"]
            ended = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertTrue(ended["error"].startswith("UNKNOWN "), ended)
            self.assertIn(f"{name} in {FIRST} of project {FAKE_AWS_ACCOUNT}", ended["error"])
            self.assertEqual((self.asked(), len(self.ours())), ([FIRST], 1))
            self.assertEqual(self.ours_alone().state, "shutting-down")
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
            self.let_go(self.ours_alone())
            await self.created(client, zone=FAR)
        self.assert_marked(1)

    async def test_a_search_is_ended_and_what_it_asked_for_with_it(self) -> None:  # A30, D34
        """Destroying its machine would only send it to the next place."""
        self.cloud.script.pending_s = 9999.0
        async with self.in_process() as client:
            begun = await self.answer(client, "find_tpu_vm", zones=[FIRST])
            (name,) = (await self.until(self.rented, "nothing was asked for"))["instances"]
            fault = await self.refusal(client, "plan_destroy", "BUSY", name=name, zone=FIRST)
            self.assertIn(f"cancel_job(job_id='{begun['job_id']}')", fault)
            self.assertEqual(self.ends(), [])
            ended = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(ended["state"], "cancelled")
        self.assertEqual(self.rented(), {})
        self.assertEqual(self.asked(), [FIRST])

    # Whose it is, and which one

    async def test_without_the_token_of_that_very_thing(self) -> None:  # A24
        async with self.in_process() as client:
            machine = await self.created(client)
            good = await self.planned(client, machine)
            strange = {**good, "token": "0" * 32}
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **strange)
            await self.refusal(
                client, "destroy_tpu_vm_instance", "INVALID", **{**good, "token": ""}
            )
            elsewhere = {**good, "zone": FAR}
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **elsewhere)
            await self.refusal(client, "reap_orphans", "DENIED", token=good["token"])
            self.assertEqual(self.ends(), [])
            good = await self.planned(client, machine)
            await self.answer(client, "destroy_tpu_vm_instance", **good)
            self.assertEqual(len(self.ends()), 1)
            await self.created(client)
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertIn("used already", fault)
        self.assertEqual(len(self.ends()), 1)
        self.assert_marked(1)

    async def test_only_what_bears_all_three_marks_is_ours(self) -> None:  # I17, A26, A27, D55
        rig, owner = self.module.RIG.name, self.assembled().context.owner
        strangers = {
            "of-another-owner": self.our_tags(**SOMEBODY_ELSE),
            "of-a-sibling": self.our_tags(rig=f"{rig}-w4a16"),
            "of-a-shorter-name": self.our_tags(rig=rig[:-1]),
            "of-a-longer-owner": self.our_tags(owner=f"{owner}x"),
            "of-a-spaced-mark": self.our_tags(**{"managed-by": "gemma4-rigs "}),
            "untagged": {},
            rig: {"rig": rig},
            f"{rig}-node": {"rig": rig, "owner": owner},
        }
        ids = [self.planted(name, tags) for name, tags in strangers.items()]
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual(listing["rentals"], [])
            self.assertEqual((await self.answer(client, "list_orphans"))["orphans"], [])
            for name in (*strangers, *ids):
                for tool in ("describe_tpu_vm_instance", "plan_destroy"):
                    await self.refusal(client, tool, "DENIED", name=name, zone=FIRST)
            # Nothing of the rig's own is there, so nothing of somebody else's is taken for it.
            for tool in (
                *("manage_vllm_docker", "get_vllm_docker_logs", "get_console_log"),
                *("verify_gpu_arch", "stop_gpu_instance", "start_gpu_instance"),
            ):
                await self.refusal(client, tool, "NOT_FOUND")
            await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            machine = await self.created(client)
            await self.destroyed(client, machine)
        for action in ("SendCommand", "StartSession", "StopInstances", "DeleteVolume"):
            self.assertEqual(self.cloud.sent(action), [], action)
        self.assertEqual(self.ends(), [machine["provider_id"]])

    async def test_two_of_one_name_are_told_by_their_ids(self) -> None:  # A24, D12
        async with self.in_process() as client:
            machine = await self.created(client)
            twin = self.planted(machine["name"], self.our_tags(intent="x", expires="1"))
            where = {"name": machine["name"], "zone": machine["zone"]}
            fault = await self.refusal(client, "plan_destroy", "UNKNOWN", **where)
            self.assertIn(machine["provider_id"], fault)
            self.assertIn(twin, fault)
            await self.destroyed(client, {**where, "name": machine["provider_id"]})
        self.assertEqual(self.ends(), [machine["provider_id"]])

    async def test_made_anew_under_the_same_name(self) -> None:  # I19, D46, A24
        async with self.in_process() as client:
            machine = await self.created(client)
            good = await self.planned(client, machine)
            tags = {k: v for k, v in self.ours_alone().tags.items() if k != "Name"}
            self.cloud.take_away(machine["provider_id"])
            anew = self.planted(machine["name"], tags)
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertIn("not what the plan showed", fault)
            await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertEqual(self.ends(), [])
        self.assertEqual(self.cloud.machine(anew).state, "running")

    # What is left, and what is gone

    async def test_terminated_behind_our_back(self) -> None:  # I06, D43
        async with self.in_process() as client:
            machine = await self.created(client)
            good = await self.planned(client, machine)
            self.cloud.take_away(machine["provider_id"])
            await asyncio.sleep(0.4)  # what was read lately is not read again at once
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))
            notes = str(status["notes"])
            self.assertIn("gone although this rig did not destroy it", notes)
            self.assertIn("ended or stopped through EC2's API", notes)
            self.assertEqual(status["next_step"].partition("(")[0], "find_gpu")
            fault = await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
            self.assertIn("Client.UserInitiatedShutdown", fault)
            unread = CallFault("DescribeInstances", "UnauthorizedOperation", region="us-east-2")
            self.cloud.script.faults = [unread]
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "UNKNOWN", **good)
            self.assertIn("us-east-2", fault)
            self.cloud.script.faults = []
            for _ in range(2):
                if _ == 0:
                    outcome = await self.answer(client, "destroy_tpu_vm_instance", **good)
                    self.assertIn("was gone already; no place has it", outcome["summary"])
                else:
                    await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            await self.created(client, zone=FAR)
        self.assertEqual(self.ends(), [])
        self.assert_marked(1)

    async def test_the_spot_machine_is_taken_back(self) -> None:  # I05, D42
        async with self.in_process() as client:
            machine = await self.created(client)
            self.cloud.interrupt(machine["provider_id"])
            await asyncio.sleep(0.4)
            status = await self.answer(client, "get_system_status")
            self.assertIn("EC2 took the spot machine back", str(status["notes"]))
            self.assertIn("Server.SpotInstanceTermination", str(status["notes"]))
            self.assertFalse(status["cost"]["billed"])
            self.assertEqual(status["next_step"].partition("(")[0], "find_gpu")
            await self.created(client, zone=SECOND)
        self.assertEqual(self.asked(), [FIRST, SECOND])
        self.assert_marked(1)

    async def test_one_that_stays_in_shutting_down(self) -> None:  # I20, D44, A50
        self.cloud.script.stubborn = _EveryId()
        async with self.in_process() as client:
            machine = await self.created(client)
            with self.patience(read_back_s=0.5):
                outcome = await self.destroyed(client, machine)
            self.assertFalse(outcome["gone"], "it is called gone while it is still there")
            self.assertIn("until it is gone it may cost money", outcome["summary"])
            fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
            self.assertIn("stopping", fault)
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual([one["state"] for one in listing["rentals"]], ["stopping"])
            self.let_go(self.ours_alone())
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual(listing["rentals"], [])
        self.assertEqual(self.asked(), [FIRST])

    async def test_an_end_whose_answer_is_lost(self) -> None:  # D45, D08
        """Taken and answered by nobody: a look settles it. Never arrived: it is still there."""
        async with self.in_process() as client:
            machine = await self.created(client)
            with self.patience(read_back_s=0.3):
                self.cloud.script.faults = [CallFault("TerminateInstances", "", lost="cut")]
                good = await self.planned(client, machine)
                fault = await self.refusal(client, "destroy_tpu_vm_instance", "UNKNOWN", **good)
                self.assertIn("still there (running)", fault)
                self.assertIn("may go on costing money", fault)
                self.assert_marked(1)
                self.cloud.script.faults[0].after = True
                good = await self.planned(client, machine)
                outcome = await self.answer(client, "destroy_tpu_vm_instance", **good)
                self.assertTrue(outcome["gone"], outcome)
        self.assertEqual(self.rented(), {})

    async def test_an_end_that_may_not_be_ordered(self) -> None:  # D03, A50
        denied = CallFault("TerminateInstances", "UnauthorizedOperation")
        self.cloud.script.faults = [denied]
        async with self.in_process() as client:
            good = await self.planned(client, await self.created(client))
            fault = await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
            self.assertIn("ec2:TerminateInstances", fault)
            status = await self.answer(client, "get_system_status")
            self.assertTrue(status["cost"]["billed"], status)
        self.assert_marked(1)

    async def test_a_volume_that_hangs_on_nothing_is_an_orphan(self) -> None:  # I21, D06
        tags = self.our_tags(Name="left", intent="create-x", expires="1900000000")
        mine = self.cloud.put_volume(FIRST, 150, tags)
        others = self.cloud.put_volume(FIRST, 150, {**tags, **SOMEBODY_ELSE})
        async with self.in_process() as client:
            orphans = await self.answer(client, "list_orphans")
            (row,) = orphans["orphans"]
            self.assertEqual((row["kind"], row["provider_id"]), ("disk", mine))
            self.assertIn("its machine is gone", row["reasons"])
            reaped = await self.answer(client, "reap_orphans", token=orphans["token"])
            self.assertEqual(reaped["left"], [])
        self.assertEqual(self.rented(), {"volumes": [others]})

    async def test_a_stopped_machine_is_an_orphan(self) -> None:  # I22
        async with self.in_process() as client:
            machine = await self.created(client, market="on-demand")
            self.assertEqual((await self.answer(client, "list_orphans"))["orphans"], [])
            stopped = await self.answer(client, "stop_gpu_instance")
            self.assertIn("a stopped machine outlasts it", stopped["summary"])
            status = await self.answer(client, "get_system_status")
            self.assertTrue(status["cost"]["billed"], "its disk is")
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
            orphans = await self.answer(client, "list_orphans")
            (row,) = orphans["orphans"]
            self.assertEqual(row["provider_id"], machine["provider_id"])
            self.assertIn("it is stopped and still there", row["reasons"])
            reaped = await self.answer(client, "reap_orphans", token=orphans["token"])
            self.assertEqual((reaped["left"], len(reaped["destroyed"])), ([], 1))
        self.assertEqual(self.rented(), {})

    async def test_a_clock_that_was_put_forward_or_back(self) -> None:  # D40, A24, A33
        with self.clock(-3600):
            async with self.in_process() as client:
                machine = await self.created(client, hours=2)
        # The machine counts its life by its own clock, from its own beginning.
        (hook,) = (
            part.text for part in self.orders()[0].parts().values() if part.kind == "cloud-boothook"
        )
        self.assertIn(b"end=$((now + 7200))", hook)
        async with self.in_process() as client:
            good = await self.planned(client, machine)
        for shift in (86_400, -3600):
            with self.clock(shift):
                async with self.in_process() as client:
                    await self.refusal(client, "destroy_tpu_vm_instance", "DENIED", **good)
        self.assertEqual(self.ends(), [])
        async with self.in_process() as client:
            await self.answer(client, "destroy_tpu_vm_instance", **good)
        self.assertEqual(self.rented(), {})
