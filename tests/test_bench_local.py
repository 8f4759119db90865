"""The arithmetic of `make bench-local`, its readers, and its table in the README."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.bench_local import (
    RESULTS_FILE,
    PeakMemory,
    read_bandwidth,
    row_of_report,
    share_of_bound,
    table_lines,
    weights_bytes,
)
from forge.rollup import rollup_files
from tests.parts.report_samples import report as sample_report

ROW: dict[str, Any] = {
    "rig": "local-x-cpu-2b",
    "report": "2026-11-30-smollm2-135m-x-cpu",
    "engine": "x",
    "version": "1.2",
    "encoding": "bf16",
    "cold_start_s": 5.4,
    "peak_memory_bytes": 1_234_000_000,
    "share_of_bound": 0.357,
    "cells": {
        "1": {"output_tps": 12.34, "ttft_ms": 56.7, "tpot_ms": 20.0, "cv": 0.031},
        "4": {"failed": "it broke"},
    },
}
RESULTS: dict[str, Any] = {
    "date": "2026-11-30",
    "workload": {"input": 128, "output": 32, "streams": [1, 4]},
    "bandwidth_bytes_per_s": 20_000_000_000,
    "rows": [ROW],
    "failed": [],
    "machine": {"system": "Linux x86_64", "cores": 2, "load": 0.1, "python": "3.13", "mcp": "2.3"},
}


class RowTests(unittest.TestCase):
    def test_a_row_has_the_cells_of_its_report_by_streams(self) -> None:
        report = json.loads(sample_report().model_dump_json())
        row = row_of_report(report)
        self.assertEqual(row["engine"], report["engine"]["name"])
        self.assertEqual(row["encoding"], report["subject"]["encoding"])
        first = report["cells"][0]
        cell = row["cells"][str(first["concurrency"])]
        self.assertEqual(cell["output_tps"], first["metrics"]["output_tps"])
        self.assertEqual(cell["tpot_ms"], first["metrics"]["tpot_ms"]["median"])

    def test_a_failed_cell_has_its_reason_and_no_figure(self) -> None:
        report = json.loads(sample_report().model_dump_json())
        report["cells"][0] |= {"status": "failed", "reason": "it broke"}
        cell = row_of_report(report)["cells"][str(report["cells"][0]["concurrency"])]
        self.assertEqual(cell, {"failed": "it broke"})

    def test_the_share_of_the_bound(self) -> None:
        # 20 ms a token is 50 tokens/s; 0.269 GB a token at 20 GB/s would allow 74.3.
        self.assertAlmostEqual(share_of_bound(ROW, 269_000_000, 20e9) or 0, 0.672, places=3)
        self.assertIsNone(share_of_bound(ROW, 0, 20e9))
        self.assertIsNone(share_of_bound({"cells": {"1": {"failed": "x"}}}, 1, 1.0))

    def test_the_weights_of_each_encoding(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            models = Path(folder) / "gemma4-rigs" / "models"
            (models / "SmolLM2").mkdir(parents=True)
            (models / "SmolLM2.Q4_1.gguf").write_bytes(b"x" * 10)
            (models / "SmolLM2" / "model.safetensors").write_bytes(b"x" * 30)
            self.assertEqual(weights_bytes(Path(folder), "q4_1"), 10)
            self.assertEqual(weights_bytes(Path(folder), "bf16"), 30)
            self.assertEqual(weights_bytes(Path(folder) / "empty", "bf16"), 0)


class MachineTests(unittest.TestCase):
    def test_memory_is_read_at_some_gigabytes_a_second(self) -> None:
        for readers in (1, 2):
            rate = read_bandwidth(readers)
            self.assertGreater(rate, 2e8)
            self.assertLess(rate, 2e13)

    def test_the_peak_counts_children_and_is_kept_when_they_are_gone(self) -> None:
        child = "x = bytearray(80_000_000); import time; time.sleep(1.5)"
        script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        process = subprocess.Popen([sys.executable, "-c", script])
        with PeakMemory(process.pid) as memory:
            process.wait()
        self.assertGreater(memory.peak, 80_000_000)
        before = memory.peak
        with PeakMemory(os.getpid()) as own:
            pass
        self.assertEqual(memory.peak, before)
        self.assertGreaterEqual(own.peak, 0)


class TableTests(unittest.TestCase):
    def test_a_row_for_people(self) -> None:
        line = table_lines(RESULTS)[-1]
        self.assertEqual(
            line,
            "| local-x-cpu-2b | x 1.2 | bf16 | 12.3 ± 3 % | failed |"
            " 57 ms | 5 s | 1.23 GB | 36 % |",
        )
        widths = {text.count("|") for text in table_lines(RESULTS)}
        self.assertEqual(len(widths), 1)

    def test_the_roll_up_brings_it_between_the_marks_and_touches_nothing_else(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "benchmarks").mkdir()
            before = "# A\n\n<!-- built: bench-local -->\nold\n<!-- end -->\n\n<!-- end -->\nlast\n"
            (root / "README.md").write_text(before)
            self.assertNotIn("README.md", rollup_files(root))
            (root / RESULTS_FILE).write_text(json.dumps(RESULTS))
            after = rollup_files(root)["README.md"]
            self.assertIn("| local-x-cpu-2b |", after)
            self.assertIn("20.0 GB/s", after)
            self.assertNotIn("old", after)
            self.assertTrue(after.endswith("<!-- end -->\n\n<!-- end -->\nlast\n"))
            (root / "README.md").write_text(after)
            self.assertEqual(rollup_files(root)["README.md"], after)


if __name__ == "__main__":
    unittest.main()
