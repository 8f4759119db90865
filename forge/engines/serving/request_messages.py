"""The messages of a chat, read strictly: who said what, which tools were called, what they gave.

Knows no other field of a request, no template and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from forge.engines.serving.refusal import ApiRefusal, invalid_field

_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
_ASSISTANT_FIELDS = ("tool_calls", "reasoning", "reasoning_content")
_MORE_FIELDS = {"assistant": _ASSISTANT_FIELDS, "tool": ("tool_call_id", "name")}


@dataclass(frozen=True)
class MessageCall:
    """A call that the model made earlier in the conversation."""

    identity: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessage:
    """One message. `call` is the one that a tool's message answers."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[MessageCall, ...] = ()
    call: MessageCall | None = None


def read_messages(told: Sequence[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """All messages of a chat. Raises ApiRefusal 400 with the place of the fault.

    A result of a tool stands behind the message that called it, and a call that is the last word
    waits for its result: a template would otherwise leave the one out and have the model invent the
    other.
    """
    found: list[ChatMessage] = []
    open_calls: dict[str, MessageCall] = {}
    for number, fields in enumerate(told):
        message = _read_message(f"messages[{number}]", fields, open_calls)
        if message.role != "tool":
            open_calls = {call.identity: call for call in message.calls}
        found.append(message)
    if found and found[-1].calls:
        words = "is the last word: the results of the tools must follow"
        raise invalid_field(f"messages[{len(found) - 1}].tool_calls", words)
    return tuple(found)


def _read_message(
    place: str, fields: dict[str, Any], open_calls: Mapping[str, MessageCall]
) -> ChatMessage:
    role = fields.get("role")
    if role not in _MESSAGE_ROLES:
        words = f"must be one of {', '.join(_MESSAGE_ROLES)}"
        raise invalid_field(f"{place}.role", words if role else f"is missing: {words}")
    for name, value in fields.items():
        # What OpenAI's client sends back of an answer has its empty fields too.
        taken = ("role", "content", *_MORE_FIELDS.get(role, ()))
        if name not in taken and value not in (None, []):
            raise _not_supported(f"{place}.{name}")
    calls = _message_calls(f"{place}.tool_calls", fields.get("tool_calls"))
    return ChatMessage(
        role=role,
        text=_message_text(f"{place}.content", fields.get("content"), may_lack=bool(calls)),
        reasoning=_message_reasoning(place, fields),
        calls=calls,
        call=_answered_call(place, fields, open_calls) if role == "tool" else None,
    )


def _not_supported(place: str) -> ApiRefusal:
    return invalid_field(place, "is not supported by this server", "unsupported")


def _message_text(place: str, content: Any, may_lack: bool) -> str:
    """Parts of text are joined by a line end, as vLLM joins them."""
    if isinstance(content, str):
        return content
    if may_lack and content in (None, []):
        return ""
    if not isinstance(content, list) or not content:
        raise invalid_field(place, "must be a text or a list of parts of text")
    return "\n".join(_text_part(f"{place}[{n}]", part) for n, part in enumerate(content))


def _text_part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        words = f"{kind} is not supported: this server reads text alone"
        raise invalid_field(f"{place}.type", words if kind else "is missing", "unsupported")
    extra = sorted(set(part) - {"type", "text"})
    if extra:
        raise _not_supported(f"{place}.{extra[0]}")
    if not isinstance(part.get("text"), str):
        raise invalid_field(f"{place}.text", "must be a text")
    return str(part["text"])


def _message_reasoning(place: str, fields: Mapping[str, Any]) -> str:
    """What the model thought, under the one name or the other, or the same under both."""
    told: list[str] = []
    for name in ("reasoning", "reasoning_content"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise invalid_field(f"{place}.{name}", "must be a text")
        if told and value != told[0]:
            raise invalid_field(f"{place}.{name}", "differs from reasoning: give one")
        told.append(value)
    return told[0] if told else ""


def _message_calls(place: str, told: Any) -> tuple[MessageCall, ...]:
    if told in (None, []):
        return ()
    if not isinstance(told, list):
        raise invalid_field(place, "must be a list")
    calls = tuple(_message_call(f"{place}[{n}]", call) for n, call in enumerate(told))
    named = [call.identity for call in calls]
    for number, identity in enumerate(named):
        if identity in named[:number]:
            raise invalid_field(f"{place}[{number}].id", "is the id of another call")
    return calls


def _message_call(place: str, told: Any) -> MessageCall:
    fields = checked_object(place, told, ("id", "type", "function"))
    if fields.get("type", "function") != "function":
        raise invalid_field(f"{place}.type", 'must be "function"')
    function = checked_object(f"{place}.function", fields.get("function"), ("name", "arguments"))
    return MessageCall(
        identity=_filled_text(f"{place}.id", fields.get("id")),
        name=_filled_text(f"{place}.function.name", function.get("name")),
        arguments=_call_arguments(f"{place}.function.arguments", function.get("arguments")),
    )


def checked_object(place: str, told: Any, names: Sequence[str]) -> dict[str, Any]:
    """`told`, which must be a JSON object of these fields alone; nulls are what is not given."""
    if not isinstance(told, dict):
        raise invalid_field(place, "is missing" if told is None else "must be an object")
    fields = {name: value for name, value in told.items() if value is not None}
    extra = sorted(set(fields) - set(names))
    if extra:
        raise _not_supported(f"{place}.{extra[0]}")
    return fields


def _filled_text(place: str, told: Any) -> str:
    if not isinstance(told, str) or not told:
        raise invalid_field(place, "is missing" if told is None else "must be a text, not empty")
    return told


def _call_arguments(place: str, told: Any) -> Mapping[str, Any]:
    """The object in a JSON text; the empty text is what some clients send for no argument."""
    if not isinstance(told, str):
        raise invalid_field(place, "is missing" if told is None else "must be a JSON text")
    try:
        arguments = from_json(told, allow_inf_nan=False) if told else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_field(place, "must be the text of a JSON object")
    return arguments


def _answered_call(
    place: str, fields: Mapping[str, Any], open_calls: Mapping[str, MessageCall]
) -> MessageCall:
    identity = _filled_text(f"{place}.tool_call_id", fields.get("tool_call_id"))
    call = open_calls.get(identity)
    if call is None:
        words = "names no call of the assistant's message before it"
        raise invalid_field(f"{place}.tool_call_id", words)
    if fields.get("name") not in (None, call.name):
        raise invalid_field(f"{place}.name", f"is not the tool that was called: {call.name}")
    return call
