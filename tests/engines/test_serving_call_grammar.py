"""Calls that are held to their tools' schemas are of them, as the server's own reader has them."""

from __future__ import annotations

import json
import unittest
from typing import Any

import jsonschema

from forge.engines.serving.answer_shape import AnswerShape, ToolSpec
from forge.engines.serving.call_grammar import CallTokens, call_grammar
from forge.engines.serving.call_syntax import CALL_QUOTE, ToolCall, read_call
from forge.engines.serving.call_texts import CallGrammarRefused
from forge.engines.serving.constraints import Constraints
from forge.engines.serving.refusal import ApiRefusal
from forge.engines.serving.slot_engine import TokenConstraint
from tests.engines.serving_folder import CALL_CONTROL, small_tokenizer
from tests.engines.shape_walk import Speller, walk

TOKENIZER = small_tokenizer(CALL_CONTROL)
SPELL = Speller(TOKENIZER)
STOPS = frozenset((1, 5))
MADE = Constraints(TOKENIZER, STOPS)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "of": {"$ref": "#/$defs/person"},
    },
    "required": ["name"],
}
LOOK = ToolSpec(
    "look",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5, "description": "where"},
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 9},
                "minItems": 1,
                "maxItems": 3,
            },
            "exact": {"type": "boolean", "default": False},
            "Kind": {"enum": ["a", 'b "c"', 3, None, [1, {"x": "y"}]]},
            "unit": {"type": "string", "enum": ["km", "miles"]},
            "who": {"$ref": "#/$defs/person"},
            "near": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[A-C]+x?$"},
            "inside": {"type": "string", "pattern": "qq", "maxLength": 6},
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "date-time"},
            "size": {"type": ["integer", "string"], "maxLength": 2, "minimum": 0, "maximum": 9},
            "fixed": {"const": {"a": [True, "x"], "b": 1.5}},
            "one": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 1}]},
            "all": {"allOf": [{"type": "boolean"}], "title": "T"},
        },
        "required": ["city", "days", "inside"],
        "$defs": {"person": PERSON},
    },
)
PLAIN = ToolSpec("plain-1.a")
MAP = ToolSpec(
    "map",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a", "more"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
    },
)
FREE = ToolSpec("free", parameters={"type": "object"})


def held(*tools: ToolSpec, many: bool = True) -> TokenConstraint:
    return MADE.begin(AnswerShape("calls", tools=tools, many=many), False)


def calls_in(text: str) -> list[ToolCall]:
    """The calls that `text` is made of, and of nothing else."""
    *calls, rest = text.split("<tool_call|>")
    assert not rest and all(call.startswith("<|tool_call>") for call in calls), text
    return [
        read_call(call.removeprefix("<|tool_call>").replace('<|"|>', CALL_QUOTE)) for call in calls
    ]


class CallCase(unittest.TestCase):
    def said(self, *tools: ToolSpec, many: bool = True, seeds: int = 40) -> list[list[ToolCall]]:
        """The calls of random answers that came to an end, each of its tool's schema."""
        answers = []
        for seed in range(seeds):
            walked = walk(held(*tools, many=many), STOPS, seed)
            if walked.ended:
                answers.append(calls_in(SPELL.text(walked.tokens)))
        schemas = {tool.name: tool.parameters for tool in tools}
        for call in (call for calls in answers for call in calls):
            jsonschema.validate(json.loads(call.arguments), dict(schemas[call.name]))
        return answers

    def takes(self, text: str, *tools: ToolSpec, many: bool = True) -> bool:
        return SPELL.takes(held(*tools, many=many), text, 1)

    def call(self, body: str) -> str:
        """`body` as a call, each ' in it being the token around texts."""
        quoted = body.replace("'", '<|"|>')
        return f"<|tool_call>call:{quoted}<tool_call|>"


class RandomCallsTest(CallCase):
    def test_whatever_is_called_is_of_the_schema(self) -> None:
        answers = self.said(LOOK, many=False, seeds=120)
        self.assertGreater(len(answers), 100)
        self.assertTrue(all(len(calls) == 1 for calls in answers))
        given = {key for (call,) in answers for key in json.loads(call.arguments)}
        self.assertEqual(given, set(LOOK.parameters["properties"]))

    def test_each_of_several_tools_is_called_and_nothing_else(self) -> None:
        answers = self.said(LOOK, PLAIN, MAP, seeds=60)
        self.assertEqual({c.name for calls in answers for c in calls}, {"look", "plain-1.a", "map"})
        self.assertGreater(max(len(calls) for calls in answers), 1)
        self.assertGreater(min(len(calls) for calls in answers), 0)

    def test_a_tool_without_parameters_gets_none(self) -> None:
        for calls in self.said(PLAIN, many=False, seeds=5):
            self.assertEqual(calls, [ToolCall("plain-1.a", "{}")])

    def test_an_object_that_names_no_keys_may_have_any(self) -> None:
        arguments = [
            json.loads(c.arguments) for calls in self.said(FREE, many=False) for c in calls
        ]
        self.assertGreater(len(arguments), 20)
        kinds = {type(value) for told in arguments for value in told.values()}
        self.assertGreater(len(kinds), 4)

    def test_further_keys_are_of_their_schema_and_none_of_the_named(self) -> None:
        found = 0
        for calls in self.said(MAP, many=False, seeds=60):
            told = json.loads(calls[0].arguments)
            self.assertIsInstance(told.pop("a"), bool)
            self.assertTrue(all(type(value) is int for value in told.values()))
            found += len(told) > 1
        self.assertGreater(found, 3)


class WrittenCallsTest(CallCase):
    def test_calls_as_the_model_s_template_writes_them(self) -> None:
        for body in (
            "look{city:'oslo',days:[1,2],inside:'qq'}",
            "look{city:'',days:[9],exact:true,inside:'a qq b'}",
            "look{city:'a,b}',days:[1],inside:'qq',Kind:'b \"c\"',near:null}",
            "look{city:'é😀',days:[1],fixed:{a:[true,'x'],b:1.5},inside:'qq'}",
        ):
            self.assertTrue(self.takes(self.call(body), LOOK), body)

    def test_what_is_no_such_call_is_not_taken(self) -> None:
        good = "look{city:'o',days:[1],inside:'qq'}"
        self.assertTrue(self.takes(self.call(good), LOOK))
        for body in (
            "look{city:'o',days:[1]}",
            "look{days:[1],city:'o',inside:'qq'}",
            "look{city:'o',days:[],inside:'qq'}",
            "look{city:'o',days:[1,2,3,4],inside:'qq'}",
            "look{city:'o',days:[10],inside:'qq'}",
            "look{city:'o',days:['1'],inside:'qq'}",
            "look{city:o,days:[1],inside:'qq'}",
            "look{city:'toolong',days:[1],inside:'qq'}",
            "look{city:'o',days:[1],inside:'q'}",
            "look{city:'o',days:[1],inside:'qq',other:1}",
            "look{city:'o',days:[1],inside:'qq',unit:'m'}",
            "look{'city':'o',days:[1],inside:'qq'}",
            "look{city: 'o',days:[1],inside:'qq'}",
            "find{}",
            "look{}",
        ):
            self.assertFalse(self.takes(self.call(body), LOOK), body)
        for text in ("", "hello", "look{}", self.call(good) + " and", "x" + self.call(good)):
            self.assertFalse(self.takes(text, LOOK), text)

    def test_one_call_or_several(self) -> None:
        call = self.call("plain-1.a{}")
        self.assertTrue(self.takes(call * 3, PLAIN))
        self.assertFalse(self.takes(call * 2, PLAIN, many=False))
        self.assertTrue(self.takes(call, PLAIN, many=False))

    def test_a_text_has_no_control_token_in_it(self) -> None:
        for inner in ("<|tool_call>", "<tool_call|>", "<turn|>", "<eos>"):
            body = f"look{{city:'{inner}',days:[1],inside:'qq'}}"
            self.assertFalse(self.takes(self.call(body), LOOK), inner)


class RefusedSchemasTest(CallCase):
    def test_what_cannot_be_kept_to_is_named_with_its_place(self) -> None:
        for words, schema in {
            "t.a: not": {"not": {}},
            "t.a: uniqueItems": {"type": "array", "uniqueItems": True},
            "t.a: if": {"if": {}},
            "t.a: minProperties": {"type": "object", "minProperties": 1},
            "t.a: patternProperties": {"type": "object", "patternProperties": {}},
            "t.a: prefixItems": {"type": "array", "prefixItems": []},
            't.a: format "ipv9"': {"type": "string", "format": "ipv9"},
            't.a: type "strange"': {"type": "strange"},
            "t.a: $ref '#/nope'": {"$ref": "#/nope"},
            "t.a: $ref 'http://x/y'": {"$ref": "http://x/y"},
            "t.a: the key 'x y'": {"type": "object", "properties": {"x y": {}}},
            "t.a: the key 'x:y'": {"const": {"x:y": 1}},
            "t.a: at least 3 and at most 1": {"type": "string", "minLength": 3, "maxLength": 1},
            "t.a: minLength must be": {"type": "string", "minLength": -1},
            "t.a: allOf of several": {"allOf": [{"type": "string"}, {"minLength": 1}]},
            "t.a: oneOf of values": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "t.a: type beside anyOf": {"type": "string", "anyOf": [{"minLength": 1}]},
            "t.a: minLength beside enum": {"enum": ["a"], "minLength": 1},
            "t.a: enum has no value": {"enum": ["a"], "type": "integer"},
            "t.a: pattern '^a|b'": {"type": "string", "pattern": "^a|b"},
            "t.a: pattern must be": {"type": "string", "pattern": 3},
            "t.a: 'x' is required": {
                "type": "object",
                "properties": {"y": {}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "t.a.items: not": {"type": "array", "items": {"not": {}}},
            "t.a.b: not": {"type": "object", "properties": {"b": {"not": {}}}},
            "t.a.anyOf[1]: not": {"anyOf": [{"type": "null"}, {"not": {}}]},
            "t.a.additionalProperties: not": {
                "type": "object",
                "additionalProperties": {"not": {}},
            },
        }.items():
            tool = ToolSpec("t", parameters={"type": "object", "properties": {"a": schema}})
            with self.subTest(words=words), self.assertRaises(CallGrammarRefused) as caught:
                call_grammar(AnswerShape("calls", tools=(tool,)), CallTokens(1, 2, 3))
            self.assertTrue(str(caught.exception).startswith(words), str(caught.exception))

    def test_the_library_s_own_refusals_are_400_too(self) -> None:
        for schema in (
            {"type": "integer", "minimum": "x"},
            {"type": "string", "pattern": "(?=a)b"},
            {"type": "string", "pattern": "a("},
        ):
            tool = ToolSpec("t", parameters={"properties": {"a": schema}})
            with self.assertRaises(ApiRefusal) as caught:
                held(tool)
            self.assertEqual(caught.exception.status, 400)

    def test_a_model_without_call_tokens_cannot_be_made_to_call(self) -> None:
        made = Constraints(small_tokenizer(), STOPS)
        with self.assertRaises(ApiRefusal):
            made.begin(AnswerShape("calls", tools=(PLAIN,)), False)

    def test_patterns_hold_where_they_say(self) -> None:
        cases: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "^ab$": (("ab",), ("xab", "abx", "a")),
            "^ab": (("ab", "abx"), ("xab",)),
            "ab$": (("ab", "xab"), ("abx",)),
            "a|b": (("xax", "b"), ("x",)),
            "^(a|b)$": (("a", "b"), ("ab", "x")),
            "^[a|]$": (("a", "|"), ("b",)),
            r"^\d\$$": (("1$",), ("1", "١$")),
            r"x\$": (("x$", "ax$b"), ("x",)),
            "^a/b$": (("a/b",), ("ab",)),
            "": (("", "x"), ()),
        }
        for pattern, (good, bad) in cases.items():
            schema: dict[str, Any] = {"type": "string", "pattern": pattern}
            tool = ToolSpec("t", parameters={"properties": {"a": schema}, "required": ["a"]})
            for text in (*good, *bad):
                with self.subTest(pattern=pattern, text=text):
                    taken = self.takes(self.call(f"t{{a:'{text}'}}"), tool)
                    self.assertEqual(taken, text in good)


AREA = ToolSpec(
    "area",
    parameters={
        "type": "object",
        "properties": {"side": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["side"],
        "additionalProperties": False,
    },
    strict=True,
)
LOOSE = ToolSpec("area-2", parameters={"type": "object", "properties": {"not": {"not": {}}}})
GOOD, BAD = "area{side:3}", "area{side:'3'}"
SAID: tuple[tuple[AnswerShape, str], ...] = (
    (AnswerShape("json_schema", schema={"const": {"zq": 1}}), '{"zq": 1}'),
    (AnswerShape("json_object"), '{"a": ["b"]}'),
    (AnswerShape("regex", text="(call:)?[a-c]+"), "call:abc"),
    (AnswerShape("choice", choices=("yes", "no")), "no"),
    (AnswerShape("grammar", text='start: call\ncall: rule0+\nrule0: "b"'), "bbb"),
)


def may_call(
    *tools: ToolSpec, many: bool = True, said: AnswerShape | None = None, thinking: bool = False
) -> TokenConstraint:
    shape = AnswerShape("calls", tools=tools, many=many, forced=False, said=said)
    return MADE.begin(shape, thinking, place="said")


class FreeCallsTest(CallCase):
    def free(self, text: str, **options: Any) -> bool:
        return SPELL.takes(may_call(AREA, LOOSE, **options), text, 1)

    def test_it_may_say_what_it_likes_and_call_behind_it(self) -> None:
        call, loose = self.call(GOOD), self.call("area-2{}")
        for text in (
            "",
            "hello <b> {side:3} é😀\n",
            "area{side:'3'}",
            call,
            "So:\n" + call,
            call + loose + call,
            "so " + loose,
        ):
            self.assertTrue(self.free(text), text)

    def test_a_strict_tool_is_not_called_past_its_schema(self) -> None:
        for first in ("", "so ", self.call(GOOD), self.call("area-2{a:1}")):
            self.assertTrue(self.free(first + self.call(GOOD)), first)
            for body in (BAD, "area{}", "area{side:0}", "area{side:3,a:1}", " area{side:3}"):
                self.assertFalse(self.free(first + self.call(body)), first + body)

    def test_another_tool_is_free_but_one_of_the_request(self) -> None:
        for body in (
            "area-2{}",
            "area-2{side:'3',not:null}",
            "area-2{größe:1,with blank:[true,{a.b:{c:'}'}}],side:-1.5e3}",
            "area-2{a:1,a:2}",
        ):
            self.assertTrue(self.free(self.call(body)), body)
        for body in (
            "area-2{a}",
            "area-2{a:1",
            "area-2{a:b}",
            "area-2{a:1,}",
            "area-2{}}",
            "area-22{}",
        ):
            self.assertFalse(self.free(self.call(body)), body)
        self.assertFalse(self.free("<|tool_call>call:other{}<tool_call|>"))

    def test_no_other_control_token_comes_and_nothing_behind_the_calls(self) -> None:
        call = self.call(GOOD)
        for text in ("<|think|>", "a<|turn>b", "<|channel>thought\n<channel|>a", "a<tool_call|>"):
            self.assertFalse(self.free(text), text)
        for text in (call + "x", "<|tool_call>", "<|tool_call>" + call, "a<|tool_call>call:area{"):
            self.assertFalse(self.free(text), text)

    def test_one_call_where_no_more_are_wanted(self) -> None:
        call = self.call(GOOD)
        for said in (None, AnswerShape("json_object")):
            self.assertTrue(self.free(call, many=False, said=said))
            self.assertFalse(self.free(call * 2, many=False, said=said))
            self.assertTrue(self.free(call * 2, said=said))

    def test_what_is_said_has_its_shape_where_nothing_is_called(self) -> None:
        call = self.call(GOOD)
        for said, text in SAID:
            with self.subTest(said=said):
                self.assertTrue(self.free(text, said=said))
                self.assertTrue(self.free(call, said=said))
                self.assertTrue(self.free(self.call("area-2{a:[1]}"), said=said))
                for bad in ("", "hello", text + call, call + text, self.call(BAD), "x" + text):
                    self.assertFalse(self.free(bad, said=said), bad)

    def test_a_thought_may_come_first(self) -> None:
        thought = f"<|channel>thought\n{BAD}<channel|>"
        for text in ("hello", self.call(GOOD), "so " + self.call(GOOD)):
            self.assertTrue(self.free(thought + text, thinking=True))
            self.assertFalse(self.free(thought + text))
        self.assertFalse(self.free(thought + self.call(BAD), thinking=True))
        said = AnswerShape("json_object")
        for text, taken in (("{}", True), (self.call(GOOD), True), ("hello", False)):
            self.assertEqual(self.free(thought + text, thinking=True, said=said), taken)

    def test_random_answers_are_words_or_calls_that_can_be_read(self) -> None:
        """A call of the strict tool is of its schema; of the other one it is any that is one."""
        names: list[str] = []
        for seed in range(150):
            walked = walk(may_call(AREA, LOOSE), STOPS, seed, most=4000)
            if not walked.ended:
                continue
            _, opened, calls = SPELL.text(walked.tokens).partition("<|tool_call>")
            for call in calls_in(opened + calls):
                names.append(call.name)
                if call.name == "area":
                    jsonschema.validate(json.loads(call.arguments), dict(AREA.parameters))
                self.assertIsInstance(json.loads(call.arguments), dict)
        self.assertEqual(set(names), {"area", "area-2"})
        self.assertGreater(names.count("area"), 20)

    def test_random_answers_are_calls_or_json(self) -> None:
        said = 0
        for seed in range(60):
            walked = walk(may_call(AREA, said=SAID[0][0]), STOPS, seed)
            if not walked.ended:
                continue
            text = SPELL.text(walked.tokens)
            if text.startswith("<"):
                for call in calls_in(text):
                    jsonschema.validate(json.loads(call.arguments), dict(AREA.parameters))
            else:
                self.assertEqual(json.loads(text), {"zq": 1})
                said += 1
        self.assertGreater(said, 10)
        self.assertLess(said, 50)

    def test_what_cannot_be_kept_to_is_named_with_its_place(self) -> None:
        broken = ToolSpec("t", parameters={"properties": {"a": {"not": {}}}}, strict=True)
        pattern = ToolSpec("t", parameters={"properties": {"a": {"pattern": "a("}}}, strict=True)
        good = AnswerShape("json_object")
        for tool, said, place, words in (
            (broken, None, "said", "t.a: not"),
            (broken, good, "tools", "t.a: not"),
            (pattern, good, "tools", ""),
            (AREA, AnswerShape("json_schema", schema={"not": {}}), "said", "not"),
            (AREA, AnswerShape("regex", text="a("), "said", ""),
            (AREA, AnswerShape("grammar", text="start: @said"), "said", ""),
            (broken, AnswerShape("regex", text="a("), "said", ""),
        ):
            with self.subTest(tool=tool, said=said), self.assertRaises(ApiRefusal) as caught:
                may_call(tool, said=said)
            refusal = caught.exception
            self.assertEqual((refusal.status, refusal.param), (400, place))
            self.assertIn(words, refusal.message)
        loose = ToolSpec("t", parameters=broken.parameters)
        self.assertTrue(SPELL.takes(may_call(loose, AREA), self.call("t{a:1}"), 1))


if __name__ == "__main__":
    unittest.main()
