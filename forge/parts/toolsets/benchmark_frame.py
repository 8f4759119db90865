"""What a benchmark's report says beside its cells: subject, hardware, engine, workload and run.

Read from the rig as it is when the load begins; knows no cell.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel

from forge.parts.boundaries.judge_program import JUDGE_PROGRAM, asked_subject
from forge.parts.boundaries.load_plan import LoadPlan
from forge.parts.ground.errors import RigError
from forge.parts.ground.journal import utc_now
from forge.parts.knowledge.judge_answer import KnownSubject, SubjectQuestion
from forge.parts.knowledge.report_schema import (
    BenchEngine,
    BenchHardware,
    BenchRun,
    HardwareFact,
    Workload,
    run_id_of,
)
from forge.parts.planes.plane import Instance
from forge.parts.runtimes.runtime import ServedModel
from forge.parts.toolsets.toolset import RigContext

Vantage = Literal["same host", "tunnel", "unknown"]
_ENCODING_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32"}


async def benchmark_frame(
    context: RigContext, instance: Instance, plan: LoadPlan
) -> dict[str, Any]:
    """All of a report but its cells, as JSON: subject, hardware, engine, workload, run, notes.

    Raises RigError where judge.py, which will have to judge the report, is missing or fails.
    """
    platform_slot, runtime, slot, _, encoding = [*context.rig.split("-"), *[""] * 5][:5]
    local = platform_slot == "local"
    known = await _known_subject(context, instance.model, slot, encoding)
    subject = known.subject
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    tunnel = "//127.0.0.1:" in plan.base_url
    vantage: Vantage = "same host" if local else "tunnel" if tunnel else "unknown"
    # Made of the schema's own records, so that what no report may hold fails before the load.
    run = BenchRun(
        id=run_id_of(day, subject.short, runtime, slot),
        date=day,
        kind="measured",
        rig=context.rig,
        started=utc_now(),
    )
    workload = Workload(
        name="distinct-words",
        tool="gemma4-rigs loadgen",
        tool_version=context.version_of("loadgen.py"),
        api="chat",
        prompts="distinct",
        temperature=plan.temperature,
        seed=plan.seed,
        warmups_per_shape=plan.warmups,
        vantage=vantage,
        goodput_limits=plan.limits,
    )
    hardware = BenchHardware(slot=slot, chip=known.chip)
    records: dict[str, BaseModel] = {
        "run": run,
        "subject": subject,
        "hardware": _with_host(hardware) if local else hardware,
        "engine": await _engine_facts(context, runtime, instance),
        "workload": workload,
    }
    twin = str(context.extras.get("twin", ""))
    notes = [f"runtime twin: {twin}, the same hardware and weights through another engine"]
    frame: dict[str, Any] = {"notes": notes if twin else []}
    return frame | {name: record.model_dump(mode="json") for name, record in records.items()}


async def _known_subject(context: RigContext, model: str, slot: str, encoding: str) -> KnownSubject:
    """What judge.py makes of the served model, of its file and of the rig's slots and settings."""
    dtype = str(getattr(context.settings, "dtype", ""))
    limit = getattr(context.settings, "max_model_len", None)
    served = _served(context, model)
    held = served.encoding if served is not None else ""
    context_limit = served.context if served is not None else 0
    question = SubjectQuestion(
        model=model,
        # The file's own word before the rig's name: another model may be served in its place.
        encoding=held or encoding or _ENCODING_OF_DTYPE.get(dtype, dtype or "unknown"),
        geometry=served.geometry if served is not None else None,
        max_model_len=limit if isinstance(limit, int) else context_limit or None,
        slot=slot,
    )
    return await asked_subject(context.beside(JUDGE_PROGRAM), question)


def _served(context: RigContext, model: str) -> ServedModel | None:
    try:
        return context.runtime.local_model(model)
    except RigError:
        return None


def _with_host(hardware: BenchHardware) -> BenchHardware:
    """What this computer says of itself: kinds and sizes, no name and no address."""
    import psutil

    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    memory = round(psutil.virtual_memory().total / 2**30, 2)
    cores = HardwareFact(value=os.cpu_count() or 1, unit="threads", how="probed")
    return hardware.model_copy(
        update={
            "host_cpu": HardwareFact(value=model[:120], how="probed"),
            "host_cores": cores,
            "host_memory_gib": HardwareFact(value=memory, unit="GiB", how="probed"),
        }
    )


async def _engine_facts(context: RigContext, runtime: str, instance: Instance) -> BenchEngine:
    """The engine as it was started: its packages, and the argument list without folders."""
    versions = {
        need.name.removeprefix("package "): need.detail
        for need in await context.runtime.needs()
        if need.name.startswith("package ")
    }
    engine = context.vocabulary.get("engine", "").partition(" ")[0].lower()
    argv: list[str] = []
    for entry in context.journal.entries(last=1000):
        if entry.get("serve_id") == instance.serve_id and isinstance(entry.get("argv"), list):
            argv = [_last_name(str(word)) for word in entry["argv"]]
    resolved: dict[str, str | int | float | bool | None] = {
        f"package {name}": version for name, version in versions.items()
    }
    resolved |= {name: value[:120] for name, value in list(instance.resolved.items())[:50]}
    return BenchEngine(
        name=runtime,
        version=versions.get(engine, "") or instance.resolved.get("version", "")[:120],
        argv=argv[:100],
        resolved=resolved,
        server=context.version,
    )


def _last_name(word: str) -> str:
    return PurePosixPath(word).name if word.startswith("/") else word
