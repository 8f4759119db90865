"""`vllm bench serve` of vLLM's own environment: its command line for one cell, and its result.

A second opinion on figures that another load generator measured. Starts nothing by itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import read_json

_BENCH_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "XDG_CACHE_HOME")
# Of its result, each under the name that the file has: release 0.32.0, 2026-11-29.
_BENCH_FIGURES = {
    "duration_s": "duration",
    "output_tokens_per_s": "output_throughput",
    "median_ttft_ms": "median_ttft_ms",
    "median_tpot_ms": "median_tpot_ms",
    "p99_ttft_ms": "p99_ttft_ms",
    "p99_tpot_ms": "p99_tpot_ms",
}


@dataclass(frozen=True)
class VllmBenchCell:
    """One closed-loop load: `streams` at once, `requests` in all, lengths in tokens."""

    streams: int
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int


def vllm_bench_command(
    python: Path, address: str, served_name: str, folder: Path, cell: VllmBenchCell, result: Path
) -> list[str]:
    """The argument list that measures `cell` on the server at `address` and writes `result`.

    Plain completions and not chat: there its clock for the first token stops at the role, which is
    none. `folder` is the model's, for its tokenizer; prompts are random tokens of it.
    """
    return [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--base-url", address),
        *("--model", served_name, "--tokenizer", str(folder), "--dataset-name", "random"),
        *("--random-input-len", str(cell.input_tokens)),
        *("--random-output-len", str(cell.output_tokens), "--ignore-eos"),
        *("--num-prompts", str(cell.requests), "--max-concurrency", str(cell.streams)),
        *("--num-warmups", str(cell.streams), "--temperature", "0", "--seed", str(cell.seed)),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
        "--disable-tqdm",
    ]


def vllm_bench_environment(key: str) -> dict[str, str]:
    """Its environment: offline, without a credential but the served model's own."""
    passed = {name: os.environ[name] for name in _BENCH_PASSED if name in os.environ}
    return passed | {
        "OPENAI_API_KEY": key,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONNOUSERSITE": "1",
    }


def vllm_bench_figures(result: Path) -> dict[str, Any]:
    """completed, failed (requests), duration_s, output_tokens_per_s, and times in milliseconds.

    A p99 of fewer than 100 requests is left out. Raises RigError PARTIAL where the file is missing
    or tells of no request that was answered.
    """
    data = read_json(result) or {}
    completed, failed = data.get("completed"), data.get("failed", 0)
    if not isinstance(completed, int) or completed < 1:
        raise RigError("PARTIAL", "vllm bench serve has no answered request to tell of")
    found: dict[str, Any] = {"completed": completed, "failed": failed}
    for name, key in _BENCH_FIGURES.items():
        value = data.get(key)
        enough = completed >= 100 or not name.startswith("p99")
        if isinstance(value, int | float) and not isinstance(value, bool) and enough:
            found[name] = round(float(value), 3)
    return found
