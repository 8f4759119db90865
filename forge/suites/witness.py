"""Witnesses of what really is so on this computer: they ask the system, and nothing of the rig."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

LABEL_IN_ENVIRONMENT = "GEMMA4_RIG_LABEL"


def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rig_processes(state: Path, role: str = "") -> list[int]:
    """The pids whose environment names the state folder `state` and whose label has `role`.

    The witness of what really runs: it asks the process table, and nothing of the rig. `role` is
    server, job, or empty for either.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("XDG_STATE_HOME") != str(state):
                continue
            label = environment.get(LABEL_IN_ENVIRONMENT, "")
            if label and f"role={role}" in label and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError, ValueError):
            continue
    return found
