"""The calibration: every row of the table, in the class it came with, predicted by the planner."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

from forge.calibration import (
    CALIBRATION_AIMS,
    CALIBRATION_GROUPS,
    error_percent,
    kind_counts,
    median_errors,
)
from forge.parts.knowledge.models import GEMMA4

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("forge/calibration_rows.py", "forge/calibration_rows_speed.py")
# Counted once in the table that the rows were taken from, by group and class.
KINDS = {
    "weights": {"P": 10, "F": 8, "I": 0, "S": 1, "X": 2},
    "KV": {"P": 13, "F": 7, "I": 6, "S": 2, "X": 4},
    "single stream": {"P": 14, "F": 8, "I": 0, "S": 0, "X": 4},
    "concurrency": {"P": 15, "F": 4, "I": 0, "S": 0, "X": 2},
    "money": {"P": 0, "F": 0, "I": 17, "S": 1, "X": 0},
}
# How many P rows lay within 5 % and 15 % when the formulas were drawn up.
WITHIN = {
    "weights": (10, 10),
    "KV": (11, 13),
    "single stream": (8, 14),
    "concurrency": (4, 14),
}


def row_calls() -> list[ast.Call]:
    """The calls that make the rows, out of the source text."""
    calls = []
    for source in SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "CalibrationRow":
                calls.append(node)
    return calls


class TestRows(unittest.TestCase):
    def test_every_row_stands_in_its_class(self) -> None:
        counted = {group: kind_counts(rows) for group, rows in CALIBRATION_GROUPS.items()}
        self.assertEqual(counted, KINDS)
        totals = {kind: sum(group[kind] for group in counted.values()) for kind in "PFISX"}
        self.assertEqual(totals, {"P": 52, "F": 27, "I": 23, "S": 4, "X": 12})

    def test_the_medians_meet_their_aims(self) -> None:
        medians = median_errors()
        self.assertEqual(set(medians), set(CALIBRATION_AIMS))
        for group, aim in {"weights": 1, "KV": 1, "single stream": 5, "concurrency": 10}.items():
            self.assertLessEqual(medians[group], aim, group)
            self.assertEqual(CALIBRATION_AIMS[group], aim)

    def test_the_spread_is_the_known_one(self) -> None:
        for group, within in WITHIN.items():
            errors = [abs(error_percent(r)) for r in CALIBRATION_GROUPS[group] if r.kind == "P"]
            counted = tuple(sum(error <= limit for error in errors) for limit in (5, 15))
            self.assertEqual(counted, within, group)

    def test_failures_are_failures_and_say_why(self) -> None:
        for rows in CALIBRATION_GROUPS.values():
            for row in rows:
                if row.kind in "SX":
                    self.assertTrue(row.note, row.figure)
                self.assertTrue(row.origin.source and row.origin.date, row.figure)
                self.assertGreater(row.reported, 0, row.figure)

    def test_the_worst_rows_are_as_bad_as_they_are(self) -> None:
        # A model that had been bent to hide its failures would lose these.
        worst = {
            "v6e 12B at .9, tokens (about": 100,
            "T4G or T4 JAX": 200,
            "v6e JAX 12B w4a16 as if": 250,
            "v6e E2B, 1024 in, 128 out, 64 streams, bare": 300,
        }
        rows = [row for group in CALIBRATION_GROUPS.values() for row in group]
        for words, least in worst.items():
            found = [row for row in rows if row.figure.startswith(words)]
            self.assertEqual([row.kind for row in found], ["X"], words)
            self.assertGreater(error_percent(found[0]), least, words)


class TestPredictionsAreComputed(unittest.TestCase):
    def test_no_prediction_is_a_literal(self) -> None:
        calls = row_calls()
        self.assertEqual(len(calls), sum(len(rows) for rows in CALIBRATION_GROUPS.values()))
        for call in calls:
            reported, predict = call.args[2], call.args[4]
            self.assertIsInstance(reported, ast.Constant)
            assert isinstance(predict, ast.Lambda) and isinstance(reported, ast.Constant)
            inside = list(ast.walk(predict.body))
            self.assertTrue(any(isinstance(node, ast.Call) for node in inside), call.lineno)
            numbers = [node.value for node in inside if isinstance(node, ast.Constant)]
            self.assertNotIn(reported.value, numbers, call.lineno)

    def test_other_models_give_other_predictions(self) -> None:
        # With every model a little wider, each row of memory and speed must move.
        wider = {}
        for size, model in GEMMA4.items():
            shape = model.geometry
            wider[size] = replace(
                model,
                geometry=replace(
                    shape,
                    hidden=shape.hidden + 64,
                    ple_dim=shape.ple_dim + 16 if shape.ple_dim else 0,
                    head_dim=shape.head_dim + 8,
                    global_head_dim=shape.global_head_dim + 32,
                ),
            )
        groups = [group for group in CALIBRATION_GROUPS if group != "money"]
        rows = [row for group in groups for row in CALIBRATION_GROUPS[group]]
        before = [row.predict() for row in rows]
        with mock.patch.dict(GEMMA4, wider):
            after = [row.predict() for row in rows]
        for row, old, new in zip(rows, before, after, strict=True):
            self.assertNotEqual(old, new, row.figure)
        self.assertEqual(before, [row.predict() for row in rows])


class TestTheCommand(unittest.TestCase):
    def test_it_prints_every_row_and_ends_with_a_line_of_json(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "forge.calibration"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        figures = json.loads(lines[-1])
        self.assertEqual(figures["rows"], 118)
        self.assertEqual(set(figures["median_error_percent"]), set(CALIBRATION_AIMS))
        self.assertTrue(figures["versions"]["python"])
        self.assertTrue(figures["machine"]["processor"])
        for rows in CALIBRATION_GROUPS.values():
            for row in rows:
                shown = [line for line in lines if f"  {row.figure} [" in line]
                self.assertEqual(len(shown), 1, row.figure)
                self.assertTrue(shown[0].startswith(row.kind))
                if row.kind in "SX":
                    self.assertIn(f"  {row.figure}: {row.note}", lines)


if __name__ == "__main__":
    unittest.main()
