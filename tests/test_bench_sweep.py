"""The simulated market, the policies over it, and what `make bench-sweep` prints."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import unittest
from dataclasses import fields, replace
from typing import Any

from forge import bench_sweep
from forge.bench_sweep import (
    DEADLINE_S,
    POLICIES,
    SweepRun,
    compared,
    everywhere,
    figures_of,
    main,
    plain_request,
    ratio_of,
    run_market,
    sequential,
    swept,
    table_of,
    unsafe_markets,
)
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest
from forge.sweep_market import (
    MARKET_ZONES,
    OTHER_MODELS,
    MarketModel,
    SimulatedClock,
    SimulatedMarket,
    memory_folder,
)

CALM = replace(OTHER_MODELS["no faults"], no_quota=0.0, hint=1.0)
ALWAYS_FREE = replace(CALM, scarce_s=1.0, free_s=1e9, queues=0.0)
NEVER_FREE = replace(CALM, scarce_s=1e9, free_s=1e-6, queues=0.0)


def market_of(model: MarketModel, seed: int = 1) -> SimulatedMarket:
    return SimulatedMarket(seed, SimulatedClock(), model)


def request_in(market: SimulatedMarket, zone: str, number: int = 1, **changes: Any) -> SweepRequest:
    return replace(plain_request(market, SweepPlace(zone, "flex-start"), number), **changes)


class MarketTest(unittest.TestCase):
    def look(self, market: SimulatedMarket, request: SweepRequest, after: float = 0.0) -> str:
        asyncio.run(market.clock.sleep(after))
        return asyncio.run(market.look(request)).state

    def error(self, market: SimulatedMarket, request: SweepRequest) -> RigError:
        with self.assertRaises(RigError) as caught:
            asyncio.run(market.ask(request))
        return caught.exception

    def test_where_there_is_capacity_a_request_starts_and_runs(self) -> None:
        market = market_of(ALWAYS_FREE)
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        self.assertEqual(self.look(market, request), "starting")
        self.assertEqual(self.look(market, request, 130), "granted")
        self.assertEqual(market.alive(), [request])

    def test_a_delete_takes_its_time_and_ends_the_bill(self) -> None:
        market = market_of(ALWAYS_FREE)
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        asyncio.run(market.clock.sleep(3600))
        asyncio.run(market.cancel(request))
        self.assertEqual(self.look(market, request), "granted")
        self.assertEqual(self.look(market, request, 30), "gone")
        self.assertEqual(market.alive(), [])
        self.assertAlmostEqual(market.spent_usd(market.clock.now() + 1e6, None), 1.35, delta=0.02)

    def test_a_delete_that_is_ignored_works_the_second_time(self) -> None:
        market = market_of(replace(ALWAYS_FREE, delete_ignored=1.0))
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        asyncio.run(market.cancel(request))
        self.assertNotEqual(self.look(market, request, 100), "gone")
        asyncio.run(market.cancel(request))
        self.assertEqual(self.look(market, request, 30), "gone")

    def test_a_lost_delete_did_its_work(self) -> None:
        market = market_of(replace(ALWAYS_FREE, delete_times_out=1.0))
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        with self.assertRaises(RigError) as caught:
            asyncio.run(market.cancel(request))
        self.assertEqual(caught.exception.error_class, "UNKNOWN")
        self.assertEqual(self.look(market, request, 30), "gone")

    def test_a_lost_ask_made_it_and_shows_it_late_within_what_is_promised(self) -> None:
        market = market_of(replace(ALWAYS_FREE, ask_times_out=1.0, timeout_made_it=1.0))
        request = request_in(market, MARKET_ZONES[0])
        self.assertEqual(self.error(market, request).error_class, "UNKNOWN")
        self.assertEqual(market.alive(), [request])
        self.assertNotEqual(self.look(market, request, market.settle_s), "gone")
        self.assertLess(MarketModel().shows_late_s, market.settle_s)
        self.assertLess(MarketModel().delete_s, market.gone_s)

    def test_a_lost_ask_may_have_made_nothing(self) -> None:
        market = market_of(replace(ALWAYS_FREE, ask_times_out=1.0, timeout_made_it=0.0))
        request = request_in(market, MARKET_ZONES[0])
        self.assertEqual(self.error(market, request).error_class, "UNKNOWN")
        self.assertEqual(market.alive(), [])

    def test_without_capacity_it_refuses_in_words_that_are_read_as_that(self) -> None:
        market = market_of(NEVER_FREE)
        error = self.error(market, request_in(market, MARKET_ZONES[0]))
        refusal = read_refusal(error.what, error.error_class)
        self.assertEqual(refusal.reason, "stockout")
        self.assertEqual(len(refusal.hints), 1)
        self.assertIn(refusal.hints[0], MARKET_ZONES[1:])
        self.assertEqual(market.alive(), [])

    def test_without_quota_it_refuses_in_words_that_are_read_as_that(self) -> None:
        market = market_of(replace(ALWAYS_FREE, no_quota=1.0, quota_known=0.0))
        error = self.error(market, request_in(market, MARKET_ZONES[0]))
        refusal = read_refusal(error.what, error.error_class)
        self.assertEqual((refusal.reason, refusal.scope), ("quota", "region"))
        self.assertEqual(market.quota_left(), {})

    def test_a_known_quota_is_the_real_one(self) -> None:
        for seed in range(20):
            market = market_of(replace(CALM, no_quota=0.5, quota_known=1.0), seed)
            self.assertEqual(len(market.quota_left()), len(market.places))
            for place, left in market.quota_left().items():
                self.assertEqual(left == 0, place.region in market.without_quota)

    def test_a_queue_without_capacity_expires_and_costs_nothing(self) -> None:
        states = set()
        for seed in range(20):
            market = market_of(replace(NEVER_FREE, queues=1.0), seed)
            request = request_in(market, MARKET_ZONES[0])
            asyncio.run(market.ask(request))
            self.assertEqual(self.look(market, request), "queued")
            states.add(self.look(market, request, request.valid_s))
            self.assertEqual(market.spent_usd(market.clock.now(), None), 0.0)
        self.assertEqual(states, {"gone", "refused"})

    def test_what_expired_and_stays_is_alive_until_it_is_deleted(self) -> None:
        for seed in range(20):
            market = market_of(replace(NEVER_FREE, queues=1.0), seed)
            request = request_in(market, MARKET_ZONES[0])
            asyncio.run(market.ask(request))
            if self.look(market, request, request.valid_s) == "refused":
                self.assertEqual(market.alive(), [request])
                asyncio.run(market.cancel(request))
                self.assertEqual(self.look(market, request, 30), "gone")

    def test_a_start_that_fails_says_so(self) -> None:
        market = market_of(replace(ALWAYS_FREE, start_fails=1.0))
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        asyncio.run(market.clock.sleep(200))
        look = asyncio.run(market.look(request))
        self.assertEqual(look.state, "gone")
        self.assertEqual(read_refusal(look.said).reason, "transient")

    def test_a_name_is_taken_once(self) -> None:
        market = market_of(ALWAYS_FREE)
        request = request_in(market, MARKET_ZONES[0])
        asyncio.run(market.ask(request))
        self.assertEqual(self.error(market, request).error_class, "EXISTS")

    def test_twins_are_counted_as_they_overlap(self) -> None:
        market = market_of(ALWAYS_FREE)
        first = request_in(market, MARKET_ZONES[0], 1)
        asyncio.run(market.ask(first))
        self.assertEqual(market.twins(), 0)
        asyncio.run(market.cancel(first))
        asyncio.run(market.clock.sleep(60))
        asyncio.run(market.ask(request_in(market, MARKET_ZONES[1], 2)))
        self.assertEqual(market.twins(), 0)
        asyncio.run(market.ask(request_in(market, MARKET_ZONES[2], 3)))
        self.assertEqual(market.twins(), 1)

    def test_the_hard_stop_ends_what_nobody_deletes(self) -> None:
        market = market_of(ALWAYS_FREE)
        request = request_in(market, MARKET_ZONES[0], life_s=7200)
        asyncio.run(market.ask(request))
        self.assertEqual(self.look(market, request, 8000), "gone")
        self.assertAlmostEqual(market.spent_usd(market.clock.now(), None), 2.7, delta=0.02)

    def test_one_seed_is_one_market(self) -> None:
        model = MarketModel()
        for seed in range(10):
            one, other = market_of(model, seed), market_of(model, seed)
            self.assertEqual(one.quota_left(), other.quota_left())
            self.assertEqual(vars(one)["_spells"], vars(other)["_spells"])
        self.assertNotEqual(
            vars(market_of(model, 1))["_spells"], vars(market_of(model, 2))["_spells"]
        )


class PolicyTest(unittest.TestCase):
    def test_every_policy_finds_where_there_is_capacity(self) -> None:
        for name, policy in POLICIES.items():
            run = run_market(3, policy, ALWAYS_FREE)
            self.assertTrue(run.found, name)
            self.assertLess(run.seconds, 600)
            self.assertEqual(run.orphans, 0)

    def test_no_policy_finds_where_there_is_none(self) -> None:
        for name, policy in POLICIES.items():
            run = run_market(3, policy, NEVER_FREE)
            self.assertFalse(run.found, name)
            self.assertGreaterEqual(run.seconds, DEADLINE_S)
            self.assertEqual((run.usd, run.twins, run.orphans), (0.0, 0, 0))

    def test_a_run_is_the_same_every_time_whatever_its_names_are(self) -> None:
        for policy in POLICIES.values():
            for seed in (0, 7):
                self.assertEqual(run_market(seed, policy), run_market(seed, policy))

    def test_asking_everywhere_makes_twins_where_everything_is_free(self) -> None:
        run = run_market(3, everywhere, ALWAYS_FREE)
        self.assertGreater(run.twins, 0)
        self.assertEqual(run.requests, len(MARKET_ZONES))

    def test_a_believed_delete_leaves_orphans(self) -> None:
        stubborn = replace(ALWAYS_FREE, delete_ignored=1.0)
        self.assertEqual(run_market(3, everywhere, stubborn).orphans, len(MARKET_ZONES) - 1)

    def test_a_lost_call_that_is_taken_for_a_failure_leaves_orphans(self) -> None:
        lossy = replace(ALWAYS_FREE, ask_times_out=0.9, timeout_made_it=1.0)
        plain = [run_market(seed, sequential, lossy) for seed in range(5)]
        self.assertGreater(sum(run.orphans for run in plain), 0)
        ours = [run_market(seed, swept, lossy) for seed in range(5)]
        self.assertEqual([(run.found, run.orphans, run.twins) for run in ours], [(True, 0, 0)] * 5)

    def test_the_sweep_is_safe_in_every_other_model_too(self) -> None:
        for name, model in OTHER_MODELS.items():
            runs = [run_market(seed, swept, model) for seed in range(4)]
            self.assertEqual([(r.twins, r.orphans) for r in runs], [(0, 0)] * 4, name)

    def test_other_models_differ_from_the_first_and_name_what_they_change(self) -> None:
        plain = MarketModel()
        for name, model in OTHER_MODELS.items():
            changed = [f.name for f in fields(plain) if vars(plain)[f.name] != vars(model)[f.name]]
            self.assertTrue(changed, name)


class FiguresTest(unittest.TestCase):
    def run_of(self, seconds: float, **changes: Any) -> SweepRun:
        values = {"found": True, "usd": 1.0, "requests": 2, "twins": 0, "orphans": 0}
        return SweepRun(seconds=seconds, **{**values, **changes})

    def test_figures_by_hand(self) -> None:
        runs = [self.run_of(float(n)) for n in range(1, 10)]
        runs.append(self.run_of(100.0, found=False, usd=11.0, twins=3, orphans=2))
        figures = figures_of(runs)
        self.assertEqual(figures["median_s"], 6)
        self.assertEqual(figures["p90_s"], 9)
        self.assertEqual(figures["found"], 9)
        self.assertEqual(figures["usd"], 2.0)
        self.assertEqual((figures["markets_with_twins"], figures["markets_with_orphans"]), (1, 1))

    def test_the_ratio_and_what_is_unsafe(self) -> None:
        good = figures_of([self.run_of(50.0)])
        results = {"sweep": good, "sequential": figures_of([self.run_of(200.0, orphans=1)])}
        self.assertEqual(ratio_of(results), 0.25)
        self.assertEqual(unsafe_markets(results), 0)
        results["sweep"] = figures_of([self.run_of(50.0, twins=1), self.run_of(50.0, orphans=2)])
        self.assertEqual(unsafe_markets(results), 2)

    def test_the_table_has_a_row_for_each_policy(self) -> None:
        rows = table_of(compared(1))
        self.assertEqual([row.split()[0] for row in rows[1:]], list(POLICIES))
        self.assertEqual(len({len(row) for row in rows}), 1)


class MainTest(unittest.TestCase):
    def printed(self, *words: str) -> tuple[int, list[str]]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = main(list(words))
        return status, out.getvalue().splitlines()

    def test_it_prints_a_table_and_ends_with_json(self) -> None:
        status, lines = self.printed("--markets", "4")
        self.assertEqual(status, 0)
        summary = json.loads(lines[-1])
        self.assertEqual(summary["bench"], "sweep")
        self.assertEqual(set(summary["results"]), set(POLICIES))
        self.assertEqual(set(summary["other_ratios"]), set(OTHER_MODELS))
        self.assertEqual(summary["model"]["usd_per_hour"], MarketModel().usd_per_hour)
        self.assertIn("the market is invented", lines[0])
        self.assertEqual(summary["unsafe"], 0)

    def test_a_twin_or_an_orphan_of_the_sweep_ends_it_with_one(self) -> None:
        # The policy that believes its deletes stands in the sweep's place.
        before = bench_sweep.POLICIES["sweep"]
        self.addCleanup(bench_sweep.POLICIES.__setitem__, "sweep", before)
        bench_sweep.POLICIES["sweep"] = everywhere
        status, lines = self.printed("--markets", "8")
        self.assertEqual(status, 1)
        self.assertGreater(json.loads(lines[-1])["unsafe"], 0)

    def test_a_simulation_writes_into_a_folder_that_goes_away(self) -> None:
        with memory_folder() as folder:
            path = bench_sweep.Path(folder)
            self.assertTrue(path.is_dir())
        self.assertFalse(path.exists())


if __name__ == "__main__":
    unittest.main()
