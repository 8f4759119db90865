"""The reader of GGUF headers, on files written by the gguf package and on each way to spoil one."""

from __future__ import annotations

import struct
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from forge.parts.boundaries import gguf_file
from forge.parts.boundaries.gguf_config import gguf_geometry
from forge.parts.boundaries.gguf_file import GgufFile, KvLayer, read_gguf
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.models import GEMMA4

# E2B's attention as its file has it: 35 layers, every fifth sees all, the last 20 share.
E2B: dict[str, Any] = {
    "block_count": 35,
    "context_length": 131072,
    "embedding_length": 1536,
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "attention.sliding_window": 512,
    "attention.shared_kv_layers": 20,
    "attention.sliding_window_pattern": [(layer + 1) % 5 != 0 for layer in range(35)],
    "feed_forward_length": [6144] * 15 + [12288] * 20,
}


def write_model(
    path: Path,
    keys: dict[str, Any],
    *,
    architecture: str = "gemma4",
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    general: dict[str, Any] | None = None,
    vocabulary: int = 0,
) -> Path:
    """A GGUF file written by the gguf package; keys without a dot-name get the architecture's."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {
        **{f"{architecture}.{k}": v for k, v in keys.items()},
        **(general or {}),
    }.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if vocabulary:
        writer.add_token_list([f"piece {number}" for number in range(vocabulary)])
        writer.add_token_scores([0.0] * vocabulary)
    chosen = {"token_embd.weight": np.zeros((8, 4), np.float32)} if tensors is None else tensors
    for name, data in chosen.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "m.gguf"

    def refused(self, path: Path | None = None) -> str:
        """The words of the refusal of the file; its class is INVALID and it says what to do."""
        with self.assertRaises(RigError) as caught:
            read_gguf(path or self.path)
        self.assertEqual(caught.exception.error_class, "INVALID")
        self.assertTrue(caught.exception.next_step)
        self.assertIn(str(path or self.path), caught.exception.what)
        return caught.exception.what

    def read(self, keys: dict[str, Any], **options: Any) -> GgufFile:
        return read_gguf(write_model(self.path, keys, **options))


class WholeFileTest(Case):
    def test_what_a_model_is(self) -> None:
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "token_embd.weight": np.zeros((100, 64), np.float32),
            "per_layer_token_embd.weight": np.zeros((100, 32), np.float16),
            "blk.0.ffn_up.weight": np.zeros((128, 64), np.float16),
            "output_norm.weight": np.zeros(64, np.float32),
        }
        keys = {"block_count": 3, "context_length": 77, "embedding_length": 64}
        found = self.read(
            keys, tensors=tensors, general={"tokenizer.chat_template": "{{ m }}"}, vocabulary=100
        )
        self.assertEqual(found.architecture, "gemma4")
        self.assertEqual((found.context_length, found.block_count, found.vocabulary), (77, 3, 100))
        self.assertEqual(found.per_layer_embedding_size, 100 * 32 * 2)
        self.assertEqual(found.size, 100 * 64 * 4 + 100 * 32 * 2 + 128 * 64 * 2 + 64 * 4)
        self.assertEqual(found.encoding, "F16")
        self.assertTrue(found.has_chat_template)
        self.assertNotIn("tokenizer.ggml.tokens", found.metadata)
        self.assertEqual([t.name for t in found.tensors], list(tensors))

    def test_without_a_template_or_heads_nothing_is_made_up(self) -> None:
        found = self.read({})
        self.assertFalse(found.has_chat_template)
        self.assertEqual(found.kv_layers(), ())
        self.assertIsNone(found.context_length)
        self.assertIsNone(found.vocabulary)
        self.assertEqual(found.largest("feed_forward_length"), 0)

    def test_a_value_of_the_wrong_kind_counts_as_absent(self) -> None:
        found = self.read({"block_count": "many", "context_length": -0.5, "embedding_length": True})
        self.assertIsNone(found.block_count)
        self.assertIsNone(found.context_length)
        self.assertEqual(found.kv_layers(), ())

    def test_every_quantised_type_has_the_packages_size(self) -> None:
        """A tensor of 512 elements in each type that the gguf package knows."""
        for kind, (block, size) in GGML_QUANT_SIZES.items():
            with self.subTest(kind.name):
                head = _header([("w", [block * 2], int(kind), 0)])
                self.path.write_bytes(_aligned(head) + bytes(2 * size))
                (tensor,) = read_gguf(self.path).tensors
                self.assertEqual((tensor.type_name, tensor.size), (kind.name, 2 * size))

    def test_layout_2_is_read_too(self) -> None:
        write_model(self.path, {"block_count": 2})
        data = bytearray(self.path.read_bytes())
        data[4:8] = struct.pack("<I", 2)
        self.path.write_bytes(data)
        self.assertEqual(read_gguf(self.path).block_count, 2)

    def test_another_alignment_moves_the_data(self) -> None:
        head = _header([("w", [8], 0, 0)], {"general.alignment": 4096})
        whole = head + bytes(-len(head) % 4096) + bytes(32)
        self.path.write_bytes(whole)
        self.assertEqual(read_gguf(self.path).size, 32)
        self.path.write_bytes(whole[:-1])
        self.assertIn("lacks its last 1 bytes", self.refused())

    def test_a_large_vocabulary_is_passed_over(self) -> None:
        found = self.read({"block_count": 1}, vocabulary=200_000)
        self.assertEqual(found.block_count, 1)
        self.assertFalse([k for k in found.metadata if k.startswith("tokenizer.ggml.to")])


class AttentionTest(Case):
    def test_the_layers_of_e2b_and_what_they_take(self) -> None:
        layers = self.read(E2B).kv_layers()
        self.assertEqual(len(layers), 15)
        self.assertEqual([i for i, layer in enumerate(layers) if layer.window is None], [4, 9, 14])
        self.assertEqual(set(layers), {KvLayer(512, 512), KvLayer(1024, None)})
        growing = 2 * sum(layer.width for layer in layers if layer.window is None)
        windowed = 2 * sum(layer.width * (layer.window or 0) for layer in layers)
        self.assertEqual((growing, windowed), (6 * 1024, 12 * 512 * 512 * 2))
        # The same from the model's own config, by the arithmetic of the knowledge section.
        geometry = Geometry(
            layer_types=tuple(
                "sliding_attention" if slides else "full_attention"
                for slides in E2B["attention.sliding_window_pattern"]
            ),
            hidden=1536,
            intermediate=6144,
            heads=8,
            kv_heads=1,
            global_kv_heads=1,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=512,
            kv_shared_layers=20,
        )
        for context in (256, 512, 4096):
            by_config = kv_bytes(geometry, context, slots=1, dtype_bytes=2, layout="ring")
            by_file = 2 * sum(
                layer.width * min(context, layer.window or context) for layer in layers
            )
            self.assertEqual(by_file, by_config, context)

    def test_a_number_of_heads_for_each_layer(self) -> None:
        keys = {
            "block_count": 3,
            "embedding_length": 64,
            "attention.head_count": [4, 4, 8],
            "attention.head_count_kv": [2, 2, 1],
            "attention.key_length": 16,
            "attention.value_length": 8,
        }
        widths = [layer.width for layer in self.read(keys).kv_layers()]
        self.assertEqual(widths, [48, 48, 24])

    def test_lengths_come_from_the_width_where_they_are_not_given(self) -> None:
        keys = {"block_count": 2, "embedding_length": 576, "attention.head_count": 9}
        keys["attention.head_count_kv"] = 3
        self.assertEqual(self.read(keys).kv_layers(), (KvLayer(384, None),) * 2)
        del keys["attention.head_count_kv"]
        self.assertEqual(self.read(keys).kv_layers(), (KvLayer(1152, None),) * 2)

    def test_a_window_without_a_list_of_layers_counts_in_full(self) -> None:
        keys = {**E2B, "attention.sliding_window_pattern": 6}
        self.assertEqual({layer.window for layer in self.read(keys).kv_layers()}, {None})

    def test_absurd_counts_give_no_layers(self) -> None:
        for key in ("block_count", "attention.shared_kv_layers"):
            found = self.read({**E2B, key: 4_000_000_000})
            self.assertEqual(found.kv_layers(), (), key)


class ShapeTest(Case):
    """The shape in the words of a config.json, against the shapes that the planner knows."""

    def test_e2b_and_what_it_lacks(self) -> None:
        keys = {**E2B, "embedding_length_per_layer_input": 256}
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "token_embd.weight": np.zeros((32, 1536), np.float16),
            "blk.4.attn_v.weight": np.zeros((8, 32), np.float16),
        }
        shape = gguf_geometry(self.read(keys, tensors=tensors))
        known = GEMMA4["E2B"].geometry
        self.assertEqual(shape, replace(known, vocab=32, ple_vocab=32))
        del tensors["blk.4.attn_v.weight"]
        self.assertTrue(gguf_geometry(self.read(keys, tensors=tensors)).k_eq_v)
        tensors["output.weight"] = np.zeros((32, 1536), np.float16)
        self.assertFalse(gguf_geometry(self.read(keys, tensors=tensors)).tied)

    def test_a_plain_decoder(self) -> None:
        keys = {"block_count": 30, "embedding_length": 576, "feed_forward_length": 1536}
        keys |= {"attention.head_count": 9, "attention.head_count_kv": 3}
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "token_embd.weight": np.zeros((64, 576), np.float16)
        }
        shape = gguf_geometry(self.read(keys, tensors=tensors, architecture="llama"))
        self.assertEqual((shape.layers, shape.hidden, shape.intermediate), (30, 576, 1536))
        self.assertEqual((shape.heads, shape.kv_heads, shape.head_dim), (9, 3, 64))
        self.assertEqual((shape.vocab, shape.tied), (64, True))

    def test_what_is_not_understood_is_named(self) -> None:
        for keys, architecture, words in (
            ({}, "gemma4", "block_count"),
            ({**E2B, "attention.sliding_window_pattern": [True]}, "gemma4", "pattern"),
            ({**E2B, "attention.head_count_kv": [1] * 34 + [2]}, "gemma4", "head_count_kv"),
            ({}, "llama", "missing"),
            ({}, "mamba", "mamba is not understood"),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                gguf_geometry(self.read(keys, architecture=architecture))


class SpoiltFileTest(Case):
    def spoilt(self, place: int, data: bytes) -> str:
        write_model(self.path, {"block_count": 3})
        with self.path.open("r+b") as file:
            file.seek(place)
            file.write(data)
        return self.refused()

    def test_no_file_or_none_that_can_be_read(self) -> None:
        self.assertIn("No such file", self.refused())
        self.assertIn("directory", self.refused(self.folder))
        loop = self.folder / "loop.gguf"
        loop.symlink_to(loop)
        self.assertIn("cannot be read", self.refused(loop))

    def test_the_first_bytes(self) -> None:
        self.path.write_bytes(b"")
        self.assertIn("cut off within its header", self.refused())
        self.assertIn("no GGUF file", self.spoilt(0, b"ggjt"))
        self.assertIn("its layout is 1", self.spoilt(4, struct.pack("<I", 1)))
        self.assertIn("its layout is 99", self.spoilt(4, struct.pack("<I", 99)))
        self.assertIn("big-endian", self.spoilt(4, struct.pack(">I", 3)))

    def test_lengths_beyond_any_model_cost_nothing(self) -> None:
        huge = struct.pack("<Q", 2**63)
        self.assertIn("tensors, which no model has", self.spoilt(8, huge))
        self.assertIn("keys, which no model has", self.spoilt(16, huge))
        self.assertIn("bytes of text, which no model has", self.spoilt(24, huge))

    def test_every_cut_is_seen(self) -> None:
        whole = write_model(self.path, {"block_count": 3}).read_bytes()
        for size in range(0, len(whole)):
            self.path.write_bytes(whole[:size])
            self.assertRegex(self.refused(), "cut off|lacks its last")

    def test_no_damage_of_a_byte_raises_anything_else(self) -> None:
        whole = write_model(self.path, E2B, vocabulary=3).read_bytes()
        refused = 0
        for place in range(0, len(whole) - 128, 3):
            for value in (0x00, 0xFF):
                self.path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
                try:
                    found = read_gguf(self.path)
                    found.kv_layers()
                    self.assertGreaterEqual(found.size, 0)
                except RigError as error:
                    self.assertEqual(error.error_class, "INVALID")
                    refused += 1
        self.assertGreater(refused, 100)

    def test_keys(self) -> None:
        cases = {
            "stands twice": _header([], {"general.architecture": "x", "a": 1}, twice="a"),
            "unknown type 77": _header([], {"general.architecture": "x"}, raw=("k", 77, b"")),
            "list of an unknown type 9": _header(
                [], {"general.architecture": "x"}, raw=("k", 9, struct.pack("<IQ", 9, 1))
            ),
            "elements of k, which no model has": _header(
                [], {"general.architecture": "x"}, raw=("k", 9, struct.pack("<IQ", 4, 2**40))
            ),
            "names no architecture": _header([], {"general.architecture": 5}),
            "alignment": _header(
                [("w", [8], 0, 0)], {"general.architecture": "x", "general.alignment": 33}
            ),
        }
        for words, data in cases.items():
            with self.subTest(words):
                self.path.write_bytes(data + bytes(64))
                self.assertIn(words, self.refused())

    def test_a_list_of_texts_that_runs_out_of_the_file(self) -> None:
        for lengths in ([5, 2**62], [2**63 + 9], [300_000_000]):
            texts = b"".join(struct.pack("<Q", length) + b"piece" for length in lengths)
            raw = ("k", 9, struct.pack("<IQ", 8, len(lengths)) + texts)
            self.path.write_bytes(_header([], {"general.architecture": "x"}, raw=raw))
            self.assertRegex(self.refused(), "cut off within its header|beyond all bounds")

    def test_a_header_that_never_ends_is_left(self) -> None:
        write_model(self.path, {}, vocabulary=2000)
        limits: dict[str, Any] = {"_GGUF_HEADER_LIMIT": 10_000, "_READ_AT_ONCE": 1000}
        with mock.patch.multiple(gguf_file, **limits):
            self.assertIn("beyond all bounds", self.refused())
        with mock.patch.multiple(gguf_file, _READ_AT_ONCE=1000):
            self.assertEqual(read_gguf(self.path).architecture, "gemma4")

    def test_tensors(self) -> None:
        cases: dict[str, list[tuple[str, list[int], int, int]]] = {
            "stands twice": [("w", [8], 0, 0), ("w", [8], 0, 32)],
            "has 0 dimensions": [("w", [], 0, 0)],
            "has 5 dimensions": [("w", [1, 1, 1, 1, 1], 0, 0)],
            "unknown type 5": [("w", [8], 5, 0)],
            "a shape that Q4_0 cannot hold": [("w", [33], 2, 0)],
            "a shape that F32 cannot hold": [("w", [8, 0], 0, 0)],
            "not aligned": [("w", [8], 0, 7)],
            "which no model has": [("w", [2**62], 0, 0)],
            "lacks its last": [("w", [2**30, 2**9], 0, 0)],
        }
        for words, tensors in cases.items():
            with self.subTest(words):
                self.path.write_bytes(_aligned(_header(tensors)) + bytes(64))
                self.assertIn(words, self.refused())

    def test_what_is_no_model(self) -> None:
        cases: dict[str, dict[str, Any]] = {
            "a projector for pictures": {"architecture": "clip"},
            "it holds adapter, no model": {"general": {"general.type": "adapter"}},
            "one of 4 parts": {"general": {"split.count": 4}},
            "a vocabulary and no weights": {"tensors": {}},
        }
        for words, options in cases.items():
            with self.subTest(words):
                write_model(self.path, {}, **options)
                self.assertIn(words, self.refused())
        write_model(self.path, {}, general={"split.count": 1})
        self.assertEqual(read_gguf(self.path).metadata["split.count"], 1)

    def test_it_reads_the_header_and_not_the_weights(self) -> None:
        """A sparse file that announces a terabyte, and has it: its bytes would take minutes."""
        head = _aligned(_header([("w", [1 << 20, 1 << 18], 0, 0)]))
        with self.path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + (1 << 40))
        self.assertEqual(read_gguf(self.path).size, 1 << 40)


def _header(
    tensors: list[tuple[str, list[int], int, int]],
    keys: dict[str, int | str] | None = None,
    *,
    twice: str = "",
    raw: tuple[str, int, bytes] | None = None,
) -> bytes:
    """A header byte by byte: tensors as (name, shape, type, place), 32-bit and text values."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    values = {"general.architecture": "x", **(keys or {})}
    rows = list(values.items()) + ([(twice, 2)] if twice else [])
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(rows) + bool(raw))
    for key, value in rows:
        kind = 8 if isinstance(value, str) else 4
        body = text(value) if isinstance(value, str) else struct.pack("<I", value)
        out += text(key) + struct.pack("<I", kind) + body
    if raw:
        out += text(raw[0]) + struct.pack("<I", raw[1]) + raw[2]
    for name, shape, kind, place in tensors:
        out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", kind, place)
    return out


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


if __name__ == "__main__":
    unittest.main()
