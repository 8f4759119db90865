"""Rows of conversations: never two in one, low where it matters, moved only for a smaller batch."""

from __future__ import annotations

import random
import unittest

from forge.engines.jax.rows import RowMap
from forge.engines.jax.steps import batch_sizes, chunk_buckets


class ShapesTest(unittest.TestCase):
    def test_batches_double_up_to_the_slots(self) -> None:
        self.assertEqual(batch_sizes(1), (1,))
        self.assertEqual(batch_sizes(4), (1, 2, 4))
        self.assertEqual(batch_sizes(6), (1, 2, 4, 6))

    def test_pieces_are_padded_to_less_than_four_times_their_length(self) -> None:
        self.assertEqual(chunk_buckets(256), (16, 32, 64, 128, 256))
        self.assertEqual(chunk_buckets(100), (16, 32, 64, 100))
        self.assertEqual(chunk_buckets(16), (16,))
        self.assertEqual(chunk_buckets(5), (5,))


class RowMapTest(unittest.TestCase):
    def setUp(self) -> None:
        self.rows = RowMap(batch_sizes(8))

    def test_the_lowest_free_row_is_given(self) -> None:
        for slot in (5, 2, 7):
            self.rows.give(slot)
        self.rows.take(2)
        self.rows.give(0)
        self.assertEqual([self.rows[slot] for slot in (5, 0, 7)], [0, 1, 2])

    def test_one_that_is_left_alone_moves_to_the_smallest_batch(self) -> None:
        for slot in range(6):
            self.rows.give(slot)
        for slot in range(5):
            self.rows.take(slot)
        self.assertEqual(self.rows.batch_of([5]), 8)
        self.assertEqual(self.rows.pack([5]), [(5, 0)])
        self.assertEqual(self.rows.batch_of([5]), 1)

    def test_nothing_moves_where_the_batch_would_stay_as_large(self) -> None:
        for slot in range(4):
            self.rows.give(slot)
        self.rows.take(1)
        self.assertEqual(self.rows.pack([0, 2, 3]), [])

    def test_rows_of_others_are_left_alone(self) -> None:
        for slot in range(3):
            self.rows.give(slot)
        self.assertEqual(self.rows.pack([2]), [])  # rows 0 and 1 are taken
        self.rows.take(0)
        self.assertEqual(self.rows.pack([2]), [(2, 0)])
        self.assertEqual(self.rows[1], 1)

    def test_the_highest_comes_into_a_gap_that_another_leaves(self) -> None:
        for slot in range(5):
            self.rows.give(slot)
        self.rows.take(0)
        self.assertEqual(self.rows.pack([1, 2, 3, 4]), [(4, 0)])
        self.assertEqual(self.rows.batch_of([1, 2, 3, 4]), 4)

    def test_any_history_keeps_every_conversation_whole(self) -> None:
        """A plain list plays the caches: whoever begins writes its name, a move copies it."""
        draw = random.Random(3)
        cells: list[int | None] = [None] * 8
        live: set[int] = set()
        for _ in range(3000):
            free = sorted(set(range(8)) - live)
            if free and draw.random() < 0.5:
                slot = draw.choice(free)
                self.rows.give(slot)
                live.add(slot)
                cells[self.rows[slot]] = slot
            elif live and draw.random() < 0.5:
                slot = draw.choice(sorted(live))
                self.rows.take(slot)
                live.remove(slot)
            if live:
                asked = draw.sample(sorted(live), draw.randint(1, len(live)))
                before = self.rows.batch_of(asked)
                moves = self.rows.pack(asked)
                for source, target in moves:
                    cells[target] = cells[source]
                after = self.rows.batch_of(asked)
                self.assertTrue(after < before if moves else after == before)
                others = {self.rows[slot] for slot in live - set(asked)}
                best = sorted(set(range(8)) - others)[len(asked) - 1]
                self.assertEqual(after, next(size for size in (1, 2, 4, 8) if size > best))
            self.assertEqual([cells[self.rows[slot]] for slot in sorted(live)], sorted(live))
            self.assertEqual(len({self.rows[slot] for slot in live}), len(live))


if __name__ == "__main__":
    unittest.main()
