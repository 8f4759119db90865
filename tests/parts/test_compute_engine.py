"""Compute Engine's plane against a fake Google, through a stand-in for gcloud, verb by verb.

One run of the real gcloud, where it is installed, proves that it takes the whole create and sends
what the stand-in sends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import ValidationError

from forge.parts.boundaries.gcloud import Gcloud
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.settings import load_settings
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest, SweepWish
from forge.parts.planes.capacity_plane import (
    CapacityPlane,
    Order,
    Rental,
    RentalMarket,
    is_ours,
    rental_labels,
)
from forge.parts.planes.compute_catalogue import (
    V6E_ZONES,
    ComputeCatalogue,
    compute_chips,
    compute_price,
    quota_limit,
)
from forge.parts.planes.compute_engine import ComputeEngine
from forge.parts.planes.compute_order import (
    ComputeEngineSettings,
    compute_order_call,
    wished_markets,
)
from forge.parts.planes.compute_things import (
    disk_mark,
    ended_words,
    machine_look,
    machine_rental,
    marked_labels,
    unread_places,
)
from forge.parts.planes.google_settings import account_email
from forge.parts.planes.host_plane import HostCommand, HostPlane
from forge.parts.planes.sweep import CapacitySweep
from forge.parts.planes.sweep_plane import SweepPlane
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.sweep_market import read_in_process

PROJECT, RIG, OWNER = "fake-proj", "tpu-vllm-v6e1-2b", "a1b2c3"
ZONE, OTHER = "us-east5-b", "us-east5-a"
INTENT = "create-20261130-093000-aabbcc"
ACCOUNT = "rig-runner@fake-proj.iam.gserviceaccount.com"
HOUR = 3600.0


def order(market: RentalMarket = "spot", name: str = "vm-1", **more: Any) -> Order:
    labels = rental_labels(RIG, OWNER, INTENT, 1_800_000_000)
    return Order(name, more.pop("zone", ZONE), INTENT, labels, 14_400, market, **more)


def request(
    zone: str = ZONE, market: str = "flex-start", name: str = "vm-s", valid_s: float = 240.0
) -> SweepRequest:
    intent = f"sweep-{name}"
    return SweepRequest(
        name=name,
        zone=zone,
        market=market,
        project=PROJECT,
        machine="ct6e-standard-1t",
        intent=intent,
        asked_unix=0.0,
        patience_s=180.0,
        valid_s=valid_s,
        life_s=14_400,
        labels=rental_labels(RIG, OWNER, intent, 1_800_000_000),
    )


class ComputeCase(unittest.IsolatedAsyncioTestCase):
    """A fake Google, the stand-in before any gcloud on PATH, and the plane over both."""

    old = False

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        self.journal = fake_gcloud(self.folder / "bin", old=self.old)
        self.environment = self.cloud.environment(self.folder, str(self.folder / "bin"))
        self.boot = {
            "startup-script": self.folder / "boot.py",
            "gemma4-boot": self.folder / "boot.json",
        }
        self.boot["startup-script"].write_text("#!/usr/bin/env python3\nprint('a, b')\n")
        self.boot["gemma4-boot"].write_text('{"v": 1, "rig": "x"}')
        self.values: dict[str, Any] = {"service_account": "rig-runner"}
        self.plane = ComputeEngine(self.settings, lambda: self.boot, self.environment)

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [], "something asked for a host outside")

    def settings(self) -> ComputeEngineSettings:
        given: dict[str, Any] = {"project": PROJECT, "budget_usd": 6.0, **self.values}
        return ComputeEngineSettings(**given)

    def calls(self, words: str = "") -> list[list[str]]:
        lines = [json.loads(line)[1:] for line in self.journal.read_text().splitlines()]
        return [line for line in lines if " ".join(line).startswith(words)]

    async def refused(self, awaitable: Any, error_class: ErrorClass) -> RigError:
        with self.assertRaises(RigError) as raised:
            await awaitable
        self.assertEqual(raised.exception.error_class, error_class, raised.exception)
        return raised.exception

    def machine(self, name: str = "vm-1", zone: str = ZONE) -> dict[str, Any]:
        return self.cloud.compute.instances[zone, name]

    def insert(self, name: str, zone: str = ZONE, **more: Any) -> None:
        """A machine that somebody makes past the plane."""
        body: dict[str, Any] = {
            "name": name,
            "machineType": "x/machineTypes/n2-standard-2",
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": {}}],
            "scheduling": {"provisioningModel": "STANDARD"},
            **more,
        }
        path = f"/compute/v1/projects/{PROJECT}/zones/{zone}/instances"
        status, _, _ = self.cloud.take("POST", path, body)
        self.assertEqual(status, 200)

    def passing(self, seconds: float) -> None:
        """Lets the cloud's time go on beside the calls until the test ends."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(0.05):
                self.cloud.advance(seconds)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.addCleanup(thread.join, 5)
        self.addCleanup(over.set)


class ProtocolTest(unittest.TestCase):
    def test_the_plane_is_what_the_toolsets_and_the_sweep_take(self) -> None:
        settings = ComputeEngineSettings(project=PROJECT, budget_usd=1.0)
        plane = ComputeEngine(lambda: settings, dict)
        capacity: CapacityPlane = plane
        sweep: SweepPlane = plane
        host: HostPlane = plane
        self.assertEqual({id(capacity), id(sweep), id(host)}, {id(plane)})
        self.assertTrue(plane.hard_stop)
        self.assertLessEqual(plane.read_back_s, 10)

    def test_its_words_make_the_tools_names(self) -> None:
        words = ComputeEngine.vocabulary
        made = (
            f"find_{words['hardware']}",
            f"create_{words['order']}",
            f"list_{words['rental']}s",
            f"{words['destroy']}_{words['rental']}",
        )
        wanted = (
            "find_tpu_vm",
            "create_tpu_vm_instance",
            "list_tpu_vm_instances",
            "destroy_tpu_vm_instance",
        )
        self.assertEqual(made, wanted)


class SettingsTest(unittest.TestCase):
    def load(self, text: str) -> ComputeEngineSettings:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
            for name in ComputeEngineSettings.model_fields:
                os.environ.pop(name.upper(), None)
            (Path(folder) / "tpu.env").write_text(text)
            return load_settings(ComputeEngineSettings, Path(folder))

    def test_a_project_must_be_named(self) -> None:
        with self.assertRaises(RigError) as raised:
            self.load("BUDGET_USD=6\n")
        self.assertIn("PROJECT is missing", raised.exception.what)

    def test_the_defaults_are_the_v6e_machine_with_a_large_disk(self) -> None:
        found = self.load("PROJECT=fake-proj\nBUDGET_USD=6\n")
        self.assertEqual(found.machine_type, "ct6e-standard-1t")
        self.assertEqual((found.boot_disk_gb, found.boot_disk_type), (200, "hyperdisk-balanced"))
        self.assertEqual(found.max_hours, 4.0)
        self.assertEqual(found.service_account, "")

    def test_what_could_be_more_than_a_value_is_refused(self) -> None:
        for key, bad in (
            ("project", "other/zones/x"),
            ("project", "--help"),
            ("machine_type", "ct6e-standard-1t,x=y"),
            ("image_family", "projects/x"),
            ("service_account", "a b@c"),
            ("service_account", "-x"),
            ("network", "projects/p/n"),
            ("reservation", "a,b"),
            ("boot_disk_gb", 10),
        ):
            values: dict[str, Any] = {"project": PROJECT, "budget_usd": 1.0, key: bad}
            with self.assertRaises(ValidationError, msg=key):
                ComputeEngineSettings(**values)

    def test_the_account_by_its_name_its_address_and_in_a_domains_project(self) -> None:
        for project, given, wanted in (
            (PROJECT, "rig-runner", ACCOUNT),
            (
                PROJECT,
                "a-name@other.iam.gserviceaccount.com",
                "a-name@other.iam.gserviceaccount.com",
            ),
            (
                "example.com:my-proj",
                "rig-runner",
                "rig-runner@my-proj.example.com.iam.gserviceaccount.com",
            ),
            (PROJECT, "", ""),
        ):
            settings = ComputeEngineSettings(project=project, budget_usd=1.0, service_account=given)
            self.assertEqual(account_email(settings), wanted)

    def test_markets_in_their_order_and_words_that_are_none(self) -> None:
        def markets(text: str, **more: Any) -> list[RentalMarket]:
            given: dict[str, Any] = {"project": PROJECT, "budget_usd": 1.0, **more}
            given["markets"] = text
            return wished_markets(ComputeEngineSettings(**given))

        self.assertEqual(markets(""), ["flex-start", "spot", "on-demand"])
        self.assertEqual(markets("", reservation="res-1")[-1], "reserved")
        self.assertEqual(markets("spot, flex-start, spot"), ["spot", "flex-start"])
        for text, word in (("spot,cheap", "cheap"), ("reserved", "RESERVATION")):
            with self.assertRaises(RigError) as raised:
                markets(text)
            self.assertEqual(raised.exception.error_class, "INVALID")
            self.assertIn(word, raised.exception.what)

    def test_what_the_settings_leave_a_machine_without(self) -> None:
        def told(**more: Any) -> str:
            given: dict[str, Any] = {"project": PROJECT, "budget_usd": 1.0, **more}
            return " ".join(ComputeEngine(lambda: ComputeEngineSettings(**given), dict).cautions())

        self.assertIn("no secret", told())
        self.assertIn("Cloud NAT", told(service_account="rig-runner", external_ip=False))
        self.assertEqual(told(service_account="rig-runner"), "")


class OrderTest(ComputeCase):
    """What goes out with the create call."""

    async def body(self, given: Order) -> dict[str, Any]:
        await self.plane.create(given)
        (sent,) = self.cloud.sent("POST", "/instances")
        self.assertEqual(sent.path.split("/")[6], given.zone)
        body: dict[str, Any] = sent.body
        return body

    async def test_a_flex_start_waits_as_long_as_ordered_and_ends_by_itself(self) -> None:
        body = await self.body(order("flex-start", valid_s=1800))
        self.assertEqual(body["scheduling"]["provisioningModel"], "FLEX_START")
        self.assertEqual(body["params"]["requestValidForDuration"], {"seconds": "1800"})
        self.assertEqual(body["reservationAffinity"]["consumeReservationType"], "NO_RESERVATION")

    async def test_the_hard_stop_the_labels_and_the_boot_files_in_every_market(self) -> None:
        self.values["reservation"] = "res-1"
        models = {"flex-start": "FLEX_START", "spot": "SPOT", "on-demand": "STANDARD"}
        markets: tuple[RentalMarket, ...] = ("flex-start", "spot", "on-demand", "reserved")
        for number, market in enumerate(markets):
            await self.plane.create(order(market, name=f"vm-{number}"))
            body = self.cloud.sent("POST", "/instances")[-1].body
            scheduling = body["scheduling"]
            self.assertEqual(
                scheduling["provisioningModel"], models.get(market, "RESERVATION_BOUND")
            )
            self.assertEqual(scheduling["maxRunDuration"], {"seconds": "14400"}, market)
            self.assertEqual(scheduling["instanceTerminationAction"], "DELETE", market)
            self.assertEqual(scheduling["onHostMaintenance"], "TERMINATE", market)
            self.assertEqual(body["labels"], dict(order().labels), market)
            items = {item["key"]: item["value"] for item in body["metadata"]["items"]}
            self.assertEqual(items, {key: path.read_text() for key, path in self.boot.items()})
            (account,) = body["serviceAccounts"]
            self.assertEqual(account["email"], ACCOUNT)
            (argv,) = self.calls("compute instances create")[number:]
            self.assertIn("--async", argv)
        self.cloud.advance(4 * HOUR + 1)
        self.assertEqual(self.cloud.held(), {}, "the hard stop leaves neither machine nor disk")

    async def test_the_boot_disk_goes_with_the_machine_and_bears_its_marks(self) -> None:
        (disk,) = (await self.body(order()))["disks"]
        start = disk["initializeParams"]
        self.assertTrue(disk["autoDelete"] and disk["boot"])
        self.assertEqual((start["diskName"], start["diskSizeGb"]), ("vm-1", "200"))
        self.assertTrue(start["diskType"].endswith("/hyperdisk-balanced"))
        self.assertTrue(start["sourceImage"].endswith("/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"))
        self.assertIn("/projects/ubuntu-os-accelerator-images/", start["sourceImage"])
        self.assertEqual(marked_labels(start["description"]), dict(order().labels))

    async def test_without_an_account_the_machine_runs_as_nobody(self) -> None:
        self.values["service_account"] = ""
        self.assertNotIn("serviceAccounts", await self.body(order()))
        (argv,) = self.calls("compute instances create")
        self.assertIn("--no-service-account", argv)
        self.assertIn("--no-scopes", argv)

    async def test_the_network_the_subnet_and_no_external_address(self) -> None:
        self.values.update(network="own-net", subnet="own-sub", external_ip=False)
        (card,) = (await self.body(order()))["networkInterfaces"]
        self.assertNotIn("accessConfigs", card)
        self.assertTrue(card["network"].endswith("/own-net"))
        self.assertTrue(card["subnetwork"].endswith("/regions/us-east5/subnetworks/own-sub"))

    async def test_a_reserved_machine_names_its_reservation(self) -> None:
        await self.refused(self.plane.create(order("reserved")), "INVALID")
        self.assertEqual(self.calls(), [])
        self.values["reservation"] = "res-1"
        affinity = (await self.body(order("reserved")))["reservationAffinity"]
        self.assertEqual(affinity["consumeReservationType"], "SPECIFIC_RESERVATION")
        self.assertEqual(affinity["values"], ["res-1"])

    def test_how_long_a_flex_start_may_wait(self) -> None:
        for given, wanted in (
            (0, "0s"),
            (20, "90s"),
            (90, "90s"),
            (7200, "7200s"),
            (9999, "7200s"),
        ):
            call = compute_order_call(
                self.settings(), order("flex-start", valid_s=given), self.boot
            )
            self.assertEqual(call.flags["request-valid-for-duration"], wanted)
        call = compute_order_call(self.settings(), order("spot", valid_s=300), self.boot)
        self.assertNotIn("request-valid-for-duration", call.flags)

    async def test_a_label_or_a_name_that_could_be_more_than_one_sends_nothing(self) -> None:
        labels = dict(order().labels)
        for bad in (
            order(name="projects/o/zones/z/instances/i"),
            order(name="--help"),
            order(zone="us-east5-b,us-east5-a"),
            Order("vm-1", ZONE, INTENT, {**labels, "owner": "a,b=c"}, 3600, "spot"),
            Order("vm-1", ZONE, INTENT, {**labels, "owner": "Upper"}, 3600, "spot"),
        ):
            await self.refused(self.plane.create(bad), "INVALID")
        self.assertEqual(self.calls(), [])

    async def test_the_real_gcloud_takes_it_and_sends_the_same(self) -> None:
        real = shutil.which("gcloud")
        if real is None:
            self.skipTest("gcloud is not installed: install the Google Cloud CLI to run this test")
        call = compute_order_call(self.settings(), order("on-demand"), self.boot)
        home = self.folder / "real"
        home.mkdir()
        gcloud = Gcloud(PROJECT, environment=self.cloud.environment(home))
        made = await gcloud.change(call, 90.0)
        self.assertEqual(made.thing()["operationType"], "insert")
        (sent,) = self.cloud.sent("POST", "/instances")
        self.cloud.take("DELETE", f"{sent.path}/vm-1", None)
        await self.plane.create(order("on-demand"))
        self.assertEqual(self.cloud.sent("POST", "/instances")[-1].body, sent.body)


class OldGcloudTest(ComputeCase):
    old = True

    async def test_a_gcloud_without_flex_start_is_too_old_and_sends_nothing(self) -> None:
        for act in (self.plane.create(order("flex-start")), self.plane.ask(request())):
            error = await self.refused(act, "INVALID")
            self.assertIn("too old", error.what)
            self.assertIn("gcloud components update", error.next_step)
        self.assertEqual(self.cloud.requests, [])

    async def test_it_rents_as_spot_and_on_demand(self) -> None:
        await self.plane.create(order("spot", name="vm-1"))
        await self.plane.create(order("on-demand", name="vm-2"))
        self.assertEqual(self.cloud.held()["instances"], ["vm-1", "vm-2"])


class CreateRefusalTest(ComputeCase):
    """Each refusal by its class, with nothing left behind that is not told."""

    async def test_a_stockout_that_the_answer_tells(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        error = await self.refused(self.plane.create(order()), "CAPACITY")
        self.assertIn("another zone", error.next_step)
        self.assertEqual(self.cloud.held(), {})

    async def test_a_stockout_with_the_zones_that_the_provider_names(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        self.cloud.script.hint = (OTHER, "us-central1-b")
        error = await self.refused(self.plane.create(order()), "CAPACITY")
        self.assertEqual(error.next_step, f"the provider names {OTHER}, us-central1-b")

    async def test_a_refusal_that_comes_after_the_order_was_taken(self) -> None:
        self.cloud.script.operation_s = 4.0
        self.passing(1.0)
        for fault, wanted in (("stockout", "CAPACITY"), ("quota", "QUOTA")):
            faulty: set[str] = getattr(self.cloud.script, fault)
            faulty.add(ZONE)
            error_class: ErrorClass = "CAPACITY" if wanted == "CAPACITY" else "QUOTA"
            await self.refused(self.plane.create(order()), error_class)
            faulty.clear()
        self.assertEqual(self.cloud.held(), {})

    async def test_an_earlier_refusal_of_the_same_name_is_not_taken_for_this_ones(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        await self.refused(self.plane.create(order()), "CAPACITY")
        self.cloud.script.stockout.clear()
        self.cloud.script.lag_s = 3.0  # not to be seen at once
        self.passing(1.0)
        await self.plane.create(order())
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "running")

    async def test_a_machine_that_is_still_provisioned_is_watched_until_it_is_refused(self) -> None:
        def unmake() -> None:
            while ("POST", "/instances") not in [
                (r.method, r.path[-10:]) for r in self.cloud.requests
            ]:
                time.sleep(0.01)
            with self.cloud.lock:
                self.machine()["status"] = "PROVISIONING"
            while len(self.cloud.sent("GET", "/operations")) < 2:
                time.sleep(0.01)
            with self.cloud.lock:
                (operation,) = self.cloud.compute.operations.values()
                error = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "not enough"}
                operation["error"] = {"errors": [error]}
                self.cloud.compute.instances.clear()

        thread = threading.Thread(target=unmake)
        thread.start()
        await self.refused(self.plane.create(order()), "CAPACITY")
        thread.join(5)

    async def test_quota_permission_a_namesake_and_a_disabled_service(self) -> None:
        self.cloud.script.quota.add(ZONE)
        error = await self.refused(self.plane.create(order()), "QUOTA")
        self.assertIn("TPUS_PER_TPU_FAMILY", error.what)
        self.cloud.script.quota.clear()
        self.cloud.script.denied.add(ZONE)
        error = await self.refused(self.plane.create(order()), "DENIED")
        self.assertIn("compute.instances.create", error.what)
        self.cloud.script.denied.clear()
        self.insert("vm-1")
        await self.refused(self.plane.create(order()), "EXISTS")
        self.cloud.script.disabled.add("compute")
        error = await self.refused(self.plane.create(order(name="vm-2")), "DENIED")
        self.assertIn("compute.googleapis.com", error.what)

    async def test_a_project_of_somebody_else_and_one_that_cannot_be_one(self) -> None:
        self.values["project"] = "other-project"
        await self.refused(self.plane.create(order()), "DENIED")
        self.assertEqual(self.cloud.held(), {})

    async def test_an_expired_login_and_no_gcloud(self) -> None:
        Path(self.environment["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).write_text("expired\n")
        acts = (
            self.plane.create(order()),
            self.plane.census(),
            self.plane.offers(),
            self.plane.quota(ZONE, "spot"),
            self.plane.describe("vm-1", ZONE),
            self.plane.look(request()),
        )
        for act in acts:
            error = await self.refused(act, "AUTH")
            self.assertIn("gcloud auth login", error.next_step)
        (self.folder / "bin" / "gcloud").unlink()
        lone = {**self.environment, "PATH": str(self.folder / "bin")}
        plane = ComputeEngine(self.settings, lambda: self.boot, lone)
        error = await self.refused(plane.create(order()), "DENIED")
        self.assertIn("not installed", error.what)

    async def test_settings_at_fault_are_told_at_each_call_and_start_nothing(self) -> None:
        def broken() -> ComputeEngineSettings:
            raise RigError("INVALID", "tpu.env: PROJECT is missing")

        plane = ComputeEngine(broken, lambda: self.boot, self.environment)
        for act in (plane.offers(), plane.census(), plane.create(order())):
            await self.refused(act, "INVALID")
        self.assertEqual(self.calls(), [])

    async def test_a_boot_file_that_is_not_there(self) -> None:
        self.boot["gemma4-boot"].unlink()
        with self.assertRaises(RigError):
            await self.plane.create(order())
        self.assertEqual(self.cloud.held(), {})

    async def test_a_lost_answer_is_of_unknown_fate_and_the_machine_is_found(self) -> None:
        self.cloud.script.lost, self.cloud.script.lost_by = 1, "cut"
        with self.assertRaises(RigError) as raised:
            await self.plane.create(order())
        # gcloud may ask again by itself, and then it meets what it made.
        self.assertIn(raised.exception.error_class, ("UNKNOWN", "EXISTS"))
        found = await self.plane.describe("vm-1", ZONE)
        self.assertEqual(found.labels["intent"], INTENT)

    async def test_an_answer_that_never_comes_is_of_unknown_fate(self) -> None:
        self.cloud.script.lost = 1
        self.plane.create_s = 2.0
        error = await self.refused(self.plane.create(order()), "UNKNOWN")
        self.assertIn("may have been made", error.what)
        self.assertEqual(len(self.cloud.sent("POST", "/instances")), 1)

    async def test_a_half_made_machine_leaves_a_disk_that_is_told_as_ours_and_can_go(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        self.cloud.script.half_made = True
        await self.refused(self.plane.create(order()), "CAPACITY")
        self.assertEqual(self.cloud.held(), {"disks": ["vm-1"]})
        (left,) = (await self.plane.census()).rentals
        self.assertEqual((left.kind, left.name, left.state), ("disk", "vm-1", "stopped"))
        self.assertTrue(is_ours(left.labels, RIG, OWNER))
        self.assertEqual(left, await self.plane.describe("vm-1", ZONE))
        await self.plane.destroy(left)
        self.assertEqual(self.cloud.held(), {})


class OffersTest(ComputeCase):
    def setUp(self) -> None:
        super().setUp()
        self.values["zones"] = f"{ZONE}, {OTHER}"

    async def test_every_zone_and_market_in_the_wished_order_with_its_price(self) -> None:
        self.values["markets"] = "flex-start,spot"
        found = await self.plane.offers()
        places = [(one.zone, one.market) for one in found]
        wanted = [(z, m) for z in (ZONE, OTHER) for m in ("flex-start", "spot")]
        self.assertEqual(places, wanted)
        self.assertEqual([one.price_per_hour_usd for one in found], [1.35, 1.215] * 2)
        for one in found:
            self.assertIn("2026", one.price_source)
            self.assertEqual(one.available, "unknown")
            self.assertIn("only a request", one.how_known)

    async def test_without_wishes_the_zones_of_the_table_and_all_markets(self) -> None:
        self.values["zones"] = ""
        self.cloud.script.zones = (*V6E_ZONES, "us-west4-a")
        found = await self.plane.offers()
        self.assertEqual(list(dict.fromkeys(one.zone for one in found)), list(V6E_ZONES))
        self.assertEqual({one.market for one in found}, {"flex-start", "spot", "on-demand"})

    async def test_a_zone_without_the_type_and_one_that_is_none(self) -> None:
        self.values["zones"] = f"{ZONE},{OTHER},us-east9-z"
        self.cloud.script.unlisted.add(OTHER)
        found = {one.zone: one for one in await self.plane.offers()}
        self.assertEqual(found[ZONE].available, "unknown")
        self.assertEqual(found[OTHER].available, "no")
        self.assertIn("on its list", found[OTHER].how_known)
        self.assertEqual(found["us-east9-z"].available, "no")
        self.assertIn("no such zone", found["us-east9-z"].how_known)

    async def test_lists_are_remembered_but_not_what_could_not_be_read(self) -> None:
        self.cloud.script.html = 20
        found = await self.plane.offers()
        self.assertEqual({one.available for one in found}, {"unknown"})
        self.assertTrue(all("could not be read" in one.how_known for one in found))
        self.cloud.script.html = 0
        before = len(self.calls("compute machine-types describe"))
        await self.plane.offers()
        await self.plane.offers()
        self.assertEqual(len(self.calls("compute machine-types describe")), before + 2)

    async def test_a_region_without_a_known_price(self) -> None:
        self.values["zones"] = "us-west4-a"
        for one in await self.plane.offers():
            self.assertIsNone(one.price_per_hour_usd)
            self.assertIn("no price of v6e", one.price_source)

    async def test_a_wrong_project_is_no_missing_zone(self) -> None:
        self.values["project"] = "other-project"
        await self.refused(self.plane.offers(), "DENIED")

    async def test_more_chips_cost_as_many_times_more(self) -> None:
        self.assertEqual(compute_price("v6e", "ct6e-standard-4t", ZONE, "spot")[0], 4.86)
        self.assertEqual([compute_chips(t) for t in ("ct6e-standard-8t", "n2-standard-2")], [8, 1])
        self.assertEqual(compute_price("v6e", "ct6e-standard-1t", ZONE, "reserved")[0], None)


class CatalogueTest(unittest.IsolatedAsyncioTestCase):
    """The memory of lists, and its patience, without a provider."""

    async def test_an_hour_later_it_is_read_again(self) -> None:
        now, asked = [0.0], []

        async def has(kind: str, zone: str) -> bool:
            asked.append((kind, zone))
            return zone == "a"

        catalogue = ComputeCatalogue(lambda: now[0])
        for moment, wanted in ((0.0, 2), (3599.0, 2), (3601.0, 4)):
            now[0] = moment
            found = await catalogue.look("t", ["a", "b"], has)
            self.assertEqual([found[z].available for z in "ab"], ["unknown", "no"])
            self.assertEqual(len(asked), wanted)
        await catalogue.look("another", ["a"], has)
        self.assertEqual(len(asked), 5)

    async def test_a_zone_that_does_not_answer_hides_no_other(self) -> None:
        async def has(kind: str, zone: str) -> bool:
            if zone == "slow":
                await asyncio.sleep(600)
            if zone == "broken":
                raise RigError("UNREACHABLE", "no network")
            return True

        with mock.patch("forge.parts.planes.compute_catalogue._LISTS_S", 0.3):
            found = await ComputeCatalogue().look("t", ["a", "slow", "broken"], has)
        self.assertIn("has it", found["a"].how)
        for zone in ("slow", "broken"):
            self.assertEqual(found[zone].available, "unknown")
            self.assertIn("could not be read", found[zone].how)

    async def test_what_every_zone_would_say_is_raised_and_ends_the_others(self) -> None:
        ended: list[str] = []

        async def has(kind: str, zone: str) -> bool:
            if zone == "a":
                raise RigError("AUTH", "no login")
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(zone)
            return True

        with self.assertRaises(RigError) as raised:
            await ComputeCatalogue().look("t", ["b", "a"], has)
        self.assertEqual(raised.exception.error_class, "AUTH")
        self.assertEqual(ended, ["b"])


class QuotaTest(ComputeCase):
    async def test_spot_and_flex_start_draw_on_the_preemptible_quota(self) -> None:
        self.cloud.script.quotas["PREEMPTIBLE-TPU-V6E-per-project-region"] = 5
        for market in ("spot", "flex-start"):
            found = await self.plane.quota(ZONE, market)
            self.assertEqual((found.limit, found.used), (5, 0))
            self.assertIn("PREEMPTIBLE", found.name)
        found = await self.plane.quota(ZONE, "on-demand")
        self.assertEqual((found.name, found.limit), ("TPUS-PER-TPU-FAMILY-per-project-region", 8))

    async def test_flex_start_falls_back_to_the_familys(self) -> None:
        self.cloud.script.quotas["PREEMPTIBLE-TPU-V6E-per-project-region"] = 0
        found = await self.plane.quota(ZONE, "flex-start")
        self.assertEqual((found.name, found.limit), ("TPUS-PER-TPU-FAMILY-per-project-region", 8))
        self.assertEqual((await self.plane.quota(ZONE, "spot")).limit, 0)

    async def test_what_is_in_use_in_that_region_by_that_market(self) -> None:
        await self.plane.create(order("spot", name="vm-1"))
        await self.plane.create(order("spot", name="vm-2", zone="us-central1-b"))
        await self.plane.create(order("on-demand", name="vm-3"))
        self.insert("no-tpu")
        self.assertEqual((await self.plane.quota(OTHER, "spot")).used, 1)
        self.assertEqual((await self.plane.quota(OTHER, "on-demand")).used, 1)
        self.assertEqual((await self.plane.quota("us-central1-b", "on-demand")).used, 0)

    async def test_chips_are_counted_in_machines(self) -> None:
        await self.plane.create(order("spot", name="vm-1"))
        self.values["machine_type"] = "ct6e-standard-4t"
        found = await self.plane.quota(ZONE, "spot")
        self.assertEqual((found.limit, found.used), (2, 1))

    async def test_no_limit_is_many(self) -> None:
        self.cloud.script.quotas["TPUS-PER-TPU-FAMILY-per-project-region"] = -1
        self.assertGreater((await self.plane.quota(ZONE, "on-demand")).limit, 1000)

    async def test_what_is_not_told_is_no_zero(self) -> None:
        await self.refused(self.plane.quota("us-east9-z", "spot"), "UNKNOWN")
        self.cloud.script.quotas.clear()
        await self.refused(self.plane.quota(ZONE, "spot"), "NOT_FOUND")
        self.cloud.script.disabled.add("quotas")
        await self.refused(self.plane.quota(ZONE, "spot"), "DENIED")

    def test_the_entry_of_the_region_before_one_that_applies_there(self) -> None:
        def entry(value: str, region: str = "", *places: str, family: str = "") -> dict[str, Any]:
            names = {"region": region, "tpu_family": family}
            dimensions = {key: one for key, one in names.items() if one}
            return {
                "dimensions": dimensions,
                "details": {"value": value},
                "applicableLocations": list(places),
            }

        general = entry("3", "", "us-east5", "us-west4")
        own = entry("7", "us-east5", "us-east5")
        self.assertEqual(quota_limit({"dimensionsInfos": [general, own]}, "us-east5"), 7)
        self.assertEqual(quota_limit({"dimensionsInfos": [own, general]}, "us-west4"), 3)
        other = entry("9", "us-east5", family="CT5P")
        self.assertEqual(quota_limit({"dimensionsInfos": [other, own]}, "us-east5", "CT6E"), 7)
        odd: tuple[Any, ...] = ({}, [], None, {"dimensionsInfos": [entry("x", "us-east5"), 3]})
        for bad in odd:
            with self.assertRaises(RigError) as raised:
                quota_limit(bad, "us-east5")
            self.assertEqual(raised.exception.error_class, "UNKNOWN")


class CensusTest(ComputeCase):
    async def test_everything_of_the_project_whoever_it_belongs_to(self) -> None:
        self.cloud.script.page = 1
        await self.plane.create(order("spot", name="vm-1"))
        await self.plane.create(order("flex-start", name="vm-2", zone="us-central1-b"))
        self.insert("somebodys", labels={"team": "x"})
        census = await self.plane.census()
        self.assertEqual(census.unread, ())
        found = {one.name: one for one in census.rentals}
        self.assertEqual(sorted(found), ["somebodys", "vm-1", "vm-2"], "disks go with machines")
        mine, flexible, other = found["vm-1"], found["vm-2"], found["somebodys"]
        self.assertEqual((mine.kind, mine.state, mine.market), ("machine", "running", "spot"))
        self.assertEqual((mine.project, mine.zone), (PROJECT, ZONE))
        self.assertEqual((mine.price_per_hour_usd, flexible.market), (1.215, "flex-start"))
        self.assertEqual(mine.labels, dict(order().labels))
        self.assertEqual(mine.created_unix, self.machine()["_born"])
        self.assertEqual((other.market, other.price_per_hour_usd), ("on-demand", None))
        self.assertFalse(is_ours(other.labels, RIG, OWNER))

    async def test_a_zone_that_does_not_answer_is_unread_and_not_empty(self) -> None:
        await self.plane.create(order())
        self.cloud.script.unreachable.add("us-west4-a")
        census = await self.plane.census()
        self.assertEqual(tuple(census.unread), ("us-west4-a",))
        self.assertEqual([one.name for one in census.rentals], ["vm-1"])

    async def test_a_list_that_was_refused_is_never_empty(self) -> None:
        self.cloud.script.disabled.add("compute")
        await self.refused(self.plane.census(), "DENIED")
        self.cloud.script.disabled.clear()
        self.cloud.script.html = 2
        census = await self.plane.census()
        self.assertTrue(census.unread, "two lists that a proxy answered are not empty ones")

    async def test_a_machine_that_cannot_be_read_is_told_and_hides_no_other(self) -> None:
        await self.plane.create(order())
        self.insert("strange")
        self.machine("strange")["status"] = "DREAMING"
        census = await self.plane.census()
        self.assertEqual([one.name for one in census.rentals], ["vm-1"])
        (told,) = census.unread
        self.assertIn("strange in us-east5-b", told)
        self.assertIn("DREAMING", told)

    async def test_a_disk_on_no_machine_is_told_with_the_labels_it_has(self) -> None:
        self.insert("theirs")
        disk = self.cloud.compute.disks[ZONE, "theirs"]
        self.cloud.compute.disks[ZONE, "loose"] = {**disk, "name": "loose", "users": []}
        self.cloud.compute.disks[ZONE, "labelled"] = {
            **disk,
            "name": "labelled",
            "users": [],
            "labels": {"team": "x"},
            "description": disk_mark(order().labels),
        }
        found = {one.name: one for one in (await self.plane.census()).rentals}
        self.assertEqual(sorted(found), ["labelled", "loose", "theirs"])
        self.assertEqual((found["loose"].kind, found["loose"].labels), ("disk", {}))
        self.assertEqual(found["labelled"].labels, {"team": "x"}, "labels go before a description")


class DescribeTest(ComputeCase):
    async def test_a_flex_start_from_its_queue_to_its_end(self) -> None:
        self.cloud.script.queue_s = 600.0
        await self.plane.create(order("flex-start", valid_s=7200))
        waiting = await self.plane.describe("vm-1", ZONE)
        self.assertEqual((waiting.state, waiting.price_per_hour_usd), ("pending", 0.0))
        self.cloud.advance(700)
        running = await self.plane.describe("vm-1", ZONE)
        self.assertEqual((running.state, running.price_per_hour_usd), ("running", 1.35))
        self.assertEqual(running.created_at, waiting.created_at)
        self.assertEqual(running.created_unix, waiting.created_unix + 600, "its time counts since")
        self.cloud.advance(4 * HOUR)
        await self.refused(self.plane.describe("vm-1", ZONE), "NOT_FOUND")

    async def test_what_only_cannot_be_read_is_not_absent(self) -> None:
        self.cloud.script.html = 3
        await self.refused(self.plane.describe("vm-1", ZONE), "UNREACHABLE")
        self.cloud.script.html = 0
        self.cloud.script.disabled.add("compute")
        await self.refused(self.plane.describe("vm-1", ZONE), "DENIED")

    async def test_a_stopped_machine_is_still_there(self) -> None:
        await self.plane.create(order())
        self.cloud.compute.shut_down("vm-1")
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "stopped")

    def test_every_status_of_the_api_means_something(self) -> None:
        thing = {
            "name": "vm",
            "id": "1",
            "zone": f"x/zones/{ZONE}",
            "creationTimestamp": "2026-11-30T01:02:03.456-08:00",
        }
        for status, state, look in (
            ("PENDING", "pending", "queued"),
            ("PROVISIONING", "pending", "starting"),
            ("STAGING", "pending", "starting"),
            ("REPAIRING", "pending", "starting"),
            ("RUNNING", "running", "granted"),
            ("PENDING_STOP", "stopping", "refused"),
            ("STOPPING", "stopping", "refused"),
            ("SUSPENDING", "stopping", "refused"),
            ("DEPROVISIONING", "stopping", "refused"),
            ("STOPPED", "stopped", "refused"),
            ("SUSPENDED", "stopped", "refused"),
            ("TERMINATED", "stopped", "refused"),
        ):
            machine = {**thing, "status": status}
            self.assertEqual(machine_rental(machine, PROJECT, "ct6e-x-1t", "v6e").state, state)
            self.assertEqual(machine_look(machine).state, look)
        for bad in (
            {},
            {"status": "NEW"},
            {"status": "RUNNING", "creationTimestamp": "yesterday"},
            {"status": "RUNNING", "creationTimestamp": "2026-11-30T01:02:03"},
            {"status": "RUNNING", "id": ""},
            {"status": "RUNNING", "name": None},
        ):
            with self.assertRaises(RigError) as raised:
                machine_rental({**thing, **bad}, PROJECT, "ct6e-x-1t", "v6e")
            self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_a_description_is_read_as_marks_only_in_that_form(self) -> None:
        labels = dict(order().labels)
        self.assertEqual(marked_labels(disk_mark(labels)), labels)
        for text in ("", "a disk", "https://example.com/a", "a:b/c", "A:b", "managed-by"):
            self.assertEqual(marked_labels(text), {}, text)

    def test_places_that_a_warning_names(self) -> None:
        warning = "WARNING: Some requests did not succeed. - The zone 'zones/us-west4-a' is gone."
        self.assertEqual(unread_places([warning, warning]), ["us-west4-a"])
        self.assertEqual(unread_places(["WARNING: something"]), ["WARNING: something"])


class DestroyTest(ComputeCase):
    async def rented(self, **more: Any) -> Rental:
        await self.plane.create(order(**more))
        return await self.plane.describe("vm-1", ZONE)

    async def test_the_machine_and_its_disk_go(self) -> None:
        await self.plane.destroy(await self.rented())
        self.assertEqual(self.cloud.held(), {})
        await self.refused(self.plane.describe("vm-1", ZONE), "NOT_FOUND")

    async def test_what_is_gone_already_is_no_error(self) -> None:
        rental = await self.rented()
        await self.plane.destroy(rental)
        await self.plane.destroy(rental)

    async def test_a_namesake_stays(self) -> None:
        rental = await self.rented()
        await self.plane.destroy(rental)
        self.insert("vm-1")
        error = await self.refused(self.plane.destroy(rental), "DENIED")
        self.assertIn("another one", error.what)
        same_id = {**rental.model_dump(), "provider_id": self.machine()["id"]}
        recreated = Rental(**{**same_id, "created_at": "2020-01-01T00:00:00Z"})
        await self.refused(self.plane.destroy(recreated), "DENIED")
        self.assertEqual(self.cloud.held()["instances"], ["vm-1"])

    async def test_of_another_project_nothing_is_asked(self) -> None:
        rental = await self.rented()
        before = len(self.calls())
        strange = rental.model_copy(update={"project": "other-project"})
        await self.refused(self.plane.destroy(strange), "DENIED")
        self.assertEqual(len(self.calls()), before)

    async def test_a_delete_that_takes_long_is_on_its_way(self) -> None:
        rental = await self.rented()
        self.cloud.script.operation_s = HOUR
        self.plane.delete_s = 3.0
        await self.plane.destroy(rental)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "stopping")
        self.cloud.advance(HOUR)
        self.assertEqual(self.cloud.held(), {})

    async def test_a_lost_answer_of_a_delete_is_settled_by_a_look(self) -> None:
        rental = await self.rented()
        self.cloud.script.lost, self.cloud.script.lost_by = 3, "cut"
        await self.plane.destroy(rental)
        self.assertEqual(self.cloud.held(), {})

    async def test_a_lost_answer_and_a_machine_that_stays_is_unknown(self) -> None:
        rental = await self.rented()
        self.cloud.script.stubborn.add("vm-1")
        self.cloud.script.lost, self.cloud.script.lost_by = 9, "cut"
        await self.refused(self.plane.destroy(rental), "UNKNOWN")

    async def test_a_stubborn_machine_is_still_to_be_seen(self) -> None:
        rental = await self.rented()
        self.cloud.script.stubborn.add("vm-1")
        await self.plane.destroy(rental)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "running")


class EndedTest(ComputeCase):
    """What became of a machine."""

    async def ended(self, market: RentalMarket = "spot") -> tuple[str, str]:
        await self.plane.create(order(market))
        rental = await self.plane.describe("vm-1", ZONE)
        return "vm-1", rental.provider_id

    async def why(self, name: str, provider_id: str) -> str:
        return await self.plane.ended_why(name, ZONE, provider_id)

    async def test_it_was_taken_back(self) -> None:
        name, number = await self.ended()
        self.cloud.preempt(name)
        why = await self.why(name, number)
        self.assertIn("took it back", why)
        self.assertIn("Instance was preempted", why)

    async def test_its_time_was_over(self) -> None:
        name, number = await self.ended("on-demand")
        self.cloud.advance(4 * HOUR + 1)
        self.assertIn("its time was over", await self.why(name, number))

    async def test_somebody_deleted_it_and_no_address_is_told(self) -> None:
        name, number = await self.ended()
        self.cloud.compute.caller = "jane.doe@example.com"
        path = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances/{name}"
        self.cloud.take("DELETE", path, None)
        why = await self.why(name, number)
        self.assertIn("deleted by a user", why)
        self.assertNotIn("jane", why)
        self.assertNotIn("example.com", why)

    async def test_it_deleted_itself(self) -> None:
        for caller, wanted in (
            (ACCOUNT, "the machine itself"),
            ("other@fake-proj.iam.gserviceaccount.com", "a service account"),
        ):
            name, number = await self.ended()
            self.cloud.compute.caller = caller
            path = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances/{name}"
            self.cloud.take("DELETE", path, None)
            why = await self.why(name, number)
            self.assertIn(f"deleted by {wanted}", why)
            self.assertNotIn("gserviceaccount", why)

    async def test_it_went_down_from_within(self) -> None:
        name, number = await self.ended()
        self.cloud.compute.shut_down(name)
        self.assertIn("shut down from within", await self.why(name, number))

    async def test_it_never_came_to_be(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        await self.refused(self.plane.create(order()), "CAPACITY")
        why = await self.why("vm-1", "")
        self.assertIn("the create was refused", why)
        self.assertIn("ZONE_RESOURCE_POOL_EXHAUSTED", why)

    async def test_a_namesakes_end_is_not_told_of_another(self) -> None:
        name, number = await self.ended()
        self.cloud.preempt(name)
        await self.plane.create(order())
        second = await self.plane.describe(name, ZONE)
        self.assertEqual(await self.why(name, second.provider_id), "")
        self.assertIn("preempted", await self.why(name, number))

    async def test_while_it_cannot_be_read_that_is_said(self) -> None:
        self.cloud.script.html = 3
        await self.refused(self.why("vm-1", ""), "UNREACHABLE")

    def test_what_the_provider_calls_by_other_names(self) -> None:
        def told(**more: str) -> str:
            base = {"targetLink": "x/instances/vm", "insertTime": "2026-11-30T00:00:00Z"}
            return ended_words([{**base, "status": "DONE", **more}])

        system = {"user": "system"}
        self.assertIn("host failed", told(operationType="compute.instances.hostError", **system))
        unheard = told(operationType="compute.instances.terminatedByMoonlight", **system)
        self.assertIn("the provider ended it (compute.instances.terminatedByMoonlight)", unheard)
        limit = told(operationType="compute.instances.scheduledVmTermination", **system)
        self.assertIn("its time was over", limit)
        self.assertEqual(told(operationType="insert", user="a@example.com"), "")
        self.assertEqual(told(operationType="setLabels", user="a@example.com"), "")
        hostile = told(
            operationType="delete", user="a@example.com", statusMessage="x\x1b[31m\n" + "y" * 5000
        )
        self.assertNotIn("\x1b", hostile)
        self.assertLessEqual(len(hostile), 450)


class ConsoleTest(ComputeCase):
    async def rental(self, market: RentalMarket = "spot") -> Rental:
        await self.plane.create(order(market, valid_s=7200))
        return await self.plane.describe("vm-1", ZONE)

    async def test_the_boot_as_the_serial_port_has_it(self) -> None:
        rental = await self.rental()
        self.cloud.compute.write_serial("vm-1", "GEMMA4-BOOT docker begin 1796000000 é\r\nnext\n")
        text = await self.plane.boot_text(rental)
        self.assertIn("GEMMA4-BOOT docker begin 1796000000 é", text)
        self.assertTrue(text.endswith("next\n"))

    async def test_of_a_long_one_the_newest_part(self) -> None:
        rental = await self.rental()
        self.cloud.compute.write_serial("vm-1", "old\n" + "x" * 300_000 + "\nnewest\n")
        text = await self.plane.boot_text(rental)
        self.assertLessEqual(len(text.encode()), 200_000)
        self.assertTrue(text.endswith("newest\n"))
        self.assertNotIn("old", text)

    async def test_nothing_yet_is_unreachable(self) -> None:
        rental = await self.rental()
        self.cloud.compute.serial = ""
        await self.refused(self.plane.boot_text(rental), "UNREACHABLE")

    async def test_a_machine_that_only_waits_has_no_console(self) -> None:
        self.cloud.script.queue_s = 600.0
        rental = await self.rental("flex-start")
        error = await self.refused(self.plane.boot_text(rental), "UNREACHABLE")
        self.assertIn("nothing to its console yet", error.what)

    async def test_a_machine_that_is_gone(self) -> None:
        rental = await self.rental()
        await self.plane.destroy(rental)
        await self.refused(self.plane.boot_text(rental), "NOT_FOUND")


class HostTest(ComputeCase):
    """A command on the machine, and the tunnel to it; `ssh` is a program of this test."""

    def setUp(self) -> None:
        super().setUp()
        self.program("ssh", "status = 0")
        self.program("ssh-keygen", "status = 0")
        key = self.folder / ".ssh" / "google_compute_engine"
        key.parent.mkdir(mode=0o700)
        key.write_text("made-up")
        key.with_suffix(".pub").write_text("ssh-rsa AAAA made-up@test\n")

    def program(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        head = f"#!{sys.executable}\nimport subprocess, sys\n"
        path.write_text(f"{head}{textwrap.dedent(body)}\nsys.exit(status)\n")
        path.chmod(0o755)

    async def rental(self) -> Rental:
        await self.plane.create(order())
        return await self.plane.describe("vm-1", ZONE)

    def command(self, source: str, **arguments: str | int | bool) -> HostCommand:
        return HostCommand(source.encode(), "status", arguments)

    async def test_the_program_runs_there_with_its_arguments_as_data(self) -> None:
        # The other end takes the last word as a shell would, and has no sudo and no other Python.
        self.program(
            "ssh",
            f"""
            words = sys.argv[-1].split()
            status = 0
            if words[:2] == ["sudo", "python3"]:
                status = subprocess.run([{sys.executable!r}, *words[2:]]).returncode
            """,
        )
        source = (
            "import base64, json, sys\n"
            "data = json.loads(base64.urlsafe_b64decode(sys.argv[2]))\n"
            "print(sys.argv[1], data['text'], data['lines'])\n"
        )
        text = "$(touch P) ; `touch P` 'x"
        given = self.command(source, text=text, lines=3)
        told = await self.plane.run_on_host(await self.rental(), given, 60.0)
        self.assertEqual(told, f"status {text} 3\n")
        (argv,) = self.calls("compute ssh")
        for word in ("--tunnel-through-iap", f"--zone={ZONE}", f"--project={PROJECT}", "vm-1"):
            self.assertIn(word, argv)
        self.assertFalse(any("touch" in word for word in argv))

    async def test_a_machine_that_does_not_answer_and_one_that_is_gone(self) -> None:
        rental = await self.rental()
        self.program("ssh", "sys.stdin.read(); status = 255")
        act = self.plane.run_on_host(rental, self.command("pass"), 60.0)
        await self.refused(act, "UNREACHABLE")
        await self.plane.destroy(rental)
        act = self.plane.run_on_host(rental, self.command("pass"), 60.0)
        await self.refused(act, "NOT_FOUND")

    async def test_the_tunnel_is_a_command_that_asks_nothing(self) -> None:
        found = self.plane.tunnel(await self.rental(), 8123, 8000)
        self.assertEqual(found.argv[0], str(self.folder / "bin" / "gcloud"))
        self.assertIn("127.0.0.1:8123:127.0.0.1:8000", found.argv)
        self.assertIn("--tunnel-through-iap", found.argv)
        self.assertIn("-oExitOnForwardFailure=yes", found.argv)
        self.assertEqual(found.environment["CLOUDSDK_CORE_DISABLE_PROMPTS"], "1")
        self.assertEqual(found.environment["HOME"], str(self.folder))


class SweepVerbsTest(ComputeCase):
    """Ask, look, cancel."""

    async def test_a_request_from_its_queue_to_the_grant(self) -> None:
        self.cloud.script.queue_s = 600.0
        asked = request(valid_s=7200)
        await self.plane.ask(asked)
        (sent,) = self.cloud.sent("POST", "/instances")
        self.assertEqual(sent.body["labels"], dict(asked.labels))
        self.assertEqual((await self.plane.look(asked)).state, "queued")
        self.cloud.advance(601)
        look = await self.plane.look(asked)
        self.assertEqual(look.state, "granted")
        rental = await self.plane.describe("vm-s", ZONE)
        self.assertEqual(
            (look.provider_id, look.created_at), (rental.provider_id, rental.created_at)
        )

    async def test_a_request_that_was_never_made_is_gone_without_a_word(self) -> None:
        look = await self.plane.look(request())
        self.assertEqual((look.state, look.said), ("gone", ""))
        await self.plane.cancel(request())

    async def test_a_refusal_after_the_order_was_taken_is_seen_with_the_providers_words(
        self,
    ) -> None:
        self.cloud.script.stockout.add(ZONE)
        self.cloud.script.hint = (OTHER, "us-central1-b")
        self.cloud.script.operation_s = 30.0
        await self.plane.ask(request())
        self.assertEqual((await self.plane.look(request())).state, "queued")
        self.cloud.advance(31)
        look = await self.plane.look(request())
        self.assertEqual(look.state, "gone")
        refusal = read_refusal(look.said)
        self.assertEqual((refusal.reason, refusal.scope), ("stockout", "zone"))
        self.assertEqual(refusal.hints, (OTHER, "us-central1-b"))

    async def test_a_used_up_quota_is_seen_as_one_of_the_region(self) -> None:
        self.cloud.script.quota.add(ZONE)
        self.cloud.script.operation_s = 30.0
        await self.plane.ask(request())
        self.cloud.advance(31)
        refusal = read_refusal((await self.plane.look(request())).said)
        self.assertEqual((refusal.reason, refusal.scope), ("quota", "region"))

    async def test_what_a_refusal_left_is_still_there_until_it_is_cancelled(self) -> None:
        self.cloud.script.stockout.add(ZONE)
        self.cloud.script.half_made = True
        await self.refused(self.plane.ask(request()), "CAPACITY")
        self.assertEqual((await self.plane.look(request())).state, "refused")
        await self.plane.cancel(request())
        self.assertEqual((await self.plane.look(request())).state, "gone")
        self.assertEqual(self.cloud.held(), {})

    async def test_a_machine_that_ended_before_it_was_looked_at(self) -> None:
        await self.plane.ask(request(market="spot"))
        self.cloud.preempt("vm-s")
        look = await self.plane.look(request(market="spot"))
        self.assertEqual(look.state, "gone")
        self.assertIn("preempted", look.said)

    async def test_cancel_ends_what_waits_and_what_runs(self) -> None:
        self.cloud.script.queue_s = 600.0
        for wait in (0, 601):
            await self.plane.ask(request())
            self.cloud.advance(wait)
            await self.plane.cancel(request())
            self.assertEqual((await self.plane.look(request())).state, "gone")
            self.assertEqual(self.cloud.held(), {})

    async def test_what_another_request_made_is_neither_taken_nor_cancelled(self) -> None:
        self.insert("vm-s", labels={"intent": "sweep-other"})
        look = await self.plane.look(request())
        self.assertEqual(look.state, "gone")
        self.assertIn("somebody else's", look.said)
        await self.refused(self.plane.cancel(request()), "DENIED")
        self.assertEqual(self.cloud.held()["instances"], ["vm-s"])
        path = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances/vm-s"
        disk = dict(self.cloud.compute.disks[ZONE, "vm-s"], users=[])
        self.cloud.take("DELETE", path, None)
        self.cloud.compute.disks[ZONE, "vm-s"] = disk
        await self.plane.cancel(request())
        self.assertEqual((await self.plane.look(request())).state, "gone")
        self.assertEqual(self.cloud.held(), {"disks": ["vm-s"]}, "a namesake's disk stays")

    async def test_what_cannot_be_read_raises_and_a_reason_alone_does_not(self) -> None:
        self.cloud.script.html = 1
        await self.refused(self.plane.look(request()), "UNREACHABLE")
        reads = self.cloud.compute.answer

        def no_operations(method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
            if path.endswith("/operations"):
                return {"items": [3]}
            return reads(method, path, query, body)

        with mock.patch.object(self.cloud.compute, "answer", no_operations):
            look = await self.plane.look(request())
        self.assertEqual((look.state, look.said), ("gone", ""))

    async def test_a_market_that_is_none(self) -> None:
        await self.refused(self.plane.ask(request(market="cheap")), "INVALID")
        self.assertEqual(self.calls(), [])


class CloudClock:
    """The sweep's time is the cloud's: it passes for both when the sweep waits."""

    def __init__(self, cloud: FakeGoogle) -> None:
        self.cloud = cloud
        self.naps = 0
        self.wake = asyncio.Event()

    def now(self) -> float:
        return self.cloud.world.now

    async def sleep(self, seconds: float) -> None:
        self.naps += 1
        self.wake.set()
        self.cloud.advance(seconds)
        await asyncio.sleep(0)


class SweepTest(ComputeCase):
    """The whole sweep over the plane."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = CloudClock(self.cloud)
        self.told: list[str] = []

    def wish(self, *zones: str, market: str = "flex-start", hours: float = 2.0) -> SweepWish:
        labels = rental_labels(RIG, OWNER, "sweep", 1_800_000_000)
        return SweepWish(
            project=PROJECT,
            machine="ct6e-standard-1t",
            name_stem=RIG,
            places=[SweepPlace(zone, market) for zone in zones or (ZONE, OTHER)],
            deadline_unix=self.clock.now() + hours * HOUR,
            life_s=14_400,
            labels=labels,
        )

    def sweep(self, wish: SweepWish) -> CapacitySweep:
        folder = self.folder / "sweep"
        folder.mkdir(exist_ok=True)
        return CapacitySweep(
            self.plane, wish, folder, self.clock, self.told.append, reader=read_in_process
        )

    def assert_one(self, name: str) -> None:
        self.assertEqual(self.cloud.held(), {"instances": [name], "disks": [name]})

    async def test_the_first_zone_is_stocked_out_and_the_second_grants(self) -> None:
        for late in (0.0, 40.0):
            with self.subTest(late=late):
                self.cloud.script.operation_s = late
                self.cloud.script.stockout = {ZONE}
                sweep = self.sweep(self.wish())
                record = await sweep.run()
                assert record.found is not None
                self.assertEqual(record.found.zone, OTHER)
                self.assertEqual([one.ended for one in record.attempts], ["stockout", "granted"])
                self.assert_one(record.found.request.name)
                rental = await self.plane.describe(record.found.request.name, OTHER)
                self.assertEqual(rental.provider_id, record.found.provider_id)
                self.assertTrue(is_ours(rental.labels, RIG, OWNER))
                self.cloud.script.operation_s = 0.0
                await self.plane.destroy(rental)
                await sweep.release()
                self.cloud.advance(HOUR)

    async def test_the_zone_that_the_provider_names_is_asked_next(self) -> None:
        self.cloud.script.stockout = {ZONE, OTHER}
        self.cloud.script.hint = ("us-central1-b",)
        record = await self.sweep(self.wish(ZONE, OTHER, "us-central1-b")).run()
        assert record.found is not None
        self.assertEqual([one.zone for one in record.attempts], [ZONE, "us-central1-b"])

    async def test_a_queue_that_stands_still_is_left_and_nothing_stays_in_it(self) -> None:
        self.cloud.script.never = {ZONE}
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assertEqual([one.ended for one in record.attempts], ["left", "granted"])
        self.assert_one(record.found.request.name)
        self.assertTrue(any("costs nothing until granted" in one for one in self.told))

    async def test_a_machine_of_a_lost_call_is_found_and_kept_as_the_one(self) -> None:
        self.cloud.script.lost, self.cloud.script.lost_by = 1, "cut"
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assertEqual(record.found.zone, ZONE)
        self.assert_one(record.found.request.name)

    async def test_a_disk_that_a_refusal_left_is_cleared_away(self) -> None:
        self.cloud.script.stockout = {ZONE}
        self.cloud.script.half_made = True
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assert_one(record.found.request.name)

    async def test_a_missing_permission_stops_it_with_nothing_left(self) -> None:
        self.cloud.script.denied = {ZONE}
        await self.refused(self.sweep(self.wish()).run(), "DENIED")
        self.assertEqual(self.cloud.held(), {})

    async def test_no_quota_anywhere(self) -> None:
        self.cloud.script.quota = {ZONE, OTHER}
        await self.refused(self.sweep(self.wish(hours=0.5)).run(), "QUOTA")
        self.assertEqual(self.cloud.held(), {})

    async def test_a_delete_that_does_not_take_is_unknown_and_named(self) -> None:
        self.cloud.script.never = {ZONE}
        self.plane.gone_s = 20.0
        sweep = self.sweep(self.wish(ZONE, hours=0.1))

        async def run() -> None:
            running = asyncio.ensure_future(sweep.run())
            while not self.cloud.held():
                await asyncio.sleep(0.01)
            (name,) = self.cloud.held()["instances"]
            self.cloud.script.stubborn = {name}
            self.machine(name).pop("params")  # nor does the provider withdraw it
            await running

        error = await self.refused(run(), "UNKNOWN")
        live = sweep.record.live
        assert live is not None
        self.assertIn(live.name, error.what)
        self.cloud.script.stubborn.clear()
        self.cloud.script.never.clear()
        record = await self.sweep(self.wish(OTHER)).run()  # settles the first before it asks
        assert record.found is not None
        self.assert_one(record.found.request.name)
        self.assertEqual(record.found.zone, OTHER)

    async def test_cancelled_while_it_waits_it_leaves_nothing(self) -> None:
        self.cloud.script.never = {ZONE}
        sweep = self.sweep(self.wish(ZONE))
        running = asyncio.ensure_future(sweep.run())
        while self.clock.naps < 2:
            await asyncio.sleep(0.01)
        self.assertEqual(len(self.cloud.held()["instances"]), 1)
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await running
        self.assertEqual(self.cloud.held(), {})
        self.assertIsNone(sweep.record.live)

    async def test_killed_while_it_waits_the_next_one_settles_what_it_left(self) -> None:
        self.cloud.script.never = {ZONE}
        folder = self.folder / "sweep"
        folder.mkdir()
        source = f"""
            import asyncio, sys, time
            from pathlib import Path
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from forge.parts.knowledge.sweep_plan import SweepPlace, SweepWish
            from forge.parts.planes.compute_engine import ComputeEngine
            from forge.parts.planes.compute_order import ComputeEngineSettings
            from forge.parts.planes.sweep import CapacitySweep
            from forge.parts.planes.sweep_plane import WallClock
            from forge.sweep_market import read_in_process
            settings = ComputeEngineSettings(project={PROJECT!r}, budget_usd=6.0)
            boot = {{"startup-script": Path({str(self.boot["startup-script"])!r})}}
            plane = ComputeEngine(lambda: settings, lambda: boot)
            wish = SweepWish({PROJECT!r}, "ct6e-standard-1t", {RIG!r},
                [SweepPlace({ZONE!r}, "flex-start")], time.time() + 7200, 14400,
                labels={dict(rental_labels(RIG, OWNER, "x", 1_800_000_000))!r})
            sweep = CapacitySweep(plane, wish, Path({str(folder)!r}), WallClock(),
                reader=read_in_process)
            asyncio.run(sweep.run())
        """
        program = [sys.executable, "-c", textwrap.dedent(source)]
        child = subprocess.Popen(program, env=self.environment, start_new_session=True)
        try:
            for _ in range(1200):
                if self.cloud.held() or child.poll() is not None:
                    break
                await asyncio.sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        (left,) = self.cloud.held()["instances"]
        sent = self.cloud.sent("POST", "/instances")[-1].body
        self.assertTrue(is_ours(sent["labels"], RIG, OWNER), "labelled from the call on")
        self.assertIn("expires", sent["labels"])
        self.assertEqual(sent["scheduling"]["instanceTerminationAction"], "DELETE")
        record = await self.sweep(self.wish(OTHER)).run()
        assert record.found is not None
        self.assertNotIn(left, self.cloud.held()["instances"])
        self.assert_one(record.found.request.name)

    async def test_killed_and_never_looked_at_again_the_provider_ends_it(self) -> None:
        self.cloud.script.queue_s = 100.0
        asked = request(valid_s=240.0)
        await self.plane.ask(asked)
        self.cloud.advance(100 + 4 * HOUR + 1)
        self.assertEqual(self.cloud.held(), {})
        self.cloud.script.never = {ZONE}
        await self.plane.ask(request(name="vm-t", valid_s=240.0))
        self.cloud.advance(241)
        self.assertEqual(self.cloud.held(), {}, "a request nobody waits for leaves its queue")


if __name__ == "__main__":
    unittest.main()
