"""The benchmark toolset: put a measured load on the served model, as a job, and keep the report.

The load generator runs in its own process; reports are listed and shown by the reports toolset.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from forge.parts.boundaries.load_plan import LEAST_SECONDS
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.jobs import JobRecord, JobRunner
from forge.parts.ground.locks import held_lock
from forge.parts.ground.results import Outcome
from forge.parts.toolsets.benchmark_job import (
    BENCHMARK_JOB,
    BenchmarkJob,
    planned_load,
    unfinished_measurement,
)
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence, require_ready
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_BENCH_CELL_LIMIT = 200
_DEFAULT_STREAMS = [1, 4, 16]
_DEFAULT_CONTEXTS = [128, 1024]
_NO_RATES: list[float] = []

StreamCounts = Annotated[
    list[Annotated[int, Field(ge=1, le=1024)]],
    Field(max_length=12, description="Closed loop: streams at once, one cell each; may be []."),
]
ContextLengths = Annotated[
    list[Annotated[int, Field(ge=16, le=262_144)]],
    Field(min_length=1, max_length=12, description="Prompt lengths in tokens."),
]
RequestRates = Annotated[
    list[Annotated[float, Field(ge=0.01, le=1000)]],
    Field(max_length=12, description="Open loop: Poisson requests/s, one cell each."),
]


class BenchmarkOutcome(Outcome):
    """Where a benchmark stands. `cells` has a line for each that is done, once the job is over."""

    job_id: str
    state: str
    planned_cells: int
    longest_s: float = Field(description="About the longest it can take, without slow answers.")
    percent: float = 0.0
    remaining_s: float | None = Field(default=None, description="From finished cells.")
    report: str = Field(default="", description="Its name, once it is saved.")
    cells: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class BenchmarkToolset(Toolset):
    """Measure."""

    toolset_name = "benchmark"

    def __init__(self, context: RigContext) -> None:
        # A runtime may have a word for the tool's name ("vllm_"); most have none.
        words = {"bench": "", **context.vocabulary}
        super().__init__(replace(context, vocabulary=words))
        self._job = BenchmarkJob(context)

    def job_runners(self) -> dict[str, JobRunner]:
        return {BENCHMARK_JOB: self._job.run}

    @rig_tool(name="run_{bench}benchmark", title="Benchmark the served model", effect="changes")
    async def run_benchmark(
        self,
        ctx: Caller,
        concurrency: StreamCounts = _DEFAULT_STREAMS,
        context_tokens: ContextLengths = _DEFAULT_CONTEXTS,
        output_tokens: Annotated[
            int, Field(ge=1, le=8192, description="Tokens to generate for each request.")
        ] = 128,
        request_rates: RequestRates = _NO_RATES,
        save_result: Annotated[
            bool, Field(description="Keep a report, which list_reports then shows.")
        ] = True,
        requests_per_cell: Annotated[
            int, Field(ge=0, le=100_000, description="0: max(50, 8 x streams). Fewer is marked.")
        ] = 0,
        seconds_per_cell: Annotated[
            float, Field(ge=1, le=3600, description="No request begins later in a cell.")
        ] = LEAST_SECONDS,
        repeats: Annotated[
            int, Field(ge=1, le=9, description="Times the whole grid runs; gives the noise.")
        ] = 1,
        ttft_limit_ms: Annotated[
            float, Field(ge=1, le=1e6, description="Goodput: longest time to first token.")
        ] = 2000,
        tpot_limit_ms: Annotated[
            float, Field(ge=1, le=1e6, description="Goodput: longest time per output token.")
        ] = 100,
        seed: Annotated[
            int, Field(ge=0, le=2**31 - 1, description="Of prompts and arrivals; 0: a new one.")
        ] = 0,
        stall_s: Annotated[
            float, Field(ge=1, le=600, description="A silent request fails after so long.")
        ] = 60,
        wait_s: WaitSeconds = 0,
    ) -> BenchmarkOutcome:
        """Measure the served model on {place}: throughput and latency for every context_tokens with
        every concurrency (streams that each wait for their answer: for capacity) and every
        request_rates (random arrivals: for latency claims). Prompts are new random words, so no
        prefix cache answers. A job: it takes up to about seconds_per_cell and a warm-up for each
        cell, during which the {server} is busy; cancel_job ends it and keeps finished cells.
        {cost}."""
        given = {k: v for k, v in locals().items() if k not in ("self", "ctx", "wait_s")}
        arguments = benchmark_arguments(given, getattr(self.context.settings, "max_model_len", 0))
        await require_ready(self.context)
        async with held_lock(self.context.paths.state, "benchmark"):
            notes = await self._job.salvage()
            job = self._begin(arguments)
        return benchmark_outcome(await follow_job(self.context, job.id, wait_s, ctx), notes)

    def _begin(self, arguments: dict[str, Any]) -> JobRecord:
        active = unfinished_measurement(self.context)
        if active is not None:
            raise RigError(
                "BUSY",
                f"{active.id} is running ({progress_sentence(active)}), and two at "
                "once would measure each other",
                f"get_job(job_id='{active.id}', wait_s=50)",
            )
        job = self.context.jobs.new(BENCHMARK_JOB, arguments, ("load", "report"))
        self.context.journal.append("benchmark asked", job=job.id)
        self.context.jobs.start_worker(job, self.context.server_file)
        return job


def benchmark_arguments(given: dict[str, Any], model_limit: int) -> dict[str, Any]:
    """The tool's arguments as the job takes them. RigError INVALID for what cannot be measured.

    model_limit: tokens of one conversation that the model serves; 0 where nobody knows.
    """
    arguments = dict(given)
    for name in ("concurrency", "context_tokens", "request_rates"):
        arguments[name] = list(dict.fromkeys(given[name]))
    if not arguments["concurrency"] and not arguments["request_rates"]:
        raise invalid_parameter("concurrency", "is empty, and so is request_rates")
    longest = max(arguments["context_tokens"]) + arguments["output_tokens"]
    if model_limit and longest > model_limit:
        raise invalid_parameter(
            "context_tokens",
            f"with output_tokens this makes {longest} tokens, and the model is served with "
            f"{model_limit} (MAX_MODEL_LEN)",
        )
    arguments["seed"] = given["seed"] or 1 + secrets.randbelow(2**31 - 1)
    cells = len(planned_load(arguments))
    if cells > _BENCH_CELL_LIMIT:
        raise invalid_parameter(
            "concurrency",
            f"times contexts times repeats makes {cells} cells, at most {_BENCH_CELL_LIMIT}",
        )
    return arguments


def benchmark_outcome(job: JobRecord, notes: list[str]) -> BenchmarkOutcome:
    """The job as the tool's answer."""
    plan = planned_load(job.arguments)
    report = str(job.result.get("report", ""))
    if not job.finished:
        summary = f"{len(plan)} cells are being measured by {job.id}: {progress_sentence(job)}."
        step = f"get_job(job_id='{job.id}', wait_s=50)"
    elif job.state == "done":
        summary = f"{len(plan)} cells were measured{f' and saved as {report}' if report else ''}."
        step = f"show_report(name='{report}')" if report else ""
    else:
        why = job.error.text if job.error is not None else job.message
        summary = f"The benchmark {job.id} is {job.state}: {why}."
        step = f"show_report(name='{report}')" if report else "get_system_status()"
    return BenchmarkOutcome(
        summary=summary,
        next_step=step,
        job_id=job.id,
        state=job.state,
        planned_cells=len(plan),
        longest_s=round(sum(cell.seconds for cell in plan), 1),
        percent=job.percent,
        remaining_s=job.remaining_s,
        report=report,
        cells=[str(line) for line in job.result.get("cells", [])],
        notes=notes,
    )
