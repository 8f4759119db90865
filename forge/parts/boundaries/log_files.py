"""A log out of a rig's own folders: by name, never through a link, bounded.

Knows no failure.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.knowledge.log_answer import LOG_BYTES

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


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
        "the tool that reads the model server's log names it",
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
