"""A stand-in for AWS's session-manager-plugin: carries a local port to a fake machine's.

It takes its arguments and speaks as release 1.2 does, errors on standard output with status 0
included. Its class is copied into a program, so it uses the standard library alone; whether the
session is one, and where the port leads, it asks the machines' owner over loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from typing import Any


class FakePluginProgram:
    """One call: a variable's name, the region, StartSession, a profile, the request, an address."""

    def __init__(self, port: int, version: str) -> None:
        self.port, self.version = port, version
        self.session: dict[str, Any] = {}

    def call(self, argv: list[str]) -> int:
        if not argv:
            print("\nThe Session Manager plugin was installed successfully. ", end="")
            print("Use the AWS CLI to start a session.\n")
            return 0
        if argv == ["--version"]:
            print(self.version)
            return 0
        if len(argv) < 3:
            print(f"\nUnknown operation {argv[0]}. \nUse session-manager-plugin --version ", end="")
            print("to check the version.\n")
            return 0
        given = argv[0]
        if given.startswith("AWS_SSM_START_SESSION_RESPONSE"):
            given = os.environ.pop(given, "")
        try:
            self.session = json.loads(given)
        except ValueError:
            print("Cannot perform start session: unexpected end of JSON input")
            return 0
        if argv[2] != "StartSession":
            print("Invalid Operation", end="")
            return 0
        request = json.loads(argv[4])
        print(f"\nStarting session with SessionId: {self.session['SessionId']}", flush=True)
        found = self.owner()
        if "port" not in found:
            print(f"Cannot perform start session: {found.get('refuse', 'the session is closed')}")
            return 0
        local = int((request.get("Parameters", {}).get("localPortNumber") or ["0"])[0])
        return self.forward(local)

    def owner(self, **more: str) -> dict[str, Any]:
        """Where the session leads now; without a port where it leads nowhere any more."""
        import urllib.parse

        asked = {**more, "id": self.session["SessionId"], "token": self.session["TokenValue"]}
        path = f"/session/?{urllib.parse.urlencode(asked)}"
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as line:
                line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                with line.makefile("rb") as stream:
                    answer = stream.read()
        except OSError:
            return {"refuse": "websocket: bad handshake"}
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}"))

    def forward(self, local: int) -> int:
        door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", local))
        except OSError:
            where = f"127.0.0.1:{local}"
            print(f"Cannot perform start session: listen tcp {where}: bind: ", end="")
            print("address already in use")
            return 0
        door.listen()
        one = self.session["SessionId"]
        print(f"Port {door.getsockname()[1]} opened for sessionId {one}.")
        print("Waiting for connections...", flush=True)
        threading.Thread(target=self.accept, args=(door,), daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.leave("Terminate signal received, exiting."))
        while "port" in self.owner():
            time.sleep(0.1)
        return self.leave("")

    def leave(self, words: str) -> int:
        print(words)
        self.owner(end="1")
        print(f"\n\nExiting session with sessionId: {self.session['SessionId']}.\n", flush=True)
        os._exit(0)

    def accept(self, door: socket.socket) -> None:
        told = False
        while True:
            line, _where = door.accept()
            if not told:
                told = True
                print(
                    f"\nConnection accepted for session [{self.session['SessionId']}]", flush=True
                )
            try:
                other = socket.create_connection(("127.0.0.1", int(self.owner()["port"])))
            except (OSError, KeyError):
                print("\nConnection to destination port failed, check SSM Agent logs.", flush=True)
                line.close()
                continue
            for pair in ((line, other), (other, line)):
                threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, target):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def plugin_end(port: int, version: str) -> str:
    """The last lines of the program, after the class."""
    return f"\nsys.exit(FakePluginProgram({port!r}, {version!r}).call(sys.argv[1:]))\n"
