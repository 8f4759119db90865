"""An answer as it goes out over HTTP: whole, or as a stream of events that ends with its client.

Knows no field of a request but whether it wants a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.engines.serving.answers import AnswerForm
from forge.engines.serving.generation import AnswerDelta, Generation, joined_deltas
from forge.engines.serving.refusal import ApiRefusal
from forge.engines.serving.requests import GenerationOrder
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.scheduler_job import NotServing, QueueFull

_LOADING_RETRY_S = 5
_LINE_ENDS = ("\x85", "\u2028", "\u2029")  # those that JSON does not escape by itself


class AnswerResponse(Response):
    """Hands a generation to the scheduler and sends what comes of it.

    Not a starlette StreamingResponse: a client that leaves is to be noticed while it waits for its
    first token too, and in an answer that is not streamed.
    """

    def __init__(
        self, scheduler: Scheduler, generation: Generation, form: AnswerForm, order: GenerationOrder
    ) -> None:
        self._scheduler = scheduler
        self._generation = generation
        self._form = form
        self._stream = order.stream
        self._usage_chunk = order.include_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiRefusal as long as nothing was sent: 429, 503, or 500 for a fault."""
        try:
            ticket = self._scheduler.submit(self._generation)
        except QueueFull as full:
            again = full.retry_after_s
            raise ApiRefusal(429, str(full), code="queue_full", retry_after_s=again) from None
        except NotServing as error:
            raise unavailable(error) from None
        watch = asyncio.create_task(self._watch(receive))
        try:
            first = await self._generation.next_delta()
            if first.fault:
                raise ApiRefusal(500, first.fault, code="broken_off")
            await (
                self._send_stream(first, send) if self._stream else self._send_whole(first, send)
            )
        finally:
            self._scheduler.cancel(ticket)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, receive: Receive) -> None:
        """End the answer as soon as the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.leave()

    async def _send_whole(self, delta: AnswerDelta, send: Send) -> None:
        deltas = [delta]
        while not delta.last:
            delta = await self._generation.next_delta()
            deltas.append(delta)
        if delta.left:
            return
        if delta.fault:
            raise ApiRefusal(500, delta.fault, code="broken_off")
        body = self._form.whole(joined_deltas(deltas), self._usage(delta))
        data = _compact_json(body)
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(data)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _send_stream(self, delta: AnswerDelta, send: Send) -> None:
        if delta.left:
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._form.chat:
            await _send_events(send, [self._form.first_chunk()])
        while not delta.last:
            await _send_events(send, self._chunks(delta))
            delta = await self._generation.next_delta()
        if not delta.left:
            await _send_events(send, self._chunks(delta), over=True)

    def _chunks(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """The chunks that tell of `delta`. Usage stands in the last one before [DONE]: always."""
        chunks = self._form.chunks(delta)
        if delta.fault:
            chunks.append(ApiRefusal(500, delta.fault, code="broken_off").body())
        if delta.finish is not None:
            end, usage = self._form.end_chunk(delta.finish), self._usage(delta)
            if self._usage_chunk:
                chunks += [end, self._form.usage_chunk(usage)]
            else:
                chunks.append(end | {"usage": usage})
        return chunks

    def _usage(self, delta: AnswerDelta) -> dict[str, Any]:
        given = self._generation
        return self._form.usage(len(given.prompt), delta, given.cached)


async def _send_events(send: Send, events: list[dict[str, Any]], over: bool = False) -> None:
    data = b"".join(b"data: %b\n\n" % _compact_json(event) for event in events)
    data += b"data: [DONE]\n\n" if over else b""
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": not over})


def _compact_json(value: Any) -> bytes:
    """On one line also for clients that take every kind of line end in Unicode for one."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode()


def unavailable(error: NotServing) -> ApiRefusal:
    """The 503 of a server that loads, stops, or has lost its engine."""
    return ApiRefusal(503, str(error), code="not_serving", retry_after_s=_LOADING_RETRY_S)
