"""Compute Engine as a plane: TPU machines that are asked for, listed, reached into and deleted.

Everything goes through gcloud. Knows no runtime; what is ours and what may be spent, others judge.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from forge.parts.boundaries.gcloud import Gcloud, gcloud_environment
from forge.parts.boundaries.gcloud_answers import field_labels, field_text
from forge.parts.boundaries.gcloud_refusals import operation_refusal
from forge.parts.boundaries.gcloud_ssh import GcloudShell
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import (
    Census,
    Offer,
    Order,
    Quota,
    Rental,
    RentalMarket,
    listed,
)
from forge.parts.planes.compute_calls import ComputeCalls, both_answers
from forge.parts.planes.compute_catalogue import (
    FAMILY_CHIP_QUOTA,
    SPOT_CHIP_QUOTA,
    V6E_ZONES,
    ComputeCatalogue,
    compute_chips,
    compute_price,
)
from forge.parts.planes.compute_order import (
    ComputeEngineSettings,
    compute_cautions,
    compute_order_call,
    wished_markets,
)
from forge.parts.planes.compute_things import (
    COMPUTE_MODELS,
    create_error,
    disk_rental,
    disk_users,
    ended_words,
    link_end,
    machine_look,
    machine_rental,
    operation_words,
    unread_places,
)
from forge.parts.planes.google_settings import GOOGLE_WORDS, account_email
from forge.parts.planes.host_plane import HostCommand, Tunnel
from forge.parts.planes.sweep_plane import SweepLook

_PREEMPTIBLE: tuple[RentalMarket, ...] = ("spot", "flex-start")
_NO_LIMIT = 1_000_000  # machines, where the provider says -1
_SWEEP_CALL_S = 60.0  # seconds for a change of a sweep: it is a job, and nobody waits for an answer
_LOOK_PAUSE_S = 1.0


class ComputeEngine:
    """CapacityPlane, SweepPlane and HostPlane over `gcloud compute`.

    `boot` gives the files that go out as metadata, by key. `environment` is gcloud's (None: this
    process's own). Settings are read at each call: while they are at fault, every verb says so.
    """

    vocabulary: Mapping[str, str] = {
        **GOOGLE_WORDS,
        "hardware": "tpu_vm",
        "order": "tpu_vm_instance",
        "rental": "tpu_vm_instance",
        "destroy": "destroy",
        "rented": "TPU machine",
        "place": "the rented TPU machine",
        "console": "tpu_vm_serial_log",
        "address": "tpu_vm_endpoint",
        "machine": "container on the rented TPU machine",
        "cost": "The TPU machine is billed for as long as it runs, the call costs nothing",
    }
    hard_stop = "Compute Engine deletes it, with its disk, at --max-run-duration"
    # A machine is seen at once and gone within minutes; the lengths are choices on the safe side.
    read_back_s = 10.0
    settle_s = 90.0
    look_every_s = 15.0
    gone_s = 300.0
    queue_is_free = True
    queued_markets = ("flex-start",)
    # Seconds of the 20 that a create or a destroy may take: for the call itself, and, of a create,
    # from its beginning until when its refusal is watched for.
    create_s, follow_s, delete_s = 12.0, 17.0, 10.0

    def __init__(
        self,
        settings: Callable[[], ComputeEngineSettings],
        boot: Callable[[], Mapping[str, Path]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._boot = boot
        self._environment = environment
        self._catalogue = ComputeCatalogue()

    # Capacity

    async def offers(self) -> Sequence[Offer]:
        """Each wished zone and way of renting, in that order, with its price and what is known."""
        settings = self._settings()
        kind, markets = settings.machine_type, wished_markets(settings)
        zones = listed(settings.zones) or V6E_ZONES
        listings = await self._catalogue.look(kind, zones, self._calls().has_type)
        offers = []
        for zone in zones:
            available, how = listings[zone].available, listings[zone].how
            for market in markets:
                price, source = compute_price(settings.chip, kind, zone, market)
                offers.append(Offer(zone, market, price, source, available, how))
        return offers

    async def quota(self, zone: str, market: RentalMarket) -> Quota:
        """The chips' quota of the zone's region in machines, and how many machines use it now.

        Raises UNKNOWN where the region's value is not told, and what reading it raised.
        """
        settings, calls, region = self._settings(), self._calls(), region_of(zone)
        name = SPOT_CHIP_QUOTA if market in _PREEMPTIBLE else FAMILY_CHIP_QUOTA
        limit, machines = await both_answers(calls.quota(name, region), calls.machines())
        if limit == 0 and market == "flex-start":
            name, limit = FAMILY_CHIP_QUOTA, await calls.quota(FAMILY_CHIP_QUOTA, region)
        used = 0
        for thing in machines:
            kind, rental = link_end(thing, "machineType"), self._rental(thing)
            same = (rental.market in _PREEMPTIBLE) == (name == SPOT_CHIP_QUOTA)
            family = kind.split("-")[0] == settings.machine_type.split("-")[0]
            if same and family and region_of(rental.zone) == region and rental.state != "stopped":
                used += compute_chips(kind)
        chips = compute_chips(settings.machine_type)
        return Quota(name, _NO_LIMIT if limit < 0 else limit // chips, -(-used // chips))

    async def create(self, order: Order) -> None:
        """Send the order and watch for its refusal, which may come after it was taken.

        Raises the classes of CapacityPlane; EXISTS may also speak of what this very call made.
        """
        begun = time.monotonic()
        call = compute_order_call(self._settings(), order, self._boot())
        gcloud = self._gcloud()
        answer = await gcloud.change(call, self.create_s)
        operation = "" if answer.value is None else field_text(answer.thing(), "name")
        calls = ComputeCalls(gcloud)
        while time.monotonic() < begun + self.follow_s:
            try:
                machine = await calls.thing("instances", order.name, order.zone)
                if machine is not None and field_text(machine, "status") != "PROVISIONING":
                    return
                found = await calls.operations(order.name, order.zone)
            except RigError:
                return  # it was taken; whoever reads it back will meet the same fault
            _, error = create_error(found, operation)
            refusal = operation_refusal(error, project=gcloud.project)
            if refusal is not None:
                raise refusal
            await asyncio.sleep(_LOOK_PAUSE_S)

    async def census(self) -> Census:
        """All machines and disks of the project in all zones. A disk that hangs on a machine goes
        with it and is not counted beside it."""
        calls = self._calls()
        machines, disks = await calls.all_things()
        unread = [*unread_places(machines.unread), *unread_places(disks.unread)]
        rentals: list[Rental] = []
        names: set[tuple[str, str]] = set()
        for thing in machines.things():
            names.add((link_end(thing, "zone"), field_text(thing, "name")))
            with _told_as_unread(thing, unread):
                rentals.append(self._rental(thing))
        for thing in disks.things():
            zone = link_end(thing, "zone")
            if not any((zone, user) in names for user in disk_users(thing)):
                with _told_as_unread(thing, unread):
                    rentals.append(disk_rental(thing, calls.project))
        return Census(rentals, tuple(dict.fromkeys(unread)))

    async def describe(self, name: str, zone: str) -> Rental:
        """The machine of that name, or the disk that one left behind."""
        calls = self._calls()
        machine = await calls.thing("instances", name, zone)
        if machine is not None:
            return self._rental(machine)
        disk = await calls.thing("disks", name, zone)
        if disk is not None:
            return disk_rental(disk, calls.project)
        raise RigError("NOT_FOUND", f"there is no machine {name} in {zone}, and no disk of it")

    async def destroy(self, rental: Rental) -> None:
        """Delete that very thing: it is read once more, and a namesake raises DENIED. Returns when
        the provider took the order; the end itself takes a minute or more."""
        calls = self._calls()
        if rental.project != calls.project:
            raise RigError("DENIED", f"{rental.name} is in another project, {rental.project}")
        kind: Literal["instances", "disks"] = "disks" if rental.kind == "disk" else "instances"
        thing = await calls.thing(kind, rental.name, rental.zone)
        if thing is None:
            return
        now = self._rental(thing) if kind == "instances" else disk_rental(thing, calls.project)
        same = ("provider_id", "created_at")
        if any(getattr(now, key) != getattr(rental, key) for key in same):
            raise RigError("DENIED", f"{rental.name} in {rental.zone} is another one than was read")
        await calls.delete(kind, rental.name, rental.zone, self.delete_s)

    def cautions(self) -> tuple[str, ...]:
        """What the settings leave a machine without, in sentences."""
        return compute_cautions(self._settings())

    # The sweep

    async def ask(self, request: SweepRequest) -> None:
        if request.market not in COMPUTE_MODELS:
            raise RigError("INVALID", f"Compute Engine knows no market {request.market!r}")
        order = Order(
            name=request.name,
            zone=request.zone,
            intent=request.intent,
            labels=request.labels,
            life_s=request.life_s,
            market=request.market,
            valid_s=round(request.valid_s),
        )
        call = compute_order_call(self._settings(), order, self._boot())
        await self._gcloud(request.project).change(call, _SWEEP_CALL_S)

    async def look(self, request: SweepRequest) -> SweepLook:
        calls = self._calls(request.project)
        machine = await calls.thing("instances", request.name, request.zone)
        if machine is not None and _intent_of(machine) != request.intent:
            return SweepLook("gone", "a machine of that name is somebody else's")
        if machine is not None:
            return machine_look(machine)
        try:
            operations = await calls.operations(request.name, request.zone)
        except RigError:
            operations = []  # that it is gone was read all the same; only the reason was not
        runs, error = create_error(operations)
        if runs:
            return SweepLook("queued")
        said = operation_words(error) if error else ended_words(operations, self._account())
        left = await self._left_disk(calls, request)
        return SweepLook("refused" if left else "gone", said)

    async def cancel(self, request: SweepRequest) -> None:
        calls, name, zone = self._calls(request.project), request.name, request.zone
        machine = await calls.thing("instances", name, zone)
        if machine is not None:
            if _intent_of(machine) != request.intent:
                raise RigError("DENIED", f"{name} in {zone} is not what this request made")
            await calls.delete("instances", name, zone, _SWEEP_CALL_S)
        if await self._left_disk(calls, request):
            await calls.delete("disks", name, zone, _SWEEP_CALL_S)

    # The host

    async def boot_text(self, rental: Rental) -> str:
        """The machine's first serial port, its newest part."""
        return await self._calls().console(rental.name, rental.zone)

    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str:
        shell, act = GcloudShell(self._gcloud()), command.act
        name, zone, program = rental.name, rental.zone, command.program
        return await shell.run(name, zone, program, act, command.arguments, timeout_s)

    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel:
        shell = GcloudShell(self._gcloud())
        argv = shell.tunnel_argv(rental.name, rental.zone, local_port, remote_port)
        source = os.environ if self._environment is None else self._environment
        return Tunnel(argv, gcloud_environment(source))

    async def ended_why(self, name: str, zone: str, provider_id: str) -> str:
        """From the zone's operations on that very machine."""
        found = await self._calls().operations(name, zone, provider_id)
        return ended_words(found, self._account())

    # Reading

    def _gcloud(self, project: str = "") -> Gcloud:
        return Gcloud(project or self._settings().project, environment=self._environment)

    def _calls(self, project: str = "") -> ComputeCalls:
        return ComputeCalls(self._gcloud(project))

    def _account(self) -> str:
        return account_email(self._settings())

    def _rental(self, thing: Any) -> Rental:
        settings = self._settings()
        return machine_rental(thing, settings.project, settings.machine_type, settings.chip)

    async def _left_disk(self, calls: ComputeCalls, request: SweepRequest) -> bool:
        """Whether a disk of this request is there and hangs on no machine."""
        disk = await calls.thing("disks", request.name, request.zone)
        if disk is None or disk_users(disk):
            return False
        return disk_rental(disk, calls.project).labels.get("intent") == request.intent


def _intent_of(thing: Any) -> str:
    return field_labels(thing, "labels").get("intent", "")


@contextmanager
def _told_as_unread(thing: Any, unread: list[str]) -> Iterator[None]:
    """A thing of a list that cannot be read is told, and does not hide the others."""
    try:
        yield
    except RigError as error:
        name, zone = field_text(thing, "name") or "something", link_end(thing, "zone")
        unread.append(clean(f"{name} in {zone or 'some zone'} ({error.what})", 200))
