"""The failure bank's engine: finds signatures in a log and puts the one that explains most first.

Knows no program: what each says when it fails stands as data in the failures_… modules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge.parts.ground.redact import printable, redact
from forge.parts.knowledge.failure_mentions import SERVER_UP, only_mentioned, reports_error
from forge.parts.knowledge.failure_signature import (
    CERTAINTY_ORDER,
    IGNORED_BYTES,
    FailureSignature,
    bare_key,
)
from forge.parts.knowledge.failure_sums import FAILURE_SUMS
from forge.parts.knowledge.log_answer import FailureAnswer, FailureChange

_ROWS_AROUND = 40  # rows around the deciding one in which what belongs to it may stand
_ROWS_A_KEY = 200  # distinct rows that are looked at for one key; a log may repeat it for ever
_QUOTED_CHARACTERS = 1000  # characters of a quoted line
# A captured value goes into advice only if it is a name, a number with its unit, or a list of
# names: log text is data, and a sentence out of it must not read as ours.
_PLAIN_VALUE = re.compile(
    r"(?!-)[\w.:/@%+-]{1,80}(?: [\w.:/@%+-]{1,20}){0,2}|[\w.-]{1,40}(?:, ?[\w.-]{1,40}){1,9}"
)
_ARGUMENT_VALUE = re.compile(r"(?!-)[\w.:/@-]{1,120}")
_TEMPLATE_VALUE = re.compile(r"\{(\w+)(?:\?([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class FailureMatch:
    """A signature found in a log: the deciding row (from 0) and line, and what follows from it."""

    signature: FailureSignature
    row: int
    first_row: int
    line: str
    wording: int
    width: int
    numbers: Mapping[str, str]
    cause: str
    changes: tuple[FailureChange, ...]

    @property
    def answer(self) -> FailureAnswer:
        """What goes out of it."""
        return FailureAnswer(
            kind=self.signature.kind,
            stage=self.signature.stage,
            certainty=self.signature.certainty,
            line=self.line,
            line_number=self.row + 1,
            cause=self.cause,
            changes=self.changes,
            futile=self.signature.futile,
            numbers=dict(self.numbers),
            upstream=self.signature.upstream,
        )


@dataclass(frozen=True)
class LogLines:
    """A log as rows of raw bytes, short enough to be matched one by one."""

    rows: Sequence[bytes]
    _alike: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def text(self, row: int) -> str:
        """Row `row`, printable."""
        if row not in self._texts:
            self._texts[row] = printable(self.rows[row].decode("utf-8", "replace"))
        return self._texts[row]

    def around(self, row: int, reach: int = _ROWS_AROUND) -> str:
        """The rows around `row`, printable, one a line."""
        near = self.rows[max(0, row - reach) : row + reach + 1]
        return printable(b"\n".join(near).decode("utf-8", "replace"))

    def alike(self) -> Mapping[bytes, tuple[int, int]]:
        """First and last row of each form: rows that differ in ids and numbers only are alike."""
        if not self._alike and self.rows:
            text = b"\n".join(self.rows).lower().translate(None, IGNORED_BYTES)
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
    if len(text) <= _QUOTED_CHARACTERS:
        return text
    begin = max(0, text.find(around[:200]) - _QUOTED_CHARACTERS // 3)
    piece = text[begin : begin + _QUOTED_CHARACTERS]
    if begin:
        piece = piece.partition(" ")[2] or piece
    if begin + _QUOTED_CHARACTERS < len(text):
        piece = piece.rpartition(" ")[0] or piece
    return piece.strip()


@functools.cache
def _signature_expression(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.I | re.M)


class FailureBank:
    """All signatures, ready to be looked for. Expressions are compiled when first needed."""

    def __init__(self, signatures: Sequence[FailureSignature]) -> None:
        self.signatures = tuple(signatures)
        self._by_key: dict[bytes, list[FailureSignature]] = {}
        for signature in self.signatures:
            for key in signature.keys:
                self._by_key.setdefault(bare_key(key), []).append(signature)

    def diagnose(self, log: LogLines) -> list[FailureMatch]:
        """What the log's faults are, the one that explains most first; empty where there is none.

        Of several readings of one line only the best is kept.
        """
        best: dict[str, FailureMatch] = {}
        for signature, row, first in self._candidates(log):
            match = _match_in_row(signature, log, row, first)
            if match is None and first != row:
                match = _match_in_row(signature, log, first, first)
            known = best.get(signature.kind)
            # A signature's first wordings say more than its last ones.
            if match is not None and (known is None or match.wording < known.wording):
                best[signature.kind] = match
        up = _row_of_coming_up(log)
        by_row: dict[int, FailureMatch] = {}
        for match in sorted(best.values(), key=_explaining_rank):
            # What only echoes a failure means nothing once the server has come up after it.
            if match.signature.level or match.row > up:
                by_row.setdefault(match.row, match)
        return sorted(by_row.values(), key=_explaining_rank)

    def _candidates(self, log: LogLines) -> Iterator[tuple[FailureSignature, int, int]]:
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


def _explaining_rank(match: FailureMatch) -> tuple[int, int, int, int, int]:
    """What explains more sorts first: level, conditions met, certainty, then the earlier row."""
    signature = match.signature
    conditions = bool(signature.near)
    certainty = CERTAINTY_ORDER.index(signature.certainty)
    return (-signature.level, -conditions, -certainty, match.first_row, -match.width)


def _match_in_row(
    signature: FailureSignature, log: LogLines, row: int, first: int
) -> FailureMatch | None:
    text = log.text(row)
    plain = text.replace('\\"', '"')  # as it stood before it became part of a JSON string
    for wording, expression in enumerate(signature.lines):
        found = _signature_expression(expression).search(plain)
        if found is None or only_mentioned(signature, plain, found.start()):
            continue
        values = {name: value for name, value in found.groupdict().items() if value}
        wanted = signature.near or signature.unless or signature.also
        around = log.around(row) if wanted else ""
        if signature.near:
            beside = _signature_expression(signature.near).search(around)
            if beside is None:
                continue
            values = {n: v for n, v in beside.groupdict().items() if v} | values
        if signature.unless and _signature_expression(signature.unless).search(around):
            continue
        for extra in signature.also:
            beside = _signature_expression(extra).search(around)
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
            numbers={n: v for n, v in values.items() if _PLAIN_VALUE.fullmatch(redact(v))},
            cause=_filled_template(signature.cause, values),
            changes=tuple(_filled_in(change, values) for change in signature.changes),
        )
    return None


def _filled_template(
    template: str, values: Mapping[str, str], plain: re.Pattern[str] = _PLAIN_VALUE
) -> str:
    """`template` with ``{name}`` or ``{name?what to say instead}`` filled in."""

    def value(match: re.Match[str]) -> str:
        text = redact(values.get(match[1], "")).strip()
        if plain.fullmatch(text):
            return text
        return f"<{match[1]}>" if match[2] is None else match[2]

    # Where a value is left out, the blank before it goes as well.
    return re.sub(r" +(?=[:,.)]|$)", "", _TEMPLATE_VALUE.sub(value, template))


def _filled_in(change: FailureChange, values: Mapping[str, str]) -> FailureChange:
    argv = tuple(_filled_template(word, values, _ARGUMENT_VALUE) for word in change.argv)
    return replace(
        change,
        name=_filled_template(change.name, values),
        old=_filled_template(change.old, values),
        new=_filled_template(change.new, values),
        argv=argv,
    )


def _row_of_coming_up(log: LogLines) -> int:
    """The last row in which a server says that it has come up; -1 where none does."""
    last = (row for _, row in log.alike().values())
    return max((row for row in last if SERVER_UP.search(log.rows[row])), default=-1)


def unexplained_rows(log: LogLines, most: int = 40) -> list[int]:
    """The rows that report an error in so many words, the last `most`, oldest first.

    For a log in which no signature was found: what stands before a start that came up, and what
    programs are known to print in health, is left out.
    """
    up = _row_of_coming_up(log)
    found = []
    for row in sorted(row for _, row in log.alike().values()):
        if row <= up:
            continue
        if reports_error(log.text(row)):
            found.append(row)
    return found[-most:]
