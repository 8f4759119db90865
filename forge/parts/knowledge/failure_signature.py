"""What a signature of a failure is, and how one is read from the text in the failures_… modules.

Knows no log and no program.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from forge.parts.knowledge.failure_sums import FAILURE_SUMS
from forge.parts.knowledge.log_answer import (
    FailureCertainty,
    FailureChange,
    FailureChangeKind,
    FailureStage,
)

# How much a statement explains. A root is the fault itself, in its own words; a fault may have a
# root in the same log; a symptom always has a cause; an echo only repeats that something failed.
EXPLAINING_LEVELS = ("echo", "symptom", "fault", "root")
CERTAINTY_ORDER: tuple[FailureCertainty, ...] = ("possible", "likely", "certain")
_SIGNATURE_FIELDS = ("line", "near", "unless", "also", "cause", "change", "futile", "issue", "sum")
_FAILURE_CHANGE_KINDS: tuple[FailureChangeKind, ...] = (
    "flag",
    "setting",
    "package",
    "place",
    "grant",
    "run",
    "act",
)
_SHORTEST_KEY = 3  # characters of a literal that are neither digits nor hexadecimal

# Letters and digits of hexadecimal ids are left out of the form under which rows count as alike:
# a log of a million requests is then a few hundred rows. Control characters never count.
IGNORED_BYTES = b"0123456789abcdef" + bytes(c for c in range(32) if c != 10) + b"\x7f"


class SignatureError(ValueError):
    """A signature's text breaks the grammar; the message names the signature and the line."""


@dataclass(frozen=True, slots=True)
class FailureSignature:
    """One fault as a program states it. Expressions are matched without regard to case."""

    kind: str
    stage: FailureStage
    level: int
    certainty: FailureCertainty
    any_level: bool
    lines: tuple[str, ...]
    near: str
    unless: str
    also: tuple[str, ...]
    cause: str
    changes: tuple[FailureChange, ...]
    futile: tuple[str, ...]
    upstream: str
    sum_name: str
    keys: tuple[str, ...]  # literals in lower case, one of which stands in every line that matches


def parse_signatures(stage: FailureStage, text: str) -> list[FailureSignature]:
    """The signatures in `text`, one after a ``== kind | level | certainty`` line each.

    Then a field a line, its name first: line (an expression; several are alternatives, the first
    says most), near (must stand within 40 rows as well), unless (must not), also (gives numbers if
    it does), cause, change (``kind name: old -> new``), futile, issue, sum (see failure_sums).
    A line that begins with two blanks continues the field.
    Raises SignatureError.
    """
    found = []
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        head, _, body = block.partition("\n")
        words = [word.strip() for word in head.split("|")]
        if (
            len(words) not in (3, 4)
            or words[1] not in EXPLAINING_LEVELS
            or words[2] not in CERTAINTY_ORDER
        ):
            raise SignatureError(f"{stage}: '{head}' is not 'kind | level | certainty'")
        found.append(_read_signature(stage, words, _signature_fields(words[0], body)))
    return found


def _signature_fields(kind: str, body: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for line in body.split("\n"):
        if line.startswith("  ") and values:
            more = line.strip()
            values[-1] += more if more.startswith("|") else f" {more}"
        elif line.strip():
            name, _, value = line.partition(" ")
            if name not in _SIGNATURE_FIELDS:
                raise SignatureError(f"{kind}: unknown field '{name}'")
            values = fields.setdefault(name, [])
            values.append(value.strip())
    return fields


def _read_signature(
    stage: FailureStage, words: list[str], fields: dict[str, list[str]]
) -> FailureSignature:
    def one(name: str) -> str:
        values = fields.get(name, [])
        if len(values) > 1:
            raise SignatureError(f"{words[0]}: two fields '{name}'")
        return values[0] if values else ""

    if not fields.get("line") or not one("cause") or not fields.get("change"):
        raise SignatureError(f"{words[0]}: line, cause and change are needed")
    if one("sum") and one("sum") not in FAILURE_SUMS:
        raise SignatureError(f"{words[0]}: there is no sum '{one('sum')}'")
    signature = FailureSignature(
        kind=words[0],
        stage=stage,
        level=EXPLAINING_LEVELS.index(words[1]),
        certainty=CERTAINTY_ORDER[CERTAINTY_ORDER.index(words[2])],
        any_level=words[3:] == ["any level"],
        lines=tuple(fields["line"]),
        near=one("near"),
        unless=one("unless"),
        also=tuple(fields.get("also", ())),
        cause=one("cause"),
        changes=tuple(_read_change(words[0], text) for text in fields["change"]),
        futile=tuple(fields.get("futile", ())),
        upstream=one("issue"),
        sum_name=one("sum"),
        keys=tuple(dict.fromkeys(k for line in fields["line"] for k in required_literals(line))),
    )
    short = [key for key in signature.keys if len(bare_key(key)) < _SHORTEST_KEY]
    if short or not signature.keys:
        raise SignatureError(f"{words[0]}: no literal in its line is long enough: {short}")
    return signature


def _read_change(kind: str, text: str) -> FailureChange:
    """``flag --x: a -> b``, ``run program argument…`` or ``act what to do`` as a FailureChange."""
    sort, _, rest = text.partition(" ")
    if sort not in _FAILURE_CHANGE_KINDS:
        raise SignatureError(f"{kind}: '{sort}' is no kind of change")
    which: FailureChangeKind = _FAILURE_CHANGE_KINDS[_FAILURE_CHANGE_KINDS.index(sort)]
    if sort == "run":
        return FailureChange(which, rest, argv=tuple(shlex.split(rest)))
    if sort == "act":
        return FailureChange(which, rest)
    name, colon, values = rest.partition(": ")
    old, arrow, new = values.partition(" -> ")
    if not colon or not arrow:
        raise SignatureError(f"{kind}: a change reads 'name: old -> new', not '{rest}'")
    return FailureChange(which, name, old, new)


def required_literals(expression: str) -> tuple[str, ...]:
    """Literals, one of which stands in whatever matches `expression`; an empty one: there is none.

    Reads the syntax that signatures use: sets, groups, quantifiers, alternatives, escapes.
    """
    return _LiteralReader(expression).alternatives()


class _LiteralReader:
    """Walks an expression once. What may be absent, sets and assertions give no literal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def alternatives(self) -> tuple[str, ...]:
        """The best literal of each branch, up to the end or the closing parenthesis."""
        found = self._branch()
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            found += self._branch()
        return found

    def _branch(self) -> tuple[str, ...]:
        best: tuple[str, ...] = ("",)
        run = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._item()
            before = self._at
            required = self._required()
            if isinstance(item, str) and item and required:
                run += item.lower()
                best = _longer_literals(best, (run,))
                run = run if self._at == before else ""
                continue
            run = ""
            if isinstance(item, tuple) and required:
                best = _longer_literals(best, item)
        return best

    def _item(self) -> str | tuple[str, ...]:
        """The next character, "" for a set of them, or the literals of a group."""
        char = self._text[self._at]
        self._at += 1
        if char == "\\":
            char = self._text[self._at]
            self._at += 1
            return "" if char.isalnum() else char
        if char == "[":
            self._at = self._text.index("]", self._at + 1) + 1
            return ""
        if char != "(":
            return "" if char in ".^$" else char
        assertion = re.compile(r"\?(?:=|!|<=|<!)").match(self._text, self._at)
        head = re.compile(r"\?(?::|P<\w+>|=|!|<=|<!)").match(self._text, self._at)
        self._at = head.end() if head else self._at
        found = self.alternatives()
        self._at += 1
        return "" if assertion else found

    def _required(self) -> bool:
        """Whether what was read must be there at least once; steps over its quantifier."""
        quantifier = re.compile(r"(?:[*?]|\{(\d+),?\d*\}|\+)\??").match(self._text, self._at)
        if quantifier is None:
            return True
        self._at = quantifier.end()
        return quantifier[0][0] == "+" or (quantifier[0][0] == "{" and quantifier[1] != "0")


def _longer_literals(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Of two choices of literals the one whose shortest is longer."""
    shortest = [min((len(bare_key(text)), len(text)) for text in c) for c in (one, other)]
    return other if shortest[1] > shortest[0] else one


def bare_key(text: str) -> bytes:
    """`text` in the form under which rows count as alike."""
    return text.lower().encode().translate(None, IGNORED_BYTES)
