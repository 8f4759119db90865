"""Asks the person behind the client, on either protocol, from within a tool's body.

From within, and not by the SDK's resolvers: those run before the body, so that a person would be
asked about a token that is worthless and could not be told age and cost. Knows no toolset.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from forge.parts.toolsets.caller import Caller, QuestionFirst

_ANSWER_KEY = "confirmation"
# From this revision on a question rides in the result, and the client calls again with the answer.
_QUESTION_IN_RESULT = "2026-07-28"

Consent = Literal["given", "refused", "cannot ask"]


class Confirmation(BaseModel):
    """What the person is asked to fill in."""

    confirm: bool = Field(description="Really do it? There is no way back.")


async def ask_user(ctx: Caller, question: str) -> Consent:
    """Whether the person behind the client agrees.

    Raises QuestionFirst where the question rides in the result: the client then calls the tool
    again, and the same question gives the answer; an answer to any other wording is not taken.
    Dismissing the question is refusing it.
    """
    capabilities = ctx.client_capabilities
    asks = capabilities.elicitation if capabilities is not None else None
    # An empty capability means forms; one that names only URLs cannot show this question.
    if asks is None or (asks.form is None and asks.url is not None):
        return "cannot ask"
    if (ctx.protocol_version or "") < _QUESTION_IN_RESULT:
        try:
            outcome = await ctx.elicit(question, Confirmation)
        except ValueError:  # accepted, but not with what was asked for
            return "refused"
        agreed = outcome.action == "accept" and outcome.data.confirm
        return "given" if agreed else "refused"
    digest = hashlib.sha256(question.encode()).hexdigest()
    answer = (ctx.input_responses or {}).get(_ANSWER_KEY)
    if answer is None or ctx.request_state != digest:
        raise QuestionFirst(question, _ANSWER_KEY, Confirmation.model_json_schema(), digest)
    return "given" if _agrees(answer) else "refused"


def _agrees(answer: object) -> bool:
    from mcp.types import ElicitResult

    if not isinstance(answer, ElicitResult) or answer.action != "accept":
        return False
    try:
        return Confirmation.model_validate(answer.content).confirm
    except ValidationError:
        return False
