"""A deployment before it is paid for: fit, speed, money, and what would have to change.

Puts the planner's parts together. Knows no rig and no tool; prices come from the table or the
caller. `refusal_of` is what serve and create tools ask before they begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.engine_profiles import cold_start_figure, known_misses
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.memory import ple_bytes
from forge.parts.knowledge.planner_changes import OWN_CHIPS, fit_changes
from forge.parts.knowledge.planner_fit import (
    FitRequest,
    FitVerdict,
    fit_verdict,
    is_published,
    is_quantized_on_load,
    planned_hardware,
)
from forge.parts.knowledge.planner_memory import ON_LOAD_SINCE
from forge.parts.knowledge.planner_money import (
    ApiPrice,
    break_even_tokens_per_s,
    usd_for,
    usd_per_million,
    with_cold_start,
)
from forge.parts.knowledge.planner_speed import SpeedModel
from forge.parts.knowledge.prices import Price, Provisioning, prices_for

_SESSION_S = 4 * 3600.0  # the hard stop of a flex-start machine
_STREAM_LIMIT = 1024  # vLLM's max_num_seqs on large devices; nothing here was measured beyond 100


@dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """Output tokens per second with `streams` streams: the roofline's and the calibrated one."""

    streams: int
    ceiling: float
    estimate: float


@dataclass(frozen=True, slots=True)
class PlannedMoney:
    """USD, of a rate that is known.

    per_million: per million output tokens, by name of the operating point, by the estimate.
    break_even: output tokens per second, held all the time, above which the API is dearer.
    """

    per_hour: float
    rate_source: str
    per_million: dict[str, float]
    saturated_with_start: float | None
    start: float | None
    break_even: float | None


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Everything that is known about a deployment before it exists.

    changes: single changes that would make it fit, as "parameter=value" and as the request that
    each leads to; empty if it fits.
    assumptions: what the figures rest on, one sentence each. saturated is None without a stream.
    """

    request: FitRequest
    verdict: FitVerdict
    single: PlannedSpeed
    asked: PlannedSpeed
    saturated: PlannedSpeed | None
    cold_start: Figure
    money: PlannedMoney | None
    changes: tuple[tuple[str, FitRequest], ...]
    assumptions: tuple[str, ...]


def plan_of(
    request: FitRequest,
    *,
    output: int = 128,
    usd_per_hour: float | None = None,
    provisioning: Provisioning = "on-demand",
    api: ApiPrice | None = None,
    cold_start: Figure | None = None,
) -> DeploymentPlan:
    """Plan `request` with answers of `output` tokens; the rest of the context is the prompt.

    usd_per_hour None takes the cheapest price of that provisioning in the table. api None leaves
    out the break-even. cold_start replaces the table's, in seconds, where a rig has its own.
    Raises ValueError for what the tables do not know, and for an answer longer than the context.
    """
    if not 1 <= output <= request.context:
        raise ValueError(f"output {output} must be 1 to the context, {request.context}")
    verdict = fit_verdict(request)
    roof, engine = _speed_models(request, verdict)
    prompt = request.context - output
    limit = min(verdict.streams, _STREAM_LIMIT)

    def speed(streams: int) -> PlannedSpeed:
        return PlannedSpeed(
            streams,
            roof.tokens_per_s(streams, prompt, output),
            engine.tokens_per_s(streams, prompt, output),
        )

    middle = prompt + output // 2
    single = PlannedSpeed(1, roof.single_tokens_per_s(middle), engine.single_tokens_per_s(middle))
    asked = speed(max(1, min(request.streams, limit)))
    saturated = speed(engine.best_streams(limit, prompt, output)) if limit >= 1 else None
    if cold_start is None:
        cold_start = cold_start_figure(request.runtime, verdict.chip.chip, request.model.size)
    rate, source = usd_per_hour, "as given"
    if rate is None:
        rate, source = table_rate(request.hardware, provisioning)
    money = None
    if rate is not None:
        money = _money(rate, source, asked, saturated, cold_start, api, prompt, output)
    changes: tuple[tuple[str, FitRequest], ...] = ()
    if not verdict.fits:
        changes = tuple(fit_changes(request, _price_of(provisioning)))
    return DeploymentPlan(
        request,
        verdict,
        single,
        asked,
        saturated,
        cold_start,
        money,
        changes,
        tuple(_assumptions(request, verdict, engine, asked, saturated)),
    )


def refusal_of(plan: DeploymentPlan, override: bool = False) -> None:
    """Raise RigError CAPACITY when `plan` does not fit; a plan that fits passes.

    override lets estimates pass. Arithmetic is refused all the same: bytes do not yield.
    """
    findings = plan.verdict.findings
    hard = [finding.text for finding in findings if finding.kind == "arithmetic"]
    if not findings or (override and not hard):
        return
    request = plan.request
    what = f"{request.model.name} in {request.encoding} on {request.hardware}"
    reasons = "; ".join(hard or [finding.text for finding in findings])
    ground = "arithmetic, no override" if hard else "an estimate, which may be overridden"
    words = " or ".join(change for change, _ in plan.changes[:3])
    advice = f"try {words}" if words else "plan a smaller model"
    raise RigError("CAPACITY", f"{what} does not fit: {reasons} ({ground})", advice)


def table_rate(hardware: str, provisioning: Provisioning) -> tuple[float, str] | tuple[None, str]:
    """The cheapest USD/h of a hardware slot in the table, all its devices, and the row behind it.

    This computer costs nothing by the hour. None with the reason where no row is known.
    """
    chip, devices = planned_hardware(hardware)
    if chip.chip in OWN_CHIPS:
        return 0.0, "this computer: nothing is billed, power is not counted"
    rows = prices_for(chip.chip, provisioning=provisioning)
    if not rows:
        return None, f"no {provisioning} price of {chip.name} is known"
    best = min(rows, key=_row_usd)
    count = devices if best.machine == "chip" else 1
    words = f"{best.provider} {best.machine}, {best.region}, {provisioning}, {best.rate.date}"
    note = f"; {best.rate.note}" if best.rate.note else ""
    return count * _row_usd(best), f"{words} ({best.rate.source}{note})"


def _row_usd(price: Price) -> float:
    return price.rate.known("the rate")


def _price_of(provisioning: Provisioning) -> Callable[[str], float | None]:
    return lambda hardware: table_rate(hardware, provisioning)[0]


def _speed_models(request: FitRequest, verdict: FitVerdict) -> tuple[SpeedModel, SpeedModel]:
    """The roofline and the engine's model, over all devices together."""
    chip, devices = verdict.chip, verdict.devices
    bandwidth = devices * chip.bandwidth.known(f"the bandwidth of {chip.name}")
    compute = chip.compute.value
    total = None if compute is None else devices * float(compute)
    geometry, encoding = request.model.geometry, request.encoding
    element = verdict.kv_element_bytes
    return (
        SpeedModel(geometry, encoding, bandwidth, total, None, element),
        SpeedModel(geometry, encoding, bandwidth, total, verdict.profile, element),
    )


def _money(
    rate: float,
    source: str,
    asked: PlannedSpeed,
    saturated: PlannedSpeed | None,
    cold_start: Figure,
    api: ApiPrice | None,
    prompt: int,
    output: int,
) -> PlannedMoney:
    points: dict[str, float] = {}
    if saturated is not None:
        points = {f"{asked.streams} streams": asked.estimate, "saturated": saturated.estimate}
    per_million = {name: usd_per_million(rate, speed) for name, speed in points.items()}
    start = None if cold_start.value is None else float(cold_start.value)
    with_start = None
    if saturated is not None and start is not None and start < _SESSION_S:
        with_start = with_cold_start(per_million["saturated"], _SESSION_S, start)
    even = None
    if api is not None and rate > 0 and api.per_million_output(prompt, output) > 0:
        even = break_even_tokens_per_s(rate, api, prompt, output)
    return PlannedMoney(
        rate,
        source,
        per_million,
        with_start,
        None if start is None else usd_for(rate, start),
        even,
    )


def _assumptions(
    request: FitRequest,
    verdict: FitVerdict,
    engine: SpeedModel,
    asked: PlannedSpeed,
    saturated: PlannedSpeed | None,
) -> list[str]:
    """What the figures rest on: the constants with how they were come by, and what is unknown."""
    profile, chip = verdict.profile, verdict.chip
    share, step, host = profile.efficiency, profile.step_overhead, profile.host
    said = [
        f"ceiling: every byte moves once at {engine.bandwidth:g} GB/s ({chip.bandwidth.source}),"
        " prompts at the full compute, engine and host take no time",
        f"estimate: {share.value:.0%} of that bandwidth ({share.basis}: {share.source}),"
        f" {step.value:g} ms a step ({step.basis}), and the host {host.ms(asked.streams):.1f} ms"
        f" at {asked.streams} streams ({host.basis}: {host.source})",
    ]
    most = max(asked.streams, saturated.streams if saturated else 1)
    if not host.reaches(most):
        end = host.points[-1][0] if host.points else 1
        said.append(f"beyond {end} streams no host curve is measured, so {most} is a guess")
    if engine.compute is None:
        said.append("the chip's compute is unmeasured: prompts are taken to cost nothing")
    elif chip.compute.value is not None:
        prefill = profile.prefill_share
        said.append(
            f"prompts run at {prefill.value:.0%} of {engine.compute:g} TFLOP/s ({prefill.basis})"
        )
    if verdict.profile.reference_int4 and request.encoding == "w4a16":
        said.append("4-bit weights are expanded to bf16 in every step: no fused kernel")
    if profile.layout == "hybrid":
        said.append(
            f"the cache is vLLM's hybrid one with {verdict.in_flight} tokens in flight; the"
            f' {verdict.room.tokens} tokens are what vLLM prints as "GPU KV cache size" at this'
            " length, and no size of a pool"
        )
    said.append(
        f"overhead {verdict.overhead / 1e9:.2f} GB ({profile.overhead.basis}:"
        f" {profile.overhead.source})"
    )
    if profile.ple_on_host and ple_bytes(request.model.geometry, request.encoding):
        table = ple_bytes(request.model.geometry, request.encoding) / 1e9
        said.append(f"{table:.2f} GB of per-layer embeddings stay in the host's memory, unchecked")
    loaded = set(request.model.unknown_towers) & set(profile.towers)
    if loaded:
        said.append(f"unmeasured and counted as nothing: {' and '.join(sorted(loaded))} tower")
    if profile.wide_kv and request.kv_dtype in ("fp8", "int8"):
        said.append("an eight-bit cache saves nothing there: blocks are laid out for 16 bits")
    if not is_published(request) and not is_quantized_on_load(request):
        said.append(f"nobody publishes {request.model.name} in {request.encoding}: make it first")
    if is_quantized_on_load(request):
        said.append(
            f"{request.encoding} is made from a bf16 checkpoint while loading, and counted as if"
            f" all of that stood there first; {ON_LOAD_SINCE}"
        )
    if verdict.devices > 1:
        said.append("traffic between devices is not counted, and weights are split evenly")
    if verdict.devices < planned_hardware(request.hardware)[1]:
        said.append(f"{profile.name} uses {verdict.devices} of the devices there")
    native = "fp16" if "bf16" not in chip.native_dtypes and "fp16" in chip.native_dtypes else "bf16"
    if native not in chip.native_dtypes:
        said.append(
            f"{chip.name} converts 16-bit numbers: its bandwidth figure is an effective one"
        )
    elif native == "fp16" and request.encoding == "bf16":
        said.append(f"{chip.name} has no bf16 arithmetic: fp16 of the same size is assumed")
    misses = known_misses(request.runtime, chip.chip, request.model.size)
    return [*said, *misses, profile.caveat] if profile.caveat else [*said, *misses]
