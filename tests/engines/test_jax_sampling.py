"""Choosing tokens: against a plain reference that sorts, by chi-square, and in any company."""

from __future__ import annotations

import math
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.jax.sampling import (
    SAMPLING_NEAR,
    SamplingMasks,
    SamplingRows,
    cut_of,
    sample_step,
)

VOCABULARY = 700  # more than two blocks of ids, the last of them not full
CUT = jax.jit(cut_of)
STEP = jax.jit(sample_step)
RAW = np.ndarray


@dataclass(frozen=True)
class Row:
    """The settings of one row, all off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    logprobs: int = -1


def rows_of(*rows: Row) -> SamplingRows:
    """Them as the device takes them."""

    def of(name: str, kind: type) -> jax.Array:
        return jnp.asarray([getattr(row, name) for row in rows], kind)

    return SamplingRows(
        temperature=of("temperature", np.float32),
        top_k=of("top_k", np.int32),
        top_p=of("top_p", np.float32),
        min_p=of("min_p", np.float32),
        repetition=of("repetition", np.float32),
        presence=of("presence", np.float32),
        frequency=of("frequency", np.float32),
        seed=of("seed", np.uint32),
        logprobs=of("logprobs", np.int32),
    )


@dataclass(frozen=True)
class Step:
    """What one step gave, as numpy arrays."""

    tokens: RAW
    logprob: RAW
    top_ids: RAW
    top_logprobs: RAW
    counts: RAW


def words_of(allowed: RAW | None, shape: tuple[int, ...]) -> RAW:
    """Masks as words of 32 bits, the lowest bit first; all zeros where there are none."""
    words = -(-shape[1] // 32)
    bits = np.zeros((shape[0], 32 * words), np.bool_)
    if allowed is not None:
        bits[:, : shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def step(
    logits: RAW,
    *rows: Row,
    seen: RAW | None = None,
    counts: RAW | None = None,
    position: RAW | int = 0,
    allowed: RAW | None = None,
    masked: RAW | None = None,
) -> Step:
    """One step over logits [b, V] of these rows; nothing was seen or answered where not given.

    allowed [b, V] bool: what the rows that are `masked` [b], all of them where not given, may get.
    """
    shape = logits.shape
    if masked is None:
        masked = np.full(shape[0], allowed is not None)
    # Few sizes of batch, for each is compiled: what is missing is filled with rows of zeros.
    size = next(size for size in (1, 4, 16, 64) if size >= shape[0])

    def whole(array: RAW) -> jax.Array:
        filled = np.zeros((size, *array.shape[1:]), array.dtype)
        filled[: shape[0]] = array
        return jnp.asarray(filled)

    made = STEP(
        whole(logits),
        rows_of(*rows, *[Row(temperature=0)] * (size - shape[0])),
        whole(np.zeros(shape, np.bool_) if seen is None else seen),
        whole(np.zeros(shape, np.int32) if counts is None else counts),
        whole(np.broadcast_to(np.asarray(position, np.int32), (shape[0],))),
        SamplingMasks(whole(words_of(allowed, shape)), whole(masked)),
    )
    return Step(*(np.asarray(array)[: shape[0]] for array in made))


def cut_off(distances: Sequence[RAW], *rows: Row) -> tuple[RAW, RAW]:
    """Where `cut_of` cuts each row, up to 8 of them: reach and last."""
    missing = 8 - len(distances)
    filled = np.stack([*distances, *[np.zeros(VOCABULARY, np.float32)] * missing])
    cut = CUT(jnp.asarray(filled), rows_of(*rows, *[Row(top_k=1)] * missing))
    return np.asarray(cut.reach), np.asarray(cut.last)


def reference_penalties(logits: RAW, row: Row, seen: RAW, counts: RAW) -> RAW:
    """One row's logits [V] after the penalties, token by token, in f64."""
    made = np.asarray(logits, np.float64).copy()
    for token in range(len(made)):
        if seen[token] or counts[token]:
            made[token] = (
                made[token] / row.repetition if made[token] > 0 else made[token] * row.repetition
            )
        made[token] -= row.frequency * counts[token]
        made[token] -= row.presence if counts[token] else 0.0
    return made


def reference_kept(distances: RAW, row: Row, slack: float = 0.0) -> list[int]:
    """The ids that one row's cut leaves of distances [V], likeliest first, by sorting, in f64.

    `slack` moves top_p's and min_p's borders a little, to see which ids lie upon them.
    """
    order = sorted(range(len(distances)), key=lambda token: (distances[token], token))
    if row.top_k > 0:
        order = order[: row.top_k]
    shares = np.exp(-np.asarray(distances, np.float64))
    total = math.fsum(shares[order])
    kept, before = [], 0.0
    for place, token in enumerate(order):
        beyond_p = row.top_p < 1 and before >= row.top_p * total * (1 + slack)
        beyond_m = row.min_p > 0 and shares[token] < row.min_p * (1 - slack)
        if place and (beyond_p or beyond_m):
            break
        kept.append(token)
        before += shares[token]
    return kept


def kept_by(cut_reach: float, cut_last: int, distances: RAW) -> set[int]:
    ids = np.arange(len(distances))
    kept = (distances < cut_reach) | ((distances == cut_reach) & (ids <= cut_last))
    return set(ids[kept].tolist())


def share_of(logits: RAW, temperature: float = 1.0) -> RAW:
    scaled = np.asarray(logits, np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    return np.asarray(shares / shares.sum())


class CutTest(unittest.TestCase):
    """`cut_of` beside the reference that sorts."""

    def setUp(self) -> None:
        self.random = np.random.default_rng(2026)

    def distances(self, kind: str) -> RAW:
        """One row of one of the forms that a cut can trip over."""
        spread = float(self.random.choice([0.01, 0.5, 2.0, 10.0, 80.0]))
        logits = self.random.standard_normal(VOCABULARY).astype(np.float32) * np.float32(spread)
        if kind == "ties":  # few values, each very often
            logits = np.round(logits / spread * 2).astype(np.float32)
        if kind == "flat":  # all the same
            logits[:] = 3.0
        if kind == "banned":  # most tokens are impossible
            logits[self.random.random(VOCABULARY) < 0.9] = -np.inf
        if kind == "single":  # one stands far above the rest
            logits[int(self.random.integers(VOCABULARY))] = 1e4
        return np.asarray(logits.max() - logits, np.float32)

    def settings(self) -> Row:
        some = self.random.choice
        return Row(
            top_k=int(some([0, 1, 2, 5, 64, 255, 256, 257, 400, VOCABULARY, 10**6])),
            top_p=float(some([1.0, 1.0, 1.0, 1.0, 1e-6, 0.5, 0.95, 0.999])),
            min_p=float(some([0.0, 0.0, 0.0, 0.0, 1e-4, 0.05, 1.0])),
        )

    def check(self, distances: list[RAW], rows: list[Row]) -> tuple[int, int]:
        """Compare; gives how many of them were cut near, and far, of the likeliest 256."""
        reach, last = cut_off(distances, *rows)
        near = far = 0
        for place, (one, row) in enumerate(zip(distances, rows, strict=True)):
            kept = kept_by(float(reach[place]), int(last[place]), one)
            exact = reference_kept(one, row)
            # f32 sums may put an id that lies on a border on either side of it.
            least = set(reference_kept(one, row, -3e-5))
            most = set(reference_kept(one, row, 3e-5))
            # An impossible token has no share: whether it counts as kept can never matter.
            impossible = set(np.flatnonzero(np.exp(-one) == 0).tolist())
            with self.subTest(row=row, kept=len(kept), exact=len(exact)):
                self.assertLessEqual(least - impossible, kept)
                self.assertLessEqual(kept - impossible, most)
                self.assertIn(exact[0], kept)
                if row.top_k:
                    self.assertLessEqual(len(kept), row.top_k)
            near += len(exact) < SAMPLING_NEAR
            far += len(exact) > SAMPLING_NEAR
        return near, far

    def test_many_random_cases(self) -> None:
        near = far = 0
        for _ in range(40):
            kinds = ["plain", "ties", "flat", "banned", "single", "plain", "ties", "plain"]
            of_this = self.check(
                [self.distances(kind) for kind in kinds], [self.settings() for _ in kinds]
            )
            near, far = near + of_this[0], far + of_this[1]
        self.assertGreater(near, 50)
        self.assertGreater(far, 30)

    def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids(self) -> None:
        distances = np.ones(VOCABULARY, np.float32)
        distances[[650, 3, 400]] = 0.0
        for k in (1, 2, 3, 4, 10, 256, 257, 300, 699, 700, 701):
            reach, last = cut_off([distances], Row(top_k=k))
            kept = kept_by(float(reach[0]), int(last[0]), distances)
            others = [token for token in range(VOCABULARY) if token not in (3, 400, 650)]
            with self.subTest(k=k):
                self.assertEqual(set([3, 400, 650, *others][:k]), kept)

    def test_top_p_takes_the_token_that_reaches_it(self) -> None:
        shares = np.asarray([0.5, 0.25, 0.125, 0.0625, 0.0625])
        distances = np.full(VOCABULARY, np.inf, np.float32)
        distances[:5] = np.asarray(-np.log2(shares / 0.5) * np.log(2), np.float32)
        for top_p, count in ((0.1, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.99, 5)):
            reach, last = cut_off([distances], Row(top_p=top_p))
            with self.subTest(top_p=top_p):
                kept = kept_by(float(reach[0]), int(last[0]), distances)
                self.assertEqual(set(range(count)), kept)

    def test_top_p_is_of_what_top_k_leaves(self) -> None:
        distances = np.zeros(VOCABULARY, np.float32)  # 4 of 700, then half of the 4
        for k, left in ((4, 2), (600, 300)):
            reach, last = cut_off([distances], Row(top_k=k, top_p=0.5))
            with self.subTest(k=k):
                kept = kept_by(float(reach[0]), int(last[0]), distances)
                self.assertEqual(set(range(left)), kept)

    def test_min_p_is_measured_by_the_likeliest(self) -> None:
        distances = np.linspace(0, 5, VOCABULARY, dtype=np.float32)
        for min_p in (0.9, 0.5, 0.05, 0.01):
            reach, last = cut_off([distances], Row(min_p=min_p))
            with self.subTest(min_p=min_p):
                kept = kept_by(float(reach[0]), int(last[0]), distances)
                wanted = np.flatnonzero(np.exp(-distances.astype(np.float64)) >= min_p)
                self.assertEqual(set(wanted.tolist()), kept)

    def test_rows_that_cut_nothing_keep_all_beside_one_that_cuts(self) -> None:
        distances = np.arange(VOCABULARY, dtype=np.float32)
        rows = (Row(), Row(temperature=0, top_k=3), Row(top_k=3))
        reach, last = cut_off([distances] * 3, *rows)
        kept = [len(kept_by(float(reach[i]), int(last[i]), distances)) for i in range(3)]
        self.assertEqual([VOCABULARY, VOCABULARY, 3], kept)

    def test_a_row_that_needs_the_long_way_changes_no_other(self) -> None:
        near = np.arange(VOCABULARY, dtype=np.float32) / 7
        flat = np.zeros(VOCABULARY, np.float32)
        row = Row(top_p=0.9)
        alone = cut_off([near, near], row, row)
        beside = cut_off([near, flat], row, row)
        self.assertEqual(float(alone[0][0]), float(beside[0][0]))
        self.assertEqual(int(alone[1][0]), int(beside[1][0]))


class GreedyTest(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(5)

    def test_temperature_zero_takes_the_likeliest_whatever_else_is_set(self) -> None:
        logits = self.random.standard_normal((4, VOCABULARY)).astype(np.float32)
        made = step(
            logits,
            Row(temperature=0),
            Row(temperature=0, top_k=3, seed=7),
            Row(temperature=0, top_p=0.1, min_p=0.9),
            Row(temperature=0, seed=99),
            position=12,
        )
        np.testing.assert_array_equal(logits.argmax(axis=-1), made.tokens)

    def test_of_equals_the_lowest_id(self) -> None:
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, [17, 512, 699]] = 2.5
        self.assertEqual(17, step(logits, Row(temperature=0)).tokens[0])
        self.assertEqual(17, step(logits, Row(top_k=1, seed=4)).tokens[0])
        self.assertEqual(0, step(np.zeros_like(logits), Row(temperature=0)).tokens[0])

    def test_first_and_last_id(self) -> None:
        for token in (0, 511, 512, VOCABULARY - 1):
            logits = np.zeros((1, VOCABULARY), np.float32)
            logits[0, token] = 60.0
            with self.subTest(token=token):
                self.assertEqual(token, step(logits, Row(temperature=0)).tokens[0])
                self.assertEqual(token, step(logits, Row(temperature=0.5)).tokens[0])

    def test_impossible_tokens_and_huge_logits(self) -> None:
        logits = np.full((3, VOCABULARY), -np.inf, np.float32)
        logits[:, 5] = (-3e38, 3e38, 0.0)
        rows = (Row(), Row(temperature=1e-4), Row(top_p=0.5, top_k=300))
        for position in range(20):
            np.testing.assert_array_equal([5, 5, 5], step(logits, *rows, position=position).tokens)

    def test_even_without_numbers_a_token_exists(self) -> None:
        logits = np.full((1, VOCABULARY), np.nan, np.float32)
        for row in (Row(temperature=0), Row(), Row(top_k=5)):
            self.assertIn(step(logits, row).tokens[0], range(VOCABULARY))

    def test_the_chosen_token_is_counted_and_nothing_else(self) -> None:
        logits = self.random.standard_normal((3, VOCABULARY)).astype(np.float32)
        counts = self.random.integers(0, 4, (3, VOCABULARY)).astype(np.int32)
        made = step(logits, Row(temperature=0), Row(), Row(top_k=2), counts=counts)
        counts[np.arange(3), made.tokens] += 1
        np.testing.assert_array_equal(counts, made.counts)


class PenaltiesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(6)

    def test_many_random_cases(self) -> None:
        for _ in range(20):
            logits = self.random.standard_normal((4, VOCABULARY)).astype(np.float32) * 3
            seen = self.random.random((4, VOCABULARY)) < 0.3
            counts = self.random.integers(-6, 5, (4, VOCABULARY)).clip(0).astype(np.int32)
            rows = [
                Row(
                    temperature=0,
                    repetition=float(self.random.choice([1.0, 1.3, 2.0, 0.5])),
                    presence=float(self.random.choice([0.0, 2.0, -2.0])),
                    frequency=float(self.random.choice([0.0, 1.0, -1.0])),
                )
                for _ in range(4)
            ]
            made = step(logits, *rows, seen=seen, counts=counts)
            for place, row in enumerate(rows):
                wanted = reference_penalties(logits[place], row, seen[place], counts[place])
                with self.subTest(row=row):
                    # Another token than the reference's may win only where f32 cannot tell them.
                    self.assertAlmostEqual(wanted.max(), wanted[made.tokens[place]], places=4)

    def test_repetition_looks_at_the_prompt_the_others_at_the_answer_alone(self) -> None:
        logits = np.zeros((3, VOCABULARY), np.float32)
        logits[:, 10], logits[:, 20] = 3.0, 2.0
        seen = np.zeros(logits.shape, np.bool_)
        seen[:, 10] = True
        rows = (
            Row(temperature=0, repetition=2.0),
            Row(temperature=0, presence=2.0),
            Row(temperature=0, frequency=2.0),
        )
        np.testing.assert_array_equal([20, 10, 10], step(logits, *rows, seen=seen).tokens)
        counts = seen.astype(np.int32)
        np.testing.assert_array_equal([20, 20, 20], step(logits, *rows, counts=counts).tokens)

    def test_repetition_pushes_negative_logits_down_too(self) -> None:
        logits = np.full((1, VOCABULARY), -9.0, np.float32)
        logits[0, 10], logits[0, 20] = -1.0, -1.5
        seen = np.zeros(logits.shape, np.bool_)
        seen[0, 10] = True
        made = step(logits, Row(temperature=0, repetition=2.0), seen=seen)
        self.assertEqual(20, made.tokens[0])

    def test_frequency_grows_with_the_count_and_presence_does_not(self) -> None:
        logits = np.zeros((2, VOCABULARY), np.float32)
        logits[:, 10], logits[:, 20] = 3.0, 2.5
        counts = np.zeros(logits.shape, np.int32)
        counts[:, 10], counts[:, 20] = 5, 1
        rows = (Row(temperature=0, frequency=0.2), Row(temperature=0, presence=0.2))
        np.testing.assert_array_equal([20, 10], step(logits, *rows, counts=counts).tokens)

    def test_a_row_without_penalties_is_left_alone_beside_one_with(self) -> None:
        logits = np.zeros((2, VOCABULARY), np.float32)
        logits[:, 10], logits[:, 20] = 3.0, 2.9
        counts = np.zeros(logits.shape, np.int32)
        counts[:, 10] = 1
        made = step(logits, Row(temperature=0), Row(temperature=0, presence=1), counts=counts)
        np.testing.assert_array_equal([10, 20], made.tokens)


class LogprobsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(7)
        self.logits = self.random.standard_normal((3, VOCABULARY)).astype(np.float32) * 2

    def test_they_are_the_models_before_temperature_and_penalties(self) -> None:
        rows = (
            Row(temperature=0, logprobs=20),
            Row(temperature=3.0, top_k=5, logprobs=3),
            Row(temperature=0.7, presence=2.0, repetition=1.5, logprobs=20),
        )
        counts = np.ones(self.logits.shape, np.int32)
        made = step(self.logits, *rows, counts=counts)
        for place in range(3):
            wanted = np.log(share_of(self.logits[place]))
            order = np.argsort(-wanted, kind="stable")[:20]
            with self.subTest(place=place):
                self.assertAlmostEqual(wanted[made.tokens[place]], made.logprob[place], places=5)
                np.testing.assert_array_equal(order, made.top_ids[place])
                np.testing.assert_allclose(made.top_logprobs[place], wanted[order], atol=1e-5)

    def test_the_chosen_alone(self) -> None:
        made = step(self.logits, *[Row(temperature=0, logprobs=0)] * 3)
        for place in range(3):
            wanted = np.log(share_of(self.logits[place])).max()
            self.assertAlmostEqual(wanted, made.logprob[place], places=5)
        self.assertFalse(made.top_ids.any())

    def test_nothing_where_nobody_asks(self) -> None:
        made = step(self.logits, Row(), Row(top_k=4), Row(temperature=0))
        self.assertFalse(made.logprob.any())
        self.assertFalse(made.top_logprobs.any())

    def test_of_equal_alternatives_the_lowest_ids_in_order(self) -> None:
        made = step(np.zeros((1, VOCABULARY), np.float32), Row(temperature=0, logprobs=20))
        np.testing.assert_array_equal(np.arange(20), made.top_ids[0])
        np.testing.assert_allclose(made.top_logprobs[0], -np.log(VOCABULARY), rtol=1e-6)


class DrawnTest(unittest.TestCase):
    """What is drawn often enough shows the distribution."""

    DRAWS = 4096
    BATCH = 64

    def draws(self, logits: RAW, row: Row) -> RAW:
        """Tokens drawn from logits [V] at rising positions, and of changing seeds."""
        tokens = []
        wide = np.broadcast_to(logits, (self.BATCH, len(logits)))
        for first in range(0, self.DRAWS, self.BATCH):
            rows = [replace(row, seed=first + place % 2) for place in range(self.BATCH)]
            positions = np.arange(self.BATCH) // 2 + first
            tokens.append(step(wide, *rows, position=positions).tokens)
        return np.concatenate(tokens)

    def assert_distributed(self, tokens: RAW, shares: RAW) -> None:
        """Chi-square of the tokens against shares [V]; groups expected less than 8 times merge."""
        self.assertEqual(set(), set(tokens.tolist()) - set(np.flatnonzero(shares).tolist()))
        found = np.bincount(tokens, minlength=len(shares)).astype(np.float64)
        expected = shares * len(tokens)
        order = np.argsort(-expected, kind="stable")
        groups: list[tuple[float, float]] = []
        have, want = 0.0, 0.0
        for token in order:
            have, want = have + found[token], want + expected[token]
            if want >= 8:
                groups.append((have, want))
                have, want = 0.0, 0.0
        groups[-1] = (groups[-1][0] + have, groups[-1][1] + want)
        statistic = sum((have - want) ** 2 / want for have, want in groups)
        freedom = len(groups) - 1
        # Wilson and Hilferty's normal form of chi-square; 4 deviations are one in 30,000, and the
        # seeds are fixed, so this passes always or never.
        deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
            2 / (9 * freedom)
        )
        self.assertLess(abs(deviation), 4, f"chi-square {statistic:.1f} at {freedom}")

    def logits(self, spread: float) -> RAW:
        random = np.random.default_rng(11)
        return random.standard_normal(VOCABULARY).astype(np.float32) * np.float32(spread)

    def test_the_whole_distribution(self) -> None:
        for spread, temperature in ((1.0, 1.0), (3.0, 1.0), (1.0, 0.5), (3.0, 2.0)):
            logits = self.logits(spread)
            with self.subTest(spread=spread, temperature=temperature):
                tokens = self.draws(logits, Row(temperature=temperature))
                self.assert_distributed(tokens, share_of(logits, temperature))

    def test_an_even_one_over_blocks_of_uneven_size(self) -> None:
        logits = np.zeros(VOCABULARY, np.float32)
        self.assert_distributed(self.draws(logits, Row()), share_of(logits))

    def test_what_a_cut_leaves_is_brought_to_a_sum_of_one(self) -> None:
        logits = self.logits(2.0)
        for row in (
            Row(top_k=7),
            Row(top_p=0.8),
            Row(min_p=0.1, temperature=1.5),
            Row(top_k=400),
            Row(top_k=64, top_p=0.95),
        ):
            with self.subTest(row=row):
                shares = share_of(logits, row.temperature)
                distances = np.asarray((logits.max() - logits) / row.temperature, np.float32)
                kept = reference_kept(distances, row)
                left = np.zeros(VOCABULARY)
                left[kept] = shares[kept]
                self.assert_distributed(self.draws(logits, row), left / left.sum())

    def test_neighbouring_seeds_and_positions_are_independent(self) -> None:
        """Pairs of a fair coin: all four must come equally often."""
        logits = np.full((2, VOCABULARY), -np.inf, np.float32)
        logits[:, [100, 600]] = 0.0
        by_seed, by_position = np.zeros(4), np.zeros(4)
        for number in range(1000):
            rows = (Row(seed=2 * number), Row(seed=2 * number + 1))
            one, other = step(logits, *rows, position=3).tokens
            by_seed[2 * (one == 100) + (other == 100)] += 1
            one, other = step(
                logits, Row(seed=7), Row(seed=7), position=2 * number + np.arange(2)
            ).tokens
            by_position[2 * (one == 100) + (other == 100)] += 1
        for pairs in (by_seed, by_position):
            statistic = float(((pairs - 250) ** 2 / 250).sum())
            self.assertLess(statistic, 21.1)  # one in 10,000 at 3 degrees of freedom


class CompanyTest(unittest.TestCase):
    """The same seed, position, logits and settings: the same token, whoever stands beside it."""

    def setUp(self) -> None:
        self.random = np.random.default_rng(9)

    def settings(self, seed: int) -> Row:
        some = self.random.choice
        return Row(
            temperature=float(some([0.0, 0.3, 1.0, 1.7])),
            top_k=int(some([0, 0, 3, 64, 300])),
            top_p=float(some([1.0, 0.9, 0.3])),
            min_p=float(some([0.0, 0.0, 0.02])),
            presence=float(some([0.0, 0.0, 1.0])),
            seed=seed,
            logprobs=int(some([-1, 0, 5])),
        )

    def test_alone_among_four_and_among_sixteen(self) -> None:
        for trial in range(12):
            rows = [self.settings(int(self.random.integers(2**32))) for _ in range(16)]
            logits = self.random.standard_normal((16, VOCABULARY)).astype(np.float32) * 2
            counts = self.random.integers(0, 2, (16, VOCABULARY)).astype(np.int32)
            position = self.random.integers(0, 9000, 16)
            whole = step(logits, *rows, counts=counts, position=position)
            for places in ([3], [15, 2, 3, 11]):
                part = step(
                    logits[places],
                    *[rows[place] for place in places],
                    counts=counts[places],
                    position=position[places],
                )
                with self.subTest(trial=trial, places=places):
                    np.testing.assert_array_equal(whole.tokens[places], part.tokens)

    def test_seed_and_position_each_change_what_is_drawn(self) -> None:
        logits = np.zeros((1, VOCABULARY), np.float32)
        by_seed = {int(step(logits, Row(seed=seed)).tokens[0]) for seed in range(40)}
        by_position = {int(step(logits, Row(), position=at).tokens[0]) for at in range(40)}
        self.assertGreater(len(by_seed), 30)
        self.assertGreater(len(by_position), 30)

    def test_the_greatest_seed_is_one_of_its_own(self) -> None:
        logits = np.zeros((3, VOCABULARY), np.float32)
        tokens = step(logits, Row(seed=2**32 - 1), Row(seed=2**31 - 1), Row(seed=0)).tokens
        self.assertEqual(3, len(set(tokens.tolist())))

    def test_settings_never_compile_anew(self) -> None:
        def traces() -> int:
            return int(STEP._cache_size())  # type: ignore[attr-defined]

        logits = np.zeros((2, VOCABULARY), np.float32)
        step(logits, Row(), Row())
        before = traces()
        for row in (Row(temperature=0), Row(top_k=5, logprobs=20), Row(presence=1, min_p=0.3)):
            step(logits, row, Row())
        self.assertEqual(before, traces())


if __name__ == "__main__":
    unittest.main()
