"""Tests of opening weights: every tensor by name, no copy, and no damaged file gets through."""

from __future__ import annotations

import json
import os
import random
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.refusal import WeightsRefused
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_files import open_weights, stored_tensors
from tests.engines.gemma4_files import (
    ELEMENTS,
    legacy,
    model_folder,
    moe_config,
    random_tensors,
    safetensors_bytes,
    smaller,
    text_config,
    with_header,
    wrapped,
    write_config,
)

SMALL, SMALL_MOE = smaller(text_config()), smaller(moe_config())
INDEX = "model.safetensors.index.json"


class WeightsCase(unittest.TestCase):
    """A folder of its own for each test."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name) / "model"

    def made(self, config: Mapping[str, Any] | None = None, **how: Any) -> Gemma4Config:
        return model_folder(self.folder, config, **how)[1]

    def refusal(self, config: Gemma4Config) -> str:
        """The words in which the folder's weights are refused; headers alone have to do."""
        with self.assertRaises(WeightsRefused) as caught:
            stored_tensors(self.folder, config)
        with self.assertRaises(WeightsRefused) as again:
            open_weights(self.folder, config)
        self.assertEqual(str(again.exception), str(caught.exception))
        return str(caught.exception)

    def rewrite(self, tensors: Mapping[str, Any]) -> None:
        (self.folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))


class WhatIsOpened(WeightsCase):
    def test_every_tensor_of_every_variant_under_every_prefix(self) -> None:
        variants: dict[str, Any] = {
            "e2b": text_config(),
            "e4b": text_config(use_double_wide_mlp=False),
            "12b": moe_config(enable_moe_block=False),
            "moe": moe_config(),
            "wrapped": wrapped(text_config()),
            "legacy": legacy(moe_config()),
        }
        for variant, stated in variants.items():
            for prefix in ("model.", "model.language_model.", ""):
                with self.subTest(variant=variant, prefix=prefix):
                    config = self.made(stated, prefix=prefix)
                    opened = open_weights(self.folder, config)
                    self.assertEqual(set(opened), set(model_tensors(config)))
                    for name, value in random_tensors(config, "").items():
                        np.testing.assert_array_equal(opened[name], value)

    def test_shapes_of_the_kinds_of_layers(self) -> None:
        tensors = model_tensors(self.made())
        self.assertEqual(tensors["layers.0.self_attn.q_proj.weight"], (128, 64))
        self.assertEqual(tensors["layers.2.self_attn.q_proj.weight"], (256, 64))
        self.assertEqual(tensors["layers.2.self_attn.k_proj.weight"], (64, 64))
        self.assertEqual(tensors["layers.7.mlp.down_proj.weight"], (64, 256))
        self.assertEqual(tensors["embed_tokens_per_layer.weight"], (512, 8 * 16))
        self.assertNotIn("layers.5.self_attn.k_proj.weight", tensors)
        sparse = model_tensors(self.made(moe_config()))
        self.assertEqual(sparse["layers.0.experts.gate_up_proj"], (8, 64, 64))
        self.assertEqual(sparse["layers.0.experts.down_proj"], (8, 64, 32))
        self.assertNotIn("layers.2.self_attn.v_proj.weight", sparse)
        self.assertIn("layers.0.self_attn.v_proj.weight", sparse)
        self.assertNotIn("embed_tokens_per_layer.weight", sparse)

    def test_each_element_type_bit_for_bit(self) -> None:
        for element in ("BF16", "F16", "F32"):
            config = self.made(element=element)
            opened = open_weights(self.folder, config)
            for name, value in random_tensors(config, "", element).items():
                self.assertEqual(opened[name].dtype, value.dtype)
                self.assertEqual(opened[name].tobytes(), value.tobytes())

    def test_types_may_be_mixed(self) -> None:
        config = self.made(element="BF16")
        tensors = random_tensors(config, element="BF16")
        tensors["model.norm.weight"] = np.ones(64, np.float32)
        self.rewrite(tensors)
        opened = open_weights(self.folder, config)
        self.assertEqual(opened["norm.weight"].dtype, np.float32)
        self.assertEqual(opened["embed_tokens.weight"].dtype, ml_dtypes.bfloat16)

    def test_views_are_the_file_itself(self) -> None:
        """What is written into the file afterwards is seen: nothing was copied."""
        config = self.made()
        opened = open_weights(self.folder, config)
        place = stored_tensors(self.folder, config)["norm.weight"]
        with (self.folder / "model.safetensors").open("r+b") as file:
            file.seek(place.begin)
            file.write(np.float32(123.5).tobytes())
        self.assertEqual(opened["norm.weight"][0], 123.5)
        for view in opened.values():
            self.assertFalse(view.flags.writeable)
            self.assertFalse(view.flags.owndata)
        with self.assertRaises(ValueError):
            opened["norm.weight"][0] = 1.0

    def test_views_outlive_the_mapping_that_gave_them(self) -> None:
        config = self.made()
        norm = open_weights(self.folder, config)["norm.weight"]
        (self.folder / "model.safetensors").unlink()
        np.testing.assert_array_equal(norm, random_tensors(config)["model.norm.weight"])

    def test_towers_are_passed_over_whatever_they_hold(self) -> None:
        towers = {
            "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight": np.ones((3, 5)),
            "model.audio_tower.output_proj.bias": np.ones(3, np.int8),
            "model.embed_vision.embedding_projection.weight": np.ones((2, 2), np.float32),
            "model.embed_audio.embedding_projection.weight": np.ones((2, 2), np.float32),
            "model.vision_embedder.pos_embedding": np.ones((8, 2, 4), np.float16),
            "vision_tower.patch_embedder.input_proj.weight": np.ones((1, 1), np.float32),
        }
        prefix = "model.language_model."
        config = self.made(wrapped(text_config()), prefix=prefix, more=towers)
        self.assertEqual(set(open_weights(self.folder, config)), set(model_tensors(config)))

    def test_keys_that_nothing_reads_are_passed_over_in_sharing_layers_alone(self) -> None:
        idle = {
            f"model.layers.{layer}.self_attn.{part}.weight": np.ones((3, 3), np.float32)
            for layer in (5, 6, 7)
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        }
        config = self.made(more=idle)
        self.assertEqual(set(open_weights(self.folder, config)), set(model_tensors(config)))
        owners = {"model.layers.4.self_attn.v_norm.weight": np.ones(64, np.float32)}
        self.assertIn("model.layers.4.self_attn.v_norm", self.refusal(self.made(more=owners)))

    def test_a_stored_head_has_to_be_the_embedding(self) -> None:
        config = self.made()
        embedding = random_tensors(config)["model.embed_tokens.weight"]
        self.made(more={"lm_head.weight": embedding})
        self.assertNotIn("lm_head.weight", open_weights(self.folder, config))
        moved = embedding.copy()
        moved[-1, -1] += 1
        for other in (moved, embedding.astype(np.float16)):
            self.made(more={"lm_head.weight": other})
            with self.assertRaisesRegex(WeightsRefused, "lm_head.weight is another"):
                open_weights(self.folder, config)
        self.made(more={"lm_head.weight": embedding[:-1]})
        self.assertIn("lm_head.weight", self.refusal(config))


class WhatIsRefused(WeightsCase):
    """Each by the tensor's or the file's name."""

    def test_every_tensor_that_is_missing(self) -> None:
        for stated in (text_config(), moe_config()):
            config = self.made(smaller(stated))
            tensors = random_tensors(config)
            for name in tensors:
                self.rewrite({other: tensors[other] for other in tensors if other != name})
                said = self.refusal(config)
                self.assertIn("embed_tokens" if "embed_tokens.weight" in name else name, said)

    def test_every_tensor_of_another_shape(self) -> None:
        config = self.made(SMALL)
        tensors = random_tensors(config)
        for name, value in tensors.items():
            for other in (value[:-1], value[None], value[..., None]):
                self.rewrite(tensors | {name: other})
                said = self.refusal(config)
                self.assertIn(name, said)
                self.assertIn(str(list(value.shape)), said)

    def test_the_same_elements_in_another_order(self) -> None:
        config = self.made()  # where q_proj is square, no shape could tell
        tensors = random_tensors(config)
        name = "model.layers.0.self_attn.q_proj.weight"
        self.rewrite(tensors | {name: tensors[name].T})
        self.assertIn(name, self.refusal(config))

    def test_elements_that_are_not_read(self) -> None:
        config = self.made(SMALL)
        tensors = random_tensors(config)
        for element in ("I8", "F64"):
            name = "model.layers.1.mlp.up_proj.weight"
            self.rewrite(tensors | {name: tensors[name].astype(ELEMENTS[element])})
            said = self.refusal(config)
            self.assertIn(name, said)
            self.assertIn(element, said)

    def test_tensors_that_nothing_would_read(self) -> None:
        config = self.made(SMALL)
        for name in (
            "model.layers.8.input_layernorm.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.self_attn.q_proj.weight_scale",
            "model.layers.00.input_layernorm.weight",
            "layers.0.input_layernorm.weight",
            "model.lm_head.weight",
            "score.weight",
            "model.audio.weight",
        ):
            with self.subTest(name=name):
                self.made(SMALL, more={name: np.ones(8, np.float32)})
                self.assertIn(name, self.refusal(config))

    def test_tables_and_experts_that_the_config_does_not_have(self) -> None:
        sparse = self.made(SMALL_MOE)
        write_config(self.folder, SMALL_MOE | {"enable_moe_block": False})
        self.assertIn("router", self.refusal(read_config(self.folder)))
        self.made(SMALL)
        self.assertIn("unknown", self.refusal(sparse))

    def test_two_text_models_or_none(self) -> None:
        config = self.made(SMALL)
        both = random_tensors(config) | random_tensors(config, "model.language_model.")
        self.rewrite(both)
        self.assertIn("2 text models", self.refusal(config))
        self.rewrite(random_tensors(config, "transformer."))
        self.assertIn("0 text models", self.refusal(config))

    def test_no_weights(self) -> None:
        config = self.made(SMALL)
        (self.folder / "model.safetensors").unlink()
        self.assertIn("has no model.safetensors", self.refusal(config))


class DamagedFiles(WeightsCase):
    def setUp(self) -> None:
        super().setUp()
        self.config = self.made(SMALL)
        self.file = self.folder / "model.safetensors"
        self.whole = self.file.read_bytes()
        length = int.from_bytes(self.whole[:8], "little")
        self.header: dict[str, Any] = json.loads(self.whole[8 : 8 + length])
        self.body = self.whole[8 + length :]

    def said(self, content: bytes) -> str:
        self.file.write_bytes(content)
        return self.refusal(self.config)

    def changed(self, name: str, **entry: Any) -> str:
        header = self.header | {name: self.header[name] | entry}
        return self.said(with_header(header, self.body))

    def test_cut_off_anywhere(self) -> None:
        size = len(self.whole)
        for length in (*range(9), 100, 3_000, size // 2, size - 1_000, size - 1):
            self.assertIn("model.safetensors", self.said(self.whole[:length]))
        self.assertIn("lacks its last 1 bytes", self.said(self.whole[:-1]))

    def test_bytes_too_many(self) -> None:
        self.assertIn("1 bytes too many", self.said(self.whole + b"x"))

    def test_a_header_longer_than_the_file(self) -> None:
        for length in (len(self.whole) - 7, 1 << 40, (1 << 64) - 1):
            self.assertIn("cut off", self.said(length.to_bytes(8, "little") + self.whole[8:]))

    def test_no_header(self) -> None:
        for text in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
            self.assertIn("header of model.safetensors", self.said(with_header(text, self.body)))

    def test_a_name_twice(self) -> None:
        text = json.dumps(self.header)
        first = '"model.norm.weight": {'
        entry = text[text.index(first) : text.index("}", text.index(first)) + 1]
        twice = text[:-1] + ", " + entry + "}"
        self.assertIn(
            "'model.norm.weight' twice", self.said(with_header(twice.encode(), self.body))
        )

    def test_offsets_that_cannot_be(self) -> None:
        name = "model.norm.weight"
        begin, end = self.header[name]["data_offsets"]
        for offsets in (
            [begin - 4, end - 4],
            [begin + 4, end + 4],
            [len(self.body), len(self.body) + 32],
            [1 << 50, (1 << 50) + 32],
            [begin, end + 4],
            [end, begin],
            [begin, begin],
            [begin],
            [begin, end, end],
            [-32, 0],
            [float(begin), float(end)],
            [str(begin), str(end)],
            None,
            {},
            [False, 32],
        ):
            with self.subTest(offsets=offsets):
                self.assertIn("model.", self.changed(name, data_offsets=offsets))

    def test_two_tensors_in_the_same_bytes(self) -> None:
        one, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
        said = self.changed(other, data_offsets=self.header[one]["data_offsets"])
        self.assertRegex(said, "overlaps|hole")

    def test_shapes_and_types_that_cannot_be(self) -> None:
        name = "model.norm.weight"
        for entry in (
            {"shape": [9]},
            {"shape": [-8]},
            {"shape": [2.0, 4]},
            {"shape": [True, 8]},
            {"shape": 8},
            {"shape": None},
            {"shape": [1 << 62, 1 << 62]},
            {"dtype": "F16"},
            {"dtype": "F4"},
            {"dtype": None},
            {"dtype": ["F32"]},
            {"strides": [1]},
        ):
            with self.subTest(entry=entry):
                self.assertIn(name, self.changed(name, **entry))
        header = self.header | {name: [8]}
        self.assertIn(name, self.said(with_header(header, self.body)))

    def test_random_damage_is_refused_or_stays_in_the_file(self) -> None:
        """2,000 files with a few bytes of the header changed: a refusal, or whole views."""
        randomly = random.Random(8)
        length = len(self.whole) - len(self.body)
        refused = 0
        for _ in range(2000):
            damaged = bytearray(self.whole)
            for _ in range(randomly.randint(1, 4)):
                damaged[randomly.randrange(length)] = randomly.randrange(256)
            self.file.write_bytes(bytes(damaged))
            try:
                opened = open_weights(self.folder, self.config)
            except WeightsRefused:
                refused += 1
                continue
            for name, shape in model_tensors(self.config).items():
                self.assertEqual(opened[name].shape, shape)
        self.assertGreater(refused, 1500)


class Shards(WeightsCase):
    """Several files and their index."""

    def setUp(self) -> None:
        super().setUp()
        self.config = self.made(SMALL)
        (self.folder / "model.safetensors").unlink()
        self.tensors = random_tensors(self.config)
        self.map: dict[str, Any] = {}
        names = list(self.tensors)
        for shard in range(3):
            file = f"model-0000{shard + 1}-of-00003.safetensors"
            part = {name: self.tensors[name] for name in names[shard::3]}
            (self.folder / file).write_bytes(safetensors_bytes(part))
            self.map |= dict.fromkeys(part, file)
        self.index()

    def index(self, **changes: Any) -> None:
        content = {"metadata": {"total_size": 1}, "weight_map": self.map | changes}
        (self.folder / INDEX).write_text(json.dumps(content), encoding="utf-8")

    def test_they_are_read_as_one(self) -> None:
        opened = open_weights(self.folder, self.config)
        for name, value in self.tensors.items():
            np.testing.assert_array_equal(opened[name.removeprefix("model.")], value)

    def test_a_file_that_is_missing(self) -> None:
        (self.folder / "model-00002-of-00003.safetensors").unlink()
        self.assertIn("model-00002-of-00003", self.refusal(self.config))

    def test_a_tensor_in_another_file_than_the_index_says(self) -> None:
        name = "model.norm.weight"
        others = [file for file in set(self.map.values()) if file != self.map[name]]
        self.index(**{name: others[0]})
        self.assertIn(name, self.refusal(self.config))

    def test_a_tensor_that_the_index_forgets_or_invents(self) -> None:
        forgotten = self.map.pop("model.norm.weight")
        self.index()
        self.assertIn("model.norm.weight", self.refusal(self.config))
        self.map["model.norm.weight"] = forgotten
        self.index(**{"model.norm.bias": forgotten})
        self.assertIn("model.norm.bias", self.refusal(self.config))

    def test_files_outside_the_folder(self) -> None:
        outside = self.folder.parent / "outside.safetensors"
        outside.write_bytes(safetensors_bytes(self.tensors))
        for name in ("../outside.safetensors", str(outside), "a/../../outside.safetensors", ".."):
            self.map = dict.fromkeys(self.tensors, name)
            self.index()
            self.assertIn(name, self.refusal(self.config))

    def test_what_is_no_file_name(self) -> None:
        for name in (None, 1, ["x"], "", "weights.bin", "pytorch_model.bin"):
            self.map = dict.fromkeys(self.tensors, name)
            self.index()
            self.assertIn("no safetensors file", self.refusal(self.config))

    def test_names_that_no_system_takes(self) -> None:
        for name in ("x" * 5000 + ".safetensors", "a\0b.safetensors", "\ud800.safetensors"):
            self.map = dict.fromkeys(self.tensors, name)
            self.index()
            self.assertIn(name[:100], self.refusal(self.config))

    def test_an_index_without_a_map(self) -> None:
        for content in ("{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", ""):
            (self.folder / INDEX).write_text(content, encoding="utf-8")
            self.assertIn(INDEX, self.refusal(self.config))

    def test_one_file_and_an_index(self) -> None:
        self.rewrite(self.tensors)
        self.assertIn("remove what is not meant", self.refusal(self.config))

    def test_a_damaged_shard_is_named(self) -> None:
        file = self.folder / "model-00003-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
        self.assertIn("model-00003-of-00003", self.refusal(self.config))


class Links(WeightsCase):
    """Hugging Face's cache links its snapshots to blobs; any other way out is refused."""

    def cached(self) -> tuple[Path, Path]:
        """A snapshot folder and the blobs beside it, with the model moved there."""
        self.made(SMALL)
        repo = self.folder.parent / "models--google--gemma"
        snapshot, blobs = repo / "snapshots" / "0123abcd", repo / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for file in list(self.folder.iterdir()):
            blob = blobs / f"sha-of-{file.name}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        return snapshot, blobs

    def test_a_snapshot_of_the_cache(self) -> None:
        snapshot, _ = self.cached()
        config = read_config(snapshot)
        self.assertEqual(set(open_weights(snapshot, config)), set(model_tensors(config)))
        link = self.folder.parent / "link-to-the-snapshot"
        link.symlink_to(snapshot)
        self.assertEqual(set(open_weights(link, config)), set(model_tensors(config)))

    def test_a_snapshot_that_leads_elsewhere(self) -> None:
        snapshot, blobs = self.cached()
        config = read_config(snapshot)
        away = self.folder.parent / "away"
        (blobs / "sha-of-model.safetensors").rename(away)
        for target in (away, Path("../../../away"), Path("../../blobs/to")):
            (blobs / "to").unlink(missing_ok=True)
            (blobs / "to").symlink_to(away)
            (snapshot / "model.safetensors").unlink()
            (snapshot / "model.safetensors").symlink_to(target)
            with self.assertRaisesRegex(WeightsRefused, "leads out of the folder"):
                open_weights(snapshot, config)

    def test_a_link_within_the_folder(self) -> None:
        config = self.made(SMALL)
        (self.folder / "model.safetensors").rename(self.folder / "weights")
        (self.folder / "model.safetensors").symlink_to("weights")
        self.assertEqual(set(open_weights(self.folder, config)), set(model_tensors(config)))

    def test_links_that_lead_out_or_nowhere(self) -> None:
        config = self.made(SMALL)
        file = self.folder / "model.safetensors"
        file.rename(self.folder.parent / "elsewhere")
        file.symlink_to("../elsewhere")
        self.assertIn("leads out of the folder", self.refusal(config))
        file.unlink()
        file.symlink_to("nothing")
        self.assertIn("has no model.safetensors", self.refusal(config))
        file.unlink()
        file.symlink_to("model.safetensors")
        self.assertIn("has no model.safetensors", self.refusal(config))

    def test_pipes_and_folders(self) -> None:
        config = self.made(SMALL)
        file = self.folder / "model.safetensors"
        file.unlink()
        os.mkfifo(file)
        self.assertIn("no plain file", self.refusal(config))
        file.unlink()
        file.mkdir()
        self.assertIn("no plain file", self.refusal(config))
