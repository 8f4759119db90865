"""A server process spoken to line by line, for what a proper client would never send.

Writes JSON-RPC as text and keeps every line that comes back, so that each can be checked. Knows no
tool.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
