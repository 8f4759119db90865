"""Begins a conversation with what an earlier one left, and keeps what it leaves itself.

Knows no requests and no sampling. Only what reading a prompt put into the caches is kept, and only
after whole chunks: a prompt is then read on from where it would have been cut without this too, by
the same programs, and not one bit of its answer depends on what was found. What an answer put there
is read anew with the next turn's prompt, for a decode rounds otherwise.

Chunks lie in the host's memory: on an accelerator they take none of the device's, and cross its bus
both ways. Taking one out waits until it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from forge.engines.jax.cache import EngineState
from forge.engines.jax.prefix_chunks import kept_chunk_shapes
from forge.engines.jax.prefix_store import PrefixStore
from forge.engines.serving.slot_engine import EngineFault


class PrefixCache:
    """Chunks of `chunk` tokens in at most `room_bytes`, for caches of these shapes.

    `run` runs one of the engine's programs by its name. Raises EngineFault where not one chunk
    has room.
    """

    def __init__(
        self, shapes: EngineState, chunk: int, room_bytes: float, run: Callable[..., Any]
    ) -> None:
        pieces = jax.tree.leaves(kept_chunk_shapes(shapes, chunk))
        self._each = sum(piece.size * piece.dtype.itemsize for piece in pieces)
        if room_bytes < self._each:
            raise EngineFault(
                f"a prefix cache of {room_bytes / 1e9:g} GB: a chunk of {chunk} tokens takes "
                f"{self._each / 1e9:.3g}"
            )
        self._chunk = chunk
        self._run = run
        self._store = PrefixStore(int(room_bytes // self._each))
        self._asked = self._held = 0

    def begin(
        self, state: EngineState, row: int, prompt: Sequence[int], names: Sequence[bytes]
    ) -> tuple[EngineState, int]:
        """The state with the known beginning of `prompt` in `row`, and how many tokens that is.

        The last token is never among them: an answer's first token is made of its stream.
        """
        known = self._store.found(names[: (len(prompt) - 1) // self._chunk])
        for number, kept in enumerate(known):
            start, end = number * self._chunk, (number + 1) * self._chunk
            ids = np.asarray(prompt[start:end], np.int32)
            state = self._run(
                "putting a chunk back", state, np.int32(row), ids, np.int32(end), kept
            )
        held = len(known) * self._chunk
        self._asked += len(prompt)
        self._held += held
        return state, held

    def keep(self, state: EngineState, row: int, names: Sequence[bytes], taken: int) -> None:
        """Keep the chunk with which `row` came to hold `taken` tokens, if that was a whole one.

        `names` are those of the prompt's chunks.
        """
        if taken % self._chunk:
            return
        path = names[: taken // self._chunk]
        if path[-1] not in self._store:
            kept = self._run("taking a chunk out", state, np.int32(row), np.int32(taken))
            self._store.keep(path, jax.device_get(kept))

    def counters(self) -> Mapping[str, float]:
        """Tokens of prompts that were looked up and that were found, so far; bytes kept now."""
        return {
            "prefix_cache_queries_total": self._asked,
            "prefix_cache_hits_total": self._held,
            "prefix_cache_bytes": len(self._store) * self._each,
        }
