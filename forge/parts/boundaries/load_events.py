"""What a load request leaves behind, and what one event of a chat stream means.

Knows no connection: the caller says when each event came.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamRecord:
    """What one request gave. Times are seconds of `time.perf_counter`; tokens are from usage.

    `arrivals` holds one time per content chunk; chunks without text (the role, usage, the finish)
    are not in it. `fault` is empty only for a request that completed: status 200, an event stream
    with a finish reason, usage and content. `coalesced` counts chunks that came in one read with an
    earlier one, without being in the same HTTP chunk: the server sent them apart.
    """

    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    coalesced: int = 0
    http_status: int = 0
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    fault: str = ""

    @property
    def completed(self) -> bool:
        return not self.fault


def is_plain_text_event(payload: bytes) -> bool:
    """Whether an event is surely a content chunk and nothing else, told without parsing it.

    False means only: parse it. A quote within a JSON string is escaped, so ``"content":`` is always
    a key; anything that may be an error, a finish or usage goes the long way.
    """
    place = payload.find(b'"content":')
    if place < 0:
        return False
    place += 10
    if payload.startswith(b" ", place):
        place += 1
    return (
        payload.startswith(b'"', place)
        and not payload.startswith(b'""', place)
        and (b'"finish_reason":null' in payload or b'"finish_reason": null' in payload)
        and b'_tokens"' not in payload
        and b'"error"' not in payload
        and payload.endswith(b"}")
    )


def take_load_event(record: StreamRecord, payload: bytes) -> bool:
    """Read one event into `record`; returns whether it carries generated text.

    An error inside a 200 and an event that is no JSON become the record's fault.
    """
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        record.fault = "the server sent an event that is no JSON"
        return False
    if not isinstance(event, dict):
        record.fault = "the server sent an event that is no object"
        return False
    if event.get("error"):
        record.fault = f"the server reported an error in the stream: {str(event['error'])[:200]}"
        return False
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.prompt_tokens = _usage_count(usage.get("prompt_tokens"), record.prompt_tokens)
        record.completion_tokens = _usage_count(
            usage.get("completion_tokens"), record.completion_tokens
        )
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = _usage_count(details.get("cached_tokens"), record.cached_tokens)
    text = False
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        if isinstance(delta, dict):
            # A thought is generated text too; the role alone is not, and must not stop the clock.
            text = text or any(
                delta.get(key) for key in ("content", "reasoning_content", "reasoning")
            )
        if choice.get("finish_reason"):
            record.finish_reason = str(choice["finish_reason"])[:40]
    return text


def _usage_count(value: object, known: int | None) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good and isinstance(value, int) else known


def stream_fault(record: StreamRecord) -> str:
    """Why a stream that ended in order still did not complete; empty when it did."""
    if not record.finish_reason:
        return "the stream ended without a finish reason"
    if record.completion_tokens is None or record.prompt_tokens is None:
        return "the server gave no usage, so tokens cannot be counted"
    if not record.arrivals or record.completion_tokens == 0:
        return "the answer has no content"
    return ""
