"""The command line of a machine's program: the boot, the watch, and the acts that one asks for.

An act's data are one JSON object in URL-safe base64; what it says has at most as many bytes as its
`limit`. Knows a cloud and a model server by their protocols only.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import sys
from typing import Any

from forge.machine.console import (
    HOME,
    LOG,
    READY,
    ROOT,
    Failure,
    Progress,
    clean,
    latest_boot,
    shown,
    stored,
)
from forge.machine.machine import DOCUMENT, Document, Machine, checked
from forge.machine.watch import DEFAULTS, start_services, time_left, watch

MOST = 60_000  # bytes of an answer
# Where programs lie besides the PATH of agents and services, which may be none.
FOLDERS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin", "snap/bin")


def main(argv: list[str], machine: Machine) -> int:
    """The command line; returns the exit status."""
    os.environ.setdefault("HOME", "/root")  # a start-up agent sets none, and gcloud wants one
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    folders = [os.environ.get("PATH", ""), *(str(ROOT / f) for f in FOLDERS)]
    os.environ["PATH"] = os.pathsep.join(filter(None, folders))
    if not argv:
        return boot(machine)
    if argv == ["idle"]:
        return watch(machine)
    words = ["boot_log", "status", *machine.serving.acts, *machine.cloud.acts]
    try:
        word, data = argv
        asked = {"lines": 200, "limit": MOST, **json.loads(base64.urlsafe_b64decode(data + "==="))}
        given = {"lines": asked["lines"], "limit": asked["limit"]}
        for key, bounds in {"lines": range(1, 5001), "limit": range(500, MOST + 1)}.items():
            if word not in words or type(given[key]) is not int or given[key] not in bounds:
                raise ValueError(key)
    except (ValueError, TypeError):
        print(f"usage: boot.py [idle | ACT DATA], ACT: {' '.join(words)}", file=sys.stderr)
        return 2
    try:
        sys.stdout.buffer.write(f"{act(machine, word, given)}\n".encode())
    except (Failure, OSError) as error:
        print(f"boot.py: {clean(str(error))}", file=sys.stderr)
        return 1
    return 0


def boot(machine: Machine) -> int:
    """From an empty machine, or one that was started again, to a model that answers."""
    HOME.mkdir(parents=True, exist_ok=True)
    lock = (HOME / "lock").open("w")  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("a boot is under way already")
        return 0
    progress = Progress(machine.first)
    try:
        start_services(machine)
        document = checked(machine.cloud.document(), machine)
        DOCUMENT.write_text(json.dumps(document))
        machine.cloud.check(document, progress)
        machine.serving.get(document, progress)
        machine.serving.follow(document, progress)
    except Exception as error:  # whatever it is, the console has to tell it
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        progress.tell("failed", f"{kind}{error}")
        return 1
    machine.cloud.copy_cache(document, "save", progress)
    return 0


def act(machine: Machine, word: str, given: dict[str, int]) -> str:
    """Does what the word says and returns what there is to say about it."""
    document = stored(DOCUMENT, None)
    if word == "boot_log":
        text = LOG.read_text(errors="replace") if LOG.exists() else ""
        text = "\n".join(text.splitlines()[-given["lines"] :])
    elif word == "status":
        return status(machine, document, given["limit"])
    elif word in machine.cloud.acts:
        text = machine.cloud.act(word)
    elif document is None:
        raise Failure("no boot document has come to this machine yet: see its boot log")
    else:
        text = machine.serving.act(word, document, given)
    return shown(text).encode()[-given["limit"] + 1 :].decode("utf-8", "ignore")


def status(machine: Machine, document: Document | None, limit: int) -> str:
    """The server, the boot, the machine's room, and when it will end, as JSON; bytes and seconds.

    Marks of the boot are left out, the oldest first, until it is no longer than `limit` bytes.
    """
    told: dict[str, Any] = {machine.serving.kind: None, "problem": ""}
    try:
        if document:
            told[machine.serving.kind] = machine.serving.status(document)
    except Failure as failure:
        told["problem"] = clean(str(failure))
    disk, memory = shutil.disk_usage(ROOT), ROOT / "proc/meminfo"
    room = dict(re.findall(r"(\w+):\s+(\d+)", memory.read_text() if memory.exists() else ""))
    marks = latest_boot(machine.first)
    over = any(m["state"] == "failed" or (m["phase"], m["state"]) == READY for m in marks)
    told["booting"] = bool(marks) and not over
    told["boot"] = marks[-100:]
    told["disk"] = {"total": disk.total, "free": disk.free}
    told["memory"] = {k: int(room.get(f"Mem{k}", 0)) * 1024 for k in ("Total", "Available")}
    told.update(time_left(machine, {**DEFAULTS, **(document or {})}))
    while len(json.dumps(told)) >= limit and told["boot"]:
        del told["boot"][0]
    return json.dumps(told)
