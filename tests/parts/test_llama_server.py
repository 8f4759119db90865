"""The llama.cpp runtime without a model server: the file, its sum, the Hub, the plan.

Files are written byte by byte or by the gguf package; the Hub is a server on loopback that speaks
its API to the real huggingface_hub. What a served model answers is tried in tests/real.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.boundaries.gguf_file import read_gguf
from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes import embedded_model
from forge.parts.runtimes.hub_gguf import text_model_of
from forge.parts.runtimes.llama_build import built_llama_server
from forge.parts.runtimes.llama_memory import CacheType, slot_memory
from forge.parts.runtimes.llama_server import LlamaServer, LlamaServerSettings
from forge.suites.fake_llama_server import (
    TINY_GGUF_KEYS,
    FakeLlama,
    GgufParts,
    write_gguf,
    write_tiny_gguf,
)
from tests.fake_hub import REPOSITORY, fake_hub

PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)
CREDENTIALS = {
    "HF_TOKEN": "hf_" + "A1" * 17,
    "AWS_SECRET_ACCESS_KEY": "s" * 40,
    "HTTP_PROXY": "http://user:pa55@proxy.example:1",
    "LD_PRELOAD": "/x/evil.so",
    "LLAMA_ARG_HOST": "0.0.0.0",
    "LLAMA_API_KEY": "k" * 20,
}
# Every fifth layer sees all, the last 20 share: E2B's attention.
E2B_KEYS: GgufParts = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 35,
    "gemma4.embedding_length": 1536,
    "gemma4.attention.head_count": 8,
    "gemma4.attention.head_count_kv": 1,
    "gemma4.attention.key_length": 512,
    "gemma4.attention.value_length": 512,
    "gemma4.attention.key_length_swa": 256,
    "gemma4.attention.value_length_swa": 256,
    "gemma4.attention.sliding_window": 512,
    "gemma4.attention.shared_kv_layers": 20,
    "gemma4.attention.sliding_window_pattern": [(layer + 1) % 5 != 0 for layer in range(35)],
    "gemma4.feed_forward_length": 12288,
    "gemma4.embedding_length_per_layer_input": 256,
}
MIB = 1 << 20


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.engine = FakeLlama(self.folder / "fake")
        self.engine.install()
        self.reports: list[tuple[float, str]] = []
        places = {"HF_HOME": str(self.folder / "hf"), "XDG_CACHE_HOME": str(self.folder / "xdg")}
        out = ("HF_", "PIP_", "MODEL_", "LLAMA_", "SLOTS", "OMP_", "GOMP_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(out)}
        patch = mock.patch.dict(os.environ, kept | places, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.runtime = self.make_runtime()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)  # it would remark upon every slow step

    def make_runtime(self, **values: Any) -> LlamaServer:
        given = {"model_name": "embedded", "llama_server": str(self.engine.program), **values}
        settings = LlamaServerSettings(**given)
        return LlamaServer(lambda: settings, lambda: 8123, self.folder / "cache")

    def report(self, fraction: float, words: str) -> None:
        self.reports.append((fraction, words))

    def refused(self, error_class: str, name: str) -> RigError:
        with self.assertRaises(RigError) as caught:
            self.runtime.local_model(name)
        self.assertEqual(caught.exception.error_class, error_class)
        return caught.exception


class PlanTest(Case):
    def launch(self, **values: Any) -> Any:
        runtime = self.make_runtime(**values)
        model = runtime.local_model(str(write_tiny_gguf(self.folder / "a model")))
        assert model is not None
        return runtime.launch(model)

    def test_the_argument_list(self) -> None:
        launch = self.launch(slots=4, context_per_slot=1000, threads=3)
        argv = list(launch.argv)
        self.assertEqual(argv[0], str(self.engine.program))
        path = str(self.folder / "a model" / "model.gguf")
        for option, value in (
            ("--model", path),
            ("--alias", path),
            ("--host", "127.0.0.1"),
            ("--port", "8123"),
            ("--ctx-size", "4096"),
            ("--parallel", "4"),
            ("--threads", "3"),
            ("-ngl", "0"),
            ("--lazy-mode", "on"),
            ("--cache-ram", "0"),
            ("--fit", "off"),
            ("--ctx-checkpoints", "4"),
            ("--reasoning", "off"),
            ("--cors-origins", "localhost"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value, option)
        for option in ("--metrics", "--slots", "--offline", "--no-webui", "--no-kv-unified"):
            self.assertIn(option, argv)
        self.assertEqual((launch.port, launch.served_name, launch.model), (8123, path, path))

    def test_by_itself_one_thread_a_core(self) -> None:
        argv = list(self.launch().argv)
        self.assertEqual(argv[argv.index("--threads") + 1], str(len(os.sched_getaffinity(0))))

    def test_the_cache_is_of_the_type_that_is_set(self) -> None:
        for kind, flash in (("f16", False), ("q8_0", False), ("f32", True)):
            argv = list(self.launch(cache_type=kind).argv)
            for option in ("--cache-type-k", "--cache-type-v"):
                self.assertEqual(argv[argv.index(option) + 1], kind)
            self.assertEqual("--flash-attn" in argv, flash, kind)

    def test_thinking_is_said_and_never_left_to_the_server(self) -> None:
        for thinking, word in ((True, "on"), (False, "off")):
            argv = list(self.launch(thinking=thinking).argv)
            self.assertEqual(argv[argv.index("--reasoning") + 1], word)

    def test_no_accelerator_and_no_credential_goes_along(self) -> None:
        seen = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0", "LANG": "C.UTF-8"}
        with mock.patch.dict(os.environ, CREDENTIALS | seen):
            environment = self.launch().environment
        self.assertFalse(set(environment) & set(CREDENTIALS))
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            self.assertEqual(environment[name], "")
        self.assertEqual(environment["LANG"], "C.UTF-8")
        self.assertEqual(environment["HF_HUB_OFFLINE"], "1")
        self.assertEqual(environment["GOMP_SPINCOUNT"], "1000")
        with mock.patch.dict(os.environ, GOMP_SPINCOUNT="5", OMP_WAIT_POLICY="active"):
            own = self.launch().environment
        self.assertEqual((own["GOMP_SPINCOUNT"], own["OMP_WAIT_POLICY"]), ("5", "active"))

    def test_what_an_older_release_does_not_know_is_left_out(self) -> None:
        self.engine.write_library(options=("--offline",))
        argv = list(self.launch().argv)
        self.assertIn("--offline", argv)
        for option in ("--lazy-mode", "--cache-ram", "--reasoning", "--cors-origins"):
            self.assertNotIn(option, argv)

    def test_a_program_that_went_away_meanwhile(self) -> None:
        model = self.runtime.local_model(str(write_tiny_gguf(self.folder / "m")))
        assert model is not None
        with mock.patch.dict(os.environ, PATH=str(self.folder)):
            with self.assertRaises(RigError) as caught:
                self.make_runtime(llama_server="").launch(model)
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertEqual(caught.exception.next_step, "build_llama_server()")

    def test_the_words_of_loading(self) -> None:
        log = "/x.log (last 5 lines)\n\n0.00.1 I srv  load_model: loading model 'x'\n  \n"
        self.assertEqual(
            self.runtime.loading_step(log), "0.00.1 I srv  load_model: loading model 'x'"
        )
        self.assertEqual(self.runtime.loading_step("/x.log\n"), "starting llama-server")
        self.assertEqual(self.runtime.loading_fault("anything | MISSING |"), "")
        self.assertEqual(self.runtime.api_key(), "")

    def test_the_settings_have_bounds(self) -> None:
        for values in ({"slots": 0}, {"slots": 33}, {"context_per_slot": 8}, {"threads": -1}):
            with self.assertRaises(ValueError):
                self.make_runtime(**values)


class SumTest(Case):
    def test_the_cache_of_e2b_is_what_llama_cpp_allocates(self) -> None:
        """Sizes as llama-server b11434 printed them for a file of E2B's shape (2026-11-30)."""
        file = read_gguf(write_gguf(self.folder / "e2b.gguf", E2B_KEYS))
        for context, full, windowed in ((4096, 24, 12), (8192, 48, 12), (300, 3, 6)):
            memory = slot_memory(file, context, "f16")
            self.assertEqual(memory.kv, (full + windowed) * MIB, context)
            self.assertEqual(memory.checkpoints, 4 * windowed * MIB)
            self.assertEqual(memory.total, memory.kv + memory.checkpoints)
        self.assertEqual(slot_memory(file, 300, "f16").context, 512)
        self.assertEqual(slot_memory(file, 4096, "f16").context, 4096)

    def test_the_number_format_of_the_cache_counts(self) -> None:
        file = read_gguf(write_gguf(self.folder / "e2b.gguf", E2B_KEYS))
        kinds: tuple[CacheType, ...] = ("f16", "q8_0", "f32")
        by_type = {kind: slot_memory(file, 4096, kind).kv for kind in kinds}
        self.assertEqual(by_type["f32"], 2 * by_type["f16"])
        # ggml's q8_0 is 34 bytes for 32 numbers.
        self.assertEqual(by_type["q8_0"] * 64, by_type["f16"] * 34)

    def test_every_part_of_the_sum_is_named(self) -> None:
        path = write_tiny_gguf(self.folder / "m")
        one = self.make_runtime().local_model(str(path))
        four = self.make_runtime(slots=4).local_model(str(path))
        assert one is not None and four is not None
        parts = ["weights", "KV cache of 1 slot", "prompt checkpoints", "program and buffers"]
        self.assertEqual(list(one.memory_needed), parts)
        self.assertEqual(
            four.memory_needed["KV cache of 4 slots"], 4 * one.memory_needed["KV cache of 1 slot"]
        )
        table = 96 * 512 * 4
        self.assertEqual(one.memory_needed["weights"], one.size_on_disk - table)
        self.assertIn("read from the disk row by row and not counted", one.beside)
        self.assertEqual(one.architecture, "gemma4")
        self.assertEqual(one.memory_total, sum(one.memory_needed.values()))

    def test_a_model_without_windows_or_table_has_no_such_parts(self) -> None:
        keys: GgufParts = {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.embedding_length": 64,
            "llama.attention.head_count": 4,
            "tokenizer.chat_template": "{{ messages }}",
        }
        path = write_gguf(self.folder / "m.gguf", keys, {"token_embd.weight": [64, 512]})
        model = self.runtime.local_model(str(path))
        assert model is not None
        parts = ["weights", "KV cache of 1 slot", "program and buffers"]
        self.assertEqual((list(model.memory_needed), model.beside), (parts, ""))

    def test_the_buffers_cover_what_was_measured(self) -> None:
        """Peak anonymous memory less the KV cache, as served by b11434 on 2026-11-30."""
        keys = E2B_KEYS | {"tokenizer.chat_template": "{{ messages }}"}
        tensors = {"token_embd.weight": [1536, 262_144]}
        e2b = self.runtime.local_model(str(write_gguf(self.folder / "e.gguf", keys, tensors)))
        smol: GgufParts = {
            "general.architecture": "llama",
            "llama.block_count": 30,
            "llama.embedding_length": 576,
            "llama.feed_forward_length": 1536,
            "llama.attention.head_count": 9,
            "llama.attention.head_count_kv": 3,
        }
        tensors = {"token_embd.weight": [576, 49_152]}
        small = self.runtime.local_model(str(write_gguf(self.folder / "s.gguf", smol, tensors)))
        assert e2b is not None and small is not None
        for model, measured in ((e2b, 246e6), (small, 40e6)):
            planned = model.memory_needed["program and buffers"]
            self.assertGreater(planned, measured)
            self.assertLess(planned, 2.2 * measured)

    def test_what_is_not_known_is_said(self) -> None:
        path = write_gguf(self.folder / "m.gguf", {"general.architecture": "llama"})
        model = self.runtime.local_model(str(path))
        assert model is not None
        self.assertIn("the KV cache is not counted", model.beside)
        self.assertIn("ChatML", model.beside)


class LocalFileTest(Case):
    def test_what_lies_here_is_found_and_what_does_not_is_none(self) -> None:
        self.assertIsNone(self.runtime.local_model("embedded"))
        self.assertIsNone(self.runtime.local_model("google/gemma-4-E2B-it-qat-q4_0-gguf"))
        self.assertIn("No such file", str(self.refused("INVALID", "/no/such.gguf")))
        for name in ("../x", "", "/a/../b", "x y"):
            self.refused("INVALID", name)

    def test_a_damaged_file_and_an_unknown_architecture(self) -> None:
        path = write_tiny_gguf(self.folder / "m")
        path.write_bytes(path.read_bytes()[:100])
        self.assertIn("cut off", self.refused("INVALID", str(path)).what)
        keys: GgufParts = TINY_GGUF_KEYS | {"general.architecture": "gemma9"}
        write_gguf(path, keys)
        error = self.refused("INVALID", str(path))
        self.assertIn("gemma9", error.what)
        self.assertIn(str(self.engine.program), error.what)
        # Without a program there is nobody to ask; a start is refused for want of one.
        with mock.patch.dict(os.environ, PATH=str(self.folder)):
            found = self.make_runtime(llama_server="").local_model(str(path))
        assert found is not None
        self.assertEqual(found.architecture, "gemma9")


class NeedTest(Case):
    async def rows(self, **values: Any) -> dict[str, Any]:
        return {need.name: need for need in await self.make_runtime(**values).needs()}

    async def test_everything_is_there(self) -> None:
        rows = await self.rows()
        self.assertIn(str(self.engine.program), rows["program llama-server"].detail)
        self.assertEqual([need.name for need in rows.values() if not need.present][1:], [])
        self.assertEqual(
            [need.name for need in rows.values() if not need.only_for], ["program llama-server"]
        )

    async def test_each_way_in_which_the_program_cannot_be_used(self) -> None:
        with mock.patch.dict(os.environ, PATH=str(self.folder)):
            need = (await self.rows(llama_server=""))["program llama-server"]
        self.assertFalse(need.present)
        self.assertEqual(need.remedy, "build_llama_server()")
        need = (await self.rows(llama_server="/no/program"))["program llama-server"]
        self.assertIn("/no/program", need.detail)
        self.engine.write_library(marks=("libcublas.so.12",))
        need = (await self.rows())["program llama-server"]
        self.assertIn("CUDA", need.detail)
        self.assertIn("build_llama_server()", need.remedy)
        with self.assertRaises(RigError) as caught:
            await self.runtime.usable_program()
        self.assertEqual(caught.exception.error_class, "DENIED")

    async def test_the_build_in_the_cache_is_found(self) -> None:
        built = built_llama_server(self.folder / "cache")
        built.parent.mkdir(parents=True)
        for path in (self.engine.program, self.engine.library):
            (built.parent / path.name).write_bytes(path.read_bytes())
        built.chmod(0o755)
        program, facts = await self.make_runtime(llama_server="").usable_program()
        self.assertEqual((program.path, program.origin), (built, "cache"))
        self.assertIn("11434", facts.version)


class HubTest(Case):
    """Downloads through the real huggingface_hub, which reads its endpoint when it is imported."""

    def setUp(self) -> None:
        super().setUp()
        self.assertIsNotNone(importlib.util.find_spec("huggingface_hub"))
        self.source = self.folder / "hub"
        write_tiny_gguf(self.source)
        (self.source / "mmproj-model.gguf").write_bytes(b"GGUF projector")
        (self.source / "README.md").write_text("words")

    async def fetched(self, **faults: Any) -> Any:
        import huggingface_hub.constants

        with fake_hub(self.source) as hub:
            for name, value in faults.items():
                setattr(hub, name, value)
            self.hub = hub
            endpoint = mock.patch.object(huggingface_hub.constants, "ENDPOINT", hub.url)
            cache = mock.patch.object(
                huggingface_hub.constants, "HF_HUB_CACHE", str(self.folder / "hf" / "hub")
            )
            template = mock.patch.object(
                huggingface_hub.constants,
                "HUGGINGFACE_CO_URL_TEMPLATE",
                hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            )
            with endpoint, cache, template, mock.patch.dict(os.environ, HF_ENDPOINT=hub.url):
                return await self.runtime.fetch_model(REPOSITORY, self.room, self.report)

    room = PLENTY

    async def test_the_models_file_is_fetched_and_no_other(self) -> None:
        model = await self.fetched()
        self.assertEqual(model.folder.name, "model.gguf")
        self.assertEqual(model.folder.read_bytes(), (self.source / "model.gguf").read_bytes())
        self.assertEqual(set(self.hub.sent), {"model.gguf"})
        found = self.runtime.local_model(REPOSITORY)
        self.assertEqual(found, model)
        self.assertTrue(self.reports)

    async def refusal(self, error_class: str, **faults: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.fetched(**faults)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        return caught.exception

    async def test_each_way_in_which_it_fails(self) -> None:
        await self.refusal("AUTH", gated=True)
        await self.refusal("UNREACHABLE", down=True)
        self.room = Room(10**12, 10**12, 1000)
        error = await self.refusal("CAPACITY", sizes={"model.gguf": 3_350_000_000})
        self.assertIn("3.35 GB", error.what)
        self.assertEqual(self.hub.sent, {})

    async def test_which_of_several_files_is_not_guessed(self) -> None:
        self.assertEqual(text_model_of("a/b", ["mmproj-x.gguf", "x.gguf", "x-MTP.gguf"]), "x.gguf")
        (self.source / "model-f16.gguf").write_bytes(b"GGUF")
        error = await self.refusal("INVALID")
        self.assertIn("model-f16.gguf, model.gguf", error.what)
        for path in self.source.glob("*.gguf"):
            path.unlink()
        self.assertIn("0 GGUF files", (await self.refusal("INVALID")).what)

    async def test_without_the_package_it_is_named(self) -> None:
        found = importlib.util.find_spec

        def absent(name: str, package: str | None = None) -> Any:
            return None if name == "huggingface_hub" else found(name, package)

        with mock.patch.object(importlib.util, "find_spec", absent):
            error = await self.refusal("NOT_FOUND")
        self.assertIn("launch.py install", error.next_step)


class EmbeddedTest(Case):
    async def test_it_is_the_gguf_file_itself(self) -> None:
        """The package is the test's own, with a tiny model in it, and so is its hash."""
        source = write_tiny_gguf(self.folder / "m").read_bytes()
        target = embedded_model.embedded_gguf(self.folder / "cache")
        target.parent.mkdir(parents=True)
        target.write_bytes(source)
        model = self.runtime.local_model("embedded")
        assert model is not None
        self.assertEqual((model.name, model.folder), ("embedded", target))
        argv = list(self.runtime.launch(model).argv)
        self.assertEqual(argv[argv.index("--alias") + 1], "embedded")

    async def test_a_small_disk_is_refused(self) -> None:
        with self.assertRaises(RigError) as caught:
            await self.runtime.fetch_model("embedded", Room(1, 1, 1000), self.report)
        self.assertEqual(caught.exception.error_class, "CAPACITY")


class HeaderTest(unittest.TestCase):
    def test_the_hand_written_files_are_what_the_gguf_package_reads(self) -> None:
        import gguf

        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_gguf(Path(folder))
            reader = gguf.GGUFReader(str(path))
            names = [tensor.name for tensor in reader.tensors]
            self.assertEqual(names, [tensor.name for tensor in read_gguf(path).tensors])
            self.assertEqual(reader.fields["gemma4.block_count"].contents(), 3)
            self.assertEqual(struct.unpack("<I", path.read_bytes()[4:8]), (3,))


if __name__ == "__main__":
    unittest.main()
