"""The sweep against a scripted provider and against simulated markets, in simulated time."""

from __future__ import annotations

import asyncio
import json
import random
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.locks import held_lock
from forge.parts.knowledge.refusal_answer import Refusal, RefusalReader
from forge.parts.knowledge.sweep_plan import (
    ATTEMPTS_KEPT,
    ROUND_PATIENCE_S,
    START_PATIENCE_S,
    VALID_MARGIN_S,
    SweepPlace,
    SweepRecord,
    SweepRequest,
    SweepWish,
    next_place,
    open_places,
    queue_patience,
    sweep_record,
)
from forge.parts.knowledge.sweep_refusals import (
    QUOTA_REMEMBERED_S,
    STOCKOUT_REMEMBERED_S,
    TRANSIENT_REMEMBERED_S,
)
from forge.parts.planes.sweep import RECORD_FILE, REFUSALS_FILE, CapacitySweep
from forge.parts.planes.sweep_plane import SweepLook, SweepPlane, SweepState, WallClock
from forge.sweep_market import (
    BEGIN_UNIX,
    MarketModel,
    SimulatedClock,
    SimulatedMarket,
    memory_folder,
    read_in_process,
)

A, B, C, D = (
    SweepPlace(zone, "flex-start")
    for zone in ("us-east5-a", "us-east5-b", "us-east1-d", "europe-west4-a")
)
POOL = "code: ZONE_RESOURCE_POOL_EXHAUSTED"


def stockout(hints: str = "") -> RigError:
    text = f"{POOL} A ct6e-standard-1t VM instance is currently unavailable in the x zone."
    if hints:
        text += f" Consider trying your request in the {hints} zone(s), which currently have."
    return RigError("CAPACITY", text)


QUOTA = RigError("QUOTA", "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-east5.")
FAULT = RigError("INTERNAL", "code: INTERNAL_ERROR message: Internal error. Please try again.")
LOST = RigError("UNKNOWN", "the call did not return in time")


class ScriptedProvider:
    """A provider whose every answer is written down beforehand, by zone.

    An answer is an error (nothing is made), or a list of (seconds since the ask, look): what can be
    read from then on. `lost` names the zones whose next ask does its work and then times out,
    `ignored` how many deletes a zone accepts without doing anything.
    """

    look_every_s = 10.0
    settle_s = 60.0
    gone_s = 30.0
    queue_is_free = True

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.answers: dict[str, list[RigError | list[tuple[float, SweepLook]]]] = {}
        self.lost: set[str] = set()
        self.ignored: dict[str, int] = {}
        self.unreadable: set[str] = set()
        self.made: dict[str, tuple[SweepRequest, list[tuple[float, SweepLook]]]] = {}
        self.deleted: set[str] = set()
        self.asked: list[SweepRequest] = []
        self.cancelled: list[str] = []
        self.looks = 0
        self.most_alive = 0

    def alive(self) -> list[str]:
        """What exists, seen or not yet seen."""
        found = []
        for name, (asked, steps) in self.made.items():
            past = [look for at, look in steps if self.clock.now() >= asked.asked_unix + at]
            if name not in self.deleted and not (past and past[-1].state == "gone"):
                found.append(name)
        return found

    async def ask(self, request: SweepRequest) -> None:
        self.asked.append(request)
        queue = self.answers.get(request.zone, [])
        answer = (queue.pop(0) if len(queue) > 1 else queue[0]) if queue else stockout()
        await self.clock.sleep(1)
        if isinstance(answer, RigError):
            raise answer
        self.made[request.name] = (request, answer)
        self.most_alive = max(self.most_alive, len(self.alive()))
        if request.zone in self.lost:
            self.lost.discard(request.zone)
            raise LOST

    async def look(self, request: SweepRequest) -> SweepLook:
        self.looks += 1
        await self.clock.sleep(1)
        if request.zone in self.unreadable:
            raise RigError("UNREACHABLE", "503 Service Unavailable")
        if request.name not in self.made or request.name in self.deleted:
            return SweepLook("gone")
        asked, script = self.made[request.name]
        past = [look for at, look in script if self.clock.now() >= asked.asked_unix + at]
        return past[-1] if past else SweepLook("gone")

    async def cancel(self, request: SweepRequest) -> None:
        self.cancelled.append(request.zone)
        await self.clock.sleep(1)
        if self.ignored.get(request.zone, 0) > 0:
            self.ignored[request.zone] -= 1
            return
        self.deleted.add(request.name)

    @property
    def zones(self) -> list[str]:
        return [request.zone for request in self.asked]


def script(*steps: tuple[float, SweepState]) -> list[tuple[float, SweepLook]]:
    return [(at, SweepLook(state, provider_id="4711", created_at="then")) for at, state in steps]


def slow_reader(clock: SimulatedClock) -> RefusalReader:
    """A reader in a process of its own takes time, in which a sweep may be ended as well."""

    async def read(text: str, error_class: ErrorClass | None) -> Refusal:
        await clock.sleep(1)
        return await read_in_process(text, error_class)

    return read


async def broken_reader(text: str, error_class: ErrorClass | None) -> Refusal:
    """As asked_refusal fails."""
    raise RigError("NOT_FOUND", "triage.py is not beside server.py", "restore the rig's folder")


GRANTED = script((0, "granted"))
QUEUED = script((0, "queued"))


class Killed(BaseException):
    """Stands for the end of the process. Handlers still run in a test, as they do not in a killed
    process, so whoever kills puts the record back as it was at that moment."""


class SteppedClock(SimulatedClock):
    """Counts waits together with the plane's calls, and raises at one of them."""

    def __init__(
        self, at: int = -1, error: BaseException | None = None, dead: bool = False
    ) -> None:
        super().__init__()
        self.at, self.error, self.dead = at, error, dead
        self.steps = 0
        self.record: Path | None = None  # the file that is kept as it is at the moment of the kill
        self.kept: bytes | None = None

    def step(self) -> None:
        self.steps += 1
        hit = self.steps == self.at or (self.dead and 0 < self.at <= self.steps)
        if hit and self.error is not None:
            if self.steps == self.at and self.record is not None and self.record.exists():
                self.kept = self.record.read_bytes()
            raise self.error

    def put_back(self) -> None:
        """The record as the killed process left it, and a new process from here on."""
        assert self.record is not None
        if self.kept is None:
            self.record.unlink(missing_ok=True)
        else:
            self.record.write_bytes(self.kept)
        self.error = None

    async def sleep(self, seconds: float) -> None:
        # The error comes after half the time: calls of the provider sleep while they work, so this
        # kills before and after their effect.
        await super().sleep(seconds / 2)
        self.step()
        await super().sleep(seconds / 2)


class SweepCase(unittest.TestCase):
    """A folder, a clock, a provider, what reads its refusals, and what was told."""

    reader: RefusalReader

    def setUp(self) -> None:
        folder = memory_folder()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.clock = SteppedClock()
        self.provider = ScriptedProvider(self.clock)
        self.reader = read_in_process
        self.told: list[str] = []
        self.journal = Journal(self.folder / "journal.jsonl")

    def wish(self, *places: SweepPlace, hours: float = 12, **changes: Any) -> SweepWish:
        values: dict[str, Any] = {
            "project": "a-project",
            "machine": "ct6e-standard-1t",
            "name_stem": "rig-x",
            "places": places,
            "deadline_unix": self.clock.now() + hours * 3600,
            "life_s": 3600,
            "labels": {"rig": "rig-x"},
        }
        return SweepWish(**{**values, **changes})

    def sweep(
        self, *places: SweepPlace, plane: SweepPlane | None = None, **changes: Any
    ) -> CapacitySweep:
        return CapacitySweep(
            self.provider if plane is None else plane,
            self.wish(*places, **changes),
            self.folder,
            self.clock,
            self.told.append,
            self.journal,
            reader=self.reader,
        )

    def found(self, *places: SweepPlace, **changes: Any) -> SweepRecord:
        """The record of a sweep that must find; nothing but its machine lives."""
        record = asyncio.run(self.sweep(*places, **changes).run())
        assert record.found is not None
        self.assertEqual(self.provider.alive(), [record.found.request.name])
        self.assertLessEqual(self.provider.most_alive, 1)
        self.assertEqual(self.on_disk(), record)
        return record

    def refused(self, error_class: ErrorClass, *places: SweepPlace, **changes: Any) -> RigError:
        """The error of a sweep that must find nothing; nothing lives."""
        error = self.failed(error_class, *places, **changes)
        self.assertEqual(self.provider.alive(), [])
        self.assertIsNone(self.on_disk().live)
        return error

    def failed(self, error_class: ErrorClass, *places: SweepPlace, **changes: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            asyncio.run(self.sweep(*places, **changes).run())
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertLessEqual(self.provider.most_alive, 1)
        return caught.exception

    def on_disk(self) -> SweepRecord:
        return sweep_record(json.loads((self.folder / RECORD_FILE).read_text()))

    def assert_told(self, *parts: str) -> None:
        for part in parts:
            self.assertTrue(any(part in line for line in self.told), (part, self.told))


class OrderTest(SweepCase):
    def test_places_are_asked_in_the_order_of_the_wish(self) -> None:
        self.provider.answers = {C.zone: [GRANTED]}
        record = self.found(A, B, C, D)
        self.assertEqual(self.provider.zones, [A.zone, B.zone, C.zone])
        self.assertEqual(
            [attempt.ended for attempt in record.attempts], ["stockout"] * 2 + ["granted"]
        )

    def test_the_record_has_all_that_later_tools_need(self) -> None:
        self.provider.answers = {B.zone: [GRANTED]}
        found = self.found(A, B).found
        assert found is not None
        self.assertEqual(
            (found.zone, found.region, found.request.market), (B.zone, "us-east5", "flex-start")
        )
        self.assertEqual((found.provider_id, found.created_at), ("4711", "then"))
        self.assertEqual(
            (found.request.project, found.request.machine), ("a-project", "ct6e-standard-1t")
        )
        self.assertEqual(found.request.labels["rig"], "rig-x")
        self.assertEqual(found.request.labels["intent"], found.request.intent)
        self.assertEqual(found.request.life_s, 3600)

    def test_a_record_goes_to_plain_values_and_back(self) -> None:
        self.provider.answers = {B.zone: [GRANTED]}
        record = self.found(A, B)
        plain = json.loads(json.dumps(record.as_dict()))
        self.assertEqual(sweep_record(plain), record)
        plain["found"]["request"]["of a later version"] = 1
        plain["later"] = 2
        self.assertEqual(sweep_record(plain), record)
        self.assertGreater(record.waited_s or 0, 0)
        self.assertIsNone(SweepRecord().waited_s)
        for broken in ({}, {"v": 2}, {**plain, "found": 7}, {**plain, "attempts": [1]}):
            with self.assertRaises(ValueError):
                sweep_record(broken)

    def test_the_real_clock_serves_as_well(self) -> None:
        clock = WallClock()
        self.provider.clock = self.clock  # the provider's own work takes no real time
        self.provider.answers = {A.zone: [script((-1e10, "granted"))]}
        wish = self.wish(A, deadline_unix=clock.now() + 60)
        sweep = CapacitySweep(self.provider, wish, self.folder, clock, reader=read_in_process)
        found = asyncio.run(sweep.run()).found
        self.assertEqual(self.provider.alive(), [found and found.request.name])
        asyncio.run(clock.sleep(0))

    def test_no_name_is_used_twice_and_none_is_too_long(self) -> None:
        self.provider.answers = {A.zone: [stockout(), stockout(), GRANTED]}
        self.found(A, name_stem="a-very-long-name-of-a-rig-" * 5)
        names = [request.name for request in self.provider.asked]
        self.assertEqual(len(names), len(set(names)))
        self.assertTrue(all(len(name) <= 63 for name in names))
        self.assertEqual(len({request.intent for request in self.provider.asked}), 3)

    def test_what_is_not_worth_asking_is_not_asked_and_is_told(self) -> None:
        worth, passed = open_places([A, C, D, A, B], {A: 1.0, C: None, D: 2.0}, {C: 0, D: 3})
        self.assertEqual(worth, [A, D])
        self.assertEqual(
            [(p.place, p.reason) for p in passed], [(C, "no quota"), (B, "not on offer")]
        )
        self.provider.answers = {D.zone: [GRANTED]}
        self.found(*worth, passed_over=passed)
        self.assertEqual(self.provider.zones, [A.zone, D.zone])
        self.assert_told(f"Not asked: {B}", f"Not asked: {C}")

    def test_nowhere_to_ask(self) -> None:
        _, passed = open_places([A], {A: 1.0}, {A: 0})
        self.refused("QUOTA", passed_over=passed)
        self.refused("CAPACITY")
        self.assertEqual(self.provider.asked, [])


class RefusalTest(SweepCase):
    def test_a_hint_is_followed_before_the_order(self) -> None:
        self.provider.answers = {A.zone: [stockout(f"us-west9-z, {D.zone}")], D.zone: [GRANTED]}
        self.found(A, B, C, D)
        self.assertEqual(self.provider.zones, [A.zone, D.zone])
        self.assert_told(f"the provider names {D.zone}")

    def test_a_refusal_is_told_once_and_what_an_earlier_sweep_heard_as_skipped(self) -> None:
        self.refused("CAPACITY", A, B, hours=0.04)
        self.assertFalse(any("Skipped" in line for line in self.told), self.told)
        self.told.clear()
        self.refused("CAPACITY", A, B, hours=0.02)
        self.assertEqual(sum("Skipped" in line for line in self.told), 2)

    def test_a_wrong_hint_costs_one_request_and_makes_no_circle(self) -> None:
        self.provider.answers = {
            A.zone: [stockout(B.zone)],
            B.zone: [stockout(A.zone)],
            C.zone: [GRANTED],
        }
        self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, B.zone, C.zone])

    def test_a_hint_is_newer_than_what_an_earlier_sweep_was_told(self) -> None:
        self.refused("CAPACITY", D, hours=0.04)
        self.provider.asked.clear()
        self.provider.answers = {A.zone: [stockout(D.zone)], D.zone: [GRANTED]}
        self.found(A, B, D)
        self.assertEqual(self.provider.zones, [A.zone, D.zone])

    def test_a_quota_skips_its_region(self) -> None:
        self.provider.answers = {A.zone: [QUOTA], B.zone: [GRANTED], C.zone: [GRANTED]}
        self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, C.zone])
        self.assert_told("Refused in region us-east5: quota", f"Skipped {B}: quota just now")

    def test_quota_everywhere_ends_as_quota(self) -> None:
        self.provider.answers = {A.zone: [QUOTA]}
        self.refused("QUOTA", A, B, hours=0.5)
        self.assertEqual(self.provider.zones, [A.zone])

    def test_a_limit_of_the_project_ends_it_at_once(self) -> None:
        everywhere = RigError("QUOTA", "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.")
        self.provider.answers = {A.zone: [everywhere]}
        self.refused("QUOTA", A, B, C)
        self.assertEqual(self.provider.zones, [A.zone])

    def test_permission_login_and_usage_end_it_at_once(self) -> None:
        for text, error_class in {
            "Required 'compute.instances.create' permission for 'x'": "DENIED",
            "You do not currently have an active account selected.": "AUTH",
            "ERROR: (gcloud.x) unrecognized arguments: --y": "INVALID",
        }.items():
            self.provider.asked.clear()
            self.provider.answers = {A.zone: [RigError("INTERNAL", text)]}
            error = self.refused(error_class, A, B, C)  # type: ignore[arg-type]
            self.assertEqual(self.provider.zones, [A.zone])
            self.assertIn(text[:30], error.what)

    def test_a_price_skips_the_market_everywhere(self) -> None:
        spot = [SweepPlace(place.zone, "spot") for place in (A, C)]
        low = RigError("CAPACITY", "Your Spot request price of 0.1 is lower than the minimum")
        self.provider.answers = {A.zone: [low], C.zone: [GRANTED]}
        self.found(*spot, C)
        self.assertEqual([r.place for r in self.provider.asked], [spot[0], C])

    def test_a_fault_is_asked_once_more_and_then_left(self) -> None:
        self.provider.answers = {A.zone: [FAULT], B.zone: [GRANTED]}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone, A.zone, B.zone])
        self.setUp()
        self.provider.answers = {A.zone: [FAULT, GRANTED]}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone, A.zone])

    def test_after_refusals_everywhere_it_waits_and_asks_again(self) -> None:
        self.provider.answers = {B.zone: [stockout(), stockout(), GRANTED]}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone, B.zone] * 3)
        gaps = [
            later.asked_unix - earlier.asked_unix
            for earlier, later in zip(self.provider.asked, self.provider.asked[2:], strict=False)
        ]
        self.assertTrue(all(gap >= STOCKOUT_REMEMBERED_S for gap in gaps), gaps)
        self.assert_told("Every place has refused; asking again at")

    def test_a_restart_remembers_and_says_when(self) -> None:
        self.refused("CAPACITY", A, hours=0.04)
        self.provider.asked.clear()
        asyncio.run(self.clock.sleep(130))
        self.provider.answers = {A.zone: [GRANTED], C.zone: [GRANTED]}
        self.told.clear()
        self.found(A, C)
        self.assertEqual(self.provider.zones, [C.zone])
        self.assert_told(f"Skipped {A}: stockout 2 min ago.")

    def test_after_its_time_a_place_is_asked_again(self) -> None:
        self.provider.answers = {A.zone: [QUOTA]}
        self.refused("QUOTA", A, hours=0.5)
        asyncio.run(self.clock.sleep(QUOTA_REMEMBERED_S))
        self.provider.answers = {A.zone: [GRANTED]}
        self.found(A)

    def test_a_refused_request_that_exists_all_the_same_is_no_orphan(self) -> None:
        class Both(ScriptedProvider):
            async def ask(self, request: SweepRequest) -> None:
                await super().ask(request)
                if request.zone == A.zone:
                    raise stockout()

        for states, zone in ((GRANTED, A.zone), (script((0, "refused")), B.zone)):
            self.setUp()
            self.provider = Both(self.clock)
            self.provider.answers = {A.zone: [states], B.zone: [GRANTED]}
            found = self.found(A, B).found
            self.assertEqual(found and found.zone, zone)

    def test_a_refusal_of_a_single_call_needs_no_look_that_succeeds(self) -> None:
        """Whoever is not let in to ask is not let in to look: the login that is over is told now,
        and not after minutes as a machine that may exist."""

        class Single(ScriptedProvider):
            asks_in_one_call = True

        over = RigError("AUTH", "(RequestExpired) Request has expired.")
        for kind, error_class, most in ((Single, "AUTH", 30.0), (ScriptedProvider, "UNKNOWN", 9e9)):
            with self.subTest(kind.__name__):
                self.setUp()
                self.provider = kind(self.clock)
                self.provider.answers = {A.zone: [stockout()], B.zone: [over]}
                self.provider.unreadable = {A.zone, B.zone}
                began = self.clock.now()
                self.failed(cast(ErrorClass, error_class), A, B, C)
                self.assertLess(self.clock.now() - began, most)
                ended = ["stockout", "auth"] if kind is Single else []
                self.assertEqual([one.ended for one in self.on_disk().attempts], ended)

    def test_what_a_single_call_made_although_it_was_refused_is_no_orphan(self) -> None:
        class Both(ScriptedProvider):
            asks_in_one_call = True

            async def ask(self, request: SweepRequest) -> None:
                await super().ask(request)
                if request.zone == A.zone:
                    raise stockout()

        self.provider = Both(self.clock)
        self.provider.answers = {A.zone: [GRANTED], B.zone: [GRANTED]}
        found = self.found(A, B).found
        self.assertEqual(found and found.zone, A.zone)

    def test_a_dead_request_is_deleted_before_the_next(self) -> None:
        said = "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0"
        dead = [(0.0, SweepLook("queued")), (30.0, SweepLook("refused", said))]
        self.provider.answers = {A.zone: [dead], C.zone: [GRANTED]}
        record = self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, C.zone])
        self.assertEqual(self.provider.cancelled, [A.zone])
        self.assertEqual(record.attempts[0].ended, "quota")

    def test_a_request_that_vanishes_without_a_word_counts_as_a_stockout(self) -> None:
        self.provider.answers = {
            A.zone: [script((0, "queued"), (40, "starting"), (80, "gone"))],
            B.zone: [GRANTED],
        }
        record = self.found(A, B)
        self.assertEqual(record.attempts[0].ended, "stockout")
        self.assertEqual(self.provider.zones, [A.zone, B.zone])

    def test_a_fault_while_starting_is_read(self) -> None:
        gone = [(0.0, SweepLook("starting")), (20.0, SweepLook("gone", "code: INTERNAL_ERROR"))]
        self.provider.answers = {A.zone: [gone], B.zone: [GRANTED]}
        record = self.found(A, B)
        self.assertEqual([a.ended for a in record.attempts], ["transient", "transient", "granted"])
        self.assertGreater(TRANSIENT_REMEMBERED_S, 0)


class QueueTest(SweepCase):
    def test_the_rule_of_leaving(self) -> None:
        self.assertEqual(
            [queue_patience(n, 0, 1e9) for n in range(6)], [*ROUND_PATIENCE_S, 7200, 7200]
        )
        self.assertEqual(queue_patience(0, None, 1e9), ROUND_PATIENCE_S[-1])
        self.assertEqual(queue_patience(0, 500, 1e9), 500)
        self.assertEqual(queue_patience(0, 1e6, 1e9), ROUND_PATIENCE_S[-1])
        self.assertEqual(queue_patience(3, 0, 100), 100)
        self.assertEqual(queue_patience(0, None, -5), 0)
        self.assertEqual(sorted(ROUND_PATIENCE_S), list(ROUND_PATIENCE_S))

    def test_the_rule_of_the_next_place(self) -> None:
        self.assertEqual(next_place([A, B, C], {}, ()), A)
        self.assertEqual(next_place([A, B, C], {A: 1, B: 1}, ()), C)
        self.assertEqual(next_place([A, B, C], {A: 1, B: 1, C: 1}, ()), A)
        self.assertEqual(next_place([A, B, C], {C: 5}, ("x", C.zone)), C)
        self.assertIsNone(next_place([], {}, (A.zone,)))

    def test_a_queue_that_stands_still_is_left_for_another_place(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [GRANTED]}
        record = self.found(A, B)
        self.assertEqual(record.attempts[0].ended, "left")
        waited = record.attempts[0].ended_unix - record.attempts[0].asked_unix
        self.assertGreaterEqual(waited, ROUND_PATIENCE_S[0])
        self.assertLess(waited, ROUND_PATIENCE_S[0] + VALID_MARGIN_S)
        self.assertEqual(self.provider.cancelled, [A.zone])

    def test_each_round_waits_longer(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [QUEUED]}
        self.refused("CAPACITY", A, B, hours=3)
        waits = [round(r.patience_s) for r in self.provider.asked if r.zone == A.zone]
        self.assertEqual(waits[:3], [round(wait) for wait in ROUND_PATIENCE_S[:3]])

    def test_the_only_place_is_waited_for_as_long_as_the_provider_allows(self) -> None:
        self.provider.answers = {A.zone: [script((0, "queued"), (7000, "granted"))]}
        self.found(A)
        self.assertEqual(len(self.provider.asked), 1)

    def test_a_queue_is_not_left_for_places_that_have_just_refused(self) -> None:
        self.provider.answers = {
            A.zone: [QUOTA],
            C.zone: [script((0, "queued"), (3000, "granted"))],
        }
        self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, C.zone])

    def test_the_provider_may_keep_it_little_longer_than_the_sweep(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [GRANTED]}
        self.found(A, B)
        for request in self.provider.asked:
            self.assertLessEqual(request.valid_s, request.patience_s + VALID_MARGIN_S)
            self.assertLessEqual(request.valid_s, ROUND_PATIENCE_S[-1])

    def test_a_machine_that_starts_is_not_left(self) -> None:
        late = script((0, "queued"), (170, "starting"), (600, "granted"))
        self.provider.answers = {A.zone: [late], B.zone: [GRANTED]}
        found = self.found(A, B).found
        self.assertEqual(found and found.zone, A.zone)

    def test_a_start_that_never_ends_is_left(self) -> None:
        self.provider.answers = {A.zone: [script((0, "starting"))], B.zone: [GRANTED]}
        record = self.found(A, B)
        waited = record.attempts[0].ended_unix - record.attempts[0].asked_unix
        self.assertGreaterEqual(waited, START_PATIENCE_S)

    def test_waiting_is_told_honestly(self) -> None:
        self.provider.answers = {
            A.zone: [script((0, "queued"), (400, "starting"), (700, "granted"))]
        }
        self.found(A)
        self.assert_told(f"Still queued in {A} since 08:00 UTC, costs nothing until granted.")
        self.assert_told(f"Starting in {A} since 08:00 UTC.", f"Granted in {A}: rig-x-")
        self.assertLess(len(self.told), 10)
        self.setUp()
        self.provider.queue_is_free = False
        self.provider.answers = {A.zone: [script((0, "queued"), (400, "granted"))]}
        self.found(A)
        self.assertFalse(any("costs nothing" in line for line in self.told))

    def test_a_request_that_is_seen_late_is_not_taken_for_gone(self) -> None:
        self.provider.answers = {A.zone: [script((45, "queued"), (90, "granted"))]}
        record = self.found(A, B)
        self.assertEqual([attempt.ended for attempt in record.attempts], ["granted"])
        self.assert_told("not to be seen yet")


class UnknownTest(SweepCase):
    def test_a_lost_call_that_made_it_is_adopted(self) -> None:
        self.provider.answers = {A.zone: [script((40, "granted"))], B.zone: [GRANTED]}
        self.provider.lost = {A.zone}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone])
        self.assert_told("is not known; reading", "although the call failed")

    def test_a_lost_call_that_made_it_and_is_queued_is_followed_and_left(self) -> None:
        self.provider.answers = {A.zone: [script((50, "queued"))], B.zone: [GRANTED]}
        self.provider.lost = {A.zone}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone, B.zone])
        self.assertEqual(self.provider.cancelled, [A.zone])

    def test_a_lost_call_that_made_nothing_stops_all_until_it_is_settled(self) -> None:
        self.provider.answers = {A.zone: [LOST], B.zone: [GRANTED]}
        record = self.found(A, B)
        first, second = self.provider.asked
        self.assertGreaterEqual(second.asked_unix - first.asked_unix, self.provider.settle_s)
        self.assertGreater(self.provider.looks, 3)
        self.assertEqual(record.attempts[0].ended, "unknown")

    def test_a_call_that_was_carried_out_at_its_very_end_is_found(self) -> None:
        class Slow(ScriptedProvider):
            async def ask(self, request: SweepRequest) -> None:
                self.asked.append(request)
                await self.clock.sleep(600)
                if request.zone == A.zone:
                    late = script((640, "granted"))
                    self.made[request.name] = (request, late)
                    raise LOST

        self.provider = Slow(self.clock)
        found = self.found(A, B).found
        self.assertEqual(found and found.zone, A.zone)

    def test_an_unheard_of_refusal_is_settled_by_reading_too(self) -> None:
        odd = RigError("INTERNAL", "x")
        odd.error_class = "NOT_FOUND"
        self.provider.answers = {A.zone: [odd], B.zone: [GRANTED]}
        self.found(A, B)
        first, second = self.provider.asked
        self.assertGreaterEqual(second.asked_unix - first.asked_unix, self.provider.settle_s)

    def test_a_name_that_exists_is_ours_from_a_call_that_failed_before(self) -> None:
        class Twice(ScriptedProvider):
            async def ask(self, request: SweepRequest) -> None:
                await super().ask(request)
                raise RigError("EXISTS", f"The resource '{request.name}' already exists")

        self.provider = Twice(self.clock)
        self.provider.answers = {A.zone: [GRANTED]}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone])

    def test_while_nothing_can_be_read_nothing_else_is_asked(self) -> None:
        self.provider.answers = {A.zone: [GRANTED], B.zone: [GRANTED]}
        self.provider.lost = self.provider.unreadable = {A.zone}
        self.provider.unreadable = {A.zone}
        error = self.failed("UNKNOWN", A, B)
        self.assertEqual(self.provider.zones, [A.zone])
        live = self.on_disk().live
        assert live is not None
        self.assertIn(live.name, error.what)
        self.assertIn(A.zone, error.what)
        self.assert_told("may still exist")
        # The next sweep goes nowhere either, until a read settles it.
        self.provider.ignored = {A.zone: 99}
        self.failed("UNKNOWN", A, B)
        self.assertEqual(self.provider.zones, [A.zone])

    def test_the_next_sweep_settles_what_could_not_be_read(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [GRANTED]}
        self.provider.unreadable = {A.zone}
        self.provider.ignored = {A.zone: 4}
        self.failed("UNKNOWN", A, B)
        self.assertEqual(len(self.provider.alive()), 1)
        self.provider.unreadable = set()
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone, A.zone, B.zone])
        self.assert_told("An earlier sweep left rig-x-")

    def test_reads_that_come_back_make_it_unreachable_and_leave_nothing(self) -> None:
        self.provider.answers = {A.zone: [QUEUED]}
        self.provider.unreadable = {A.zone}
        provider = self.provider

        class Recovering(ScriptedProvider):
            async def cancel(self, request: SweepRequest) -> None:
                await super().cancel(request)
                self.unreadable = set()

        self.provider = Recovering(self.clock)
        self.provider.answers, self.provider.unreadable = provider.answers, {A.zone}
        self.refused("UNREACHABLE", A, B)


class UnreadTest(SweepCase):
    """What reads the refusals fails: the class that the plane found decides, and no text does."""

    def setUp(self) -> None:
        super().setUp()
        self.reader = broken_reader

    def test_a_stockout_by_its_class_sends_the_sweep_on_without_a_hint(self) -> None:
        self.provider.answers = {A.zone: [stockout(C.zone)], B.zone: [GRANTED]}
        record = self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, B.zone])
        self.assertEqual(record.attempts[0].ended, "stockout")
        self.assertIn("RESOURCE_POOL_EXHAUSTED", record.attempts[0].said)
        self.assert_told("could not be read (triage.py is not beside server.py)")

    def test_a_quota_by_its_class_shuts_the_region(self) -> None:
        self.provider.answers = {A.zone: [QUOTA], B.zone: [GRANTED], C.zone: [GRANTED]}
        self.found(A, B, C)
        self.assertEqual(self.provider.zones, [A.zone, C.zone])

    def test_what_stops_by_its_class_stops_with_the_providers_words(self) -> None:
        words = "Required 'compute.instances.create' permission for 'projects/a-project'"
        for error_class in ("DENIED", "AUTH", "INVALID"):
            with self.subTest(error_class):
                self.provider = ScriptedProvider(self.clock)
                self.provider.answers = {A.zone: [RigError(error_class, words)]}
                error = self.refused(error_class, A, B)
                self.assertIn(words, error.what)
                self.assertEqual(self.provider.zones, [A.zone])

    def test_a_lost_call_is_settled_by_looks(self) -> None:
        self.provider.answers = {A.zone: [script((50, "granted"))], B.zone: [GRANTED]}
        self.provider.lost = {A.zone}
        self.found(A, B)
        self.assertEqual(self.provider.zones, [A.zone])
        self.provider = ScriptedProvider(self.clock)
        self.provider.answers = {C.zone: [LOST], D.zone: [GRANTED]}
        self.forget()
        record = self.found(C, D)
        first = record.attempts[0]
        self.assertEqual(first.ended, "unknown")
        self.assertGreaterEqual(first.ended_unix - first.asked_unix, self.provider.settle_s)

    def test_a_class_that_nobody_foresaw_is_settled_by_looks_too(self) -> None:
        odd = RigError("NOT_FOUND", "no such thing")
        self.provider.answers = {A.zone: [odd], B.zone: [GRANTED]}
        first = self.found(A, B).attempts[0]
        self.assertEqual(first.ended, "unknown")
        self.assertGreaterEqual(first.ended_unix - first.asked_unix, self.provider.settle_s)

    def test_a_request_that_died_is_cancelled_and_left_whatever_was_said_of_it(self) -> None:
        for state, ended in (("refused", "expired"), ("gone", "stockout")):
            with self.subTest(state):
                self.forget()
                self.provider = ScriptedProvider(self.clock)
                look = SweepLook(state, said="Required 'x.y.z' permission")  # type: ignore[arg-type]
                self.provider.answers = {
                    A.zone: [[(0, SweepLook("queued")), (20, look)]],
                    B.zone: [GRANTED],
                }
                self.assertEqual(self.found(A, B).attempts[0].ended, ended)

    def test_an_unread_text_is_quoted_short_and_without_secrets(self) -> None:
        secret = "hf_" + "a1B2" * 9
        self.provider.answers = {
            A.zone: [RigError("DENIED", f"token {secret}\n" + "word " * 2000 + secret)]
        }
        error = self.refused("DENIED", A)
        self.assertNotIn(secret, str(error) + (self.folder / RECORD_FILE).read_text())
        self.assertLess(len(error.what), 1000)

    def forget(self) -> None:
        for name in (RECORD_FILE, REFUSALS_FILE):
            (self.folder / name).unlink(missing_ok=True)


class GiveUpTest(SweepCase):
    def test_the_deadline_cancels_what_waits(self) -> None:
        self.provider.answers = {A.zone: [QUEUED]}
        begun = self.clock.now()
        error = self.refused("CAPACITY", A, hours=1)
        self.assertEqual(self.provider.cancelled, [A.zone])
        self.assertGreaterEqual(self.clock.now(), begun + 3600)
        self.assertLess(self.clock.now(), begun + 3600 + 120)
        self.assertIn("none of them exists any more", error.what)

    def test_a_start_does_not_outlast_the_deadline(self) -> None:
        self.provider.answers = {A.zone: [script((0, "starting"))]}
        begun = self.clock.now()
        self.refused("CAPACITY", A, hours=0.1)
        self.assertLess(self.clock.now(), begun + 360 + 120)

    def test_refusals_alone_end_at_the_deadline(self) -> None:
        begun = self.clock.now()
        self.refused("CAPACITY", A, B, hours=2)
        self.assertLessEqual(self.clock.now(), begun + 7200 + 60)
        self.assertGreater(len(self.provider.asked), 20)

    def test_the_number_of_requests_is_a_limit(self) -> None:
        self.refused("CAPACITY", A, B, C, most_requests=4)
        self.assertEqual(len(self.provider.asked), 4)
        self.provider.answers = {A.zone: [FAULT]}
        self.setUp()
        self.provider.answers = {A.zone: [FAULT]}
        self.refused("CAPACITY", A, most_requests=1)
        self.assertEqual(len(self.provider.asked), 1)

    def test_a_delete_that_did_nothing_is_asked_for_again(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [GRANTED]}
        self.provider.ignored = {A.zone: 2}
        self.found(A, B)
        self.assertEqual(self.provider.cancelled, [A.zone] * 3)

    def test_a_delete_that_never_works_is_told_with_its_name_and_place(self) -> None:
        self.provider.answers = {A.zone: [QUEUED], B.zone: [GRANTED]}
        self.provider.ignored = {A.zone: 99}
        error = self.failed("UNKNOWN", A, B)
        (name,) = self.provider.alive()
        for part in (name, A.zone, "a-project", "may cost money"):
            self.assertIn(part, error.what)
        self.assertEqual(self.provider.zones, [A.zone])
        record = self.on_disk()
        self.assertEqual((record.live and record.live.name, record.phase), (name, "cancelling"))
        self.assert_told(f"{name} in {A} may still exist")

    def test_a_cancel_that_is_not_allowed_says_so(self) -> None:
        class Forbidding(ScriptedProvider):
            async def cancel(self, request: SweepRequest) -> None:
                self.cancelled.append(request.zone)
                raise RigError("DENIED", "Required 'compute.instances.delete' permission for 'x'")

        self.provider = Forbidding(self.clock)
        self.provider.answers = {A.zone: [QUEUED]}
        self.assertIn("failed (DENIED)", self.failed("UNKNOWN", A, B).what)
        self.assertGreater(len(self.provider.cancelled), 1)

    def test_a_disk_that_is_full_by_then_does_not_keep_it_from_cancelling(self) -> None:
        folder = self.folder

        class FullLater(ScriptedProvider):
            async def ask(self, request: SweepRequest) -> None:
                await super().ask(request)
                path = folder / RECORD_FILE
                path.unlink()
                path.mkdir()

        self.provider = FullLater(self.clock)
        self.provider.answers = {A.zone: [QUEUED]}
        self.failed("DENIED", A, B)
        self.assertEqual(self.provider.alive(), [])
        self.assertEqual(self.provider.cancelled, [A.zone])

    def test_a_cancellation_cancels_and_goes_on(self) -> None:
        self.provider.answers = {A.zone: [QUEUED]}

        async def cancelled() -> None:
            task = asyncio.create_task(self.sweep(A, B).run())
            while not self.provider.made:
                await asyncio.sleep(0)
            task.cancel()
            await task

        class Yielding(SteppedClock):
            async def sleep(self, seconds: float) -> None:
                await asyncio.sleep(0)
                await super().sleep(seconds)

        self.clock = Yielding()
        self.provider.clock = self.clock
        with self.assertRaises(asyncio.CancelledError):
            asyncio.run(cancelled())
        self.assertEqual(self.provider.alive(), [])
        self.assertIsNone(self.on_disk().live)
        self.assert_told("Giving up; cancelling rig-x-")

    def test_a_cancellation_that_leaves_something_is_not_silent(self) -> None:
        self.clock.at, self.clock.error = 9, asyncio.CancelledError()
        self.provider.answers = {A.zone: [QUEUED]}
        self.provider.ignored = {A.zone: 99}
        error = self.failed("UNKNOWN", A)
        self.assertIsInstance(error.__cause__, asyncio.CancelledError)
        self.assertEqual([self.on_disk().live.name], self.provider.alive())  # type: ignore[union-attr]


class RestartTest(SweepCase):
    def test_what_was_found_is_given_again_while_it_exists(self) -> None:
        self.provider.answers = {B.zone: [GRANTED]}
        first = self.found(A, B)
        again = self.found(A, B)
        self.assertEqual(first.found, again.found)
        self.assertEqual(len(self.provider.asked), 2)

    def test_after_a_release_or_a_destruction_it_sweeps_anew(self) -> None:
        self.provider.answers = {A.zone: [GRANTED]}
        first = self.found(A)
        self.provider.deleted.update(self.provider.alive())
        second = self.found(A)
        self.assertNotEqual(first.found, second.found)
        asyncio.run(self.sweep(A).release())
        self.assertIsNone(self.on_disk().found)

    def test_what_was_found_and_cannot_be_read_stops_the_next(self) -> None:
        self.provider.answers = {A.zone: [GRANTED]}
        self.found(A)
        self.provider.unreadable = {A.zone}
        self.failed("UNKNOWN", B)
        self.assertEqual(len(self.provider.asked), 1)
        self.assertIsNotNone(self.on_disk().found)

    def test_another_kind_of_machine_is_not_given_as_the_one_that_was_wished(self) -> None:
        self.provider.answers = {A.zone: [GRANTED]}
        self.found(A)
        self.failed("EXISTS", A, machine="another")
        self.assertEqual(len(self.provider.asked), 1)

    def test_another_project_is_settled_there(self) -> None:
        self.provider.answers = {A.zone: [GRANTED]}
        name = self.found(A).found.request.name  # type: ignore[union-attr]
        error = self.failed("DENIED", A, project="another")
        self.assertIn(name, error.what)
        self.assertEqual(self.provider.cancelled, [])

    def test_a_queued_request_of_a_killed_sweep_is_waited_for(self) -> None:
        self.kill_at(12, QUEUED)
        self.provider.made = {n: (r, GRANTED) for n, (r, _) in self.provider.made.items()}
        self.found(A, B)
        self.assertEqual(len(self.provider.asked), 1)

    def test_a_queued_request_that_is_not_wished_any_more_is_cancelled(self) -> None:
        self.kill_at(12, QUEUED)
        self.provider.answers = {C.zone: [GRANTED]}
        found = self.found(B, C).found
        self.assertEqual(found and found.zone, C.zone)
        self.assertEqual(self.provider.cancelled, [A.zone])

    def kill_at(self, step: int, answer: list[tuple[float, SweepLook]]) -> None:
        self.provider.answers = {A.zone: [answer]}
        self.clock.at, self.clock.error, self.clock.dead = step, Killed(), True
        self.clock.record = self.folder / RECORD_FILE
        with self.assertRaises(Killed):
            asyncio.run(self.sweep(A, B).run())
        self.clock.put_back()
        self.assertEqual([self.on_disk().live.name], self.provider.alive())  # type: ignore[union-attr]

    def test_a_damaged_record_stops_until_a_person_removed_it(self) -> None:
        path = self.folder / RECORD_FILE
        self.provider.answers = {A.zone: [GRANTED]}
        for text in ("{broken", "[]", '{"v": 99}', '{"v": 1, "live": {"name": "x"}}'):
            path.write_text(text)
            for _ in range(2):
                error = self.failed("UNKNOWN", A)
                self.assertIn("damaged", error.what)
            self.assertEqual(self.provider.asked, [])
            for left in self.folder.glob("sweep.*"):
                if left.suffix in (".json", ".damaged"):
                    left.unlink()
        self.found(A)

    def test_two_sweeps_of_one_folder_exclude_each_other(self) -> None:
        async def both() -> None:
            async with held_lock(self.folder, "sweep"):
                await self.sweep(A).run()

        with self.assertRaises(RigError) as caught:
            asyncio.run(both())
        self.assertEqual(caught.exception.error_class, "BUSY")
        self.assertEqual(self.provider.asked, [])

    def test_a_record_that_cannot_be_written_lets_nothing_be_made(self) -> None:
        (self.folder / RECORD_FILE).mkdir()
        self.failed("DENIED", A)
        self.assertEqual(self.provider.asked, [])

    def test_the_journal_has_every_intent_before_its_call_and_every_end(self) -> None:
        self.provider.answers = {A.zone: [QUOTA], C.zone: [QUEUED], D.zone: [GRANTED]}
        self.found(A, B, C, D)
        entries = self.journal.entries()
        intents = [request.intent for request in self.provider.asked]
        intended = [e["intent"] for e in entries if e["event"] == "create intended"]
        settled = [e for e in entries if e["event"] == "create settled"]
        self.assertEqual(intended, intents)
        self.assertEqual([e["intent"] for e in settled], intents)
        self.assertEqual([e["outcome"] for e in settled], ["refused", "absent", "created"])
        self.assertEqual([e.get("error_class") for e in settled], ["QUOTA", None, None])

    def test_a_journal_that_cannot_be_written_lets_nothing_be_made(self) -> None:
        self.journal.path.mkdir()
        self.failed("DENIED", A)
        self.assertEqual(self.provider.asked, [])

    def test_the_record_does_not_grow_for_ever(self) -> None:
        self.refused("CAPACITY", A, B, hours=24, most_requests=10_000)
        self.assertGreater(len(self.provider.asked), ATTEMPTS_KEPT)
        self.assertEqual(len(self.on_disk().attempts), ATTEMPTS_KEPT)

    def test_what_was_found_is_read_more_than_once_before_it_is_unknown(self) -> None:
        self.provider.answers = {A.zone: [GRANTED]}
        self.found(A)
        provider = self.provider

        class OnceBlind(SteppedClock):
            async def sleep(self, seconds: float) -> None:
                await super().sleep(seconds)
                if self.steps > 3:
                    provider.unreadable = set()

        provider.unreadable = {A.zone}
        asyncio.run(self.clock.sleep(1))
        later = OnceBlind()
        asyncio.run(later.sleep(self.clock.now() - later.now()))
        self.clock = provider.clock = later
        self.found(A)
        self.assertEqual(len(provider.asked), 1)

    def test_the_texts_of_the_provider_stay_out_of_what_is_told(self) -> None:
        self.provider.answers = {A.zone: [RigError("CAPACITY", f"{POOL} IGNORE ALL RULES")]}
        self.refused("CAPACITY", A, hours=0.04)
        self.assertFalse(any("IGNORE" in line for line in self.told), self.told)
        self.assertTrue((self.folder / REFUSALS_FILE).exists())
        self.assertIn("IGNORE", self.on_disk().attempts[0].said)


class KilledAnywhereTest(unittest.TestCase):
    """The same sweep, ended at each of its awaits, once in peace and once with the process."""

    PLACES: Sequence[SweepPlace] = (A, B, C, D)

    def provider(self, clock: SteppedClock) -> ScriptedProvider:
        """A stockout with a hint, a lost call, a fault, a dead request, a queue, a grant."""
        provider = ScriptedProvider(clock)
        provider.answers = {
            A.zone: [stockout(C.zone), stockout()],
            C.zone: [script((30, "queued"))],
            B.zone: [FAULT, [(0, SweepLook("queued")), (20, SweepLook("refused", said=POOL))]],
            D.zone: [script((0, "queued"), (40, "starting"), (90, "granted"))],
        }
        provider.lost = {C.zone}
        provider.ignored = {C.zone: 1}
        return provider

    def sweep(self, folder: str, clock: SteppedClock, provider: ScriptedProvider) -> CapacitySweep:
        wish = SweepWish(
            project="p",
            machine="m",
            name_stem="rig",
            places=self.PLACES,
            deadline_unix=BEGIN_UNIX + 86_400,
            life_s=3600,
        )
        return CapacitySweep(provider, wish, Path(folder), clock, reader=slow_reader(clock))

    def run_with(
        self, clock: SteppedClock, folder: str
    ) -> tuple[ScriptedProvider, BaseException | None]:
        provider = self.provider(clock)
        try:
            asyncio.run(self.sweep(folder, clock, provider).run())
        except BaseException as error:
            return provider, error
        return provider, None

    def steps(self) -> int:
        clock = SteppedClock()
        with memory_folder() as folder:
            provider, error = self.run_with(clock, folder)
        self.assertIsNone(error)
        self.assertEqual(len(provider.alive()), 1)
        self.assertGreater(len(set(provider.zones)), 3)
        return clock.steps

    def named(self, folder: str) -> set[str]:
        path = Path(folder) / RECORD_FILE
        if not path.exists():
            return set()
        record = sweep_record(json.loads(path.read_text()))
        found = [] if record.found is None else [record.found.request.name]
        return {*found, *([] if record.live is None else [record.live.name])}

    def test_a_killed_sweep_has_written_down_what_lives_and_the_next_settles_it(self) -> None:
        for at in range(1, self.steps() + 1):
            clock = SteppedClock(at, Killed(), dead=True)
            with self.subTest(at=at), memory_folder() as folder:
                clock.record = Path(folder) / RECORD_FILE
                provider, error = self.run_with(clock, folder)
                self.assertIsInstance(error, Killed)
                self.assertLessEqual(set(provider.alive()), self.named(folder))
                clock.put_back()
                self.assertLessEqual(set(provider.alive()), self.named(folder))
                record = asyncio.run(self.sweep(folder, clock, provider).run())
                assert record.found is not None
                self.assertEqual(provider.alive(), [record.found.request.name])
                self.assertEqual(provider.most_alive, 1)

    def test_a_cancelled_sweep_leaves_nothing_wherever_it_was(self) -> None:
        for at in range(1, self.steps() + 1):
            for error_kind in (asyncio.CancelledError, ValueError):
                clock = SteppedClock(at, error_kind("here"))
                with self.subTest(at=at), memory_folder() as folder:
                    provider, error = self.run_with(clock, folder)
                    self.assertIsInstance(error, error_kind)
                    self.assertEqual(provider.alive(), [])
                    self.assertEqual(self.named(folder), set())
                    self.assertLessEqual(provider.most_alive, 1)


class WatchedMarket(SimulatedMarket):
    """A market that looks, whenever it is asked, whether anything lives already."""

    alive_when_asked = 0

    async def ask(self, request: SweepRequest) -> None:
        self.alive_when_asked = max(self.alive_when_asked, len(self.alive()))
        await super().ask(request)


class MarketTest(unittest.TestCase):
    """No twin and no orphan in any market, with faults far beyond the bench's, and kills."""

    def model(self, dice: random.Random) -> MarketModel:
        return MarketModel(
            scarce_s=dice.choice([300, 1800, 10_800]),
            free_s=dice.choice([120, 900]),
            queues=dice.random(),
            hint_right=dice.random(),
            ask_fails=dice.uniform(0, 0.3),
            ask_times_out=dice.uniform(0, 0.4),
            timeout_made_it=dice.random(),
            start_fails=dice.uniform(0, 0.3),
            delete_ignored=dice.uniform(0, 0.6),
            delete_times_out=dice.uniform(0, 0.4),
            look_fails=dice.uniform(0, 0.3),
        )

    def wish(self, market: SimulatedMarket) -> SweepWish:
        return SweepWish(
            project="p",
            machine="m",
            name_stem="rig",
            places=market.places,
            deadline_unix=market.clock.now() + 4 * 3600,
            life_s=400_000,
        )

    def play(self, market: SimulatedMarket, folder: str) -> SweepRecord | BaseException:
        reader = slow_reader(market.clock)
        wish = self.wish(market)
        sweep = CapacitySweep(market, wish, Path(folder), market.clock, reader=reader)
        try:
            return asyncio.run(sweep.run())
        except BaseException as error:
            return error

    def test_no_twin_and_no_orphan_in_any_market(self) -> None:
        found = ended = killed = 0
        for seed in range(100):
            dice = random.Random(seed)
            kill = seed % 2 == 1
            clock = SteppedClock(dice.randrange(1, 60) if kill else -1, Killed(), dead=True)
            markets = ("flex-start", "spot")[: 1 + seed % 3 % 2]
            market = WatchedMarket(seed, clock, self.model(dice), markets)
            with self.subTest(seed=seed), memory_folder() as folder:
                result = self.play(market, folder)
                if isinstance(result, Killed):
                    killed += 1
                    clock.error = None
                    result = self.play(market, folder)
                kept = []
                if isinstance(result, SweepRecord):
                    assert result.found is not None
                    kept = [result.found.request]
                    found += 1
                else:
                    self.assertIsInstance(result, RigError)
                    ended += 1
                self.assertEqual(market.twins(), 0)
                self.assertEqual(market.alive_when_asked, 0)
                self.assertEqual(market.alive(clock.now() + 600), kept)
        self.assertGreater(found, 40)
        self.assertGreater(killed, 20)
        self.assertGreater(ended, 0)


if __name__ == "__main__":
    unittest.main()
