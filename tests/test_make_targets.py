"""Tests of a rig's make targets and of set_env.sh, run for real in a copy of the rig alone."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import unittest
import zipfile
from pathlib import Path
from typing import Any

from forge.suites.rig_case import rig_processes
from tests.fresh_rig import RIG, FreshRigCase
from tests.test_launch import write_wheel

SKILL = f"{RIG}-management"
TARGETS = (
    "help install test lint run tools skill skill-install skill-install-agy skill-zip preflight "
    "deploy status endpoint query benchmark destroy"
).split()
# Each means something to make, to a shell, to JSON or to the command line's key=value.
PROMPTS = (
    'it\'s a "quoted" word, `touch HARM` and $(touch HARM) and $(shell touch HARM)',
    "$$ $HOME ${HOME} $(HOME) $@ $< a # b % c \\ d \\n e",
    "; touch HARM && touch HARM | touch HARM > HARM",
    "--json",
    'key=value = {"a": [1]} 42',
    "two\nlines, Grüße 😀 東京",
)


class MakeCase(FreshRigCase):
    """Runs make in the copy."""

    def make(
        self, *words: str, changes: dict[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run_in_rig(
            "make", f"PYTHON={sys.executable}", *words, changes=changes, stdin=stdin
        )

    def made(self, *words: str, changes: dict[str, str] | None = None) -> str:
        """The output of a make that must succeed."""
        done = self.make(*words, changes=changes)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def failed(self, *words: str, changes: dict[str, str] | None = None) -> str:
        """The standard error of a make that must fail."""
        done = self.make(*words, changes=changes)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        return done.stderr


class ModelTargetTest(MakeCase):
    """The targets that act on a model."""

    def test_nothing_runs(self) -> None:
        self.assertIn("state: stopped", self.made("status"))
        for words in (("endpoint",), ("query", "PROMPT=hello"), ("benchmark",)):
            with self.subTest(words):
                error = self.failed(*words)
                self.assertIn("NOT_FOUND no model is being served. Next: serve_model()", error)

    def test_from_deploy_to_destroy(self) -> None:
        starts = len(self.engine.starts())
        self.engine.script(load_s=3)
        # A wait shorter than the start, so that the waiting goes round.
        out = self.made("deploy", "WAIT_S=1")
        self.assertIn("is ready", out)
        self.assertEqual(len(rig_processes(self.state, "server")), 1)
        self.assertIn("is ready", self.made("deploy"))
        self.assertEqual(len(self.engine.starts()), starts + 1)
        address = f"http://127.0.0.1:{self.environment['PORT']}/v1"
        self.assertIn(address, self.made("endpoint"))
        small = "concurrency=[1] context_tokens=[64] output_tokens=4 requests_per_cell=3"
        out = self.made("benchmark", f"BENCH={small} seconds_per_cell=5")
        # Usable or not is said of the client, which a busy machine may have held up.
        self.assertRegex(out, r"[01] usable of 1 planned")
        (cell,) = self.newest_report()["cells"]
        self.assertEqual((cell["status"], cell["metrics"]["requests_completed"]), ("ok", 3))
        self.assertIn("INVALID concurrency", self.failed("benchmark", "BENCH=concurrency=[0]"))

        for prompt in PROMPTS:
            with self.subTest(prompt=prompt):
                self.assertIn("text: Good day.", self.made("query", f"PROMPT={prompt}"))
                self.assertEqual(self.last_prompt(), prompt)
        for prompt in PROMPTS[-1], " ".join(PROMPTS):
            with self.subTest("from the environment"):
                self.made("query", changes={"PROMPT": prompt})
                self.assertEqual(self.last_prompt(), prompt)
        self.assertEqual(list(self.place.rglob("HARM")), [])
        self.assertIn("INVALID prompt", self.failed("query", "PROMPT="))

        error = self.failed("destroy")
        self.assertIn("Nothing was done", error)
        for answer in ("n\n", "\n"):
            with self.subTest(answer=answer):
                self.assertIn("Nothing was done.", self.destroy_on_terminal(answer))
                self.assertEqual(len(rig_processes(self.state, "server")), 1)
        out = self.destroy_on_terminal("y\n")
        self.assertIn("state: ready", out)  # what would go was shown first
        self.assertIn("was ended", out)
        self.assertEqual(rig_processes(self.state), [])
        self.assertIn("nothing was running", self.made("destroy", "YES=1").lower())

    def newest_report(self) -> dict[str, Any]:
        """The report that was saved last."""
        found = sorted(self.place.rglob("reports/*.json"), key=lambda path: path.stat().st_mtime)
        report: dict[str, Any] = json.loads(found[-1].read_text())
        return report

    def last_prompt(self) -> str:
        """What has arrived at the engine."""
        return str(self.engine.requests()[-1]["body"]["messages"][-1]["content"])

    def destroy_on_terminal(self, answer: str) -> str:
        """The output of make destroy when its standard input is a terminal that says `answer`."""
        ours, theirs = pty.openpty()
        try:
            os.write(ours, answer.encode())
            done = self.make("destroy", stdin=theirs)
        finally:
            os.close(ours)
            os.close(theirs)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_deploy_fails_as_the_start_failed(self) -> None:
        self.engine.script(crash="out of luck")
        error = self.failed("deploy")
        self.assertIn("INTERNAL", error)
        self.assertIn("out of luck", error)
        self.assertIn("INVALID", self.failed("deploy", changes={"MODEL_NAME": "/no/folder"}))
        self.assertEqual(rig_processes(self.state, "server"), [])

    def test_run_is_the_server_over_stdio(self) -> None:
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            },
        }
        done = subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={sys.executable}", "run"],
            cwd=self.rig,
            env=self.environment,
            input=json.dumps(hello) + "\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (line,) = done.stdout.splitlines()
        self.assertEqual(json.loads(line)["result"]["serverInfo"]["title"], RIG)

    def test_preflight(self) -> None:
        self.assertIn("Everything is there.", self.made("preflight"))
        self.assertIn("MISSING", self.make("preflight", changes={"MODEL_NAME": "/no"}).stdout)


class FileTargetTest(MakeCase):
    """The targets that write, check and copy files."""

    def test_help_is_the_default_and_lists_every_target(self) -> None:
        lines = self.made().splitlines()
        self.assertEqual(lines[0], RIG)
        listed = [re.fullmatch(r"  make ([a-z-]+) +\S.*", line) for line in lines[1:]]
        self.assertEqual([match and match[1] for match in listed], TARGETS)

    def test_install_and_test(self) -> None:
        rig = self.place / "other rig"
        rig.mkdir()
        for name in ("Makefile", "launch.py", "server.py"):
            shutil.copy(self.rig / name, rig)
        (rig / "requirements.txt").write_text("alpha==1.5\n")
        (rig / "test_server.py").write_text(
            "import os, unittest\nimport alpha\n\n\nclass T(unittest.TestCase):\n"
            "    def test(self) -> None:\n        self.assertNotIn('FAIL', os.environ)\n"
        )
        write_wheel(self.place / "wheels", "alpha", "1.5")
        changes = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.place / "wheels")}
        self.rig, kept = rig, self.rig
        self.addCleanup(setattr, self, "rig", kept)
        self.assertIn("Run once", self.failed("test"))
        self.made("install", changes=changes)
        self.assertIn("Ran 1 test", self.make("test").stderr)
        self.made("test")
        self.assertIn("FAILED", self.failed("test", changes={"FAIL": "1"}))

    def test_lint(self) -> None:
        self.made("lint")
        launcher = self.rig / "launch.py"
        text = launcher.read_text()
        self.addCleanup(launcher.write_text, text)
        for fault, sign in (("import this\n", "F401"), ("x = [1,\n2]\n", "reformat")):
            with self.subTest(sign):
                launcher.write_text(text + fault)
                done = self.make("lint")
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(sign, done.stdout + done.stderr)

    def test_lint_without_ruff_says_how_to_get_it(self) -> None:
        broken = self.place / "no-ruff/ruff"
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("raise ImportError\n")
        path = f"{broken.parent}:{self.environment['PYTHONPATH']}"
        error = self.failed("lint", changes={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"})
        self.assertIn("pip install --user ruff", error)

    def test_tools_and_skill_renew_what_is_gone(self) -> None:
        self.made("tools")
        list_file, skill_file = self.rig / "GemmaTools.md", self.rig / f"skills/{SKILL}/SKILL.md"
        before = list_file.read_text(), skill_file.read_text()
        list_file.unlink()
        self.made("tools")
        skill_file.write_text("old")
        self.made("skill")
        self.assertEqual((list_file.read_text(), skill_file.read_text()), before)

    def test_skill_install_replaces_its_own_folder_and_no_other(self) -> None:
        skills = self.place / "home/.claude/skills"
        for name in (SKILL, f"{SKILL}-2", "other"):
            (skills / name).mkdir(parents=True)
            (skills / name / "old").write_text("")
        out = self.made("skill-install")
        self.assertEqual(out.strip(), f"wrote {skills / SKILL}")
        source = self.rig / "skills" / SKILL
        self.assertEqual(_files(skills / SKILL), _files(source))
        self.assertEqual(
            sorted(path.name for path in skills.iterdir()), sorted([SKILL, f"{SKILL}-2", "other"])
        )
        self.assertTrue((skills / f"{SKILL}-2/old").exists())
        self.failed("skill-install", changes={"HOME": ""})

    def test_skill_install_agy_takes_the_root_that_exists(self) -> None:
        gemini = self.place / "home/.gemini"
        self.assertIn("Nothing was written", self.failed("skill-install-agy"))
        self.assertFalse(gemini.exists())
        for part in ("", "antigravity-cli", "config"):
            (gemini / part).mkdir()
            target = gemini / part / "skills" / SKILL
            self.assertEqual(self.made("skill-install-agy").strip(), f"wrote {target}")
            self.assertTrue((target / "SKILL.md").exists())

    def test_skill_zip(self) -> None:
        self.made("skill-zip")
        with zipfile.ZipFile(self.rig / f"dist/{SKILL}.zip") as packed:
            names = packed.namelist()
        self.assertIn(f"{SKILL}/SKILL.md", names)
        self.assertIn(f"{SKILL}/mcp/server.py", names)
        self.assertEqual([name for name in names if "__pycache__" in name], [])


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class SetEnvTest(FreshRigCase):
    """set_env.sh, in the shells that it is for."""

    def shell(self, name: str, program: str, **changes: str) -> subprocess.CompletedProcess[str]:
        found = shutil.which(name)
        if found is None:
            self.skipTest(f"this machine has no {name}")
        changes = {"PYTHON": sys.executable, "FILE": str(self.rig / "set_env.sh"), **changes}
        return self.run_in_rig(found, "-c", program, changes=changes)

    def sourced(self, name: str) -> None:
        program = 'cd /; source "$FILE"; echo "$? $MODEL_NAME|$DTYPE|${_rig_file-none}"'
        for model in ("embedded", "/a b/$(c) 'd' \"e\"\\"):
            done = self.shell(name, program, MODEL_NAME=model)
            self.assertEqual((done.stdout, done.stderr), (f"0 {model}|bfloat16|none\n", ""))
        # A mistake in the values must not end the shell, and nothing half may be exported.
        program = 'source "$FILE"; echo "alive $? ${MAX_MODEL_LEN-unset}"'
        done = self.shell(name, program, PORT="none")
        self.assertEqual(done.stdout, "alive 1 unset\n")
        self.assertIn("PORT", done.stderr)
        done = self.run_in_rig(str(shutil.which(name)), "set_env.sh")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("must be sourced", done.stderr)

    def test_bash(self) -> None:
        self.sourced("bash")

    def test_zsh(self) -> None:
        self.sourced("zsh")

    def test_another_shell_is_told_and_lives_on(self) -> None:
        done = self.shell("dash", '. "$FILE"; echo "alive $?"')
        self.assertEqual(done.stdout, "alive 1\n")
        self.assertIn("bash and zsh", done.stderr)


if __name__ == "__main__":
    unittest.main()
