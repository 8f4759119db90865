"""Reading a model folder: every refusal, and sizes against files made by hand and by safetensors.

Headers are written byte by byte after the format's description, so that the reader is not checked
against itself; huge ones are sparse files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.boundaries.checkpoint import Checkpoint, has_chat_template, read_checkpoint
from forge.parts.ground.errors import RigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
GEMMA4_TEXT = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
}


def write_header(path: Path, header: Any, size: int | None = None) -> None:
    """A safetensors file with `header` and then zeros, `size` bytes of them (sparse)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    if size is None:
        size = max((e["data_offsets"][1] for k, e in header.items() if k[0] != "_"), default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + size)


def tensors(**shapes: list[int]) -> dict[str, Any]:
    """A header of bf16 tensors, one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for extent in shape:
            size *= extent
        header[name.replace("__", ".")] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        end += size
    return header


class Case(unittest.TestCase):
    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = Path(place.name) / "model"
        self.folder.mkdir()
        self.write("config.json", LLAMA)
        self.write("tokenizer.json", {})
        self.write("tokenizer_config.json", {"chat_template": "{{ messages }}"})
        write_header(self.folder / "model.safetensors", tensors(w=[10, 20]))

    def write(self, name: str, value: Any) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    def read(self) -> Checkpoint:
        return read_checkpoint(self.folder)

    def refused(self, word: str, error_class: str = "INVALID") -> RigError:
        with self.assertRaises(RigError) as caught:
            self.read()
        self.assertEqual(caught.exception.error_class, error_class, caught.exception)
        self.assertIn(word, caught.exception.what)
        self.assertTrue(caught.exception.next_step, "a refusal without a way out")
        self.assertLess(len(str(caught.exception)), 1000)
        return caught.exception


class WholeTest(Case):
    def test_a_good_folder(self) -> None:
        checkpoint = self.read()
        self.assertEqual(checkpoint.architecture, "LlamaForCausalLM")
        self.assertEqual((checkpoint.size, checkpoint.geometry_fault), (400, ""))
        assert checkpoint.geometry is not None
        self.assertEqual(checkpoint.geometry.layers, 2)
        self.assertEqual([t.name for t in checkpoint.tensors], ["w"])

    def test_sizes_by_element_type(self) -> None:
        widths = {
            "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
            "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1,
            "BOOL": 1,
        }  # fmt: skip
        for kind, width in widths.items():
            header = {"w": {"dtype": kind, "shape": [3, 5], "data_offsets": [0, 15 * width]}}
            write_header(self.folder / "model.safetensors", header)
            with self.subTest(kind=kind):
                checkpoint = self.read()
                self.assertEqual(checkpoint.size, 15 * width)
                # Numbers are cast to the type that is loaded, packed weights are not.
                floating = kind in ("F64", "F32", "F16", "BF16")
                self.assertEqual(checkpoint.loaded_size(2), 30 if floating else 15 * width)
                self.assertEqual(checkpoint.loaded_size(4), 60 if floating else 15 * width)

    def test_scalars_and_empty_tensors(self) -> None:
        write_header(self.folder / "model.safetensors", tensors(scalar=[], empty=[0, 7], w=[3]))
        self.assertEqual([t.elements for t in self.read().tensors], [1, 0, 3])
        self.assertEqual(self.read().size, 8)

    def test_huge_files_are_measured_without_being_read(self) -> None:
        """60 GB in two sparse shards: a reader of tensors would never return."""
        header = tensors(a=[100_000, 100_000], b=[50_000, 100_000])
        (self.folder / "model.safetensors").unlink()
        for number in (1, 2):
            write_header(self.folder / f"model-{number}.safetensors", header)
        self.assertEqual(self.read().size, 60_000_000_000)

    def test_the_per_layer_table_is_told_apart(self) -> None:
        name = "model__language_model__embed_tokens_per_layer__weight"
        write_header(self.folder / "model.safetensors", tensors(**{name: [256, 32], "w": [4]}))
        checkpoint = self.read()
        self.assertEqual(checkpoint.per_layer_embedding_size(2), 256 * 32 * 2)
        self.assertEqual(checkpoint.per_layer_embedding_size(4), 256 * 32 * 4)
        self.assertEqual(checkpoint.size, 256 * 32 * 2 + 8)

    def test_a_config_wrapped_for_several_modalities(self) -> None:
        self.write(
            "config.json",
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "model_type": "gemma4",
                "text_config": GEMMA4_TEXT,
                "vision_config": {"model_type": "gemma4_vision", "hidden_size": 7},
            },
        )
        checkpoint = self.read()
        assert checkpoint.geometry is not None
        self.assertEqual(checkpoint.geometry.ple_dim, 16)
        self.assertEqual(checkpoint.geometry.global_head_dim, 32)
        self.assertEqual(checkpoint.architecture, "Gemma4ForConditionalGeneration")

    def test_a_shape_that_is_not_understood_is_told_and_no_refusal(self) -> None:
        for config in ({"model_type": "mamba"}, {}, {**LLAMA, "text_config": 7}):
            self.write("config.json", config)
            checkpoint = self.read()
            self.assertIsNone(checkpoint.geometry)
            self.assertIn("not understood", checkpoint.geometry_fault)
            self.assertEqual(checkpoint.size, 400)

    def test_odd_architectures(self) -> None:
        for named in (None, [], "x", {}, 7):
            self.write("config.json", {**LLAMA, "architectures": named})
            self.assertEqual(self.read().architecture, "unknown")

    def test_a_sentencepiece_tokenizer_will_do(self) -> None:
        (self.folder / "tokenizer.json").rename(self.folder / "tokenizer.model")
        self.assertEqual(self.read().size, 400)

    def test_a_snapshot_of_links_as_the_hubs_cache_has_it(self) -> None:
        blobs = self.folder.parent / "blobs"
        self.folder.rename(blobs)
        self.folder.mkdir()
        for path in blobs.iterdir():
            (self.folder / path.name).symlink_to(path)
        self.assertEqual(self.read().size, 400)
        (blobs / "model.safetensors").unlink()
        self.refused("model.safetensors cannot be read")

    def test_it_agrees_with_the_formats_own_library(self) -> None:
        try:
            import torch
            from safetensors.torch import save_file
        except ImportError:
            self.skipTest("torch and safetensors are not installed")
        made = {
            "a": torch.zeros(3, 5, dtype=torch.bfloat16),
            "b": torch.zeros(7, dtype=torch.int8),
            "c": torch.zeros(2, 2, dtype=torch.float64),
            "s": torch.tensor(1.0),
        }
        save_file(made, str(self.folder / "model.safetensors"), metadata={"format": "pt"})
        by_name = {t.name: (t.elements, t.size) for t in self.read().tensors}
        self.assertEqual(by_name, {k: (t.numel(), t.nbytes) for k, t in made.items()})


class ShardsTest(Case):
    def setUp(self) -> None:
        super().setUp()
        (self.folder / "model.safetensors").unlink()
        for number in (1, 2):
            name = f"model-0000{number}-of-00002.safetensors"
            write_header(self.folder / name, tensors(**{f"w{number}": [10 * number]}))
        self.index = {
            "metadata": {"total_size": 60},
            "weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)},
        }
        self.write("model.safetensors.index.json", self.index)

    def test_all_shards_count(self) -> None:
        self.assertEqual(self.read().size, 60)

    def test_a_missing_shard(self) -> None:
        (self.folder / "model-00002-of-00002.safetensors").unlink()
        error = self.refused("1 of 2 files are missing, model-00002-of-00002.safetensors first")
        self.assertIn("download", error.next_step)

    def test_the_same_weights_under_a_second_name_count_once(self) -> None:
        write_header(self.folder / "consolidated.safetensors", tensors(w1=[10], w2=[20]))
        self.assertEqual(self.read().size, 60)

    def test_a_damaged_index(self) -> None:
        for index in (
            b"",
            b"{",
            b"[]",
            {},
            {"weight_map": None},
            {"weight_map": []},
            {"weight_map": {}},
            b"[" * 100_000,
        ):
            self.write("model.safetensors.index.json", index)
            with self.subTest(index=index if isinstance(index, dict) else index[:5]):
                self.refused("index.json is damaged")

    def test_an_index_that_points_elsewhere(self) -> None:
        for value in ("../other/model.safetensors", "/etc/passwd", 7, None, ["x"], {}):
            self.write("model.safetensors.index.json", {"weight_map": {"w": value}})
            with self.subTest(value=value):
                self.refused("files are missing")


class RefusalTest(Case):
    def test_no_folder(self) -> None:
        shutil.rmtree(self.folder)
        self.refused("there is no such folder")
        self.folder.write_text("a file")
        self.refused("there is no such folder")

    def test_a_path_that_the_system_refuses(self) -> None:
        self.folder = Path("/" + "x" * 300)
        self.refused("cannot be read")

    @unittest.skipUnless(hasattr(os, "geteuid"), "no users here")
    def test_a_folder_that_may_not_be_read(self) -> None:
        inner = self.folder / "inner"
        inner.mkdir()
        locked = self.folder
        child = os.fork()
        if child == 0:  # in a process of its own, because root may read everything
            code = 1
            try:
                locked.chmod(0o000)
                locked.parent.chmod(0o755)
                if os.geteuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                try:
                    read_checkpoint(inner)
                except RigError as error:
                    code = 0 if error.error_class == "INVALID" else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        locked.chmod(0o700)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)

    def test_half_downloaded(self) -> None:
        for name in ("abc.incomplete", "model.safetensors.part", "x.tmp"):
            path = self.write(name, b"")
            self.refused(f"{name} shows an unfinished download")
            path.unlink()

    def test_config(self) -> None:
        (self.folder / "config.json").unlink()
        self.refused("no config.json")
        for content in (b"", b"{", b"[]", b'"x"', b"\xff\xfe\xff", b"[" * 100_000):
            self.write("config.json", content)
            self.refused("config.json is no JSON object")

    def test_code_of_its_own(self) -> None:
        for name in (
            "config.json",
            "tokenizer_config.json",
            "processor_config.json",
            "preprocessor_config.json",
        ):
            path = self.folder / name
            before = path.read_bytes() if path.exists() else b"{}"
            self.write(name, json.loads(before) | {"auto_map": {"AutoModel": "evil.Model"}})
            with self.subTest(name=name):
                self.refused("auto_map", "DENIED")
            path.write_bytes(before)
        self.assertEqual(self.read().size, 400)

    def test_pickles_beside_good_weights(self) -> None:
        for name in (
            "pytorch_model.bin",
            "model.pt",
            "consolidated.00.pth",
            "x.pkl",
            "x.pickle",
            "model.ckpt",
            "TRAINING_ARGS.BIN",
        ):
            path = self.write(name, b"\x80\x04.")
            with self.subTest(name=name):
                self.refused(name, "DENIED")
            path.unlink()

    def test_no_weights(self) -> None:
        (self.folder / "model.safetensors").unlink()
        self.refused("no .safetensors file")
        self.write("model.gguf", b"GGUF")
        self.refused("no .safetensors file")

    def test_no_tokenizer(self) -> None:
        (self.folder / "tokenizer.json").unlink()
        self.refused("no tokenizer")

    def test_no_chat_template(self) -> None:
        for settings in ({}, {"chat_template": ""}, {"chat_template": None}, [], b"{", b"\xff"):
            self.write("tokenizer_config.json", settings)
            self.assertFalse(has_chat_template(self.folder))
            error = self.refused("no chat template")
            self.assertIn("-it", error.next_step)
        (self.folder / "tokenizer_config.json").unlink()
        self.refused("no chat template")

    def test_where_a_chat_template_may_lie(self) -> None:
        (self.folder / "tokenizer_config.json").unlink()
        for name in ("chat_template.jinja", "chat_template.json"):
            path = self.write(name, b"{{ messages }}")
            self.assertTrue(has_chat_template(self.folder))
            self.assertEqual(self.read().size, 400)
            path.unlink()
        self.write("tokenizer_config.json", {"chat_template": [{"name": "default"}]})
        self.assertTrue(has_chat_template(self.folder))


class HeaderTest(Case):
    def header(self, header: Any, size: int | None = None) -> None:
        write_header(self.folder / "model.safetensors", header, size)

    def test_a_file_shorter_than_it_announces(self) -> None:
        path = self.folder / "model.safetensors"
        whole = path.read_bytes()
        for cut in (0, 1, 7, 8, 20, len(whole) - 400, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with self.subTest(cut=cut):
                error = self.refused("model.safetensors")
                self.assertIn("download", error.next_step)
        self.assertIn("lacks its last 1 bytes", error.what)

    def test_what_is_no_header(self) -> None:
        for raw in (b"", b"{", b"[]", b"\xff" * 50, b"[" * 100_000, b'"x"', b"<html></html>"):
            self.header(raw, 0)
            with self.subTest(raw=raw[:5]):
                self.refused("model.safetensors")

    def test_a_length_beyond_all_bounds(self) -> None:
        path = self.folder / "model.safetensors"
        for length in (2**63, 2**64 - 1, 200_000_000):
            with path.open("wb") as file:
                file.write(struct.pack("<Q", length))
                file.truncate(300_000_000)
            self.refused("cut off or damaged")

    def test_a_pickle_or_a_page_under_the_right_name(self) -> None:
        for content in (
            b"\x80\x04\x95" + b"\0" * 500,
            b"<!DOCTYPE html>" + b" " * 500,
            b"\0" * 100,
        ):
            self.write("model.safetensors", content)
            self.refused("model.safetensors")

    def test_entries_that_make_no_sense(self) -> None:
        good = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
        for change in (
            {"dtype": None},
            {"dtype": ["BF16"]},
            {"dtype": {}},
            {"shape": None},
            {"shape": 2},
            {"shape": "2"},
            {"shape": [-2]},
            {"shape": [2.0]},
            {"shape": ["2"]},
            {"shape": [True, 2]},
            {"shape": [3]},
            {"shape": [2, 10**30]},
            {"data_offsets": None},
            {"data_offsets": [0]},
            {"data_offsets": [0, 4, 8]},
            {"data_offsets": [4, 0]},
            {"data_offsets": [-4, 0]},
            {"data_offsets": ["0", "4"]},
            {"data_offsets": [0, 10**30]},
        ):
            self.header({"w": {**good, **change}}, 100)
            with self.subTest(change=change):
                self.refused("model.safetensors")
        for entry in (None, 7, [], "x", {}):
            self.header({"w": entry}, 100)
            self.refused("describes w in no known way")

    def test_a_type_of_the_future_is_named(self) -> None:
        self.header({"w": {"dtype": "F4_E2M1" * 9, "shape": [2], "data_offsets": [0, 1]}})
        self.refused("an unknown type F4_E2M1")

    def test_a_negative_size_cannot_make_a_large_model_fit(self) -> None:
        header = tensors(big=[1000, 1000])
        header["trick"] = {"dtype": "BF16", "shape": [-1000, 1000], "data_offsets": [2_000_000, 0]}
        self.header(header, 2_000_000)
        self.refused("describes trick")

    def test_random_damage_is_refused_or_read_and_never_a_crash(self) -> None:
        source = random.Random(11)
        path = self.folder / "model.safetensors"
        write_header(path, tensors(a=[3, 4], b=[5], c=[]))
        whole = path.read_bytes()
        refusals = 0
        for _ in range(300):
            data = bytearray(whole)
            for _ in range(source.randrange(1, 5)):
                data[source.randrange(len(data))] = source.randrange(256)
            path.write_bytes(data)
            try:
                checkpoint = self.read()
            except RigError:
                refusals += 1
            else:
                self.assertTrue(0 <= checkpoint.size <= len(whole))
        self.assertGreater(refusals, 50)


if __name__ == "__main__":
    unittest.main()
