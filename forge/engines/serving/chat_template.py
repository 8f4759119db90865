"""A model's own chat template: what it is given, and what it can do.

Knows no tokenizer. The template is a program of somebody else's, and runs in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from forge.engines.serving.answer_shape import ToolSpec
from forge.engines.serving.refusal import invalid_field
from forge.engines.serving.request_messages import ChatMessage, MessageCall

# What a template is tried with, to see what it takes.
_TRIED_CALL = MessageCall("call_tried", "name_tried", {"city": "city_tried"})
_TRIED_TALK = (
    ChatMessage("user", "asked_tried"),
    ChatMessage("assistant", "", calls=(_TRIED_CALL,)),
    ChatMessage("tool", "result_tried", call=_TRIED_CALL),
)


class TemplateFault(Exception):
    """The template is none; the message says why."""


class ChatTemplate:
    """One chat template with what transformers offers to it. Raises TemplateFault for no template.

    transformers.utils.chat_template_utils (5.24) is the source of the names and settings: trimmed
    blocks, break and continue, `generation` blocks, raise_exception, strftime_now, and tojson that
    leaves HTML alone. `specials` are bos_token and its like, by name.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.add_extension(_generation_blocks())
        environment.filters["tojson"] = _template_json
        environment.globals["raise_exception"] = _template_refuses
        environment.globals["strftime_now"] = _template_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateFault(f"the chat template is none: {error}") from None
        known = {*specials, "messages", "tools", "documents", "add_generation_prompt"}
        names = meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(names - known - set(environment.globals))
        self._specials = dict(specials)
        tried = self._tried(_TRIED_TALK[:1], (ToolSpec("tool_tried"),))
        self.takes_tools = "tool_tried" in tried
        tried = self._tried(_TRIED_TALK, ())
        self.takes_calls = all(
            word in tried for word in ("name_tried", "city_tried", "result_tried")
        )

    def render(self, fields: Mapping[str, Any]) -> str:
        """The conversation's text; `fields` are template_fields' or made of them. Raises ApiRefusal
        400 with the template's own words."""
        try:
            return self._render(fields)
        except Exception as error:  # a template is a program, and fails in every way of one
            words = f"the model's template does not take them: {error}"
            raise invalid_field("messages", words) from None

    def _render(self, fields: Mapping[str, Any]) -> str:
        return self._template.render(
            **{"documents": None, "add_generation_prompt": True, **self._specials, **fields}
        )

    def _tried(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
        """The text of a conversation that it may not take; empty then."""
        try:
            return self._render(template_fields(messages, tools, {}))
        except Exception:
            return ""


def template_fields(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], flags: Mapping[str, Any]
) -> dict[str, Any]:
    """A conversation as transformers gives it to a template: arguments of calls are objects."""
    return {
        **flags,
        "messages": [_message_fields(message) for message in messages],
        "tools": [_tool_fields(tool) for tool in tools] or None,
    }


def _message_fields(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:  # templates read it under the one name or the other
        fields |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.identity,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    if message.call is not None:
        fields |= {"tool_call_id": message.call.identity, "name": message.call.name}
    return fields


def _tool_fields(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _generation_blocks() -> type[Any]:
    """The extension for {% generation %}, which marks the model's words: no change here."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlocks


def _template_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _template_refuses(message: str) -> str:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _template_now(form: str) -> str:
    return datetime.now().strftime(form)
