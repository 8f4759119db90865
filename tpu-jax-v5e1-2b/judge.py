# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic>=2.14,<3",
# ]
# ///
# Built from forge/programs/judge.py by `python3 -m forge.build`: edit it there.

"""Says whether the figures of a benchmark report can be true of the chip that they are told of.

    python3 judge.py REPORT.json

The report gate: arithmetic over the house's tables of models and chips, from below only, so that no
honest figure is refused. Offline; of all packages it needs pydantic alone. Exit status: 0
plausible, 1 a cell cannot be true, 2 wrong usage.
"""

# Contents, by line:
#    49 ground / redact: Everything that leaves the rig passes here: secrets out, control …
#   163 ground / schema_faults: A validation error as sentences for people and for results, …
#   177 knowledge / figures: A number that carries its unit, source and date, or says that nobody …
#   230 knowledge / geometry: The shape of a decoder: layers, heads, widths.
#   331 knowledge / cache_bytes: How many bytes the keys and values of a model's sequences take.
#   389 knowledge / hardware: The accelerators that rigs run on: memory, bandwidth, compute, …
#   727 knowledge / memory: How many bytes a model's weights take, and how many of them one decode …
#   934 knowledge / models: The Gemma 4 family: shapes, towers, and which checkpoints exist under …
#  1308 knowledge / report_schema: What a benchmark report is: closed records, so that a typing …
#  1737 knowledge / judge_answer: What is asked of the report gate and what it answers: the forms …
#  1793 knowledge / report_checks: Whether a report's figures can be true: needed FLOP/s and …
#  2089 programs / judge: Says whether the figures of a benchmark report can be true of the chip …

from __future__ import annotations

import argparse
import dataclasses
import errno
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# ── ground / redact ───────────────────────────────────────────────────────────────────────────────
# Everything that leaves the rig passes here: secrets out, control characters out, bounded.
#
# Knows the shapes of secrets and the values in this process's environment; knows no tool.

TEXT_LIMIT = 32_000  # characters of one result; a client's own limit is about 25,000 tokens

# Shapes of credentials that may stand in logs. Sources: the providers' own token formats. One
# expression each: with its fixed beginning it is searched for ten times faster than as a branch.
_SECRET_SHAPES = (
    re.compile(r"hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"),  # not hf_transfer or hf_overrides
    re.compile(r"ya29\.[A-Za-z0-9_.\-]{8,}"),
    re.compile(r"AKIA[A-Z0-9]{12,}"),
    re.compile(r"ASIA[A-Z0-9]{12,}"),
    re.compile(r"dop_v1_[a-f0-9]{16,}"),
    re.compile(r"sk-(?<![A-Za-z0-9]sk-)[A-Za-z0-9_\-]{16,}"),
    re.compile(r"AIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"eyJ[A-Za-z0-9_\-.]{20,}"),  # a JSON web token
    re.compile(r"bearer\s+[A-Za-z0-9._~+/\-]{8,}=*", re.I),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
)
_ADDRESS_LOGIN = re.compile(r"://[^\s/@:]+:[^\s/@]+@")
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
# C0 and C1 but newline and tab, DEL, bidirectional and zero-width marks, lone surrogates, tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of environment variables whose names speak of secrets, longest first.

    Values under 8 characters are left out: they would black out ordinary words.
    """
    source = os.environ if environment is None else environment
    found = {v.strip() for k, v in source.items() if _SECRET_NAMES.search(k)}
    return tuple(sorted((v for v in found if len(v) >= 8), key=len, reverse=True))


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` with known secret values and credential shapes replaced by ``[redacted]``.

    `values` are those of `secret_values()`, where the caller has many texts and reads them once.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, "[redacted]")
    for shape in _SECRET_SHAPES:
        text = shape.sub("[redacted]", text)
    return _ADDRESS_LOGIN.sub("://[redacted]@", text)


def printable(text: str) -> str:
    """`text` without terminal sequences, control and bidirectional characters and surrogates."""
    return _UNPRINTABLE.sub("", _ANSI_SEQUENCE.sub("", text.replace("\r\n", "\n")))


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` in at most about `limit` characters: a third from its head, the rest from its tail.

    What was cut is named, because the end of a log is where the error stands and its beginning is
    where the version stands.
    """
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"


def clean(text: str, limit: int = TEXT_LIMIT, values: Sequence[str] | None = None) -> str:
    """Redacted, printable and clipped: the form in which any text goes out."""
    # Clipped generously first, so that 30 MB of log never go through the expressions.
    return clip(redact(printable(clip(text, 8 * limit)), values), limit)


def clean_value(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """`clean` over every string (keys too) of a JSON value; other scalars pass through.

    Bounded in every direction: a list or mapping keeps limit/16 items, a quarter of that with each
    level down, but 10 at least; and what is nested more than 20 deep becomes a remark.
    """
    return _clean_value(value, limit, 0, secret_values())


def _clean_value(value: Any, limit: int, depth: int, values: Sequence[str]) -> Any:
    if isinstance(value, str):
        return clean(value, limit, values)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth > 20:
        return "[… nested too deep …]"
    room = max(10, limit >> (4 + 2 * depth))
    if isinstance(value, Mapping):
        pairs = _fewer(list(value.items()), room, lambda left: ("…", left))
        return {
            clean(str(k), 200, values): _clean_value(v, limit, depth + 1, values) for k, v in pairs
        }
    return [_clean_value(v, limit, depth + 1, values) for v in _fewer(list(value), room, str)]


def _fewer(items: list[Any], room: int, remark: Callable[[str], Any]) -> list[Any]:
    """At most `room` of `items`, a third from the head; among texts a remark tells the gap."""
    if len(items) <= room:
        return items
    head, tail = items[: room // 3], items[room // 3 - room :]
    texts = all(isinstance(i[-1] if isinstance(i, tuple) else i, str) for i in head)
    left_out = [remark(f"[… {len(items) - room} items left out …]")] if texts else []
    return [*head, *left_out, *tail]


# ── ground / schema_faults ────────────────────────────────────────────────────────────────────────
# A validation error as sentences for people and for results, without the input that caused it.
#
# Knows no schema.

_FAULTS_TOLD = 10


def schema_faults(error: ValidationError) -> list[str]:
    """`error` as one sentence a fault, each with the place in the record; ten at most."""
    items = error.errors(include_input=False, include_url=False)[:_FAULTS_TOLD]
    return [f"{'.'.join(str(p) for p in item['loc']) or 'report'}: {item['msg']}" for item in items]


# ── knowledge / figures ───────────────────────────────────────────────────────────────────────────
# A number that carries its unit, source and date, or says that nobody has measured it.
#
# Knows nothing about what the numbers are about.

FigureKind = Literal["measured", "imported", "derived"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it comes from.

    value: in `unit`; None means unmeasured: nobody that we can cite has given it.
    source: a public document, a program with its version, or the sum that gave the number.
    date: of the source (ISO, or a year or month); the day it was read where it bears none.
    kind: measured by this project, imported from others, or derived by arithmetic.
    note: what a reader must know before using it, for example a figure that disagrees.

    Raises ValueError for a value without source or date: an unsourced number is not a figure.
    """

    value: int | float | None
    unit: str
    source: str = ""
    date: str = ""
    kind: FigureKind = "imported"
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is not None and not (self.source and self.date):
            raise ValueError(f"a figure of {self.value} {self.unit} needs a source and a date")

    def known(self, what: str) -> int | float:
        """The value; ValueError that names `what` when it is unmeasured."""
        if self.value is None:
            raise ValueError(f"{what} is unmeasured")
        return self.value


@dataclass(frozen=True, slots=True)
class SourcedFact:
    """One sentence about something that is no number, with its source and date."""

    text: str
    source: str
    date: str


def unmeasured_figure(unit: str, note: str = "") -> Figure:
    """A figure that nobody has given yet; `note` says what stands in the way."""
    return Figure(None, unit, note=note)


# ── knowledge / geometry ──────────────────────────────────────────────────────────────────────────
# The shape of a decoder: layers, heads, widths.
#
# Knows nothing about bytes, chips, which checkpoints exist or how their files spell it.

SLIDING_LAYER = "sliding_attention"
FULL_LAYER = "full_attention"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The text half of a decoder-only model: widths are in elements, counts are per layer.

    layer_types: one of SLIDING_LAYER, FULL_LAYER per layer, in order.
    kv_heads, head_dim: of sliding layers; global_kv_heads, global_head_dim: of full layers.
    window: tokens a sliding layer sees, the newest included; None without sliding layers.
    kv_shared_layers: that many last layers own no keys and values and read an earlier layer's.
    k_eq_v: full layers have no v_proj; their values come from k_proj (still cached apart).
    ple_dim: width of per-layer embeddings (0: none); ple_vocab: rows of their table.
    double_wide_mlp: the sharing layers have twice the intermediate width.
    experts, top_k, expert_width: a mixture beside the dense MLP (0: none).
    tied: the output head is the embedding.
    block_norms: RMSNorms of hidden width per layer, without those of PLE and experts.
    head_norms: q and k are normed by a weight of head width.
    qkv_bias, out_bias, mlp_bias: those projections add a bias.

    Source: transformers 5.24, modeling_gemma4, _llama, _mistral, _qwen2, _qwen3, _gemma3.
    Raises ValueError for a shape that no such model can have.
    """

    layer_types: tuple[str, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    global_kv_heads: int
    head_dim: int
    global_head_dim: int
    vocab: int
    window: int | None = None
    kv_shared_layers: int = 0
    k_eq_v: bool = False
    ple_dim: int = 0
    ple_vocab: int = 0
    double_wide_mlp: bool = False
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    tied: bool = True
    block_norms: int = 4
    head_norms: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for kind in self.layer_types:
            if kind not in (SLIDING_LAYER, FULL_LAYER):
                raise ValueError(f"layer type {kind!r} is not understood")
        if SLIDING_LAYER in self.layer_types and not self.window:
            raise ValueError("sliding layers without a window are not understood")
        if not 0 <= self.kv_shared_layers < len(self.layer_types):
            raise ValueError(
                f"{self.kv_shared_layers} of {len(self.layer_types)} layers sharing keys and"
                " values is not understood: some layer must own them"
            )
        if set(self.layer_types[self.owners :]) - set(self.layer_types[: self.owners]):
            raise ValueError("a sharing layer has no owner of its own type before it")
        for kv_heads in (self.kv_heads, self.global_kv_heads):
            if kv_heads < 1 or self.heads % kv_heads:
                raise ValueError(f"{self.heads} heads over {kv_heads} kv heads is not understood")

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.layer_types)

    @property
    def owners(self) -> int:
        """How many layers own keys and values: the first ones, all but the sharing."""
        return len(self.layer_types) - self.kv_shared_layers

    def is_full(self, layer: int) -> bool:
        """Whether the layer attends to the whole context."""
        return self.layer_types[layer] == FULL_LAYER

    def head_width(self, layer: int) -> int:
        """Elements per head in that layer."""
        return self.global_head_dim if self.is_full(layer) else self.head_dim

    def kv_width(self, layer: int) -> int:
        """Elements of one token's keys in that layer (its values have as many)."""
        heads = self.global_kv_heads if self.is_full(layer) else self.kv_heads
        return heads * self.head_width(layer)

    def mlp_width(self, layer: int) -> int:
        """Intermediate width of that layer's dense MLP."""
        wide = self.double_wide_mlp and layer >= self.owners
        return 2 * self.intermediate if wide else self.intermediate


# ── knowledge / cache_bytes ───────────────────────────────────────────────────────────────────────
# How many bytes the keys and values of a model's sequences take.
#
# Knows shapes and layouts only: no weights, no chip, no engine's pages.

# "uniform": every owning layer keeps the whole context (vLLM on TPU, transformers' plain cache).
# "ring": sliding layers keep only their window (the JAX engine, llama.cpp's SWA cache).
KvLayout = Literal["uniform", "ring"]


def kv_bytes_per_token(geometry: Geometry, dtype_bytes: float, layout: KvLayout) -> float:
    """Bytes by which one more token grows one sequence's cache, once past the window.

    2 * kv heads * head width * dtype_bytes, over the owning layers; sharing layers own nothing.
    Layers whose values come from their keys still cache both: keys are rotated, values normed.
    "ring" counts the full-attention owners only; below the window a ring grows like "uniform".
    Source: transformers 5.24 modeling_gemma4; E2B 18 KiB, agreeing with vLLM's 8,713 blocks of
    128 tokens on a v6e (dev.to article, 2026-07-25, which itself says 15 KiB).
    Raises ValueError for an unknown layout.
    """
    if layout not in ("uniform", "ring"):
        raise ValueError(f"KV layout {layout!r} is not known; known: uniform, ring")
    owners = range(geometry.owners)
    return sum(
        2 * geometry.kv_width(layer) * dtype_bytes
        for layer in owners
        if layout == "uniform" or geometry.is_full(layer)
    )


def kv_ring_bytes(geometry: Geometry, dtype_bytes: float) -> int:
    """Bytes that one sequence's full sliding windows take, the fixed part of the ring layout."""
    sliding = sum(
        2 * geometry.kv_width(layer)
        for layer in range(geometry.owners)
        if not geometry.is_full(layer)
    )
    return math.ceil(sliding * dtype_bytes * (geometry.window or 0))


def kv_bytes(
    geometry: Geometry, context: int, slots: int, dtype_bytes: float, layout: KvLayout
) -> int:
    """Bytes of cache for `slots` sequences of `context` tokens each.

    uniform: slots * context * bytes per token.
    ring: slots * (min(context, window) * sliding owners + context * full owners).
    Raises ValueError for a negative context, no slots or an unknown layout.
    """
    if context < 0 or slots < 1:
        raise ValueError(f"context {context} and slots {slots} must be >= 0 and >= 1")
    grown = context * kv_bytes_per_token(geometry, dtype_bytes, layout)
    if layout == "ring" and geometry.window:
        filled = min(context, geometry.window) / geometry.window
        grown += filled * kv_ring_bytes(geometry, dtype_bytes)
    return math.ceil(slots * grown)


# ── knowledge / hardware ──────────────────────────────────────────────────────────────────────────
# The accelerators that rigs run on: memory, bandwidth, compute, native types.
#
# Knows no prices, no models and no cloud; figures are vendors' or others', each with its source.

_SPEC_V5E = "https://docs.cloud.google.com/tpu/docs/v5e"
_SPEC_V5P = "https://docs.cloud.google.com/tpu/docs/v5p-training"
_SPEC_V6E = "https://docs.cloud.google.com/tpu/docs/v6e"
_SPEC_INF2 = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/"
    "inferentia2.html"
)
_SPEC_L4 = "https://aiwiki.ai/wiki/nvidia_l4"
_SPEC_T4 = "https://sysrqmts.com/en/gpus/nvidia/tesla/t4"
_SPEC_A10G = "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
_SPEC_H100 = "https://glennklockwood.com/garden/processors/h100"
_SPEC_H200 = "https://lzwjava.github.io/nvidia-h200-gpu-specs-en"
_SPEC_1650TI = (
    "https://sysrqmts.com/zh/gpus/compare/nvidia-geforce-gtx-1650-ti-mobile-vs-nvidia-quadro-"
    "t1000-mobile-gddr6"
)
_GEMMA4_DEV = "xbill9/gemma4-dev"
_V6E_ARTICLE = "dev.to, Self-Hosted Gemma 4 on TPU v6e"
_VENDOR_RECALLED = "vendor data sheet, as recalled"
_UNCHECKED = "not checked against a live page"
_READ = "2026-11-29"  # the day a page without a date was read


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device as a program sees it: a chip, a card, or for Neuron a core.

    visible_memory: GiB that a program can allocate, not the label on the box.
    bandwidth: GB/s (1e9) to that memory, peak; effective only where its note says so.
    compute: dense bf16 or fp16 TFLOP/s, peak, without sparsity.
    native_dtypes: types with arithmetic of their own; others are storage and get converted.
    """

    chip: str
    name: str
    visible_memory: Figure
    bandwidth: Figure
    compute: Figure
    native_dtypes: tuple[str, ...]
    dtypes_source: str
    dtypes_date: str
    facts: tuple[SourcedFact, ...] = ()


@dataclass(frozen=True, slots=True)
class HardwareSlot:
    """What the hardware slot of a rig's name stands for: `devices` devices of `chip`.

    For EC2 families the count is that of the smallest size; tpu.env names the size.
    """

    slot: str
    chip: str
    devices: int
    meaning: str


ACCELERATORS: dict[str, Accelerator] = {
    "v5e": Accelerator(
        chip="v5e",
        name="Google TPU v5e",
        visible_memory=Figure(
            15.75, "GiB", "libtpu 0.0.52, its out-of-memory text when compiling for v5e:1x1", _READ
        ),
        bandwidth=Figure(
            819,
            "GB/s",
            _SPEC_V5E,
            _READ,
            note="the newer text of the page says 800 GiB/s, which would be 859 GB/s and is"
            " probably a slip of unit; 859 predicts one v5e run slightly better",
        ),
        compute=Figure(197, "TFLOP/s", _SPEC_V5E, _READ, note="int8: 393 TOP/s"),
        native_dtypes=("bf16", "int8"),
        dtypes_source=_GEMMA4_DEV,
        dtypes_date="2026-08-20",
        facts=(
            SourcedFact(
                "fp8 and 4-bit weights are storage only; int8 is the only type that computes"
                " faster than bf16",
                _GEMMA4_DEV,
                "2026-08-20",
            ),
            SourcedFact(
                "Compute Engine refuses its machine types (ct5lp-hightpu-1t); only the Cloud TPU"
                " API creates it",
                _GEMMA4_DEV,
                "2026-08-20",
            ),
        ),
    ),
    "v5p": Accelerator(
        chip="v5p",
        name="Google TPU v5p",
        visible_memory=Figure(
            95, "GiB", _SPEC_V5P, _READ, note="the page's capacity; not read back on a chip"
        ),
        bandwidth=Figure(2765, "GB/s", _SPEC_V5P, _READ),
        compute=Figure(459, "TFLOP/s", _SPEC_V5P, _READ),
        native_dtypes=("bf16", "int8"),
        dtypes_source=_GEMMA4_DEV,
        dtypes_date="2026-08-20",
        facts=(
            SourcedFact(
                "names in the Cloud TPU API count cores: v5p-8 is four chips",
                _GEMMA4_DEV,
                "2026-08-20",
            ),
        ),
    ),
    "v6e": Accelerator(
        chip="v6e",
        name="Google TPU v6e (Trillium)",
        visible_memory=Figure(31.24, "GiB", _V6E_ARTICLE, "2026-07-25"),
        bandwidth=Figure(
            1638,
            "GB/s",
            "libtpu 0.0.52, cost analysis of one matmul compiled for v6e:1x1",
            _READ,
            note=f"{_SPEC_V6E} says 1640 in one version and 1600 in another; 1412 to 1417 were"
            f" measured ({_GEMMA4_DEV}, 2026-08-20)",
        ),
        compute=Figure(918, "TFLOP/s", _SPEC_V6E, _READ, note="int8: 1836 TOP/s"),
        native_dtypes=("bf16", "int8"),
        dtypes_source=_GEMMA4_DEV,
        dtypes_date="2026-08-20",
        facts=(
            SourcedFact(
                "fp8 and 4-bit weights are storage only; int8 is the only type that computes"
                " faster than bf16",
                _GEMMA4_DEV,
                "2026-08-20",
            ),
        ),
    ),
    "l4": Accelerator(
        chip="l4",
        name="NVIDIA L4 (Ada, SM 8.9)",
        visible_memory=Figure(
            22.03, "GiB", "dev.to, 12B Gemma 4 on Cloud Run: CUDA's out-of-memory text", "2026"
        ),
        bandwidth=Figure(300, "GB/s", _SPEC_L4, "2026-06-03"),
        compute=Figure(
            121,
            "TFLOP/s",
            _SPEC_L4,
            "2026-06-03",
            kind="derived",
            note="half of the 242 stated with sparsity; lists that multiply clocks say 125",
        ),
        native_dtypes=("f32", "fp16", "bf16", "fp8", "int8"),
        dtypes_source="https://hmc-tech.com/gpu/nvidia-l4-vs-nvidia-grid-m40",
        dtypes_date=_READ,
    ),
    "t4": Accelerator(
        chip="t4",
        name="NVIDIA T4 (Turing, SM 7.5)",
        visible_memory=Figure(
            14.56,
            "GiB",
            _GEMMA4_DEV,
            "2026-08-28",
            note="read on a T4G; the label on both cards says 15,360 MiB",
        ),
        bandwidth=Figure(320, "GB/s", _SPEC_T4, _READ),
        compute=Figure(65, "TFLOP/s", _SPEC_T4, _READ, note="fp16"),
        native_dtypes=("f32", "fp16", "int8"),
        dtypes_source="https://hmc-tech.com/gpu/nvidia-a16-vs-nvidia-t4",
        dtypes_date=_READ,
        facts=(
            SourcedFact(
                "no bf16 and no fp8 arithmetic; 64 KiB of shared memory at most per block, which"
                " Gemma 4's 512-wide heads exceed in vLLM's default attention tile (98,304 B)",
                "vLLM 0.32 attention kernel compiled for sm_75 with Triton 3.9",
                _READ,
            ),
        ),
    ),
    "t4g": Accelerator(
        chip="t4g",
        name="NVIDIA T4G (Turing, SM 7.5, Graviton2 host)",
        visible_memory=Figure(
            14.56, "GiB", _GEMMA4_DEV, "2026-08-28", note="its README says 14.07 GB in one place"
        ),
        bandwidth=Figure(
            320, "GB/s", _GEMMA4_DEV, "2026-08-20", note="peak; 277 read in a measurement there"
        ),
        compute=Figure(
            65, "TFLOP/s", _SPEC_T4, _READ, kind="derived", note="taken from the T4: same chip"
        ),
        native_dtypes=("f32", "fp16", "int8"),
        dtypes_source=_GEMMA4_DEV,
        dtypes_date="2026-08-20",
    ),
    "mi300x": Accelerator(
        chip="mi300x",
        name="AMD Instinct MI300X (CDNA 3, gfx942)",
        visible_memory=Figure(191.69, "GiB", _GEMMA4_DEV, "2026-09-16"),
        bandwidth=Figure(
            5300, "GB/s", "https://www.emergentmind.com/topics/amd-instinct-mi300x-gpus", _READ
        ),
        compute=Figure(
            1307, "TFLOP/s", "AMD data sheet, as recalled", _READ, note=f"fp16; {_UNCHECKED}"
        ),
        native_dtypes=("f32", "fp16", "bf16", "fp8", "int8"),
        dtypes_source="https://gpu.blog/gpus/instinct-mi300x-mi300x",
        dtypes_date="2025-01-01",
    ),
    "1650ti": Accelerator(
        chip="1650ti",
        name="NVIDIA GTX 1650 Ti mobile (TU117, SM 7.5, no tensor cores)",
        visible_memory=Figure(
            4.0, "GiB", _GEMMA4_DEV, "2026-09-03", note="4096 MiB reported; a display takes some"
        ),
        bandwidth=Figure(192, "GB/s", _SPEC_1650TI, _READ),
        compute=Figure(
            6.083,
            "TFLOP/s",
            _SPEC_1650TI,
            _READ,
            note="fp16 at the listed boost clock; other notes say about 5.5",
        ),
        native_dtypes=("f32", "fp16"),
        dtypes_source=_SPEC_1650TI,
        dtypes_date=_READ,
    ),
    "inf2": Accelerator(
        chip="inf2",
        name="AWS Inferentia2, one NeuronCore-v2 (a chip has two)",
        visible_memory=Figure(
            16, "GiB", _SPEC_INF2, _READ, kind="derived", note="half of the chip's 32"
        ),
        bandwidth=Figure(
            410,
            "GB/s",
            _SPEC_INF2,
            _READ,
            kind="derived",
            note="half of the chip's 820 GB/s; newer versions of the page say 820 GiB/s",
        ),
        compute=Figure(
            95, "TFLOP/s", _SPEC_INF2, _READ, kind="derived", note="half of the chip's 190"
        ),
        native_dtypes=("f32", "bf16", "fp16", "int8"),
        dtypes_source=_SPEC_INF2,
        dtypes_date=_READ,
        facts=(
            SourcedFact(
                "a gather from a table above 4 to 5 GB silently returns zeros: embeddings and the"
                " PLE table stay on the host",
                _GEMMA4_DEV,
                "2026-08-20",
            ),
        ),
    ),
    "a10g": Accelerator(
        chip="a10g",
        name="NVIDIA A10G (Ampere, SM 8.6)",
        visible_memory=Figure(22.06, "GiB", _VENDOR_RECALLED, _READ, note=_UNCHECKED),
        bandwidth=Figure(600, "GB/s", _SPEC_A10G, _READ),
        compute=Figure(70, "TFLOP/s", _VENDOR_RECALLED, _READ, note=_UNCHECKED),
        native_dtypes=("f32", "fp16", "bf16", "int8"),
        dtypes_source=_VENDOR_RECALLED,
        dtypes_date=_READ,
    ),
    "h100": Accelerator(
        chip="h100",
        name="NVIDIA H100 SXM (Hopper, SM 9.0)",
        visible_memory=Figure(79.1, "GiB", _VENDOR_RECALLED, _READ, note=_UNCHECKED),
        bandwidth=Figure(3350, "GB/s", _SPEC_H100, _READ),
        compute=Figure(989, "TFLOP/s", _SPEC_H100, _READ),
        native_dtypes=("f32", "fp16", "bf16", "fp8", "int8"),
        dtypes_source=_SPEC_H100,
        dtypes_date=_READ,
    ),
    "h200": Accelerator(
        chip="h200",
        name="NVIDIA H200 SXM (Hopper, SM 9.0)",
        visible_memory=Figure(139.8, "GiB", _VENDOR_RECALLED, _READ, note=_UNCHECKED),
        bandwidth=Figure(4800, "GB/s", _SPEC_H200, _READ),
        compute=Figure(989, "TFLOP/s", _SPEC_H100, _READ, note="the same die as the H100"),
        native_dtypes=("f32", "fp16", "bf16", "fp8", "int8"),
        dtypes_source=_SPEC_H100,
        dtypes_date=_READ,
    ),
    "cpu": Accelerator(
        chip="cpu",
        name="the computer's own processor",
        visible_memory=unmeasured_figure("GiB", "read it from the machine: free memory"),
        bandwidth=Figure(
            22.1,
            "GB/s",
            f"{_GEMMA4_DEV}, local-pytorch-cpu-2b: 4.853 tok/s of 4.56 GB a step",
            "2026-09-04",
            kind="derived",
            note="effective, on one laptop: not a peak, and not another computer's",
        ),
        compute=unmeasured_figure("TFLOP/s"),
        native_dtypes=("f32",),
        dtypes_source="x86-64 and ARMv8 base instruction sets; bf16 and int8 are extensions",
        dtypes_date=_READ,
    ),
}

HARDWARE_SLOTS: dict[str, HardwareSlot] = {
    slot.slot: slot
    for slot in (
        HardwareSlot("v5e1", "v5e", 1, "one TPU v5e chip"),
        HardwareSlot("v6e1", "v6e", 1, "one TPU v6e chip"),
        HardwareSlot("v6e4", "v6e", 4, "four TPU v6e chips of one host"),
        HardwareSlot("v6e8", "v6e", 8, "eight TPU v6e chips of one host"),
        HardwareSlot("v5p1", "v5p", 1, "one TPU v5p chip"),
        HardwareSlot("inf2", "inf2", 2, "EC2 inf2: Inferentia2, two cores a chip"),
        HardwareSlot("g4dn", "t4", 1, "EC2 g4dn: x86-64 host with NVIDIA T4"),
        HardwareSlot("g5g", "t4g", 1, "EC2 g5g: Graviton2 host with NVIDIA T4G"),
        HardwareSlot("g6", "l4", 1, "EC2 g6: x86-64 host with NVIDIA L4"),
        HardwareSlot("l4", "l4", 1, "NVIDIA L4 that is not rented as an EC2 family"),
        HardwareSlot("t4", "t4", 1, "NVIDIA T4 that is not rented as an EC2 family"),
        HardwareSlot("mi300x", "mi300x", 1, "one AMD Instinct MI300X"),
        HardwareSlot("1650ti", "1650ti", 1, "the workstation's GTX 1650 Ti"),
        HardwareSlot("cpu", "cpu", 1, "no accelerator"),
    )
}


def accelerator_for_slot(slot: str) -> Accelerator:
    """The accelerator behind a hardware slot; ValueError that lists the slots otherwise."""
    if slot not in HARDWARE_SLOTS:
        known = ", ".join(HARDWARE_SLOTS)
        raise ValueError(f"hardware slot {slot!r} is not known; known: {known}")
    return ACCELERATORS[HARDWARE_SLOTS[slot].chip]


# ── knowledge / memory ────────────────────────────────────────────────────────────────────────────
# How many bytes a model's weights take, and how many of them one decode step reads.
#
# Knows shapes and encodings only: no cache, no chip, no engine's overhead, no price.


@dataclass(frozen=True, slots=True)
class WeightEncoding:
    """Bytes per parameter of one way to store weights.

    linear: attention, MLP and expert matrices and the PLE gates, that is, what gets quantised.
    embedding: the token embedding, which is also the tied head, or an untied one.
    ple: the per-layer-embedding table.
    other: norms, router and the PLE model projection.
    """

    linear: float
    embedding: float
    ple: float
    other: float


# Group-quantised 4-bit: 32 weights share one 2-byte scale, 4/8 + 2/32 = 0.5625 bytes each
# (compressed-tensors w4a16 with group 32; ggml block_q4_0 is 18 bytes per 32 weights).
# ggml block_q6_K is 210 bytes per 256 weights: Google's GGUF files keep both tables in it.
_INT4_GROUP32_BYTES = 0.5625
_Q6_K_BYTES = 210 / 256

WEIGHT_ENCODINGS: dict[str, WeightEncoding] = {
    "f32": WeightEncoding(4.0, 4.0, 4.0, 4.0),
    "bf16": WeightEncoding(2.0, 2.0, 2.0, 2.0),
    "fp16": WeightEncoding(2.0, 2.0, 2.0, 2.0),
    "fp8": WeightEncoding(1.0, 2.0, 2.0, 2.0),
    "int8": WeightEncoding(1.0, 2.0, 2.0, 2.0),
    "w4a16": WeightEncoding(_INT4_GROUP32_BYTES, 2.0, 2.0, 2.0),
    "q4_0": WeightEncoding(_INT4_GROUP32_BYTES, _Q6_K_BYTES, _Q6_K_BYTES, 2.0),
}


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by group; `total` is what transformers counts (buffers are not parameters)."""

    embed: int
    ple_table: int
    ple_gates: int
    ple_projection: int
    attention: int
    mlp: int
    experts: int
    router: int
    norms: int
    head: int

    @property
    def linear(self) -> int:
        """What an encoding quantises."""
        return self.attention + self.mlp + self.experts + self.ple_gates

    @property
    def other(self) -> int:
        """What stays at 16 bits beside the embeddings."""
        return self.ple_projection + self.router + self.norms

    @property
    def total(self) -> int:
        """All text parameters."""
        return self.linear + self.other + self.embed + self.ple_table + self.head


def parameter_counts(geometry: Geometry) -> ParameterCounts:
    """Parameters of the text model, by group.

    Per layer, with D hidden, H heads, h head width, K width of a token's keys, I MLP width:
    attention 2*D*H*h + D*K*(2, or 1 where values come from keys; 0 in sharing layers),
    mlp 3*D*I, PLE gates 2*D*P, experts 3*E*D*X, router D*E + D + E.
    Once: embedding V*D, PLE table Vp*L*P, PLE projection D*L*P, head V*D if untied.
    Source: transformers 5.24 modeling_gemma4 (and llama, mistral, qwen2, qwen3, gemma3), checked
    against models built on the meta device.
    """
    g = geometry
    per_layer = [_layer_attention(g, layer) for layer in range(g.layers)]
    mlp = sum(
        3 * g.hidden * g.mlp_width(layer) + (2 * g.mlp_width(layer) + g.hidden if g.mlp_bias else 0)
        for layer in range(g.layers)
    )
    moe_layers = g.layers if g.experts else 0
    # Experts bring three more norms of hidden width, PLE one per layer and one of its own width.
    block_norms = g.block_norms + (3 if g.experts else 0) + (1 if g.ple_dim else 0)
    return ParameterCounts(
        embed=g.vocab * g.hidden,
        ple_table=g.ple_vocab * g.layers * g.ple_dim,
        ple_gates=g.layers * 2 * g.hidden * g.ple_dim,
        ple_projection=g.hidden * g.layers * g.ple_dim,
        attention=sum(matrices for matrices, _ in per_layer),
        mlp=mlp,
        experts=moe_layers * 3 * g.experts * g.hidden * g.expert_width,
        router=moe_layers * (g.hidden * g.experts + g.hidden + g.experts),
        norms=sum(norms for _, norms in per_layer)
        + g.layers * block_norms * g.hidden
        + g.hidden
        + g.ple_dim,
        head=0 if g.tied else g.vocab * g.hidden,
    )


def weight_bytes(
    geometry: Geometry,
    encoding: str,
    *,
    ple_encoding: str | None = None,
    duplicate_head: bool = False,
    dead_kv: bool = False,
) -> int:
    """Bytes of the text weights in `encoding` (a key of WEIGHT_ENCODINGS), towers apart.

    B_linear*(attention + mlp + experts + PLE gates) + B_embed*(embedding + untied head)
    + B_ple*table + B_other*(PLE projection + router + norms).
    ple_encoding: hold the PLE table as that encoding holds its linear weights (engines that
      repack it: int4 is "w4a16").
    duplicate_head: add a 16-bit copy of a tied head, as the -w4a16-ct exports carry on disk.
    dead_kv: add the k/v projections that Google's plain export ships for sharing layers and that
      nothing reads (they are loaded by engines that do not know better).
    Source: accounting of xbill9/gemma4-dev's reported files and residents (2026-08-20), median
    error 0.0 % over ten figures that it was not fitted to.
    Raises ValueError for an unknown encoding.
    """
    store = _weight_encoding(encoding)
    counts = parameter_counts(geometry)
    size = (
        store.linear * counts.linear
        + store.embedding * (counts.embed + counts.head)
        + store.other * counts.other
        + ple_bytes(geometry, encoding, ple_encoding=ple_encoding)
    )
    if duplicate_head and geometry.tied:
        size += 2 * counts.embed
    if dead_kv:
        size += store.linear * _dead_kv_parameters(geometry)
    return math.ceil(size)


def ple_bytes(geometry: Geometry, encoding: str, *, ple_encoding: str | None = None) -> int:
    """Bytes of the per-layer-embedding table, 0 for a model without one.

    It is gathered row by row, so it may stay in host memory or on disk: llama.cpp maps it, and
    transformers' memory-mapped checkpoint never faults most of it in. On a chip that holds
    everything it counts in full.
    """
    per_row = _weight_encoding(encoding).ple
    if ple_encoding is not None:
        per_row = _weight_encoding(ple_encoding).linear
    return math.ceil(per_row * parameter_counts(geometry).ple_table)


def step_bytes(geometry: Geometry, encoding: str, *, streams: int = 1) -> int:
    """Bytes of weights that one decode step reads for `streams` sequences at once.

    All weights but the PLE table (a gather of a few rows), and of the experts the share that
    `streams` independent choices of top_k touch: 1 - (1 - top_k/experts)^streams. The embedding
    counts once: it is read as the tied head; an untied one makes the embedding a gather.
    Source: the capacity formulas checked against xbill9/gemma4-dev's measured 4.514 GB (E2B
    bf16, T4G, 2026-08) and 1.407 GB (q4_0). KV reads come on top.
    Raises ValueError for an unknown encoding or fewer than one stream.
    """
    if streams < 1:
        raise ValueError(f"streams must be at least 1, not {streams}")
    store = _weight_encoding(encoding)
    counts = parameter_counts(geometry)
    touched = 1.0
    if geometry.experts:
        touched = 1 - (1 - geometry.top_k / geometry.experts) ** streams
    dense = counts.attention + counts.mlp + counts.ple_gates
    return math.ceil(
        store.linear * (dense + touched * counts.experts)
        + store.embedding * (counts.embed if geometry.tied else counts.head)
        + store.other * counts.other
    )


def _weight_encoding(encoding: str) -> WeightEncoding:
    try:
        return WEIGHT_ENCODINGS[encoding]
    except KeyError:
        known = ", ".join(WEIGHT_ENCODINGS)
        raise ValueError(f"encoding {encoding!r} is not known; known: {known}") from None


def _layer_attention(geometry: Geometry, layer: int) -> tuple[int, int]:
    """(matrices with their biases, norm weights) of one layer's attention."""
    g = geometry
    q_width = g.heads * g.head_width(layer)
    projections = 0
    if layer < g.owners:
        projections = 1 if g.k_eq_v and g.is_full(layer) else 2
    kv_width = projections * g.kv_width(layer)
    matrices = 2 * g.hidden * q_width + g.hidden * kv_width
    matrices += (q_width + kv_width if g.qkv_bias else 0) + (g.hidden if g.out_bias else 0)
    norms = (2 if layer < g.owners else 1) * g.head_width(layer) if g.head_norms else 0
    return matrices, norms


def _dead_kv_parameters(geometry: Geometry) -> int:
    shared = range(geometry.owners, geometry.layers)
    return sum(2 * geometry.hidden * geometry.kv_width(layer) for layer in shared)


# ── knowledge / models ────────────────────────────────────────────────────────────────────────────
# The Gemma 4 family: shapes, towers, and which checkpoints exist under which names.
#
# Knows no chips and does no arithmetic; shapes are stated, checkpoints cited.


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """One repository of weights.

    repo: its id on the Hugging Face hub (or Ollama's tag).
    label: the encoding slot of a rig that serves it; empty for the reference release.
    stored: how its weights lie on disk, a key of WEIGHT_ENCODINGS; -unquantized is plain bf16.
    exists: whether it does; source and date say who saw it, or that it is missing.
    file: size of the weights file or files, towers included.
    """

    repo: str
    label: str
    stored: str
    exists: bool
    source: str
    date: str
    file: Figure
    note: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One size of Gemma 4.

    slot: how a rig's name spells it. vision_tower, audio_tower: bytes in bf16, beside the text;
    vLLM on a TPU loads text and vision, vLLM on a GPU all, the JAX engine and llama.cpp's
    language file neither.
    """

    name: str
    slot: str
    geometry: Geometry
    geometry_source: str
    geometry_date: str
    vision_tower: Figure
    audio_tower: Figure
    checkpoints: tuple[PublishedCheckpoint, ...]


def _sliding_then_full(layers: int, every: int) -> tuple[str, ...]:
    return tuple(SLIDING_LAYER if (i + 1) % every else FULL_LAYER for i in range(layers))


_HUB_QUOTED = "Hugging Face hub, as quoted in several public repositories"
_DEV_MODELS = "xbill9/gemma4-dev, MODELS"
_RUN_ARTICLE = "dev.to, 12B Gemma 4 on Cloud Run"
_DEV_README = "xbill9/gemma4-dev, README"
_SEEN = "2026-11-29"  # the day a quotation without a date was read
_GEMMA_WHEEL = "gemma 4.0.1 (PyPI), its model configurations"
_NO_FILE = unmeasured_figure("bytes")


def _reference(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "", "bf16", True, source, date, file)


def _w4a16(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    note = (
        "embeddings stay bf16 (PLE table too), and a second bf16 copy of the tied head is on disk"
    )
    return PublishedCheckpoint(repo, "w4a16", "w4a16", True, source, date, file, note)


def _unquantized(repo: str, source: str, date: str, more: str = "") -> PublishedCheckpoint:
    note = "trained for q4_0, stored as bf16" + more
    return PublishedCheckpoint(repo, "q4_0", "bf16", True, source, date, _NO_FILE, note)


def _gguf(repo: str, source: str, date: str, file: Figure = _NO_FILE) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "q4_0", "q4_0", True, source, date, file)


def _fp8(
    repo: str, note: str, file: Figure = _NO_FILE, *, exists: bool = True
) -> PublishedCheckpoint:
    return PublishedCheckpoint(repo, "fp8", "fp8", exists, _RUN_ARTICLE, "2026", file, note)


# The class defaults of transformers' Gemma4TextConfig (hidden 2304, 30 layers) are no real size.
GEMMA4: dict[str, Model] = {
    "E2B": Model(
        name="Gemma 4 E2B",
        slot="2b",
        geometry=Geometry(
            layer_types=_sliding_then_full(35, 5),
            hidden=1536,
            intermediate=6144,
            heads=8,
            kv_heads=1,
            global_kv_heads=1,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=512,
            kv_shared_layers=20,
            ple_dim=256,
            ple_vocab=262144,
            double_wide_mlp=True,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            334729216,
            "bytes",
            "transformers 5.24, Gemma4VisionConfig's defaults built on the meta device",
            _SEEN,
            kind="derived",
            note="agrees with the memory that vLLM reports for E2B on a TPU",
        ),
        audio_tower=Figure(
            609649216,
            "bytes",
            "transformers 5.24, Gemma4AudioConfig's defaults built on the meta device",
            _SEEN,
            kind="derived",
        ),
        checkpoints=(
            _reference(
                "google/gemma-4-E2B-it",
                _DEV_README,
                "2026-08-20",
                Figure(10.25e9, "bytes", _DEV_README, "2026-08-20", note="rounded there"),
            ),
            _w4a16(
                "google/gemma-4-E2B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(8.32e9, "bytes", _DEV_README, "2026-09-04", note="rounded there"),
            ),
            _unquantized(
                "google/gemma-4-E2B-it-qat-q4_0-unquantized",
                _DEV_README,
                "2026-08-20",
                "; has no k_norm in the sharing layers, on which some loaders fail",
            ),
            _gguf(
                "google/gemma-4-E2B-it-qat-q4_0-gguf",
                _DEV_README,
                "2026-09-02",
                Figure(3349516256, "bytes", _DEV_README, "2026-09-02"),
            ),
            PublishedCheckpoint(
                "gemma4:e2b-it-qat",
                "q4_0",
                "q4_0",
                True,
                _DEV_README,
                "2026-09-02",
                Figure(3349514112, "bytes", _DEV_README, "2026-09-02"),
                "Ollama's own container of the same weights, with another digest",
            ),
        ),
    ),
    "E4B": Model(
        name="Gemma 4 E4B",
        slot="4b",
        geometry=Geometry(
            layer_types=_sliding_then_full(42, 6),
            hidden=2560,
            intermediate=10240,
            heads=8,
            kv_heads=2,
            global_kv_heads=2,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=512,
            kv_shared_layers=18,
            ple_dim=256,
            ple_vocab=262144,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=unmeasured_figure("bytes", "of the order of E2B's"),
        audio_tower=unmeasured_figure("bytes", "of the order of E2B's"),
        checkpoints=(
            _reference("google/gemma-4-E4B-it", _DEV_MODELS, "2026-08-20"),
            _w4a16("google/gemma-4-E4B-it-qat-w4a16-ct", _DEV_README, "2026-08-20"),
            _unquantized("google/gemma-4-E4B-it-qat-q4_0-unquantized", _DEV_MODELS, "2026-08-20"),
            _gguf(
                "google/gemma-4-E4B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                _SEEN,
                Figure(5154939136, "bytes", _HUB_QUOTED, _SEEN, note="revision bb3b92e6"),
            ),
        ),
    ),
    "12B": Model(
        name="Gemma 4 12B",
        slot="12b",
        geometry=Geometry(
            layer_types=_sliding_then_full(48, 6),
            hidden=3840,
            intermediate=15360,
            heads=16,
            kv_heads=8,
            global_kv_heads=1,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
        ),
        geometry_source="gemma4-pt-claude 0.2.0 (PyPI, third party)",
        geometry_date=_SEEN,
        vision_tower=Figure(
            0.1e9,
            "bytes",
            "23.9 GB in all (xbill9/gemma4-dev) less the text weights",
            "2026-08-20",
            kind="derived",
            note="vision and audio together: the model has no encoders, only projections",
        ),
        audio_tower=unmeasured_figure("bytes", "counted with vision"),
        checkpoints=(
            _reference(
                "google/gemma-4-12B-it",
                _RUN_ARTICLE,
                "2026",
                Figure(23.9e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            _w4a16(
                "google/gemma-4-12B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(10.26e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            _unquantized("google/gemma-4-12B-it-qat-q4_0-unquantized", _HUB_QUOTED, _SEEN),
            _gguf(
                "google/gemma-4-12B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                "2026-10-06",
                Figure(6975879296, "bytes", _HUB_QUOTED, "2026-10-06", note="revision 29d09777"),
            ),
            _fp8(
                "google/gemma-4-12b-it-sfp8",
                "Google publishes no fp8 build; the next two are third parties'",
                exists=False,
            ),
            _fp8(
                "vrfai/gemma-4-12B-it-fp8",
                "made with ModelOpt",
                Figure(13.4e9, "bytes", _RUN_ARTICLE, "2026", note="rounded there"),
            ),
            _fp8("bahadirakdemir/gemma-4-12B-it-text-fp8", "text only; the article served it"),
        ),
    ),
    "26B-A4B": Model(
        name="Gemma 4 26B-A4B",
        slot="26b",
        geometry=Geometry(
            layer_types=_sliding_then_full(30, 6),
            hidden=2816,
            intermediate=2112,
            heads=16,
            kv_heads=8,
            global_kv_heads=2,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
            experts=128,
            top_k=8,
            expert_width=704,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            1.14e9,
            "bytes",
            "51.61 GB on disk (xbill9/gemma4-dev) less the text weights",
            "2026-08-20",
            kind="derived",
        ),
        audio_tower=unmeasured_figure("bytes"),
        checkpoints=(
            _reference(
                "google/gemma-4-26B-A4B-it",
                "transformers 5.24, a comment in Gemma4TextConfig",
                _SEEN,
                Figure(51.61e9, "bytes", _DEV_MODELS, "2026-08-20", note="rounded there"),
            ),
            PublishedCheckpoint(
                "google/gemma-4-26B-A4B-it-qat-w4a16-ct",
                "w4a16",
                "w4a16",
                False,
                _DEV_README,
                "2026-08-20",
                _NO_FILE,
                "the only size without one; reports that name it measured a private mount",
            ),
            _unquantized(
                "google/gemma-4-26B-A4B-it-qat-q4_0-unquantized", _DEV_README, "2026-08-20"
            ),
            _gguf("google/gemma-4-26B-A4B-it-qat-q4_0-gguf", _HUB_QUOTED, _SEEN),
        ),
    ),
    "31B": Model(
        name="Gemma 4 31B",
        slot="31b",
        geometry=Geometry(
            layer_types=_sliding_then_full(60, 6),
            hidden=5376,
            intermediate=21504,
            heads=32,
            kv_heads=16,
            global_kv_heads=4,
            head_dim=256,
            global_head_dim=512,
            vocab=262144,
            window=1024,
            k_eq_v=True,
        ),
        geometry_source=_GEMMA_WHEEL,
        geometry_date=_SEEN,
        vision_tower=Figure(
            1.15e9,
            "bytes",
            "the -w4a16-ct file of 23.3 GB less its text tensors",
            _SEEN,
            kind="derived",
            note="the rounded size allows 1.14 to 1.24; the 26B-A4B's is 1.14",
        ),
        audio_tower=unmeasured_figure("bytes"),
        checkpoints=(
            _reference("google/gemma-4-31B-it", _HUB_QUOTED, _SEEN),
            _w4a16(
                "google/gemma-4-31B-it-qat-w4a16-ct",
                _DEV_README,
                "2026-08-20",
                Figure(23.3e9, "bytes", _HUB_QUOTED, _SEEN, note="rounded there"),
            ),
            _unquantized("google/gemma-4-31B-it-qat-q4_0-unquantized", _HUB_QUOTED, _SEEN),
            _gguf(
                "google/gemma-4-31B-it-qat-q4_0-gguf",
                _HUB_QUOTED,
                _SEEN,
                Figure(17651001568, "bytes", _HUB_QUOTED, _SEEN),
            ),
        ),
    ),
}


def model_for_slot(slot: str) -> Model:
    """The size that a rig's model slot names ("2b"); ValueError that lists them otherwise."""
    for model in GEMMA4.values():
        if model.slot == slot:
            return model
    known = ", ".join(model.slot for model in GEMMA4.values())
    raise ValueError(f"model slot {slot!r} is not known; known: {known}")


def checkpoint_for_repo(repo: str) -> tuple[Model, PublishedCheckpoint]:
    """The size and the entry of a repository id; ValueError when it is not in the table.

    An entry whose `exists` is False is returned as well: the caller can say why it cannot load.
    """
    for model in GEMMA4.values():
        for checkpoint in model.checkpoints:
            if checkpoint.repo == repo:
                return model, checkpoint
    raise ValueError(f"no Gemma 4 checkpoint named {repo!r} is known")


# ── knowledge / report_schema ─────────────────────────────────────────────────────────────────────
# What a benchmark report is: closed records, so that a typing error is refused, not stored.
#
# Knows no folder, no chip's peak and no model's shape; times are in ms, rates per second.

MOST_CELLS = 2000  # of one report

# p99 of fewer samples is close to their maximum and says nothing about the hundredth request.
P99_LEAST_SAMPLES = 100
# Beyond these the load generator measured itself (facts: a saturated client reports no errors).
CLIENT_CPU_LIMIT = 0.70  # share of one core
CLIENT_LAG_LIMIT_MS = 20.0  # p99 of the event loop's lag
CLIENT_COALESCED_LIMIT = 0.05  # share of chunks that arrived in one read with an earlier one

ReportKind = Literal["measured", "imported", "derived"]
CellStatus = Literal["ok", "failed", "infeasible", "interrupted", "not_run"]
LoadMode = Literal["closed", "open"]
TokenSource = Literal["usage", "client-tokenizer", "chunks", "estimated", "unknown"]
KvEvidence = Literal["allocator", "engine-report", "flag", "assumed", "unknown"]

ReportWord = Annotated[str, Field(max_length=120)]
ReportText = Annotated[str, Field(max_length=2000)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
DayText = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Sha256Text = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

RUN_ID_PATTERN = (
    r"\d{4}-\d{2}-\d{2}"  # day
    r"-[a-z0-9][a-z0-9.]{0,23}(?:-[a-z0-9_.]{1,16}){0,3}"  # model, and its encoding
    r"-[a-z0-9]{2,16}-[a-z0-9]{2,16}"  # engine, hardware
    r"(?:--r(?:[2-9]|[1-9]\d{1,2}))?"  # repeat of the day; the first has none
)


class ClosedRecord(BaseModel):
    """Base of every record: unknown keys, NaN and infinities are refused."""

    # Built when first used: a server that is asked for no report does not wait for its schema.
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )


class Distribution(ClosedRecord):
    """A sample in five figures. The unit stands in the name of the field that holds it.

    n: how many samples; None where an imported source does not say. p99 needs n >= 100.
    """

    n: int | None = Field(default=None, ge=1)
    mean: float | None = Field(default=None, ge=0)
    median: float | None = Field(default=None, ge=0)
    p90: float | None = Field(default=None, ge=0)
    p99: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Distribution:
        if self.mean is None and self.median is None:
            raise ValueError("a distribution needs a mean or a median")
        if self.p99 is not None and (self.n is None or self.n < P99_LEAST_SAMPLES):
            raise ValueError(f"p99 of fewer than {P99_LEAST_SAMPLES} samples (n={self.n})")
        known = [value for value in (self.median, self.p90, self.p99) if value is not None]
        if known != sorted(known):
            raise ValueError("median, p90 and p99 do not rise")
        return self


class ClientHealth(ClosedRecord):
    """Whether the load generator could keep up; without it no latency is believed."""

    cpu_share: NonNegative = Field(description="CPU time over wall time, of one core.")
    loop_lag_p99_ms: NonNegative
    coalesced_share: Share = Field(description="Chunks that came in one read with an earlier one.")
    trustworthy: bool

    @model_validator(mode="after")
    def _may_be_trusted(self) -> ClientHealth:
        faults = self.faults()
        if self.trustworthy and faults:
            raise ValueError(f"marked trustworthy, but {'; '.join(faults)}")
        return self

    def faults(self) -> list[str]:
        """The limits that the client broke, in words; empty for a client that kept up."""
        found = []
        if self.cpu_share > CLIENT_CPU_LIMIT:
            found.append(f"client used {self.cpu_share:.0%} of a core")
        if self.loop_lag_p99_ms > CLIENT_LAG_LIMIT_MS:
            found.append(f"client's loop lagged {self.loop_lag_p99_ms:.0f} ms (p99)")
        if self.coalesced_share > CLIENT_COALESCED_LIMIT:
            found.append(f"{self.coalesced_share:.0%} of the chunks arrived together")
        return found


class CellMetrics(ClosedRecord):
    """What one cell gave. Only requests that completed count; None is 'not measured', never 0.

    ttft: request sent to first content. tpot: (last - first content) / (output tokens - 1), per
    request. icl: gaps between content chunks, pooled. e2e: sent to last content. The two
    from_schedule forms start when an open loop should have sent. Rates are over duration_s.
    """

    duration_s: float | None = Field(default=None, gt=0)
    requests_sent: int | None = Field(default=None, ge=1)
    requests_completed: int | None = Field(default=None, ge=0)
    errors: dict[ReportWord, int] = Field(default_factory=dict, max_length=20)
    request_rps: float | None = Field(default=None, ge=0)
    output_tps: float | None = Field(default=None, ge=0)
    total_tps: float | None = Field(default=None, ge=0, description="Prompt and output tokens.")
    per_stream_tps: float | None = Field(default=None, ge=0, description="Median 1000/tpot.")
    achieved_concurrency: float | None = Field(default=None, ge=0)
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    icl_ms: Distribution | None = None
    e2e_ms: Distribution | None = None
    ttft_from_schedule_ms: Distribution | None = None
    e2e_from_schedule_ms: Distribution | None = None
    goodput_rps: float | None = Field(default=None, ge=0)
    prompt_tokens: Distribution | None = Field(default=None, description="As the server counted.")
    completion_tokens: Distribution | None = Field(default=None, description="As it counted.")
    cached_tokens: int | None = Field(default=None, ge=0, description="From the prefix cache.")
    short_outputs: int | None = Field(default=None, ge=0, description="Ended before the target.")

    @model_validator(mode="after")
    def _adds_up(self) -> CellMetrics:
        sent, completed = self.requests_sent, self.requests_completed
        if sent is not None and completed is not None and completed > sent:
            raise ValueError(f"{completed} requests completed of {sent} sent")
        if self.request_rps is None and self.output_tps is None:
            raise ValueError("metrics without a request rate and without an output rate")
        return self

    @property
    def success_rate(self) -> float | None:
        """Completed over sent, 0 to 1; None where either is unknown."""
        if self.requests_sent is None or self.requests_completed is None:
            return None
        return self.requests_completed / self.requests_sent


class ImpliedWork(ClosedRecord):
    """What the chip must have done for a cell's figures, as shares of its peak; above 1: no."""

    flops_share: float | None = Field(default=None, ge=0)
    bytes_share: float | None = Field(default=None, ge=0)
    checks: list[ReportText] = Field(default_factory=list, max_length=10)


class BenchCell(ClosedRecord):
    """One point of a grid: a load, a prompt length, an output length, and what came of it.

    `id` is `cell_id_of` of the same four values. status other than ok needs a reason and has no
    metrics: a failed cell is never a zero. cv: standard deviation over mean of the main rate
    (output_tps, else request_rps) over `repeats` runs of this cell.
    """

    id: ReportWord
    mode: LoadMode = "closed"
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    rate_rps: float | None = Field(default=None, gt=0)
    input_tokens: int = Field(ge=1, description="Prompt length asked for.")
    output_tokens: int | None = Field(default=None, ge=1, description="Asked for; None: unknown.")
    status: CellStatus
    reason: ReportText = ""
    metrics: CellMetrics | None = None
    client: ClientHealth | None = None
    repeats: int = Field(default=1, ge=1)
    cv: float | None = Field(default=None, ge=0)
    short_sample: bool = Field(default=False, description="Fewer requests than the rule asks.")
    marks: list[ReportText] = Field(default_factory=list, max_length=10)
    implied: ImpliedWork | None = None

    @model_validator(mode="after")
    def _is_honest(self) -> BenchCell:
        if (self.concurrency is None) == (self.mode == "closed"):
            raise ValueError("a closed loop has a concurrency, an open one has none")
        if (self.rate_rps is None) == (self.mode == "open"):
            raise ValueError("an open loop has a rate, a closed one has none")
        wanted = cell_id_of(
            self.concurrency, self.input_tokens, self.output_tokens, rate_rps=self.rate_rps
        )
        if self.id != wanted:
            raise ValueError(f"the cell's id must be {wanted}")
        if self.status == "ok" and self.metrics is None:
            raise ValueError("an ok cell needs metrics")
        if self.status != "ok" and self.metrics is not None:
            raise ValueError(f"a cell that is {self.status} has no metrics")
        if self.status != "ok" and not self.reason.strip():
            raise ValueError(f"a cell that is {self.status} needs a reason")
        if self.cv is not None and self.repeats < 2:
            raise ValueError("a variation needs at least two repeats")
        return self

    @property
    def trusted(self) -> bool:
        """False when the client was the bottleneck; imported cells have no client to judge."""
        return self.client is None or self.client.trustworthy


class GoodputLimits(ClosedRecord):
    """What a request must keep to count as good; None: no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)


class Workload(ClosedRecord):
    """How the load was made: the same in every cell of a report. `name` is compared."""

    name: ReportWord = Field(description="Kind of prompts, such as 'distinct-words'.")
    tool: ReportWord = Field(description="What sent the requests, such as 'vllm bench serve'.")
    tool_version: ReportWord = ""
    api: Literal["chat", "completions", "unknown"] = "unknown"
    prompts: Literal["distinct", "repeated", "unknown"] = Field(
        default="unknown", description="Repeated prompts are answered from a prefix cache."
    )
    ignore_eos: bool | None = None
    temperature: float | None = Field(default=None, ge=0)
    seed: int | None = None
    warmups_per_shape: int | None = Field(default=None, ge=0)
    vantage: Literal["same host", "same network", "tunnel", "internet", "unknown"] = "unknown"
    rtt_ms: float | None = Field(default=None, ge=0)
    goodput_limits: GoodputLimits | None = None


class KvDtype(ClosedRecord):
    """The type of the cache and how it is known: a flag or a log line is not the allocator."""

    value: ReportWord = "unknown"
    evidence: KvEvidence = "unknown"


class TokenWork(ClosedRecord):
    """What one token costs, where the model is not in the house's table: for the gate.

    flops: of one forward token (2 x active weights). step_bytes: weights read by one decode step.
    """

    flops: float = Field(gt=0)
    step_bytes: float = Field(gt=0)


class Subject(ClosedRecord):
    """What was served. `short` is the model's part of the run id, `size` a key of GEMMA4 or ''."""

    model: ReportWord = Field(description="Repository id, or 'embedded'; never a path.")
    short: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.]{0,23}(?:-[a-z0-9_.]{1,16}){0,3}$")]
    size: Literal["", "E2B", "E4B", "12B", "26B-A4B", "31B"] = ""
    encoding: ReportWord = Field(description="Of the weights in memory, such as bf16 or w4a16.")
    revision: ReportWord = ""
    kv_dtype: KvDtype = Field(default_factory=KvDtype)
    max_model_len: int | None = Field(default=None, ge=1)
    work: TokenWork | None = None


class HardwareFact(ClosedRecord):
    """One property of the machine: read from it (probed), or taken from a table (declared)."""

    value: float | int | ReportWord
    unit: ReportWord = ""
    how: Literal["probed", "declared"]
    source: ReportText = ""


class BenchHardware(ClosedRecord):
    """What was measured on, in the words of the hardware slot. No host name, no address, no zone
    of a project: facts about the machine only."""

    slot: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")]
    chip: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")]
    devices: int = Field(default=1, ge=1, le=4096)
    machine_type: HardwareFact | None = None
    region: HardwareFact | None = None
    host_cpu: HardwareFact | None = None
    host_cores: HardwareFact | None = None
    host_memory_gib: HardwareFact | None = None
    visible_memory_gib: HardwareFact | None = None
    bandwidth_gbs: HardwareFact | None = None
    compute_tflops: HardwareFact | None = None
    driver: HardwareFact | None = None
    power_limit_w: HardwareFact | None = None


class BenchEngine(ClosedRecord):
    """What served. argv as started (scrubbed), resolved as the engine itself reported.

    server: version and hash of server.py; engine_sha256: of an engine file that the rig carries.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")] = Field(description="Runtime slot.")
    version: ReportWord = ""
    argv: list[ReportText] = Field(default_factory=list, max_length=100)
    resolved: dict[ReportWord, str | int | float | bool | None] = Field(
        default_factory=dict, max_length=100
    )
    image_digest: ReportWord = ""
    server: ReportWord = ""
    engine_sha256: Sha256Text | None = None


class ReportPrice(ClosedRecord):
    """What the machine cost, with the day and the place where the price was read."""

    usd_per_hour: NonNegative
    provisioning: ReportWord = ""
    region: ReportWord = ""
    as_of: Annotated[str, Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")]
    source: ReportText


class RawData(ClosedRecord):
    """Evidence behind the figures: a path relative to the benchmarks folder, and its hash."""

    path: Annotated[str, Field(pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99}/){0,4}[A-Za-z0-9]")]
    sha256: Sha256Text
    size: int = Field(ge=0, description="Bytes.")

    @model_validator(mode="after")
    def _stays_inside(self) -> RawData:
        if any(not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", p) for p in self.path.split("/")):
            raise ValueError("raw path must be relative, of plain names")
        return self


class BenchRun(ClosedRecord):
    """Which run this is. id is the file's stem; origin says where imported figures come from."""

    id: Annotated[str, Field(pattern=f"^{RUN_ID_PATTERN}$")]
    date: DayText
    kind: ReportKind
    rig: ReportWord = ""
    origin: ReportText = ""
    corrections: list[ReportText] = Field(default_factory=list, max_length=20)
    retracted: ReportText = Field(default="", description="Why, where it must not be used.")
    supersedes: ReportWord = ""
    started: ReportWord = ""
    duration_s: float | None = Field(default=None, ge=0)


class BenchReport(ClosedRecord):
    """One benchmark. `planned_cells` may exceed the cells that are here: then it was cut short."""

    schema_version: Literal["2.0"] = "2.0"
    run: BenchRun
    subject: Subject
    hardware: BenchHardware
    engine: BenchEngine
    workload: Workload
    token_source: TokenSource
    planned_cells: int = Field(ge=1, le=MOST_CELLS)
    cells: list[BenchCell] = Field(min_length=1, max_length=MOST_CELLS)
    raw: list[RawData] = Field(default_factory=list, max_length=100)
    price: ReportPrice | None = None
    notes: list[ReportText] = Field(default_factory=list, max_length=40)

    @model_validator(mode="after")
    def _hangs_together(self) -> BenchReport:
        counts = Counter(cell.id for cell in self.cells)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"cells of one id: {', '.join(twice[:5])}")
        if len(self.cells) > self.planned_cells:
            raise ValueError(f"{len(self.cells)} cells of {self.planned_cells} planned")
        if self.run.kind != "measured" and not self.run.origin:
            raise ValueError(f"a report that is {self.run.kind} needs its origin")
        if self.run.kind == "measured":
            blind = [c.id for c in self.cells if c.status == "ok" and c.client is None]
            if blind:
                raise ValueError(f"measured without client health: {', '.join(blind[:5])}")
        first = run_id_of(self.run.date, self.subject.short, self.engine.name, self.hardware.slot)
        if self.run.id.partition("--")[0] != first:
            raise ValueError(f"the run's id must be {first}, with --rN for a repeat")
        return self


def cell_id_of(
    concurrency: int | None,
    input_tokens: int,
    output_tokens: int | None,
    *,
    rate_rps: float | None = None,
) -> str:
    """The id of a cell: c8-i1024-o128 closed, r2.5-i1024-o128 open, o- where output is unknown."""
    load = f"c{concurrency}" if rate_rps is None else f"r{rate_rps:g}"
    return f"{load}-i{input_tokens}-o{'-' if output_tokens is None else output_tokens}"


def run_id_of(date: str, short: str, engine: str, hardware: str, repeat: int = 1) -> str:
    """The name of a run after NAMING.md; repeat 1 has no mark, 2 is --r2."""
    mark = f"--r{repeat}" if repeat > 1 else ""
    return f"{date}-{short}-{engine}-{hardware}{mark}"


def distribution_of(samples: Sequence[float]) -> Distribution | None:
    """Mean, median, p90 and, from 100 samples on, p99 (linear between ranks); None of nothing."""
    if not samples:
        return None
    ordered = sorted(samples)
    n = len(ordered)
    return Distribution(
        n=n,
        mean=math.fsum(ordered) / n,
        median=quantile_of(ordered, 0.5),
        p90=quantile_of(ordered, 0.9),
        p99=quantile_of(ordered, 0.99) if n >= P99_LEAST_SAMPLES else None,
    )


def quantile_of(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted samples, linear between the two nearest ranks."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def health_of_client(cpu_share: float, loop_lag_p99_ms: float, coalesced: float) -> ClientHealth:
    """The client's block, marked untrustworthy where it broke a limit."""
    health = ClientHealth(
        cpu_share=cpu_share,
        loop_lag_p99_ms=loop_lag_p99_ms,
        coalesced_share=coalesced,
        trustworthy=False,
    )
    return health.model_copy(update={"trustworthy": not health.faults()})


# ── knowledge / judge_answer ──────────────────────────────────────────────────────────────────────
# What is asked of the report gate and what it answers: the forms of judge.py and the server.
#
# Knows no table, no arithmetic and no program.

JUDGE_BYTES = 16_000_000  # of a question or an answer: the longest report, with all that it hears


class SubjectQuestion(ClosedRecord):
    """What is served, before there is a report on it. Empty and None: nobody knows.

    model: a repository id, 'embedded', or a folder. encoding: of the weights in memory. geometry:
    of a model that the table lacks, so that it can be judged too. max_model_len: tokens of one
    conversation. slot: of the hardware, as in a rig's name.
    """

    model: str = Field(max_length=4096)
    encoding: ReportWord = "unknown"
    geometry: Geometry | None = None
    kv_dtype: KvDtype | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    slot: ReportWord = ""


class KnownSubject(ClosedRecord):
    """What the tables make of it. chip: the slot's; of a slot that is in no table, the slot."""

    subject: Subject
    chip: ReportWord

    @property
    def is_gemma4(self) -> bool:
        """Whether the model is a repository of the Gemma 4 table: those alone have a size in it."""
        return bool(self.subject.size)


class JudgeQuestion(ClosedRecord):
    """Either a subject to be named or a report to be judged."""

    subject: SubjectQuestion | None = None
    report: BenchReport | None = None

    @model_validator(mode="after")
    def _asks_one_thing(self) -> JudgeQuestion:
        if (self.subject is None) == (self.report is None):
            raise ValueError("asks for a subject or for a report, and for one of them")
        return self


class JudgeAnswer(ClosedRecord):
    """What was asked for: the subject, or the report with `implied` worked out in every cell."""

    subject: KnownSubject | None = None
    report: BenchReport | None = None


# ── knowledge / report_checks ─────────────────────────────────────────────────────────────────────
# Whether a report's figures can be true: needed FLOP/s and bytes/s against the chip's peak.
#
# Bounds from below only, so that no honest figure is refused; knows no files.

PLAUSIBLE_SHARE = 1.05  # of the peak: two pages of one vendor differ by 5 % on one chip
CONSISTENT_SHARE = 0.10  # by how much figures of one cell may contradict each other, and for ramp
# and drain as much again as the streams' share of all requests
PROMPT_LENGTH_SHARE = 0.05  # by how much the prompts that went out may miss their target
REFUSED_SHARE = 0.10  # of impossible cells from which on a whole report is no evidence


@dataclass(frozen=True, slots=True)
class ChipPeak:
    """What the hardware can do at most: TFLOP/s and GB/s of all devices; None where unknown."""

    tflops: float | None
    gbs: float | None


def peak_of_hardware(hardware: BenchHardware, encoding: str) -> ChipPeak:
    """The peak from the house's table, else from the report's own facts (per device).

    Eight-bit weights may compute at twice the 16-bit rate where the chip has that type. The table's
    figures for "cpu" are one laptop's and effective, so a CPU has only what the report states.
    """
    facts = [hardware.compute_tflops, hardware.bandwidth_gbs]
    stated = [f.value if f and isinstance(f.value, int | float) else None for f in facts]
    tflops, gbs = stated
    chip = ACCELERATORS.get(hardware.chip)
    if chip is not None and hardware.chip != "cpu":
        tflops = chip.compute.value if chip.compute.value is not None else tflops
        gbs = chip.bandwidth.value if chip.bandwidth.value is not None else gbs
        if tflops is not None and encoding in ("fp8", "int8") and encoding in chip.native_dtypes:
            tflops *= 2
    devices = hardware.devices
    return ChipPeak(tflops and tflops * devices, gbs and gbs * devices)


@dataclass(frozen=True, slots=True)
class SubjectWork:
    """The least that one token costs. prompt_flops leaves the head out: it runs once a prompt."""

    prompt_flops: float
    token_flops: float
    geometry: Geometry | None
    encoding: str
    fixed_step_bytes: float | None

    def bytes_per_step(self, streams: int) -> float | None:
        """Bytes of weights that one decode step for `streams` reads; None: encoding unknown."""
        if self.geometry is None or self.encoding not in WEIGHT_ENCODINGS:
            return self.fixed_step_bytes
        return step_bytes(self.geometry, self.encoding, streams=streams)

    def kv_read(self, context: int, dtype_bytes: float) -> float:
        """Bytes of cache that one output token reads at least, sliding layers at their window."""
        if self.geometry is None:
            return 0.0
        return kv_bytes(self.geometry, context, 1, dtype_bytes, "ring")


def work_of_subject(subject: Subject, *, fast_prefill: bool = False) -> SubjectWork | None:
    """What a token of the subject costs; None where neither table nor report says.

    2 x active weights each token (multiply and add). fast_prefill: prompts pass only the layers
    that own keys and values, which an engine may do where the later ones share them.
    """
    if subject.size:
        geometry = GEMMA4[subject.size].geometry
        owners = dataclasses.replace(
            geometry, layer_types=geometry.layer_types[: geometry.owners], kv_shared_layers=0
        )
        active = _active_weights(geometry)
        head = parameter_counts(geometry).embed
        prompt = _active_weights(owners) if fast_prefill else active
        return SubjectWork(2 * prompt, 2 * (active + head), geometry, subject.encoding, None)
    if subject.work is None:
        return None
    work = subject.work
    return SubjectWork(work.flops, work.flops, None, subject.encoding, work.step_bytes)


def subject_of_model(
    model: str,
    encoding: str,
    geometry: Geometry | None = None,
    *,
    kv_dtype: KvDtype | None = None,
    max_model_len: int | None = None,
) -> Subject:
    """The subject of a report on `model`: a repository id, 'embedded', or a folder (its last name).

    Of a model that the table lacks the shape may be given, so that the gate can judge it too.
    """
    size, work, label = "", None, ""
    name = PurePosixPath(model).name if model.startswith("/") else model
    try:
        known, checkpoint = checkpoint_for_repo(model)
        size = next(key for key, value in GEMMA4.items() if value is known)
        label = checkpoint.label
        short = f"gemma4-{size.lower() if size in ('E2B', 'E4B') else known.slot}"
    except ValueError:
        plain = "smollm2-135m" if model == "embedded" else name.rpartition("/")[2].lower()
        words = [w[:16] for w in re.split(r"[^a-z0-9.]+", plain) if w][:3]
        short = "-".join(words) or "model"
        if geometry is not None and encoding in WEIGHT_ENCODINGS:
            flops = 2 * _active_weights(geometry)
            work = TokenWork(flops=flops, step_bytes=step_bytes(geometry, encoding))
    return Subject.model_validate(
        {
            "model": name,
            "short": f"{short}-{label}" if label else short,
            "size": size,
            "encoding": encoding,
            "kv_dtype": kv_dtype or KvDtype(),
            "max_model_len": max_model_len,
            "work": work,
        }
    )


def _active_weights(geometry: Geometry) -> float:
    """Weights that a token is multiplied by, without embedding and head."""
    counts = parameter_counts(geometry)
    touched = geometry.top_k / geometry.experts if geometry.experts else 0.0
    return counts.linear - counts.experts + touched * counts.experts + counts.other


def implied_work(report: BenchReport, cell: BenchCell) -> ImpliedWork | None:
    """What the chip must have done for this cell, and each thing that cannot be; None if not ok.

    Needed FLOP/s: requests/s x (prompt x 2 x weights without head + output x 2 x weights), and
    prompt x 2 x weights within the median ttft. Needed bytes/s: output/s / streams x weights of a
    step + output/s x least cache, and the weights of a step within the median tpot. Tokens that a
    prefix cache served cost nothing; with speculative decoding bytes are not judged.
    """
    metrics = cell.metrics
    if metrics is None:
        return None
    checks = _contradictions(cell, metrics)
    resolved = {key.lower(): value for key, value in report.engine.resolved.items()}
    work = work_of_subject(
        report.subject, fast_prefill=resolved.get("kv_sharing_fast_prefill") is True
    )
    if work is None:
        return ImpliedWork(checks=checks)
    peak = peak_of_hardware(report.hardware, report.subject.encoding)
    flops = _needed_tflops(work, cell, metrics)
    speculative = any("speculative" in key and value for key, value in resolved.items())
    gbs = {} if speculative else _needed_gbs(work, cell, metrics, report.subject)
    shares: list[float | None] = []
    for needs, most, unit in ((flops, peak.tflops, "TFLOP/s"), (gbs, peak.gbs, "GB/s")):
        if not needs or not most:
            shares.append(None)
            continue
        share = max(needs.values()) / most
        shares.append(round(share, 4))
        for what, need in needs.items():
            if need / most > PLAUSIBLE_SHARE:
                checks.append(
                    f"{what} needs {need:,.0f} {unit}, {need / most:.1f} times the peak of "
                    f"{report.hardware.devices} x {report.hardware.chip} ({most:,.0f})"
                )
    return ImpliedWork(flops_share=shares[0], bytes_share=shares[1], checks=checks)


def _prompt_length(cell: BenchCell, metrics: CellMetrics) -> float:
    """Mean prompt tokens of a request that were not served from the prefix cache."""
    known = metrics.prompt_tokens
    length = float(cell.input_tokens)
    if known is not None:
        length = known.mean if known.mean is not None else float(known.median or length)
    if metrics.cached_tokens and metrics.requests_completed:
        length -= metrics.cached_tokens / metrics.requests_completed
    return max(length, 0.0)


def _output_length(cell: BenchCell, metrics: CellMetrics) -> float | None:
    """Mean output tokens of a request; None where neither counted nor asked for nor derivable."""
    known = metrics.completion_tokens
    if known is not None:
        return known.mean if known.mean is not None else known.median
    if metrics.output_tps is not None and metrics.request_rps:
        return metrics.output_tps / metrics.request_rps
    return cell.output_tokens


def _needed_tflops(work: SubjectWork, cell: BenchCell, metrics: CellMetrics) -> dict[str, float]:
    prompt, output = _prompt_length(cell, metrics), _output_length(cell, metrics)
    rate = metrics.request_rps
    if rate is None and metrics.output_tps is not None and output:
        rate = metrics.output_tps / output
    needs = {}
    if rate is not None:
        # Of an unknown output there is at least one token.
        each = prompt * work.prompt_flops + (output or 1) * work.token_flops
        needs[f"{rate:.4g} requests/s of {prompt:,.0f} tokens"] = rate * each / 1e12
    ttft = metrics.ttft_ms.median if metrics.ttft_ms else None
    if ttft:
        needs[f"a first token after {ttft:.4g} ms of {prompt:,.0f} tokens"] = (
            prompt * work.prompt_flops / (ttft / 1e3) / 1e12
        )
    return needs


def _needed_gbs(
    work: SubjectWork, cell: BenchCell, metrics: CellMetrics, subject: Subject
) -> dict[str, float]:
    needs = {}
    tpot = metrics.tpot_ms.median if metrics.tpot_ms else None
    one = work.bytes_per_step(1)
    if tpot and one:
        needs[f"an output token every {tpot:.4g} ms"] = one / (tpot / 1e3) / 1e9
    streams = cell.concurrency or (
        metrics.achieved_concurrency and int(metrics.achieved_concurrency)
    )
    step = work.bytes_per_step(streams) if streams else None
    if metrics.output_tps is not None and streams and step:
        # Only what the allocator says counts; anything else may have been one byte an element.
        known = subject.kv_dtype.evidence == "allocator" and subject.kv_dtype.value in (
            "bf16",
            "fp16",
        )
        cache = work.kv_read(int(_prompt_length(cell, metrics)), 2 if known else 1)
        needs[f"{metrics.output_tps:,.0f} output tokens/s in {streams} streams"] = (
            metrics.output_tps * (step / streams + cache) / 1e9
        )
    return needs


def _contradictions(cell: BenchCell, metrics: CellMetrics) -> list[str]:
    """Figures of one cell that cannot all be true, whatever the chip."""
    found = []
    edge = (cell.concurrency or 0) / metrics.requests_completed if metrics.requests_completed else 0
    most = 1 + CONSISTENT_SHARE + edge
    counted = metrics.completion_tokens.mean if metrics.completion_tokens else None
    if counted and metrics.output_tps is not None and metrics.request_rps:
        product = metrics.request_rps * counted
        if not 1 / most <= metrics.output_tps / product <= most:
            found.append(
                f"{metrics.output_tps:,.0f} output tokens/s, but requests times length is"
                f" {product:,.0f}"
            )
    tpot = metrics.tpot_ms.mean or metrics.tpot_ms.median if metrics.tpot_ms else None
    if cell.concurrency and tpot and metrics.output_tps is not None:
        ceiling = cell.concurrency * 1000 / tpot
        # Each request's first token is not in tpot; of short outputs it is a large share.
        length = _output_length(cell, metrics) or 1
        if length >= 2 and metrics.output_tps > most * ceiling * length / (length - 1):
            found.append(
                f"{metrics.output_tps:,.0f} output tokens/s, but {cell.concurrency} streams with "
                f"{tpot:.4g} ms a token give at most {ceiling:,.0f}"
            )
    e2e = metrics.e2e_ms.mean if metrics.e2e_ms else None
    if cell.concurrency and e2e and metrics.request_rps:
        held = metrics.request_rps * e2e / 1e3
        if held > most * cell.concurrency:
            found.append(f"{held:.1f} requests at once of {cell.concurrency} allowed")
    prompt = metrics.prompt_tokens.mean if metrics.prompt_tokens else None
    if prompt and abs(prompt / cell.input_tokens - 1) > PROMPT_LENGTH_SHARE:
        found.append(f"prompts of {prompt:,.0f} tokens went out, {cell.input_tokens:,} were asked")
    return found


def judged_report(report: BenchReport) -> BenchReport:
    """The report with `implied` worked out anew in every cell.

    A measured cell that cannot be true becomes a failed one, with the reason; an imported one keeps
    its figures under the mark, because what others published is itself the fact.
    """
    cells = []
    for cell in report.cells:
        implied = implied_work(report, cell)
        update: dict[str, object] = {"implied": implied}
        if implied is not None and implied.checks and report.run.kind == "measured":
            reason = f"implausible: {'; '.join(implied.checks)}"[:2000]
            update |= {"status": "failed", "reason": reason, "metrics": None, "implied": None}
        cells.append(cell.model_copy(update=update))
    return report.model_copy(update={"cells": cells})


def refusal_of_report(report: BenchReport) -> str:
    """Why the whole report is no evidence, or '': more than a tenth of its cells cannot be."""
    judged = [(cell, implied_work(report, cell)) for cell in report.cells]
    done = [(cell, implied) for cell, implied in judged if implied is not None]
    bad = [(cell, implied) for cell, implied in done if implied.checks]
    if len(bad) <= REFUSED_SHARE * len(done):
        return ""
    worst, implied = max(bad, key=lambda item: item[1].flops_share or item[1].bytes_share or 0)
    return (
        f"{len(bad)} of {len(done)} cells are impossible, so the run measured something else "
        f"(a prefix cache, or contexts that are not tokens); worst {worst.id}: {implied.checks[-1]}"
    )


# ── programs / judge ──────────────────────────────────────────────────────────────────────────────


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="judge.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 plausible, 1 a cell cannot be true, 2 wrong usage.",
    )
    parser.add_argument("report", nargs="?", type=Path, help="a report's file")
    parser.add_argument(
        "--question",
        action="store_true",
        help="read a question as one JSON object from standard input, and answer in JSON",
    )
    arguments = parser.parse_args(argv)
    if arguments.question == (arguments.report is not None):
        parser.error("give a report's file, or --question")
    name = "standard input" if arguments.question else printable(str(arguments.report))[:300]
    try:
        if arguments.question:
            return _answered(_bounded(sys.stdin.buffer.read(JUDGE_BYTES + 1)))
        with arguments.report.open("rb") as file:
            report = BenchReport.model_validate_json(_bounded(file.read(JUDGE_BYTES + 1)))
    except ValidationError as error:
        kind = "question" if arguments.question else "report"
        faults = "; ".join(schema_faults(error)[:3])
        print(f"judge.py: {name} is no {kind}: {redact(printable(faults))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"judge.py: {name}: {error.strerror}", file=sys.stderr)
        return 2
    text, plausible = judgement_text(report)
    print(redact(printable(text)))
    return 0 if plausible else 1


def _bounded(data: bytes) -> bytes:
    if len(data) > JUDGE_BYTES:
        raise OSError(errno.EFBIG, f"above {JUDGE_BYTES:,} bytes")
    return data


def _answered(data: bytes) -> int:
    """Answer the question `data` on standard output, in UTF-8 whatever the locale is."""
    answer = judge_answer(JudgeQuestion.model_validate_json(data))
    sys.stdout.buffer.write(answer.model_dump_json(exclude_none=True).encode() + b"\n")
    return 0


def judge_answer(question: JudgeQuestion) -> JudgeAnswer:
    """What the tables and the gate say to `question`."""
    if question.report is not None:
        return JudgeAnswer(report=judged_report(question.report))
    assert question.subject is not None  # the question's own promise
    return JudgeAnswer(subject=_known_subject(question.subject))


def _known_subject(asked: SubjectQuestion) -> KnownSubject:
    slot = HARDWARE_SLOTS.get(asked.slot)
    subject = subject_of_model(
        asked.model,
        asked.encoding,
        asked.geometry,
        kv_dtype=asked.kv_dtype,
        max_model_len=asked.max_model_len,
    )
    return KnownSubject(subject=subject, chip=asked.slot if slot is None else slot.chip)


def judgement_text(report: BenchReport) -> tuple[str, bool]:
    """What the gate says of `report`, for people, and whether every cell of it can be true."""
    lines, bad, judged = [], 0, 0
    for cell in report.cells:
        implied = implied_work(report, cell)
        if implied is None:
            lines.append(f"  {cell.id:<24} {cell.status}: {cell.reason}")
            continue
        judged += 1
        bad += bool(implied.checks)
        shares = (("compute", implied.flops_share), ("bandwidth", implied.bytes_share))
        known = ", ".join(
            f"{share:.1%} of the {what}" for what, share in shares if share is not None
        )
        lines.append(f"  {cell.id:<24} {known or 'no share is known'}")
        lines += [f"    cannot be: {check}" for check in implied.checks]
    if refusal := refusal_of_report(report):
        verdict = f"no evidence: {refusal}"
    elif bad:
        verdict = f"{bad} of {judged} cells cannot be true; the others stand"
    elif judged:
        verdict = f"plausible: nothing speaks against the {judged} cells that have figures"
    else:
        verdict = "nothing to judge: no cell has figures"
    return "\n".join([*_told_of(report), *lines, verdict]), not bad


def _told_of(report: BenchReport) -> list[str]:
    """What the figures are told of, and what it can do at most."""
    subject, hardware = report.subject, report.hardware
    peak = peak_of_hardware(hardware, subject.encoding)
    known = [
        f"{value:,.0f} {unit}"
        for value, unit in ((peak.tflops, "TFLOP/s"), (peak.gbs, "GB/s"))
        if value
    ]
    lines = [
        f"{report.run.id}: {report.run.kind}, {subject.model} ({subject.encoding}) by"
        f" {report.engine.name} on {hardware.devices} x {hardware.chip}",
        f"peak: {', '.join(known) or 'unknown, so that no share can be told'}",
    ]
    if work_of_subject(subject) is None:
        lines.append("the model is in no table: its figures are held against each other alone")
    return lines


if __name__ == "__main__":
    sys.exit(main())
