"""Products with stored weights: right, f32 in their sums, and the same for a row in any company."""

from __future__ import annotations

import unittest

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.jax.linear import project

ROWS = (1, 2, 3, 8, 16, 33)
# (n, k): wide, tall, and sizes that no vector width divides
SIZES = ((192, 48), (48, 192), (37, 53), (1, 16))


def exactly(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The product in f64 of what is stored."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


class ProjectTest(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(8)
        self.project = jax.jit(project)

    def matrix(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32)

    def test_equals_the_exact_product_in_f32(self) -> None:
        for n, k in SIZES:
            w = self.matrix(n, k)
            for rows in ROWS:
                with self.subTest(n=n, k=k, rows=rows):
                    x = self.matrix(rows, k)
                    made = self.project(x, w)
                    self.assertEqual((rows, n), made.shape)
                    self.assertEqual(jnp.float32, made.dtype)
                    error = np.abs(np.asarray(made) - exactly(x, w))
                    # A sum of k products is off by at most k roundings of its terms.
                    bound = k * 2.0**-23 * exactly(np.abs(x), np.abs(w))
                    self.assertLessEqual(float((error - bound).max()), 1e-7)

    def test_bf16_rounds_the_factors_and_nothing_else(self) -> None:
        for n, k in SIZES:
            w = jnp.asarray(self.matrix(n, k), jnp.bfloat16)
            for rows in ROWS:
                with self.subTest(n=n, k=k, rows=rows):
                    x = self.matrix(rows, k)
                    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
                    stored = np.asarray(w, np.float32)
                    made = self.project(x, w)
                    self.assertEqual(jnp.float32, made.dtype)
                    error = np.abs(np.asarray(made) - exactly(rounded, stored))
                    bound = k * 2.0**-23 * exactly(np.abs(rounded), np.abs(stored))
                    self.assertLessEqual(float((error - bound).max()), 1e-7)

    def test_leading_axes_are_kept(self) -> None:
        w = self.matrix(24, 16)
        for leading in ((), (3,), (2, 1), (2, 5), (2, 3, 4)):
            with self.subTest(leading=leading):
                x = self.matrix(*leading, 16)
                made = np.asarray(self.project(x, w))
                self.assertEqual((*leading, 24), made.shape)
                np.testing.assert_allclose(made, exactly(x, w), rtol=1e-4, atol=1e-5)

    def test_a_row_is_the_same_in_any_company_and_at_any_place(self) -> None:
        for dtype in (jnp.float32, jnp.bfloat16):
            w = jnp.asarray(self.matrix(200, 136), dtype)
            for rows in ROWS[1:]:
                one = self.matrix(136)
                found = []
                for place in range(rows):
                    x = self.matrix(rows, 136) * 100
                    x[place] = one
                    found.append(np.asarray(self.project(x, w))[place])
                with self.subTest(dtype=dtype.dtype.name, rows=rows):
                    for answer in found[1:]:
                        np.testing.assert_array_equal(found[0], answer)

    def test_a_row_that_is_no_number_stays_alone(self) -> None:
        w = self.matrix(40, 32)
        x = self.matrix(8, 32)
        calm = np.asarray(self.project(x, w))
        x[3] = np.nan
        x[5] = np.inf
        made = np.asarray(self.project(x, w))
        self.assertTrue(np.isnan(made[3]).all())
        others = [0, 1, 2, 4, 6, 7]
        np.testing.assert_array_equal(calm[others], made[others])

    def test_it_can_be_used_in_loops_and_branches(self) -> None:
        w = jnp.asarray(self.matrix(32, 32) / 8)

        def three_times(x: jax.Array) -> jax.Array:
            looped: jax.Array = jax.lax.fori_loop(0, 3, lambda _, y: project(y, w), x)
            return looped

        x = self.matrix(4, 32)
        stored = np.asarray(w)
        wanted = exactly(exactly(exactly(x, stored), stored), stored)
        np.testing.assert_allclose(jax.jit(three_times)(x), wanted, rtol=1e-3, atol=1e-4)


class WhatIsCompiledTest(unittest.TestCase):
    """Speed is no test's business; what speed rests on is."""

    def compiled(self, rows: int, dtype: jnp.dtype) -> str:
        x = jnp.zeros((rows, 256), jnp.float32)
        w = jnp.zeros((512, 256), dtype)
        return str(jax.jit(project).lower(x, w).compile().as_text())

    @unittest.skipUnless(jax.default_backend() == "cpu", "how a CPU's products are compiled")
    def test_f32_weights_are_the_first_factor_on_a_cpu(self) -> None:
        for rows in (2, 4, 16, 64):
            text = self.compiled(rows, jnp.dtype(jnp.float32))
            product = next(line for line in text.splitlines() if " dot(" in line)
            with self.subTest(rows=rows):
                self.assertIn(f"f32[512,{rows}]", product.split(" dot(")[0])

    @unittest.skipUnless(jax.default_backend() == "cpu", "how a CPU's products are compiled")
    def test_bf16_weights_are_read_as_bf16_on_a_cpu(self) -> None:
        for rows in (1, 2, 16):
            text = self.compiled(rows, jnp.dtype(jnp.bfloat16))
            with self.subTest(rows=rows):
                self.assertNotIn("f32[512,256]", text)

    def test_other_platforms_get_one_plain_product_in_full_precision(self) -> None:
        x = jnp.zeros((4, 256), jnp.float32)
        w = jnp.zeros((512, 256), jnp.float32)
        for platform in ("tpu", "cuda"):
            text = jax.jit(project).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
            with self.subTest(platform=platform):
                self.assertEqual(1, text.count("stablehlo.dot_general"))
                self.assertIn("HIGHEST", text)
                self.assertNotIn("optimization_barrier", text)


if __name__ == "__main__":
    unittest.main()
