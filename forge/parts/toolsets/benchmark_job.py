"""The benchmark job: a plan on disk, the load generator in its own process, a report at the end.

Every file of a run lies in one folder of the rig's state, so that whatever is killed, what was
measured until then can still be made a report of.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.load_plan import (
    LOAD_PLAN_FILE,
    LOAD_RESULTS_FILE,
    LoadCellPlan,
    LoadPlan,
    least_requests,
)
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobRecord
from forge.parts.ground.journal import utc_now
from forge.parts.ground.process import run_program
from forge.parts.ground.state import private_folder, read_json, write_json, write_private
from forge.parts.knowledge.report_schema import GoodputLimits
from forge.parts.toolsets.benchmark_frame import benchmark_frame
from forge.parts.toolsets.benchmark_report import LoadProgress, cell_lines, report_of_load
from forge.parts.toolsets.following import require_ready
from forge.parts.toolsets.reports import save_report
from forge.parts.toolsets.toolset import RigContext

BENCHMARK_JOB = "benchmark"
PROBE_JOB = "probe"
OPINION_JOB = "opinion"
_FRAME_FILE = "frame.json"
_ENDED_FILE = "ended.json"  # how a run ended whose report could not be saved
_SAVED_FILE = "saved.json"  # there once a run needs no more looking after
_KEY_VARIABLE = "RIG_MODEL_KEY"  # a key travels in the environment: it stands in no file
_FOLLOW_EVERY_S = 0.5
_RUNS_KEPT = 20
_KILLED: dict[str, Any] = {"missing": "the benchmark was killed", "seconds": 0.0}


def planned_load(arguments: dict[str, Any]) -> list[LoadCellPlan]:
    """The cells of a benchmark in the order of their measurement, the whole grid `repeats` times.

    Repeats are interleaved, so that a machine that slows down is seen as noise in every cell.
    """
    wanted, seconds = int(arguments["requests_per_cell"]), float(arguments["seconds_per_cell"])
    cells = []
    for context in arguments["context_tokens"]:
        shape = {"input_tokens": context, "output_tokens": arguments["output_tokens"]}
        for streams in arguments["concurrency"]:
            requests = wanted or least_requests(streams)
            cells.append(
                LoadCellPlan(concurrency=streams, requests=requests, seconds=seconds, **shape)
            )
        for rate in arguments["request_rates"]:
            # p99 needs a hundred, and a rate shows only over some seconds.
            requests = wanted or max(100, round(10 * rate))
            cells.append(LoadCellPlan(rate_rps=rate, requests=requests, seconds=seconds, **shape))
    return cells * int(arguments["repeats"])


class BenchmarkJob:
    """The benchmark job of one rig."""

    def __init__(self, context: RigContext) -> None:
        self._context = context

    @property
    def _folder(self) -> Path:
        return self._context.paths.state / "loads"

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Put the load on the served model and report it; what was measured survives any end."""
        context, arguments = self._context, progress.record.arguments
        instance = await require_ready(context)
        address = await context.plane.endpoint(instance)
        folder = private_folder(self._folder / progress.record.id)
        plan = LoadPlan(
            base_url=address,
            model=instance.served_name,
            cells=planned_load(arguments),
            seed=int(arguments["seed"]),
            limits=GoodputLimits(
                ttft_ms=arguments["ttft_limit_ms"], tpot_ms=arguments["tpot_limit_ms"]
            ),
            stall_s=float(arguments["stall_s"]),
            api_key_variable=_KEY_VARIABLE if context.runtime.api_key() else "",
        )
        write_private(folder / LOAD_PLAN_FILE, plan.model_dump_json(indent=1))
        frame = await benchmark_frame(context, instance, plan)
        write_json(folder / _FRAME_FILE, {**frame, "save_result": arguments["save_result"]})
        context.journal.append("benchmark began", job=progress.record.id, cells=len(plan.cells))
        begun, found = time.monotonic(), LoadProgress(folder)
        fault = ""
        try:
            fault = await self._watched_load(folder, plan, found, progress)
        except asyncio.CancelledError:
            # What is finished was paid for: it is kept, and the job still ends as cancelled.
            if found.read().cells:
                seconds, missing = time.monotonic() - begun, "the benchmark was cancelled"
                with suppress(RigError):  # the result says why there is no report
                    result = await self._finish(folder, missing, seconds, progress)
                    progress.update(result=result)
            raise
        seconds, missing = time.monotonic() - begun, fault or "the run ended early"
        try:
            result = await self._finish(folder, missing, seconds, progress)
        except RigError as error:
            again = f"run_{context.vocabulary.get('bench', '')}benchmark(), which saves it first"
            what = f"{fault}; {error.what}" if fault else error.what
            raise RigError(error.error_class, what, error.next_step or again) from error
        if fault:
            progress.update(result=result)
            kept = result["report"] or "nothing"
            raise RigError("PARTIAL", f"{fault}; kept: {kept}", "list_reports()")
        return result

    async def _watched_load(
        self, folder: Path, plan: LoadPlan, found: LoadProgress, progress: JobProgress
    ) -> str:
        """Run the generator to its end while its results are followed; returns what went wrong."""
        argv = [sys.executable, str(self._context.beside("loadgen.py")), str(folder)]
        cells = sum(cell.seconds + 4 * plan.request_timeout_s for cell in plan.cells)
        environment = {**os.environ, _KEY_VARIABLE: self._context.runtime.api_key()}
        running = run_program(argv, timeout_s=cells + 600, environment=environment)
        loader = asyncio.create_task(running)
        try:
            while not loader.done():
                await asyncio.wait({loader}, timeout=_FOLLOW_EVERY_S)
                progress.update(phase="load", **found.read().forecast(plan))
            done = await loader
        finally:
            if not loader.done():  # cancelled: the generator's group goes before anything else
                loader.cancel()
                await asyncio.wait({loader})
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return f"the load generator ended with status {done.returncode}: {last[:300]}"
        return ""

    async def _finish(
        self, folder: Path, missing: str, seconds: float, progress: JobProgress | None = None
    ) -> dict[str, Any]:
        """Make and save the report of what `folder` holds, and mark the run as looked after.

        Where it cannot be saved, the run stays as it is for the next salvage, and the job, if there
        still is one, gets the figures and the reason. Raises that RigError.
        """
        plan = LoadPlan.model_validate_json((folder / LOAD_PLAN_FILE).read_bytes())
        frame = read_json(folder / _FRAME_FILE) or {}
        save = bool(frame.pop("save_result", True))
        found = LoadProgress(folder).read()
        report = report_of_load(frame, plan, found, missing, seconds)
        name = ""
        if save and found.cells:
            try:
                saved = await save_report(self._context, report, folder / LOAD_RESULTS_FILE)
            except RigError as error:
                if progress is not None:
                    write_json(folder / _ENDED_FILE, {"missing": missing, "seconds": seconds})
                    result = {"report": "", "cells": cell_lines(report), "saved": False}
                    progress.update(result={**result, "unsaved": str(error)})
                raise
            name, report = saved.name, saved.report
        write_json(folder / _SAVED_FILE, {"report": name, "at": utc_now()})
        self._forget_old()
        return {"report": name, "cells": cell_lines(report), "saved": bool(name)}

    async def salvage(self) -> list[str]:
        """Save what was measured by runs that were killed, or could not save it themselves; returns
        one sentence for each. Where nothing can judge one, the others wait as well."""
        notes = []
        for folder in sorted(self._folder.glob(f"{BENCHMARK_JOB}-*")):
            if (folder / _SAVED_FILE).exists() or not self._is_over(folder.name):
                continue
            end = "unsaved" if (folder / _ENDED_FILE).exists() else "killed"
            run = f"the {end} run {folder.name}"
            try:
                if LoadProgress(folder).read().cells:
                    how = read_json(folder / _ENDED_FILE) or _KILLED
                    name = (await self._finish(folder, how["missing"], how["seconds"]))["report"]
                    notes.append(f"{run} was saved as {name}")
                else:
                    write_json(folder / _SAVED_FILE, {"report": "", "at": utc_now()})
            except (RigError, ValidationError, OSError, KeyError) as error:
                notes.append(f"{run} could not be saved: {error}")
                if isinstance(error, RigError) and error.error_class == "PARTIAL":
                    break
        return notes

    def _is_over(self, job_id: str) -> bool:
        try:
            return self._context.jobs.read(job_id).finished
        except RigError:
            return True

    def _forget_old(self) -> None:
        """Keep the newest runs' raw data; what was saved has a copy beside its report."""
        done = [f for f in sorted(self._folder.glob("*-*")) if (f / _SAVED_FILE).exists()]
        for folder in done[:-_RUNS_KEPT]:
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            folder.rmdir()


def unfinished_measurement(context: RigContext) -> JobRecord | None:
    """What measures the served model now, or waits to; two at once would measure each other."""
    kinds = (BENCHMARK_JOB, PROBE_JOB, OPINION_JOB)
    return next(filter(None, map(context.jobs.active, kinds)), None)
