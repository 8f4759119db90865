# Built from forge/programs/plan.py by `python3 -m forge.build`: edit it there.

"""Works out before anything is paid for whether a Gemma 4 fits, how fast it is and what it costs.

    python3 plan.py --model E2B --hardware v6e1 --engine vllm --context 65536 --streams 8

Arithmetic over the house's tables, each figure with its source: offline, and nothing but the
standard library. It needs no server and no installed package. Exit status: 0 it fits, 1 it does
not, 2 wrong usage.
"""

# Contents, by line:
#    47 ground / errors: The one exception that a tool raises on purpose, and the closed set of …
#    93 ground / names: Closed grammars for every identifier that a tool takes. What does not …
#   155 knowledge / figures: A number that carries its unit, source and date, or says that nobody …
#   208 knowledge / geometry: The shape of a decoder: layers, heads, widths.
#   309 knowledge / cache_bytes: How many bytes the keys and values of a model's sequences take.
#   367 knowledge / hardware: The accelerators that rigs run on: memory, bandwidth, compute, …
#   705 knowledge / memory: How many bytes a model's weights take, and how many of them one decode …
#   912 knowledge / models: The Gemma 4 family: shapes, towers, and which checkpoints exist under …
#  1286 knowledge / plan_answer: What is asked of the planner and what it answers: the forms that …
#  1432 knowledge / planner_engines: What the planner must be told of an engine: its shares, …
#  1531 knowledge / engine_profiles: What each engine does with memory and time on each family of …
#  1916 knowledge / planner_memory: What a model takes of a device under an engine: weights, …
#  2152 knowledge / planner_fit: Does a model fit on a piece of hardware under an engine, and on …
#  2491 knowledge / planner_changes: Which single change would make a plan fit that does not: less …
#  2566 knowledge / planner_money: What a rate per hour means per token, and when renting beats an …
#  2622 knowledge / planner_speed: How fast a model decodes on a chip: the roofline, and the same …
#  2736 knowledge / prices: What renting an accelerator costs, per provider, region and way of …
#  2901 knowledge / planner: A deployment before it is paid for: fit, speed, money, and what would …
#  3172 knowledge / planner_refusal: The refusal of what a plan says cannot be served: the whole …
#  3255 knowledge / planner_answers: Answers a question to the planner: looks its names up, plans, …
#  3422 programs / plan: Works out before anything is paid for whether a Gemma 4 fits, how fast it …

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

# ── ground / errors ───────────────────────────────────────────────────────────────────────────────
# The one exception that a tool raises on purpose, and the closed set of its classes.
#
# Knows nothing about MCP: the guarded tool of the assembly turns it into the client's error text.

ErrorClass = Literal[
    "INVALID",
    "DENIED",
    "NOT_FOUND",
    "EXISTS",
    "QUOTA",
    "CAPACITY",
    "AUTH",
    "UNKNOWN",
    "TIMEOUT",
    "UNREACHABLE",
    "PARTIAL",
    "BUSY",
    "CANCELLED",
    "INTERNAL",
]


class RigError(Exception):
    """An anticipated failure: its class, what happened and why, and the next step.

    `str()` gives the text that a client sees: ``CLASS what. Next: step``. The class is always the
    first word, so that an agent can branch on it without reading prose.
    """

    def __init__(self, error_class: ErrorClass, what: str, next_step: str = "") -> None:
        super().__init__(error_class, what, next_step)
        self.error_class: ErrorClass = error_class
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.error_class} {self.what.rstrip('.')}."
        return f"{text} Next: {self.next_step}" if self.next_step else text


def invalid_parameter(parameter: str, why: str) -> RigError:
    """The refusal of one argument, by its name. The value is never repeated: it may be a secret."""
    return RigError("INVALID", f"{parameter}: {why}; nothing was started")


# ── ground / names ────────────────────────────────────────────────────────────────────────────────
# Closed grammars for every identifier that a tool takes. What does not match is refused by name.
#
# Knows forms only: whether a thing of that name exists is somebody else's question.

# What a string may be, by kind: the expression (always matched whole) and its wording for people.
_GRAMMARS: dict[str, tuple[re.Pattern[str], str]] = {
    "resource": (
        re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"),
        "1 to 63 lower-case letters, digits and dashes, a letter first",
    ),
    "zone": (
        re.compile(r"[a-z]{2,12}(?:-[a-z]{2,14}){1,2}-?[0-9]{1,2}-?[a-z]"),
        "a zone such as us-east5-b",
    ),
    "job": (
        re.compile(r"[a-z]{3,16}-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"),
        "a job's id as a tool gave it, such as serve-20260131-120000-1a2b3c",
    ),
    "token": (re.compile(r"[0-9a-f]{32}"), "the 32 characters that plan_destroy gave"),
    "model": (
        re.compile(
            r"embedded"
            r"|[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
            r"|(?:/[A-Za-z0-9._+@=][A-Za-z0-9 ._+@=-]{0,200}){1,20}"
        ),
        "'embedded', a Hugging Face id such as google/gemma-4-E2B-it, or an absolute folder",
    ),
}
_TEXT_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def checked_name(kind: str, parameter: str, value: str) -> str:
    """`value` if it is wholly of the grammar `kind`; else INVALID with the parameter's name."""
    pattern, wording = _GRAMMARS[kind]
    if len(value) > 4096 or ".." in value or not pattern.fullmatch(value):
        raise invalid_parameter(parameter, f"must be {wording}")
    return value


def checked_text(parameter: str, value: str, limit: int, *, empty_ok: bool = False) -> str:
    """Free text for a model: 1 to `limit` characters, no control characters but newline and tab.

    Free text is data: it never becomes part of an argument list, a path or a shell string.
    """
    if len(value) > limit:
        raise invalid_parameter(parameter, f"at most {limit} characters, this has {len(value)}")
    if not value.strip() and not (empty_ok and not value):
        raise invalid_parameter(parameter, "is empty")
    if _TEXT_FORBIDDEN.search(value):
        raise invalid_parameter(parameter, "holds control characters or broken Unicode")
    return value


def slug_of(name: str) -> str:
    """The published form of a rig's name: underscores become dashes (``q4_0`` -> ``q4-0``).

    Three clients refuse an underscore in a plugin's, extension's or skill's name.
    """
    return name.replace("_", "-")


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


# ── knowledge / plan_answer ───────────────────────────────────────────────────────────────────────
# What is asked of the planner and what it answers: the forms that plan.py and the server share.
#
# Knows no table, no arithmetic and no program.

MAX_PLANNED_CONTEXT = 262_144  # tokens; the longest context of any Gemma 4
_FLASH_LITE = (
    "Gemini 2.5 Flash-Lite list price, as quoted by dev.to, Self-Hosted Gemma 4 on TPU v6e"
)
# The API that a deployment is compared with, unless the question names other prices.
API_OUTPUT_PRICE = Figure(0.40, "USD/M tokens", _FLASH_LITE, "2026-07-25")
API_INPUT_PRICE = Figure(
    0.10, "USD/M tokens", "Gemini 2.5 Flash-Lite list price, as stored pages quote it", "2026"
)
PlanVerdict = Literal["fits", "refused by arithmetic", "refused by an estimate"]
PlanRenting = Literal["on-demand", "spot", "flex-start"]


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model that is in no table, whose weights lie on this computer.

    `stored` is how the file holds them; what is no key of WEIGHT_ENCODINGS counts as bf16.
    """

    geometry: Geometry
    stored: str


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """One deployment to be planned. Zero, empty and None mean: the tables' or the engine's own.

    model: a size, a slot, a repository, or any name if `own` has its shape. hardware, engine: slots
    of a rig's name, or a chip. context: tokens of one stream, `output` of them answered. streams:
    at once. utilization: share of memory that the engine takes. batched_tokens: of vLLM.
    memory_gib: memory of one device that is free, physical_gib: that it has.
    usd_per_hour: of all devices. api_input, api_output: USD per million tokens of an API.
    cold_start_s: seconds that this rig's own starts took, as of cold_start_day.
    settings: the keys that the asking rig has, in which a refusal can then speak.
    """

    model: str
    hardware: str
    engine: str
    own: OwnModel | None = None
    encoding: str = ""
    context: int = 4096
    streams: int = 1
    kv_dtype: str = "auto"
    utilization: float = 0.0
    batched_tokens: int = 0
    memory_gib: float = 0.0
    physical_gib: float = 0.0
    output: int = 128
    usd_per_hour: float | None = None
    provisioning: PlanRenting = "on-demand"
    api_input: float = float(API_INPUT_PRICE.known("input"))
    api_output: float = float(API_OUTPUT_PRICE.known("output"))
    cold_start_s: float | None = None
    cold_start_day: str = ""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """One change that would make it fit, in words, and the question that it leads to."""

    words: str
    model: str
    encoding: str
    hardware: str
    engine: str
    context: int
    streams: int
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A deployment on paper. Sizes are bytes on one device, rates are output tokens a second.

    memory_bytes has every summand and the sums, tokens_per_s the roofline and the estimate by
    operating point, usd what is known of money by name. cold_start_s and break_even_tokens_per_s
    are None where nobody knows. assumptions: what the figures rest on, one sentence each.
    """

    summary: str
    fits: bool
    verdict: PlanVerdict
    reasons: tuple[str, ...]
    changes: tuple[PlannedChange, ...]
    devices: int
    memory_bytes: Mapping[str, int]
    resident_kv_tokens: int
    kv_layout: str
    streams_at_context: float
    tokens_per_s: Mapping[str, float]
    cold_start_s: float | None
    usd: Mapping[str, float]
    break_even_tokens_per_s: float | None
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """Why a deployment is refused, with the whole sum, and what would fit.

    hard: by arithmetic, which nobody may override.
    """

    what: str
    next_step: str
    hard: bool


@dataclass(frozen=True, slots=True)
class PlanFault:
    """Why a question has no answer: the parts of the error that a client is shown."""

    error_class: ErrorClass
    what: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Either a plan, with a refusal where it does not fit, or the fault of the question."""

    plan: PlannedDeployment | None = None
    refusal: PlanRefusal | None = None
    fault: PlanFault | None = None


def question_of(data: Mapping[str, Any]) -> PlanQuestion:
    """The question that was written as a JSON object. Raises TypeError or ValueError for another
    form: it names an unknown key, a missing one, or a shape that no model can have."""
    values = dict(data)
    own = values.get("own")
    if own is not None:
        shape = dict(own["geometry"])
        shape["layer_types"] = tuple(shape["layer_types"])
        values["own"] = OwnModel(Geometry(**shape), str(own["stored"]))
    return PlanQuestion(**values | {"settings": tuple(values.get("settings", ()))})


# ── knowledge / planner_engines ───────────────────────────────────────────────────────────────────
# What the planner must be told of an engine: its shares, overheads and ways with memory.
#
# Types only; the values stand in the engines' profiles.

GIB_BYTES = 2**30
# imported: read off a report or a source text. fitted: chosen so that the named figures come out.
# borrowed: another engine's value, for want of one. placeholder: a guess that nothing supports yet.
EngineBasis = Literal["imported", "fitted", "borrowed", "placeholder"]
# "hybrid" is vLLM's paged cache for two kinds of layers; the other two are the memory module's.
EngineKvLayout = Literal["uniform", "ring", "hybrid"]
EngineTower = Literal["vision", "audio"]


@dataclass(frozen=True, slots=True)
class EngineValue:
    """One constant of an engine: the number, how it was come by, from what, and when."""

    value: float
    basis: EngineBasis
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class HostCurve:
    """Milliseconds that host and scheduler add to a decode step, by streams: h(c).

    points: (streams, ms), rising. One stream costs nothing extra: that is in the step's overhead.
    Beyond the last point the last ratio goes on, which is a guess and is called one.
    """

    points: tuple[tuple[int, float], ...]
    basis: EngineBasis
    source: str
    date: str

    def ms(self, streams: int) -> float:
        """h(streams) in ms: linear between points, proportional beyond the last; 0 without any."""
        known = ((1, 0.0), *self.points)
        if streams <= 1 or not self.points:
            return 0.0
        last_streams, last_ms = known[-1]
        if streams > last_streams:
            return last_ms * streams / last_streams
        for (low, low_ms), (high, high_ms) in zip(known, known[1:], strict=False):
            if streams <= high:
                return low_ms + (high_ms - low_ms) * (streams - low) / (high - low)
        return last_ms

    def reaches(self, streams: int) -> bool:
        """Whether `streams` lies within what was measured."""
        return streams <= 1 or (bool(self.points) and streams <= self.points[-1][0])


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine on one family of chips.

    efficiency: share of the memory's peak bandwidth that a decode step reaches.
    step_overhead: ms of a decode step that move no weights. host: h(c) on top, for c streams.
    prefill_share: share of peak compute that a prompt reaches.
    overhead: bytes that the engine holds beside weights and cache, inside its share of memory.
    utilization: the share of visible memory that it takes; reserve: bytes that must stay outside.
    layout: how its cache lies. towers: which of them it loads, with `dead_kv` the unused K/V
      projections of the plain E2B and E4B exports too.
    ple_on_host: the PLE table (and the embedding's gather) stays in the host's memory.
    encodings: what it can load; an encoding outside is refused softly, with `encodings_source`.
    reference_int4: 4-bit weights are expanded to bf16 in every step: packed read + one bf16 pass.
    tpu_blocks: its cache comes in the blocks that vLLM on a TPU derives from the longest sequence.
    wide_kv: a one-byte cache takes two bytes a number all the same.
    static_slots: caches of all streams are made at the start; otherwise requests wait for pages.
    max_streams: streams that decode together; 0 without a limit of its own. max_devices: over
      how many devices it splits a model.
    """

    name: str
    efficiency: EngineValue
    step_overhead: EngineValue
    host: HostCurve
    prefill_share: EngineValue
    overhead: EngineValue
    utilization: EngineValue
    reserve: EngineValue
    layout: EngineKvLayout
    towers: tuple[EngineTower, ...]
    encodings: tuple[str, ...]
    encodings_source: str
    dead_kv: bool = False
    ple_on_host: bool = False
    reference_int4: bool = False
    tpu_blocks: bool = False
    wide_kv: bool = False
    static_slots: bool = False
    max_streams: int = 0
    max_devices: int = 1
    caveat: str = ""


# ── knowledge / engine_profiles ───────────────────────────────────────────────────────────────────
# What each engine does with memory and time on each family of chips: the planner's constants.
#
# Every value says where it comes from and whether it was fitted, borrowed or guessed. Knows no
# model's shape and does no planning.

_DEV_GRID = "xbill9/gemma4-dev, v6e grid of vLLM"
_DEV_REPORTS = "xbill9/gemma4-dev"
_DEV_QUANTIZATION = "xbill9/gemma4-dev, QUANTIZATION, 2026-08-20"
_VLLM_SOURCE = "vLLM 0.32 source"
_PLANNER_DATE = "2026-11-29"  # the day a value without a dated source was set down

_FIT_V6E = f"{_DEV_GRID}: E2B, E4B and 12B at 128 tokens, 2 parameters over 3 points"
_V6E_EFFICIENCY = EngineValue(0.68, "fitted", _FIT_V6E, "2026-07-25")
_V6E_STEP = EngineValue(0.60, "fitted", _FIT_V6E, "2026-07-25")
_V6E_HOST = HostCurve(
    ((4, 0.55), (8, 1.35), (16, 3.2), (32, 12.1), (64, 19.2)),
    "fitted",
    f"{_DEV_GRID}, E2B; differs by engine version and host",
    "2026-07-25",
)
_V6E_PREFILL = EngineValue(
    0.32, "fitted", "dev.to, Self-Hosted Gemma 4 on TPU v6e: 1024 tokens in 16 ms", "2026-07-25"
)
_NO_HOST_CURVE = HostCurve((), "placeholder", "no run with several streams is known", _PLANNER_DATE)
_NOTHING = EngineValue(0.0, "imported", f"{_DEV_REPORTS}: pools of vLLM on v5e, v6e", "2026-08-10")
_NO_RESERVE = EngineValue(0.0, "placeholder", "nothing is known to need it", _PLANNER_DATE)
_ALL_OF_IT = EngineValue(1.0, "placeholder", "it takes what it needs, no share", _PLANNER_DATE)
_TPU_RESERVE = EngineValue(
    1.26 * GIB_BYTES,
    "imported",
    f"{_DEV_REPORTS}: on a v5e .92 boots, and .95 dies of 37 MB after 691 s of compiling",
    "2026-08-09",
)
_VLLM_SHARE = EngineValue(0.90, "imported", "the flag of the published boots", "2026-07-25")
_CUDA_EFFICIENCY = EngineValue(
    0.65, "fitted", f"{_DEV_REPORTS}: 43.1 tok/s of E2B on a T4G, one point", "2026-08"
)
_CUDA_STEP = EngineValue(1.0, "placeholder", "set beside the one efficiency point", "2026-08")
_CUDA_OVERHEAD = EngineValue(
    0.6 * GIB_BYTES,
    "fitted",
    f"{_DEV_REPORTS}: T4G boot of E2B; grows with the batched tokens, see cuda_overhead_bytes",
    "2026-08",
)
_L4_PREFILL = EngineValue(
    0.35, "imported", f"{_DEV_REPORTS}: first-touch cells of L4 grids, .35 to .53", "2026-07-12"
)
_TORCH_OVERHEAD = EngineValue(
    0.8e9, "fitted", f"{_DEV_REPORTS}: peak RSS of 5.71 GB for E2B in transformers", "2026-09-04"
)
_JAX_CPU_OVERHEAD = EngineValue(
    1.34e9,
    "fitted",
    "local-jax-cpu-2b: 0.61 GB with 10 layers and 0.90 with 20, drawn on to E2B's 35",
    "2026-11-30",
)


def _lent_value(value: EngineValue, lender: str) -> EngineValue:
    return EngineValue(value.value, "borrowed", f"{lender}'s: {value.source}", value.date)


def _lent_curve(curve: HostCurve, lender: str) -> HostCurve:
    return HostCurve(curve.points, "borrowed", f"{lender}'s: {curve.source}", curve.date)


_VLLM_LOADS = ("f32", "bf16", "fp16", "fp8", "int8", "w4a16")
_PLAIN_LOADS = ("f32", "bf16", "fp16")
_VLLM_TPU = EngineProfile(
    name="vLLM on TPU",
    efficiency=_V6E_EFFICIENCY,
    step_overhead=_V6E_STEP,
    host=_V6E_HOST,
    prefill_share=_V6E_PREFILL,
    overhead=_NOTHING,
    utilization=_VLLM_SHARE,
    reserve=_TPU_RESERVE,
    layout="uniform",
    towers=("vision",),
    encodings=("bf16",),
    encodings_source=_DEV_QUANTIZATION,
    dead_kv=True,
    tpu_blocks=True,
    wide_kv=True,
    max_devices=8,
)
_VLLM_CUDA = EngineProfile(
    name="vLLM on CUDA",
    efficiency=_CUDA_EFFICIENCY,
    step_overhead=_CUDA_STEP,
    host=_lent_curve(_V6E_HOST, "vLLM on TPU"),
    prefill_share=_L4_PREFILL,
    overhead=_CUDA_OVERHEAD,
    utilization=_VLLM_SHARE,
    reserve=_NO_RESERVE,
    layout="hybrid",
    towers=("vision", "audio"),
    encodings=_VLLM_LOADS,
    encodings_source=f"{_VLLM_SOURCE}; no GGUF module",
    dead_kv=True,
    max_devices=8,
)
_JAX_TPU = EngineProfile(
    name="the JAX engine on TPU",
    efficiency=_lent_value(_V6E_EFFICIENCY, "vLLM on TPU"),
    step_overhead=_lent_value(_V6E_STEP, "vLLM on TPU"),
    host=_NO_HOST_CURVE,
    prefill_share=_lent_value(_V6E_PREFILL, "vLLM on TPU"),
    overhead=_lent_value(_NOTHING, "vLLM on TPU"),
    utilization=_ALL_OF_IT,
    reserve=_lent_value(_TPU_RESERVE, "vLLM on TPU"),
    layout="ring",
    towers=(),
    encodings=("bf16", "int8", "w4a16"),
    encodings_source="the engine itself",
    reference_int4=True,
    static_slots=True,
)
_JAX_CUDA = EngineProfile(
    name="the JAX engine on CUDA",
    efficiency=EngineValue(
        0.75, "fitted", f"{_DEV_REPORTS}: 48.4 tok/s of E2B on an L4", "2026-08-28"
    ),
    step_overhead=_lent_value(_V6E_STEP, "vLLM on TPU"),
    host=_NO_HOST_CURVE,
    prefill_share=_lent_value(_L4_PREFILL, "vLLM on CUDA"),
    overhead=_lent_value(_CUDA_OVERHEAD, "vLLM on CUDA"),
    utilization=EngineValue(
        0.90, "imported", f"{_DEV_REPORTS}: XLA_PYTHON_CLIENT_MEM_FRACTION", "2026-08-28"
    ),
    reserve=_NO_RESERVE,
    layout="ring",
    towers=(),
    encodings=("bf16", "fp16", "w4a16"),
    encodings_source=f"{_DEV_REPORTS}, rigs' READMEs, 2026-08-28",
    reference_int4=True,
    static_slots=True,
)
_TORCH_CUDA = EngineProfile(
    name="PyTorch on CUDA",
    efficiency=_lent_value(_CUDA_EFFICIENCY, "vLLM on CUDA"),
    step_overhead=_lent_value(_CUDA_STEP, "vLLM on CUDA"),
    host=_NO_HOST_CURVE,
    prefill_share=_lent_value(_L4_PREFILL, "vLLM on CUDA"),
    overhead=_lent_value(_TORCH_OVERHEAD, "PyTorch on the CPU"),
    utilization=_ALL_OF_IT,
    reserve=_NO_RESERVE,
    layout="uniform",
    towers=("vision", "audio"),
    encodings=_PLAIN_LOADS,
    encodings_source="transformers 5.24",
    max_streams=1,
)
_LLAMACPP_CUDA = EngineProfile(
    name="llama.cpp on CUDA",
    efficiency=EngineValue(
        0.60, "fitted", f"{_DEV_REPORTS}: 73.75 tok/s of E2B q4_0 on a GTX 1650 Ti", "2026-09-03"
    ),
    step_overhead=_lent_value(_CUDA_STEP, "vLLM on CUDA"),
    host=_NO_HOST_CURVE,
    prefill_share=_lent_value(_L4_PREFILL, "vLLM on CUDA"),
    overhead=EngineValue(
        0.25e9,
        "placeholder",
        f"{_DEV_REPORTS}: 1618 MiB less 1341 MiB of weights, cache included",
        "2026-09-03",
    ),
    utilization=_ALL_OF_IT,
    reserve=_NO_RESERVE,
    layout="ring",
    towers=(),
    encodings=("bf16", "fp16", "q4_0"),
    encodings_source="llama.cpp's converter for gemma4",
    ple_on_host=True,
    static_slots=True,
    caveat="its prompts do not batch: the wait for a first token doubles with the streams",
)


def _on_cpu(name: str, like: EngineProfile, **changes: object) -> EngineProfile:
    """`like` on the host's processor, whose bandwidth figure is an effective one already."""
    common: dict[str, object] = {
        "name": name,
        "efficiency": EngineValue(
            1.0, "borrowed", "the processor's bandwidth figure is effective, no peak", "2026-09-04"
        ),
        "step_overhead": EngineValue(0.0, "placeholder", "lost in the noise", _PLANNER_DATE),
        "host": _NO_HOST_CURVE,
        "overhead": _TORCH_OVERHEAD,
        "utilization": _ALL_OF_IT,
        "reserve": _NO_RESERVE,
        "ple_on_host": False,
        "wide_kv": False,
        "max_devices": 1,
        "caveat": "",
    }
    return replace(like, **(common | changes))  # type: ignore[arg-type]


def _renamed(name: str, like: EngineProfile, **changes: object) -> EngineProfile:
    return replace(like, name=name, **changes)  # type: ignore[arg-type]


_NEURON_TORCH = _renamed(
    "PyTorch on Neuron",
    _JAX_TPU,
    efficiency=EngineValue(
        0.5, "fitted", f"{_DEV_REPORTS}: 44 to 46 tok/s of E2B on one core", "2026-08"
    ),
    step_overhead=EngineValue(0.0, "fitted", "with the efficiency", "2026-08"),
    reserve=_NO_RESERVE,
    layout="uniform",
    encodings=("bf16", "fp16"),
    encodings_source=f"{_DEV_REPORTS}: no gain from int8 in the graph",
    ple_on_host=True,
    reference_int4=False,
    caveat="the served build keeps 128 tokens of cache, and uses one core",
)

# By runtime slot and family of chips.
ENGINE_PROFILES: dict[str, EngineProfile] = {
    "vllm-tpu": _VLLM_TPU,
    "vllm-cuda": _VLLM_CUDA,
    "vllm-rocm": _renamed(
        "vLLM on ROCm",
        _VLLM_CUDA,
        efficiency=_lent_value(_CUDA_EFFICIENCY, "vLLM on CUDA"),
        step_overhead=_lent_value(_CUDA_STEP, "vLLM on CUDA"),
        prefill_share=_lent_value(_V6E_PREFILL, "vLLM on TPU"),
        caveat="nothing was benchmarked on an MI300X: speeds are borrowed constants",
    ),
    "vllm-cpu": _on_cpu(
        "vLLM on the CPU",
        _VLLM_CUDA,
        host=_lent_curve(_V6E_HOST, "vLLM on TPU"),
        encodings=("f32", "bf16", "fp16", "w4a16"),
    ),
    "jax-tpu": _JAX_TPU,
    "jax-cuda": _JAX_CUDA,
    "jax-cpu": _on_cpu(
        "the JAX engine on the CPU",
        _JAX_CUDA,
        overhead=_JAX_CPU_OVERHEAD,
        encodings=("f32", "bf16"),
        encodings_source="the engine itself",
        reference_int4=False,
    ),
    "jax-neuron": _renamed("the JAX engine on Neuron", _NEURON_TORCH),
    "jaxrust-tpu": _renamed("the Rust host on TPU", _JAX_TPU, encodings=("bf16",)),
    "jaxrust-cuda": _renamed("the Rust host on CUDA", _JAX_CUDA, encodings=("bf16", "fp16")),
    "pytorch-tpu": _renamed(
        "PyTorch on TPU",
        _JAX_TPU,
        layout="uniform",
        max_streams=1,
        caveat="the static loop keeps no cache and reads its whole buffer for every token",
    ),
    "pytorch-cuda": _TORCH_CUDA,
    "pytorch-cpu": _on_cpu("PyTorch on the CPU", _TORCH_CUDA),
    "pytorch-neuron": _NEURON_TORCH,
    "llamacpp-cuda": _LLAMACPP_CUDA,
    "llamacpp-cpu": _on_cpu("llama.cpp on the CPU", _LLAMACPP_CUDA, encodings=("q4_0", "bf16")),
    "ollama-cuda": _renamed(
        "Ollama on CUDA",
        _LLAMACPP_CUDA,
        towers=("vision", "audio"),
        caveat="the stock tag loads both towers; a tag without its projector saves them",
    ),
    "ollama-cpu": _on_cpu("Ollama on the CPU", _LLAMACPP_CUDA, towers=("vision", "audio")),
}

CHIP_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("v5e", "v5p", "v6e"), "tpu"),
    **dict.fromkeys(("l4", "t4", "t4g", "a10g", "h100", "h200", "1650ti"), "cuda"),
    "mi300x": "rocm",
    "inf2": "neuron",
    "cpu": "cpu",
}


def engine_profile(runtime: str, chip: str) -> EngineProfile:
    """The profile of a runtime slot ("vllm") on a chip; ValueError that lists what there is."""
    family = CHIP_FAMILIES.get(chip, chip)
    profile = ENGINE_PROFILES.get(f"{runtime}-{family}")
    if profile is None:
        runtimes = [key.split("-")[0] for key in ENGINE_PROFILES if key.endswith(f"-{family}")]
        known = ", ".join(runtimes) or "none"
        raise ValueError(f"no engine {runtime!r} is known for {chip}; known there: {known}")
    return profile


def vllm_batched_tokens(visible_gib: float, *, a100: bool = False) -> int:
    """vLLM's default of max_num_batched_tokens for its API server, by device memory.

    Source: vLLM 0.32 (checks the name for the A100): 2048 below 70 GiB, 8192 below 160, else 16384.
    """
    if visible_gib < 70 or a100:
        return 2048
    return 8192 if visible_gib < 160 else 16384


def cuda_overhead_bytes(batched_tokens: int) -> float:
    """Bytes that vLLM on CUDA holds beside weights and cache, by max_num_batched_tokens.

    0.6 GiB at 2048 (E2B on a T4G) and 1.2 GiB at 4096 (12B on an L4), both fitted; they lie on a
    line through the origin, which is drawn on. At 16384 it gives 4.8, and one boot left 7.9 free.
    """
    return _CUDA_OVERHEAD.value * max(1.0, batched_tokens / 2048)


_V6E_ARTICLE_COLD = "dev.to, Self-Hosted Gemma 4 on TPU v6e: boot to healthy"
_COLD_STARTS: Mapping[tuple[str, str, str], Figure] = {
    ("vllm-tpu", "v6e", "E2B"): Figure(510, "s", _V6E_ARTICLE_COLD, "2026-07-25"),
    ("vllm-tpu", "v6e", "E4B"): Figure(524, "s", _DEV_GRID, "2026-07-25"),
    ("vllm-tpu", "v6e", "12B"): Figure(622, "s", _DEV_GRID, "2026-07-25"),
    ("vllm-tpu", "v5e", "E2B"): Figure(
        857, "s", _DEV_REPORTS, "2026-08-09", note="497 with a warm compile cache"
    ),
    ("jax-cuda", "t4g", "E2B"): Figure(158.8, "s", _DEV_REPORTS, "2026-08", note="loading only"),
}


def cold_start_figure(runtime: str, chip: str, size: str) -> Figure:
    """Seconds from the create call to the first answer, where somebody has said; else unmeasured.

    `size` is a key of GEMMA4. The weights' download is in it where the source counted it.
    """
    key = (f"{runtime}-{CHIP_FAMILIES.get(chip, chip)}", chip, size)
    return _COLD_STARTS.get(key, unmeasured_figure("s", f"no start of {size} there is on record"))


# Where the model is known to fail: runtime, chips, sizes (none: every size), what was seen.
_KNOWN_MISSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        "jax",
        ("t4", "t4g"),
        (),
        "the estimate is known to be 3.4 times too high there: 13.1 tok/s of E2B were measured,"
        " because 87 % of the time goes into type conversion and f32 products"
        f" ({_DEV_REPORTS}, 2026-08-28)",
    ),
    (
        "llamacpp",
        ("t4", "t4g"),
        (),
        "nothing of llama.cpp was measured on that card, and its rate is likely lower: engines"
        " there wait for kernels to be launched rather than for memory (3.5 GB less of weights"
        " moved another engine by 0.0 %). What the weights leave free is the gain, not speed"
        f" ({_DEV_REPORTS}, README, 2026-09)",
    ),
    (
        "vllm",
        ("v6e",),
        ("12B",),
        "the cache is known to be half of this there: about 8.7 K tokens were inferred where 18.2 K"
        f" are predicted ({_DEV_GRID}, 2026-07-25)",
    ),
    (
        "vllm",
        ("l4",),
        (),
        "the overhead was fitted on vLLM's first runner of the model; since 0.29 a second one is"
        " usual, which was seen to take 0.9 GiB more for the cache of Gemma 4 on 24 GB cards, and"
        " to run out of memory under load at a share of .94 (vllm-project/vllm#50159, 2026-07-28)",
    ),
    (
        "vllm",
        ("v5e",),
        (),
        "with 64 streams a step took 44 % longer there than estimated"
        f" ({_DEV_REPORTS}, 2026-08-09)",
    ),
)


def known_misses(runtime: str, chip: str, size: str) -> list[str]:
    """What is known to be wrong with the planner's figures for an engine on a chip."""
    return [
        text
        for engine, chips, sizes, text in _KNOWN_MISSES
        if engine == runtime and chip in chips and (not sizes or size in sizes)
    ]


# ── knowledge / planner_memory ────────────────────────────────────────────────────────────────────
# What a model takes of a device under an engine: weights, loading peak, cache pool, streams.
#
# Knows no speed and no price, and decides nothing: it lists summands in bytes.

KV_ELEMENT_BYTES: Mapping[str, float] = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "f32": 4}
QUANTIZED_ON_LOAD = ("fp8", "int8")  # what vLLM can make of a bf16 checkpoint while loading
# What is known of that: one trial, and a source that nobody has tried on such a card.
ON_LOAD_TRIED = "an L4 was full at 21.61 GiB that way (dev.to, 12B Gemma 4 on Cloud Run, 2026-05)"
ON_LOAD_SINCE = (
    "by its source vLLM 0.32.0 quantises each layer as it is read and may need less, which nobody "
    "is known to have tried there"
)
_VLLM_BASE_BLOCK = 16  # tokens of the smallest cache block on a GPU
_TPU_SEQUENCE_BLOCKS = 512  # vLLM on a TPU cuts the longest sequence into that many blocks


def device_shard(geometry: Geometry, devices: int) -> Geometry:
    """The geometry of one device's share of attention under tensor parallelism, for its cache.

    A single KV head is not split but repeated on every device (E2B). Raises ValueError where the
    query heads do not divide.
    """
    if geometry.heads % devices:
        raise ValueError(f"{geometry.heads} heads do not divide over {devices} devices")
    return replace(
        geometry,
        heads=geometry.heads // devices,
        kv_heads=max(1, geometry.kv_heads // devices),
        global_kv_heads=max(1, geometry.global_kv_heads // devices),
    )


def resident_parts(
    geometry: Geometry,
    encoding: str,
    profile: EngineProfile,
    towers: Mapping[EngineTower, int],
    *,
    devices: int = 1,
) -> dict[str, int]:
    """Bytes of weights that stay on one device, by part; what goes to the host is left out.

    towers: bytes of the vision and audio parts in bf16, of which the engine loads its own. With
    several devices an even split is assumed. Raises ValueError for an unknown encoding.
    """
    table = ple_bytes(geometry, encoding)
    text = weight_bytes(geometry, encoding) - table
    parts: dict[str, int] = {"text weights": text}
    if table and not profile.ple_on_host:
        parts["per-layer embedding table"] = table
    dead = weight_bytes(geometry, encoding, dead_kv=True) - table - text
    if dead and profile.dead_kv and encoding in ("f32", "bf16", "fp16"):
        parts["unused K/V projections of the plain export"] = dead
    for tower in profile.towers:
        if towers.get(tower):
            parts[f"{tower} tower"] = towers[tower]
    return {name: math.ceil(size / devices) for name, size in parts.items()}


def loading_extra(
    geometry: Geometry, encoding: str, profile: EngineProfile, *, from_bf16: bool, devices: int = 1
) -> dict[str, int]:
    """Bytes that one device holds while loading, on top of the resident ones, by reason.

    from_bf16: the whole bf16 text is taken to stand there before anything is quantised: an L4 was
    full on the way from 12B's bf16 to fp8 (see ON_LOAD_TRIED). By its source vLLM 0.32.0 does
    otherwise: built with its CPU release and fp8_per_tensor, 12B's shape holds 2.01 GB (embedding
    and norms) before a weight is read, and 21.83 GB of matrices come one at a time and are made
    eight-bit at once (2026-11-30). No GPU was at hand to see its peak, so the larger one counts.
    The -w4a16-ct exports carry a bf16 copy of the tied head until it is tied.
    """
    extra: dict[str, int] = {}
    if from_bf16:
        extra["bf16 weights before quantisation"] = weight_bytes(geometry, "bf16") - weight_bytes(
            geometry, encoding
        )
    elif encoding == "w4a16" and geometry.tied and not profile.ple_on_host:
        extra["second copy of the tied head"] = 2 * parameter_counts(geometry).embed
    return {name: math.ceil(size / devices) for name, size in extra.items()}


def cache_pool_bytes(
    visible_gib: float, utilization: float, resident: float, overhead: float = 0.0
) -> float:
    """Bytes left for the cache: visible memory x utilization - resident - overhead; may be < 0."""
    return visible_gib * GIB_BYTES * utilization - resident - overhead


def tpu_block_tokens(max_model_len: int) -> int:
    """Tokens of a cache block that vLLM on a TPU derives from the longest sequence: 16 at least.

    Source: xbill9/gemma4-dev, SERVING-PARAMS, 2026-08: 32, 64 and 128 for 16k, 32k and 64k.
    """
    blocks = math.ceil(max_model_len / _TPU_SEQUENCE_BLOCKS)
    return max(16, 1 << max(0, blocks - 1).bit_length())


def uniform_blocks(pool: float, per_token: float, block: int) -> int:
    """Whole blocks of `block` tokens in a pool of bytes."""
    return max(0, math.floor(pool / (block * per_token)))


@dataclass(frozen=True, slots=True)
class HybridPages:
    """vLLM's cache for a model with two kinds of layers: one page size for both.

    block_bytes: bytes of one block, which is a page for each layer of a group.
    full_tokens, sliding_tokens: tokens in a page of either kind. groups: sliding groups beside the
    one of full layers; window: tokens that sliding layers see.
    """

    block_bytes: float
    full_tokens: int
    sliding_tokens: int
    groups: int
    window: int

    def blocks_of(self, context: int, in_flight: int) -> int:
        """Blocks that one request of `context` tokens reserves.

        in_flight: max_num_batched_tokens x batches at once (2 with asynchronous scheduling).
        Sliding layers keep window - 1 + in_flight tokens: a large batch undoes the window.
        """
        held = min(self.window - 1 + in_flight, context)
        sliding = self.groups * (math.ceil(held / self.sliding_tokens) + 1)
        return math.ceil(context / self.full_tokens) + (sliding if self.groups else 0)

    def streams(self, blocks: float, context: int, in_flight: int) -> float:
        """Requests of `context` tokens that `blocks` hold at once, with the fraction."""
        return blocks / self.blocks_of(context, in_flight)

    def printed_tokens(self, blocks: float, context: int, in_flight: int) -> int:
        """What vLLM prints as "GPU KV cache size": its concurrency x max_model_len.

        It moves with max_num_batched_tokens, and is no size of any pool.
        """
        return int(self.streams(blocks, context, in_flight) * context)


def hybrid_pages(geometry: Geometry, element_bytes: float) -> HybridPages:
    """How vLLM's hybrid cache manager lays out this model.

    A page is the larger one of a 16-token block of either kind; the other kind gets more tokens
    into it. Groups have as many layers as the rarer kind. Source: vLLM 0.32; agrees with a T4G
    boot to the integer (329,579 tokens printed for 32,266 blocks; xbill9/gemma4-dev, 2026-08).
    """
    owners = range(geometry.owners)
    full = [layer for layer in owners if geometry.is_full(layer)]
    sliding = [layer for layer in owners if not geometry.is_full(layer)]
    per_token = {
        kind: 2 * geometry.kv_width(layers[0]) * element_bytes if layers else 0.0
        for kind, layers in (("full", full), ("sliding", sliding))
    }
    page = _VLLM_BASE_BLOCK * max(per_token.values())
    group = min((len(layers) for layers in (full, sliding) if layers), default=1)
    return HybridPages(
        block_bytes=group * page,
        full_tokens=round(page / per_token["full"]) if full else 1,
        sliding_tokens=round(page / per_token["sliding"]) if sliding else 1,
        groups=math.ceil(len(sliding) / group),
        window=geometry.window or 0,
    )


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """A pool seen from one context length: bytes a stream, streams that fit, and tokens resident.

    streams carries its fraction. tokens: uniform layouts hold that many at any length; the others
    only at this one. per_token: bytes that one more token of a long conversation takes.
    """

    layout: EngineKvLayout
    stream_bytes: float
    per_token: float
    streams: float
    tokens: int
    detail: str


def cache_room(
    geometry: Geometry,
    pool: float,
    context: int,
    element_bytes: float,
    layout: EngineKvLayout,
    *,
    in_flight: int = 0,
    block: int = 1,
) -> CacheRoom:
    """What a pool of bytes on one device holds at `context` tokens a stream.

    geometry is the device's shard. in_flight matters for "hybrid" only, block (tokens that are
    given out together) for "uniform". A negative pool holds nothing. Raises ValueError for an
    unknown layout.
    """
    pool = max(0.0, pool)
    if layout == "hybrid":
        pages = hybrid_pages(geometry, element_bytes)
        need = pages.blocks_of(context, in_flight)
        blocks = math.floor(pool / pages.block_bytes)
        return CacheRoom(
            layout,
            need * pages.block_bytes,
            kv_bytes_per_token(geometry, element_bytes, "ring"),
            blocks / need,
            int(blocks / need * context),
            f"{blocks} blocks of {pages.block_bytes / 1024:.0f} KiB, {need} a stream with"
            f" {in_flight} tokens in flight",
        )
    if layout == "uniform":
        per_token = kv_bytes_per_token(geometry, element_bytes, "uniform")
        blocks = uniform_blocks(pool, per_token, block)
        need = math.ceil(context / block)
        return CacheRoom(
            layout,
            need * block * per_token,
            per_token,
            blocks / need,
            blocks * block,
            f"{per_token / 1024:g} KiB a token over all layers that own a cache"
            + (f", {blocks} blocks of {block} tokens" if block > 1 else ""),
        )
    one = kv_bytes(geometry, context, 1, element_bytes, layout)
    streams = pool / one
    return CacheRoom(
        layout,
        one,
        kv_bytes_per_token(geometry, element_bytes, "ring"),
        streams,
        math.floor(streams) * context,
        "sliding layers keep their window, full layers the whole context",
    )


# ── knowledge / planner_fit ───────────────────────────────────────────────────────────────────────
# Does a model fit on a piece of hardware under an engine, and on what ground does it not.
#
# Every refusal says whether it is arithmetic, that is, bytes that must be there and are not, or an
# estimate that somebody may override. Knows no speed and no tool.

_CLASS_DEFAULT = "transformers 5.24, the class's default"
# Tokens of one conversation by size, and who says so.
_POSITIONS: Mapping[str, tuple[int, str]] = {
    "E2B": (131_072, _CLASS_DEFAULT),
    "E4B": (131_072, _CLASS_DEFAULT),
    "12B": (131_072, "its config.json by recipes.vllm.ai, 2026; its card says up to 256 K"),
}
_ASYNC_BATCHES = 2  # vLLM schedules the next batch while one runs
_MADE_FROM = ("bf16", "fp16", "f32")  # what eight-bit weights are made of while loading
FindingKind = Literal["arithmetic", "estimate"]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What is to be served: its shape, its towers in bytes, and how its weights are stored.

    size: a key of GEMMA4, empty for another model. unknown_towers: parts whose size nobody gave.
    """

    name: str
    size: str
    geometry: Geometry
    towers: Mapping[EngineTower, int]
    stored: str
    unknown_towers: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class FitRequest:
    """One question to the planner. Zero or empty means: the engine's or the hardware's own.

    runtime: a runtime slot ("vllm"). hardware: a hardware slot ("v6e1") or a chip ("h100").
    encoding: how the weights lie in memory, a key of WEIGHT_ENCODINGS. kv_dtype: "auto" or a key of
    KV_ELEMENT_BYTES. context: tokens of one stream, prompt and answer. streams: at once.
    utilization: share of memory given to the engine. batched_tokens: max_num_batched_tokens of
    vLLM. memory_gib: memory of one device that is free; physical_gib: that it has.
    quantize_on_load: None means: wherever no checkpoint of that encoding is published.
    """

    model: PlannedModel
    encoding: str
    runtime: str
    hardware: str
    context: int
    streams: int = 1
    kv_dtype: str = "auto"
    utilization: float = 0.0
    batched_tokens: int = 0
    memory_gib: float = 0.0
    physical_gib: float = 0.0
    quantize_on_load: bool | None = None


@dataclass(frozen=True, slots=True)
class FitFinding:
    """One reason against a plan: arithmetic cannot be overridden, an estimate can."""

    kind: FindingKind
    text: str


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """How memory is spent on one device, in bytes, and what speaks against it.

    resident: weights by part. extra: more of it while loading. usable: what the engine may take of
    `visible`. pool: what is left for the cache, negative when nothing is. room: what it holds.
    kv_element_bytes: bytes that one cached number really takes.
    """

    profile: EngineProfile
    chip: Accelerator
    devices: int
    visible: float
    usable: float
    resident: Mapping[str, int]
    extra: Mapping[str, int]
    overhead: float
    pool: float
    room: CacheRoom
    kv_element_bytes: float
    in_flight: int
    findings: tuple[FitFinding, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.findings

    @property
    def arithmetic(self) -> bool:
        """Whether some refusal cannot be overridden."""
        return any(finding.kind == "arithmetic" for finding in self.findings)

    @property
    def streams(self) -> int:
        """Whole streams of the asked context that are resident at once."""
        limit = self.profile.max_streams
        held = math.floor(self.room.streams)
        return min(held, limit) if limit else held


def planned_model(name: str) -> PlannedModel:
    """A Gemma 4 by size ("E2B"), model slot ("2b") or repository; ValueError for anything else."""
    by_size = {size.lower(): size for size in GEMMA4}
    stored, missing = "bf16", ""
    if name.lower() in by_size:
        model = GEMMA4[by_size[name.lower()]]
    elif "/" in name or ":" in name:
        model, checkpoint = checkpoint_for_repo(name)
        stored = checkpoint.stored
        missing = "" if checkpoint.exists else f"{name} does not exist ({checkpoint.source})"
    else:
        model = model_for_slot(name.lower())
        name = next(key for key, value in GEMMA4.items() if value is model)
    size = next(key for key, value in GEMMA4.items() if value is model)
    figures: dict[EngineTower, int | float | None] = {
        "vision": model.vision_tower.value,
        "audio": model.audio_tower.value,
    }
    return PlannedModel(
        name=name if name.lower() not in by_size else size,
        size=size,
        geometry=model.geometry,
        towers={tower: int(value) for tower, value in figures.items() if value is not None},
        stored=stored,
        unknown_towers=tuple(tower for tower, value in figures.items() if value is None),
        missing=missing,
    )


def planned_hardware(name: str) -> tuple[Accelerator, int]:
    """The chip and the number of devices of a hardware slot, or of a chip's own name (one)."""
    if name in HARDWARE_SLOTS:
        slot = HARDWARE_SLOTS[name]
        return ACCELERATORS[slot.chip], slot.devices
    if name in ACCELERATORS:
        return ACCELERATORS[name], 1
    known = ", ".join(dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]))
    raise ValueError(f"hardware {name!r} is not known; known: {known}")


def is_quantized_on_load(request: FitRequest) -> bool:
    """Whether the engine makes the encoding itself, from a bf16 checkpoint that it loads first."""
    model = request.model
    if request.encoding not in QUANTIZED_ON_LOAD or model.stored == request.encoding:
        return False
    if request.quantize_on_load is not None:
        return request.quantize_on_load
    if model.name != model.size:  # a checkpoint was named, and it is not stored like that
        return True
    return not is_published(request)


def is_published(request: FitRequest) -> bool:
    """Whether some checkpoint of that model stores its weights in the asked encoding."""
    known = GEMMA4[request.model.size].checkpoints if request.model.size else ()
    stored = {entry.stored for entry in known if entry.exists} | {request.model.stored}
    return request.encoding in stored


def fit_verdict(request: FitRequest) -> FitVerdict:
    """Weigh one request, on one device of the hardware.

    Raises ValueError for an unknown hardware, engine, encoding or cache type, for heads that do
    not divide over the devices, and for a chip whose memory is neither in the table nor given.
    """
    chip, devices = planned_hardware(request.hardware)
    profile = engine_profile(request.runtime, chip.chip)
    devices = min(devices, profile.max_devices)
    visible_gib = request.memory_gib or chip.visible_memory.known(
        f"the memory of {chip.name} (give memory_gib)"
    )
    visible = visible_gib * GIB_BYTES
    utilization = request.utilization or profile.utilization.value
    batched = request.batched_tokens or vllm_batched_tokens(visible_gib)
    in_flight = batched * _ASYNC_BATCHES
    overhead = profile.overhead.value
    if profile.layout == "hybrid":
        overhead = cuda_overhead_bytes(batched) if chip.chip != "cpu" else overhead
    element = kv_element_bytes(request, profile)
    model = request.model
    resident = resident_parts(
        model.geometry, request.encoding, profile, model.towers, devices=devices
    )
    extra = loading_extra(
        model.geometry,
        request.encoding,
        profile,
        from_bf16=is_quantized_on_load(request),
        devices=devices,
    )
    usable = min(visible * utilization, visible - profile.reserve.value)
    pool = cache_pool_bytes(usable / GIB_BYTES, 1.0, sum(resident.values()), overhead)
    room = cache_room(
        device_shard(model.geometry, devices),
        pool,
        request.context,
        element,
        profile.layout,
        in_flight=in_flight,
        block=tpu_block_tokens(request.context) if profile.tpu_blocks else 1,
    )
    verdict = FitVerdict(
        profile,
        chip,
        devices,
        visible,
        usable,
        resident,
        extra,
        overhead,
        pool,
        room,
        element,
        in_flight if profile.layout == "hybrid" else 0,
        (),
    )
    physical = (request.physical_gib or visible_gib) * GIB_BYTES
    findings = _arithmetic_findings(request, verdict, physical)
    findings += _estimate_findings(request, verdict, utilization)
    return replace(verdict, findings=tuple(findings))


def kv_element_bytes(request: FitRequest, profile: EngineProfile) -> float:
    """Bytes that one cached number takes: "auto" follows the weights, never below 16 bits."""
    if request.kv_dtype == "auto":
        return 4 if request.encoding == "f32" else 2
    if request.kv_dtype not in KV_ELEMENT_BYTES:
        known = ", ".join(("auto", *KV_ELEMENT_BYTES))
        raise ValueError(f"kv_dtype {request.kv_dtype!r} is not known; known: {known}")
    size = KV_ELEMENT_BYTES[request.kv_dtype]
    return max(2, size) if profile.wide_kv else size


def _arithmetic_findings(
    request: FitRequest, verdict: FitVerdict, physical: float
) -> list[FitFinding]:
    """Bytes without which no engine of this kind can run: bare text weights, and a bare cache."""
    geometry, devices = request.model.geometry, verdict.devices

    def text_weights(encoding: str) -> float:
        table = ple_bytes(geometry, encoding) if verdict.profile.ple_on_host else 0
        return (weight_bytes(geometry, encoding) - table) / devices

    has = f"{_gb(physical)} that {verdict.chip.name} has"
    need = text_weights(request.encoding)
    if need > physical:
        return [
            FitFinding(
                "arithmetic", f"the {request.encoding} text weights alone take {_gb(need)} of {has}"
            )
        ]
    # Whatever the layout, a stream keeps at least its windows and its full layers.
    slots = request.streams if verdict.profile.static_slots else 1
    shard = device_shard(geometry, devices)
    cache = kv_bytes(shard, request.context, slots, verdict.kv_element_bytes, "ring")
    if need + cache > physical:
        text = f"text weights {_gb(need)} and the cache of {slots} x {request.context} tokens"
        return [FitFinding("arithmetic", f"{text} {_gb(cache)} exceed the {has}")]
    return []


def _estimate_findings(
    request: FitRequest, verdict: FitVerdict, utilization: float
) -> list[FitFinding]:
    """What experience speaks against: the engine's share, overheads, reserves, known gaps."""
    profile, found = verdict.profile, []
    resident = sum(verdict.resident.values())
    peak = resident + sum(verdict.extra.values())
    if verdict.extra and peak > verdict.visible:
        text = f"loading holds {_gb(peak)} at its peak ({_named(verdict.extra)} for a while)"
        text = f"{text}, and {_gb(verdict.visible)} are there"
        if is_quantized_on_load(request):
            text = (
                f"{request.encoding} is made while loading, with the bf16 model built first:"
                f" {text}; {ON_LOAD_TRIED}; {ON_LOAD_SINCE}"
            )
        found.append(text)
    if is_quantized_on_load(request) and request.model.stored not in _MADE_FROM:
        found.append(
            f"{request.model.name} holds {request.model.stored}, and {request.encoding} is made of"
            " 16-bit weights alone"
        )
    if verdict.room.streams < 1:
        found.append(
            f"of {_gb(verdict.usable)} for the engine, {_gb(resident)} of weights and"
            f" {_gb(verdict.overhead)} of overhead leave {_gb(max(0.0, verdict.pool))} for a cache"
            f" of which one stream of {request.context} tokens needs"
            f" {_gb(verdict.room.stream_bytes)}"
        )
    elif verdict.streams < request.streams:
        why = "the others wait for room"
        if profile.max_streams == 1:
            why = "it answers one request at a time"
        elif profile.static_slots:
            why = "it makes room for all of them at the start"
        found.append(
            f"{verdict.streams} of {request.streams} streams of {request.context} tokens are"
            f" resident at once; {why}"
        )
    left = verdict.visible * (1 - utilization)
    if left < profile.reserve.value * 0.995 and utilization < 1:
        found.append(
            f"utilization {utilization:g} leaves {_gb(left)} for compiled programs, and"
            f" {_gb(profile.reserve.value)} are needed ({profile.reserve.source})"
        )
    if request.encoding not in profile.encodings:
        loads = ", ".join(profile.encodings)
        found.append(
            f"{profile.name} is not known to load {request.encoding}, only {loads}"
            f" ({profile.encodings_source})"
        )
    if request.model.missing:
        found.append(request.model.missing)
    limit, source = _POSITIONS.get(request.model.size, (MAX_PLANNED_CONTEXT, _CLASS_DEFAULT))
    if request.context > limit:
        found.append(
            f"{request.model.name} takes {limit} positions ({source}; the checkpoint's config.json"
            " decides)"
        )
    return [FitFinding("estimate", text) for text in found]


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _named(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())


# ── knowledge / planner_changes ───────────────────────────────────────────────────────────────────
# Which single change would make a plan fit that does not: less context, other bytes, other chips.
#
# Knows no prices of its own and decides nothing: it tries, through the same verdict as the plan.

OWN_CHIPS = ("cpu", "1650ti")  # one has them or not: nobody rents them out by the hour


def fit_changes(
    request: FitRequest, price_of: Callable[[str], float | None]
) -> list[tuple[str, FitRequest]]:
    """Single changes that make an unfit request fit, each with the request that it leads to.

    The largest context, fewer streams, an eight-bit cache, another encoding (a checkpoint in it
    where one was named and another is published), other hardware (the cheapest first; price_of
    gives USD/h of a slot, None where unknown). Empty if none does alone.
    """
    changes: list[tuple[str, FitRequest]] = []
    context = _largest(lambda tokens: _fits(replace(request, context=tokens)), MAX_PLANNED_CONTEXT)
    if context:
        changes.append((f"context={context}", replace(request, context=context)))
    streams = _largest(lambda count: _fits(replace(request, streams=count)), request.streams)
    if streams:
        changes.append((f"concurrency={streams}", replace(request, streams=streams)))
    if request.kv_dtype != "fp8" and _fits(replace(request, kv_dtype="fp8")):
        changes.append(("kv_dtype='fp8'", replace(request, kv_dtype="fp8")))
    chip, _ = planned_hardware(request.hardware)
    for encoding in engine_profile(request.runtime, chip.chip).encodings:
        other = _in_encoding(request, encoding)
        if other != request and _fits(other):
            named = f"model='{other.model.name}'" if other.model != request.model else ""
            changes.append((named or f"encoding='{encoding}'", other))
    own = planned_hardware(request.hardware)
    offers: dict[str, tuple[Accelerator, int]] = {}
    for slot in dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]):
        kind = planned_hardware(slot)
        other = replace(request, hardware=slot, memory_gib=0.0, physical_gib=0.0)
        rented = kind[0].chip not in OWN_CHIPS and kind != own
        if rented and kind not in offers.values() and _fits(other):
            offers[slot] = kind
    for slot in sorted(offers, key=lambda name: (price_of(name) is None, price_of(name) or 0.0)):
        rate = price_of(slot)
        cost = "price unknown" if rate is None else f"{rate:.2f} USD/h"
        other = replace(request, hardware=slot, memory_gib=0.0, physical_gib=0.0)
        changes.append((f"hardware='{slot}' ({cost})", other))
    return changes


def _in_encoding(request: FitRequest, encoding: str) -> FitRequest:
    """The same model in that encoding: where a checkpoint was named, the one that is stored so, if
    somebody publishes it; else what the engine makes of the named one."""
    model = request.model
    known = GEMMA4[model.size].checkpoints if model.size and model.name != model.size else ()
    for checkpoint in known:
        if checkpoint.exists and checkpoint.stored == encoding != model.stored:
            return replace(request, encoding=encoding, model=planned_model(checkpoint.repo))
    return replace(request, encoding=encoding)


def _fits(request: FitRequest) -> bool:
    try:
        return fit_verdict(request).fits
    except ValueError:  # no such engine there, heads that do not divide, memory unmeasured
        return False


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that fits, 0 for none; smaller ones always do."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ── knowledge / planner_money ─────────────────────────────────────────────────────────────────────
# What a rate per hour means per token, and when renting beats an API that bills input too.
#
# Knows no catalogue: rates come in as numbers.


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """USD per million tokens at a rate and a throughput. Raises ValueError for no throughput."""
    if tokens_per_s <= 0:
        raise ValueError("no throughput, no price per token")
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def million_tokens(tokens_per_s: float, hours: float) -> float:
    """Millions of tokens in `hours` hours."""
    return tokens_per_s * hours * 3600 / 1e6


def usd_for(usd_per_hour: float, seconds: float) -> float:
    """USD for `seconds` seconds."""
    return usd_per_hour * seconds / 3600


def with_cold_start(usd: float, session_s: float, start_s: float) -> float:
    """A price per token with the start paid for as well: x T / (T - start)."""
    if start_s >= session_s:
        raise ValueError(f"a start of {start_s:.0f} s leaves nothing of {session_s:.0f} s")
    return usd * session_s / (session_s - start_s)


@dataclass(frozen=True, slots=True)
class ApiPrice:
    """USD per million tokens of an API, in and out."""

    input: float
    output: float

    def per_million_output(self, prompt: float, output: float) -> float:
        """What the API bills for a million output tokens when each `output` brings its `prompt`."""
        return self.output + self.input * prompt / output


def break_even_tokens_per_s(
    usd_per_hour: float, api: ApiPrice, prompt: float, output: float
) -> float:
    """Output tokens per second, held all the time, above which renting is cheaper than the API.

    Leaving out the API's input price, as the 940 tokens per second of the article on TPU v6e do,
    makes it three times too high at 8 tokens in for one out.
    """
    billed = api.per_million_output(prompt, output)
    if billed <= 0:
        raise ValueError("an API that costs nothing is never beaten")
    return usd_per_hour / 3600 * 1e6 / billed


# ── knowledge / planner_speed ─────────────────────────────────────────────────────────────────────
# How fast a model decodes on a chip: the roofline, and the same with an engine's constants.
#
# Knows no memory sizes and no price. Nothing here was fitted to make it agree: constants come from
# the engines' profiles.


def active_parameters(geometry: Geometry) -> float:
    """Parameters that one token passes through: without the PLE table, and with top_k experts.

    An untied embedding is a gather and does not count either.
    """
    counts = parameter_counts(geometry)
    idle = float(counts.ple_table + (0 if geometry.tied else counts.embed))
    if geometry.experts:
        idle += counts.experts * (1 - geometry.top_k / geometry.experts)
    return counts.total - idle


def kv_read_bytes(geometry: Geometry, context: int, element_bytes: float) -> float:
    """Bytes of cache that one decode step reads for one stream with `context` tokens behind it.

    Every layer reads, the sharing ones too; sliding layers read their window at most.
    """
    total = 0.0
    for layer in range(geometry.layers):
        seen = context if geometry.is_full(layer) else min(context, geometry.window or context)
        total += 2 * geometry.kv_width(layer) * element_bytes * seen
    return total


def expanded_bytes(geometry: Geometry, streams: int = 1) -> float:
    """Bytes of the bf16 pass that a 4-bit path without a fused kernel adds to every step.

    Attention, MLP and the experts that `streams` tokens touch; the small PLE gates are left out.
    """
    counts = parameter_counts(geometry)
    touched = 0.0
    if geometry.experts:
        touched = 1 - (1 - geometry.top_k / geometry.experts) ** streams
    return 2.0 * (counts.attention + counts.mlp + touched * counts.experts)


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Decode and prompt times of one model on one kind of device, or several of them together.

    bandwidth: GB/s of all devices. compute: TFLOP/s of all devices, None where nobody knows it.
    profile None is the roofline: all of the bandwidth, all of the compute, no engine, no host.
    Traffic between devices costs nothing here, so with several of them it is a ceiling either way.
    """

    geometry: Geometry
    encoding: str
    bandwidth: float
    compute: float | None
    profile: EngineProfile | None = None
    kv_element_bytes: float = 2

    def read_bytes(self, streams: int, context: int) -> float:
        """Bytes that one decode step moves for `streams` streams of `context` tokens."""
        total = float(step_bytes(self.geometry, self.encoding, streams=streams))
        if self.profile is not None and self.profile.reference_int4 and self.encoding == "w4a16":
            total += expanded_bytes(self.geometry, streams)
        return total + streams * kv_read_bytes(self.geometry, context, self.kv_element_bytes)

    def device_ms(self, streams: int, context: int) -> float:
        """A decode step without the host: the slower one of moving and computing, and t0."""
        profile = self.profile
        share = 1.0 if profile is None else profile.efficiency.value
        ms = self.read_bytes(streams, context) / (share * self.bandwidth * 1e6)
        if self.compute is not None:
            ms = max(ms, streams * self._token_flop_ms(self.compute))
        return ms + (0.0 if profile is None else profile.step_overhead.value)

    def step_ms(self, streams: int, context: int) -> float:
        """Time per output token in ms: the device's step and the host's share h(streams)."""
        host = 0.0 if self.profile is None else self.profile.host.ms(streams)
        return self.device_ms(streams, context) + host

    def prefill_ms(self, prompt: int) -> float | None:
        """Compute time of one prompt in ms; None where the chip's compute is unmeasured."""
        return None if self.compute is None else prompt * self._token_flop_ms(self.compute)

    def single_tokens_per_s(self, context: int) -> float:
        """Output tokens per second of one stream while it decodes."""
        return 1000 / self.step_ms(1, context)

    def tokens_per_s(self, streams: int, prompt: int, output: int) -> float:
        """Output tokens per second of `streams` streams, each `prompt` tokens in, `output` out.

        streams x output / ((output - 1) x step + streams x prefill), the step at half the output.
        Prompts cost nothing where the chip's compute is unmeasured.
        """
        step = self.step_ms(streams, prompt + output // 2)
        prompts = streams * (self.prefill_ms(prompt) or 0.0)
        return 1000 * streams * output / (max(1, output - 1) * step + prompts)

    def best_streams(self, limit: int, prompt: int, output: int) -> int:
        """The number of streams, up to `limit`, with the most output: powers of two and the limit.

        The smallest one that comes within 5 % of the most: more would only wait longer.
        """
        tried = sorted({min(limit, 1 << power) for power in range(limit.bit_length() + 1)})
        rates = {streams: self.tokens_per_s(streams, prompt, output) for streams in tried}
        enough = 0.95 * max(rates.values())
        return min(streams for streams, rate in rates.items() if rate >= enough)

    def _token_flop_ms(self, compute: float) -> float:
        """ms of compute for one token, forward: two operations a parameter."""
        share = 1.0 if self.profile is None else self.profile.prefill_share.value
        return 2 * active_parameters(self.geometry) / (share * compute * 1e9)


# ── knowledge / prices ────────────────────────────────────────────────────────────────────────────
# What renting an accelerator costs, per provider, region and way of renting, with dates.
#
# Knows no budgets and no live catalogue: prices move, and an estimate must name the date it used.

Provisioning = Literal["on-demand", "spot", "flex-start"]


@dataclass(frozen=True, slots=True)
class Price:
    """One price: `rate` in USD per hour for one `machine` in `region`.

    provider: google, aws or digitalocean. machine: a machine type, or "chip" where the price is
    per chip, or "gpu only" where the container's CPU and memory are billed on top.
    provisioning: how it was rented, that is, how the provider may take it back.
    """

    chip: str
    provider: str
    machine: str
    region: str
    provisioning: Provisioning
    rate: Figure


def _google_chip(
    chip: str,
    region: str,
    provisioning: Provisioning,
    rate: float,
    source: str,
    date: str,
    note: str = "",
) -> Price:
    figure = Figure(rate, "USD/h", source, date, note=note)
    return Price(chip, "google", "chip", region, provisioning, figure)


def _aws_machine(
    chip: str,
    machine: str,
    region: str,
    provisioning: Provisioning,
    rate: float,
    source: str,
    date: str,
    note: str = "",
) -> Price:
    figure = Figure(rate, "USD/h", source, date, note=note)
    return Price(chip, "aws", machine, region, provisioning, figure)


_SKY_GCP = "SkyPilot catalogue v8, gcp (version 006059e)"
_SKY_AWS = "SkyPilot catalogue v7, aws (version 001367d)"
_SKY_AWS_8 = "SkyPilot catalogue v8, aws (version 00148f2)"
_FLEX_V5E = "two public repositories quoting Google's published rate"
_FLEX_V6E = "Google's DWS prices, quoted by dev.to, Self-Hosted Gemma 4 on TPU v6e"
_RUN_L4 = "Cloud Run price table, as quoted in public"
_RIGS_README = "xbill9/gemma4-dev, README"
_AWS_QUOTED = "AWS price, as several public repositories quote it"
_DO_LIST = "DigitalOcean API list price"
_RECALLED = "vendor price, as recalled; not checked against a live page"
_READ_ON = "2026-11-29"  # the day a figure without a date of its own was taken down

PRICES: tuple[Price, ...] = (
    _google_chip("v5e", "us-central1", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-central1", "spot", 0.245, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-central1", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-west1", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-west1", "spot", 0.245, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-west1", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-west4", "on-demand", 1.20, _SKY_GCP, "2026"),
    _google_chip(
        "v5e", "us-west4", "spot", 0.48, _SKY_GCP, "2026", "gemma4-dev: 0.5779 in 2026-08"
    ),
    _google_chip("v5e", "us-west4", "flex-start", 0.60, _FLEX_V5E, "2026"),
    _google_chip("v5e", "us-south1", "on-demand", 1.416, _SKY_GCP, "2026"),
    _google_chip("v5e", "us-south1", "spot", 0.566, _SKY_GCP, "2026"),
    _google_chip("v5e", "europe-west4", "on-demand", 1.56, _SKY_GCP, "2026"),
    _google_chip("v5e", "europe-west4", "spot", 0.445, _SKY_GCP, "2026"),
    _google_chip("v5p", "unstated", "on-demand", 4.20, _RECALLED, _READ_ON),
    _google_chip("v6e", "us-central1", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-central1", "spot", 0.544, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "spot", 0.544, _SKY_GCP, "2026"),
    _google_chip("v6e", "us-east1", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "us-east5", "on-demand", 2.70, _SKY_GCP, "2026"),
    _google_chip(
        "v6e", "us-east5", "spot", 1.215, _SKY_GCP, "2026", "gemma4-dev: 1.4033 in 2026-08"
    ),
    _google_chip("v6e", "us-east5", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "europe-west4", "on-demand", 2.97, _SKY_GCP, "2026"),
    _google_chip(
        "v6e", "europe-west4", "spot", 1.037, _SKY_GCP, "2026", "gemma4-dev: 1.782 in 2026-08"
    ),
    _google_chip("v6e", "europe-west4", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    _google_chip("v6e", "asia-northeast1", "on-demand", 3.24, _SKY_GCP, "2026"),
    _google_chip("v6e", "asia-northeast1", "spot", 0.944, _SKY_GCP, "2026"),
    _google_chip("v6e", "asia-northeast1", "flex-start", 1.35, _FLEX_V6E, "2026-07-25"),
    Price(
        "l4",
        "google",
        "gpu only",
        "us-east4",
        "on-demand",
        Figure(
            0.672,
            "USD/h",
            _RUN_L4,
            "2026-08",
            note="Cloud Run without zonal redundancy (1.047 with); 8 vCPU and 32 GiB add 0.75",
        ),
    ),
    _aws_machine("l4", "g6.xlarge", "us-east-1", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("l4", "g6.xlarge", "us-east-1", "spot", 0.42, _SKY_AWS, "2026", "0.39 to 0.42"),
    _aws_machine("l4", "g6.xlarge", "us-east-2", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("l4", "g6.xlarge", "us-east-2", "spot", 0.32, _SKY_AWS, "2026", "0.30 to 0.32"),
    _aws_machine("l4", "g6.xlarge", "us-west-2", "on-demand", 0.8048, _SKY_AWS, "2026"),
    _aws_machine("t4", "g4dn.xlarge", "us-east-1", "on-demand", 0.526, _AWS_QUOTED, "2026"),
    _aws_machine(
        "t4", "g4dn", "us-east-1", "spot", 0.3678, _RIGS_README, "2026-08", "average; size unstated"
    ),
    _aws_machine("t4g", "g5g.xlarge", "us-east-1", "on-demand", 0.42, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.xlarge", "us-west-2", "on-demand", 0.42, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.2xlarge", "us-east-1", "on-demand", 0.556, _SKY_AWS, "2026"),
    _aws_machine("t4g", "g5g.2xlarge", "us-west-2", "on-demand", 0.556, _SKY_AWS_8, "2026-11-30"),
    _aws_machine("t4g", "g5g.2xlarge", "us-east-1", "spot", 0.31, _SKY_AWS, "2026", "0.18 to 0.31"),
    _aws_machine(
        "t4g", "g5g", "us-east-1", "spot", 0.3996, _RIGS_README, "2026-08", "average; size unstated"
    ),
    _aws_machine("inf2", "inf2.xlarge", "us-east-1", "on-demand", 0.7582, _AWS_QUOTED, "2026"),
    _aws_machine(
        "inf2", "inf2.xlarge", "us-east-1", "spot", 0.1417, _RIGS_README, "2026-08", "average"
    ),
    _aws_machine("a10g", "g5.xlarge", "us-east-1", "on-demand", 1.006, _RECALLED, _READ_ON),
    Price(
        "mi300x",
        "digitalocean",
        "gpu-mi300x1-192gb",
        "atl1",
        "on-demand",
        Figure(
            2.59,
            "USD/h",
            _DO_LIST,
            "2026-10-08",
            note="1.99 was quoted for AMD Developer Cloud; often offered in no region",
        ),
    ),
)


def prices_for(
    chip: str, *, region: str | None = None, provisioning: Provisioning | None = None
) -> tuple[Price, ...]:
    """The rows for a chip, narrowed by what is given; empty when nothing is known."""
    return tuple(
        price
        for price in PRICES
        if price.chip == chip
        and region in (None, price.region)
        and provisioning in (None, price.provisioning)
    )


# ── knowledge / planner ───────────────────────────────────────────────────────────────────────────
# A deployment before it is paid for: fit, speed, money, and what would have to change.
#
# Puts the planner's parts together. Knows no rig and no tool; prices come from the table or the
# caller. `refusal_of` is what serve and create tools ask before they begin.

_SESSION_S = 4 * 3600.0  # the hard stop of a flex-start machine
_STREAM_LIMIT = 1024  # vLLM's max_num_seqs on large devices; nothing here was measured beyond 100


@dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """Output tokens per second with `streams` streams: the roofline's and the calibrated one."""

    streams: int
    ceiling: float
    estimate: float


@dataclass(frozen=True, slots=True)
class PlannedMoney:
    """USD, of a rate that is known.

    per_million: per million output tokens, by name of the operating point, by the estimate.
    break_even: output tokens per second, held all the time, above which the API is dearer.
    """

    per_hour: float
    rate_source: str
    per_million: dict[str, float]
    saturated_with_start: float | None
    start: float | None
    break_even: float | None


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Everything that is known about a deployment before it exists.

    changes: single changes that would make it fit, as "parameter=value" and as the request that
    each leads to; empty if it fits.
    assumptions: what the figures rest on, one sentence each. saturated is None without a stream.
    """

    request: FitRequest
    verdict: FitVerdict
    single: PlannedSpeed
    asked: PlannedSpeed
    saturated: PlannedSpeed | None
    cold_start: Figure
    money: PlannedMoney | None
    changes: tuple[tuple[str, FitRequest], ...]
    assumptions: tuple[str, ...]


def plan_of(
    request: FitRequest,
    *,
    output: int = 128,
    usd_per_hour: float | None = None,
    provisioning: Provisioning = "on-demand",
    api: ApiPrice | None = None,
    cold_start: Figure | None = None,
) -> DeploymentPlan:
    """Plan `request` with answers of `output` tokens; the rest of the context is the prompt.

    usd_per_hour None takes the cheapest price of that provisioning in the table. api None leaves
    out the break-even. cold_start replaces the table's, in seconds, where a rig has its own.
    Raises ValueError for what the tables do not know, and for an answer longer than the context.
    """
    if not 1 <= output <= request.context:
        raise ValueError(f"output {output} must be 1 to the context, {request.context}")
    verdict = fit_verdict(request)
    roof, engine = _speed_models(request, verdict)
    prompt = request.context - output
    limit = min(verdict.streams, _STREAM_LIMIT)

    def speed(streams: int) -> PlannedSpeed:
        return PlannedSpeed(
            streams,
            roof.tokens_per_s(streams, prompt, output),
            engine.tokens_per_s(streams, prompt, output),
        )

    middle = prompt + output // 2
    single = PlannedSpeed(1, roof.single_tokens_per_s(middle), engine.single_tokens_per_s(middle))
    asked = speed(max(1, min(request.streams, limit)))
    saturated = speed(engine.best_streams(limit, prompt, output)) if limit >= 1 else None
    if cold_start is None:
        cold_start = cold_start_figure(request.runtime, verdict.chip.chip, request.model.size)
    rate, source = usd_per_hour, "as given"
    if rate is None:
        rate, source = table_rate(request.hardware, provisioning)
    money = None
    if rate is not None:
        money = _money(rate, source, asked, saturated, cold_start, api, prompt, output)
    changes: tuple[tuple[str, FitRequest], ...] = ()
    if not verdict.fits:
        changes = tuple(fit_changes(request, _price_of(provisioning)))
    return DeploymentPlan(
        request,
        verdict,
        single,
        asked,
        saturated,
        cold_start,
        money,
        changes,
        tuple(_assumptions(request, verdict, engine, asked, saturated)),
    )


def refusal_of(plan: DeploymentPlan, override: bool = False) -> None:
    """Raise RigError CAPACITY when `plan` does not fit; a plan that fits passes.

    override lets estimates pass. Arithmetic is refused all the same: bytes do not yield.
    """
    findings = plan.verdict.findings
    hard = [finding.text for finding in findings if finding.kind == "arithmetic"]
    if not findings or (override and not hard):
        return
    request = plan.request
    what = f"{request.model.name} in {request.encoding} on {request.hardware}"
    reasons = "; ".join(hard or [finding.text for finding in findings])
    ground = "arithmetic, no override" if hard else "an estimate, which may be overridden"
    words = " or ".join(change for change, _ in plan.changes[:3])
    advice = f"try {words}" if words else "plan a smaller model"
    raise RigError("CAPACITY", f"{what} does not fit: {reasons} ({ground})", advice)


def table_rate(hardware: str, provisioning: Provisioning) -> tuple[float, str] | tuple[None, str]:
    """The cheapest USD/h of a hardware slot in the table, all its devices, and the row behind it.

    This computer costs nothing by the hour. None with the reason where no row is known.
    """
    chip, devices = planned_hardware(hardware)
    if chip.chip in OWN_CHIPS:
        return 0.0, "this computer: nothing is billed, power is not counted"
    rows = prices_for(chip.chip, provisioning=provisioning)
    if not rows:
        return None, f"no {provisioning} price of {chip.name} is known"
    best = min(rows, key=_row_usd)
    count = devices if best.machine == "chip" else 1
    words = f"{best.provider} {best.machine}, {best.region}, {provisioning}, {best.rate.date}"
    note = f"; {best.rate.note}" if best.rate.note else ""
    return count * _row_usd(best), f"{words} ({best.rate.source}{note})"


def _row_usd(price: Price) -> float:
    return price.rate.known("the rate")


def _price_of(provisioning: Provisioning) -> Callable[[str], float | None]:
    return lambda hardware: table_rate(hardware, provisioning)[0]


def _speed_models(request: FitRequest, verdict: FitVerdict) -> tuple[SpeedModel, SpeedModel]:
    """The roofline and the engine's model, over all devices together."""
    chip, devices = verdict.chip, verdict.devices
    bandwidth = devices * chip.bandwidth.known(f"the bandwidth of {chip.name}")
    compute = chip.compute.value
    total = None if compute is None else devices * float(compute)
    geometry, encoding = request.model.geometry, request.encoding
    element = verdict.kv_element_bytes
    return (
        SpeedModel(geometry, encoding, bandwidth, total, None, element),
        SpeedModel(geometry, encoding, bandwidth, total, verdict.profile, element),
    )


def _money(
    rate: float,
    source: str,
    asked: PlannedSpeed,
    saturated: PlannedSpeed | None,
    cold_start: Figure,
    api: ApiPrice | None,
    prompt: int,
    output: int,
) -> PlannedMoney:
    points: dict[str, float] = {}
    if saturated is not None:
        points = {f"{asked.streams} streams": asked.estimate, "saturated": saturated.estimate}
    per_million = {name: usd_per_million(rate, speed) for name, speed in points.items()}
    start = None if cold_start.value is None else float(cold_start.value)
    with_start = None
    if saturated is not None and start is not None and start < _SESSION_S:
        with_start = with_cold_start(per_million["saturated"], _SESSION_S, start)
    even = None
    if api is not None and rate > 0 and api.per_million_output(prompt, output) > 0:
        even = break_even_tokens_per_s(rate, api, prompt, output)
    return PlannedMoney(
        rate,
        source,
        per_million,
        with_start,
        None if start is None else usd_for(rate, start),
        even,
    )


def _assumptions(
    request: FitRequest,
    verdict: FitVerdict,
    engine: SpeedModel,
    asked: PlannedSpeed,
    saturated: PlannedSpeed | None,
) -> list[str]:
    """What the figures rest on: the constants with how they were come by, and what is unknown."""
    profile, chip = verdict.profile, verdict.chip
    share, step, host = profile.efficiency, profile.step_overhead, profile.host
    said = [
        f"ceiling: every byte moves once at {engine.bandwidth:g} GB/s ({chip.bandwidth.source}),"
        " prompts at the full compute, engine and host take no time",
        f"estimate: {share.value:.0%} of that bandwidth ({share.basis}: {share.source}),"
        f" {step.value:g} ms a step ({step.basis}), and the host {host.ms(asked.streams):.1f} ms"
        f" at {asked.streams} streams ({host.basis}: {host.source})",
    ]
    most = max(asked.streams, saturated.streams if saturated else 1)
    if not host.reaches(most):
        end = host.points[-1][0] if host.points else 1
        said.append(f"beyond {end} streams no host curve is measured, so {most} is a guess")
    if engine.compute is None:
        said.append("the chip's compute is unmeasured: prompts are taken to cost nothing")
    elif chip.compute.value is not None:
        prefill = profile.prefill_share
        said.append(
            f"prompts run at {prefill.value:.0%} of {engine.compute:g} TFLOP/s ({prefill.basis})"
        )
    if verdict.profile.reference_int4 and request.encoding == "w4a16":
        said.append("4-bit weights are expanded to bf16 in every step: no fused kernel")
    if profile.layout == "hybrid":
        said.append(
            f"the cache is vLLM's hybrid one with {verdict.in_flight} tokens in flight; the"
            f' {verdict.room.tokens} tokens are what vLLM prints as "GPU KV cache size" at this'
            " length, and no size of a pool"
        )
    said.append(
        f"overhead {verdict.overhead / 1e9:.2f} GB ({profile.overhead.basis}:"
        f" {profile.overhead.source})"
    )
    if profile.ple_on_host and ple_bytes(request.model.geometry, request.encoding):
        table = ple_bytes(request.model.geometry, request.encoding) / 1e9
        said.append(f"{table:.2f} GB of per-layer embeddings stay in the host's memory, unchecked")
    loaded = set(request.model.unknown_towers) & set(profile.towers)
    if loaded:
        said.append(f"unmeasured and counted as nothing: {' and '.join(sorted(loaded))} tower")
    if profile.wide_kv and request.kv_dtype in ("fp8", "int8"):
        said.append("an eight-bit cache saves nothing there: blocks are laid out for 16 bits")
    if not is_published(request) and not is_quantized_on_load(request):
        said.append(f"nobody publishes {request.model.name} in {request.encoding}: make it first")
    if is_quantized_on_load(request):
        said.append(
            f"{request.encoding} is made from a bf16 checkpoint while loading, and counted as if"
            f" all of that stood there first; {ON_LOAD_SINCE}"
        )
    if verdict.devices > 1:
        said.append("traffic between devices is not counted, and weights are split evenly")
    if verdict.devices < planned_hardware(request.hardware)[1]:
        said.append(f"{profile.name} uses {verdict.devices} of the devices there")
    native = "fp16" if "bf16" not in chip.native_dtypes and "fp16" in chip.native_dtypes else "bf16"
    if native not in chip.native_dtypes:
        said.append(
            f"{chip.name} converts 16-bit numbers: its bandwidth figure is an effective one"
        )
    elif native == "fp16" and request.encoding == "bf16":
        said.append(f"{chip.name} has no bf16 arithmetic: fp16 of the same size is assumed")
    misses = known_misses(request.runtime, chip.chip, request.model.size)
    return [*said, *misses, profile.caveat] if profile.caveat else [*said, *misses]


# ── knowledge / planner_refusal ───────────────────────────────────────────────────────────────────
# The refusal of what a plan says cannot be served: the whole sum, and what would fit, in words.
#
# Decides nothing itself: the planner's verdict does.


def planned_refusal(plan: DeploymentPlan, settings: Collection[str]) -> PlanRefusal | None:
    """Why `plan` is refused, with every summand in GB (1e9 bytes) and the changes that would make
    it fit, as keys out of `settings` where those have them; None for a plan that fits."""
    try:
        refusal_of(plan)
    except RigError as error:
        what = f"{error.what}; {plan_sum(plan)}"
        return PlanRefusal(what, _fitting_words(plan, settings), plan.verdict.arithmetic)
    return None


def plan_sum(plan: DeploymentPlan) -> str:
    """Everything that the plan needs on one device, summand by summand, against what is there."""
    parts, verdict = _needed(plan), plan.verdict
    listed = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    total, usable, visible = sum(parts.values()) / 1e9, verdict.usable / 1e9, verdict.visible / 1e9
    each = f" on each of {verdict.devices} devices" if verdict.devices > 1 else ""
    have = f"the engine may take {usable:.2f} of the {visible:.2f} GB that are there"
    return f"in all {total:.2f} GB{each} ({listed}), and {have}"


def _needed(plan: DeploymentPlan) -> dict[str, float]:
    """Bytes on one device by what takes them, the loading peak included."""
    verdict = plan.verdict
    # Some engines make room at their start for all that they will ever answer at once.
    streams = plan.request.streams if verdict.profile.static_slots else 1
    slots = f"{streams} x " if streams > 1 else ""
    return {
        **verdict.resident,
        **{f"{name} while loading": size for name, size in verdict.extra.items()},
        "the engine": verdict.overhead,
        f"the cache of {slots}{plan.request.context} tokens": verdict.room.stream_bytes * streams,
    }


def _fitting_words(plan: DeploymentPlan, settings: Collection[str]) -> str:
    """What would make it fit: this rig's own settings, other weights, or a rig elsewhere."""
    request, words, places = plan.request, [], []
    known = GEMMA4[request.model.size].checkpoints if request.model.size else ()
    if plan.verdict.visible < sum(_needed(plan).values()) <= request.physical_gib * GIB_BYTES:
        words.append("free memory")
    for change, new in plan.changes:
        if new.context != request.context and "MAX_MODEL_LEN" in settings:
            words.append(f"set MAX_MODEL_LEN={new.context}")
        elif new.context // 256 and new.context != request.context and "SLOTS" in settings:
            words.append(f"set CONTEXT_PER_SLOT={new.context // 256 * 256}")
        elif new.streams != request.streams and "SLOTS" in settings:
            words.append(f"set SLOTS={new.streams}")
        elif new.kv_dtype != request.kv_dtype and "KV_CACHE_DTYPE" in settings:
            words.append(f"set KV_CACHE_DTYPE={new.kv_dtype}")
        elif new.model != request.model:
            words.append(f"serve model='{new.model.name}'{_stored_so(request, settings)}")
        elif new.encoding != request.encoding:
            if "QUANTIZATION" in settings and is_quantized_on_load(new):
                words.append(f"set QUANTIZATION={new.encoding}")
                continue
            stored = (c.repo for c in known if c.exists and c.stored == new.encoding)
            also = _stored_so(request, settings)
            words += [f"serve model='{repo}'{also}" for repo in stored][:1]
        elif new.hardware != request.hardware:
            places.append(change.removeprefix("hardware="))
    if places:
        words.append(f"take a rig on {', '.join(places[:3])}")
    tries = " or ".join(words or ["serve a smaller model"])
    soft = "" if plan.verdict.arithmetic else "; override=true tries it all the same"
    return f"{tries}{soft}; plan_deployment() shows more"


def _stored_so(request: FitRequest, settings: Collection[str]) -> str:
    """What else has to be set for weights that are served as they are stored."""
    return (
        " and leave QUANTIZATION empty"
        if "QUANTIZATION" in settings and is_quantized_on_load(request)
        else ""
    )


# ── knowledge / planner_answers ───────────────────────────────────────────────────────────────────
# Answers a question to the planner: looks its names up, plans, and puts the plan into its form.
#
# Knows no rig and no way of asking. Whatever is wrong with a question is its answer, as a fault.

PLANNED_HARDWARE = tuple(dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]))
PLANNED_ENGINES = tuple(dict.fromkeys(key.split("-")[0] for key in ENGINE_PROFILES))
PLANNED_NAMES = frozenset(
    name
    for size, model in GEMMA4.items()
    for name in (size.lower(), model.slot, *(entry.repo for entry in model.checkpoints))
)


def plan_answer(question: PlanQuestion) -> PlanAnswer:
    """The plan of what is asked, with a refusal where it does not fit; or the question's fault."""
    try:
        plan = _asked_plan(question)
    except RigError as error:
        return PlanAnswer(fault=PlanFault(error.error_class, error.what, error.next_step))
    except ValueError as error:
        return PlanAnswer(fault=PlanFault("INVALID", f"{error}; nothing was planned"))
    return PlanAnswer(planned_deployment(plan), planned_refusal(plan, question.settings))


def _asked_plan(question: PlanQuestion) -> DeploymentPlan:
    """Raises RigError INVALID by the parameter's name, or ValueError of the tables."""
    _check_slot("hardware", question.hardware, PLANNED_HARDWARE)
    _check_slot("engine", question.engine, PLANNED_ENGINES)
    model = _asked_model(question)
    start = None
    if question.cold_start_s is not None:
        source = "this rig's own earlier starts"
        start = Figure(question.cold_start_s, "s", source, question.cold_start_day, "measured")
    return plan_of(
        FitRequest(
            model=model,
            encoding=question.encoding or model.stored,
            runtime=question.engine,
            hardware=question.hardware,
            context=question.context,
            streams=question.streams,
            kv_dtype=question.kv_dtype,
            utilization=question.utilization,
            batched_tokens=question.batched_tokens,
            memory_gib=question.memory_gib,
            physical_gib=question.physical_gib,
        ),
        output=question.output,
        usd_per_hour=question.usd_per_hour,
        provisioning=question.provisioning,
        api=ApiPrice(question.api_input, question.api_output),
        cold_start=start,
    )


def _asked_model(question: PlanQuestion) -> PlannedModel:
    """A Gemma 4 out of the tables, or the asker's own."""
    name, own = question.model, question.own
    if own is not None:
        stored = "q4_0" if own.stored.startswith("q4") else own.stored
        stored = stored if stored in WEIGHT_ENCODINGS else "bf16"
        return PlannedModel(name, "", own.geometry, {}, stored)
    if name.lower() in PLANNED_NAMES or name in PLANNED_NAMES:
        return planned_model(name)
    checked_name("model", "model", name)
    raise invalid_parameter("model", f"is in no table; sizes: {', '.join(GEMMA4)}")


def _check_slot(parameter: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise invalid_parameter(parameter, f"must be one of {', '.join(known)}")


def planned_deployment(plan: DeploymentPlan) -> PlannedDeployment:
    """A plan as it is shown: every summand in bytes, rates and money by name."""
    verdict, money = plan.verdict, plan.money
    memory = {
        **verdict.resident,
        "weights, all": sum(verdict.resident.values()),
        **{f"while loading: {name}": size for name, size in verdict.extra.items()},
        "weights at the loading peak": sum(verdict.resident.values()) + sum(verdict.extra.values()),
        "engine's overhead": round(verdict.overhead),
        "cache of one stream": round(verdict.room.stream_bytes),
        "cache, one more token": round(verdict.room.per_token),
        "cache pool": round(verdict.pool),
        "usable by the engine": round(verdict.usable),
        "visible": round(verdict.visible),
    }
    usd: dict[str, float] = {}
    if money is not None:
        usd = {"per hour": money.per_hour}
        usd |= {f"per million out, {name}": value for name, value in money.per_million.items()}
        if money.start is not None:
            usd["cold start"] = money.start
        if money.saturated_with_start is not None:
            usd["per million out, saturated, 4 h with the start"] = money.saturated_with_start
    start = plan.cold_start
    sources = [f"cold start: {start.source} ({start.date})"] if start.source else []
    if money is not None:
        sources.append(f"price: {money.rate_source}")
    words: PlanVerdict = "fits"
    if not verdict.fits:
        words = "refused by arithmetic" if verdict.arithmetic else "refused by an estimate"
    return PlannedDeployment(
        summary=_plan_sentence(plan),
        fits=verdict.fits,
        verdict=words,
        reasons=tuple(f"{finding.kind}: {finding.text}" for finding in verdict.findings),
        changes=tuple(_planned_change(words, request) for words, request in plan.changes),
        devices=verdict.devices,
        memory_bytes=memory,
        resident_kv_tokens=verdict.room.tokens,
        kv_layout=f"{verdict.room.layout}: {verdict.room.detail}",
        streams_at_context=round(verdict.room.streams, 2),
        tokens_per_s=_planned_rates(plan),
        cold_start_s=None if start.value is None else float(start.value),
        usd={name: round(value, 5) for name, value in usd.items()},
        break_even_tokens_per_s=_rounded(money.break_even if money is not None else None),
        assumptions=(*plan.assumptions, *sources, f"{plan.request.context} tokens a stream"),
    )


def _planned_change(words: str, new: FitRequest) -> PlannedChange:
    return PlannedChange(
        words,
        model=new.model.name,
        encoding=new.encoding,
        hardware=new.hardware,
        engine=new.runtime,
        context=new.context,
        streams=new.streams,
        kv_dtype=new.kv_dtype,
    )


def _plan_sentence(plan: DeploymentPlan) -> str:
    request, verdict = plan.request, plan.verdict
    what = f"{request.model.name} in {request.encoding} on {request.hardware}"
    weights = sum(verdict.resident.values()) / 1e9
    head = f"{what} ({verdict.profile.name}) {'fits' if verdict.fits else 'does not fit'}"
    body = (
        f"weights {weights:.2f} of {verdict.usable / 1e9:.2f} GB, {verdict.streams} streams of"
        f" {request.context} tokens"
    )
    if verdict.fits:
        body += f", about {plan.single.estimate:.1f} tok/s alone"
    return f"{head}: {body}."


def _planned_rates(plan: DeploymentPlan) -> dict[str, float]:
    points: dict[str, PlannedSpeed] = {"one stream": plan.single}
    if plan.asked.streams > 1:
        points[f"{plan.asked.streams} streams"] = plan.asked
    if plan.saturated is not None:
        points[f"saturated, {plan.saturated.streams} streams"] = plan.saturated
    rates: dict[str, float] = {}
    for name, speed in points.items():
        rates[f"{name}, ceiling"] = round(speed.ceiling, 2)
        rates[f"{name}, estimate"] = round(speed.estimate, 2)
    return rates


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# ── programs / plan ───────────────────────────────────────────────────────────────────────────────

_PLANNED_STREAMS = 4096  # at once, at most
_QUESTION_CHARACTERS = 200_000
_USUAL = PlanQuestion("", "", "")
_RATE_KINDS = ("ceiling", "estimate")
_SUMS = ("weights, all", "weights at the loading peak", "usable by the engine", "visible")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _plan_parser()
    arguments = parser.parse_args(argv)
    if arguments.question:
        try:
            question = question_of(json.loads(sys.stdin.read(_QUESTION_CHARACTERS)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            print(f"plan.py: that is no question: {error}", file=sys.stderr)
            return 2
    else:
        missing = [name for name in ("model", "hardware", "engine") if not getattr(arguments, name)]
        if missing:
            parser.error(f"missing: {', '.join(f'--{name}' for name in missing)}")
        names = {field.name for field in dataclasses.fields(PlanQuestion)}
        question = PlanQuestion(**{k: v for k, v in vars(arguments).items() if k in names})
    answer = plan_answer(question)
    if arguments.json or arguments.question:
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    elif answer.plan is not None:
        print(plan_text(answer.plan))
    elif answer.fault is not None:
        print(f"plan.py: {answer.fault.what}", file=sys.stderr)
    return _plan_status(answer)


def _plan_status(answer: PlanAnswer) -> int:
    if answer.plan is None:
        return 2
    return 0 if answer.plan.fits else 1


def plan_text(plan: PlannedDeployment) -> str:
    """`plan` for people: the verdict, every summand, rates, money, and what would make it fit."""
    lines = [plan.summary, f"verdict: {plan.verdict}"]
    lines += [f"  {reason}" for reason in plan.reasons]
    if not plan.fits:
        lines += ["", "what would make it fit, each by itself:"]
        lines += [f"  {change.words}" for change in plan.changes] or ["  no single change"]
        lines += [f"  as in: {_plan_command(change)}" for change in plan.changes[:1]]
    which = f"each of {plan.devices} devices" if plan.devices > 1 else "the device"
    lines += ["", f"memory of {which} (GB of 1e9 bytes)"]
    for name, size in plan.memory_bytes.items():
        mark = "=" if name in _SUMS else " "
        small = name == "cache, one more token"
        shown = f"{size:,} bytes" if small else f"{size / 1e9:.2f}"
        lines.append(f" {mark} {name:<44} {shown:>14}")
    lines += [
        f"   {plan.kv_layout}",
        f"   {plan.resident_kv_tokens:,} tokens resident, {plan.streams_at_context:g} streams",
        "",
        f"output tokens a second {'ceiling':>32} {'estimate':>11}",
    ]
    points = dict.fromkeys(name.rpartition(", ")[0] for name in plan.tokens_per_s)
    for point in points:
        ceiling, estimate = (plan.tokens_per_s[f"{point}, {kind}"] for kind in _RATE_KINDS)
        lines.append(f"   {point:<44} {ceiling:>7,.1f} {estimate:>11,.1f}")
    start = "unmeasured" if plan.cold_start_s is None else f"{plan.cold_start_s:g} s"
    lines += ["", f"start, from the create call to the first answer: {start}"]
    if plan.usd:
        lines += ["USD"]
        lines += [f"   {name:<50} {usd:>12,.4f}" for name, usd in plan.usd.items()]
    if plan.break_even_tokens_per_s is not None:
        even = f"{plan.break_even_tokens_per_s:g} output tokens a second, held all the time"
        lines += [f"   cheaper than the API above {even}"]
    lines += ["", "what this rests on"]
    lines += [f"  - {sentence}" for sentence in plan.assumptions]
    return "\n".join(lines)


def _plan_command(change: PlannedChange) -> str:
    """The command that asks the same with that change."""
    return (
        f"python3 plan.py --model {change.model} --encoding {change.encoding}"
        f" --hardware {change.hardware} --engine {change.engine} --context {change.context}"
        f" --streams {change.streams} --kv-dtype {change.kv_dtype}"
    )


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 it fits, 1 it does not, 2 wrong usage.",
    )
    of = parser.add_argument_group("what is to be served, and where")
    of.add_argument(
        "--model", default="", help=f"{', '.join(GEMMA4)}, a rig's slot (2b), or a checkpoint"
    )
    of.add_argument("--hardware", default="", help=", ".join(PLANNED_HARDWARE))
    of.add_argument("--engine", default="", help=", ".join(PLANNED_ENGINES))
    of.add_argument(
        "--encoding",
        default=_USUAL.encoding,
        choices=tuple(WEIGHT_ENCODINGS),
        help="how weights lie in memory; else as the checkpoint stores them",
    )
    of.add_argument(
        "--context",
        type=_whole(1, MAX_PLANNED_CONTEXT),
        default=_USUAL.context,
        help=f"tokens of one stream, prompt and answer (default {_USUAL.context})",
    )
    of.add_argument(
        "--streams", type=_whole(1, _PLANNED_STREAMS), default=_USUAL.streams, help="at once"
    )
    of.add_argument(
        "--output",
        type=_whole(1, 65_536),
        default=_USUAL.output,
        help=f"tokens of an answer (default {_USUAL.output})",
    )
    of.add_argument(
        "--kv-dtype",
        default=_USUAL.kv_dtype,
        choices=("auto", *KV_ELEMENT_BYTES),
        help="type of the cache",
    )
    engine = parser.add_argument_group("instead of the engine's or the hardware's own")
    engine.add_argument(
        "--batched-tokens",
        type=_whole(0, 1_048_576),
        default=_USUAL.batched_tokens,
        help="vLLM's max_num_batched_tokens",
    )
    engine.add_argument(
        "--utilization",
        type=_number(1),
        default=_USUAL.utilization,
        help="share of the memory that the engine takes, such as 0.9",
    )
    engine.add_argument(
        "--memory-gib",
        type=_number(4096),
        default=_USUAL.memory_gib,
        help="memory of one device, or of this computer, that is free",
    )
    money = parser.add_argument_group("money")
    money.add_argument(
        "--price-per-hour",
        dest="usd_per_hour",
        type=_number(10_000),
        help="USD of all devices; else the table's cheapest",
    )
    money.add_argument(
        "--provisioning",
        default=_USUAL.provisioning,
        choices=get_args(PlanRenting),
        help="whose price is taken from the table",
    )
    for name in ("input", "output"):
        money.add_argument(
            f"--api-{name}-price",
            dest=f"api_{name}",
            type=_number(10_000),
            default=getattr(_USUAL, f"api_{name}"),
            help=f"USD per million {name} tokens of the API to compare with (default %(default)s)",
        )
    form = parser.add_argument_group("form")
    form.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    form.add_argument(
        "--question",
        action="store_true",
        help="read the question as one JSON object from standard input, and answer in JSON",
    )
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    """What argparse makes a whole number with, from `least` to `most`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}")
        return value

    return whole_number


def _number(most: float) -> Callable[[str], float]:
    """What argparse makes a number with, from 0 to `most`."""

    def number(text: str) -> float:
        value = float(text)
        if not 0 <= value <= most:  # which is also no for what is not a number
            raise argparse.ArgumentTypeError(f"must be 0 to {most:g}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
