"""GGUF files that must not be served: what each refusal says, and that nothing was started.

Every file is whole at first and gets one fault: a half-done download, or a wrong choice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from forge.suites.fake_llama_server import (
    LLAMA_ARCHITECTURES,
    TINY_GGUF_KEYS,
    TINY_GGUF_TENSORS,
    GgufParts,
    write_gguf,
    write_tiny_gguf,
)
from forge.suites.rig_case import RigCase


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _with_keys(path: Path, **changes: int | str) -> None:
    keys: GgufParts = {**TINY_GGUF_KEYS}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    write_gguf(path, keys)


def _patched(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


# The fault's name: how it is made, and words that must stand in the refusal.
_GGUF_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda p: p.unlink(), "cannot be read"),
    "a folder": (lambda p: p.rename(p.with_name("m")).parent.joinpath(p).mkdir(), "cannot be read"),
    "an empty file": (lambda p: _cut(p, 0), "cut off within its header"),
    "another format": (lambda p: _patched(p, 0, b"PK\3\4"), "no GGUF file"),
    "an old layout": (lambda p: _patched(p, 4, struct.pack("<I", 1)), "its layout is 1"),
    "big-endian": (lambda p: _patched(p, 4, struct.pack(">I", 3)), "big-endian"),
    "the header is cut off": (lambda p: _cut(p, 200), "cut off within its header"),
    "the weights are cut off": (lambda p: _cut(p, p.stat().st_size - 96), "lacks its last 96"),
    "2^60 tensors": (lambda p: _patched(p, 8, struct.pack("<Q", 1 << 60)), "which no model has"),
    "2^60 keys": (lambda p: _patched(p, 16, struct.pack("<Q", 1 << 60)), "which no model has"),
    "a key of 2^60 letters": (
        lambda p: _patched(p, 24, struct.pack("<Q", 1 << 60)),
        "which no model has",
    ),
    "a projector": (lambda p: _with_keys(p, general__architecture="clip"), "projector"),
    "an adapter": (lambda p: _with_keys(p, general__type="adapter"), "adapter"),
    "one part of three": (lambda p: _with_keys(p, split__count=3), "one of 3 parts"),
    "a vocabulary alone": (lambda p: write_gguf(p, tensors={}), "no weights"),
    "an unknown architecture": (
        lambda p: _with_keys(p, general__architecture="gemma9"),
        "gemma9",
    ),
}


class GgufFileSuite(RigCase):
    """A file is read before anything starts, and the refusal says what is wrong with it."""

    async def test_every_fault_of_a_file_is_refused_before_anything_starts(self) -> None:
        self.assertNotIn("gemma9", LLAMA_ARCHITECTURES)
        journal, starts = len(self.journal()), len(self.engine.starts())
        async with self.in_process() as client:
            for number, (name, (spoil, words)) in enumerate(_GGUF_FAULTS.items()):
                with self.subTest(name):
                    path = write_tiny_gguf(self.place / "models" / f"spoilt {number}")
                    spoil(path)
                    text = await self.refusal(client, "serve_model", "INVALID", model=str(path))
                    self.assertIn(words, text)
                    self.assertIn(str(path), text)
                    self.assertIn(" Next: ", text)
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.journal()), journal, "a start was intended")

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        tensors = {
            "per_layer_token_embd.weight": [1 << 20, 500_000],
            "blk.0.ffn_up.weight": [1 << 20, 600_000],
        }
        path = self.place / "models" / "huge.gguf"
        keys: GgufParts = {**TINY_GGUF_KEYS}
        write_gguf(path, keys, tensors)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(path))
            self.assertIn("weights 2516.58", text)
            self.assertIn("2097.15 GB of the file are the per-layer embedding table", text)
            self.assertIn(" Next: ", text)
        self.assertNotIn(str(path), [start["argv"][1] for start in self.engine.starts()])
        self.assertEqual(self.processes(), [])

    async def test_a_file_that_is_spoilt_between_asking_and_loading(self) -> None:
        """The check is made again in the job: what is loaded is what was checked."""
        path = write_tiny_gguf(self.place / "models" / "raced")
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model", model=str(path))
            path.write_bytes(b"GGUF")
            text = await self.refusal(client, "wait_for_model_ready", "INVALID")
            self.assertIn("cut off", text)
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual((job["state"], job["phase"]), ("failed", "weights"))
        self.assertNotIn(str(path), [start["argv"][1] for start in self.engine.starts()])
        await self.assert_all_gone()

    async def test_what_a_file_without_a_template_or_heads_is_told(self) -> None:
        keys: GgufParts = {"general.architecture": "llama", "llama.block_count": 1}
        path = write_gguf(self.place / "models" / "bare.gguf", keys, TINY_GGUF_TENSORS)
        async with self.in_process() as client:
            await self.serve(client, model=str(path))
            details = await self.answer(client, "get_model_details")
        self.assertIn("ChatML", details["beside"])
        self.assertIn("KV cache is not counted", details["beside"])
