"""An OpenAI-style client for a served model: health, model list, one streamed chat completion.

Talks to one address that a plane has proven to be this rig's own; follows no redirect, uses no
proxy, and bounds every read in bytes and time.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import json_object

_LINE_LIMIT = 8_000_000  # bytes of one event; larger ones are refused, not buffered
_ANSWER_LIMIT = 4_000_000  # characters of one answer; then the stream is left
_BODY_LIMIT = 1_000_000  # bytes read of any other answer


@dataclass
class ChatAnswer:
    """One streamed answer. Times in seconds from the request's start; counts from usage.

    `complete` is true only when the server said why it stopped; else `broke_off` says why not.
    """

    text: str = ""
    reasoning: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    broke_off: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.finish_reason) and not self.broke_off


async def _bounded_body(response: httpx2.Response) -> bytes:
    """The first _BODY_LIMIT bytes of an answer; what is beyond them is not even fetched."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= _BODY_LIMIT:
            break
    return bytes(body[:_BODY_LIMIT])


async def _event_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The `data:` payloads of an event stream, whole, whatever the chunks are cut into.

    One payload a line: model servers write an event's JSON on one line, some without the blank line
    that the standard asks for between two events.
    """
    buffer = bytearray()
    async for chunk in response.aiter_bytes():
        buffer += chunk
        if len(buffer) > _LINE_LIMIT:
            raise RigError("PARTIAL", "the server sent an event beyond all bounds")
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())
    if buffer.startswith(b"data:"):
        yield bytes(buffer[5:].strip())


def _take_chat_event(answer: ChatAnswer, payload: bytes, begun: float) -> None:
    """Add one event to `answer`; RigError PARTIAL when the server reports an error in it."""
    now = time.monotonic() - begun
    event = json_object(payload.decode("utf-8", "replace"))
    if event is None:
        raise RigError("PARTIAL", "the server sent an event that is no JSON object")
    if event.get("error"):
        raise RigError("PARTIAL", f"the server reported an error: {str(event['error'])[:300]}")
    answer.model = str(event.get("model") or answer.model)
    usage = _mapping(event.get("usage"))
    answer.prompt_tokens = _count(usage.get("prompt_tokens"), answer.prompt_tokens)
    answer.completion_tokens = _count(usage.get("completion_tokens"), answer.completion_tokens)
    choices = event.get("choices")
    for choice in map(_mapping, choices if isinstance(choices, list) else []):
        delta = _mapping(choice.get("delta"))
        piece = str(delta.get("content") or "")
        thought = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        # The first chunk carries the role alone: it is no token, and must not stop the clock.
        if piece or thought:
            answer.arrivals.append(now)
            if answer.ttft_s is None:
                answer.ttft_s = now
            answer.text += piece
            answer.reasoning += thought
            if len(answer.text) + len(answer.reasoning) > _ANSWER_LIMIT:
                raise RigError("PARTIAL", "the server sent an answer beyond all bounds")
        answer.finish_reason = str(choice.get("finish_reason") or answer.finish_reason)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any, known: int | None) -> int | None:
    """A token count as the server gave it; what cannot be one leaves the known count."""
    return value if type(value) is int and value >= 0 else known


class ChatClient:
    """A client of the server at `base_url` (``http://127.0.0.1:PORT``), one connection a call.

    `key` goes out as a bearer token and nowhere else; empty sends none.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        self.base_url = base_url
        self._key = key

    def _http(self, total_s: float) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.base_url,
            trust_env=False,
            follow_redirects=False,
            # Loopback speaks no TLS: a trust store would be 50 ms of every call, and of every TTFT.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A compressed answer could unfold to any size before it is measured.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx2.Timeout(total_s, connect=min(5.0, total_s)),
        )

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and bounded body of GET `path`. Raises RigError UNREACHABLE or TIMEOUT."""
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("GET", path) as response:
                    return response.status_code, await _bounded_body(response)
        except (TimeoutError, httpx2.TimeoutException):
            raise RigError("TIMEOUT", f"{path} did not answer in {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise RigError("UNREACHABLE", f"nothing answers: {type(error).__name__}") from None

    async def get_json(self, path: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """GET `path` as a JSON object. RigError UNREACHABLE, TIMEOUT, or DENIED (no JSON)."""
        status, body = await self._get(path, timeout_s)
        if status != 200:
            raise RigError("UNREACHABLE", f"{path} answered {status}")
        value = json_object(body)
        if value is None:
            raise RigError("DENIED", f"{path} did not answer as a model server does")
        return value

    async def healthy(self, path: str = "/health", timeout_s: float = 2.0) -> bool:
        """Whether `path` answers 200 now; some servers say it with an empty body."""
        try:
            status, _ = await self._get(path, timeout_s)
        except RigError:
            return False
        return status == 200

    async def chat(
        self,
        model: str,
        prompt: str,
        *,
        system: str = "",
        max_tokens: int,
        temperature: float,
        timeout_s: float,
    ) -> ChatAnswer:
        """One chat completion, streamed; whatever came before a break is kept and marked.

        Raises RigError when no answer began: UNREACHABLE, TIMEOUT, or after the server's status
        AUTH, BUSY, INVALID, DENIED (a redirect, no chat completion) or INTERNAL, with its words.
        """
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "model": model,
            "messages": [*messages, {"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, begun = ChatAnswer(), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise _status_fault(response.status_code, await _bounded_body(response))
                    events = 0
                    async for payload in _event_lines(response):
                        if payload == b"[DONE]":
                            break
                        if payload:
                            events += 1
                            _take_chat_event(answer, payload, begun)
                    if not events:
                        raise RigError("DENIED", "what answers there streams no chat completion")
        except RigError as error:
            if error.error_class != "PARTIAL":
                raise
            answer.broke_off = error.what
        except (TimeoutError, httpx2.TimeoutException):
            answer.broke_off = f"no end within {timeout_s:g} s"
            if not answer.arrivals:
                raise RigError(
                    "TIMEOUT",
                    f"the model gave no token within {timeout_s:g} s",
                    "ask for fewer max_tokens, or raise QUERY_TIMEOUT_S",
                ) from None
        except httpx2.HTTPError as error:
            answer.broke_off = f"the connection broke ({type(error).__name__})"
            if not answer.arrivals:
                raise RigError(
                    "UNREACHABLE", f"the model server does not answer: {type(error).__name__}"
                ) from None
        answer.total_s = time.monotonic() - begun
        if not answer.complete and not answer.broke_off:
            answer.broke_off = "the stream ended without a finish reason"
        return answer


def _status_fault(status: int, body: bytes) -> RigError:
    """The refusal that an HTTP status means, with the server's own words, bounded."""
    words = body[:2000].decode("utf-8", "replace")
    if status in (401, 403):
        return RigError("AUTH", f"the model server refused the credentials ({status})")
    if status in (429, 503):
        return RigError("BUSY", f"the model server is overloaded ({status}): {words}")
    if status < 400:
        return RigError("DENIED", f"a redirect or no answer ({status}) came back; not followed")
    if status < 500:
        return RigError("INVALID", f"the model server refused the request ({status}): {words}")
    return RigError(
        "INTERNAL",
        f"the model server failed ({status}): {words}",
        "read the model server's log",
    )
