"""What systemd does on a fake machine by itself: services, timers, and their journal.

Its class is copied into a program, so it uses the standard library alone, and imports what takes
long only where it needs it: a boot calls such programs many times. A unit that runs has a
keeper process, which starts it again where its policy says so. Knows no command line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any


class FakeUnitKeeper:
    """The units of one machine. `place` holds their states and their journal, `root` is the
    machine's /, below which absolute paths of unit files lie."""

    FOLDERS = ("etc/systemd/system", "run/systemd/system", "lib/systemd/system")
    # On the image, and running; of no matter to a test.
    PRESENT = (
        "docker.service containerd.service docker.socket amazon-ssm-agent.service ssh.service "
        "snap.amazon-ssm-agent.amazon-ssm-agent.service nvidia-persistenced.service "
        "unattended-upgrades.service apt-daily.timer apt-daily-upgrade.timer apt-daily.service "
        "apt-daily-upgrade.service cloud-final.service"
    ).split()
    KINDS = (".service", ".timer", ".socket", ".target")
    SPANS = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}

    def __init__(self, place: str, root: str) -> None:
        self.place, self.root = place, root
        os.makedirs(os.path.join(place, "units"), exist_ok=True)

    def complain(self, text: str, status: int = 1) -> int:
        sys.stdout.flush()
        print(text, file=sys.stderr)
        return status

    # -- unit files

    def whole_name(self, name: str) -> str:
        return name if name.endswith(self.KINDS) else name + ".service"

    def unit(self, name: str) -> dict[str, list[str]] | None:
        """All settings of a unit by key, whatever the section; None where there is no such unit."""
        for folder in self.FOLDERS:
            path = os.path.join(self.root, folder, name)
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    text = file.read().replace("\\\n", " ")
                found: dict[str, list[str]] = {}
                for line in text.splitlines():
                    key, is_setting, value = line.partition("=")
                    if is_setting and line.strip()[0] not in "#;":
                        # An empty value forgets what was set before.
                        before = found.get(key.strip(), []) if value.strip() else []
                        found[key.strip()] = before + ([value.strip()] if value.strip() else [])
                return found
        return {} if name in self.PRESENT else None

    def value(self, unit: dict[str, list[str]], key: str, default: str = "") -> str:
        return (unit.get(key) or [default])[-1]

    def seconds(self, text: str) -> float:
        """A span of time such as 90, 5s or 1min 30s."""
        parts = re.findall(r"([0-9.]+)\s*([a-z]*)", text)
        return sum(float(number) * self.SPANS[unit] for number, unit in parts)

    def words(self, command: str) -> list[str]:
        """A command line of a unit, with the machine's own programs and paths."""
        words = [one.replace("%%", "%") for one in self.parted(command.lstrip("-@:+!"))]
        return [self.inside(word) for word in words]

    def inside(self, word: str) -> str:
        """An absolute path as it is called on this computer; anything else as it stands."""
        program = re.fullmatch(r"/(?:usr/)?(?:local/)?s?bin/([\w.+-]+)", word)
        if program:
            own = os.path.join(os.path.dirname(self.place), "bin", program[1])
            return own if os.path.lexists(own) else word
        if word.startswith(("/var/", "/etc/", "/run/", "/opt/", "/usr/", "/dev/")):
            return self.root + word
        return word

    def parted(self, text: str) -> list[str]:
        import shlex

        return shlex.split(text)

    def pairs(self, words: list[str]) -> dict[str, str]:
        return dict(word.partition("=")[::2] for word in words)

    # -- states

    def path(self, name: str, end: str) -> str:
        return os.path.join(self.place, f"{name}.{end}")

    def wanted_on(self, name: str) -> bool:
        return os.path.exists(self.path(name, "on"))

    def switch(self, name: str, end: str, on: bool) -> None:
        if on:
            open(self.path(name, end), "w", encoding="utf-8").close()
        elif os.path.exists(self.path(name, end)):
            os.remove(self.path(name, end))

    def state(self, name: str) -> dict[str, Any]:
        told = {"ActiveState": "inactive", "SubState": "dead", "MainPID": 0, "NRestarts": 0}
        told |= {"Result": "success", "ExecMainStatus": 0, "ExecMainCode": 0}
        told["ExecMainStartTimestamp"] = ""
        try:
            with open(os.path.join(self.place, "units", name), encoding="utf-8") as file:
                return {**told, **json.load(file)}
        except (OSError, ValueError):
            on = name in self.PRESENT
            return {**told, **({"ActiveState": "active", "SubState": "running"} if on else {})}

    def note(self, name: str, **changes: Any) -> None:
        path = os.path.join(self.place, "units", name)
        fresh = f"{path}.{os.getpid()}"
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump({**self.state(name), **changes}, file)
        os.replace(fresh, path)

    def machine_is_on(self) -> bool:
        try:
            with open(os.path.join(self.place, "on"), encoding="utf-8") as file:
                os.kill(int(file.read() or 0), 0)
        except (OSError, ValueError):
            return False
        return True

    # -- keepers

    def keep(self, name: str) -> int:
        """The keeper of a unit: waits for a timer's moment, or runs a service."""
        unit = self.unit(name) or {}
        return self.keep_timer(name, unit) if name.endswith(".timer") else self.serve(name, unit)

    def keep_timer(self, name: str, unit: dict[str, list[str]]) -> int:
        try:
            moment = self.moment(name, unit)
        except ValueError as error:
            self.note(name, ActiveState="failed", SubState="failed", Result=str(error))
            return 1
        self.note(name, ActiveState="active", SubState="waiting" if moment else "elapsed")
        while moment and self.wanted_on(name) and self.machine_is_on():
            time.sleep(0.05)
            if time.time() >= moment:
                self.stamp(name)
                due = self.value(unit, "Unit", name[:-6] + ".service")
                subprocess.run([sys.argv[0], "--no-block", "start", due])
                again = self.value(unit, "OnUnitActiveSec")
                moment = time.time() + self.seconds(again) if again else 0.0
                self.note(name, SubState="waiting" if again else "elapsed")
        return 0

    def moment(self, name: str, unit: dict[str, list[str]]) -> float:
        """When the timer is due, in Unix seconds; 0 where its time has passed without anybody.

        One that is persistent makes up for what it missed while the machine was off.
        """
        for key in ("OnActiveSec", "OnBootSec", "OnStartupSec"):
            if unit.get(key):
                return time.time() + self.seconds(self.value(unit, key))
        text = self.value(unit, "OnCalendar")
        if text.startswith("@"):
            due = float(text[1:])
        elif re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text):
            import calendar

            due = float(calendar.timegm(time.strptime(text, "%Y-%m-%d %H:%M:%S UTC")))
        else:
            raise ValueError(f"this stand-in knows no calendar specification {text!r}")
        if due > time.time():
            if not os.path.exists(self.path(name, "stamp")):
                self.stamp(name)
            return due
        persistent = self.value(unit, "Persistent") in ("true", "yes", "on", "1")
        seen = os.path.exists(self.path(name, "stamp"))
        missed = seen and os.path.getmtime(self.path(name, "stamp")) < due
        return time.time() if persistent and missed else 0.0

    def stamp(self, name: str) -> None:
        """Notes when the timer was last triggered, or first switched on."""
        self.switch(name, "stamp", True)

    def serve(self, name: str, unit: dict[str, list[str]]) -> int:
        """Runs a service, and again when it ended, as its policy says."""
        policy, oneshot = self.value(unit, "Restart", "no"), self.value(unit, "Type") == "oneshot"
        wait = self.seconds(self.value(unit, "RestartSec", "100ms"))
        burst = int(self.value(unit, "StartLimitBurst", "5"))
        within = self.seconds(self.value(unit, "StartLimitIntervalSec", "10"))
        starts = 0
        while self.wanted_on(name) and self.machine_is_on():
            starts += 1
            status = 0
            for command in (*unit.get("ExecStartPre", []), *unit.get("ExecStart", [])):
                status = self.one_run(name, unit, command, oneshot)
                if status and not command.startswith("-"):
                    break
                status = 0
            result = "success" if not status else "exit-code" if status > 0 else "signal"
            result = "oom-kill" if status == -9 and self.starved() else result
            code = {"ExecMainStatus": abs(status), "ExecMainCode": 1 if status >= 0 else 2}
            self.note(name, MainPID=0, Result=result, **code)
            again = policy == "always" or (policy == "on-failure" and status)
            if not (again and self.wanted_on(name) and self.machine_is_on()):
                break
            if within and starts >= burst and wait * burst < within:
                self.tell(name, "systemd[1]", f"{name}: Start request repeated too quickly.")
                status = status or 1
                break
            self.note(name, ActiveState="activating", SubState="auto-restart", NRestarts=starts)
            time.sleep(min(wait, 0.2))
        stays = oneshot and not status and self.value(unit, "RemainAfterExit") in ("yes", "true")
        if not stays:
            stopped = not self.wanted_on(name)  # what somebody stopped has not failed
            self.switch(name, "on", False)
            failed = bool(status) and not stopped
            state = ("failed", "failed") if failed else ("inactive", "dead")
            self.note(name, ActiveState=state[0], SubState=state[1])
        else:
            self.note(name, ActiveState="active", SubState="exited")
        return 0

    def one_run(self, name: str, unit: dict[str, list[str]], command: str, oneshot: bool) -> int:
        words = self.words(command)
        environment = {key: text for key, text in os.environ.items() if key != "HOME"}
        for path in unit.get("EnvironmentFile", []):
            try:
                with open(self.inside(path.lstrip("-")), encoding="utf-8") as file:
                    lines = [line for line in file.read().splitlines() if "=" in line]
            except OSError:
                if path.startswith("-"):
                    continue
                self.tell(name, "systemd[1]", f"{name}: Failed to load environment files")
                return 1
            environment.update(self.pairs([line for line in lines if line[0] != "#"]))
        for line in unit.get("Environment", []):
            environment.update(self.pairs(self.parted(line)))
        environment = {key: self.inside(text) for key, text in environment.items()}
        folder = self.inside(self.value(unit, "WorkingDirectory", "")) or self.root
        try:
            child = subprocess.Popen(
                words,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self.tell(name, "systemd[1]", f"{name}: Failed at step EXEC spawning {words[0]}: ")
            self.tell(name, "systemd[1]", f"{error.strerror}")
            return 203
        pump = threading.Thread(target=self.pump, args=(name, unit, words[0], child))
        pump.start()
        started = time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime())
        state = ("activating", "start") if oneshot else ("active", "running")
        told = {"MainPID": child.pid, "ExecMainStartTimestamp": started}
        self.note(name, ActiveState=state[0], SubState=state[1], **told)
        while child.poll() is None:
            time.sleep(0.02)
            if self.starved() and "llama" in name:
                child.kill()
            elif not self.wanted_on(name) or not self.machine_is_on():
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
        pump.join(5)
        return child.returncode

    def starved(self) -> bool:
        """Whether the kernel kills the machine's model server for memory, by its script."""
        try:
            with open(os.path.join(self.place, "control.json"), encoding="utf-8") as file:
                return bool(json.load(file).get("oom"))
        except (OSError, ValueError):
            return False

    # -- the journal

    def pump(self, name: str, unit: dict[str, list[str]], program: str, child: Any) -> None:
        """Every line of a service to where its unit sends it."""
        kind, _, path = self.value(unit, "StandardOutput", "journal").partition(":")
        who = f"{os.path.basename(program)}[{child.pid}]"
        for line in child.stdout:
            if kind in ("append", "file", "truncate"):
                with open(self.inside(path), "ab") as file:
                    file.write(line)
            elif kind != "null":
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                self.tell(name, who, text)
                if "console" in kind:
                    with open(os.path.join(self.root, "dev/console"), "a", encoding="utf-8") as to:
                        to.write(text + "\n")

    def tell(self, name: str, who: str, text: str) -> None:
        with open(os.path.join(self.place, "journal"), "a", encoding="utf-8") as file:
            line = {"time": time.time(), "unit": name, "who": who, "text": text}
            file.write(json.dumps(line) + "\n")
