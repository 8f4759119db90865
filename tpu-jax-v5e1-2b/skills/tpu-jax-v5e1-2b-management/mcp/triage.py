# Built from forge/programs/triage.py by `python3 -m forge.build`: edit it there.

"""Says what a log reports: the line that decides, its cause, the change, and what would not help.

    python3 triage.py FILE        a log of any size and any bytes; - reads standard input
    … | python3 triage.py
    … | python3 triage.py --refusal     a provider's refusal of a machine: its reason, and how far

Deterministic, offline, and nothing but the standard library: it needs no server, no model and no
installed package. The log is data: nothing in it is followed, secrets in it are not shown. Exit
status: 0 no failure found (no known refusal), 1 one was found or errors stand unexplained, 2 wrong
usage.
"""

# Contents, by line:
#    57 ground / errors: The one exception that a tool raises on purpose, and the closed set of …
#   103 ground / redact: Everything that leaves the rig passes here: secrets out, control …
#   217 knowledge / failure_sums: The arithmetic behind a failure's advice: from the numbers in a …
#   331 knowledge / failures_boot: The machine and its drivers come up wrong, and the container …
#   625 knowledge / failures_capacity: No machine to be had, or not allowed as many: stockouts, …
#   886 knowledge / failures_client: The client and its way to the machine: MCP over stdio, SSM, …
#  1005 knowledge / failures_compile: Kernels and graphs do not compile: Mosaic, Triton, inductor, …
#  1125 knowledge / failures_image: Images and files do not arrive: registries, the Hub, networks, …
#  1302 knowledge / failures_load: Checkpoint and engine do not fit each other: architectures, …
#  1638 knowledge / failures_machine: What a rented machine's own boot says: its GPU, its …
#  1721 knowledge / failures_memory: How memory runs out, on cards, chips and hosts: what each …
#  2012 knowledge / failures_permission: Not allowed: tokens, roles, scopes, tunnels, sockets. Who …
#  2267 knowledge / failures_serve: The engine does not come up or does not answer as asked: …
#  2537 knowledge / log_answer: What the failure bank answers about a log: the forms that …
#  2629 knowledge / failure_signature: What a signature of a failure is, and how one is read from …
#  2852 knowledge / failure_mentions: Whether a line reports a failure or only mentions one: …
#  2918 knowledge / failure_bank: The failure bank's engine: finds signatures in a log and puts …
#  3161 knowledge / failures: All signatures of the failure bank, read once: what the stages' …
#  3186 knowledge / refusal_answer: What a refused request for a machine means: the form that …
#  3262 knowledge / refusal_reading: A provider's text as the refusal that it is: its reason, whom …
#  3404 boundaries / log_text: Logs from outside as rows: bounded, of any bytes, tens of megabytes …
#  3474 boundaries / log_triage: A log's bytes to its answer: what triage.py does, in one function.
#  3515 programs / triage: Says what a log reports: the line that decides, its cause, the change, …

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import resource
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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


# ── knowledge / failure_sums ──────────────────────────────────────────────────────────────────────
# The arithmetic behind a failure's advice: from the numbers in a message to the number that fits.
#
# Each sum takes the captured values as text and returns further ones; what cannot be computed is
# left
# out, and the advice then says so in words. Knows no message.

_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def plain_number(text: str) -> float | None:
    """``29,000`` or ``2.89`` as a number; None where it is none."""
    try:
        value = float(text.replace(",", "").strip().rstrip("."))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def size_in_bytes(text: str) -> float | None:
    """``21.95G``, ``905.37M``, ``16.2 GiB`` in bytes (powers of 1024); None where it is none."""
    word = text.replace(" ", "").replace(",", "").lower().removesuffix("ib").removesuffix("b")
    unit = word[-1:] if word[-1:].isalpha() else ""
    number = plain_number(word.removesuffix(unit))
    return None if number is None or unit not in _UNITS else number * _UNITS[unit]


def _context_that_fits(values: Mapping[str, str]) -> dict[str, str]:
    """Largest context in whole blocks of 16 tokens: given by the message, or by the rule of three.

    KV bytes grow no faster than the context, so asked * available / needed always fits.
    """
    if given := plain_number(values.get("estimated", "")):
        return {"fits": str(int(given) // 16 * 16 or int(given))}
    asked = plain_number(values.get("asked", ""))
    needed = plain_number(values.get("needed", ""))
    available = plain_number(values.get("available", ""))
    if asked is None or not needed or available is None:
        return {}
    return {"fits": str(int(asked * available / needed) // 16 * 16)}


def _chips_needed(values: Mapping[str, str]) -> dict[str, str]:
    """The next power of two of chips over which `used` fits into `capacity` each."""
    used = size_in_bytes(values.get("used", ""))
    capacity = size_in_bytes(values.get("capacity", ""))
    if not used or not capacity or used <= capacity:
        return {}
    return {
        "chips": str(2 ** math.ceil(math.log2(used / capacity))),
        "excess": f"{(used - capacity) / 1024**3:.2f}G",
    }


def _room_for_programs(values: Mapping[str, str]) -> dict[str, str]:
    """What the reservation lacks, in GiB."""
    wanted, free = size_in_bytes(values.get("wanted", "")), size_in_bytes(values.get("free", ""))
    if wanted is None or free is None or wanted <= free:
        return {}
    return {"lacking": f"{(wanted - free) / 1024**3:.2f} GiB"}


def _memory_limit(values: Mapping[str, str]) -> dict[str, str]:
    """The next power of two of GiB that leaves a quarter of what was used (MiB) to spare."""
    used = plain_number(values.get("used", ""))
    if not used:
        return {}
    return {"fits": f"{2 ** math.ceil(math.log2(used * 1.25 / 1024))}Gi"}


def _utilization_free(values: Mapping[str, str]) -> dict[str, str]:
    """The share of the card that is free now, rounded down to a hundredth."""
    free, total = plain_number(values.get("free", "")), plain_number(values.get("total", ""))
    if free is None or not total or free <= 0:
        return {}
    return {"fits": f"{math.floor(100 * free / total) / 100:.2f}"}


def _largest_divisor(values: Mapping[str, str]) -> dict[str, str]:
    """The largest number of devices, at most the asked one, that divides the heads."""
    heads, asked = plain_number(values.get("heads", "")), plain_number(values.get("asked", ""))
    if not heads or not asked:
        return {}
    return {"fits": str(max(n for n in range(1, int(asked) + 1) if int(heads) % n == 0))}


def _prompt_that_fits(values: Mapping[str, str]) -> dict[str, str]:
    """Tokens left for the answer, or the excess of the prompt, in a context of `limit`."""
    limit, prompt = plain_number(values.get("limit", "")), plain_number(values.get("prompt", ""))
    if limit is None or prompt is None:
        return {}
    if prompt < limit:
        return {"fits": str(int(limit - prompt))}
    return {"excess": str(int(prompt - limit) + 1)}


def _probe_window(values: Mapping[str, str]) -> dict[str, str]:
    """Probes of 10 s that cover half an hour, the longest window given to a GPU service."""
    return {"window": "1800", **values}


FailureSum = Callable[[Mapping[str, str]], dict[str, str]]
FAILURE_SUMS: dict[str, FailureSum] = {
    "context_that_fits": _context_that_fits,
    "chips_needed": _chips_needed,
    "room_for_programs": _room_for_programs,
    "memory_limit": _memory_limit,
    "utilization_free": _utilization_free,
    "largest_divisor": _largest_divisor,
    "prompt_that_fits": _prompt_that_fits,
    "probe_window": _probe_window,
}


# ── knowledge / failures_boot ─────────────────────────────────────────────────────────────────────
# The machine and its drivers come up wrong, and the container around the engine does not start.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

BOOT_SIGNATURES = r"""
== driver_too_old | root | certain
line NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)
line CUDA driver version is insufficient for CUDA runtime version
line unsatisfied condition: cuda>=(?P<needed>[\d.]+)
line (?:forward compatibility was attempted on non supported HW|system has unsupported display
  driver)
line This (?:program|build) .{0,60}requires (?:a )?driver (?:version )?(?P<needed>[\d.]+)
line PTX was compiled with an unsupported toolchain
cause The GPU driver (CUDA {found?version in the message}) is older than what the engine was built
  for.
change package NVIDIA driver: as it is -> 580 or newer for CUDA 13 (525 or newer for CUDA 12)
change package torch and vllm: as they are -> builds for the driver's CUDA (cu12x)
futile another model, memory flags
issue modelscope/FunASR#2973

== nvidia_driver_missing | root | likely
line NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver
line Failed to initialize NVML: (?P<why>[\w /]+)
line nvidia-container-cli: initialization error: (?:nvml error: )?(?P<why>[\w ]+)
line Found no NVIDIA driver on your system
line nvidia-smi (?:is not on this machine|names no GPU)|nvidia-smi.{0,80}: No devices were found
line (?:libnvidia-ml|libcuda)\.so(?:\.1)?: cannot open shared object file
cause The NVIDIA driver is not loaded (not installed, built for another kernel, or another
  version than its libraries after an update).
change act install or reload the driver; after an update without a reboot: reboot
futile reinstalling torch

== nvidia_container_toolkit_missing | root | certain
line could not select device driver "?\\?"?"? with capabilities: \[\[gpu
line could not select device driver
line (?:unknown or invalid runtime name|unknown runtime specified): nvidia
line nvidia-container-runtime.{0,40}(?:not found|no such file)
line could not load NVML library: .{0,40}inside container
line failed to (?:discover GPU|inject CDI devices): .{0,80}nvidia\.com/gpu
cause Docker has no NVIDIA runtime: nvidia-container-toolkit is not installed or not configured.
change package nvidia-container-toolkit: missing -> installed
change run sudo nvidia-ctk runtime configure --runtime=docker
change run sudo systemctl restart docker
futile a newer driver, another image
issue OpenBMB/XAgent#273

== no_accelerator | root | certain
line Failed to infer device type|Device string must not be empty
line No CUDA GPUs are available|no CUDA-capable device is detected
line No visible GPU devices|RuntimeError: No GPU found
line Torch not compiled with CUDA enabled
line No HIP GPUs are available|no ROCm-capable device is detected
line Cannot access accelerator device when none is available
line torch\.cuda\.is_available\(\) (?:is|returned) False
cause The engine found no accelerator: none in the container, the wrong image for this hardware, or
  a machine without one.
change flag --gpus: missing -> all (docker run; --device /dev/kfd --device /dev/dri on ROCm)
change act the image for this hardware (CUDA, ROCm, TPU), or the CPU build on a CPU machine
futile memory flags
issue odysseus-dev/odysseus#778

== rocm_device_access | root | certain
line Unable to open /dev/kfd|/dev/kfd.{0,40}(?:[Pp]ermission denied|No such file)
line HSA_STATUS_ERROR_OUT_OF_RESOURCES|hsa_init.{0,40}(?:Failed|failed)
cause The process may not open the ROCm devices.
change flag --device: missing -> /dev/kfd and /dev/dri (docker run), with --group-add video and
  render
futile a newer ROCm

== gpu_fell_off | root | certain
line GPU has fallen off the bus|NVRM: Xid \([^)]*\): (?P<xid>\d+)
line Unable to determine the device handle for GPU.{0,80}(?:Unknown Error|GPU is lost)
line uncorrectable ECC error
cause The card itself failed (Xid {xid?see the log}): hardware or driver, not the engine.
change act stop and start the machine, which usually moves it to another host; then another machine
futile engine flags

== no_kernel_image | root | certain
line no kernel image is available for execution on the device
line hipErrorNoBinaryForGpu|no binary for GPU|invalid device function
line rocBLAS error: Cannot read .{0,200}(?P<sm>gfx\w+)|TensileLibrary\w*\.dat
line CUDA capability (?P<sm>sm_\d+|\d[ .]\d) is not (?:compatible|supported)
line (?:device kernel image is invalid|not compiled (?:with|for) (?:CUDA )?(?:arch|SM))
also CUDA capability (?P<sm>sm_\d+|\d[ .]\d)
cause The binary holds no code compiled for this card's architecture ({sm?sm_75 on Turing, 7.5}).
change act an image or wheel compiled for this architecture, or a build with its arch in
  TORCH_CUDA_ARCH_LIST
futile CUDA_LAUNCH_BLOCKING: the place in the stack trace is not to be trusted either way
issue predibase/lorax#535; open-mmlab/mmdetection#2108

== gpu_capability_low | root | certain
line (?:FlashAttention|Flash Attention V?2?).{0,60}(?:only supports|not supported
  |requires).{0,60}(?:Ampere|capability|GPU)
line with CUDA capability (?P<sm>\d \d) is not supported for Flash
line (?:requires|minimum) (?:compute )?capability (?:of )?(?:at least )?(?P<needed>\d+\.?\d*)
line No available kernel\. Aborting
unless no kernel image is available
cause The card's compute capability ({sm?below 8.0}) is too low for this kernel.
change flag --attention-backend: as it is -> TRITON_ATTN (or another runtime, such as llama.cpp)
change place card: as it is -> compute capability {needed?8.0} or newer
futile memory flags

== dtype_unsupported | root | certain
line Bfloat16 is only supported on GPUs with compute capability of at least (?P<needed>[\d.]+)\.
  Your (?P<card>[\w ]+) GPU has compute capability (?P<sm>[\d.]+)
line [Bb](?:f|float)16 is (?:only supported|not supported) on
line (?:fp8|float8).{0,60}(?:only supported|not supported|requires).{0,60}capability
cause {card?The card} (compute capability {sm?below 8.0}) has no arithmetic for this number format.
change flag --dtype: bfloat16 -> half (float16; float32 where Gemma overflows in float16)
change place card: {card?as it is} -> compute capability 8.0 or newer
futile memory flags
issue substratusai/vllm-docker#37

== tpu_busy | root | certain
line TPU is already in use by process with pid (?P<pid>\d+)
line libtpu (?:multi-process )?lockfile|/tmp/libtpu_lockfile
line open\(/dev/(?:accel|vfio)\S*\): (?:Device or resource busy|Operation not permitted)
line TPU (?:device|backend).{0,40}(?:already in use|resource busy)
cause Another process (pid {pid?unknown}) holds the chip: an older server, a notebook, an orphaned
  worker; or a lock was left by one that was aborted.
change act find and stop that process (pid {pid?: lsof /dev/accel* /dev/vfio/*})
change act only where no such process exists: remove /tmp/libtpu_lockfile
change setting JAX_PLATFORMS: as it is -> cpu, for tests that need no chip
futile reinstalling libtpu
issue jax-ml/jax#10192, #13260

== tpu_topology_mismatch | root | certain
line Expected (?P<wanted>\d+) worker addresses, got (?P<found>\d+)
line (?:TPU_CHIPS_PER_HOST_BOUNDS|TPU_HOST_BOUNDS|TPU topology).{0,80}(?:mismatch|invalid|does not
  match)
cause The TPU's environment describes another slice than this machine is: {wanted?more} workers are
  expected and {found?others} named.
change setting TPU_WORKER_HOSTNAMES: as it is -> one name for each worker (localhost for one host)
change setting TPU_ACCELERATOR_TYPE: as it is -> the machine's own, such as v6e-1
futile memory flags, another image

== tpu_not_found | root | certain
line No jellyfish device found|Failed to get global TPU topology
line No TPU (?:devices?|platform|hardware) (?:found|available|detected)
line TPU initialization failed
line Failed to open libtpu
unless already in use|lockfile|busy
cause libtpu finds no TPU on this machine (no chip, chip not given to the container, or no TPU
  environment).
change flag --privileged: missing -> set (docker run on a TPU VM), with --net=host
change setting TPU_SKIP_MDS_QUERY: unset -> 1 where there is no metadata server
change act check /dev/accel* or /dev/vfio on the host
futile memory flags

== metadata_unreachable | fault | likely
line Failed to fetch URL after \d+ tries .{0,40}http status
cause libtpu asks the metadata server for the TPU's environment and gets none: half a minute for
  each key, off Google's machines for nothing.
change setting TPU_SKIP_MDS_QUERY: unset -> 1
futile longer start-up times

== jax_no_backend | fault | likely
line Unable to initialize backend '(?P<backend>\w+)'
line Backend '?(?P<backend>\w+)'? (?:failed to initialize|is not in the list of known backends)
line jaxlib version (?P<found>[\d.]+) is (?:newer|older) than
line libtpu.{0,40}(?:version mismatch|incompatible|not compatible)
cause JAX cannot use its backend {backend?}: plug-in and JAX do not fit each other, or the device is
  held or missing (the words after the colon say which).
change package jax, jaxlib and libtpu: as they are -> one release's set, installed together
futile memory flags

== neuron_busy | root | likely
line No neuron device available|cannot determine the number of available NeuronCores
line Neuron runtime cannot be initialized|NRT_INIT|nrt_init.{0,40}(?:failed|error)
line NeuronCores?.{0,60}(?:already in use|not available|in use by)
line Neuron Cores?\(s\) not available
cause No NeuronCore is free: cores belong to one process at a time and a leftover process owns them,
  or the driver is not loaded.
change run neuron-ls
change act stop the leftover process that it names; load the driver (modprobe neuron) if none is
  shown
futile smaller models: no core was opened
issue aws-neuron/aws-neuron-samples#44

== cudnn_failed | root | likely
line CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|VERSION_MISMATCH)
line DNN library initialization failed
cause cuDNN could not be initialised: no memory is left on the card for it, or its version is not
  the one that the engine was built with.
change setting XLA_PYTHON_CLIENT_MEM_FRACTION: 0.75 -> 0.60 (--gpu-memory-utilization lower in vLLM)
change package nvidia-cudnn: as it is -> the version that torch or jaxlib pins
futile another model

== cuda_forked | root | certain
line Cannot re-initialize CUDA in forked subprocess
cause A worker was forked after CUDA had been used in its parent.
change setting VLLM_WORKER_MULTIPROC_METHOD: fork -> spawn
futile memory flags, another driver

== library_missing | root | likely
line (?P<library>lib(?!nvidia-ml|tpu|cuda\.so)[\w+-]+\.so[\d.]*): cannot open shared object file
line undefined symbol: (?P<symbol>\w+)
line (?:version `|version ')(?P<library>GLIBC(?:XX)?_[\d.]+)' not found
line operator torchvision::nms does not exist|Could not load.{0,40}libtorchcodec
cause A native library is missing or of another build ({library?a symbol is undefined}): packages of
  different builds are mixed.
change act install matching builds together (torch, torchvision, torchaudio and engine of one
  index), or uninstall those that the engine does not need
futile flags of the engine

== cpu_instruction_missing | root | likely
line Illegal instruction|SIGILL|invalid opcode in
cause The binary uses instructions that this processor lacks (AVX2, AVX-512).
change act a build for this processor (llama.cpp with its CPU variants, or built on the spot)
change setting OPENBLAS_CORETYPE: as it is -> Haswell, where the crash is in OpenBLAS
futile more memory

== disk_full | root | certain
line no space left on device
line \[Errno 28\]|\bENOSPC\b|No space left|disk (?:is )?full|Disk quota exceeded
line not enough (?:free )?disk space|There is not enough space on the disk
line no space: .{0,40}[\d.]+ GB.{0,20} are free
unless /dev/shm
cause The disk is full: the image needs room for its layers and their extraction, the model for its
  files, and both were on a boot disk that is too small.
change flag --boot-disk-size: as it is -> 200GB (at creation)
change setting HF_HOME: as it is -> a folder on a larger disk
change act docker system prune frees something only where old images lie about
futile more memory, trying again
issue NVIDIA-NeMo/Speech#1029; NVIDIA/nvidia-docker#792

== disk_type_refused | root | certain
line \[?(?P<type>pd-[\w-]+)\]? .{0,60}(?:not compatible|not supported|cannot be used)
line features are not compatible for creating instance
cause This machine type does not take the disk type {type?asked for} (ct6e wants Hyperdisk).
change flag --boot-disk-type: {type?as it is} -> hyperdisk-balanced
futile other zones

== container_command_missing | root | certain
line exec: "?(?P<command>[\w./-]+)"?: (?:executable file not found in|stat .{0,80}no such file)
line unable to start container process
cause The image has no command {command?of that name}: another image than meant, or an entry point
  that the arguments replace.
change setting container command: {command?as it is} -> what the image's entry point expects
  (arguments only, for vllm/vllm-openai)
futile restarting Docker, a larger disk

== docker_not_running | root | certain
line Cannot connect to the Docker daemon|Is the docker daemon running
line docker: command not found|docker: not found|exec: "?docker"?: executable file not found
cause Docker is not running (or not installed) on this machine.
change run sudo systemctl start docker
change act install Docker where the image brings none (accelerator images of Compute Engine)
futile another container image

== container_name_taken | root | certain
line container name "?/?(?P<name>[\w.-]+)"? is already in use
cause A container of the name {name?} exists already, running or stopped.
change act stop and remove the old container (or give the new one another name): a person decides
futile restarting Docker

== apt_locked | fault | certain
line (?<!cache lock: )Could not get lock /var/lib/(?:dpkg|apt)
line Unable to acquire the dpkg frontend lock|is another process using it
cause Another package manager run (unattended upgrades at boot) holds the lock.
change setting apt-get -o DPkg::Lock::Timeout: 0 -> 600, so that it waits
futile removing the lock file

== startup_script_failed | symptom | likely
line startup-script.{0,40}exit status (?P<status>[1-9]\d*)|Script "startup-script" failed
line (?:cloud-init|cc_scripts_user).{0,60}(?:Failed to run|RuntimeError)
cause The start-up script ended with status {status?other than 0}; why stands above it.
change act read the lines before this one: get_boot_timeline and the serial log hold them
futile waiting: the script runs once a boot

== systemd_restart_limit | symptom | certain
line Start request repeated too quickly|start-limit-hit
cause systemd gave up restarting the service: each start failed in the same way.
change act find the first failure above; then "systemctl reset-failed" and start once
futile a higher restart limit

== too_many_open_files | root | certain
line Too many open files|\[Errno 24\]
cause The process ran out of file descriptors.
change flag --ulimit: nofile=1024 -> nofile=65536 (docker run; LimitNOFILE in a unit)
futile more memory

== clock_or_tls | root | likely
line CERTIFICATE_VERIFY_FAILED|certificate (?:has expired|is not yet valid)|x509: certificate
cause TLS certificates are not accepted: a proxy with its own authority, an old bundle, or a wrong
  clock.
change setting SSL_CERT_FILE: as it is -> the bundle that holds the proxy's authority
change act check the clock (timedatectl)
futile switching verification off
"""


# ── knowledge / failures_capacity ─────────────────────────────────────────────────────────────────
# No machine to be had, or not allowed as many: stockouts, and quotas that look like them.
#
# Data for the failure bank, in its grammar. Sources: the providers' own message texts and the
# issues
# named.

CAPACITY_SIGNATURES = r"""
== gce_stockout | root | certain
line VM instance .{0,80}is currently unavailable in the (?P<zone>[a-z0-9-]+) zone\. .{0,80}?request
  in the (?P<zones>[a-z0-9, -]+?) zone\(s\)
line zonesAvailable: *(?P<zones>[a-z0-9, -]+)
line ZONE_RESOURCE_POOL_EXHAUSTED
line does not have enough resources available to fulfill the request
line is currently unavailable in the (?P<zone>[a-z]+-[a-z]+\d-[a-z]) zone
line (?:REGION_)?RESOURCE_POOL_EXHAUSTED|GPU_STOCKOUT
line reason: *(?P<reason>stockout|resource_availability)
line GCE out of resources
also zonesAvailable: *(?P<zones>[a-z0-9][a-z0-9, -]*)
also (?:in the |zones?/|zone: *)'?(?P<zone>[a-z]+-[a-z]+\d-[a-z])\b
cause Stockout: the zone {zone?asked for} has no such machine now. It is capacity, not quota.
change place zone: {zone?the zone asked for} -> {zones?another zone that offers the machine}
change act flex-start, or spot, where waiting for a queue is acceptable
futile asking for more quota: nothing of it was used up
issue kubernetes/k8s.io#9834; skypilot-org/skypilot#831

== tpu_stockout | root | certain
line There is no more capacity in the zone \\?"?(?P<zone>[a-z]+-[a-z]+\d-[a-z])?
line (?:TPU|accelerator).{0,60}(?:no more|insufficient|not enough) capacity
line INTERRUPTED_BY_NO_CAPACITY|insufficientCapacity
cause Stockout of TPUs in the zone {zone?asked for}; code 8 (RESOURCE_EXHAUSTED) here is capacity,
  not memory and not quota.
change place zone: {zone?the zone asked for} -> another zone in which there is quota for this TPU
change act a queued resource (flex-start) or spot, or the same request later
futile a quota increase
issue hashicorp/terraform-provider-google#21243; dstackai/dstack#1397

== tpu_reserved_capacity | root | likely
line Insufficient reserved capacity|reserved capacity.{0,40}(?:insufficient|not enough|exhausted)
line \breservations?\b.{0,160}(?:not found|is not in zone|does not exist)
line Reservation not found
cause The request asked for reserved capacity, and there is no reservation (or it is used up).
change flag --reserved: on -> off (use --spot or flex-start where there is no reservation)
change act name the reservation of this project and zone, if there is one
futile other zones: a reservation is for one zone
issue skypilot-org/skypilot#4579

== qr_failed_or_suspended | fault | likely
line (?:queued[ -]resource|QueuedResource).{0,80}(?:state|STATE)\W{1,3}(?:FAILED|SUSPENDED
  |SUSPENDING)
line \b(?:SUSPENDED|FAILED)\b.{0,80}queued[ -]resource
cause The queued resource ended without a machine, and holds its quota until it is deleted.
change act delete the dead queued resource (--force), then ask again: a decision for a person
futile waiting: a failed or suspended request is never granted
issue marin-community/levanter#328

== flex_start_expired | root | likely
line (?:valid[- ]until|validUntil|request[- ]valid[- ]for).{0,80}(?:expired|exceeded|elapsed)
line resize request.{0,60}(?:timed out|expired|failed to provision)
cause The request waited as long as it was allowed to and got no capacity.
change flag --request-valid-for-duration: as it is -> longer (2 h at most), or another zone
futile a quota increase

== spot_preempted | root | certain
line compute\.instances\.preempted|Instance was preempted
line (?:instance|node|VM|TPU).{0,40}(?:has been|was|is being) preempted
line Server\.SpotInstanceTermination|Spot (?:Instance )?(?:interruption|termination) notice
line (?:state|status)\W{1,4}PREEMPTED\b
cause The provider took the spot machine back while it was running.
change act ask for the machine again, in another zone if need be; what was measured is void
change act on-demand or reserved machines, where an interruption is not acceptable
futile looking for a fault in the engine: its log ends because the machine did

== host_maintenance | root | likely
line compute\.instances\.(?:hostError|terminateOnHostMaintenance|hostMaintenance)
line Instance terminated (?:by|due to|during) (?:Compute Engine|host maintenance|maintenance)
cause The host under the machine failed or was maintained; machines with accelerators end then.
change act start the machine again; --maintenance-policy=TERMINATE is what accelerators need
futile changing the engine's flags

== ec2_stockout | root | certain
line do not have sufficient (?P<type>[\w.-]+) capacity in the Availability Zone you requested
  \((?P<zone>[a-z]+-[a-z]+-\d[a-z])\)(?:.{0,300}?choosing (?P<zones>[a-z0-9, -]+))?
line InsufficientInstanceCapacity|InsufficientHostCapacity|InsufficientReservedInstanceCapacity
line There is no Spot capacity available that matches your request
line capacity-not-available|InsufficientCapacityOnOutpost
cause Stockout of {type?the instance type} in the Availability Zone {zone?asked for}. A pinned
  subnet pins the zone.
change place availability zone: {zone?the one asked for} -> {zones?none named (no subnet either),
  then each of the others}
change act without a subnet EC2 chooses a zone that has capacity
futile a quota increase: the limit was not reached
issue danvk/mapsnap#432

== ec2_type_not_in_zone | root | certain
line instance type \((?P<type>[\w.]+)\) is not supported in your requested Availability Zone
  \((?P<zone>[a-z0-9-]+)\)(?:.{0,200}?choosing (?P<zones>[a-z0-9, -]+))?
line requested configuration is currently not supported
cause The zone {zone?asked for} never offers {type?this type}: it is no passing stockout.
change place availability zone: {zone?asked for} -> {zones?one that describe-instance-type-offerings
  lists}
futile trying the same zone later
issue commonwarexyz/monorepo#2859

== spot_price_too_low | root | certain
line SpotMaxPriceTooLow|Your Spot request price of (?P<price>[\d.]+) is lower than
line price-too-low
cause The spot price is above the maximum that the request allows.
change setting MaxPrice: {price?as it is} -> none (the on-demand price is the limit then)
futile other zones with the same maximum

== do_region | root | certain
line \b422\b.{0,60}(?:Region|Size) is not available
line (?:Size|Region) is not available in this region|size is (?:currently )?(?:not available
  |restricted)
line You specified an invalid size for (?:the )?Droplet creation
line no capacity .{0,40}(?:droplet|region)
cause DigitalOcean makes no new droplets of that size in that region now.
change place region: the one asked for -> one that GET /v2/sizes lists for this size
futile repeating the request in the same region
issue kelda/kelda#1359

== k8s_no_accelerator_node | root | certain
line nodes are available: .{0,120}?Insufficient (?P<resource>(?:google\.com/tpu|nvidia\.com/gpu
  |amd\.com/gpu|[\w./-]+))
line (?:didn't match|did not match) Pod's node affinity/selector
line pod didn't trigger scale-up
cause No node of the cluster has what the pod asks for ({resource?an accelerator or a label}).
change act a node pool with this accelerator and topology, or selectors that name an existing one
change setting resources.limits: {resource?the accelerator} -> exactly the chips of one node
futile deleting the pod: its successor waits as well

== machine_type_not_here | root | certain
line machine type (?:with name )?'?(?P<type>[\w-]+)'? (?:does not exist|is not available|not found)
  in zone '?(?P<zone>[a-z0-9-]+)
line Invalid value for field 'resource\.machineType'
line acceleratorTypes?/(?P<type>[\w-]+)'? was not found|accelerator type .{0,60}(?:not found|is not
  available in)
cause The zone {zone?asked for} does not offer {type?this machine type}: never, not only now.
change place zone: {zone?asked for} -> one that "gcloud compute machine-types list" shows for it
futile waiting for capacity
"""

QUOTA_SIGNATURES = r"""
== tpu_quota_held | root | certain
line Quota '?(?P<quota>TPU\w+)'? (?:exhausted|exceeded)
line Quota limit '?(?P<quota>TPU\w+)'? has been exceeded
near (?:queued-resources|STATE|state).{0,400}\b(?:SUSPENDED|FAILED)\b|\b(?:SUSPENDED|FAILED)\s*$
cause Dead queued resources (SUSPENDED or FAILED) still hold the quota {quota?}. They stay in the
  queue until somebody deletes them.
change act delete the dead queued resources (gcloud compute tpus queued-resources delete NAME
  --force), a decision for a person; list_orphans shows them
futile a quota increase: enough is granted, it is only held
issue marin-community/marin#87; marin-community/marin#4724

== gpu_quota_global | root | certain
line Quota '?GPUS_ALL_REGIONS'? exceeded\.?(?:\s*Limit: (?P<limit>[\d.]+))?
line GPUS_ALL_REGIONS.{0,20}(?:exceeded|violated)
cause The global GPU quota GPUS_ALL_REGIONS is {limit?used up} (0 in new projects), whatever the
  regional quota says.
change setting GPUS_ALL_REGIONS: {limit?0} -> 1 or more (a quota request; needs a paid account)
futile other zones or regions: this limit is for all of them
issue fastai/course-v3#165

== gce_regional_quota | root | certain
line Quota '?(?P<quota>[A-Z][\w-]+)'? (?:exceeded|exhausted)\.?\s*(?:Limit:? (?P<limit>[\d.]+)
  in region (?P<region>[a-z0-9-]+))?
line Quota limit '?(?P<quota>\w+)'? has been exceeded\.(?: Limit: (?P<limit>[\d.]+) in
  (?:zone|region) (?P<region>[a-z0-9-]+))?
line \bQUOTA_EXCEEDED\b|GCE quota exceeded
unless ZONE_RESOURCE_POOL_EXHAUSTED|GPUS_ALL_REGIONS
cause The quota {quota?} in {region?the region} is used up (limit {limit?reached}). It is a limit of
  the project, not a stockout.
change setting {quota?the quota}: {limit?its limit} -> more, requested for {region?the region}
change place region: {region?the one asked for} -> one in which there is quota left
futile other zones of the same region, waiting

== ec2_spot_count | root | certain
line MaxSpotInstanceCountExceeded|Max spot instance count exceeded
cause The spot quota of this instance family is used up (counted in vCPUs, for the whole region): it
  is a quota, though it looks like missing capacity.
change setting spot vCPU quota: as it is -> at least the type's vCPUs (Service Quotas, the family's
  own spot code)
change act on-demand, which has another quota
futile other Availability Zones: the limit is the region's

== ec2_vcpu_quota | root | certain
line more vCPU capacity than your current vCPU limit of (?P<limit>\d+) allows
line VcpuLimitExceeded|InstanceLimitExceeded
cause The vCPU quota of the type's family (such as "Running On-Demand G and VT instances") is
  {limit?used up}. It counts vCPUs, not instances.
change setting vCPU quota of the family: {limit?as it is} -> at least the type's vCPUs (a Service
  Quotas request; spot and on-demand are separate)
change place region: the one asked for -> one in which the quota is granted
futile other Availability Zones
issue skypilot-org/skypilot#975

== cloud_run_gpu_quota | root | certain
line Quota exceeded for total allowable count of GPUs
line do not have quota for using GPUs with(?:out)? zonal redundancy
line (?P<quota>Nvidia\w*Gpu\w*Per\w+) requested: (?P<asked>\d+) allowed: (?P<limit>\d+)
line Quota (?:violated|exceeded).{0,60}(?P<quota>Nvidia\w*Gpu\w*)(?:.{0,80}?requested:
  (?P<asked>\d+) allowed: (?P<limit>\d+))?
cause Cloud Run's GPU quota in this region does not allow it (asked {asked?more}, allowed
  {limit?fewer}). GPUs with and without zonal redundancy have separate quotas, and a rollout needs
  room for the old and the new revision together.
change setting GPU quota of the region: {limit?as it is} -> more (a request names the zonal
  redundancy)
change flag --max-instances: as it is -> a third of the quota, so that a rollout fits
change place region: the one asked for -> one with quota
futile redeploying unchanged
issue GoogleCloudPlatform/magic-modules#17149

== cloud_run_cpu_memory_quota | root | certain
line Quota (?:violated|exceeded).{0,80}?(?P<quota>(?:Cpu|Mem)\w*Alloc\w*)(?:.{0,80}?requested:
  (?P<asked>\d+) allowed: (?P<limit>\d+))?
line (?P<quota>(?:Cpu|Mem)Alloc\w*) requested: (?P<asked>\d+) allowed: (?P<limit>\d+)
line Max instances must be set to (?P<fits>\d+) or fewer
line set (?:the )?(?:max(?:imum)?[ -]instances?).{0,40}to (?P<fits>\d+)
cause Cloud Run multiplies CPU and memory by max-instances and compares that with the quota: asked
  {asked?more}, allowed {limit?less}. The message may even say that max instances must be 0: then
  one instance alone is more than the quota.
also (?P<quota>(?:Cpu|Mem)Alloc\w*) requested: (?P<asked>\d+)\s+allowed: (?P<limit>\d+)
change flag --max-instances: as it is -> 1
change flag --cpu and --memory: as they are -> what one instance may have within the quota
change place region: the one asked for -> one with more quota for CPU and memory
change setting CPU and memory quota of the region: {limit?as it is} -> more
futile setting max instances to 0: nothing would run
issue googlecodelabs/feedback#1856, #2311

== do_droplet_limit | root | certain
line (?:exceed|reached|over).{0,40}droplet limit|droplet limit.{0,40}(?:exceed|reached)
cause The account's droplet limit is reached.
change setting droplet limit: as it is -> more (a request to DigitalOcean)
change act see with list_orphans whether forgotten droplets use it up
futile other regions

== api_rate_limit | fault | certain
line RequestLimitExceeded|ThrottlingException|Rate exceeded
line RATE_LIMIT_EXCEEDED|Quota exceeded for quota metric .{0,80}(?:per minute|requests)
line \btoo_many_requests\b|rateLimitExceeded
cause Too many calls to the provider's API in a short time; nothing is wrong with the request.
change act wait for a minute, then poll less often
futile asking for machine quota

== k8s_quota | root | certain
line forbidden: exceeded quota: (?P<quota>[\w.-]+)
cause The namespace's ResourceQuota {quota?} does not allow what the pod asks for.
change setting ResourceQuota {quota?}: as it is -> enough for this pod
futile more nodes

== billing_disabled | root | certain
line BILLING_DISABLED|requires billing to be enabled|billing account.{0,60}(?:disabled|closed|not
  open)
line PendingVerification|OptInRequired
cause The provider refuses because of the account: billing is off, or the account is not verified.
change act a person opens billing for this project (or finishes the account's verification)
futile quota requests, other zones
"""


# ── knowledge / failures_client ───────────────────────────────────────────────────────────────────
# The client and its way to the machine: MCP over stdio, SSM, SSH, names that do not exist.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

CLIENT_SIGNATURES = r"""
== mcp_stdout_noise | root | certain | any level
line (?:Unexpected token|Unexpected identifier|Unexpected non-whitespace).{0,120}is not valid JSON
line (?:Failed to parse|invalid|Invalid) (?:JSONRPC|JSON-RPC) message
line not valid JSON.{0,60}(?:server|stdout)
near MCP|mcp|JSON-?RPC|stdio
cause The MCP server prints to stdout, where the stdio transport allows JSON-RPC only.
change act send every log line and banner to stderr, nothing but messages to stdout
futile the client's time-outs
issue homeassistant-ai/ha-mcp#603

== mcp_command_not_found | root | certain | any level
line spawn (?P<command>[\w./-]+) ENOENT
line (?:command not found|No such file or directory|executable file not found).{0,60}(?:mcp
  |server\.py)
line Failed to (?:spawn|start) (?:MCP )?server.{0,60}(?:not found|ENOENT)
cause The client's PATH has no command {command?of that name} (a graphical client inherits no shell
  profile).
change setting command (in the MCP config): {command?as it is} -> its absolute path (python3 and
  server.py as well)
futile time-outs, reinstalling the client
issue mark3labs/mcp-filesystem-server#6

== mcp_timeout | root | likely | any level
line Connection failed after (?P<ms>6\d{4})ms
line MCP error -32001|-32001: Request timed out
line (?:MCP|mcp).{0,80}(?:Request timed out|timed out after (?P<ms>\d+))
line Timed out while waiting for response to ClientRequest
cause The server did not answer within the client's limit (60 s, whatever MCP_TIMEOUT says): slow
  imports or cloud calls at startup, or a long tool call.
change act answer initialize at once: heavy imports and cloud calls out of the startup
change act long work as a job that is polled, with progress notifications
futile a larger MCP_TIMEOUT: the client caps it at 60 s
issue anthropics/claude-code#16837

== mcp_connection_closed | symptom | likely | any level
line MCP error -32000|-32000: Connection closed
line Server transport closed unexpectedly
line (?:mcp|MCP).{0,60}(?:stdin end|server (?:exited|disconnected|process exited))
cause The server process exited (or its stdin was closed) before or during initialize: an import
  error, a wrong interpreter, a missing variable, or a client that closed stdin.
change act run the configured command by hand and read the child's stderr
change setting command (in the MCP config): as it is -> an absolute interpreter path, with an env
  block for what it needs
futile time-outs
issue anthropics/claude-code#30147

== ssm_not_connected | root | certain
line TargetNotConnected|\((?P<instance>i-\w+) is not connected
line (?P<instance>i-[0-9a-zA-Z]+) is not connected
line InvalidInstanceId.{0,160}not in a valid state
cause The SSM agent of {instance?the instance} is not online: still booting, no instance profile
  with AmazonSSMManagedInstanceCore, no route to SSM, stopped, or another region.
change act wait for PingStatus Online (aws ssm describe-instance-information)
change grant AmazonSSMManagedInstanceCore: missing -> in the instance profile's role
change act check region and profile of the call
futile security-group rules for port 22: the agent calls out
issue aws/session-manager-plugin#5; jupyter-infra/jupyter-deploy#176

== ssh_timeout | fault | likely
line (?:ssh|port 22).{0,80}(?:Connection timed out|Operation timed out)
line connect to host \S+ port 22: (?:Connection|Operation) timed out
line Could not SSH into the instance
cause Port 22 does not answer: no firewall rule for this source, no external address, or the machine
  is still booting.
change flag --tunnel-through-iap: off -> on (with tcp:22 open from 35.235.240.0/20)
futile keys: nobody was asked for one

== resource_not_found | fault | likely
line The resource '(?P<resource>[\w./-]+)' was not found
line InvalidInstanceID\.NotFound|Cannot find service \[(?P<resource>[\w-]+)
line Service \[(?P<resource>[\w-]+)\] could not be found
line InvalidAMIID\.(?:NotFound|Malformed)|InvalidSubnetID\.NotFound|InvalidGroup\.NotFound
cause The resource {resource?named in the line} does not exist in this project, region or zone
  (right after a creation: not yet).
change place zone: as it is -> the resource's own; list it first
futile roles: a denied one answers 403

== resource_exists | fault | certain
line The resource '(?P<resource>[\w./-]+)' already exists
line \bALREADY_EXISTS\b|IdempotentParameterMismatch
cause A resource of that name exists already, perhaps from an earlier call that timed out.
change act look at the existing one first: it may be yours, and running
futile another zone: that makes a second one

== aws_no_region | root | certain
line NoRegionError|You must specify a region
cause The AWS call names no region.
change setting AWS_REGION: unset -> the rig's region
futile credentials

== do_image | root | certain
line The image you requested was not found|invalid image for Droplet
cause DigitalOcean has no image of that name for this region or droplet.
change setting image: as it is -> a slug that GET /v2/images lists
futile another size

== invalid_iam_profile | root | likely
line Invalid IAM Instance Profile name|iamInstanceProfile.{0,60}[Ii]nvalid
cause The instance profile does not exist, or is too new to be known everywhere.
change act create it; right after that wait half a minute and repeat the call
futile another instance type

== endpoint_auth_proxy | root | likely
line litellm\.(?:AuthenticationError|NotFoundError|BadRequestError)
line LiteLLM.{0,80}(?:No (?:deployments|model)|Invalid model name)
cause LiteLLM does not reach the model under the name or key that it was given.
change setting model (litellm_config.yaml): as it is -> openai/NAME, as /v1/models lists it
change setting api_base: as it is -> the endpoint with /v1
futile restarting the model server
"""


# ── knowledge / failures_compile ──────────────────────────────────────────────────────────────────
# Kernels and graphs do not compile: Mosaic, Triton, inductor, XLA, Neuron, their caches.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

COMPILE_SIGNATURES = r"""
== mosaic_compile_failed | root | certain
line Mosaic failed to compile
line (?:tpu_custom_call|Mosaic|Pallas).{0,160}(?:failed to (?:compile|lower)|not (?:implemented
  |supported)|unsupported)
unless memory space (?:hbm|vmem|smem)
cause A Pallas (Mosaic) kernel does not compile for this chip generation: a shape or layout that the
  kernel or libtpu does not handle. Not memory.
change package vllm, tpu-inference and libtpu: as they are -> one release's set (a pinned image
  digest that was tried on this chip)
change flag --block-size: as it is -> another page size (128)
futile --enforce-eager: kernels are compiled all the same; memory flags
issue vllm-project/tpu-inference#1425, #898

== xla_compile_failed | fault | likely
line XLA:TPU compile permanent error
line (?:XlaRuntimeError|JaxRuntimeError): (?:INTERNAL|UNIMPLEMENTED|INVALID_ARGUMENT): (?P<why>[\w
  ,.'-]+)
line INTERNAL: (?:Mosaic|Failed to compile|during context)
unless Ran out of memory|Mosaic failed
cause XLA refuses the program ({why?see the line}). 'Permanent' means that a retry cannot help.
change package jax, jaxlib and libtpu: as they are -> one release's set
change act make the failing shape smaller (batch, sequence) to find what it objects to
futile retrying

== compile_cache_stale | root | likely
line (?:incompatible|version mismatch|failed to deserialize).{0,120}(?:compilation cache|serialized
  executable|cached executable)
line (?:compilation cache|serialized executable|cached (?:executable|graph)).{0,120}(?:incompatible
  |mismatch|corrupt|failed to)
line proto deserialization failed
cause A compiled program in the cache was made by another build, or is damaged.
change setting JAX_COMPILATION_CACHE_DIR: as it is -> a folder per engine build (VLLM_XLA_CACHE_PATH
  in vLLM)
futile memory flags

== compiler_missing | root | certain
line Failed to find C compiler|Could not find (?:a )?(?:gcc|clang|cl\.exe)
line fatal error: Python\.h: No such file
line (?:nvcc|ninja|g\+\+|gcc): (?:command )?not found|Could not find nvcc
line (?:RuntimeError|OSError): (?:Ninja|CUDA_HOME).{0,60}(?:required|not set)
cause A kernel is compiled at start and the tool for it (C compiler, Python headers, nvcc, ninja) is
  not in the image.
change package build tools: missing -> gcc and python3-dev (nvcc, ninja where named), or an image
  that brings them
change flag --enforce-eager: off -> on, where only torch.compile needs them
futile memory flags

== ptxas_target_unknown | root | certain
line ptxas fatal.{0,40}: Value '(?P<sm>sm_\w+)' is not defined
line Unsupported gpu architecture '?(?P<sm>\w+)|LLVM ERROR: Cannot select
cause The compiler in the image does not know this card's architecture ({sm?too new}).
change package CUDA toolkit and Triton: as they are -> versions that know {sm?the card}
futile an older card's flags

== triton_compile_failed | fault | likely
line (?:triton\S{0,40}CompilationError|triton.compiler.errors)
line (?:BackendCompilerFailed|InductorError|torch\._inductor\.exc)
line Triton Error \[(?:CUDA|HIP)\]
unless shared memory|C compiler
cause A kernel of torch.compile or Triton does not compile for this model and card.
change flag --enforce-eager: off -> on (or --compilation-config level 0), to go without
change package torch and triton: as they are -> the pair that the engine pins
futile memory flags

== flashinfer_jit_failed | root | likely
line flashinfer.{0,160}(?:failed|error|not supported|unsupported)
unless No module named
cause FlashInfer's kernels were not built for this card or cannot be compiled here.
change flag --attention-backend: FLASHINFER -> TRITON_ATTN
futile memory flags

== neuron_compile_failed | root | likely
line \[(?P<code>N[A-Z]+\d+|[A-Z]{2,6}\d{3})\].{0,160}neuronx?-?cc
line neuronx?-cc (?:failed|terminated|returned|exited)|RunNeuronCCImpl: error condition
line Compilation failed for .{0,80}neff|Failed compilation with \['?neuronx-cc
unless F137|forcibly killed
cause The Neuron compiler refuses the graph ({code?see its log}): an operator or shape that it does
  not support.
change act static shapes only; embedding gathers outside the graph; the compiler's log names the
  operator
change package neuronx-cc and torch-neuronx: as they are -> one SDK release's set
futile more memory on the device

== nan_logits | root | likely
line probability tensor contains either `?inf`?, `?nan`?
line \bNaN (?:values? )?(?:found |detected )?in (?:the )?(?:logits|hidden states)
cause Numbers overflowed to inf or nan: float16 is too narrow for Gemma's activations.
change flag --dtype: float16 -> bfloat16 (or float32 on cards without it)
futile another temperature, another prompt

== cuda_async_fault | fault | likely
line CUDA error: (?P<why>an illegal memory access was encountered|device-side assert triggered
  |unspecified launch failure|misaligned address)
line an illegal memory access was encountered|device-side assert triggered
line HIP error: (?P<why>[\w -]+)|Memory (?:access|critical) (?:fault|error) by
line ROCm error: (?P<why>[\w -]+)
cause A kernel failed on the card ({why?see the line}); CUDA reports it later, so the stack trace
  may point elsewhere.
change setting CUDA_LAUNCH_BLOCKING: 0 -> 1, for one run that shows the true place
change flag --enforce-eager: off -> on, to see whether a captured graph is at fault
futile believing the stack trace; restarting alone

== nccl_failed | fault | likely
line NCCL error.{0,60}: (?P<why>[\w ]+)|ncclSystemError|ncclInternalError|ncclUnhandledCudaError
line RCCL error|ncclRemoteError
unless /dev/shm
cause The cards cannot talk to each other (NCCL).
change setting NCCL_DEBUG: unset -> INFO, for one run that says why
change flag --shm-size: 64m -> 8g (or --ipc=host)
futile a smaller model
"""


# ── knowledge / failures_image ────────────────────────────────────────────────────────────────────
# Images and files do not arrive: registries, the Hub, networks, broken and half files.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

IMAGE_SIGNATURES = r"""
== image_rate_limit | root | certain
line toomanyrequests|reached your (?:unauthenticated )?pull rate limit
line \b429 Too Many Requests\b.{0,80}(?:registry|docker|manifests)
cause The registry (Docker Hub) refuses further pulls from this address without an account.
change run docker login
change act pull from a mirror or from your own registry, by digest
futile a larger disk, trying again at once

== image_not_found | root | certain
line manifest (?:for )?(?P<image>[\w./:@-]+)? ?(?:not found|unknown)
line manifest unknown|name unknown: 
line Image '(?P<image>[\w./:@-]+)' not found
cause There is no image {image?of that name} or no such tag in the registry.
change setting image: {image?as it is} -> a tag or digest that the registry lists
futile credentials, where the registry says unknown and not denied

== image_wrong_platform | root | certain
line exec format error|no matching manifest for (?P<platform>[\w/]+)
line manifest type .{0,80}must support amd64/linux
cause The image is built for another processor ({platform?arm64 and amd64 differ}) than the
  machine's.
change flag --platform: as it is -> the machine's own (linux/amd64 or linux/arm64), at the build
futile trying again, more memory

== image_pull_backoff | symptom | likely
line ImagePullBackOff|ErrImagePull|Failed to pull image
cause The cluster cannot pull the image; the registry's own words stand in the event beside it.
change act read the event's message: name, tag, permission or rate limit
futile deleting the pod

== image_pull_network | fault | likely
line (?:pull|registry|docker).{0,160}(?:TLS handshake timeout|i/o timeout|connection refused|reset
  by peer)
line error pulling image.{0,120}(?:timeout|EOF|refused)
line (?:Get|Head) "?https://[\w./-]+/v2/.{0,160}(?:timeout|canceled|EOF|refused|no such host)
cause The registry could not be reached: no way out of the network (no external address and no Cloud
  NAT), a proxy, or a passing fault.
change act give the subnet a way out (Cloud NAT, Private Google Access), or pull through a mirror
futile credentials

== unpack_failed | fault | likely
line failed to register layer|failed to extract layer|error creating overlay mount
unless no space left
cause Docker could not unpack a layer of the image.
change act look for disk, inode and file-system errors (df -h, df -i, dmesg), then pull again
futile another tag of the same image
"""

DOWNLOAD_SIGNATURES = r"""
== hf_repository_not_found | root | certain
line Repository Not Found for url: \S*?huggingface\.co/(?:api/models/)?(?P<model>[\w.-]+/[\w.-]+)
line RepositoryNotFoundError|is not a local folder and is not a valid model identifier
line is not a valid model identifier listed on
line answers 404 .{0,60}check MODEL_NAME
line Repo id must be in the form|HFValidationError
also (?:huggingface\.co/(?:api/models/)?|^|[ '])(?P<model>[\w-]+/[\w.-]+)(?:/resolve| is not a
  local)
cause The Hub has no repository {model?of that name}, or it is private and no token came along (the
  Hub answers both alike).
change setting MODEL_NAME: {model?as it is} -> the exact repository, such as google/gemma-4-E2B-it
change setting HF_TOKEN: not set -> a token that may read it, where it is private
futile a faster network

== hf_revision_not_found | root | certain
line Revision Not Found for url|RevisionNotFoundError|is not a valid git identifier
cause The repository has no such branch, tag or commit.
change flag --revision: as it is -> a commit that the repository lists
futile a token

== hf_file_missing | root | certain
line does not appear to have (?:a file|files) named (?P<file>[\w./ ,()'-]+?)\.(?: Checkout| Please
  |$)
line Entry Not Found for url|EntryNotFoundError
line Error no file named (?P<file>[\w.]+)
line No such file or directory: '(?P<file>[^']*(?:config\.json|safetensors|tokenizer[\w.]*|gguf))'
line (?:Cannot find|Can't find) any (?:model weights|safetensors)
line Cannot find the config file for
line Invalid repository ID or local directory specified
cause The checkpoint lacks {file?a file}: a half-finished download or copy, a GGUF-only repository,
  or the wrong folder.
change act download or copy the whole checkpoint again (config.json, tokenizer files, all shards)
change setting MODEL_NAME: as it is -> the folder that holds config.json
futile engine flags

== hf_offline | root | certain
line Cannot reach \S{0,200} offline mode is enabled
line OfflineModeIsEnabled|LocalEntryNotFoundError|cannot find the requested files in the (?:disk
  |local) cache
line couldn't connect to '?https://huggingface\.co'? to load
near [Oo]ffline|LocalEntryNotFound|cannot find|couldn't connect|outgoing traffic
cause The Hub is not asked or not reachable, and the files are not in the local cache.
change setting HF_HUB_OFFLINE: 1 -> 0 for the download; or download beforehand
change act check the way out of the network, or serve a local folder
futile a token: nobody was asked

== hf_rate_limit | root | certain
line \b429 (?:Client Error|Too Many Requests).{0,80}(?:huggingface|hf\.co)
line HfHubHTTPError: 429
cause The Hub limits requests from this address.
change setting HF_TOKEN: not set -> a token (accounts have a higher limit)
change act wait, and keep the cache between starts
futile engine flags

== hf_server_error | fault | likely
line HfHubHTTPError: 50[0234]
line \b50[0234] Server Error.{0,80}huggingface
cause The Hub failed to answer; nothing is wrong here.
change act try again later, or serve from a mirror or a bucket
futile a token

== download_incomplete | root | certain
line Consistency check failed: file should be of size (?P<wanted>\d+) but has size (?P<found>\d+)
line (?:IncompleteRead|ChunkedEncodingError|ContentTooShort|download.{0,40}incomplete)
line (?:sha256|digest|checksum).{0,40}mismatch
cause A file did not arrive whole (it should have {wanted?more} bytes).
change act remove the partial file and download again: the cache goes on where it stopped
futile a larger card
issue huggingface/huggingface_hub#1498

== dns_failed | fault | likely
line getaddrinfo failed|no such host|nodename nor servname provided
line Temporary failure in name resolution|Name or service not known|Could not resolve host
line lookup \S+ on \S+ (?:server misbehaving|no such host)
cause A host name could not be resolved: no network, no DNS, or no way out of the subnet.
change act check DNS and the way out (Cloud NAT, a proxy) on that machine
futile a token, engine flags

== network_unreachable | fault | likely
line Network is unreachable|No route to host|ConnectTimeoutError|Max retries exceeded with url
cause A server outside could not be reached from that machine.
change act give the machine a way out (Cloud NAT, Private Google Access), or a proxy (HTTPS_PROXY)
futile a token

== gcs_bucket_missing | root | certain
line The specified bucket does not exist|NoSuchBucket|bucket not found
line No URLs matched: gs://(?P<bucket>[\w./-]+)|matched no objects
cause The bucket or the path {bucket?in it} does not exist.
change setting model path: as it is -> an existing object path (gcloud storage ls shows it)
futile roles: a denied bucket answers 403

== pip_no_version | root | certain
line No matching distribution found for (?P<package>[\w.=<>!~\[\],-]+)
line ResolutionImpossible|Cannot install .{0,120}because these package versions have conflicting
line resolver .{0,40}(?:conflict|incompatible)|No solution found when resolving
cause pip finds no set of versions for {package?what is asked}: the range, this Python version or
  this platform excludes all.
change package {package?the requirement}: as it is -> a range that this Python and platform have
futile trying again

== pip_externally_managed | root | certain
line externally-managed-environment
cause The system's Python refuses installs into itself.
change flag pip install: into the system -> --target into a folder of one's own
futile sudo

== ollama_model_missing | root | certain
line model ["'](?P<model>[\w.:/-]+)["'] not found
line pull model manifest: file does not exist
cause Ollama does not have the model {model?asked for} (tags are exact).
change run ollama pull {model}
futile restarting the server

== ollama_too_old | root | certain
line requires a newer version of Ollama|pull model manifest: 412
cause The model needs a newer Ollama than the one installed.
change package ollama: as it is -> newer (upgrade)
futile another quantisation of the same model
"""


# ── knowledge / failures_load ─────────────────────────────────────────────────────────────────────
# Checkpoint and engine do not fit each other: architectures, tensors, formats, versions, flags.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

LOAD_SIGNATURES = r"""
== missing_k_norm | root | certain
line weights were not initialized from checkpoint
line (?:Missing key|missing (?:\d+ )?(?:keys?|tensors?|weights?|parameters?)).{0,400}k_norm
line Missing \d+ parameters
line (?:tensor|weight|key|KeyError).{0,160}k_norm.{0,80}(?:not found|missing|is missing)
line KeyError: .{0,120}self_attn\.k_norm
near (?:layers|blk)\.(?P<layer>\d+)\.\S{0,20}k_norm
also layers\.(?P<layer>\d+)\.\S{0,20}k_norm
cause Gemma 4's last layers share the KV cache of earlier ones and own no k_norm (E2B: layers 15 to
  34). The export omits it rightly; the loader demands it. The fault is the loader's, the checkpoint
  is whole.
change package vllm: as it is -> a build with PR #54917 (tpu-inference: PR #3299)
change setting MODEL_NAME: the QAT or fine-tuned export -> the plain -it checkpoint, which carries
  the redundant tensors
futile downloading again: nothing is missing from the files
issue vllm-project/vllm#44788 (fix: PR #54917); vllm-project/tpu-inference#3225

== extra_k_norm | root | certain
line (?:not in model|unexpected key|no parameter|unrecognized).{0,400}k_norm
line k_norm.{0,160}(?:not in model|is unexpected|not in params_dict)
line Received (?:\d+ )?parameters? not in model
near k_norm
cause The checkpoint carries k_norm tensors for layers that share KV and have none in this engine's
  model: redundant tensors that the loader should skip. The inverse of a missing k_norm.
change package engine: as it is -> a build that skips tensors of KV-shared layers
change act or a checkpoint exported without them
futile a new download: the file is as published
issue vllm-project/vllm-metal#299

== parameters_not_in_model | root | likely
line Received (?P<count>\d+) parameters? not in model
line (?P<count>\d+) parameters? not in model
line Unexpected key\(s\) in state_dict|unexpected keys? in (?:the )?checkpoint
line There is no module or parameter named '?(?P<name>[\w.]+)
unless k_norm
cause The checkpoint's tensors ({count?several}) have names that this engine's model does not have:
  a quantised layout (such as compressed-tensors w4a16) or wrapper that it does not know.
change setting MODEL_NAME: as it is -> a checkpoint in a layout that this engine loads (bf16, or its
  own quantisation)
change package engine: as it is -> one that supports this quantisation
futile memory flags
issue jundot/omlx#1775

== missing_v_proj | root | likely
line Found a different quantization schemes? for
line (?:KeyError|[Mm]issing|not found|not initialized).{0,400}v_proj
line v_proj.{0,120}(?:not found|missing|KeyError)
cause A tensor v_proj is missing: layers of Gemma 4 with attention_k_eq_v have none, and mixed
  quantisation in one fused qkv breaks on that.
change setting MODEL_NAME: the mixed quantised checkpoint -> one quantised uniformly (or bf16)
change package vllm: as it is -> newer
futile downloading again
issue vllm-project/vllm#47473

== weights_not_initialized | fault | likely
line weights were not initialized from checkpoint
line Error\(s\) in loading state_dict|Missing key\(s\) in state_dict
line size mismatch for (?P<name>[\w.]+)
line Tried to load weights of size
unless k_norm|v_proj
cause Checkpoint and model code do not agree on their tensors ({name?see the line}).
change package vllm and transformers: as they are -> the versions that the checkpoint names
change act check config.json against the checkpoint's family and size
futile memory flags

== unsupported_quant_scheme | root | certain
line No compressed-tensors compatible scheme was found
line (?:quantization|quantisation)(?: method)? '?"?(?P<method>[\w-]+)'?"? is not supported
line (?:Unknown|Unsupported|Invalid) quantization (?:method|type|scheme):? ?(?P<method>[\w-]+)?
line does not match the quantization method specified in
line quantization (?:method )?(?P<method>[\w-]+) is currently not supported
cause This build (or this hardware) has no kernel for the checkpoint's quantisation scheme
  {method?(compressed-tensors)}.
change setting MODEL_NAME: as it is -> a checkpoint whose scheme is in the engine's table for this
  hardware (bf16, fp8)
change package vllm: as it is -> newer, where its table has the scheme
futile memory flags, --dtype
issue vllm-project/vllm#19853

== transformers_too_old | root | certain
line model type `?'?(?P<type>[\w-]+)`?'? but Transformers does not recognize this architecture
line Transformers does not recognize this architecture
line requires (?:a )?transformers ?(?:version )?(?:>=|newer than|at least) ?(?P<needed>[\d.]+)
line cannot import name '?(?P<name>Gemma4\w*)'? from 'transformers
line (?:KeyError|ValueError): '?gemma4\w*'?\s*$
cause The installed transformers is older than the model ({type?its type} is unknown to it).
change package transformers: as it is -> newer, within the engine's range (update or rebuild the
  image)
futile --trust-remote-code: the repository holds no code for it
issue timothystewart6/vllm-gb10#97

== transformers_too_new | root | certain
line AmbiguousGlobalPerLayerAttribute
line requires transformers.{0,20}(?:<|==) ?(?P<limit>[\d.]+).{0,60}(?:you have|found|installed)
line Gemma4\w*Config' object has no attribute '(?P<name>\w+)
line (?:head_dim|num_key_value_heads).{0,60}(?:ambiguous|per[- ]layer)
cause The installed transformers is newer than this engine expects: since 5.15 a Gemma 4 config has
  no single head_dim, and vLLM up to 0.27.1 reads one.
change package vllm: as it is -> 0.28 or newer (fix: PR #49797)
change package transformers: as it is -> pinned to 5.14.1 (downgrade), where vLLM has to stay
futile upgrading transformers further, memory flags
issue vllm-project/vllm#52768, #51744 (fix: PR #49797)

== architecture_unsupported | root | certain
line Model architectures \[?'?(?P<type>\w+)'?\]? .{0,60}(?:are not supported|failed to be inspected)
line has no (?:vLLM|TPU|JAX) implementation|not supported for now
line Unrecognized model in (?P<model>[\w./-]+)|Should have a `model_type` key
line (?:Cannot find model module|No model class|Unsupported architecture)\W{1,4}(?P<type>\w+)?
line Unknown RoPE scaling type
cause This engine's build has no implementation of {type?the model's architecture}.
change package engine: as it is -> newer, with Gemma 4
change act check that config.json is the model's own and whole
futile memory flags

== pickle_refused | root | certain
line serious vulnerability issue in `?torch\.load
line Weights only load failed
line (?:pytorch_model|consolidated)\S*\.(?:bin|pth|pt)\b.{0,160}(?:pickle|unsafe|refus)
cause The checkpoint holds pickled weights, which run code when they are loaded; they are refused.
change setting MODEL_NAME: as it is -> a checkpoint in safetensors
futile switching the check off: it is a stranger's program

== gguf_arch_unknown | root | certain
line unknown (?:model )?architecture: '?"?(?P<type>[\w-]+)
line unsupported (?:model )?architecture:? \[?'?"?(?P<type>gemma\w+)
line unknown pre-tokenizer type: '(?P<type>[\w.-]+)
cause The llama.cpp build (or the Ollama around it) is older than {type?the model}.
change package llama.cpp or ollama: as it is -> newer (update or rebuild)
futile GPU layers, context, memory: loading stopped before any of them counted
issue ggml-org/llama.cpp#21309; ollama/ollama#15303

== gguf_damaged | root | certain
line is not within the file bounds, model is corrupted or incomplete
line invalid magic(?: characters?|:)|failed to read (?:magic|tensor|key)
line wrong number of tensors; expected (?P<wanted>\d+), got (?P<found>\d+)
line missing tensor '(?P<name>[\w.]+)
line check_tensor_dims: tensor '(?P<name>[\w.]+)' (?:not found|has wrong shape)
line gguf_init_from_file: .{0,80}(?:failed|error)
cause The GGUF file is damaged, cut off, or of a newer layout than the build ({name?see the line}).
change act download it again and compare its SHA-256; then a newer llama.cpp
futile fewer GPU layers

== gguf_metadata_missing | root | certain
line error loading model hyperparameters|key not found in model: (?P<name>[\w.]+)
cause The GGUF file lacks a key that this build reads ({name?see the line}): it was converted by or
  for another program (Ollama's own files differ from llama.cpp's).
change setting MODEL_NAME: as it is -> a GGUF made by llama.cpp's own converter for this model
change package llama.cpp: as it is -> the build that the file names
futile fewer GPU layers, a shorter context

== safetensors_damaged | root | certain
line SafetensorError|deserializing header
line MetadataIncompleteBuffer|InvalidHeaderDeserialization|HeaderTooLarge
cause A safetensors file is cut off or is no such file (a Git LFS pointer, a web page).
change act remove that file and download it again; compare its size with the repository's
futile engine flags

== cuda_kernel_crash | root | likely
line fattn[\w.-]*\.cuh?:\d+: (?:fatal error|GGML_ASSERT)
line ggml_cuda_flash_attn_ext
line flash_attn.{0,80}(?:fatal error|abort|not implemented|unsupported)
cause llama.cpp's CUDA flash attention has no kernel for this model on this card (Gemma 4's head
  sizes; Turing and others).
change flag --flash-attn: on -> off
change package llama.cpp: as it is -> a build with PR #25148 (or Vulkan meanwhile)
futile fewer GPU layers, a shorter context
issue ggml-org/llama.cpp#24400, #24376

== ggml_split_inputs | root | certain
line GGML_SCHED_MAX_SPLIT_INPUTS
line n_inputs < GGML_SCHED
cause A partial offload splits the graph into more inputs than ggml's limit: some layers on the GPU
  and some not, on a small card.
change flag --n-gpu-layers: some -> all (99) or none (0)
change package llama.cpp or ollama: as it is -> another build
futile a shorter context
issue ollama/ollama#16506; ggml-org/llama.cpp#24132

== ggml_assert | fault | likely
line (?P<file>[\w./-]+\.(?:cpp|cuh?|c)):\d+: GGML_ASSERT
line GGML_ASSERT\(.{1,120}\) failed
unless GGML_SCHED_MAX_SPLIT_INPUTS|fattn
cause An assertion of ggml failed: a case that this build does not handle.
change package llama.cpp: as it is -> another build (regressions are usual within a week)
change flag --n-gpu-layers: as it is -> 0, to see whether the backend is at fault
futile trying again with the same build

== model_parser_mismatch | root | certain
line Gemma4ReasoningParser|Gemma4ToolParser
line (?:reasoning|tool[_ ]call)[_ ]parser.{0,120}(?:could not locate|cannot find
  |missing).{0,60}token
near ['"/](?:google/)?gemma-(?P<generation>[123])-[\w.-]+
cause A Gemma {generation?3} model is served with Gemma 4's parsers or chat template: its tokenizer
  has none of their tokens. The arguments tell it (a gemma-3 model, a gemma4 parser), not the error.
change setting MODEL_NAME: the gemma-{generation?3} model -> the Gemma 4 model of that size
change flag --reasoning-parser: gemma4 -> none, for a Gemma {generation?3} model
change flag --tool-call-parser: gemma4 -> none (and its --chat-template), for the same model
futile a newer vLLM
issue vllm-project/recipes#515

== parser_unknown | root | certain
line invalid (?:tool call|reasoning) parser: ?(?P<name>[\w-]+)
line (?:reasoning|tool) parser '?(?P<name>[\w-]+)'? (?:not found|is not registered)
line KeyError: .{0,20}invalid (?:tool|reasoning).{0,40}parser
cause This build knows no parser {name?of that name} (it is older than the model's recipe).
change package vllm: as it is -> newer, which has it
change flag --tool-call-parser: {name?as it is} -> one that the message lists
futile another chat template

== chat_template_missing | root | certain
line default chat template is no longer allowed|must provide a chat template
line tokenizer\.chat_template is not set|does not (?:have|define) a chat template
line Cannot use chat template functions because
line chat template .{0,80}(?:does not exist|not found|appears path-like)
cause The tokenizer has no chat template: a base model, or a checkpoint copied without
  chat_template.jinja.
change setting MODEL_NAME: the base model -> its -it variant
change flag --chat-template: none -> the model's own template file
futile another prompt, a larger context

== cli_flag_error | root | certain
line unrecognized arguments?:\s*(?P<flag>--?[\w-]+)
line error: argument (?P<flag>--?[\w/-]+): (?P<why>[\w ']+)
line error: the following arguments are required: (?P<flag>[\w, -]+)
line (?:error: )?(?:unknown|unexpected|invalid) (?:argument|option|flag):? '?(?P<flag>--?[\w-]+)
line error while handling argument "(?P<flag>--?[\w-]+)"
line No such option: (?P<flag>--?[\w-]+)
line ambiguous option: (?P<flag>--?[\w-]+)
line Invalid choice: '?(?P<flag>[\w-]+)
line arguments? (?:was|were) not expected: (?P<flag>--?[\w-]+)
cause The program does not accept {flag?an argument}: misspelt, of another version, or with a wrong
  value. It ended at once; probe or readiness messages after it are only its echo.
change flag {flag?the flag}: as given -> removed, or as this version's --help spells it
futile longer start-up timeouts, more memory, another port
issue googlecodelabs/feedback#1825

== config_rejected | fault | certain
line validation errors? for (?P<name>\w+)
line (?:ValidationError|pydantic).{0,80}(?:Value error|Extra inputs|Input should)
cause The engine refuses its configuration ({name?see the line}); the reason stands in the lines
  below it.
change act correct the value that the next lines name
futile trying again

== context_beyond_model | root | certain
line User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len
  \(.{0,60}?(?P<fits>\d+)
line max_model_len .{0,60}(?:exceeds|is greater than|larger than) .{0,60}?(?P<fits>\d{3,})
cause The context asked for ({asked?too long}) is longer than the model was made for ({fits?less}).
change flag --max-model-len: {asked?as it is} -> {fits?the model's own}
futile VLLM_ALLOW_LONG_MAX_MODEL_LEN: answers beyond the model's context are not sound

== batched_tokens_too_small | root | certain
line max_num_batched_tokens \((?P<batch>\d+)\) is smaller than max_model_len \((?P<needed>\d+)\)
line max_tokens_per_mm_item \((?P<needed>\d+)\).{0,80}max_num_batched_tokens \((?P<batch>\d+)\)
cause One step may hold {batch?fewer} tokens, and one item needs {needed?more}.
change flag --max-num-batched-tokens: {batch?as it is} -> {needed?the number in the message}
futile more memory

== parallel_size_invalid | root | certain
line attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<asked>\d+)\)
line must be divisible by (?:the )?tensor[ _](?:model )?parallel[ _]size
line not aligned with the quantized weight shape
sum largest_divisor
cause {heads?The} attention heads cannot be split over {asked?so many} devices.
change flag --tensor-parallel-size: {asked?as it is} -> {fits?a divisor of the heads}
futile more memory

== too_few_devices | root | certain
line world size \((?P<asked>\d+)\) is larger than the number of available (?:GPUs|devices)
  \((?P<fits>\d+)\)
line (?:tensor_parallel_size|World size).{0,60}(?:larger|greater) than the number of available
line The number of required (?:GPUs|TPUs|TPU chips) exceeds the total number of available
cause More devices are asked for ({asked?see the line}) than there are ({fits?fewer}).
change flag --tensor-parallel-size: {asked?as it is} -> {fits?the number of devices}
futile waiting

== remote_code_wanted | root | certain
line contains custom code which must be executed
line requires you to execute the configuration file in that repo
line [Pp]lease pass the (?:argument|option) `?trust_remote_code
cause The repository wants to run its own Python code here. Gemma 4 needs none.
change setting MODEL_NAME: as it is -> the checkpoint of google, which loads without code
futile --trust-remote-code: it runs a stranger's program

== python_module_missing | fault | certain
line (?:ModuleNotFoundError|ImportError): No module named '(?P<module>[\w.]+)
line Please install (?P<module>vllm\[\w+\])
cause The Python package {module?named in the line} is not installed in the environment that runs.
change package {module?the package}: missing -> installed into the same environment (same version of
  the engine for extras)
futile another model

== sdk_renamed | root | certain
line No module named 'mcp\.server\.fastmcp
cause The server was written for mcp 1.x: in 2.x FastMCP is called MCPServer and lives elsewhere.
change package mcp: 2.x -> below 2 for that server, or port it to mcp.server.MCPServer
futile reinstalling

== adapter_import | fault | likely
line (?:ImportError|AttributeError): .{0,120}(?:cannot import name|has no attribute) '(?P<name>\w+)'
line ImportError: cannot import name '?(?P<name>\w+)
line got an unexpected keyword argument '(?P<name>\w+)'
cause Two packages of different generations are installed together ({name?see the line}).
change act install the set that the engine's release pins, in one resolution
futile engine flags

== jax_server_refused | root | certain
line jax_server: (?!\s*\d+% |listening on |whoever reaches
  |ended during |cannot listen )\S
unless RESOURCE_EXHAUSTED|Unable to allocate
cause The JAX engine does not take what it was started with; the line names the key, the tensor or
  the option.
change setting MODEL_NAME: as it is -> a Gemma 4 release in bf16 or f32, whole (it computes no other
  model, no quantised weights, and fills no gap)
change flag --max-model-len: as it is -> what the line allows, where it speaks of positions
futile memory flags, and starting it again as it is

== gemma_config_fault | root | likely
line head_dim.{0,80}(?:mismatch|must be equal|shape)|shape '\[[^\]]+\]' is invalid for input of size
line '(?:sliding|full)_attention' is not in list
line (?:mat1 and mat2 shapes cannot be multiplied|The size of tensor a \(\d+\) must match)
cause Shapes do not fit: Gemma 4 has 256-wide heads in sliding layers and 512-wide ones in global
  layers, and code that reads one head_dim for all breaks on it.
change package engine: as it is -> a build that knows both head sizes
futile memory flags
"""


# ── knowledge / failures_machine ──────────────────────────────────────────────────────────────────
# What a rented machine's own boot says: its GPU, its compilers, its source, the step that failed.
#
# Data for the failure bank, in its grammar. Sources: the boot programs' own words, and
# what cmake, nvcc, g++ and pip wrote when they failed for want of a compiler, memory or a hash.

MACHINE_SIGNATURES = r"""
== gpu_of_another_arch | root | certain
line the GPU is an? (?P<card>.{1,60}) of compute capability (?P<found>\d+\.\d), this rig is for
  (?P<needed>\d+\.\d)
cause The machine's GPU is {card?another one} ({found?of another architecture}); what this rig
  builds or pulls is for {needed?GPU_ARCH}.
change setting INSTANCE_TYPE: as it is -> one whose GPU has compute capability {needed?GPU_ARCH}
change setting GPU_ARCH: {needed?as it is} -> {found?the GPU's}, with CHIP, where this GPU is meant
futile another driver, building again

== cuda_toolkit_missing | root | certain
line nvcc is not on this machine
line No CMAKE_CUDA_COMPILER could be found
line Failed to find nvcc|Could not find nvcc, please set CUDAToolkit_ROOT
cause There is no CUDA compiler to build with: the machine image has a driver at most.
change setting AMI_PARAMETER: as it is -> an image that has NVIDIA's driver and the CUDA toolkit
futile building again, another driver

== built_program_sees_no_gpu | root | likely
line the program that was built sees no GPU
line found no GPU and computes on the processor
line ggml_cuda_init: failed to initialize CUDA: (?P<why>[\w -]+)
cause llama-server was built and does not see the GPU ({why?its driver and its CUDA do not fit}).
change act compare verify_gpu_arch(): the driver's CUDA must not be older than the toolkit's
change act stop and start the machine, where the driver was there at the build
futile memory flags, other weights

== compiler_killed | root | certain
line Killed signal terminated program (?P<name>[\w.+-]+)
line (?P<name>cc1plus|cicc|ptxas|nvcc).{0,40}(?:died due to signal 9|Killed)\b
line virtual memory exhausted: Cannot allocate memory
cause The kernel ended the compiler {name?} for memory.
change setting INSTANCE_TYPE: as it is -> the next size, with twice the memory
change act leave the disk room for the swap file that a build makes where memory is short
futile building again on the same machine, GPU memory flags

== source_does_not_compile | root | likely
line (?P<file>[\w./+-]+\.(?:cuh?|cpp|cc?|hp?p?))(?:\(\d+\)|:\d+(?::\d+)?): (?:fatal )?error:
  (?P<why>.{1,120})
unless No space left|Killed signal
cause The compiler refuses {file?a file} ({why?its message}): this source, this toolkit and these
  flags do not go together.
change setting AMI_PARAMETER: as it is -> an image with the CUDA toolkit that the source was tried
  with
change act compare the toolkit in get_build_progress() with the one in this rig's README
futile building again, more memory

== pip_hash_mismatch | root | certain
line THESE PACKAGES DO NOT MATCH THE HASHES
line what pip fetched as (?P<package>[\w.=-]+) is not the archive
cause What the package index gave for {package?a package} is not the file that was pinned by hash.
change act look at the index: a mirror that changes files, or one that was tampered with
futile building again without the hash: then nobody knows what is run

== weights_of_another_hash | root | certain
line (?P<file>[\w.-]+) came, and is not the file of that size and hash
cause {file?The file} was fetched whole, and is not the file that was asked for.
change setting MODEL_SHA256: as it is -> the file's own, where another was meant
change act start the model server again: what came was thrown away
futile a token

== weights_file_unclear | root | certain
line has no one such file \((?P<files>[^)]{0,200})\)
line the Hub tells no size and hash of (?P<files>[\w.-]+)
cause The repository has no single file that is meant ({files?see the message}).
change setting MODEL_FILE: as it is -> the one to serve, of those in the repository
change setting MODEL_SHA256: as it is -> the file's own, where the Hub tells none
futile a token, downloading again

== boot_step_failed | echo | likely
line GEMMA4-BOOT (?P<phase>[a-z]+) failed \d+ (?P<why>.{1,200})
cause The machine's boot stopped in its phase {phase?of that name}: {why?see the line}.
change act see to what the line says, then start the model server again
futile waiting: nothing goes on by itself
"""


# ── knowledge / failures_memory ───────────────────────────────────────────────────────────────────
# How memory runs out, on cards, chips and hosts: what each program says then, and what helps.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

MEMORY_SIGNATURES = r"""
== kv_cache_too_small | root | certain
line max seq len \((?P<asked>[\d,]+)\) is larger than the maximum number of tokens that can be
  stored in (?:the )?KV cache \((?P<estimated>[\d,]+)\)
line serve at least one request with .{0,40}max seq len \(?(?P<asked>[\d,]+)\)?,
  .{0,10}?(?P<needed>[\d.]+) GiB KV cache is needed.{0,80}?available KV cache memory
  \((?P<available>[\d.]+) GiB\)(?:.{0,80}?estimated maximum model length is (?P<estimated>[\d,]+))?
line larger than the available KV cache memory \((?P<available>[\d.]+) GiB\)
line not enough KV cache (?:memory|space|blocks) .{0,60}max[_ ]model[_ ]len\D{0,12}(?P<asked>\d+)
sum context_that_fits
cause What weights and activations leave for the KV cache cannot hold one request of
  {asked?the asked} tokens; {fits?fewer} tokens fit.
change flag --max-model-len: {asked?the asked length} -> {fits?the length that the message names}
change flag --gpu-memory-utilization: as it is -> up to 0.95, if nothing else uses the card
change flag --kv-cache-dtype: auto -> fp8, where the card has fp8 (half the bytes a token)
futile a lower --max-num-seqs: it is one request that does not fit
issue vllm-project/vllm#10517

== kv_cache_none | root | certain
line No available memory for the cache blocks
line available KV cache memory is (?:negative|non-positive|-[\d.]+)
line (?:kv cache|cache blocks).{0,40}\b(?:num_gpu_blocks|GPU blocks)\W{1,3}0\b
cause Weights and the activation peak, or another process on the card, use up the whole share that
  gpu_memory_utilization allows: nothing is left for the KV cache.
change flag --gpu-memory-utilization: as it is -> up to 0.95, if the card is otherwise empty
change act free the card of other processes (nvidia-smi names them) before raising the share
change flag --max-num-batched-tokens: as it is -> 2048, which lowers the activation peak
change act smaller or quantised weights, if the share is at its limit already
futile a lower share: it leaves even less
issue vllm-project/vllm#10439

== card_in_use_at_start | root | certain
line Free memory on device \S{0,12} ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less
  than desired GPU memory utilization \((?P<asked>[\d.]+)
line Error in memory profiling\. Initial (?:free|used) memory
cause Another process holds memory of the card: {free?less} of {total?its} GiB are free, and the
  share asked for is {asked?larger}.
sum utilization_free
change act find and stop the other process: nvidia-smi (or rocm-smi) names its pid
change flag --gpu-memory-utilization: {asked?as it is} -> {fits?what is free, as a share}
futile a larger share: the memory is not there

== cuda_oom_weights | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near line \d+, in (?:make_layers|load_weights|load_model|create_weights|initialize_model)\b
  |make_layers\(|\bin __init__\b[^\n]{0,40}\n[^\n]{0,300}(?:MLP|Attention|Embedding|Linear)\(
unless init_kv_cache|initialize_kv_cache|_allocate_kv_cache|profile_run|_dummy_run|capture_model
cause The weights themselves do not fit: memory ran out while the layers were being built, before
  any KV cache. Quantising at load time comes too late, the full weights are built first.
change act serve a checkpoint that is quantised on disk (w4a16, fp8, q4_0), or a smaller model
change flag --tensor-parallel-size: 1 -> as many cards as there are
futile lowering --max-model-len or the KV cache: neither is allocated yet
futile quantisation of the full checkpoint at load time, CPU offload of the KV cache
issue vllm-project/vllm#16343

== cuda_oom_kv | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near init_kv_cache|initialize_kv_cache|_allocate_kv_cache
cause Memory ran out while the KV cache was being allocated: something else took what profiling had
  found free.
change flag --gpu-memory-utilization: as it is -> 0.05 lower
change act stop other processes on the card (nvidia-smi)
futile another quantisation of the weights: they are loaded

== cuda_oom_graphs | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near capture_model|CUDA ?graph capture|cudagraph_capture|Capturing CUDA graph
cause Memory ran out while CUDA graphs were captured, after weights and KV cache were in place.
change flag --gpu-memory-utilization: as it is -> 0.05 lower
change flag --enforce-eager: off -> on (slower decoding, no graphs)
change flag --max-num-seqs: as it is -> half
futile a shorter --max-model-len alone

== cuda_oom | fault | certain
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
line torch\.(?:cuda\.)?OutOfMemoryError
line CUDA error: out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY
line CUDA driver error: out of memory
line CUBLAS_STATUS_ALLOC_FAILED
cause The card's memory ran out (asked for {wanted?more}) during the run: activations, KV cache and
  weights together are larger than it.
change flag --max-num-batched-tokens: as it is -> half
change flag --max-num-seqs: as it is -> half
change flag --max-model-len: as it is -> shorter
change act see with nvidia-smi whether another process holds memory of the card
futile retrying with the same values

== tpu_program_load | root | certain
line Attempting to reserve (?P<wanted>[\d.]+[KMG]i?B?) at the bottom of memory\. That was not
  possible\. There are (?P<free>[\d.]+[KMG]i?B?) free
line Attempting to (?:reserve|allocate) (?P<wanted>[\d.]+[KMG]i?B?)\..{0,60}There are
  (?P<free>[\d.]+[KMG]i?B?) free
line Error loading program|RuntimeProgramAllocationFailure
near at the bottom of memory|Error loading program|RuntimeProgramAllocationFailure
also Attempting to (?:reserve|allocate) (?P<wanted>[\d.]+[KMG]i?B?)
also There are (?P<free>[\d.]+[KMG]i?B?) free
sum room_for_programs
cause Compiled programs need room in HBM beside weights and KV cache: {wanted?more} was to be
  reserved and {free?less} was free. The KV cache took too large a share.
change flag --gpu-memory-utilization: as it is -> lower, such as 0.90 (then 0.85): frees
  {lacking?the difference} for programs
change flag --max-num-batched-tokens: as it is -> half, for smaller programs
futile a higher utilisation: it takes even more room away from the programs
issue vllm-project/vllm#16521; vllm-project/tpu-inference#3408

== tpu_hbm_oom | root | certain
line Ran out of memory in memory space hbm.{0,40}?Used (?P<used>[\d.]+[KMGT]) of
  (?P<capacity>[\d.]+[KMGT]) hbm
line Ran out of memory in memory space hbm
line Exceeded hbm capacity by (?P<excess>[\d.]+[KMG])
line (?:program requires|requires) (?P<used>[\d.]+[KMG]) (?:of )?hbm
sum chips_needed
cause The compiled program needs {used?more} of the chip's {capacity?smaller} HBM, {excess?more} too
  much. It is decided at compile time: retrying cannot help.
change place chips: 1 -> {chips?more}, sharded (--tensor-parallel-size)
change flag --max-model-len: as it is -> shorter
change flag --max-num-seqs: as it is -> half
change act weights of fewer bits (fp8, w4a16), or a chip with more HBM
futile retrying, or a longer wait: the error is permanent

== tpu_buffer_oom | root | certain
line Attempting to allocate (?P<wanted>[\d.]+[KMGT]i?B?)\. That was not possible\. There are
  (?P<free>[\d.]+[KMGT]i?B?) free
line Error allocating device buffer
line Failed to allocate (?:request for )?(?P<wanted>[\d.]+ ?[KMGT]i?B).{0,60}on device ordinal
line RESOURCE_EXHAUSTED: Out of memory while trying to allocate (?P<wanted>\d+) bytes
unless Error loading program|RuntimeProgramAllocation|at the bottom of memory
cause Device memory ran out at run time: {wanted?more} was asked for and {free?less} was free.
  Weights, KV cache and donated buffers together are larger than the chip's HBM.
change flag --max-num-seqs: as it is -> half
change flag --gpu-memory-utilization: as it is -> 0.05 to 0.10 lower
change setting XLA_PYTHON_CLIENT_MEM_FRACTION: 0.75 -> 0.90 (JAX alone on the device)
futile kernel block sizes: this is HBM, not vmem

== tpu_vmem_oom | root | certain
line Ran out of memory in memory space vmem
line (?:scoped )?vmem.{0,60}(?:limit|allocation).{0,40}exceed
line exceed(?:ed|s)? .{0,40}vmem
cause A kernel's scratch memory on the chip (vmem) is too small for its block sizes. It is not HBM.
change act an engine build whose kernels know this chip's vmem limit, or smaller kernel blocks
change setting LIBTPU_INIT_ARGS: as it is -> --xla_tpu_scoped_vmem_limit_kib raised (65536)
change flag --max-model-len: as it is -> shorter (a workaround that some builds need)
futile more chips, weights of fewer bits, a smaller KV cache: they free HBM
issue pytorch/xla#9524; vllm-project/vllm#19490

== tpu_smem_oom | root | certain
line Ran out of memory in memory space smem
cause A kernel's scalar memory (smem) is too small for its tables: too many pages a sequence.
change flag --block-size: as it is -> 128 or more (fewer pages)
change flag --max-num-seqs: as it is -> half
futile freeing HBM: smem is another memory

== triton_shared_memory | root | certain
line shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<limit>\d+)
line Required: ?(?P<needed>\d+),? Hardware limit: ?(?P<limit>\d+).{0,60}shared memory
line out of resource: shared memory
line (?:too much|insufficient) shared (?:memory|data) .{0,60}(?P<needed>0x[0-9a-f]+|\d+) bytes
line uses too much shared data \((?P<needed>0x[0-9a-f]+)
line local memory \((?P<needed>\d+)\) exceeds limit \((?P<limit>\d+)\)
cause A kernel asks {needed?more} bytes of shared memory a block, and the card's limit is
  {limit?smaller}. Gemma 4's global layers have head_dim 512; Turing (compute capability 7.5) has
  64 KiB of shared memory (LDS on ROCm). It is not VRAM.
change act a build with the tile clamp (TILE_SIZE 32 -> 16 for head_dim >= 512), vLLM PR #39018
change setting VLLM_TRITON_USE_TD: 0 -> 1 together with --block-size 16 (vLLM 0.32)
change act another runtime (llama.cpp), or a card of compute capability 8.0 or newer
futile memory flags (--gpu-memory-utilization, --max-model-len): VRAM is not what is short
futile num_stages and num_warps: they do not change this kernel's need
issue vllm-project/vllm#57712 (fix: PR #39018); ROCm/vllm#919

== cloud_run_host_memory | root | certain
line Memory limit of (?P<limit>[\d.]+) ?MiB exceeded with (?P<used>[\d.]+) ?MiB used
line The container instance (?:exceeded|was found to be using too much) memory
sum memory_limit
cause The host memory of the Cloud Run instance ran out ({used?more} MiB of {limit?fewer} MiB), not
  the GPU's. Files in memory (/tmp) count against the memory limit.
change flag --memory: {limit?as it is}Mi -> {fits?twice as much}, with the --cpu that it demands
change act do not copy the checkpoint to /tmp: mount the bucket, or stream the weights
futile GPU flags: VRAM is not what ran out

== host_oom_killed | root | certain
line Out of memory: Kill(?:ed)? process (?P<pid>\d+) \(?(?P<name>[\w.:/-]+)\)?
line oom-kill:constraint=\w+|oom_reaper: reaped process|Memory cgroup out of memory
line invoked oom-killer
line \bOOMKilled\b(?!\W{1,4}false)
line Failed with result 'oom-kill'|A process of this unit has been killed by the OOM killer
cause The kernel's OOM killer ended {name?the process} (pid {pid?unknown}): host memory, or the
  memory limit of its container, ran out.
change act more host memory (or a higher container limit), or a smaller model
change flag --max-model-len: as it is -> shorter, for engines whose cache is in host memory
change act add swap only to survive the load: decoding from swap is not usable
futile GPU memory flags: it is host memory

== gloo_or_shm_small | root | likely
line No space left on device.{0,80}/dev/shm|/dev/shm.{0,80}No space left on device
line Bus error.{0,80}(?:shm|shared memory)
line insufficient shared memory \(shm\)
line Error while creating shared memory segment
cause The container's shared memory (/dev/shm, 64 MiB by default in Docker) is full.
change flag --shm-size: 64m -> 8g (docker run), or --ipc=host
futile a larger boot disk: /dev/shm is memory
issue pytorch/pytorch#5040

== system_memory_too_small | root | certain
line model requires more system memory \((?P<needed>[\d.]+ [KMG]iB)\) than is available
  \((?P<free>[\d.]+ [KMG]iB)\)
line model requires more system memory
cause Ollama refuses the model: it needs {needed?more} of system memory and {free?less} is free.
change act a smaller tag or quantisation, or a shorter context (num_ctx)
change act free memory, or use a machine with more
futile pulling the model again

== llamacpp_alloc_failed | root | certain
line (?:cudaMalloc|hipMalloc) failed: out of memory
line unable to allocate (?P<buffer>\w+) buffer
line failed to allocate (?:compute|\w+) buffers?|allocating (?P<wanted>[\d.]+) MiB on device \d+
line failed to (?:initialize|create) (?:the )?context.{0,60}(?:memory|allocate)
line ErrorOutOfDeviceMemory|Device memory allocation of size \d+ failed
cause llama.cpp could not allocate a buffer ({buffer?see the line}) on the device: layers, context
  and compute buffers together are larger than it.
change flag --n-gpu-layers: all -> fewer, until it fits (or 0)
change flag --ctx-size: as it is -> shorter
change flag --cache-type-k: f16 -> q8_0, and --cache-type-v too
futile more host memory, where layers were meant for the card

== runner_killed | symptom | likely
line (?:runner|server) process (?:has )?terminated: signal: killed
line (?:terminated by|received|exited with|Terminating on) (?:signal )?SIGKILL
line exit(?:ed)? (?:status|code|with)(?: code)?\W{0,3}137\b
line \bexit code: 137\b|returned non-zero exit status 137|died with <Signals\.SIGKILL
line code=killed, status=9/KILL
line Worker proc \S+ died unexpectedly \(exit code: (?:-9|None)\)
cause The process was killed from outside (SIGKILL, 137): most often by the kernel's OOM killer,
  while the model was being loaded or at a peak of its memory.
change act look for the killer: dmesg (or journalctl -k) names it, with the memory at that time
change act a smaller model or context, fewer parallel slots, or more memory
futile restarting with the same values

== ended_silently | symptom | likely
line the model server \S+ (?:\(pid \d+\) )?has ended\b
cause The model server is gone and its log gives no reason: it was killed from outside (SIGKILL),
  most often by the kernel's OOM killer, or by somebody's kill.
change act look for the killer: dmesg (or journalctl -k) names it, with the memory at that time
change act a smaller model or context, fewer parallel slots, or more memory
futile looking for the cause in the engine's own log: a killed process writes nothing

== jax_cpu_oom | root | likely
line (?:DefaultCPUAllocator|mmap).{0,60}(?:not enough|can't allocate|Cannot allocate) memory
line DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<wanted>\d+) bytes
line RESOURCE_EXHAUSTED: Out of memory allocating (?P<wanted>\d+) bytes
line MemoryError: Unable to allocate (?P<wanted>[\d.]+ ?[KMGT]iB)
line OSError: \[Errno 12\] Cannot allocate memory
line std::bad_alloc|^\s*MemoryError\b
line runtime: out of memory
cause The process asked for more host memory than there is.
change act a smaller model, a number format of fewer bits, or a machine with more memory
change flag --max-model-len: as it is -> shorter
futile GPU memory flags

== neuron_device_oom | root | certain
line (?:NRT_RESOURCE|nrt_tensor_allocate|TDRV).{0,120}(?:Failed to allocate|out of memory
  |insufficient)
line Failed to allocate (?P<wanted>\d+) bytes on (?:ND|NC|device)
line exceeds HBM limit of
cause The NeuronCore's device memory (16 GiB on Inferentia 2) ran out.
change act shard over more NeuronCores, or a smaller sequence length or batch in the traced graph
change act keep the embedding tables on the host
futile host memory or swap

== neuron_compiler_killed | root | certain
line \[F137\] neuronx?-cc was forcibly killed
line neuronx?-cc (?:was )?(?:killed|terminated).{0,60}(?:memory|signal 9)
cause The Neuron compiler was killed: host memory ran out while the graph was being compiled.
change act compile on a machine with more memory, or add swap for the compilation
change setting NEURON_CC_FLAGS: as it is -> --optlevel=1, and fewer parallel compilations
futile device memory settings: it is the host

== mlx_or_metal_oom | root | certain
line (?:\[metal::malloc\]|Metal).{0,60}(?:Attempting to allocate|Insufficient Memory|out of memory)
line kIOGPUCommandBufferCallbackErrorOutOfMemory
cause The unified memory that Metal may use ran out.
change act a smaller model, quantisation or context
futile swap: wired memory cannot be swapped
"""


# ── knowledge / failures_permission ───────────────────────────────────────────────────────────────
# Not allowed: tokens, roles, scopes, tunnels, sockets. Who lacks what, and which grant it takes.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

PERMISSION_SIGNATURES = r"""
== hf_licence_not_accepted | root | certain
line not in the authorized list
line (?:awaiting a review|awaiting review) from the repo authors
line Access to model (?P<model>[\w./-]+) is restricted and you are not
line answers 403 .{0,60}accept the model's licence
line \b403\b.{0,80}Cannot access gated repo
line you (?:need to|must) (?:agree to|accept) .{0,60}(?:licen[cs]e|conditions|terms)
also (?:Access to model|huggingface\.co/|ask for access to) ?(?P<model>[\w-]+/[\w.-]+)
cause The token is known (403, not 401), but its account may not read {model?this gated
  repository}: the licence was not accepted, or the request waits for review.
change act accept the licence of {model?the model} on its page, signed in as the token's owner
change act for a fine-grained token: allow reading of gated repositories
futile another way of passing the same token: it did arrive
issue skypilot-org/skypilot#2634

== hf_unauthenticated | root | certain
line \b401 (?:Client Error|Unauthorized)\b.{0,120}(?:huggingface|Request ID|gated repo)
line GatedRepoError|Cannot access gated repo
line must have access to it and be authenticated to access it
line answers 401 .{0,60}accept the model's licence
line Invalid (?:user token|credentials in Authorization header)|User access token .{0,30}expired
line (?:huggingface_hub|hf).{0,40}Token is required.{0,60}no token found
line trying to access a gated repo
near \b401\b|log ?in|[Tt]oken|authenticated|GatedRepo|gated
unless not in the authorized list|awaiting a review|\b403\b
also (?:Access to model|huggingface\.co/(?:api/models/)?) ?(?P<model>[\w-]+/[\w.-]+)
cause No valid Hugging Face token reached the process (401): {model?the repository} is gated or
  private, and the Hub does not know who asks.
change setting HF_TOKEN: not set, or not valid -> a token that may read {model?the repository},
  given to the container through the secret store (an environment variable on the host is not
  enough)
change act then accept the model's licence on its page: without it the answer is 403
futile downloading again, another mirror of the same repository
issue vllm-project/semantic-router#817

== secret_permission | root | certain
line Permission 'secretmanager\.versions\.access' denied .{0,40}(?:for resource|on resource)
  '?(?:projects/[\w-]+/secrets/(?P<secret>[\w-]+))?
line secretmanager\.versions\.access
line (?:Permission denied on secret|secret).{0,60}(?:secretAccessor|Secret Accessor)
line secretsmanager:GetSecretValue.{0,120}(?:not authorized|denied|no identity-based policy)
line not authorized to perform: secretsmanager:GetSecretValue
cause The machine's service account may not read the secret {secret?} (or secret, version or
  project are misspelt: the answer is the same).
change grant roles/secretmanager.secretAccessor: missing -> granted to the machine's service account
  on this secret (on AWS: secretsmanager:GetSecretValue in the instance profile's role)
change run gcloud secrets add-iam-policy-binding {secret} --role=roles/secretmanager.secretAccessor
  --member=serviceAccount:<service-account>
change act on Compute Engine the cloud-platform scope too; check that the secret exists
futile a new token: the secret cannot be read, whatever it holds
issue google/fuzzbench#1911; googleapis/python-secret-manager#389

== secret_missing | root | certain
line Secret \[?(?:projects/[\w-]+/secrets/)?(?P<secret>[\w-]+)(?:/versions/\w+)?\]? not found
line Secret Version \[|secret.{0,40}(?:is in (?:DESTROYED|DISABLED) state)
line ResourceNotFoundException.{0,120}[Ss]ecret
line Secrets Manager can't find the specified secret
cause The secret {secret?} (or its version) does not exist in this project or region.
change act create it with the token as its value, in the project the machine runs in
futile granting roles: there is nothing to read

== gcs_permission | root | certain
line does not have (?P<permission>storage\.[\w.]+) access
line (?P<permission>storage\.objects\.(?:get|list|create))' denied
line (?:403|AccessDenied).{0,120}(?:storage\.googleapis|gs://(?P<bucket>[\w.-]+))
line An error occurred \((?:AccessDenied|403)\) when calling the (?:GetObject|HeadObject
  |ListObjects)
cause The service account may not read the bucket {bucket?} ({permission?storage.objects.get}).
change grant roles/storage.objectViewer: missing -> granted to the service account on the bucket
change act on Compute Engine the storage scope too
futile making the bucket public

== gcsfuse_mount | root | likely
line (?:mountWithArgs|gcsfuse|fusermount).{0,160}(?:exit status 1|mount failed|failed to mount)
line running /bin/fusermount: exit status
line fusermount3?: (?:mount failed|option allow_other)
cause The FUSE mount of the bucket was refused: no storage role, not the second-generation execution
  environment of Cloud Run, or fusermount without root.
change grant roles/storage.objectViewer: missing -> granted to the service account
change flag --execution-environment: gen1 -> gen2 (or the native Cloud Storage volume mount)
futile a larger machine
issue GoogleCloudPlatform/gcsfuse#661, #3128

== iap_not_authorized | root | certain
line \[?4033: '?not authorized
line IAP.{0,60}not authorized|iap\.tunnelInstances\.accessViaIAP
cause IAP refuses the caller (4033): the account lacks the tunnel role on this instance or project.
  The firewall and the machine play no part.
change grant roles/iap.tunnelResourceAccessor: missing -> granted to the account that connects
change act check which account gcloud uses (gcloud auth list)
futile firewall rules, waiting for the boot: 4003 would mean those

== iap_backend | root | certain
line \[?4003: '?failed to connect to backend
line failed to connect to backend.{0,80}(?:port 22|Failed to connect to port)
line 4010: '?destination read failed
cause IAP let the caller in, but port 22 does not answer: the firewall lacks IAP's range
  35.235.240.0/20, or the machine or its sshd is not up yet.
change setting firewall rule: missing -> tcp:22 from 35.235.240.0/20
change act wait for the boot to end (sshd listening on port 22), then try again
futile roles: 4033 would mean those
issue terraform-google-modules/terraform-google-bastion-host#58

== iap_instance_unknown | root | certain
line \[?4047: '?Failed to lookup instance
line Failed to lookup instance
cause IAP finds no such instance (4047): wrong name, zone or project, or it is not up yet.
change place zone and name: as given -> those of the running instance (list it first)
change act wait for the machine to be RUNNING, then try again
futile roles (4033) and firewall rules (4003)

== docker_socket_permission | root | certain
line permission denied while trying to connect to the Docker (?:daemon socket|API)
line docker\.sock.{0,40}permission denied
cause The user may not talk to Docker: it is not in the group docker in this login session.
change run sudo usermod -aG docker <user>
change act start a new session afterwards (or use sudo docker): groups are read at login
futile chmod 777 on the socket: it hands root to everybody
issue kata-containers/tests#3847

== gcp_permission_denied | fault | certain
line Required '(?P<permission>[\w.]+)' permission for
line Permission '?(?P<permission>[a-z]+\.[\w.]+)'? (?:denied|missing)
line \bPERMISSION_DENIED\b|does not have permission to access (?:projects|namespaces)
line does not have (?P<permission>[a-z]+\.[a-z]+\.[a-z]+) access
cause The account lacks the permission {permission?that the message names}. It is neither quota nor
  capacity.
change grant {permission?the permission}: missing -> a role that holds it, for this account on this
  project
change act check account and project in use: gcloud auth list, gcloud config get project
futile other zones, waiting

== service_account_user | root | certain
line does not have access to service account|iam\.serviceAccounts\.actAs
line roles/iam\.serviceAccountUser
line permission to act as service account
cause The caller may not let a machine act as that service account.
change grant roles/iam.serviceAccountUser: missing -> granted to the caller on the service account
futile roles on the project's machines

== insufficient_scopes | root | certain
line insufficient authentication scopes|ACCESS_TOKEN_SCOPE_INSUFFICIENT|Insufficient Permission:
  Request had insufficient
cause The machine's access scopes exclude this API, whatever its roles.
change flag --scopes: as it is -> cloud-platform (roles decide then); needs a stopped machine
futile more roles

== api_not_enabled | root | certain
line (?P<api>[\w ]+ API) has not been used in project .{0,60}(?:before|or it is disabled)
line SERVICE_DISABLED|API \[(?P<api>[\w.]+)\] not enabled
cause The API {api?that was called} is not enabled in this project.
change act enable it: gcloud services enable (compute, tpu, run, secretmanager, iap), then wait for
  some minutes
futile roles, quota

== org_policy | root | certain
line constraints?/(?P<policy>[\w.]+)(?:'|\]|\))? (?:violated|is violated)
line violates (?:the )?(?:organization )?polic(?:y|ies)|orgpolicy.{0,40}(?:denied|violat)
cause A policy of the organisation forbids it: {policy?see the message}.
change act ask for an exception, or ask for a machine that keeps to it (no external address: use
  IAP)
futile roles of the project

== tpu_machine_not_allowed | root | certain
line user agent is not allowed to use the machine type \[?(?P<type>[\w-]+)
cause Compute Engine does not give {type?this machine type} to this project (an allow-list, not a
  quota): v5e chips come through the Cloud TPU API only.
change place API: Compute Engine -> Cloud TPU API (tpu-vm or queued resource)
futile a quota increase, other zones

== gcloud_no_account | root | certain
line do not currently have an active account selected
line Reauthentication (?:failed|required)|cannot prompt during non-interactive
line problem refreshing your current auth tokens|invalid_grant
line default credentials were not found|could not automatically determine credentials
line google\.auth\.exceptions\.(?:DefaultCredentialsError|RefreshError)
cause gcloud (or the Google client library) has no valid credentials on this computer.
change run gcloud auth login
change run gcloud auth application-default login
futile roles: nobody is asking yet

== aws_no_credentials | root | certain
line Unable to locate credentials|NoCredentialsError
line ExpiredToken(?:Exception)?\b|security token included in the request is (?:expired|invalid)
line \((?:RequestExpired|UnrecognizedClientException|SignatureDoesNotMatch)\)
line InvalidClientTokenId|AuthFailure|The SSO session .{0,60}(?:expired|invalid)
cause The AWS credentials are missing, expired or not valid.
change run aws sso login
change act or renew the access keys; check AWS_PROFILE and AWS_REGION
futile IAM policies: the caller is not known

== aws_unauthorized | fault | certain
line UnauthorizedOperation|is not authorized to perform: (?P<permission>[\w:]+)
line User: arn:\S+ is not authorized to perform(?:: (?P<permission>[\w:]+))?
line AccessDeniedException|\(AccessDenied\)
cause The AWS identity lacks {permission?the permission that the message names}.
change grant {permission?the action}: missing -> allowed in the identity's policy (an encoded
  message is read with aws sts decode-authorization-message)
futile other zones, quota

== ssh_key_refused | root | certain
line Permission denied \(publickey
line Too many authentication failures
cause sshd answers and refuses the key: OS Login is on without a role, the key is not yet on the
  machine, or the user name differs.
change grant roles/compute.osAdminLogin: missing -> granted, where OS Login is on
change act wait a minute after the first connection: keys travel through the metadata
futile firewall rules: port 22 was reached

== ssh_host_key_changed | root | certain
line REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed
cause The machine at this address shows another host key than before: it was made anew, or it is
  another machine.
change act if the machine was made anew, remove its old line (ssh-keygen -R HOST), then connect
futile StrictHostKeyChecking=no: it hides a stranger as well

== registry_denied | root | certain
line (?:denied|unauthorized): .{0,80}(?:artifactregistry|Permission .{0,40}artifactregistry)
line pull access denied for (?P<image>[\w./:-]+)
line (?:unauthorized: authentication required|no basic auth credentials|denied: requested access)
cause The registry does not let this machine pull {image?the image}: it is private, or does not
  exist.
change grant roles/artifactregistry.reader: missing -> granted to the machine's service account
change act docker login to the registry (gcloud auth configure-docker), and check the image's name
futile a larger disk, trying again

== docker_hub_licence | root | likely
line nvcr\.io.{0,120}(?:401|denied|unauthorized)|NGC.{0,40}(?:licen[cs]e|unauthorized)
cause The registry nvcr.io wants a key for this image.
change act docker login nvcr.io with an NGC key
futile trying again

== do_unauthorized | root | certain
line Unable to authenticate you|\b401\b.{0,60}digitalocean
line api\.digitalocean\.com\S*: (?:401|403)
cause DigitalOcean does not know the token, or it may not do this (expired, revoked, read only).
change setting DIGITALOCEAN_TOKEN: as it is -> a valid token with write scope
futile other regions

== file_permission | fault | likely
line PermissionError: \[Errno 13\] Permission denied: '?(?P<path>[\w./-]+)?
line (?:mkdir|open|cannot create|cannot open) .{0,120}[Pp]ermission denied
cause The process may not write or read {path?the file that the message names} as its user.
change act give the folder to the user that runs the container (--user, chown), or mount another one
futile running as root only to get past it
"""


# ── knowledge / failures_serve ────────────────────────────────────────────────────────────────────
# The engine does not come up or does not answer as asked: ports, probes, tools, templates, names.
#
# Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
# named.

SERVE_SIGNATURES = r"""
== port_in_use | root | certain
line address already in use
line \[Errno (?:98|48|10048)\]|EADDRINUSE|Only one usage of each socket address
line port is already allocated|couldn't bind (?:HTTP )?server socket
line Bind for \S+:(?P<port>\d+) failed
line [Pp]ort (?P<port>\d+) is (?:already )?(?:in use|occupied|not available)
also (?:', |:|[Pp]ort[: ]{1,2})(?P<port>\d{2,5})\b
cause Another process, often the previous server, holds the port {port?}.
change act find it: ss -ltnp shows who listens on port {port?}; stop it if it is an old server
change flag --port: {port?as it is} -> a free one
futile longer timeouts, memory flags
issue vllm-project/vllm#8204

== port_not_allowed | root | certain
line bind.{0,60}[Pp]ermission denied|\[Errno 13\].{0,60}bind
cause Ports below 1024 need privileges.
change flag --port: as it is -> 8000 or another above 1023
futile stopping other servers

== bind_address_wrong | root | certain
line Cannot assign requested address|EADDRNOTAVAIL
cause The address to listen on does not belong to this machine or container.
change flag --host: as it is -> 127.0.0.1 (0.0.0.0 within a container)
futile another port

== cloud_run_wrong_address | root | certain
line (?:failed to start and listen|listen) on the port
near (?:Listening on|listening on|running on|starting server on|address=)\D{0,20}(?:127\.0\.0\.1
  |localhost|\[::1\])
cause The server listens on loopback inside its container, where Cloud Run cannot see it (Ollama's
  default is 127.0.0.1:11434; Cloud Run expects PORT, 8080).
change setting OLLAMA_HOST: 127.0.0.1:11434 -> 0.0.0.0:8080 (--host 0.0.0.0 --port 8080 elsewhere)
change flag --port: as it is -> the port that the server really uses (gcloud run deploy)
futile a longer start-up probe
issue ollama/ollama#9133

== cloud_run_startup | symptom | likely
line failed to start and listen on the port(?: defined)?.{0,80}?PORT=(?P<port>\d+)
line (?:STARTUP|startup)[ -]probe.{0,20}failed|Startup TCP probe failed
line startup_probe.{0,80}must be a number between (?P<low>\d+) and (?P<limit>\d+)
line DEADLINE_EXCEEDED.{0,80}(?:probe|container)
line failed the configured startup probe|Startup probes? timed out
line Container failed to become healthy
sum probe_window
cause The container did not answer on its port before the start-up probe gave up: the model loads
  for longer than the window (240 s by default), or the container ended before. This is a symptom:
  the revision's own log says which.
change flag --startup-probe: 240 s -> periodSeconds=10,failureThreshold=180 (the period is capped at
  240, so the threshold has to grow)
change act read the revision's log for the line before it: a flag error looks the same from outside
change act listen on 0.0.0.0 and on PORT (8080 by default; OLLAMA_HOST for Ollama), not on loopback
change act a faster source of the weights (streamed from a bucket in the same region)
futile --timeout: it is the time of a request, not of the start
issue googlecodelabs/feedback#1550; observ-ing/core#177

== cloud_run_exit | symptom | likely
line Container called exit\((?P<status>\d+)\)
line Application exec likely failed|Default STARTUP .{0,40}failed .{0,60}attempts
cause The container ended by itself (status {status?see the line}); why stands above it.
change act read the container's own lines before this one
futile a longer probe

== k8s_crash_loop | symptom | likely
line CrashLoopBackOff|Back-off restarting failed container
line (?:Liveness|Startup) probe failed
cause Kubernetes restarts a container that ends, or does not answer in time; why stands in the log
  of its previous run.
change act kubectl logs --previous shows the run that ended
change setting startupProbe.failureThreshold: as it is -> enough for loading and compiling
futile deleting the pod

== engine_core_failed | echo | possible
line Engine core initialization failed|EngineDeadError|EngineCore (?:encountered|failed)
line Engine process failed to start|AsyncEngineDeadError|LLMEngine.{0,20}died
line WorkerProc (?:initialization failed|failed to start|hit an exception)
cause The process around the engine reports that it ended; the reason stands in the engine's own
  lines above.
change act read the first traceback above: it is the root, this is its echo
futile restarting with the same values

== engine_start_timeout | fault | likely
line (?:Timed out|timed out|Timeout).{0,60}waiting for (?:engine|worker|the engine)
line timed out waiting for llama runner to start
line Did not receive response from (?:front-end|engine) process within (?P<seconds>\d+)
cause The engine did not come up in the time given: loading or compiling takes longer.
change setting VLLM_ENGINE_READY_TIMEOUT_S: 600 -> 2400 (OLLAMA_LOAD_TIMEOUT for Ollama)
change act a compile cache that outlives the machine, so that the next start is shorter
futile more memory, unless the log also shows swapping

== tool_parser_not_set | root | certain
line tool choice requires --enable-auto-tool-choice and --tool-call-parser
line --enable-auto-tool-choice (?:requires|is not set)|requires --tool-call-parser
line requires --enable-auto-tool-choice
cause The server was started without its tool flags, and agents (Claude Code among them) send tools
  with every request: 400.
change flag --enable-auto-tool-choice: off -> on
change flag --tool-call-parser: none -> gemma4
futile another prompt, restarting unchanged
issue swiss-ai/model-launch#213

== tools_not_supported | root | certain
line does not support (?P<what>tools|chat|thinking|vision|generate|insert|embeddings?)
cause The served model or tag does not support {what?what was asked}.
change setting MODEL_NAME: as it is -> a tag or variant with {what?this} (an -it model with its own
  template)
futile restarting

== tool_stream_malformed | root | likely
line Expected '?(?:function\.name|id)'? to be a string
line (?:tool_calls?|function)[\w\[\].' ]{0,40}(?:is missing|undefined|Required).{0,60}(?:name|id)\b
cause The streamed tool call reached the client without its id or name: a fault of the server's
  streaming tool parser.
change package vllm: as it is -> newer (the engine's new parser, PR #45588)
change setting stream: true -> false, as a workaround
futile another client
issue vllm-project/vllm#42696

== raw_tool_tokens | root | likely
line "(?:content|text)": ?".{0,400}?<\|?(?:tool_call|tool_response|channel)\|?>
line "(?:content|text)": ?".{0,400}?<\|\\?"\|>
cause Gemma's control tokens came through as text: no tool or reasoning parser took them out.
change flag --tool-call-parser: none -> gemma4
change flag --reasoning-parser: none -> gemma4
change package vllm: as it is -> newer, where the parser leaks in streaming
futile asking the model not to write them
issue vllm-project/vllm#44522

== context_exceeded | root | certain
line maximum context length is (?P<limit>\d+) tokens.{0,120}?(?:requested|passed|has|contains at
  least) (?P<prompt>\d+)
line exceeds? the available context size(?: \((?P<limit>\d+))?
line prompt (?:is too long|contains too many tokens)|prompt length .{0,40}exceeds
line Input (?:length|prompt) \(?(?P<prompt>\d+).{0,60}?(?:exceeds|longer than).{0,40}?(?P<limit>\d+)
line \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<limit>\d+)
sum prompt_that_fits
cause The request ({prompt?too many} tokens) is longer than the served context ({limit?less}).
change setting max_tokens: as it is -> {fits?at most what the context leaves}
change flag --max-model-len: {limit?as it is} -> larger, if the KV cache allows (plan_deployment
  computes it)
futile repeating the request

== model_name_mismatch | root | certain
line The model `(?P<model>[^`]+)` does not exist
line model '(?P<model>[^']+)' (?:does not exist|is not (?:served|available))
cause The request names a model that is not served here: {model?see the line}.
change setting model (in the request): {model?as it is} -> the name that /v1/models lists
change flag --served-model-name: none -> the name that clients send
futile downloading the model

== api_key_wrong | root | likely
line (?:Incorrect|Invalid|missing) API key|\b401 Unauthorized\b.{0,60}/v1/
line "POST /v1/\S+ HTTP/1\.\d" 401
cause The client sent no API key, or another than the server's.
change setting the client's API key: as it is -> the one that the server was started with
futile restarting the server

== cloud_run_not_invoker | root | certain
line Your client does not have permission to get URL
line The request was not authenticated.{0,120}(?:run|invoker|identity)
line access token could not be verified.{0,60}|The access token could not be verified
cause Cloud Run refuses the caller: no identity token, a wrong audience, or no right to call.
change grant roles/run.invoker: missing -> granted to the caller on the service
change act send an identity token whose audience is the service's address (an access token gives
  401)
futile the API key of the engine

== cloud_run_no_instance | root | likely
line no available instance
line The request was aborted because
cause No instance was free for the request: scaled to zero, or all at their concurrency.
change flag --min-instances: 0 -> 1 (it costs while idle)
change flag --max-instances: as it is -> more, within the quota
futile the client's retries alone

== server_busy | root | certain
line server busy, please try again|maximum pending requests exceeded
line \b503\b.{0,60}(?:overloaded|queue is full)
cause More requests wait than the server's queue holds.
change setting OLLAMA_MAX_QUEUE: 512 -> more; or OLLAMA_NUM_PARALLEL: 1 -> more, if memory allows
change act fewer requests at once
futile restarting

== cloud_run_gpu_minimum | root | likely
line resources\.limits.{0,160}(?:[Ii]nvalid value|must be|at least)
line GPUs? require.{0,60}(?:CPU|memory)
cause Cloud Run refuses the size: with a GPU at least 4 CPUs and 16 GiB of memory are needed (8 and
  32 are advised).
change flag --cpu: as it is -> 8
change flag --memory: as it is -> 32Gi
futile another region

== multimodal_limit | root | certain
line At most (?P<limit>\d+) (?P<what>image|audio|video)\S* may be provided
cause The request holds more {what?media} than the server allows ({limit?fewer}).
change flag --limit-mm-per-prompt: {limit?as it is} -> more of {what?them}, as JSON
futile a longer context alone

== audio_unavailable | root | certain
line Invalid or unsupported audio file
line (?:librosa|soundfile|av|soxr).{0,60}(?:not installed|is required|No module named)
cause The server lacks its audio packages, or got a file that is no audio.
change package vllm[audio]: missing -> installed, same version as vllm (a derived image)
futile another model size

== structured_output_failed | root | likely
line (?:xgrammar|guided[_ ]decoding|structured[_ ]outputs?|json[_ ]schema).{0,120}(?:failed
  |unsupported|not supported|invalid|error)
line Failed to (?:convert|compile) .{0,60}(?:grammar|schema)
cause The schema (or grammar) of the request is not supported by the structured output backend.
change act a simpler schema (no unbounded patterns, no unsupported keywords)
change flag --structured-outputs-config: as it is -> another backend (guidance)
futile another temperature

== schema_not_enforced | root | likely
line JSONDecodeError|Expecting value: line 1 column 1|(?:answer|output|content).{0,40}not (?:valid
  )?JSON
near reasoning[-_]parser|enable_thinking
cause The schema of the request was not enforced: with a reasoning parser and thinking off the
  engine waits for the end of a thought that never comes, and answers prose with status 200.
change flag --reasoning-parser: gemma4 -> none, where thinking is off
change setting enable_thinking: false -> true, where the parser stays
change package vllm: as it is -> newer (PR #52430)
futile a stricter schema, another prompt
issue vllm-project/vllm#39138, #54881

== llama_runner_terminated | symptom | likely
line llama (?:runner|server) process (?:has )?terminated(?!: signal: killed)
line llama-server process has terminated|model runner has unexpectedly stopped
line llama runner terminated
line (?:process|runner) .{0,20}terminated: (?:%!w\(<nil>\)|exit status (?P<status>\d+))
line unable to load model: 
cause The model runner of Ollama ended; why stands in its own lines before this one.
change setting OLLAMA_DEBUG: 0 -> 1, to see the runner's own words
change setting num_ctx: as it is -> shorter (ROCm with a long context ends like this without a word)
futile pulling the model again
issue ollama/ollama#15338

== runner_crashed | fault | likely
line Segmentation fault|SIGSEGV|core dumped|Fatal Python error
line Uncaught signal: (?P<signal>\d+)
unless GGML_ASSERT|flash_attn|fattn
cause The process crashed in native code.
change package engine: as it is -> another build; native crashes are a build's fault
change act run it once with the accelerator left out, to see which side it is
futile other prompts

== request_failed | echo | possible
line "(?:POST|GET) /\S+ HTTP/1\.\d" 500
line \b500 Internal Server Error
cause A request failed inside the server; why stands beside it in the server's log.
change act read the traceback next to it
futile repeating the request

== connection_refused | echo | possible
line [Cc]onnection refused|ECONNREFUSED|Failed to connect to \S+ port
unless (?:Readiness|Liveness|Startup) probe
cause Nothing listens at that address (yet): the server is still starting, has ended, or listens
  elsewhere.
change act look at the server first: its own log says whether it is starting or has ended
futile firewall rules: a firewall lets a connection hang, it does not refuse it
"""


# ── knowledge / log_answer ────────────────────────────────────────────────────────────────────────
# What the failure bank answers about a log: the forms that triage.py prints and the server reads.
#
# Knows no log, no signature and no program.

LOG_BYTES = 32_000_000  # of one log; beyond it a quarter from the head and the rest from the tail
NO_FAILURE = "no failure found"

FailureStage = Literal[
    "capacity",
    "quota",
    "permission",
    "boot",
    "image",
    "download",
    "load",
    "compile",
    "memory",
    "serve",
    "client",
]
FailureCertainty = Literal["certain", "likely", "possible"]
FailureChangeKind = Literal["flag", "setting", "package", "place", "grant", "run", "act"]


@dataclass(frozen=True, slots=True)
class FailureChange:
    """One change as data: what, from what, to what. `argv` where it is a command, never run here.

    `kind` is flag (of the engine), setting (an environment variable or a field), package, place
    (zone, region, machine), grant (a role), run (a command) or act (a person's decision).
    """

    kind: FailureChangeKind
    name: str
    old: str = ""
    new: str = ""
    argv: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.argv:
            return f"run: {shlex.join(self.argv)}"
        if not self.new:
            return self.name
        return f"{self.name}: {self.old or 'as it is'} -> {self.new}"


@dataclass(frozen=True)
class FailureAnswer:
    """One fault that a log reports. `line` is quoted from the log (`line_number` from 1): data.

    `numbers` are what was read from the line, `futile` what would not help.
    """

    kind: str
    stage: FailureStage
    certainty: FailureCertainty
    line: str
    line_number: int
    cause: str
    changes: tuple[FailureChange, ...]
    futile: tuple[str, ...]
    numbers: Mapping[str, str]
    upstream: str


@dataclass(frozen=True)
class LogAnswer:
    """What a log of `lines` rows says: its failures, the one that explains most first.

    Where there is none, `unexplained` quotes the last rows that report an error all the same
    (`unexplained_count` are there), and `excerpt` has them among their neighbours: both redacted.
    """

    lines: int
    failures: tuple[FailureAnswer, ...] = ()
    unexplained: tuple[str, ...] = ()
    unexplained_count: int = 0
    excerpt: str = ""

    @property
    def summary(self) -> str:
        """One line for people: the first failure, or NO_FAILURE, or that errors are unexplained."""
        if self.failures:
            first = self.failures[0]
            return f"{first.kind} ({first.stage}, {first.certainty}): {first.cause}"
        if self.unexplained_count:
            count = self.unexplained_count
            return f"No known failure; {count} lines report errors that nothing explains."
        return NO_FAILURE


# ── knowledge / failure_signature ─────────────────────────────────────────────────────────────────
# What a signature of a failure is, and how one is read from the text in the failures_… modules.
#
# Knows no log and no program.

# How much a statement explains. A root is the fault itself, in its own words; a fault may have a
# root in the same log; a symptom always has a cause; an echo only repeats that something failed.
EXPLAINING_LEVELS = ("echo", "symptom", "fault", "root")
CERTAINTY_ORDER: tuple[FailureCertainty, ...] = ("possible", "likely", "certain")
_SIGNATURE_FIELDS = ("line", "near", "unless", "also", "cause", "change", "futile", "issue", "sum")
_FAILURE_CHANGE_KINDS: tuple[FailureChangeKind, ...] = (
    "flag",
    "setting",
    "package",
    "place",
    "grant",
    "run",
    "act",
)
_SHORTEST_KEY = 3  # characters of a literal that are neither digits nor hexadecimal

# Letters and digits of hexadecimal ids are left out of the form under which rows count as alike:
# a log of a million requests is then a few hundred rows. Control characters never count.
IGNORED_BYTES = b"0123456789abcdef" + bytes(c for c in range(32) if c != 10) + b"\x7f"


class SignatureError(ValueError):
    """A signature's text breaks the grammar; the message names the signature and the line."""


@dataclass(frozen=True, slots=True)
class FailureSignature:
    """One fault as a program states it. Expressions are matched without regard to case."""

    kind: str
    stage: FailureStage
    level: int
    certainty: FailureCertainty
    any_level: bool
    lines: tuple[str, ...]
    near: str
    unless: str
    also: tuple[str, ...]
    cause: str
    changes: tuple[FailureChange, ...]
    futile: tuple[str, ...]
    upstream: str
    sum_name: str
    keys: tuple[str, ...]  # literals in lower case, one of which stands in every line that matches


def parse_signatures(stage: FailureStage, text: str) -> list[FailureSignature]:
    """The signatures in `text`, one after a ``== kind | level | certainty`` line each.

    Then a field a line, its name first: line (an expression; several are alternatives, the first
    says most), near (must stand within 40 rows as well), unless (must not), also (gives numbers if
    it does), cause, change (``kind name: old -> new``), futile, issue, sum (see failure_sums).
    A line that begins with two blanks continues the field.
    Raises SignatureError.
    """
    found = []
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        head, _, body = block.partition("\n")
        words = [word.strip() for word in head.split("|")]
        if (
            len(words) not in (3, 4)
            or words[1] not in EXPLAINING_LEVELS
            or words[2] not in CERTAINTY_ORDER
        ):
            raise SignatureError(f"{stage}: '{head}' is not 'kind | level | certainty'")
        found.append(_read_signature(stage, words, _signature_fields(words[0], body)))
    return found


def _signature_fields(kind: str, body: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for line in body.split("\n"):
        if line.startswith("  ") and values:
            more = line.strip()
            values[-1] += more if more.startswith("|") else f" {more}"
        elif line.strip():
            name, _, value = line.partition(" ")
            if name not in _SIGNATURE_FIELDS:
                raise SignatureError(f"{kind}: unknown field '{name}'")
            values = fields.setdefault(name, [])
            values.append(value.strip())
    return fields


def _read_signature(
    stage: FailureStage, words: list[str], fields: dict[str, list[str]]
) -> FailureSignature:
    def one(name: str) -> str:
        values = fields.get(name, [])
        if len(values) > 1:
            raise SignatureError(f"{words[0]}: two fields '{name}'")
        return values[0] if values else ""

    if not fields.get("line") or not one("cause") or not fields.get("change"):
        raise SignatureError(f"{words[0]}: line, cause and change are needed")
    if one("sum") and one("sum") not in FAILURE_SUMS:
        raise SignatureError(f"{words[0]}: there is no sum '{one('sum')}'")
    signature = FailureSignature(
        kind=words[0],
        stage=stage,
        level=EXPLAINING_LEVELS.index(words[1]),
        certainty=CERTAINTY_ORDER[CERTAINTY_ORDER.index(words[2])],
        any_level=words[3:] == ["any level"],
        lines=tuple(fields["line"]),
        near=one("near"),
        unless=one("unless"),
        also=tuple(fields.get("also", ())),
        cause=one("cause"),
        changes=tuple(_read_change(words[0], text) for text in fields["change"]),
        futile=tuple(fields.get("futile", ())),
        upstream=one("issue"),
        sum_name=one("sum"),
        keys=tuple(dict.fromkeys(k for line in fields["line"] for k in required_literals(line))),
    )
    short = [key for key in signature.keys if len(bare_key(key)) < _SHORTEST_KEY]
    if short or not signature.keys:
        raise SignatureError(f"{words[0]}: no literal in its line is long enough: {short}")
    return signature


def _read_change(kind: str, text: str) -> FailureChange:
    """``flag --x: a -> b``, ``run program argument…`` or ``act what to do`` as a FailureChange."""
    sort, _, rest = text.partition(" ")
    if sort not in _FAILURE_CHANGE_KINDS:
        raise SignatureError(f"{kind}: '{sort}' is no kind of change")
    which: FailureChangeKind = _FAILURE_CHANGE_KINDS[_FAILURE_CHANGE_KINDS.index(sort)]
    if sort == "run":
        return FailureChange(which, rest, argv=tuple(shlex.split(rest)))
    if sort == "act":
        return FailureChange(which, rest)
    name, colon, values = rest.partition(": ")
    old, arrow, new = values.partition(" -> ")
    if not colon or not arrow:
        raise SignatureError(f"{kind}: a change reads 'name: old -> new', not '{rest}'")
    return FailureChange(which, name, old, new)


def required_literals(expression: str) -> tuple[str, ...]:
    """Literals, one of which stands in whatever matches `expression`; an empty one: there is none.

    Reads the syntax that signatures use: sets, groups, quantifiers, alternatives, escapes.
    """
    return _LiteralReader(expression).alternatives()


class _LiteralReader:
    """Walks an expression once. What may be absent, sets and assertions give no literal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def alternatives(self) -> tuple[str, ...]:
        """The best literal of each branch, up to the end or the closing parenthesis."""
        found = self._branch()
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            found += self._branch()
        return found

    def _branch(self) -> tuple[str, ...]:
        best: tuple[str, ...] = ("",)
        run = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._item()
            before = self._at
            required = self._required()
            if isinstance(item, str) and item and required:
                run += item.lower()
                best = _longer_literals(best, (run,))
                run = run if self._at == before else ""
                continue
            run = ""
            if isinstance(item, tuple) and required:
                best = _longer_literals(best, item)
        return best

    def _item(self) -> str | tuple[str, ...]:
        """The next character, "" for a set of them, or the literals of a group."""
        char = self._text[self._at]
        self._at += 1
        if char == "\\":
            char = self._text[self._at]
            self._at += 1
            return "" if char.isalnum() else char
        if char == "[":
            self._at = self._text.index("]", self._at + 1) + 1
            return ""
        if char != "(":
            return "" if char in ".^$" else char
        assertion = re.compile(r"\?(?:=|!|<=|<!)").match(self._text, self._at)
        head = re.compile(r"\?(?::|P<\w+>|=|!|<=|<!)").match(self._text, self._at)
        self._at = head.end() if head else self._at
        found = self.alternatives()
        self._at += 1
        return "" if assertion else found

    def _required(self) -> bool:
        """Whether what was read must be there at least once; steps over its quantifier."""
        quantifier = re.compile(r"(?:[*?]|\{(\d+),?\d*\}|\+)\??").match(self._text, self._at)
        if quantifier is None:
            return True
        self._at = quantifier.end()
        return quantifier[0][0] == "+" or (quantifier[0][0] == "{" and quantifier[1] != "0")


def _longer_literals(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Of two choices of literals the one whose shortest is longer."""
    shortest = [min((len(bare_key(text)), len(text)) for text in c) for c in (one, other)]
    return other if shortest[1] > shortest[0] else one


def bare_key(text: str) -> bytes:
    """`text` in the form under which rows count as alike."""
    return text.lower().encode().translate(None, IGNORED_BYTES)


# ── knowledge / failure_mentions ──────────────────────────────────────────────────────────────────
# Whether a line reports a failure or only mentions one: levels, hints, what was got over.
#
# Knows how logs are worded, and no particular failure.

_CALM_LEVEL = re.compile(
    r"^.{0,120}?(?:(?<![\w-])(?:INFO|DEBUG|TRACE|NOTICE)(?![\w-])|(?<!\w)\[?(?:info|debug)\]?[ :\]]"
    r"|level=(?:info|debug)|severity\W{1,4}(?:INFO|DEBUG|NOTICE))|^\s*I\d{4} "
)
_WARNING_LEVEL = re.compile(r"^.{0,60}?(?<![\w-])(?:WARNING|WARN)(?![\w-])|^\s*W\d{4} |level=warn")
_ERROR_HEAD = re.compile(
    r"\b\w*(?:Error|Exception|OutOfResources|OutOfMemory)\b|\bERROR\b|\berror:|\bfatal\b|\bFATAL\b"
    r"|Error response|[Pp]ermission denied|error loading|startup-script|cloud-init",
)
# Not what happened, but what might, or what was got over.
_ONLY_TALK = re.compile(
    r"(?:\b(?:in case|if (?:you|it|this|the|there)|to (?:avoid|prevent|reduce)|avoid(?:s|ing)?"
    r"|prevent(?:s|ing)?|no longer|simulat\w+|handles|checks? for|watch(?:es|ing)? for"
    r"|instead of|tip|hint|(?:might|may|could|can) (?:get|see|receive|hit|cause|lead))\b[^.;]{0,60}"
    r"|\b(?:no|not|zero|0|without|any)\s+(?:an?\s+)?)$",
    re.I,
)
_GOT_OVER = re.compile(
    r"\b(?:retrying|will retry|will be retried|falling back|fell back|recovered|succeeded after"
    r"|ignoring|is ignored|harmless|trying (?:the next|another|port))\b",
    re.I,
)

_ERROR_ROW = re.compile(
    r"^.{0,100}?(?<![\w-])(?:ERROR|CRITICAL|FATAL|SEVERE)(?![\w-])"
    r"|^[EF]\d{4} |level=(?:error|fatal)|severity\W{1,4}(?:ERROR|CRITICAL|ALERT)"
    r"|^\s*(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)|^panic: |Segmentation fault|core dumped"
)
# Error lines that healthy starts print, each from its program's own source.
_HARMLESS_ROW = re.compile(
    r"Unable to register cu(?:DNN|FFT|BLAS) factory|TF-TRT Warning|Could not find TensorRT"
    r"|computation placer already registered|\b0 errors?\b|errors?[=:]\s*0\b",
    re.I,
)
SERVER_UP = re.compile(
    rb"Application startup complete|server is listening on|Uvicorn running on"
    rb"|llama runner started|Starting vLLM API server|GEMMA4-BOOT ready done"
)


def only_mentioned(signature: FailureSignature, text: str, at: int) -> bool:
    """Whether a line only talks of a failure: an informing level, a hint, something got over.

    A warning counts only for what a signature is certain of.
    """
    if signature.any_level:
        return False
    if _CALM_LEVEL.search(text) and not _ERROR_HEAD.search(text):
        return True
    if signature.certainty != "certain" and _WARNING_LEVEL.search(text):
        return True
    return bool(_ONLY_TALK.search(text[:at]) or _GOT_OVER.search(text))


def reports_error(text: str) -> bool:
    """Whether a row reports an error in so many words, and none that programs print in health."""
    if not _ERROR_ROW.search(text) or _HARMLESS_ROW.search(text):
        return False
    return not _GOT_OVER.search(text)


# ── knowledge / failure_bank ──────────────────────────────────────────────────────────────────────
# The failure bank's engine: finds signatures in a log and puts the one that explains most first.
#
# Knows no program: what each says when it fails stands as data in the failures_… modules.

_ROWS_AROUND = 40  # rows around the deciding one in which what belongs to it may stand
_ROWS_A_KEY = 200  # distinct rows that are looked at for one key; a log may repeat it for ever
_QUOTED_CHARACTERS = 1000  # characters of a quoted line
# A captured value goes into advice only if it is a name, a number with its unit, or a list of
# names: log text is data, and a sentence out of it must not read as ours.
_PLAIN_VALUE = re.compile(
    r"(?!-)[\w.:/@%+-]{1,80}(?: [\w.:/@%+-]{1,20}){0,2}|[\w.-]{1,40}(?:, ?[\w.-]{1,40}){1,9}"
)
_ARGUMENT_VALUE = re.compile(r"(?!-)[\w.:/@-]{1,120}")
_TEMPLATE_VALUE = re.compile(r"\{(\w+)(?:\?([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class FailureMatch:
    """A signature found in a log: the deciding row (from 0) and line, and what follows from it."""

    signature: FailureSignature
    row: int
    first_row: int
    line: str
    wording: int
    width: int
    numbers: Mapping[str, str]
    cause: str
    changes: tuple[FailureChange, ...]

    @property
    def answer(self) -> FailureAnswer:
        """What goes out of it."""
        return FailureAnswer(
            kind=self.signature.kind,
            stage=self.signature.stage,
            certainty=self.signature.certainty,
            line=self.line,
            line_number=self.row + 1,
            cause=self.cause,
            changes=self.changes,
            futile=self.signature.futile,
            numbers=dict(self.numbers),
            upstream=self.signature.upstream,
        )


@dataclass(frozen=True)
class LogLines:
    """A log as rows of raw bytes, short enough to be matched one by one."""

    rows: Sequence[bytes]
    _alike: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def text(self, row: int) -> str:
        """Row `row`, printable."""
        if row not in self._texts:
            self._texts[row] = printable(self.rows[row].decode("utf-8", "replace"))
        return self._texts[row]

    def around(self, row: int, reach: int = _ROWS_AROUND) -> str:
        """The rows around `row`, printable, one a line."""
        near = self.rows[max(0, row - reach) : row + reach + 1]
        return printable(b"\n".join(near).decode("utf-8", "replace"))

    def alike(self) -> Mapping[bytes, tuple[int, int]]:
        """First and last row of each form: rows that differ in ids and numbers only are alike."""
        if not self._alike and self.rows:
            text = b"\n".join(self.rows).lower().translate(None, IGNORED_BYTES)
            forms = text.split(b"\n")
            last = dict(zip(forms, range(len(forms)), strict=True))
            first = dict(zip(reversed(forms), range(len(forms) - 1, -1, -1), strict=True))
            self._alike.update({form: (first[form], row) for form, row in last.items()})
        return self._alike


def quoted_line(text: str, around: str = "") -> str:
    """`text` as it may be quoted: redacted, at most 1,000 characters, those about `around`.

    Where it is cut, the broken word goes as well: half a secret is not recognised as one.
    """
    text = redact(text).strip()
    if len(text) <= _QUOTED_CHARACTERS:
        return text
    begin = max(0, text.find(around[:200]) - _QUOTED_CHARACTERS // 3)
    piece = text[begin : begin + _QUOTED_CHARACTERS]
    if begin:
        piece = piece.partition(" ")[2] or piece
    if begin + _QUOTED_CHARACTERS < len(text):
        piece = piece.rpartition(" ")[0] or piece
    return piece.strip()


@functools.cache
def _signature_expression(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.I | re.M)


class FailureBank:
    """All signatures, ready to be looked for. Expressions are compiled when first needed."""

    def __init__(self, signatures: Sequence[FailureSignature]) -> None:
        self.signatures = tuple(signatures)
        self._by_key: dict[bytes, list[FailureSignature]] = {}
        for signature in self.signatures:
            for key in signature.keys:
                self._by_key.setdefault(bare_key(key), []).append(signature)

    def diagnose(self, log: LogLines) -> list[FailureMatch]:
        """What the log's faults are, the one that explains most first; empty where there is none.

        Of several readings of one line only the best is kept.
        """
        best: dict[str, FailureMatch] = {}
        for signature, row, first in self._candidates(log):
            match = _match_in_row(signature, log, row, first)
            if match is None and first != row:
                match = _match_in_row(signature, log, first, first)
            known = best.get(signature.kind)
            # A signature's first wordings say more than its last ones.
            if match is not None and (known is None or match.wording < known.wording):
                best[signature.kind] = match
        up = _row_of_coming_up(log)
        by_row: dict[int, FailureMatch] = {}
        for match in sorted(best.values(), key=_explaining_rank):
            # What only echoes a failure means nothing once the server has come up after it.
            if match.signature.level or match.row > up:
                by_row.setdefault(match.row, match)
        return sorted(by_row.values(), key=_explaining_rank)

    def _candidates(self, log: LogLines) -> Iterator[tuple[FailureSignature, int, int]]:
        """(signature, last row, first row) wherever a literal of the signature stands."""
        alike = log.alike()
        text = b"\n".join(alike)
        for key, signatures in self._by_key.items():
            at, seen = text.find(key), 0
            while at >= 0 and seen < _ROWS_A_KEY:
                begin = text.rfind(b"\n", 0, at) + 1
                end = text.find(b"\n", at)
                end = len(text) if end < 0 else end
                first, last = alike[text[begin:end]]
                for signature in signatures:
                    yield signature, last, first
                at, seen = text.find(key, end), seen + 1


def _explaining_rank(match: FailureMatch) -> tuple[int, int, int, int, int]:
    """What explains more sorts first: level, conditions met, certainty, then the earlier row."""
    signature = match.signature
    conditions = bool(signature.near)
    certainty = CERTAINTY_ORDER.index(signature.certainty)
    return (-signature.level, -conditions, -certainty, match.first_row, -match.width)


def _match_in_row(
    signature: FailureSignature, log: LogLines, row: int, first: int
) -> FailureMatch | None:
    text = log.text(row)
    plain = text.replace('\\"', '"')  # as it stood before it became part of a JSON string
    for wording, expression in enumerate(signature.lines):
        found = _signature_expression(expression).search(plain)
        if found is None or only_mentioned(signature, plain, found.start()):
            continue
        values = {name: value for name, value in found.groupdict().items() if value}
        wanted = signature.near or signature.unless or signature.also
        around = log.around(row) if wanted else ""
        if signature.near:
            beside = _signature_expression(signature.near).search(around)
            if beside is None:
                continue
            values = {n: v for n, v in beside.groupdict().items() if v} | values
        if signature.unless and _signature_expression(signature.unless).search(around):
            continue
        for extra in signature.also:
            beside = _signature_expression(extra).search(around)
            if beside is not None:
                values = {n: v for n, v in beside.groupdict().items() if v} | values
        if signature.sum_name:
            values |= FAILURE_SUMS[signature.sum_name](values)
        return FailureMatch(
            signature=signature,
            row=row,
            first_row=first,
            line=quoted_line(text, found[0]),
            wording=wording,
            width=found.end() - found.start(),
            numbers={n: v for n, v in values.items() if _PLAIN_VALUE.fullmatch(redact(v))},
            cause=_filled_template(signature.cause, values),
            changes=tuple(_filled_in(change, values) for change in signature.changes),
        )
    return None


def _filled_template(
    template: str, values: Mapping[str, str], plain: re.Pattern[str] = _PLAIN_VALUE
) -> str:
    """`template` with ``{name}`` or ``{name?what to say instead}`` filled in."""

    def value(match: re.Match[str]) -> str:
        text = redact(values.get(match[1], "")).strip()
        if plain.fullmatch(text):
            return text
        return f"<{match[1]}>" if match[2] is None else match[2]

    # Where a value is left out, the blank before it goes as well.
    return re.sub(r" +(?=[:,.)]|$)", "", _TEMPLATE_VALUE.sub(value, template))


def _filled_in(change: FailureChange, values: Mapping[str, str]) -> FailureChange:
    argv = tuple(_filled_template(word, values, _ARGUMENT_VALUE) for word in change.argv)
    return replace(
        change,
        name=_filled_template(change.name, values),
        old=_filled_template(change.old, values),
        new=_filled_template(change.new, values),
        argv=argv,
    )


def _row_of_coming_up(log: LogLines) -> int:
    """The last row in which a server says that it has come up; -1 where none does."""
    last = (row for _, row in log.alike().values())
    return max((row for row in last if SERVER_UP.search(log.rows[row])), default=-1)


def unexplained_rows(log: LogLines, most: int = 40) -> list[int]:
    """The rows that report an error in so many words, the last `most`, oldest first.

    For a log in which no signature was found: what stands before a start that came up, and what
    programs are known to print in health, is left out.
    """
    up = _row_of_coming_up(log)
    found = []
    for row in sorted(row for _, row in log.alike().values()):
        if row <= up:
            continue
        if reports_error(log.text(row)):
            found.append(row)
    return found[-most:]


# ── knowledge / failures ──────────────────────────────────────────────────────────────────────────
# All signatures of the failure bank, read once: what the stages' modules hold, put together.

_TEXT_BY_STAGE: dict[FailureStage, str] = {
    "capacity": CAPACITY_SIGNATURES,
    "quota": QUOTA_SIGNATURES,
    "permission": PERMISSION_SIGNATURES,
    "boot": BOOT_SIGNATURES + MACHINE_SIGNATURES,
    "image": IMAGE_SIGNATURES,
    "download": DOWNLOAD_SIGNATURES,
    "load": LOAD_SIGNATURES,
    "compile": COMPILE_SIGNATURES,
    "memory": MEMORY_SIGNATURES,
    "serve": SERVE_SIGNATURES,
    "client": CLIENT_SIGNATURES,
}


@functools.cache
def failure_bank() -> FailureBank:
    """The bank of every stage. Takes some milliseconds, once a process."""
    found = [s for stage, text in _TEXT_BY_STAGE.items() for s in parse_signatures(stage, text)]
    return FailureBank(found)


# ── knowledge / refusal_answer ────────────────────────────────────────────────────────────────────
# What a refused request for a machine means: the form that triage.py prints and a sweep reads.
#
# Knows the classes of errors, no wording and no provider.

RefusalReason = Literal[
    "stockout",
    "expired",
    "not offered",
    "price",
    "quota",
    "transient",
    "permission",
    "auth",
    "usage",
    "unknown",
]
RefusalScope = Literal["zone", "region", "market", "project"]

STOPPING_REASONS: tuple[RefusalReason, ...] = ("permission", "auth", "usage")

# What a class allows its text to refine it to, its own meaning first. A class that is not here
# says nothing about the reason, and the text decides.
CLASS_READINGS: dict[ErrorClass, tuple[RefusalReason, ...]] = {
    "CAPACITY": ("stockout", "expired", "not offered", "price"),
    "QUOTA": ("quota",),
    "DENIED": ("permission", "usage", "auth"),
    "AUTH": ("auth", "permission"),
    "INVALID": ("usage", "not offered", "transient"),
    "UNKNOWN": ("unknown",),
    "TIMEOUT": ("unknown",),
    "UNREACHABLE": ("unknown",),
    "PARTIAL": ("unknown",),
    "CANCELLED": ("unknown",),
    "EXISTS": ("unknown",),
    "BUSY": ("transient",),
}
REFUSAL_CHARACTERS = 20_000  # that are read of a text, its last ones; providers' own have 2,000


@dataclass(frozen=True)
class Refusal:
    """A provider's refusal, read. `hints` are the zones that it named as having capacity.

    `said` is the deciding line, redacted; `kind` the signature that matched, empty where only the
    error's class was understood.
    """

    reason: RefusalReason
    scope: RefusalScope
    said: str
    kind: str = ""
    hints: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether the sweep ends with it: no other place would answer differently."""
        return self.reason in STOPPING_REASONS or self.scope == "project"


# What reads a provider's text: the text, and what the plane made of it, if anything. A RigError
# means that nothing was read.
RefusalReader = Callable[[str, ErrorClass | None], Awaitable[Refusal]]


def class_refusal(error_class: ErrorClass | None, said: str) -> Refusal:
    """What an error's class says by itself, where no text tells more; `said` as it may be quoted.

    Without a class, or with one whose fate is not known, that is "unknown": then nothing may be
    taken for absent before it was read.
    """
    readings = CLASS_READINGS.get(error_class, ()) if error_class is not None else ()
    reason = readings[0] if readings else "transient" if error_class == "INTERNAL" else "unknown"
    return Refusal(reason, "region" if reason == "quota" else "zone", said)


# ── knowledge / refusal_reading ───────────────────────────────────────────────────────────────────
# A provider's text as the refusal that it is: its reason, whom it shuts out, and what it hints at.
#
# Reads with the failure bank's signatures and those of requests; asks nobody and remembers nothing.

# What a provider says to a request and no log of a machine holds; the rest is the failure bank's.
_REQUEST_SIGNATURES = r"""
== request_no_capacity | root | certain
line code: *UNSUPPORTED_OPERATION\b|^\W*UNSUPPORTED_OPERATION\b
cause The zone cannot make this machine now.
change act another zone
futile the same zone at once

== request_fault | fault | certain
line \b(?:INTERNAL_ERROR|BACKEND_ERROR|InternalError|InternalFailure)\b
line Internal error\. Please try again
line \b50[0234] (?:Internal Server Error|Bad Gateway|Service Unavailable|Gateway Time-?out)
line \((?:Throttling|Unavailable|ServiceUnavailable)\)|^\W*Throttling\W*$
cause The provider failed at it; nothing is wrong with the request.
change act ask again once, then elsewhere
futile changing the request

== request_usage | root | certain
line \(gcloud\.[\w.-]+\) .{0,200}(?:Invalid choice|unrecognized arguments|Must be specified)
line \((?:InvalidParameter(?:Value|Combination)|MissingParameter|ValidationError
  |Invalid[\w.]+Malformed|InvalidBlockDeviceMapping)\)
unless iamInstanceProfile
cause The request itself is wrong, or the provider's tool is too old for it.
change act correct the request, or update the tool
futile any other zone

== request_account | root | certain
line \((?:Blocked|AccountDisabled)\)|account is currently blocked
line Required 'Alpha Access' permission
cause The account may not ask for this.
change act a person settles it with the provider
futile any other zone
"""

_REASON_OF_KIND: dict[str, RefusalReason] = {
    "gce_stockout": "stockout",
    "tpu_stockout": "stockout",
    "ec2_stockout": "stockout",
    "do_region": "stockout",
    "spot_preempted": "stockout",
    "request_no_capacity": "stockout",
    "flex_start_expired": "expired",
    "qr_failed_or_suspended": "expired",
    "ec2_type_not_in_zone": "not offered",
    "machine_type_not_here": "not offered",
    "tpu_reserved_capacity": "not offered",
    "spot_price_too_low": "price",
    "gce_regional_quota": "quota",
    "tpu_quota_held": "quota",
    "gpu_quota_global": "quota",
    "ec2_spot_count": "quota",
    "ec2_vcpu_quota": "quota",
    "do_droplet_limit": "quota",
    "api_rate_limit": "transient",
    "invalid_iam_profile": "transient",
    "request_fault": "transient",
    "host_maintenance": "transient",
    "gcp_permission_denied": "permission",
    "service_account_user": "permission",
    "insufficient_scopes": "permission",
    "api_not_enabled": "permission",
    "org_policy": "permission",
    "tpu_machine_not_allowed": "permission",
    "aws_unauthorized": "permission",
    "billing_disabled": "permission",
    "request_account": "permission",
    "gcloud_no_account": "auth",
    "aws_no_credentials": "auth",
    "do_unauthorized": "auth",
    "resource_not_found": "usage",
    "aws_no_region": "usage",
    "do_image": "usage",
    "request_usage": "usage",
    "resource_exists": "unknown",
}
# These limits are of the whole project: no other place helps.
_PROJECT_QUOTAS = ("gpu_quota_global", "do_droplet_limit")

_ZONE_SHAPE = re.compile(r"[a-z]+(?:-[a-z]+)+-?\d+-?[a-z]|[a-z]+-[a-z]+\d+-[a-z0-9]+")


@functools.cache
def _refusal_bank() -> FailureBank:
    """The bank's signatures of requests. The stages of a running machine are left out."""
    texts: tuple[tuple[FailureStage, str], ...] = (
        ("capacity", CAPACITY_SIGNATURES + _REQUEST_SIGNATURES),
        ("quota", QUOTA_SIGNATURES),
        ("permission", PERMISSION_SIGNATURES),
        ("client", CLIENT_SIGNATURES),
    )
    return FailureBank([s for stage, text in texts for s in parse_signatures(stage, text)])


def read_refusal(text: str, error_class: ErrorClass | None = None) -> Refusal:
    """What a provider's refusal means; `error_class` is what the plane made of it, if anything.

    A class decides over the text and the text refines it. What neither explains is "unknown": then
    nothing may be taken for absent before it was read.
    """
    text = text[-REFUSAL_CHARACTERS:]
    rows = [row.encode("utf-8", "replace") for row in text.splitlines()]
    matches = [m for m in _refusal_bank().diagnose(LogLines(rows)) if _tells_reason(m)]
    readings = CLASS_READINGS.get(error_class) if error_class is not None else None
    for match in matches:
        reason = _REASON_OF_KIND[match.signature.kind]
        if readings is None or reason in readings:
            return Refusal(
                reason,
                _refusal_scope(reason, match),
                match.line,
                match.signature.kind,
                _hinted_zones(match.numbers.get("zones", "")) if reason == "stockout" else (),
            )
    return class_refusal(error_class, quoted_line(text))


def _tells_reason(match: FailureMatch) -> bool:
    return match.signature.kind in _REASON_OF_KIND


def _refusal_scope(reason: RefusalReason, match: FailureMatch) -> RefusalScope:
    if reason == "price":
        return "market"
    if reason != "quota":
        return "zone"
    if match.signature.kind in _PROJECT_QUOTAS:
        return "project"
    # The Cloud TPU API has quotas by zone and names the zone; every other one is by region.
    named = match.numbers.get("region", "")
    return "zone" if _ZONE_SHAPE.fullmatch(named) else "region"


def _hinted_zones(text: str) -> tuple[str, ...]:
    words = re.split(r"[,\s]+", text.strip().lower())
    return tuple(dict.fromkeys(word for word in words if _ZONE_SHAPE.fullmatch(word)))


# ── boundaries / log_text ─────────────────────────────────────────────────────────────────────────
# Logs from outside as rows: bounded, of any bytes, tens of megabytes in a moment.
#
# Reads no file and knows no failure.

_ROW_BYTES = 4_000  # a longer line is read in pieces
_PIECE_OVERLAP = 1_000  # bytes that two pieces share, so that no message is cut

_TERMINAL_SEQUENCE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-_])"
)
# Zero-width, bidirectional and other marks that nobody sees, in UTF-8; see redact for the list.
_UNSEEN = (
    re.compile(rb"\xe2\x80[\x8b-\x8f\xa8-\xae]"),
    re.compile(rb"\xe2\x81[\xa0-\xaf]"),
    re.compile(rb"\xef(?:\xbb\xbf|\xbf[\xb9-\xbb])"),
    re.compile(rb"\xd8\x9c"),
    re.compile(rb"\xf3\xa0[\x80-\x87][\x80-\xbf]"),
)


def log_lines(data: bytes | str) -> LogLines:
    """`data` as rows: line ends of every kind, also those written as ``\\n`` within a JSON string.

    Terminal sequences and unseen marks are taken out, a line of any length comes in pieces, and
    more than 32 MB are cut in the middle, with a row that says so.
    """
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what some shells write
        raw = raw.decode("utf-16", "replace").encode()
    if len(raw) > LOG_BYTES + 200:
        head = LOG_BYTES // 4
        gap = f"\n[… {len(raw) - LOG_BYTES} bytes left out …]\n".encode()
        raw = raw[:head] + gap + raw[head - LOG_BYTES :]
    if b"\x1b" in raw:
        raw = _TERMINAL_SEQUENCE.sub(b"", raw)
    if not raw.isascii():
        for shape in _UNSEEN:
            raw = shape.sub(b"", raw)
    # A progress bar rewrites its line: each state counts as a row.
    rows = raw.replace(b"\r", b"\n").split(b"\n") if b"\r" in raw else raw.split(b"\n")
    if max(map(len, rows)) > _PIECE_OVERLAP:
        rows = [piece for row in rows for piece in _pieces(row)]
    return LogLines(rows)


def _pieces(row: bytes) -> list[bytes]:
    """A long row by the line ends written in it, and what is longer still in overlapping pieces."""
    if len(row) <= _PIECE_OVERLAP:
        return [row]
    found = []
    for part in row.split(b"\\n"):
        if len(part) <= _ROW_BYTES:
            found.append(part)
            continue
        step = _ROW_BYTES - _PIECE_OVERLAP
        found += [_whole_words(part, at, at + _ROW_BYTES) for at in range(0, len(part), step)]
    return found


def _whole_words(text: bytes, begin: int, end: int) -> bytes:
    """`text[begin:end]` without the words that the cuts break: half a secret looks like none."""
    piece = text[begin:end]
    if begin:
        piece = piece.partition(b" ")[2] or piece
    if end < len(text):
        piece = piece.rpartition(b" ")[0] or piece
    return piece


# ── boundaries / log_triage ───────────────────────────────────────────────────────────────────────
# A log's bytes to its answer: what triage.py does, in one function.
#
# Knows the failure bank and how logs are cut into rows; knows no file and no server.

_EXCERPT_CHARACTERS = 6_000  # about 2,000 tokens: small models are served with 4,096
_ROWS_BESIDE = 3  # rows of context on each side of an error row
_UNEXPLAINED_SHOWN = 5
# One word without blanks, as long as that, is a key or an encoded file, not a message.
_BLOB_ROW = re.compile(r"\S{60,}")


def triage_log(data: bytes | str) -> LogAnswer:
    """What `data` says: known failures, else the errors that none of them explains."""
    log = log_lines(data)
    matches = failure_bank().diagnose(log)
    if matches:
        return LogAnswer(len(log.rows), tuple(match.answer for match in matches))
    rows = unexplained_rows(log)
    shown = tuple(quoted_line(log.text(row)) for row in rows[-_UNEXPLAINED_SHOWN:])
    return LogAnswer(len(log.rows), (), shown, len(rows), log_excerpt(log, rows) if rows else "")


def log_excerpt(log: LogLines, rows: Sequence[int]) -> str:
    """The error rows with three rows around each, the last ones first kept, at most 6,000
    characters; redacted, and without rows that are one long word."""
    wanted = sorted({n for r in rows for n in range(r - _ROWS_BESIDE, r + _ROWS_BESIDE + 1)})
    texts = [log.text(n) for n in wanted if 0 <= n < len(log.rows)]
    kept: list[str] = []
    size = 0
    for text in reversed(redact("\n".join(texts)).split("\n")):
        line = text.strip()[:600]
        if not line or _BLOB_ROW.fullmatch(line):
            continue
        size += len(line) + 1
        if size > _EXCERPT_CHARACTERS:
            break
        kept.append(line)
    return "\n".join(reversed(kept))


# ── programs / triage ─────────────────────────────────────────────────────────────────────────────

_MEMORY_LIMIT = 3_000_000_000  # bytes of address space: a log must not take the computer down


def answer_text(answer: LogAnswer) -> str:
    """`answer` for people."""
    lines = [answer.summary]
    for failure in answer.failures[:1]:
        lines += [f"  line {failure.line_number}: {failure.line}"]
        lines += [f"  change: {change}" for change in failure.changes]
        lines += [f"  will not help: {text}" for text in failure.futile]
        lines += [f"  see: {failure.upstream}"] if failure.upstream else []
    lines += [f"  also seen: {f.kind}, line {f.line_number}" for f in answer.failures[1:6]]
    lines += [f"  unexplained: {text}" for text in answer.unexplained]
    return "\n".join(lines)


def refusal_text(refusal: Refusal) -> str:
    """`refusal` for people."""
    lines = [f"{refusal.reason} (of the {refusal.scope}): {refusal.said}"]
    lines += [f"  the provider names: {', '.join(refusal.hints)}"] if refusal.hints else []
    lines += ["  no other place would answer differently"] if refusal.stops else []
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="triage.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 no failure and no known refusal found, 1 one was found or errors "
        "are unexplained.",
    )
    parser.add_argument("file", nargs="?", default="-", help="a log; - is standard input")
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    parser.add_argument(
        "--refusal", action="store_true", help="the text is a provider's refusal of a machine"
    )
    parser.add_argument(
        "--error-class", choices=get_args(ErrorClass), help="what a rig made of that refusal"
    )
    arguments = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, resource.RLIM_INFINITY))
    try:
        data = _read(arguments.file)
    except OSError as error:
        print(f"triage.py: {clean(arguments.file, 300)}: {error.strerror}", file=sys.stderr)
        return 2
    if arguments.refusal:
        refusal = read_refusal(data.decode("utf-8", "replace"), arguments.error_class)
        _print_answer(refusal, refusal_text(refusal), arguments.json)
        return 0 if refusal.reason == "unknown" else 1
    answer = triage_log(data)
    _print_answer(answer, answer_text(answer), arguments.json)
    return 1 if answer.failures or answer.unexplained_count else 0


def _print_answer(answer: LogAnswer | Refusal, text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    else:
        print(clean(text))


def _read(name: str) -> bytes:
    """The bytes of the file, head and tail where it is larger than a log may be."""
    if name == "-":
        return sys.stdin.buffer.read(10 * LOG_BYTES)
    with Path(name).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= LOG_BYTES:
            return file.read()
        head = file.read(LOG_BYTES // 4)
        file.seek(size - (LOG_BYTES - len(head)))
        gap = f"\n[… {size - LOG_BYTES} bytes left out …]\n".encode()
        return head + gap + file.read()


if __name__ == "__main__":
    sys.exit(main())
