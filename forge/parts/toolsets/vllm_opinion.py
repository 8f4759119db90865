"""The opinion job: one load by `vllm bench serve`, its figures, and a report beside our own.

The report is of kind "imported": another tool measured, by definitions of its own. Knows no
argument of a tool and starts no job.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from forge.parts.boundaries.load_plan import LoadCellPlan, LoadPlan
from forge.parts.boundaries.report_vllm import ImportFacts, read_vllm, without_texts
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress
from forge.parts.ground.process import run_program
from forge.parts.ground.state import private_folder, read_json, write_json
from forge.parts.knowledge.report_schema import BenchReport
from forge.parts.planes.plane import Instance
from forge.parts.runtimes.vllm_bench import (
    VllmBenchCell,
    vllm_bench_command,
    vllm_bench_environment,
    vllm_bench_figures,
)
from forge.parts.runtimes.vllm_cpu import VllmCpu
from forge.parts.runtimes.vllm_install import VLLM_VERSION
from forge.parts.toolsets.benchmark_frame import benchmark_frame
from forge.parts.toolsets.following import require_ready
from forge.parts.toolsets.reports import save_report
from forge.parts.toolsets.starts import refuse_missing
from forge.parts.toolsets.toolset import RigContext

_BENCH_SERVE_PATIENCE_S = 7200.0


class VllmOpinionJob:
    """The opinion job of one rig."""

    def __init__(self, context: RigContext) -> None:
        self._context = context

    async def run(self, progress: JobProgress) -> dict[str, Any]:
        """Run vLLM's tool once. Its result file is kept under the job's name; what it says becomes
        a report, unless that was not wanted.

        Raises RigError NOT_FOUND, INTERNAL (the tool failed) or PARTIAL (no figures, or no report
        of them; the figures are in the job's result then).
        """
        context, arguments = self._context, dict(progress.record.arguments)
        save = bool(arguments.pop("save_result"))
        cell = VllmBenchCell(**arguments)
        instance = await require_ready(context)
        frame = await self._frame(instance, cell)
        result = private_folder(context.paths.state / "opinions") / f"{progress.record.id}.json"
        progress.update(message=f"{cell.requests} requests, {cell.streams} at once")
        seconds = await self._run_program(instance, cell, result)
        found = {**vllm_bench_figures(result), "file": str(result), "report": ""}
        progress.update(result=found)
        if not save:
            return found
        data = without_texts(read_json(result) or {})
        write_json(result, data)
        try:
            report = opinion_report(frame, data, cell, seconds)
        except ValueError as error:
            why = f"no report can be made of vLLM's result: {str(error)[:500]}"
            raise RigError("PARTIAL", why, f"read {result}") from None
        found["report"] = (await save_report(context, report, result)).name
        progress.update(message=f"saved as {found['report']}")
        return found

    async def _run_program(self, instance: Instance, cell: VllmBenchCell, result: Path) -> float:
        """Measure `cell`, written to `result`; returns the seconds that it took."""
        context, runtime = self._context, cast(VllmCpu, self._context.runtime)
        environment = runtime.environment()
        # The report names its version: only what is whole and of that version may measure.
        refuse_missing(await environment.needs())
        model = runtime.local_model(instance.model)
        if model is None:
            raise RigError("NOT_FOUND", f"the folder of {instance.model} is gone", "stop_model()")
        argv = vllm_bench_command(
            environment.python,
            await context.plane.endpoint(instance),
            instance.served_name,
            model.folder,
            cell,
            result,
        )
        begun = time.monotonic()
        done = await run_program(
            argv,
            timeout_s=_BENCH_SERVE_PATIENCE_S,
            environment=vllm_bench_environment(runtime.api_key()),
            folder=result.parent,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
            raise RigError("INTERNAL", f"vllm bench serve ended with {done.returncode}: {why}")
        return time.monotonic() - begun

    async def _frame(self, instance: Instance, cell: VllmBenchCell) -> dict[str, Any]:
        """What a benchmark of our own would say of this server now."""
        load = LoadCellPlan(
            concurrency=cell.streams,
            input_tokens=cell.input_tokens,
            output_tokens=cell.output_tokens,
            requests=cell.requests,
            seconds=_BENCH_SERVE_PATIENCE_S,
        )
        address = await self._context.plane.endpoint(instance)
        plan = LoadPlan(base_url=address, model=instance.served_name, cells=[load])
        return await benchmark_frame(self._context, instance, plan)


def opinion_report(
    frame: dict[str, Any], data: dict[str, Any], cell: VllmBenchCell, seconds: float
) -> BenchReport:
    """The report of one result file. frame: as `benchmark_frame` gave it. seconds: of the program.

    Subject, hardware and engine are the frame's, so that a comparison can name what differs: the
    workload, its prompts and the API do, always. Raises ValueError for a file that is no result.
    """
    origin = f"vllm bench serve of this rig's own environment, {VLLM_VERSION}"
    facts = ImportFacts(
        model=frame["subject"]["model"],
        encoding=frame["subject"]["encoding"],
        hardware=frame["hardware"]["slot"],
        engine=frame["engine"]["name"],
        origin=origin,
        concurrency=cell.streams,
        input_tokens=cell.input_tokens,
        output_tokens=cell.output_tokens,
    )
    found = read_vllm(data, facts)
    run = {**frame["run"], "kind": "imported", "origin": origin, "duration_s": round(seconds, 1)}
    workload = {
        "name": "random-tokens",
        "tool": found.tool,
        "tool_version": VLLM_VERSION,
        "api": found.api,
        "prompts": found.prompts,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": cell.seed,
        "warmups_per_shape": cell.streams,
        "vantage": frame["workload"]["vantage"],
    }
    notes = [
        found.note,
        # These two were read in the source of release 0.32.0, 2026-11-30.
        "every warm-up sends the first prompt, so that a prefix cache may answer one request",
        "rates are over the whole run, also while streams begin and end",
    ]
    return BenchReport.model_validate(
        {
            **frame,
            "run": run,
            "workload": workload,
            # It asks for the server's usage and counts by that (its source, the same day).
            "token_source": "usage",
            "planned_cells": 1,
            "cells": [one.model_dump() for one in found.cells],
            "notes": notes,
        }
    )
