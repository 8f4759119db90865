"""The scheduler with the counting engine: every answer is the one of a server that is alone."""

from __future__ import annotations

import random
import threading
import time
import unittest
from collections.abc import Sequence

from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.scheduler_job import NotServing, QueueFull
from forge.engines.serving.slot_engine import EngineFault, Sampling, StepToken, TokenConstraint
from tests.engines.counting_engine import CountingEngine, allowed_tokens, answer_alone

PATIENCE_S = 30
USUAL = Sampling()


class Job:
    """A job that keeps what it gets. `stop_after`: it says that it is over after so many tokens."""

    def __init__(
        self,
        prompt: Sequence[int],
        limit: int,
        sampling: Sampling = USUAL,
        stop_after: int | None = None,
        breaks_at: int | None = None,
        constraint: TokenConstraint | None = None,
        cache_salt: str = "",
    ) -> None:
        self.prompt = prompt
        self.limit = limit
        self.sampling = sampling
        self.stop_after = stop_after
        self.breaks_at = breaks_at
        self.constraint = constraint
        self.cache_salt = cache_salt
        self.held = -1
        self.got: list[StepToken] = []
        self.seats = 0
        self.calls_after_the_last = 0
        self.end = ""
        self.over = threading.Event()
        self.some = threading.Event()

    def seated(self, held: int) -> None:
        self.seats += 1
        self.held = held

    def take(self, tokens: Sequence[StepToken]) -> bool:
        self.calls_after_the_last += bool(self.end)
        if self.breaks_at is not None and len(self.got) >= self.breaks_at:
            raise KeyError("a fault of this job")
        self.got += tokens
        self.some.set()
        if self.stop_after is not None and len(self.got) >= self.stop_after:
            return self._ended("stop")
        return len(self.got) == self.limit and self._ended("length")

    def fail(self, words: str) -> None:
        self.calls_after_the_last += bool(self.end)
        self._ended(words)

    def cancelled(self) -> None:
        self.calls_after_the_last += bool(self.end)
        self._ended("cancelled")

    def _ended(self, how: str) -> bool:
        self.end = how
        self.over.set()
        return True

    def wait(self) -> str:
        if not self.over.wait(PATIENCE_S):
            raise AssertionError("the job has not ended")
        return self.end


class Rising:
    """A constraint: each token is one of the next `few` above the last, from 0 up. `breaks` names
    the method that fails at the token number `at`."""

    def __init__(self, few: int = 3, breaks: str = "", at: int = 0) -> None:
        self.few = few
        self.breaks = breaks
        self.at = at
        self.taken: list[int] = []
        self.asked = 0
        self.threads: set[int] = set()

    def mask(self) -> bytes:
        self.asked += 1
        self.threads.add(threading.get_ident())
        if self.breaks == "mask" and len(self.taken) == self.at:
            raise ValueError("the library gave up")
        least = self.taken[-1] + 1 if self.taken else 0
        bits = sum(1 << token for token in range(least, least + self.few))
        return bits.to_bytes(16, "little")

    def take(self, token: int) -> None:
        if self.breaks == "take" and len(self.taken) == self.at:
            raise ValueError("the library gave up")
        if token not in allowed_tokens(self.mask()):
            raise ValueError(f"token {token} was not allowed")
        self.taken.append(token)


class SchedulerCase(unittest.TestCase):
    def begun(self, engine: CountingEngine, queue: int = 1000) -> Scheduler:
        scheduler = Scheduler(engine, queue)
        scheduler.start()
        self.addCleanup(scheduler.close, 0.0)
        self.addCleanup(engine.gate.set)
        self.addCleanup(engine.loading.set)
        self.wait_for(lambda: scheduler.view().phase != "loading")
        return scheduler

    def wait_for(self, what: object) -> None:
        end = time.monotonic() + PATIENCE_S
        while not what():  # type: ignore[operator]
            if time.monotonic() > end:
                raise AssertionError("what was waited for has not come")
            time.sleep(0.002)

    def alone(self, job: Job, engine: CountingEngine) -> list[StepToken]:
        count = job.limit if job.stop_after is None else min(job.limit, job.stop_after)
        return answer_alone(job.prompt, job.sampling, count, engine.limits.vocabulary)


class Answers(SchedulerCase):
    def test_one_answer_is_the_engine_s_to_its_limit(self) -> None:
        engine = CountingEngine()
        scheduler = self.begun(engine)
        for limit in (1, 2, 3, 4, 5, 7, 44):
            job = Job(range(20), limit)
            scheduler.submit(job)
            self.assertEqual(job.wait(), "length")
            self.assertEqual(job.got, self.alone(job, engine))
            self.assertEqual(job.seats, 1)
        self.wait_for(lambda: not scheduler.view().running)
        self.assertEqual(engine.talks, {})

    def test_random_schedules_give_each_its_answer_alone(self) -> None:
        """4,000 jobs in 500 schedules: sizes, chunks, steps, slots, arrivals and ends at random."""
        chance = random.Random(4)
        for _ in range(500):
            engine = CountingEngine(
                slots=chance.randint(1, 6),
                context=chance.choice((16, 33, 64)),
                chunk=chance.randint(1, 20),
                steps=chance.randint(1, 9),
                keeps=chance.random() < 0.5,
            )
            scheduler = self.begun(engine)
            jobs = []
            for _ in range(8):
                prompt = [chance.randrange(100) for _ in range(chance.randint(1, 15))]
                if jobs:  # half of them go on as another one begins
                    other = chance.choice(jobs)[0].prompt
                    prompt[: chance.choice((0, 20))] = other[: chance.randint(1, len(other))]
                prompt = prompt[:15]
                room = engine.limits.context - len(prompt)
                sampling = Sampling(
                    temperature=chance.choice((0.0, 1.0)),
                    seed=chance.randrange(5),
                    logprobs=chance.choice((-1, 0, 3)),
                )
                stop_after = chance.choice((None, chance.randint(1, 20)))
                job = Job(prompt, chance.randint(1, room), sampling, stop_after)
                jobs.append((job, scheduler.submit(job)))
                if chance.random() < 0.2:
                    scheduler.cancel(chance.choice(jobs)[1])
                if chance.random() < 0.2:
                    jobs[-1][0].some.wait(PATIENCE_S) if not jobs[-1][1].cancelled else None
            for job, ticket in jobs:
                ended, alone = job.wait(), self.alone(job, engine)
                if ended == "cancelled":
                    self.assertTrue(ticket.cancelled)
                    self.assertEqual(job.got, alone[: len(job.got)])
                else:
                    self.assertIn(ended, ("stop", "length"))
                    self.assertEqual(job.got[: len(alone)], alone)
                self.assertEqual(job.calls_after_the_last, 0)
            self.assertTrue(scheduler.finish(PATIENCE_S))
            self.assertEqual(engine.talks, {})

    def test_a_short_answer_is_not_held_up_by_a_long_prompt(self) -> None:
        """Between any two chunks of a prompt, those who answer get a decode, and the other way."""
        engine = CountingEngine(slots=2, context=400, chunk=4, steps=2)
        scheduler = self.begun(engine)
        engine.gate.clear()
        first, long = Job([1], 60), Job(range(100), 5)
        scheduler.submit(first)
        scheduler.submit(long)
        engine.gate.set()
        first.wait(), long.wait()
        kinds = [entry[0] for entry in engine.log]
        chunks = [n for n, entry in enumerate(engine.log) if entry == ("prefill", 1)]
        self.assertEqual(len(chunks), 25)
        for before, after in zip(chunks[:-1], chunks[1:], strict=True):
            self.assertEqual(kinds[before + 1 : after].count("decode"), 1)

    def test_what_the_engine_kept_is_not_read_again(self) -> None:
        engine = CountingEngine(context=100, chunk=4, keeps=True)
        scheduler = self.begun(engine)
        history = list(range(30))
        for prompt, salt, held in (
            (history[:10], "", 0),
            (history[:20], "", 8),
            (history[:20], "", 16),  # the last chunk, to its last token, is read for its stream
            (history[:21], "", 20),
            (history, "", 20),
            ([*history[:6], 99, *history[7:]], "", 4),
            (history, "mine", 0),
            (history, "mine", 28),
        ):
            engine.log.clear()
            job = Job(prompt, 3, cache_salt=salt)
            scheduler.submit(job)
            self.assertEqual(job.wait(), "length")
            self.assertEqual(job.held, held)
            self.assertEqual(job.got, self.alone(job, engine))
            reads = [entry for entry in engine.log if entry[0] == "prefill"]
            self.assertEqual(len(reads), -(-(len(prompt) - held) // 4))

    def test_what_was_kept_takes_nothing_of_a_turn(self) -> None:
        """Two prompts that are known but for two tokens share the turn of one chunk."""
        engine = CountingEngine(slots=3, context=100, chunk=4, keeps=True)
        scheduler = self.begun(engine)
        jobs = [Job([*range(40), n, n], 9) for n in range(2)]

        def take(tokens: Sequence[StepToken]) -> bool:  # between two turns, in their thread
            for job in jobs:
                scheduler.submit(job)
            return Job.take(first, tokens)

        first = Job(range(40), 1)
        first.take = take  # type: ignore[method-assign]
        scheduler.submit(first)
        for job in jobs:
            job.wait()
            self.assertEqual((job.held, job.got), (40, self.alone(job, engine)))
        reads = [n for n, entry in enumerate(engine.log) if entry[0] == "prefill"]
        self.assertEqual(len(reads), 10 + 2)
        self.assertEqual(reads[-1] - reads[-2], 1)

    def steps_of(self, *limits: int) -> list[object]:
        """The steps of each decode of two slots, when answers of these limits come at once."""
        engine = CountingEngine(slots=2, steps=8)
        scheduler = self.begun(engine)
        engine.gate.clear()
        jobs = [Job([n + 1], limit) for n, limit in enumerate(limits)]
        for job in jobs:
            scheduler.submit(job)
        engine.gate.set()
        for job in jobs:
            job.wait()
        return [entry[2] for entry in engine.log if entry[0] == "decode"]

    def test_no_more_steps_than_anybody_needs(self) -> None:
        self.assertEqual(self.steps_of(2, 6), [5])
        self.assertEqual(self.steps_of(12, 12), [8, 3])

    def test_where_others_wait_no_more_than_frees_the_next_slot(self) -> None:
        self.assertEqual(self.steps_of(12, 12, 2), [8, 3, 1])

    def test_who_waits_for_a_slot_gets_the_first_that_is_free(self) -> None:
        """While others wait, a decode ends with the answer that ends first."""
        engine = CountingEngine(slots=2, steps=8)
        scheduler = self.begun(engine)
        engine.gate.clear()
        jobs = [Job([1], 4), Job([2], 20), Job([3], 2)]
        for job in jobs:
            scheduler.submit(job)
        engine.gate.set()
        for job in jobs:
            job.wait()
        self.assertEqual(
            engine.log[:5],
            [
                ("prefill", 0),
                ("prefill", 1),
                ("decode", (0, 1), 3),
                ("prefill", 0),
                ("decode", (1, 0), 8),
            ],
        )

    def test_short_prompts_share_a_turn_and_one_step_is_taken_while_others_are_read(self) -> None:
        """Six tokens, two and five with chunks of eight: the third waits for the next turn."""
        engine = CountingEngine(slots=3, chunk=8, steps=4)
        scheduler = self.begun(engine)
        engine.gate.clear()
        jobs = [Job(range(length), 9) for length in (6, 2, 5)]
        for job in jobs:
            scheduler.submit(job)
        engine.gate.set()
        for job in jobs:
            job.wait()
        self.assertEqual(
            engine.log[:5],
            [
                ("prefill", 0),
                ("prefill", 1),
                ("decode", (0, 1), 1),
                ("prefill", 2),
                ("decode", (0, 1, 2), 4),
            ],
        )

    def test_the_order_of_arrival_is_kept(self) -> None:
        engine = CountingEngine(slots=1)
        scheduler = self.begun(engine)
        order: list[int] = []
        engine.gate.clear()
        jobs = [Job([n + 1], 3) for n in range(20)]
        for n, job in enumerate(jobs):
            job.seated = lambda held, n=n: order.append(n)  # type: ignore[method-assign, misc]
            scheduler.submit(job)
        engine.gate.set()
        for job in jobs:
            job.wait()
        self.assertEqual(order, list(range(20)))


class Bounds(SchedulerCase):
    def test_the_queue_is_bounded_and_says_when_to_come_again(self) -> None:
        engine = CountingEngine(slots=2)
        scheduler = self.begun(engine, queue=3)
        engine.gate.clear()
        jobs = [Job([n + 1], 2) for n in range(5)]
        for job in jobs:
            scheduler.submit(job)
        with self.assertRaises(QueueFull) as caught:
            scheduler.submit(Job([9], 2))
        self.assertTrue(1 <= caught.exception.retry_after_s <= 60)
        engine.gate.set()
        for job in jobs:
            self.assertEqual(job.wait(), "length")
        late = Job([9], 2)
        scheduler.submit(late)
        self.assertEqual(late.wait(), "length")

    def test_without_a_queue_the_slots_alone_are_given(self) -> None:
        engine = CountingEngine(slots=1)
        scheduler = self.begun(engine, queue=0)
        engine.gate.clear()
        scheduler.submit(Job([1], 2))
        with self.assertRaises(QueueFull):
            scheduler.submit(Job([2], 2))

    def test_a_cancelled_one_gives_its_place_in_the_queue_back(self) -> None:
        engine = CountingEngine(slots=1)
        scheduler = self.begun(engine, queue=1)
        engine.gate.clear()
        first, second, third = Job([1], 2), Job([2], 2), Job([3], 2)
        scheduler.submit(first)
        ticket = scheduler.submit(second)
        self.wait_for(lambda: scheduler.view().running == 1)
        scheduler.cancel(ticket)
        scheduler.submit(third)
        engine.gate.set()
        self.assertEqual(second.wait(), "cancelled")
        self.assertEqual(second.got, [])
        self.assertEqual(third.wait(), "length")

    def test_a_cancelled_answer_frees_its_slot_before_the_next_dispatch(self) -> None:
        engine = CountingEngine(slots=1, context=4000, steps=1)
        scheduler = self.begun(engine)
        long, next_one = Job([1], 3000), Job([2], 2)
        ticket = scheduler.submit(long)
        self.assertTrue(long.some.wait(PATIENCE_S))
        engine.gate.clear()
        scheduler.submit(next_one)
        scheduler.cancel(ticket)
        dispatched = len(engine.log)
        engine.gate.set()
        self.assertEqual(long.wait(), "cancelled")
        self.assertEqual(next_one.wait(), "length")
        # At most the one that was under way when it was cancelled.
        decodes = [entry for entry in engine.log[dispatched:] if entry[0] == "decode"]
        self.assertLessEqual(len(decodes), 2 + 1)
        self.assertEqual(scheduler.view().running, 0)

    def test_cancelling_twice_and_after_the_end_changes_nothing(self) -> None:
        engine = CountingEngine()
        scheduler = self.begun(engine)
        job = Job([1], 2)
        ticket = scheduler.submit(job)
        job.wait()
        scheduler.cancel(ticket)
        scheduler.cancel(ticket)
        other = Job([1], 2)
        scheduler.submit(other)
        self.assertEqual(other.wait(), "length")
        self.assertEqual(job.end, "length")
        self.assertEqual(job.calls_after_the_last, 0)

    def test_the_view_counts(self) -> None:
        """Held after a prompt of ten is read and two tokens of its answer are there."""
        engine = CountingEngine(slots=2, context=50, chunk=16)
        engine.hold_after = 2
        scheduler = self.begun(engine)
        jobs = [Job(range(10), 9) for _ in range(5)]
        for job in jobs:
            scheduler.submit(job)
        self.wait_for(lambda: scheduler.view().kv_used_share == (10 + 2 + 10) / 100)
        view = scheduler.view()
        self.assertEqual((view.running, view.waiting), (2, 3))
        self.assertEqual(view.counters["kv_bytes"], 4096)
        engine.gate.set()
        for job in jobs:
            job.wait()
        self.wait_for(lambda: scheduler.view().kv_used_share == 0)


class Faults(SchedulerCase):
    def test_a_job_s_own_fault_ends_it_alone(self) -> None:
        engine = CountingEngine(slots=3)
        scheduler = self.begun(engine)
        engine.gate.clear()
        good, bad, unfit = Job([1], 20), Job([2], 20, breaks_at=3), Job([-1], 20)
        for job in (good, bad, unfit):
            scheduler.submit(job)
        engine.gate.set()
        self.assertIn("a fault of this job", bad.wait())
        self.assertIn("negative", unfit.wait())
        self.assertEqual(good.wait(), "length")
        self.assertEqual(good.got, self.alone(good, engine))
        self.wait_for(lambda: not engine.talks)
        self.assertEqual(scheduler.view().phase, "serving")

    def test_a_job_that_cannot_even_fail_harms_no_other(self) -> None:
        engine = CountingEngine()
        scheduler = self.begun(engine)
        bad, good = Job([2], 20, breaks_at=0), Job([1], 20)
        bad.fail = lambda words: 1 / 0  # type: ignore[method-assign, assignment]
        scheduler.submit(bad)
        scheduler.submit(good)
        self.assertEqual(good.wait(), "length")

    def test_an_engine_that_gives_no_token_fails_the_answer(self) -> None:
        """Beyond its context an engine gives none: nobody may wait for that."""
        engine = CountingEngine(context=8)
        scheduler = self.begun(engine)
        job = Job(range(6), 50)
        scheduler.submit(job)
        self.assertIn("gave no token", job.wait())
        self.assertEqual(len(job.got), 2)

    def test_an_engine_fault_ends_all_and_nothing_is_taken_any_more(self) -> None:
        engine = CountingEngine(slots=1)
        scheduler = self.begun(engine)
        engine.gate.clear()
        jobs = [Job([1], 20), Job([2], 20)]
        for job in jobs:
            scheduler.submit(job)
        engine.fault = EngineFault("out of memory")
        engine.gate.set()
        for job in jobs:
            self.assertIn("out of memory", job.wait())
            self.assertEqual(job.calls_after_the_last, 0)
        self.assertEqual(scheduler.view().phase, "failed")
        self.assertIn("out of memory", scheduler.view().doing)
        with self.assertRaisesRegex(NotServing, "out of memory"):
            scheduler.submit(Job([3], 2))
        self.assertTrue(scheduler.close(PATIENCE_S))

    def test_loading_is_told_and_refuses_until_it_is_done(self) -> None:
        told: list[tuple[float, str]] = []
        engine = CountingEngine()
        engine.loading.clear()
        scheduler = Scheduler(engine, 5, lambda share, doing: told.append((share, doing)))
        self.addCleanup(scheduler.close, 0.0)
        scheduler.start()
        self.wait_for(lambda: scheduler.view().progress == 0.25)
        self.assertIn("25%: half of a half", scheduler.view().doing)
        with self.assertRaisesRegex(NotServing, "half of a half"):
            scheduler.submit(Job([1], 2))
        with self.assertRaises(NotServing):
            scheduler.limits  # noqa: B018
        engine.loading.set()
        self.wait_for(lambda: scheduler.view().phase == "serving")
        self.assertEqual(told, [(0.25, "half of a half"), (1.0, "loaded")])

    def test_what_fails_to_load_says_why(self) -> None:
        engine = CountingEngine()
        engine.fault = EngineFault("no such weights")
        scheduler = self.begun(engine)
        self.assertEqual(scheduler.view().phase, "failed")
        self.assertIn("no such weights", scheduler.view().doing)


class Ends(SchedulerCase):
    def test_draining_answers_what_waits_and_takes_nothing_new(self) -> None:
        engine = CountingEngine(slots=1)
        scheduler = self.begun(engine)
        engine.gate.clear()
        jobs = [Job([1], 20), Job([2], 20)]
        for job in jobs:
            scheduler.submit(job)
        scheduler.drain()
        with self.assertRaisesRegex(NotServing, "stopping"):
            scheduler.submit(Job([3], 2))
        engine.gate.set()
        self.assertTrue(scheduler.finish(PATIENCE_S))
        self.assertEqual([job.end for job in jobs], ["length", "length"])
        self.assertEqual(scheduler.view().phase, "closed")

    def test_what_is_not_over_in_time_is_broken_off(self) -> None:
        engine = CountingEngine(slots=1, context=100_000_000, steps=1)
        scheduler = self.begun(engine)
        running, waiting = Job([1], 90_000_000), Job([2], 90_000_000)
        scheduler.submit(running)
        scheduler.submit(waiting)
        self.assertTrue(running.some.wait(PATIENCE_S))
        self.assertFalse(scheduler.finish(0.01))
        self.assertTrue(scheduler.close(PATIENCE_S))
        self.assertEqual([running.wait(), waiting.wait()], ["the server is stopping"] * 2)

    def test_closing_a_scheduler_that_was_never_started(self) -> None:
        self.assertTrue(Scheduler(CountingEngine(), 1).close(0.0))


class Constrained(SchedulerCase):
    def test_an_answer_keeps_to_its_constraint_and_the_constraint_is_told_of_it(self) -> None:
        engine = CountingEngine(chunk=4)
        scheduler = self.begun(engine)
        job = Job(range(10), 20, constraint=Rising())
        scheduler.submit(job)
        self.assertEqual(job.wait(), "length")
        tokens = [step.token for step in job.got]
        self.assertEqual(len(tokens), 20)
        self.assertEqual(job.constraint.taken, tokens)  # type: ignore[union-attr]
        self.assertTrue(all(0 < b - a <= 3 for a, b in zip(tokens, tokens[1:], strict=False)))
        self.assertGreater(len({b - a for a, b in zip(tokens, tokens[1:], strict=False)}), 1)
        self.assertEqual(scheduler.view().constrained, 1)
        self.assertGreater(scheduler.view().mask_s, 0)

    def test_every_call_of_a_constraint_comes_from_the_scheduler_s_thread(self) -> None:
        scheduler = self.begun(CountingEngine())
        constraint = Rising()
        job = Job([5], 6, constraint=constraint)
        scheduler.submit(job)
        job.wait()
        (thread,) = constraint.threads
        self.assertNotEqual(thread, threading.get_ident())

    def test_a_step_is_one_token_while_any_answer_is_constrained_and_not_after(self) -> None:
        engine = CountingEngine(slots=2, steps=4)
        scheduler = self.begun(engine)
        engine.gate.clear()
        free, held = Job([1], 30), Job([2], 8, constraint=Rising())
        scheduler.submit(free)
        scheduler.submit(held)
        engine.gate.set()
        self.assertEqual((held.wait(), free.wait()), ("length", "length"))
        steps = [
            (len(what[1]), what[2])  # type: ignore[arg-type]
            for what in engine.log
            if what[0] == "decode"
        ]
        self.assertEqual({step for slots, step in steps if slots == 2}, {1})
        self.assertIn((1, 4), steps)

    def test_free_answers_are_the_same_beside_constrained_ones(self) -> None:
        """300 jobs in 40 schedules; the constrained ones too are as they would be alone."""
        chance = random.Random(7)
        alone: dict[tuple[int, ...], list[int]] = {}
        for _ in range(40):
            engine = CountingEngine(slots=4, context=64, chunk=7, steps=chance.randint(1, 5))
            scheduler = self.begun(engine)
            jobs = []
            for _ in range(8):
                prompt = [chance.randrange(4) for _ in range(chance.randint(1, 9))]
                constraint = Rising() if chance.random() < 0.5 else None
                jobs.append(Job(prompt, chance.randint(1, 20), constraint=constraint))
            for job in jobs:
                scheduler.submit(job)
            for job in jobs:
                self.assertEqual(job.wait(), "length")
                if job.constraint is None:
                    self.assertEqual(job.got, self.alone(job, engine))
                    continue
                tokens = [step.token for step in job.got]
                known = alone.setdefault(tuple(job.prompt), tokens)
                shared = min(len(known), len(tokens))
                self.assertEqual(known[:shared], tokens[:shared])
            self.assertTrue(scheduler.finish(PATIENCE_S))

    def test_a_constraint_that_fails_ends_its_own_answer_and_no_other(self) -> None:
        for breaks in ("mask", "take"):
            for at in (0, 1, 3):
                with self.subTest(breaks=breaks, at=at):
                    engine = CountingEngine(slots=2, chunk=3)
                    scheduler = self.begun(engine)
                    engine.gate.clear()
                    broken = Job(range(5), 9, constraint=Rising(3, breaks, at))
                    other = Job(range(7), 9, constraint=Rising())
                    free = Job(range(8), 9)
                    for job in (broken, other, free):
                        scheduler.submit(job)
                    engine.gate.set()
                    self.assertEqual(broken.wait(), "ValueError: the library gave up")
                    self.assertEqual(len(broken.got), at)
                    self.assertEqual((other.wait(), free.wait()), ("length", "length"))
                    self.assertEqual(free.got, self.alone(free, engine))
                    self.assertEqual(scheduler.view().phase, "serving")
                    self.wait_for(lambda s=scheduler: not s.view().running)
                    self.assertEqual(engine.talks, {})

    def test_an_engine_that_overlooks_a_mask_is_found_out(self) -> None:
        engine = CountingEngine(forced={(1,): [2, 90]})
        scheduler = self.begun(engine)
        job = Job([1], 5, constraint=Rising())
        scheduler.submit(job)
        self.assertEqual(job.wait(), "ValueError: token 90 was not allowed")
        self.assertEqual([step.token for step in job.got], [2])


if __name__ == "__main__":
    unittest.main()
