"""Says what serving a model folder would take, without loading its weights: `--explain`.

Knows no device: how fast memory is, is given or measured on this machine's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.engines.gemma4.config import Gemma4Config
from forge.engines.gemma4.memory_need import MemoryNeed, memory_need
from forge.engines.gemma4.memory_speed import read_speed
from forge.engines.gemma4.sizes import (
    DTYPE_BYTES,
    DecodeCost,
    bound_tokens_per_s,
    decode_cost,
    parameter_groups,
    prompt_flops,
)
from forge.engines.gemma4.weight_files import stored_tensors
from forge.engines.gemma4.weight_forms import forms_title

_EXPLAIN_FIRST = 38  # characters of a row's name


@dataclass(frozen=True)
class _Explained:
    """What is asked: the memory that it takes, and how fast memory and compute are."""

    need: MemoryNeed
    stored: int
    bandwidth: float
    measured: bool
    flop_rate: float | None
    prefixes: int

    @property
    def tokens(self) -> int:
        """Tokens of a conversation that steps and prompts are reckoned for: half the context."""
        return max(1, self.need.context // 2)

    def step(self, streams: int) -> DecodeCost:
        """One decode step of that many conversations."""
        need = self.need
        return decode_cost(
            need.config, need.element, streams, self.tokens, need.forms, kv_dtype=need.kv_dtype
        )

    def bound(self, streams: int) -> float:
        """Tokens a second at most."""
        return bound_tokens_per_s(self.step(streams), streams, self.bandwidth, self.flop_rate)


def explain_text(
    folder: Path,
    *,
    dtype: str = "f32",
    slots: int = 4,
    context: int = 4096,
    chunk: int = 256,
    kv_dtype: str = "auto",
    prefix_cache_gb: float = 0.0,
    quantization: str = "none",
    unpack: str = "step",
    bandwidth_gb_s: float | None = None,
    gflop_s: float | None = None,
) -> str:
    """A table for people, and as its last line the same figures as one JSON object.

    Reads the config and the headers of the weights' files. dtype "f32" or "bf16": of weights and,
    where kv_dtype is "auto" and not "int8", of caches; quantization and unpack as `weight_forms`
    takes them. prefix_cache_gb is of the host's memory, and not in the total. bandwidth_gb_s None:
    this machine's memory is measured, which takes about a second. gflop_s None: the bound is the
    memory's alone.
    Raises ModelRefused, and ValueError for a dtype that is not known or no slots or context.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    if min(slots, context, chunk) < 1:
        raise ValueError(f"slots {slots}, context {context}, chunk {chunk}: all are at least 1")
    need = memory_need(
        folder,
        dtype=dtype,
        slots=slots,
        context=context,
        chunk=min(chunk, context),
        kv_dtype=kv_dtype,
        quantization=quantization,
        unpack=unpack,
    )
    asked = _Explained(
        need=need,
        stored=sum(place.size for place in stored_tensors(folder, need.config).values()),
        bandwidth=read_speed() if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        measured=bandwidth_gb_s is None,
        flop_rate=None if gflop_s is None else gflop_s * 1e9,
        prefixes=round(prefix_cache_gb * 1e9),
    )
    lines = [*_explain_memory(asked), "", *_explain_steps(asked)]
    return "\n".join([*lines, json.dumps(_explain_figures(asked))])


def _explain_memory(asked: _Explained) -> list[str]:
    """What lies in memory, and why."""
    need = asked.need
    config = need.config
    elements = parameter_groups(config)
    weights, caches = need.weights, need.caches
    form = "" if need.kv_dtype == need.dtype else f", {need.kv_dtype}"
    rows = [
        (f"weights as {forms_title(need.forms, need.dtype)}", "parameters", "bytes"),
        *((f"  {name}", f"{elements[name]:,}", f"{n:,}") for name, n in weights.items()),
        ("  together", f"{sum(elements.values()):,}", f"{sum(weights.values()):,}"),
        (),
        (f"kept for {need.slots} slots of {need.context:,}", "", "bytes"),
        (f"  rings of {config.window:,} tokens{form}", "", f"{caches['sliding']:,}"),
        (f"  full layers' keys and values{form}", "", f"{caches['full']:,}"),
        ("  sampling's marks and counts", "", f"{need.marks:,}"),
        (),
        (f"estimated for chunks of {need.chunk}", "", "bytes"),
        *((f"  {name}", "", f"{n:,}") for name, n in need.temporaries.items() if n),
        ("all of it", "", f"{need.total:,}"),
        ("beside it prompts' beginnings, at most", "", f"{asked.prefixes:,}"),
    ]
    lies = f"{asked.stored / 1e9:.3f} GB of text weights lie in the folder"
    return [_explain_model(config), lies, "", *(_explain_row(*row) for row in rows)]


def _explain_steps(asked: _Explained) -> list[str]:
    """What a step and a prompt cost, and the bound."""
    streams = sorted({1, asked.need.slots})
    steps = [asked.step(count) for count in streams]
    per_token = prompt_flops(asked.need.config, asked.tokens) / asked.tokens
    source = "measured now with all cores" if asked.measured else "as given"
    compute = "not given"
    if asked.flop_rate is not None:
        compute = f"{asked.flop_rate / 1e9:,.0f} GFLOP/s as given"
    rows = [
        (f"one decode step at {asked.tokens:,} tokens", *(f"{n} at once" for n in streams)),
        ("  bytes of weights read", *(f"{step.weights:,.0f}" for step in steps)),
        ("  bytes of table rows read", *(f"{step.gathered:,}" for step in steps)),
        ("  bytes of keys and values read", *(f"{step.cache:,}" for step in steps)),
        ("  operations", *(f"{step.flops:,.0f}" for step in steps)),
        ("  at most tokens/s", *(f"{asked.bound(count):.2f}" for count in streams)),
        (),
        ("a prompt of as many", "per token"),
        ("  operations", f"{per_token:,.0f}"),
        (),
    ]
    speeds = f"memory: {asked.bandwidth / 1e9:.1f} GB/s, {source}; compute: {compute}"
    return [*(_explain_row(*row) for row in rows), speeds]


def _explain_figures(asked: _Explained) -> dict[str, Any]:
    """The same for programs: bytes, tokens, operations, all for the whole of what is asked."""
    need = asked.need
    steps = {count: asked.step(count) for count in sorted({1, need.slots})}
    return {
        "dtype": need.dtype,
        "weights": forms_title(need.forms, need.dtype),
        "kv_dtype": need.kv_dtype,
        "slots": need.slots,
        "context": need.context,
        "chunk": need.chunk,
        "stored_bytes": asked.stored,
        "weights_bytes": need.weights,
        "kv_bytes": need.caches,
        "marks_bytes": need.marks,
        "temporary_bytes": need.temporaries,
        "total_bytes": need.total,
        "prefix_cache_bytes": asked.prefixes,
        "tokens": asked.tokens,
        "steps": [
            {
                "streams": count,
                "weights_read": round(step.weights),
                "rows_read": step.gathered,
                "kv_read": step.cache,
                "flops": round(step.flops),
                "bound_tokens_per_s": round(asked.bound(count), 3),
            }
            for count, step in steps.items()
        ],
        "prompt_flops": round(prompt_flops(need.config, asked.tokens)),
        "bandwidth_bytes_per_s": round(asked.bandwidth),
        "bandwidth_measured": asked.measured,
        "flop_per_s": asked.flop_rate,
    }


def _explain_model(config: Gemma4Config) -> str:
    """One line on the architecture."""
    sliding = sum(layer.sliding for layer in config.layers)
    owners = sum(layer.owner for layer in config.layers)
    parts = [
        f"Gemma 4, {len(config.layers)} layers: {sliding} sliding over {config.window:,} tokens",
        f"{len(config.layers) - sliding} full, {owners} own keys and values",
        f"hidden {config.hidden:,}, vocabulary {config.vocabulary:,}",
    ]
    if config.per_layer:
        parts.append(f"per-layer embeddings of {config.per_layer}")
    if config.experts:
        parts.append(f"{config.experts_used} of {config.experts} experts a token")
    return "; ".join(parts)


def _explain_row(name: str = "", *columns: str) -> str:
    return (name.ljust(_EXPLAIN_FIRST) + "".join(f"{cell:>18}" for cell in columns)).rstrip()
