"""Reaching into a machine on EC2: its boot, an act on it, a tunnel, its stop and start, its end.

Everything goes by the machine's id, through EC2 and Systems Manager. Knows no runtime, and neither
how a machine is asked for nor how it is found.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.boundaries.ssm_shell import SsmShell
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.knowledge.sweep_refusals import region_of
from forge.parts.planes.capacity_plane import MANAGED_BY, Rental
from forge.parts.planes.ec2_calls import Ec2Calls
from forge.parts.planes.ec2_settings import Ec2Settings
from forge.parts.planes.ec2_things import (
    EC2_ENDED,
    ec2_market,
    ec2_state,
    instance_ended,
    same_instance,
)
from forge.parts.planes.host_plane import HostCommand, Tunnel

EC2_CHANGE_S = 10.0  # seconds for an end, a start or a stop
_BOOT_MARK = "GEMMA4-BOOT"
_BOOT_LOG_S, _BOOT_LOG_LINES, _BOOT_TEXT_LIMIT = 20.0, 4000, 200_000
# What the tunnel's program gets of the environment: AWS's own variables, the way to a proxy, and
# what a program needs to be found and to find its user's files. No other service's tokens.
_TUNNEL_PASSED = re.compile(
    r"AWS_\w+|(?:HTTPS?|NO|ALL)_PROXY|PATH|HOME|USER|LOGNAME|LANG|LC_\w+|XDG_\w+|TZ|TMPDIR"
    r"|SSL_CERT_\w+|PYTHONPATH|PYTHONUSERBASE",  # launch.py names the packages' folder so
    re.I,
)


class Ec2Host:
    """HostPlane over EC2 and Systems Manager, and the switch of a machine; the base of Ec2."""

    # Within so many seconds what was just made is to be seen, or never will be: a choice on the
    # safe side, EC2 promises no length.
    settle_s = 90.0

    def __init__(
        self,
        settings: Callable[[], Ec2Settings],
        boot: Callable[[], Mapping[str, Path]],
        tunnel_program: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._boot = boot
        self._tunnel_program = tunnel_program
        self._environment = environment

    async def boot_text(self, rental: Rental) -> str:
        """The machine's console; where the boot has not spoken there yet, what its program wrote
        down besides, through Systems Manager. UNREACHABLE while there is neither."""
        calls, text = self._calls(rental.zone, rental.project), ""
        trouble: RigError | None = None
        try:
            text = await calls.console(rental.provider_id)
        except RigError as error:
            trouble = error
        if _BOOT_MARK not in text and rental.state == "running":
            log = await self._boot_log(rental)
            text = f"{text.rstrip()}\n{log}" if log else text
        if not text.strip():
            raise trouble or RigError(
                "UNREACHABLE",
                f"{rental.name} in {rental.zone} has written nothing to its console yet",
                "ask again in a minute",
            )
        return text.encode("utf-8", "replace")[-_BOOT_TEXT_LIMIT:].decode("utf-8", "ignore")

    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str:
        _refuse_unmarked(rental)
        if rental.kind != "machine" or rental.state != "running":
            what = f"{rental.name} in {rental.zone} does not run ({rental.kind} {rental.state})"
            raise RigError("UNREACHABLE", what, "look at the machine's state")
        shell, program = self._shell(rental), command.program
        one, act = rental.provider_id, command.act
        return await shell.run(one, program, act, command.arguments, timeout_s)

    async def ended_why(self, name: str, zone: str, provider_id: str) -> str:
        """From that very machine, which EC2 shows for about an hour after its end."""
        del name
        if not provider_id.startswith("i-"):
            return ""
        machine = await (await self._proven(zone)).machine(provider_id)
        return "" if machine is None else instance_ended(machine)

    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel:
        _refuse_unmarked(rental)
        region, profile = ec2_region(rental.zone), self._settings().aws_profile
        words = [rental.provider_id, region, str(remote_port), str(local_port)]
        words += [profile] if profile else []
        source = os.environ if self._environment is None else self._environment
        passed = {key: value for key, value in source.items() if _TUNNEL_PASSED.fullmatch(key)}
        return Tunnel([sys.executable, str(self._tunnel_program), *words], passed)

    async def start_machine(self, rental: Rental) -> None:
        """Start that very machine, which was stopped: it is billed again, and its end stays where
        it was. Raises CAPACITY, QUOTA, BUSY while it still stops, UNKNOWN."""
        await self._switched(rental, True)

    async def stop_machine(self, rental: Rental) -> None:
        """Stop that very machine: its disk stays and is billed. Raises INVALID for a spot one."""
        await self._switched(rental, False)

    async def _switched(self, rental: Rental, on: bool) -> None:
        calls = await self._proven(rental.zone, rental.project)
        machine = None if rental.kind == "disk" else await self._very(calls, rental)
        if machine is None:
            raise RigError("NOT_FOUND", f"there is no machine {rental.name} in {rental.zone}")
        state = ec2_state(machine)
        if not on and ec2_market(machine) == "spot":
            raise RigError(
                "INVALID",
                f"{rental.name} is a one-time spot machine, which EC2 cannot stop, only end",
                f"plan_destroy(name='{rental.name}', zone='{rental.zone}')",
            )
        if state in (("pending", "running") if on else ("stopping", "stopped")):
            return
        if state != ("stopped" if on else "running"):
            what = f"{rental.name} is {state} and cannot be {'started' if on else 'stopped'} now"
            raise RigError("BUSY", what, "wait a minute, then repeat")
        await calls.switch(rental.provider_id, on, EC2_CHANGE_S)

    async def _very(self, calls: Ec2Calls, rental: Rental) -> dict[str, Any] | None:
        """That very machine now, None where it is ended or gone. Raises DENIED for another one, and
        UNKNOWN for a young one that is not to be seen: EC2 shows what was made with a delay."""
        machine = await calls.machine(rental.provider_id)
        if machine is None:
            if time.time() - rental.created_unix < self.settle_s:
                raise RigError(
                    "UNKNOWN",
                    f"{rental.name} ({rental.provider_id}) was made just now and is not to be seen",
                    "read it again in a minute",
                )
            return None
        if ec2_state(machine) in EC2_ENDED:
            return None
        if not same_instance(machine, rental):
            raise another_thing(rental)
        return machine

    async def _boot_log(self, rental: Rental) -> str:
        """What the boot program kept on the machine; empty where nobody gets in yet."""
        given: dict[str, str | int | bool] = {"lines": _BOOT_LOG_LINES}
        try:
            if not await self._shell(rental).online(rental.provider_id):
                return ""
            program = self._boot()["boot-program"].read_bytes()
            command = HostCommand(program, "boot_log", given)
            return await self.run_on_host(rental, command, _BOOT_LOG_S)
        except (RigError, KeyError, OSError):
            return ""

    def _aws(self, settings: Ec2Settings) -> Aws:
        return Aws(settings.aws_account, settings.aws_profile, self._environment)

    def _calls(self, zone: str, account: str = "") -> Ec2Calls:
        """Calls where `zone` is. Raises DENIED for what another account than the settings' has:
        read with these credentials it would only look gone."""
        settings = self._settings()
        if account not in ("", settings.aws_account):
            raise RigError("DENIED", f"that is in another account, {account}")
        return Ec2Calls(self._aws(settings), ec2_region(zone))

    async def _proven(self, zone: str, account: str = "") -> Ec2Calls:
        """The same, after the proof that the credentials are of that account: in another one
        everything would look gone."""
        calls = self._calls(zone, account)
        await calls.aws.check_account(calls.region)
        return calls

    def _shell(self, rental: Rental) -> SsmShell:
        return SsmShell(self._aws(self._settings()), ec2_region(rental.zone))


def ec2_region(zone: str) -> str:
    """The region of an availability zone. Raises INVALID for what is none."""
    region = region_of(zone)
    if region == zone or not zone.startswith(region):
        raise invalid_parameter("zone", "is no availability zone such as us-east-1a")
    return region


def another_thing(rental: Rental) -> RigError:
    """The refusal of what is not the thing that was read."""
    return RigError(
        "DENIED",
        f"{rental.name} in {rental.zone} ({rental.provider_id}) is another one than was read, or "
        "lost its marks; it stays untouched",
        "read it again",
    )


def _refuse_unmarked(rental: Rental) -> None:
    """Raise RigError DENIED for a machine that does not carry our mark: nobody gets in there."""
    if rental.labels.get("managed-by") != MANAGED_BY:
        raise RigError("DENIED", f"{rental.name} in {rental.zone} is somebody else's")
