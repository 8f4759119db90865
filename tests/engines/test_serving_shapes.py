"""Shaped answers over real HTTP, by the JAX engine with random weights: it would never say these.

What a shape forbids cannot come, with thinking on or off, whole or streamed, likely or not.
"""

from __future__ import annotations

import json
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

from forge.engines.jax.engine import JaxEngine
from forge.parts.runtimes.random_tokenizer import RANDOM_CHAT_TEMPLATE
from tests.engines.jax_faults import FEW_LAYERS
from tests.engines.serving_folder import CALL_CONTROL, make_serving_folder, small_tokenizer
from tests.engines.serving_host import PATIENCE_S, ServingHost, stream_events, wait_until
from tests.engines.test_serving_constraints import ONLY
from tests.engines.tiny import make_checkpoint

SIZE = small_tokenizer(CALL_CONTROL).get_vocab_size()
SLOTS, CONTEXT, MOST = 2, 512, 300
FORMAT = {"type": "json_schema", "json_schema": {"name": "only", "schema": ONLY}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            },
            "required": ["city", "days"],
        },
    },
}
STRICT = {"type": "function", "function": {"name": "only", "parameters": ONLY, "strict": True}}
SMALL = {"type": "function", "function": {"name": "look"}}


def setUpModule() -> None:
    """One server for all tests."""
    global _kept, _host
    _kept = tempfile.TemporaryDirectory()
    folder = Path(_kept.name) / "model"
    make_checkpoint(
        folder, "e2b", **FEW_LAYERS["e2b"], vocab_size=SIZE, vocab_size_per_layer_input=SIZE
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    make_serving_folder(folder, CALL_CONTROL, template=RANDOM_CHAT_TEMPLATE, config=config)
    engine = JaxEngine(folder, slots=SLOTS, context=CONTEXT, dtype="f32", chunk=32, steps=4)
    _host = ServingHost(engine, folder)
    wait_until(lambda: _host.scheduler.view().phase == "serving", 5 * PATIENCE_S)


def tearDownModule() -> None:
    _host.stop()
    _kept.cleanup()


class ShapeCase(unittest.TestCase):
    def asked(self, streamed: bool = False, thinking: bool = False, **fields: Any) -> Any:
        """(finish_reason, message) of one answer."""
        fields = {
            "max_tokens": MOST,
            "chat_template_kwargs": {"enable_thinking": thinking},
        } | fields
        response = _host.chat(stream=streamed, **fields)
        self.assertEqual(response.status_code, 200, response.text)
        if not streamed:
            (choice,) = response.json()["choices"]
            return choice["finish_reason"], choice["message"]
        texts: dict[str, str] = {"content": "", "reasoning": ""}
        calls: list[Any] = []
        finish = None
        for event in stream_events(response):
            (choice,) = event["choices"]
            finish = choice["finish_reason"] or finish
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(calls):
                    calls.append(piece)
                else:
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        return finish, {**texts, "tool_calls": calls}


class OnlySchemaTest(ShapeCase):
    def test_no_answer_is_anything_but_json_of_the_schema(self) -> None:
        """Each of both kinds of thinking, both temperatures and both ways to tell; some end."""
        for thinking in (False, True):
            for streamed in (False, True):
                ended = thoughts = 0
                for number in range(8):
                    finish, message = self.asked(
                        streamed=streamed,
                        thinking=thinking,
                        response_format=FORMAT,
                        temperature=0 if number == 0 else 1.5,
                        seed=number,
                    )
                    with self.subTest(thinking=thinking, streamed=streamed, number=number):
                        self.assertIn(finish, ("stop", "length"))
                        if finish == "stop":
                            self.assertEqual(json.loads(message["content"]), {"zq": "7f3a"})
                        else:  # what there is of it is a beginning of nothing else
                            begun = "".join((message["content"] or "").split())
                            self.assertTrue('{"zq":"7f3a"}'.startswith(begun), begun)
                    ended += finish == "stop"
                    thoughts += bool(message.get("reasoning"))
                self.assertGreater(ended, 2)
                self.assertEqual(thoughts > 0, thinking)

    def test_without_the_schema_it_says_something_else(self) -> None:
        _, message = self.asked(temperature=0, max_tokens=20)
        self.assertNotIn("zq", message["content"])

    def test_alone_and_beside_free_answers_it_is_the_same(self) -> None:
        """And so are the free ones, which come by one token a step now."""
        asks: list[dict[str, Any]] = [
            {"response_format": FORMAT, "temperature": 1.5, "seed": 3},
            {"temperature": 1.0, "seed": 4, "max_tokens": 40},
            {"response_format": FORMAT, "temperature": 1.5, "seed": 5},
            {"temperature": 1.0, "seed": 6, "max_tokens": 40},
        ]
        alone = [self.asked(**ask) for ask in asks]
        with ThreadPoolExecutor(len(asks)) as pool:
            self.assertEqual(list(pool.map(lambda ask: self.asked(**ask), asks)), alone)

    def test_log_probabilities_are_told_of_the_model_s_own_choice(self) -> None:
        response = _host.chat(
            response_format=FORMAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
        )
        told = response.json()["choices"][0]["logprobs"]["content"]
        self.assertEqual(len(told), 8)
        self.assertTrue(all(token["logprob"] <= 0 for token in told))
        likelier = [t for t in told if t["top_logprobs"][0]["token"] != t["token"]]
        self.assertGreater(len(likelier), 4)


class OtherShapesTest(ShapeCase):
    def test_any_object_a_choice_a_pattern_a_grammar(self) -> None:
        for fields, good in (
            ({"response_format": {"type": "json_object"}}, lambda t: type(json.loads(t)) is dict),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda t: t in ("yes", "no")),
            ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]"}}, lambda t: len(t) == 5),
            ({"structured_outputs": {"grammar": 'start: "hello"+'}}, lambda t: "hello" in t),
        ):
            ended = 0
            for seed in range(4):
                finish, message = self.asked(temperature=1.2, seed=seed, **fields)
                if finish == "stop":
                    ended += 1
                    self.assertTrue(good(message["content"]), message)
            self.assertGreater(ended, 0, fields)

    def test_a_call_that_must_be_made_is_made_with_its_arguments(self) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            for thinking in (False, True):
                ended = 0
                for seed in range(4):
                    finish, message = self.asked(
                        thinking=thinking,
                        tools=[TOOL],
                        tool_choice=choice,
                        parallel_tool_calls=False,
                        max_tokens=250,
                        temperature=1.2,
                        seed=seed,
                    )
                    if finish == "length":  # a call that is cut off is told as the text it is
                        continue
                    self.assertFalse(message["content"])
                    for call in message.get("tool_calls") or []:
                        ended += 1
                        self.assertEqual(call["function"]["name"], "look")
                        arguments = json.loads(call["function"]["arguments"])
                        jsonschema.validate(arguments, TOOL["function"]["parameters"])
                        self.assertIn(finish, ("tool_calls", "stop"))
                self.assertGreater(ended, 0)


class FreeCallsTest(ShapeCase):
    def checked(self, message: Any, finish: str) -> int:
        """How many calls there are; those of the strict tool are the only one that it allows."""
        calls = message.get("tool_calls") or []
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            self.assertIn(name, ("only", "look"))
            if name == "only":
                self.assertEqual(arguments, {"zq": "7f3a"})
        if calls and finish != "length":
            self.assertEqual(finish, "tool_calls")
        return len(calls)

    def test_a_strict_tool_that_may_be_called(self) -> None:
        """No chance would find its only call. Some answers are words, and some call it."""
        for thinking in (False, True):
            for streamed in (False, True):
                said = called = 0
                for seed in range(16):
                    finish, message = self.asked(
                        streamed=streamed,
                        thinking=thinking,
                        tools=[STRICT],
                        temperature=1.5,
                        seed=seed,
                        max_tokens=120,
                    )
                    called += self.checked(message, finish)
                    said += bool(message["content"]) and finish == "stop"
                with self.subTest(thinking=thinking, streamed=streamed):
                    self.assertGreater(said, 0)
                    self.assertGreater(called, 0)

    def test_calls_or_json_of_a_schema(self) -> None:
        for thinking in (False, True):
            for streamed in (False, True):
                said = called = 0
                for seed in range(16):
                    finish, message = self.asked(
                        streamed=streamed,
                        thinking=thinking,
                        tools=[STRICT, SMALL],
                        response_format=FORMAT,
                        parallel_tool_calls=False,
                        temperature=5,
                        seed=seed,
                        max_tokens=150,
                    )
                    calls = self.checked(message, finish)
                    called += calls
                    if finish == "stop":
                        self.assertEqual(json.loads(message["content"]), {"zq": "7f3a"})
                        said += 1
                    elif calls:
                        self.assertFalse(message["content"])
                with self.subTest(thinking=thinking, streamed=streamed):
                    self.assertGreater(said, 0)
                    self.assertGreater(called, 0)

    def test_tools_that_are_not_strict_hold_nothing_up(self) -> None:
        before = _host.metric("engine_requests_constrained_total")
        self.asked(tools=[TOOL], max_tokens=5)
        self.asked(tools=[TOOL], max_tokens=5, tool_choice="auto", streamed=True)
        self.assertEqual(_host.metric("engine_requests_constrained_total"), before)


class RefusedTest(ShapeCase):
    def test_what_cannot_be_kept_to_is_a_400_with_its_place_and_the_server_goes_on(self) -> None:
        schema = {"type": "array", "uniqueItems": True}
        tool: Any = {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}
        strict = {"type": "function", "function": tool["function"] | {"strict": True}}
        for fields, param, words in (
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": schema},
                    }
                },
                "response_format.json_schema.schema",
                "uniqueItems",
            ),
            ({"structured_outputs": {"json": schema}}, "structured_outputs.json", "uniqueItems"),
            ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed"),
            ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "1"),
            ({"tools": [tool], "tool_choice": "required"}, "tool_choice", "not cannot be kept"),
            ({"tools": [strict]}, "tools", "not cannot be kept"),
            ({"tools": [strict], "response_format": FORMAT}, "tools", "not cannot be kept"),
        ):
            response = _host.chat(max_tokens=5, **fields)
            self.assertEqual(response.status_code, 400, response.text)
            error = response.json()["error"]
            self.assertEqual(error["param"], param)
            self.assertIn(words, error["message"])
        self.assertEqual(self.asked(max_tokens=2)[0], "length")

    def test_shaped_answers_are_counted_and_compile_nothing(self) -> None:
        before = _host.metric("engine_requests_constrained_total")
        spent = _host.metric("engine_mask_seconds_total")
        self.asked(response_format=FORMAT, max_tokens=20)
        self.asked(max_tokens=3)
        self.assertEqual(_host.metric("engine_requests_constrained_total"), before + 1)
        self.assertGreater(_host.metric("engine_mask_seconds_total"), spent)
        self.assertEqual(_host.scheduler.view().counters["compiles_after_start"], 0)


if __name__ == "__main__":
    unittest.main()
