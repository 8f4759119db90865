"""Bodies of requests: each field is honoured, or refused with its name."""

from __future__ import annotations

import json
import unittest
from typing import Any

from forge.engines.serving.refusal import ApiRefusal
from forge.engines.serving.request_messages import ChatMessage
from forge.engines.serving.requests import (
    ChatOrder,
    CompletionOrder,
    SamplingDefaults,
    read_chat_order,
    read_completion_order,
)
from forge.engines.serving.slot_engine import Sampling

USUAL = SamplingDefaults()
MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatOrder:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return read_chat_order(json.dumps(body).encode(), USUAL)


def completion(**fields: Any) -> CompletionOrder:
    body = {"model": "m", "prompt": "hello", **fields}
    return read_completion_order(json.dumps(body).encode(), USUAL)


BOTH = (chat, completion)


class RequestCase(unittest.TestCase):
    def refused(self, param: str, make: Any, **fields: Any) -> ApiRefusal:
        """`fields` are refused with 400, and the error object names `param`."""
        with self.subTest(param=param, fields=fields):
            with self.assertRaises(ApiRefusal) as caught:
                make(**fields)
            refusal = caught.exception
            error = refusal.body()["error"]
            self.assertEqual(refusal.status, 400)
            self.assertEqual(error["param"], param)
            self.assertIn(param, error["message"])
            self.assertEqual(error["type"], "invalid_request_error")
            self.assertTrue(error["code"])
            return refusal
        raise AssertionError


class Honoured(RequestCase):
    def test_the_least_that_can_be_asked(self) -> None:
        order = chat()
        self.assertEqual(order.messages, (ChatMessage("user", "hello"),))
        self.assertEqual((order.tools, order.calls, order.generation.shape), ((), "none", None))
        self.assertTrue(order.tells_thought)
        self.assertFalse(order.generation.thinking)
        self.assertEqual(order.generation.sampling, Sampling())
        self.assertIsNone(order.generation.max_tokens)
        self.assertFalse(order.generation.stream or order.generation.seeded)
        self.assertEqual(completion().prompt, "hello")
        self.assertEqual(completion().generation.max_tokens, 16)

    def test_every_setting_of_sampling(self) -> None:
        fields: dict[str, Any] = {
            "temperature": 0.5,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": -0.5,
            "frequency_penalty": 2,
            "seed": -5,
        }
        for make in BOTH:
            sampling = make(**fields).generation.sampling
            self.assertEqual(sampling, Sampling(**fields))
            self.assertTrue(make(**fields).generation.seeded)

    def test_a_seed_of_0_is_a_seed(self) -> None:
        self.assertTrue(chat(seed=0).generation.seeded)

    def test_what_is_off(self) -> None:
        self.assertEqual(chat(top_k=-1).generation.sampling.top_k, 0)
        self.assertEqual(chat(top_k=0).generation.sampling.top_k, 0)
        self.assertEqual(chat(temperature=1e-9).generation.sampling.temperature, 0.0)
        self.assertEqual(chat(temperature=0).generation.sampling.temperature, 0.0)

    def test_defaults_are_taken_where_nothing_is_said_and_only_there(self) -> None:
        makers = SamplingDefaults(temperature=0.7, top_k=64, top_p=0.95, min_p=0.1)
        body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
        sampling = read_chat_order(body, makers).generation.sampling
        self.assertEqual(sampling, Sampling(temperature=0.7, top_k=64, top_p=0.95, min_p=0.1))
        fields = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
        body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
        sampling = read_completion_order(body, makers).generation.sampling
        self.assertEqual(sampling, Sampling(temperature=0.0))

    def test_limits(self) -> None:
        self.assertEqual(chat(max_tokens=7).generation.max_tokens, 7)
        self.assertEqual(chat(max_completion_tokens=7).generation.max_tokens, 7)
        both = chat(max_completion_tokens=7, max_tokens=7)
        self.assertEqual(both.generation.max_tokens, 7)
        self.assertEqual(completion(max_tokens=7).generation.max_tokens, 7)

    def test_a_salt_of_the_prefix_cache(self) -> None:
        for make in BOTH:
            self.assertEqual(make(cache_salt="s").generation.cache_salt, "s")
            self.assertEqual(make(cache_salt=None).generation.cache_salt, "")
            for wrong in ("", 5, "s" * 1001):
                self.refused("cache_salt", make, cache_salt=wrong)

    def test_stops(self) -> None:
        for make in BOTH:
            self.assertEqual(make(stop="x").generation.stops, ("x",))
            self.assertEqual(make(stop=["x", "yy", "x"]).generation.stops, ("x", "yy"))
            self.assertEqual(make(stop=[]).generation.stops, ())
            self.assertEqual(make(stop_token_ids=[5, 6]).generation.stop_ids, {5, 6})
            self.assertTrue(make(ignore_eos=True).generation.ignore_eos)

    def test_streams(self) -> None:
        for make in BOTH:
            self.assertTrue(make(stream=True).generation.stream)
            order = make(stream=True, stream_options={"include_usage": True})
            self.assertTrue(order.generation.include_usage)
            order = make(stream=True, stream_options={})
            self.assertFalse(order.generation.include_usage)

    def test_log_probabilities_in_both_forms(self) -> None:
        self.assertEqual(chat().generation.sampling.logprobs, -1)
        self.assertEqual(chat(logprobs=False).generation.sampling.logprobs, -1)
        self.assertEqual(chat(logprobs=True).generation.sampling.logprobs, 0)
        self.assertEqual(chat(logprobs=True, top_logprobs=20).generation.sampling.logprobs, 20)
        self.assertEqual(completion().generation.sampling.logprobs, -1)
        self.assertEqual(completion(logprobs=0).generation.sampling.logprobs, 0)
        self.assertEqual(completion(logprobs=20).generation.sampling.logprobs, 20)
        for make in BOTH:
            self.assertTrue(make(return_tokens_as_token_ids=True).generation.tokens_as_ids)

    def test_messages_of_text_and_of_parts(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        order = chat(
            messages=[
                {"role": "system", "content": "s"},
                {"role": "developer", "content": ""},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []},
            ]
        )
        told = (("system", "s"), ("developer", ""), ("user", "a\nb"), ("assistant", "x"))
        self.assertEqual(order.messages, tuple(ChatMessage(role, text) for role, text in told))

    def test_flags_of_the_template(self) -> None:
        flags = {"enable_thinking": True, "a": "x", "b": 1, "c": 0.5, "d": False, "e": None}
        order = chat(chat_template_kwargs=flags)
        self.assertEqual(order.template_flags, flags)
        self.assertEqual(
            [type(v) for v in order.template_flags.values()], [*map(type, flags.values())]
        )
        self.assertTrue(order.generation.thinking)
        self.assertFalse(chat(chat_template_kwargs={"enable_thinking": False}).generation.thinking)

    def test_effort_is_the_switch_of_thinking(self) -> None:
        for effort in ("minimal", "low", "medium", "high", "xhigh"):
            order = chat(reasoning_effort=effort)
            self.assertEqual(order.template_flags, {"enable_thinking": True})
            self.assertTrue(order.generation.thinking)
        self.assertEqual(chat(reasoning_effort="none").template_flags, {"enable_thinking": False})
        both = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": True})
        self.assertTrue(both.generation.thinking)
        for effort, switch in (("none", True), ("low", False)):
            flags = {"enable_thinking": switch}
            self.refused(
                "reasoning_effort", chat, reasoning_effort=effort, chat_template_kwargs=flags
            )
        self.refused("reasoning_effort", chat, reasoning_effort="most")

    def test_a_thought_can_be_left_out(self) -> None:
        self.assertFalse(chat(include_reasoning=False).tells_thought)
        self.refused("include_reasoning", chat, include_reasoning=False, logprobs=True)
        self.refused("include_reasoning", chat, include_reasoning="no")

    def test_prompts(self) -> None:
        for given, expected in (
            ("text", "text"),
            ("", ""),
            ([1, 2], (1, 2)),
            (["text"], "text"),
            ([[1, 2]], (1, 2)),
        ):
            self.assertEqual(completion(prompt=given).prompt, expected)

    def test_what_asks_for_nothing_is_taken(self) -> None:
        nothing: dict[str, Any] = {
            "n": 1,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "logit_bias": {},
            "echo": False,
            "best_of": 1,
            "suffix": "",
            "min_tokens": 0,
            "user": "somebody",
            "use_beam_search": False,
            "skip_special_tokens": True,
            "parallel_tool_calls": True,
            "length_penalty": 1.0,
        }
        for make in BOTH:
            self.assertEqual(make(**nothing).generation, make().generation)

    def test_null_is_what_is_not_given(self) -> None:
        names = ["temperature", "top_p", "stop", "seed", "tools", "logit_bias", "stream_options"]
        names += ["n", "user", "max_tokens", "response_format", "top_k", "anything"]
        for make in BOTH:
            self.assertEqual(make(**dict.fromkeys(names)).generation, make().generation)


class Refused(RequestCase):
    def test_fields_that_are_not_carried_out(self) -> None:
        for field, value in (
            ("n", 2),
            ("n", True),
            ("functions", [{}]),
            ("function_call", "auto"),
            ("logit_bias", {"5": 1}),
            ("guided_json", {}),
            ("guided_regex", "a"),
            ("guided_choice", ["a"]),
            ("guided_grammar", "a"),
            ("min_tokens", 1),
            ("best_of", 2),
            ("echo", True),
            ("suffix", "x"),
            ("use_beam_search", True),
            ("prompt_logprobs", 0),
            ("bad_words", ["x"]),
            ("allowed_token_ids", [1]),
            ("modalities", ["audio"]),
            ("audio", {}),
            ("prediction", {}),
            ("thinking_token_budget", 5),
            ("store", True),
            ("truncate_prompt_tokens", 5),
            ("include_stop_str_in_output", True),
            ("skip_special_tokens", False),
            ("priority", 1),
            ("chat_template", "x"),
            ("add_generation_prompt", False),
            ("continue_final_message", True),
            ("temprature", 0.5),
            ("", 1),
        ):
            for make in BOTH:
                if field:
                    refusal = self.refused(field, make, **{field: value})
                    self.assertIn("not supported", refusal.message)
                else:
                    with self.assertRaises(ApiRefusal):
                        make(**{field: value})

    def test_fields_of_the_other_endpoint(self) -> None:
        self.refused("prompt", chat, prompt="x")
        self.refused("messages", completion, messages=MESSAGES)
        self.refused("top_logprobs", completion, top_logprobs=1)
        self.refused("max_completion_tokens", completion, max_completion_tokens=1)
        self.refused("chat_template_kwargs", completion, chat_template_kwargs={})
        self.refused("tools", completion, tools=[{"type": "function"}])
        self.refused("tool_choice", completion, tool_choice="auto")
        self.refused("reasoning_effort", completion, reasoning_effort="low")
        self.refused("include_reasoning", completion, include_reasoning=True)

    def test_values_that_cannot_be(self) -> None:
        for field, value in (
            ("temperature", -0.1),
            ("temperature", "0.5"),
            ("temperature", True),
            ("temperature", []),
            ("top_p", 0),
            ("top_p", 1.01),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("repetition_penalty", 0),
            ("repetition_penalty", 1000),
            ("presence_penalty", 2.1),
            ("frequency_penalty", -2.1),
            ("seed", 2**63),
            ("seed", 0.5),
            ("seed", "1"),
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("max_tokens", 2.0),
            ("max_tokens", 2**40),
            ("stop", ""),
            ("stop", ["a", ""]),
            ("stop", ["a"] * 17),
            ("stop", "a" * 1001),
            ("stop", 5),
            ("stop_token_ids", [2**31]),
            ("stop_token_ids", "5"),
            ("ignore_eos", 1),
            ("ignore_eos", "true"),
            ("stream", 1),
            ("user", 5),
            ("model", 5),
            ("return_tokens_as_token_ids", "yes"),
        ):
            for make in BOTH:
                with self.assertRaises(ApiRefusal) as caught:
                    make(**{field: value})
                param = str(caught.exception.param)
                self.assertTrue(param.startswith(field), (field, value, param))

    def test_log_probabilities_that_cannot_be(self) -> None:
        self.refused("logprobs", chat, logprobs=5)
        self.refused("top_logprobs", chat, top_logprobs=5)
        self.refused("top_logprobs", chat, logprobs=False, top_logprobs=5)
        self.refused("top_logprobs", chat, logprobs=True, top_logprobs=21)
        self.refused("top_logprobs", chat, logprobs=True, top_logprobs=-1)
        self.refused("logprobs", completion, logprobs=21)
        self.refused("logprobs", completion, logprobs=-1)
        self.refused("logprobs", completion, logprobs=True)

    def test_streams_that_cannot_be(self) -> None:
        for make in BOTH:
            self.refused("stream_options", make, stream_options={"include_usage": True})
            options = {"continuous_usage_stats": True}
            self.refused(
                "stream_options.continuous_usage_stats", make, stream=True, stream_options=options
            )
            number = {"include_usage": 1}
            self.refused("stream_options.include_usage", make, stream=True, stream_options=number)

    def test_two_limits_that_differ(self) -> None:
        self.refused("max_tokens", chat, max_tokens=5, max_completion_tokens=6)

    def test_what_is_missing(self) -> None:
        for read in (read_chat_order, read_completion_order):
            with self.assertRaises(ApiRefusal) as caught:
                read(b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x"}', USUAL)
            self.assertIsNotNone(caught.exception.param)
            with self.assertRaises(ApiRefusal) as caught:
                read(b'{"model": "m"}', USUAL)
            self.assertIn("missing", caught.exception.message)

    def test_messages_that_cannot_be(self) -> None:
        def part(**fields: Any) -> list[dict[str, Any]]:
            return [{"role": "user", "content": [fields]}]

        for messages, param in (
            ([], "messages"),
            ("hello", "messages"),
            (["hello"], "messages[0]"),
            ([{"content": "x"}], "messages[0].role"),
            ([{"role": "function", "content": "x"}], "messages[0].role"),
            ([{"role": "User", "content": "x"}], "messages[0].role"),
            ([{"role": ["user"], "content": "x"}], "messages[0].role"),
            ([*MESSAGES, {"role": "user"}], "messages[1].content"),
            ([{"role": "user", "content": None}], "messages[0].content"),
            ([{"role": "user", "content": []}], "messages[0].content"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
            (part(type="image_url", image_url={"url": "data:"}), "messages[0].content[0].type"),
            (part(type="input_audio"), "messages[0].content[0].type"),
            (part(text="x"), "messages[0].content[0].type"),
            (part(type="text"), "messages[0].content[0].text"),
            (part(type="text", text=None), "messages[0].content[0].text"),
            (part(type="text", text="x", cache=1), "messages[0].content[0].cache"),
            ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ):
            refusal = self.refused(param, chat, messages=messages)
            if "image_url" in str(messages):
                self.assertIn("image_url is not supported", refusal.message)

    def test_template_flags_that_cannot_be(self) -> None:
        given: tuple[dict[str, Any], ...] = ({"enable_thinking": "yes"}, {"enable_thinking": 1})
        for flags in (*given, {"enable_thinking": None}, {"x": {}}, {"x": []}):
            name = f"chat_template_kwargs.{next(iter(flags))}"
            self.refused(name, chat, chat_template_kwargs=flags)

    def test_prompts_that_cannot_be(self) -> None:
        prompts: tuple[Any, ...] = (
            [],
            5,
            {},
            True,
            ["a", "b"],
            [[1], [2]],
            ["a", 1],
            [1, -1],
            [1, 2**31],
            [1, True],
            [1, 2.0],
            [[]],
            [{}],
        )
        for prompt in prompts:
            self.refused("prompt", completion, prompt=prompt)

    def test_bodies_that_are_no_object(self) -> None:
        for data in (
            b"",
            b"no json",
            b"[]",
            b"null",
            b'"x"',
            b"{",
            b'{"model": "m"} x',
            b'{"model": NaN}',
            b'{"model": "m", "prompt": "\\ud800"}',
            b'{"model": "\xff"}',
            b"[" * 100_000,
            b'{"a":' * 100_000,
        ):
            for read in (read_chat_order, read_completion_order):
                with self.subTest(data=data[:40]), self.assertRaises(ApiRefusal) as caught:
                    read(data, USUAL)
                self.assertEqual(caught.exception.status, 400)

    def test_numbers_that_are_none(self) -> None:
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            body = f'{{"model": "m", "prompt": "x", "temperature": {number}}}'.encode()
            with self.subTest(number=number), self.assertRaises(ApiRefusal):
                read_completion_order(body, USUAL)

    def test_a_refusal_does_not_repeat_what_was_sent(self) -> None:
        refusal = self.refused("temperature", chat, temperature="my secret")
        self.assertNotIn("my secret", json.dumps(refusal.body()))


if __name__ == "__main__":
    unittest.main()
