"""What stands in for vLLM on the imaginary machine: its HTTP surface, over scripted answers.

Runs as a program of its own: `engine.py --port N --served-model-name NAME`. Answers as vLLM does:
/health with an empty body, a role-only first chunk, a usage chunk without choices, then [DONE].
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedEngine(BaseHTTPRequestHandler):
    """Knows one capital; says of everything else that it does not know."""

    served_name = ""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(b"", "text/plain")
        elif self.path == "/v1/models":
            models = {"object": "list", "data": [{"id": self.served_name, "object": "model"}]}
            self._send(json.dumps(models).encode(), "application/json")
        else:
            self.send_error(404)

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
