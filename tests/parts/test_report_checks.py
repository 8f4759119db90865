"""The plausibility gate and the comparison, against figures that are known to be wrong or right."""

from __future__ import annotations

import unittest
from typing import Any

from forge.parts.knowledge.geometry import FULL_LAYER, Geometry
from forge.parts.knowledge.report_checks import (
    implied_work,
    judged_report,
    peak_of_hardware,
    refusal_of_report,
    subject_of_model,
)
from forge.parts.knowledge.report_compare import (
    comparability_key,
    compared_reports,
    unusable_cell,
)
from forge.parts.knowledge.report_schema import (
    BenchCell,
    BenchReport,
    CellMetrics,
    Distribution,
    cell_id_of,
    health_of_client,
)
from tests.parts.report_samples import cell, lost_cell, report

IMPORTED = {"kind": "imported", "origin": "xbill9/gemma4-dev"}
L4 = {"slot": "l4", "chip": "l4"}
# Requests/s that the L4 grids of xbill9/gemma4-dev report (2026-06 and -07): their best at short
# prompts, 64 users at 1,024 tokens, and their best at 16,384. Output lengths are not recorded.
L4_GRIDS = {
    "google/gemma-4-E2B-it-qat-w4a16-ct": (166.2, 70.1, 16.5),
    "google/gemma-4-E4B-it-qat-w4a16-ct": (94.6, 59.2, 16.0),
    "google/gemma-4-12B-it-qat-w4a16-ct": (93.3, 25.6, 19.9),
    "google/gemma-4-31B-it-qat-w4a16-ct": (83.1, 29.6, 19.6),
}


def rate_cell(users: int, prompt: int, rps: float) -> BenchCell:
    """A cell that gives requests/s alone, as those grids do."""
    return BenchCell(
        id=cell_id_of(users, prompt, None),
        concurrency=users,
        input_tokens=prompt,
        status="ok",
        metrics=CellMetrics(request_rps=rps),
    )


def l4_grid(model: str) -> BenchReport:
    short, middle, long = L4_GRIDS[model]
    cells = [rate_cell(256, 4, short), rate_cell(64, 1024, middle), rate_cell(64, 16384, long)]
    return report(cells, model=model, encoding="w4a16", hardware=L4, run=IMPORTED)


def checks(made: BenchReport) -> list[str]:
    """The gate's verdicts on the first cell."""
    implied = implied_work(made, made.cells[0])
    assert implied is not None
    return implied.checks


class TestKnownGrids(unittest.TestCase):
    def test_the_l4_grids_are_refused_as_a_whole(self) -> None:
        for model in L4_GRIDS:
            with self.subTest(model=model):
                refusal = refusal_of_report(l4_grid(model))
                self.assertIn("i16384", refusal)
                self.assertIn("of 3 cells are impossible", refusal)

    def test_the_worst_cell_needs_155_times_the_chip(self) -> None:
        """18,800 TFLOP/s and 155 times the peak: worked out independently of this code."""
        grid = l4_grid("google/gemma-4-31B-it-qat-w4a16-ct")
        implied = implied_work(grid, grid.cells[2])
        assert implied is not None and implied.flops_share is not None
        self.assertAlmostEqual(implied.flops_share, 155, delta=2)

    def test_four_token_prompts_are_possible(self) -> None:
        grid = l4_grid("google/gemma-4-E2B-it-qat-w4a16-ct")
        implied = implied_work(grid, grid.cells[0])
        assert implied is not None
        self.assertEqual(implied.checks, [])

    def test_a_prefill_from_the_cache_shows_in_the_first_token(self) -> None:
        """8,192 tokens after 72 ms on a v5e: its author says himself that a cache answered."""
        sweep = {"hardware": {"slot": "v5e1", "chip": "v5e"}, "run": IMPORTED}
        fast = cell(4, 8192, output_tps=346, ttft_ms=72, tpot_ms=10.7, client=None)
        slow = cell(1, 8192, output_tps=94, ttft_ms=290, tpot_ms=8.43, client=None)
        made = report([fast, slow], **sweep)
        verdicts = [implied_work(made, c) for c in made.cells]
        self.assertEqual([bool(v and v.checks) for v in verdicts], [True, False])

    def test_the_cell_of_a_sweep_that_adds_up_passes(self) -> None:
        made = report()
        self.assertEqual(checks(made), [])
        implied = made.cells[0].implied
        assert implied is not None and implied.flops_share is not None
        # 9.375 requests/s x (1,024 x 3.754e9 + 128 x 4.560e9) over 918e12; the prefill of one
        # prompt within the 30 ms of its first token is the larger of the two.
        prefill = 1024 * 3.75421184e9 / 0.030 / 918e12
        self.assertAlmostEqual(implied.flops_share, prefill, places=3)


class TestGate(unittest.TestCase):
    def test_a_measured_cell_that_cannot_be_becomes_a_failed_one(self) -> None:
        made = report([cell(), cell(16, 8192, output_tps=1e6, ttft_ms=1)])
        self.assertEqual([c.status for c in made.cells], ["ok", "failed"])
        self.assertIsNone(made.cells[1].metrics)
        self.assertIn("TFLOP/s", made.cells[1].reason)
        self.assertEqual(judged_report(made), made)

    def test_decoding_faster_than_the_weights_can_be_read(self) -> None:
        # 4.56 GB a step at 1,638 GB/s takes 2.78 ms.
        self.assertEqual(checks(report([cell(1, output_tps=320, tpot_ms=2.9)], run=IMPORTED)), [])
        found = checks(report([cell(1, output_tps=500, tpot_ms=1.9)], run=IMPORTED))
        self.assertTrue(any("GB/s" in text for text in found), found)

    def test_speculative_decoding_is_not_judged_by_bytes(self) -> None:
        fast = cell(1, output_tps=500, tpot_ms=1.9)
        engine = {"resolved": {"speculative_tokens": 4}}
        self.assertEqual(checks(report([fast], run=IMPORTED, engine=engine)), [])

    def test_tokens_from_the_cache_cost_nothing(self) -> None:
        fields: dict[str, Any] = {"output_tps": 346, "ttft_ms": 20, "tpot_ms": 10.7}
        cold = report([cell(4, 8192, **fields)], run=IMPORTED)
        warm = report(
            [cell(4, 8192, metrics={"cached_tokens": 8000 * 120}, **fields)], run=IMPORTED
        )
        self.assertTrue(checks(cold))
        self.assertEqual(checks(warm), [])

    def test_an_engine_that_skips_the_sharing_layers_needs_less(self) -> None:
        shares = []
        for fast in (False, True):
            made = report(engine={"resolved": {"kv_sharing_fast_prefill": fast}})
            implied = made.cells[0].implied
            assert implied is not None and implied.flops_share is not None
            shares.append(implied.flops_share)
        self.assertLess(shares[1], 0.5 * shares[0])

    def test_eight_bit_arithmetic_counts_only_where_the_chip_has_it(self) -> None:
        ratios = {}
        for slot, chip in (("l4", "l4"), ("v5e1", "v5e"), ("t4", "t4")):
            hardware = report(hardware={"slot": slot, "chip": chip}).hardware
            sixteen = peak_of_hardware(hardware, "bf16").tflops
            eight = peak_of_hardware(hardware, "fp8").tflops
            assert sixteen and eight
            ratios[chip] = eight / sixteen
        self.assertEqual(ratios, {"l4": 2.0, "v5e": 1.0, "t4": 1.0})

    def test_several_devices_have_the_sum(self) -> None:
        one = peak_of_hardware(report().hardware, "bf16").gbs
        four = report(hardware={"slot": "v6e4", "chip": "v6e", "devices": 4}).hardware
        assert one is not None
        self.assertEqual(peak_of_hardware(four, "bf16").gbs, 4 * one)

    def test_a_cpu_is_judged_only_by_what_was_read_from_it(self) -> None:
        cpu: dict[str, Any] = {"slot": "cpu", "chip": "cpu"}
        fast = [cell(1, output_tps=500, tpot_ms=1.9)]
        unknown = report(fast, hardware=cpu)
        self.assertEqual(unknown.cells[0].status, "ok")
        cpu["bandwidth_gbs"] = {"value": 40, "unit": "GB/s", "how": "probed"}
        self.assertEqual(report(fast, hardware=cpu).cells[0].status, "failed")

    def test_a_model_outside_the_table_is_judged_by_its_shape(self) -> None:
        shape = Geometry(
            layer_types=(FULL_LAYER,) * 30,
            hidden=576,
            intermediate=1536,
            heads=9,
            kv_heads=3,
            global_kv_heads=3,
            head_dim=64,
            global_head_dim=64,
            vocab=49152,
            block_norms=2,
            head_norms=False,
        )
        subject = subject_of_model("embedded", "f32", shape)
        self.assertEqual(subject.short, "smollm2-135m")
        assert subject.work is not None
        # 134.5 M parameters, of which 28.3 M are the tied embedding.
        self.assertAlmostEqual(subject.work.step_bytes, 134.5e6 * 4, delta=0.5e6 * 4)
        self.assertAlmostEqual(subject.work.flops, 2 * 106.2e6, delta=1e6)
        made = report([cell(1, output_tps=1e5, tpot_ms=0.01)], run=IMPORTED)
        odd = made.model_copy(update={"subject": subject})
        self.assertTrue(checks(odd))

    def test_a_model_that_nobody_knows_is_not_judged(self) -> None:
        made = report([cell(1, output_tps=1e6, ttft_ms=0.001, tpot_ms=0.001)], model="a/b")
        implied = made.cells[0].implied
        assert implied is not None
        self.assertEqual((implied.flops_share, implied.bytes_share), (None, None))


class TestContradictions(unittest.TestCase):
    def found(self, **fields: Any) -> list[str]:
        return checks(report([cell(**fields)], run=IMPORTED))

    def test_rate_against_requests_times_length(self) -> None:
        self.assertEqual(self.found(metrics={"request_rps": 9.0}), [])
        self.assertEqual(len(self.found(metrics={"request_rps": 7.0})), 1)

    def test_rate_against_streams_over_the_time_of_a_token(self) -> None:
        self.assertEqual(self.found(tpot_ms=6.2), [])
        self.assertEqual(len(self.found(tpot_ms=8.5)), 1)

    def test_requests_in_flight_against_the_loop(self) -> None:
        held = {"e2e_ms": Distribution(n=120, mean=840, median=840)}
        self.assertEqual(self.found(metrics=held), [])
        held = {"e2e_ms": Distribution(n=120, mean=1100, median=1100)}
        self.assertEqual(len(self.found(metrics=held)), 1)

    def test_prompts_of_another_length_than_asked_for(self) -> None:
        for mean, count in ((1070.0, 0), (1080.0, 1), (960.0, 1)):
            with self.subTest(mean=mean):
                lengths = {"prompt_tokens": Distribution(n=120, mean=mean)}
                self.assertEqual(len(self.found(metrics=lengths)), count)

    def test_a_short_run_may_be_off_by_its_ramp(self) -> None:
        self.assertEqual(self.found(requests=16, metrics={"request_rps": 7.0}), [])


class TestComparison(unittest.TestCase):
    def pair(self, **second: Any) -> tuple[BenchReport, BenchReport]:
        return report(), report(repeat=2, **second)

    def test_the_same_thing_twice_is_ranked(self) -> None:
        result = compared_reports(*self.pair(), "build")
        self.assertEqual((result.blocking, result.left_out), ((), ()))
        self.assertEqual({c.figure for c in result.changes}, {"output_tps", "ttft_ms", "tpot_ms"})

    def test_each_difference_alone_forbids_a_ranking(self) -> None:
        for name, second in (
            ("workload", {"workload": {"name": "chat-turns"}}),
            ("prompts", {"workload": {"prompts": "repeated"}}),
            ("API", {"workload": {"api": "chat"}}),
            ("model", {"model": "google/gemma-4-E4B-it"}),
            ("encoding", {"encoding": "fp8"}),
            ("token counting", {"token_source": "chunks"}),
            ("hardware", {"hardware": {"slot": "v5e1", "chip": "v5e"}}),
            ("hardware", {"hardware": {"slot": "v6e4", "devices": 4}}),
            ("runtime", {"engine": {"name": "jax"}}),
            ("retracted", {"run": {"retracted": "the clock was wrong"}}),
        ):
            with self.subTest(name=name, second=second):
                result = compared_reports(*self.pair(**second), "build")
                self.assertEqual(len(result.blocking), 1, result.blocking)
                self.assertIn(name, result.blocking[0])
                self.assertEqual(result.changes, ())

    def test_a_question_lifts_exactly_its_own_ban(self) -> None:
        other_chip = {"hardware": {"slot": "v5e1", "chip": "v5e"}}
        other_engine = {"engine": {"name": "jax"}}
        for question, second, ranked in (
            ("hardware", other_chip, True),
            ("hardware", other_engine, False),
            ("runtime", other_engine, True),
            ("runtime", other_chip, False),
        ):
            with self.subTest(question=question, second=second):
                result = compared_reports(*self.pair(**second), question)  # type: ignore[arg-type]
                self.assertEqual(bool(result.changes), ranked)
                self.assertEqual(bool(result.also_differs), ranked)

    def test_one_card_under_two_slots_is_one_hardware(self) -> None:
        first = report(hardware={"slot": "g4dn", "chip": "t4"})
        second = report(hardware={"slot": "t4", "chip": "t4"})
        self.assertEqual(compared_reports(first, second, "build").blocking, ())

    def test_counting_that_is_unknown_in_both_is_not_the_same(self) -> None:
        unknown = {"token_source": "unknown"}
        result = compared_reports(report(**unknown), report(repeat=2, **unknown), "build")
        self.assertEqual(len(result.blocking), 1)

    def test_other_settings_are_named_and_do_not_forbid(self) -> None:
        second = {
            "workload": {"tool": "guidellm"},
            "engine": {"version": "0.33.0"},
            "subject": {"kv_dtype": {"value": "fp8", "evidence": "allocator"}},
        }
        result = compared_reports(*self.pair(**second), "build")
        self.assertTrue(result.changes)
        words = " ".join(result.also_differs)
        for what in ("guidellm", "0.33.0", "fp8"):
            self.assertIn(what, words)

    def test_cells_that_may_not_be_used_are_left_out_with_the_reason(self) -> None:
        tired = health_of_client(0.95, 1.0, 0.0)
        first = report([cell(1, output_tps=150), cell(8), cell(16), cell(32), cell(64)])
        second = report(
            [
                cell(1, output_tps=150),
                cell(8, client=tired),
                lost_cell(16, 1024, "failed", "the stream stalled"),
                cell(32, output_tps=1e9),
            ],
            repeat=2,
        )
        result = compared_reports(first, second, "build")
        self.assertEqual({c.cell for c in result.changes}, {"c1-i1024-o128"})
        reasons = dict(text.split(": ", 1) for text in result.left_out)
        self.assertIn("core", reasons["c8-i1024-o128"])
        self.assertIn("stalled", reasons["c16-i1024-o128"])
        self.assertIn("implausible", reasons["c32-i1024-o128"])
        self.assertIn("only in", reasons["c64-i1024-o128"])

    def test_a_difference_within_the_noise_is_none(self) -> None:
        for second_rate, verdict in ((1220.0, "same within the noise"), (1300.0, "better")):
            with self.subTest(second_rate=second_rate):
                first = report([cell(cv=0.01, repeats=5)])
                second = report([cell(cv=0.02, repeats=5, output_tps=second_rate)], repeat=2)
                result = compared_reports(first, second, "build")
                rate = next(c for c in result.changes if c.figure == "output_tps")
                self.assertEqual(rate.verdict, verdict)
                self.assertAlmostEqual(rate.change, second_rate / 1200 - 1)
                self.assertAlmostEqual(rate.noise or 0, 2 * (0.01**2 + 0.02**2) ** 0.5)

    def test_single_runs_have_no_verdict(self) -> None:
        result = compared_reports(*self.pair(), "build")
        self.assertEqual({c.verdict for c in result.changes}, {"noise unknown"})

    def test_slower_first_tokens_are_worse_not_better(self) -> None:
        rate = compared_reports(
            report([cell(cv=0.001, repeats=5)]),
            report([cell(cv=0.001, repeats=5, output_tps=1100)], repeat=2),
            "build",
        ).changes[0]
        self.assertEqual((rate.figure, rate.verdict), ("output_tps", "worse"))

    def test_the_key_holds_what_the_ranking_needs(self) -> None:
        one = report()
        keys = {
            comparability_key(made, made.cells[0])
            for made in (
                one,
                report(workload={"name": "other"}),
                report(token_source="chunks"),
                report(encoding="fp8"),
                report(model="google/gemma-4-E4B-it"),
                report([cell(4)]),
            )
        }
        self.assertEqual(len(keys), 6)

    def test_usable_is_ok_trusted_and_plausible(self) -> None:
        self.assertEqual(unusable_cell(report().cells[0]), "")
        self.assertTrue(unusable_cell(lost_cell(1, 8, "failed", "x")))


if __name__ == "__main__":
    unittest.main()
