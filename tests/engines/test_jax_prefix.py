"""Prompts that begin as earlier ones did: not a bit of an answer tells whether they were known.

The same engine answers both ways, for under a salt of its own a prompt is never known.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import unittest
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from forge.engines.jax.engine import JaxEngine
from forge.engines.serving.slot_engine import EngineFault, Sampling, StepToken
from tests.engines.jax_compare import GREEDY
from tests.engines.jax_faults import FEW_LAYERS
from tests.engines.tiny import WINDOW, make_checkpoint, some_prompt

_PENALTIES = replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)
_DRAWN = Sampling(temperature=1.0, seed=7, logprobs=5, repetition_penalty=1.2)
_salts = itertools.count()


class PrefixCase(unittest.TestCase):
    """An engine for the tests of a class; each leaves its slots free."""

    shape = "e2b"
    settings: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        held = tempfile.TemporaryDirectory()
        cls.addClassCleanup(held.cleanup)
        layers = FEW_LAYERS["e2b" if cls.shape == "e2b" else "moe"]
        cls.folder = make_checkpoint(Path(held.name) / cls.shape, cls.shape, **layers)
        cls.engine = JaxEngine(cls.folder, **cls.settings)
        cls.engine.load(lambda share, doing: None)
        cls.chunk = cls.engine.limits.chunk
        cls.compiled = cls.engine.counters()["compiles_after_start"]

    def tearDown(self) -> None:
        for slot in range(self.engine.limits.slots):
            self.engine.end(slot)
        self.assertEqual(self.engine.counters()["compiles_after_start"], self.compiled)

    def rest(self, slot: int, count: int) -> list[StepToken]:
        """`count` tokens of the answer in `slot`, which has been begun, and its end."""
        while (first := self.engine.prefill(slot)) is None:
            pass
        told = [first]
        while len(told) < count:
            told += self.engine.decode([slot], 1)[slot]
        self.engine.end(slot)
        return told

    def answer(
        self,
        prompt: Sequence[int],
        salt: str = "",
        sampling: Sampling = GREEDY,
        slot: int = 0,
        count: int = 3,
    ) -> tuple[int, list[StepToken]]:
        """How many tokens of the prompt were known, and the answer."""
        held = self.engine.begin(slot, prompt, sampling, salt)
        return held, self.rest(slot, count)

    def anew(self, prompt: Sequence[int], sampling: Sampling = GREEDY) -> list[StepToken]:
        """The answer to a prompt of which nothing is known."""
        held, told = self.answer(prompt, f"nobody else's {next(_salts)}", sampling)
        self.assertEqual(held, 0)
        return told

    def check_lengths(self, longest: int, lengths: set[int]) -> None:
        """Prompts of these lengths that a longer one begins with, and such as leave it then."""
        known = some_prompt(longest, seed=longest)
        for length in sorted(lengths):
            with self.subTest(length=length):
                self.answer(known, count=1)
                held, told = self.answer(known[:length])
                self.assertEqual(held, (length - 1) // self.chunk * self.chunk)
                self.assertEqual(told, self.anew(known[:length]))
                left = [*known[: length - 1], known[length - 1] ^ 1, *some_prompt(5, seed=2)]
                held, told = self.answer(left)
                self.assertEqual(held, (length - 1) // self.chunk * self.chunk)
                self.assertEqual(told, self.anew(left))


class LongChunksTest(PrefixCase):
    """Chunks longer than a ring, contexts of several blocks of keys."""

    settings: ClassVar[dict[str, Any]] = {
        "slots": 1,
        "context": 600,
        "dtype": "f32",
        "chunk": 16,
        "prefix_cache_gb": 0.1,
    }

    def test_every_interesting_length(self) -> None:
        lengths = {1, 2, 590}
        for edge in (WINDOW, 16, 16 + WINDOW, 32, 256, 320, 512):
            lengths |= {edge - 1, edge, edge + 1}
        self.check_lengths(590, lengths)

    def test_a_conversation_grows_turn_by_turn(self) -> None:
        """What an answer left is not taken over, but read with the next turn's prompt."""
        prompt: list[int] = some_prompt(150, seed=1)
        for turn, known in enumerate((0, 144, 240, 336)):
            held, told = self.answer(prompt, count=9)
            self.assertEqual(held, known)
            self.assertEqual(told[:3], self.anew(prompt))
            prompt = [*prompt, *(step.token for step in told), *some_prompt(90, seed=20 + turn)]

    def test_penalties_see_the_whole_prompt_and_nothing_of_the_row_s_last_one(self) -> None:
        prompt = some_prompt(200, seed=3)
        self.answer(prompt)
        for sampling in (_PENALTIES, _DRAWN):
            self.anew(some_prompt(500, seed=4), _PENALTIES)  # marks all over the row
            held, told = self.answer(prompt, sampling=sampling, count=3)
            self.assertEqual(held, 192)
            self.assertEqual(told, self.anew(prompt, sampling))
        plain = self.answer(prompt, count=3)[1]
        self.assertNotEqual(plain, self.answer(prompt, sampling=_PENALTIES)[1])

    def test_under_another_salt_nothing_is_known(self) -> None:
        prompt = some_prompt(200, seed=7)
        self.assertEqual(self.answer(prompt, "one")[0], 0)
        self.assertEqual([self.answer(prompt, salt)[0] for salt in ("two", "", "one")], [0, 0, 192])

    def test_what_is_counted(self) -> None:
        before = self.engine.counters()
        prompt = some_prompt(130, seed=8)
        self.answer(prompt)
        self.answer(prompt[:129])
        after = self.engine.counters()
        self.assertEqual(
            after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"], 259
        )
        self.assertEqual(after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"], 128)
        # f32 keys and values, 2 heads: two full layers' of 16 tokens, 64 wide; a ring's of 8, 32
        one = 2 * 4 * 2 * (2 * 16 * 64 + WINDOW * 32)
        self.assertEqual(after["prefix_cache_bytes"] - before["prefix_cache_bytes"], 8 * one)
        self.assertEqual(after["compiled_shapes"], 5)  # a bucket, a first, a batch; two of these

    def test_room_for_not_one_chunk_is_refused(self) -> None:
        with self.assertRaisesRegex(EngineFault, "a chunk of 16 tokens takes"):
            JaxEngine(self.folder, **(self.settings | {"prefix_cache_gb": 1e-6}))


class ShortChunksTest(PrefixCase):
    """Several chunks in a ring, which no multiple of them fills; int8 with scales."""

    shape = "12b"
    settings: ClassVar[dict[str, Any]] = {
        "slots": 1,
        "context": 60,
        "dtype": "f32",
        "kv_dtype": "int8",
        "chunk": 3,
        "prefix_cache_gb": 0.1,
    }

    def test_every_length(self) -> None:
        self.check_lengths(40, set(range(1, 41)))

    def test_what_is_kept_and_what_it_takes(self) -> None:
        counters = self.engine.counters()
        # a byte a number, and 4 for each row: a ring, 2 heads of 16; one full, 1 head of 32
        self.assertEqual(counters["kv_bytes"], 2 * (WINDOW * 2 * (16 + 4) + 60 * (32 + 4)))
        before = counters["prefix_cache_bytes"]
        self.answer(some_prompt(3, seed=9), count=1)
        one = self.engine.counters()["prefix_cache_bytes"] - before
        self.assertEqual(one, 2 * 3 * (2 * (16 + 4) + 32 + 4))

    def test_an_answer_goes_on_as_its_own_prompt_would(self) -> None:
        """What steps put into rings and full caches is read by others as what chunks put there."""
        prompt = some_prompt(20, seed=10)
        told = self.answer(prompt, count=12)[1]
        for step in (1, 5, 11):
            longer = [*prompt, *(one.token for one in told[:step])]
            anew = self.anew(longer)[0]
            for token, logprob in anew.top[:5]:
                self.assertLess(abs(dict(told[step].top).get(token, 0.0) - logprob), 0.2)


class LittleRoomTest(PrefixCase):
    """Chunks as long as a ring, room for ten of them, bf16, two rows."""

    shape = "moe"
    settings: ClassVar[dict[str, Any]] = {
        "slots": 2,
        "context": 80,
        "dtype": "bf16",
        "chunk": 8,
        # 2 bytes of keys and values of 8 tokens: a ring, 2 heads of 16; one full, 1 head of 32
        "prefix_cache_gb": 10 * 2 * 2 * 8 * (2 * 16 + 32) / 1e9,
    }

    def test_every_interesting_length(self) -> None:
        self.check_lengths(40, {1, 7, 8, 9, 15, 16, 17, 24, 25, 40})

    def test_what_a_conversation_holds_it_keeps(self) -> None:
        """Though all of it is forgotten between its beginning and its reading."""
        prompt = some_prompt(50, seed=1)
        self.answer(prompt)
        self.assertEqual(self.engine.begin(0, prompt, GREEDY), 48)
        self.answer(some_prompt(79, seed=2), slot=1, count=1)
        self.answer(some_prompt(79, seed=3), slot=1, count=1)
        self.assertEqual(self.engine.begin(1, prompt, GREEDY), 0)
        self.engine.end(1)
        told = self.rest(0, 3)
        self.assertEqual(told, self.anew(prompt))

    def test_it_comes_back_into_any_row_and_disturbs_no_other(self) -> None:
        prompt, other = some_prompt(30, seed=5), some_prompt(10, seed=6)
        alone, mine = self.anew(other, _DRAWN), self.anew(prompt)
        self.answer(prompt)
        self.engine.begin(0, other, _DRAWN)
        self.assertIsNone(self.engine.prefill(0))
        self.assertEqual(self.engine.begin(1, prompt, GREEDY), 24)
        self.assertEqual(self.engine.prefill(0), alone[0])
        self.assertEqual(self.engine.prefill(1), mine[0])
        both = self.engine.decode([0, 1], 1)  # a batch of two, which rounds otherwise
        self.assertEqual([both[slot][0].token for slot in (0, 1)], [alone[1].token, mine[1].token])

    def test_bytes_stay_within_the_room(self) -> None:
        for seed in range(4):
            self.answer(some_prompt(70, seed=30 + seed), count=1)
        room = self.settings["prefix_cache_gb"] * 1e9
        self.assertEqual(self.engine.counters()["prefix_cache_bytes"], room)

    def test_conversations_in_random_turns_are_as_if_nothing_were_known(self) -> None:
        """Beginnings that others have too, kept and forgotten while they are read."""
        draw = random.Random(12)
        roots = [some_prompt(40, seed=40 + n) for n in range(3)]
        live: dict[int, tuple[list[int], Sampling, list[StepToken]]] = {}
        done, hits = [], 0
        while len(done) < 60:
            for slot in {0, 1} - set(live):
                root = draw.choice(roots)[: draw.randint(1, 40)]
                prompt = root + some_prompt(draw.randint(1, 20), seed=draw.randrange(50))
                sampling = draw.choice((GREEDY, _PENALTIES, _DRAWN))
                hits += self.engine.begin(slot, prompt, sampling) > 0
                live[slot] = (prompt, sampling, [])
            slot = draw.choice(sorted(live))
            prompt, sampling, told = live[slot]
            if not told:
                first = self.engine.prefill(slot)
                told += [] if first is None else [first]
            else:
                told += self.engine.decode([slot], 1)[slot]
            if len(told) == 2 or draw.random() < 0.02:  # or the client has left
                done.append(live.pop(slot))
                self.engine.end(slot)
        self.tearDown()
        self.assertGreater(hits, 10)
        for prompt, sampling, told in done:
            anew = self.anew(prompt, sampling)
            self.assertEqual([step.token for step in told], [s.token for s in anew[: len(told)]])
            self.assertEqual(told[:1], anew[: len(told[:1])])  # to the bit: a batch of one


if __name__ == "__main__":
    unittest.main()
