"""The base of every typed tool result: a sentence for people and the next step, inside the model.

Both stand in the structured half because one client shows the model only that half.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Outcome(BaseModel):
    """What every structured tool answers: `summary` first, `next_step` last word on what to do."""

    model_config = ConfigDict(extra="forbid")

    summary: str = Field(description="What happened, in one sentence.")
    next_step: str = Field(default="", description="The call that makes sense now, if any.")


def _says(value: Any) -> bool:
    """Whether a value says something: False and 0 do, 0.0, nothing and what is empty do not."""
    return isinstance(value, bool | int) or bool(value)


def _in_one_line(value: Any) -> str:
    """A nested value in one line of words."""
    if isinstance(value, dict):
        return "; ".join(f"{k}: {_in_one_line(item)}" for k, item in value.items() if _says(item))
    return ", ".join(map(_in_one_line, value)) if isinstance(value, list) else str(value)


def outcome_as_text(outcome: Outcome) -> str:
    """The text half of a result: the summary, each further field on a line, then the next step."""
    lines = [outcome.summary]
    for name, value in outcome.model_dump(mode="json", exclude={"summary", "next_step"}).items():
        if isinstance(value, dict):
            told = [f"  {key}: {_in_one_line(item)}" for key, item in value.items() if _says(item)]
            lines += [f"{name}:", *told] if told else []
        elif isinstance(value, list) and value:
            lines += [f"{name}:", *(f"  - {_in_one_line(item)}" for item in value)]
        elif _says(value):
            lines.append(f"{name}: {value}")
    if outcome.next_step:
        lines.append(f"Next: {outcome.next_step}")
    return "\n".join(lines)
