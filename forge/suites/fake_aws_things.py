"""What a test does to the fake AWS's account, and what it reads of it, past every client.

Knows no HTTP server: it holds the services and their state.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from forge.suites.fake_aws_ec2 import FakeEc2
from forge.suites.fake_aws_machine import FakeMachine
from forge.suites.fake_aws_moto import MotoAccount
from forge.suites.fake_aws_places import image_of, image_parameters
from forge.suites.fake_aws_ssm import FakeSsm
from forge.suites.fake_aws_world import AwsScript, AwsWorld, zone_home

_EC2_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "ec2.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}


class AwsThings:
    """The account's services and what a test may do past them.

    A host plugs in: `console(id)` (the console's text), `run_command(id, script)` (stdout, stderr,
    exit status of a command), `agent_online(id)`, `end_command(id)` (a command was cancelled) and
    `changed(id, state)` (a machine is "running", "stopped" or "terminated" now), all called outside
    `lock` but `console` and `agent_online`.
    """

    def __init__(self, world: AwsWorld, moto: MotoAccount) -> None:
        self.world, self.moto = world, moto
        self.lock = threading.RLock()
        self.console: Callable[[str], str] = lambda _machine: ""
        self.run_command: Callable[[str, str], tuple[str, str, int]] = lambda _machine, _script: (
            "",
            "",
            0,
        )
        self.agent_online: Callable[[str], bool] = lambda _machine: True
        self.end_command: Callable[[str], None] = lambda _machine: None
        self.changed: Callable[[str, str], None] = lambda _machine, _state: None
        self.ec2, self.ssm = self._services()

    def _services(self) -> tuple[FakeEc2, FakeSsm]:
        # By way of self, so that a host may plug in before and after an account is renewed.
        ec2 = FakeEc2(self.world, self.moto, console=lambda one: self.console(one))
        ssm = FakeSsm(
            self.world,
            ec2,
            self.lock,
            run_command=lambda one, script: self.run_command(one, script),
            agent_online=lambda one: self.agent_online(one),
            end_command=lambda one: self.end_command(one),
        )
        return ec2, ssm

    def clear(self) -> None:
        """Nothing is in the account any more, and nothing goes wrong."""
        self.moto.empty()
        self.world.script, self.world.ahead_s = AwsScript(), 0.0
        self.ec2, self.ssm = self._services()

    @property
    def script(self) -> AwsScript:
        return self.world.script

    @script.setter
    def script(self, script: AwsScript) -> None:
        self.world.script = script

    @property
    def account(self) -> str:
        return self.world.account

    def advance(self, seconds: float) -> None:
        """Lets time pass, for whatever ends or begins by the clock."""
        with self.lock:
            self.world.ahead_s += seconds
        self.tell()

    def tell(self) -> None:
        """Settles what is due, and tells the host which machines changed."""
        with self.lock:
            self.ec2.settle()
            news = []
            for machine in self.ec2.machines.values():
                if machine.state != machine.told:
                    machine.told = machine.state
                    news.append((machine.id, machine.state))
        for one, state in news:
            if state in ("running", "stopped", "terminated"):
                self.changed(one, state)

    # -- machines

    def machines(self, *, all_states: bool = False) -> list[FakeMachine]:
        """The machines that are not terminated, or all that are still listed; oldest first."""
        with self.lock:
            self.ec2.settle()
            known = list(self.ec2.machines.values())
        return [one for one in known if all_states or one.state != "terminated"]

    def machine(self, which: str) -> FakeMachine:
        """One machine by its id, or by its name where just one that lives has it."""
        with self.lock:
            if which in self.ec2.machines:
                return self.ec2.machines[which]
        found = [one for one in self.machines() if one.name == which]
        if len(found) != 1:
            raise KeyError(f"{len(found)} machines are called {which}")
        return found[0]

    def interrupt(self, which: str) -> None:
        """The provider takes a spot machine back (Server.SpotInstanceTermination)."""
        with self.lock:
            self.ec2.interrupt(self.machine(which))
        self.tell()

    def shut_down(self, which: str) -> None:
        """The machine's own system shuts down, and it ends as it was ordered."""
        with self.lock:
            self.ec2.shut_down(self.machine(which))
        self.tell()

    def take_away(self, which: str) -> None:
        """Somebody terminates it behind our back, by the console."""
        with self.lock:
            self.ec2.terminate_by_user(self.machine(which))
        self.tell()

    def end(self, which: str, code: str, words: str) -> None:
        """It ends for another reason, such as Server.InternalError."""
        with self.lock:
            self.ec2.end(self.machine(which), code, words)
        self.tell()

    # -- what lies in the account

    def put_machine(
        self,
        zone: str,
        name: str = "payroll-db",
        instance_type: str = "g6.xlarge",
        tags: Mapping[str, str] | None = None,
        market: str = "on-demand",
    ) -> str:
        """Somebody else's running machine; its id. `harmed` watches over it."""
        region = zone_home(zone)
        with self.lock:
            backend = self.ec2.model(region)
            reservation = backend.run_instances(
                image_of(region, image_parameters()[0]),
                1,
                None,
                [],
                instance_type=instance_type,
                is_instance_type_default=False,
                region_name=region,
                placement=zone,
                tags={"instance": {"Name": name, **(tags or {})}},
                instance_market_options="spot" if market == "spot" else "",
            )
            machine = FakeMachine(region, reservation.instances[0], market, foreign=True)
            self.ec2.machines[machine.id] = machine
            machine.born = machine.shape()
            machine.told = machine.state
        return machine.id

    def put_volume(self, zone: str, size_gb: int, tags: Mapping[str, str]) -> str:
        """A volume that is attached to nothing; its id."""
        with self.lock:
            backend = self.ec2.model(zone_home(zone))
            volume = backend.create_volume(size=size_gb, zone_name=zone, volume_type="gp3")
            volume.add_tags(dict(tags))
        return str(volume.id)

    def put_profile(self, name: str = "gemma4-rig", tags: Mapping[str, str] | None = None) -> None:
        """A role and an instance profile of one name, with the policy for Systems Manager."""
        with self.lock:
            iam = self.moto.iam()
            role = iam.create_role(
                name, json.dumps(_EC2_TRUST), "/", None, "", _tag_rows(tags), "3600"
            )
            iam.attach_role_policy(
                "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore", role.name
            )
            iam.create_instance_profile(name, "/", [], _tag_rows(tags))
            iam.add_role_to_instance_profile(name, role.name)

    def put_secret(
        self, region: str, name: str, value: str, tags: Mapping[str, str] | None = None
    ) -> None:
        """A secret with one version."""
        with self.lock:
            self.moto.secrets(region).create_secret(
                name=name,
                secret_string=value,
                secret_binary=None,
                description=None,
                tags=_tag_rows(tags),
                kms_key_id=None,
                client_request_token=None,
                replica_regions=[],
                force_overwrite=False,
            )

    def secret(self, region: str, name: str) -> str | None:
        """The newest version of a secret; none where there is no such secret."""
        with self.lock:
            held = self.moto.secrets(region).secrets
            if name not in {one.name for one in held.values()}:
                return None
            value = self.moto.secrets(region).get_secret_value(name, None, None)
        return str(value["SecretString"])

    # -- witnesses

    def held(self, *, foreign: bool = False) -> dict[str, dict[str, list[str]]]:
        """What exists and may cost money: kind -> region -> ids or names; no empty kinds.

        Instances count until they are terminated, a stopped one too, for its volume. Other
        people's machines (`put_machine`) and their volumes count with `foreign` only.
        """
        with self.lock:
            self.ec2.settle()
            found: list[tuple[str, str, str]] = []
            others: set[str] = set()
            for machine in self.ec2.machines.values():
                if machine.foreign and not foreign:
                    blocks = machine.model.block_device_mapping.values()
                    others.update(block.volume_id for block in blocks)
                elif machine.state != "terminated":
                    found.append(("instances", machine.region, machine.id))
            for region in self.script.regions:
                backend = self.ec2.model(region)
                volumes = [one for one in backend.volumes if one not in others]
                found += [("volumes", region, one) for one in volumes]
                found += [("addresses", region, one) for one in backend.addresses]
                held = self.moto.secrets(region).secrets.values()
                found += [("secrets", region, one.name) for one in held]
            found += [("buckets", one.region_name, one.name) for one in self._buckets()]
        kinds: dict[str, dict[str, list[str]]] = {}
        for kind, region, one in found:
            kinds.setdefault(kind, {}).setdefault(region, []).append(str(one))
        return kinds

    def _buckets(self) -> list[Any]:
        return list(self.moto.buckets().buckets.values())

    def harmed(self) -> list[str]:
        """Other people's machines that are not as they were: state or tags."""
        with self.lock:
            mine = list(self.ec2.machines.values())
        return [one.id for one in mine if one.foreign and one.shape() != one.born]

    def user_data(self, which: str) -> bytes:
        """A machine's user data, as it reads it."""
        return self.machine(which).user_data


def _tag_rows(tags: Mapping[str, str] | None) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in (tags or {}).items()]
