"""What a fake machine has of this computer: small web servers, marked processes.

The servers are its metadata server and its owner's ear; what they answer, others decide.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_METADATA_ROOT = "/computeMetadata/v1/"


class HostServer(ThreadingHTTPServer):
    """A server on a free port of loopback, in threads that end with the process."""

    daemon_threads = True
    block_on_close = False
    answer: Callable[[str], dict[str, Any]]
    metadata: Callable[[str], str | None]
    google: Callable[[str, str, str], tuple[int, Any] | None]

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _HostHandler(BaseHTTPRequestHandler):
    server: HostServer

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def send(self, status: int, answer: str, kind: str = "application/json") -> None:
        data = answer.encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class _AnswersHandler(_HostHandler):
    def do_GET(self) -> None:
        self.send(200, json.dumps(self.server.answer(self.path)))


class _MetadataHandler(_HostHandler):
    """The metadata server; what is not below its root is the machine's own request to Google."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(_METADATA_ROOT):
            return self.to_google("GET")
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.send(403, "Your client does not have permission", "text/html")
        found = self.server.metadata(path[len(_METADATA_ROOT) :])
        if found is None:
            return self.send(404, "<title>Error 404 (Not Found)!!1</title>", "text/html")
        return self.send(200, found, "application/text")

    def do_DELETE(self) -> None:
        self.to_google("DELETE")

    def to_google(self, method: str) -> None:
        found = self.server.google(method, self.path, self.headers.get("Authorization", ""))
        if found is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        status, answer = found
        return self.send(
            status, answer.decode() if isinstance(answer, bytes) else json.dumps(answer)
        )


def serve_answers(answer: Callable[[str], dict[str, Any]]) -> HostServer:
    """A server that answers each GET with what `answer` says to its path, as JSON."""
    server = HostServer(("127.0.0.1", 0), _AnswersHandler)
    server.answer = answer
    return _listening(server)


def serve_metadata(
    metadata: Callable[[str], str | None],
    google: Callable[[str, str, str], tuple[int, Any] | None],
) -> HostServer:
    """A machine's metadata server: `metadata` by the path below the root, None for 404.

    `google` answers method, path and Authorization of everything else; None cuts the line.
    """
    server = HostServer(("127.0.0.1", 0), _MetadataHandler)
    server.metadata, server.google = metadata, google
    return _listening(server)


def _listening(server: HostServer) -> HostServer:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def end_marked(variable: str, value: str) -> None:
    """Kills every process that has `value` for that variable in its environment, and waits.

    One that is dead and only not yet collected by whoever inherited it has no environment.
    """
    import psutil

    end = time.monotonic() + 20
    alive = True
    while alive and time.monotonic() < end:
        alive = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(variable) == value:
                    process.kill()
                    alive = True
        time.sleep(0.01)
