"""The real gcloud, run by the part, against a fake Google on loopback.

Eight runs of the real program in all, each for as much as one can prove; what needs no real one
(the forms of arguments, the fate of a program that dies) is tried with small programs of its name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.boundaries.gcloud import (
    Gcloud,
    GcloudCall,
    GcloudFlag,
    gcloud_environment,
)
from forge.parts.boundaries.gcloud_answers import field_labels, field_text
from forge.parts.boundaries.gcloud_refusals import operation_refusal
from forge.parts.ground.errors import RigError
from forge.suites.fake_google import FakeGoogle, gcloud_wrapper

PROJECT = "fake-proj"
PATIENCE_S = 90.0  # for one real gcloud on a busy machine; no test measures it
CANARY = "hf_CanaryCanaryCanary0123456789abcdef"
LABELS = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-v6e1-2b", "owner": "a1b2c3"}
# The strings that make a shell, a flag, a path, a second item or a file of a value.
CORPUS = (
    *("; touch P #", "$(touch P)", "`touch P`", "a\nb", "a\rb", "a\x00b", "--help", "-x"),
    *("--flags-file=/etc/passwd", "--impersonate-service-account=a@b", "@/etc/passwd", "^:^a:b"),
    *("projects/o/zones/z/instances/i", "https://www.googleapis.com/compute/v1/projects/o"),
    *("user@host", "../../etc/passwd", "a,startup-script=x", "x OR name~.*", "ＡＢＣ", "a\u202eb"),
    *("a" * 10_000, " ", "%0a", "{0.__class__}", "{{x}}", "'\"\\"),
)


def create(zone: str, name: str, model: str, **more: GcloudFlag) -> GcloudCall:
    """The create that a plane on Compute Engine sends."""
    flags: dict[str, GcloudFlag] = {
        "zone": zone,
        "machine-type": "ct6e-standard-1t",
        "provisioning-model": model,
        "max-run-duration": "4h",
        "instance-termination-action": "DELETE",
        "maintenance-policy": "TERMINATE",
        "reservation-affinity": "none",
        "image-family": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
        "image-project": "ubuntu-os-accelerator-images",
        "boot-disk-size": "200GB",
        "boot-disk-type": "hyperdisk-balanced",
        "scopes": ["cloud-platform"],
        "labels": LABELS,
        "async": True,
    }
    return GcloudCall(("compute", "instances", "create"), name, {**flags, **more})


class RealGcloudTest(unittest.IsolatedAsyncioTestCase):
    """One fake Google and one wrapper that notes every argument list, for each test."""

    def setUp(self) -> None:
        real = shutil.which("gcloud")
        if real is None:
            self.skipTest("gcloud is not installed: install the Google Cloud CLI to run this test")
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.journal = gcloud_wrapper(self.folder / "bin", real)
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        surroundings = self.cloud.environment(self.folder, str(self.folder / "bin"))
        # What lies about on a person's machine: none of it may aim a command, or be handed on.
        astray = {"HF_TOKEN": CANARY, "CLOUDSDK_CORE_PROJECT": "other-project"}
        self.gcloud = Gcloud(PROJECT, environment={**surroundings, **astray})

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [], "something asked for a host outside")
        foreign = [one for one in self.cloud.requests if "other-project" in one.path]
        self.assertEqual(foreign, [])

    def journal_lines(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    async def refused(self, call: GcloudCall, timeout_s: float = PATIENCE_S) -> RigError:
        with self.assertRaises(RigError) as raised:
            await self.gcloud.change(call, timeout_s)
        return raised.exception

    async def test_a_spot_machine_with_its_hard_stop_arrives_and_is_listed(self) -> None:
        script = self.folder / "start.sh"
        script.write_text("#!/bin/sh\necho a, b\n")
        more: dict[str, GcloudFlag] = {"metadata-from-file": {"startup-script": script}}
        call = create("us-east5-b", "rig-1", "SPOT", **more)
        made = await self.gcloud.change(call, PATIENCE_S)
        self.assertEqual(field_text(made.thing(), "operationType"), "insert")
        (request,) = self.cloud.sent("POST", "/instances")
        self.assertIn(f"projects/{PROJECT}/zones/us-east5-b/instances", request.path)
        body = request.body
        self.assertEqual((body["name"], body["labels"]), ("rig-1", LABELS))
        self.assertTrue(body["machineType"].endswith("/machineTypes/ct6e-standard-1t"))
        scheduling = body["scheduling"]
        self.assertEqual(scheduling["provisioningModel"], "SPOT")
        self.assertEqual(scheduling["instanceTerminationAction"], "DELETE")
        self.assertEqual(scheduling["maxRunDuration"], {"seconds": "14400"})
        self.assertEqual(scheduling["onHostMaintenance"], "TERMINATE")
        disk = body["disks"][0]["initializeParams"]
        self.assertEqual(disk["diskSizeGb"], "200")
        self.assertTrue(disk["diskType"].endswith("/hyperdisk-balanced"))
        (item,) = body["metadata"]["items"]
        self.assertEqual(item, {"key": "startup-script", "value": "#!/bin/sh\necho a, b\n"})
        (account,) = body["serviceAccounts"]
        self.assertEqual(account["scopes"], ["https://www.googleapis.com/auth/cloud-platform"])

        # The list, of more than a page, while one zone cannot be read: found, and said to lack.
        self.cloud.script.page = 1
        self.cloud.script.unreachable.add("us-west4-a")
        second = {**body, "name": "rig-2"}
        self.cloud.take(
            "POST", f"/compute/v1/projects/{PROJECT}/zones/us-east5-a/instances", second
        )
        listed = await self.gcloud.read(GcloudCall(("compute", "instances", "list")), PATIENCE_S)
        machines = {field_text(one, "name"): one for one in listed.things()}
        self.assertEqual(sorted(machines), ["rig-1", "rig-2"])
        self.assertEqual(field_labels(machines["rig-1"], "labels"), LABELS)
        self.assertTrue(field_text(machines["rig-1"], "id").isdigit())
        self.assertEqual(len(listed.unread), 1, listed)
        self.assertIn("us-west4-a", listed.unread[0])

        self.cloud.advance(4 * 3600 + 1)
        self.assertEqual(self.cloud.held(), {}, "the hard stop leaves neither machine nor disk")

    async def test_a_stockout_is_capacity_with_the_zones_that_the_provider_names(self) -> None:
        self.cloud.script.stockout.add("us-east5-b")
        self.cloud.script.hint = ("us-east5-a", "us-central1-b")
        # A flex-start, which gcloud 528 takes by its alpha command alone: the wrapper's part.
        flexible: dict[str, GcloudFlag] = {"request-valid-for-duration": "2h"}
        error = await self.refused(create("us-east5-b", "rig-1", "FLEX_START", **flexible))
        self.assertEqual(error.error_class, "CAPACITY", error)
        self.assertEqual(error.next_step, "the provider names us-east5-a, us-central1-b")
        (request,) = self.cloud.sent("POST", "/instances")
        self.assertEqual(request.body["scheduling"]["provisioningModel"], "FLEX_START")
        self.assertEqual(self.cloud.held(), {})

    async def test_a_gcloud_without_flex_start_is_too_old_and_sends_nothing(self) -> None:
        real = shutil.which("gcloud")
        assert real is not None
        gcloud_wrapper(self.folder / "bin", real, reroute=False)
        call = create("us-east5-b", "rig-1", "FLEX_START", **{"request-valid-for-duration": "2h"})
        error = await self.refused(call)
        self.assertEqual(error.error_class, "INVALID", error)
        self.assertIn("too old", error.what)
        self.assertIn("gcloud components update", error.next_step)
        self.assertEqual(self.cloud.requests, [])

    async def test_a_queued_resource_is_created_and_described(self) -> None:
        zone: dict[str, GcloudFlag] = {"zone": "us-west4-a"}
        group = ("alpha", "compute", "tpus", "queued-resources")
        flags: dict[str, GcloudFlag] = {
            **zone,
            "node-id": "rig-node",
            "accelerator-type": "v5litepod-1",
            "runtime-version": "v2-alpha-tpuv5-lite",
            "provisioning-model": "flex-start",
            "max-run-duration": "4h",
            "valid-until-duration": "2h",
            "labels": LABELS,
            "async": True,
        }
        self.cloud.script.queue_s = 600
        await self.gcloud.change(GcloudCall((*group, "create"), "rig-qr", flags), PATIENCE_S)
        (request,) = self.cloud.sent("POST", "/queuedResources")
        self.assertEqual(request.query["queuedResourceId"], "rig-qr")
        self.assertEqual(request.body["provisioningModel"], "FLEX_START")
        self.assertEqual(request.body["runDuration"], {"maxRunDuration": "14400s"})
        self.assertEqual(request.body["queueingPolicy"], {"validUntilDuration": "7200s"})
        (spec,) = request.body["tpu"]["nodeSpec"]
        self.assertEqual((spec["nodeId"], spec["node"]["labels"]), ("rig-node", LABELS))

        self.cloud.script.quota.add("us-west4-a")
        read = await self.gcloud.read(GcloudCall((*group, "describe"), "rig-qr", zone), PATIENCE_S)
        found = read.thing()
        self.assertEqual(field_text(found, "state", "state"), "FAILED")
        labels = field_labels(found, "tpu", "nodeSpec", 0, "node", "labels")
        self.assertEqual(labels, LABELS)
        refusal = operation_refusal(found["state"]["failedData"]["error"], project=PROJECT)
        assert refusal is not None
        self.assertEqual(refusal.error_class, "QUOTA", refusal)
        self.assertIn("TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI", refusal.what)
        self.assertIn("limit 0 in zone us-west4-a", refusal.what)

    async def test_a_gcloud_that_dies_after_it_sent_a_create_is_unknown(self) -> None:
        self.cloud.script.lost = 1
        asked = asyncio.ensure_future(self.refused(create("us-east5-b", "rig-1", "SPOT")))
        made = {"instances": ["rig-1"], "disks": ["rig-1"]}
        while self.cloud.held() != made and not asked.done():
            await asyncio.sleep(0.05)
        self.assertFalse(asked.done(), "it ended although no answer came")
        ((number, *_arguments),) = self.journal_lines()
        os.killpg(number, signal.SIGKILL)
        error = await asked
        self.assertEqual(error.error_class, "UNKNOWN", error)
        self.assertIn("may have been made", error.what)
        self.assertEqual(self.cloud.held(), made)
        self.assertEqual(len(self.cloud.sent("POST", "/instances")), 1)

    async def test_a_secret_goes_by_the_input_and_is_in_no_argument_and_no_record(self) -> None:
        flags: dict[str, GcloudFlag] = {"data-file": "-", "replication-policy": "automatic"}
        call = GcloudCall(("secrets", "create"), "hf-token", flags, given=CANARY.encode())
        await self.gcloud.change(call, PATIENCE_S)
        sent = base64.b64encode(CANARY.encode()).decode()
        self.assertEqual(self.cloud.secrets.payloads, {"hf-token": [sent]})
        records = self.journal.read_text() + repr(self.cloud.requests)
        for form in (CANARY, sent, base64.urlsafe_b64encode(CANARY.encode()).decode()):
            self.assertNotIn(form, records)
        (given,) = self.journal_lines()
        self.assertIn(f"--project={PROJECT}", given)
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.assertNotIn(CANARY.encode(), path.read_bytes(), path)


class OwnProgramCase(unittest.IsolatedAsyncioTestCase):
    """A small program in gcloud's place: for what no real one can be brought to do."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.environment = {"PATH": str(self.folder), "HOME": str(self.folder)}

    def gcloud(self, source: str, environment: Mapping[str, str] | None = None) -> Gcloud:
        program = self.folder / "gcloud"
        program.write_text(f"#!{sys.executable}\n" + textwrap.dedent(source))
        program.chmod(0o755)
        return Gcloud(PROJECT, environment={**self.environment, **(environment or {})})

    async def fails(self, source: str, *, change: bool, timeout_s: float = 60.0) -> RigError:
        gcloud = self.gcloud(source)
        call = GcloudCall(("compute", "instances", "delete" if change else "list"))
        with self.assertRaises(RigError) as raised:
            await (gcloud.change if change else gcloud.read)(call, timeout_s)
        return raised.exception


class FateTest(OwnProgramCase):
    """Reads and changes: what a lost answer means for each."""

    async def test_a_program_that_does_not_end(self) -> None:
        mark = self.folder / "begun"
        source = f"import time, pathlib; pathlib.Path({str(mark)!r}).touch(); time.sleep(60)"
        read = await self.fails(source, change=False, timeout_s=0.5)
        self.assertEqual(read.error_class, "TIMEOUT")
        change = await self.fails(source, change=True, timeout_s=0.5)
        self.assertEqual(change.error_class, "UNKNOWN")
        self.assertIn("may have been made", change.what)
        self.assertIn("read the state", change.next_step)

    async def test_a_program_that_is_killed(self) -> None:
        source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        for change, wanted in ((False, "UNREACHABLE"), (True, "UNKNOWN")):
            error = await self.fails(source, change=change)
            self.assertEqual(error.error_class, wanted)
            self.assertIn("signal 9", error.what)

    async def test_a_program_that_crashes(self) -> None:
        source = "import sys; sys.exit('ERROR: gcloud crashed (ConnectionError): reset by peer')"
        self.assertEqual((await self.fails(source, change=False)).error_class, "UNREACHABLE")
        self.assertEqual((await self.fails(source, change=True)).error_class, "UNKNOWN")

    async def test_what_the_provider_refused_is_certain_for_a_change_too(self) -> None:
        said = "ERROR: (gcloud.compute.instances.delete) The resource 'projects/p/zones/z-a1/"
        source = f'import sys; sys.exit("{said}instances/i\' was not found")'
        self.assertEqual((await self.fails(source, change=True)).error_class, "NOT_FOUND")

    async def test_help_instead_of_an_act_is_no_success(self) -> None:
        source = "print('NAME\\n    gcloud compute instances delete - delete machines')"
        for change in (False, True):
            self.assertEqual((await self.fails(source, change=change)).error_class, "UNKNOWN")

    async def test_nothing_is_no_empty_list(self) -> None:
        self.assertEqual((await self.fails("pass", change=False)).error_class, "UNKNOWN")
        answer = await self.gcloud("pass").change(GcloudCall(("compute", "x")), 60)
        self.assertIsNone(answer.value)
        answer = await self.gcloud("print('[]')").read(GcloudCall(("compute", "x")), 60)
        self.assertEqual(answer.things(), [])

    async def test_more_than_is_kept_is_unknown(self) -> None:
        source = "print('[\"' + 'x' * 9_000_000 + '\"]')"
        error = await self.fails(source, change=False)
        self.assertEqual(error.error_class, "UNKNOWN")
        self.assertIn("too large", error.what)

    async def test_no_gcloud_is_not_the_providers_not_found(self) -> None:
        gcloud = Gcloud(PROJECT, environment=self.environment)
        for act in (gcloud.read, gcloud.change):
            with self.assertRaises(RigError) as raised:
                await act(GcloudCall(("compute", "instances", "list")))
            self.assertEqual(raised.exception.error_class, "DENIED")
            self.assertIn("gcloud is not installed", raised.exception.what)
            self.assertIn("https://cloud.google.com/sdk", raised.exception.next_step)

    async def test_a_gcloud_that_cannot_be_started(self) -> None:
        program = self.folder / "gcloud"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        with self.assertRaises(RigError) as raised:
            await Gcloud(PROJECT, environment=self.environment).read(GcloudCall(("version",)))
        self.assertEqual(raised.exception.error_class, "DENIED")

    async def test_the_version(self) -> None:
        source = 'print(\'{"Google Cloud SDK": "528.0.0", "alpha": "2025.06.20"}\')'
        self.assertEqual(await self.gcloud(source).version(60), "528.0.0")
        self.assertEqual(await self.gcloud("print('{}')").version(60), "unknown")


class EnvironmentTest(OwnProgramCase):
    """What gcloud is given of its surroundings."""

    async def seen(self, given: Mapping[str, str]) -> dict[str, str]:
        gcloud = self.gcloud("import json, os; print(json.dumps(dict(os.environ)))", given)
        found: dict[str, Any] = (await gcloud.read(GcloudCall(("info",)), 60)).thing()
        return {key: str(value) for key, value in found.items()}

    async def test_silent_without_prompts_reports_and_logs(self) -> None:
        seen = await self.seen({"CLOUDSDK_CORE_DISABLE_PROMPTS": "0", "TERM": "xterm"})
        for key, value in (
            ("CLOUDSDK_CORE_DISABLE_PROMPTS", "1"),
            ("CLOUDSDK_CORE_SHOULD_PROMPT_TO_ENABLE_API", "false"),
            ("CLOUDSDK_CORE_DISABLE_USAGE_REPORTING", "1"),
            ("CLOUDSDK_CORE_DISABLE_FILE_LOGGING", "1"),
            ("CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK", "1"),
            ("CLOUDSDK_SURVEY_DISABLE_PROMPTS", "1"),
            ("TERM", "dumb"),
        ):
            self.assertEqual(seen[key], value, key)

    async def test_the_login_stays_and_what_would_mislead_goes(self) -> None:
        login = {"CLOUDSDK_CONFIG": "/home/user/gcloud", "HTTPS_PROXY": "http://127.0.0.1:1"}
        astray = ("CLOUDSDK_CORE_PROJECT", "CLOUDSDK_COMPUTE_ZONE", "CLOUDSDK_CORE_LOG_HTTP")
        foreign = {"HF_TOKEN": CANARY, "AWS_SECRET_ACCESS_KEY": "x" * 40, "PYTHONPATH": "/x"}
        given = {**login, **dict.fromkeys(astray, "other-project"), **foreign}
        seen = await self.seen(given)
        for key, value in login.items():
            self.assertEqual(seen[key], value)
        for key in (*astray, *foreign):
            self.assertNotIn(key, seen)

    def test_this_processs_own_environment_by_default(self) -> None:
        with mock.patch.dict(os.environ, {"HF_TOKEN": CANARY, "CLOUDSDK_CONFIG": "/c"}):
            found = gcloud_environment(os.environ)
        self.assertEqual(found["CLOUDSDK_CONFIG"], "/c")
        self.assertEqual(found["PATH"], os.environ["PATH"])
        self.assertNotIn("HF_TOKEN", found)


class ArgumentTest(unittest.TestCase):
    """No value can be an option, a second item, a path of another project, or a secret."""

    def setUp(self) -> None:
        self.gcloud = Gcloud(PROJECT)

    def refused(self, call: GcloudCall) -> RigError:
        with self.assertRaises(RigError) as raised:
            self.gcloud.argv(call)
        return raised.exception

    def test_the_whole_list(self) -> None:
        flags: dict[str, GcloudFlag] = {
            "zone": "-",
            "limit": 50,
            "async": True,
            "user-output": False,
            "scopes": ("https://www.googleapis.com/auth/cloud-platform", "logging-write"),
            "labels": {"rig": "a-q4_0", "owner": ""},
            "metadata-from-file": {"startup-script": Path("/tmp/a b/start.sh")},
            "service-account": "rig@fake-proj.iam.gserviceaccount.com",
            "nothing": (),
        }
        argv = self.gcloud.argv(GcloudCall(("alpha", "compute", "x"), "vm-1", flags))
        wanted = ["alpha", "compute", "x", "--zone=-", "--limit=50", "--async", "--no-user-output"]
        wanted.append("--scopes=https://www.googleapis.com/auth/cloud-platform,logging-write")
        wanted += ["--labels=rig=a-q4_0,owner="]
        wanted += ["--metadata-from-file=startup-script=/tmp/a b/start.sh"]
        wanted += ["--service-account=rig@fake-proj.iam.gserviceaccount.com"]
        wanted += [f"--project={PROJECT}", "--quiet", "--format=json", "vm-1"]
        self.assertEqual(argv, wanted)

    def test_every_place_of_a_value_refuses_the_corpus(self) -> None:
        names = ("projects/o/zones/z/instances/i", "user@host")
        values = (
            "projects/o/zones/z/instances/i",
            "user@host",
            "https://www.googleapis.com/compute",
        )
        for bad in CORPUS:
            self.assertEqual(self.refused(GcloudCall(("x",), bad)).error_class, "INVALID", bad)
            self.assertNotIn(bad.strip() or "\n", self.refused(GcloudCall(("x",), bad)).what)
            for flags in (
                {"labels": {"rig": bad}},
                {"labels": {bad: "x"}},
                {"metadata-from-file": {"a": Path(bad)}},
                {bad: "x"},
            ):
                error = self.refused(GcloudCall(("x",), "", flags))  # type: ignore[arg-type]
                self.assertEqual(error.error_class, "INVALID", (flags, bad))
            self.assertEqual(self.refused(GcloudCall((bad,))).error_class, "INVALID")
            if not bad.startswith(values):  # addresses are values (scopes), never names
                for value in (bad, ("fine", bad)):
                    error = self.refused(GcloudCall(("x",), "", {"zone": value}))
                    self.assertEqual(error.error_class, "INVALID", bad)
        for bad in names:
            self.refused(GcloudCall(("x",), bad))

    def test_a_dash_alone_means_all_zones_or_the_input_and_nothing_else(self) -> None:
        for name in ("zone", "data-file"):
            self.assertIn(f"--{name}=-", self.gcloud.argv(GcloudCall(("x",), "", {name: "-"})))
        self.refused(GcloudCall(("x",), "", {"machine-type": "-"}))
        self.refused(GcloudCall(("x",), "-"))

    def test_flags_that_change_who_acts_where_or_what_is_printed(self) -> None:
        for name in (
            *("project", "account", "impersonate-service-account", "access-token-file", "format"),
            *("flags-file", "configuration", "log-http", "help", "filter", "metadata", "quiet"),
            *("no-user-output-enabled", "Zone", "zone=x", "-zone", ""),
        ):
            error = self.refused(GcloudCall(("x",), "", {name: "x"}))
            self.assertEqual(error.error_class, "INVALID", name)

    def test_a_secret_in_any_place_is_refused_and_not_repeated(self) -> None:
        key = "AKIA" + "ABCDEFGHIJKLMNOP"
        for call in (
            GcloudCall(("x",), CANARY.replace("_", "-").replace("hf-", "hf_")),
            GcloudCall(("x",), "", {"description": key}),
            GcloudCall(("logging", "read"), expression=f'textPayload:"{CANARY}"'),
        ):
            error = self.refused(call)
            self.assertEqual(error.error_class, "DENIED")
            self.assertNotIn(CANARY, str(error))
            self.assertNotIn(key, str(error))
        with mock.patch.dict(os.environ, {"HF_TOKEN": "plainword123"}):
            self.refused(GcloudCall(("x",), "", {"description": "plainword123"}))

    def test_an_expression_stands_behind_the_separator_and_only_for_log_reading(self) -> None:
        call = GcloudCall(("logging", "read"), expression='resource.type="gce_instance"')
        argv = self.gcloud.argv(call)
        self.assertEqual(argv[-2:], ["--", 'resource.type="gce_instance"'])
        self.refused(GcloudCall(("compute", "ssh"), expression="sudo reboot"))
        for bad in ("--log-http", "a\nb", "@x", "^:^", "a" * 3000):
            self.refused(GcloudCall(("logging", "read"), expression=bad))

    def test_project_ids(self) -> None:
        for good in ("fake-proj", "my-project-123456", "example.com:my-project"):
            self.assertIn(f"--project={good}", Gcloud(good).argv(GcloudCall(("x",))))
        for bad in ("", "short", "Upper-Case", "-x-project", "a" * 31, "a project", "ends-with-"):
            with self.assertRaises(RigError) as raised:
                Gcloud(bad)
            self.assertEqual(raised.exception.error_class, "INVALID")


class WrapperTest(unittest.TestCase):
    def test_the_login_made_for_a_test_is_for_this_user_alone(self) -> None:
        with tempfile.TemporaryDirectory() as name, FakeGoogle() as cloud:
            environment = cloud.environment(Path(name))
            token = Path(environment["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"])
            self.assertEqual(stat.S_IMODE(token.stat().st_mode), 0o600)


if __name__ == "__main__":
    unittest.main()
