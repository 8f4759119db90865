"""llama.cpp on a rented machine, which builds its server for the GPU there and serves one GGUF.

Its settings, the words of its command line, and the document that a machine boots by. Knows no
cloud, no way into the machine, and not how a machine does what the document says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.llama_api import llama_properties
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.llama_machine_log import resolved_residency
from forge.parts.runtimes.llama_source import (
    LLAMA_SOURCE_PACKAGE,
    LLAMA_SOURCE_RELEASE,
    LLAMA_SOURCE_SHA256,
)
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel

LLAMA_MACHINE_PORT = 8000  # on the machine's loopback
LLAMA_CACHE_FOLDER = "/var/lib/gemma4/cache"  # what was built; a bucket may keep it as well
_SOURCE_FOLDER = f"{LLAMA_SOURCE_PACKAGE.replace('-', '_').replace('==', '-')}/llama.cpp/"
# Grow or are not zero while somebody uses the model.
LLAMA_USED_METRICS = (
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:prompt_tokens_total",
    "llamacpp:tokens_predicted_total",
)
# All are options of b11434's CMakeLists.txt; cmake 3.25 configured the server's target with them
# and nvcc 13.0.88 for 75-real on 2026-11-30. Attention over a cache of one type for keys and
# values (f16, q8_0) is compiled without GGML_CUDA_FA_ALL_QUANTS (ggml/cmake/common.cmake).
_GPU_BUILD_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # one file, which can be kept, hashed and moved
    f"-DLLAMA_BUILD_NUMBER={LLAMA_SOURCE_RELEASE}",
    "-DLLAMA_BUILD_COMMIT=sdist",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # or it would be downloaded while building
    "-DLLAMA_OPENSSL=OFF",  # it listens on loopback and downloads nothing
    "-DLLAMA_SUBPROCESS=OFF",  # a served model's tools must not start programs
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DGGML_NATIVE=ON",  # for this very processor, which is part of a kept build's key
    "-DGGML_CCACHE=OFF",
    "-DGGML_CUDA=ON",
    "-DGGML_CUDA_NCCL=OFF",  # there is one GPU
)


class LlamaMachineSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(description="What to serve: a Hugging Face id of a GGUF release.")
    model_revision: str = Field(
        default="",
        pattern=r"^([0-9a-f]{40})?$",
        description="Commit of the model's repository, 40 hex digits; empty: its newest.",
    )
    model_file: str = Field(
        default="",
        pattern=r"^(\w[\w.-]{0,200}\.gguf)?$",
        description="File of the repository; empty: its one text model.",
    )
    model_sha256: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 that the file must have; empty: the one that the Hub tells.",
    )
    gpu_arch: str = Field(
        default="7.5",
        pattern=r"^[1-9]\d?\.\d$",
        description="Compute capability that is built for and that the GPU must have; a T4G has "
        "7.5.",
    )
    slots: int = Field(
        default=4, ge=1, le=32, description="Requests that are answered at a time; others wait."
    )
    context_per_slot: int = Field(
        default=8192,
        ge=256,
        le=131_072,
        multiple_of=256,
        description="Tokens of one request, prompt and answer. Each slot holds memory for them.",
    )
    cache_type: Literal["f16", "q8_0"] = Field(
        default="f16", description="Number format of the KV cache; q8_0 takes half of f16."
    )
    # With `on`, releases of June 2026 ended at once where a layer's heads had no kernel: Gemma 4
    # E4B, Turing too (ggml-org/llama.cpp#24400; E2B elsewhere: ikawrakow/ik_llama.cpp#1936). With
    # `auto` the server tries each layer at its start and does without where one has none
    # (src/llama-context.cpp). b11434 has a kernel for E2B's widest heads, 512 numbers and 8 queries
    # to a key, on GPUs with Turing's tensor cores (ggml/src/ggml-cuda/fattn.cu): unmeasured here.
    flash_attn: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: fused attention where the GPU has a kernel for every layer; off: never.",
    )
    thinking: bool = Field(
        default=False,
        description="Whether a request that does not say so thinks before it answers.",
    )
    hf_secret: str = Field(
        default="hf-token",
        pattern=r"^([A-Za-z0-9_-]{1,255})?$",
        description="Secret with the Hugging Face token; empty: none is fetched.",
    )
    cache_bucket: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])?$",
        description="Bucket that keeps the build between machines; empty: none.",
    )
    idle_minutes: int = Field(
        default=30,
        ge=0,
        le=10_080,
        description="Minutes without a request after which the machine ends itself; 0: never.",
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )
    port: int = Field(
        default=8000, ge=1024, le=65_535, description="This computer's end of the tunnel."
    )

    @property
    def kv_cache_dtype(self) -> str:
        """The cache's type by the planner's name, which has none for q8_0's 8.5 bits."""
        return {"f16": "float16", "q8_0": "auto"}[self.cache_type]


def llama_serve_words(settings: LlamaMachineSettings) -> list[str]:
    """llama-server's argument list but for its address and its file, which the machine adds.

    Raises RigError INVALID for a model that is no Hugging Face id, and for a cache of 8 bits
    without fused attention, which the server refuses.
    """
    model = checked_name("model", "model_name", settings.model_name)
    if "/" not in model or model.startswith("/"):
        raise invalid_parameter("model_name", "must be a Hugging Face id: the machine fetches it")
    if settings.cache_type == "q8_0" and settings.flash_attn == "off":
        raise RigError(
            "INVALID",
            "CACHE_TYPE=q8_0 takes fused attention, and FLASH_ATTN is off",
            "set CACHE_TYPE=f16, or FLASH_ATTN=auto",
        )
    context = settings.context_per_slot * settings.slots
    return [
        *("llama-server", "--alias", model, "--gpu-layers", "all"),
        *("--ctx-size", str(context), "--parallel", str(settings.slots)),
        *("--cache-type-k", settings.cache_type, "--cache-type-v", settings.cache_type),
        *("--flash-attn", settings.flash_attn),
        "--no-kv-unified",  # each slot its own cache: the sum that memory is planned by
        *("--lazy-mode", "on"),  # E2B's table by row from the disk; auto only begins at 4 GiB
        *("--cache-ram", "0", "--ctx-checkpoints", "4"),  # of 8 GiB the host has none to keep
        *("--fit", "off"),  # or it would give less context than was asked for
        *("--reasoning", "on" if settings.thinking else "off"),
        *("--offline", "--no-webui", "--metrics", "--slots"),
        *("--cors-origins", "localhost"),
        *("--log-verbosity", "4"),  # what lies on the GPU is told from 4 on, and no prompt is
    ]


def llama_boot_document(
    settings: LlamaMachineSettings, rig: str, project: str, life_s: int
) -> dict[str, Any]:
    """What the machine is told at its creation, as JSON; it holds no secret, only a secret's name.

    `life_s` is the machine's longest life in seconds. Raises RigError INVALID as llama_serve_words
    does.
    """
    arch = settings.gpu_arch.replace(".", "")
    return {
        "v": 1,
        "rig": rig,
        "project": project,
        "gpu_arch": settings.gpu_arch,
        "serve": llama_serve_words(settings),
        "build": {
            "source": LLAMA_SOURCE_PACKAGE,
            "sha256": LLAMA_SOURCE_SHA256,
            "root": _SOURCE_FOLDER,
            # Machine code for this architecture alone: no other is compiled, none at the start.
            "flags": [*_GPU_BUILD_FLAGS, f"-DCMAKE_CUDA_ARCHITECTURES={arch}-real"],
        },
        "weights": {
            "repository": settings.model_name,
            "revision": settings.model_revision,
            "file": settings.model_file,
            "sha256": settings.model_sha256,
        },
        "health": f"http://127.0.0.1:{LLAMA_MACHINE_PORT}/health",
        "metrics": f"http://127.0.0.1:{LLAMA_MACHINE_PORT}/metrics",
        "used": list(LLAMA_USED_METRICS),
        "secret": settings.hf_secret,
        "cache": {"folder": LLAMA_CACHE_FOLDER, "bucket": settings.cache_bucket},
        "idle_minutes": settings.idle_minutes,
        "life_s": life_s,
    }


class LlamaMachine:
    """llama-server with one model on the rig's own machine, reached through a tunnel.

    Its phases: the driver is checked before anything is built, the build is found or made, the
    token is fetched, the file comes, the server loads it, it answers.
    """

    vocabulary: Mapping[str, str] = {
        "engine": "llama.cpp",
        "ready": "model",
        "server": "llama-server",
        "logs": "server_logs",
        "endpoint": "endpoint",
        "bench": "",
        "docker": "llama_server",
    }
    phases: Sequence[str] = ("driver", "build", "token", "weights", "load", "ready")
    # b11434 says how many requests run and wait, and nothing of how full the KV cache is.
    metric_names: Mapping[MetricUse, str] = {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "prompt_tokens_total": "llamacpp:prompt_tokens_total",
        "generation_tokens_total": "llamacpp:tokens_predicted_total",
    }

    def __init__(self, settings: Callable[[], LlamaMachineSettings]) -> None:
        self._settings = settings

    def api_key(self) -> str:
        """Empty: the server listens on the machine's loopback, and only a tunnel leads there."""
        return ""

    async def needs(self) -> Sequence[Need]:
        """Nothing of this computer: the machine brings or builds all that is needed."""
        return []

    def local_model(self, name: str) -> ServedModel | None:
        """None: no weights are kept on this computer. Raises RigError INVALID for a bad name."""
        checked_name("model", "model", name)
        return None

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Refused with RigError INVALID: the machine downloads the weights when it boots."""
        del room, report
        checked_name("model", "model", name)
        raise RigError("INVALID", _MACHINE_DOES_IT.format(what="gets the weights"), _MAKE_MACHINE)

    def launch(self, model: ServedModel) -> Launch:
        """Refused with RigError INVALID: the machine starts the server when it boots."""
        del model
        raise RigError("INVALID", _MACHINE_DOES_IT.format(what="starts it"), _MAKE_MACHINE)

    def loading_step(self, log: str) -> str:
        """The last line of `log`, for people."""
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return lines[-1][:160] if lines else "starting llama-server"

    def loading_fault(self, log: str) -> str:
        """Empty: llama-server refuses a file that lacks a tensor, and then does not come up."""
        del log
        return ""

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What the server settled on, from its /props and from the log of its start: what of the
        model lies on the GPU, and what stays with the host."""
        found = llama_properties(await client.get_json("/props"))
        return {"version": found.build_info, **found.resolved, **resolved_residency(log)}

    # What a machine of this rig will run

    async def image(self) -> tuple[str, str]:
        """No image, and a word on what the machine builds instead."""
        arch = self._settings().gpu_arch
        note = f"built on the machine: llama.cpp b{LLAMA_SOURCE_RELEASE} out of"
        return "", f"{note} {LLAMA_SOURCE_PACKAGE}, by hash, for compute capability {arch} alone"

    def serve_argv(self) -> list[str]:
        """llama-server's argument list by the present settings, with the address that the machine
        adds. Raises RigError INVALID."""
        words = llama_serve_words(self._settings())
        return [*words, "--host", "127.0.0.1", "--port", str(LLAMA_MACHINE_PORT)]

    def boot_document(
        self, rig: str, project: str, image: str, life_s: int, leave: str = ""
    ) -> dict[str, Any]:
        """llama_boot_document by the present settings. There is no image, and no `leave`: such a
        machine ends by shutting down."""
        del image, leave
        return llama_boot_document(self._settings(), rig, project, life_s)

    def privileges(self) -> list[str]:
        """What the server may do beyond the ordinary: there is no container around it."""
        return [
            "root: a service of systemd on a machine that has no other work and no inbound rule; "
            "listens on 127.0.0.1 alone, with no credential in its environment"
        ]


_MACHINE_DOES_IT = "the machine itself {what} when it boots, this computer does not"
_MAKE_MACHINE = "create the machine; get_help() names the tool"
