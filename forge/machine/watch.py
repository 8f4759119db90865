"""Ends a machine that nobody uses or whose time is over; the services that keep it going.

Knows a cloud and a model server by their protocols only.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from forge.machine.console import (
    HOME,
    MINUTE_S,
    PROGRAM,
    READY,
    ROOT,
    Failure,
    ask,
    in_background,
    latest_boot,
    mark,
    run,
    stored,
)
from forge.machine.machine import DOCUMENT, Document, Machine

FIRST_BOOT, USE = HOME / "first_boot", HOME / "use.json"
UNITS = ROOT / "etc/systemd/system"
IDLE_UNIT, BOOT_UNIT = "gemma4-idle.service", "gemma4-boot.service"
UNIT_TEXT = """[Unit]
Description={what}
[Service]
ExecStart={python} {program}{act}
{more}[Install]
WantedBy=multi-user.target
"""
DEFAULTS = {"idle_minutes": 30, "life_s": 14_400}  # until a document has come
METRIC = re.compile(r"^([\w:]+)(?:\{.*\})? ([0-9.eE+-]+)$", re.M)


def start_services(machine: Machine) -> None:
    """Installs this program and its services: the watch, from now on, and the boot for later
    starts, where no agent of the cloud runs it."""
    if not FIRST_BOOT.exists():
        FIRST_BOOT.touch()  # its time is what counts
    here = Path(sys.argv[0])
    if here.resolve() != PROGRAM.resolve():
        PROGRAM.write_bytes(here.read_bytes())
    try:
        UNITS.mkdir(parents=True, exist_ok=True)
        again = "Restart=always\nRestartSec=60\n"
        write_unit(IDLE_UNIT, "Ends this machine when nobody uses it", " idle", again)
        run("systemctl", "daemon-reload")
        run("systemctl", "enable", "--now", IDLE_UNIT)
    except (Failure, OSError) as error:
        mark("idle", "note", f"the watch runs without its service: {error}")
        in_background("idle")
    if machine.cloud.boots_again:
        return
    try:
        write_unit(BOOT_UNIT, "Boots this machine's model server", "", "")
        run("systemctl", "enable", BOOT_UNIT)
    except (Failure, OSError) as error:
        mark("idle", "note", f"a later start of this machine will not boot: {error}")


def write_unit(name: str, what: str, act: str, more: str) -> None:
    words = {"what": what, "act": act, "more": more, "program": PROGRAM, "python": sys.executable}
    (UNITS / name).write_text(UNIT_TEXT.format(**words))


def watch(machine: Machine) -> int:
    """Ends the machine when nobody has used it for its idle minutes, or when its time is over."""
    while True:
        document = {**DEFAULTS, **stored(DOCUMENT, {})}
        with suppress(Exception):  # whatever is wrong with the page, the time goes on
            note_use(document)
        left = time_left(machine, document)
        if left["life_left_s"] <= 0:
            return end_machine(machine, document, f"its {document['life_s']} s are over")
        if left.get("idle_left_s", 1) <= 0:
            return end_machine(machine, document, f"no use for {document['idle_minutes']} minutes")
        time.sleep(MINUTE_S)


def time_left(machine: Machine, document: Document) -> dict[str, int]:
    """Seconds until the machine ends because its time is over, or for idleness, if it may.

    Idle is counted from the last use, from when it was ready or has failed, or, before either,
    from when it should have been ready.
    """
    now, marks = time.time(), latest_boot(machine.first)
    first = FIRST_BOOT.stat().st_mtime if FIRST_BOOT.exists() else now
    since = (marks[0]["at"] if marks else first) + machine.serving.ready_minutes * MINUTE_S
    for one in marks:
        if one["state"] == "failed" or (one["phase"], one["state"]) == READY:
            since = one["at"]
    since = max(since, stored(USE, {}).get("at", 0))
    left = {"life_left_s": math.ceil(first + document["life_s"] - now)}
    if document["idle_minutes"]:
        left["idle_left_s"] = math.ceil(since + document["idle_minutes"] * MINUTE_S - now)
    return left


def note_start() -> None:
    """That somebody starts the server counts as use."""
    USE.write_text(json.dumps({**stored(USE, {}), "at": time.time()}))


def note_use(document: Document) -> None:
    """Notes the time if requests are being served, or were since the last look."""
    use = {"at": 0, "seen": {}, **stored(USE, {})}
    totals: dict[str, float] = {}
    try:
        page = ask(document["metrics"])
    except (Failure, KeyError):
        return
    for name, value in METRIC.findall(page):
        if name in document["used"]:
            with suppress(ValueError):
                totals[name] = totals.get(name, 0) + float(value)
    busy = not totals  # the names have changed: nobody can tell, so this ends nothing
    for name, total in totals.items():
        counts = name.endswith(("_total", "_count", "_sum"))
        busy |= total != use["seen"].get(name, total) or bool(total and not counts)
    USE.write_text(json.dumps({"at": time.time() if busy else use["at"], "seen": totals}))


def end_machine(machine: Machine, document: Document, why: str) -> int:
    """Has the provider delete this machine where a shutdown does not, and shuts it down."""
    mark("idle", "begin", why)
    machine.cloud.leave(document)
    mark("idle", "done", "this machine shuts down")
    run("shutdown", "-h", "now")
    return 0
