"""A rented rig's server.py as a command: preflight over every gap, from create to take-down."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from unittest import mock

from forge.suites.command_line import CommandLineSuite
from forge.suites.google_case import GoogleCase


class RentedCommandLineSuite(GoogleCase, CommandLineSuite):
    """The same checks as a client's calls; nothing is taken down without a word."""

    def test_from_preflight_to_stop(self) -> None:
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self.assertNotIn("MISSING", out)
        made = self.program("call", "create_tpu_vm_instance", f"zone={self.zone}", "--json")
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

    def test_take_down_says_which_place_it_could_not_read(self) -> None:
        self.google.script.unreachable = {self.zone}
        status, out, _ = self.command("take-down", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("NOT READ", out)
        self.assertIn(self.zone, out)

    def test_what_is_refused_is_refused_here_too(self) -> None:
        for words, error_class in (
            (("call", "create_tpu_vm_instance", "zone=; touch P #"), "INVALID zone"),
            (("call", "create_tpu_vm_instance"), "INVALID zone"),
            (("call", "find_tpu_vm", 'zones=["--help"]'), "INVALID zones"),
            (("call", "find_tpu_vm", "hours=1000"), "INVALID hours"),
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
            status, _, err = self.command("call", "find_tpu_vm")
            self.assertEqual(status, 1)
            self.assertTrue(err.startswith("DENIED "), err)
        self.assertEqual(self.google.sent("POST", "/instances"), [])

    def _missing(self, **changes: str | None) -> str:
        """What preflight says with these variables changed (None: taken away); it must fail."""
        with mock.patch.dict(os.environ):
            for name, value in changes.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            status, out, err = self.command("preflight")
        self.assertEqual(status, 1, out + err)
        lines = [line for line in out.splitlines() if line.startswith("MISSING")]
        self.assertIn("get it:", out)
        return "\n".join(lines)

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        self.assertIn("MISSING settings", self._missing(PORT="80"))
        try:
            self.write_settings(**{**self.good_settings(), "PROJECT": ""})
            lines = self._missing()
        finally:
            self.write_settings(**self.good_settings())
        self.assertIn("MISSING settings", lines)
        self.assertIn("PROJECT", lines)

    def test_preflight_tells_no_gcloud_from_no_login_from_no_credentials(self) -> None:
        only_ssh = self.place / "only ssh"
        only_ssh.mkdir(exist_ok=True)
        (only_ssh / "ssh").symlink_to(self.hosts.bin / "ssh")
        cases: tuple[tuple[str, dict[str, str | None], tuple[str, ...], tuple[str, ...]], ...] = (
            (
                "no gcloud",
                {"PATH": str(only_ssh)},
                ("MISSING gcloud:",),
                ("MISSING ssh", "MISSING application-default"),
            ),
            (
                "no gcloud auth login",
                {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": None},
                ("MISSING gcloud's login",),
                ("MISSING gcloud:", "MISSING application-default", "MISSING ssh"),
            ),
            (
                "no application-default credentials",
                {"GEMMA4_GOOGLE_ENDPOINT": None},
                ("MISSING application-default credentials",),
                ("MISSING gcloud", "MISSING ssh"),
            ),
        )
        for name, changes, there, absent in cases:
            with self.subTest(name):
                lines = self._missing(**changes)
                for words in there:
                    self.assertIn(words, lines)
                for words in absent:
                    self.assertNotIn(words, lines)

    def test_preflight_knows_a_login_that_is_over(self) -> None:
        token = Path(os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"])
        good = token.read_text()
        token.write_text("expired\n")
        try:
            lines = self._missing()
        finally:
            token.write_text(good)
        self.assertIn("MISSING gcloud's login", lines)

    def test_the_token_goes_from_its_file_to_the_project(self) -> None:
        """`make token` is this tool; the file must be its owner's alone."""
        mine = "hf_" + "M" * 34
        path = self.place / "token of mine"
        path.write_text(mine + "\n")
        path.chmod(0o644)
        with mock.patch.dict("os.environ", HF_TOKEN_FILE=str(path)):
            status, _, err = self.command("call", "save_hf_token")
            self.assertEqual(status, 1)
            self.assertTrue(err.startswith("DENIED "), err)
            path.chmod(0o600)
            status, out, err = self.command("call", "save_hf_token")
        self.assertEqual((status, err), (0, ""))
        self.assertNotIn(mine, out)
        kept = [base64.b64decode(one).decode() for one in self._secret()]
        self.assertEqual(kept[-1], mine)

    def _secret(self) -> list[str]:
        return self.google.secrets.payloads["hf-token"]
