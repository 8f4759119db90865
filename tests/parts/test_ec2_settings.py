"""What a rig on EC2 may be told in its tpu.env, and what is refused with its key."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.ground.settings import load_settings, settings_as_shell
from forge.parts.knowledge.prices import prices_for
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.ec2_settings import (
    EC2_MARKETS,
    EC2_REGIONS,
    Ec2Settings,
    ec2_cautions,
    ec2_markets,
    ec2_zones,
)

LEAST = "AWS_ACCOUNT=123456789012\nBUDGET_USD=3\n"
HOME = "/nowhere"


class SettingsCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.enterContext(mock.patch.dict(os.environ, {"HOME": HOME}, clear=True))

    def load(self, text: str = "", least: str = LEAST) -> Ec2Settings:
        (self.folder / "tpu.env").write_text(least + text)
        return load_settings(Ec2Settings, self.folder)

    def refused(self, text: str, least: str = LEAST) -> str:
        with self.assertRaises(RigError) as caught:
            self.load(text, least)
        self.assertEqual(caught.exception.error_class, "INVALID")
        return str(caught.exception)


class Ec2SettingsTest(SettingsCase):
    def test_the_least_that_must_be_said_is_who_pays_and_how_much(self) -> None:
        settings = self.load()
        self.assertEqual(settings.project, "123456789012")
        self.assertEqual(settings.instance_type, "g6.xlarge")
        self.assertTrue(settings.public_ip)
        for key, rest in (("AWS_ACCOUNT", "BUDGET_USD=3\n"), ("BUDGET_USD", LEAST[:25])):
            self.assertIn(key, self.refused("", rest))

    def test_the_account_has_no_default_and_one_form(self) -> None:
        bad = ("12345678901", "1234567890123", "12345678901a", "1234-5678-9012", "arn:aws:iam::1")
        for account in bad:
            with self.subTest(account):
                said = self.refused(f"AWS_ACCOUNT={account}\n", "BUDGET_USD=3\n")
                self.assertIn("AWS_ACCOUNT", said)

    def test_the_account_is_no_key_of_another_name(self) -> None:
        self.assertIn("PROJECT is not a key of this rig", self.refused("PROJECT=123456789012\n"))
        settings = self.load()
        self.assertNotIn("PROJECT", settings_as_shell(settings))
        self.assertIn("export AWS_ACCOUNT=123456789012", settings_as_shell(settings))
        with self.assertRaises(AttributeError):
            settings.project = "999999999999"  # type: ignore[misc]  # that it cannot be set

    def test_the_profile_of_the_environment_wins_as_it_does_for_the_sdk(self) -> None:
        self.assertEqual(self.load("AWS_PROFILE=mine\n").aws_profile, "mine")
        with mock.patch.dict(os.environ, AWS_PROFILE="theirs"):
            self.assertEqual(self.load("AWS_PROFILE=mine\n").aws_profile, "theirs")

    def test_what_cannot_be_is_refused_by_its_key(self) -> None:
        for line in (
            "INSTANCE_TYPE=g6",
            "INSTANCE_TYPE=g6.xlarge --region x",
            "INSTANCE_TYPE=-g6.xlarge",
            "AMI_PARAMETER=ami-0123456789abcdef0",
            "AMI_PARAMETER=/aws/service",
            "AMI_PARAMETER=/aws/reference/secretsmanager/hf-token",
            "AMI_PARAMETER=/my/own/parameter",
            "INSTANCE_PROFILE=arn:aws:iam::1:instance-profile/x",
            "SUBNET=subnet-xyz",
            "SUBNET=vpc-12345678",
            "ROOT_DISK_GB=8",
            "ROOT_DISK_TYPE=io2",
            "SPOT_MAX_PRICE=-1",
            "ZONES=us-east-1a;rm",
            "ZONES=US-EAST-1a",
        ):
            with self.subTest(line):
                self.assertIn(line.partition("=")[0], self.refused(line + "\n"))

    def test_what_can_be_is_taken(self) -> None:
        for line, value in (
            ("INSTANCE_TYPE=g5g.2xlarge", "g5g.2xlarge"),
            ("INSTANCE_TYPE=g5g.metal", "g5g.metal"),
            ("AMI_PARAMETER=/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id", None),
            ("SUBNET=subnet-0123456789abcdef0", "subnet-0123456789abcdef0"),
            ("SUBNET=subnet-12345678", "subnet-12345678"),
            ("INSTANCE_PROFILE=my_rig+1=a,b.c@d-e", "my_rig+1=a,b.c@d-e"),
            ("AWS_PROFILE=me@work.example:dev/1", "me@work.example:dev/1"),
        ):
            with self.subTest(line):
                key, _, text = line.partition("=")
                found = getattr(self.load(line + "\n"), key.lower())
                self.assertEqual(found, value or text)

    def test_each_key_says_what_it_is_for(self) -> None:
        for name, key in Ec2Settings.model_fields.items():
            self.assertGreater(len(key.description or ""), 10, name)


class MarketsTest(SettingsCase):
    def test_their_order_is_the_owners_and_spot_is_first_without_one(self) -> None:
        self.assertEqual(ec2_markets(self.load()), ["spot", "on-demand"])
        self.assertEqual(ec2_markets(self.load("MARKETS=on-demand, spot\n")), ["on-demand", "spot"])
        self.assertEqual(ec2_markets(self.load("MARKETS=on-demand\n")), ["on-demand"])
        self.assertEqual(list(EC2_MARKETS), ["spot", "on-demand"])

    def test_what_google_alone_has_is_refused_by_name(self) -> None:
        for word in ("flex-start", "reserved", "borrow"):
            with self.assertRaisesRegex(RigError, f"INVALID MARKETS: {word} is not spot or on"):
                ec2_markets(self.load(f"MARKETS=spot,{word}\n"))


class ZonesTest(SettingsCase):
    def test_a_list_keeps_its_order(self) -> None:
        zones = "us-west-2b, us-east-1a,ap-southeast-1c,us-gov-west-1a"
        self.assertEqual(
            ec2_zones(self.load(f"ZONES={zones}\n")),
            ["us-west-2b", "us-east-1a", "ap-southeast-1c", "us-gov-west-1a"],
        )
        self.assertEqual(ec2_zones(self.load()), [])

    def test_whatever_is_no_availability_zone_is_refused(self) -> None:
        for word in ("us-east-1", "us-east-1-bos-1a", "europe-west4-a", "use1-az2", "us-east-1ab"):
            with self.subTest(word), self.assertRaisesRegex(RigError, f"INVALID ZONES: {word} is"):
                ec2_zones(self.load(f"ZONES=us-east-1a,{word}\n"))

    def test_each_zone_that_is_taken_has_a_region(self) -> None:
        for zone in ec2_zones(self.load("ZONES=us-east-1a,ap-southeast-1c,us-gov-west-1a\n")):
            self.assertEqual(region_of(zone), zone[:-1])

    def test_where_is_looked_without_zones_is_where_a_price_is_known(self) -> None:
        known = {
            price.region
            for chip in ("l4", "t4g")
            for price in prices_for(chip, provisioning="on-demand")
            if price.provider == "aws"
        }
        self.assertEqual(set(EC2_REGIONS), known)


class CautionsTest(SettingsCase):
    def test_a_machine_without_a_way_out_is_told(self) -> None:
        self.assertEqual(ec2_cautions(self.load()), ())
        (said,) = ec2_cautions(self.load("PUBLIC_IP=0\n"))
        self.assertIn("PUBLIC_IP is 0", said)
        self.assertIn("NAT gateway", said)


if __name__ == "__main__":
    unittest.main()
