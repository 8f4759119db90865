"""The tools that a request offers, whether they may or must be called, and the shape of an answer.

Knows no template, no tokenizer and no grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from forge.engines.serving.answer_shape import AnswerShape, CallsWanted, ToolSpec
from forge.engines.serving.refusal import invalid_field
from forge.engines.serving.request_messages import checked_object

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of OpenAI's API, for schemas' names too
_NAME_WORDS = "must be 1 to 64 of a-z, A-Z, 0-9, _ and -"
_STRUCTURE_KINDS = ("json", "json_object", "regex", "grammar", "choice")
_MOST_CHOICES = 1000


@dataclass(frozen=True)
class ToolOrder:
    """The tools that the model is told of, and how many calls its answer may have.

    `must` are those of which one has to be called; empty: it may as well answer by itself.
    """

    tools: tuple[ToolSpec, ...] = ()
    calls: CallsWanted = "none"
    must: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True)
class ShapeOrder:
    """The shape that an answer must have, and the field of the request that says so."""

    shape: AnswerShape
    place: str


def read_tool_order(tools: Any, choice: Any, parallel: bool) -> ToolOrder:
    """tools, tool_choice (None: not given) and parallel_tool_calls. Raises ApiRefusal 400.

    With tool_choice "none" the model is not told of its tools: so it cannot call one. What it
    would have called anyway is text.
    """
    specs = _tool_specs(tools)
    if not specs:
        if choice not in (None, "none"):
            raise invalid_field("tool_choice", "needs tools")
        return ToolOrder()
    if choice == "none":
        return ToolOrder()
    calls: CallsWanted = "many" if parallel else "one"
    if choice in (None, "auto"):
        return ToolOrder(specs, calls)
    if choice == "required":
        return ToolOrder(specs, calls, must=specs)
    named = _named_choice(choice)
    must = tuple(spec for spec in specs if spec.name == named)
    if not must:
        raise invalid_field("tool_choice.function.name", "is the name of none of the tools")
    return ToolOrder(specs, calls, must)


def _named_choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        words = 'must be "none", "auto", "required" or a function\'s name in its object'
        raise invalid_field("tool_choice", words)
    if choice.get("type") != "function":
        words = 'must be "function": nothing else is supported'
        raise invalid_field("tool_choice.type", words, "unsupported")
    fields = checked_object("tool_choice", choice, ("type", "function"))
    function = checked_object("tool_choice.function", fields.get("function"), ("name",))
    if not isinstance(function.get("name"), str):
        raise invalid_field("tool_choice.function.name", "is missing")
    return str(function["name"])


def _tool_specs(tools: Any) -> tuple[ToolSpec, ...]:
    if not isinstance(tools, list):
        raise invalid_field("tools", "must be a list")
    specs: list[ToolSpec] = []
    for number, told in enumerate(tools):
        spec = _tool_spec(f"tools[{number}]", told)
        if any(spec.name == other.name for other in specs):
            raise invalid_field(f"tools[{number}].function.name", "is the name of another tool")
        specs.append(spec)
    return tuple(specs)


def _tool_spec(place: str, told: Any) -> ToolSpec:
    if isinstance(told, dict) and told.get("type") != "function":
        words = 'must be "function": nothing else is supported'
        raise invalid_field(f"{place}.type", words if "type" in told else "is missing")
    tool = checked_object(place, told, ("type", "function"))
    place = f"{place}.function"
    names = ("name", "description", "parameters", "strict")
    function = checked_object(place, tool.get("function"), names)
    if not isinstance(function.get("description", ""), str):
        raise invalid_field(f"{place}.description", "must be a text")
    if not isinstance(function.get("strict", False), bool):
        raise invalid_field(f"{place}.strict", "must be true or false")
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid_field(f"{place}.parameters", "must be a JSON schema")
    if parameters.get("type", "object") != "object":
        raise invalid_field(f"{place}.parameters.type", 'must be "object": arguments have names')
    if not isinstance(parameters.get("properties", {}), dict):
        raise invalid_field(f"{place}.parameters.properties", "must be an object")
    return ToolSpec(
        name=_checked_name(f"{place}.name", function.get("name")),
        description=function.get("description", ""),
        parameters=parameters,
        strict=function.get("strict", False),
    )


def _checked_name(place: str, told: Any) -> str:
    if not isinstance(told, str) or not _TOOL_NAME.fullmatch(told):
        raise invalid_field(place, f"is missing: it {_NAME_WORDS}" if told is None else _NAME_WORDS)
    return told


def read_shape_order(form: Any, structured: Any, tools: ToolOrder) -> ShapeOrder | None:
    """response_format, vLLM's structured_outputs and a call that must be made: at most one of them.

    Where calls may be made, the answer is of that shape or is calls. Without such a shape and
    without a strict tool it is free. A response_format's schema holds whether `strict` is asked for
    or not. Raises ApiRefusal 400.
    """
    found = [
        order
        for order in (_format_order(form), _structured_order(structured), _calls_order(tools))
        if order is not None
    ]
    if len(found) > 1:
        raise invalid_field(found[0].place, f"and {found[1].place} both shape the answer: give one")
    said = found[0] if found else None
    if tools.must or not (said or any(tool.strict for tool in tools.tools)):
        return said
    return _free_calls_order(tools, said) if tools.tools else said


def _calls_order(tools: ToolOrder) -> ShapeOrder | None:
    if not tools.must:
        return None
    many = tools.calls == "many"
    return ShapeOrder(AnswerShape("calls", tools=tools.must, many=many), "tool_choice")


def _free_calls_order(tools: ToolOrder, said: ShapeOrder | None) -> ShapeOrder:
    shape = AnswerShape(
        "calls",
        tools=tools.tools,
        many=tools.calls == "many",
        forced=False,
        said=said.shape if said else None,
    )
    return ShapeOrder(shape, said.place if said else "tools")


def _format_order(form: Any) -> ShapeOrder | None:
    place = "response_format"
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        checked_object(place, form, ("type",))
        return None
    if kind == "json_object":
        checked_object(place, form, ("type",))
        return ShapeOrder(AnswerShape("json_object"), place)
    if kind != "json_schema":
        words = "must be text, json_object or json_schema"
        raise invalid_field(f"{place}.type" if isinstance(form, dict) else place, words)
    form = checked_object(place, form, ("type", "json_schema"))
    place = f"{place}.json_schema"
    names = ("name", "description", "schema", "strict")
    told = checked_object(place, form.get("json_schema"), names)
    _checked_name(f"{place}.name", told.get("name"))
    if not isinstance(told.get("description", ""), str):
        raise invalid_field(f"{place}.description", "must be a text")
    if not isinstance(told.get("strict", False), bool):
        raise invalid_field(f"{place}.strict", "must be true or false")
    schema = _schema_object(f"{place}.schema", told.get("schema"))
    return ShapeOrder(AnswerShape("json_schema", schema=schema), f"{place}.schema")


def _schema_object(place: str, told: Any) -> Mapping[str, Any]:
    if not isinstance(told, dict):
        words = "is missing" if told is None else "must be a JSON schema, which is an object"
        raise invalid_field(place, words)
    return told


def _structured_order(told: Any) -> ShapeOrder | None:
    """vLLM's own field. A grammar is one in Lark's form."""
    if told is None:
        return None
    fields = checked_object("structured_outputs", told, _STRUCTURE_KINDS)
    if len(fields) != 1:
        words = f"must have one of {', '.join(_STRUCTURE_KINDS)}"
        raise invalid_field("structured_outputs", words)
    (kind,) = fields
    place, value = f"structured_outputs.{kind}", fields[kind]
    if kind == "json":
        return ShapeOrder(AnswerShape("json_schema", schema=_told_schema(place, value)), place)
    if kind == "json_object":
        if value is not True:
            raise invalid_field(place, "must be true")
        return ShapeOrder(AnswerShape("json_object"), place)
    if kind == "choice":
        return ShapeOrder(AnswerShape("choice", choices=_told_choices(place, value)), place)
    if not isinstance(value, str) or not value:
        raise invalid_field(place, "must be a text, not empty")
    shape = AnswerShape("regex" if kind == "regex" else "grammar", text=value)
    return ShapeOrder(shape, place)


def _told_schema(place: str, value: Any) -> Mapping[str, Any]:
    """A schema, or its text."""
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError:
            raise invalid_field(place, "is a text that is no JSON") from None
    return _schema_object(place, value)


def _told_choices(place: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_CHOICES:
        raise invalid_field(place, f"must be a list of 1 to {_MOST_CHOICES} texts")
    for number, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise invalid_field(f"{place}[{number}]", "must be a text, not empty")
    return tuple(dict.fromkeys(value))
