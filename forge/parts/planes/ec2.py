"""EC2 as a plane: GPU machines that are asked for, listed, reached into through SSM, and ended.

Everything goes through AWS's SDK. Knows no runtime; what is ours and may be spent, others judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.lean_program import lean_program
from forge.parts.ground.redact import clean
from forge.parts.knowledge.sweep_plan import SweepRequest
from forge.parts.planes.capacity_plane import (
    Census,
    Offer,
    Order,
    Quota,
    Rental,
    RentalMarket,
    shown_order,
)
from forge.parts.planes.ec2_calls import (
    Ec2Calls,
    Ec2Prices,
    held_in_region,
    made_by_request,
)
from forge.parts.planes.ec2_catalogue import Ec2Catalogue
from forge.parts.planes.ec2_host import EC2_CHANGE_S, Ec2Host, another_thing, ec2_region
from forge.parts.planes.ec2_order import (
    Ec2Place,
    ec2_client_token,
    launch_parameters,
    launch_words,
    order_of,
    refuse_market,
    shown_place,
)
from forge.parts.planes.ec2_settings import (
    EC2_REGIONS,
    Ec2Settings,
    ec2_cautions,
    ec2_home_region,
    ec2_markets,
    ec2_zones,
)
from forge.parts.planes.ec2_things import (
    EC2_ENDED,
    EC2_ID,
    ec2_state,
    instance_rental,
    instance_zone,
    marked_as,
    request_look,
    same_volume,
    the_one_of,
    volume_rental,
    volume_users,
)
from forge.parts.planes.ec2_user_data import user_data
from forge.parts.planes.sweep_plane import SweepLook

_LAUNCH_LEAST_S = 4.0  # seconds: with less a launch would only come to be of unknown fate
_SWEEP_LAUNCH_S = 30.0  # a new instance profile is known everywhere within half a minute


class Ec2(Ec2Host):
    """CapacityPlane, SweepPlane and HostPlane over EC2 and Systems Manager.

    `boot` gives the files of what a machine boots: "boot-program" and "gemma4-boot", its document.
    `tunnel_program` is the program that carries a port. `environment` is the SDK's (None: this
    process's own). Settings are read at each call: while they are at fault, every verb says so.

    A machine's zone is its availability zone, its id EC2's, its name the tag. Names are not unique
    on EC2, so every act is by id; a thing may be described, and so planned for and destroyed, under
    its id in the place of its name.
    """

    vocabulary: Mapping[str, str] = {
        "hardware": "gpu",
        "order": "gpu_instance",
        "rental": "gpu_instance",
        "destroy": "destroy",
        "rented": "GPU machine",
        "place": "the rented GPU machine",
        "machine": "model server on the rented GPU machine",
        "console": "console_log",
        "address": "endpoint",
        "cost": "The GPU machine is billed for as long as it runs, the call costs nothing",
        "payer": "account",
        "quota_rule": "Spot and on-demand have a quota each, in vCPUs of the whole region",
        "quota_where": "Service Quotas, Amazon EC2",
    }
    hard_stop = (
        "a timer on the machine shuts it down, and shutting down terminates it; EC2 itself ends "
        "nothing"
    )
    # A machine is to be seen within seconds and gone within minutes (one with a GPU shuts down
    # slowly); the lengths are choices on the safe side.
    read_back_s = 10.0
    look_every_s = 10.0
    gone_s = 600.0
    queue_is_free = True
    asks_in_one_call = True
    # Seconds of the 20 that a create may take, for its order; a look may follow.
    create_s = 14.0
    # Whose orders are shown; the rig that serves on the machine sets them.
    _rig, _owner = "", ""

    def __init__(
        self,
        settings: Callable[[], Ec2Settings],
        boot: Callable[[], Mapping[str, Path]],
        tunnel_program: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(settings, boot, tunnel_program, environment)
        self._catalogue = Ec2Catalogue()
        self._prices = Ec2Prices()

    # Capacity

    async def offers(self) -> Sequence[Offer]:
        """Each wished zone and way of renting, in that order, with its price and what is known."""
        settings = self._settings()
        return await self._catalogue.offers(self._aws(settings), settings)

    async def quota(self, zone: str, market: RentalMarket) -> Quota:
        """The vCPU quota of the zone's region, in machines."""
        settings = self._settings()
        return await self._catalogue.quota(self._aws(settings), settings, zone, market)

    async def create(self, order: Order) -> None:
        """Send the order; returns once EC2 made the machine. Raises the classes of CapacityPlane,
        and BUSY where a read before the order failed, so that nothing was asked for."""
        await self._launched(order, time.monotonic() + self.create_s)

    async def census(self) -> Census:
        """All machines and volumes with our mark in all regions that the account has enabled.

        A volume that hangs on a machine goes with it and is not counted beside it. Raises what
        every region was refused with, and AUTH.
        """
        settings = self._settings()
        home = Ec2Calls(self._aws(settings), ec2_home_region(settings))
        await home.aws.check_account(home.region)
        regions = await home.regions()
        reading = (
            held_in_region(Ec2Calls(home.aws, region), self._prices, settings.chip)
            for region in regions
        )
        answers = await asyncio.gather(*reading, return_exceptions=True)
        rentals: list[Rental] = []
        unread: list[str] = []
        refusals = [one for one in answers if isinstance(one, RigError)]
        for region, answer in zip(regions, answers, strict=True):
            if isinstance(answer, RigError):
                if answer.error_class == "AUTH" or len(refusals) == len(regions):
                    raise answer
                unread.append(clean(f"{region} ({answer.error_class}: {answer.what})", 200))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rentals += answer[0]
                unread += answer[1]
        return Census(rentals, tuple(unread))

    async def describe(self, name: str, zone: str) -> Rental:
        """The machine of that name or id, or the volume that one left behind. Raises UNKNOWN with
        the ids where several of ours bear the name."""
        settings, calls = self._settings(), await self._proven(zone)
        named = name if EC2_ID.fullmatch(name) else ""
        place = {"availability_zone": zone}
        if named:
            found = [await calls.machine(name)] if name.startswith("i-") else []
        else:
            found = list(await calls.machines(tag_Name=name, **place))
        there = [one for one in found if one and ec2_state(one) != "terminated"]
        machine = the_one_of([one for one in there if instance_zone(one) == zone], name, zone)
        if machine is not None:
            price = await self._prices.of(calls, machine, settings.chip)
            return instance_rental(machine, settings.aws_account, price, named)
        if named:
            volumes = [await calls.volume(name)] if name.startswith("vol-") else []
        else:
            volumes = list(await calls.volumes(tag_Name=name, **place))
        volume = the_one_of([v for v in volumes if v and v["AvailabilityZone"] == zone], name, zone)
        if volume is not None:
            return volume_rental(volume, settings.aws_account, named)
        raise RigError("NOT_FOUND", f"there is no machine {name} in {zone}, and no volume of it")

    async def destroy(self, rental: Rental) -> None:
        """End that very thing: it is read once more by its id, and one that is another than was
        read, or lost a mark of ours, raises DENIED. Returns when EC2 took the order."""
        calls = await self._proven(rental.zone, rental.project)
        if rental.kind == "disk":
            volume = await calls.volume(rental.provider_id)
            if volume is None:
                return
            if not same_volume(volume, rental):
                raise another_thing(rental)
            if volume_users(volume):
                raise RigError("DENIED", f"the volume {rental.provider_id} hangs on a machine")
            await calls.delete_volume(rental.provider_id, EC2_CHANGE_S)
            return
        if await self._very(calls, rental) is not None:
            await calls.terminate(rental.provider_id, EC2_CHANGE_S)

    def cautions(self) -> tuple[str, ...]:
        """What the settings leave a machine without, in sentences."""
        return ec2_cautions(self._settings())

    def create_command(self, zone: str, market: str, hours: float) -> list[str]:
        """The order of a create as the words of the AWS CLI, but for what is made or looked up at
        the call; without what the machine boots."""
        settings = self._settings()
        zone = zone or (ec2_zones(settings) or [f"{EC2_REGIONS[0]}a"])[0]
        ways = ec2_markets(settings)
        way = next((one for one in ways if one == market), ways[0])
        order = shown_order(self._rig, self._owner, zone, way, hours, 0)
        place = shown_place(settings, zone, order.labels)
        parameters = launch_parameters(settings, order, place, b"")
        return launch_words(ec2_region(zone), settings.aws_profile, parameters)

    # The sweep

    async def ask(self, request: SweepRequest) -> None:
        self._calls(request.zone, request.project)
        await self._launched(order_of(request), time.monotonic() + _SWEEP_LAUNCH_S)

    async def look(self, request: SweepRequest) -> SweepLook:
        calls = await self._proven(request.zone, request.project)
        machines, volumes = await made_by_request(calls, request, self._token(request))
        return request_look(machines, volumes)

    async def cancel(self, request: SweepRequest) -> None:
        calls = await self._proven(request.zone, request.project)
        machines, volumes = await made_by_request(calls, request, self._token(request))
        for one in machines:
            if ec2_state(one) in EC2_ENDED:
                continue
            if not marked_as(one, request.labels):
                raise RigError(
                    "DENIED", f"{one['InstanceId']} carries this request's marks no more"
                )
            await calls.terminate(one["InstanceId"], EC2_CHANGE_S)
        for one in volumes:
            if not volume_users(one):  # others go with their machine, seen or not
                await calls.delete_volume(one["VolumeId"], EC2_CHANGE_S)

    # Reading and asking

    def _token(self, request: SweepRequest) -> str:
        kind = self._settings().instance_type
        return ec2_client_token(request.intent, kind, request.zone)

    async def _launched(self, order: Order, until: float) -> None:
        settings, calls = self._settings(), self._calls(order.zone)
        refuse_market(order.market)
        data = self._user_data(order.life_s)
        try:
            await calls.aws.check_account(calls.region)
            image = await self._catalogue.machine_image(calls.aws, settings, calls.region)
            subnet, vpc = await calls.subnet(order.zone, settings.subnet)
            group = await calls.group(vpc, order.labels)
        except RigError as error:
            if error.error_class not in ("UNKNOWN", "UNREACHABLE", "TIMEOUT", "NOT_FOUND"):
                raise
            # None of these is about the order, which was not sent.
            raise RigError(
                "BUSY",
                f"nothing was rented, a look before it failed: {error.what}",
                error.next_step or "repeat it",
            ) from None
        if time.monotonic() + _LAUNCH_LEAST_S > until:
            raise RigError(
                "BUSY", "nothing was rented, the looks before it took too long", "repeat it"
            )
        place = Ec2Place(image.image_id, image.root_device, subnet, group)
        await calls.launch(launch_parameters(settings, order, place, data), until)

    def _user_data(self, life_s: int) -> bytes:
        files = self._boot()
        try:
            program, document = (files[k].read_bytes() for k in ("boot-program", "gemma4-boot"))
        except (KeyError, OSError):
            raise RigError("INTERNAL", "what the machine is to boot cannot be read") from None
        # Without its comments and docstrings, which are a quarter of all that EC2 takes.
        return user_data(lean_program(program.decode()).encode(), document, life_s)
