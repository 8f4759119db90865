"""Logs from outside as rows: bounded, of any bytes, tens of megabytes in a moment.

Reads no file and knows no failure.
"""

from __future__ import annotations

import re

from forge.parts.knowledge.failure_bank import LogLines
from forge.parts.knowledge.log_answer import LOG_BYTES

_ROW_BYTES = 4_000  # a longer line is read in pieces
_PIECE_OVERLAP = 1_000  # bytes that two pieces share, so that no message is cut

_TERMINAL_SEQUENCE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-_])"
)
# Zero-width, bidirectional and other marks that nobody sees, in UTF-8; see redact for the list.
_UNSEEN = (
    re.compile(rb"\xe2\x80[\x8b-\x8f\xa8-\xae]"),
    re.compile(rb"\xe2\x81[\xa0-\xaf]"),
    re.compile(rb"\xef(?:\xbb\xbf|\xbf[\xb9-\xbb])"),
    re.compile(rb"\xd8\x9c"),
    re.compile(rb"\xf3\xa0[\x80-\x87][\x80-\xbf]"),
)


def log_lines(data: bytes | str) -> LogLines:
    """`data` as rows: line ends of every kind, also those written as ``\\n`` within a JSON string.

    Terminal sequences and unseen marks are taken out, a line of any length comes in pieces, and
    more than 32 MB are cut in the middle, with a row that says so.
    """
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what some shells write
        raw = raw.decode("utf-16", "replace").encode()
    if len(raw) > LOG_BYTES + 200:
        head = LOG_BYTES // 4
        gap = f"\n[… {len(raw) - LOG_BYTES} bytes left out …]\n".encode()
        raw = raw[:head] + gap + raw[head - LOG_BYTES :]
    if b"\x1b" in raw:
        raw = _TERMINAL_SEQUENCE.sub(b"", raw)
    if not raw.isascii():
        for shape in _UNSEEN:
            raw = shape.sub(b"", raw)
    # A progress bar rewrites its line: each state counts as a row.
    rows = raw.replace(b"\r", b"\n").split(b"\n") if b"\r" in raw else raw.split(b"\n")
    if max(map(len, rows)) > _PIECE_OVERLAP:
        rows = [piece for row in rows for piece in _pieces(row)]
    return LogLines(rows)


def _pieces(row: bytes) -> list[bytes]:
    """A long row by the line ends written in it, and what is longer still in overlapping pieces."""
    if len(row) <= _PIECE_OVERLAP:
        return [row]
    found = []
    for part in row.split(b"\\n"):
        if len(part) <= _ROW_BYTES:
            found.append(part)
            continue
        step = _ROW_BYTES - _PIECE_OVERLAP
        found += [_whole_words(part, at, at + _ROW_BYTES) for at in range(0, len(part), step)]
    return found


def _whole_words(text: bytes, begin: int, end: int) -> bytes:
    """`text[begin:end]` without the words that the cuts break: half a secret looks like none."""
    piece = text[begin:end]
    if begin:
        piece = piece.partition(b" ")[2] or piece
    if end < len(text):
        piece = piece.rpartition(b" ")[0] or piece
    return piece
