"""Keeps what whole chunks of prompts left in the caches, for prompts that begin with the same.

Knows no arrays: what it keeps is handed to it and handed out again. A chunk's name is made of its
tokens and of all before them, so equal names mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np


def prefix_names(tokens: Sequence[int], chunk: int, salt: str) -> list[bytes]:
    """The name of each whole chunk of `tokens`, in order.

    Under another `salt` nothing has the same name. SHA-256, so that nobody can find a second prefix
    for a name.
    """
    names = []
    name = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    for end in range(chunk, len(tokens) + 1, chunk):
        piece = np.asarray(tokens[end - chunk : end], np.int64)
        name = hashlib.sha256(name + piece.tobytes()).digest()
        names.append(name)
    return names


class PrefixStore:
    """As many chunks as `room`; beyond that the least recently used ones are forgotten.

    A chunk counts as used whenever one that follows it is, and after it: so none is forgotten
    before those that follow it, which are of no use without it.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[bytes, Any] = OrderedDict()  # the least recently used one first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def found(self, names: Sequence[bytes]) -> list[Any]:
        """What is kept of the first of `names`, up to the first that is not here."""
        known = []
        for name in names:
            if name not in self._kept:
                break
            known.append(self._kept[name])
        self._use(names[: len(known)])
        return known

    def keep(self, names: Sequence[bytes], kept: Any) -> None:
        """Keep `kept` under the last of `names`; the others are the chunks before it.

        Nothing is kept where the last of those was forgotten: nobody would find it.
        """
        if len(names) == 1 or names[-2] in self._kept:
            self._kept[names[-1]] = kept
            self._use(names)
            while len(self._kept) > self._room:
                self._kept.popitem(last=False)

    def _use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._kept.move_to_end(name)
