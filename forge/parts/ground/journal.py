"""An append-only record of what was intended and what became of it, one JSON object a line.

Written before an act and after it, fsynced, so that a killed server can be explained afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean_value
from forge.parts.ground.state import json_object, private_folder

JOURNAL_SCHEMA = 1


def utc_now() -> str:
    """The present as an ISO 8601 stamp in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Journal:
    """The journal of one rig. Several processes may append; a torn last line harms nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **fields: Any) -> None:
        """Add one line and force it to the disk.

        Raises RigError DENIED when it cannot be written: no intent, no act.
        """
        private_folder(self.path.parent)
        entry = {"v": JOURNAL_SCHEMA, "at": utc_now(), "event": event, **clean_value(fields, 2000)}
        line = json.dumps(entry, ensure_ascii=True).encode() + b"\n"
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                end = os.lseek(handle, 0, os.SEEK_END)
                # A predecessor killed in mid-line must not swallow this entry.
                if end and os.pread(handle, 1, end - 1) != b"\n":
                    line = b"\n" + line
                if os.write(handle, line) != len(line):
                    os.ftruncate(handle, end)  # half an intent is none
                    raise OSError(errno.ENOSPC, "the disk is full")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise RigError(
                "DENIED",
                f"the journal {self.path} cannot be written ({error.strerror}); nothing was done",
                "free some disk space or make the folder writable, then call again",
            ) from error

    def entries(self, last: int = 200) -> list[dict[str, Any]]:
        """The last `last` readable entries, oldest first. Damaged or unknown lines are left out."""
        kept: deque[dict[str, Any]] = deque(maxlen=last)
        try:
            with self.path.open("rb") as file:
                for line in file:
                    entry = json_object(line)
                    if entry is not None and entry.get("v") == JOURNAL_SCHEMA:
                        kept.append(entry)
        except OSError:
            return []
        return list(kept)
