"""`make bench-client`: what the load generator costs and how true its times are, beside others.

One run, interleaved, every client in a process of its own against a scripted server in another.
Prints a table for people and ends with one line of JSON. Clients that are not installed are named.

    python3 -m forge.bench_client [--rounds 2] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.parts.boundaries.load_client import LoadClient, LoadTarget
from forge.parts.boundaries.load_events import is_plain_text_event
from forge.parts.boundaries.load_generator import fast_loop_factory, run_load
from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan

ROOT = Path(__file__).resolve().parents[1]
TPOT_MS = 50.0  # 20 tokens a second and stream
STREAMS = (64, 256)
AIM_US = 30.0  # CPU per token, with uvloop

# Name in the table: (library, loop, how). how: events are parsed as JSON, as the usual tools do, or
# scanned as we do; "ahead" is scanned on connections made before, as a benchmark really runs.
CLIENTS: dict[str, tuple[str, str, str]] = {
    "ours": ("ours", "asyncio", "scan"),
    "ours, uvloop": ("ours", "uvloop", "scan"),
    "ours, uvloop, ahead": ("ours", "uvloop", "ahead"),
    "ours, uvloop, json": ("ours", "uvloop", "json"),
    "aiohttp": ("aiohttp", "asyncio", "json"),
    "aiohttp, uvloop": ("aiohttp", "uvloop", "json"),
    "aiohttp, uvloop, scan": ("aiohttp", "uvloop", "scan"),
    "httpx2": ("httpx2", "asyncio", "json"),
    "httpx": ("httpx", "asyncio", "json"),
}

# The schedules that the generator must give back within 3 %.
SCHEDULE = {"ttft_ms": 200.0, "tpot_ms": 20.0}
PROOF_TOKENS = 32
PROOF_REPEATS = 5
E2E_S = (SCHEDULE["ttft_ms"] + (PROOF_TOKENS - 1) * SCHEDULE["tpot_ms"]) / 1000
PROOF_CELLS = {
    "closed, 1 stream": LoadCellPlan(
        concurrency=1, input_tokens=100, output_tokens=PROOF_TOKENS, requests=4, seconds=20
    ),
    "closed, 8 streams": LoadCellPlan(
        concurrency=8, input_tokens=100, output_tokens=PROOF_TOKENS, requests=32, seconds=20
    ),
    "open, 10 requests/s": LoadCellPlan(
        rate_rps=10, input_tokens=100, output_tokens=PROOF_TOKENS, requests=30, seconds=20
    ),
}

Stream = Callable[[], Awaitable[list[float]]]


# The clients: each streams one answer and returns the arrival times of its content.


def event_has_text(payload: bytes, how: str) -> bool:
    """Whether an event carries text: by our scan, or by parsing it."""
    if how == "scan" and is_plain_text_event(payload):
        return True
    if payload.strip() == b"[DONE]":
        return False
    event = json.loads(payload)
    return bool(event["choices"] and event["choices"][0]["delta"].get("content"))


def _texts_of(buffer: bytearray, chunk: bytes, how: str, arrivals: list[float]) -> None:
    """Take every whole event out of `buffer` + `chunk`; stamp before parsing."""
    now = time.perf_counter()
    buffer += chunk
    while (end := buffer.find(b"\n\n")) >= 0:
        payload = bytes(buffer[5:end])
        del buffer[: end + 2]
        if event_has_text(payload, how):
            arrivals.append(now)


async def with_ours(
    url: str, body: bytes, how: str, streams: int, work: Callable[[Stream], Any]
) -> Any:
    client = LoadClient(LoadTarget.from_url(url), read_json=how == "json")
    if how == "ahead":
        await client.connect(streams)

    async def stream() -> list[float]:
        record = await client.ask(body)
        assert record.completed, record.fault
        return record.arrivals

    try:
        return await work(stream)
    finally:
        client.close()


async def with_aiohttp(url: str, body: bytes, how: str, work: Callable[[Stream], Any]) -> Any:
    aiohttp = importlib.import_module("aiohttp")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def stream() -> list[float]:
            arrivals: list[float] = []
            buffer = bytearray()
            async with session.post(f"{url}/v1/chat/completions", data=body) as response:
                async for chunk in response.content.iter_any():
                    _texts_of(buffer, chunk, how, arrivals)
            return arrivals

        return await work(stream)


async def with_httpx(
    library: str, url: str, body: bytes, how: str, work: Callable[[Stream], Any]
) -> Any:
    httpx = importlib.import_module(library)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def stream() -> list[float]:
            arrivals: list[float] = []
            buffer = bytearray()
            path = f"{url}/v1/chat/completions"
            async with client.stream("POST", path, content=body) as response:
                async for chunk in response.aiter_bytes():
                    _texts_of(buffer, chunk, how, arrivals)
            return arrivals

        return await work(stream)


async def _streams_at_once(stream: Stream, count: int) -> dict[str, float]:
    """`count` fresh streams together: CPU, wall time, and the times as this client saw them."""

    async def timed() -> tuple[float, list[float]]:
        begun = time.perf_counter()
        return begun, await stream()

    cpu, begun = time.process_time(), time.perf_counter()
    done = await asyncio.gather(*(timed() for _ in range(count)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begun
    tokens = sum(len(arrivals) for _, arrivals in done)
    gaps = [b - a for _, times in done for a, b in zip(times, times[1:], strict=False)]
    return {
        "tokens": tokens,
        "wall_s": wall,
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "ttft_ms": 1000 * statistics.median(times[0] - start for start, times in done),
        "icl_ms": 1000 * statistics.median(gaps) if gaps else 0.0,
    }


def be_client(name: str, url: str, streams: int, tokens: int) -> dict[str, float]:
    """One client's measurement, in this process."""
    library, loop, how = CLIENTS[name]
    body = json.dumps(
        {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": tokens, "stream": True}
    ).encode()

    async def work(stream: Stream) -> dict[str, float]:
        return await _streams_at_once(stream, streams)

    async def run() -> dict[str, float]:
        if library == "ours":
            return dict(await with_ours(url, body, how, streams, work))
        if library == "aiohttp":
            return dict(await with_aiohttp(url, body, how, work))
        return dict(await with_httpx(library, url, body, how, work))

    with asyncio.Runner(loop_factory=fast_loop_factory() if loop == "uvloop" else None) as runner:
        return runner.run(run())


def be_generator(url: str, cell: str) -> dict[str, float]:
    """One cell of the whole generator, as a benchmark runs it; its own figures."""
    events: list[dict[str, Any]] = []
    plan = LoadPlan(base_url=url, model="scripted", cells=[PROOF_CELLS[cell]])
    with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
        runner.run(run_load(plan, events.append))
    result = next(event["result"] for event in events if event["event"] == "cell")
    assert result["metrics"], result["reason"]
    metrics = result["metrics"]
    dues = [event["due"] for event in events if event.get("due")]
    offered = len(dues) * PROOF_TOKENS / (max(dues) - min(dues) + E2E_S) if dues else 0.0
    return {
        "ttft_ms": metrics["ttft_ms"]["median"],
        "tpot_ms": metrics["tpot_ms"]["median"],
        "output_tps": metrics["output_tps"],
        "offered_tps": offered,
    }


# The bench itself.


@contextmanager
def scripted_server() -> Iterator[tuple[str, int]]:
    """The scripted server in a process of its own: its address and its pid."""
    argv = [sys.executable, "-m", "tests.scripted_sse", "{}"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}", process.pid
    finally:
        process.kill()
        process.wait()


def _obey(url: str, **script: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/script", json.dumps(script).encode(), timeout=10):
        pass


def _in_own_process(*arguments: str | int) -> dict[str, float]:
    argv = [sys.executable, "-m", "forge.bench_client", *map(str, arguments)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def installed(name: str) -> bool:
    library, loop, _ = CLIENTS[name]
    needed = [word for word in (library, loop) if word not in ("ours", "asyncio")]
    return all(importlib.util.find_spec(word) for word in needed)


def measure_cost(
    server: tuple[str, int], names: list[str], rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """CPU per token and delivered share, `client @streams` -> figures; the best of the rounds.

    The least CPU is taken, because whatever else the machine does can only add to it.
    """
    url, pid = server
    tokens = round(seconds * 1000 / TPOT_MS)
    found: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for streams in STREAMS:
            for name in names:
                _obey(url, ttft_ms=100, tpot_ms=TPOT_MS, spread_ms=TPOT_MS)
                server_cpu = _cpu_seconds(pid)
                row = _in_own_process("client", name, url, streams, tokens)
                schedule_s = (100 + TPOT_MS * 60 / 61 + (tokens - 1) * TPOT_MS) / 1000
                row["delivered"] = min(1.0, schedule_s / row["wall_s"])
                row["server_cpu"] = (_cpu_seconds(pid) - server_cpu) / row["wall_s"]
                key = f"{name} @{streams}"
                best = found.get(key)
                if best is None or row["cpu_us_per_token"] < best["cpu_us_per_token"]:
                    found[key] = row
    return found


def measure_ttft(url: str, names: list[str], rounds: int) -> dict[str, float]:
    """Median TTFT in ms that a client adds to a server without delay, `client @streams` -> ms."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for streams in STREAMS:
            for name in names:
                _obey(url, ttft_ms=0, tpot_ms=0)
                row = _in_own_process("client", name, url, streams, 1)
                found.setdefault(f"{name} @{streams}", []).append(row["ttft_ms"])
    return {key: min(values) for key, values in found.items()}


def measure_truth(url: str) -> dict[str, dict[str, float]]:
    """What the generator reports over what the schedule was, minus 1; medians of five repeats."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PROOF_CELLS}
    for _ in range(PROOF_REPEATS):
        for name, cell in PROOF_CELLS.items():
            _obey(url, **SCHEDULE)
            row = _in_own_process("generator", url, name)
            if cell.concurrency is not None:
                row["offered_tps"] = cell.concurrency * PROOF_TOKENS / E2E_S
            found[name].append(
                {
                    "ttft": row["ttft_ms"] / SCHEDULE["ttft_ms"] - 1,
                    "tpot": row["tpot_ms"] / SCHEDULE["tpot_ms"] - 1,
                    "throughput": row["output_tps"] / row["offered_tps"] - 1,
                }
            )
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, Any]:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}


def bench(rounds: int, seconds: float) -> int:
    """The whole bench; prints as it goes."""
    machine = _machine()
    names = [name for name in CLIENTS if installed(name)]
    absent = [name for name in CLIENTS if name not in names]
    versions = {name: _version(name) for name in ("aiohttp", "httpx", "httpx2", "uvloop")}
    with scripted_server() as server:
        cost = measure_cost(server, names, rounds, seconds)
        added = measure_ttft(server[0], names, rounds)
        truth = measure_truth(server[0])
    print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f}; {versions}"
    )
    for name in absent:
        print(f"not installed, so not measured: {name}")
    print(f"\n{seconds:g} s at {1000 / TPOT_MS:g} tokens/s and stream, least of {rounds} rounds")
    head = f"{'client':24}" + "".join(f"{f'us/token @{n}':>15}" for n in STREAMS)
    head += "".join(f"{f'delivered @{n}':>16}" for n in STREAMS)
    print(head + "".join(f"{f'ttft+ ms @{n}':>15}" for n in STREAMS))
    for name in names:
        rows = [cost[f"{name} @{n}"] for n in STREAMS]
        line = f"{name:24}" + "".join(f"{row['cpu_us_per_token']:15.1f}" for row in rows)
        line += "".join(f"{row['delivered']:16.1%}" for row in rows)
        print(line + "".join(f"{added[f'{name} @{n}']:15.1f}" for n in STREAMS))
    print(f"\nreported over schedule, medians of {PROOF_REPEATS} interleaved repeats (aim: 3 %)")
    for name, row in truth.items():
        print(f"{name:24}" + "".join(f"{key:>12} {value:+7.2%}" for key, value in row.items()))
    worst = max(abs(value) for row in truth.values() for value in row.values())
    print(f"worst {worst:.2%}: {'within' if worst <= 0.03 else 'NOT within'} 3 %")
    figures = {
        "bench": "client",
        "machine": machine,
        "python": platform.python_version(),
        "versions": versions,
        "tokens_per_s_and_stream": 1000 / TPOT_MS,
        "cost": {key: {k: round(v, 3) for k, v in row.items()} for key, row in cost.items()},
        "added_ttft_ms": {key: round(value, 2) for key, value in added.items()},
        "error_of_reported": {k: {n: round(v, 5) for n, v in r.items()} for k, r in truth.items()},
        "aim_us_per_token": AIM_US,
    }
    print(json.dumps(figures))
    return 0


def main(argv: list[str]) -> int:
    """The bench, or one of its worker processes (`client …`, `generator …`)."""
    if argv[:1] == ["client"]:
        print(json.dumps(be_client(argv[1], argv[2], int(argv[3]), int(argv[4]))))
        return 0
    if argv[:1] == ["generator"]:
        print(json.dumps(be_generator(argv[1], argv[2])))
        return 0
    parser = argparse.ArgumentParser(prog="bench_client", description="See make bench-client.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    chosen = parser.parse_args(argv)
    return bench(chosen.rounds, chosen.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
