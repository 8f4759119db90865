"""The story of a rig on EC2 by its tools: find, serve, ask, measure, take down; and what it sent.

What is launched is tagged from the launch on, has an end of its own, and lets nobody in.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from mcp import Client

from forge.suites.ec2_orders import USER_DATA_MOST, Ec2OrderCase
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, CallFault
from forge.suites.rented_case import HELD_TOKEN

EAST_A, EAST_B, EAST_C = "us-east-1a", "us-east-1b", "us-east-1c"
_STRANGER = {"managed-by": "gemma4-rigs", "owner": "0123456789abcdef", "intent": "0" * 12}


class Ec2StorySuite(Ec2OrderCase):
    """One machine's life, as a person's words would lead an agent through it."""

    async def found(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """A finished search; its job."""
        begun = await self.answer(client, "find_tpu_vm", **arguments)
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        return job

    async def test_find_serve_measure_and_take_down(self) -> None:
        """Two zones sold out, then one had as spot; a whole life of it."""
        self.cloud.script.faults = [CallFault(zone=EAST_A), CallFault(zone=EAST_B)]
        async with self.in_process() as client:
            job = await self.found(client, zones=[EAST_A, EAST_B, EAST_C], hours=1)
            self.assertEqual(job["result"]["zone"], EAST_C)
            self.assertEqual(job["result"]["market"], "spot")
            for zone in (EAST_A, EAST_B):
                self.assertIn(zone, " ".join(job["result"]["asked"]))
            self.assert_orders_are_marked()
            await self.ready(client)
            said = await self.answer(client, "query_gemma4", prompt="The capital of France?")
            self.assertEqual(said["text"], "Paris.")
            await self._measured(client)
            healthy = await self.answer(client, "analyze_logs")
            self.assertEqual(healthy["summary"], "no failure found")
        async with self.over_stdio() as another:  # a new server knows the zone and the model
            status = await self.answer(another, "get_system_status")
            self.assertEqual(status["state"], "ready", status)
            self.assertTrue(status["cost"]["billed"])
            listing = await self.answer(another, "list_tpu_vm_instances")
            (machine,) = listing["rentals"]
            self.assertEqual((machine["zone"], machine["project"]), (EAST_C, FAKE_AWS_ACCOUNT))
            self.assert_nothing_comes_in(machine["provider_id"])
            gone = await self.destroyed(another, machine)
            self.assertTrue(gone["gone"])
            await self.assert_all_gone()
            orphans = await self.answer(another, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
            status = await self.answer(another, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))
        self.assertEqual(
            set(self.cloud.held()) - {"secrets"}, set(), "a disk or an address is left"
        )

    async def _measured(self, client: Client) -> None:
        small = {"context_tokens": [32], "output_tokens": 4, "requests_per_cell": 2}
        begun = await self.answer(
            client, "run_benchmark", concurrency=[1, 8, 32], seconds_per_cell=5, **small
        )
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        (path,) = self.state.rglob(f"{job['result']['report']}.json")
        report = json.loads(path.read_text())
        self.assertEqual(report["planned_cells"], 3)
        self.assertIn(f"runtime twin: {self.module.RIG.twin}, ", report["notes"][0])
        self.assertEqual([cell["concurrency"] for cell in report["cells"]], [1, 8, 32])

    async def test_what_a_launch_sends_and_what_the_machine_is_to_boot(self) -> None:
        """Its end first of all, then its order, which names the secret and does not hold it."""
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        async with self.in_process() as client:
            machine = await self.created(client, hours=2, market="on-demand")
        self.assert_orders_are_marked()
        (order,) = self.orders()
        self.assertEqual(order.market, "on-demand")
        self.assertLess(len(order.user_data), USER_DATA_MOST)
        parts = order.parts()
        self.assertEqual(list(parts), ["cloud-boothook", "cloud-config", "x-shellscript"])
        self.assertIn(b"end=$((now + 7200))", parts["cloud-boothook"].text)
        (file,) = json.loads(parts["cloud-config"].text.partition(b"\n")[2])["write_files"]
        self.assertEqual(
            (file["path"], file["permissions"]), ("/var/lib/gemma4/order.json", "0600")
        )
        document = json.loads(file["content"])
        self.assertEqual(document["secret"], "hf-token")
        self.assertEqual(document["gpu_arch"], "8.9")
        self.assertEqual(
            document["region"], "us-east-2", "the secret is in the first zone's region"
        )
        for part in parts.values():
            self.assertNotIn(HELD_TOKEN.encode(), part.text)
        self.assert_nothing_comes_in(machine["provider_id"])

    async def test_no_second_machine_and_no_second_search(self) -> None:
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        self.cloud.script.faults = [CallFault(zone=EAST_A)]
        async with self.in_process() as client:
            first = await self.answer(client, "find_tpu_vm", zones=[EAST_A])
            second = await self.answer(client, "find_tpu_vm", zones=[EAST_B])
            self.assertEqual(first["job_id"], second["job_id"])
            await self.answer(client, "cancel_job", job_id=first["job_id"])
            await self.finished(client, first["job_id"])
            self.assertEqual(self.rented(), {})
            self.cloud.script.faults = []
            await self.created(client)
            for tool, arguments in (
                ("create_tpu_vm_instance", {"zone": EAST_B}),
                ("find_tpu_vm", {}),
            ):
                await self.refusal(client, tool, "EXISTS", **arguments)
        self.assertEqual(len(self.rented()["instances"]), 1)
        self.assert_orders_are_marked()

    async def test_what_is_somebody_elses_is_neither_shown_nor_touched(self) -> None:
        """Another owner's, one without an owner, one without any mark, and a stray disk."""
        rig = self.module.RIG.name
        ownerless = {"managed-by": "gemma4-rigs", "rig": rig}
        for name, tags in (
            ("another-owners", {**_STRANGER, "rig": rig}),
            ("nobodys", ownerless),
            ("payroll-db", {}),
        ):
            self.cloud.put_machine(self.zone, name, tags=tags)
        volume = self.cloud.put_volume(self.zone, 10, {**_STRANGER, "rig": rig, "Name": "a-disk"})
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual((listing["rentals"], listing["others"]), ([], 3))
            orphans = await self.answer(client, "list_orphans")
            self.assertEqual(orphans["orphans"], [])
            for name in ("another-owners", "nobodys", "payroll-db", "a-disk"):
                text = await self.refusal(
                    client, "plan_destroy", "DENIED", name=name, zone=self.zone
                )
                self.assertNotIn("plan-", text)
            await self.refusal(client, "wait_for_model_ready", "NOT_FOUND")
            machine = await self._lost_its_owner(client)
        self.assertEqual(self.cloud.harmed(), [])
        held = self.cloud.held()
        self.assertIn(volume, held["volumes"]["us-east-1"])
        self.assertEqual(held["instances"], {"us-east-1": [machine]})
        for action in ("TerminateInstances", "DeleteVolume", "StopInstances", "SendCommand"):
            self.assertEqual(self.cloud.sent(action), [])

    async def _lost_its_owner(self, client: Client) -> str:
        """A machine of this rig that somebody tags as theirs, is theirs; its id."""
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        machine = await self.created(client)
        with self.cloud.lock:
            self.cloud.machine(machine["provider_id"]).model.add_tags({"owner": "0123456789abcdef"})
        where = {"name": machine["name"], "zone": machine["zone"]}
        await self.refusal(client, "plan_destroy", "DENIED", **where)
        text = await self.refusal(client, "wait_for_model_ready", "NOT_FOUND")
        self.assertIn("labels", text)
        return str(machine["provider_id"])

    async def test_a_spot_machine_is_not_stopped(self) -> None:
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        with mock.patch.dict("os.environ", MARKETS="spot", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                machine = await self.created(client)
                text = await self.refusal(client, "stop_gpu_instance", "INVALID")
        self.assertIn("spot", text)
        self.assertIn("plan_destroy", text)
        self.assertEqual(self.cloud.sent("StopInstances"), [])
        self.assertEqual(self.cloud.machine(machine["provider_id"]).state, "running")
