"""The JSON of answers: OpenAI's chat completions and text completions, whole and in chunks.

Fields as https://platform.openai.com/docs/api-reference/chat and …/completions have them. Knows no
request and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.engines.serving.generation import AnswerDelta, ToldToken
from forge.engines.serving.token_text import TokenText


@dataclass(frozen=True)
class AnswerForm:
    """What is the same in all chunks of one answer, and how they are built.

    `chat`: a chat completion, else a text completion. `logprobs` -1: none are told; else they are
    of every token, those of thoughts and calls included.
    """

    chat: bool
    identity: str
    created: int
    model: str
    logprobs: int
    tokens_as_ids: bool
    token_text: TokenText
    tells_thought: bool = True

    def whole(self, answer: AnswerDelta, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        said = {"message": self._message(answer)} if self.chat else {"text": answer.text}
        kind = "chat.completion" if self.chat else "text_completion"
        choice = self._choice(said, answer.tokens, answer.finish)
        return self._framed(kind, [choice]) | {"usage": usage}

    def _message(self, answer: AnswerDelta) -> dict[str, Any]:
        """With calls and no word, the content is null, as OpenAI has it."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        message |= self._thought(answer)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {
                    "id": call.identity,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return message

    def _thought(self, answer: AnswerDelta) -> dict[str, str]:
        """Under both names that clients read: vLLM 0.32 sends the one, llama-server the other."""
        if not answer.thought or not self.tells_thought:
            return {}
        return {"reasoning": answer.thought, "reasoning_content": answer.thought}

    def first_chunk(self) -> dict[str, Any]:
        """What a chat's stream begins with: who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(said, (), None)])

    def chunks(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """What is new, without the end. A call is two pieces: its id and name, its arguments."""
        if not self.chat:
            if not delta.text and not delta.tokens:
                return []
            return [self._chunk([self._choice({"text": delta.text}, delta.tokens, None)])]
        said = {"content": delta.text} if delta.text else {}
        pieces: list[dict[str, Any]] = [said | self._thought(delta)]
        for call in delta.calls:
            begun = {"id": call.identity, "type": "function"}
            for told in (
                {**begun, "function": {"name": call.name, "arguments": ""}},
                {"function": {"arguments": call.arguments}},
            ):
                pieces.append({"tool_calls": [{"index": call.index, **told}]})
        tokens = [delta.tokens, *((),) * len(pieces)]
        return [
            self._chunk([self._choice({"delta": piece}, told, None)])
            for piece, told in zip(pieces, tokens, strict=False)
            if piece or told
        ]

    def end_chunk(self, finish: str) -> dict[str, Any]:
        """The last chunk with a choice, which says why the answer ends."""
        said: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([self._choice(said, (), finish)])

    def usage(self, prompt_tokens: int, answer: AnswerDelta, cached: int = 0) -> dict[str, Any]:
        """OpenAI's usage object. `answer` is its last delta, which counts all before it. `cached`
        tokens of the prompt were not computed anew; as in vLLM they are told where there are any.
        """
        counts: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": prompt_tokens + answer.completion_tokens,
        }
        if cached:
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.chat:
            counts["completion_tokens_details"] = {"reasoning_tokens": answer.thought_tokens}
        return counts

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
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
