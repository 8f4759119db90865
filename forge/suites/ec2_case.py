"""EC2 as the provider of a rented rig's suite: an account on loopback, machines that boot.

And a test case that knows it is EC2's. boto3 is the real one; session-manager-plugin a stand-in.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil

from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_host import FakeAwsHosts
from forge.suites.fake_aws_host_machine import FakeAwsHost
from forge.suites.fake_aws_world import FAKE_AWS_ACCOUNT
from forge.suites.rented_case import HELD_TOKEN, RentedCase, RentedProvider

HOME_REGIONS = ("us-east-1", "us-east-2")  # one of the two is that of the rig's first zone
EC2_PROFILE = "gemma4-rig"
# The suites' names of the tools, by the Google rigs' ones that they were written with.
EC2_WORDS = {
    "zone": "us-east-1a",
    "find_tpu_vm": "find_gpu",
    "create_tpu_vm_instance": "create_gpu_instance",
    "list_tpu_vm_instances": "list_gpu_instances",
    "describe_tpu_vm_instance": "describe_gpu_instance",
    "destroy_tpu_vm_instance": "destroy_gpu_instance",
    "get_tpu_vm_serial_log": "get_console_log",
}
# What reads only, of what the services call by other verbs.
_READING = ("Describe", "Get", "List", "GET ", "HEAD ")
_PLAIN_BEGINNINGS = ("SendCommand", "CancelCommand", "StartSession", "TerminateSession")


class ScriptedAwsHosts(FakeAwsHosts):
    """Machines whose model server obeys one script, also those that do not exist yet."""

    def __init__(self, cloud: FakeAws, folder: Path, provider: Ec2Provider) -> None:
        super().__init__(cloud, folder)
        self._provider = provider

    def _made(self, machine: str) -> FakeAwsHost:
        host = super()._made(machine)
        host.engine.script(**self._provider.engine_orders)
        return host


class Ec2Provider(RentedProvider):
    """`cloud` is the account, `hosts` its machines."""

    values: ClassVar[Mapping[str, str]] = {"AWS_ACCOUNT": FAKE_AWS_ACCOUNT}
    programs: ClassVar[tuple[str, ...]] = ("session-manager-plugin",)
    hidden: ClassVar[tuple[str, ...]] = ("AWS_", "BOTO_")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cloud = FakeAws()
        self.hosts = ScriptedAwsHosts(self.cloud, folder / "hosts", self)
        self.bin = self.hosts.bin

    def start(self) -> None:
        self.cloud.start()
        self.hosts.__enter__()

    def stop(self) -> None:
        self.hosts.__exit__()
        self.cloud.stop()

    def own_surroundings(self) -> dict[str, str]:
        path = f"{self.hosts.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**self.cloud.environment(self.folder / "aws"), "PATH": path}

    def renew(self) -> None:
        old = list(self.hosts.hosts.items())
        self.cloud.renew()
        for machine, _host in old:
            self.hosts.hosts.pop(machine, None)
        for _machine, host in old:
            host.close()
        self.hosts.orders = {}
        self.cloud.put_profile(EC2_PROFILE)
        for region in HOME_REGIONS:
            tags = {"managed-by": "gemma4-rigs"}
            self.cloud.put_secret(region, "hf-token", HELD_TOKEN, tags)
        self.script()

    def machines(self) -> list[Any]:
        return list(self.hosts.hosts.values())

    def machine(self, name: str) -> FakeAwsHost:
        return self.hosts.host(name)

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """Machines by their names, other things by their ids; secrets are left out, which cost
        cents, and what hangs on a machine, which goes with it."""
        found: dict[str, list[str]] = {}
        for kind, places in self.cloud.held().items():
            ids = [one for held in places.values() for one in held]
            if kind == "instances":
                ids = [self.cloud.machine(one).name or one for one in ids]
            if ids and kind in ("instances", "volumes"):
                found[kind] = ids
        if "instances" in found:
            found.pop("volumes", None)
        return found

    def changes(self) -> int:
        with self.cloud.lock:
            sent = list(self.cloud.requests)
        return len(
            [
                one
                for one in sent
                if not one.action.startswith(_READING) and one.action not in _PLAIN_BEGINNINGS
            ]
        )

    def heard(self) -> str:
        with self.cloud.lock:
            return json.dumps([one.parameters for one in self.cloud.requests], ensure_ascii=False)

    def escapes(self) -> list[str]:
        return list(self.cloud.escapes)

    def hold_environment_check(self, hold: bool) -> None:
        """Whether AWS answers nothing; both calls from one thread."""
        if hold:
            self.cloud.lock.acquire()
        else:
            self.cloud.lock.release()


class Ec2Case(RentedCase):
    """A rented case whose provider is EC2."""

    @classmethod
    def provider(cls) -> Ec2Provider:
        return cast(Ec2Provider, cls.engine)

    @property
    def cloud(self) -> FakeAws:
        return self.provider().cloud

    @property
    def hosts(self) -> ScriptedAwsHosts:
        return self.provider().hosts

    def tunnels(self) -> list[psutil.Process]:
        """The programs that carry a port to one of this case's machines, from the process table:
        they get no more of the environment than they need, and no witness knows them by it."""
        plugin, found = str(self.provider().bin / self.provider().programs[0]), []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if plugin in one.cmdline():
                    found.append(one)
        return found

    async def assert_all_gone(self) -> None:
        await super().assert_all_gone()
        await self.until(lambda: not self.tunnels(), "a tunnel was left")
