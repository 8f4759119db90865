"""The tool list as clients get it: names, words, hints, schemas, and that strangers are refused."""

from __future__ import annotations

from typing import Any, ClassVar

from mcp import Client
from mcp.types import Tool

from forge.suites.rig_case import RigCase, rig_under_test

NAME_LIMIT = 28  # characters: a client's prefix and this stay under its 64
TOOLS_LIMIT = 28
PROTOCOL_MODES = ("auto", "legacy")
_WORDS_OF_A_SECRET = ("token", "secret", "password", "credential", "key")


async def listed_tools(client: Client) -> list[Tool]:
    """Every tool of the live list, page after page."""
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def parameters_of(tool: Tool) -> dict[str, dict[str, Any]]:
    """The parameters of `tool` by name, each with its schema."""
    return dict(tool.input_schema.get("properties", {}))


class CatalogueSuite(RigCase):
    """The promise that a client reads before it calls anything."""

    # Tools whose `token` is no secret of anybody's: another tool of the rig gives it, for one use.
    plan_tokens: ClassVar[frozenset[str]] = frozenset()

    async def test_exactly_the_promised_tools_in_both_protocol_modes(self) -> None:
        for mode in PROTOCOL_MODES:
            async with self.in_process(mode) as client:
                names = [tool.name for tool in await listed_tools(client)]
            self.assertEqual(sorted(names), sorted(rig_under_test().tools), mode)

    async def test_over_stdio_the_list_is_the_same_to_the_letter(self) -> None:
        """And a tool that is not on it is an error and no more."""
        async with self.in_process() as client:
            here = [tool.model_dump() for tool in await listed_tools(client)]
        for mode in PROTOCOL_MODES:
            async with self.over_stdio(mode) as client:
                there = [tool.model_dump() for tool in await listed_tools(client)]
                self.assertEqual(here, there, mode)
                result = await client.call_tool("destroy_everything", {})
                self.assertTrue(result.is_error)
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["state"], "stopped")

    async def test_hints_say_what_each_tool_does(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            effect = rig_under_test().tools[tool.name]
            hints = tool.annotations
            assert hints is not None, tool.name
            self.assertEqual(hints.read_only_hint, effect == "reads", tool.name)
            if effect != "reads":  # without a word the wire's default would be destructive
                self.assertEqual(hints.destructive_hint, effect == "destroys", tool.name)

    async def test_names_and_words_fit_the_budget(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        self.assertLessEqual(len(tools), TOOLS_LIMIT)
        for tool in tools:
            self.assertLessEqual(len(tool.name), NAME_LIMIT)
            self.assertTrue(tool.title)
            self.assertGreater(len(tool.description or ""), 60, f"{tool.name} says too little")
            self.assertNotIn("{", tool.description or "", "a word of the template was not filled")
            for name, schema in parameters_of(tool).items():
                self.assertTrue(schema.get("description"), f"{tool.name}.{name} is not described")

    async def test_every_number_has_bounds_and_every_schema_is_closed(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            self.assertIs(tool.input_schema.get("additionalProperties"), False, tool.name)
            for name, schema in parameters_of(tool).items():
                if schema.get("type") in ("integer", "number"):
                    self.assertIn("minimum", schema, f"{tool.name}.{name}")
                    self.assertIn("maximum", schema, f"{tool.name}.{name}")

    async def test_no_tool_takes_a_secret_or_an_address(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            for name in parameters_of(tool):
                if name == "token" and tool.name in self.plan_tokens:
                    continue
                words = set(name.lower().split("_"))
                self.assertFalse(words & {*_WORDS_OF_A_SECRET, "url", "host", "endpoint"}, name)

    async def test_unknown_arguments_are_refused_by_name_in_every_tool(self) -> None:
        async with self.in_process() as client:
            for tool in rig_under_test().tools:
                text = await self.refusal(client, tool, "INVALID", zonee="us-east5-b")
                self.assertIn("zonee", text)
        self.assertEqual(self.processes(), [])

    async def test_help_names_every_tool_and_every_setting(self) -> None:
        async with self.in_process() as client:
            page = await self.text(client, "get_help")
        for tool in rig_under_test().tools:
            self.assertIn(f"`{tool}`", page)
        for name in self.module.RIG.settings.model_fields:
            self.assertIn(f"`{name.upper()}=", page)

    async def test_the_server_says_who_it_is_and_where_to_begin(self) -> None:
        async with self.in_process("legacy") as client:
            self.assertIn("get_system_status", client.instructions or "")
            information = client.server_info
            assert information is not None
            self.assertTrue(information.version.startswith(self.module.RIG_VERSION))
