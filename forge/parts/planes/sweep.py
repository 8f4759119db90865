"""The sweep: asks place after place for one machine, with at most one request alive at any time.

Knows no provider: a SweepPlane asks, looks and cancels. Believes only what was read, and writes
down what may exist before it makes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.locks import held_lock
from forge.parts.ground.redact import clean
from forge.parts.knowledge.refusal_answer import (
    Refusal,
    RefusalReader,
    RefusalReason,
    class_refusal,
)
from forge.parts.knowledge.sweep_plan import (
    ROUND_PATIENCE_S,
    START_PATIENCE_S,
    VALID_MARGIN_S,
    SweepBook,
    SweepEnd,
    SweepFound,
    SweepOrder,
    SweepPlace,
    SweepRecord,
    SweepRequest,
    SweepWish,
    hour_of,
)
from forge.parts.knowledge.sweep_refusals import RefusalMemory, RememberedRefusal
from forge.parts.planes.sweep_plane import SweepClock, SweepLook, SweepPlane, SweepState

RECORD_FILE = "sweep.json"
REFUSALS_FILE = "sweep_refusals.json"

_NAME_ROOM = 52  # characters of the stem: with the mark at most 63, the providers' shortest limit
_CANCEL_TRIES = 4  # a delete that was accepted and did nothing is asked for again
_UNREAD_LIMIT_S = 300.0  # without one readable look for so long, nothing is known any more
_RETRY_PAUSE_S = 10.0  # before the one repetition after a fault of the provider
_TELL_EVERY_S = 120.0  # seconds between two sentences about the same queue
_UNREAD_QUOTED = 600  # characters of a refusal that could not be read


class CapacitySweep:
    """One sweep over a wish. `tell` gets a sentence whenever something changes; `journal` every
    intent before its call and every end, in the events that the acts of renting read. `reader`
    tells what a provider's refusal means.

    Its folder holds the record and the remembered refusals; two sweeps of one folder exclude each
    other. `record` names at any time what may exist.
    """

    def __init__(
        self,
        plane: SweepPlane,
        wish: SweepWish,
        folder: Path,
        clock: SweepClock,
        tell: Callable[[str], None] = lambda sentence: None,
        journal: Journal | None = None,
        *,
        reader: RefusalReader,
    ) -> None:
        self._plane, self._wish, self._clock, self._tell = plane, wish, clock, tell
        self._folder, self._journal, self._reader = folder, journal, reader
        self._book = SweepBook(folder / RECORD_FILE)
        self._memory = RefusalMemory(folder / REFUSALS_FILE)
        self._order = SweepOrder(wish, self._memory)
        self._begun = 0.0
        self._requests = 0
        self._seen = False  # whether the live request was ever read as existing
        self._settles_at = 0.0  # from when on it is absent if it is not to be seen
        self._unprovable: RigError | None = None
        self._told: dict[SweepPlace, RememberedRefusal] = {}

    @property
    def record(self) -> SweepRecord:
        """What is known of the sweep, on disk as well."""
        return self._book.record

    # The sweep

    async def run(self) -> SweepRecord:
        """The record with the machine in `found`, or a RigError and nothing left behind.

        A machine that an earlier sweep of this folder found is given again while it exists; what an
        earlier one left alive is settled first. Raises CAPACITY (nothing until the deadline or the
        last request), QUOTA (every place is shut by quota), the refusal's own class for what stops
        a sweep, and UNKNOWN with the name where something may be left alive. On a cancellation the
        live request is cancelled and proven gone before the cancellation goes on.
        """
        async with held_lock(self._folder, "sweep"):
            self._begun = self._clock.now()
            self._settles_at = self._begun + self._plane.settle_s
            self._memory.load(self._begun)
            try:
                if await self._taken_over() or await self._swept():
                    return self.record
            except BaseException as error:
                await self._give_up(error)
                raise
        raise RigError("INTERNAL", "the sweep ended without an answer")

    async def release(self) -> None:
        """Forget the machine that was found: whoever destroyed it, or took it over, says so."""
        async with held_lock(self._folder, "sweep"):
            self._book.load()
            self._book.save(found=None)

    async def _swept(self) -> bool:
        project, machine = self._wish.project, self._wish.machine
        self._book.save(project=project, machine=machine, began_unix=self._begun, attempts=[])
        for passed in self._wish.passed_over:
            self._say(f"Not asked: {passed.place}, {passed.why}")
        retried: set[SweepPlace] = set()
        again: SweepPlace | None = None
        while True:
            place = again or await self._chosen()
            again = None
            refusal = await self._attempted(place)
            if refusal is None:
                if self.record.found is not None:
                    return True
                continue
            self._heed(place, refusal)
            if refusal.reason == "transient" and place not in retried and self._may_ask():
                retried.add(place)
                again = place
                self._say(f"A fault of the provider in {place}; asking there once more")
                await self._clock.sleep(_RETRY_PAUSE_S)

    async def _chosen(self) -> SweepPlace:
        """The next place to ask, after waiting where all are shut for now."""
        while True:
            now = self._clock.now()
            self._refuse_end(now)
            shut = self._order.all_shut(now)
            for place, refusal in shut.items():
                if place not in self._order.refused and self._told.get(place) != refusal:
                    self._told[place] = refusal
                    self._say(f"Skipped {place}: {refusal.told(now)}")
            chosen = self._order.choose(now)
            if chosen is not None:
                return chosen
            until = min((r.until for r in shut.values()), default=self._wish.deadline_unix)
            if until >= self._wish.deadline_unix:
                raise self._nothing(list(shut.values()))
            self._say(f"Every place has refused; asking again at {hour_of(until)}")
            await self._clock.sleep(max(1.0, until - now))

    def _may_ask(self) -> bool:
        late = self._clock.now() + _RETRY_PAUSE_S >= self._wish.deadline_unix
        return not late and self._requests < self._wish.most_requests

    def _refuse_end(self, now: float) -> None:
        if now >= self._wish.deadline_unix:
            raise self._nothing([], "the deadline has passed")
        if self._requests >= self._wish.most_requests:
            raise self._nothing([], f"{self._requests} requests were made")

    def _nothing(self, shut: list[RememberedRefusal], why: str = "") -> RigError:
        quota = bool(shut) and all(refusal.reason == "quota" for refusal in shut)
        if not self._wish.places:
            why = "no place is worth asking"
            quota = any(passed.reason == "no quota" for passed in self._wish.passed_over)
        why = why or "every place is shut beyond the deadline"
        return RigError(
            "QUOTA" if quota else "CAPACITY",
            f"no {self._wish.machine} was to be had: {why}; {self._requests} requests went out, "
            "and none of them exists any more",
            "ask the provider for quota, or name other regions" if quota else "try again later",
        )

    def _heed(self, place: SweepPlace, refusal: Refusal) -> None:
        """Remember a refusal, follow its hint, or end the sweep with it."""
        self._order.heed(place, refusal, self._clock.now())
        wished = [zone for zone in refusal.hints if any(p.zone == zone for p in self._wish.places)]
        hint = f"; the provider names {', '.join(wished)}" if wished else ""
        where = {"region": f"region {place.region}", "market": f"all of {place.market}"}
        self._say(f"Refused in {where.get(refusal.scope, place)}: {refusal.reason}{hint}")
        if refusal.stops:
            classes: dict[RefusalReason, ErrorClass] = {
                "permission": "DENIED",
                "auth": "AUTH",
                "usage": "INVALID",
            }
            raise RigError(
                classes.get(refusal.reason, "QUOTA"),
                f"the request in {place} was refused ({refusal.reason}), and no other place would "
                f"answer differently: {refusal.said}",
            )

    # One request

    async def _attempted(self, place: SweepPlace) -> Refusal | None:
        """Ask `place` and follow it up: the refusal, or None when it was granted or left."""
        patience = self._order.patience(place, self._clock.now())
        self._requests += 1
        request = self._request(place, patience)
        self._seen = False
        self._book.save(live=request, phase="asking")
        if self._journal is not None:
            named = {"intent": request.intent, "name": request.name, "zone": request.zone}
            self._journal.append("create intended", **named, life_s=request.life_s)
        try:
            await self._asked(request)
        except RigError as error:
            refusal = await self._meaning(error.what, error.error_class)
            known = refusal.reason != "unknown"
            if not known:
                self._say(f"Whether {request.name} exists in {place} is not known; reading")
            if not await self._made(request, known):
                self._over(request, refusal.reason, refusal.said)
                if known:
                    return refusal
                self._order.waited(place)
                return None
            self._say(f"{request.name} exists in {place} although the call failed")
        self._book.save(phase="waiting")
        return await self._followed(request)

    async def _asked(self, request: SweepRequest) -> None:
        try:
            await self._plane.ask(request)
        finally:
            # A call that was given up may have been carried out at its very end.
            self._settles_at = self._clock.now() + self._plane.settle_s

    def _request(self, place: SweepPlace, patience: float) -> SweepRequest:
        mark = secrets.token_hex(5)
        wish = self._wish
        valid_s = min(patience + VALID_MARGIN_S, ROUND_PATIENCE_S[-1])
        return SweepRequest(
            name=f"{wish.name_stem[:_NAME_ROOM].rstrip('-')}-{mark}",
            zone=place.zone,
            market=place.market,
            project=wish.project,
            machine=wish.machine,
            intent=f"sweep-{mark}",
            asked_unix=self._clock.now(),
            patience_s=patience,
            valid_s=valid_s,
            life_s=wish.life_s,
            labels=self._labels(f"sweep-{mark}", valid_s),
        )

    def _labels(self, intent: str, valid_s: float) -> dict[str, str]:
        """The wish's labels with this request's intent, and with the latest end of its life where
        the wish's have one: it begins at the grant, which may be as late as the wait allows."""
        over = {"expires": str(round(self._clock.now() + valid_s) + self._wish.life_s)}
        ends = over if "expires" in self._wish.labels else {}
        return {**self._wish.labels, **ends, "intent": intent}

    async def _made(self, request: SweepRequest, refused: bool) -> bool:
        """Whether an ask that failed made something. One that was refused as a whole made nothing,
        unless a look shows it: who is not let in to ask is not let in to look either."""
        if refused and getattr(self._plane, "asks_in_one_call", False):
            look = await self._look(request)
            return look is not None and look.state != "gone"
        return await self._exists(request, at_once=refused)

    async def _exists(self, request: SweepRequest, at_once: bool = False) -> bool:
        """Whether anything of the request can be read. Of a refused one a single look tells
        (`at_once`), of any other only what is still absent when it is settled."""
        while True:
            look = await self._readable(request)
            if look.state != "gone":
                return True
            if at_once or self._clock.now() >= self._settles_at:
                return False
            await self._clock.sleep(self._plane.look_every_s)

    async def _followed(self, request: SweepRequest) -> Refusal | None:
        """Watch the live request until it is granted (None), refused, or left (None)."""
        told = 0.0
        while True:
            look = await self._readable(request)
            now = self._clock.now()
            if look.state == "granted":
                self._hand_over(request, look)
                return None
            if look.state == "refused" or (look.state == "gone" and self._absent(look)):
                refusal = await self._ended(look)
                await self._leave(request, refusal.reason, refusal.said)
                return refusal
            until = request.asked_unix + request.patience_s
            if look.state == "starting":
                until = max(until, min(until + START_PATIENCE_S, self._wish.deadline_unix))
            if now >= until:
                waited = (now - request.asked_unix) / 60
                self._say(f"Leaving the queue of {request.place} after {waited:.0f} min")
                self._order.waited(request.place)
                await self._leave(request, "left")
                return None
            if now >= told + _TELL_EVERY_S:
                told = now
                self._say(self._waiting(request, look.state))
            await self._clock.sleep(self._plane.look_every_s)

    async def _meaning(self, text: str, error_class: ErrorClass | None = None) -> Refusal:
        """What a refusal means. Where it cannot be read, its class alone tells, and without one
        nothing does: then what may exist is settled by looks, as ever."""
        try:
            return await self._reader(text, error_class)
        except RigError as error:
            self._say(f"What the provider said could not be read ({error.what})")
            return class_refusal(error_class, clean(" ".join(text.split()), _UNREAD_QUOTED))

    async def _ended(self, look: SweepLook) -> Refusal:
        """Why a request ended without a machine. Without a word of it, one that is refused counts
        as expired, and one that vanished as a stockout."""
        refusal = await self._meaning(look.said) if look.said else None
        if refusal is None or refusal.reason == "unknown":
            said = "" if refusal is None else refusal.said
            return Refusal("expired" if look.state == "refused" else "stockout", "zone", said)
        return refusal

    def _absent(self, look: SweepLook) -> bool:
        """Whether `gone` may be believed: what was never seen may only not be seen yet."""
        return self._seen or bool(look.said) or self._clock.now() >= self._settles_at

    async def _look(self, request: SweepRequest) -> SweepLook | None:
        """What can be read of the request now; None where it cannot be read."""
        try:
            look = await self._plane.look(request)
        except RigError:
            return None
        self._seen = self._seen or look.state != "gone"
        return look

    async def _readable(self, request: SweepRequest) -> SweepLook:
        """The next readable look. Raises UNREACHABLE when there is none for too long; the sweep
        then cancels the request, and its UNKNOWN goes out instead where that cannot be proven."""
        until = self._clock.now() + _UNREAD_LIMIT_S
        while True:
            look = await self._look(request)
            if look is not None:
                return look
            if self._clock.now() >= until:
                what = f"{request.name} in {request.zone} could not be read"
                raise RigError("UNREACHABLE", f"{what} for {_UNREAD_LIMIT_S:.0f} s", "sweep again")
            await self._clock.sleep(self._plane.look_every_s)

    def _hand_over(self, request: SweepRequest, look: SweepLook) -> None:
        now = self._clock.now()
        self._book.granted(
            SweepFound(request, look.provider_id, look.created_at, now, dict(look.details))
        )
        self._settled(request, "created")
        self._say(f"Granted in {request.place}: {request.name}")

    # Leaving

    async def _leave(self, request: SweepRequest, ended: SweepEnd, said: str = "") -> None:
        """Cancel the request and prove by reading that it is gone; UNKNOWN where that fails.

        What was never seen is waited for until `settle_s` first: it could appear after the cancel.
        """
        with suppress(RigError):  # on a full disk it is cancelled all the same
            self._book.save(phase="cancelling")
        why = "it was cancelled and is not seen to be gone"
        for _ in range(_CANCEL_TRIES):
            look = await self._look(request)
            while look is not None and look.state == "gone" and not self._absent(look):
                await self._clock.sleep(self._plane.look_every_s)
                look = await self._look(request)
            if look is not None and look.state == "gone":
                self._over(request, ended, said)
                return
            try:
                await self._plane.cancel(request)
            except RigError as error:  # it may have worked all the same; the next look tells
                why = f"the call to cancel it failed ({error.error_class})"
            if await self._vanished(request):
                self._over(request, ended, said)
                return
        raise self._unknown(request, why)

    async def _vanished(self, request: SweepRequest) -> bool:
        until = self._clock.now() + self._plane.gone_s
        while True:
            look = await self._look(request)
            if look is not None and look.state == "gone" and self._absent(look):
                return True
            if self._clock.now() >= until:
                return False
            await self._clock.sleep(self._plane.look_every_s)

    def _unknown(self, request: SweepRequest, why: str) -> RigError:
        self._unprovable = RigError(
            "UNKNOWN",
            f"{request.name} in {request.zone} of project {request.project} may exist and may cost "
            f"money: {why}; the sweep stops here",
            "sweep again, which settles it first, or look for it by its name",
        )
        self._say(f"{request.name} in {request.place} may still exist: {why}")
        return self._unprovable

    async def _give_up(self, error: BaseException) -> None:
        """Cancel what is alive because of `error`. What cannot be proven gone is raised, and the
        record goes on naming it."""
        live = self.record.live
        if live is None or error is self._unprovable:
            return
        self._say(f"Giving up; cancelling {live.name} in {live.place}")
        try:
            await self._leave(live, "left")
        except RigError as left:
            raise left from error
        if isinstance(error, RigError):
            what = f"{error.what}; {live.name} was cancelled and is gone"
            raise RigError(error.error_class, what, error.next_step) from error

    # What an earlier sweep left

    async def _taken_over(self) -> bool:
        """Settle the record of the last sweep; whether it holds a machine that can be given."""
        self._book.load()
        live, found = self.record.live, self.record.found
        request = live if live is not None else found.request if found is not None else None
        if request is None:
            return False
        if request.project != self._wish.project:
            self._unprovable = RigError(
                "DENIED",
                f"an earlier sweep left {request.name} in {request.zone} of another project, "
                f"{request.project}; nothing was asked for",
                "sweep in that project first, which settles it",
            )
            raise self._unprovable
        if found is not None:
            return await self._still_there(found)
        assert live is not None
        self._say(f"An earlier sweep left {live.name} in {live.place}; settling it first")
        wanted = live.machine == self._wish.machine and live.place in self._wish.places
        if self.record.phase == "cancelling" or not wanted:
            await self._leave(live, "left")
        elif await self._exists(live):
            refusal = await self._followed(live)
            if refusal is not None:
                self._heed(live.place, refusal)
        else:
            self._over(live, "unknown")
        return self.record.found is not None

    async def _still_there(self, found: SweepFound) -> bool:
        """Whether the machine of the last sweep still is; then there is nothing to sweep for."""
        self._seen = True
        try:
            look = await self._readable(found.request)
        except RigError:
            why = "an earlier sweep found it, and it cannot be read"
            raise self._unknown(found.request, why) from None
        if look.state == "gone":
            self._book.save(found=None)
            return False
        wish, request = self._wish, found.request
        if look.state == "refused" or request.machine != wish.machine:
            raise RigError(
                "EXISTS",
                f"{request.name} ({request.machine}) of an earlier sweep is still in "
                f"{request.zone}; nothing was asked for",
                "destroy it first",
            )
        self._say(f"An earlier sweep has found {request.name} in {request.place}")
        return True

    def _over(self, request: SweepRequest, ended: SweepEnd, said: str = "") -> None:
        self._book.over(request, ended, self._clock.now(), said)
        error_class = {"stockout": "CAPACITY", "expired": "CAPACITY", "quota": "QUOTA"}.get(ended)
        if error_class is None:
            self._settled(request, "absent")
        else:
            self._settled(request, "refused", error_class=error_class)

    def _settled(self, request: SweepRequest, outcome: str, **more: str) -> None:
        if self._journal is not None:
            named = {"intent": request.intent, "zone": request.zone, "outcome": outcome}
            self._journal.append("create settled", **named, **more)

    # Words

    def _say(self, sentence: str) -> None:
        self._tell(f"{sentence}.")

    def _waiting(self, request: SweepRequest, state: SweepState) -> str:
        since = f"in {request.place} since {hour_of(request.asked_unix)}"
        if state == "starting":
            return f"Starting {since}"
        if state == "gone":
            return f"Asked {since}; not to be seen yet"
        cost = ", costs nothing until granted" if self._plane.queue_is_free else ""
        return f"Still queued {since}{cost}"
