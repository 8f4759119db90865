"""The imaginary vLLM: another runtime's words and flags, over the scripted engine.

Plans the launch of a program; knows no plane.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.names import checked_name
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.plane import Launch, Room
from forge.parts.runtimes.runtime import MetricUse, Need, PhaseReport, ServedModel


class ImaginaryVllmSettings(RigSettings):
    """The keys of this runtime."""

    model_name: str = Field(description="A Hugging Face id.")
    engine_program: str = Field(description="The program that stands in for vLLM.")
    dtype: str = Field(default="bfloat16", description="Number format of the weights.")
    max_model_len: int = Field(default=8192, ge=64, le=131_072, description="--max-model-len.")
    query_timeout_s: float = Field(default=20.0, ge=1, le=3600, description="Wait for an answer.")


class ImaginaryVllm:
    """vLLM in the words of its tools."""

    vocabulary: Mapping[str, str] = {
        "engine": "vLLM",
        "ready": "vllm",
        "server": "vLLM server",
        "logs": "vllm_logs",
        "endpoint": "vllm_endpoint",
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

    def __init__(self, settings: Callable[[], ImaginaryVllmSettings], port: Callable[[], int]):
        self._load_settings = settings
        self._port = port

    def api_key(self) -> str:
        return ""

    async def needs(self) -> Sequence[Need]:
        program = Path(self._load_settings().engine_program)
        return [Need("vLLM", program.is_file(), str(program), "restore it")]

    def local_model(self, name: str) -> ServedModel | None:
        checked_name("model", "model", name)
        return ServedModel(
            name=name,
            folder=Path("/models") / name,
            architecture="Gemma4ForConditionalGeneration",
            size_on_disk=10_200_000_000,
            memory_needed={"weights": 10_200_000_000, "KV cache": 1_000_000_000},
        )

    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel:
        raise AssertionError("local_model knows every model")

    def launch(self, model: ServedModel) -> Launch:
        argv = [sys.executable, self._load_settings().engine_program]
        argv += ["--port", str(self._port()), "--served-model-name", model.name]
        passed = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return Launch(argv, passed, self._port(), model.name, model.name)

    def loading_step(self, log: str) -> str:
        return log.splitlines()[-1][:160] if log else "starting"

    def loading_fault(self, log: str) -> str:
        return ""

    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]:
        return {"version": "0.0-imaginary"}
