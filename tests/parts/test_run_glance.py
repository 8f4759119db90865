"""The newest run of a folder in a line: real reports, damaged ones, and what is no report."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.report_store import ReportStore
from forge.parts.boundaries.run_glance import RunGlance, newest_run
from forge.report_import import judged_here
from tests.parts.report_samples import cell, lost_cell, report

UNREADABLE = "the file cannot be read as a report"


class GlanceCase(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.benchmarks = Path(scratch.name) / "benchmarks"
        self.folder = self.benchmarks / "reports"
        self.folder.mkdir(parents=True)

    def write(self, name: str, content: Any, changed: int = 1000) -> Path:
        """A file of that name; `changed` is when it was written last."""
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        os.utime(path, (changed, changed))
        return path

    def line(self) -> str:
        found = newest_run(self.folder)
        assert found is not None
        return found.line


class BenchmarkTest(GlanceCase):
    def test_a_saved_report_is_one_line(self) -> None:
        cells = [
            cell(1, output_tps=150.0),
            cell(8, output_tps=1200.0),
            lost_cell(64, 1024, "failed", "out of memory"),
        ]
        store = ReportStore((self.benchmarks,), judged_here)
        saved = asyncio.run(store.save(report(cells, planned_cells=4)))
        self.assertEqual(
            newest_run(self.folder),
            RunGlance(
                saved.name,
                "2026-03-04",
                "google/gemma-4-E2B-it (bf16), vllm, v6e1: 2 of 4 cells usable, at best 1200.0 "
                f"output tokens/s at {cells[1].id}",
            ),
        )

    def test_a_cell_that_may_not_be_believed_is_not_the_best(self) -> None:
        fields = json.loads(report([cell(1, output_tps=150.0), cell(8)]).model_dump_json())
        for change in (
            {"client": {"trustworthy": False}},
            {"implied": {"checks": ["needs 3 times the bandwidth that the chip has"]}},
            {"status": "failed", "metrics": None},
        ):
            with self.subTest(change):
                fields["cells"][1] |= change
                self.write("2026-03-04-a.json", fields)
                self.assertIn("1 of 2 cells usable, at best 150.0 ", self.line())
                fields["cells"][1] |= {"client": None, "implied": None, "status": "ok"}

    def test_without_a_usable_cell_there_is_no_best(self) -> None:
        fields = json.loads(report([lost_cell(8, 1024, "failed", "why")]).model_dump_json())
        self.write("2026-03-04-a.json", fields)
        self.assertTrue(self.line().endswith(": 0 of 1 cells usable"), self.line())

    def test_a_retracted_report_says_so_and_nothing_else(self) -> None:
        fields = json.loads(report().model_dump_json())
        fields["run"]["retracted"] = "the clock was wrong"
        self.write("2026-03-04-a.json", fields)
        self.assertTrue(self.line().endswith(": RETRACTED"), self.line())

    def test_probes_are_counted_by_verdict(self) -> None:
        fields = json.loads(report().model_dump_json())
        verdicts = ["pass", "silent", "pass", "pass", "untested"]
        fields["findings"] = [{"case": f"c{i}", "verdict": v} for i, v in enumerate(verdicts)]
        self.write("2026-03-04-a.json", fields)
        self.assertTrue(self.line().endswith(": 3 pass, 1 silent, 1 untested"), self.line())
        fields["run"]["state"] = "cancelled"
        self.write("2026-03-04-a.json", fields)
        self.assertTrue(self.line().endswith("1 untested (cancelled)"), self.line())


class NewestTest(GlanceCase):
    def newest(self) -> str | None:
        found = newest_run(self.folder)
        return None if found is None else found.name

    def test_the_day_decides_and_within_a_day_the_writing(self) -> None:
        self.write("2026-03-05-a.json", {}, changed=1)
        self.write("2026-03-04-b.json", {}, changed=9)
        self.assertEqual(self.newest(), "2026-03-05-a")
        self.write("2026-03-05-a--r2.json", {}, changed=2)
        self.write("2026-03-05-0.json", {}, changed=3)
        self.assertEqual(self.newest(), "2026-03-05-0")

    def test_what_is_not_named_as_a_run_is_not_looked_at(self) -> None:
        for name in (
            "notes.json",
            "2026-03-05-a.txt",
            ".2026-03-05-a.json.part",
            "2026-3-5-a.json",
        ):
            self.write(name, {})
        (self.folder / "2026-03-06-folder.json").mkdir()
        self.assertIsNone(self.newest())

    def test_no_folder_and_an_empty_one(self) -> None:
        self.assertIsNone(newest_run(self.folder))
        self.assertIsNone(newest_run(self.folder / "none"))
        path = self.write("2026-03-04-a.json", {})
        self.assertIsNone(newest_run(path))

    def test_a_link_is_not_followed(self) -> None:
        target = self.benchmarks / "elsewhere.json"
        target.write_text(report().model_dump_json())
        (self.folder / "2026-03-04-link.json").symlink_to(target)
        self.assertIsNone(self.newest())

    def test_damage_is_said(self) -> None:
        good = json.loads(report().model_dump_json())
        without = [
            {k: v for k, v in good.items() if k != key} for key in ("subject", "cells", "run")
        ]
        odd = [good | {"cells": 7}, good | {"subject": []}, good | {"planned_cells": "many"}]
        odd += [good | {"cells": [{"status": "ok"}]}, good | {"findings": [{}]}]
        odd += [good | {"findings": 1}, good | {"engine": {}}]
        for content in (
            "",
            "{",
            "[]",
            "null",
            "[" * 100_000,
            "\ud800"[:0] + "\x00",
            *without,
            *odd,
        ):
            with self.subTest(str(content)[:40]):
                self.write("2026-03-04-a.json", content)
                self.assertEqual(self.line(), UNREADABLE)

    def test_a_file_beyond_all_bounds_is_not_read(self) -> None:
        path = self.write("2026-03-04-a.json", report().model_dump_json())
        with path.open("a") as file:
            file.truncate(9_000_000)
        self.assertEqual(self.line(), UNREADABLE)

    def test_a_pipe_in_the_place_of_a_report_is_passed_over(self) -> None:
        os.mkfifo(self.folder / "2026-03-04-pipe.json")
        self.assertIsNone(self.newest())

    def test_the_line_is_short_clean_and_without_secrets(self) -> None:
        fields = json.loads(report().model_dump_json())
        fields["subject"]["model"] = "x" * 5000 + "\x1b[31m\u202e"
        fields["engine"]["name"] = "hf_AAAAAAAAAA11"
        self.write("2026-03-04-a.json", fields)
        self.assertLess(len(self.line()), 400)
        for hidden in ("hf_AAAAAAAAAA11", "\x1b", "\u202e"):
            self.assertNotIn(hidden, self.line())


if __name__ == "__main__":
    unittest.main()
