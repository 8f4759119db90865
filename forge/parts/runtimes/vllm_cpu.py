"""The vLLM runtime on this computer's CPU: `vllm serve` out of an environment of its own.

Gets weights (embedded, a local folder, the Hub), sizes them with their cache, plans the launch;
knows nothing of how a process is kept, nor of how that environment came to be.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.checkpoint import Checkpoint, read_checkpoint
from forge.parts.ground.errors import RigError
from forge.parts.ground.process import run_program
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths, private_folder
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.geometry_config import GEMMA4_MODEL_TYPES
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.embedded_model import (
    EMBEDDED_MODEL,
    EMBEDDED_SERVED_NAME,
    embedded_folder,
    embedded_need,
    make_embedded_folder,
)
from forge.parts.runtimes.found_model import found_model
from forge.parts.runtimes.hub_snapshot import download_snapshot, hub_token_need
from forge.parts.runtimes.layer_weights import absent_projections
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel
from forge.parts.runtimes.served_key import served_key
from forge.parts.runtimes.vllm_install import (
    VLLM_VERSION,
    VllmEnvironment,
    default_vllm_folder,
    unsteered_environment,
)
from forge.parts.runtimes.vllm_log import (
    resolved_engine_values,
    vllm_absent_weights,
    vllm_loading_step,
)

# For models by Hub id. In the MCP server's own Python and not in vLLM's environment, because the
# part that downloads tells the Hub's refusals apart by their types.
VLLM_CPU_REQUIREMENTS = ("huggingface-hub>=2.4,<3",)
# What vLLM's processes (API, engine, worker) hold besides weights and KV cache: 2.09 GB of PSS
# together, 1.93 started eagerly, measured with SmolLM2-135M in bf16 on 2026-11-30; rounded up.
_VLLM_OVERHEAD = 2_200_000_000
_VLLM_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_GIB = 1 << 30
_SHUTDOWN_S = 5  # requests that run may end; less than a plane waits before it kills
_LOADED_BY_NAME = {"embedded": EMBEDDED_SERVED_NAME}
# Their processors need torchvision; vLLM's text half takes the same files without it.
_GEMMA4_TEXT = {"architectures": ["Gemma4ForCausalLM"]}
_VLLM_PASSED = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR LD_LIBRARY_PATH USER LOGNAME XDG_CACHE_HOME "
    "XDG_STATE_HOME OMP_NUM_THREADS CXX CC"
).split()
_CONVERT_GGUF = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


class VllmCpuSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(
        description="What to serve: 'embedded', a Hugging Face id, or an absolute folder."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Number format that the weights are held in."
    )
    max_model_len: int = Field(
        default=4096, ge=64, le=262_144, description="Tokens of one conversation at most."
    )
    max_num_seqs: int = Field(
        default=4, ge=1, le=256, description="Conversations that are answered at once."
    )
    kv_cache_gib: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="GiB of KV cache; 0: what MAX_NUM_SEQS times MAX_MODEL_LEN takes.",
    )
    reserved_cores: int = Field(
        default=0, ge=0, le=64, description="Cores that the model leaves to everything else."
    )
    # 0 takes two minutes at every start: 0.32.0 cannot load what it compiled before. No gain was
    # seen with a small model: 7 to 33 tokens/s, and 8 to 37 eagerly, on busy cores, 2026-11-30.
    enforce_eager: bool = Field(
        default=True,
        description="1 compiles nothing: starts sooner, without a compiler. 0 may answer faster.",
    )
    vllm_env: str = Field(
        default="",
        max_length=1024,
        pattern=r"^(/[^\x00-\x1f]*)?$",
        description="Absolute folder of vLLM's environment; empty: in your data folder.",
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )


class VllmCpu:
    """`vllm serve` with one model, bound to loopback, behind a key, offline once it runs."""

    vocabulary: Mapping[str, str] = {
        "engine": "vLLM",
        "ready": "vllm",
        "server": "vLLM server",
        "logs": "vllm_logs",
        "endpoint": "vllm_endpoint",
        "bench": "vllm_",
    }
    phases: Sequence[str] = ("environment", "weights", "load", "first token")
    metric_names: Mapping[MetricUse, str] = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_used_share": "vllm:kv_cache_usage_perc",
        "preemptions_total": "vllm:num_preemptions_total",
        "prompt_tokens_total": "vllm:prompt_tokens_total",
        "generation_tokens_total": "vllm:generation_tokens_total",
    }

    def __init__(
        self,
        settings: Callable[[], VllmCpuSettings],
        port: Callable[[], int],
        paths: RigPaths,
    ) -> None:
        self._settings = settings
        self._port = port
        self._paths = paths

    def environment(self) -> VllmEnvironment:
        """vLLM's environment, where the settings say that it is now."""
        named = self._settings().vllm_env
        return VllmEnvironment(Path(named) if named else default_vllm_folder())

    @property
    def key_file(self) -> Path:
        """The file (0600) that holds the served model's key, for clients of this user."""
        return self._paths.state / "vllm-api-key"

    def api_key(self) -> str:
        """The key that the model server asks for under /v1. Raises RigError as served_key does."""
        return served_key(self.key_file)

    async def needs(self) -> Sequence[Need]:
        """vLLM's environment, a compiler unless it starts eagerly, and what single cases need."""
        rest = [embedded_need(), _hub_package_need(), hub_token_need()]
        try:
            environment, eager = self.environment(), self._settings().enforce_eager
        except RigError:  # tpu.env is at fault: whoever asks says so, and nothing starts
            return rest
        return [*await environment.needs(), _compiler_need(eager), *rest]

    def local_model(self, name: str) -> ServedModel | None:
        """The model `name` if its weights lie on this computer already; None if they must be got.

        Raises RigError INVALID or DENIED when what lies there is unsafe, damaged or unfinished.
        """
        return found_model(name, embedded_folder(self._paths.cache), self._measured)

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Get the weights of `name` onto this computer, and measure them.

        Raises RigError: CAPACITY (disk), UNREACHABLE (registry or Hub), DENIED (hash, pickles).
        """
        if name == EMBEDDED_MODEL:
            convert = self._conversion(asyncio.get_running_loop())
            folder = await make_embedded_folder(self._paths.cache, room, report, convert)
            return self._measured(name, folder)
        if find_spec("huggingface_hub") is None:
            need = _hub_package_need()
            raise RigError("NOT_FOUND", f"{need.name}: {need.detail}", need.remedy)
        folder = await asyncio.to_thread(download_snapshot, name, room, report)
        return self._measured(name, folder)

    def launch(self, model: ServedModel) -> Launch:
        """The argument list of the model server: loopback, offline, its key in the environment."""
        settings, served = self._settings(), _LOADED_BY_NAME.get(model.name, model.name)
        checkpoint = read_checkpoint(model.folder)
        argv = [
            *(str(self.environment().python), "-m", "vllm.entrypoints.cli.main"),
            *("serve", str(model.folder), "--served-model-name", served),
            *("--host", "127.0.0.1", "--port", str(self._port())),
            *("--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)),
            *("--max-num-seqs", str(settings.max_num_seqs)),
            # Left to guess, 0.32.0 writes a system message into the prompt as a Python list.
            *("--chat-template-content-format", "string"),
            *("--shutdown-timeout", str(_SHUTDOWN_S), "--disable-fastapi-docs"),
        ]
        if settings.enforce_eager:
            argv.append("--enforce-eager")
        if checkpoint.config.get("model_type") in GEMMA4_MODEL_TYPES:
            argv += ["--enable-auto-tool-choice", "--tool-call-parser", "gemma4"]
            argv += ["--reasoning-parser", "gemma4"]
            if "text_config" in checkpoint.config:
                argv += ["--hf-overrides", json.dumps(_GEMMA4_TEXT)]
        return Launch(
            argv=argv,
            environment=self._served_environment(checkpoint),
            port=self._port(),
            model=model.name,
            served_name=served,
        )

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        return vllm_loading_step(log)

    def loading_fault(self, log: str) -> str:
        """Tensors that the checkpoint lacks, as vLLM names them; empty when it is whole."""
        return vllm_absent_weights(log)

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What vLLM settled on, from the log of this start."""
        del client
        return {"version": VLLM_VERSION, **resolved_engine_values(log)}

    def _served_environment(self, checkpoint: Checkpoint) -> dict[str, str]:
        settings = self._settings()
        passed = {name: os.environ[name] for name in _VLLM_PASSED if name in os.environ}
        return passed | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(self._kv_gib(checkpoint)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(settings.reserved_cores),
            "VLLM_CACHE_ROOT": str(private_folder(self._paths.cache / "vllm")),
            "VLLM_API_KEY": self.api_key(),
            # Its processes talk to each other over TCP: by default at the network's address.
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            # It renames its processes, which would wipe out the label that they are known by.
            "SPT_NOENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
        }

    def _kv_gib(self, checkpoint: Checkpoint) -> int:
        """GiB of KV cache, whole ones because vLLM takes no fractions: set, or reckoned."""
        settings = self._settings()
        if settings.kv_cache_gib or checkpoint.geometry is None:
            return settings.kv_cache_gib or 1
        size = kv_bytes(
            checkpoint.geometry,
            settings.max_model_len,
            slots=settings.max_num_seqs,
            dtype_bytes=_VLLM_ELEMENT_BYTES[settings.dtype],
            layout="uniform",
        )
        return max(1, -(-size // _GIB))

    def _measured(self, name: str, folder: Path) -> ServedModel:
        checkpoint = read_checkpoint(folder)
        absent = absent_projections(checkpoint)
        if absent:
            # vLLM 0.32.0 checks norms and embeddings, and serves other gaps as they lie in memory.
            raise RigError(
                "INVALID",
                f"the model folder {folder} cannot be served: it lacks {len(absent)} of its "
                f"projections, {absent[0]} first",
                "download it again",
            )
        element_bytes = _VLLM_ELEMENT_BYTES[self._settings().dtype]
        table = checkpoint.per_layer_embedding_size(element_bytes)
        beside = (
            f"{table / 1e9:.2f} GB of the weights are the per-layer embedding table; vLLM loads "
            "all of it into memory, so it is not subtracted"
        )
        return ServedModel(
            name=name,
            folder=folder,
            beside=beside if table else "",
            architecture=checkpoint.architecture,
            size_on_disk=checkpoint.size,
            memory_needed={
                "weights": checkpoint.loaded_size(element_bytes),
                "KV cache": self._kv_gib(checkpoint) * _GIB,
                "Python, torch and vLLM": _VLLM_OVERHEAD,
            },
            geometry=checkpoint.geometry,
            context=self._settings().max_model_len,
        )

    def _conversion(self, loop: asyncio.AbstractEventLoop) -> Callable[[Path, Path], None]:
        """What makes a folder of a GGUF file, in vLLM's environment: this Python has no torch."""
        python = str(self.environment().python)

        def convert(source: Path, target: Path) -> None:
            argv = [python, "-c", _CONVERT_GGUF, str(source.parent), source.name, str(target)]
            running = run_program(argv, timeout_s=900, environment=unsteered_environment())
            # On the loop, where cancelling the job ends it; this is a thread of the loop's.
            done = asyncio.run_coroutine_threadsafe(running, loop).result()
            if done.returncode:
                raise RigError(
                    "CAPACITY" if "No space left" in done.stderr else "INTERNAL",
                    f"the embedded model could not be converted: {done.stderr.strip()[-400:]}",
                    "free some disk space" if "No space left" in done.stderr else "install_vllm()",
                )

        return convert


def _compiler_need(eager: bool) -> Need:
    """torch's compiler writes C++ for the CPU and has it compiled on this machine."""
    found = shutil.which(os.environ.get("CXX", "") or "g++") or shutil.which("clang++")
    return Need(
        "C++ compiler",
        found is not None,
        found or "none",
        "on Debian: apt install g++; or set ENFORCE_EAGER=1",
        only_for="starts with ENFORCE_EAGER=0" if eager else "",
    )


def _hub_package_need() -> Need:
    present = find_spec("huggingface_hub") is not None
    return Need(
        "package huggingface_hub",
        present,
        "there" if present else "not installed",
        "run `python3 launch.py install` in the rig's folder and start this MCP server anew",
        only_for="models by their Hugging Face id",
    )
