"""Tools, choices, shapes, and messages that tell of calls: honoured, or refused with the place."""

from __future__ import annotations

import unittest
from typing import Any

from forge.engines.serving.answer_shape import AnswerShape, ToolSpec
from forge.engines.serving.request_messages import ChatMessage, MessageCall
from tests.engines.test_serving_requests import BOTH, RequestCase, chat, completion

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
LOOK_SPEC, TIME_SPEC = ToolSpec("look", "d", SCHEMA), ToolSpec("time")
NAMED = {"type": "function", "function": {"name": "time"}}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


class Tools(RequestCase):
    def test_tools_and_whether_they_may_be_called(self) -> None:
        tools = [LOOK, TIME]
        both = (LOOK_SPEC, TIME_SPEC)
        for fields, calls, told in (
            ({}, "many", both),
            ({"tool_choice": "auto"}, "many", both),
            ({"tool_choice": None, "parallel_tool_calls": None}, "many", both),
            ({"parallel_tool_calls": False}, "one", both),
            ({"parallel_tool_calls": True}, "many", both),
            ({"tool_choice": "none"}, "none", ()),
        ):
            order = chat(tools=tools, **fields)
            self.assertEqual((order.calls, order.tools), (calls, told), fields)
            self.assertIsNone(order.generation.shape)
        self.assertEqual(chat(tools=[], tool_choice="none").calls, "none")

    def test_a_call_that_must_be_made_is_a_shape(self) -> None:
        tools = [LOOK, TIME]
        for choice, parallel, must in (
            ("required", True, (LOOK_SPEC, TIME_SPEC)),
            ("required", False, (LOOK_SPEC, TIME_SPEC)),
            (NAMED, True, (TIME_SPEC,)),
            (NAMED, False, (TIME_SPEC,)),
        ):
            order = chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
            self.assertEqual(order.tools, (LOOK_SPEC, TIME_SPEC))
            self.assertEqual(order.calls, "many" if parallel else "one")
            shape = order.generation.shape
            assert shape is not None
            self.assertEqual(shape.shape, AnswerShape("calls", tools=must, many=parallel))
            self.assertEqual(shape.place, "tool_choice")

    def test_strict_tools_that_may_be_called_are_a_shape(self) -> None:
        strict = tool(name="look", strict=True)
        specs = (TIME_SPEC, ToolSpec("look", strict=True))
        for choice in ("auto", None):
            for parallel in (True, False):
                order = chat(
                    tools=[TIME, *strict], tool_choice=choice, parallel_tool_calls=parallel
                )
                self.assertEqual(order.tools, specs)
                shape = order.generation.shape
                assert shape is not None
                free = AnswerShape("calls", tools=specs, many=parallel, forced=False)
                self.assertEqual((shape.shape, shape.place), (free, "tools"))
        forced = chat(tools=strict, tool_choice="required").generation.shape
        assert forced is not None
        self.assertTrue(forced.shape.forced)
        none = chat(tools=strict, tool_choice="none")
        self.assertEqual((none.tools, none.generation.shape), ((), None))

    def test_tools_that_are_not_strict_are_no_shape(self) -> None:
        for more in ({}, {"strict": False}, {"strict": None}):
            order = chat(tools=tool(name="look", **more))
            self.assertEqual(order.tools, (ToolSpec("look"),))
            self.assertIsNone(order.generation.shape)

    def test_tools_that_cannot_be(self) -> None:
        for tools, place in (
            ("look", "tools"),
            ({}, "tools"),
            (["look"], "tools[0]"),
            ([{}], "tools[0].type"),
            ([{"type": "custom", "custom": {}}], "tools[0].type"),
            ([{"type": "function"}], "tools[0].function"),
            ([{"type": "function", "function": "look"}], "tools[0].function"),
            ([{**LOOK, "cache": 1}], "tools[0].cache"),
            (tool(), "tools[0].function.name"),
            (tool(name=""), "tools[0].function.name"),
            (tool(name=5), "tools[0].function.name"),
            (tool(name="a b"), "tools[0].function.name"),
            (tool(name="a.b"), "tools[0].function.name"),
            (tool(name="é"), "tools[0].function.name"),
            (tool(name="look\n"), "tools[0].function.name"),
            (tool(name="a" * 65), "tools[0].function.name"),
            (tool(name="<turn|>"), "tools[0].function.name"),
            (tool(name="a", description=5), "tools[0].function.description"),
            (tool(name="a", strict="yes"), "tools[0].function.strict"),
            (tool(name="a", parameters=[]), "tools[0].function.parameters"),
            (tool(name="a", parameters="{}"), "tools[0].function.parameters"),
            (tool(name="a", parameters={"type": "string"}), "tools[0].function.parameters.type"),
            (
                tool(name="a", parameters={"properties": []}),
                "tools[0].function.parameters.properties",
            ),
            (tool(name="a", returns={}), "tools[0].function.returns"),
            ([LOOK, TIME, LOOK], "tools[2].function.name"),
        ):
            self.refused(place, chat, tools=tools)

    def test_choices_that_cannot_be(self) -> None:
        for choice, place in (
            ("any", "tool_choice"),
            ("look", "tool_choice"),
            (5, "tool_choice"),
            ([], "tool_choice"),
            ({}, "tool_choice.type"),
            ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.type"),
            ({"type": "function"}, "tool_choice.function"),
            ({"type": "function", "name": "look"}, "tool_choice.name"),
            ({"type": "function", "function": {}}, "tool_choice.function.name"),
            ({"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
        ):
            self.refused(place, chat, tools=[LOOK], tool_choice=choice)
        for choice in ("auto", "required", NAMED):
            self.refused("tool_choice", chat, tool_choice=choice)
            self.refused("tool_choice", chat, tools=[], tool_choice=choice)
        self.refused("parallel_tool_calls", chat, tools=[LOOK], parallel_tool_calls=1)


class Shapes(RequestCase):
    def shape(self, make: Any, **fields: Any) -> tuple[AnswerShape, str]:
        order = make(**fields).generation.shape
        assert order is not None
        return order.shape, order.place

    def test_response_formats(self) -> None:
        for make in BOTH:
            self.assertIsNone(make(response_format={"type": "text"}).generation.shape)
            told = self.shape(make, response_format={"type": "json_object"})
            self.assertEqual(told, (AnswerShape("json_object"), "response_format"))
            for more in ({}, {"strict": True}, {"strict": False}, {"description": "d"}):
                form = {"name": "n", "schema": SCHEMA, **more}
                told = self.shape(
                    make, response_format={"type": "json_schema", "json_schema": form}
                )
                expected = AnswerShape("json_schema", schema=SCHEMA)
                self.assertEqual(told, (expected, "response_format.json_schema.schema"))

    def test_structured_outputs(self) -> None:
        for make in BOTH:
            for fields, expected in (
                ({"json": SCHEMA}, AnswerShape("json_schema", schema=SCHEMA)),
                (
                    {"json": '{"type": "object"}'},
                    AnswerShape("json_schema", schema={"type": "object"}),
                ),
                ({"json_object": True}, AnswerShape("json_object")),
                ({"regex": "a+"}, AnswerShape("regex", text="a+")),
                ({"grammar": 'start: "a"'}, AnswerShape("grammar", text='start: "a"')),
                ({"choice": ["a", "b", "a"]}, AnswerShape("choice", choices=("a", "b"))),
            ):
                told = self.shape(make, structured_outputs={**fields, "structural_tag": None})
                self.assertEqual(told, (expected, f"structured_outputs.{next(iter(fields))}"))

    def test_formats_that_cannot_be(self) -> None:
        def form(**fields: Any) -> dict[str, Any]:
            return {"type": "json_schema", "json_schema": fields}

        where = "response_format.json_schema"
        for told, place in (
            ("json", "response_format"),
            ([], "response_format"),
            ({}, "response_format.type"),
            ({"type": "xml"}, "response_format.type"),
            ({"type": ["text"]}, "response_format.type"),
            ({"type": "text", "schema": {}}, "response_format.schema"),
            ({"type": "json_object", "schema": {}}, "response_format.schema"),
            ({"type": "json_schema"}, where),
            ({"type": "json_schema", "schema": {}}, "response_format.schema"),
            (form(schema=SCHEMA), f"{where}.name"),
            (form(name="a b", schema=SCHEMA), f"{where}.name"),
            (form(name="a"), f"{where}.schema"),
            (form(name="a", schema=[]), f"{where}.schema"),
            (form(name="a", schema="{}"), f"{where}.schema"),
            (form(name="a", schema=SCHEMA, strict=1), f"{where}.strict"),
            (form(name="a", schema=SCHEMA, description=[]), f"{where}.description"),
            (form(name="a", schema=SCHEMA, other=1), f"{where}.other"),
        ):
            for make in BOTH:
                self.refused(place, make, response_format=told)

    def test_structures_that_cannot_be(self) -> None:
        where = "structured_outputs"
        for told, place in (
            ("a", where),
            ({}, where),
            ({"regex": "a", "choice": ["a"]}, where),
            ({"regex": ""}, f"{where}.regex"),
            ({"regex": 5}, f"{where}.regex"),
            ({"grammar": ["a"]}, f"{where}.grammar"),
            ({"json": 5}, f"{where}.json"),
            ({"json": "no json"}, f"{where}.json"),
            ({"json": "[]"}, f"{where}.json"),
            ({"json_object": False}, f"{where}.json_object"),
            ({"choice": []}, f"{where}.choice"),
            ({"choice": "a"}, f"{where}.choice"),
            ({"choice": ["a"] * 1001}, f"{where}.choice"),
            ({"choice": ["a", ""]}, f"{where}.choice[1]"),
            ({"choice": [1]}, f"{where}.choice[0]"),
            ({"structural_tag": "x"}, f"{where}.structural_tag"),
            ({"regex": "a", "whitespace_pattern": " "}, f"{where}.whitespace_pattern"),
        ):
            for make in BOTH:
                self.refused(place, make, structured_outputs=told)

    def test_one_answer_has_one_shape(self) -> None:
        form = {"type": "json_object"}
        for make in BOTH:
            both = {"response_format": form, "structured_outputs": {"regex": "a"}}
            self.refused("response_format", make, **both)
        self.refused("response_format", chat, tools=[LOOK], **both)
        for choice in ("required", NAMED):
            asks: dict[str, Any] = {"tools": [LOOK, TIME], "tool_choice": choice}
            self.refused("response_format", chat, response_format=form, **asks)
        order = chat(response_format=form, tools=[LOOK], tool_choice="none")
        assert order.generation.shape is not None
        self.assertEqual(order.generation.shape.shape.kind, "json_object")

    def test_a_shape_beside_tools_is_for_what_is_said(self) -> None:
        json_object, regex = AnswerShape("json_object"), AnswerShape("regex", text="a")
        for fields, said, place in (
            ({"response_format": {"type": "json_object"}}, json_object, "response_format"),
            ({"structured_outputs": {"regex": "a"}}, regex, "structured_outputs.regex"),
        ):
            for choice in ("auto", None):
                for tools in ([LOOK], tool(name="look", strict=True)):
                    told = self.shape(chat, tools=tools, tool_choice=choice, **fields)
                    self.assertFalse(told[0].forced)
                    self.assertEqual((told[0].kind, told[0].said), ("calls", said))
                    self.assertEqual([t.name for t in told[0].tools], ["look"])
                    self.assertEqual(told[1], place)
            self.assertEqual(self.shape(chat, tools=[], **fields), (said, place))
        text = chat(tools=[LOOK], response_format={"type": "text"})
        self.assertIsNone(text.generation.shape)


def called(identity: str = "c1", name: str = "look", arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def asked(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(identity: Any = "c1", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "r", **fields}


class Messages(RequestCase):
    def test_a_conversation_with_calls(self) -> None:
        arguments = '{"city": "Oslo", "days": [1, {"a": null}]}'
        order = chat(
            messages=[
                {"role": "user", "content": "u"},
                asked(called("c1", "look", arguments), called("c2", "time", ""), reasoning="so"),
                result(
                    "c2", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
                ),
                result("c1", name="look"),
                {"role": "assistant", "content": "w", "tool_calls": None, "refusal": None},
            ]
        )
        first = MessageCall("c1", "look", {"city": "Oslo", "days": [1, {"a": None}]})
        second = MessageCall("c2", "time", {})
        expected = (
            ChatMessage("user", "u"),
            ChatMessage("assistant", "", "so", (first, second)),
            ChatMessage("tool", "a\nb", call=second),
            ChatMessage("tool", "r", call=first),
            ChatMessage("assistant", "w"),
        )
        self.assertEqual(order.messages, expected)

    def test_words_beside_a_call(self) -> None:
        for content, text in (("w", "w"), ("", ""), (None, ""), ([], "")):
            order = chat(messages=[asked(called(), content=content), result()])
            self.assertEqual(order.messages[0].text, text)

    def test_thoughts_under_either_name(self) -> None:
        for fields in (
            {"reasoning": "so"},
            {"reasoning_content": "so"},
            {"reasoning": "so", "reasoning_content": "so"},
            {"reasoning": "so", "reasoning_content": None},
        ):
            messages = [{"role": "assistant", "content": "x", **fields}]
            self.assertEqual(chat(messages=messages).messages[0].reasoning, "so")

    def test_an_id_may_come_again_in_another_message(self) -> None:
        order = chat(messages=[asked(called()), result(), asked(called(name="time")), result()])
        last = order.messages[-1].call
        assert last is not None
        self.assertEqual(last.name, "time")

    def test_messages_that_cannot_be(self) -> None:
        where = "messages[0].tool_calls[0]"
        user = {"role": "user", "content": "u"}
        for messages, place in (
            ([asked("x")], where),
            ([asked({})], f"{where}.function"),
            ([asked({**called(), "type": "custom"})], f"{where}.type"),
            ([asked({**called(), "index": 0})], f"{where}.index"),
            ([asked({**called(), "id": ""})], f"{where}.id"),
            ([asked({**called(), "id": None})], f"{where}.id"),
            ([asked({**called(), "id": 5})], f"{where}.id"),
            ([asked(called(name=""))], f"{where}.function.name"),
            ([asked(called(name=None))], f"{where}.function.name"),  # type: ignore[arg-type]
            ([asked(called(arguments={}))], f"{where}.function.arguments"),
            ([asked(called(arguments=None))], f"{where}.function.arguments"),
            ([asked(called(arguments="[]"))], f"{where}.function.arguments"),
            ([asked(called(arguments="{"))], f"{where}.function.arguments"),
            ([asked(called(arguments='{"a": NaN}'))], f"{where}.function.arguments"),
            ([asked(called(arguments="[" * 100_000))], f"{where}.function.arguments"),
            ([asked(called(), called())], "messages[0].tool_calls[1].id"),
            ([asked(tool_calls={"id": "x"})], "messages[0].tool_calls"),
            ([asked(called())], "messages[0].tool_calls"),
            ([user, asked(called())], "messages[1].tool_calls"),
            (
                [{"role": "user", "content": "u", "tool_calls": [called()]}],
                "messages[0].tool_calls",
            ),
            ([{"role": "user", "content": "u", "reasoning": "r"}], "messages[0].reasoning"),
            ([asked(content=None)], "messages[0].content"),
            (
                [{"role": "assistant", "content": "", "function_call": {}}],
                "messages[0].function_call",
            ),
            ([{"role": "assistant", "content": "", "reasoning": 5}], "messages[0].reasoning"),
            (
                [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}],
                "messages[0].reasoning_content",
            ),
            ([result()], "messages[0].tool_call_id"),
            ([asked(called()), result("c2")], "messages[1].tool_call_id"),
            ([asked(called()), result(None)], "messages[1].tool_call_id"),
            ([asked(called()), result(5)], "messages[1].tool_call_id"),
            ([asked(called()), user, result()], "messages[2].tool_call_id"),
            ([asked(called()), result(), user, result()], "messages[3].tool_call_id"),
            ([asked(called()), result(name="time")], "messages[1].name"),
            ([asked(called()), result(content=None)], "messages[1].content"),
            ([asked(called()), result(content={"a": 1})], "messages[1].content"),
            ([asked(called()), result(is_error=True)], "messages[1].is_error"),
        ):
            self.refused(place, chat, messages=messages)

    def test_only_a_chat_has_messages(self) -> None:
        self.refused("messages", completion, messages=[result()])


if __name__ == "__main__":
    unittest.main()
