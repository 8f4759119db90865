"""A week in miniature with the counting engine: every answer right, and nothing left of them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

from forge.engines.serving.slot_engine import Sampling
from tests.engines.counting_engine import CountingEngine, answer_alone
from tests.engines.serving_folder import make_serving_folder, small_tokenizer
from tests.engines.serving_host import MODEL, ServingHost, wait_until
from tests.engines.serving_week import REQUESTS, AnswerTold, Week

SIZE = small_tokenizer().get_vocab_size()


def other_than_alone(body: dict[str, Any], told: AnswerTold) -> str:
    """What an answer has that the engine alone would not have given."""
    sampling = Sampling(temperature=float(body["temperature"]), seed=body["seed"])
    alone = answer_alone(body["prompt"], sampling, body["max_tokens"], SIZE)
    same = told["tokens"] == [f"token_id:{step.token}" for step in alone]
    return "" if same else "another answer than alone"


class Miniature(unittest.TestCase):
    def test_a_week(self) -> None:
        with tempfile.TemporaryDirectory() as held:
            folder = make_serving_folder(Path(held) / "model")
            before = set(threading.enumerate())
            engine = CountingEngine(slots=8, context=300, vocabulary=SIZE, chunk=32, steps=4)
            host = ServingHost(engine, folder, queue=10).ready()

            def hold(on: bool) -> None:
                engine.gate.clear() if on else engine.gate.set()

            week = Week(
                host.port, MODEL, vocabulary=SIZE, context=300, judge=other_than_alone, hold=hold
            )
            asyncio.run(week.run())
            self.assertEqual(week.wrong, [])
            self.assertEqual(sum(week.seen.values()), REQUESTS)
            for kind, count in week.seen.items():
                self.assertGreater(count, 20, kind)

            def idle() -> bool:
                view = host.scheduler.view()
                return not view.running and not view.waiting

            wait_until(idle)
            self.assertEqual(engine.talks, {})
            ended = {
                how: host.metric("engine_request_success_total", f'{{finished_reason="{how}"}}')
                for how in ("stop", "length", "abort", "error")
            }
            self.assertEqual((ended["stop"], ended["error"]), (0, 0))
            # Who left was either aborted, or already had its whole answer on the way, or refused.
            self.assertGreater(ended["abort"], 0)
            self.assertLessEqual(ended["abort"], week.seen["left"])
            self.assertGreaterEqual(ended["length"], week.seen["answered"])
            self.assertEqual(
                host.metric("engine_requests_refused_total", '{status="429"}') > 0, True
            )
            self.assertGreaterEqual(
                host.metric("engine_generation_tokens_total"), week.completion_tokens
            )
            self.assertEqual(host.complete([9], max_tokens=3).status_code, 200)
            self.assertTrue(host.stop())
            self.assertEqual(host.tasks_left, [])
            self.assertEqual({t.name for t in set(threading.enumerate()) - before}, set())


if __name__ == "__main__":
    unittest.main()
