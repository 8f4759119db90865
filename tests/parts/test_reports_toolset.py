"""The reports toolset through a real MCP client, over real folders; and how reports are saved."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import unittest
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from mcp import Client
from mcp.types import CallToolResult, ImageContent, TextContent

from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries.report_store import ReportStore, SavedReport, checked_report_name
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.report_schema import MOST_CELLS, BenchReport
from forge.parts.toolsets.reports import ReportsToolset, report_store, save_report
from forge.report_faults import report_faults
from forge.report_import import judged_here
from forge.rigs.local_pytorch_cpu_2b import RIG
from tests.parts.report_samples import cell, lost_cell, report
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
NAME = "2026-03-04-gemma4-e2b-vllm-v6e1"
MODES = ("legacy", "auto")
# What a report's name may not be: each would open something else, or break a line.
BAD_NAMES = (
    "",
    " ",
    ".",
    "..",
    "../" + NAME,
    NAME + "/",
    NAME + "/../" + NAME,
    NAME + ".json",
    NAME + "\n",
    NAME + "\x00",
    "/etc/passwd",
    "--help",
    "-x",
    "$(touch P)",
    "; touch P #",
    "%2e%2e%2f" + NAME,
    NAME.upper(),
    NAME + "--r1",
    "ＡＢＣ",
    "a\u202eb",
    "a" * 10_000,
)


class ReportsCase(unittest.TestCase):
    """A rig with the reports toolset alone, its state and its folder temporary."""

    checkout = False

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.base = Path(scratch.name).resolve()
        keys = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "MPLCONFIGDIR": "mpl"}
        values = {key: str(self.base / name) for key, name in keys.items()}
        patch = mock.patch.dict(os.environ, values)
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = self.base / "plugins" / "a-rig"
        self.folder.mkdir(parents=True)
        (self.folder / "server.py").write_text("# stands for the built server\n")
        write_programs(self.folder)
        shutil.copy(ROOT / "local-pytorch-cpu-2b" / "tpu.env", self.folder)
        if self.checkout:
            (self.folder.parent / ".git").mkdir()
        rig = dataclasses.replace(RIG, toolsets=(ReportsToolset,))
        self.rig = AssembledRig(rig, self.folder / "server.py")
        self.state = self.rig.context.paths.state / "benchmarks"

    def session(self, steps: Callable[[Client], Awaitable[None]], mode: str = "auto") -> None:
        async def go() -> None:
            async with Client(self.rig.server(), mode=mode) as client:  # type: ignore[arg-type]
                await steps(client)

        asyncio.run(go())

    def call(self, tool: str, /, **arguments: Any) -> CallToolResult:
        answers: list[CallToolResult] = []

        async def steps(client: Client) -> None:
            answers.append(await client.call_tool(tool, arguments))

        self.session(steps)
        return answers[0]

    def good(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        answer = self.call(tool, **arguments)
        self.assertFalse(answer.is_error, answer.content)
        assert answer.structured_content is not None
        return answer.structured_content

    def text(self, answer: CallToolResult) -> str:
        return "\n".join(c.text for c in answer.content if isinstance(c, TextContent))

    def save(self, made: BenchReport, raw: Path | None = None) -> SavedReport:
        """`made` saved as a job saves it: the program beside the server judges it first."""
        return asyncio.run(save_report(self.rig.context, made, raw or self.raw()))

    def raw(self, text: str = '{"request": 1}\n') -> Path:
        path = self.base / "requests.jsonl"
        path.write_text(text)
        return path


class TestTools(ReportsCase):
    def test_the_tools_describe_themselves_and_only_read(self) -> None:
        async def steps(client: Client) -> None:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            for name in ("list_reports", "show_report", "compare_reports"):
                tool = tools[name]
                assert tool.annotations is not None
                self.assertIs(tool.annotations.read_only_hint, True)
                self.assertGreater(len(tool.description or ""), 100)
                self.assertIs(tool.input_schema["additionalProperties"], False)
                for parameter in tool.input_schema["properties"].values():
                    self.assertTrue(parameter.get("description") or parameter.get("enum"))

        for mode in MODES:
            with self.subTest(mode=mode):
                self.session(steps, mode)

    def test_without_reports_the_list_says_so(self) -> None:
        found = self.good("list_reports")
        self.assertEqual((found["reports"], found["total"]), ([], 0))
        self.assertFalse(self.state.exists(), "looking must not make folders")

    def test_a_saved_report_is_listed_shown_and_compared(self) -> None:
        for rate in (1200.0, 1260.0):
            made = report([cell(8, output_tps=rate, cv=0.01, repeats=3), cell(16)])
            self.save(made)
        found = self.good("list_reports", limit=10)
        self.assertEqual([r["name"] for r in found["reports"]], [f"{NAME}--r2", NAME])
        self.assertEqual(self.good("list_reports", limit=1)["total"], 2)
        shown = self.text(self.call("show_report", name=NAME))
        self.assertIn("| c8-i1024-o128 | 1,200 |", shown)
        compared = self.good("compare_reports", first=NAME, second=f"{NAME}--r2")
        self.assertTrue(compared["ranked"])
        line = next(c for c in compared["changes"] if c.startswith("c8-i1024-o128 output_tps"))
        self.assertIn("+5.0%", line)
        self.assertIn("±2.8%", line)
        self.assertTrue(line.endswith("better"))

    def test_both_protocols_carry_the_picture(self) -> None:
        lost = lost_cell(64, 1024, "failed", "it stalled")
        self.save(report([cell(), lost]))

        async def steps(client: Client) -> None:
            for view in ("curves", "heatmap"):
                answer = await client.call_tool("show_report", {"name": NAME, "view": view})
                self.assertFalse(answer.is_error, answer.content)
                images = [c for c in answer.content if isinstance(c, ImageContent)]
                self.assertEqual([i.mime_type for i in images], ["image/png"])
                data = base64.b64decode(images[0].data)
                self.assertTrue(data.startswith(b"\x89PNG\r\n\x1a\n"))
                self.assertIn("gemma-4-E2B-it", self.text(answer))

        for mode in MODES:
            with self.subTest(mode=mode):
                self.session(steps, mode)

    def test_a_failed_cell_is_shown_as_failed_never_as_zero(self) -> None:
        lost = lost_cell(64, 1024, "failed", "the stream stalled after 3 tokens")
        self.save(report([cell(), lost]))
        shown = self.text(self.call("show_report", name=NAME))
        row = next(line for line in shown.splitlines() if line.startswith("| c64-"))
        self.assertNotIn("0", row.split("|", 2)[2])
        self.assertIn("failed", row)
        self.assertIn("the stream stalled after 3 tokens", shown)

    def test_what_may_not_be_ranked_is_answered_not_ranked(self) -> None:
        self.save(report())
        self.save(report(engine={"name": "jax"}))
        other = NAME.replace("vllm", "jax")
        answer = self.good("compare_reports", first=NAME, second=other)
        self.assertFalse(answer["ranked"])
        self.assertEqual(answer["blocking"], ["runtime: vllm against jax"])
        self.assertEqual(answer["changes"], [])
        asked = self.good("compare_reports", first=NAME, second=other, question="runtime")
        self.assertTrue(asked["ranked"])

    def test_names_outside_the_grammar_are_refused_by_parameter(self) -> None:
        self.save(report())

        async def steps(client: Client) -> None:
            for bad in BAD_NAMES:
                for tool, arguments, parameter in (
                    ("show_report", {"name": bad}, "name"),
                    ("compare_reports", {"first": bad, "second": NAME}, "first"),
                    ("compare_reports", {"first": NAME, "second": bad}, "second"),
                ):
                    with self.subTest(tool=tool, bad=bad[:40]):
                        answer = await client.call_tool(tool, arguments)
                        self.assertTrue(answer.is_error)
                        self.assertRegex(self.text(answer), rf"^INVALID {parameter}\b")

        self.session(steps)

    def test_a_name_that_is_not_there_and_the_same_one_twice(self) -> None:
        self.assertRegex(self.text(self.call("show_report", name=NAME)), r"^NOT_FOUND ")
        twice = self.text(self.call("compare_reports", first=NAME, second=NAME))
        self.assertRegex(twice, r"^INVALID second")

    def test_links_are_not_followed(self) -> None:
        self.save(report())
        inside = self.state / "reports"
        outside = self.base / "elsewhere.json"
        shutil.move(inside / f"{NAME}.json", outside)
        (inside / f"{NAME}.json").symlink_to(outside)
        self.assertRegex(self.text(self.call("show_report", name=NAME)), r"^NOT_FOUND ")
        (inside / f"{NAME}.json").unlink()
        inside.rename(self.base / "moved")
        shutil.move(outside, self.base / "moved" / f"{NAME}.json")
        inside.symlink_to(self.base / "moved")
        self.assertRegex(self.text(self.call("show_report", name=NAME)), r"^NOT_FOUND ")

    def test_a_damaged_file_hides_no_other_and_hangs_nothing(self) -> None:
        self.save(report())
        inside = self.state / "reports"
        (inside / f"{NAME}--r2.json").write_text('{"schema_version": "2.0"')
        (inside / f"{NAME}--r3.json").write_bytes(b"\xff\xfe\x00")
        os.mkfifo(inside / f"{NAME}--r4.json")
        shutil.copy(inside / f"{NAME}.json", inside / f"{NAME}--r5.json")
        (inside / "notes.json").write_text("{}")
        found = {r["name"]: r["fault"] for r in self.good("list_reports")["reports"]}
        self.assertEqual(len(found), 5)
        self.assertEqual([name for name, fault in found.items() if not fault], [NAME])
        self.assertRegex(self.text(self.call("show_report", name=f"{NAME}--r2")), r"^PARTIAL ")


class TestSaving(ReportsCase):
    def test_names_do_not_collide_on_one_day(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            raw = self.raw()
            jobs = [pool.submit(self.save, report(), raw) for _ in range(8)]
            names = [job.result().name for job in jobs]
        repeats = ["", *(f"--r{n}" for n in range(2, 9))]
        self.assertEqual(sorted(names), sorted(NAME + mark for mark in repeats))
        for path in (self.state / "reports").iterdir():
            self.assertEqual(json.loads(path.read_text())["run"]["id"], path.stem)

    def test_the_raw_data_lies_beside_it_under_its_hash(self) -> None:
        saved = self.save(report(), self.raw('{"a": 1}\n{"a": 2}\n'))
        (record,) = saved.report.raw
        data = (self.state / record.path).read_bytes()
        self.assertEqual(hashlib.sha256(data).hexdigest(), record.sha256)
        self.assertEqual((data, record.size), (b'{"a": 1}\n{"a": 2}\n', 18))
        self.assertEqual(report_faults(saved.files[0]), [])
        (self.state / record.path).write_bytes(data + b"x")
        self.assertEqual(len(report_faults(saved.files[0])), 1)

    def test_the_server_and_the_rig_are_named(self) -> None:
        saved = self.save(report(run={"rig": ""}))
        digest = hashlib.sha256((self.folder / "server.py").read_bytes()).hexdigest()
        self.assertTrue(digest.startswith(saved.report.engine.server.partition("+")[2]))
        self.assertEqual(saved.report.run.rig, RIG.name)

    def test_an_impossible_cell_is_saved_as_failed(self) -> None:
        made = report([cell()])
        assert made.cells[0].metrics is not None
        fast = made.cells[0].metrics.model_copy(update={"output_tps": 1e7, "request_rps": 1e5})
        lie = made.cells[0].model_copy(update={"metrics": fast})
        saved = self.save(made.model_copy(update={"cells": [lie]}))
        self.assertEqual(saved.report.cells[0].status, "failed")
        self.assertEqual(report_faults(saved.files[0]), [])

    def test_nothing_private_is_written(self) -> None:
        token = "hf_CANARYcanaryCANARY1234"
        secrets = {
            "HF_TOKEN": token,
            "MY_API_KEY": "correct-horse-battery",
        }
        made = report(
            engine={
                "argv": ["--api-key", "correct-horse-battery", "--model", "/home/ada/models/m"],
                "resolved": {"host": "203.0.113.7", "project": "some-project-123"},
            },
            notes=[f"token {token}", "listening on 203.0.113.7:8000", "in some-project-123"],
        )
        raw = self.raw(f'{{"url": "http://203.0.113.7:8000/v1", "t": "{token}"}}\n')
        with mock.patch.dict(os.environ, secrets):
            store = ReportStore([self.state], judged_here)
            saved = asyncio.run(store.save(made, raw, private=["some-project-123"]))
        written = b"".join(
            path.read_bytes() for path in self.state.rglob("*") if path.is_file()
        ).decode()
        for word in (token, "correct-horse", "203.0.113.7", "some-project-123", "/home/ada"):
            with self.subTest(word=word):
                self.assertNotIn(word, written)
        self.assertIn("…/m", written)
        self.assertEqual(report_faults(saved.files[0]), [])

    def test_files_are_private_and_whole(self) -> None:
        saved = self.save(report())
        left = [p.name for p in self.state.rglob("*") if p.is_file()]
        self.assertEqual(sorted(left), sorted([f"{NAME}.json", "requests.jsonl"]))
        self.assertEqual(saved.files[0].stat().st_mode & 0o777, 0o600)

    def test_a_folder_that_cannot_be_written_is_denied(self) -> None:
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.state.write_text("in the way")
        with self.assertRaises(RigError) as caught:
            self.save(report())
        self.assertEqual(caught.exception.error_class, "DENIED")

    def test_the_journal_says_what_was_saved(self) -> None:
        self.save(report())
        events = self.rig.context.journal.entries()
        self.assertEqual([(e["event"], e["report"]) for e in events], [("report_saved", NAME)])

    def test_an_installed_plugin_keeps_nothing_in_its_folder(self) -> None:
        before = {path.name for path in self.folder.iterdir()}
        saved = self.save(report())
        self.assertEqual(len(saved.files), 1)
        after = {path.name for path in self.folder.iterdir()} - {"__pycache__"}
        self.assertEqual(after, before)


class TestUnjudged(ReportsCase):
    """Whatever keeps the gate from judging, no report is written and the raw data is named."""

    def refused(self) -> RigError:
        with self.assertRaises(RigError) as caught:
            self.save(report())
        self.assertEqual(caught.exception.error_class, "PARTIAL")
        for words in ("no report was written", str(self.raw())):
            self.assertIn(words, caught.exception.what)
        self.assertTrue(self.raw().is_file())
        self.assertEqual([path for path in self.state.rglob("*") if path.is_file()], [])
        self.assertEqual(list(self.rig.context.journal.entries()), [])
        return caught.exception

    def test_a_missing_program(self) -> None:
        (self.folder / "judge.py").unlink()
        error = self.refused()
        self.assertIn("judge.py is not beside server.py", error.what)
        self.assertIn("restore", error.next_step)

    def test_a_program_that_fails_and_one_that_answers_something_else(self) -> None:
        for text in ("import sys; sys.exit('no tables')\n", "print('{}')\n"):
            with self.subTest(text):
                (self.folder / "judge.py").write_text(text)
                self.assertIn("judge.py gave no answer", self.refused().what)

    def test_the_reports_that_there_are_can_still_be_read(self) -> None:
        self.save(report())
        (self.folder / "judge.py").unlink()
        self.assertEqual(self.good("list_reports")["total"], 1)
        self.assertIn("c8-i1024-o128", self.text(self.call("show_report", name=NAME)))

    def test_a_store_writes_what_its_judge_gave_and_nothing_without_one(self) -> None:
        with self.assertRaises(TypeError):
            ReportStore([self.state])  # type: ignore[call-arg]
        seen = []

        async def marking(made: BenchReport) -> BenchReport:
            seen.append(made)
            return made.model_copy(update={"notes": ["judged"]})

        async def failing(made: BenchReport) -> BenchReport:
            raise RigError("TIMEOUT", "it took too long")

        saved = asyncio.run(ReportStore([self.state], marking).save(report()))
        self.assertEqual(seen, [report()])
        self.assertEqual(json.loads(saved.files[0].read_text())["notes"], ["judged"])
        with self.assertRaises(RigError) as caught:
            asyncio.run(ReportStore([self.state], failing).save(report()))
        self.assertEqual(
            str(caught.exception),
            "PARTIAL no report was written, because nothing could judge it: it took too long.",
        )
        self.assertEqual(ReportStore([self.state], failing).names(), [NAME])


class TestCheckout(ReportsCase):
    checkout = True

    def test_a_checkout_gets_its_copy_and_it_is_preferred(self) -> None:
        saved = self.save(report())
        ours = self.folder / "benchmarks" / "reports" / f"{NAME}.json"
        self.assertEqual(saved.files, (self.state / "reports" / f"{NAME}.json", ours))
        self.assertEqual(saved.files[0].read_bytes(), ours.read_bytes())
        self.assertEqual(report_faults(ours), [])
        corrected = saved.report.model_copy(
            update={"run": saved.report.run.model_copy(update={"retracted": "a wrong clock"})}
        )
        ours.write_text(corrected.model_dump_json(exclude_none=True))
        self.assertIn("RETRACTED", self.text(self.call("show_report", name=NAME)))
        self.assertEqual(self.good("list_reports")["total"], 1)

    def test_a_name_taken_in_the_checkout_is_not_reused(self) -> None:
        first = self.save(report())
        first.files[0].unlink()
        self.assertEqual(self.save(report()).name, f"{NAME}--r2")


class TestStore(unittest.TestCase):
    def test_only_run_ids_are_names(self) -> None:
        for bad in BAD_NAMES:
            with self.subTest(bad=bad[:40]), self.assertRaises(RigError):
                checked_report_name("name", bad)
        self.assertEqual(checked_report_name("name", f"{NAME}--r12"), f"{NAME}--r12")

    def test_the_newest_day_comes_first_and_repeats_count_as_numbers(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            inside = Path(scratch) / "reports"
            inside.mkdir()
            marks = ["", "--r2", "--r10"]
            for name in (
                f"2026-01-0{day}-gemma4-e2b-vllm-v6e1{m}" for day in (1, 2) for m in marks
            ):
                (inside / f"{name}.json").touch()
            names = ReportStore([Path(scratch)], judged_here).names()
        self.assertEqual(names[0], "2026-01-02-gemma4-e2b-vllm-v6e1--r10")
        self.assertEqual(names[-1], "2026-01-01-gemma4-e2b-vllm-v6e1")
        self.assertEqual(len(names), 6)

    def test_the_largest_grid_is_below_the_limit(self) -> None:
        cells = [cell(c, i) for c in range(1, 51) for i in range(1000, 1000 + MOST_CELLS // 50)]
        self.assertEqual(len(cells), MOST_CELLS)
        made = report(cells, run={"kind": "imported", "origin": "a page"})
        with tempfile.TemporaryDirectory() as scratch:
            store = ReportStore([Path(scratch)], judged_here)
            saved = asyncio.run(store.save(made))
            self.assertIsInstance(store.read(saved.name), BenchReport)


class TestContext(ReportsCase):
    def test_the_store_of_a_rig_is_its_state_folder(self) -> None:
        self.assertEqual(report_store(self.rig.context).folders, (self.state,))


if __name__ == "__main__":
    unittest.main()
