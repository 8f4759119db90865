"""One whole chat completion with whatever fields a probe wants, and exactly what came back.

A refusal, an empty body and a broken connection are findings here, so none of them is raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.state import json_object

_PROBE_BODY_LIMIT = 4_000_000  # bytes; no probe asks for an answer near it


@dataclass(frozen=True)
class ProbeAnswer:
    """What came back. status 0: nothing did, and `fault` says why. The properties read a chat
    completion and are empty or None where the body holds none."""

    status: int
    text: str = ""
    seconds: float = 0.0
    fault: str = ""
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any] | None:
        """The first choice's message; None where there is no such thing."""
        choices = self.body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        return message if isinstance(message, dict) else None

    @property
    def content(self) -> str:
        content = (self.message or {}).get("content")
        return content if isinstance(content, str) else ""

    @property
    def reasoning(self) -> str:
        message = self.message or {}
        return str(message.get("reasoning_content") or message.get("reasoning") or "")

    @property
    def tool_calls(self) -> list[Any]:
        calls = (self.message or {}).get("tool_calls")
        return calls if isinstance(calls, list) else []

    @property
    def finish_reason(self) -> str:
        choices = self.body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        return str(first.get("finish_reason") or "") if isinstance(first, dict) else ""

    @property
    def prompt_tokens(self) -> int | None:
        return self._counted("prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        return self._counted("completion_tokens")

    @property
    def error_words(self) -> str:
        """What the server says went wrong: an error in the body, else the body of a refusal."""
        error = self.body.get("error")
        if self.status != 200:
            error = error or self.body.get("detail") or self.body.get("message") or self.text
        if isinstance(error, dict):
            error = error.get("message") or error
        return str(error or "")

    def _counted(self, name: str) -> int | None:
        usage = self.body.get("usage")
        count = usage.get(name) if isinstance(usage, dict) else None
        return count if type(count) is int and count >= 0 else None


class ProbeClient(ChatClient):
    """A chat client that tells what came back, whatever it was."""

    async def post_chat(self, fields: Mapping[str, Any], timeout_s: float) -> ProbeAnswer:
        """POST `fields` as one request and read the whole answer, bounded in bytes and seconds."""
        begun = time.monotonic()
        data, status, fault = bytearray(), 0, ""
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                path = "/v1/chat/completions"
                async with http.stream("POST", path, json=dict(fields)) as response:
                    status = response.status_code
                    async for chunk in response.aiter_bytes():
                        data += chunk
                        if len(data) > _PROBE_BODY_LIMIT:
                            fault = f"the answer is longer than {_PROBE_BODY_LIMIT:,} bytes"
                            break
        except (TimeoutError, httpx2.TimeoutException):
            fault = f"no whole answer within {timeout_s:g} s"
        except httpx2.HTTPError as error:
            fault = f"the connection broke ({type(error).__name__})"
        text = data[:_PROBE_BODY_LIMIT].decode("utf-8", "replace")
        return ProbeAnswer(
            status=0 if fault else status,
            text=text,
            seconds=time.monotonic() - begun,
            fault=fault,
            body=(json_object(text) or {}) if not fault else {},
        )
