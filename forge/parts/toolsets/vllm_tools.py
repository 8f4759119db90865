"""The tools that only a rig with vLLM has: install it, continue a text, measure by its own bench.

What they share with other engines (serve, wait, stop, ask, measure) stands in other toolsets.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.jobs import JobProgress, JobRecord, JobRunner
from forge.parts.ground.locks import held_lock
from forge.parts.ground.results import Outcome
from forge.parts.ground.state import read_json
from forge.parts.runtimes.vllm_bench import VllmBenchCell
from forge.parts.runtimes.vllm_cpu import VllmCpu
from forge.parts.runtimes.vllm_install import (
    VLLM_INSTALL_PHASES,
    VllmEnvironment,
    installed_facts,
    refuse_small_vllm_disk,
)
from forge.parts.toolsets.benchmark_job import OPINION_JOB, unfinished_measurement
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence, require_ready
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool
from forge.parts.toolsets.vllm_opinion import VllmOpinionJob
from forge.parts.toolsets.work import JobOutcome, job_outcome

_INSTALL_JOB = "install"
# Where each phase of an install begins and ends, in percent of the whole: shares of the seconds
# that one took on 2026-11-30.
_INSTALL_SHARES: Mapping[str, tuple[float, float]] = dict(
    zip(VLLM_INSTALL_PHASES, ((0, 5), (5, 85), (85, 94), (94, 100)), strict=True)
)


class InstallOutcome(Outcome):
    """Where the installation stands."""

    state: Literal["installed", "installing", "failed", "cancelled"]
    folder: str = Field(description="vLLM's environment; removing this folder undoes everything.")
    job_id: str = ""
    phase: str = ""
    percent: float = 0.0
    facts: list[str] = Field(
        default_factory=list, description="Versions, size, time, and what had to be mended."
    )


class VllmInstallToolset(Toolset):
    """Install."""

    toolset_name = "install"

    @property
    def _environment(self) -> VllmEnvironment:
        return cast(VllmCpu, self.context.runtime).environment()

    def job_runners(self) -> dict[str, JobRunner]:
        return {_INSTALL_JOB: self._install}

    @rig_tool(title="Install vLLM", effect="changes")
    async def install_vllm(self, ctx: Caller, wait_s: WaitSeconds = 0) -> InstallOutcome:
        """Install vLLM for the CPU into an environment of its own on {place}, as a job with the
        phases environment, packages, repairs and proof. Needed once, before serve_model. Downloads
        about 1 GB and takes minutes; 4.8 GB of disk must be free, 3.5 GB stay in use. Deletes only
        what a broken-off install of its own has left, and changes nothing outside that folder. What
        is installed already stays as it is."""
        async with held_lock(self.context.paths.state, _INSTALL_JOB):
            job = await self._begin()
        if job is None:
            return self._installed()
        return self._outcome(await follow_job(self.context, job.id, wait_s, ctx))

    async def _begin(self) -> JobRecord | None:
        """The install that goes on, or a new one; None where nothing is to be done."""
        context, environment = self.context, self._environment
        active = context.jobs.active(_INSTALL_JOB)
        if active is not None or await environment.usable():
            return active
        environment.refuse_foreign()
        folder = environment.folder
        refuse_small_vllm_disk(folder, (await context.plane.room(folder)).disk_free)
        job = context.jobs.new(_INSTALL_JOB, {"folder": str(folder)}, VLLM_INSTALL_PHASES)
        context.journal.append("install asked", job=job.id, folder=str(folder))
        context.jobs.start_worker(job, context.server_file)
        return job

    async def _install(self, progress: JobProgress) -> dict[str, object]:
        """The job: make the environment; what it had begun is removed when it fails."""
        environment = self._environment

        def report(phase: str, fraction: float, words: str) -> None:
            begin, end = _INSTALL_SHARES[phase]
            percent = round(begin + fraction * (end - begin), 1)
            progress.update(phase=phase, percent=percent, message=words)

        room = await self.context.plane.room(environment.folder)
        record = await environment.install(room.disk_free, report)
        self.context.journal.append(
            "vllm installed", job=progress.record.id, folder=str(environment.folder)
        )
        return {"folder": str(environment.folder), "facts": installed_facts(record)}

    def _installed(self) -> InstallOutcome:
        environment = self._environment
        return InstallOutcome(
            summary=f"vLLM is installed in {environment.folder}.",
            next_step="serve_model()",
            state="installed",
            folder=str(environment.folder),
            percent=100.0,
            facts=installed_facts(read_json(environment.marker) or {}),
        )

    def _outcome(self, job: JobRecord) -> InstallOutcome:
        if job.error is not None:
            words, _, step = job.error.text.partition(" Next: ")
            raise RigError(job.error.error_class, words.partition(" ")[2], step or "install_vllm()")
        folder = str(job.arguments.get("folder", ""))
        if job.state == "done":
            return self._installed()
        if job.finished:
            return InstallOutcome(
                summary=f"The installation {job.id} is {job.state}: {job.message}.",
                next_step="install_vllm()",
                state="cancelled" if job.state == "cancelled" else "failed",
                folder=folder,
                job_id=job.id,
            )
        return InstallOutcome(
            summary=f"vLLM is being installed ({progress_sentence(job)}).",
            next_step=f"get_job(job_id='{job.id}', wait_s=50)",
            state="installing",
            folder=folder,
            job_id=job.id,
            phase=job.phase,
            percent=job.percent,
        )


class VllmBenchToolset(Toolset):
    """A second opinion."""

    toolset_name = "opinion"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        self._job = VllmOpinionJob(context)

    def job_runners(self) -> dict[str, JobRunner]:
        return {OPINION_JOB: self._job.run}

    @rig_tool(title="Benchmark with vLLM's own tool", effect="changes")
    async def run_bench_serve(
        self,
        ctx: Caller,
        streams: Annotated[int, Field(ge=1, le=256, description="Requests at once.")] = 1,
        requests: Annotated[int, Field(ge=1, le=10_000, description="Requests in all.")] = 16,
        input_tokens: Annotated[
            int, Field(ge=1, le=262_144, description="Random tokens of each prompt.")
        ] = 128,
        output_tokens: Annotated[
            int, Field(ge=1, le=8192, description="Tokens to generate for each request.")
        ] = 32,
        save_result: Annotated[
            bool, Field(description="Keep a report, which list_reports then shows.")
        ] = True,
        wait_s: WaitSeconds = 0,
    ) -> JobOutcome:
        """Measure one load on the served model with `vllm bench serve` out of vLLM's environment: a
        second opinion on run_{bench}benchmark, which measures whole grids. A job; its result has
        the figures, the name of vLLM's own result file, and that of the report: of kind imported,
        because its definitions are not ours. {cost}; the {server} is busy meanwhile."""
        seed = secrets.randbelow(2**31)
        cell = VllmBenchCell(streams, requests, input_tokens, output_tokens, seed)
        async with held_lock(self.context.paths.state, "benchmark"):
            job = await self._ask_opinion(cell, save_result)
        return job_outcome(await follow_job(self.context, job.id, wait_s, ctx))

    async def _ask_opinion(self, cell: VllmBenchCell, save_result: bool) -> JobRecord:
        context = self.context
        limit = int(getattr(context.settings, "max_model_len", 0))
        if limit and cell.input_tokens + cell.output_tokens > limit:
            raise invalid_parameter(
                "input_tokens", f"with output_tokens this is beyond MAX_MODEL_LEN ({limit})"
            )
        await require_ready(context)
        active = unfinished_measurement(context)
        if active is not None:
            raise RigError(
                "BUSY",
                f"{active.id} is measuring ({progress_sentence(active)}), and two at once would "
                "measure each other",
                f"get_job(job_id='{active.id}', wait_s=50)",
            )
        arguments = {**vars(cell), "save_result": save_result}
        job = context.jobs.new(OPINION_JOB, arguments, ("load",))
        context.journal.append("opinion asked", job=job.id)
        context.jobs.start_worker(job, context.server_file)
        return job
