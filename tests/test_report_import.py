"""The import of other tools' results: files in the form that their own writers give them.

The forms are those of vLLM's benchmarks/serve.py, of guidellm 0.8.1's report model and of aiperf
0.13.0's export model; the figures are made up so that each can be told from the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.report_vllm import ImportFacts
from forge.parts.knowledge.report_schema import BenchReport, CellMetrics
from forge.report_faults import report_faults
from forge.report_import import import_report, save_import

ROOT = Path(__file__).resolve().parents[1]
FACTS = ImportFacts(
    model="google/gemma-4-E2B-it",
    encoding="bf16",
    hardware="v6e1",
    engine="vllm",
    origin="a public page",
)


def vllm_file(concurrency: int | None = 8, **more: Any) -> dict[str, Any]:
    """What --save-result --save-detailed writes, without the lists that nothing reads."""
    return {
        "date": "20260806-101112",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": "google/gemma-4-E2B-it",
        "tokenizer_id": "google/gemma-4-E2B-it",
        "num_prompts": 120,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": 12.8,
        "completed": 118,
        "failed": 2,
        "total_input_tokens": 118 * 1030,
        "total_output_tokens": 118 * 128,
        "request_throughput": 118 / 12.8,
        "request_goodput": None,
        "output_throughput": 118 * 128 / 12.8,
        "total_token_throughput": 118 * 1158 / 12.8,
        "generated_texts": ["a secret answer"] * 118,
        "mean_ttft_ms": 31.0,
        "median_ttft_ms": 30.0,
        "std_ttft_ms": 2.0,
        "p99_ttft_ms": 44.0,
        "mean_tpot_ms": 6.3,
        "median_tpot_ms": 6.2,
        "p99_tpot_ms": 7.7,
        "mean_itl_ms": 6.1,
        "median_itl_ms": 6.0,
        "p99_itl_ms": 9.9,
        **more,
    }


def spread(mean: float, count: int = 118) -> dict[str, Any]:
    """A guidellm distribution summary around a mean, by status."""
    figures = {"mean": mean, "median": mean * 0.98, "std_dev": 1.0, "count": count}
    return {
        "successful": figures | {"percentiles": {"p50": mean, "p90": mean * 1.2, "p99": mean * 2}},
        "errored": {"mean": 1e9, "median": 1e9, "count": 1, "percentiles": {}},
    }


def guidellm_file(**strategy: Any) -> dict[str, Any]:
    entry = {
        "config": {
            "strategy": strategy or {"type_": "concurrent", "streams": 8},
            "prefer_response_metrics": True,
        },
        "scheduler_metrics": {"measure_start_time": 100.0, "measure_end_time": 112.8},
        "metrics": {
            "request_totals": {"successful": 118, "incomplete": 3, "errored": 1, "total": 122},
            "requests_per_second": spread(9.2),
            "request_concurrency": spread(7.9),
            "request_latency": spread(0.84),
            "prompt_token_count": spread(1030.0),
            "output_token_count": spread(128.0),
            "time_to_first_token_ms": spread(31.0),
            "time_per_output_token_ms": spread(6.6),
            "inter_token_latency_ms": spread(6.3),
            "output_tokens_per_second": spread(1178.0),
            "tokens_per_second": spread(10_654.0),
        },
        "requests": {"successful": [{"prompt": "a secret prompt"}]},
    }
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [entry]}


def aiperf_file(**more: Any) -> dict[str, Any]:
    def record(mean: float, unit: str) -> dict[str, Any]:
        return {
            "unit": unit,
            "avg": mean,
            "p50": mean * 0.98,
            "p90": mean * 1.2,
            "p99": mean * 2,
            "count": 118,
        }

    return {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "start_time": "2026-08-07T10:11:12",
        "input_config": {
            "phases": [
                {"name": "warmup", "concurrency": 1},
                {"name": "profiling", "concurrency": 8},
            ]
        },
        "request_throughput": {"unit": "requests/sec", "avg": 9.2},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 1178.0},
        "request_count": {"unit": "requests", "avg": 118.0},
        "error_request_count": {"unit": "requests", "avg": 2.0},
        "benchmark_duration": {"unit": "sec", "avg": 12.8},
        "input_sequence_length": record(1030.0, "tokens"),
        "output_sequence_length": record(128.0, "tokens"),
        "time_to_first_token": record(31.0, "ms"),
        "inter_token_latency": record(6.3, "ms"),
        "inter_chunk_latency": record(6.1, "ms"),
        "request_latency": record(840.0, "ms"),
        **more,
    }


FILES = {"vllm": vllm_file, "guidellm": guidellm_file, "aiperf": aiperf_file}


def imported(tool: str, *documents: dict[str, Any], **facts: Any) -> BenchReport:
    given = {"date": "2026-08-06", "input_tokens": 1024, **facts}
    return import_report(tool, documents, ImportFacts(**{**vars(FACTS), **given}))


def figures(made: BenchReport) -> CellMetrics:
    found = made.cells[0].metrics
    assert found is not None
    return found


class TestAdapters(unittest.TestCase):
    def test_all_three_say_the_same_of_the_same_run(self) -> None:
        for tool, build in FILES.items():
            with self.subTest(tool=tool):
                made = imported(tool, build())
                m = figures(made)
                self.assertEqual((made.run.kind, made.run.origin), ("imported", "a public page"))
                self.assertEqual(made.cells[0].id, "c8-i1024-o128")
                self.assertEqual(m.requests_completed, 118)
                self.assertAlmostEqual(m.output_tps or 0, 1178, delta=3)
                self.assertAlmostEqual(m.request_rps or 0, 9.2, delta=0.05)
                self.assertAlmostEqual(m.duration_s or 0, 12.8)
                for sample, mean in ((m.ttft_ms, 31.0), (m.tpot_ms, 6.3), (m.prompt_tokens, 1030)):
                    assert sample is not None
                    self.assertAlmostEqual(sample.mean or 0, mean)
                assert m.ttft_ms is not None
                self.assertEqual(m.ttft_ms.n, 118)
                self.assertIsNotNone(m.ttft_ms.p99)

    def test_words_that_differ_are_told_apart(self) -> None:
        vllm, guide, perf = (figures(imported(tool, FILES[tool]())) for tool in FILES)
        assert vllm.icl_ms and perf.icl_ms and guide.tpot_ms and guide.e2e_ms and perf.e2e_ms
        self.assertEqual((vllm.icl_ms.mean, perf.icl_ms.mean), (6.1, 6.1))
        self.assertEqual(guide.tpot_ms.mean, 6.3)  # not its 6.6, which includes the first token
        self.assertAlmostEqual(guide.e2e_ms.mean or 0, 840)  # seconds there
        self.assertEqual(perf.e2e_ms.mean, 840)

    def test_failures_are_counted_and_never_averaged(self) -> None:
        self.assertEqual(figures(imported("vllm", vllm_file())).requests_sent, 120)
        guide = figures(imported("guidellm", guidellm_file()))
        self.assertEqual(guide.errors, {"errored": 1, "incomplete": 3})
        self.assertLess(guide.output_tps or 0, 1e6)
        self.assertEqual(figures(imported("aiperf", aiperf_file())).errors, {"errored": 2})

    def test_the_load_is_taken_from_the_file(self) -> None:
        for tool, document, cell_id in (
            ("vllm", vllm_file(request_rate=4.0), "r4-i1024-o128"),
            ("vllm", vllm_file(None), "c120-i1024-o128"),
            ("guidellm", guidellm_file(type_="synchronous"), "c1-i1024-o128"),
            ("guidellm", guidellm_file(type_="poisson", rate=2.5), "r2.5-i1024-o128"),
            ("guidellm", guidellm_file(type_="throughput", max_concurrency=64), "c64-i1024-o128"),
        ):
            with self.subTest(tool=tool, cell_id=cell_id):
                self.assertEqual(imported(tool, document).cells[0].id, cell_id)

    def test_p99_of_few_samples_is_dropped(self) -> None:
        few = vllm_file(completed=20, total_input_tokens=20 * 1030, total_output_tokens=20 * 128)
        ttft = figures(imported("vllm", few)).ttft_ms
        assert ttft is not None
        self.assertEqual((ttft.n, ttft.p99), (20, None))

    def test_zeros_that_mean_nothing_are_not_figures(self) -> None:
        one_token = vllm_file(mean_itl_ms=0.0, median_itl_ms=0.0, p99_itl_ms=0.0)
        self.assertIsNone(figures(imported("vllm", one_token)).icl_ms)

    def test_a_run_without_success_is_a_failed_cell(self) -> None:
        dead = vllm_file(completed=0, failed=120, total_input_tokens=0, total_output_tokens=0)
        cut = aiperf_file(is_complete=False, incomplete_reason="the watchdog fired")
        for tool, document, word in (("vllm", dead, "no request"), ("aiperf", cut, "watchdog")):
            with self.subTest(tool=tool):
                (found,) = imported(tool, document).cells
                self.assertEqual(found.status, "failed")
                self.assertIn(word, found.reason)

    def test_several_files_are_one_sweep_and_the_same_cell_twice_is_refused(self) -> None:
        made = imported("vllm", vllm_file(8), vllm_file(16))
        self.assertEqual([c.concurrency for c in made.cells], [8, 16])
        with self.assertRaisesRegex(ValueError, "cells of one id"):
            imported("vllm", vllm_file(8), vllm_file(8))

    def test_token_counting_is_what_the_tool_did_or_unknown(self) -> None:
        self.assertEqual(imported("guidellm", guidellm_file()).token_source, "usage")
        self.assertEqual(imported("vllm", vllm_file()).token_source, "unknown")
        told = imported("vllm", vllm_file(), token_source="usage")
        self.assertEqual(told.token_source, "usage")

    def test_what_is_missing_is_named(self) -> None:
        no_load = aiperf_file(input_config={})
        for tool, document, facts, word in (
            ("guidellm", guidellm_file(), {"date": ""}, "--date"),
            ("aiperf", no_load, {}, "--concurrency"),
            ("vllm", {"completed": 3}, {}, "num_prompts"),
            ("vllm", {}, {}, "completed"),
            ("guidellm", {"benchmarks": []}, {}, "benchmarks"),
            ("vllm", vllm_file(), {"token_source": "guess"}, "token_source"),
            ("aiperf", aiperf_file(input_sequence_length=None), {"input_tokens": None}, "prompts"),
        ):
            with self.subTest(tool=tool, word=word), self.assertRaisesRegex(ValueError, word):
                imported(tool, document, **facts)


class TestCommand(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def put(self, *documents: dict[str, Any], name: str = "result.json") -> Path:
        path = self.folder / name
        path.write_text("\n".join(json.dumps(document) for document in documents))
        return path

    def run_import(self, tool: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "forge.report_import", tool, *words]
        argv += ["--model", FACTS.model, "--encoding", "bf16", "--engine", "vllm"]
        argv += ["--origin", FACTS.origin, "--into", str(self.folder / "out")]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)

    def test_the_command_writes_a_report_in_order_and_drops_all_texts(self) -> None:
        for tool, build in FILES.items():
            with self.subTest(tool=tool):
                path = self.put(build(), name=f"{tool}.json")
                words = ["--hardware", "v6e1", "--date", "2026-08-06", "--input-tokens", "1024"]
                done = self.run_import(tool, str(path), *words)
                self.assertEqual(done.returncode, 0, done.stderr)
                written = Path(done.stdout.split("wrote ")[1].splitlines()[0])
                self.assertEqual(report_faults(written), [])
        everything = [p for p in (self.folder / "out").rglob("*") if p.is_file()]
        self.assertEqual(len(everything), 6)
        for path in everything:
            self.assertNotIn("a secret", path.read_text())

    def test_appended_results_are_read_line_by_line(self) -> None:
        path = self.put(vllm_file(8), vllm_file(16))
        saved = save_import("vllm", [path], FACTS, self.folder / "out")
        self.assertEqual(len(saved.report.cells), 2)
        self.assertEqual(saved.name, "2026-08-06-gemma4-e2b-vllm-v6e1")

    def test_a_run_that_cannot_be_is_refused_and_nothing_is_written(self) -> None:
        path = self.put(vllm_file(8))
        done = self.run_import("vllm", str(path), "--hardware", "1650ti")
        self.assertEqual(done.returncode, 1)
        self.assertIn("impossible", done.stderr)
        self.assertFalse((self.folder / "out").exists())

    def test_what_is_no_result_is_refused_in_a_sentence(self) -> None:
        for text in ("", "{", "[1, 2]", "null", '{"a": 1}', "\x00"):
            with self.subTest(text=text):
                path = self.folder / "bad.json"
                path.write_text(text)
                done = self.run_import("vllm", str(path), "--hardware", "v6e1")
                self.assertEqual(done.returncode, 1)
                self.assertTrue(done.stderr.startswith("not imported: "), done.stderr)
                self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
