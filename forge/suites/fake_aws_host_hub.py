"""A model hub for one fake machine: one GGUF file for every repository, in the Hub's own answers.

A file comes from another address than it was asked for, as the Hub's large files do, and goes on
where a download broke off. Knows no machine; what is wrong with it, a callable tells.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from forge.suites.fake_llama_server import TINY_GGUF_KEYS, TINY_GGUF_TENSORS, gguf_header

HUB_FILE, HUB_COMMIT = "gemma-4-e2b-it-q4_0.gguf", "c0ffee" * 6 + "beef"
_RESOLVE = re.compile(r"/(?P<repository>[\w.-]+/[\w.-]+)/resolve/(?P<commit>\w+)/(?P<file>.+)")
_LISTING = re.compile(r"/api/models/(?P<repository>[\w.-]+/[\w.-]+)(/revision/(?P<revision>\w+))?")
_FAR = "/stored/"  # where the bytes are, on a host that must not get the token


class FakeHub(ThreadingHTTPServer):
    """The server. `orders()` may have `hub` (the status of its refusals), `hub_cuts` (the first so
    many downloads break off half-way), `hub_spoilt=True` (other bytes than it speaks of) and
    `network=False`. `asked` are the paths and the tokens that came along."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, orders: Callable[[], dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.orders, self.name = orders, HUB_FILE
        header, size = gguf_header(TINY_GGUF_KEYS, TINY_GGUF_TENSORS)
        self.data = header + bytes(size)
        self.asked: list[tuple[str, str]] = []
        self.cuts = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _HubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        token = self.headers.get("Authorization", "")
        self.server.asked.append((path, token))
        orders = self.server.orders()
        if orders.get("network") is False:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        if path.startswith(_FAR):
            return self.give(orders)
        if orders.get("hub"):
            words = "Access to this model is restricted and you are not in the authorized list."
            body = json.dumps({"error": words}).encode()
            return self.answer(int(orders["hub"]), body, X_Error_Code="GatedRepo")
        listing, resolve = _LISTING.fullmatch(path), _RESOLVE.fullmatch(path)
        if listing:
            return self.list(listing["repository"], listing["revision"] or "main")
        if resolve and resolve["file"] == self.server.name:
            linked = {"X_Linked_Size": str(len(self.server.data))}
            linked |= {
                "X_Linked_Etag": f'"{self.server.sha256}"',
                "X_Repo_Commit": resolve["commit"],
            }
            far = f"{self.server.base.replace('127.0.0.1', 'localhost')}{_FAR}{self.server.sha256}"
            return self.answer(302, b"", Location=far, **linked)
        body = json.dumps({"error": "Repository not found"}).encode()
        return self.answer(404, body, X_Error_Code="EntryNotFound")

    def list(self, repository: str, revision: str) -> None:
        commit = revision if re.fullmatch("[0-9a-f]{40}", revision) else HUB_COMMIT
        size = len(self.server.data)
        lfs = {"sha256": self.server.sha256, "size": size, "pointerSize": 135}
        files = [
            {"rfilename": "README.md", "size": 12},
            {"rfilename": self.server.name, "size": size, "lfs": lfs},
        ]
        told = {"id": repository, "sha": commit, "siblings": files}
        self.answer(200, json.dumps(told).encode(), Content_Type="application/json")

    def give(self, orders: dict[str, Any]) -> None:
        """The bytes, or the rest of them, from the host that stores them."""
        data = self.server.data
        if orders.get("hub_spoilt"):
            data = bytes(byte ^ 1 for byte in data)
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        rest = data[start:]
        headers = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if found else {}
        if self.server.cuts < int(orders.get("hub_cuts", 0)):
            self.server.cuts += 1
            with suppress(ConnectionError):
                self.send_response(206 if found else 200)
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                self.wfile.write(rest[: len(rest) // 2])
            self.close_connection = True
            return
        self.answer(206 if found else 200, rest, **headers)
