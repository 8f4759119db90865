"""vLLM in a container on a rented TPU machine: its arguments, docker's, and the boot document.

The machine gets image and weights by itself and starts the container at boot. Knows no cloud, no
way into the machine and no model format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.image_registry import pinned_image, resolve_image
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.container_grants import container_grants
from forge.parts.runtimes.gke_manifest import (
    ClusterServing,
    gke_manifest,
    manifest_notes,
    manifest_yaml,
)
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel
from forge.parts.runtimes.vllm_log import (
    resolved_engine_values,
    vllm_absent_weights,
    vllm_loading_step,
)
from forge.parts.runtimes.vllm_tpu_log import BOOT_MARKS, BOOT_PHASE_WORDS, resolved_tpu_values

CONTAINER_NAME = "vllm"
CONTAINER_PORT = 8000  # in the container and on the machine's loopback
# Folders of the machine. Only the compile cache goes into a bucket: weights can be had again.
COMPILE_CACHE_FOLDER = "/var/lib/gemma4/cache"
WEIGHTS_FOLDER = "/var/lib/gemma4/weights"
TOKEN_FILE = "/run/gemma4/token.env"  # HF_TOKEN=…, 0600, gone with the machine's memory
_MEDIA_LIMITS = {"image": 4, "audio": 1}
# What both forms of this container, docker's and the cluster's, have in their environment.
CONTAINER_ENVIRONMENT: Mapping[str, str] = {
    "HF_HOME": "/cache/huggingface",
    # Where tpu-inference 0.32.0 has JAX keep what it compiled (runner/compilation_manager.py).
    "VLLM_XLA_CACHE_PATH": "/cache/xla",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
# Grow or are not zero while somebody uses the model.
USED_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
# Faults of the registry that say nothing about the image: the machine may still get it.
_PASSING_FAULTS = ("UNREACHABLE", "TIMEOUT", "QUOTA")


class VllmDockerSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(description="What to serve: a Hugging Face id.")
    model_revision: str = Field(
        default="",
        pattern=r"^([0-9a-f]{40})?$",
        description="Commit of the model's repository, 40 hex digits; empty: its newest.",
    )
    vllm_image: str = Field(
        default="vllm/vllm-tpu:nightly",
        max_length=300,
        pattern=r"^[^\s@]+$",
        description="The image, with its tag.",
    )
    image_digest: str = Field(
        default="",
        pattern=r"^(sha256:[0-9a-f]{64})?$",
        description="Pin of the image, sha256:…; empty: what its tag means when it is planned.",
    )
    image_registry: str = Field(
        default="",
        max_length=200,
        pattern=r"^(https?://[A-Za-z0-9.:\[\]-]+/?)?$",
        description="Address that is asked for the tag's digest; empty: the tag is used as it is.",
    )
    max_model_len: int = Field(
        default=65_536, ge=256, le=262_144, description="Tokens of one conversation at most."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, ge=0.1, le=0.98, description="Share of the chip's memory that vLLM uses."
    )
    max_num_batched_tokens: int = Field(
        default=4096, ge=16, le=65_536, description="Tokens that one step works on at most."
    )
    vision: bool = Field(default=False, description="1 takes 4 images and 1 sound a prompt.")
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
    hf_secret: str = Field(
        default="hf-token",
        pattern=r"^([A-Za-z0-9_-]{1,255})?$",
        description="Secret with the Hugging Face token; empty: none is fetched.",
    )
    cache_bucket: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])?$",
        description="Bucket that keeps the compile cache between machines; empty: none.",
    )
    idle_minutes: int = Field(
        default=30,
        ge=0,
        le=10_080,
        description="Minutes without a request after which the machine ends itself; 0: never.",
    )
    gke_accelerator: Literal["", "tpu-v5-lite-podslice", "tpu-v6e-slice"] = Field(
        default="", description="GKE's word for the chip, for the manifest; empty: no manifest."
    )
    gke_topology: str = Field(
        default="1x1",
        pattern=r"^[1-8]x[1-8]$",
        description="How the chips of one GKE node lie; E2B needs one.",
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )
    port: int = Field(
        default=8000, ge=1024, le=65_535, description="This computer's end of the tunnel."
    )


def serve_argv(settings: VllmDockerSettings) -> list[str]:
    """vLLM's own argument list, the same in a container of docker's and in a cluster.

    Raises RigError INVALID for a model that is no Hugging Face id.
    """
    model = checked_name("model", "model_name", settings.model_name)
    if "/" not in model or model.startswith("/"):
        raise invalid_parameter("model_name", "must be a Hugging Face id: the machine fetches it")
    argv = [
        *("vllm", "serve", model),
        # Within the container. Outside it is published on the machine's loopback alone.
        *("--host", "0.0.0.0", "--port", str(CONTAINER_PORT)),
        *("--max-model-len", str(settings.max_model_len)),
        *("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"),
        *("--max_num_batched_tokens", str(settings.max_num_batched_tokens)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "gemma4"),
        *("--reasoning-parser", "gemma4"),
    ]
    if settings.model_revision:
        argv += ["--revision", settings.model_revision]
    if settings.vision:
        argv += ["--limit-mm-per-prompt", json.dumps(_MEDIA_LIMITS, separators=(",", ":"))]
    return argv


def container_argv(settings: VllmDockerSettings, image: str) -> list[str]:
    """docker's argument list. `image` is VLLM_IMAGE with its tag, or by digest.

    Raises RigError INVALID for another image than the settings', or as serve_argv does.
    """
    _check_image(settings, image)
    argv = ["docker", "run", "--detach", "--name", CONTAINER_NAME, "--restart", "unless-stopped"]
    argv += ["--publish", f"127.0.0.1:{CONTAINER_PORT}:{CONTAINER_PORT}"]
    # The log of a server that runs for days must not fill the disk that the weights lie on.
    argv += ["--log-driver", "json-file", "--log-opt", "max-size=50m", "--log-opt", "max-file=3"]
    grants = container_grants(settings.tpu_devices, settings.container_privileged)
    argv += [word for grant in grants for word in grant.options]
    argv += ["--volume", f"{WEIGHTS_FOLDER}:{CONTAINER_ENVIRONMENT['HF_HOME']}"]
    argv += ["--volume", f"{COMPILE_CACHE_FOLDER}:{CONTAINER_ENVIRONMENT['VLLM_XLA_CACHE_PATH']}"]
    for name, value in CONTAINER_ENVIRONMENT.items():
        argv += ["--env", f"{name}={value}"]
    if settings.hf_secret:
        argv += ["--env-file", TOKEN_FILE]
    return [*argv, image, *serve_argv(settings)]


def _check_image(settings: VllmDockerSettings, image: str) -> None:
    digest = image.partition("@")[2]
    if image != pinned_image(settings.vllm_image, digest, "vllm_image"):
        raise invalid_parameter("image", "is not the one that VLLM_IMAGE names")


def boot_document(
    settings: VllmDockerSettings, rig: str, project: str, image: str, life_s: int, leave: str
) -> dict[str, Any]:
    """What the machine is told at its creation, as JSON; it holds no secret, only a secret's name.

    `life_s` is the machine's longest life in seconds; `leave` the address whose DELETE ends it,
    empty where the machine has no such right. Raises RigError INVALID as container_argv does.
    """
    return {
        "v": 1,
        "rig": rig,
        "project": project,
        "image": image,
        "container": container_argv(settings, image),
        "health": f"http://127.0.0.1:{CONTAINER_PORT}/health",
        "metrics": f"http://127.0.0.1:{CONTAINER_PORT}/metrics",
        "marks": {phase: list(marks) for phase, marks in BOOT_MARKS.items()},
        "used": list(USED_METRICS),
        "secret": settings.hf_secret,
        "token_file": TOKEN_FILE,
        "cache": {"folder": COMPILE_CACHE_FOLDER, "bucket": settings.cache_bucket},
        "idle_minutes": settings.idle_minutes,
        "life_s": life_s,
        "leave": leave,
    }


class VllmDocker:
    """vLLM with one model in a container on the rig's own machine, reached through a tunnel."""

    vocabulary: Mapping[str, str] = {
        "engine": "vLLM",
        "ready": "vllm",
        "server": "vLLM container",
        "logs": "vllm_docker_logs",
        "endpoint": "vllm_endpoint",
        "bench": "vllm_",
    }
    phases: Sequence[str] = tuple(BOOT_PHASE_WORDS)
    metric_names: Mapping[MetricUse, str] = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_used_share": "vllm:kv_cache_usage_perc",
        "preemptions_total": "vllm:num_preemptions_total",
        "prompt_tokens_total": "vllm:prompt_tokens_total",
        "generation_tokens_total": "vllm:generation_tokens_total",
    }

    def __init__(
        self, settings: Callable[[], VllmDockerSettings], cluster_name: str = CONTAINER_NAME
    ) -> None:
        """`cluster_name` is what the documents for a cluster are called: the rig's slug."""
        self._settings = settings
        self._cluster_name = cluster_name

    def api_key(self) -> str:
        """Empty: the server listens on the machine's loopback, and only a tunnel leads there."""
        return ""

    async def needs(self) -> Sequence[Need]:
        """Nothing of this computer: the machine brings all that vLLM needs."""
        return []

    def local_model(self, name: str) -> ServedModel | None:
        """None: no weights are kept on this computer. Raises RigError INVALID for a bad name."""
        checked_name("model", "model", name)
        return None

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Refused with RigError INVALID: the machine downloads the weights when it boots."""
        del room, report
        checked_name("model", "model", name)
        raise RigError("INVALID", _ON_THE_MACHINE.format(what="gets the weights"), _CREATE_STEP)

    def launch(self, model: ServedModel) -> Launch:
        """Refused with RigError INVALID: the machine starts the container when it boots."""
        del model
        raise RigError("INVALID", _ON_THE_MACHINE.format(what="starts vLLM"), _CREATE_STEP)

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        return vllm_loading_step(log)

    def loading_fault(self, log: str) -> str:
        """Tensors that the checkpoint lacks, as vLLM names them; empty when it is whole."""
        return vllm_absent_weights(log)

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What vLLM settled on, from the log of this start: its version, the memory of the chip in
        GiB (all, usable, taken by the weights), which half of tpu-inference has the model."""
        del client
        return resolved_engine_values(log) | resolved_tpu_values(log)

    # What a machine of this rig will run

    async def image(self) -> tuple[str, str]:
        """The image that a machine is to pull, by digest where it can be had, and a word on it.

        A registry that cannot be asked leaves the tag; what it refuses, the machine would meet too:
        RigError NOT_FOUND, AUTH, DENIED or INVALID.
        """
        settings = self._settings()
        try:
            found = await resolve_image(
                settings.vllm_image, settings.image_registry, settings.image_digest
            )
        except RigError as error:
            if error.error_class not in _PASSING_FAULTS:
                raise
            return settings.vllm_image, f"not resolved ({error.what}): the tag as it will be then"
        pin = f"; to keep it: IMAGE_DIGEST={found.digest}" if found.digest else ""
        return found.image, found.note + ("" if settings.image_digest else pin)

    def serve_argv(self) -> list[str]:
        """vLLM's own argument list by the present settings. Raises RigError INVALID."""
        return serve_argv(self._settings())

    def boot_document(
        self, rig: str, project: str, image: str, life_s: int, leave: str = ""
    ) -> dict[str, Any]:
        """The function of this name, by the present settings."""
        return boot_document(self._settings(), rig, project, image, life_s, leave)

    def privileges(self) -> list[str]:
        """Each thing that the container gets beyond docker's default, its reason and its source."""
        settings = self._settings()
        grants = container_grants(settings.tpu_devices, settings.container_privileged)
        return [f"{' '.join(g.options)}: {g.reason} ({g.source})" for g in grants]

    def manifest(self, image: str, replicas: int) -> str:
        """The same serving as YAML for a cluster of GKE. Raises RigError INVALID."""
        settings = self._settings()
        _check_image(settings, image)
        serving = ClusterServing(
            name=self._cluster_name,
            container=CONTAINER_NAME,
            image=image,
            argv=serve_argv(settings),
            environment=CONTAINER_ENVIRONMENT,
            secret=settings.hf_secret,
            port=CONTAINER_PORT,
            accelerator=settings.gke_accelerator,
            topology=settings.gke_topology,
        )
        documents = gke_manifest(serving, replicas)
        return manifest_yaml(documents, manifest_notes(serving, replicas))


_ON_THE_MACHINE = "the machine itself {what} when it boots, this computer does not"
_CREATE_STEP = "create the machine; get_help() names the tool"
