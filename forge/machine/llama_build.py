"""Makes llama-server for the machine's own GPU from the pinned source, or finds it made already.

One program for one architecture, kept under a key of all that it was made of. Knows no model, no
provider and no way of serving.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.machine.console import (
    BOTH,
    HOME,
    MINUTE_S,
    NOTHING,
    ROOT,
    Failure,
    Progress,
    clean,
    run,
    stored,
    tried,
)

LLAMA_NAME = "llama-server"
BUILD_LOG, BUILD_STATE = HOME / "build.log", HOME / "build.json"
BUILD_MINUTES = 90  # one that takes longer has failed
BUILD_FORMS = {  # what the document's words about the build may be
    "source": r"[a-z][a-z0-9-]{0,60}==[0-9][0-9.]{0,20}",
    "sha256": r"[0-9a-f]{64}",
    "root": r"\w[\w.-]{0,80}/(\w[\w.-]{0,80}/)?",
}
BUILD_FLAG = r"-D[A-Z][A-Z0-9_]{1,60}=[\w.-]{1,60}"
WORK, SWAP = HOME / "llama-work", HOME / "build.swap"
LEFT_OUT = ("models/", "docs/", "media/", "benches/", "tests/")  # no part of the server
TOOLS = {"cmake": "cmake", "ninja": "ninja-build", "g++": "g++", "pip3": "python3-pip"}
BUILD_DISK = 4_000_000_000  # bytes: archive, source, objects, and the program twice
# Memory for each file that compiles at a time. The most that nvcc 13.0.88 on x86-64 held for one
# for SM 7.5 was 0.68 GiB (b11434, 2026-11-30). Graviton2 and other releases of nvcc are unmeasured,
# and a compiler that the kernel kills costs the whole build, so it is three times that.
JOB_BYTES, SPARE_BYTES = 2 << 30, 1 << 30
ERROR_SIGNS = re.compile(r"error|kill|no space left|do not match", re.I)


def get_llama_server(document: dict[str, Any], progress: Progress) -> Path:
    """The program, made of this very source for this very machine; it has seen its GPU."""
    release = cuda_release()
    folder, began = kept_folder(document, release), int(time.time())
    told: dict[str, Any] = {"state": "running", "began": began, "cuda": release}
    known = kept_build(folder)
    if not known:
        note_build(told)
        try:
            known = make_llama_server(document["build"], folder, told, progress)
        except BaseException:
            note_build(told | {"state": "failed", "seconds": int(time.time()) - began})
            raise
    device = seen_device(folder / LLAMA_NAME)
    note_build({**told, **known, "state": "done", "device": device})
    progress.tell("done", f"{known['version']}, on {device}")
    return folder / LLAMA_NAME


def cuda_release() -> str:
    """The release of the CUDA toolkit that the machine's image brings, such as 13.0."""
    if shutil.which("nvcc") is None:  # an agent of start-up does not have it on its PATH
        os.environ["PATH"] += f"{os.pathsep}{ROOT / 'usr/local/cuda/bin'}"
    try:
        found = re.search(r"\brelease (\d+\.\d+)", run("nvcc", "--version"))
    except Failure as failure:
        raise Failure(f"{failure}: the machine image has no CUDA toolkit to build with") from None
    return found[1] if found else "unknown"


def kept_folder(document: dict[str, Any], release: str) -> Path:
    """Where a build of this source with these flags, toolkit and processor lies or will lie.

    A program made for one processor may stop with an illegal instruction on another, and one that
    is linked to one toolkit's libraries does not start beside another's.
    """
    build, path = document["build"], ROOT / "proc/cpuinfo"
    text = path.read_text() if path.exists() else ""
    rows = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.M)
    what = [build["sha256"], *build["flags"], release, platform.machine(), *dict.fromkeys(rows)]
    key = hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]
    return ROOT / str(document["folder"])[1:] / f"llama-{platform.machine()}-{key}"


def kept_build(folder: Path) -> dict[str, Any]:
    """What is written of the build in `folder`, if the program is the one that it speaks of."""
    record, program = stored(folder / "build.json", {}), folder / LLAMA_NAME
    if not program.is_file() or record.get("sha256") != file_hash(program):
        return {}
    program.chmod(0o755)  # a bucket keeps no modes
    return dict(record)


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def make_llama_server(
    build: dict[str, Any], folder: Path, told: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """From the archive to the kept program. One that was broken off goes on where it was."""
    work, began = WORK / folder.name, time.time()
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < BUILD_DISK:
        raise Failure(f"no space: a build takes {BUILD_DISK / 1e9:g} GB, {free / 1e9:.2f} are free")
    get_tools(progress)
    source, objects = get_source(build, work, progress), work / "objects"
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(objects), *build["flags"]]
    work_on(configure, 10)
    jobs = make_swap(progress)
    try:
        argv = ["cmake", "--build", str(objects), "--target", LLAMA_NAME, "--parallel", str(jobs)]
        work_on(argv, BUILD_MINUTES, lambda: note_files(told, progress))
    finally:
        with suppress(Failure):
            run("swapoff", str(SWAP))
        SWAP.unlink(missing_ok=True)
    made = objects / "bin" / LLAMA_NAME
    version = run(str(made), "--version", complaints=BOTH).partition("\n")[0]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (made, source / "LICENSE"):
        shutil.copy2(path, folder / path.name)
    record = {"version": clean(version.replace("version: ", ""), 100), **build}
    record |= {"cuda": told["cuda"], "files": told["files"], "seconds": int(time.time() - began)}
    record["sha256"], record["source_sha256"] = file_hash(folder / LLAMA_NAME), build["sha256"]
    (folder / "build.json").write_text(json.dumps(record))  # last: with it the build is whole
    shutil.rmtree(WORK, ignore_errors=True)
    return record


def get_tools(progress: Progress) -> None:
    """What building takes besides the toolkit, installed where the image lacks it."""
    missing = [package for name, package in TOOLS.items() if shutil.which(name) is None]

    def install() -> str:
        run("apt-get", "update", minutes=5)
        return run("apt-get", "install", "--yes", *missing, minutes=10)

    if missing:
        progress.tell("note", f"installing {' '.join(missing)}")
        tried(30, install, lambda _: True)  # another program may hold apt's lock for minutes


def get_source(build: dict[str, Any], work: Path, progress: Progress) -> Path:
    """The unpacked source. pip fetches it and compares its hash; so does this, before unpacking."""
    source, downloads, partial = (work / name for name in ("source", "download", "partial"))
    if source.is_dir():
        return source
    progress.tell("note", f"fetching {build['source']}")
    downloads.mkdir(exist_ok=True)
    wanted, name = downloads / "requirements.txt", build["source"].partition("==")[0]
    wanted.write_text(f"{build['source']} --hash=sha256:{build['sha256']}\n")
    argv = ["pip3", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--no-binary", name, "--require-hashes", "-r", str(wanted), "--dest", str(downloads)]
    tried(3, lambda: work_on(argv, 15), lambda why: "HASH" not in str(why))
    archives = list(downloads.glob("*.tar.gz"))
    if len(archives) != 1 or file_hash(archives[0]) != build["sha256"]:
        raise Failure(f"what pip fetched as {build['source']} is not the archive it should be")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archives[0]) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        for member in packed:
            inner = member.name[len(build["root"]) :]
            if member.name.startswith(build["root"]) and not inner.startswith(LEFT_OUT):
                member.name = inner
                packed.extract(member, partial)
    shutil.rmtree(downloads)
    partial.rename(source)
    return source


def make_swap(progress: Progress) -> int:
    """How many files may compile at a time: as many as there are cores, with swap for them where
    memory is short, or as many as memory holds."""
    jobs, path = len(os.sched_getaffinity(0)), ROOT / "proc/meminfo"
    rows = dict(re.findall(r"(\w+):\s+(\d+)", path.read_text() if path.exists() else ""))
    have = 1024 * sum(int(rows.get(key, 0)) for key in ("MemAvailable", "SwapFree"))
    size = -(-(jobs * JOB_BYTES + SPARE_BYTES - have) >> 30)
    if not rows or size <= 0:
        return jobs
    try:
        SWAP.unlink(missing_ok=True)
        run("fallocate", "--length", f"{size}GiB", str(SWAP))
        SWAP.chmod(0o600)
        run("mkswap", str(SWAP))
        run("swapon", str(SWAP))
    except (Failure, OSError) as error:
        jobs = max(1, min(jobs, (have - SPARE_BYTES) // JOB_BYTES))
        progress.tell("note", f"no swap ({error}): {jobs} files at a time")
    else:
        progress.tell("note", f"{size} GiB of swap for {jobs} files at a time")
    return jobs


def work_on(argv: list[str], minutes: int, look: Callable[[], None] = lambda: None) -> str:
    """Runs a tool, its output in BUILD_LOG, with a `look` every half minute and at its end.

    Raises Failure in the words of its first error.
    """
    with BUILD_LOG.open("w") as log:
        child = subprocess.Popen(argv, stdin=NOTHING, stdout=log, stderr=BOTH)
        try:
            for _ in range(2 * minutes):
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(MINUTE_S / 2, 0.2))
                look()
                if child.returncode is not None:
                    break
        finally:
            child.kill()
            ended = child.wait()
    if ended:
        lines = list(
            filter(None, map(str.strip, BUILD_LOG.read_text(errors="replace").split("\n")))
        )
        first = next((n for n, line in enumerate(lines) if ERROR_SIGNS.search(line)), -2)
        said = " ".join(lines[first:][:2]) or f"status {ended}"
        raise Failure(f"{' '.join(argv[:2])}: {clean(said, 300)}")
    return ""


def note_files(told: dict[str, Any], progress: Progress) -> None:
    told["files"], told["of"] = built_files()
    note_build(told)
    progress.tell("note", f"{told['files']} of {told['of']} files")


def built_files() -> tuple[int, int]:
    """How many of how many files ninja has made, by its log; both 0 where it has none yet."""
    steps = re.findall(r"^\[(\d+)/(\d+)\]", BUILD_LOG.read_text(errors="replace"), re.M)
    return (int(steps[-1][0]), int(steps[-1][1])) if steps else (0, 0)


def note_build(told: dict[str, Any]) -> None:
    with suppress(OSError):
        BUILD_STATE.write_text(json.dumps(told))


def seen_device(program: Path) -> str:
    """The GPU that the program computes on, in its own words. Raises Failure where it sees none:
    it would serve all the same, on the processor."""
    said = run(str(program), "--list-devices", complaints=BOTH)
    found = re.search(r"^\s+(CUDA\d+: .+)$", said, re.M)
    if not found:
        raise Failure(f"the program that was built sees no GPU: {clean(said, 300)}")
    return clean(found[1], 120)
