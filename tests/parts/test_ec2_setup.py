"""What set-up makes in an AWS account, once and not twice, and what --undo takes back of it.

The account is a fake on loopback, the SDK and the command are real; questions are answered at a
pseudo-terminal.
"""

from __future__ import annotations

import asyncio
import fnmatch
import io
import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
import unittest
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.ec2_setup_command import SET_UP_COMMAND
from forge.parts.assembly.rig import AssembledRig, Rig, RigCommand
from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.planes.ec2 import Ec2
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.ec2_setup import Ec2Setup
from forge.parts.planes.ec2_setup_acts import SetupLook, SetupWish
from forge.parts.planes.ec2_setup_role import SSM_MACHINE_POLICY, rights_of_machine
from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, AwsScript, CallFault
from tests.forge_copy import package_folders

ROOT = Path(__file__).resolve().parents[2]
NAME, SECRET, BUCKET = "gemma4-rig", "hf-token", "a-cache-of-mine"
OURS = {"managed-by": "gemma4-rigs"}
MARK = {"Key": "managed-by", "Value": "gemma4-rigs"}
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY11"
PATIENCE_S = 40.0
SERVER = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from forge.parts.assembly.command_line import run_rig
from tests.parts.test_ec2_setup import SETUP_RIG
sys.exit(run_rig(SETUP_RIG, Path(__file__), sys.argv[1:]))
"""


class RuntimeKeys(Ec2Settings):
    """What a rig's runtime adds."""

    hf_secret: str = ""
    cache_bucket: str = ""


async def _nothing(rig: AssembledRig, agreed: bool) -> int:
    return 0


# A rig of the plane alone: the command needs no toolset and nothing that serves.
SETUP_RIG = Rig(
    name="gpu-vllm-g6-2b",
    about="",
    order="",
    settings=RuntimeKeys,
    plane_words={},
    make_plane=lambda paths, label, journal, load: cast(Any, Ec2(cast(Any, load), dict, ROOT)),
    make_runtime=lambda load, paths: cast(Any, SimpleNamespace(vocabulary={})),
    toolsets=(),
    commands={"set-up": SET_UP_COMMAND, "other": RigCommand("no undo", _nothing)},
)


def wish(**changes: Any) -> SetupWish:
    values: dict[str, Any] = {
        "rig": "gpu-vllm-g6-2b",
        "account": FAKE_AWS_ACCOUNT,
        "profile": NAME,
        "secret": SECRET,
        "bucket": BUCKET,
        "region": "us-west-2",
    }
    return SetupWish(**{**values, **changes})


class SetupCase(unittest.IsolatedAsyncioTestCase):
    cloud: ClassVar[FakeAws]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cloud = cls.enterClassContext(FakeAws())

    def setUp(self) -> None:
        self.cloud.renew()
        self.script = self.cloud.script = AwsScript()
        folder = tempfile.TemporaryDirectory(prefix="set-up-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        self.environment = self.cloud.environment(self.place / "aws")
        self.aws = Aws(FAKE_AWS_ACCOUNT, "", self.environment)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def tearDown(self) -> None:
        self.assertEqual(self.cloud.escapes, [])
        self.assertNotIn(CANARY, repr(self.cloud.requests))

    def setup_of(self, wanted: SetupWish | None = None) -> Ec2Setup:
        setup = Ec2Setup(self.aws, wanted or wish())
        setup.pause_s = 0.01
        return setup

    async def made(self, wanted: SetupWish | None = None) -> SetupLook:
        """Look, do what is missing; what was found."""
        setup = self.setup_of(wanted)
        look = await setup.look()
        await setup.do(look.acts, lambda words: None)
        return look

    async def undone(self, wanted: SetupWish | None = None) -> SetupLook:
        setup = self.setup_of(wanted)
        look = await setup.look_back()
        await setup.do(look.acts, lambda words: None)
        return look

    async def iam(self, operation: str, **named: str) -> dict[str, Any]:
        parameters: dict[str, Any] = {**named}
        return await self.aws.read("iam", "us-east-1", operation, **parameters)

    async def s3(self, operation: str, **named: Any) -> dict[str, Any]:
        return await self.aws.read("s3", "us-west-2", operation, Bucket=BUCKET, **named)

    async def gone(self, operation: str, **named: str) -> None:
        with self.assertRaises(RigError) as caught:
            await self.iam(operation, **named)
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")

    def changes(self) -> list[str]:
        """The requests that changed something, in order."""
        reads = ("Get", "List", "Describe", "GET ", "HEAD ")
        return [one.action for one in self.cloud.requests if not one.action.startswith(reads)]

    def put_object(self, key: str) -> None:
        self.cloud.moto.buckets().put_object(BUCKET, key, b"x")


class MakingTest(SetupCase):
    async def test_a_new_account_gets_all_of_it(self) -> None:
        look = await self.made()
        self.assertEqual(look.there, [])
        role = (await self.iam("get_role", RoleName=NAME))["Role"]
        self.assertIn(MARK, role["Tags"])
        (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
        self.assertEqual(trust["Principal"], {"Service": "ec2.amazonaws.com"})
        self.assertEqual(trust["Action"], "sts:AssumeRole")
        answer = await self.iam("list_attached_role_policies", RoleName=NAME)
        attached = [one["PolicyArn"] for one in answer["AttachedPolicies"]]
        self.assertEqual(attached, [SSM_MACHINE_POLICY])
        profile = await self.iam("get_instance_profile", InstanceProfileName=NAME)
        self.assertIn(MARK, profile["InstanceProfile"]["Tags"])
        self.assertEqual([r["RoleName"] for r in profile["InstanceProfile"]["Roles"]], [NAME])

    async def test_the_machine_may_read_one_secret_and_its_part_of_one_bucket(self) -> None:
        await self.made()
        policies = (await self.iam("list_role_policies", RoleName=NAME))["PolicyNames"]
        self.assertEqual(policies, ["gemma4-rigs-gpu-vllm-g6-2b"])
        policy = await self.iam("get_role_policy", RoleName=NAME, PolicyName=policies[0])
        rights = policy["PolicyDocument"]
        self.assertEqual(rights, rights_of_machine(wish()))
        secret, listing, files = rights["Statement"]
        self.assertEqual(secret["Action"], "secretsmanager:GetSecretValue")
        arn = f"arn:aws:secretsmanager:us-west-2:{FAKE_AWS_ACCOUNT}:secret:"
        for name, may in ((f"{SECRET}-a1B2c3", True), ("other-a1B2c3", False), (SECRET, False)):
            self.assertEqual(fnmatch.fnmatchcase(arn + name, secret["Resource"]), may, name)
        self.assertFalse(fnmatch.fnmatchcase(arn + f"{SECRET}-2-a1B2c3", secret["Resource"]))
        other = arn.replace(FAKE_AWS_ACCOUNT, "999988887777") + f"{SECRET}-a1B2c3"
        self.assertFalse(fnmatch.fnmatchcase(other, secret["Resource"]))
        self.assertEqual(files["Resource"], f"arn:aws:s3:::{BUCKET}/gpu-vllm-g6-2b/*")
        self.assertEqual(listing["Resource"], f"arn:aws:s3:::{BUCKET}")
        self.assertEqual(listing["Condition"], {"StringLike": {"s3:prefix": ["gpu-vllm-g6-2b/*"]}})
        text = json.dumps(rights)
        for word in ('"*"', "s3:*", "Delete", "iam:", "ec2:", "NotAction"):
            self.assertNotIn(word, text)

    async def test_what_a_rig_does_not_name_gives_no_right(self) -> None:
        for changes, actions in (
            ({"bucket": ""}, {"secretsmanager:GetSecretValue"}),
            ({"secret": ""}, {"s3:ListBucket", "s3:GetObject", "s3:PutObject"}),
        ):
            found = set()
            for one in rights_of_machine(wish(**changes))["Statement"]:
                found |= {one["Action"]} if isinstance(one["Action"], str) else {*one["Action"]}
            self.assertEqual(found, actions)
        await self.made(wish(secret="", bucket=""))
        self.assertEqual((await self.iam("list_role_policies", RoleName=NAME))["PolicyNames"], [])

    async def test_the_bucket_is_private_encrypted_marked_and_where_the_machines_are(self) -> None:
        await self.made()
        self.assertIn(MARK, (await self.s3("get_bucket_tagging"))["TagSet"])
        where = (await self.s3("get_bucket_location"))["LocationConstraint"]
        self.assertEqual(where, "us-west-2")
        block = (await self.s3("get_public_access_block"))["PublicAccessBlockConfiguration"]
        self.assertEqual(set(block.values()), {True})
        self.assertEqual(len(block), 4)
        encryption = (await self.s3("get_bucket_encryption"))["ServerSideEncryptionConfiguration"]
        self.assertIn("AES256", json.dumps(encryption))

    async def test_in_the_first_region_of_all_the_bucket_is_made_too(self) -> None:
        await self.made(wish(region="us-east-1"))
        self.assertEqual(self.cloud.held()["buckets"], {"us-east-1": [BUCKET]})

    async def test_a_second_time_nothing_is_changed(self) -> None:
        await self.made()
        before = self.changes()
        look = await self.made()
        self.assertEqual(look.acts, [])
        self.assertEqual(len(look.there), 5)
        self.assertEqual(self.changes(), before)

    async def test_what_is_missing_alone_is_made(self) -> None:
        await self.made()
        await self.aws.change(
            *("iam", "us-east-1", "delete_role_policy", 9.0),
            RoleName=NAME,
            PolicyName="gemma4-rigs-gpu-vllm-g6-2b",
        )
        look = await self.made()
        self.assertEqual(len(look.acts), 1)
        self.assertIn("hf-token", look.acts[0].words)

    async def test_another_secret_or_bucket_in_tpu_env_changes_the_rights(self) -> None:
        await self.made()
        await self.made(wish(secret="hf-other"))
        own = {"RoleName": NAME, "PolicyName": "gemma4-rigs-gpu-vllm-g6-2b"}
        text = json.dumps((await self.iam("get_role_policy", **own))["PolicyDocument"])
        self.assertIn("hf-other", text)
        self.assertNotIn("hf-token", text)
        look = await self.made(wish(secret="", bucket=""))
        self.assertIn("goes", look.acts[0].words)
        await self.gone("get_role_policy", **own)

    async def test_two_rigs_share_a_role_each_with_its_own_rights(self) -> None:
        await self.made()
        look = await self.made(wish(rig="gpu-llamacpp-g5g-2b-q4-0"))
        self.assertEqual(len(look.acts), 1, "role, profile and bucket are there")
        policies = (await self.iam("list_role_policies", RoleName=NAME))["PolicyNames"]
        self.assertEqual(len(policies), 2)

    async def test_no_call_about_a_bucket_can_meet_another_accounts(self) -> None:
        looks = [await self.setup_of().look()]
        await self.made()
        self.put_object("gpu-vllm-g6-2b/a")
        looks.append(await self.setup_of().look_back())
        calls = [call for look in looks for act in look.acts for call in act.calls]
        about = {one.operation: one.parameters for one in calls if one.service == "s3"}
        self.assertEqual(len(about), 6)
        del about["create_bucket"]  # that there is none was read before
        owners = {one.get("ExpectedBucketOwner") for one in about.values()}
        self.assertEqual(owners, {FAKE_AWS_ACCOUNT})

    async def test_a_look_changes_nothing(self) -> None:
        await self.setup_of().look()
        await self.setup_of().look_back()
        self.assertEqual(self.changes(), [])


class ForeignTest(SetupCase):
    """What somebody else made is neither used nor changed."""

    async def refused(self, words: str) -> None:
        with self.assertRaises(RigError) as caught:
            await self.setup_of().look()
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertIn(words, caught.exception.what)
        self.assertEqual(self.changes(), [])

    async def test_a_role_without_the_mark(self) -> None:
        self.cloud.put_profile(NAME)
        await self.refused(f"the role {NAME} is somebody else's")
        self.cloud.renew()
        self.cloud.put_profile(NAME, {"managed-by": "terraform"})
        await self.refused("somebody else's")

    async def test_a_role_that_others_may_take_on(self) -> None:
        self.cloud.put_profile(NAME, OURS)
        role = self.cloud.moto.iam().get_role(NAME)
        trust = json.loads(role.assume_role_policy_document)
        trust["Statement"].append(
            {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}
        )
        role.assume_role_policy_document = json.dumps(trust)
        await self.refused("others than EC2's machines may take it on")

    async def test_a_profile_with_another_role(self) -> None:
        iam = self.cloud.moto.iam()
        self.cloud.put_profile(NAME, OURS)
        self.cloud.put_profile("admins")
        iam.remove_role_from_instance_profile(NAME, NAME)
        iam.add_role_to_instance_profile(NAME, "admins")
        await self.refused("it has the role admins")

    async def test_a_bucket_of_ones_own_is_used_as_it_is(self) -> None:
        self.cloud.moto.buckets().create_bucket(BUCKET, "us-west-2")
        look = await self.made()
        self.assertIn(f"bucket {BUCKET}, which is not marked", look.there[0])
        with self.assertRaises(RigError):
            await self.s3("get_bucket_tagging")
        self.assertEqual([one for one in self.changes() if one.startswith("PUT")], [])

    async def test_a_bucket_of_another_account_is_told(self) -> None:
        self.script.faults = [CallFault(f"GET /{BUCKET}", "AccessDenied")]
        with self.assertRaises(RigError) as caught:
            await self.setup_of().look()
        self.assertEqual(caught.exception.error_class, "DENIED")

    async def test_credentials_of_another_account_change_nothing(self) -> None:
        self.script.account = "999988887777"
        for look in (self.setup_of().look, self.setup_of().look_back):
            with self.assertRaises(RigError) as caught:
                await look()
            self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertEqual({one.action for one in self.cloud.requests}, {"GetCallerIdentity"})


class FaultTest(SetupCase):
    async def test_a_role_that_is_not_known_everywhere_yet_is_waited_for(self) -> None:
        self.script.faults = [
            CallFault("AttachRolePolicy", "NoSuchEntity", times=3),
            CallFault("AddRoleToInstanceProfile", "NoSuchEntity", times=2),
        ]
        await self.made()
        self.assertEqual((await self.setup_of().look()).acts, [])
        self.assertEqual(self.changes().count("AttachRolePolicy"), 4)

    async def test_one_that_never_comes_ends_with_aws_words(self) -> None:
        self.script.faults = [CallFault("AttachRolePolicy", "NoSuchEntity")]
        with self.assertRaises(RigError) as caught:
            await self.made()
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertIn("NoSuchEntity", caught.exception.what)

    async def test_a_failure_half_way_is_mended_by_another_time(self) -> None:
        steps = ("CreateRole", "PutRolePolicy", "CreateInstanceProfile", f"PUT /{BUCKET}")
        for action in steps:
            self.cloud.renew()
            after = not action.startswith("PUT")
            self.cloud.script = AwsScript(
                faults=[CallFault(action, "InternalError", times=1, after=after)]
            )
            with self.subTest(action):
                with self.assertRaises(RigError):
                    await self.made()
                await self.made()
                look = await self.setup_of().look()
                self.assertEqual(look.acts, [])
                self.assertEqual(len(look.there), 5)

    async def test_without_the_permission_it_says_which_and_stops(self) -> None:
        self.script.faults = [CallFault("CreateRole", "AccessDenied")]
        with self.assertRaises(RigError) as caught:
            await self.made()
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertIn("CreateRole", caught.exception.what)
        self.assertEqual(self.changes(), ["CreateRole"])


class UndoingTest(SetupCase):
    async def test_nothing_of_it_is_left(self) -> None:
        await self.made()
        self.put_object("gpu-vllm-g6-2b/a/b")
        self.cloud.put_secret("us-west-2", SECRET, CANARY, OURS)
        look = await self.undone()
        self.assertEqual(look.there, [])
        await self.gone("get_role", RoleName=NAME)
        await self.gone("get_instance_profile", InstanceProfileName=NAME)
        self.assertNotIn("buckets", self.cloud.held())
        said = " / ".join(act.words for act in look.acts)
        for words in ("with its 1 files, for good", "brought back for 7 days", NAME):
            self.assertIn(words, said)
        (deleted,) = self.cloud.sent("DeleteSecret")
        self.assertEqual(deleted.parameters["RecoveryWindowInDays"], 7)
        self.assertNotIn("ForceDeleteWithoutRecovery", deleted.parameters)

    async def test_a_second_time_there_is_nothing_to_do(self) -> None:
        await self.made()
        self.cloud.put_secret("us-west-2", SECRET, CANARY, OURS)
        await self.undone()
        self.assertEqual((await self.undone()).acts, [])

    async def test_another_rigs_part_keeps_role_and_profile(self) -> None:
        other = wish(rig="gpu-llamacpp-g5g-2b-q4-0")
        await self.made()
        await self.made(other)
        look = await self.undone()
        self.assertIn("gpu-llamacpp-g5g-2b-q4-0 in it is not this rig's", " ".join(look.there))
        policies = (await self.iam("list_role_policies", RoleName=NAME))["PolicyNames"]
        self.assertEqual(policies, ["gemma4-rigs-gpu-llamacpp-g5g-2b-q4-0"])
        await self.iam("get_instance_profile", InstanceProfileName=NAME)
        await self.undone(other)
        await self.gone("get_role", RoleName=NAME)

    async def test_other_files_keep_the_bucket_and_themselves(self) -> None:
        await self.made()
        keys = ("gpu-vllm-g6-2b/a", "gpu-vllm-g6-2b-q4_0/b", "gpu-llamacpp-g5g-2b-q4-0/c", "d")
        for key in keys:
            self.put_object(key)
        look = await self.undone()
        left = [one["Key"] for one in (await self.s3("list_objects_v2"))["Contents"]]
        self.assertEqual(sorted(left), sorted(keys[1:]))
        self.assertIn("3 files in it are not this rig's", " ".join(look.there))

    async def test_more_files_than_one_call_takes_go_all(self) -> None:
        await self.made()
        for number in range(1003):
            self.put_object(f"gpu-vllm-g6-2b/{number}")
        look = await self.undone()
        self.assertIn("1003 files", " ".join(act.words for act in look.acts))
        self.assertNotIn("buckets", self.cloud.held())

    async def test_what_lacks_the_mark_stays(self) -> None:
        self.cloud.put_profile(NAME)
        self.cloud.moto.buckets().create_bucket(BUCKET, "us-west-2")
        self.cloud.put_secret("us-west-2", SECRET, CANARY)
        look = await self.undone()
        self.assertEqual(look.acts, [])
        self.assertEqual(self.changes(), [])
        said = " ".join(look.there)
        for what in (f"the role {NAME}", f"bucket {BUCKET}", f"secret {SECRET} in us-west-2"):
            self.assertIn(what, said)
        self.assertEqual(self.cloud.secret("us-west-2", SECRET), CANARY)

    async def test_what_went_meanwhile_is_gone_and_no_failure(self) -> None:
        await self.made()
        setup = self.setup_of()
        look = await setup.look_back()
        await setup.do(look.acts, lambda words: None)
        await setup.do(look.acts, lambda words: None)

    async def test_what_somebody_attached_to_it_does_not_hold_it(self) -> None:
        await self.made()
        document = json.dumps(rights_of_machine(wish()))
        change: dict[str, Any] = {"PolicyName": "more", "PolicyDocument": document}
        answer = await self.aws.change("iam", "us-east-1", "create_policy", 9.0, **change)
        change = {"RoleName": NAME, "PolicyArn": answer["Policy"]["Arn"]}
        await self.aws.change("iam", "us-east-1", "attach_role_policy", 9.0, **change)
        await self.undone()
        await self.gone("get_role", RoleName=NAME)


class CommandTest(SetupCase):
    """The command as a process, at a terminal and without one."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = self.place / "rig"
        self.folder.mkdir()
        (self.folder / "server.py").write_text(SERVER.format(root=str(ROOT)))
        self.write()

    def write(self, **values: str) -> None:
        known = {
            "AWS_ACCOUNT": FAKE_AWS_ACCOUNT,
            "BUDGET_USD": "3",
            "ZONES": "us-west-2a,us-east-1a",
            "HF_SECRET": SECRET,
            "CACHE_BUCKET": BUCKET,
            **values,
        }
        text = "".join(f"{key}={value}\n" for key, value in known.items())
        (self.folder / "tpu.env").write_text(text)

    def surroundings(self) -> dict[str, str]:
        folders = {f"XDG_{kind}_HOME": str(self.place / kind) for kind in ("STATE", "CACHE")}
        home = {"PATH": os.environ["PATH"], "HOME": str(self.place)}
        home["PYTHONPATH"] = os.pathsep.join(package_folders())
        return {**home, **folders, **self.environment}

    def run_it(self, *words: str) -> tuple[int, str]:
        """The command without a terminal; status, and all that it said."""
        said = io.StringIO()
        with (
            open(os.devnull) as nobody,
            mock.patch.dict(os.environ, self.surroundings(), clear=True),
            mock.patch.object(sys, "stdin", nobody),
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            status = run_rig(SETUP_RIG, self.folder / "server.py", ["set-up", *words])
        return status, said.getvalue()

    def at_terminal(self, answer: str, *words: str) -> tuple[int, str, list[str]]:
        """Answer its question; status, all that it said, and the changes before the answer."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, str(self.folder / "server.py"), "set-up", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self.surroundings(),
            start_new_session=True,
        )
        os.close(theirs)
        said, before, deadline = "", [], time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < deadline:
                if not select.select([ours], [], [], 0.2)[0]:
                    if process.poll() is not None:
                        break
                    continue
                with suppress(OSError):  # Linux's way of saying that nobody holds the other end
                    data = os.read(ours, 65536)
                    said += data.decode(errors="replace")
                    if "[y/N] " in said and answer:
                        before = self.changes()
                        os.write(ours, answer.encode())
                        answer = ""
                    continue
                break
            return process.wait(PATIENCE_S), said, before
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    def test_it_shows_asks_and_makes(self) -> None:
        status, said, before = self.at_terminal("y\n")
        self.assertEqual(status, 0, said)
        self.assertEqual(before, [], "something was changed before it was agreed to")
        shown, _, done = said.partition("[y/N]")
        for words in (FAKE_AWS_ACCOUNT, f"role {NAME}", SECRET, f"bucket {BUCKET} in us-west-2"):
            self.assertIn(words, shown)
        self.assertEqual(done.count("done "), 5, done)
        self.assertIn(f"INSTANCE_PROFILE={NAME} is ready", done)

    def test_whatever_is_no_yes_changes_nothing(self) -> None:
        for answer in ("yesterday\n", "\x04"):
            status, said, _ = self.at_terminal(answer)
            self.assertEqual(status, 1, said)
            self.assertIn("Nothing was changed.", said)
            self.assertNotIn("Traceback", said)
        self.assertEqual(self.changes(), [])

    def test_without_a_terminal_it_needs_yes(self) -> None:
        status, said = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn("DENIED nothing was done: there is no terminal", said)
        self.assertEqual(self.changes(), [])
        status, said = self.run_it("--yes")
        self.assertEqual(status, 0, said)
        status, said = self.run_it()
        self.assertEqual(status, 0, "there is nothing to ask about")
        self.assertIn("Nothing is to be done.", said)

    def test_undo_takes_it_back(self) -> None:
        self.run_it("--yes")
        status, said, before = self.at_terminal("y\n", "--undo")
        self.assertEqual(status, 0, said)
        self.assertFalse([one for one in before if one.startswith("Delete")])
        self.assertIn("remove", said)
        self.assertEqual(self.cloud.held(), {})
        status, said = self.run_it("--undo", "--yes")
        self.assertEqual(status, 0)
        self.assertIn("Nothing is to be done.", said)

    def test_undo_waits_until_nothing_is_rented(self) -> None:
        self.run_it("--yes")
        before = self.changes()
        marks = {**OURS, "rig": "gpu-vllm-g6-2b", "owner": "somebody"}
        machine = self.cloud.put_machine("eu-central-1a", "gpu-vllm-g6-2b-abc123", tags=marks)
        status, said = self.run_it("--undo", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("DENIED the rigs still rent gpu-vllm-g6-2b-abc123", said)
        self.assertEqual(self.changes(), before)
        self.cloud.take_away(machine)
        status, said = self.run_it("--undo", "--yes")
        self.assertEqual(status, 0, said)

    def test_undo_does_nothing_where_it_cannot_see(self) -> None:
        self.run_it("--yes")
        before = self.changes()
        self.script.faults = [
            CallFault("DescribeInstances", "UnauthorizedOperation", region="eu-west-1")
        ]
        status, said = self.run_it("--undo", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("UNKNOWN whether anything is rented could not be read", said)
        self.assertEqual(self.changes(), before)

    def test_read_only_is_kept(self) -> None:
        self.write(RIG_READ_ONLY="1")
        for words in (("--yes",), ("--undo", "--yes")):
            status, said = self.run_it(*words)
            self.assertEqual(status, 1)
            self.assertIn("DENIED RIG_READ_ONLY", said)
        self.assertEqual(self.cloud.requests, [])

    def test_without_an_account_it_says_so(self) -> None:
        self.write(AWS_ACCOUNT="")
        status, said = self.run_it("--yes")
        self.assertEqual(status, 1)
        self.assertIn("AWS_ACCOUNT", said)

    def test_another_command_has_no_undo(self) -> None:
        said = io.StringIO()
        with redirect_stderr(said), self.assertRaises(SystemExit) as ended:
            run_rig(SETUP_RIG, self.folder / "server.py", ["other", "--undo"])
        self.assertEqual(ended.exception.code, 2)
        self.assertIn("unrecognized arguments: --undo", said.getvalue())
        self.assertEqual(run_rig(SETUP_RIG, self.folder / "server.py", ["other"]), 0)


if __name__ == "__main__":
    unittest.main()
