# Built from forge/suites/local_jax_cpu_2b.py by `python3 -m forge.build`: edit it there.

"""The suite of local-jax-cpu-2b: `python3 -m unittest test_server` in the rig's folder.

Drives the built server.py beside it through a real MCP client, offline, against a fake engine.
Needs what the server needs, ml_dtypes and tokenizers, and no JAX. Writes to temporary folders only.
"""

# Contents, by line:
#    74 suites / fake_engine: A `transformers serve` that obeys a script: the fake at the edge of …
#   384 suites / fake_jax_server: A `jax_server.py` that obeys a script: the fake at the edge of …
#   558 suites / raw_stdio: A server process spoken to line by line, for what a proper client …
#   684 suites / witness: Witnesses of what really is so on this computer: they ask the system, …
#   717 suites / rig_case: What every suite stands on: a copy of the built rig in a temporary …
#  1054 suites / answer_faults: One model server, every way in which an answer can go wrong: the …
#  1234 suites / catalogue: The tool list as clients get it: names, words, hints, schemas, and …
#  1351 suites / bad_input: The attack corpus over every tool and every parameter of the live …
#  1564 suites / command_line: server.py as a command: what the make targets call goes through the …
#  1670 suites / diagnosing: Diagnosis on the rig: its own failed starts, pasted logs, and …
#  1773 suites / folders: Model folders that must not be served: what each refusal says, and that …
#  1967 suites / full_disk: A state folder that takes no byte: no intent on the disk, no act; and …
#  2056 suites / keyed_server: A model server that asks for a key: which lies in one file, and is …
#  2096 suites / leaving: How the server goes: at once, with the right status, no attached child …
#  2220 suites / measuring: Measuring on the rig: from run_benchmark to the picture, the plan on …
#  2342 suites / outgoing: What leaves the rig: JSON-RPC and nothing else on its output, no secret …
#  2474 suites / read_only: RIG_READ_ONLY=1: what changes something is refused at the call, not …
#  2547 suites / serving: The way of a model through its tools: serve, wait, ask, measure, look, …
#  2753 suites / settings_faults: tpu.env at fault, in every way: the server comes up, says what …
#  2891 suites / start_faults: Every way in which a start can fail: its class, its reason, the …
#  2997 suites / jax_rig: What is the JAX engine's own in a rig: its flags, its key, its refusals, …
#  3166 suites / truth: What the records say against what is so: dead processes, strangers, …
#  3393 suites / local_jax_cpu_2b: The suite of local-jax-cpu-2b: `python3 -m unittest …

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import queue
import shlex
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import psutil
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import Tool

# ── suites / fake_engine ──────────────────────────────────────────────────────────────────────────
# A `transformers serve` that obeys a script: the fake at the edge of a rig's own code.
#
# A package of that name on PYTHONPATH, standard library only, that speaks as the real server of
# release 5.24 does (no [DONE], a finish chunk with usage, the first chunk has the role alone) and
# shows each fault that a test asks for. Knows nothing of the rig that starts it.

FAKE_PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "gguf": "0.19.0",
    "uvicorn": "0.54.0",
    "fastapi": "0.165.0",
}

# The program itself. `control.json` beside it is read anew at the start and at every request.
FAKE_SERVE_SOURCE = r"""
import http.server, json, os, pathlib, signal, sys, time

HERE = pathlib.Path(__file__).resolve().parents[2]


def control():
    try:
        return json.loads((HERE / "control.json").read_text())
    except (OSError, ValueError):
        return {}


def note(name, value):
    with (HERE / name).open("a") as file:
        file.write(json.dumps(value) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_arguments):
        pass

    def reply(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.reply(control().get("health", 200), {"status": "ok"})
        if self.path == "/v1/models":
            return self.reply(200, {"object": "list", "data": [{"id": MODEL}]})
        return self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path != "/v1/chat/completions":
            return self.reply(404, {"detail": "Not Found"})
        note("requests.jsonl", {"body": body, "headers": dict(self.headers)})
        fault = control().get("fault", "")
        if fault.startswith("status "):
            return self.reply(int(fault.split()[1]), {"error": control().get("words", "no")})
        if not body.get("stream") and not fault:
            return self.reply(200, self.whole(body))
        self.send_response(200)
        kind = "text/html" if fault == "html" else "text/event-stream"
        self.send_header("Content-Type", kind)
        self.end_headers()
        try:
            self.stream(body, fault)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def chunk(self, delta, finish=None, usage=None):
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}
        event["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
        if usage:
            event["usage"] = usage
        return event

    def whole(self, body):
        # The answer in one piece, for who did not ask for a stream.
        words = (control().get("answer") or "Good day.").split(" ")[: body["max_tokens"]]
        message = {"role": "assistant", "content": " ".join(words)}
        prompt = sum(len(str(m["content"]).split()) for m in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(words)}
        return {
            "id": "chatcmpl-1", "object": "chat.completion", "model": MODEL, "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    def send(self, event):
        self.raw(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    def raw(self, data):
        self.wfile.write(data)
        self.wfile.flush()

    def stream(self, body, fault):
        said = body["messages"][-1]["content"]
        text = control().get("answer") or ("Paris." if "capital of France" in said else "Good day.")
        if fault == "empty":
            text = ""
        prompt = sum(len(m["content"].split()) for m in body["messages"])
        words = text.split(" ") if text else []
        cut = len(words) > body["max_tokens"] or fault == "cut"
        words = words[: body["max_tokens"]]
        if fault == "html":
            return self.raw(b"<html><body>It works!</body></html>")
        if fault == "no json":
            return self.raw(b"data: {this is no json\n\n")
        self.send(self.chunk({"role": "assistant"}))
        if fault == "empty choices":
            self.send({"id": "x", "model": MODEL, "choices": []})
            self.raw(b": a comment\n\nevent: message\n\n")
        if fault == "stalls at once":
            time.sleep(60)
        if fault == "split":
            text = "Zürich 東京 😀"
            data = json.dumps(self.chunk({"content": text}), ensure_ascii=False)
            for byte in f"data: {data}\n\n".encode():
                self.raw(bytes([byte]))
            words = []
        if fault == "5 MB line":
            self.send(self.chunk({"role": "assistant"}) | {"padding": "x" * 5_000_000})
        if fault == "3 MB answer":
            self.send(self.chunk({"content": "Paris " + "x" * 3_000_000}))
            words = []
        if fault == "20 MB line":
            self.send(self.chunk({"content": "x" * 20_000_000}))
        for number, word in enumerate(words):
            self.send(self.chunk({"content": word if number == 0 else " " + word}))
            time.sleep(control().get("pace_s", 0))
            if fault == "breaks off":
                return None
            if fault == "error event":
                self.raw(b'data: {"error": "out of pages"}\n\n')
                return None
            if fault == "stalls":
                time.sleep(60)
        made = len(words) or len(text.split())
        usage = {"prompt_tokens": prompt, "completion_tokens": made}
        usage["total_tokens"] = sum(usage.values())
        self.send(self.chunk({}, "length" if cut else "stop", usage))
        return None


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self):
        # HTTPServer would ask for the machine's full name, which may take seconds offline.
        self.socket.setsockopt(1, 2, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "fake", self.server_address[1]


def main():
    global MODEL
    arguments = sys.argv[1:]
    assert arguments[0] == "serve", arguments
    MODEL = arguments[1]
    options = dict(zip(arguments[2::2], arguments[3::2]))
    note("starts.jsonl", {"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)})
    script = control()
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    if script.get("log"):
        print(script["log"], flush=True)
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    while script.get("never_listens"):
        time.sleep(1)
    Server((options["--host"], int(options["--port"])), Handler).serve_forever()


main()
"""


# Python reads this at every start; `python -c …` is how a rig looks for its packages.
_HOLDING_SITE = """
import os, sys, time
if "-c" in sys.orig_argv[1:2] and os.path.exists(os.path.join(os.path.dirname(__file__), "hold")):
    time.sleep(120)
"""


class FakeEngine:
    """The fake package in `folder`, which goes onto PYTHONPATH, and the script that it obeys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self) -> None:
        """Write the package and the metadata by which an environment check knows its versions."""
        program = self.folder / "transformers" / "cli" / "transformers.py"
        program.parent.mkdir(parents=True)
        for package in (program.parent.parent, program.parent):
            (package / "__init__.py").write_text("")
        program.write_text(FAKE_SERVE_SOURCE)
        for name, version in FAKE_PACKAGES.items():
            metadata = self.folder / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (self.folder / "sitecustomize.py").write_text(_HOLDING_SITE)

    def surroundings(self) -> dict[str, str]:
        """Variables, beside PYTHONPATH, by which a rig finds the fake."""
        return {}

    def headers(self) -> dict[str, str]:
        """What a request to the engine itself has to carry."""
        return {}

    def hold_environment_check(self, hold: bool) -> None:
        """Whether the rig's look for its packages hangs, as on a disk that does not answer."""
        if hold:
            (self.folder / "hold").touch()
        else:
            (self.folder / "hold").unlink(missing_ok=True)

    def script(self, **orders: Any) -> None:
        """Replace the script, all at once: what is not named goes back to good behaviour.

        `fault` (of one answer), `answer`, `pace_s`, `words`, `health` (its status); at the start
        `load_s`, `crash`, `never_listens`, `ignores_sigterm`, `noise` (bytes), `log`.
        """
        fresh = self.folder / "control.new"
        fresh.write_text(json.dumps(orders))
        fresh.replace(self.folder / "control.json")

    def _noted(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def requests(self) -> list[dict[str, Any]]:
        """Every chat request that arrived: its `body` and `headers`."""
        return self._noted("requests.jsonl")

    def starts(self) -> list[dict[str, Any]]:
        """Every start of the program: `argv`, `pid` and `environment`."""
        return self._noted("starts.jsonl")


_TINY_TENSORS = {
    "model.embed_tokens.weight": [64, 16],
    "model.embed_tokens_per_layer.weight": [64, 12],
    "model.norm.weight": [16],
}
_TINY_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
    "use_double_wide_mlp": True,
}


def write_safetensors(
    path: Path, shapes: dict[str, list[int]], *, element: str = "F32", element_bytes: int = 4
) -> None:
    """A safetensors file of zeros, written by hand; its data is a hole that takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = element_bytes
        for extent in shape:
            size *= extent
        header[name] = {"dtype": element, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_tiny_folder(folder: Path) -> Path:
    """A whole model folder that passes every check: headers and config of a tiny Gemma 4."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_TINY_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_safetensors(folder / "model.safetensors", _TINY_TENSORS)
    return folder


# ── suites / fake_jax_server ──────────────────────────────────────────────────────────────────────
# A `jax_server.py` that obeys a script: the fake at the edge of the rig with the JAX engine.
#
# It takes the place of the engine's file when Python is about to run that, and speaks as the engine
# does: 503 while it loads, a key, /metrics, usage in a chunk of its own and [DONE] at the end.

FAKE_JAX_PACKAGES = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "jinja2": "3.1.6",
    "llguidance": "1.9.1",
    "ml_dtypes": "0.6.0",
    "numpy": "2.4.6",
    "prometheus-client": "0.26.0",
    "starlette": "1.10.0",
    "tokenizers": "0.23.3",
    "uvicorn": "0.54.0",
}

# What differs from the fake of transformers: everything around the answer.
_JAX_DIFFERENCE = r"""
import threading

HERE = pathlib.Path(__file__).resolve().parent
LOADED = threading.Event()

METRICS = '''\
# HELP engine_num_requests_running Requests that are being answered.
# TYPE engine_num_requests_running gauge
engine_num_requests_running 0.0
# TYPE engine_num_requests_waiting gauge
engine_num_requests_waiting 0.0
# TYPE engine_kv_cache_usage_perc gauge
engine_kv_cache_usage_perc 0.25
# TYPE engine_prompt_tokens_total counter
engine_prompt_tokens_total 32.0
# TYPE engine_generation_tokens_total counter
engine_generation_tokens_total 32.0
'''


class JaxHandler(Handler):
    def allowed(self):
        if not KEY or self.headers.get("Authorization") == "Bearer " + KEY:
            return True
        self.reply(401, {"error": {"message": "a key is needed", "type": "AuthenticationError"}})
        return False

    def do_GET(self):
        if self.path == "/health":
            if LOADED.is_set():
                return self.reply(control().get("health", 200), {"status": "ok"})
            return self.reply(503, {"status": "loading"})
        if self.allowed():
            if self.path == "/metrics":
                return self.reply(200, METRICS.encode(), "text/plain; version=0.0.4")
            if self.path == "/v1/models":
                model = {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
                return self.reply(200, {"object": "list", "data": [model]})
            super().do_GET()

    def do_POST(self):
        if self.allowed():
            super().do_POST()

    def send(self, event):
        usage = event.pop("usage", None)
        super().send(event)
        if usage:
            super().send({"id": "chatcmpl-1", "model": MODEL, "choices": [], "usage": usage})
            self.raw(b"data: [DONE]\n\n")


def told(share, words):
    print(f"jax_server: {share:3d}% {words}", file=sys.stderr, flush=True)


def main():
    global MODEL, KEY, CONTEXT
    arguments = sys.argv[1:]
    options = dict(zip(arguments[::2], arguments[1::2]))
    MODEL, CONTEXT = options["--served-model-name"], int(options["--max-model-len"])
    note("starts.jsonl", {"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)})
    key = options.get("--api-key-file")
    KEY = pathlib.Path(key).read_text().strip() if key else ""
    script = control()
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    if script.get("refuses"):
        print(f"jax_server: {script['refuses']}", file=sys.stderr, flush=True)
        sys.exit(2)
    told(5, "reading the weights")
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    if script.get("log"):
        print(script["log"], flush=True)
    if not script.get("never_listens"):
        server = Server((options["--host"], int(options["--port"])), JaxHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    told(40, "compiling decode of 1 slot")
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    told(100, "ready")
    LOADED.set()
    while True:
        time.sleep(1)


main()
"""
# Python reads this at every start. `python -c …` is how a rig looks for its packages; a start of
# the engine's file runs the fake and ends. No exec: for a moment the process would have no label.
_JAX_SITE = """
import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
first = (sys.orig_argv[1:2] or [""])[0]
if first == "-c" and os.path.exists(os.path.join(here, "hold")):
    time.sleep(120)
if os.path.basename(first) == "jax_server.py":
    import runpy, traceback
    sys.argv, status = sys.orig_argv[1:], 1
    try:
        runpy.run_path(os.path.join(here, "fake_jax.py"), run_name="__main__")
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


class FakeJax(FakeEngine):
    """The fake in `folder`, which goes onto PYTHONPATH, and the script that it obeys.

    Beside the orders of every fake: `refuses`, words with which a start ends as a refusal.
    """

    def headers(self) -> dict[str, str]:
        """What a request needs: the key in the file that the last start was given, if it was."""
        argv = self.starts()[-1]["argv"]
        if "--api-key-file" not in argv:
            return {}
        with open(argv[argv.index("--api-key-file") + 1], encoding="ascii") as file:
            return {"Authorization": f"Bearer {file.read().strip()}"}

    def install(self) -> None:
        """Write the fake and the metadata by which an environment check knows its packages."""
        self.folder.mkdir(parents=True)
        common = FAKE_SERVE_SOURCE[: FAKE_SERVE_SOURCE.index("\ndef main():")]
        (self.folder / "fake_jax.py").write_text(common + _JAX_DIFFERENCE)
        (self.folder / "sitecustomize.py").write_text(_JAX_SITE)
        for name, version in FAKE_JAX_PACKAGES.items():
            self.set_version(name, version)

    def set_version(self, package: str, version: str) -> None:
        """Have `package` look as if `version` were installed; empty: as if it were not."""
        name = package.replace("-", "_")
        metadata = self.folder / f"{name}.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def options(self) -> dict[str, Any]:
        """The options of the last start, by name."""
        argv = self.starts()[-1]["argv"]
        return dict(zip(argv[::2], argv[1::2], strict=True))


# ── suites / raw_stdio ────────────────────────────────────────────────────────────────────────────
# A server process spoken to line by line, for what a proper client would never send.
#
# Writes JSON-RPC as text and keeps every line that comes back, so that each can be checked. Knows
# no
# tool.

_HANDSHAKE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "0"},
}


class RawServer:
    """A running server.py: `call` is strict JSON-RPC, `send_text` sends whatever it is given.

    `lines` holds every line of its standard output, `errors` is the file of its standard error.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self.errors = errors
        self.lines: list[bytes] = []
        self._arrived: queue.Queue[bytes | None] = queue.Queue()
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def send_text(self, text: bytes) -> None:
        """One line of input, as it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, parameters: Mapping[str, Any]) -> int:
        """One request; returns its id. Lone surrogates travel as JSON escapes."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters}
        self.send_text(json.dumps(message, ensure_ascii=True).encode())
        return self._number

    def receive(self, number: int, timeout_s: float = 30.0) -> dict[str, Any] | None:
        """The answer to request `number`; None when none came in time or the server has gone."""
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            try:
                line = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._arrived.put(None)
                return None
            message = json.loads(line)
            if "id" in message and "method" not in message:
                self._answers[message["id"] if message["id"] is not None else -1] = message
        return self._answers.pop(number)

    def call(self, tool: str, arguments: Any, timeout_s: float = 30.0) -> dict[str, Any]:
        """The whole answer to one tools/call; AssertionError when the server gives none."""
        number = self.send("tools/call", {"name": tool, "arguments": arguments})
        answer = self.receive(number, timeout_s)
        assert answer is not None, f"no answer to {tool}: {self.errors.read_text()[-2000:]}"
        return answer

    def answers_ping(self) -> bool:
        """Whether the server still answers."""
        return self.receive(self.send("ping", {})) is not None

    def shake_hands(self) -> None:
        """The initialize handshake."""
        assert self.receive(self.send("initialize", _HANDSHAKE)) is not None
        self.send_text(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    def close_input(self) -> None:
        """End of input, as when the client goes away."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def call_fault(answer: Mapping[str, Any]) -> str:
    """The error text of a tools/call answer, from the result or the protocol; empty for none."""
    if "error" in answer:
        return str(answer["error"].get("message", "error"))
    result = answer["result"]
    text = "".join(item.get("text", "") for item in result["content"])
    return text if result.get("isError") else ""


@contextlib.contextmanager
def raw_server(
    server_file: Path, environment: Mapping[str, str], errors: Path, *, handshake: bool = True
) -> Iterator[RawServer]:
    """A running `server_file`, killed at the end if it is still there."""
    with errors.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, str(server_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=dict(environment),
            cwd=errors.parent,
        )
    server = RawServer(process, errors)
    try:
        if handshake:
            server.shake_hands()
        yield server
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            server.close_input()
        server._reader.join()
        if process.stdout is not None:
            process.stdout.close()


# ── suites / witness ──────────────────────────────────────────────────────────────────────────────
# Witnesses of what really is so on this computer: they ask the system, and nothing of the rig.

LABEL_IN_ENVIRONMENT = "GEMMA4_RIG_LABEL"


def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rig_processes(state: Path, role: str = "") -> list[int]:
    """The pids whose environment names the state folder `state` and whose label has `role`.

    The witness of what really runs: it asks the process table, and nothing of the rig. `role` is
    server, job, or empty for either.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("XDG_STATE_HOME") != str(state):
                continue
            label = environment.get(LABEL_IN_ENVIRONMENT, "")
            if label and f"role={role}" in label and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError, ValueError):
            continue
    return found


# ── suites / rig_case ─────────────────────────────────────────────────────────────────────────────
# What every suite stands on: a copy of the built rig in a temporary folder, and clients of it.
#
# The built server.py beside the suite is what is tested, through a real MCP client; everything that
# it writes goes into the temporary folder. Knows no tool and no fault.

PATIENCE_S = 30.0  # for what takes a second or two here: a busy machine is no failure


@dataclass(frozen=True)
class RigUnderTest:
    """The rig that a bundled suite tests: its `folder`, and its tools by name with their effect.

    The effects are reads, changes and destroys. They stand in the rig's own suite, by hand,
    because they are the promise; everything else is taken from the live tool list. `make_engine`
    is the fake of its engine, `make_model` writes a small model that it would serve. `words` has
    its own name for each tool that the shared suites call by the first rig's.
    """

    folder: Path
    tools: Mapping[str, str]
    make_engine: Callable[[Path], FakeEngine] = FakeEngine
    make_model: Callable[[Path], Path] = write_tiny_folder
    words: Mapping[str, str] = field(default_factory=dict)


_RUNNER = """\
import importlib.util, sys
from pathlib import Path

path = Path(__file__).resolve().parent / "server.py"
spec = importlib.util.spec_from_file_location("server", path)
server = sys.modules["server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server)
{preamble}
if __name__ == "__main__":
    sys.exit(server.run_rig(server.RIG, Path(__file__)))
"""

_rig_chosen: list[RigUnderTest] = []


def use_rig(rig: RigUnderTest) -> None:
    """Choose the rig that all suites of this run test; the entry calls it from setUpModule."""
    _rig_chosen[:] = [rig]


def rig_under_test() -> RigUnderTest:
    """The rig that `use_rig` chose."""
    return _rig_chosen[0]


def spelled(tool: str) -> str:
    """The rig's own name for a tool that the shared suites call by the first rig's."""
    return rig_under_test().words.get(tool, tool)


def loaded_server(server_file: Path) -> Any:
    """The module `server_file`, loaded once a run under a name of its own."""
    name = "built_server_under_test"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, server_file)
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before exec_module, or dataclasses cannot resolve their types
        spec.loader.exec_module(module)
    return sys.modules[name]


class RigCase(unittest.IsolatedAsyncioTestCase):
    """A test case with a rig of its own: folders, environment, fake engine, clients.

    One rig a class. A test that starts something has it stopped when it ends, unless the class
    says `keeps_running`; in either case nothing is left when the class ends.
    """

    keeps_running: ClassVar[bool] = False
    server_name: ClassVar[str] = "server.py"  # what is started; a runner beside it may stand in
    fake_on_path: ClassVar[bool] = True  # False: the real runtime, if it is installed
    place: ClassVar[Path]
    rig_folder: ClassVar[Path]
    state: ClassVar[Path]
    engine: ClassVar[FakeEngine]
    model: ClassVar[str]
    port: ClassVar[int]
    environment: ClassVar[dict[str, str]]
    module: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory(prefix="rig-suite-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name).resolve()
        cls.module = loaded_server(rig_under_test().folder / "server.py")
        cls.engine = rig_under_test().make_engine(cls.place / "fake")
        cls.engine.install()
        cls.model = str(rig_under_test().make_model(cls.place / "models" / "tiny"))
        cls.port = free_port()
        cls.rig_folder = cls.place / "rig"
        cls.rig_folder.mkdir()
        for name in ("server.py", *(f"{name}.py" for name in cls.module.RIG.programs)):
            shutil.copy(rig_under_test().folder / name, cls.rig_folder)
        cls.write_settings(**cls.good_settings())
        cls.state = cls.place / "state"
        cls.environment = cls._clean_environment()
        patch = mock.patch.dict(os.environ, cls.environment, clear=True)
        patch.start()
        cls.addClassCleanup(patch.stop)
        cls.addClassCleanup(cls._end_everything)
        cls.prepare()

    @classmethod
    def prepare(cls) -> None:
        """What a kind of rig needs beyond that, before a suite's own setUpClass goes on."""

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        """This environment, without what a rig would read of it, and every folder redirected."""
        settings = {name.upper() for name in cls.module.RIG.settings.model_fields}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in settings and not name.startswith(("HF_", "XDG_", "GEMMA4_"))
        }
        packages = [str(cls.engine.folder)] if cls.fake_on_path else []
        packages += filter(None, [kept.get("PYTHONPATH")])
        home = cls.place / "home"
        home.mkdir()
        return kept | {
            "HOME": str(home),
            "TMPDIR": str(home),
            # Packages installed for the user stay visible although HOME moves.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONPATH": os.pathsep.join(packages),
            "XDG_STATE_HOME": str(cls.state),
            "XDG_CACHE_HOME": str(cls.place / "cache"),
            **cls.engine.surroundings(),
        }

    @classmethod
    def _end_everything(cls) -> None:
        """The last resort of a failed test: kill what it left, by the witness's own list."""
        left = []
        for pid in rig_processes(cls.state):
            with contextlib.suppress(psutil.Error):
                left.append(psutil.Process(pid))
                left[-1].kill()
        psutil.wait_procs(left, timeout=5)  # or they would write into a folder that is going

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        """What tpu.env has to say here for the rig to work: the least, by key."""
        return {"MODEL_NAME": cls.model, "PORT": str(cls.port)}

    @classmethod
    def write_settings(cls, **values: str) -> None:
        """The rig's tpu.env as it came, with these keys changed."""
        lines = (rig_under_test().folder / "tpu.env").read_text().splitlines()
        for key, value in values.items():
            known = [number for number, line in enumerate(lines) if line.startswith(f"{key}=")]
            if known:
                lines[known[0]] = f"{key}={value}"
            else:
                lines.append(f"{key}={value}")
        cls.write_settings_text("\n".join(lines) + "\n")

    @classmethod
    def write_settings_text(cls, text: str) -> None:
        """The rig's tpu.env as `text`, with a time stamp that differs from the one before."""
        path = cls.rig_folder / "tpu.env"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(text, encoding="utf-8")
        stamp = max(time.time_ns(), before + 10_000_000)
        os.utime(path, ns=(stamp, stamp))

    @classmethod
    def write_runner(cls, name: str, preamble: str) -> Path:
        """A program that is the built server.py after `preamble` (`server` is the module).

        It lies beside the server and starts its workers as itself, so that a shorter patience or a
        limit of the system holds for them too.
        """
        runner = cls.rig_folder / name
        runner.write_text(_RUNNER.format(preamble=textwrap.dedent(preamble)))
        return runner

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        # The case's own loop runs in debug mode, which doubles the time and warns of slow steps.
        asyncio.get_running_loop().set_debug(False)
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.engine.script()

    async def asyncTearDown(self) -> None:
        if not self.keeps_running:
            await self.bring_to_rest()
        await super().asyncTearDown()

    async def bring_to_rest(self) -> None:
        """End what a test started, by the rig's own tool."""
        if rig_processes(self.state):
            async with self.in_process() as client:
                await self.answer(client, "stop_model")

    # Clients. Opened inside a test: one that asyncSetUp opened would live in another task.

    @property
    def server_file(self) -> Path:
        """The program that is the rig's server."""
        return self.rig_folder / self.server_name

    def assembled(self, server_file: str = "", /) -> Any:
        """The rig as its entry assembles it, in this process; its workers run `server_file`, or
        the rig's own program."""
        name = server_file or self.server_name
        return self.module.AssembledRig(self.module.RIG, self.rig_folder / name)

    @contextlib.asynccontextmanager
    async def in_process(
        self, mode: str = "auto", /, server_file: str = ""
    ) -> AsyncIterator[Client]:
        """A client of a server in this process, in protocol mode "auto" or "legacy"."""
        with contextlib.redirect_stderr(io.StringIO()):  # settings at fault are told there too
            server = self.assembled(server_file).server()
        async with Client(server, mode=mode) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    @contextlib.asynccontextmanager
    async def over_stdio(
        self, mode: str = "auto", /, extra: Mapping[str, str] | None = None
    ) -> AsyncIterator[Client]:
        """A client of the rig's server.py as a process; its stderr goes to `stderr_file`."""
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[str(self.server_file)],
            env={**self.environment, **(extra or {})},
            cwd=self.place,
        )
        with self.stderr_file.open("a") as errors:
            async with Client(stdio_client(parameters, errors), mode=mode) as client:
                failure = None
                try:
                    yield client
                except AssertionError as error:
                    failure = error
        if failure is not None:
            raise failure

    @property
    def stderr_file(self) -> Path:
        return self.place / "stderr.txt"

    # Calls. Their own parameters are positional only, because tools have a parameter of any name.

    async def answer(self, client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured result of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def text(self, client: Client, tool: str, /, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        result = await client.call_tool(spelled(tool), arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return "".join(item.text for item in result.content if item.type == "text")

    async def refusal(
        self, client: Client, tool: str, error_class: str, /, **arguments: Any
    ) -> str:
        """The text of a call that must fail with `error_class` as its first word."""
        result = await client.call_tool(spelled(tool), arguments)
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, f"{tool} succeeded: {text}")
        self.assertEqual(text.split(" ")[0], error_class, text)
        return text

    async def serve(self, client: Client, /, **arguments: Any) -> dict[str, Any]:
        """Serve, wait until it is ready, and return the outcome."""
        outcome = await self.answer(client, "serve_model", wait_s=50, **arguments)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    @classmethod
    def serve_for_class(cls) -> None:
        """Start the model once for all tests of the class (from setUpClass, with keeps_running)."""

        async def start() -> None:
            server = cls.module.AssembledRig(cls.module.RIG, cls.rig_folder / "server.py").server()
            async with Client(server) as client:
                result = await client.call_tool("serve_model", {"wait_s": 50})
            ready = (result.structured_content or {}).get("state") == "ready"
            if result.is_error or not ready:
                raise AssertionError(f"the model did not come up: {result.content}")

        asyncio.run(start())
        deadline = time.monotonic() + PATIENCE_S
        while rig_processes(cls.state, "job") and time.monotonic() < deadline:
            time.sleep(0.02)  # the worker has written its last word and is about to end

    # Witnesses.

    def processes(self, role: str = "") -> list[int]:
        """The pids of this rig's model servers and job workers, from the process table."""
        return rig_processes(self.state, role)

    async def assert_all_gone(self) -> None:
        """No model server of this rig is left now, and its workers end within moments."""
        self.assertEqual(self.processes("server"), [], "a model server was left")
        await self.until(lambda: not self.processes(), "a job's worker was left")

    def journal(self) -> list[dict[str, Any]]:
        """The journal's entries, from the file."""
        files = list(self.state.rglob("journal.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def rig_state(self) -> Path:
        """The folder in which the rig keeps its records."""
        return Path(self.assembled().context.paths.state)

    async def until(self, what: Callable[[], Any], why: str) -> Any:
        """Poll `what` until it is true; fail with `why` after PATIENCE_S seconds."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.05)
        return value


# ── suites / answer_faults ────────────────────────────────────────────────────────────────────────
# One model server, every way in which an answer can go wrong: the class, the words, the next call.
#
# The server was ready; what fails is the generation. Rows D24 to D31 of the fault matrix.


class AnswerFaultSuite(RigCase):
    """No fault of an answer is passed on as an answer, and none ends the server."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def asyncTearDown(self) -> None:
        """Whatever happened: the model server lives, and with good behaviour all is well."""
        self.engine.script()
        self._let_wait("45")
        self.assertEqual(len(self.processes("server")), 1)
        async with self.in_process() as client:
            health = await self.answer(client, "verify_model_health")
            self.assertTrue(health["healthy"], health)
        await super().asyncTearDown()

    def _let_wait(self, seconds: str) -> None:
        """Set the longest wait for an answer, while the server runs."""
        self.write_settings(**self.good_settings(), QUERY_TIMEOUT_S=seconds)

    async def _measured(self, client: Client) -> dict[str, Any]:
        return await self.answer(client, "query_gemma4_with_stats", prompt="hello")

    async def _unhealthy(self, client: Client, why: str) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertFalse(health["healthy"], health)
        self.assertIn(why, health["reason"])
        self.assertIn(health["reason"], health["summary"])
        self.assertEqual(health["next_step"], f"{spelled('get_server_logs')}()")

    async def _broken(self, client: Client, why: str) -> None:
        """The three askers agree that the answer broke off: error, marked figures, not healthy."""
        text = await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")
        self.assertIn(why, text)
        self.assertIn("Next: ", text)
        measured = await self._measured(client)
        self.assertFalse(measured["complete"])
        self.assertIn(why, measured["broke_off"])
        self.assertIn("broke off", measured["summary"])
        self.assertIsNone(measured["tokens_per_s"], "a rate of a broken stream")
        self.assertIsNone(measured["tpot_ms"], "a pace of a broken stream")
        await self._unhealthy(client, "broke off")

    async def test_a_stream_that_breaks_off(self) -> None:
        self.engine.script(fault="breaks off", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "without a finish reason")
            self.assertEqual((await self._measured(client))["text"], "Paris")

    async def test_an_error_within_the_stream(self) -> None:
        self.engine.script(fault="error event", answer="Paris is the capital")
        async with self.in_process() as client:
            await self._broken(client, "out of pages")

    async def test_a_stream_that_stalls(self) -> None:
        self.engine.script(fault="stalls", answer="Paris is the capital")
        self._let_wait("3")
        async with self.in_process() as client:
            measured = await self._measured(client)
            self.assertFalse(measured["complete"])
            self.assertIn("within 3 s", measured["broke_off"])
            self.assertEqual(measured["text"], "Paris")

    async def test_no_first_token_in_time(self) -> None:
        self.engine.script(fault="stalls at once")
        self._let_wait("1.5")
        async with self.in_process() as client:
            text = await self.refusal(client, "query_gemma4", "TIMEOUT", prompt="hello")
            self.assertIn("QUERY_TIMEOUT_S", text)

    async def test_an_empty_answer(self) -> None:
        self.engine.script(fault="empty")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertIn("no text", answer["summary"])
            measured = await self._measured(client)
            self.assertIsNone(measured["ttft_s"], "a first token that never came")
            await self._unhealthy(client, "empty")

    async def test_an_answer_that_is_cut_off(self) -> None:
        self.engine.script(fault="cut", answer="The capital of that country is")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["finish_reason"], "length")
            self.assertIn("cut off", answer["summary"])
            await self._unhealthy(client, "cut off")

    async def test_a_wrong_answer(self) -> None:
        self.engine.script(answer="Comparison shows that it is Lyon.")
        async with self.in_process() as client:
            await self._unhealthy(client, "wrong")

    async def test_every_request_is_refused(self) -> None:
        classes = {400: "INVALID", 401: "AUTH", 403: "AUTH", 404: "INVALID", 429: "BUSY"}
        classes |= {500: "INTERNAL", 502: "INTERNAL", 503: "BUSY"}
        async with self.in_process() as client:
            for status, error_class in classes.items():
                self.engine.script(fault=f"status {status}", words=f"reason {status}")
                for tool, extra in (
                    ("query_gemma4", {"prompt": "hello"}),
                    ("query_gemma4_with_stats", {"prompt": "hello"}),
                    ("verify_model_health", {}),
                ):
                    text = await self.refusal(client, tool, error_class, **extra)
                    self.assertIn(str(status), text)
                    if error_class != "AUTH":
                        self.assertIn(f"reason {status}", text)

    async def test_a_redirect_is_not_followed(self) -> None:
        self.engine.script(fault="status 307")
        seen = len(self.engine.requests())
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "DENIED", prompt="hello")
        self.assertEqual(len(self.engine.requests()), seen + 1)

    async def test_a_page_instead_of_a_stream(self) -> None:
        self.engine.script(fault="html")
        async with self.in_process() as client:
            for tool, extra in (
                ("query_gemma4", {"prompt": "hello"}),
                ("query_gemma4_with_stats", {"prompt": "hello"}),
                ("verify_model_health", {}),
            ):
                await self.refusal(client, tool, "DENIED", **extra)

    async def test_an_event_that_is_no_json(self) -> None:
        self.engine.script(fault="no json")
        async with self.in_process() as client:
            await self._broken(client, "no JSON")

    async def test_an_answer_cut_into_single_bytes(self) -> None:
        self.engine.script(fault="split")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Zürich 東京 😀")

    async def test_events_without_choices(self) -> None:
        self.engine.script(fault="empty choices")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual((answer["text"], answer["completion_tokens"]), ("Good day.", 2))

    async def test_an_event_of_5_megabytes_is_an_event(self) -> None:
        self.engine.script(fault="5 MB line")
        async with self.in_process() as client:
            answer = await self.answer(client, "query_gemma4", prompt="hello")
            self.assertEqual(answer["text"], "Good day.")

    async def test_an_answer_of_3_megabytes_comes_out_bounded(self) -> None:
        self.engine.script(fault="3 MB answer")
        async with self.over_stdio() as client:
            result = await client.call_tool("query_gemma4", {"prompt": "hello"})
            self.assertFalse(result.is_error, result.content)
            self.assertLess(len(result.model_dump_json()), 200_000)
            self.assertIn("left out", (result.structured_content or {})["text"])

    async def test_an_event_beyond_all_bounds_is_refused(self) -> None:
        self.engine.script(fault="20 MB line")
        async with self.in_process() as client:
            await self.refusal(client, "query_gemma4", "PARTIAL", prompt="hello")

    async def test_an_answer_full_of_control_characters(self) -> None:
        self.engine.script(answer="red \x1b[31mred \x00 \u202e \x9b31m end")
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                text = (await self.answer(client, "query_gemma4", prompt="hello"))["text"]
                self.assertTrue(text.startswith("red red") and text.endswith("end"), repr(text))
                self.assertFalse([c for c in text if ord(c) < 32 or c in "\x9b\u202e"], repr(text))


# ── suites / catalogue ────────────────────────────────────────────────────────────────────────────
# The tool list as clients get it: names, words, hints, schemas, and that strangers are refused.

NAME_LIMIT = 28  # characters: a client's prefix and this stay under its 64
TOOLS_LIMIT = 28
PROTOCOL_MODES = ("auto", "legacy")
_WORDS_OF_A_SECRET = ("token", "secret", "password", "credential", "key")


async def listed_tools(client: Client) -> list[Tool]:
    """Every tool of the live list, page after page."""
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def parameters_of(tool: Tool) -> dict[str, dict[str, Any]]:
    """The parameters of `tool` by name, each with its schema."""
    return dict(tool.input_schema.get("properties", {}))


class CatalogueSuite(RigCase):
    """The promise that a client reads before it calls anything."""

    # Tools whose `token` is no secret of anybody's: another tool of the rig gives it, for one use.
    plan_tokens: ClassVar[frozenset[str]] = frozenset()

    async def test_exactly_the_promised_tools_in_both_protocol_modes(self) -> None:
        for mode in PROTOCOL_MODES:
            async with self.in_process(mode) as client:
                names = [tool.name for tool in await listed_tools(client)]
            self.assertEqual(sorted(names), sorted(rig_under_test().tools), mode)

    async def test_over_stdio_the_list_is_the_same_to_the_letter(self) -> None:
        """And a tool that is not on it is an error and no more."""
        async with self.in_process() as client:
            here = [tool.model_dump() for tool in await listed_tools(client)]
        for mode in PROTOCOL_MODES:
            async with self.over_stdio(mode) as client:
                there = [tool.model_dump() for tool in await listed_tools(client)]
                self.assertEqual(here, there, mode)
                result = await client.call_tool("destroy_everything", {})
                self.assertTrue(result.is_error)
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["state"], "stopped")

    async def test_hints_say_what_each_tool_does(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            effect = rig_under_test().tools[tool.name]
            hints = tool.annotations
            assert hints is not None, tool.name
            self.assertEqual(hints.read_only_hint, effect == "reads", tool.name)
            if effect != "reads":  # without a word the wire's default would be destructive
                self.assertEqual(hints.destructive_hint, effect == "destroys", tool.name)

    async def test_names_and_words_fit_the_budget(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        self.assertLessEqual(len(tools), TOOLS_LIMIT)
        for tool in tools:
            self.assertLessEqual(len(tool.name), NAME_LIMIT)
            self.assertTrue(tool.title)
            self.assertGreater(len(tool.description or ""), 60, f"{tool.name} says too little")
            self.assertNotIn("{", tool.description or "", "a word of the template was not filled")
            for name, schema in parameters_of(tool).items():
                self.assertTrue(schema.get("description"), f"{tool.name}.{name} is not described")

    async def test_every_number_has_bounds_and_every_schema_is_closed(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            self.assertIs(tool.input_schema.get("additionalProperties"), False, tool.name)
            for name, schema in parameters_of(tool).items():
                if schema.get("type") in ("integer", "number"):
                    self.assertIn("minimum", schema, f"{tool.name}.{name}")
                    self.assertIn("maximum", schema, f"{tool.name}.{name}")

    async def test_no_tool_takes_a_secret_or_an_address(self) -> None:
        async with self.in_process() as client:
            tools = await listed_tools(client)
        for tool in tools:
            for name in parameters_of(tool):
                if name == "token" and tool.name in self.plan_tokens:
                    continue
                words = set(name.lower().split("_"))
                self.assertFalse(words & {*_WORDS_OF_A_SECRET, "url", "host", "endpoint"}, name)

    async def test_unknown_arguments_are_refused_by_name_in_every_tool(self) -> None:
        async with self.in_process() as client:
            for tool in rig_under_test().tools:
                text = await self.refusal(client, tool, "INVALID", zonee="us-east5-b")
                self.assertIn("zonee", text)
        self.assertEqual(self.processes(), [])

    async def test_help_names_every_tool_and_every_setting(self) -> None:
        async with self.in_process() as client:
            page = await self.text(client, "get_help")
        for tool in rig_under_test().tools:
            self.assertIn(f"`{tool}`", page)
        for name in self.module.RIG.settings.model_fields:
            self.assertIn(f"`{name.upper()}=", page)

    async def test_the_server_says_who_it_is_and_where_to_begin(self) -> None:
        async with self.in_process("legacy") as client:
            self.assertIn("get_system_status", client.instructions or "")
            information = client.server_info
            assert information is not None
            self.assertTrue(information.version.startswith(self.module.RIG_VERSION))


# ── suites / bad_input ────────────────────────────────────────────────────────────────────────────
# The attack corpus over every tool and every parameter of the live list, over stdio.
#
# What is refused is refused by the parameter's name and starts nothing; free text that passes is
# data, and the model server has received exactly that text. Witnesses: the process table, the
# journal, the fake engine's own notes, the file system.

# Shell, option, path, URL, template and Unicode attacks; each once led to a CVE somewhere.
ATTACK_CORPUS = (
    "; touch P #",
    "$(touch P)",
    "`touch P`",
    "a\nb",
    "a\rb",
    "a\x00b",
    "--help",
    "-x",
    "--flags-file=/etc/passwd",
    "--impersonate-service-account=a@b",
    "projects/o/zones/z/instances/i",
    "https://www.googleapis.com/compute/v1/projects/o/zones/z/instances/i",
    "user@host",
    "../../etc/passwd",
    "/../../etc/passwd",
    "a,startup-script=x",
    "x OR name~.*",
    "ＡＢＣ",
    "a\u202eb",
    "a" * 10_000,
    "a" * 10_000_000,
    "",
    " ",
    "%0a",
    "{0.__class__}",
    "{{x}}",
    "'\"\\",
    "embedded\n",
    "google/gemma-4-E2B-it\x00",
)
# A log pasted into these is read as data, whatever it holds: nothing in it can be refused.
_LOG_TEXTS = (("analyze_logs", "text"), ("suggest_sre_remediation", "text"))
# What a required argument is given while another one is attacked.
STAND_INS = {
    "first": "2026-01-01-gemma4-e2b-vllm-cpu",
    "second": "2026-01-02-gemma4-e2b-vllm-cpu",
    "name": "2026-01-01-gemma4-e2b-vllm-cpu",
    "job_id": "serve-20260101-000000-abcdef",
}
_WRONG_TYPES: tuple[Any, ...] = (5, 1.5, True, None, [], ["a"], {}, {"a": 1})


def _tells(fault: str, parameter: str) -> bool:
    """Whether `fault` refuses `parameter` by its name, and as the first thing that it says."""
    return fault.startswith(f"INVALID {parameter}: ")


class BadInputSuite(RigCase):
    """Nothing that a confused or steered agent sends starts anything that it should not."""

    keeps_running = True
    stand_ins: ClassVar[Mapping[str, str]] = STAND_INS
    tools: list[Tool]
    server: ClassVar[RawServer]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()
        server_file = cls.rig_folder / "server.py"
        running = raw_server(server_file, cls.environment, cls.place / "stderr.txt")
        cls.server = cls.enterClassContext(running)

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        async with self.in_process() as client:
            self.tools = await listed_tools(client)

    @contextmanager
    def unharmed(self) -> Iterator[RawServer]:
        """The server; at the end nothing was started, stopped, written or killed, itself least."""
        before = (self.processes(), len(self.journal()), len(self.engine.starts()))
        jobs = sorted((self.rig_state / "jobs").iterdir())
        yield self.server
        self.assertTrue(self.server.answers_ping(), "the server does not answer any more")
        self.assertEqual(self.processes(), before[0])
        self.assertEqual(len(self.journal()), before[1])
        self.assertEqual(len(self.engine.starts()), before[2])
        self.assertEqual(sorted((self.rig_state / "jobs").iterdir()), jobs)
        self.assertEqual(list(self.place.rglob("P")), [], "an attack ran as a command")

    def required(self, tool: Tool, but: str = "") -> dict[str, str]:
        """A fitting value for every argument that `tool` requires, `but` aside."""
        names = [name for name in tool.input_schema.get("required", []) if name != but]
        return {name: self.stand_ins.get(name, "hello") for name in names}

    def _strings(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(tool, parameter, the other arguments that the tool requires) of each string."""
        for tool in self.tools:
            for name, schema in parameters_of(tool).items():
                if schema.get("type") == "string":
                    yield tool.name, name, self.required(tool, name)

    def test_every_attack_on_every_string_of_every_tool(self) -> None:
        attacked = passed = 0
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                default = next(
                    parameters_of(t)[parameter].get("default") for t in self.tools if t.name == tool
                )
                for attack in ATTACK_CORPUS:
                    if attack == default:
                        continue  # leaving the argument out is no attack
                    attacked += 1
                    seen = len(self.engine.requests())
                    fault = call_fault(server.call(tool, {**others, parameter: attack}))
                    arrived = self.engine.requests()[seen:]
                    where = f"{tool}.{parameter} = {attack[:60]!r}: {fault[:200]}"
                    if (tool, parameter) in _LOG_TEXTS and len(attack) < 1_000_000:
                        self.assertEqual(fault, "", where)
                        self.assertEqual(arrived, [], f"{where} went to the model")
                    elif fault:
                        self.assertTrue(_tells(fault, parameter), where)
                        self.assertEqual(arrived, [], where)
                        if len(attack) > 20:
                            self.assertNotIn(attack[:200], fault, "the value came back")
                    else:
                        passed += 1
                        self.assertEqual(len(arrived), 1, where)
                        said = [m["content"] for m in arrived[0]["body"]["messages"]]
                        self.assertIn(attack, said, f"{where} did not arrive as it was")
        # A list of tools that shrank, or a gate that refuses all, must not make this pass.
        self.assertGreaterEqual(attacked, 7 * (len(ATTACK_CORPUS) - 1))
        self.assertGreater(passed, 0)
        self.assertLess(passed, attacked / 2)

    def test_wrong_types_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                for value in _WRONG_TYPES:
                    fault = call_fault(server.call(tool, {**others, parameter: value}))
                    self.assertTrue(_tells(fault, parameter), f"{tool}.{parameter}: {fault}")

    def test_numbers_out_of_range_are_refused_by_name(self) -> None:
        numbers = 0
        with self.unharmed() as server:
            for tool in self.tools:
                required = self.required(tool)
                for name, schema in parameters_of(tool).items():
                    if schema.get("type") not in ("integer", "number"):
                        continue
                    numbers += 1
                    low, high = schema["minimum"], schema["maximum"]
                    bad = [low - 1, high + 1, -(10**40), 10**40, "abc", "", None, [], {}]
                    bad += [float("nan"), float("inf"), "1; touch P"]
                    for value in bad:
                        fault = call_fault(server.call(tool.name, {**required, name: value}))
                        self.assertTrue(_tells(fault, name), f"{tool.name}.{name}={value}: {fault}")
        self.assertGreaterEqual(numbers, 8)

    def test_missing_and_additional_arguments_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool in self.tools:
                for name in tool.input_schema.get("required", []):
                    fault = call_fault(server.call(tool.name, self.required(tool, name)))
                    self.assertTrue(_tells(fault, name), f"{tool.name}: {fault}")
                for stranger in ("confirm", "__class__", "ctx", "self", "a\nb", "x" * 10_000):
                    arguments = {**self.required(tool), stranger: "yes"}
                    fault = call_fault(server.call(tool.name, arguments))
                    self.assertTrue(fault.startswith("INVALID "), f"{tool.name}: {fault[:200]}")
                    self.assertLess(len(fault), 10_000)

    def test_lines_that_are_no_request_harm_nothing(self) -> None:
        with self.unharmed() as server:
            for line in (b"", b"no json", b"[]", b"{}", b"\xff\xfe\x00", b'{"jsonrpc":"2.0"}'):
                server.send_text(line)
            server.send_text(b"[" * 100_000)
            self.assertTrue(server.answers_ping())
            for arguments in (["a"], "text", 5):
                self.assertTrue(call_fault(server.call("get_job", arguments)))
            self.assertTrue(call_fault(server.call("no_such_tool", {})))

    def test_a_lone_surrogate_on_the_wire_reaches_no_tool(self) -> None:
        """The SDK drops such a line, which is no JSON to it; nothing starts, all else goes on."""
        with self.unharmed() as server:
            seen = len(self.engine.requests())
            for tool, parameter, others in self._strings():
                number = server.send(
                    "tools/call", {"name": tool, "arguments": {**others, parameter: "a\ud800b"}}
                )
                self.assertTrue(server.answers_ping())
                answer = server.receive(number, 0.05)
                if answer is not None:
                    self.assertTrue(_tells(call_fault(answer), parameter), answer)
            self.assertEqual(len(self.engine.requests()), seen)

    async def test_a_lone_surrogate_in_process_is_refused_by_name(self) -> None:
        async with self.in_process() as client:
            for tool, parameter, others in self._strings():
                arguments = {**others, parameter: "a\ud800b"}
                text = await self.refusal(client, tool, "INVALID", **arguments)
                self.assertTrue(_tells(text, parameter), text)

    def test_a_value_that_looks_like_a_secret_never_comes_back(self) -> None:
        secret = "hf_" + "Q" * 40
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                answer = server.call(tool, {**others, parameter: f"\x00{secret}"})
                if (tool, parameter) not in _LOG_TEXTS:
                    self.assertTrue(call_fault(answer), tool)
                self.assertNotIn(secret, json.dumps(answer))
        self.assertNotIn(secret, self.stderr_file.read_text())


# ── suites / command_line ─────────────────────────────────────────────────────────────────────────
# server.py as a command: what the make targets call goes through the same checks as a client's.


class CommandCase(RigCase):
    """A case that runs the rig's server.py as a command."""

    def program(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run server.py with `words` as a process, to its end."""
        return subprocess.run(
            [sys.executable, str(self.rig_folder / "server.py"), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def command(self, *words: str) -> tuple[int, str, str]:
        """The same in this process, which saves a second each: status, output, errors."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = [(number, signal.getsignal(number)) for number in signals]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                server_file = self.rig_folder / "server.py"
                status = int(self.module.run_rig(self.module.RIG, server_file, list(words)))
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
        return status, out.getvalue(), err.getvalue()


class CommandLineSuite(CommandCase):
    """Status 0 and the answer on standard output, or status 1 and the reason on standard error."""

    def test_from_preflight_to_stop(self) -> None:
        status, out, _ = self.command("preflight")
        self.assertEqual(status, 0, out)
        self.assertNotIn("MISSING", out)
        served = self.program("call", "serve_model", "wait_s=50", "--json")
        self.assertEqual(served.returncode, 0, served.stderr)
        self.assertEqual(json.loads(served.stdout)["state"], "ready")
        self.assertIn("… load:", served.stderr, "no progress was told")
        status, _, err = self.command(
            "call", "query_gemma4", "prompt=what=is\nthis?", "max_tokens=1"
        )
        self.assertEqual(status, 0, err)
        body = self.engine.requests()[-1]["body"]
        self.assertEqual(body["messages"][-1]["content"], "what=is\nthis?")
        self.assertEqual(body["max_tokens"], 1)
        status, _, err = self.command("call", "stop_model")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(self.processes("server"), [])

    def test_what_is_refused_is_refused_here_too(self) -> None:
        for words, error_class in (
            (("call", "serve_model", "model=; touch P #"), "INVALID model"),
            (("call", spelled("get_server_logs"), "lines=many"), "INVALID lines"),
            (("call", "stop_model", "confirm=yes"), "INVALID confirm"),
            (("call", "query_gemma4", "prompt"), "INVALID"),
            (("call", "destroy_everything"), "NOT_FOUND"),
            (("job", "../../etc/passwd"), "INVALID"),
            (("job", "serve-20260101-000000-abcdef"), "NOT_FOUND"),
        ):
            with self.subTest(words):
                status, out, err = self.command(*words)
                self.assertEqual((status, out), (1, ""), err)
                self.assertTrue(err.startswith(error_class), err)
                self.assertNotIn("Traceback", err)
        self.assertEqual(self.processes(), [])

    def test_read_only_holds_for_commands(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            status, _, err = self.command("call", "stop_model")
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("DENIED "), err)

    def test_a_wrong_command_is_a_wrong_usage(self) -> None:
        err = io.StringIO()
        with self.assertRaises(SystemExit) as left, contextlib.redirect_stderr(err):
            self.module.run_rig(self.module.RIG, self.rig_folder / "server.py", ["explode"])
        self.assertEqual(left.exception.code, 2)
        self.assertIn("usage:", err.getvalue())

    def test_the_list_is_the_live_one(self) -> None:
        status, out, _ = self.command("call", "list")
        self.assertEqual(status, 0)
        listed = {line.split()[0] for line in out.splitlines()}
        self.assertEqual(listed, set(rig_under_test().tools))

    def test_preflight_names_every_gap_and_its_remedy(self) -> None:
        with mock.patch.dict("os.environ", PORT="80"):
            status, out, _ = self.command("preflight")
        self.assertEqual(status, 1)
        self.assertIn("MISSING settings", out)
        template = self.place / "models" / "tiny" / "chat_template.jinja"
        template.rename(self.place / "kept")
        try:
            status, out, _ = self.command("preflight")
        finally:
            (self.place / "kept").rename(template)
        self.assertEqual(status, 1)
        self.assertIn("chat template", out)
        self.assertIn("get it:", out)


# ── suites / diagnosing ───────────────────────────────────────────────────────────────────────────
# Diagnosis on the rig: its own failed starts, pasted logs, and triage.py by itself.
#
# Which signatures there are and what they say is tested where they are made.

_KV = (
    "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that "
    "can be stored in KV cache (20480)."
)
_OLD_LIBRARY = (
    "The checkpoint you are trying to load has model type `gemma9` but Transformers does not "
    "recognize this architecture."
)


class DiagnosingSuite(RigCase):
    """The line, the cause, the change; and nothing where nothing is wrong."""

    async def failed_start(self, client: Client) -> None:
        """Start what will fail, and see it fail."""
        await self.refusal(client, "serve_model", "INTERNAL", wait_s=50)

    async def test_a_failed_start_is_explained(self) -> None:
        self.engine.script(crash=_OLD_LIBRARY)
        async with self.in_process() as client:
            await self.failed_start(client)
            done = self.journal()
            found = await self.answer(client, "analyze_logs")
            self.assertTrue(found["found"], found)
            self.assertIn("gemma9", found["line"])
            self.assertTrue(found["changes"])
            again = await self.answer(client, "suggest_sre_remediation")
            self.assertEqual(again["kind"], found["kind"])
            self.assertTrue(again["steps"])
        self.assertEqual(self.journal(), done, "advice did something")
        await self.until(lambda: not self.processes("server"), "what failed still runs")

    async def test_a_healthy_log_and_no_log_at_all(self) -> None:
        async with self.in_process() as client:
            if not list(self.rig_state.glob("logs/*.log")):
                await self.refusal(client, "analyze_logs", "NOT_FOUND")
            await self.serve(client)
            found = await self.answer(client, "analyze_logs")
        self.assertEqual(found["summary"], "no failure found")

    async def test_the_starts_are_shown_by_phase(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            shown = await client.call_tool("get_boot_timeline", {})
        words = "".join(item.text for item in shown.content if item.type == "text")
        for phase in self.assembled().context.runtime.phases:
            self.assertIn(phase, words)
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(b"\x89PNG"))

    async def test_a_pasted_log_in_both_protocol_modes(self) -> None:
        for mode in ("auto", "legacy"):
            async with self.in_process(mode) as client:
                found = await self.answer(client, "analyze_logs", text=f"noise\n{_KV}\n")
                self.assertEqual(found["kind"], "kv_cache_too_small")
                self.assertEqual(found["line"], _KV)
                self.assertEqual(found["changes"][0]["to_value"], "20480")
                self.assertTrue(found["will_not_help"])

    def test_triage_needs_nothing_but_python(self) -> None:
        program = str(self.rig_folder / "triage.py")
        cases: tuple[tuple[list[str], str, int, str], ...] = (
            (["-"], f"noise\n{_KV}\n", 1, "--max-model-len: 65536 -> 20480"),
            (["--json", "-"], _KV, 1, '"kind": "kv_cache_too_small"'),
            ([], "all is well\n", 0, "no failure found"),
            ([str(self.place / "absent.log")], "", 2, ""),
        )
        for words, log, status, wanted in cases:
            with self.subTest(words=words):
                done = subprocess.run(
                    # -I -S: no package, no path but the program's own.
                    [sys.executable, "-I", "-S", program, *words],
                    input=log,
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(wanted, done.stdout)
                self.assertNotIn("Traceback", done.stderr)
        answer = json.loads(
            subprocess.run(
                [sys.executable, "-I", "-S", program, "--json"],
                input=b"\xff\x00" * 1000 + _KV.encode(),
                capture_output=True,
            ).stdout
        )
        self.assertEqual(answer["failures"][0]["kind"], "kv_cache_too_small")

    async def test_a_rig_without_its_triage_says_so(self) -> None:
        program = self.rig_folder / "triage.py"
        kept = program.read_bytes()
        program.unlink()
        self.addCleanup(program.write_bytes, kept)
        async with self.in_process() as client:
            text = await self.refusal(client, "analyze_logs", "NOT_FOUND", text="x")
        self.assertIn("triage.py", text)


# ── suites / folders ──────────────────────────────────────────────────────────────────────────────
# Model folders that must not be served: what each refusal says, and that nothing was started.
#
# Every folder is whole at first and gets one fault. Rows A42 of the checklist, and the half-done
# downloads of real life.


def _edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _header(folder: Path, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header)


def _tensor(folder: Path, **entry: object) -> None:
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}
    _header(folder, json.dumps({"model.norm.weight": whole}).encode())


def _missing_shard(folder: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "model.safetensors").rename(folder / names[0])
    weight_map = {"model.norm.weight": names[0], "model.embed_tokens.weight": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _dangling_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")


# The fault's name: how it is made, the class of the refusal, and words that must stand in it.
_FOLDER_FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "INVALID", "no such folder"),
    "no chat template": (
        lambda f: (f / "chat_template.jinja").unlink(),
        "INVALID",
        "chat template",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "INVALID", "tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "INVALID", ".safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "INVALID", "config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "INVALID",
        "config.json",
    ),
    "config is nested without end": (
        lambda f: (f / "config.json").write_text("[" * 200_000),
        "INVALID",
        "config.json",
    ),
    "config is no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "INVALID",
        "config.json",
    ),
    "a shard is missing": (_missing_shard, "INVALID", "model-00002-of-00002.safetensors"),
    "the index is damaged": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 7}'),
        "INVALID",
        "model.safetensors.index.json",
    ),
    "a download goes on": (
        lambda f: (f / "model.safetensors.incomplete").write_bytes(b""),
        "INVALID",
        "unfinished download",
    ),
    "the weights are cut off": (_cut_off, "INVALID", "lacks its last 100 bytes"),
    "the header is cut off": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x10\x00"),
        "INVALID",
        "model.safetensors",
    ),
    "the header is longer than the file": (
        lambda f: _header(f, b"{}", 2**62),
        "INVALID",
        "model.safetensors",
    ),
    "the header is no JSON": (lambda f: _header(f, b"{nonsense}"), "INVALID", "header"),
    "the header is nested without end": (
        lambda f: _header(f, b"[" * 200_000),
        "INVALID",
        "header",
    ),
    "a tensor without a shape": (lambda f: _tensor(f, shape=None), "INVALID", "norm.weight"),
    "a tensor of a negative shape": (lambda f: _tensor(f, shape=[-4]), "INVALID", "norm.weight"),
    "a tensor at no place": (
        lambda f: _tensor(f, data_offsets=["a", "b"]),
        "INVALID",
        "norm.weight",
    ),
    "a tensor of an unknown type": (lambda f: _tensor(f, dtype="F3"), "INVALID", "F3"),
    "10 TB are announced and not there": (
        lambda f: _tensor(f, shape=[2_500_000_000_000], data_offsets=[0, 10_000_000_000_000]),
        "INVALID",
        "lacks its last",
    ),
    "a link leads nowhere": (_dangling_link, "INVALID", "model.safetensors"),
    "a pickle beside the weights": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04."),
        "DENIED",
        "pytorch_model.bin",
    ),
    "nothing but a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "model.PT"),
        "DENIED",
        "model.PT",
    ),
    "code of its own for the model": (
        lambda f: _edit_json(f / "config.json", auto_map={"AutoModel": "evil.Model"}),
        "DENIED",
        "auto_map",
    ),
    "code of its own for the tokenizer": (
        lambda f: _edit_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["e", None]}),
        "DENIED",
        "auto_map",
    ),
}


class FolderSuite(RigCase):
    """A folder is read before anything starts, and the refusal says what to do."""

    async def test_every_fault_of_a_folder_is_refused_before_anything_starts(self) -> None:
        journal, starts = len(self.journal()), len(self.engine.starts())
        async with self.in_process() as client:
            for number, (name, (spoil, error_class, words)) in enumerate(_FOLDER_FAULTS.items()):
                with self.subTest(name):
                    folder = write_tiny_folder(self.place / "models" / f"spoilt {number}")
                    spoil(folder)
                    text = await self.refusal(client, "serve_model", error_class, model=str(folder))
                    self.assertIn(words, text)
                    self.assertIn(str(folder), text)
                    self.assertIn(" Next: ", text)
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.journal()), journal, "a start was intended")

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "huge")
        table = {"model.embed_tokens_per_layer.weight": [1_000_000_000_000]}
        weights = {"model.embed_tokens.weight": [1_500_000_000_000]}
        write_safetensors(folder / "model.safetensors", table | weights)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(folder))
            # bfloat16 holds two bytes a number: 5 TB, and no part of it is forgiven.
            self.assertIn("weights 5000.00", text)
            self.assertIn("needs 5000.8", text)
            self.assertIn("2000.00 GB of the weights are the per-layer embedding table", text)
            self.assertIn("not subtracted", text)
            self.assertIn(" Next: ", text)
        self.assertNotIn(str(folder), [start["argv"][1] for start in self.engine.starts()])
        self.assertEqual(self.processes(), [])

    async def test_the_setting_names_a_spoilt_folder(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "by setting")
        (folder / "chat_template.jinja").unlink()
        self.write_settings(MODEL_NAME=str(folder), PORT=str(self.port))
        try:
            async with self.in_process() as client:
                await self.refusal(client, "serve_model", "INVALID")
                await self.refusal(client, "get_model_details", "INVALID")
                status = await self.answer(client, "get_system_status")
                self.assertIn("chat template", status["memory"])
                (folder / "chat_template.jinja").write_text("{{ messages }}")
                details = await self.answer(client, "get_model_details")
                self.assertEqual(details["folder"], str(folder))
        finally:
            self.write_settings(MODEL_NAME=self.model, PORT=str(self.port))

    async def test_a_folder_that_is_spoilt_between_asking_and_loading(self) -> None:
        """The check is made again in the job: what is loaded is what was checked."""
        folder = write_tiny_folder(self.place / "models" / "raced")
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model", model=str(folder))
            (folder / "weights.pkl").write_bytes(b"\x80\x04.")
            text = await self.refusal(client, "wait_for_model_ready", "DENIED")
            self.assertIn("weights.pkl", text)
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual((job["state"], job["phase"]), ("failed", "weights"))
        self.assertNotIn(str(folder), [start["argv"][1] for start in self.engine.starts()])
        await self.assert_all_gone()


# ── suites / full_disk ────────────────────────────────────────────────────────────────────────────
# A state folder that takes no byte: no intent on the disk, no act; and the server goes on.
#
# A limit on the size of files stands in for the full disk: it needs no privilege and no mount, and
# the writes fail in the same place.

# The soft limit alone, so that a program which stands at the edge can lift it for itself.
NO_FILE_GROWS = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


class FullDiskSuite(RigCase):
    """What cannot be written down is not started, and says so."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    preamble: ClassVar[str] = ""  # of the runner that is the rig's server
    looking: ClassVar[tuple[str, ...]] = ("get_system_status", "wait_for_model_ready", "get_help")

    def _refused(self, server: RawServer, *words: str) -> None:
        """A start is DENIED with `words`, and everything that only looks still answers."""
        starts = len(self.engine.starts())
        fault = call_fault(server.call(self.starting_tool, dict(self.starting_arguments)))
        self.assertTrue(fault.startswith("DENIED "), fault)
        for word in (*words, " Next: "):
            self.assertIn(word, fault)
        for tool in self.looking:
            self.assertEqual(call_fault(server.call(spelled(tool), {})), "", tool)
        status = server.call("get_system_status", {})["result"]["structuredContent"]
        self.assertEqual(status["state"], "stopped")
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)
        self.assertTrue(server.answers_ping())

    def test_the_disk_is_full(self) -> None:
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        for known in (False, True):  # on the very first start, and later
            with self.subTest(known):
                shutil.rmtree(self.state, ignore_errors=True)
                if known:
                    self.assembled()
                # Standard error is a file here, which would not grow either: nobody reads it.
                with raw_server(runner, self.environment, self.stderr_file) as server:
                    self._refused(server, "written")

    def test_a_file_stands_where_the_folder_should_be(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        try:
            with raw_server(self.server_file, self.environment, self.stderr_file) as server:
                self._refused(server, str(self.state))
        finally:
            self.state.unlink()

    def test_what_is_started_after_the_mending_is_found_again(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        server_file = self.rig_folder / "server.py"
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            self.state.unlink()
            answer = server.call("serve_model", {"wait_s": 50})
            running = self.processes("server")
            if not call_fault(answer):
                self.assertEqual(answer["result"]["structuredContent"]["state"], "ready", answer)
            self.assertEqual(bool(call_fault(answer)), not running, answer)
        with raw_server(server_file, self.environment, self.stderr_file) as server:
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual([status["pid"]] if running else [], running, json.dumps(status))
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
        self.assertEqual(self.processes("server"), [], "it was not found again")

    def test_a_model_that_runs_can_be_asked_and_stopped_on_a_full_disk(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        with raw_server(
            self.rig_folder / "server.py", self.environment, self.stderr_file
        ) as server:
            ready = server.call("serve_model", {"wait_s": 50})["result"]["structuredContent"]
            self.assertEqual(ready["state"], "ready")
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        with raw_server(runner, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("query_gemma4", {"prompt": "hello"})), "")
            self.assertEqual(call_fault(server.call("stop_model", {})), "")
            self.assertEqual(self.processes("server"), [])
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual(status["state"], "stopped")


# ── suites / keyed_server ─────────────────────────────────────────────────────────────────────────
# A model server that asks for a key: which lies in one file, and is shown by no tool.
#
# The suites of rigs with such a server are made from it.


class KeyedServerSuite(RigCase):
    """`key_file` is the name of the file in the rig's state folder."""

    key_file = ""

    def _status(self, path: str, headers: dict[str, str]) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    async def test_a_key_is_asked_for_and_lies_in_its_file_alone(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            self.assertEqual(self._status("/v1/models", {}), 401)
            self.assertEqual(self._status("/v1/models", self.engine.headers()), 200)
            self.assertEqual(self._status("/health", {}), 200)
            said = [await self.text(client, tool) for tool in ("get_endpoint", "get_server_logs")]
            said += [await self.text(client, tool) for tool in ("get_system_status", "get_help")]
        key = self.engine.headers()["Authorization"].partition(" ")[2]
        self.assertRegex(key, r"^sk-[0-9a-f]{48}$")
        self.assertNotIn(key, "\n".join(said))
        self.assertNotIn(key, " ".join(self.engine.starts()[-1]["argv"]))
        holders = [
            path
            for path in self.state.rglob("*")
            if path.is_file() and key in path.read_text(errors="replace")
        ]
        self.assertEqual([path.name for path in holders], [self.key_file])
        self.assertEqual(holders[0].stat().st_mode & 0o077, 0)


# ── suites / leaving ──────────────────────────────────────────────────────────────────────────────
# How the server goes: at once, with the right status, no attached child left, and what it
# detached unhurt.
#
# Clients end a server by SIGINT, by SIGTERM or by closing its input: idle, in the middle of a call,
# and while a model comes up.

LEAVE_WITHIN_S = 5.0  # 0.01 to 0.3 s on an idle machine
# What ends a server (0: end of input) and the exit status that it must leave with.
_WAYS_TO_LEAVE = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    0: 0,
}


class LeavingSuite(RigCase):
    """The server leaves when it is told to; what it detached stays, and is found again."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    attached: ClassVar[int] = 1  # children of a call that looks before it starts something

    def begin_start(self, server: RawServer) -> int:
        """Ask for what would start something; the request's number."""
        call = {"name": self.starting_tool, "arguments": dict(self.starting_arguments)}
        return server.send("tools/call", call)

    @contextmanager
    def server(self) -> Iterator[RawServer]:
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            yield server

    def leave(self, server: RawServer, way: int) -> None:
        """End `server` so and check its status; the time is bounded loosely, not measured."""
        begun = time.monotonic()
        if way:
            server.process.send_signal(way)
        else:
            server.close_input()
        status = server.process.wait(LEAVE_WITHIN_S)
        self.assertEqual(status, _WAYS_TO_LEAVE[signal.Signals(way) if way else 0])
        self.assertLess(time.monotonic() - begun, LEAVE_WITHIN_S)

    async def children(self, server: RawServer) -> list[psutil.Process]:
        """The server's children, as soon as the call has as many as it starts."""
        process = psutil.Process(server.process.pid)

        def enough() -> list[psutil.Process]:
            found = process.children()
            return found if len(found) >= self.attached else []

        children: list[psutil.Process] = await self.until(enough, "no child was started")
        self.assertEqual(len(children), self.attached)
        return children

    async def test_when_it_is_idle(self) -> None:
        for way in (signal.SIGHUP, 0):  # the others are tried below, in harder places
            with self.subTest(way), self.server() as server:
                self.leave(server, way)

    async def test_in_the_middle_of_a_call_with_an_attached_child(self) -> None:
        starts = len(self.engine.starts())
        for way in (signal.SIGINT, signal.SIGTERM, 0):
            with self.subTest(way), self.server() as server:
                self.engine.hold_environment_check(True)
                try:
                    self.begin_start(server)
                    children = await self.children(server)
                    self.leave(server, way)
                    gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                    self.assertEqual(alive, [], "an attached child was left")
                finally:
                    self.engine.hold_environment_check(False)
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_cancelling_a_call_ends_its_attached_child(self) -> None:
        with self.server() as server:
            self.engine.hold_environment_check(True)
            try:
                number = self.begin_start(server)
                children = await self.children(server)
                server.send_text(
                    b'{"jsonrpc":"2.0","method":"notifications/cancelled",'
                    b'"params":{"requestId":%d}}' % number
                )
                gone, alive = psutil.wait_procs(children, timeout=LEAVE_WITHIN_S)
                self.assertEqual(alive, [], "the cancelled call's child was left")
            finally:
                self.engine.hold_environment_check(False)
            self.assertTrue(server.answers_ping())
            # The lock that the call held is free again.
            self.assert_starts(server)

    def assert_starts(self, server: RawServer) -> None:
        """What was refused or broken off before works now."""
        self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")

    async def test_a_start_goes_on_without_the_server_that_began_it(self) -> None:
        for way in (signal.SIGINT, 0):
            with self.subTest(way):
                self.engine.script(load_s=1.0)
                with self.server() as server:
                    begun = server.call("serve_model", {})["result"]["structuredContent"]
                    await self.until(lambda: self.processes("server"), "it never began")
                    detached = self.processes()
                    self.leave(server, way)
                    self.assertEqual(self.processes(), detached, "a detached process was hurt")
                with self.server() as server:
                    answer = server.call(spelled("wait_for_model_ready"), {})
                    ready = answer["result"]["structuredContent"]
                    self.assertEqual(
                        (ready["state"], ready["job_id"]), ("ready", begun["job_id"]), ready
                    )
                    status = server.call("get_system_status", {})["result"]["structuredContent"]
                    self.assertEqual([status["pid"]], self.processes("server"))
                    answered = server.call("query_gemma4", {"prompt": "still there?"})
                    self.assertEqual(call_fault(answered), "")
                    self.assertEqual(call_fault(server.call("stop_model", {})), "")
                await self.assert_all_gone()


# ── suites / measuring ────────────────────────────────────────────────────────────────────────────
# Measuring on the rig: from run_benchmark to the picture, the plan on paper, the probes.
#
# The model is the scripted one, so figures mean nothing here; that they are right is tested where
# the
# load generator is made.

_PNG = b"\x89PNG\r\n"


class MeasuringSuite(RigCase):
    """What is measured becomes a report, and what is not known is not said."""

    keeps_running = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()

    async def bench_name(self, client: Client) -> str:
        """This rig's own name of run_benchmark."""
        tools = (await client.list_tools()).tools
        return next(tool.name for tool in tools if tool.name.startswith("run_"))

    async def measured(self, client: Client, **arguments: Any) -> dict[str, Any]:
        """A small benchmark, run to its end; the finished job."""
        small = {"concurrency": [1, 2], "context_tokens": [64], "output_tokens": 4}
        small |= {"requests_per_cell": 4, "seconds_per_cell": 5}
        begun = await self.answer(client, await self.bench_name(client), **{**small, **arguments})
        return await self.followed(client, begun["job_id"])

    async def followed(self, client: Client, job_id: str) -> dict[str, Any]:
        job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        while job["state"] in ("queued", "running"):
            job = await self.answer(client, "get_job", job_id=job_id, wait_s=50)
        return job

    async def test_from_the_benchmark_to_the_picture(self) -> None:
        async with self.in_process() as client:
            job = await self.measured(client)
            self.assertEqual(job["state"], "done", job)
            name = job["result"]["report"]
            listed = await self.answer(client, "list_reports")
            self.assertEqual(listed["reports"][0]["name"], name)
            page = await self.text(client, "show_report", name=name)
            self.assertIn("c2", page)
            shown = await client.call_tool("show_report", {"name": name, "view": "curves"})
        (picture,) = [item for item in shown.content if item.type == "image"]
        self.assertTrue(base64.b64decode(picture.data).startswith(_PNG))
        files = list(self.state.rglob(f"{name}.json"))
        self.assertEqual(len(files), 1, "the report lies in the state folder, and once")
        report = json.loads(files[0].read_text())
        self.assertEqual(report["run"]["rig"], self.module.RIG.name)
        self.assertEqual(report["planned_cells"], 2)
        self.assertTrue(report["workload"]["tool_version"].startswith(self.module.RIG_VERSION))
        self.assertNotIn(str(self.place), files[0].read_text(), "a path of this computer got out")
        kept = {path.name for path in self.rig_folder.iterdir()}
        self.assertNotIn("benchmarks", kept, "a copy that is no checkout got files")

    async def test_two_reports_of_one_build_are_compared(self) -> None:
        async with self.in_process() as client:
            names = [(await self.measured(client))["result"]["report"] for _ in range(2)]
            self.assertNotEqual(names[0], names[1])
            both = await self.answer(client, "compare_reports", first=names[0], second=names[1])
        self.assertEqual(both["blocking"], [])

    async def test_an_engine_that_fails_is_reported_as_failing(self) -> None:
        self.engine.script(fault="status 500")
        async with self.in_process() as client:
            job = await self.measured(client, save_result=False)
            listed = await self.answer(client, "list_reports")
        said = json.dumps(job)
        self.assertIn("500", said)
        self.assertNotIn("tok/s", said.replace("0.0 tok/s", ""), "a failed cell has a rate")
        self.assertFalse([line for line in listed["reports"] if line["fault"]])

    async def test_the_own_plan_and_one_that_arithmetic_refuses(self) -> None:
        async with self.in_process() as client:
            own = await self.answer(client, "plan_deployment")
            big = await self.answer(client, "plan_deployment", model="31B", hardware="v5e1")
            self.assertFalse(big["fits"])
            self.assertEqual(big["verdict"], "refused by arithmetic")
            self.assertTrue(big["reasons"])
            small = await self.answer(
                client, "plan_deployment", model="E2B", hardware="v6e1", engine="vllm"
            )
        self.assertGreater(own["memory_bytes"]["weights, all"], 0)
        self.assertTrue(small["fits"], small["reasons"])
        self.assertGreater(small["usd"]["per hour"], 0)

    async def test_the_probes_judge_and_keep_their_evidence(self) -> None:
        async with self.in_process() as client:
            begun = await self.answer(client, "probe_capabilities", cases=["determinism"])
            job = await self.followed(client, begun["job_id"])
        self.assertEqual(job["state"], "done", job)
        self.assertEqual(job["result"]["verdicts"]["greedy_repeats"], "pass")

    async def test_two_measurements_at_once_are_refused(self) -> None:
        self.engine.script(pace_s=0.2)
        async with self.in_process() as client:
            tool = await self.bench_name(client)
            first = await self.answer(client, tool, concurrency=[1], context_tokens=[64])
            for other in (tool, "probe_capabilities"):
                text = await self.refusal(client, other, "BUSY")
                self.assertIn(first["job_id"], text)
            await self.answer(client, "cancel_job", job_id=first["job_id"])
        await self.until(lambda: not self.processes("job"), "the cancelled job's worker is left")

    def test_the_load_generator_by_hand_says_what_it_needs(self) -> None:
        for words, wanted in (([], "usage"), ([str(self.place)], "holds no plan")):
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "loadgen.py"), *words],
                env=self.environment,
                capture_output=True,
                text=True,
            )
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(wanted, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


# ── suites / outgoing ─────────────────────────────────────────────────────────────────────────────
# What leaves the rig: JSON-RPC and nothing else on its output, no secret anywhere, all bounded.

FRAME_LIMIT = 200_000  # bytes of one answer: text and structure, each bounded

# A token of the Hub's form, one that only its variable's name gives away, a cloud's.
CANARIES = {
    "HF_TOKEN": "hf_CANARYcanaryCANARYcanaryCANARY01",
    "SOME_SERVICE_API_KEY": "canary plain words 4711",
    "AWS_SECRET_ACCESS_KEY": "CANARY/aws/0123456789abcdefghijk",
}


class OutgoingSuite(RigCase):
    """Standard output is the protocol's alone, and secrets stay where they were."""

    @contextmanager
    def server(self, **environment: str) -> Iterator[RawServer]:
        surroundings = {**self.environment, **environment}
        with raw_server(self.server_file, surroundings, self.stderr_file) as server:
            yield server

    def assert_protocol_only(self, server: RawServer) -> None:
        """Every line of output is one JSON-RPC message, and none is beyond its bounds."""
        self.assertGreater(len(server.lines), 1)
        for line in server.lines:
            message = json.loads(line)
            self.assertEqual(message["jsonrpc"], "2.0")
            self.assertTrue("result" in message or "error" in message or "method" in message)
            self.assertLess(len(line), FRAME_LIMIT)

    def call_all(self, server: RawServer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every tool once, with arguments that it takes; what ends the model comes last."""
        arguments: dict[str, dict[str, Any]] = {
            spelled("get_server_logs"): {"lines": 2000},
            "query_gemma4": {"prompt": "hello"},
            "query_gemma4_with_stats": {"prompt": "hello"},
            "get_job": {"job_id": "serve-20260101-000000-abcdef"},
            "cancel_job": {"job_id": "serve-20260101-000000-abcdef"},
        }
        tools = sorted(rig_under_test().tools, key=lambda tool: tool == "stop_model")
        for tool in tools:
            yield tool, server.call(tool, arguments.get(tool, {}))

    def test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log(self) -> None:
        self.engine.script(
            noise=30_000_000, log="x" * 3_000_000, answer="\x00\x1b[2J\u202e\x9b done"
        )
        with self.server() as server:
            answer = server.call("serve_model", {"wait_s": 50})
            self.assertEqual(answer["result"]["structuredContent"]["state"], "ready")
            structured = 0
            for tool, answer in self.call_all(server):
                text = json.dumps(answer, ensure_ascii=False)
                bad = [c for c in text if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
                self.assertEqual(bad, [], tool)
                for escape in ("\\u0000", "\\u001b", "\\ud8"):
                    self.assertNotIn(escape, text, tool)
                structured += self._halves_agree(tool, answer["result"])
            self.assertGreaterEqual(structured, 8)
            self.assertTrue(server.answers_ping())
            self.assert_protocol_only(server)

    def _halves_agree(self, tool: str, result: dict[str, Any]) -> bool:
        """Whether there is a structure; text and structure then say the same to each client."""
        structure = result.get("structuredContent")
        if structure is None:
            return False
        text = result["content"][0]["text"]
        self.assertTrue(text.startswith(structure["summary"]), tool)
        if structure["next_step"]:
            self.assertTrue(text.endswith(f"Next: {structure['next_step']}"), tool)
        return True

    def test_the_end_of_a_noisy_log_is_what_is_shown(self) -> None:
        self.engine.script(noise=3_000_000, crash="out of luck")
        with self.server() as server:
            fault = call_fault(server.call("serve_model", {"wait_s": 50}))
            self.assertIn("RuntimeError: out of luck", fault)
            answer = server.call(spelled("get_server_logs"), {"lines": 2000})
            log = answer["result"]["content"][0]["text"]
            self.assertIn("the last line of the noise", log)
            self.assertTrue(log.rstrip().endswith("RuntimeError: out of luck"), log[-200:])
            self.assertIn("left out", log)
            self.assertLess(len(log), 40_000)

    def test_a_canary_in_the_environment_appears_nowhere(self) -> None:
        heard: list[bytes] = []
        with self.server(**CANARIES) as server:
            self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")
            (pid,) = self.processes("server")
            model_server = psutil.Process(pid)
            heard.append(json.dumps(model_server.environ()).encode())
            heard.append(json.dumps(model_server.cmdline()).encode())
            called = [tool for tool, _ in self.call_all(server)]
            self.assertEqual(called[-1], "stop_model")
            self.engine.script(crash="no good")
            self.assertTrue(call_fault(server.call("serve_model", {"wait_s": 50})))
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            heard += server.lines
        for path in self.place.rglob("*"):
            with contextlib.suppress(OSError):  # a folder, or what a worker took away meanwhile
                heard.append(path.read_bytes())
        self.assertGreater(len(heard), 30)
        for name, canary in CANARIES.items():
            for text in heard:
                self.assertNotIn(canary.encode(), text, name)
                self.assertNotIn(json.dumps(canary)[1:-1].encode(), text, name)

    def test_a_secret_that_others_say_does_not_pass_through(self) -> None:
        others = "hf_OTHERotherOTHERotherOTHERother02"
        mine = CANARIES["SOME_SERVICE_API_KEY"]
        said = f"the token is {others}, the key is {mine}. end"
        self.engine.script(answer=said, log=said)
        with self.server(**CANARIES) as server:
            self.assertEqual(call_fault(server.call("serve_model", {"wait_s": 50})), "")
            self.engine.script(fault="status 500", words=said)
            fault = call_fault(server.call("query_gemma4", {"prompt": "hello"}))
            self.assertTrue(fault.startswith("INTERNAL "), fault)
            self.assertIn("the token is [redacted]", fault)
            self.assertNotIn(others, fault)
            self.assertNotIn(mine, fault)
            self.engine.script(answer=said)
            for tool, answer in self.call_all(server):
                text = json.dumps(answer)
                self.assertNotIn(others, text, tool)
                self.assertNotIn(mine, text, tool)
                if tool in ("query_gemma4", spelled("get_server_logs")):
                    self.assertIn("the token is [redacted]", text, tool)


# ── suites / read_only ────────────────────────────────────────────────────────────────────────────
# RIG_READ_ONLY=1: what changes something is refused at the call, not only left out of a list.


class ReadOnlySuite(RigCase):
    """The gate stands before every mutating tool, in process and over stdio, and moves at once."""

    stopping_tool: ClassVar[str] = "stop_model"

    async def nothing_is_waited_for(self, client: Client) -> None:
        """Waiting for a model is allowed, and tells that there is none."""
        waited = await self.answer(client, "wait_for_model_ready", wait_s=0)
        self.assertEqual(waited["state"], "stopped")

    async def stop(self, client: Client) -> None:
        """End what serves, by the rig's tool."""
        await self.answer(client, self.stopping_tool)

    def _mutating(self) -> list[str]:
        return [name for name, effect in rig_under_test().tools.items() if effect != "reads"]

    async def _all_refused(self, client: Client) -> None:
        mutating = self._mutating()
        self.assertGreaterEqual(len(mutating), 3)
        for tool in mutating:
            good = {"job_id": "serve-20260101-000000-abcdef"} if tool == "cancel_job" else {}
            for arguments in (good, {"nonsense": 1}):
                text = await self.refusal(client, tool, "DENIED", **arguments)
                self.assertIn(tool, text)
                self.assertIn("read-only", text)
        await self.assert_all_gone()
        self.assertEqual(self.journal(), [])

    async def test_in_process_in_both_modes(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="1"):
            for mode in PROTOCOL_MODES:
                async with self.in_process(mode) as client:
                    await self._all_refused(client)

    async def test_over_stdio(self) -> None:
        async with self.over_stdio("legacy", extra={"RIG_READ_ONLY": "1"}) as client:
            await self._all_refused(client)

    async def test_looking_is_allowed_and_the_list_stays_whole(self) -> None:
        with mock.patch.dict("os.environ", RIG_READ_ONLY="true"):
            async with self.in_process() as client:
                self.assertEqual(len(await listed_tools(client)), len(rig_under_test().tools))
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["settings"]["RIG_READ_ONLY"], "True (environment)")
                await self.nothing_is_waited_for(client)

    async def test_the_file_moves_the_gate_while_the_server_runs(self) -> None:
        values = self.good_settings()
        try:
            async with self.in_process() as client:
                await self.serve(client)
                self.write_settings(**values, RIG_READ_ONLY="1")
                await self.refusal(client, self.stopping_tool, "DENIED")
                # A typing error in the file must not open the gate.
                self.write_settings(**values, RIG_READ_ONLY="1", DTIPE="float32")
                await self.refusal(client, self.stopping_tool, "DENIED")
                self.write_settings(**values, RIG_READ_ONLY="1")
                self.assertEqual(len(self.processes("server")), 1)
                await self.answer(client, "query_gemma4", prompt="still there?")
                self.write_settings(**values, RIG_READ_ONLY="0")
                await self.stop(client)
                await self.assert_all_gone()
        finally:
            self.write_settings(**values)
            for file in self.state.rglob("journal.jsonl"):
                file.unlink()


# ── suites / serving ──────────────────────────────────────────────────────────────────────────────
# The way of a model through its tools: serve, wait, ask, measure, look, stop, serve again.

HEALTH_ANSWER = "Paris."


class ServingSuite(RigCase):
    """From nothing to an answer and back, as an agent does it."""

    architecture = "Gemma4ForCausalLM"  # of the small model, as its files name it

    async def test_the_whole_way_over_stdio(self) -> None:
        told: list[tuple[float, str]] = []

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self.assertEqual(total, 100)
            told.append((progress, message or ""))

        self.engine.script(load_s=0.6)
        async with self.over_stdio() as client:
            self.assertEqual((await self.answer(client, "get_system_status"))["state"], "stopped")
            begun = await self.answer(client, "serve_model")
            self.assertEqual(begun["state"], "starting")
            self.assertIn(spelled("wait_for_model_ready"), begun["next_step"])
            self.assertIsNone(begun["remaining_s"], "a time left before any start was measured")
            result = await client.call_tool(
                spelled("wait_for_model_ready"), {"wait_s": 50}, progress_callback=tell
            )
            ready = dict(result.structured_content or {})
            self.assertEqual(ready["state"], "ready", ready)
            self.assertEqual(ready["percent"], 100)
            self._progress_is_sound(told)
            await self._ask_everything(client)
            await self._stop_and_look(client)

    def _progress_is_sound(self, told: list[tuple[float, str]]) -> None:
        percentages = [progress for progress, _ in told]
        self.assertEqual(percentages, sorted(percentages), "progress went backwards")
        phases = list(dict.fromkeys(message.partition(":")[0] for _, message in told))
        order = [phase for phase in self.assembled().context.runtime.phases if phase in phases]
        self.assertEqual(phases[: len(order)], order)
        self.assertIn("load", phases)

    async def _ask_everything(self, client: Any) -> None:
        health = await self.answer(client, "verify_model_health")
        self.assertTrue(health["healthy"], health)
        self.assertEqual((health["answer"], health["model"]), (HEALTH_ANSWER, self.model))
        answer = await self.answer(
            client, "query_gemma4", prompt="two words", system="be short", max_tokens=7
        )
        self.assertEqual(answer["text"], "Good day.")
        self.assertEqual((answer["prompt_tokens"], answer["completion_tokens"]), (4, 2))
        self.assertEqual(answer["finish_reason"], "stop")
        sent = self.engine.requests()[-1]["body"]
        roles = [(message["role"], message["content"]) for message in sent["messages"]]
        self.assertEqual(roles, [("system", "be short"), ("user", "two words")])
        self.assertEqual((sent["max_tokens"], sent["temperature"]), (7, 0))
        details = await self.answer(client, "get_model_details")
        self.assertEqual(details["architecture"], self.architecture)
        self.assertEqual(details["folder"], self.model)
        self.assertIn("per-layer embedding", details["beside"])
        endpoint = await self.answer(client, "get_endpoint")
        address = f"http://127.0.0.1:{self.port}/v1"
        self.assertEqual((endpoint["base_url"], endpoint["model"]), (address, self.model))
        asked = urllib.request.Request(f"{address}/models", headers=self.engine.headers())
        with urllib.request.urlopen(asked, timeout=10) as reply:
            self.assertEqual(reply.status, 200)
        log = await self.text(client, "get_server_logs")
        self.assertIn("Loading weights: 100%", log)
        self.assertNotIn("Loading weights:  50%", log, "a progress bar's past is worth no line")

    async def _stop_and_look(self, client: Any) -> None:
        status = await self.answer(client, "get_system_status")
        self.assertEqual((status["state"], status["model"]), ("ready", self.model))
        self.assertEqual([status["pid"]], self.processes("server"))
        self.assertIn(f"is ready at {status['endpoint']}", status["summary"].splitlines()[0])
        for half in ("machine", "cost"):
            self.assertEqual(status[half]["missing"], "", half)
        figures = {name: value for name, value in status["load"].items() if name != "missing"}
        if None in figures.values():  # an engine that does not count everything says so
            self.assertTrue(status["load"]["missing"], figures)
        stopped = await self.answer(client, "stop_model")
        self.assertIn(str(status["pid"]), stopped["summary"])
        await self.assert_all_gone()
        again = await self.answer(client, "stop_model")
        self.assertIn("nothing was running", again["summary"].lower())
        for tool in ("query_gemma4", "query_gemma4_with_stats"):
            text = await self.refusal(client, tool, "NOT_FOUND", prompt="hello")
            self.assertIn("Next: serve_model()", text)
        for tool in ("get_endpoint", "verify_model_health"):
            self.assertIn("serve_model()", await self.refusal(client, tool, "NOT_FOUND"))
        self.assertIn("Loading weights", await self.text(client, "get_server_logs"))

    async def test_statistics_are_those_of_the_stream(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            self.engine.script(answer="one two three four five", pace_s=0.1)
            measured = await self.answer(client, "query_gemma4_with_stats", prompt="count")
        self.assertTrue(measured["complete"])
        self.assertEqual(measured["completion_tokens"], 5)
        # Five words, 0.1 s after each: the fourth gap ends at 0.4 s, the stream at 0.5 s or later.
        self.assertGreaterEqual(measured["total_s"], 0.5)
        self.assertGreaterEqual(measured["tpot_ms"], 95)
        self.assertLess(measured["ttft_s"], measured["total_s"] - 0.4)
        rate = measured["completion_tokens"] / measured["total_s"]
        self.assertAlmostEqual(measured["tokens_per_s"], rate, delta=0.1)

    async def test_a_second_start_knows_how_long_the_first_one_took(self) -> None:
        self.engine.script(load_s=0.7)
        async with self.in_process() as client:
            first = await self.serve(client)
            await self.answer(client, "stop_model")
            begun = await self.answer(client, "serve_model")
            remaining = []
            while (job := await self.answer(client, "get_job", job_id=begun["job_id"]))[
                "state"
            ] in ("queued", "running"):
                remaining.append(job["remaining_s"])
                await asyncio.sleep(0.1)
        known = [value for value in remaining if value is not None]
        self.assertTrue(known, f"no time left was ever told: {remaining}")
        self.assertGreater(known[0], 0.3)
        self.assertLess(known[0], first["seconds"] + 1)
        self.assertLess(known[-1], known[0])
        self.assertEqual(job["result"]["model"], self.model)

    async def test_a_second_call_reports_what_runs_and_starts_nothing(self) -> None:
        self.engine.script(load_s=0.8)
        async with self.in_process() as client, self.in_process("legacy") as other:
            first = await self.answer(client, "serve_model")
            second = await self.answer(other, "serve_model")
            self.assertEqual(second["job_id"], first["job_id"])
            busy = await self.refusal(client, "query_gemma4", "BUSY", prompt="now?")
            self.assertIn(first["job_id"], busy)
            await self.refusal(other, "serve_model", "EXISTS", model="embedded")
            await self.answer(client, "wait_for_model_ready")
            third = await self.answer(other, "serve_model")
            self.assertEqual(third["state"], "ready")
            text = await self.refusal(other, "serve_model", "EXISTS", model="embedded")
            self.assertIn("stop_model()", text)
        self.assertEqual(len(self.engine.starts()), len({s["pid"] for s in self.engine.starts()}))
        self.assertEqual(len(self.processes("server")), 1)

    async def test_stopping_while_it_starts_leaves_nothing(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            stopped = await self.answer(client, "stop_model")
            self.assertIn(begun["job_id"], stopped["summary"])
            await self.assert_all_gone()
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
            self.assertEqual((await self.answer(client, "get_system_status"))["state"], "stopped")

    async def test_cancelling_the_job_undoes_it(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            job = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
            await self.assert_all_gone()
            again = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(again["state"], "cancelled")
            self.assertEqual(
                (await self.answer(client, "wait_for_model_ready"))["state"], "stopped"
            )
            await self.refusal(
                client, "get_job", "NOT_FOUND", job_id="serve-20200101-000000-abcdef"
            )

    async def test_a_client_that_goes_away_stops_nothing(self) -> None:
        """And a model that is given as an argument wins over the one of the settings."""
        other = str(rig_under_test().make_model(self.place / "models" / "another one"))
        self.engine.script(load_s=0.3)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model", model=other)
        async with self.in_process() as client:
            ready = await self.answer(client, "wait_for_model_ready")
            self.assertEqual((ready["state"], ready["job_id"]), ("ready", begun["job_id"]))
            self.assertEqual(ready["model"], other)
            self.assertEqual(self.engine.starts()[-1]["argv"][1], other)
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["model"], other)

    async def test_what_a_start_leaves_behind(self) -> None:
        """Files for this user alone, in the folders given; a server on loopback, kept offline."""
        async with self.in_process() as client:
            await self.serve(client)
        files = [path for path in self.state.rglob("*") if path.is_file()]
        self.assertGreater(len(files), 4)
        for path in files:
            if not path.name.endswith(".lock"):
                self.assertEqual(path.stat().st_mode & 0o077, 0, f"{path} can be read by others")
        written = {path.name for path in self.rig_folder.iterdir()} - {"__pycache__"}
        programs = {f"{name}.py" for name in self.module.RIG.programs}
        self.assertEqual(written, {"server.py", "tpu.env", *programs})
        self.assertEqual([p for p in Path(self.environment["HOME"]).iterdir()], [])
        start = self.engine.starts()[-1]
        argv = start["argv"]
        self.assertEqual(argv[argv.index("--host") + 1], "127.0.0.1")
        self.assertNotIn("--trust-remote-code", argv)
        self.assertEqual(start["environment"]["HF_HUB_OFFLINE"], "1")


# ── suites / settings_faults ──────────────────────────────────────────────────────────────────────
# tpu.env at fault, in every way: the server comes up, says what is wrong, recovers when mended.


class SettingsSuite(RigCase):
    """Whoever edits tpu.env learns the file, the key and the remedy, without a restart."""

    starting_tool: ClassVar[str] = "serve_model"
    starting_arguments: ClassVar[Mapping[str, Any]] = {}
    stopping_tool: ClassVar[str] = "stop_model"  # needs no value; empty where there is no such
    defaulted: ClassVar[tuple[str, str]] = ("DTYPE", "bfloat16")  # a key, and its own value

    def _good(self) -> str:
        return "".join(f"{key}={value}\n" for key, value in self.good_settings().items())

    async def refused_start(self, client: Client) -> str:
        """The refusal of what would start something."""
        arguments = dict(self.starting_arguments)
        return await self.refusal(client, self.starting_tool, "INVALID", **arguments)

    def _faults(self) -> dict[str, tuple[str, str]]:
        """Each fault by name: the file's text, and the words that must stand in the error."""
        good, port = self._good(), f"PORT={self.port}\n"
        return {
            "a missing key": (port, "MODEL_NAME is missing"),
            "another missing key": (f"MODEL_NAME={self.model}\n", "PORT is missing"),
            "an unknown key": (good + "PROT=8000\n", "PROT is not a key of this rig"),
            "a key twice": (good + port, "PORT stands in line 2 already"),
            "garbage": (good + "this is no assignment\n", "line 3 is not KEY=value"),
            "a bare key": (good + "DTYPE\n", "line 3 is not KEY=value"),
            "an export": (good + "export DTYPE=float32\n", "line 3 is not KEY=value"),
            "interpolation": (good.replace(self.model, "${HOME}/model"), "MODEL_NAME holds a '$'"),
            "a port that is no number": (good.replace(port, "PORT=http\n"), "PORT (from tpu.env)"),
            "a port below all bounds": (good.replace(port, "PORT=80\n"), "PORT (from tpu.env)"),
            "an unknown number format": (good + "DTYPE=int3\n", "DTYPE (from tpu.env)"),
            "an empty value": (good.replace(port, "PORT=\n"), "PORT"),
        }

    async def test_every_fault_is_named_and_mended_without_a_restart(self) -> None:
        starts = len(self.engine.starts())
        for name, (text, words) in self._faults().items():
            with self.subTest(name):
                self.write_settings_text(text)
                async with self.in_process() as client:
                    fault = await self.refused_start(client)
                    self.assertIn(words, fault)
                    self.assertIn("tpu.env", fault)
                    if self.stopping_tool:
                        await self.answer(client, self.stopping_tool)
                    status = await self.answer(client, "get_system_status")
                    self.assertIn(words, " ".join(status["notes"]))
                    self.assertIn(words, await self.text(client, "get_help"))
                    self.write_settings_text(self._good())
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual((status["notes"], status["model"]), ([], self.model))
        self.assertEqual(self.processes(), [])
        self.assertEqual(len(self.engine.starts()), starts)

    async def test_over_stdio_from_a_missing_file_to_a_served_model(self) -> None:
        path = self.rig_folder / "tpu.env"
        path.unlink()
        try:
            async with self.over_stdio() as client:
                text = await self.refused_start(client)
                self.assertIn(str(path), text)
                self.assertIn(" Next: ", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
                self.write_settings_text(self._good())
                await self.serve(client)
        finally:
            self.write_settings_text(self._good())

    async def test_bytes_that_are_no_text(self) -> None:
        try:
            (self.rig_folder / "tpu.env").write_bytes(b"MODEL_NAME=\xff\xfe\x00\n")
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("tpu.env", text)
                status = await self.answer(client, "get_system_status")
                self.assertIn("tpu.env", " ".join(status["notes"]))
        finally:
            self.write_settings_text(self._good())

    async def test_an_ambient_variable_wins_and_the_status_says_so(self) -> None:
        other = free_port()
        key, value = self.defaulted
        with mock.patch.dict("os.environ", {"PORT": str(other), key: ""}):
            async with self.in_process() as client:
                values = (await self.answer(client, "get_system_status"))["settings"]
                self.assertEqual(values["PORT"], f"{other} (environment)")
                self.assertEqual(values["MODEL_NAME"], f"{self.model} (tpu.env)")
                self.assertEqual(values[key], f"{value} (default)")
                self.assertIn(f"`PORT={other}` (environment)", await self.text(client, "get_help"))

    async def test_an_ambient_variable_at_fault_is_told_from_the_file(self) -> None:
        with mock.patch.dict("os.environ", PORT="http"):
            async with self.in_process() as client:
                text = await self.refused_start(client)
                self.assertIn("PORT (from the environment)", text)

    async def test_a_comment_a_quote_and_a_blank_line_are_no_fault(self) -> None:
        good = {**self.good_settings(), "MODEL_NAME": f"'{self.model}'  # why"}
        good["PORT"] = f'"{self.port}"\r'
        text = "# words = more\n\n" + "".join(f"{key}={value}\n" for key, value in good.items())
        try:
            self.write_settings_text(text)
            async with self.in_process() as client:
                status = await self.answer(client, "get_system_status")
                self.assertEqual((status["model"], status["notes"]), (self.model, []))
        finally:
            self.write_settings_text(self._good())

    async def test_a_shell_gets_the_values_as_the_server_read_them(self) -> None:
        folder = self.place / "models" / "with a blank"
        self.write_settings_text(self._good().replace(self.model, f"'{folder}'"))
        try:
            done = subprocess.run(
                [sys.executable, str(self.rig_folder / "server.py"), "env"],
                env=dict(os.environ, RIG_READ_ONLY="1"),
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            self.write_settings_text(self._good())
        self.assertEqual(done.returncode, 0, done.stderr)
        exported = {}
        for line in done.stdout.splitlines():
            word, assignment = shlex.split(line)
            self.assertEqual(word, "export")
            key, _, value = assignment.partition("=")
            exported[key] = value
        self.assertEqual(exported["MODEL_NAME"], str(folder))
        self.assertEqual(exported["RIG_READ_ONLY"], "1")
        self.assertEqual(exported["PORT"], str(self.port))


# ── suites / start_faults ─────────────────────────────────────────────────────────────────────────
# Every way in which a start can fail: its class, its reason, the next call, and nothing left.
#
# After a crash the same server starts the model once more, and it comes up.


class StartFaultSuite(RigCase):
    """A start that fails says why, in the log's own words, and leaves no process."""

    async def _fails(self, client: Client, error_class: str, *words: str) -> str:
        """serve_model fails so; afterwards nothing runs, status and wait tell the same story."""
        text = await self.refusal(client, "serve_model", error_class, wait_s=50)
        for word in words:
            self.assertIn(word, text)
        self.assertIn(" Next: ", text)
        await self.assert_all_gone()
        status = await self.answer(client, "get_system_status")
        self.assertIn(status["state"], ("stopped", "failed"))
        self.assertIsNone(status["pid"])
        return text

    async def test_a_crash_while_it_loads(self) -> None:
        self.engine.script(crash="the tensor 'lm_head' does not fit")
        async with self.in_process() as client:
            text = await self._fails(client, "INTERNAL", "RuntimeError", "does not fit")
            self.assertIn(f"{spelled('get_server_logs')}()", text)
            self.assertIn("Traceback", await self.text(client, "get_server_logs"))
            again = await self.refusal(client, "wait_for_model_ready", "INTERNAL")
            self.assertIn("does not fit", again)
            jobs = (await self.answer(client, "get_system_status"))["jobs"]
            job = await self.answer(client, "get_job", job_id=jobs[0].partition(":")[0])
            self.assertEqual((job["state"], job["phase"]), ("failed", "load"))
            self.assertTrue(job["error"].startswith("INTERNAL "), job)
            self.engine.script()
            await self.serve(client)

    async def test_it_listens_but_every_generation_fails(self) -> None:
        self.engine.script(fault="status 500", words="no kernel for this device")
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "500", "no kernel for this device")

    async def test_the_first_answer_is_empty(self) -> None:
        self.engine.script(fault="empty")
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "no token")

    async def test_it_listens_but_never_becomes_healthy(self) -> None:
        self.write_runner("short.py", "server._LOAD_PATIENCE_S = 1.0")
        self.engine.script(health=503)
        async with self.in_process(server_file="short.py") as client:
            await self._fails(client, "TIMEOUT", "did not load")

    async def test_it_never_listens(self) -> None:
        self.write_runner("short.py", "server._LOAD_PATIENCE_S = 1.0")
        self.engine.script(never_listens=True)
        async with self.in_process(server_file="short.py") as client:
            words = ("did not load in 1 s", f"{spelled('get_server_logs')}()")
            await self._fails(client, "TIMEOUT", *words)

    async def test_it_ignores_the_signal_to_end(self) -> None:
        self.engine.script(ignores_sigterm=True)
        async with self.in_process() as client:
            await self.serve(client)
            begun = time.monotonic()
            # Ten seconds of patience in real life; the act after them is what is tested.
            with mock.patch.object(self.module, "_STOP_PATIENCE_S", 0.4):
                await self.answer(client, "stop_model")
            self.assertGreaterEqual(time.monotonic() - begun, 0.4, "it was killed unasked")
            await self.assert_all_gone()

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        row = "model.layers.3.mlp.up_proj.weight | MISSING | "
        self.engine.script(log=f"Key | Status | \n{row}\n\n- MISSING: newly initialized")
        async with self.in_process() as client:
            await self._fails(client, "INVALID", "not whole", "model.layers.3.mlp.up_proj.weight")
            await self.assert_all_gone()
            self.engine.script()
            await self.serve(client)
            await self.answer(client, "stop_model")

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        metadata = self.engine.folder / "torch-2.13.0.dist-info" / "METADATA"
        good = metadata.read_text()
        try:
            async with self.in_process() as client:
                metadata.write_text(good.replace("2.13.0", "1.0"))
                await self._fails(client, "NOT_FOUND", "torch", "1.0", "2.13.", "launch.py install")
                metadata.write_text(good.replace("2.13.0", ""))
                await self._fails(
                    client, "NOT_FOUND", "torch", "not installed", "launch.py install"
                )
        finally:
            metadata.write_text(good)

    async def test_a_setting_changes_the_port_of_the_next_start(self) -> None:
        async with self.in_process() as client:
            await self.answer(client, "get_system_status")
            other = free_port()
            self.write_settings(MODEL_NAME=self.model, PORT=str(other))
            try:
                outcome = await self.serve(client)
                self.assertEqual(outcome["endpoint"], f"http://127.0.0.1:{other}/v1")
            finally:
                self.write_settings(MODEL_NAME=self.model, PORT=str(self.port))


# ── suites / jax_rig ──────────────────────────────────────────────────────────────────────────────
# What is the JAX engine's own in a rig: its flags, its key, its refusals, the random Gemma 4.
#
# The shared suites with what differs, and a suite of the embedded model and the key. All against
# the
# fake engine.

# The rig's own names of the tools that the shared suites call by the first rig's.
JAX_WORDS = {"wait_for_model_ready": "wait_for_jax_ready", "get_server_logs": "get_jax_logs"}


class JaxServingSuite(ServingSuite):
    """The whole way, and what holds for every start."""

    async def test_the_flags_and_the_environment_of_a_start(self) -> None:
        assert isinstance(self.engine, FakeJax)
        settings = {"MAX_MODEL_LEN": "512", "SLOTS": "3", "DTYPE": "bfloat16"}
        hostile = {"HF_TOKEN": "hf_" + "A" * 34, "XLA_FLAGS": "--xla_force_host", "LD_PRELOAD": ""}
        accelerator = {"JAX_PLATFORMS": "cuda,tpu"}
        with mock.patch.dict("os.environ", {**settings, **hostile, **accelerator}):
            async with self.in_process() as client:
                await self.serve(client)
                await self.answer(client, "stop_model")
        options = self.engine.options()
        for option, value in (
            ("--model", self.model),
            ("--served-model-name", self.model),
            ("--host", "127.0.0.1"),
            ("--port", str(self.port)),
            ("--max-model-len", "512"),
            ("--slots", "3"),
            ("--dtype", "bf16"),
        ):
            self.assertEqual(options[option], value, option)
        self.assertTrue(options["--compile-cache"].startswith(str(self.place / "cache")))
        environment = self.engine.starts()[-1]["environment"]
        self.assertEqual(environment["JAX_PLATFORMS"], "cpu", "an accelerator would be taken")
        self.assertFalse([name for name in environment if name in hostile], "a secret went along")

    async def test_float32_is_what_it_computes_in_unless_told_otherwise(self) -> None:
        assert isinstance(self.engine, FakeJax)
        async with self.in_process() as client:
            await self.serve(client)
            details = await self.answer(client, "get_model_details")
        self.assertEqual(details["dtype"], "float32")
        engine = hashlib.sha256((self.rig_folder / "jax_server.py").read_bytes()).hexdigest()
        self.assertEqual(
            details["resolved"], {"jax_server_sha256": engine[:16], "max_model_len": "4096"}
        )
        self.assertEqual(self.engine.options()["--dtype"], "f32")


class JaxStartFaultSuite(StartFaultSuite):
    """What the packages and the checkpoint lack is told in the engine's words."""

    async def test_a_model_whose_tensors_were_made_up_is_not_ready(self) -> None:
        """The engine makes none up: it refuses the checkpoint, says so, and ends."""
        words = "layers.3.mlp.up_proj.weight is missing"
        self.engine.script(refuses=words)
        async with self.in_process() as client:
            await self._fails(client, "INTERNAL", "ended while it was loading", words)
            self.assertIn(words, await self.text(client, "get_server_logs"))
            self.engine.script()
            await self.serve(client)

    async def test_a_package_is_missing_or_of_another_release(self) -> None:
        assert isinstance(self.engine, FakeJax)
        install = "launch.py install"
        try:
            async with self.in_process() as client:
                self.engine.set_version("jax", "0.9.9")
                await self._fails(client, "NOT_FOUND", "jax", "0.9.9", "0.10.2", install)
                self.engine.set_version("jax", "0.10.2")
                self.engine.set_version("starlette", "")
                await self._fails(client, "NOT_FOUND", "starlette", "not installed", install)
        finally:
            self.engine.set_version("jax", "0.10.2")
            self.engine.set_version("starlette", "1.10.0")

    async def test_without_the_engines_file_nothing_starts(self) -> None:
        program = self.rig_folder / "jax_server.py"
        text = program.read_bytes()
        program.unlink()
        try:
            async with self.in_process() as client:
                await self._fails(client, "NOT_FOUND", "jax_server.py", "the rig's folder")
        finally:
            program.write_bytes(text)


class JaxFolderSuite(FolderSuite):
    """The sum has this engine's own summands, and models that it does not compute are refused."""

    async def test_10_terabytes_do_not_fit_and_the_sum_is_shown(self) -> None:
        folder = write_tiny_folder(self.place / "models" / "huge")
        table = {"model.embed_tokens_per_layer.weight": [1_000_000_000_000]}
        weights = {"model.embed_tokens.weight": [1_500_000_000_000]}
        write_safetensors(folder / "model.safetensors", table | weights)
        async with self.in_process() as client:
            text = await self.refusal(client, "serve_model", "CAPACITY", model=str(folder))
            for words in (
                "weights 10000.00",  # 10 TB in float32, no part of it forgiven
                "KV cache 0.00",
                "Python and JAX",
                "4000.00 GB of the weights are the per-layer embedding table",
                "not subtracted",
            ):
                self.assertIn(words, text)
        self.assertEqual(self.processes(), [])

    async def test_another_model_or_packed_weights_are_refused_before_anything_starts(self) -> None:
        starts = len(self.engine.starts())
        async with self.in_process() as client:
            for key, value, words in (
                ("model_type", "llama", "model_type is llama"),
                ("quantization_config", {"quant_method": "gptq"}, "quantised"),
            ):
                folder = write_tiny_folder(self.place / "models" / f"other {key}")
                path = folder / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
                text = await self.refusal(client, "serve_model", "INVALID", model=str(folder))
                self.assertIn(words, text)
        self.assertEqual(len(self.engine.starts()), starts)


class JaxSettingsSuite(SettingsSuite):
    """Its number format is another one than the other local rigs'."""

    defaulted = ("DTYPE", "float32")


class JaxRigSuite(KeyedServerSuite):
    """The key, and a model that says of itself that it means nothing."""

    key_file = "jax-api-key"

    async def test_the_key_is_in_no_variable_of_the_server(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
        key = self.engine.headers()["Authorization"].partition(" ")[2]
        given = self.engine.starts()[-1]["environment"].values()
        self.assertNotIn(key, "\n".join(given))

    async def test_the_embedded_model_is_made_here_and_says_that_it_means_nothing(self) -> None:
        assert isinstance(self.engine, FakeJax)
        async with self.in_process() as client:
            await self.serve(client, model="embedded")
            options = self.engine.options()
            self.assertEqual(options["--served-model-name"], "random-gemma-4")
            folder = Path(options["--model"])
            details = await self.answer(client, "get_model_details")
            self.assertIn("its answers mean nothing", details["beside"])
            status = await self.answer(client, "get_system_status")
            self.assertIn("its answers mean nothing", status["memory"])
            endpoint = await self.answer(client, "get_endpoint")
            self.assertEqual(endpoint["model"], "random-gemma-4")
            await self.answer(client, "stop_model")
            made = self._hashes(folder)
            await self.serve(client, model="embedded")
        self.assertEqual(self._hashes(folder), made, "what is there was made anew")
        self.assertIn("model.safetensors", made)

    def _hashes(self, folder: Path) -> dict[str, tuple[str, int]]:
        return {
            path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in folder.iterdir()
        }


# ── suites / truth ────────────────────────────────────────────────────────────────────────────────
# What the records say against what is so: dead processes, strangers, damaged files, a full disk.
#
# The process table decides. Nothing of a stranger's is touched, and no prompt reaches him.


@contextmanager
def stranger_process(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not the rig's; it must still live at the end, or the test fails."""
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(program, start_new_session=True, env={**os.environ, **environment})
    try:
        yield process
        if process.poll() is not None:
            raise AssertionError("a process that is not the rig's was killed")
    finally:
        process.kill()
        process.wait()


@contextmanager
def stranger_on(port: int) -> Iterator[list[bytes]]:
    """A listener on `port` that belongs to this test; the list holds whatever it was sent."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", port))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                try:
                    received.append(connection.recv(65536))
                except OSError:
                    received.append(b"")

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


class TruthSuite(RigCase):
    """The rig tells what is so, and never takes a stranger's for its own."""

    @property
    def record(self) -> Path:
        """The record of the model server."""
        return self.rig_state / "server.json"

    def rewrite_record(self, **changes: Any) -> None:
        """Change fields of the model server's record behind the rig's back."""
        self.record.write_text(json.dumps({**json.loads(self.record.read_text()), **changes}))

    async def kill_model_server(self) -> int:
        """SIGKILL to the model server, as the system does when memory runs out."""
        (pid,) = self.processes("server")
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: not self.processes("server"), "it did not die")
        return pid

    async def test_the_model_server_died(self) -> None:
        async with self.in_process() as client, self.in_process() as other:
            await self.serve(client)
            pid = await self.kill_model_server()
            for each in (client, other):
                status = await self.answer(each, "get_system_status")
                self.assertEqual((status["state"], status["pid"]), ("stopped", None))
                self.assertIn(f"pid {pid}", " ".join(status["notes"]))
                self.assertIn("ended by itself", " ".join(status["notes"]))
                text = await self.refusal(each, "query_gemma4", "NOT_FOUND", prompt="hello")
                self.assertIn("ended by itself", text)
                await self.refusal(each, "verify_model_health", "NOT_FOUND")
                waited = await self.answer(each, "wait_for_model_ready")
                self.assertEqual(waited["state"], "stopped")

    async def test_the_worker_died_while_it_started_the_model(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            (worker,) = self.processes("job")
            os.kill(worker, signal.SIGKILL)
            await self.until(lambda: not self.processes("job"), "it did not die")
            job = await self.answer(client, "get_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "lost")
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "failed")
            self.assertEqual([status["pid"]], self.processes("server"))
            self.assertIn("half-started", " ".join(status["notes"]))
            await self.refusal(client, "serve_model", "EXISTS")
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_another_process_under_the_recorded_pid(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            await self.kill_model_server()
            label = "rig=local-pytorch-cpu-2b;owner=0123456789abcdef;role=server;id=other"
            for environment in ({}, {LABEL_IN_ENVIRONMENT: label}):
                with stranger_process(**environment) as stranger:
                    self.rewrite_record(pid=stranger.pid)
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual((status["state"], status["pid"]), ("stopped", None))
                    self.assertIn("another process", " ".join(status["notes"]))
                    await self.refusal(client, "query_gemma4", "NOT_FOUND", prompt="hello")
                    await self.answer(client, "stop_model")

    async def test_a_job_record_with_a_strangers_pid(self) -> None:
        self.engine.script(never_listens=True)
        async with self.in_process() as client:
            begun = await self.answer(client, "serve_model")
            await self.until(lambda: self.processes("server"), "the model server never began")
            path = self.rig_state / "jobs" / f"{begun['job_id']}.json"
            for pid in self.processes("job"):
                os.kill(pid, signal.SIGKILL)
            await self.until(lambda: not self.processes("job"), "the worker did not die")
            with stranger_process() as stranger:
                record = json.loads(path.read_text())
                path.write_text(json.dumps({**record, "worker_pid": stranger.pid}))
                job = await self.answer(client, "cancel_job", job_id=begun["job_id"])
                self.assertIn(job["state"], ("cancelled", "lost"))
            await self.assert_all_gone()

    async def test_a_stranger_holds_the_port(self) -> None:
        with stranger_on(self.port) as received:
            async with self.in_process() as client:
                text = await self.refusal(client, "serve_model", "EXISTS")
                self.assertIn(str(self.port), text)
                self.assertIn(f"pid {os.getpid()}", text)
                self.assertIn("PORT", text)
                self.assertEqual(self.processes(), [])
                status = await self.answer(client, "get_system_status")
                self.assertEqual(status["state"], "stopped")
        self.assertEqual(b"".join(received), b"")
        async with self.in_process() as client:
            await self.serve(client)

    async def test_a_stranger_at_the_address_gets_no_prompt(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            with stranger_on(port) as received:
                self.rewrite_record(port=port)
                for tool, arguments in (
                    ("query_gemma4", {"prompt": "a secret question"}),
                    ("query_gemma4_with_stats", {"prompt": "a secret question"}),
                    ("verify_model_health", {}),
                    ("get_endpoint", {}),
                ):
                    text = await self.refusal(client, tool, "DENIED", **arguments)
                    self.assertIn(str(port), text)
                status = await self.answer(client, "get_system_status")
                self.assertEqual((status["state"], status["endpoint"]), ("failed", ""))
            self.assertEqual(received, [], "a stranger was spoken to")
            stopped = await self.answer(client, "stop_model")
            self.assertEqual(stopped["state"], "stopped")
            await self.assert_all_gone()

    async def test_a_damaged_record_hides_no_process(self) -> None:
        for number, damage in enumerate(
            (b"", b"{", b"[]", b'"text"', b"\xff\x00", b'{"pid": "x"}')
        ):
            with self.subTest(damage):
                async with self.in_process() as client:
                    if number == 0:
                        await self.serve(client)
                    self.record.write_bytes(damage)
                    status = await self.answer(client, "get_system_status")
                    self.assertEqual([status["pid"]], self.processes("server"))
                    self.assertIn("no record", " ".join(status["notes"]))
                    await self.refusal(client, "serve_model", "EXISTS")
        async with self.in_process() as client:
            await self.answer(client, "stop_model")
            await self.assert_all_gone()

    async def test_a_damaged_job_record_is_told_and_harms_no_other(self) -> None:
        async with self.in_process() as client:
            outcome = await self.serve(client)
            good = self.rig_state / "jobs" / f"{outcome['job_id']}.json"
            for number, damage in enumerate((b"", b"{", b"[1]", b"\xff", b'{"id": 5}')):
                name = f"serve-20260101-00000{number}-abcdef"
                good.with_name(f"{name}.json").write_bytes(damage)
                await self.refusal(client, "get_job", "NOT_FOUND", job_id=name)
                await self.refusal(client, "cancel_job", "NOT_FOUND", job_id=name)
            job = await self.answer(client, "get_job", job_id=outcome["job_id"])
            self.assertEqual(job["state"], "done")
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["state"], "ready")

    async def test_a_torn_and_a_foreign_line_in_the_journal(self) -> None:
        self.rig_state.mkdir(parents=True, exist_ok=True)
        journal = self.rig_state / "journal.jsonl"
        journal.unlink(missing_ok=True)
        with journal.open("ab") as file:
            file.write(b'{"v": 99, "event": "from the future"}\n\xff\xfe\x00 binary\n{"v": 1, "ev')
        async with self.in_process() as client:
            await self.serve(client)
        lines = journal.read_bytes().splitlines()
        self.assertIn(b'{"v": 1, "ev', lines, "the torn line was changed")
        whole = [json.loads(line) for line in lines if line.startswith(b'{"v": 1, "at"')]
        events = [entry["event"] for entry in whole]
        self.assertEqual(events.count("server ready"), 1)
        self.assertLess(events.index("server start intended"), events.index("server started"))
        journal.write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in whole))

    async def test_the_whole_state_folder_vanished_while_it_served(self) -> None:
        import shutil

        async with self.in_process() as client:
            await self.serve(client)
            (pid,) = self.processes("server")
            shutil.rmtree(self.rig_state)
            status = await self.answer(client, "get_system_status")
            self.assertEqual(status["pid"], pid)
            await self.answer(client, "stop_model")
            await self.assert_all_gone()


# ── suites / local_jax_cpu_2b ─────────────────────────────────────────────────────────────────────

TOOLS_WITH_EFFECT = {
    "serve_model": "changes",
    "wait_for_jax_ready": "reads",
    "stop_model": "destroys",
    "get_jax_logs": "reads",
    "get_system_status": "reads",
    "get_endpoint": "reads",
    "get_model_details": "reads",
    "verify_model_health": "reads",
    "query_gemma4": "reads",
    "query_gemma4_with_stats": "reads",
    "get_job": "reads",
    "cancel_job": "destroys",
    "get_metrics": "reads",
    "run_benchmark": "changes",
    "list_reports": "reads",
    "show_report": "reads",
    "compare_reports": "reads",
    "plan_deployment": "reads",
    "probe_capabilities": "changes",
    "analyze_logs": "reads",
    "suggest_sre_remediation": "reads",
    "get_boot_timeline": "reads",
    "get_help": "reads",
}


def setUpModule() -> None:
    """Before the first test: every suite of this file tests the rig in this file's folder."""
    folder = Path(__file__).resolve().parent
    use_rig(RigUnderTest(folder, TOOLS_WITH_EFFECT, make_engine=FakeJax, words=JAX_WORDS))


SUITES = (
    CatalogueSuite,
    JaxServingSuite,
    JaxStartFaultSuite,
    JaxRigSuite,
    AnswerFaultSuite,
    BadInputSuite,
    JaxSettingsSuite,
    JaxFolderSuite,
    TruthSuite,
    FullDiskSuite,
    ReadOnlySuite,
    LeavingSuite,
    OutgoingSuite,
    CommandLineSuite,
    MeasuringSuite,
    DiagnosingSuite,
)


def load_tests(
    loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None
) -> unittest.TestSuite:
    """These alone: in one file with them stand the suites that some of them are made from."""
    del tests, pattern
    return unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in SUITES)


if __name__ == "__main__":
    unittest.main()
