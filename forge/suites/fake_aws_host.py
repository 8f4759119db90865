"""All machines of a fake AWS that really run, and what their user has to reach them.

Each instance gets a FakeAwsHost by itself: it boots when it runs, is switched off when it is
stopped, boots again when it is started, and ends with it. Shutting down from within ends or stops
the instance, as it was ordered.

    with FakeAws() as cloud, FakeAwsHosts(cloud, folder / "hosts", minute_s=1) as hosts:
        hosts.orders = {"agent": False}        # the faults that new machines are born with
        host = hosts.host(id or name)          # FakeAwsHost: console() programs() container()
                                               # engine llama hub root port script(...) booted()
        hosts.bin                              # for the user's PATH: session-manager-plugin
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_host_bucket import copy_bucket
from forge.suites.fake_aws_host_machine import FakeAwsHost
from forge.suites.fake_aws_host_plugin import FakePluginProgram, plugin_end
from forge.suites.fake_host_programs import write_fake_program
from forge.suites.fake_host_servers import HostServer, serve_answers

PLUGIN_RELEASE = "1.2.779.0"


class FakeAwsHosts:
    """`minute_s` is how long a boot program's minute is; without `automatic` a test starts them."""

    def __init__(
        self, cloud: FakeAws, folder: Path, *, minute_s: float = 3.0, automatic: bool = True
    ) -> None:
        self.cloud, self.folder, self.minute_s = cloud, folder, minute_s
        self.automatic = automatic
        self.orders: dict[str, Any] = {}
        self.hosts: dict[str, FakeAwsHost] = {}
        self.bin = folder / "bin"
        self._news: deque[tuple[str, str]] = deque()
        self._stopping = threading.Event()

    def __enter__(self) -> FakeAwsHosts:
        self._server: HostServer = serve_answers(self.answer)
        self.write_plugin()
        cloud = self.cloud
        cloud.console, cloud.run_command = self.console, self.run_command
        cloud.agent_online, cloud.end_command = self.agent_online, self.end_command
        cloud.changed = lambda machine, state: self._news.append((machine, state))
        for machine in cloud.machines():
            if not machine.foreign:
                self._news.append((machine.id, machine.state))
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stopping.set()
        self._watch.join(60)
        self.cloud.changed = lambda _machine, _state: None
        self.cloud.agent_online = lambda _machine: False
        for host in list(self.hosts.values()):
            host.close()
        self._server.end()

    def write_plugin(self, release: str = PLUGIN_RELEASE) -> None:
        """session-manager-plugin of that release, in `bin`; `plugin_journal` has its arguments."""
        self.bin.mkdir(parents=True, exist_ok=True)
        self.plugin_journal = self.bin / "plugin.jsonl"
        self.plugin_journal.touch()
        path = self.bin / "session-manager-plugin"
        end = plugin_end(self._server.port, release)
        write_fake_program(path, self.plugin_journal, [FakePluginProgram], end)

    # -- their lives

    def _watched(self) -> None:
        while not self._stopping.wait(0.05):
            self.cloud.tell()
            while self._news:
                self._follow(*self._news.popleft())
            known = {one.id for one in self.cloud.machines(all_states=True)}
            for one, host in list(self.hosts.items()):
                host.console()
                if one not in known and host.on:  # the account was emptied
                    host.stop()

    def _follow(self, machine: str, state: str) -> None:
        """Brings a machine's sandbox to the state of its instance."""
        host = self.hosts.get(machine)
        if state == "running" and host is None:
            try:
                host = self.hosts[machine] = self._made(machine)
            except KeyError:
                pass  # the account was emptied before its news came
        if host is None:
            return
        if state == "running" and self.automatic and not host.on:
            host.start()
        elif state != "running" and host.on:
            host.stop()

    def _made(self, machine: str) -> FakeAwsHost:
        return FakeAwsHost(
            self.cloud.machine(machine),
            self.folder / "machines" / machine,
            control_port=self._server.port,
            minute_s=self.minute_s,
            orders=self.orders,
        )

    def host(self, which: str, patience_s: float = 30.0) -> FakeAwsHost:
        """The newest machine of that id or name, as soon as it has run. Raises LookupError."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for host in reversed(list(self.hosts.values())):
                if which in (host.id, host.name) and (host.on or not self.automatic):
                    return host
            time.sleep(0.02)
        raise LookupError(which)

    # -- what the cloud asks

    def console(self, machine: str) -> str:
        host = self.hosts.get(machine)
        return host.console() if host is not None else ""

    def agent_online(self, machine: str) -> bool:
        host = self.hosts.get(machine)
        return host is not None and host.agent_online()

    def run_command(self, machine: str, script: str) -> tuple[str, str, int]:
        """What a command of Systems Manager gave, whole: standard output, error, exit status."""
        return self.hosts[machine].command(script)

    def end_command(self, machine: str) -> None:
        self.hosts[machine].end_commands()

    # -- what programs ask: a machine's own, and its user's

    def answer(self, target: str) -> dict[str, Any]:
        parts = urlsplit(target)
        _, word, machine = (*parts.path.split("/"), "", "")[:3]
        asked = dict(parse_qsl(parts.query))
        if word == "session":
            return self._session(asked)
        host = self.hosts.get(machine)
        if host is None or not host.on:
            return {}
        if word == "shutdown":
            self.cloud.shut_down(machine)
            return {}
        if word == "secret":
            return self._secret(host, asked)
        return copy_bucket(self.cloud, asked["verb"], asked["source"], asked["target"])

    def _secret(self, host: FakeAwsHost, asked: dict[str, str]) -> dict[str, Any]:
        if host.orders.get("secret"):
            return {"code": "AccessDeniedException", "message": str(host.orders["secret"])}
        value = self.cloud.secret(asked["region"], asked["name"])
        if value is None:
            words = "Secrets Manager can't find the specified secret."
            return {"code": "ResourceNotFoundException", "message": words}
        return {"value": value}

    def _session(self, asked: dict[str, str]) -> dict[str, Any]:
        """Where a session leads: to a port of this computer, 0 where nobody listens there."""
        session = self.cloud.ssm.sessions.get(asked.get("id", ""))
        if session is None or session.token != asked.get("token") or not session.open:
            return {"refuse": "websocket: bad handshake"}
        if asked.get("end"):
            session.open = False
        host = self.hosts.get(session.machine)
        if host is None or not host.agent_online() or not session.open:
            return {"refuse": "websocket: close 1006 (abnormal closure): unexpected EOF"}
        return {"port": host.port if session.port == host.served_port else 0}
