"""A `jax_server.py` that obeys a script: the fake at the edge of the rig with the JAX engine.

It takes the place of the engine's file when Python is about to run that, and speaks as the engine
does: 503 while it loads, a key, /metrics, usage in a chunk of its own and [DONE] at the end.
"""

from __future__ import annotations

from typing import Any

from forge.suites.fake_engine import FAKE_SERVE_SOURCE, FakeEngine

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
