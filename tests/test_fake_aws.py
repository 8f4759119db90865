"""The fake AWS, asked by boto3 clients as the rigs ask the real one: what lives, fails, ends."""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ReadTimeoutError,
)

from forge.suites.fake_aws import FAKE_AWS_PROFILE, FAKE_AWS_REQUIREMENTS, FakeAws
from forge.suites.fake_aws_launch import quota_code
from forge.suites.fake_aws_places import image_of, image_parameters
from forge.suites.fake_aws_ssm import CUT_MARK, STDERR_LIMIT, STDOUT_LIMIT, cut_output
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, AwsScript, CallFault, zone_home

REGION, ZONE = "us-east-1", "us-east-1b"
BASE_IMAGE = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)
AMAZON_IMAGE = BASE_IMAGE.replace("ubuntu-24.04", "amazon-linux-2023")
OURS = [{"Key": "managed-by", "Value": "gemma4-rigs"}, {"Key": "Name", "Value": "rig-1"}]
BY_TAG = [{"Name": "tag:managed-by", "Values": ["gemma4-rigs"]}]
TAGGED = ("instance", "volume", "network-interface", "spot-instances-request")
CANARY = "hf_made_up_canary_of_the_fake_aws"
HOUR = 3600.0


def once(**more: Any) -> Config:
    """A client's configuration with one attempt a call."""
    return Config(retries={"mode": "standard", "total_max_attempts": 1}, **more)


class Case(unittest.TestCase):
    """An empty account, and clients for it. The clients live as long as the class."""

    cloud: ClassVar[FakeAws]
    _clients: ClassVar[dict[tuple[str, str], Any]]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = cls.enterClassContext(FakeAws())
        cls._clients = {}
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        hidden = [name for name in os.environ if name.startswith("AWS_")]
        cls.enterClassContext(mock.patch.dict(os.environ))
        for name in hidden:
            del os.environ[name]
        os.environ.update(cls.cloud.environment(folder))

    def setUp(self) -> None:
        self.cloud.renew()

    @property
    def script(self) -> AwsScript:
        return self.cloud.script

    def client(self, service: str, region: str = REGION) -> Any:
        key = (service, region)
        if key not in self._clients:
            self._clients[key] = boto3.client(service, region_name=region, config=once())
        return self._clients[key]

    @property
    def ec2(self) -> Any:
        return self.client("ec2")

    @property
    def ssm(self) -> Any:
        return self.client("ssm")

    def refused(self, call: Callable[..., Any], /, **given: Any) -> tuple[str, str, int]:
        """The code, the message and the HTTP status of a call that fails."""
        with self.assertRaises(ClientError) as caught:
            call(**given)
        answer: Any = caught.exception.response
        return (
            answer["Error"]["Code"],
            answer["Error"]["Message"],
            answer["ResponseMetadata"]["HTTPStatusCode"],
        )

    def subnet(self, zone: str = ZONE) -> str:
        rows = self.client("ec2", zone_home(zone)).describe_subnets(
            Filters=[{"Name": "availability-zone", "Values": [zone]}]
        )["Subnets"]
        return str(rows[0]["SubnetId"])

    def order(self, zone: str = ZONE, **changes: Any) -> dict[str, Any]:
        """What a rig orders: on demand, in the zone's default subnet."""
        region = zone_home(zone)
        nic = {"DeviceIndex": 0, "SubnetId": self.subnet(zone), "AssociatePublicIpAddress": True}
        disk = {"VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True}
        return {
            "ImageId": image_of(region, BASE_IMAGE),
            "InstanceType": "g6.xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            "UserData": "#!/bin/sh\necho hello\n",
            "NetworkInterfaces": [nic],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "BlockDeviceMappings": [
                {"DeviceName": "/dev/sda1", "Ebs": {**disk, "DeleteOnTermination": True}}
            ],
            "TagSpecifications": [{"ResourceType": kind, "Tags": OURS} for kind in TAGGED[:3]],
            **changes,
        }

    def spot(self, zone: str = ZONE, **changes: Any) -> dict[str, Any]:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        market = {"MarketType": "spot", "SpotOptions": options}
        tags = [{"ResourceType": kind, "Tags": OURS} for kind in TAGGED]
        given = {"InstanceMarketOptions": market, "TagSpecifications": tags, **changes}
        return self.order(zone, **given)

    def launched(self, order: dict[str, Any] | None = None, region: str = REGION) -> str:
        """A machine's id, launched as ordered."""
        answer = self.client("ec2", region).run_instances(**(order or self.order()))
        return str(answer["Instances"][0]["InstanceId"])

    def row(self, machine: str, region: str = REGION) -> dict[str, Any]:
        answer = self.client("ec2", region).describe_instances(InstanceIds=[machine])
        return dict(answer["Reservations"][0]["Instances"][0])

    def state(self, machine: str) -> str:
        return str(self.row(machine)["State"]["Name"])

    def until(self, held: Callable[[], bool]) -> None:
        """Waits for what a thread of the fake does."""
        deadline = time.monotonic() + 20
        while not held() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertTrue(held())


class TheAccount(Case):
    def test_it_says_whose_credentials_these_are(self) -> None:
        who = self.client("sts").get_caller_identity()
        self.assertEqual(who["Account"], FAKE_AWS_ACCOUNT)
        self.script.account = "444455556666"
        self.assertEqual(self.client("sts").get_caller_identity()["Account"], "444455556666")

    def test_a_profile_of_the_folder_is_the_same_account(self) -> None:
        session = boto3.Session(profile_name=FAKE_AWS_PROFILE)
        client = session.client("sts", region_name=REGION, config=once())
        self.assertEqual(client.get_caller_identity()["Account"], FAKE_AWS_ACCOUNT)

    def test_useless_credentials_are_refused_as_each_service_does_it(self) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "ec2": self.ec2.describe_regions,
            "ssm": self.ssm.describe_instance_information,
            "sts": self.client("sts").get_caller_identity,
        }
        self.script.credentials = "expired"
        codes = {name: self.refused(call)[0] for name, call in calls.items()}
        expired = ("RequestExpired", "ExpiredTokenException", "ExpiredToken")
        self.assertEqual(tuple(codes.values()), expired)
        self.script.credentials = "invalid"
        codes = {name: self.refused(call)[0] for name, call in calls.items()}
        invalid = ("AuthFailure", "UnrecognizedClientException", "InvalidClientTokenId")
        self.assertEqual(tuple(codes.values()), invalid)

    def test_keys_that_were_not_given_out_here_are_invalid(self) -> None:
        foreign = boto3.client(
            "sts",
            region_name=REGION,
            config=once(),
            aws_access_key_id="ANOTHERMADEUPKEY",
            aws_secret_access_key="made-up",
        )
        code, _words, status = self.refused(foreign.get_caller_identity)
        self.assertEqual((code, status), ("InvalidClientTokenId", 403))

    def test_a_region_that_is_not_enabled_knows_no_credentials(self) -> None:
        abroad = self.client("ec2", "af-south-1")
        self.assertEqual(self.refused(abroad.describe_instances)[0], "AuthFailure")
        known = self.ec2.describe_regions()["Regions"]
        self.assertEqual([one["RegionName"] for one in known], list(self.script.regions))
        every = self.ec2.describe_regions(AllRegions=True)["Regions"]
        out = [one["RegionName"] for one in every if one["OptInStatus"] == "not-opted-in"]
        self.assertEqual(out, ["af-south-1"])

    def test_other_hosts_are_refused_and_noted(self) -> None:
        with mock.patch.dict(os.environ):
            del os.environ["AWS_ENDPOINT_URL"]
            astray = boto3.client("ec2", region_name=REGION, config=once())
        with self.assertRaises(BotoCoreError):
            astray.describe_regions()
        self.assertEqual(self.cloud.escapes, ["ec2.us-east-1.amazonaws.com:443"])

    def test_requests_are_recorded_without_credentials(self) -> None:
        self.ec2.describe_volumes(Filters=BY_TAG)
        (sent,) = self.cloud.sent("DescribeVolumes")
        self.assertEqual((sent.service, sent.region), ("ec2", REGION))
        self.assertEqual(sent.parameters["Filter.1.Name"], "tag:managed-by")
        self.assertNotIn("MADEUP", repr(self.cloud.requests))

    def test_an_emptied_account_has_nothing_and_keeps_what_is_plugged_in(self) -> None:
        self.cloud.console = lambda machine: f"console of {machine}"
        self.addCleanup(setattr, self.cloud, "console", lambda _machine: "")
        self.cloud.put_secret(REGION, "hf-token", CANARY)
        self.cloud.put_profile()
        self.client("s3").create_bucket(Bucket="made-up-bucket")
        self.launched()
        self.script.faults.append(CallFault(action="*"))
        self.cloud.renew()
        self.assertEqual(self.cloud.held(), {})
        self.assertEqual(self.cloud.requests, [])
        self.assertEqual(self.client("iam").list_roles()["Roles"], [])
        machine = self.launched()
        answer = self.ec2.get_console_output(InstanceId=machine)
        self.assertEqual(answer["Output"], f"console of {machine}")

    def test_it_is_light_to_import_and_says_what_it_needs(self) -> None:
        program = (
            "import sys, forge.suites.fake_aws\n"
            "heavy = {'moto', 'flask', 'werkzeug', 'boto3', 'botocore'} & set(sys.modules)\n"
            "sys.exit(str(heavy) if heavy else 0)"
        )
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([one.split(">")[0] for one in FAKE_AWS_REQUIREMENTS], ["moto"])

    def test_nothing_of_its_server_remains_after_the_stop(self) -> None:
        with FakeAws("777788889999") as other:
            port = other.port
            self.assertEqual(other.base, f"http://127.0.0.1:{port}")
        other.stop()
        self.assertEqual(other.port, 0)


class Places(Case):
    def offered(self, instance_type: str, region: str = REGION) -> list[str]:
        rows = self.client("ec2", region).describe_instance_type_offerings(
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [instance_type]}],
        )["InstanceTypeOfferings"]
        return sorted(one["Location"][-1] for one in rows)

    def test_zones_offer_what_aws_listed_and_the_script_leaves(self) -> None:
        self.assertEqual(self.offered("g6.xlarge"), ["a", "b", "c", "d", "f"])
        self.assertEqual(self.offered("g5g.xlarge"), ["a", "b", "c", "d"])
        self.assertEqual(self.offered("g6.xlarge", "eu-west-1"), [])
        self.script.unlisted.add((ZONE, "g6.xlarge"))
        self.assertEqual(self.offered("g6.xlarge"), ["a", "c", "d", "f"])

    def test_each_zone_has_a_default_subnet_until_somebody_deletes_it(self) -> None:
        def zones() -> list[str]:
            rows = self.ec2.describe_subnets(
                Filters=[{"Name": "default-for-az", "Values": ["true"]}]
            )["Subnets"]
            return sorted(one["AvailabilityZone"] for one in rows)

        self.assertEqual(zones(), [f"us-east-1{letter}" for letter in "abcdef"])
        self.script.no_subnet.add(ZONE)
        self.assertNotIn(ZONE, zones())
        self.assertEqual(len(zones()), 5)

    def test_the_public_parameters_name_images_with_their_own_root_device(self) -> None:
        roots = {}
        for path in (BASE_IMAGE, AMAZON_IMAGE):
            value = self.ssm.get_parameter(Name=path)["Parameter"]["Value"]
            self.assertEqual(value, image_of(REGION, path))
            (image,) = self.ec2.describe_images(ImageIds=[value])["Images"]
            self.assertEqual(image["Architecture"], "x86_64")
            (disk,) = image["BlockDeviceMappings"]
            self.assertEqual(disk["DeviceName"], image["RootDeviceName"])
            self.assertEqual(disk["Ebs"]["VolumeSize"], self.script.image_gb)
            roots[path] = image["RootDeviceName"]
        self.assertEqual(list(roots.values()), ["/dev/sda1", "/dev/xvda"])

    def test_an_image_for_arm_is_another_one_and_differs_by_region(self) -> None:
        path = BASE_IMAGE.replace("x86_64", "arm64")
        found = set()
        for region in ("us-east-1", "us-west-2"):
            value = self.client("ssm", region).get_parameter(Name=path)["Parameter"]["Value"]
            found.add(value)
            (image,) = self.client("ec2", region).describe_images(ImageIds=[value])["Images"]
            self.assertEqual(image["Architecture"], "arm64")
        self.assertEqual(len(found), 2)

    def test_a_parameter_that_is_gone_is_not_found_and_its_neighbours_are_listed(self) -> None:
        self.script.no_parameters.add(BASE_IMAGE)
        code, _words, status = self.refused(self.ssm.get_parameter, Name=BASE_IMAGE)
        self.assertEqual((code, status), ("ParameterNotFound", 400))
        pages = self.ssm.get_paginator("get_parameters_by_path").paginate(
            Path="/aws/service/", Recursive=True, PaginationConfig={"PageSize": 3}
        )
        found = [[one["Name"] for one in page["Parameters"]] for page in pages]
        self.assertTrue(all(len(page) <= 3 for page in found))
        names = [name for page in found for name in page]
        self.assertEqual(sorted(names), sorted(set(image_parameters()) - {BASE_IMAGE}))
        flat = self.ssm.get_parameters_by_path(Path="/aws/service/deeplearning/ami/x86_64")
        self.assertEqual(flat["Parameters"], [])
        both = self.ssm.get_parameters(Names=[BASE_IMAGE, AMAZON_IMAGE])
        self.assertEqual(both["InvalidParameters"], [BASE_IMAGE])

    def test_spot_prices_are_told_by_zone_newest_first(self) -> None:
        self.script.zone_prices[ZONE, "g6.xlarge"] = 0.4321
        self.script.unpriced.add("us-east-1a")
        rows = self.ec2.describe_spot_price_history(
            InstanceTypes=["g6.xlarge"], ProductDescriptions=["Linux/UNIX"]
        )["SpotPriceHistory"]
        self.assertNotIn("us-east-1a", {one["AvailabilityZone"] for one in rows})
        here = [one for one in rows if one["AvailabilityZone"] == ZONE]
        self.assertEqual([one["SpotPrice"] for one in here], ["0.432100", "0.475310"])
        self.assertGreater(here[0]["Timestamp"], here[1]["Timestamp"])

    def test_the_price_history_has_filters_and_pages(self) -> None:
        pages = self.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=["g6.xlarge", "g5g.xlarge"],
            Filters=[{"Name": "availability-zone", "Values": [ZONE]}],
            PaginationConfig={"PageSize": 3},
        )
        rows = [one for page in pages for one in page["SpotPriceHistory"]]
        self.assertEqual({one["AvailabilityZone"] for one in rows}, {ZONE})
        self.assertEqual({one["InstanceType"] for one in rows}, {"g6.xlarge", "g5g.xlarge"})
        self.assertEqual({one["ProductDescription"] for one in rows}, {"Linux/UNIX", "Windows"})
        self.assertEqual(len(rows), 8)

    def test_quotas_count_vcpus_by_code_and_region(self) -> None:
        client = self.client("service-quotas")
        self.script.quotas["L-3819A6DF"] = 0.0
        self.script.region_quotas["us-west-2", "L-DB2E81BA"] = 64.0

        def value(code: str, region: str = REGION) -> float:
            asked = self.client("service-quotas", region)
            answer = asked.get_service_quota(ServiceCode="ec2", QuotaCode=code)
            return float(answer["Quota"]["Value"])

        self.assertEqual((value("L-DB2E81BA"), value("L-3819A6DF")), (8.0, 0.0))
        self.assertEqual(value("L-DB2E81BA", "us-west-2"), 64.0)
        listed = client.list_service_quotas(ServiceCode="ec2")["Quotas"]
        self.assertIn("L-3819A6DF", [one["QuotaCode"] for one in listed])
        code, _words, _status = self.refused(
            client.get_service_quota, ServiceCode="ec2", QuotaCode="L-00000000"
        )
        self.assertEqual(code, "NoSuchResourceException")

    def test_a_type_belongs_to_the_quota_of_its_family(self) -> None:
        self.assertEqual(quota_code("g6.xlarge", False), "L-DB2E81BA")
        self.assertEqual(quota_code("g5g.2xlarge", True), "L-3819A6DF")
        self.assertEqual(quota_code("inf2.xlarge", False), "L-1945791B")
        self.assertEqual(quota_code("m7i.large", False), "")


class Launches(Case):
    def test_a_spot_machine_is_as_it_was_ordered(self) -> None:
        self.cloud.put_profile()
        order = self.spot(IamInstanceProfile={"Name": "gemma4-rig"}, ClientToken="token-1")
        answer = self.ec2.run_instances(**order)["Instances"][0]
        self.assertEqual(answer["State"]["Name"], "pending")
        self.assertEqual(answer["StateReason"], {"Code": "pending", "Message": "pending"})
        row = self.row(answer["InstanceId"])
        self.assertEqual(row["State"], {"Code": 16, "Name": "running"})
        self.assertNotIn("StateReason", row)
        self.assertEqual(row["StateTransitionReason"], "")
        self.assertEqual(row["InstanceLifecycle"], "spot")
        self.assertRegex(row["SpotInstanceRequestId"], r"^sir-")
        self.assertEqual(row["Placement"]["AvailabilityZone"], ZONE)
        self.assertEqual(row["ClientToken"], "token-1")
        self.assertEqual(row["MetadataOptions"]["HttpTokens"], "required")
        self.assertEqual(row["MetadataOptions"]["HttpPutResponseHopLimit"], 1)
        self.assertTrue(row["IamInstanceProfile"]["Arn"].endswith(":instance-profile/gemma4-rig"))
        self.assertTrue(row["PublicIpAddress"])
        self.assertEqual(row["Architecture"], "x86_64")
        behaviour = self.ec2.describe_instance_attribute(
            InstanceId=row["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        value = behaviour["InstanceInitiatedShutdownBehavior"]["Value"]
        self.assertEqual(value, "terminate")
        self.assertEqual(
            self.cloud.user_data(row["InstanceId"]), b"#!/bin/sh\necho hello\n", "user data"
        )

    def test_everything_that_a_launch_makes_bears_its_tags(self) -> None:
        machine = self.launched(self.spot())
        (volume,) = self.ec2.describe_volumes(Filters=BY_TAG)["Volumes"]
        self.assertEqual((volume["Size"], volume["VolumeType"]), (100, "gp3"))
        self.assertTrue(volume["Encrypted"])
        (held,) = volume["Attachments"]
        self.assertEqual((held["InstanceId"], held["DeleteOnTermination"]), (machine, True))
        (nic,) = self.ec2.describe_network_interfaces(Filters=BY_TAG)["NetworkInterfaces"]
        self.assertEqual(nic["Attachment"]["InstanceId"], machine)
        (request,) = self.ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        self.assertEqual((request["InstanceId"], request["State"]), (machine, "active"))
        self.assertEqual(request["Tags"], OURS)
        rows = self.ec2.describe_instances(Filters=BY_TAG)["Reservations"]
        self.assertEqual(rows[0]["Instances"][0]["Tags"], OURS)

    def test_one_client_token_makes_one_machine(self) -> None:
        order = self.order(ClientToken="token-1")
        first, second = self.launched(order), self.launched(order)
        self.assertEqual(first, second)
        self.assertEqual(len(self.cloud.machines()), 1)
        found = self.ec2.describe_instances(
            Filters=[{"Name": "client-token", "Values": ["token-1"]}]
        )["Reservations"]
        self.assertEqual(found[0]["Instances"][0]["InstanceId"], first)
        code, _words, status = self.refused(
            self.ec2.run_instances, **{**order, "InstanceType": "g6.2xlarge"}
        )
        self.assertEqual((code, status), ("IdempotentParameterMismatch", 400))
        self.assertEqual(self.launched(order), first)
        other = self.launched(self.order("us-west-2a", ClientToken="token-1"), "us-west-2")
        self.assertNotEqual(other, first)

    def test_without_a_token_each_call_makes_one(self) -> None:
        order = self.order()  # boto3 makes up a new token a call
        self.assertNotEqual(self.launched(order), self.launched(order))

    def test_capacity_fails_where_and_as_often_as_the_script_says(self) -> None:
        self.script.faults = [
            CallFault(zone="us-east-1a", market="spot"),
            CallFault(zone=ZONE, times=1),
            CallFault(type="g6.2xlarge", code="InsufficientHostCapacity"),
        ]
        code, words, status = self.refused(self.ec2.run_instances, **self.spot("us-east-1a"))
        self.assertEqual((code, status), ("InsufficientInstanceCapacity", 500))
        self.assertIn("g6.xlarge capacity in the Availability Zone you requested (us-e", words)
        self.assertIn("or choosing us-east-1b, us-east-1c", words)
        self.launched(self.order("us-east-1a"))
        self.assertEqual(self.refused(self.ec2.run_instances, **self.order())[0], code)
        self.launched()
        twice = self.order("us-east-1c", InstanceType="g6.2xlarge")
        self.assertEqual(
            self.refused(self.ec2.run_instances, **twice)[0], "InsufficientHostCapacity"
        )

    def test_botocore_by_itself_asks_again_after_a_stockout(self) -> None:
        self.script.faults = [CallFault()]
        eager = boto3.client("ec2", region_name=REGION, config=Config(retries={"mode": "standard"}))
        with mock.patch("time.sleep"):
            self.refused(eager.run_instances, **self.order(ClientToken="token-1"))
        self.assertEqual(len(self.cloud.sent("RunInstances")), 3)

    def test_a_refusal_may_come_after_the_machine_was_made(self) -> None:
        self.script.faults = [CallFault(code="InternalError", after=True, times=1)]
        order = self.order(ClientToken="token-1")
        code, _words, status = self.refused(self.ec2.run_instances, **order)
        self.assertEqual((code, status), ("InternalError", 500))
        (made,) = self.cloud.machines()
        self.assertEqual(self.launched(order), made.id)

    def test_a_known_token_is_answered_even_in_a_stockout(self) -> None:
        order = self.order(ClientToken="token-1")
        first = self.launched(order)
        self.script.faults = [CallFault()]
        self.assertEqual(self.launched(order), first)

    def test_an_answer_may_be_lost_before_or_after_the_act(self) -> None:
        self.script.faults = [CallFault(code="", lost="cut", after=True, times=1)]
        with self.assertRaises(ConnectionClosedError):
            self.ec2.run_instances(**self.order(ClientToken="token-1"))
        self.assertEqual(len(self.cloud.machines()), 1)
        self.script.faults = [CallFault(code="", lost="cut", times=1)]
        with self.assertRaises(ConnectionClosedError):
            self.ec2.run_instances(**self.order(ClientToken="token-2"))
        self.assertEqual(len(self.cloud.machines()), 1)

    def test_an_answer_may_be_held_until_the_caller_goes(self) -> None:
        hasty = boto3.client("ec2", region_name=REGION, config=once(read_timeout=0.3))
        order = self.order()
        self.script.faults = [CallFault(code="", lost="hold", after=True)]
        with self.assertRaises(ReadTimeoutError):
            hasty.run_instances(**order)
        self.assertEqual(len(self.cloud.machines()), 1)

    def test_a_load_balancer_may_answer_with_a_page(self) -> None:
        self.script.faults = [CallFault(action="DescribeInstances", code="html", times=1)]
        code, _words, status = self.refused(self.ec2.describe_instances)
        self.assertEqual((code, status), ("502", 502))
        self.assertEqual(self.ec2.describe_instances()["Reservations"], [])

    def test_a_profile_is_seen_only_after_a_while(self) -> None:
        order = self.order(IamInstanceProfile={"Name": "gemma4-rig"})
        code, words, status = self.refused(self.ec2.run_instances, **order)
        self.assertEqual((code, status), ("InvalidParameterValue", 400))
        self.assertIn("Value (gemma4-rig) for parameter iamInstanceProfile.name is invalid", words)
        self.cloud.put_profile()
        self.script.profile_hidden = 2
        for _time in range(2):
            self.assertEqual(self.refused(self.ec2.run_instances, **order)[1], words)
        self.launched(order)

    def test_quotas_count_what_runs(self) -> None:
        self.launched()
        self.launched()
        code, words, status = self.refused(self.ec2.run_instances, **self.order())
        self.assertEqual((code, status), ("VcpuLimitExceeded", 400))
        self.assertIn("your current vCPU limit of 8 allows", words)
        self.launched(self.spot())
        self.launched(self.order("us-west-2a"), "us-west-2")
        self.script.region_quotas[REGION, "L-3819A6DF"] = 4.0
        code = self.refused(self.ec2.run_instances, **self.spot())[0]
        self.assertEqual(code, "MaxSpotInstanceCountExceeded")
        self.ec2.terminate_instances(InstanceIds=[self.cloud.machines()[0].id])
        self.launched()

    def test_a_spot_price_may_be_too_low(self) -> None:
        self.script.zone_prices[ZONE, "g6.xlarge"] = 0.32
        options = {"SpotInstanceType": "one-time", "MaxPrice": "0.31"}
        low = self.spot(InstanceMarketOptions={"MarketType": "spot", "SpotOptions": options})
        code, words, _status = self.refused(self.ec2.run_instances, **low)
        self.assertEqual(code, "SpotMaxPriceTooLow")
        self.assertIn("price of 0.31 is lower than the minimum required", words)
        options["MaxPrice"] = "0.33"
        self.launched(low)

    def test_a_type_is_refused_where_no_zone_or_not_this_one_has_it(self) -> None:
        code, words, _status = self.refused(self.ec2.run_instances, **self.order("us-east-1e"))
        self.assertEqual(code, "Unsupported")
        self.assertIn("is not supported in your requested Availability Zone (us-east-1e)", words)
        wrong = self.order(InstanceType="g6.tiny")
        code, words, _status = self.refused(self.ec2.run_instances, **wrong)
        self.assertEqual(
            (code, words.split(" for ")[1]), ("InvalidParameterValue", "InstanceType.")
        )

    def test_what_cannot_be_is_refused(self) -> None:
        long = self.order(UserData="x" * 16_385)
        code, words, _status = self.refused(self.ec2.run_instances, **long)
        self.assertEqual(
            (code, words), ("InvalidParameterValue", "User data is limited to 16384 bytes")
        )
        self.launched(self.order(UserData="x" * 16_384))
        unknown = self.order(ImageId="ami-0123456789abcdef0")
        code = self.refused(self.ec2.run_instances, **unknown)[0]
        self.assertEqual(code, "InvalidAMIID.NotFound")
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}
        small = self.order(BlockDeviceMappings=[disk])
        code, words, _status = self.refused(self.ec2.run_instances, **small)
        self.assertEqual(code, "InvalidBlockDeviceMapping")
        self.assertIn("expect size >= 35GB", words)

    def test_a_disk_under_another_name_than_the_images_is_a_second_one(self) -> None:
        disk = {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 100}}
        row = self.row(self.launched(self.order(BlockDeviceMappings=[disk])))
        names = [one["DeviceName"] for one in row["BlockDeviceMappings"]]
        self.assertEqual(sorted(names), ["/dev/sda1", "/dev/xvda"])

    def test_a_dry_run_makes_nothing(self) -> None:
        code, _words, status = self.refused(self.ec2.run_instances, **self.order(DryRun=True))
        self.assertEqual(code, "DryRunOperation")
        self.assertGreaterEqual(status, 400)
        self.assertEqual(self.cloud.held(), {})

    def test_a_permission_that_is_missing_says_who_may_not_do_what(self) -> None:
        self.script.faults = [CallFault(code="UnauthorizedOperation")]
        code, words, status = self.refused(self.ec2.run_instances, **self.order())
        self.assertEqual((code, status), ("UnauthorizedOperation", 403))
        self.assertIn("perform: ec2:RunInstances", words)
        self.script.faults = [CallFault(action="SendCommand", code="AccessDeniedException")]
        code, words, _status = self.refused(
            self.ssm.send_command, InstanceIds=["i-0"], DocumentName="AWS-RunShellScript"
        )
        self.assertEqual(code, "AccessDeniedException")
        self.assertIn(f"arn:aws:iam::{FAKE_AWS_ACCOUNT}:user/made-up", words)

    def test_a_fault_may_have_its_own_words_and_region(self) -> None:
        fault = CallFault(action="*", code="Blocked", message="see your e-mail", region="us-west-2")
        self.script.faults = [fault]
        west = self.client("ec2", "us-west-2")
        self.assertEqual(self.refused(west.describe_volumes)[:2], ("Blocked", "see your e-mail"))
        self.ec2.describe_volumes()


class Pages(Case):
    def test_lists_come_in_pages_of_the_scripts_size(self) -> None:
        made = [self.launched() for _one in range(2)]
        self.script.page = 1
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=BY_TAG)
        found = [one["Reservations"] for one in pages]
        self.assertEqual([len(page) for page in found], [1, 1])
        self.assertEqual([page[0]["Instances"][0]["InstanceId"] for page in found], made)
        volumes = self.ec2.get_paginator("describe_volumes").paginate(Filters=BY_TAG)
        self.assertEqual([len(one["Volumes"]) for one in volumes], [1, 1])
        self.assertEqual(self.ec2.describe_volumes(MaxResults=5)["NextToken"], "1")


class Groups(Case):
    def group(self) -> str:
        (network,) = self.ec2.describe_vpcs()["Vpcs"]
        made = self.ec2.create_security_group(
            GroupName="rig",
            Description="no inbound rule",
            VpcId=network["VpcId"],
            TagSpecifications=[{"ResourceType": "security-group", "Tags": OURS}],
        )
        return str(made["GroupId"])

    def test_a_group_begins_without_an_inbound_rule_and_bears_tags(self) -> None:
        group = self.group()
        (row,) = self.ec2.describe_security_groups(Filters=BY_TAG)["SecurityGroups"]
        self.assertEqual((row["GroupId"], row["IpPermissions"]), (group, []))
        self.assertEqual(len(row["IpPermissionsEgress"]), 1)
        code, _words, _status = self.refused(
            self.ec2.create_security_group, GroupName="rig", Description="again"
        )
        self.assertEqual(code, "InvalidGroup.Duplicate")
        self.ec2.authorize_security_group_ingress(
            GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0"
        )
        (row,) = self.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
        self.assertEqual(len(row["IpPermissions"]), 1)

    def test_a_group_goes_when_its_machine_is_gone(self) -> None:
        group = self.group()
        order = self.order()
        order["NetworkInterfaces"][0]["Groups"] = [group]
        machine = self.launched(order)
        (held,) = self.row(machine)["SecurityGroups"]
        self.assertEqual(held["GroupId"], group)
        code = self.refused(self.ec2.delete_security_group, GroupId=group)[0]
        self.assertEqual(code, "DependencyViolation")
        self.ec2.terminate_instances(InstanceIds=[machine])
        self.ec2.delete_security_group(GroupId=group)
        self.assertEqual(self.ec2.describe_security_groups(Filters=BY_TAG)["SecurityGroups"], [])


class Lives(Case):
    def test_a_machine_runs_after_its_time(self) -> None:
        self.script.pending_s = 40.0
        machine = self.launched()
        self.assertEqual(self.state(machine), "pending")
        self.assertFalse(self.cloud.ssm.online(REGION, machine))
        self.cloud.advance(41)
        self.assertEqual(self.state(machine), "running")

    def test_what_was_terminated_stays_on_the_list_for_an_hour(self) -> None:
        machine = self.launched()
        answer = self.ec2.terminate_instances(InstanceIds=[machine])["TerminatingInstances"][0]
        self.assertEqual(answer["CurrentState"]["Name"], "shutting-down")
        self.assertEqual(answer["PreviousState"]["Name"], "running")
        row = self.row(machine)
        self.assertEqual(row["State"], {"Code": 48, "Name": "terminated"})
        self.assertEqual(row["StateReason"]["Code"], "Client.UserInitiatedShutdown")
        self.assertRegex(row["StateTransitionReason"], r"^User initiated \(\d{4}-.* GMT\)$")
        self.assertEqual(row["Tags"], OURS)
        self.assertEqual(self.ec2.describe_volumes()["Volumes"], [])
        self.assertEqual(self.cloud.held(), {})
        self.cloud.advance(HOUR + 1)
        code = self.refused(self.ec2.describe_instances, InstanceIds=[machine])[0]
        self.assertEqual(code, "InvalidInstanceID.NotFound")
        self.assertEqual(self.ec2.describe_instances()["Reservations"], [])
        code = self.refused(self.ec2.terminate_instances, InstanceIds=[machine])[0]
        self.assertEqual(code, "InvalidInstanceID.NotFound")

    def test_terminating_takes_its_time_and_a_second_time_changes_nothing(self) -> None:
        self.script.ending_s = 30.0
        machine = self.launched(self.spot())
        self.ec2.terminate_instances(InstanceIds=[machine])
        self.assertEqual(self.state(machine), "shutting-down")
        reason = self.row(machine)["StateTransitionReason"]
        self.cloud.advance(20)
        again = self.ec2.terminate_instances(InstanceIds=[machine])["TerminatingInstances"][0]
        self.assertEqual(again["PreviousState"]["Name"], "shutting-down")
        self.cloud.advance(11)
        self.assertEqual(self.state(machine), "terminated")
        again = self.ec2.terminate_instances(InstanceIds=[machine])["TerminatingInstances"][0]
        self.assertEqual(again["CurrentState"]["Name"], "terminated")
        self.assertEqual(self.row(machine)["StateTransitionReason"], reason)

    def test_one_unknown_id_leaves_the_others_alone(self) -> None:
        machine = self.launched()
        unknown = "i-0123456789abcdef0"
        code, words, _status = self.refused(
            self.ec2.terminate_instances, InstanceIds=[machine, unknown]
        )
        self.assertEqual(code, "InvalidInstanceID.NotFound")
        self.assertEqual(words, f"The instance ID '{unknown}' does not exist")
        self.assertEqual(self.state(machine), "running")

    def test_a_machine_of_another_region_is_unknown(self) -> None:
        machine = self.launched()
        west = self.client("ec2", "us-west-2")
        code = self.refused(west.terminate_instances, InstanceIds=[machine])[0]
        self.assertEqual(code, "InvalidInstanceID.NotFound")
        self.assertEqual(self.state(machine), "running")

    def test_a_start_moves_the_launch_time_and_not_the_disks(self) -> None:
        machine = self.launched()
        before = self.row(machine)
        self.ec2.stop_instances(InstanceIds=[machine])
        self.assertEqual(self.state(machine), "stopped")
        self.assertEqual(self.row(machine)["StateReason"]["Code"], "Client.UserInitiatedShutdown")
        held = self.cloud.held()
        self.assertEqual(sorted(held), ["instances", "volumes"])
        self.cloud.advance(2 * HOUR)
        self.ec2.start_instances(InstanceIds=[machine])
        after = self.row(machine)
        self.assertEqual(after["State"]["Name"], "running")
        self.assertNotIn("StateReason", after)
        moved = after["LaunchTime"] - before["LaunchTime"]
        self.assertGreaterEqual(moved, datetime.timedelta(seconds=2 * HOUR - 1))
        (disk,), (old,) = after["BlockDeviceMappings"], before["BlockDeviceMappings"]
        self.assertEqual(disk["Ebs"]["AttachTime"], old["Ebs"]["AttachTime"])

    def test_a_one_time_spot_machine_cannot_be_stopped(self) -> None:
        machine = self.launched(self.spot())
        code, words, _status = self.refused(self.ec2.stop_instances, InstanceIds=[machine])
        self.assertEqual(code, "UnsupportedOperation")
        self.assertIn("associated with a one-time Spot Instance request", words)
        self.assertEqual(self.state(machine), "running")

    def test_what_is_terminated_neither_stops_nor_starts(self) -> None:
        machine = self.launched()
        self.ec2.terminate_instances(InstanceIds=[machine])
        for call in (self.ec2.stop_instances, self.ec2.start_instances):
            self.assertEqual(self.refused(call, InstanceIds=[machine])[0], "IncorrectInstanceState")

    def test_a_quota_counts_at_a_start_too(self) -> None:
        machine = self.launched()
        self.ec2.stop_instances(InstanceIds=[machine])
        self.script.quotas["L-DB2E81BA"] = 0.0
        code = self.refused(self.ec2.start_instances, InstanceIds=[machine])[0]
        self.assertEqual(code, "VcpuLimitExceeded")
        self.assertEqual(self.state(machine), "stopped")

    def test_a_shutdown_from_within_ends_as_it_was_ordered(self) -> None:
        ends = self.launched()
        stops = self.launched(self.order(InstanceInitiatedShutdownBehavior="stop"))
        for machine in (ends, stops):
            self.cloud.shut_down(machine)
            code = self.row(machine)["StateReason"]["Code"]
            self.assertEqual(code, "Client.InstanceInitiatedShutdown")
        self.assertEqual((self.state(ends), self.state(stops)), ("terminated", "stopped"))

    def test_the_provider_takes_a_spot_machine_back(self) -> None:
        machine = self.launched(self.spot())
        self.cloud.interrupt(machine)
        row = self.row(machine)
        self.assertEqual(row["State"]["Name"], "terminated")
        self.assertEqual(row["StateReason"]["Code"], "Server.SpotInstanceTermination")
        self.assertTrue(row["StateTransitionReason"].startswith("Server.SpotInstanceTermination"))
        (request,) = self.ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        self.assertEqual(request["State"], "closed")
        self.assertEqual(self.cloud.held(), {})

    def test_somebody_takes_it_away_or_it_fails(self) -> None:
        taken, failed = self.launched(), self.launched()
        self.cloud.take_away(taken)
        self.cloud.end(failed, "Server.InternalError", "Internal error on launch")
        self.assertTrue(self.row(taken)["StateTransitionReason"].startswith("User initiated ("))
        self.assertEqual(
            self.row(failed)["StateReason"],
            {
                "Code": "Server.InternalError",
                "Message": "Server.InternalError: Internal error on launch",
            },
        )

    def test_a_stubborn_machine_does_not_go(self) -> None:
        machine = self.launched()
        self.script.stubborn.add(machine)
        self.ec2.terminate_instances(InstanceIds=[machine])
        self.cloud.advance(10 * HOUR)
        self.assertEqual(self.state(machine), "shutting-down")
        self.assertEqual(self.cloud.held()["instances"], {REGION: [machine]})

    def test_reads_do_not_see_at_once_what_was_launched(self) -> None:
        self.script.unseen = 2
        machine = self.launched()
        code = self.refused(self.ec2.describe_instances, InstanceIds=[machine])[0]
        self.assertEqual(code, "InvalidInstanceID.NotFound")
        self.assertEqual(self.ec2.describe_instances(Filters=BY_TAG)["Reservations"], [])
        self.assertEqual(self.state(machine), "running")

    def test_a_disk_that_was_not_to_go_remains(self) -> None:
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100}}
        disk["Ebs"] = {"VolumeSize": 100, "DeleteOnTermination": False}
        machine = self.launched(self.order(BlockDeviceMappings=[disk]))
        self.ec2.terminate_instances(InstanceIds=[machine])
        (volume,) = self.ec2.describe_volumes(
            Filters=[*BY_TAG, {"Name": "status", "Values": ["available"]}]
        )["Volumes"]
        self.assertEqual(self.cloud.held(), {"volumes": {REGION: [volume["VolumeId"]]}})
        self.ec2.delete_volume(VolumeId=volume["VolumeId"])
        self.assertEqual(self.cloud.held(), {})

    def test_a_volume_may_lie_about(self) -> None:
        tags = {one["Key"]: one["Value"] for one in OURS}
        volume = self.cloud.put_volume("us-west-2a", 100, tags)
        (row,) = self.client("ec2", "us-west-2").describe_volumes(Filters=BY_TAG)["Volumes"]
        self.assertEqual((row["VolumeId"], row["State"]), (volume, "available"))
        self.assertEqual(self.cloud.held(), {"volumes": {"us-west-2": [volume]}})

    def test_other_peoples_machines_are_watched_over(self) -> None:
        foreign = self.cloud.put_machine("us-west-2a", tags={"team": "payroll"})
        ours = self.launched()
        self.assertEqual(self.cloud.machine("payroll-db").id, foreign)
        self.assertEqual(self.cloud.held()["instances"], {REGION: [ours]})
        with_them = self.cloud.held(foreign=True)
        self.assertEqual(with_them["instances"]["us-west-2"], [foreign])
        self.assertEqual(self.cloud.harmed(), [])
        west = self.client("ec2", "us-west-2")
        west.create_tags(Resources=[foreign], Tags=[{"Key": "team", "Value": "ours"}])
        self.assertEqual(self.cloud.harmed(), [foreign])
        self.cloud.renew()
        foreign = self.cloud.put_machine("us-west-2a")
        west.terminate_instances(InstanceIds=[foreign])
        self.assertEqual(self.cloud.harmed(), [foreign])

    def test_a_name_that_two_bear_finds_neither(self) -> None:
        self.launched()
        self.assertEqual(self.cloud.machine("rig-1").name, "rig-1")
        self.launched()
        with self.assertRaises(KeyError):
            self.cloud.machine("rig-1")

    def test_a_host_is_told_what_runs_and_what_ended(self) -> None:
        news: list[tuple[str, str]] = []
        self.cloud.changed = lambda machine, state: news.append((machine, state))
        self.addCleanup(setattr, self.cloud, "changed", lambda _machine, _state: None)
        machine = self.launched()
        self.ec2.stop_instances(InstanceIds=[machine])
        self.ec2.start_instances(InstanceIds=[machine])
        self.cloud.shut_down(machine)
        states = ["running", "stopped", "running", "terminated"]
        self.assertEqual(news, [(machine, state) for state in states])

    def test_the_console_is_the_hosts_text_and_only_its_end(self) -> None:
        machine = self.launched()
        self.assertNotIn("Output", self.ec2.get_console_output(InstanceId=machine))
        self.cloud.console = lambda _machine: "a" * 70_000 + "the end"
        self.addCleanup(setattr, self.cloud, "console", lambda _machine: "")
        text = self.ec2.get_console_output(InstanceId=machine, Latest=True)["Output"]
        self.assertEqual((len(text), text[-7:]), (65_536, "the end"))
        code = self.refused(self.ec2.get_console_output, InstanceId="i-0123456789abcdef0")[0]
        self.assertEqual(code, "InvalidInstanceID.NotFound")


class Commands(Case):
    def setUp(self) -> None:
        super().setUp()
        kept = ("run_command", "agent_online", "end_command")
        for name in kept:
            self.addCleanup(setattr, self.cloud, name, getattr(self.cloud, name))
        self.machine = self.launched()

    def send(self, *lines: str, limit_s: int = 60) -> str:
        answer = self.ssm.send_command(
            InstanceIds=[self.machine],
            DocumentName="AWS-RunShellScript",
            Parameters={"commands": list(lines), "executionTimeout": [str(limit_s)]},
        )
        return str(answer["Command"]["CommandId"])

    def result(self, command: str) -> dict[str, Any]:
        return dict(self.ssm.get_command_invocation(CommandId=command, InstanceId=self.machine))

    def ended(self, command: str) -> dict[str, Any]:
        """The result when it is there."""
        self.script.invocation_hidden = 0
        self.until(lambda: self.result(command)["Status"] not in ("Pending", "InProgress"))
        return self.result(command)

    def test_a_command_runs_where_the_host_says(self) -> None:
        asked: list[tuple[str, str]] = []

        def run(machine: str, script: str) -> tuple[str, str, int]:
            asked.append((machine, script))
            return "out\n", "err\n", 0

        self.cloud.run_command = run
        done = self.ended(self.send("set -e", "echo out"))
        self.assertEqual(asked, [(self.machine, "set -e\necho out")])
        self.assertEqual((done["Status"], done["ResponseCode"]), ("Success", 0))
        self.assertEqual(done["StandardOutputContent"], "out\n")
        self.assertEqual(done["StandardErrorContent"], "err\n")

    def test_a_result_is_not_found_at_first(self) -> None:
        command = self.send("true")
        code, _words, status = self.refused(
            self.ssm.get_command_invocation, CommandId=command, InstanceId=self.machine
        )
        self.assertEqual((code, status), ("InvocationDoesNotExist", 400))
        self.result(command)
        code = self.refused(
            self.ssm.get_command_invocation, CommandId=command, InstanceId="i-0123456789abcdef0"
        )[0]
        self.assertEqual(code, "InvocationDoesNotExist")

    def test_a_command_that_fails_has_its_exit_status(self) -> None:
        self.cloud.run_command = lambda _machine, _script: ("", "no such file", 7)
        done = self.ended(self.send("false"))
        self.assertEqual((done["Status"], done["ResponseCode"]), ("Failed", 7))

    def test_output_is_cut_after_its_first_characters(self) -> None:
        self.cloud.run_command = lambda _machine, _script: ("o" * 30_000 + "end", "e" * 9_000, 0)
        done = self.ended(self.send("true"))
        self.assertEqual(len(done["StandardOutputContent"]), STDOUT_LIMIT)
        self.assertTrue(done["StandardOutputContent"].endswith(CUT_MARK))
        self.assertEqual(len(done["StandardErrorContent"]), STDERR_LIMIT)
        self.assertEqual(cut_output("whole", 5), "whole")

    def test_a_machine_without_its_agent_takes_no_command(self) -> None:
        self.cloud.agent_online = lambda _machine: False
        code, words, _status = self.refused(self.send_nothing)
        self.assertEqual(code, "InvalidInstanceId")
        self.assertIn(f"Instances [[{self.machine}]] not in a valid state for account", words)
        self.assertEqual(self.online(), [])
        self.cloud.agent_online = lambda _machine: True
        self.assertEqual(self.online(), [self.machine])
        self.ec2.terminate_instances(InstanceIds=[self.machine])
        self.assertEqual(self.online(), [])
        self.assertEqual(self.refused(self.send_nothing)[0], "InvalidInstanceId")

    def send_nothing(self) -> None:
        self.send("true")

    def online(self) -> list[str]:
        rows = self.ssm.describe_instance_information(
            Filters=[{"Key": "InstanceIds", "Values": [self.machine]}]
        )["InstanceInformationList"]
        self.assertTrue(all(one["PingStatus"] == "Online" for one in rows))
        return [one["InstanceId"] for one in rows]

    def test_a_command_may_be_cancelled_and_the_host_is_told(self) -> None:
        go, ended = threading.Event(), threading.Event()
        self.addCleanup(go.set)
        self.cloud.run_command = lambda _machine, _script: (str(go.wait(20)), "", 0)
        self.cloud.end_command = lambda _machine: ended.set()
        self.script.invocation_hidden = 0
        command = self.send("sleep 1000")
        self.until(lambda: self.result(command)["Status"] == "InProgress")
        running = self.result(command)
        self.assertEqual((running["ResponseCode"], running["StandardOutputContent"]), (-1, ""))
        self.ssm.cancel_command(CommandId=command)
        self.assertEqual(self.result(command)["Status"], "Cancelled")
        self.assertTrue(ended.wait(20))
        go.set()
        self.until(lambda: bool(list(self.cloud.ssm.commands.values())[0].ended_at))
        self.assertEqual(self.result(command)["Status"], "Cancelled")

    def test_a_command_has_a_time_limit(self) -> None:
        go = threading.Event()
        self.addCleanup(go.set)
        self.cloud.run_command = lambda _machine, _script: (str(go.wait(20)), "", 0)
        done = self.ended(self.send("sleep 1000", limit_s=0))
        self.assertEqual(
            (done["Status"], done["StatusDetails"]), ("TimedOut", "Execution Timed Out")
        )

    def test_a_command_may_ask_the_cloud_while_it_runs(self) -> None:
        def run(machine: str, _script: str) -> tuple[str, str, int]:
            self.cloud.shut_down(machine)  # as a machine that ends itself
            return self.state(machine), "", 0

        self.cloud.run_command = run
        done = self.ended(self.send("shutdown now"))
        self.assertEqual(done["StandardOutputContent"], "terminated")

    def test_a_host_that_breaks_is_a_command_that_failed(self) -> None:
        def run(_machine: str, _script: str) -> tuple[str, str, int]:
            raise OSError("no bash")

        self.cloud.run_command = run
        done = self.ended(self.send("true"))
        self.assertEqual(done["Status"], "Failed")
        self.assertIn("no bash", done["StandardErrorContent"])

    def test_a_session_has_a_target_a_port_and_a_token_of_its_own(self) -> None:
        answer = self.ssm.start_session(
            Target=self.machine,
            DocumentName="AWS-StartPortForwardingSession",
            Parameters={"portNumber": ["8000"], "localPortNumber": ["18000"]},
        )
        session = self.cloud.ssm.sessions[answer["SessionId"]]
        self.assertEqual((session.machine, session.port, session.open), (self.machine, 8000, True))
        self.assertEqual(session.token, answer["TokenValue"])
        self.assertTrue(answer["StreamUrl"].startswith("wss://ssmmessages.us-east-1."))
        self.assertNotIn(session.token, repr(self.cloud.requests))
        self.ssm.terminate_session(SessionId=session.id)
        self.assertFalse(session.open)

    def test_a_session_needs_a_machine_that_is_connected(self) -> None:
        self.cloud.agent_online = lambda _machine: False
        code, words, _status = self.refused(self.ssm.start_session, Target=self.machine)
        self.assertEqual((code, words), ("TargetNotConnected", f"{self.machine} is not connected."))
        self.cloud.agent_online = lambda _machine: True
        code = self.refused(
            self.ssm.start_session, Target=self.machine, DocumentName="AWS-StartNothing"
        )[0]
        self.assertEqual(code, "InvalidDocument")


class Services(Case):
    def test_a_secret_has_versions_and_its_payload_is_never_recorded(self) -> None:
        client = self.client("secretsmanager")
        code = self.refused(client.describe_secret, SecretId="hf-token")[0]
        self.assertEqual(code, "ResourceNotFoundException")
        first = client.create_secret(
            Name="hf-token", SecretString=CANARY, Tags=OURS, ClientRequestToken="a" * 32
        )
        second = client.put_secret_value(
            SecretId="hf-token", SecretString=f"{CANARY}-2", ClientRequestToken="b" * 32
        )
        self.assertNotEqual(first["VersionId"], second["VersionId"])
        value = client.get_secret_value(SecretId="hf-token")
        self.assertEqual(value["SecretString"], f"{CANARY}-2")
        self.assertEqual(client.describe_secret(SecretId="hf-token")["Tags"], OURS)
        self.assertEqual(self.cloud.secret(REGION, "hf-token"), f"{CANARY}-2")
        self.assertIsNone(self.cloud.secret(REGION, "another"))
        self.assertNotIn(CANARY, repr(self.cloud.requests))
        self.assertEqual(self.cloud.held(), {"secrets": {REGION: ["hf-token"]}})
        code = self.refused(client.create_secret, Name="hf-token", SecretString="x")[0]
        self.assertEqual(code, "ResourceExistsException")
        client.delete_secret(SecretId="hf-token", ForceDeleteWithoutRecovery=True)
        self.assertEqual(self.cloud.held(), {})

    def test_a_secret_may_lie_there_already(self) -> None:
        self.cloud.put_secret(REGION, "hf-token", CANARY, {"managed-by": "somebody"})
        row = self.client("secretsmanager").describe_secret(SecretId="hf-token")
        self.assertEqual(row["Tags"], [{"Key": "managed-by", "Value": "somebody"}])

    def test_a_role_and_its_profile_are_made_and_removed(self) -> None:
        client, name = self.client("iam"), "gemma4-rig"
        policy = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
        trust = json.dumps({"Version": "2012-10-17", "Statement": []})
        client.create_role(RoleName=name, AssumeRolePolicyDocument=trust, Tags=OURS)
        self.assertEqual(
            self.refused(client.create_role, RoleName=name, AssumeRolePolicyDocument=trust)[0],
            "EntityAlreadyExists",
        )
        client.attach_role_policy(RoleName=name, PolicyArn=policy)
        unknown = policy.replace("Core", "Nothing")
        refusal = self.refused(client.attach_role_policy, RoleName=name, PolicyArn=unknown)
        self.assertEqual(refusal[0], "NoSuchEntity")
        statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        client.put_role_policy(RoleName=name, PolicyName="one", PolicyDocument=document)
        client.create_instance_profile(InstanceProfileName=name, Tags=OURS)
        client.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        profile = client.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
        self.assertEqual(profile["Roles"][0]["RoleName"], name)
        attached = client.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        self.assertEqual([one["PolicyArn"] for one in attached], [policy])
        inline = client.get_role_policy(RoleName=name, PolicyName="one")["PolicyDocument"]
        self.assertEqual(inline["Statement"], [statement])
        self.launched(self.order(IamInstanceProfile={"Name": name}))
        client.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
        client.delete_instance_profile(InstanceProfileName=name)
        self.assertEqual(self.refused(client.delete_role, RoleName=name)[0], "DeleteConflict")
        client.detach_role_policy(RoleName=name, PolicyArn=policy)
        client.delete_role_policy(RoleName=name, PolicyName="one")
        client.delete_role(RoleName=name)
        code, _words, status = self.refused(client.get_role, RoleName=name)
        self.assertEqual((code, status), ("NoSuchEntity", 404))

    def test_a_bucket_keeps_objects_and_says_what_it_is(self) -> None:
        client, bucket = self.client("s3"), "made-up-bucket"
        self.assertEqual(self.refused(client.head_bucket, Bucket=bucket)[2], 404)
        client.create_bucket(Bucket=bucket)
        client.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": OURS})
        keys = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
        private = dict.fromkeys(keys, True)
        client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=private)
        answer = client.get_public_access_block(Bucket=bucket)
        self.assertEqual(answer["PublicAccessBlockConfiguration"], private)
        self.assertEqual(client.get_bucket_tagging(Bucket=bucket)["TagSet"], OURS)
        client.put_object(Bucket=bucket, Key="a/b c/weights", Body=b"x" * 300_000)
        self.assertEqual(
            client.head_object(Bucket=bucket, Key="a/b c/weights")["ContentLength"], 300_000
        )
        body = client.get_object(Bucket=bucket, Key="a/b c/weights")["Body"].read()
        self.assertEqual(body, b"x" * 300_000)
        rows = client.list_objects_v2(Bucket=bucket, Prefix="a/")["Contents"]
        self.assertEqual([one["Key"] for one in rows], ["a/b c/weights"])
        self.assertEqual(self.cloud.held(), {"buckets": {REGION: [bucket]}})
        self.assertEqual(self.refused(client.delete_bucket, Bucket=bucket)[0], "BucketNotEmpty")
        client.delete_object(Bucket=bucket, Key="a/b c/weights")
        client.delete_bucket(Bucket=bucket)
        self.assertEqual(self.cloud.held(), {})
        self.assertTrue(self.cloud.sent(f"PUT /{bucket}"))

    def test_a_large_object_goes_in_parts(self) -> None:
        client, bucket = self.client("s3"), "made-up-bucket"
        client.create_bucket(Bucket=bucket)
        data = os.urandom(9 << 20)  # above what boto3 sends in one request
        client.upload_fileobj(io.BytesIO(data), bucket, "weights")
        back = io.BytesIO()
        client.download_fileobj(bucket, "weights", back)
        self.assertEqual(back.getvalue(), data)

    def test_an_operation_that_the_fake_lacks_says_so(self) -> None:
        code = self.refused(self.ssm.list_commands)[0]
        self.assertEqual(code, "InvalidAction")
        code, words, _status = self.refused(self.ec2.describe_local_gateways)
        self.assertEqual(code, "InvalidAction")
        self.assertIn("DescribeLocalGateways", words)

    def test_throttling_ends_and_botocore_waits_for_it(self) -> None:
        self.script.throttled = {"DescribeVolumes": 1, "GetParameter": 1}
        code, _words, status = self.refused(self.ec2.describe_volumes)
        self.assertEqual((code, status), ("RequestLimitExceeded", 503))
        code, _words, status = self.refused(self.ssm.get_parameter, Name=BASE_IMAGE)
        self.assertEqual((code, status), ("ThrottlingException", 400))
        self.script.throttled = {"DescribeVolumes": 2}
        patient = boto3.client(
            "ec2", region_name=REGION, config=Config(retries={"mode": "standard"})
        )
        with mock.patch("time.sleep"):
            self.assertEqual(patient.describe_volumes()["Volumes"], [])
        self.assertEqual(len(self.cloud.sent("DescribeVolumes")), 4)

    def test_an_answer_may_take_its_time(self) -> None:
        hasty = boto3.client("ec2", region_name=REGION, config=once(read_timeout=0.2))
        self.script.delays = {"DescribeVolumes": 0.6}
        with self.assertRaises(ReadTimeoutError):
            hasty.describe_volumes()
        self.assertEqual(self.ec2.describe_regions()["Regions"][0]["RegionName"], REGION)
        self.assertEqual(self.ec2.describe_volumes()["Volumes"], [])

    def test_many_ask_at_once(self) -> None:
        regions = list(self.script.regions)
        found: list[str] = []

        def look(region: str) -> None:
            self.client("ec2", region).describe_instances(Filters=BY_TAG)
            found.append(region)

        for region in regions:
            self.client("ec2", region)  # made one after another: botocore's session is shared
        threads = [threading.Thread(target=look, args=(region,)) for region in regions * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.assertEqual(sorted(found), sorted(regions * 4))


if __name__ == "__main__":
    unittest.main()
