"""Where load goes: the target's address, a pool of connections, the watch over silent requests.

Knows one request after the other, and no load pattern. Follows no redirect and uses no proxy.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from forge.parts.boundaries.load_events import StreamRecord
from forge.parts.boundaries.load_http import CLOSED_EARLY, StreamConnection
from forge.parts.ground.errors import invalid_parameter

_CONNECT_PATIENCE_S = 10.0
_WATCH_EVERY_S = 0.2
_CROSSING_S = 0.1  # a close that was on its way when the request went is here by then
_DONE_PATIENCE_S = 1.0  # after [DONE], for the body's proper end


@dataclass(frozen=True)
class LoadTarget:
    """Where the requests go: host and port, TLS or not, and the path of the chat completions."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def from_url(cls, base_url: str) -> LoadTarget:
        """From ``http://HOST:PORT`` or ``https://…``, with or without ``/v1``.

        RigError INVALID for another scheme, for credentials, a query or a fragment in it.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise invalid_parameter("base_url", "is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise invalid_parameter("base_url", "must begin with http:// or https:// and a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise invalid_parameter("base_url", "holds credentials, a query or a fragment")
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)

    def head(self, headers: Mapping[str, str]) -> bytes:
        """The request's head up to the value of Content-Length, which comes last."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode("latin-1")


class LoadClient:
    """A pool of connections to one target, and the watch over requests that stand still.

    stall_s: longest silence within a request; total_s: longest request. Both make its record fail;
    nothing here raises for what a server does.
    """

    def __init__(
        self,
        target: LoadTarget,
        *,
        headers: Mapping[str, str] | None = None,
        stall_s: float = 60.0,
        total_s: float = 600.0,
        read_json: bool = False,
    ) -> None:
        self._target = target
        self._head = target.head(headers or {})
        self._stall_s = stall_s
        self._total_s = total_s
        self._read_json = read_json
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[StreamConnection] = []
        self._busy: set[StreamConnection] = set()
        self._watch: asyncio.TimerHandle | None = None
        self.resent = 0  # requests that went again, see `ask`
        self.connect_s: list[float] = []  # how long each connection took: the round trip's measure

    async def connect(self, count: int) -> None:
        """Have `count` idle connections ready, so that no handshake is taken for latency."""
        missing = max(0, count - len(self._idle))
        for start in range(0, missing, 64):
            wanted = range(min(64, missing - start))
            opened = await asyncio.gather(*(self._open() for _ in wanted), return_exceptions=True)
            self._idle += [item for item in opened if isinstance(item, StreamConnection)]

    async def ask(self, body: bytes) -> StreamRecord:
        """Send one chat request with this JSON body and return its record when it is over."""
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while True:
            connection = self._take_idle()
            kept = connection is not None
            if connection is None:
                begun = time.perf_counter()
                try:
                    connection = await self._open()
                except (OSError, TimeoutError) as error:
                    why = type(error).__name__
                    if isinstance(error, OSError) and error.strerror:
                        why = error.strerror
                    now = time.perf_counter()
                    return StreamRecord(sent=begun, ended=now, fault=f"cannot connect: {why}")
            record = await self._carry(connection, request)
            crossed = record.fault == CLOSED_EARLY and record.ended - record.sent < _CROSSING_S
            if not (kept and crossed):
                return record
            # The server had closed the kept connection meanwhile and never saw the request.
            self.resent += 1

    def close(self) -> None:
        """Drop every connection."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()

    async def _carry(self, connection: StreamConnection, request: bytes) -> StreamRecord:
        self._busy.add(connection)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_EVERY_S, self._look)
        try:
            return await connection.begin(request)
        finally:
            self._busy.discard(connection)
            if connection.free:
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.free:
                return connection
        return None

    async def _open(self) -> StreamConnection:
        begun = time.perf_counter()
        async with asyncio.timeout(_CONNECT_PATIENCE_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: StreamConnection(self._read_json),
                self._target.host,
                self._target.port,
                ssl=self._tls,
            )
        self.connect_s.append(time.perf_counter() - begun)
        return connection

    def _look(self) -> None:
        """One timer for all requests: a timer for each would cost more than the requests."""
        self._watch = None
        now = time.perf_counter()
        for connection in list(self._busy):
            if connection.over and now - connection.seen > _DONE_PATIENCE_S:
                connection.finish()
            elif now - connection.seen > self._stall_s:
                connection.fail(f"no byte for {self._stall_s:g} s {connection.progress}")
            elif now - connection.record.sent > self._total_s:
                connection.fail(f"no end within {self._total_s:g} s")
        if self._busy:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_EVERY_S, self._look)
