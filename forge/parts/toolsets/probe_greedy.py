"""Six greedy prompts, each asked twice: whether the server repeats itself byte for byte.

Knows no other run; `compared_greedy` of the knowledge section sets two reports side by side.
"""

from __future__ import annotations

import hashlib
import json

from forge.parts.boundaries.probe_client import ProbeAnswer
from forge.parts.ground.redact import clean
from forge.parts.knowledge.probe_report import GreedyText
from forge.parts.toolsets.probe_asking import Judgement, ProbeAsker, barred_judgement

GREEDY_PROMPTS: dict[str, str] = {
    "explanation": "Explain in a few sentences why the sky is blue during the day and red at dusk.",
    "code": "Write a Python function that tells whether a text reads the same backwards.",
    "listing": "List eight things to check before a long journey by bicycle.",
    "translation": (
        "Translate into French: The last train leaves at nine, so we should not be late tonight."
    ),
    "arithmetic": "A baker sells 17 loaves at 3 coins each and pays 12 coins for flour. How many "
    "coins are left? Show the steps.",
    "summary": (
        "Summarise in one sentence: The lighthouse was built of grey stone, stood empty for forty "
        "years, and was bought by two sisters who turned it into a small library for sailors."
    ),
}
GREEDY_TOKENS = 128
# Reports compare only where prompts and length are these.
GREEDY_SET = hashlib.sha256(json.dumps([GREEDY_PROMPTS, GREEDY_TOKENS]).encode()).hexdigest()[:16]
_GREEDY_TEXT_LIMIT = 1700


async def probe_greedy(asker: ProbeAsker) -> Judgement:
    """Ask all six, then all six again; the answers are left in the asker's `greedy`."""
    first: dict[str, ProbeAnswer] = {}
    for name, prompt in GREEDY_PROMPTS.items():
        answer = await asker.ask(f"{name}, first time", prompt, GREEDY_TOKENS)
        refusal = barred_judgement(answer)
        if refusal is not None:
            return refusal
        first[name] = answer
    for name, prompt in GREEDY_PROMPTS.items():
        again = await asker.ask(f"{name}, second time", prompt, GREEDY_TOKENS)
        refusal = barred_judgement(again)
        if refusal is not None:
            return refusal
        asker.greedy.append(greedy_text(name, first[name], again))
    return judged_greedy(asker.greedy)


def greedy_text(name: str, answer: ProbeAnswer, again: ProbeAnswer) -> GreedyText:
    """The record of one prompt's two answers; the first one is kept."""
    data = _greedy_bytes(answer)
    return GreedyText(
        prompt=name,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        text=clean(f"{answer.reasoning}{answer.content}", _GREEDY_TEXT_LIMIT),
        finish_reason=answer.finish_reason[:120],
        repeats=data == _greedy_bytes(again),
    )


def judged_greedy(texts: list[GreedyText]) -> Judgement:
    """The verdict on six prompts. An empty answer repeats itself too, and shows nothing."""
    # One byte is the zero between reasoning and content.
    empty = [text.prompt for text in texts if text.size <= 1]
    if empty:
        return Judgement("fail", f"no text to compare for {', '.join(empty)}")
    changed = [text.prompt for text in texts if not text.repeats]
    if changed:
        return Judgement(
            "fail",
            f"{len(texts) - len(changed)} of {len(texts)} repeated byte for byte at temperature 0; "
            f"not {', '.join(changed)}",
        )
    return Judgement("pass", f"{len(texts)} of {len(texts)} repeated byte for byte")


def _greedy_bytes(answer: ProbeAnswer) -> bytes:
    return f"{answer.reasoning}\0{answer.content}".encode("utf-8", "surrogatepass")
