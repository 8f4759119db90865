"""Attention and caches against plain numpy: each token sees what it may, whatever is beside it."""

from __future__ import annotations

import unittest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.jax.attention import KEY_BLOCK, KeyView, attend, whole_blocks
from forge.engines.jax.cache import (
    cached_view,
    closed_ring,
    held_positions,
    widened_view,
    written,
)

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 8


def plain_attention(
    queries: np.ndarray, places: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int
) -> np.ndarray:
    """One conversation's attention in float64: queries [tokens, heads, head_dim] at `places`.

    keys, values [kv_heads, length, head_dim], of which entry i is the token at position i.
    """
    answer = np.zeros(queries.shape)
    for token, place in enumerate(places):
        seen = slice(max(0, place - window + 1), place + 1)
        for head in range(queries.shape[1]):
            scores = keys[head // GROUP, seen].astype(float) @ queries[token, head].astype(float)
            shares = np.exp(scores - scores.max())
            answer[token, head] = shares @ values[head // GROUP, seen] / shares.sum()
    return answer


def noise(*shape: int, seed: int) -> np.ndarray:
    drawn: np.ndarray = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return drawn


class AttendTest(unittest.TestCase):
    LENGTH = 2 * KEY_BLOCK

    @classmethod
    def setUpClass(cls) -> None:
        cls.keys = noise(3, KV_HEADS, cls.LENGTH, HEAD_DIM, seed=1)
        cls.values = noise(3, KV_HEADS, cls.LENGTH, HEAD_DIM, seed=2)
        cls.queries = noise(2, 3, KV_HEADS * GROUP, HEAD_DIM, seed=3)
        cls.compiled: dict[int, Any] = {}
        for window in (5, 300, 10_000):

            def run(queries: Any, positions: Any, view: Any, window: int = window) -> Any:
                return attend(queries, positions, view, window)

            cls.compiled[window] = jax.jit(run)

    def test_each_token_sees_its_window_and_nothing_else(self) -> None:
        """Over one and two blocks, from row 1 of the caches, with positions at the blocks' edge."""
        for window, run in self.compiled.items():
            for last in (2, KEY_BLOCK - 1, KEY_BLOCK, self.LENGTH - 1):
                with self.subTest(window=window, last=last):
                    held = np.array([last + 1, 3], np.int32)
                    view = cached_view(self.keys, self.values, 1, jnp.asarray(held))
                    places = np.stack([np.arange(last - 2, last + 1), np.arange(3)])
                    told = run(self.queries, places.astype(np.int32), view)
                    for row in range(2):
                        want = plain_attention(
                            self.queries[row],
                            places[row],
                            self.keys[1 + row],
                            self.values[1 + row],
                            window,
                        )
                        np.testing.assert_allclose(told[row], want, atol=2e-5)

    def test_what_is_not_seen_changes_no_bit(self) -> None:
        """Stale entries, the other conversation and its length, and how many blocks are taken."""
        run = self.compiled[300]
        places = np.array([[7, 8, 9], [1, 2, 3]], np.int32)

        def answer(keys: np.ndarray, values: np.ndarray, held: list[int]) -> np.ndarray:
            view = cached_view(keys, values, 0, jnp.asarray(held, jnp.int32))
            told: np.ndarray = np.asarray(run(self.queries, places, view))
            return told[0]

        plain = answer(self.keys, self.values, [10, 4])
        keys, values = self.keys.copy(), self.values.copy()
        keys[0, :, 10:], values[0, :, 10:] = 1e6, -1e6
        keys[1:], values[1:] = 77.0, 77.0
        np.testing.assert_array_equal(answer(keys, values, [10, 4]), plain)
        np.testing.assert_array_equal(answer(keys, values, [10, self.LENGTH]), plain)

    def test_bf16_keys_are_read_as_they_are(self) -> None:
        keys = self.keys.astype(jnp.bfloat16)
        values = self.values.astype(jnp.bfloat16)
        places = np.array([[4, 5, 6], [1, 2, 3]], np.int32)
        view = cached_view(keys, values, 0, jnp.array([7, 4], jnp.int32))
        told = self.compiled[300](self.queries, places, view)
        rounded = keys.astype(np.float32), values.astype(np.float32)
        for row in range(2):
            want = plain_attention(
                self.queries[row], places[row], rounded[0][row], rounded[1][row], 300
            )
            np.testing.assert_allclose(told[row], want, atol=2e-5)


class HeldPositionsTest(unittest.TestCase):
    def test_every_entry_knows_the_token_that_was_written_last(self) -> None:
        for length in (1, 3, 8):
            ring = [-1] * length
            for position in range(3 * length):
                ring[position % length] = position
                told = held_positions(length, jnp.array([position + 1, 0]))
                shown = [max(int(p), -1) for p in told[0]]
                self.assertEqual(shown, ring)
                self.assertTrue(bool((told[1] < 0).all()))  # nothing was written there

    def test_lengths_are_one_block_or_whole_ones(self) -> None:
        self.assertEqual([whole_blocks(n) for n in (1, 8, KEY_BLOCK)], [1, 8, KEY_BLOCK])
        self.assertEqual(whole_blocks(KEY_BLOCK + 1), 2 * KEY_BLOCK)


class RingTest(unittest.TestCase):
    """A ring of 4 that takes chunks of up to 6, padded, against a list that forgets nothing."""

    RING, BUCKET, WINDOW = 4, 6, 4

    def test_chunks_of_any_length_see_and_leave_what_they_should(self) -> None:
        tokens = 40
        everything_k = noise(KV_HEADS, tokens, HEAD_DIM, seed=4)
        everything_v = noise(KV_HEADS, tokens, HEAD_DIM, seed=5)
        queries = noise(tokens, KV_HEADS * GROUP, HEAD_DIM, seed=6)
        other = noise(3, KV_HEADS, self.RING, HEAD_DIM, seed=7)

        def step(
            keys: Any, values: Any, fresh_k: Any, fresh_v: Any, asked: Any, before: Any, count: Any
        ) -> Any:
            places = before[:, None] + jnp.arange(self.BUCKET, dtype=jnp.int32)
            ring = cached_view(keys, values, 1, before)
            wide = widened_view(ring, fresh_k, fresh_v, places)
            turn = (1, before, before + count)
            return (
                attend(asked, places, wide, self.WINDOW),
                closed_ring(keys, wide.keys, *turn),
                closed_ring(values, wide.values, *turn),
            )

        compiled = jax.jit(step)
        draw = np.random.default_rng(8)
        for _ in range(6):
            keys, values = jnp.asarray(other), jnp.asarray(other)
            before = 0
            while before < tokens:
                count = min(int(draw.integers(1, self.BUCKET + 1)), tokens - before)
                piece = slice(before, before + count)
                padding = ((0, 0), (0, self.BUCKET - count), (0, 0))
                told, keys, values = compiled(
                    keys,
                    values,
                    np.pad(everything_k[:, piece], padding, constant_values=99.0)[None],
                    np.pad(everything_v[:, piece], padding, constant_values=99.0)[None],
                    np.pad(queries[piece], ((0, self.BUCKET - count), (0, 0), (0, 0)))[None],
                    np.array([before], np.int32),
                    np.array([count], np.int32),
                )
                want = plain_attention(
                    queries[piece],
                    np.arange(before, before + count),
                    everything_k,
                    everything_v,
                    self.WINDOW,
                )
                np.testing.assert_allclose(told[0, :count], want, atol=2e-5)
                before += count
                for entry in range(min(before, self.RING)):
                    place = int(held_positions(self.RING, jnp.array([before]))[0, entry])
                    np.testing.assert_array_equal(keys[1, :, entry], everything_k[:, place])
                    np.testing.assert_array_equal(values[1, :, entry], everything_v[:, place])
            for row in (0, 2):  # the neighbours' rows
                np.testing.assert_array_equal(keys[row], other[row])


class WrittenTest(unittest.TestCase):
    def test_only_real_tokens_go_in_each_where_it_belongs(self) -> None:
        cache = noise(4, KV_HEADS, 8, HEAD_DIM, seed=9)
        new = noise(2, KV_HEADS, 3, HEAD_DIM, seed=10)
        positions = np.array([[6, 7, 8], [2, 3, 4]], np.int32)
        real = np.array([[True, True, True], [True, False, False]])
        told = np.asarray(written(jnp.asarray(cache), jnp.asarray(new), 1, positions, real))
        want = cache.copy()
        for token, entry in enumerate((6, 7, 0)):
            want[1, :, entry] = new[0, :, token]
        want[2, :, 2] = new[1, :, 0]
        np.testing.assert_array_equal(told, want)

    def test_a_view_of_nothing_is_not_looked_at(self) -> None:
        cache = jnp.zeros((1, KV_HEADS, 8, HEAD_DIM))
        view: KeyView = cached_view(cache, cache, 0, jnp.zeros(1, jnp.int32))
        self.assertEqual(int(view.used), 0)
        self.assertTrue(bool((view.positions < 0).all()))


if __name__ == "__main__":
    unittest.main()
