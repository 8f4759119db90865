"""Gemma 4's calls: every form that its template writes, and all that is no call."""

from __future__ import annotations

import json
import random
import unittest
from typing import Any

from forge.engines.serving.call_syntax import CALL_QUOTE, CallFault, read_call

Q = CALL_QUOTE


def quoted(text: str) -> str:
    return f"{Q}{text}{Q}"


def as_the_template_writes(value: Any) -> str:
    """A value in a call, by google-gemma-4-31B-it.jinja: keys bare, numbers and None as Python
    prints them."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        fields = sorted(value.items(), key=lambda field: field[0].lower())
        return "{" + ",".join(f"{k}:{as_the_template_writes(v)}" for k, v in fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_the_template_writes, value)) + "]"
    return str(value)


def drawn_text(chance: random.Random) -> str:
    letters = "ab Z09{}[],:\"'\\<|>\n\t\u2028\x00é字😀"
    return "".join(chance.choice(letters) for _ in range(chance.randrange(12)))


def drawn_value(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return chance.choice((True, False, None))
    if kind == 1:
        return chance.choice((0, -1, 7, 10**30, -(2**63), chance.randrange(-999, 999)))
    if kind == 2:
        return chance.choice((0.5, -0.0, 1e-05, 1e22, 3.0, chance.uniform(-1e6, 1e6)))
    if kind < 6:
        return drawn_text(chance)
    if kind == 6:
        return [drawn_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return drawn_fields(chance, depth + 1)


def drawn_fields(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    names = ("a", "b_2", "City", "x-y", "with blank", "é", "0", "$ref", "true", "a.b")
    chosen = chance.sample(names, chance.randrange(5))
    return {name: drawn_value(chance, depth) for name in chosen}


class Calls(unittest.TestCase):
    def test_every_kind_of_argument(self) -> None:
        for written, expected in (
            ("", {}),
            (f"a:{quoted('b')}", {"a": "b"}),
            (f"a:{quoted('')}", {"a": ""}),
            (f"a:{quoted('x,y:z{}[]')}", {"a": "x,y:z{}[]"}),
            (f"a:{quoted(' b ')}", {"a": " b "}),
            ("a:1,b:-2,c:0", {"a": 1, "b": -2, "c": 0}),
            ("a:0.5,b:-1e3,c:1e-05,d:2E+2", {"a": 0.5, "b": -1e3, "c": 1e-05, "d": 200.0}),
            ("a:true,b:false,c:null,d:None", {"a": True, "b": False, "c": None, "d": None}),
            ("a:{}", {"a": {}}),
            ("a:[]", {"a": []}),
            (
                f"a:{{b:{{c:[1,[{quoted('x')}],{{d:2}}]}}}}",
                {"a": {"b": {"c": [1, ["x"], {"d": 2}]}}},
            ),
            (f"{quoted('a:b')}:1", {"a:b": 1}),
            (f"a:{{{quoted('k')}:{quoted('v')}}}", {"a": {"k": "v"}}),
            ("with blank:1", {"with blank": 1}),
            ("a:celsius", {"a": "celsius"}),
            ("a:new york", {"a": "new york"}),
            ("a:12:30", {"a": "12:30"}),
            ("a:http://x", {"a": "http://x"}),
            (
                "a:01,b:1.,c:+1,d:NaN,e:0x1",
                {"a": "01", "b": "1.", "c": "+1", "d": "NaN", "e": "0x1"},
            ),
            (f" a : 1 , b : [ 1 , 2 ] , c : {quoted('x')} ", {"a": 1, "b": [1, 2], "c": "x"}),
            ("\n  a:1,\n  b:2\n", {"a": 1, "b": 2}),
        ):
            with self.subTest(written=written):
                call = read_call(f"call:f{{{written}}}")
                self.assertEqual(call.name, "f")
                self.assertEqual(json.loads(call.arguments), expected)

    def test_of_a_key_that_comes_twice_the_last_value_counts(self) -> None:
        """As json.loads has it, and jsonschema sees it."""
        for written, expected in (
            ("a:1,a:2", '{"a":2}'),
            (f"a:1,b:2,{quoted('a')}:[3]", '{"a":[3],"b":2}'),
            ("a:{b:1,b:{c:1,c:2}},a :{b:3}", '{"a":{"b":3}}'),
        ):
            self.assertEqual(read_call(f"call:f{{{written}}}").arguments, expected)

    def test_names(self) -> None:
        for name in ("f", "get_weather", "a-b", "a.b", "F9", "x" * 64):
            self.assertEqual(read_call(f"call:{name}{{}}").name, name)
        self.assertEqual(read_call(" call:f {} \n").name, "f")

    def test_a_number_keeps_its_digits(self) -> None:
        digits = "1.00,12345678901234567890123,1e400,-0"
        call = read_call(f"call:f{{a:[{digits}]}}")
        self.assertEqual(call.arguments, f'{{"a":[{digits}]}}')

    def test_what_is_no_call(self) -> None:
        for source in (
            "",
            "f{}",
            "call",
            "call:",
            "call:f",
            "call:f{",
            "call:{}",
            "call:f g{}",
            "call:f(a:1)",
            "Call:f{}",
            "x call:f{}",
            "call:f{}x",
            "call:f{}}",
            "call:f{}call:g{}",
            "call:f{a}",
            "call:f{a:}",
            "call:f{:1}",
            "call:f{a:1,}",
            "call:f{,a:1}",
            "call:f{a:1 b:2}b",
            "call:f{a:1",
            "call:f{a:[1}",
            "call:f{a:[1,]}",
            "call:f{a:{b:1}",
            f"call:f{{a:{Q}x}}",
            f"call:f{{a:{quoted('x')}y}}",
            f"call:f{{a:x{quoted('y')}}}",
            f"call:f{{{Q}a:1}}",
            f"call:{quoted('f')}{{}}",
            '{"name": "f", "arguments": {}}',
            'call:f{"a":[1}',
            "call:f{a:" + "[" * 101 + "]" * 101 + "}",
            "call:f{a:" + "[" * 100_000,
        ):
            with self.subTest(source=source[:40]), self.assertRaises(CallFault) as caught:
                read_call(source)
            self.assertTrue(str(caught.exception))

    def test_as_deep_as_is_allowed(self) -> None:
        call = read_call("call:f{a:" + "[" * 99 + "]" * 99 + "}")
        self.assertEqual(call.arguments.count("["), 99)

    def test_letters_that_look_like_a_quote_are_letters(self) -> None:
        spelt = quoted('<|"|>')
        call = read_call(f'call:f{{a:{spelt},b:"x"}}')
        self.assertEqual(json.loads(call.arguments), {"a": '<|"|>', "b": '"x"'})

    def test_what_the_template_writes_is_read_back(self) -> None:
        chance = random.Random(9)
        for _ in range(2000):
            arguments = drawn_fields(chance)
            call = read_call(f"call:f{as_the_template_writes(arguments)}")
            self.assertEqual(json.loads(call.arguments), arguments)
            self.assertNotIn("\n", call.arguments)

    def test_a_call_with_one_letter_missing_is_never_more_than_it_was(self) -> None:
        """Whatever is cut off: no call, or a whole one that is valid JSON."""
        chance = random.Random(10)
        for _ in range(300):
            source = f"call:f{as_the_template_writes(drawn_fields(chance))}"
            for end in range(len(source)):
                with self.assertRaises(CallFault):
                    read_call(source[:end])
            place = chance.randrange(len(source))
            try:
                told = read_call(source[:place] + source[place + 1 :])
            except CallFault:
                continue
            self.assertIsInstance(json.loads(told.arguments), dict)


if __name__ == "__main__":
    unittest.main()
