"""Logs from outside as rows: bounded, of any bytes, tens of megabytes in a moment.

Reads files only within folders it is given, by name, and never through a link. Knows no failure.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.knowledge.failure_bank import LogLines

LOG_BYTES = 32_000_000  # of one log; beyond it a quarter from the head and the rest from the tail
_ROW_BYTES = 4_000  # a longer line is read in pieces
_PIECE_OVERLAP = 1_000  # bytes that two pieces share, so that no message is cut
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")

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


def read_log_file(folders: Mapping[str, Path], parameter: str, name: str) -> bytes:
    """The log `name` out of `folders` (by their short names): at most 32 MB, head and tail.

    `name` is a file's own name, with the folder's short name or its exact path before it if need
    be. Raises RigError INVALID for any other form, a link or what is no file; NOT_FOUND.
    """
    before, _, file = name.rpartition("/")
    known = {key: path for key, path in folders.items() if before in ("", key, str(path))}
    if not _FILE_NAME.fullmatch(file) or ".." in file or not known:
        allowed = ", ".join(folders)
        raise invalid_parameter(parameter, f"must be the name of a file in this rig's {allowed}")
    for path in known.values():
        try:
            return _read_regular(path, file, parameter)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise invalid_parameter(parameter, f"cannot be read: {error.strerror}") from None
    raise RigError(
        "NOT_FOUND",
        f"{parameter}: there is no such file in this rig's {', '.join(known)}",
        "get_server_logs() names the log of the model server",
    )


def _read_regular(folder: Path, file: str, parameter: str) -> bytes:
    """The bytes of `file` in `folder`; neither of them may be a link."""
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(file, flags, dir_fd=where)
    finally:
        os.close(where)
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise invalid_parameter(parameter, "is no regular file")
        size = os.fstat(opened.fileno()).st_size
        if size <= LOG_BYTES:
            return opened.read(LOG_BYTES)
        head = opened.read(LOG_BYTES // 4)
        opened.seek(size - (LOG_BYTES - len(head)))
        gap = f"\n[… {size - LOG_BYTES} bytes left out …]\n".encode()
        return head + gap + opened.read(LOG_BYTES - len(head))
