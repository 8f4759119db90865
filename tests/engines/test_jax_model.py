"""The forward pass against transformers, and each rule of the architecture broken on purpose.

Logits, not tokens: four of the rules move them by less than 0.02, and no argmax with them.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import numpy as np

from tests.engines.jax_compare import BF16, NEAR, logits_at_once, opened
from tests.engines.jax_faults import (
    DENSE_FAULTS,
    FEW_LAYERS,
    SPARSE_FAULTS,
    Fault,
    check_faults,
)
from tests.engines.tiny import SHAPES, WINDOW, Reference, make_checkpoint, some_prompt

LENGTH = 3 * WINDOW
QUIET_FAULTS = (
    *("context and table not brought back", "context not scaled", "no soft cap", "GELU exact"),
    "another layer's keys",
)


def setUpModule() -> None:
    global _kept
    _kept = tempfile.TemporaryDirectory()


def tearDownModule() -> None:
    _kept.cleanup()


class ParityTest(unittest.TestCase):
    def test_every_shape_gives_transformers_logits_at_every_position(self) -> None:
        for shape in SHAPES:
            with self.subTest(shape=shape):
                folder = make_checkpoint(Path(_kept.name) / shape, shape)
                ids = some_prompt(LENGTH)
                want = Reference(folder).logits(ids)
                told = logits_at_once(*opened(folder), ids)
                self.assertGreater(want.std(), 0.5)  # a flat answer would be near anything
                self.assertLess(np.abs(told - want).max(), NEAR)

    def test_either_spelling_and_the_wrapper_are_the_same_model(self) -> None:
        """To the last weight; the forward pass then has no choice."""
        for shape in ("e2b", "12b"):
            plain, config = opened(make_checkpoint(Path(_kept.name) / f"{shape}-plain", shape))
            for changes in ({"wrapped": True}, {"legacy": True}, {"wrapped": True, "legacy": True}):
                with self.subTest(shape=shape, **changes):
                    folder = Path(_kept.name) / f"{shape}-{'-'.join(changes)}"
                    params, read = opened(make_checkpoint(folder, shape, **changes))
                    self.assertEqual(read, config)
                    self.assertEqual(set(params), set(plain))
                    for name, array in params.items():
                        np.testing.assert_array_equal(array, plain[name], err_msg=name)


class Bf16Test(unittest.TestCase):
    def test_bf16_is_near_transformers_f32(self) -> None:
        """Weights, keys and values keep 8 bits; sums, norms and softmax are f32."""
        folder = make_checkpoint(Path(_kept.name) / "bf16", "e2b", **FEW_LAYERS["e2b"])
        ids = some_prompt(LENGTH)
        told = logits_at_once(*opened(folder, BF16), ids)
        far = np.abs(told - Reference(folder).logits(ids))
        self.assertEqual(told.dtype, np.float32)
        self.assertGreater(far.max(), NEAR)  # it is another arithmetic
        self.assertLess(far.max(), 0.5)
        self.assertLess(far.mean(), 0.05)


class FaultsTest(unittest.TestCase):
    """What is put to the test here is the comparison; `make test-real` has all the other faults."""

    def check(self, shape: str, faults: tuple[Fault, ...], names: tuple[str, ...]) -> None:
        chosen = tuple(fault for fault in faults if fault.name in names)
        self.assertEqual(len(chosen), len(names))
        check_faults(self, shape, Path(_kept.name) / f"few-{shape}", chosen)

    def test_faults_that_no_argmax_shows_and_another_layers_keys(self) -> None:
        self.check("e2b", DENSE_FAULTS, QUIET_FAULTS)

    def test_faults_of_values_from_keys_and_of_experts(self) -> None:
        self.check("moe", SPARSE_FAULTS, ("values from normed keys", "shares not renormalised"))


if __name__ == "__main__":
    unittest.main()
