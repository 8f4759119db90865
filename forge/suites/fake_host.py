"""Machines of the fake Google that really run: a sandbox, a metadata server, a boot, a container.

A machine's start-up script runs as it was sent at the create, as a process in the machine's folder,
with stand-ins for docker, systemctl and shutdown before everything else on PATH. What it writes to
its console is what the provider shows. Knows no rig and no boot program.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_world import GoogleRefusal
from forge.suites.fake_host_programs import write_client_programs, write_machine_programs
from forge.suites.fake_host_sandbox import FakeSandbox, write_startable
from forge.suites.fake_host_servers import HostServer, serve_answers, serve_metadata

SERVED_PORT = 8000  # on the machine's loopback, as a document has it
MACHINE_TOKEN = "ya29.made-up-for-a-fake-machine"
# Where a machine's own requests to Google go instead, below its metadata server's address.
_GOOGLE_PLACES = {
    "https://compute.googleapis.com/compute/": "/compute/",
    "https://www.googleapis.com/compute/": "/compute/",
    "https://tpu.googleapis.com/": "/tpu/",
}
_NO_NETWORK = (
    'Error response from daemon: Get "https://images.example/v2/": dial tcp: lookup '
    "images.example on 127.0.0.53:53: server misbehaving"
)


class FakeHost(FakeSandbox):
    """One machine.

    `script` replaces its faults, all at once: `pull`, `run`, `daemon`, `apt`, `sudo`, `systemd`,
    `bucket` (each the words of the program that fails), `pull_s` (seconds), `oom` (its container is
    killed), `secret` (Secret Manager's refusal), `leave` (the refusal to delete it), `ssh`
    ("refused", "timeout", "key", or ssh's own words), `account=False`, `network=False`.
    """

    def __init__(self, hosts: FakeHosts, alias: str, name: str, folder: Path) -> None:
        super().__init__(folder)
        self.hosts, self.alias, self.name = hosts, alias, name
        self._boot: subprocess.Popen[bytes] | None = None
        self._server: HostServer = serve_metadata(self.metadata, self.google)
        docker = hosts.orders.get("docker", True)
        port = hosts.control_port
        self.journal = write_machine_programs(
            self.bin, self.place, self.root, port, alias, docker=docker
        )
        self.script(**hosts.orders)

    def script(self, **orders: Any) -> None:
        told = dict(orders)
        if orders.get("network") is False:
            told["pull"] = _NO_NETWORK
        self.obey(orders, told)

    # -- what it is to the provider

    def machine(self) -> dict[str, Any]:
        """The provider's record of it; empty where there is none any more."""
        return self.hosts.machines().get(self.alias, {})

    def runs(self) -> bool:
        return self.machine().get("status", self.machine().get("state")) in ("RUNNING", "READY")

    def attributes(self) -> dict[str, str]:
        metadata = self.machine().get("metadata", {})
        items = metadata.get("items")
        return {one["key"]: one["value"] for one in items} if items is not None else dict(metadata)

    def document(self) -> str:
        """The boot document, with this machine's own ways to its port and to Google."""
        text = self.attributes().get("gemma4-boot", "")
        text = text.replace(f"127.0.0.1:{SERVED_PORT}", f"127.0.0.1:{self.port}")
        for host, place in _GOOGLE_PLACES.items():
            text = text.replace(host, f"http://127.0.0.1:{self._server.port}{place}")
        return text

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "GEMMA4_MINUTE_S": str(self.hosts.minute_s),
            "GCE_METADATA_HOST": f"127.0.0.1:{self._server.port}",
            "GEMMA4_SECRETS_URL": f"http://127.0.0.1:{self._server.port}",
        }

    # -- its life

    def start(self) -> None:
        """Switches it on: its services, its containers and its start-up script begin."""
        self.switch_on()
        script = self.attributes().get("startup-script", "")
        if not script:
            return
        program = write_startable(self.folder / "startup-script", script.encode())
        self._boot = self.begin(program)
        threading.Thread(target=self._tell_console, args=(self._boot,), daemon=True).start()

    def _tell_console(self, boot: subprocess.Popen[bytes]) -> None:
        """Passes on what the start-up script says, as the machine's agent does."""
        assert boot.stdout is not None
        with boot.stdout:
            for line in boot.stdout:
                text = line.decode("utf-8", "replace").rstrip()
                stamp = time.strftime("%b %d %H:%M:%S", time.gmtime())
                agent = f"{stamp} {self.name} google_metadata_script_runner[{boot.pid}]"
                self._to_provider(f"{agent}: startup-script: {text}\r\n")

    def _to_provider(self, text: str) -> None:
        with self.hosts.cloud.lock:
            self.hosts.cloud.compute.write_serial(self.name, text)

    def tell(self) -> None:
        """Passes on what was written to /dev/console since the last time."""
        fresh = self.fresh_console()
        if fresh:
            self._to_provider(fresh.replace("\n", "\r\n"))

    def boot(self, patience_s: float = 120.0) -> int:
        """Switches it on and waits for the start-up script's end; its status."""
        self.start()
        return self.booted(patience_s)

    def booted(self, patience_s: float = 120.0) -> int:
        """Waits for the end of the start-up script that runs; its status."""
        assert self._boot is not None, "the machine has no start-up script"
        status = self._boot.wait(patience_s)
        self.tell()
        return status

    def stop(self) -> None:
        """Switches it off: every process of it ends, its disk stays."""
        self.tell()
        self.switch_off()
        if self._boot is not None:
            self._boot.wait()

    def reboot(self) -> int:
        """Off and on again; the status of the start-up script's second run."""
        self.stop()
        return self.boot()

    def close(self) -> None:
        self.stop()
        self._server.end()

    # -- what a test looks at

    def console(self) -> str:
        """What its first serial port has shown."""
        return str(self.machine().get("_serial", ""))

    # -- requests to its metadata server, and its own ones to Google

    def email(self) -> str:
        """The service account that it was made with; empty without one."""
        machine = self.machine()
        account = (machine.get("serviceAccounts") or [machine.get("serviceAccount", {})])[0]
        return "" if self.orders.get("account") is False else str(account.get("email", ""))

    def metadata(self, path: str) -> str | None:
        machine, email = self.machine(), self.email()
        token = {"access_token": MACHINE_TOKEN, "expires_in": 3599, "token_type": "Bearer"}
        known = {
            "project/project-id": self.hosts.cloud.world.project,
            "instance/name": self.name,
            "instance/id": str(machine.get("id", "")),
            "instance/zone": f"projects/100000000001/zones/{self.hosts.zone_of(machine)}",
            "instance/service-accounts/default/email": email or None,
            "instance/service-accounts/default/token": json.dumps(token) if email else None,
        }
        if path.startswith("instance/attributes/"):
            key = path.rpartition("/")[2]
            return self.document() if key == "gemma4-boot" else self.attributes().get(key)
        return known.get(path)

    def google(self, method: str, path: str, authorization: str) -> tuple[int, Any] | None:
        """What Google answers to the machine itself; None where its network leads nowhere."""
        refusal = self.orders.get("secret" if "/secrets/" in path else "leave")
        if self.orders.get("network") is False:
            return None
        if authorization != f"Bearer {MACHINE_TOKEN}":
            return 401, GoogleRefusal(401, "UNAUTHENTICATED", "Invalid credentials.").body
        if refusal:
            return 403, GoogleRefusal(403, "PERMISSION_DENIED", str(refusal)).body
        compute = self.hosts.cloud.compute
        with self.hosts.cloud.lock:
            before, compute.caller = compute.caller, self.email() or compute.caller
            try:
                status, answer, arrives = self.hosts.cloud.take(method, path, None)
            finally:
                compute.caller = before
        return (status, answer) if arrives else None


class FakeHosts:
    """All machines of a fake cloud. `bin` goes onto the user's PATH: it has ssh and its kin.

    Each machine or node that runs gets a FakeHost by itself and boots, unless `automatic` is off;
    one that the provider ends is switched off. `minute_s` is how long a boot program's minute is.
    `orders` are the faults that new machines are born with, and `docker=False` for one without it.
    """

    kind: type[FakeHost] = FakeHost

    def __init__(
        self, cloud: FakeGoogle, folder: Path, *, minute_s: float = 3.0, automatic: bool = True
    ) -> None:
        self.cloud, self.folder, self.minute_s = cloud, folder, minute_s
        self.automatic = automatic
        self.orders: dict[str, Any] = {}
        self.hosts: dict[str, FakeHost] = {}
        self.bin = folder / "bin"
        self._on: set[str] = set()
        self._stopping = threading.Event()
        self._making = threading.RLock()

    def __enter__(self) -> FakeHosts:
        self._server: HostServer = serve_answers(self.answer)
        self.control_port = self._server.port
        self.ssh_journal = write_client_programs(self.bin, self.control_port)
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stopping.set()
        self._watch.join(30)
        for host in list(self.hosts.values()):
            host.close()
        self._server.end()

    def machines(self) -> dict[str, dict[str, Any]]:
        """The provider's records by ssh's name for them: compute.ID, tpu.ID-0."""
        with self.cloud.lock:
            self.cloud.compute.settle()
            self.cloud.tpu.settle()
            found = {f"compute.{one['id']}": one for one in self.cloud.compute.instances.values()}
            return {**found, **{f"tpu.{one['id']}-0": one for one in self.cloud.tpu.nodes.values()}}

    def zone_of(self, machine: dict[str, Any]) -> str:
        link = str(machine.get("zone", ""))
        return link.rsplit("/", 1)[-1] if link else str(machine.get("name", "/" * 4)).split("/")[3]

    def host(self, name: str, patience_s: float = 30.0) -> FakeHost:
        """The newest machine of that name, as soon as the provider has it. Raises LookupError."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for alias, machine in reversed(self.machines().items()):
                if str(machine["name"]).rsplit("/", 1)[-1] == name:
                    return self._host(alias, name)
            time.sleep(0.05)
        raise LookupError(name)

    def _host(self, alias: str, name: str) -> FakeHost:
        with self._making:
            if alias not in self.hosts:
                folder = self.folder / "machines" / alias
                self.hosts[alias] = self.kind(self, alias, name, folder)
            return self.hosts[alias]

    def _watched(self) -> None:
        while not self._stopping.wait(0.05):
            for alias, machine in self.machines().items():
                name = str(machine["name"]).rsplit("/", 1)[-1]
                running = machine.get("status", machine.get("state")) in ("RUNNING", "READY")
                if running and self.automatic and alias not in self._on:
                    self._on.add(alias)
                    self._host(alias, name).start()
            for alias, host in list(self.hosts.items()):
                host.tell()
                if alias in self._on and not host.runs():
                    self._on.discard(alias)
                    host.stop()

    def answer(self, path: str) -> dict[str, Any]:
        """What ssh and a machine's shutdown ask."""
        _, word, alias = (*path.split("/"), "", "")[:3]
        host = self.hosts.get(alias)
        if host is None or not host.runs():
            return {"refuse": "refused"}
        if word == "shutdown":
            with self.cloud.lock:
                self.cloud.compute.shut_down(host.name)
                if alias.startswith("tpu."):
                    host.machine()["state"] = "STOPPED"
            return {}
        if host.orders.get("network") is False:
            return {"refuse": "timeout"}
        if host.orders.get("ssh"):
            return {"refuse": host.orders["ssh"]}
        home = {"HOME": str(host.root / "root"), "USER": "root"}
        return {
            "root": str(host.root / "root"),
            "environment": {**host.environment(), **home},
            "ports": {str(SERVED_PORT): host.port},
        }
