"""A rig on EC2 as a command: preflight over every gap, set-up and its way back, to take-down."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

from forge.suites.command_line import CommandCase, CommandLineSuite
from forge.suites.ec2_case import EC2_PROFILE, Ec2Case
from forge.suites.fake_aws_host import PLUGIN_RELEASE
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT, CallFault

HOME_REGION = "us-east-2"  # of the first of the rig's ZONES


class Ec2CommandLineSuite(Ec2Case, CommandLineSuite):
    """The same checks as a client's calls; nothing is taken down without a word."""

    def test_from_preflight_to_stop(self) -> None:
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self.assertNotIn("MISSING", out)
        self.assertIn(FAKE_AWS_ACCOUNT, out)
        made = self.program("call", "create_gpu_instance", f"zone={self.zone}", "--json")
        self.assertEqual(made.returncode, 0, made.stderr)
        machine = json.loads(made.stdout)["machine"]
        self.assertEqual([machine["name"]], self.rented()["instances"])
        status, out, err = self.command("call", "wait_for_vllm_ready", "wait_s=50", "--json")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["state"], "ready")
        self.assertIn("… ", err, "no progress was told")
        status, _, err = self.command(
            "call", "query_gemma4", "prompt=what=is\nthis?", "max_tokens=1"
        )
        self.assertEqual(status, 0, err)
        body = self.engine.requests()[-1]["body"]
        self.assertEqual(body["messages"][-1]["content"], "what=is\nthis?")
        self._taken_down(machine["name"])

    def _taken_down(self, name: str) -> None:
        """Without a terminal it asks nobody and destroys nothing; agreed to, it destroys all."""
        asked = self.program("take-down")
        self.assertEqual(asked.returncode, 1, asked.stdout)
        self.assertTrue(asked.stderr.startswith("DENIED "), asked.stderr)
        self.assertIn(name, asked.stdout)
        self.assertEqual(self.rented()["instances"], [name])
        status, out, err = self.command("take-down", "--yes")
        self.assertEqual((status, err), (0, ""))
        self.assertIn(f"Destroyed: machine {name}", out)
        self.assertEqual(self.rented(), {})
        self.assertEqual(self.command("take-down", "--yes")[0], 0, "nothing to do is no failure")

    def test_take_down_says_which_region_it_could_not_read(self) -> None:
        fault = CallFault(action="DescribeInstances", region="us-west-2", code="InternalError")
        self.cloud.script.faults = [fault]
        status, out, _ = self.command("take-down", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("NOT READ", out)
        self.assertIn("us-west-2", out)

    def test_what_is_refused_is_refused_here_too(self) -> None:
        for words, error_class in (
            (("call", "create_gpu_instance", "zone=; touch P #"), "INVALID zone"),
            (("call", "create_gpu_instance", "zone=europe-west4-a"), "NOT_FOUND"),
            (("call", "create_gpu_instance"), "INVALID zone"),
            (("call", "create_gpu_instance", f"zone={self.zone}", "market=none"), "INVALID market"),
            (
                ("call", "create_gpu_instance", f"zone={self.zone}", "market=flex-start"),
                "NOT_FOUND",
            ),
            (("call", "find_gpu", 'zones=["--help"]'), "INVALID zones"),
            (("call", "find_gpu", "hours=1000"), "INVALID hours"),
            (("call", "get_vllm_docker_logs", "lines=many"), "INVALID lines"),
            (("call", "manage_vllm_docker", "action=explode"), "INVALID action"),
            (("call", "query_gemma4", "prompt"), "INVALID"),
            (("call", "destroy_everything"), "NOT_FOUND"),
            (("job", "../../etc/passwd"), "INVALID"),
            (("job", "serve-20260101-000000-abcdef"), "NOT_FOUND"),
        ):
            with self.subTest(words):
                status, out, err = self.command(*words)
                self.assertEqual((status, out), (1, ""), err)
                self.assertTrue(err.startswith(error_class), err)
                self.assertNotIn("Traceback", err)
        self.assertEqual((self.processes(), self.rented()), ([], {}))

    def test_read_only_holds_for_commands(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            for words in (("call", "find_gpu"), ("set-up", "--yes"), ("set-up", "--undo", "--yes")):
                status, _, err = self.command(*words)
                self.assertEqual(status, 1)
                self.assertTrue(err.startswith("DENIED "), err)
        self.assertEqual(self.provider().changes(), 0)

    # What is missing

    def missing(self, **changes: str | None) -> str:
        """What preflight says with these variables changed (None: taken away); it must fail."""
        with mock.patch.dict(os.environ):
            for name, value in changes.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            # Credentials that were proven once are not proven anew while nothing of AWS changes.
            os.environ["AWS_SDK_UA_APP_ID"] = self.id()[-40:].replace(".", "-")
            status, out, err = self.command("preflight")
        self.assertEqual((status, err), (1, ""), out)
        lines = out.splitlines()
        found = [at for at, line in enumerate(lines) if line.startswith("MISSING")]
        for at in found:
            self.assertRegex(lines[at + 1], r"^ +get it: \S")
        return "\n".join(f"{lines[at]} {lines[at + 1].strip()}" for at in found)

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        self.assertIn("MISSING settings", self.missing(PORT="80"))
        try:
            self.write_settings(**{**self.good_settings(), "AWS_ACCOUNT": ""})
            lines = self.missing()
        finally:
            self.write_settings(**self.good_settings())
        self.assertEqual(len(lines.splitlines()), 1, lines)
        self.assertIn("AWS_ACCOUNT", lines)

    def test_preflight_tells_no_credentials_from_another_accounts(self) -> None:
        none = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
        lines = self.missing(**none)
        self.assertIn(f"MISSING AWS credentials, of account {FAKE_AWS_ACCOUNT}", lines)
        self.assertNotIn("MISSING session-manager-plugin", lines)
        lines = self.missing(AWS_PROFILE="not-there")
        self.assertIn("MISSING AWS credentials", lines)
        self.assertIn("not-there", lines)
        self.cloud.script.account = "999988887777"
        lines = self.missing()
        self.assertIn("999988887777", lines)
        self.assertIn("AWS_PROFILE", lines)
        self.cloud.script.account, self.cloud.script.credentials = "", "expired"
        self.assertIn("MISSING AWS credentials", self.missing())

    def test_preflight_tells_no_plugin_from_one_that_shows_tokens(self) -> None:
        empty = self.place / "no programs"
        empty.mkdir(exist_ok=True)
        lines = self.missing(PATH=str(empty))
        self.assertIn("MISSING session-manager-plugin", lines)
        self.assertIn("dpkg", lines)
        self.assertIn("brew", lines)
        self.assertNotIn("MISSING AWS credentials", lines)
        self.hosts.write_plugin("1.2.497.0")
        try:
            lines = self.missing()
        finally:
            self.hosts.write_plugin(PLUGIN_RELEASE)
        self.assertIn("MISSING session-manager-plugin", lines)
        self.assertIn("1.2.497.0", lines)

    def test_preflight_misses_an_instance_profile_and_names_set_up(self) -> None:
        lines = self.missing(INSTANCE_PROFILE="not-made-yet")
        self.assertEqual(len(lines.splitlines()), 1, lines)
        self.assertIn("MISSING instance profile not-made-yet", lines)
        self.assertIn("set-up", lines)

    # The token

    def test_the_token_goes_from_its_file_to_the_account(self) -> None:
        """`make token` is this tool; the file must be its owner's alone."""
        mine = "hf_" + "M" * 34
        path = self.place / "token of mine"
        path.write_text(mine + "\n")
        path.chmod(0o644)
        before = self.cloud.secret(HOME_REGION, "hf-token")
        with mock.patch.dict("os.environ", HF_TOKEN_FILE=str(path)):
            status, _, err = self.command("call", "save_hf_token")
            self.assertEqual(status, 1)
            self.assertTrue(err.startswith("DENIED "), err)
            self.assertEqual(self.cloud.secret(HOME_REGION, "hf-token"), before)
            path.chmod(0o600)
            status, out, err = self.command("call", "save_hf_token")
        self.assertEqual((status, err), (0, ""))
        self.assertNotIn(mine, out)
        self.assertEqual(self.cloud.secret(HOME_REGION, "hf-token"), mine)

    def test_somebody_elses_secret_of_that_name_gets_no_token(self) -> None:
        self.cloud.put_secret(HOME_REGION, "payroll", "theirs")
        with mock.patch.dict("os.environ", HF_TOKEN="hf_" + "N" * 34, HF_SECRET="payroll"):
            status, out, err = self.command("call", "save_hf_token")
        self.assertEqual((status, out), (1, ""))
        self.assertTrue(err.startswith("DENIED "), err)
        self.assertEqual(self.cloud.secret(HOME_REGION, "payroll"), "theirs")


class Ec2SetUpSuite(Ec2Case, CommandCase):
    """`set-up` makes what the account lacks and `--undo` takes it back, each shown first."""

    profile, bucket = "gemma4-made-here", "gemma4-cache-made-here"

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        own = {"INSTANCE_PROFILE": cls.profile, "CACHE_BUCKET": cls.bucket}
        return {**super().good_settings(), **own}

    def made(self) -> dict[str, Any]:
        """What the account has of it: role and profile of that name, and the bucket."""
        with self.cloud.lock:
            iam = self.cloud.moto.iam()
            roles = [one.name for one in iam.roles.values()]
            profiles = [one.name for one in iam.instance_profiles.values()]
        buckets = [one for held in self.cloud.held().get("buckets", {}).values() for one in held]
        found = {"roles": roles, "profiles": profiles, "buckets": buckets}
        return {
            kind: sorted(set(names) - {EC2_PROFILE})
            for kind, names in found.items()
            if set(names) - {EC2_PROFILE}
        }

    def test_it_is_shown_made_found_again_and_taken_back(self) -> None:
        asked = self.program("set-up")
        self.assertEqual(asked.returncode, 1, asked.stdout)
        self.assertTrue(asked.stderr.startswith("DENIED "), asked.stderr)
        for words in (f"role {self.profile}", f"bucket {self.bucket}", "hf-token"):
            self.assertIn(words, asked.stdout)
        self.assertEqual((self.made(), self.provider().changes()), ({}, 0))
        status, out, err = self.command("set-up", "--yes")
        self.assertEqual((status, err), (0, ""))
        self.assertIn(f"INSTANCE_PROFILE={self.profile} is ready", out)
        whole = {"roles": [self.profile], "profiles": [self.profile], "buckets": [self.bucket]}
        self.assertEqual(self.made(), whole)
        changes = self.provider().changes()
        status, out, _ = self.command("set-up", "--yes")
        self.assertEqual((status, self.provider().changes()), (0, changes))
        self.assertIn("Nothing is to be done.", out)
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self._taken_back()

    def _taken_back(self) -> None:
        """Only when it is agreed to, and what was there before stays."""
        asked = self.program("set-up", "--undo")
        self.assertEqual(asked.returncode, 1, asked.stdout)
        self.assertTrue(asked.stderr.startswith("DENIED "), asked.stderr)
        self.assertEqual(self.made()["roles"], [self.profile])
        status, out, err = self.command("set-up", "--undo", "--yes")
        self.assertEqual((status, err), (0, ""))
        self.assertIn(f"bucket {self.bucket}", out)
        self.assertEqual(self.made(), {})
        with self.cloud.lock:
            self.assertIn(EC2_PROFILE, [one.name for one in self.cloud.moto.iam().roles.values()])
        self.assertEqual(self.command("set-up", "--undo", "--yes")[0], 0)

    def test_nothing_is_taken_back_while_something_is_rented(self) -> None:
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        self.assertEqual(self.command("set-up", "--yes")[0], 0)
        made = self.program("call", "create_gpu_instance", f"zone={self.zone}", "--json")
        self.assertEqual(made.returncode, 0, made.stderr)
        name = json.loads(made.stdout)["machine"]["name"]
        status, _, err = self.command("set-up", "--undo", "--yes")
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("DENIED "), err)
        self.assertIn(name, err)
        self.assertEqual(self.made()["roles"], [self.profile])
        sent = [one.parameters for one in self.cloud.sent("RunInstances")]
        self.assertEqual([one["IamInstanceProfile.Name"] for one in sent], [self.profile])

    def test_a_role_of_that_name_that_is_somebody_elses_is_left_alone(self) -> None:
        with mock.patch.dict("os.environ", INSTANCE_PROFILE=EC2_PROFILE):
            status, _, err = self.command("set-up", "--yes")
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("DENIED "), err)
        self.assertIn("managed-by", err)
        self.assertEqual(self.provider().changes(), 0)
