"""Calls of AWS's real SDK against an account on loopback, which counts what arrives.

The witness is the account: what it holds, and how often it was asked.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.suites.fake_aws import FAKE_AWS_PROFILE, FakeAws
from forge.suites.fake_aws_world import CallFault
from tests.forge_copy import package_folders

ROOT = Path(__file__).resolve().parents[2]
REGION, ZONE = "us-east-1", "us-east-1a"
CANARY = "canary-of-the-payload-0123456789"
PATIENCE_S = 60.0  # of a call that shall be answered, on a busy machine; no test measures it
SECRET = {"Name": "s", "SecretString": CANARY}


class AwsCase(unittest.IsolatedAsyncioTestCase):
    cloud: FakeAws

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = FakeAws()
        cls.cloud.start()
        cls.addClassCleanup(cls.cloud.stop)

    def setUp(self) -> None:
        self.cloud.renew()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.environment = self.cloud.environment(self.folder)
        # Each test has a login of its own: what one proved must not help the next.
        self.environment["AWS_SESSION_TOKEN"] = f"made-up {self.id()}"
        self.aws = self.calls()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])

    def calls(self, account: str = "", **more: Any) -> Aws:
        return Aws(account or self.cloud.account, environment=self.environment, **more)

    def fault(self, action: str, **more: Any) -> None:
        self.cloud.script.faults.append(CallFault(action, **more))

    def count(self, action: str) -> int:
        return len(self.cloud.sent(action))

    async def read(self, **more: Any) -> dict[str, Any]:
        given = {"timeout_s": PATIENCE_S, **more}
        return await self.aws.read("ec2", REGION, "describe_instances", **given)

    async def save(self, aws: Aws | None = None, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        used = aws or self.aws
        return await used.change("secretsmanager", REGION, "create_secret", timeout_s, **SECRET)

    async def refused(self, work: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await work
        self.assertNotIn("canary", str(caught.exception))
        return caught.exception


class ReadTest(AwsCase):
    async def test_the_answer_is_awss_without_the_sdks_own(self) -> None:
        machine = self.cloud.put_machine(ZONE)
        found = await self.read()
        self.assertEqual(list(found), ["Reservations"])
        [instance] = found["Reservations"][0]["Instances"]
        self.assertEqual(instance["InstanceId"], machine)
        self.assertIsNotNone(instance["LaunchTime"].tzinfo)

    async def test_a_call_goes_to_its_region_with_its_parameters(self) -> None:
        self.cloud.put_machine("us-west-2b")
        filters = [{"Name": "tag:Name", "Values": ["nobody"]}]
        found = await self.aws.read(
            "ec2", "us-west-2", "describe_instances", timeout_s=PATIENCE_S, Filters=filters
        )
        self.assertEqual(found["Reservations"], [])
        [sent] = self.cloud.sent("DescribeInstances")
        self.assertEqual((sent.region, sent.service), ("us-west-2", "ec2"))
        self.assertEqual(sent.parameters["Filter.1.Value.1"], "nobody")

    async def test_a_read_needs_no_proof_of_the_account(self) -> None:
        await self.calls("999999999999").read(
            "ec2", REGION, "describe_regions", timeout_s=PATIENCE_S
        )
        self.assertEqual(self.count("GetCallerIdentity"), 0)

    async def test_a_throttled_read_is_tried_again(self) -> None:
        self.cloud.script.throttled["DescribeInstances"] = 1
        await self.read()
        self.assertEqual(self.count("DescribeInstances"), 2)

    async def test_a_read_that_stays_throttled_ends_as_busy(self) -> None:
        self.cloud.script.throttled["DescribeInstances"] = 99
        error = await self.refused(self.read())
        self.assertEqual((error.error_class, self.count("DescribeInstances")), ("BUSY", 3))

    async def test_a_fault_of_awss_own_is_tried_again(self) -> None:
        self.fault("DescribeInstances", code="InternalError", times=1)
        await self.read()
        self.assertEqual(self.count("DescribeInstances"), 2)

    async def test_a_fault_that_stays_is_unreachable(self) -> None:
        for fault in ({"code": "Unavailable"}, {"code": "html"}, {"code": "", "lost": "cut"}):
            with self.subTest(fault):
                self.cloud.script.faults[:] = [CallFault("DescribeInstances", **fault)]
                error = await self.refused(self.read())
                self.assertEqual(error.error_class, "UNREACHABLE")

    async def test_an_answer_that_does_not_come_is_a_timeout(self) -> None:
        self.fault("DescribeInstances", code="", lost="hold")
        error = await self.refused(self.read(timeout_s=1.0))
        self.assertEqual(error.error_class, "TIMEOUT")
        self.assertIn("describe_instances within 1 s", error.what)

    async def test_nobody_listens(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and never listens
            self.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{taken.getsockname()[1]}"
            for work in (self.read(), self.save()):
                self.assertEqual((await self.refused(work)).error_class, "UNREACHABLE")

    async def test_refusals_keep_awss_code_and_words(self) -> None:
        wanted = {"InstanceIds": ["i-0123456789abcdef0"], "timeout_s": PATIENCE_S}
        error = await self.refused(self.read(**wanted))
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("(InvalidInstanceID.NotFound) when calling the Desc", error.what)

    async def test_the_loop_runs_on_while_aws_is_waited_for(self) -> None:
        self.fault("DescribeInstances", code="", lost="hold")
        call = asyncio.create_task(self.read())
        while not self.count("DescribeInstances"):
            await asyncio.sleep(0.01)  # would not come back if the call blocked it
        self.assertFalse(call.done())
        call.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await call

    async def test_many_at_once_in_many_regions(self) -> None:
        regions = self.cloud.script.regions
        self.cloud.put_machine("us-west-2b")

        async def count(region: str) -> int:
            found = await self.aws.read("ec2", region, "describe_instances", timeout_s=PATIENCE_S)
            return len(found["Reservations"])

        counts = await asyncio.gather(*(count(region) for region in regions * 4))
        self.assertEqual(counts, [int(region == "us-west-2") for region in regions] * 4)

    async def test_a_change_cannot_be_asked_as_a_read(self) -> None:
        error = await self.refused(self.aws.read("ec2", REGION, "run_instances", MinCount=1))
        self.assertEqual(error.error_class, "INTERNAL")
        self.assertEqual(self.cloud.requests, [])

    async def test_what_is_no_region_becomes_no_address(self) -> None:
        for region in (
            "",
            "us-east-1.example.com",
            "us-east-1/",
            "us-east-1a",
            "../x",
            "US-EAST-1",
        ):
            with self.subTest(region):
                work = self.aws.read("ec2", region, "describe_instances")
                self.assertEqual((await self.refused(work)).error_class, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_parameter_that_is_none_is_not_sent(self) -> None:
        error = await self.refused(self.read(Instances=["x"], timeout_s=PATIENCE_S))
        self.assertEqual(error.error_class, "INVALID")
        self.assertEqual(self.count("DescribeInstances"), 0)


class PagesTest(AwsCase):
    async def prices(self) -> list[dict[str, Any]]:
        return await self.aws.read_all(
            *("ec2", REGION, "describe_spot_price_history", "SpotPriceHistory"),
            timeout_s=PATIENCE_S,
            InstanceTypes=["g6.xlarge"],
        )

    async def test_all_pages_are_one_list(self) -> None:
        def places(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
            return [(one["AvailabilityZone"], one["SpotPrice"]) for one in found]

        whole = places(await self.prices())
        self.assertEqual(self.count("DescribeSpotPriceHistory"), 1)
        self.cloud.script.page = (len(whole) + 2) // 3
        self.assertEqual(places(await self.prices()), whole)
        self.assertEqual(self.count("DescribeSpotPriceHistory"), 1 + 3)

    async def test_a_list_of_one_page_only(self) -> None:
        found = await self.aws.read_all(
            "ec2", REGION, "describe_regions", "Regions", timeout_s=PATIENCE_S
        )
        self.assertIn(REGION, [one["RegionName"] for one in found])

    async def test_an_empty_list(self) -> None:
        found = await self.aws.read_all(
            "ec2", REGION, "describe_instances", "Reservations", timeout_s=PATIENCE_S
        )
        self.assertEqual(found, [])

    async def test_a_fault_on_a_later_page_is_no_shorter_list(self) -> None:
        self.cloud.script.page = 2
        self.fault("DescribeSpotPriceHistory", code="", times=1)  # none: the first page comes
        self.fault("DescribeSpotPriceHistory", code="UnauthorizedOperation")
        error = await self.refused(self.prices())
        self.assertEqual(error.error_class, "DENIED")
        self.assertEqual(self.count("DescribeSpotPriceHistory"), 2)


class ChangeTest(AwsCase):
    """A change is sent once, whatever is answered."""

    def saved(self) -> bool:
        return self.cloud.secret(REGION, "s") is not None

    async def test_a_change_is_made(self) -> None:
        answer = await self.save()
        self.assertEqual(answer["Name"], "s")
        self.assertNotIn("ResponseMetadata", answer)
        self.assertEqual(self.cloud.secret(REGION, "s"), CANARY)

    async def test_one_attempt_whatever_is_answered(self) -> None:
        for fault, error_class, saved in (
            ({"code": "InternalServiceError", "message": "x"}, "UNKNOWN", False),
            ({"code": "html"}, "UNKNOWN", False),
            ({"code": "ThrottlingException"}, "BUSY", False),
            ({"code": "AccessDeniedException"}, "DENIED", False),
            ({"code": "", "lost": "cut"}, "UNKNOWN", False),
            ({"code": "", "lost": "cut", "after": True}, "UNKNOWN", True),
            ({"code": "InternalServiceError", "message": "x", "after": True}, "UNKNOWN", True),
        ):
            with self.subTest(fault):
                self.cloud.renew()
                self.fault("CreateSecret", **fault)
                error = await self.refused(self.save())
                self.assertEqual(error.error_class, error_class, str(error))
                self.assertEqual((self.count("CreateSecret"), self.saved()), (1, saved))

    async def test_a_stockout_is_one_request_though_it_has_status_500(self) -> None:
        self.fault("RunInstances", code="InsufficientInstanceCapacity")
        image = await self.aws.read(
            *("ssm", REGION, "get_parameter"),
            timeout_s=PATIENCE_S,
            Name="/aws/service/deeplearning/ami/x86_64/"
            "base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
        )
        work = self.aws.change(
            *("ec2", REGION, "run_instances", PATIENCE_S),
            ImageId=image["Parameter"]["Value"],
            InstanceType="g6.xlarge",
            MinCount=1,
            MaxCount=1,
            Placement={"AvailabilityZone": ZONE},
        )
        error = await self.refused(work)
        self.assertEqual(error.error_class, "CAPACITY")
        self.assertIn("(InsufficientInstanceCapacity)", error.what)
        self.assertEqual(self.count("RunInstances"), 1)

    async def test_an_answer_that_does_not_come_is_unknown(self) -> None:
        self.fault("CreateSecret", code="ThrottlingException", times=1)
        await self.refused(self.save())  # so that the login and the client are there
        self.fault("CreateSecret", code="", lost="hold", after=True)
        error = await self.refused(self.save(timeout_s=3.0))
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertIn("may have been done all the same", error.what)
        self.assertIn("read the state", error.next_step)
        self.assertTrue(self.saved())

    async def test_what_is_cancelled_before_it_was_sent_is_not_sent(self) -> None:
        self.cloud.script.delays["GetCallerIdentity"] = 1.0
        before = set(threading.enumerate())
        call = asyncio.create_task(self.save())
        await asyncio.sleep(0.3)
        call.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await call
        while any(one.name == "aws" for one in set(threading.enumerate()) - before):
            await asyncio.sleep(0.05)
        self.assertEqual(self.count("CreateSecret"), 0)
        await self.save()  # and it would have been made

    async def test_a_refused_parameter_is_not_repeated(self) -> None:
        work = self.aws.change(
            "secretsmanager", REGION, "create_secret", PATIENCE_S, Name="", SecretString=CANARY
        )
        error = await self.refused(work)
        self.assertEqual(error.error_class, "INVALID")
        self.assertEqual(self.count("CreateSecret"), 0)


class AccountTest(AwsCase):
    """Whose credentials they are is proven before anything is changed, and once."""

    async def test_it_is_proven_once_for_all_changes_of_this_login(self) -> None:
        await self.save()
        again = self.calls()
        await again.change(
            *("secretsmanager", REGION, "put_secret_value", PATIENCE_S),
            SecretId="s",
            SecretString=CANARY,
        )
        await again.check_account()
        self.assertEqual(self.count("GetCallerIdentity"), 1)

    async def test_another_accounts_credentials_change_nothing(self) -> None:
        self.cloud.script.account = "999999999999"
        for _ in range(2):  # and are refused again
            error = await self.refused(self.save())
            self.assertEqual(error.error_class, "DENIED")
            self.assertIn("999999999999", error.what)
            self.assertIn(self.cloud.account, error.what)
            self.assertIn("AWS_PROFILE", error.next_step)
        self.assertEqual(self.count("CreateSecret"), 0)

    async def test_what_is_no_account_is_refused_before_any_call(self) -> None:
        for account in ("", "12345678901", "1234567890123", "a" * 12, "１２３４５６７８９０１２"):
            with self.subTest(account):
                aws = Aws(account, environment=self.environment)
                self.assertEqual((await self.refused(self.save(aws))).error_class, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_proof_that_does_not_come_changes_nothing(self) -> None:
        for fault in ({"code": "", "lost": "cut"}, {"code": "AccessDenied"}):
            with self.subTest(fault):
                self.cloud.script.faults[:] = [CallFault("GetCallerIdentity", **fault)]
                error = await self.refused(self.save())
                self.assertIn(error.error_class, ("UNREACHABLE", "DENIED"))
        self.assertEqual(self.count("CreateSecret"), 0)

    async def test_a_new_login_is_seen_and_proven_anew(self) -> None:
        await self.save()
        self.cloud.script.credentials = "expired"
        error = await self.refused(self.read())
        self.assertEqual(error.error_class, "AUTH")
        self.assertIn("aws sso login", error.next_step)
        self.cloud.script.credentials, self.cloud.script.account = "", "999999999999"
        await self.read()
        work = self.aws.change(
            *("secretsmanager", REGION, "put_secret_value", PATIENCE_S),
            SecretId="s",
            SecretString=CANARY,
        )
        self.assertEqual((await self.refused(work)).error_class, "DENIED")
        self.assertEqual(self.count("PutSecretValue"), 0)

    async def test_new_keys_in_a_profile_are_seen_after_a_refusal(self) -> None:
        path = Path(self.environment["AWS_SHARED_CREDENTIALS_FILE"])
        good = path.read_text()
        path.write_text(f"[{FAKE_AWS_PROFILE}]\naws_access_key_id = X\naws_secret_access_key = y\n")
        aws = self.calls(profile=FAKE_AWS_PROFILE)
        self.assertEqual((await self.refused(self.save(aws))).error_class, "AUTH")
        path.write_text(good)
        await self.save(aws)


class LoginTest(AwsCase):
    """Whose credentials a call has: the profile that is named, else the environment's."""

    async def asked(self, aws: Aws) -> None:
        await aws.read("ec2", REGION, "describe_regions", timeout_s=PATIENCE_S)

    async def test_a_profile_that_is_named_wins_over_keys(self) -> None:
        self.environment["AWS_ACCESS_KEY_ID"] = "of-no-use"
        await self.asked(self.calls(profile=FAKE_AWS_PROFILE))
        self.assertEqual((await self.refused(self.asked(self.calls()))).error_class, "AUTH")

    async def test_the_environment_names_a_profile(self) -> None:
        self.environment["AWS_ACCESS_KEY_ID"] = "of-no-use"
        self.environment["AWS_PROFILE"] = FAKE_AWS_PROFILE
        await self.asked(self.calls())

    async def test_a_profile_that_is_not_there_is_auth(self) -> None:
        error = await self.refused(self.asked(self.calls(profile="nobody")))
        self.assertEqual(error.error_class, "AUTH")
        self.assertIn("nobody", error.what)

    async def test_without_credentials_nothing_is_asked_and_none_of_this_computers_are_used(
        self,
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            del self.environment[name]
        own = {"AWS_ACCESS_KEY_ID": "MADEUPFORATEST", "AWS_SECRET_ACCESS_KEY": "x"}
        with mock.patch.dict(os.environ, own):
            error = await self.refused(self.asked(self.calls()))
        self.assertEqual(error.error_class, "AUTH")
        self.assertEqual(self.cloud.requests, [])

    async def test_an_environment_of_a_test_leads_nowhere_but_here(self) -> None:
        for address in ("", "https://ec2.us-east-1.amazonaws.com", "http://10.0.0.1:80"):
            self.environment["AWS_ENDPOINT_URL"] = address
            error = await self.refused(self.asked(self.calls()))
            self.assertEqual(error.error_class, "DENIED")


class SlowLoginTest(AwsCase):
    """Credentials that a program gives, which takes its time."""

    def setUp(self) -> None:
        super().setUp()
        self.gate, self.asked_for = self.folder / "gate", self.folder / "asked"
        login = self.folder / "login.py"
        keys = {"Version": 1, "AccessKeyId": "MADEUPFORAPROFILE", "SecretAccessKey": "made-up"}
        login.write_text(
            "import json, pathlib, time\n"
            f"pathlib.Path({str(self.asked_for)!r}).touch()\n"
            f"while not pathlib.Path({str(self.gate)!r}).exists():\n"
            "    time.sleep(0.05)\n"
            f"print(json.dumps({keys!r}))\n"
        )
        config = Path(self.environment["AWS_CONFIG_FILE"])
        line = f"credential_process = {sys.executable} {login}"
        config.write_text(f"{config.read_text()}[profile slow]\n{line}\n")
        self.aws = self.calls(profile="slow")

    async def given_up(self, work: Any) -> None:
        """Waits until the login is asked for, gives the call up, and then lets the login come."""
        before = set(threading.enumerate())
        call = asyncio.create_task(work)
        while not self.asked_for.exists():
            await asyncio.sleep(0.02)
        call.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await call
        await self.opened(before)

    async def opened(self, before: set[threading.Thread]) -> None:
        """The login comes, and whoever waited for it ends."""
        self.gate.touch()
        while any(one.name == "aws" for one in set(threading.enumerate()) - before):
            await asyncio.sleep(0.02)

    async def test_what_was_given_up_meanwhile_is_not_sent(self) -> None:
        await self.given_up(self.read())
        self.assertEqual(self.cloud.requests, [])
        await self.save()  # and with the same login the next call is

    async def test_a_read_that_waits_for_it_times_out(self) -> None:
        before = set(threading.enumerate())
        error = await self.refused(self.read(timeout_s=1.0))
        self.assertEqual(error.error_class, "TIMEOUT")
        await self.opened(before)

    async def test_it_holds_up_no_other_login(self) -> None:
        before = set(threading.enumerate())
        slow = asyncio.create_task(self.refused(self.read(timeout_s=3.0)))
        while not self.asked_for.exists():
            await asyncio.sleep(0.02)
        await self.calls().read("ec2", REGION, "describe_regions", timeout_s=PATIENCE_S)
        self.assertFalse(self.gate.exists())
        self.assertEqual((await slow).error_class, "TIMEOUT")
        await self.opened(before)


class ProcessTest(AwsCase):
    """In a process of its own, with its own variables: as a rig's server is."""

    def process(
        self, text: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        head = (
            "import asyncio, sys\n"
            "from forge.parts.boundaries.aws_clients import Aws\n"
            "from forge.parts.ground.errors import RigError\n"
            f"aws = Aws({self.cloud.account!r})\n"
        )
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        packages = os.pathsep.join([*package_folders(), str(ROOT)])
        own = {**self.environment, "HOME": str(self.folder), "PYTHONPATH": packages}
        return subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(text)],
            env={**kept, **own, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def test_the_sdk_finds_its_own_credentials_and_address(self) -> None:
        done = self.process(
            """
            assert "boto3" not in sys.modules and "botocore" not in sys.modules
            asyncio.run(aws.check_account())
            found = asyncio.run(aws.read("ec2", "us-east-1", "describe_regions", timeout_s=60))
            print(len(found["Regions"]))
            """
        )
        self.assertEqual(done.stderr, "")
        self.assertGreater(int(done.stdout), 1)
        self.assertEqual(self.count("GetCallerIdentity"), 1)

    def test_a_call_that_hangs_keeps_no_process_from_ending(self) -> None:
        self.fault("DescribeRegions", code="", lost="hold")
        done = self.process(
            """
            try:
                asyncio.run(aws.read("ec2", "us-east-1", "describe_regions", timeout_s=1))
            except RigError as error:
                print(error.error_class)
            """
        )
        self.assertEqual((done.stdout.strip(), done.stderr, done.returncode), ("TIMEOUT", "", 0))
        self.assertLess(self.count("DescribeRegions"), 2)  # it would have been tried again

    def test_no_payload_is_logged_whatever_is_logged(self) -> None:
        done = self.process(
            f"""
            import logging
            logging.basicConfig(level=logging.DEBUG)
            asyncio.run(aws.change("secretsmanager", "us-east-1", "create_secret", 60, Name="s",
                SecretString={CANARY!r}))
            """
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.cloud.secret(REGION, "s"), CANARY)
        self.assertNotIn(CANARY, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
