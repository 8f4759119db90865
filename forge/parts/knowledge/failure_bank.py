"""The failure bank's engine: reads signatures, finds them in a log, puts the one that explains most
first.

Knows no program: what each says when it fails stands as data in the failures_… modules.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from forge.parts.ground.redact import printable, redact
from forge.parts.knowledge.failure_sums import FAILURE_SUMS

FailureStage = Literal[
    "capacity",
    "quota",
    "permission",
    "boot",
    "image",
    "download",
    "load",
    "compile",
    "memory",
    "serve",
    "client",
]
Certainty = Literal["certain", "likely", "possible"]
ChangeKind = Literal["flag", "setting", "package", "place", "grant", "run", "act"]

# How much a statement explains. A root is the fault itself, in its own words; a fault may have a
# root in the same log; a symptom always has a cause; an echo only repeats that something failed.
_LEVELS = ("echo", "symptom", "fault", "root")
_CERTAINTIES: tuple[Certainty, ...] = ("possible", "likely", "certain")
_FIELDS = ("line", "near", "unless", "also", "cause", "change", "futile", "issue", "sum")
_CHANGE_KINDS = ("flag", "setting", "package", "place", "grant", "run", "act")
_REACH = 40  # rows around the deciding one in which what belongs to it may stand
_SHORTEST_KEY = 3  # characters of a literal that are neither digits nor hexadecimal
_ROWS_A_KEY = 200  # distinct rows that are looked at for one key; a log may repeat it for ever
_LINE_LIMIT = 1000  # characters of a quoted line

# Letters and digits of hexadecimal ids are left out of the form under which rows count as alike:
# a log of a million requests is then a few hundred rows. Control characters never count.
_IGNORED = b"0123456789abcdef" + bytes(c for c in range(32) if c != 10) + b"\x7f"
# A captured value goes into advice only if it is a plain one: log text is data, never a command.
_PLAIN_VALUE = re.compile(r"(?!-)[\w.,:/@%+'() -]{1,160}")
_ARGUMENT_VALUE = re.compile(r"(?!-)[\w.:/@-]{1,120}")
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\?([^{}]*))?\}")

_CALM_LEVEL = re.compile(
    r"^.{0,120}?(?:(?<![\w-])(?:INFO|DEBUG|TRACE|NOTICE)(?![\w-])|(?<!\w)\[?(?:info|debug)\]?[ :\]]"
    r"|level=(?:info|debug)|severity\W{1,4}(?:INFO|DEBUG|NOTICE))|^\s*I\d{4} "
)
_WARNING_LEVEL = re.compile(r"^.{0,60}?(?<![\w-])(?:WARNING|WARN)(?![\w-])|^\s*W\d{4} |level=warn")
_ERROR_HEAD = re.compile(
    r"\b\w*(?:Error|Exception|OutOfResources|OutOfMemory)\b|\bERROR\b|\berror:|\bfatal\b|\bFATAL\b"
    r"|Error response|[Pp]ermission denied|error loading|startup-script|cloud-init",
)
# Not what happened, but what might, or what was got over.
_ONLY_TALK = re.compile(
    r"(?:\b(?:in case|if (?:you|it|this|the|there)|to (?:avoid|prevent|reduce)|avoid(?:s|ing)?"
    r"|prevent(?:s|ing)?|no longer|simulat\w+|handles|checks? for|watch(?:es|ing)? for"
    r"|instead of|tip|hint|(?:might|may|could|can) (?:get|see|receive|hit|cause|lead))\b[^.;]{0,60}"
    r"|\b(?:no|not|zero|0|without|any)\s+(?:an?\s+)?)$",
    re.I,
)
_GOT_OVER = re.compile(
    r"\b(?:retrying|will retry|will be retried|falling back|fell back|recovered|succeeded after"
    r"|ignoring|is ignored|harmless|trying (?:the next|another|port))\b",
    re.I,
)


class SignatureError(ValueError):
    """A signature's text breaks the grammar; the message names the signature and the line."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change as data: what, from what, to what. `argv` where it is a command, never run here.

    `kind` is flag (of the engine), setting (an environment variable or a field), package, place
    (zone, region, machine), grant (a role), run (a command) or act (a person's decision).
    """

    kind: ChangeKind
    name: str
    old: str = ""
    new: str = ""
    argv: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.argv:
            return f"run: {shlex.join(self.argv)}"
        if not self.new:
            return self.name
        return f"{self.name}: {self.old or 'as it is'} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Signature:
    """One fault as a program states it. Expressions are matched without regard to case."""

    kind: str
    stage: FailureStage
    level: int
    certainty: Certainty
    any_level: bool
    lines: tuple[str, ...]
    near: str
    unless: str
    also: tuple[str, ...]
    cause: str
    changes: tuple[Change, ...]
    futile: tuple[str, ...]
    upstream: str
    sum_name: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Literals in lower case, one of which stands in every line that can match."""
        return tuple(dict.fromkeys(k for line in self.lines for k in required_literals(line)))


@dataclass(frozen=True, slots=True)
class FailureMatch:
    """A signature found in a log: the deciding row (from 0) and line, and what follows from it."""

    signature: Signature
    row: int
    first_row: int
    line: str
    wording: int
    width: int
    numbers: Mapping[str, str]
    cause: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class LogLines:
    """A log as rows of raw bytes, short enough to be matched one by one."""

    rows: Sequence[bytes]
    _alike: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)

    def text(self, row: int) -> str:
        """Row `row`, printable."""
        return printable(self.rows[row].decode("utf-8", "replace"))

    def around(self, row: int, reach: int = _REACH) -> str:
        """The rows around `row`, printable, one a line."""
        near = self.rows[max(0, row - reach) : row + reach + 1]
        return printable(b"\n".join(near).decode("utf-8", "replace"))

    def alike(self) -> Mapping[bytes, tuple[int, int]]:
        """First and last row of each form: rows that differ in ids and numbers only are alike."""
        if not self._alike and self.rows:
            text = b"\n".join(self.rows).lower().translate(None, _IGNORED)
            forms = text.split(b"\n")
            last = dict(zip(forms, range(len(forms)), strict=True))
            first = dict(zip(reversed(forms), range(len(forms) - 1, -1, -1), strict=True))
            self._alike.update({form: (first[form], row) for form, row in last.items()})
        return self._alike


def quoted_line(text: str, around: str = "") -> str:
    """`text` as it may be quoted: redacted, at most 1,000 characters, those about `around`.

    Where it is cut, the broken word goes as well: half a secret is not recognised as one.
    """
    text = redact(text).strip()
    if len(text) <= _LINE_LIMIT:
        return text
    begin = max(0, text.find(around[:200]) - _LINE_LIMIT // 3)
    piece = text[begin : begin + _LINE_LIMIT]
    if begin:
        piece = piece.partition(" ")[2] or piece
    if begin + _LINE_LIMIT < len(text):
        piece = piece.rpartition(" ")[0] or piece
    return piece.strip()


# ---------------------------------------------------------------- the signatures' grammar


def parse_signatures(stage: FailureStage, text: str) -> list[Signature]:
    """The signatures in `text`, one after a ``== kind | level | certainty`` line each.

    Then a field a line, its name first: line (an expression; several are alternatives), near (must
    stand within 40 rows as well), unless (must not), also (gives numbers if it does), cause, change (``kind name: old -> new``),
    futile, issue, sum (see failure_sums). A line that begins with two blanks continues the field.
    Raises SignatureError.
    """
    found = []
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        head, _, body = block.partition("\n")
        words = [word.strip() for word in head.split("|")]
        if len(words) not in (3, 4) or words[1] not in _LEVELS or words[2] not in _CERTAINTIES:
            raise SignatureError(f"{stage}: '{head}' is not 'kind | level | certainty'")
        found.append(_signature(stage, words, _fields(words[0], body)))
    return found


def _fields(kind: str, body: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for line in body.split("\n"):
        if line.startswith("  ") and values:
            more = line.strip()
            values[-1] += more if more.startswith("|") else f" {more}"
        elif line.strip():
            name, _, value = line.partition(" ")
            if name not in _FIELDS:
                raise SignatureError(f"{kind}: unknown field '{name}'")
            values = fields.setdefault(name, [])
            values.append(value.strip())
    return fields


def _signature(stage: FailureStage, words: list[str], fields: dict[str, list[str]]) -> Signature:
    def one(name: str) -> str:
        values = fields.get(name, [])
        if len(values) > 1:
            raise SignatureError(f"{words[0]}: two fields '{name}'")
        return values[0] if values else ""

    if not fields.get("line") or not one("cause") or not fields.get("change"):
        raise SignatureError(f"{words[0]}: line, cause and change are needed")
    if one("sum") and one("sum") not in FAILURE_SUMS:
        raise SignatureError(f"{words[0]}: there is no sum '{one('sum')}'")
    signature = Signature(
        kind=words[0],
        stage=stage,
        level=_LEVELS.index(words[1]),
        certainty=_CERTAINTIES[_CERTAINTIES.index(words[2])],  # type: ignore[arg-type]
        any_level=words[3:] == ["any level"],
        lines=tuple(fields["line"]),
        near=one("near"),
        unless=one("unless"),
        also=tuple(fields.get("also", ())),
        cause=one("cause"),
        changes=tuple(_change(words[0], text) for text in fields["change"]),
        futile=tuple(fields.get("futile", ())),
        upstream=one("issue"),
        sum_name=one("sum"),
    )
    short = [key for key in signature.keys if len(_bare(key)) < _SHORTEST_KEY]
    if short or not signature.keys:
        raise SignatureError(f"{words[0]}: no literal in its line is long enough: {short}")
    return signature


def _change(kind: str, text: str) -> Change:
    """``flag --x: a -> b``, ``run program argument…`` or ``act what to do`` as a Change."""
    sort, _, rest = text.partition(" ")
    if sort not in _CHANGE_KINDS:
        raise SignatureError(f"{kind}: '{sort}' is no kind of change")
    which: ChangeKind = _CHANGE_KINDS[_CHANGE_KINDS.index(sort)]  # type: ignore[assignment]
    if sort == "run":
        return Change(which, rest, argv=tuple(shlex.split(rest)))
    if sort == "act":
        return Change(which, rest)
    name, colon, values = rest.partition(": ")
    old, arrow, new = values.partition(" -> ")
    if not colon or not arrow:
        raise SignatureError(f"{kind}: a change reads 'name: old -> new', not '{rest}'")
    return Change(which, name, old, new)


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
                best = _better(best, (run,))
                run = run if self._at == before else ""
                continue
            run = ""
            if isinstance(item, tuple) and required:
                best = _better(best, item)
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


def _better(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Of two choices of literals the one whose shortest is longer."""
    shortest = [min(len(_bare(text)) for text in choice) for choice in (one, other)]
    return other if shortest[1] > shortest[0] else one


def _bare(text: str) -> bytes:
    return text.lower().encode().translate(None, _IGNORED)


# ---------------------------------------------------------------- matching


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.I | re.M)


class FailureBank:
    """All signatures, ready to be looked for. Expressions are compiled when first needed."""

    def __init__(self, signatures: Sequence[Signature]) -> None:
        self.signatures = tuple(signatures)
        self._by_key: dict[bytes, list[Signature]] = {}
        for signature in self.signatures:
            for key in signature.keys:
                self._by_key.setdefault(_bare(key), []).append(signature)

    def diagnose(self, log: LogLines) -> list[FailureMatch]:
        """What the log's faults are, the one that explains most first; empty where there is none.

        Of several readings of one line only the best is kept.
        """
        best: dict[str, FailureMatch] = {}
        for signature, row, first in self._candidates(log):
            match = _match_row(signature, log, row, first)
            if match is None and first != row:
                match = _match_row(signature, log, first, first)
            known = best.get(signature.kind)
            # A signature's first wordings say more than its last ones.
            if match is not None and (known is None or match.wording < known.wording):
                best[signature.kind] = match
        up = _came_up_at(log)
        by_row: dict[int, FailureMatch] = {}
        for match in sorted(best.values(), key=_rank):
            # What only echoes a failure means nothing once the server has come up after it.
            if match.signature.level or match.row > up:
                by_row.setdefault(match.row, match)
        return sorted(by_row.values(), key=_rank)

    def _candidates(self, log: LogLines) -> Iterator[tuple[Signature, int, int]]:
        """(signature, last row, first row) wherever a literal of the signature stands."""
        alike = log.alike()
        text = b"\n".join(alike)
        for key, signatures in self._by_key.items():
            at, seen = text.find(key), 0
            while at >= 0 and seen < _ROWS_A_KEY:
                begin = text.rfind(b"\n", 0, at) + 1
                end = text.find(b"\n", at)
                end = len(text) if end < 0 else end
                first, last = alike[text[begin:end]]
                for signature in signatures:
                    yield signature, last, first
                at, seen = text.find(key, end), seen + 1


def _rank(match: FailureMatch) -> tuple[int, int, int, int, int]:
    """What explains more sorts first: level, conditions met, certainty, then the earlier row."""
    signature = match.signature
    conditions = bool(signature.near)
    certainty = _CERTAINTIES.index(signature.certainty)
    return (-signature.level, -conditions, -certainty, match.first_row, -match.width)


def _match_row(signature: Signature, log: LogLines, row: int, first: int) -> FailureMatch | None:
    text = log.text(row)
    plain = text.replace('\\"', '"')  # as it stood before it became part of a JSON string
    for wording, expression in enumerate(signature.lines):
        found = _compiled(expression).search(plain)
        if found is None or _is_calm(signature, plain, found.start()):
            continue
        values = {name: value for name, value in found.groupdict().items() if value}
        wanted = signature.near or signature.unless or signature.also
        around = log.around(row) if wanted else ""
        if signature.near:
            beside = _compiled(signature.near).search(around)
            if beside is None:
                continue
            values = {n: v for n, v in beside.groupdict().items() if v} | values
        if signature.unless and _compiled(signature.unless).search(around):
            continue
        for extra in signature.also:
            beside = _compiled(extra).search(around)
            if beside is not None:
                values = {n: v for n, v in beside.groupdict().items() if v} | values
        if signature.sum_name:
            values |= FAILURE_SUMS[signature.sum_name](values)
        return FailureMatch(
            signature=signature,
            row=row,
            first_row=first,
            line=quoted_line(text, found[0]),
            wording=wording,
            width=found.end() - found.start(),
            numbers={name: redact(value)[:160] for name, value in values.items()},
            cause=_filled(signature.cause, values),
            changes=tuple(_filled_change(change, values) for change in signature.changes),
        )
    return None


def _is_calm(signature: Signature, text: str, at: int) -> bool:
    """Whether a line only talks of a failure: an informing level, a hint, something got over.

    A warning counts only for what a signature is certain of.
    """
    if signature.any_level:
        return False
    if _CALM_LEVEL.search(text) and not _ERROR_HEAD.search(text):
        return True
    if signature.certainty != "certain" and _WARNING_LEVEL.search(text):
        return True
    return bool(_ONLY_TALK.search(text[:at]) or _GOT_OVER.search(text))


def _filled(template: str, values: Mapping[str, str], plain: re.Pattern[str] = _PLAIN_VALUE) -> str:
    """`template` with ``{name}`` or ``{name?what to say instead}`` filled in."""

    def value(match: re.Match[str]) -> str:
        text = redact(values.get(match[1], "")).strip()
        return text if plain.fullmatch(text) else (match[2] or f"<{match[1]}>")

    return _PLACEHOLDER.sub(value, template)


def _filled_change(change: Change, values: Mapping[str, str]) -> Change:
    argv = tuple(_filled(word, values, _ARGUMENT_VALUE) for word in change.argv)
    return replace(
        change,
        name=_filled(change.name, values),
        old=_filled(change.old, values),
        new=_filled(change.new, values),
        argv=argv,
    )


# ---------------------------------------------------------------- what no signature explains

_ALARM = re.compile(
    r"^.{0,100}?(?<![\w-])(?:ERROR|CRITICAL|FATAL|SEVERE)(?![\w-])"
    r"|^[EF]\d{4} |level=(?:error|fatal)|severity\W{1,4}(?:ERROR|CRITICAL|ALERT)"
    r"|^\s*(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)|^panic: |Segmentation fault|core dumped"
)
# Error lines that healthy starts print, each from its program's own source.
_HARMLESS = re.compile(
    r"Unable to register cu(?:DNN|FFT|BLAS) factory|TF-TRT Warning|Could not find TensorRT"
    r"|computation placer already registered|\b0 errors?\b|errors?[=:]\s*0\b",
    re.I,
)
_CAME_UP = re.compile(
    rb"Application startup complete|server is listening on|Uvicorn running on"
    rb"|llama runner started|Starting vLLM API server"
)


def _came_up_at(log: LogLines) -> int:
    """The last row in which a server says that it has come up; -1 where none does."""
    last = (row for _, row in log.alike().values())
    return max((row for row in last if _CAME_UP.search(log.rows[row])), default=-1)


def unexplained_rows(log: LogLines, most: int = 40) -> list[int]:
    """The rows that report an error in so many words, the last `most`, oldest first.

    For a log in which no signature was found: what stands before a start that came up, and what
    programs are known to print in health, is left out.
    """
    up = _came_up_at(log)
    found = []
    for row in sorted(row for _, row in log.alike().values()):
        if row <= up:
            continue
        text = log.text(row)
        if not _ALARM.search(text) or _HARMLESS.search(text):
            continue
        if not _GOT_OVER.search(text):
            found.append(row)
    return found[-most:]
