"""What starting a rig's MCP server costs, beside a bare server of the same SDK with one tool.

`make bench-startup`: pairs, one after the other in turn, because a busy machine must slow both.
Measures what a client waits for, the first answer; knows nothing about what the tools do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AIM = 1.15  # at most so many times the bare server, in time and in memory
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",  # what most clients still speak
        "capabilities": {},
        "clientInfo": {"name": "bench-startup", "version": "1"},
    },
}
BARE_SERVER = '''\
from mcp.server import MCPServer

mcp = MCPServer("bare")


@mcp.tool()
def hello() -> str:
    """Say hello."""
    return "hello"


if __name__ == "__main__":
    mcp.run()
'''


def start_once(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from spawn to the answer to `initialize`, and resident memory then, in MiB.

    Raises RuntimeError when the server answers anything else.
    """
    import psutil

    begun = time.perf_counter()
    server = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        seconds = time.perf_counter() - begun
        if b'"serverInfo"' not in answer:
            raise RuntimeError(f"{argv} answered {answer[:200]!r} to initialize")
        return seconds, psutil.Process(server.pid).memory_info().rss / 2**20
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def clean_environment(state: str) -> dict[str, str]:
    """This environment, with state in a folder of the run's own and Python's bytecode kept."""
    changes = {"XDG_STATE_HOME": state}
    # Without bytecode every start compiles everything anew, which no user's machine does.
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | changes


def measure(rig: Path, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """`pairs` starts of each server, in turn, after one that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE_SERVER, encoding="utf-8")
        commands = {
            "bare": [sys.executable, str(bare)],
            "rig": [sys.executable, str(rig / "launch.py")],
        }
        environment = clean_environment(folder)
        for argv in commands.values():
            start_once(argv, environment)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(pairs):
            # Who goes first alternates: the second of a pair finds warmer caches.
            for name in sorted(commands, reverse=bool(number % 2)):
                found[name].append(start_once(commands[name], environment))
        return found


def summarise(found: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Minimum and median of both servers, and the ratios of rig to bare."""
    figures: dict[str, Any] = {}
    for name, starts in found.items():
        for unit, values in zip(("s", "mib"), zip(*starts, strict=True), strict=True):
            figures[f"{name}_min_{unit}"] = round(min(values), 3)
            figures[f"{name}_median_{unit}"] = round(statistics.median(values), 3)
    for unit in ("s", "mib"):
        for kind in ("min", "median"):
            ratio = figures[f"rig_{kind}_{unit}"] / figures[f"bare_{kind}_{unit}"]
            figures[f"ratio_{kind}_{unit}"] = round(ratio, 3)
    return figures


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, load, Python and SDK."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("mcp", "pydantic")},
    }


def main() -> int:
    """Measure, print the table for people, end with one line of JSON. Status 0: nothing failed."""
    parser = argparse.ArgumentParser(prog="make bench-startup", description=__doc__)
    parser.add_argument("--rig", default="local-pytorch-cpu-2b", help="folder of the rig")
    parser.add_argument("--pairs", type=int, default=12, help="starts of each server")
    arguments = parser.parse_args()
    rig = (ROOT / arguments.rig).resolve()
    figures = summarise(measure(rig, arguments.pairs))
    print(f"{arguments.pairs} starts of each, in turn; to the answer to initialize")
    print(f"{'':22}{'seconds':>18}{'MiB resident':>20}")
    print(f"{'':22}{'min':>9}{'median':>9}{'min':>10}{'median':>10}")
    columns = [f"{kind}_{unit}" for unit in ("s", "mib") for kind in ("min", "median")]
    for name, label in (("bare", "bare MCPServer"), ("rig", rig.name)):
        row = [figures[f"{name}_{column}"] for column in columns]
        print(f"{label:22}{row[0]:9.3f}{row[1]:9.3f}{row[2]:10.1f}{row[3]:10.1f}")
    row = [figures[f"ratio_{column}"] for column in columns]
    print(f"{f'ratio (aim: {AIM})':22}{row[0]:9.3f}{row[1]:9.3f}{row[2]:10.3f}{row[3]:10.3f}")
    print(json.dumps({"bench": "startup", "rig": rig.name, **figures, "machine": machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
