"""Tiny packed checkpoints, and what compressed-tensors makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from forge.packed_checkpoint import pack_checkpoint, packed_config
from tests.engines.tiny import make_checkpoint


def make_packed(folder: Path, shape: str, **changes: Any) -> Path:
    """A packed checkpoint of `shape` in `folder`; its plain one stands beside, as `-plain`."""
    if shape in ("e2b", "e4b"):
        changes = {"hidden_size_per_layer_input": 32} | changes  # whole groups
    plain = make_checkpoint(folder.with_name(f"{folder.name}-plain"), shape, **changes)
    return pack_checkpoint(plain, folder)


def unpacked_by_its_library(folder: Path) -> dict[str, Any]:
    """All tensors of a packed checkpoint as compressed-tensors unpacks them: torch, bf16."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    (stated,) = packed_config()["config_groups"].values()
    scheme = QuantizationScheme(**stated)
    stored = load_file(folder / "model.safetensors")
    unpacked: dict[str, Any] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            parts = {
                key: stored[f"{module}.{key}"]
                for key in ("weight_packed", "weight_scale", "weight_shape")
            }
            made = PackedQuantizationCompressor.decompress(parts, scheme)
            unpacked[f"{module}.weight"] = made["weight"]
        elif not part.startswith("weight_"):
            unpacked[name] = tensor
    return unpacked


def make_unpacked(folder: Path, target: Path) -> Path:
    """The packed checkpoint of `folder` as a plain bf16 one, by its library, in `target`."""
    from safetensors.torch import save_file

    shutil.copytree(folder, target)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del stated["quantization_config"]
    (target / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    tensors = unpacked_by_its_library(folder)
    tensors.pop("lm_head.weight", None)  # transformers unties what is stored twice
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
