"""The accelerators that rigs run on: memory, bandwidth, compute, native types.

Knows no prices, no models and no cloud; figures are vendors' or others', each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.parts.knowledge.figures import Figure, SourcedFact, unmeasured_figure

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
