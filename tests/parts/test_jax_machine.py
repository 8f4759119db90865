"""The JAX engine on a rented machine: its settings, its words, its release, the order to a machine.

What the machine makes of an order, tests/test_jax_boot.py tries.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import lzma
import os
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any, cast, get_args
from unittest import mock

from pydantic import ValidationError

from forge.engines.serving import serving_metrics
from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError
from forge.parts.ground.state import RigPaths
from forge.parts.knowledge.boot_marks import BOOT_PHASES
from forge.parts.planes.plane import Room
from forge.parts.runtimes.jax_machine import (
    JAX_USED_METRICS,
    JaxMachine,
    JaxMachineSettings,
    jax_serve_words,
    packed_engine,
)
from forge.parts.runtimes.jax_machine_packages import JAX_MACHINE_PACKAGES
from forge.parts.runtimes.jax_serve import JAX_SERVE_REQUIREMENTS
from forge.parts.runtimes.runtime import MetricUse, Runtime, ServedModel
from forge.programs.jax_server import _server_parser

MODEL = "google/gemma-4-E2B-it-qat-w4a16-ct"
RIG, PROJECT = "tpu-jax-v5e1-2b", "fake-proj"


def settings(**values: Any) -> JaxMachineSettings:
    """The settings of a rig, with these of its values changed."""
    return JaxMachineSettings(**{"model_name": MODEL, **values})


def options(argv: list[str]) -> dict[str, str]:
    return dict(zip(argv[::2], argv[1::2], strict=True))


class Case(unittest.TestCase):
    def setUp(self) -> None:
        keys = {name.upper() for name in JaxMachineSettings.model_fields}
        kept = {key: value for key, value in os.environ.items() if key not in keys}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.file = self.folder / "jax_server.py"
        self.file.write_text("# the engine of a test\n")

    def runtime(self, **values: Any) -> JaxMachine:
        chosen = settings(**values)
        return JaxMachine(lambda: chosen, RigPaths(self.folder, self.folder, self.folder))


class TestSettings(Case):
    def test_each_key_is_described(self) -> None:
        for name, field in JaxMachineSettings.model_fields.items():
            self.assertTrue(field.description, name)

    def test_values_that_are_none(self) -> None:
        for wrong in (
            {"model_revision": "main"},
            {"quantization": "fp8"},
            {"quantization": "none"},
            {"unpack": "never"},
            {"kv_cache_dtype": "fp8"},
            {"max_model_len": 0},
            {"max_model_len": 300_000},
            {"slots": 0},
            {"slots": 65},
            {"cache_bucket": "gs://mine"},
            {"port": 80},
        ):
            with self.assertRaises(ValidationError, msg=str(wrong)):
                settings(**wrong)


class TestWords(Case):
    def test_what_is_not_said_is_the_engines_own(self) -> None:
        given = options(jax_serve_words(settings()))
        self.assertEqual(given["--served-model-name"], MODEL)
        self.assertEqual(given["--dtype"], "bf16")
        self.assertEqual((given["--slots"], given["--max-model-len"]), ("8", "8192"))
        for flag in ("--unpack", "--quantization", "--kv-dtype"):
            self.assertNotIn(flag, given)

    def test_each_choice_has_its_flag(self) -> None:
        chosen = settings(unpack="load", quantization="int8", kv_cache_dtype="int8", slots=2)
        given = options(jax_serve_words(chosen))
        self.assertEqual(given["--unpack"], "load")
        self.assertEqual((given["--quantization"], given["--kv-dtype"]), ("int8", "int8"))
        self.assertEqual(given["--slots"], "2")

    def test_the_engine_knows_the_flags(self) -> None:
        told = _server_parser().parse_args(["--model", "x", *jax_serve_words(settings())])
        self.assertEqual((told.dtype, told.slots, told.max_model_len), ("bf16", 8, 8192))
        self.assertEqual(told.served_model_name, MODEL)

    def test_a_model_that_no_hub_has_is_refused(self) -> None:
        for name in ("embedded", "/models/gemma", "gemma", "a/b/../c", "x; reboot"):
            with self.assertRaises(RigError) as caught:
                jax_serve_words(settings(model_name=name))
            self.assertEqual(caught.exception.error_class, "INVALID", name)


class TestRelease(Case):
    def test_it_is_the_file_by_its_hash_and_all_that_it_runs_with(self) -> None:
        release = self.runtime(model_revision="ab" * 20).release()
        self.assertEqual(release["sha256"], hashlib.sha256(self.file.read_bytes()).hexdigest())
        self.assertEqual(release["requirements"], list(JAX_MACHINE_PACKAGES))
        self.assertEqual((release["repository"], release["revision"]), (MODEL, "ab" * 20))
        self.assertEqual(release["serve"], jax_serve_words(settings()))

    def test_what_is_packed_is_the_file(self) -> None:
        packed = packed_engine(self.file)
        self.assertEqual(lzma.decompress(base64.b85decode(packed)), self.file.read_bytes())
        self.assertTrue(packed.isascii())
        self.assertNotRegex(packed, r"['\"\\\s]")

    def test_without_the_file_it_is_said_before_anything_is_rented(self) -> None:
        self.file.unlink()
        runtime = self.runtime()
        for act in (runtime.release, lambda: packed_engine(self.file)):
            with self.assertRaises(RigError) as caught:
                act()
            self.assertEqual(caught.exception.error_class, "INTERNAL")
        (need,) = asyncio.run(runtime.needs())
        self.assertFalse(need.present)
        self.assertTrue(need.remedy)


class TestPackages(unittest.TestCase):
    def test_each_is_pinned_once(self) -> None:
        names = [one.partition("==")[0] for one in JAX_MACHINE_PACKAGES]
        self.assertEqual(len(set(names)), len(names))
        for one in JAX_MACHINE_PACKAGES:
            self.assertRegex(one, r"^[a-z0-9-]+==[0-9][\w.]*$")

    def test_they_are_within_what_the_engine_asks_for_here(self) -> None:
        """Those of local-jax-cpu-2b by name, jax to its very release, and a libtpu."""
        pinned = dict(one.split("==") for one in JAX_MACHINE_PACKAGES)
        self.assertIn("libtpu", pinned)
        for wanted in JAX_SERVE_REQUIREMENTS:
            name = re.split(r"[^\w-]", wanted)[0].replace("_", "-")
            self.assertIn(name, pinned)
            for least in re.findall(r"[>=]=([\d.]+)", wanted):
                have = tuple(map(int, re.findall(r"\d+", pinned[name])))
                self.assertGreaterEqual(have, tuple(map(int, least.split("."))), wanted)
            for below in re.findall(r"<([\d.]+)", wanted):
                have = tuple(map(int, re.findall(r"\d+", pinned[name])))
                self.assertLess(have, tuple(map(int, below.split("."))), wanted)


class TestOrder(Case):
    def test_the_document_has_all_and_no_secret(self) -> None:
        runtime = self.runtime(cache_bucket="kept", idle_minutes=7)
        told = runtime.boot_document(RIG, PROJECT, "", 3600)
        self.assertEqual(told["release"], runtime.release())
        self.assertEqual((told["rig"], told["project"], told["secret"]), (RIG, PROJECT, ""))
        self.assertEqual(told["cache"]["bucket"], "kept")
        self.assertEqual((told["idle_minutes"], told["life_s"]), (7, 3600))
        self.assertLess(len(json.dumps(told)), 10_000)

    def test_the_idle_watch_reads_pages_that_the_engine_has(self) -> None:
        """By the engine's own source: a name that is not there would end a machine in use."""
        source = Path(serving_metrics.__file__).read_text()
        for name in [*JAX_USED_METRICS, *JaxMachine.metric_names.values()]:
            stem = name.removeprefix("engine_").removesuffix("_total")
            self.assertIn(stem, source)

    def test_there_is_no_image_and_a_word_on_what_runs(self) -> None:
        image, note = asyncio.run(self.runtime().image())
        self.assertEqual(image, "")
        self.assertIn(hashlib.sha256(self.file.read_bytes()).hexdigest()[:12], note)

    def test_the_argument_list_ends_on_loopback(self) -> None:
        argv = self.runtime().serve_argv()
        self.assertEqual(argv[0], "jax_server.py")
        self.assertEqual(options(argv[1:])["--host"], "127.0.0.1")


class TestRuntime(Case):
    def test_it_is_a_runtime(self) -> None:
        runtime = cast(Runtime, self.runtime())
        self.assertLessEqual(set(runtime.metric_names), set(get_args(MetricUse)))
        self.assertLessEqual(set(runtime.phases), set(BOOT_PHASES))
        self.assertEqual(runtime.phases[-1], "ready")
        self.assertEqual(runtime.api_key(), "")
        self.assertIsNone(runtime.local_model(MODEL))
        self.assertEqual(runtime.loading_fault("anything"), "")

    def test_what_the_machine_does_itself_is_refused_here(self) -> None:
        runtime = self.runtime()
        served = ServedModel(MODEL, Path(), "Gemma4", 0, {})
        with self.assertRaisesRegex(RigError, "starts it"):
            runtime.launch(served)
        with self.assertRaisesRegex(RigError, "gets the weights"):
            asyncio.run(runtime.fetch_model(MODEL, Room(0, 0, 0), lambda _f, _w: None))

    def test_the_step_of_loading_is_the_last_that_was_told(self) -> None:
        log = "server on x\njax_server:   5% placing weights\njax_server:  40% compiling step\n"
        self.assertEqual(self.runtime().loading_step(log), "compiling step (40 %)")

    def test_what_the_engine_settled_on(self) -> None:
        class Client:
            async def get_json(self, _path: str) -> dict[str, Any]:
                return {"data": [{"id": MODEL, "max_model_len": 8192}]}

        told = asyncio.run(self.runtime().resolved(cast(ChatClient, Client()), ""))
        self.assertEqual(told, {"max_model_len": "8192"})


if __name__ == "__main__":
    unittest.main()
