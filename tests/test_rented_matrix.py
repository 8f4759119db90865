"""The fault matrix of the rigs that rent from Google: its rows name tests that exist."""

from __future__ import annotations

import unittest

from forge.suites import rented_matrix, tpu_vllm_v6e1_2b
from tests import matrix_case


class RentedMatrixTests(matrix_case.MatrixCase):
    matrix = rented_matrix.MatrixSuite
    suites = tpu_vllm_v6e1_2b.SUITES


class RowsTests(matrix_case.RowsTest):
    """A row without its test fails the suite that tells it."""


if __name__ == "__main__":
    unittest.main()
