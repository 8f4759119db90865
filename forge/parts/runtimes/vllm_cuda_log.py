"""What the log of vLLM on an NVIDIA GPU says: where a phase of the start begins, what it has.

The sentences are those of the source of 0.32.0, which has two runners of the model: the second one
is the usual one there, the first stands in where the second lacks something. Reads text only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# For people; in the order in which a boot goes through them.
CUDA_PHASE_WORDS: Mapping[str, str] = {
    "driver": "the GPU and its driver are what the rig is for",
    "docker": "Docker is found",
    "image": "the image is pulled",
    "token": "the Hugging Face token is fetched",
    "weights": "the weights are downloaded and loaded",
    "compile": "kernels are compiled and the steps of decoding recorded",
    "ready": "the server answers",
}
_COMPILED_PART = r"(?:\[[^\[\]]{1,60}\] )?"  # of a model that is compiled in several
# Each from the end of the logger's own prefix on, which has changed from version to version.
CUDA_BOOT_MARKS: Mapping[str, Sequence[str]] = {
    "weights": (
        r"\] Loading model from scratch\.\.\.",  # v1/worker/gpu/model_runner.py
        r"\] Starting to load model ",  # v1/worker/gpu_model_runner.py
    ),
    "compile": (
        rf"\] {_COMPILED_PART}Starting torch\.compile",
        rf"\] {_COMPILED_PART}Directly load AOT compilation from path ",  # out of the cache
        rf"\] {_COMPILED_PART}Using cache directory: [^\s]{{1,400}} for vLLM's torch\.compile",
        # With ENFORCE_EAGER=1 nothing above is written: then it begins with the room for the cache.
        r"\] Available KV cache memory: ",
        r"\] JIT kernel warmup starting\.",
    ),
}
_CUDA_RESOLVED: Mapping[str, re.Pattern[str]] = {
    "version": re.compile(r"Initializing a V1 LLM engine \(v([^)\s]{1,60})\)"),
    "attention": re.compile(r"\] Using (?:AttentionBackendEnum\.)?(\w{1,40}) backend\."),
    "weights_gib": re.compile(r"\] Model loading took ([\d.]{1,12}) GiB"),
    "kv_cache_gib": re.compile(r"\] Available KV cache memory: ([\d.]{1,12}) GiB"),
    "graphs_gib": re.compile(
        r"\] Graph capturing finished in \d{1,6} secs, took ([\d.]{1,12}) GiB"
    ),
    "memory_gib": re.compile(r"\] Free memory on device \([\d.]{1,12}/([\d.]{1,12}) GiB\)"),
    "activation_gib": re.compile(r" ([\d.]{1,12}) GiB for peak activation"),
    "quantized": re.compile(r"\] Quantizing \d{1,6} layers of types: (\S[^\r\n]{0,200})"),
}


def resolved_cuda_values(log: str) -> dict[str, str]:
    """What a start in `log` had, as far as it says: the last one where there are several.

    Keys: version (vLLM's), attention (which kernels), quantized (layers made eight-bit while
    loading), and in GiB: memory_gib (the card's, as CUDA counts it), weights_gib (after loading),
    activation_gib (a step's peak), graphs_gib (recorded steps), kv_cache_gib (left for the cache).
    """
    found = {}
    for name, pattern in _CUDA_RESOLVED.items():
        values = pattern.findall(log)
        if values:
            found[name] = values[-1].strip()
    return found
