"""The client of a served model against scripted servers on loopback: every oddity of the wire.

The servers are real sockets that write exactly the bytes of the test; nothing of the client is
replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import time
import unittest
from collections.abc import Awaitable, Callable
from unittest import mock

import psutil

from forge.parts.boundaries.chat_client import ChatAnswer, ChatClient
from forge.parts.ground.errors import RigError

Script = Callable[["Connection"], Awaitable[None]]
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Connection:
    """One request that a scripted server got, and the pen for its answer."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head.decode()
        self.body = body
        self.writer = writer

    async def send(self, *pieces: bytes, pause: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause)

    def reset(self) -> None:
        """Break the connection as a killed process or a pulled cable does."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class ScriptedServer:
    """Listens on a free loopback port and plays `script` for every request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Connection] = []
        self.connections = 0

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            connection = Connection(head, await reader.readexactly(length), writer)
            self.requests.append(connection)
            await self.script(connection)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def event(text: str | None = None, **more: object) -> bytes:
    """One event of a chat completion as servers write it."""
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return b"data: " + json.dumps({"model": "m", "choices": choices, **more}).encode() + b"\n\n"


def stop(reason: str = "stop") -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7})
DONE = b"data: [DONE]\n\n"
WHOLE = [event("Hel"), event("lo"), stop(), USAGE, DONE]


def streaming(*pieces: bytes, pause: float = 0.0) -> Script:
    async def script(connection: Connection) -> None:
        await connection.send(EVENT_STREAM, *pieces, pause=pause)

    return script


def answering(status: str, body: bytes = b"", *headers: str) -> Script:
    async def script(connection: Connection) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        await connection.send("\r\n".join(lines).encode() + body)

    return script


class Case(unittest.IsolatedAsyncioTestCase):
    async def ask(self, script: Script, timeout_s: float = 10.0, **options: object) -> ChatAnswer:
        async with ScriptedServer(script) as server:
            self.server = server
            settings: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, **options}
            return await ChatClient(server.url).chat(
                "the-model", "Hi", timeout_s=timeout_s, **settings
            )

    async def refused(self, error_class: str, script: Script, timeout_s: float = 10.0) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.ask(script, timeout_s)
        self.assertEqual(caught.exception.error_class, error_class, caught.exception)
        return caught.exception


class RequestTest(Case):
    async def test_what_is_sent(self) -> None:
        await self.ask(streaming(*WHOLE), system="Be brief.", max_tokens=17, temperature=0.5)
        (request,) = self.server.requests
        self.assertTrue(request.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n"))
        self.assertEqual(
            json.loads(request.body),
            {
                "model": "the-model",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ],
                "max_tokens": 17,
                "temperature": 0.5,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )

    async def test_without_a_system_prompt_none_is_sent(self) -> None:
        await self.ask(streaming(*WHOLE))
        messages = json.loads(self.server.requests[0].body)["messages"]
        self.assertEqual(messages, [{"role": "user", "content": "Hi"}])

    async def test_no_credential_of_the_environment_goes_along(self) -> None:
        with mock.patch.dict(os.environ, {"OPENAI_API_KEY": "k" * 20, "HF_TOKEN": "t" * 20}):
            await self.ask(streaming(*WHOLE))
        head = self.server.requests[0].head
        self.assertNotIn("kkkk", head)
        self.assertNotIn("tttt", head)
        self.assertNotIn("authorization", head.lower())

    async def test_a_compressed_answer_is_not_asked_for(self) -> None:
        await self.ask(streaming(*WHOLE))
        self.assertIn("accept-encoding: identity", self.server.requests[0].head.lower())


class StreamTest(Case):
    def whole(self, answer: ChatAnswer) -> None:
        self.assertTrue(answer.complete, answer)
        self.assertEqual((answer.text, answer.finish_reason), ("Hello", "stop"))
        self.assertEqual((answer.prompt_tokens, answer.completion_tokens), (5, 2))

    async def test_a_whole_answer(self) -> None:
        answer = await self.ask(streaming(*WHOLE, pause=0.02))
        self.whole(answer)
        self.assertEqual((answer.model, answer.broke_off), ("m", ""))
        self.assertEqual(len(answer.arrivals), 2)
        assert answer.ttft_s is not None
        self.assertEqual(answer.ttft_s, answer.arrivals[0])
        self.assertTrue(0 < answer.ttft_s < answer.arrivals[1] < answer.total_s < 10)

    async def test_cut_into_single_bytes(self) -> None:
        stream = event("H") + event("élлo🙂") + stop() + USAGE + DONE
        answer = await self.ask(streaming(*(bytes([byte]) for byte in stream)))
        self.assertEqual((answer.text, answer.complete), ("Hélлo🙂", True))

    async def test_cut_anywhere_at_random(self) -> None:
        source = random.Random(10)
        raw = json.dumps({"choices": [{"delta": {"content": "é🙂"}}]}, ensure_ascii=False).encode()
        stream = b"data: " + raw + b"\n\n" + b"".join(WHOLE)
        for _ in range(25):
            cuts = sorted(source.sample(range(len(stream)), 6))
            pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
            answer = await self.ask(streaming(*pieces))
            self.assertEqual((answer.text, answer.complete), ("é🙂Hello", True))

    async def test_other_spellings_of_the_same_stream(self) -> None:
        stream = b"".join(WHOLE)
        for name, spelled in {
            "no blank after the colon": stream.replace(b"data: ", b"data:"),
            "windows line ends": stream.replace(b"\n", b"\r\n"),
            "one line end only": stream.replace(b"\n\n", b"\n"),
            "comments as heartbeats": stream.replace(b"data:", b": ping\n\ndata:"),
            "event names and ids": stream.replace(b"data:", b"event: chunk\nid: 7\ndata:"),
            "empty data": stream.replace(b"data: {", b"data:\n\ndata: {"),
            "no DONE": stream.removesuffix(DONE),
            "no line end after the last": stream.removesuffix(b"\n\n"),
            "usage before the end": b"".join([WHOLE[0], WHOLE[1], USAGE, stop(), DONE]),
            "usage with the reason": event("Hel") + event("lo") + stop()[:-3]
            + b', "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n',
            "usage in every event": event("Hel", usage={"prompt_tokens": 5, "completion_tokens": 1})
            + event("lo", usage={"prompt_tokens": 5, "completion_tokens": 2})
            + stop(),
            "the role first": event("") + stream,
            "chunks after DONE": stream + event("never read"),
        }.items():  # fmt: skip
            with self.subTest(name):
                self.whole(await self.ask(streaming(spelled)))

    async def test_chunked_transfer(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in WHOLE),
                b"0\r\n\r\n",
            )

        self.whole(await self.ask(script))

    async def test_the_role_alone_does_not_stop_the_clock(self) -> None:
        role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'

        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM, role)
            await asyncio.sleep(0.3)
            await connection.send(*WHOLE)

        answer = await self.ask(script)
        assert answer.ttft_s is not None
        self.assertGreater(answer.ttft_s, 0.25)

    async def test_reasoning_is_kept_apart_under_both_its_names(self) -> None:
        for key in ("reasoning_content", "reasoning"):
            thought = json.dumps({"choices": [{"delta": {key: "hm"}}]}).encode()
            answer = await self.ask(streaming(b"data: " + thought + b"\n\n", *WHOLE))
            self.assertEqual((answer.reasoning, answer.text), ("hm", "Hello"))
            self.assertEqual(len(answer.arrivals), 3)

    async def test_values_of_the_wrong_kind_are_no_crash(self) -> None:
        for odd in (
            {"choices": None},
            {"choices": {}},
            {"choices": 7},
            {"choices": [None, 7, "x", []]},
            {"choices": [{}]},
            {"choices": [{"delta": None}]},
            {"choices": [{"delta": "text"}]},
            {"choices": [{"delta": {"content": None}}]},
            {"usage": None},
            {"usage": []},
            {"usage": {"prompt_tokens": "5", "completion_tokens": -1}},
            {"usage": {"prompt_tokens": None, "completion_tokens": 1.5}},
            {"usage": {"prompt_tokens": True}},
            {"model": None},
            {"error": None},
            {},
        ):
            with self.subTest(odd=odd):
                line = b"data: " + json.dumps(odd).encode() + b"\n\n"
                self.whole(await self.ask(streaming(*WHOLE[:-1], line, DONE)))
        answer = await self.ask(
            streaming(b'data: {"choices": [{"delta": {"content": ["a", 1]}}]}\n\n', *WHOLE)
        )
        self.assertTrue(answer.complete)

    async def test_no_usage_means_no_counts(self) -> None:
        answer = await self.ask(streaming(event("Hello"), stop("length"), DONE))
        self.assertEqual((answer.prompt_tokens, answer.completion_tokens), (None, None))
        self.assertEqual((answer.finish_reason, answer.complete), ("length", True))

    async def test_bad_utf8_and_lone_surrogates(self) -> None:
        answer = await self.ask(
            streaming(b'data: {"choices": [{"delta": {"content": "a\xff\xc3b"}}]}\n\n', *WHOLE)
        )
        self.assertEqual(answer.text, "a\ufffd\ufffdbHello")
        answer = await self.ask(
            streaming(b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}\n\n', *WHOLE)
        )
        self.assertTrue(answer.complete)


class BrokenTest(Case):
    async def broken(self, script: Script, timeout_s: float = 10.0) -> ChatAnswer:
        answer = await self.ask(script, timeout_s)
        self.assertFalse(answer.complete)
        self.assertNotEqual(answer.broke_off, "")
        return answer

    async def test_an_end_without_a_reason(self) -> None:
        for end in ([], [USAGE], [DONE], [USAGE, DONE]):
            answer = await self.broken(streaming(event("Hel"), *end))
            self.assertEqual(answer.text, "Hel")
            self.assertIn("without a finish reason", answer.broke_off)

    async def test_a_connection_that_is_reset_in_the_middle(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM, event("Hel"), pause=0.1)
            connection.reset()

        answer = await self.broken(script)
        self.assertEqual(answer.text, "Hel")
        self.assertIn("connection broke", answer.broke_off)

    async def test_a_body_shorter_than_its_announcement(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", event("Hel"))

        self.assertIn("connection broke", (await self.broken(script)).broke_off)

    async def test_an_error_in_the_stream(self) -> None:
        for error in ({"message": "CUDA out of memory", "code": 500}, "CUDA out of memory"):
            line = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            for before in ([], [event("Hel")]):
                answer = await self.broken(streaming(*before, line, DONE))
                self.assertIn("CUDA out of memory", answer.broke_off)

    async def test_an_event_that_is_no_object(self) -> None:
        for line in (b"{", b"[]", b"7", b"nonsense", b"[" * 100_000, b'{"a":' * 100_000):
            with self.subTest(line=line[:10]):
                answer = await self.broken(
                    streaming(event("Hel"), b"data: " + line + b"\n\n", DONE)
                )
                self.assertIn("no JSON", answer.broke_off)
                self.assertEqual(answer.text, "Hel")

    async def test_a_stall_in_the_middle_keeps_what_came(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM, event("Hel"))
            await asyncio.sleep(30)

        answer = await self.broken(script, timeout_s=0.7)
        self.assertEqual(answer.text, "Hel")
        self.assertIn("0.7 s", answer.broke_off)
        self.assertLess(answer.total_s, 5)

    async def test_a_slow_drip_is_ended_by_the_whole_time(self) -> None:
        """A byte in time, for ever: no pause is ever long, and still it must end."""

        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM)
            while True:
                await connection.send(event("x"), pause=0.05)

        answer = await self.broken(script, timeout_s=0.7)
        self.assertGreater(len(answer.arrivals), 2)
        self.assertLess(answer.total_s, 5)

    async def test_a_5_mb_event_is_taken_and_an_endless_one_is_not(self) -> None:
        answer = await self.ask(streaming(event("x" * 3_000_000), *WHOLE))
        self.assertEqual((len(answer.text), answer.complete), (3_000_005, True))
        before = psutil.Process().memory_info().rss

        async def endless(connection: Connection) -> None:
            await connection.send(EVENT_STREAM, event("Hel"), b'data: {"choices": "')
            while True:
                await connection.send(b"x" * 1_000_000)

        answer = await self.broken(endless)
        self.assertIn("beyond all bounds", answer.broke_off)
        self.assertLess(psutil.Process().memory_info().rss - before, 100e6)

    async def test_an_endless_answer_is_left(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM)
            while True:
                await connection.send(event("x" * 100_000))

        answer = await self.broken(script, timeout_s=30)
        self.assertIn("beyond all bounds", answer.broke_off)
        self.assertLess(len(answer.text), 5_000_000)

    async def test_the_loop_lives_meanwhile(self) -> None:
        beats = 0

        async def heartbeat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart = asyncio.create_task(heartbeat())
        await self.ask(streaming(*[event("token ")] * 500, *WHOLE, pause=0.001))
        heart.cancel()
        self.assertGreater(beats, 10)

    async def test_cancellation_closes_the_connection(self) -> None:
        closed = asyncio.Event()

        async def script(connection: Connection) -> None:
            await connection.send(EVENT_STREAM, event("Hel"))
            try:
                while True:
                    await connection.send(b": still there\n\n", pause=0.02)
            except ConnectionError:
                closed.set()

        async with ScriptedServer(script) as server:
            task = asyncio.create_task(
                ChatClient(server.url).chat("m", "Hi", max_tokens=8, temperature=0, timeout_s=20)
            )
            await asyncio.sleep(0.3)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(closed.wait(), 10)


class RefusalTest(Case):
    async def test_each_status_has_its_class_and_the_servers_words(self) -> None:
        for status, error_class in (
            ("400 Bad Request", "INVALID"),
            ("401 Unauthorized", "AUTH"),
            ("403 Forbidden", "AUTH"),
            ("404 Not Found", "INVALID"),
            ("413 Too Large", "INVALID"),
            ("422 Unprocessable", "INVALID"),
            ("429 Too Many Requests", "BUSY"),
            ("500 Internal Server Error", "INTERNAL"),
            ("502 Bad Gateway", "INTERNAL"),
            ("503 Service Unavailable", "BUSY"),
        ):
            with self.subTest(status=status):
                error = await self.refused(
                    error_class, answering(status, b"the server's words \xff")
                )
                self.assertIn(status[:3], error.what)
                if error_class != "AUTH":  # where the words may repeat what was sent
                    self.assertIn("the server's words", error.what)

    async def test_a_redirect_is_not_followed(self) -> None:
        async with ScriptedServer(streaming(*WHOLE)) as elsewhere:
            for status in ("301 Moved", "302 Found", "307 Temporary", "308 Permanent"):
                location = f"Location: {elsewhere.url}/v1/chat/completions"
                error = await self.refused("DENIED", answering(status, b"", location))
                self.assertIn(status[:3], error.what)
                async with ScriptedServer(answering(status, b"", location)) as server:
                    with self.assertRaises(RigError):
                        await ChatClient(server.url).get_json("/v1/models")
                    self.assertFalse(await ChatClient(server.url).healthy())
            self.assertEqual(elsewhere.connections, 0)

    async def test_no_proxy_of_the_environment_is_used(self) -> None:
        async with ScriptedServer(answering("502 Bad Gateway")) as proxy:
            names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY")
            cleared = {"NO_PROXY": "", "no_proxy": ""}
            with mock.patch.dict(os.environ, dict.fromkeys(names, proxy.url) | cleared):
                answer = await self.ask(streaming(*WHOLE))
                async with ScriptedServer(answering("200 OK", b"{}")) as server:
                    self.assertEqual(await ChatClient(server.url).get_json("/health"), {})
            self.assertEqual((answer.text, proxy.connections), ("Hello", 0))

    async def test_what_is_no_model_server(self) -> None:
        page = b"<html><body>Welcome to nginx</body></html>"
        for script in (
            answering("200 OK", page, "Content-Type: text/html"),
            answering("200 OK", b'{"choices": [{"message": {"content": "not streamed"}}]}'),
            answering("200 OK", b""),
            answering("204 No Content", b""),
            streaming(b": only comments\n\n", DONE),
        ):
            await self.refused("DENIED", script)

    async def test_what_is_no_http(self) -> None:
        async def ssh(connection: Connection) -> None:
            await connection.send(b"SSH-2.0-OpenSSH_9.6\r\n")

        async def nothing(connection: Connection) -> None:
            connection.reset()

        async def silence(connection: Connection) -> None:
            del connection

        for script in (ssh, nothing, silence):
            await self.refused("UNREACHABLE", script)

    async def test_nobody_listens(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            client = ChatClient(url)
            with self.assertRaises(RigError) as caught:
                await client.chat("m", "Hi", max_tokens=1, temperature=0, timeout_s=5)
            self.assertEqual(caught.exception.error_class, "UNREACHABLE")
            with self.assertRaises(RigError) as caught:
                await client.get_json("/health")
            self.assertEqual(caught.exception.error_class, "UNREACHABLE")
            self.assertFalse(await client.healthy())

    async def test_a_server_that_never_answers(self) -> None:
        async def script(connection: Connection) -> None:
            await asyncio.sleep(30)

        begun = time.monotonic()
        error = await self.refused("TIMEOUT", script, timeout_s=0.5)
        self.assertLess(time.monotonic() - begun, 5)
        self.assertIn("max_tokens", error.next_step)

    async def test_an_endless_error_page_is_not_read_to_its_end(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n")
            while True:
                await connection.send(b"words " * 20_000)

        error = await self.refused("INTERNAL", script, timeout_s=30)
        self.assertLess(len(str(error)), 3000)


class GetTest(Case):
    async def get(self, script: Script, timeout_s: float = 5.0) -> dict[str, object]:
        async with ScriptedServer(script) as server:
            return await ChatClient(server.url).get_json("/v1/models", timeout_s)

    async def test_an_object(self) -> None:
        answer = await self.get(answering("200 OK", b'{"data": [{"id": "m"}]}'))
        self.assertEqual(answer, {"data": [{"id": "m"}]})

    async def test_anything_else_is_denied(self) -> None:
        for body in (b"", b"<html>", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
            with self.subTest(body=body[:10]), self.assertRaises(RigError) as caught:
                await self.get(answering("200 OK", body))
            self.assertEqual(caught.exception.error_class, "DENIED")

    async def test_another_status_is_named(self) -> None:
        with self.assertRaises(RigError) as caught:
            await self.get(answering("503 Loading", b"{}"))
        self.assertEqual(caught.exception.error_class, "UNREACHABLE")
        self.assertIn("503", caught.exception.what)

    async def test_an_endless_body_is_bounded_in_bytes(self) -> None:
        sent = 0

        async def script(connection: Connection) -> None:
            nonlocal sent
            await connection.send(b'HTTP/1.1 200 OK\r\n\r\n{"a": "')
            while True:
                await connection.send(b"x" * 100_000)
                sent += 100_000

        with self.assertRaises(RigError) as caught:
            await self.get(script, timeout_s=30)
        self.assertEqual(caught.exception.error_class, "DENIED")
        self.assertLess(sent, 30_000_000)

    async def test_a_slow_drip_is_bounded_in_time(self) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await connection.send(b" ", pause=0.02)

        with self.assertRaises(RigError) as caught:
            await self.get(script, timeout_s=0.5)
        self.assertEqual(caught.exception.error_class, "TIMEOUT")

    async def test_health_is_the_status_and_nothing_else(self) -> None:
        for status, body, healthy in (
            ("200 OK", b'{"status": "ok"}', True),
            ("200 OK", b"", True),  # vLLM's answer
            ("503 Service Unavailable", b'{"status": "ok"}', False),
            ("404 Not Found", b"", False),
        ):
            async with ScriptedServer(answering(status, body)) as server:
                self.assertIs(await ChatClient(server.url).healthy(), healthy)


if __name__ == "__main__":
    unittest.main()
