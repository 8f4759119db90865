"""What the fault matrix of a rented rig stands on: faults on order, strangers' things, a census.

A rented case whose gcloud can be spoilt, and whose every test ends with the same questions: what is
rented, is all of it labelled and does it end by itself. Knows no fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import psutil

from forge.suites.fake_gcloud_faults import SpoiltGcloud
from forge.suites.google_case import RENTED_PROJECT, GoogleCase

STRANGER = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-v6e1-2b", "owner": "somebody-else"}
EASTERN, EASTERN_TOO, WESTERN = "us-east5-a", "us-east5-b", "europe-west4-a"
# Workers that leave a queue and give up a cancel after seconds, not after minutes.
_HASTY = """
server.HostedServing.watch_every_s = 0.2
server.RentedComputeEngine.look_every_s = 0.2
server.RentedComputeEngine.settle_s = 1.0
server.RentedComputeEngine.gone_s = 0.5
server.ROUND_PATIENCE_S = (1.0, 2.0, 3.0, 4.0)
server.VALID_MARGIN_S = 0.0
server.MACHINE_FRESH_S = 0.3
"""


class RentedFaultCase(GoogleCase):
    """A rented case with a gcloud that goes wrong on order, and with shorter patience."""

    server_name = "hasty.py"
    boots: ClassVar[bool] = True  # False: what is rented only stands there
    gcloud: ClassVar[SpoiltGcloud]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.gcloud = SpoiltGcloud(cls.provider().hosts.bin)
        cls.provider().hosts.automatic = cls.boots
        cls.write_runner("hasty.py", _HASTY)

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        zones = ",".join((WESTERN, EASTERN, EASTERN_TOO))
        return {**super().good_settings(), "ZONES": zones}

    async def asyncTearDown(self) -> None:
        self.end_spoilt()
        self.gcloud.mend()
        await super().asyncTearDown()

    def end_spoilt(self) -> None:
        """Kill what met a fault and is still there: else a server that waits for it never ends."""
        for pid in self.gcloud.pids():
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()

    @contextlib.contextmanager
    def patience(self, **seconds: float) -> Iterator[None]:
        """The plane of this process waits only so long: create_s, follow_s, delete_s and so on."""
        with contextlib.ExitStack() as stack:
            for name, value in seconds.items():
                stack.enter_context(mock.patch.object(self.module.RentedComputeEngine, name, value))
            yield

    # Things of others

    def planted(self, name: str, labels: Mapping[str, str], zone: str = WESTERN) -> dict[str, Any]:
        """A machine that this installation did not make, as the provider has it."""
        body = {
            "name": name,
            "labels": dict(labels),
            "machineType": self.google.compute.link(f"zones/{zone}/machineTypes/ct6e-standard-1t"),
            "disks": [],
            "scheduling": {},
        }
        with self.google.lock:
            self.google.compute.answer(
                "POST", f"/compute/v1/projects/{RENTED_PROJECT}/zones/{zone}/instances", {}, body
            )
            return self.google.compute.instances[zone, name]

    def machine_at_google(self) -> dict[str, Any]:
        """The one machine of the project, as the provider has it."""
        (machine,) = self.google.compute.instances.values()
        return machine

    # Witnesses

    def asked(self) -> list[str]:
        """The zone of each create that reached the provider, in order."""
        sent = self.google.sent("POST", "/instances")
        return [one.path.split("/zones/")[1].split("/")[0] for one in sent if one.body]

    def deletions(self) -> list[str]:
        return [one.path for one in self.google.sent("DELETE", "/")]

    def assert_marked(self, number: int) -> None:
        """There are so many machines of this rig; each bears its labels since its create, and the
        provider ends it by itself."""
        ours = [
            one
            for one in self.google.compute.instances.values()
            if one["labels"].get("owner") != STRANGER["owner"]
        ]
        self.assertEqual(len(ours), number, [one["name"] for one in ours])
        for one in ours:
            labels = one["labels"]
            self.assertEqual(labels["managed-by"], "gemma4-rigs")
            self.assertEqual(labels["rig"], self.module.RIG.name)
            self.assertTrue(labels["owner"] and labels["intent"], labels)
            self.assertGreater(int(labels["expires"]), self.google.world.now)
            ends = one["scheduling"]
            self.assertEqual(ends["instanceTerminationAction"], "DELETE")
            self.assertLessEqual(int(ends["maxRunDuration"]["seconds"]), 4 * 3600)

    async def assert_none_left(self, *pids: int) -> None:
        """None of these processes is there any more, their children neither."""
        await self.until(
            lambda: not any(psutil.pid_exists(pid) for pid in pids), "a process was left"
        )
