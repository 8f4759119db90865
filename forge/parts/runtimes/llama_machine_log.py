"""What llama-server's log says of where a model lies: on the GPU, with the host, on the disk.

Knows release b11434's words at verbosity 4, and neither settings nor machines.
"""

from __future__ import annotations

import re

# Lines of b11434's log at verbosity 4, as a build for the processor wrote them on 2026-11-30 (with
# CPU_Mapped and CPU for CUDA0), and its source text (src/llama-model.cpp, llama-kv-cache.cpp,
# llama-context.cpp).
_BUFFER_ROW = re.compile(r": +(CUDA\d+|CPU_Mapped) (model|KV|compute) buffer size = +([\d.]+) MiB")
_LAYERS_ROW = re.compile(r": offloaded (\d+/\d+) layers to GPU")
_ATTENTION_ROW = re.compile(r": Flash Attention (enabled|not supported)")
_LAZY_ROW = re.compile(r": tensor (\S+) \(size = (\d+) MiB\) lazy read enabled")
_BUFFER_KINDS = {"model": "weights", "KV": "kv", "compute": "compute"}


def resolved_residency(log: str) -> dict[str, str]:
    """Where the model's bytes lie, by the log of the latest start in `log`: MiB on each device by
    kind, layers on the GPU, whether attention is fused, the table that is read from the disk."""
    begin = log.rfind("load_model: loading model")
    text = log[begin:] if begin >= 0 else log
    sums: dict[str, float] = {}
    for device, kind, mib in _BUFFER_ROW.findall(text):
        where = "host" if device == "CPU_Mapped" else device.lower()
        key = f"{where}_{_BUFFER_KINDS[kind]}_mib"
        sums[key] = sums.get(key, 0.0) + float(mib)
    found = {key: f"{value:.2f}" for key, value in sums.items()}
    if layers := _LAYERS_ROW.search(text):
        found["layers_on_gpu"] = layers[1]
    if attention := _ATTENTION_ROW.search(text):
        found["flash_attention"] = attention[1]
    if lazy := _LAZY_ROW.search(text):
        found["read_from_disk"] = f"{lazy[1]} ({lazy[2]} MiB)"
    return found
