"""What each of several devices holds: the five real sizes cut by name, and what cannot be cut."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.partition import device_part, keys_are_split, refuse_uneven, split_axis
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.sizes import cached_elements, parameter_groups
from forge.engines.gemma4.tensor_names import model_tensors
from tests.engines.test_gemma4_sizes import REAL, config_of


def real(name: str) -> Gemma4Config:
    return config_of(REAL[name])


class PartsTest(unittest.TestCase):
    def test_all_real_sizes_come_out_even_on_two_four_and_eight(self) -> None:
        for name in REAL:
            config = real(name)
            for ways in (1, 2, 4, 8):
                with self.subTest(name=name, ways=ways):
                    refuse_uneven(config, ways)
                    for tensor, shape in model_tensors(config).items():
                        axis = split_axis(config, tensor, ways)
                        if axis is not None:
                            self.assertEqual(shape[axis] % ways, 0, tensor)

    def test_a_part_is_as_large_as_its_tensors_cut_one_by_one(self) -> None:
        for name in REAL:
            config = real(name)
            for ways in (2, 8):
                with self.subTest(name=name, ways=ways):
                    held = 0
                    for tensor, shape in model_tensors(config).items():
                        cut = split_axis(config, tensor, ways) is not None
                        held += math.prod(shape) // (ways if cut else 1)
                    part = device_part(config, ways)
                    self.assertEqual(sum(parameter_groups(part).values()), held)

    def test_what_is_whole_everywhere_is_small(self) -> None:
        """Under a twentieth of the weights on two devices; norms, gates, routers, one key head."""
        for name in REAL:
            config = real(name)
            whole = sum(parameter_groups(config).values())
            held = sum(parameter_groups(device_part(config, 2)).values())
            self.assertGreater(held, whole / 2)
            self.assertLess(held - whole / 2, whole / 20, name)

    def test_one_way_is_the_model_itself(self) -> None:
        for name in REAL:
            self.assertEqual(device_part(real(name), 1), real(name))


class CachesTest(unittest.TestCase):
    def test_the_one_key_head_of_e2b_is_on_every_device(self) -> None:
        config = real("E2B")
        self.assertFalse(any(keys_are_split(layer, 2) for layer in config.layers))
        self.assertIsNone(split_axis(config, "layers.0.self_attn.k_proj.weight", 2))
        self.assertEqual(
            cached_elements(device_part(config, 4), 4096), cached_elements(config, 4096)
        )

    def test_key_heads_are_cut_where_they_come_out_even(self) -> None:
        """12B: 8 key heads in sliding layers, 1 in full ones."""
        config = real("12B")
        sliding = next(layer for layer in config.layers if layer.sliding)
        full = next(layer for layer in config.layers if not layer.sliding)
        self.assertEqual((sliding.kv_heads, full.kv_heads), (8, 1))
        self.assertEqual(
            split_axis(config, f"layers.{sliding.index}.self_attn.v_proj.weight", 8), 0
        )
        self.assertIsNone(split_axis(config, f"layers.{full.index}.self_attn.k_proj.weight", 8))
        kept, whole = (cached_elements(c, 4096) for c in (device_part(config, 8), config))
        self.assertEqual(kept["sliding"] * 8, whole["sliding"])
        self.assertEqual(kept["full"], whole["full"])
        self.assertFalse(keys_are_split(sliding, 16))


class NamesTest(unittest.TestCase):
    def test_axes_by_name(self) -> None:
        config = real("26B-A4B")
        for name, axis in (
            ("embed_tokens.weight", 0),
            ("norm.weight", None),
            ("layers.0.self_attn.q_proj.weight", 0),
            ("layers.0.self_attn.o_proj.weight", 1),
            ("layers.0.self_attn.q_norm.weight", None),
            ("layers.0.mlp.gate_proj.weight", 0),
            ("layers.0.mlp.up_proj.weight", 0),
            ("layers.0.mlp.down_proj.weight", 1),
            ("layers.0.experts.gate_up_proj", 0),
            ("layers.0.experts.down_proj", 0),
            ("layers.0.router.proj.weight", None),
            ("layers.0.layer_scalar", None),
        ):
            self.assertEqual(split_axis(config, name, 2), axis, name)
        self.assertEqual(split_axis(real("E2B"), "embed_tokens_per_layer.weight", 2), 0)
        self.assertIsNone(split_axis(real("E2B"), "per_layer_model_projection.weight", 2))


class UnevenTest(unittest.TestCase):
    def test_what_does_not_divide_is_named(self) -> None:
        e2b, moe = real("E2B"), real("26B-A4B")
        one = replace(e2b.layers[3], heads=9)
        for config, ways, words in (
            (e2b, 3, "the 262144 entries of the vocabulary do not divide among 3"),
            (replace(e2b, per_layer_vocabulary=262145), 2, "262145 entries of the per-layer table"),
            (e2b, 16, "8 query heads of layer 0"),
            (replace(e2b, layers=(*e2b.layers[:3], one)), 2, "9 query heads of layer 3"),
            (
                replace(e2b, layers=(replace(one, heads=8, intermediate=81),)),
                2,
                "81 MLP rows of layer 3",
            ),
            (replace(moe, experts=129), 2, "129 experts"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(ModelRefused, words):
                refuse_uneven(config, ways)


if __name__ == "__main__":
    unittest.main()
