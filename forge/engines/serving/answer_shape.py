"""What an answer must look like where a request says so: a schema, a pattern, or a call of a tool.

Knows no tokenizer, no grammar and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CallsWanted = Literal["none", "one", "many"]  # calls of tools that one answer may have


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, which
    `strict` asks to hold every call to."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class AnswerShape:
    """What an answer must be, whatever the model would rather say.

    json_object: any JSON object; json_schema: JSON that `schema` allows; regex and grammar (Lark's
    form): what `text` allows; choice: one of `choices`; calls: at least one call of one of `tools`
    in the model's own syntax, several where `many`, each with arguments as its tool's schema says.
    A thought that comes first is free.

    `forced` false: there may be no call. What is called is one of `tools` all the same, but only
    strict ones have their schemas held. The answer is then of the shape `said`, or calls; without
    `said`, any text, and calls behind it.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "calls"]
    schema: Mapping[str, Any] | None = None
    text: str = ""
    choices: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    many: bool = True
    forced: bool = True
    said: AnswerShape | None = None
