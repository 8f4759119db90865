"""Whether a JSON schema is enforced by a grammar, merely obeyed, or dropped without a word.

The deciding request asks for prose and wants one of a few random words by schema: only a grammar
gives that. Where it fails, a request that any willing model can follow tells obeyed from dropped.
"""

from __future__ import annotations

from typing import Any

from forge.parts.boundaries.probe_client import ProbeAnswer
from forge.parts.ground.state import json_object
from forge.parts.toolsets.probe_asking import (
    Judgement,
    ProbeAsker,
    barred_judgement,
    cut_off_judgement,
    made_up_words,
    prompt_growth,
    quoted_answer,
)

_PROSE_PROMPT = "Write one short English sentence about the sea, in plain prose: no JSON, no code."
_JSON_PROMPT = (
    "What is the capital of France, and on which river does it lie? Answer with one JSON object "
    'and nothing else, of exactly the keys "city" and "river", both texts.'
)
_PLAIN_TOKENS = 96
_THINKING_TOKENS = 640  # thoughts come out of the same budget


def _json_format(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


async def probe_schema(asker: ProbeAsker, thinking: bool) -> Judgement:
    """Ask with the thinking switch on or off. A server without the switch is asked once more
    without it, so that its refusal of the one is not taken for a refusal of the other."""
    words = made_up_words(3)
    form = _json_format({"code": {"type": "string", "enum": words}})
    tokens = _THINKING_TOKENS if thinking else _PLAIN_TOKENS
    switch: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answer = await asker.ask(
        "a schema that the prompt contradicts",
        _PROSE_PROMPT,
        tokens,
        response_format=form,
        **switch,
    )
    refusal, note = barred_judgement(answer), ""
    if refusal is not None and refusal.verdict == "unsupported":
        bare = await asker.ask(
            "the same without the thinking switch", _PROSE_PROMPT, tokens, response_format=form
        )
        if barred_judgement(bare) is None:
            if thinking:
                return Judgement("unsupported", f"no thinking switch: {refusal.detail}")
            answer, refusal, switch, note = (bare, None, {}, "; the server has no thinking switch")
    early = refusal or cut_off_judgement(answer)
    if early is not None:
        return early
    if fits_code_schema(answer, words):
        return await _enforced(asker, answer, switch, thinking, note)
    if answer.finish_reason == "length" and answer.content.lstrip().startswith("{"):
        begun = quoted_answer(answer.content)
        return Judgement("fail", f"JSON was begun and cut off: {begun}{note}")
    return await _not_enforced(asker, answer, tokens, switch, note)


async def _enforced(
    asker: ProbeAsker, answer: ProbeAnswer, switch: dict[str, Any], thinking: bool, note: str
) -> Judgement:
    """The answer fits. Whether the grammar did that, and whether the model thought at all."""
    plain = await asker.ask("the prompt alone, for its length", _PROSE_PROMPT, 1, **switch)
    added = prompt_growth(answer, plain)
    if added is not None and added > 0:
        return Judgement(
            "untested",
            f"it fits, but the server put the schema into the prompt as well (+{added} tokens), so "
            f"that obeying explains it too{note}",
        )
    if thinking and not answer.reasoning.strip():
        off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        still = await asker.ask("the prompt with thinking off", _PROSE_PROMPT, 1, **off)
        if prompt_growth(plain, still) in (0, None):
            return Judgement(
                "untested",
                "the schema is enforced, but nothing shows that the model thinks: no reasoning "
                "came, and the switch did not change the prompt",
            )
    return Judgement("pass", f"enforced against the prompt: {quoted_answer(answer.content)}{note}")


async def _not_enforced(
    asker: ProbeAsker, answer: ProbeAnswer, tokens: int, switch: dict[str, Any], note: str
) -> Judgement:
    """A 200 that does not fit. Whether the model obeys when the prompt asks for the JSON."""
    form = _json_format({"city": {"type": "string"}, "river": {"type": "string"}})
    willing = await asker.ask(
        "a schema that the prompt asks for", _JSON_PROMPT, tokens, response_format=form, **switch
    )
    found = json_object(willing.content)
    fits = found is not None and set(found) == {"city", "river"}
    fits = fits and all(isinstance(value, str) for value in (found or {}).values())
    how = (
        "merely obeyed where the prompt asks for the JSON"
        if fits
        else "dropped: not even the JSON that the prompt asks for came out"
    )
    return Judgement(
        "silent",
        f"not enforced, {how}; against the prompt came {quoted_answer(answer.content)!r}{note}",
    )


def fits_code_schema(answer: ProbeAnswer, words: list[str]) -> bool:
    """Whether the content is the wanted object and no word beside it."""
    found = json_object(answer.content)
    return found is not None and set(found) == {"code"} and found["code"] in words
