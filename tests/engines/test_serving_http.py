"""The server over real HTTP on loopback, with the counting engine: answers, streams, refusals."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import httpx2

from forge.engines.serving.request_messages import ChatMessage
from forge.engines.serving.slot_engine import EngineFault, Sampling
from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.boundaries.completion_client import CompletionClient
from forge.parts.boundaries.load_client import LoadClient, LoadTarget
from forge.parts.boundaries.metrics import metrics_page
from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.ground.errors import RigError
from tests.engines.counting_engine import CountingEngine, answer_alone
from tests.engines.serving_folder import make_serving_folder, small_tokenizer
from tests.engines.serving_host import MODEL, ServingHost, stream_events, wait_until

WORDS = small_tokenizer().get_vocab()
SIZE = len(WORDS)
TOOL = {"type": "function", "function": {"name": "look"}}
EOS, TURN_END = WORDS["<eos>"], WORDS["<turn|>"]


def ids_of(text: str) -> list[int]:
    """`text` in byte tokens, one a byte."""
    return [WORDS[f"<0x{value:02X}>"] for value in text.encode()]


class HttpCase(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        held = tempfile.TemporaryDirectory()
        cls.addClassCleanup(held.cleanup)
        cls.folder = make_serving_folder(Path(held.name) / "model")

    def host(self, engine: CountingEngine | None = None, **options: Any) -> ServingHost:
        engine = engine or CountingEngine(vocabulary=SIZE, context=200)
        host = ServingHost(engine, self.folder, **options)

        def stop() -> None:
            engine.gate.set()
            engine.loading.set()
            host.stop()

        self.addCleanup(stop)
        if engine.loading.is_set() and engine.fault is None:
            host.ready()
        self.engine = engine
        return host

    def answering(self, *tokens: int) -> ServingHost:
        """A host that answers the prompt "hello" of a completion with `tokens`, over and over."""
        prompt = tuple(small_tokenizer().encode("hello").ids)
        engine = CountingEngine(vocabulary=SIZE, context=200, forced={prompt: tokens})
        return self.host(engine)


class Answers(HttpCase):
    def test_a_text_completion(self) -> None:
        host = self.answering(*ids_of("go on"))
        response = host.complete(max_tokens=5)
        body = response.json()
        self.assertEqual(response.status_code, 200)
        self.assertTrue(body.pop("id").startswith("cmpl-"))
        self.assertIsInstance(body.pop("created"), int)
        expected = {
            "object": "text_completion",
            "model": MODEL,
            "choices": [{"index": 0, "text": "go on", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7},
        }
        self.assertEqual(body, expected)

    def test_a_chat_completion(self) -> None:
        host = self.host()
        response = host.chat(max_tokens=6, temperature=0)
        body = response.json()
        prompt = host.text.chat_ids([ChatMessage("user", "hello")], {})
        alone = answer_alone(prompt, Sampling(temperature=0.0), 6, SIZE)
        whole = b"".join(host.text.token_text.piece(step.token) or b"" for step in alone)
        self.assertTrue(body["id"].startswith("chatcmpl-"))
        self.assertEqual(body["object"], "chat.completion")
        self.assertEqual(body["model"], MODEL)
        self.assertEqual(
            body["choices"],
            [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": whole.decode("utf-8", "replace")},
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
        )
        self.assertEqual(body["usage"]["prompt_tokens"], len(prompt))

    def test_prompt_tokens_from_the_cache_are_told_where_there_are_any(self) -> None:
        host = self.host(CountingEngine(vocabulary=SIZE, context=200, chunk=4, keeps=True))
        prompt = list(range(10, 21))
        answers = [
            host.complete(prompt, max_tokens=2, temperature=0, **more).json()
            for more in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"})
        ]
        told = [answer["usage"].get("prompt_tokens_details") for answer in answers]
        self.assertEqual(told, [None, {"cached_tokens": 8}] * 2)
        self.assertEqual({answer["usage"]["prompt_tokens"] for answer in answers}, {11})
        self.assertEqual(len({answer["choices"][0]["text"] for answer in answers}), 1)
        *_, end = stream_events(host.complete(prompt, max_tokens=2, stream=True))
        self.assertEqual(end["usage"]["prompt_tokens_details"], {"cached_tokens": 8})
        wait_until(lambda: host.metric("engine_prefix_cache_hits_total") == 24)

    def test_ids_do_not_repeat(self) -> None:
        host = self.host()
        told = {host.chat(max_tokens=1).json()["id"] for _ in range(20)}
        self.assertEqual(len(told), 20)

    def test_without_a_limit_a_chat_fills_the_context(self) -> None:
        engine = CountingEngine(vocabulary=10, context=40)
        host = self.host(engine)
        usage = host.complete([7, 8], max_tokens=38, ignore_eos=True).json()["usage"]
        self.assertEqual(usage["total_tokens"], 40)
        host.chat("x", ignore_eos=True)  # its prompt has tokens that this engine lacks
        engine = CountingEngine(vocabulary=SIZE, context=40)
        body = self.host(engine).chat("x", ignore_eos=True).json()
        self.assertEqual(body["usage"]["total_tokens"], 40)
        self.assertEqual(body["choices"][0]["finish_reason"], "length")

    def test_a_stop_token_ends_the_answer_and_is_counted(self) -> None:
        for end in (EOS, TURN_END):
            host = self.answering(*ids_of("hi"), end, *ids_of("more"))
            body = host.complete(max_tokens=50).json()
            self.assertEqual(body["choices"][0]["text"], "hi")
            self.assertEqual(body["choices"][0]["finish_reason"], "stop")
            self.assertEqual(body["usage"]["completion_tokens"], 3)

    def test_ignore_eos_goes_on_to_the_limit(self) -> None:
        host = self.answering(*ids_of("hi"), EOS)
        body = host.complete(max_tokens=7, ignore_eos=True).json()
        self.assertEqual(body["choices"][0]["text"], "hihih")
        self.assertEqual(body["choices"][0]["finish_reason"], "length")

    def test_stop_token_ids_end_even_where_eos_is_ignored(self) -> None:
        host = self.answering(*ids_of("ab"), EOS, *ids_of("cd"))
        body = host.complete(max_tokens=50, ignore_eos=True, stop_token_ids=ids_of("d")).json()
        self.assertEqual(body["choices"][0]["text"], "abc")
        self.assertEqual(body["choices"][0]["finish_reason"], "stop")

    def test_stop_texts_end_the_answer_before_themselves(self) -> None:
        host = self.answering(*ids_of("one STOP two"))
        for stop, text, finish in (
            ("STOP", "one ", "stop"),
            (["x", " ST"], "one", "stop"),
            ("STOPP", "one STOP two", "length"),
        ):
            body = host.complete(max_tokens=12, stop=stop).json()
            self.assertEqual(body["choices"][0]["text"], text)
            self.assertEqual(body["choices"][0]["finish_reason"], finish)
        self.assertEqual(
            host.complete(max_tokens=9, stop="STOP").json()["usage"]["total_tokens"], 10
        )

    def test_settings_reach_the_engine(self) -> None:
        host = self.host()
        self.engine.gate.clear()
        fields = {
            "temperature": 0.5,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "seed": 9,
        }
        asked = threading.Thread(target=host.complete, kwargs=fields)
        asked.start()
        wait_until(lambda: self.engine.talks)
        self.assertEqual(self.engine.talks[0].sampling, Sampling(**fields))  # type: ignore[arg-type]
        self.engine.gate.set()
        asked.join()

    def test_the_same_seed_gives_the_same_and_none_gives_another(self) -> None:
        host = self.host()
        texts = [host.complete(max_tokens=30, seed=3).json()["choices"][0]["text"] for _ in "12"]
        self.assertEqual(*texts)
        drawn = {host.complete(max_tokens=30).json()["choices"][0]["text"] for _ in range(5)}
        self.assertGreater(len(drawn), 1)

    def test_a_prompt_of_token_ids(self) -> None:
        host = self.host()
        body = host.complete([5, 6, 7], max_tokens=1).json()
        self.assertEqual(body["usage"]["prompt_tokens"], 3)


class LogProbabilities(HttpCase):
    def test_of_a_chat(self) -> None:
        engine = CountingEngine(vocabulary=SIZE, context=200)
        host = self.host(engine)
        body = host.chat(max_tokens=4, temperature=0, logprobs=True, top_logprobs=3).json()
        entries = body["choices"][0]["logprobs"]["content"]
        prompt = host.text.chat_ids([ChatMessage("user", "hello")], {})
        alone = answer_alone(prompt, Sampling(temperature=0.0, logprobs=3), 4, SIZE)
        names = host.text.token_text
        self.assertEqual(len(entries), 4)
        for entry, step in zip(entries, alone, strict=True):
            self.assertEqual(entry["token"], names.name(step.token))
            self.assertEqual(entry["logprob"], step.logprob)
            piece = names.piece(step.token)
            self.assertEqual(entry["bytes"], None if piece is None else list(piece))
            told = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
            self.assertEqual(told, [(names.name(token), value) for token, value in step.top])

    def test_without_alternatives(self) -> None:
        host = self.answering(*ids_of("é"), EOS)
        content = host.chat(max_tokens=2, logprobs=True).json()["choices"][0]["logprobs"]["content"]
        self.assertEqual([entry["top_logprobs"] for entry in content], [[], []])

    def test_of_a_text_completion(self) -> None:
        host = self.answering(*ids_of("aéb"), EOS)
        choice = host.complete(max_tokens=9, logprobs=2).json()["choices"][0]
        told = choice["logprobs"]
        self.assertEqual(choice["text"], "aéb")
        self.assertEqual(told["tokens"], ["a", "\ufffd", "\ufffd", "b", "<eos>"])
        self.assertEqual(told["text_offset"], [0, 1, 1, 2, 3])
        self.assertEqual(len(told["token_logprobs"]), 5)
        for name, top in zip(told["tokens"], told["top_logprobs"], strict=True):
            self.assertEqual(top[name], -0.5)
            self.assertEqual(max(top.values()), -0.5)

    def test_tokens_by_their_ids(self) -> None:
        host = self.answering(*ids_of("ab"))
        fields = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        told = host.complete(logprobs=1, **fields).json()["choices"][0]["logprobs"]
        self.assertEqual(told["tokens"], [f"token_id:{token}" for token in ids_of("ab")])

    def test_in_a_stream_they_add_up_to_the_whole(self) -> None:
        for ask in ("chat", "complete"):
            host = self.answering(*ids_of("one STOP two"))
            more: dict[str, Any] = {"logprobs": 2} if ask == "complete" else {"logprobs": True}
            fields = {"max_tokens": 12, "temperature": 0, "stop": "STOP", **more}
            whole = getattr(host, ask)(**fields).json()["choices"][0]["logprobs"]
            events = stream_events(getattr(host, ask)(stream=True, **fields))
            pieces = [e["choices"][0]["logprobs"] for e in events if e["choices"]]
            told = [piece for piece in pieces if piece is not None]
            for name, values in whole.items():
                self.assertEqual([v for piece in told for v in piece[name]], values)


class Streams(HttpCase):
    def test_a_chat_s_events(self) -> None:
        host = self.host()
        fields: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
        whole = host.chat(**fields).json()
        first, *rest = stream_events(host.chat(stream=True, **fields))
        self.assertEqual(first["object"], "chat.completion.chunk")
        self.assertEqual(first["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertIsNone(first["choices"][0]["finish_reason"])
        self.assertEqual({event["id"] for event in rest}, {first["id"]})
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in rest)
        self.assertEqual(text, whole["choices"][0]["message"]["content"])
        self.assertEqual(rest[-1]["choices"][0]["finish_reason"], "length")
        self.assertEqual(rest[-1]["usage"], whole["usage"])
        self.assertTrue(all("usage" not in event for event in rest[:-1]))

    def test_usage_in_a_chunk_of_its_own_where_it_is_asked_for(self) -> None:
        host = self.host()
        for ask in (host.chat, host.complete):
            options = {"include_usage": True}
            events = stream_events(ask(stream=True, stream_options=options, max_tokens=3))
            self.assertEqual(events[-1]["choices"], [])
            self.assertEqual(events[-1]["usage"]["completion_tokens"], 3)
            self.assertEqual(events[-2]["choices"][0]["finish_reason"], "length")
            self.assertTrue(all("usage" not in event for event in events[:-1]))

    def test_emoji_and_accents_come_whole_whatever_the_tokens(self) -> None:
        text = "👋🏽 e\u0301 नि 👨‍👩‍👧‍👦 ẞ"
        host = self.answering(*ids_of(text))
        count = len(ids_of(text))
        events = stream_events(host.complete(stream=True, max_tokens=count))
        pieces = [event["choices"][0]["text"] for event in events]
        self.assertEqual("".join(pieces), text)
        self.assertTrue(all("\ufffd" not in piece for piece in pieces))
        cut = stream_events(host.complete(stream=True, max_tokens=2))
        self.assertEqual("".join(event["choices"][0]["text"] for event in cut), "\ufffd")

    def test_an_event_is_one_line_for_every_reading_of_a_line(self) -> None:
        text = "a\nb\r\nc\x0bd\x0ce\x1cf\x85g\u2028h\u2029i"
        host = self.answering(*ids_of(text))
        fields = {"max_tokens": len(ids_of(text))}
        response = host.complete(stream=True, **fields)
        events = [line for line in response.text.splitlines() if line]
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]]
        self.assertEqual("".join(pieces), text)
        self.assertEqual(host.complete(**fields).json()["choices"][0]["text"], text)

    def test_stop_texts_never_show_in_a_stream(self) -> None:
        host = self.answering(*ids_of("one ST STOP two"))
        events = stream_events(host.complete(stream=True, max_tokens=99, stop=["STOP"]))
        self.assertEqual("".join(event["choices"][0]["text"] for event in events), "one ST ")
        self.assertEqual(events[-1]["choices"][0]["finish_reason"], "stop")

    def test_an_answer_without_text(self) -> None:
        host = self.answering(EOS)
        body = host.complete().json()
        self.assertEqual(body["choices"][0]["text"], "")
        self.assertEqual(body["usage"]["completion_tokens"], 1)
        events = stream_events(host.complete(stream=True))
        self.assertEqual(len(events), 1)
        self.assertEqual(events[0]["choices"][0]["finish_reason"], "stop")

    def test_tokens_go_out_as_they_come(self) -> None:
        """The first text is here while the engine is held: nothing waits for the end."""
        engine = CountingEngine(vocabulary=SIZE, context=200, steps=1)
        host = self.host(engine)
        engine.hold_after = 3
        body = {"model": MODEL, "prompt": [9], "max_tokens": 50, "stream": True}
        body |= {"ignore_eos": True, "logprobs": 0}
        with host.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            told: list[float] = []
            while len(told) < 3:
                choice = json.loads(next(lines)[6:])["choices"][0]
                told += choice["logprobs"]["token_logprobs"]
            self.assertEqual((len(told), len(engine.log)), (3, 3))
            engine.gate.set()
            self.assertIn("data: [DONE]", list(lines))

    def test_a_fault_in_mid_stream_is_told_in_it(self) -> None:
        engine = CountingEngine(vocabulary=SIZE, context=20_000, steps=1)
        host = self.host(engine)
        body = {"model": MODEL, "prompt": [9], "max_tokens": 19_000, "stream": True}
        body["ignore_eos"] = True
        with host.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            engine.fault = EngineFault("out of memory")
            *_, last, done = [line for line in lines if line]
        self.assertIn("out of memory", json.loads(last[6:])["error"]["message"])
        self.assertEqual(done, "data: [DONE]")


class Refusals(HttpCase):
    def error(self, response: httpx2.Response, status: int) -> dict[str, Any]:
        self.assertEqual(response.status_code, status, response.text)
        error = response.json()["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        return dict(error)

    def test_a_field_that_is_not_supported(self) -> None:
        host = self.host()
        for ask in (host.chat, host.complete):
            error = self.error(ask(tools=[TOOL]), 400)
            self.assertEqual(error["param"], "tools")
            error = self.error(ask(functions=[{"name": "look"}]), 400)
            self.assertEqual(error["param"], "functions")
            error = self.error(ask(response_format={"type": "yaml"}), 400)
            self.assertEqual(error["param"], "response_format.type")
        error = self.error(host.chat([{"type": "image_url", "image_url": {"url": "x"}}]), 400)
        self.assertEqual(error["param"], "messages[0].content[0].type")

    def test_another_model(self) -> None:
        host = self.host()
        for ask in (host.chat, host.complete):
            error = self.error(ask(model="gpt-5"), 404)
            self.assertEqual((error["param"], error["code"]), ("model", "model_not_found"))

    def test_the_context_is_a_limit(self) -> None:
        host = self.host(CountingEngine(vocabulary=SIZE, context=40))
        self.assertEqual(host.complete([9] * 39, max_tokens=1).status_code, 200)
        for response, param in (
            (host.complete([9] * 39, max_tokens=2), "max_tokens"),
            (host.complete([9] * 40, max_tokens=1), "prompt"),
            (host.complete([9] * 500, max_tokens=1), "prompt"),
            (host.chat("x" * 60), "messages"),
            (host.chat("x", max_tokens=40), "max_tokens"),
        ):
            error = self.error(response, 400)
            self.assertEqual((error["param"], error["code"]), (param, "context_length_exceeded"))
            self.assertRegex(error["message"], "context.*40|40.*context")
        self.assertEqual(self.engine.talks, {})

    def test_tokens_that_the_model_lacks(self) -> None:
        host = self.host()
        self.assertEqual(self.error(host.complete([SIZE]), 400)["param"], "prompt")
        error = self.error(host.complete(stop_token_ids=[SIZE]), 400)
        self.assertEqual(error["param"], "stop_token_ids")
        self.assertEqual(host.complete([SIZE - 1], max_tokens=1).status_code, 200)

    def test_an_empty_prompt(self) -> None:
        self.assertEqual(self.error(self.host().complete(""), 400)["param"], "prompt")

    def test_bodies(self) -> None:
        host = self.host()
        path = "/v1/completions"
        json_type = {"Content-Type": "application/json"}
        self.error(host.http.post(path, content=b"no json", headers=json_type), 400)
        self.error(host.http.post(path, content=b"{}"), 415)
        self.error(host.http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}), 415)
        good = json.dumps({"model": MODEL, "prompt": [9], "max_tokens": 1}).encode()
        charset = {"Content-Type": "application/json; charset=utf-8"}
        self.assertEqual(host.http.post(path, content=good, headers=charset).status_code, 200)

    def test_a_body_beyond_all_bounds(self) -> None:
        host = self.host()
        big = b'{"model": "' + b"x" * 17_000_000 + b'"}'
        json_type = {"Content-Type": "application/json"}
        try:
            response = host.http.post("/v1/completions", content=big, headers=json_type)
            self.error(response, 413)
        except httpx2.TransportError:
            pass  # the connection was closed while the client still sent
        self.assertEqual(host.chat(max_tokens=1).status_code, 200)

    def test_a_large_body_is_read(self) -> None:
        """Beyond the size that is handled in another thread."""
        host = self.host(CountingEngine(vocabulary=SIZE, context=100_000, chunk=50_000))
        body = host.complete([9] * 50_000, max_tokens=1).json()
        self.assertEqual(body["usage"]["prompt_tokens"], 50_000)
        error = self.error(host.chat("x " * 50_000, tools=[{}]), 400)
        self.assertEqual(error["param"], "tools[0].type")

    def test_paths_and_methods(self) -> None:
        host = self.host()
        self.error(host.http.get("/v1/nothing"), 404)
        self.error(host.http.get("/v1/completions"), 405)
        self.error(host.http.post("/health"), 405)

    def test_another_host_name_is_refused(self) -> None:
        """A page in a browser that makes its own name lead here."""
        host = self.host()
        for name in ("evil.example", f"evil.example:{host.port}", "127.0.0.1.evil.example", ""):
            self.error(host.http.get("/v1/models", headers={"Host": name}), 403)
        for name in ("localhost", f"LOCALHOST:{host.port}", "[::1]", f"[::1]:{host.port}"):
            response = host.http.get("/v1/models", headers={"Host": name})
            self.assertEqual(response.status_code, 200)
        keyed = self.host(api_key="k")
        headers = {"Host": "proxy.example", "Authorization": "Bearer k"}
        self.assertEqual(keyed.http.get("/v1/models", headers=headers).status_code, 200)

    def test_a_full_queue(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE)
        host = self.host(engine, queue=1)
        engine.gate.clear()
        asked = [threading.Thread(target=host.complete) for _ in range(2)]
        for thread in asked:
            thread.start()
        wait_until(lambda: host.scheduler.view().running + host.scheduler.view().waiting == 2)
        for stream in (False, True):
            response = host.complete(stream=stream)
            self.assertEqual(self.error(response, 429)["code"], "queue_full")
            self.assertGreaterEqual(int(response.headers["retry-after"]), 1)
        engine.gate.set()
        for thread in asked:
            thread.join()
        self.assertEqual(host.metric("engine_requests_refused_total", '{status="429"}'), 2)

    def test_an_engine_s_fault_ends_all(self) -> None:
        engine = CountingEngine(vocabulary=SIZE)
        host = self.host(engine)
        engine.fault = EngineFault("out of memory")
        self.assertIn("out of memory", self.error(host.chat(), 500)["message"])
        self.assertIn("out of memory", self.error(host.complete(stream=True), 503)["message"])
        health = host.http.get("/health")
        self.assertEqual((health.status_code, health.json()["status"]), (503, "failed"))


class Pages(HttpCase):
    def test_loading_is_seen_on_the_health_page(self) -> None:
        engine = CountingEngine(vocabulary=SIZE)
        engine.loading.clear()
        host = self.host(engine)
        wait_until(lambda: host.scheduler.view().progress == 0.25)
        health = host.http.get("/health")
        self.assertEqual(health.status_code, 503)
        self.assertEqual((health.json()["status"], health.json()["progress"]), ("loading", 0.25))
        self.assertIn("half of a half", health.json()["message"])
        for response in (host.chat(), host.complete(stream=True), host.http.get("/v1/models")):
            self.assertEqual(response.status_code, 503)
            self.assertIn("retry-after", response.headers)
        self.assertEqual(host.http.get("/metrics").status_code, 200)
        engine.loading.set()
        host.ready()
        self.assertEqual(host.http.get("/health").status_code, 200)
        self.assertEqual(host.chat(max_tokens=1).status_code, 200)

    def test_the_models(self) -> None:
        body = self.host().http.get("/v1/models").json()
        self.assertEqual(body["object"], "list")
        (model,) = body["data"]
        self.assertEqual((model["id"], model["object"]), (MODEL, "model"))
        self.assertEqual(model["max_model_len"], 200)

    def test_figures(self) -> None:
        host = self.answering(*ids_of("ab"), EOS)
        host.complete(max_tokens=2)
        host.complete(max_tokens=9)
        host.complete(max_tokens=0)
        page = host.http.get("/metrics")
        self.assertEqual(page.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8")
        read = metrics_page(page.content)
        self.assertEqual(read.odd_lines, 0)
        for name, value in (
            ("engine_num_requests_running", 0),
            ("engine_num_requests_waiting", 0),
            ("engine_kv_cache_usage_perc", 0),
            ("engine_prompt_tokens_total", 4),
            ("engine_generation_tokens_total", 5),
            ("engine_request_success_total", 2),
            ("engine_requests_refused_total", 1),
            ("engine_time_to_first_token_seconds_count", 2),
            ("engine_request_time_per_output_token_seconds_count", 2),
            ("engine_e2e_request_latency_seconds_count", 2),
            ("engine_request_queue_time_seconds_count", 2),
            ("engine_compiled_shapes", 7),
            ("engine_compiles_after_start", 0),
            ("engine_kv_bytes", 4096),
        ):
            self.assertEqual(read.total(name), value, name)
        for end, count in (("stop", 1), ("length", 1), ("abort", 0), ("error", 0)):
            labels = f'{{finished_reason="{end}"}}'
            self.assertEqual(host.metric("engine_request_success_total", labels), count)

    def test_the_key(self) -> None:
        host = self.host(api_key="k-123")
        paths = ("/v1/models", "/metrics", "/v1/nothing")
        for value in (None, "", "k-123", "Bearer", "Bearer k-12", "Bearer k-1234", "Basic k-123"):
            headers = {} if value is None else {"Authorization": value}
            for path in paths:
                response = host.http.get(path, headers=headers)
                self.assertEqual(response.status_code, 401, (value, path))
                self.assertEqual(response.headers["www-authenticate"], "Bearer")
                self.assertNotIn("k-123", response.text)
        self.assertEqual(host.chat().status_code, 401)
        self.assertEqual(host.http.get("/health").status_code, 200)
        host.http.headers["Authorization"] = "Bearer k-123"
        self.assertEqual(host.http.get("/metrics").status_code, 200)
        self.assertEqual(host.chat(max_tokens=1).status_code, 200)


class Departures(HttpCase):
    """A client that leaves gives its slot back, whatever it was waiting for."""

    def raw_request(self, host: ServingHost, **fields: Any) -> socket.socket:
        body = json.dumps({"model": MODEL, "prompt": [9], "ignore_eos": True, **fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", host.port), timeout=30)
        connection.sendall(head.encode() + body)
        return connection

    def test_during_an_answer_whole_or_streamed(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE, context=10_000_000, steps=1)
        host = self.host(engine)
        for stream in (False, True):
            connection = self.raw_request(host, max_tokens=9_000_000, stream=stream)
            wait_until(lambda: host.scheduler.view().running == 1)
            if stream:
                self.assertIn(b"200 OK", connection.recv(100))
            connection.close()
            wait_until(lambda: host.scheduler.view().running == 0)
            self.assertEqual(engine.talks, {})
        self.assertEqual(host.complete(max_tokens=1).status_code, 200)
        aborted = '{finished_reason="abort"}'
        self.assertEqual(host.metric("engine_request_success_total", aborted), 2)

    def test_in_the_queue(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE)
        host = self.host(engine)
        engine.gate.clear()
        first = self.raw_request(host, max_tokens=2)
        wait_until(lambda: host.scheduler.view().running == 1)
        second = self.raw_request(host, max_tokens=2)
        wait_until(lambda: host.scheduler.view().waiting == 1)
        second.close()
        wait_until(lambda: host.scheduler.view().waiting == 0)
        engine.gate.set()
        self.assertIn(b"200 OK", first.recv(100))
        first.close()
        self.assertEqual(sum(entry[0] == "prefill" for entry in engine.log), 1)

    def test_while_the_prompt_is_read(self) -> None:
        engine = CountingEngine(slots=1, vocabulary=SIZE, context=100_000, chunk=1)
        host = self.host(engine)
        connection = self.raw_request(host, prompt=[9] * 50_000, max_tokens=2, stream=True)
        wait_until(lambda: len(engine.log) > 3)
        connection.close()
        wait_until(lambda: host.scheduler.view().running == 0)
        self.assertLess(len(engine.log), 50_000)

    def test_before_the_whole_body_has_come(self) -> None:
        host = self.host()
        connection = socket.create_connection(("127.0.0.1", host.port), timeout=30)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        connection.sendall(head)
        connection.close()
        self.assertEqual(host.complete(max_tokens=1).status_code, 200)

    def test_a_client_that_does_not_read_holds_no_slot(self) -> None:
        """20,000 tokens with 20 alternatives each are 15 MB: more than all buffers on the way. What
        has piled up comes in fewer pieces, and all of it."""
        engine = CountingEngine(slots=1, vocabulary=SIZE, context=30_000, steps=64)
        host = self.host(engine)
        body = {"model": MODEL, "prompt": [9], "max_tokens": 20_000, "stream": True}
        body |= {"logprobs": 20, "ignore_eos": True, "return_tokens_as_token_ids": True}
        with httpx2.Client(base_url=host.url, timeout=60, trust_env=False) as slow:
            with slow.stream("POST", "/v1/completions", json={**body, "seed": 5}) as response:
                wait_until(lambda: engine.log)
                wait_until(lambda: host.scheduler.view().running == 0)
                self.assertEqual(host.complete(max_tokens=1).status_code, 200)
                *events, done = [line for line in response.iter_lines() if line]
        self.assertEqual(done, "data: [DONE]")
        told: list[str] = []
        for event in events:
            told += (json.loads(event[6:])["choices"][0]["logprobs"] or {}).get("tokens", [])
        alone = answer_alone([9], Sampling(seed=5), 20_000, SIZE)
        self.assertEqual(told, [f"token_id:{step.token}" for step in alone])


class OwnClients(HttpCase):
    """What the rigs' own clients read of this server."""

    def test_the_chat_client(self) -> None:
        host = self.host(api_key="k")

        async def ask() -> None:
            client = ChatClient(host.url, "k")
            self.assertTrue(await client.healthy())
            answer = await client.chat(
                MODEL, "hello", system="be", max_tokens=9, temperature=0.0, timeout_s=30
            )
            self.assertTrue(answer.complete, answer.broke_off)
            self.assertEqual(answer.finish_reason, "length")
            self.assertEqual((answer.completion_tokens, answer.model), (9, MODEL))
            self.assertTrue(answer.text and answer.ttft_s)
            with self.assertRaises(RigError) as caught:
                await client.chat("x", "hello", max_tokens=9, temperature=0.0, timeout_s=30)
            self.assertEqual(caught.exception.error_class, "INVALID")
            with self.assertRaises(RigError) as caught:
                wrong = ChatClient(host.url, "x")
                await wrong.chat(MODEL, "hello", max_tokens=9, temperature=0.0, timeout_s=30)
            self.assertEqual(caught.exception.error_class, "AUTH")

        asyncio.run(ask())

    def test_the_completion_client(self) -> None:
        host = self.answering(*ids_of("abc"), EOS)

        async def ask() -> None:
            client = CompletionClient(host.url)
            done = await client.complete(
                MODEL, "hello", max_tokens=9, temperature=0.0, timeout_s=30
            )
            self.assertEqual((done.text, done.finish_reason, done.model), ("abc", "stop", MODEL))
            self.assertEqual((done.prompt_tokens, done.completion_tokens), (2, 4))

        asyncio.run(ask())

    def test_the_probe_client(self) -> None:
        host = self.host()

        async def ask() -> None:
            client = ProbeClient(host.url)
            messages = [{"role": "user", "content": "hello"}]
            plain = {"model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0.0}
            answer = await client.post_chat(plain, 30)
            self.assertEqual((answer.status, answer.completion_tokens), (200, 5))
            tools = await client.post_chat({**plain, "tools": [TOOL]}, 30)
            self.assertEqual(tools.status, 400)
            self.assertIn("tools", tools.error_words)
            long = await client.post_chat({**plain, "max_tokens": 5000}, 30)
            self.assertEqual(long.status, 400)
            self.assertIn("context", long.error_words)

        asyncio.run(ask())

    def test_the_load_client(self) -> None:
        host = self.host()

        async def load() -> None:
            client = LoadClient(LoadTarget.from_url(host.url))
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 20, "stream": True}
            body["ignore_eos"] = True
            asked = [client.ask(json.dumps({**body, "seed": n}).encode()) for n in range(12)]
            for record in await asyncio.gather(*asked):
                self.assertEqual((record.fault, record.finish_reason), ("", "length"))
                self.assertEqual(record.completion_tokens, 20)
                self.assertTrue(record.arrivals)
            self.assertEqual(client.resent, 0)
            client.close()

        asyncio.run(load())

    def test_openai_s_own_client(self) -> None:
        from openai import BadRequestError, OpenAI

        host = self.host()
        with OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0) as client:
            self.assertEqual([model.id for model in client.models.list()], [MODEL])
            messages: Any = [{"role": "user", "content": "hello"}]
            whole = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=9, temperature=0, logprobs=True
            )
            assert whole.usage and whole.choices[0].logprobs and whole.choices[0].logprobs.content
            self.assertEqual(whole.usage.completion_tokens, 9)
            self.assertEqual(len(whole.choices[0].logprobs.content), 9)
            events = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=9, temperature=0, stream=True
            )
            pieces = [event.choices[0].delta.content or "" for event in events]
            self.assertEqual("".join(pieces), whole.choices[0].message.content)
            text = client.completions.create(model=MODEL, prompt="hello", logprobs=1)
            self.assertEqual(text.choices[0].finish_reason, "length")
            with self.assertRaises(BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=messages, n=2)
            self.assertEqual(caught.exception.param, "n")


if __name__ == "__main__":
    unittest.main()
