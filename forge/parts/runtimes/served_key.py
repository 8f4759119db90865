"""The key that a served model asks for: made once for this installation, in a file of this user.

Knows no model server and no client; it never goes into an argument, a log or a result.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.state import write_private


def served_key(path: Path) -> str:
    """The key in `path` (0600), made where there is none yet: ``sk-`` and 48 hex digits.

    Two that make it at once agree: the file is linked into place, and the first one wins.
    Raises RigError DENIED where it can be neither read nor made.
    """
    try:
        if not path.exists():
            _make_key(path)
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise RigError(
            "DENIED", f"the key in {path} cannot be read: {error}", "remove that file"
        ) from None


def _make_key(path: Path) -> None:
    candidate = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Of a form that the redactor knows, should it ever get into a log.
    write_private(candidate, f"sk-{secrets.token_hex(24)}\n")
    try:
        os.link(candidate, path)
    except FileExistsError:
        pass
    except OSError:  # a disk without links
        candidate.replace(path)
    finally:
        candidate.unlink(missing_ok=True)
