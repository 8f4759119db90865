"""What launches on EC2 were sent with: their tags, their disk and network, what the machine boots.

Reads the account's own record of its requests. Knows no tool.
"""

from __future__ import annotations

import base64
import re
import time
from dataclasses import dataclass
from typing import Any

from forge.suites.ec2_case import EC2_PROFILE, Ec2Case
from forge.suites.fake_aws_host_data import UserDataPart, user_data_parts

USER_DATA_MOST = 16_384  # bytes, before base64: EC2's limit
_TAG = re.compile(r"TagSpecification\.(\d+)\.Tag\.(\d+)\.Key")


@dataclass(frozen=True)
class SentOrder:
    """One RunInstances; `given` has its parameters by their flat names."""

    region: str
    given: dict[str, Any]

    @property
    def market(self) -> str:
        return str(self.given.get("InstanceMarketOptions.MarketType", "on-demand"))

    @property
    def tags(self) -> dict[str, dict[str, str]]:
        """The tags of each kind of thing that is made."""
        found: dict[str, dict[str, str]] = {}
        for name, key in self.given.items():
            one = _TAG.fullmatch(name)
            if one is not None:
                kind = self.given[f"TagSpecification.{one[1]}.ResourceType"]
                value = self.given[name.removesuffix("Key") + "Value"]
                found.setdefault(kind, {})[key] = value
        return found

    @property
    def user_data(self) -> bytes:
        """As EC2 counts it: before base64."""
        return base64.b64decode(self.given["UserData"])

    def parts(self) -> dict[str, UserDataPart]:
        """What cloud-init finds in it, by kind."""
        return {part.kind: part for part in user_data_parts(self.user_data)}


class Ec2OrderCase(Ec2Case):
    """A case that looks into what was sent."""

    def orders(self) -> list[SentOrder]:
        """Every launch that was sent, refused ones too, oldest first."""
        return [SentOrder(one.region, one.parameters) for one in self.cloud.sent("RunInstances")]

    def assert_orders_are_marked(self) -> None:
        """Whatever was ever asked for carries its labels and its end since the call that asked,
        keeps its disk from outliving it, and lets nobody in."""
        orders = self.orders()
        self.assertTrue(orders, "nothing was ever asked for")
        for order in orders:
            self._marked(order)
            self._shut_in(order.given)
        tokens = [order.given["ClientToken"] for order in orders]
        self.assertTrue(all(re.fullmatch(r"[0-9a-f]{64}", one) for one in tokens), tokens)
        groups = self.cloud.sent("CreateSecurityGroup")
        self.assertTrue(groups)
        self.assertEqual(self.cloud.sent("AuthorizeSecurityGroupIngress"), [])

    def _marked(self, order: SentOrder) -> None:
        kinds = {"instance", "volume", "network-interface"}
        kinds |= {"spot-instances-request"} if order.market == "spot" else set()
        self.assertEqual(set(order.tags), kinds)
        for kind, tags in order.tags.items():
            self.assertEqual(tags["managed-by"], "gemma4-rigs", kind)
            self.assertEqual(tags["rig"], self.module.RIG.name, kind)
            self.assertTrue(tags["owner"] and tags["intent"] and tags["Name"], tags)
            left = int(tags["expires"]) - time.time()
            self.assertTrue(0 < left <= 4 * 3600, left)
        if order.market == "spot":
            spot = "InstanceMarketOptions.SpotOptions."
            self.assertEqual(order.given[f"{spot}SpotInstanceType"], "one-time")
            self.assertEqual(order.given[f"{spot}InstanceInterruptionBehavior"], "terminate")

    def _shut_in(self, given: dict[str, Any]) -> None:
        self.assertEqual(given["InstanceInitiatedShutdownBehavior"], "terminate")
        self.assertEqual(given["IamInstanceProfile.Name"], EC2_PROFILE)
        self.assertEqual(given["MetadataOptions.HttpTokens"], "required")
        self.assertEqual(given["MetadataOptions.HttpPutResponseHopLimit"], "1")
        disk = "BlockDeviceMapping.1."
        self.assertEqual(given[f"{disk}DeviceName"], "/dev/sda1", "not the image's own root")
        self.assertEqual(given[f"{disk}Ebs.Encrypted"], "true")
        self.assertEqual(given[f"{disk}Ebs.DeleteOnTermination"], "true")
        self.assertNotIn("BlockDeviceMapping.2.DeviceName", given)
        self.assertEqual(given["NetworkInterface.1.DeleteOnTermination"], "true")
        self.assertNotIn("KeyName", given, "nobody logs in there")
        self.assertEqual((given["MinCount"], given["MaxCount"]), ("1", "1"))

    def assert_nothing_comes_in(self, machine: str) -> None:
        """The machine's security groups let nothing in; `machine` is its name or id."""
        model = self.cloud.machine(machine).model
        groups = list(model.security_groups)
        self.assertTrue(groups, "it has the account's default group")
        for group in groups:
            self.assertEqual(group.ingress_rules, [], group.name)
            self.assertNotEqual(group.name, "default")
