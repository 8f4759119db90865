"""The machines of the fake AWS's EC2: their states, which take time, and the reasons for their end.

Knows no request: what a caller may ask for is the other modules' concern.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from typing import Any

from forge.suites.fake_aws_moto import MotoAccount
from forge.suites.fake_aws_places import fill_region
from forge.suites.fake_aws_world import AwsWorld, aws_tags, known_refusal, zone_home

MACHINE_CODES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}


@dataclass
class FakeMachine:
    """One instance. `model` is moto's; `then` the state that it enters at `then_at`."""

    region: str
    model: Any
    market: str = "on-demand"
    foreign: bool = False
    spot_request: str = ""
    user_data: bytes = b""
    then: str = ""
    then_at: float = 0.0
    ended_at: float = 0.0
    unseen: int = 0
    told: str = ""  # the state that was last told to the watchers
    born: str = ""  # a foreign one's state and tags at first

    @property
    def id(self) -> str:
        return str(self.model.id)

    @property
    def state(self) -> str:
        return str(self.model.state)

    @property
    def zone(self) -> str:
        return str(self.model.availability_zone)

    @property
    def type(self) -> str:
        return str(self.model.instance_type)

    @property
    def tags(self) -> dict[str, str]:
        return aws_tags(self.model.get_tags())

    @property
    def name(self) -> str:
        return self.tags.get("Name", "")

    def shape(self) -> str:
        return json.dumps([self.state, self.tags], sort_keys=True)


@dataclass
class FakeLives:
    """The machines of all regions, by id; those that ended stay a while."""

    world: AwsWorld
    moto: MotoAccount
    machines: dict[str, FakeMachine] = field(default_factory=dict)
    _filled: set[str] = field(default_factory=set)

    def model(self, region: str) -> Any:
        """moto's model of the region, with our images in it and the script's subnets."""
        if region not in self.world.script.regions:
            raise known_refusal("AuthFailure")
        backend = self.moto.ec2(region)
        if region not in self._filled:
            self._filled.add(region)
            fill_region(backend, region, self.world.script.image_gb)
        for zone in self.world.script.no_subnet:
            if zone_home(zone) == region:
                backend.subnets.get(zone, {}).clear()
        return backend

    def settle(self) -> None:
        """Brings every machine to the present of the clock."""
        for key, machine in list(self.machines.items()):
            if machine.then and self.world.now >= machine.then_at:
                self._enter(machine, machine.then)
                machine.then = ""
            ended = machine.state == "terminated"
            if ended and self.world.now >= machine.ended_at + self.world.script.gone_s:
                del self.machines[key]
                self._forget(machine)

    def interrupt(self, machine: FakeMachine) -> None:
        """The provider takes a spot machine back."""
        self.end(machine, "Server.SpotInstanceTermination", "Spot instance termination")

    def end(
        self, machine: FakeMachine, code: str, words: str, transition: str | None = None
    ) -> None:
        """A machine ends for this reason: state reason `code`, message "code: words"."""
        if machine.state in ("shutting-down", "terminated"):
            return
        machine.model.terminate()
        self.leave(machine, "shutting-down", "terminated")
        machine.model._reason = code if transition is None else transition
        self.reason(machine, code, f"{code}: {words}")

    def terminate_by_user(self, machine: FakeMachine) -> None:
        """Somebody of the account terminates it."""
        if machine.state not in ("shutting-down", "terminated"):
            self.end(machine, "Client.UserInitiatedShutdown", "User initiated shutdown")
            self.by_user(machine)

    def shut_down(self, machine: FakeMachine) -> None:
        """The machine's own system shuts down: terminated or stopped, as it was ordered."""
        if machine.state != "running":
            return
        words = "Instance initiated shutdown"
        code = "Client.InstanceInitiatedShutdown"
        if machine.model.instance_initiated_shutdown_behavior == "terminate":
            return self.end(machine, code, words, "")
        machine.model.stop()
        self.leave(machine, "stopping", "stopped")
        machine.model._reason = ""
        self.reason(machine, code, f"{code}: {words}")

    # -- states

    def leave(self, machine: FakeMachine, via: str, to: str, wait_s: float | None = None) -> None:
        """From now on in `via`, and after a while in `to`."""
        self._enter(machine, via)
        if via == "pending":
            machine.model._reason = ""
            self.reason(machine, "pending", "pending")
        wait_s = self.world.script.ending_s if wait_s is None else wait_s
        machine.then, machine.then_at = to, self.world.now + wait_s
        if via == "shutting-down" and machine.id in self.world.script.stubborn:
            machine.then_at = float("inf")

    def _enter(self, machine: FakeMachine, state: str) -> None:
        machine.model._state.name, machine.model._state.code = state, MACHINE_CODES[state]
        if state == "running":
            self.reason(machine, "", "")
        if state == "terminated":
            machine.ended_at = self.world.now

    def by_user(self, machine: FakeMachine) -> None:
        """The reasons of what somebody of the account did."""
        stamp = self.moment().strftime("%Y-%m-%d %H:%M:%S GMT")
        machine.model._reason = f"User initiated ({stamp})"
        words = "Client.UserInitiatedShutdown: User initiated shutdown"
        self.reason(machine, "Client.UserInitiatedShutdown", words)

    def reason(self, machine: FakeMachine, code: str, message: str) -> None:
        """The state reason; none without a code."""
        from moto.ec2.models.instances import StateReason

        machine.model.state_reason = StateReason(message, code) if code else None

    def _forget(self, machine: FakeMachine) -> None:
        backend = self.moto.ec2(machine.region)
        for key, reservation in list(backend.reservations.items()):
            reservation.instances = [
                one for one in reservation.instances if one is not machine.model
            ]
            if not reservation.instances:
                del backend.reservations[key]

    def moment(self, shift_s: float = 0.0) -> datetime.datetime:
        """The clock's present, as moto keeps times: UTC without a zone, whole seconds."""
        moment = datetime.datetime.fromtimestamp(self.world.now + shift_s, datetime.UTC)
        return moment.replace(microsecond=0, tzinfo=None)
