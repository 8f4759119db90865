"""Renting and giving back on the imaginary rig: every refusal, and every fault with its trace.

The witness is the provider's own book, never what the tool says: what is rented, and which
mutating calls arrived. Letters in parentheses are rows of the fault matrix.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import unittest
from dataclasses import replace
from typing import Any

from mcp.types import InputRequiredResult

from forge.parts.assembly.rig import AssembledRig
from forge.parts.planes.capacity_plane import (
    expiry_of,
    is_ours,
    rental_labels,
    rental_name,
)
from forge.parts.toolsets.planning import PlanningToolset
from tests.imaginary.rig import RIG
from tests.imaginary_case import (
    MODES,
    OTHER_ZONE,
    UNPRICED_ZONE,
    ZONE,
    ImaginaryCase,
    bundled_module,
    says,
)
from tests.rig_programs import write_programs

# Loads the rig, then dies at the n-th append to the journal, before or after the line is written.
KILLED = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("server", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["server"] = module
spec.loader.exec_module(module)
append, left = module.Journal.append, [int(sys.argv[2])]
def deadly(self, event, **fields):
    left[0] -= 1
    if left[0] == 0 and sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, event, **fields)
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
module.Journal.append = deadly
sys.exit(module.run_rig(module.RIG, module.Path(sys.argv[1]), sys.argv[4:]))
"""


class OwnershipTest(unittest.TestCase):
    def test_names_are_deterministic_and_within_every_provider(self) -> None:
        for rig in ("a", "tpu-vllm-v5e1-2b-q4_0", "x" * 80, "a" * 55 + "-" * 20):
            with self.subTest(rig=rig):
                name = rental_name(rig, "0123456789abcdef")
                self.assertRegex(name, r"\A[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?\Z")
                self.assertEqual(name, rental_name(rig, "0123456789abcdef"))
                self.assertNotEqual(name, rental_name(rig, "fedcba9876543210"))

    def test_rigs_of_one_slug_do_not_share_a_name(self) -> None:
        self.assertNotEqual(rental_name("a-q4_0", "o"), rental_name("a-q4-0", "o"))

    def test_ours_is_exact(self) -> None:
        labels = rental_labels("tpu-a", "0123", "create-1", 1_800_000_000)
        self.assertTrue(is_ours(labels, "tpu-a", "0123"))
        self.assertEqual(expiry_of(labels), 1_800_000_000)
        for key, value in (
            ("rig", "tpu-a-q4-0"),
            ("rig", "tpu"),
            ("rig", "tpu-a "),
            ("rig", "TPU-A"),
            ("owner", "0124"),
            ("owner", ""),
            ("managed-by", "somebody"),
        ):
            with self.subTest(key=key, value=value):
                self.assertFalse(is_ours({**labels, key: value}, "tpu-a", "0123"))
        for key in ("rig", "owner", "managed-by"):
            rest = {k: v for k, v in labels.items() if k != key}
            self.assertFalse(is_ours(rest, "tpu-a", "0123"), key)

    def test_without_an_owner_nothing_is_ours(self) -> None:
        self.assertFalse(is_ours(rental_labels("tpu-a", "", "i", 1), "tpu-a", ""))

    def test_an_unreadable_expiry_is_none(self) -> None:
        for text in ("", "soon", "-1", "1e9", "١٢٣", "9" * 400):
            self.assertIsNone(expiry_of({"expires": text}), text)


class FindTest(ImaginaryCase):
    async def test_it_lists_offers_and_creates_nothing(self) -> None:
        async with self.calling() as caller:
            found = await caller.ok("find_tpu")
        self.assertEqual([o["zone"] for o in found["offers"]], [ZONE, OTHER_ZONE, UNPRICED_ZONE])
        self.assertEqual(found["offers"][0]["price_per_hour_usd"], 1.2)
        self.assertIsNone(found["offers"][2]["price_per_hour_usd"])
        self.assertEqual(self.world.look()["calls"], [])

    async def test_a_stockout_is_remembered_for_half_an_hour(self) -> None:
        self.world.set_zone(ZONE, stock=0)
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            text = await caller.fails("CAPACITY", "create_tpu", zone=ZONE)
            self.assertIn("find_tpu()", text)
            found = await caller.ok("find_tpu")
            self.assertEqual(found["offers"][-1]["zone"], ZONE)
            self.assertEqual(found["offers"][-1]["available"], "no")
            self.assertIn("CAPACITY", found["offers"][-1]["how_known"])
            self.assertIn(OTHER_ZONE, found["next_step"])
            set_clock(rig, 1801)
            self.assertEqual((await caller.ok("find_tpu"))["offers"][0]["zone"], ZONE)


class PlannedCreateTest(ImaginaryCase):
    """A rig that plans refuses before it pays."""

    settings = {**ImaginaryCase.settings, "MODEL_NAME": "google/gemma-4-31B-it"}

    def planning(self, name: str) -> AssembledRig:
        write_programs(self.rig_folder)
        toolsets = (*RIG.toolsets, PlanningToolset)
        rig = replace(RIG, name=name, toolsets=toolsets)
        return AssembledRig(rig, self.rig_folder / "server.py")

    async def test_what_arithmetic_refuses_is_never_rented(self) -> None:
        async with self.calling(rig=self.planning("tpu-vllm-v5e1-31b")) as caller:
            for override in (False, True):
                text = await caller.fails("CAPACITY", "create_tpu", zone=ZONE, override=override)
                self.assertIn("31B", text)
                self.assertIn("GB", text)
        self.assertEqual(self.world.calls("create"), [])

    async def test_what_fits_is_rented(self) -> None:
        async with self.calling(rig=self.planning("tpu-vllm-v6e8-31b")) as caller:
            await caller.ok("create_tpu", zone=ZONE)
        self.assertEqual(len(self.world.calls("create")), 1)


class CreateTest(ImaginaryCase):
    async def test_what_a_create_sends_and_says(self) -> None:
        async with self.calling() as caller:
            done = await caller.ok("create_tpu", zone=ZONE, hours=2)
        [sent] = self.world.calls("create")
        owner = self.assembled().context.owner
        self.assertTrue(is_ours(sent["labels"], "tpu-vllm-imaginary-2b", owner))
        self.assertEqual(sent["life_s"], 7200)
        self.assertEqual(sent["labels"]["intent"], done["intent"])
        self.assertEqual(sent["name"], rental_name("tpu-vllm-imaginary-2b", owner))
        self.assertEqual(done["estimate_usd"], 2.4)
        self.assertIn("imaginary-project", done["summary"])
        self.assertIn(ZONE, done["summary"])
        events = [(e["event"], e.get("intent")) for e in self.journal]
        wanted = [("create intended", done["intent"]), ("create settled", done["intent"])]
        self.assertEqual([event for event in events if event[1]], wanted)

    async def test_a_second_one_is_refused_in_any_zone(self) -> None:  # D09, D11
        async with self.calling() as caller:
            machine = await self.created(caller)
            for zone in (ZONE, OTHER_ZONE):
                text = await caller.fails("EXISTS", "create_tpu", zone=zone)
                self.assertIn(machine["name"], text)
        self.assertEqual(len(self.world.calls("create")), 1)

    async def test_money_is_refused_before_the_call(self) -> None:  # A28, D53
        async with self.calling() as caller:
            text = await caller.fails("DENIED", "create_tpu", zone=ZONE, hours=4.5)
            self.assertIn("5.4 USD", text)
            self.assertIn("BUDGET_USD=5", text)
            self.assertIn(
                "MAX_HOURS", await caller.fails("DENIED", "create_tpu", zone=ZONE, hours=9)
            )
            self.assertIn("price", await caller.fails("DENIED", "create_tpu", zone=UNPRICED_ZONE))
        self.assertEqual(self.world.look()["calls"], [])

    async def test_the_budget_is_met_exactly(self) -> None:
        folder = self.new_rig_folder("exact", BUDGET_USD="2.4")
        async with self.calling(rig=self.assembled(folder)) as caller:
            await caller.fails("DENIED", "create_tpu", zone=ZONE, hours=2.01)
            await caller.ok("create_tpu", zone=ZONE, hours=2)

    async def test_an_unknown_price_takes_a_setting(self) -> None:
        folder = self.new_rig_folder("bold", UNKNOWN_PRICE_OK="1")
        async with self.calling(rig=self.assembled(folder)) as caller:
            done = await caller.ok("create_tpu", zone=UNPRICED_ZONE)
            self.assertIsNone(done["estimate_usd"])
            self.assertIsNone(done["machine"]["cost_so_far_usd"])

    async def test_a_provider_without_a_hard_stop_takes_a_setting(self) -> None:
        with self.world.changing() as world:
            world["hard_stop"] = False
        async with self.calling() as caller:
            text = await caller.fails("DENIED", "create_tpu", zone=ZONE)
            self.assertIn("NO_HARD_STOP_OK", text)
        self.assertEqual(self.world.look()["calls"], [])
        folder = self.new_rig_folder("bold", NO_HARD_STOP_OK="1")
        async with self.calling(rig=self.assembled(folder)) as caller:
            self.assertEqual((await caller.ok("create_tpu", zone=ZONE))["hard_stop"], "")

    async def test_a_missing_budget_stops_everything(self) -> None:
        folder = self.new_rig_folder("poor")
        text = (folder / "tpu.env").read_text()
        (folder / "tpu.env").write_text(text.replace("BUDGET_USD=5\n", ""))
        async with self.calling(rig=self.assembled(folder)) as caller:
            self.assertIn("BUDGET_USD", await caller.fails("INVALID", "create_tpu", zone=ZONE))
        self.assertEqual(self.world.look()["calls"], [])

    async def test_quota_and_zone_are_looked_at_before_the_call(self) -> None:  # D04
        self.world.set_zone(ZONE, quota=[1, 1])
        async with self.calling() as caller:
            self.assertIn("region", await caller.fails("QUOTA", "create_tpu", zone=ZONE))
            await caller.fails("NOT_FOUND", "create_tpu", zone="us-east9-z")
            for zone in ("", "--help", "us-east5-b\n", "projects/o/zones/z", "A" * 41):
                self.assertIn("zone", await caller.fails("INVALID", "create_tpu", zone=zone))
            await caller.fails("INVALID", "create_tpu", zone=ZONE, zonee=ZONE)
            await caller.fails("INVALID", "create_tpu", zone=ZONE, hours=0)
        self.assertEqual(self.world.look()["calls"], [])

    async def test_refusals_leave_nothing_and_do_not_block(self) -> None:  # D02, D03
        for fault, error_class in (("denied", "DENIED"), ("expired", "AUTH")):
            with self.subTest(fault=fault):
                self.world.set_fault("create", fault)
                async with self.calling() as caller:
                    await caller.fails(error_class, "create_tpu", zone=ZONE)
        self.assertEqual(self.world.machines(), [])
        self.world.set_fault("create", "")
        async with self.calling() as caller:
            await self.created(caller)

    async def test_a_create_that_timed_out_or_failed_after_creating_is_read_back(self) -> None:
        for fault in ("timeout after", "error after", "refused after"):  # D05, D06
            with self.subTest(fault=fault):
                self.world.set_fault("create", fault)
                async with self.calling() as caller:
                    done = await caller.ok("create_tpu", zone=ZONE)
                    self.assertIn(fault, done["note"])
                    [machine] = self.world.machines()
                    self.assertEqual(done["machine"]["provider_id"], machine["provider_id"])
                    await caller.fails("EXISTS", "create_tpu", zone=OTHER_ZONE)
                self.world.delete(machine["provider_id"])

    async def test_a_lost_create_is_unknown_and_stops_others_until_it_is_settled(self) -> None:
        self.world.set_fault("create", "timeout before")
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            self.assertIn("intent create-", await caller.fails("UNKNOWN", "create_tpu", zone=ZONE))
            self.world.set_fault("create", "")
            await caller.fails("UNKNOWN", "create_tpu", zone=OTHER_ZONE)
            self.assertEqual(len(self.world.calls("create")), 1, "no twin in another zone")
            set_clock(rig, 3.5)  # settle_s of the imaginary plane is 3 s
            await caller.ok("create_tpu", zone=OTHER_ZONE)
        self.assertEqual(len(self.world.machines()), 1)

    async def test_a_machine_that_shows_late_is_unknown_first_and_adopted_later(self) -> None:
        self.world.set_fault("create", "timeout after")  # D07
        self.world.set_fault("show_after_s", 2.5)
        async with self.calling() as caller:
            await caller.fails("UNKNOWN", "create_tpu", zone=ZONE)
            await caller.fails("UNKNOWN", "create_tpu", zone=OTHER_ZONE)
            self.world.set_fault("show_after_s", 0)
            await caller.fails("EXISTS", "create_tpu", zone=OTHER_ZONE)
            [row] = (await caller.ok("list_tpus"))["rentals"]
            self.assertEqual(row["provider_id"], self.world.machines()[0]["provider_id"])
        settled = [e for e in self.journal if e["event"] == "create settled"]
        self.assertEqual([e["outcome"] for e in settled], ["created"])

    async def test_a_place_that_cannot_be_read_is_no_empty_place(self) -> None:  # D15
        self.world.set_zone(OTHER_ZONE, readable=False)
        async with self.calling() as caller:
            self.assertIn(OTHER_ZONE, await caller.fails("UNKNOWN", "create_tpu", zone=ZONE))
            self.assertEqual((await caller.ok("list_tpus"))["unread"], [OTHER_ZONE])
        self.assertEqual(self.world.look()["calls"], [])

    async def test_a_namesake_of_somebody_else_is_left_alone(self) -> None:  # D12
        name = self.assembled().toolsets[0].rentals.name
        self.world.add(name, ZONE, {"rig": "tpu-vllm-imaginary-2b", "owner": "another"})
        async with self.calling() as caller:
            self.assertIn("somebody else", await caller.fails("DENIED", "create_tpu", zone=ZONE))
        self.assertEqual(self.world.look()["calls"], [])

    async def test_without_a_journal_there_is_no_create(self) -> None:  # D38
        state = self.assembled().context.paths.state
        state.mkdir(parents=True, exist_ok=True)
        (state / "journal.jsonl").mkdir()
        async with self.calling() as caller:
            await caller.fails("DENIED", "create_tpu", zone=ZONE)
        self.assertEqual(self.world.look()["calls"], [])

    async def test_a_cancelled_create_is_settled_by_the_next(self) -> None:  # D34
        self.world.set_fault("create", "timeout after")
        self.world.set_fault("show_after_s", 60)
        async with self.calling() as caller:
            call = asyncio.create_task(caller.client.call_tool("create_tpu", {"zone": ZONE}))
            while not self.world.calls("create"):
                await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            self.world.set_fault("show_after_s", 0)
            await caller.fails("EXISTS", "create_tpu", zone=ZONE)
        self.assertEqual(len(self.world.machines()), 1)

    async def test_killed_at_any_point_the_next_server_tells_the_truth(self) -> None:  # A31, D37
        # First append: the intent. Second: the end of it, when the machine exists.
        for number, when, machines in ((1, "before", 0), (1, "after", 0), (2, "before", 1)):
            with self.subTest(append=number, when=when):
                server = str(self.rig_folder / "server.py")
                argv = [sys.executable, "-c", KILLED, server, str(number), when]
                argv += ["call", "create_tpu", f"zone={ZONE}"]
                done = await asyncio.to_thread(
                    subprocess.run, argv, env=dict(os.environ), capture_output=True, timeout=60
                )
                self.assertEqual(done.returncode, -9, done.stderr)
                self.assertEqual(len(self.world.machines()), machines)
                rig = self.assembled()
                async with self.calling(rig=rig) as caller:
                    self.assertEqual(len((await caller.ok("list_tpus"))["rentals"]), machines)
                    if machines:
                        await caller.fails("EXISTS", "create_tpu", zone=OTHER_ZONE)
                    elif when == "after":
                        await caller.fails("UNKNOWN", "create_tpu", zone=OTHER_ZONE)
                    set_clock(rig, 10)
                    if not machines:
                        await self.created(caller)
                    machine = self.world.machines()[0]
                    place = {"name": machine["name"], "zone": machine["zone"]}
                    plan = await caller.ok("plan_destroy", **place)
                    await caller.ok("destroy_tpu", **place, token=plan["token"])


class LookTest(ImaginaryCase):
    async def test_others_are_counted_and_not_shown(self) -> None:  # A21, A26, D55
        owner = self.assembled().context.owner
        ours = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-imaginary-2b", "owner": owner}
        for name, labels in (
            ("payroll", {}),
            ("sibling", {**ours, "rig": "tpu-vllm-imaginary-2b-q4-0"}),
            ("parent", {**ours, "rig": "tpu-vllm-imaginary"}),
            ("other-owner", {**ours, "owner": "0" * 16}),
            ("blank", {**ours, "rig": "tpu-vllm-imaginary-2b "}),
        ):
            self.world.add(name, ZONE, labels)
        async with self.calling() as caller:
            listed = await caller.client.call_tool("list_tpus", {})
            assert listed.structured_content is not None
            self.assertEqual(listed.structured_content["rentals"], [])
            self.assertEqual(listed.structured_content["others"], 5)
            self.assertNotIn("payroll", str(listed))
            for name in ("payroll", "sibling", "parent", "other-owner", "blank"):
                with self.subTest(name=name):
                    place = {"name": name, "zone": ZONE}
                    await caller.fails("DENIED", "describe_tpu", **place)
                    await caller.fails("DENIED", "plan_destroy", **place)
        self.assertEqual(self.world.look()["calls"], [])

    async def test_age_and_cost(self) -> None:
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            machine = await self.created(caller)
            set_clock(rig, 2.5 * 3600)
            row = (await caller.ok("describe_tpu", name=machine["name"], zone=ZONE))["rental"]
        self.assertAlmostEqual(row["age_hours"], 2.5, places=2)
        self.assertAlmostEqual(row["cost_so_far_usd"], 3.0, places=2)

    async def test_orphans(self) -> None:
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            machine = await self.created(caller)
            self.assertEqual((await caller.ok("list_orphans"))["orphans"], [])
            labels = self.world.machines()[0]["labels"]
            self.world.add("old-disk", OTHER_ZONE, labels, kind="disk")
            self.world.add("stray", ZONE, {**labels, "intent": "create-elsewhere"})
            self.world.add("bare", ZONE, {k: v for k, v in labels.items() if k != "expires"})
            self.world.add("halted", ZONE, labels, state="stopped")
            self.world.add("not-ours", ZONE, {})
            found = {o["name"]: o["reasons"] for o in (await caller.ok("list_orphans"))["orphans"]}
            self.assertEqual(set(found), {"old-disk", "stray", "bare", "halted"})
            self.assertIn("machine is gone", found["old-disk"][0])
            self.assertIn("journal", found["stray"][0])
            self.assertIn("expiry", found["bare"][0])
            self.assertIn("stopped", found["halted"][0])
            set_clock(rig, 3601)
            found = {o["name"]: o["reasons"] for o in (await caller.ok("list_orphans"))["orphans"]}
            self.assertIn("time was over", found[machine["name"]][0])
        self.assertEqual(self.world.calls("delete"), [])

    async def test_reaping_takes_exactly_the_listed_ones(self) -> None:
        async with self.calling() as caller:
            machine = await self.created(caller)
            labels = self.world.machines()[0]["labels"]
            self.world.add("old-disk", OTHER_ZONE, labels, kind="disk")
            self.world.add("halted", ZONE, labels, state="stopped")
            self.world.add("not-ours", ZONE, {})
            listing = await caller.ok("list_orphans")
            outcome = await caller.ok("reap_orphans", token=listing["token"])
            self.assertEqual({r["name"] for r in outcome["destroyed"]}, {"old-disk", "halted"})
            self.assertEqual(outcome["left"], [])
            names = {one["name"] for one in self.world.machines()}
            self.assertEqual(names, {machine["name"], "not-ours"})
            await caller.fails("DENIED", "reap_orphans", token=listing["token"])  # single use
            self.assertEqual((await caller.ok("list_orphans"))["token"], "")

    async def test_an_orphan_that_came_since_is_not_reaped(self) -> None:
        async with self.calling() as caller:
            await self.created(caller)
            labels = self.world.machines()[0]["labels"]
            self.world.add("halted", ZONE, labels, state="stopped")
            token = (await caller.ok("list_orphans"))["token"]
            self.world.add("another", ZONE, labels, state="stopped")
            await caller.fails("DENIED", "reap_orphans", token=token)
            self.assertEqual(self.world.calls("delete"), [])
            await caller.fails("DENIED", "reap_orphans", token=token)  # void by now

    async def test_a_token_for_another_act_reaps_nothing(self) -> None:
        async with self.calling() as caller:
            machine = await self.created(caller)
            place = {"name": machine["name"], "zone": ZONE}
            plan = await caller.ok("plan_destroy", **place)
            await caller.fails("DENIED", "reap_orphans", token=plan["token"])
            self.assertEqual(self.world.calls("delete"), [])


class DestroyTest(ImaginaryCase):
    async def test_two_steps_in_both_protocols(self) -> None:
        for mode in MODES:
            with self.subTest(mode=mode):
                async with self.calling(mode) as caller:
                    machine = await self.created(caller)
                    place = {"name": machine["name"], "zone": ZONE}
                    plan = await caller.ok("plan_destroy", **place)
                    self.assertEqual(plan["goes"]["provider_id"], machine["provider_id"])
                    self.assertEqual(plan["token_life_s"], 300)
                    self.assertEqual(len(self.world.machines()), 1, "a plan destroys nothing")
                    done = await caller.ok("destroy_tpu", **place, token=plan["token"])
                    self.assertTrue(done["gone"])
                self.assertEqual(self.world.machines(), [])

    async def test_no_token_no_destruction(self) -> None:  # A24
        async with self.calling() as caller:
            machine = await self.created(caller)
            place = {"name": machine["name"], "zone": ZONE}
            await caller.fails("INVALID", "destroy_tpu", **place)
            for token in ("", "yes", "0" * 31, machine["name"], "$(id)", "a" * 65):
                text = await caller.fails("INVALID", "destroy_tpu", **place, token=token)
                self.assertIn("token", text)
            await caller.fails("DENIED", "destroy_tpu", **place, token="0" * 32)
        self.untouched()

    async def test_a_token_of_another_resource(self) -> None:
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            labels = self.world.machines()[0]["labels"]
            self.world.add("second", OTHER_ZONE, labels)
            other = {"name": "second", "zone": OTHER_ZONE}
            await caller.fails("DENIED", "destroy_tpu", **{**arguments, **other})
            self.assertEqual(len(self.world.machines()), 2)
            self.untouched()
            await caller.ok("destroy_tpu", **arguments)
        self.assertEqual([m["name"] for m in self.world.machines()], ["second"])

    async def test_a_used_token(self) -> None:
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            await caller.ok("destroy_tpu", **arguments)
            await self.created(caller)
            await caller.fails("DENIED", "destroy_tpu", **arguments)
        self.assertEqual(len(self.world.calls("delete")), 1)
        self.assertEqual(len(self.world.machines()), 1)

    async def test_an_old_token(self) -> None:
        rig = self.assembled()
        async with self.calling(rig=rig) as caller:
            arguments = await self.planned(caller)
            set_clock(rig, 301)
            self.assertIn("5 minutes", await caller.fails("DENIED", "destroy_tpu", **arguments))
        self.untouched()

    async def test_a_namesake_that_was_created_since(self) -> None:  # D46
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            self.world.recreate(arguments["name"], ZONE)
            self.assertIn("anew", await caller.fails("DENIED", "destroy_tpu", **arguments))
            self.assertIn("void", await caller.fails("DENIED", "destroy_tpu", **arguments))
        self.untouched()

    async def test_labels_that_changed_hands_since(self) -> None:
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            with self.world.changing() as world:
                world["rentals"][0]["labels"]["owner"] = "0" * 16
            await caller.fails("DENIED", "destroy_tpu", **arguments)
        self.untouched()

    async def test_what_is_gone_already_is_gone_in_all_places(self) -> None:  # D43
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            self.world.delete(self.world.machines()[0]["provider_id"])
            self.world.set_zone(OTHER_ZONE, readable=False)
            await caller.fails("UNKNOWN", "destroy_tpu", **arguments)
            self.world.set_zone(OTHER_ZONE, readable=True)
            done = await caller.ok("destroy_tpu", **arguments)
            self.assertIsNone(done["destroyed"])
            await caller.fails("DENIED", "destroy_tpu", **arguments)

    async def test_accepted_but_still_there_is_not_called_gone(self) -> None:  # D44, D45, A50
        for fault in ("kept", "stopping"):
            with self.subTest(fault=fault):
                async with self.calling() as caller:
                    arguments = await self.planned(caller)
                    self.world.set_fault("delete", fault)
                    if fault == "kept":
                        text = await caller.fails("UNKNOWN", "destroy_tpu", **arguments)
                        self.assertIn("costing money", text)
                    else:  # a provider takes its time, and says that it is at it
                        outcome = await caller.ok("destroy_tpu", **arguments)
                        self.assertFalse(outcome["gone"])
                        self.assertIn("until it is gone it may cost money", outcome["summary"])
                        self.assertIn("describe_tpu", outcome["next_step"])
                    await caller.fails("DENIED", "destroy_tpu", **arguments)
                    self.world.set_fault("delete", "")
                    place = {k: arguments[k] for k in ("name", "zone")}
                    plan = await caller.ok("plan_destroy", **place)
                    await caller.ok("destroy_tpu", **place, token=plan["token"])
                self.assertEqual(self.world.machines(), [])

    async def test_a_deletion_that_timed_out_is_read_back(self) -> None:
        self.world.set_fault("delete", "timeout after")
        async with self.calling() as caller:
            done = await caller.ok("destroy_tpu", **await self.planned(caller))
            self.assertTrue(done["gone"])
        self.assertEqual(self.world.machines(), [])

    async def test_a_refused_deletion_is_said_and_uses_the_token_up(self) -> None:
        self.world.set_fault("delete", "denied")
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            await caller.fails("DENIED", "destroy_tpu", **arguments)
            self.world.set_fault("delete", "")
            self.assertIn("used", await caller.fails("DENIED", "destroy_tpu", **arguments))
        self.assertEqual(len(self.world.machines()), 1)

    async def test_of_ten_destroys_at_once_one_destroys(self) -> None:
        async with self.calling() as caller:
            arguments = await self.planned(caller)
            calls = [caller.client.call_tool("destroy_tpu", arguments) for _ in range(10)]
            results = await asyncio.gather(*calls)
        self.assertEqual(sum(not result.is_error for result in results), 1)
        self.assertEqual(len(self.world.calls("delete")), 1)

    def untouched(self) -> None:
        self.assertEqual(self.world.calls("delete"), [])
        self.assertGreater(len(self.world.machines()), 0)


class ConsentTest(ImaginaryCase):
    """A client that can ask its user does, in both protocols; the token alone is not enough."""

    async def test_the_user_agrees(self) -> None:
        for mode in MODES:
            with self.subTest(mode=mode):
                asked: list[str] = []

                def agrees(question: str, asked: list[str] = asked) -> Any:
                    asked.append(question)
                    return says("accept", confirm=True)(question)

                async with self.calling(mode, agrees) as caller:
                    arguments = await self.planned(caller)
                    machine = self.world.machines()[0]
                    await caller.ok("destroy_tpu", **arguments)
                self.assertEqual(len(asked), 1, "asked once")
                for part in (machine["name"], ZONE, machine["provider_id"], "imaginary-project"):
                    self.assertIn(part, asked[0])
                self.assertEqual(self.world.machines(), [])

    async def test_every_other_answer_destroys_nothing_and_ends_the_token(self) -> None:
        answers = {
            "declined": says("decline"),
            "dismissed": says("cancel"),
            "accepted without a tick": says("accept", confirm=False),
            "accepted with rubbish": says("accept", confirm="perhaps"),
            "accepted with nothing": says("accept"),
        }
        for mode in MODES:
            for what, answer in answers.items():
                with self.subTest(mode=mode, what=what):
                    async with self.calling(mode, answer) as caller:
                        arguments = await self.planned(caller)
                        await caller.fails("CANCELLED", "destroy_tpu", **arguments)
                        self.assertEqual(self.world.calls("delete"), [])
                    async with self.calling(mode) as caller:
                        await caller.fails("DENIED", "destroy_tpu", **arguments)
                    self.world.delete(self.world.machines()[0]["provider_id"])
                    with self.world.changing() as world:
                        world["calls"] = []

    async def test_nobody_is_asked_about_a_worthless_token(self) -> None:
        def must_not(question: str) -> Any:
            raise AssertionError(f"asked: {question}")

        for mode in MODES:
            with self.subTest(mode=mode):
                async with self.calling(mode, must_not) as caller:
                    if not self.world.machines():
                        await self.created(caller)
                    name = self.world.machines()[0]["name"]
                    arguments = {"name": name, "zone": ZONE, "token": "0" * 32}
                    await caller.fails("DENIED", "destroy_tpu", **arguments)

    async def test_what_is_replaced_while_the_user_thinks_is_not_touched(self) -> None:
        for mode in MODES:
            with self.subTest(mode=mode):

                def slow(question: str) -> Any:
                    machine = self.world.machines()[0]
                    self.world.recreate(machine["name"], machine["zone"])
                    return says("accept", confirm=True)(question)

                async with self.calling(mode, slow) as caller:
                    arguments = await self.planned(caller)
                    await caller.fails("DENIED", "destroy_tpu", **arguments)
                self.assertEqual(self.world.calls("delete"), [])
                self.world.delete(self.world.machines()[0]["provider_id"])
                with self.world.changing() as world:
                    world["calls"] = []

    async def test_an_answer_to_no_question_counts_for_nothing(self) -> None:
        yes: Any = {"confirmation": says("accept", confirm=True)("")}
        async with self.calling("auto", says("decline")) as caller:
            arguments = await self.planned(caller)
            result = await caller.client.session.call_tool(
                "destroy_tpu", arguments, input_responses=yes, allow_input_required=True
            )
        self.assertIsInstance(result, InputRequiredResult)
        self.assertEqual(self.world.calls("delete"), [])

    async def test_a_setting_lets_the_token_be_enough(self) -> None:
        folder = self.new_rig_folder("headless", DESTROY_ASKS_USER="0")
        async with self.calling(answer=says("cancel"), rig=self.assembled(folder)) as caller:
            await caller.ok("destroy_tpu", **await self.planned(caller))
        self.assertEqual(self.world.machines(), [])


class ReadOnlyTest(ImaginaryCase):
    async def test_a_read_only_rig_looks_and_does_not_touch(self) -> None:  # A46
        async with self.calling() as caller:
            arguments = await self.planned(caller)
        folder = self.new_rig_folder("watching", RIG_READ_ONLY="1")
        before = self.world.look()["calls"]
        for mode in MODES:
            async with self.calling(mode, rig=self.assembled(folder)) as caller:
                await caller.fails("DENIED", "create_tpu", zone=OTHER_ZONE)
                await caller.fails("DENIED", "destroy_tpu", **arguments)
                await caller.ok("find_tpu")
                await caller.ok("list_tpus")
                await caller.ok("list_orphans")
        self.assertEqual(self.world.look()["calls"], before)


class AssemblyTest(ImaginaryCase):
    def test_a_plane_that_does_not_rent_is_refused_when_the_rig_is_made(self) -> None:
        module = bundled_module()
        context = self.assembled().context
        context.plane = module.ThisComputer(context.paths, "rig=a;owner=b", context.journal)
        with self.assertRaisesRegex(TypeError, "cannot rent.*create"):
            module.CapacityToolset(context)


def set_clock(rig: Any, ahead_s: float) -> None:
    """Put the clock of the rig's capacity toolset `ahead_s` seconds ahead of the real one."""
    import time

    rig.toolsets[0].rentals.tokens.clock = lambda: time.time() + ahead_s


if __name__ == "__main__":
    unittest.main()
