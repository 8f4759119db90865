"""How many words of a prompt make how many tokens, as one server counts them.

Knows no server and no tokenizer: whoever sends a prompt says how many tokens were counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenFit:
    """tokens = template + per_word * words, as one server counts them."""

    template: float
    per_word: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> TokenFit:
        """The line through two (words, tokens); ValueError where more words are not more tokens."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            raise ValueError("the server's prompt token count does not grow with the prompt")
        return cls(few[1] - per_word * few[0], per_word)

    def moved_through(self, words: int, tokens: float) -> TokenFit:
        """The same slope through a point measured near the target, where it matters."""
        return TokenFit(tokens - self.per_word * words, self.per_word)

    def words_for(self, tokens: int) -> int:
        """How many words give `tokens`; 0 where the chat template alone takes as many."""
        return max(0, round((tokens - self.template) / self.per_word))
