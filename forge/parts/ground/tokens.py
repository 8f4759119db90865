"""Single-use tokens that bind a confirmation to one very thing, kept on disk for five minutes.

Two servers of a rig share them and a restart keeps them; what is confirmed, the caller knows.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.locks import held_lock
from forge.parts.ground.names import checked_name
from forge.parts.ground.state import read_json, write_json

TOKEN_LIFE_S = 300.0
_REMEMBERED_S = 86_400.0  # a used or expired token is told from an unknown one for a day


class _IssuedToken(BaseModel):
    """One token on disk: what it is bound to, when it was given, and what became of it."""

    model_config = ConfigDict(extra="forbid")

    subject: dict[str, str]
    issued: float
    state: Literal["open", "used", "void"] = "open"


class TokenStore:
    """The confirmation tokens of one rig, in `folder`/tokens.json (0600) under a lock.

    `clock` gives seconds of the wall clock: a monotonic one would mean nothing to the next process.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self.clock = clock

    async def issue(self, subject: Mapping[str, str]) -> str:
        """A new token for exactly `subject`. Earlier open ones for the same subject become void.

        Raises RigError BUSY or DENIED when it cannot be written down; then there is no token.
        """
        token = secrets.token_hex(16)
        async with held_lock(self._folder, "tokens"):
            known = self._read()
            for entry in known.values():
                if entry.subject == subject and entry.state == "open":
                    entry.state = "void"
            known[_digest(token)] = _IssuedToken(subject=dict(subject), issued=self.clock())
            self._write(known)
        return token

    async def check(self, token: str) -> dict[str, str]:
        """What `token` is bound to, if it could be redeemed now; it stays good.

        Raises RigError INVALID on a wrong form, DENIED when it is unknown, used, void or too old.
        """
        checked_name("token", "token", token)
        async with held_lock(self._folder, "tokens"):
            return dict(self._open(self._read(), token).subject)

    async def redeem(self, token: str, subject: Mapping[str, str]) -> None:
        """Use up `token`, which must be bound to exactly `subject`; of many callers one succeeds.

        Raises RigError as `check` does, and DENIED for another subject: then it is void as well.
        """
        checked_name("token", "token", token)
        async with held_lock(self._folder, "tokens"):
            known = self._read()
            entry = self._open(known, token)
            fits = entry.subject == dict(subject)
            entry.state = "used" if fits else "void"
            self._write(known)
        if not fits:
            raise RigError("DENIED", "the token was given for something else and is void now")

    async def revoke(self, token: str) -> None:
        """Make `token` worthless; one that is unknown is as good as revoked."""
        async with held_lock(self._folder, "tokens"):
            known = self._read()
            entry = known.get(_digest(token))
            if entry is not None and entry.state == "open":
                entry.state = "void"
                self._write(known)

    def _open(self, known: Mapping[str, _IssuedToken], token: str) -> _IssuedToken:
        entry = known.get(_digest(token))
        if entry is None:
            raise RigError("DENIED", "this rig gave no such token")
        if entry.state != "open":
            how = "was used already" if entry.state == "used" else "is void"
            raise RigError("DENIED", f"the token {how}")
        # A clock that was set back must not lengthen a token's life.
        if not 0 <= self.clock() - entry.issued < TOKEN_LIFE_S:
            raise RigError("DENIED", f"the token is older than {TOKEN_LIFE_S / 60:.0f} minutes")
        return entry

    @property
    def _path(self) -> Path:
        return self._folder / "tokens.json"

    def _read(self) -> dict[str, _IssuedToken]:
        """Every token still remembered. A damaged file gives none: no token is the safe side."""
        found: dict[str, _IssuedToken] = {}
        for key, value in (read_json(self._path) or {}).items():
            try:
                entry = _IssuedToken.model_validate(value)
            except ValidationError:
                continue
            if abs(self.clock() - entry.issued) < _REMEMBERED_S:
                found[key] = entry
        return found

    def _write(self, known: Mapping[str, _IssuedToken]) -> None:
        value: dict[str, Any] = {key: entry.model_dump() for key, entry in known.items()}
        write_json(self._path, value)


def _digest(token: str) -> str:
    """The form in which a token lies on disk: whoever reads the file cannot use it."""
    return hashlib.sha256(token.encode()).hexdigest()
