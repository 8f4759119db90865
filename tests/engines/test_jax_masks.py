"""Masks over tokens: the same choice as among logits that were impossible from the start."""

from __future__ import annotations

import unittest

import numpy as np

from tests.engines.test_jax_sampling import RAW, STEP, VOCABULARY, Row, step


class MaskCase(unittest.TestCase):
    def setUp(self) -> None:
        self.random = np.random.default_rng(21)

    def logits(self, batch: int) -> RAW:
        return self.random.standard_normal((batch, VOCABULARY)).astype(np.float32) * 2

    def allowed(self, batch: int) -> RAW:
        """Some of the tokens for each row, from one to nearly all."""
        shares = self.random.choice([0.0, 0.01, 0.3, 0.99], (batch, 1))
        some: RAW = self.random.random((batch, VOCABULARY)) < shares
        some[np.arange(batch), self.random.integers(0, VOCABULARY, batch)] = True
        return some

    def settings(self, number: int) -> Row:
        some = self.random.choice
        return Row(
            temperature=float(some([0.0, 0.4, 1.0, 1.8])),
            top_k=int(some([0, 0, 2, 64, 400])),
            top_p=float(some([1.0, 0.9, 0.3])),
            min_p=float(some([0.0, 0.0, 0.1])),
            repetition=float(some([1.0, 1.0, 1.4])),
            presence=float(some([0.0, 0.0, 1.5])),
            frequency=float(some([0.0, 0.0, -0.5])),
            seed=number,
            logprobs=int(some([-1, 0, 7])),
        )


class OnlyAllowedTest(MaskCase):
    def test_as_if_the_others_had_no_share(self) -> None:
        """400 rows of any settings, against logits of -inf where the mask has no bit."""
        for trial in range(25):
            logits, allowed = self.logits(16), self.allowed(16)
            rows = [self.settings(100 * trial + number) for number in range(16)]
            told = {
                "seen": self.random.random((16, VOCABULARY)) < 0.2,
                "counts": self.random.integers(0, 2, (16, VOCABULARY)).astype(np.int32),
                "position": self.random.integers(0, 9000, 16),
            }
            want = step(np.where(allowed, logits, -np.inf).astype(np.float32), *rows, **told)
            made = step(logits, *rows, allowed=allowed, **told)
            with self.subTest(trial=trial):
                np.testing.assert_array_equal(made.tokens, want.tokens)
                self.assertTrue(allowed[np.arange(16), made.tokens].all())

    def test_a_single_token_at_every_kind_of_place(self) -> None:
        """In each bit of a word, at both ends of blocks and of the vocabulary, however unlikely."""
        places = [*range(33), 63, 64, 511, 512, VOCABULARY - 2, VOCABULARY - 1]
        for first in range(0, len(places), 16):
            some = places[first : first + 16]
            allowed = np.zeros((len(some), VOCABULARY), np.bool_)
            allowed[np.arange(len(some)), some] = True
            logits = np.where(allowed, np.float32(-80), self.logits(len(some)))
            for temperature in (0.0, 1.0):
                made = step(logits, *[Row(temperature)] * len(some), allowed=allowed)
                np.testing.assert_array_equal(made.tokens, some)

    def test_an_allowed_share_is_brought_to_a_sum_of_one(self) -> None:
        """Two tokens of equal logits among far likelier ones come equally often."""
        logits = np.full((64, VOCABULARY), 9, np.float32)
        allowed = np.zeros((64, VOCABULARY), np.bool_)
        allowed[:, [5, 650]] = True
        logits[:, [5, 650]] = -3
        tokens = np.concatenate(
            [
                step(logits, *[Row(seed=64 * n + m) for m in range(64)], allowed=allowed).tokens
                for n in range(32)
            ]
        )
        self.assertEqual(set(tokens.tolist()), {5, 650})
        self.assertLess(abs(int((tokens == 5).sum()) - 1024), 4 * 23)  # 4 deviations of 2,048 coins


class OtherRowsTest(MaskCase):
    def test_a_row_without_a_mask_may_get_any_whatever_its_words_say(self) -> None:
        logits, rows = self.logits(16), [self.settings(number) for number in range(16)]
        masked = np.arange(16) % 3 == 0
        for words in (self.allowed(16), np.zeros((16, VOCABULARY), np.bool_)):
            words[masked] = self.allowed(16)[masked]
            free = step(logits, *rows)
            made = step(logits, *rows, allowed=words, masked=masked)
            np.testing.assert_array_equal(made.tokens[~masked], free.tokens[~masked])
            self.assertTrue(words[masked, made.tokens[masked]].all())

    def test_a_masked_row_draws_the_same_in_any_company(self) -> None:
        logits, allowed = self.logits(16), self.allowed(16)
        rows = [self.settings(number) for number in range(16)]
        whole = step(logits, *rows, allowed=allowed)
        for places in ([4], [15, 0, 9, 3]):
            part = step(logits[places], *[rows[n] for n in places], allowed=allowed[places])
            np.testing.assert_array_equal(whole.tokens[places], part.tokens)


class ToldTest(MaskCase):
    def test_log_probabilities_are_those_before_the_mask(self) -> None:
        logits, allowed = self.logits(4), self.allowed(4)
        rows = [Row(temperature=0, logprobs=20)] * 4
        free, made = step(logits, *rows), step(logits, *rows, allowed=allowed)
        np.testing.assert_array_equal(made.top_ids, free.top_ids)
        np.testing.assert_array_equal(made.top_logprobs, free.top_logprobs)
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        whole = np.log(np.exp(shifted).sum(axis=1))
        want = shifted[np.arange(4), made.tokens] - whole
        np.testing.assert_allclose(made.logprob, want, atol=1e-5)

    def test_masks_never_compile_anew(self) -> None:
        logits = self.logits(2)
        step(logits, Row(), Row())
        before = STEP._cache_size()  # type: ignore[attr-defined]
        for number in range(3):
            step(logits, self.settings(number), Row(), allowed=self.allowed(2))
        self.assertEqual(before, STEP._cache_size())  # type: ignore[attr-defined]


if __name__ == "__main__":
    unittest.main()
