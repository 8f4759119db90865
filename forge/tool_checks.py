"""The rules for a rig's tool list: names, words, bounds, and what it costs a client to load it.

Looks at the list that the built server sends over stdio, never at the sources.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import Tool

from forge.build import rig_environment
from forge.naming import MAX_TOOL_NAME, tool_names

MAX_TOOLS = 28  # of the toolsets that load by default
MAX_TOKENS = 7_000  # o200k, of name, description and input schema together
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ANSWER_PATIENCE_S = 60.0


async def listed_tools(server_file: Path, toolsets: str, state: Path) -> list[Tool]:
    """The tools that `server_file` lists over stdio with RIG_TOOLSETS=`toolsets`.

    Its state goes to the folder `state`. Raises RuntimeError with the last line that the server
    said on standard error where it does not come up.
    """
    state.mkdir(parents=True, exist_ok=True)
    said = state / f"stderr-{toolsets}.txt"
    parameters = StdioServerParameters(
        command=sys.executable,
        args=[str(server_file)],
        env={**rig_environment(state), "RIG_TOOLSETS": toolsets},
        cwd=str(server_file.parent),
    )
    tools: list[Tool] = []
    with said.open("w", encoding="utf-8") as errors:
        try:
            transport = stdio_client(parameters, errlog=errors)
            async with Client(transport, read_timeout_seconds=_ANSWER_PATIENCE_S) as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except Exception as error:
            lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
            raise RuntimeError(last.strip()) from error


def token_count(tools: Sequence[Tool]) -> int:
    """o200k tokens of what a client shows its model: name, description and input schema.

    rs-bpe carries the vocabulary. Claude's own tokenizer counts some 10 to 20 % otherwise.
    Raises RuntimeError where the package is missing.
    """
    try:
        from rs_bpe import openai  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise RuntimeError("tokens cannot be counted without the package rs-bpe") from error
    shown = [
        {"name": t.name, "description": t.description, "input_schema": t.input_schema}
        for t in tools
    ]
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    return int(openai.o200k_base().count(text))


def budget_faults(tools: Sequence[Tool]) -> Iterator[str]:
    """Where the tools that load by default are too many or too much to read."""
    if len(tools) > MAX_TOOLS:
        yield (
            f"{len(tools)} tools load by default, {MAX_TOOLS} may: set on_by_default = False in a "
            "toolset"
        )
    tokens = token_count(tools)
    if tokens > MAX_TOKENS:
        yield (
            f"the tools that load by default take {tokens:,} tokens, {MAX_TOKENS:,} may be: "
            "shorten descriptions, or set on_by_default = False in a toolset"
        )


def tool_faults(tools: Sequence[Tool]) -> Iterator[str]:
    """Where a tool's name, words, hints or parameters break a rule."""
    known, names = tool_names(), [tool.name for tool in tools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two tools are named {name}: rename one"
    for tool in tools:
        name = tool.name
        if len(name) > MAX_TOOL_NAME:
            yield f"tool {name} has {len(name)} characters, {MAX_TOOL_NAME} may be: shorten it"
        if not _NAME.fullmatch(name):
            yield f"tool {name!r} holds more than a-z, 0-9 and _: rename it"
        if name not in known:
            yield f"tool {name} is not in forge/naming.py: add it there and to NAMING.md"
        for what in ("description", "title"):
            if not str(getattr(tool, what) or "").strip():
                yield f"tool {name} has no {what}: write one"
        hints = tool.annotations
        if hints is None or hints.read_only_hint is None:
            yield f"tool {name} has no annotations: say whether it reads, changes or destroys"
        elif not hints.read_only_hint and hints.destructive_hint is None:
            yield f"tool {name} does not say whether it destroys: set the destructive hint"
        schema = tool.input_schema
        if schema.get("additionalProperties") is not False:
            yield f"tool {name} takes unknown arguments: forbid additional properties"
        for parameter, kind in schema.get("properties", {}).items():
            if not str(kind.get("description", "")).strip():
                yield f"tool {name}, parameter {parameter}: has no description: write one"
            for lacking in _unbounded(kind, schema.get("$defs", {})):
                yield f"tool {name}, parameter {parameter}: {lacking}"


def _unbounded(kind: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """What a parameter's schema leaves open, with the remedy."""
    reference = kind.get("$ref")
    if isinstance(reference, str):
        kind = definitions.get(reference.rpartition("/")[2], {})
    if "enum" in kind or "const" in kind:
        return
    for choice in ("anyOf", "oneOf", "allOf"):
        for part in kind.get(choice, ()):
            yield from _unbounded(part, definitions)
    match kind.get("type"):
        case "string":
            if "maxLength" not in kind and "pattern" not in kind:
                yield "a text without an end: give it a max_length or a pattern"
        case "integer" | "number":
            if not ({"minimum", "exclusiveMinimum"} & kind.keys()):
                yield "a number without a least value: give it ge or gt"
            if not ({"maximum", "exclusiveMaximum"} & kind.keys()):
                yield "a number without a greatest value: give it le or lt"
        case "array":
            if "maxItems" not in kind:
                yield "a list without an end: give it a max_length"
            yield from _unbounded(kind.get("items", {}), definitions)
        case "object":
            if kind.get("additionalProperties") is not False:
                yield "an object that takes any key: forbid additional properties"
            for part in kind.get("properties", {}).values():
                yield from _unbounded(part, definitions)
        case None if not any(key in kind for key in ("anyOf", "oneOf", "allOf")):
            yield "a value of any type: give it one"
