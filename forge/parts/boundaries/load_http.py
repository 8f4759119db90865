"""One streamed chat request over HTTP/1.1, as lean as the standard library allows: for load only.

Works on asyncio's transports with times taken in the read callback: one layer below its streams,
whose task switch for every chunk costs more than all that is done here. Knows no load pattern, no
statistics and no address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import cast

from forge.parts.boundaries.load_events import (
    StreamRecord,
    is_plain_text_event,
    stream_fault,
    take_load_event,
)

LOAD_EVENT_LIMIT = 8_000_000  # bytes of one event or HTTP chunk; larger ones end the request
CLOSED_EARLY = "the connection closed before an answer"
_ANSWER_HEAD_LIMIT = 65_536
_STRAY_WORDS_KEPT = 2_000  # bytes kept of a body that is no event stream

# How the body that is being read is framed.
_HEAD, _CHUNKED, _TRAILER, _LENGTH, _UNTIL_CLOSE, _IDLE = range(6)


class StreamConnection(asyncio.Protocol):
    """One connection, one request at a time. `free` says whether it may carry the next one."""

    def __init__(self, read_json: bool = False) -> None:
        self.free = False
        self.over = False  # whether [DONE] has come
        self.seen = 0.0  # when the last byte came, or the request went
        self.record = StreamRecord()
        self._read_json = read_json  # parse every event: only to show what that would cost
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[StreamRecord] | None = None
        self._state = _IDLE
        self._rest = bytearray()  # unframed bytes
        self._need = 0  # bytes that `_rest` must have before it is worth a look
        self._left = 0  # bytes of a body with a length
        self._closes = False
        self._is_stream = False
        self._words = bytearray()
        self._line = bytearray()  # the unfinished line of the event stream
        self._data: list[bytes] = []  # the data lines of the unfinished event
        self._same_chunk = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.free = True

    def begin(self, request: bytes) -> asyncio.Future[StreamRecord]:
        """Send `request`; the future gives the record, also of a request that failed."""
        assert self._transport is not None and self.free
        self.free = False
        self.record = StreamRecord()
        self._done = asyncio.get_running_loop().create_future()
        self._state, self._need, self._closes, self.over = _HEAD, 0, False, False
        self._words.clear()
        self._line.clear()
        self._data.clear()
        self._same_chunk = 0
        self.record.sent = self.seen = time.perf_counter()
        self._transport.write(request)
        return self._done

    def fail(self, fault: str) -> None:
        """End the request with `fault` and the connection with it."""
        if self._state != _IDLE:
            self.record.fault = self.record.fault or fault
            self.finish()

    def finish(self) -> None:
        """End the request as it stands and give the connection up."""
        self._closes = True
        self._conclude()

    def close(self) -> None:
        """Drop the connection; a request that is under way fails."""
        self.fail("the client closed the connection")
        self.free = False
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.free = False
        if self._state == _IDLE:
            return
        if self._state == _UNTIL_CLOSE and exc is None:
            self.finish()
        elif self._state == _HEAD:
            self.fail(CLOSED_EARLY)
        else:
            self.fail(f"the connection broke {self.progress}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.seen = now
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest.clear()
        if self._state == _CHUNKED:
            self._chunks(data, now)
        elif self._state == _HEAD:
            self._head(data, now)
        elif self._state == _TRAILER:
            self._trailer(data)
        elif self._state == _IDLE:
            self.close()  # bytes that nobody asked for
        else:
            self._unchunked(data, now)

    @property
    def progress(self) -> str:
        """How far the request has come, without a number: faults are counted by their words."""
        return "in mid-stream" if self.record.arrivals else "before any content"

    def _head(self, data: bytes, now: float) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _ANSWER_HEAD_LIMIT:
                self.fail("the answer's head is beyond all bounds")
            elif not b"HTTP/1.".startswith(data[:7]) and not data.startswith(b"HTTP/1."):
                self.fail("the server does not speak HTTP/1.1")
            else:
                self._rest += data
            return
        lines = data[:end].decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            self.fail("the server does not speak HTTP/1.1")
            return
        self.record.http_status = int(words[1])
        rest = data[end + 4 :]
        if 100 <= self.record.http_status < 200:  # an interim answer; the real one follows
            self._head(rest, now) if rest else None
            return
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        self._frame(headers, words[0])
        kind = headers.get("content-type", "text/event-stream")
        self._is_stream = self.record.http_status == 200 and kind.startswith("text/event-stream")
        if not self._is_stream:
            self.record.fault = f"status {self.record.http_status}, {kind.partition(';')[0]}"
        if self._state == _CHUNKED:
            self._chunks(rest, now)
        else:
            self._unchunked(rest, now)

    def _frame(self, headers: Mapping[str, str], version: str) -> None:
        connection = headers.get("connection", "")
        self._closes = "close" in connection or (version == "HTTP/1.0" and "keep" not in connection)
        length = headers.get("content-length", "")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._state = _CHUNKED
        elif length.isdecimal():
            self._state, self._left = _LENGTH, int(length)
        else:
            self._state, self._closes = _UNTIL_CLOSE, True

    def _chunks(self, data: bytes, now: float) -> None:
        """Take every whole HTTP chunk out of `data`; what is left waits in `_rest`."""
        place, size = 0, len(data)
        while place < size:
            eol = data.find(b"\r\n", place, place + 256)
            if eol < 0:
                if size - place >= 256:
                    self.fail("the body is not chunked as announced")
                    return
                break
            try:
                length = int(data[place:eol].partition(b";")[0], 16)
            except ValueError:
                length = -1
            if not 0 <= length <= LOAD_EVENT_LIMIT:
                beyond = "the server sent an event beyond all bounds"
                self.fail(beyond if length > 0 else "the body is not chunked as announced")
                return
            if length == 0:
                self._state = _TRAILER
                self._trailer(data[eol:])
                return
            end = eol + 2 + length
            if size < end + 2:
                self._need = end + 2 - place
                break
            self._body(data[eol + 2 : end], now)
            if self._state != _CHUNKED:  # the body made the request fail
                return
            place = end + 2
        if place < size:
            self._rest += data[place:]

    def _trailer(self, data: bytes) -> None:
        """After the last chunk, from the line end of its header: lines, then an empty one."""
        if data.find(b"\r\n\r\n") >= 0:
            self._conclude()
        elif len(data) > _ANSWER_HEAD_LIMIT:
            self.fail("the answer's trailer is beyond all bounds")
        else:
            self._rest += data
            self._need = 0

    def _unchunked(self, data: bytes, now: float) -> None:
        if self._state == _LENGTH:
            data = data[: self._left]
            self._left -= len(data)
        if data:
            self._body(data, now)
        if self._state == _LENGTH and self._left == 0:
            self._conclude()

    def _body(self, body: bytes, now: float) -> None:
        if not self._is_stream:
            self._words += body[: max(0, _STRAY_WORDS_KEPT - len(self._words))]
            if len(self._words) >= _STRAY_WORDS_KEPT:
                self.fail(self.record.fault)
            return
        # Nearly always: one event of one line, whole, in a chunk of its own.
        if (
            body.endswith(b"\n\n")
            and body.startswith(b"data:")
            and body.find(b"\n") == len(body) - 2
            and not self._line
            and not self._data
        ):
            self._event(body[5:-2], now)
            return
        before = len(self.record.arrivals)
        self._lines(body, now)
        if self._state == _CHUNKED:
            self._same_chunk += max(0, len(self.record.arrivals) - before - 1)

    def _lines(self, body: bytes, now: float) -> None:
        *lines, last = body.split(b"\n")
        for line in lines:
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            self._take_line(line.removesuffix(b"\r"), now)
            if self._state == _IDLE:
                return
        self._line += last
        if len(self._line) > LOAD_EVENT_LIMIT:
            self.fail("the server sent an event beyond all bounds")

    def _take_line(self, line: bytes, now: float) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:])
        elif not line and self._data:
            payload = b"\n".join(self._data)
            self._data.clear()
            self._event(payload, now)

    def _event(self, payload: bytes, now: float) -> None:
        if is_plain_text_event(payload) and not self._read_json:
            self.record.arrivals.append(now)
            return
        payload = payload.strip()
        if payload == b"[DONE]":
            self.over = True
            if self._state == _UNTIL_CLOSE:
                self.finish()
            return
        if not payload:
            return
        if take_load_event(self.record, payload):
            self.record.arrivals.append(now)
        if self.record.fault:
            self.fail(self.record.fault)

    def _conclude(self) -> None:
        """The request is over: judge it, hand it out, and keep the connection if it is clean."""
        if self._state == _IDLE:
            return
        if self._data and not self.record.fault:  # the last event lacked its empty line
            payload = b"\n".join(self._data)
            self._data.clear()
            self._event(payload, self.seen)
            if self._state == _IDLE:
                return
        record, self._state = self.record, _IDLE
        record.ended = time.perf_counter()
        if record.fault and self._words:
            words = " ".join(bytes(self._words).decode("utf-8", "replace").split())
            record.fault = f"{record.fault}: {words[:300]}"
        record.fault = record.fault or stream_fault(record)
        times = record.arrivals
        together = sum(1 for a, b in zip(times, times[1:], strict=False) if a == b)
        record.coalesced = max(0, together - self._same_chunk)
        self._rest.clear()
        assert self._transport is not None
        if self._closes or self._transport.is_closing():
            self._transport.abort()
        else:
            self.free = True
        if self._done is not None and not self._done.done():
            self._done.set_result(record)
