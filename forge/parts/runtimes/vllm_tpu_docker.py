"""vLLM's container on a rented TPU machine: its rights and caches there, and its form for GKE.

Knows no cloud and no way into the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.runtimes.gke_manifest import (
    ClusterServing,
    gke_manifest,
    manifest_notes,
    manifest_yaml,
)
from forge.parts.runtimes.tpu_grants import tpu_grants
from forge.parts.runtimes.vllm_docker import (
    CONTAINER_NAME,
    CONTAINER_PORT,
    QUIET_ENVIRONMENT,
    WEIGHTS_IN_CONTAINER,
    ChipContainer,
    VllmDocker,
    VllmDockerSettings,
    serve_argv,
)
from forge.parts.runtimes.vllm_log import resolved_engine_values
from forge.parts.runtimes.vllm_tpu_log import BOOT_MARKS, BOOT_PHASE_WORDS, resolved_tpu_values

# What both forms of this container, docker's and the cluster's, have in their environment.
TPU_ENVIRONMENT: Mapping[str, str] = {
    "HF_HOME": WEIGHTS_IN_CONTAINER,
    # Where tpu-inference 0.32.0 has JAX keep what it compiled (runner/compilation_manager.py).
    "VLLM_XLA_CACHE_PATH": "/cache/xla",
    **QUIET_ENVIRONMENT,
}


class VllmTpuDockerSettings(VllmDockerSettings):
    """The keys of this runtime."""

    vllm_image: str = Field(
        default="vllm/vllm-tpu:nightly",
        max_length=300,
        pattern=r"^[^\s@]+$",
        description="The image, with its tag.",
    )
    tpu_devices: str = Field(
        default="/dev/vfio",
        max_length=200,
        pattern=r"^/dev/[a-z0-9]+(/[a-z0-9]+)?(, ?/dev/[a-z0-9]+(/[a-z0-9]+)?){0,8}$",
        description="Device files of the chip that the container gets, by comma.",
    )
    container_privileged: bool = Field(
        default=False,
        description="1 gives the container all of the machine, should the chip not be found else.",
    )
    gke_accelerator: Literal["", "tpu-v5-lite-podslice", "tpu-v6e-slice"] = Field(
        default="", description="GKE's word for the chip, for the manifest; empty: no manifest."
    )
    gke_topology: str = Field(
        default="1x1",
        pattern=r"^[1-8]x[1-8]$",
        description="How the chips of one GKE node lie; E2B needs one.",
    )


def tpu_container(settings: VllmTpuDockerSettings) -> ChipContainer:
    """The container on a TPU machine. Raises RigError INVALID as serve_argv does."""
    return ChipContainer(
        settings=settings,
        argv=serve_argv(settings),
        grants=tpu_grants(settings.tpu_devices, settings.container_privileged),
        environment=TPU_ENVIRONMENT,
        compile_cache=TPU_ENVIRONMENT["VLLM_XLA_CACHE_PATH"],
        marks=BOOT_MARKS,
    )


class VllmTpuDocker(VllmDocker):
    """vLLM and tpu-inference with one model in a container on the rig's own TPU machine."""

    phases: Sequence[str] = tuple(BOOT_PHASE_WORDS)

    def __init__(
        self, settings: Callable[[], VllmTpuDockerSettings], cluster_name: str = CONTAINER_NAME
    ) -> None:
        """`cluster_name` is what the documents for a cluster are called: the rig's slug."""
        super().__init__(settings)
        self._tpu_settings = settings
        self._cluster_name = cluster_name

    def chip(self) -> ChipContainer:
        return tpu_container(self._tpu_settings())

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What vLLM settled on, from the log of this start: its version, the memory of the chip in
        GiB (all, usable, taken by the weights), which half of tpu-inference has the model."""
        del client
        return resolved_engine_values(log) | resolved_tpu_values(log)

    def manifest(self, image: str, replicas: int) -> str:
        """The same serving as YAML for a cluster of GKE. Raises RigError INVALID."""
        settings = self._tpu_settings()
        tpu_container(settings).check_image(image)
        serving = ClusterServing(
            name=self._cluster_name,
            container=CONTAINER_NAME,
            image=image,
            argv=serve_argv(settings),
            environment=TPU_ENVIRONMENT,
            secret=settings.hf_secret,
            port=CONTAINER_PORT,
            accelerator=settings.gke_accelerator,
            topology=settings.gke_topology,
        )
        documents = gke_manifest(serving, replicas)
        return manifest_yaml(documents, manifest_notes(serving, replicas))
