"""What a llama-server holds in memory: the cache of each slot, and what comes besides weights.

Knows a file's shape and b11434's way of allocating, and neither program nor settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forge.parts.boundaries.gguf_file import GgufFile

# What llama-server of b11434 does with a context (src/llama-context.cpp, llama-kv-cache-iswa.cpp):
# a slot's context and a window's cells are rounded up.
_CELLS_STEP = 256
_BATCH = 512  # tokens that are computed at a time (-ub), and that a window's cache holds besides
CacheType = Literal["f16", "q8_0", "f32"]
_CACHE_BITS: Mapping[CacheType, float] = {"f16": 16, "q8_0": 8.5, "f32": 32}  # of each number
# Copies of the windowed layers' cache that a slot keeps, to go on from an earlier point of a chat.
# The server's own default is 32, and it would keep answered prompts in 8 GiB more (--cache-ram).
LLAMA_CHECKPOINTS = 4
# Besides weights and KV cache, fitted as an upper bound on two models served by b11434 on
# 2026-11-30 (peak anonymous memory, 931 prompt tokens): SmolLM2-135M 40 MB, and zeros in E2B's
# shape and encodings 246 MB. A batch holds, for each token, the widest rows of a layer at once.
_PROGRAM_BYTES = 30_000_000
_VOCABULARY_ENTRY = 512


@dataclass(frozen=True)
class SlotMemory:
    """What each slot holds, in bytes: keys and values, and checkpoints of the windowed layers."""

    context: int
    kv: int
    checkpoints: int

    @property
    def total(self) -> int:
        return self.kv + self.checkpoints


def slot_memory(file: GgufFile, context: int, cache_type: CacheType) -> SlotMemory:
    """What each slot of `context` tokens of a server with `file` holds.

    A layer that sees all keeps the slot's context, a windowed one its window and a batch, both
    rounded up to 256 cells. Source: llama.cpp b11434, src/llama-kv-cache-iswa.cpp.
    """
    cells, full, windowed = llama_cells(context), 0, 0
    for layer in file.kv_layers():
        if layer.window is None:
            full += cells * layer.width
        else:
            windowed += llama_cells(min(cells, layer.window + _BATCH)) * layer.width
    each = _CACHE_BITS[cache_type] / 8
    return SlotMemory(
        cells, int((full + windowed) * each), int(LLAMA_CHECKPOINTS * windowed * each)
    )


def llama_buffer_bytes(file: GgufFile, context: int, cache_type: CacheType) -> int:
    """Bytes of the program, its vocabulary, one batch's activations and its mask, at most."""
    per_layer = file.largest("embedding_length_per_layer_input") * (file.block_count or 0)
    experts = file.largest("expert_used_count") * file.largest("expert_feed_forward_length")
    row = 4 * (file.largest("feed_forward_length") + experts) + 2 * per_layer
    row += 8 * file.largest("embedding_length")
    if cache_type == "f32":  # without flash attention each head's scores stand side by side
        row += 2 * file.largest("attention.head_count") * context
    mask = 2 * context
    return _PROGRAM_BYTES + _VOCABULARY_ENTRY * (file.vocabulary or 0) + _BATCH * (4 * row + mask)


def llama_cells(tokens: int) -> int:
    """The cells that a context of `tokens` gets."""
    return -(-tokens // _CELLS_STEP) * _CELLS_STEP
