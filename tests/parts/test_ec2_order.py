"""The one call that asks EC2 for a machine: its parameters, held against the SDK's own model."""

from __future__ import annotations

import json
import unittest
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.planes.capacity_plane import Order, RentalMarket, is_ours, rental_labels
from forge.parts.planes.ec2_order import (
    Ec2Place,
    ec2_client_token,
    ec2_group_name,
    ec2_group_tags,
    launch_parameters,
    launch_words,
    order_of,
    refuse_group,
    refuse_market,
    shown_place,
)
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.ec2_things import ec2_tags

ACCOUNT, RIG, OWNER = "111122223333", "gpu-llamacpp-g5g-2b-q4_0", "a1b2c3"
ZONE, INTENT = "us-east-1b", "create-20261130-093000-aabbcc"
LABELS = rental_labels(RIG, OWNER, INTENT, 1_800_000_000)
PLACE = Ec2Place("ami-0123456789abcdef0", "/dev/sda1", "subnet-0123abcd", "sg-0123abcd")


def settings(**more: Any) -> Ec2Settings:
    return Ec2Settings(**{"aws_account": ACCOUNT, "budget_usd": 2.0, **more})


def order(market: RentalMarket = "spot", **more: Any) -> Order:
    given: dict[str, Any] = {"name": "vm-1", "zone": ZONE, "intent": INTENT, "labels": LABELS}
    return Order(**{**given, "life_s": 3600, "market": market, **more})


def parameters(market: RentalMarket = "spot", **more: Any) -> dict[str, Any]:
    return launch_parameters(settings(**more), order(market), PLACE, b"\x1f\x8b boot")


class ParametersTest(unittest.TestCase):
    def test_the_sdk_takes_every_parameter_of_every_market(self) -> None:
        from botocore.session import get_session
        from botocore.validate import ParamValidator

        model = get_session().get_service_model("ec2").operation_model("RunInstances")
        for given in (
            parameters("spot"),
            parameters("spot", spot_max_price=0.45),
            parameters("on-demand", public_ip=False),
        ):
            report = ParamValidator().validate({**given, "UserData": "x"}, model.input_shape)
            self.assertFalse(report.has_errors(), report.generate_report())

    def test_exactly_one_machine_of_the_wished_type_image_and_profile(self) -> None:
        given = parameters(instance_type="g5g.2xlarge", instance_profile="my-rig")
        self.assertEqual((given["MinCount"], given["MaxCount"]), (1, 1))
        self.assertEqual(given["ImageId"], "ami-0123456789abcdef0")
        self.assertEqual(given["InstanceType"], "g5g.2xlarge")
        self.assertEqual(given["IamInstanceProfile"], {"Name": "my-rig"})
        self.assertEqual(given["UserData"], b"\x1f\x8b boot")
        for never in ("KeyName", "SecurityGroups", "SecurityGroupIds", "Placement", "SubnetId"):
            self.assertNotIn(never, given)

    def test_everything_that_it_makes_bears_the_marks_and_the_name_from_the_call_on(self) -> None:
        for market, kinds in (
            ("spot", {"instance", "volume", "network-interface", "spot-instances-request"}),
            ("on-demand", {"instance", "volume", "network-interface"}),
        ):
            found = parameters("spot" if market == "spot" else "on-demand")["TagSpecifications"]
            self.assertEqual({one["ResourceType"] for one in found}, kinds)
            for one in found:
                marks = ec2_tags(one)
                self.assertEqual(marks.pop("Name"), "vm-1")
                self.assertEqual(marks, LABELS)
                self.assertTrue(is_ours(marks, RIG, OWNER))

    def test_metadata_is_for_the_machine_itself_alone(self) -> None:
        self.assertEqual(
            parameters()["MetadataOptions"],
            {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        )

    def test_the_disk_is_encrypted_goes_with_the_machine_and_is_the_images_own_root(self) -> None:
        place = Ec2Place("ami-1", "/dev/xvda", "subnet-1", "sg-1")
        given = launch_parameters(settings(root_disk_gb=222), order(), place, b"")
        (disk,) = given["BlockDeviceMappings"]
        self.assertEqual(disk["DeviceName"], "/dev/xvda")
        wanted = {"VolumeSize": 222, "VolumeType": "gp3", "Encrypted": True}
        self.assertEqual(disk["Ebs"], {**wanted, "DeleteOnTermination": True})

    def test_shutting_down_terminates(self) -> None:
        for market in ("spot", "on-demand"):
            given = parameters("spot" if market == "spot" else "on-demand")
            self.assertEqual(given["InstanceInitiatedShutdownBehavior"], "terminate")

    def test_spot_is_asked_for_once_and_ends_when_it_is_taken_back(self) -> None:
        options = parameters("spot")["InstanceMarketOptions"]
        self.assertEqual(options["MarketType"], "spot")
        wanted = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        self.assertEqual(options["SpotOptions"], wanted)
        dear = parameters("spot", spot_max_price=0.45)["InstanceMarketOptions"]["SpotOptions"]
        self.assertEqual(dear["MaxPrice"], "0.45")
        self.assertNotIn("InstanceMarketOptions", parameters("on-demand", spot_max_price=0.45))

    def test_one_network_interface_that_goes_with_it_in_the_rigs_own_group(self) -> None:
        for public in (True, False):
            (one,) = parameters(public_ip=public)["NetworkInterfaces"]
            self.assertEqual(one["Groups"], ["sg-0123abcd"])
            self.assertEqual(one["SubnetId"], "subnet-0123abcd")
            self.assertIs(one["AssociatePublicIpAddress"], public)
            self.assertIs(one["DeleteOnTermination"], True)

    def test_a_market_that_ec2_has_not(self) -> None:
        for market in ("flex-start", "reserved"):
            refused: RentalMarket = "flex-start" if market == "flex-start" else "reserved"
            with self.assertRaises(RigError) as raised:
                parameters(refused)
            self.assertEqual(raised.exception.error_class, "INVALID")
        with self.assertRaises(RigError):
            refuse_market("cheap")
        for good in ("spot", "on-demand"):
            refuse_market(good)


class TokenTest(unittest.TestCase):
    def test_the_same_order_has_the_same_token_and_any_other_another(self) -> None:
        self.assertEqual(parameters()["ClientToken"], parameters()["ClientToken"])
        tokens = {
            ec2_client_token(intent, kind, zone)
            for intent in (INTENT, "sweep-1")
            for kind in ("g6.xlarge", "g6.2xlarge")
            for zone in (ZONE, "us-east-1c")
        }
        self.assertEqual(len(tokens), 8)
        for token in tokens:
            self.assertRegex(token, r"\A[0-9a-f]{64}\Z")

    def test_what_runs_together_is_told_apart(self) -> None:
        self.assertNotEqual(ec2_client_token("a", "bc", "d"), ec2_client_token("ab", "c", "d"))


class GroupTest(unittest.TestCase):
    def group(self, labels: dict[str, str] = LABELS, **more: Any) -> dict[str, Any]:
        tags = ec2_group_tags(labels)
        name = ec2_group_name(labels)
        return {"GroupId": "sg-1", "GroupName": name, "Tags": tags, "IpPermissions": [], **more}

    def test_its_name_is_the_rigs_and_the_installations_and_fits_ec2(self) -> None:
        name = ec2_group_name(LABELS)
        self.assertRegex(name, r"\Agpu-llamacpp-g5g-2b-q4-0-[0-9a-f]{6}\Z")
        other = rental_labels(RIG, "ffffff", INTENT, 0)
        self.assertNotEqual(ec2_group_name(other), name)

    def test_it_bears_the_marks_of_the_rig_and_no_machines(self) -> None:
        marks = ec2_tags({"Tags": ec2_group_tags(LABELS)})
        self.assertEqual(set(marks), {"Name", "managed-by", "rig", "owner"})
        self.assertTrue(is_ours(marks, RIG, OWNER))

    def test_ours_that_is_shut_is_taken(self) -> None:
        refuse_group(self.group(), LABELS)
        refuse_group(self.group(IpPermissionsEgress=[{"IpProtocol": "-1"}]), LABELS)

    def test_one_that_somebody_opened_is_refused(self) -> None:
        rule = {"IpProtocol": "tcp", "FromPort": 8000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        with self.assertRaises(RigError) as raised:
            refuse_group(self.group(IpPermissions=[rule]), LABELS)
        self.assertEqual(raised.exception.error_class, "DENIED")
        self.assertIn("somebody opened", raised.exception.what)
        self.assertIn("(sg-1)", raised.exception.what)

    def test_somebody_elses_of_that_name_is_refused(self) -> None:
        for mark in ("managed-by", "rig", "owner"):
            for tags in (
                [one for one in ec2_group_tags(LABELS) if one["Key"] != mark],
                ec2_group_tags({**LABELS, mark: "other"}),
            ):
                with self.assertRaises(RigError) as raised:
                    refuse_group(self.group(Tags=tags), LABELS)
                self.assertEqual(raised.exception.error_class, "DENIED")
                self.assertIn("somebody else's", raised.exception.what)


class WordsTest(unittest.TestCase):
    """The order as a person would type it."""

    def words(self, profile: str = "", **more: Any) -> list[str]:
        wanted = settings(aws_profile=profile, **more)
        given = launch_parameters(wanted, order(), shown_place(wanted, ZONE, LABELS), b"boot")
        return launch_words("us-east-1", wanted.aws_profile, given)

    def test_every_flag_is_one_of_the_sdks_parameters(self) -> None:
        from botocore import xform_name
        from botocore.session import get_session

        shape = get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
        known = {f"--{xform_name(name).replace('_', '-')}" for name in shape.members}
        flags = {word for word in self.words() if word.startswith("--")}
        self.assertLessEqual(flags - {"--region", "--count"}, known)

    def test_it_says_what_it_would_be_and_nothing_secret_or_made_at_the_call(self) -> None:
        words = self.words("my-profile")
        self.assertEqual(words[:5], ["aws", "ec2", "run-instances", "--region", "us-east-1"])
        said = dict(zip(words[3::2], words[4::2], strict=True))
        self.assertEqual(said["--profile"], "my-profile")
        self.assertEqual(said["--count"], "1")
        self.assertEqual(said["--instance-type"], "g6.xlarge")
        self.assertTrue(said["--image-id"].startswith("resolve:ssm:/aws/service/deeplearning/"))
        self.assertEqual(json.loads(said["--metadata-options"])["HttpTokens"], "required")
        self.assertTrue(json.loads(said["--block-device-mappings"])[0]["Ebs"]["Encrypted"])
        self.assertIn(ZONE, said["--network-interfaces"])
        self.assertNotIn("--user-data", words)
        self.assertNotIn("--client-token", words)
        self.assertNotIn("--profile", self.words())

    def test_a_wished_subnet_is_shown(self) -> None:
        words = self.words(subnet="subnet-0123abcd")
        self.assertIn('"SubnetId":"subnet-0123abcd"', " ".join(words))


class RequestTest(unittest.TestCase):
    def test_a_sweeps_request_is_an_order(self) -> None:
        request = SweepRequest(
            name="vm-s",
            zone=ZONE,
            market="on-demand",
            project=ACCOUNT,
            machine="GPU machine",
            intent="sweep-1",
            asked_unix=0.0,
            patience_s=180.0,
            valid_s=240.0,
            life_s=7200,
            labels=LABELS,
        )
        found = order_of(request)
        self.assertEqual(
            (found.name, found.zone, found.market, found.intent, found.life_s, found.labels),
            ("vm-s", ZONE, "on-demand", "sweep-1", 7200, LABELS),
        )
        self.assertEqual(found.valid_s, 0, "EC2 keeps nothing waiting")


if __name__ == "__main__":
    unittest.main()
