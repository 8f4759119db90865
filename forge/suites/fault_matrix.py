"""A fault matrix told row by row: the test of each row, or why it has none; and that it holds.

A row is told by the tests of a suite that would fail if its promise were broken, by tests of the
forge where they need more than a rig, or by the reason why it does not apply. Knows no fault.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The rows that every rented rig tells: the faults and the threats of this project's own lists.
MATRIX_NUMBERS = (*(f"D{n:02}" for n in range(1, 57)), *(f"A{n:02}" for n in range(1, 51)))


@dataclass(frozen=True)
class MatrixRow:
    """`tests` are this suite's (Class.method), `forge` the forge's (module.Class.method); `why` is
    the reason for a row without any, or a remark."""

    what: str
    tests: tuple[str, ...] = ()
    forge: tuple[str, ...] = ()
    why: str = ""


def matrix_row(what: str, *tests: str, why: str = "") -> MatrixRow:
    """A row by its tests; those of the forge are told from a suite's by how they are named."""
    forge = tuple(test for test in tests if test.startswith(("test_", "parts.")))
    return MatrixRow(what, tuple(test for test in tests if test not in forge), forge, why)


class FaultMatrixSuite(unittest.TestCase):
    """The table holds, and tells itself row by row on standard error. A rig's own has its rows."""

    @classmethod
    def rows(cls) -> Mapping[str, MatrixRow]:
        """All rows, by their number."""
        raise NotImplementedError

    @classmethod
    def numbers(cls) -> list[str]:
        """The rows that have to be there, in their order."""
        return list(MATRIX_NUMBERS)

    @classmethod
    def suites(cls) -> dict[str, Any]:
        """The classes whose tests run with this one, by name."""
        listed = getattr(sys.modules[cls.__module__], "SUITES", ())
        return {suite.__name__: suite for suite in listed}

    def test_every_row_has_its_tests_or_its_reason(self) -> None:
        rows, suites = self.rows(), self.suites()
        self.assertEqual(list(rows), self.numbers())
        for number, row in rows.items():
            with self.subTest(row=number):
                self.assertTrue(row.tests or row.forge or row.why, "no test and no reason")
                self.assertTrue(row.tests or row.why, "why has the rig's suite no test of it?")
                for test in row.tests:
                    name, _, method = test.partition(".")
                    self.assertIn(name, suites, f"{test} does not run in this suite")
                    self.assertTrue(callable(getattr(suites[name], method, None)), test)
                told = ", ".join(row.tests) or f"{row.why}{', '.join(('', *row.forge))}"
                print(f"{number} {row.what}: {told}", file=sys.stderr)
