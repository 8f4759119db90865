"""Launches on EC2 whose answer is lost, late or of no use, and launches that are repeated.

What is asserted is what costs money: that there is one machine or none, tagged and with an end, and
that nothing else is asked for before it is known which.
"""

from __future__ import annotations

import asyncio

from forge.suites.ec2_fault_case import FAR, FIRST, Ec2FaultCase
from forge.suites.fake_aws_world import CallFault

_TWIN = "Arguments on this idempotent request are inconsistent with arguments used in previous "
_UNREADABLE = (
    CallFault("DescribeInstances", "html"),  # a load balancer's page, with status 502
    CallFault("DescribeInstances", "InternalError"),
    CallFault("DescribeInstances", "", lost="cut"),
    CallFault("DescribeVolumes", "", lost="cut"),
    CallFault("DescribeRegions", "html"),
    CallFault("DescribeInstances", "UnauthorizedOperation", region="us-east-2"),
)


class Ec2LaunchFaultSuite(Ec2FaultCase):
    """No twin, whatever EC2 answers to an order."""

    boots = False

    # Answers

    async def test_a_launch_whose_answer_is_lost_and_that_was_done(self) -> None:  # I12, D05, A29
        for lost in ("cut", "hold"):
            with self.subTest(lost=lost):
                fault = CallFault(code="", lost=lost, after=True, times=1)
                self.cloud.script.faults = [fault]
                async with self.in_process() as client:
                    with self.patience(_LAUNCH_S=1.5):
                        machine = await self.created(client)
                        (order,) = self.orders()
                        own = self.ours_alone()
                        self.assertEqual(own.model.client_token, order.given["ClientToken"])
                        self.assertEqual(machine["provider_id"], own.id)
                        await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
                self.assert_marked(1)
                self.forget_everything()

    async def test_a_launch_whose_answer_is_lost_and_that_was_not_done(self) -> None:  # I13, D05
        self.cloud.script.faults = [CallFault(code="", lost="cut", times=1)]
        async with self.in_process() as client:
            with self.patience(_SEEN_S=0.3, read_back_s=0.3, settle_s=60.0):
                fault = await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FIRST)
                self.assertIn("no other create goes out", fault)
                await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FAR)
                await self.refusal(client, "find_tpu_vm", "UNKNOWN")
            self.assertEqual(self.asked(), [FIRST])
            with self.patience(settle_s=0.0):
                await self.created(client)
        first, second = (one.given["ClientToken"] for one in self.orders())
        self.assertNotEqual(first, second, "what was given up could come to life as this one")
        self.assert_marked(1)

    async def test_a_searched_one_whose_answer_is_lost_is_the_only_one(self) -> None:  # I12, D05
        self.cloud.script.faults = [CallFault(code="", lost="cut", after=True, times=1)]
        async with self.in_process() as client:
            found = await self.search(client, FIRST, FAR)
            self.assertEqual(found["result"]["zone"], FIRST, found)
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_a_searched_one_that_failed_and_shows_late_is_the_only_one(self) -> None:  # D06
        """One look is not enough after an error that says nothing of what was done."""
        self.cloud.script.faults = [CallFault(code="InternalError", after=True, times=1)]
        self.cloud.script.unseen = 6
        async with self.in_process() as client:
            found = await self.search(client, FIRST, FAR)
            self.assertEqual(found["result"]["zone"], FIRST, found)
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_a_launch_that_fails_after_it_was_done(self) -> None:  # D06
        """An error of the service that says nothing of what it did: a machine is there."""
        for code in ("InternalError", "Unavailable", "html"):
            with self.subTest(code=code):
                self.cloud.script.faults = [CallFault(code=code, after=True, times=1)]
                async with self.in_process() as client:
                    machine = await self.created(client)
                    self.assertEqual(machine["provider_id"], self.ours_alone().id)
                self.assertEqual(self.asked(), [FIRST])
                self.assert_marked(1)
                self.forget_everything()

    async def test_a_launch_that_comes_to_life_after_it_was_given_up(self) -> None:  # D05, D07
        self.cloud.script.delays = {"RunInstances": 4.0}
        async with self.in_process() as client:
            with self.patience(_LAUNCH_S=0.5, _SEEN_S=0.3, read_back_s=0.3, settle_s=60.0):
                await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FIRST)
                self.assertEqual(self.rented(), {})
                fault = await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FAR)
                self.assertIn("may still come to life", fault)
                await self.until(self.rented, "it never came")
                fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
                self.assertIn(self.ours_alone().tags["intent"], fault)
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_a_machine_that_shows_late_stops_every_other(self) -> None:  # D07
        self.cloud.script.unseen = 1000
        async with self.in_process() as client:
            with self.patience(read_back_s=0.5, settle_s=60.0):
                fault = await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FIRST)
                self.assertIn("no other create goes out", fault)
                await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=FAR)
                self.ours_alone().unseen = 0
                listing = await self.answer(client, "list_tpu_vm_instances")
                self.assertEqual(len(listing["rentals"]), 1)
                await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FAR)
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_a_token_that_stands_for_another_order(self) -> None:  # I14
        """IdempotentParameterMismatch: nothing was made by this order; one that there is counts."""
        refused = CallFault(code="IdempotentParameterMismatch", message=_TWIN + "request(s).")
        self.cloud.script.faults = [refused]
        async with self.in_process() as client:
            with self.patience(_SEEN_S=0.3):
                fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=FIRST)
                self.assertIn("IdempotentParameterMismatch", fault)
                self.assertEqual(self.rented(), {})
                refused.after = True
                machine = await self.created(client)
                self.assertEqual(machine["provider_id"], self.ours_alone().id)
        self.assertEqual(self.asked(), [FIRST, FIRST])
        self.assert_marked(1)

    async def test_throttled(self) -> None:  # I15
        async with self.in_process() as client:
            self.cloud.script.throttled = {"DescribeInstances": 2, "DescribeImages": 1}
            self.cloud.script.throttled["RunInstances"] = 1
            fault = await self.refusal(client, "create_tpu_vm_instance", "BUSY", zone=FIRST)
            self.assertIn("RequestLimitExceeded", fault)
            self.assertIn("nothing was done", fault)
            self.assertEqual((self.rented(), self.asked()), ({}, [FIRST]), "repeated by itself")
            self.cloud.script.throttled = {"RunInstances": 1}
            found = await self.search(client, FIRST, FAR)
            self.assertEqual(found["state"], "done", found)
        self.assert_marked(1)

    async def test_lists_that_cannot_be_read_are_never_empty(self) -> None:  # D14, D15, D16, A37
        async with self.in_process() as client:
            for fault in _UNREADABLE:
                with self.subTest(fault=f"{fault.action} {fault.code}{fault.lost}"):
                    self.cloud.script.faults = [fault]
                    result = await client.call_tool("list_gpu_instances", {})
                    unread = (result.structured_content or {}).get("unread")
                    self.assertTrue(result.is_error or unread, "nothing was said")
                    result = await client.call_tool("create_gpu_instance", {"zone": FIRST})
                    self.assertTrue(result.is_error, "it could not know that it has none")
                    result = await client.call_tool("find_gpu", {})
                    self.assertTrue(result.is_error, "it could not know that it has none")
        self.assertEqual(self.asked(), [])

    # Repeats

    async def test_the_same_again_and_with_other_values(self) -> None:  # D09, D11
        async with self.in_process() as client:
            first = await self.answer(client, "create_tpu_vm_instance", zone=FIRST)
            for arguments in (
                {"zone": FIRST},
                {"zone": FIRST, "market": "on-demand", "hours": 2},
                {"zone": FAR},
            ):
                fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", **arguments)
                self.assertIn(first["intent"], fault)
                self.assertIn(first["machine"]["name"], fault)
            await self.refusal(client, "find_tpu_vm", "EXISTS")
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_twelve_at_once_from_two_servers_are_one(self) -> None:  # D10, A30
        async with self.over_stdio() as one, self.over_stdio() as other:
            calls = [
                client.call_tool("create_gpu_instance", {"zone": zone})
                for client in (one, other)
                for zone in (FIRST, FAR) * 3
            ]
            ended = await asyncio.gather(*calls)
            words = ["".join(i.text for i in r.content if i.type == "text") for r in ended]
            created = [text for r, text in zip(ended, words, strict=True) if not r.is_error]
            self.assertEqual(len(created), 1, words)
            for text in words:
                if text not in created:
                    self.assertIn(text.split(" ")[0], ("EXISTS", "BUSY"), text)
            await self.refusal(other, "create_tpu_vm_instance", "EXISTS", zone=FIRST)
        self.assertEqual(len(self.asked()), 1)
        self.assert_marked(1)

    async def test_a_create_beside_a_search_makes_no_twin(self) -> None:  # D10, A30
        """Between two rounds a search has no request that could be seen."""
        self.out_of(FIRST)
        async with self.in_process() as client:
            begun = await self.search(client, FIRST, wait=False)
            job = {"job_id": begun["job_id"]}

            async def rests() -> bool:
                return "asking again" in str(await self.answer(client, "get_job", **job))

            while not await rests():
                await asyncio.sleep(0.1)
            fault = await self.refusal(client, "create_tpu_vm_instance", "BUSY", zone=FAR)
            self.assertIn(begun["job_id"], fault)
            self.assertNotIn(FAR, self.asked())
            await self.answer(client, "cancel_job", **job)
            await self.answer(client, "create_tpu_vm_instance", zone=FAR)
        self.assert_marked(1)
