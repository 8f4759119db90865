"""The one gate of every call, through a real client in process, in both protocol modes.

The tools are small ones of the test, each with one way to go wrong; the server, the protocol and
the client are the SDK's own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import typing
import unittest
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal
from unittest import mock

from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent
from pydantic import BaseModel, Field

from forge.parts.assembly.guarded_tool import guarded
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.toolsets.caller import Caller, Picture
from forge.parts.toolsets.toolset import ToolEffect, ToolMethod

MODES: tuple[Literal["legacy", "auto"], ...] = ("legacy", "auto")
SECRET = "hf_" + "Qz7" * 12
PIXEL = bytes.fromhex("89504e470d0a1a0a") + b"\x00\xff" * 20
CLASSES = typing.get_args(ErrorClass)


class Report(Outcome):
    text: str = ""
    lines: list[str] = Field(default_factory=list)
    numbers: list[int] = Field(default_factory=list)
    figures: dict[str, float] = Field(default_factory=dict)
    anything: dict[str, Any] = Field(default_factory=dict)
    ratio: float | None = None


class Strict(BaseModel):
    count: int


class Tools:
    """What is called; `calls` tells what really ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer: Any = None
        self.error: BaseException | None = None
        self.read_only = False

    async def look(
        self,
        zone: Annotated[str, Field(max_length=64, description="Where.")] = "here",
        count: Annotated[int, Field(ge=1, le=9, description="How many.")] = 1,
        kind: Annotated[Literal["a", "b"], Field(description="Which.")] = "a",
    ) -> Report:
        """Looks."""
        self.calls.append(f"look {zone} {count} {kind}")
        checked_name("zone", "zone", zone) if zone != "here" else None
        return Report(summary="Looked.", next_step="look()")

    async def change(self) -> Report:
        """Changes."""
        self.calls.append("change")
        return Report(summary="Changed.")

    async def destroy(self) -> Report:
        """Destroys."""
        self.calls.append("destroy")
        return Report(summary="Destroyed.")

    async def structured(self) -> Report:
        """Gives the model of the test."""
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[no-any-return]

    async def text(self) -> str:
        """Gives the text of the test."""
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[no-any-return]

    async def plot(self) -> list[str | Picture]:
        """Gives a caption and an image."""
        return self.answer  # type: ignore[no-any-return]

    async def progress(self, ctx: Caller) -> str:
        """Tells where it is."""
        for step in range(3):
            await ctx.report_progress(step, 3, f"step {step}")
        return "done"

    def blocking(self) -> str:
        """Is not async."""
        return "from a thread"

    def server(self) -> MCPServer:
        effects: dict[str, tuple[ToolEffect, bool]] = {
            "look": ("reads", True),
            "change": ("changes", True),
            "destroy": ("destroys", True),
            "structured": ("reads", True),
            "text": ("reads", False),
            "plot": ("reads", False),
            "progress": ("reads", False),
            "blocking": ("reads", False),
        }
        tools = []
        for name, (effect, structured) in effects.items():
            function = getattr(self, name)
            method = ToolMethod(function, name, name.title(), function.__doc__, effect, structured)
            tools.append(guarded(method, lambda: self.read_only))
        return MCPServer("test", tools=list(tools), log_level="CRITICAL")


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.tools = Tools()
        self.stderr = io.StringIO()

    def in_both_modes(self, work: Callable[[Client], Awaitable[None]]) -> None:
        async def session(mode: Literal["legacy", "auto"]) -> None:
            async with Client(self.tools.server(), mode=mode) as client:
                await work(client)

        for mode in MODES:
            with self.subTest(mode=mode), contextlib.redirect_stderr(self.stderr):
                asyncio.run(session(mode))

    def call(self, tool: str, /, *each: dict[str, Any]) -> list[CallToolResult]:
        """The results of `tool` with each of these arguments in turn, in both modes."""
        results: list[CallToolResult] = []

        async def work(client: Client) -> None:
            for arguments in each or ({},):
                results.append(await client.call_tool(tool, arguments))
                # Whatever came: the server still answers.
                again = await client.call_tool("blocking", {})
                assert not again.is_error, again

        self.in_both_modes(work)
        self.assertEqual(len(results), 2 * max(1, len(each)))
        return results

    def give(self, tool: str, answer: Any) -> list[CallToolResult]:
        """The results, in both modes, of a tool that answers this."""
        self.tools.answer, self.tools.error = answer, None
        return self.call(tool)

    def fail_with(self, tool: str, error: BaseException) -> list[str]:
        """The words, in both modes, of a tool that raises this."""
        self.tools.error = error
        return self.words_of_errors(self.call(tool))

    def words(self, result: CallToolResult) -> str:
        return "\n".join(item.text for item in result.content if isinstance(item, TextContent))

    def words_of_errors(self, results: Iterable[CallToolResult]) -> list[str]:
        for result in results:
            self.assertTrue(result.is_error, result)
            self.assertIsNone(result.structured_content)
        return [self.words(result) for result in results]


class ArgumentsTest(Case):
    def test_a_good_call(self) -> None:
        for result in self.call("look", {"count": 2, "kind": "b"}):
            self.assertFalse(result.is_error)
            self.assertEqual(self.words(result), "Looked.\nNext: look()")
            assert result.structured_content is not None
            self.assertEqual(result.structured_content["summary"], "Looked.")
            self.assertEqual(result.structured_content["next_step"], "look()")
        self.assertEqual(self.tools.calls, ["look here 2 b"] * 2)

    def test_bad_arguments_are_refused_by_name_and_nothing_runs(self) -> None:
        bad: tuple[tuple[str, Any], ...] = (
            ("zonee", "us-east5-b"),
            ("count", 0),
            ("count", 10),
            ("count", "many"),
            ("count", 1.5),
            ("count", None),
            ("kind", "c"),
            ("zone", 7),
            ("zone", ["x"]),
            ("zone", "x" * 10_000),
            ("ctx", 1),
            ("self", 1),
        )
        words = self.words_of_errors(self.call("look", *({name: value} for name, value in bad)))
        for (name, _), text in zip(bad * 2, words, strict=True):
            self.assertTrue(text.startswith(f"INVALID {name}: "), text[:100])
        self.assertEqual(self.tools.calls, [])

    def test_every_fault_of_a_call_is_told_at_once(self) -> None:
        for text in self.words_of_errors(self.call("look", {"count": 99, "kind": "z", "zonee": 1})):
            for word in ("count: ", "kind: ", "zonee: ", "nothing was started", "Next: "):
                self.assertIn(word, text)

    def test_a_refused_value_is_never_repeated(self) -> None:
        names = ("count", "kind", "zonee", "zone")
        for text in self.words_of_errors(self.call("look", *({name: "S3CRET"} for name in names))):
            self.assertNotIn("S3CRET", text)
        self.assertNotIn("S3CRET", self.stderr.getvalue())

    def test_an_unknown_argument_with_a_hostile_name_cannot_break_anything(self) -> None:
        names = ("a\nb", "\x1b[31m", "x" * 100_000, "__class__", SECRET, "\u202e")
        for text in self.words_of_errors(self.call("look", *({name: 1} for name in names))):
            self.assertTrue(text.startswith("INVALID "), text[:100])
            self.assertLess(len(text), 9000)
            for hidden in ("\x1b", SECRET, "\u202e"):
                self.assertNotIn(hidden, text)

    def test_the_listed_schema_shows_what_is_enforced(self) -> None:
        async def work(client: Client) -> None:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            schema = listed["look"].input_schema
            self.assertIs(schema["additionalProperties"], False)
            self.assertEqual(schema["properties"]["count"]["minimum"], 1)
            self.assertEqual(schema["properties"]["zone"]["maxLength"], 64)
            for tool in listed.values():
                self.assertNotIn('"title"', json.dumps(tool.input_schema))
                self.assertTrue(tool.title and tool.description)

        self.in_both_modes(work)

    def test_hints_follow_the_effect(self) -> None:
        async def work(client: Client) -> None:
            hints = {t.name: t.annotations for t in (await client.list_tools()).tools}
            for name, read_only, destructive in (
                ("look", True, None),
                ("change", False, False),
                ("destroy", False, True),
            ):
                hint = hints[name]
                assert hint is not None
                self.assertIs(hint.read_only_hint, read_only)
                self.assertIs(hint.destructive_hint, destructive)
                self.assertIs(hint.open_world_hint, False)

        self.in_both_modes(work)


class ReadOnlyTest(Case):
    def test_the_call_itself_is_refused_and_nothing_runs(self) -> None:
        self.tools.read_only = True
        for name in ("change", "destroy"):
            for text in self.words_of_errors(self.call(name, {}, {"unknown": 1})):
                self.assertTrue(text.startswith("DENIED "), text)
        self.assertEqual(self.tools.calls, [])

    def test_it_is_asked_at_each_call(self) -> None:
        async def work(client: Client) -> None:
            for read_only in (False, True, False):
                self.tools.read_only = read_only
                result = await client.call_tool("change", {})
                self.assertIs(result.is_error, read_only)

        self.in_both_modes(work)
        self.assertEqual(self.tools.calls, ["change"] * 4)

    def test_reading_goes_on(self) -> None:
        self.tools.read_only = True
        self.assertEqual([result.is_error for result in self.call("look")], [False, False])

    def test_a_gate_that_cannot_be_asked_is_closed(self) -> None:
        """tpu.env at fault: whether the rig is read-only is unknown."""

        def unknown() -> bool:
            raise RigError("INVALID", "tpu.env: PORT is missing", "write it")

        method = ToolMethod(self.tools.destroy, "destroy", "D", "Destroys.", "destroys", True)
        tool = guarded(method, unknown)

        async def session(mode: Literal["legacy", "auto"]) -> CallToolResult:
            async with Client(MCPServer("t", tools=[tool]), mode=mode) as client:
                return await client.call_tool("destroy", {})

        for mode in MODES:
            (text,) = self.words_of_errors([asyncio.run(session(mode))])
            self.assertTrue(text.startswith("INVALID tpu.env: PORT is missing"))
        self.assertEqual(self.tools.calls, [])


class ErrorTest(Case):
    def test_each_class_is_the_first_word(self) -> None:
        for name in CLASSES:
            words = self.fail_with("text", RigError(name, "it happened", "look()"))
            self.assertEqual(words, [f"{name} it happened. Next: look()"] * 2)
        words = self.fail_with("structured", RigError("QUOTA", "none left"))
        self.assertEqual(words, ["QUOTA none left."] * 2)

    def test_a_grammars_refusal_names_the_parameter(self) -> None:
        for text in self.words_of_errors(self.call("look", {"zone": "--help"})):
            self.assertTrue(text.startswith("INVALID zone: must be "))

    def test_a_crash_is_internal_its_text_stays_and_its_trace_goes_to_stderr(self) -> None:
        for error in (
            ZeroDivisionError("the private detail"),
            KeyError("the private detail"),
            OSError(2, "the private detail", "/the/private/path"),
            RuntimeError(f"the private detail {SECRET}"),
            RecursionError("the private detail"),
            AssertionError("the private detail"),
        ):
            self.stderr = io.StringIO()
            with self.subTest(error=type(error).__name__):
                for text in self.fail_with("text", error):
                    self.assertTrue(text.startswith("INTERNAL text failed"))
                    self.assertNotIn("private", text)
                    self.assertIn("Next: ", text)
                self.assertIn("the private detail", self.stderr.getvalue())
                self.assertIn("Traceback", self.stderr.getvalue())
                self.assertNotIn(SECRET, self.stderr.getvalue())

    def test_a_fault_of_our_own_is_not_blamed_on_the_arguments(self) -> None:
        """A record that does not validate inside a tool is a crash, though pydantic says so too."""
        with self.assertRaises(ValueError) as caught:
            Strict.model_validate({"count": "S3CRET"})
        for text in self.fail_with("text", caught.exception):
            self.assertTrue(text.startswith("INTERNAL "), text)

    def test_an_sdk_error_raised_by_hand_has_a_class_too(self) -> None:
        self.assertEqual(self.fail_with("text", ToolError("words")), ["INTERNAL words"] * 2)

    def test_errors_are_redacted_printable_and_bounded(self) -> None:
        flood = "a\x00\x1b[31mb\u202e\ud800" + SECRET + "x" * 1_000_000
        for text in self.fail_with("text", RigError("PARTIAL", flood, "look()")):
            self.assertTrue(text.startswith("PARTIAL ab[redacted]"), text[:100])
            self.assertTrue(text.endswith("Next: look()"))
            self.assertLess(len(text), 9000)

    def test_an_answer_of_the_wrong_kind_is_internal(self) -> None:
        for answer in (None, 7, {"summary": 1}, Report.model_construct(summary=7, lines="x")):
            with self.subTest(answer=answer):
                for text in self.words_of_errors(self.give("structured", answer)):
                    self.assertTrue(text.startswith("INTERNAL "), text)

    def test_an_unknown_tool(self) -> None:
        for text in self.words_of_errors(self.call("nope")):
            self.assertIn("nope", text)


class AnswerTest(Case):
    def test_text_and_structure_say_the_same(self) -> None:
        report = Report(
            summary="Two lines.", next_step="look()", lines=["a", "b"], figures={"x": 1.5}, text="t"
        )
        for result in self.give("structured", report):
            self.assertEqual(Report.model_validate(result.structured_content), report)
            words = self.words(result)
            self.assertTrue(words.startswith("Two lines.\n") and words.endswith("Next: look()"))
            for word in ("text: t", "- a", "- b", "x: 1.5"):
                self.assertIn(word, words)

    def test_logs_and_markdown_are_text_alone(self) -> None:
        text = "# Title\n\n- `x`\tÉ 🙂"
        for result in self.give("text", text):
            self.assertEqual((self.words(result), result.structured_content), (text, None))

    def test_secrets_and_hidden_characters_go_from_every_corner(self) -> None:
        bad = f"a\x00\x1b[31m\u202e{SECRET}\ud800"
        report = Report(
            summary=bad,
            next_step=bad,
            text=bad,
            lines=[bad],
            figures={bad: 1.0},
            anything={"deep": [{"er": [bad]}], bad: bad},
        )
        for result in (*self.give("structured", report), *self.give("text", bad)):
            for whole in (
                self.words(result),
                json.dumps(result.structured_content or "a[redacted]"),
            ):
                self.assertIn("a[redacted]", whole)
                for hidden in (SECRET, "\\u0000", "\x00", "\x1b", "\u202e", "\\u202e", "\\ud800"):
                    self.assertNotIn(hidden, whole)

    def test_the_values_of_secret_variables_go_too(self) -> None:
        with mock.patch.dict(os.environ, {"MY_API_KEY": "an opaque value"}):
            for result in self.give("text", "it is an opaque value!"):
                self.assertEqual(self.words(result), "it is [redacted]!")

    def test_all_characters_at_random(self) -> None:
        source = random.Random(12)
        for _ in range(8):
            text = "".join(chr(source.randrange(0x110000)) for _ in range(300))
            for result in self.give("text", text):
                self.assertFalse(result.is_error)
            for result in self.give("structured", Report(summary=text, lines=[text])):
                self.assertFalse(result.is_error)

    def test_30_mb_of_text(self) -> None:
        for result in self.give("text", "first\n" + "x" * 30_000_000 + "\nlast"):
            words = self.words(result)
            self.assertLess(len(words), 33_000)
            self.assertTrue(words.startswith("first\n") and words.endswith("\nlast"))
            self.assertIn("left out", words)

    def test_floods_in_a_structure(self) -> None:
        deep: dict[str, Any] = {}
        for _ in range(200):
            deep = {"d": deep}
        for name, flood in {
            "one string": Report(summary="s", text="x" * 30_000_000),
            "many long strings": Report(summary="s", lines=["x" * 10_000] * 3000),
            "many short strings": Report(summary="s", lines=["xy"] * 500_000),
            "many numbers": Report(summary="s", numbers=list(range(500_000))),
            "many keys": Report(summary="s", figures={str(n): 1.0 for n in range(200_000)}),
            "long keys": Report(summary="s", anything={"k" * 1_000_000: 1}),
            "a tree": Report(summary="s", anything={"a": [{"b": ["x" * 99] * 99}] * 99}),
            "depth": Report(summary="s", anything=deep),
            "wide characters": Report(summary="s", lines=["🙂" * 1000] * 100),
        }.items():
            with self.subTest(name):
                for result in self.give("structured", flood):
                    self.assertFalse(result.is_error, self.words(result)[:300])
                    self.assertTrue(self.words(result).startswith("s\n"))
                    self.assertLess(len(self.words(result)), 33_000)
                    self.assertLess(len(json.dumps(result.structured_content)), 60_000)

    def test_nesting_beyond_all_reading_is_an_error_with_a_class(self) -> None:
        deep: dict[str, Any] = {}
        for _ in range(5000):
            deep = {"d": deep}
        for text in self.words_of_errors(
            self.give("structured", Report.model_construct(summary="s", anything=deep))
        ):
            self.assertTrue(text.startswith("INTERNAL "), text[:200])

    def test_numbers_that_json_does_not_know(self) -> None:
        for number in (float("nan"), float("inf"), float("-inf")):
            with self.subTest(number=number):
                for result in self.give("structured", Report(summary="s", ratio=number)):
                    self.assertFalse(result.is_error, result)

    def test_an_image_passes_whole_and_its_caption_is_cleaned(self) -> None:
        caption = f"peak \x1b[1m17\x1b[0m {SECRET}\ud800"
        for result in self.give("plot", [caption, Picture(PIXEL)]):
            self.assertFalse(result.is_error, result)
            self.assertEqual(self.words(result), "peak 17 [redacted]")
            (image,) = [item for item in result.content if isinstance(item, ImageContent)]
            self.assertEqual((base64.b64decode(image.data), image.mime_type), (PIXEL, "image/png"))

    def test_progress_reaches_the_client(self) -> None:
        async def work(client: Client) -> None:
            told: list[tuple[float, float | None, str | None]] = []

            async def tell(progress: float, total: float | None, message: str | None) -> None:
                told.append((progress, total, message))

            result = await client.call_tool("progress", {}, progress_callback=tell)
            self.assertEqual(self.words(result), "done")
            self.assertEqual(told, [(step, 3, f"step {step}") for step in range(3)])

        self.in_both_modes(work)

    def test_a_function_that_is_not_async(self) -> None:
        for result in self.call("blocking"):
            self.assertEqual(self.words(result), "from a thread")


if __name__ == "__main__":
    unittest.main()
