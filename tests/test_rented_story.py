"""The rig on Compute Engine through what ends a story early: kills, idleness, preemption.

The built server with machines that really boot, a stand-in gcloud and a fake Google. After each
kill of the server and its workers nothing is unlabelled, nothing is without an end, and the next
server tells what is so.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.suites.google_case import GoogleCase, GoogleProvider
from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.rented_case import IMPATIENT, rented_rig
from forge.suites.rented_shared import RENTED_WORDS
from forge.suites.rig_case import PATIENCE_S, use_rig
from forge.suites.witness import rig_processes

_KILLED_AT_THE_INTENT = """
import os, signal
append = server.Journal.append


def noted(self, event, **fields):
    append(self, event, **fields)
    if event == "create intended":
        os.kill(os.getpid(), signal.SIGKILL)


server.Journal.append = noted
"""
RIG_FOLDER = Path(__file__).resolve().parent.parent / "tpu-vllm-v6e1-2b"


def setUpModule() -> None:
    use_rig(rented_rig(RIG_FOLDER, {}, "google/gemma-4-E2B-it", RENTED_WORDS, GoogleProvider))


class Case(GoogleCase):
    """Marks and ends, asked of the provider alone."""

    def assert_nothing_unmarked(self, where: str) -> None:
        """What exists now carries the rig's labels and an end, and there are no twins."""
        with self.google.lock:
            machines = list(self.google.compute.instances.values())
            disks = list(self.google.compute.disks.values())
        self.assertLessEqual(len(machines), 1, f"{where}: twins")
        for machine in machines:
            labels = machine["labels"]
            self.assertEqual(labels["managed-by"], "gemma4-rigs", where)
            self.assertEqual(labels["rig"], self.module.RIG.name, where)
            self.assertTrue(labels["owner"] and labels["intent"], where)
            self.assertGreater(int(labels["expires"]), time.time(), where)
            self.assertTrue(machine["scheduling"]["maxRunDuration"]["seconds"], where)
            self.assertEqual(machine["scheduling"]["instanceTerminationAction"], "DELETE", where)
        for disk in disks:
            self.assertIn("gemma4-rigs", disk["description"], where)
            self.assertIn("expires", disk["description"], where)

    def structure(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The structured half of a raw answer that is no fault."""
        self.assertEqual(call_fault(answer), "")
        return dict(answer["result"]["structuredContent"])


class KilledStoryTests(Case):
    """One machine's life, the server and all its workers killed by SIGKILL at every step."""

    def kill_everything(self, server: RawServer, where: str) -> None:
        """The server, its workers and its tunnels, as when a whole session goes."""
        server.process.kill()
        server.process.wait()
        left = [psutil.Process(pid) for pid in rig_processes(self.state)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        self.assertEqual(rig_processes(self.state), [], where)
        self.assert_nothing_unmarked(where)

    async def killed_after(
        self, where: str, tool: str, arguments: dict[str, Any], what: Any
    ) -> None:
        """Call `tool` in a server of its own, which dies with all its workers once `what` holds."""
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            server.send("tools/call", {"name": tool, "arguments": arguments})
            await self.until(what, f"{where}: it never came to that")
            self.kill_everything(server, where)

    async def status(self) -> dict[str, Any]:
        """What the next server says of the whole."""
        async with self.in_process() as client:
            return await self.answer(client, "get_system_status")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [entry for entry in self.journal() if entry["event"] == name]

    async def test_killed_at_every_step_from_the_search_to_the_end(self) -> None:
        zones = {"zones": ["europe-west4-a"], "hours": 1}
        # The search was asked for, and nothing went out.
        where = "before the first request"
        await self.killed_after(
            where, "find_tpu_vm", zones, lambda: rig_processes(self.state, "job")
        )
        self.assertEqual(self.rented(), {})
        status = await self.status()
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        await self._lost()  # for seconds a worker that never showed itself may still come
        # A request waits in the provider's queue.
        self.google.script.never = {"europe-west4-a"}
        await self.killed_after(
            "queued", "find_tpu_vm", zones, lambda: self.rented().get("instances")
        )
        (machine,) = self.rented()["instances"]
        await self._queued_is_told(machine)
        # Taken over by the next search, which sees it granted.
        self.google.script.never = set()
        await self.killed_after(
            "granted", "find_tpu_vm", zones, lambda: self.engine.starts() or self.host().console()
        )
        self.assertEqual(self.rented()["instances"], [machine], "another one was asked for")
        await self._served_across_kills(machine)
        await self._ended_across_kills(machine)

    async def _lost(self) -> None:
        """Wait until the last job is known to be lost."""
        (job,) = list((self.rig_state / "jobs").glob("sweep-*.json"))
        async with self.in_process() as client:
            state = ""
            deadline = time.monotonic() + PATIENCE_S
            while state != "lost" and time.monotonic() < deadline:
                state = (await self.answer(client, "get_job", job_id=job.stem, wait_s=2))["state"]
            self.assertEqual(state, "lost")

    async def _queued_is_told(self, machine: str) -> None:
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            (row,) = listing["rentals"]
            self.assertEqual((row["name"], row["state"]), (machine, "pending"))
            self.assertTrue(row["ends_at"])
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "starting", status)
            self.assertFalse(status["cost"]["billed"], "what is queued costs nothing")
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone="us-east5-b")

    async def _served_across_kills(self, machine: str) -> None:
        # While it is watched as it boots.
        await self.killed_after(
            "booting", "wait_for_vllm_ready", {}, lambda: rig_processes(self.state, "job")
        )
        async with self.in_process() as client:
            await self.ready(client)
        # While it serves: the tunnel goes too, and a new one is opened.
        async with self.in_process() as client:
            for pid in rig_processes(self.state, "tunnel"):
                os.kill(pid, signal.SIGKILL)
            said = await self.answer(client, "query_gemma4", prompt="still there?")
            self.assertTrue(said["text"])
        # While it is measured.
        self.engine.script(pace_s=0.3)
        await self.killed_after(
            "measured",
            "run_vllm_benchmark",
            {"concurrency": [1], "context_tokens": [32]},
            lambda: rig_processes(self.state, "job") and len(self.engine.requests()) > 3,
        )
        self.engine.script()
        status = await self.status()
        self.assertEqual(status["state"], "ready", status)
        self.assertIn("lost", " ".join(status["jobs"]))
        self.assertEqual(self.rented()["instances"], [machine])

    async def _ended_across_kills(self, machine: str) -> None:
        where = {"name": machine, "zone": "europe-west4-a"}
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            plan = self.structure(server.call("plan_destroy", dict(where)))
            self.kill_everything(server, "planned")
        # The delete was taken, its answer never came, and the server is gone.
        self.google.script.lost = 1
        arguments = {**where, "token": plan["token"]}
        await self.killed_after(
            "destroying", "destroy_tpu_vm_instance", arguments, lambda: not self.rented()
        )
        status = await self.status()
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        async with self.in_process() as client:
            orphans = await self.answer(client, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
            await self.created(client)  # and all begins anew
        self.assert_nothing_unmarked("at the end")

    async def test_killed_while_a_create_is_out(self) -> None:
        """The provider made it, and nobody was told: the next server finds it and can end it."""
        self.google.script.lost = 1
        await self.killed_after(
            "created",
            "create_tpu_vm_instance",
            {"zone": self.zone},
            lambda: self.rented().get("instances"),
        )
        self.assertEqual(len(self.events("create intended")), 1)
        self.assertEqual(self.events("create settled"), [])
        async with self.in_process() as client:
            await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone="us-east5-b")
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("starting", True))
            await self.ready(client)
            (machine,) = (await self.answer(client, "list_tpu_vm_instances"))["rentals"]
            await self.destroyed(client, machine)
            await self.assert_all_gone()

    async def test_killed_between_the_intent_and_the_create(self) -> None:
        """An intent without a machine: it may still come to life, and is settled by looking."""
        runner = self.write_runner("intent.py", IMPATIENT + _KILLED_AT_THE_INTENT)
        with raw_server(runner, self.environment, self.stderr_file) as server:
            call = {"name": "create_tpu_vm_instance", "arguments": {"zone": self.zone}}
            self.assertIsNone(server.receive(server.send("tools/call", call)))
            self.assertEqual(server.process.wait(10), -signal.SIGKILL)
        self.assertEqual(len(self.events("create intended")), 1)
        self.assertEqual(self.provider().called("compute", "instances", "create"), [])
        rented = self.module.RentedComputeEngine
        async with self.in_process() as client:
            with mock.patch.object(rented, "settle_s", 600.0):
                text = await self.refusal(
                    client, "create_tpu_vm_instance", "UNKNOWN", zone="us-east5-b"
                )
                self.assertIn("may still come to life", text)
                await self.refusal(client, "find_tpu_vm", "UNKNOWN")
            with mock.patch.object(rented, "settle_s", 0.0):
                await self.created(client)
        (first, second) = self.events("create settled")
        self.assertEqual((first["outcome"], second["outcome"]), ("absent", "created"))
        self.assert_nothing_unmarked("after")


class EndedStoryTests(Case):
    """What ends a machine without this rig's doing is told, with what it still costs."""

    def quick_minutes(self) -> None:
        """From now on a machine's minute is a second, and one idle minute is all it gets."""
        self.hosts.minute_s = 1.0
        self.addCleanup(setattr, self.hosts, "minute_s", 3.0)
        self.write_settings(**self.good_settings() | {"IDLE_MINUTES": "1"})
        self.addCleanup(self.write_settings, **self.good_settings())

    async def test_an_idle_machine_switches_itself_off_and_what_is_left_is_told(self) -> None:
        self.quick_minutes()

        def off() -> bool:
            return self.host().machine().get("status") == "TERMINATED"

        async with self.in_process() as client:
            machine = await self.created(client)
            await self.until(off, "an idle machine went on")
            await asyncio.sleep(0.5)  # what was read lately is not read again at once
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "stopped", status)
            self.assertIn("may still be billed", " ".join(status["notes"]))
            self.assertTrue(status["cost"]["billed"])
            self.assertIn("disk", status["cost"]["what"])
            self.assertIsNone(status["cost"]["usd_per_hour"], "the chip's price of a stopped one")
            text = await self.refusal(client, "wait_for_vllm_ready", "NOT_FOUND")
            self.assertIn("shut down from within", text)
            (orphan,) = (await self.answer(client, "list_orphans"))["orphans"]
            self.assertEqual(orphan["name"], machine["name"])
            self.assertIn("stopped", " ".join(orphan["reasons"]))
            await self.refusal(client, "find_tpu_vm", "EXISTS")
            await self.destroyed(client, machine)
            await self.assert_all_gone()

    async def test_a_preempted_spot_machine_is_told_with_what_to_do(self) -> None:
        async with self.in_process() as client:
            machine = await self.created(client, market="spot")
            await self.ready(client)
            self.google.preempt(machine["name"])
            await self.until(lambda: not self.processes("server"), "it went on serving")
            await asyncio.sleep(0.5)  # what was read lately is not read again at once
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))
            notes = " ".join(status["notes"])
            self.assertIn("preempted", notes)
            self.assertIn("look for it anew", notes)
            self.assertIn("find_tpu_vm", status["next_step"])
            for tool, arguments in (("wait_for_vllm_ready", {}), ("query_gemma4", {"prompt": "x"})):
                text = await self.refusal(client, tool, "NOT_FOUND", **arguments)
                self.assertIn("preempted", text, tool)
            begun = await self.answer(client, "find_tpu_vm", zones=["us-east5-b"])
            job = await self.finished(client, begun["job_id"])
            self.assertEqual(job["state"], "done", job)
        self.assert_nothing_unmarked("had again")

    async def test_a_boot_that_fails_is_told_by_its_deciding_line(self) -> None:
        secret = "Permission 'secretmanager.versions.access' denied for resource (or it may not "
        pull = "Error response from daemon: manifest for vllm/vllm-tpu:nightly not found: manifest "
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"secret": f"{secret}exist)."}, "secretmanager.versions.access"),
            ({"pull": f"{pull}unknown"}, "manifest unknown"),
            ({"oom": True}, "OOMKilled"),
        )
        for orders, words in cases:
            with self.subTest(words):
                self.hosts.orders = orders
                async with self.in_process() as client:
                    await self.created(client)
                    result = await client.call_tool("wait_for_vllm_ready", {"wait_s": 50})
                    text = "".join(item.text for item in result.content if item.type == "text")
                    self.assertTrue(result.is_error, text)
                    self.assertIn(words, text)
                    found = await self.answer(client, "analyze_logs")
                    self.assertTrue(found["found"], found)
                    self.assertIn(words, found["line"], found)
                    status = await self.answer(client, "get_system_status")
                    self.assertNotEqual(status["state"], "ready")
                    self.assertTrue(status["cost"]["billed"], "it is billed all the same")
                self.forget_everything()


class TwoClientsTests(Case):
    """Two servers of the rig at once, each a process of its own: one search, one machine."""

    async def test_both_see_one_search_one_machine_and_its_end(self) -> None:
        async with self.over_stdio() as one, self.over_stdio("legacy") as two:
            begun = await asyncio.gather(
                *(client.call_tool("find_tpu_vm", {}) for client in (one, two) for _ in range(3))
            )
            good = [dict(each.structured_content or {}) for each in begun if not each.is_error]
            bad = [str(each.content[0]) for each in begun if each.is_error]
            self.assertEqual([text for text in bad if "BUSY " not in text], [])
            self.assertEqual(len({each["job_id"] for each in good}), 1, good)
            await self.finished(two, good[0]["job_id"])
            self.assertEqual(len(self.rented()["instances"]), 1)
            ready = await asyncio.gather(self.ready(one), self.ready(two))
            self.assertEqual(ready[0]["endpoint"], ready[1]["endpoint"])
            said = await asyncio.gather(
                *(self.answer(each, "query_gemma4", prompt="both") for each in (one, two))
            )
            self.assertEqual([each["text"] for each in said], ["Good day.", "Good day."])
            tunnels = {os.getsid(pid) for pid in rig_processes(self.state, "tunnel")}
            self.assertEqual(len(tunnels), 1, "two tunnels")
            await self._one_ends_it(one, two)
        events = [json.loads(line)["v"] for line in self._journal_lines()]
        self.assertEqual(set(events), {1})

    def _journal_lines(self) -> list[str]:
        return next(self.state.rglob("journal.jsonl")).read_text().splitlines()

    async def _one_ends_it(self, one: Client, two: Client) -> None:
        (machine,) = (await self.answer(one, "list_tpu_vm_instances"))["rentals"]
        where = {"name": machine["name"], "zone": machine["zone"]}
        plan = await self.answer(one, "plan_destroy", **where)
        token = plan["token"]
        both = await asyncio.gather(
            *(
                client.call_tool("destroy_tpu_vm_instance", {**where, "token": token})
                for client in (one, two)
            )
        )
        self.assertTrue(any(not each.is_error for each in both), both)
        self.assertEqual(len(self.google.sent("DELETE", "/instances/")), 1, "deleted twice")
        await self.assert_all_gone()
        status = await self.answer(two, "get_system_status")
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        await self.refusal(two, "query_gemma4", "NOT_FOUND", prompt="hello")


class LeftBySearchTests(Case):
    """A search that is ended from outside: what it cannot prove gone is not called gone."""

    async def test_a_cancelled_search_whose_request_stays_is_told(self) -> None:
        self.google.script.never = {self.zone}
        with mock.patch.object(self.module, "_CANCEL_PATIENCE_S", 2.0):
            async with self.in_process() as client:
                begun = await self.answer(client, "find_tpu_vm", zones=[self.zone])
                await self.until(lambda: self.rented().get("instances"), "nothing was asked for")
                (name,) = self.rented()["instances"]
                self.google.script.stubborn = {name}
                text = await self.refusal(client, "cancel_job", "UNKNOWN", job_id=begun["job_id"])
                self.assertIn(name, text)
                self.assertIn("list_tpu_vm_instances()", text)
                self.google.script.stubborn = set()
                listing = await self.answer(client, "list_tpu_vm_instances")
                await self.destroyed(client, listing["rentals"][0])
                self.assertEqual(self.rented(), {})

    async def test_take_down_ends_a_search_first(self) -> None:
        self.google.script.stockout = {self.zone}
        async with self.in_process() as client:
            begun = await self.answer(client, "find_tpu_vm", zones=[self.zone])
        status = await self.module.take_down(self.assembled(self.server_file.name), True)
        self.assertEqual(status, 0)
        async with self.in_process() as client:
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled", job)
        self.assertEqual(self.rented(), {})
