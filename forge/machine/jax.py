"""The JAX engine under systemd: its release is laid down, made ready, started and kept going.

Implements the protocol of a model server. It listens on loopback alone, offline, on the TPU alone.
Knows no provider: that is handed in, with what brings the engine's packed file at the first boot.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forge.machine.console import (
    HOME,
    MINUTE_S,
    ROOT,
    Failure,
    Progress,
    in_background,
    mark,
    run,
    stored,
    transient,
    tried,
)
from forge.machine.jax_device import DEVICE, device_words, see_device
from forge.machine.jax_packages import forget_environments, get_checkpoint, get_environment
from forge.machine.jax_release import (
    ENGINE_FILE,
    RELEASES,
    current_release,
    kept_releases,
    lay_down,
    make_current,
    release_before,
    release_key,
    release_rules,
)
from forge.machine.machine import Cloud
from forge.machine.systemd import Unit
from forge.machine.watch import note_start

JAX_FIRST = "environment"  # the phase that a boot begins with
JAX_UNIT = "gemma4-jax.service"
# Status 2 is a refusal (a model, an argument, memory that is not there): it would come again.
JAX_UNIT_FORM = """[Unit]
Description=jax_server.py, release {key}
StartLimitIntervalSec=600
StartLimitBurst=5
[Service]
ExecStart={command}
Environment=HOME=/root JAX_PLATFORMS=tpu HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=5
"""
JAX_STEP = re.compile(r"^jax_server: +(\d{1,3})% (.+)$")
JAX_LOAD_MINUTES = 45  # from its start to its first answer; one that takes longer has failed


class JaxServing:
    """jax_server.py of one document's `release`, or of the one that was deployed since."""

    kind = "server"
    forms: Mapping[str, str] = {}
    acts: Sequence[str] = ("logs", "start", "stop", "restart", "deploy", "rollback", "verify")
    ready_minutes = 90

    def __init__(self, cloud: Cloud, engine: Callable[[], str], delivery: str = "") -> None:
        """`engine` brings the packed file of the document's release; `delivery` is what came with
        this very call, a JSON object with a `release` and its `engine`."""
        self.cloud, self.engine, self.delivery = cloud, engine, delivery
        self.unit = Unit(JAX_UNIT, ENGINE_FILE)

    def rules(self, document: dict[str, Any]) -> Mapping[str, object]:
        return release_rules(document["release"])

    def get(self, document: dict[str, Any], progress: Progress) -> None:
        """Has it running: the release with its packages and its checkpoint, under a unit of this
        very command. Where it runs already it holds the chip, and the chip is not looked at."""
        progress.begin(JAX_FIRST)
        if not kept_releases():
            make_current(lay_down(document["release"], tried(30, self.engine, transient)))
        key, release = current_release()
        python = get_environment(release, progress)
        progress.begin("weights", release["repository"])
        folder = get_checkpoint(python, release, progress)
        progress.begin("device")
        seen = stored(DEVICE, {}) if self.unit.runs() else see_device(python)
        progress.tell("done", device_words(seen) if seen else "the server holds it")
        self.cloud.copy_cache(document, "restore", progress)
        progress.begin("load", f"release {key}")
        self.start(document, key, python, folder)
        forget_environments([stored(RELEASES / k / "release.json", {}) for k in kept_releases()])

    def start(self, document: dict[str, Any], key: str, python: Path, folder: Path) -> None:
        """The service as the release has it, running. A changed one begins anew."""
        _, release = current_release()
        port = urlsplit(document["health"]).port
        own = ["--model", folder, "--host", "127.0.0.1", "--port", port]
        own += ["--compile-cache", ROOT / document["folder"][1:] / "jax"]
        words = [python, RELEASES / key / ENGINE_FILE, *own, *release["serve"]]
        command = " ".join(map(str, words))
        changed = self.unit.install(JAX_UNIT_FORM.format(key=key, command=command))
        self.unit.since = time.time()
        self.unit.change("restart" if changed else "start")

    def follow(self, document: dict[str, Any], progress: Progress) -> None:
        """Marks each step that its log tells, until it answers. A start anew is a failure."""
        began, first, seen = time.monotonic(), self.unit.told(), set[str]()
        while time.monotonic() - began < JAX_LOAD_MINUTES * MINUTE_S:
            answers = self.unit.answers(document, first)
            for step in filter(None, map(JAX_STEP.match, self.unit.lines(500, self.unit.since))):
                share, what = step.groups()
                if what.startswith("compiling") and progress.phase == "load":
                    progress.tell("done")
                    progress.begin("compile", what)
                elif what not in seen:
                    progress.tell("note", f"{what} ({share} %)")
                seen.add(what)
            if answers:
                return self.unit.ready(progress, began)
        raise Failure(f"{ENGINE_FILE} does not answer after {JAX_LOAD_MINUTES} minutes")

    def act(self, word: str, document: dict[str, Any], given: Mapping[str, int]) -> str:
        """The log's end, the chip, another release, or the service started, stopped, restarted."""
        if word == "logs":
            return "\n".join(self.unit.lines(given["lines"]))
        if word == "verify":
            return json.dumps(self.verified())
        if word == "deploy":
            return self.deployed()
        if word == "rollback":
            return self.changed(release_before())
        return self.unit.act(word)

    def verified(self) -> dict[str, Any]:
        """What JAX sees, measured now; while the engine holds the chip, what was seen last."""
        if self.unit.runs():
            return {**stored(DEVICE, {}), "serving": True}
        _, release = current_release()
        if not release:
            raise Failure("no release of the engine is on this machine yet")
        refuse_while_booting()
        return {**see_device(get_environment(release, Silence(JAX_FIRST))), "serving": False}

    def deployed(self) -> str:
        """The release that came with this call, laid down; a boot then makes it serve."""
        try:
            told = json.loads(self.delivery)
            release, packed = dict(told["release"]), str(told["engine"])
            wrong = [key for key, holds in release_rules(release).items() if not holds]
        except (ValueError, TypeError, LookupError) as error:
            raise Failure(f"the delivery cannot be read: {type(error).__name__}") from None
        if wrong:
            raise Failure(f"the delivery is not valid: {wrong[0]}")
        if release_key(release) == (kept_releases() or [""])[0] and self.unit.runs():
            return f"release {release_key(release)} serves already"
        refuse_while_booting()
        return self.changed(lay_down(release, packed))

    def changed(self, key: str) -> str:
        """Another release from now on: the running one is stopped, and a boot starts the new."""
        refuse_while_booting()
        if self.unit.runs():
            run("systemctl", "stop", JAX_UNIT)
        make_current(key)
        mark(JAX_FIRST, "begin", f"release {key}")  # what an earlier boot has said is over
        note_start()
        in_background()
        return f"release {key} is laid down and is being started"

    def status(self, document: dict[str, Any]) -> dict[str, Any] | None:
        return self.unit.status(f"release {(kept_releases() or [''])[0]}")


class Silence(Progress):
    """Marks nothing: what is done is no boot."""

    def begin(self, phase: str, words: str = "") -> None:
        self.phase = phase

    def tell(self, state: str, words: str = "") -> None:
        pass


def refuse_while_booting() -> None:
    """Raises Failure while a boot is under way: it would go on with the release that it began."""
    with (HOME / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure("a boot is under way on this machine: wait for its end") from None
