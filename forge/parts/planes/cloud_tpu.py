"""The Cloud TPU API as a plane: TPU machines by queued resources, asked for, listed, deleted.

Everything goes through gcloud. Knows no runtime; what is ours and what may be spent, others judge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, GcloudFlag, gcloud_environment
from forge.parts.boundaries.gcloud_ssh import GcloudShell
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.planes.capacity_plane import Census, Offer, Order, Quota, Rental, RentalMarket
from forge.parts.planes.google_settings import GOOGLE_WORDS
from forge.parts.planes.host_plane import HostCommand, Tunnel
from forge.parts.planes.sweep_plane import SweepLook
from forge.parts.planes.tpu_catalogue import (
    PREEMPTIBLE_MARKETS,
    TPU_API_ZONES,
    TPU_NO_LIMIT,
    TPU_QUOTAS,
    tpu_availability,
    tpu_chips,
    tpu_limit,
    tpu_price,
)
from forge.parts.planes.tpu_order import (
    ENDLESS_TPU_MARKETS,
    TPU_MARKETS,
    CloudTpuSettings,
    tpu_cautions,
    tpu_hard_stop,
    tpu_markets,
    tpu_order_call,
    tpu_zones,
)
from forge.parts.planes.tpu_reads import (
    TPU_NODES,
    delete_tpu,
    got_answer,
    listed_items,
    read_tpu,
    read_tpu_lists,
    refuse_for_all,
    tpu_zone_lists,
)
from forge.parts.planes.tpu_things import (
    TpuThing,
    failed_words,
    tpu_ended,
    tpu_holders,
    tpu_look,
    tpu_machines,
    tpu_rental,
    tpu_things,
)

TPU_BOOT_KEY = "startup-script"  # of the metadata: under it the fixed program goes out

_TPU_CHANGE_S = 14.0  # seconds for a create or a delete, of the 20 that it has with its read
_TPU_SWEEP_CALL_S = 60.0  # seconds for a sweep's call: it is a job, and nobody waits for an answer
_TPU_BOOT_LINES, _TPU_BOOT_TEXT = 4000, 200_000  # lines asked for, characters handed on


class CloudTpu:
    """CapacityPlane, SweepPlane and HostPlane over `gcloud compute tpus`.

    A machine is a queued resource with its node, both of one name; the labels are the node's.
    `boot` gives the files that go out as metadata, by key. `environment` is gcloud's (None: this
    process's own). Settings are read at each call: while they are at fault, every verb says so.

    Only a flex-start ends by itself. Anything else is refused (DENIED) without NO_HARD_STOP_OK, and
    `hard_stop` is empty where MARKETS has nothing else. `offers`, `quota` and `census` take one or
    two gcloud calls for each zone, as many at a time as there are cores, and so perhaps longer than
    the 5 s of a CapacityPlane: 12 lists took 15 s on 2 cores that had other work (2026-11-30).
    """

    vocabulary: Mapping[str, str] = {
        **GOOGLE_WORDS,
        "hardware": "tpu",
        "order": "tpu_queued_resource",
        "rental": "queued_resource",
        "destroy": "destroy",
        "rented": "TPU machine",
        "place": "the rented TPU machine",
        "console": "tpu_serial_log",
        "address": "tpu_endpoint",
        "machine": "container on the rented TPU machine",
        "cost": "The TPU machine is billed for as long as it runs, the call costs nothing",
    }
    endless_markets = ENDLESS_TPU_MARKETS
    # A request is seen at once, a live node is gone after about 2 min, as people report; the
    # lengths are choices on the safe side.
    read_back_s = 10.0
    settle_s = 90.0
    look_every_s = 15.0
    gone_s = 300.0
    queue_is_free = True
    queued_markets = TPU_MARKETS
    boot_patience_s = 45.0  # seconds for one reading of the boot, within a client's patience

    def __init__(
        self,
        settings: Callable[[], CloudTpuSettings],
        boot: Callable[[], Mapping[str, Path]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._boot = boot
        self._environment = environment

    @property
    def hard_stop(self) -> str:
        """How the provider ends a machine in the markets of the settings; empty where in none."""
        return tpu_hard_stop(self._settings())

    def cautions(self) -> tuple[str, ...]:
        """What the settings leave a machine without, in sentences."""
        return tpu_cautions(self._settings())

    # Capacity

    async def offers(self) -> Sequence[Offer]:
        """Each wished zone and way of renting, in that order, with its price and what is known."""
        settings = self._settings()
        chip, kind = settings.chip, settings.accelerator_type
        zones, markets = tpu_zones(settings), tpu_markets(settings)
        command = ("compute", "tpus", "accelerator-types", "list")
        answers = await read_tpu_lists(
            self._gcloud(), [GcloudCall(command, "", {"zone": zone}) for zone in zones]
        )
        refuse_for_all(answers)
        offers = []
        for zone, answer in zip(zones, answers, strict=True):
            for market in markets:
                price, source = tpu_price(chip, kind, zone, market)
                available, how = tpu_availability(answer, chip, kind, zone, market)
                offers.append(Offer(zone, market, price, source, available, how))
        return offers

    async def quota(self, zone: str, market: RentalMarket) -> Quota:
        """The zone's quota for that market, in machines, and how many hold it now: what is queued
        holds it too, and what is dead as well; the dead are named.

        Raises UNKNOWN where no limit is told, and what reading it raised.
        """
        settings = self._settings()
        chip, kind = settings.chip, settings.accelerator_type
        if chip not in TPU_QUOTAS:
            raise RigError("UNKNOWN", f"no quota of the Cloud TPU API for {chip} is known here")
        name = TPU_QUOTAS[chip][0 if market in PREEMPTIBLE_MARKETS else 1]
        flags: dict[str, GcloudFlag] = {"service": "tpu.googleapis.com"}
        info = GcloudCall(("beta", "quotas", "info", "describe"), name, flags)
        answers = await read_tpu_lists(self._gcloud(), [info, *tpu_zone_lists(zone)])
        limit = tpu_limit(got_answer(answers[0]).thing(), zone)
        things = tpu_things(got_answer(answers[1]).things(), got_answer(answers[2]).things())
        holders = tpu_holders(things, kind, market)
        dead = ", ".join(thing.name for thing in holders if thing.dead)
        note = f" (dead, but held until deleted: {clean(dead, 300)})" if dead else ""
        most = TPU_NO_LIMIT if limit is None else limit // tpu_chips(kind)
        return Quota(f"{name}{note}", most, tpu_machines(holders, kind))

    async def create(self, order: Order) -> None:
        """Send the order; returns once the request is in the queue. Of a name that a dead request
        keeps, EXISTS says so."""
        call = tpu_order_call(self._settings(), order, self._boot())
        try:
            await self._gcloud().change(call, _TPU_CHANGE_S)
        except RigError as error:
            if error.error_class != "EXISTS":
                raise
            raise await self._why_exists(order, error) from None

    async def _why_exists(self, order: Order, error: RigError) -> RigError:
        try:
            thing = await read_tpu(self._gcloud(), order.name, order.zone)
        except RigError:
            return error
        if thing is None or not thing.dead:
            return error
        said = failed_words(thing)
        return RigError(
            "EXISTS",
            f"{order.name} in {order.zone} is a dead request ({thing.queued_state}"
            f"{f': {said}' if said else ''}), which keeps the name and its quota until it is "
            "deleted",
            "destroy it first",
        )

    async def census(self) -> Census:
        """Everything of the project in all zones that have the chip, and in those of ZONES.

        Each zone is asked by itself: a list over all zones leaves out, without a word, those that
        do not answer. Raises what every zone was refused with; any other is in `unread`.
        """
        settings = self._settings()
        known = TPU_API_ZONES.get(settings.chip, ())
        zones = list(dict.fromkeys([*tpu_zones(settings), *known]))
        answers = await read_tpu_lists(
            self._gcloud(), [call for zone in zones for call in tpu_zone_lists(zone)]
        )
        refuse_for_all(answers)
        rentals: list[Rental] = []
        unread: list[str] = []
        for zone, queued, nodes in zip(zones, answers[::2], answers[1::2], strict=True):
            try:
                things = tpu_things(listed_items(queued), listed_items(nodes))
            except RigError as error:
                unread.append(clean(f"{zone} ({error.error_class}: {error.what})", 200))
                continue
            for thing in things:
                try:
                    rentals.append(self._rental(thing, settings))
                except RigError as error:  # it is told, and does not hide the others
                    unread.append(clean(f"{thing.name} in {zone} ({error.what})", 200))
        return Census(rentals, tuple(unread))

    async def describe(self, name: str, zone: str) -> Rental:
        """The request of that name with its node, or what is left of the two."""
        return self._rental(await self._present(name, zone), self._settings())

    async def destroy(self, rental: Rental) -> None:
        """Delete that very thing: it is read once more, and a namesake raises DENIED. Returns when
        the provider took the order; a live node takes minutes to go."""
        gcloud, settings = self._gcloud(), self._settings()
        if rental.project != gcloud.project:
            raise RigError("DENIED", f"{rental.name} is in another project, {rental.project}")
        thing = await read_tpu(gcloud, rental.name, rental.zone)
        if thing is None:
            return
        now = self._rental(thing, settings)
        same = ("kind", "provider_id", "created_at")
        if any(getattr(now, key) != getattr(rental, key) for key in same):
            what = f"{rental.name} in {rental.zone} is not what it was when it was read"
            raise RigError("DENIED", f"{what}; nothing was deleted", "read it again")
        await delete_tpu(gcloud, thing, _TPU_CHANGE_S)

    # The sweep

    async def ask(self, request: SweepRequest) -> None:
        order = Order(
            name=request.name,
            zone=request.zone,
            intent=request.intent,
            labels=request.labels,
            life_s=request.life_s,
            market=cast(RentalMarket, request.market),
            valid_s=max(1, round(request.valid_s)),
        )
        call = tpu_order_call(self._settings(), order, self._boot())
        await self._gcloud(request.project).change(call, _TPU_SWEEP_CALL_S)

    async def look(self, request: SweepRequest) -> SweepLook:
        return tpu_look(await read_tpu(self._gcloud(request.project), request.name, request.zone))

    async def cancel(self, request: SweepRequest) -> None:
        gcloud = self._gcloud(request.project)
        thing = await read_tpu(gcloud, request.name, request.zone)
        if thing is None:
            return
        if thing.labels.get("intent") != request.intent:
            what = f"{request.name} in {request.zone} is not what this request made"
            raise RigError("DENIED", what)
        await delete_tpu(gcloud, thing, _TPU_SWEEP_CALL_S)

    # The host

    async def boot_text(self, rental: Rental) -> str:
        """What the boot program wrote on the machine, read over ssh: this API gives no serial
        port. Raises as `run_on_host`; UNREACHABLE also while ssh does not answer yet."""
        command = HostCommand(self.host_program(), "boot_log", {"lines": _TPU_BOOT_LINES})
        try:
            text = await self.run_on_host(rental, command, self.boot_patience_s)
        except RigError as error:
            if error.error_class != "TIMEOUT":
                raise
            raise RigError("UNREACHABLE", error.what, "ask again in a minute") from None
        return text[-_TPU_BOOT_TEXT:]

    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str:
        if rental.kind != "machine" or rental.state == "pending":
            what = f"{rental.name} in {rental.zone} does not run yet ({rental.kind} {rental.state})"
            raise RigError("UNREACHABLE", what, "ask again when it is granted")
        shell = self._shell(rental)
        program, act, given = command.program, command.act, command.arguments
        return await shell.run(rental.name, rental.zone, program, act, given, timeout_s)

    async def ended_why(self, name: str, zone: str, provider_id: str) -> str:
        """From the request and the node as they are: this API keeps no history of what is gone."""
        return tpu_ended(await read_tpu(self._gcloud(), name, zone), provider_id, time.time())

    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel:
        argv = self._shell(rental).tunnel_argv(rental.name, rental.zone, local_port, remote_port)
        surroundings = os.environ if self._environment is None else self._environment
        return Tunnel(argv, gcloud_environment(surroundings))

    def host_program(self) -> bytes:
        """The fixed program that boots a machine and acts on it. Raises INTERNAL without it."""
        try:
            return self._boot()[TPU_BOOT_KEY].read_bytes()
        except (KeyError, OSError):
            raise RigError("INTERNAL", "this rig's boot program cannot be read") from None

    # Calls

    def _gcloud(self, project: str = "") -> Gcloud:
        return Gcloud(project or self._settings().project, environment=self._environment)

    def _shell(self, rental: Rental) -> GcloudShell:
        return GcloudShell(self._gcloud(rental.project), (*TPU_NODES, "ssh"))

    def _rental(self, thing: TpuThing, settings: CloudTpuSettings) -> Rental:
        return tpu_rental(thing, settings.project, settings.chip, settings.accelerator_type)

    async def _present(self, name: str, zone: str) -> TpuThing:
        thing = await read_tpu(self._gcloud(), name, zone)
        if thing is None:
            what = f"there is neither a queued resource nor a node {name} in {zone}"
            raise RigError("NOT_FOUND", what)
        return thing
