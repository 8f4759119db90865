"""A chat server that plays a model, well or badly, in every case of the capability probe.

It reads the request as a server does: tools, schema, thinking switch, picture, length. What it
plays is said by a `Conduct`; each bad one is a real server's. Standard library only; it knows no
probe and shares no code with one (the picture is decoded here anew).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEMPLATE_TOKENS = 10
PICTURE_TOKENS = 64
CITIES = ("Oslo", "Tokyo", "Lima")
_NAMES_OF_COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 160, 60),
    "blue": (0, 0, 255),
    "yellow": (255, 225, 0),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}


@dataclass
class Conduct:
    """How the server behaves. The first value of each choice is the good one.

    plain: good, error, html, error in 200, broken
    tools: good, dropped, in text, prose, other tool, invented, refused, no id, object arguments,
    bad json, one of two, twice, always, silent word, never asks, error in 200
    schema: enforced, obeyed, dropped, refused, in prompt, with thinking only, cut, thinks too long
    thinking: known, ignored, refused
    picture: seen, dropped, misread, refused, warms up, always 422
    greedy: same, varies, empty
    above: refused, cut, taken, empty, other words, broken
    """

    plain: str = "good"
    tools: str = "good"
    schema: str = "enforced"
    thinking: str = "known"
    picture: str = "seen"
    greedy: str = "same"
    above: str = "refused"
    build: str = "1"  # another build answers greedy prompts in other words
    context_limit: int = 400
    limit_listed: bool = False
    reads_at_most: int = 10**9  # longer prompts are cut without a word
    tokens_per_word: float = 1.0
    counts_tokens: bool = True
    modalities: list[str] | None = None
    pause_s: float = 0.0
    pause_at: str = ""  # only prompts that hold this wait


@dataclass
class Reply:
    """A status, and a message or a whole body."""

    status: int = 200
    content: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    finish: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 8
    body: dict[str, Any] | None = None
    raw: bytes = b""


def refusal(words: str, status: int = 400) -> Reply:
    return Reply(status, body={"error": {"message": words, "type": "invalid_request_error"}})


class ScriptedModel:
    """The server on a free loopback port, in threads of this process, as a context manager."""

    def __init__(self, **conduct: Any) -> None:
        self.conduct = Conduct(**conduct)
        self.seen: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._pictures = 0

    def __enter__(self) -> ScriptedModel:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                entry: dict[str, Any] = {"id": "scripted", "object": "model"}
                if model.conduct.limit_listed:
                    entry["max_model_len"] = model.conduct.context_limit
                if model.conduct.modalities is not None:
                    entry["modalities"] = model.conduct.modalities
                self.send(200, json.dumps({"object": "list", "data": [entry]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.seen.append(body)
                reply = model.reply(body)
                self.send(reply.status, reply.raw or json.dumps(model.body_of(reply)).encode())

            def send(self, status: int, data: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client left, as a cancelled probe does

            def log_message(self, *_unused: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        return self

    def __exit__(self, *_unused: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def obey(self, **conduct: Any) -> None:
        """Another conduct from now on; what came so far is forgotten."""
        self.conduct = Conduct(**conduct)
        self.seen.clear()
        self._pictures = 0

    def body_of(self, reply: Reply) -> dict[str, Any]:
        if reply.body is not None:
            return reply.body
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.calls:
            message["tool_calls"] = reply.calls
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        choice = {"index": 0, "message": message, "finish_reason": reply.finish}
        body: dict[str, Any] = {"id": "chatcmpl-1", "model": "scripted", "choices": [choice]}
        if self.conduct.counts_tokens:
            body["usage"] = {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
            }
        return body

    def reply(self, body: dict[str, Any]) -> Reply:
        """What comes back for one request."""
        conduct, text, picture = self.conduct, *_read_content(body)
        if conduct.pause_s and conduct.pause_at in text:
            time.sleep(conduct.pause_s)
        self._pictures += picture is not None
        early = _early_reply(conduct, body, self._pictures if picture is not None else 0)
        if early is not None:
            return early
        tokens = self._prompt_tokens(body, text, picture)
        room = int(body["max_tokens"])
        if tokens + room > conduct.context_limit and conduct.above != "taken":
            if conduct.above != "cut":
                return _above_limit(conduct, tokens + room, tokens)
            tokens = conduct.context_limit // 2
        reply = self._answer(body, text, picture)
        reply.prompt_tokens = min(tokens, conduct.reads_at_most)
        reply.completion_tokens = min(reply.completion_tokens, room)
        return reply

    def _prompt_tokens(self, body: dict[str, Any], text: str, picture: bytes | None) -> int:
        conduct = self.conduct
        tokens = TEMPLATE_TOKENS + int(len(text.split()) * conduct.tokens_per_word)
        if body.get("tools") and conduct.tools != "dropped":
            tokens += len(json.dumps(body["tools"])) // 4
        if picture is not None and conduct.picture != "dropped":
            tokens += PICTURE_TOKENS
        if body.get("response_format") and conduct.schema == "in prompt":
            tokens += len(json.dumps(body["response_format"])) // 4
        return tokens + 3 * (_thinks(body) and conduct.thinking == "known")

    def _answer(self, body: dict[str, Any], text: str, picture: bytes | None) -> Reply:
        conduct = self.conduct
        if body["max_tokens"] == 1:
            return Reply(content="It", finish="length", completion_tokens=1)
        if body.get("tools"):
            return _with_tools(conduct, body["tools"], text)
        if body.get("response_format"):
            return _with_schema(conduct, body, text)
        if picture is not None:
            return _with_picture(conduct, picture)
        code_word = re.search(r"code word is (\w+)\.", text)
        if code_word:
            return Reply(content=f"{code_word[1]}.", completion_tokens=5)
        if body["max_tokens"] < 64:
            return Reply(content="Hello.")
        if conduct.greedy == "empty":
            return Reply(content="", completion_tokens=0)
        salt = next(self._numbers) if conduct.greedy == "varies" else ""
        digest = hashlib.sha256(f"{text}{conduct.build}{salt}".encode()).hexdigest()
        return Reply(content=f"On that: {digest}", completion_tokens=30)


def _read_content(body: dict[str, Any]) -> tuple[str, bytes | None]:
    """The user's text, and the picture's bytes if there is one."""
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content, None
    texts = [part["text"] for part in content if part["type"] == "text"]
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    data = base64.b64decode(pictures[0].partition(",")[2]) if pictures else None
    return " ".join(texts), data


def _thinks(body: dict[str, Any]) -> bool:
    return bool(body.get("chat_template_kwargs", {}).get("enable_thinking"))


def _early_reply(conduct: Conduct, body: dict[str, Any], pictures: int) -> Reply | None:
    """What a server says before the model is asked. pictures: 1 for the first one that came."""
    if conduct.plain == "error":
        return refusal("the engine is dead", 500)
    if conduct.plain == "html":
        return Reply(raw=b"<html>welcome</html>")
    if conduct.plain == "error in 200":
        return Reply(body={"error": {"message": "out of memory"}})
    if "chat_template_kwargs" in body and conduct.thinking == "refused":
        return Reply(422, body={"detail": "Unexpected fields in the request: chat_template_kwargs"})
    if body.get("tools") and conduct.tools == "refused":
        return refusal('"auto" tool choice requires --enable-auto-tool-choice')
    if body.get("tools") and conduct.tools == "error in 200":
        return Reply(body={"error": {"message": "tools are not supported by this model"}})
    if body.get("response_format") and conduct.schema == "refused":
        return refusal("response_format is not supported")
    if pictures and conduct.picture == "refused":
        return refusal("this model takes at most 0 images")
    if pictures and conduct.picture == "always 422":
        return Reply(422, body={"detail": "the image cannot be processed"})
    if pictures == 1 and conduct.picture == "warms up":
        return Reply(422, body={"detail": "the processor is warming up"})
    return None


def _above_limit(conduct: Conduct, asked: int, tokens: int) -> Reply:
    """What a server does with more than its context holds."""
    match conduct.above:
        case "empty":
            return Reply(content="", finish="length", prompt_tokens=tokens, completion_tokens=0)
        case "other words":
            return refusal("bad request")
        case "broken":
            return refusal("internal failure", 500)
        case _:
            limit = conduct.context_limit
            return refusal(f"the maximum context length is {limit} tokens, {asked} were asked for")


def _call(name: str, city: str, number: int = 1, **changes: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"city": city})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return call | changes


def _with_tools(conduct: Conduct, tools: list[dict[str, Any]], text: str) -> Reply:
    """A model that is good at calling tools, and the ways to be bad at it."""
    names = [tool["function"]["name"] for tool in tools]
    right = next((n for n in names if ("time" in n) == ("time is it" in text)), names[0])
    cities = [city for city in CITIES if city in text]
    needed = bool(cities) or "weather" in text
    calls = [_call(right, city, i) for i, city in enumerate(cities)]
    words = "It is 42." if not needed else "" if cities else "Which city do you mean?"
    match conduct.tools:
        case "dropped":
            return Reply(content="42 it is." if not needed else "Which city? I cannot look it up.")
        case "prose" if cities:
            return Reply(content="It is sunny there.")
        case "in text" if cities:
            return Reply(content=f'<tool_call>{{"name": "{right}"}}</tool_call>')
        case "other tool" if cities:
            calls = [_call(names[0] if right != names[0] else names[-1], c) for c in cities]
        case "invented" if not calls and needed:
            calls = [_call(right, "Paris")]
        case "always" if not calls:
            calls = [_call(names[0], "Paris")]
        case "never asks" if not calls:
            words = "It is sunny."
        case "silent word" if not calls:
            words = ""
        case "no id":
            calls = [call | {"id": ""} for call in calls]
        case "object arguments":
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        case "bad json":
            for call in calls:
                call["function"]["arguments"] = '{"city": '
        case "one of two":
            calls = calls[:1]
        case "twice":
            calls = calls + calls[:1]
    if calls:
        return Reply(content=None, calls=calls, finish="tool_calls")
    return Reply(content=words)


def _with_schema(conduct: Conduct, body: dict[str, Any], text: str) -> Reply:
    """A grammar, a model that does as it is told, or neither."""
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    wants_json = "JSON object" in text
    thinks = _thinks(body) and conduct.thinking == "known"
    reasoning = "The user wants something." if thinks else ""
    fitting = {
        k: v.get("enum", ["Paris" if k == "city" else "Seine"])[0] for k, v in properties.items()
    }
    match conduct.schema:
        case "cut":
            return Reply(content='{"co', finish="length")
        case "thinks too long" if thinks:
            return Reply(content=None, reasoning="Let me see. " * 20, finish="length")
        case "dropped":
            return Reply(content="```json\n{}\n```" if wants_json else "The sea is wide.")
        case "obeyed" if not wants_json:
            return Reply(content="The sea is wide.", reasoning=reasoning)
        case "with thinking only" if not thinks and not wants_json:
            return Reply(content="The sea is wide.")
    return Reply(content=json.dumps(fitting), reasoning=reasoning)


def _with_picture(conduct: Conduct, picture: bytes) -> Reply:
    upper, lower = halves_of_png(picture)
    if conduct.picture == "misread":
        upper, lower = lower, upper
    if conduct.picture == "dropped":
        return Reply(content="I see no picture.")
    return Reply(content=f"{upper.title()}, {lower}.")


def halves_of_png(data: bytes) -> tuple[str, str]:
    """The names of the colours at the top and at the bottom of an RGB PNG without filters."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, packed, width, height = 8, b"", 0, 0
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        chunk = data[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert check == zlib.crc32(kind + chunk), "a damaged chunk"
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert (depth, colour) == (8, 2)
        elif kind == b"IDAT":
            packed += chunk
        place += 12 + length
    pixels = zlib.decompress(packed)
    row = 1 + 3 * width
    assert len(pixels) == row * height
    return _named(pixels[1:4]), _named(pixels[-3:])


def _named(pixel: bytes) -> str:
    def distance(name: str) -> int:
        return sum((a - b) ** 2 for a, b in zip(_NAMES_OF_COLOURS[name], pixel, strict=True))

    return min(_NAMES_OF_COLOURS, key=distance)
