"""Asking EC2 for a machine while something goes wrong: places, quotas, answers, credentials.

What is asserted is what costs money: how many machines there are afterwards, whether each bears its
tags and ends by itself, what was said, and what the next call does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

from forge.suites.ec2_fault_case import FAR, FIRST, SECOND, SOMEBODY_ELSE, Ec2FaultCase
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, CallFault


class Ec2AskingFaultSuite(Ec2FaultCase):
    """No twin, nothing untagged, nothing without an end, and no refusal mistaken for another."""

    boots = False

    # Places

    async def test_two_zones_out_and_a_poisoned_memory(self) -> None:  # I01, D13, D54, A49
        self.out_of(FIRST, SECOND)
        self.write_settings(**{**self.good_settings(), "MARKETS": "spot"})
        self.addCleanup(self.write_settings, **self.good_settings())
        async with self.in_process() as client:
            found = await self.search(client, FIRST, SECOND, FAR)
            self.assertEqual(found["result"]["zone"], FAR, found)
            ends = [line.partition(": ")[2].partition(",")[0] for line in found["result"]["asked"]]
            self.assertEqual(ends, ["stockout", "stockout", "granted"])
            self.assertEqual(self.asked(), [FIRST, SECOND, FAR])
            self.assert_orders_are_marked()
            self.assert_marked(1)
            await self.destroyed(client, found["result"])
            self._poison()
            again = await self.search(client, FIRST, SECOND, FAR)
            self.assertEqual(again["state"], "done", again)
        # What was heard a moment ago is not asked again, and what nobody said shuts nothing.
        self.assertEqual(self.asked(), [FIRST, SECOND, FAR, FAR])

    async def test_spot_is_refused_everywhere_and_on_demand_is_had(self) -> None:  # I02
        self.out_of("*", market="spot")
        async with self.in_process() as client:
            found = await self.search(client, FIRST, FAR)
            self.assertEqual(
                (found["result"]["zone"], found["result"]["market"]), (FIRST, "on-demand"), found
            )
        wanted = [(FIRST, "spot"), (FAR, "spot"), (FIRST, "on-demand")]
        self.assertEqual(self.asked_as(), wanted)
        self.assert_marked(1)

    async def test_no_quota_at_all_asks_nowhere(self) -> None:  # I03, D04
        for code in self.cloud.script.quotas:
            self.cloud.script.quotas[code] = 0.0
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "QUOTA", zone=FIRST)
            self.assertIn("L-3819A6DF", fault)
            self.assertIn("allows 0", fault)
            ended = await self.search(client, FIRST, FAR)
            self.assertTrue(ended["error"].startswith("QUOTA "), ended)
        self.assertEqual(self.asked(), [])

    async def test_a_quota_shuts_its_region(self) -> None:  # D04
        full = CallFault(code="MaxSpotInstanceCountExceeded", region="us-east-1")
        hidden = CallFault("GetServiceQuota", "AccessDeniedException")
        self.cloud.script.faults = [full, hidden]  # or it would be known beforehand
        async with self.in_process() as client:
            found = await self.search(client, FIRST, SECOND, FAR)
            self.assertEqual(found["result"]["zone"], FAR, found)
            self.assertIn(f"{FIRST} (spot): quota", found["result"]["asked"][0])
        self.assertEqual(self.asked(), [FIRST, FAR])
        self.assert_marked(1)

    async def test_a_profile_that_is_not_visible_yet(self) -> None:  # I04
        self.cloud.script.profile_hidden = 1
        async with self.in_process() as client:
            with self.patience(_LAUNCH_PAUSE_S=0.2):
                machine = await self.created(client)
                self.assertEqual(self.asked(), [FIRST, FIRST])
                tokens = {one.given["ClientToken"] for one in self.orders()}
                self.assertEqual(len(tokens), 1, "a second order")
                self.assert_marked(1)
                await self.destroyed(client, machine)
                self.cloud.script.profile_hidden = 1000
                with self.patience(create_s=5.0):
                    fault = await self.refusal(
                        client, "create_tpu_vm_instance", "INVALID", zone=FIRST
                    )
            self.assertIn("Invalid IAM Instance Profile name", fault)
        self.assert_marked(0)

    async def test_an_image_whose_parameter_is_gone(self) -> None:  # I23
        gone = self.assembled().context.settings.ami_parameter
        self.cloud.script.no_parameters = {gone}
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "INVALID", zone=FIRST)
            self.assertIn("AMI_PARAMETER is gone in us-east-1", fault)
            self.assertIn("/aws/service/deeplearning/ami/", fault.partition(" Next: ")[2])
            ended = await self.search(client, FIRST, FAR)
            self.assertTrue(ended["error"].startswith("INVALID "), ended)
            self.assertIn(gone, ended["error"])
        self.assertEqual(self.asked(), [])

    async def test_a_zone_without_a_default_subnet(self) -> None:  # I24
        self.cloud.script.no_subnet = {FIRST}
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "INVALID", zone=FIRST)
            self.assertIn(f"{FIRST} has no default subnet", fault)
            found = await self.search(client, FIRST, SECOND)
            self.assertEqual(found["result"]["zone"], SECOND, found)
        self.assertEqual(self.asked(), [SECOND])
        self.assert_marked(1)

    async def test_a_group_that_somebody_opened_or_that_is_somebody_elses(self) -> None:  # I25, A40
        async with self.in_process() as client:
            await self.destroyed(client, await self.created(client))
            with self.cloud.lock:
                groups = self.cloud.moto.ec2("us-east-1").describe_security_groups()
                (group,) = [one for one in groups if one.name.startswith(self.module.RIG.name)]
                self.assertEqual(group.ingress_rules, [])
                self.cloud.moto.ec2("us-east-1").authorize_security_group_ingress(
                    group.id, "tcp", "8000", "8000", [{"CidrIp": "0.0.0.0/0"}]
                )
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=FIRST)
            self.assertIn(group.id, fault)
            self.assertIn("opened", fault)
            with self.cloud.lock:
                group.ingress_rules.clear()
                group.add_tag("owner", SOMEBODY_ELSE["owner"])
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=FIRST)
            self.assertIn("somebody else's", fault)
        self.assertEqual(self.asked(), [FIRST])
        self.assertEqual(self.cloud.sent("AuthorizeSecurityGroupIngress"), [])

    # Who asks, and for what

    async def test_a_permission_is_no_fault_of_its_zone(self) -> None:  # D03
        self.out_of(FAR, code="UnauthorizedOperation")
        async with self.in_process() as client:
            ended = await self.search(client, FAR, FIRST)
            self.assertTrue(ended["error"].startswith("DENIED "), ended)
            self.assertIn("ec2:RunInstances", ended["error"])
            self.assertEqual(self.asked(), [FAR])
            self.cloud.script.faults = []
            await self.created(client, zone=FAR)
        self.assert_marked(1)

    async def test_credentials_that_expired(self) -> None:  # I16, D02
        self.cloud.script.credentials = "expired"
        async with self.in_process() as client:
            for tool, arguments in (
                ("list_tpu_vm_instances", {}),
                ("create_tpu_vm_instance", {"zone": FIRST}),
                ("find_tpu_vm", {}),
                ("save_hf_token", {}),
            ):
                with mock.patch.dict(os.environ, HF_TOKEN="hf_" + "M" * 34):
                    fault = await self.refusal(client, tool, "AUTH", **arguments)
                self.assertIn("aws sso login", fault)
            self.cloud.script.credentials = ""
            await self.created(client)
        self.assertEqual(self.asked(), [FIRST])
        self.assert_marked(1)

    async def test_credentials_that_expire_in_the_middle_of_a_search(self) -> None:  # I16, D02
        self.out_of(FIRST)
        self.cloud.script.delays = {"RunInstances": 1.0}
        async with self.in_process() as client:
            begun = await self.search(client, FIRST, FAR, wait=False)
            await self.until(self.asked, "no place was asked")
            self.cloud.script.credentials = "expired"
            ended = await self.finished(client, begun["job_id"])
            self.assertEqual(ended["state"], "failed", ended)
            self.assertTrue(ended["error"].startswith("AUTH "), ended["error"])
            self.assert_marked(0)
            self.cloud.script.credentials, self.cloud.script.faults = "", []
            await self.created(client)
        self.assert_marked(1)

    async def test_credentials_of_another_account(self) -> None:  # I16, A25
        self.cloud.script.account = "999988887777"
        token = {"HF_TOKEN": "hf_" + "M" * 34}
        async with self.over_stdio(extra=token) as client:  # it has not proven them yet
            for tool, arguments in (
                ("list_tpu_vm_instances", {}),
                ("create_tpu_vm_instance", {"zone": FIRST}),
                ("describe_tpu_vm_instance", {"name": "x", "zone": FIRST}),
                ("find_tpu_vm", {}),
                ("save_hf_token", {}),
            ):
                fault = await self.refusal(client, tool, "DENIED", **arguments)
                self.assertIn("999988887777", fault)
                self.assertIn(FAKE_AWS_ACCOUNT, fault)
        self.assertEqual(self.provider().changes(), 0)

    async def test_a_namesake(self) -> None:  # I18, D12
        """A name is nothing on EC2: a stranger's machine stays, ours is made. One that claims to be
        a rig's as well is not rented beside."""
        name = self.module.rental_name(self.module.RIG.name, self.assembled().context.owner)
        self.planted(name, {})
        async with self.in_process() as client:
            machine = await self.created(client)
            self.assertEqual(
                (machine["name"], machine["provider_id"]), (name, self.ours_alone().id)
            )
            await self.destroyed(client, machine)
            self.assertEqual(self.ends(), [machine["provider_id"]])
            self.planted(name, self.our_tags(**SOMEBODY_ELSE))
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=FAR)
            self.assertIn("somebody else's", fault)
        self.assertEqual(self.asked(), [FIRST])

    async def test_a_place_without_a_price_and_one_over_budget(self) -> None:  # D53, A28
        self.cloud.script.unpriced = {SECOND}
        self.write_settings(**{**self.good_settings(), "MARKETS": "spot"})
        self.addCleanup(self.write_settings, **self.good_settings())
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=SECOND)
            self.assertIn(f"price in {SECOND} is not known", fault)
            self.write_settings(**{**self.good_settings(), "BUDGET_USD": "0.1"})
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=FIRST)
            self.assertIn("over BUDGET_USD=0.1", fault)
            fault = await self.refusal(
                client, "create_tpu_vm_instance", "DENIED", zone=FIRST, hours=5
            )
            self.assertIn("MAX_HOURS=4", fault)
            await self.refusal(client, "find_tpu_vm", "DENIED", budget_usd=2)
        self.assertEqual(self.asked(), [])

    def _poison(self) -> None:
        """Put what no provider said into the file of refusals: one for ever, and no refusals."""
        path = Path(self.assembled().context.paths.state) / "sweep" / "sweep_refusals.json"
        kept = json.loads(path.read_text())
        true = kept["refusals"][0]
        forever = {**true, "place": FAR, "scope": "zone", "at": 0.0, "until": 1e12}
        rows = [forever, {**true, "place": FAR, "reason": "|\n| spot |"}, "x", None, 7]
        path.write_text(json.dumps({**kept, "refusals": [*kept["refusals"], *rows]}))
