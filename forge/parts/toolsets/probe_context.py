"""A conversation that fills the configured limit to the token, and one that is a token too long.

The prompt is made of words that are one token each, which short prompts prove first: so every
length can be reached without knowing the tokenizer, and without sending a long prompt twice.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from forge.parts.boundaries.probe_client import ProbeAnswer
from forge.parts.knowledge.token_fit import TokenFit
from forge.parts.toolsets.probe_asking import Judgement, ProbeAsker, barred_judgement, made_up_words

# What fills the prompt, the likeliest to read like language first: one word over and over sends a
# small model astray. Each set has at most as many words as the longest short prompt.
_PROBE_FILLERS = (
    "the of and to in is was for on that by this with from at are have been other were there can",
    "the of and to in is a for on that",
    "the",
    "a",
    "x",
    ".",
)
_FIT_POINTS = (8, 16, 32)  # words; three, so that a bend is seen
_ANSWER_ROOM = 16  # tokens left for the answer of the conversation that just fits
_MOST_CORRECTIONS = 2
_SPEAKS_OF_LENGTH = re.compile(
    r"length|context|token|too long|too large|exceed|maximum|limit", re.I
)


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that grows by one token a word, with a made-up word at its beginning to recall."""

    secret: str
    fillers: tuple[str, ...]
    fit: TokenFit

    def text(self, tokens: int) -> str:
        """The prompt that the server counts as `tokens`."""
        return _long_text(self.secret, self.fillers, self.fit.words_for(tokens))


async def probe_context_limit(asker: ProbeAsker, above: bool) -> Judgement:
    """Ask at the limit, or one token above it. Prompt and answer together count."""
    limit = asker.facts.context_limit
    if limit is None:
        return Judgement("untested", "neither the settings nor the server name a context limit")
    prompt = await _fitted_prompt(asker, limit)
    if isinstance(prompt, Judgement):
        return prompt
    room = 1 if above else _ANSWER_ROOM
    wanted = limit + 1 - room if above else limit - room
    what = "one token above the limit" if above else "exactly at the limit"
    answer = await asker.ask(what, prompt.text(wanted), room)
    # A fit may be some tokens off; a server that cuts the prompt is off by more, or stays off.
    for _ in range(_MOST_CORRECTIONS):
        counted = answer.prompt_tokens
        if answer.status != 200 or counted is None or counted == wanted:
            break
        if abs(counted - wanted) > max(4, wanted // 100):
            break
        fit = prompt.fit.moved_through(prompt.fit.words_for(wanted), counted)
        prompt = LongPrompt(prompt.secret, prompt.fillers, fit)
        again = await asker.ask(f"{what}, corrected", prompt.text(wanted), room)
        if not above and again.status != 200:
            break  # what was read before is the finding: less than was sent
        answer = again
    if above:
        return judged_above_limit(answer, limit, wanted)
    return judged_at_limit(answer, limit, wanted, prompt.secret)


def judged_at_limit(answer: ProbeAnswer, limit: int, wanted: int, secret: str) -> Judgement:
    """The verdict on a prompt of `wanted` tokens that, with its answer, just fits."""
    early = barred_judgement(answer)
    if early is not None:
        if early.verdict == "unsupported":
            return Judgement("fail", f"{limit} tokens are the limit, and they were {early.detail}")
        return early
    counted = answer.prompt_tokens
    if counted is None:
        return Judgement("untested", "the server counts no prompt tokens")
    if counted != wanted:
        return Judgement("silent", f"{wanted} prompt tokens were sent and {counted} were read")
    if not (answer.content or answer.reasoning) or not answer.completion_tokens:
        ended = f"{answer.finish_reason or 'no finish reason'}, {answer.completion_tokens} tokens"
        return Judgement("fail", f"{counted} tokens were read, and no word came back ({ended})")
    recalled = secret in answer.content.casefold()
    word = "its first word was recalled" if recalled else "its first word was not recalled"
    return Judgement("pass", f"{counted} + {answer.completion_tokens} of {limit} tokens; {word}")


def judged_above_limit(answer: ProbeAnswer, limit: int, wanted: int) -> Judgement:
    """The verdict on a prompt that leaves no room for a single token: it must be refused."""
    early = barred_judgement(answer)
    if early is not None:
        if early.verdict != "unsupported" and answer.status != 200:
            return early
        if _SPEAKS_OF_LENGTH.search(answer.error_words):
            return Judgement("pass", f"{limit + 1} tokens were {early.detail}")
        return Judgement("fail", f"{limit + 1} tokens were {early.detail}, with no word on length")
    counted = answer.prompt_tokens
    if counted is not None and counted < wanted:
        return Judgement("silent", f"of {wanted} prompt tokens {counted} were read, with a 200")
    if not answer.completion_tokens and not answer.content:
        return Judgement("silent", f"{limit + 1} tokens gave an empty answer with a 200")
    return Judgement(
        "silent",
        f"{limit + 1} tokens were taken with a 200: the server keeps another limit than the "
        f"configured {limit}, or none",
    )


async def _fitted_prompt(asker: ProbeAsker, limit: int) -> LongPrompt | Judgement:
    """A prompt whose filler is one token each, tried on short prompts; else why there is none."""
    secret = made_up_words(1)[0]
    for text in _PROBE_FILLERS:
        fillers = tuple(text.split())
        counts: list[tuple[int, int]] = []
        for words in _FIT_POINTS:
            short = _long_text(secret, fillers, words)
            answer = await asker.ask(f"{words} filler words, for their length", short, 1)
            refusal = barred_judgement(answer)
            if refusal is not None:
                return Judgement("untested", f"a short prompt failed: {refusal.detail}")
            if answer.prompt_tokens is None:
                return Judgement("untested", "the server counts no prompt tokens")
            counts.append((words, answer.prompt_tokens))
        steps = {b[1] - a[1] - (b[0] - a[0]) for a, b in zip(counts, counts[1:], strict=False)}
        if steps == {0}:
            fit = TokenFit.through(counts[0], counts[-1])
            if fit.words_for(limit - _ANSWER_ROOM) < 1:
                return Judgement("untested", f"a limit of {limit} tokens leaves no room to fill")
            return LongPrompt(secret, fillers, fit)
    return Judgement("untested", "no filler word is one token each on this server")


def _long_text(secret: str, fillers: tuple[str, ...], words: int) -> str:
    """The same `secret` and more words: the same text, longer. Each round of words is shuffled."""
    source = random.Random(secret)
    filling: list[str] = []
    while len(filling) < words:
        filling += source.sample(fillers, len(fillers))
    return (
        f"The code word is {secret}. What follows means nothing: {' '.join(filling[:words])}\n"
        "What is the code word? Answer with that word alone."
    )
