"""The planner's times and money: the roofline as a law, the estimate as its engines' constants."""

from __future__ import annotations

import unittest
from dataclasses import replace

from forge.parts.knowledge.engine_profiles import (
    ENGINE_PROFILES,
    cold_start_figure,
    engine_profile,
    known_misses,
)
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.hardware import ACCELERATORS
from forge.parts.knowledge.memory import parameter_counts, step_bytes, weight_bytes
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.planner import DeploymentPlan, plan_of, table_rate
from forge.parts.knowledge.planner_engines import HostCurve
from forge.parts.knowledge.planner_fit import FitRequest, planned_model
from forge.parts.knowledge.planner_money import (
    ApiPrice,
    break_even_tokens_per_s,
    million_tokens,
    usd_for,
    usd_per_million,
    with_cold_start,
)
from forge.parts.knowledge.planner_speed import (
    SpeedModel,
    active_parameters,
    expanded_bytes,
    kv_read_bytes,
)
from forge.parts.knowledge.prices import PRICES


def model(size: str, chip: str, runtime: str | None = None, encoding: str = "bf16") -> SpeedModel:
    accelerator = ACCELERATORS[chip]
    return SpeedModel(
        GEMMA4[size].geometry,
        encoding,
        accelerator.bandwidth.known(chip),
        accelerator.compute.value,
        None if runtime is None else engine_profile(runtime, chip),
    )


class TestReads(unittest.TestCase):
    def test_parameters_that_a_token_passes(self) -> None:
        # billions, to the printed digits of the model table
        for size, billions in (("E2B", 2.28), ("E4B", 4.64), ("12B", 11.907), ("26B-A4B", 3.82)):
            self.assertAlmostEqual(
                active_parameters(GEMMA4[size].geometry) / 1e9, billions, delta=0.006, msg=size
            )

    def test_sharing_layers_read_and_windows_end(self) -> None:
        e2b = GEMMA4["E2B"].geometry
        # 28 sliding layers of 1 KiB and 7 full ones of 2 KiB, although only 15 layers own a cache
        self.assertEqual(kv_read_bytes(e2b, 512, 2), 512 * 42 * 1024)
        self.assertEqual(kv_read_bytes(e2b, 5000, 2), (28 * 512 + 14 * 5000) * 1024)
        self.assertEqual(kv_read_bytes(e2b, 5000, 1), kv_read_bytes(e2b, 5000, 2) / 2)

    def test_the_expanded_pass_is_the_16_bit_matrices(self) -> None:
        twelve = GEMMA4["12B"].geometry
        counts = parameter_counts(twelve)
        rest = 2 * (counts.embed + counts.other)
        self.assertEqual(expanded_bytes(twelve), weight_bytes(twelve, "bf16") - rest)
        moe = GEMMA4["26B-A4B"].geometry
        self.assertLess(expanded_bytes(moe, 1), expanded_bytes(moe, 64))
        self.assertLess(expanded_bytes(moe, 64), weight_bytes(moe, "bf16"))

    def test_only_a_reference_path_reads_the_matrices_twice(self) -> None:
        plain, twice = (model("12B", "v6e", runtime, "w4a16") for runtime in ("vllm", "jax"))
        packed = step_bytes(GEMMA4["12B"].geometry, "w4a16")
        self.assertEqual(plain.read_bytes(1, 0), packed)
        self.assertGreater(twice.read_bytes(1, 0), 3 * packed)


class TestSteps(unittest.TestCase):
    def test_nothing_is_faster_than_the_roofline(self) -> None:
        for name in ENGINE_PROFILES:
            runtime = name.split("-")[0]
            chip = {"tpu": "v6e", "cuda": "l4", "rocm": "mi300x", "neuron": "inf2"}.get(
                name.split("-")[1], "cpu"
            )
            for size in GEMMA4:
                roof, engine = model(size, chip), model(size, chip, runtime)
                for streams in (1, 5, 64, 700):
                    self.assertGreaterEqual(
                        engine.step_ms(streams, 2048), roof.step_ms(streams, 2048), (name, size)
                    )
                    self.assertGreaterEqual(
                        roof.tokens_per_s(streams, 1024, 128),
                        engine.tokens_per_s(streams, 1024, 128),
                        (name, size),
                    )

    def test_the_roofline_keeps_within_bandwidth_and_compute(self) -> None:
        for size in GEMMA4:
            roof = model(size, "v6e")
            for streams in (1, 64, 4096):
                seconds = roof.step_ms(streams, 1024) / 1000
                self.assertLessEqual(roof.read_bytes(streams, 1024) / seconds, 1638e9 * 1.0001)
                flops = 2 * streams * active_parameters(roof.geometry)
                self.assertLessEqual(flops / seconds, 918e12 * 1.0001)
            # with many short streams it is the compute that decides
            many = 2 * 4096 * active_parameters(roof.geometry) / 918e9
            self.assertAlmostEqual(roof.step_ms(4096, 1), many, delta=many * 0.3)

    def test_steps_grow_with_streams_and_context(self) -> None:
        engine = model("E4B", "v6e", "vllm")
        by_streams = [engine.step_ms(streams, 1024) for streams in (1, 2, 4, 8, 20, 64, 90, 200)]
        by_context = [engine.step_ms(8, context) for context in (1, 512, 4096, 65_536)]
        for times in (by_streams, by_context):
            self.assertEqual(times, sorted(set(times)))

    def test_the_host_curve_between_and_beyond_its_points(self) -> None:
        curve = HostCurve(((4, 1.0), (8, 3.0)), "fitted", "this test", "2026")
        self.assertEqual([curve.ms(n) for n in (0, 1, 4, 6, 8)], [0.0, 0.0, 1.0, 2.0, 3.0])
        self.assertAlmostEqual(curve.ms(2), 1 / 3)
        self.assertEqual(curve.ms(16), 6.0)
        self.assertEqual([curve.reaches(n) for n in (1, 8, 9)], [True, True, False])
        self.assertEqual(HostCurve((), "placeholder", "none", "2026").ms(64), 0.0)

    def test_the_best_number_of_streams(self) -> None:
        engine = model("E2B", "v6e", "vllm")
        best = engine.best_streams(1000, 1024, 128)
        rates = {n: engine.tokens_per_s(n, 1024, 128) for n in (best // 2, best, 1000)}
        self.assertGreater(rates[best], 0.95 * max(rates.values()))
        self.assertLess(rates[best // 2], 0.95 * max(rates.values()))
        self.assertEqual(engine.best_streams(1, 1024, 128), 1)
        self.assertIn(engine.best_streams(3, 1024, 128), (1, 2, 3))

    def test_throughput_is_the_time_of_a_whole_wave(self) -> None:
        engine = model("E2B", "v6e", "vllm")
        prefill = engine.prefill_ms(1024)
        assert prefill is not None
        self.assertAlmostEqual(
            prefill, 16, delta=0.5
        )  # the article's 16 ms, which it was fitted to
        seconds = (127 * engine.step_ms(8, 1024 + 64) + 8 * prefill) / 1000
        self.assertAlmostEqual(engine.tokens_per_s(8, 1024, 128), 8 * 128 / seconds)

    def test_prompts_cost_nothing_where_compute_is_unmeasured(self) -> None:
        engine = model("E2B", "cpu", "pytorch")
        self.assertIsNone(engine.prefill_ms(1024))
        self.assertGreater(engine.tokens_per_s(1, 1024, 128), 0)


class TestMoney(unittest.TestCase):
    def test_identities(self) -> None:
        self.assertAlmostEqual(usd_per_million(3.6, 1000), 1.0)
        self.assertAlmostEqual(million_tokens(1000, 1), 3.6)
        self.assertAlmostEqual(usd_for(3.6, 100), 0.1)
        self.assertAlmostEqual(with_cold_start(1.0, 100, 20), 1.25)
        with self.assertRaises(ValueError):
            usd_per_million(1, 0)
        with self.assertRaises(ValueError):
            with_cold_start(1.0, 100, 100)

    def test_at_break_even_both_bills_are_the_same(self) -> None:
        api = ApiPrice(input=0.10, output=0.40)
        rate = break_even_tokens_per_s(1.35, api, 1024, 128)
        millions = million_tokens(rate, 1)
        self.assertAlmostEqual(millions * 0.40 + millions * 8 * 0.10, 1.35)
        self.assertAlmostEqual(usd_per_million(1.35, rate), api.per_million_output(1024, 128))
        self.assertGreater(break_even_tokens_per_s(1.35, replace(api, input=0), 1024, 128), rate)
        with self.assertRaises(ValueError):
            break_even_tokens_per_s(1.35, ApiPrice(0, 0), 1024, 128)

    def test_rates_come_out_of_the_table(self) -> None:
        rates = [p.rate.value for p in PRICES if (p.chip, p.provisioning) == ("v6e", "spot")]
        cheapest = min(rate for rate in rates if rate is not None)
        self.assertEqual(table_rate("v6e1", "spot")[0], cheapest)
        self.assertEqual(table_rate("v6e8", "spot")[0], 8 * cheapest)
        self.assertEqual(table_rate("cpu", "spot")[0], 0.0)
        rate, why = table_rate("h100", "on-demand")
        self.assertIsNone(rate)
        self.assertIn("H100", why)


class TestPlans(unittest.TestCase):
    def plan(self, context: int = 1152, streams: int = 64, **more: object) -> DeploymentPlan:
        asked = FitRequest(planned_model("E2B"), "bf16", "vllm", "v6e1", context, streams)
        return plan_of(asked, **more)  # type: ignore[arg-type]

    def test_the_article_s_own_deployment(self) -> None:
        plan = self.plan(provisioning="flex-start", api=ApiPrice(0.10, 0.40))
        self.assertAlmostEqual(plan.single.estimate, 213, delta=213 * 0.05)
        self.assertAlmostEqual(plan.asked.estimate, 2140, delta=2140 * 0.15)
        self.assertEqual(plan.cold_start.value, 510)
        assert plan.money is not None and plan.money.start is not None
        self.assertEqual(plan.money.per_hour, 1.35)
        self.assertAlmostEqual(plan.money.start, 0.19, delta=0.005)
        self.assertAlmostEqual(plan.money.per_million["64 streams"], 0.18, delta=0.18 * 0.15)
        assert plan.money.break_even is not None and plan.money.saturated_with_start is not None
        self.assertAlmostEqual(plan.money.break_even, 312.5)
        self.assertGreater(plan.money.saturated_with_start, plan.money.per_million["saturated"])
        self.assertEqual(plan.verdict.findings, ())

    def test_streams_that_are_not_resident_are_not_counted(self) -> None:
        plan = self.plan(context=65_536, streams=1000)
        self.assertEqual(plan.verdict.streams, 17)  # the article: seventeen conversations of 65K
        self.assertEqual(plan.asked.streams, 17)
        assert plan.saturated is not None
        self.assertLessEqual(plan.saturated.streams, 17)

    def test_a_plan_without_room_has_no_saturation_and_no_price_per_token(self) -> None:
        asked = FitRequest(planned_model("31B"), "bf16", "vllm", "v6e1", 4096)
        plan = plan_of(asked)
        self.assertIsNone(plan.saturated)
        assert plan.money is not None
        self.assertEqual(plan.money.per_million, {})

    def test_what_is_given_wins_over_the_tables(self) -> None:
        own = Figure(42, "s", "this test", "2026", kind="measured")
        plan = self.plan(usd_per_hour=7.2, cold_start=own)
        assert plan.money is not None and plan.money.start is not None
        self.assertEqual((plan.money.per_hour, plan.money.break_even), (7.2, None))
        self.assertAlmostEqual(plan.money.start, 7.2 * 42 / 3600)

    def test_an_answer_does_not_exceed_the_context(self) -> None:
        for output in (0, 1153):
            with self.assertRaisesRegex(ValueError, f"output {output}"):
                self.plan(output=output)

    def test_assumptions_own_up(self) -> None:
        def said(size: str, encoding: str, runtime: str, hardware: str) -> str:
            asked = FitRequest(planned_model(size), encoding, runtime, hardware, 4096, 128)
            return " | ".join(plan_of(asked).assumptions)

        self.assertIn("borrowed", said("E2B", "bf16", "vllm", "mi300x"))
        self.assertIn("no size of a pool", said("E2B", "bf16", "vllm", "g6"))
        self.assertIn("is a guess", said("E2B", "bf16", "vllm", "v6e1"))
        self.assertIn("expanded", said("12B", "w4a16", "jax", "v6e1"))
        self.assertIn("no bf16 arithmetic", said("E2B", "bf16", "vllm", "g4dn"))
        self.assertIn("between devices", said("31B", "bf16", "vllm", "v6e4"))
        self.assertIn("in the host's memory", said("E2B", "q4_0", "llamacpp", "1650ti"))
        self.assertIn("nobody publishes 26B-A4B in w4a16", said("26B-A4B", "w4a16", "jax", "v6e1"))
        for runtime, chip, size in (("jax", "t4g", "E2B"), ("vllm", "v6e", "12B")):
            self.assertEqual(len(known_misses(runtime, chip, size)), 1)
        self.assertEqual(known_misses("jax", "l4", "E2B"), [])
        self.assertIsNone(cold_start_figure("vllm", "h100", "E2B").value)


if __name__ == "__main__":
    unittest.main()
