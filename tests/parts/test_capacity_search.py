"""The search for a machine as a job: what it asks, what it refuses, and a worker that is killed.

The provider is a fake Google behind the stand-in gcloud; its books are the witness. Workers are
real processes, which end themselves at the point that a test names.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobStore
from forge.parts.planes.capacity_plane import rental_name
from forge.parts.planes.compute_catalogue import V6E_ZONES
from forge.parts.planes.rented_record import MachineBook, MachineRecord
from forge.parts.toolsets.capacity_search import (
    SWEEP_PHASES,
    SearchingCapacityToolset,
    refuse_beside_search,
)
from forge.suites.witness import rig_processes
from tests.imaginary_case import Caller
from tests.rented_rig import RentedRigCase

WEST, EAST, EAST_TOO = "europe-west4-a", "us-east5-a", "us-east5-b"
# Kills its own process at the point that KILLED_AT names, before or after the act itself.
KILLED = """
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.journal import Journal
from forge.parts.knowledge.sweep_plan import SweepBook
from forge.parts.toolsets.rental import Rentals

POINT = os.environ.get("KILLED_AT", "")

def deadly(kind, name, is_it, before=False):
    sound = getattr(kind, name)
    def act(self, *args, **named):
        if before and is_it(args, named):
            os.kill(os.getpid(), signal.SIGKILL)
        result = sound(self, *args, **named)
        if not before and is_it(args, named):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(kind, name, act)

def asked(args, named):
    return POINT == "asked" and named.get("phase") == "waiting"

if POINT:
    deadly(JobProgress, "update", lambda args, named: named.get("phase") == POINT)
    deadly(Journal, "append", lambda args, named: (POINT, args[0]) == ("intent", "create intended"))
    deadly(SweepBook, "save", asked, before=True)
    deadly(SweepBook, "granted", lambda args, named: POINT == "granting", before=True)
    deadly(SweepBook, "granted", lambda args, named: POINT == "granted")
    deadly(Rentals, "record", lambda args, named: POINT == "recording", before=True)
    deadly(Rentals, "record", lambda args, named: POINT == "recorded")
"""


class Told(JobProgress):
    """A worker's pen that keeps every sentence."""

    def __init__(self, store: JobStore, record: JobRecord) -> None:
        super().__init__(store, record)
        self.told: list[str] = []

    def update(self, **changes: Any) -> None:
        super().update(**changes)
        if not self.told or self.told[-1] != self.record.message:
            self.told.append(self.record.message)


class SearchCase(RentedRigCase):
    settings = {"ZONES": f"{WEST},{EAST},{EAST_TOO}", "MARKETS": "flex-start,spot"}
    worker = KILLED

    def toolset(self, rig: AssembledRig) -> SearchingCapacityToolset:
        (found,) = [one for one in rig.toolsets if isinstance(one, SearchingCapacityToolset)]
        return found

    async def searched(self, **given: Any) -> tuple[dict[str, Any], Told]:
        """The result of a worker's part in this process, and what it told."""
        rig = self.assembled()
        toolset = self.toolset(rig)
        arguments = {"zones": [], "wait_s": 600, "budget_usd": 12.0, "hours": 1.0, **given}
        await rig.context.extras["boot_order"](3600)
        pen = Told(rig.context.jobs, rig.context.jobs.new("sweep", arguments, SWEEP_PHASES))
        pen.update(state="running", worker_pid=os.getpid())
        self.pen = pen
        async with asyncio.timeout(60):
            return await toolset.run_search(pen), pen

    async def refused(self, error_class: ErrorClass, **given: Any) -> str:
        with self.assertRaises(RigError) as caught:
            await self.searched(**given)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        return caught.exception.what

    def asked(self) -> list[tuple[str, str]]:
        """Zone and way of renting of each create that reached the provider."""
        found = []
        for one in self.google.sent("POST", "/instances"):
            if not one.body or "importSshPublicKey" in one.path:
                continue
            zone = one.path.split("/zones/")[1].split("/")[0]
            way = str(one.body["scheduling"].get("provisioningModel", "STANDARD"))
            found.append((zone, way.lower().replace("_", "-").replace("standard", "on-demand")))
        return found

    def machines(self) -> list[dict[str, Any]]:
        with self.google.lock:
            return list(self.google.compute.instances.values())

    def record(self) -> MachineRecord | None:
        return MachineBook(self.rig_state).read()


class PlacesTest(SearchCase):
    """What is asked and what is not, and that both are told."""

    async def test_the_zones_in_order_each_in_every_way(self) -> None:
        self.google.script.stockout = {WEST, EAST}
        result, pen = await self.searched()
        self.assertEqual((result["zone"], result["market"]), (EAST_TOO, "flex-start"))
        self.assertEqual(self.asked(), [(zone, "flex-start") for zone in (WEST, EAST, EAST_TOO)])
        self.assertIn("6 places to ask, 0 left out", pen.told)
        self.assertEqual(len(result["asked"]), 3)
        self.assertIn(f"{WEST} (flex-start): stockout", result["asked"][0])
        self.assertEqual(result["asked"][2], f"{EAST_TOO} (flex-start): granted")
        self.assertGreaterEqual(result["waited_s"], 0)

    async def test_the_zones_of_the_call_and_not_of_the_settings(self) -> None:
        result, _ = await self.searched(zones=[EAST_TOO])
        self.assertEqual(result["zone"], EAST_TOO)
        self.assertEqual(self.asked(), [(EAST_TOO, "flex-start")])

    async def test_without_any_in_the_settings_all_that_are_on_offer(self) -> None:
        self.write_settings(ZONES="", MARKETS="on-demand")
        self.google.script.zones = V6E_ZONES
        self.google.script.stockout = set(V6E_ZONES[:1])
        _, pen = await self.searched()
        self.assertEqual(self.asked(), [(zone, "on-demand") for zone in V6E_ZONES[:2]])
        self.assertIn(f"{len(V6E_ZONES)} places to ask, 0 left out", pen.told)

    async def test_a_zone_that_has_no_such_machine_is_not_asked(self) -> None:
        self.google.script.unlisted = {WEST}
        result, pen = await self.searched()
        self.assertEqual(result["zone"], EAST)
        self.assertIn("4 places to ask, 2 left out", pen.told)
        self.assertIn(f"Not asked: {WEST} (flex-start), the catalogue does not list it", pen.told)
        self.assertNotIn(WEST, [zone for zone, _ in self.asked()])

    async def test_a_way_that_is_too_dear_is_not_asked(self) -> None:
        """Spot in the west is 1.037 USD an hour, and everything else is above 1.1."""
        result, pen = await self.searched(budget_usd=1.1)
        self.assertEqual((result["zone"], result["market"]), (WEST, "spot"))
        self.assertEqual(self.asked(), [(WEST, "spot")])
        over = [words for words in pen.told if "over the 1.1 of this search" in words]
        self.assertGreaterEqual(len(over), 5)

    async def test_what_the_settings_forbid_is_told_too(self) -> None:
        self.write_settings(BUDGET_USD="1.1")
        result, pen = await self.searched()
        self.assertEqual(result["market"], "spot")
        self.assertTrue([words for words in pen.told if "over BUDGET_USD=1.1" in words], pen.told)

    async def test_a_place_whose_price_nobody_knows(self) -> None:
        self.write_settings(ZONES="us-central1-b", MARKETS="flex-start")
        said = await self.refused("CAPACITY")
        self.assertIn("no place is worth asking", said)
        self.assertTrue([words for words in self.pen.told if "is not known" in words])
        self.write_settings(ZONES="us-central1-b", MARKETS="flex-start", UNKNOWN_PRICE_OK="1")
        result, _ = await self.searched()
        self.assertEqual(result["zone"], "us-central1-b")

    async def test_a_way_without_quota_is_left_out_and_the_other_asked(self) -> None:
        self.write_settings(MARKETS="spot,on-demand")
        self.google.script.quotas["PREEMPTIBLE-TPU-V6E-per-project-region"] = 0
        result, pen = await self.searched()
        self.assertEqual((result["zone"], result["market"]), (WEST, "on-demand"))
        self.assertEqual(self.asked(), [(WEST, "on-demand")])
        self.assertIn(f"Not asked: {WEST} (spot), no quota is left there", pen.told)

    async def test_a_quota_that_cannot_be_read_says_nothing(self) -> None:
        self.google.script.disabled = {"quotas"}
        result, pen = await self.searched()
        self.assertEqual(result["zone"], WEST)
        self.assertIn("6 places to ask, 0 left out", pen.told)

    async def test_no_more_reads_at_once_than_a_computer_takes(self) -> None:
        """Each is a process of gcloud."""
        toolset = self.toolset(self.assembled())
        plane = type(toolset.plane)
        sound, now, most = plane.quota, 0, 0

        async def counted(*args: Any) -> Any:
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await sound(*args)
            finally:
                now -= 1

        with mock.patch.object(plane, "quota", counted):
            await self.searched()
        self.assertEqual(most, 3)

    async def test_what_goes_out_is_labelled_and_ends(self) -> None:
        before = time.time()
        result, _ = await self.searched(hours=2.0)
        (machine,) = self.machines()
        rig = self.assembled().context
        labels = machine["labels"]
        self.assertEqual(
            (labels["managed-by"], labels["rig"], labels["owner"]),
            ("gemma4-rigs", rig.rig, rig.owner),
        )
        (intent,) = self.journal("create intended")
        self.assertEqual(labels["intent"], intent["intent"])
        self.assertGreaterEqual(int(labels["expires"]), int(before) + 7200)
        self.assertEqual(machine["scheduling"]["maxRunDuration"]["seconds"], "7200")
        self.assertEqual(machine["name"], result["name"])
        stem = rental_name(rig.rig, rig.owner)
        self.assertTrue(result["name"].startswith(f"{stem}-"), "its name is used once only")

    async def test_every_later_tool_acts_where_it_was_found(self) -> None:
        result, _ = await self.searched()
        record = self.record()
        assert record is not None
        self.assertEqual((record.name, record.zone), (result["name"], result["zone"]))
        self.assertEqual(record.provider_id, self.machines()[0]["id"])
        instance = (await self.assembled().context.plane.find()).instance
        assert instance is not None
        self.assertEqual(instance.serve_id, result["name"])


class RefusedTest(SearchCase):
    """What can be known at once is refused at once: no job, no request."""

    async def nothing_begun(self, error_class: str, **arguments: Any) -> str:
        async with self.calling() as caller:
            text = await caller.fails(error_class, "find_tpu_vm", **arguments)
        self.assertEqual(list(self.assembled().context.jobs.all()), [])
        self.assertEqual((self.asked(), rig_processes(self.state)), ([], []))
        return text

    async def test_money_and_hours(self) -> None:
        self.assertIn("BUDGET_USD=12", await self.nothing_begun("DENIED", budget_usd=13))
        self.assertIn("MAX_HOURS=4", await self.nothing_begun("DENIED", hours=4.5))

    async def test_zones_that_are_none(self) -> None:
        for zone in ("", "europe", "--zone", "us-east5-a;id", "../x", "a" * 41):
            self.assertIn("zones", await self.nothing_begun("INVALID", zones=[zone]))
        await self.nothing_begun("INVALID", zones=[WEST] * 31)

    async def test_bounds(self) -> None:
        for arguments in (
            {"wait_minutes": 0},
            {"wait_minutes": 2000},
            {"budget_usd": -1},
            {"hours": 0.1},
            {"wait_s": 51},
        ):
            await self.nothing_begun("INVALID", **arguments)

    async def test_weights_that_nobody_got_to_load(self) -> None:
        self.write_settings(MODEL_NAME="google/gemma-4-E2B-it-qat-w4a16-ct")
        text = await self.nothing_begun("INVALID")
        self.assertIn("per_layer_model_projection", text)
        self.assertIn("get_load_matrix()", text)

    async def test_while_a_machine_exists(self) -> None:
        async with self.calling() as caller:
            created = await caller.ok("create_tpu_vm_instance", zone=EAST)
            text = await caller.fails("EXISTS", "find_tpu_vm")
            self.assertIn(created["machine"]["name"], text)
        self.assertEqual(len(self.machines()), 1)
        record = self.record()
        assert record is not None
        self.assertEqual(record.name, created["machine"]["name"], "the refusal forgot the machine")

    async def test_while_a_place_cannot_be_read(self) -> None:
        self.google.script.unreachable = {EAST}
        await self.nothing_begun("UNKNOWN")

    async def test_a_state_that_cannot_be_written(self) -> None:
        rig = self.assembled()
        rig.context.jobs.folder.parent.mkdir(parents=True, exist_ok=True)
        rig.context.jobs.folder.write_text("a file where the folder should be")
        async with self.calling() as caller:
            await caller.fails("DENIED", "find_tpu_vm")
        self.assertEqual((self.asked(), rig_processes(self.state)), ([], []))


class BesideTest(SearchCase):
    """A search under way: what may happen beside it and what may not."""

    async def begun(self, caller: Caller, **arguments: Any) -> str:
        """A search whose request waits in a queue; its job."""
        self.google.script.never = {WEST}
        job = str((await caller.ok("find_tpu_vm", zones=[WEST], **arguments))["job_id"])
        await self.until(self.machines, "nothing was asked for")
        return job

    async def test_its_request_is_not_planned_away_under_it(self) -> None:
        """It would take that for a stockout and ask in the next place."""
        async with self.calling() as caller, self.calling() as other:
            job = await self.begun(caller)
            outcome = await other.ok("find_tpu_vm", zones=[EAST], hours=2, wait_s=0)
            self.assertEqual((outcome["job_id"], outcome["state"]), (job, "running"))
            self.assertIn("cancel_job ends the search", outcome["next_step"])
            (machine,) = self.machines()
            text = await caller.fails("BUSY", "plan_destroy", name=machine["name"], zone=WEST)
            self.assertIn("another one in its place", text)
            self.assertIn(f"cancel_job(job_id='{job}')", text)
            await caller.ok("cancel_job", job_id=job)
            self.assertEqual(self.machines(), [])
            await caller.fails("NOT_FOUND", "plan_destroy", name=machine["name"], zone=WEST)

    def test_nothing_is_refused_beside_none(self) -> None:
        refuse_beside_search(self.assembled().context, "nothing happens")


class KilledTest(SearchCase):
    """The worker killed at each point of the job: nothing is unlabelled, nothing is forgotten."""

    async def killed(self, point: str) -> dict[str, Any]:
        """A search whose worker ends there; what it is called afterwards."""
        async with self.calling() as caller:
            with mock.patch.dict(os.environ, KILLED_AT=point):
                outcome = await caller.ok("find_tpu_vm", zones=[WEST], wait_s=40)
        self.assertEqual(outcome["state"], "lost", outcome)
        self.assertEqual(outcome["next_step"], "find_tpu_vm()")
        self.assertEqual(rig_processes(self.state), [])
        return outcome

    def assert_marked(self, number: int) -> None:
        self.assertEqual(len(self.machines()), number)
        for machine in self.machines():
            self.assertEqual(machine["labels"]["rig"], self.rig.name)
            self.assertGreater(int(machine["labels"]["expires"]), time.time())
            self.assertEqual(machine["scheduling"]["instanceTerminationAction"], "DELETE")

    async def searched_anew(self) -> dict[str, Any]:
        await asyncio.sleep(self.settle_s)  # an intent without a machine is settled by then
        async with self.calling() as caller:
            return await caller.ok("find_tpu_vm", zones=[WEST], wait_s=50)

    async def test_before_anything_went_out_the_next_search_begins_anew(self) -> None:
        await self.killed("intent")
        self.assert_marked(0)
        self.assertEqual(self.asked(), [])
        self.assertEqual(len(self.journal("create intended")), 1)
        found = await self.searched_anew()
        self.assertEqual(found["state"], "done", found)
        self.assert_marked(1)
        self.assertEqual(self.journal("create settled")[0]["outcome"], "absent")

    async def assert_told(self, point: str) -> None:
        """There is one machine, and every tool of the next server knows it."""
        self.assert_marked(1)
        name = self.machines()[0]["name"]
        record = self.record()
        assert record is not None, point
        self.assertEqual(record.name, name)
        async with self.calling() as caller:
            text = await caller.fails("EXISTS", "find_tpu_vm")
            self.assertIn(name, text)
            status = await caller.ok("get_system_status")
            self.assertEqual(status["state"], "starting", status)
            self.assertTrue(status["cost"]["billed"], status)
            plan = await caller.ok("plan_destroy", name=name, zone=WEST)
            where = {"name": name, "zone": WEST, "token": plan["token"]}
            await caller.ok("destroy_tpu_vm_instance", **where)
            status = await caller.ok("get_system_status")
            self.assertEqual((status["state"], status["notes"]), ("stopped", []))
        self.assert_marked(0)
        self.assertIsNone(self.record())

    async def test_asked_for_and_not_yet_believed(self) -> None:
        await self.killed("asked")
        await self.assert_told("asked")

    async def test_an_older_machines_record_does_not_hide_the_new_one(self) -> None:
        """The old one was taken back and is still on record; the new one only the search noted."""
        async with self.calling() as caller:
            old = (await caller.ok("create_tpu_vm_instance", zone=EAST, market="spot"))["machine"]
        self.google.preempt(old["name"])
        await self.until(lambda: not self.machines(), "it was not taken back")
        await self.killed("recording")
        await self.assert_told("recording")

    async def test_an_older_search_does_not_come_back(self) -> None:
        """What it found is gone; of that nothing is told once another machine was destroyed."""
        found, _ = await self.searched(zones=[WEST])
        with self.google.lock:
            self.google.compute.instances.clear()
            self.google.compute.disks.clear()
        async with self.calling() as caller:
            machine = (await caller.ok("create_tpu_vm_instance", zone=EAST))["machine"]
            where = {"name": machine["name"], "zone": EAST}
            plan = await caller.ok("plan_destroy", **where)
            await caller.ok("destroy_tpu_vm_instance", **where, token=plan["token"])
            status = await caller.ok("get_system_status")
            self.assertNotIn(found["name"], json.dumps(status["notes"]))
        self.assertIsNone(self.record())

    async def test_a_damaged_record_is_over_when_a_search_has_seen_that_there_is_none(self) -> None:
        self.rig_state.mkdir(parents=True)
        (self.rig_state / "machine.json").write_text("{half")
        async with self.calling() as caller:
            status = await caller.ok("get_system_status")
            self.assertEqual(status["state"], "unknown", status)
            self.assertIn("damaged", str(status["notes"]))
            found = await caller.ok("find_tpu_vm", zones=[WEST], wait_s=50)
            self.assertEqual((found["state"], found["zone"]), ("done", WEST))
            self.assertIn("it is billed", found["summary"])
            self.assertEqual(found["next_step"], "wait_for_vllm_ready(wait_s=50)")
            status = await caller.ok("get_system_status")
            self.assertEqual(status["state"], "starting", status)


class CommandTest(SearchCase):
    def test_a_worker_writes_nothing_but_its_job_to_the_output(self) -> None:
        """The log of a worker is for people; what it finds goes into the record."""
        with contextlib.redirect_stderr(io.StringIO()):
            rig = self.assembled()
        asyncio.run(rig.context.extras["boot_order"](3600))
        arguments = {"zones": [WEST], "wait_s": 60, "budget_usd": 12.0, "hours": 1.0}
        job = rig.context.jobs.new("sweep", arguments, SWEEP_PHASES)
        rig.context.jobs.start_worker(job, Path(rig.context.server_file))
        deadline = time.monotonic() + 40
        while not rig.context.jobs.read(job.id).finished and time.monotonic() < deadline:
            time.sleep(0.1)
        ended = rig.context.jobs.read(job.id)
        self.assertEqual((ended.state, ended.result.get("zone")), ("done", WEST), ended)
        self.assertEqual(set(ended.phase_seconds), set(SWEEP_PHASES))
        self.assertEqual(rig.context.jobs.log(job.id).read_text(), "")


if __name__ == "__main__":
    unittest.main()
