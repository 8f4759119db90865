"""A chat server that obeys a script to the millisecond, in a process of its own.

Token k of a request is sent `ttft_ms + k * tpot_ms` after the request came, whatever the client
does. Its faults are those of real servers, each as it looks on the wire. It counts prompt tokens
as `template_tokens + words * tokens_per_word`. Standard library only; knows no load generator.

    python3 -m tests.scripted_sse '{"ttft_ms": 100, "tpot_ms": 20}'    # prints {"port": N}

GET /requests lists what came; POST /script replaces the script.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import urllib.request
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Script:
    """How the server behaves. `fault` strikes every `every`-th chat request, from the first on
    where it is 1; `most_tokens` ends answers early, as a server does that ignores ignore_eos."""

    ttft_ms: float = 20.0
    tpot_ms: float = 2.0
    spread_ms: float = 0.0  # request i starts up to this much later, so that streams interleave
    template_tokens: int = 10
    tokens_per_word: float = 1.3
    most_prompt_tokens: int = 1_000_000  # longer prompts are cut without a word
    most_tokens: int = 1_000_000
    tokens_per_chunk: int = 1
    context_limit: int = 1_000_000
    refused_fields: tuple[str, ...] = ()
    cached_tokens: int = 0
    framing: str = "chunked"  # or "close", "length"
    crlf: bool = False
    fault: str = ""
    every: int = 1


@dataclass
class Ask:
    """One chat request: where it was read, and what stood in it."""

    number: int
    at: float
    body: dict[str, Any]
    prompt_tokens: int = 0
    sent: int = 0
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class ScriptedServer(asyncio.Protocol):
    """One connection; what all connections share lies on the class."""

    script = Script()
    seen: list[dict[str, Any]] = []

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.ask: Ask | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.out = transport
        self.loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self.ask.timers if self.ask is not None else []:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].decode("latin-1").lower()
            length = 0
            for line in head.split("\r\n"):
                if line.startswith("content-length:"):
                    length = int(line.partition(":")[2])
            if len(self.buffer) < end + 4 + length:
                return
            body = bytes(self.buffer[end + 4 : end + 4 + length])
            del self.buffer[: end + 4 + length]
            self.answer(head.split(" ", 2)[1], body)

    def answer(self, path: str, body: bytes) -> None:
        if path == "/requests":
            return self.whole(200, "application/json", json.dumps(self.seen).encode())
        if path == "/script":
            ScriptedServer.script = script_from(json.loads(body))
            self.seen.clear()
            return self.whole(200, "application/json", b"{}")
        ask = Ask(len(self.seen) + 1, self.loop.time(), json.loads(body))
        words = sum(len(message["content"].split()) for message in ask.body["messages"])
        script = self.script
        counted = script.template_tokens + round(words * script.tokens_per_word)
        ask.prompt_tokens = min(counted, script.most_prompt_tokens)
        self.seen.append({"at": ask.at, "words": words, "body": ask.body})
        self.ask = ask
        refused = [name for name in script.refused_fields if name in ask.body]
        if refused:
            words_of = {"error": {"message": f"extra fields not permitted: {refused[0]}"}}
            return self.whole(422, "application/json", json.dumps(words_of).encode())
        if ask.prompt_tokens + int(ask.body["max_tokens"]) > script.context_limit:
            text = f"maximum context length is {script.context_limit} tokens"
            return self.whole(
                400, "application/json", json.dumps({"error": {"message": text}}).encode()
            )
        self.stream(ask, script.fault if ask.number % script.every == 0 else "")

    def whole(self, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.out.write(head.encode() + body)

    def stream(self, ask: Ask, fault: str) -> None:
        if fault == "never answers":
            return
        if fault == "drops at once":
            return self.out.abort()
        if fault == "html":
            return self.whole(200, "text/html", b"<html><body>It works!</body></html>")
        if fault == "status 503":
            return self.whole(503, "application/json", b'{"error": "overloaded"}')
        if fault == "not http":
            self.out.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            return
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        if self.script.framing == "chunked":
            head += "Transfer-Encoding: chunked\r\n"
        self.out.write(f"{head}\r\n".encode())
        self.event({"role": "assistant", "content": ""})
        if fault == "usage only":
            return self.end(ask, fault, 0)
        script, start = self.script, ask.at + self.script.ttft_ms / 1000
        start += script.spread_ms / 1000 * (ask.number % 61) / 61
        total = min(int(ask.body["max_tokens"]), script.most_tokens)
        self.chunk = self.framed(encoded({"content": " word" * script.tokens_per_chunk}))
        self.at(ask, start, self.token, ask, fault, start, total)

    def at(self, ask: Ask, when: float, call: Any, *arguments: Any) -> None:
        ask.timers[:] = [self.loop.call_at(when, call, *arguments)]

    def token(self, ask: Ask, fault: str, start: float, total: int) -> None:
        """Send the next chunk at its own time: a late one does not move those after it."""
        if ask.sent and fault and self.strikes(ask, fault):
            return
        self.out.write(self.chunk)
        ask.sent += self.script.tokens_per_chunk
        when = start + ask.sent * self.script.tpot_ms / 1000
        if ask.sent >= total:
            self.end(ask, fault, total)
        else:
            self.at(ask, when, self.token, ask, fault, start, total)

    def strikes(self, ask: Ask, fault: str) -> bool:
        """Do the fault; returns whether the stream is over with it."""
        if fault == "stalls":
            return True
        if fault == "drops":
            self.out.abort()
            return True
        if fault == "error event":
            self.raw(b'data: {"error": {"message": "out of pages", "code": 500}}\n\n')
            self.raw(b"data: [DONE]\n\n")
            self.out.write(b"0\r\n\r\n")
            return True
        if fault == "no json":
            self.raw(b"data: {this is no json\n\n")
            return True
        if fault == "bad chunk":
            self.out.write(b"zz\r\nwhat\r\n")
            return True
        if fault == "huge line" and ask.sent == self.script.tokens_per_chunk:
            self.raw(b'data: {"choices":[{"delta":{"content":"')
            for _ in range(9):  # more than anybody should keep
                self.raw(b"x" * 1_000_000)
        if fault == "split utf8":
            text = ": a comment\n\ndata: " + json.dumps(
                {"choices": [{"delta": {"content": "Zürich 東京 😀"}}]}, ensure_ascii=False
            )
            data = f"{text}\n\n".encode()
            for place in range(0, len(data), 3):
                self.raw(data[place : place + 3])
            ask.sent += 1
        if fault == "one byte":
            for byte in self.chunk:
                self.out.write(bytes([byte]))
            ask.sent += 1
        return False

    def event(self, delta: dict[str, Any], **more: Any) -> None:
        self.out.write(self.framed(encoded(delta, **more)))

    def raw(self, data: bytes) -> None:
        self.out.write(self.framed(data))

    def framed(self, data: bytes) -> bytes:
        if self.script.crlf:
            data = data.replace(b"\n", b"\r\n")
        return b"%x\r\n%b\r\n" % (len(data), data) if self.script.framing == "chunked" else data

    def end(self, ask: Ask, fault: str, total: int) -> None:
        usage: dict[str, Any] = {"prompt_tokens": ask.prompt_tokens, "completion_tokens": total}
        if self.script.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": self.script.cached_tokens}
        if fault != "no finish":
            self.event({}, finish="length")
        if fault != "no usage":
            self.raw(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.raw(b"data: [DONE]\n\n")
        if fault == "no end":
            return
        if self.script.framing == "chunked":
            self.out.write(b"0\r\n\r\n")
        else:
            self.out.close()


def encoded(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event, in the shape and about the size of a real server's."""
    event = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1764000000,
        "model": "scripted",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def script_from(orders: dict[str, Any]) -> Script:
    known = {item.name for item in fields(Script)}
    assert set(orders) <= known, sorted(set(orders) - known)
    return Script(**{k: tuple(v) if isinstance(v, list) else v for k, v in orders.items()})


class ScriptedProcess:
    """The server in a process of its own, as a context manager: `url`, `obey`, `requests`."""

    def __init__(self, script: Script | None = None, certificate: Path | None = None) -> None:
        self._orders = json.dumps(asdict(script or Script()))
        self._certificate = certificate
        self.port = 0

    def __enter__(self) -> ScriptedProcess:
        argv = [sys.executable, "-m", "tests.scripted_sse", self._orders]
        argv += [str(self._certificate)] if self._certificate else []
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        self.port = json.loads(self._process.stdout.readline())["port"]
        return self

    def __exit__(self, *_unused: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        scheme, host = ("https", "localhost") if self._certificate else ("http", "127.0.0.1")
        return f"{scheme}://{host}:{self.port}"

    def obey(self, **orders: Any) -> None:
        """Replace the script and forget what came so far."""
        self._fetch("/script", json.dumps(orders).encode())

    def requests(self) -> list[dict[str, Any]]:
        """Every chat request since the last script: `at` (server's clock), `words` and `body`."""
        return list(json.loads(self._fetch("/requests", None)))

    def _fetch(self, path: str, data: bytes | None) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}{path}", data, timeout=10) as answer:
            return bytes(answer.read())


async def serve(script: Script, certificate: str | None) -> None:
    """Listen on a free loopback port, say which, and serve until killed."""
    ScriptedServer.script = script
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.get_running_loop().create_server(
        ScriptedServer, "127.0.0.1", 0, ssl=context, backlog=1024
    )
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        serve(script_from(json.loads(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else None)
    )
