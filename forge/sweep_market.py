"""A simulated market of machines, seeded, in simulated time: the other side of a sweep.

THE MARKET IS INVENTED. No provider publishes how its stockouts come and go, and nothing here was
measured. What the messages say is taken from the providers' own texts; how often, how long and how
likely are guesses, all of them in `MarketModel`. It can show that a policy is safe under faults,
and compare policies on one and the same market. It cannot say how long a real one would take.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.knowledge.refusal_answer import Refusal
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_plan import SweepPlace, SweepRequest
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.sweep_plane import SweepLook

BEGIN_UNIX = 1_800_000_000.0
# The zones in which v6e is offered, in the order of a wish list; the vendor's list of 2026.
MARKET_ZONES = (
    "europe-west4-a",
    "us-east5-a",
    "us-east5-b",
    "us-east1-d",
    "asia-northeast1-b",
    "us-central1-b",
)
MACHINE_TYPE = "ct6e-standard-1t"


@dataclass(frozen=True)
class MarketModel:
    """Every parameter of the market. All of them are invented, each with what it was guessed from;
    times in seconds, chances from 0 to 1."""

    # A place has capacity in spells. Three hours without and a quarter of an hour with it: scarce
    # enough that most first requests fail, as people report of TPU zones.
    scarce_s: float = 10_800.0
    free_s: float = 900.0
    # Whether a zone without capacity queues a request or refuses it at once. Both are seen.
    queues: float = 0.5
    # A queue hands out what becomes free to others first: how long into a free spell it takes.
    queue_delay_s: float = 180.0
    # A region in which the project has no quota, and whether that is known before asking.
    no_quota: float = 0.15
    quota_known: float = 0.5
    # A refusal names zones with capacity; sometimes what it names is out of date.
    hint: float = 0.5
    hint_right: float = 0.7
    # Faults: a call fails and did nothing; a call times out, and then it did its work mostly; what
    # it made shows late; a machine dies while it starts; a delete is accepted and does nothing; a
    # delete times out and did its work; a read fails.
    ask_fails: float = 0.05
    ask_times_out: float = 0.05
    timeout_made_it: float = 0.7
    shows_late_s: float = 60.0
    start_fails: float = 0.03
    delete_ignored: float = 0.1
    delete_times_out: float = 0.05
    look_fails: float = 0.02
    # A call takes about what one call of the provider's tool took here on 2026-11-29 (1.1-1.7 s).
    call_s: float = 1.5
    call_timeout_s: float = 60.0
    start_s: float = 90.0
    delete_s: float = 20.0
    # Flex-start of one v6e chip, USD an hour, the price list's of 2026-07.
    usd_per_hour: float = 1.35


# The same comparison where single guesses are others: what holds under one set of inventions alone
# says little.
OTHER_MODELS: dict[str, MarketModel] = {
    "every zone queues": MarketModel(queues=1.0),
    "no zone queues": MarketModel(queues=0.0),
    "less scarce": MarketModel(scarce_s=2700.0, free_s=900.0),
    "scarcer": MarketModel(scarce_s=28_800.0, free_s=900.0),
    "hints always wrong": MarketModel(hint=1.0, hint_right=0.0),
    "no hints": MarketModel(hint=0.0),
    "no faults": MarketModel(
        ask_fails=0.0,
        ask_times_out=0.0,
        start_fails=0.0,
        delete_ignored=0.0,
        delete_times_out=0.0,
        look_fails=0.0,
    ),
}


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in memory where the system has such a place: a simulation writes its
    record thousands of times, and every write waits for the disk."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)


async def read_in_process(text: str, error_class: ErrorClass | None) -> Refusal:
    """A sweep's reader without a process of its own: a simulation reads thousands of refusals."""
    return read_refusal(text, error_class)


class SimulatedClock:
    """Time that passes only when somebody waits."""

    def __init__(self, begin: float = BEGIN_UNIX) -> None:
        self._now = begin

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


@dataclass
class MarketThing:
    """A request and the machine that comes of it; times in Unix seconds, None for never."""

    request: SweepRequest
    visible: float
    granted: float | None
    ready: float | None
    dies: bool
    expires: float
    stays_when_expired: bool
    delete_ignored: bool
    deleted: float | None = None

    @property
    def ends(self) -> float:
        """When it stops costing: deleted, died, or at the end of its life."""
        if self.granted is None or self.ready is None:
            return self.expires
        end = self.ready if self.dies else self.granted + self.request.life_s
        return end if self.deleted is None else min(end, self.deleted)

    @property
    def billed(self) -> bool:
        """Whether it ever cost anything."""
        return self.granted is not None and (self.deleted is None or self.deleted > self.granted)

    def look(self, now: float) -> SweepLook:
        """What the provider would say of it."""
        gone = self.deleted is not None and now >= self.deleted
        if now < self.visible or gone:
            return SweepLook("gone")
        if self.granted is None or self.ready is None:
            if now < self.expires:
                return SweepLook("queued")
            said = "the request was valid until now and has expired"
            return SweepLook("refused" if self.stays_when_expired else "gone", said)
        if now < self.granted:
            return SweepLook("queued")
        if now < self.ready:
            return SweepLook("starting")
        if self.dies:
            return SweepLook("gone", "INTERNAL_ERROR: the instance could not be started")
        if now >= self.ends:
            return SweepLook("gone")
        return SweepLook(
            "granted", provider_id=f"id-{self.request.name}", created_at=str(self.visible)
        )


@dataclass
class _Spells:
    """When a place has capacity: (begin, end) of each spell, and how it treats a request else."""

    free: list[tuple[float, float]] = field(default_factory=list)
    queues: bool = False
    stays: bool = False

    def free_at(self, now: float) -> bool:
        return any(begin <= now < end for begin, end in self.free)


class SimulatedMarket:
    """A provider as a sweep meets it (a SweepPlane), with everything that it ever made."""

    look_every_s = 10.0
    settle_s = 90.0
    gone_s = 60.0
    queue_is_free = True

    def __init__(
        self,
        seed: int,
        clock: SimulatedClock,
        model: MarketModel | None = None,
        markets: Sequence[str] = ("flex-start",),
        horizon_s: float = 172_800.0,
    ) -> None:
        self.model = MarketModel() if model is None else model
        self.clock = clock
        self.places = [SweepPlace(zone, market) for zone in MARKET_ZONES for market in markets]
        self.things: list[MarketThing] = []
        self.calls = 0
        self.latency = True
        self._seed = seed
        dice = random.Random(f"market {seed}")
        self._spells = {place: self._drawn(dice, horizon_s) for place in self.places}
        regions = list(dict.fromkeys(place.region for place in self.places))
        self.without_quota = {one for one in regions if dice.random() < self.model.no_quota}
        self.known_quota = {
            one: 0 if one in self.without_quota else 1
            for one in regions
            if dice.random() < self.model.quota_known
        }

    def _drawn(self, dice: random.Random, horizon_s: float) -> _Spells:
        model = self.model
        spells = _Spells(queues=dice.random() < model.queues, stays=dice.random() < 0.5)
        free = dice.random() < model.free_s / (model.free_s + model.scarce_s)
        at = self.clock.now()
        while at < self.clock.now() + horizon_s:
            length = dice.expovariate(1 / (model.free_s if free else model.scarce_s))
            if free:
                spells.free.append((at, at + length))
            at, free = at + length, not free
        return spells

    def quota_left(self) -> dict[SweepPlace, int]:
        """What is known of the quotas before anything is asked."""
        known = self.known_quota
        return {place: known[place.region] for place in self.places if place.region in known}

    # What a provider is asked

    async def ask(self, request: SweepRequest) -> None:
        """Take a request, refuse it, or leave it open whether it was taken."""
        dice = await self._called("ask", request.zone, request.market)
        model = self.model
        chance = dice.random()
        if chance < model.ask_fails:
            raise RigError("INTERNAL", "code: INTERNAL_ERROR message: Internal error.")
        if chance < model.ask_fails + model.ask_times_out:
            made = dice.random() < model.timeout_made_it and self._refusal(request, dice) is None
            if made:
                self._make(request, dice, late_s=dice.uniform(0.0, model.shows_late_s))
            await self.clock.sleep(model.call_timeout_s if self.latency else 0.0)
            raise RigError(
                "UNKNOWN", "the call did not return in time; it may have been carried out"
            )
        refusal = self._refusal(request, dice)
        if refusal is not None:
            raise refusal
        self._make(request, dice)

    async def look(self, request: SweepRequest) -> SweepLook:
        """What there is of the request."""
        dice = await self._called("look", request.zone, request.market)
        if dice.random() < self.model.look_fails:
            raise RigError("UNREACHABLE", "503 Service Unavailable")
        thing = self._thing(request)
        return SweepLook("gone") if thing is None else thing.look(self.clock.now())

    async def cancel(self, request: SweepRequest) -> None:
        """Begin to delete what there is of the request."""
        dice = await self._called("cancel", request.zone, request.market)
        thing = self._thing(request)
        now = self.clock.now()
        if thing is None or thing.look(now).state == "gone":
            return
        if thing.delete_ignored:
            thing.delete_ignored = False
            return
        if thing.deleted is None:
            thing.deleted = now + self.model.delete_s
        if dice.random() < self.model.delete_times_out:
            raise RigError("UNKNOWN", "the delete did not return in time")

    async def _called(self, what: str, zone: str, market: str) -> random.Random:
        """Let a call's time pass; the dice of this very call, the same for every run."""
        self.calls += 1
        await self.clock.sleep(self.model.call_s if self.latency else 0.0)
        return random.Random(f"{self._seed} {what} {zone} {market} {self.calls}")

    def _refusal(self, request: SweepRequest, dice: random.Random) -> RigError | None:
        region, spells = region_of(request.zone), self._spells[request.place]
        if any(t.request.name == request.name and t.deleted is None for t in self.things):
            return RigError("EXISTS", f"The resource '{request.name}' already exists")
        if region in self.without_quota:
            text = f"Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region {region}."
            return RigError("QUOTA", text)
        if spells.queues or spells.free_at(self.clock.now()):
            return None
        text = (
            f"code: ZONE_RESOURCE_POOL_EXHAUSTED message: A {request.machine} VM instance is "
            f"currently unavailable in the {request.zone} zone."
        )
        if dice.random() < self.model.hint:
            zone = self._hinted(request, dice)
            text += (
                f" Consider trying your request in the {zone} zone(s), which currently have "
                "capacity to accommodate your request."
            )
        return RigError("CAPACITY", text)

    def _hinted(self, request: SweepRequest, dice: random.Random) -> str:
        now = self.clock.now()
        others = [p for p in self.places if p.market == request.market and p.zone != request.zone]
        free = [p for p in others if self._spells[p].free_at(now)]
        right = bool(free) and dice.random() < self.model.hint_right
        return dice.choice(free if right else others).zone

    def _make(self, request: SweepRequest, dice: random.Random, late_s: float = 0.0) -> None:
        model, now, spells = self.model, self.clock.now(), self._spells[request.place]
        expires = now + request.valid_s
        granted: float | None = None
        for begin, end in spells.free:
            # Where there is a queue, a newcomer stands behind it also while there is capacity:
            # asking again is no way past those who wait.
            wait = dice.expovariate(1 / model.queue_delay_s) if spells.queues else 0.0
            at = max(now, begin) + wait
            if now < end and at < end and at <= expires:
                granted = at
                break
        start = dice.uniform(0.7, 1.3) * model.start_s
        self.things.append(
            MarketThing(
                request=request,
                visible=now + late_s,
                granted=granted,
                ready=None if granted is None else granted + start,
                dies=dice.random() < model.start_fails,
                expires=expires,
                stays_when_expired=spells.stays,
                delete_ignored=dice.random() < model.delete_ignored,
            )
        )

    def _thing(self, request: SweepRequest) -> MarketThing | None:
        for thing in reversed(self.things):
            if (thing.request.name, thing.request.zone) == (request.name, request.zone):
                return thing
        return None

    # What really is, whatever anybody was told

    def alive(self, now: float | None = None) -> list[SweepRequest]:
        """Everything that exists at `now`, seen or not yet seen."""
        at = self.clock.now() if now is None else now
        found = []
        for thing in self.things:
            # What is not seen yet exists all the same.
            look = thing.look(max(at, thing.visible))
            if look.state != "gone":
                found.append(thing.request)
        return found

    def twins(self) -> int:
        """How many pairs of machines were granted at the same time."""
        billed = [t for t in self.things if t.granted is not None and t.billed]
        pairs = 0
        for index, one in enumerate(billed):
            for other in billed[index + 1 :]:
                first, second = one.granted or 0.0, other.granted or 0.0
                pairs += max(first, second) < min(one.ends, other.ends)
        return pairs

    def spent_usd(self, until: float, kept: SweepRequest | None) -> float:
        """What everything cost: the kept machine until `until`, the others to their own end."""
        seconds = 0.0
        for thing in self.things:
            if thing.granted is not None and thing.billed:
                end = min(thing.ends, until) if thing.request == kept else thing.ends
                seconds += max(0.0, end - thing.granted)
        return seconds / 3600 * self.model.usd_per_hour
