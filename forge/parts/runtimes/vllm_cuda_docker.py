"""vLLM's container on a rented machine with an NVIDIA GPU: the published image, its rights, caches.

Knows no cloud, no way into the machine and no cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.runtimes.cuda_grants import cuda_grants
from forge.parts.runtimes.vllm_cuda_log import (
    CUDA_BOOT_MARKS,
    CUDA_PHASE_WORDS,
    resolved_cuda_values,
)
from forge.parts.runtimes.vllm_docker import (
    QUIET_ENVIRONMENT,
    WEIGHTS_IN_CONTAINER,
    ChipContainer,
    VllmDocker,
    VllmDockerSettings,
    serve_argv,
)
from forge.parts.runtimes.vllm_log import resolved_engine_values

# One root for what vLLM and Triton compile (envs.py of 0.32.0; Triton's own variable), so that one
# folder of the machine keeps all of it.
CUDA_ENVIRONMENT: Mapping[str, str] = {
    "HF_HOME": WEIGHTS_IN_CONTAINER,
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "TRITON_CACHE_DIR": "/cache/vllm/triton",
    **QUIET_ENVIRONMENT,
}
# 0.32.0 calls `fp8` deprecated for bf16 weights and reads it as this (weight_utils.py).
_MADE_ON_LOAD = {"fp8": "fp8_per_tensor"}


class VllmCudaDockerSettings(VllmDockerSettings):
    """The keys of this runtime."""

    # Images up to v0.27.1 brought transformers 5.15, with which Gemma 4 does not start
    # (vllm-project/vllm#51744, #52768); 0.28 mended it, and 0.32.0 asks for 5.16.1 to 5.19.
    vllm_image: str = Field(
        default="vllm/vllm-openai:v0.32.0",
        max_length=300,
        pattern=r"^[^\s@]+$",
        description="The image, with its tag.",
    )
    # vLLM's own value below 70 GiB, and the one of the boots that the planner was held against.
    max_num_batched_tokens: int = Field(
        default=2048, ge=16, le=65_536, description="Tokens that one step works on at most."
    )
    max_num_seqs: int = Field(
        default=32, ge=1, le=1024, description="Conversations that are answered at once."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="fp8 holds twice the tokens; auto is the weights' own type."
    )
    quantization: Literal["", "fp8"] = Field(
        default="",
        description="fp8 makes 16-bit weights eight-bit while loading; empty: as they are stored.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="1 compiles and records nothing: starts sooner, answers more slowly.",
    )
    gpu_arch: str = Field(
        default="8.9",
        pattern=r"^\d{1,2}\.\d$",
        description="Compute capability that the machine's GPU must have; an L4 has 8.9.",
    )
    container_usual_rights: bool = Field(
        default=False,
        description="1 leaves the container docker's usual rights, should it not start without.",
    )
    cuda_compatibility: bool = Field(
        default=False,
        description="1 uses the image's driver libraries, should the machine's driver be too old.",
    )


def cuda_container(settings: VllmCudaDockerSettings) -> ChipContainer:
    """The container on a machine with an NVIDIA GPU. Raises RigError INVALID as serve_argv does."""
    argv = [*serve_argv(settings), "--max-num-seqs", str(settings.max_num_seqs)]
    if settings.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", settings.kv_cache_dtype]
    if settings.quantization:
        argv += ["--quantization", _MADE_ON_LOAD[settings.quantization]]
    if settings.enforce_eager:
        argv.append("--enforce-eager")
    compatibility = {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"} if settings.cuda_compatibility else {}
    return ChipContainer(
        settings=settings,
        argv=argv,
        grants=cuda_grants(settings.container_usual_rights),
        environment={**CUDA_ENVIRONMENT, **compatibility},
        compile_cache=CUDA_ENVIRONMENT["VLLM_CACHE_ROOT"],
        marks=CUDA_BOOT_MARKS,
        own_entrypoint=True,  # `vllm serve` since 2025, another program before that
        facts={"gpu_arch": settings.gpu_arch},
    )


class VllmCudaDocker(VllmDocker):
    """vLLM with one model in a container on the rig's own machine with an NVIDIA GPU."""

    phases: Sequence[str] = tuple(CUDA_PHASE_WORDS)

    def __init__(self, settings: Callable[[], VllmCudaDockerSettings]) -> None:
        super().__init__(settings)
        self._cuda_settings = settings

    def chip(self) -> ChipContainer:
        return cuda_container(self._cuda_settings())

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What vLLM settled on, from the log of this start: its version, its attention, and where
        the memory of the card went, in GiB."""
        del client
        return resolved_engine_values(log) | resolved_cuda_values(log)
