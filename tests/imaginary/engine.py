"""What stands in for vLLM on the imaginary machine: its HTTP surface, over scripted answers.

Runs as a program of its own: `engine.py --port N --served-model-name NAME`. Answers as vLLM does:
/health with an empty body, a role-only first chunk, a usage chunk without choices, then [DONE];
/metrics counts the tokens of its answers, or is what lies in `metrics.txt` of its folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} 0.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} 0.125
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{model}"}} {prompt}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{model}"}} {generated}.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="{model}"}} {answers}.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="{model}"}} {answers}.0
"""


class ScriptedEngine(BaseHTTPRequestHandler):
    """Knows one capital; says of everything else that it does not know."""

    served_name = ""
    tokens: Counter[str] = Counter()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(b"", "text/plain")
        elif self.path == "/v1/models":
            models = {"object": "list", "data": [{"id": self.served_name, "object": "model"}]}
            self._send(json.dumps(models).encode(), "application/json")
        elif self.path == "/metrics":
            self._send_metrics()
        else:
            self.send_error(404)

    def _send_metrics(self) -> None:
        orders = Path("metrics.txt")
        if not orders.exists():
            counts = {name: self.tokens[name] for name in ("prompt", "generated", "answers")}
            text = METRICS.format(model=self.served_name, **counts)
            self._send(text.encode(), "text/plain; version=0.0.4; charset=utf-8")
            return
        text = orders.read_text()
        if text == "SILENT":
            time.sleep(30)
        elif text.startswith("STATUS "):
            self.send_error(int(text.split()[1]))
        else:
            self._send(text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or body.get("model") != self.served_name:
            self.send_error(404)
            return
        prompt = body["messages"][-1]["content"]
        words = ["Paris", "."] if "capital of France" in prompt else ["I", " do", " not", " know"]
        words = words[: body["max_tokens"]]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
        chunks += [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}
        self.tokens.update(prompt=len(prompt.split()), generated=len(words), answers=1)
        chunks += [{"choices": [], "usage": usage}]
        events = [json.dumps({"model": self.served_name, **chunk}) for chunk in chunks] + ["[DONE]"]
        self._send("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    arguments = parser.parse_args()
    ScriptedEngine.served_name = arguments.served_model_name
    print("INFO Loading model weights", flush=True)
    with ThreadingHTTPServer(("127.0.0.1", arguments.port), ScriptedEngine) as server:
        print("INFO Application startup complete", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
