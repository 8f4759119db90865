"""Texts of others on their way through a chat template: their letters become no control tokens.

Knows no template and no tokenizer but the spelling of its control tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any


class ControlBreaker:
    """Breaks every spelling of a control token by a mark, at which the rendered text is cut again.

    Nobody can guess the mark, so nobody can write it: it is new for each conversation. It is of
    digits alone, for those pass unchanged through whatever a template does to a text (upper case,
    JSON, sorting).
    """

    def __init__(self, specials: Iterable[str]) -> None:
        self._specials = sorted(specials)
        self._first = {special[:1] for special in self._specials}
        self._begun = {special[:n] for special in self._specials for n in range(1, len(special))}
        self._longest = max((len(special) for special in self._specials), default=0)
        self._mark = f"{secrets.randbelow(10**40):040}"

    def broken(self, value: Any) -> Any:
        """`value` as JSON has it, with its texts and its fields' names broken."""
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, Mapping):
            return {self.broken(name): self.broken(held) for name, held in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(held) for held in value]
        return value

    def pieces(self, rendered: str) -> list[str]:
        """`rendered` cut at the marks: to be encoded each by itself."""
        return rendered.split(self._mark)

    def _broken_text(self, text: str) -> str:
        if not any(letter in text for letter in self._first):
            return text
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"{special[:1]}{self._mark}{special[1:]}")
        # What it ends with may begin a token that the next text would finish.
        begins = (text[-n:] in self._begun for n in range(1, self._longest))
        return text + self._mark if any(begins) else text
