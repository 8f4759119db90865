"""What is the Cloud TPU API's own in a rented rig: queued resources, their states, their dangers.

Against the fake Google and machines that boot; the shared suites have the rest.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from mcp import Client

from forge.suites.google_case import GoogleCase
from forge.suites.rented_shared import RENTED_WORDS

# The rig's own names of the tools that the shared suites call by Compute Engine's, and its zone.
TPU_WORDS = {
    **RENTED_WORDS,
    "find_tpu_vm": "find_tpu",
    "create_tpu_vm_instance": "create_tpu_queued_resource",
    "list_tpu_vm_instances": "list_queued_resources",
    "describe_tpu_vm_instance": "describe_queued_resource",
    "destroy_tpu_vm_instance": "destroy_queued_resource",
    "get_tpu_vm_serial_log": "get_tpu_serial_log",
    "zone": "us-west4-a",
}
TPU_TOOLS_WITH_EFFECT = {
    "find_tpu": "changes",
    "create_tpu_queued_resource": "changes",
    "list_queued_resources": "reads",
    "describe_queued_resource": "reads",
    "plan_destroy": "reads",
    "destroy_queued_resource": "destroys",
    "list_orphans": "reads",
    "reap_orphans": "destroys",
    "get_system_status": "reads",
    "wait_for_vllm_ready": "reads",
    "get_vllm_docker_logs": "reads",
    "get_vllm_endpoint": "reads",
    "manage_vllm_docker": "destroys",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "verify_model_health": "reads",
    "get_model_details": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "run_vllm_benchmark": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "analyze_cloud_logging": "reads",
    "save_hf_token": "changes",
    "estimate_deployment_cost": "reads",
    "get_tpu_serial_log": "reads",
    "get_help": "reads",
}
WEST, CENTRAL = "us-west4-a", "us-central1-a"


class QueuedCase(GoogleCase):
    """A search to its end, and what the requests carried."""

    async def found(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        begun = await self.answer(client, "find_tpu", **arguments)
        return await self.finished(client, begun["job_id"])

    def orders(self) -> list[dict[str, Any]]:
        """The bodies of all queued resources that were ever asked for."""
        sent = self.google.sent("POST", "/queuedResources")
        return [one.body for one in sent if one.body and "tpu" in one.body]

    def assert_everything_is_marked(self) -> None:
        self.assertTrue(self.orders(), "nothing was ever asked for")
        for body in self.orders():
            labels = body["tpu"]["nodeSpec"][0]["node"]["labels"]
            self.assertEqual(labels["managed-by"], "gemma4-rigs")
            self.assertEqual(labels["rig"], self.module.RIG.name)
            self.assertTrue(labels["owner"] and labels["intent"], labels)
            self.assertGreater(int(labels["expires"]), time.time())


class QueuedStorySuite(QueuedCase):
    """One machine's life through the queue."""

    async def test_find_serve_and_take_down(self) -> None:
        async with self.in_process() as client:
            job = await self.found(client, zones=[WEST, CENTRAL], hours=1)
            self.assertEqual((job["state"], job["result"]["zone"]), ("done", WEST), job)
            self.assert_everything_is_marked()
            self.assertEqual(self.orders()[0]["runDuration"]["maxRunDuration"], "3600s")
            await self.ready(client)
            said = await self.answer(
                client, "query_gemma4", prompt="What is the capital of France?"
            )
            self.assertEqual(said["text"], "Paris.")
        async with self.over_stdio() as another:  # a new server knows the zone and the model
            status = await self.answer(another, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("ready", True), status)
            (machine,) = (await self.answer(another, "list_tpu_vm_instances"))["rentals"]
            self.assertEqual(machine["zone"], WEST)
            gone = await self.destroyed(another, machine)
            self.assertTrue(gone["gone"], gone)
            await self.assert_all_gone()
            orphans = await self.answer(another, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))

    async def test_a_refused_zone_is_left_and_its_dead_request_removed(self) -> None:
        """A dead request goes on holding its name and quota."""
        self.google.script.quota = {WEST}
        async with self.in_process() as client:
            job = await self.found(client, zones=[WEST, CENTRAL])
            self.assertEqual((job["state"], job["result"]["zone"]), ("done", CENTRAL), job)
        self.assertEqual(len(self.rented()["queued"]), 1, "a dead request was left")
        self.assert_everything_is_marked()

    async def test_without_an_end_nothing_is_rented(self) -> None:
        """spot and on-demand nodes are never ended by the provider."""
        for market in ("spot", "on-demand"):
            with mock.patch.dict("os.environ", MARKETS=market):
                async with self.in_process() as client:
                    for more in ({}, {"market": market}):
                        text = await self.refusal(
                            client, "create_tpu_vm_instance", "DENIED", zone=WEST, **more
                        )
                        self.assertIn("NO_HARD_STOP_OK", text)
        self.assertEqual((self.rented(), self.orders()), ({}, []))

    async def test_taken_back_is_told_with_a_way_on(self) -> None:
        with mock.patch.dict("os.environ", MARKETS="spot", NO_HARD_STOP_OK="1"):
            async with self.in_process() as client:
                machine = await self.created(client, market="spot")
                await self.ready(client)
                self.google.preempt(machine["name"])
                await self.until(lambda: not self.processes("server"), "it was not switched off")
                await self.until(lambda: self._aged(), "")
                status = await self.answer(client, "get_system_status")
                self.assertNotEqual(status["state"], "ready", status)
                text = await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
                self.assertIn(machine["name"], text)
                found = await self.answer(client, "list_orphans")
                self.assertEqual([one["name"] for one in found["orphans"]], [machine["name"]])
                await self.answer(client, "reap_orphans", token=found["token"])
                self.assertEqual(self.rented(), {})

    def _aged(self) -> bool:
        """What was read of the machine is read anew after so long."""
        time.sleep(self.module.MACHINE_FRESH_S)
        return True

    async def test_requests_by_their_own_words(self) -> None:
        self.google.script.never = {WEST}
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                there = await self.answer(client, "check_tpu_availability")
                self.assertEqual((there["exists"], there["granted"]), (False, False))
                made = await self.answer(client, "manage_queued_resource", zone=WEST)
                self.assertEqual((made["exists"], made["granted"]), (True, False), made)
                again = await self.answer(client, "manage_queued_resource", zone=CENTRAL)
                self.assertEqual(again["name"], made["name"])
                self.assertEqual(len(self.orders()), 1)
                there = await self.answer(client, "check_tpu_availability")
                self.assertEqual((there["exists"], there["granted"]), (True, False))
                self.assertEqual((await self.answer(client, "list_orphans"))["orphans"], [])
                status = await self.answer(client, "get_system_status")
                self.assertFalse(status["cost"]["billed"], "a queued request costs nothing")
        self.assert_everything_is_marked()


class UnloadableSuite(QueuedCase):
    """Weights that are known not to load: refused with the cause, tried on demand, recorded."""

    async def test_nothing_is_rented_for_what_does_not_load(self) -> None:
        async with self.in_process() as client:
            for tool, arguments in (
                ("find_tpu", {}),
                ("create_tpu_vm_instance", {"zone": self.zone}),
            ):
                text = await self.refusal(client, tool, "INVALID", **arguments)
                self.assertIn(self.model, text)
                self.assertRegex(text, "k_norm|per_layer_model_projection")
                self.assertIn("override=true", text)
        self.assertEqual((self.rented(), self.orders()), ({}, []))

    async def test_a_trial_is_kept(self) -> None:
        words = "ValueError: k_norm.weight is missing for layers 15-34"
        self.engine.script(log=words, crash=1)
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                before = (await self.answer(client, "get_load_matrix"))["rows"]
                self.assertNotIn("measured", [row["kind"] for row in before])
                self.assertIn(False, [row["loads"] for row in before])
                await self.created(client, override=True)
                await self._failed(client)
                rows = (await self.answer(client, "get_load_matrix"))["rows"]
                (own,) = [row for row in rows if row["kind"] == "measured"]
                self.assertEqual((own["weights"], own["loads"]), (self.model, False))
                self.assertIn("vllm/vllm-tpu", own["how"])

    async def _failed(self, client: Client) -> None:
        for _ in range(10):
            result = await client.call_tool("wait_for_vllm_ready", {"wait_s": 50})
            if result.is_error:
                return
        self.fail("it came up")
