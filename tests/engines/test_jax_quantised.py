"""Integers with scales: exact where they are the checkpoint's, within a bound where made here.

The bound of int8: on random tiny models its logits are off by a tenth of their standard deviation
at most (root of the mean square; 0.062 to 0.073 here, where bf16 alone has 0.024 to 0.029).
tests/real/test_jax_quantised.py has bf16 and int8 served.
"""

from __future__ import annotations

import dataclasses
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.packed_tensors import PackedMatrix, unpacked_matrix
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.weight_files import open_weights
from forge.engines.gemma4.weight_forms import weight_forms
from forge.engines.jax.cache import empty_state, state_shapes
from forge.engines.jax.engine import JaxEngine
from forge.engines.jax.experts import through_experts
from forge.engines.jax.linear import project
from forge.engines.jax.model import Params, prompt_logits
from forge.engines.jax.params import param_shapes, place_params
from forge.engines.jax.quantised import Int8Weight, PackedWeight, quantised_rows, unpacked_block
from tests.engines.jax_compare import (
    BF16,
    F32,
    NEAR,
    answer,
    opened,
    worst_difference,
)
from tests.engines.jax_faults import FEW_LAYERS
from tests.engines.packed import make_packed, make_unpacked
from tests.engines.tiny import WINDOW, Reference, make_checkpoint, some_prompt

Change = Callable[[Int8Weight], Int8Weight]
INT8_BOUND = 0.1  # of the logits' standard deviation
ROWS = (1, 5)
# (n, k): more inputs than a block, no power of two, one output
FEW: dict[str, dict[str, Any]] = {
    "e2b": FEW_LAYERS["e2b"],
    "12b": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
SIZES = ((48, 1536), (40, 96), (1, 64))


def setUpModule() -> None:
    global _kept, _programs
    _kept = tempfile.TemporaryDirectory()
    _programs = {}


def tearDownModule() -> None:
    _kept.cleanup()


def random_packed(n: int, k: int, group: int = 32) -> PackedMatrix:
    random = np.random.default_rng(n * k)
    words = random.integers(0, 1 << 32, (n, k // 8), dtype=np.uint32)
    scales = random.uniform(0.01, 0.03, (n, k // group)).astype(ml_dtypes.bfloat16)
    return PackedMatrix(words, scales)


def on_device(matrix: PackedMatrix, dtype: jnp.dtype) -> PackedWeight:
    return PackedWeight(jnp.asarray(matrix.words.T), jnp.asarray(matrix.scales.T), dtype)


def exactly(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


class ProductTest(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(8)
        self.project = jax.jit(project)

    def rows(self, count: int, k: int) -> np.ndarray:
        return self.random.standard_normal((count, k), dtype=np.float32)

    def check(self, weight: Any, values: np.ndarray, scale: Any = 1.0) -> None:
        """Products are exact but for the rounding of x and of f32 sums."""
        for count in ROWS:
            x = self.rows(count, values.shape[1])
            made = self.project(x, weight)
            seen = np.asarray(jnp.asarray(x, weight.dtype), np.float32)
            self.assertEqual((made.shape, made.dtype), ((count, len(values)), jnp.float32))
            error = np.abs(np.asarray(made) - exactly(seen, values) * scale)
            bound = values.shape[1] * 2.0**-23 * exactly(np.abs(seen), np.abs(values)) * scale
            self.assertLessEqual(float((error - bound).max()), 1e-7)

    def test_packed_on_the_device_is_bit_for_bit_the_unpacked(self) -> None:
        for group in (8, 32, 96):
            matrix = random_packed(24, 192, group)
            placed = on_device(matrix, F32)
            block = np.asarray(jax.jit(unpacked_block)(placed.turned_words, placed.turned_scales))
            np.testing.assert_array_equal(block.T, unpacked_matrix(matrix).astype(np.float32))
            self.assertEqual(placed.shape, (24, 192))

    def test_packed_products(self) -> None:
        for dtype in (F32, BF16):
            for n, k in SIZES:
                matrix = random_packed(n, k)
                with self.subTest(n=n, k=k, dtype=dtype.name):
                    self.check(on_device(matrix, dtype), unpacked_matrix(matrix).astype(np.float32))

    def test_int8_products(self) -> None:
        for dtype in (F32, BF16):
            for n, k in SIZES:
                integers, scales = quantised_rows(self.rows(n, k))
                weight = Int8Weight(jnp.asarray(integers), jnp.asarray(scales), dtype)
                with self.subTest(n=n, k=k, dtype=dtype.name):
                    self.check(weight, integers.astype(np.float32), scales)

    def test_leading_axes_are_kept(self) -> None:
        matrix = random_packed(24, 32)
        weight = on_device(matrix, F32)
        for leading in ((), (3,), (2, 5)):
            x = self.random.standard_normal((*leading, 32), dtype=np.float32)
            made = np.asarray(self.project(x, weight))
            np.testing.assert_allclose(
                made, exactly(x, unpacked_matrix(matrix)), rtol=1e-4, atol=1e-5
            )

    def test_a_row_is_the_same_in_any_company_and_at_any_place(self) -> None:
        integers, scales = quantised_rows(self.rows(200, 160))
        for weight in (
            on_device(random_packed(200, 160), F32),
            on_device(random_packed(200, 160), BF16),
            Int8Weight(jnp.asarray(integers), jnp.asarray(scales), F32),
        ):
            for count in (2, 8, 33):
                one = self.rows(1, 160)[0]
                found = []
                for place in range(0, count, 3):
                    x = self.rows(count, 160) * 100
                    x[place] = one
                    x[(place + 1) % count] = np.nan
                    found.append(np.asarray(self.project(x, weight))[place])
                for told in found[1:]:
                    np.testing.assert_array_equal(found[0], told)


class Int8Test(unittest.TestCase):
    def test_every_weight_is_within_half_a_scale_of_its_row(self) -> None:
        random = np.random.default_rng(8)
        for shape in ((7, 33), (3, 5, 64), (2, 1 << 22)):
            matrix = random.standard_normal(shape, dtype=np.float32) * 3
            matrix[..., 0, :] *= 1000  # one row's size is no other's concern
            integers, scales = quantised_rows(matrix)
            self.assertEqual((integers.shape, scales.shape), (shape, shape[:-1]))
            error = np.abs(integers * scales[..., None] - matrix)
            self.assertLessEqual(float((error / scales[..., None]).max()), 0.5001)
            np.testing.assert_allclose(scales, np.abs(matrix).max(axis=-1) / 127, rtol=1e-6)

    def test_rows_of_zeros_and_largest_values(self) -> None:
        integers, scales = quantised_rows(np.asarray([[0, 0], [-4, 2], [254, 254]], np.float32))
        np.testing.assert_array_equal(integers, [[0, 0], [-127, 64], [127, 127]])
        self.assertTrue((scales > 0).all())

    def test_bf16_and_f16_are_read_as_they_are(self) -> None:
        for kind in (ml_dtypes.bfloat16, np.float16):
            matrix = np.random.default_rng(8).standard_normal((5, 40)).astype(kind)
            told = quantised_rows(matrix)
            for mine, theirs in zip(told, quantised_rows(matrix.astype(np.float32)), strict=True):
                np.testing.assert_array_equal(mine, theirs)


class ModelCase(unittest.TestCase):
    """Models of few layers; a program is compiled once for each form of its weights."""

    def setUp(self) -> None:
        self.ids = some_prompt(2 * WINDOW + 1)

    def logits(self, params: Params, config: Gemma4Config) -> np.ndarray:
        kind = (config, params["embed_tokens.weight"].dtype)
        if kind not in _programs:
            caches = empty_state(state_shapes(config, 1, len(self.ids), kind[1])).caches
            _programs[kind] = jax.jit(
                lambda params, ids: prompt_logits(params, config, ids, caches)
            )
        return np.asarray(_programs[kind](params, jnp.asarray(self.ids, jnp.int32)))


class PackedModelTest(ModelCase):
    def test_logits_are_those_of_the_checkpoint_that_its_library_unpacks(self) -> None:
        folder = make_packed(Path(_kept.name) / "e2b", "e2b", **FEW["e2b"])
        plain = make_unpacked(folder, Path(_kept.name) / "e2b-unpacked")
        want = Reference(plain).logits(self.ids)
        self.assertGreater(want.std(), 0.5)
        config = read_config(folder)
        weights = open_weights(folder, config)
        packed = [name for name, view in weights.items() if isinstance(view, PackedMatrix)]
        forms = weight_forms(config, packed)
        params = place_params(weights, F32, lambda share: None, forms)
        self.assertEqual({type(params[name]) for name in packed}, {PackedWeight})
        far = np.abs(self.logits(params, config) - want)
        self.assertLess(far.max(), NEAR)
        self.assertLess(far.mean(), NEAR / 10)
        self.assert_as_stated(params, param_shapes(config, F32, forms))

    def test_unpacked_at_load_it_is_the_unpacked_checkpoint(self) -> None:
        folder = make_packed(Path(_kept.name) / "loaded", "e2b", **FEW["e2b"])
        plain = make_unpacked(folder, Path(_kept.name) / "loaded-unpacked")
        config = read_config(folder)
        weights = open_weights(folder, config)
        packed = [name for name, view in weights.items() if isinstance(view, PackedMatrix)]
        for dtype in (F32, BF16):
            forms = weight_forms(config, packed, unpack="load")
            params = place_params(weights, dtype, lambda share: None, forms)
            self.assert_as_stated(params, param_shapes(config, dtype, forms))
            kept = place_params(weights, dtype, lambda share: None, weight_forms(config, packed))
            stated = param_shapes(config, dtype, weight_forms(config, packed))
            self.assert_as_stated(kept, stated)
            for name, wanted in opened(plain, dtype)[0].items():
                np.testing.assert_array_equal(params[name], wanted, err_msg=name)

    def assert_as_stated(self, params: Params, shapes: Params) -> None:
        """What is placed is what programs are compiled for."""
        seen, stated = (
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (params, shapes)
        )
        self.assertEqual(seen, stated)


class Int8ModelTest(ModelCase):
    """The bound, and that it is one: with wrong scales the logits are beyond it."""

    def off(self, shape: str, dtype: jnp.dtype, change: Change = lambda weight: weight) -> float:
        """How far int8's logits are off, as a share of the standard deviation of the right ones."""
        folder = Path(_kept.name) / f"int8-{shape}"
        if not folder.exists():
            make_checkpoint(folder, shape, **FEW[shape])
        plain, config = opened(folder)
        want = self.logits(plain, config)
        forms = weight_forms(config, (), "int8")
        params = place_params(open_weights(folder, config), dtype, lambda share: None, forms)
        for name, form in forms.items():
            self.assertEqual(isinstance(params[name], Int8Weight), form == "int8", name)
            if form == "int8":
                params[name] = change(params[name])
        told = self.logits(params, config)
        return float(np.sqrt(np.mean((told - want) ** 2)) / want.std())

    def test_logits_are_within_the_bound(self) -> None:
        for shape, dtype in (("e2b", F32), ("12b", F32)):
            with self.subTest(shape=shape, dtype=dtype.name):
                off = self.off(shape, dtype)
                self.assertLess(off, INT8_BOUND)
                self.assertGreater(off, 1e-3)  # it is another arithmetic

    def test_wrong_scales_are_beyond_it(self) -> None:
        def one_for_all(weight: Int8Weight) -> Int8Weight:
            mean = jnp.full_like(weight.scales, weight.scales.mean())
            return dataclasses.replace(weight, scales=mean)

        def of_the_next_row(weight: Int8Weight) -> Int8Weight:
            return dataclasses.replace(weight, scales=jnp.roll(weight.scales, 1, axis=-1))

        def too_large(weight: Int8Weight) -> Int8Weight:
            return dataclasses.replace(weight, scales=weight.scales * 1.5)

        def without_a_row(weight: Int8Weight) -> Int8Weight:
            return dataclasses.replace(weight, rows=weight.rows.at[..., 0, :].set(0))

        for change in (one_for_all, of_the_next_row, too_large, without_a_row):
            with self.subTest(change=change.__name__):
                self.assertGreater(self.off("e2b", F32, change), INT8_BOUND)

    def test_experts_are_each_in_their_own_scales(self) -> None:
        """Against experts made of the same integers; a step's choice of experts is not judged."""
        random = np.random.default_rng(8)
        matrices = [random.standard_normal(s, dtype=np.float32) for s in ((6, 64, 32), (6, 32, 32))]
        matrices = [matrix * np.arange(1, 7)[:, None, None] for matrix in matrices]
        x = jnp.asarray(random.standard_normal((5, 32), dtype=np.float32))
        ids = jnp.asarray(random.integers(0, 6, (5, 2)), jnp.int32)
        shares = jnp.full((5, 2), 0.5)
        made = [Int8Weight(*map(jnp.asarray, quantised_rows(m)), F32) for m in matrices]
        values = [weight.rows * weight.scales[..., None] for weight in made]
        told = jax.jit(through_experts)(x, ids, shares, *made)
        want = jax.jit(through_experts)(x, ids, shares, *values)
        np.testing.assert_allclose(told, want, rtol=1e-4, atol=1e-3 * float(jnp.std(want)))


class EngineTest(unittest.TestCase):
    """Whole engines: their answers, and what they refuse."""

    def loaded(self, folder: Path, **how: Any) -> JaxEngine:
        engine = JaxEngine(folder, slots=1, context=48, dtype="f32", chunk=16, steps=2, **how)
        engine.load(lambda share, doing: None)
        return engine

    def test_a_packed_checkpoint_answers_as_the_unpacked_one(self) -> None:
        folder = make_packed(Path(_kept.name) / "served", "12b", **FEW["12b"])
        plain = make_unpacked(folder, Path(_kept.name) / "served-unpacked")
        self.check(self.loaded(folder), plain, NEAR)
        with self.assertRaisesRegex(ModelRefused, "packed 4-bit integers: int8"):
            self.loaded(folder, quantization="int8")

    def check(self, engine: JaxEngine, folder: Path, near: float) -> None:
        prompt = some_prompt(20)
        told = answer(engine, prompt, 6)
        whole = [*prompt, *(step.token for step in told)]
        want = Reference(folder).logits(whole)[len(prompt) - 1 : -1]
        self.assertLess(worst_difference(told, want), near)


class WhatIsCompiledTest(unittest.TestCase):
    """Speed is no test's business; what speed and memory rest on is."""

    def test_on_a_cpu_a_block_is_unpacked_and_never_all_of_it(self) -> None:
        x = jnp.zeros((4, 1536), jnp.float32)
        weight = on_device(random_packed(64, 1536), F32)
        text = str(jax.jit(project).lower(x, weight).compile().as_text())
        self.assertIn("f32[512,64]", text)
        self.assertNotIn("f32[1536,64]", text)

    def test_on_a_cpu_int8_rows_are_converted_in_blocks(self) -> None:
        x = jnp.zeros((4, 64), jnp.float32)
        rows = jnp.zeros((1024, 64), jnp.int8)
        weight = Int8Weight(rows, jnp.ones(1024, jnp.float32), F32)
        text = str(jax.jit(project).lower(x, weight).compile().as_text())
        self.assertIn("f32[256,64]", text)
        self.assertNotIn("f32[1024,64]", text)

    def test_other_platforms_get_one_product(self) -> None:
        x = jnp.zeros((4, 1536), jnp.float32)
        rows = jnp.zeros((64, 1536), jnp.int8)
        for weight in (
            on_device(random_packed(64, 1536), BF16),
            Int8Weight(rows, jnp.ones(64, jnp.float32), BF16),
        ):
            for platform in ("tpu", "cuda"):
                lowered = jax.jit(project).trace(x, weight).lower(lowering_platforms=(platform,))
                with self.subTest(platform=platform, kind=type(weight).__name__):
                    self.assertEqual(1, lowered.as_text().count("stablehlo.dot_general"))
                    self.assertNotIn("while", lowered.as_text())


if __name__ == "__main__":
    unittest.main()
