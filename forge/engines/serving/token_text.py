"""The bytes that each token stands for, and how a stream of tokens becomes text.

Knows no request and no engine. A text is given out only once it can no longer change.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """The bytes of every token of a vocabulary, by id; None for a token that is no text."""

    pieces: Sequence[bytes | None]
    names: Mapping[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, control: Collection[str] = ()) -> TokenText:
        """From a tokenizer whose decoder replaces letters and falls back to bytes, as Gemma's do.

        `control` are tokens that are no text even where the tokenizer does not call them special.
        tokenizers' own decoder is not asked: it decodes a run of byte tokens as one, so that a
        broken byte changes the text of those before it, which are out already. ValueError for a
        decoder of another kind.
        """
        replaced = _replacements(json.loads(tokenizer.to_str())["decoder"])
        added = tokenizer.get_added_tokens_decoder()
        names = {
            number: token.content
            for number, token in added.items()
            if token.special or token.content in control
        }
        words = tokenizer.get_vocab()
        pieces: list[bytes | None] = [None] * (max(words.values(), default=-1) + 1)
        for word, token in words.items():
            if token in names:
                continue
            byte = _BYTE_TOKEN.fullmatch(word)
            if byte is None:
                for old, new in replaced:
                    word = word.replace(old, new)
            pieces[token] = word.encode() if byte is None else bytes([int(byte[1], 16)])
        return cls(pieces, names)

    def piece(self, token: int) -> bytes | None:
        """The bytes of `token`; None for a control token and for one that the vocabulary lacks."""
        return self.pieces[token] if token < len(self.pieces) else None

    def name(self, token: int) -> str:
        """`token` for people: its text, half a character as U+FFFD, a control token's own name."""
        piece = self.piece(token)
        return self.names.get(token, "") if piece is None else piece.decode("utf-8", "replace")


def _replacements(decoder: Any) -> list[tuple[str, str]]:
    """What the decoder puts in place of what."""
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    parts = decoder.get("decoders", []) if kind == "Sequence" else [decoder]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if "ByteFallback" not in kinds or set(kinds) - {"Replace", "ByteFallback", "Fuse"}:
        named = ", ".join(str(kind) for kind in kinds)
        raise ValueError(f"a decoder of Replace, ByteFallback and Fuse is needed, this has {named}")
    rules = [part for part in parts if part.get("type") == "Replace"]
    if any(not isinstance(rule["pattern"].get("String"), str) for rule in rules):
        raise ValueError("a decoder that replaces by a pattern is not supported")
    return [(rule["pattern"]["String"], rule["content"]) for rule in rules]


class TextStream:
    """The text of one answer as its tokens come, up to the first stop text.

    What might still become a stop text, and the bytes of half a character, are held back. Of stop
    texts it is the first to be complete that ends the answer; of those complete with the same
    character, the longest. So the text does not depend on how the tokens were cut.
    """

    def __init__(self, token_text: TokenText, stops: Sequence[str] = ()) -> None:
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._held = ""
        self.stopped_by: str | None = None
        self.characters = 0  # decoded so far, those held back or cut off included

    def take(self, token: int) -> str:
        """The text that `token` makes certain, which may be none."""
        piece = self._token_text.piece(token)
        return "" if piece is None else self._release(self._decoder.decode(piece))

    def take_text(self, text: str) -> str:
        """The same of a text from elsewhere. Half a character before it is one U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True) + text)

    def finish(self) -> str:
        """The rest, when no token follows. Half a character at the end is one U+FFFD."""
        rest = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by is not None:
            return rest
        rest += self._held
        self._held = ""
        return rest

    def _release(self, text: str) -> str:
        """`text` behind what is held back: the part of both that nothing can change any more."""
        if self.stopped_by is not None:
            return ""
        self.characters += len(text)
        if not self._stops:
            return text
        held, waiting = self._held + text, len(self._held)
        # Up to here no stop text was complete, so one that is now ends within `text`.
        for end in range(waiting + 1, len(held) + 1):
            for stop in self._stops:
                if held.endswith(stop, 0, end):
                    self.stopped_by, self._held = stop, ""
                    return held[: end - len(stop)]
        keep = next((n for n in range(len(held)) if self._may_begin_a_stop(held[n:])), len(held))
        self._held = held[keep:]
        return held[:keep]

    def _may_begin_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)
