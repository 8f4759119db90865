"""How a rig on EC2 leaves: AWS's SDK is no child, so a call hangs in the server itself.

The promises are the shared ones: it goes at once, starts nothing afterwards, and an order whose
answer never came is found again by the next server.
"""

from __future__ import annotations

import signal
from typing import Any

import psutil

from forge.suites.ec2_case import Ec2Case
from forge.suites.fake_aws_world import CallFault
from forge.suites.raw_stdio import RawServer, call_fault
from forge.suites.rented_shared import RentedLeavingSuite


class Ec2LeavingSuite(Ec2Case, RentedLeavingSuite):
    """The shared suite, with a call that waits for AWS in the place of an attached child."""

    attached = 0

    async def children(self, server: RawServer) -> list[psutil.Process]:
        """None: what a call waits on is a connection. Returns as soon as there is one."""
        process = psutil.Process(server.process.pid)

        def waits() -> bool:
            lines = process.net_connections("tcp4")
            return any(one.raddr and one.raddr.port == self.cloud.port for one in lines)

        await self.until(waits, "AWS was not asked")
        self.assertEqual(process.children(), [])
        return []

    async def asyncTearDown(self) -> None:
        self.assertEqual(self.cloud.sent("StopInstances"), [])
        await super().asyncTearDown()

    async def test_in_the_middle_of_an_order_that_aws_took_and_did_not_answer(self) -> None:
        """The machine is there: the next server knows it, and asks for no second one."""
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        with self.server() as server:
            self.begin_start(server)
            await self.until(self.rented, "nothing was made")
            self.leave(server, signal.SIGTERM)
        (name,) = self.rented()["instances"]
        with self.server() as server:
            (row,) = self._listed(server)
            self.assertEqual(row["name"], name)
            fault = call_fault(server.call(self.starting_tool, self.starting_arguments))
            self.assertTrue(fault.startswith("EXISTS "), fault)
            self._destroyed(server, row)
        self.assertEqual(self.rented(), {})
        self.assertEqual(len(self.cloud.sent("RunInstances")), 1)

    async def test_cancelling_an_order_that_aws_did_not_answer(self) -> None:
        """What it made is found again; the server goes on."""
        self.provider().hosts.automatic = False
        self.addCleanup(setattr, self.provider().hosts, "automatic", True)
        self.cloud.script.faults = [CallFault(code="", lost="hold", after=True, times=1)]
        with self.server() as server:
            number = self.begin_start(server)
            await self.until(self.rented, "nothing was made")
            server.send_text(
                b'{"jsonrpc":"2.0","method":"notifications/cancelled",'
                b'"params":{"requestId":%d}}' % number
            )
            self.assertTrue(server.answers_ping())
            fault = call_fault(server.call(self.starting_tool, self.starting_arguments))
            self.assertTrue(fault.startswith("EXISTS "), fault)
            (row,) = self._listed(server)
            self._destroyed(server, row)
        self.assertEqual(self.rented(), {})
        self.assertEqual(len(self.cloud.sent("RunInstances")), 1)

    def _listed(self, server: RawServer) -> list[dict[str, Any]]:
        answer = server.call("list_gpu_instances", {})["result"]["structuredContent"]
        return list(answer["rentals"])

    def _destroyed(self, server: RawServer, row: dict[str, Any]) -> None:
        where = {"name": row["name"], "zone": row["zone"]}
        plan = server.call("plan_destroy", where)["result"]["structuredContent"]
        done = server.call("destroy_gpu_instance", {**where, "token": plan["token"]})
        self.assertEqual(call_fault(done), "")
