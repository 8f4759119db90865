"""The documents that a rig writes about itself, made from its live tool list."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from mcp import Client

from forge.parts.assembly.documents import pack_skill, rig_documents, write_documents
from forge.parts.assembly.rig import AssembledRig
from forge.rigs.local_pytorch_cpu_2b import RIG

SKILL = "skills/local-pytorch-cpu-2b-management"


class DocumentsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        places = {"XDG_STATE_HOME": str(self.place / "s"), "XDG_CACHE_HOME": str(self.place / "c")}
        patch = mock.patch.dict(os.environ, {"PATH": os.environ["PATH"], **places}, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = self.place / "rig"
        self.folder.mkdir()
        self.write("server.py", "# the server\n")
        self.write("tpu.env", "MODEL_NAME=embedded\nPORT=2000\n")
        self.write("requirements.txt", "mcp\n")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def rig(self, name: str = RIG.name) -> AssembledRig:
        return AssembledRig(dataclasses.replace(RIG, name=name), self.folder / "server.py")

    def documents(self) -> dict[str, str]:
        return rig_documents(self.rig())

    def listed(self) -> dict[str, dict[str, object]]:
        """Every tool as a client gets it: its name with its input schema's properties."""

        async def ask() -> dict[str, dict[str, object]]:
            async with Client(self.rig().server()) as client:
                tools = (await client.list_tools()).tools
            return {tool.name: tool.input_schema.get("properties", {}) for tool in tools}

        return asyncio.run(ask())

    def test_the_tool_list_has_every_tool_and_parameter_that_a_client_gets(self) -> None:
        text = self.documents()["GemmaTools.md"]
        for name, parameters in self.listed().items():
            self.assertEqual(text.count(f"\n### {name}\n"), 1)
            section = text.split(f"\n### {name}\n")[1].split("\n###")[0]
            for parameter in parameters:
                self.assertIn(f"| `{parameter}` |", section)
            if not parameters:
                self.assertIn("No parameters.", section)
        self.assertEqual(text.count("\n### "), len(self.listed()))

    def test_every_table_is_a_table(self) -> None:
        rows = 0
        width = 0
        for line in self.documents()["GemmaTools.md"].split("\n"):
            if not line.startswith("|"):
                width = 0
                continue
            cells = line.count("|")
            width = width or cells
            self.assertEqual(cells, width, line)
            rows += 1
        self.assertGreater(rows, 20)

    def test_bounds_and_defaults_are_shown(self) -> None:
        text = self.documents()["GemmaTools.md"]
        self.assertIn("| `wait_s` | number, from 0 to 50 | `0` |", text)
        self.assertIn("| `lines` | integer, from 1 to 2000 | `100` |", text)
        self.assertRegex(text, r"\| `prompt` \| string[^|]* \| required \|")

    def test_the_skill_carries_the_server_as_it_is(self) -> None:
        documents = self.documents()
        for name in ("server.py", "tpu.env", "requirements.txt"):
            carried = documents[f"{SKILL}/mcp/{name}"]
            self.assertEqual(carried, (self.folder / name).read_text())
        self.assertNotIn(f"{SKILL}/mcp/launch.py", documents, "what is not there is not carried")
        self.write("launch.py", "# launch\n")
        self.assertEqual(self.documents()[f"{SKILL}/mcp/launch.py"], "# launch\n")

    def test_the_skills_head_is_what_clients_accept(self) -> None:
        text = self.documents()[f"{SKILL}/SKILL.md"]
        head = dict(line.split(": ", 1) for line in text.split("---\n")[1].strip().split("\n"))
        self.assertRegex(head["name"], r"\A[a-z0-9]+(-[a-z0-9]+)*\Z")
        self.assertEqual(head["name"], Path(SKILL).name)
        self.assertLessEqual(len(head["name"]), 64)
        self.assertLessEqual(len(json.loads(head["description"])), 1024)
        self.assertLess(text.count("\n"), 500)
        for name in self.listed():
            self.assertIn(f"- `{name}` (", text)

    def test_an_underscore_in_the_rigs_name_is_in_no_published_name(self) -> None:
        documents = rig_documents(self.rig("local-x-1650ti-2b-q4_0"))
        skills = {name.split("/")[1] for name in documents if name.startswith("skills/")}
        self.assertEqual(skills, {"local-x-1650ti-2b-q4-0-management"})
        text = documents["skills/local-x-1650ti-2b-q4-0-management/SKILL.md"]
        self.assertIn("name: local-x-1650ti-2b-q4-0-management\n", text)
        self.assertIn("# local-x-1650ti-2b-q4_0\n", text)

    def test_in_the_readme_only_the_marked_lists_change(self) -> None:
        text = (
            "# Title\n\nWords | of `the` author.\n\n"
            "<!-- built: tools -->\nOUTDATED\n<!-- end -->\n\n"
            "More.\n<!-- built: settings -->\n<!-- end -->\n<!-- built: unknown -->\nkept\n"
            "<!-- end -->\n"
        )
        self.write("README.md", text)
        made = self.documents()["README.md"]
        pattern = re.compile(r"(<!-- built: (tools|settings) -->\n).*?<!-- end -->", re.S)
        self.assertEqual(pattern.sub(r"\1<!-- end -->", made), pattern.sub(r"\1<!-- end -->", text))
        self.assertNotIn("OUTDATED", made)
        tools, settings = (made.split(f"built: {name} -->")[1] for name in ("tools", "settings"))
        for name in self.listed():
            self.assertEqual(tools.split("<!-- end")[0].count(f"- `{name}`:"), 1)
        for name in RIG.settings.model_fields:
            self.assertEqual(settings.split("<!-- end")[0].count(f"- `{name.upper()}`:"), 1)
        self.write("README.md", made)
        self.assertEqual(self.documents()["README.md"], made, "a second run changes something")

    def test_without_a_readme_none_is_invented(self) -> None:
        self.assertNotIn("README.md", self.documents())

    def test_the_same_rig_gives_the_same_documents(self) -> None:
        self.assertEqual(self.documents(), self.documents())

    def test_no_document_names_the_machine_it_was_written_on(self) -> None:
        for name, text in self.documents().items():
            self.assertNotIn(str(self.place), text, name)
            self.assertNotIn(os.path.expanduser("~"), text, name)

    def test_a_fault_in_tpu_env_does_not_keep_documents_from_being_written(self) -> None:
        before = self.documents()["GemmaTools.md"]
        self.write("tpu.env", "garbage\n")
        self.assertEqual(self.documents()["GemmaTools.md"], before)

    def test_writing_twice_writes_once(self) -> None:
        first = write_documents(self.rig())
        self.assertEqual(sorted(first), sorted(self.documents()))
        for name in first:
            self.assertEqual((self.folder / name).read_text(), self.documents()[name])
        stamps = {p: p.stat().st_mtime_ns for p in self.folder.rglob("*") if p.is_file()}
        self.assertEqual(write_documents(self.rig()), [])
        self.assertEqual(
            {p: p.stat().st_mtime_ns for p in self.folder.rglob("*") if p.is_file()}, stamps
        )

    def test_only_what_differs_is_written(self) -> None:
        write_documents(self.rig())
        self.write("tpu.env", "MODEL_NAME=embedded\nPORT=3000\n")
        self.assertEqual(write_documents(self.rig()), [f"{SKILL}/mcp/tpu.env"])

    def test_a_skill_file_of_an_older_build_goes_and_nothing_else_does(self) -> None:
        stale = self.write(f"{SKILL}/mcp/old_server.py", "old")
        mine = self.write("notes.md", "the author's own")
        write_documents(self.rig())
        self.assertFalse(stale.exists())
        self.assertEqual(mine.read_text(), "the author's own")

    def test_the_packed_skill_holds_the_skill_and_nothing_else(self) -> None:
        self.write("secret.txt", "not for upload")
        write_documents(self.rig())
        path = pack_skill(self.rig())
        self.assertEqual(path, self.folder / "dist" / "local-pytorch-cpu-2b-management.zip")
        with zipfile.ZipFile(path) as archive:
            names = {name for name in archive.namelist() if not name.endswith("/")}
            self.assertEqual(
                names,
                {
                    name.removeprefix("skills/")
                    for name in self.documents()
                    if name.startswith("skills/")
                },
            )
            self.assertEqual(
                archive.read("local-pytorch-cpu-2b-management/mcp/server.py"), b"# the server\n"
            )


if __name__ == "__main__":
    unittest.main()
