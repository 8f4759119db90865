"""The base of every typed tool result: a sentence for people and the next step, inside the model.

Both stand in the structured half because one client shows the model only that half.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Outcome(BaseModel):
    """What every structured tool answers: `summary` first, `next_step` last word on what to do."""

    model_config = ConfigDict(extra="forbid")

    summary: str = Field(description="What happened, in one sentence.")
    next_step: str = Field(default="", description="The call that makes sense now, if any.")


def outcome_as_text(outcome: Outcome) -> str:
    """The text half of a result: the summary, each further field on a line, then the next step."""
    lines = [outcome.summary]
    for name, value in outcome.model_dump(mode="json", exclude={"summary", "next_step"}).items():
        if isinstance(value, dict) and value:
            lines += [f"{name}:", *(f"  {key}: {item}" for key, item in value.items())]
        elif isinstance(value, list) and value:
            lines += [f"{name}:", *(f"  - {item}" for item in value)]
        elif isinstance(value, bool | int) or value:  # 0.0 and "" say nothing, False and 0 do
            lines.append(f"{name}: {value}")
    if outcome.next_step:
        lines.append(f"Next: {outcome.next_step}")
    return "\n".join(lines)
