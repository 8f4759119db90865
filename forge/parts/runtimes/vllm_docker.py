"""vLLM in a container on a rented machine: what its forms for every kind of chip have in common.

Its arguments, docker's, and the boot document; the machine gets image and weights by itself and
starts the container at boot. Knows no chip, no cloud, no way into the machine, no model format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.image_registry import pinned_image, resolve_image
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.container_grants import ContainerGrant, told_grants
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel
from forge.parts.runtimes.vllm_log import (
    resolved_engine_values,
    vllm_absent_weights,
    vllm_loading_step,
)

CONTAINER_NAME = "vllm"
CONTAINER_PORT = 8000  # in the container and on the machine's loopback
# Folders of the machine. Only the compile cache goes into a bucket: weights can be had again.
COMPILE_CACHE_FOLDER = "/var/lib/gemma4/cache"
WEIGHTS_FOLDER = "/var/lib/gemma4/weights"
WEIGHTS_IN_CONTAINER = "/cache/huggingface"  # HF_HOME
TOKEN_FILE = "/run/gemma4/token.env"  # HF_TOKEN=…, 0600, gone with the machine's memory
_MEDIA_LIMITS = {"image": 4, "audio": 1}
# In every container's environment: nothing is told to anybody, and the log comes at once.
QUIET_ENVIRONMENT: Mapping[str, str] = {
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
    """The keys of this runtime on every kind of chip."""

    model_name: str = Field(description="What to serve: a Hugging Face id.")
    model_revision: str = Field(
        default="",
        pattern=r"^([0-9a-f]{40})?$",
        description="Commit of the model's repository, 40 hex digits; empty: its newest.",
    )
    vllm_image: str = Field(
        max_length=300, pattern=r"^[^\s@]+$", description="The image, with its tag."
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
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )
    port: int = Field(
        default=8000, ge=1024, le=65_535, description="This computer's end of the tunnel."
    )


def serve_argv(settings: VllmDockerSettings) -> list[str]:
    """vLLM's own argument list on every kind of chip; a chip may add its own at the end.

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


@dataclass(frozen=True)
class ChipContainer:
    """The container on one kind of chip, as `settings` want it.

    `argv` is vLLM's own argument list, `grants` what docker gives beyond its default,
    `environment` has HF_HOME, `compile_cache` is the folder in the container that keeps what was
    compiled, `marks` are the log lines with which a phase begins. `own_entrypoint`: the image
    starts a program of its own, which `argv` takes the place of. `facts` go into the document.
    """

    settings: VllmDockerSettings
    argv: Sequence[str]
    grants: Sequence[ContainerGrant]
    environment: Mapping[str, str]
    compile_cache: str
    marks: Mapping[str, Sequence[str]]
    own_entrypoint: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)

    def check_image(self, image: str) -> None:
        """Raise RigError INVALID for another image than the settings', by its tag or a digest."""
        digest = image.partition("@")[2]
        if image != pinned_image(self.settings.vllm_image, digest, "vllm_image"):
            raise invalid_parameter("image", "is not the one that VLLM_IMAGE names")

    def docker_argv(self, image: str) -> list[str]:
        """docker's argument list. Raises RigError INVALID as check_image does."""
        self.check_image(image)
        argv = ["docker", "run", "--detach", "--name", CONTAINER_NAME]
        argv += ["--restart", "unless-stopped"]
        argv += ["--publish", f"127.0.0.1:{CONTAINER_PORT}:{CONTAINER_PORT}"]
        # The log of a server that runs for days must not fill the disk that the weights lie on.
        argv += ["--log-driver", "json-file", "--log-opt", "max-size=50m"]
        argv += ["--log-opt", "max-file=3"]
        argv += [word for grant in self.grants for word in grant.options]
        argv += ["--volume", f"{WEIGHTS_FOLDER}:{self.environment['HF_HOME']}"]
        argv += ["--volume", f"{COMPILE_CACHE_FOLDER}:{self.compile_cache}"]
        for name, value in self.environment.items():
            argv += ["--env", f"{name}={value}"]
        if self.settings.hf_secret:
            argv += ["--env-file", TOKEN_FILE]
        if self.own_entrypoint:
            return [*argv, "--entrypoint", self.argv[0], image, *self.argv[1:]]
        return [*argv, image, *self.argv]

    def boot_document(
        self, rig: str, project: str, image: str, life_s: int, leave: str
    ) -> dict[str, Any]:
        """What the machine is told at its creation, as JSON; it holds no secret, only its name.

        `life_s` is the machine's longest life in seconds; `leave` the address whose DELETE ends
        it, empty where the machine has no such right. Raises RigError INVALID as docker_argv does.
        """
        return {
            "v": 1,
            "rig": rig,
            "project": project,
            "image": image,
            "container": self.docker_argv(image),
            "health": f"http://127.0.0.1:{CONTAINER_PORT}/health",
            "metrics": f"http://127.0.0.1:{CONTAINER_PORT}/metrics",
            "marks": {phase: list(marks) for phase, marks in self.marks.items()},
            "used": list(USED_METRICS),
            "secret": self.settings.hf_secret,
            "token_file": TOKEN_FILE,
            "cache": {"folder": COMPILE_CACHE_FOLDER, "bucket": self.settings.cache_bucket},
            "idle_minutes": self.settings.idle_minutes,
            "life_s": life_s,
            "leave": leave,
            **self.facts,
        }


class VllmDocker:
    """vLLM with one model in a container on the rig's own machine, reached through a tunnel.

    A kind of chip says in `phases`, `chip` and `resolved` what is its own.
    """

    vocabulary: Mapping[str, str] = {
        "engine": "vLLM",
        "ready": "vllm",
        "server": "vLLM container",
        "logs": "vllm_docker_logs",
        "endpoint": "vllm_endpoint",
        "bench": "vllm_",
    }
    phases: Sequence[str] = ()
    metric_names: Mapping[MetricUse, str] = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_used_share": "vllm:kv_cache_usage_perc",
        "preemptions_total": "vllm:num_preemptions_total",
        "prompt_tokens_total": "vllm:prompt_tokens_total",
        "generation_tokens_total": "vllm:generation_tokens_total",
    }

    def __init__(self, settings: Callable[[], VllmDockerSettings]) -> None:
        self._settings = settings

    def chip(self) -> ChipContainer:
        """The container by the present settings. Raises RigError INVALID as serve_argv does."""
        raise NotImplementedError

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
        """What vLLM settled on, from the log of this start."""
        del client
        return resolved_engine_values(log)

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
        return list(self.chip().argv)

    def boot_document(
        self, rig: str, project: str, image: str, life_s: int, leave: str = ""
    ) -> dict[str, Any]:
        """ChipContainer's, by the present settings."""
        return self.chip().boot_document(rig, project, image, life_s, leave)

    def privileges(self) -> list[str]:
        """Each thing that the container gets beyond docker's default, its reason and its source."""
        return told_grants(self.chip().grants)


_ON_THE_MACHINE = "the machine itself {what} when it boots, this computer does not"
_CREATE_STEP = "create the machine; get_help() names the tool"
