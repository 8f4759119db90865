"""What a rig on Google Cloud needs of a computer: each gap by itself, with its own remedy.

gcloud is the stand-in, the provider a fake Google. What a person did and what Google did not let
them do are told apart.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.planes.google_needs import google_needs
from forge.parts.planes.plane import PlaneNeed
from forge.rigs.tpu_vllm_v5e1_2b import RIG as CLOUD_TPU_RIG
from tests.rented_rig import PROJECT, RentedRigCase

REGION = "us-east5"


class NeedsCase(RentedRigCase):
    def setUp(self) -> None:
        super().setUp()
        ssh = self.place / "bin" / "ssh"
        ssh.write_text("#!/bin/sh\n")
        ssh.chmod(0o755)

    async def needs(self, project: str = PROJECT, **environment: str) -> dict[str, PlaneNeed]:
        """Each need by its first word; `environment` is added to what gcloud and libraries get."""
        given = {**os.environ, **environment} if environment else None
        found = await google_needs(project, REGION, given)
        self.assertEqual(len(found), 4)
        return dict(zip(("gcloud", "login", "credentials", "ssh"), found, strict=True))

    def assert_missing(self, needs: dict[str, PlaneNeed], *names: str) -> None:
        """These are missing, each with what to do about it; and no other is."""
        self.assertEqual({name for name, need in needs.items() if not need.present}, {*names})
        for need in needs.values():
            self.assertTrue(need.detail, need)
            self.assertTrue(need.present or need.remedy, need)

    def alone(self, *programs: str) -> str:
        """A PATH with just these programs of the test's own."""
        folder = self.place / "alone"
        folder.mkdir(exist_ok=True)
        for name in programs:
            (folder / name).symlink_to(self.place / "bin" / name)
        return str(folder)


class WholeTest(NeedsCase):
    async def test_everything_is_there(self) -> None:
        needs = await self.needs()
        self.assert_missing(needs)
        self.assertEqual(needs["gcloud"].detail, "528.0.0")
        self.assertIn(PROJECT, needs["login"].name)
        self.assertIn(REGION, needs["login"].detail)
        self.assertTrue(needs["ssh"].detail.endswith("/ssh"))

    async def test_it_looks_and_changes_nothing(self) -> None:
        await self.needs()
        self.assertEqual({one.method for one in self.google.requests}, {"GET"})
        self.assertEqual(self.google.held(), {})

    async def test_the_environment_that_is_given_is_the_one_that_counts(self) -> None:
        needs = await self.needs(CLOUDSDK_AUTH_ACCESS_TOKEN_FILE=str(self.place / "none"))
        self.assert_missing(needs, "login")
        needs = await self.needs(GEMMA4_GOOGLE_ENDPOINT="")
        self.assert_missing(needs, "credentials")


class GapTest(NeedsCase):
    async def test_no_ssh(self) -> None:
        with mock.patch.dict(os.environ, PATH=self.alone("gcloud", "gcloud-sound")):
            needs = await self.needs()
        self.assertFalse(needs["ssh"].present)
        self.assertIn("openssh-client", needs["ssh"].remedy)

    async def test_no_gcloud_is_no_missing_login_of_the_libraries(self) -> None:
        with mock.patch.dict(os.environ, PATH=self.alone("ssh")):
            needs = await self.needs()
        self.assert_missing(needs, "gcloud", "login")

    async def test_a_login_that_is_over(self) -> None:
        Path(os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).write_text("expired\n")
        needs = await self.needs()
        self.assertFalse(needs["login"].present)
        self.assertIn("gcloud auth login", needs["login"].remedy)
        self.assertTrue(needs["credentials"].present, "another login than gcloud's")

    async def test_no_login_of_the_libraries(self) -> None:
        needs = await self.needs(GEMMA4_GOOGLE_ENDPOINT="")
        self.assert_missing(needs, "credentials")
        self.assertIn("application-default login", needs["credentials"].remedy)

    async def test_the_libraries_are_not_installed(self) -> None:
        hidden: dict[str, Any] = {"google.auth": None, "google.auth.credentials": None}
        with mock.patch.dict(sys.modules, hidden):
            needs = await self.needs()
        self.assert_missing(needs, "credentials")
        self.assertIn("is not installed", needs["credentials"].detail)
        self.assertEqual(needs["credentials"].remedy, "make install")

    async def test_a_project_of_somebody_else(self) -> None:
        needs = await self.needs("another-project")
        self.assert_missing(needs, "login")
        self.assertIn("another-project", needs["login"].name)

    async def test_a_service_that_is_off(self) -> None:
        self.google.script.disabled = {"compute"}
        needs = await self.needs()
        self.assert_missing(needs, "login")
        self.assertIn("compute.googleapis.com", needs["login"].detail + needs["login"].remedy)

    async def test_a_gcloud_that_gives_no_answer_that_can_be_read(self) -> None:
        self.gcloud.fault("version", said="{half", instead=True)
        needs = await self.needs()
        self.assertFalse(needs["gcloud"].present)
        self.assertTrue(needs["gcloud"].detail)
        self.gcloud.mend()
        self.gcloud.fault("compute", "regions", said="{half", instead=True)
        needs = await self.needs()
        self.assertFalse(needs["login"].present)
        self.assertTrue(needs["gcloud"].present)

    async def test_a_secret_in_what_it_says_stays_there(self) -> None:
        token = "ya29.a0OTHERotherOTHERotherOTHERotherOTHER14"
        warned = f"ERROR: (gcloud.compute.regions.describe) Bearer {token} is not valid\n"
        self.gcloud.fault("compute", "regions", instead=True, warned=warned, status=1)
        needs = await self.needs()
        self.assertFalse(needs["login"].present)
        self.assertNotIn(token, needs["login"].detail + needs["login"].remedy)


class PlaneTest(NeedsCase):
    """The verb of the assembled plane, which a person's `make preflight` shows."""

    zones = "us-east5-b,europe-west4-a"

    async def plane_needs(self) -> list[PlaneNeed]:
        plane: Any = self.assembled().context.plane
        return list(await plane.plane_needs())

    async def test_the_region_that_it_will_ask_first(self) -> None:
        self.write_settings(ZONES=self.zones)
        needs = await self.plane_needs()
        self.assertTrue(all(need.present for need in needs), needs)
        (words,) = [one for one in self.called("compute", "regions", "describe")]
        self.assertIn("us-east5", words)

    async def test_a_caution_is_told_and_nothing_is_missing_for_it(self) -> None:
        self.write_settings(ZONES=self.zones, SERVICE_ACCOUNT="")
        needs = await self.plane_needs()
        cautions = [need for need in needs if need.name == "caution"]
        self.assertGreaterEqual(len(cautions), 1)
        self.assertTrue(all(need.present for need in cautions))

    async def test_settings_at_fault_are_another_rows_concern(self) -> None:
        self.write_settings(PROJECT="")
        self.assertEqual(await self.plane_needs(), [])
        self.assertEqual(self.called(), [])


class CloudTpuPlaneTest(PlaneTest):
    rig = CLOUD_TPU_RIG


if __name__ == "__main__":
    unittest.main()
