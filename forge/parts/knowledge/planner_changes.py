"""Which single change would make a plan fit that does not: less context, other bytes, other chips.

Knows no prices of its own and decides nothing: it tries, through the same verdict as the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forge.parts.knowledge.engine_profiles import engine_profile
from forge.parts.knowledge.hardware import ACCELERATORS, HARDWARE_SLOTS, Accelerator
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import MAX_PLANNED_CONTEXT
from forge.parts.knowledge.planner_fit import (
    FitRequest,
    fit_verdict,
    planned_hardware,
    planned_model,
)

OWN_CHIPS = ("cpu", "1650ti")  # one has them or not: nobody rents them out by the hour


def fit_changes(
    request: FitRequest, price_of: Callable[[str], float | None]
) -> list[tuple[str, FitRequest]]:
    """Single changes that make an unfit request fit, each with the request that it leads to.

    The largest context, fewer streams, an eight-bit cache, another encoding (a checkpoint in it
    where one was named and another is published), other hardware (the cheapest first; price_of
    gives USD/h of a slot, None where unknown). Empty if none does alone.
    """
    changes: list[tuple[str, FitRequest]] = []
    context = _largest(lambda tokens: _fits(replace(request, context=tokens)), MAX_PLANNED_CONTEXT)
    if context:
        changes.append((f"context={context}", replace(request, context=context)))
    streams = _largest(lambda count: _fits(replace(request, streams=count)), request.streams)
    if streams:
        changes.append((f"concurrency={streams}", replace(request, streams=streams)))
    if request.kv_dtype != "fp8" and _fits(replace(request, kv_dtype="fp8")):
        changes.append(("kv_dtype='fp8'", replace(request, kv_dtype="fp8")))
    chip, _ = planned_hardware(request.hardware)
    for encoding in engine_profile(request.runtime, chip.chip).encodings:
        other = _in_encoding(request, encoding)
        if other != request and _fits(other):
            named = f"model='{other.model.name}'" if other.model != request.model else ""
            changes.append((named or f"encoding='{encoding}'", other))
    own = planned_hardware(request.hardware)
    offers: dict[str, tuple[Accelerator, int]] = {}
    for slot in dict.fromkeys([*HARDWARE_SLOTS, *ACCELERATORS]):
        kind = planned_hardware(slot)
        other = replace(request, hardware=slot, memory_gib=0.0, physical_gib=0.0)
        rented = kind[0].chip not in OWN_CHIPS and kind != own
        if rented and kind not in offers.values() and _fits(other):
            offers[slot] = kind
    for slot in sorted(offers, key=lambda name: (price_of(name) is None, price_of(name) or 0.0)):
        rate = price_of(slot)
        cost = "price unknown" if rate is None else f"{rate:.2f} USD/h"
        other = replace(request, hardware=slot, memory_gib=0.0, physical_gib=0.0)
        changes.append((f"hardware='{slot}' ({cost})", other))
    return changes


def _in_encoding(request: FitRequest, encoding: str) -> FitRequest:
    """The same model in that encoding: where a checkpoint was named, the one that is stored so, if
    somebody publishes it; else what the engine makes of the named one."""
    model = request.model
    known = GEMMA4[model.size].checkpoints if model.size and model.name != model.size else ()
    for checkpoint in known:
        if checkpoint.exists and checkpoint.stored == encoding != model.stored:
            return replace(request, encoding=encoding, model=planned_model(checkpoint.repo))
    return replace(request, encoding=encoding)


def _fits(request: FitRequest) -> bool:
    try:
        return fit_verdict(request).fits
    except ValueError:  # no such engine there, heads that do not divide, memory unmeasured
        return False


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that fits, 0 for none; smaller ones always do."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
