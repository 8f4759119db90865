"""init.sh, run for real by bash against a gcloud that keeps a project in a file.

The stand-in knows just the commands that the script may use and refuses every other word, as the
real parser does; each of them was seen to be taken by gcloud 528 (2026-11-30).
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "forge" / "programs" / "init.sh"
PROJECT = "fake-proj"
EMAIL = f"gemma4-rig@{PROJECT}.iam.gserviceaccount.com"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY11"
LOG_ROLE, SECRET_ROLE = "roles/logging.logWriter", "roles/secretmanager.secretAccessor"

STAND_IN = r"""#!{python} -SE
import json, os, sys
place = {state!r}
world = json.load(open(place))
given = sys.argv[1:]
flags = dict((w[2:].partition("=")[::2]) for w in given if w.startswith("--"))
words = [w for w in given if not w.startswith("--")]
with open(place + ".argv", "a") as file:
    file.write(json.dumps([given, sorted(os.environ)]) + "\n")
command = " ".join(words)

def end(text="", status=0):
    json.dump(world, open(place, "w"))
    (sys.stderr if status else sys.stdout).write(text + "\n" if text else "")
    sys.exit(status)

def need(wanted):
    if set(flags) != set(wanted.split()):
        end("unrecognized arguments: %s" % " ".join(sorted(set(flags) ^ set(wanted.split()))), 2)

def missing(what):
    end("ERROR: (gcloud) NOT_FOUND: %s was not found" % what, 1)

if command in world["broken"]:
    end("ERROR: (gcloud) PERMISSION_DENIED: the caller does not have permission", 1)
if command == "auth list":
    need("filter format"); end(world["login"])
if command == "auth application-default print-access-token":
    need("quiet"); end("ya29.made-up" if world["adc"] else "no", 0 if world["adc"] else 1)
if flags.get("project") != {project!r}:
    end("ERROR: (gcloud) wrong project", 1)
def uses(api):
    if api not in world["apis"]:
        end("ERROR: (gcloud) SERVICE_DISABLED: %s" % api, 1)
ours = "project quiet"
if command == "projects describe {project}":
    need(ours + " format"); end("123")
if command == "services list":
    need(ours + " enabled format"); end("\n".join(world["apis"]))
if words[:2] == ["services", "enable"]:
    need(ours); world["apis"] = sorted({{*world["apis"], *words[2:]}}); end()
if words[:3] == ["iam", "service-accounts", "describe"]:
    need(ours + " format")
    name = words[3].partition("@")[0]
    end(world["accounts"][name]) if name in world["accounts"] else missing(words[3])
if words[:3] == ["iam", "service-accounts", "create"]:
    uses("iam.googleapis.com"); need(ours + " display-name description")
    world["accounts"][words[3]] = flags["description"]; end("", 0)
if words[:3] == ["iam", "service-accounts", "delete"]:
    need(ours); del world["accounts"][words[3].partition("@")[0]]; end()
if words[-2:-1] == ["get-iam-policy"]:
    need(ours + " flatten format filter")
    where = "project" if words[0] == "projects" else words[-1]
    member = flags["filter"].partition("members:")[2]
    end("\n".join(r for w, m, r in world["grants"] if (w, m) == (where, member)))
if words[-2:-1] in (["add-iam-policy-binding"], ["remove-iam-policy-binding"]):
    about = " condition" if words[0] == "projects" else ""
    need(ours + " member role" + about)
    where = "project" if words[0] == "projects" else words[-1]
    name = flags["member"].partition(":")[2].partition("@")[0]
    grant = [where, flags["member"], flags["role"]]
    if "remove" in words[-2]:
        world["grants"].remove(grant); end()
    if world["slow"]:
        world["slow"] -= 1
        end("ERROR: (gcloud) INVALID_ARGUMENT: Service account does not exist.", 1)
    if name not in world["accounts"]:
        missing(name)
    world["grants"].append(grant); end()
if words[:1] == ["secrets"]:
    uses("secretmanager.googleapis.com")
    found = world["secrets"].get(flags.get("secret") or words[-1])
    if words[1] == "create":
        need(ours + " replication-policy labels")
        label = flags["labels"].partition("managed-by=")[2]
        world["secrets"][words[2]] = {{"label": label, "versions": []}}; end()
    if found is None:
        missing("Secret [%s]" % words[-1])
    if words[1] == "describe":
        need(ours + " format"); end(found["label"])
    if words[1] == "delete":
        need(ours); del world["secrets"][words[2]]
        world["grants"] = [g for g in world["grants"] if g[0] != words[2]]; end()
    if words[1:3] == ["versions", "list"]:
        need(ours + " filter limit format"); end(str(len(found["versions"]) or ""))
    if words[1:3] == ["versions", "access"]:
        need(ours + " secret")
        end(found["versions"][-1]) if found["versions"] else missing("Secret Version")
    if words[1:3] == ["versions", "add"]:
        need(ours + " data-file")
        found["versions"].append(sys.stdin.read()); end()
if command == "compute networks describe " + words[-1]:
    need(ours + " format"); end(words[-1]) if words[-1] in world["networks"] else missing("network")
if words[:2] == ["compute", "firewall-rules"]:
    uses("compute.googleapis.com")
    if words[2] == "create":
        need(ours + " network direction action rules source-ranges description")
        assert (flags["direction"], flags["action"]) == ("INGRESS", "ALLOW")
        keys = ("description", "network", "source-ranges", "rules")
        world["rules"][words[3]] = [flags[key] for key in keys]; end()
    if words[3] not in world["rules"]:
        missing("firewall")
    if words[2] == "delete":
        need(ours); del world["rules"][words[3]]; end()
    if words[2] == "describe":
        need(ours + " format"); end("\t".join(world["rules"][words[3]]))
if command == "compute instances list":
    need(ours + " filter format"); end("\n".join(world["machines"]))
end("ERROR: (gcloud) Invalid choice: %r" % command, 2)
"""


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "bin").mkdir()
        self.state = self.folder / "project.json"
        program = self.folder / "bin" / "gcloud"
        values = {"python": sys.executable, "state": str(self.state), "project": PROJECT}
        program.write_text(STAND_IN.format(**values))
        program.chmod(0o755)
        self.world: dict[str, Any] = {
            "login": "me@example.com",
            "adc": True,
            "apis": ["serviceusage.googleapis.com"],
            "accounts": {},
            "grants": [],
            "secrets": {},
            "rules": {},
            "networks": ["default"],
            "machines": [],
            "broken": [],
            "slow": 0,
        }
        self.keep()

    def keep(self) -> None:
        self.state.write_text(json.dumps(self.world))

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "CLOUDSDK_"))}
        return {**kept, "PATH": path, "GEMMA4_INIT_WAIT_S": "0", **more}

    def run_script(self, *flags: str, shell: tuple[str, ...] = (), **environment: str) -> Any:
        ended = subprocess.run(
            ["bash", *shell, str(SCRIPT), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment(**environment),
            timeout=120,
        )
        self.world = json.loads(self.state.read_text())
        return ended

    def done(self, *flags: str, **environment: str) -> str:
        ended = self.run_script("--project", PROJECT, *flags, **environment)
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        return str(ended.stdout)

    def refused(self, *flags: str, project: str = PROJECT, **environment: str) -> str:
        before = self.state.read_text()
        ended = self.run_script("--project", project, *flags, **environment)
        self.assertNotEqual(ended.returncode, 0, ended.stdout)
        self.assertEqual(json.loads(before), self.world)
        return str(ended.stderr)

    def calls(self) -> list[list[str]]:
        path = Path(f"{self.state}.argv")
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)[0] for line in lines]

    def changes(self) -> list[str]:
        verbs = {"enable", "create", "delete", "add", "remove"}
        verbs |= {"add-iam-policy-binding", "remove-iam-policy-binding"}
        return [" ".join(call) for call in self.calls() if verbs & set(call)]

    def token_file(self, text: str = f"{CANARY}\n", mode: int = 0o600) -> str:
        path = self.folder / "token"
        path.write_text(text)
        path.chmod(mode)
        return str(path)


class PrepareTest(Case):
    def test_a_new_project(self) -> None:
        told = self.done("--hf-token-file", self.token_file())
        for api in ("compute", "tpu", "secretmanager", "logging", "iap"):
            self.assertIn(f"{api}.googleapis.com", self.world["apis"])
        self.assertEqual(self.world["accounts"], {"gemma4-rig": "managed-by=gemma4-rigs"})
        member = f"serviceAccount:{EMAIL}"
        grants = [["project", member, LOG_ROLE], ["hf-token", member, SECRET_ROLE]]
        self.assertEqual(self.world["grants"], grants)
        secret = {"label": "gemma4-rigs", "versions": [CANARY]}
        self.assertEqual(self.world["secrets"], {"hf-token": secret})
        rule = ["managed-by=gemma4-rigs", "default", "35.235.240.0/20", "tcp:22"]
        self.assertEqual(self.world["rules"], {"gemma4-rigs-iap-default": rule})
        for line in (f"PROJECT={PROJECT}", f"SERVICE_ACCOUNT={EMAIL}", "HF_SECRET=hf-token"):
            self.assertIn(line, told)
        self.assertIn("Budget", told)

    def test_a_second_time_changes_nothing(self) -> None:
        self.done(HF_TOKEN=CANARY)
        before, number = self.world, len(self.changes())
        told = self.done(HF_TOKEN=CANARY)
        self.assertEqual((self.world, len(self.changes())), (before, number))
        self.assertIn("given token already", told)

    def test_another_token_is_another_version(self) -> None:
        self.done(HF_TOKEN="hf_older12345")
        self.done(HF_TOKEN=CANARY)
        self.assertEqual(self.world["secrets"]["hf-token"]["versions"], ["hf_older12345", CANARY])

    def test_without_a_token_all_but_the_version(self) -> None:
        told = self.done()
        self.assertEqual(self.world["secrets"]["hf-token"]["versions"], [])
        self.assertIn("no version yet", told)
        self.assertEqual(len(self.world["grants"]), 2)

    def test_names_of_ones_own(self) -> None:
        self.world["networks"].append("mine")
        self.keep()
        flags = ("--service-account", "my-rigs", "--secret", "My_Token", "--network", "mine")
        told = self.done(*flags, HF_TOKEN=CANARY)
        self.assertEqual(list(self.world["accounts"]), ["my-rigs"])
        self.assertEqual(list(self.world["secrets"]), ["My_Token"])
        self.assertEqual(list(self.world["rules"]), ["gemma4-rigs-iap-mine"])
        self.assertIn("NETWORK=mine", told)

    def test_a_new_account_that_is_not_known_at_once(self) -> None:
        self.world["slow"] = 3
        self.keep()
        self.assertIn("again in 0 s", self.done())
        self.assertEqual(len(self.world["grants"]), 2)
        self.setUp()
        self.world["slow"] = 1000
        self.keep()
        ended = self.run_script("--project", PROJECT)
        self.assertEqual(ended.returncode, 1)
        self.assertIn("again and again", ended.stderr)

    def test_half_done_is_finished(self) -> None:
        self.done(HF_TOKEN=CANARY)
        whole = self.world
        for kind in ("accounts", "secrets", "rules", "grants", "apis"):
            with self.subTest(kind=kind):
                self.world = {**whole, kind: type(whole[kind])()}
                if kind == "accounts":  # with the account its grants are gone
                    self.world["grants"] = []
                if kind == "secrets":
                    self.world["grants"] = whole["grants"][:1]
                self.keep()
                self.done(HF_TOKEN=CANARY)
                self.assertEqual(self.world | {"apis": []}, whole | {"apis": []})

    def test_dry_run_changes_nothing_and_says_what_it_would(self) -> None:
        told = self.done("--dry-run", HF_TOKEN=CANARY)
        self.assertEqual(self.changes(), [])
        self.assertEqual(self.world["accounts"], {})
        for words in (
            "would run: gcloud services enable compute.googleapis.com",
            "would run: gcloud iam service-accounts create gemma4-rig",
            "would run: gcloud secrets create hf-token",
            f"--role={SECRET_ROLE}",
            "--source-ranges=35.235.240.0/20",
        ):
            self.assertIn(words, told)
        self.assertNotIn("CANARY", told)

    def test_a_missing_login_is_told_apart_from_the_client_libraries(self) -> None:
        self.world["adc"] = False
        self.keep()
        self.assertIn("gcloud auth application-default login", self.done())
        self.world["login"] = ""
        self.keep()
        error = self.refused()
        self.assertIn("gcloud auth login", error)
        self.assertNotIn("application-default", error)


class RefusalTest(Case):
    def test_flags(self) -> None:
        for flags in (
            ("--secret", "a/b"),
            ("--secret", ""),
            ("--service-account", "x"),
            ("--service-account", "a b c d e f"),
            ("--network", "--flags-file=/etc/passwd"),
            ("--network", "a/b"),
            ("--unknown",),
            ("positional",),
            ("--secret",),
        ):
            self.refused(*flags)
        for project in ("", "Other", "a", "x;touch y", "-x-project", "projects/other-proj"):
            self.refused(project=project)
        self.assertEqual(self.calls(), [])

    def test_no_project_and_no_terminal_asks_nothing(self) -> None:
        ended = self.run_script()
        self.assertEqual(ended.returncode, 2)
        self.assertIn("--project", ended.stderr)

    def test_token_files(self) -> None:
        for mode in (0o644, 0o640, 0o604, 0o666, 0o601):
            error = self.refused("--hf-token-file", self.token_file(mode=mode))
            self.assertIn("chmod 600", error)
        link = self.folder / "link"
        link.symlink_to(self.token_file())
        for named in (str(link), str(self.folder), f"{self.folder}/missing", "/dev/null"):
            self.assertIn("plain file", self.refused("--hf-token-file", named))
        for text in ("sk-CANARY", "hf_", f"{CANARY};x", f"HF_TOKEN={CANARY}"):
            error = self.refused("--hf-token-file", self.token_file(text))
            self.assertNotIn("CANARY", error)
            self.assertNotIn("CANARY", self.refused(HF_TOKEN=text))
        self.assertEqual(self.changes(), [])

    def test_what_is_somebody_elses_stays(self) -> None:
        self.done()
        self.world["secrets"]["hf-token"] = {"label": "", "versions": ["other"]}
        self.keep()
        self.assertIn("somebody else's", self.refused(HF_TOKEN=CANARY))
        self.world["secrets"]["hf-token"] = {"label": "gemma4-rigs", "versions": ["other"]}
        rule = ["managed-by=gemma4-rigs", "default", "0.0.0.0/0", "tcp:22"]
        self.world["rules"]["gemma4-rigs-iap-default"] = rule
        self.keep()
        self.assertIn("not as this script makes it", self.refused())

    def test_a_network_that_is_not_there(self) -> None:
        self.world["networks"] = []
        self.keep()
        ended = self.run_script("--project", PROJECT)
        self.assertEqual((ended.returncode, self.world["rules"]), (1, {}))
        self.assertIn("no network default", ended.stderr)

    def test_without_gcloud_and_without_permission(self) -> None:
        tools = self.folder / "tools"
        tools.mkdir()
        for name in ("bash", "cat", "tr", "ls", "sleep"):
            (tools / name).symlink_to(shutil.which(name) or name)
        self.assertIn("not installed", self.refused(PATH=str(tools)))
        self.world["broken"] = [f"projects describe {PROJECT}"]
        self.keep()
        self.assertIn(f"no project {PROJECT}", self.refused())
        self.world["broken"] = ["services list"]
        self.keep()
        self.assertIn("cannot be read", self.refused())

    def test_a_change_that_fails_ends_it(self) -> None:
        self.world["broken"] = ["secrets create hf-token"]
        self.keep()
        ended = self.run_script("--project", PROJECT, HF_TOKEN=CANARY)
        self.assertNotEqual(ended.returncode, 0)
        self.assertEqual((self.world["secrets"], self.world["rules"]), ({}, {}))
        self.assertNotIn("Done.", ended.stdout)
        self.world["broken"] = []
        self.keep()
        self.done(HF_TOKEN=CANARY)


class SecretTest(Case):
    def test_the_token_is_nobodys_argument_and_in_no_output(self) -> None:
        for shell in ((), ("-x",), ("-v",)):
            flags = ("--project", PROJECT, "--hf-token-file", self.token_file())
            for ended in (
                self.run_script(*flags, shell=shell),
                self.run_script("--project", PROJECT, shell=shell, HF_TOKEN=f"{CANARY}2"),
            ):
                self.assertEqual(ended.returncode, 0, ended.stderr)
                self.assertNotIn("CANARY", ended.stdout + ended.stderr)
        self.assertIn(CANARY, self.world["secrets"]["hf-token"]["versions"])
        kept = Path(f"{self.state}.argv").read_text()
        self.assertNotIn("CANARY", kept)
        names = {name for line in kept.splitlines() for name in json.loads(line)[1]}
        self.assertNotIn("HF_TOKEN", names)

    def test_every_command_names_its_project(self) -> None:
        self.done(HF_TOKEN=CANARY, CLOUDSDK_CORE_PROJECT="another-proj")
        for call in self.calls():
            if call[0] != "auth":
                self.assertIn(f"--project={PROJECT}", call)
                self.assertIn("--quiet", call)


class UndoTest(Case):
    def test_all_that_was_made_goes_and_nothing_else(self) -> None:
        fresh = dict(self.world)
        self.done(HF_TOKEN=CANARY)
        self.world["secrets"]["other"] = {"label": "gemma4-rigs", "versions": []}
        self.world["grants"].append(["project", "user:me@example.com", "roles/owner"])
        self.world["rules"]["allow-ssh"] = ["", "default", "0.0.0.0/0", "tcp:22"]
        self.keep()
        told = self.done("--undo", "--yes")
        for words in ("firewall rule gemma4-rigs-iap-default", "secret hf-token", EMAIL):
            self.assertIn(words, told)
        self.assertIn("APIs stay enabled", told)
        self.assertEqual(self.world["accounts"], fresh["accounts"])
        self.assertEqual(list(self.world["secrets"]), ["other"])
        self.assertEqual(list(self.world["rules"]), ["allow-ssh"])
        grants = [["project", "user:me@example.com", "roles/owner"]]
        self.assertEqual(self.world["grants"], grants)
        self.assertIn("Nothing here", self.done("--undo", "--yes"))

    def test_without_a_terminal_it_takes_the_flag(self) -> None:
        self.done()
        error = self.refused("--undo")
        self.assertIn("no terminal to ask at", error)

    def test_dry_run(self) -> None:
        self.done()
        number = len(self.changes())
        self.assertIn("would run: gcloud secrets delete hf-token", self.done("--undo", "--dry-run"))
        self.assertEqual(len(self.changes()), number)

    def test_what_others_made_stays(self) -> None:
        self.world["apis"] += ["compute.googleapis.com", "secretmanager.googleapis.com"]
        self.world["accounts"]["gemma4-rig"] = "made by hand"
        self.world["secrets"]["hf-token"] = {"label": "", "versions": ["x"]}
        rule = ["", "default", "35.235.240.0/20", "tcp:22"]
        self.world["rules"]["gemma4-rigs-iap-default"] = rule
        self.keep()
        before = self.world
        self.assertIn("Nothing here", self.done("--undo", "--yes"))
        self.assertEqual(self.world, before)

    def test_not_while_a_machine_is_rented(self) -> None:
        self.done()
        self.world["machines"] = ["tpu-vllm-v6e1-2b-0a1b2c"]
        self.keep()
        self.assertIn("tpu-vllm-v6e1-2b-0a1b2c", self.refused("--undo", "--yes"))
        self.world["broken"] = ["compute instances list"]
        self.keep()
        self.assertIn("cannot be read", self.refused("--undo", "--yes"))

    def test_the_role_that_is_gone_already(self) -> None:
        self.done()
        self.world["grants"] = []
        self.keep()
        self.done("--undo", "--yes")
        self.assertEqual(self.world["accounts"], {})


class TerminalTest(Case):
    """With a terminal it asks, for what has no flag."""

    def at_terminal(self, answers: str, *flags: str, **environment: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            ["bash", str(SCRIPT), *flags],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment(**environment),
            text=True,
        ) as process:
            os.close(theirs)
            os.write(ours, answers.encode())
            told = process.communicate(timeout=120)[0]
        os.close(ours)
        self.world = json.loads(self.state.read_text())
        return process.returncode, told

    def test_project_token_and_consent(self) -> None:
        status, told = self.at_terminal(f"{PROJECT}\n{CANARY}\ny\n")
        self.assertEqual(status, 0, told)
        self.assertEqual(self.world["secrets"]["hf-token"]["versions"], [CANARY])
        self.assertNotIn("CANARY", told)

    def test_no_is_no(self) -> None:
        for answers in (f"{PROJECT}\n\nn\n", f"{PROJECT}\n\n\n"):
            status, told = self.at_terminal(answers)
            self.assertEqual((status, self.changes()), (1, []), told)
            self.assertIn("nothing was changed", told)

    def test_what_has_a_flag_is_not_asked(self) -> None:
        status, told = self.at_terminal("", "--project", PROJECT, "--yes", HF_TOKEN=CANARY)
        self.assertEqual(status, 0, told)
        self.assertNotIn("[y/N]", told)
        self.assertEqual(self.world["secrets"]["hf-token"]["versions"], [CANARY])

    def test_undo_asks_by_name(self) -> None:
        self.done()
        status, told = self.at_terminal("n\n", "--project", PROJECT, "--undo")
        self.assertEqual((status, list(self.world["rules"])), (1, ["gemma4-rigs-iap-default"]))
        self.assertIn("secret hf-token with all its versions", told)
        status, told = self.at_terminal("y\n", "--project", PROJECT, "--undo")
        self.assertEqual((status, self.world["rules"]), (0, {}), told)


class TextTest(unittest.TestCase):
    def test_shellcheck_finds_nothing(self) -> None:
        program = shutil.which("shellcheck")
        if program is None:
            self.skipTest("shellcheck is not installed")
        ended = subprocess.run([program, str(SCRIPT)], capture_output=True, text=True, timeout=60)
        self.assertEqual((ended.returncode, ended.stdout), (0, ""))

    def test_help_and_what_it_may_never_do(self) -> None:
        ended = subprocess.run(
            ["bash", str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60
        )
        text = SCRIPT.read_text()
        self.assertEqual(ended.returncode, 0)
        for flag in ("--project", "--hf-token-file", "--network", "--dry-run", "--undo", "--yes"):
            self.assertIn(flag, ended.stdout)
        self.assertTrue(os.access(SCRIPT, os.X_OK))
        self.assertNotIn("0.0.0.0/0", text)
        for role in ("roles/editor", "tpu.admin", "instanceAdmin"):
            self.assertNotIn(role, text)


if __name__ == "__main__":
    unittest.main()
