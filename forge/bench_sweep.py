"""How fast, how dear and how safe the sweep is beside two others: `make bench-sweep`.

Over 200 simulated markets with fixed seeds (see forge/sweep_market.py: the market is invented).
Status 1 where the sweep makes a twin or leaves an orphan in any of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest, SweepWish, open_places
from forge.parts.planes.sweep import CapacitySweep
from forge.sweep_market import (
    MACHINE_TYPE,
    OTHER_MODELS,
    MarketModel,
    SimulatedClock,
    SimulatedMarket,
    memory_folder,
    read_in_process,
)

MARKETS = 200
DEADLINE_S = 6 * 3600.0
LIFE_S = 4 * 3600
# What Compute Engine lets a flex-start request wait at most: the full bound of who just waits.
FULL_BOUND_S = 7200.0
ROUND_PAUSE_S = 60.0  # of both other policies, between two rounds of refusals
SETTLED_S = 600.0  # after the end, so that what shows late and what is being deleted is decided
AIM_RATIO = 0.5


@dataclass(frozen=True)
class SweepRun:
    """One policy in one market: seconds to capacity (the deadline without it), and what is left."""

    seconds: float
    found: bool
    usd: float
    requests: int
    twins: int
    orphans: int


async def swept(market: SimulatedMarket, places: Sequence[SweepPlace]) -> SweepRequest | None:
    """The sweep itself."""
    with memory_folder() as folder:
        wish = SweepWish(
            project="a-project",
            machine=MACHINE_TYPE,
            name_stem="bench",
            places=places,
            deadline_unix=market.clock.now() + DEADLINE_S,
            life_s=LIFE_S,
            most_requests=10_000,
        )
        try:
            sweep = CapacitySweep(market, wish, Path(folder), market.clock, reader=read_in_process)
            record = await sweep.run()
        except RigError:
            return None
        return None if record.found is None else record.found.request


def plain_request(market: SimulatedMarket, place: SweepPlace, number: int) -> SweepRequest:
    """A request as the two other policies make it: valid as long as the provider allows."""
    return SweepRequest(
        name=f"plain-{number}",
        zone=place.zone,
        market=place.market,
        project="a-project",
        machine=MACHINE_TYPE,
        intent="",
        asked_unix=market.clock.now(),
        patience_s=FULL_BOUND_S,
        valid_s=FULL_BOUND_S,
        life_s=LIFE_S,
    )


async def read_state(market: SimulatedMarket, request: SweepRequest) -> str:
    """The state, or "unread": both other policies then simply look again."""
    try:
        return (await market.look(request)).state
    except RigError:
        return "unread"


async def cancelled_once(market: SimulatedMarket, request: SweepRequest) -> None:
    """One delete, believed: what both other policies do."""
    try:
        await market.cancel(request)
    except RigError:
        pass


async def sequential(market: SimulatedMarket, places: Sequence[SweepPlace]) -> SweepRequest | None:
    """Place after place: wait as long as the provider allows, delete, next. Any error: next."""
    clock, number = market.clock, 0
    deadline = clock.now() + DEADLINE_S
    while clock.now() < deadline:
        for place in places:
            number += 1
            request = plain_request(market, place, number)
            try:
                await market.ask(request)
            except RigError:
                continue
            while clock.now() < min(deadline, request.asked_unix + FULL_BOUND_S + 60):
                state = await read_state(market, request)
                if state == "granted":
                    return request
                if state in ("refused", "gone"):
                    break
                await clock.sleep(market.look_every_s)
            await cancelled_once(market, request)
        await clock.sleep(ROUND_PAUSE_S)
    return None


async def everywhere(market: SimulatedMarket, places: Sequence[SweepPlace]) -> SweepRequest | None:
    """All places at once: keep what is granted first, delete the rest. Calls go out together."""
    clock, number = market.clock, 0
    deadline = clock.now() + DEADLINE_S
    live: dict[SweepPlace, SweepRequest] = {}
    retry_at = clock.now()
    market.latency = False
    while clock.now() < deadline:
        if clock.now() >= retry_at:
            retry_at = clock.now() + ROUND_PAUSE_S
            for place in places:
                if place in live:
                    continue
                number += 1
                request = plain_request(market, place, number)
                try:
                    await market.ask(request)
                    live[place] = request
                except RigError:
                    continue
        await clock.sleep(market.model.call_s)
        for place, request in list(live.items()):
            state = await read_state(market, request)
            if state == "granted":
                await cancel_all(market, [r for r in live.values() if r is not request])
                return request
            if state in ("refused", "gone"):
                await cancelled_once(market, live.pop(place))
        await clock.sleep(market.look_every_s)
    await cancel_all(market, list(live.values()))
    return None


async def cancel_all(market: SimulatedMarket, requests: Sequence[SweepRequest]) -> None:
    """One delete each, at the same time."""
    for request in requests:
        await cancelled_once(market, request)


SweepPolicy = Callable[
    [SimulatedMarket, Sequence[SweepPlace]], Coroutine[Any, Any, SweepRequest | None]
]
POLICIES: dict[str, SweepPolicy] = {
    "sweep": swept,
    "sequential": sequential,
    "everywhere": everywhere,
}


def run_market(seed: int, policy: SweepPolicy, model: MarketModel | None = None) -> SweepRun:
    """One policy in the market of `seed`; every policy meets the same spells of capacity."""
    clock = SimulatedClock()
    market = SimulatedMarket(seed, clock, model)
    begun = clock.now()
    offered = dict.fromkeys(market.places, market.model.usd_per_hour)
    places, _ = open_places(market.places, offered, market.quota_left())
    kept = asyncio.run(policy(market, places))
    ended = clock.now()
    alive = market.alive(ended + SETTLED_S)
    return SweepRun(
        seconds=ended - begun if kept is not None else max(DEADLINE_S, ended - begun),
        found=kept is not None,
        usd=market.spent_usd(ended, kept),
        requests=len(market.things),
        twins=market.twins(),
        orphans=sum(request != kept for request in alive),
    )


def figures_of(runs: Sequence[SweepRun]) -> dict[str, Any]:
    """The figures of one policy over its markets; times in seconds, money in USD a market."""
    seconds = sorted(run.seconds for run in runs)
    return {
        "median_s": round(statistics.median(seconds)),
        "p90_s": round(seconds[int(0.9 * (len(seconds) - 1))]),
        "found": sum(run.found for run in runs),
        "usd": round(statistics.fmean(run.usd for run in runs), 3),
        "requests": round(statistics.fmean(run.requests for run in runs), 1),
        "markets_with_twins": sum(run.twins > 0 for run in runs),
        "markets_with_orphans": sum(run.orphans > 0 for run in runs),
    }


def ratio_of(results: dict[str, dict[str, Any]]) -> float:
    """The sweep's median time by the sequential one's."""
    return float(results["sweep"]["median_s"] / max(1, results["sequential"]["median_s"]))


def unsafe_markets(results: dict[str, dict[str, Any]]) -> int:
    """In how many markets the sweep made twins, and left orphans."""
    row = results["sweep"]
    return int(row["markets_with_twins"] + row["markets_with_orphans"])


def compared(
    markets: int, policies: Sequence[str] = tuple(POLICIES), model: MarketModel | None = None
) -> dict[str, dict[str, Any]]:
    """The figures of each policy over the markets of the seeds from 0 on."""
    return {
        name: figures_of([run_market(seed, POLICIES[name], model) for seed in range(markets)])
        for name in policies
    }


def table_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """The rows for people."""
    head = f"{'':12}{'median':>9}{'p90':>9}{'found':>7}{'USD':>8}{'made':>7}"
    rows = [f"{head}{'twins':>8}{'orphans':>9}"]
    for name, row in results.items():
        rows.append(
            f"{name:12}{row['median_s'] / 60:>5.0f} min{row['p90_s'] / 60:>5.0f} min"
            f"{row['found']:>7}{row['usd']:>8.2f}{row['requests']:>7.1f}"
            f"{row['markets_with_twins']:>8}{row['markets_with_orphans']:>9}"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table for people, end with one line of JSON. Status 1 for a twin or an orphan."""
    parser = argparse.ArgumentParser(prog="make bench-sweep", description=__doc__)
    parser.add_argument("--markets", type=int, default=MARKETS, help="how many, from seed 0 on")
    markets = max(1, parser.parse_args(argv).markets)
    begun = time.monotonic()
    results = compared(markets)
    ratio, unsafe = ratio_of(results), unsafe_markets(results)
    print(f"{markets} simulated markets; the market is invented, see forge/sweep_market.py")
    print("\n".join(table_of(results)))
    print("found, twins, orphans: markets. USD, made (requests that came to exist): mean a market;")
    print("USD of the found machine until it was found, of the others until their end.")
    reached = "reached" if ratio <= AIM_RATIO else "NOT reached"
    print(f"median against sequential: {ratio:.2f} (aim: at most {AIM_RATIO}, {reached})")
    others = {}
    for name, model in OTHER_MODELS.items():
        few = max(1, markets // 4)
        other = compared(few, ("sweep", "sequential"), model)
        others[name] = round(ratio_of(other), 3)
        unsafe += unsafe_markets(other)
        print(f"  {name + ',':20} {few} markets: {others[name]:.2f}")
    print(f"markets in which the sweep made twins or left orphans: {unsafe}")
    summary = {
        "bench": "sweep",
        "markets": markets,
        "model": asdict(MarketModel()),
        "results": results,
        "ratio": round(ratio, 3),
        "other_ratios": others,
        "unsafe": unsafe,
        "seconds": round(time.monotonic() - begun, 1),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(summary))
    return 1 if unsafe else 0


if __name__ == "__main__":
    sys.exit(main())
