"""The Cloud TPU API's own words: is the request granted, and make sure that there is one.

The rig is put together from its parts; the provider is a fake Google behind the stand-in gcloud,
and its books are the witness.
"""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

from forge.rigs.tpu_vllm_v5e1_2b import RIG as CLOUD_TPU_RIG
from tests.imaginary_case import Caller, text_of
from tests.rented_rig import RentedRigCase

ZONE, OTHER = "us-west4-a", "us-central1-a"
STRANGER = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-v5e1-2b", "owner": "somebody-else"}

# A search that is under way and gets no further than reading the catalogue.
HELD = """
import asyncio
from forge.parts.toolsets.capacity_search import SearchingCapacityToolset

async def held(self, given):
    await asyncio.sleep(600)

SearchingCapacityToolset._wish = held
"""


class QueuedCase(RentedRigCase):
    rig = CLOUD_TPU_RIG
    settings = {"ZONES": f"{ZONE},{OTHER}"}

    def requests(self) -> list[str]:
        """The names of the requests that Google's books have."""
        return self.google.held().get("queued", [])

    def asked(self) -> list[str]:
        """The zone of each create that reached the provider, in order."""
        sent = self.google.sent("POST", "/queuedResources")
        return [one.path.split("/locations/")[1].split("/")[0] for one in sent if one.body]

    def waiting(self) -> None:
        """What is asked for from now on waits in its queue."""
        self.google.script.never = {ZONE, OTHER}


class AvailabilityTest(QueuedCase):
    async def check(self, caller: Caller) -> dict[str, Any]:
        before = self.requests()
        answer = await caller.ok("check_tpu_availability")
        self.assertEqual(self.requests(), before, "a look changed something")
        return answer

    async def test_none_queued_granted_and_gone(self) -> None:
        self.waiting()
        async with self.calling() as caller:
            none = await self.check(caller)
            self.assertEqual((none["exists"], none["granted"]), (False, False))
            self.assertEqual(none["next_step"], "find_tpu()")
            made = await caller.ok("create_tpu_queued_resource", zone=ZONE)
            queued = await self.check(caller)
            self.assertEqual((queued["exists"], queued["granted"]), (True, False))
            self.assertEqual((queued["name"], queued["zone"]), (made["machine"]["name"], ZONE))
            self.assertIn("not granted (pending)", queued["summary"])
            self.assertIn("check_tpu_availability()", queued["next_step"])
            self.google.script.never = set()
            self.google.advance(1)
        async with self.calling() as caller:  # what was read a moment ago is not read again
            granted = await self.check(caller)
            self.assertEqual((granted["granted"], granted["state"]), (True, "running"))
            self.assertEqual(granted["next_step"], "wait_for_vllm_ready(wait_s=50)")
            plan = await caller.ok("plan_destroy", name=granted["name"], zone=ZONE)
            where = {"name": granted["name"], "zone": ZONE, "token": plan["token"]}
            await caller.ok("destroy_queued_resource", **where)
            self.assertFalse((await self.check(caller))["exists"])
        self.assertEqual(self.requests(), [])

    async def test_what_became_of_one_that_is_gone_is_told(self) -> None:
        async with self.calling() as caller:
            await caller.ok("create_tpu_queued_resource", zone=ZONE)
        with self.google.lock:
            self.google.tpu.queue.clear()
            self.google.tpu.nodes.clear()
        async with self.calling() as caller:
            gone = await self.check(caller)
            self.assertFalse(gone["exists"])
            self.assertIn("gone although this rig did not destroy it", gone["summary"])

    async def test_a_request_that_cannot_be_read_is_not_called_none(self) -> None:
        self.waiting()
        async with self.calling() as caller:
            await caller.ok("create_tpu_queued_resource", zone=ZONE)
        read = ("compute", "tpus", "queued-resources", "describe")
        for fault in (
            {"said": '{"name": "projects/fake-proj/loca'},
            {"said": "", "warned": "ERROR: gcloud crashed (ConnectionError): cut\n", "status": 1},
        ):
            self.gcloud.fault("alpha", *read, instead=True, **fault)
            self.gcloud.fault(*read, instead=True, **fault)
            async with self.calling() as caller:
                result = await caller.client.call_tool("check_tpu_availability", {})
                self.assertTrue(result.is_error, result.content)
                self.assertNotIn("NOT_FOUND", text_of(result))
            self.gcloud.mend()
        self.assertEqual(len(self.requests()), 1)


class ManageTest(QueuedCase):
    worker = HELD

    async def test_it_makes_one_and_then_tells_of_it(self) -> None:
        self.waiting()
        async with self.calling() as caller:
            first = await caller.ok("manage_queued_resource", zone=ZONE, hours=2)
            self.assertEqual((first["exists"], first["granted"]), (True, False))
            for zone in (ZONE, OTHER):
                again = await caller.ok("manage_queued_resource", zone=zone, hours=1)
                self.assertEqual((again["name"], again["zone"]), (first["name"], ZONE))
        self.assertEqual(self.asked(), [ZONE])
        self.assertEqual(self.requests(), [first["name"]])

    async def test_from_two_servers_at_once_it_makes_one(self) -> None:
        self.waiting()
        async with self.calling() as one, self.calling() as other:
            calls = [
                caller.client.call_tool("manage_queued_resource", {"zone": zone})
                for caller, zone in ((one, ZONE), (other, OTHER), (one, OTHER), (other, ZONE))
            ]
            ended = await asyncio.gather(*calls)
        self.assertEqual(len(self.asked()), 1)
        self.assertEqual(len(self.requests()), 1)
        self.assertTrue(any(not result.is_error for result in ended))

    async def test_beside_a_search_it_makes_no_twin(self) -> None:
        """Before its first request, and between two, a search has none that could be seen."""
        async with self.calling() as caller:
            begun = await caller.ok("find_tpu", zones=[ZONE])
            text = await caller.fails("BUSY", "manage_queued_resource", zone=OTHER)
            self.assertIn(begun["job_id"], text)
            self.assertEqual(self.asked(), [])
            await caller.ok("cancel_job", job_id=begun["job_id"])
            await caller.ok("manage_queued_resource", zone=OTHER)
        self.assertEqual(self.asked(), [OTHER])
        self.assertEqual(len(self.requests()), 1)

    async def test_what_create_refuses_it_refuses(self) -> None:
        async with self.calling() as caller:
            await caller.fails("INVALID", "manage_queued_resource", zone="--zone")
            await caller.fails("INVALID", "manage_queued_resource", zone=ZONE, wait_minutes=500)
            await caller.fails("DENIED", "manage_queued_resource", zone=ZONE, hours=5)
            await caller.fails("NOT_FOUND", "manage_queued_resource", zone="us-east5-b")
            self.write_settings(BUDGET_USD="0.1")
            await caller.fails("DENIED", "manage_queued_resource", zone=ZONE)
            self.write_settings(MODEL_NAME="google/gemma-4-E2B-it-qat-w4a16-ct")
            await caller.fails("INVALID", "manage_queued_resource", zone=ZONE)
            self.write_settings()
            self.google.script.unreachable = {OTHER}
            await caller.fails("UNKNOWN", "manage_queued_resource", zone=ZONE)
        self.assertEqual((self.asked(), self.requests()), ([], []))

    async def test_what_is_somebody_elses_is_not_told_of_as_this_rigs(self) -> None:
        self.waiting()
        async with self.calling() as caller:
            made = await caller.ok("create_tpu_queued_resource", zone=ZONE)
            with self.google.lock:
                for request in self.google.tpu.queue.values():
                    for spec in request["tpu"]["nodeSpec"]:
                        spec["node"]["labels"] = dict(STRANGER)
            result = await caller.client.call_tool("manage_queued_resource", {"zone": OTHER})
            self.assertNotIn(f"{made['machine']['name']} in {ZONE} is", text_of(result))
        self.assertEqual(self.google.sent("DELETE", "/"), [])


if __name__ == "__main__":
    unittest.main()
