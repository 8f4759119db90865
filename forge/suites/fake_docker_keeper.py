"""What the daemon of the stand-in for docker does: containers as processes, their logs, their end.

Its class is copied into a program, so it uses the standard library alone. Knows no command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any


class FakeDockerFailed(Exception):
    """What docker says on its standard error when it fails, and its status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class FakeDockerKeeper:
    """The containers of one machine. `place` is docker's folder: a state and a log for each
    container, images, the faults of the moment (control.json), the server that every container
    runs (vllm.py), and `on`, which holds the process that the machine belongs to."""

    def __init__(self, place: str, root: str) -> None:
        self.place, self.root = place, root

    # -- files

    def path(self, name: str) -> str:
        return os.path.join(self.place, name)

    def stored(self, name: str, default: Any) -> Any:
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return default

    def store(self, name: str, value: Any) -> None:
        fresh = self.path(f"{name}.{os.getpid()}.{threading.get_ident()}")
        private = os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600)  # tokens are among it
        with open(private, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(fresh, self.path(name))

    def fault(self, name: str) -> Any:
        return self.stored("control.json", {}).get(name)

    def container(self, name: str) -> dict[str, Any] | None:
        found = self.stored(f"{name}.json", None)
        return found if isinstance(found, dict) else None

    def present(self, name: str) -> dict[str, Any]:
        found = self.container(name)
        if found is None:
            raise FakeDockerFailed(f"Error response from daemon: No such container: {name}")
        return found

    def now(self) -> str:
        nanos = time.time_ns()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nanos // 10**9))
        return f"{moment}.{nanos % 10**9:09d}Z"

    # -- containers

    def begin(self, name: str) -> None:
        """Starts the container's keeper, and waits until the container runs."""
        self.store(f"{name}.wanted", "running")
        open(self.path(f"{name}.log"), "a", encoding="utf-8").close()
        argv = [sys.executable, sys.argv[0], "--keep", name]
        quiet = subprocess.DEVNULL
        started = self.present(name)["State"].get("StartedAt", "")
        subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        self.until(lambda: self.present(name)["State"].get("StartedAt", "") != started)

    def until(self, holds: Any, patience_s: float = 20.0) -> bool:
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if holds():
                return True
            time.sleep(0.02)
        return False

    def end(self, name: str, patience_s: float) -> None:
        """Ends the container as `docker stop` does: first asked, then killed."""
        self.store(f"{name}.wanted", "stopped")
        for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10.0)):
            state = self.present(name)["State"]
            if not state["Running"] and state["Status"] != "restarting":
                return
            if patience and state.get("Pid"):
                try:
                    os.kill(state["Pid"], number)
                except ProcessLookupError:
                    pass
            self.until(lambda: self.present(name)["State"]["Status"] == "exited", patience)

    def keep(self, name: str) -> int:
        """The container's keeper: runs it, and again where its policy says so."""
        wait = 0.1
        while self.machine_is_on():
            status = self.serve(name)
            found = self.present(name)
            state = {**found["State"], "Running": False, "Pid": 0, "FinishedAt": self.now()}
            state.update(ExitCode=status if status >= 0 else 128 - status)
            state.update(OOMKilled=status == -9 and bool(self.fault("oom")))
            for action in ("oom", "die") if state["OOMKilled"] else ("die",):
                self.note_event(name, action)
            again = self.stored(f"{name}.wanted", "") == "running"
            again = again and self.machine_is_on()
            policy = found["HostConfig"]["RestartPolicy"]["Name"]
            again = again and (
                policy in ("always", "unless-stopped") or bool(policy == "on-failure" and status)
            )
            state["Status"] = "restarting" if again else "exited"
            count = found["RestartCount"] + (1 if again else 0)
            self.store(f"{name}.json", {**found, "State": state, "RestartCount": count})
            if not again:
                return 0
            time.sleep(wait)
            wait = min(wait * 2, 60.0)
        return 0

    def note_event(self, name: str, action: str) -> None:
        """docker's own memory of what happened: it outlives the state of the container."""
        with open(self.path("events.log"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": self.now(), "name": name, "action": action}) + "\n")

    def serve(self, name: str) -> int:
        """One life of the container: its process, its log line by line; its status."""
        found = self.present(name)
        ports = [one[0]["HostPort"] for one in found["HostConfig"]["PortBindings"].values()]
        given = dict(one.split("=", 1) for one in found["Config"]["Env"])
        own = {"PATH": "/usr/bin:/bin", "HOSTNAME": found["Id"][:12]}
        own.update(FAKE_PORT=(ports or ["0"])[0], FAKE_MACHINE=os.environ["FAKE_MACHINE"])
        words = [*(found["Config"]["Entrypoint"] or []), *found["Config"]["Cmd"]]
        argv = [sys.executable, "-S", self.path("vllm.py"), *words[1:]]
        child = subprocess.Popen(
            argv,
            env={**given, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.place,
        )
        state = {"Status": "running", "Running": True, "OOMKilled": False, "ExitCode": 0}
        state.update(Pid=child.pid, StartedAt=self.now(), FinishedAt="0001-01-01T00:00:00Z")
        self.store(f"{name}.json", {**found, "State": state})
        streams = (("stdout", child.stdout), ("stderr", child.stderr))
        pumps = [threading.Thread(target=self.pump, args=(name, *one)) for one in streams]
        for pump in pumps:
            pump.start()
        while child.poll() is None:
            time.sleep(0.02)
            if not self.machine_is_on() or self.fault("oom"):
                child.kill()
        for pump in pumps:
            pump.join()
        return child.returncode

    def pump(self, name: str, label: str, stream: Any) -> None:
        with open(self.path(f"{name}.log"), "a", encoding="utf-8") as file:
            for line in stream:
                text = re.sub(r"\r?\n$", "", line.decode("utf-8", "replace"))
                file.write(json.dumps({"time": self.now(), "stream": label, "log": text}) + "\n")
                file.flush()

    def machine_is_on(self) -> bool:
        """Whether the machine runs: its owner, a test, lives and has not switched it off."""
        try:
            with open(self.path("on"), encoding="utf-8") as file:
                os.kill(int(file.read() or 0), 0)
        except (OSError, ValueError):
            return False
        return True
