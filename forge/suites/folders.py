"""Model folders that must not be served: what each refusal says, and that nothing was started.

Every folder is whole at first and gets one fault. Rows A42 of the checklist, and the half-done
downloads of real life.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from forge.suites.fake_engine import write_safetensors, write_tiny_folder
from forge.suites.rig_case import RigCase


def _edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _header(folder: Path, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header)


def _tensor(folder: Path, **entry: object) -> None:
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}
    _header(folder, json.dumps({"model.norm.weight": whole}).encode())


def _missing_shard(folder: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "model.safetensors").rename(folder / names[0])
    weight_map = {"model.norm.weight": names[0], "model.embed_tokens.weight": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _dangling_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")


# The fault's name: how it is made, the class of the refusal, and words that must stand in it.
_FOLDER_FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "INVALID", "no such folder"),
    "no chat template": (
        lambda f: (f / "chat_template.jinja").unlink(),
        "INVALID",
        "chat template",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "INVALID", "tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "INVALID", ".safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "INVALID", "config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "INVALID",
        "config.json",
    ),
    "config is nested without end": (
        lambda f: (f / "config.json").write_text("[" * 200_000),
        "INVALID",
        "config.json",
    ),
    "config is no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "INVALID",
        "config.json",
    ),
    "a shard is missing": (_missing_shard, "INVALID", "model-00002-of-00002.safetensors"),
    "the index is damaged": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 7}'),
        "INVALID",
        "model.safetensors.index.json",
    ),
    "a download goes on": (
        lambda f: (f / "model.safetensors.incomplete").write_bytes(b""),
        "INVALID",
        "unfinished download",
    ),
    "the weights are cut off": (_cut_off, "INVALID", "lacks its last 100 bytes"),
    "the header is cut off": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x10\x00"),
        "INVALID",
        "model.safetensors",
    ),
    "the header is longer than the file": (
        lambda f: _header(f, b"{}", 2**62),
        "INVALID",
        "model.safetensors",
    ),
    "the header is no JSON": (lambda f: _header(f, b"{nonsense}"), "INVALID", "header"),
    "the header is nested without end": (
        lambda f: _header(f, b"[" * 200_000),
        "INVALID",
        "header",
    ),
    "a tensor without a shape": (lambda f: _tensor(f, shape=None), "INVALID", "norm.weight"),
    "a tensor of a negative shape": (lambda f: _tensor(f, shape=[-4]), "INVALID", "norm.weight"),
    "a tensor at no place": (
        lambda f: _tensor(f, data_offsets=["a", "b"]),
        "INVALID",
        "norm.weight",
    ),
    "a tensor of an unknown type": (lambda f: _tensor(f, dtype="F3"), "INVALID", "F3"),
    "10 TB are announced and not there": (
        lambda f: _tensor(f, shape=[2_500_000_000_000], data_offsets=[0, 10_000_000_000_000]),
        "INVALID",
        "lacks its last",
    ),
    "a link leads nowhere": (_dangling_link, "INVALID", "model.safetensors"),
    "a pickle beside the weights": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04."),
        "DENIED",
        "pytorch_model.bin",
    ),
    "nothing but a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "model.PT"),
        "DENIED",
        "model.PT",
    ),
    "code of its own for the model": (
        lambda f: _edit_json(f / "config.json", auto_map={"AutoModel": "evil.Model"}),
        "DENIED",
        "auto_map",
    ),
    "code of its own for the tokenizer": (
        lambda f: _edit_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["e", None]}),
        "DENIED",
        "auto_map",
    ),
}


class FolderSuite(RigCase):
    """A folder is read before anything starts, and the refusal says what to do."""

    async def test_every_fault_of_a_folder_is_refused_before_anything_starts(self) -> None:
        journal, starts = len(self.journal()), len(self.engine.starts())
        async with self.in_process() as client:
            for number, (name, (spoil, error_class, words)) in enumerate(_FOLDER_FAULTS.items()):
                with self.subTest(name):
                    folder = write_tiny_folder(self.place / "models" / f"spoilt {number}")
                    spoil(folder)
                    text = await self.refusal(client, "serve_model", error_class, model=str(folder))
                    self.assertIn(words, text)
                    self.assertIn(str(folder), text)
                    self.assertIn(" Next: ", text)
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.journal()), journal, "a start was intended")

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "huge")
        table = {"model.embed_tokens_per_layer.weight": [1_000_000_000_000]}
        weights = {"model.embed_tokens.weight": [1_500_000_000_000]}
        write_safetensors(folder / "model.safetensors", table | weights)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(folder))
            # bfloat16 holds two bytes a number: 5 TB, and no part of it is forgiven.
            self.assertIn("weights 5000.00", text)
            self.assertIn("needs 5000.8", text)
            self.assertIn("2000.00 GB of the weights are the per-layer embedding table", text)
            self.assertIn("not subtracted", text)
            self.assertIn(" Next: ", text)
        self.assertNotIn(str(folder), [start["argv"][1] for start in self.engine.starts()])
        self.assertEqual(self.processes(), [])

    async def test_the_setting_names_a_spoilt_folder(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "by setting")
        (folder / "chat_template.jinja").unlink()
        self.write_settings(MODEL_NAME=str(folder), PORT=str(self.port))
        try:
            async with self.in_process() as client:
                await self.refusal(client, "serve_model", "INVALID")
                await self.refusal(client, "get_model_details", "INVALID")
                status = await self.answer(client, "get_system_status")
                self.assertIn("chat template", status["memory"])
                (folder / "chat_template.jinja").write_text("{{ messages }}")
                details = await self.answer(client, "get_model_details")
                self.assertEqual(details["folder"], str(folder))
        finally:
            self.write_settings(MODEL_NAME=self.model, PORT=str(self.port))

    async def test_a_folder_that_is_spoilt_between_asking_and_loading(self) -> None:
        """The check is made again in the job: what is loaded is what was checked."""
        folder = write_tiny_folder(self.place / "models" / "raced")
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model", model=str(folder))
            (folder / "weights.pkl").write_bytes(b"\x80\x04.")
            text = await self.refusal(client, "wait_for_model_ready", "DENIED")
            self.assertIn("weights.pkl", text)
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual((job["state"], job["phase"]), ("failed", "weights"))
        self.assertNotIn(str(folder), [start["argv"][1] for start in self.engine.starts()])
        await self.assert_all_gone()
