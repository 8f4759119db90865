"""Tests of the check: each fault is put into a copy of this repository, and must be named."""

from __future__ import annotations

import json
import re
import shutil
import unittest
from collections.abc import Callable
from typing import Any

from mcp.types import Tool, ToolAnnotations

from forge.build import stage_all
from forge.check import MAX_LINES
from forge.manifests import manifest_faults, marketplace_faults
from forge.text_checks import forbidden_faults, import_faults, outside_faults
from forge.tool_checks import (
    MAX_TOKENS,
    MAX_TOOLS,
    budget_faults,
    token_count,
    tool_faults,
)
from tests.forge_copy import FIRST_RIG, ForgeCopyCase, TemporaryFolderCase
from tests.parts.report_samples import report as sample_report

RIG = "local-pytorch-cpu-2b"
MODULE = f"forge/rigs/{RIG.replace('-', '_')}.py"

# Two toolsets, as somebody in a hurry would write them.
HASTY_TOOLSETS = '''
"""Two toolsets that break rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge.parts.toolsets.toolset import Toolset, rig_tool


class HastyToolset(Toolset):
    """Each of its tools breaks one rule."""

    toolset_name = "hasty"

    @rig_tool(title="Too long a name", effect="reads", structured=False)
    async def wait_for_the_model_to_answers(self) -> str:
        """One character too many."""
        return ""

    @rig_tool(title="No words", effect="reads", structured=False)
    async def plan_destroy(self) -> str:
        return ""

    @rig_tool(title="No bounds", effect="reads", structured=False)
    async def find_gpu(
        self,
        free: Annotated[str, Field(description="Any text.")],
        times: Annotated[int, Field(ge=1, description="How often.")],
        mute: Annotated[bool, Field()] = False,
    ) -> str:
        """No end, no greatest value, no description."""
        return ""


class LaterToolset(Toolset):
    """Loads only when it is asked for, and then clashes."""

    toolset_name = "later"
    on_by_default = False

    @rig_tool(title="A second job tool", effect="reads", structured=False)
    async def get_job(self) -> str:
        """A name that is taken."""
        return ""
'''


def fault_lines(output: str) -> list[str]:
    """The lines of a check's output that are faults: neither sizes nor the closing line."""
    lines = output.splitlines()
    return [line for line in lines[:-1] if not re.search(r"lines \(|ejected; it has", line)]


class PassingTests(ForgeCopyCase):
    """That the whole repository passes, the static check of the same name sees (tests/run.py)."""

    def test_what_was_just_built_passes(self) -> None:
        checked = self.forge("check")
        self.assertEqual(fault_lines(checked.stdout), [])
        self.assertEqual(checked.returncode, 0, checked.stdout)
        self.assertRegex(
            checked.stdout,
            rf"(?m)^{FIRST_RIG}/server.py: [\d,]+ lines .*; \d+ tools, [\d,]+ tokens$",
        )


class CopyTests(ForgeCopyCase):
    """Each test begins from a built copy; what it edits is put back after it."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        staged, faults = stage_all([FIRST_RIG.replace("-", "_")], cls.folder / "staged")
        assert not faults, faults
        cls.built = {f"{rig.name}/{name}" for rig in staged for name in rig.files}
        cls.built |= {".claude-plugin/marketplace.json", "HARDWARE.md", "MODELS.md"}

    def faults(self) -> list[str]:
        """The faults that a run of the check prints; it must fail exactly when there are some."""
        before = self.contents()
        checked = self.forge("check")
        self.assertNotIn("Traceback", checked.stdout)
        faults = fault_lines(checked.stdout)
        self.assertEqual(checked.returncode, 1 if faults else 0, checked.stdout)
        self.assertEqual(self.contents(), before, "the check changed a file")
        return faults

    def test_a_changed_byte_in_any_built_file_is_named(self) -> None:
        self.assertGreater(len(self.built), 20)
        for name in self.built:
            data = (self.root / name).read_bytes()
            # A README's built list, not its text; elsewhere the last byte before the line's end.
            at = data.index(b"<!-- end -->") - 2 if name.endswith("README.md") else len(data) - 2
            self.edit(name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        stale = {line.split(" is stale")[0] for line in self.faults() if " is stale" in line}
        self.assertEqual(stale, self.built)

    def test_any_missing_built_file_is_named(self) -> None:
        for name in self.built:
            self.edit(name, None)
        missing = {line.split(" is missing")[0] for line in self.faults() if " is missing" in line}
        self.assertEqual(missing, self.built)

    def test_faults_of_tools_are_named(self) -> None:
        self.edit("forge/parts/toolsets/hasty.py", HASTY_TOOLSETS)
        source = self.read(MODULE)
        line = "from forge.parts.toolsets.model import ModelToolset\n"
        self.assertIn(line, source)
        source = source.replace(
            line, f"from forge.parts.toolsets.hasty import HastyToolset, LaterToolset\n{line}"
        )
        self.edit(MODULE, source.replace("toolsets=(", "toolsets=(HastyToolset, "))
        found = "\n".join(self.faults())
        for fault in (
            "tool wait_for_the_model_to_answers has 29 characters, 28 may be",
            "tool plan_destroy has no description",
        ):
            self.assertIn(f"{RIG}/server.py: {fault}", found)
        self.assertIn("parameter free: a text without an end", found)
        self.assertIn("parameter times: a number without a greatest value", found)
        self.assertNotIn("parameter times: a number without a least value", found)
        self.assertIn("parameter mute: has no description", found)
        self.assertIn(f"{RIG}/server.py is stale", found)

        self.edit(MODULE, source.replace("toolsets=(", "toolsets=(LaterToolset, "))
        clash = [line for line in self.faults() if "two tools of one name" in line]
        self.assertEqual(len(clash), 1)
        self.assertIn("with RIG_TOOLSETS=all", clash[0])
        self.assertIn("get_job", clash[0])

    def test_faults_of_files_are_named(self) -> None:
        self.edit(f"{RIG}/AGENTS.md", None)
        self.edit(f"{RIG}/notes.md", "See [the figures](../HARDWARE.md) and forge/build.py.\n")
        self.edit(f"{RIG}/helper.py", "import forge.build\nimport zebra\n")
        self.edit("stray/server.py", "# no rig\n")
        (self.root / "stray").mkdir(exist_ok=True)
        self.addCleanup(shutil.rmtree, self.root / "stray")
        self.edit("leak.txt", "first\ntoken " + "hf_" + "a" * 34 + "\n")
        found = "\n".join(self.faults())
        for fault in (
            f"{RIG}/AGENTS.md is missing: write it",
            f"{RIG}/gemini-extension.json: contextFileName 'AGENTS.md' does not exist",
            f"{RIG}/notes.md: points at ../HARDWARE.md, outside the rig",
            f"{RIG}/notes.md: points at forge/b…, outside the rig",
            f"{RIG}/helper.py:1: imports forge.build",
            f"{RIG}/helper.py:2:8: F401",
            f"{RIG}/helper.py:2: imports zebra",
            "stray/: has a server.py and no module in forge/rigs",
            "leak.txt:2: holds a Hugging Face token",
        ):
            self.assertIn(fault, found)
        self.assertNotIn("a" * 34, found, "the check repeats a secret")

    def test_faults_of_reports_are_named(self) -> None:
        good = sample_report().model_dump(mode="json")
        name = good["run"]["id"]
        self.edit(f"{RIG}/benchmarks/reports/{name}.json", json.dumps(good | {"strange": 1}))
        found = "\n".join(self.faults())
        self.assertIn(f"{RIG}/benchmarks/reports/{name}.json: ", found)
        self.assertIn("strange", found)

    def test_a_rig_that_cannot_be_built_is_a_fault(self) -> None:
        source = self.read(MODULE)
        self.edit(MODULE, source.replace("RIG = Rig(", "for _ in ():\n    pass\n\nRIG = Rig(", 1))
        found = [line for line in self.faults() if MODULE in line]
        self.assertEqual(len(found), 1, found)
        self.assertIn("top-level for", found[0])

    def test_size_is_told_and_what_was_added_since_the_last_commit(self) -> None:
        def git(*words: str) -> None:
            who = ("-c", "user.name=A Test", "-c", "user.email=test@localhost")
            done = self.run_in(self.root, "git", *who, *words)
            self.assertEqual(done.returncode, 0, done.stdout)

        if shutil.which("git") is None:
            self.skipTest("there is no git")
        git("init", "--quiet")
        self.addCleanup(shutil.rmtree, self.root / ".git")
        git("add", ".")
        git("commit", "--quiet", "--message", "before")
        server = self.read(f"{RIG}/server.py")
        self.edit(f"{RIG}/server.py", server + "#\n" * 7)
        checked = self.forge("check").stdout
        lines = server.count("\n") + 7
        self.assertIn(
            f"{RIG}/server.py: {lines:,} lines (+7 since the last commit); ", checked, checked
        )
        self.edit(f"{RIG}/server.py", server + "#\n" * (MAX_LINES + 1 - server.count("\n")))
        checked = self.forge("check").stdout
        self.assertIn(f"server.py has {MAX_LINES + 1:,} lines, {MAX_LINES:,} may be", checked)


def good_tool(name: str = "get_help", **changes: Any) -> Tool:
    """A tool without a fault, but for `changes`."""
    text = {"type": "string", "maxLength": 10, "description": "A text."}
    fields: dict[str, Any] = {
        "name": name,
        "title": "Help",
        "description": "Helps.",
        "annotations": ToolAnnotations(read_only_hint=True),
        "input_schema": {
            "type": "object",
            "properties": {"text": text},
            "additionalProperties": False,
        },
    }
    return Tool(**(fields | changes))


def with_parameter(**schema: Any) -> Tool:
    properties = {"it": {"description": "A parameter.", **schema}}
    return good_tool(
        input_schema={"type": "object", "properties": properties, "additionalProperties": False}
    )


class ToolRuleTests(unittest.TestCase):
    def the_fault(self, *tools: Tool) -> str:
        faults = list(tool_faults(tools))
        self.assertEqual(len(faults), 1, faults)
        return faults[0]

    def test_a_good_tool_has_no_fault(self) -> None:
        self.assertEqual(list(tool_faults([good_tool()])), [])

    def test_names(self) -> None:
        longest = "create_tpu_queued_resource"
        self.assertEqual(list(tool_faults([good_tool(longest)])), [])
        self.assertIn("two tools are named get_help", self.the_fault(good_tool(), good_tool()))
        self.assertIn("not in forge/naming.py", self.the_fault(good_tool("get_nothing")))
        for name, fault in (("a" * 29, "has 29 characters"), ("get-help", "more than a-z")):
            faults = list(tool_faults([good_tool(name)]))
            self.assertTrue(any(fault in text for text in faults), faults)
        self.assertFalse(any("characters" in text for text in tool_faults([good_tool("a" * 28)])))

    def test_words_and_hints(self) -> None:
        self.assertIn("has no description", self.the_fault(good_tool(description=" ")))
        self.assertIn("has no title", self.the_fault(good_tool(title=None)))
        self.assertIn("has no annotations", self.the_fault(good_tool(annotations=None)))
        writes = ToolAnnotations(read_only_hint=False)
        self.assertIn("whether it destroys", self.the_fault(good_tool(annotations=writes)))
        open_schema = {"type": "object", "properties": {}}
        self.assertIn("unknown arguments", self.the_fault(good_tool(input_schema=open_schema)))

    def test_bounds(self) -> None:
        bounded: list[dict[str, Any]] = [
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^a$"},
            {"type": "string", "enum": ["a", "b"]},
            {"type": "integer", "minimum": 1, "maximum": 2},
            {"type": "number", "exclusiveMinimum": 1, "maximum": 2},
            {"type": "boolean"},
            {"type": "array", "maxItems": 3, "items": {"type": "boolean"}},
            {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
        ]
        for schema in bounded:
            self.assertEqual(list(tool_faults([with_parameter(**schema)])), [], schema)
        unbounded: list[tuple[dict[str, Any], str]] = [
            ({"type": "string"}, "text without an end"),
            ({"type": "integer", "minimum": 1}, "greatest value"),
            ({"type": "number", "maximum": 1}, "least value"),
            ({"type": "array", "items": {"type": "boolean"}}, "list without an end"),
            ({"type": "array", "maxItems": 3, "items": {"type": "string"}}, "text without an end"),
            ({"anyOf": [{"type": "null"}, {"type": "string"}]}, "text without an end"),
            ({"type": "object"}, "any key"),
            ({}, "any type"),
        ]
        for schema, fault in unbounded:
            self.assertIn(fault, self.the_fault(with_parameter(**schema)), schema)

    def test_a_definition_is_followed(self) -> None:
        tool = with_parameter(**{"$ref": "#/$defs/Name"})
        tool.input_schema["$defs"] = {"Name": {"type": "string"}}
        self.assertIn("text without an end", self.the_fault(tool))
        tool.input_schema["$defs"] = {"Name": {"type": "string", "maxLength": 3}}
        self.assertEqual(list(tool_faults([tool])), [])


class BudgetTests(unittest.TestCase):
    def test_the_vocabulary_is_o200k(self) -> None:
        """The number is another library's (bpe-openai 0.1.4); its cl100k_base counts 36."""
        tool = good_tool(
            description="Здравствуйте, как дела? 你好，世界", input_schema={"type": "object"}
        )
        self.assertEqual(token_count([tool]), 27)

    def test_the_number_of_tools(self) -> None:
        self.assertEqual(list(budget_faults([good_tool()] * MAX_TOOLS)), [])
        faults = list(budget_faults([good_tool()] * (MAX_TOOLS + 1)))
        self.assertEqual(len(faults), 1)
        self.assertIn("29 tools load by default, 28 may", faults[0])

    def test_the_number_of_tokens(self) -> None:
        tool = good_tool(description="word " * 100)
        each = token_count([tool, tool]) - token_count([tool])
        fitting = good_tool(description="word " * (100 + (MAX_TOKENS - 20) - each))
        self.assertLessEqual(token_count([fitting]), MAX_TOKENS)
        self.assertEqual(list(budget_faults([fitting])), [])
        faults = list(budget_faults([good_tool(description="word " * MAX_TOKENS)]))
        self.assertEqual(len(faults), 1)
        self.assertIn("7,000 may be", faults[0])


class ManifestRuleTests(ForgeCopyCase):
    """The rules that the clients' validators miss, over copies of real manifests."""

    def setUp(self) -> None:
        self.home = self.folder / RIG
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.root / RIG, self.home)
        (self.folder / ".claude-plugin").mkdir(exist_ok=True)
        shutil.copy(self.root / ".claude-plugin/marketplace.json", self.folder / ".claude-plugin")

    def change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.folder / name
        value = json.loads(path.read_text(encoding="utf-8"))
        change(value)
        path.write_text(json.dumps(value), encoding="utf-8")

    def the_fault(self) -> str:
        faults = [*manifest_faults(self.home), *marketplace_faults(self.folder)]
        self.assertEqual(len(faults), 1, faults)
        return faults[0]

    def test_what_is_committed_has_no_fault(self) -> None:
        self.assertEqual(list(manifest_faults(self.home)), [])
        self.assertEqual(list(marketplace_faults(self.folder)), [])

    def test_broken_json(self) -> None:
        (self.home / ".mcp.json").write_text("{")
        faults = list(manifest_faults(self.home))
        self.assertIn(".mcp.json is missing or no JSON object: run make build", faults)

    def test_marketplace_entries(self) -> None:
        file = ".claude-plugin/marketplace.json"
        self.change(file, lambda m: m["plugins"][0].update(source=f"./{RIG}x"))
        self.assertIn("is no folder of this repository", self.the_fault())
        self.change(file, lambda m: m["plugins"][0].update(source=RIG))
        self.assertIn("write ./<rig>", self.the_fault())
        self.change(file, lambda m: m["plugins"][0].update(source=f"./{RIG}", name="other"))
        self.assertIn(
            "plugin other: its name, plugin.json's and the folder's slug", self.the_fault()
        )

    def test_names(self) -> None:
        self.change(f"{RIG}/gemini-extension.json", lambda m: m.update(name="local_pytorch"))
        self.assertIn("name 'local_pytorch' is not the folder's slug", self.the_fault())

    def test_server_keys_and_starts(self) -> None:
        file = f"{RIG}/.agents/mcp_config.json"
        self.change(file, lambda m: m.update(mcpServers={"a_b": {}}))
        self.assertIn(f"must have the one key {RIG}", self.the_fault())
        self.change(file, lambda m: m.update(mcpServers={RIG: {"args": ["other.py"]}}))
        self.assertIn("must start launch.py", self.the_fault())

    def test_paths_of_components(self) -> None:
        file = f"{RIG}/.claude-plugin/plugin.json"
        self.change(file, lambda m: m.update(mcpServers="./mcp.json"))
        self.assertIn("mcpServers names ./mcp.json, which does not exist", self.the_fault())
        self.change(file, lambda m: m.update(mcpServers="./.mcp.json"))
        self.assertEqual(list(manifest_faults(self.home)), [])
        self.change(file, lambda m: m.update(author="Somebody"))
        self.assertIn("author must be an object", self.the_fault())

    def test_skill(self) -> None:
        skill = self.home / "skills" / f"{RIG}-management"
        text = (skill / "SKILL.md").read_text(encoding="utf-8")
        named = text.replace(f"name: {RIG}-management", f"name: {RIG}")
        (skill / "SKILL.md").write_text(named, encoding="utf-8")
        self.assertIn(f"name '{RIG}' is not its folder's", self.the_fault())
        for length, good in ((1024, True), (1025, False)):
            described = re.sub("(?m)^description: .*$", f'description: "{"x" * length}"', text)
            (skill / "SKILL.md").write_text(described, encoding="utf-8")
            self.assertEqual(list(manifest_faults(self.home)) == [], good)
        bare = re.sub("(?m)^description: .*$", "description: a rig: it serves", text)
        (skill / "SKILL.md").write_text(bare, encoding="utf-8")
        self.assertIn("description must be quoted", self.the_fault())
        (skill / "SKILL.md").write_text(text, encoding="utf-8")
        skill.rename(skill.with_name("other"))
        self.assertTrue(any("must hold the one skill" in f for f in manifest_faults(self.home)))


class TextRuleTests(TemporaryFolderCase):
    """Secrets and paths are put together here, so that this file holds none."""

    def test_shapes_that_no_file_may_hold(self) -> None:
        for text in (
            "/".join(("", "root", "work")),
            "/".join(("see ", "home", "ann", "x")),
            "/".join(("", "Users", "ann", "x")),
            "https://" + "pypi" + ".org/simple",
            "hf_" + "A1" * 17,
            "gh" + "p_" + "a" * 36,
            "AK" + "IA" + "A" * 16,
            "ya" + "29.a0" + "b" * 40,
            "AI" + "za" + "c" * 35,
            "dop" + "_v1_" + "0" * 64,
            "sk" + "-proj-" + "d" * 40,
            "-----BEGIN " + "PRIVATE KEY-----\n" + "e" * 64,
        ):
            path = self.folder / "file.txt"
            path.write_text(f"one\n{text}\n")
            faults = list(forbidden_faults([path], self.folder))
            self.assertEqual(len(faults), 1, text)
            self.assertTrue(faults[0].startswith("file.txt:2: holds a"), faults[0])
            self.assertNotIn(text, faults[0])

    def test_ordinary_text_passes(self) -> None:
        path = self.folder / "file.txt"
        path.write_text(
            "src/root/x ~/work /home/you/x hf_token AKIA sk-short https://huggingface.co/x "
            "export HF_TOKEN=hf_yourtoken\n" + "hf_" + "CANARYcanary" * 3 + "\n"
        )
        self.assertEqual(list(forbidden_faults([path], self.folder)), [])

    def test_pointers_out_of_a_rig(self) -> None:
        home = self.folder / "repository" / "gpu-vllm-t4-2b"
        (home / ".claude").mkdir(parents=True)
        siblings = ["gpu-vllm-t4-2b-q4_0"]
        for name, text, fault in (
            (".claude/CLAUDE.md", "@../AGENTS.md", ""),
            ("a.md", "[x](tests/a.md) is the rig's own?", "tests/a"),
            ("a.md", "an attack: ../../etc/passwd", ""),
            ("a.md", "[x](../MODELS.md)", "../MODELS.md"),
            ("a.md", "cp gpu-vllm-t4-2b-q4_0/tpu.env .", "gpu-vllm-t4-2b-q4_0/"),
            ("a.md", "unlike gpu-vllm-t4-2b-q4_0, it is quick", ""),
            ("server.py", "# Built from forge/rigs/a.py by `python3 -m forge.build`: there.", ""),
            ("server.py", "# see forge/rigs/a.py", "forge/r"),
        ):
            (home / name).write_text(text + "\n")
            faults = list(outside_faults(home, siblings))
            (home / name).unlink()
            self.assertEqual(bool(faults), bool(fault), (text, faults))
            if fault:
                self.assertIn(f"{name}: points at {fault}", faults[0])
        (self.folder / "elsewhere.txt").write_text("")
        (home / "link.txt").symlink_to(self.folder / "elsewhere.txt")
        self.assertIn("link.txt: is a link", "".join(outside_faults(home, siblings)))

    def test_imports_that_no_rig_carries(self) -> None:
        home = self.folder / "rig"
        home.mkdir()
        (home / "launch.py").write_text("import os\n")
        (home / "a.py").write_text(
            "import json, mcp.types\nfrom pydantic import Field\nimport launch\n"
            "def f():\n    import torch\n    from gpu_vllm_t4_2b import server\n"
        )
        self.assertEqual(
            list(import_faults(home)),
            ["a.py:6: imports gpu_vllm_t4_2b, which no rig carries: drop it"],
        )


if __name__ == "__main__":
    unittest.main()
