"""The single place through which every tool call goes: read-only gate, strict arguments, errors.

Knows no toolset. Covers stdio, HTTP and in-process calls alike, because it is the tool itself.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from pydantic import ConfigDict, Field, ValidationError

from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import TEXT_LIMIT, clean, clean_value
from forge.parts.ground.results import Outcome, outcome_as_text
from forge.parts.toolsets.caller import Picture, QuestionFirst
from forge.parts.toolsets.toolset import ToolEffect, ToolMethod

# Hints for the client's permission dialogue. The wire's default for destructiveHint is true.
_HINTS: dict[ToolEffect, dict[str, Any]] = {
    "reads": {"read_only_hint": True},
    "changes": {"read_only_hint": False, "destructive_hint": False, "idempotent_hint": True},
    "destroys": {"read_only_hint": False, "destructive_hint": True, "idempotent_hint": True},
}
_STRUCTURE_LIMIT = 48_000  # characters of a structured result as JSON


class GuardedTool(Protocol):
    """A tool of the SDK whose failures begin with their class and whose results are bounded."""

    name: str
    title: str | None
    description: str
    parameters: dict[str, Any]
    effect: ToolEffect


def guarded(method: ToolMethod, read_only_rig: Callable[[], bool]) -> GuardedTool:
    """`method` as a tool; unknown arguments are refused (the SDK drops them silently)."""
    from mcp.types import ToolAnnotations

    takes_caller = "ctx" in method.function.__annotations__
    tool = _guarded_tool_class().from_function(
        method.function,
        name=method.name,
        title=method.title,
        description=method.description,
        context_kwarg="ctx" if takes_caller else None,
        annotations=ToolAnnotations(open_world_hint=False, **_HINTS[method.effect]),
        structured_output=method.structured or False,
    )
    model = tool.fn_metadata.arg_model
    model.model_config |= ConfigDict(extra="forbid", hide_input_in_errors=True)
    model.model_rebuild(force=True)
    tool.parameters = _without_titles(model.model_json_schema(by_alias=True))
    tool.effect = method.effect
    tool.read_only_rig = read_only_rig
    guarded_tool: GuardedTool = tool
    return guarded_tool


@functools.cache
def _guarded_tool_class() -> Any:
    """The SDK's Tool with a guarded run. Made when the first tool is: importing the SDK takes most
    of a second, and a job's worker has no use for it."""
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp.shared.exceptions import MCPError

    class Guarded(Tool):
        effect: ToolEffect = "reads"
        read_only_rig: Callable[[], bool] = Field(default=lambda: False, exclude=True)

        async def run(
            self, arguments: dict[str, Any], context: Any, convert_result: bool = False
        ) -> Any:
            """Run the tool. Every failure is a ToolError whose first word is its class."""
            try:
                refused = self.effect != "reads" and self.read_only_rig()
            except RigError as error:
                raise ToolError(clean(str(error), 8000)) from None
            if refused:
                raise ToolError(
                    f"DENIED {self.name} changes something and this rig is read-only. "
                    "Next: unset RIG_READ_ONLY"
                )
            try:
                result = await super().run(arguments, context, convert_result=False)
                answer = _clean_answer(result)
                return self.fn_metadata.convert_result(answer) if convert_result else answer
            except MCPError:
                raise
            except Exception as error:
                if isinstance(error.__cause__, QuestionFirst):
                    return _question_in_result(error.__cause__)
                raise ToolError(clean(_error_text(self.name, error), 8000)) from None

    return Guarded


def _error_text(name: str, error: Exception) -> str:
    """What the failure of tool `name` is called, its class first."""
    from mcp.server.mcpserver.exceptions import ToolError

    cause = error.__cause__ or error
    if isinstance(cause, RigError):
        return str(cause)
    # Anywhere but in the arguments, the same exception is a fault of our own.
    if isinstance(cause, ValidationError) and type(error) is ToolError:
        faults = [
            f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
            for fault in cause.errors(include_input=False, include_url=False)
        ]
        return f"INVALID {'; '.join(faults)}; nothing was started. Next: correct the arguments"
    if isinstance(cause, ToolError):
        return f"INTERNAL {cause}"
    trace = "".join(traceback.format_exception(cause))
    print(clean(trace), file=sys.stderr, flush=True)
    return (
        f"INTERNAL {name} failed in a way nobody foresaw ({type(cause).__name__}); the "
        "server goes on. Next: read its standard error, then get_system_status()"
    )


def _clean_answer(result: Any) -> Any:
    """`result` redacted, printable and bounded; for models, text and structure say the same."""
    from mcp.server.mcpserver import Image
    from mcp.types import CallToolResult, TextContent

    if isinstance(result, str):
        return clean(result)
    if isinstance(result, list):  # texts and pictures
        return [_clean_answer(item) for item in result]
    if isinstance(result, Picture):
        return Image(data=result.data, format="png")
    if not isinstance(result, Outcome):
        return result
    fields = clean_value(result.model_dump(mode="json"))
    limit = TEXT_LIMIT
    while len(json.dumps(fields)) > _STRUCTURE_LIMIT and limit > 200:
        limit //= 2
        fields = clean_value(fields, limit)
    text = clean(outcome_as_text(type(result).model_validate(fields)))
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=fields)


def _question_in_result(first: QuestionFirst) -> Any:
    """The result that makes a client ask its user, and call again with the answer."""
    from mcp.types import ElicitRequest, ElicitRequestFormParams, InputRequiredResult

    form = ElicitRequestFormParams(message=first.question, requested_schema=first.schema)
    return InputRequiredResult(
        input_requests={first.key: ElicitRequest(params=form)}, request_state=first.state
    )


def _without_titles(schema: Any) -> Any:
    """A JSON schema without pydantic's automatic titles: 9 % of a tool list's tokens."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema
