"""Gemma 4's way to write a call, read into the name of a tool and the JSON of its arguments.

    call:NAME{city:"Oslo",days:[1,2],exact:true}     where each " is a token of its own

Source of the syntax: the chat template google-gemma-4-31B-it.jinja (llama.cpp b11434, 2026-11-29),
which writes earlier calls so. Knows no token and no stream.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

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
