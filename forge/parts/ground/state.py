"""Where a rig keeps what must outlive it: state, cache and logs in the user's folders, by rig.

A plugin's own folder is replaced on update, so nothing of value is kept beside server.py.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from forge.parts.ground.errors import RigError

APPLICATION = "gemma4-rigs"


@dataclass(frozen=True)
class RigPaths:
    """The folders of one rig. `state` is the truth of this installation, `cache` can be deleted."""

    state: Path
    cache: Path

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def rig_paths(rig: str) -> RigPaths:
    """The rig's folders after the platform's rules (``XDG_STATE_HOME`` and so on), not yet made."""
    state = Path(platformdirs.user_state_dir(APPLICATION, appauthor=False))
    cache = Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))
    return RigPaths(state=state / rig, cache=cache)


def private_folder(path: Path) -> Path:
    """`path` as an existing folder that only this user can read (0700).

    Raises RigError DENIED where it cannot be made or written (read-only home, full disk): a rig
    that cannot write down what it starts does not start it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where it is absent or damaged (damage is renamed aside)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        try:
            path.replace(path.with_suffix(".damaged"))
        except OSError:
            return None
        return None
    return value


def installation_id(paths: RigPaths) -> str:
    """This installation's random id (16 hex digits), made once: the `owner` label.

    Two servers that start at once agree: the file is linked into place, and the first one wins.
    """
    path = paths.state.parent / "installation"
    try:
        known = path.read_text(encoding="ascii").strip()
        if known:
            return known
    except OSError:
        pass
    private_folder(path.parent)
    candidate = path.with_name(f".installation.{secrets.token_hex(8)}")
    write_private(candidate, secrets.token_hex(8))
    try:
        os.link(candidate, path)
    except FileExistsError:
        pass
    finally:
        candidate.unlink(missing_ok=True)
    return path.read_text(encoding="ascii").strip()
