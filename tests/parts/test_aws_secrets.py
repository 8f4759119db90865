"""Secrets Manager through AWS's real SDK, against an account on loopback.

The witness is the store itself: what it holds, and which requests arrived.
"""

from __future__ import annotations

import asyncio
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.aws_secrets import (
    AwsSecretState,
    SavedAwsSecret,
    aws_secret_state,
    save_aws_secret,
)
from forge.parts.ground.errors import RigError
from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_world import CallFault

REGION, NAME = "us-east-1", "hf-token"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY09"
LABELS = {"managed-by": "gemma4-rigs", "rig": "gpu-vllm-g6-2b", "owner": "a1b2c3"}
CHANGES = ("CreateSecret", "PutSecretValue", "UpdateSecret", "TagResource", "DeleteSecret")


class Case(unittest.IsolatedAsyncioTestCase):
    cloud: FakeAws

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = FakeAws()
        cls.cloud.start()
        cls.addClassCleanup(cls.cloud.stop)

    def setUp(self) -> None:
        self.cloud.renew()
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        environment = self.cloud.environment(folder)
        environment["AWS_SESSION_TOKEN"] = f"made-up {self.id()}"  # a login that proved nothing
        self.aws = Aws(self.cloud.account, environment=environment)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])
        self.assertEqual(self.cloud.sent("GetSecretValue"), [])  # nobody reads it

    async def save(self, payload: str = CANARY, name: str = NAME) -> SavedAwsSecret:
        return await save_aws_secret(self.aws, REGION, name, payload, LABELS)

    async def state(self) -> AwsSecretState:
        return await aws_secret_state(self.aws, REGION, NAME, LABELS["managed-by"])

    async def refused(self, error_class: str, **more: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.save(**more)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertNotIn("CANARY", str(caught.exception))
        return caught.exception

    def stored(self, name: str = NAME) -> str | None:
        return self.cloud.secret(REGION, name)

    def changes(self) -> list[str]:
        return [one.action for one in self.cloud.requests if one.action in CHANGES]

    def fault(self, action: str, **more: Any) -> None:
        self.cloud.script.faults.append(CallFault(action, **more))


class SaveTest(Case):
    async def test_a_missing_secret_is_made_with_our_tags(self) -> None:
        saved = await self.save()
        self.assertTrue(saved.made)
        self.assertEqual(self.stored(), CANARY)
        self.assertEqual((saved.state.region, saved.state.name), (REGION, NAME))
        self.assertTrue(saved.state.ours)
        self.assertIn(f":{self.cloud.account}:secret:{NAME}", saved.state.arn)
        [made] = self.cloud.sent("CreateSecret")
        self.assertEqual({one["Key"]: one["Value"] for one in made.parameters["Tags"]}, LABELS)
        self.assertEqual(self.changes(), ["CreateSecret"])
        self.assertEqual(await self.state(), saved.state)

    async def test_a_secret_of_ours_gets_another_version(self) -> None:
        first = await self.save("hf_older1234")
        second = await self.save()
        self.assertFalse(second.made)
        self.assertEqual(self.stored(), CANARY)
        self.assertNotEqual(first.state.current, second.state.current)
        self.assertEqual(self.changes(), ["CreateSecret", "PutSecretValue"])

    async def test_an_older_payload_can_be_made_current_again(self) -> None:
        for payload in (CANARY, "hf_other12345", CANARY):
            await self.save(payload)
            self.assertEqual(self.stored(), payload)

    async def test_nothing_of_the_payload_comes_back(self) -> None:
        saved = await self.save()
        self.assertNotIn("CANARY", repr(saved))

    async def test_the_version_tells_nothing_of_the_payload(self) -> None:
        # Whoever may list the secret's versions would otherwise know a guess to be right.
        one = await self.save(CANARY)
        self.cloud.renew()
        other = await self.save("hf_other12345")
        self.assertEqual(one.state.current, other.state.current)
        self.assertRegex(one.state.current, r"^[0-9a-f]{64}$")

    async def test_somebody_elses_secret_gets_nothing(self) -> None:
        for tags in ({}, {"managed-by": "somebody"}, {"managed-by": "gemma4-rigs-2"}):
            with self.subTest(tags):
                self.cloud.renew()
                self.cloud.put_secret(REGION, NAME, "theirs", tags)
                error = await self.refused("DENIED")
                self.assertIn("--tags Key=managed-by,Value=gemma4-rigs", error.next_step)
                self.assertEqual((self.stored(), self.changes()), ("theirs", []))

    async def test_a_secret_of_another_region_is_another_secret(self) -> None:
        self.cloud.put_secret("us-west-2", NAME, "theirs")
        self.assertTrue((await self.save()).made)
        self.assertEqual(self.cloud.secret("us-west-2", NAME), "theirs")

    async def test_a_secret_that_waits_for_its_deletion_takes_nothing(self) -> None:
        await self.save("hf_older1234")
        await self.aws.change(
            "secretsmanager", REGION, "delete_secret", 60.0, SecretId=NAME, RecoveryWindowInDays=7
        )
        error = await self.refused("DENIED")
        self.assertIn("restore-secret", error.next_step)
        self.assertEqual(self.changes(), ["CreateSecret", "DeleteSecret"])

    async def test_credentials_of_another_account_save_nothing(self) -> None:
        self.cloud.script.account = "999999999999"
        await self.refused("DENIED")
        self.assertEqual((self.stored(), self.changes()), (None, []))


class RefusalTest(Case):
    """Only the store's own "not found" leads to a new secret."""

    async def test_what_is_no_name_and_no_payload_is_not_sent(self) -> None:
        for name in ("", "a b", "a;b", "$(x)", "x\n", "ＡＢＣ", "a" * 513):
            with self.subTest(name):
                await self.refused("INVALID", name=name)
        for payload in ("", "x" * 65_537, "é" * 40_000):
            await self.refused("INVALID", payload=payload)
        self.assertEqual(self.cloud.requests, [])

    async def test_a_state_that_cannot_be_read_makes_no_secret(self) -> None:
        for fault, error_class in (
            ({"code": "AccessDeniedException"}, "DENIED"),
            ({"code": "InternalServiceError", "message": "x"}, "UNREACHABLE"),
            ({"code": "", "lost": "cut"}, "UNREACHABLE"),
            ({"code": "InvalidRequestException", "message": "x"}, "INVALID"),
        ):
            with self.subTest(fault):
                self.cloud.script.faults[:] = [CallFault("DescribeSecret", **fault)]
                await self.refused(error_class)
        self.cloud.script.faults.clear()
        self.cloud.script.credentials = "expired"
        await self.refused("AUTH")
        self.assertEqual(self.changes(), [])

    async def test_a_refused_write_is_sent_once(self) -> None:
        await self.save("hf_older1234")
        for fault, error_class in (
            ({"code": "AccessDeniedException"}, "DENIED"),
            ({"code": "LimitExceededException", "message": "x"}, "QUOTA"),
            ({"code": "ThrottlingException"}, "BUSY"),
            ({"code": "InternalServiceError", "message": "x"}, "UNKNOWN"),
            ({"code": "", "lost": "cut"}, "UNKNOWN"),
        ):
            with self.subTest(fault):
                before = len(self.changes())
                self.cloud.script.faults[:] = [CallFault("PutSecretValue", **fault)]
                await self.refused(error_class)
                self.assertEqual((self.stored(), len(self.changes()) - before), ("hf_older1234", 1))


class FateTest(Case):
    """A write whose answer is lost, and what a repeat of it does."""

    async def test_a_write_whose_answer_was_lost_is_unknown_and_a_repeat_mends_it(self) -> None:
        self.fault("CreateSecret", code="", lost="cut", after=True, times=1)
        await self.refused("UNKNOWN")
        self.assertEqual(self.stored(), CANARY)
        saved = await self.save()
        self.assertEqual((saved.made, self.stored()), (False, CANARY))
        self.assertEqual(self.changes(), ["CreateSecret", "PutSecretValue"])

    async def test_a_version_that_does_not_show_at_once_is_waited_for(self) -> None:
        await self.save("hf_older1234")
        # The first look is the one before the write.
        self.fault("DescribeSecret", code="", times=1)
        self.fault("DescribeSecret", code="ResourceNotFoundException", message="x", times=2)
        saved = await self.save()
        self.assertEqual(saved.state.current, (await self.state()).current)

    async def test_a_version_that_never_shows_is_unknown(self) -> None:
        await self.save("hf_older1234")
        self.fault("DescribeSecret", code="", times=1)
        self.fault("DescribeSecret", code="AccessDeniedException")
        error = await self.refused("UNKNOWN")
        self.assertIn("was written and is not to be seen", error.what)
        self.assertIn("(AccessDeniedException)", error.what)
        self.assertEqual(self.stored(), CANARY)

    async def test_of_two_who_save_at_once_one_is_refused(self) -> None:
        await self.save("hf_older1234")
        self.cloud.script.delays["PutSecretValue"] = 1.5  # both have looked before either wrote
        payloads = ["hf_payload10000", "hf_payload20000"]
        ended = await asyncio.gather(*map(self.save, payloads), return_exceptions=True)
        [refusal] = [one for one in ended if isinstance(one, RigError)]
        self.assertEqual(refusal.error_class, "EXISTS", str(refusal))
        kept = [one for one, end in zip(payloads, ended, strict=True) if end is not refusal]
        self.assertEqual([self.stored()], kept)

    async def test_the_same_twice_at_once_is_one_version(self) -> None:
        await self.save("hf_older1234")
        self.cloud.script.delays["PutSecretValue"] = 1.5
        one, other = await asyncio.gather(self.save(), self.save())
        self.assertEqual(one, other)
        self.assertEqual(self.stored(), CANARY)


if __name__ == "__main__":
    unittest.main()
