"""Several counting engines as one: each conversation is in one of them, and answered as alone."""

from __future__ import annotations

import random
import threading
import time
import unittest
from collections.abc import Mapping, Sequence

from forge.engines.serving.replicated_engine import ReplicatedEngine
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.slot_engine import EngineFault, Sampling, StepToken
from tests.engines.counting_engine import CountingEngine, answer_alone
from tests.engines.test_serving_scheduler import PATIENCE_S, Job

USUAL = Sampling()


def loaded(*replicas: CountingEngine) -> ReplicatedEngine:
    engine = ReplicatedEngine(replicas)
    engine.load(lambda share, doing: None)
    return engine


def only(token: int) -> bytes:
    """The mask that allows that token alone."""
    return (1 << token).to_bytes(16, "little")


def read(engine: ReplicatedEngine, slot: int, prompt: Sequence[int]) -> StepToken:
    engine.begin(slot, prompt, USUAL)
    while (first := engine.prefill(slot)) is None:
        pass
    return first


class SlotsTest(unittest.TestCase):
    def test_low_slots_are_one_of_each_replica(self) -> None:
        replicas = [CountingEngine(slots=2) for _ in range(3)]
        engine = loaded(*replicas)
        self.assertEqual(engine.limits.slots, 6)
        self.assertEqual(engine.limits.context, replicas[0].limits.context)
        for slot in range(4):
            read(engine, slot, [slot])
        held = [sorted(tuple(t.prompt) for t in one.talks.values()) for one in replicas]
        self.assertEqual(held, [[(0,), (3,)], [(1,)], [(2,)]])

    def test_each_replica_says_what_it_has_kept_itself(self) -> None:
        engine = loaded(*[CountingEngine(chunk=2, keeps=True) for _ in range(2)])
        read(engine, 0, range(9))
        engine.end(0)
        self.assertEqual([engine.begin(slot, range(9), USUAL) for slot in (0, 1)], [8, 0])
        self.assertEqual(engine.begin(2, range(9), USUAL, "mine"), 0)

    def test_each_answer_is_the_one_of_an_engine_alone(self) -> None:
        engine = loaded(*[CountingEngine(slots=3, chunk=2) for _ in range(2)])
        prompts = {slot: list(range(slot, slot + 5)) for slot in (5, 0, 3, 2)}
        told = {slot: [read(engine, slot, prompt)] for slot, prompt in prompts.items()}
        for steps in (1, 4, 2):
            answers = engine.decode(list(prompts), steps)
            self.assertEqual(set(answers), set(prompts))
            for slot, more in answers.items():
                told[slot] += more
        for slot, prompt in prompts.items():
            self.assertEqual(told[slot], answer_alone(prompt, USUAL, 8, 100))

    def test_a_mask_goes_to_its_own_slot_and_makes_one_token_of_each(self) -> None:
        """Of the other replica too, whose decode has no mask."""
        engine = loaded(CountingEngine(), CountingEngine())
        for slot in (0, 1, 2):
            engine.begin(slot, [slot], USUAL)
        firsts = [engine.prefill(slot, mask) for slot, mask in enumerate((None, None, only(41)))]
        self.assertEqual(firsts[2], StepToken(41))
        self.assertEqual(firsts[0], answer_alone([0], USUAL, 1, 100)[0])
        told = engine.decode([0, 1, 2], 4, {2: only(42)})
        self.assertEqual({slot: len(tokens) for slot, tokens in told.items()}, {0: 1, 1: 1, 2: 1})
        self.assertEqual(told[2], [StepToken(42)])
        for slot in (0, 1):
            self.assertEqual(told[slot], answer_alone([slot], USUAL, 2, 100)[1:])

    def test_an_ended_slot_is_free_in_its_replica_and_no_other_is(self) -> None:
        replicas = [CountingEngine(slots=2) for _ in range(2)]
        engine = loaded(*replicas)
        for slot in range(4):
            read(engine, slot, [slot + 1])
        engine.end(3)
        engine.end(3)
        self.assertEqual([sorted(one.talks) for one in replicas], [[0, 1], [0]])
        self.assertEqual(read(engine, 3, [9]), answer_alone([9], USUAL, 1, 100)[0])
        with self.assertRaises(EngineFault):
            engine.begin(1, [5], USUAL)

    def test_counters_are_added_up_but_for_what_the_whole_process_counts(self) -> None:
        class Late(CountingEngine):
            """Compiled 3 shapes after it was loaded, or so it believes."""

            def counters(self) -> Mapping[str, float]:
                return {**super().counters(), "compiles_after_start": 3}

        told = loaded(Late(), CountingEngine()).counters()
        self.assertEqual(told, {"compiled_shapes": 14, "compiles_after_start": 0, "kv_bytes": 8192})


class TogetherTest(unittest.TestCase):
    def test_all_decode_at_once(self) -> None:
        """Neither gets past a barrier until the other is in its decode as well."""
        both = threading.Barrier(2, timeout=PATIENCE_S)

        class Meeting(CountingEngine):
            def decode(
                self, slots: Sequence[int], steps: int, masks: Mapping[int, bytes] | None = None
            ) -> Mapping[int, Sequence[StepToken]]:
                both.wait()
                return super().decode(slots, steps, masks)

        engine = loaded(Meeting(), Meeting())
        for slot in (0, 1):
            read(engine, slot, [slot])
        self.assertEqual(set(engine.decode([0, 1], 2)), {0, 1})

    def test_who_has_no_part_in_a_decode_is_not_called(self) -> None:
        replicas = [CountingEngine(), CountingEngine()]
        engine = loaded(*replicas)
        read(engine, 1, [4])
        engine.decode([1], 1)
        self.assertEqual(replicas[0].log, [])

    def test_a_fault_of_one_is_raised_once_the_others_are_done(self) -> None:
        replicas = [CountingEngine(), CountingEngine()]
        engine = loaded(*replicas)
        for slot in (0, 1):
            read(engine, slot, [slot])
        replicas[0].fault = EngineFault("the first device is gone")
        replicas[1].gate.clear()
        ended: list[str] = []

        def decode() -> None:
            try:
                engine.decode([0, 1], 1)
            except EngineFault as fault:
                ended.append(str(fault))

        asking = threading.Thread(target=decode)
        asking.start()
        end = time.monotonic() + PATIENCE_S
        while len(replicas[0].log) < 2 and time.monotonic() < end:
            time.sleep(0.002)
        self.assertEqual(ended, [])
        replicas[1].gate.set()
        asking.join(PATIENCE_S)
        self.assertEqual(ended, ["the first device is gone"])
        self.assertEqual(replicas[1].log[-1], ("decode", (0,), 1))


class LoadingTest(unittest.TestCase):
    def test_the_first_is_loaded_before_the_others_begin(self) -> None:
        order: list[str] = []

        class Noted(CountingEngine):
            def load(self, report: object) -> None:
                order.append("begun")
                super().load(lambda share, doing: None)
                order.append("done")

        loaded(Noted(), Noted(), Noted())
        self.assertEqual(order[:2], ["begun", "done"])
        self.assertEqual(len(order), 6)

    def test_progress_rises_to_the_whole_and_says_whose_it_is(self) -> None:
        told: list[tuple[float, str]] = []
        engine = ReplicatedEngine([CountingEngine() for _ in range(3)])
        engine.load(lambda share, doing: told.append((share, doing)))
        shares = [share for share, _ in told]
        self.assertEqual(shares, sorted(shares))
        self.assertEqual(shares[-1], 1.0)
        self.assertEqual(told[0], (0.25 / 3, "half of a half (copy 1 of 3)"))
        self.assertEqual({doing[-13:] for _, doing in told}, {f"(copy {n} of 3)" for n in "123"})

    def test_what_one_cannot_load_is_raised(self) -> None:
        for broken in (0, 2):
            replicas = [CountingEngine() for _ in range(3)]
            replicas[broken].fault = EngineFault("no room")
            with self.assertRaisesRegex(EngineFault, "no room"):
                loaded(*replicas)


class ScheduledTest(unittest.TestCase):
    def test_random_company_cancelled_and_not(self) -> None:
        """Behind the scheduler: 300 jobs, each as alone or cancelled; nothing is left."""
        chance = random.Random(9)
        for _ in range(30):
            replicas = [CountingEngine(slots=chance.randint(1, 3)) for _ in "12"]
            replicas[1] = CountingEngine(slots=replicas[0].limits.slots)
            scheduler = Scheduler(ReplicatedEngine(replicas), 1000)
            scheduler.start()
            end = time.monotonic() + PATIENCE_S
            while scheduler.view().phase == "loading" and time.monotonic() < end:
                time.sleep(0.001)
            jobs = []
            for _ in range(10):
                prompt = [chance.randrange(100) for _ in range(chance.randint(1, 30))]
                jobs.append(Job(prompt, chance.randint(1, 20), Sampling(seed=chance.randrange(99))))
            tickets = [scheduler.submit(job) for job in jobs]
            for ticket in chance.sample(tickets, 3):
                scheduler.cancel(ticket)
            for job in jobs:
                self.assertIn(job.wait(), ("length", "cancelled"))
                alone = answer_alone(job.prompt, job.sampling, job.limit, 100)
                self.assertEqual(job.got, alone[: len(job.got)])
                if job.end == "length":
                    self.assertEqual(job.got, alone)
            self.assertTrue(scheduler.finish(PATIENCE_S))
            self.assertEqual([one.talks for one in replicas], [{}, {}])
            self.assertTrue(all(one.log for one in replicas))


if __name__ == "__main__":
    unittest.main()
