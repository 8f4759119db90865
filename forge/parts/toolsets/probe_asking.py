"""How a probe asks: every request and answer is kept as evidence, and refusals are told apart.

Knows no case. A 200 is judged by the case that asked; everything else is judged here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forge.parts.boundaries.probe_client import ProbeAnswer, ProbeClient
from forge.parts.boundaries.probe_plan import ProbeFacts
from forge.parts.ground.redact import clean, clean_value
from forge.parts.knowledge.probe_report import GreedyText, ProbeExchange, ProbeVerdict

_EVIDENCE_LIMIT = 1700  # characters of a request or an answer; a report's text holds 2000
_QUOTE_LIMIT = 160
_NO_SUCH_THING = re.compile(
    r"not (?:yet |currently )?(?:be )?(?:supported|implemented|available|enabled|allowed|permitted)"
    r"|unsupported|unknown (?:field|parameter|argument)|unrecogni[sz]ed|unexpected field"
    r"|(?:does not|doesn't|cannot|can't) (?:support|accept|handle|process)",
    re.I,
)


@dataclass(frozen=True)
class Judgement:
    """A verdict and what was seen, in a sentence."""

    verdict: ProbeVerdict
    detail: str


class ProbeAsker:
    """Sends requests to the served model, one at a time.

    exchanges: the evidence of the case that runs. greedy: the answers that other runs compare with.
    tell: hears what is asked now, for whoever waits. keep: hears each exchange as it is made.
    """

    def __init__(
        self, client: ProbeClient, model: str, timeout_s: float, facts: ProbeFacts
    ) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s
        self.facts = facts
        self.exchanges: list[ProbeExchange] = []
        self.greedy: list[GreedyText] = []
        self.tell: Callable[[str], None] = lambda what: None
        self.keep: Callable[[ProbeExchange], None] = lambda exchange: None

    async def ask(
        self, what: str, content: str | list[dict[str, Any]], max_tokens: int, **fields: Any
    ) -> ProbeAnswer:
        """One greedy, unstreamed request with the user's `content` and further `fields`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": False,
            **fields,
        }
        self.tell(what)
        answer = await self._client.post_chat(body, self._timeout_s)
        self.exchanges.append(exchange_of(what, body, answer))
        self.keep(self.exchanges[-1])
        return answer


def exchange_of(what: str, body: dict[str, Any], answer: ProbeAnswer) -> ProbeExchange:
    """A request and its answer as bounded, clean text."""
    # Long strings are clipped one by one first, so that a prompt does not push the fields out.
    request = json.dumps(clean_value(body, 400), ensure_ascii=False)
    return ProbeExchange(
        what=what,
        request=clean(request, _EVIDENCE_LIMIT),
        status=answer.status,
        answer=clean(answer.fault or answer.text, _EVIDENCE_LIMIT),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        seconds=round(answer.seconds, 3),
    )


def barred_judgement(answer: ProbeAnswer) -> Judgement | None:
    """The judgement of an answer that is no chat completion; None of one that is."""
    words, status = quoted_answer(answer.error_words), answer.status
    if answer.fault:
        return Judgement("untested", answer.fault)
    if status in (401, 403):
        return Judgement("untested", f"the server refused the credentials ({status})")
    if status in (408, 429, 503):
        return Judgement("untested", f"the server was too busy ({status}): {words}")
    if status == 501 or 400 <= status < 500:
        return Judgement("unsupported", f"refused with {status}: {words}")
    if status != 200 or words:
        verdict: ProbeVerdict = "unsupported" if _NO_SUCH_THING.search(words) else "fail"
        return Judgement(verdict, f"an error with {status}: {words}")
    if answer.message is None:
        return Judgement("fail", f"a 200 that is no chat completion: {quoted_answer(answer.text)}")
    return None


def cut_off_judgement(answer: ProbeAnswer) -> Judgement | None:
    """'untested' where the tokens ran out before the answer began, as long thoughts do."""
    if answer.finish_reason == "length" and not answer.content.strip() and not answer.tool_calls:
        what = "while it was thinking" if answer.reasoning else "before its first word"
        return Judgement("untested", f"cut off {what}, after {answer.completion_tokens} tokens")
    return None


def prompt_growth(answer: ProbeAnswer, without: ProbeAnswer) -> int | None:
    """How many prompt tokens a feature added; None where the server counts none."""
    if answer.prompt_tokens is None or without.prompt_tokens is None:
        return None
    return answer.prompt_tokens - without.prompt_tokens


def quoted_answer(text: str) -> str:
    """The beginning of a text on one line, for a sentence."""
    line = " ".join(clean(text, 4 * _QUOTE_LIMIT).split())
    return line if len(line) <= _QUOTE_LIMIT else line[: _QUOTE_LIMIT - 1] + "…"


def made_up_words(count: int) -> list[str]:
    """Different random words of four syllables, which no text holds by chance."""
    found: set[str] = set()
    while len(found) < count:
        found.add(
            "".join(_random_letter("bdfgklmnprtvz") + _random_letter("aeiou") for _ in range(4))
        )
    return sorted(found)


def _random_letter(letters: Sequence[str]) -> str:
    return secrets.choice(letters)
