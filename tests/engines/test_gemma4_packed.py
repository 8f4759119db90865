"""Packed checkpoints: what the config may say, what the files may hold, and what it stands for."""

from __future__ import annotations

import copy
import json
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.packed_tensors import PackedMatrix, unpacked_matrix
from forge.engines.gemma4.refusal import ConfigRefused, WeightsRefused
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_files import open_weights, stored_tensors
from forge.packed_checkpoint import pack_checkpoint, packed_config
from tests.engines.gemma4_files import model_folder, text_config, wrapped, write_config
from tests.engines.packed import unpacked_by_its_library

Q_PROJ = "model.layers.0.self_attn.q_proj"
STATED = text_config(hidden_size_per_layer_input=32)  # whole groups in every matrix


class ConfigCase(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def read(self, stated: Any) -> Any:
        return read_config(write_config(self.folder, stated)).packed

    def refusal(self, stated: Any) -> str:
        with self.assertRaises(ConfigRefused) as caught:
            self.read(stated)
        return str(caught.exception)


class WhatTheConfigSays(ConfigCase):
    def test_the_releases_way_in_either_half(self) -> None:
        said = packed_config()
        for stated in (
            text_config(quantization_config=said),
            wrapped(text_config(), quantization_config=said),
            wrapped(text_config(quantization_config=said)),
            wrapped(text_config(quantization_config=said), quantization_config=said),
        ):
            rule = self.read(stated)
            self.assertEqual((rule.group, rule.targets), (32, ("Linear",)))
            self.assertEqual(rule.ignored, tuple(said["ignore"]))
        self.assertIsNone(self.read(text_config()))
        self.assertIsNone(self.read(text_config(quantization_config=None)))

    def test_halves_that_say_different_things(self) -> None:
        inner, outer = packed_config(), packed_config(ignored=())
        stated = wrapped(text_config(quantization_config=inner), quantization_config=outer)
        self.assertIn("otherwise", self.refusal(stated))

    def changed(self, place: tuple[str, ...], value: object) -> dict[str, Any]:
        said = copy.deepcopy(packed_config())
        *outer, key = place
        there = said
        for name in outer:
            there = there[name]
        there[key] = value
        return text_config(quantization_config=said)

    def test_whatever_could_move_a_weight_is_refused_by_name(self) -> None:
        scheme = ("config_groups", "group_0")
        weights = (*scheme, "weights")
        group = packed_config()["config_groups"]["group_0"]
        for place, value in (
            (("quant_method",), "gptq"),
            (("format",), "int-quantized"),
            (("format",), None),
            (("quantization_status",), "frozen"),
            (("kv_cache_scheme",), {"num_bits": 8}),
            (("sparsity_config",), {"format": "sparse-24-bitmask"}),
            (("transform_config",), {"config_groups": {"u": {}}}),
            (("config_groups",), {}),
            (("config_groups",), {"group_0": group, "group_1": group}),
            (("config_groups",), {"W4A16": ["Linear"]}),
            (("ignore",), "lm_head"),
            (("ignore",), [1]),
            (("ignore",), ["re:("]),
            (("something_new",), 1),
            ((*scheme, "format"), "nvfp4-pack-quantized"),
            ((*scheme, "targets"), []),
            ((*scheme, "input_activations"), {"num_bits": 8}),
            ((*scheme, "output_activations"), {"num_bits": 8}),
            ((*scheme, "something_new"), 1),
            ((*weights, "num_bits"), 8),
            ((*weights, "num_bits"), 4.0),
            ((*weights, "type"), "float"),
            ((*weights, "symmetric"), False),
            ((*weights, "strategy"), "channel"),
            ((*weights, "dynamic"), True),
            ((*weights, "actorder"), "group"),
            ((*weights, "block_structure"), [128, 128]),
            ((*weights, "scale_dtype"), "torch.float8_e4m3fn"),
            ((*weights, "group_size"), 20),
            ((*weights, "group_size"), None),
            ((*weights, "something_new"), 1),
        ):
            with self.subTest(place=place, value=value):
                said = self.refusal(self.changed(place, value))
                named = "W4A16" if value == {"W4A16": ["Linear"]} else place[-1]
                self.assertIn(named, said)

    def test_what_moves_none_is_passed_over(self) -> None:
        weights = ("config_groups", "group_0", "weights")
        plain = self.read(text_config(quantization_config=packed_config()))
        for place, value in (
            (("version",), "0.9"),
            (("global_compression_ratio",), 1.5),
            (("run_compressed",), True),
            (("transform_config",), None),
            ((*weights, "observer"), "mse"),
            ((*weights, "observer_kwargs"), {"grid": 20}),
            ((*weights, "actorder"), "static"),
            ((*weights, "scale_dtype"), "torch.bfloat16"),
            ((*weights, "zp_dtype"), "torch.int8"),
        ):
            with self.subTest(place=place):
                self.assertEqual(self.read(self.changed(place, value)), plain)


class PackedCase(unittest.TestCase):
    """A packed folder; `rewrite` changes what its one file holds."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        plain, _ = model_folder(Path(made.name) / "plain", STATED)
        self.folder = pack_checkpoint(plain, Path(made.name) / "packed")
        self.config = read_config(self.folder)
        self.file = self.folder / "model.safetensors"

    def rewrite(self, change: Callable[[dict[str, Any]], object]) -> None:
        tensors = load_file(self.file)
        change(tensors)
        save_file(tensors, self.file)

    def say(self, **changes: Any) -> None:
        """Change the quantization_config; what it then says is read anew."""
        stated = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        stated["quantization_config"] |= changes
        self.config = read_config(write_config(self.folder, stated))

    def refusal(self) -> str:
        with self.assertRaises(WeightsRefused) as caught:
            stored_tensors(self.folder, self.config)
        return str(caught.exception)


class WhatTheFilesHold(PackedCase):
    def assert_whole(self) -> None:
        opened = open_weights(self.folder, self.config)
        self.assertEqual(set(opened), set(model_tensors(self.config)))

    def test_every_tensor_is_there_in_its_form(self) -> None:
        opened = open_weights(self.folder, self.config)
        self.assertEqual(set(opened), set(model_tensors(self.config)))
        for name, shape in model_tensors(self.config).items():
            view = opened[name]
            linear = len(shape) == 2 and "embed_tokens" not in name
            self.assertEqual(isinstance(view, PackedMatrix), linear, name)
            if isinstance(view, PackedMatrix):
                self.assertEqual(view.words.shape, (shape[0], shape[1] // 8))
                self.assertEqual(view.scales.shape, (shape[0], shape[1] // 32))
            else:
                self.assertEqual(view.dtype, ml_dtypes.bfloat16)

    def test_sizes_are_those_of_the_file(self) -> None:
        places = stored_tensors(self.folder, self.config)
        header = int.from_bytes(self.file.read_bytes()[:8], "little")
        body = self.file.stat().st_size - 8 - header
        self.assertEqual(sum(place.size for place in places.values()), body)

    def test_bit_for_bit_what_compressed_tensors_unpacks(self) -> None:
        theirs = unpacked_by_its_library(self.folder)
        opened = open_weights(self.folder, self.config)
        checked = 0
        for name, view in opened.items():
            if isinstance(view, PackedMatrix):
                mine = unpacked_matrix(view).view(np.int16)
                np.testing.assert_array_equal(mine, theirs[f"model.{name}"].view(torch.int16))
                checked += 1
        self.assertEqual(checked, 8 * 7 + 5 * 2 + 1)  # per layer, of owners, and the projection

    def test_a_head_that_is_the_embedding_is_dropped_and_no_other(self) -> None:
        self.assertNotIn("lm_head.weight", open_weights(self.folder, self.config))
        self.rewrite(lambda tensors: tensors["lm_head.weight"].mul_(2))
        with self.assertRaisesRegex(WeightsRefused, "lm_head.weight is another"):
            open_weights(self.folder, self.config)

    def test_no_head_is_as_good(self) -> None:
        self.rewrite(lambda tensors: tensors.pop("lm_head.weight"))
        self.assertEqual(
            set(open_weights(self.folder, self.config)), set(model_tensors(self.config))
        )

    def test_packed_keys_of_layers_that_share_are_passed_over(self) -> None:
        def add(tensors: dict[str, Any]) -> None:
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                value = tensors[f"model.layers.0.self_attn.k_proj.{part}"]
                tensors[f"model.layers.7.self_attn.k_proj.{part}"] = value.clone()

        self.rewrite(add)
        self.assertEqual(
            set(open_weights(self.folder, self.config)), set(model_tensors(self.config))
        )

    def test_packed_towers_are_passed_over(self) -> None:
        def add(tensors: dict[str, Any]) -> None:
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                tensors[f"model.vision_tower.x.{part}"] = tensors[f"{Q_PROJ}.{part}"].clone()

        self.rewrite(add)
        self.assertEqual(
            set(open_weights(self.folder, self.config)), set(model_tensors(self.config))
        )


class WhatIsRefused(PackedCase):
    """Each by the tensor's name."""

    def test_parts_that_are_missing_or_wrong(self) -> None:
        whole = load_file(self.file)
        words, scales = whole[f"{Q_PROJ}.weight_packed"], whole[f"{Q_PROJ}.weight_scale"]
        for part, value in (
            ("weight_packed", None),
            ("weight_packed", words.to(torch.int64)),
            ("weight_packed", words[:, :-1].clone()),
            ("weight_packed", words[:-1].clone()),
            ("weight_packed", words[0].clone()),
            ("weight_scale", None),
            ("weight_scale", scales.float()),
            ("weight_scale", scales[:, :-1].clone()),
            ("weight_scale", scales.T.contiguous()),
            ("weight_shape", None),
            ("weight_shape", torch.tensor([1, 2, 3])),
            ("weight_shape", torch.tensor([128, 64], dtype=torch.int32)),
            ("weight_zero_point", words.clone()),
            ("weight_g_idx", torch.zeros(64, dtype=torch.int32)),
            ("weight", torch.zeros(128, 64)),
            ("bias", torch.zeros(128)),
        ):
            with self.subTest(part=part, value=None if value is None else list(value.shape)):
                changed = dict(whole)
                changed.pop(f"{Q_PROJ}.{part}", None)
                if value is not None:
                    changed[f"{Q_PROJ}.{part}"] = value
                save_file(changed, self.file)
                self.assertIn(Q_PROJ, self.refusal())

    def test_a_stated_shape_that_is_another(self) -> None:
        self.rewrite(lambda tensors: tensors[f"{Q_PROJ}.weight_shape"].add_(1))
        with self.assertRaisesRegex(WeightsRefused, "layers.0.self_attn.q_proj"):
            open_weights(self.folder, self.config)

    def test_what_config_and_files_disagree_over(self) -> None:
        for ignored in (["lm_head", Q_PROJ], ["lm_head", r"re:.*layers\.0\.self_attn\.q"]):
            self.say(ignore=ignored)
            said = self.refusal()
            self.assertIn(f"{Q_PROJ}.weight", said)
            self.assertIn("config.json says plain", said)
        self.say(ignore=packed_config()["ignore"])

        def unpack(tensors: dict[str, Any]) -> None:
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{Q_PROJ}.{part}"]
            tensors[f"{Q_PROJ}.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)

        self.rewrite(unpack)
        self.assertIn("config.json says packed", self.refusal())
        self.say(ignore=["lm_head", Q_PROJ])  # and now they agree
        opened = open_weights(self.folder, self.config)
        self.assertNotIsInstance(opened["layers.0.self_attn.q_proj.weight"], PackedMatrix)

    def test_targets_may_be_expressions(self) -> None:
        said = packed_config()
        said["config_groups"]["group_0"]["targets"] = [r"re:model\.layers\..*"]
        self.say(**said)
        self.assertIn("per_layer_model_projection", self.refusal())

    def test_packed_without_a_word_in_the_config(self) -> None:
        self.config = read_config(write_config(self.folder, STATED))
        self.assertIn("quantization_config", self.refusal())

    def test_tables_and_heads_that_are_packed(self) -> None:
        for module in ("model.embed_tokens", "model.embed_tokens_per_layer", "lm_head"):
            with self.subTest(module=module):
                before = load_file(self.file)

                def pack(tensors: dict[str, Any], module: str = module) -> None:
                    rows, columns = tensors.pop(f"{module}.weight").shape
                    words = torch.zeros(rows, columns // 8, dtype=torch.int32)
                    scales = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
                    tensors[f"{module}.weight_packed"] = words
                    tensors[f"{module}.weight_scale"] = scales
                    tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])

                self.rewrite(pack)
                self.assertIn(f"{module}.weight", self.refusal())
                save_file(before, self.file)


class UnpackingTest(unittest.TestCase):
    def test_every_integer_with_scales_of_every_size(self) -> None:
        """Against compressed-tensors: rounding, signs, the order in a word, and tiny scales."""
        from compressed_tensors.compressors import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationScheme

        random = np.random.default_rng(9)
        words = random.integers(0, 1 << 32, (64, 24), dtype=np.uint32)
        words[0] = 0x76543210
        words[1] = 0xFEDCBA98
        exponents = random.uniform(-38, 30, (64, 6))
        scales = (10.0**exponents * random.choice([-1, 1], (64, 6))).astype(ml_dtypes.bfloat16)
        mine = unpacked_matrix(PackedMatrix(words, scales))
        (stated,) = packed_config()["config_groups"].values()
        theirs = PackedQuantizationCompressor.decompress(
            {
                "weight_packed": torch.from_numpy(words.view(np.int32)),
                "weight_scale": torch.from_numpy(scales.view(np.int16)).view(torch.bfloat16),
                "weight_shape": torch.tensor([64, 192]),
            },
            QuantizationScheme(**stated),
        )["weight"]
        self.assertGreater(len(np.unique(mine.view(np.int16))), 3000)
        np.testing.assert_array_equal(mine.view(np.int16), theirs.view(torch.int16).numpy())


if __name__ == "__main__":
    unittest.main()
