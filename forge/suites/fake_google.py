"""A Google Cloud on loopback for the real gcloud: one server, one project, a clock, a script.

It answers as Compute Engine, Cloud TPU, Secret Manager, Cloud Logging and OS Login do, changes what
a real call would change, records each request, and is gcloud's proxy at the same time: whatever
asks for any other host is refused and noted. Knows nothing of who calls it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from forge.suites.fake_google_compute import FakeCompute
from forge.suites.fake_google_places import quota_info
from forge.suites.fake_google_services import FakeLogging, FakeLogin, FakeSecrets
from forge.suites.fake_google_tpu import FakeTpu
from forge.suites.fake_google_world import GoogleRefusal, GoogleScript, GoogleWorld

_ERROR_PAGE = b"""<!DOCTYPE html><html lang=en><title>Error 502 (Server Error)!!1</title>
<p><b>502.</b> That is an error. The server encountered a temporary error.</html>
"""
_HIDDEN = "[payload not recorded]"
_BODY_LIMIT = 4_000_000  # bytes of one request

# Stands first on PATH in tests. It notes each argument list, and lets an old gcloud, whose
# released commands lack FLEX_START, take that one create by its alpha command; the flag that even
# that lacks is dropped. Everything else reaches the real program unchanged.
_WRAPPER_SOURCE = """#!{python}
import json, os, sys
given = sys.argv[1:]
with open({journal!r}, "a") as file:
    file.write(json.dumps([os.getpid(), *given]) + "\\n")
flexible = "--provisioning-model=FLEX_START" in given
if {reroute!r} and flexible and given[:3] == ["compute", "instances", "create"]:
    kept = [word for word in given if not word.startswith("--request-valid-for-duration=")]
    given = ["alpha", *kept]
os.execv({real!r}, [{real!r}, *given])
"""


@dataclass(frozen=True)
class GoogleRequest:
    """One request as it came in. Credentials and secrets' payloads are not part of it."""

    method: str
    path: str
    query: dict[str, str]
    body: Any


class _GoogleServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    cloud: FakeGoogle


class FakeGoogle:
    """The server with its services. Use it as a context, or `start` and `stop` it.

    `requests` is the record, oldest first; `escapes` are the hosts that were asked for past it.
    All state is changed under `lock`, and brought to the clock's present before each answer.
    """

    def __init__(self, project: str = "fake-proj", script: GoogleScript | None = None) -> None:
        self.world = GoogleWorld(project, script or GoogleScript())
        self.compute, self.tpu = FakeCompute(self.world), FakeTpu(self.world)
        self.secrets, self.logging = FakeSecrets(self.world), FakeLogging(self.world)
        self.login = FakeLogin(self.world)
        self.requests: list[GoogleRequest] = []
        self.escapes: list[str] = []
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self._server: _GoogleServer | None = None
        self._thread: threading.Thread | None = None
        self._open: set[socket.socket] = set()

    @property
    def script(self) -> GoogleScript:
        return self.world.script

    @property
    def base(self) -> str:
        """The address, such as http://127.0.0.1:40000."""
        return self.world.base

    @property
    def port(self) -> int:
        return int(self.base.rsplit(":", 1)[-1])

    def __enter__(self) -> FakeGoogle:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        self._server = _GoogleServer(("127.0.0.1", 0), _GoogleHandler)
        self._server.cloud = self
        self.world.base = f"http://127.0.0.1:{self._server.server_address[1]}"
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends held answers and open connections, frees the port. A second time does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        self.stopping.set()
        server.shutdown()
        server.server_close()
        with self.lock:
            for connection in list(self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(5)

    def advance(self, seconds: float) -> None:
        """Lets time pass, for whatever waits or ends by the clock."""
        with self.lock:
            self.world.now += seconds
            self.compute.settle()
            self.tpu.settle()

    def preempt(self, name: str) -> None:
        """The provider takes a spot machine back, whatever kind it is."""
        with self.lock:
            self.compute.preempt(name)
            self.tpu.preempt(name)

    def sent(self, method: str, part: str) -> list[GoogleRequest]:
        """The recorded requests of a method whose path holds `part`."""
        with self.lock:
            return [one for one in self.requests if one.method == method and part in one.path]

    def held(self) -> dict[str, list[str]]:
        """The names of what exists now, by kind, without empty kinds: what would cost money."""
        with self.lock:
            kinds: dict[str, list[str]] = {
                "instances": [name for _zone, name in self.compute.instances],
                "disks": [name for _zone, name in self.compute.disks],
                "nodes": [name.rsplit("/", 1)[-1] for name in self.tpu.nodes],
                "queued": [name.rsplit("/", 1)[-1] for name in self.tpu.queue],
                "secrets": list(self.secrets.payloads),
            }
            return {kind: names for kind, names in kinds.items() if names}

    def environment(self, folder: Path, path: str = "") -> dict[str, str]:
        """The environment with which a real gcloud sees this Google and nothing else.

        The login is a token made here and worth nothing. `folder` becomes home and gcloud's own
        folder; `path` goes before PATH.
        """
        token = folder / "token"
        token.write_text("made-up-for-a-test\n")
        token.chmod(0o600)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CLOUDSDK_", "GOOGLE_")) and not key.lower().endswith("_proxy")
        }
        over = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
        plain = (
            *("SECRETMANAGER", "LOGGING", "SERVICEUSAGE", "CLOUDRESOURCEMANAGER", "OSLOGIN"),
            "CLOUDQUOTAS",
        )
        return {
            **kept,
            "HOME": str(folder),
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"],
            "CLOUDSDK_CONFIG": str(folder / "gcloud"),
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(token),
            f"{over}COMPUTE": f"{self.base}/compute/v1/",
            f"{over}TPU": f"{self.base}/tpu/",
            **{f"{over}{name}": f"{self.base}/" for name in plain},
            "CLOUDSDK_PROXY_TYPE": "http",
            "CLOUDSDK_PROXY_ADDRESS": "127.0.0.1",
            "CLOUDSDK_PROXY_PORT": str(self.port),
        }

    # -- one request

    def take(self, method: str, target: str, body: Any) -> tuple[int, dict[str, Any] | bytes, bool]:
        """The status and the answer, and whether it may reach the caller at all."""
        parts = urlsplit(target)
        path = "/" + unquote(parts.path).lstrip("/")
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        with self.lock:
            self.requests.append(GoogleRequest(method, path, query, _recorded(body)))
            if self.script.html > 0:
                self.script.html -= 1
                return 502, _ERROR_PAGE, True
            try:
                self.compute.settle()
                self.tpu.settle()
                answer = self._service(path)(method, path, query, body or {})
            except GoogleRefusal as refusal:
                return refusal.status, refusal.body, True
            lost = method != "GET" and self.script.lost > 0
            self.script.lost -= lost
            return 200, json.loads(json.dumps(answer)), not lost

    def _service(
        self, path: str
    ) -> Callable[[str, str, Mapping[str, str], dict[str, Any]], dict[str, Any]]:
        if path.startswith("/compute/"):
            return self.compute.answer
        if path.startswith("/tpu/"):
            return self.tpu.answer
        if "/quotaInfos/" in path:
            return self._about_quota
        if path.startswith("/v2/entries"):
            return self.logging.answer
        if "/users/" in path:
            return self.login.answer
        if "/secrets" in path:
            return self.secrets.answer
        return self._about_project

    def _about_project(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Resource Manager and Service Usage, as far as gcloud looks at them by the way."""
        parts = path.strip("/").split("/")
        if method == "GET" and len(parts) in (3, 5) and parts[1] == "projects":
            self.world.check("", parts[2])
            if len(parts) == 5 and parts[3] == "services":
                return {"name": "/".join(parts[1:]), "state": "ENABLED"}
            return {"projectId": self.world.project, "lifecycleState": "ACTIVE"}
        raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}", "notFound")

    def _about_quota(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """The Cloud Quotas API: one quota's limits."""
        self.world.check("quotas", path.strip("/").split("/")[2])
        return quota_info(self.world, path)

    def opened(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.discard(connection)

    def escaped(self, host: str) -> None:
        with self.lock:
            self.escapes.append(host)


class _GoogleHandler(BaseHTTPRequestHandler):
    """HTTP around it: bodies, keep-alive, what a proxy is asked for, answers that never come."""

    protocol_version = "HTTP/1.1"
    server: _GoogleServer

    def log_message(self, format: str, *_arguments: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.cloud.opened(self.connection)

    def finish(self) -> None:
        self.server.cloud.closed(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(ConnectionError):  # a caller that was killed, or the end of this server
            super().handle()

    def do_CONNECT(self) -> None:
        self._refuse_host(self.path)

    def _any(self) -> None:
        cloud = self.server.cloud
        host = urlsplit(self.path).netloc
        raw = self._body()
        if host and host != urlsplit(cloud.base).netloc:
            return self._refuse_host(host)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            refusal = GoogleRefusal(400, "INVALID_ARGUMENT", "the body is not JSON")
            return self._send(refusal.status, refusal.body)
        status, answer, arrives = cloud.take(self.command, self.path, body)
        if arrives:
            return self._send(status, answer)
        if cloud.script.lost_by == "hold":
            cloud.stopping.wait()
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _BODY_LIMIT))
        raw = b""
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            raw += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return raw

    def _refuse_host(self, host: str) -> None:
        self.server.cloud.escaped(host)
        self.close_connection = True
        self._send(403, b"this proxy leads nowhere\n")

    def _send(self, status: int, answer: dict[str, Any] | bytes) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "text/html; charset=UTF-8" if isinstance(answer, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _recorded(body: Any) -> Any:
    """A copy of a body for the record, without a secret's payload."""
    copy = json.loads(json.dumps(body))
    if isinstance(copy, dict) and isinstance(copy.get("payload"), dict):
        copy["payload"] = {"data": _HIDDEN}
    return copy


def gcloud_wrapper(folder: Path, real: str, *, reroute: bool = True) -> Path:
    """Writes a `gcloud` into `folder` that notes its arguments and starts `real`; its journal.

    The journal has one JSON list a line: the process, then its arguments. With `reroute` a gcloud
    too old for FLEX_START takes such a create all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "argv.jsonl"
    journal.touch()
    values = {"python": sys.executable, "journal": str(journal), "real": real, "reroute": reroute}
    program = folder / "gcloud"
    program.write_text(_WRAPPER_SOURCE.format(**values))
    program.chmod(0o755)
    return journal
