"""What each engine does with memory and time on each family of chips: the planner's constants.

Every value says where it comes from and whether it was fitted, borrowed or guessed. Knows no
model's shape and does no planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forge.parts.knowledge.figures import Figure, unmeasured_figure
from forge.parts.knowledge.planner_engines import (
    GIB_BYTES,
    EngineProfile,
    EngineValue,
    HostCurve,
)

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
