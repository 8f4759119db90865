"""The engines of `make bench-engine`: how each is started, or run, with the same model.

Knows neither what is measured nor how.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge.bench_engine_model import bench_prompts
from forge.bench_engine_rounds import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    STREAMS,
    Answer,
    BenchServer,
    all_cells,
    cell_of,
)
from forge.demo import free_port
from forge.launch import user_cache
from forge.parts.runtimes.vllm_install import default_vllm_folder

ROOT = Path(__file__).resolve().parent.parent
RIG = ROOT / "local-jax-cpu-2b"
CONTEXT = 1024  # tokens of each stream that an engine is started for


def this_engine(folder: Path, dtype: str, cache: Path, form: str = "") -> BenchServer:
    """The rig's jax_server.py, as it would be started by hand.

    form: "int8" makes 8-bit integers of the matrices; "w4a16" is a folder whose are packed already.
    """
    port = free_port()
    argv = [sys.executable, str(RIG / "jax_server.py"), "--model", str(folder)]
    argv += ["--served-model-name", "bench", "--port", str(port), "--dtype", dtype]
    argv += ["--slots", str(max(STREAMS)), "--max-model-len", str(CONTEXT)]
    argv += ["--prefix-cache-gb", "0"]  # every prompt is read whole, by all engines
    argv += ["--compile-cache", str(cache)]
    argv += ["--quantization", form] if form == "int8" else []
    version = f"JAX {importlib.metadata.version('jax')}"
    return BenchServer(
        f"this engine, {form}" if form else "this engine", version, argv, port, "bench"
    )


def vllm_server(folder: Path, dtype: str, python: Path, backend: str) -> BenchServer:
    """vLLM of the environment that `python` belongs to, with all cores, compiled."""
    port = free_port()
    argv = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    argv += ["--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", {"f32": "float32", "bf16": "bfloat16"}[dtype]]
    argv += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(max(STREAMS))]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": ""}
    if backend == "cpu":
        environment |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
    asked = "import importlib.metadata as m; print(m.version('vllm'))"
    version = printed([str(python), "-c", asked], environment).strip()
    return BenchServer("vLLM", version, argv, port, "bench", environment)


def llama_server(gguf: Path, program: Path, backend: str) -> BenchServer:
    """llama-server with a slot for each stream, each with the context that the others have."""
    port, slots = free_port(), max(STREAMS)
    argv = [str(program), "--model", str(gguf), "--alias", "bench"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(usable_cores())]
    argv += ["--ctx-size", str(CONTEXT * slots), "--parallel", str(slots)]
    argv += ["-ngl", "0" if backend == "cpu" else "99", "--offline", "--no-webui"]
    told = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.*)", told.stdout + told.stderr)
    return BenchServer("llama.cpp", found[1] if found else "", argv, port, "bench")


def convert_to_gguf(folder: Path, program: Path, dtype: str, target: Path) -> Path:
    """`folder` as GGUF, by the converter of the source beside which `program` was built.

    Raises RuntimeError where there is none, or where it fails.
    """
    found = sorted(program.parent.parent.glob("source-*/convert_hf_to_gguf.py"))
    if not found:
        raise RuntimeError(f"no source with convert_hf_to_gguf.py beside {program.parent}")
    argv = [sys.executable, str(found[-1]), str(folder), "--outfile", str(target)]
    argv += ["--outtype", dtype]
    paths = [str(found[-1].parent / "gguf-py"), os.environ.get("PYTHONPATH", "")]
    printed(argv, {"PYTHONPATH": os.pathsep.join(path for path in paths if path)})
    return target


def found_llama_server() -> Path | None:
    """The newest llama-server that a rig has built into the user's cache."""
    built = (user_cache() / "gemma4-rigs" / "llama").glob("*/llama-server")
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def found_vllm_python() -> Path | None:
    """The Python of the environment into which the vLLM rig installs."""
    python = default_vllm_folder() / "bin" / "python"
    return python if python.exists() else None


def transformers_row(folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    """transformers in this process, on an accelerator if torch sees one: its best setting by cell.

    The streams are one batch of prompts of one length, which is what `generate` is best at: no
    padding, nobody waits. Tried: a growing and a static cache.
    """
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    model = model.eval().to(device)

    def one_round(cache: str | None, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
        times: list[float] = []

        def heard(ids: Any, scores: Any, **_: Any) -> Any:
            """Asked after every token whether to stop, and never says so."""
            del scores
            times.append(time.perf_counter() - begun)
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=OUTPUT_TOKENS,
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            cache_implementation=cache,
            stopping_criteria=transformers.StoppingCriteriaList([heard]),
        )
        return cell_of([Answer(times[0], times[-1], len(times))] * len(prompts))

    prompts = bench_prompts(max(STREAMS), PROMPT_TOKENS)
    best: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for cache in (None, "static"):
            cells = all_cells(partial(one_round, cache), prompts, repeats)
            for streams, cell in cells.items():
                so_far = best.get(streams)
                if so_far is None or cell["output_tps"] > so_far["output_tps"]:
                    best[streams] = {**cell, "cache": cache or "dynamic"}
    return {"engine": "transformers", "version": transformers.__version__, "cells": best}


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def printed(argv: list[str], environment: Mapping[str, str] | None = None) -> str:
    """What a program prints. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(
        argv, env={**os.environ, **(environment or {})}, capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"{Path(argv[0]).name} {' '.join(argv[1:3])}: {' '.join(last)}")
    return done.stdout
