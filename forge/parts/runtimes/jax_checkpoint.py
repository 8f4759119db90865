"""Whether the JAX engine serves a checkpoint, and what it then holds in memory.

Reads headers and the config, never a tensor. Knows neither settings nor processes.
"""

from __future__ import annotations

import re

from forge.parts.boundaries.checkpoint import Checkpoint
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.geometry_config import GEMMA4_MODEL_TYPES

# What Python and XLA hold besides weights and KV cache, most of it while they compile: 0.61 GB with
# 10 layers and 0.90 GB with 20, the peaks of first starts with 4 slots (jaxlib 0.10.2, 2 cores of
# an AMD EPYC, Zen 4, 2026-11-30).
_JAX_OVERHEAD, _JAX_LAYER_OVERHEAD = 320_000_000, 29_000_000
_JAX_KEY_BLOCK = 256  # tokens; the engine rounds a length beyond it up to whole blocks
_JAX_MARKS_BYTES = 5  # of each slot and vocabulary entry: whether it was said, and how often
# What the engine passes over: the other halves of a multimodal release, and a head that is stored
# although it is the embedding.
_JAX_NOT_LOADED = re.compile(
    r"(?:model\.)?(?:(?:vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\."
    r"|lm_head\.weight$)"
)


def jax_memory(
    checkpoint: Checkpoint, element_bytes: int, context: int, slots: int
) -> dict[str, int]:
    """Bytes by part, for `slots` conversations of `context` tokens and numbers of `element_bytes`.

    The cache: rings of sliding layers, whole lengths of full ones, owners only, and what sampling
    counts of each slot. While it loads, the engine holds no tensor twice.
    Raises RigError INVALID for a checkpoint that the engine would refuse.
    """
    _refuse_for_jax(checkpoint, context)
    assert checkpoint.geometry is not None  # else it was refused
    read = (t for t in checkpoint.tensors if not _JAX_NOT_LOADED.match(t.name))
    length = context
    if length > _JAX_KEY_BLOCK:
        length = -(-length // _JAX_KEY_BLOCK) * _JAX_KEY_BLOCK
    cache = kv_bytes(
        checkpoint.geometry, length, slots=slots, dtype_bytes=element_bytes, layout="ring"
    )
    return {
        "weights": sum(tensor.elements * element_bytes for tensor in read),
        "KV cache": cache + slots * checkpoint.geometry.vocab * _JAX_MARKS_BYTES,
        "Python and JAX": _JAX_OVERHEAD
        + _JAX_LAYER_OVERHEAD * len(checkpoint.geometry.layer_types),
    }


def _refuse_for_jax(checkpoint: Checkpoint, context: int) -> None:
    """Raise RigError INVALID for what would be refused anyway once the engine has been started.

    What else the engine refuses it names in its log.
    """
    kind, why = str(checkpoint.config.get("model_type")), ""
    if kind not in GEMMA4_MODEL_TYPES:
        why = f"its model_type is {kind[:40]}, and this engine computes Gemma 4 alone"
    elif "quantization_config" in checkpoint.config:
        why = "its weights are quantised, and this rig reckons the memory of bf16 and f32 alone"
    elif checkpoint.geometry is None:
        why = f"its config.json is not understood: {checkpoint.geometry_fault}"
    if why:
        raise RigError(
            "INVALID",
            f"the model folder {checkpoint.folder} cannot be served: {why}",
            "serve a Gemma 4 release in bf16 (google/gemma-4-E2B-it), or use another rig",
        )
    text = checkpoint.config.get("text_config", checkpoint.config)
    positions = text.get("max_position_embeddings")
    if isinstance(positions, int) and positions < context:
        raise RigError(
            "INVALID",
            f"MAX_MODEL_LEN is {context}, and {checkpoint.folder} has {positions} positions",
            f"set MAX_MODEL_LEN to {positions} or less",
        )
