"""The local rigs side by side: `make bench-local`. The same small model, the same prompts, one run.

Each rig is driven through its own MCP server as a client drives it: start, start again, benchmark
with one and four streams, stop. Beside them this computer's memory bandwidth is measured, because
decoding reads every weight once a token: the share of that bound says how good an engine is.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.demo import DONE, free_port, server_environment

if TYPE_CHECKING:
    from mcp import Client

ROOT = Path(__file__).resolve().parent.parent
RESULTS_FILE = "benchmarks/local-engines.json"
# Its engine computes Gemma 4 alone, so its embedded model is another one: see `make bench-engine`.
OTHER_MODEL = ("local-jax-cpu-2b",)
STREAMS = (1, 4)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
SEED = 20_261_130  # of the prompts: every engine gets the same ones
_BUFFER_BYTES = 256_000_000  # of each reader: far beyond any cache
_READS = 8
_SAMPLE_EVERY_S = 0.25
_START_PATIENCE_S = 3600.0


def _read_for_ever(barrier: Barrier, results: Any) -> None:
    """One reader: sums its buffer a few times, all readers at once; puts seconds a pass."""
    import numpy

    buffer = numpy.ones(_BUFFER_BYTES // 8, dtype=numpy.int64)
    for _ in range(_READS):
        barrier.wait()
        begun = time.perf_counter()
        int(buffer.sum())
        results.put((begun, time.perf_counter()))


def read_bandwidth(readers: int) -> float:
    """Bytes a second that `readers` processes read together: the median of some passes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(readers), context.Queue()
    processes = [
        context.Process(target=_read_for_ever, args=(barrier, results)) for _ in range(readers)
    ]
    for process in processes:
        process.start()
    spans = sorted(results.get(timeout=120) for _ in range(readers * _READS))
    for process in processes:
        process.join()
    rates = []
    for at in range(0, len(spans), readers):
        together = spans[at : at + readers]
        seconds = max(end for _, end in together) - min(begin for begin, _ in together)
        rates.append(readers * _BUFFER_BYTES / seconds)
    return float(statistics.median(rates))


class PeakMemory:
    """The highest resident size, in bytes, of a process and its children while it is watched.

    Pages that two of them share count twice, and pages of a mapped weights file count as resident.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        while not self._over.wait(_SAMPLE_EVERY_S):
            total = 0
            try:
                leader = psutil.Process(self._pid)
                for process in [leader, *leader.children(recursive=True)]:
                    total += process.memory_info().rss
            except psutil.Error:
                continue
            self.peak = max(self.peak, total)


class RigDriver:
    """One rig, driven through its own server."""

    def __init__(self, rig: Path, client: Client) -> None:
        self.rig = rig
        self._client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool. Raises RuntimeError with its words where it fails."""
        result = await self._client.call_tool(tool, arguments)
        words = "".join(item.text for item in result.content if item.type == "text")
        if result.is_error:
            raise RuntimeError(f"{self.rig.name}: {tool}: {words}")
        return dict(result.structured_content or {})

    async def job(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Start a job and follow it to its end. Raises RuntimeError where that is no good one."""
        job = await self.call(tool, **arguments)
        while job["state"] in ("queued", "running", "installing", "building"):
            job = await self.call("get_job", job_id=job["job_id"], wait_s=50)
        if job["state"] not in DONE:
            raise RuntimeError(f"{self.rig.name}: {tool}: {job['summary']}")
        return job

    async def cold_start(self) -> float:
        """Seconds from the call to the first generated token."""
        begun = time.monotonic()
        answer = await self.call("serve_model", wait_s=50)
        tools = [tool.name for tool in (await self._client.list_tools()).tools]
        wait = next(name for name in tools if name.startswith("wait_for_"))
        while answer["state"] == "starting":
            if time.monotonic() - begun > _START_PATIENCE_S:
                raise RuntimeError(f"{self.rig.name} does not come up")
            answer = await self.call(wait, wait_s=50)
        if answer["state"] != "ready":
            raise RuntimeError(f"{self.rig.name}: {answer['summary']}")
        job = await self.call("get_job", job_id=answer["job_id"])
        return float(job["seconds"])

    async def measure(self, seconds: float, repeats: int) -> dict[str, Any]:
        """Everything about this rig's engine, as a row of the results."""
        tools = [tool.name for tool in (await self._client.list_tools()).tools]
        for tool in sorted(name for name in tools if name.startswith(("build_", "install_"))):
            await self.job(tool)
        first = await self.cold_start()
        await self.call("stop_model")
        again = await self.cold_start()
        status = await self.call("get_system_status")
        with PeakMemory(int(status["pid"])) as memory:
            bench = next(n for n in tools if n.startswith("run_") and n.endswith("benchmark"))
            job = await self.job(
                bench,
                concurrency=list(STREAMS),
                context_tokens=[PROMPT_TOKENS],
                output_tokens=OUTPUT_TOKENS,
                seconds_per_cell=seconds,
                requests_per_cell=0,
                repeats=repeats,
                seed=SEED,
            )
        await self.call("stop_model")
        name = str(job["result"]["report"])
        path = self.rig / "benchmarks" / "reports" / f"{name}.json"
        return {
            "rig": self.rig.name,
            "report": name,
            "first_start_s": round(first, 1),
            "cold_start_s": round(again, 1),
            "peak_memory_bytes": memory.peak,
            **row_of_report(json.loads(path.read_text(encoding="utf-8"))),
        }


def row_of_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Engine, encoding and the figures of each cell (by streams) out of a report's JSON."""
    cells = {}
    for cell in report["cells"]:
        metrics = cell.get("metrics")
        if cell["status"] != "ok" or not metrics:
            cells[str(cell["concurrency"])] = {"failed": cell.get("reason") or cell["status"]}
            continue
        cells[str(cell["concurrency"])] = {
            "output_tps": metrics["output_tps"],
            "ttft_ms": metrics["ttft_ms"]["median"],
            "tpot_ms": metrics["tpot_ms"]["median"],
            "cv": cell.get("cv"),
        }
    return {
        "engine": report["engine"]["name"],
        "version": report["engine"]["version"],
        "encoding": report["subject"]["encoding"],
        "cells": cells,
    }


def weights_bytes(cache: Path, encoding: str) -> int:
    """Bytes of the embedded model's weights in `encoding`, each read once for a token.

    SmolLM2's output head is its embedding table, so that is read whole as well.
    """
    models = cache / "gemma4-rigs" / "models"
    pattern = "*.gguf" if encoding.lower().startswith("q") else "*/*.safetensors"
    return max((path.stat().st_size for path in models.glob(pattern)), default=0)


def share_of_bound(row: Mapping[str, Any], weights: int, bandwidth: float) -> float | None:
    """Single-stream decoding rate over bandwidth / weights; None where either is not known.

    The rate is 1 / tpot: the prompt is no part of it.
    """
    tpot = row["cells"].get("1", {}).get("tpot_ms")
    return round(1000 / tpot * weights / bandwidth, 3) if tpot and weights and bandwidth else None


async def measure_rig(rig: Path, state: Path, seconds: float, repeats: int) -> dict[str, Any]:
    """A row for `rig`. Raises RuntimeError; the model is stopped whatever happens."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    environment = server_environment(state / rig.name, free_port())
    argv = [str(rig / "launch.py")]
    server = StdioServerParameters(command=sys.executable, args=argv, env=environment)
    failure: RuntimeError | None = None
    row: dict[str, Any] = {}
    async with Client(stdio_client(server)) as client:
        driver = RigDriver(rig, client)
        try:
            row = await driver.measure(seconds, repeats)
        except RuntimeError as error:
            failure = error
            await client.call_tool("stop_model", {})
    if failure is not None:
        raise failure
    return row


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The results as a Markdown table, as the README has it."""
    lines = [
        "| rig | engine | weights | tok/s, 1 stream | tok/s, 4 streams | first token, 1 stream |"
        " start | peak memory | of the bandwidth bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        one, four = row["cells"].get("1", {}), row["cells"].get("4", {})
        share = row.get("share_of_bound")
        cells = [
            row["rig"],
            f"{row['engine']} {row['version']}",
            row["encoding"],
            _rate(one),
            _rate(four),
            f"{one['ttft_ms']:.0f} ms" if "ttft_ms" in one else "-",
            f"{row['cold_start_s']:.0f} s",
            f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
            "-" if share is None else f"{100 * share:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rate(cell: Mapping[str, Any]) -> str:
    if "output_tps" not in cell:
        return "failed"
    noise = "" if cell.get("cv") is None else f" ± {100 * cell['cv']:.0f} %"
    return f"{cell['output_tps']:.1f}{noise}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table and one line of JSON; 1 where a rig failed."""
    parser = argparse.ArgumentParser(prog="make bench-local", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each cell at most")
    parser.add_argument("--repeats", type=int, default=2, help="of the whole grid")
    parser.add_argument("rigs", nargs="*", help="only these; default: every local rig")
    arguments = parser.parse_args(argv)
    from forge.launch import user_cache

    found = sorted(path.parent.name for path in ROOT.glob("local-*/tpu.env"))
    names = arguments.rigs or [name for name in found if name not in OTHER_MODEL]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bandwidth = read_bandwidth(cores or 1)
    print(f"reads {bandwidth / 1e9:.1f} GB/s with {cores} processes", flush=True)
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="bench-local-", ignore_cleanup_errors=True) as state:
        for name in names:
            try:
                row = asyncio.run(
                    measure_rig(ROOT / name, Path(state), arguments.seconds, arguments.repeats)
                )
            except RuntimeError as error:
                failed.append(str(error))
                continue
            weights = weights_bytes(user_cache(), row["encoding"])
            row |= {
                "weights_bytes": weights,
                "share_of_bound": share_of_bound(row, weights, bandwidth),
            }
            rows.append(row)
            print(f"{name}: {json.dumps(row['cells'])}", flush=True)
    results = {
        "bench": "local",
        "date": time.strftime("%Y-%m-%d"),
        "workload": {"input": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "streams": list(STREAMS)},
        "bandwidth_bytes_per_s": round(bandwidth),
        "rows": rows,
        "failed": failed,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": cores,
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "mcp": importlib.metadata.version("mcp"),
        },
    }
    if not failed and not arguments.rigs:
        (ROOT / RESULTS_FILE).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {RESULTS_FILE}; `make rollup` brings it into README.md")
    print("\n".join(table_lines(results)))
    for line in failed:
        print(f"FAILED {line}")
    print(json.dumps(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
