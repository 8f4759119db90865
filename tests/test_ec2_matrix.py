"""The fault matrices of the rigs on EC2: their rows name tests that exist and run."""

from __future__ import annotations

import unittest
from typing import Any

from forge.suites import ec2_matrix, gpu_llamacpp_g5g_2b_q4_0, gpu_vllm_g6_2b
from tests import matrix_case

# What the issue wants by name.
WANTED = (
    *("two zones out", "spot refused", "quota zero", "profile not visible yet", "interrupted"),
    *("terminated behind our back", "agent never online", "build fails", "disk full"),
    *("SSM cut at 24,000 characters", "SSM command running at the deadline"),
    *("lost, done", "lost, not done", "IdempotentParameterMismatch", "throttled"),
    *("credentials over", "look like ours", "a namesake", "made anew", "shutting-down"),
    *("a volume that hangs on nothing", "a stopped machine", "AMI parameter gone"),
    *("no default subnet", "security group opened"),
)


class Ec2MatrixTests(matrix_case.MatrixCase):
    matrix = ec2_matrix.Ec2MatrixSuite
    suites = gpu_vllm_g6_2b.SUITES

    def test_every_row_that_was_asked_for_is_there_by_name(self) -> None:
        own = [row for number, row in self.matrix.rows().items() if number.startswith("I")]
        self.assertEqual(len(own), len(WANTED))
        for row, words in zip(own, WANTED, strict=True):
            self.assertIn(words, row.what)


class Ec2BuildMatrixTests(unittest.TestCase):
    """The rows of the rig that builds, which tells no other."""

    matrix = ec2_matrix.Ec2BuildMatrixSuite
    suites: tuple[type[Any], ...] = gpu_llamacpp_g5g_2b_q4_0.SUITES

    def test_each_has_a_test_that_runs_in_its_suite(self) -> None:
        rows, suites = self.matrix.rows(), {suite.__name__: suite for suite in self.suites}
        self.assertEqual(list(rows), self.matrix.numbers())
        self.assertIn(self.matrix.__name__, suites)
        for number, row in rows.items():
            with self.subTest(number):
                self.assertTrue(row.tests)
                for test in row.tests:
                    kind, _, method = test.partition(".")
                    self.assertTrue(callable(getattr(suites[kind], method, None)), test)


if __name__ == "__main__":
    unittest.main()
