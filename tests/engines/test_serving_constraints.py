"""Constraints: whatever a model says under them is of the shape, and what cannot be is refused."""

from __future__ import annotations

import json
import re
import threading
import unittest
from collections.abc import Mapping
from typing import Any

import jsonschema

from forge.engines.serving.answer_shape import AnswerShape, ToolSpec
from forge.engines.serving.constraints import ConstraintBroken, Constraints
from forge.engines.serving.refusal import ApiRefusal
from forge.engines.serving.slot_engine import TokenConstraint
from tests.engines.counting_engine import allowed_tokens
from tests.engines.serving_folder import CALL_CONTROL, small_tokenizer
from tests.engines.shape_walk import Speller, walk

TOKENIZER = small_tokenizer(CALL_CONTROL)
SPELL = Speller(TOKENIZER)
EOS, TURN_END = (TOKENIZER.token_to_id(word) for word in ("<eos>", "<turn|>"))
STOPS = frozenset((EOS, TURN_END))
MADE = Constraints(TOKENIZER, STOPS)
# No free text satisfies it.
ONLY: dict[str, Any] = {
    "type": "object",
    "properties": {"zq": {"const": "7f3a"}},
    "required": ["zq"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "only": ONLY,
    "numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "exclusiveMaximum": 40, "multipleOf": 2},
        "minItems": 1,
        "maxItems": 5,
    },
    "texts": {
        "type": "object",
        "properties": {
            "short": {"type": "string", "minLength": 2, "maxLength": 4},
            "code": {"type": "string", "pattern": "^[A-C]{2}-\\d+$"},
            "inside": {"type": "string", "pattern": "xx", "maxLength": 9},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["short", "code", "inside"],
        "additionalProperties": False,
    },
    "choices": {"enum": ["a", 1, None, {"b": [True]}, 'é\n"\\']},
    "either": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            {"type": "number", "minimum": 0, "maximum": 1},
        ]
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 3},
                    "of": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "open": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "required": ["a"],
    },
    "notes": {"title": "T", "description": "D", "examples": [1], "type": "boolean"},
}


def held(shape: AnswerShape, thinking: bool = False, in_thought: bool = False) -> TokenConstraint:
    return MADE.begin(shape, thinking, in_thought=in_thought)


def of_schema(schema: Mapping[str, Any], thinking: bool = False) -> TokenConstraint:
    return held(AnswerShape("json_schema", schema=schema), thinking)


class ConstraintCase(unittest.TestCase):
    def refused(self, shape: AnswerShape, place: str = "response_format.x") -> str:
        with self.assertRaises(ApiRefusal) as caught:
            MADE.begin(shape, False, place=place)
        self.assertEqual((caught.exception.status, caught.exception.param), (400, place))
        self.assertLess(len(caught.exception.message), 600)
        return caught.exception.message

    def is_json_of(self, text: str, schema: Mapping[str, Any]) -> None:
        jsonschema.validate(json.loads(text), schema)


class JsonTest(ConstraintCase):
    def test_whatever_is_said_is_json_of_the_schema(self) -> None:
        for name, schema in SCHEMAS.items():
            ended = 0
            for seed in range(25):
                walked = walk(of_schema(schema), STOPS, seed)
                ended += walked.ended
                if walked.ended:
                    with self.subTest(name=name, seed=seed):
                        self.is_json_of(SPELL.text(walked.tokens), schema)
            self.assertGreater(ended, 10, name)

    def test_any_object(self) -> None:
        ended = 0
        for seed in range(30):
            walked = walk(held(AnswerShape("json_object")), STOPS, seed)
            ended += walked.ended
            if walked.ended:
                self.assertIsInstance(json.loads(SPELL.text(walked.tokens)), dict)
        self.assertGreater(ended, 10)

    def test_usual_ways_to_write_it_are_taken(self) -> None:
        value = {"short": "héy", "code": "AB-7", "inside": "axx\n", "day": "2026-11-30"}
        for text in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            json.dumps(value, ensure_ascii=False, indent=2),
        ):
            self.assertTrue(SPELL.takes(of_schema(SCHEMAS["texts"]), text, EOS), text)

    def test_what_the_schema_does_not_allow_is_not(self) -> None:
        for text in (
            '{"zq":"7f3b"}',
            '{"zq":"7f3a","a":1}',
            "{}",
            '"7f3a"',
            ' {"zq":"7f3a"}',
            'Sure: {"zq":"7f3a"}',
            '{"zq":"7f3a"} ',
            '{"\\u007aq":"7f3a"}',
        ):
            self.assertFalse(SPELL.takes(of_schema(ONLY), text, EOS), text)

    def test_a_key_cannot_be_spelt_past_its_schema(self) -> None:
        """ "a" written as an escape would be another key for the grammar and the same for JSON."""
        text = '{"a":1,"\\u0061":true}'
        self.assertFalse(SPELL.takes(of_schema(SCHEMAS["open"]), text, EOS))
        self.assertTrue(SPELL.takes(of_schema(SCHEMAS["open"]), '{"a":1,"b":true}', EOS))

    def test_blanks_are_bounded(self) -> None:
        for count, taken in ((0, True), (16, True), (17, False), (400, False)):
            text = "{" + " " * count + '"zq":"7f3a"}'
            self.assertEqual(SPELL.takes(of_schema(ONLY), text, EOS), taken, count)

    def test_keywords_that_are_not_enforced_are_refused_by_name(self) -> None:
        for keyword, schema in {
            "not": {"not": {"type": "string"}},
            "uniqueItems": {"type": "array", "uniqueItems": True},
            "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
            "contains": {"type": "array", "contains": {"type": "string"}},
            "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
            "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
            "minProperties": {"type": "object", "minProperties": 2},
            "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
            "format": {"type": "string", "format": "uint32"},
            "look-ahead": {"type": "string", "pattern": "(?=a)b"},
            "http://x/y": {"$ref": "http://x/y"},
            "strange": {"type": "strange"},
        }.items():
            for whole in (schema, {"type": "array", "items": schema, "minItems": 1}):
                with self.subTest(keyword=keyword):
                    shape = AnswerShape("json_schema", schema=whole)
                    self.assertIn(keyword.lower(), self.refused(shape).lower())

    def test_a_schema_cannot_switch_the_enforcement_off(self) -> None:
        for option in ({"lenient": True}, {"coerce_one_of": True}):
            shape = AnswerShape("json_schema", schema={"x-guidance": option, "not": {}})
            self.assertIn("not", self.refused(shape))
        loose = {"type": "object", "x-guidance": {"key_separator": "=", "item_separator": ";"}}
        self.assertFalse(SPELL.takes(of_schema(loose), '{"a"=1}', EOS))


class OtherShapesTest(ConstraintCase):
    def test_a_pattern(self) -> None:
        shape = AnswerShape("regex", text="(ab|é){2,3}-[0-9]{1,4}")
        for seed in range(30):
            walked = walk(held(shape), STOPS, seed)
            self.assertTrue(walked.ended)
            self.assertRegex(SPELL.text(walked.tokens), f"\\A{shape.text}\\Z")

    def test_choices(self) -> None:
        choices = ("yes", "no", "yes, but", 'a "b" \\ \n', "é😀")
        shape = AnswerShape("choice", choices=choices)
        said = {SPELL.text(walk(held(shape), STOPS, seed).tokens) for seed in range(80)}
        self.assertEqual(said, set(choices))
        for choice in choices:
            self.assertTrue(SPELL.takes(held(shape), choice, TURN_END), choice)

    def test_a_grammar(self) -> None:
        shape = AnswerShape("grammar", text='start: sum\nsum: N ("+" N)*\nN: /[0-9]{1,3}/')
        ended = [walk(held(shape), STOPS, seed) for seed in range(30)]
        for walked in ended:
            self.assertTrue(walked.ended)
            self.assertTrue(re.fullmatch(r"\d{1,3}(\+\d{1,3})*", SPELL.text(walked.tokens)))

    def test_what_is_none_is_refused(self) -> None:
        for shape in (
            AnswerShape("regex", text="a("),
            AnswerShape("regex", text="(?=a)b"),
            AnswerShape("regex", text=r"[^\s\S]"),
            AnswerShape("grammar", text="start: missing"),
            AnswerShape("grammar", text='x: "a"'),
            AnswerShape("grammar", text='start: start "a"'),
            AnswerShape("grammar", text="start: <|nope|>"),
            AnswerShape("grammar", text="start: <[99999]>"),
        ):
            with self.subTest(shape=shape):
                self.assertTrue(self.refused(shape))

    def test_what_would_take_too_much_is_refused(self) -> None:
        deep: dict[str, Any] = {}
        for _ in range(5000):
            deep = {"type": "array", "items": deep}
        wide = {"enum": [f"{number:032x}" for number in range(9000)]}
        for shape in (
            AnswerShape("json_schema", schema=deep),
            AnswerShape("json_schema", schema=wide),
            AnswerShape("calls", tools=(ToolSpec("x", parameters=deep),)),
            AnswerShape("regex", text="a" * 300_000),
            AnswerShape("choice", choices=("b" * 300_000,)),
        ):
            self.refused(shape)

    def test_a_pattern_that_grows_too_large_is_refused_when_it_is_asked_for(self) -> None:
        for text in ("((a{1000}){1000}){1000}", "(a{1000}){1000}", "a{1000000}"):
            self.assertIn("too many", self.refused(AnswerShape("regex", text=text)))


class EndTest(ConstraintCase):
    def test_behind_a_whole_answer_only_its_end_may_come_however_often(self) -> None:
        constraint = of_schema(ONLY)
        for token in SPELL.tokens('{"zq":"7f3a"}'):
            constraint.take(token)
        for _ in range(3):
            self.assertEqual(set(allowed_tokens(constraint.mask())), STOPS)
            constraint.take(EOS)

    def test_no_end_comes_before(self) -> None:
        constraint = of_schema(ONLY)
        for token in SPELL.tokens('{"zq":"7f3a"}'):
            self.assertFalse(set(allowed_tokens(constraint.mask())) & STOPS)
            constraint.take(token)

    def test_a_token_that_was_not_allowed_is_an_error_and_stays_one(self) -> None:
        constraint = of_schema(ONLY)
        for token in SPELL.tokens("xx"):
            with self.assertRaises(ConstraintBroken):
                constraint.take(token)
        with self.assertRaises(ConstraintBroken):
            constraint.mask()

    def test_a_mask_is_the_same_until_a_token_is_taken(self) -> None:
        constraint = held(AnswerShape("json_object"), thinking=True)
        self.assertEqual(constraint.mask(), constraint.mask())
        self.assertEqual(len(constraint.mask()) % 4, 0)

    def test_a_model_without_an_end_cannot_be_held(self) -> None:
        with self.assertRaises(ApiRefusal):
            Constraints(TOKENIZER, frozenset((10_000,))).begin(AnswerShape("json_object"), False)


class ThoughtTest(ConstraintCase):
    def test_with_thinking_on_a_thought_may_come_and_the_shape_holds_behind_it(self) -> None:
        thought = "<|channel>thought\n{not: json} <b> 'é'<channel|>"
        for first in ("", thought, "<|channel>thought\n<channel|>"):
            self.assertTrue(
                SPELL.takes(of_schema(ONLY, thinking=True), first + '{"zq":"7f3a"}', EOS), first
            )
            for text in ("", "hello", '{"zq":"b"}', thought + '{"zq":"7f3a"}'):
                if first or text != thought + '{"zq":"7f3a"}':
                    constraint = of_schema(ONLY, thinking=True)
                    self.assertFalse(SPELL.takes(constraint, first + text, EOS), first + text)

    def test_with_thinking_off_none_may(self) -> None:
        self.assertFalse(
            SPELL.takes(of_schema(ONLY), '<|channel>thought\n<channel|>{"zq":"7f3a"}', EOS)
        )

    def test_a_thought_has_text_alone_and_no_end_but_its_own(self) -> None:
        constraint = of_schema(ONLY, thinking=True)
        for token in SPELL.tokens("<|channel>thought\nhello"):
            constraint.take(token)
        controls = {
            number
            for number, token in TOKENIZER.get_added_tokens_decoder().items()
            if token.special
        }
        closed = TOKENIZER.token_to_id("<channel|>")
        self.assertEqual(set(allowed_tokens(constraint.mask())) & controls, {closed})
        for token in (EOS, TURN_END, TOKENIZER.token_to_id("<|channel>")):
            with self.assertRaises(ConstraintBroken):
                of_thought = of_schema(ONLY, thinking=True)
                for before in SPELL.tokens("<|channel>thought\nhello"):
                    of_thought.take(before)
                of_thought.take(token)

    def test_random_answers_with_thinking_on_are_of_the_schema_behind_the_thought(self) -> None:
        thoughts = 0
        for seed in range(60):
            walked = walk(of_schema(ONLY, thinking=True), STOPS, seed)
            if walked.ended:
                text = SPELL.text(walked.tokens)
                thoughts += "<channel|>" in text
                self.is_json_of(text.rpartition("<channel|>")[2], ONLY)
        self.assertGreater(thoughts, 5)

    def test_a_thought_that_the_prompt_has_opened_is_free_until_it_closes(self) -> None:
        def inside() -> TokenConstraint:
            return held(AnswerShape("json_schema", schema=ONLY), in_thought=True)

        self.assertTrue(SPELL.takes(inside(), 'any thing<channel|>{"zq":"7f3a"}', EOS))
        self.assertFalse(SPELL.takes(inside(), '{"zq":"7f3a"}', EOS))
        self.assertFalse(SPELL.takes(inside(), "any thing<channel|>hello", EOS))

    def test_a_model_without_thoughts_begins_with_the_answer(self) -> None:
        plain = Constraints(small_tokenizer(), frozenset((1,)))
        constraint = plain.begin(AnswerShape("json_schema", schema=ONLY), True)
        self.assertEqual(SPELL.text(allowed_tokens(constraint.mask())), "{")

    def test_one_thought_is_enough(self) -> None:
        twice = "<|channel>thought\n<channel|>" * 2 + '{"zq":"7f3a"}'
        self.assertFalse(SPELL.takes(of_schema(ONLY, thinking=True), twice, EOS))


class SharedTest(ConstraintCase):
    def test_answers_of_one_schema_do_not_know_each_other(self) -> None:
        """The grammar is compiled once; each answer stands where it stands."""
        one, other = of_schema(ONLY), of_schema(ONLY)
        for token in SPELL.tokens('{"zq"'):
            one.take(token)
        self.assertTrue(SPELL.takes(other, '{"zq":"7f3a"}', EOS))
        self.assertTrue(SPELL.takes(one, ':"7f3a"}', EOS))
        self.assertTrue(SPELL.takes(of_schema(ONLY), '{"zq":"7f3a"}', EOS))

    def test_many_at_once_from_many_threads(self) -> None:
        """More grammars than are kept, by eight threads: each gets its own."""
        made = Constraints(TOKENIZER, STOPS)
        wrong: list[str] = []

        def work(first: int) -> None:
            for number in range(first, first + 40):
                shape = AnswerShape("choice", choices=(f"n{number}",))
                walked = walk(made.begin(shape, False), STOPS, number)
                if SPELL.text(walked.tokens) != f"n{number}":
                    wrong.append(f"n{number}")

        threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
