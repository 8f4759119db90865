"""Experts against plain numpy: every pair of token and expert once, whoever shares the blocks."""

from __future__ import annotations

import math
import unittest
from typing import Any

import jax
import numpy as np

from forge.engines.jax.experts import expert_block_rows, through_experts
from forge.engines.jax.rules import chosen_experts

EXPERTS, USED, HIDDEN, WIDTH = 6, 2, 16, 8


def plain_experts(x: np.ndarray, ids: np.ndarray, shares: np.ndarray, gu: Any, down: Any) -> Any:
    """Token by token, expert by expert, in float64."""
    total = np.zeros(x.shape)
    for token in range(x.shape[0]):
        for expert, share in zip(ids[token], shares[token], strict=True):
            gate, up = np.split(gu[expert].astype(float) @ x[token], 2)
            inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
            gate = gate * 0.5 * (1 + np.vectorize(math.tanh)(inner))
            total[token] += share * (down[expert] @ (gate * up))
    return total


class ThroughExpertsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        draw = np.random.default_rng(1)
        cls.draw = draw
        cls.gate_up = draw.normal(size=(EXPERTS, 2 * WIDTH, HIDDEN)).astype(np.float32)
        cls.down = draw.normal(size=(EXPERTS, HIDDEN, WIDTH)).astype(np.float32)
        cls.through = staticmethod(jax.jit(through_experts))

    def shares_of(self, tokens: int) -> np.ndarray:
        drawn: np.ndarray = self.draw.random(size=(tokens, USED)).astype(np.float32)
        return drawn

    def check(self, ids: np.ndarray) -> None:
        x = self.draw.normal(size=(len(ids), HIDDEN)).astype(np.float32)
        shares = self.shares_of(len(ids))
        told = self.through(x, ids.astype(np.int32), shares, self.gate_up, self.down)
        want = plain_experts(x, ids, shares, self.gate_up, self.down)
        np.testing.assert_allclose(told, want, rtol=1e-4, atol=1e-4)

    def test_random_choices(self) -> None:
        for _ in range(5):
            self.check(np.stack([self.draw.permutation(EXPERTS)[:USED] for _ in range(25)]))

    def test_all_tokens_want_the_same_two_and_none_the_others(self) -> None:
        self.check(np.tile([5, 0], (25, 1)))
        self.check(np.tile([2, 3], (25, 1)))

    def test_one_token(self) -> None:
        self.check(np.array([[4, 1]]))

    def test_company_changes_no_bit(self) -> None:
        """The same token first, last, and among others that want its experts or do not."""
        x = self.draw.normal(size=(25, HIDDEN)).astype(np.float32)
        ids = np.stack([self.draw.permutation(EXPERTS)[:USED] for _ in range(25)]).astype(np.int32)
        shares = self.shares_of(25)
        alone = np.asarray(self.through(x, ids, shares, self.gate_up, self.down))
        for _ in range(5):
            order = self.draw.permutation(25)
            told = self.through(x[order], ids[order], shares[order], self.gate_up, self.down)
            np.testing.assert_array_equal(told, alone[order])
        ids[1:] = ids[0]
        told = self.through(x, ids, shares, self.gate_up, self.down)
        np.testing.assert_array_equal(told[0], alone[0])

    def test_a_block_is_as_long_as_an_expert_can_expect(self) -> None:
        self.assertEqual(expert_block_rows(8, 128), 1)
        self.assertEqual(expert_block_rows(256 * 8, 128), 16)
        self.assertEqual(expert_block_rows(100_000, 128), 64)


class ChosenExpertsTest(unittest.TestCase):
    def test_shares_of_the_likeliest_sum_to_one_before_their_own_scale(self) -> None:
        scores = np.array([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 4.0, 4.0]], np.float32)
        scale = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
        ids, shares = chosen_experts(scores, 2, scale)
        self.assertEqual(np.asarray(ids).tolist(), [[1, 2], [0, 1]])  # ties: the lower id
        first = math.exp(2) / (math.exp(2) + math.exp(1))
        np.testing.assert_allclose(shares, [[2 * first, 3 * (1 - first)], [0.5, 1.0]], rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
