"""The plane of the Cloud TPU API, through the stand-in gcloud, against a fake Google."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.parts.boundaries.gcloud_answers import GcloudAnswer
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.process import run_program
from forge.parts.knowledge.refusal_answer import Refusal
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest, SweepWish
from forge.parts.planes.capacity_plane import Order, Rental, RentalMarket, rental_labels
from forge.parts.planes.cloud_tpu import CloudTpu
from forge.parts.planes.host_plane import HostCommand
from forge.parts.planes.sweep import CapacitySweep
from forge.parts.planes.tpu_catalogue import (
    TPU_API_ZONES,
    TPU_FLEX_ZONES,
    TPU_QUOTAS,
    tpu_availability,
    tpu_chips,
    tpu_limit,
    tpu_price,
)
from forge.parts.planes.tpu_order import (
    CloudTpuSettings,
    tpu_account,
    tpu_cautions,
    tpu_hard_stop,
    tpu_leave_url,
    tpu_markets,
    tpu_order_call,
    tpu_zones,
)
from forge.parts.planes.tpu_reads import refuse_for_all
from forge.parts.planes.tpu_things import (
    TpuThing,
    is_node_of,
    tpu_ended,
    tpu_holders,
    tpu_look,
    tpu_machines,
    tpu_place,
    tpu_rental,
    tpu_things,
    tpu_unix,
)
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_world import GoogleScript

PROJECT = "fake-proj"
RIG, OWNER = "tpu-vllm-v5e1-2b", "a1b2c3"
HOME, OTHER, THIRD = "us-west4-a", "us-central1-a", "us-south1-a"
ZONES = TPU_API_ZONES["v5e"]
PREEMPTIBLE, STANDARD = TPU_QUOTAS["v5e"]
SOURCE = "#!/usr/bin/env python3\nprint('boot, and more')\n"
EXPIRED = "The queued resource request has expired before it could be fulfilled."


def settings(**changes: Any) -> CloudTpuSettings:
    """The values of a rig, as its tpu.env would give them."""
    values = {"project": PROJECT, "budget_usd": 10.0, "service_account": "rig-machine", **changes}
    return CloudTpuSettings(**values)


def labels(intent: str = "create-1") -> dict[str, str]:
    return rental_labels(RIG, OWNER, intent, 1_900_000_000)


def order(
    name: str = "rig-1",
    zone: str = HOME,
    market: RentalMarket = "flex-start",
    intent: str = "create-1",
    life_s: int = 14_400,
    valid_s: int = 3600,
) -> Order:
    return Order(name, zone, intent, labels(intent), life_s, market, valid_s)


def asked(order: Order) -> SweepRequest:
    """The request of a sweep that asks for the same."""
    return SweepRequest(
        name=order.name,
        zone=order.zone,
        market=order.market,
        project=PROJECT,
        machine="v5litepod-1",
        intent=order.intent,
        asked_unix=0.0,
        patience_s=float(order.valid_s),
        valid_s=float(order.valid_s),
        life_s=order.life_s,
        labels=order.labels,
    )


async def read_at_once(text: str, error_class: ErrorClass | None) -> Refusal:
    return read_refusal(text, error_class)


class CloudClock:
    """A sweep's clock that is the cloud's: waiting is what lets its requests go their way."""

    def __init__(self, cloud: FakeGoogle) -> None:
        self.cloud = cloud
        self.most_alive = 0

    def now(self) -> float:
        return self.cloud.world.now

    async def sleep(self, seconds: float) -> None:
        held = self.cloud.held()
        alive = set(held.get("queued", [])) | set(held.get("nodes", []))
        self.most_alive = max(self.most_alive, len(alive))
        self.cloud.advance(seconds)
        await asyncio.sleep(0)


class CloudCase(unittest.IsolatedAsyncioTestCase):
    """A plane over the stand-in, with a fake Google of its own."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.journal = fake_gcloud(self.folder / "bin")
        zones = (*ZONES, "europe-west4-a", "us-east5-a")
        quotas = {PREEMPTIBLE: 4, STANDARD: 1}
        self.cloud = self.enterContext(FakeGoogle(PROJECT, GoogleScript(zones=zones)))
        self.cloud.script.quotas.update(quotas)
        self.values = settings()
        for name, text in (("boot.py", SOURCE), ("boot.json", '{"v": 1, "rig": "a, b"}')):
            (self.folder / name).write_text(text)
        self.plane = self.plane_of(self.cloud.environment(self.folder, str(self.folder / "bin")))

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [], "something asked for a host outside")

    def plane_of(self, environment: Mapping[str, str]) -> CloudTpu:
        self.environment = dict(environment)
        return CloudTpu(lambda: self.values, self.boot, environment)

    def boot(self) -> dict[str, Path]:
        folder = self.folder
        return {"startup-script": folder / "boot.py", "gemma4-boot": folder / "boot.json"}

    def calls(self) -> list[list[str]]:
        """The argument lists so far, without the process's number."""
        return [json.loads(line)[1:] for line in self.journal.read_text().splitlines()]

    def sent_calls(self, *words: str) -> list[list[str]]:
        return [argv for argv in self.calls() if all(word in argv for word in words)]

    async def refused(self, act: Any, error_class: ErrorClass) -> RigError:
        """The RigError that awaiting `act` raises, which must be of that class."""
        with self.assertRaises(RigError) as raised:
            await act
        self.assertEqual(raised.exception.error_class, error_class, raised.exception)
        return raised.exception

    async def running(self, **changes: Any) -> Rental:
        """A machine that was asked for and granted."""
        one = order(**changes)
        await self.plane.create(one)
        self.cloud.advance(1)
        rental = await self.plane.describe(one.name, one.zone)
        self.assertEqual((rental.kind, rental.state), ("machine", "running"))
        return rental

    def queued_path(self, name: str = "rig-1", zone: str = HOME) -> str:
        return f"projects/{PROJECT}/locations/{zone}/queuedResources/{name}"

    def node_path(self, name: str = "rig-1", zone: str = HOME) -> str:
        return f"projects/{PROJECT}/locations/{zone}/nodes/{name}"

    def set_queued(self, state: str, name: str = "rig-1", **more: Any) -> None:
        """Puts a queued resource into a state that the clock does not lead it out of."""
        with self.cloud.lock:
            self.cloud.tpu.fixed.add(name)
            resource = self.cloud.tpu.queue[self.queued_path(name)]
            resource["state"] = {"state": state, **more}

    def forget_request(self, name: str = "rig-1") -> None:
        """The request is gone, and its node outlives it."""
        with self.cloud.lock:
            del self.cloud.tpu.queue[self.queued_path(name)]


class OrderTest(unittest.TestCase):
    """What goes into the request; no program is started."""

    boot = {"startup-script": Path("/rig/boot.py"), "gemma4-boot": Path("/rig/boot.json")}

    def call(self, values: CloudTpuSettings, market: RentalMarket, **changes: Any) -> Any:
        return tpu_order_call(values, order(market=market, **changes), self.boot)

    def refusal(self, values: CloudTpuSettings, market: RentalMarket) -> RigError:
        with self.assertRaises(RigError) as raised:
            self.call(values, market)
        return raised.exception

    def test_a_flex_start_goes_by_alpha_with_its_end_and_the_end_of_its_wait(self) -> None:
        call = self.call(settings(), "flex-start", life_s=5400, valid_s=90)
        self.assertEqual(call.command[:2], ("alpha", "compute"))
        self.assertEqual(call.command[-2:], ("queued-resources", "create"))
        self.assertEqual(call.name, "rig-1")
        wanted = {
            "zone": HOME,
            "node-id": "rig-1",
            "accelerator-type": "v5litepod-1",
            "runtime-version": "v2-alpha-tpuv5-lite",
            "provisioning-model": "flex-start",
            "max-run-duration": "5400s",
            "valid-until-duration": "90s",
            "labels": labels(),
            "metadata-from-file": self.boot,
            "service-account": f"rig-machine@{PROJECT}.iam.gserviceaccount.com",
            "scopes": "https://www.googleapis.com/auth/cloud-platform",
            "async": True,
        }
        self.assertEqual(call.flags, wanted)

    def test_without_a_wait_of_its_own_a_request_still_does_not_wait_for_ever(self) -> None:
        for market in ("flex-start", "spot", "on-demand"):
            values = settings(no_hard_stop_ok=True)
            call = self.call(values, market, valid_s=0)
            self.assertEqual(call.flags["valid-until-duration"], "7200s", market)

    def test_what_never_ends_by_itself_is_refused_unless_that_is_wanted(self) -> None:
        for market in ("spot", "on-demand"):
            error = self.refusal(settings(), market)
            self.assertEqual(error.error_class, "DENIED")
            self.assertIn(market, error.what)
            self.assertIn("NO_HARD_STOP_OK=1", error.next_step)
        wanted = settings(no_hard_stop_ok=True)
        spot, plain = self.call(wanted, "spot"), self.call(wanted, "on-demand")
        for call in (spot, plain):
            self.assertEqual(call.command, ("compute", "tpus", "queued-resources", "create"))
            self.assertNotIn("provisioning-model", call.flags)
            self.assertNotIn("max-run-duration", call.flags, "the API takes it of none of these")
        self.assertIs(spot.flags["spot"], True)
        self.assertNotIn("spot", plain.flags)

    def test_other_ways_of_renting_are_refused_whatever_is_allowed(self) -> None:
        error = self.refusal(settings(no_hard_stop_ok=True), "reserved")
        self.assertEqual(error.error_class, "INVALID")

    def test_the_machine_never_acts_as_the_default_account(self) -> None:
        error = self.refusal(settings(service_account=""), "flex-start")
        self.assertEqual(error.error_class, "INVALID")
        self.assertIn("SERVICE_ACCOUNT", error.what)
        self.assertIn("SERVICE_ACCOUNT", " ".join(tpu_cautions(settings(service_account=""))))
        self.assertEqual(tpu_cautions(settings()), ())
        whole = "another-one@elsewhere-1.iam.gserviceaccount.com"
        self.assertEqual(tpu_account(settings(service_account=whole)), whole)
        domain = settings(project="example.com:rigs-1")
        self.assertEqual(
            tpu_account(domain), "rig-machine@rigs-1.example.com.iam.gserviceaccount.com"
        )

    def test_the_network_is_named_only_where_the_settings_name_one(self) -> None:
        flags = self.call(settings(), "flex-start").flags
        for name in ("network", "subnetwork", "internal-ips"):
            self.assertNotIn(name, flags)
        values = settings(network="inner", subnet="inner-west", external_ip=False)
        flags = self.call(values, "flex-start").flags
        found = (flags["network"], flags["subnetwork"], flags["internal-ips"])
        self.assertEqual(found, ("inner", "inner-west", True))
        self.assertIn("NAT", " ".join(tpu_cautions(values)))

    def test_markets_and_zones_come_from_the_settings_in_their_order(self) -> None:
        self.assertEqual(tpu_markets(settings()), ["flex-start"])
        two = settings(markets="spot, flex-start, spot")
        self.assertEqual(tpu_markets(two), ["spot", "flex-start"])
        with self.assertRaises(RigError) as raised:
            tpu_markets(settings(markets="flex-start,reserved"))
        self.assertEqual(raised.exception.error_class, "INVALID")
        self.assertIn("reserved", raised.exception.what)
        self.assertEqual(tpu_zones(settings()), list(ZONES))
        self.assertEqual(tpu_zones(settings(zones="us-west1-c, us-west4-a")), ["us-west1-c", HOME])
        with self.assertRaises(RigError) as raised:
            tpu_zones(settings(chip="v9z"))
        self.assertIn("ZONES", raised.exception.next_step)

    def test_the_hard_stop_is_told_as_far_as_there_is_one(self) -> None:
        self.assertIn("max-run-duration", tpu_hard_stop(settings()))
        self.assertNotIn("never", tpu_hard_stop(settings()))
        both = tpu_hard_stop(settings(markets="flex-start,spot"))
        self.assertIn("max-run-duration", both)
        self.assertIn("as spot it would never end", both)
        for markets in ("spot", "on-demand", "spot,on-demand"):
            self.assertEqual(tpu_hard_stop(settings(markets=markets)), "", markets)
        self.assertEqual(set(CloudTpu.endless_markets), {"spot", "on-demand"})

    def test_settings_refuse_what_would_end_up_in_an_argument(self) -> None:
        bad = {
            "project": "a/b",
            "accelerator_type": "v5litepod-1;x",
            "runtime_version": "--help",
            "service_account": "x@y",
            "network": "../n",
            "subnet": "a,b",
            "chip": "V5E",
        }
        for key, value in bad.items():
            with self.subTest(key), self.assertRaises(ValueError):
                settings(**{key: value})


class CatalogueTest(unittest.TestCase):
    """Tables, sizes, prices, limits."""

    def test_sizes(self) -> None:
        sizes = {"v5litepod-1": 1, "v5litepod-8": 8, "v6e-4": 4, "v5p-8": 4, "v4-8": 4, "v3-1": 1}
        self.assertEqual({kind: tpu_chips(kind) for kind in sizes}, sizes)
        for bad in ("", "v6e", "v6e-0", "ct6e-standard-1t", "v6e--1"):
            with self.subTest(bad), self.assertRaises(RigError):
                tpu_chips(bad)

    def test_prices_are_the_chips_and_name_their_source(self) -> None:
        for market, price in (("flex-start", 0.60), ("spot", 0.48), ("on-demand", 1.20)):
            found, source = tpu_price("v5e", "v5litepod-1", HOME, market)  # type: ignore[arg-type]
            self.assertEqual(found, price)
            self.assertIn("2026", source)
        self.assertEqual(tpu_price("v5e", "v5litepod-8", HOME, "flex-start")[0], 4.8)
        self.assertEqual(tpu_price("v6e", "v6e-1", "us-east5-a", "flex-start")[0], 1.35)
        for zone, market in (("us-south1-a", "flex-start"), ("us-nowhere1-a", "spot")):
            found, source = tpu_price("v5e", "v5litepod-1", zone, market)  # type: ignore[arg-type]
            self.assertIsNone(found)
            self.assertIn("no price", source)
        self.assertIsNone(tpu_price("v5e", "v5litepod-1", HOME, "reserved")[0])

    def test_every_zone_of_the_tables_is_one_and_flex_zones_are_among_them(self) -> None:
        for chip, zones in TPU_API_ZONES.items():
            self.assertEqual(len(set(zones)), len(zones))
            self.assertLessEqual(set(TPU_FLEX_ZONES[chip]), set(zones))
            self.assertIn(chip, TPU_QUOTAS)

    def test_limits_the_first_entry_that_applies_counts(self) -> None:
        def entry(value: str | None, zone: str = "", places: Sequence[str] = ()) -> dict[str, Any]:
            details = {} if value is None else {"value": value}
            dimensions = {"zone": zone} if zone else {}
            return {
                "details": details,
                "dimensions": dimensions,
                "applicableLocations": list(places),
            }

        here, rest = entry("8", HOME, [HOME]), entry("64", "", [HOME, OTHER])
        self.assertEqual(tpu_limit({"dimensionsInfos": [here, rest]}, HOME), 8)
        self.assertEqual(tpu_limit({"dimensionsInfos": [here, rest]}, OTHER), 64)
        self.assertIsNone(tpu_limit({"dimensionsInfos": [entry("-1")]}, HOME))
        # An absent value is the 0 that proto3's JSON leaves out.
        self.assertEqual(tpu_limit({"dimensionsInfos": [entry(None, HOME)]}, HOME), 0)
        silent: tuple[Any, ...] = (
            {},
            None,
            [],
            {"dimensionsInfos": "x"},
            {"dimensionsInfos": [here]},
            {"dimensionsInfos": [{"dimensions": {"zone": OTHER}}, 7]},
            {"dimensionsInfos": [entry("many", OTHER)]},
        )
        for info in silent:
            with self.subTest(info), self.assertRaises(RigError) as raised:
                tpu_limit(info, OTHER)
            self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_what_a_list_says_is_never_that_one_is_free(self) -> None:
        has = GcloudAnswer([{"type": "v5litepod-1"}, {"type": "v5litepod-4"}])
        lacks = GcloudAnswer([{"type": "v6e-1"}])
        absent = RigError("DENIED", f"Location {HOME} is not found or access is unauthorized.")
        broken = RigError("UNREACHABLE", "503")
        wanted = ((has, "unknown"), (lacks, "no"), (absent, "no"), (broken, "unknown"))
        for answer, available in wanted:
            found, how = tpu_availability(answer, "v5e", "v5litepod-1", HOME, "flex-start")
            self.assertEqual(found, available, how)
            self.assertTrue(how)
        _, documented = tpu_availability(has, "v5e", "v5litepod-1", HOME, "flex-start")
        _, other = tpu_availability(has, "v5e", "v5litepod-1", "us-west1-c", "flex-start")
        _, spot = tpu_availability(has, "v5e", "v5litepod-1", "us-west1-c", "spot")
        self.assertNotIn("does not name it", documented + spot)
        self.assertIn("does not name it for flex-start", other)


class ThingsTest(unittest.TestCase):
    """The API's objects as rentals and looks."""

    born = "2026-11-30T09:00:00.123456789Z"

    def queued(self, told: Any, name: str = "q", **more: Any) -> dict[str, Any]:
        """A queued resource; `told` is its state, or all that the API says of it."""
        state = told if isinstance(told, dict) else {"state": told, "stateInitiator": "SERVICE"}
        node = {"acceleratorType": "v5litepod-1", "labels": labels()}
        return {
            "name": f"projects/77/locations/{HOME}/queuedResources/{name}",
            "createTime": self.born,
            "state": state,
            "tpu": {"nodeSpec": [{"nodeId": name, "node": node}]},
            **more,
        }

    def node(self, state: Any, name: str = "q", of: str = "q", **more: Any) -> dict[str, Any]:
        link = f"projects/77/locations/{HOME}/queuedResources/{of}"
        return {
            "name": f"projects/77/locations/{HOME}/nodes/{name}",
            "id": "700",
            "createTime": "2026-11-30T10:00:00Z",
            "state": state,
            "acceleratorType": "v5litepod-1",
            "labels": labels("node"),
            **({"queuedResource": link} if of else {}),
            **more,
        }

    def rental(self, queued: Any, node: Any = None) -> Rental:
        return tpu_rental(TpuThing(HOME, "q", queued, node), PROJECT, "v5e", "v5litepod-1")

    def test_every_state_of_a_queued_resource_without_a_node(self) -> None:
        states = {
            "CREATING": ("request", "pending", "queued"),
            "ACCEPTED": ("request", "pending", "queued"),
            "WAITING_FOR_RESOURCES": ("request", "pending", "queued"),
            "PROVISIONING": ("machine", "pending", "starting"),
            "ACTIVE": ("machine", "pending", "starting"),
            "FAILED": ("request", "failed", "refused"),
            "SUSPENDING": ("machine", "stopping", "refused"),
            "SUSPENDED": ("request", "stopped", "refused"),
            "DELETING": ("machine", "stopping", "refused"),
        }
        for state, wanted in states.items():
            rental = self.rental(self.queued(state, spot={}))
            look = tpu_look(TpuThing(HOME, "q", self.queued(state, spot={}), None))
            self.assertEqual((rental.kind, rental.state, look.state), wanted, state)
            self.assertEqual(rental.labels, labels())
            self.assertEqual(rental.market, "spot")
            self.assertEqual(bool(look.said), look.state == "refused", state)
            costs = 0.0 if rental.kind == "request" else 0.48
            self.assertEqual(rental.price_per_hour_usd, costs, state)

    def test_every_state_of_a_node_of_an_active_request(self) -> None:
        states = {
            "CREATING": ("pending", "starting"),
            "STARTING": ("pending", "starting"),
            "UNHIDING": ("pending", "starting"),
            "READY": ("running", "granted"),
            "RESTARTING": ("running", "starting"),
            "REIMAGING": ("running", "starting"),
            "REPAIRING": ("running", "starting"),
            "STOPPING": ("stopping", "refused"),
            "DELETING": ("stopping", "refused"),
            "HIDING": ("stopping", "refused"),
            "STOPPED": ("stopped", "refused"),
            "HIDDEN": ("stopped", "refused"),
            "PREEMPTED": ("stopped", "refused"),
            "TERMINATED": ("stopped", "refused"),
            "UNKNOWN": ("failed", "refused"),
        }
        for state, wanted in states.items():
            for queued in (self.queued("ACTIVE"), None):
                rental = self.rental(queued, self.node(state))
                look = tpu_look(TpuThing(HOME, "q", queued, self.node(state)))
                self.assertEqual(("machine", rental.state, look.state), (rental.kind, *wanted))
                self.assertEqual(bool(look.said), look.state == "refused", state)
                self.assertEqual((look.provider_id, rental.provider_id), ("700", "700"))
                self.assertEqual(look.created_at, rental.created_at)
                self.assertEqual(rental.labels["intent"], "node")

    def test_a_request_that_takes_its_node_away_decides_over_it(self) -> None:
        for state in ("SUSPENDING", "DELETING"):
            look = tpu_look(TpuThing(HOME, "q", self.queued(state), self.node("READY")))
            self.assertEqual(look.state, "refused", state)
            rental = self.rental(self.queued(state), self.node("READY"))
            self.assertEqual((rental.kind, rental.state), ("machine", "stopping"))

    def test_a_state_that_is_not_known_is_never_taken_for_absence(self) -> None:
        odd = ("", "STATE_UNSPECIFIED", "QUEUED_FOR_MARS", 7, None)
        for state in odd:
            for queued, node in (
                (self.queued({"state": state}), None),
                (None, self.node(state)),
                (self.queued("ACTIVE"), self.node(state)),
            ):
                thing = TpuThing(HOME, "q", queued, node)
                for read in (tpu_look, lambda one: tpu_rental(one, PROJECT, "v5e", "v5litepod-1")):
                    with self.subTest(state), self.assertRaises(RigError) as raised:
                        read(thing)
                    self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_how_it_is_rented(self) -> None:
        ways: tuple[tuple[dict[str, Any], str], ...] = (
            ({}, "on-demand"),
            ({"provisioningModel": "STANDARD"}, "on-demand"),
            ({"provisioningModel": "FLEX_START"}, "flex-start"),
            ({"provisioningModel": "SPOT"}, "spot"),
            ({"spot": {}}, "spot"),
            ({"spot": {}, "provisioningModel": "STANDARD"}, "spot"),  # gcloud 528's alpha --spot
            ({"guaranteed": {"reserved": True}}, "reserved"),
            ({"guaranteed": {}}, "on-demand"),
            ({"reservationName": "r"}, "reserved"),
        )
        for more, market in ways:
            self.assertEqual(self.rental(self.queued("ACTIVE", **more)).market, market, more)
        for rules, market in (
            ({"spot": True}, "spot"),
            ({"preemptible": True}, "spot"),
            ({"reserved": True}, "reserved"),
            ({}, "on-demand"),
        ):
            alone = self.node("READY", of="", schedulingConfig=rules)
            self.assertEqual(self.rental(None, alone).market, market, rules)

    def test_prices_are_told_of_the_same_kind_of_machine_alone(self) -> None:
        four = self.node("READY", acceleratorType="v5litepod-4")
        self.assertEqual(self.rental(self.queued("ACTIVE"), four).price_per_hour_usd, 4.8)
        other = self.node("READY", acceleratorType="v6e-1")
        self.assertIsNone(self.rental(self.queued("ACTIVE"), other).price_per_hour_usd)

    def test_times_are_read_with_nanoseconds_and_refused_otherwise(self) -> None:
        self.assertAlmostEqual(tpu_unix("2026-11-30T00:00:00.5Z") % 60, 0.5, places=3)
        self.assertEqual(self.rental(self.queued("ACCEPTED")).created_at, self.born)
        for bad in ("", "yesterday", "2026-11-30T09:00:00"):
            with self.subTest(bad), self.assertRaises(RigError) as raised:
                self.rental(self.queued("ACCEPTED", createTime=bad))
            self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_a_node_belongs_to_the_request_that_it_names(self) -> None:
        self.assertTrue(is_node_of(self.node("READY"), "q"))
        self.assertTrue(is_node_of(self.node("READY", of=""), "q"))
        self.assertFalse(is_node_of(self.node("READY", of="other"), "q"))
        things = tpu_things(
            [self.queued("ACTIVE", "q"), self.queued("WAITING_FOR_RESOURCES", "r")],
            [
                self.node("READY", "n1", "q"),
                self.node("READY", "r", "foreign"),
                self.node("READY", "s", ""),
            ],
        )
        found = [(thing.name, thing.queued is not None, thing.node is not None) for thing in things]
        self.assertEqual(
            found, [("q", True, True), ("r", True, False), ("r", False, True), ("s", False, True)]
        )

    def test_a_thing_without_a_readable_name_is_no_thing(self) -> None:
        for name in ("", "q", "projects/p/locations/z/instances/q", 7, None):
            with self.subTest(name), self.assertRaises(RigError) as raised:
                tpu_place({"name": name})
            self.assertEqual(raised.exception.error_class, "UNKNOWN")

    def test_refusals_are_told_so_that_a_sweep_reads_them(self) -> None:
        def reason(thing: TpuThing) -> str:
            return read_refusal(tpu_look(thing).said).reason

        def failed(message: str) -> TpuThing:
            error = {"code": 8, "message": message}
            state = {"state": "FAILED", "failedData": {"error": error}}
            return TpuThing(HOME, "q", self.queued(state), None)

        quota = f"Quota limit '{PREEMPTIBLE}' has been exceeded. Limit: 0 in zone {HOME}."
        self.assertEqual(reason(failed(quota)), "quota")
        self.assertEqual(read_refusal(quota).scope, "zone")
        stockout = f'There is no more capacity in the zone "{HOME}"; you can try in another zone'
        self.assertEqual(reason(failed(stockout)), "stockout")
        preempted = TpuThing(HOME, "q", self.queued("ACTIVE"), self.node("PREEMPTED"))
        self.assertEqual(reason(preempted), "stockout")
        for state in ("SUSPENDED", "SUSPENDING"):
            thing = TpuThing(HOME, "q", self.queued(state), None)
            self.assertEqual(reason(thing), "expired", tpu_look(thing).said)

    def test_what_holds_a_quota(self) -> None:
        things = [
            TpuThing(HOME, "flex", self.queued("FAILED", provisioningModel="FLEX_START"), None),
            TpuThing(HOME, "spot", self.queued("WAITING_FOR_RESOURCES", spot={}), None),
            TpuThing(HOME, "plain", self.queued("SUSPENDED"), None),
            TpuThing(HOME, "big", None, self.node("READY", acceleratorType="v5litepod-4")),
            TpuThing(HOME, "else", None, self.node("READY", acceleratorType="v6e-1")),
        ]
        spot = tpu_holders(things, "v5litepod-1", "flex-start")
        self.assertEqual([thing.name for thing in spot], ["flex", "spot"])
        plain = tpu_holders(things, "v5litepod-1", "on-demand")
        self.assertEqual([thing.name for thing in plain], ["plain", "big"])
        self.assertEqual(tpu_machines(plain, "v5litepod-1"), 5)
        self.assertEqual(tpu_machines(plain, "v5litepod-4"), 2)
        self.assertEqual([thing.name for thing in things if thing.dead], ["flex", "plain"])

    def test_what_became_of_it(self) -> None:
        now = tpu_unix("2026-11-30T12:00:00Z")

        def ended(queued: Any, node: Any = None, provider_id: str = "700") -> str:
            return tpu_ended(TpuThing(HOME, "q", queued, node), provider_id, now)

        def suspended(by: str, **more: Any) -> dict[str, Any]:
            state = {"state": "SUSPENDED", "stateInitiator": by}
            return self.queued(state, **more)

        self.assertEqual(ended(self.queued("ACTIVE"), self.node("READY")), "")
        self.assertEqual(ended(self.queued("ACTIVE")), "")
        self.assertIn("another machine", ended(self.queued("ACTIVE"), self.node("READY"), "699"))
        noted = f"projects/77/locations/{HOME}/queuedResources/q"  # before there was a node
        self.assertEqual(ended(self.queued("ACTIVE"), self.node("READY"), noted), "")
        self.assertEqual(ended(self.queued("ACTIVE"), self.node("READY"), ""), "")
        self.assertIn("preempted", ended(self.queued("ACTIVE"), self.node("PREEMPTED")))
        self.assertIn("preempted", ended(None, self.node("PREEMPTED")))
        self.assertIn("preempted", ended(suspended("SERVICE", spot={})))
        self.assertIn("by somebody", ended(suspended("USER", spot={})))
        flex: dict[str, Any] = {"provisioningModel": "FLEX_START"}
        over = {"runDuration": {"terminationTime": "2026-11-30T11:00:00Z"}}
        later = {"runDuration": {"terminationTime": "2026-11-30T13:00:00Z"}}
        self.assertIn("time ended", ended(suspended("SERVICE", **flex, **over)))
        self.assertIn("before its time", ended(suspended("SERVICE", **flex, **later)))
        self.assertIn("or it was taken back", ended(suspended("SERVICE", **flex)))
        self.assertIn("maintenance", ended(None, self.node("TERMINATED")))
        self.assertIn("disk is still there", ended(None, self.node("STOPPED")))
        self.assertIn("UNKNOWN", ended(None, self.node("UNKNOWN")))
        self.assertIn("being deleted", ended(self.queued("DELETING"), self.node("DELETING")))
        error = {"message": "No\x1b[31m \u202ecapacity"}
        failed = {"state": "FAILED", "failedData": {"error": error}}
        self.assertEqual(ended(self.queued(failed)), "its request failed: No capacity")
        self.assertIn("deleted", tpu_ended(None, "700", now))
        self.assertIn("never does by itself", tpu_ended(None, "700", now))


class CreateTest(CloudCase):
    """Asking for a machine, and what it is refused with."""

    async def test_a_flex_start_from_the_queue_to_its_end(self) -> None:
        self.cloud.script.queue_s = 60
        await self.plane.create(order())
        (request,) = self.cloud.sent("POST", "/queuedResources")
        self.assertIn(f"/v2alpha1/projects/{PROJECT}/locations/{HOME}/", request.path)
        self.assertEqual(request.query["queuedResourceId"], "rig-1")
        body = request.body
        self.assertEqual(body["provisioningModel"], "FLEX_START")
        self.assertEqual(body["runDuration"], {"maxRunDuration": "14400s"})
        self.assertEqual(body["queueingPolicy"], {"validUntilDuration": "3600s"})
        self.assertNotIn("spot", body)
        (spec,) = body["tpu"]["nodeSpec"]
        node = spec["node"]
        self.assertEqual((spec["nodeId"], node["labels"]), ("rig-1", labels()))
        documents = {"startup-script": SOURCE, "gemma4-boot": '{"v": 1, "rig": "a, b"}'}
        self.assertEqual(node["metadata"], documents)
        account = {
            "email": f"rig-machine@{PROJECT}.iam.gserviceaccount.com",
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        }
        self.assertEqual(node["serviceAccount"], account)
        self.assertEqual((node["acceleratorType"], node["runtimeVersion"]), self.machine())
        (argv,) = self.sent_calls("create")
        self.assertIn("--async", argv)
        self.assertIn(f"--project={PROJECT}", argv)

        waits = await self.plane.describe("rig-1", HOME)
        self.assertEqual((waits.kind, waits.state, waits.market), self.waiting())
        self.assertEqual(waits.price_per_hour_usd, 0.0, "a queue costs nothing")
        self.assertEqual((waits.labels, waits.project), (labels(), PROJECT))

        self.cloud.advance(120)
        runs = await self.plane.describe("rig-1", HOME)
        self.assertEqual((runs.kind, runs.state, runs.market), ("machine", "running", "flex-start"))
        self.assertEqual((runs.labels, runs.price_per_hour_usd), (labels(), 0.60))
        self.assertTrue(runs.provider_id.isdigit(), runs)
        self.assertLessEqual(runs.created_unix, self.cloud.world.now)

        self.cloud.advance(14_400)
        self.assertEqual(self.cloud.held(), {"queued": ["rig-1"]}, "the provider ended it")
        ended = await self.plane.describe("rig-1", HOME)
        self.assertEqual((ended.kind, ended.state), ("request", "stopped"))
        self.assertEqual(ended.price_per_hour_usd, 0.0)

    def machine(self) -> tuple[str, str]:
        return self.values.accelerator_type, self.values.runtime_version

    def waiting(self) -> tuple[str, str, str]:
        return "request", "pending", "flex-start"

    async def test_spot_and_on_demand_go_by_the_released_command_with_a_clean_body(self) -> None:
        self.values = settings(no_hard_stop_ok=True, external_ip=False, network="inner")
        for number, market in enumerate(("spot", "on-demand")):
            name = f"rig-{number}"
            await self.plane.create(order(name=name, market=market))  # type: ignore[arg-type]
            request = self.cloud.sent("POST", "/queuedResources")[-1]
            self.assertIn("/tpu/v2/", request.path)
            self.assertEqual("spot" in request.body, market == "spot")
            for key in ("provisioningModel", "runDuration"):
                self.assertNotIn(key, request.body)
            network = request.body["tpu"]["nodeSpec"][0]["node"]["networkConfig"]
            self.assertEqual(network, {"enableExternalIps": False, "network": "inner"})
            rental = await self.plane.describe(name, HOME)
            self.assertEqual(rental.market, market)

    async def test_without_the_override_no_call_goes_out_for_what_never_ends(self) -> None:
        for market in ("spot", "on-demand"):
            one = order(market=market)  # type: ignore[arg-type]
            for act in (self.plane.create(one), self.plane.ask(asked(one))):
                error = await self.refused(act, "DENIED")
                self.assertIn("NO_HARD_STOP_OK", error.next_step)
        self.assertEqual(self.calls(), [])
        self.assertEqual(self.cloud.requests, [])

    async def test_settings_are_read_anew_at_each_call_and_their_fault_is_told(self) -> None:
        def faulty() -> CloudTpuSettings:
            raise RigError("INVALID", "tpu.env: PROJECT is missing")

        plane = CloudTpu(faulty, self.boot, self.environment)
        for act in (
            plane.create(order()),
            plane.offers(),
            plane.census(),
            plane.describe("rig-1", HOME),
            plane.quota(HOME, "flex-start"),
            plane.ask(asked(order())),
        ):
            await self.refused(act, "INVALID")
        with self.assertRaises(RigError):
            _ = plane.hard_stop
        self.values = settings(zones=OTHER)
        self.assertEqual({offer.zone for offer in await self.plane.offers()}, {OTHER})
        self.values = settings(zones=HOME)
        self.assertEqual({offer.zone for offer in await self.plane.offers()}, {HOME})

    async def test_a_second_of_the_name_exists_and_a_dead_one_is_told_as_such(self) -> None:
        self.cloud.script.never.add(HOME)
        await self.plane.create(order())
        live = await self.refused(self.plane.create(order()), "EXISTS")
        self.assertNotIn("dead", live.what)
        self.cloud.advance(3601)
        dead = await self.refused(self.plane.create(order()), "EXISTS")
        self.assertIn("dead request (FAILED: The queued resource request has expired", dead.what)
        self.assertEqual(dead.next_step, "destroy it first")
        await self.plane.destroy(await self.plane.describe("rig-1", HOME))
        self.cloud.script.never.clear()
        await self.running()

    async def test_a_missing_permission_and_an_api_that_is_off(self) -> None:
        self.cloud.script.denied.add(HOME)
        error = await self.refused(self.plane.create(order()), "DENIED")
        self.assertIn("tpu.queuedresources.create", error.what)
        self.cloud.script.denied.clear()
        self.cloud.script.disabled.add("tpu")
        error = await self.refused(self.plane.create(order()), "DENIED")
        self.assertIn("gcloud services enable tpu.googleapis.com", error.next_step)
        self.assertEqual(self.cloud.held(), {})

    async def test_a_project_that_is_not_there(self) -> None:
        self.values = settings(project="other-proj")
        error = await self.refused(self.plane.create(order()), "DENIED")
        self.assertIn("other-proj", error.what)

    async def test_a_login_that_is_over(self) -> None:
        (self.folder / "token").write_text("expired\n")
        for act in (
            self.plane.create(order()),
            self.plane.offers(),
            self.plane.census(),
            self.plane.describe("rig-1", HOME),
            self.plane.quota(HOME, "spot"),
        ):
            error = await self.refused(act, "AUTH")
            self.assertIn("gcloud auth login", error.next_step)

    async def test_without_gcloud_nothing_is_taken_for_absent(self) -> None:
        plane = self.plane_of({**self.environment, "PATH": str(self.folder / "nowhere")})
        for act in (
            plane.create(order()),
            plane.offers(),
            plane.census(),
            plane.describe("rig-1", HOME),
            plane.look(asked(order())),
            plane.cancel(asked(order())),
        ):
            await self.refused(act, "DENIED")

    async def test_a_create_whose_gcloud_dies_after_it_was_sent_is_unknown(self) -> None:
        self.cloud.script.lost = 1
        asking = asyncio.ensure_future(self.plane.create(order()))
        while not self.cloud.held() and not asking.done():
            await asyncio.sleep(0.02)
        number, *_ = json.loads(self.journal.read_text().splitlines()[-1])
        os.killpg(number, signal.SIGKILL)
        error = await self.refused(asking, "UNKNOWN")
        self.assertIn("may have been made", error.what)
        rental = await self.plane.describe("rig-1", HOME)
        self.assertEqual(rental.labels, labels(), "what was made is labelled and can be found")

    async def test_a_create_that_gcloud_repeats_is_told_of_its_own_success(self) -> None:
        self.cloud.script.lost, self.cloud.script.lost_by = 1, "cut"
        error = await self.refused(self.plane.create(order()), "EXISTS")
        self.assertNotIn("dead", error.what)
        rental = await self.plane.describe("rig-1", HOME)
        self.assertEqual(rental.labels["intent"], "create-1", "the label tells whose it is")
        self.assertEqual(len(self.cloud.held()["queued"]), 1)


class LookingTest(CloudCase):
    """Offers, quota, census, describe."""

    async def test_offers_cover_each_zone_and_market_of_the_settings_in_order(self) -> None:
        self.values = settings(zones=f"{OTHER},{HOME}", markets="flex-start,spot")
        offers = await self.plane.offers()
        places = [(offer.zone, offer.market) for offer in offers]
        self.assertEqual(
            places,
            [(OTHER, "flex-start"), (OTHER, "spot"), (HOME, "flex-start"), (HOME, "spot")],
        )
        prices = [offer.price_per_hour_usd for offer in offers]
        self.assertEqual(prices, [0.60, 0.245, 0.60, 0.48])
        for offer in offers:
            self.assertEqual(offer.available, "unknown")
            self.assertIn("only a request tells", offer.how_known)
            self.assertIn("2026", offer.price_source)

    async def test_offers_without_settings_are_all_known_zones_as_flex_start(self) -> None:
        offers = await self.plane.offers()
        self.assertEqual([offer.zone for offer in offers], list(ZONES))
        self.assertEqual({offer.market for offer in offers}, {"flex-start"})
        silent = [offer for offer in offers if offer.price_per_hour_usd is None]
        self.assertEqual({offer.zone for offer in silent}, {"us-south1-a", "europe-west4-b"})

    async def test_a_zone_that_lacks_the_type_or_is_none_or_is_silent(self) -> None:
        zones = f"{HOME},us-east5-a,us-nowhere1-b,{OTHER}"
        self.values = settings(zones=zones)
        self.cloud.script.unreachable.add(OTHER)
        found = {offer.zone: offer for offer in await self.plane.offers()}
        available = {zone: offer.available for zone, offer in found.items()}
        wanted = {HOME: "unknown", "us-east5-a": "no", "us-nowhere1-b": "no", OTHER: "unknown"}
        # The catalogue of an unreachable zone is not one of the things that the fake hides.
        self.assertEqual(available, wanted)
        self.assertIn("does not have v5litepod-1", found["us-east5-a"].how_known)
        self.assertIn("no such zone", found["us-nowhere1-b"].how_known)

    async def test_offers_raise_what_every_zone_was_refused_with(self) -> None:
        self.cloud.script.disabled.add("tpu")
        error = await self.refused(self.plane.offers(), "DENIED")
        self.assertIn("services enable", error.next_step)

    async def test_a_quota_by_market_in_machines(self) -> None:
        quota = await self.plane.quota(HOME, "flex-start")
        self.assertEqual((quota.name, quota.limit, quota.used), (PREEMPTIBLE, 4, 0))
        await self.running()
        quota = await self.plane.quota(HOME, "spot")
        self.assertEqual((quota.name, quota.limit, quota.used), (PREEMPTIBLE, 4, 1))
        quota = await self.plane.quota(HOME, "on-demand")
        self.assertEqual((quota.name, quota.limit, quota.used), (STANDARD, 1, 0))
        quota = await self.plane.quota(OTHER, "flex-start")
        self.assertEqual(quota.used, 0, "a quota of the zone is the zone's")
        self.values = settings(accelerator_type="v5litepod-4")
        quota = await self.plane.quota(HOME, "flex-start")
        self.assertEqual((quota.limit, quota.used), (1, 1), "one of four chips is in use")
        self.cloud.script.quota.add(OTHER)
        quota = await self.plane.quota(OTHER, "flex-start")
        self.assertEqual(quota.limit, 0)

    async def test_dead_requests_hold_the_quota_and_are_named(self) -> None:
        self.cloud.script.quotas[PREEMPTIBLE] = 1
        self.cloud.script.never.add(HOME)
        await self.plane.create(order())
        self.cloud.advance(3601)
        self.cloud.script.never.clear()
        quota = await self.plane.quota(HOME, "flex-start")
        self.assertEqual((quota.limit, quota.used), (1, 1))
        self.assertIn("dead, but held until deleted: rig-1", quota.name)
        # The provider says the same, whoever asks.
        await self.plane.create(order("rig-2", intent="create-2"))
        look = await self.plane.look(asked(order("rig-2")))
        self.assertEqual(look.state, "refused")
        self.assertEqual(read_refusal(look.said).reason, "quota", look)
        for name in ("rig-1", "rig-2"):
            await self.plane.destroy(await self.plane.describe(name, HOME))
        self.assertEqual((await self.plane.quota(HOME, "flex-start")).used, 0)
        await self.running(name="rig-3")

    async def test_a_quota_that_cannot_be_read_is_an_error(self) -> None:
        self.cloud.script.quotas.clear()
        with self.assertRaises(RigError):
            await self.plane.quota(HOME, "flex-start")
        self.cloud.script.quotas[PREEMPTIBLE] = 4
        self.cloud.script.unreachable.add(HOME)
        await self.refused(self.plane.quota(HOME, "flex-start"), "UNREACHABLE")
        await self.refused(self.plane.quota("us-nowhere1-a", "flex-start"), "UNKNOWN")
        self.values = settings(chip="v2", accelerator_type="v2-8")
        await self.refused(self.plane.quota(HOME, "flex-start"), "UNKNOWN")

    async def test_a_census_has_both_kinds_in_all_zones_and_what_is_not_ours(self) -> None:
        self.values = settings(zones=HOME, no_hard_stop_ok=True)
        await self.running()
        self.cloud.script.never.add(OTHER)
        await self.plane.create(order("waits", OTHER, "spot"))
        self.cloud.script.quota.add(THIRD)
        await self.plane.create(order("dead", THIRD))
        self.foreign_node("alone", "europe-west4-b")
        census = await self.plane.census()
        self.assertEqual(census.unread, ())
        found = {one.name: (one.zone, one.kind, one.state, one.market) for one in census.rentals}
        self.assertEqual(
            found,
            {
                "rig-1": (HOME, "machine", "running", "flex-start"),
                "waits": (OTHER, "request", "pending", "spot"),
                "dead": (THIRD, "request", "failed", "flex-start"),
                "alone": ("europe-west4-b", "machine", "running", "on-demand"),
            },
        )
        self.assertEqual(len(census.rentals), 4, "a machine and its request are one thing")
        foreign = next(one for one in census.rentals if one.name == "alone")
        self.assertEqual(foreign.labels, {"rig": "else"})
        self.assertEqual(foreign.price_per_hour_usd, 1.56)

    def foreign_node(self, name: str, zone: str) -> None:
        path = f"/tpu/v2/projects/{PROJECT}/locations/{zone}/nodes?nodeId={name}"
        body = {"acceleratorType": "v5litepod-1", "labels": {"rig": "else"}}
        status, answer, _ = self.cloud.take("POST", path, body)
        self.assertEqual(status, 200, answer)

    async def test_zones_that_do_not_answer_are_named_and_the_others_are_read(self) -> None:
        await self.running()
        self.cloud.script.unreachable.update((OTHER, THIRD))
        census = await self.plane.census()
        self.assertEqual([one.name for one in census.rentals], ["rig-1"])
        self.assertEqual(len(census.unread), 2, census.unread)
        for zone, told in zip((OTHER, THIRD), census.unread, strict=True):
            self.assertTrue(told.startswith(f"{zone} (UNREACHABLE"), told)
        # A list over all zones would have told nothing: that is why each is asked by itself.
        self.assertNotIn("--zone=-", " ".join(" ".join(argv) for argv in self.calls()))

    async def test_a_census_raises_what_every_zone_was_refused_with(self) -> None:
        self.cloud.script.disabled.add("tpu")
        await self.refused(self.plane.census(), "DENIED")

    async def test_a_login_that_ends_between_two_zones_speaks_for_all(self) -> None:
        read, over = GcloudAnswer([]), RigError("AUTH", "the login is over")
        silent = RigError("UNREACHABLE", "503")
        refuse_for_all([read, silent])
        for answers, said in (([read, silent, over], over), ([silent, silent], silent)):
            with self.assertRaises(RigError) as raised:
                refuse_for_all(answers)
            self.assertIs(raised.exception, said)

    async def test_a_zone_that_the_api_does_not_have_hides_nothing(self) -> None:
        self.values = settings(zones=f"us-nowhere1-a,{HOME}")
        await self.running()
        census = await self.plane.census()
        self.assertEqual([one.name for one in census.rentals], ["rig-1"])
        self.assertEqual(census.unread, ())

    async def test_a_thing_that_cannot_be_read_is_told_and_hides_no_other(self) -> None:
        await self.running()
        self.cloud.script.never.add(HOME)
        await self.plane.create(order("odd", intent="create-2"))
        self.set_queued("STATE_OF_GRACE", "odd")
        census = await self.plane.census()
        self.assertEqual([one.name for one in census.rentals], ["rig-1"])
        (told,) = census.unread
        self.assertIn(f"odd in {HOME}", told)
        self.assertIn("STATE_OF_GRACE", told)
        await self.refused(self.plane.describe("odd", HOME), "UNKNOWN")
        await self.refused(self.plane.look(asked(order("odd"))), "UNKNOWN")

    async def test_a_thing_is_absent_only_when_the_api_says_so_of_both_kinds(self) -> None:
        await self.refused(self.plane.describe("rig-1", HOME), "NOT_FOUND")
        await self.running()
        self.forget_request()
        rental = await self.plane.describe("rig-1", HOME)
        self.assertEqual((rental.kind, rental.labels), ("machine", labels()))
        self.cloud.script.html = 9  # a proxy: of two reads with five attempts each, one gives up
        error = await self.refused(self.plane.describe("rig-1", HOME), "UNREACHABLE")
        self.assertIn("web page", error.what)

    async def test_what_is_made_and_not_seen_yet_is_not_there_yet(self) -> None:
        self.cloud.script.lag_s = 20
        await self.plane.create(order())
        self.assertEqual((await self.plane.look(asked(order()))).state, "gone")
        self.cloud.advance(20)
        self.assertEqual((await self.plane.look(asked(order()))).state, "granted")


class DestroyTest(CloudCase):
    """Ending that very thing, and nothing else."""

    async def test_a_running_machine_goes_with_its_request(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        self.assertEqual(self.cloud.held(), {})
        (argv,) = self.sent_calls("delete")
        self.assertIn("--force", argv, "an active request is refused without it")
        self.assertIn("--async", argv)
        await self.refused(self.plane.describe("rig-1", HOME), "NOT_FOUND")

    async def test_what_waits_what_is_dead_and_what_was_suspended_goes(self) -> None:
        states = {"never": "pending", "quota": "failed"}
        for fault, state in states.items():
            getattr(self.cloud.script, fault).add(HOME)
            await self.plane.create(order())
            rental = await self.plane.describe("rig-1", HOME)
            self.assertEqual((rental.kind, rental.state), ("request", state))
            await self.plane.destroy(rental)
            self.assertEqual(self.cloud.held(), {}, fault)
            getattr(self.cloud.script, fault).clear()
        await self.running()
        self.cloud.preempt("rig-1")
        await self.plane.destroy(await self.plane.describe("rig-1", HOME))
        self.assertEqual(self.cloud.held(), {})

    async def test_a_node_that_outlived_its_request_goes_by_itself(self) -> None:
        await self.running()
        self.forget_request()
        await self.plane.destroy(await self.plane.describe("rig-1", HOME))
        self.assertEqual(self.cloud.held(), {})
        (argv,) = self.sent_calls("delete")
        self.assertIn("tpu-vm", argv)
        self.assertNotIn("--force", argv, "the command has no such flag")

    async def test_the_address_by_which_a_machine_ends_itself_leaves_nothing(self) -> None:
        await self.running()
        host, _, path = tpu_leave_url(PROJECT, HOME, "rig-1").partition(".com/")
        self.assertEqual(host, "https://tpu.googleapis")
        status, answer, _ = self.cloud.take("DELETE", f"/tpu/{path}", None)
        self.assertEqual(status, 200, answer)
        self.cloud.advance(1)
        self.assertEqual(self.cloud.held(), {})

    async def test_a_delete_that_does_nothing_leaves_the_machine_to_be_seen(self) -> None:
        rental = await self.running()
        self.cloud.script.stubborn.add("rig-1")
        await self.plane.destroy(rental)
        again = await self.plane.describe("rig-1", HOME)
        self.assertEqual((again.state, again.provider_id), ("running", rental.provider_id))

    async def test_a_delete_under_way_is_seen_and_not_repeated(self) -> None:
        rental = await self.running()
        self.cloud.script.operation_s = 120
        await self.plane.destroy(rental)
        going = await self.plane.describe("rig-1", HOME)
        self.assertEqual(going.state, "stopping")
        await self.plane.cancel(asked(order()))
        self.assertEqual(len(self.sent_calls("delete")), 1)
        self.cloud.advance(121)
        await self.refused(self.plane.describe("rig-1", HOME), "NOT_FOUND")

    async def test_a_namesake_stays_untouched(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        self.cloud.advance(5)
        await self.running(intent="create-2")
        error = await self.refused(self.plane.destroy(rental), "DENIED")
        self.assertIn("is not what it was", error.what)
        self.assertEqual(self.cloud.held(), {"queued": ["rig-1"], "nodes": ["rig-1"]})

    async def test_what_is_gone_is_no_error_and_another_project_is_none_of_ours(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        await self.plane.destroy(rental)
        self.assertEqual(len(self.sent_calls("delete")), 1)
        foreign = rental.model_copy(update={"project": "other-proj"})
        await self.refused(self.plane.destroy(foreign), "DENIED")

    async def test_a_delete_without_an_answer_is_unknown(self) -> None:
        rental = await self.running()
        self.cloud.script.operation_s = 3600
        self.cloud.script.lost, self.cloud.script.lost_by = 20, "cut"
        await self.refused(self.plane.destroy(rental), "UNKNOWN")
        self.cloud.script.lost = 0
        self.assertEqual((await self.plane.describe("rig-1", HOME)).state, "stopping")

    async def test_the_node_of_another_request_is_not_ours_although_it_has_the_name(self) -> None:
        self.cloud.script.never.add(HOME)
        await self.plane.create(order())
        with self.cloud.lock:
            stranger = self.queued_path("stranger")
            self.cloud.tpu._make_node(self.node_path(), {"labels": {"rig": "else"}}, stranger)
        rental = await self.plane.describe("rig-1", HOME)
        self.assertEqual((rental.kind, rental.labels), ("request", labels()))
        await self.plane.destroy(rental)
        self.assertEqual(self.cloud.held(), {"nodes": ["rig-1"]})
        await self.refused(self.plane.describe("rig-1", HOME), "NOT_FOUND")


class SweepVerbsTest(CloudCase):
    """ask, look and cancel, each by itself."""

    async def state(self) -> str:
        return (await self.plane.look(asked(order()))).state

    async def test_a_request_goes_its_way(self) -> None:
        self.cloud.script.queue_s, self.cloud.script.operation_s = 100, 0
        await self.plane.ask(asked(order()))
        self.assertEqual(await self.state(), "queued")
        self.cloud.advance(50)
        self.assertEqual(await self.state(), "queued")
        self.cloud.advance(51)
        self.assertEqual(await self.state(), "starting")
        self.cloud.advance(1)
        look = await self.plane.look(asked(order()))
        self.assertEqual((look.state, look.said), ("granted", ""))
        rental = await self.plane.describe("rig-1", HOME)
        same = (rental.provider_id, rental.created_at)
        self.assertEqual((look.provider_id, look.created_at), same)
        self.assertEqual(look.details["market"], "flex-start")
        self.cloud.advance(14_400)
        self.assertEqual(await self.state(), "refused")
        await self.plane.cancel(asked(order()))
        self.assertEqual(await self.state(), "gone")

    async def test_an_active_request_whose_node_is_not_to_be_seen_is_not_granted_yet(self) -> None:
        await self.plane.ask(asked(order()))
        self.cloud.advance(1)
        with self.cloud.lock:
            node = self.cloud.tpu.nodes.pop(self.node_path())
        self.assertEqual(await self.state(), "starting")
        with self.cloud.lock:
            self.cloud.tpu.nodes[self.node_path()] = node
        self.assertEqual(await self.state(), "granted")

    async def test_the_wait_and_the_life_of_a_request_are_the_providers_to_end(self) -> None:
        self.cloud.script.never.add(HOME)
        await self.plane.ask(asked(order(valid_s=300)))
        (request,) = self.cloud.sent("POST", "/queuedResources")
        self.assertEqual(request.body["queueingPolicy"], {"validUntilDuration": "300s"})
        self.cloud.advance(301)
        look = await self.plane.look(asked(order()))
        self.assertEqual((look.state, look.said), ("refused", EXPIRED))

    async def test_taken_back_the_node_may_still_be_seen(self) -> None:
        await self.plane.ask(asked(order()))
        self.cloud.advance(1)
        with self.cloud.lock:
            self.cloud.tpu.preempt("rig-1", keeps=True)
        look = await self.plane.look(asked(order()))
        self.assertEqual(look.state, "refused")
        rental = await self.plane.describe("rig-1", HOME)
        self.assertEqual((rental.kind, rental.state), ("machine", "stopped"))
        why = await self.plane.ended_why("rig-1", HOME, rental.provider_id)
        self.assertIn("took it back", why)
        await self.plane.cancel(asked(order()))
        self.assertEqual(self.cloud.held(), {})

    async def test_cancelling_takes_what_is_left_and_nothing_is_no_error(self) -> None:
        await self.plane.cancel(asked(order()))
        await self.plane.ask(asked(order()))
        self.cloud.advance(1)
        self.forget_request()
        self.assertEqual(await self.state(), "granted", "a machine without its request is one")
        await self.plane.cancel(asked(order()))
        self.assertEqual(self.cloud.held(), {})
        self.assertEqual(await self.state(), "gone")

    async def test_cancelling_never_touches_what_another_intent_made(self) -> None:
        await self.plane.ask(asked(order(intent="somebody-elses")))
        self.cloud.advance(1)
        await self.refused(self.plane.cancel(asked(order())), "DENIED")
        self.assertEqual(self.cloud.held(), {"queued": ["rig-1"], "nodes": ["rig-1"]})
        self.assertEqual(self.sent_calls("delete"), [])

    async def test_what_cannot_be_read_is_never_gone(self) -> None:
        self.cloud.script.html = 100
        await self.refused(self.plane.look(asked(order())), "UNREACHABLE")
        await self.refused(self.plane.cancel(asked(order())), "UNREACHABLE")

    async def test_the_requests_own_project_is_asked(self) -> None:
        request = asked(order())
        self.values = settings(project="moved-on")
        self.assertEqual((await self.plane.look(request)).state, "gone")
        self.assertTrue(all(f"--project={PROJECT}" in argv for argv in self.calls()))

    async def test_a_request_of_another_way_of_renting_is_refused(self) -> None:
        self.values = settings(no_hard_stop_ok=True)
        await self.refused(self.plane.ask(asked(order(market="reserved"))), "INVALID")
        self.assertEqual(self.cloud.requests, [])


class SweepTest(CloudCase):
    """The whole sweep over this plane; the cloud's time passes when the sweep waits."""

    def sweep(self, *zones: str, minutes: float = 240.0, market: str = "flex-start") -> Any:
        self.clock = CloudClock(self.cloud)
        self.plane.look_every_s = self.plane.gone_s = 60.0  # each look is two programs
        self.said: list[str] = []
        wish = SweepWish(
            project=PROJECT,
            machine="TPU machine",
            name_stem="tpu-vllm-v5e1-2b",
            places=[SweepPlace(zone, market) for zone in zones],
            deadline_unix=self.clock.now() + 60 * minutes,
            life_s=3600,
            labels=rental_labels(RIG, OWNER, "", 1_900_000_000),
        )
        state = self.folder / "state"
        return CapacitySweep(
            self.plane, wish, state, self.clock, self.said.append, reader=read_at_once
        )

    async def test_from_a_quota_and_a_silent_queue_to_the_zone_that_grants(self) -> None:
        self.cloud.script.quota.add(HOME)
        self.cloud.script.never.add(OTHER)
        record = await self.sweep(HOME, OTHER, THIRD).run()
        found = record.found
        assert found is not None
        self.assertEqual(found.zone, THIRD)
        ends = [(attempt.zone, attempt.ended) for attempt in record.attempts]
        self.assertEqual(ends, [(HOME, "quota"), (OTHER, "left"), (THIRD, "granted")])
        name = found.request.name
        self.assertEqual(self.cloud.held(), {"nodes": [name], "queued": [name]})
        self.assertEqual(self.clock.most_alive, 1)
        rental = await self.plane.describe(name, THIRD)
        self.assertEqual((rental.kind, rental.state), ("machine", "running"))
        self.assertEqual(rental.provider_id, found.provider_id)
        self.assertEqual(rental.created_at, found.created_at)
        self.assertEqual(rental.labels["intent"], found.request.intent)
        self.assertEqual(rental.labels["owner"], OWNER)
        for request in self.cloud.sent("POST", "/queuedResources"):
            node = request.body["tpu"]["nodeSpec"][0]["node"]
            self.assertEqual(node["labels"]["rig"], RIG)
            self.assertTrue(node["labels"]["expires"].isdigit())
            self.assertEqual(request.body["runDuration"], {"maxRunDuration": "3600s"})
            self.assertTrue(request.body["queueingPolicy"]["validUntilDuration"])
        # Found once, given again, and nothing is asked for a second time.
        again = await self.sweep(HOME, OTHER, THIRD).run()
        self.assertEqual(again.found, found)
        self.assertEqual(len(self.cloud.sent("POST", "/queuedResources")), 3)

    async def test_nothing_anywhere_leaves_nothing(self) -> None:
        self.cloud.script.never.update((HOME, OTHER))
        error = await self.refused(self.sweep(HOME, OTHER, minutes=10).run(), "CAPACITY")
        self.assertIn("none of them exists", error.what)
        self.assertEqual(self.cloud.held(), {})

    async def test_quota_everywhere_is_told_as_that(self) -> None:
        self.cloud.script.quota.update((HOME, OTHER))
        await self.refused(self.sweep(HOME, OTHER, minutes=30).run(), "QUOTA")
        self.assertEqual(self.cloud.held(), {}, "dead requests would hold the quota")

    async def test_a_missing_permission_stops_it_at_the_first_zone(self) -> None:
        self.cloud.script.denied.update((HOME, OTHER))
        await self.refused(self.sweep(HOME, OTHER).run(), "DENIED")
        self.assertEqual(len(self.cloud.sent("POST", "/queuedResources")), 1)
        self.assertEqual(self.cloud.held(), {})

    async def test_without_the_override_a_sweep_for_spot_asks_for_nothing(self) -> None:
        error = await self.refused(self.sweep(HOME, OTHER, market="spot").run(), "DENIED")
        self.assertIn("never ends", error.what)
        self.assertEqual(self.cloud.sent("POST", "/queuedResources"), [])

    async def test_a_lost_answer_is_settled_by_reading(self) -> None:
        self.cloud.script.lost, self.cloud.script.lost_by = 1, "cut"
        record = await self.sweep(HOME).run()
        assert record.found is not None
        self.assertEqual(len(self.cloud.held()["queued"]), 1)

    async def test_cancelled_in_the_queue_it_leaves_nothing(self) -> None:
        self.cloud.script.never.add(HOME)
        sweep = self.sweep(HOME)
        run = asyncio.ensure_future(sweep.run())
        while not self.cloud.held():
            await asyncio.sleep(0.01)
        run.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await run
        self.assertEqual(self.cloud.held(), {})
        self.assertIsNone(sweep.record.live)

    async def test_what_a_killed_sweep_left_is_settled_by_the_next(self) -> None:
        self.cloud.script.never.add(HOME)
        run = asyncio.ensure_future(self.sweep(HOME).run())
        record = self.folder / "state" / "sweep.json"
        while not (self.cloud.held() and record.exists()):
            await asyncio.sleep(0.01)
        kept = record.read_text()  # as it stood when the process was killed
        run.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await run
        record.write_text(kept)
        live = json.loads(kept)["live"]
        self.cloud.script.never.clear()
        await self.plane.ask(asked(order(live["name"], HOME, intent=live["intent"])))
        self.cloud.script.never.add(HOME)
        found = (await self.sweep(OTHER).run()).found
        assert found is not None
        self.assertEqual(found.zone, OTHER)
        self.assertEqual(self.cloud.held()["queued"], [found.request.name])

    async def test_a_delete_that_never_takes_is_told_by_name(self) -> None:
        self.cloud.script.never.add(HOME)
        sweep = self.sweep(HOME, OTHER, minutes=10)
        run = asyncio.ensure_future(sweep.run())
        while not self.cloud.held():
            await asyncio.sleep(0.01)
        (name,) = self.cloud.held()["queued"]
        self.cloud.script.stubborn.add(name)
        error = await self.refused(run, "UNKNOWN")
        self.assertIn(name, error.what)
        self.assertEqual(self.cloud.held(), {"queued": [name]}, "and nothing else was asked for")
        assert sweep.record.live is not None
        self.assertEqual(sweep.record.live.name, name)


# An ssh that notes its arguments and runs the remote command here, or refuses as ssh does.
SSH = """#!{python}
import json, os, sys
from pathlib import Path
folder = Path({folder!r})
(folder / "ssh.json").write_text(json.dumps(sys.argv[1:]))
refusal = folder / "ssh.err"
if refusal.exists():
    sys.stderr.write(refusal.read_text())
    sys.exit(255)
sudo, python, *words = sys.argv[-1].split()
if (sudo, python) == ("sudo", "python3"):
    os.execv(sys.executable, [sys.executable, *words])
"""
# A boot program: it tells what it was asked, or does what the test wants of it.
TELLS = """#!/usr/bin/env python3
import base64, json, sys
act, given = sys.argv[1], json.loads(base64.urlsafe_b64decode(sys.argv[2]))
print(act, *sorted(given.items()))
"""


class HostTest(CloudCase):
    """Reaching in: the commands, and what is told where nobody answers."""

    def setUp(self) -> None:
        super().setUp()
        keys = 'for last; do :; done\necho k >"$last"\necho ssh-rsa AAAA me >"$last.pub"\n'
        programs = {
            "ssh": SSH.format(python=sys.executable, folder=str(self.folder)),
            "ssh-keygen": f"#!/bin/sh\n{keys}",
        }
        for name, source in programs.items():
            (self.folder / "bin" / name).write_text(source)
            (self.folder / "bin" / name).chmod(0o755)
        (self.folder / "boot.py").write_text(TELLS)

    async def test_the_boot_is_read_over_ssh_with_the_fixed_program(self) -> None:
        rental = await self.running()
        self.assertEqual(await self.plane.boot_text(rental), "boot_log ('lines', 4000)\n")
        (argv,) = self.sent_calls("ssh")
        self.assertEqual(argv[:5], ["alpha", "compute", "tpus", "tpu-vm", "ssh"])
        self.assertIn("--tunnel-through-iap", argv)
        self.assertIn(f"--zone={HOME}", argv)
        self.assertIn("rig-1", argv)
        (command,) = [word for word in argv if word.startswith("--command=")]
        self.assertTrue(command.startswith("--command=sudo python3 - boot_log "), command)

    async def test_a_long_boot_is_told_by_its_end(self) -> None:
        rental = await self.running()
        (self.folder / "boot.py").write_text("print('x' * 300_000 + 'the end')\n")
        text = await self.plane.boot_text(rental)
        self.assertLessEqual(len(text), 200_000)
        self.assertTrue(text.endswith("the end\n"))

    async def test_an_act_of_a_program_prints_and_fails_as_it_does(self) -> None:
        rental = await self.running()
        command = HostCommand(TELLS.encode(), "logs", {"lines": 7, "wait": True})
        told = await self.plane.run_on_host(rental, command, 30.0)
        self.assertEqual(told, "logs ('lines', 7) ('wait', True)\n")
        failing = HostCommand(b"raise SystemExit('no such container')", "logs", {})
        error = await self.refused(self.plane.run_on_host(rental, failing, 30.0), "INTERNAL")
        self.assertIn("no such container", error.what)

    async def test_a_machine_that_does_not_answer_is_unreachable(self) -> None:
        rental = await self.running()
        refused = "ssh: connect to host 10.0.0.3 port 22: Connection refused\n"
        (self.folder / "ssh.err").write_text(refused)
        await self.refused(self.plane.boot_text(rental), "UNREACHABLE")

    async def test_a_machine_that_keeps_ssh_waiting_is_unreachable_too(self) -> None:
        rental = await self.running()
        (self.folder / "bin" / "ssh").write_text("#!/bin/sh\nexec sleep 600\n")
        self.plane.boot_patience_s = 1.5
        error = await self.refused(self.plane.boot_text(rental), "UNREACHABLE")
        self.assertIn("did not answer", error.what)

    async def test_a_machine_that_has_not_reported_yet_is_unreachable(self) -> None:
        rental = await self.running()
        self.cloud.tpu.silent.add("rig-1")
        await self.refused(self.plane.boot_text(rental), "UNREACHABLE")

    async def test_into_what_does_not_run_yet_no_call_is_made(self) -> None:
        self.cloud.script.never.add(HOME)
        await self.plane.create(order())
        waits = await self.plane.describe("rig-1", HOME)
        pending = waits.model_copy(update={"kind": "machine"})
        for rental in (waits, pending):
            error = await self.refused(self.plane.boot_text(rental), "UNREACHABLE")
            self.assertIn("does not run yet", error.what)
        self.assertEqual(self.sent_calls("ssh"), [])

    async def test_a_machine_that_is_gone_is_not_found(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        await self.refused(self.plane.boot_text(rental), "NOT_FOUND")

    async def test_the_tunnel_leads_from_loopback_to_loopback_through_iap(self) -> None:
        rental = await self.running()
        tunnel = self.plane.tunnel(rental, 18_000, 8000)
        argv = list(tunnel.argv)
        self.assertEqual(argv[0], str(self.folder / "bin" / "gcloud"))
        self.assertEqual(argv[1:6], ["alpha", "compute", "tpus", "tpu-vm", "ssh"])
        self.assertIn("--tunnel-through-iap", argv)
        self.assertIn("127.0.0.1:18000:127.0.0.1:8000", argv)
        self.assertEqual(tunnel.environment["CLOUDSDK_CORE_DISABLE_PROMPTS"], "1")
        self.assertEqual(tunnel.environment["HOME"], str(self.folder))
        ended = await run_program(argv, timeout_s=60.0, environment=tunnel.environment)
        heard = json.loads((self.folder / "ssh.json").read_text())
        self.assertIn("-N", heard, ended.stderr)
        self.assertIn("127.0.0.1:18000:127.0.0.1:8000", heard)

    async def test_nothing_of_the_surroundings_that_is_not_gclouds_goes_into_the_tunnel(
        self,
    ) -> None:
        rental = await self.running()
        plane = self.plane_of({**self.environment, "HF_TOKEN": "hf_CanaryCanaryCanary0123"})
        tunnel = plane.tunnel(rental, 18_000, 8000)
        self.assertNotIn("HF_TOKEN", tunnel.environment)
        self.assertNotIn("Canary", " ".join(tunnel.argv))

    async def test_without_its_boot_program_a_rig_says_so(self) -> None:
        rental = await self.running()
        self.assertEqual(self.plane.host_program(), TELLS.encode())
        (self.folder / "boot.py").unlink()
        await self.refused(self.plane.boot_text(rental), "INTERNAL")


class EndedTest(CloudCase):
    """What is told of a machine that is there no more."""

    def setUp(self) -> None:
        super().setUp()
        # Its life lies wholly in the past, so that the clock of this computer sees its end too.
        self.cloud.world.now = float(int(time.time())) - 86_400

    async def why(self, provider_id: str) -> str:
        return await self.plane.ended_why("rig-1", HOME, provider_id)

    async def test_its_time_was_over(self) -> None:
        rental = await self.running()
        self.assertEqual(await self.why(rental.provider_id), "")
        self.cloud.advance(14_401)
        self.assertIn("its time ended at", await self.why(rental.provider_id))

    async def test_it_was_taken_back(self) -> None:
        self.values = settings(no_hard_stop_ok=True)
        rental = await self.running(market="spot")
        self.cloud.preempt("rig-1")
        self.assertIn("preempted", await self.why(rental.provider_id))

    async def test_its_node_was_deleted_by_hand(self) -> None:
        rental = await self.running()
        path = f"/tpu/v2/{self.node_path()}"
        self.cloud.take("DELETE", path, None)
        self.cloud.advance(1)
        self.assertIn("by somebody of the project", await self.why(rental.provider_id))

    async def test_it_was_deleted_with_its_request(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        self.assertIn("never does by itself", await self.why(rental.provider_id))

    async def test_its_name_is_anothers(self) -> None:
        rental = await self.running()
        await self.plane.destroy(rental)
        await self.running(intent="create-2")
        self.assertIn("another machine", await self.why(rental.provider_id))

    async def test_it_was_never_granted(self) -> None:
        self.cloud.script.quota.add(HOME)
        await self.plane.create(order())
        rental = await self.plane.describe("rig-1", HOME)
        self.assertIn("Quota limit", await self.why(rental.provider_id))

    async def test_what_cannot_be_read_raises(self) -> None:
        self.cloud.script.html = 100
        await self.refused(self.why("7"), "UNREACHABLE")


if __name__ == "__main__":
    unittest.main()
