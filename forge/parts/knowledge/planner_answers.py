"""Answers a question to the planner: looks its names up, plans, and puts the plan into its form.

Knows no rig and no way of asking. Whatever is wrong with a question is its answer, as a fault.
"""

from __future__ import annotations

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.names import checked_name
from forge.parts.knowledge.engine_profiles import ENGINE_PROFILES
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS
from forge.parts.knowledge.memory import WEIGHT_ENCODINGS
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import (
    PlanAnswer,
    PlanFault,
    PlannedChange,
    PlannedDeployment,
    PlanQuestion,
    PlanVerdict,
)
from forge.parts.knowledge.planner import DeploymentPlan, PlannedSpeed, plan_of
from forge.parts.knowledge.planner_fit import FitRequest, PlannedModel, planned_model
from forge.parts.knowledge.planner_money import ApiPrice
from forge.parts.knowledge.planner_refusal import planned_refusal

PLANNED_HARDWARE = tuple(dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]))
PLANNED_ENGINES = tuple(dict.fromkeys(key.split("-")[0] for key in ENGINE_PROFILES))
PLANNED_NAMES = frozenset(
    name
    for size, model in GEMMA4.items()
    for name in (size.lower(), model.slot, *(entry.repo for entry in model.checkpoints))
)


def plan_answer(question: PlanQuestion) -> PlanAnswer:
    """The plan of what is asked, with a refusal where it does not fit; or the question's fault."""
    try:
        plan = _asked_plan(question)
    except RigError as error:
        return PlanAnswer(fault=PlanFault(error.error_class, error.what, error.next_step))
    except ValueError as error:
        return PlanAnswer(fault=PlanFault("INVALID", f"{error}; nothing was planned"))
    return PlanAnswer(planned_deployment(plan), planned_refusal(plan, question.settings))


def _asked_plan(question: PlanQuestion) -> DeploymentPlan:
    """Raises RigError INVALID by the parameter's name, or ValueError of the tables."""
    _check_slot("hardware", question.hardware, PLANNED_HARDWARE)
    _check_slot("engine", question.engine, PLANNED_ENGINES)
    model = _asked_model(question)
    start = None
    if question.cold_start_s is not None:
        source = "this rig's own earlier starts"
        start = Figure(question.cold_start_s, "s", source, question.cold_start_day, "measured")
    return plan_of(
        FitRequest(
            model=model,
            encoding=question.encoding or model.stored,
            runtime=question.engine,
            hardware=question.hardware,
            context=question.context,
            streams=question.streams,
            kv_dtype=question.kv_dtype,
            utilization=question.utilization,
            batched_tokens=question.batched_tokens,
            memory_gib=question.memory_gib,
            physical_gib=question.physical_gib,
        ),
        output=question.output,
        usd_per_hour=question.usd_per_hour,
        provisioning=question.provisioning,
        api=ApiPrice(question.api_input, question.api_output),
        cold_start=start,
    )


def _asked_model(question: PlanQuestion) -> PlannedModel:
    """A Gemma 4 out of the tables, or the asker's own."""
    name, own = question.model, question.own
    if own is not None:
        stored = "q4_0" if own.stored.startswith("q4") else own.stored
        stored = stored if stored in WEIGHT_ENCODINGS else "bf16"
        return PlannedModel(name, "", own.geometry, {}, stored)
    if name.lower() in PLANNED_NAMES or name in PLANNED_NAMES:
        return planned_model(name)
    checked_name("model", "model", name)
    raise invalid_parameter("model", f"is in no table; sizes: {', '.join(GEMMA4)}")


def _check_slot(parameter: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise invalid_parameter(parameter, f"must be one of {', '.join(known)}")


def planned_deployment(plan: DeploymentPlan) -> PlannedDeployment:
    """A plan as it is shown: every summand in bytes, rates and money by name."""
    verdict, money = plan.verdict, plan.money
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
    return PlannedDeployment(
        summary=_plan_sentence(plan),
        fits=verdict.fits,
        verdict=words,
        reasons=tuple(f"{finding.kind}: {finding.text}" for finding in verdict.findings),
        changes=tuple(_planned_change(words, request) for words, request in plan.changes),
        devices=verdict.devices,
        memory_bytes=memory,
        resident_kv_tokens=verdict.room.tokens,
        kv_layout=f"{verdict.room.layout}: {verdict.room.detail}",
        streams_at_context=round(verdict.room.streams, 2),
        tokens_per_s=_planned_rates(plan),
        cold_start_s=None if start.value is None else float(start.value),
        usd={name: round(value, 5) for name, value in usd.items()},
        break_even_tokens_per_s=_rounded(money.break_even if money is not None else None),
        assumptions=(*plan.assumptions, *sources, f"{plan.request.context} tokens a stream"),
    )


def _planned_change(words: str, new: FitRequest) -> PlannedChange:
    return PlannedChange(
        words,
        model=new.model.name,
        encoding=new.encoding,
        hardware=new.hardware,
        engine=new.runtime,
        context=new.context,
        streams=new.streams,
        kv_dtype=new.kv_dtype,
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


def _planned_rates(plan: DeploymentPlan) -> dict[str, float]:
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
