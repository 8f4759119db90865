"""The grammar of tool calls in Gemma 4's own syntax, each with arguments as its tool's schema says.

    <|tool_call>call:NAME{days:[1,2],city:<|"|>Oslo<|"|>}<tool_call|>

in llguidance's dialect of Lark, control tokens as such. Knows no tokenizer, no request and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.engines.serving.answer_shape import AnswerShape
from forge.engines.serving.call_texts import (
    CallGrammarRefused,
    call_count,
    call_text,
    call_times,
    check_call_bounds,
)

# Keywords that ask for nothing: JSON Schema 2020-12 calls them annotations; nullable is OpenAPI's,
# and an answer without null keeps to it.
_CALL_NOTES = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly "
    "writeOnly nullable".split()
)
_CALL_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format")
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_CALL_KEY = re.compile(r'[^\s{}\[\],:<>|"]+')  # what can stand without quotes
_CALL_OTHER_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # what a model may think of
# Where no schema is held: a property may have any name that can be read back.
_CALL_ANY_KEY = r"[^{}\[\],:\s]([^{}\[\],:]{0,98}[^{}\[\],:\s])?"
_CALL_FREE_LEVELS = 6  # of lists and objects in a value that no schema describes


@dataclass(frozen=True)
class CallTokens:
    """The ids of <|tool_call>, <tool_call|> and <|"|>."""

    opened: int
    closed: int
    quote: int


def call_grammar(shape: AnswerShape, tokens: CallTokens) -> str:
    """Lark for an answer of the kind "calls". `@said` in it stands for the grammar of shape.said.

    Keys come in the order that Gemma's template writes them in: sorted, capitals like small
    letters. An object may have other keys than its properties only where additionalProperties says
    so, or where it has no properties; arguments without any schema are none. Of what JSON Schema
    means by `format`, a few kinds of string are enforced and a number's are notes.
    Arguments whose schema is not held are any that can be read back as a call's.
    Raises CallGrammarRefused.
    """
    made = _CallRules(tokens.quote)
    calls = []
    for tool in shape.tools:
        schema = tool.parameters or {"type": "object", "additionalProperties": False}
        try:
            held = shape.forced or tool.strict
            arguments = made.value(schema, schema, tool.name) if held else made.any_object()
        except RecursionError:
            raise CallGrammarRefused(f"{tool.name}: nested too deeply") from None
        head = _call_literal(f"call:{tool.name}")
        calls.append(f"<[{tokens.opened}]> {head} {arguments} <[{tokens.closed}]>")
    start = "call+" if shape.many else "call"
    if not shape.forced:
        start = f"{start} | @said" if shape.said else f"SAID ({start})?\nSAID: /(?s:.*)/"
    return "\n".join([f"start: {start}", "call: " + " | ".join(calls), *made.rules]) + "\n"


def _call_literal(text: str) -> str:
    return json.dumps(text) if text else '""'


class _CallRules:
    """Lark's rules for schemas, each made once. What a method returns is part of a rule."""

    def __init__(self, quote: int) -> None:
        self.rules: list[str] = []
        self._quote = f"<[{quote}]>"
        self._referred: dict[tuple[int, str], str] = {}
        self._free_rules: dict[int, str] = {}

    def _rule(self, body: str) -> str:
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"TEXT{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, root: Mapping[str, Any], place: str) -> str:
        """What `schema` allows. `root` is where its references look."""
        if schema is True or schema == {}:
            return self._free(_CALL_FREE_LEVELS)
        if not isinstance(schema, Mapping):
            raise CallGrammarRefused(f"{place}: {json.dumps(schema)[:40]} cannot be kept to")
        asks = {name: part for name, part in schema.items() if name not in _CALL_NOTES}
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in asks:
                return self._combined(name, asks, root, place)
        for name in ("const", "enum"):
            if name in asks:
                return self._listed(name, asks, place)
        kinds = asks.pop("type", None)
        for name in asks:
            users = [kind for kind, names in _CALL_KEYWORDS.items() if name in names]
            if not users:
                raise CallGrammarRefused(f"{place}: {name} cannot be kept to")
            kinds = kinds or users[0]  # whoever says it means values of that type
        if not kinds:
            return self._free(_CALL_FREE_LEVELS)
        parts = [self._typed(kind, asks, root, place) for kind in _call_list(kinds)]
        return self._rule(" | ".join(parts))

    def _combined(
        self, name: str, asks: Mapping[str, Any], root: Mapping[str, Any], place: str
    ) -> str:
        told = asks[name]
        self._check_alone(name, asks, place)
        if name == "$ref":
            return self._reference(told, root, place)
        if not isinstance(told, list) or not told:
            raise CallGrammarRefused(f"{place}: {name} is no list of schemas")
        if name == "allOf" and len(told) > 1:
            raise CallGrammarRefused(f"{place}: allOf of several schemas cannot be kept to")
        if name == "oneOf" and not _call_types_differ(told):
            raise CallGrammarRefused(f"{place}: oneOf of values that may be alike; say anyOf")
        parts = [self.value(part, root, f"{place}.{name}[{n}]") for n, part in enumerate(told)]
        return self._rule(" | ".join(parts))

    def _listed(self, name: str, asks: Mapping[str, Any], place: str) -> str:
        values = [asks[name]] if name == "const" else asks[name]
        kinds = asks.get("type")
        self._check_alone(name, {key: part for key, part in asks.items() if key != "type"}, place)
        if not isinstance(values, list):
            raise CallGrammarRefused(f"{place}: enum is no list")
        if kinds is not None:
            values = [value for value in values if _call_types(value) & set(_call_list(kinds))]
        if not values:
            raise CallGrammarRefused(f"{place}: {name} has no value of the type")
        return self._rule(" | ".join(self._literal(value, place) for value in values))

    def _check_alone(self, name: str, asks: Mapping[str, Any], place: str) -> None:
        others = sorted(asks.keys() - {name})
        if others:
            raise CallGrammarRefused(f"{place}: {others[0]} beside {name} cannot be kept to")

    def _reference(self, told: Any, root: Mapping[str, Any], place: str) -> str:
        key = (id(root), str(told))
        if key not in self._referred:
            target: Any = root
            names = str(told).removeprefix("#").split("/")[1:]
            for name in names:
                name = name.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if target is None or not str(told).startswith("#"):
                raise CallGrammarRefused(f"{place}: $ref {str(told)[:60]!r} is nowhere in it")
            name = f"ref{len(self._referred)}"
            self._referred[key] = name  # first, for it may refer to itself
            self.rules.append(f"{name}: {self.value(target, root, str(told))}")
        return self._referred[key]

    def _typed(
        self, kind: Any, asks: Mapping[str, Any], root: Mapping[str, Any], place: str
    ) -> str:
        if kind == "object":
            return self._object(asks, root, place)
        if kind == "array":
            return self._array(asks, root, place)
        if kind == "string":
            return f"{self._quote} {self._terminal(call_text(asks, place))} {self._quote}"
        if kind not in ("number", "integer", "boolean", "null"):
            raise CallGrammarRefused(f"{place}: type {json.dumps(kind)[:40]} is none")
        # Written as JSON writes them: llguidance makes their grammar.
        wanted = _CALL_KEYWORDS["number"] - {"format"} if kind in ("number", "integer") else ()
        schema = {"type": kind} | {name: asks[name] for name in wanted if name in asks}
        form = {"x-guidance": {"whitespace_flexible": False, "lenient": False}}
        return f"%json {json.dumps(form | schema)}"

    def _array(self, asks: Mapping[str, Any], root: Mapping[str, Any], place: str) -> str:
        least, most = call_count(asks, "minItems", place) or 0, call_count(asks, "maxItems", place)
        check_call_bounds(least, most, place)
        if most == 0:
            return '"[" "]"'
        item = self.value(asks.get("items", True), root, f"{place}.items")
        more = call_times(max(least - 1, 0), None if most is None else most - 1)
        items = f'{item} ("," {item}){more}'
        return f'"[" {items if least else f"({items})?"} "]"'

    def _object(self, asks: Mapping[str, Any], root: Mapping[str, Any], place: str) -> str:
        told = asks.get("properties", {})
        required = asks.get("required", [])
        if not isinstance(told, Mapping) or not isinstance(required, list):
            raise CallGrammarRefused(f"{place}: properties or required are of the wrong type")
        others = asks.get("additionalProperties", not told)
        properties = dict(told)
        for name in required:
            if name not in properties:
                if others is False:
                    raise CallGrammarRefused(f"{place}: {name!r} is required and not allowed")
                properties[name] = others
        fields = []
        for name in sorted(properties, key=lambda name: str(name).lower()):
            if not _CALL_KEY.fullmatch(str(name)):
                raise CallGrammarRefused(f"{place}: the key {name!r} cannot be written in a call")
            if properties[name] is False:
                continue
            value = self.value(properties[name], root, f"{place}.{name}")
            member = self._rule(f"{_call_literal(f'{name}:')} {value}")
            fields.append((member, name in required))
        rest = "" if others is False else self._others(others, properties, root, place)
        return f'"{{" {self._fields(fields, rest)} "}}"'

    def _others(
        self, others: Any, named: Mapping[str, Any], root: Mapping[str, Any], place: str
    ) -> str:
        """One member of another name than those."""
        key = f"/{_CALL_OTHER_KEY}/"
        if named:
            key += f" & ~/({'|'.join(re.escape(name) for name in named)})/"
        value = self.value(others, root, f"{place}.additionalProperties")
        return self._rule(f'{self._terminal(key)} ":" {value}')

    def _fields(self, fields: Sequence[tuple[str, bool]], rest: str) -> str:
        """Fields in their order with commas between, and then any number of `rest`.

        From behind: `first` is what may come when nothing has come yet, `after` when something has.
        """
        after = self._rule(f'("," {rest})*') if rest else '""'
        first = self._rule(f'({rest} ("," {rest})*)?') if rest else '""'
        for member, needed in reversed(fields):
            first = self._rule(f"{member} {after}" + ("" if needed else f" | {first}"))
            after = self._rule(f'"," {member} {after}' + ("" if needed else f" | {after}"))
        return first

    def _literal(self, value: Any, place: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_call_literal(value)} {self._quote}"
        if isinstance(value, Mapping):
            parts = []
            for name in sorted(value, key=str.lower):
                if not _CALL_KEY.fullmatch(name):
                    words = f"{place}: the key {name!r} cannot be written in a call"
                    raise CallGrammarRefused(words)
                parts.append(f"{_call_literal(f'{name}:')} {self._literal(value[name], place)}")
            inner = ' "," '.join(parts)
            return f'"{{" {inner} "}}"'
        if isinstance(value, list):
            inner = ' "," '.join(self._literal(item, place) for item in value)
            return f'"[" {inner} "]"'
        return _call_literal(json.dumps(value))

    def any_object(self) -> str:
        """An object of any fields."""
        return self._braced(_CALL_FREE_LEVELS)

    def _braced(self, levels: int) -> str:
        member = self._rule(f'/{_CALL_ANY_KEY}/ ":" {self._free(levels)}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _free(self, levels: int) -> str:
        """Any value, with so many levels of lists and objects within each other."""
        if levels not in self._free_rules:
            schema = {"type": ["string", "number", "boolean", "null"]}
            body = self.value(schema, schema, "")
            if levels:
                inner = self._free(levels - 1)
                body += f' | "[" ({inner} ("," {inner})*)? "]" | {self._braced(levels - 1)}'
            self._free_rules[levels] = self._rule(body)
        return self._free_rules[levels]


def _call_list(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else [kinds]


def _call_types(value: Any) -> set[str]:
    """The names that JSON Schema has for the type of `value`."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    if isinstance(value, str):
        return {"string"}
    if value is None:
        return {"null"}
    return {"object" if isinstance(value, Mapping) else "array"}


def _call_types_differ(schemas: Sequence[Any]) -> bool:
    """Whether no value can be of two of `schemas`, because their types differ."""
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in schemas]
    if not all(isinstance(kind, str) for kind in kinds):
        return False
    return len({"number" if kind == "integer" else kind for kind in kinds}) == len(kinds)
