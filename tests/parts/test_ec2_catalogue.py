"""What EC2 offers, read from an AWS account on loopback through the real SDK."""

from __future__ import annotations

import asyncio
import re
import tempfile
import unittest
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.planes.capacity_plane import Offer
from forge.parts.planes.ec2_catalogue import Ec2Catalogue, on_demand_price, spot_prices
from forge.parts.planes.ec2_image import image_of_parameter
from forge.parts.planes.ec2_settings import EC2_REGIONS, Ec2Settings
from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_places import image_of, image_parameters
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, AwsScript, CallFault

X86 = Ec2Settings.model_fields["ami_parameter"].default
ARM = X86.replace("x86_64", "arm64")


class CatalogueCase(unittest.IsolatedAsyncioTestCase):
    """One fake for all tests of a class, renewed for each: moto's import takes a second."""

    cloud: ClassVar[FakeAws]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = cls.enterClassContext(FakeAws())
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def setUp(self) -> None:
        self.cloud.renew()
        self.script = self.cloud.script = AwsScript()
        self.aws = Aws(FAKE_AWS_ACCOUNT, "", self.cloud.environment(self.folder))
        self.now = 1000.0
        self.catalogue = Ec2Catalogue(lambda: self.now)
        self.catalogue.look_s = 40.0  # a busy machine is no failure

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])
        sent = {one.action for one in self.cloud.requests}
        changes = [one for one in sent if not re.match("Describe|Get", one)]
        self.assertEqual(changes, [], "a look changed something")

    def settings(self, **values: Any) -> Ec2Settings:
        return Ec2Settings(aws_account=FAKE_AWS_ACCOUNT, budget_usd=3, **values)

    async def offers(self, **values: Any) -> list[Offer]:
        return await self.catalogue.offers(self.aws, self.settings(**values))

    async def refused(self, error_class: str, what: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await what
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        return caught.exception


class OffersTest(CatalogueCase):
    async def test_each_wished_zone_and_way_in_the_owners_order(self) -> None:
        found = await self.offers(zones="us-west-2b,us-east-1a", markets="on-demand,spot")
        self.assertEqual(
            [(one.zone, one.market) for one in found],
            [
                ("us-west-2b", "on-demand"),
                ("us-west-2b", "spot"),
                ("us-east-1a", "on-demand"),
                ("us-east-1a", "spot"),
            ],
        )
        self.assertEqual({one.available for one in found}, {"unknown"}, "a list is no promise")

    async def test_without_zones_all_that_list_the_type_in_the_known_regions(self) -> None:
        found = await self.offers(markets="spot")
        regions = [one.zone[:-1] for one in found]
        self.assertEqual(list(dict.fromkeys(regions)), list(EC2_REGIONS))
        self.assertEqual(len({one.zone for one in found}), len(found))
        self.assertEqual({one.available for one in found}, {"unknown"})
        arm = {one.zone[:-1] for one in await self.offers(instance_type="g5g.xlarge", chip="t4g")}
        self.assertLess(arm, set(EC2_REGIONS), "moto's tables, from AWS: not everywhere")

    async def test_the_spot_price_is_the_newest_that_was_read(self) -> None:
        self.script.zone_prices["us-east-1a", "g6.xlarge"] = 0.3911
        self.script.zone_prices["us-east-1b", "g6.xlarge"] = 0.2
        first, second = await self.offers(zones="us-east-1a,us-east-1b", markets="spot")
        self.assertEqual(first.price_per_hour_usd, 0.3911)
        self.assertEqual(second.price_per_hour_usd, 0.2)
        self.assertRegex(
            first.price_source, r"^EC2's spot price since \d{4}-\d\d-\d\d \d\d:\d\d UTC; without"
        )

    async def test_a_zone_without_a_price_gets_none_invented(self) -> None:
        self.script.unpriced = {"us-east-1a"}
        (found,) = await self.offers(zones="us-east-1a", markets="spot")
        self.assertIsNone(found.price_per_hour_usd)
        self.assertIn("tells no spot price", found.price_source)
        self.assertEqual(found.available, "unknown")

    async def test_prices_that_cannot_be_read_are_told_and_leave_the_offer(self) -> None:
        self.script.faults = [
            CallFault("DescribeSpotPriceHistory", "UnauthorizedOperation", region="us-east-1")
        ]
        spot, fixed = await self.offers(zones="us-east-1a")
        self.assertIsNone(spot.price_per_hour_usd)
        self.assertIn("could not be read (DENIED)", spot.price_source)
        self.assertEqual(spot.available, "unknown")
        self.assertEqual(fixed.price_per_hour_usd, 0.8048)

    async def test_the_price_on_demand_has_its_date(self) -> None:
        (found,) = await self.offers(zones="us-east-1a", markets="on-demand")
        self.assertEqual(found.price_per_hour_usd, 0.8048)
        self.assertRegex(found.price_source, r"SkyPilot .*, 20\d\d.*; without the disk")
        self.assertEqual(self.cloud.sent("DescribeSpotPriceHistory"), [], "nobody asked for spot")

    async def test_over_the_highest_price_spot_is_no_offer(self) -> None:
        self.script.zone_prices["us-east-1a", "g6.xlarge"] = 0.5
        for most, available in ((0.49, "no"), (0.5, "unknown"), (0.0, "unknown")):
            spot, fixed = await self.offers(zones="us-east-1a", spot_max_price=most)
            self.assertEqual(spot.available, available, most)
            self.assertEqual(spot.price_per_hour_usd, 0.5)
            self.assertEqual(fixed.available, "unknown", "it is about spot alone")
        self.assertIn(
            "SPOT_MAX_PRICE=0.49",
            (await self.offers(zones="us-east-1a", spot_max_price=0.49))[0].how_known,
        )

    async def test_a_zone_without_the_type_is_no_offer(self) -> None:
        self.script.unlisted = {("us-east-1a", "g6.xlarge")}
        found = await self.offers(zones="us-east-1a,us-east-1b,us-east-1z", markets="spot")
        self.assertEqual([one.available for one in found], ["no", "unknown", "no"])
        self.assertIn("does not have g6.xlarge on its list", found[0].how_known)

    async def test_a_zone_without_a_default_subnet_is_no_offer(self) -> None:
        self.script.no_subnet = {"us-east-1a"}
        found = await self.offers(zones="us-east-1a,us-east-1b", markets="on-demand")
        self.assertEqual([one.available for one in found], ["no", "unknown"])
        self.assertIn("no default subnet", found[0].how_known)
        all_found = await self.offers(markets="on-demand")
        self.assertNotIn("us-east-1a", [one.zone for one in all_found])

    async def test_a_subnet_of_ones_own_makes_its_zone_the_only_one(self) -> None:
        answer = await self.aws.read("ec2", "us-east-1", "describe_subnets")
        own = next(s for s in answer["Subnets"] if s["AvailabilityZone"] == "us-east-1b")
        found = await self.offers(
            zones="us-east-1a,us-east-1b,us-west-2a", markets="spot", subnet=own["SubnetId"]
        )
        self.assertEqual([one.available for one in found], ["no", "unknown", "no"])
        self.assertIn(f"{own['SubnetId']} is not in it", found[0].how_known)

    async def test_a_region_that_cannot_be_read_makes_its_zones_unknown(self) -> None:
        self.script.faults = [
            CallFault("DescribeSubnets", "UnauthorizedOperation", region="us-east-1")
        ]
        found = await self.offers(zones="us-east-1a,us-west-2a", markets="spot")
        self.assertEqual([one.available for one in found], ["unknown", "unknown"])
        self.assertIn("could not be read (DENIED)", found[0].how_known)
        self.assertIsNone(found[0].price_per_hour_usd)
        self.assertIsNotNone(found[1].price_per_hour_usd)

    async def test_a_region_that_is_slow_holds_up_no_other(self) -> None:
        await self.offers(zones="us-east-1a,us-west-2a")  # the SDK is loaded, the lists are kept
        self.script.faults = [CallFault("DescribeSubnets", "", region="us-east-1", lost="hold")]
        self.catalogue.look_s = 3.0
        found = await self.offers(zones="us-east-1a,us-west-2a", markets="on-demand")
        self.assertIn("could not be read (TIMEOUT)", found[0].how_known)
        self.assertIn("the zone has it on its list", found[1].how_known)

    async def test_what_every_region_refuses_is_raised(self) -> None:
        self.script.credentials = "expired"
        await self.refused("AUTH", self.offers(zones="us-east-1a,us-west-2a"))
        self.script.credentials = ""
        self.script.faults = [CallFault("DescribeInstanceTypeOfferings", "UnauthorizedOperation")]
        await self.refused("DENIED", self.offers())

    async def test_words_that_are_no_zone_or_way_ask_nobody(self) -> None:
        await self.refused("INVALID", self.offers(zones="europe-west4-a"))
        await self.refused("INVALID", self.offers(markets="flex-start"))
        self.assertEqual(self.cloud.requests, [])

    async def test_the_list_is_kept_for_an_hour_and_the_prices_are_not(self) -> None:
        await self.offers(zones="us-east-1a")
        await self.offers(zones="us-east-1b")
        self.assertEqual(len(self.cloud.sent("DescribeInstanceTypeOfferings")), 1)
        self.assertEqual(len(self.cloud.sent("DescribeSpotPriceHistory")), 2)
        self.now += 3601
        await self.offers(zones="us-east-1a")
        self.assertEqual(len(self.cloud.sent("DescribeInstanceTypeOfferings")), 2)

    async def test_a_list_that_could_not_be_read_is_not_kept(self) -> None:
        self.script.faults = [CallFault("DescribeInstanceTypeOfferings", "AuthFailure", times=1)]
        await self.refused("AUTH", self.offers(zones="us-east-1a", markets="spot"))
        (found,) = await self.offers(zones="us-east-1a", markets="spot")
        self.assertEqual(found.available, "unknown")

    async def test_a_list_of_many_pages_is_read_to_its_end(self) -> None:
        whole = [one.zone for one in await self.offers(markets="spot")]
        self.script.page = 5  # the least that EC2 takes
        self.now += 3601
        self.assertEqual([one.zone for one in await self.offers(markets="spot")], whole)
        self.assertEqual(len(self.cloud.sent("DescribeInstanceTypeOfferings")) >= 6, True)


class PriceTest(CatalogueCase):
    async def test_by_zone_with_the_time_since_when(self) -> None:
        found = await spot_prices(self.aws, "g5g.xlarge", "us-east-1")
        self.assertTrue(found)
        for zone, (price, source) in found.items():
            self.assertEqual(price, self.cloud.world.spot_price(zone, "g5g.xlarge"))
            stamp = re.search(r"since (.*) UTC", source)
            assert stamp is not None
            since = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
            self.assertLessEqual(since, datetime.now(UTC))

    async def test_a_type_that_nobody_rents_as_spot_has_none(self) -> None:
        self.script.spot_prices = {}
        self.assertEqual(await spot_prices(self.aws, "g6.xlarge", "us-east-1"), {})

    async def test_on_demand_is_told_for_just_that_machine_and_region(self) -> None:
        self.assertEqual(on_demand_price("l4", "g6.xlarge", "us-east-2c")[0], 0.8048)
        self.assertEqual(on_demand_price("t4g", "g5g.xlarge", "us-west-2a")[0], 0.42)
        for chip, kind, zone in (
            ("l4", "g6.2xlarge", "us-east-1a"),
            ("l4", "g6.xlarge", "eu-west-1a"),
            ("t4g", "g6.xlarge", "us-east-1a"),
            ("l4", "gpu only", "us-east4-a"),
        ):
            price, why = on_demand_price(chip, kind, zone)
            self.assertIsNone(price)
            self.assertIn("no price of", why)


class QuotaTest(CatalogueCase):
    async def quota(self, market: str = "spot", zone: str = "us-east-1a", **values: Any) -> Any:
        kind: Any = market
        return await self.catalogue.quota(self.aws, self.settings(**values), zone, kind)

    async def test_vcpus_are_told_in_machines(self) -> None:
        self.script.quotas.update({"L-3819A6DF": 8.0, "L-DB2E81BA": 15.0})
        for market, code, limit in (("spot", "L-3819A6DF", 2), ("on-demand", "L-DB2E81BA", 3)):
            found = await self.quota(market)
            self.assertEqual((found.limit, found.used), (limit, 0))
            self.assertIn(code, found.name)
            self.assertIn("us-east-1, of 4 vCPUs each", found.name)
        self.assertEqual((await self.quota(instance_type="g6.2xlarge")).limit, 1)
        self.assertEqual((await self.quota(instance_type="g6.4xlarge")).limit, 0)

    async def test_a_new_account_has_none(self) -> None:
        self.script.quotas["L-3819A6DF"] = 0.0
        found = await self.quota()
        self.assertEqual((found.limit, found.used), (0, 0))

    async def test_each_region_has_its_own(self) -> None:
        self.script.region_quotas["us-west-2", "L-3819A6DF"] = 64.0
        self.assertEqual((await self.quota(zone="us-west-2a")).limit, 16)
        self.assertEqual((await self.quota()).limit, 2)

    async def test_what_runs_counts_by_its_size_whosever_it_is(self) -> None:
        self.script.quotas["L-DB2E81BA"] = 32.0
        self.cloud.put_machine("us-east-1b", instance_type="g4dn.xlarge")
        self.cloud.put_machine("us-east-1a", instance_type="g6.4xlarge")
        found = await self.quota("on-demand")
        self.assertEqual((found.limit, found.used), (8, 5))

    async def test_a_machine_of_half_the_size_takes_all_of_a_place(self) -> None:
        self.script.quotas["L-DB2E81BA"] = 16.0
        self.cloud.put_machine("us-east-1b", instance_type="g4dn.xlarge")
        found = await self.quota("on-demand", instance_type="g6.2xlarge")
        self.assertEqual(found.limit - found.used, 1, "16 vCPUs less 4 are one machine of 8")

    async def test_what_draws_on_another_quota_does_not_count(self) -> None:
        self.cloud.put_machine("us-east-1a", instance_type="m5.large")
        self.cloud.put_machine("us-west-2a", instance_type="g6.xlarge")
        self.cloud.put_machine("us-east-1a", instance_type="g6.xlarge", market="spot")
        self.cloud.put_machine("us-east-1a", instance_type="inf2.xlarge")
        self.assertEqual((await self.quota("on-demand")).used, 0)
        self.assertEqual((await self.quota("spot")).used, 1)
        neuron = await self.quota("on-demand", instance_type="inf2.xlarge", chip="inf2")
        self.assertIn("L-1945791B", neuron.name)
        self.assertEqual((neuron.limit, neuron.used), (2, 1))

    async def test_a_machine_that_ended_does_not_count(self) -> None:
        ours = self.cloud.put_machine("us-east-1a", market="spot")
        self.assertEqual((await self.quota()).used, 1)
        self.cloud.take_away(ours)
        self.assertEqual((await self.quota()).used, 0)

    async def test_over_the_limit_there_is_no_room_and_no_more_than_none(self) -> None:
        self.script.quotas["L-DB2E81BA"] = 4.0
        self.cloud.put_machine("us-east-1a", instance_type="g6.4xlarge")
        found = await self.quota("on-demand")
        self.assertEqual((found.limit, found.used), (1, 1))

    async def test_a_family_whose_quota_is_not_known_is_said_to_be_so(self) -> None:
        said = await self.refused("UNKNOWN", self.quota(instance_type="p5.48xlarge"))
        self.assertIn("p5.48xlarge", said.what)
        await self.refused("UNKNOWN", self.quota("reserved"))

    async def test_a_quota_that_was_never_set_is_everybodys(self) -> None:
        self.script.faults = [CallFault("GetServiceQuota", "NoSuchResourceException", times=1)]
        self.assertEqual((await self.quota()).limit, 2)
        self.assertEqual(len(self.cloud.sent("GetAWSDefaultServiceQuota")), 1)

    async def test_a_quota_that_does_not_come_is_no_quota(self) -> None:
        self.script.faults = [CallFault("GetServiceQuota", "", lost="hold")]
        self.catalogue.look_s = 0.5
        await self.refused("TIMEOUT", self.quota())

    async def test_without_the_permission_to_read_it_nothing_is_said(self) -> None:
        self.script.faults = [CallFault("GetServiceQuota", "AccessDeniedException")]
        said = await self.refused("DENIED", self.quota())
        self.assertIn("GetServiceQuota", said.what)


class ImageTest(CatalogueCase):
    async def image(self, region: str = "us-east-1", **values: Any) -> Any:
        return await self.catalogue.machine_image(self.aws, self.settings(**values), region)

    async def test_it_is_what_the_parameter_means_in_that_region_now(self) -> None:
        for region in ("us-east-1", "us-west-2"):
            found = await self.image(region)
            self.assertEqual(found.image_id, image_of(region, X86))
            self.assertEqual((found.root_device, found.architecture), ("/dev/sda1", "x86_64"))
            self.assertEqual(found.disk_gb, 35)
            self.assertIn("Deep Learning", found.name)
        await self.image()
        self.assertEqual(len(self.cloud.sent("GetParameter")), 3, "it is asked anew each time")

    async def test_the_root_device_is_the_images_own(self) -> None:
        amazon = X86.replace("ubuntu-24.04", "amazon-linux-2023")
        self.assertEqual((await self.image(ami_parameter=amazon)).root_device, "/dev/xvda")

    async def test_a_machine_gets_an_image_of_its_architecture(self) -> None:
        values = {"instance_type": "g5g.xlarge", "chip": "t4g"}
        found = await self.image(**values, ami_parameter=ARM)
        self.assertEqual(found.architecture, "arm64")
        said = await self.refused("INVALID", self.image(**values))
        self.assertIn("g5g.xlarge boots arm64", said.what)
        await self.refused("INVALID", self.image(ami_parameter=ARM))

    async def test_a_disk_that_is_too_small_is_refused_with_the_size(self) -> None:
        self.script.image_gb = 75
        said = await self.refused("INVALID", self.image(root_disk_gb=60))
        self.assertIn("needs 75", said.what)
        self.assertIn("75", said.next_step)
        self.assertEqual((await self.image(root_disk_gb=75)).disk_gb, 75)

    async def test_a_parameter_that_is_gone_is_answered_with_those_most_like_it(self) -> None:
        gone = X86.replace("24.04", "20.04")
        said = await self.refused("INVALID", self.image(ami_parameter=gone))
        self.assertIn(gone, said.what)
        self.assertIn("us-east-1", said.what)
        self.assertIn(X86, said.next_step)
        self.assertNotIn("arm64", said.next_step)
        self.assertLess(said.next_step.index("base-oss"), said.next_step.index("pytorch"))

    async def test_a_path_of_nowhere_has_no_neighbours(self) -> None:
        said = await self.refused(
            "INVALID", self.image(ami_parameter="/aws/service/nowhere/at/all/latest/ami-id")
        )
        self.assertIn("/aws/service", said.next_step)

    async def test_neighbours_that_cannot_be_read_leave_the_answer_readable(self) -> None:
        self.script.no_parameters = {X86}
        self.script.faults = [CallFault("GetParametersByPath", "AccessDeniedException")]
        said = await self.refused("INVALID", self.image())
        self.assertIn("is gone in us-east-1", said.what)

    async def test_neurons_parameters_end_otherwise_and_are_found(self) -> None:
        known = next(one for one in image_parameters() if one.endswith("image_id"))
        found = await image_of_parameter(self.aws, known, "us-east-1")
        self.assertEqual(found.image_id, image_of("us-east-1", known))
        with self.assertRaisesRegex(RigError, "image_id"):
            gone = known.replace("ubuntu-24.04", "ubuntu-22.04")
            await image_of_parameter(self.aws, gone, "us-east-1")

    async def test_other_refusals_are_no_absence(self) -> None:
        self.script.faults = [CallFault("GetParameter", "AccessDeniedException")]
        await self.refused("DENIED", self.image())
        self.assertEqual(self.cloud.sent("GetParametersByPath"), [])

    async def test_an_image_that_was_taken_back_is_no_image(self) -> None:
        with self.cloud.lock:
            del self.cloud.ec2.model("us-east-1").amis[image_of("us-east-1", X86)]
        with self.assertRaises(RigError) as caught:
            await self.image()
        self.assertIn(caught.exception.error_class, ("NOT_FOUND", "INVALID"))
        self.assertIn(image_of("us-east-1", X86), caught.exception.what)

    async def test_a_type_that_does_not_exist_is_refused(self) -> None:
        await self.refused("INVALID", self.image(instance_type="g6.tiny"))


class FactsTest(CatalogueCase):
    async def test_they_are_the_types_own_and_kept(self) -> None:
        for kind, vcpus, arch, memory in (
            ("g6.xlarge", 4, "x86_64", 16384),
            ("g5g.xlarge", 4, "arm64", 8192),
            ("g5g.2xlarge", 8, "arm64", 16384),
        ):
            found = await self.catalogue.instance_facts(self.aws, kind, "us-east-1")
            self.assertEqual((found.vcpus, found.architectures), (vcpus, (arch,)))
            self.assertEqual(found.memory_mib, memory)
        sent = len(self.cloud.sent("DescribeInstanceTypes"))
        await self.catalogue.instance_facts(self.aws, "g6.xlarge", "us-east-1")
        self.assertEqual(len(self.cloud.sent("DescribeInstanceTypes")), sent)


if __name__ == "__main__":
    unittest.main()
