"""A llama-server that obeys a script: the fake at the edge of a rig that runs llama.cpp.

A program with a library beside it that holds the names a build holds. It speaks as release b11434
does: it listens before it has loaded and says 503 until then, has /slots, /props and /metrics, a
chunk of its own for usage, and [DONE] at the end. Knows nothing of the rig that starts it.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from forge.suites.fake_engine import FAKE_SERVE_SOURCE, FakeEngine

FAKE_LLAMA_VERSION = "0.6.0-dev (build 11434, commit sdist)"
# What the real program's own text holds: architectures, options. A rig reads them there.
LLAMA_ARCHITECTURES = ("llama", "gemma3", "gemma4")
LLAMA_OPTIONS = (
    *("--offline", "--no-webui", "--no-kv-unified", "--lazy-mode", "--cache-ram"),
    *("--ctx-checkpoints", "--reasoning", "--cors-origins", "--fit"),
)

# What differs from the fake of transformers: everything around the answer. `HERE`, whose
# control.json is obeyed, and the version are filled in.
_LLAMA_DIFFERENCE = r"""
HERE = pathlib.Path({here!r})
READY = False

METRICS = '''\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 37
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 12
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 0
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
'''


class LlamaHandler(Handler):
    def loading(self):
        if not READY:
            error = {{"code": 503, "message": "Loading model", "type": "unavailable_error"}}
            self.reply(503, {{"error": error}})
        return not READY

    def do_GET(self):
        script = control()
        if self.loading():
            return None
        if self.path == "/metrics":
            return self.reply(200, METRICS.encode(), "text/plain; version=0.0.4")
        each = CONTEXT // SLOTS
        if self.path == "/slots":
            rows = [{{"id": n, "n_ctx": each, "speculative": False}} for n in range(SLOTS)]
            used = {{"id_task": 2, "n_prompt_tokens": 48, "n_prompt_tokens_processed": 11}}
            used |= {{"n_prompt_tokens_cache": 37, "params": {{}}}}
            used |= {{"next_token": [{{"n_decoded": 12, "n_remain": -1}}]}}
            rows[-1] |= used
            rows = [row | {{"is_processing": False}} for row in rows]
            return self.reply(script.get("slots_status", 200), script.get("slots", rows))
        if self.path == "/props":
            settings = {{"params": {{}}, "n_ctx": each}}
            told = {{"default_generation_settings": settings, "total_slots": SLOTS}}
            told |= {{"model_path": PATH, "model_ftype": "F32", "build_info": "b11434-sdist"}}
            told["chat_template"] = "{{{{ messages }}}}"
            return self.reply(200, script.get("props", told))
        return super().do_GET()

    def do_POST(self):
        return None if self.loading() else super().do_POST()

    def send(self, event):
        usage = event.pop("usage", None)
        super().send(event)
        if usage:
            super().send({{"id": "chatcmpl-1", "model": MODEL, "choices": [], "usage": usage}})
            self.raw(b"data: [DONE]\n\n")


def main():
    global MODEL, PATH, SLOTS, CONTEXT, READY
    arguments = sys.argv[1:]
    script = control()
    if arguments == ["--version"]:
        while (HERE / "hold").exists():
            time.sleep(0.05)
        words = "version: " + script.get("version", {version!r})
        return print(words, "\nbuilt with a fake", sep="", file=sys.stderr)
    if arguments == ["--list-devices"]:
        return print("Available devices:\n  " + script.get("devices", "(none)"))
    value = lambda option: arguments[arguments.index(option) + 1]
    PATH, MODEL = value("--model"), value("--alias")
    SLOTS, CONTEXT = int(value("--parallel")), int(value("--ctx-size"))
    note("starts.jsonl", {{"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)}})
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    print("0.00.003.977 I srv    load_model: loading model '" + PATH + "'", flush=True)
    # The real one has no such bar; the suites look for the last state of one.
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    if script.get("log"):
        print(script["log"], flush=True)
    if script.get("refuses"):
        print("0.00.307.633 E llama_model_load: error loading model: " + script["refuses"])
        print("0.00.307.653 E llama_model_load_from_file_impl: failed to load model")
        print("0.00.307.700 E srv    load_model: failed to load model, '" + PATH + "'")
        print("0.00.323.499 E srv  llama_server: exiting due to model loading error")
        return sys.exit(1)
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    while script.get("never_listens"):
        time.sleep(1)
    server = Server((value("--host"), int(value("--port"))), LlamaHandler)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(script.get("load_s", 0))
    READY = True
    while True:
        time.sleep(60)


main()
"""


class FakeLlama(FakeEngine):
    """A llama-server in `folder`/bin, which LLAMA_SERVER names, and the script that it obeys.

    Besides what the fake engine obeys: `version`, `devices` (a row of --list-devices), `refuses`
    (why it does not load), `slots` and `slots_status` (another answer of /slots), `props`.
    """

    @property
    def program(self) -> Path:
        """The program for LLAMA_SERVER."""
        return self.folder / "bin" / "llama-server"

    @property
    def library(self) -> Path:
        """The library beside it, which holds the names of what it knows."""
        return self.folder / "bin" / "libllama.so"

    def install(self) -> None:
        """Write the program and its library."""
        self.program.parent.mkdir(parents=True)
        common = FAKE_SERVE_SOURCE[: FAKE_SERVE_SOURCE.index("\ndef main():")]
        own = _LLAMA_DIFFERENCE.format(here=str(self.folder), version=FAKE_LLAMA_VERSION)
        self.program.write_text(f"#!{sys.executable}\n{common}{own}")
        self.program.chmod(0o755)
        self.write_library()

    def write_library(
        self,
        *,
        architectures: tuple[str, ...] = LLAMA_ARCHITECTURES,
        options: tuple[str, ...] = LLAMA_OPTIONS,
        marks: tuple[str, ...] = (),
    ) -> None:
        """Replace the library by one of a build that knows these, and has `marks` in it."""
        words = [word.encode() for word in (*architectures, *options, *marks)]
        self.library.write_bytes(b"\x7fELF\0" + b"\0".join(words) + b"\0")

    def surroundings(self) -> dict[str, str]:
        return {"LLAMA_SERVER": str(self.program), "PIP_NO_INDEX": "1"}


GgufParts = dict[str, "int | str | list[bool]"]

TINY_GGUF_KEYS: GgufParts = {
    "general.architecture": "gemma4",
    "general.type": "model",
    "gemma4.block_count": 3,
    "gemma4.context_length": 1024,
    "gemma4.embedding_length": 64,
    "gemma4.feed_forward_length": 128,
    "gemma4.embedding_length_per_layer_input": 32,
    "gemma4.attention.head_count": 2,
    "gemma4.attention.head_count_kv": 1,
    "gemma4.attention.key_length": 64,
    "gemma4.attention.value_length": 64,
    "gemma4.attention.key_length_swa": 32,
    "gemma4.attention.value_length_swa": 32,
    "gemma4.attention.sliding_window": 8,
    "gemma4.attention.sliding_window_pattern": [True, False, False],
    "gemma4.attention.shared_kv_layers": 1,
    "tokenizer.chat_template": "{{ messages }}",
}
TINY_GGUF_TENSORS: dict[str, list[int]] = {
    "token_embd.weight": [64, 512],
    "per_layer_token_embd.weight": [96, 512],
    "output_norm.weight": [64],
}
_U32, _BOOL, _TEXT, _LIST = 4, 7, 8, 9  # the format's numbers for the types of values


def _gguf_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _gguf_value(value: int | str | list[bool]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _gguf_text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _LIST, _BOOL, len(value)) + bytes(value)
    return struct.pack("<II", _U32, value)


def gguf_header(keys: GgufParts, tensors: dict[str, list[int]]) -> tuple[bytes, int]:
    """The header of a GGUF file of 32-bit numbers, and how many bytes of data it announces."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        out += _gguf_text(key) + _gguf_value(value)
    end = 0
    for name, shape in tensors.items():
        out += _gguf_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", 0, end)
        size = 4
        for extent in shape:
            size *= extent
        end += -(-size // 32) * 32
    return bytes(out) + bytes(-len(out) % 32), end


def write_gguf(
    path: Path, keys: GgufParts = TINY_GGUF_KEYS, tensors: dict[str, list[int]] | None = None
) -> Path:
    """A GGUF file of zeros, written by hand; its data is a hole that takes no disk."""
    header, size = gguf_header(keys, TINY_GGUF_TENSORS if tensors is None else tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return path


def write_tiny_gguf(folder: Path) -> Path:
    """A whole tiny Gemma 4 as one file in `folder`, which passes every check of a header."""
    return write_gguf(folder / "model.gguf")
