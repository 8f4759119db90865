"""An answer's tokens taken apart as they come: what is said, what is thought, what is called.

Gemma 4 marks thoughts and calls by tokens of their own, and only those tokens count: letters that
spell one are text. Knows no request and no form of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from forge.engines.serving.answer_shape import CallsWanted
from forge.engines.serving.call_syntax import CALL_QUOTE, CallFault, ToolCall, read_call
from forge.engines.serving.token_text import TextStream, TokenText

# Ids and spelling: the tokenizer in llama.cpp's ggml-vocab-gemma-4.gguf (b11434, 2026-11-29).
_CALL_OPEN, _CALL_CLOSE, _CALL_QUOTES = "<|tool_call>", "<tool_call|>", '<|"|>'
_THOUGHT_OPEN, _THOUGHT_CLOSE = "<|channel>", "<channel|>"
# No text, whatever a tokenizer's file says of them: one made of llama.cpp's vocabulary says text.
MARK_WORDS = frozenset(
    (_CALL_OPEN, _CALL_CLOSE, _CALL_QUOTES, _THOUGHT_OPEN, _THOUGHT_CLOSE)
    + ("<|tool_response>", "<tool_response|>")
)
_THOUGHT_LABEL = "thought\n"  # the name of the channel, which the model writes first


@dataclass(frozen=True)
class AnswerMarks:
    """The tokens that mark thoughts and calls; None is one that the model's tokenizer lacks."""

    call_open: int | None = None
    call_close: int | None = None
    call_quote: int | None = None
    thought_open: int | None = None
    thought_close: int | None = None
    turn_open: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerMarks:
        return cls(
            call_open=tokenizer.token_to_id(_CALL_OPEN),
            call_close=tokenizer.token_to_id(_CALL_CLOSE),
            call_quote=tokenizer.token_to_id(_CALL_QUOTES),
            thought_open=tokenizer.token_to_id(_THOUGHT_OPEN),
            thought_close=tokenizer.token_to_id(_THOUGHT_CLOSE),
            turn_open=tokenizer.token_to_id("<|turn>"),
        )

    def opened_thought(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens behind the opening of the thought in which `prompt` ends; None: in none."""
        for place in range(len(prompt) - 1, -1, -1):
            if prompt[place] == self.thought_open:
                return tuple(prompt[place + 1 :])
            if prompt[place] in (self.thought_close, self.turn_open):
                return None
        return None


@dataclass(frozen=True)
class AnswerParts:
    """What is new of an answer. `broken` counts calls that were none: they stand in `content`."""

    content: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: int = 0


class AnswerParser:
    """Takes one answer apart, token by token; however its tokens are cut into pieces, the joined
    parts are the same.

    `calls`: none, and the marks of calls are control tokens like others, which no text shows; one,
    and the answer is over with it; or many. A call goes out when it is whole: what was meant as one
    and is none becomes content to the letter, its marks spelt out. Stop texts look at content
    alone. `thought_begun` are the tokens of a thought that the prompt has begun.
    """

    def __init__(
        self,
        token_text: TokenText,
        stops: Sequence[str] = (),
        marks: AnswerMarks | None = None,
        *,
        calls: CallsWanted = "none",
        thought_begun: Sequence[int] | None = None,
    ) -> None:
        self._pieces = token_text
        self._marks = marks or AnswerMarks()
        self._calls_wanted = calls
        self._content = TextStream(token_text, stops)
        self._inner = TextStream(token_text)  # of the thought or the call that is open
        self._state: Literal["content", "thought", "call"] = "content"
        self._source = ""  # of the call
        self._label: str | None = None  # of the thought: what has come of it; None: it is done
        self._said: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._broken = 0
        self.thought_tokens = 0  # the two marks are not counted
        self.calls_made = 0
        if thought_begun is not None:
            self._open_thought()
            for token in thought_begun:
                self._tell_thought(self._inner.take(token))
            self._thoughts.clear()

    @property
    def over(self) -> bool:
        """Whether a stop text or the one call that was wanted ends the answer."""
        done = self._calls_wanted == "one" and self.calls_made > 0
        return done or self._content.stopped_by is not None

    @property
    def characters(self) -> int:
        """Of the content so far, those that are held back included."""
        return self._content.characters

    def take(self, token: int) -> None:
        """The next token of the answer."""
        marks = self._marks
        if self._state == "call" and token == marks.call_quote:
            self._source += self._inner.finish() + CALL_QUOTE
        elif self._state == "call" and token == marks.call_close:
            self._close(_CALL_CLOSE)
        elif token == marks.call_open and self._calls_wanted != "none":
            self._close()
            if not self.over:
                self._state, self._source = "call", ""
        elif token == marks.thought_open:
            self._close()
            self._open_thought()
        elif token == marks.thought_close or (
            self._state == "call" and self._pieces.piece(token) is None
        ):
            self._close()
        elif self._state == "call":
            self._source += self._inner.take(token)
        elif self._state == "thought":
            self.thought_tokens += 1
            self._tell_thought(self._inner.take(token))
        else:
            self._said.append(self._content.take(token))

    def finish(self) -> None:
        """No token follows."""
        self._close()
        self._said.append(self._content.finish())

    def parts(self) -> AnswerParts:
        """What has become certain since the last time."""
        parts = AnswerParts(
            "".join(self._said), "".join(self._thoughts), tuple(self._calls), self._broken
        )
        self._said.clear()
        self._thoughts.clear()
        self._calls.clear()
        self._broken = 0
        return parts

    def _open_thought(self) -> None:
        self._state, self._label = "thought", ""

    def _tell_thought(self, text: str) -> None:
        """`text` is thought; the channel's name before it is not."""
        if self._label is None:
            self._thoughts.append(text)
            return
        self._label += text
        if _THOUGHT_LABEL.startswith(self._label) and self._label != _THOUGHT_LABEL:
            return
        self._thoughts.append(self._label.removeprefix(_THOUGHT_LABEL))
        self._label = None

    def _close(self, mark: str = "") -> None:
        """End the thought or the call that is open, by the token `mark` or before another."""
        state, self._state = self._state, "content"
        if state == "thought":
            self._tell_thought(self._inner.finish())
            if self._label not in (None, _THOUGHT_LABEL.rstrip()):
                self._thoughts.append(self._label)
        elif state == "call":
            self._close_call(self._source + self._inner.finish(), mark)

    def _close_call(self, source: str, mark: str) -> None:
        try:
            self._calls.append(read_call(source))
            self.calls_made += 1
        except CallFault:
            self._broken += 1
            spelt = f"{_CALL_OPEN}{source.replace(CALL_QUOTE, _CALL_QUOTES)}{mark}"
            self._said.append(self._content.take_text(spelt))
