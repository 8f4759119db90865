"""A stand-in for ssh: runs the command in a fake machine's sandbox, or carries a port to it.

Its class is copied into a program, so it uses the standard library alone. Where a machine is, and
whether it answers, it asks the machines' owner over loopback; refusals are in OpenSSH's words.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any


class FakeSshRefused(Exception):
    """Why there is no connection, in ssh's own words; its status is 255."""


class FakeSshProgram:
    """One call of ssh. `port` is where the owner of the machines is asked."""

    VALUED = "BbcDEeFIiJLlmOopQRSWw"  # ssh's options that take a value

    def __init__(self, port: int, argv: list[str]) -> None:
        self.port = port
        self.options: dict[str, str] = {}
        self.switches: set[str] = set()
        self.forwards: list[str] = []
        self.target, self.command = "", ""
        self.read_arguments(argv)

    def read_arguments(self, argv: list[str]) -> None:
        words = list(argv)
        rest: list[str] = []
        while words:
            word = words.pop(0)
            if word == "--" or (rest and not word.startswith("-")):
                rest += words if word == "--" else [word, *words]
                break
            if not word.startswith("-"):
                rest.append(word)  # the host; options may follow it
            elif word[1] in self.VALUED:
                value = word[2:] or (words.pop(0) if words else "")
                if word[1] == "o":
                    key, _, text = value.replace("=", " ", 1).partition(" ")
                    self.options[key] = text
                elif word[1] == "L":
                    self.forwards.append(value)
            else:
                self.switches.update(word[1:])
        self.target = rest[0] if rest else ""
        self.command = " ".join(rest[1:])

    def machine(self) -> dict[str, Any]:
        """The sandbox of the machine that is meant. Raises what ssh says where it cannot be had."""
        alias = self.options.get("HostKeyAlias", self.target)
        host = self.target.partition("@")[2]
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(f"GET /ssh/{alias} HTTP/1.0\r\n\r\n".encode())
                with connection.makefile("rb") as stream:
                    answer = stream.read()
        except OSError:
            pass
        found = json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}")
        if "root" in found:
            return dict(found)
        why = str(found.get("refuse") or "refused")
        known = {
            "refused": f"ssh: connect to host {host} port 22: Connection refused",
            "timeout": f"ssh: connect to host {host} port 22: Connection timed out",
            "key": f"{self.target}: Permission denied (publickey).",
        }
        if why in ("refused", "timeout") and "ProxyCommand" in self.options:
            words = "ERROR: (gcloud.compute.start-iap-tunnel) Error while connecting "
            words += "[4003: 'failed to connect to backend']. (Failed to connect to port 22)"
            raise FakeSshRefused(f"{words}\nConnection closed by UNKNOWN port 65535")
        raise FakeSshRefused(known.get(why, why))

    def run(self) -> int:
        try:
            machine = self.machine()
            if self.forwards:
                return self.forward(machine)
        except FakeSshRefused as refused:
            print(refused, file=sys.stderr)
            return 255
        shell = ["sh", "-c", self.command] if self.command else ["sh"]
        home = machine["root"]
        return subprocess.run(shell, env=machine["environment"], cwd=home).returncode

    # -- a port

    def forward(self, machine: dict[str, Any]) -> int:
        """Carries the local port to the machine's until the machine is gone."""
        near, address, far = self.forwards[0].rsplit(":", 2)
        local = int(near.rsplit(":", 1)[-1])
        door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", local))
        except OSError:
            raise FakeSshRefused(
                f"bind [127.0.0.1]:{local}: Address already in use\n"
                f"channel_setup_fwd_listener_tcpip: cannot listen to port: {local}\n"
                "Could not request local forwarding."
            ) from None
        door.listen()
        threading.Thread(target=self.accept, args=(door, far, address), daemon=True).start()
        parent = os.getppid()
        while os.getppid() == parent or "N" in self.switches:
            time.sleep(0.1)
            try:
                self.machine()
            except FakeSshRefused:
                host = self.target.partition("@")[2]
                ended = f"client_loop: send disconnect: Broken pipe\nConnection to {host} closed."
                raise FakeSshRefused(ended) from None
        return 0

    def accept(self, door: socket.socket, far: str, address: str) -> None:
        number = 1
        while True:
            line, _where = door.accept()
            number += 1
            try:
                port = self.machine()["ports"].get(far)
                if port is None:
                    raise ConnectionRefusedError
                other = socket.create_connection(("127.0.0.1", int(port)))
            except (OSError, FakeSshRefused):
                why = "open failed: connect failed: Connection refused"
                print(f"channel {number}: {why}", file=sys.stderr, flush=True)
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
