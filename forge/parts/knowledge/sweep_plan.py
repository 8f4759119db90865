"""A sweep's wish, its order, how long it waits where, and the record that it keeps.

Knows no provider and no clock: times are handed in, and whoever asks a provider is another part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import read_json, write_json
from forge.parts.knowledge.refusal_answer import Refusal, RefusalReason
from forge.parts.knowledge.sweep_refusals import RefusalMemory, RememberedRefusal, region_of

SWEEP_SCHEMA = 1
ATTEMPTS_KEPT = 200

# How long a queued request may wait before the sweep leaves it for another place: the first time
# round, the second, and so on, in seconds. Nobody knows beforehand which queue moves, so short
# waits everywhere come before long ones anywhere, and each round waits longer, so that what is
# wasted on queues that stand still is a fixed share of what the one that moves would have taken.
# The lengths are a choice. The last is Compute Engine's longest wait of a flex-start request.
ROUND_PATIENCE_S = (180.0, 600.0, 1800.0, 7200.0)
# A machine that is being started is not left before this: starting takes minutes, not seconds.
START_PATIENCE_S = 900.0
# By so much the provider may keep a request beyond the sweep's own patience: the sweep leaves
# first, and a request of a sweep that was killed still ends by itself.
VALID_MARGIN_S = 60.0

SweepPhase = Literal["asking", "waiting", "cancelling"]
SweepEnd = RefusalReason | Literal["granted", "left"]


@dataclass(frozen=True)
class SweepPlace:
    """A zone and the way of renting there: spot, on-demand, flex-start and so on."""

    zone: str
    market: str

    @property
    def region(self) -> str:
        return region_of(self.zone)

    def __str__(self) -> str:
        return f"{self.zone} ({self.market})"


@dataclass(frozen=True)
class PassedOver:
    """A place that is not asked at all, and why."""

    place: SweepPlace
    why: str
    reason: Literal["not on offer", "no quota", "over budget"]


@dataclass(frozen=True)
class SweepWish:
    """What is wanted: one machine of the kind `machine` in `project`, in the order of `places`.

    `name_stem` begins every request's name; `labels` go out with every request. `deadline_unix` is
    when to give up, `most_requests` after how many requests. `life_s` is the machine's own life.
    `passed_over` is what `open_places` left out, so that it is told.
    """

    project: str
    machine: str
    name_stem: str
    places: Sequence[SweepPlace]
    deadline_unix: float
    life_s: int
    most_requests: int = 100
    labels: Mapping[str, str] = field(default_factory=dict)
    passed_over: Sequence[PassedOver] = ()


def open_places(
    wish: Sequence[SweepPlace],
    offered: Mapping[SweepPlace, float | None],
    quota_left: Mapping[SweepPlace, int],
) -> tuple[list[SweepPlace], list[PassedOver]]:
    """(the places worth asking, the others): `wish`, in its order, without repeats.

    `offered` maps the catalogue's places to their price in USD an hour; a place that is not in it
    is not asked. `quota_left` maps to how many machines may still be had; a place that is not in it
    is asked, because a quota that could not be read says nothing.
    """
    worth, others = [], []
    for place in dict.fromkeys(wish):
        if place not in offered:
            others.append(PassedOver(place, "the catalogue does not list it", "not on offer"))
        elif quota_left.get(place, 1) < 1:
            others.append(PassedOver(place, "no quota is left there", "no quota"))
        else:
            worth.append(place)
    return worth, others


def queue_patience(waits: int, reopens_s: float | None, left_s: float) -> float:
    """Seconds that a request may wait in its queue: the one rule for leaving a place.

    `waits` is how often the sweep waited there before. `reopens_s` is when the first other place
    may be asked, in seconds from now: 0 for at once, None for never. A queue is not left for
    places that would refuse: without another one the wait is the longest. `left_s` is the time
    until the deadline.
    """
    longest = ROUND_PATIENCE_S[-1]
    step = ROUND_PATIENCE_S[min(waits, len(ROUND_PATIENCE_S) - 1)]
    step = longest if reopens_s is None else max(step, min(reopens_s, longest))
    return max(0.0, min(step, left_s))


def next_place(
    open_now: Sequence[SweepPlace], waits: Mapping[SweepPlace, int], hints: Sequence[str]
) -> SweepPlace | None:
    """Which of the open places to ask next: a hinted one, then the least waited in, in order.

    `hints` are the zones that the provider named last; a zone that is not wished is not followed.
    """
    for zone in hints:
        for place in open_now:
            if place.zone == zone:
                return place
    return min(open_now, key=lambda place: waits.get(place, 0), default=None)


class SweepOrder:
    """Where a sweep asks next: by its wish, by what is remembered and hinted, and by how often it
    waited where. Times are Unix seconds."""

    def __init__(self, wish: SweepWish, memory: RefusalMemory) -> None:
        self._wish, self._memory = wish, memory
        self._waits: dict[SweepPlace, int] = {}
        self.refused: set[SweepPlace] = set()  # by this sweep, not by an earlier one
        self._hints: tuple[str, ...] = ()

    def heed(self, place: SweepPlace, refusal: Refusal, now: float) -> None:
        """Remember a refusal and the zones that it named."""
        project, machine = self._wish.project, self._wish.machine
        self._memory.remember(project, machine, place.zone, place.market, refusal, now)
        self.refused.add(place)
        self._hints = refusal.hints

    def waited(self, place: SweepPlace) -> None:
        """Note that a wait in that place was in vain."""
        self._waits[place] = self._waits.get(place, 0) + 1

    def patience(self, place: SweepPlace, now: float) -> float:
        """How long a request there may wait now, in seconds."""
        shut = [self.shut(other, now) for other in self._wish.places if other != place]
        times = [now if refusal is None else refusal.until for refusal in shut]
        first = min(times, default=self._wish.deadline_unix)
        reopens_s = first - now if first < self._wish.deadline_unix else None
        return queue_patience(self._waits.get(place, 0), reopens_s, self._wish.deadline_unix - now)

    def all_shut(self, now: float) -> dict[SweepPlace, RememberedRefusal]:
        """The places that are not to be asked now, and why."""
        return {place: shut for place in self._wish.places if (shut := self.shut(place, now))}

    def choose(self, now: float) -> SweepPlace | None:
        """The next place; None where all are shut. A hint is followed once."""
        open_now = [place for place in self._wish.places if self.shut(place, now) is None]
        hints, self._hints = self._hints, ()
        return next_place(open_now, self._waits, hints)

    def shut(self, place: SweepPlace, now: float) -> RememberedRefusal | None:
        """What keeps `place` from being asked now. A hint is newer than what an earlier sweep was
        told of its capacity, and older than what this one was told."""
        project, machine = self._wish.project, self._wish.machine
        for refusal in self._memory.holding(project, machine, place.zone, place.market, now):
            passing = refusal.reason in ("stockout", "expired") and place not in self.refused
            if not (passing and place.zone in self._hints):
                return refusal
        return None


@dataclass(frozen=True)
class SweepRequest:
    """One request as it goes out. Its name is used for no other, so that it can be proven gone.

    `patience_s` is when the sweep leaves its queue; `valid_s`, a little longer, how long the
    provider may keep it waiting: where the provider has such a limit, it ends the request even if
    nobody is left to cancel it. `intent` is for its idempotency key.
    """

    name: str
    zone: str
    market: str
    project: str
    machine: str
    intent: str
    asked_unix: float
    patience_s: float
    valid_s: float
    life_s: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> SweepPlace:
        return SweepPlace(self.zone, self.market)


@dataclass(frozen=True)
class SweepAttempt:
    """One request that is over: how it ended, and what the provider said (redacted, a line)."""

    name: str
    zone: str
    market: str
    asked_unix: float
    ended_unix: float
    ended: SweepEnd
    said: str = ""


@dataclass(frozen=True)
class SweepFound:
    """The machine that was granted, with all that later acts need to name it and no namesake."""

    request: SweepRequest
    provider_id: str
    created_at: str
    granted_unix: float
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def zone(self) -> str:
        return self.request.zone

    @property
    def region(self) -> str:
        return region_of(self.request.zone)


@dataclass
class SweepRecord:
    """A sweep as it stands on disk. `live` is the one request that may exist and is not handed
    over, `found` the machine that was; never both. Times are Unix seconds."""

    project: str = ""
    machine: str = ""
    began_unix: float = 0.0
    live: SweepRequest | None = None
    phase: SweepPhase | None = None
    found: SweepFound | None = None
    attempts: list[SweepAttempt] = field(default_factory=list)

    @property
    def waited_s(self) -> float | None:
        """From the first request's beginning until the machine was granted; None without one."""
        return None if self.found is None else self.found.granted_unix - self.began_unix

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {"v": SWEEP_SCHEMA, **asdict(self)}


def sweep_record(data: Mapping[str, Any]) -> SweepRecord:
    """The record in what `as_dict` gave, or in what a later reader wrote with more fields.

    Raises ValueError for anything else: a record that names what lives must not be guessed at.
    """
    try:
        if data["v"] != SWEEP_SCHEMA:
            raise ValueError(f"a sweep's record of version {data['v']}")
        live, found = data["live"], data["found"]
        return SweepRecord(
            project=str(data["project"]),
            machine=str(data["machine"]),
            began_unix=float(data["began_unix"]),
            live=None if live is None else _request_of(live),
            phase=data["phase"],
            found=None
            if found is None
            else SweepFound(
                **{**_known_fields(SweepFound, found), "request": _request_of(found["request"])}
            ),
            attempts=[SweepAttempt(**_known_fields(SweepAttempt, a)) for a in data["attempts"]],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no sweep's record: {error!r}") from None


def _request_of(data: Mapping[str, Any]) -> SweepRequest:
    return SweepRequest(**_known_fields(SweepRequest, data))


def _known_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


class SweepBook:
    """The record of a sweep in its file. Written before it is believed: a change that could not be
    written (RigError DENIED) did not happen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = SweepRecord()

    def load(self) -> None:
        """Read the record of the last sweep. Raises RigError UNKNOWN where it is damaged, again and
        again until a person has removed it: what it named would be forgotten otherwise."""
        aside = self.path.with_suffix(".damaged")
        try:
            data = read_json(self.path)
            if not aside.exists():
                self.record = SweepRecord() if data is None else sweep_record(data)
                return
        except ValueError:
            aside = self.path
        raise RigError(
            "UNKNOWN",
            f"the record of the last sweep is damaged ({aside}), so what it left is not known; "
            "nothing was asked for",
            "look for machines of this rig, then remove that file",
        )

    def save(self, **changes: Any) -> None:
        """Change fields of the record."""
        new = replace(self.record, **changes)
        if new.live is None:
            new.phase = None
        write_json(self.path, new.as_dict())
        self.record = new

    def over(self, request: SweepRequest, ended: SweepEnd, now: float, said: str = "") -> None:
        """Note the end of `request`, which is alive no more unless it was granted."""
        place, asked = request.place, request.asked_unix
        attempt = SweepAttempt(request.name, place.zone, place.market, asked, now, ended, said)
        self.save(live=None, attempts=[*self.record.attempts, attempt][-ATTEMPTS_KEPT:])

    def granted(self, found: SweepFound) -> None:
        """Note the machine that is handed over, in one step with the end of its request."""
        one, now = found.request, found.granted_unix
        attempt = SweepAttempt(one.name, one.zone, one.market, one.asked_unix, now, "granted")
        attempts = [*self.record.attempts, attempt][-ATTEMPTS_KEPT:]
        self.save(live=None, found=found, attempts=attempts)


def hour_of(unix: float) -> str:
    """Unix seconds as an hour of the day for people."""
    return f"{datetime.fromtimestamp(unix, UTC):%H:%M} UTC"
