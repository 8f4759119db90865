"""A `transformers serve` that obeys a script: the fake at the edge of a rig's own code.

A package of that name on PYTHONPATH, standard library only, that speaks as the real server of
release 5.24 does (no [DONE], a finish chunk with usage, the first chunk has the role alone) and
shows each fault that a test asks for. Knows nothing of the rig that starts it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

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
