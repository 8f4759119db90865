"""The Hugging Face token of the person at this computer: from the environment or a private file.

A token is never an argument and stands in no message. Knows no store that it may go to.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from forge.parts.ground.errors import RigError

# Hugging Face's access tokens begin with hf_; anything else is likely another service's.
_HF_TOKEN_FORM = re.compile(r"hf_[A-Za-z0-9_-]{8,500}")
_HF_FILE_LIMIT = 4096  # bytes
_HF_PLACES = (
    "a person puts the token into HF_TOKEN of this server's environment, or into a file of mode "
    "0600 and its path into HF_TOKEN_FILE in tpu.env; never into a chat"
)


def read_hf_token(named: str) -> tuple[str, str]:
    """The token, and in words where it came from: HF_TOKEN of the environment, else a file.

    The file `named` is an absolute path or begins with ~; it must be a plain file of this user,
    open to nobody else. Raises AUTH without a token, DENIED for another kind of file, INVALID for
    what is no token.
    """
    given = os.environ.get("HF_TOKEN", "")
    if given.strip():
        return _checked_token(given, "HF_TOKEN"), "HF_TOKEN in this server's environment"
    if not named:
        raise RigError("AUTH", "there is no Hugging Face token on this computer", _HF_PLACES)
    return _checked_token(
        _private_text(named), "HF_TOKEN_FILE"
    ), "the file that HF_TOKEN_FILE names"


def _checked_token(text: str, origin: str) -> str:
    token = text.strip()
    if not token:
        raise RigError("AUTH", f"{origin} is empty", _HF_PLACES)
    if not _HF_TOKEN_FORM.fullmatch(token):
        why = f"what {origin} holds is no Hugging Face token (hf_ and letters or digits, alone)"
        raise RigError("INVALID", why, _HF_PLACES)
    return token


def _private_text(named: str) -> str:
    """The text of a file that is this user's alone. The path is not repeated: see redact."""
    path = Path(named).expanduser() if named.startswith("~") else Path(named)
    if not path.is_absolute():
        raise RigError("INVALID", "HF_TOKEN_FILE must be an absolute path, or begin with ~")
    try:
        # Opened first and looked at then, so that nothing is exchanged in between.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = f"the file that HF_TOKEN_FILE names cannot be read as it is: {error.strerror}"
        raise RigError("DENIED", why, "a person makes it a plain file of mode 0600") from None
    try:
        fault = _fault_of_file(os.fstat(handle))
        if fault:
            why = f"the file that HF_TOKEN_FILE names {fault}"
            raise RigError("DENIED", why, "a person makes it a plain file of mode 0600")
        return os.read(handle, _HF_FILE_LIMIT).decode("utf-8", "replace")
    finally:
        os.close(handle)


def _fault_of_file(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "is not a plain file"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    if found.st_size > _HF_FILE_LIMIT:
        return f"is longer than {_HF_FILE_LIMIT} bytes"
    return ""
