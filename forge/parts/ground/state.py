"""Where a rig keeps what must outlive it: state, cache and logs in the user's folders, by rig.

A plugin's own folder is replaced on update, so nothing of value is kept beside server.py.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from forge.parts.ground.errors import RigError

APPLICATION = "gemma4-rigs"


@dataclass(frozen=True)
class RigPaths:
    """The folders of one rig. `state` is the truth of this installation, `cache` can be deleted,
    `programs` is where server.py and the programs beside it lie."""

    state: Path
    cache: Path
    programs: Path = Path()

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def rig_paths(rig: str, programs: Path = Path()) -> RigPaths:
    """The rig's folders after the platform's rules (``XDG_STATE_HOME`` and so on), not yet made."""
    state = Path(platformdirs.user_state_dir(APPLICATION, appauthor=False))
    cache = Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))
    return RigPaths(state=state / rig, cache=cache, programs=programs)


def private_folder(path: Path) -> Path:
    """`path` as an existing folder; what of it is missing is made for this user alone (0700).

    Raises RigError DENIED where it cannot be made or written (read-only home, full disk): a rig
    that cannot write down what it starts does not start it.
    """
    try:
        # One by one: with parents=True the mode would hold for the last one only.
        for folder in (*reversed(path.parents), path):
            folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise RigError(
            "DENIED",
            f"the folder {path} cannot be made: {error.strerror}",
            "make its parent writable, or set XDG_STATE_HOME and XDG_CACHE_HOME",
        ) from error
    return path


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: temporary file (0600), fsync, rename.

    Raises RigError DENIED with the reason when the disk is full or read-only.
    """
    private_folder(path.parent)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RigError(
            "DENIED",
            f"{path} cannot be written: {error.strerror}",
            "free some disk space or make the folder writable, then call again",
        ) from error


def write_json(path: Path, value: Any) -> None:
    """`write_private` of `value` as JSON."""
    write_private(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is; None where it is none, broken, or nested beyond reading."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where it is absent or damaged (damage is renamed aside).

    Raises RigError DENIED where it is there and cannot be read: that says nothing about what it
    holds, and a record must not be lost over it.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RigError("DENIED", f"{path} cannot be read: {error.strerror}") from error
    value = json_object(data)
    if value is None:
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
    return value


def installation_id(paths: RigPaths) -> str:
    """This installation's random id (16 hex digits), made once: the `owner` label.

    Two servers that start at once agree: the file is linked into place, and the first one wins.
    """
    path = paths.state.parent / "installation"
    if not _known_id(path):
        candidate = path.with_name(f".installation.{secrets.token_hex(8)}")
        write_private(candidate, secrets.token_hex(8))
        try:
            os.link(candidate, path)
        except OSError:
            # Another server was first; or the file is damaged, or this disk knows no links.
            if not _known_id(path):
                candidate.replace(path)
        finally:
            candidate.unlink(missing_ok=True)
    return _known_id(path)


def _known_id(path: Path) -> str:
    """The id in `path`; empty where there is none that could be one."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch("[0-9a-f]{16}", text) else ""
