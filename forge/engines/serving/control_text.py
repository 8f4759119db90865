"""Texts of others on their way through a chat template: their letters become no control tokens.

Knows no template and no tokenizer but the spelling of its control tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any


def new_mark() -> str:
    """What control tokens in a conversation's texts are broken by, and the rendered text is cut at.

    Nobody can guess it, so nobody can write it. It is of digits alone, for those pass unchanged
    through whatever a template does to a text: upper case, JSON, sorting.
    """
    return f"{secrets.randbelow(10**40):040}"


class ControlBreaker:
    """Breaks every spelling of a control token in a text behind its first letter, by a mark."""

    def __init__(self, specials: Iterable[str]) -> None:
        self.specials = frozenset(specials)
        self._lengths = sorted({len(special) for special in self.specials})
        firsts = "".join(sorted({special[:1] for special in self.specials}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._begun = {special[:n] for special in self.specials for n in range(1, len(special))}

    def broken(self, value: Any, mark: str) -> Any:
        """`value` as JSON has it, with its texts and its fields' names broken."""
        if isinstance(value, str):
            return self._broken_text(value, mark)
        if isinstance(value, Mapping):
            items = value.items()
            return {self.broken(name, mark): self.broken(held, mark) for name, held in items}
        if isinstance(value, list | tuple):
            return [self.broken(held, mark) for held in value]
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        pieces, begun = [], 0
        for found in self._first.finditer(text):
            place = found.start()
            if any(text[place : place + n] in self.specials for n in self._lengths):
                pieces.append(text[begun : place + 1])
                begun = place + 1
        pieces.append(text[begun:])
        # What it ends with may begin a token that the next text would finish.
        if any(text[-n:] in self._begun for n in range(1, max(self._lengths, default=0))):
            pieces.append("")
        return mark.join(pieces)
