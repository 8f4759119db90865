"""What a fault matrix has to be: every row once, every test that it names there, and it says so."""

from __future__ import annotations

import ast
import unittest
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from forge.suites.fault_matrix import FaultMatrixSuite, MatrixRow

ROOT = Path(__file__).resolve().parents[1]


def tests_of(module: str) -> set[str]:
    """Class.method of every test that the module's own text holds."""
    path = ROOT.joinpath("tests", *module.split(".")).with_suffix(".py")
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{part.name}")
    return found


class MatrixCase(unittest.TestCase):
    """The tests of one matrix; `suites` are those of the rig whose suite tells it."""

    matrix: ClassVar[type[FaultMatrixSuite]]
    suites: ClassVar[Sequence[type[Any]]]

    def test_each_row_is_there_once_and_says_something(self) -> None:
        rows = self.matrix.rows()
        self.assertEqual(list(rows), self.matrix.numbers())
        for number, row in rows.items():
            with self.subTest(number):
                self.assertTrue(row.what)
                self.assertTrue(row.tests or row.why, "neither a test of the rig nor a reason")

    def test_the_tests_of_the_forge_exist(self) -> None:
        named = {test for row in self.matrix.rows().values() for test in row.forge}
        self.assertGreater(len(named), 5)
        for test in named:
            module, kind, method = test.rsplit(".", 2)
            self.assertIn(f"{kind}.{method}", tests_of(module), test)

    def test_the_tests_of_the_suite_run_in_it(self) -> None:
        suites = {suite.__name__: suite for suite in self.suites}
        named = {test for row in self.matrix.rows().values() for test in row.tests}
        self.assertGreater(len(named), 40)
        for test in named:
            kind, _, method = test.partition(".")
            self.assertIn(kind, suites, test)
            self.assertTrue(callable(getattr(suites[kind], method, None)), test)
        self.assertIn(self.matrix.__name__, suites)


class RowsTest(unittest.TestCase):
    """What a rig's own suite checks when it runs, with rows that are not in order."""

    def test_a_row_without_its_test_fails_the_suite(self) -> None:
        good = MatrixRow("x", (f"RowsTest.{self._testMethodName}",))
        for bad, count in (
            (good, 0),
            (MatrixRow("x", ("RowsTest.test_that_is_not_there",)), 1),
            (MatrixRow("x", ("NoSuite.test_anything",)), 1),
            (MatrixRow("x"), 1),
            (MatrixRow("x", (), ("tests.test_x.Y.test_z",)), 1),
        ):
            with self.subTest(bad):
                rows = dict.fromkeys(FaultMatrixSuite.numbers(), good) | {"D07": bad}
                self.assertEqual(self._faults(rows), count)
        self.assertEqual(self._faults({"D01": good}), 1, "105 rows are missing")

    def _faults(self, rows: dict[str, MatrixRow]) -> int:
        class Suite(FaultMatrixSuite):
            @classmethod
            def rows(cls) -> dict[str, MatrixRow]:
                return rows

            @classmethod
            def suites(cls) -> dict[str, type[unittest.TestCase]]:
                return {"RowsTest": RowsTest}

        result = unittest.TestResult()
        with unittest.mock.patch("sys.stderr"):
            Suite("test_every_row_has_its_tests_or_its_reason").run(result)
        self.assertEqual(result.errors, [])
        return len(result.failures)
