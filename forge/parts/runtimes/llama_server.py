"""The llama.cpp runtime: `llama-server` on the processor, with a GGUF file.

Finds the program, gets the file (embedded, a local path, the Hub), sizes it, plans the launch;
knows nothing of how a process is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.gguf_config import gguf_geometry
from forge.parts.boundaries.gguf_file import GgufFile, read_gguf
from forge.parts.boundaries.llama_api import llama_properties
from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.knowledge.geometry import Geometry
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.embedded_model import (
    EMBEDDED_MODEL,
    embedded_gguf,
    embedded_need,
    fetch_embedded_gguf,
)
from forge.parts.runtimes.hub_gguf import cached_gguf, download_gguf, hub_package_need
from forge.parts.runtimes.hub_snapshot import hub_token_need
from forge.parts.runtimes.llama_build import built_llama_server, llama_build_needs
from forge.parts.runtimes.llama_memory import (
    LLAMA_CHECKPOINTS,
    CacheType,
    llama_buffer_bytes,
    llama_cells,
    slot_memory,
)
from forge.parts.runtimes.llama_program import (
    LLAMA_PROGRAM,
    LlamaFacts,
    LlamaProgram,
    ask_llama_program,
    find_llama_program,
    llama_environment,
    llama_program_fault,
    usable_cores,
)
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel

LLAMA_SERVER_REQUIREMENTS = ("huggingface_hub>=2.4,<3",)


class LlamaServerSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(
        description="What to serve: 'embedded', a Hugging Face id of a GGUF release, or the "
        "absolute path of a .gguf file."
    )
    llama_server: str = Field(
        default="",
        max_length=4096,
        description="Absolute path of a llama-server built for the processor; empty: the one that "
        "build_llama_server made, else the one on PATH.",
    )
    slots: int = Field(
        default=1, ge=1, le=32, description="Requests that are answered at a time; others wait."
    )
    context_per_slot: int = Field(
        default=4096,
        ge=256,
        le=262_144,
        description="Tokens of one request, prompt and answer. Each slot holds memory for them.",
    )
    cache_type: CacheType = Field(
        default="f16",
        description="Number format of the KV cache: q8_0 takes half the memory of f16; f32 twice, "
        "and computes attention in it, for comparing with other engines.",
    )
    threads: int = Field(
        default=0, ge=0, le=512, description="Threads that compute; 0: one for each core."
    )
    thinking: bool = Field(
        default=False,
        description="Whether a request that does not say so thinks before it answers (Gemma 4).",
    )
    query_timeout_s: float = Field(
        default=45.0, ge=1, le=3600, description="Longest wait for one answer, in seconds."
    )


class LlamaServer:
    """`llama-server` with one model, bound to loopback, offline, on the processor alone.

    Thinking: the server's own default is on where a chat template knows it, vLLM's is off. Here
    THINKING decides, and a request overrides it with
    ``"chat_template_kwargs": {"enable_thinking": true}``. ``ignore_eos``, ``grammar`` and
    ``response_format`` (json_schema) of a request go through as they are.
    """

    vocabulary: Mapping[str, str] = {
        "engine": "llama-server (llama.cpp)",
        "ready": "model",
        "server": "model server",
        "logs": "server_logs",
        "endpoint": "endpoint",
    }
    phases: Sequence[str] = ("environment", "weights", "load", "first token")
    # b11434 says how many requests run and wait, and nothing of how full the KV cache is.
    metric_names: Mapping[MetricUse, str] = {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "prompt_tokens_total": "llamacpp:prompt_tokens_total",
        "generation_tokens_total": "llamacpp:tokens_predicted_total",
    }

    def __init__(
        self, settings: Callable[[], LlamaServerSettings], port: Callable[[], int], cache: Path
    ) -> None:
        self._load_settings = settings
        self._port = port
        self._cache = cache

    @property
    def _settings(self) -> LlamaServerSettings:
        return self._load_settings()

    def api_key(self) -> str:
        """Empty: the server takes no key. It listens on loopback only."""
        return ""

    @property
    def cache_type(self) -> CacheType:
        """The number format of the KV cache that the next start gets."""
        return self._settings.cache_type

    def program(self) -> LlamaProgram | None:
        """The llama-server that a start would use. Raises RigError INVALID on LLAMA_SERVER."""
        return find_llama_program(self._settings.llama_server, built_llama_server(self._cache))

    async def needs(self) -> Sequence[Need]:
        """A llama-server that may be used, and what the ways to get one and its models take."""
        found = [await self._program_need(), *llama_build_needs()]
        return [*found, embedded_need(), hub_package_need(), hub_token_need()]

    async def usable_program(self) -> tuple[LlamaProgram, LlamaFacts]:
        """The llama-server that a start would use, after it has answered.

        Raises RigError NOT_FOUND (there is none), INVALID (LLAMA_SERVER names none, or what is
        there is none), or DENIED (built for a GPU, or before Gemma 4).
        """
        program = self.program()
        if program is None:
            raise RigError(
                "NOT_FOUND",
                "there is no llama-server: LLAMA_SERVER is empty, none was built, PATH has none",
                "build_llama_server()",
            )
        facts = await ask_llama_program(program)
        fault = await asyncio.to_thread(llama_program_fault, program, facts)
        if fault:
            raise RigError(
                "DENIED",
                f"{program.path} (from {program.origin}) is not used: {fault}",
                "build_llama_server() and an empty LLAMA_SERVER",
            )
        return program, facts

    async def _program_need(self) -> Need:
        name = f"program {LLAMA_PROGRAM}"
        try:
            program, facts = await self.usable_program()
        except RigError as error:
            return Need(name, False, error.what, error.next_step or "build_llama_server()")
        return Need(name, True, f"{program.path} (from {program.origin}), {facts.version}")

    def local_model(self, name: str) -> ServedModel | None:
        """The model `name` if its file lies on this computer already; None if it must be got.

        Raises RigError INVALID when the file is damaged, holds no text model, or one of an
        architecture that the llama-server at hand does not know.
        """
        checked_name("model", "model", name)
        if name == EMBEDDED_MODEL:
            path = embedded_gguf(self._cache)
            return self._measured(name, path) if path.is_file() else None
        if name.startswith("/"):
            return self._measured(name, Path(name))
        cached = cached_gguf(name)
        return None if cached is None else self._measured(name, cached)

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        """Get the file of `name` onto this computer, and measure it.

        Raises RigError: CAPACITY (disk), UNREACHABLE (registry or Hub), DENIED (hash), INVALID.
        """
        if name == EMBEDDED_MODEL:
            return self._measured(name, await fetch_embedded_gguf(self._cache, room, report))
        path = await asyncio.to_thread(download_gguf, name, room, report)
        return self._measured(name, path)

    def launch(self, model: ServedModel) -> Launch:
        """The argument list of the model server. It listens on loopback and never goes online.

        Raises RigError NOT_FOUND where no llama-server is there any more.
        """
        program, settings = self.program(), self._settings
        if program is None:
            raise RigError("NOT_FOUND", "there is no llama-server", "build_llama_server()")
        context = llama_cells(settings.context_per_slot)
        argv = [
            *(str(program.path), "--model", str(model.folder), "--alias", model.name),
            *("--host", "127.0.0.1", "--port", str(self._port())),
            *("--ctx-size", str(context * settings.slots), "--parallel", str(settings.slots)),
            *("--threads", str(settings.threads or usable_cores())),
            *("-ngl", "0", "--metrics", "--slots"),
        ]
        argv += ["--cache-type-k", settings.cache_type, "--cache-type-v", settings.cache_type]
        if settings.cache_type == "f32":
            argv += ["--flash-attn", "off"]  # which would round to 16 bits again
        thinking = "on" if settings.thinking else "off"
        for option, value in (
            ("--offline", None),
            ("--no-webui", None),
            ("--no-kv-unified", None),  # each slot its own cache: the sum that memory is planned by
            ("--lazy-mode", "on"),  # of its own accord only for tables beyond 4 GiB
            ("--cache-ram", "0"),
            ("--fit", "off"),  # or it would load twice, and give less context than was asked for
            ("--ctx-checkpoints", str(LLAMA_CHECKPOINTS)),
            ("--reasoning", thinking),
            ("--cors-origins", "localhost"),  # or any page in a browser could ask the model
        ):
            # Older releases lack some of these; what they do not know they do not do either.
            if program.mentions(option.encode() + b"\0"):
                argv += [option] if value is None else [option, value]
        return Launch(
            argv=argv,
            environment=llama_environment() | {"HF_HUB_OFFLINE": "1"},
            port=self._port(),
            model=model.name,
            served_name=model.name,
        )

    def loading_step(self, log: str) -> str:
        """The last line of `log` that tells how far loading has come, for people."""
        lines = [line.strip() for line in log.splitlines()[1:] if line.strip()]
        return lines[-1][:160] if lines else "starting llama-server"

    def loading_fault(self, log: str) -> str:
        """Empty: llama-server refuses a file that lacks a tensor, and then does not come up."""
        del log
        return ""

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        """What the server settled on, from its /props; its build is its version."""
        del log
        found = llama_properties(await client.get_json("/props"))
        return {"version": found.build_info, **found.resolved}

    def _measured(self, name: str, path: Path) -> ServedModel:
        file = read_gguf(path)
        self._refuse_unknown(file)
        slots = self._settings.slots
        each = slot_memory(file, self._settings.context_per_slot, self._settings.cache_type)
        table = file.per_layer_embedding_size
        needed = {
            "weights": file.size - table,
            f"KV cache of {slots} slot{'s' if slots > 1 else ''}": slots * each.kv,
            "prompt checkpoints": slots * each.checkpoints,
            "program and buffers": llama_buffer_bytes(
                file, each.context, self._settings.cache_type
            ),
        }
        return ServedModel(
            name=name,
            folder=path,
            architecture=file.architecture,
            size_on_disk=file.size,
            memory_needed={what: size for what, size in needed.items() if size},
            beside=_beside(file, table),
            geometry=_geometry_or_none(file),
            encoding=file.encoding.lower(),
            context=self._settings.context_per_slot,
        )

    def _refuse_unknown(self, file: GgufFile) -> None:
        program = self.program()
        if program is not None and not program.knows_architecture(file.architecture):
            raise RigError(
                "INVALID",
                f"{file.path} is of the architecture {file.architecture[:60]}, which "
                f"{program.path} does not know",
                "serve another file, or set LLAMA_SERVER to a newer llama-server",
            )


def _geometry_or_none(file: GgufFile) -> Geometry | None:
    try:
        return gguf_geometry(file)
    except ValueError:
        return None  # what is not understood is served all the same, and not planned with


def _beside(file: GgufFile, table: int) -> str:
    """What a reader of the sum should know: what stays on the disk, what is not in the file."""
    notes = []
    if table:
        notes.append(
            f"{table / 1e9:.2f} GB of the file are the per-layer embedding table, which is read "
            "from the disk row by row and not counted"
        )
    if not file.has_chat_template:
        notes.append("the file has no chat template, so ChatML is used")
    if not file.kv_layers():
        notes.append("the KV cache is not counted: the file does not tell its heads")
    return "; ".join(notes)
