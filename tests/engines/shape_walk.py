"""Random walks through a constraint: any answer that a model could give under its masks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from forge.engines.serving.slot_engine import TokenConstraint
from forge.engines.serving.token_text import TokenText
from tests.engines.counting_engine import allowed_tokens


@dataclass(frozen=True)
class Walked:
    """The tokens without the one that ended them, and whether one did."""

    tokens: list[int]
    ended: bool


def walk(constraint: TokenConstraint, stops: frozenset[int], seed: int, most: int = 2000) -> Walked:
    """Tokens of which each is drawn from those allowed, all with the same chance."""
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        token = chance.choice(allowed_tokens(constraint.mask()))
        constraint.take(token)
        if token in stops:
            return Walked(tokens, True)
        tokens.append(token)
    return Walked(tokens, False)


class Speller:
    """Texts and tokens of one tokenizer, its control tokens by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._text = TokenText.of(tokenizer)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: list[int]) -> str:
        """The text, which must be whole: half a character is no text."""
        pieces = [self._text.piece(token) or self._text.name(token).encode() for token in tokens]
        return b"".join(pieces).decode("utf-8")

    def takes(self, constraint: TokenConstraint, text: str, stop: int) -> bool:
        """Whether `text`, as it is usually cut into tokens, is a whole answer."""
        for token in [*self.tokens(text), stop]:
            if token not in allowed_tokens(constraint.mask()):
                return False
            constraint.take(token)
        return True
