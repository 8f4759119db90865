"""The load client against real sockets: framing, server-sent events, faults, reuse, TLS."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import random
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forge.parts.boundaries.load_client import LoadClient, LoadTarget
from forge.parts.boundaries.load_events import (
    StreamRecord,
    is_plain_text_event,
    take_load_event,
)
from forge.parts.ground.errors import RigError
from tests.scripted_sse import Script, ScriptedProcess

BODY = json.dumps({"messages": [{"role": "user", "content": "one two"}], "max_tokens": 6}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str | None, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
GOOD = (said("a"), said("b"), said(None, "stop"), USAGE, b"data: [DONE]\n\n")


class CannedServer:
    """Answers each request with the next list of pieces, each written on its own; None aborts."""

    def __init__(self, answers: Iterable[list[bytes | None]]) -> None:
        self._answers = list(answers)
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> CannedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_unused: object) -> None:
        self._server.close()
        if self._tasks:  # they end with their client
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().rpartition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                for piece in self._answers.pop(0):
                    if piece is None:
                        writer.transport.abort()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def asked(url: str, times: int = 1, **options: float) -> list[StreamRecord]:
    client = LoadClient(LoadTarget.from_url(url), **options)  # type: ignore[arg-type]
    try:
        return [await client.ask(BODY) for _ in range(times)]
    finally:
        client.close()


class FramingTest(unittest.IsolatedAsyncioTestCase):
    """Whatever the bytes are cut into, the same is understood."""

    async def one(self, *pieces: bytes | None, **options: float) -> StreamRecord:
        async with CannedServer([list(pieces)]) as server:
            return (await asked(server.url, **options))[0]

    def assert_good(self, record: StreamRecord) -> None:
        self.assertEqual(record.fault, "")
        self.assertEqual((record.prompt_tokens, record.completion_tokens), (7, 2))
        self.assertEqual(len(record.arrivals), 2)
        self.assertEqual(record.finish_reason, "stop")
        self.assertLess(record.sent, record.arrivals[0])
        self.assertLessEqual(record.arrivals[-1], record.ended)

    async def test_in_one_piece_and_in_single_bytes(self) -> None:
        whole = HEAD + chunked(*GOOD)
        self.assert_good(await self.one(whole))
        self.assert_good(await self.one(*(whole[i : i + 1] for i in range(len(whole)))))

    async def test_cut_anywhere(self) -> None:
        whole = HEAD + chunked(*GOOD)
        for place in range(1, len(whole), 7):
            with self.subTest(place=place):
                self.assert_good(await self.one(whole[:place], whole[place:]))

    async def test_events_and_chunks_need_not_agree(self) -> None:
        stream = b"".join(GOOD)
        for size in (1, 2, 5, 17, 64, 1000):
            pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
            with self.subTest(size=size):
                self.assert_good(await self.one(HEAD + chunked(*pieces)))

    async def test_line_ends_comments_names_and_lines_of_one_event(self) -> None:
        stream = b": hello\n\nevent: message\nid: 3\n" + b"".join(GOOD)
        self.assert_good(await self.one(HEAD + chunked(stream)))
        self.assert_good(await self.one(HEAD + chunked(stream.replace(b"\n", b"\r\n"))))
        split = said("a").replace(b", ", b",\ndata: ")
        self.assertGreater(split.count(b"data:"), 2)
        self.assert_good(await self.one(HEAD + chunked(split, *GOOD[1:])))

    async def test_chunk_extensions_trailers_and_interim_answers(self) -> None:
        body = chunked(*GOOD).replace(b"\r\ndata", b";name=value\r\ndata")
        body = body.removesuffix(b"\r\n") + b"X-Sum: 1\r\n\r\n"
        self.assert_good(await self.one(b"HTTP/1.1 103 Early Hints\r\n\r\n", HEAD + body))

    async def test_bodies_with_a_length_and_until_the_end(self) -> None:
        stream = b"".join(GOOD)
        kind = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self.assert_good(
            await self.one(b"%bContent-Length: %d\r\n\r\n" % (kind, len(stream)), stream)
        )
        self.assert_good(await self.one(kind + b"\r\n", stream))
        no_done = stream.removesuffix(GOOD[-1])
        async with CannedServer([[kind + b"Connection: close\r\n\r\n", no_done, None]]) as server:
            record = (await asked(server.url))[0]
        self.assertNotIn("finish", record.fault)

    async def test_last_event_without_its_empty_line(self) -> None:
        usage = USAGE.removesuffix(b"\n")
        self.assert_good(await self.one(HEAD + chunked(*GOOD[:3], usage)))

    async def test_done_is_enough_where_the_body_never_ends(self) -> None:
        endless = HEAD + chunked(*GOOD).removesuffix(b"0\r\n\r\n")
        self.assert_good(await self.one(endless))

    async def test_roles_thoughts_and_text_in_the_finishing_chunk(self) -> None:
        role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        thought = event(choices=[{"delta": {"reasoning_content": "hm"}, "finish_reason": None}])
        record = await self.one(HEAD + chunked(role, thought, said("b", "stop"), USAGE))
        self.assert_good(record)

    async def test_chunks_read_together_are_told_from_chunks_sent_together(self) -> None:
        apart = await self.one(HEAD + chunked(*GOOD))
        together = await self.one(HEAD + chunked(GOOD[0] + GOOD[1], *GOOD[2:]))
        self.assertEqual((apart.coalesced, together.coalesced), (1, 0))

    async def test_bytes_that_are_no_answer(self) -> None:
        cases: dict[str, list[bytes | None]] = {
            "does not speak HTTP": [b"SSH-2.0-OpenSSH_9.9\r\n"],
            "does not speak": [b"HTTP/2 200\r\n\r\n"],
            "head is beyond": [b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 10_000],
            "not chunked": [HEAD + b"zz\r\nwhat\r\n"],
            "not chunked as": [HEAD + b"-5\r\nwhat\r\n"],
            "not chunked as announced": [HEAD + b"x" * 400],
            "before an answer": [None],
            "broke before any content": [HEAD, None],
            "broke in mid-stream": [HEAD, chunked(said("a"))[:-5], None],
            "beyond all bounds": [HEAD + b"800000\r\n" + b"data: " + b"x" * 8_400_000],
            "no JSON": [HEAD + chunked(b"data: {oops\n\n")],
            "no object": [HEAD + chunked(b"data: [1]\n\n")],
            "out of pages": [HEAD + chunked(said("a"), event(error={"message": "out of pages"}))],
            "without a finish": [HEAD + chunked(said("a"), USAGE)],
            "no usage": [HEAD + chunked(said("a"), said(None, "stop"))],
            "no content": [HEAD + chunked(said(None, "stop"), USAGE)],
        }
        for words, pieces in cases.items():
            with self.subTest(words=words):
                record = await self.one(*pieces, stall_s=5)
                self.assertFalse(record.completed)
                self.assertIn(words, record.fault)

    async def test_refusals_keep_the_servers_words(self) -> None:
        said_so = b'{"error": "too\\nmany"}'
        head = b"HTTP/1.1 429 X\r\nContent-Type: application/json\r\n"
        record = await self.one(b"%bContent-Length: %d\r\n\r\n" % (head, len(said_so)), said_so)
        self.assertEqual(record.http_status, 429)
        self.assertIn("429", record.fault)
        self.assertIn("many", record.fault)
        page = b"<html>" + b"x" * 100_000
        html = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
        record = await self.one(html, page, None)
        self.assertIn("text/html", record.fault)
        self.assertLess(len(record.fault), 500)

    async def test_reuse_and_a_kept_connection_that_was_closed(self) -> None:
        good: list[bytes | None] = [HEAD + chunked(*GOOD)]
        async with CannedServer([good, good, [None], good]) as server:
            client = LoadClient(LoadTarget.from_url(server.url))
            faults = [(await client.ask(BODY)).fault for _ in range(2)]
            self.assertEqual((faults, server.connections), (["", ""], 1))
            # The third request meets a close: it goes again, is counted, and does not fail.
            third = await client.ask(BODY)
            client.close()
        self.assertEqual((third.fault, client.resent, server.connections), ("", 1, 2))

    async def test_silence_and_slowness_end_a_request(self) -> None:
        async def pieces(every_s: float) -> str:
            left = asyncio.Event()

            async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                writer.write(HEAD)
                gone = asyncio.ensure_future(reader.read(1))
                while not gone.done():
                    writer.write(b"4\r\n: x\n\r\n")
                    await asyncio.wait({gone}, timeout=every_s)
                writer.close()
                left.set()

            server = await asyncio.start_server(slow, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            record = (await asked(f"http://127.0.0.1:{port}", stall_s=0.6, total_s=1.5))[0]
            await left.wait()
            server.close()
            return record.fault

        self.assertIn("no byte for 0.6 s", await pieces(60))
        self.assertIn("no end within 1.5 s", await pieces(0.1))

    async def test_nobody_listens(self) -> None:
        async with CannedServer([]) as server:
            url = server.url
        record = (await asked(url))[0]
        self.assertIn("cannot connect", record.fault)


class EventTest(unittest.TestCase):
    """The short way must never say what the long way would not."""

    TEXTS = (
        "word",
        "",
        None,
        ' "content":"x"',
        '"finish_reason":null',
        '\\"error\\"',
        '{"usage":{"prompt_tokens":3}}',
        "Zürich 東京 😀",
        "\n\r\t\x00",
        '"',
        "\\",
        "_tokens",
        "[DONE]",
    )

    def events(self) -> Iterable[bytes]:
        source = random.Random(7)
        for _ in range(20_000):
            delta: dict[str, object] = {}
            for key in ("role", "content", "reasoning_content", "tool_calls"):
                if source.random() < 0.6:
                    delta[key] = source.choice(self.TEXTS)
            choice: dict[str, object] = {"index": 0, "delta": delta}
            if source.random() < 0.8:
                choice["finish_reason"] = source.choice((None, None, None, "stop", "length"))
            if source.random() < 0.3:
                choice["logprobs"] = source.choice((None, {"content": [{"token": "x"}]}))
            fields: dict[str, object] = {"id": source.choice(self.TEXTS), "choices": [choice]}
            if source.random() < 0.2:
                fields["choices"] = []
            if source.random() < 0.2:
                fields["error"] = source.choice((None, "bad", {"message": "bad"}))
            if source.random() < 0.2:
                fields["usage"] = source.choice((None, {"prompt_tokens": 3}))
            items = list(fields.items())
            source.shuffle(items)
            spaced = source.choice(((",", ":"), (", ", ": ")))
            yield json.dumps(
                dict(items), separators=spaced, ensure_ascii=source.random() < 0.5
            ).encode()

    def test_the_short_way_agrees_with_the_long_way(self) -> None:
        short = 0
        for payload in self.events():
            if not is_plain_text_event(payload):
                continue
            short += 1
            record = StreamRecord()
            self.assertTrue(take_load_event(record, payload), payload)
            self.assertEqual(record, StreamRecord(), payload)
        self.assertGreater(short, 500)

    def test_chunks_of_real_servers_go_the_short_way(self) -> None:
        shapes = (
            b'{"id":"c-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
            b'[{"index":0,"delta":{"content":" a"},"logprobs":null,"finish_reason":null}]}',
            b'{"choices":[{"finish_reason":null,"index":0,"delta":{"content":" a"}}],"created":1,'
            b'"id":"c","model":"m","object":"chat.completion.chunk"}',
            b'{"id": "r", "choices": [{"delta": {"content": "a"}, "finish_reason": null}]}',
        )
        for shape in shapes:
            self.assertTrue(is_plain_text_event(shape), shape)


class TargetTest(unittest.TestCase):
    def test_addresses(self) -> None:
        target = LoadTarget.from_url("http://127.0.0.1:8000/v1/")
        self.assertEqual((target.port, target.path), (8000, "/v1/chat/completions"))
        self.assertEqual(LoadTarget.from_url("https://a.example/x").path, "/x/v1/chat/completions")
        self.assertEqual(LoadTarget.from_url("https://a.example").port, 443)
        for bad in ("ftp://a", "http://", "http://u:p@a", "http://a?x=1", "http://a:x", "a:80"):
            with self.subTest(bad=bad), self.assertRaises(RigError) as caught:
                LoadTarget.from_url(bad)
            self.assertEqual(caught.exception.error_class, "INVALID")


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """A fresh certificate for localhost: (certificate with key, certificate alone)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    both, alone = folder / "both.pem", folder / "alone.pem"
    both.write_bytes(private + public)
    alone.write_bytes(public)
    return both, alone


class TlsTest(unittest.TestCase):
    def test_a_certificate_is_checked(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            both, alone = own_certificate(Path(place))
            with ScriptedProcess(Script(ttft_ms=5, tpot_ms=1), certificate=both) as server:
                stranger = asyncio.run(asked(server.url))[0]
                with mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(alone)}):
                    trusted = asyncio.run(asked(server.url, times=2))
        self.assertIn("cannot connect", stranger.fault)
        self.assertEqual([record.fault for record in trusted], ["", ""])
        self.assertEqual([len(record.arrivals) for record in trusted], [6, 6])


class ScriptedFaultTest(unittest.IsolatedAsyncioTestCase):
    """Each fault of a whole server: what is said of it, and that the next request is unharmed."""

    FAULTS = {
        "stalls": "no byte for 1 s in mid-stream",
        "never answers": "no byte for 1 s",
        "drops": "broke in mid-stream",
        "html": "text/html",
        "status 503": "503",
        "not http": "does not speak HTTP",
        "error event": "out of pages",
        "no json": "no JSON",
        "bad chunk": "not chunked",
        "huge line": "beyond all bounds",
        "usage only": "no content",
        "no usage": "no usage",
        "no finish": "without a finish reason",
    }
    HARMLESS = ("split utf8", "one byte", "no end")

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = cls.enterClassContext(ScriptedProcess())

    async def pair(self, **script: object) -> list[StreamRecord]:
        self.server.obey(ttft_ms=5, tpot_ms=1, every=2, **script)
        first, second, third = await asked(self.server.url, times=3, stall_s=1)
        self.assertEqual((first.fault, third.fault), ("", ""))
        return [first, second]

    async def test_faults(self) -> None:
        for fault, words in self.FAULTS.items():
            with self.subTest(fault=fault):
                _, second = await self.pair(fault=fault)
                self.assertFalse(second.completed)
                self.assertIn(words, second.fault)

    async def test_a_drop_on_a_kept_connection_is_counted_and_goes_again(self) -> None:
        self.server.obey(ttft_ms=5, tpot_ms=1, every=2, fault="drops at once")
        client = LoadClient(LoadTarget.from_url(self.server.url))
        records = [await client.ask(BODY) for _ in range(2)]
        client.close()
        self.assertEqual(([record.fault for record in records], client.resent), (["", ""], 1))
        self.server.obey(fault="drops at once")
        fresh = (await asked(self.server.url))[0]
        self.assertEqual(fresh.fault, "the connection closed before an answer")

    async def test_what_only_looks_like_a_fault(self) -> None:
        for fault in self.HARMLESS:
            with self.subTest(fault=fault):
                first, second = await self.pair(fault=fault)
                self.assertEqual(second.fault, "")
                self.assertEqual(second.completion_tokens, first.completion_tokens)

    async def test_other_framings(self) -> None:
        shapes: tuple[dict[str, object], ...] = ({"framing": "close"}, {"crlf": True})
        for shape in shapes:
            with self.subTest(shape=shape):
                first, second = await self.pair(**shape)
                self.assertEqual((len(first.arrivals), second.fault), (6, ""))


class FastLoopTest(unittest.TestCase):
    """The same under whatever loop the generator would take here."""

    def test_with_the_fast_loop(self) -> None:
        from forge.parts.boundaries.load_generator import fast_loop_factory

        async def work() -> list[StreamRecord]:
            async with CannedServer([[HEAD + chunked(*GOOD)]] * 3) as server:
                return await asked(server.url, times=3)

        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            records = runner.run(work())
        self.assertEqual([record.fault for record in records], ["", "", ""])


if __name__ == "__main__":
    unittest.main()
