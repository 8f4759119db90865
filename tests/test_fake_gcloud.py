"""The stand-in for gcloud, held beside what the real one did (recorded), and used in its place.

    python -m tests.test_fake_gcloud record     writes the record anew, with the gcloud on PATH

The record has the status, both outputs and every request of gcloud 528 for each step below; the
tests start no real gcloud.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, gcloud_environment
from forge.parts.ground.errors import RigError
from forge.suites.fake_gcloud import FakeGcloudProgram, fake_gcloud
from forge.suites.fake_google import FakeGoogle
from tests.parts import test_gcloud

RECORD = Path(__file__).parent / "recorded" / "gcloud_528.json"
PROJECT = "fake-proj"
OWN = (f"--project={PROJECT}", "--quiet", "--format=json")
ZONE, TPU_ZONE = "--zone=us-east5-b", "--zone=us-west4-a"
MACHINE = (
    *("--machine-type=ct6e-standard-1t", "--max-run-duration=4h"),
    *("--instance-termination-action=DELETE", "--boot-disk-size=200GB", "--image-family=x"),
    *("--image-project=y", "--scopes=cloud-platform", "--async"),
)
NODE = (
    *(TPU_ZONE, "--node-id=n1", "--accelerator-type=v5litepod-1"),
    *("--runtime-version=v2-alpha-tpuv5-lite", "--valid-until-duration=2h", "--labels=rig=a"),
    *("--service-account=rig@fake-proj.iam.gserviceaccount.com", "--network=default"),
    *("--scopes=https://www.googleapis.com/auth/cloud-platform", "--tags=rig"),
    *("--metadata-from-file=startup-script=FOLDER/start.sh", "--metadata=a=b", "--internal-ips"),
    "--async",
)
SSH = (
    *("--tunnel-through-iap", "--strict-host-key-checking=no"),
    *("--ssh-flag=-oBatchMode=yes", "--ssh-flag=-oConnectTimeout=20"),
    *(f"--project={PROJECT}", "--quiet"),
)
CREATE = ("compute", "instances", "create", ZONE)
QUEUED = ("compute", "tpus", "queued-resources")
NODES = ("compute", "tpus", "tpu-vm")
# ssh that notes its arguments and its input, says what the file `say` says, and ends with `rc`.
SSH_STUB = """#!/bin/sh
echo "ssh $*" >> FOLDER/ssh.log
sed 's/^/input: /' >> FOLDER/ssh.log
echo printed
cat FOLDER/say >&2
exit $(cat FOLDER/rc)
"""
KEYGEN_STUB = """#!/bin/sh
echo "ssh-keygen $*" >> FOLDER/ssh.log
while [ $# -gt 0 ]; do [ "$1" = -f ] && path=$2; shift; done
echo private > "$path"
echo "ssh-rsa AAAA user@host" > "$path.pub"
"""


@dataclass(frozen=True)
class Step:
    """One call of gcloud, after `before` has changed the fake Google or ssh's answer."""

    argv: Sequence[str]
    before: Callable[[FakeGoogle], Any] | None = None
    given: bytes = b""
    ssh: tuple[int, str] = field(default=(0, ""))


def zones(name: str, *values: str) -> Callable[[FakeGoogle], None]:
    """Sets one of the script's sets of zones."""
    return lambda cloud: setattr(cloud.script, name, set(values))


def stocked_out(cloud: FakeGoogle, *hint: str) -> None:
    cloud.script.stockout, cloud.script.hint = {"us-east5-b"}, hint


def settle(cloud: FakeGoogle) -> None:
    cloud.script.stockout, cloud.script.quota, cloud.script.denied = set(), set(), set()


STEPS: dict[str, Step] = {
    "spot": Step(
        (
            *(*CREATE, *MACHINE, "--provisioning-model=SPOT", "--maintenance-policy=TERMINATE"),
            *("--reservation-affinity=none", "--boot-disk-type=hyperdisk-balanced"),
            *("--labels=rig=a,owner=b", "--metadata-from-file=startup-script=FOLDER/start.sh"),
            *("--metadata=x=y", "--network=default", "--tags=rig", "--no-address", *OWN, "rig-1"),
        )
    ),
    "exists": Step((*CREATE, *MACHINE, "--provisioning-model=STANDARD", *OWN, "rig-1")),
    "on demand": Step(
        (
            *(*CREATE, *MACHINE, "--provisioning-model=STANDARD", "--subnet=s1"),
            *("--network-tier=STANDARD", "--restart-on-failure", *OWN, "rig-2"),
        )
    ),
    "reserved": Step(
        (
            *(*CREATE, *MACHINE, "--provisioning-model=RESERVATION_BOUND"),
            *("--reservation-affinity=specific", "--reservation=r1", *OWN, "rig-3"),
        )
    ),
    "alpha flexible": Step(
        ("alpha", *CREATE, *MACHINE, "--provisioning-model=FLEX_START", *OWN, "rig-4")
    ),
    "too old": Step(
        (
            *(*CREATE, *MACHINE, "--provisioning-model=FLEX_START"),
            *("--request-valid-for-duration=2h", *OWN, "rig-5"),
        )
    ),
    "too old, value": Step((*CREATE, *MACHINE, "--provisioning-model=FLEX_START", *OWN, "r")),
    "describe": Step(("compute", "instances", "describe", ZONE, *OWN, "rig-1")),
    "describe none": Step(("compute", "instances", "describe", ZONE, *OWN, "nope")),
    "list": Step(("compute", "instances", "list", *OWN)),
    "list by page": Step(
        ("compute", "instances", "list", *OWN), lambda cloud: setattr(cloud.script, "page", 2)
    ),
    "list zone": Step(("compute", "instances", "list", "--zones=us-east5-b", *OWN)),
    "list no zone": Step(("compute", "instances", "list", "--zones=us-nowhere1-a", *OWN)),
    "disks": Step(("compute", "disks", "list", *OWN)),
    "unread": Step(("compute", "disks", "list", *OWN), zones("unreachable", "us-west4-a")),
    "operations": Step(("compute", "operations", "list", *OWN)),
    "operations of": Step(
        (
            *("compute", "operations", "list", "--zones=us-east5-b", "--limit=5"),
            *("--sort-by=~insertTime", "--filter=operationType=insert", *OWN),
        ),
        zones("unreachable"),
    ),
    "serial": Step(
        ("compute", "instances", "get-serial-port-output", ZONE, "--port=1", "--start=2", *OWN)
        + ("rig-1",)
    ),
    "labels": Step(("compute", "instances", "add-labels", ZONE, "--labels=x=y", *OWN, "rig-1")),
    "delete none": Step(("compute", "instances", "delete", ZONE, *OWN, "nope")),
    "delete no disk": Step(("compute", "disks", "delete", ZONE, *OWN, "nope")),
    "delete": Step(("compute", "instances", "delete", ZONE, *OWN, "rig-2")),
    "hint": Step(
        (*CREATE, *MACHINE, "--provisioning-model=SPOT", *OWN, "rig-9"),
        lambda cloud: stocked_out(cloud, "us-east5-a", "us-central1-b"),
    ),
    "stockout": Step((*CREATE, *MACHINE, *OWN, "rig-9"), stocked_out),
    "quota": Step(
        (*CREATE, *MACHINE, *OWN, "rig-9"),
        lambda cloud: (settle(cloud), cloud.script.quota.add("us-east5-b")),
    ),
    "denied": Step(
        (*CREATE, *MACHINE, *OWN, "rig-9"),
        lambda cloud: (settle(cloud), cloud.script.denied.add("us-east5-b")),
    ),
    "no zone": Step(
        ("compute", "instances", "create", "--zone=us-nowhere1-a", *MACHINE, *OWN, "rig-9"), settle
    ),
    "no file": Step((*CREATE, "--metadata-from-file=startup-script=/nope", *OWN, "rig-9")),
    "cut": Step(
        ("compute", "instances", "delete", ZONE, *OWN, "rig-3"),
        lambda cloud: (setattr(cloud.script, "lost", 1), setattr(cloud.script, "lost_by", "cut")),
    ),
    "API off": Step(("compute", "instances", "list", *OWN), zones("disabled", "compute")),
    "page": Step(
        ("compute", "instances", "describe", ZONE, *OWN, "rig-1"),
        lambda cloud: (zones("disabled")(cloud), setattr(cloud.script, "html", 1)),
    ),
    "foreign": Step(
        ("compute", "instances", "describe", ZONE, "--project=other-proj", *OWN[1:], "rig-1"),
        lambda cloud: setattr(cloud.script, "html", 0),
    ),
    "machine type": Step(("compute", "machine-types", "describe", ZONE, *OWN, "ct6e-standard-1t")),
    "no machine type": Step(("compute", "machine-types", "describe", ZONE, *OWN, "ct9-none-1t")),
    "machine types": Step(
        ("compute", "machine-types", "list", "--filter=name=ct6e-standard-1t", *OWN)
    ),
    "region": Step(("compute", "regions", "describe", *OWN, "us-east5")),
    "no region": Step(("compute", "regions", "describe", *OWN, "us-nowhere1")),
    "quota info": Step(
        ("beta", "quotas", "info", "describe", "--service=compute.googleapis.com", *OWN)
        + ("TPUS-PER-TPU-FAMILY-per-project-region",)
    ),
    "logins": Step(("auth", "list", *OWN)),
    # Cloud TPU
    "queued spot": Step(
        (*QUEUED, "create", *NODE, "--spot", *OWN, "q1"),
        lambda cloud: setattr(cloud.script, "queue_s", 5),
    ),
    "queued flexible": Step(
        ("alpha", *QUEUED, "create", *NODE, "--provisioning-model=flex-start")
        + ("--max-run-duration=4h", *OWN, "q2")
    ),
    "queued exists": Step((*QUEUED, "create", *NODE, *OWN, "q1")),
    "queued described": Step((*QUEUED, "describe", TPU_ZONE, *OWN, "q1")),
    "queued alpha described": Step(("alpha", *QUEUED, "describe", TPU_ZONE, *OWN, "q2")),
    "queued none": Step((*QUEUED, "describe", TPU_ZONE, *OWN, "nope")),
    "queued list": Step((*QUEUED, "list", TPU_ZONE, *OWN)),
    "queued held": Step(
        (*QUEUED, "delete", TPU_ZONE, "--async", *OWN, "q1"), lambda cloud: cloud.advance(60)
    ),
    "queued forced": Step((*QUEUED, "delete", TPU_ZONE, "--force", *OWN, "q1")),
    "queued forced, not waited for": Step(
        ("alpha", *QUEUED, "delete", TPU_ZONE, "--force", "--async", *OWN, "q2")
    ),
    "queued cut": Step(
        (*QUEUED, "create", *NODE, *OWN, "q4"), lambda cloud: setattr(cloud.script, "lost", 1)
    ),
    "nodes": Step((*NODES, "list", TPU_ZONE, *OWN), lambda cloud: cloud.advance(60)),
    "node": Step((*NODES, "describe", TPU_ZONE, *OWN, "n1")),
    "no node": Step((*NODES, "delete", TPU_ZONE, *OWN, "nope")),
    "all nodes, one zone dropped": Step(
        (*NODES, "list", "--zone=-", *OWN), zones("unreachable", "us-west4-a")
    ),
    "types": Step(
        ("compute", "tpus", "accelerator-types", "list", TPU_ZONE, *OWN), zones("unreachable")
    ),
    "types of no zone": Step(
        ("compute", "tpus", "accelerator-types", "list", "--zone=us-nowhere1-a", *OWN)
    ),
    "nodes of another project": Step((*NODES, "list", TPU_ZONE, "--project=other-proj", *OWN[1:])),
    # ssh
    "ssh, the first time": Step(
        ("compute", "ssh", ZONE, *SSH, "rig-1", "--command=sudo python3 - status e30="),
        given=b"print(1)\n",
    ),
    "ssh": Step(("compute", "ssh", ZONE, *SSH, "rig-1", "--command=x y"), given=b"print(2)\n"),
    "ssh with a format": Step(
        ("compute", "ssh", ZONE, *SSH, "--format=json", "rig-1", "--command=x")
    ),
    "ssh fails": Step(("compute", "ssh", ZONE, *SSH, "rig-1", "--command=x"), ssh=(7, "oops\n")),
    "ssh refused": Step(
        ("compute", "ssh", ZONE, *SSH, "rig-1", "--command=x"),
        ssh=(255, "Connection closed by UNKNOWN port 65535\n"),
    ),
    "ssh to none": Step(("compute", "ssh", ZONE, *SSH, "nope", "--command=x")),
    "tunnel": Step(
        ("compute", "ssh", ZONE, *SSH, "rig-1", "--", "-N", "-L", "127.0.0.1:1:127.0.0.1:8000")
        + ("-oExitOnForwardFailure=yes",)
    ),
    "ssh to a node": Step(
        ("alpha", *NODES, "ssh", TPU_ZONE, "--worker=0", *SSH, "n1", "--command=x y"), given=b"p\n"
    ),
    "ssh to a node fails": Step(
        (*NODES, "ssh", TPU_ZONE, *SSH[1:], "n1", "--command=x"), ssh=(7, "oops\n")
    ),
    "ssh to no node": Step((*NODES, "ssh", TPU_ZONE, *SSH[1:], "nope", "--command=x")),
    # What no gcloud takes
    "no such command": Step(("compute", "instances", "frobnicate", *OWN)),
    "no such group": Step(("nonsense", *OWN)),
    "no command": Step(("compute", *OWN)),
    "no track": Step(("beta", *QUEUED, "list", TPU_ZONE, *OWN)),
    "no such flag": Step(("compute", "instances", "list", "--no-such-flag=x", *OWN)),
    "a flag of alpha": Step((*QUEUED, "create", *NODE, "--provisioning-model=spot", *OWN, "q9")),
    "no name": Step(("compute", "instances", "describe", ZONE, *OWN)),
    "nowhere": Step(("compute", "instances", "describe", *OWN, "rig-1")),
    "no choice": Step((*CREATE, "--provisioning-model=FOO", *OWN, "r")),
    "no policy": Step((*CREATE, "--maintenance-policy=FOO", *OWN, "r")),
    "no size": Step((*CREATE, "--boot-disk-size=lots", *OWN, "r")),
    "no duration": Step((*CREATE, "--max-run-duration=zz", *OWN, "r")),
    "no label": Step((*CREATE, "--labels=A=b", *OWN, "r")),
    "no node id": Step((*QUEUED, "create", TPU_ZONE, "--accelerator-type=a", *OWN, "q9")),
    "no TPU zone": Step((*QUEUED, "list", *OWN)),
    "no project": Step(("compute", "instances", "list", *OWN[1:])),
}


class Bench:
    """A fake Google, ssh's stubs, and a gcloud that takes the steps."""

    def __init__(self, cloud: FakeGoogle, folder: Path, gcloud: str) -> None:
        self.cloud, self.folder, self.gcloud = cloud, folder, gcloud
        self.bin = folder / "bin"
        self.bin.mkdir(exist_ok=True)
        (folder / "start.sh").write_text("#!/bin/sh\necho a, b\n")
        for name, text in (("ssh", SSH_STUB), ("ssh-keygen", KEYGEN_STUB)):
            (self.bin / name).write_text(text.replace("FOLDER", str(folder)))
            (self.bin / name).chmod(0o755)

    def take(self, step: Step) -> dict[str, Any]:
        """What gcloud left: status, outputs, the requests that it sent, what ssh was given."""
        if step.before is not None:
            step.before(self.cloud)
        status, words = step.ssh
        (self.folder / "rc").write_text(str(status))
        (self.folder / "say").write_text(words)
        (self.folder / "ssh.log").write_text("")
        self.cloud.requests.clear()
        surroundings = self.cloud.environment(self.folder, str(self.bin))
        done = subprocess.run(
            [self.gcloud, *(word.replace("FOLDER", str(self.folder)) for word in step.argv)],
            env={**gcloud_environment(surroundings), "USER": "somebody"},
            input=step.given,
            capture_output=True,
            timeout=120,
        )
        told = {
            "status": done.returncode,
            "out": self.plain(done.stdout.decode()),
            "error": self.plain(done.stderr.decode()),
            "sent": [
                self.plain(f"{one.method} {one.path} {json.dumps(one.query, sort_keys=True)} ")
                + self.plain(json.dumps(one.body, sort_keys=True))
                for one in self.cloud.requests
            ],
            "ssh": self.plain((self.folder / "ssh.log").read_text()),
        }
        if done.returncode == 2:  # behind the decisive line, help of many pages
            lines = told["error"].splitlines()
            line = next((one for one in lines if one.startswith("ERROR:")), "").strip()
            # Which flags, a hint or a list of them tells over several lines.
            told["error"] = re.sub(r"(unrecognized arguments):.*", r"\1", line)
        return told

    def plain(self, text: str) -> str:
        """Without what differs from run to run."""
        text = re.sub(
            r"ProxyCommand [^\n]*?((?:alpha )?compute start-iap)", r"ProxyCommand \1", text
        )
        text = re.sub(r"127\.0\.0\.1:\d{4,}", "HOST", text.replace(str(self.folder), "FOLDER"))
        text = re.sub(r"port=\d+", "port=PORT", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "STAMP", text)
        text = re.sub(r"\.+done\.", "...done.", text)  # a dot for each look
        text = re.sub(r"operation-\d{10}-", "operation-NOW-", text)
        text = re.sub(r"'(date|server|content-length)': '[^']*'", r"'\1': ''", text)
        text = re.sub(r"\b(somebody|root)@", "USER@", text)  # gcloud reads who it is in its own way
        return re.sub(r"\b(somebody|root):ssh-rsa AAAA \S+", "USER:ssh-rsa AAAA", text)


class BesideTheRealOneTest(unittest.TestCase):
    """Each step's status, outputs and requests are those of the real gcloud."""

    maxDiff = None

    def test_the_stand_in_does_what_gcloud_528_did(self) -> None:
        recorded = json.loads(RECORD.read_text())
        self.assertEqual(sorted(recorded), sorted(STEPS), "record it anew: see this file's head")
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        cloud = self.enterContext(FakeGoogle(PROJECT))
        fake_gcloud(folder / "bin", old=True)
        bench = Bench(cloud, folder, str(folder / "bin" / "gcloud"))
        for name, step in STEPS.items():
            with self.subTest(name):
                self.assertEqual(bench.take(step), recorded[name])
        self.assertEqual(cloud.escapes, [])

    def test_every_command_of_it_is_beside_the_real_one(self) -> None:
        taken = {
            name
            for name in FakeGcloudProgram.COMMANDS
            for step in STEPS.values()
            if list(step.argv[: len(name.split())]) == name.split()
        }
        # These are the same code under another name, or of the values of another release.
        same = {name for name in FakeGcloudProgram.COMMANDS if name.startswith("alpha ")}
        same |= {"version", "compute disks describe", "compute disks add-labels"}
        same |= {"compute operations describe", "compute tpus tpu-vm ssh"}
        self.assertEqual(set(FakeGcloudProgram.COMMANDS) - taken - same, set())


class InTheRealOnesPlaceTest(test_gcloud.RealGcloudTest):
    """The tests of the boundary to gcloud hold with the stand-in, which knows FLEX_START."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.journal = fake_gcloud(self.folder / "bin")
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        self.surroundings = self.cloud.environment(self.folder, str(self.folder / "bin"))
        astray = {"HF_TOKEN": test_gcloud.CANARY, "CLOUDSDK_CORE_PROJECT": "other-project"}
        self.gcloud = Gcloud(PROJECT, environment={**self.surroundings, **astray})

    async def test_a_gcloud_without_flex_start_is_too_old_and_sends_nothing(self) -> None:
        fake_gcloud(self.folder / "bin", old=True)
        flags: dict[str, Any] = {"request-valid-for-duration": "2h"}
        call = test_gcloud.create("us-east5-b", "rig-1", "FLEX_START", **flags)
        error = await self.refused(call)
        self.assertEqual(error.error_class, "INVALID", error)
        self.assertIn("too old", error.what)
        self.assertEqual(self.cloud.requests, [])

    async def test_a_secret_goes_by_the_input_and_is_in_no_argument_and_no_record(self) -> None:
        """It has no secrets: rigs reach them by a client library."""
        call = GcloudCall(("secrets", "create"), "hf-token")
        self.assertEqual((await self.refused(call)).error_class, "INVALID")
        self.assertEqual(self.cloud.requests, [])

    async def test_a_flex_start_waits_for_as_long_as_it_was_asked_to(self) -> None:
        self.cloud.script.queue_s = 600
        flags: dict[str, Any] = {"request-valid-for-duration": "2h"}
        call = test_gcloud.create("us-east5-b", "rig-1", "FLEX_START", **flags)
        await self.gcloud.change(call)
        (request,) = self.cloud.sent("POST", "/instances")
        wait = request.body["params"]["requestValidForDuration"]
        self.assertEqual(wait, {"seconds": "7200"})
        look = GcloudCall(("compute", "instances", "describe"), "rig-1", {"zone": "us-east5-b"})
        self.assertEqual((await self.gcloud.read(look)).thing()["status"], "PENDING")
        self.cloud.advance(601)
        self.assertEqual((await self.gcloud.read(look)).thing()["status"], "RUNNING")

    async def test_an_expired_login_and_none(self) -> None:
        token = Path(self.surroundings["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"])
        look = GcloudCall(("compute", "instances", "list"))
        token.write_text("expired\n")
        for gone in (False, True):
            if gone:
                token.unlink()
            with self.assertRaises(RigError) as raised:
                await self.gcloud.read(look)
            self.assertEqual(raised.exception.error_class, "AUTH")
        self.assertEqual(self.cloud.requests, [])
        token.write_text("made-up-for-a-test\n")
        self.assertEqual((await self.gcloud.read(look)).things(), [])

    async def test_a_change_waits_for_its_operation_unless_told_not_to(self) -> None:
        self.cloud.script.operation_s = 30
        await self.gcloud.change(test_gcloud.create("us-east5-b", "rig-1", "SPOT"))
        self.cloud.advance(31)
        flags: dict[str, Any] = {"zone": "us-east5-b"}
        delete = GcloudCall(("compute", "instances", "delete"), "rig-1", flags)
        asked = asyncio.ensure_future(self.gcloud.change(delete, 60))
        while not self.cloud.sent("POST", "/wait"):
            await asyncio.sleep(0.02)
        self.assertFalse(asked.done())
        self.cloud.advance(31)
        self.assertEqual((await asked).value, [])
        self.assertEqual(self.cloud.held(), {})

    async def test_it_ends_when_it_is_told_to_while_no_answer_comes(self) -> None:
        self.cloud.script.lost = 1
        asked = asyncio.ensure_future(
            self.refused(test_gcloud.create("us-east5-b", "rig-1", "SPOT"))
        )
        while not self.cloud.held():
            await asyncio.sleep(0.02)
        ((number, *_arguments),) = self.journal_lines()
        os.kill(number, signal.SIGTERM)
        self.assertEqual((await asked).error_class, "UNKNOWN")

    async def test_the_journal_has_each_call_in_order(self) -> None:
        await self.gcloud.version()
        await self.gcloud.read(GcloudCall(("compute", "disks", "list")))
        calls = [words[1:4] for words in self.journal_lines()]
        self.assertEqual([one[0] for one in calls], ["version", "compute"])
        self.assertEqual(calls[1][1:], ["disks", "list"])


class NoEndpointTest(unittest.TestCase):
    def test_it_asks_nobody_when_it_was_told_no_address(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        fake_gcloud(folder)
        (folder / "token").write_text("x")
        environment = {
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder / "token"),
            "HOME": str(folder),
        }
        argv = [str(folder / "gcloud"), "compute", "instances", "list", *OWN]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no endpoint override", done.stderr)


def record() -> None:
    """Takes every step with the gcloud on PATH."""
    real = shutil.which("gcloud")
    assert real is not None, "gcloud is not on PATH"
    with tempfile.TemporaryDirectory() as name, FakeGoogle(PROJECT) as cloud:
        bench = Bench(cloud, Path(name), real)
        taken = {step_name: bench.take(step) for step_name, step in STEPS.items()}
        assert not cloud.escapes, cloud.escapes
    RECORD.write_text(json.dumps(taken, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    else:
        unittest.main()
