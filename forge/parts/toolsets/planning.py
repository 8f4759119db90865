"""The planning toolset: what a deployment would take, cost and yield, before it exists.

Validates, takes the rig's own values where nothing is said, and asks plan.py, which has the tables
and the arithmetic. Starts nothing else and asks nobody.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from forge.parts.boundaries.plan_program import PLAN_PROGRAM, asked_plan
from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.journal import utc_now
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.knowledge.plan_answer import (
    API_INPUT_PRICE,
    API_OUTPUT_PRICE,
    MAX_PLANNED_CONTEXT,
    OwnModel,
    PlanAnswer,
    PlannedDeployment,
    PlanQuestion,
    PlanRenting,
    PlanVerdict,
)
from forge.parts.toolsets.starts import PLAN_CHECK, StartHistory
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_PLAN_GIB = 2**30
_USUAL_CONTEXT = 4096  # tokens, where a rig has no MAX_MODEL_LEN
_DTYPE_ENCODINGS = {"float32": "f32", "float16": "fp16"}
_KV_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "int8": "int8"}
_SLOT_NAME = re.compile(r"[a-z0-9]{0,16}")
_TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class DeploymentOutcome(Outcome):
    """A deployment on paper. Sizes are bytes on one device, rates are output tokens a second."""

    fits: bool
    verdict: PlanVerdict = Field(description="Arithmetic cannot be overridden, an estimate can.")
    reasons: list[str] = Field(default_factory=list, description="What speaks against it.")
    changes: list[str] = Field(
        default_factory=list, description="Single changes, each of which would make it fit."
    )
    devices: int
    memory_bytes: dict[str, int] = Field(description="Every summand on one device.")
    resident_kv_tokens: int
    kv_layout: str
    streams_at_context: float = Field(description="Streams of that context resident at once.")
    tokens_per_s: dict[str, float] = Field(description="Ceiling (roofline) and estimate.")
    cold_start_s: float | None = Field(description="null: nobody has measured it.")
    usd: dict[str, float] = Field(description="Empty where no price is known.")
    break_even_tokens_per_s: float | None = Field(
        description="Output held all the time above which the API, its input included, is dearer."
    )
    assumptions: list[str]


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """The rig's own values: slots out of its name, the rest out of its settings."""

    model: str = ""
    encoding: str = ""
    context: int = 0
    kv_dtype: str = "auto"
    runtime: str = ""
    hardware: str = ""
    utilization: float = 0.0
    batched_tokens: int = 0
    streams: int = 1


class PlanningToolset(Toolset):
    """Plan."""

    toolset_name = "planning"

    def __init__(self, context: RigContext) -> None:
        super().__init__(context)
        context.extras[PLAN_CHECK] = self.refuse_unfit

    @rig_tool(title="Plan a deployment", effect="reads")
    async def plan_deployment(
        self,
        model: Annotated[
            str,
            Field(
                max_length=4096,
                description="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint, a local folder.",
            ),
        ] = "",
        encoding: Annotated[
            Literal["", "f32", "bf16", "fp16", "fp8", "int8", "w4a16", "q4_0"],
            Field(description="How weights lie in memory; empty: as the checkpoint stores them."),
        ] = "",
        context: Annotated[
            int, Field(ge=0, le=MAX_PLANNED_CONTEXT, description="Tokens, prompt and answer.")
        ] = 0,
        concurrency: Annotated[int, Field(ge=1, le=4096, description="Streams at once.")] = 1,
        kv_dtype: Annotated[
            Literal["", "auto", "bf16", "fp16", "fp8", "int8", "f32"],
            Field(description="Type of the cache."),
        ] = "",
        hardware: Annotated[
            str, Field(max_length=16, description="v5e1, v6e1, g6, mi300x, cpu, h100 and so on.")
        ] = "",
        engine: Annotated[
            str, Field(max_length=16, description="vllm, jax, jaxrust, pytorch, llamacpp, ollama.")
        ] = "",
        output: Annotated[int, Field(ge=1, le=65_536, description="Tokens of an answer.")] = 128,
        batched_tokens: Annotated[
            int, Field(ge=0, le=1_048_576, description="vLLM's max_num_batched_tokens.")
        ] = 0,
        memory_gib: Annotated[
            float, Field(ge=0, le=4096, description="Of one device, instead of the table's.")
        ] = 0,
        price_per_hour: Annotated[
            float | None, Field(ge=0, le=10_000, description="USD; else the table's cheapest.")
        ] = None,
        provisioning: Annotated[
            PlanRenting, Field(description="Whose price is taken from the table.")
        ] = "on-demand",
        api_input_price: Annotated[
            float, Field(ge=0, le=10_000, description="USD a million, of the API to compare with.")
        ] = float(API_INPUT_PRICE.known("input")),
        api_output_price: Annotated[float, Field(ge=0, le=10_000, description="The same.")] = float(
            API_OUTPUT_PRICE.known("output")
        ),
    ) -> DeploymentOutcome:
        """Work out before anything is paid for or downloaded whether a deployment fits, with every
        summand in bytes, how many tokens and streams stay resident, how fast it would be (roofline
        and calibrated estimate), how long it takes to start, what it costs per hour and per million
        tokens, from which throughput on it beats an API, and which change would make it fit.

        Whatever is left out (empty, 0) is this rig's own value. Arithmetic: starts nothing, costs
        nothing, asks nobody, and takes no vLLM log line for a pool size."""
        own = self.rig_defaults()
        asked = await self._question(
            own, model, encoding, context, concurrency, kv_dtype, hardware, engine, memory_gib
        )
        asked = replace(asked, batched_tokens=batched_tokens or asked.batched_tokens)
        asked = replace(asked, output=min(output, asked.context), usd_per_hour=price_per_hour)
        asked = replace(asked, api_input=api_input_price, api_output=api_output_price)
        return deployment_outcome(await self.answered(replace(asked, provisioning=provisioning)))

    def rig_defaults(self) -> PlanDefaults:
        """The rig's own values. A rig whose name or settings say something else overrides this."""
        return plan_defaults(self.context)

    async def answered(self, question: PlanQuestion) -> PlanAnswer:
        """What plan.py says to `question`. Raises RigError: INVALID is the question's own fault."""
        return await asked_plan(self.context.beside(PLAN_PROGRAM), question)

    async def own_plan(self, model: str = "") -> PlanAnswer:
        """The plan of what the rig's settings say, with `model` in their model's place if given;
        its refusal speaks in this rig's own settings. Raises RigError."""
        own = self.rig_defaults()
        own = replace(own, model=model) if model else own
        return await self.answered(await self._question(own, streams=own.streams))

    async def refuse_unfit(self, model: str, override: bool = False) -> None:
        """Raise RigError CAPACITY where the rig's own plan of `model` does not fit, with its sum
        and with what would: serve and create tools ask this before they begin.

        Only a Gemma 4 by name is judged. Another model, and a rig whose place or engine is in no
        table, pass: a folder is measured by its runtime, and what nobody knows is not refused.
        """
        if _lies_here(model):
            return
        try:
            refusal = (await self.own_plan(model)).refusal
        except RigError as error:
            if error.error_class == "INVALID":
                return
            raise
        if refusal is not None and (refusal.hard or not override):
            raise RigError("CAPACITY", refusal.what, refusal.next_step)

    async def _question(
        self,
        own: PlanDefaults,
        model: str = "",
        encoding: str = "",
        context: int = 0,
        streams: int = 1,
        kv_dtype: str = "",
        hardware: str = "",
        engine: str = "",
        memory_gib: float = 0.0,
    ) -> PlanQuestion:
        hardware = _checked_slot("hardware", hardware or own.hardware)
        engine = _checked_slot("engine", engine or own.runtime)
        same_engine = engine == own.runtime
        name = _checked_model(model or own.model)
        question = PlanQuestion(
            model=name,
            hardware=hardware,
            engine=engine,
            own=self._own_model(name) if _lies_here(name) else None,
            encoding=encoding or ("" if model else own.encoding),
            context=context or own.context,
            streams=streams,
            kv_dtype=kv_dtype or (own.kv_dtype if same_engine else "auto"),
            utilization=own.utilization if same_engine else 0.0,
            batched_tokens=own.batched_tokens if same_engine else 0,
            memory_gib=memory_gib,
            settings=tuple(key.upper() for key in type(self.context.settings).model_fields),
        )
        if same_engine and hardware == own.hardware:
            seconds = self._own_start(name)
            question = replace(question, cold_start_s=seconds, cold_start_day=utc_now()[:10])
        if hardware != own.hardware or hardware != "cpu" or memory_gib:
            return question
        room = await self.context.plane.room(self.context.paths.cache)
        free, total = room.memory_available / _PLAN_GIB, room.memory_total / _PLAN_GIB
        return replace(question, memory_gib=free, physical_gib=total)

    def _own_model(self, name: str) -> OwnModel:
        """A model whose weights lie on this computer. Raises RigError NOT_FOUND or INVALID."""
        served = self.context.runtime.local_model(name)
        if served is None:
            raise RigError("NOT_FOUND", "that model's weights are not here yet", "serve_model()")
        if served.geometry is None:
            raise invalid_parameter("model", "cannot be planned: its shape is not understood")
        return OwnModel(served.geometry, served.encoding)

    def _own_start(self, model: str) -> float | None:
        """Seconds that this rig's own earlier starts of that model took, if it had any."""
        history = StartHistory(self.context.paths.state / "starts.jsonl")
        seconds = history.typical(model)
        return sum(seconds.values()) if seconds else None


def plan_defaults(context: RigContext) -> PlanDefaults:
    """What a rig's name and settings say: `<platform>-<runtime>-<hardware>-<model>`, and keys.

    Settings win over the name: MODEL_NAME, MAX_MODEL_LEN, DTYPE, KV_CACHE_DTYPE,
    GPU_MEMORY_UTILIZATION, MAX_NUM_BATCHED_TOKENS, SLOTS, those that the rig has.
    """
    slots = (*context.rig.split("-"), "", "", "", "")[:4]
    settings: Any = context.settings
    kv = str(getattr(settings, "kv_cache_dtype", "auto"))
    stored = _DTYPE_ENCODINGS.get(str(getattr(settings, "dtype", "")), "")
    return PlanDefaults(
        model=str(getattr(settings, "model_name", "") or slots[3]),
        encoding=stored or str(getattr(settings, "quantization", "")),
        context=int(
            getattr(settings, "max_model_len", 0)
            or getattr(settings, "context_per_slot", 0)
            or _USUAL_CONTEXT
        ),
        kv_dtype="fp8" if kv.startswith("fp8") else _KV_TYPES.get(kv, "auto"),
        runtime=slots[1],
        hardware=slots[2],
        utilization=float(getattr(settings, "gpu_memory_utilization", 0.0) or 0.0),
        batched_tokens=int(getattr(settings, "max_num_batched_tokens", 0) or 0),
        streams=int(getattr(settings, "slots", 1) or 1),
    )


def deployment_outcome(answer: PlanAnswer) -> DeploymentOutcome:
    """A plan as a tool's answer; the next call asks the same with the first change that fits."""
    plan = answer.plan
    assert plan is not None  # plan.py's own promise, kept by what asks it
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    fields["changes"] = [change.words for change in plan.changes]
    return DeploymentOutcome.model_validate(fields | {"next_step": _next_plan(plan)})


def _next_plan(plan: PlannedDeployment) -> str:
    if not plan.changes:
        return ""
    new = plan.changes[0]
    return (
        f"plan_deployment(model='{new.model}', encoding='{new.encoding}',"
        f" context={new.context}, concurrency={new.streams}, kv_dtype='{new.kv_dtype}',"
        f" hardware='{new.hardware}', engine='{new.engine}')"
    )


def _lies_here(model: str) -> bool:
    """Whether a model of that name can only be known by its files on this computer."""
    return model == "embedded" or model.startswith("/")


def _checked_model(name: str) -> str:
    """A name that may stand in the planner's table, or that of a model on this computer."""
    return name if _TABLE_NAME.fullmatch(name) else checked_name("model", "model", name)


def _checked_slot(parameter: str, value: str) -> str:
    if not _SLOT_NAME.fullmatch(value):
        raise invalid_parameter(
            parameter, "must be a slot or a chip, in lower-case letters, digits"
        )
    return value
