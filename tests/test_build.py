"""Tests of the build: run as a program in a copy of this repository, over its real rigs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import unittest

from forge.manifests import plugin_version
from forge.pins import (
    SERVER_PINS,
    requirements_among,
    requirements_of_script,
    script_block,
    server_requirements,
)
from tests.forge_copy import FIRST_RIG, ForgeCopyCase, TemporaryFolderCase

OTHER_PYTHONS = ("python3.11", "python3.12", "python3.13")
RIG = "local-pytorch-cpu-2b"
MODULE = f"forge/rigs/{RIG.replace('-', '_')}.py"
SKILL = f"skills/{RIG}-management"


class BuildTests(ForgeCopyCase):
    """Whatever a test edits is put back after it, so that each begins from a built copy."""

    def test_twice_changes_nothing(self) -> None:
        before = self.contents()
        stamps = {name: (self.root / name).stat().st_mtime_ns for name in before}
        built = self.forge("build")
        self.assertEqual(built.returncode, 0, built.stdout)
        self.assertRegex(built.stdout, r"^\d+ built files, 0 changed\.\n$")
        self.assertEqual(self.contents(), before)
        for name, stamp in stamps.items():
            self.assertEqual((self.root / name).stat().st_mtime_ns, stamp, name)

    def test_another_python_builds_the_same_bytes(self) -> None:
        pythons = self.other_pythons()
        if not pythons:
            self.skipTest("no other Python of 3.11 to 3.13 on PATH has the packages")
        before = self.contents()
        for python in pythons:
            with self.subTest(python=python):
                # Something must differ first: a build that does nothing would pass otherwise.
                (self.root / RIG / "server.py").write_text("")
                (self.root / RIG / "GemmaTools.md").unlink()
                built = self.run_other(python, "-m", "forge.build")
                self.assertEqual(built.returncode, 0, built.stdout)
                self.assertIn(f"wrote {RIG}/server.py", built.stdout)
                self.assertEqual(self.contents(), before)

    def run_other(self, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another Python in the copy, with the packages that it has by itself."""
        environment = self.environment(PYTHONPATH="")
        return self.run_in(self.root, python, *arguments, environment=environment)

    def other_pythons(self) -> list[str]:
        """What stands on PATH for other versions and can build; tests/run.py puts some there."""
        mine = "python{}.{}".format(*sys.version_info)
        found = [shutil.which(name) for name in OTHER_PYTHONS if name != mine]
        probe = ("-c", "import filelock, httpx2, mcp, psutil, pydantic_settings, ruff")
        return [p for p in found if p and not self.run_other(p, *probe).returncode]

    def test_the_builders_environment_plays_no_part(self) -> None:
        built = self.forge(
            "build",
            RIG_TOOLSETS="help",
            MCP_SERVER_NAME="somebody-else",
            MODEL_NAME="embedded",
            COLUMNS="40",
            PYTHONHASHSEED="7",
        )
        self.assertIn("0 changed", built.stdout)

    def test_every_kind_of_file_is_built(self) -> None:
        for rig in (FIRST_RIG,):
            for name in (
                *(
                    "server.py",
                    "loadgen.py",
                    "triage.py",
                    "probe.py",
                    "plan.py",
                    "judge.py",
                    "test_server.py",
                    "requirements.txt",
                    "requirements-runtime.txt",
                ),
                *("launch.py", "Makefile", "set_env.sh", "GemmaTools.md", ".claude/CLAUDE.md"),
                *(".claude-plugin/plugin.json", ".mcp.json", "gemini-extension.json"),
                *(".codex/config.toml", ".agents/mcp_config.json"),
            ):
                self.assertTrue((self.root / rig / name).is_file(), f"{rig}/{name}")
            skill = self.root / rig / "skills" / f"{rig.replace('_', '-')}-management"
            self.assertTrue((skill / "SKILL.md").is_file())
            for name in ("server.py", "launch.py", "tpu.env", "requirements.txt"):
                ours, theirs = self.root / rig / name, skill / "mcp" / name
                self.assertEqual(ours.read_bytes(), theirs.read_bytes(), name)
            makefile = self.read(f"{rig}/Makefile")
            self.assertIn(rig, makefile)
            self.assertNotRegex(makefile, r"@(RIG|SLUG)@")
        for name in (".claude-plugin/marketplace.json", "HARDWARE.md", "MODELS.md"):
            self.assertTrue((self.root / name).is_file(), name)

    def test_server_names_its_packages_and_its_source(self) -> None:
        for rig in (FIRST_RIG,):
            head = self.read(f"{rig}/server.py").partition('"""')[0]
            block = re.search(r"# /// script\n(.*?)# ///\n", head, re.S)
            assert block is not None
            toml = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
            self.assertEqual(toml["requires-python"], ">=3.11")
            self.assertIn("mcp>=2.3,<2.4", toml["dependencies"])
            listed = self.read(f"{rig}/requirements.txt").splitlines()
            self.assertEqual(listed, toml["dependencies"])
            for requirement in listed:
                self.assertRegex(requirement, r"^[a-z0-9-]+>=[\d.]+,<[\d.]+(; sys_platform .+)?$")
            source = re.search(r"# Built from (\S+\.py) by `(.+?)`", head)
            assert source is not None
            self.assertTrue((self.root / source[1]).is_file(), source[1])
            self.assertEqual(source[2], "python3 -m forge.build")

    def test_readme_keeps_what_was_written_by_hand(self) -> None:
        text = self.read(f"{RIG}/README.md")
        emptied = re.sub(r"(<!-- built: tools -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.S)
        self.assertNotEqual(emptied, text, "the README has no built list of tools")
        self.edit(f"{RIG}/README.md", emptied + "\nA sentence by hand.\n")
        self.restore_versions()
        self.forge("build")
        self.assertEqual(self.read(f"{RIG}/README.md"), text + "\nA sentence by hand.\n")

    def test_version_follows_what_is_shipped_and_nothing_else(self) -> None:
        def version() -> str:
            versions = {
                json.loads(self.read(f"{RIG}/{name}"))["version"]
                for name in (".claude-plugin/plugin.json", "gemini-extension.json")
            }
            self.assertEqual(len(versions), 1)
            return str(versions.pop())

        first = version()
        self.assertRegex(first, r"^0\.1\.0-h[0-9a-f]{12}$")
        self.restore_versions()
        manifest = json.loads(self.read(f"{RIG}/gemini-extension.json"))
        manifest["version"] = "9.9.9"
        self.edit(f"{RIG}/gemini-extension.json", json.dumps(manifest))
        self.forge("build")
        self.assertEqual(version(), first)
        (self.root / RIG / "__pycache__").mkdir(exist_ok=True)
        (self.root / RIG / "__pycache__" / "server.cpython-311.pyc").write_bytes(b"bytecode")
        self.assertIn("0 changed", self.forge("build").stdout)
        values = self.read(f"{RIG}/tpu.env")
        self.edit(f"{RIG}/tpu.env", values + "# One more comment.\n")
        self.edit(f"{RIG}/{SKILL}/mcp/tpu.env", values)
        self.forge("build")
        second = version()
        self.assertNotEqual(second, first)
        (self.root / RIG / "tpu.env").write_text(values)
        self.forge("build")
        self.assertEqual(version(), first)

    def test_what_is_not_built_any_more_is_removed(self) -> None:
        stray = self.root / RIG / SKILL / "mcp" / "old_name.py"
        stray.write_text("# of an older build\n")
        built = self.forge("build")
        self.assertFalse(stray.exists())
        self.assertIn(f"removed {RIG}/{SKILL}/mcp/old_name.py", built.stdout)

    def test_an_unknown_rig_is_refused_with_those_there_are(self) -> None:
        built = self.forge("build", "tpu-vllm-v5e1-99b")
        self.assertEqual(built.returncode, 1)
        self.assertIn("no rig tpu-vllm-v5e1-99b", built.stdout)
        self.assertIn(RIG.replace("-", "_"), built.stdout)

    def test_one_rig_can_be_built(self) -> None:
        self.edit(f"{RIG}/requirements.txt", "")
        built = self.forge("build", RIG)
        self.assertIn(f"wrote {RIG}/requirements.txt", built.stdout)
        self.assertIn("1 changed", built.stdout)

    def test_a_missing_part_is_named_and_nothing_is_written(self) -> None:
        line = "from forge.parts.ground.settings import RigSettings\n"
        source = self.read(MODULE)
        self.assertIn(line, source)
        wrong = source.replace(line, "from forge.parts.ground.no_such_part import RigSettings\n")
        self.edit(MODULE, wrong)
        before = self.contents()
        built = self.forge("build")
        self.assertEqual(built.returncode, 1)
        number = wrong[: wrong.index("no_such_part")].count("\n") + 1
        self.assertIn("forge.parts.ground.no_such_part, which does not exist", built.stdout)
        self.assertIn(f"{MODULE}:{number}", built.stdout)
        self.assertEqual(self.contents(), before)

    def test_a_package_without_a_pin_is_refused(self) -> None:
        source = self.read(MODULE)
        self.edit(MODULE, source.replace("import sys\n", "import sys\n\nimport zebra\n", 1))
        built = self.forge("build")
        self.assertEqual(built.returncode, 1)
        self.assertIn("no pinned range for zebra", built.stdout)

    def test_a_rig_that_cannot_be_imported_is_named(self) -> None:
        self.edit(MODULE, self.read(MODULE).replace("    toolsets=(", "    no_such_field=("))
        built = self.forge("build")
        self.assertEqual(built.returncode, 1)
        self.assertIn(f"{MODULE}: cannot be imported (TypeError", built.stdout)
        self.assertNotIn("Traceback", built.stdout)

    def test_a_rig_named_otherwise_than_its_module_is_refused(self) -> None:
        self.edit(MODULE, self.read(MODULE).replace(f'name="{RIG}"', 'name="local-pytorch-cpu-4b"'))
        built = self.forge("build")
        self.assertEqual(built.returncode, 1)
        self.assertIn("named as the file", built.stdout)

    def test_a_missing_source_is_named_and_the_rest_is_built(self) -> None:
        self.edit("forge/rig.mk", None)
        self.edit(f"{RIG}/requirements.txt", "")
        self.restore_versions()
        built = self.forge("build")
        self.assertEqual(built.returncode, 1)
        self.assertIn(f"{RIG}/Makefile is not built: forge/rig.mk is missing", built.stdout)
        self.assertIn(f"wrote {RIG}/requirements.txt", built.stdout)

    def test_diff_shows_what_differs_between_two_servers(self) -> None:
        one = self.forge("build", "--diff", RIG, RIG)
        self.assertEqual((one.returncode, one.stdout), (0, ""))
        server = self.read(f"{RIG}/server.py")
        self.edit("local-vllm-cpu-2b/server.py", server.replace("import sys\n", "import this\n", 1))
        two = self.forge("build", "--diff", RIG, "local-vllm-cpu-2b")
        self.assertEqual(two.returncode, 0)
        changes = [line for line in two.stdout.splitlines() if line[:1] in "+-"]
        self.assertEqual(
            changes,
            [
                f"--- {RIG}/server.py",
                "+++ local-vllm-cpu-2b/server.py",
                "-import sys",
                "+import this",
            ],
        )
        three = self.forge("build", "--diff", RIG, "no-such-rig")
        self.assertEqual(three.returncode, 1)
        self.assertIn("no-such-rig/server.py: no such file", three.stdout)

    def restore_versions(self) -> None:
        """Put back, after the test, what moves along with any shipped file."""
        for name in (".claude-plugin/plugin.json", "gemini-extension.json"):
            self.edit(f"{RIG}/{name}", self.read(f"{RIG}/{name}"))


class PluginVersionTests(unittest.TestCase):
    FILES = {"server.py": b"one", "skills/a/SKILL.md": b"two", "tpu.env": b""}

    def test_every_byte_and_every_name_counts(self) -> None:
        first = plugin_version(self.FILES)
        others = [
            {**self.FILES, "server.py": b"One"},
            {**self.FILES, "more.py": b""},
            {"server2.py": b"one", "skills/a/SKILL.md": b"two", "tpu.env": b""},
            {"server.py": b"one", "skills/a/SKILL.md": b"", "tpu.env": b"two"},
        ]
        self.assertEqual(len({first, *map(plugin_version, others)}), 5)

    def test_order_and_the_files_with_the_version_do_not_count(self) -> None:
        turned = dict(reversed(self.FILES.items()))
        with_version = {**self.FILES, ".claude-plugin/plugin.json": b"{}"}
        self.assertEqual(plugin_version(turned), plugin_version(self.FILES))
        self.assertEqual(plugin_version(with_version), plugin_version(self.FILES))


class PinTests(TemporaryFolderCase):
    def test_block_and_requirements_are_inverse(self) -> None:
        wanted = server_requirements(["mcp", "pydantic_settings", "torch"])
        self.assertEqual(wanted, ["mcp>=2.3,<2.4", SERVER_PINS["pydantic_settings"]])
        text = f'{script_block(wanted)}\n# More.\n"""A server."""\n'
        self.assertEqual(requirements_of_script(text), wanted)
        with self.assertRaisesRegex(ValueError, "no PEP 723 block"):
            requirements_of_script('"""A server."""\n')

    def test_a_program_asks_for_what_it_imports_of_its_runtimes_packages(self) -> None:
        brought = ("jax[cpu]==0.10.2", "prometheus-client>=0.26,<1", "huggingface-hub>=2.4,<3")
        self.assertEqual(
            requirements_among(["jax", "prometheus_client", "re"], brought), list(brought[:2])
        )
        self.assertEqual(requirements_among(["jaxlib"], brought), [])

    def test_the_pins_allow_the_releases_that_are_tested_here(self) -> None:
        names = [re.split("[><=]", pin)[0] for pin in SERVER_PINS.values()]
        script = (
            "import sys; from importlib import metadata; "
            "print(*(f'{n} {metadata.version(n)}' for n in sys.argv[1:]), sep='\\n')"
        )
        done = self.run_in(self.folder, sys.executable, "-c", script, *names)
        self.assertEqual(done.returncode, 0, done.stdout)
        have = dict(line.split() for line in done.stdout.splitlines())
        for pin in SERVER_PINS.values():
            name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)(?:; .+)?", pin).groups()  # type: ignore[union-attr]
            self.assertLessEqual(numbers(low), numbers(have[name]), pin)
            self.assertLess(numbers(have[name]), numbers(high), pin)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


if __name__ == "__main__":
    unittest.main()
