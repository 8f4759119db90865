"""What a person is told that a rig on EC2 lacks: credentials, the plugin, the instance profile."""

from __future__ import annotations

import asyncio
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

from forge.parts.planes.ec2_needs import aws_needs
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.plane import PlaneNeed
from forge.suites.fake_aws import FAKE_AWS_PROFILE, FakeAws
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, AwsScript, CallFault


class NeedsTest(unittest.IsolatedAsyncioTestCase):
    cloud: ClassVar[FakeAws]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = cls.enterClassContext(FakeAws())

    def setUp(self) -> None:
        self.cloud.renew()
        self.script = self.cloud.script = AwsScript()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        (self.place / "bin").mkdir()
        self.environment = {
            "PATH": str(self.place / "bin"),
            **self.cloud.environment(self.place / "aws"),
        }

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])

    def plugin(self, version: str, status: int = 0) -> None:
        program = self.place / "bin/session-manager-plugin"
        program.write_text(f"#!/bin/sh\necho '{version}'\nexit {status}\n")
        program.chmod(0o755)

    async def needs(self, **values: Any) -> dict[str, PlaneNeed]:
        settings = Ec2Settings(aws_account=FAKE_AWS_ACCOUNT, budget_usd=3).model_copy(update=values)
        found = await aws_needs(settings, self.environment)
        self.assertEqual(len(found), 3)
        for need in found:
            self.assertTrue(need.present or need.remedy, f"{need.name} has no remedy")
        return dict(zip(("login", "plugin", "profile"), found, strict=True))

    async def test_all_of_it_is_there(self) -> None:
        self.plugin("1.2.896.0")
        self.cloud.put_profile()
        found = await self.needs()
        self.assertEqual({need.present for need in found.values()}, {True})
        self.assertIn(FAKE_AWS_ACCOUNT, found["login"].name)
        self.assertIn("1.2.896.0", found["plugin"].detail)
        self.assertEqual(found["profile"].detail, "role gemma4-rig")
        sent = {one.action for one in self.cloud.requests}
        self.assertEqual(sent, {"GetCallerIdentity", "GetInstanceProfile"}, "it only looks")

    async def test_a_profile_of_the_sdk_is_named(self) -> None:
        found = await self.needs(aws_profile=FAKE_AWS_PROFILE)
        self.assertEqual(found["login"].detail, f"profile {FAKE_AWS_PROFILE}")
        found = await self.needs(aws_profile="nobodys")
        self.assertFalse(found["login"].present)
        self.assertIn("nobodys", found["login"].detail)

    async def test_credentials_of_another_account_are_none(self) -> None:
        found = await self.needs(aws_account="999988887777")
        self.assertFalse(found["login"].present)
        self.assertIn(FAKE_AWS_ACCOUNT, found["login"].detail)
        self.assertIn("999988887777", found["login"].detail)
        self.assertIn("AWS_PROFILE", found["login"].remedy)

    async def test_credentials_that_are_over_say_how_to_get_others(self) -> None:
        self.script.credentials = "expired"
        found = await self.needs()
        self.assertFalse(found["login"].present)
        self.assertIn("aws sso login", found["login"].remedy)
        self.assertFalse(found["profile"].present, "nobody could look")

    async def test_without_any_credentials_it_says_so(self) -> None:
        for name in list(self.environment):
            if name.startswith("AWS_") and "KEY" in name:
                del self.environment[name]
        found = await self.needs()
        self.assertFalse(found["login"].present)
        self.assertIn("credentials", found["login"].detail)

    async def test_a_missing_plugin_says_how_to_install_it(self) -> None:
        found = await self.needs()
        self.assertFalse(found["plugin"].present)
        for word in ("Debian", "macOS", "session-manager-plugin"):
            self.assertIn(word, found["plugin"].remedy)

    async def test_a_plugin_that_shows_the_token_is_too_old(self) -> None:
        for version in ("1.2.497.0", "1.1.17.0", "unknown", ""):
            self.plugin(version)
            found = await self.needs()
            self.assertFalse(found["plugin"].present, version)
            self.assertIn("installs", found["plugin"].remedy)

    async def test_an_old_plugin_that_works_is_there_with_a_caution(self) -> None:
        self.plugin("1.2.553.0")
        found = await self.needs()
        self.assertTrue(found["plugin"].present)
        self.assertIn("1.2.764.0", found["plugin"].detail)

    async def test_a_plugin_that_fails_is_none(self) -> None:
        self.plugin("1.2.896.0", status=1)
        self.assertFalse((await self.needs())["plugin"].present)

    async def test_a_missing_profile_is_made_by_set_up(self) -> None:
        found = await self.needs()
        self.assertFalse(found["profile"].present)
        self.assertIn("server.py set-up", found["profile"].remedy)
        self.cloud.put_profile("another")
        self.assertFalse((await self.needs())["profile"].present)
        self.assertTrue((await self.needs(instance_profile="another"))["profile"].present)

    async def test_a_profile_without_a_role_is_of_no_use(self) -> None:
        self.cloud.put_profile()
        with self.cloud.lock:
            iam = self.cloud.moto.iam()
            iam.remove_role_from_instance_profile("gemma4-rig", "gemma4-rig")
        found = await self.needs()
        self.assertFalse(found["profile"].present)
        self.assertIn("has no role", found["profile"].detail)

    async def test_one_that_nobody_may_look_at_is_told_as_that(self) -> None:
        self.script.faults = [CallFault("GetInstanceProfile", "AccessDenied")]
        found = await self.needs()
        self.assertTrue(found["login"].present)
        self.assertFalse(found["profile"].present)
        self.assertIn("GetInstanceProfile", found["profile"].detail)


if __name__ == "__main__":
    unittest.main()
