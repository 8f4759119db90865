"""Calls and thoughts over real HTTP on loopback, with an engine that says the given tokens."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

from forge.parts.runtimes.random_tokenizer import RANDOM_CHAT_TEMPLATE
from tests.engines.counting_engine import CountingEngine
from tests.engines.serving_folder import CALL_CONTROL, make_serving_folder, small_tokenizer
from tests.engines.serving_host import MODEL, ServingHost, stream_events
from tests.engines.test_serving_answer_parser import THOUGHT, call_of, quoted

TOKENIZER = small_tokenizer(CALL_CONTROL)
SIZE = TOKENIZER.get_vocab_size()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
STRICT = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": SCHEMA | {"required": ["city"], "additionalProperties": False},
        "strict": True,
    },
}
NOTE = {"type": "function", "function": {"name": "note"}}
OSLO = call_of('look{city:"oslo"}')
LIMA = call_of('look{city:"lima"}')


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


class SaysAlways(CountingEngine):
    """Answers every prompt with the same tokens, and with the last of them for ever."""

    def __init__(self, text: str, steps: int = 4) -> None:
        super().__init__(vocabulary=SIZE, context=1000, chunk=500, steps=steps)
        self.said = [*tokens_of(text), *tokens_of("x") * 100]

    def begin(self, slot: int, prompt: Any, sampling: Any, cache_salt: str = "") -> int:
        self.forced[tuple(prompt)] = self.said
        return super().begin(slot, prompt, sampling, cache_salt)


class ToolsCase(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        held = tempfile.TemporaryDirectory()
        cls.addClassCleanup(held.cleanup)
        cls.folder = make_serving_folder(
            Path(held.name) / "model", CALL_CONTROL, template=RANDOM_CHAT_TEMPLATE
        )

    def saying(self, text: str, steps: int = 4) -> ServingHost:
        self.engine = SaysAlways(text, steps)
        host = ServingHost(self.engine, self.folder)
        self.addCleanup(host.stop)
        return host.ready()

    def asked(self, host: ServingHost, **fields: Any) -> dict[str, Any]:
        """The whole answer, of which the streamed one is the same: its only choice."""
        response = host.chat(temperature=0, **fields)
        self.assertEqual(response.status_code, 200, response.text)
        body = dict(response.json())
        (choice,) = body["choices"]
        self.assertEqual(choice["message"]["role"], "assistant")
        streamed = self.streamed(host, **fields)
        told = {name: choice["message"].get(name) for name in streamed["message"]}
        for call in told["tool_calls"] or []:
            self.assertRegex(call.pop("id"), r"\Acall_[0-9a-f]{32}\Z")
        self.assertEqual(streamed["message"], told)
        self.assertEqual(streamed["finish_reason"], choice["finish_reason"])
        self.assertEqual(streamed["usage"], body["usage"])
        self.assertEqual(streamed["logprobs"], choice["logprobs"])
        return {**choice, "usage": body["usage"]}

    def streamed(self, host: ServingHost, **fields: Any) -> dict[str, Any]:
        """A stream's pieces put together as OpenAI's clients do it."""
        events = stream_events(host.chat(temperature=0, stream=True, **fields))
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        logprobs: list[Any] = []
        finish = None
        for event in events:
            (choice,) = event["choices"]
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                texts[name] = texts.get(name, "") + delta.get(name, "")
            for piece in delta.get("tool_calls", []):
                function = piece["function"]
                if piece["index"] == len(calls):
                    self.assertEqual((piece["type"], function["arguments"]), ("function", ""))
                    self.assertRegex(piece["id"], r"\Acall_[0-9a-f]{32}\Z")
                    calls.append({"type": "function", "function": dict(function)})
                else:
                    self.assertEqual(
                        (piece["index"], set(piece)), (len(calls) - 1, {"index", "function"})
                    )
                    calls[-1]["function"]["arguments"] += function["arguments"]
            if choice["logprobs"]:
                logprobs += choice["logprobs"]["content"]
            finish = choice["finish_reason"] or finish
        message: dict[str, Any] = {name: text or None for name, text in texts.items()}
        message["content"] = texts["content"] or (None if calls else "")
        message["tool_calls"] = calls or None
        return {
            "message": message,
            "finish_reason": finish,
            "usage": events[-1]["usage"],
            "logprobs": {"content": logprobs} if logprobs else None,
        }


def made(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"]
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


class Calls(ToolsCase):
    def test_a_call(self) -> None:
        host = self.saying(OSLO + "<|tool_response>")
        choice = self.asked(host, tools=TOOLS)
        self.assertEqual(made(choice), [("look", {"city": "oslo"})])
        self.assertIsNone(choice["message"]["content"])
        self.assertEqual(choice["finish_reason"], "tool_calls")
        self.assertEqual(choice["usage"]["completion_tokens"], len(tokens_of(OSLO)) + 1)
        self.assertNotIn("reasoning", choice["message"])

    def test_every_end_of_a_call_is_an_end(self) -> None:
        for end in ("<|tool_response>", "<turn|>", "<eos>"):
            choice = self.asked(self.saying("so: " + OSLO + end), tools=TOOLS)
            self.assertEqual(made(choice), [("look", {"city": "oslo"})])
            self.assertEqual(choice["message"]["content"], "so: ")
            self.assertEqual(choice["finish_reason"], "tool_calls")

    def test_two_calls_have_two_ids(self) -> None:
        host = self.saying(OSLO + LIMA + "<turn|>")
        choice = self.asked(host, tools=TOOLS, tool_choice="auto")
        self.assertEqual(made(choice), [("look", {"city": "oslo"}), ("look", {"city": "lima"})])
        message = host.chat(tools=TOOLS).json()["choices"][0]["message"]
        self.assertEqual(len({call["id"] for call in message["tool_calls"]}), 2)

    def test_one_call_where_no_more_are_wanted(self) -> None:
        host = self.saying("a" + OSLO + LIMA + "<turn|>")
        choice = self.asked(host, tools=TOOLS, parallel_tool_calls=False)
        self.assertEqual(made(choice), [("look", {"city": "oslo"})])
        self.assertEqual(choice["finish_reason"], "tool_calls")
        self.assertEqual(choice["usage"]["completion_tokens"], len(tokens_of("a" + OSLO)))

    def test_an_answer_without_a_call(self) -> None:
        choice = self.asked(self.saying("hello<turn|>"), tools=TOOLS)
        self.assertEqual(choice["message"], {"role": "assistant", "content": "hello"})
        self.assertEqual(choice["finish_reason"], "stop")

    def test_without_tools_a_call_is_text(self) -> None:
        host = self.saying(OSLO + "<turn|>")
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = self.asked(host, **fields)
            text = "call:look{city:oslo}"
            self.assertEqual(choice["message"], {"role": "assistant", "content": text})
            self.assertEqual(choice["finish_reason"], "stop")

    def test_a_broken_call_is_text_to_the_letter(self) -> None:
        text = call_of('look{city:"oslo"')
        choice = self.asked(self.saying(text + "<turn|>"), tools=TOOLS)
        self.assertEqual(choice["message"], {"role": "assistant", "content": text})
        self.assertEqual(choice["finish_reason"], "stop")

    def test_a_call_that_the_limit_cuts_off(self) -> None:
        host = self.saying(OSLO)
        choice = self.asked(host, tools=TOOLS, max_tokens=5)
        cut = TOKENIZER.decode(tokens_of(OSLO)[:5], skip_special_tokens=False)
        self.assertEqual(choice["message"], {"role": "assistant", "content": cut})
        self.assertEqual(choice["finish_reason"], "length")
        whole = self.asked(host, tools=TOOLS, max_tokens=len(tokens_of(OSLO)) + 3)
        self.assertEqual(made(whole), [("look", {"city": "oslo"})])
        self.assertEqual((whole["message"]["content"], whole["finish_reason"]), ("xxx", "length"))

    def test_stop_texts_look_at_content_alone(self) -> None:
        host = self.saying(THOUGHT.format("halt") + OSLO + "go halt")
        choice = self.asked(host, tools=TOOLS, stop=["halt", "oslo"])
        self.assertEqual(made(choice), [("look", {"city": "oslo"})])
        self.assertEqual(choice["message"]["content"], "go ")
        self.assertEqual(choice["message"]["reasoning"], "halt")

    def test_figures(self) -> None:
        host = self.saying(OSLO + LIMA + call_of("look{") + "<turn|>")
        for outcome in ("made", "broken"):
            self.assertEqual(host.metric("engine_tool_calls_total", f'{{outcome="{outcome}"}}'), 0)
        host.chat(tools=TOOLS)
        for outcome, count in (("made", 2), ("broken", 1)):
            self.assertEqual(
                host.metric("engine_tool_calls_total", f'{{outcome="{outcome}"}}'), count
            )
        stopped = '{finished_reason="stop"}'
        self.assertEqual(host.metric("engine_request_success_total", stopped), 1)

    def test_log_probabilities_are_of_every_token(self) -> None:
        text = THOUGHT.format("so") + OSLO + "<turn|>"
        choice = self.asked(self.saying(text), tools=TOOLS, logprobs=True, top_logprobs=2)
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        self.assertEqual("".join(names), text)
        self.assertEqual(len(names), choice["usage"]["completion_tokens"])

    def test_a_conversation_goes_on_with_the_results(self) -> None:
        host = self.saying(OSLO + "<turn|>")
        message = host.chat(tools=TOOLS).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        messages = [{"role": "user", "content": "hello"}, message, result]
        body = {"model": MODEL, "messages": messages, "tools": TOOLS}
        response = host.http.post("/v1/chat/completions", json=body)
        self.assertEqual(response.status_code, 200, response.text)
        words = '<|tool_response>response:look{value:"rain"}<tool_response|>'
        ids = tokens_of(quoted(words))
        (prompt,) = [prompt for prompt in self.engine.forced if list(prompt)[-len(ids) :] == ids]
        self.assertEqual(response.json()["usage"]["prompt_tokens"], len(prompt))


class Thoughts(ToolsCase):
    def test_a_thought_stands_beside_what_is_said(self) -> None:
        host = self.saying(THOUGHT.format("so, hm") + "hello<turn|>")
        choice = self.asked(host, chat_template_kwargs={"enable_thinking": True})
        expected = {"reasoning": "so, hm", "reasoning_content": "so, hm"}
        self.assertEqual(choice["message"], {"role": "assistant", "content": "hello", **expected})
        self.assertEqual(choice["finish_reason"], "stop")
        inside = len(tokens_of("thought\nso, hm"))
        details = choice["usage"]["completion_tokens_details"]
        self.assertEqual(details, {"reasoning_tokens": inside})
        total = len(tokens_of(THOUGHT.format("so, hm") + "hello<turn|>"))
        self.assertEqual(choice["usage"]["completion_tokens"], total)

    def test_a_thought_can_be_left_out_of_the_answer(self) -> None:
        host = self.saying(THOUGHT.format("so, hm") + "hello<turn|>")
        choice = self.asked(host, include_reasoning=False)
        self.assertEqual(choice["message"], {"role": "assistant", "content": "hello"})
        details = choice["usage"]["completion_tokens_details"]
        self.assertGreater(details["reasoning_tokens"], 0)

    def test_a_thought_that_the_limit_cuts_off(self) -> None:
        host = self.saying("<|channel>thought\nso and so on")
        choice = self.asked(host, max_tokens=len(tokens_of("<|channel>thought\nso")))
        self.assertEqual((choice["message"]["content"], choice["message"]["reasoning"]), ("", "so"))
        self.assertEqual(choice["finish_reason"], "length")

    def test_effort_switches_thinking_on(self) -> None:
        host = self.saying("x<turn|>")
        think = TOKENIZER.token_to_id("<|think|>")
        for fields, on in (
            ({}, False),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "high"}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ):
            before = set(self.engine.forced)
            self.assertEqual(host.chat(f"{fields}", **fields).status_code, 200)
            (prompt,) = set(self.engine.forced) - before
            self.assertEqual(think in prompt, on, fields)

    def test_a_prompt_that_opens_the_thought(self) -> None:
        template = RANDOM_CHAT_TEMPLATE + "{{ '<|channel>thought\\n' if enable_thinking }}"
        with tempfile.TemporaryDirectory() as held:
            folder = make_serving_folder(Path(held) / "m", CALL_CONTROL, template=template)
            host = ServingHost(SaysAlways("so<channel|>hello<turn|>"), folder)
            self.addCleanup(host.stop)
            host.ready()
            on = self.asked(host, chat_template_kwargs={"enable_thinking": True})["message"]
            self.assertEqual((on["reasoning"], on["content"]), ("so", "hello"))
            off = self.asked(host)["message"]
            self.assertEqual(off, {"role": "assistant", "content": "sohello"})

    def test_a_text_completion_has_no_parts(self) -> None:
        host = self.saying(THOUGHT.format("so") + OSLO + "<turn|>")
        body = host.complete("hello", max_tokens=99).json()
        self.assertEqual(body["choices"][0]["text"], "thought\nsocall:look{city:oslo}")
        self.assertEqual(body["choices"][0]["finish_reason"], "stop")
        self.assertEqual(set(body["usage"]), {"prompt_tokens", "completion_tokens", "total_tokens"})


class Shapes(ToolsCase):
    def test_an_answer_that_leaves_its_shape_breaks_off_alone(self) -> None:
        """This engine overlooks what it may say."""
        host = self.saying("x")
        for fields in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "a"}},
            {"tools": TOOLS, "tool_choice": "required"},
        ):
            response = host.chat(**fields)
            self.assertEqual(response.status_code, 500)
            self.assertIn("is not allowed here", response.json()["error"]["message"])
        self.assertEqual(host.chat(max_tokens=2).json()["choices"][0]["message"]["content"], "xx")

    def test_a_strict_tool_may_be_called_as_its_schema_says_or_not_at_all(self) -> None:
        """This engine overlooks what it may say, so what is told is what the masks allow."""
        for text, content, calls in (
            ("so<turn|>", "so", None),
            ("look{city:1}<turn|>", "look{city:1}", None),
            (OSLO + LIMA + "<turn|>", None, [{"city": "oslo"}, {"city": "lima"}]),
            ("so: " + OSLO + "<|tool_response>", "so: ", [{"city": "oslo"}]),
            (THOUGHT.format("hm") + "so" + OSLO + "<turn|>", "so", [{"city": "oslo"}]),
            (call_of('note{a:"b"}') + OSLO + "<turn|>", None, [{"a": "b"}, {"city": "oslo"}]),
        ):
            choice = self.asked(
                self.saying(text), tools=[STRICT, NOTE], reasoning_effort="high", max_tokens=200
            )
            self.assertEqual(choice["message"]["content"], content)
            told = [arguments for _, arguments in made(choice)] if calls else None
            self.assertEqual(told, calls)

    def test_a_strict_tool_is_not_called_past_its_schema(self) -> None:
        for body in ("look{city:1}", 'look{city:"oslo",a:1}', "look{}", "other{}"):
            for first in ("", "so: ", OSLO, THOUGHT.format("hm")):
                host = self.saying(first + call_of(body) + "<turn|>")
                for streamed in (False, True):
                    response = host.chat(
                        tools=[STRICT, NOTE],
                        stream=streamed,
                        reasoning_effort="high",
                        temperature=0,
                        max_tokens=200,
                    )
                    self.assertIn("is not allowed here", response.text)
                    self.assertNotIn(call_of(body), response.text)
            free = self.asked(self.saying(call_of(body) + "<turn|>"), tools=[*TOOLS, NOTE])
            self.assertEqual(len(made(free)), 1)

    def test_an_answer_is_of_its_format_or_calls(self) -> None:
        for tools in (TOOLS, [STRICT]):
            fields: dict[str, Any] = {
                "tools": tools,
                "response_format": {"type": "json_object"},
                "max_tokens": 200,
            }
            said = self.asked(self.saying("{}<turn|>"), **fields)
            self.assertEqual(said["message"]["content"], "{}")
            called = self.asked(self.saying(OSLO + "<turn|>"), **fields)
            self.assertEqual(made(called), [("look", {"city": "oslo"})])
            for text in ("so", "so" + OSLO, "{}" + OSLO, call_of("look{")):
                response = self.saying(text + "<turn|>").chat(**fields)
                self.assertEqual(response.status_code, 500)
                self.assertIn("is not allowed here", response.json()["error"]["message"])

    def test_tools_that_are_not_strict_are_not_held(self) -> None:
        host = self.saying(call_of("look{city:1,more:x}") + "<turn|>")
        choice = self.asked(host, tools=TOOLS)
        self.assertEqual(made(choice), [("look", {"city": 1, "more": "x"})])
        self.assertEqual(host.metric("engine_requests_constrained_total"), 0)


class OpenAisClient(ToolsCase):
    def test_its_helper_for_strict_tools_and_formats(self) -> None:
        """It makes a strict tool and a schema of two pydantic models, and reads both answers."""
        import openai
        from pydantic import BaseModel

        class look(BaseModel):
            city: str

        class Weather(BaseModel):
            rain: bool

        messages: Any = [{"role": "user", "content": "hello"}]
        tools: Any = [openai.pydantic_function_tool(look)]
        for text, called in ((OSLO, True), ('{"rain": true}', False)):
            host = self.saying(text + "<turn|>")
            with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0) as client:
                told = client.chat.completions.parse(
                    model=MODEL, messages=messages, tools=tools, response_format=Weather
                )
            message: Any = told.choices[0].message
            if called:
                (call,) = message.tool_calls
                self.assertEqual(call.function.parsed_arguments, look(city="oslo"))
            else:
                self.assertEqual(message.parsed, Weather(rain=True))

    def test_calls_and_thoughts(self) -> None:
        from openai import OpenAI

        host = self.saying(THOUGHT.format("so") + OSLO + LIMA + "<turn|>")
        tools: Any = TOOLS
        messages: Any = [{"role": "user", "content": "hello"}]
        with OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            message = whole.choices[0].message
            told: Any = message.tool_calls
            self.assertEqual([call.function.name for call in told], ["look", "look"])
            self.assertEqual(json.loads(told[1].function.arguments), {"city": "lima"})
            assert whole.usage and whole.usage.completion_tokens_details
            self.assertGreater(whole.usage.completion_tokens_details.reasoning_tokens or 0, 0)
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=tools
            ) as stream:
                final = stream.get_final_completion().choices[0]
            streamed: Any = final.message.tool_calls
            self.assertEqual(final.finish_reason, "tool_calls")
            self.assertEqual(
                [call.function.arguments for call in streamed],
                [call.function.arguments for call in told],
            )
            answers = [
                {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in told
            ]
            back: Any = [*messages, message.model_dump(exclude_none=True), *answers]
            again = client.chat.completions.create(model=MODEL, messages=back, tools=tools)
            self.assertEqual(again.choices[0].finish_reason, "tool_calls")


if __name__ == "__main__":
    unittest.main()
