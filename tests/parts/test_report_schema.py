"""The report schema: what it refuses, at every depth, and the arithmetic it comes with."""

from __future__ import annotations

import copy
import json
import random
import statistics
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.naming import HARDWARE_SLOTS, MODEL_SLOTS, RUNTIME_SLOTS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.report_checks import subject_of_model
from forge.parts.knowledge.report_schema import (
    BenchCell,
    BenchReport,
    ClientHealth,
    Distribution,
    cell_id_of,
    distribution_of,
    health_of_client,
    run_id_of,
)
from tests.parts.report_samples import cell, lost_cell, report

ROOT = Path(__file__).resolve().parents[2]
# Maps whose keys are data: an error's wording, an engine's own option names.
OPEN_MAPS = {"errors", "resolved"}


def objects_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every object of a JSON value, the open maps left out."""
    if isinstance(value, dict):
        if not (path and path[-1] in OPEN_MAPS):
            yield path
        for key, item in value.items():
            yield from objects_in(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from objects_in(item, (*path, index))


def inner(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


class TestClosedRecords(unittest.TestCase):
    def full_report(self) -> dict[str, Any]:
        made = report(
            [cell(), lost_cell(64, 65536, "infeasible", "no room for one request")],
            raw=[{"path": "runs/x/requests.jsonl", "sha256": "0" * 64, "size": 3}],
            price={"usd_per_hour": 1.35, "as_of": "2026-07", "source": "a public list"},
            workload={"goodput_limits": {"ttft_ms": 500, "tpot_ms": 30}},
            hardware={"host_cpu": {"value": "Xeon", "how": "probed"}},
            subject={"kv_dtype": {"value": "bf16", "evidence": "allocator"}},
        )
        return json.loads(made.model_dump_json(exclude_none=True))

    def test_an_unknown_key_is_refused_in_every_object(self) -> None:
        good = self.full_report()
        BenchReport.model_validate(good)
        paths = list(objects_in(good))
        self.assertGreater(len(paths), 15)
        for path in paths:
            with self.subTest(path=path):
                bad = copy.deepcopy(good)
                inner(bad, path)["concurency"] = 1
                with self.assertRaises(ValidationError):
                    BenchReport.model_validate(bad)

    def test_the_open_maps_take_any_key_of_bounded_length(self) -> None:
        good = self.full_report()
        good["engine"]["resolved"] = {"anything": 1, "at all": None}
        BenchReport.model_validate(good)
        good["engine"]["resolved"] = {"k" * 121: 1}
        with self.assertRaises(ValidationError):
            BenchReport.model_validate(good)

    def test_what_is_no_number_in_json_is_refused(self) -> None:
        good = self.full_report()
        for value in (float("nan"), float("inf"), -1.0):
            with self.subTest(value=value):
                bad = copy.deepcopy(good)
                bad["cells"][0]["metrics"]["output_tps"] = value
                with self.assertRaises(ValidationError):
                    BenchReport.model_validate(bad)

    def test_raw_data_stays_inside_the_benchmarks_folder(self) -> None:
        good = self.full_report()
        for path in ("/etc/passwd", "../x", "runs/../../x", "runs//x", "runs/.hidden", "a\nb", ""):
            with self.subTest(path=path):
                bad = copy.deepcopy(good)
                bad["raw"][0]["path"] = path
                with self.assertRaises(ValidationError):
                    BenchReport.model_validate(bad)

    def test_another_schema_version_is_refused(self) -> None:
        bad = self.full_report() | {"schema_version": "1.1"}
        with self.assertRaises(ValidationError):
            BenchReport.model_validate(bad)

    def test_the_schema_file_is_the_models_and_closed_throughout(self) -> None:
        stored = json.loads((ROOT / "benchmarks/report.schema.json").read_text(encoding="utf-8"))
        stored.pop("$schema")
        self.assertEqual(stored, BenchReport.model_json_schema())
        for path in objects_in(stored):
            found = inner(stored, path)
            if found.get("type") == "object" and "properties" in found:
                with self.subTest(path=path):
                    self.assertIs(found["additionalProperties"], False)


class TestCells(unittest.TestCase):
    def refused(self, **update: Any) -> str:
        fields = cell().model_dump() | update
        with self.assertRaises(ValidationError) as caught:
            BenchCell.model_validate(fields)
        return str(caught.exception)

    def test_a_cell_without_success_has_a_reason_and_no_figures(self) -> None:
        for status in ("failed", "infeasible", "interrupted", "not_run"):
            with self.subTest(status=status):
                self.refused(status=status, reason="it stalled")
                self.refused(status=status, metrics=None)
                self.refused(status=status, metrics=None, reason="  ")
                self.assertEqual(lost_cell(1, 8, status, "it stalled").status, status)

    def test_an_ok_cell_has_figures(self) -> None:
        self.refused(metrics=None)
        self.refused(metrics={"duration_s": 1.0})

    def test_the_id_is_that_of_the_load(self) -> None:
        self.assertIn("c8-i1024-o128", self.refused(id="c9-i1024-o128"))
        self.assertEqual(cell_id_of(None, 5, None, rate_rps=2.50), "r2.5-i5-o-")

    def test_a_loop_is_closed_or_open(self) -> None:
        self.refused(concurrency=None)
        self.refused(rate_rps=2.0)
        self.refused(mode="open")
        opened = cell().model_dump() | {
            "mode": "open",
            "concurrency": None,
            "rate_rps": 2.0,
            "id": cell_id_of(None, 1024, 128, rate_rps=2.0),
        }
        self.assertEqual(BenchCell.model_validate(opened).rate_rps, 2.0)

    def test_a_variation_needs_repeats(self) -> None:
        self.refused(cv=0.01)
        self.assertEqual(cell(cv=0.01, repeats=3).cv, 0.01)

    def test_more_cannot_complete_than_were_sent(self) -> None:
        fields = cell().model_dump()
        fields["metrics"]["requests_sent"] = fields["metrics"]["requests_completed"] - 1
        with self.assertRaises(ValidationError):
            BenchCell.model_validate(fields)


class TestReports(unittest.TestCase):
    def test_cells_are_unique_and_no_more_than_planned(self) -> None:
        with self.assertRaises(ValidationError):
            report([cell(), cell()])
        with self.assertRaises(ValidationError):
            report([cell(1), cell(2)], planned_cells=1)
        self.assertEqual(report([cell()], planned_cells=4).planned_cells, 4)

    def test_imported_figures_need_an_origin_and_measured_ones_a_client(self) -> None:
        with self.assertRaises(ValidationError):
            report(run={"kind": "imported"})
        with self.assertRaises(ValidationError):
            report([cell(client=None)])
        kept = report([cell(client=None)], run={"kind": "imported", "origin": "a page"})
        self.assertIsNone(kept.cells[0].client)

    def test_the_run_id_is_worked_out_from_the_report(self) -> None:
        for name in (
            "2026-03-04-gemma4-e2b-jax-v6e1",  # another engine
            "2026-03-05-gemma4-e2b-vllm-v6e1",  # another day
            "2026-03-04-gemma4-e2b-vllm-v6e1--r1",  # the first has no mark
            "2026-03-04-gemma4-e2b-vllm-v6e1--r02",
            "2026-03-04-gemma4-e2b-vllm-v6e1-r2",
            "2026-03-04-gemma4-e2b-vllm-v6e1.json",
            "2026-03-04-gemma4-e2b-vllm-v6e1\n",
        ):
            with self.subTest(name=name), self.assertRaises(ValidationError):
                report(run={"id": name})
        self.assertTrue(report(repeat=12).run.id.endswith("--r12"))

    def test_every_combination_of_slots_makes_a_valid_and_different_name(self) -> None:
        seen = set()
        for model in GEMMA4.values():
            for checkpoint in model.checkpoints:
                short = subject_of_model(checkpoint.repo, "bf16").short
                for engine in RUNTIME_SLOTS:
                    for slot in HARDWARE_SLOTS:
                        name = run_id_of("2026-01-01", short, engine, slot)
                        made = report(
                            model=checkpoint.repo,
                            engine={"name": engine},
                            hardware={"slot": slot, "chip": HARDWARE_SLOTS[slot].chip},
                            run={"date": "2026-01-01"},
                        )
                        self.assertEqual(made.run.id, name)
                        seen.add((short, engine, slot))
        sizes = len(MODEL_SLOTS)
        self.assertGreaterEqual(len(seen), sizes * len(RUNTIME_SLOTS) * len(HARDWARE_SLOTS))


class TestDistributions(unittest.TestCase):
    def test_p99_needs_a_hundred_samples(self) -> None:
        few = distribution_of([float(i) for i in range(99)])
        many = distribution_of([float(i) for i in range(100)])
        assert few is not None and many is not None
        self.assertIsNone(few.p99)
        self.assertAlmostEqual(many.p99 or 0, 98.01)
        with self.assertRaises(ValidationError):
            Distribution(n=99, median=1, p99=2)
        with self.assertRaises(ValidationError):
            Distribution(median=1, p99=2)

    def test_the_figures_are_those_of_the_standard_library(self) -> None:
        chance = random.Random(7)
        for n in (2, 3, 10, 101, 1000):
            samples = [chance.expovariate(0.01) for _ in range(n)]
            found = distribution_of(samples)
            assert found is not None
            cuts = statistics.quantiles(samples, n=100, method="inclusive")
            self.assertAlmostEqual(found.mean or 0, statistics.fmean(samples))
            self.assertAlmostEqual(found.median or 0, statistics.median(samples))
            self.assertAlmostEqual(found.p90 or 0, cuts[89])
            if n >= 100:
                self.assertAlmostEqual(found.p99 or 0, cuts[98])

    def test_nothing_has_no_distribution_and_one_sample_has(self) -> None:
        self.assertIsNone(distribution_of([]))
        one = distribution_of([4.0])
        assert one is not None
        self.assertEqual((one.n, one.mean, one.median, one.p90), (1, 4.0, 4.0, 4.0))

    def test_figures_that_fall_are_refused(self) -> None:
        with self.assertRaises(ValidationError):
            Distribution(n=5, median=3, p90=2)
        with self.assertRaises(ValidationError):
            Distribution(n=5)


class TestClientHealth(unittest.TestCase):
    def test_each_limit_alone_takes_the_trust_away(self) -> None:
        self.assertTrue(health_of_client(0.70, 20.0, 0.05).trustworthy)
        for load in ((0.71, 1, 0), (0.1, 20.1, 0), (0.1, 1, 0.051)):
            with self.subTest(load=load):
                health = health_of_client(*load)
                self.assertFalse(health.trustworthy)
                self.assertEqual(len(health.faults()), 1)
                with self.assertRaises(ValidationError):
                    ClientHealth.model_validate(health.model_dump() | {"trustworthy": True})


if __name__ == "__main__":
    unittest.main()
