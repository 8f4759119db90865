"""The rig on EC2 through what ends a story early: kills, idleness, a machine that is taken back.

The built server with machines that really boot, a stand-in for session-manager-plugin and an AWS
account on loopback. After each kill of the server and its workers nothing is untagged, nothing is
without an end, no machine of others was touched, and the next server tells what is so.
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

from forge.suites.ec2_case import EC2_WORDS, Ec2Provider
from forge.suites.ec2_fault_case import FAR, FIRST, SECOND, SOMEBODY_ELSE, Ec2FaultCase
from forge.suites.fake_aws_world import CallFault
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
RIG_FOLDER = Path(__file__).resolve().parent.parent / "gpu-vllm-g6-2b"


def setUpModule() -> None:
    words = {**RENTED_WORDS, **EC2_WORDS}
    use_rig(rented_rig(RIG_FOLDER, {}, "google/gemma-4-E2B-it", words, Ec2Provider))


class Case(Ec2FaultCase):
    """Marks and ends, asked of the account alone; two machines of others stand beside."""

    server_name = "impatient.py"

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.neighbours()

    def neighbours(self) -> None:
        """One that is nobody's business, and one that another owner's rig of this name rents."""
        self.planted("payroll-db", {})
        self.planted("the-others", self.our_tags(**SOMEBODY_ELSE, intent="x", expires="1"))

    def assert_nothing_unmarked(self, where: str) -> None:
        """What exists now carries the rig's tags and an end, there are no twins, and machines of
        others are as they were."""
        ours = self.ours()
        self.assertLessEqual(len(ours), 1, f"{where}: twins")
        for machine in ours:
            self.assert_machine_marked(machine, where)
        self.assertEqual(self.cloud.harmed(), [], where)
        if not ours:
            self.assertEqual(self.rented(), {}, where)

    def rented(self) -> dict[str, list[str]]:
        """Without what others have."""
        held = super().rented()
        return held if self.ours() else {k: v for k, v in held.items() if k != "instances"}

    def structure(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The structured half of a raw answer that is no fault."""
        self.assertEqual(call_fault(answer), "")
        return dict(answer["result"]["structuredContent"])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [entry for entry in self.journal() if entry["event"] == name]


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

    async def test_killed_at_every_step_from_the_search_to_the_end(self) -> None:
        zones = {"zones": [FIRST], "hours": 1}
        # The search was asked for, and nothing went out.
        self.cloud.script.delays = {"DescribeInstanceTypeOfferings": 3.0}
        where = "before the first launch"
        await self.killed_after(where, "find_gpu", zones, lambda: rig_processes(self.state, "job"))
        self.assertEqual((self.rented(), self.asked()), ({}, []))
        status = await self.status()
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        await self._lost()  # for seconds a worker that never showed itself may still come
        # The launch was taken, and its answer never came: the next server ends what it made.
        self.cloud.script.delays = {}
        self.cloud.script.pending_s = 9999.0
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        await self.killed_after("launched", "find_gpu", zones, self.ours)
        await self._starting_is_told(self.ours_alone().id)
        async with self.in_process() as client:
            (row,) = (await self.answer(client, "list_gpu_instances"))["rentals"]
            await self.destroyed(client, row)
        self.assert_nothing_unmarked("ended by the next")
        # The launch was answered, and the search waits for the machine to run.
        await self.killed_after("pending", "find_gpu", zones, self._waits)
        machine = self.ours_alone().id
        await self._starting_is_told(machine)
        self._granted()
        await self.until(lambda: self._boots(machine), "it does not boot")
        await self._served_across_kills(machine)
        await self._ended_across_kills(machine)

    def _waits(self) -> bool:
        """Whether the search has written down that EC2 took its launch."""
        path = self.rig_state / "sweep" / "sweep.json"
        return bool(self.ours()) and json.loads(path.read_text())["phase"] == "waiting"

    def _granted(self) -> None:
        with self.cloud.lock:
            self.ours_alone().then_at = 0.0
        self.cloud.script.pending_s = 0.0
        self.cloud.tell()

    def _boots(self, machine: str) -> bool:
        host = self.hosts.hosts.get(machine)
        return host is not None and "GEMMA4-BOOT" in host.console()

    async def _lost(self) -> None:
        """Wait until the last job is known to be lost."""
        (job,) = list((self.rig_state / "jobs").glob("sweep-*.json"))
        async with self.in_process() as client:
            state = ""
            deadline = time.monotonic() + PATIENCE_S
            while state != "lost" and time.monotonic() < deadline:
                state = (await self.answer(client, "get_job", job_id=job.stem, wait_s=2))["state"]
            self.assertEqual(state, "lost")

    async def _starting_is_told(self, machine: str) -> None:
        async with self.in_process() as client:
            (row,) = (await self.answer(client, "list_gpu_instances"))["rentals"]
            self.assertEqual((row["provider_id"], row["state"]), (machine, "pending"))
            self.assertTrue(row["ends_at"])
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "starting", status)
            await self.refusal(client, "create_gpu_instance", "EXISTS", zone=FAR)
            await self.refusal(client, "find_gpu", "EXISTS")

    async def _served_across_kills(self, machine: str) -> None:
        # While it is watched as it boots.
        await self.killed_after(
            "booting", "wait_for_vllm_ready", {}, lambda: rig_processes(self.state, "job")
        )
        async with self.in_process() as client:
            await self.ready(client)
        # While it serves: the tunnel goes too, and a new one is opened.
        async with self.in_process() as client:
            tunnels = rig_processes(self.state, "tunnel")
            self.assertTrue(tunnels)
            for pid in tunnels:
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
        self.assertEqual([one.id for one in self.ours()], [machine])

    async def _ended_across_kills(self, machine: str) -> None:
        where = {"name": self.ours_alone().name, "zone": FIRST}
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            plan = self.structure(server.call("plan_destroy", dict(where)))
            self.kill_everything(server, "planned")
        # The end was taken, its answer never came, and the server is gone.
        self.cloud.script.faults = [
            CallFault("TerminateInstances", "", lost="hold", after=True, times=1)
        ]
        arguments = {**where, "token": plan["token"]}
        await self.killed_after(
            "destroying", "destroy_gpu_instance", arguments, lambda: not self.ours()
        )
        self.assertEqual(self.ends()[-1:], [machine])
        status = await self.status()
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        async with self.in_process() as client:
            orphans = await self.answer(client, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
            await self.created(client)  # and all begins anew
        self.assert_nothing_unmarked("at the end")

    async def test_killed_while_a_launch_is_out(self) -> None:
        """EC2 made it, and nobody was told: the next server finds it and can end it."""
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        await self.killed_after("launched", "create_gpu_instance", {"zone": FIRST}, self.ours)
        self.assertEqual(len(self.events("create intended")), 1)
        self.assertEqual(self.events("create settled"), [])
        async with self.in_process() as client:
            await self.refusal(client, "create_gpu_instance", "EXISTS", zone=FAR)
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("starting", True))
            await self.ready(client)
            (machine,) = (await self.answer(client, "list_gpu_instances"))["rentals"]
            await self.destroyed(client, machine)
            await self.assert_all_gone()
        self.assertEqual(len(self.asked()), 1)

    async def test_killed_between_the_intent_and_the_launch(self) -> None:
        """An intent without a machine: it may still come to life, and is settled by looking."""
        runner = self.write_runner("intent.py", IMPATIENT + _KILLED_AT_THE_INTENT)
        with raw_server(runner, self.environment, self.stderr_file) as server:
            call = {"name": "create_gpu_instance", "arguments": {"zone": FIRST}}
            self.assertIsNone(server.receive(server.send("tools/call", call)))
            self.assertEqual(server.process.wait(10), -signal.SIGKILL)
        self.assertEqual(len(self.events("create intended")), 1)
        self.assertEqual(self.asked(), [])
        async with self.in_process() as client:
            with self.patience(settle_s=600.0):
                text = await self.refusal(client, "create_gpu_instance", "UNKNOWN", zone=FAR)
                self.assertIn("may still come to life", text)
                await self.refusal(client, "find_gpu", "UNKNOWN")
            with self.patience(settle_s=0.0):
                await self.created(client)
        (first, second) = self.events("create settled")
        self.assertEqual((first["outcome"], second["outcome"]), ("absent", "created"))
        self.assert_nothing_unmarked("after")


class EndedStoryTests(Case):
    """What ends a machine without this rig's doing is told, with what it still costs."""

    async def test_an_idle_machine_ends_itself_and_nothing_is_left(self) -> None:
        """On it a minute is a second, and one idle minute is all it gets."""
        self.hosts.minute_s = 1.0
        self.addCleanup(setattr, self.hosts, "minute_s", 3.0)
        self.write_settings(**{**self.good_settings(), "IDLE_MINUTES": "1"})
        self.addCleanup(self.write_settings, **self.good_settings())
        async with self.in_process() as client:
            machine = await self.created(client)
            await self.until(lambda: not self.ours(), "an idle machine went on")
            await asyncio.sleep(0.5)  # what was read lately is not read again at once
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))
            notes = " ".join(status["notes"])
            self.assertIn("it shut itself down", notes)
            self.assertIn("Client.InstanceInitiatedShutdown", notes)
            text = await self.refusal(client, "wait_for_vllm_ready", "NOT_FOUND")
            self.assertIn("it shut itself down", text)
            orphans = await self.answer(client, "list_orphans")
            self.assertEqual((orphans["orphans"], orphans["unread"]), ([], []))
            where = {"name": machine["name"], "zone": machine["zone"]}
            await self.refusal(client, "plan_destroy", "NOT_FOUND", **where)
            self.assertEqual(self.ends(), [], "the rig ended it")
            begun = await self.answer(client, "find_gpu", zones=[SECOND])
            self.assertEqual((await self.finished(client, begun["job_id"]))["state"], "done")
        self.assert_nothing_unmarked("had again")

    async def test_a_spot_machine_that_is_taken_back_while_it_serves(self) -> None:
        async with self.in_process() as client:
            machine = await self.created(client, market="spot")
            await self.ready(client)
            await self.answer(client, "query_gemma4", prompt="hello")
            self.cloud.interrupt(machine["provider_id"])
            await self.until(lambda: not self.processes("server"), "it went on serving")
            await asyncio.sleep(0.5)  # what was read lately is not read again at once
            status = await self.answer(client, "get_system_status")
            self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False))
            notes = " ".join(status["notes"])
            self.assertIn("EC2 took the spot machine back", notes)
            self.assertIn("look for it anew", notes)
            self.assertIn("find_gpu", status["next_step"])
            for tool, arguments in (("wait_for_vllm_ready", {}), ("query_gemma4", {"prompt": "x"})):
                text = await self.refusal(client, tool, "NOT_FOUND", **arguments)
                self.assertIn("EC2 took the spot machine back", text, tool)
            begun = await self.answer(client, "find_gpu", zones=[SECOND])
            job = await self.finished(client, begun["job_id"])
            self.assertEqual(job["state"], "done", job)
        self.assert_nothing_unmarked("had again")


class TwoClientsTests(Case):
    """Two servers of the rig at once, each a process of its own: one search, one machine."""

    async def test_both_see_one_search_one_machine_and_its_end(self) -> None:
        async with self.over_stdio() as one, self.over_stdio("legacy") as two:
            begun = await asyncio.gather(
                *(client.call_tool("find_gpu", {}) for client in (one, two) for _ in range(3))
            )
            good = [dict(each.structured_content or {}) for each in begun if not each.is_error]
            bad = [str(each.content[0]) for each in begun if each.is_error]
            self.assertEqual([text for text in bad if "BUSY " not in text], [])
            self.assertEqual(len({each["job_id"] for each in good}), 1, good)
            await self.finished(two, good[0]["job_id"])
            self.assertEqual(len(self.ours()), 1)
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
        (machine,) = (await self.answer(one, "list_gpu_instances"))["rentals"]
        where = {"name": machine["name"], "zone": machine["zone"]}
        token = (await self.answer(one, "plan_destroy", **where))["token"]
        both = await asyncio.gather(
            *(
                client.call_tool("destroy_gpu_instance", {**where, "token": token})
                for client in (one, two)
            )
        )
        self.assertTrue(any(not each.is_error for each in both), both)
        self.assertEqual(self.ends(), [machine["provider_id"]], "ended twice")
        await self.assert_all_gone()
        status = await self.answer(two, "get_system_status")
        self.assertEqual((status["state"], status["cost"]["billed"]), ("stopped", False), status)
        await self.refusal(two, "query_gemma4", "NOT_FOUND", prompt="hello")


class LeftBySearchTests(Case):
    """A search that is ended from outside."""

    async def test_take_down_ends_a_search_first(self) -> None:
        self.cloud.script.faults = [CallFault()]
        async with self.in_process() as client:
            begun = await self.answer(client, "find_gpu", zones=[FIRST])
        with mock.patch("sys.stdout"):
            status = await self.module.take_down(self.assembled(self.server_file.name), True)
        self.assertEqual(status, 0)
        async with self.in_process() as client:
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled", job)
        self.assert_nothing_unmarked("taken down")


if __name__ == "__main__":
    import unittest

    unittest.main()
