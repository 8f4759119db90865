"""What the fault matrix of a rig on EC2 stands on: faults on order, others' things, a census.

An EC2 case with shorter patience, whose every test ends with the same questions: what is rented, is
all of it tagged and does it end by itself, was anything of others touched. Knows no fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import psutil
from mcp import Client

from forge.suites.ec2_orders import Ec2OrderCase, SentOrder
from forge.suites.fake_aws_host_data import user_data_parts
from forge.suites.fake_aws_machine import FakeMachine
from forge.suites.fake_aws_world import CallFault

# Two zones of one region and one of another, in the order in which they are wished.
FIRST, SECOND, FAR = "us-east-1a", "us-east-1b", "us-east-2a"
SOMEBODY_ELSE = {"managed-by": "gemma4-rigs", "owner": "somebody-else"}
# Workers that give up and look again after seconds, not after minutes.
_HASTY_EC2 = """
server.HostedServing.watch_every_s = 0.2
server.RIG.make_plane.look_every_s = 0.2
server.RIG.make_plane.settle_s = 1.0
server.RIG.make_plane.gone_s = 0.5
server._LAUNCH_S = 2.0
server._SEEN_S = 0.5
server._RETRY_PAUSE_S = 0.2
server.ROUND_PATIENCE_S = (1.0, 2.0, 3.0, 4.0)
server.VALID_MARGIN_S = 0.0
server.MACHINE_FRESH_S = 0.3
"""


class Ec2FaultCase(Ec2OrderCase):
    """An EC2 case with an account that goes wrong on order, and with shorter patience."""

    server_name = "hasty.py"
    boots: ClassVar[bool] = True  # False: what is rented only stands there

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.provider().hosts.automatic = cls.boots
        cls.write_runner("hasty.py", _HASTY_EC2)

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        return {**super().good_settings(), "ZONES": ",".join((FIRST, SECOND, FAR))}

    async def asyncTearDown(self) -> None:
        self.assertEqual(self.cloud.harmed(), [], "a machine of others was touched")
        await super().asyncTearDown()

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.few_regions()

    def few_regions(self) -> None:
        """The account has enabled only what these tests ask, or every census asks six."""
        self.cloud.script.regions = ("us-east-1", "us-east-2")

    @contextlib.contextmanager
    def patience(self, **seconds: float) -> Iterator[None]:
        """In this process, waits that are only so long: the plane's (create_s, read_back_s ...),
        and those of the whole server, by their names (_LAUNCH_S ...)."""
        with contextlib.ExitStack() as stack:
            for name, value in seconds.items():
                where = self.module.RIG.make_plane if name.islower() else self.module
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    # Asking

    async def search(
        self, client: Client, *zones: str, wait: bool = True, **more: Any
    ) -> dict[str, Any]:
        """A search over `zones`, followed to its end."""
        begun = await self.answer(client, "find_tpu_vm", zones=list(zones), **more)
        return await self.finished(client, begun["job_id"]) if wait else begun

    def out_of(self, *zones: str, **more: Any) -> None:
        """From now on these zones are sold out."""
        self.cloud.script.faults += [CallFault(zone=zone, **more) for zone in zones]

    # Things of others

    def planted(self, name: str, tags: Mapping[str, str], zone: str = FIRST) -> str:
        """The id of a running machine that this installation did not make."""
        return self.cloud.put_machine(zone, name, tags=tags)

    def our_tags(self, **more: str) -> dict[str, str]:
        """The three marks of this installation, with others in the place of some."""
        mine = self.assembled().context
        marks = {"managed-by": "gemma4-rigs", "rig": mine.rig, "owner": mine.owner}
        return {**marks, **more}

    # Witnesses

    def asked(self) -> list[str]:
        """The zone of each launch that reached EC2, in order."""
        return [self._zone(one) for one in self.orders()]

    def asked_as(self) -> list[tuple[str, str]]:
        """The zone of each, and how it was to be rented."""
        return [(self._zone(one), one.market) for one in self.orders()]

    def _zone(self, order: SentOrder) -> str:
        wanted = order.given["NetworkInterface.1.SubnetId"]
        with self.cloud.lock:
            subnets = self.cloud.ec2.model(order.region).subnets
            return str(next(zone for zone, known in subnets.items() if wanted in known))

    def ends(self) -> list[str]:
        """The machine of each order to end one."""
        return [one.parameters["InstanceId.1"] for one in self.cloud.sent("TerminateInstances")]

    def ours(self) -> list[FakeMachine]:
        """The machines that a rig launched and that still cost."""
        return [one for one in self.cloud.machines() if not one.foreign]

    def ours_alone(self) -> FakeMachine:
        """The one machine that a rig launched."""
        (machine,) = self.ours()
        return machine

    def assert_marked(self, number: int) -> None:
        """There are so many machines of this rig; each, and its disk, bears its tags since its
        launch, a timer on it ends it, and its shutdown terminates it."""
        ours = self.ours()
        self.assertEqual(len(ours), number, [one.id for one in ours])
        for one in ours:
            self.assert_machine_marked(one)

    def assert_machine_marked(self, machine: FakeMachine, where: str = "") -> None:
        """All that `assert_marked` wants of one of them."""
        tags = machine.tags
        self.assertEqual(tags["managed-by"], "gemma4-rigs", where)
        self.assertEqual(tags["rig"], self.module.RIG.name, where)
        self.assertTrue(tags["owner"] and tags["intent"], tags)
        self.assertGreater(int(tags["expires"]), self.cloud.world.now, where)
        self.assertEqual(machine.model.instance_initiated_shutdown_behavior, "terminate", where)
        (hook,) = (
            one.text.decode()
            for one in user_data_parts(machine.user_data)
            if one.kind == "cloud-boothook"
        )
        self.assertRegex(hook, r"end=\$\(\(now \+ [0-9]+\)\)", where)
        self.assertIn("ExecStart=/sbin/shutdown -P now", hook, where)
        with self.cloud.lock:
            blocks = list(machine.model.block_device_mapping.values())
            self.assertTrue(blocks, where)
            for block in blocks:
                self.assertTrue(block.delete_on_termination, where)
                volume = self.cloud.moto.ec2(machine.region).volumes[block.volume_id]
                marks = {one["key"]: one["value"] for one in volume.get_tags()}
                self.assertEqual(marks["intent"], tags["intent"], where)
                self.assertTrue(volume.encrypted, where)

    async def assert_none_left(self, *pids: int) -> None:
        """None of these processes is there any more."""
        await self.until(
            lambda: not any(psutil.pid_exists(pid) for pid in pids), "a process was left"
        )
