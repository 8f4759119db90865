"""What the log of vLLM on a TPU says: with which lines a phase of the start begins, what it has.

Its TPU half is the package tpu-inference; the sentences are those of two public logs (October 2025,
vLLM 0.26.0 of August 2026) and of the source of 0.32.0. Reads text only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# For people; in the order in which a boot goes through them.
BOOT_PHASE_WORDS: Mapping[str, str] = {
    "docker": "Docker is found or installed",
    "image": "the image is pulled",
    "token": "the Hugging Face token is fetched",
    "weights": "the weights are downloaded and loaded",
    "compile": "XLA compiles for each shape of input",
    "ready": "the server answers",
}
# Each from the end of the logger's own prefix on, which has changed from version to version.
BOOT_MARKS: Mapping[str, Sequence[str]] = {
    "weights": (
        r"\] Loading model with MODEL_IMPL_TYPE=",
        r"\] (?:Downloading weights from HF|Found weights from local|Loading weights from)\b",
    ),
    "compile": (
        r"\] Precompile all the subgraphs with possible input shapes",
        r"\] Compiling [^\[\]]{1,80} with different input shapes",
        r"\] Precompile [^\[\]]{1,80} --> ",
    ),
}
_TPU_RESOLVED: Mapping[str, re.Pattern[str]] = {
    "version": re.compile(r"Initializing a V1 LLM engine \(v([^)\s]{1,60})\)"),
    "implementation": re.compile(r"Resolved MODEL_IMPL_TYPE 'auto' to '(\w{1,40})'"),
    "weights_gib": re.compile(r"\] Init model \| hbm=\[\(([\d.]{1,12}), "),
    "hbm_gib": re.compile(r"\] Memory statistics \| total_hbm_limit_gb=([\d.]{1,12})GiB"),
    "hbm_usable_gib": re.compile(r"\btotal_hbm_limit_cap_gb=([\d.]{1,12})GiB"),
}


def resolved_tpu_values(log: str) -> dict[str, str]:
    """What a start in `log` had, as far as it says: the last one where there are several.

    Keys: version (vLLM's), implementation (flax_nnx: the model is written in JAX; vllm: vLLM's own
    is translated), weights_gib (on the chip once they were loaded), hbm_gib, hbm_usable_gib.
    """
    found = {}
    for name, pattern in _TPU_RESOLVED.items():
        values = pattern.findall(log)
        if values:
            found[name] = values[-1]
    return found
