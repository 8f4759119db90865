"""Which row of the caches each conversation has: low ones, so that few need only a small batch.

Knows no device: it only says what to move.
"""

from __future__ import annotations

from collections.abc import Sequence


class RowMap:
    """The rows of up to `slots` conversations. Batches take rows 0..size-1, sizes rising."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._free = list(range(self._sizes[-1]))
        self._rows: dict[int, int] = {}

    def __getitem__(self, slot: int) -> int:
        return self._rows[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def give(self, slot: int) -> None:
        """Give `slot` the lowest free row."""
        self._rows[slot] = self._free.pop(0)

    def take(self, slot: int) -> None:
        """Free the row of `slot`."""
        self._free.append(self._rows.pop(slot))
        self._free.sort()

    def batch_of(self, slots: Sequence[int]) -> int:
        """The least batch that reaches the rows of all of `slots`."""
        return self._size(1 + max(self._rows[slot] for slot in slots))

    def pack(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Moves (from row, to free row) after which `slots` need the least batch they can.

        None where that would be no smaller: a move costs as much as reading a conversation.
        """
        rows = {self._rows[slot] for slot in slots}
        # The lowest rows that these could have, beside those that other conversations hold.
        least = self._size(1 + sorted(rows | set(self._free))[len(rows) - 1])
        moves = []
        for slot in slots:
            row = self._rows[slot]
            if row >= least:
                self._rows[slot] = self._free.pop(0)
                self._free.append(row)
                moves.append((row, self._rows[slot]))
        self._free.sort()
        return moves

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)
