"""A stand-in for systemctl and journalctl on a fake machine, in the words of systemd 255.

Its class is copied into a program, so it uses the standard library alone. What it does not know it
refuses; what a unit then does, its keeper does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from forge.suites.fake_aws_host_units import FakeUnitKeeper


class FakeSystemd(FakeUnitKeeper):
    """One call of either: each verb of systemctl is a method named after it."""

    VERBS = (
        "daemon-reload enable disable start stop restart is-active is-enabled is-failed show "
        "status reset-failed poweroff"
    ).split()

    def systemctl(self, argv: list[str]) -> int:
        words = [word for word in argv if not word.startswith("-")]
        options = [word for word in argv if word.startswith("-")]
        for short in ("-p", "--property", "-n", "--lines"):
            if short in argv:
                value = argv[argv.index(short) + 1]
                words.remove(value)
                options.append(f"{short}={value}")
        verb, names = (words or ["status"])[0], words[1:]
        if verb not in self.VERBS:
            return self.complain(f"Unknown command verb '{verb}'.")
        if verb in ("daemon-reload", "poweroff"):
            return self.power_off() if verb == "poweroff" else 0
        if not names and verb != "reset-failed":
            return self.complain("Too few arguments.")
        statuses = [
            int(getattr(self, "do_" + verb.replace("-", "_"))(self.whole_name(name), options) or 0)
            for name in names
        ]
        return max(statuses, default=0)

    def power_off(self) -> int:
        program = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "shutdown")
        return subprocess.run([program, "-P", "now"]).returncode

    def do_enable(self, name: str, options: list[str]) -> int:
        unit = self.unit(name)
        if unit is None:
            return self.complain(f"Failed to enable unit: Unit file {name} does not exist.")
        if not unit.get("WantedBy") and name not in self.PRESENT:
            return self.complain(
                "The unit files have no installation config (WantedBy=, RequiredBy=, UpheldBy=,\n"
                "Also=, or Alias= settings in the [Install] section)."
            )
        for target in unit.get("WantedBy", []):
            if not os.path.exists(self.path(name, "enabled")):
                link = f"/etc/systemd/system/{target}.wants/{name}"
                self.complain(f"Created symlink {link} → /etc/systemd/system/{name}.")
        self.switch(name, "enabled", True)
        return self.do_start(name, options) if "--now" in options else 0

    def do_disable(self, name: str, options: list[str]) -> int:
        if self.unit(name) is None:
            return self.complain(f"Failed to disable unit: Unit file {name} does not exist.")
        self.switch(name, "enabled", False)
        return self.do_stop(name, options) if "--now" in options else 0

    def do_start(self, name: str, options: list[str]) -> int:
        unit = self.unit(name)
        if unit is None:
            return self.complain(f"Failed to start {name}: Unit {name} not found.", 5)
        if not unit or self.wanted_on(name):
            return 0
        self.switch(name, "on", True)
        self.note(name, ActiveState="activating", SubState="start", NRestarts=0, Result="success")
        quiet = subprocess.DEVNULL
        keep = [sys.executable, sys.argv[0], "--keep", name]
        subprocess.Popen(keep, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        if "--no-block" in options:
            return 0
        while self.state(name)["ActiveState"] == "activating":
            time.sleep(0.02)
        if self.state(name)["ActiveState"] == "failed" and self.value(unit, "Type") == "oneshot":
            return self.complain(
                f"Job for {name} failed because the control process exited with error code.\n"
                f'See "systemctl status {name}" and "journalctl -xeu {name}" for details.'
            )
        return 0

    def do_stop(self, name: str, options: list[str]) -> int:
        if self.unit(name) is None:
            return self.complain(f"Failed to stop {name}: Unit {name} not loaded.", 5)
        self.switch(name, "on", False)
        end = time.monotonic() + 20
        while self.state(name)["MainPID"] and time.monotonic() < end:
            time.sleep(0.02)
        self.note(name, ActiveState="inactive", SubState="dead", Result="success")
        return 0

    def do_restart(self, name: str, options: list[str]) -> int:
        if self.unit(name) is None:
            return self.complain(f"Failed to restart {name}: Unit {name} not found.", 5)
        self.do_stop(name, options)
        return self.do_start(name, options)

    def do_is_active(self, name: str, options: list[str]) -> int:
        state = self.state(name)["ActiveState"]
        if "--quiet" not in options and "-q" not in options:
            print(state)
        return 0 if state == "active" else 3 if self.unit(name) is not None else 4

    def do_is_failed(self, name: str, options: list[str]) -> int:
        state = self.state(name)["ActiveState"]
        print(state)
        return 0 if state == "failed" else 1

    def do_is_enabled(self, name: str, options: list[str]) -> int:
        if self.unit(name) is None:
            return self.complain(f"Failed to get unit file state for {name}: No such file")
        on = os.path.exists(self.path(name, "enabled")) or name in self.PRESENT
        print("enabled" if on else "disabled")
        return 0 if on else 1

    def do_reset_failed(self, name: str, options: list[str]) -> int:
        if self.state(name)["ActiveState"] == "failed":
            self.note(name, ActiveState="inactive", SubState="dead", Result="success")
        return 0

    def do_show(self, name: str, options: list[str]) -> int:
        unit = self.unit(name)
        told = self.state(name)
        told["Id"], told["LoadState"] = name, "not-found" if unit is None else "loaded"
        enabled = os.path.exists(self.path(name, "enabled"))
        told["UnitFileState"] = "" if unit is None else "enabled" if enabled else "disabled"
        asked = [one.partition("=")[2] for one in options if one.startswith(("-p=", "--property="))]
        wanted = [key for one in asked for key in one.split(",")] or list(told)
        for key in wanted:
            if key in told:
                print(told[key] if "--value" in options else f"{key}={told[key]}")
        return 0

    def do_status(self, name: str, options: list[str]) -> int:
        state = self.state(name)
        print(f"● {name}\n     Active: {state['ActiveState']} ({state['SubState']})")
        return 0 if state["ActiveState"] == "active" else 3 if self.unit(name) is not None else 4

    def journalctl(self, argv: list[str]) -> int:
        found = {"-u": "", "-n": "", "-o": "short", "--since": ""}
        known = {"--unit": "-u", "--lines": "-n", "--output": "-o", "--since": "--since"}
        words = list(argv)
        while words:
            key, has_value, value = words.pop(0).partition("=")
            key = known.get(key, key)
            if key in found:
                found[key] = value if has_value else words.pop(0)
            elif key not in ("--no-pager", "-q", "--quiet", "-b", "--boot", "--no-hostname", "-a"):
                return self.complain(f"journalctl: unrecognized option '{key}'")
        try:
            with open(os.path.join(self.place, "journal"), encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        except OSError:
            lines = []
        since = float(found["--since"].lstrip("@") or 0)
        name = self.whole_name(found["-u"]) if found["-u"] else ""
        lines = [one for one in lines if name in ("", one["unit"]) and one["time"] >= since]
        for one in lines[-int(found["-n"]) :] if found["-n"] not in ("", "all") else lines:
            moment = time.strftime("%b %d %H:%M:%S", time.gmtime(one["time"]))
            head = "" if found["-o"] == "cat" else f"{moment} machine {one['who']}: "
            print(head + one["text"])
        if not lines:
            print("-- No entries --")
        return 0
