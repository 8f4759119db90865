"""The whole server in this process, on loopback, over any engine: for tests that speak HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from forge.engines.serving.chat_text import read_model_text
from forge.engines.serving.http_front import FrontSettings, HttpFront
from forge.engines.serving.http_server import HttpServer, listening_socket
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.slot_engine import SlotEngine

PATIENCE_S = 60.0
MODEL = "small"


def wait_until(what: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Return once `what` is true; AssertionError when it never is."""
    end = time.monotonic() + patience_s
    while not what():
        if time.monotonic() > end:
            raise AssertionError("what was waited for has not come")
        time.sleep(0.002)


class ServingHost:
    """Starts at once; `stop` ends it, and says whether all of it has ended."""

    def __init__(
        self, engine: SlotEngine, folder: Path, *, queue: int = 100, api_key: str = ""
    ) -> None:
        self.scheduler = Scheduler(engine, queue)
        self.text = read_model_text(folder)
        self.front = HttpFront(self.scheduler, self.text, FrontSettings(MODEL, api_key))
        listener = listening_socket("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(self.front.app, listener, drain_s=5)
        self.tasks_left: list[str] = []
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        self.scheduler.start()
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=PATIENCE_S)

    def _run(self) -> None:
        async def serve() -> None:
            await self.server.serve()
            own = asyncio.current_task()
            self.tasks_left = [str(task) for task in asyncio.all_tasks() if task is not own]

        asyncio.run(serve())

    def ready(self) -> ServingHost:
        """Once it serves."""
        wait_until(lambda: self.scheduler.view().phase == "serving")
        return self

    def stop(self) -> bool:
        self.http.close()
        self.server.stop()
        ended = self.scheduler.close(10)
        self._thread.join(PATIENCE_S)
        return ended and not self._thread.is_alive()

    def chat(self, content: Any = "hello", **fields: Any) -> httpx2.Response:
        """One chat completion; `content` is the user's."""
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx2.Response:
        """One text completion."""
        body = {"model": MODEL, "prompt": prompt, **fields}
        return self.http.post("/v1/completions", json=body)

    def metric(self, name: str, labels: str = "") -> float:
        """One figure of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            told, _, value = line.rpartition(" ")
            if told == name + labels:
                return float(value)
        raise AssertionError(f"no {name}{labels} on the page")


def stream_events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer, which must be well formed and end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.content.split(b"\n\n")
    assert rest == b"", rest
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    *events, done = [block[6:] for block in blocks]
    assert done == b"[DONE]", done
    return [json.loads(event) for event in events]
