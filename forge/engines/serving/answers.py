"""The JSON of answers: OpenAI's chat completions and text completions, whole and in chunks.

Fields as https://platform.openai.com/docs/api-reference/chat and …/completions have them. Knows no
request and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.engines.serving.generation import ToldToken
from forge.engines.serving.token_text import TokenText


@dataclass(frozen=True)
class AnswerForm:
    """What is the same in all chunks of one answer, and how they are built.

    `chat`: a chat completion, else a text completion. `logprobs` -1: none are told.
    """

    chat: bool
    identity: str
    created: int
    model: str
    logprobs: int
    tokens_as_ids: bool
    token_text: TokenText

    def whole(
        self, text: str, tokens: Sequence[ToldToken], finish: str, usage: dict[str, int]
    ) -> dict[str, Any]:
        """The answer in one piece."""
        message = {"role": "assistant", "content": text}
        said = {"message": message} if self.chat else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._framed(kind, [self._choice(said, tokens, finish)]) | {"usage": usage}

    def first_chunk(self) -> dict[str, Any]:
        """What a chat's stream begins with: who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(said, (), None)])

    def chunk(self, text: str, tokens: Sequence[ToldToken], finish: str | None) -> dict[str, Any]:
        """One piece of the answer; `finish` stands in the last one."""
        said = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        return self._chunk([self._choice(said, tokens, finish)])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk that stream_options.include_usage asks for: no choice, the counts alone."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._framed("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, said: dict[str, Any], tokens: Sequence[ToldToken], finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.logprobs >= 0 and tokens:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._text_logprobs(tokens)
        return {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish}

    def _chat_logprobs(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._told(told.step.token, told.step.logprob),
                    "top_logprobs": [self._told(*pair) for pair in told.step.top[: self.logprobs]],
                }
                for told in tokens
            ]
        }

    def _told(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.token_text.piece(token)
        spelt = None if piece is None else list(piece)
        return {"token": self._name(token), "logprob": logprob, "bytes": spelt}

    def _text_logprobs(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """The older form. As in OpenAI's API the chosen token is always among the likeliest."""
        tops = []
        for told in tokens:
            pairs = [*told.step.top[: self.logprobs], (told.step.token, told.step.logprob)]
            top: dict[str, float | None] = {}
            for token, logprob in pairs:
                top.setdefault(self._name(token), logprob)  # of two with one name the likelier
            tops.append(top)
        return {
            "text_offset": [told.offset for told in tokens],
            "token_logprobs": [told.step.logprob for told in tokens],
            "tokens": [self._name(told.step.token) for told in tokens],
            "top_logprobs": tops,
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokens_as_ids else self.token_text.name(token)


def usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
