"""The tools that only a rig with llama.cpp has: build its server, and look at its slots.

What they share with other engines (serve, wait, stop, ask, measure) stands in other toolsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from forge.parts.boundaries.gguf_file import read_gguf
from forge.parts.boundaries.llama_api import LlamaApi, LlamaSlot
from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobProgress, JobRecord, JobRunner
from forge.parts.ground.locks import held_lock
from forge.parts.ground.results import Outcome
from forge.parts.runtimes.llama_build import (
    LLAMA_BUILD_PHASES,
    build_llama_server,
    refuse_unable_to_build,
)
from forge.parts.runtimes.llama_memory import SlotMemory, slot_memory
from forge.parts.runtimes.llama_server import LlamaServer
from forge.parts.toolsets.caller import Caller
from forge.parts.toolsets.following import WaitSeconds, follow_job, progress_sentence, require_ready
from forge.parts.toolsets.toolset import Toolset, rig_tool

_BUILD_JOB = "build"
# Where each phase of a build begins and ends, in percent of the whole: shares of the seconds that
# one took on 2026-11-30.
_BUILD_SHARES: Mapping[str, tuple[float, float]] = dict(
    zip(LLAMA_BUILD_PHASES, ((0, 3), (3, 4), (4, 99), (99, 100)), strict=True)
)


class LlamaBuildOutcome(Outcome):
    """Where llama-server stands on this computer."""

    state: Literal["ready", "building", "failed", "cancelled"]
    program: str = Field(default="", description="The llama-server that a start would use.")
    version: str = Field(default="", description="As the program itself says.")
    job_id: str = ""
    phase: str = ""
    percent: float = 0.0
    facts: dict[str, str] = Field(
        default_factory=dict, description="Source, hash, flags and seconds of a build."
    )


class SlotsOutcome(Outcome):
    """The server's slots now, and what each holds in memory."""

    slots: list[LlamaSlot]
    busy: int = Field(description="Slots that answer a request now.")
    kv_mb_per_slot: float = Field(description="Keys and values of one slot, in MB (1e6 bytes).")
    checkpoints_mb_per_slot: float = Field(
        description="At most so much more, to go on from an earlier point of a chat."
    )


class LlamaToolset(Toolset):
    """Build, look at the slots."""

    toolset_name = "llama"

    @property
    def _runtime(self) -> LlamaServer:
        return cast(LlamaServer, self.context.runtime)

    def job_runners(self) -> dict[str, JobRunner]:
        return {_BUILD_JOB: self._build}

    @rig_tool(title="Build llama-server", effect="changes")
    async def build_llama_server(
        self,
        ctx: Caller,
        wait_s: WaitSeconds = 0,
        force: Annotated[
            bool, Field(description="Build although a llama-server that can be used is there.")
        ] = False,
    ) -> LlamaBuildOutcome:
        """Build llama.cpp's server for the processor of {place}, as a job with the phases source,
        configure, compile and check; get_job and cancel_job follow and end it. {cost} but 37 MB of
        download, 0.5 GB of disk while it goes on (15 MB stay) and time: about 8 minutes on 2 cores.
        Needs cmake and a C++ compiler. The source is pinned by hash. A llama-server that can be
        used already is named instead, and nothing is built; force replaces this rig's own build."""
        usable = None if force else await self._usable()
        if usable is not None:
            return usable
        async with held_lock(self.context.paths.state, "llama-build"):
            job = self.context.jobs.active(_BUILD_JOB) or self._begin(force)
        return await self._told(await follow_job(self.context, job.id, wait_s, ctx))

    @rig_tool(title="Slots of the model server", effect="reads")
    async def get_slots(self) -> SlotsOutcome:
        """The slots of the running {server}: which answer a request now, how many tokens each holds
        and may hold, and what each costs in memory. SLOTS and CONTEXT_PER_SLOT set them at the next
        start; more requests than slots wait in line. Reads only."""
        instance = await require_ready(self.context)
        api = LlamaApi(await self.context.plane.endpoint(instance), self._runtime.api_key())
        slots = await api.slots()
        return _slots_outcome(slots, self._slot_memory(instance.model, slots))

    def _slot_memory(self, name: str, slots: list[LlamaSlot]) -> SlotMemory:
        """By the context that the running server gave its slots, not by what is set meanwhile."""
        model = self._runtime.local_model(name)
        if model is None:
            raise RigError("NOT_FOUND", f"the file of {name} is gone", "get_system_status()")
        context = max((slot.n_ctx for slot in slots), default=0)
        return slot_memory(read_gguf(model.folder), context, self._runtime.cache_type)

    async def _usable(self) -> LlamaBuildOutcome | None:
        """The llama-server that a start would use, if there is one that may be used."""
        try:
            program, facts = await self._runtime.usable_program()
        except RigError:
            return None  # whatever is wrong with it: a build is the answer
        return LlamaBuildOutcome(
            summary=f"{program.path} (from {program.origin}) can be used: nothing was built.",
            next_step="serve_model()",
            state="ready",
            program=str(program.path),
            version=facts.version,
        )

    def _next_step(self) -> str:
        """After a build: a LLAMA_SERVER that is set would go on being used instead of it."""
        chosen = getattr(self.context.settings, "llama_server", "")
        return "empty LLAMA_SERVER, then serve_model()" if chosen else "serve_model()"

    def _begin(self, force: bool) -> JobRecord:
        """A new job, after every refusal that can be known without starting anything."""
        context = self.context
        refuse_unable_to_build(context.paths.cache)
        job = context.jobs.new(_BUILD_JOB, {"force": force}, LLAMA_BUILD_PHASES)
        context.journal.append("llama-server build asked", job=job.id)
        context.jobs.start_worker(job, context.server_file)
        return job

    async def _build(self, progress: JobProgress) -> dict[str, Any]:
        """The job's work: build, and tell phase and percentage as it goes."""

        def report(phase: str, fraction: float, words: str) -> None:
            begin, end = _BUILD_SHARES[phase]
            percent = round(begin + (end - begin) * fraction, 1)
            if (phase, percent) != (progress.record.phase, progress.record.percent):
                progress.update(phase=phase, percent=percent, message=words)

        anew = bool(progress.record.arguments.get("force"))
        build = await build_llama_server(self.context.paths.cache, report, anew=anew)
        self.context.journal.append("llama-server built", program=str(build.program))
        return {"program": str(build.program), **build.record}

    async def _told(self, job: JobRecord) -> LlamaBuildOutcome:
        """The job as an outcome; a failed one as its own error."""
        if job.error is not None:
            words, _, step = job.error.text.partition(" Next: ")
            step = step or "build_llama_server()"
            raise RigError(job.error.error_class, words.partition(" ")[2], step)
        if job.state == "done":
            return _built_outcome(job, self._next_step())
        if job.finished:
            return LlamaBuildOutcome(
                summary=f"{job.id} is {job.state}: {job.message}.",
                next_step="build_llama_server()",
                state="cancelled" if job.state == "cancelled" else "failed",
                job_id=job.id,
            )
        return LlamaBuildOutcome(
            summary=f"llama-server is being built ({progress_sentence(job)}).",
            next_step=f"get_job(job_id='{job.id}', wait_s=50)",
            state="building",
            job_id=job.id,
            phase=job.phase,
            percent=job.percent,
        )


def _built_outcome(job: JobRecord, next_step: str) -> LlamaBuildOutcome:
    told = {key: str(job.result.get(key, "")) for key in ("source", "source_sha256", "seconds")}
    flags = job.result.get("flags")
    told["flags"] = " ".join(flags) if isinstance(flags, list) else ""
    program, version = str(job.result["program"]), str(job.result["version"])
    return LlamaBuildOutcome(
        summary=f"llama-server {version} is built for this processor: {program}.",
        next_step=next_step,
        state="ready",
        program=program,
        version=version,
        job_id=job.id,
        phase=job.phase,
        percent=100.0,
        facts=told,
    )


def _slots_outcome(slots: list[LlamaSlot], memory: SlotMemory) -> SlotsOutcome:
    busy = sum(slot.is_processing for slot in slots)
    return SlotsOutcome(
        summary=f"{busy} of {len(slots)} slots answer a request; each holds {memory.context} "
        f"tokens and {memory.total / 1e6:.1f} MB at most.",
        next_step="query_gemma4(prompt=…)",
        slots=slots,
        busy=busy,
        kv_mb_per_slot=round(memory.kv / 1e6, 3),
        checkpoints_mb_per_slot=round(memory.checkpoints / 1e6, 3),
    )
