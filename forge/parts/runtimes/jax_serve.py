"""The JAX runtime on this computer's CPU: `jax_server.py`, the engine that lies beside server.py.

Gets weights (random, a local folder, the Hub), sizes them with their cache, plans the launch; knows
nothing of how a process is kept, nor of what the engine does inside.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.checkpoint import read_checkpoint
from forge.parts.ground.errors import RigError
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths, private_folder
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.embedded_model import EMBEDDED_MODEL
from forge.parts.runtimes.found_model import PACKAGES_REMEDY, found_model, installed_versions
from forge.parts.runtimes.hub_snapshot import download_snapshot, hub_token_need
from forge.parts.runtimes.jax_checkpoint import jax_memory
from forge.parts.runtimes.jax_log import jax_loading_step
from forge.parts.runtimes.random_gemma4 import (
    MEANS_NOTHING,
    RANDOM_SERVED_NAME,
    make_random_gemma4,
    random_gemma4_folder,
)
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel
from forge.parts.runtimes.served_key import served_key

JAX_SERVER = "jax_server"  # the program's name, beside server.py
# For the served engine and for the random model. One line each, why:
JAX_SERVE_REQUIREMENTS = (
    "jax[cpu]==0.10.2",  # the engine is written and tested against this one's compiler
    "jinja2>=3.1.6,<4",  # chat templates
    # Answers of a given shape. xgrammar does the same, and needs torch and transformers.
    "llguidance>=1.9.1,<2",
    "ml_dtypes>=0.6,<0.7",  # bf16 in numpy, of which the weights are made
    "numpy>=2.4,<3",  # views of mapped weights
    "prometheus-client>=0.26,<1",  # /metrics
    "starlette>=1.10,<2",  # the HTTP front
    "tokenizers>=0.23,<0.24",  # tokenizer.json
    "uvicorn>=0.54,<1",  # the server under it
    "huggingface-hub>=2.4,<3",  # models by Hub id
)
# Packages that every start needs, as pip names them.
_JAX_PACKAGES = (
    *("jax", "jaxlib", "jinja2", "llguidance", "ml_dtypes", "numpy", "prometheus-client"),
    *("starlette", "tokenizers", "uvicorn"),
)
_JAX_RELEASE = "0.10.2"
_JAX_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_JAX_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_JAX_LOADED_BY_NAME = {EMBEDDED_MODEL: RANDOM_SERVED_NAME}
_JAX_PASSED = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR PYTHONPATH LD_LIBRARY_PATH VIRTUAL_ENV USER LOGNAME "
    "XDG_CACHE_HOME XDG_STATE_HOME"
).split()


class JaxServeSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(
        description="What to serve: 'embedded', a Hugging Face id, or an absolute folder."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="float32",
        description="Number format that weights and cache are held in; float32 is faster here.",
    )
    max_model_len: int = Field(
        default=4096, ge=64, le=262_144, description="Tokens of one conversation at most."
    )
    slots: int = Field(
        default=4, ge=1, le=64, description="Conversations that are answered at once; others wait."
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )


class JaxServe:
    """`jax_server.py` with one Gemma 4, bound to loopback, behind a key, offline, on the CPU alone.

    JAX_PLATFORMS is cpu whatever the user's environment says: this rig takes no accelerator that
    another program may be using.
    """

    vocabulary: Mapping[str, str] = {
        "engine": "JAX (jax_server.py)",
        "ready": "jax",
        "server": "JAX server",
        "logs": "jax_logs",
        "endpoint": "endpoint",
    }
    phases: Sequence[str] = ("environment", "weights", "load", "first token")
    metric_names: Mapping[MetricUse, str] = {
        "running": "engine_num_requests_running",
        "waiting": "engine_num_requests_waiting",
        "kv_used_share": "engine_kv_cache_usage_perc",
        "prompt_tokens_total": "engine_prompt_tokens_total",
        "generation_tokens_total": "engine_generation_tokens_total",
    }

    def __init__(
        self,
        settings: Callable[[], JaxServeSettings],
        port: Callable[[], int],
        paths: RigPaths,
    ) -> None:
        self._settings = settings
        self._port = port
        self._paths = paths

    @property
    def program(self) -> Path:
        """The engine's file."""
        return self._paths.programs / f"{JAX_SERVER}.py"

    @property
    def key_file(self) -> Path:
        """The file (0600) that holds the served model's key, for clients of this user."""
        return self._paths.state / "jax-api-key"

    def api_key(self) -> str:
        """The key that the model server asks for. Raises RigError as served_key does."""
        return served_key(self.key_file)

    async def needs(self) -> Sequence[Need]:
        """The engine's file and its packages, as the interpreter that will run it sees them."""
        versions = await installed_versions(_JAX_PACKAGES, jax_environment())
        found = [
            Need(f"package {name}", bool(version), version or "not installed", PACKAGES_REMEDY)
            for name, version in versions.items()
        ]
        for name in ("jax", "jaxlib"):
            version = versions.get(name, "")
            if version and version != _JAX_RELEASE:
                detail = f"{version}, and the engine is tried with {_JAX_RELEASE}"
                found.append(Need(f"version of {name}", False, detail, PACKAGES_REMEDY))
        present = self.program.is_file()
        where = str(self.program) if present else f"{self.program} is not there"
        file = Need(f"file {self.program.name}", present, where, "copy the rig's folder as a whole")
        hub = find_spec("huggingface_hub") is not None
        package = Need(
            "package huggingface_hub",
            hub,
            "there" if hub else "not installed",
            PACKAGES_REMEDY,
            only_for="models by their Hugging Face id",
        )
        return [file, *found, package, hub_token_need()]

    def local_model(self, name: str) -> ServedModel | None:
        """The model `name` if its weights lie on this computer already; None if they must be got.

        Raises RigError INVALID or DENIED when what lies there is unsafe, damaged, unfinished, or
        no Gemma 4 of plain floating-point weights.
        """
        return found_model(name, random_gemma4_folder(self._paths.cache), self._measured)

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Get the weights of `name` onto this computer, and measure them.

        Raises RigError: CAPACITY (disk), UNREACHABLE (Hub), DENIED (pickles), NOT_FOUND (package).
        """
        if name == EMBEDDED_MODEL:
            folder = await make_random_gemma4(self._paths.cache, room, report)
            return self._measured(name, folder)
        if find_spec("huggingface_hub") is None:
            raise RigError(
                "NOT_FOUND",
                "package huggingface_hub: not installed",
                "run `python3 launch.py install` in the rig's folder",
            )
        folder = await asyncio.to_thread(download_snapshot, name, room, report)
        return self._measured(name, folder)

    def launch(self, model: ServedModel) -> Launch:
        """The argument list of the model server: loopback, offline, its key in a file."""
        settings, served = self._settings(), _JAX_LOADED_BY_NAME.get(model.name, model.name)
        self.api_key()  # made before the server looks for its file
        argv = [
            *(sys.executable, str(self.program), "--model", str(model.folder)),
            *("--served-model-name", served, "--host", "127.0.0.1", "--port", str(self._port())),
            *("--slots", str(settings.slots), "--max-model-len", str(settings.max_model_len)),
            *("--dtype", _JAX_DTYPES[settings.dtype], "--api-key-file", str(self.key_file)),
            *("--compile-cache", str(private_folder(self._paths.cache / "jax"))),
            *("--prefix-cache-gb", "0"),  # of the memory that the model's need is told without
        ]
        return Launch(
            argv=argv,
            environment=jax_environment(),
            port=self._port(),
            model=model.name,
            served_name=served,
        )

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        return jax_loading_step(log)

    def loading_fault(self, log: str) -> str:
        """Empty: the engine refuses a checkpoint that is not whole, and does not come up."""
        del log
        return ""

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """The context that the engine tells, and the hash of its file: which engine that was."""
        del log
        told = await client.get_json("/v1/models")
        digest = hashlib.sha256(await asyncio.to_thread(self.program.read_bytes)).hexdigest()
        models = told.get("data")
        context = models[0].get("max_model_len") if isinstance(models, list) and models else None
        values = {"jax_server_sha256": digest[:16]}
        return values | ({"max_model_len": str(context)} if isinstance(context, int) else {})

    def _measured(self, name: str, folder: Path) -> ServedModel:
        checkpoint, settings = read_checkpoint(folder), self._settings()
        element_bytes, context = _JAX_ELEMENT_BYTES[settings.dtype], settings.max_model_len
        needed = jax_memory(checkpoint, element_bytes, context, settings.slots)
        table = checkpoint.per_layer_embedding_size(element_bytes)
        notes = [MEANS_NOTHING] if name == EMBEDDED_MODEL else []
        if table:
            notes.append(
                f"{table / 1e9:.2f} GB of the weights are the per-layer embedding table; JAX holds "
                "all of it in memory, so it is not subtracted"
            )
        return ServedModel(
            name=name,
            folder=folder,
            architecture=checkpoint.architecture,
            size_on_disk=checkpoint.size,
            memory_needed=needed,
            beside="; ".join(notes),
            geometry=checkpoint.geometry,
            context=context,
        )


def jax_environment() -> dict[str, str]:
    """The environment of the model server: what it needs, by name, and no credential of any kind.

    XLA_FLAGS of the user stay out: they could ask for devices and compile something else.
    """
    passed = {name: os.environ[name] for name in _JAX_PASSED if name in os.environ}
    return passed | {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
