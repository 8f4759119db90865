"""What vLLM's own log says: how far a start has come, what it settled on, which weights it lacks.

Reads text only; the sentences are those of vLLM 0.32.0. Knows neither files nor processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# (APIServer pid=1) INFO 11-30 01:02:03 [model.py:1] words
_VLLM_LOG_PREFIX = re.compile(
    r"^(?:\(\S+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[\S+\] ?)?"
)
# Each as a start of 2026-11-30 wrote it.
_VLLM_RESOLVED: Mapping[str, re.Pattern[str]] = {
    "architecture": re.compile(r"Resolved architecture: (\w+)"),
    "max_model_len": re.compile(r"Using max model len (\d+)"),
    "dtype": re.compile(r"\bdtype=torch\.(\w+)"),
    "kv_cache_gib": re.compile(r"set \(([\d.]+)/[\d.]+\) GiB for KV cache"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "max_concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x"),
    "cores": re.compile(r"local_rank=0, core ids=\[([\d, ]+)\]"),
    "engine_start_s": re.compile(r"init engine .* took ([\d.]+) s"),
}
_VLLM_ABSENT_WEIGHTS = re.compile(r"weights were not initialized from checkpoint: (.{1,300})")


def vllm_loading_step(log: str) -> str:
    """The last line of `log` (whose first is a heading) without the prefix that every line has."""
    lines = [_VLLM_LOG_PREFIX.sub("", line.strip()).strip() for line in log.splitlines()[1:]]
    told = [line for line in lines if line]
    return told[-1][:160] if told else "importing torch"


def vllm_absent_weights(log: str) -> str:
    """The tensors that vLLM looked for in the checkpoint and did not find; empty when none."""
    absent = _VLLM_ABSENT_WEIGHTS.search(log)
    return "" if absent is None else f"it lacks {absent.group(1)}"


def resolved_engine_values(log: str) -> dict[str, str]:
    """What vLLM settled on, from the log of its start; what the log does not say is left out.

    Keys: architecture, max_model_len (tokens), dtype, kv_cache_gib, kv_cache_tokens (of all
    conversations together), max_concurrency (conversations of full length at once), cores (their
    numbers), engine_start_s. The last start in `log` counts.
    """
    found = {}
    for name, pattern in _VLLM_RESOLVED.items():
        values = pattern.findall(log)
        if values:
            found[name] = values[-1] if name == "cores" else values[-1].replace(",", "")
    return found
