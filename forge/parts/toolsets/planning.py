"""The planning toolset: what a deployment would take, cost and yield, before it exists.

Validates, takes the rig's own values where nothing is said, asks the planner, and puts its plan
into words. Starts nothing and asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.journal import utc_now
from forge.parts.ground.names import checked_name
from forge.parts.ground.results import Outcome
from forge.parts.knowledge.engine_profiles import ENGINE_PROFILES
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.planner import DeploymentPlan, PlannedSpeed, plan_of
from forge.parts.knowledge.planner_engines import GIB_BYTES
from forge.parts.knowledge.planner_fit import (
    MAX_PLANNED_CONTEXT,
    FitRequest,
    PlannedModel,
    planned_hardware,
    planned_model,
)
from forge.parts.knowledge.planner_money import API_INPUT_PRICE, API_OUTPUT_PRICE, ApiPrice
from forge.parts.knowledge.prices import Provisioning
from forge.parts.toolsets.plan_refusal import refuse_by_plan
from forge.parts.toolsets.startup import PLAN_CHECK, StartHistory
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

PlanVerdict = Literal["fits", "refused by arithmetic", "refused by an estimate"]
_USUAL_CONTEXT = 4096  # tokens, where a rig has no MAX_MODEL_LEN
_DTYPE_ENCODINGS = {"float32": "f32", "float16": "fp16"}
_KV_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32"}


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
            Literal["on-demand", "spot", "flex-start"],
            Field(description="Whose price is taken from the table."),
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
        request = await self._request(
            own, model, encoding, context, concurrency, kv_dtype, hardware, engine, memory_gib
        )
        if batched_tokens:
            request = replace(request, batched_tokens=batched_tokens)
        api = ApiPrice(api_input_price, api_output_price)
        return deployment_outcome(
            self.planned(request, min(output, request.context), price_per_hour, provisioning, api)
        )

    def rig_defaults(self) -> PlanDefaults:
        """The rig's own values. A rig whose name or settings say something else overrides this."""
        return plan_defaults(self.context)

    def planned(
        self,
        request: FitRequest,
        output: int = 128,
        usd_per_hour: float | None = None,
        provisioning: Provisioning = "on-demand",
        api: ApiPrice | None = None,
    ) -> DeploymentPlan:
        """The plan, with this rig's own start-up time where it has one. RigError INVALID."""
        try:
            return plan_of(
                request,
                output=output,
                usd_per_hour=usd_per_hour,
                provisioning=provisioning,
                api=api,
                cold_start=self._own_cold_start(request),
            )
        except ValueError as error:
            raise RigError("INVALID", f"{error}; nothing was planned") from None

    async def own_plan(self, model: str = "") -> DeploymentPlan:
        """The plan of what the rig's settings say, with `model` in their model's place if given.

        `refusal_of(plan, override)` then refuses. Raises RigError.
        """
        own = self.rig_defaults()
        own = replace(own, model=model) if model else own
        return self.planned(await self._request(own, "", "", 0, 1, "", "", "", 0.0))

    async def refuse_unfit(self, model: str, override: bool = False) -> None:
        """Raise RigError CAPACITY where the rig's own plan of `model` does not fit, with its sum
        and with what would: serve and create tools ask this before they begin.

        Only a Gemma 4 by name is judged. Another model, and a rig whose place or engine is in no
        table, pass: a folder is measured by its runtime, and what nobody knows is not refused.
        """
        if model not in _MODEL_NAMES:
            return
        try:
            plan = await self.own_plan(model)
        except RigError as error:
            if error.error_class == "INVALID":
                return
            raise
        refuse_by_plan(plan, self.context.settings, override)

    async def _request(
        self,
        own: PlanDefaults,
        model: str,
        encoding: str,
        context: int,
        concurrency: int,
        kv_dtype: str,
        hardware: str,
        engine: str,
        memory_gib: float,
    ) -> FitRequest:
        hardware = _checked_slot("hardware", hardware or own.hardware, _HARDWARE_NAMES)
        engine = _checked_slot("engine", engine or own.runtime, _ENGINE_NAMES)
        planned = self._model(model or own.model)
        same_engine = engine == own.runtime
        request = FitRequest(
            model=planned,
            encoding=encoding or ("" if model else own.encoding) or planned.stored,
            runtime=engine,
            hardware=hardware,
            context=context or own.context,
            streams=concurrency,
            kv_dtype=kv_dtype or (own.kv_dtype if same_engine else "auto"),
            utilization=own.utilization if same_engine else 0.0,
            batched_tokens=own.batched_tokens if same_engine else 0,
            memory_gib=memory_gib,
        )
        here = planned_hardware(hardware)[0].chip == "cpu" and own.hardware == hardware
        if not here or memory_gib:
            return request
        room = await self.context.plane.room(self.context.paths.cache)
        free, total = room.memory_available / GIB_BYTES, room.memory_total / GIB_BYTES
        return replace(request, memory_gib=free, physical_gib=total)

    def _model(self, name: str) -> PlannedModel:
        """A Gemma 4 out of the tables, or a model whose weights lie on this computer."""
        if name.lower() in _MODEL_NAMES or name in _MODEL_NAMES:
            return planned_model(name)
        checked_name("model", "model", name)
        if name != "embedded" and not name.startswith("/"):
            raise invalid_parameter("model", f"is in no table; sizes: {', '.join(GEMMA4)}")
        served = self.context.runtime.local_model(name)
        if served is None:
            raise RigError("NOT_FOUND", "that model's weights are not here yet", "serve_model()")
        if served.geometry is None:
            raise invalid_parameter("model", "cannot be planned: its shape is not understood")
        stored = "q4_0" if served.encoding.startswith("q4") else served.encoding
        stored = stored if stored in WEIGHT_ENCODINGS else "bf16"
        return PlannedModel(name, "", served.geometry, {}, stored)

    def _own_cold_start(self, request: FitRequest) -> Figure | None:
        """Seconds that this rig's own earlier starts of that model took, if it had any."""
        own = self.rig_defaults()
        if (request.hardware, request.runtime) != (own.hardware, own.runtime):
            return None
        history = StartHistory(self.context.paths.state / "starts.jsonl")
        seconds = history.typical(request.model.name)
        if not seconds:
            return None
        source = "this rig's own earlier starts"
        return Figure(sum(seconds.values()), "s", source, utc_now()[:10], kind="measured")


_HARDWARE_NAMES = tuple(dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]))
_ENGINE_NAMES = tuple(dict.fromkeys(key.split("-")[0] for key in ENGINE_PROFILES))
_MODEL_NAMES = frozenset(
    name
    for size, model in GEMMA4.items()
    for name in (size.lower(), model.slot, *(entry.repo for entry in model.checkpoints))
)


def plan_defaults(context: RigContext) -> PlanDefaults:
    """What a rig's name and settings say: `<platform>-<runtime>-<hardware>-<model>`, and keys.

    Settings win over the name: MODEL_NAME, MAX_MODEL_LEN, DTYPE, KV_CACHE_DTYPE,
    GPU_MEMORY_UTILIZATION, MAX_NUM_BATCHED_TOKENS, those that the rig has.
    """
    slots = (*context.rig.split("-"), "", "", "", "")[:4]
    settings: Any = context.settings
    kv = str(getattr(settings, "kv_cache_dtype", "auto"))
    return PlanDefaults(
        model=str(getattr(settings, "model_name", "") or slots[3]),
        encoding=_DTYPE_ENCODINGS.get(str(getattr(settings, "dtype", "")), ""),
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
    )


def deployment_outcome(plan: DeploymentPlan) -> DeploymentOutcome:
    """A plan as a tool's answer."""
    verdict, request, money = plan.verdict, plan.request, plan.money
    memory = {
        **verdict.resident,
        "weights, all": sum(verdict.resident.values()),
        **{f"while loading: {name}": size for name, size in verdict.extra.items()},
        "weights at the loading peak": sum(verdict.resident.values()) + sum(verdict.extra.values()),
        "engine's overhead": round(verdict.overhead),
        "cache of one stream": round(verdict.room.stream_bytes),
        "cache, one more token": round(verdict.room.per_token),
        "cache pool": round(verdict.pool),
        "usable by the engine": round(verdict.usable),
        "visible": round(verdict.visible),
    }
    usd: dict[str, float] = {}
    if money is not None:
        usd = {"per hour": money.per_hour}
        usd |= {f"per million out, {name}": value for name, value in money.per_million.items()}
        if money.start is not None:
            usd["cold start"] = money.start
        if money.saturated_with_start is not None:
            usd["per million out, saturated, 4 h with the start"] = money.saturated_with_start
    start = plan.cold_start
    sources = [f"cold start: {start.source} ({start.date})"] if start.source else []
    if money is not None:
        sources.append(f"price: {money.rate_source}")
    words: PlanVerdict = "fits"
    if not verdict.fits:
        words = "refused by arithmetic" if verdict.arithmetic else "refused by an estimate"
    return DeploymentOutcome(
        summary=_plan_sentence(plan),
        next_step=_next_call(plan),
        fits=verdict.fits,
        verdict=words,
        reasons=[f"{finding.kind}: {finding.text}" for finding in verdict.findings],
        changes=[words for words, _ in plan.changes],
        devices=verdict.devices,
        memory_bytes=memory,
        resident_kv_tokens=verdict.room.tokens,
        kv_layout=f"{verdict.room.layout}: {verdict.room.detail}",
        streams_at_context=round(verdict.room.streams, 2),
        tokens_per_s=_rates(plan),
        cold_start_s=None if start.value is None else float(start.value),
        usd={name: round(value, 5) for name, value in usd.items()},
        break_even_tokens_per_s=_rounded(money.break_even if money is not None else None),
        assumptions=[*plan.assumptions, *sources, f"{request.context} tokens a stream"],
    )


def _plan_sentence(plan: DeploymentPlan) -> str:
    request, verdict = plan.request, plan.verdict
    what = f"{request.model.name} in {request.encoding} on {request.hardware}"
    weights = sum(verdict.resident.values()) / 1e9
    head = f"{what} ({verdict.profile.name}) {'fits' if verdict.fits else 'does not fit'}"
    body = (
        f"weights {weights:.2f} of {verdict.usable / 1e9:.2f} GB, {verdict.streams} streams of"
        f" {request.context} tokens"
    )
    if verdict.fits:
        body += f", about {plan.single.estimate:.1f} tok/s alone"
    return f"{head}: {body}."


def _next_call(plan: DeploymentPlan) -> str:
    """The same question with the first change that makes it fit."""
    if not plan.changes:
        return ""
    new = plan.changes[0][1]
    return (
        f"plan_deployment(model='{new.model.name}', encoding='{new.encoding}',"
        f" context={new.context}, concurrency={new.streams}, kv_dtype='{new.kv_dtype}',"
        f" hardware='{new.hardware}', engine='{new.runtime}')"
    )


def _rates(plan: DeploymentPlan) -> dict[str, float]:
    points: dict[str, PlannedSpeed] = {"one stream": plan.single}
    if plan.asked.streams > 1:
        points[f"{plan.asked.streams} streams"] = plan.asked
    if plan.saturated is not None:
        points[f"saturated, {plan.saturated.streams} streams"] = plan.saturated
    rates: dict[str, float] = {}
    for name, speed in points.items():
        rates[f"{name}, ceiling"] = round(speed.ceiling, 2)
        rates[f"{name}, estimate"] = round(speed.estimate, 2)
    return rates


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _checked_slot(parameter: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise invalid_parameter(parameter, f"must be one of {', '.join(known)}")
    return value
