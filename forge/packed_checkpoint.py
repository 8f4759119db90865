"""Writes a checkpoint anew with packed 4-bit matrices, as Google's `-w4a16-ct` releases have them.

For benches and tests; a rig carries none of it. Scales are found as simply as can be: what matters
here is the form, not how good the integers are. Knows no engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKED_GROUP = 32
# Modules that stay as they are: the head, and whatever sees or hears.
PACKED_IGNORED = ("lm_head", "re:.*(vision|audio)_tower.*", "re:.*embed_(vision|audio).*")
_WEIGHTS = "model.safetensors"


def packed_config(ignored: Sequence[str] = PACKED_IGNORED, group: int = PACKED_GROUP) -> Any:
    """The `quantization_config` of such a checkpoint, as compressed-tensors 0.20 writes it."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
        "zp_dtype": None,
    }
    scheme: dict[str, Any] = {
        "format": "pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": scheme},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }


def pack_checkpoint(folder: Path, target: Path, *, head: bool = True) -> Path:
    """Write the checkpoint of `folder`, which is in one file, into `target` and return it.

    Every Linear of the text half is packed, all else becomes bf16. head: with a copy of the
    embedding as lm_head.weight, as the releases have it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name not in (_WEIGHTS, "config.json"):
            shutil.copy(path, target)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = stated | {"dtype": "bfloat16", "quantization_config": packed_config()}
    (target / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    stored: dict[str, Any] = {}
    for name, tensor in load_file(folder / _WEIGHTS).items():
        if tensor.ndim != 2 or "embed_tokens" in name or name == "lm_head.weight":
            stored[name] = tensor.to(torch.bfloat16)
            continue
        module = name.removesuffix(".weight")
        words, scales = packed_words(tensor)
        stored[f"{module}.weight_packed"] = words
        stored[f"{module}.weight_scale"] = scales
        stored[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
        if head and "lm_head.weight" not in stored:
            (embedding,) = (key for key in stored if key.endswith("embed_tokens.weight"))
            stored["lm_head.weight"] = stored[embedding].clone()
    save_file(stored, target / _WEIGHTS, {"format": "pt"})
    return target


def packed_words(matrix: Any) -> tuple[Any, Any]:
    """(int32 words [n, k/8], bf16 scales [n, k/32]) of a torch matrix [n, k]."""
    import torch

    rows, columns = matrix.shape
    groups = matrix.float().reshape(rows, columns // PACKED_GROUP, PACKED_GROUP)
    scales = (groups.abs().amax(dim=-1) / 7.5).clamp(min=1e-6).to(torch.bfloat16)
    integers = torch.round(groups / scales.float()[..., None]).clamp(-8, 7).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4)
    words = (integers.reshape(rows, columns // 8, 8) << shifts).sum(dim=-1)
    return words.to(torch.uint32).view(torch.int32), scales
