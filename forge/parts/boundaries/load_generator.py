"""Load on one server, cell by cell, in a process of its own: closed loop or open loop.

Reads a plan, appends JSON lines to a results file as it goes, and ends when its parent is gone.
Knows neither rigs nor reports' folders.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.load_cell import Calibration, CellLoad, LoadTell
from forge.parts.boundaries.load_client import LoadClient, LoadTarget
from forge.parts.boundaries.load_plan import LOAD_PLAN_FILE, LOAD_RESULTS_FILE, LoadPlan
from forge.parts.ground.errors import RigError


async def run_load(plan: LoadPlan, tell: LoadTell) -> None:
    """Measure every cell of `plan`; `tell` gets each event as it happens."""
    key = os.environ.get(plan.api_key_variable, "") if plan.api_key_variable else ""
    client = LoadClient(
        LoadTarget.from_url(plan.base_url),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        stall_s=plan.stall_s,
        total_s=plan.request_timeout_s,
    )
    calibration = Calibration(plan, client)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    tell({"event": "begin", "loop": loop, "python": platform.python_version()})
    try:
        for number, cell in enumerate(plan.cells):
            begun = time.perf_counter()
            tell({"event": "cell begins", "cell": number, "id": cell.cell_id})
            result = await CellLoad(plan, number, client, tell).run(calibration)
            seconds = round(time.perf_counter() - begun, 3)
            tell(
                {
                    "event": "cell",
                    "cell": number,
                    "seconds": seconds,
                    "result": result.model_dump(mode="json"),
                }
            )
        handshakes = [round(1000 * value, 3) for value in client.connect_s]
        rtt = statistics.median(handshakes) if handshakes else None
        tell({"event": "end", "ignore_eos": calibration.form.ignore_eos, "connect_ms": rtt})
    finally:
        client.close()


async def _until_orphaned(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` while the parent lives: load that nobody waits for must not go on."""
    parent = os.getppid()
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=1.0)
        if os.getppid() != parent:
            task.cancel()
            await asyncio.wait({task})
            raise RigError("CANCELLED", "the process that asked for the load is gone")
    await task


def run_load_folder(folder: Path) -> int:
    """Measure the plan in `folder`, append results beside it.

    Returns 0 when all cells were tried. Raises RigError INVALID for a plan that is none.
    """
    try:
        plan = LoadPlan.model_validate_json((folder / LOAD_PLAN_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise RigError("INVALID", f"{folder} holds no plan: {type(error).__name__}") from None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    # What is loaded already is not searched again and again while times are taken.
    gc.collect()
    gc.freeze()
    with (folder / LOAD_RESULTS_FILE).open("a", buffering=1, encoding="utf-8") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")

        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            runner.run(_until_orphaned(run_load(plan, tell)))
    return 0


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where uvloop is installed: it halves the client's cost; else the default."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
