"""The llama-server program on this computer: which one is used, and whether it may be.

One that was built for a GPU is refused, and one that is too old for Gemma 4. Knows no model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program

LLAMA_PROGRAM = "llama-server"
LlamaOrigin = Literal["LLAMA_SERVER", "cache", "PATH"]

# What a build for an accelerator holds and one for the processor does not: texts of its backend
# (llama.cpp b11434, ggml/src/ggml-*), or the libraries that it is linked to. HIP and MUSA builds
# are made of the CUDA backend's source and hold its texts.
_ACCELERATOR_MARKS: Mapping[bytes, str] = {
    b"ggml_cuda_init": "CUDA, HIP or MUSA",
    b"libcudart": "CUDA",
    b"libcublas": "CUDA",
    b"libamdhip64": "HIP",
    b"ggml_vulkan: ": "Vulkan",
    b"libvulkan": "Vulkan",
    b"ggml_sycl_": "SYCL",
    b"ggml_metal_init": "Metal",
    b"ggml_opencl: ": "OpenCL",
    b"ggml_backend_cann_": "CANN",
    b"ggml_webgpu: ": "WebGPU",
}
_ACCELERATOR_LIBRARY = re.compile(
    r"libggml-(cuda|hip|musa|vulkan|sycl|metal|opencl|cann|webgpu|openvino|hexagon|virtgpu)\b"
)
# Devices of these names compute on the processor: they are other ways to multiply matrices.
_PROCESSOR_DEVICES = ("CPU", "BLAS", "AMX", "ACCELERATE", "ZenDNN", "KleidiAI")
_DEVICE_ROW = re.compile(r"^ {2}(\S+?)\d*: (.*)$", re.M)
_VERSION_ROW = re.compile(r"^version: (\S.*)$", re.M)
_ASK_PATIENCE_S = 60.0
_PROGRAM_LIMIT = 1_000_000_000  # bytes read of one program; a CUDA build has several hundred MB
# What a llama-server is given of this one's environment; LLAMA_ARG_… would change its flags.
_LLAMA_ENVIRONMENT = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH USER LOGNAME "
    "XDG_CACHE_HOME XDG_STATE_HOME OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT"
).split()
# Its threads spin while they wait for each other, which starves them beside other work.
# SmolLM2-135M on 2 cores, medians of three answers of 64 tokens, 2026-11-30: with 1,000 turns 138
# tokens/s, and 35 to 57 beside one or two busy programs; without spinning (OMP_WAIT_POLICY=passive)
# 44 to 64, and 21 to 54; left alone 124, and 22 to 36, at times 2. GNU OpenMP's manual has it.
_PATIENT_THREADS = {"GOMP_SPINCOUNT": "1000"}
# No accelerator is to be seen, also by a library that the program might load on its own.
HIDDEN_ACCELERATORS: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "GGML_VK_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}


@dataclass(frozen=True)
class LlamaProgram:
    """A llama-server that was found: where, and by which of the three ways."""

    path: Path
    origin: LlamaOrigin

    def mentions(self, word: bytes) -> bool:
        """Whether the program or its llama and ggml libraries hold the bytes `word`.

        An option or a model's architecture that a program knows stands in it as text.
        """
        return any(word in blob for blob in _blobs(self.path))

    def knows_architecture(self, architecture: str) -> bool:
        """Whether it can load models whose general.architecture is `architecture`.

        The names stand in llama.cpp's table of architectures (src/llama-arch.cpp), each ended by a
        zero byte; its converter, its server and its loader are of one release.
        """
        return self.mentions(architecture.encode() + b"\0")

    def accelerator(self) -> str:
        """The accelerator that it was built for, with the proof; empty for the processor alone."""
        for library in _libraries(self.path):
            if match := _ACCELERATOR_LIBRARY.match(library.name):
                return f"{match[1]} ({library.name} lies with it)"
        for blob in _blobs(self.path):
            for mark, name in _ACCELERATOR_MARKS.items():
                if mark in blob:
                    return f"{name} ({mark.decode().strip()} stands in it)"
        return ""


@dataclass(frozen=True)
class LlamaFacts:
    """What a llama-server says of itself: its version, and the devices that are no processor."""

    version: str
    devices: Sequence[str]


def _libraries(program: Path) -> list[Path]:
    """llama.cpp's own shared libraries where a build or a package puts them; none for a static one.

    Looked for beside the program, in the lib folder next to its own, and in the folder of the
    computer's kind below that.
    """
    folder = program.resolve().parent
    places = [folder, folder.parent / "lib", *sorted((folder.parent / "lib").glob("*-linux-gnu*"))]
    found: dict[Path, None] = {}
    for place in places:
        for path in sorted(place.glob("lib*")):
            if re.match(r"lib(llama|ggml|mtmd)[\w-]*\.(so|dylib)", path.name) and path.is_file():
                found[path.resolve()] = None
    return list(found)


def _blobs(program: Path) -> Iterator[bytes]:
    for path in (program.resolve(), *_libraries(program)):
        try:
            with path.open("rb") as file:
                yield file.read(_PROGRAM_LIMIT)
        except OSError as error:
            raise RigError(
                "DENIED", f"{path} cannot be read: {error.strerror}", "make it readable"
            ) from None


def llama_environment() -> dict[str, str]:
    """The environment of a llama-server: what it needs, by name, no credential, no accelerator."""
    passed = {name: os.environ[name] for name in _LLAMA_ENVIRONMENT if name in os.environ}
    return {**_PATIENT_THREADS, **passed, **HIDDEN_ACCELERATORS}


def find_llama_program(setting: str, built: Path) -> LlamaProgram | None:
    """The llama-server to use: the one that `setting` names, `built` in the cache, or on PATH.

    Raises RigError INVALID where the setting names no program: another one must not take over.
    """
    if setting:
        path = Path(setting)
        if not path.is_absolute() or not path.is_file() or not os.access(path, os.X_OK):
            raise RigError(
                "INVALID",
                f"LLAMA_SERVER names {setting}, which is no program that can be started",
                "give the absolute path of a llama-server, or leave LLAMA_SERVER empty",
            )
        return LlamaProgram(path, "LLAMA_SERVER")
    if built.is_file():
        return LlamaProgram(built, "cache")
    on_path = shutil.which(LLAMA_PROGRAM)
    return LlamaProgram(Path(on_path).absolute(), "PATH") if on_path else None


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def ask_llama_program(program: LlamaProgram) -> LlamaFacts:
    """Run `--version` and `--list-devices`. Raises RigError INVALID where it is no llama-server.

    The devices are asked with nothing hidden: what it could use is the question.
    """
    hidden = llama_environment()
    open_eyed = {name: value for name, value in hidden.items() if name not in HIDDEN_ACCELERATORS}
    told, listed = [
        await run_program(
            [str(program.path), option], timeout_s=_ASK_PATIENCE_S, environment=environment
        )
        for option, environment in (
            ("--version", hidden),
            ("--list-devices", open_eyed),
        )
    ]
    version = _VERSION_ROW.search(told.stderr) or _VERSION_ROW.search(told.stdout)
    if told.returncode or version is None:
        said = (told.stderr.strip() or told.stdout.strip())[-300:]
        raise RigError(
            "INVALID",
            f"{program.path} ({program.origin}) does not answer as a llama-server: {said}",
            "build_llama_server(force=true), or set LLAMA_SERVER to another one",
        )
    devices = [
        f"{name}: {words}"
        for name, words in _DEVICE_ROW.findall(listed.stdout)
        if not name.upper().startswith(tuple(name.upper() for name in _PROCESSOR_DEVICES))
    ]
    return LlamaFacts(version[1].strip()[:120], devices)


def llama_program_fault(program: LlamaProgram, facts: LlamaFacts) -> str:
    """Why `program` must not be used; empty when it may."""
    accelerator = program.accelerator()
    if accelerator:
        return f"it is built for {accelerator}, and this rig computes on the processor"
    if facts.devices:
        return f"it lists a device that is no processor ({facts.devices[0][:80]})"
    if not program.knows_architecture("gemma4"):
        return f"its release ({facts.version}) does not know the architecture gemma4"
    return ""
