"""Runs an application on a socket until a signal asks for the end, and lets answers finish.

Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

_KEEP_ALIVE_S = 65  # longer than clients keep an idle connection, so that they close it first


class _QuietServer(uvicorn.Server):
    """Leaves signals alone: uvicorn's own way ends the process by the signal once it is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One application on one listening socket. drain_s: how long answers may take to finish; those
    that are not over then are cancelled."""

    def __init__(self, app: ASGIApp, listener: socket.socket, drain_s: float) -> None:
        self._listener = listener
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    async def serve(self) -> None:
        """Until `stop` is called, and what was under way is answered or has had its time."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Take no new connection, and end once what is under way is answered."""
        self._server.should_exit = True


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, a name or an address, and `port`, 0 for any. OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family)


@contextlib.contextmanager
def on_end_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """While this lasts, `act` is called in `loop` for each SIGTERM and SIGINT. In the main thread.

    Not by loop.add_signal_handler: its signals come through the socket by which other threads wake
    the loop, and one that finds it full, as behind a few hundred tokens told at once, is lost.
    """

    def asked(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(act)

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
