"""The engine against transformers and itself: any prompt, any company, any order of calls."""

from __future__ import annotations

import random
import shutil
import tempfile
import unittest
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.jax.engine import JaxEngine
from forge.engines.serving.slot_engine import EngineFault, Sampling, StepToken
from tests.engines.jax_compare import (
    GREEDY,
    NEAR,
    answer,
    log_probabilities,
    read,
    worst_difference,
)
from tests.engines.tiny import VOCABULARY, WINDOW, Reference, make_checkpoint, some_prompt

SLOTS, CONTEXT, CHUNK, STEPS = 4, 80, 24, 3
ALIKE = 1e-4  # how far batches of other sizes may move a log probability
_DRAWN = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=7, logprobs=5)


def setUpModule() -> None:
    """One engine for all tests: each leaves every slot free."""
    global _kept, _folder, _engine, _reports, _reference
    _kept = tempfile.TemporaryDirectory()
    _folder = make_checkpoint(Path(_kept.name) / "e2b", "e2b")
    _engine = JaxEngine(
        _folder, slots=SLOTS, context=CONTEXT, dtype="f32", chunk=CHUNK, steps=STEPS
    )
    _reports = []
    _engine.load(lambda share, doing: _reports.append((share, doing)))
    _reference = Reference(_folder)


def tearDownModule() -> None:
    _kept.cleanup()


class EngineCase(unittest.TestCase):
    def tearDown(self) -> None:
        for slot in range(SLOTS):
            _engine.end(slot)

    def assert_alike(self, told: list[StepToken], alone: list[StepToken]) -> None:
        """The same tokens, with nearly the same log probabilities."""
        self.assertEqual([step.token for step in told], [step.token for step in alone])
        for one, other in zip(told, alone, strict=True):
            self.assertLess(abs((one.logprob or 0.0) - (other.logprob or 0.0)), ALIKE)


class AgainstTransformersTest(EngineCase):
    def test_first_tokens_of_prompts_at_every_edge(self) -> None:
        """Window, bucket, chunk and context; a prompt's logits do not know what follows it."""
        whole = some_prompt(CONTEXT - 1)
        want = _reference.logits(whole)
        edges = {1, CONTEXT - 1}
        for edge in (WINDOW, 16, CHUNK, CHUNK + WINDOW, 2 * CHUNK, 2 * CHUNK + 16):
            edges |= {edge - 1, edge, edge + 1}
        for length in sorted(edges):
            with self.subTest(length=length):
                told = answer(_engine, whole[:length], 1)
                self.assertEqual(told[0].token, want[length - 1].argmax())
                self.assertEqual(len(told[0].top), 20)
                self.assertLess(worst_difference(told, want[length - 1 : length]), NEAR)

    def test_a_greedy_answer_up_to_the_last_token_of_the_context(self) -> None:
        for length in (1, WINDOW, CHUNK + 3):
            with self.subTest(length=length):
                prompt = some_prompt(length, seed=1)
                told = answer(_engine, prompt, CONTEXT)
                self.assertEqual(length + len(told), CONTEXT)
                tokens = [step.token for step in told]
                want = _reference.logits(prompt + tokens[:-1])[length - 1 :]
                self.assertEqual(tokens, want.argmax(axis=-1).tolist())
                self.assertLess(worst_difference(told, want), NEAR)

    def test_penalties_know_prompt_and_answer_of_their_own_conversation(self) -> None:
        """In a slot that had another conversation, beside one that is being read."""
        answer(_engine, some_prompt(50, seed=2), 9)
        sampling = replace(
            GREEDY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
        )
        prompt = some_prompt(30, seed=3)
        told = [read(_engine, 1, prompt, sampling)]
        _engine.begin(0, some_prompt(70, seed=4), sampling)
        while len(told) < 24:
            if len(told) < 8:
                _engine.prefill(0)
            told += _engine.decode([1], STEPS)[1]
        tokens = [step.token for step in told]
        logits = _reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :].astype(np.float64)
        for step, token in enumerate(tokens):
            seen = np.zeros(VOCABULARY, bool)
            seen[prompt + tokens[:step]] = True
            counts = np.bincount(tokens[:step], minlength=VOCABULARY)
            row = logits[step]
            row = np.where(seen, np.where(row > 0, row / 1.3, row * 1.3), row)
            row = row - 0.3 * counts - 0.4 * (counts > 0)
            self.assertEqual(token, row.argmax())
        self.assertNotEqual(tokens, [step.token for step in answer_without(prompt, len(tokens))])


def answer_without(prompt: list[int], count: int) -> list[StepToken]:
    """The answer without penalties, in slot 3."""
    told = [read(_engine, 3, prompt, GREEDY)]
    while len(told) < count:
        told += _engine.decode([3], STEPS)[3]
    return told[:count]


class CompanyTest(EngineCase):
    def talk(self, prompts: dict[int, list[int]], rounds: int) -> dict[int, list[StepToken]]:
        """The answers of several slots that are decoded together."""
        told = {slot: [read(_engine, slot, prompt, GREEDY)] for slot, prompt in prompts.items()}
        for _ in range(rounds):
            for slot, more in _engine.decode(list(prompts), STEPS).items():
                told[slot] += more
        for slot in prompts:
            _engine.end(slot)
        return told

    def test_any_company_is_nearly_as_good_as_none(self) -> None:
        prompts = [some_prompt(length, seed=length) for length in (3, 11, 30, 55)]
        alone = [answer(_engine, prompt, 13) for prompt in prompts]
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (1, 2), (3, 2, 1), (0,)):
            with self.subTest(order=order):
                told = self.talk({slot: prompts[who] for slot, who in enumerate(order)}, 4)
                for slot, who in enumerate(order):
                    self.assert_alike(told[slot], alone[who])

    def test_in_one_shape_company_and_place_change_no_bit(self) -> None:
        mine = some_prompt(13, seed=5)
        with_short = {0: mine, **{slot: some_prompt(2, seed=slot) for slot in (1, 2, 3)}}
        with_long = {2: mine, **{slot: some_prompt(60, seed=slot + 9) for slot in (0, 1, 3)}}
        self.assertEqual(self.talk(with_short, 4)[0], self.talk(with_long, 4)[2])

    def test_a_moved_conversation_goes_on_as_if_it_had_not_been(self) -> None:
        mine = some_prompt(20, seed=6)
        alone = answer(_engine, mine, 10)
        for slot in range(3):
            read(_engine, slot, some_prompt(9, seed=20 + slot), GREEDY)
        told = [read(_engine, 3, mine, GREEDY)]
        _engine.end(0)  # its row is free now; the last conversation takes it over
        told += _engine.decode([3], STEPS)[3]
        _engine.end(1)
        _engine.end(2)
        for _ in range(2):
            told += _engine.decode([3], STEPS)[3]
        self.assertEqual(told[4:], alone[4:])  # of the same shape, so to the last bit
        self.assert_alike(told, alone)

    def test_neither_who_is_read_nor_who_waits_is_changed_by_a_decode(self) -> None:
        long, waiting = some_prompt(70, seed=7), some_prompt(10, seed=8)
        alone = answer(_engine, long, 4), answer(_engine, waiting, 8)
        _engine.begin(0, long, GREEDY)
        told = [read(_engine, 1, waiting, GREEDY)]
        others = [read(_engine, slot, some_prompt(5, seed=slot), GREEDY) for slot in (2, 3)]
        self.assertEqual(len(others), 2)
        first = None
        while first is None:
            _engine.decode([2, 3], 2)
            first = _engine.prefill(0)
        told += _engine.decode([1], 1)[1]
        _engine.decode([2, 3], STEPS)
        begun = [first, *_engine.decode([0], STEPS)[0]]
        while len(told) < 8:
            told += _engine.decode([1, 3], STEPS)[1]
        self.assert_alike(begun, alone[0])
        self.assert_alike(told[:8], alone[1])

    def test_two_hundred_conversations_in_random_turns(self) -> None:
        """Each in its slot as alone, whatever was begun, read, decoded and ended around it."""
        draw = random.Random(11)
        compiled = _engine.counters()["compiles_after_start"]
        live: dict[int, tuple[list[int], int, Sampling, list[StepToken]]] = {}
        done = []
        while len(done) < 200:
            free = sorted(set(range(SLOTS)) - set(live))
            unread = [slot for slot, talk in live.items() if not talk[3]]
            reading = [slot for slot, talk in live.items() if talk[3]]
            what = draw.random()
            if free and what < 0.4:
                slot = draw.choice(free)
                prompt = some_prompt(draw.randint(1, 60), seed=draw.randrange(10_000))
                sampling = replace(draw.choice((GREEDY, _DRAWN)), seed=draw.randrange(1 << 40))
                _engine.begin(slot, prompt, sampling)
                live[slot] = (prompt, draw.randint(1, 12), sampling, [])
            elif unread and what < 0.7:
                slot = draw.choice(unread)
                first = _engine.prefill(slot)
                if first is not None:
                    live[slot][3].append(first)
            elif reading:
                asked = draw.sample(reading, draw.randint(1, len(reading)))
                for slot, more in _engine.decode(asked, draw.randint(1, STEPS)).items():
                    live[slot][3].extend(more)
            for slot, talk in list(live.items()):
                if len(talk[3]) >= talk[1] or draw.random() < 0.01:  # or the client has left
                    done.append(live.pop(slot))
                    _engine.end(slot)
        for slot in live:
            _engine.end(slot)
        self.assertGreater(sum(len(talk[3]) for talk in done), 900)
        for prompt, _, sampling, told in done:
            if told:
                self.assert_alike(told, answer(_engine, prompt, len(told), sampling))
        self.assertEqual(_engine.counters()["compiles_after_start"], compiled)


class SettingsTest(EngineCase):
    def test_only_what_was_asked_for_is_told(self) -> None:
        prompt = some_prompt(6)
        want = log_probabilities(_reference.logits(prompt)[-1:])[0]
        for count in (-1, 0, 3):
            told = answer(_engine, prompt, 1, replace(GREEDY, logprobs=count))[0]
            self.assertEqual(len(told.top), max(count, 0))
            self.assertEqual(told.logprob is None, count < 0)
            self.assertEqual(
                [token for token, _ in told.top], [*np.argsort(-want)[: len(told.top)]]
            )

    def test_a_seed_is_a_choice_and_another_one_another(self) -> None:
        prompt = some_prompt(12)

        def drawn(seed: int) -> list[int]:
            return [t.token for t in answer(_engine, prompt, 12, replace(_DRAWN, seed=seed))]

        self.assertEqual(drawn(1), drawn(1))
        self.assertNotEqual(drawn(1), drawn(2))

    def test_a_decode_gives_no_more_than_asked_and_nothing_beyond_the_context(self) -> None:
        read(_engine, 0, some_prompt(10), GREEDY)
        read(_engine, 1, some_prompt(CONTEXT - 3), GREEDY)
        told = _engine.decode([0, 1], STEPS)
        self.assertEqual({slot: len(more) for slot, more in told.items()}, {0: 3, 1: 2})
        told = _engine.decode([0, 1], 99)
        self.assertEqual({slot: len(more) for slot, more in told.items()}, {0: 3, 1: 0})
        self.assertEqual(len(_engine.decode([0], 1)[0]), 1)
        self.assertEqual(_engine.decode([1], 1), {1: ()})

    def test_what_cannot_be_begun_is_refused_and_harms_nobody(self) -> None:
        for prompt in ([], some_prompt(CONTEXT), [1, VOCABULARY], [1, -1]):
            with self.subTest(length=len(prompt)), self.assertRaises(ValueError):
                _engine.begin(0, prompt, GREEDY)
        with self.assertRaises(ValueError):
            _engine.begin(SLOTS, [5], GREEDY)
        _engine.begin(0, [5], GREEDY)
        with self.assertRaises(ValueError):
            _engine.begin(0, [6], GREEDY)
        with self.assertRaises(ValueError):
            _engine.decode([0], 1)  # it has not been read
        self.assertIsNotNone(_engine.prefill(0))
        with self.assertRaises(ValueError):
            _engine.prefill(0)  # it has been


class MaskTest(EngineCase):
    """A mask holds for one token of one conversation, and changes nothing else."""

    def mask(self, tokens: Sequence[int], size: int = VOCABULARY) -> bytes:
        return sum(1 << token for token in tokens).to_bytes(size // 8, "little")

    def kept(self, slot: int, sampling: Sampling, seed: int) -> list[StepToken]:
        """An answer of ten tokens, each of them held to five others, drawn from `seed`."""
        chance = random.Random(seed)
        told: list[StepToken] = []
        _engine.begin(slot, some_prompt(30, seed=seed), sampling)
        for _ in range(10):
            allowed = chance.sample(range(VOCABULARY), 5)
            mask = self.mask(allowed)
            if told:
                told += _engine.decode([slot], STEPS, {slot: mask})[slot]
            else:
                while not told:
                    first = _engine.prefill(slot, mask)
                    told += [first] if first is not None else []
            self.assertIn(told[-1].token, allowed)
        self.assertEqual(len(told), 10)  # one token a dispatch, however many steps are asked for
        return told

    def test_no_other_token_comes_whatever_the_settings(self) -> None:
        for number, sampling in enumerate(
            (
                GREEDY,
                Sampling(temperature=1.5, seed=3, logprobs=5),
                Sampling(temperature=1.0, top_k=2, top_p=0.5, seed=4),
                Sampling(temperature=0.7, min_p=0.9, repetition_penalty=1.5, seed=5),
                Sampling(temperature=1.0, top_k=400, presence_penalty=2.0, seed=6),
            )
        ):
            with self.subTest(sampling=sampling):
                self.kept(0, sampling, number)
                _engine.end(0)

    def test_log_probabilities_are_those_of_the_model_without_the_mask(self) -> None:
        prompt = some_prompt(20)
        want = log_probabilities(_reference.logits(prompt))[-1]
        _engine.begin(0, prompt, Sampling(temperature=0.0, logprobs=20))
        told = _engine.prefill(0, self.mask([int(want.argmin())]))
        assert told is not None
        self.assertEqual(told.token, want.argmin())
        self.assertLess(abs((told.logprob or 0) - want.min()), NEAR)
        self.assertEqual(told.top[0][0], want.argmax())

    def test_in_company_both_answers_are_what_they_are_alone(self) -> None:
        """A free conversation beside a masked one, and the masked one beside it."""
        free = answer(_engine, some_prompt(12, seed=9), 10, _DRAWN)
        masked = self.kept(1, _DRAWN, 1)
        _engine.end(1)
        read(_engine, 2, some_prompt(12, seed=9), _DRAWN)
        chance = random.Random(1)
        _engine.begin(1, some_prompt(30, seed=1), _DRAWN)
        told: list[StepToken] = []
        beside: list[StepToken] = []
        for number in range(10):
            mask = self.mask(chance.sample(range(VOCABULARY), 5))
            if number:
                both = _engine.decode([2, 1], STEPS, {1: mask})
                self.assertEqual([len(both[slot]) for slot in (1, 2)], [1, 1])
                told += both[1]
                beside += both[2]
            else:
                while not told:
                    first = _engine.prefill(1, mask)
                    told += [first] if first is not None else []
        self.assert_alike(told, masked)
        self.assert_alike(beside, free[1:])

    def test_a_mask_of_another_length_than_the_vocabulary(self) -> None:
        """A token without a bit is not allowed; bits without a token mean nothing."""
        for size, tokens in ((64, [3, 60]), (2 * VOCABULARY, [7, VOCABULARY - 1, VOCABULARY + 5])):
            read(_engine, 0, some_prompt(5), GREEDY)
            told = _engine.decode([0], 1, {0: self.mask(tokens, size)})[0]
            self.assertIn(told[0].token, tokens)
            _engine.end(0)

    def test_nothing_is_compiled_for_a_mask(self) -> None:
        before = _engine.counters()
        self.kept(0, _DRAWN, 2)
        self.assertEqual(_engine.counters(), before)


class LoadingTest(EngineCase):
    def test_loading_was_told_from_nothing_to_all(self) -> None:
        shares = [share for share, _ in _reports]
        self.assertEqual(shares, sorted(shares))
        self.assertEqual(_reports[-1], (1.0, "loaded"))
        said = {doing for _, doing in _reports}
        for doing in ("placing weights", "compiling prefill of 24", "compiling decode of 4"):
            self.assertIn(doing, said)

    def test_limits_and_counters(self) -> None:
        limits = _engine.limits
        self.assertEqual((limits.slots, limits.context), (SLOTS, CONTEXT))
        self.assertEqual(
            (limits.vocabulary, limits.chunk, limits.steps), (VOCABULARY, CHUNK, STEPS)
        )
        counters = _engine.counters()
        self.assertEqual(counters["compiled_shapes"], 7)  # 2 buckets, a first, 3 batches, a move
        # f32 keys and values: two rings of 8 by 32, and one whole context by 64, in each slot
        one = 2 * WINDOW * 32 + CONTEXT * 64
        self.assertEqual(counters["kv_bytes"], SLOTS * 2 * 4 * one)

    def test_a_model_that_cannot_be_served_is_refused_with_words(self) -> None:
        def engine(folder: Path, context: int = 32) -> JaxEngine:
            return JaxEngine(folder, slots=1, context=context, dtype="f32")

        with self.assertRaisesRegex(EngineFault, "2048 positions"):
            engine(_folder, 2049)
        broken = Path(_kept.name) / "broken"
        shutil.copytree(_folder, broken)
        (broken / "model.safetensors").write_bytes(b"\x10")
        with self.assertRaises(EngineFault):
            engine(broken).load(lambda share, doing: None)
        (broken / "config.json").write_text("{}", encoding="utf-8")
        with self.assertRaises(ModelRefused):
            engine(broken)


if __name__ == "__main__":
    unittest.main()
