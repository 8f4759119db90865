"""Prompts of a wanted number of tokens, made of plain words, without a tokenizer.

Knows no server: whoever sends a prompt counts its tokens with `TokenFit`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

_PROMPT_WORDS = (
    "the of and to in is was for on that by this with from at which are have been other were there "
    "can all one time more when some any would will than also first people two new years over most "
    "into only where after many between through world being these three both under used number "
    "same part while system during against state school well until early large place water book "
    "without house point around small second often group family long line land open light "
    "later local little river town music story paper field stone table north south green white "
    "black winter summer morning evening garden window village mountain forest island market "
    "letter question answer reason moment picture bridge street machine weather journey captain "
    "doctor teacher farmer brother sister mother father children animal flower metal glass wood "
    "silver copper engine circle corner centre border season minute history science nature power "
    "travel carry follow listen remember build write speak learn grow turn begin change move"
).split()
_HEAD_WORDS = 12  # as many random words make 80 bits: no two prompts share a prefix
_SLACK_WORDS = 2048  # so many different slices of a cell's pool
_ENDING = " Go on at length."  # at the end, where no prefix cache sees that all prompts share it


class PromptMaker:
    """Distinct prompts of `words` words each for one cell; the same seed gives the same prompts.

    Each begins with its own random words, so that a prefix cache finds nothing from the first block
    on; the rest is a slice of the cell's pool, because drawing 100,000 words for each request would
    hold up the very loop that takes the times.
    """

    def __init__(self, seed: str, words: int) -> None:
        self._seed = seed
        self.words = max(1, words)
        source = random.Random(seed)
        pool = source.choices(_PROMPT_WORDS, k=self.words + _SLACK_WORDS)
        self._pool = " ".join(pool).encode()
        self._starts = [0]
        for word in pool:
            self._starts.append(self._starts[-1] + len(word) + 1)

    def text(self, index: int) -> bytes:
        """Prompt number `index`: letters, blanks and full stops, so it stands in JSON as it is."""
        source = random.Random(f"{self._seed}/{index}")
        head = min(self.words, _HEAD_WORDS)
        first = " ".join(source.choices(_PROMPT_WORDS, k=head)).encode()
        start, rest = source.randrange(_SLACK_WORDS), self.words - head
        body = self._pool[self._starts[start] : self._starts[start + rest]]
        return b"%b %b%b" % (first, body.rstrip(), _ENDING.encode())


@dataclass(frozen=True)
class RequestForm:
    """All of a request but the prompt. Servers differ in what they let through."""

    model: str
    temperature: float
    ignore_eos: bool = True  # an extension; where it is refused, outputs may be short
    ask_usage: bool = True

    def body(self, prompt: bytes, max_tokens: int) -> bytes:
        """The request's JSON. `prompt` must be plain enough to need no escapes."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.ask_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        rest = json.dumps(fields).encode()
        return b'{"messages": [{"role": "user", "content": "%b"}], %b' % (prompt, rest[1:])

    def plainer_forms(self) -> list[RequestForm]:
        """What to try when a server refuses this form, in order."""
        without = RequestForm(self.model, self.temperature, ignore_eos=False)
        return [without, RequestForm(self.model, self.temperature, False, False)]
