"""EC2's plane against a fake AWS on loopback, through the real SDK, verb by verb; then the sweep.

What must hold of money is asked of the fake's own books: how many machines and volumes there are,
what was sent, and whether anything of somebody else's was touched.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest, SweepWish
from forge.parts.planes.capacity_plane import (
    MANAGED_BY,
    CapacityPlane,
    Order,
    Rental,
    RentalMarket,
    is_ours,
    rental_labels,
)
from forge.parts.planes.ec2 import Ec2
from forge.parts.planes.ec2_order import ec2_client_token
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.ec2_user_data import USER_DATA_LIMIT
from forge.parts.planes.host_plane import HostCommand, HostPlane
from forge.parts.planes.sweep import CapacitySweep
from forge.parts.planes.sweep_plane import SweepPlane
from forge.suites.fake_aws import FAKE_AWS_PROFILE, FakeAws
from forge.suites.fake_aws_world import AwsScript, CallFault
from forge.sweep_market import read_in_process
from tests.forge_copy import package_folders

RIG, OWNER = "gpu-vllm-g6-2b", "a1b2c3"
ZONE, OTHER, FAR = "us-east-1b", "us-east-1c", "us-west-2a"
INTENT = "create-20261130-093000-aabbcc"
PROGRAM = '#!/usr/bin/env python3\nprint("a, b")\n'
HOUR = 3600.0


def labels_of(intent: str = INTENT, rig: str = RIG, owner: str = OWNER) -> dict[str, str]:
    return rental_labels(rig, owner, intent, 1_800_000_000)


def order(market: RentalMarket = "spot", name: str = "vm-1", **more: Any) -> Order:
    intent = more.pop("intent", INTENT)
    return Order(name, more.pop("zone", ZONE), intent, labels_of(intent), 14_400, market, **more)


def request(
    zone: str = ZONE, market: str = "spot", name: str = "vm-s", **more: Any
) -> SweepRequest:
    intent = f"sweep-{name}"
    return SweepRequest(
        name=name,
        zone=zone,
        market=market,
        project=more.pop("project", "111122223333"),
        machine="GPU machine",
        intent=intent,
        asked_unix=0.0,
        patience_s=180.0,
        valid_s=240.0,
        life_s=14_400,
        labels=labels_of(intent),
    )


class ShownEc2(Ec2):
    """The plane as a rig has it, which knows whose orders it shows."""

    _rig, _owner = RIG, OWNER


# One for all: the SDK's clients, which are kept by what the environment says, are made once.
CLOUD = FakeAws()
SURROUNDINGS: dict[str, str] = {}


def setUpModule() -> None:
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    CLOUD.start()
    unittest.addModuleCleanup(CLOUD.stop)
    SURROUNDINGS.update(CLOUD.environment(Path(folder.name)))
    # No test is about these lengths, and a slow computer must not make it one.
    for name, seconds in (
        ("ec2_calls.EC2_READ_S", 60.0),
        ("ec2_calls._LAUNCH_S", 60.0),
        ("ec2_calls._SEEN_S", 0.3),
        ("ec2_calls._SEEN_PAUSE_S", 0.02),
        ("ec2_calls._LAUNCH_PAUSE_S", 0.02),
        ("ec2_host.EC2_CHANGE_S", 60.0),
        ("ec2.EC2_CHANGE_S", 60.0),
        ("ec2._SWEEP_LAUNCH_S", 120.0),
        ("ec2.Ec2.create_s", 120.0),
        ("ec2_calls._PRICES_S", 60.0),
        ("ec2_image._IMAGE_READ_S", 60.0),
        ("ec2_catalogue.Ec2Catalogue.look_s", 60.0),
    ):
        longer = mock.patch(f"forge.parts.planes.{name}", seconds)
        longer.start()
        unittest.addModuleCleanup(longer.stop)


class Ec2Case(unittest.IsolatedAsyncioTestCase):
    """A fake AWS with the rig's instance profile, and the plane over it."""

    cloud = CLOUD

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cloud.renew()
        self.cloud.put_profile()
        self.cloud.console = lambda _machine: ""
        self.cloud.run_command = lambda _machine, _script: ("", "", 0)
        self.cloud.agent_online = lambda _machine: True
        self.environment = SURROUNDINGS
        self.boot = {
            "boot-program": self.folder / "boot.py",
            "gemma4-boot": self.folder / "boot.json",
        }
        self.boot["boot-program"].write_text(PROGRAM)
        self.boot["gemma4-boot"].write_text('{"v": 1, "rig": "x"}')
        self.values: dict[str, Any] = {}
        self.plane = ShownEc2(
            self.settings, lambda: self.boot, self.folder / "ssm_tunnel.py", self.environment
        )

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [], "something asked for a host outside")
        self.assertEqual(self.cloud.harmed(), [], "somebody else's machine was touched")

    def settings(self) -> Ec2Settings:
        given: dict[str, Any] = {"aws_account": self.cloud.account, "budget_usd": 6.0}
        return Ec2Settings(**{**given, **self.values})

    def fault(self, code: str, **more: Any) -> None:
        self.cloud.script.faults.append(CallFault(code=code, **more))

    def launches(self) -> int:
        return len(self.cloud.sent("RunInstances"))

    def sdk(self, region: str = "us-east-1") -> Any:
        """A client of somebody who works in the same account."""
        import boto3

        return boto3.client(
            "ec2",
            region,
            endpoint_url=self.cloud.base,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key="made-up",
        )

    async def refused(self, awaitable: Any, error_class: ErrorClass) -> RigError:
        with self.assertRaises(RigError) as raised:
            await awaitable
        self.assertEqual(raised.exception.error_class, error_class, raised.exception)
        return raised.exception

    async def made(self, market: RentalMarket = "spot", **more: Any) -> Rental:
        """A machine of the plane's own, as it is read afterwards."""
        wanted = order(market, **more)
        await self.plane.create(wanted)
        return await self.plane.describe(wanted.name, wanted.zone)

    def assert_nothing(self) -> None:
        self.assertEqual(self.cloud.held(), {})

    def assert_one(self, provider_id: str = "") -> None:
        """Exactly one machine, with the one disk that hangs on it."""
        held = self.cloud.held()
        machines = [one for found in held["instances"].values() for one in found]
        disks = [one for found in held["volumes"].values() for one in found]
        self.assertEqual((len(machines), len(disks)), (1, 1), held)
        self.assertIn(provider_id, ("", machines[0]))


class ProtocolTest(unittest.TestCase):
    def plane(self, **more: Any) -> Ec2:
        settings = Ec2Settings(**{"aws_account": "111122223333", "budget_usd": 1.0, **more})
        return ShownEc2(lambda: settings, dict, Path("ssm_tunnel.py"))

    def test_the_plane_is_what_the_toolsets_and_the_sweep_take(self) -> None:
        plane = self.plane()
        capacity: CapacityPlane = plane
        sweep: SweepPlane = plane
        host: HostPlane = plane
        self.assertEqual({id(capacity), id(sweep), id(host)}, {id(plane)})
        self.assertLessEqual(plane.read_back_s, 10)

    def test_it_says_that_only_the_machine_itself_ends_it(self) -> None:
        self.assertIn("a timer on the machine", self.plane().hard_stop)
        self.assertIn("EC2 itself ends nothing", self.plane().hard_stop)

    def test_its_words_make_the_tools_names(self) -> None:
        words = Ec2.vocabulary
        made = (
            f"find_{words['hardware']}",
            f"create_{words['order']}",
            f"list_{words['rental']}s",
            f"{words['destroy']}_{words['rental']}",
        )
        wanted = (
            "find_gpu",
            "create_gpu_instance",
            "list_gpu_instances",
            "destroy_gpu_instance",
        )
        self.assertEqual(made, wanted)

    def test_the_command_for_people_names_the_rig_and_carries_no_boot(self) -> None:
        words = self.plane(aws_profile="mine").create_command("us-west-2b", "on-demand", 2.0)
        line = " ".join(words)
        self.assertTrue(line.startswith("aws ec2 run-instances --region us-west-2 --profile mine"))
        for part in (RIG, OWNER, MANAGED_BY, "DEFAULT-SUBNET-OF-us-west-2b", "made-at-the-call"):
            self.assertIn(part, line)
        self.assertNotIn("spot", line)
        self.assertNotIn("user-data", line)

    def test_without_wishes_the_command_is_for_the_first_zone_and_way(self) -> None:
        self.assertIn("us-east-1a", " ".join(self.plane().create_command("", "", 1.0)))
        line = " ".join(self.plane(zones=f"{FAR},{ZONE}").create_command("", "x", 1.0))
        self.assertIn(FAR, line)
        self.assertIn('"MarketType":"spot"', line)

    def test_a_zone_of_another_provider_is_none(self) -> None:
        for zone in ("us-east-1", "europe", "us-west-2-lax-1a"):
            with self.assertRaises(RigError) as raised:
                self.plane().create_command(zone, "", 1.0)
            self.assertEqual(raised.exception.error_class, "INVALID")

    def test_cautions_are_those_of_the_settings(self) -> None:
        self.assertEqual(self.plane().cautions(), ())
        self.assertIn("PUBLIC_IP", self.plane(public_ip=False).cautions()[0])


class CreateTest(Ec2Case):
    async def test_one_call_makes_the_machine_with_all_that_it_needs(self) -> None:
        for market in ("spot", "on-demand"):
            self.cloud.renew()
            self.cloud.put_profile()
            rental = await self.made("spot" if market == "spot" else "on-demand")
            self.assertEqual(
                (rental.name, rental.zone, rental.project, rental.state, rental.market),
                ("vm-1", ZONE, self.cloud.account, "running", market),
            )
            self.assertTrue(is_ours(rental.labels, RIG, OWNER))
            self.assertEqual(rental.labels, labels_of())
            self.assertEqual(self.launches(), 1)
            self.assert_one(rental.provider_id)
            machine = self.cloud.machine("vm-1")
            self.assertEqual((machine.type, machine.market), ("g6.xlarge", market))
            model = machine.model
            self.assertEqual(model.metadata_options.http_tokens, "required")
            self.assertEqual(model.metadata_options.http_put_response_hop_limit, 1)
            self.assertEqual(model.instance_initiated_shutdown_behavior, "terminate")

    async def test_what_it_boots_goes_out_with_it(self) -> None:
        await self.made()
        text = gzip.decompress(self.cloud.machine("vm-1").user_data).decode()
        self.assertIn('print("a, b")', text)
        self.assertIn("/var/lib/gemma4/order.json", text)
        self.assertIn("14400", text)

    async def test_its_disk_is_encrypted_marked_and_goes_with_it(self) -> None:
        rental = await self.made()
        (volume,) = self.sdk().describe_volumes()["Volumes"]
        self.assertTrue(volume["Encrypted"])
        self.assertEqual((volume["Size"], volume["VolumeType"]), (150, "gp3"))
        marks = {one["Key"]: one["Value"] for one in volume["Tags"]}
        self.assertEqual(marks.pop("Name"), "vm-1")
        self.assertEqual(marks, labels_of())
        await self.plane.destroy(rental)
        self.assert_nothing()

    async def test_the_same_order_twice_makes_one_machine(self) -> None:
        await asyncio.gather(self.plane.create(order()), self.plane.create(order()))
        await self.plane.create(order())
        self.assertEqual(self.launches(), 3)
        self.assert_one()

    async def test_the_group_lets_nothing_in_and_is_made_once_for_each_vpc(self) -> None:
        first = await self.made()
        await self.plane.destroy(first)
        await self.made(intent="create-2")
        await self.made(intent="create-3", name="vm-2", zone=FAR)
        self.assertEqual(len(self.cloud.sent("CreateSecurityGroup")), 2)
        self.assertEqual(self.cloud.sent("AuthorizeSecurityGroupIngress"), [])

    async def test_two_at_once_share_the_group(self) -> None:
        both = (self.plane.create(order(name=f"vm-{n}", intent=f"create-{n}")) for n in (1, 2))
        await asyncio.gather(*both)
        self.assertEqual(len(self.cloud.machines()), 2)

    async def test_a_lost_answer_to_the_groups_making_is_settled_by_a_look(self) -> None:
        self.fault("", action="CreateSecurityGroup", lost="cut", after=True, times=1)
        await self.made()
        self.assert_one()

    async def test_a_profile_that_is_not_known_yet_is_waited_for(self) -> None:
        self.cloud.script.profile_hidden = 2
        await self.made()
        self.assertEqual(self.launches(), 3)
        tokens = {one.parameters["ClientToken"] for one in self.cloud.sent("RunInstances")}
        self.assertEqual(tokens, {ec2_client_token(INTENT, "g6.xlarge", ZONE)})
        self.assert_one()

    async def test_a_profile_that_never_comes_is_told_and_not_waited_for_for_ever(self) -> None:
        self.values["instance_profile"] = "not-there"
        with mock.patch("forge.parts.planes.ec2_calls._LAUNCH_PAUSE_S", 130.0):
            error = await self.refused(self.plane.create(order()), "INVALID")
        self.assertIn("not-there", error.what)
        self.assertEqual(read_refusal(error.what, error.error_class).reason, "transient")
        self.assertEqual(self.launches(), 1, "another pause would be longer than a create")
        self.assert_nothing()

    async def test_another_profile_of_the_sdk(self) -> None:
        self.values["aws_profile"] = FAKE_AWS_PROFILE
        await self.made()
        self.assert_one()

    async def test_a_wished_subnet_and_one_of_another_zone(self) -> None:
        subnets = {zone: self.subnet_of(zone) for zone in (ZONE, OTHER)}
        self.values["subnet"] = subnets[ZONE]
        rental = await self.made()
        await self.plane.destroy(rental)
        for subnet, words in ((subnets[OTHER], f"is in {OTHER}"), ("subnet-0000abcd", "has no")):
            self.values["subnet"] = subnet
            error = await self.refused(self.plane.create(order(intent="create-2")), "INVALID")
            self.assertIn(words, error.what)
        self.assertEqual(self.launches(), 1)
        self.assert_nothing()

    def subnet_of(self, zone: str) -> str:
        with self.cloud.lock:
            return str(next(iter(self.cloud.ec2.model(zone[:-1]).subnets[zone])))


class CreateRefusalTest(Ec2Case):
    """Each refusal by its class, with one request and nothing left that is not told."""

    async def test_each_refusal_of_ec2_is_one_request_and_nothing_else(self) -> None:
        for code, error_class, reason in (
            ("InsufficientInstanceCapacity", "CAPACITY", "stockout"),
            ("InsufficientHostCapacity", "CAPACITY", "stockout"),
            ("Unsupported", "CAPACITY", "not offered"),
            ("SpotMaxPriceTooLow", "CAPACITY", "price"),
            ("VcpuLimitExceeded", "QUOTA", "quota"),
            ("MaxSpotInstanceCountExceeded", "QUOTA", "quota"),
            ("InstanceLimitExceeded", "QUOTA", "quota"),
            ("UnauthorizedOperation", "DENIED", "permission"),
            ("OptInRequired", "DENIED", "permission"),
            ("AuthFailure", "AUTH", "auth"),
            ("RequestLimitExceeded", "BUSY", "transient"),
        ):
            with self.subTest(code=code):
                self.cloud.renew()
                self.cloud.put_profile()
                self.fault(code)
                with self.assertRaises(RigError) as raised:
                    await self.plane.create(order())
                error = raised.exception
                self.assertEqual(error.error_class, error_class, error)
                refusal = read_refusal(error.what, error.error_class)
                self.assertEqual(refusal.reason, reason, error.what)
                self.assertEqual(self.launches(), 1, "the SDK must not repeat it by itself")
                self.assert_nothing()

    async def test_a_stockout_names_the_zones_that_have_some(self) -> None:
        self.fault("InsufficientInstanceCapacity", zone=ZONE)
        error = await self.refused(self.plane.create(order()), "CAPACITY")
        self.assertIn(OTHER, read_refusal(error.what, "CAPACITY").hints)

    async def test_what_was_made_although_it_was_refused_is_told_as_ours_and_can_go(self) -> None:
        self.fault("InsufficientInstanceCapacity", after=True, times=1)
        await self.refused(self.plane.create(order()), "CAPACITY")
        rental = await self.plane.describe("vm-1", ZONE)
        self.assertTrue(is_ours(rental.labels, RIG, OWNER))
        await self.plane.destroy(rental)
        self.assert_nothing()

    async def test_a_lost_answer_is_settled_by_the_client_token(self) -> None:
        for lost, code in (("cut", ""), ("", "InternalError"), ("", "html"), ("hold", "")):
            with self.subTest(lost=lost, code=code):
                self.cloud.renew()
                self.cloud.put_profile()
                self.fault(code, lost=lost, after=True, times=1)
                with (
                    mock.patch("forge.parts.planes.ec2_calls._LAUNCH_S", 3.0 if lost else 60.0),
                    mock.patch("forge.parts.planes.ec2_calls._SEEN_S", 60.0),
                ):
                    await self.plane.create(order())
                self.assertEqual(self.launches(), 1)
                self.assert_one()
                self.assertEqual((await self.plane.describe("vm-1", ZONE)).labels, labels_of())

    async def test_what_is_seen_late_is_waited_for_within_the_time_of_a_create(self) -> None:
        self.cloud.script.unseen = 3
        self.fault("", lost="cut", after=True, times=1)
        with mock.patch("forge.parts.planes.ec2_calls._SEEN_S", 60.0):
            await self.plane.create(order())
        self.assert_one()

    async def test_a_lost_answer_without_a_machine_is_of_unknown_fate(self) -> None:
        for lost, code in (("cut", ""), ("", "InternalError")):
            self.cloud.renew()
            self.cloud.put_profile()
            self.fault(code, lost=lost, times=1)
            error = await self.refused(self.plane.create(order()), "UNKNOWN")
            self.assertIn("may have been done", error.what)
            self.assertEqual(self.launches(), 1, "nothing is sent a second time")
            self.assert_nothing()

    async def test_an_earlier_order_of_the_same_token_is_taken_for_what_it_is(self) -> None:
        await self.made()
        self.values["root_disk_gb"] = 200
        await self.plane.create(order())  # IdempotentParameterMismatch
        self.assertEqual(self.launches(), 2)
        self.assert_one()

    async def test_an_image_whose_parameter_is_gone(self) -> None:
        self.cloud.script.no_parameters.add(self.settings().ami_parameter)
        error = await self.refused(self.plane.create(order()), "INVALID")
        self.assertIn("AMI_PARAMETER", error.what)
        self.assertEqual(self.launches(), 0)

    async def test_a_zone_without_a_default_subnet(self) -> None:
        self.cloud.script.no_subnet.add(ZONE)
        error = await self.refused(self.plane.create(order()), "INVALID")
        self.assertIn(f"{ZONE} has no default subnet", error.what)
        self.assertEqual(self.launches(), 0)

    async def test_a_group_that_somebody_opened_or_made_stops_it(self) -> None:
        rental = await self.made()
        await self.plane.destroy(rental)
        sdk = self.sdk()
        name = [{"Name": "group-name", "Values": ["gpu-vllm-g6-2b-*"]}]
        (group,) = sdk.describe_security_groups(Filters=name)["SecurityGroups"]
        rule = {"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000}
        rule = {**rule, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        there = {"GroupId": group["GroupId"], "IpPermissions": [rule]}
        sdk.authorize_security_group_ingress(**there)
        error = await self.refused(self.plane.create(order(intent="create-2")), "DENIED")
        self.assertIn("somebody opened", error.what)
        sdk.revoke_security_group_ingress(**there)
        owner = [{"Key": "owner", "Value": "ffffff"}]
        sdk.create_tags(Resources=[group["GroupId"]], Tags=owner)
        error = await self.refused(self.plane.create(order(intent="create-2")), "DENIED")
        self.assertIn("somebody else's", error.what)
        self.assertEqual(self.launches(), 1)
        self.assert_nothing()

    async def test_a_look_before_the_order_that_fails_asks_for_nothing(self) -> None:
        for action in ("GetParameter", "DescribeImages", "DescribeSubnets"):
            self.cloud.renew()
            self.fault("html", action=action)
            error = await self.refused(self.plane.create(order()), "BUSY")
            self.assertIn("nothing was rented", error.what)
            self.assertEqual(read_refusal(error.what, "BUSY").reason, "transient")
            self.assertEqual(self.launches(), 0)

    async def test_looks_that_take_too_long_end_in_no_order(self) -> None:
        self.plane.create_s = 3.0
        error = await self.refused(self.plane.create(order()), "BUSY")
        self.assertIn("too long", error.what)
        self.assertEqual(self.launches(), 0)

    async def test_credentials_of_another_account_touch_and_prove_nothing(self) -> None:
        mine = await self.made()
        self.values["aws_account"] = "999988887777"
        for act in (
            self.plane.create(order(intent="create-2")),
            self.plane.census(),
            self.plane.describe("vm-1", ZONE),
            self.plane.look(request(project="999988887777")),
            self.plane.cancel(request(project="999988887777")),
            self.plane.ended_why("vm-1", ZONE, mine.provider_id),
            self.plane.destroy(mine.model_copy(update={"project": "999988887777"})),
        ):
            error = await self.refused(act, "DENIED")
            self.assertIn("AWS_ACCOUNT", error.what)
        self.assert_one(mine.provider_id)

    async def test_what_is_in_another_account_than_the_settings_is_not_looked_for(self) -> None:
        for act in (
            self.plane.ask(request(project="999988887777")),
            self.plane.look(request(project="999988887777")),
            self.plane.cancel(request(project="999988887777")),
        ):
            error = await self.refused(act, "DENIED")
            self.assertIn("another account, 999988887777", error.what)
        self.assertEqual(self.cloud.requests, [])

    async def test_expired_credentials(self) -> None:
        mine = await self.made()
        self.cloud.script.credentials = "expired"
        for act in (
            self.plane.create(order(intent="create-2")),
            self.plane.census(),
            self.plane.offers(),
            self.plane.quota(ZONE, "spot"),
            self.plane.describe("vm-1", ZONE),
            self.plane.look(request()),
            self.plane.destroy(mine),
        ):
            await self.refused(act, "AUTH")
        self.assert_one(mine.provider_id)

    async def test_settings_at_fault_are_told_at_each_call_and_start_nothing(self) -> None:
        def broken() -> Ec2Settings:
            raise RigError("INVALID", "tpu.env: AWS_ACCOUNT is missing")

        plane = Ec2(broken, lambda: self.boot, self.folder / "t.py", self.environment)
        for act in (plane.offers(), plane.census(), plane.create(order()), plane.look(request())):
            await self.refused(act, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_boot_that_is_not_there_or_too_large(self) -> None:
        text = "".join(map(chr, range(33, 126)))
        noise = base64.b64encode(os.urandom(USER_DATA_LIMIT)).decode()
        self.boot["gemma4-boot"].write_text(json.dumps({"x": text, "y": noise}))
        error = await self.refused(self.plane.create(order()), "INVALID")
        self.assertIn("16384", error.what)
        self.boot["gemma4-boot"].unlink()
        await self.refused(self.plane.create(order()), "INTERNAL")
        del self.boot["gemma4-boot"]
        await self.refused(self.plane.create(order()), "INTERNAL")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_market_and_a_zone_that_are_none(self) -> None:
        await self.refused(self.plane.create(order("flex-start")), "INVALID")
        await self.refused(self.plane.create(order(zone="us-east-1")), "INVALID")
        await self.refused(self.plane.create(order(zone="us-east5-a")), "INVALID")
        self.assertEqual(self.cloud.requests, [])


class CensusTest(Ec2Case):
    def left_disk(self, zone: str = ZONE, name: str = "vm-9", **more: str) -> str:
        return self.cloud.put_volume(zone, 150, {"Name": name, **labels_of(), **more})

    async def test_everything_of_ours_in_all_regions_and_nothing_of_others(self) -> None:
        await self.made("spot")
        await self.made("on-demand", name="vm-2", zone=FAR, intent="create-2")
        left = self.left_disk("eu-west-1a")
        self.cloud.put_machine("us-east-1a")
        self.cloud.put_volume(ZONE, 10, {"Name": "payroll"})
        census = await self.plane.census()
        self.assertEqual(census.unread, ())
        found = {(one.kind, one.name, one.zone, one.state) for one in census.rentals}
        wanted = {
            ("machine", "vm-1", ZONE, "running"),
            ("machine", "vm-2", FAR, "running"),
            ("disk", "vm-9", "eu-west-1a", "stopped"),
        }
        self.assertEqual(found, wanted)
        for one in census.rentals:
            self.assertTrue(is_ours(one.labels, RIG, OWNER))
        self.assertEqual({r.provider_id for r in census.rentals if r.kind == "disk"}, {left})

    async def test_another_rigs_and_another_owners_are_told_with_their_own_labels(self) -> None:
        for number, marks in enumerate(({"rig": "other-rig"}, {"owner": "ffffff"})):
            self.cloud.put_machine(ZONE, f"vm-{number}", tags={**labels_of(), **marks})
        census = await self.plane.census()
        self.assertEqual(len(census.rentals), 2)
        self.assertFalse(any(is_ours(one.labels, RIG, OWNER) for one in census.rentals))

    async def test_spot_costs_what_ec2_says_and_on_demand_what_the_table_says(self) -> None:
        self.cloud.script.zone_prices[ZONE, "g6.xlarge"] = 0.4321
        await self.made("spot")
        await self.made("on-demand", name="vm-2", intent="create-2")
        prices = {one.market: one.price_per_hour_usd for one in (await self.plane.census()).rentals}
        self.assertEqual(prices, {"spot": 0.4321, "on-demand": 0.8048})

    async def test_a_price_that_cannot_be_read_is_none_and_hides_nothing(self) -> None:
        self.fault("UnauthorizedOperation", action="DescribeSpotPriceHistory")
        await self.made("spot")
        (found,) = (await self.plane.census()).rentals
        self.assertIsNone(found.price_per_hour_usd)
        self.assertEqual(found.state, "running")

    async def test_what_is_stopped_counts_and_what_is_terminated_does_not(self) -> None:
        kept = await self.made("on-demand")
        gone = await self.made("on-demand", name="vm-2", intent="create-2")
        await self.plane.stop_machine(kept)
        await self.plane.destroy(gone)
        (found,) = (await self.plane.census()).rentals
        self.assertEqual((found.name, found.state), ("vm-1", "stopped"))
        self.assertIsNone(found.price_per_hour_usd, "its disk is billed, at a price not known")
        self.assert_one(kept.provider_id)

    async def test_what_is_ending_is_still_told(self) -> None:
        self.cloud.script.ending_s = 60.0
        await self.plane.destroy(await self.made())
        (found,) = (await self.plane.census()).rentals
        self.assertEqual(found.state, "stopping")
        self.cloud.advance(61)
        self.assertEqual((await self.plane.census()).rentals, [])

    async def test_a_region_that_cannot_be_read_is_named_and_hides_no_other(self) -> None:
        await self.made()
        for code in ("html", "UnauthorizedOperation"):
            self.cloud.script.faults.clear()
            self.fault(code, action="DescribeVolumes", region="eu-west-1")
            census = await self.plane.census()
            self.assertEqual([one.name for one in census.rentals], ["vm-1"])
            (unread,) = census.unread
            self.assertTrue(unread.startswith("eu-west-1 ("), unread)

    async def test_what_every_region_refuses_is_raised(self) -> None:
        self.fault("UnauthorizedOperation", action="DescribeInstances")
        error = await self.refused(self.plane.census(), "DENIED")
        self.assertIn("ec2:DescribeInstances", error.what)
        self.cloud.script.faults.clear()
        self.fault("UnauthorizedOperation", action="DescribeRegions")
        await self.refused(self.plane.census(), "DENIED")

    async def test_a_thing_that_cannot_be_read_is_told_and_hides_no_other(self) -> None:
        await self.made()
        self.left_disk()
        with self.cloud.lock:
            machine = self.cloud.machine("vm-1").model
            machine._state.name = "levitating"
        census = await self.plane.census()
        self.assertEqual([one.kind for one in census.rentals], ["disk"])
        (unread,) = census.unread
        self.assertIn("levitating", unread)
        self.assertIn("us-east-1", unread)

    async def test_many_pages_are_one_list(self) -> None:
        self.cloud.script.page = 2
        for number in range(5):
            self.left_disk(name=f"vm-{number}")
        self.assertEqual(len((await self.plane.census()).rentals), 5)


class DescribeTest(Ec2Case):
    async def test_none(self) -> None:
        await self.refused(self.plane.describe("vm-1", ZONE), "NOT_FOUND")
        await self.made()
        await self.refused(self.plane.describe("vm-1", OTHER), "NOT_FOUND")
        await self.refused(self.plane.describe("vm-", ZONE), "NOT_FOUND")
        await self.refused(self.plane.describe("vm-?", ZONE), "NOT_FOUND")

    async def test_the_making_stays_the_same_over_stop_and_start(self) -> None:
        first = await self.made("on-demand")
        await self.plane.stop_machine(first)
        self.cloud.advance(HOUR)
        await self.plane.start_machine(await self.plane.describe("vm-1", ZONE))
        again = await self.plane.describe("vm-1", ZONE)
        self.assertEqual(
            (again.provider_id, again.created_at), (first.provider_id, first.created_at)
        )
        self.assertGreater(again.created_unix, first.created_unix + HOUR - 5)

    async def test_two_of_one_name_are_named_by_id_and_each_goes_by_its_own(self) -> None:
        first = await self.made()
        await self.plane.create(order(intent="create-2"))
        error = await self.refused(self.plane.describe("vm-1", ZONE), "UNKNOWN")
        twin = next(m.id for m in self.cloud.machines() if m.id != first.provider_id)
        for one in (first.provider_id, twin):
            self.assertIn(one, error.what)
        rental = await self.plane.describe(twin, ZONE)
        self.assertEqual((rental.name, rental.provider_id), (twin, twin))
        self.assertEqual(rental.labels["intent"], "create-2")
        await self.plane.destroy(rental)
        self.assert_one(first.provider_id)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).provider_id, first.provider_id)
        await self.refused(self.plane.describe(twin, ZONE), "NOT_FOUND")
        await self.refused(self.plane.describe(first.provider_id, OTHER), "NOT_FOUND")
        await self.refused(self.plane.describe("i-0123456789abcdef0", ZONE), "NOT_FOUND")

    async def test_somebody_elses_namesake_is_shown_alone_and_hides_nothing_of_ours(self) -> None:
        theirs = self.cloud.put_machine(ZONE, "vm-1")
        shown = await self.plane.describe("vm-1", ZONE)
        self.assertEqual(shown.provider_id, theirs)
        self.assertFalse(is_ours(shown.labels, RIG, OWNER))
        mine = await self.made()
        self.assertNotEqual(mine.provider_id, theirs)
        await self.plane.destroy(mine)

    async def test_the_volume_that_a_machine_left(self) -> None:
        left = self.cloud.put_volume(ZONE, 150, {"Name": "vm-1", **labels_of()})
        for name in ("vm-1", left):
            found = await self.plane.describe(name, ZONE)
            self.assertEqual((found.kind, found.name, found.provider_id), ("disk", name, left))
        await self.refused(self.plane.describe(left, OTHER), "NOT_FOUND")
        mine = await self.made()
        self.assertEqual(mine.kind, "machine")

    async def test_what_cannot_be_read_is_not_gone(self) -> None:
        await self.made()
        self.fault("html", action="DescribeInstances")
        await self.refused(self.plane.describe("vm-1", ZONE), "UNREACHABLE")


class DestroyTest(Ec2Case):
    async def test_that_very_machine_with_its_disk_and_a_second_time_nothing(self) -> None:
        rental = await self.made()
        await self.plane.destroy(rental)
        self.assert_nothing()
        await self.refused(self.plane.describe("vm-1", ZONE), "NOT_FOUND")
        await self.plane.destroy(rental)
        self.cloud.advance(2 * HOUR)  # EC2 has forgotten it
        long_ago = rental.model_copy(update={"created_unix": time.time() - HOUR})
        await self.plane.destroy(long_ago)
        self.assertEqual(len(self.cloud.sent("TerminateInstances")), 1)

    async def test_while_it_ends_it_is_told_as_ending(self) -> None:
        self.cloud.script.ending_s = 120.0
        rental = await self.made()
        await self.plane.destroy(rental)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "stopping")
        await self.plane.destroy(rental)
        self.assertEqual(len(self.cloud.sent("TerminateInstances")), 1)

    async def test_every_difference_to_what_was_read_leaves_it_untouched(self) -> None:
        rental = await self.made()
        theirs = self.cloud.put_machine(ZONE, "vm-1")
        marked = self.cloud.put_machine(ZONE, "vm-1", tags=labels_of(owner="ffffff"))
        labels = dict(rental.labels)
        changes: tuple[dict[str, Any], ...] = (
            {"provider_id": theirs},
            {"provider_id": marked},
            {"created_at": "2026-01-01T00:00:00+00:00"},
            {"labels": {**labels, "owner": "ffffff"}},
            {"labels": {**labels, "rig": "gpu-vllm-g6"}},
            {"labels": {}},
        )
        for change in changes:
            error = await self.refused(
                self.plane.destroy(rental.model_copy(update=change)), "DENIED"
            )
            self.assertIn("stays untouched", error.what)
        await self.refused(
            self.plane.destroy(rental.model_copy(update={"project": "999988887777"})), "DENIED"
        )
        self.assertEqual(self.cloud.sent("TerminateInstances"), [])

    async def test_a_machine_that_lost_a_mark_since_is_nobodys_to_end(self) -> None:
        rental = await self.made()
        with self.cloud.lock:
            self.cloud.machine("vm-1").model.add_tags({"owner": "somebody"})
        await self.refused(self.plane.destroy(rental), "DENIED")
        self.assertEqual(self.cloud.sent("TerminateInstances"), [])

    async def test_somebody_elses_by_a_rental_that_claims_it(self) -> None:
        theirs = self.cloud.put_machine(ZONE, "vm-1")
        shown = await self.plane.describe("vm-1", ZONE)
        self.assertEqual(shown.provider_id, theirs)
        await self.refused(self.plane.destroy(shown), "DENIED")
        claimed = shown.model_copy(update={"labels": labels_of()})
        await self.refused(self.plane.destroy(claimed), "DENIED")

    async def test_one_that_was_read_while_it_was_young_is_still_that_one(self) -> None:
        rental = await self.made()
        early = rental.model_copy(update={"created_at": rental.created_at})
        with self.cloud.lock:
            machine = self.cloud.machine("vm-1").model
            for _device, block in machine.get_block_device_mapping:
                block.attach_time = "2026-11-30T00:00:00Z"
        await self.plane.destroy(early)  # its start is known all the same
        self.assert_nothing()

    async def test_a_young_one_that_is_not_to_be_seen_is_not_gone(self) -> None:
        rental = await self.made()
        with self.cloud.lock:
            self.cloud.machine("vm-1").unseen = 1
        await self.refused(self.plane.destroy(rental), "UNKNOWN")
        await self.plane.destroy(rental)
        self.assert_nothing()

    async def test_a_lost_answer_is_settled_by_a_look(self) -> None:
        for code, lost in (("", "cut"), ("InternalError", ""), ("html", "")):
            rental = await self.made(intent=f"create-{code}{lost}")
            self.fault(code, action="TerminateInstances", lost=lost, after=True, times=1)
            await self.plane.destroy(rental)
            self.assert_nothing()

    async def test_a_lost_answer_with_the_machine_still_there_is_unknown(self) -> None:
        rental = await self.made()
        self.fault("InternalError", action="TerminateInstances", times=1)
        await self.refused(self.plane.destroy(rental), "UNKNOWN")
        self.fault("", action="TerminateInstances", lost="cut", after=True, times=1)
        self.fault("html", action="DescribeInstances", times=None)
        await self.refused(self.plane.destroy(rental), "UNREACHABLE")
        self.assert_one(rental.provider_id)

    async def test_a_protection_and_a_missing_permission(self) -> None:
        rental = await self.made()
        for code in ("OperationNotPermitted", "UnauthorizedOperation"):
            self.cloud.script.faults.clear()
            self.fault(code, action="TerminateInstances")
            await self.refused(self.plane.destroy(rental), "DENIED")
        self.assert_one(rental.provider_id)

    async def test_a_left_volume(self) -> None:
        self.cloud.put_volume(ZONE, 150, {"Name": "vm-1", **labels_of()})
        rental = await self.plane.describe("vm-1", ZONE)
        for change in (
            {"created_at": "2026-01-01T00:00:00+00:00"},
            {"labels": {**rental.labels, "owner": "ffffff"}},
        ):
            await self.refused(self.plane.destroy(rental.model_copy(update=change)), "DENIED")
        self.fault("", action="DeleteVolume", lost="cut", after=True, times=1)
        await self.plane.destroy(rental)
        self.assert_nothing()
        await self.plane.destroy(rental)
        self.assertEqual(len(self.cloud.sent("DeleteVolume")), 1)

    async def test_a_volume_that_hangs_on_a_machine_is_not_torn_off(self) -> None:
        await self.made()
        (disk,) = self.cloud.held()["volumes"]["us-east-1"]
        rental = await self.plane.describe(disk, ZONE)
        self.assertEqual((rental.kind, rental.state), ("disk", "running"))
        error = await self.refused(self.plane.destroy(rental), "DENIED")
        self.assertIn("hangs on a machine", error.what)
        self.assertEqual(self.cloud.sent("DeleteVolume"), [])


class SwitchTest(Ec2Case):
    async def test_stop_keeps_the_disk_and_start_takes_it_up_again(self) -> None:
        rental = await self.made("on-demand")
        await self.plane.stop_machine(rental)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "stopped")
        self.assert_one(rental.provider_id)
        await self.plane.stop_machine(rental)
        await self.plane.start_machine(rental)
        self.assertEqual((await self.plane.describe("vm-1", ZONE)).state, "running")
        await self.plane.start_machine(rental)
        self.assertEqual(len(self.cloud.sent("StopInstances")), 1)
        self.assertEqual(len(self.cloud.sent("StartInstances")), 1)

    async def test_a_spot_machine_cannot_be_stopped_and_that_is_said(self) -> None:
        rental = await self.made("spot")
        error = await self.refused(self.plane.stop_machine(rental), "INVALID")
        self.assertIn("one-time spot", error.what)
        self.assertIn("plan_destroy", error.next_step)
        self.assertEqual(self.cloud.sent("StopInstances"), [])

    async def test_a_start_can_meet_a_stockout(self) -> None:
        rental = await self.made("on-demand")
        await self.plane.stop_machine(rental)
        self.fault("InsufficientInstanceCapacity", action="StartInstances")
        await self.refused(self.plane.start_machine(rental), "CAPACITY")
        self.assertEqual(len(self.cloud.sent("StartInstances")), 1)

    async def test_what_is_not_ours_not_there_or_in_between(self) -> None:
        rental = await self.made("on-demand")
        theirs = self.cloud.put_machine(ZONE, "payroll")
        foreign = rental.model_copy(update={"provider_id": theirs})
        for act in (self.plane.stop_machine(foreign), self.plane.start_machine(foreign)):
            await self.refused(act, "DENIED")
        disk = rental.model_copy(update={"kind": "disk"})
        await self.refused(self.plane.stop_machine(disk), "NOT_FOUND")
        self.cloud.script.ending_s = 60.0
        await self.plane.stop_machine(rental)
        error = await self.refused(self.plane.start_machine(rental), "BUSY")
        self.assertIn("stopping", error.what)
        self.cloud.advance(61)
        self.cloud.script.pending_s = 60.0
        await self.plane.start_machine(rental)
        await self.refused(self.plane.stop_machine(rental), "BUSY")
        await self.plane.destroy(rental)
        await self.refused(self.plane.start_machine(rental), "NOT_FOUND")


class HostTest(Ec2Case):
    mark = "GEMMA4-BOOT driver begin 1796043998 looking"

    async def test_the_console_with_the_boots_own_marks_is_all_that_is_read(self) -> None:
        rental = await self.made()
        self.cloud.console = lambda one: f"[    0.0] Linux\n{self.mark}\n{one}\n"
        text = await self.plane.boot_text(rental)
        self.assertIn(self.mark, text)
        self.assertIn(rental.provider_id, text)
        self.assertEqual(self.cloud.sent("SendCommand"), [])
        (asked,) = self.cloud.sent("GetConsoleOutput")
        self.assertEqual(asked.parameters["Latest"], "true")

    async def test_before_the_console_tells_of_the_boot_its_own_log_does(self) -> None:
        rental = await self.made()
        self.cloud.console = lambda _one: "[    0.0] Linux\n"
        sent: list[str] = []

        def run(_machine: str, script: str) -> tuple[str, str, int]:
            sent.append(script)
            return f"{self.mark}\n", "", 0

        self.cloud.run_command = run
        text = await self.plane.boot_text(rental)
        self.assertEqual(text, f"[    0.0] Linux\n{self.mark}\n")
        (script,) = sent
        self.assertIn("boot_log", script)

    async def test_without_an_agent_the_console_alone_and_without_both_not_reached(self) -> None:
        rental = await self.made()
        self.cloud.agent_online = lambda _one: False
        error = await self.refused(self.plane.boot_text(rental), "UNREACHABLE")
        self.assertIn("nothing to its console yet", error.what)
        self.cloud.console = lambda _one: "[    0.0] Linux\n"
        self.assertEqual(await self.plane.boot_text(rental), "[    0.0] Linux\n")
        self.assertEqual(self.cloud.sent("SendCommand"), [])

    async def test_a_log_that_cannot_be_had_spoils_no_console(self) -> None:
        rental = await self.made()
        self.cloud.console = lambda _one: "[    0.0] Linux\n"
        self.cloud.run_command = lambda _one, _script: ("no such act\n", "", 2)
        self.assertEqual(await self.plane.boot_text(rental), "[    0.0] Linux\n")
        self.boot["boot-program"].unlink()
        self.assertEqual(await self.plane.boot_text(rental), "[    0.0] Linux\n")

    async def test_a_console_that_may_not_be_read_is_made_up_for_or_told(self) -> None:
        rental = await self.made()
        self.fault("UnauthorizedOperation", action="GetConsoleOutput")
        self.cloud.run_command = lambda _one, _script: (f"{self.mark}\n", "", 0)
        self.assertIn(self.mark, await self.plane.boot_text(rental))
        self.cloud.agent_online = lambda _one: False
        error = await self.refused(self.plane.boot_text(rental), "DENIED")
        self.assertIn("GetConsoleOutput", error.what)

    async def test_a_type_whose_console_knows_no_latest(self) -> None:
        rental = await self.made()
        self.cloud.console = lambda _one: f"{self.mark}\n"
        self.fault("UnsupportedOperation", action="GetConsoleOutput", times=1)
        self.assertIn(self.mark, await self.plane.boot_text(rental))

    async def test_an_act_reaches_the_machine_with_its_arguments(self) -> None:
        rental = await self.made()
        seen: list[tuple[str, str]] = []

        def run(machine: str, script: str) -> tuple[str, str, int]:
            seen.append((machine, script))
            return "the answer\n", "", 0

        self.cloud.run_command = run
        command = HostCommand(PROGRAM.encode(), "logs", {"lines": 20})
        text = await self.plane.run_on_host(rental, command, 30.0)
        self.assertIn("the answer", text)
        ((machine, script),) = seen
        self.assertEqual(machine, rental.provider_id)
        self.assertIn(" logs ", script)

    async def test_nobody_gets_into_a_machine_that_is_not_marked_or_does_not_run(self) -> None:
        self.cloud.put_machine(ZONE, "vm-1")
        theirs = await self.plane.describe("vm-1", ZONE)
        command = HostCommand(PROGRAM.encode(), "logs", {})
        await self.refused(self.plane.run_on_host(theirs, command, 5.0), "DENIED")
        with self.assertRaises(RigError):
            self.plane.tunnel(theirs, 8000, 8000)
        mine = await self.made(name="vm-2")
        for change in ({"state": "pending"}, {"kind": "disk"}):
            act = self.plane.run_on_host(mine.model_copy(update=change), command, 5.0)
            await self.refused(act, "UNREACHABLE")
        self.assertEqual(self.cloud.sent("SendCommand"), [])

    async def test_the_tunnel_is_a_program_of_ours_with_the_machines_id(self) -> None:
        rental = await self.made()
        more = {"HF_TOKEN": "hf_canary", "PATH": "/usr/bin", "HOME": "/nowhere"}
        more |= {"PYTHONPATH": "/packages"}  # where launch.py put AWS's SDK
        plane = Ec2(
            self.settings,
            lambda: self.boot,
            self.folder / "ssm_tunnel.py",
            {**self.environment, **more},
        )
        found = plane.tunnel(rental, 8123, 8000)
        program = str(self.folder / "ssm_tunnel.py")
        wanted = [sys.executable, program, rental.provider_id, "us-east-1", "8000", "8123"]
        self.assertEqual(list(found.argv), wanted)
        self.assertEqual(found.environment["AWS_ENDPOINT_URL"], self.cloud.base)
        self.assertEqual(found.environment["PATH"], "/usr/bin")
        self.assertEqual(found.environment["PYTHONPATH"], "/packages")
        self.assertNotIn("HF_TOKEN", found.environment)
        self.values["aws_profile"] = FAKE_AWS_PROFILE
        self.assertEqual(list(plane.tunnel(rental, 1, 2).argv)[-1], FAKE_AWS_PROFILE)


class EndedWhyTest(Ec2Case):
    async def why(self, rental: Rental) -> str:
        return await self.plane.ended_why(rental.name, rental.zone, rental.provider_id)

    async def test_four_ends_are_told_apart(self) -> None:
        told = []
        ends: tuple[Callable[[str], None], ...] = (
            self.cloud.interrupt,
            self.cloud.take_away,
            self.cloud.shut_down,
            lambda one: self.cloud.end(one, "Server.InternalError", "internal error"),
        )
        for number, end in enumerate(ends):
            rental = await self.made(intent=f"create-{number}")
            self.assertEqual(await self.why(rental), "")
            end(rental.provider_id)
            self.assert_nothing()
            told.append(await self.why(rental))
        taken, killed, itself, failed = told
        self.assertIn("EC2 took the spot machine back", taken)
        self.assertIn("through EC2's API", killed)
        self.assertIn("it shut itself down", itself)
        self.assertIn("EC2 failed while it started it", failed)

    async def test_stopped_behind_our_back(self) -> None:
        rental = await self.made("on-demand")
        await self.plane.stop_machine(rental)
        self.assertIn("ended or stopped through EC2's API", await self.why(rental))

    async def test_what_ec2_forgot_and_what_never_was(self) -> None:
        rental = await self.made()
        await self.plane.destroy(rental)
        self.cloud.advance(2 * HOUR)
        self.assertEqual(await self.why(rental), "")
        for one in ("", "vol-0123456789abcdef0", "i-0123456789abcdef0"):
            self.assertEqual(await self.plane.ended_why("vm-1", ZONE, one), "")

    async def test_of_a_namesake_nothing_is_told(self) -> None:
        first = await self.made()
        self.cloud.interrupt(first.provider_id)
        second = await self.made(intent="create-2")
        self.assertEqual(await self.why(second), "")
        self.assertIn("took the spot machine back", await self.why(first))


class SweepVerbsTest(Ec2Case):
    """Ask, look, cancel."""

    async def test_from_the_request_to_the_grant(self) -> None:
        self.cloud.script.pending_s = 30.0
        asked = request()
        await self.plane.ask(asked)
        self.assertEqual((await self.plane.look(asked)).state, "starting")
        self.cloud.advance(31)
        look = await self.plane.look(asked)
        rental = await self.plane.describe("vm-s", ZONE)
        self.assertEqual(
            (look.state, look.provider_id, look.created_at),
            ("granted", rental.provider_id, rental.created_at),
        )
        self.assertEqual(rental.labels, dict(asked.labels))

    async def test_one_that_was_never_made_is_gone_without_a_word(self) -> None:
        look = await self.plane.look(request())
        self.assertEqual((look.state, look.said), ("gone", ""))
        await self.plane.cancel(request())
        self.assertEqual(self.cloud.sent("TerminateInstances"), [])

    async def test_the_same_request_twice_is_one_machine(self) -> None:
        await self.plane.ask(request())
        await self.plane.ask(request())
        self.assert_one()

    async def test_cancel_ends_it_in_every_state_and_leaves_nothing(self) -> None:
        for number, (pending_s, market) in enumerate(
            ((600.0, "spot"), (0.0, "spot"), (0.0, "on-demand"))
        ):
            self.cloud.script.pending_s = pending_s
            asked = request(name=f"vm-{number}", market=market)
            await self.plane.ask(asked)
            if market == "on-demand":
                await self.plane.stop_machine(await self.plane.describe(asked.name, ZONE))
            await self.plane.cancel(asked)
            self.assertEqual((await self.plane.look(asked)).state, "gone")
            self.assert_nothing()
            await self.plane.cancel(asked)

    async def test_while_it_ends_it_is_not_gone_and_is_not_ended_again(self) -> None:
        self.cloud.script.ending_s = 120.0
        await self.plane.ask(request())
        await self.plane.cancel(request())
        look = await self.plane.look(request())
        self.assertEqual(look.state, "refused")
        self.assertIn("through EC2's API", look.said)
        await self.plane.cancel(request())
        self.assertEqual(len(self.cloud.sent("TerminateInstances")), 1)
        self.cloud.advance(121)
        self.assertEqual((await self.plane.look(request())).state, "gone")

    async def test_one_that_ended_before_it_was_looked_at_says_why(self) -> None:
        await self.plane.ask(request())
        self.cloud.interrupt("vm-s")
        look = await self.plane.look(request())
        self.assertEqual(look.state, "gone")
        self.assertEqual(read_refusal(look.said).reason, "stockout")

    async def test_found_by_its_token_where_its_tags_are_lost(self) -> None:
        await self.plane.ask(request())
        machine = self.cloud.machine("vm-s")
        self.cloud.interrupt(machine.id)
        with self.cloud.lock:
            self.cloud.ec2.model("us-east-1").tags[machine.id].clear()
        look = await self.plane.look(request())
        self.assertEqual(look.state, "gone")
        self.assertIn("took the spot machine back", look.said)

    async def test_a_live_one_without_its_marks_is_seen_and_not_ended(self) -> None:
        await self.plane.ask(request())
        with self.cloud.lock:
            self.cloud.machine("vm-s").model.add_tags({"owner": "somebody"})
        self.assertEqual((await self.plane.look(request())).state, "granted")
        await self.refused(self.plane.cancel(request()), "DENIED")
        self.assertEqual(self.cloud.sent("TerminateInstances"), [])

    async def test_what_others_made_is_neither_seen_nor_ended(self) -> None:
        asked = request()
        self.cloud.put_machine(ZONE, "vm-s")
        self.cloud.put_machine(ZONE, "vm-s", tags={"intent": asked.intent})
        self.cloud.put_machine(ZONE, "vm-s", tags={**asked.labels, "owner": "ffffff"})
        theirs = {**asked.labels, "rig": "gpu-vllm-g6"}
        self.cloud.put_volume(ZONE, 10, theirs)
        look = await self.plane.look(asked)
        self.assertEqual((look.state, look.said), ("gone", ""))
        await self.plane.cancel(asked)
        self.assertEqual(len(self.cloud.machines()), 3)
        self.assertEqual(self.cloud.sent("DeleteVolume"), [])

    async def test_a_volume_that_it_left_is_still_there_until_it_is_cancelled(self) -> None:
        asked = request()
        self.cloud.put_volume(ZONE, 150, dict(asked.labels))
        self.assertEqual((await self.plane.look(asked)).state, "refused")
        await self.plane.cancel(asked)
        self.assertEqual((await self.plane.look(asked)).state, "gone")
        self.assert_nothing()

    async def test_one_whose_disk_shows_before_it_does_is_starting_and_keeps_its_disk(self) -> None:
        self.cloud.script.unseen = 4
        asked = request()
        await self.plane.ask(asked)
        self.assertEqual((await self.plane.look(asked)).state, "starting")
        await self.plane.cancel(asked)
        self.assertEqual(self.cloud.sent("DeleteVolume"), [])
        self.assertEqual((await self.plane.look(asked)).state, "granted")

    async def test_twins_are_unreadable_and_one_cancel_ends_both(self) -> None:
        asked = request()
        await self.plane.ask(asked)
        self.values["instance_type"] = "g6.2xlarge"  # another token: what no rig does
        self.cloud.script.quotas["L-3819A6DF"] = 64.0
        await self.plane.ask(asked)
        self.assertEqual(len(self.cloud.machines()), 2)
        await self.refused(self.plane.look(asked), "UNKNOWN")
        await self.plane.cancel(asked)
        self.assert_nothing()

    async def test_the_refusal_of_a_profile_that_is_too_new_is_waited_for(self) -> None:
        self.cloud.script.profile_hidden = 3
        await self.plane.ask(request())
        self.assert_one()

    async def test_what_cannot_be_read_raises(self) -> None:
        self.fault("html", action="DescribeInstances", times=3)
        await self.refused(self.plane.look(request()), "UNREACHABLE")
        await self.refused(self.plane.ask(request(market="cheap")), "INVALID")
        self.assertEqual(self.launches(), 0)


class CloudClock:
    """The sweep's time is the cloud's: it passes for both when the sweep waits."""

    def __init__(self, cloud: FakeAws) -> None:
        self.cloud = cloud
        self.naps = 0

    def now(self) -> float:
        return self.cloud.world.now

    async def sleep(self, seconds: float) -> None:
        self.naps += 1
        self.cloud.advance(seconds)
        await asyncio.sleep(0)


class SweepTest(Ec2Case):
    """The whole sweep over the plane."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = CloudClock(self.cloud)
        self.told: list[str] = []

    def wish(
        self, *places: tuple[str, str] | str, hours: float = 2.0, most: int = 100
    ) -> SweepWish:
        pairs = [(one, "spot") if isinstance(one, str) else one for one in places]
        pairs = pairs or [(ZONE, "spot"), (OTHER, "spot")]
        return SweepWish(
            project=self.cloud.account,
            machine="GPU machine",
            name_stem=RIG,
            places=[SweepPlace(zone, market) for zone, market in pairs],
            deadline_unix=self.clock.now() + hours * HOUR,
            life_s=14_400,
            most_requests=most,
            labels=labels_of("sweep"),
        )

    def sweep(self, wish: SweepWish) -> CapacitySweep:
        folder = self.folder / "sweep"
        folder.mkdir(exist_ok=True)
        return CapacitySweep(
            self.plane, wish, folder, self.clock, self.told.append, reader=read_in_process
        )

    async def test_two_zones_out_and_the_third_grants(self) -> None:
        for zone in (ZONE, OTHER):
            self.fault("InsufficientInstanceCapacity", zone=zone)
        sweep = self.sweep(self.wish(ZONE, OTHER, "us-east-1d"))
        record = await sweep.run()
        assert record.found is not None
        self.assertEqual(record.found.zone, "us-east-1d")
        self.assertEqual(
            [one.ended for one in record.attempts], ["stockout", "stockout", "granted"]
        )
        self.assertEqual(self.launches(), 3)
        rental = await self.plane.describe(record.found.request.name, "us-east-1d")
        self.assertEqual(
            (rental.provider_id, rental.created_at),
            (record.found.provider_id, record.found.created_at),
        )
        self.assertTrue(is_ours(rental.labels, RIG, OWNER))
        self.assert_one(rental.provider_id)
        # Another sweep gives the same one again, and when it was destroyed it is not given.
        again = await self.sweep(self.wish(ZONE)).run()
        self.assertEqual(again.found, record.found)
        await self.plane.destroy(rental)
        self.cloud.script.faults.clear()
        self.cloud.advance(HOUR)
        third = await self.sweep(self.wish(ZONE)).run()
        assert third.found is not None
        self.assertEqual(third.found.zone, ZONE)
        self.assert_one(third.found.provider_id)

    async def test_the_zone_that_ec2_names_is_asked_next(self) -> None:
        for zone in (ZONE, OTHER):
            self.fault("InsufficientInstanceCapacity", zone=zone)
        # EC2 names every zone that lists the type; the first of them is wished last.
        record = await self.sweep(self.wish(ZONE, OTHER, "us-east-1a")).run()
        assert record.found is not None
        self.assertEqual([one.zone for one in record.attempts], [ZONE, "us-east-1a"])

    async def test_spot_is_refused_everywhere_and_on_demand_is_had(self) -> None:
        self.fault("InsufficientInstanceCapacity", market="spot")
        wish = self.wish((ZONE, "spot"), (OTHER, "spot"), (ZONE, "on-demand"), (OTHER, "on-demand"))
        record = await self.sweep(wish).run()
        assert record.found is not None
        self.assertEqual(record.found.request.market, "on-demand")
        self.assertEqual([m.market for m in self.cloud.machines()], ["on-demand"])
        self.assert_one(record.found.provider_id)

    async def test_a_price_too_low_shuts_spot_and_not_on_demand(self) -> None:
        self.values["spot_max_price"] = 0.01
        wish = self.wish((ZONE, "spot"), (OTHER, "spot"), (OTHER, "on-demand"))
        record = await self.sweep(wish).run()
        assert record.found is not None
        self.assertEqual([one.ended for one in record.attempts], ["price", "granted"])
        self.assertEqual(record.found.request.market, "on-demand")

    async def test_no_quota_skips_the_region_and_asks_in_the_next(self) -> None:
        self.cloud.script.region_quotas["us-east-1", "L-3819A6DF"] = 0.0
        record = await self.sweep(self.wish(ZONE, OTHER, "us-east-1d", FAR)).run()
        assert record.found is not None
        self.assertEqual([one.zone for one in record.attempts], [ZONE, FAR])
        self.assertEqual([one.ended for one in record.attempts], ["quota", "granted"])
        self.assert_one(record.found.provider_id)

    async def test_no_quota_anywhere(self) -> None:
        self.cloud.script.quotas["L-3819A6DF"] = 0.0
        await self.refused(self.sweep(self.wish(ZONE, FAR, hours=0.5)).run(), "QUOTA")
        self.assertEqual(self.launches(), 2)
        self.assert_nothing()

    async def test_a_missing_permission_stops_it_at_once(self) -> None:
        self.fault("UnauthorizedOperation")
        await self.refused(self.sweep(self.wish()).run(), "DENIED")
        self.assertEqual(self.launches(), 1)
        self.assert_nothing()

    async def test_a_machine_of_a_lost_call_is_found_and_kept_as_the_one(self) -> None:
        for lost, code in (("cut", ""), ("", "InternalError")):
            self.cloud.script = AwsScript()
            self.fault(code, lost=lost, after=True, times=1)
            sweep = self.sweep(self.wish())
            record = await sweep.run()
            assert record.found is not None
            self.assertEqual(record.found.zone, ZONE)
            self.assert_one(record.found.provider_id)
            await self.plane.destroy(
                await self.plane.describe(record.found.request.name, record.found.zone)
            )
            await sweep.release()

    async def test_what_was_made_although_it_was_refused_is_kept_or_ended(self) -> None:
        self.fault("InsufficientInstanceCapacity", after=True, times=1)
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assert_one(record.found.provider_id)

    async def test_what_is_seen_late_makes_no_twin(self) -> None:
        self.cloud.script.unseen = 12
        self.fault("", lost="cut", after=True, times=1)
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assertEqual(self.launches(), 1)
        self.assert_one(record.found.provider_id)

    async def test_a_lost_call_that_made_nothing_is_settled_before_the_next_place(self) -> None:
        self.fault("", lost="cut", times=1)
        begun = self.clock.now()
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assertGreaterEqual(self.clock.now() - begun, self.plane.settle_s)
        self.assertEqual(self.launches(), 2)
        self.assert_one(record.found.provider_id)

    async def test_one_that_does_not_come_up_is_ended_and_left(self) -> None:
        self.cloud.script.pending_s = 1e9
        self.plane.look_every_s = 60.0
        sweep = self.sweep(self.wish(ZONE, hours=0.5, most=1))
        await self.refused(sweep.run(), "CAPACITY")
        self.assert_nothing()
        self.assertIsNone(sweep.record.live)

    async def test_cancelled_while_it_waits_it_leaves_nothing(self) -> None:
        self.cloud.script.pending_s = 1e9
        self.cloud.script.ending_s = 90.0
        sweep = self.sweep(self.wish(ZONE))
        running = asyncio.ensure_future(sweep.run())
        while self.clock.naps < 2:
            await asyncio.sleep(0.01)
        self.assertEqual(len(self.cloud.machines()), 1)
        running.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await running
        self.assert_nothing()
        self.assertIsNone(sweep.record.live)

    async def test_an_end_that_does_not_take_is_unknown_and_named(self) -> None:
        self.cloud.script.pending_s = 1e9
        self.plane.look_every_s, self.plane.gone_s = 60.0, 20.0
        sweep = self.sweep(self.wish(ZONE, hours=0.5))

        async def run() -> None:
            running = asyncio.ensure_future(sweep.run())
            while not self.cloud.machines():
                await asyncio.sleep(0.01)
            self.cloud.script.stubborn.add(self.cloud.machines()[0].id)
            await running

        error = await self.refused(run(), "UNKNOWN")
        live = sweep.record.live
        assert live is not None
        self.assertIn(live.name, error.what)
        self.cloud.script = AwsScript()
        stuck = self.cloud.machines()[0]
        with self.cloud.lock:
            stuck.then_at = self.cloud.world.now
        record = await self.sweep(self.wish(OTHER)).run()  # settles the first before it asks
        assert record.found is not None
        self.assert_one(record.found.provider_id)
        self.assertEqual(record.found.zone, OTHER)

    async def test_taken_back_at_once_it_asks_elsewhere(self) -> None:
        self.cloud.script.pending_s = 30.0

        def taken(one: str, state: str) -> None:
            if state == "running" and self.cloud.machine(one).zone == ZONE:
                self.cloud.interrupt(one)

        self.cloud.changed = taken
        self.addCleanup(setattr, self.cloud, "changed", lambda _one, _state: None)
        record = await self.sweep(self.wish()).run()
        assert record.found is not None
        self.assertEqual(record.found.zone, OTHER)
        self.assert_one(record.found.provider_id)

    async def test_killed_while_it_waits_the_next_one_settles_what_it_left(self) -> None:
        self.cloud.script.pending_s = 1e9
        folder = self.folder / "sweep"
        folder.mkdir()
        source = f"""
            import asyncio, sys, time
            from pathlib import Path
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from forge.parts.knowledge.sweep_plan import SweepPlace, SweepWish
            from forge.parts.planes.ec2 import Ec2
            from forge.parts.planes.ec2_settings import Ec2Settings
            from forge.parts.planes.sweep import CapacitySweep
            from forge.parts.planes.sweep_plane import WallClock
            from forge.sweep_market import read_in_process
            settings = Ec2Settings(aws_account={self.cloud.account!r}, budget_usd=6.0)
            boot = {{"boot-program": Path({str(self.boot["boot-program"])!r}),
                     "gemma4-boot": Path({str(self.boot["gemma4-boot"])!r})}}
            plane = Ec2(lambda: settings, lambda: boot, Path("t.py"))
            wish = SweepWish({self.cloud.account!r}, "GPU machine", {RIG!r},
                [SweepPlace({ZONE!r}, "spot")], time.time() + 7200, 14400,
                labels={labels_of("x")!r})
            sweep = CapacitySweep(plane, wish, Path({str(folder)!r}), WallClock(),
                reader=read_in_process)
            asyncio.run(sweep.run())
        """
        program = [sys.executable, "-c", textwrap.dedent(source)]
        surroundings = {"PATH": os.environ["PATH"], **self.environment}
        surroundings["PYTHONPATH"] = os.pathsep.join(package_folders())
        child = subprocess.Popen(program, env=surroundings, start_new_session=True)
        try:
            for _ in range(2400):
                if self.cloud.machines() or child.poll() is not None:
                    break
                await asyncio.sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        (left,) = self.cloud.machines()
        self.assertTrue(is_ours(left.tags, RIG, OWNER), "marked from the call on")
        self.assertIn("expires", left.tags)
        self.assertEqual(left.model.instance_initiated_shutdown_behavior, "terminate")
        self.assertIn(b"14400", gzip.decompress(left.user_data))
        self.cloud.script.pending_s = 0.0
        record = await self.sweep(self.wish(OTHER)).run()
        assert record.found is not None
        self.assertNotEqual(record.found.provider_id, left.id)
        self.assert_one(record.found.provider_id)


class LookIsFrozenTest(unittest.TestCase):
    def test_a_request_is_not_changed_by_being_asked(self) -> None:
        with self.assertRaises(dataclasses.FrozenInstanceError):
            request().name = "other"  # type: ignore[misc]


if __name__ == "__main__":
    unittest.main()
