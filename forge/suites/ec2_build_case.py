"""EC2 as the provider of a rig whose machines build llama-server and serve with it.

The machines are the same; what obeys the script and tells its starts is the program that a machine
built. Knows no tool beyond those that every rented case calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.suites.ec2_case import Ec2Provider, ScriptedAwsHosts
from forge.suites.ec2_orders import Ec2OrderCase
from forge.suites.fake_aws_host_machine import FakeAwsHost

# What of a machine's programs makes something: a machine that found its build calls none of them.
BUILDING_PROGRAMS = frozenset(("pip3", "cmake", "ninja", "fallocate", "mkswap", "swapon"))
HELD_BACK = 0.3  # seconds for each file while a build is held back


class BuildingAwsHosts(ScriptedAwsHosts):
    """Machines whose model server is what they build; it obeys the one script from its birth."""

    def _made(self, machine: str) -> FakeAwsHost:
        host = super()._made(machine)
        host.llama.script(**self._provider.engine_orders)
        return host


class Ec2BuildProvider(Ec2Provider):
    """The account, with such machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = BuildingAwsHosts(self.cloud, folder / "hosts", self)
        self.bin = self.hosts.bin

    def script(self, **orders: Any) -> None:
        self.engine_orders = orders
        for host in list(self.hosts.hosts.values()):
            host.llama.script(**orders)

    def requests(self) -> list[dict[str, Any]]:
        return [one for host in self.machines() for one in host.llama.requests()]

    def starts(self) -> list[dict[str, Any]]:
        return [one for host in self.machines() for one in host.llama.starts()]

    # The account's buckets

    def bucket(self, name: str, region: str = "us-east-1") -> None:
        """An empty bucket of that name in the account."""
        with self.cloud.lock:
            self.cloud.moto.buckets().create_bucket(name, region)

    def objects(self, bucket: str) -> dict[str, bytes]:
        """What lies in a bucket, by key."""
        with self.cloud.lock:
            backend = self.cloud.moto.buckets()
            keys = list(backend.buckets[bucket].keys.keys())
            return {key: bytes(backend.get_object(bucket, key).value) for key in keys}

    def put_object(self, bucket: str, key: str, data: bytes) -> None:
        with self.cloud.lock:
            self.cloud.moto.buckets().put_object(bucket, key, data)


class Ec2BuildCase(Ec2OrderCase):
    """A case on such machines."""

    @property
    def build_provider(self) -> Ec2BuildProvider:
        provider = self.provider()
        assert isinstance(provider, Ec2BuildProvider)
        return provider

    def hold_builds(self, files: int) -> None:
        """Machines to come build so many files, and take their time for each."""
        self.hosts.orders = {"build_files": files, "build_pace_s": HELD_BACK}

    def built(self, host: FakeAwsHost) -> int:
        """How many builds were run on a machine, whole or not."""
        return len([words for words in host.programs() if words[:2] == ["cmake", "--build"]])

    def marks(self, text: str) -> list[tuple[str, str, str]]:
        """Phase, state and words of each mark that a boot made, in the order in which they came.

        A machine's first boot says each twice on the console: itself, and what cloud-init shows of
        it.
        """
        lines = [line.partition("GEMMA4-BOOT ")[2] for line in text.splitlines()]
        parts = [line.split(maxsplit=3) for line in lines if line]
        return list(dict.fromkeys((one[0], one[1], " ".join(one[3:])) for one in parts))

    def assert_no_token_on(self, host: FakeAwsHost, token: str) -> None:
        """It stands in no argument list, in no file of the machine, and its server never had it."""
        told = "\n".join(" ".join(words) for words in host.programs())
        self.assertNotIn(token, told + host.console())
        for start in host.llama.starts():
            self.assertNotIn(token, str(start))
        for path in host.root.rglob("*"):
            if path.is_file():
                self.assertNotIn(token.encode(), path.read_bytes(), str(path))
