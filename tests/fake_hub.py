"""A model hub on loopback, for the real `huggingface_hub`: one repository, and its faults.

Speaks what a download needs: model info, file tree, HEAD and ranged GET of files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = "tiny/gemma-4-it"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The repository REPOSITORY with the files of `folder`.

    `sizes` announces other sizes than the real ones; `gated`, `down` (500 to everything);
    `breaks_after` closes a file's transfer after so many bytes of it, `breaks` times.
    `requests` are (method, path, Range header, Authorization header), `sent` the bytes by file.
    """

    folder: Path
    url: str = ""
    gated: bool = False
    down: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    breaks_after: int = 0
    breaks: int = 0
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """Every file of the repository by name."""
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}

    def info(self) -> dict[str, Any]:
        """The answer to a question about the model."""
        siblings = [
            {"rfilename": name, "size": self.sizes.get(name, len(data)), "blobId": _digest(data)}
            for name, data in self.files().items()
        ]
        return {
            "id": REPOSITORY,
            "modelId": REPOSITORY,
            "sha": COMMIT,
            "private": False,
            "gated": "manual" if self.gated else False,
            "siblings": siblings,
        }

    def tree(self) -> list[dict[str, Any]]:
        """The listing of one commit."""
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
            for name, data in self.files().items()
        ]


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _HubHandler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed, on purpose
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        asked = (self.headers.get("Range", ""), self.headers.get("Authorization", ""))
        hub.requests.append((self.command, path, *asked))
        if hub.down:
            return self._answer(500, b"out of order")
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            return self._json(hub.tree())
        if path == f"/api/models/{REPOSITORY}" or path.startswith(
            f"/api/models/{REPOSITORY}/revision/"
        ):
            return self._json(hub.info())
        if path.startswith(f"/{REPOSITORY}/resolve/"):
            return self._file(path.rsplit("/", 1)[1])
        return self._answer(404, b"", X_Error_Code="RepoNotFound")

    def _file(self, name: str) -> None:
        hub = self.hub
        if hub.gated:
            return self._answer(401, b"", X_Error_Code="GatedRepo", X_Repo_Commit=COMMIT)
        data = hub.files().get(name)
        if data is None:
            return self._answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        common = {"ETag": f'"{_digest(data)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        part = data[begin:]
        if self.command == "HEAD":
            return self._answer(200, data, **common)
        if wanted:
            common["Content_Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if hub.breaks and name.endswith(".safetensors"):
            hub.breaks -= 1
            return self._break_off(part, 206 if wanted else 200, name, common)
        hub.sent[name] = hub.sent.get(name, 0) + len(part)
        return self._answer(206 if wanted else 200, part, **common)

    def _break_off(self, part: bytes, status: int, name: str, headers: dict[str, str]) -> None:
        """Announce all of it, send `breaks_after` bytes and hang up."""
        self.send_response(status)
        for key, value in {"Content-Length": str(len(part)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        piece = part[: self.hub.breaks_after]
        self.wfile.write(piece)
        self.wfile.flush()
        self.hub.sent[name] = self.hub.sent.get(name, 0) + len(piece)
        self.close_connection = True


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """A running hub with the files of `folder` as they are at each request."""
    hub = FakeHub(folder)
    handler = type("Handler", (_HubHandler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
