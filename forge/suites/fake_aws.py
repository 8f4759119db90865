"""An AWS account on loopback for real boto3 clients: moto's models behind a server with a script.

It answers EC2, Systems Manager, STS, IAM, Secrets Manager, S3 and Service Quotas, changes what a
real call would change, records each request, and is the proxy at the same time: whatever asks for
any other host is refused and noted in `escapes`. Knows nothing of who calls it.

    cloud = FakeAws(); cloud.start(); ...; cloud.stop()     # or: with FakeAws() as cloud:
    cloud.environment(folder)    # variables with which boto3 sees this account and no other
    cloud.script = AwsScript(faults=[CallFault(zone="us-east-1a", times=2)])     # what goes wrong
    cloud.renew()                # an empty account, an empty script, an empty record
    cloud.held()                 # {"instances": {"us-east-1": ["i-..."]}, "volumes": ...}
    cloud.machines(), cloud.machine(id or name)     # FakeMachine: id name region zone state type
                                                    # market tags user_data model (moto's)
    cloud.interrupt(id), cloud.shut_down(id), cloud.take_away(id), cloud.end(id, code, words)
    cloud.put_profile(), put_secret(), put_machine(), put_volume(); cloud.secret(region, name)
    cloud.harmed()               # what was changed of others' machines (put_machine)
    cloud.sent("RunInstances"), cloud.requests, cloud.escapes, cloud.lock, cloud.advance(seconds)
    cloud.console, run_command, agent_online, end_command, changed     # what a host plugs in
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forge.suites.fake_aws_moto import AwsAnswer, Ec2Operation, MotoAccount
from forge.suites.fake_aws_services import (
    AwsCall,
    aws_json,
    aws_refused,
    aws_throttled,
    identity_answer,
    quota_answer,
    useless_credentials,
)
from forge.suites.fake_aws_things import AwsThings
from forge.suites.fake_aws_world import (
    FAKE_AWS_ACCOUNT,
    AwsRefusal,
    AwsRequest,
    AwsScript,
    AwsWorld,
    CallFault,
    known_refusal,
)

# What it needs besides the standard library: moto without its extras (it brings boto3), held to one
# minor release because its operations are called one by one, past its documented ways.
FAKE_AWS_REQUIREMENTS = ("moto>=5.2.5,<5.3",)
_MADE_UP_KEYS = ("MADEUPFORATEST", "MADEUPFORAPROFILE")  # of the environment, of the profile
FAKE_AWS_PROFILE = "made-up"
_AWS_BODY_BYTES = 16_000_000  # bytes of one request
_BAD_GATEWAY_PAGE = (
    b"<html><head><title>502 Bad Gateway</title></head><body>Bad Gateway</body></html>\n"
)


class _AwsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # a census asks all regions at once
    cloud: FakeAws


class FakeAws(AwsThings):
    """The server with its services; the head of this module lists what a test uses.

    All state is changed under `lock`, and brought to the clock's present before each answer.
    Commands on machines and the callables that a host plugs in run outside it.
    """

    def __init__(self, account: str = FAKE_AWS_ACCOUNT, script: AwsScript | None = None) -> None:
        world = AwsWorld(account, script or AwsScript())
        super().__init__(world, MotoAccount(account))
        self.requests: list[AwsRequest] = []
        self.escapes: list[str] = []
        self.stopping = threading.Event()
        self._server: _AwsServer | None = None
        self._thread: threading.Thread | None = None
        self._open: set[socket.socket] = set()

    @property
    def base(self) -> str:
        """The address, such as http://127.0.0.1:40000."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1]) if self._server is not None else 0

    def __enter__(self) -> FakeAws:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Imports moto (a second or two), empties the account, listens on a port of 127.0.0.1."""
        first = b"Action=DescribeRegions&Version=2016-11-15"  # what moto reads at its first answer
        self.ec2.answer("us-east-1", self.moto.operation("us-east-1", first, {}))
        self.renew()
        self.stopping.clear()
        self._server = _AwsServer(("127.0.0.1", 0), _AwsHandler)
        self._server.cloud = self
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

    def renew(self) -> None:
        """An empty account with the script of a good day; what a host plugged in stays."""
        with self.lock:
            self.clear()
            self.requests.clear()
            self.escapes.clear()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables with which boto3 sees this account and nothing else, beside the usual ones.

        The credentials are made up here and worth nothing; the same account answers to the profile
        FAKE_AWS_PROFILE. Requests to any other host come here as to a proxy, and are refused.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config, credentials = folder / "aws-config", folder / "aws-credentials"
        config.write_text(f"[profile {FAKE_AWS_PROFILE}]\n")
        lines = (
            f"aws_access_key_id = {_MADE_UP_KEYS[1]}\naws_secret_access_key = made-up-for-a-test\n"
        )
        credentials.write_text(f"[{FAKE_AWS_PROFILE}]\n{lines}")
        proxies = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        own = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {
            "AWS_ENDPOINT_URL": self.base,
            "AWS_ACCESS_KEY_ID": _MADE_UP_KEYS[0],
            "AWS_SECRET_ACCESS_KEY": "made-up-for-a-test",
            "AWS_CONFIG_FILE": str(config),
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
            "AWS_EC2_METADATA_DISABLED": "true",
            **{name: self.base for name in proxies},
            **own,
        }

    def sent(self, action: str, service: str = "") -> list[AwsRequest]:
        """The recorded requests of an action (RunInstances; for S3 a part of "PUT /bucket/key")."""
        with self.lock:
            return [
                one
                for one in self.requests
                if (one.action == action or (one.service == "s3" and action in one.action))
                and service in ("", one.service)
            ]

    # -- one request

    def take(self, call: AwsCall) -> tuple[AwsAnswer, str]:
        """The answer, and "" or how it is kept from the caller: "cut", "hold"."""
        self.stopping.wait(self.script.delays.get(call.action, 0.0))
        lost = ""
        with self.lock:
            self.requests.append(call.record())
            try:
                answer = self._answered(call)
            except AwsRefusal as refusal:
                answer = aws_refused(call.service, refusal)
            except _Spoiled as gone:
                answer, lost = (502, {"Content-Type": "text/html"}, _BAD_GATEWAY_PAGE), gone.lost
        self.tell()
        return answer, lost

    def _answered(self, call: AwsCall) -> AwsAnswer:
        script, action = self.script, call.action
        if script.credentials or call.key not in _MADE_UP_KEYS:
            raise useless_credentials(call.service, script.credentials or "invalid")
        if script.throttled.get(action, 0) > 0:
            script.throttled[action] -= 1
            raise aws_throttled(call.service)
        operation, where = None, {"region": call.region}
        if call.service == "ec2":
            operation = self.moto.operation(call.region, call.body, call.headers)
            if action == "RunInstances":
                where.update(self.ec2.launch_place(call.region, operation.parameters))
        repeats = operation is not None and self.ec2.repeats(call.region, operation)
        fault = None if repeats else self.world.fault(action, **where)
        if fault is not None and not fault.after:
            self._fail(call, operation, fault)
        if operation is not None:
            answer = self.ec2.answer(call.region, operation)
        else:
            answer = self._small(call)
        if fault is not None and fault.after:
            self._fail(call, operation, fault)
        return answer

    def _small(self, call: AwsCall) -> AwsAnswer:
        region, action = call.region, call.action
        if call.service == "sts":
            return identity_answer(self.world, action)
        if call.service == "servicequotas":
            return quota_answer(self.world, region, action, call.given)
        if call.service == "ssm":
            return aws_json(self.ssm.answer(region, action, call.given))
        return self.moto.forward(
            call.service, region, call.method, call.target, call.headers, call.body
        )

    def _fail(self, call: AwsCall, operation: Ec2Operation | None, fault: CallFault) -> None:
        """The script's fault: no answer, a page that is none, or a refusal."""
        if fault.lost or fault.code == "html":
            raise _Spoiled(fault.lost)
        if operation is not None and fault.code:
            raise self.ec2.refusal(call.region, operation, fault)
        if fault.code:
            words = {"service": call.service, "action": call.action, "arn": self.world.arn}
            raise known_refusal(fault.code, fault.message, **words)

    def opened(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self.lock:
            self._open.discard(connection)

    def escaped(self, host: str) -> None:
        with self.lock:
            self.escapes.append(host)


class _Spoiled(Exception):
    """An answer that is a load balancer's page, or never arrives (`lost`)."""

    def __init__(self, lost: str) -> None:
        super().__init__(lost)
        self.lost = lost


class _AwsHandler(BaseHTTPRequestHandler):
    """HTTP around it: bodies, keep-alive, what a proxy is asked for, answers that never come."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one piece, or it waits 40 ms for an acknowledgement
    server: _AwsServer

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
        body = self._body()
        if host and host != urlsplit(cloud.base).netloc:
            return self._refuse_host(host)
        headers = dict(self.headers.items())
        answer, lost = cloud.take(AwsCall.read(self.command, self.path, headers, body))
        if not lost:
            return self._send(*answer)
        if lost == "hold":
            cloud.stopping.wait()
        self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(
                min(int(self.headers.get("Content-Length") or 0), _AWS_BODY_BYTES)
            )
        raw = b""
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            raw += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return raw

    def _refuse_host(self, host: str) -> None:
        self.server.cloud.escaped(host)
        self.close_connection = True
        self._send(403, {"Content-Type": "text/plain"}, b"this proxy leads nowhere\n")

    def _send(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.send_response(status)
        lower = {key.lower() for key in headers}
        for key, value in headers.items():
            whole = self.command == "HEAD" and key.lower() == "content-length"
            if whole or key.lower() not in ("content-length", "status", "connection", "date"):
                self.send_header(key, value)
        if self.command != "HEAD" or "content-length" not in lower:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()
