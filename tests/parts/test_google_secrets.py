"""Secret Manager through Google's own client library, against a fake Google on loopback.

The witness is the store itself: what it holds, and which requests arrived. The credentials, which
both client libraries share, are tried here as well.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.boundaries.google_clients import (
    GOOGLE_ENDPOINT_VARIABLE,
    call_google,
    google_access,
)
from forge.parts.boundaries.google_secrets import SavedSecret, save_secret, secret_state
from forge.parts.ground.errors import RigError
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_world import GoogleRefusal

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "fake-proj"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY09"
LABELS = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-v6e1-2b"}
Answer = Callable[[str, str, Mapping[str, str], dict[str, Any]], dict[str, Any]]


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        self.environment = {GOOGLE_ENDPOINT_VARIABLE: self.cloud.base}

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    async def save(
        self, name: str = "hf-token", payload: bytes = CANARY.encode(), **more: Any
    ) -> SavedSecret:
        given = {"environment": self.environment, **more}
        return await save_secret(given.pop("project", PROJECT), name, payload, LABELS, **given)

    async def refused(self, error_class: str, **more: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.save(**more)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertNotIn("CANARY", str(caught.exception))
        return caught.exception

    def stored(self, name: str = "hf-token") -> list[str]:
        return [base64.b64decode(one).decode() for one in self.cloud.secrets.payloads[name]]

    def changes(self) -> list[str]:
        return [one.path for one in self.cloud.requests if one.method != "GET"]

    def meddle(self, wrong: Callable[[str, str, int], GoogleRefusal | None]) -> None:
        """Lets `wrong(method, path, number of the request)` answer in the store's place."""
        answer: Answer = self.cloud.secrets.answer
        number = iter(range(1000))

        def meddled(
            method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
        ) -> dict[str, Any]:
            refusal = wrong(method, path, next(number))
            if refusal is not None:
                raise refusal
            return answer(method, path, query, body)

        self.enterContext(mock.patch.object(self.cloud.secrets, "answer", meddled))


class SaveTest(Case):
    async def test_a_missing_secret_is_made_and_gets_a_version(self) -> None:
        saved = await self.save()
        self.assertEqual((saved.made, saved.version), (True, 1))
        self.assertEqual((saved.state.enabled, saved.state.ours), ((1,), True))
        self.assertEqual(self.stored(), [CANARY])
        self.assertEqual(self.cloud.secrets.labels["hf-token"], LABELS)
        [made] = self.cloud.sent("POST", "/secrets")[:1]
        self.assertEqual(made.body["replication"], {"automatic": {}})
        self.assertNotIn("CANARY", repr(saved))

    async def test_a_secret_of_ours_gets_another_version_and_older_ones_stay(self) -> None:
        await self.save(payload=b"hf_older1234")
        saved = await self.save()
        self.assertEqual((saved.made, saved.version, saved.state.enabled), (False, 2, (2, 1)))
        self.assertEqual(self.stored(), ["hf_older1234", CANARY])
        self.cloud.secrets.disabled.add(("hf-token", 1))
        self.assertEqual((await self.save()).state.enabled, (3, 2))

    async def test_more_versions_than_one_page(self) -> None:
        self.cloud.script.page = 2
        for _ in range(4):
            await self.save()
        self.assertEqual((await self.save()).state.enabled, (5, 4, 3, 2, 1))

    async def test_the_payload_is_read_by_nobody(self) -> None:
        await self.save()
        self.assertEqual([one for one in self.cloud.requests if ":access" in one.path], [])

    async def test_somebody_elses_secret_gets_nothing(self) -> None:
        for labels in ({}, {"managed-by": "somebody"}, {"managed-by": "gemma4-rigs-2"}):
            self.cloud.secrets.payloads["hf-token"] = ["b3RoZXI="]
            self.cloud.secrets.labels["hf-token"] = dict(labels)
            refusal = await self.refused("DENIED")
            self.assertIn("--update-labels=managed-by=gemma4-rigs", refusal.next_step)
            self.assertEqual(self.stored(), ["other"])
        self.assertEqual(self.changes(), [])

    async def test_somebody_was_faster(self) -> None:
        for labels, wanted in ((LABELS, "saved"), ({}, "DENIED")):
            self.cloud.secrets.payloads["hf-token"] = []
            self.cloud.secrets.labels["hf-token"] = dict(labels)
            missing = GoogleRefusal(404, "NOT_FOUND", "Secret [x] not found.")
            with self.subTest(labels=labels):
                self.meddle(lambda _method, _path, n, missing=missing: None if n else missing)
                if wanted == "saved":
                    self.assertFalse((await self.save()).made)
                else:
                    await self.refused(wanted)

    async def test_forms_are_refused_before_anything_is_asked(self) -> None:
        for more in (
            {"name": "a/b"},
            {"name": "../x"},
            {"name": ""},
            {"name": "x" * 256},
            {"name": "a\n"},
            {"project": "Other"},
            {"project": "a/b-cdefg"},
            {"payload": b""},
            {"payload": b"x" * 65_537},
        ):
            await self.refused("INVALID", **more)
        self.assertEqual(self.cloud.requests, [])


class FaultTest(Case):
    """Permission, absence and network are three answers, and only one of them makes a secret."""

    async def test_a_missing_permission(self) -> None:
        what = (
            "Permission 'secretmanager.secrets.get' denied for resource "
            f"'projects/{PROJECT}/secrets/hf-token' (or it may not exist)."
        )
        self.meddle(lambda _method, _path, _n: GoogleRefusal(403, "PERMISSION_DENIED", what))
        refusal = await self.refused("DENIED")
        self.assertIn("secretmanager.secrets.get", refusal.what)
        self.assertIn("application-default", refusal.next_step)
        self.assertEqual(self.changes(), [])

    async def test_an_api_that_is_off_and_a_project_that_is_not_there(self) -> None:
        self.cloud.script.disabled.add("secrets")
        refusal = await self.refused("DENIED")
        self.assertIn("services enable secretmanager.googleapis.com", refusal.next_step)
        await self.refused("DENIED", project="other-proj")
        self.assertEqual(self.changes(), [])

    async def test_a_read_that_fails_changes_nothing(self) -> None:
        self.cloud.script.html = 1
        await self.refused("UNREACHABLE")
        self.cloud.stop()
        await self.refused("UNREACHABLE")
        self.assertEqual(self.changes(), [])

    async def test_a_change_without_an_answer_is_unknown(self) -> None:
        await self.save()
        for lost_by in ("cut", "hold"):
            self.cloud.script.lost, self.cloud.script.lost_by = 1, lost_by
            refusal = await self.refused("UNKNOWN", timeout_s=1.5)
            self.assertIn("may have been made", refusal.what)
        self.assertEqual(self.stored(), [CANARY] * 3)

    async def test_a_version_that_does_not_show(self) -> None:
        gone = GoogleRefusal(404, "NOT_FOUND", "Secret Version [x] not found.")
        self.meddle(lambda _m, path, _n: gone if "/versions/" in path else None)
        await self.refused("NOT_FOUND")

    async def test_versions_that_cannot_be_listed_are_no_failure(self) -> None:
        no = GoogleRefusal(403, "PERMISSION_DENIED", "no")
        self.meddle(lambda method, path, _n: no if path.endswith("/versions") else None)
        saved = await self.save()
        self.assertEqual((saved.version, saved.state.enabled), (1, None))

    async def test_too_many_requests_and_faults(self) -> None:
        for status, code, wanted in (
            (429, "RESOURCE_EXHAUSTED", "UNREACHABLE"),
            (500, "INTERNAL", "UNREACHABLE"),
            (503, "UNAVAILABLE", "UNREACHABLE"),
            (401, "UNAUTHENTICATED", "AUTH"),
            (400, "INVALID_ARGUMENT", "INVALID"),
        ):
            with self.subTest(status=status):
                refusal = GoogleRefusal(status, code, "It is so.")
                with mock.patch.object(self.cloud.secrets, "answer", _raising(refusal)):
                    await self.refused(wanted)

    async def test_a_server_that_never_answers(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            self.environment = {
                GOOGLE_ENDPOINT_VARIABLE: f"http://127.0.0.1:{silent.getsockname()[1]}"
            }
            with self.assertRaises(RigError) as caught:
                await secret_state(
                    PROJECT, "hf-token", "m", environment=self.environment, timeout_s=0.3
                )
        self.assertEqual(caught.exception.error_class, "TIMEOUT")

    async def test_a_library_that_is_not_installed(self) -> None:
        with mock.patch.dict(sys.modules, {"google.cloud.secretmanager_v1": None}):
            refusal = await self.refused("DENIED")
        self.assertIn("google.cloud.secretmanager_v1", refusal.what)
        self.assertIn("make install", refusal.next_step)

    async def test_what_nobody_foresaw_repeats_nothing(self) -> None:
        def work() -> None:
            raise KeyError(CANARY)

        for change in (True, False):
            with self.assertRaises(RigError) as caught:
                await call_google(work, project=PROJECT, change=change, timeout_s=5)
            self.assertEqual(caught.exception.error_class, "UNKNOWN")
            self.assertNotIn("CANARY", str(caught.exception))


class StateTest(Case):
    async def test_what_is_known_without_reading(self) -> None:
        with self.assertRaises(RigError) as caught:
            await secret_state(PROJECT, "hf-token", "gemma4-rigs", environment=self.environment)
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        await self.save()
        for mark, ours in (("gemma4-rigs", True), ("gemma4", False)):
            found = await secret_state(PROJECT, "hf-token", mark, environment=self.environment)
            self.assertEqual((found.ours, found.enabled), (ours, (1,)))


class LoginTest(unittest.IsolatedAsyncioTestCase):
    """Application-default credentials, which are another login than gcloud's."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "bin").mkdir()
        gcloud = self.folder / "bin" / "gcloud"
        gcloud.write_text(f"#!/bin/sh\ntouch {self.folder}/started\n")
        gcloud.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GOOGLE_", "CLOUDSDK_"))}
        kept |= {
            "HOME": str(self.folder),
            "CLOUDSDK_CONFIG": str(self.folder),
            "NO_GCE_CHECK": "true",
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }
        self.enterContext(mock.patch.dict(os.environ, kept, clear=True))

    @property
    def started(self) -> bool:
        return (self.folder / "started").exists()

    def login(self, **more: str) -> None:
        made_up = {"client_id": "c", "client_secret": "s", "refresh_token": "1//made-up"}
        text = json.dumps({"type": "authorized_user", **made_up, **more})
        (self.folder / "application_default_credentials.json").write_text(text)

    def no_login(self) -> RigError:
        with self.assertRaises(RigError) as caught:
            google_access({})
        self.assertEqual(caught.exception.error_class, "AUTH")
        self.assertIn("gcloud auth application-default login", caught.exception.next_step)
        return caught.exception

    async def test_none_is_told_apart_from_gclouds_own_login(self) -> None:
        self.no_login()
        with self.assertRaises(RigError) as caught:
            await secret_state(PROJECT, "hf-token", "m", environment={})
        self.assertEqual(caught.exception.error_class, "AUTH")
        self.assertIn("application-default login", caught.exception.next_step)

    def test_a_login_is_found_without_starting_gcloud(self) -> None:
        self.login()
        access = google_access({})
        self.assertEqual(access.endpoint, "")
        self.assertEqual(access.credentials.refresh_token, "1//made-up")
        self.assertFalse(self.started)

    def test_a_file_that_the_variable_names_comes_first(self) -> None:
        self.login()
        other = self.folder / "other.json"
        other.write_text(
            json.dumps(
                {
                    "type": "authorized_user",
                    "client_id": "c",
                    "client_secret": "s",
                    "refresh_token": "other",
                    "quota_project_id": "billed",
                }
            )
        )
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(other)
        credentials = google_access({}).credentials
        self.assertEqual(credentials.refresh_token, "other")
        self.assertEqual(credentials.quota_project_id, "billed")
        self.assertFalse(self.started)

    def test_damaged_files(self) -> None:
        path = self.folder / "application_default_credentials.json"
        for text in ("", "{", "[]", '{"type": "authorized_user"}', '{"type": "unheard of"}'):
            path.write_text(text)
            with self.subTest(text=text):
                self.no_login()

    async def test_an_expired_login(self) -> None:
        from google.auth.exceptions import RefreshError, TransportError

        def expired() -> None:
            raise RefreshError("invalid_grant: Token has been expired or revoked.")

        def unreachable() -> None:
            raise TransportError("no route")

        for work, wanted in ((expired, "AUTH"), (unreachable, "UNREACHABLE")):
            with self.assertRaises(RigError) as caught:
                await call_google(work, project=PROJECT, change=True, timeout_s=5)
            # Nothing was sent: that is certain, so that even a change is not of unknown fate.
            self.assertEqual(caught.exception.error_class, wanted)

    def test_only_loopback_may_stand_in(self) -> None:
        for address in (
            "http://10.0.0.1:80",
            "https://127.0.0.1:80",
            "http://127.0.0.1.evil.example:80",
            "http://127.0.0.1:80/path",
            "http://user@127.0.0.1:80",
            "http://127.0.0.1",
        ):
            with self.assertRaises(RigError) as caught:
                google_access({GOOGLE_ENDPOINT_VARIABLE: address})
            self.assertEqual(caught.exception.error_class, "DENIED", address)
        for address in ("http://127.0.0.1:8", "http://localhost:80", "http://[::1]:80"):
            self.assertEqual(google_access({GOOGLE_ENDPOINT_VARIABLE: address}).endpoint, address)


class CanaryTest(Case):
    async def test_the_librarys_own_logging_cannot_be_turned_on(self) -> None:
        program = (
            "import asyncio, logging, sys\n"
            "logging.basicConfig(level=logging.DEBUG)\n"
            "from forge.parts.boundaries.google_secrets import save_secret\n"
            f"work = save_secret({PROJECT!r}, 'hf-token', sys.stdin.buffer.read(), {LABELS!r})\n"
            "print(asyncio.run(work))\n"
        )
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program],
            input=CANARY.encode(),
            capture_output=True,
            cwd=ROOT,
            env={
                **os.environ,
                **self.environment,
                "GOOGLE_SDK_PYTHON_LOGGING_SCOPE": "google",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            },
            timeout=120,
        )
        told = (ended.stdout + ended.stderr).decode()
        self.assertEqual(ended.returncode, 0, told)
        self.assertEqual(self.stored(), [CANARY])
        self.assertIn("SavedSecret(", told)
        self.assertNotIn("CANARY", told)
        self.assertNotIn(base64.b64encode(CANARY.encode()).decode()[:20], told)


def _raising(refusal: GoogleRefusal) -> Answer:
    def answer(
        _method: str, _path: str, _query: Mapping[str, str], _body: dict[str, Any]
    ) -> dict[str, Any]:
        raise refusal

    return answer


if __name__ == "__main__":
    unittest.main()
