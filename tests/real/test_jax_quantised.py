"""Integers as weights in bf16, and 8-bit ones in a whole engine: what takes longer to compile.

Half a minute of one core.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np

from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.packed_tensors import PackedMatrix
from forge.engines.gemma4.weight_files import open_weights
from forge.engines.gemma4.weight_forms import WeightForm, weight_forms
from forge.engines.jax.engine import JaxEngine
from forge.engines.jax.params import place_params
from tests.engines.jax_compare import BF16, answer, log_probabilities, logits_at_once
from tests.engines.jax_faults import FEW_LAYERS
from tests.engines.many_devices import asked_on_eight
from tests.engines.packed import make_packed, make_unpacked
from tests.engines.tiny import WINDOW, Reference, make_checkpoint, some_prompt

INT8_BOUND = 0.1  # of the logits' standard deviation, as in tests/engines/test_jax_quantised.py
BF16_BOUND = 0.04  # the same of bf16 alone: 0.024 here


class QuantisedTest(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        self.ids = some_prompt(2 * WINDOW + 1)

    def off(self, folder: Path, forms: dict[str, WeightForm], want: np.ndarray) -> float:
        """How far bf16 logits are off, as a share of the standard deviation of the right ones."""
        config = read_config(folder)
        params = place_params(open_weights(folder, config), BF16, lambda share: None, forms)
        told = logits_at_once(params, config, self.ids)
        return float(np.sqrt(np.mean((told - want) ** 2)) / want.std())

    def test_packed_weights_in_bf16_are_as_far_off_as_bf16(self) -> None:
        folder = make_packed(self.folder / "e2b", "e2b", **FEW_LAYERS["e2b"])
        want = Reference(make_unpacked(folder, self.folder / "plain")).logits(self.ids)
        config = read_config(folder)
        views = open_weights(folder, config)
        packed = [name for name, view in views.items() if isinstance(view, PackedMatrix)]
        off = self.off(folder, weight_forms(config, packed), want)
        self.assertLess(off, BF16_BOUND)
        self.assertGreater(off, 1e-3)

    def test_int8_in_bf16_is_within_the_bound(self) -> None:
        folder = make_checkpoint(self.folder / "e2b", "e2b", **FEW_LAYERS["e2b"])
        forms = weight_forms(read_config(folder), (), "int8")
        off = self.off(folder, forms, Reference(folder).logits(self.ids))
        self.assertLess(off, INT8_BOUND)
        self.assertGreater(off, BF16_BOUND)

    def test_on_two_devices_each_has_half_of_the_integers_and_the_answers_are_those_of_one(
        self,
    ) -> None:
        folder = make_packed(self.folder / "e2b", "e2b", **FEW_LAYERS["e2b"])
        one, two = asked_on_eight(folder, [(2, 1)])
        for told, wanted in zip(two["alone"], one["alone"], strict=True):
            self.assertEqual([token for token, _ in told], [token for token, _ in wanted])
            for (_, top), (_, top_of_one) in zip(told, wanted, strict=True):
                for (_, value), (_, value_of_one) in zip(top, top_of_one, strict=True):
                    self.assertLess(abs(value - value_of_one), 1e-4)
        (whole,) = one["weights"][0].values()
        parts = list(two["weights"][0].values())
        self.assertEqual(len(parts), 2)
        for part in parts:
            self.assertLess(part, 0.6 * whole)

    def test_an_int8_engine_answers_nearly_as_the_checkpoint(self) -> None:
        few: dict[str, Any] = {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        folder = make_checkpoint(self.folder / "12b", "12b", **few)
        engine = JaxEngine(
            folder, slots=1, context=48, dtype="f32", chunk=16, steps=2, quantization="int8"
        )
        engine.load(lambda share, doing: None)
        prompt = some_prompt(20)
        told = answer(engine, prompt, 6)
        whole = [*prompt, *(step.token for step in told)]
        want = log_probabilities(Reference(folder).logits(whole)[len(prompt) - 1 : -1])
        off = [
            value - want[number, token]
            for number, step in enumerate(told)
            for token, value in step.top
        ]
        self.assertEqual(len(off), 6 * 20)
        self.assertLess(float(np.sqrt(np.mean(np.square(off)))), 2 * INT8_BOUND)
        self.assertGreater(float(np.abs(off).max()), 1e-3)
        self.assertEqual(engine.counters()["compiles_after_start"], 0)


if __name__ == "__main__":
    unittest.main()
