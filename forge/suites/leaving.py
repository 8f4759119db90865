"""How the server goes: at once, with the right status, no attached child left, and what it
detached unhurt.

Clients end a server by SIGINT, by SIGTERM or by closing its input: idle, in the middle of a call,
and while a model comes up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import psutil

from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.rig_case import RigCase, spelled

LEAVE_WITHIN_S = 5.0  # 0.01 to 0.3 s on an idle machine
# What ends a server (0: end of input) and the exit status that it must leave with.
_WAYS_TO_LEAVE = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    0: 0,
}


class LeavingSuite(RigCase):
    """The server leaves when it is told to; what it detached stays, and is found again."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    attached: ClassVar[int] = 1  # children of a call that looks before it starts something

    def begin_start(self, server: RawServer) -> int:
        """Ask for what would start something; the request's number."""
        call = {"name": self.starting_tool, "arguments": dict(self.starting_arguments)}
        return server.send("tools/call", call)

    @contextmanager
    def server(self) -> Iterator[RawServer]:
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            yield server

    def leave(self, server: RawServer, way: int) -> None:
        """End `server` so and check its status; the time is bounded loosely, not measured."""
        begun = time.monotonic()
        if way:
            server.process.send_signal(way)
        else:
            server.close_input()
        status = server.process.wait(LEAVE_WITHIN_S)
        self.assertEqual(status, _WAYS_TO_LEAVE[signal.Signals(way) if way else 0])
        self.assertLess(time.monotonic() - begun, LEAVE_WITHIN_S)

    async def children(self, server: RawServer) -> list[psutil.Process]:
        """The server's children, as soon as the call has as many as it starts."""
        process = psutil.Process(server.process.pid)

        def enough() -> list[psutil.Process]:
            found = process.children()
            return found if len(found) >= self.attached else []

        children: list[psutil.Process] = await self.until(enough, "no child was started")
        self.assertEqual(len(children), self.attached)
        return children

    async def test_when_it_is_idle(self) -> None:
        for way in (signal.SIGHUP, 0):  # the others are tried below, in harder places
            with self.subTest(way), self.server() as server:
                self.leave(server, way)

    async def test_in_the_middle_of_a_call_with_an_attached_child(self) -> None:
        starts = len(self.engine.starts())
        for way in (signal.SIGINT, signal.SIGTERM, 0):
            with self.subTest(way), self.server() as server:
                self.engine.hold_environment_check(True)
                try:
                    self.begin_start(server)
                    children = await self.children(server)
                    self.leave(server, way)
                    gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                    self.assertEqual(alive, [], "an attached child was left")
                finally:
                    self.engine.hold_environment_check(False)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_cancelling_a_call_ends_its_attached_child(self) -> None:
        with self.server() as server:
            self.engine.hold_environment_check(True)
            try:
                number = self.begin_start(server)
                children = await self.children(server)
                server.send_text(
                    b'{"jsonrpc":"2.0","method":"notifications/cancelled",'
                    b'"params":{"requestId":%d}}' % number
                )
                gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                self.assertEqual(alive, [], "the cancelled call's child was left")
            finally:
                self.engine.hold_environment_check(False)
            self.assertTrue(server.answers_ping())
            # The lock that the call held is free again.
            self.assert_starts(server)

    def assert_starts(self, server: RawServer) -> None:
        """What was refused or broken off before works now."""
        self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")

    async def test_a_start_goes_on_without_the_server_that_began_it(self) -> None:
        for way in (signal.SIGINT, 0):
            with self.subTest(way):
                self.engine.script(load_s=1.0)
                with self.server() as server:
                    begun = server.call("serve_model", {})["result"]["structuredContent"]
                    await self.until(lambda: self.processes("server"), "it never began")
                    detached = self.processes()
                    self.leave(server, way)
                    self.assertEqual(self.processes(), detached, "a detached process was hurt")
                with self.server() as server:
                    answer = server.call(spelled("wait_for_model_ready"), {})
                    ready = answer["result"]["structuredContent"]
                    self.assertEqual(
                        (ready["state"], ready["job_id"]), ("ready", begun["job_id"]), ready
                    )
                    status = server.call("get_system_status", {})["result"]["structuredContent"]
                    self.assertEqual([status["pid"]], self.processes("server"))
                    answered = server.call("query_gemma4", {"prompt": "still there?"})
                    self.assertEqual(call_fault(answered), "")
                    self.assertEqual(call_fault(server.call("stop_model", {})), "")
                await self.assert_all_gone()
