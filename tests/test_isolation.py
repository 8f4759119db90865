"""Tests that a rig needs nothing outside its own folder: alone, and in a clone without the forge.

Programs get a fresh home, an empty environment and the installed packages. That the forge cannot
be imported from there is tested too, because otherwise none of this would prove anything. That a
rig alone passes its own suite is seen by tests/run.py, which runs each suite in such a copy.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import sys
import tomllib
import unittest
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mcp import Client, StdioServerParameters

from forge.naming import skill_name, slug
from tests.forge_copy import (
    FIRST_RIG,
    RIGS,
    ROOT,
    ForgeCopyCase,
    TemporaryFolderCase,
    built_repository,
    packages_in_one_folder,
)


async def tool_names_of(
    command: str, arguments: Sequence[str], folder: Path, environment: dict[str, str]
) -> list[str]:
    """The names that a server lists over stdio."""
    parameters = StdioServerParameters(
        command=command, args=list(arguments), cwd=str(folder), env=environment
    )
    async with Client(parameters, read_timeout_seconds=60) as client:
        return [tool.name for tool in (await client.list_tools()).tools]


def names_in_tool_list(rig: Path) -> list[str]:
    """The tools that the rig's GemmaTools.md describes."""
    return re.findall(r"(?m)^### (\w+)$", (rig / "GemmaTools.md").read_text(encoding="utf-8"))


class AloneTests(TemporaryFolderCase):
    """Each rig by itself in an otherwise empty folder."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.rigs = []
        for name in RIGS:
            home = cls.folder / f"only-{name}"
            shutil.copytree(built_repository()[0] / name, home / name)
            cls.rigs.append(home / name)

    @classmethod
    def environment(cls, **more: str) -> dict[str, str]:
        """Packages come from RIG_PACKAGES alone, as for a user who has them somewhere."""
        environment = super().environment(RIG_PACKAGES=packages_in_one_folder())
        del environment["PYTHONPATH"]
        return environment | more

    def test_there_are_rigs_and_the_forge_is_out_of_reach(self) -> None:
        self.assertGreaterEqual(len(self.rigs), 1)
        for rig in self.rigs:
            self.assertEqual([path.name for path in rig.parent.iterdir()], [rig.name])
            launched = (sys.executable, "launch.py", "python", "-c")
            done = self.run_in(rig, *launched, "import mcp; print('reached')")
            self.assertEqual((done.returncode, done.stdout), (0, "reached\n"))
            for module in ("forge", "tests"):
                done = self.run_in(rig, *launched, f"import {module}.bundle")
                self.assertIn("ModuleNotFoundError", done.stdout)

    def test_it_serves_its_tool_list(self) -> None:
        for rig in self.rigs:
            wanted = names_in_tool_list(rig)
            self.assertGreater(len(wanted), 5)
            launched = tool_names_of(sys.executable, ["launch.py"], rig, self.environment())
            self.assertEqual(asyncio.run(launched), wanted)

    def test_without_the_launcher_too(self) -> None:
        """One rig for all: that server.py finds its packages by itself or not is Python's."""
        rig = self.rigs[0]
        environment = self.environment(PYTHONPATH=packages_in_one_folder())
        plain = tool_names_of(sys.executable, [str(rig / "server.py")], Path("/"), environment)
        self.assertEqual(asyncio.run(plain), names_in_tool_list(rig))

    def test_every_manifest_starts_it(self) -> None:
        """As each client would: with its variables filled in, in the folder where it starts.

        Rigs whose manifests for Claude Code and Antigravity differ in the rig's name alone are
        started once: the rest of a manifest is the list of the rig's own settings.
        """
        started: set[str] = set()
        for rig in self.rigs:
            texts = ((rig / name).read_text() for name in (".mcp.json", ".agents/mcp_config.json"))
            kind = "".join(texts).replace(slug(rig.name), "").replace(rig.name, "")
            if kind not in started:
                started.add(kind)
                self.manifests_start(rig)
        self.assertGreaterEqual(len(started), 2, "one on AWS has a login of its own to pass on")

    def manifests_start(self, rig: Path) -> None:
        """Each of a rig's manifests starts it, and it lists its tools."""
        project, plugin = str(rig), str(self.folder)

        def server_in(name: str) -> dict[str, object]:
            text = (rig / name).read_text(encoding="utf-8")
            loaded = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
            servers = loaded.get("mcpServers") or loaded.get("mcp_servers")
            self.assertEqual(list(servers), [slug(rig.name)])
            return dict(servers[slug(rig.name)])

        for name, folder, variables in (
            (".mcp.json", project, {}),
            (".mcp.json", plugin, {"CLAUDE_PLUGIN_ROOT": str(rig)}),
            ("gemini-extension.json", plugin, {}),
            (".codex/config.toml", project, {}),
            (".agents/mcp_config.json", project, {}),
        ):
            server = server_in(name)
            self.assertEqual(server["command"], "python3")
            arguments = [
                word.replace("${extensionPath}", str(rig)).replace("${/}", os.sep)
                for word in server["args"]  # type: ignore[attr-defined]
            ]
            self.assertNotIn("${", " ".join(arguments))
            # The variables that are declared arrive empty where the user has not set them.
            declared = server.get("env", {})
            assert isinstance(declared, dict)
            for key, value in declared.items():
                self.assertEqual(value, f"${{{key}:-}}")
            environment = self.environment(**variables, **dict.fromkeys(declared, ""))
            with self.subTest(manifest=name, folder=folder):
                listed = tool_names_of(sys.executable, arguments, Path(folder), environment)
                self.assertEqual(asyncio.run(listed), names_in_tool_list(rig))

    def test_its_skill_serves_by_itself(self) -> None:
        """It carries the rig's programs to the letter, so that one of them started is all."""
        for rig in self.rigs:
            carried = [*(rig / "skills" / skill_name(rig.name) / "mcp").glob("*.py")]
            self.assertIn("server.py", [path.name for path in carried])
            for path in carried:
                self.assertEqual(path.read_bytes(), (rig / path.name).read_bytes(), path)
        skill = self.folder / "skills" / rig.name
        shutil.copytree(rig / "skills" / skill_name(rig.name), skill)
        listed = tool_names_of(sys.executable, ["mcp/launch.py"], skill, self.environment())
        self.assertEqual(asyncio.run(listed), names_in_tool_list(rig))


# A rig's Makefile is the same in all but its name, and what it calls follows the platform.
ONE_OF_EACH_PLATFORM = list({name.partition("-")[0]: name for name in reversed(RIGS)}.values())


class CloneWithoutForgeTests(ForgeCopyCase):
    """A clone from which forge/, tests/ and the root Makefile were deleted."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        shutil.rmtree(cls.root)  # it has one rig only
        shutil.copytree(built_repository()[0], cls.root)
        shutil.rmtree(cls.root / "forge")  # the copy is made without tests/
        (cls.root / "Makefile").unlink(missing_ok=True)

    def make(self, rig: str, *targets: str) -> str:
        """What `make` prints in a rig's folder; it must succeed."""
        variables = self.environment(RIG_PACKAGES=packages_in_one_folder())
        command = ("make", f"PYTHON={sys.executable}", *targets)
        done = self.run_in(self.root / rig, *command, environment=variables)
        self.assertEqual(done.returncode, 0, done.stdout[-6000:])
        return done.stdout

    def test_the_makefiles_differ_in_the_name_alone(self) -> None:
        texts = ((self.root / name / "Makefile").read_text() for name in RIGS)
        named = zip(RIGS, texts, strict=True)
        self.assertEqual(len({t.replace(slug(n), "").replace(n, "") for n, t in named}), 1)

    def test_lint_sees_the_files(self) -> None:
        for rig in ONE_OF_EACH_PLATFORM:
            self.make(rig, "lint")
            server = self.root / rig / "server.py"
            text = server.read_text(encoding="utf-8")
            self.addCleanup(server.write_text, text, encoding="utf-8")
            server.write_text(text + "import zebra\n", encoding="utf-8")
            variables = self.environment(RIG_PACKAGES=packages_in_one_folder())
            command = ("make", f"PYTHON={sys.executable}", "lint")
            done = self.run_in(server.parent, *command, environment=variables)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("zebra", done.stdout)

    def test_documents_are_written_again(self) -> None:
        for rig in ONE_OF_EACH_PLATFORM:
            home = self.root / rig
            skill = home / "skills" / skill_name(rig)
            files = [home / "GemmaTools.md", *(p for p in skill.rglob("*") if p.is_file())]
            before = {path: path.read_bytes() for path in files}
            self.assertGreater(len(before), 4)
            for target in ("tools", "skill"):
                (home / "GemmaTools.md").unlink()
                shutil.rmtree(skill)
                self.make(rig, target)
                self.assertEqual({path: path.read_bytes() for path in files}, before, target)

    def test_skill_is_packed(self) -> None:
        for rig in ONE_OF_EACH_PLATFORM:
            self.make(rig, "skill-zip")
            name = skill_name(rig)
            with zipfile.ZipFile(self.root / rig / "dist" / f"{name}.zip") as packed:
                inside = {item for item in packed.namelist() if not item.endswith("/")}
                text = packed.read(f"{name}/SKILL.md")
            skills = self.root / rig / "skills"
            files = {
                path.relative_to(skills).as_posix() for path in skills.rglob("*") if path.is_file()
            }
            self.assertEqual(inside, files)
            self.assertEqual(text, (skills / name / "SKILL.md").read_bytes())

    def test_its_own_tests_pass(self) -> None:
        """Of each a part: tests/run.py runs each suite with even less, in a copy of the rig that
        lies alone."""
        for rig in ONE_OF_EACH_PLATFORM:
            text = (self.root / rig / "test_server.py").read_text(encoding="utf-8")
            kind = "RentedCatalogueSuite" if "class RentedCatalogueSuite(" in text else ""
            part = f"TESTS=test_server.{kind or 'CatalogueSuite'}"
            self.assertRegex(self.make(rig, "test", part), r"(?m)^Ran (?:[5-9]|\d\d+) tests in")
        self.assertRegex(
            self.make(FIRST_RIG, "test", "TESTS=test_server.FolderSuite"), r"(?m)^Ran \d+ tests in"
        )


class ImportTests(unittest.TestCase):
    def test_no_file_of_a_rig_imports_the_forge_or_another_rig(self) -> None:
        siblings = {name.replace("-", "_") for name in RIGS}
        files = [path for rig in RIGS for path in sorted((ROOT / rig).rglob("*.py"))]
        self.assertGreaterEqual(len(files), 3 * len(RIGS))
        # A skill is a copy of its rig, and most programs are the same in every rig.
        for path in {path.read_bytes(): path for path in files}.values():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    self.assertEqual(node.level, 0, f"{path}:{node.lineno}")
                    names = [node.module or ""]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    # A module's name in a string, for importlib or `python -m`.
                    names = re.findall(r"\A(?:forge|tests)(?:\.\w+)+\Z", node.value)
                for name in names:
                    top = name.partition(".")[0]
                    self.assertNotIn(top, {"forge", "tests", *siblings}, f"{path}:{node.lineno}")


if __name__ == "__main__":
    unittest.main()
