"""One plain text completion of a served model: a prompt as it stands, no chat template.

A client like the chat one, with its bounds and its key; knows no model server's other ways.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError
from forge.parts.ground.state import json_object

_COMPLETION_LIMIT = 4_000_000  # bytes of one answer; what is longer is refused


@dataclass(frozen=True)
class Completion:
    """One completion. Counts are the server's own and None where it gave none; time in seconds."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    model: str
    seconds: float


class CompletionClient(ChatClient):
    """A client of /v1/completions at a chat client's address."""

    async def complete(
        self, model: str, prompt: str, *, max_tokens: int, temperature: float, timeout_s: float
    ) -> Completion:
        """Continue `prompt`, whole answer at once.

        Raises RigError TIMEOUT, UNREACHABLE, DENIED (no completion came back), or after the
        server's status AUTH, BUSY, INVALID or INTERNAL, with its words.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        begun, data = time.monotonic(), bytearray()
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for chunk in response.aiter_bytes():
                        data += chunk
                        if len(data) > _COMPLETION_LIMIT:
                            raise RigError("DENIED", "the answer is beyond all bounds")
                    status = response.status_code
        except (TimeoutError, httpx2.TimeoutException):
            raise RigError(
                "TIMEOUT",
                f"no whole completion came within {timeout_s:g} s",
                "ask for fewer max_tokens, or raise QUERY_TIMEOUT_S",
            ) from None
        except httpx2.HTTPError as error:
            raise RigError(
                "UNREACHABLE", f"the model server does not answer: {type(error).__name__}"
            ) from None
        if status != 200:
            raise _completion_fault(status, data[:2000].decode("utf-8", "replace"))
        return _as_completion(json_object(bytes(data)), time.monotonic() - begun)


def _as_completion(answer: dict[str, Any] | None, seconds: float) -> Completion:
    choices = (answer or {}).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if answer is None or not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise RigError("DENIED", "what answers there gives no text completion")
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Completion(
        text=first["text"],
        finish_reason=str(first.get("finish_reason") or ""),
        prompt_tokens=_token_count(counts.get("prompt_tokens")),
        completion_tokens=_token_count(counts.get("completion_tokens")),
        model=str(answer.get("model") or ""),
        seconds=seconds,
    )


def _token_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _completion_fault(status: int, words: str) -> RigError:
    """The refusal that an HTTP status means, with the server's own words, bounded."""
    if status in (401, 403):
        return RigError("AUTH", f"the model server refused the credentials ({status})")
    if status in (429, 503):
        return RigError("BUSY", f"the model server is overloaded ({status}): {words}")
    if status < 400:
        return RigError("DENIED", f"a redirect or no answer ({status}) came back; not followed")
    if status < 500:
        return RigError("INVALID", f"the model server refused the request ({status}): {words}")
    return RigError("INTERNAL", f"the model server failed ({status}): {words}")
