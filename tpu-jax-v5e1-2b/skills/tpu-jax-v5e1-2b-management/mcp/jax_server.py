# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic>=2.14,<3",
# ]
# ///
# Built from forge/programs/jax_server.py by `python3 -m forge.build`: edit it there.

"""Serves a Gemma 4 checkpoint over HTTP, in JAX: OpenAI's endpoints, many conversations at once.

    python3 jax_server.py --model FOLDER
    python3 jax_server.py --model FOLDER --explain     what it would take, without loading weights

FOLDER is as Hugging Face publishes it. While the model is loaded, lines `jax_server: NN% what` say
how far it has come, and /health answers 503.
"""

# Contents, by line:
#   135 serving / answer_shape: What an answer must look like where a request says so: a schema, a …
#   178 serving / call_syntax: Gemma 4's way to write a call, read into the name of a tool and the …
#   318 serving / call_texts: The texts that a call may have, as terminals of llguidance's dialect …
#   399 serving / call_grammar: The grammar of tool calls in Gemma 4's own syntax, each with …
#   696 serving / control_text: Texts of others on their way through a chat template: their …
#   746 serving / http_server: Runs an application on a socket until a signal asks for the end, …
#   817 serving / refusal: What a request gets that is not carried out: a status and OpenAI's …
#   858 serving / http_gate: Who may ask: the API key, and the host name that a request to this …
#   906 serving / request_messages: The messages of a chat, read strictly: who said what, which …
#  1089 serving / chat_template: A model's own chat template: what it is given, and what it can do.
#  1244 serving / request_tools: The tools that a request offers, whether they may or must be …
#  1474 serving / slot_engine: The seam between what serves and what computes: an engine with …
#  1594 serving / replicated_engine: Several engines of one model as one: conversations are spread …
#  1704 serving / requests: The bodies of /v1/chat/completions and /v1/completions, read strictly …
#  2020 serving / scheduler_job: What a scheduler takes and tells: a job and its place, why one is …
#  2107 serving / scheduler: Continuous batching: one thread drives the engine, and every …
#  2418 serving / serving_metrics: Figures for /metrics, in the text form of Prometheus and under …
#  2552 serving / token_text: The bytes that each token stands for, and how a stream of tokens …
#  2675 serving / answer_parser: An answer's tokens taken apart as they come: what is said, what …
#  2860 serving / chat_text: A model folder's tokenizer and chat template: conversations and texts …
#  3069 serving / constraints: Holds an answer to its shape: which tokens may come next, after a …
#  3330 serving / generation: One answer on its way: tokens from the scheduler become its parts, …
#  3512 serving / answers: The JSON of answers: OpenAI's chat completions and text completions, …
#  3673 serving / http_answer: An answer as it goes out over HTTP: whole, or as a stream of events …
#  3796 serving / http_front: The HTTP face of one served model: OpenAI's endpoints, health, …
#  4016 gemma4 / config: The architecture of one Gemma 4 checkpoint in numbers: what config.json …
#  4092 gemma4 / memory_speed: Measures how fast this machine reads its memory: the bound of every …
#  4119 gemma4 / refusal: What is said of a model folder that cannot be served as it stands.
#  4145 gemma4 / config_fields: One object of a config file, read key by key: what is never read …
#  4243 gemma4 / model_folder: Finds the files of a model folder and reads its small JSON files.
#  4315 gemma4 / quantization_config: Reads `quantization_config`: which matrices a checkpoint …
#  4400 gemma4 / config_reader: Reads the text half of a Gemma 4 from config.json, and refuses by …
#  4723 gemma4 / safetensors_header: Reads what one safetensors file says it holds, and whether …
#  4811 gemma4 / packed_tensors: Matrices that a checkpoint stores as packed 4-bit integers: where …
#  4928 gemma4 / tensor_names: The tensors of a Gemma 4's text half by name and shape, and which …
#  5078 gemma4 / partition: Which part of a Gemma 4 each of several devices holds, when they serve …
#  5160 gemma4 / weight_files: Opens a model folder's weights: the text half's tensors as views of …
#  5294 gemma4 / weight_forms: In which form each tensor is served: plain, as packed 4-bit …
#  5355 gemma4 / sizes: What a Gemma 4 takes: bytes of weights and caches, bytes and operations of …
#  5598 gemma4 / memory_need: What serving takes of a device's memory, and the refusal of a start …
#  5728 gemma4 / explain: Says what serving a model folder would take, without loading its …
#  5921 jax / device_memory: How much memory the default device has, as far as it says.
#  5941 jax / kept_rows: Two forms in which keys and values are kept: plain numbers, and int8 with …
#  5987 jax / attention: Attention of new tokens over the keys in their view, taken in blocks.
#  6136 jax / cache: What the engine keeps of its conversations between dispatches: keys, values …
#  6299 jax / mesh: How arrays lie on several devices that run one model together: along one axis …
#  6448 jax / prefix_chunks: Whole chunks of a prompt's keys and values, taken out of a row of the …
#  6505 jax / prefix_store: Keeps what whole chunks of prompts left in the caches, for prompts …
#  6570 jax / prefix_cache: Begins a conversation with what an earlier one left, and keeps what it …
#  6648 jax / quantised: Matrices that lie on the device as integers with scales, and products …
#  6828 jax / linear: Products of activations with stored weights, as fast as the platform at hand …
#  6899 jax / params: Weights on the device: from views of a checkpoint's files, one tensor at a …
#  6997 jax / rows: Which row of the caches each conversation has: low ones, so that few need only …
#  7052 jax / rules: The rules of Gemma 4's text model that hold for one token at a time, one …
#  7153 jax / experts: The sparse half of a 26B-A4B layer: each token through its few experts, …
#  7233 jax / model: Gemma 4's forward pass: new tokens of some conversations through some of the …
#  7450 jax / sampling: Chooses the next token of every row of a batch at once, on the device, …
#  7787 jax / steps: The few programs that an engine runs, each of one shape: what they compute, …
#  8022 jax / batch: What a batch's programs take of its requests, and what is told of what they …
#  8108 jax / compiled: Compiles an engine's programs ahead of time, keeps them on disk, and …
#  8175 jax / engine: The engine itself: a loaded Gemma 4 that answers several conversations, one …
#  8432 jax / parallel: Puts an engine on as many devices as are asked for: parts of one model, …
#  8471 programs / jax_server: Serves a Gemma 4 checkpoint over HTTP, in JAX: OpenAI's endpoints, …

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import hashlib
import hmac
import ipaddress
import json
import math
import mmap
import os
import random
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from jax import lax
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import AddedToken, Tokenizer

# ── serving / answer_shape ────────────────────────────────────────────────────────────────────────
# What an answer must look like where a request says so: a schema, a pattern, or a call of a tool.
#
# Knows no tokenizer, no grammar and no HTTP.

CallsWanted = Literal["none", "one", "many"]  # calls of tools that one answer may have


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, which
    `strict` asks to hold every call to."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class AnswerShape:
    """What an answer must be, whatever the model would rather say.

    json_object: any JSON object; json_schema: JSON that `schema` allows; regex and grammar (Lark's
    form): what `text` allows; choice: one of `choices`; calls: at least one call of one of `tools`
    in the model's own syntax, several where `many`, each with arguments as its tool's schema says.
    A thought that comes first is free.

    `forced` false: there may be no call. What is called is one of `tools` all the same, but only
    strict ones have their schemas held. The answer is then of the shape `said`, or calls; without
    `said`, any text, and calls behind it.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "calls"]
    schema: Mapping[str, Any] | None = None
    text: str = ""
    choices: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    many: bool = True
    forced: bool = True
    said: AnswerShape | None = None


# ── serving / call_syntax ─────────────────────────────────────────────────────────────────────────
# Gemma 4's way to write a call, read into the name of a tool and the JSON of its arguments.
#
#     call:NAME{city:"Oslo",days:[1,2],exact:true}     where each " is a token of its own
#
# Source of the syntax: the chat template google-gemma-4-31B-it.jinja (llama.cpp b11434,
# 2026-11-29),
# which writes earlier calls so. Knows no token and no stream.

# Stands for the token around texts. A lone surrogate, which is in no text decoded from bytes: so
# whatever letters a model writes, it cannot write this.
CALL_QUOTE = "\udc00"
_CALL_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.-]+)\s*\{")
_BLANKS = " \t\r\n"
# What ends a key or a value that has no quotes.
_BARE = re.compile(f"[^{{}}\\[\\],:{CALL_QUOTE}]*")
_BARE_VALUE = re.compile(f"[^{{}}\\[\\],{CALL_QUOTE}]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# A template prints Python's None where an argument was null.
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
_DEEPEST = 100  # objects and lists within each other


class CallFault(Exception):
    """What should be a call is none; the message says where and why."""


@dataclass(frozen=True)
class ToolCall:
    """A call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


def read_call(source: str) -> ToolCall:
    """The call in what stands between the two tokens around a call, CALL_QUOTE for the third.

    Keys may have quotes or not; of one that comes twice the last value counts, as JSON's readers
    have it. A number keeps its digits; a word without quotes that is neither
    number, truth value nor null is a text, as vLLM 0.32 takes it. Raises CallFault.
    """
    head = _CALL_HEAD.match(source)
    if head is None:
        raise CallFault("it does not begin with call:NAME{")
    reader = _CallReader(source, head.end())
    arguments = reader.fields_json(1)
    if source[reader.place :].strip(_BLANKS):
        raise CallFault(f"something follows the call at character {reader.place}")
    return ToolCall(head[1], arguments)


class _CallReader:
    """Reads on from `place`, which stands behind what was read."""

    def __init__(self, source: str, place: int) -> None:
        self.source = source
        self.place = place

    def fields_json(self, depth: int) -> str:
        """The object whose bracket was just opened, as JSON."""
        told: dict[str, str] = {}
        while self._more("}", bool(told)):
            key = self._key()
            told[key] = self._value_json(depth)
        return "{" + ",".join(f"{_json_text(key)}:{value}" for key, value in told.items()) + "}"

    def _items_json(self, depth: int) -> str:
        told: list[str] = []
        while self._more("]", bool(told)):
            told.append(self._value_json(depth))
        return "[" + ",".join(told) + "]"

    def _more(self, end: str, begun: bool) -> bool:
        """Whether another entry follows; else `end` is taken."""
        if self._taken(end):
            return False
        if begun and not self._taken(","):
            raise self._fault(f"neither , nor {end}")
        return True

    def _key(self) -> str:
        if self._taken(CALL_QUOTE):
            key = self._quoted()
        else:
            key = self._matched(_BARE).strip(_BLANKS)
            if not key:
                raise self._fault("no key")
        if not self._taken(":"):
            raise self._fault("no : behind a key")
        return key

    def _value_json(self, depth: int) -> str:
        if depth > _DEEPEST:
            raise self._fault(f"more than {_DEEPEST} levels")
        if self._taken(CALL_QUOTE):
            return _json_text(self._quoted())
        if self._taken("{"):
            return self.fields_json(depth + 1)
        if self._taken("["):
            return self._items_json(depth + 1)
        word = self._matched(_BARE_VALUE).strip(_BLANKS)
        if not word:
            raise self._fault("no value")
        if _NUMBER.fullmatch(word):
            return word
        return _WORDS.get(word) or _json_text(word)

    def _quoted(self) -> str:
        """The text up to the quote that closes it."""
        end = self.source.find(CALL_QUOTE, self.place)
        if end < 0:
            raise self._fault("a text that is not closed")
        text, self.place = self.source[self.place : end], end + 1
        return text

    def _taken(self, letter: str) -> bool:
        """Whether `letter` follows behind blanks; then it is taken."""
        place = self.place
        while place < len(self.source) and self.source[place] in _BLANKS:
            place += 1
        if not self.source.startswith(letter, place):
            return False
        self.place = place + 1
        return True

    def _matched(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.source, self.place)
        assert found is not None  # both patterns match nothing, too
        self.place = found.end()
        return found[0]

    def _fault(self, words: str) -> CallFault:
        return CallFault(f"{words} at character {self.place}")


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ── serving / call_texts ──────────────────────────────────────────────────────────────────────────
# The texts that a call may have, as terminals of llguidance's dialect of Lark: JSON Schema's
# lengths, patterns and formats.
#
# Knows no call and no tokenizer.

# Of a string's formats; regular expressions of RFC 3339 and RFC 9562, without calendars.
_CALL_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CALL_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_CALL_FORMATS: Mapping[str, str] = {
    "date": _CALL_DATE,
    "time": _CALL_TIME,
    "date-time": f"{_CALL_DATE}T{_CALL_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]{1,20}:[!#-;=?-\[\]_a-z~]+",
}


class CallGrammarRefused(Exception):
    """A tool's schema says what cannot be kept to; the message names the place and the keyword."""


def call_text(asks: Mapping[str, Any], place: str) -> str:
    """The body of Lark's terminal for the texts that a string's keywords `asks` allow.

    Raises CallGrammarRefused with `place` and the keyword.
    """
    least, most = (call_count(asks, name, place) for name in ("minLength", "maxLength"))
    check_call_bounds(least, most, place)
    parts = [] if least is None and most is None else [f"/(?s:.{call_times(least, most)})/"]
    if "pattern" in asks:
        parts.append(_call_pattern(asks["pattern"], place))
    if "format" in asks:
        if asks["format"] not in _CALL_FORMATS:
            known = ", ".join(_CALL_FORMATS)
            words = f"{place}: format {json.dumps(asks['format'])[:40]} is none of {known}"
            raise CallGrammarRefused(words)
        parts.append(f"/{_CALL_FORMATS[asks['format']]}/")
    return " & ".join(parts) or "/(?s:.*)/"


def call_count(asks: Mapping[str, Any], name: str, place: str) -> int | None:
    """The keyword `name`, a number of letters or items; None: not given. CallGrammarRefused."""
    value = asks.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise CallGrammarRefused(f"{place}: {name} must be a whole number")
    return value


def check_call_bounds(least: int | None, most: int | None, place: str) -> None:
    """Raises CallGrammarRefused where nothing is between both; None is no bound."""
    if most is not None and most < (least or 0):
        raise CallGrammarRefused(f"{place}: at least {least} and at most {most} cannot be")


def call_times(least: int | None, most: int | None) -> str:
    """Lark's and a pattern's "so many times"; None is no bound."""
    return f"{{{least or 0},{'' if most is None else most}}}"


def _call_pattern(pattern: Any, place: str) -> str:
    """Lark's terminal for texts in which `pattern` is found: JSON Schema's patterns are not held to
    the ends of a text unless they say so."""
    from llguidance import regex_to_lark

    if not isinstance(pattern, str):
        raise CallGrammarRefused(f"{place}: pattern must be a text")
    first = pattern.startswith("^")
    last = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[first : len(pattern) - last]
    outer = re.sub(r"\\.|\[(\\.|[^\]])*\]", "", inner)
    while (less := re.sub(r"\([^()]*\)", "", outer)) != outer:
        outer = less
    if (first or last) and "|" in outer:
        raise CallGrammarRefused(f"{place}: pattern {pattern[:60]!r}: put what ^ or $ is for in ()")
    whole = f"{'' if first else '(?s:.*)'}({inner}){'' if last else '(?s:.*)'}"
    return f"/{regex_to_lark(whole, 'dw')}/"


# ── serving / call_grammar ────────────────────────────────────────────────────────────────────────
# The grammar of tool calls in Gemma 4's own syntax, each with arguments as its tool's schema says.
#
#     <|tool_call>call:NAME{days:[1,2],city:<|"|>Oslo<|"|>}<tool_call|>
#
# in llguidance's dialect of Lark, control tokens as such. Knows no tokenizer, no request and no
# HTTP.

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


# ── serving / control_text ────────────────────────────────────────────────────────────────────────
# Texts of others on their way through a chat template: their letters become no control tokens.
#
# Knows no template and no tokenizer but the spelling of its control tokens.


def new_mark() -> str:
    """What control tokens in a conversation's texts are broken by, and the rendered text is cut at.

    Nobody can guess it, so nobody can write it. It is of digits alone, for those pass unchanged
    through whatever a template does to a text: upper case, JSON, sorting.
    """
    return f"{secrets.randbelow(10**40):040}"


class ControlBreaker:
    """Breaks every spelling of a control token in a text behind its first letter, by a mark."""

    def __init__(self, specials: Iterable[str]) -> None:
        self.specials = frozenset(specials)
        self._lengths = sorted({len(special) for special in self.specials})
        firsts = "".join(sorted({special[:1] for special in self.specials}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._begun = {special[:n] for special in self.specials for n in range(1, len(special))}

    def broken(self, value: Any, mark: str) -> Any:
        """`value` as JSON has it, with its texts and its fields' names broken."""
        if isinstance(value, str):
            return self._broken_text(value, mark)
        if isinstance(value, Mapping):
            items = value.items()
            return {self.broken(name, mark): self.broken(held, mark) for name, held in items}
        if isinstance(value, list | tuple):
            return [self.broken(held, mark) for held in value]
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        pieces, begun = [], 0
        for found in self._first.finditer(text):
            place = found.start()
            if any(text[place : place + n] in self.specials for n in self._lengths):
                pieces.append(text[begun : place + 1])
                begun = place + 1
        pieces.append(text[begun:])
        # What it ends with may begin a token that the next text would finish.
        if any(text[-n:] in self._begun for n in range(1, max(self._lengths, default=0))):
            pieces.append("")
        return mark.join(pieces)


# ── serving / http_server ─────────────────────────────────────────────────────────────────────────
# Runs an application on a socket until a signal asks for the end, and lets answers finish.
#
# Knows no endpoint.

_KEEP_ALIVE_S = 65  # longer than clients keep an idle connection, so that they close it first


class _QuietServer(uvicorn.Server):
    """Leaves signals alone: uvicorn's own way ends the process by the signal once it is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One application on one listening socket. drain_s: how long answers may take to finish; those
    that are not over then are cancelled."""

    def __init__(self, app: ASGIApp, listener: socket.socket, drain_s: float) -> None:
        self._listener = listener
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    async def serve(self) -> None:
        """Until `stop` is called, and what was under way is answered or has had its time."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Take no new connection, and end once what is under way is answered."""
        self._server.should_exit = True


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, a name or an address, and `port`, 0 for any. OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family)


@contextlib.contextmanager
def on_end_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """While this lasts, `act` is called in `loop` for each SIGTERM and SIGINT. In the main thread.

    Not by loop.add_signal_handler: its signals come through the socket by which other threads wake
    the loop, and one that finds it full, as behind a few hundred tokens told at once, is lost.
    """

    def asked(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(act)

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ── serving / refusal ─────────────────────────────────────────────────────────────────────────────
# What a request gets that is not carried out: a status and OpenAI's error object.
#
# Knows no endpoint and no field.


class ApiRefusal(Exception):
    """A request that is not carried out, with the HTTP `status` that says whose fault it is.

    `param` names the field, where one is to blame; `code` is a word for programs. `retry_after_s`
    (seconds) goes out as the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read an error from."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid_field(param: str, message: str, code: str = "invalid_value") -> ApiRefusal:
    """A 400 that names the field to blame."""
    return ApiRefusal(400, f"{param}: {message}", param=param, code=code)


# ── serving / http_gate ───────────────────────────────────────────────────────────────────────────
# Who may ask: the API key, and the host name that a request to this computer alone must give.
#
# Knows no endpoint but the one that is open.

OPEN_PATHS = ("/health",)
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class HttpGate:
    """An application behind its checks. An empty key asks for none.

    loopback_only: a page in a browser can make a name of its own lead to this computer, and would
    then be the same origin as this server; so requests must name the host in one of its own ways.
    Where a key is asked for, such a page lacks that, and a proxy may give whatever name it has.
    """

    def __init__(self, app: ASGIApp, api_key: str, loopback_only: bool) -> None:
        self._app = app
        self._key = api_key.encode()
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        await JSONResponse(refusal.body(), refusal.status, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiRefusal | None:
        headers = Headers(scope=scope)
        if not self._key:
            host = headers.get("host", "").lower()
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if self._loopback_only and name not in _LOOPBACK_HOSTS:
                return ApiRefusal(403, "this server answers to localhost alone", code="wrong_host")
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared whole whatever stands in it, so that the time it takes tells nothing.
        same = hmac.compare_digest(key.strip().encode(), self._key)
        if scheme.lower() != "bearer" or not same:
            return ApiRefusal(401, "the API key is missing or wrong", code="invalid_api_key")
        return None


# ── serving / request_messages ────────────────────────────────────────────────────────────────────
# The messages of a chat, read strictly: who said what, which tools were called, what they gave.
#
# Knows no other field of a request, no template and no tokenizer.

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


# ── serving / chat_template ───────────────────────────────────────────────────────────────────────
# A model's own chat template: what it is given, and what it can do.
#
# Knows no tokenizer. The template is a program of somebody else's, and runs in a sandbox.

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


# ── serving / request_tools ───────────────────────────────────────────────────────────────────────
# The tools that a request offers, whether they may or must be called, and the shape of an answer.
#
# Knows no template, no tokenizer and no grammar.

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


# ── serving / slot_engine ─────────────────────────────────────────────────────────────────────────
# The seam between what serves and what computes: an engine with slots, one dispatch at a time.
#
# The scheduler drives it from one thread; it knows no HTTP, no text and no array library.

# How far loading has come: a share from 0 to 1, and what is done right now, for people.
LoadReport = Callable[[float, str], None]
# Which tokens may come next: bit n % 8 of byte n // 8 is set where token n may. Whole words of 32.
TokenMask = bytes
MOST_LOGPROBS = 20  # alternatives of one token, as OpenAI's chat API bounds top_logprobs


class TokenConstraint(Protocol):
    """What the tokens of one answer must be. Whatever it raises breaks off that answer alone."""

    def mask(self) -> TokenMask:
        """Which tokens may come next, at least one; the same until one is taken."""

    def take(self, token: int) -> None:
        """`token` is the next of the answer. Raises where it may not be."""


class EngineFault(Exception):
    """The engine cannot go on; the message says why and is fit for a log."""


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen.

    temperature 0 takes the likeliest token; top_k 0, top_p 1 and min_p 0 are off. The repetition
    penalty (1 is off) looks at prompt and answer, presence and frequency (0 is off) at the answer
    alone, as in vLLM and OpenAI's API. The same seed, prompt and settings give the same tokens in
    any company, and under the same masks. logprobs: how many alternatives are told beside the
    chosen token, -1 for no log probability at all. Log probabilities are those of the model, before
    temperature, penalties and masks.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int = -1


@dataclass(frozen=True)
class StepToken:
    """One token that was chosen; `top` holds the likeliest (token, log probability) in order."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EngineLimits:
    """What an engine was started with: conversations at once, tokens of each, the vocabulary.

    `chunk` is the most prompt tokens that one prefill takes, `steps` the most that one decode does.
    """

    slots: int
    context: int
    vocabulary: int
    chunk: int
    steps: int


class SlotEngine(Protocol):
    """A loaded model that answers up to `limits.slots` conversations at once.

    All calls come from one thread. A slot is free, then begun, then prefilled chunk by chunk until
    the first token comes, then decoded until it is ended. Any slot may be ended at any time.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def load(self, report: LoadReport) -> None:
        """Map and place the weights and compile every shape. Raises EngineFault."""

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        """Give the free `slot` a conversation: at least one token, fewer than limits.context.

        Gives how many of its first tokens the engine has from earlier ones with the same salt, and
        does not read again: fewer than all, 0 where it keeps nothing.
        """

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        """Take the prompt's next chunk; the first token of the answer once the prompt is whole.

        Where that comes it is one that `mask` allows.
        """

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        """Up to `steps` further tokens for each of `slots`, at least one; all are prefilled.

        A slot whose conversation has reached limits.context tokens gets none. What comes after a
        stop is the caller's to drop. `masks`, by slot, hold for the first token, so that with any
        of them there is one token for each, whatever `steps` says.
        """

    def end(self, slot: int) -> None:
        """Free the slot; whatever it held can be overwritten."""

    def counters(self) -> Mapping[str, float]:
        """Figures for the metrics page: compiled_shapes, compiles_after_start, kv_bytes and more.

        What only ever grows ends in _total.
        """


# ── serving / replicated_engine ───────────────────────────────────────────────────────────────────
# Several engines of one model as one: conversations are spread over them, and all decode at once.
#
# Knows no array library and no devices: each replica is an engine of its own, with its own slots.

ReplicaResult = TypeVar("ReplicaResult")

# Counted in the whole process: what the others compile after one was loaded is no late compiling.
_OF_THE_LAST_LOADED = "compiles_after_start"


class ReplicatedEngine:
    """A SlotEngine of `replicas` with equal limits: slot s is slot s // n of replica s % n.

    So the lowest slots, which are given away first, are one of each. Prompts are read one after
    the other, as they are asked for; a decode runs at once in all replicas that have a part in it.
    Every replica has a thread of its own, which alone calls it.
    """

    def __init__(self, replicas: Sequence[SlotEngine]) -> None:
        self._replicas = tuple(replicas)
        self._threads = [ThreadPoolExecutor(1, "replica") for _ in self._replicas]

    @property
    def limits(self) -> EngineLimits:
        one = self._replicas[0].limits
        return replace(one, slots=one.slots * len(self._replicas))

    def load(self, report: LoadReport) -> None:
        """Load the first replica, whose weights the others may copy, then all of these at once."""
        count = len(self._replicas)
        shares = [0.0] * count
        telling = threading.Lock()

        def load_one(number: int) -> None:
            def told(share: float, doing: str) -> None:
                with telling:
                    shares[number] = share
                    report(sum(shares) / count, f"{doing} (copy {number + 1} of {count})")

            self._replicas[number].load(told)

        for numbers in ((0,), range(1, count)):
            _replica_results([self._threads[n].submit(load_one, n) for n in numbers])

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        replica, its_slot = self._place(slot)
        begin = self._replicas[replica].begin
        return self._asked(replica, begin, its_slot, prompt, sampling, cache_salt)

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        replica, its_slot = self._place(slot)
        return self._asked(replica, self._replicas[replica].prefill, its_slot, mask)

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        masks = masks or {}
        steps = 1 if masks else steps
        parts: dict[int, list[int]] = {}
        parts_masks: dict[int, dict[int, TokenMask]] = {}
        for slot in slots:
            replica, its_slot = self._place(slot)
            parts.setdefault(replica, []).append(its_slot)
            if slot in masks:
                parts_masks.setdefault(replica, {})[its_slot] = masks[slot]
        under_way = [
            self._threads[replica].submit(
                self._replicas[replica].decode, its_slots, steps, parts_masks.get(replica)
            )
            for replica, its_slots in parts.items()
        ]
        return {
            its_slot * len(self._replicas) + replica: tokens
            for replica, answers in zip(parts, _replica_results(under_way), strict=True)
            for its_slot, tokens in answers.items()
        }

    def end(self, slot: int) -> None:
        replica, its_slot = self._place(slot)
        self._asked(replica, self._replicas[replica].end, its_slot)

    def counters(self) -> Mapping[str, float]:
        """The replicas' counters, added up."""
        each = [self._asked(n, one.counters) for n, one in enumerate(self._replicas)]
        return {
            name: (min if name == _OF_THE_LAST_LOADED else sum)(told[name] for told in each)
            for name in each[0]
        }

    def _place(self, slot: int) -> tuple[int, int]:
        """The replica of `slot`, and which of its own slots that is."""
        its_slot, replica = divmod(slot, len(self._replicas))
        return replica, its_slot

    def _asked(
        self, replica: int, call: Callable[..., ReplicaResult], *arguments: object
    ) -> ReplicaResult:
        """What a call of that replica, in its own thread, returns or raises."""
        return self._threads[replica].submit(call, *arguments).result()


def _replica_results(under_way: Sequence[Future[ReplicaResult]]) -> list[ReplicaResult]:
    """What all of them returned, once all have ended; raises what the first that failed raised."""
    wait(under_way)
    return [one.result() for one in under_way]


# ── serving / requests ────────────────────────────────────────────────────────────────────────────
# The bodies of /v1/chat/completions and /v1/completions, read strictly into what is to be done.
#
# Every field of OpenAI's API and of vLLM's is honoured or refused by name: none is passed over in
# silence. Knows no tokenizer, no engine and no HTTP.

# vLLM takes smaller temperatures for greedy too: a division by them overflows.
_GREEDY_BELOW = 1e-5
_COMPLETION_TOKENS = 16  # of OpenAI's API, where a text completion names no limit
_MOST_STOPS, _STOP_CHARACTERS = 16, 1_000

# Fields that this server does not carry out, each with the values at which they ask for nothing.
# What the one endpoint carries out, the other may still take where it asks for nothing.
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
}

_Unit = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_TRIED_TYPES = ("str", "list[str]", "bool", "int", "float")
_Scalar = bool | int | float | str
_Body = TypeVar("_Body", bound=BaseModel)
_Value = TypeVar("_Value")


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _SharedBody(BaseModel):
    """What both endpoints take. None: not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: _Count | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: _Unit | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[_Token] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    cache_salt: str = Field(default="", min_length=1, max_length=1_000)
    user: str | None = None  # who asks, for the caller's own books: it changes nothing
    response_format: Any = None
    structured_outputs: Any = None


class _ChatBody(_SharedBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, _Scalar | None] = {}
    tools: Any = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True


class _CompletionBody(_SharedBody):
    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that does not say: OpenAI's defaults, or those of the model's makers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class GenerationOrder:
    """What is to be generated, whatever the endpoint. max_tokens None: as many as there is room.

    `seeded` false: the caller gave no seed, and one is to be drawn. `stops` end the answer before
    themselves, `stop_ids` are tokens that end it. `tokens_as_ids` tells tokens as "token_id:N".
    `shape` is what the answer must be, as its `place` in the request says. `thinking`: the model
    may think first, and the shape holds for what comes after that.
    Kept prefixes are shared with requests of the same `cache_salt` alone.
    """

    model: str
    max_tokens: int | None
    sampling: Sampling
    seeded: bool
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    tokens_as_ids: bool
    shape: ShapeOrder | None = None
    thinking: bool = False
    cache_salt: str = ""


@dataclass(frozen=True)
class ChatOrder:
    """A conversation to answer. `tools` are those that the model is told of, `calls` how many its
    answer may have. `tells_thought` false: the model's thought is left out of the answer."""

    generation: GenerationOrder
    messages: tuple[ChatMessage, ...]
    template_flags: Mapping[str, _Scalar | None]
    tools: tuple[ToolSpec, ...] = ()
    calls: CallsWanted = "none"
    tells_thought: bool = True


@dataclass(frozen=True)
class CompletionOrder:
    """A text to continue, or the tokens of one."""

    generation: GenerationOrder
    prompt: str | tuple[int, ...]


def read_chat_order(data: bytes, defaults: SamplingDefaults) -> ChatOrder:
    """The body of a chat completion. Raises ApiRefusal 400 with the field's name."""
    body = _checked_body(_ChatBody, data)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        if body.max_tokens != body.max_completion_tokens:
            raise invalid_field("max_tokens", "differs from max_completion_tokens: give one")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    if body.logprobs and not body.include_reasoning:
        raise invalid_field(
            "include_reasoning", "must be true with logprobs, which tell the tokens"
        )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = read_tool_order(body.tools, body.tool_choice, body.parallel_tool_calls)
    flags = _template_flags(body)
    generation = _generation(body, limit, logprobs, defaults, tools)
    return ChatOrder(
        generation=replace(generation, thinking=flags.get("enable_thinking") is True),
        messages=read_messages(body.messages),
        template_flags=flags,
        tools=tools.tools,
        calls=tools.calls,
        tells_thought=body.include_reasoning,
    )


def _template_flags(body: _ChatBody) -> dict[str, _Scalar | None]:
    """chat_template_kwargs, and what reasoning_effort says of thinking.

    Gemma 4 has one switch and no grades: "none" is off and all else is on, as in vLLM 0.32.
    """
    flags = dict(body.chat_template_kwargs)
    switch = flags.get("enable_thinking", False)
    if not isinstance(switch, bool):
        raise invalid_field("chat_template_kwargs.enable_thinking", "must be true or false")
    if body.reasoning_effort is not None:
        wanted = body.reasoning_effort != "none"
        if flags.get("enable_thinking", wanted) != wanted:
            words = "says the opposite of chat_template_kwargs.enable_thinking"
            raise invalid_field("reasoning_effort", words)
        flags["enable_thinking"] = wanted
    return flags


def read_completion_order(data: bytes, defaults: SamplingDefaults) -> CompletionOrder:
    """The body of a text completion. Raises ApiRefusal 400 with the field's name."""
    body = _checked_body(_CompletionBody, data)
    logprobs = -1 if body.logprobs is None else body.logprobs
    limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return CompletionOrder(
        generation=_generation(body, limit, logprobs, defaults), prompt=_prompt(body.prompt)
    )


def _checked_body(model: type[_Body], data: bytes) -> _Body:
    """`data` as one of the bodies above, without the fields that ask for nothing."""
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiRefusal(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiRefusal(400, "the body is not a JSON object", code="invalid_json")
    # A null is what OpenAI's client sends for what its user left out.
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, harmless in _ASKS_NOTHING.items():
        if name in fields and name not in model.model_fields:
            if not any(_same(fields[name], value) for value in harmless):
                raise invalid_field(name, "is not supported by this server", "unsupported")
            del fields[name]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _field_refusal(error) from None


def _same(value: Any, other: Any) -> bool:
    """Equal, and not only because Python holds True and 1 for equal."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _field_refusal(error: ValidationError) -> ApiRefusal:
    """The first fault that pydantic found, with the field's place in the body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Behind a field with several types stands the type that was tried: that is no place.
    place = [part for part in first["loc"] if part not in _TRIED_TYPES]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        return invalid_field(param, "is not supported by this server", "unsupported")
    if first["type"] == "missing":
        return invalid_field(param, "is missing", "missing")
    return invalid_field(param, first["msg"][:1].lower() + first["msg"][1:])


def _generation(
    body: _SharedBody,
    limit: int | None,
    logprobs: int,
    defaults: SamplingDefaults,
    tools: ToolOrder | None = None,
) -> GenerationOrder:
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "needs stream: true")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MOST_STOPS:
        raise invalid_field("stop", f"has more than {_MOST_STOPS} texts")
    if any(not 0 < len(stop) <= _STOP_CHARACTERS for stop in stops):
        raise invalid_field("stop", f"each text has 1 to {_STOP_CHARACTERS} characters")
    temperature = _given(body.temperature, defaults.temperature)
    return GenerationOrder(
        model=body.model,
        max_tokens=limit,
        sampling=Sampling(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=max(0, _given(body.top_k, defaults.top_k)),
            top_p=_given(body.top_p, defaults.top_p),
            min_p=_given(body.min_p, defaults.min_p),
            repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=body.seed or 0,
            logprobs=logprobs,
        ),
        seeded=body.seed is not None,
        stops=tuple(dict.fromkeys(stops)),
        stop_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tokens_as_ids=body.return_tokens_as_token_ids,
        shape=read_shape_order(body.response_format, body.structured_outputs, tools or ToolOrder()),
        cache_salt=body.cache_salt,
    )


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """A text, a list of token ids, or a list with one of these in it."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise invalid_field("prompt", "must be a text or a list of token ids")
    if any(isinstance(item, (str, list)) for item in prompt):
        raise invalid_field("prompt", "several prompts in one request are not supported")
    for item in prompt:
        if type(item) is not int or not 0 <= item < 2**31:
            raise invalid_field("prompt", "must be a text or a list of token ids")
    return tuple(prompt)


# ── serving / scheduler_job ───────────────────────────────────────────────────────────────────────
# What a scheduler takes and tells: a job and its place, why one is not taken, what is going on.
#
# Knows no engine's work, no text and no HTTP.

SchedulerPhase = Literal["loading", "serving", "draining", "closed", "failed"]


class SchedulerJob(Protocol):
    """One conversation. Its methods are called by the scheduler's thread alone.

    `prompt` has at least one token; with `limit`, the most tokens that may be answered, it fits the
    engine's context. `take` that says True, `fail` and `cancelled` are the last call.
    """

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def limit(self) -> int: ...

    @property
    def constraint(self) -> TokenConstraint | None: ...

    @property
    def cache_salt(self) -> str: ...

    def seated(self, held: int) -> None:
        """A slot was found, and the prompt is read from now on, but for its first `held` tokens."""

    def take(self, tokens: Sequence[StepToken]) -> bool:
        """The answer goes on by `tokens`. True: it is over, and the slot can be given away."""

    def fail(self, words: str) -> None:
        """The answer breaks off; `words` say why."""

    def cancelled(self) -> None:
        """Its ticket was cancelled, and it holds nothing any more."""


class QueueFull(Exception):
    """As many conversations wait as may wait. `retry_after_s`: about when a place will be free."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotServing(Exception):
    """The engine is not there yet, or no longer; the message says what it does instead."""


class Ticket:
    """A job's place: in the queue, then in a slot, then nowhere. For its scheduler's eyes alone."""

    def __init__(self, job: SchedulerJob) -> None:
        self.job = job
        self.slot = -1
        self.read = 0  # tokens of the prompt
        self.prefilled = False
        self.produced = 0  # tokens of the answer
        self.cancelled = False
        self.seated_at = 0.0


@dataclass(frozen=True)
class SchedulerView:
    """What is going on now. `kv_used_share`: of all the tokens that the slots could hold.

    `constrained` counts the conversations with a constraint that got a slot so far; `mask_s` is how
    long their masks took.
    """

    phase: SchedulerPhase
    progress: float
    doing: str
    running: int
    waiting: int
    kv_used_share: float
    counters: Mapping[str, float]
    constrained: int = 0
    mask_s: float = 0.0


# ── serving / scheduler ───────────────────────────────────────────────────────────────────────────
# Continuous batching: one thread drives the engine, and every conversation gets its turn.
#
# Knows no text, no HTTP and no array library: a job says what it wants and takes tokens.

_NEWEST_WEIGHT = 0.1  # of the conversation that ended last, in the mean length of one
_COUNTERS_EVERY_S = 1.0
_STOPPING = "the server is stopping"


class Scheduler:
    """Hands slots out in the order of arrival and keeps all of them busy.

    Each turn reads a chunk's worth of prompts, the oldest first, and decodes once for all that are
    read, so that a long prompt cannot hold up the others' answers, nor they it; short ones share a
    turn. While one that has a constraint answers, a dispatch gives one token of each, for the next
    mask follows from it: that costs every token 0.3 to 0.7 ms more (4 rows on 2 busy cores of an
    AMD EPYC, Zen 4), whatever the model's size. `queue` is how many conversations may wait beyond
    those that have a slot. Every public method may be called from any thread.
    """

    def __init__(
        self, engine: SlotEngine, queue: int, report: LoadReport = lambda share, doing: None
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._report = report
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards all that follows
        self._phase: SchedulerPhase = "loading"
        self._progress, self._doing = 0.0, "starting"
        self._limits: EngineLimits | None = None
        self._counters: Mapping[str, float] = {}
        self._waiting: deque[Ticket] = deque()
        self._withdrawn: list[Ticket] = []  # cancelled in the queue, and not told yet
        self._seats: list[Ticket] = []  # in the order of their seating
        self._free: list[int] = []
        self._aborting = False
        self._seconds_each = 1.0  # how long a conversation holds its slot, about
        self._counted_at = 0.0
        self._constrained = 0
        self._mask_s = 0.0

    def start(self) -> None:
        """Load the engine and serve, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        """The engine's limits. Raises NotServing before it is loaded."""
        with self._wake:
            if self._limits is None:
                raise NotServing(self._said())
            return self._limits

    def submit(self, job: SchedulerJob) -> Ticket:
        """Queue `job`. Raises QueueFull, or NotServing while loading and after the end."""
        with self._wake:
            if self._phase != "serving" or self._limits is None:
                raise NotServing(self._said())
            slots = self._limits.slots
            if len(self._waiting) + len(self._seats) >= slots + self._queue:
                until_free = self._seconds_each * (len(self._waiting) + 1) / slots
                raise QueueFull(max(1, min(60, round(until_free))))
            ticket = Ticket(job)
            self._waiting.append(ticket)
            self._wake.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more: its slot is freed before the next dispatch."""
        with self._wake:
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._withdrawn.append(ticket)
            self._wake.notify_all()

    def drain(self) -> None:
        """Take no new job; what is under way or waits is still answered."""
        with self._wake:
            if self._phase in ("loading", "serving"):
                self._phase = "draining"
            self._wake.notify_all()

    def abort(self) -> None:
        """Drain, but break off what is under way and what waits, before the next dispatch."""
        self.drain()
        with self._wake:
            self._aborting = True
            self._wake.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Abort, and whether the thread has ended within `timeout_s`: loading and a dispatch cannot
        be broken off."""
        self.abort()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float) -> bool:
        """Drain, and whether all was answered and the thread has ended within `timeout_s`."""
        self.drain()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def view(self) -> SchedulerView:
        """What is going on, for the pages of health and metrics."""
        with self._wake:
            room = self._limits.slots * self._limits.context if self._limits else 0
            held = sum(len(seat.job.prompt) + seat.produced for seat in self._seats)
            return SchedulerView(
                phase=self._phase,
                progress=self._progress,
                doing=self._said(),
                running=len(self._seats),
                waiting=len(self._waiting),
                kv_used_share=held / room if room else 0.0,
                counters=self._counters,
                constrained=self._constrained,
                mask_s=self._mask_s,
            )

    def _said(self) -> str:
        if self._phase == "loading":
            return f"the model is being loaded, {self._progress:.0%}: {self._doing}"
        if self._phase == "failed":
            return f"the engine has failed: {self._doing}"
        return {"draining": _STOPPING, "closed": "the server has stopped"}.get(self._phase, "ready")

    def _run(self) -> None:
        """The thread: load, then turn after turn until there is nothing left to do."""
        try:
            self._engine.load(self._loading)
            with self._wake:
                self._limits = self._engine.limits
                self._free = list(range(self._limits.slots))
                self._progress, self._doing = 1.0, "loaded"
                if self._phase == "loading":
                    self._phase = "serving"
            while self._has_work():
                self._turn()
            for seat in self._seats:  # those that are broken off
                self._engine.end(seat.slot)
        except EngineFault as fault:
            self._end_all("failed", str(fault))
        except Exception as error:
            self._end_all("failed", f"{type(error).__name__}: {error}")
            raise  # no foreseen fault: the trace belongs into the log
        else:
            self._end_all("closed", "")

    def _loading(self, share: float, doing: str) -> None:
        with self._wake:
            self._progress, self._doing = share, doing
        self._report(share, doing)

    def _end_all(self, phase: SchedulerPhase, why: str) -> None:
        with self._wake:
            self._phase, self._doing = phase, why
            left = [*self._withdrawn, *self._waiting, *self._seats]
            self._withdrawn.clear()
            self._waiting.clear()
            self._seats.clear()
            words = self._said() if phase == "failed" else _STOPPING
        for ticket in left:
            _tell_end(ticket, words)

    def _has_work(self) -> bool:
        """Wait for something to do; False when draining has come to its end."""
        with self._wake:
            while not self._aborting:
                if self._waiting or self._seats or self._withdrawn:
                    return True
                self._count()
                if self._phase == "draining":
                    return False
                self._wake.wait()
        return False

    def _count(self) -> None:
        """Keep the engine's counters for whoever asks: the engine itself is this thread's alone."""
        self._counters = dict(self._engine.counters())
        self._counted_at = time.monotonic()

    def _turn(self) -> None:
        """Free, fill, read, decode once."""
        with self._wake:
            gone, self._withdrawn = self._withdrawn, []
        for seat in [seat for seat in self._seats if seat.cancelled]:
            self._leave(seat)
            gone.append(seat)
        for ticket in gone:
            _tell_end(ticket, "")
        self._fill()
        self._read()
        masks = self._masks([seat for seat in self._seats if seat.prefilled])
        read = [seat for seat in self._seats if seat.prefilled]
        if read:
            steps = 1 if masks else self._steps(read)
            answers = self._engine.decode([seat.slot for seat in read], steps, masks)
            for seat in read:
                self._give(seat, answers.get(seat.slot, ()))
        if time.monotonic() - self._counted_at > _COUNTERS_EVERY_S:
            self._count()

    def _read(self) -> None:
        """Read the next pieces of prompts, one chunk's worth of tokens in all."""
        room = chunk = self._engine.limits.chunk
        for seat in [seat for seat in self._seats if not seat.prefilled]:
            piece = min(chunk, len(seat.job.prompt) - seat.read)
            if piece > room:
                return  # the first always fits
            room -= piece
            masks = self._masks([seat])
            if seat not in self._seats:
                continue
            seat.read += piece
            first = self._engine.prefill(seat.slot, masks.get(seat.slot))
            if first is not None:
                seat.prefilled = True
                self._give(seat, [first])

    def _masks(self, seats: Sequence[Ticket]) -> dict[int, TokenMask]:
        """What may come next, by slot, for those that have a constraint. One whose constraint
        fails is broken off."""
        masks = {}
        for seat in seats:
            if seat.job.constraint is None:
                continue
            begun = time.monotonic()
            try:
                masks[seat.slot] = seat.job.constraint.mask()
            except Exception as error:
                self._break_off(seat, error)
            self._mask_s += time.monotonic() - begun
        return masks

    def _steps(self, read: Sequence[Ticket]) -> int:
        """How many tokens to decode: one while a prompt is being read, whose first token is waited
        for; else no more than anybody needs, and where others wait for a slot, no more than the one
        needs that will free the next."""
        if len(read) < len(self._seats):
            return 1
        left = [seat.job.limit - seat.produced for seat in read]
        wanted = min(left) if self._waiting else max(left)
        return min(self._engine.limits.steps, wanted)

    def _fill(self) -> None:
        """Seat those that wait, first come, first served."""
        while self._free:
            with self._wake:
                if not self._waiting:
                    return
                seat = self._waiting.popleft()
                seat.slot = self._free.pop(0)
                self._seats.append(seat)
            seat.seated_at = time.monotonic()
            try:
                job = seat.job
                seat.read = self._engine.begin(seat.slot, job.prompt, job.sampling, job.cache_salt)
                job.seated(seat.read)
                self._constrained += job.constraint is not None
            except EngineFault:
                raise
            except Exception as error:
                self._break_off(seat, error)

    def _give(self, seat: Ticket, tokens: Sequence[StepToken]) -> None:
        """Hand over the tokens that the job may have, and free its slot when it is over."""
        tokens = tokens[: seat.job.limit - seat.produced]
        seat.produced += len(tokens)
        try:
            if not tokens:
                raise RuntimeError("the engine gave no token")
            if seat.job.constraint is not None:
                for step in tokens:
                    seat.job.constraint.take(step.token)
            over = seat.job.take(tokens)
        except Exception as error:
            self._break_off(seat, error)
            return
        if over or seat.produced >= seat.job.limit:
            took = time.monotonic() - seat.seated_at
            self._seconds_each += _NEWEST_WEIGHT * (took - self._seconds_each)
            self._leave(seat)

    def _break_off(self, seat: Ticket, error: Exception) -> None:
        """What one job's own fault ends is that job alone."""
        self._leave(seat)
        _tell_end(seat, f"{type(error).__name__}: {error}")

    def _leave(self, seat: Ticket) -> None:
        with self._wake:
            self._seats.remove(seat)
        self._engine.end(seat.slot)
        self._free.append(seat.slot)
        self._free.sort()  # low slots first: an engine may need less for few of them


def _tell_end(ticket: Ticket, words: str) -> None:
    """Say why a job ends that has no end of its own; one that cannot even take that harms none."""
    with contextlib.suppress(Exception):
        if ticket.cancelled:
            ticket.job.cancelled()
        else:
            ticket.job.fail(words)


# ── serving / serving_metrics ─────────────────────────────────────────────────────────────────────
# Figures for /metrics, in the text form of Prometheus and under names in the style of vLLM's.
#
# Knows no request: whoever serves tells what happened. A registry of its own, so that two servers
# in
# one process do not share figures.

RequestEnd = Literal["stop", "length", "abort", "error"]
_REQUEST_ENDS: tuple[RequestEnd, ...] = ("stop", "length", "abort", "error")
# Seconds: a token of a fast accelerator at one end, a long answer of a slow processor at the other.
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class ServingMetrics:
    """What happened so far, and through `view` what is going on. Any thread may tell."""

    def __init__(self, view: Callable[[], SchedulerView]) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_NowCollector(view))
        self._prompt = _counter(registry, "engine_prompt_tokens", "Tokens of prompts read.")
        self._generated = _counter(registry, "engine_generation_tokens", "Tokens generated.")
        self._ended = Counter(
            "engine_request_success",
            "Requests by what ended them.",
            ["finished_reason"],
            registry=registry,
        )
        for end in _REQUEST_ENDS:
            self._ended.labels(end)  # a figure that is 0 is there
        self._refused = Counter(
            "engine_requests_refused", "Requests refused, by status.", ["status"], registry=registry
        )
        self._calls = Counter(
            "engine_tool_calls",
            "Calls of tools in answers; a broken one was none in its syntax, or was cut off.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("made", "broken"):
            self._calls.labels(outcome)
        self._queue = _histogram(
            registry, "engine_request_queue_time_seconds", "Wait for a slot.", _WAIT_BUCKETS
        )
        self._ttft = _histogram(
            registry, "engine_time_to_first_token_seconds", "Time to first token.", _WAIT_BUCKETS
        )
        self._tpot = _histogram(
            registry,
            "engine_request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _TOKEN_BUCKETS,
        )
        self._e2e = _histogram(
            registry, "engine_e2e_request_latency_seconds", "Time to last token.", _WAIT_BUCKETS
        )

    def queued(self, seconds: float) -> None:
        """A request has got its slot after `seconds` in the queue."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """A prompt is read and the first token there, `seconds` after the request came."""
        self._prompt.inc(prompt_tokens)
        self._ttft.observe(seconds)

    def tokens(self, count: int) -> None:
        """`count` tokens were generated."""
        self._generated.inc(count)

    def calls(self, made: int, broken: int) -> None:
        """Calls of tools were read from an answer, or should have been and could not."""
        self._calls.labels("made").inc(made)
        self._calls.labels("broken").inc(broken)

    def answered(self, seconds: float, after_first_s: float, tokens: int) -> None:
        """An answer of `tokens` was complete `seconds` after its request came."""
        self._e2e.observe(seconds)
        if tokens > 1:
            self._tpot.observe(after_first_s / (tokens - 1))

    def ended(self, how: RequestEnd) -> None:
        """A request that was taken is over."""
        self._ended.labels(how).inc()

    def refused(self, status: int) -> None:
        """A request was not taken."""
        self._refused.labels(str(status)).inc()

    def page(self) -> bytes:
        """All of it in the text format 0.0.4."""
        return generate_latest(self._registry)


def _counter(registry: CollectorRegistry, name: str, words: str) -> Counter:
    return Counter(name, words, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, words: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(name, words, buckets=buckets, registry=registry)


class _NowCollector:
    """What is read at the moment of asking."""

    def __init__(self, view: Callable[[], SchedulerView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        now = self._view()
        figures = {
            "num_requests_running": (now.running, "Requests that hold a slot."),
            "num_requests_waiting": (now.waiting, "Requests that wait for a slot."),
            "kv_cache_usage_perc": (
                now.kv_used_share,
                "Tokens held of those there is room for, 0 to 1.",
            ),
            **{name: (value, "Of the engine itself.") for name, value in now.counters.items()},
        }
        for name, (value, words) in figures.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"engine_{name}", words, value=value)
        yield CounterMetricFamily(
            "engine_requests_constrained",
            "Requests with a shape to keep to that got a slot.",
            value=now.constrained,
        )
        yield CounterMetricFamily(
            "engine_mask_seconds", "Time spent on which tokens may come next.", value=now.mask_s
        )


# ── serving / token_text ──────────────────────────────────────────────────────────────────────────
# The bytes that each token stands for, and how a stream of tokens becomes text.
#
# Knows no request and no engine. A text is given out only once it can no longer change.

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """The bytes of every token of a vocabulary, by id; None for a token that is no text."""

    pieces: Sequence[bytes | None]
    names: Mapping[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, control: Collection[str] = ()) -> TokenText:
        """From a tokenizer whose decoder replaces letters and falls back to bytes, as Gemma's do.

        `control` are tokens that are no text even where the tokenizer does not call them special.
        tokenizers' own decoder is not asked: it decodes a run of byte tokens as one, so that a
        broken byte changes the text of those before it, which are out already. ValueError for a
        decoder of another kind.
        """
        replaced = _replacements(json.loads(tokenizer.to_str())["decoder"])
        added = tokenizer.get_added_tokens_decoder()
        names = {
            number: token.content
            for number, token in added.items()
            if token.special or token.content in control
        }
        words = tokenizer.get_vocab()
        pieces: list[bytes | None] = [None] * (max(words.values(), default=-1) + 1)
        for word, token in words.items():
            if token in names:
                continue
            byte = _BYTE_TOKEN.fullmatch(word)
            if byte is None:
                for old, new in replaced:
                    word = word.replace(old, new)
            pieces[token] = word.encode() if byte is None else bytes([int(byte[1], 16)])
        return cls(pieces, names)

    def piece(self, token: int) -> bytes | None:
        """The bytes of `token`; None for a control token and for one that the vocabulary lacks."""
        return self.pieces[token] if token < len(self.pieces) else None

    def name(self, token: int) -> str:
        """`token` for people: its text, half a character as U+FFFD, a control token's own name."""
        piece = self.piece(token)
        return self.names.get(token, "") if piece is None else piece.decode("utf-8", "replace")


def _replacements(decoder: Any) -> list[tuple[str, str]]:
    """What the decoder puts in place of what."""
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    parts = decoder.get("decoders", []) if kind == "Sequence" else [decoder]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if "ByteFallback" not in kinds or set(kinds) - {"Replace", "ByteFallback", "Fuse"}:
        named = ", ".join(str(kind) for kind in kinds)
        raise ValueError(f"a decoder of Replace, ByteFallback and Fuse is needed, this has {named}")
    rules = [part for part in parts if part.get("type") == "Replace"]
    if any(not isinstance(rule["pattern"].get("String"), str) for rule in rules):
        raise ValueError("a decoder that replaces by a pattern is not supported")
    return [(rule["pattern"]["String"], rule["content"]) for rule in rules]


class TextStream:
    """The text of one answer as its tokens come, up to the first stop text.

    What might still become a stop text, and the bytes of half a character, are held back. Of stop
    texts it is the first to be complete that ends the answer; of those complete with the same
    character, the longest. So the text does not depend on how the tokens were cut.
    """

    def __init__(self, token_text: TokenText, stops: Sequence[str] = ()) -> None:
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._held = ""
        self.stopped_by: str | None = None
        self.characters = 0  # decoded so far, those held back or cut off included

    def take(self, token: int) -> str:
        """The text that `token` makes certain, which may be none."""
        piece = self._token_text.piece(token)
        return "" if piece is None else self._release(self._decoder.decode(piece))

    def take_text(self, text: str) -> str:
        """The same of a text from elsewhere. Half a character before it is one U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True) + text)

    def finish(self) -> str:
        """The rest, when no token follows. Half a character at the end is one U+FFFD."""
        rest = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by is not None:
            return rest
        rest += self._held
        self._held = ""
        return rest

    def _release(self, text: str) -> str:
        """`text` behind what is held back: the part of both that nothing can change any more."""
        if self.stopped_by is not None:
            return ""
        self.characters += len(text)
        if not self._stops:
            return text
        held, waiting = self._held + text, len(self._held)
        # Up to here no stop text was complete, so one that is now ends within `text`.
        for end in range(waiting + 1, len(held) + 1):
            for stop in self._stops:
                if held.endswith(stop, 0, end):
                    self.stopped_by, self._held = stop, ""
                    return held[: end - len(stop)]
        keep = next((n for n in range(len(held)) if self._may_begin_a_stop(held[n:])), len(held))
        self._held = held[keep:]
        return held[:keep]

    def _may_begin_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


# ── serving / answer_parser ───────────────────────────────────────────────────────────────────────
# An answer's tokens taken apart as they come: what is said, what is thought, what is called.
#
# Gemma 4 marks thoughts and calls by tokens of their own, and only those tokens count: letters that
# spell one are text. Knows no request and no form of an answer.

# Ids and spelling: the tokenizer in llama.cpp's ggml-vocab-gemma-4.gguf (b11434, 2026-11-29).
_CALL_OPEN, _CALL_CLOSE, _CALL_QUOTES = "<|tool_call>", "<tool_call|>", '<|"|>'
_THOUGHT_OPEN, _THOUGHT_CLOSE = "<|channel>", "<channel|>"
# No text, whatever a tokenizer's file says of them: one made of llama.cpp's vocabulary says text.
MARK_WORDS = frozenset(
    (_CALL_OPEN, _CALL_CLOSE, _CALL_QUOTES, _THOUGHT_OPEN, _THOUGHT_CLOSE)
    + ("<|tool_response>", "<tool_response|>")
)
_THOUGHT_LABEL = "thought\n"  # the name of the channel, which the model writes first


@dataclass(frozen=True)
class AnswerMarks:
    """The tokens that mark thoughts and calls; None is one that the model's tokenizer lacks."""

    call_open: int | None = None
    call_close: int | None = None
    call_quote: int | None = None
    thought_open: int | None = None
    thought_close: int | None = None
    turn_open: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerMarks:
        return cls(
            call_open=tokenizer.token_to_id(_CALL_OPEN),
            call_close=tokenizer.token_to_id(_CALL_CLOSE),
            call_quote=tokenizer.token_to_id(_CALL_QUOTES),
            thought_open=tokenizer.token_to_id(_THOUGHT_OPEN),
            thought_close=tokenizer.token_to_id(_THOUGHT_CLOSE),
            turn_open=tokenizer.token_to_id("<|turn>"),
        )

    def opened_thought(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens behind the opening of the thought in which `prompt` ends; None: in none."""
        for place in range(len(prompt) - 1, -1, -1):
            if prompt[place] == self.thought_open:
                return tuple(prompt[place + 1 :])
            if prompt[place] in (self.thought_close, self.turn_open):
                return None
        return None


@dataclass(frozen=True)
class AnswerParts:
    """What is new of an answer. `broken` counts calls that were none: they stand in `content`."""

    content: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: int = 0


class AnswerParser:
    """Takes one answer apart, token by token; however its tokens are cut into pieces, the joined
    parts are the same.

    `calls`: none, and the marks of calls are control tokens like others, which no text shows; one,
    and the answer is over with it; or many. A call goes out when it is whole: what was meant as one
    and is none becomes content to the letter, its marks spelt out. Stop texts look at content
    alone. `thought_begun` are the tokens of a thought that the prompt has begun.
    """

    def __init__(
        self,
        token_text: TokenText,
        stops: Sequence[str] = (),
        marks: AnswerMarks | None = None,
        *,
        calls: CallsWanted = "none",
        thought_begun: Sequence[int] | None = None,
    ) -> None:
        self._pieces = token_text
        self._marks = marks or AnswerMarks()
        self._calls_wanted = calls
        self._content = TextStream(token_text, stops)
        self._inner = TextStream(token_text)  # of the thought or the call that is open
        self._state: Literal["content", "thought", "call"] = "content"
        self._source = ""  # of the call
        self._label: str | None = None  # of the thought: what has come of it; None: it is done
        self._said: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._broken = 0
        self.thought_tokens = 0  # the two marks are not counted
        self.calls_made = 0
        if thought_begun is not None:
            self._open_thought()
            for token in thought_begun:
                self._tell_thought(self._inner.take(token))
            self._thoughts.clear()

    @property
    def over(self) -> bool:
        """Whether a stop text or the one call that was wanted ends the answer."""
        done = self._calls_wanted == "one" and self.calls_made > 0
        return done or self._content.stopped_by is not None

    @property
    def characters(self) -> int:
        """Of the content so far, those that are held back included."""
        return self._content.characters

    def take(self, token: int) -> None:
        """The next token of the answer."""
        marks = self._marks
        if self._state == "call" and token == marks.call_quote:
            self._source += self._inner.finish() + CALL_QUOTE
        elif self._state == "call" and token == marks.call_close:
            self._close(_CALL_CLOSE)
        elif token == marks.call_open and self._calls_wanted != "none":
            self._close()
            if not self.over:
                self._state, self._source = "call", ""
        elif token == marks.thought_open:
            self._close()
            self._open_thought()
        elif token == marks.thought_close or (
            self._state == "call" and self._pieces.piece(token) is None
        ):
            self._close()
        elif self._state == "call":
            self._source += self._inner.take(token)
        elif self._state == "thought":
            self.thought_tokens += 1
            self._tell_thought(self._inner.take(token))
        else:
            self._said.append(self._content.take(token))

    def finish(self) -> None:
        """No token follows."""
        self._close()
        self._said.append(self._content.finish())

    def parts(self) -> AnswerParts:
        """What has become certain since the last time."""
        parts = AnswerParts(
            "".join(self._said), "".join(self._thoughts), tuple(self._calls), self._broken
        )
        self._said.clear()
        self._thoughts.clear()
        self._calls.clear()
        self._broken = 0
        return parts

    def _open_thought(self) -> None:
        self._state, self._label = "thought", ""

    def _tell_thought(self, text: str) -> None:
        """`text` is thought; the channel's name before it is not."""
        if self._label is None:
            self._thoughts.append(text)
            return
        self._label += text
        if _THOUGHT_LABEL.startswith(self._label) and self._label != _THOUGHT_LABEL:
            return
        self._thoughts.append(self._label.removeprefix(_THOUGHT_LABEL))
        self._label = None

    def _close(self, mark: str = "") -> None:
        """End the thought or the call that is open, by the token `mark` or before another."""
        state, self._state = self._state, "content"
        if state == "thought":
            self._tell_thought(self._inner.finish())
            if self._label not in (None, _THOUGHT_LABEL.rstrip()):
                self._thoughts.append(self._label)
        elif state == "call":
            self._close_call(self._source + self._inner.finish(), mark)

    def _close_call(self, source: str, mark: str) -> None:
        try:
            self._calls.append(read_call(source))
            self.calls_made += 1
        except CallFault:
            self._broken += 1
            spelt = f"{_CALL_OPEN}{source.replace(CALL_QUOTE, _CALL_QUOTES)}{mark}"
            self._said.append(self._content.take_text(spelt))


# ── serving / chat_text ───────────────────────────────────────────────────────────────────────────
# A model folder's tokenizer and chat template: conversations and texts into tokens.
#
# Reads tokenizer.json and the small configs beside it. Knows no request, no engine and no weights.

_CONFIG_BYTES = 16_000_000  # a larger config is none
# Where a file of a folder lies; None where there is none. May refuse, by whatever it raises.
FileFinder = Callable[[Path, str], Path | None]
# Gemma 4 ends a turn with the first token, and waits for the results of its calls with the second,
# after which its template writes them; but some releases' generation_config lists <eos> alone.
_TURN_ENDS = ("<turn|>", "<|tool_response>")


class ModelTextError(Exception):
    """The folder's tokenizer or template cannot be used; the message says which file and why."""


@dataclass(frozen=True)
class ModelText:
    """What stands between texts and tokens for one model.

    `stop_ids` end an answer unless ignore_eos is asked for. `template` is None for a model that was
    never taught to chat. `control` knows the texts of tokens with a meaning of their own; `marks`
    are those by which thoughts and calls are told from what is said.
    """

    tokenizer: Tokenizer
    token_text: TokenText
    stop_ids: frozenset[int]
    defaults: SamplingDefaults
    control: ControlBreaker
    marks: AnswerMarks
    template: ChatTemplate | None

    def text_ids(self, text: str) -> tuple[int, ...]:
        """`text` as it stands, its control tokens taken as such: whoever writes a raw prompt writes
        them by hand. A beginning token comes before it where the tokenizer says so."""
        return tuple(self.tokenizer.encode(text).ids)

    def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        flags: Mapping[str, Any],
        tools: Sequence[ToolSpec] = (),
    ) -> tuple[int, ...]:
        """The conversation through the model's template, with the model's turn opened.

        Only the template's own control tokens are control tokens. One that stands in a text of the
        request (a message, the result of a tool, the description of one) is encoded as the letters
        it is written in: else a user, or a page that an agent reads, could close the turn and speak
        for the system. vLLM 0.32 and transformers' default take it for the token; transformers 5.24
        has this as sanitize_control_tokens. Everything else is encoded as both do it. Raises
        ApiRefusal 400 for what the template does not take.
        """
        if self.template is None:
            raise ApiRefusal(
                400,
                "the model has no chat template: ask /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        self._check_taken(self.template, messages, flags, tools)
        mark = new_mark()
        fields = self.control.broken(template_fields(messages, tools, flags), mark)
        pieces = self.template.render(fields).split(mark)
        encoded = [self.tokenizer.encode(p, add_special_tokens=False).ids for p in pieces]
        return tuple(token for ids in encoded for token in ids)

    def _check_taken(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        flags: Mapping[str, Any],
        tools: Sequence[ToolSpec],
    ) -> None:
        """Refuse what the template would pass over in silence, and what no parser would find."""
        for name, value in flags.items():
            # Thinking that is switched off is what a template without it does anyway.
            if name not in template.variables and (value or name != "enable_thinking"):
                place = f"chat_template_kwargs.{name}"
                raise invalid_field(place, "is nothing that the model's template knows")
        if tools and not (template.takes_tools and self.marks.call_open is not None):
            raise invalid_field("tools", "are nothing that the model was taught", "unsupported")
        for number, message in enumerate(messages):
            if message.calls and not template.takes_calls:
                words = "are nothing that the model's template knows"
                raise invalid_field(f"messages[{number}].tool_calls", words, "unsupported")


def plain_file(folder: Path, name: str) -> Path | None:
    """The usual FileFinder."""
    return folder / name if (folder / name).is_file() else None


def read_model_text(folder: Path, find: FileFinder = plain_file) -> ModelText:
    """The tokenizer, template and stop tokens of the model in `folder`. Raises ModelTextError."""
    path = find(folder, "tokenizer.json")
    if path is None:
        raise ModelTextError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelTextError(f"{path} is no tokenizer: {error}") from None
    try:
        token_text = TokenText.of(tokenizer, MARK_WORDS)
    except ValueError as error:
        raise ModelTextError(f"{path}: {error}") from None
    config, model, generation = (
        _folder_json(folder, name, find)
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    source = _template_source(folder, config, find)
    try:
        template = None if source is None else ChatTemplate(source, _named_specials(config))
    except TemplateFault as error:
        raise ModelTextError(f"{folder}: {error}") from None
    return ModelText(
        tokenizer=tokenizer,
        token_text=token_text,
        stop_ids=_stop_ids(tokenizer, config, model, generation),
        defaults=_sampling_defaults(generation),
        control=ControlBreaker(token_text.names.values()),
        marks=AnswerMarks.of(tokenizer),
        template=template,
    )


def _folder_json(folder: Path, name: str, find: FileFinder) -> dict[str, Any]:
    """The JSON object in a file of the folder; empty where there is no such file."""
    path = find(folder, name)
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_CONFIG_BYTES))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ModelTextError(f"{path} is no JSON object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any], find: FileFinder) -> str | None:
    """The template's own file, else what tokenizer_config.json has, its "default" among several."""
    path = find(folder, "chat_template.jinja")
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except ValueError:
            raise ModelTextError(f"{path} is no UTF-8") from None
    told = config.get("chat_template")
    if isinstance(told, list):
        named = {item.get("name"): item.get("template") for item in told if isinstance(item, dict)}
        told = named.get("default")
    return told if isinstance(told, str) else None


def _token_words(value: Any) -> str | None:
    """A token's text as configs spell it: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_specials(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like by name, those of the model's own kind included."""
    further = config.get("extra_special_tokens")
    told = {**config, **(further if isinstance(further, dict) else {})}
    found = {name: _token_words(value) for name, value in told.items() if name.endswith("_token")}
    return {name: words for name, words in found.items() if words is not None}


def _stop_ids(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> frozenset[int]:
    """All that end an answer: of both configs, of the tokenizer, and Gemma 4's ends of a turn."""
    inner = model.get("text_config")
    found: set[int] = set()
    for place in (model, inner if isinstance(inner, dict) else {}, generation):
        told = place.get("eos_token_id")
        found.update(n for n in (told if isinstance(told, list) else [told]) if type(n) is int)
    for words in (_token_words(config.get("eos_token")), *_TURN_ENDS):
        token = tokenizer.token_to_id(words) if words else None
        if token is not None:
            found.add(token)
    return frozenset(found)


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """What the model's makers recommend in generation_config.json, as vLLM takes it too."""
    usual = SamplingDefaults()

    def number(name: str, default: float) -> float:
        value = generation.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return default
        return float(value)

    return SamplingDefaults(
        temperature=number("temperature", usual.temperature),
        top_k=int(number("top_k", usual.top_k)),
        top_p=number("top_p", usual.top_p) or usual.top_p,
        min_p=number("min_p", usual.min_p),
        repetition_penalty=number("repetition_penalty", 1.0) or usual.repetition_penalty,
    )


# ── serving / constraints ─────────────────────────────────────────────────────────────────────────
# Holds an answer to its shape: which tokens may come next, after a thought that is free.
#
# The work is llguidance's: grammars compiled, and a mask over the vocabulary made of where the
# answer
# stands. Knows no request, no engine and no HTTP.

_SHAPE_CHARACTERS = 200_000  # of one grammar
_SHAPES_KEPT = 32
_SHAPE_REFUSAL_CHARACTERS = 500
_SHAPE_CALL_WORDS = ("<|tool_call>", "<tool_call|>", '<|"|>')
_SHAPE_THOUGHT_OPEN, _SHAPE_THOUGHT_CLOSE = "<|channel>", "<channel|>"
# What a JSON answer looks like. Every option is named, for a schema could bring its own in
# "x-guidance". Blanks are bounded, or a model could go on with them for ever; \u escapes are left
# out, or a key could be spelt past the schema that its plain form has.
_SHAPE_JSON_FORM: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{1,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
    "coerce_one_of": False,
    "lenient": False,
}


class ConstraintBroken(Exception):
    """An answer cannot be held to its shape any further; the message says why."""


class Constraints:
    """Makes the constraints of one model's answers, which `stop_ids` may end. Any thread may ask.

    The vocabulary is prepared when the first one is asked for: 200 MB for Gemma's 262,144 tokens
    and 2.5 s on 2 quiet cores of an AMD EPYC (Zen 4), 6.6 s on busy ones, which a server without
    constraints does not pay. After that a constraint takes milliseconds and a mask 7 to 300 µs on
    the busy ones; a text whose length is bounded took 2.7 ms for one.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self._stops = sorted(token for token in stop_ids if token < size)
        self._lock = threading.Lock()  # guards all that follows
        self._prepared: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def begin(
        self,
        shape: AnswerShape,
        thinking: bool,
        *,
        in_thought: bool = False,
        place: str = "response_format",
    ) -> TokenConstraint:
        """What holds one answer to `shape`, which stands in the request at `place`; of one with
        `said`, that stands there, and its tools at "tools".

        thinking: a thought may come first, and is free; in_thought: the prompt has opened it.
        Takes a while (see above), so not for an event loop. Raises ApiRefusal 400 that names what
        of the shape cannot be kept to: nothing of it is passed over.
        """
        if not self._stops:
            raise ApiRefusal(400, "the model names no token that ends an answer")
        with self._lock:
            try:
                if shape.said is not None:
                    self._matcher(self._grammar(shape.said))  # so what fails now is at its place
                    place = "tools"
                body = self._matcher(self._grammar(shape))
                answer = _ShapedAnswer(body, self._stops)
                opened = self._tokenizer.token_to_id(_SHAPE_THOUGHT_OPEN)
                closed = self._tokenizer.token_to_id(_SHAPE_THOUGHT_CLOSE)
                if not (thinking or in_thought) or opened is None or closed is None:
                    return answer
                thought = "" if in_thought else r'"thought\n"'
                free = self._matcher(_shape_lark(f"start: {thought} /(?s:.*)/ <[{closed}]>"))
            except (ConstraintBroken, CallGrammarRefused) as error:
                raise invalid_field(place, str(error)[:_SHAPE_REFUSAL_CHARACTERS]) from None
            return _ThoughtFirst(answer, free, opened, closed, in_thought)

    def _grammar(self, shape: AnswerShape) -> str:
        """`shape` as llguidance takes it: JSON with the one grammar, behind which that of what is
        `said` may stand. Raises ConstraintBroken and CallGrammarRefused."""
        from llguidance import LLMatcher

        if shape.kind == "json_object":
            return _shape_json({"type": "object"})
        if shape.kind == "json_schema":
            return _shape_json(shape.schema or {})
        if shape.kind == "regex":
            return str(LLMatcher.grammar_from_regex(shape.text))
        lark = shape.text
        if shape.kind == "choice":
            lark = "start: " + " | ".join(json.dumps(choice) for choice in shape.choices)
        if shape.kind == "calls":
            found = [self._tokenizer.token_to_id(word) for word in _SHAPE_CALL_WORDS]
            tokens = [token for token in found if token is not None]
            if len(tokens) < len(found):
                raise ConstraintBroken("the model has no tokens for calls")
            lark = call_grammar(shape, CallTokens(*tokens))
        return _shape_lark(lark, "" if shape.said is None else self._grammar(shape.said))

    def _matcher(self, grammar: str) -> Any:
        """A matcher at the begin of `grammar`. Raises ConstraintBroken."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if len(grammar) > _SHAPE_CHARACTERS:
            raise ConstraintBroken(f"has more than {_SHAPE_CHARACTERS} characters")
        if self._prepared is None:
            text = _with_special_marks(self._tokenizer).to_str()
            self._prepared = LLTokenizer(text, eos_token=self._stops)
        if grammar not in self._kept:
            limits = LLParserLimits(
                initial_lexer_fuel=200_000,
                max_lexer_states=50_000,
                max_grammar_size=200_000,
                verbose_errors=False,
            )
            made = LLMatcher(self._prepared, grammar, log_level=0, limits=limits)
            # A first token shows what compiling alone does not: a pattern that grows too large.
            allowed = int.from_bytes(_shape_mask(made), "little")
            trial = made.deep_copy()
            trial.consume_token((allowed & -allowed).bit_length() - 1)
            _shape_mask(trial)
            self._kept[grammar] = made
        self._kept.move_to_end(grammar)
        while len(self._kept) > _SHAPES_KEPT:
            self._kept.popitem(last=False)
        return self._kept[grammar].deep_copy()


class _ShapedAnswer:
    """An answer from its first token to the one that ends it."""

    def __init__(self, matcher: Any, stops: list[int]) -> None:
        self._matcher = matcher
        self._stops = stops
        self._ended = False
        self._mask: bytes | None = None

    def mask(self) -> TokenMask:
        if self._mask is None:
            self._mask = _shape_mask(self._matcher)
        return self._mask

    def take(self, token: int) -> None:
        if token in self._stops and self._matcher.is_accepting():
            self._ended = True  # with ignore_eos others of its kind follow
        elif self._ended or not self._matcher.consume_token(token):
            why = self._matcher.get_error() or "the answer is complete"
            raise ConstraintBroken(f"token {token} is not allowed here: {why}")
        else:
            self._mask = None


class _ThoughtFirst:
    """A thought, of text and nothing else, and then the answer; or the answer at once."""

    def __init__(
        self, answer: _ShapedAnswer, free: Any, opened: int, closed: int, inside: bool
    ) -> None:
        self._answer = answer
        self._free = free
        self._opened, self._closed = opened, closed
        self._place = "thought" if inside else "begin"
        self._mask: bytes | None = None

    def mask(self) -> TokenMask:
        if self._place == "answer":
            return self._answer.mask()
        if self._mask is None:
            if self._place == "thought":
                self._mask = _shape_mask(self._free)
            else:
                either = bytearray(self._answer.mask())
                either[self._opened // 8] |= 1 << self._opened % 8
                self._mask = bytes(either)
        return self._mask

    def take(self, token: int) -> None:
        if self._place == "answer" or (self._place == "begin" and token != self._opened):
            self._place = "answer"
            self._answer.take(token)
        elif self._place == "begin":
            self._place = "thought"
        elif not self._free.consume_token(token):
            raise ConstraintBroken(f"token {token} is not allowed in a thought")
        elif token == self._closed:
            self._place = "answer"
        self._mask = None


def _with_special_marks(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer`, or a copy of it, in which all of the model's marks are special: then no text can
    be spelt with them."""
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    marks = {word for word in MARK_WORDS if tokenizer.token_to_id(word) is not None}
    if marks <= special:
        return tokenizer
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.add_special_tokens([AddedToken(word, special=True) for word in sorted(marks)])
    return copied


def _shape_mask(matcher: Any) -> bytes:
    """Which tokens may come next. Raises ConstraintBroken for none, or if the matcher gave up."""
    mask: bytes = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        words = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise ConstraintBroken(words or "no token is allowed")
    return mask


def _shape_lark(text: str, said: str = "") -> str:
    """The grammar `text`, in which @said is the one of `said`."""
    others = [part | {"name": "said"} for part in json.loads(said)["grammars"]] if said else []
    return json.dumps({"grammars": [{"lark_grammar": text}, *others]})


def _shape_json(schema: Mapping[str, Any]) -> str:
    """JSON that `schema` allows. Raises ConstraintBroken for what llguidance would not hold to."""
    from llguidance import LLMatcher

    try:
        form: Any = _SHAPE_JSON_FORM
        text = json.dumps(schema, allow_nan=False)
        for part in _shape_parts(schema):
            _check_shape_keys(part)
        return str(LLMatcher.grammar_from_json_schema(text, overrides=form))
    except RecursionError:
        raise ConstraintBroken("the schema is nested too deeply") from None
    except ValueError as error:
        raise ConstraintBroken(str(error)) from None


def _shape_parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """`schema` and every object within it that may be one; values that it names are none."""
    if isinstance(schema, Mapping):
        yield schema
    for name, part in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if isinstance(part, Mapping | list) and name not in (
            "const",
            "enum",
            "default",
            "examples",
        ):
            yield from _shape_parts(part)


def _check_shape_keys(schema: Mapping[str, Any]) -> None:
    """Keys that no name is given for may come twice, and a reader keeps one of them."""
    least, named = schema.get("minProperties"), schema.get("required")
    known = len(named) if isinstance(named, list) else 0
    if isinstance(least, int) and least > max(1, known):
        raise ConstraintBroken(f"minProperties: {least} keys of any name cannot be told apart")


# ── serving / generation ──────────────────────────────────────────────────────────────────────────
# One answer on its way: tokens from the scheduler become its parts, its end, figures and times.
#
# Lives between two threads: the scheduler's calls it, the event loop's reads its deltas. Knows no
# form of an answer.

FinishReason = Literal["stop", "length", "tool_calls"]
_MOST_TOGETHER = 256  # tokens of one delta, about


@dataclass(frozen=True)
class ToldToken:
    """A token with its log probabilities; `offset` is the character of the text it begins at."""

    step: StepToken
    offset: int


@dataclass(frozen=True)
class ToldCall:
    """A call of a tool: which of the answer's it is, from 0, its id, and its arguments as JSON."""

    index: int
    identity: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerDelta:
    """What is new of an answer. `tokens` is empty unless log probabilities were asked for.

    `text` is what the model says, `thought` what it thinks. `completion_tokens` counts all so far,
    the one that ended the answer included, and `thought_tokens` those of thoughts among them.
    `fault` says why nothing follows; `left` that the client has gone.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[ToldCall, ...] = ()
    tokens: tuple[ToldToken, ...] = ()
    completion_tokens: int = 0
    thought_tokens: int = 0
    finish: FinishReason | None = None
    fault: str = ""
    left: bool = False

    @property
    def last(self) -> bool:
        return self.finish is not None or bool(self.fault) or self.left


class Generation:
    """A job for the scheduler, and the stream of its deltas for one event loop: the one that runs
    when it is made.

    `ends` are tokens that end the answer and are no part of it; `parser`, which is this answer's
    alone, may end it likewise. `constraint` says what may come next, if anything does. `cached` are
    the prompt's tokens that the engine had, once it is seated.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limit: int,
        *,
        ends: frozenset[int],
        parser: AnswerParser,
        metrics: ServingMetrics,
        constraint: TokenConstraint | None = None,
        cache_salt: str = "",
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.limit = limit
        self.constraint = constraint
        self.cache_salt = cache_salt
        self.cached = 0
        self._ends = ends
        self._parser = parser
        self._metrics = metrics
        self._produced = 0
        self._calls = 0
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[AnswerDelta] = asyncio.Queue()
        self._arrived = time.monotonic()
        self._first = 0.0

    async def next_delta(self) -> AnswerDelta:
        """The next piece of the answer; none follows the one that is `last`.

        What has piled up behind a slow client comes as one piece, up to a bound.
        """
        deltas = [await self._deltas.get()]
        begun = deltas[0].completion_tokens
        while not self._deltas.empty() and deltas[-1].completion_tokens - begun < _MOST_TOGETHER:
            deltas.append(self._deltas.get_nowait())
        if not self._deltas.empty():
            await asyncio.sleep(0)  # a full queue never waits, and the others want their turn
        return AnswerDelta(left=True) if self._left else joined_deltas(deltas)

    def leave(self) -> None:
        """The client has gone: wakes whoever waits for the next delta."""
        self._left = True
        self._deltas.put_nowait(AnswerDelta(left=True))

    def seated(self, held: int) -> None:
        self.cached = held
        self._metrics.queued(time.monotonic() - self._arrived)

    def take(self, tokens: Sequence[StepToken]) -> bool:
        if not self._produced:
            self._first = time.monotonic()
            self._metrics.first_token(self._first - self._arrived, len(self.prompt))
        begun = self._produced
        told: list[ToldToken] = []
        finish: Literal["stop", "length"] | None = None
        for step in tokens:
            told.append(ToldToken(step, self._parser.characters))
            self._produced += 1
            if step.token in self._ends:
                finish = "stop"
            else:
                self._parser.take(step.token)
                if self._produced == self.limit:
                    finish = "length"
            if finish is not None or self._parser.over:
                self._parser.finish()
            if self._parser.over:
                finish = "stop"
            if finish is not None:
                break
        self._metrics.tokens(self._produced - begun)
        parts = self._parser.parts()
        self._metrics.calls(len(parts.calls), parts.broken)
        self._put(
            AnswerDelta(
                text=parts.content,
                thought=parts.thought,
                calls=tuple(self._told_call(call) for call in parts.calls),
                tokens=tuple(told) if self.sampling.logprobs >= 0 else (),
                completion_tokens=self._produced,
                thought_tokens=self._parser.thought_tokens,
                finish="tool_calls" if finish == "stop" and self._parser.calls_made else finish,
            )
        )
        if finish is not None:
            now = time.monotonic()
            self._metrics.ended(finish)
            self._metrics.answered(now - self._arrived, now - self._first, self._produced)
        return finish is not None

    def _told_call(self, call: ToolCall) -> ToldCall:
        told = ToldCall(self._calls, f"call_{uuid.uuid4().hex}", call.name, call.arguments)
        self._calls += 1
        return told

    def fail(self, words: str) -> None:
        self._put(AnswerDelta(completion_tokens=self._produced, fault=words))
        self._metrics.ended("error")

    def cancelled(self) -> None:
        self._metrics.ended("abort")

    def _put(self, delta: AnswerDelta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)


def joined_deltas(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """Some that follow each other, at least one, as one."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        thought="".join(delta.thought for delta in deltas),
        calls=tuple(call for delta in deltas for call in delta.calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
    )


# ── serving / answers ─────────────────────────────────────────────────────────────────────────────
# The JSON of answers: OpenAI's chat completions and text completions, whole and in chunks.
#
# Fields as https://platform.openai.com/docs/api-reference/chat and …/completions have them. Knows
# no
# request and no HTTP.


@dataclass(frozen=True)
class AnswerForm:
    """What is the same in all chunks of one answer, and how they are built.

    `chat`: a chat completion, else a text completion. `logprobs` -1: none are told; else they are
    of every token, those of thoughts and calls included.
    """

    chat: bool
    identity: str
    created: int
    model: str
    logprobs: int
    tokens_as_ids: bool
    token_text: TokenText
    tells_thought: bool = True

    def whole(self, answer: AnswerDelta, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        said = {"message": self._message(answer)} if self.chat else {"text": answer.text}
        kind = "chat.completion" if self.chat else "text_completion"
        choice = self._choice(said, answer.tokens, answer.finish)
        return self._framed(kind, [choice]) | {"usage": usage}

    def _message(self, answer: AnswerDelta) -> dict[str, Any]:
        """With calls and no word, the content is null, as OpenAI has it."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        message |= self._thought(answer)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {
                    "id": call.identity,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return message

    def _thought(self, answer: AnswerDelta) -> dict[str, str]:
        """Under both names that clients read: vLLM 0.32 sends the one, llama-server the other."""
        if not answer.thought or not self.tells_thought:
            return {}
        return {"reasoning": answer.thought, "reasoning_content": answer.thought}

    def first_chunk(self) -> dict[str, Any]:
        """What a chat's stream begins with: who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(said, (), None)])

    def chunks(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """What is new, without the end. A call is two pieces: its id and name, its arguments."""
        if not self.chat:
            if not delta.text and not delta.tokens:
                return []
            return [self._chunk([self._choice({"text": delta.text}, delta.tokens, None)])]
        said = {"content": delta.text} if delta.text else {}
        pieces: list[dict[str, Any]] = [said | self._thought(delta)]
        for call in delta.calls:
            begun = {"id": call.identity, "type": "function"}
            for told in (
                {**begun, "function": {"name": call.name, "arguments": ""}},
                {"function": {"arguments": call.arguments}},
            ):
                pieces.append({"tool_calls": [{"index": call.index, **told}]})
        tokens = [delta.tokens, *((),) * len(pieces)]
        return [
            self._chunk([self._choice({"delta": piece}, told, None)])
            for piece, told in zip(pieces, tokens, strict=False)
            if piece or told
        ]

    def end_chunk(self, finish: str) -> dict[str, Any]:
        """The last chunk with a choice, which says why the answer ends."""
        said: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([self._choice(said, (), finish)])

    def usage(self, prompt_tokens: int, answer: AnswerDelta, cached: int = 0) -> dict[str, Any]:
        """OpenAI's usage object. `answer` is its last delta, which counts all before it. `cached`
        tokens of the prompt were not computed anew; as in vLLM they are told where there are any.
        """
        counts: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": prompt_tokens + answer.completion_tokens,
        }
        if cached:
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.chat:
            counts["completion_tokens_details"] = {"reasoning_tokens": answer.thought_tokens}
        return counts

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that stream_options.include_usage asks for: no choice, the counts alone."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._framed("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, said: dict[str, Any], tokens: Sequence[ToldToken], finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.logprobs >= 0 and tokens:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._text_logprobs(tokens)
        return {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish}

    def _chat_logprobs(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._told(told.step.token, told.step.logprob),
                    "top_logprobs": [self._told(*pair) for pair in told.step.top[: self.logprobs]],
                }
                for told in tokens
            ]
        }

    def _told(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.token_text.piece(token)
        spelt = None if piece is None else list(piece)
        return {"token": self._name(token), "logprob": logprob, "bytes": spelt}

    def _text_logprobs(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """The older form. As in OpenAI's API the chosen token is always among the likeliest."""
        tops = []
        for told in tokens:
            pairs = [*told.step.top[: self.logprobs], (told.step.token, told.step.logprob)]
            top: dict[str, float | None] = {}
            for token, logprob in pairs:
                top.setdefault(self._name(token), logprob)  # of two with one name the likelier
            tops.append(top)
        return {
            "text_offset": [told.offset for told in tokens],
            "token_logprobs": [told.step.logprob for told in tokens],
            "tokens": [self._name(told.step.token) for told in tokens],
            "top_logprobs": tops,
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokens_as_ids else self.token_text.name(token)


# ── serving / http_answer ─────────────────────────────────────────────────────────────────────────
# An answer as it goes out over HTTP: whole, or as a stream of events that ends with its client.
#
# Knows no field of a request but whether it wants a stream.

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


# ── serving / http_front ──────────────────────────────────────────────────────────────────────────
# The HTTP face of one served model: OpenAI's endpoints, health, metrics, and who may ask.
#
# Knows no engine: it talks to a scheduler, and to the model's tokenizer and template.

BODY_BYTES = 16_000_000  # of one request; the ids of 1,000,000 tokens are half of it
_HANDLED_AT_ONCE = 20_000  # bytes of a body that are read and encoded without leaving the loop
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class FrontSettings:
    """How one model is served. name: the model's, as requests give it. api_key: empty, none is
    asked for. loopback_only: whether requests must name this computer as their host, which no page
    in a browser can make them do."""

    name: str
    api_key: str = ""
    loopback_only: bool = True


class HttpFront:
    """The application: `app` is what an ASGI server runs."""

    def __init__(self, scheduler: Scheduler, text: ModelText, settings: FrontSettings) -> None:
        self._scheduler = scheduler
        self._text = text
        self._constraints = Constraints(text.tokenizer, text.stop_ids)
        self._name = settings.name
        self._begun = int(time.time())
        self.metrics = ServingMetrics(scheduler.view)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        handlers = {ApiRefusal: self._refuse, HTTPException: self._no_route, Exception: _broken}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = HttpGate(starlette, settings.api_key, settings.loopback_only)

    async def _health(self, request: Request) -> Response:
        now = self._scheduler.view()
        told = {"status": now.phase, "progress": round(now.progress, 4), "message": now.doing}
        return JSONResponse(told, 200 if now.phase == "serving" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        try:
            limits = self._scheduler.limits
        except NotServing as error:
            raise unavailable(error) from None
        model = {
            "id": self._name,
            "object": "model",
            "created": self._begun,
            "owned_by": "local",
            "max_model_len": limits.context,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        def read(data: bytes) -> tuple[ChatOrder, tuple[int, ...]]:
            order = read_chat_order(data, self._text.defaults)
            self._check_model(order.generation)
            text = self._text
            return order, text.chat_ids(order.messages, order.template_flags, order.tools)

        chat, prompt = await _worked_on(await _json_body(request), read)
        return await self._answer(chat.generation, prompt, "messages", chat)

    async def _completions(self, request: Request) -> Response:
        def read(data: bytes) -> tuple[GenerationOrder, tuple[int, ...]]:
            order = read_completion_order(data, self._text.defaults)
            self._check_model(order.generation)
            given = order.prompt
            ids = self._text.text_ids(given) if isinstance(given, str) else given
            return order.generation, ids

        order, prompt = await _worked_on(await _json_body(request), read)
        return await self._answer(order, prompt, "prompt")

    def _parser(
        self, order: GenerationOrder, prompt: Sequence[int], chat: ChatOrder | None
    ) -> AnswerParser:
        """What takes the answer apart: a text completion has no parts."""
        pieces, marks = self._text.token_text, self._text.marks
        if chat is None:
            return AnswerParser(pieces, order.stops)
        begun = marks.opened_thought(prompt)
        return AnswerParser(pieces, order.stops, marks, calls=chat.calls, thought_begun=begun)

    async def _constraint(
        self, order: GenerationOrder, prompt: Sequence[int], chat: ChatOrder | None
    ) -> TokenConstraint | None:
        """What holds the answer to its shape; making it does not hold up the answers of others."""
        if order.shape is None:
            return None
        begun = chat is not None and self._text.marks.opened_thought(prompt) is not None
        return await asyncio.to_thread(
            self._constraints.begin,
            order.shape.shape,
            order.thinking,
            in_thought=begun,
            place=order.shape.place,
        )

    def _check_model(self, order: GenerationOrder) -> None:
        if order.model != self._name:
            words = f"the model {order.model[:100]!r} is not served here; {self._name!r} is"
            raise ApiRefusal(404, words, param="model", code="model_not_found")

    async def _answer(
        self,
        order: GenerationOrder,
        prompt: Sequence[int],
        field: str,
        chat: ChatOrder | None = None,
    ) -> Response:
        """Start the generation; `field` is the one that the prompt came from."""
        try:
            limits = self._scheduler.limits
        except NotServing as error:
            raise unavailable(error) from None
        _check_tokens(prompt, field, limits.vocabulary)
        _check_tokens(sorted(order.stop_ids), "stop_token_ids", limits.vocabulary)
        sampling = order.sampling
        if not order.seeded:
            sampling = replace(sampling, seed=random.getrandbits(63))
        limit = _checked_limit(len(prompt), order.max_tokens, limits.context, field)
        constraint = await self._constraint(order, prompt, chat)
        generation = Generation(
            prompt,
            replace(sampling, top_k=min(sampling.top_k, limits.vocabulary)),
            limit,
            ends=order.stop_ids if order.ignore_eos else order.stop_ids | self._text.stop_ids,
            parser=self._parser(order, prompt, chat),
            metrics=self.metrics,
            constraint=constraint,
            cache_salt=order.cache_salt,
        )
        form = AnswerForm(
            chat=chat is not None,
            identity=f"{'cmpl' if chat is None else 'chatcmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._name,
            logprobs=sampling.logprobs,
            tokens_as_ids=order.tokens_as_ids,
            token_text=self._text.token_text,
            tells_thought=chat is None or chat.tells_thought,
        )
        return AnswerResponse(self._scheduler, generation, form, order)

    async def _refuse(self, request: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, ApiRefusal)
        self.metrics.refused(refusal.status)
        headers = {"Connection": "close"} if refusal.status == 413 else {}
        if refusal.retry_after_s is not None:
            headers["Retry-After"] = str(refusal.retry_after_s)
        return JSONResponse(refusal.body(), refusal.status, headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiRefusal(error.status_code, words).body(), error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    """What is no foreseen failure; the server's log has its trace."""
    refusal = ApiRefusal(500, f"the server has a fault: {type(error).__name__}")
    return JSONResponse(refusal.body(), 500)


async def _json_body(request: Request) -> bytes:
    """The request's body. 415 for another type than JSON, 413 for one beyond BODY_BYTES.

    The type is asked for because a page in a browser may send any other to any server unasked.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiRefusal(415, "the body must come as Content-Type: application/json")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise ApiRefusal(413, f"the body has more than {BODY_BYTES} bytes")
    except ClientDisconnect:
        raise ApiRefusal(400, "the client left before its body was whole") from None
    return bytes(body)


async def _worked_on(data: bytes, read: Callable[[bytes], _Read]) -> _Read:
    """What `read` makes of `data`; a large one does not hold up the answers of others."""
    return read(data) if len(data) <= _HANDLED_AT_ONCE else await asyncio.to_thread(read, data)


def _check_tokens(tokens: Sequence[int], field: str, vocabulary: int) -> None:
    worst = max(tokens, default=0)
    if worst >= vocabulary:
        raise invalid_field(field, f"token {worst} is not one of the model's {vocabulary}")


def _checked_limit(prompt: int, asked: int | None, context: int, field: str) -> int:
    """How many tokens the answer may have. ApiRefusal where prompt and answer have no room."""
    if not prompt:
        raise invalid_field(field, "holds no token")
    code = "context_length_exceeded"
    if prompt >= context:
        words = f"has {prompt} tokens, and the context of {context} must hold an answer too"
        raise invalid_field(field, words, code)
    if asked is not None and prompt + asked > context:
        words = f"{asked} tokens do not fit behind the {prompt} of the prompt: the context is"
        raise invalid_field("max_tokens", f"{words} {context}", code)
    return context - prompt if asked is None else asked


# ── gemma4 / config ───────────────────────────────────────────────────────────────────────────────
# The architecture of one Gemma 4 checkpoint in numbers: what config.json says of its text half.
#
# Knows no weights and no array library.


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer.

    `sliding`: it sees `Gemma4Config.window` tokens, else all. `source` is the layer whose keys and
    values it reads: its own index for an owner, else the last owner of its kind. `k_is_v`: it has
    no v_proj, the values are made of the raw output of k_proj. Widths in elements.
    """

    index: int
    sliding: bool
    source: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    k_is_v: bool

    @property
    def owner(self) -> bool:
        """Whether it holds keys and values of its own."""
        return self.source == self.index


@dataclass(frozen=True)
class PackedRule:
    """Which matrices a checkpoint stores as packed 4-bit integers, as its config says.

    `group`: columns that share a scale. A module is packed where one of `targets` fits it and none
    of `ignored` does: a whole name, "re:" before an expression for a name's beginning, or "Linear".
    """

    group: int
    targets: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Gemma4Config:
    """The text half of a Gemma 4: everything that moves a logit.

    `per_layer` is the width of a per-layer embedding (0: the model has none), `experts` the number
    of experts (0: dense), `experts_used` how many a token takes, `expert_intermediate` the width of
    one. `softcap` 0 means none. `stored_dtype` is "bfloat16", "float32" or "float16". `packed` is
    None where all is stored plainly. `own_head`: the files hold the embedding a second time.
    """

    hidden: int
    vocabulary: int
    layers: tuple[LayerConfig, ...]
    window: int
    positions: int
    norm_eps: float
    softcap: float
    sliding_theta: float
    full_theta: float
    full_rotated: float
    per_layer: int
    per_layer_vocabulary: int
    experts: int
    experts_used: int
    expert_intermediate: int
    stored_dtype: str
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    packed: PackedRule | None = None
    own_head: bool = False


# ── gemma4 / memory_speed ─────────────────────────────────────────────────────────────────────────
# Measures how fast this machine reads its memory: the bound of every decode step.
#
# Knows no model and no accelerator.

_SPEED_BYTES = 512_000_000  # of all readers together: beyond most machines' caches
_SPEED_PASSES = 5


def read_speed() -> float:
    """Bytes a second that all of this process's processors read together: the best of some passes.

    Takes half a gigabyte of memory and less than a second on two cores.
    """
    readers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    readers = readers or 1
    buffers = [np.ones(_SPEED_BYTES // readers // 8, dtype=np.int64) for _ in range(readers)]
    best = 0.0
    with ThreadPoolExecutor(readers) as pool:
        for _ in range(_SPEED_PASSES):
            begun = time.perf_counter()
            list(pool.map(np.sum, buffers))  # numpy leaves the interpreter's lock while it sums
            read = sum(buffer.nbytes for buffer in buffers)
            best = max(best, read / (time.perf_counter() - begun))
    return best


# ── gemma4 / refusal ──────────────────────────────────────────────────────────────────────────────
# What is said of a model folder that cannot be served as it stands.
#
# Knows no key and no tensor: those who refuse name them.

_REFUSAL_SHOWN = 80  # characters of a value that a message repeats


class ModelRefused(Exception):
    """A model folder cannot be served; the message names what is not understood, for people."""


class ConfigRefused(ModelRefused):
    """Something in config.json or generation_config.json is not understood."""


class WeightsRefused(ModelRefused):
    """A weights file is damaged, or holds other tensors than the config asks for."""


def shown_value(value: object) -> str:
    """`value` as a message repeats it: as Python writes it, cut when it is long."""
    text = repr(value)
    return text if len(text) <= _REFUSAL_SHOWN else text[: _REFUSAL_SHOWN - 1] + "…"


# ── gemma4 / config_fields ────────────────────────────────────────────────────────────────────────
# One object of a config file, read key by key: what is never read can be refused by name.
#
# Knows no architecture: which keys there are is its reader's concern.


class ConfigFields:
    """The keys of one JSON object, each with a check of its kind.

    `where` names the object in messages. A key that is absent gives the default; without one it is
    refused as missing. Every method raises ConfigRefused with the key and its value.
    """

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._values = values
        self._read: set[str] = set()

    def value(self, key: str) -> object:
        """Whatever stands under `key`; None where it is absent or null."""
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether `key` is there, be it null."""
        return key in self._values

    def refused(self, key: str, why: str) -> ConfigRefused:
        """A refusal of `key` with its value."""
        stated = shown_value(self._values[key]) if key in self._values else "absent"
        return ConfigRefused(f"{self._where}: {key} = {stated} is not understood: {why}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._stated(key, default)
        if type(value) is not int or value < least:
            raise self.refused(key, f"it has to be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._stated(key, default)
        if type(value) not in (int, float):
            raise self.refused(key, "it has to be a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or number <= 0:
            raise self.refused(key, "it has to be a finite number above zero")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._stated(key, default)
        if type(value) is not bool:
            raise self.refused(key, "it has to be true or false")
        return value

    def token(self, key: str, default: int | None) -> int | None:
        """A token's id, or None where the file says null."""
        if self.has(key) and self.value(key) is None:
            return None
        if default is None and not self.has(key):
            return None
        return self.whole(key, default, least=0)

    def one_of(self, key: str, allowed: Collection[object], default: object = None) -> object:
        """A value that is among `allowed`."""
        value = self._values.get(key, default)
        self._read.add(key)
        # 0 == False and 1 == True: the kind has to fit as well.
        if not any(type(value) is type(good) and value == good for good in allowed):
            readable = " or ".join(shown_value(good) for good in allowed)
            raise self.refused(key, f"this engine reads {readable} alone")
        return value

    def child(self, key: str) -> ConfigFields:
        """The object under `key`."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.refused(key, "it has to be an object")
        return ConfigFields(f"{self._where}.{key}", value)

    def keys(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._values)

    def refuse_rest(self, harmless: Collection[str]) -> None:
        """Refuse the first key that was neither read nor is harmless. A null sets nothing."""
        for key, value in self._values.items():
            if key not in self._read and key not in harmless and value is not None:
                raise self.refused(key, "nobody knows whether it moves a logit")

    def _stated(self, key: str, default: object) -> object:
        self._read.add(key)
        if key not in self._values and default is None:
            raise ConfigRefused(f"{self._where}: {key} is missing")
        return self._values.get(key, default)


# ── gemma4 / model_folder ─────────────────────────────────────────────────────────────────────────
# Finds the files of a model folder and reads its small JSON files.
#
# Knows no key, no tensor and no tokenizer.

_FOLDER_JSON_LIMIT = 64_000_000  # bytes; an index of the largest size has about 100 kB


def model_file(folder: Path, name: str) -> Path:
    """The real path of the file `name` in `folder`.

    A link may stay in the folder, or lead where Hugging Face's cache keeps what its snapshots link
    to: from `<repo>/snapshots/<revision>/NAME` to `<repo>/blobs/`. Any other way out is refused, so
    that a folder from elsewhere cannot bring a file of this computer into the model.
    Raises ModelRefused for a missing file, another link and what is no plain file.
    """
    try:
        if not (folder / name).exists():
            raise ModelRefused(f"{folder} has no {name[:200]}")
        here, real = folder.resolve(), (folder / name).resolve()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ModelRefused(f"{folder}: {name[:200]!r} cannot be read: {error.strerror}") from None
    allowed = [here]
    if here.parent.name == "snapshots":
        allowed.append(here.parent.parent / "blobs")
    if real.parent not in allowed:
        raise ModelRefused(f"{folder / name} leads out of the folder, to {real}")
    if not real.is_file():
        raise ModelRefused(f"{folder / name} is no plain file")
    return real


def has_model_file(folder: Path, name: str) -> bool:
    """Whether there is a `name` in `folder`, be it a good one or not."""
    return (folder / name).is_symlink() or (folder / name).exists()


def folder_json(folder: Path, name: str) -> dict[str, object]:
    """The JSON object in the file `name` of `folder`.

    Raises ModelRefused where it cannot be read, is no object or names a key twice.
    """
    path = model_file(folder, name)
    try:
        size = path.stat().st_size
        if size > _FOLDER_JSON_LIMIT:
            raise ModelRefused(f"{folder / name} has {size} bytes: no settings file is so large")
        return json_object(path.read_bytes(), str(folder / name))
    except OSError as error:
        raise ModelRefused(f"{folder / name} cannot be read: {error.strerror}") from None


def json_object(text: bytes, where: str) -> dict[str, object]:
    """`text` as a JSON object; ModelRefused that names `where` otherwise."""

    def checked_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
        read = dict(pairs)
        if len(read) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelRefused(f"{where} names {twice[:80]!r} twice")
        return read

    try:
        read = json.loads(text, object_pairs_hook=checked_pairs)
    except (ValueError, RecursionError):  # ValueError: also bytes that are no UTF-8
        raise ModelRefused(f"{where} is no JSON") from None
    if not isinstance(read, dict):
        raise ModelRefused(f"{where} is no JSON object")
    return read


# ── gemma4 / quantization_config ──────────────────────────────────────────────────────────────────
# Reads `quantization_config`: which matrices a checkpoint packs, and refuses every other kind.
#
# Knows no tensors. The one kind that is read is what Google's `-w4a16-ct` releases are: 4-bit
# integers, a scale for each group of a row, no offsets, activations as they come.
#
# Keys and what they do: compressed-tensors 0.20.1, quantization/quant_config.py, quant_scheme.py,
# quant_args.py and utils/match.py.

_PACKED_FORMAT = "pack-quantized"
_PACKED_WORD = 8  # integers of 4 bits in a word of 32: a group may not end within one
# Book-keeping, how scales were found, and types of offsets that symmetric integers do not have.
_PACKED_HARMLESS = frozenset(("global_compression_ratio", "run_compressed", "version"))
_PACKED_HARMLESS_ARGUMENTS = frozenset(("observer", "observer_kwargs", "zp_dtype"))


def read_packed_rule(text: ConfigFields, outside: ConfigFields) -> PackedRule | None:
    """What `quantization_config` says, in either half of the config; None where there is none.

    Raises ConfigRefused that names whatever could move a weight and is not understood.
    """
    stated = [
        fields for fields in (text, outside) if fields.value("quantization_config") is not None
    ]
    if not stated:
        return None
    rules = {_packed_rule(fields.child("quantization_config")) for fields in stated}
    if len(rules) > 1:
        raise outside.refused("quantization_config", "text_config's says otherwise")
    return rules.pop()


def _packed_rule(fields: ConfigFields) -> PackedRule:
    fields.one_of("quant_method", ("compressed-tensors",))
    fields.one_of("format", (_PACKED_FORMAT,))
    fields.one_of("quantization_status", ("compressed",), "compressed")
    for key in ("sparsity_config", "transform_config"):
        if fields.value(key) not in (None, {}):
            raise fields.refused(key, "this engine reads none")
    groups = fields.child("config_groups")
    if len(groups.keys()) != 1:
        raise fields.refused("config_groups", "this engine reads one group")
    scheme = groups.child(groups.keys()[0])
    scheme.one_of("format", (_PACKED_FORMAT, None))
    group = _packed_arguments(scheme.child("weights"))
    rule = PackedRule(group, _packed_names(scheme, "targets"), _packed_names(fields, "ignore"))
    if not rule.targets:
        raise scheme.refused("targets", "nothing would be packed")
    scheme.refuse_rest(())
    fields.refuse_rest(_PACKED_HARMLESS)
    return rule


def _packed_arguments(weights: ConfigFields) -> int:
    """The size of a group; everything else has to be the one way that is read."""
    weights.one_of("num_bits", (4,))
    weights.one_of("type", ("int",), "int")
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("group",))
    weights.one_of("dynamic", (False,), False)
    # "weight" and "static" only say in which order the integers were found.
    weights.one_of("actorder", (None, False, "weight", "static"))
    weights.one_of("scale_dtype", (None, "bfloat16", "torch.bfloat16"))
    group = weights.whole("group_size")
    if group % _PACKED_WORD:
        raise weights.refused("group_size", f"it has to be a multiple of {_PACKED_WORD}")
    weights.refuse_rest(_PACKED_HARMLESS_ARGUMENTS)
    return group


def _packed_names(fields: ConfigFields, key: str) -> tuple[str, ...]:
    """A list of names and expressions."""
    listed = fields.value(key)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise fields.refused(key, "it has to be a list of names")
    for name in listed:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError):
            raise fields.refused(key, f"{name[:80]!r} is no expression") from None
    return tuple(listed)


# ── gemma4 / config_reader ────────────────────────────────────────────────────────────────────────
# Reads the text half of a Gemma 4 from config.json, and refuses by name what it does not know.
#
# Knows no tensors and no array library.
#
# Facts and defaults of absent keys: transformers 5.24, configuration_gemma4.py (Gemma4TextConfig),
# configuration_gemma4_unified.py (Gemma4UnifiedTextConfig) and modeling_gemma4.py.

_CONFIG_SLIDING, _CONFIG_FULL = "sliding_attention", "full_attention"
_CONFIG_MOST_LAYERS = 1000  # a list is made of them: a damaged file must not cost gigabytes


@dataclass(frozen=True)
class _ConfigKind:
    """What one model_type of the text half takes for absent keys, and whether it has more rules.

    rich: it may have per-layer embeddings and experts.
    """

    window: int
    positions: int
    per_layer: int
    bidirectional: str | None
    rich: bool


_CONFIG_KINDS = {
    "gemma4_text": _ConfigKind(512, 131_072, 256, None, True),
    "gemma4_unified_text": _ConfigKind(1024, 262_144, 0, "vision", False),
}
# The whole model's model_type, and that of its text half.
_CONFIG_WRAPPERS = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
_CONFIG_ARCHITECTURES = (
    *("Gemma4ForCausalLM", "Gemma4TextModel", "Gemma4ForConditionalGeneration", "Gemma4Model"),
    *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
    *("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedModel"),
)
# Keys that no forward pass reads: training, book-keeping, what is given back beside logits.
_CONFIG_HARMLESS = frozenset(
    ("_name_or_path", "attention_dropout", "chunk_size_feed_forward", "id2label")
    + ("initializer_range", "label2id", "num_labels", "output_attentions", "output_hidden_states")
    + ("problem_type", "return_dict", "transformers_version", "use_cache")
)
# Beside the text half: the towers and the tokens that stand for what is no text.
_CONFIG_HARMLESS_OUTSIDE = _CONFIG_HARMLESS | frozenset(
    ("audio_config", "vision_config", "audio_token_id", "boa_token_id", "boi_token_id")
    + ("eoa_token_id", "eoa_token_index", "eoi_token_id", "image_token_id", "video_token_id")
    + ("bos_token_id", "pad_token_id", "vision_soft_tokens_per_image")
)


def read_config(folder: Path) -> Gemma4Config:
    """What `folder` says of its model's text half.

    Takes the text half bare or wrapped (`text_config`), with `global_head_dim` and
    `num_global_key_value_heads` or with `per_layer_config`. The tokens that end an answer are those
    of generation_config.json where it names any; what else stands there are defaults of requests,
    and moves no logit.
    Raises ConfigRefused that names the key and the value which are not understood.
    """
    try:
        outside = ConfigFields("config.json", folder_json(folder, "config.json"))
        sampling: dict[str, object] = {}
        if has_model_file(folder, "generation_config.json"):
            sampling = folder_json(folder, "generation_config.json")
    except ModelRefused as refusal:
        raise ConfigRefused(str(refusal)) from None
    model_type = outside.one_of("model_type", (*_CONFIG_KINDS, *_CONFIG_WRAPPERS))
    _config_architectures(outside)
    text = outside
    if model_type in _CONFIG_WRAPPERS:
        text = outside.child("text_config")
        text.one_of("model_type", (_config_text_type(model_type),), _config_text_type(model_type))
    config = _config_text(text, outside, _CONFIG_KINDS[_config_text_type(model_type)], sampling)
    text.refuse_rest(_CONFIG_HARMLESS)
    outside.refuse_rest(_CONFIG_HARMLESS_OUTSIDE)
    return config


def _config_text_type(model_type: object) -> str:
    """The text half's model_type for that of a whole model, or for its own."""
    return _CONFIG_WRAPPERS.get(str(model_type), str(model_type))


def _config_text(
    text: ConfigFields, outside: ConfigFields, kind: _ConfigKind, sampling: dict[str, object]
) -> Gemma4Config:
    packed = read_packed_rule(text, outside)
    tied = [_config_tied(fields, packed is not None) for fields in (text, outside)]
    text.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    text.one_of("attention_bias", (False,), False)
    # "vision" lets pictures see themselves whole; text stays causal.
    text.one_of("use_bidirectional_attention", (None, "vision"), kind.bidirectional)
    vocabulary = text.whole("vocab_size", 262_144)
    layers = _config_layers(text)
    sliding_theta, full_theta, full_rotated = _config_rope(text, layers)
    per_layer, table_rows = _config_per_layer(text, kind, vocabulary)
    experts, experts_used, expert_width = _config_experts(text, kind)
    softcap = 0.0
    if text.value("final_logit_softcapping") is not None:
        softcap = text.number("final_logit_softcapping")
    return Gemma4Config(
        hidden=text.whole("hidden_size", 2304),
        vocabulary=vocabulary,
        layers=layers,
        window=text.whole("sliding_window", kind.window),
        positions=text.whole("max_position_embeddings", kind.positions),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        softcap=softcap,
        sliding_theta=sliding_theta,
        full_theta=full_theta,
        full_rotated=full_rotated,
        per_layer=per_layer,
        per_layer_vocabulary=table_rows,
        experts=experts,
        experts_used=experts_used,
        expert_intermediate=expert_width,
        stored_dtype=_config_dtype(text, outside),
        bos=text.token("bos_token_id", 2),
        eos=_config_ends(text, outside, sampling),
        pad=text.token("pad_token_id", 0),
        packed=packed,
        own_head=not all(tied),
    )


def _config_tied(fields: ConfigFields, packed: bool) -> bool:
    """Whether the head is the embedding; these rules may stand in either half.

    Tools that pack a model untie it first: there a head of its own is read, and has to be equal.
    """
    fields.one_of("is_encoder_decoder", (False,), False)
    allowed = (True, False) if packed else (True,)
    return bool(fields.one_of("tie_word_embeddings", allowed, True))


def _config_architectures(outside: ConfigFields) -> None:
    listed = outside.value("architectures")
    for name in listed if isinstance(listed, list) else [listed]:
        if name is not None and name not in _CONFIG_ARCHITECTURES:
            known = ", ".join(_CONFIG_ARCHITECTURES)
            raise outside.refused("architectures", f"known are {known}")


def _config_dtype(text: ConfigFields, outside: ConfigFields) -> str:
    """`dtype`, or `torch_dtype` as older files say. The whole's decides: it is what was saved."""
    found: str | None = None
    for fields in (text, outside):
        for key in ("torch_dtype", "dtype"):
            if fields.value(key) is not None:
                found = str(fields.one_of(key, ("bfloat16", "float32", "float16")))
    if found is None:
        raise ConfigRefused("config.json: dtype is missing")
    return found


def _config_ends(
    text: ConfigFields, outside: ConfigFields, sampling: dict[str, object]
) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json's, else the whole's, else the text's.

    All three are read, so that a wrong one is refused wherever it stands.
    """
    chosen: tuple[int, ...] = (1,)
    for fields in (text, outside, ConfigFields("generation_config.json", sampling)):
        value = fields.value("eos_token_id")
        if value is None:
            continue
        listed: list[Any] = value if isinstance(value, list) else [value]
        if not listed or any(type(token) is not int or token < 0 for token in listed):
            raise fields.refused("eos_token_id", "it has to be a token's id or a list of them")
        chosen = tuple(listed)
    return chosen


def _config_layers(text: ConfigFields) -> tuple[LayerConfig, ...]:
    """The layers. The last `num_kv_shared_layers` read the last owner of their own kind."""
    kinds = _config_layer_types(text)
    owners = len(kinds) - text.whole("num_kv_shared_layers", 0, least=0)
    if owners < 1 or set(kinds[owners:]) - set(kinds[:owners]):
        raise text.refused("num_kv_shared_layers", "some layer reads keys that none before it owns")
    k_eq_v = text.flag("attention_k_eq_v")
    heads = text.whole("num_attention_heads", 8)
    shapes = _config_head_shapes(text, kinds, k_eq_v)
    for head_dim, kv_heads in shapes.values():
        if heads % kv_heads or head_dim % 2:
            raise text.refused(
                "num_attention_heads",
                f"num_key_value_heads = {kv_heads} with head_dim = {head_dim} do not fit",
            )
    intermediate = text.whole("intermediate_size", 9216)
    wide = 2 if text.flag("use_double_wide_mlp") else 1
    layers = []
    for index, kind in enumerate(kinds):
        own = index < owners
        last_owner = max(i for i in range(owners) if kinds[i] == kind)
        layers.append(
            LayerConfig(
                index=index,
                sliding=kind == _CONFIG_SLIDING,
                source=index if own else last_owner,
                heads=heads,
                kv_heads=shapes[kind][1],
                head_dim=shapes[kind][0],
                intermediate=intermediate * (1 if own else wide),
                k_is_v=own and k_eq_v and kind == _CONFIG_FULL,
            )
        )
    return tuple(layers)


def _config_layer_types(text: ConfigFields) -> list[str]:
    """The kind of each layer: five sliding, one full where the file says none; the last is full."""
    count = text.whole("num_hidden_layers", 30)
    if count > _CONFIG_MOST_LAYERS:
        raise text.refused("num_hidden_layers", f"no model has over {_CONFIG_MOST_LAYERS}")
    listed = text.value("layer_types")
    if listed is None:
        listed = [_CONFIG_SLIDING if (i + 1) % 6 else _CONFIG_FULL for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count:
        raise text.refused("layer_types", f"it has to list num_hidden_layers = {count}")
    for kind in listed:
        if kind not in (_CONFIG_SLIDING, _CONFIG_FULL):
            raise text.refused("layer_types", f"{kind!r} is no known kind of layer")
    return [*listed[:-1], _CONFIG_FULL]


def _config_head_shapes(
    text: ConfigFields, kinds: Sequence[str], k_eq_v: bool
) -> dict[str, tuple[int, int]]:
    """(width of a head, number of key heads) of each kind of layer, from either spelling.

    transformers reads `global_head_dim` and `num_global_key_value_heads` (the latter only where
    keys double as values) and writes `per_layer_config`, which then decides. The rotation and the
    sharing need one shape for all layers of a kind.
    """
    plain = (text.whole("head_dim", 256), text.whole("num_key_value_heads", 4))
    legacy = (text.whole("global_head_dim", 512), plain[1])
    global_heads = text.value("num_global_key_value_heads")
    if global_heads is not None and k_eq_v:
        legacy = (legacy[0], text.whole("num_global_key_value_heads"))
    if not text.has("per_layer_config"):
        return {_CONFIG_SLIDING: plain, _CONFIG_FULL: legacy}
    shapes = [plain] * len(kinds)
    overrides = text.child("per_layer_config")
    for key in overrides.keys():
        if not (key.isdecimal() and int(key) < len(kinds)):
            raise overrides.refused(key, f"it names none of {len(kinds)} layers")
        layer = overrides.child(key)
        shapes[int(key)] = (
            layer.whole("head_dim", plain[0]),
            layer.whole("num_key_value_heads", plain[1]),
        )
        layer.refuse_rest(())
    found: dict[str, tuple[int, int]] = {}
    for kind, shape in zip(kinds, shapes, strict=True):
        if found.setdefault(kind, shape) != shape:
            raise text.refused("per_layer_config", f"it gives {kind} layers different heads")
    said_twice = text.has("global_head_dim") or global_heads is not None
    if said_twice and found[_CONFIG_FULL] != legacy:
        raise text.refused("per_layer_config", "global_head_dim or its heads say otherwise")
    return found


def _config_rope(text: ConfigFields, layers: Sequence[LayerConfig]) -> tuple[float, float, float]:
    """(theta of sliding layers, theta of full ones, share of a full head that is rotated)."""
    if text.value("rope_parameters") is None:
        return 10_000.0, 1_000_000.0, 0.25
    ropes = text.child("rope_parameters")
    sliding = (10_000.0, 1.0)
    if ropes.has(_CONFIG_SLIDING) or any(layer.sliding for layer in layers):
        sliding = _config_rope_entry(ropes.child(_CONFIG_SLIDING))
        if sliding[1] != 1.0:
            raise ropes.refused(_CONFIG_SLIDING, "sliding layers rotate whole heads here")
    full = _config_rope_entry(ropes.child(_CONFIG_FULL))
    ropes.refuse_rest(())
    return sliding[0], *full


def _config_rope_entry(entry: ConfigFields) -> tuple[float, float]:
    """(theta, rotated share). "default" is "proportional" over the whole head, without a factor.

    Source: transformers 5.24, modeling_rope_utils, _compute_proportional_rope_parameters.
    """
    rope_type = entry.one_of("rope_type", ("default", "proportional"))
    share = entry.number("partial_rotary_factor", 1.0)
    if share > 1 or (rope_type == "default" and share != 1):
        raise entry.refused("partial_rotary_factor", "it has to be 1, or less if proportional")
    if entry.number("factor", 1.0) != 1:
        raise entry.refused("factor", "this engine does not stretch positions")
    theta = entry.number("rope_theta")
    entry.refuse_rest(())
    return theta, share


def _config_per_layer(text: ConfigFields, kind: _ConfigKind, vocabulary: int) -> tuple[int, int]:
    """(width of a per-layer embedding, rows of its table); (0, 0) without one."""
    width = text.whole("hidden_size_per_layer_input", kind.per_layer, least=0)
    rows = text.whole("vocab_size_per_layer_input", 262_144, least=0)
    if not width:
        return 0, 0
    if not kind.rich:
        raise text.refused("hidden_size_per_layer_input", "this kind of Gemma 4 has none")
    if rows < vocabulary:
        raise text.refused("vocab_size_per_layer_input", f"{vocabulary} tokens need a row each")
    return width, rows


def _config_experts(text: ConfigFields, kind: _ConfigKind) -> tuple[int, int, int]:
    """(experts, experts of a token, width of one); zeros for a dense model, whatever it lists."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not text.flag("enable_moe_block"):
        for name in names:
            text.value(name)
        return 0, 0, 0
    if not kind.rich:
        raise text.refused("enable_moe_block", "this kind of Gemma 4 has no experts")
    experts, used, width = (text.whole(name) for name in names)
    if used > experts:
        raise text.refused("top_k_experts", f"there are {experts} experts")
    return experts, used, width


# ── gemma4 / safetensors_header ───────────────────────────────────────────────────────────────────
# Reads what one safetensors file says it holds, and whether its bytes can be that.
#
# Knows no model: names are any, values are never looked at.
#
# Format: https://github.com/huggingface/safetensors, "Format": 8 bytes of little-endian length N, N
# bytes of JSON, then the tensors' bytes without holes.

# Bytes of an element. Only the floats are read; the others are known so that towers may use them.
_HEADER_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # bytes; the format's own bound


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `begin` is its first byte in the file, `size` its bytes."""

    path: Path
    element: str
    shape: tuple[int, ...]
    begin: int
    size: int


def safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the file at `path`, by name.

    Raises WeightsRefused where the file is cut off, where tensors overlap or leave holes, and where
    a shape does not fit its bytes.
    """
    try:
        with path.open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(0)
            opening = file.read(8)
            length = struct.unpack("<Q", opening)[0] if len(opening) == 8 else whole + 1
            if length > min(_HEADER_LIMIT, whole - 8):
                raise WeightsRefused(f"{path.name} is cut off or no safetensors file")
            text = file.read(length)
    except OSError as error:
        raise WeightsRefused(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        entries = json_object(text, f"the header of {path.name}")
    except ModelRefused as refusal:
        raise WeightsRefused(str(refusal)) from None
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _header_tensor(path, start, name, entry) for name, entry in entries.items()}
    _header_tiles(path, tensors, start, whole)
    return tensors


def _header_tensor(path: Path, start: int, name: str, entry: object) -> StoredTensor:
    where = f"{path.name} describes {name[:200]!r} as {shown_value(entry)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightsRefused(f"{where}: not as the format has it")
    element, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(element, str) or element not in _HEADER_ELEMENT_BYTES:
        raise WeightsRefused(f"{where}: the element type is unknown")
    if not (_header_counts(shape) and _header_counts(offsets) and len(offsets) == 2):
        raise WeightsRefused(f"{where}: shape and offsets have to be lists of counts")
    begin, end = offsets
    if end - begin != math.prod(shape) * _HEADER_ELEMENT_BYTES[element]:
        raise WeightsRefused(f"{where}: that shape takes other bytes")
    return StoredTensor(path, element, tuple(shape), start + begin, end - begin)


def _header_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _header_tiles(path: Path, tensors: dict[str, StoredTensor], start: int, whole: int) -> None:
    """Refuse a file whose tensors do not lie end to end from the header to the file's end."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].size)):
        if tensor.begin != at:
            fault = "overlaps what lies before it" if tensor.begin < at else "leaves a hole"
            raise WeightsRefused(f"{path.name}: {name[:200]!r} {fault}")
        at += tensor.size
    if at > whole:
        raise WeightsRefused(f"{path.name} lacks its last {at - whole} bytes")
    if at < whole:
        raise WeightsRefused(f"{path.name} has {whole - at} bytes too many")


# ── gemma4 / packed_tensors ───────────────────────────────────────────────────────────────────────
# Matrices that a checkpoint stores as packed 4-bit integers: where they lie, what they stand for.
#
# Knows no files but by the places of their tensors, and no device.
#
# Format: compressed-tensors 0.20.1, compressors/pack_quantized: for each matrix [n, k] of a module
# X
# `X.weight_packed` int32 [n, k/8], eight integers plus 8 in each word, the first in the lowest
# bits;
# `X.weight_scale` bf16 [n, k/group]; `X.weight_shape` int64 [2], n and k. A weight is its integer
# times its group's scale, rounded to bf16 (quantization/lifecycle/forward_helpers.py).

PACKED_IN_WORD = 8
PACKED_OFFSET = 8  # what is added to an integer of -8..7, so that none is negative
_PACKED_ENDING = ".weight_packed"
# Beside the words: ending, element type.
_PACKED_PARTS = ((".weight_scale", "BF16"), (".weight_shape", "I64"))


@dataclass(frozen=True)
class PackedPlace:
    """Where a packed matrix lies. `shape` is [n, k] of what it stands for, by its words."""

    words: StoredTensor
    scales: StoredTensor
    stated: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[0], self.words.shape[1] * PACKED_IN_WORD

    @property
    def size(self) -> int:
        """Bytes."""
        return self.words.size + self.scales.size + self.stated.size


class PackedMatrix(NamedTuple):
    """A packed matrix as views of its file: words uint32 [n, k/8], scales bf16 [n, k/group]."""

    words: np.ndarray[Any, np.dtype[Any]]
    scales: np.ndarray[Any, np.dtype[Any]]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def packed_places(
    found: Mapping[str, StoredTensor], rule: PackedRule | None
) -> tuple[dict[str, StoredTensor], dict[str, PackedPlace]]:
    """(tensors that lie plainly, packed matrices under the names that they would have plainly).

    Raises WeightsRefused that names a packed matrix whose parts do not fit each other.
    """
    plain, packed = dict(found), {}
    for name, words in found.items():
        if not name.endswith(_PACKED_ENDING):
            continue
        module = name.removesuffix(_PACKED_ENDING)
        if rule is None:
            raise WeightsRefused(f"{name!r} is packed, and config.json has no quantization_config")
        if module + ".weight" in found:
            raise WeightsRefused(f"{module + '.weight'!r} is stored packed and plainly")
        if words.element != "I32" or len(words.shape) != 2:
            raise WeightsRefused(f"{name!r} has to be a matrix of I32")
        rows, columns = words.shape[0], words.shape[1] * PACKED_IN_WORD
        if columns % rule.group:
            raise WeightsRefused(f"{name!r}: {columns} columns are no whole groups of {rule.group}")
        parts = []
        for (ending, element), shape in zip(
            _PACKED_PARTS, ((rows, columns // rule.group), (2,)), strict=True
        ):
            part = found.get(module + ending)
            if part is None:
                raise WeightsRefused(f"{module + ending!r} is missing beside {name!r}")
            if part.element != element or part.shape != shape:
                raise WeightsRefused(
                    f"{module + ending!r} is {part.element} {list(part.shape)}, beside {name!r} it"
                    f" has to be {element} {list(shape)}"
                )
            parts.append(part)
            del plain[module + ending]
        del plain[name]
        packed[module + ".weight"] = PackedPlace(words, *parts)
    return plain, packed


def is_packed_by(rule: PackedRule, name: str) -> bool:
    """Whether the matrix that would plainly be stored as `name` is one that the config packs."""
    module = name.removesuffix(".weight")
    return _packed_fits(rule.targets, module) and not _packed_fits(rule.ignored, module)


def unpacked_matrix(matrix: PackedMatrix) -> np.ndarray[Any, np.dtype[Any]]:
    """What it stands for: [n, k] bf16, bit for bit as compressed-tensors unpacks it."""
    rows, groups = matrix.scales.shape
    pairs = np.arange(256)  # the two integers of each byte, the lower half first
    integers = np.stack([pairs & 15, pairs >> 4], axis=-1).astype(np.float32) - PACKED_OFFSET
    # Integers below 16 times 8 bits of a scale are exact in f32: bf16 rounds once.
    values = integers[matrix.words.astype("<u4", copy=False).view(np.uint8)]
    values = values.reshape(rows, groups, -1)
    values *= matrix.scales.astype(np.float32)[:, :, None]
    unpacked: np.ndarray[Any, np.dtype[Any]] = values.reshape(rows, -1).astype(matrix.scales.dtype)
    return unpacked


def _packed_fits(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of them names the module, which is a Linear."""
    for pattern in patterns:
        if pattern.startswith("re:") and re.match(pattern[3:], module):
            return True
        if pattern in (module, "Linear"):
            return True
    return False


# ── gemma4 / tensor_names ─────────────────────────────────────────────────────────────────────────
# The tensors of a Gemma 4's text half by name and shape, and which stored ones they are.
#
# Knows no files, no element types and no values.
#
# Names and shapes: transformers 5.24, modeling_gemma4.py, as its save_pretrained writes them.

TensorShape = tuple[int, ...]

EMBEDDING_TENSOR = "embed_tokens.weight"
TABLE_TENSOR = "embed_tokens_per_layer.weight"
HEAD_TENSOR = "lm_head.weight"
# Around the text half: of the whole model, of a causal one, of the text model saved by itself.
WRAPPER_PREFIXES = ("model.language_model.", "model.", "")
# What stands beside the text half in a whole model; gemma4_unified has `vision_embedder`.
_TENSOR_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.") + (
    "vision_embedder.",
)


def model_tensors(config: Gemma4Config) -> dict[str, TensorShape]:
    """Every tensor that the forward pass reads, with its shape; matrices are [out, in].

    Names as they are behind the wrapper's prefix: `embed_tokens.weight`, `layers.3.mlp.…`.
    """
    tensors: dict[str, TensorShape] = {
        EMBEDDING_TENSOR: (config.vocabulary, config.hidden),
        "norm.weight": (config.hidden,),
    }
    if config.per_layer:
        packed = len(config.layers) * config.per_layer
        tensors[TABLE_TENSOR] = (config.per_layer_vocabulary, packed)
        tensors["per_layer_model_projection.weight"] = (packed, config.hidden)
        tensors["per_layer_projection_norm.weight"] = (config.per_layer,)
    for layer in config.layers:
        for name, shape in _tensor_layer(config, layer).items():
            tensors[f"layers.{layer.index}.{name}"] = shape
    return tensors


def is_linear_tensor(name: str, shape: TensorShape) -> bool:
    """Whether it is the matrix of what transformers calls a Linear; no table, no experts."""
    return len(shape) == 2 and name not in (EMBEDDING_TENSOR, TABLE_TENSOR, HEAD_TENSOR)


def match_tensors(config: Gemma4Config, stored: Mapping[str, TensorShape]) -> dict[str, str]:
    """{name in the model: name in the file}; a stored head stands under HEAD_TENSOR.

    Towers are passed over, and so are keys and values that a file holds for layers which read
    another layer's (transformers passes over them as well).
    Raises WeightsRefused that names a tensor which is missing, unknown or of another shape.
    """
    wanted = model_tensors(config)
    prefix = _tensor_prefix(stored)
    unread = _tensor_unread(config)
    found: dict[str, str] = {}
    for name, shape in stored.items():
        if _tensor_of_tower(name):
            continue
        bare = name.removeprefix(prefix)
        if name == HEAD_TENSOR:
            expected = wanted[EMBEDDING_TENSOR]
        elif name.startswith(prefix) and bare in wanted:
            expected = wanted[bare]
        elif name.startswith(prefix) and bare in unread:
            continue
        else:
            raise WeightsRefused(f"the tensor {name[:200]!r} is unknown: nothing would read it")
        if shape != expected:
            raise WeightsRefused(
                f"the tensor {name!r} has the shape {list(shape)}, the config asks for"
                f" {list(expected)}"
            )
        found[bare] = name
    missing = [name for name in wanted if name not in found]
    if missing:
        raise WeightsRefused(
            f"{len(missing)} of {len(wanted)} tensors are missing, {prefix + missing[0]!r} first"
        )
    return found


def _tensor_layer(config: Gemma4Config, layer: LayerConfig) -> dict[str, TensorShape]:
    """The tensors of one layer, without its number."""
    hidden, inner = config.hidden, layer.intermediate
    q_width = layer.heads * layer.head_dim
    kv_width = layer.kv_heads * layer.head_dim
    tensors: dict[str, TensorShape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (hidden, q_width),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
    }
    if layer.owner:
        tensors["self_attn.k_proj.weight"] = (kv_width, hidden)
        tensors["self_attn.k_norm.weight"] = (layer.head_dim,)
        if not layer.k_is_v:
            tensors["self_attn.v_proj.weight"] = (kv_width, hidden)
    if config.per_layer:
        tensors["per_layer_input_gate.weight"] = (config.per_layer, hidden)
        tensors["per_layer_projection.weight"] = (hidden, config.per_layer)
        tensors["post_per_layer_input_norm.weight"] = (hidden,)
    if config.experts:
        experts, width = config.experts, config.expert_intermediate
        tensors["router.proj.weight"] = (experts, hidden)
        tensors["router.scale"] = (hidden,)
        tensors["router.per_expert_scale"] = (experts,)
        tensors["experts.gate_up_proj"] = (experts, 2 * width, hidden)
        tensors["experts.down_proj"] = (experts, hidden, width)
        tensors["post_feedforward_layernorm_1.weight"] = (hidden,)
        tensors["pre_feedforward_layernorm_2.weight"] = (hidden,)
        tensors["post_feedforward_layernorm_2.weight"] = (hidden,)
    return tensors


def _tensor_prefix(stored: Mapping[str, TensorShape]) -> str:
    """The one prefix under which the embedding lies."""
    found = [prefix for prefix in WRAPPER_PREFIXES if prefix + EMBEDDING_TENSOR in stored]
    if len(found) != 1:
        names = ", ".join(prefix + EMBEDDING_TENSOR for prefix in WRAPPER_PREFIXES)
        raise WeightsRefused(f"{len(found)} text models are in the weights: one of {names} is read")
    return found[0]


def _tensor_of_tower(name: str) -> bool:
    """Whether it belongs to what sees or hears."""
    return name.removeprefix("model.").startswith(_TENSOR_TOWERS)


def _tensor_unread(config: Gemma4Config) -> frozenset[str]:
    """What a file may hold for layers without keys of their own, though nothing reads it.

    transformers 5.24, Gemma4TextModel: `_keys_to_ignore_on_load_unexpected`.
    """
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return frozenset(
        f"layers.{layer.index}.self_attn.{part}.weight"
        for layer in config.layers
        if not layer.owner
        for part in parts
    )


# ── gemma4 / partition ────────────────────────────────────────────────────────────────────────────
# Which part of a Gemma 4 each of several devices holds, when they serve one copy of it together.
#
# Knows no devices and no array library. As in Megatron-LM (Shoeybi et al. 2019, "Megatron-LM"):
# query
# heads and the MLP's inner rows are split, so that a layer's devices have to add up their answers
# twice, after attention and after the MLP. The vocabulary is split; of the experts each device has
# some. What is small is whole everywhere: norms, the router, the per-layer gates and projections,
# and
# key heads that do not come out even. E2B has one key head.

_PARTITION_HEADS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
# By the end of a tensor's name: the axis that is split. Matrices are [out, in], experts' [e, …].
_PARTITION_AXES = {
    "self_attn.q_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
    "experts.gate_up_proj": 0,
    "experts.down_proj": 0,
}


def refuse_uneven(config: Gemma4Config, ways: int) -> None:
    """Raises ModelRefused that names what of the model does not come out even in `ways` parts."""
    sizes = {"entries of the vocabulary": config.vocabulary}
    if config.per_layer:
        sizes["entries of the per-layer table"] = config.per_layer_vocabulary
    if config.experts:
        sizes["experts"] = config.experts
    for layer in config.layers:
        sizes[f"query heads of layer {layer.index}"] = layer.heads
        sizes[f"MLP rows of layer {layer.index}"] = layer.intermediate
    for what, size in sizes.items():
        if size % ways:
            raise ModelRefused(
                f"tensor parallel: the {size} {what} do not divide among {ways} devices"
            )


def keys_are_split(layer: LayerConfig, ways: int) -> bool:
    """Whether each device has its own key heads of that layer, and not all of them."""
    return layer.kv_heads % ways == 0


def split_axis(config: Gemma4Config, name: str, ways: int) -> int | None:
    """The axis along which the tensor `name` is split; None where it is whole everywhere."""
    if name in (EMBEDDING_TENSOR, TABLE_TENSOR):
        return 0
    if not name.startswith("layers."):
        return None
    _, index, rest = name.split(".", 2)
    if rest in _PARTITION_HEADS:
        return 0 if keys_are_split(config.layers[int(index)], ways) else None
    return _PARTITION_AXES.get(rest)


def device_part(config: Gemma4Config, ways: int) -> Gemma4Config:
    """What one of `ways` devices holds, as a model of that size: for reckoning, not for running.

    Its experts are told as narrower ones, for all devices know all experts' router. Logits, and
    what sampling remembers, have the whole vocabulary on every device.
    """
    layers = tuple(
        replace(
            layer,
            heads=layer.heads // ways,
            kv_heads=layer.kv_heads // ways if keys_are_split(layer, ways) else layer.kv_heads,
            intermediate=layer.intermediate // ways,
        )
        for layer in config.layers
    )
    return replace(
        config,
        layers=layers,
        vocabulary=config.vocabulary // ways,
        per_layer_vocabulary=config.per_layer_vocabulary // ways,
        expert_intermediate=config.expert_intermediate // ways,
    )


# ── gemma4 / weight_files ─────────────────────────────────────────────────────────────────────────
# Opens a model folder's weights: the text half's tensors as views of the mapped files.
#
# Knows no device and copies nothing: a page is read from disk when somebody looks at it.

WeightArray = np.ndarray[Any, np.dtype[Any]]
WeightPlace = StoredTensor | PackedPlace

_WEIGHTS_FILE = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_WEIGHTS_COMPARED = 1 << 24  # bytes at once: what a comparison may take for itself
_WEIGHTS_FLOATS = ("BF16", "F32", "F16")


def stored_tensors(folder: Path, config: Gemma4Config) -> dict[str, WeightPlace]:
    """Where each of the text half's tensors lies, by its name in the model. Reads headers only.

    One file, or several with an index; each in any of bf16, f16 and f32, and matrices packed as
    and where the config says.
    Raises WeightsRefused that names the file or the tensor.
    """
    try:
        found = _weights_headers(folder)
    except WeightsRefused:
        raise
    except ModelRefused as refusal:
        raise WeightsRefused(str(refusal)) from None
    plain, packed = packed_places(found, config.packed)
    places: dict[str, WeightPlace] = {**plain, **packed}
    names = match_tensors(config, {name: place.shape for name, place in places.items()})
    if config.own_head and HEAD_TENSOR not in names:
        raise WeightsRefused(
            f"{HEAD_TENSOR} is missing: tie_word_embeddings = False in config.json"
        )
    for bare, name in names.items():
        if name in packed and not is_linear_tensor(bare, packed[name].shape):
            raise WeightsRefused(f"{name!r} is packed, which this engine does not read")
        if config.packed and bare != HEAD_TENSOR and is_linear_tensor(bare, places[name].shape):
            if is_packed_by(config.packed, name) != (name in packed):
                stored, meant = ("plain", "packed") if name in plain else ("packed", "plain")
                raise WeightsRefused(f"{name!r} is stored {stored}, config.json says {meant}")
        if name in plain and plain[name].element not in _WEIGHTS_FLOATS:
            raise WeightsRefused(
                f"the tensor {name!r} has elements of type {plain[name].element}; this engine"
                f" reads {', '.join(_WEIGHTS_FLOATS)}"
            )
    return {bare: places[name] for bare, name in names.items()}


def open_weights(folder: Path, config: Gemma4Config) -> Mapping[str, WeightArray | PackedMatrix]:
    """The text half's tensors by name (`layers.3.self_attn.q_proj.weight`), as they are stored.

    Read-only views of the mapped files, in the element type of the file (bf16 as
    ml_dtypes.bfloat16). The format aligns tensors to 8 bytes at best, so a view may not start
    where a device wants it. Files stay mapped as long as a view of them lives.
    A stored head is passed over where it is the embedding byte for byte, and refused otherwise:
    these models tie them, and transformers 5.24 unties what a file holds twice.
    Raises WeightsRefused.
    """
    places = stored_tensors(folder, config)
    mapped: dict[Path, memoryview] = {}

    def view(place: StoredTensor) -> WeightArray:
        if place.path not in mapped:
            mapped[place.path] = _weights_mapped(place.path)
        return _weights_view(mapped[place.path], place)

    opened: dict[str, WeightArray | PackedMatrix] = {}
    for name, place in places.items():
        if isinstance(place, StoredTensor):
            opened[name] = view(place)
            continue
        if tuple(view(place.stated)) != place.shape:
            raise WeightsRefused(f"{name} is {list(place.shape)}, beside it stands another shape")
        opened[name] = PackedMatrix(view(place.words), view(place.scales))
    head = opened.pop(HEAD_TENSOR, None)
    if head is not None and not _weights_equal(head, opened[EMBEDDING_TENSOR]):
        raise WeightsRefused(f"{HEAD_TENSOR} is another matrix than {EMBEDDING_TENSOR}")
    return opened


def _weights_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of all files, by their stored names."""
    if not has_model_file(folder, _WEIGHTS_INDEX):
        return safetensors_header(model_file(folder, _WEIGHTS_FILE))
    if has_model_file(folder, _WEIGHTS_FILE):
        raise WeightsRefused(f"{folder} has {_WEIGHTS_FILE} and an index: remove what is not meant")
    listed = folder_json(folder, _WEIGHTS_INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise WeightsRefused(f"{_WEIGHTS_INDEX} has no weight_map")
    found: dict[str, StoredTensor] = {}
    for name in {str(file): None for file in listed.values()}:
        if not name.endswith(".safetensors"):
            raise WeightsRefused(f"{_WEIGHTS_INDEX} names {name[:200]!r}: no safetensors file")
        here = safetensors_header(model_file(folder, name))
        promised = {tensor for tensor, where in listed.items() if where == name}
        odd = sorted(promised ^ set(here))
        if odd:
            raise WeightsRefused(f"{_WEIGHTS_INDEX} and {name} disagree over {odd[0][:200]!r}")
        found |= here
    return found


def _weights_mapped(path: Path) -> memoryview:
    """The whole file, read-only."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"{path.name} cannot be mapped: {error}") from None


def _weights_view(mapped: memoryview, place: StoredTensor) -> WeightArray:
    """The tensor's bytes as an array of its own element type and shape."""
    import ml_dtypes

    kinds: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}
    kinds |= {"I32": np.uint32, "I64": np.int64}  # packed words have no sign
    kind = np.dtype(kinds[place.element])
    elements = place.size // kind.itemsize
    return np.frombuffer(mapped, kind, elements, place.begin).reshape(place.shape)


def _weights_equal(one: WeightArray | PackedMatrix, other: WeightArray | PackedMatrix) -> bool:
    """Whether both are arrays that hold the same bytes, looked at piece by piece."""
    if isinstance(one, PackedMatrix) or isinstance(other, PackedMatrix) or one.dtype != other.dtype:
        return False
    first, second = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(first[at : at + _WEIGHTS_COMPARED], second[at : at + _WEIGHTS_COMPARED])
        for at in range(0, first.size, _WEIGHTS_COMPARED)
    )


# ── gemma4 / weight_forms ─────────────────────────────────────────────────────────────────────────
# In which form each tensor is served: plain, as packed 4-bit integers, or as 8-bit integers.
#
# Knows no files, no values and no device.

WeightForm = Literal["plain", "packed", "int8"]
QUANTIZATIONS = ("none", "int8")
UNPACKINGS = ("step", "load")
_FORM_SCALE_BYTES = {"packed": 2, "int8": 4}  # bf16 as stored; f32 for the scale of a row


def weight_forms(
    config: Gemma4Config, packed: Collection[str], quantization: str = "none", unpack: str = "step"
) -> dict[str, WeightForm]:
    """The form of each tensor by name. `packed`: those that are stored so.

    int8 is for the matrices of attention, MLPs, experts and per-layer gates. The embedding, which
    is the head, stays plain: its error would be the logits' own. So do the table, of which a step
    reads a few rows, and what is small: norms, the router, the per-layer projection.
    Raises ModelRefused where int8 is asked for and the checkpoint is packed already.
    """
    if config.packed and quantization != "none":
        raise ModelRefused(
            f"the checkpoint's matrices are packed 4-bit integers: {quantization} is made of bf16"
            " or f32 ones"
        )
    forms: dict[str, WeightForm] = {}
    for name in model_tensors(config):
        if name in packed and unpack == "step":
            forms[name] = "packed"
        else:
            forms[name] = "int8" if quantization == "int8" and is_int8_tensor(name) else "plain"
    return forms


def is_int8_tensor(name: str) -> bool:
    """Whether quantising makes integers of it: the matrices of which a layer is made."""
    if not name.startswith("layers.") or "norm" in name or ".router." in name:
        return False
    return name.endswith(("_proj.weight", "_proj", "_gate.weight", "_projection.weight"))


def stored_bytes(config: Gemma4Config, shape: TensorShape, form: WeightForm, element: int) -> int:
    """Bytes of a tensor in that form; `element` is the size of a plain element."""
    elements = math.prod(shape)
    if form == "plain":
        return elements * element
    group = shape[-1]
    if form == "packed" and config.packed:
        group = config.packed.group
    integers = elements // 2 if form == "packed" else elements
    return integers + elements // group * _FORM_SCALE_BYTES[form]


def forms_title(forms: Mapping[str, WeightForm], dtype: str) -> str:
    """The forms in a few words for people."""
    names = {"packed": "packed 4-bit integers", "int8": "8-bit integers"}
    found = [words for form, words in names.items() if form in forms.values()]
    return " and ".join([*found, dtype])


# ── gemma4 / sizes ────────────────────────────────────────────────────────────────────────────────
# What a Gemma 4 takes: bytes of weights and caches, bytes and operations of a step, and its bound.
#
# Knows no files, no device and no engine's code. Bytes are bytes; an operation is one
# multiplication
# or one addition, so that a weight costs two of them per token.

DTYPE_BYTES = {"f32": 4, "bf16": 2}
KV_BYTES = DTYPE_BYTES | {"int8": 1}  # of one number of keys and values
# The order in which people read them.
_SIZES_GROUPS = (
    *("embedding", "per-layer table", "per-layer projection", "per-layer gates"),
    *("attention", "MLP", "router", "experts", "norms"),
)
_SIZES_SCALES = {"int8": 4}  # bytes beside the numbers of one key or value of one head
_SIZES_F32 = 4  # sums, norms, softmax and logits are f32 whatever the weights are
_SIZES_KEY_BLOCK = 256  # keys that attention takes at once, as forge.engines.jax.attention does
_SIZES_UNPACKED = 512  # inputs that a CPU unpacks at once, as forge.engines.jax.quantised does


@dataclass(frozen=True)
class DecodeCost:
    """One decode step of some streams: bytes it reads, and operations.

    weights: every matrix once, of the experts those that are expected to be taken. gathered: the
    rows of the two embedding tables. cache: keys and values of all layers, the sharing ones too.
    """

    weights: float
    gathered: int
    cache: int
    flops: int

    @property
    def read(self) -> float:
        """All bytes that have to come from memory."""
        return self.weights + self.gathered + self.cache


def parameter_groups(config: Gemma4Config) -> dict[str, int]:
    """Elements of the weights by group; the head is the embedding and counts once.

    Beside transformers' parameters this counts the layer scalars, which are buffers there.
    """
    counted = dict.fromkeys(_SIZES_GROUPS, 0)
    for name, shape in model_tensors(config).items():
        counted[_sizes_group(name)] += math.prod(shape)
    return {group: elements for group, elements in counted.items() if elements}


def weight_group_bytes(
    config: Gemma4Config, element_bytes: int, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, int]:
    """Bytes of the weights by group, each tensor in its form; without `forms` all are plain."""
    counted = dict.fromkeys(_SIZES_GROUPS, 0)
    for name, shape in model_tensors(config).items():
        form = forms[name] if forms else "plain"
        counted[_sizes_group(name)] += stored_bytes(config, shape, form, element_bytes)
    return {group: size for group, size in counted.items() if size}


def seen_tokens(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Tokens of `context` that a layer looks at, and that an owner keeps: the window at most."""
    return min(context, config.window) if layer.sliding else context


def cached_elements(config: Gemma4Config, context: int) -> dict[str, int]:
    """Elements of one slot's keys and values: rings of sliding owners, full length of full ones.

    Only owners keep any. An engine may round a length up to whole blocks.
    """
    kept = {"sliding": 0, "full": 0}
    for layer in config.layers:
        if layer.owner:
            kind = "sliding" if layer.sliding else "full"
            kept[kind] += _sizes_token(layer) * seen_tokens(config, layer, context)
    return kept


def cached_bytes(config: Gemma4Config, context: int, kv_dtype: str) -> dict[str, int]:
    """Bytes of one slot's keys and values, by kind as `cached_elements`; of int8 with scales."""
    kept = {"sliding": 0, "full": 0}
    for layer in config.layers:
        if layer.owner:
            kind = "sliding" if layer.sliding else "full"
            kept[kind] += _sizes_token_bytes(layer, kv_dtype) * seen_tokens(config, layer, context)
    return kept


def marks_bytes(config: Gemma4Config, slots: int) -> int:
    """What sampling keeps of each conversation: a mark and an int32 count per vocabulary entry."""
    return slots * config.vocabulary * 5


def decode_cost(
    config: Gemma4Config,
    element_bytes: int,
    streams: int,
    context: int,
    forms: Mapping[str, WeightForm] | None = None,
    *,
    kv_dtype: str | None = None,
) -> DecodeCost:
    """One step of `streams` conversations with `context` tokens each, all in one dispatch.

    Weights are read in their `forms`: a packed matrix is unpacked on its way. kv_dtype: of keys and
    values; None: their numbers have `element_bytes` too.
    Of E experts, `streams` independent choices of k take E * (1 - (1 - k/E)**streams).
    """
    groups = parameter_groups(config)
    stored = weight_group_bytes(config, element_bytes, forms)
    table = stored.pop("per-layer table", 0)
    experts = stored.pop("experts", 0)
    untouched = (1 - config.experts_used / config.experts) ** streams if experts else 0.0
    read = sum(stored.values()) + experts * (1 - untouched)
    row = config.hidden + (len(config.layers) * config.per_layer if table else 0)

    def token(layer: LayerConfig) -> int:
        if kv_dtype is None:
            return _sizes_token(layer) * element_bytes
        return _sizes_token_bytes(layer, kv_dtype)

    cache = sum(token(layer) * seen_tokens(config, layer, context) for layer in config.layers)
    matrices = groups["embedding"] + groups.get("per-layer projection", 0)
    matrices += sum(_sizes_layer_matrices(config, layer) for layer in config.layers)
    attention = sum(_sizes_attention(config, layer, context) for layer in config.layers)
    return DecodeCost(
        weights=read,
        gathered=streams * row * element_bytes,
        cache=streams * cache,
        flops=streams * (2 * matrices + attention),
    )


def prompt_flops(config: Gemma4Config, tokens: int) -> int:
    """Operations of taking a prompt of `tokens`, up to the first token of the answer.

    Layers that share keys, and the head, run for the last token alone: nothing reads what they
    would say of the others.
    """
    groups = parameter_groups(config)
    once = groups.get("per-layer projection", 0)
    owners = sum(_sizes_layer_matrices(config, layer) for layer in config.layers if layer.owner)
    sharing = sum(_sizes_layer_matrices(config, layer) for layer in config.layers) - owners
    attention = 0
    for layer in config.layers:
        if layer.owner:
            window = min(tokens, config.window) if layer.sliding else tokens
            # 1 + 2 + … up to the window, and the window from there on.
            pairs = window * (window + 1) // 2 + (tokens - window) * window
            attention += 4 * layer.heads * layer.head_dim * pairs
        else:
            attention += _sizes_attention(config, layer, tokens)
    last = sharing + groups["embedding"]
    return 2 * (tokens * (owners + once) + last) + attention


def temporary_bytes(
    config: Gemma4Config, chunk: int, slots: int, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, int]:
    """An estimate of what a dispatch needs beside weights and caches, by what it is for.

    A prompt's chunk: two copies of one layer's scores (a block of keys at a time), three of the
    widest MLP's inner rows, two of the per-layer inputs. A decode: three rows of logits a stream.
    With packed weights a block of the widest, unpacked. All f32. A compiler may need less or more;
    `make aot` says what some of them do.
    """
    unpacked = {}
    if forms and "packed" in forms.values():
        widest = max(
            min(shape[-1], _SIZES_UNPACKED) * shape[0]
            for name, shape in model_tensors(config).items()
            if forms[name] == "packed"
        )
        unpacked["unpacked weights"] = _SIZES_F32 * widest
    scores = max(layer.heads for layer in config.layers) * max(_SIZES_KEY_BLOCK, chunk)
    inner = max(layer.intermediate for layer in config.layers)
    return {
        "attention of a chunk": 2 * _SIZES_F32 * chunk * scores,
        "MLP of a chunk": 3 * _SIZES_F32 * chunk * inner,
        "per-layer inputs of a chunk": (
            2 * _SIZES_F32 * chunk * len(config.layers) * config.per_layer
        ),
        "logits of a decode": 3 * _SIZES_F32 * slots * config.vocabulary,
    } | unpacked


def bound_tokens_per_s(
    cost: DecodeCost, streams: int, bandwidth: float, flop_rate: float | None = None
) -> float:
    """Output tokens a second that no engine can exceed: all streams' together.

    bandwidth in bytes/s, flop_rate in operations/s (None: not known, memory alone bounds).
    """
    seconds = cost.read / bandwidth
    if flop_rate is not None:
        seconds = max(seconds, cost.flops / flop_rate)
    return streams / seconds


def _sizes_group(name: str) -> str:
    """The group of a tensor by its name."""
    if name == EMBEDDING_TENSOR:
        return "embedding"
    if name == TABLE_TENSOR:
        return "per-layer table"
    if name == "per_layer_model_projection.weight":
        return "per-layer projection"
    if ".per_layer_" in name:
        return "per-layer gates"
    for part, group in ((".mlp.", "MLP"), (".experts.", "experts"), (".router.", "router")):
        if part in name:
            return group
    return "attention" if "_proj.weight" in name else "norms"


def _sizes_token(layer: LayerConfig) -> int:
    """Elements of one token's keys and values in that layer."""
    return 2 * layer.kv_heads * layer.head_dim


def _sizes_token_bytes(layer: LayerConfig, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in that layer, with their scales."""
    scales = 2 * layer.kv_heads * _SIZES_SCALES.get(kv_dtype, 0)
    return _sizes_token(layer) * KV_BYTES[kv_dtype] + scales


def _sizes_attention(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Operations of one token's scores and sums: two products of two operations per element."""
    return 4 * layer.heads * layer.head_dim * seen_tokens(config, layer, context)


def _sizes_layer_matrices(config: Gemma4Config, layer: LayerConfig) -> int:
    """Elements of a layer's matrices that one token passes through."""
    prefix = f"layers.{layer.index}."
    total = 0
    for name, shape in model_tensors(config).items():
        if name.startswith(prefix) and len(shape) > 1:
            used = (config.experts_used, *shape[1:]) if ".experts." in name else shape
            total += math.prod(used)
    return total


# ── gemma4 / memory_need ──────────────────────────────────────────────────────────────────────────
# What serving takes of a device's memory, and the refusal of a start that would need more.
#
# Knows no device: how much there is, it is told.

_NEED_BLOCK = 256  # tokens: a shorter context is offered in whole blocks of keys


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of what is kept, and an estimate of what dispatches need for a while.

    `forms`: of each tensor by name. dtype "f32" or "bf16": of plain weights; kv_dtype that or
    "int8": of caches. `chunk`: most prompt tokens of one dispatch. `ways`: the devices of which
    each has a part; all is then of one of them, and `config` of its part.
    """

    config: Gemma4Config
    forms: Mapping[str, WeightForm]
    dtype: str
    kv_dtype: str
    slots: int
    context: int
    chunk: int
    ways: int = 1

    @property
    def element(self) -> int:
        """Bytes of a plain element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of the weights by group."""
        return weight_group_bytes(self.config, self.element, self.forms)

    @property
    def caches(self) -> dict[str, int]:
        """Bytes of all slots' keys and values, of sliding and of full layers."""
        kept = cached_bytes(self.config, self.context, self.kv_dtype)
        return {kind: self.slots * size for kind, size in kept.items()}

    @property
    def marks(self) -> int:
        """Bytes of what sampling remembers: the whole vocabulary on each device."""
        return self.ways * marks_bytes(self.config, self.slots)

    @property
    def temporaries(self) -> dict[str, int]:
        """Bytes that dispatches need for a while."""
        return temporary_bytes(self.config, min(self.chunk, self.context), self.slots, self.forms)

    @property
    def total(self) -> int:
        """Bytes of all of it, as if it were needed at once."""
        kept = sum(self.weights.values()) + sum(self.caches.values()) + self.marks
        return kept + sum(self.temporaries.values())


def memory_need(
    folder: Path,
    *,
    dtype: str,
    slots: int,
    context: int,
    chunk: int,
    kv_dtype: str = "auto",
    quantization: str = "none",
    unpack: str = "step",
    ways: int = 1,
) -> MemoryNeed:
    """What serving the model of `folder` would take, by its config and its weights' headers.

    Of each device, where it is split among `ways`. kv_dtype "auto" is `dtype`. Raises ModelRefused.
    """
    config = read_config(folder)
    places = stored_tensors(folder, config)
    packed = [name for name, place in places.items() if isinstance(place, PackedPlace)]
    forms = weight_forms(config, packed, quantization, unpack)
    part = device_part(config, ways)
    kept = dtype if kv_dtype == "auto" else kv_dtype
    return MemoryNeed(part, forms, dtype, kept, slots, context, chunk, ways)


def refuse_beyond(need: MemoryNeed, limit: int) -> None:
    """Raise ModelRefused where `need` is more than `limit` bytes: the sum, and what would fit."""
    if need.total <= limit:
        return
    parts = (
        (sum(need.weights.values()), "weights"),
        (sum(need.caches.values()), f"keys and values of {need.slots} slots of {need.context:,}"),
        (need.marks, "sampling"),
        (sum(need.temporaries.values()), "one dispatch"),
    )
    terms = " + ".join(f"{_need_gb(size)} {what}" for size, what in parts)
    raise ModelRefused(
        f"this needs {_need_gb(need.total)} GB of memory, {_need_gb(need.total - limit)} GB more"
        f" than the {_need_gb(limit)} GB that may be used: {terms}. {_need_advice(need, limit)}"
    )


def _need_advice(need: MemoryNeed, limit: int) -> str:
    """What would fit, changing one thing; the least of both where one alone does not do."""

    def most(high: int, made: Callable[[int], MemoryNeed]) -> int:
        """The most of 0..high with which it fits; 0 where not even 1 does."""
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if made(middle).total <= limit else (low, middle - 1)
        return low

    slots = most(need.slots, lambda n: replace(need, slots=n))
    blocks = most(need.context // _NEED_BLOCK, lambda n: replace(need, context=n * _NEED_BLOCK))
    ways = [f"--slots {slots}"] if slots else []
    if blocks:
        ways.append(f"--max-model-len {blocks * _NEED_BLOCK}")
    if ways:
        return f"It fits with {' or with '.join(ways)}"
    least = replace(need, slots=1, context=min(need.context, _NEED_BLOCK))
    if least.total <= limit:
        return f"It fits with --slots 1 --max-model-len {least.context}"
    return f"One slot of {least.context} tokens would still need {_need_gb(least.total)} GB"


def _need_gb(size: int) -> str:
    """Bytes in units of 10^9, with three figures behind the point."""
    return f"{size / 1e9:.3f}"


# ── gemma4 / explain ──────────────────────────────────────────────────────────────────────────────
# Says what serving a model folder would take, without loading its weights: `--explain`.
#
# Knows no device: how fast memory is, is given or measured on this machine's own.

_EXPLAIN_FIRST = 38  # characters of a row's name


@dataclass(frozen=True)
class _Explained:
    """What is asked: the memory that it takes, and how fast memory and compute are."""

    need: MemoryNeed
    stored: int
    bandwidth: float
    measured: bool
    flop_rate: float | None
    prefixes: int

    @property
    def tokens(self) -> int:
        """Tokens of a conversation that steps and prompts are reckoned for: half the context."""
        return max(1, self.need.context // 2)

    def step(self, streams: int) -> DecodeCost:
        """One decode step of that many conversations."""
        need = self.need
        return decode_cost(
            need.config, need.element, streams, self.tokens, need.forms, kv_dtype=need.kv_dtype
        )

    def bound(self, streams: int) -> float:
        """Tokens a second at most."""
        return bound_tokens_per_s(self.step(streams), streams, self.bandwidth, self.flop_rate)


def explain_text(
    folder: Path,
    *,
    dtype: str = "f32",
    slots: int = 4,
    context: int = 4096,
    chunk: int = 256,
    kv_dtype: str = "auto",
    prefix_cache_gb: float = 0.0,
    quantization: str = "none",
    unpack: str = "step",
    bandwidth_gb_s: float | None = None,
    gflop_s: float | None = None,
) -> str:
    """A table for people, and as its last line the same figures as one JSON object.

    Reads the config and the headers of the weights' files. dtype "f32" or "bf16": of weights and,
    where kv_dtype is "auto" and not "int8", of caches; quantization and unpack as `weight_forms`
    takes them. prefix_cache_gb is of the host's memory, and not in the total. bandwidth_gb_s None:
    this machine's memory is measured, which takes about a second. gflop_s None: the bound is the
    memory's alone.
    Raises ModelRefused, and ValueError for a dtype that is not known or no slots or context.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    if min(slots, context, chunk) < 1:
        raise ValueError(f"slots {slots}, context {context}, chunk {chunk}: all are at least 1")
    need = memory_need(
        folder,
        dtype=dtype,
        slots=slots,
        context=context,
        chunk=min(chunk, context),
        kv_dtype=kv_dtype,
        quantization=quantization,
        unpack=unpack,
    )
    asked = _Explained(
        need=need,
        stored=sum(place.size for place in stored_tensors(folder, need.config).values()),
        bandwidth=read_speed() if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        measured=bandwidth_gb_s is None,
        flop_rate=None if gflop_s is None else gflop_s * 1e9,
        prefixes=round(prefix_cache_gb * 1e9),
    )
    lines = [*_explain_memory(asked), "", *_explain_steps(asked)]
    return "\n".join([*lines, json.dumps(_explain_figures(asked))])


def _explain_memory(asked: _Explained) -> list[str]:
    """What lies in memory, and why."""
    need = asked.need
    config = need.config
    elements = parameter_groups(config)
    weights, caches = need.weights, need.caches
    form = "" if need.kv_dtype == need.dtype else f", {need.kv_dtype}"
    rows = [
        (f"weights as {forms_title(need.forms, need.dtype)}", "parameters", "bytes"),
        *((f"  {name}", f"{elements[name]:,}", f"{n:,}") for name, n in weights.items()),
        ("  together", f"{sum(elements.values()):,}", f"{sum(weights.values()):,}"),
        (),
        (f"kept for {need.slots} slots of {need.context:,}", "", "bytes"),
        (f"  rings of {config.window:,} tokens{form}", "", f"{caches['sliding']:,}"),
        (f"  full layers' keys and values{form}", "", f"{caches['full']:,}"),
        ("  sampling's marks and counts", "", f"{need.marks:,}"),
        (),
        (f"estimated for chunks of {need.chunk}", "", "bytes"),
        *((f"  {name}", "", f"{n:,}") for name, n in need.temporaries.items() if n),
        ("all of it", "", f"{need.total:,}"),
        ("beside it prompts' beginnings, at most", "", f"{asked.prefixes:,}"),
    ]
    lies = f"{asked.stored / 1e9:.3f} GB of text weights lie in the folder"
    return [_explain_model(config), lies, "", *(_explain_row(*row) for row in rows)]


def _explain_steps(asked: _Explained) -> list[str]:
    """What a step and a prompt cost, and the bound."""
    streams = sorted({1, asked.need.slots})
    steps = [asked.step(count) for count in streams]
    per_token = prompt_flops(asked.need.config, asked.tokens) / asked.tokens
    source = "measured now with all cores" if asked.measured else "as given"
    compute = "not given"
    if asked.flop_rate is not None:
        compute = f"{asked.flop_rate / 1e9:,.0f} GFLOP/s as given"
    rows = [
        (f"one decode step at {asked.tokens:,} tokens", *(f"{n} at once" for n in streams)),
        ("  bytes of weights read", *(f"{step.weights:,.0f}" for step in steps)),
        ("  bytes of table rows read", *(f"{step.gathered:,}" for step in steps)),
        ("  bytes of keys and values read", *(f"{step.cache:,}" for step in steps)),
        ("  operations", *(f"{step.flops:,.0f}" for step in steps)),
        ("  at most tokens/s", *(f"{asked.bound(count):.2f}" for count in streams)),
        (),
        ("a prompt of as many", "per token"),
        ("  operations", f"{per_token:,.0f}"),
        (),
    ]
    speeds = f"memory: {asked.bandwidth / 1e9:.1f} GB/s, {source}; compute: {compute}"
    return [*(_explain_row(*row) for row in rows), speeds]


def _explain_figures(asked: _Explained) -> dict[str, Any]:
    """The same for programs: bytes, tokens, operations, all for the whole of what is asked."""
    need = asked.need
    steps = {count: asked.step(count) for count in sorted({1, need.slots})}
    return {
        "dtype": need.dtype,
        "weights": forms_title(need.forms, need.dtype),
        "kv_dtype": need.kv_dtype,
        "slots": need.slots,
        "context": need.context,
        "chunk": need.chunk,
        "stored_bytes": asked.stored,
        "weights_bytes": need.weights,
        "kv_bytes": need.caches,
        "marks_bytes": need.marks,
        "temporary_bytes": need.temporaries,
        "total_bytes": need.total,
        "prefix_cache_bytes": asked.prefixes,
        "tokens": asked.tokens,
        "steps": [
            {
                "streams": count,
                "weights_read": round(step.weights),
                "rows_read": step.gathered,
                "kv_read": step.cache,
                "flops": round(step.flops),
                "bound_tokens_per_s": round(asked.bound(count), 3),
            }
            for count, step in steps.items()
        ],
        "prompt_flops": round(prompt_flops(need.config, asked.tokens)),
        "bandwidth_bytes_per_s": round(asked.bandwidth),
        "bandwidth_measured": asked.measured,
        "flop_per_s": asked.flop_rate,
    }


def _explain_model(config: Gemma4Config) -> str:
    """One line on the architecture."""
    sliding = sum(layer.sliding for layer in config.layers)
    owners = sum(layer.owner for layer in config.layers)
    parts = [
        f"Gemma 4, {len(config.layers)} layers: {sliding} sliding over {config.window:,} tokens",
        f"{len(config.layers) - sliding} full, {owners} own keys and values",
        f"hidden {config.hidden:,}, vocabulary {config.vocabulary:,}",
    ]
    if config.per_layer:
        parts.append(f"per-layer embeddings of {config.per_layer}")
    if config.experts:
        parts.append(f"{config.experts_used} of {config.experts} experts a token")
    return "; ".join(parts)


def _explain_row(name: str = "", *columns: str) -> str:
    return (name.ljust(_EXPLAIN_FIRST) + "".join(f"{cell:>18}" for cell in columns)).rstrip()


# ── jax / device_memory ───────────────────────────────────────────────────────────────────────────
# How much memory the default device has, as far as it says.
#
# Knows no model.


def device_memory_bytes() -> int | None:
    """Bytes that JAX may use of it; None where it does not say, as a CPU does not, or is not there.

    For a card this is the share that JAX takes for itself, three quarters unless told otherwise
    (XLA_PYTHON_CLIENT_MEM_FRACTION).
    """
    try:
        said = jax.local_devices()[0].memory_stats() or {}
    except RuntimeError:  # no device can be had: loading will say why
        return None
    limit = said.get("bytes_limit")
    return int(limit) if limit else None


# ── jax / kept_rows ───────────────────────────────────────────────────────────────────────────────
# Two forms in which keys and values are kept: plain numbers, and int8 with a scale for each row.
#
# Knows neither attention nor where in a cache a row lies. A row is one token's key or value in one
# head; its scale is its largest magnitude over 127, so that no number of it is off by more than
# half
# a scale. Scales are f32: 4 bytes beside 256 or 512.

_KEPT_LARGEST = 127  # the same on both sides of zero


class Int8Rows(NamedTuple):
    """numbers [rows, kv_heads, length, head_dim] int8, scales [rows, kv_heads, length] f32."""

    numbers: jax.Array
    scales: jax.Array


KeptRows: TypeAlias = jax.Array | Int8Rows


def kept_rows_like(cache: KeptRows, new: jax.Array) -> KeptRows:
    """`new` [batch, kv_heads, tokens, head_dim] f32 in the form that `cache` has."""
    if isinstance(cache, Int8Rows):
        return int8_rows(new)
    return new.astype(cache.dtype)


def int8_rows(rows: jax.Array) -> Int8Rows:
    """Rows [..., head_dim] f32 as int8, each with its own scale."""
    scales = jnp.max(jnp.abs(rows), axis=-1) / _KEPT_LARGEST
    divisors = jnp.where(scales > 0, scales, 1)[..., None]
    return Int8Rows(jnp.round(rows / divisors).astype(jnp.int8), scales)


def kept_length(cache: KeptRows) -> int:
    """For how many tokens a cache has room."""
    leaf: Any = jax.tree.leaves(cache)[0]
    return int(leaf.shape[2])


def numbers_and_scales(rows: KeptRows) -> tuple[jax.Array, jax.Array | None]:
    """What is kept, and what [..., tokens] it has to be multiplied with; None where it is plain."""
    return rows if isinstance(rows, Int8Rows) else (rows, None)


# ── jax / attention ───────────────────────────────────────────────────────────────────────────────
# Attention of new tokens over the keys in their view, taken in blocks.
#
# Knows no weights, no layers and no caches. Which key a query sees follows from two positions and
# the
# window alone, so padding, a stale entry, or a neighbour in the batch can never matter: a key that
# is
# not seen adds an exact zero. The softmax is taken block by block (Milakov and Gimelshein 2018,
# "Online normalizer calculation for softmax"), so that neither time nor memory follows the length
# of
# a cache, but what is in it.

KEY_BLOCK = 256  # keys taken at once
_NOTHING_SEEN = -1e30  # stands for minus infinity, whose differences are no numbers


class KeyView(NamedTuple):
    """The keys that `batch` conversations may see in one layer.

    keys, values: [rows, kv_heads, length, head_dim], of which rows first..first+batch are theirs;
    plain or int8. A length beyond KEY_BLOCK is a multiple of it. positions [batch, length] int32:
    where each key stands in its conversation, negative for an entry that holds nothing. used
    int32: no conversation has a key at this entry or beyond.
    """

    keys: KeptRows
    values: KeptRows
    first: jax.Array | int
    positions: jax.Array
    used: jax.Array | int


class _Softmax(NamedTuple):
    """A softmax under way. Axes: batch, kv head, query head of it, token; `total` has head_dim."""

    highest: jax.Array
    weight: jax.Array
    total: jax.Array


def whole_blocks(length: int) -> int:
    """The least length of a view that holds `length` keys."""
    return length if length <= KEY_BLOCK else -(-length // KEY_BLOCK) * KEY_BLOCK


def visible(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Whether a token at position `query` sees the one at `key`: not later, and near enough.

    A sliding layer sees `window` tokens, the token itself among them. Negative positions are
    never seen.
    """
    seen = (key <= query) & (key >= 0)
    return seen if window is None else seen & (query - key < window)


def key_scores(queries: jax.Array, keys: jax.Array, precision: lax.Precision) -> jax.Array:
    """Plain products: no 1/sqrt(head_dim), for queries and keys are normed (scaling is 1.0)."""

    def plainly(queries: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.einsum("bkgtd,bksd->bkgts", queries, keys, precision=precision)

    if queries.shape[3] > 1:
        return plainly(queries, keys)
    # One token is as slow as the reading of its keys.
    scores: jax.Array = lax.platform_dependent(
        queries, keys, cpu=_key_scores_on_cpu, default=plainly
    )
    return scores


def _key_scores_on_cpu(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Keys first, as weights are in `project`, for XLA repacks the second factor at every call.

    The barrier keeps it from swapping them back. One token over 4,096 keys of 512, 8 heads: 1.7 ms
    of processor time for all of `attend` instead of 6.6 (2 cores of an AMD EPYC, Zen 4).
    """
    product = jnp.einsum("bksd,bkgtd->bksgt", keys, queries)
    kept: jax.Array = lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept.transpose(0, 1, 3, 4, 2)


def _softmax_block(
    so_far: _Softmax, queries: jax.Array, keys: KeptRows, values: KeptRows, seen: jax.Array
) -> _Softmax:
    """Take one block of keys [batch, kv, s, head_dim] into the softmax; seen [batch, tokens, s]."""
    keys, key_scales = numbers_and_scales(keys)
    values, value_scales = numbers_and_scales(values)
    # f32 means f32 on chips that would else round factors to bf16; bf16 and int8 lose nothing.
    exact = keys.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    seen = seen[:, None, None]
    scores = key_scores(queries, keys.astype(jnp.float32), precision)
    if key_scales is not None:
        scores = scores * key_scales[:, :, None, None]
    scores = jnp.where(seen, scores, _NOTHING_SEEN)
    highest = jnp.maximum(so_far.highest, jnp.max(scores, axis=-1))
    shares = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0.0)
    fade = jnp.exp(so_far.highest - highest)
    drawn = shares if value_scales is None else shares * value_scales[:, :, None, None]
    found = jnp.einsum("bkgts,bksd->bkgtd", drawn, values.astype(jnp.float32), precision=precision)
    return _Softmax(
        highest,
        so_far.weight * fade + jnp.sum(shares, axis=-1),
        so_far.total * fade[..., None] + found,
    )


def attend(
    queries: jax.Array, positions: jax.Array, view: KeyView, window: int | None
) -> jax.Array:
    """What each new token draws from the keys it sees: [batch, tokens, heads, head_dim] f32.

    queries: [batch, tokens, heads, head_dim] f32, of tokens at `positions` [batch, tokens]. Heads
    that follow each other share a key head. `window` None sees all.
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = jax.tree.leaves(view.keys)[0].shape[1]
    block = min(KEY_BLOCK, kept_length(view.keys))
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    shape = grouped.shape[:-1]
    start = _Softmax(
        jnp.full(shape, _NOTHING_SEEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )

    def take(number: jax.Array, so_far: _Softmax) -> _Softmax:
        entry = number * block

        def cut(rows: jax.Array) -> jax.Array:
            corner = (view.first, 0, entry, 0)[: rows.ndim]
            return lax.dynamic_slice(rows, corner, (batch, kv_heads, block, *rows.shape[3:]))

        places = lax.dynamic_slice_in_dim(view.positions, entry, block, axis=1)
        return _softmax_block(
            so_far,
            grouped,
            jax.tree.map(cut, view.keys),
            jax.tree.map(cut, view.values),
            visible(positions[:, :, None], places[:, None, :], window),
        )

    blocks = (view.used + block - 1) // block
    softmax: _Softmax = lax.fori_loop(0, blocks, take, start)
    drawn = softmax.total / softmax.weight[..., None]
    return drawn.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, head_dim)


# ── jax / cache ───────────────────────────────────────────────────────────────────────────────────
# What the engine keeps of its conversations between dispatches: keys, values and token counts.
#
# Knows no weights and no sampling. Only layers that own keys and values have a cache; a sliding
# layer's is a ring as long as the window, a full layer's as long as the context.


class Caches(NamedTuple):
    """Keys and values of each owner layer, by its index: [rows, kv_heads, length, head_dim]."""

    keys: dict[int, KeptRows]
    values: dict[int, KeptRows]


class EngineState(NamedTuple):
    """All that lives on the device beside the weights; every compiled step takes and gives it.

    seen [rows, vocabulary] bool: tokens of each conversation's prompt. counts [rows, vocabulary]
    int32: how often each is in its answer.
    """

    caches: Caches
    seen: jax.Array
    counts: jax.Array


def stand_in(shape: Sequence[int], dtype: Any) -> Any:
    """An array's shape and dtype, in the place of an array where something is compiled for it."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]


def cache_length(config: Gemma4Config, layer: LayerConfig, context: int) -> int:
    """Tokens that an owner's cache holds: the window or the context, in whole blocks of keys."""
    return whole_blocks(min(config.window, context) if layer.sliding else context)


def state_shapes(config: Gemma4Config, slots: int, context: int, dtype: jnp.dtype) -> EngineState:
    """The engine's state as shapes: what is compiled for, and what `empty_state` makes.

    `dtype` is that of keys and values; int8 ones have their scales beside them.
    """

    def owned(layer: LayerConfig) -> Any:
        shape = (slots, layer.kv_heads, cache_length(config, layer, context), layer.head_dim)
        numbers = stand_in(shape, dtype)
        if dtype == jnp.int8:
            return Int8Rows(numbers, stand_in(shape[:3], jnp.float32))
        return numbers

    owners = [layer for layer in config.layers if layer.owner]
    marks = (slots, config.vocabulary)
    return EngineState(
        Caches({o.index: owned(o) for o in owners}, {o.index: owned(o) for o in owners}),
        stand_in(marks, jnp.bool_),
        stand_in(marks, jnp.int32),
    )


def empty_state(shapes: EngineState) -> EngineState:
    """Zeros of these shapes on the default device."""
    made: EngineState = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return made


def kv_bytes(shapes: EngineState) -> int:
    """Bytes of all keys and values and their scales, of all slots."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.caches))


def held_positions(length: int, held: jax.Array) -> jax.Array:
    """Position of what each entry of a cache of `length` holds; negative where nothing yet.

    Of each conversation `held` [batch] int32 tokens were taken: an entry has the latest of them
    whose position is its own number modulo the length. Result [batch, length]. A full layer's
    cache is as long as the context, and so no entry is ever overwritten.
    """
    last = held[:, None] - 1
    return last - (last - jnp.arange(length, dtype=jnp.int32)) % length


def cached_view(
    keys: KeptRows, values: KeptRows, first: jax.Array | int, held: jax.Array
) -> KeyView:
    """What caches show that hold `held` [batch] tokens of the conversations from row `first`."""
    length = kept_length(keys)
    used = jnp.minimum(jnp.max(held), length)
    return KeyView(keys, values, first, held_positions(length, held), used)


def widened_view(ring: KeyView, keys: KeptRows, values: KeptRows, places: jax.Array) -> KeyView:
    """What a ring showed, and beside it new tokens at `places` [batch, tokens].

    keys, values [batch, kv_heads, tokens, head_dim] of the new tokens. A copy of these rows.
    """
    batch = places.shape[0]
    width = kept_length(ring.keys) + kept_length(keys)
    spare = whole_blocks(width) - width

    def widen(cache: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(cache, ring.first, batch)
        wide = jnp.concatenate([old, new], axis=2)
        return jnp.pad(wide, ((0, 0), (0, 0), (0, spare), (0, 0))[: wide.ndim])

    positions = jnp.concatenate([ring.positions, places], axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1)
    wide_keys, wide_values = (
        jax.tree.map(widen, kept, new) for kept, new in ((ring.keys, keys), (ring.values, values))
    )
    return KeyView(wide_keys, wide_values, 0, positions, width)


def closed_ring(
    cache: KeptRows, wide: KeptRows, first: jax.Array | int, before: jax.Array, after: jax.Array
) -> KeptRows:
    """The cache of a ring with what it holds after new tokens, picked from the `wide` rows.

    `wide` is of `widened_view`; the conversations had `before` [batch] tokens and have `after`.
    All is read from `wide`, for a cache that is read while it is written is copied whole by XLA.
    """
    length = kept_length(cache)
    places = held_positions(length, after)
    fresh = places - before[:, None]
    entries = jnp.where(fresh >= 0, length + fresh, jnp.arange(length, dtype=jnp.int32))

    def close(cache: jax.Array, wide: jax.Array) -> jax.Array:
        picked = entries[:, None, :, None] if wide.ndim == 4 else entries[:, None]
        rows = jnp.take_along_axis(wide, picked, axis=2)
        return lax.dynamic_update_slice_in_dim(cache, rows, first, 0)

    closed: KeptRows = jax.tree.map(close, cache, wide)
    return closed


def written(
    cache: KeptRows, new: KeptRows, first: jax.Array | int, positions: jax.Array, real: jax.Array
) -> KeptRows:
    """The cache with `new` [batch, kv_heads, tokens, head_dim] in rows first..first+batch.

    positions, real [batch, tokens]: what is not real is not written. No two of a conversation's
    tokens may fall on one entry.
    """
    batch, length = positions.shape[0], kept_length(cache)
    entries = jnp.where(real, positions % length, length)  # beyond the end: dropped
    rows = first + jnp.arange(batch, dtype=jnp.int32)[:, None]

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[rows, :, entries].set(jnp.swapaxes(new, 1, 2), mode="drop")

    whole: KeptRows = jax.tree.map(write, cache, new)
    return whole


def moved_row(state: EngineState, source: jax.Array, target: jax.Array) -> EngineState:
    """The state with row `target` overwritten by row `source`, in every array."""

    def move(array: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(array, source, 1)
        return lax.dynamic_update_slice_in_dim(array, row, target, 0)

    moved: EngineState = jax.tree.map(move, state)
    return moved


# ── jax / mesh ────────────────────────────────────────────────────────────────────────────────────
# How arrays lie on several devices that run one model together: along one axis with a name.
#
# Knows no programs and no slots. Programs are written for one device; XLA's partitioner cuts them
# by
# where their arguments lie, and puts the devices' sums and gathers in. With one device there is no
# mesh, and every function here gives back what it was given.

_MESH_AXIS = "tensor"
_MESH_CACHE_HEADS = 1  # the axis of key heads, in all that is kept of keys and values
_MESH_TURNED = "turned_"  # of a packed weight: inputs first, where matrices have their outputs

MeshTree = TypeVar("MeshTree")


class DeviceGroup:
    """Devices that hold one copy of a model together, each a part of every large tensor.

    What goes where follows from where a leaf stands in its tree: under a tensor's name it is a
    weight, or a part of one (a packed weight's scales); under a layer's number it is of a cache,
    [rows, kv_heads, …]; all else is whole on every device.
    """

    def __init__(self, config: Gemma4Config, devices: Sequence[Any]) -> None:
        self._config = config
        self._mesh = jax.sharding.Mesh(np.array(devices), (_MESH_AXIS,))

    @property
    def ways(self) -> int:
        """How many devices."""
        return self._mesh.size

    def shardings(self, tree: Any) -> Any:
        """Where each leaf of `tree` lies: arrays, or their shapes."""
        return jax.tree_util.tree_map_with_path(self._sharding, tree)

    def placed(self, tree: MeshTree) -> MeshTree:
        """`tree` on these devices, from the host or from other devices."""
        moved: MeshTree = jax.device_put(tree, self.shardings(tree))
        return moved

    def zeros(self, shapes: MeshTree) -> MeshTree:
        """Zeros of these shapes; no device ever holds another's part."""
        made: MeshTree = jax.tree.map(
            lambda shape, where: jnp.zeros(shape.shape, shape.dtype, device=where),
            shapes,
            self.shardings(shapes),
        )
        return made

    def scope(self) -> AbstractContextManager[Any]:
        """Within it, what is traced is traced for these devices."""
        return jax.set_mesh(self._mesh)

    def _sharding(self, path: Sequence[Any], leaf: Any) -> Any:
        return jax.sharding.NamedSharding(self._mesh, _mesh_spec(self._axis(path, leaf.shape)))

    def _axis(self, path: Sequence[Any], shape: Sequence[int]) -> int | None:
        """Along which axis a leaf of that shape is split; None where it is whole everywhere."""
        keys = [step.key for step in path if isinstance(step, jax.tree_util.DictKey)]
        if not keys:
            return None
        axis: int | None = _MESH_CACHE_HEADS
        if isinstance(keys[0], str):
            axis = split_axis(self._config, keys[0], self.ways)
            parts = [step.name for step in path if isinstance(step, jax.tree_util.GetAttrKey)]
            if axis is not None and any(name.startswith(_MESH_TURNED) for name in parts):
                axis = 1 - axis
        # What of a packed weight has no such axis belongs to all parts alike.
        if axis is None or axis >= len(shape) or shape[axis] % self.ways:
            return None
        return axis


def placed_on(group: DeviceGroup | None, tree: MeshTree) -> MeshTree:
    """`tree` on the devices of `group`, or on JAX's default device."""
    placed: MeshTree = jax.device_put(tree) if group is None else group.placed(tree)
    return placed


def kept_in_place(caches: MeshTree) -> MeshTree:
    """Caches that go on lying where they came from.

    Else the partitioner spreads two key heads over two of four devices, as queries are, and brings
    the whole cache back to all four at the end of every decode.
    """
    if not _mesh_here():
        return caches
    ways = jax.sharding.get_abstract_mesh().size

    def held(cache: jax.Array) -> jax.Array:
        uneven = cache.shape[_MESH_CACHE_HEADS] % ways
        return _mesh_lying(cache, None if uneven else _MESH_CACHE_HEADS)

    kept: MeshTree = jax.tree.map(held, caches)
    return kept


def gathered(x: jax.Array) -> jax.Array:
    """x [..., n], each device's part of n beside the others', whole on every device.

    Both are asked for. Of the whole alone, the partitioner gathers the weights that x is a product
    of: 0.8 GB for E2B's head at every step (libtpu 0.0.42, v5e).
    """
    if not _mesh_here():
        return x
    return _mesh_lying(_mesh_lying(x, x.ndim - 1), None)


def summed_over_parts(
    function: Callable[..., jax.Array], whole: tuple[Any, ...], parts: tuple[Any, ...]
) -> jax.Array:
    """The sum of `function(first, *whole, *parts)` over the devices, each with its own parts.

    Every leaf of `parts` is split along its first axis, and `first` counts the rows before a
    device's own; the partitioner has no say within. With one device it is function(None, …).
    """
    if not _mesh_here():
        return function(None, *whole, *parts)
    anywhere, split = _mesh_spec(None), _mesh_spec(0)

    def here(whole: tuple[Any, ...], parts: tuple[Any, ...]) -> jax.Array:
        rows = jax.tree.leaves(parts)[0].shape[0]
        told = function(lax.axis_index(_MESH_AXIS) * rows, *whole, *parts)
        total: jax.Array = lax.psum(told, _MESH_AXIS)  # type: ignore[no-untyped-call]
        return total

    summed = jax.shard_map(here, in_specs=(anywhere, split), out_specs=anywhere, check_vma=False)
    total: jax.Array = summed(whole, parts)
    return total


def _mesh_spec(axis: int | None) -> jax.sharding.PartitionSpec:
    """Split along that axis, or whole everywhere."""
    names = () if axis is None else (*[None] * axis, _MESH_AXIS)
    return jax.sharding.PartitionSpec(*names)  # type: ignore[no-untyped-call]


def _mesh_lying(x: jax.Array, axis: int | None) -> jax.Array:
    """x, split along that axis or whole everywhere, whatever the partitioner would rather have."""
    here: jax.Array = lax.with_sharding_constraint(x, _mesh_spec(axis))  # type: ignore[no-untyped-call]
    return here


def _mesh_here() -> bool:
    """Whether what is traced right now is traced for several devices."""
    return bool(jax.sharding.get_abstract_mesh().size > 1)


# ── jax / prefix_chunks ───────────────────────────────────────────────────────────────────────────
# Whole chunks of a prompt's keys and values, taken out of a row of the caches and put into one.
#
# Knows no tokens' meaning and no budget. A chunk is kept as the tokens that it added: a full
# layer's
# all of them, a ring's as many as it still holds. So a ring as it was after any chunk is what that
# chunk and those before it put into it, to the bit, and no ring is ever kept whole.


def _prefix_entries(cache: jax.Array, chunk: int, end: jax.Array) -> jax.Array:
    """Where a cache holds the chunk that ends before position `end`, or what is left of it."""
    length = cache.shape[2]
    count = min(chunk, length)
    return (end - count + jnp.arange(count, dtype=jnp.int32)) % length


def chunk_taken_out(chunk: int, state: EngineState, row: jax.Array, end: jax.Array) -> Caches:
    """The last `chunk` tokens of the `end` that row holds, each array [tokens, kv_heads, …].

    Only right after they were taken: later ones overwrite what a ring holds of them.
    """

    def taken_out(cache: jax.Array) -> jax.Array:
        return cache[row, :, _prefix_entries(cache, chunk, end)]

    kept: Caches = jax.tree.map(taken_out, state.caches)
    return kept


def chunk_put_back(
    state: EngineState, row: jax.Array, ids: jax.Array, end: jax.Array, kept: Caches
) -> EngineState:
    """The state with a kept chunk in `row`, and its tokens, ids [chunk], among those seen there.

    The first chunk of a conversation forgets what the row had seen, as reading it would.
    """
    chunk = ids.shape[0]

    def put_back(cache: jax.Array, piece: jax.Array) -> jax.Array:
        return cache.at[row, :, _prefix_entries(cache, chunk, end)].set(piece)

    caches: Caches = jax.tree.map(put_back, state.caches, kept)
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1) & (end > chunk)
    seen = seen.at[0, ids].set(True)
    return EngineState(
        caches, lax.dynamic_update_slice_in_dim(state.seen, seen, row, 0), state.counts
    )


def kept_chunk_shapes(state: EngineState, chunk: int) -> Caches:
    """What `chunk_taken_out` gives for a state of these shapes, as shapes."""
    number = stand_in((), jnp.int32)
    shapes: Any = jax.eval_shape(partial(chunk_taken_out, chunk), state, number, number)
    kept: Caches = shapes
    return kept


# ── jax / prefix_store ────────────────────────────────────────────────────────────────────────────
# Keeps what whole chunks of prompts left in the caches, for prompts that begin with the same.
#
# Knows no arrays: what it keeps is handed to it and handed out again. A chunk's name is made of its
# tokens and of all before them, so equal names mean equal prefixes.


def prefix_names(tokens: Sequence[int], chunk: int, salt: str) -> list[bytes]:
    """The name of each whole chunk of `tokens`, in order.

    Under another `salt` nothing has the same name. SHA-256, so that nobody can find a second prefix
    for a name.
    """
    names = []
    name = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    for end in range(chunk, len(tokens) + 1, chunk):
        piece = np.asarray(tokens[end - chunk : end], np.int64)
        name = hashlib.sha256(name + piece.tobytes()).digest()
        names.append(name)
    return names


class PrefixStore:
    """As many chunks as `room`; beyond that the least recently used ones are forgotten.

    A chunk counts as used whenever one that follows it is, and after it: so none is forgotten
    before those that follow it, which are of no use without it.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[bytes, Any] = OrderedDict()  # the least recently used one first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def found(self, names: Sequence[bytes]) -> list[Any]:
        """What is kept of the first of `names`, up to the first that is not here."""
        known = []
        for name in names:
            if name not in self._kept:
                break
            known.append(self._kept[name])
        self._use(names[: len(known)])
        return known

    def keep(self, names: Sequence[bytes], kept: Any) -> None:
        """Keep `kept` under the last of `names`; the others are the chunks before it.

        Nothing is kept where the last of those was forgotten: nobody would find it.
        """
        if len(names) == 1 or names[-2] in self._kept:
            self._kept[names[-1]] = kept
            self._use(names)
            while len(self._kept) > self._room:
                self._kept.popitem(last=False)

    def _use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._kept.move_to_end(name)


# ── jax / prefix_cache ────────────────────────────────────────────────────────────────────────────
# Begins a conversation with what an earlier one left, and keeps what it leaves itself.
#
# Knows no requests and no sampling. Only what reading a prompt put into the caches is kept, and
# only
# after whole chunks: a prompt is then read on from where it would have been cut without this too,
# by
# the same programs, and not one bit of its answer depends on what was found. What an answer put
# there
# is read anew with the next turn's prompt, for a decode rounds otherwise.
#
# Chunks lie in the host's memory: on an accelerator they take none of the device's, and cross its
# bus
# both ways. Taking one out waits until it is computed.


class PrefixCache:
    """Chunks of `chunk` tokens in at most `room_bytes`, for caches of these shapes.

    `run` runs one of the engine's programs by its name. Raises EngineFault where not one chunk
    has room.
    """

    def __init__(
        self, shapes: EngineState, chunk: int, room_bytes: float, run: Callable[..., Any]
    ) -> None:
        pieces = jax.tree.leaves(kept_chunk_shapes(shapes, chunk))
        self._each = sum(piece.size * piece.dtype.itemsize for piece in pieces)
        if room_bytes < self._each:
            raise EngineFault(
                f"a prefix cache of {room_bytes / 1e9:g} GB: a chunk of {chunk} tokens takes "
                f"{self._each / 1e9:.3g}"
            )
        self._chunk = chunk
        self._run = run
        self._store = PrefixStore(int(room_bytes // self._each))
        self._asked = self._held = 0

    def begin(
        self, state: EngineState, row: int, prompt: Sequence[int], names: Sequence[bytes]
    ) -> tuple[EngineState, int]:
        """The state with the known beginning of `prompt` in `row`, and how many tokens that is.

        The last token is never among them: an answer's first token is made of its stream.
        """
        known = self._store.found(names[: (len(prompt) - 1) // self._chunk])
        for number, kept in enumerate(known):
            start, end = number * self._chunk, (number + 1) * self._chunk
            ids = np.asarray(prompt[start:end], np.int32)
            state = self._run(
                "putting a chunk back", state, np.int32(row), ids, np.int32(end), kept
            )
        held = len(known) * self._chunk
        self._asked += len(prompt)
        self._held += held
        return state, held

    def keep(self, state: EngineState, row: int, names: Sequence[bytes], taken: int) -> None:
        """Keep the chunk with which `row` came to hold `taken` tokens, if that was a whole one.

        `names` are those of the prompt's chunks.
        """
        if taken % self._chunk:
            return
        path = names[: taken // self._chunk]
        if path[-1] not in self._store:
            kept = self._run("taking a chunk out", state, np.int32(row), np.int32(taken))
            self._store.keep(path, jax.device_get(kept))

    def counters(self) -> Mapping[str, float]:
        """Tokens of prompts that were looked up and that were found, so far; bytes kept now."""
        return {
            "prefix_cache_queries_total": self._asked,
            "prefix_cache_hits_total": self._held,
            "prefix_cache_bytes": len(self._store) * self._each,
        }


# ── jax / quantised ───────────────────────────────────────────────────────────────────────────────
# Matrices that lie on the device as integers with scales, and products with them.
#
# Knows no model, no files and no layers. Packed ones are 4-bit integers of a checkpoint, whose
# values
# are exact; 8-bit ones are made of plain matrices, and near them.
#
# Packed words lie turned, inputs first. On a TPU the eight integers of a word are then one tile's
# rows, and the outputs its lanes: unpacking is part of the product, and no unpacked matrix is in
# memory. Scales are spread over words and not over weights, for libtpu (0.0.42, for a v5e) spreads
# them outside of the product: an eighth of it.
#
# On a CPU, XLA (jaxlib 0.10.2) works unpacked values out anew for every row if it may fuse them
# into
# the product, and the matrix multiplier takes f32 only as it lies. So a block is unpacked behind a
# barrier, multiplied, and the next one takes its place. Milliseconds for one matrix of 9.4 million
# weights, the least of 9 calls, 2 cores of an AMD EPYC, Zen 4, that others used as well:
#
# | rows | f32 | packed, in blocks | packed, as one | int8, in blocks | int8, as one |
# |---|---|---|---|---|---|
# | 1 | 1.2 | 2.3 | 26 | 0.9 | 14 |
# | 4 | 1.7 | 2.9 | 42 | 1.8 | 29 |
# | 16 | 2.1 | 5.2 | 30 | 3.8 | 21 |
# | 256 | 47 | 50 | 104 | 56 | 67 |

_PACKED_BITS, _PACKED_ZERO = 4, 8  # an integer is stored with 8 added
_PACKED_BLOCK = 512  # inputs that are unpacked at once on a CPU
_INT8_BLOCK = 256  # outputs that are converted at once on a CPU
_INT8_MOST = 127
_BF16_BITS = (8, 7)  # of exponent and mantissa


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A matrix [n, k] of 4-bit integers, turned: words uint32 [k/8, n], scales bf16 [k/group, n].

    `dtype` is that of the plain weights beside it, to which activations are rounded.
    """

    turned_words: jax.Array
    turned_scales: jax.Array
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it stands for."""
        per_word = 32 // _PACKED_BITS
        return self.turned_words.shape[1], self.turned_words.shape[0] * per_word


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """Matrices [..., n, k] as rows int8 [..., n, k] times scales f32 [..., n].

    `dtype` is that of the plain weights beside it, to which activations are rounded.
    """

    rows: jax.Array
    scales: jax.Array
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape


Weight = jax.Array | PackedWeight | Int8Weight


def quantised_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [..., n, k], f32 scales [..., n]): each row's largest value becomes 127 or -127.

    A weight is off by at most half a scale, 1/254 of its row's largest.
    """
    flat = matrix.reshape(-1, matrix.shape[-1])
    integers = np.empty(flat.shape, np.int8)
    scales = np.empty(len(flat), np.float32)
    step = max(1, (1 << 22) // flat.shape[1])  # rows at once: a matrix in f32 may be large
    for at in range(0, len(flat), step):
        rows = flat[at : at + step].astype(np.float32)
        most = np.abs(rows).max(axis=1) / _INT8_MOST
        most[most == 0] = 1.0  # a row of zeros
        scales[at : at + step] = most
        integers[at : at + step] = np.rint(rows / most[:, None])
    return integers.reshape(matrix.shape), scales.reshape(matrix.shape[:-1])


def unpacked_block(words: jax.Array, scales: jax.Array) -> jax.Array:
    """[k, n] f32 of words [k/8, n] and scales [k/group, n]: what compressed-tensors unpacks.

    An integer times a scale is exact in f32, so that rounding it to bf16 is the only rounding. It
    is asked for by name, for XLA may leave out a conversion to bf16 and back.
    """
    shifts = np.arange(0, 32, _PACKED_BITS, dtype=np.uint32)
    shifted = words[:, None, :] >> shifts[None, :, None]
    integers = (shifted & 15).astype(jnp.int32) - _PACKED_ZERO
    # One for each word, and not for each weight: see above. XLA would else make one spread of two.
    of_words = jnp.repeat(scales.astype(jnp.float32), words.shape[0] // scales.shape[0], axis=0)
    of_words = lax.optimization_barrier(of_words)  # type: ignore[no-untyped-call]
    rounded: jax.Array = lax.reduce_precision(integers * of_words[:, None, :], *_BF16_BITS)
    return rounded.reshape(-1, words.shape[1])


def packed_product(x: jax.Array, w: PackedWeight) -> jax.Array:
    """x [rows, k] times the transpose of w: [rows, n] f32, with f32 sums."""

    def on_cpu(x: jax.Array, w: PackedWeight) -> jax.Array:
        outputs, inputs = w.shape
        group = inputs // w.turned_scales.shape[0]
        block = math.gcd(inputs, max(_PACKED_BLOCK, group))

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            at = number * block
            unpacked = unpacked_block(
                lax.dynamic_slice_in_dim(w.turned_words, at // 8, block // 8),
                lax.dynamic_slice_in_dim(w.turned_scales, at // group, block // group),
            )
            kept: jax.Array = lax.optimization_barrier(unpacked)  # type: ignore[no-untyped-call]
            return total + lax.dynamic_slice_in_dim(x, at, block, axis=1) @ kept

        total = jnp.zeros((x.shape[0], outputs), jnp.float32)
        summed: jax.Array = lax.fori_loop(0, inputs // block, add, total)
        return summed

    def plainly(x: jax.Array, w: PackedWeight) -> jax.Array:
        unpacked = unpacked_block(w.turned_words, w.turned_scales).astype(w.dtype)
        return _whole_product("mk,kn->mn", x.astype(w.dtype), unpacked)

    product: jax.Array = lax.platform_dependent(
        _rounded_rows(x, w.dtype), w, cpu=on_cpu, default=plainly
    )
    return product


def int8_product(x: jax.Array, w: Int8Weight) -> jax.Array:
    """x [rows, k] times the transpose of w [n, k]: [rows, n] f32, with f32 sums.

    The integers are exact in any dtype; a row's scale comes after its sum.
    """

    def on_cpu(x: jax.Array, w: Int8Weight) -> jax.Array:
        outputs = w.rows.shape[0]
        block = math.gcd(outputs, _INT8_BLOCK)

        def put(number: jax.Array, products: jax.Array) -> jax.Array:
            at = number * block
            rows = lax.dynamic_slice_in_dim(w.rows, at, block).astype(jnp.float32)
            kept: jax.Array = lax.optimization_barrier(rows)  # type: ignore[no-untyped-call]
            product = lax.dot_general(kept, x, (((1,), (1,)), ((), ())))
            return lax.dynamic_update_slice_in_dim(products, product, at, 0)

        products = jnp.zeros((outputs, x.shape[0]), jnp.float32)
        whole: jax.Array = lax.fori_loop(0, outputs // block, put, products)
        return whole.T

    def plainly(x: jax.Array, w: Int8Weight) -> jax.Array:
        return _whole_product("mk,nk->mn", x.astype(w.dtype), w.rows.astype(w.dtype))

    product: jax.Array = lax.platform_dependent(
        _rounded_rows(x, w.dtype), w, cpu=on_cpu, default=plainly
    )
    return product * w.scales


def _rounded_rows(x: jax.Array, dtype: Any) -> jax.Array:
    """x as f32, with the values that it has in `dtype`."""
    if dtype == jnp.bfloat16:
        rounded: jax.Array = lax.reduce_precision(x, *_BF16_BITS)
        return rounded
    return x


def _whole_product(axes: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """One product with f32 sums; f32 factors keep all their bits on chips that would cut them."""
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(axes, x, w, precision=precision, preferred_element_type=jnp.float32)


# ── jax / linear ──────────────────────────────────────────────────────────────────────────────────
# Products of activations with stored weights, as fast as the platform at hand does them.
#
# Knows no model and no layers. Weights stay as a checkpoint has them: [n, k], one row an output.
#
# On a CPU, XLA (jaxlib 0.10.2) hands products of matrices to YNNPACK, which repacks its second
# factor
# at every call, and that must not be the weights: so they come first, and a barrier keeps XLA from
# swapping the factors back. Milliseconds of processor time (2 cores of an AMD EPYC, Zen 4, the
# least
# of 7 calls on a busy machine) for one pass over 302 MB of weights of 1536 x 6144 and 6144 x 1536:
#
# | rows | f32 here | f32 "mk,nk->mn" | f32 x @ w, w [k, n] | bf16 here (151 MB) | bf16 as f32 is |
# |---|---|---|---|---|---|
# | 1 | 12 | 13 | 17 | 22 | 184 |
# | 2 | 16 | 50 | 36 | 22 | 169 |
# | 4 | 15 | 51 | 33 | 24 | 161 |
# | 8 | 19 | 59 | 39 | 25 | 188 |
# | 16 | 29 | 75 | 48 | 32 | 192 |
# | 64 | 100 | 141 | 124 | 84 | 267 |
#
# bf16 is the other way round: only as "mk,nk->mn" with two rows or more does YNNPACK take it.


def project(x: jax.Array, w: Weight) -> jax.Array:
    """x [..., k] times the transpose of w [n, k]: [..., n] f32.

    x is rounded to w's dtype; sums are f32. A row's result depends on no other row, and not on
    which row it is.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(w, PackedWeight):
        product = packed_product(rows, w)
    elif isinstance(w, Int8Weight):
        product = int8_product(rows, w)
    else:
        product = _project_plain(rows, w)
    return product.reshape(*x.shape[:-1], w.shape[0])


def _project_plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [rows, k] with stored weights as they are."""
    rows = x.astype(w.dtype)
    on_cpu = _project_bf16_on_cpu if w.dtype == jnp.bfloat16 else _project_on_cpu
    product: jax.Array = lax.platform_dependent(rows, w, cpu=on_cpu, default=_project_plainly)
    return product


def _project_plainly(rows: jax.Array, w: jax.Array) -> jax.Array:
    """One product, its layout and tiling left to the compiler.

    f32 means f32: chips with matrix units would else round the factors to fewer bits.
    """
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum("mk,nk->mn", rows, w, precision=precision, preferred_element_type=jnp.float32)


def _project_on_cpu(rows: jax.Array, w: jax.Array) -> jax.Array:
    """Weights first; without the barrier XLA folds the transposition into the product."""
    product = lax.dot_general(w, rows, (((1,), (1,)), ((), ())))
    kept: jax.Array = lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept.T


def _project_bf16_on_cpu(rows: jax.Array, w: jax.Array) -> jax.Array:
    """At least two rows, for YNNPACK takes no single one."""
    count = rows.shape[0]
    padded = jnp.pad(rows, ((0, max(2 - count, 0)), (0, 0)))
    return _project_plainly(padded, w)[:count]


# ── jax / params ──────────────────────────────────────────────────────────────────────────────────
# Weights on the device: from views of a checkpoint's files, one tensor at a time.
#
# Knows no layers. The only place that decides how a tensor lies in memory.

_PARAMS_ALIGNED = 64  # bytes; from such an address JAX on a CPU takes an array over without a copy


def param_shapes(
    config: Gemma4Config, dtype: jnp.dtype, forms: Mapping[str, WeightForm] | None = None
) -> dict[str, Any]:
    """The placed tensors of such a model, by name, as shapes; without `forms` all are plain."""
    shapes: dict[str, Any] = {}
    for name, shape in model_tensors(config).items():
        form = forms[name] if forms else "plain"
        shapes[name] = stand_in(shape, dtype)
        if form == "int8":
            scales = stand_in(shape[:-1], jnp.float32)
            shapes[name] = Int8Weight(stand_in(shape, jnp.int8), scales, dtype)
        elif form == "packed":
            assert config.packed is not None  # nothing else makes a tensor packed
            rows, columns = shape
            words = stand_in((columns // PACKED_IN_WORD, rows), jnp.uint32)
            scales = stand_in((columns // config.packed.group, rows), jnp.bfloat16)
            shapes[name] = PackedWeight(words, scales, dtype)
    return shapes


def place_params(
    weights: Mapping[str, np.ndarray | PackedMatrix],
    dtype: jnp.dtype,
    placed: Callable[[float], None],
    forms: Mapping[str, WeightForm] | None = None,
    group: DeviceGroup | None = None,
) -> dict[str, Weight]:
    """The tensors on `group`, or on the default device; `placed` hears the share of bytes done.

    Plain ones in `dtype`, others in their form of `forms`; without `forms` all become plain.
    A tensor is placed, and its pages of the file forgotten, before the next one is read. So memory
    rises to the weights themselves and, on a device of its own, one tensor on its way there: by
    451 MiB for 468 MiB of f32 weights on a CPU, where some stay in the file, and by 243 MiB for the
    same in bf16, 234 MiB (Linux, jax 0.10.2).
    """
    total = sum(view.nbytes for view in weights.values())
    done = 0
    params: dict[str, Weight] = {}
    for name, view in weights.items():
        made = _params_formed(view, dtype, forms[name] if forms else "plain")
        params |= placed_on(group, {name: made})
        jax.block_until_ready(params[name])  # type: ignore[no-untyped-call]
        for part in view if isinstance(view, PackedMatrix) else (view,):
            _params_pages_forgotten(part)
        done += view.nbytes
        placed(done / total)
    return params


def _params_formed(view: np.ndarray | PackedMatrix, dtype: jnp.dtype, form: WeightForm) -> Any:
    """A stored tensor as it is served, in numpy's arrays."""
    if form == "packed":
        assert isinstance(view, PackedMatrix)
        words, scales = (np.ascontiguousarray(part.T) for part in view)
        return PackedWeight(words, scales, dtype)  # type: ignore[arg-type]
    plain = unpacked_matrix(view) if isinstance(view, PackedMatrix) else view
    if form == "int8":
        return Int8Weight(*quantised_rows(plain), dtype)  # type: ignore[arg-type]
    return _params_converted(plain, dtype)


def _params_converted(view: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """The tensor in `dtype`: itself, or a new array at an address that JAX takes over as it is."""
    if view.dtype == dtype:
        return view
    size = view.size * dtype.itemsize
    room = np.empty(size + _PARAMS_ALIGNED, np.uint8)
    start = -room.ctypes.data % _PARAMS_ALIGNED
    converted: np.ndarray = room[start : start + size].view(dtype).reshape(view.shape)
    np.copyto(converted, view, casting="unsafe")
    return converted


def _params_pages_forgotten(view: np.ndarray) -> None:
    """Let the system drop the pages of a mapped file that were read for `view`.

    They count as this process's memory until then. An array that JAX took over where it lies in
    the file finds its pages again.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = view.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    page = begin - begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, page, begin + view.nbytes - page)


# ── jax / rows ────────────────────────────────────────────────────────────────────────────────────
# Which row of the caches each conversation has: low ones, so that few need only a small batch.
#
# Knows no device: it only says what to move.


class RowMap:
    """The rows of up to `slots` conversations. Batches take rows 0..size-1, sizes rising."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._free = list(range(self._sizes[-1]))
        self._rows: dict[int, int] = {}

    def __getitem__(self, slot: int) -> int:
        return self._rows[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def give(self, slot: int) -> None:
        """Give `slot` the lowest free row."""
        self._rows[slot] = self._free.pop(0)

    def take(self, slot: int) -> None:
        """Free the row of `slot`."""
        self._free.append(self._rows.pop(slot))
        self._free.sort()

    def batch_of(self, slots: Sequence[int]) -> int:
        """The least batch that reaches the rows of all of `slots`."""
        return self._size(1 + max(self._rows[slot] for slot in slots))

    def pack(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Moves (from row, to free row) after which `slots` need the least batch they can.

        None where that would be no smaller: a move costs as much as reading a conversation.
        """
        rows = {self._rows[slot] for slot in slots}
        # The lowest rows that these could have, beside those that other conversations hold.
        least = self._size(1 + sorted(rows | set(self._free))[len(rows) - 1])
        moves = []
        for slot in slots:
            row = self._rows[slot]
            if row >= least:
                self._rows[slot] = self._free.pop(0)
                self._free.append(row)
                moves.append((row, self._rows[slot]))
        self._free.sort()
        return moves

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)


# ── jax / rules ───────────────────────────────────────────────────────────────────────────────────
# The rules of Gemma 4's text model that hold for one token at a time, one small function each.
#
# Knows neither the order of layers, nor attention, nor caches. Activations are f32 everywhere; only
# weights have the serving dtype. Facts: transformers 5.24, models/gemma4/modeling_gemma4.py.

# x and what is made of it: [..., width] f32. Weights: one array, f32 or bf16.


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; the weight is not 1 + w as in Gemma 3.

    Without `weight` it only brings x to length sqrt(width).
    """
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight.astype(jnp.float32)


def embedding_scale(hidden: int, dtype: jnp.dtype) -> float:
    """sqrt(hidden), rounded to the weights' dtype as transformers does: 39.25 for E2B in bf16."""
    return float(np.asarray(hidden**0.5, dtype=dtype))


def table_scale(per_layer: int, dtype: jnp.dtype) -> float:
    """What a row of the per-layer table is multiplied with: sqrt of a layer's share of it."""
    return float(np.asarray(per_layer**0.5, dtype=dtype))


def context_scale(hidden: int) -> float:
    """What the projection of the embedding into the layers' inputs is multiplied with."""
    return float(hidden**-0.5)


def blended_inputs(context: jax.Array, table: jax.Array) -> jax.Array:
    """A layer's own input: context and table row, added and brought back to the length of one."""
    return (context + table) * float(0.5**0.5)


def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, `gelu_pytorch_tanh`."""
    activated: jax.Array = jax.nn.gelu(x, approximate=True)
    return activated


def scaled_stream(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """The whole residual stream times the layer's own scalar [1], at the end of the layer."""
    return x * scalar.astype(jnp.float32)


def capped_logits(logits: jax.Array, softcap: float) -> jax.Array:
    """cap · tanh(logits / cap); cap 0 leaves them alone."""
    return jnp.tanh(logits / softcap) * softcap if softcap else logits


def rotary_frequencies(head_dim: int, theta: float, rotated: float) -> np.ndarray:
    """Angle per position of each of the head_dim/2 pairs, f32; those not rotated have 0.

    `rotated` is the share of pairs that turn: 1 in sliding layers, 0.25 in full ones. In both the
    exponent's denominator is the whole head_dim (transformers' rope types "default" and
    "proportional").
    """
    turning = int(rotated * head_dim // 2)
    exponents = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.zeros(head_dim // 2, dtype=np.float32)
    frequencies[:turning] = 1.0 / np.float32(theta) ** exponents
    return frequencies


def rotary_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [batch, tokens, 1, pairs] of `positions` [batch, tokens]."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the pairs (i, i + head_dim/2) of x [batch, tokens, heads, head_dim] by their angles."""
    cosine, sine = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def router_input(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """What the router sees of the stream x: normed without weight, times scale / sqrt(hidden)."""
    return rms_norm(x, None, eps) * scale.astype(jnp.float32) * float(x.shape[-1] ** -0.5)


def chosen_experts(
    scores: jax.Array, used: int, per_expert_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The `used` likeliest experts of each token and their shares: ids int32, shares f32.

    scores [tokens, experts]. Softmax over all experts, the chosen ones brought to a sum of one,
    then each times its own scale.
    """
    shares, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), used)
    shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return ids, shares * per_expert_scale.astype(jnp.float32)[ids]


# ── jax / experts ─────────────────────────────────────────────────────────────────────────────────
# The sparse half of a 26B-A4B layer: each token through its few experts, each expert read once.
#
# Knows no layers and no attention. Pairs of token and expert are sorted by expert and taken in
# blocks
# of one expert each, as many as there are: no expert without a token is read, none has a bound.

_EXPERT_ROWS_MOST = 64


def expert_block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: what an expert can expect of evenly spread pairs, as a power of two."""
    rows = 1
    while rows * experts < pairs and rows < _EXPERT_ROWS_MOST:
        rows *= 2
    return rows


def through_experts(
    x: jax.Array, ids: jax.Array, shares: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """Sum of each token's experts' answers, weighted by its shares: [tokens, hidden] f32.

    x [tokens, hidden] f32, ids and shares [tokens, used]; gate_up [experts, 2 · width, hidden] with
    the gate's rows first, down [experts, hidden, width]. A token's sum is taken in its own order of
    experts, whatever company it has. Of several devices each reads its own experts alone.
    """
    return summed_over_parts(_through_own_experts, (x, ids, shares), (gate_up, down))


def _through_own_experts(
    first: jax.Array | None,
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    gate_up: Weight,
    down: Weight,
) -> jax.Array:
    """`through_experts` of those from number `first` on; None where all are here."""
    tokens, used = ids.shape
    pairs, experts = tokens * used, gate_up.shape[0]
    block = expert_block_rows(pairs, experts)
    if first is not None:
        own = (ids >= first) & (ids < first + experts)
        ids = jnp.where(own, ids - first, experts)  # sorted last, counted nowhere, and so not taken
    flat = ids.reshape(pairs)
    order = jnp.argsort(flat, stable=True)
    taken = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    pair_ends = jnp.cumsum(taken)
    block_ends = jnp.cumsum((taken + block - 1) // block)

    def take(number: jax.Array, answers: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(block_ends, number, side="right").astype(jnp.int32)
        blocks_left = block_ends[expert] - number
        blocks = (taken[expert] + block - 1) // block
        start = pair_ends[expert] - taken[expert] + (blocks - blocks_left) * block
        places = start + jnp.arange(block, dtype=jnp.int32)
        rows = x[order[jnp.minimum(places, pairs - 1)] // used]
        both = project(rows, _weight_of_expert(gate_up, expert))
        gate, up = jnp.split(both, 2, axis=-1)
        answer = project(gelu(gate) * up, _weight_of_expert(down, expert))
        # The last block of an expert may reach into the next one's pairs: those are dropped.
        return answers.at[jnp.where(places < pair_ends[expert], order[places], pairs)].set(
            answer, mode="drop"
        )

    answers = lax.fori_loop(0, block_ends[-1], take, jnp.zeros((pairs, x.shape[-1]), jnp.float32))
    return jnp.sum(answers.reshape(tokens, used, -1) * shares[..., None], axis=1)


def _weight_of_expert(weights: Weight, expert: jax.Array) -> Any:
    """One expert's matrix, in whatever form all of them are."""

    def one_of(array: jax.Array) -> jax.Array:
        one: jax.Array = lax.dynamic_index_in_dim(array, expert, keepdims=False)
        return one

    return jax.tree.map(one_of, weights)


# ── jax / model ───────────────────────────────────────────────────────────────────────────────────
# Gemma 4's forward pass: new tokens of some conversations through some of the layers.
#
# Knows no sampling, no slots and no compiling. Params are the checkpoint's tensors by name. Facts:
# transformers 5.24, models/gemma4/modeling_gemma4.py.

# Arrays; what `project` and the experts take may be a Weight in another form.
Params = Mapping[str, Any]
_Weight = Callable[[str], Any]


class NewTokens(NamedTuple):
    """Tokens to be taken, of the conversations in rows first..first+batch of the caches.

    ids, positions [batch, tokens] int32, positions rising by one; `real` is false for padding,
    which comes last.
    """

    ids: jax.Array
    positions: jax.Array
    real: jax.Array
    first: jax.Array | int


def owner_layers(config: Gemma4Config) -> tuple[LayerConfig, ...]:
    """The layers with keys and values of their own; in every Gemma 4 these come first."""
    return tuple(layer for layer in config.layers if layer.owner)


def sharing_layers(config: Gemma4Config) -> tuple[LayerConfig, ...]:
    """The layers that read an owner's: they write nothing, so a prompt's last token is enough."""
    return tuple(layer for layer in config.layers if not layer.owner)


def embedded(
    params: Params, config: Gemma4Config, ids: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The stream's start [batch, tokens, hidden] and each layer's own input, f32.

    The inputs are [batch, tokens, layers, per_layer]; None where the model has none.
    """
    table = params["embed_tokens.weight"]
    scale = embedding_scale(config.hidden, table.dtype)
    x = table[ids].astype(jnp.float32) * scale
    if not config.per_layer:
        return x, None
    shape = (*ids.shape, len(config.layers), config.per_layer)
    rows = params["embed_tokens_per_layer.weight"][ids].astype(jnp.float32).reshape(shape)
    context = project(x, params["per_layer_model_projection.weight"]) * context_scale(config.hidden)
    context = rms_norm(
        context.reshape(shape), params["per_layer_projection_norm.weight"], config.norm_eps
    )
    return x, blended_inputs(context, rows * table_scale(config.per_layer, table.dtype))


def queries_of(
    weight: _Weight,
    layer: LayerConfig,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    eps: float,
) -> jax.Array:
    """Normed and turned queries [batch, tokens, heads, head_dim]."""
    raw = project(x, weight("self_attn.q_proj.weight"))
    raw = raw.reshape(*x.shape[:2], layer.heads, layer.head_dim)
    return rotate(rms_norm(raw, weight("self_attn.q_norm.weight"), eps), tables)


def keys_and_values(
    weight: _Weight,
    layer: LayerConfig,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Keys, normed and turned, and values, normed without weight: [batch, kv, tokens, head_dim].

    Where `k_is_v` the values are made of what k_proj gave, before its norm.
    """
    shape = (*x.shape[:2], layer.kv_heads, layer.head_dim)
    raw = project(x, weight("self_attn.k_proj.weight")).reshape(shape)
    values = raw
    if not layer.k_is_v:
        values = project(x, weight("self_attn.v_proj.weight")).reshape(shape)
    keys = rotate(rms_norm(raw, weight("self_attn.k_norm.weight"), eps), tables)
    return keys.transpose(0, 2, 1, 3), rms_norm(values, None, eps).transpose(0, 2, 1, 3)


def feed_forward(weight: _Weight, config: Gemma4Config, x: jax.Array) -> jax.Array:
    """What the MLP, and beside it the experts, add to the stream x."""
    eps = config.norm_eps
    inner = rms_norm(x, weight("pre_feedforward_layernorm.weight"), eps)
    gate = gelu(project(inner, weight("mlp.gate_proj.weight")))
    dense = project(
        gate * project(inner, weight("mlp.up_proj.weight")), weight("mlp.down_proj.weight")
    )
    if config.experts:
        dense = rms_norm(dense, weight("post_feedforward_layernorm_1.weight"), eps)
        stream = x.reshape(-1, config.hidden)
        scores = project(
            router_input(stream, weight("router.scale"), eps), weight("router.proj.weight")
        )
        ids, shares = chosen_experts(scores, config.experts_used, weight("router.per_expert_scale"))
        sparse = through_experts(
            rms_norm(stream, weight("pre_feedforward_layernorm_2.weight"), eps),
            ids,
            shares,
            weight("experts.gate_up_proj"),
            weight("experts.down_proj"),
        )
        sparse = rms_norm(sparse, weight("post_feedforward_layernorm_2.weight"), eps)
        dense = dense + sparse.reshape(x.shape)
    return rms_norm(dense, weight("post_feedforward_layernorm.weight"), eps)


def own_input_added(weight: _Weight, x: jax.Array, own: jax.Array, eps: float) -> jax.Array:
    """The stream with a layer's own input [batch, tokens, per_layer] let in through its gate."""
    gate = gelu(project(x, weight("per_layer_input_gate.weight"))) * own
    answer = project(gate, weight("per_layer_projection.weight"))
    return x + rms_norm(answer, weight("post_per_layer_input_norm.weight"), eps)


def through_layers(
    params: Params,
    config: Gemma4Config,
    layers: Sequence[LayerConfig],
    new: NewTokens,
    stream: tuple[jax.Array, jax.Array | None],
    caches: Caches,
) -> tuple[jax.Array, Caches]:
    """The stream after `layers`, and the caches with the new tokens in them.

    `stream` is as `embedded` gives it, or as earlier layers left it. New keys go into the caches
    before these are read, but for a sliding layer and several new tokens: its ring must not lose
    what the first of them still sees, so there they stand beside what the ring held.
    """
    x, inputs = stream
    eps = config.norm_eps
    tables = {}
    for layer in layers:
        if layer.sliding not in tables:
            theta, rotated = (
                (config.sliding_theta, 1.0)
                if layer.sliding
                else (config.full_theta, config.full_rotated)
            )
            frequencies = rotary_frequencies(layer.head_dim, theta, rotated)
            tables[layer.sliding] = rotary_tables(new.positions, frequencies)
    before = new.positions[:, 0]
    after = before + jnp.maximum(jnp.sum(new.real, axis=1, dtype=jnp.int32), 1)
    keys, values = dict(caches.keys), dict(caches.values)
    views: dict[int, KeyView] = {}

    def keep(index: int, ring: bool, fresh_keys: KeptRows, fresh_values: KeptRows) -> None:
        """Put an owner's new keys and values into its cache, and its view where others find it."""
        if ring and kept_length(fresh_keys) > 1:
            held = cached_view(keys[index], values[index], new.first, before)
            # Padding is in view too, at positions after all that is real: only it sees it.
            wide = widened_view(held, fresh_keys, fresh_values, new.positions)
            turn = (new.first, before, after)
            keys[index] = closed_ring(keys[index], wide.keys, *turn)
            values[index] = closed_ring(values[index], wide.values, *turn)
            views[index] = wide
        else:
            place = (new.first, new.positions, new.real)
            keys[index] = written(keys[index], fresh_keys, *place)
            values[index] = written(values[index], fresh_values, *place)

    for layer in layers:

        def weight(name: str, prefix: str = f"layers.{layer.index}.") -> Any:
            return params[prefix + name]

        turned = tables[layer.sliding]
        normed = rms_norm(x, weight("input_layernorm.weight"), eps)
        queries = queries_of(weight, layer, normed, turned, eps)
        if layer.owner:
            cache = keys[layer.index]
            made, told = keys_and_values(weight, layer, normed, turned, eps)
            fresh = (kept_rows_like(cache, rows) for rows in (made, told))
            keep(layer.index, layer.sliding, *fresh)
        source = layer.source
        if source not in views:
            views[source] = cached_view(keys[source], values[source], new.first, after)
        window = config.window if layer.sliding else None
        drawn = attend(queries, new.positions, views[source], window)
        drawn = project(drawn.reshape(*x.shape[:2], -1), weight("self_attn.o_proj.weight"))
        x = x + rms_norm(drawn, weight("post_attention_layernorm.weight"), eps)
        x = x + feed_forward(weight, config, x)
        if inputs is not None:
            x = own_input_added(weight, x, inputs[:, :, layer.index], eps)
        x = scaled_stream(x, weight("layer_scalar"))
    return x, kept_in_place(Caches(keys, values))


def logits_of(params: Params, config: Gemma4Config, x: jax.Array) -> jax.Array:
    """Logits [..., vocabulary] f32 of the last layer's stream; the head is the embedding."""
    normed = rms_norm(x, params["norm.weight"], config.norm_eps)
    logits = gathered(project(normed, params["embed_tokens.weight"]))
    return capped_logits(logits, config.softcap)


def prompt_logits(
    params: Params, config: Gemma4Config, ids: jax.Array, caches: Caches
) -> jax.Array:
    """Logits [tokens, vocabulary] f32 at every position of one prompt, ids [tokens], at once.

    For tests and comparisons: serving never needs more than the last one. `caches` have at least
    one row, of any content, as long as the prompt.
    """
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
    new = NewTokens(ids[None], positions, jnp.ones(positions.shape, jnp.bool_), 0)
    stream = embedded(params, config, new.ids)
    x, _ = through_layers(params, config, config.layers, new, stream, caches)
    return logits_of(params, config, x)[0]


# ── jax / sampling ────────────────────────────────────────────────────────────────────────────────
# Chooses the next token of every row of a batch at once, on the device, from its logits.
#
# Knows no model and no requests. A row's choice follows from its logits, settings, seed and
# position
# alone, whatever rows stand beside it. Nothing is sorted: a row's cut is found among its 256
# likeliest tokens, or by bisection where it lies beyond. What no row asks for is not computed.

SAMPLING_NEAR = 256  # likeliest tokens among which a cut is looked for first
SAMPLING_BLOCK = 512  # tokens of a block; first a block is drawn, then a token of it
_SAMPLING_FARTHEST = 0x7F800000  # the bits of infinity, the greatest distance there is
_SAMPLING_TINY = 1e-38  # keeps a division by a share that is 0 from making no number


class SamplingRows(NamedTuple):
    """The settings of each row, arrays [b]; what they mean is told at the engine's `Sampling`.

    f32: temperature, top_p, min_p, repetition, presence, frequency; int32: top_k, logprobs (how
    many alternatives, -1 for no log probability); uint32: seed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array
    logprobs: jax.Array


class SamplingMasks(NamedTuple):
    """Which tokens each row may get: `words` uint32 [b, ceil(V / 32)], token n at bit n % 32 of
    word n // 32; `masked` bool [b], false where a row may get any and its words mean nothing."""

    words: jax.Array
    masked: jax.Array


class SamplingCut(NamedTuple):
    """What of each row may be drawn, arrays [b].

    All tokens nearer than `reach` f32, and of those exactly there the ones up to id `last` int32.
    """

    reach: jax.Array
    last: jax.Array


def sample_step(
    logits: jax.Array,
    rows: SamplingRows,
    seen: jax.Array,
    counts: jax.Array,
    position: jax.Array,
    masks: SamplingMasks,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """One token for each row: (tokens, logprob, top_ids, top_logprobs, counts).

    logits [b, V] f32. seen [b, V] bool: tokens of the prompt. counts [b, V] int32: how often each
    is in the answer; comes back with the chosen one counted. position [b] int32: where the token
    will stand; with the seed it makes the random numbers. tokens [b] int32; logprob [b] and
    top_logprobs [b, 20] f32 are those of `logits`, zeros where no row wants them: the model's own,
    before penalties and masks, as in vLLM ("raw_logprobs", its default).
    """
    wanted = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    adjusted = lax.cond(
        jnp.any(wanted), _penalised, lambda logits, *_: logits, logits, rows, seen, counts
    )
    adjusted = lax.cond(
        jnp.any(masks.masked), _only_allowed, lambda logits, _: logits, adjusted, masks
    )
    highest, likeliest = _likeliest(adjusted)
    drawn = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: _drawn(_distances(adjusted, highest, rows.temperature), rows, position),
        lambda: likeliest,
    )
    tokens = jnp.where(rows.temperature > 0, drawn, likeliest)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    logprob, top_ids, top_logprobs = _told(logits, tokens, rows.logprobs)
    return tokens, logprob, top_ids, top_logprobs, counts.at[batch, tokens].add(1)


def _in_blocks(values: jax.Array, filling: float) -> jax.Array:
    """values [b, V] as [b, blocks, SAMPLING_BLOCK], the last one filled up."""
    batch, size = values.shape
    missing = -size % SAMPLING_BLOCK
    whole = jnp.pad(values, ((0, 0), (0, missing)), constant_values=filling)
    return whole.reshape(batch, -1, SAMPLING_BLOCK)


def _block_of(blocks: jax.Array, number: jax.Array) -> jax.Array:
    """Block `number` [b] of each row of [b, blocks, SAMPLING_BLOCK]."""
    return jnp.take_along_axis(blocks, number[:, None, None], axis=1)[:, 0]


def _token_of(block: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """The id at `place` of `block`, [b] each; one that exists even where logits are no numbers."""
    return jnp.minimum(block * SAMPLING_BLOCK + place, size - 1).astype(jnp.int32)


def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest logit of each row [b, V], and the lowest id that has it: [b] each.

    argmax over all is slow on a CPU, the maximum is not: 16 rows of 262,144 take 19 and 0.6 ms of
    processor time. So it looks for the block first.
    """
    blocks = _in_blocks(logits, -jnp.inf)
    highest = jnp.max(blocks, axis=-1)
    block = jnp.argmax(highest, axis=-1)
    place = jnp.argmax(_block_of(blocks, block), axis=-1)
    return jnp.max(highest, axis=-1), _token_of(block, place, logits.shape[-1])


def _penalised(
    logits: jax.Array, rows: SamplingRows, seen: jax.Array, counts: jax.Array
) -> jax.Array:
    """Logits after the penalties, in vLLM's order and form: repetition, frequency, presence.

    The repetition penalty divides a positive logit and multiplies a negative one (Keskar et al.
    2019, "CTRL", as vLLM and transformers have it); the others are OpenAI's: subtracted.
    """
    answered = counts > 0
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen | answered, repeated, logits)
    logits = logits - rows.frequency[:, None] * counts.astype(jnp.float32)
    return logits - rows.presence[:, None] * answered.astype(jnp.float32)


def _only_allowed(logits: jax.Array, masks: SamplingMasks) -> jax.Array:
    """Logits with -inf, a share of exactly 0, where a masked row's bit is not set."""
    bits = (masks.words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[-1]] == 1
    return jnp.where(allowed | ~masks.masked[:, None], logits, -jnp.inf)


def _distances(logits: jax.Array, highest: jax.Array, temperature: jax.Array) -> jax.Array:
    """How far each token lies below its row's likeliest, over the temperature: [b, V], 0 or more.

    A token's share of the whole is exp(-distance) over the sum of these.
    """
    return (highest[:, None] - logits) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def _drawn(distances: jax.Array, rows: SamplingRows, position: jax.Array) -> jax.Array:
    """A token of each row, drawn from what its settings leave: [b] int32.

    By the largest of shares with Gumbel noise, twice: which block of ids, then which id in it. So
    few random numbers are needed, and a token that was cut off can never win.
    """
    size = distances.shape[-1]
    cut = lax.cond(
        jnp.any(_restricted(rows)), lambda: cut_of(distances, rows), lambda: _no_cut(rows, size)
    )
    kept = _kept(distances, jnp.arange(size, dtype=jnp.int32), cut)
    blocks = _in_blocks(jnp.where(kept, distances, jnp.inf), jnp.inf)
    shares = jnp.sum(jnp.exp(-blocks), axis=-1)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (SAMPLING_BLOCK + shares.shape[-1],))

    noises = jax.vmap(noise)(rows.seed, position)
    block = jnp.argmax(noises[:, SAMPLING_BLOCK:] + jnp.log(shares), axis=-1)
    place = jnp.argmax(noises[:, :SAMPLING_BLOCK] - _block_of(blocks, block), axis=-1)
    return _token_of(block, place, size)


def _restricted(rows: SamplingRows) -> jax.Array:
    """Which rows [b] draw, and not from all tokens."""
    some = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    return some & (rows.temperature > 0)


def _no_cut(rows: SamplingRows, size: int) -> SamplingCut:
    """All of `size` tokens may be drawn."""
    return SamplingCut(
        jnp.full(rows.top_k.shape, jnp.inf, jnp.float32),
        jnp.full(rows.top_k.shape, size, jnp.int32),
    )


def _kept(distances: jax.Array, ids: jax.Array, cut: SamplingCut) -> jax.Array:
    """Which tokens [b, …] the cut leaves."""
    reach, last = cut.reach[:, None], cut.last[:, None]
    return (distances < reach) | ((distances == reach) & (ids <= last))


def cut_of(distances: jax.Array, rows: SamplingRows) -> SamplingCut:
    """Where top_k, then top_p of what it leaves, then min_p end the row's tokens.

    Tokens come in the order of distance, and of id where that is equal. top_p keeps a token if
    those before it have less than that share; min_p, if its share is at least that much of the
    likeliest one's. The likeliest token is always kept.
    """
    near, fits = _near_cut(distances, rows)
    restricted = _restricted(rows)
    far = lax.cond(jnp.all(fits | ~restricted), lambda: near, lambda: _far_cut(distances, rows))
    cut = _chosen_cut(fits, near, far)
    return _chosen_cut(restricted, cut, _no_cut(rows, distances.shape[-1]))


def _chosen_cut(first: jax.Array, one: SamplingCut, other: SamplingCut) -> SamplingCut:
    """The rows of `one` where `first` [b], else those of `other`."""
    return SamplingCut(
        jnp.where(first, one.reach, other.reach), jnp.where(first, one.last, other.last)
    )


def _most_tokens(rows: SamplingRows, size: int) -> jax.Array:
    """How many tokens top_k leaves of `size`."""
    return jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)


def _least_likely(rows: SamplingRows) -> jax.Array:
    """The distance at which a share is min_p of the likeliest one's; infinite where that is off."""
    return -jnp.log(rows.min_p)


def _near_cut(distances: jax.Array, rows: SamplingRows) -> tuple[SamplingCut, jax.Array]:
    """The cut among the likeliest tokens, and for which rows [b] it lies there."""
    size = distances.shape[-1]
    width = min(SAMPLING_NEAR, size)
    nearest, ids = lax.top_k(-distances, width)
    nearest = -nearest
    shares = jnp.exp(-nearest)
    most = _most_tokens(rows, size)
    within = jnp.arange(width) < most[:, None]
    # The whole is known of these few, or of all; not of a top_k between.
    known = (most <= width) | (most >= size)
    total = jnp.where(
        most <= width,
        jnp.sum(jnp.where(within, shares, 0.0), axis=-1),
        jnp.sum(jnp.exp(-distances), axis=-1),
    )
    before = jnp.cumsum(shares, axis=-1) - shares
    enough = jnp.where(rows.top_p < 1, rows.top_p * total, jnp.inf)
    kept = within & (before < enough[:, None]) & (nearest <= _least_likely(rows)[:, None])
    count = jnp.maximum(jnp.sum(kept.astype(jnp.int32), axis=-1), 1)
    fits = known & ((count < width) | (most <= width))
    place = (count - 1)[:, None]
    cut = SamplingCut(
        jnp.take_along_axis(nearest, place, axis=-1)[:, 0],
        jnp.take_along_axis(ids, place, axis=-1)[:, 0].astype(jnp.int32),
    )
    return cut, fits


def _far_cut(distances: jax.Array, rows: SamplingRows) -> SamplingCut:
    """The same cut wherever it lies: the nearest of three, and how many at its end are kept."""
    size = distances.shape[-1]
    most = _most_tokens(rows, size)

    def tokens(inside: jax.Array) -> jax.Array:
        return jnp.sum(inside.astype(jnp.int32), axis=-1)

    def share(inside: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(inside, jnp.exp(-distances), 0.0), axis=-1)

    reach_k = _least_reach(lambda reach: tokens(distances <= reach[:, None]) >= most, most)
    ties_k = most - tokens(distances < reach_k[:, None])
    total = share(distances < reach_k[:, None]) + ties_k * jnp.exp(-reach_k)
    enough = rows.top_p * total
    reach_p = _least_reach(lambda reach: share(distances <= reach[:, None]) >= enough, most)
    missing = enough - share(distances < reach_p[:, None])
    ties_p = jnp.ceil(missing / jnp.maximum(jnp.exp(-reach_p), _SAMPLING_TINY))
    ties_p = jnp.clip(ties_p, 1, size).astype(jnp.int32)
    reach_p = jnp.where(rows.top_p < 1, reach_p, jnp.inf)

    reach = jnp.minimum(jnp.minimum(reach_k, reach_p), _least_likely(rows))
    ties = jnp.minimum(
        jnp.where(reach == reach_k, ties_k, size), jnp.where(reach == reach_p, ties_p, size)
    )
    tied = distances == reach[:, None]
    ids = jnp.arange(size, dtype=jnp.int32)
    last = _least_holding(
        size - 1, lambda last: tokens(tied & (ids <= last[:, None])) >= ties, most
    )
    return SamplingCut(reach, last)


def _least_reach(holds: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The least distance of each row [b] at which `holds`, which stays true farther out."""

    def distance(bits: jax.Array) -> jax.Array:
        # The order of floats that are 0 or more is the order of their bits.
        return lax.bitcast_convert_type(bits, jnp.float32)

    return distance(_least_holding(_SAMPLING_FARTHEST, lambda bits: holds(distance(bits)), like))


def _least_holding(
    highest: int, holds: Callable[[jax.Array], jax.Array], like: jax.Array
) -> jax.Array:
    """The least of 0..highest for each row at which `holds`; `highest` where it never does.

    By bisection; `like` is any int32 array [b].
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        good = holds(middle)
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    ends = (jnp.zeros_like(like), jnp.full_like(like, highest))
    found: jax.Array = lax.fori_loop(0, highest.bit_length(), halve, ends)[1]
    return found


def _told(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The chosen tokens' log probabilities [b], and the likeliest ids and theirs [b, 20]."""
    shape = (*tokens.shape, MOST_LOGPROBS)
    no_top = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def none() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return jnp.zeros(tokens.shape, jnp.float32), no_top

    def some() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        whole = jax.nn.logsumexp(logits, axis=-1)

        def likeliest() -> tuple[jax.Array, jax.Array]:
            best, ids = lax.top_k(logits, MOST_LOGPROBS)
            return ids.astype(jnp.int32), best - whole[:, None]

        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return chosen - whole, lax.cond(jnp.any(wanted > 0), likeliest, lambda: no_top)

    logprob, (top_ids, top_logprobs) = lax.cond(jnp.any(wanted >= 0), some, none)
    return logprob, top_ids, top_logprobs


# ── jax / steps ───────────────────────────────────────────────────────────────────────────────────
# The few programs that an engine runs, each of one shape: what they compute, for which shapes.
#
# Knows no requests and compiles nothing: `engine_programs` lists what an engine compiles when it
# starts, for the chip that is here or for one that is not. Nothing in them looks at a device.

_BUCKET_STEP = 2  # a chunk is padded to the next of 16, 32, 64, …: less than twice too long
_LEAST_BUCKET = 16


class ChosenTokens(NamedTuple):
    """What was chosen for each row: tokens int32, their log probabilities, and the likeliest 20."""

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


# What one step of a decode hands the next: state, last tokens, their positions, all choices.
StepCarry = tuple[EngineState, jax.Array, jax.Array, ChosenTokens]


@dataclass(frozen=True)
class EngineProgram:
    """One program of one shape. `donated`: the arguments whose memory the results take over."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]


def chunk_buckets(chunk: int) -> tuple[int, ...]:
    """The lengths that pieces of a prompt are padded to, rising; the last one is `chunk`."""
    buckets = []
    length = _LEAST_BUCKET
    while length < chunk:
        buckets.append(length)
        length *= _BUCKET_STEP
    return (*buckets, chunk)


def batch_sizes(slots: int) -> tuple[int, ...]:
    """How many rows a decode takes: 1, 2, 4, … and all of them."""
    sizes = []
    size = 1
    while size < slots:
        sizes.append(size)
        size *= 2
    return (*sizes, slots)


def take_chunk(
    config: Gemma4Config,
    params: Params,
    state: EngineState,
    row: jax.Array,
    ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[EngineState, jax.Array]:
    """Take the next `count` of a prompt's tokens, ids [bucket], into `row`; `start` came before.

    Only layers that own keys are run. Gives the stream [1, 1, hidden] f32 of the last of them.
    """
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)
    real = places < count
    new = NewTokens(ids[None], (start + places)[None], real[None], row)
    stream = embedded(params, config, new.ids)
    x, caches = through_layers(params, config, owner_layers(config), new, stream, state.caches)
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1) & (start > 0)
    seen = seen.at[0, jnp.where(real, ids, config.vocabulary)].set(True, mode="drop")
    seen = lax.dynamic_update_slice_in_dim(state.seen, seen, row, 0)
    last = lax.dynamic_slice_in_dim(x, count - 1, 1, axis=1)
    return EngineState(caches, seen, state.counts), last


def finish_prompt(
    config: Gemma4Config,
    params: Params,
    state: EngineState,
    row: jax.Array,
    stream: jax.Array,
    token: jax.Array,
    position: jax.Array,
    settings: SamplingRows,
    masks: SamplingMasks,
) -> tuple[EngineState, ChosenTokens]:
    """The first token of an answer, from the prompt's last token, which stands at `position`.

    `stream` [1, 1, hidden] is what `take_chunk` left of it; arrays of the result are [1, …].
    """
    ids, positions = token[None, None], position[None, None]
    new = NewTokens(ids, positions, jnp.ones((1, 1), jnp.bool_), row)
    _, inputs = embedded(params, config, ids)
    x, _ = through_layers(
        params, config, sharing_layers(config), new, (stream, inputs), state.caches
    )
    seen = lax.dynamic_slice_in_dim(state.seen, row, 1)
    counts = jnp.zeros((1, config.vocabulary), jnp.int32)
    logits = logits_of(params, config, x[:, 0])
    *chosen, counts = sample_step(logits, settings, seen, counts, position[None] + 1, masks)
    counts = lax.dynamic_update_slice_in_dim(state.counts, counts, row, 0)
    return EngineState(state.caches, state.seen, counts), ChosenTokens(*chosen)


def decode_rows(
    config: Gemma4Config,
    context: int,
    most_steps: int,
    params: Params,
    state: EngineState,
    tokens: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    settings: SamplingRows,
    masks: SamplingMasks,
    steps: jax.Array,
) -> tuple[EngineState, ChosenTokens]:
    """`steps` further tokens, at most `most_steps`, for the active ones of the first rows.

    tokens, positions, active [batch]: the last token of each conversation and its position. `masks`
    hold for the first token alone: where a row has one, more steps mean nothing. Arrays
    of the result are [most_steps, batch, …]; those of a row mean nothing from where its context is
    full, or where it is not active: nothing of such a row changes.
    """
    batch = tokens.shape[0]
    blank = ChosenTokens(
        jnp.zeros((most_steps, batch), jnp.int32),
        jnp.zeros((most_steps, batch), jnp.float32),
        jnp.zeros((most_steps, batch, MOST_LOGPROBS), jnp.int32),
        jnp.zeros((most_steps, batch, MOST_LOGPROBS), jnp.float32),
    )

    def step(number: jax.Array, carried: StepCarry) -> StepCarry:
        state, tokens, positions, told = carried
        alive = active & (positions + 1 < context)
        new = NewTokens(tokens[:, None], positions[:, None], alive[:, None], 0)
        stream = embedded(params, config, new.ids)
        x, caches = through_layers(params, config, config.layers, new, stream, state.caches)
        logits = logits_of(params, config, x[:, 0])
        *chosen, _ = sample_step(
            logits, settings, state.seen[:batch], state.counts[:batch], positions + 1, masks
        )
        # Counted here and not by sampling: in place, and only for rows that go on.
        counts = state.counts.at[jnp.arange(batch), chosen[0]].add(alive.astype(jnp.int32))
        state = EngineState(caches, state.seen, counts)
        told = ChosenTokens(
            *(all_of.at[number].set(one) for all_of, one in zip(told, chosen, strict=True))
        )
        tokens = jnp.where(alive, chosen[0], tokens)
        return state, tokens, jnp.where(alive, positions + 1, positions), told

    state, _, _, told = lax.fori_loop(0, steps, step, (state, tokens, positions, blank))
    return state, told


def settings_shapes(batch: int) -> SamplingRows:
    """The sampling settings of `batch` rows, as shapes."""
    kinds: dict[str, Any] = {"top_k": jnp.int32, "logprobs": jnp.int32, "seed": jnp.uint32}
    return SamplingRows(
        *(stand_in((batch,), kinds.get(name, jnp.float32)) for name in SamplingRows._fields)
    )


def mask_shapes(batch: int, vocabulary: int) -> SamplingMasks:
    """The masks of `batch` rows, as shapes."""
    return SamplingMasks(
        stand_in((batch, mask_words(vocabulary)), jnp.uint32), stand_in((batch,), jnp.bool_)
    )


def mask_words(vocabulary: int) -> int:
    """How many words of 32 bits the mask of one row has."""
    return -(-vocabulary // 32)


def engine_programs(
    config: Gemma4Config,
    *,
    slots: int,
    context: int,
    dtype: jnp.dtype,
    chunk: int = 256,
    steps: int = 1,
    kv_dtype: jnp.dtype | None = None,
    keeps_prefixes: bool = False,
    forms: Mapping[str, WeightForm] | None = None,
) -> Iterator[EngineProgram]:
    """Every program of such an engine, with the shapes that it is compiled for.

    kv_dtype: of keys and values; None is `dtype`, that of the weights. `forms`: of each tensor by
    name; all are plain without it.
    """
    params = param_shapes(config, dtype, forms)
    state = state_shapes(config, slots, context, kv_dtype or dtype)
    number = stand_in((), jnp.int32)
    stream = stand_in((1, 1, config.hidden), jnp.float32)
    for bucket in chunk_buckets(min(chunk, context)):
        ids = stand_in((bucket,), jnp.int32)
        yield EngineProgram(
            f"prefill of {bucket}",
            partial(take_chunk, config),
            (params, state, number, ids, number, number),
            (1,),
        )
    one_mask = mask_shapes(1, config.vocabulary)
    yield EngineProgram(
        "first token",
        partial(finish_prompt, config),
        (params, state, number, stream, number, number, settings_shapes(1), one_mask),
        (1,),
    )
    for batch in batch_sizes(slots):
        whole = stand_in((batch,), jnp.int32)
        active = stand_in((batch,), jnp.bool_)
        masks = mask_shapes(batch, config.vocabulary)
        yield EngineProgram(
            f"decode of {batch}",
            partial(decode_rows, config, context, steps),
            (params, state, whole, whole, active, settings_shapes(batch), masks, number),
            (1,),
        )
    if slots > 1:
        yield EngineProgram("moving a row", moved_row, (state, number, number), (0,))
    if keeps_prefixes:
        size = min(chunk, context)
        kept, ids = kept_chunk_shapes(state, size), stand_in((size,), jnp.int32)
        taking = partial(chunk_taken_out, size)
        yield EngineProgram("taking a chunk out", taking, (state, number, number), ())
        back = (state, number, ids, number, kept)
        yield EngineProgram("putting a chunk back", chunk_put_back, back, (0,))


# ── jax / batch ───────────────────────────────────────────────────────────────────────────────────
# What a batch's programs take of its requests, and what is told of what they chose.
#
# Knows no conversation and compiles nothing.


def sampling_rows(samplings: Sequence[Sampling]) -> SamplingRows:
    """The settings of each row of a batch, as the programs take them."""

    def column(kind: Any, values: list[float]) -> Any:
        return np.asarray(values, kind)

    return SamplingRows(
        temperature=column(np.float32, [s.temperature for s in samplings]),
        top_k=column(np.int32, [s.top_k for s in samplings]),
        top_p=column(np.float32, [s.top_p for s in samplings]),
        min_p=column(np.float32, [s.min_p for s in samplings]),
        repetition=column(np.float32, [s.repetition_penalty for s in samplings]),
        presence=column(np.float32, [s.presence_penalty for s in samplings]),
        frequency=column(np.float32, [s.frequency_penalty for s in samplings]),
        seed=column(np.uint32, [s.seed & 0xFFFFFFFF for s in samplings]),
        logprobs=column(np.int32, [s.logprobs for s in samplings]),
    )


class BatchMasks:
    """The masks of a batch as the programs take them.

    Without any it is one array of each size that stays on the device: 16 rows of 262,144 tokens
    are 512 KiB, which an answer without a mask should not carry there at every step.
    """

    def __init__(self, vocabulary: int, sizes: Sequence[int], group: DeviceGroup | None) -> None:
        self._vocabulary = vocabulary
        self._none = {
            size: SamplingMasks(*placed_on(group, (self._words(size), self._unmasked(size))))
            for size in sizes
        }

    def of(self, batch: int, masks: Mapping[int, TokenMask]) -> SamplingMasks:
        """`masks` by row. A token of the model that a mask has no bit for is not allowed."""
        if not masks:
            return self._none[batch]
        words, masked = self._words(batch), self._unmasked(batch)
        for row, mask in masks.items():
            told = np.frombuffer(mask, "<u4")[: words.shape[1]]
            words[row, : len(told)], masked[row] = told, True
        return SamplingMasks(words, masked)

    def _words(self, batch: int) -> Any:
        return np.zeros((batch, mask_words(self._vocabulary)), np.uint32)

    def _unmasked(self, batch: int) -> Any:
        return np.zeros(batch, np.bool_)


class ToldTokens:
    """What a program chose, fetched from the device array by array, when it is asked for."""

    def __init__(self, chosen: ChosenTokens) -> None:
        self._chosen = chosen

    @cached_property
    def tokens(self) -> Any:
        return np.asarray(self._chosen.tokens)

    @cached_property
    def logprobs(self) -> Any:
        return np.asarray(self._chosen.logprobs)

    @cached_property
    def tops(self) -> tuple[Any, Any]:
        return np.asarray(self._chosen.top_ids), np.asarray(self._chosen.top_logprobs)

    def token(self, place: tuple[int, ...], sampling: Sampling) -> StepToken:
        """The token at (step, row), or (row,), with as much beside it as its request wants."""
        token = int(self.tokens[place])
        if sampling.logprobs < 0:
            return StepToken(token)
        top: tuple[tuple[int, float], ...] = ()
        if sampling.logprobs > 0:
            ids, values = (array[place][: sampling.logprobs].tolist() for array in self.tops)
            top = tuple(zip(ids, values, strict=True))
        return StepToken(token, float(self.logprobs[place]), top)


# ── jax / compiled ────────────────────────────────────────────────────────────────────────────────
# Compiles an engine's programs ahead of time, keeps them on disk, and counts every compilation.
#
# Knows nothing of what they compute.

# JAX records it around every compilation by the backend, or its retrieval from the disk cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts what this process compiles from its making on, whoever asks for it."""

    def __init__(self) -> None:
        self.compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.compilations += 1


def use_compile_cache(folder: Path) -> None:
    """From now on this process keeps what it compiles in `folder`, however small or quick."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, str | float] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def lowered_program(program: EngineProgram, group: DeviceGroup | None = None) -> Any:
    """The program as XLA's compiler is given it: for `group`, else for the default device."""
    if group is None:
        wrapped = jax.jit(program.function, donate_argnums=program.donated)
        return wrapped.lower(*program.arguments)
    with group.scope():
        results = jax.eval_shape(program.function, *program.arguments)
        wrapped = jax.jit(
            program.function,
            donate_argnums=program.donated,
            in_shardings=group.shardings(program.arguments),
            out_shardings=group.shardings(results),
        )
        return wrapped.lower(*program.arguments)


def compiled_programs(
    programs: Iterable[EngineProgram],
    report: Callable[[float, str], None],
    group: DeviceGroup | None = None,
) -> dict[str, Callable[..., Any]]:
    """Every program by its name, compiled for `group`, or for the default device.

    What is called afterwards is the executable itself: with arguments of another shape or dtype it
    raises TypeError instead of compiling anew.
    """
    listed = list(programs)
    ready: dict[str, Callable[..., Any]] = {}
    for number, program in enumerate(listed):
        report(number / len(listed), f"compiling {program.name}")
        ready[program.name] = lowered_program(program, group).compile()
    return ready


# ── jax / engine ──────────────────────────────────────────────────────────────────────────────────
# The engine itself: a loaded Gemma 4 that answers several conversations, one dispatch at a time.
#
# Knows no text, no requests and no queue; what it computes is in the programs it has compiled.

ENGINE_DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}
KV_DTYPES = {"auto": None, "int8": jnp.dtype(jnp.int8)}  # auto: as the weights
_ENGINE_WEIGHTS_SHARE = 0.4  # of the progress; the rest is compiling


@dataclass
class _Conversation:
    """What one slot is about. `taken`: prompt tokens in the caches; `last`, once it answers.

    `names`: of the prompt's whole chunks, where prefixes are kept.
    """

    prompt: Sequence[int]
    sampling: Sampling
    names: Sequence[bytes] = ()
    taken: int = 0
    total: int = 0
    last: int | None = None


def _first_line(error: Exception) -> str:
    """What an error of JAX says before it says where."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class JaxEngine:
    """A SlotEngine for a Hugging Face folder with a Gemma 4 of any size.

    context: tokens of one conversation, its answer included. dtype: "f32" or "bf16", of weights
    and, where kv_dtype is "auto", of keys and values; those may be "int8". chunk: most prompt
    tokens of one dispatch. steps: most tokens of one decode. quantization, unpack: in which form
    weights are served, as `weight_forms` takes them. compile_cache: a folder that keeps
    compiled programs for the next start. prefix_cache_gb: of the host's memory, for the beginnings
    of prompts; 0 keeps none. group: the devices that it runs on, JAX's default one where None.
    original: an engine of the same folder, dtype and forms that is loaded before this one, which
    then copies its weights and reads no file.
    Raises ModelRefused where the folder's config is not understood or its weights cannot be
    quantised, EngineFault where the model has not so many positions, or prefixes have no room.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        context: int,
        dtype: str,
        chunk: int = 256,
        steps: int = 1,
        quantization: str = "none",
        unpack: str = "step",
        kv_dtype: str = "auto",
        compile_cache: Path | None = None,
        prefix_cache_gb: float = 0.0,
        group: DeviceGroup | None = None,
        original: JaxEngine | None = None,
    ) -> None:
        self._folder = folder
        self._group, self._original = group, original
        self._config = read_config(folder)
        self._quantization, self._unpack = quantization, unpack
        # Refuses what cannot be quantised; which tensors are packed, the weights' files say.
        self._forms = weight_forms(self._config, (), quantization)
        if context > self._config.positions:
            raise EngineFault(
                f"a context of {context} tokens: the model has {self._config.positions} positions"
            )
        self._dtype = ENGINE_DTYPES[dtype]
        self._limits = EngineLimits(
            slots, context, self._config.vocabulary, min(chunk, context), steps
        )
        self._compile_cache = compile_cache
        self._kv_dtype = KV_DTYPES[kv_dtype] or self._dtype
        self._shapes = state_shapes(self._config, slots, context, self._kv_dtype)
        self._prefixes: PrefixCache | None = None
        if prefix_cache_gb:
            room = prefix_cache_gb * 1e9
            self._prefixes = PrefixCache(self._shapes, self._limits.chunk, room, self._call)
        self._rows = RowMap(batch_sizes(slots))
        self._conversations: dict[int, _Conversation] = {}

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def load(self, report: LoadReport) -> None:
        """Place the weights and compile every program. Raises EngineFault."""
        if self._compile_cache is not None:
            use_compile_cache(self._compile_cache)
        limits = self._limits

        def placed(share: float) -> None:
            report(share * _ENGINE_WEIGHTS_SHARE, "placing weights")

        def compiling(share: float, what: str) -> None:
            report(_ENGINE_WEIGHTS_SHARE + share * (1 - _ENGINE_WEIGHTS_SHARE), what)

        try:
            self._params = self._placed_params(placed)
            programs = engine_programs(
                self._config,
                slots=limits.slots,
                context=limits.context,
                dtype=self._dtype,
                chunk=limits.chunk,
                steps=limits.steps,
                kv_dtype=self._kv_dtype,
                keeps_prefixes=self._prefixes is not None,
                forms=self._forms,
            )
            self._programs = compiled_programs(programs, compiling, self._group)
            self._state: EngineState = (
                empty_state(self._shapes)
                if self._group is None
                else self._group.zeros(self._shapes)
            )
        except ModelRefused as refusal:
            raise EngineFault(str(refusal)) from None
        except jax.errors.JaxRuntimeError as error:  # most often: the device's memory is too small
            raise EngineFault(_first_line(error)) from error
        sizes = (1, *batch_sizes(limits.slots))
        self._masks = BatchMasks(limits.vocabulary, sizes, self._group)
        self._counter = CompileCounter()
        report(1.0, "loaded")

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        """Give the free `slot` a conversation; how many tokens of its prompt need not be read.

        Raises ValueError for what cannot be one.
        """
        if slot in self._conversations or not 0 <= slot < self._limits.slots:
            raise ValueError(f"slot {slot} is not free")
        if not 0 < len(prompt) < self._limits.context:
            context = self._limits.context
            raise ValueError(f"a prompt of {len(prompt)} tokens in a context of {context}")
        if not all(0 <= token < self._limits.vocabulary for token in prompt):
            raise ValueError(f"a token beyond the vocabulary of {self._limits.vocabulary}")
        talk = self._conversations[slot] = _Conversation(tuple(prompt), sampling)
        self._rows.give(slot)
        if self._prefixes is not None:
            talk.names = prefix_names(talk.prompt, self._limits.chunk, cache_salt)
            self._state, talk.taken = self._prefixes.begin(
                self._state, self._rows[slot], talk.prompt, talk.names
            )
        return talk.taken

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        """Take the prompt's next chunk; the first token of the answer once the prompt is whole."""
        talk = self._conversations[slot]
        limits = self._limits
        if talk.last is not None:
            raise ValueError(f"the prompt of slot {slot} has been read")
        piece = talk.prompt[talk.taken : talk.taken + limits.chunk]
        bucket = next(size for size in chunk_buckets(limits.chunk) if size >= len(piece))
        ids = np.zeros(bucket, np.int32)
        ids[: len(piece)] = piece
        row = np.int32(self._rows[slot])
        stream = self._run(
            f"prefill of {bucket}", row, ids, np.int32(talk.taken), np.int32(len(piece))
        )
        talk.taken += len(piece)
        if self._prefixes is not None:
            self._prefixes.keep(self._state, self._rows[slot], talk.names, talk.taken)
        if talk.taken < len(talk.prompt):
            return None
        last = np.int32(piece[-1]), np.int32(talk.taken - 1)
        settings = sampling_rows([talk.sampling])
        masks = self._masks.of(1, {} if mask is None else {0: mask})
        chosen = self._run("first token", row, stream, *last, settings, masks)
        token = ToldTokens(chosen).token((0,), talk.sampling)
        talk.last, talk.total = token.token, talk.taken + 1
        return token

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        """Up to `steps` further tokens for each of `slots`; none where the context is full."""
        masks = masks or {}
        steps = 1 if masks else max(1, min(steps, self._limits.steps))
        talks = {
            slot: self._conversations[slot]
            for slot in slots
            if self._conversations[slot].total < self._limits.context
        }
        told: dict[int, Sequence[StepToken]] = {slot: () for slot in slots}
        if not talks:
            return told
        for source, target in self._rows.pack(list(talks)):
            rows = np.int32(source), np.int32(target)
            self._state = self._call("moving a row", self._state, *rows)
        batch = self._rows.batch_of(list(talks))
        tokens, positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        active = np.zeros(batch, np.bool_)
        settings = [Sampling(temperature=0.0)] * batch
        for slot, talk in talks.items():
            row = self._rows[slot]
            if talk.last is None:
                raise ValueError(f"slot {slot} has not been prefilled")
            tokens[row], positions[row], active[row] = talk.last, talk.total - 1, True
            settings[row] = talk.sampling
        by_row = {self._rows[slot]: mask for slot, mask in masks.items() if slot in talks}
        allowed = self._masks.of(batch, by_row)
        inputs = (tokens, positions, active, sampling_rows(settings), allowed, np.int32(steps))
        chosen = ToldTokens(self._run(f"decode of {batch}", *inputs))
        for slot, talk in talks.items():
            many = min(steps, self._limits.context - talk.total)
            row = self._rows[slot]
            told[slot] = [chosen.token((step, row), talk.sampling) for step in range(many)]
            talk.last, talk.total = told[slot][-1].token, talk.total + many
        return told

    def end(self, slot: int) -> None:
        """Free the slot; whatever it held can be overwritten."""
        if self._conversations.pop(slot, None) is not None:
            self._rows.take(slot)

    def counters(self) -> Mapping[str, float]:
        """compiled_shapes; compiles_after_start, in the whole process; kv_bytes of all slots;
        where prefixes are kept, what PrefixCache counts."""
        return {
            "compiled_shapes": len(self._programs),
            "compiles_after_start": self._counter.compilations,
            "kv_bytes": kv_bytes(self._shapes),
            **(self._prefixes.counters() if self._prefixes is not None else {}),
        }

    def _placed_params(self, placed: Callable[[float], None]) -> Params:
        if self._original is not None and self._group is not None:
            self._forms = self._original._forms
            copied: Params = self._group.placed(self._original._params)
            placed(1.0)
            return copied
        weights = open_weights(self._folder, self._config)
        packed = [name for name, view in weights.items() if isinstance(view, PackedMatrix)]
        self._forms = weight_forms(self._config, packed, self._quantization, self._unpack)
        return place_params(weights, self._dtype, placed, self._forms, self._group)

    def _run(self, name: str, *arguments: Any) -> Any:
        """Run a program on weights and state, which it replaces."""
        self._state, result = self._call(name, self._params, self._state, *arguments)
        return result

    def _call(self, name: str, *arguments: Any) -> Any:
        """Run a program. Raises EngineFault; a state that was given is lost then."""
        try:
            return self._programs[name](*arguments)
        except jax.errors.JaxRuntimeError as error:
            raise EngineFault(f"{name}: {_first_line(error)}") from error


# ── jax / parallel ────────────────────────────────────────────────────────────────────────────────
# Puts an engine on as many devices as are asked for: parts of one model, copies of it, or both.
#
# Knows no programs and no requests.


def engine_on_devices(
    folder: Path, tensor_parallel: int, data_parallel: int, **settings: Any
) -> SlotEngine:
    """`data_parallel` copies of the model, each on `tensor_parallel` devices in JAX's order.

    settings: as JaxEngine has them; slots are each copy's own, prefix_cache_gb is shared out. One
    device is JAX's default one.
    Raises as JaxEngine does, ModelRefused where the model does not come out even, EngineFault
    where there are too few devices.
    """
    wanted = tensor_parallel * data_parallel
    if wanted == 1:
        return JaxEngine(folder, **settings)
    config = read_config(folder)
    refuse_uneven(config, tensor_parallel)
    devices = jax.local_devices()
    if len(devices) < wanted:
        raise EngineFault(
            f"tensor parallel {tensor_parallel} times data parallel {data_parallel} takes {wanted}"
            f" devices; here are {len(devices)} ({devices[0].device_kind})"
        )
    settings["prefix_cache_gb"] = settings.get("prefix_cache_gb", 0.0) / data_parallel
    groups = [
        DeviceGroup(config, devices[first : first + tensor_parallel])
        for first in range(0, wanted, tensor_parallel)
    ]
    original = JaxEngine(folder, group=groups[0], **settings)
    if data_parallel == 1:
        return original
    copies = [JaxEngine(folder, group=group, original=original, **settings) for group in groups[1:]]
    return ReplicatedEngine([original, *copies])


# ── programs / jax_server ─────────────────────────────────────────────────────────────────────────

_USUAL_CONTEXT = 4096  # where the model has as many positions
# Beginnings of prompts: of E2B, 27,000 tokens in f32 and twice as many in bf16. It fills with use.
_USUAL_PREFIX_GB = 1.0
_DRAIN_S = 30.0  # for answers that are under way when the end is asked for
_ABORT_S = 1.0  # for telling those that are broken off after that
_KEY_BYTES = 4096
_LOOK_EVERY_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 ended when asked, 1 a fault, 2 wrong usage or a
    model that is refused)."""
    arguments = _server_parser().parse_args(argv)
    folder: Path = arguments.model
    try:
        if not folder.is_dir():
            raise ModelRefused(f"{folder} is no folder")
        context = arguments.max_model_len or min(_USUAL_CONTEXT, read_config(folder).positions)
        if arguments.explain:
            print(
                explain_text(
                    folder,
                    dtype=arguments.dtype,
                    slots=arguments.slots,
                    context=context,
                    chunk=arguments.chunk,
                    kv_dtype=arguments.kv_dtype,
                    prefix_cache_gb=arguments.prefix_cache_gb,
                    quantization=arguments.quantization,
                    unpack=arguments.unpack,
                    bandwidth_gb_s=arguments.bandwidth_gb_s,
                )
            )
            return 0
        key = _api_key(arguments.api_key_file) if arguments.api_key_file else ""
        text = read_model_text(folder, _folder_file)
        engine = engine_on_devices(
            folder,
            arguments.tensor_parallel,
            arguments.data_parallel,
            slots=arguments.slots,
            context=context,
            dtype=arguments.dtype,
            chunk=arguments.chunk,
            steps=arguments.steps,
            kv_dtype=arguments.kv_dtype,
            quantization=arguments.quantization,
            unpack=arguments.unpack,
            compile_cache=arguments.compile_cache,
            prefix_cache_gb=arguments.prefix_cache_gb,
        )
        _check_memory(arguments, context)
    except (ModelRefused, ModelTextError, EngineFault, _WrongUsage) as error:
        return _ended(2, str(error))
    scheduler = Scheduler(engine, arguments.max_queue, _LoadingLines().tell)
    settings = FrontSettings(
        name=arguments.served_model_name or folder.resolve().name,
        api_key=key,
        loopback_only=_is_loopback(arguments.host),
    )
    if not settings.loopback_only and not key:
        _say(f"whoever reaches {arguments.host} can use this server: no API key is set")
    front = HttpFront(scheduler, text, settings)
    try:
        listener = listening_socket(arguments.host, arguments.port)
    except OSError as error:
        return _ended(1, f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")
    _say(f"listening on {arguments.host}:{listener.getsockname()[1]}, serving {settings.name}")
    server = HttpServer(front.app, listener, _DRAIN_S + _ABORT_S)
    failed = asyncio.run(serve_until_asked(scheduler, server, _DRAIN_S))
    if not scheduler.close(_ABORT_S) and not failed:
        # Compiling or a dispatch cannot be broken off, and Python would wait for its thread's end.
        _say("ended during a dispatch")
        sys.stderr.flush()
        os._exit(0)
    return _ended(1, failed) if failed else 0


def _check_memory(arguments: argparse.Namespace, context: int) -> None:
    """Refuse a start that needs more memory than it may use, before any weight is read."""
    stated: float | None = arguments.memory_gb
    limit = device_memory_bytes() if stated is None else round(stated * 1e9)
    if limit is None:
        return
    need = memory_need(
        arguments.model,
        dtype=arguments.dtype,
        slots=arguments.slots,
        context=context,
        chunk=arguments.chunk,
        kv_dtype=arguments.kv_dtype,
        quantization=arguments.quantization,
        unpack=arguments.unpack,
        ways=arguments.tensor_parallel,
    )
    refuse_beyond(need, limit)


async def serve_until_asked(scheduler: Scheduler, server: HttpServer, drain_s: float) -> str:
    """Load and serve until SIGTERM or SIGINT; why loading failed, empty where it did not.

    What is under way then has `drain_s` to be answered. A second signal breaks it off at once.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        if scheduler.view().phase == "draining":
            scheduler.abort()
        scheduler.drain()
        server.stop()
        loop.call_later(drain_s, scheduler.abort)

    with on_end_signals(loop, end):
        serving = asyncio.create_task(server.serve())
        scheduler.start()
        while scheduler.view().phase == "loading":
            await asyncio.sleep(_LOOK_EVERY_S)
        now = scheduler.view()
        if now.phase == "failed":
            server.stop()
        await serving
    return now.doing if now.phase == "failed" else ""


class _WrongUsage(Exception):
    """Something on the command line that cannot be; the message says what."""


def _say(words: str) -> None:
    print(f"jax_server: {words}", file=sys.stderr, flush=True)


def _ended(status: int, words: str) -> int:
    _say(words)
    return status


class _LoadingLines:
    """Says how far loading has come, each percentage of each step once."""

    def __init__(self) -> None:
        self._last = ""

    def tell(self, share: float, doing: str) -> None:
        line = f"{share:4.0%} {doing}"
        if line != self._last:
            self._last = line
            _say(line)


def _folder_file(folder: Path, name: str) -> Path | None:
    """The file `name` of a model's folder, None where there is none; links may not lead out."""
    return model_file(folder, name) if has_model_file(folder, name) else None


def _api_key(path: Path) -> str:
    """The key in a file, which is one line."""
    try:
        with path.open("rb") as file:
            key = file.read(_KEY_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise _WrongUsage(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _WrongUsage(f"--api-key-file {path}: a key is of ASCII characters") from None
    if not key or len(key) > _KEY_BYTES or any(not 32 < ord(c) < 127 for c in key):
        raise _WrongUsage(f"--api-key-file {path}: a key is one line without blanks, not empty")
    return key


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax_server.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 ended when asked, 1 a fault, 2 wrong usage or a model that is "
        "refused.",
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--served-model-name", default="", help="as requests name it")
    reach = parser.add_argument_group("who may ask")
    reach.add_argument("--host", default="127.0.0.1", help="(default %(default)s)")
    reach.add_argument(
        "--port", type=_bounded(0, 65535), default=8000, help="0: any (default %(default)s)"
    )
    reach.add_argument("--api-key-file", type=Path, help="a key that all but /health asks for")
    room = parser.add_argument_group("how much at once")
    room.add_argument(
        "--slots",
        type=_bounded(1, 1024),
        default=4,
        help="conversations at once, of each copy of the model (default %(default)s)",
    )
    room.add_argument(
        "--max-model-len",
        type=_bounded(2, 2**24),
        help=f"tokens of one, prompt and answer (default {_USUAL_CONTEXT}, or the model's own)",
    )
    room.add_argument(
        "--max-queue",
        type=_bounded(0, 100_000),
        default=64,
        help="requests that may wait for a slot (default %(default)s)",
    )
    room.add_argument(
        "--memory-gb",
        type=_positive,
        help="of each device; a start that needs more is refused (default what the device says)",
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument(
        "--dtype",
        choices=tuple(ENGINE_DTYPES),
        default="f32",
        help="of weights and caches (default %(default)s)",
    )
    how.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default="auto",
        help="of keys and values: auto is --dtype, int8 has a scale for each of them "
        "(default %(default)s)",
    )
    how.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="make 8-bit integers of a plain checkpoint's matrices (default %(default)s)",
    )
    how.add_argument(
        "--unpack",
        choices=UNPACKINGS,
        default="step",
        help="packed weights: in each step, small, or once at load (default %(default)s)",
    )
    how.add_argument(
        "--chunk",
        type=_bounded(1, 2**16),
        default=256,
        help="most prompt tokens of one dispatch (default %(default)s)",
    )
    how.add_argument(
        "--steps",
        type=_bounded(1, 256),
        default=4,
        help="most tokens of each answer in one dispatch (default %(default)s)",
    )
    how.add_argument(
        "--tensor-parallel",
        type=_bounded(1, 4096),
        default=1,
        metavar="N",
        help="devices that share one copy of the model, a part of it on each (default %(default)s)",
    )
    how.add_argument(
        "--data-parallel",
        type=_bounded(1, 4096),
        default=1,
        metavar="N",
        help="copies of the model, each on devices of its own (default %(default)s)",
    )
    how.add_argument("--compile-cache", type=Path, help="keeps compiled programs for next time")
    room.add_argument(
        "--prefix-cache-gb",
        type=_gigabytes,
        default=_USUAL_PREFIX_GB,
        help="most memory of this computer for the beginnings of prompts, so that a conversation's "
        "next turn is not read from its start; 0: off. How fast an answer begins can tell one "
        "client what another has asked: requests with a cache_salt of their own share nothing "
        "(default %(default)s)",
    )
    only = parser.add_argument_group("only explain")
    only.add_argument("--explain", action="store_true", help="sizes and bounds; loads no weights")
    only.add_argument("--bandwidth-gb-s", type=float, help="of the memory; else it is measured")
    return parser


def _bounded(least: int, most: int) -> Callable[[str], int]:
    """What argparse makes a whole number with, from `least` to `most`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}")
        return value

    return whole_number


def _gigabytes(text: str) -> float:
    """What argparse makes an amount of memory with."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _positive(text: str) -> float:
    """A finite number above zero, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
