"""One service of systemd's on a machine: its unit file, its state, its part of the journal.

Knows no cloud and not what the service serves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forge.machine.console import (
    MINUTE_S,
    Failure,
    Progress,
    clean,
    healthy,
    in_background,
    run,
)
from forge.machine.watch import UNITS, note_start

UNIT_KEYS = "ActiveState SubState Result NRestarts ExecMainStatus ExecMainStartTimestamp".split()
UNIT_COMPLAINT = re.compile(r" E |rror|abort|failed")  # a line that is shown before others


class Unit:
    """The service of that name, which people call `program`. Every verb may raise Failure."""

    def __init__(self, name: str, program: str) -> None:
        self.name, self.program = name, program
        self.path = UNITS / name
        self.since = 0.0  # when this program started it; what was said before is not of that start

    def install(self, text: str) -> bool:
        """The unit file as `text`; whether that is another one than before."""
        if self.path.exists() and self.path.read_text() == text:
            return False
        self.path.write_text(text)
        run("systemctl", "daemon-reload")
        return True

    def change(self, word: str) -> None:
        """start, stop or restart."""
        with suppress(Failure):  # after too many failures systemd would refuse it
            run("systemctl", "reset-failed", self.name)
        run("systemctl", word, self.name)

    def told(self) -> dict[str, str]:
        """What systemd says of it, by its own names."""
        text = run("systemctl", "show", self.name, f"--property={','.join(UNIT_KEYS)}")
        told = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return {key: told.get(key, "") for key in UNIT_KEYS}

    def runs(self) -> bool:
        return self.path.exists() and self.told()["ActiveState"] in ("active", "activating")

    def lines(self, count: int, since: float = 0) -> list[str]:
        """The last lines that it wrote, both streams; since that moment, in Unix seconds."""
        argv = ["--unit", self.name, "--lines", str(count), "--output", "cat", "--no-pager"]
        argv += ["--since", f"@{since:.3f}"] if since else []
        lines = run("journalctl", *argv).splitlines()
        return [line for line in lines if line != "-- No entries --"]

    def refuse_ended(self, first: Mapping[str, str]) -> None:
        """Raises Failure, with what it said, where it does not run any more or runs anew since it
        was as in `first`. What does not load once never will."""
        now = self.told()
        # systemd waits before it starts it again, and knows until then why it ended.
        again = now["SubState"] == "auto-restart" or now["NRestarts"] != first["NRestarts"]
        if again or now["ActiveState"] in ("failed", "inactive"):
            why = "systemd starts it again" if again else f"status {now['ExecMainStatus']}"
            why += ", OOMKilled" if now["Result"] == "oom-kill" else ""
            lines = [line for line in self.lines(2000, self.since) if line.strip()]
            bad = [line for line in lines if UNIT_COMPLAINT.search(line)]
            words = " | ".join(clean(line, 140) for line in bad[:3] or lines[-3:])
            raise Failure(f"{self.program} ended ({why}): {words or 'it wrote nothing'}")

    def ready(self, progress: Progress, began: float, loaded: str = "") -> None:
        """Marks that it is loaded, and that it answers since `began` (monotonic seconds)."""
        progress.tell("done", loaded)
        progress.phase = "ready"
        progress.tell("done", f"it answers after {int(time.monotonic() - began)} s")

    def answers(self, document: dict[str, Any], first: Mapping[str, str]) -> bool:
        """Whether it is healthy by now, after a look at whether it still runs. Waits a moment
        where it is not."""
        if healthy(document):
            return True
        self.refuse_ended(first)
        time.sleep(MINUTE_S / 30)
        return False

    def act(self, word: str) -> str:
        """It is started, stopped, restarted or removed; what is so already is left so."""
        there = self.path.exists()
        running = self.runs()
        if word == "rm":
            if there:
                run("systemctl", "disable", "--now", self.name)
                self.path.unlink()
                run("systemctl", "daemon-reload")
            return f"{self.program} was removed" if there else f"{self.program} is not there"
        if word == "stop":
            if running:
                run("systemctl", "stop", self.name)
            return f"{self.program} was stopped" if running else f"{self.program} does not run"
        if word == "start" and running:
            return f"{self.program} runs already"
        if there:
            self.change(word)
        note_start()
        in_background()  # a boot, which makes the service or only follows it
        done = f"{self.program} was {word}ed"
        return done if there else f"{self.program} is being made: see the boot log"

    def status(self, image: str) -> dict[str, Any] | None:
        """Serving.status; `image` is what it was made of. None where there is no unit."""
        if not self.path.exists():
            return None
        now = self.told()
        running = now["ActiveState"] == "active"
        waits = now["SubState"] == "auto-restart"
        return {
            "state": "running" if running else "restarting" if waits else "exited",
            "exit_code": int(now["ExecMainStatus"] or 0),
            "out_of_memory": now["Result"] == "oom-kill",
            "restarts": int(now["NRestarts"] or 0),
            "started_at": now["ExecMainStartTimestamp"],
            "image": image,
        }
