"""The story of a rented rig by its tools: find, serve, ask, measure, take down; and what it sent.

Against the fake Google and machines that boot. What is created is labelled from the create call on,
and the provider itself will end it.
"""

from __future__ import annotations

import time
from typing import Any

from mcp import Client

from forge.suites.google_case import RENTED_PROJECT, GoogleCase
from forge.suites.rented_case import IMAGE_DIGEST_NOW


class RentedStorySuite(GoogleCase):
    """One machine's life, as a person's words would lead an agent through it."""

    async def found(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """A finished search; its job."""
        begun = await self.answer(client, "find_tpu_vm", **arguments)
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        return job

    def assert_everything_is_marked(self) -> None:
        """What was ever created carries its labels and its end since the call that made it."""
        orders = [one.body for one in self.google.sent("POST", "/instances") if one.body]
        orders = [body for body in orders if "machineType" in body]
        self.assertTrue(orders, "nothing was ever created")
        for body in orders:
            labels, scheduling = body["labels"], body["scheduling"]
            self.assertEqual(labels["managed-by"], "gemma4-rigs")
            self.assertEqual(labels["rig"], self.module.RIG.name)
            self.assertTrue(labels["owner"] and labels["intent"], labels)
            life = int(scheduling["maxRunDuration"]["seconds"])
            self.assertLessEqual(life, 4 * 3600)
            self.assertGreater(int(labels["expires"]), time.time())
            self.assertEqual(scheduling["instanceTerminationAction"], "DELETE")
            for disk in body["disks"]:
                self.assertTrue(disk["autoDelete"])
                self.assertIn(labels["intent"], disk["initializeParams"]["description"])

    async def test_find_serve_measure_and_take_down(self) -> None:
        """Sold out in Europe, with a hint: the machine is taken where the provider has one."""
        self.google.script.stockout = {"europe-west4-a"}
        self.google.script.hint = ("us-east5-b",)
        async with self.in_process() as client:
            job = await self.found(client, zones=["europe-west4-a", "us-east5-b"], hours=1)
            self.assertEqual(job["result"]["zone"], "us-east5-b")
            self.assertIn("europe-west4-a", " ".join(job["result"]["asked"]))
            self.assert_everything_is_marked()
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
            self.assertEqual(machine["zone"], "us-east5-b")
            gone = await self.destroyed(another, machine)
            self.assertTrue(gone["gone"])
            await self.assert_all_gone()
            orphans = await self.answer(another, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
            status = await self.answer(another, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))

    async def _measured(self, client: Client) -> None:
        small = {"context_tokens": [32], "output_tokens": 4, "requests_per_cell": 2}
        begun = await self.answer(
            client, "run_vllm_benchmark", concurrency=[1, 8, 32], seconds_per_cell=5, **small
        )
        job = await self.finished(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        self.assertTrue(list(self.state.rglob(f"{job['result']['report']}.json")))

    async def test_what_the_machine_was_told_to_run(self) -> None:
        """The image by the digest that its tag had, the limits of tpu.env, the address loopback."""
        async with self.in_process() as client:
            await self.serve(client)
            container = self.host().container()
            argv = self.engine.starts()[-1]["argv"]
            log = await self.text(client, "get_tpu_vm_serial_log", lines=2000)
        run = next(words for words in self.host().programs() if words[:2] == ["docker", "run"])
        self.assertIn(IMAGE_DIGEST_NOW, " ".join(run))
        self.assertRegex(run[run.index("--publish") + 1], r"^127\.0\.0\.1:\d+:8000$")
        self.assertNotIn("--privileged", run)
        self.assertEqual(argv[:2], ["serve", "google/gemma-4-E2B-it"])
        self.assertEqual(argv[argv.index("--max-model-len") + 1], "65536")
        self.assertEqual(argv[argv.index("--tool-call-parser") + 1], "gemma4")
        self.assertTrue(container["State"]["Running"])
        marks = [line.partition("GEMMA4-BOOT ")[2].split() for line in log.splitlines()]
        done = dict.fromkeys(words[0] for words in marks if words[1:2] == ["done"])
        order = ["docker", "image", "token", "weights", "compile", "ready"]
        self.assertEqual(list(done), order, log)

    async def test_the_container_is_stopped_and_comes_back(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            await self.answer(client, "manage_vllm_docker", action="stop")
            await self.refusal(client, "query_gemma4", "BUSY", prompt="hello")
            status = await self.answer(client, "get_system_status")
            self.assertNotEqual(status["state"], "ready")
            self.assertIn("was stopped by this rig", " ".join(status["notes"]))
            text = await self.refusal(client, "wait_for_vllm_ready", "NOT_FOUND", wait_s=50)
            self.assertIn("exited", text)
            self.assertIn("manage_vllm_docker(action='start')", text)
            self.assertTrue(status["cost"]["billed"], "a stopped container is no stopped machine")
            await self.answer(client, "manage_vllm_docker", action="start")
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")

    async def test_no_second_machine_and_no_second_search(self) -> None:
        async with self.in_process() as client:
            self.google.script.stockout = {"europe-west4-a"}
            first = await self.answer(client, "find_tpu_vm", zones=["europe-west4-a"])
            second = await self.answer(client, "find_tpu_vm", zones=["us-east5-b"])
            self.assertEqual(first["job_id"], second["job_id"])
            await self.answer(client, "cancel_job", job_id=first["job_id"])
            await self.finished(client, first["job_id"])
            self.assertEqual(self.rented(), {})
            self.google.script.stockout = set()
            await self.created(client)
            for tool, arguments in (
                ("create_tpu_vm_instance", {"zone": "us-east5-b"}),
                ("find_tpu_vm", {}),
            ):
                await self.refusal(client, tool, "EXISTS", **arguments)
        self.assertEqual(len(self.rented()["instances"]), 1)
        self.assert_everything_is_marked()

    async def test_what_is_somebody_elses_is_neither_shown_nor_touched(self) -> None:
        async with self.in_process() as client:
            machine = await self.created(client)
            with self.google.lock:
                for thing in self.google.compute.instances.values():
                    thing["labels"] = {**thing["labels"], "owner": "0123456789abcdef"}
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual((listing["rentals"], listing["others"]), ([], 1))
            where = {"name": machine["name"], "zone": machine["zone"]}
            await self.refusal(client, "plan_destroy", "DENIED", **where)
            text = await self.refusal(client, "wait_for_vllm_ready", "NOT_FOUND")
            self.assertIn("labels", text)
        self.assertEqual(self.google.sent("DELETE", ""), [])
        self.assertEqual(self.rented()["instances"], [machine["name"]])
        self.assertEqual(machine["project"], RENTED_PROJECT)
