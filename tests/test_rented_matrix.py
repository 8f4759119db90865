"""The fault matrix of the rented rigs: its rows name tests that exist, here and in the suites."""

from __future__ import annotations

import ast
import unittest
import unittest.mock
from pathlib import Path

from forge.suites import rented_matrix, tpu_vllm_v6e1_2b
from forge.suites.rented_matrix import MatrixRow, matrix_rows

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = [f"D{n:02}" for n in range(1, 57)] + [f"A{n:02}" for n in range(1, 51)]


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


class RentedMatrixTests(unittest.TestCase):
    def test_each_row_is_there_once_and_says_something(self) -> None:
        rows = matrix_rows()
        self.assertEqual(list(rows), NUMBERS)
        for number, row in rows.items():
            with self.subTest(number):
                self.assertTrue(row.what)
                self.assertTrue(row.tests or row.why, "neither a test of the rig nor a reason")

    def test_the_tests_of_the_forge_exist(self) -> None:
        named = {test for row in matrix_rows().values() for test in row.forge}
        self.assertGreater(len(named), 10)
        for test in named:
            module, kind, method = test.rsplit(".", 2)
            self.assertIn(f"{kind}.{method}", tests_of(module), test)

    def test_the_tests_of_the_suite_run_in_it(self) -> None:
        suites = {suite.__name__: suite for suite in tpu_vllm_v6e1_2b.SUITES}
        named = {test for row in matrix_rows().values() for test in row.tests}
        self.assertGreater(len(named), 50)
        for test in named:
            kind, _, method = test.partition(".")
            self.assertIn(kind, suites, test)
            self.assertTrue(callable(getattr(suites[kind], method, None)), test)
        self.assertIn("MatrixSuite", suites)

    def test_a_row_without_its_test_fails_the_suite(self) -> None:
        """What the rig's own suite checks when it runs, with rows that are not in order."""

        class Suite(rented_matrix.MatrixSuite):
            @classmethod
            def suites(cls) -> dict[str, type[unittest.TestCase]]:
                return {"RentedMatrixTests": RentedMatrixTests}

        good = MatrixRow("x", (f"RentedMatrixTests.{self._testMethodName}",))
        for bad, count in (
            (good, 0),
            (MatrixRow("x", ("RentedMatrixTests.test_that_is_not_there",)), 1),
            (MatrixRow("x", ("NoSuite.test_anything",)), 1),
            (MatrixRow("x"), 1),
            (MatrixRow("x", (), ("tests.test_x.Y.test_z",)), 1),
        ):
            with self.subTest(bad):
                rows = dict.fromkeys(NUMBERS, good) | {"D07": bad}
                self.assertEqual(self._faults(Suite, rows), count)
        self.assertEqual(self._faults(Suite, {"D01": good}), 1, "105 rows are missing")

    def _faults(self, suite: type[unittest.TestCase], rows: dict[str, MatrixRow]) -> int:
        result = unittest.TestResult()
        with unittest.mock.patch.object(rented_matrix, "matrix_rows", lambda: rows):
            with unittest.mock.patch("sys.stderr"):
                suite("test_every_row_has_its_tests_or_its_reason").run(result)
        self.assertEqual(result.errors, [])
        return len(result.failures)


if __name__ == "__main__":
    unittest.main()
