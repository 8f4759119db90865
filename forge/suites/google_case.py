"""Google as the provider of a rented rig's suite: on loopback, with a stand-in for gcloud.

And a test case that knows it is Google's.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_compute import FakeCompute
from forge.suites.fake_google_services import FakeLogging, FakeLogin, FakeSecrets
from forge.suites.fake_google_tpu import FakeTpu
from forge.suites.fake_google_world import GoogleScript
from forge.suites.fake_host import FakeHost, FakeHosts
from forge.suites.rented_case import HELD_TOKEN, RentedCase, RentedProvider

RENTED_PROJECT = "fake-proj"


class ScriptedHosts(FakeHosts):
    """Machines whose model server obeys one script, also those that do not exist yet."""

    def __init__(self, cloud: FakeGoogle, folder: Path, provider: GoogleProvider) -> None:
        super().__init__(cloud, folder)
        self._provider = provider

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            fresh = alias not in self.hosts
            host = super()._host(alias, name)
            if fresh:
                host.engine.script(**self._provider.engine_orders)
            return host


class GoogleProvider(RentedProvider):
    """`google` is the cloud, `hosts` its machines, `argv_file` the stand-in gcloud's journal."""

    values: ClassVar[Mapping[str, str]] = {"PROJECT": RENTED_PROJECT}
    more_values: ClassVar[Mapping[str, str]] = {"SERVICE_ACCOUNT": "gemma4-rig"}
    programs: ClassVar[tuple[str, ...]] = ("gcloud", "ssh")
    hidden: ClassVar[tuple[str, ...]] = ("CLOUDSDK_", "GOOGLE_")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.google = FakeGoogle(RENTED_PROJECT)
        self.hosts = ScriptedHosts(self.google, folder / "hosts", self)
        self.bin = self.hosts.bin

    def start(self) -> None:
        self.google.start()
        self.hosts.__enter__()
        self.argv_file = fake_gcloud(self.hosts.bin)

    def stop(self) -> None:
        self.hosts.__exit__()
        self.google.stop()

    def own_surroundings(self) -> dict[str, str]:
        names = ("PATH", *self.hidden)
        given = self.google.environment(self.folder, path=str(self.hosts.bin))
        return {
            **{key: value for key, value in given.items() if key.startswith(names)},
            "GEMMA4_GOOGLE_ENDPOINT": self.google.base,
            "NO_GCE_CHECK": "true",  # or Google's library looks for a metadata server
        }

    def renew(self) -> None:
        google = self.google
        with google.lock:
            world = google.world
            world.script, world.now = GoogleScript(), float(int(time.time()))
            google.compute, google.tpu = FakeCompute(world), FakeTpu(world)
            google.secrets, google.logging = FakeSecrets(world), FakeLogging(world)
            google.login = FakeLogin(world)
            google.secrets.payloads["hf-token"] = [base64.b64encode(HELD_TOKEN.encode()).decode()]
            google.secrets.labels["hf-token"] = {"managed-by": "gemma4-rigs"}
            google.requests.clear()
            old = list(self.hosts.hosts.items())
            for alias, _host in old:
                del self.hosts.hosts[alias]
        for _alias, host in old:
            host.close()
        self.hosts.orders = {}
        self.argv_file.write_text("")
        self.script()

    def machines(self) -> list[Any]:
        return list(self.hosts.hosts.values())

    def machine(self, name: str) -> FakeHost:
        return self.hosts.host(name)

    # Witnesses

    def rented(self) -> dict[str, list[str]]:
        """The secrets are left out: they cost cents."""
        return {kind: names for kind, names in self.google.held().items() if kind != "secrets"}

    def changes(self) -> int:
        with self.google.lock:
            sent = [one for one in self.google.requests if one.method != "GET"]
        return len([one for one in sent if "importSshPublicKey" not in one.path])

    def heard(self) -> str:
        return self.argv_file.read_text()

    def escapes(self) -> list[str]:
        return list(self.google.escapes)

    def called(self, *words: str) -> list[list[str]]:
        """The argument lists with which gcloud was started that begin with `words`."""
        lines = [json.loads(line)[1:] for line in self.argv_file.read_text().splitlines()]
        return [line for line in lines if line[: len(words)] == list(words)]

    def hold_environment_check(self, hold: bool) -> None:
        """Whether Google answers nothing; both calls from one thread."""
        if hold:
            self.google.lock.acquire()
        else:
            self.google.lock.release()


class GoogleCase(RentedCase):
    """A rented case whose provider is Google."""

    @classmethod
    def provider(cls) -> GoogleProvider:
        return cast(GoogleProvider, cls.engine)

    @property
    def google(self) -> FakeGoogle:
        return self.provider().google

    @property
    def hosts(self) -> ScriptedHosts:
        return self.provider().hosts
