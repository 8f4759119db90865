"""The roll-up over trees of reports, and the reports of this repository."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from forge.parts.boundaries.report_store import report_as_json
from forge.parts.knowledge.report_schema import BenchReport, health_of_client
from forge.report_faults import report_faults
from forge.rollup import ROLLUP_FILE, SCHEMA_FILE, report_paths, rollup_files, tree_faults
from tests.parts.report_samples import cell, lost_cell, report

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = {"kind": "imported", "origin": "a public page"}


class TestThisRepository(unittest.TestCase):
    def test_every_report_in_the_tree_is_in_order(self) -> None:
        self.assertEqual(tree_faults(ROOT), [])
        self.assertGreaterEqual(len(report_paths(ROOT)), 9)

    def test_imported_figures_say_what_they_do_not_know(self) -> None:
        for path in (ROOT / "benchmarks/imported/reports").glob("*.json"):
            with self.subTest(path=path.name):
                made = BenchReport.model_validate_json(path.read_text(encoding="utf-8"))
                self.assertEqual(made.run.kind, "imported")
                self.assertEqual(made.token_source, "unknown")
                self.assertTrue(all(c.client is None for c in made.cells))


class TreeCase(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.rig = self.root / "tpu-vllm-v6e1-2b"
        self.rig.mkdir()
        (self.rig / "server.py").write_text("# a server\n")

    def put(self, made: BenchReport, home: str = "") -> Path:
        folder = (self.root / home if home else self.rig / "benchmarks") / "reports"
        folder.mkdir(parents=True, exist_ok=True)
        if made.run.kind == "measured":
            raw = folder.parent / "runs" / made.run.id / "requests.jsonl"
            raw.parent.mkdir(parents=True)
            raw.write_text("{}\n")
            digest = hashlib.sha256(b"{}\n").hexdigest()
            record = {"path": f"runs/{made.run.id}/requests.jsonl", "sha256": digest, "size": 3}
            made = BenchReport.model_validate(made.model_dump() | {"raw": [record]})
        path = folder / f"{made.run.id}.json"
        path.write_text(report_as_json(made))
        return path

    def build(self) -> str:
        """The hash that a report of the rig's present server cites."""
        digest = hashlib.sha256((self.rig / "server.py").read_bytes()).hexdigest()
        return f"0.1.0+{digest[:12]}"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "forge.rollup", "--root", str(self.root), *words]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)

    def rows(self) -> list[str]:
        text = rollup_files(self.root)[ROLLUP_FILE]
        return [line for line in text.split("## Reports")[0].splitlines() if "| gemma4" in line]


class TestRollup(TreeCase):
    def test_best_and_typical_come_from_usable_cells_only(self) -> None:
        tired = health_of_client(0.99, 1.0, 0.0)
        sweep = [
            cell(1, output_tps=150),
            cell(8, output_tps=1200, ttft_ms=31),
            cell(32, output_tps=1700, tpot_ms=18),
            cell(64, output_tps=9999, tpot_ms=6.2, client=tired),
            lost_cell(100, 1024, "failed", "refused"),
        ]
        self.put(report(sweep, engine={"server": self.build()}))
        (row,) = self.rows()
        self.assertIn("1,700 (c32-i1024-o128)", row)
        self.assertIn("1,200 (c8-i1024-o128) | 31 |", row)
        self.assertNotIn("9,999", row)
        self.assertNotIn("older build", row)

    def test_imported_and_older_builds_are_marked_and_kept_apart(self) -> None:
        self.put(report([cell(output_tps=1100)], engine={"server": self.build()}))
        self.put(report([cell(output_tps=1250)], run=IMPORTED, repeat=2), "benchmarks/imported")
        imported, measured = sorted(self.rows(), key=lambda row: "imported" not in row)
        self.assertIn("1,250", imported)
        self.assertIn("1,100", measured)
        self.assertNotIn("older build", measured)
        (self.rig / "server.py").write_text("# a later server\n")
        self.assertEqual(sum("older build" in row for row in self.rows()), 1)

    def test_retracted_and_superseded_runs_give_no_figures(self) -> None:
        self.put(report([cell(output_tps=1300)], run={"retracted": "a wrong clock"}))
        self.put(report([cell(output_tps=1200)], repeat=2))
        first = "2026-03-04-gemma4-e2b-vllm-v6e1"
        self.put(report([cell(output_tps=1000)], repeat=3, run={"supersedes": f"{first}--r2"}))
        (row,) = self.rows()
        self.assertIn("1,000", row)
        text = rollup_files(self.root)[ROLLUP_FILE]
        self.assertIn("RETRACTED: a wrong clock", text)
        self.assertIn("superseded", text)

    def test_a_run_without_success_has_a_row_without_figures(self) -> None:
        self.put(report([lost_cell(8, 1024, "failed", "refused")]))
        (row,) = self.rows()
        self.assertIn("no usable cell", row)

    def test_the_cost_is_the_hour_over_its_tokens(self) -> None:
        price = {"usd_per_hour": 1.35, "as_of": "2026-07", "source": "a list"}
        self.put(report([cell(64, output_tps=2140, tpot_ms=25)], price=price))
        (row,) = self.rows()
        self.assertIn("| 0.175 |", row)  # 1.35 / 3600 / 2140 x 1e6

    def test_text_of_a_report_cannot_break_the_table(self) -> None:
        self.put(report(run={"kind": "imported", "origin": "a | b\n\n# c"}), "benchmarks/imported")
        text = rollup_files(self.root)[ROLLUP_FILE]
        (line,) = [line for line in text.split("## Reports")[1].splitlines() if "[2026" in line]
        self.assertEqual(line.count("|"), 5)

    def test_links_lead_to_the_reports(self) -> None:
        self.put(report())
        self.put(report(run=IMPORTED, repeat=2), "benchmarks/imported")
        text = rollup_files(self.root)[ROLLUP_FILE]
        targets = [part.split(")")[0] for part in text.split("](")[1:]]
        self.assertEqual(len(targets), 4)
        for target in targets:
            self.assertTrue((self.root / "benchmarks" / target).resolve().exists(), target)

    def test_the_command_writes_once_and_the_check_sees_what_is_stale(self) -> None:
        self.put(report())
        self.assertEqual(self.command("--check").returncode, 1)
        self.assertEqual(self.command().stdout.count("wrote"), 2)
        self.assertEqual(self.command().stdout, "")
        self.assertEqual(self.command("--check").returncode, 0)
        self.put(report(repeat=2))
        checked = self.command("--check")
        self.assertEqual(checked.returncode, 1)
        self.assertIn(ROLLUP_FILE, checked.stdout)

    def test_an_empty_tree_is_in_order_after_one_run(self) -> None:
        self.assertEqual(self.command().returncode, 0)
        self.assertEqual(tree_faults(self.root), [])
        self.assertTrue((self.root / SCHEMA_FILE).exists())


class TestFaults(TreeCase):
    def faults(self, path: Path, change: dict[str, object] | None = None) -> str:
        if change:
            fields = json.loads(path.read_text())
            for keys, value in change.items():
                *way, last = keys.split(".")
                inner = fields
                for key in way:
                    inner = inner[int(key)] if key.isdigit() else inner[key]
                inner[last] = value
            path.write_text(json.dumps(fields))
        return "; ".join(report_faults(path))

    def test_a_good_report_has_none(self) -> None:
        self.assertEqual(self.faults(self.put(report())), "")

    def test_each_fault_is_found_and_named(self) -> None:
        for number, (change, word) in enumerate(
            (
                ({"run.kynd": "x"}, "kynd"),
                ({"notes": ["see 203.0.113.9"]}, "203.0.113.9"),
                ({"notes": ["hf_abcdEFGH12345678abcdEFGH12345678ab"]}, "secret"),
                ({"hardware.chip": "h100"}, "not in the table"),
                ({"raw": []}, "raw"),
                ({"raw.0.sha256": "1" * 64}, "hash"),
                ({"cells.0.implied.flops_share": 0.5}, "stale"),
                ({"cells.0.metrics.ttft_ms.median": 0.001}, "impossible"),
            ),
            start=2,
        ):
            with self.subTest(change=change):
                path = self.put(report(repeat=number))
                self.assertRegex(self.faults(path, change), word)

    def test_a_wrong_name_a_link_and_no_json(self) -> None:
        path = self.put(report())
        moved = path.rename(path.with_name("2026-03-04-gemma4-e2b-vllm-v6e1--r2.json"))
        self.assertIn("name", self.faults(moved))
        link = path.with_name("2026-03-04-gemma4-e2b-vllm-v6e1--r3.json")
        link.symlink_to(moved)
        self.assertIn("link", self.faults(link))
        moved.write_text("{")
        self.assertIn("JSON", self.faults(moved))

    def test_a_runtime_outside_the_names(self) -> None:
        self.assertIn("sglang", self.faults(self.put(report(engine={"name": "sglang"}))))

    def test_one_run_has_one_home(self) -> None:
        self.put(report(run=IMPORTED))
        self.put(report(run=IMPORTED), "benchmarks/imported")
        self.assertTrue(any("same run" in fault for fault in tree_faults(self.root)))

    def test_what_is_superseded_exists(self) -> None:
        self.put(report(run={"supersedes": "2020-01-01-gemma4-e2b-vllm-v6e1"}))
        self.assertTrue(any("supersedes" in fault for fault in tree_faults(self.root)))


if __name__ == "__main__":
    unittest.main()
