"""The JAX engine on a rented TPU machine: `jax_server.py` with one Gemma 4, started at boot.

Its settings, its command line, its release and the document that a machine boots by. Knows no
cloud, no way into the machine, and not how a machine does what the document says.
"""

from __future__ import annotations

import base64
import hashlib
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.jax_log import jax_loading_step
from forge.parts.runtimes.jax_machine_packages import JAX_MACHINE_PACKAGES, JAX_MACHINE_PYTHON
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel

JAX_MACHINE_PORT = 8000  # on the machine's loopback
JAX_CACHE_FOLDER = "/var/lib/gemma4/cache"  # what XLA compiled; a bucket may keep it as well
JAX_ENGINE_FILE = "jax_server.py"
# Grow or are not zero while somebody uses the model.
JAX_USED_METRICS = (
    "engine_num_requests_running",
    "engine_num_requests_waiting",
    "engine_prompt_tokens_total",
    "engine_generation_tokens_total",
)


class JaxMachineSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(description="What to serve: a Hugging Face id of open weights.")
    model_revision: str = Field(
        default="",
        pattern=r"^([0-9a-f]{40})?$",
        description="Commit of the model's repository, 40 hex digits; empty: the newest at the "
        "machine's first boot.",
    )
    quantization: Literal["", "int8"] = Field(
        default="", description="int8 rounds plain weights at load; empty: as they are stored."
    )
    unpack: Literal["step", "load"] = Field(
        default="step",
        description="When packed weights become bfloat16: at each step, or once, which takes the "
        "memory of bfloat16.",
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        default="auto", description="Number format of the KV cache; auto is bfloat16."
    )
    max_model_len: int = Field(
        default=8192, ge=64, le=262_144, description="Tokens of one conversation at most."
    )
    slots: int = Field(
        default=8, ge=1, le=64, description="Conversations that are answered at once; others wait."
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


def jax_serve_words(settings: JaxMachineSettings) -> list[str]:
    """The engine's arguments but for its checkpoint, its address and its compile cache, which the
    machine adds. Raises RigError INVALID for a model that is no Hugging Face id."""
    model = checked_name("model", "model_name", settings.model_name)
    if "/" not in model or model.startswith("/"):
        raise invalid_parameter("model_name", "must be a Hugging Face id: the machine fetches it")
    words = ["--served-model-name", model, "--dtype", "bf16"]
    words += ["--slots", str(settings.slots), "--max-model-len", str(settings.max_model_len)]
    words += ["--unpack", "load"] if settings.unpack == "load" else []
    words += ["--quantization", settings.quantization] if settings.quantization else []
    words += ["--kv-dtype", "int8"] if settings.kv_cache_dtype == "int8" else []
    return words


def packed_engine(file: Path) -> str:
    """The engine's file as ASCII text, xz in base 85: 228 kB of it were 70 (2026-11-30), and a
    machine's metadata takes 256 kB a value. Raises RigError INTERNAL where it cannot be read."""
    return base64.b85encode(lzma.compress(_engine_bytes(file), preset=9)).decode("ascii")


def _engine_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        what = f"{file} cannot be read"
        raise RigError("INTERNAL", what, "copy the rig's folder as a whole") from None


class JaxMachine:
    """jax_server.py with one model on the rig's own machine, reached through a tunnel.

    Its phases: the packages come, the checkpoint comes, JAX sees the chip, the weights are loaded,
    each shape is compiled, it answers.
    """

    vocabulary: Mapping[str, str] = {
        "engine": "JAX (jax_server.py)",
        "ready": "jax",
        "server": "JAX server",
        "logs": "jax_logs",
        "endpoint": "jax_endpoint",
        "bench": "",
        "docker": "jax_server",
    }
    phases: Sequence[str] = ("environment", "weights", "device", "load", "compile", "ready")
    metric_names: Mapping[MetricUse, str] = {
        "running": "engine_num_requests_running",
        "waiting": "engine_num_requests_waiting",
        "kv_used_share": "engine_kv_cache_usage_perc",
        "prompt_tokens_total": "engine_prompt_tokens_total",
        "generation_tokens_total": "engine_generation_tokens_total",
    }

    def __init__(self, settings: Callable[[], JaxMachineSettings], paths: RigPaths) -> None:
        self._settings = settings
        self._file = paths.programs / JAX_ENGINE_FILE

    def api_key(self) -> str:
        """Empty: the server listens on the machine's loopback, and only a tunnel leads there."""
        return ""

    async def needs(self) -> Sequence[Need]:
        """The engine's file, which goes to the machine; nothing else of this computer."""
        present = self._file.is_file()
        where = str(self._file) if present else f"{self._file} is not there"
        return [Need(f"file {JAX_ENGINE_FILE}", present, where, "copy the rig's folder as a whole")]

    def local_model(self, name: str) -> ServedModel | None:
        """None: no weights are kept on this computer. Raises RigError INVALID for a bad name."""
        checked_name("model", "model", name)
        return None

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Refused with RigError INVALID: the machine downloads the weights when it boots."""
        del room, report
        checked_name("model", "model", name)
        raise RigError("INVALID", _JAX_MACHINE_DOES.format(what="gets the weights"), _JAX_MAKE)

    def launch(self, model: ServedModel) -> Launch:
        """Refused with RigError INVALID: the machine starts the server when it boots."""
        del model
        raise RigError("INVALID", _JAX_MACHINE_DOES.format(what="starts it"), _JAX_MAKE)

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        return jax_loading_step(log)

    def loading_fault(self, log: str) -> str:
        """Empty: the engine refuses a checkpoint that is not whole, and does not come up."""
        del log
        return ""

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """The context that the engine tells."""
        del log
        models = (await client.get_json("/v1/models")).get("data")
        context = models[0].get("max_model_len") if isinstance(models, list) and models else None
        return {"max_model_len": str(context)} if isinstance(context, int) else {}

    # What a machine of this rig will run

    async def image(self) -> tuple[str, str]:
        """No image, and a word on what the machine runs instead."""
        packages = f"{len(JAX_MACHINE_PACKAGES)} pinned packages, jax 0.10.2 among them"
        return "", f"{JAX_ENGINE_FILE} {self._engine_hash()[:12]} and {packages}; no container"

    def serve_argv(self) -> list[str]:
        """The engine's argument list by the present settings, with the address that the machine
        adds. Raises RigError INVALID."""
        own = ["--host", "127.0.0.1", "--port", str(JAX_MACHINE_PORT)]
        return [JAX_ENGINE_FILE, *jax_serve_words(self._settings()), *own]

    def release(self) -> dict[str, Any]:
        """What a machine is to run: the engine by its hash, its packages, its checkpoint, its
        arguments. Raises RigError INVALID, or INTERNAL without the engine's file."""
        settings = self._settings()
        return {
            "sha256": self._engine_hash(),
            "python": JAX_MACHINE_PYTHON,
            "requirements": list(JAX_MACHINE_PACKAGES),
            "repository": settings.model_name,
            "revision": settings.model_revision,
            "serve": jax_serve_words(settings),
        }

    def boot_document(
        self, rig: str, project: str, image: str, life_s: int, leave: str = ""
    ) -> dict[str, Any]:
        """What the machine is told at its creation, as JSON; it holds no secret and names none.

        `life_s` is the machine's longest life in seconds. There is no image. Raises RigError as
        `release` does.
        """
        del image
        settings = self._settings()
        return {
            "v": 1,
            "rig": rig,
            "project": project,
            "release": self.release(),
            "health": f"http://127.0.0.1:{JAX_MACHINE_PORT}/health",
            "metrics": f"http://127.0.0.1:{JAX_MACHINE_PORT}/metrics",
            "used": list(JAX_USED_METRICS),
            "secret": "",
            "cache": {"folder": JAX_CACHE_FOLDER, "bucket": settings.cache_bucket},
            "idle_minutes": settings.idle_minutes,
            "life_s": life_s,
            "leave": leave,
        }

    def privileges(self) -> list[str]:
        """What the server may do beyond the ordinary: there is no container around it."""
        return [
            "root: a service of systemd on a machine that has no other work; listens on 127.0.0.1 "
            "alone, offline, with no credential in its environment"
        ]

    def _engine_hash(self) -> str:
        return hashlib.sha256(_engine_bytes(self._file)).hexdigest()


_JAX_MACHINE_DOES = "the machine itself {what} when it boots, this computer does not"
_JAX_MAKE = "create the machine; get_help() names the tool"
