"""The refusal of what a plan says cannot be served: the whole sum, and what would fit, in words.

Decides nothing itself: the planner's verdict does.
"""

from __future__ import annotations

from collections.abc import Collection

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.plan_answer import PlanRefusal
from forge.parts.knowledge.planner import DeploymentPlan, refusal_of
from forge.parts.knowledge.planner_engines import GIB_BYTES
from forge.parts.knowledge.planner_fit import FitRequest, is_quantized_on_load


def planned_refusal(plan: DeploymentPlan, settings: Collection[str]) -> PlanRefusal | None:
    """Why `plan` is refused, with every summand in GB (1e9 bytes) and the changes that would make
    it fit, as keys out of `settings` where those have them; None for a plan that fits."""
    try:
        refusal_of(plan)
    except RigError as error:
        what = f"{error.what}; {plan_sum(plan)}"
        return PlanRefusal(what, _fitting_words(plan, settings), plan.verdict.arithmetic)
    return None


def plan_sum(plan: DeploymentPlan) -> str:
    """Everything that the plan needs on one device, summand by summand, against what is there."""
    parts, verdict = _needed(plan), plan.verdict
    listed = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    total, usable, visible = sum(parts.values()) / 1e9, verdict.usable / 1e9, verdict.visible / 1e9
    each = f" on each of {verdict.devices} devices" if verdict.devices > 1 else ""
    have = f"the engine may take {usable:.2f} of the {visible:.2f} GB that are there"
    return f"in all {total:.2f} GB{each} ({listed}), and {have}"


def _needed(plan: DeploymentPlan) -> dict[str, float]:
    """Bytes on one device by what takes them, the loading peak included."""
    verdict = plan.verdict
    # Some engines make room at their start for all that they will ever answer at once.
    streams = plan.request.streams if verdict.profile.static_slots else 1
    slots = f"{streams} x " if streams > 1 else ""
    return {
        **verdict.resident,
        **{f"{name} while loading": size for name, size in verdict.extra.items()},
        "the engine": verdict.overhead,
        f"the cache of {slots}{plan.request.context} tokens": verdict.room.stream_bytes * streams,
    }


def _fitting_words(plan: DeploymentPlan, settings: Collection[str]) -> str:
    """What would make it fit: this rig's own settings, other weights, or a rig elsewhere."""
    request, words, places = plan.request, [], []
    known = GEMMA4[request.model.size].checkpoints if request.model.size else ()
    if plan.verdict.visible < sum(_needed(plan).values()) <= request.physical_gib * GIB_BYTES:
        words.append("free memory")
    for change, new in plan.changes:
        if new.context != request.context and "MAX_MODEL_LEN" in settings:
            words.append(f"set MAX_MODEL_LEN={new.context}")
        elif new.context // 256 and new.context != request.context and "SLOTS" in settings:
            words.append(f"set CONTEXT_PER_SLOT={new.context // 256 * 256}")
        elif new.streams != request.streams and "SLOTS" in settings:
            words.append(f"set SLOTS={new.streams}")
        elif new.kv_dtype != request.kv_dtype and "KV_CACHE_DTYPE" in settings:
            words.append(f"set KV_CACHE_DTYPE={new.kv_dtype}")
        elif new.model != request.model:
            words.append(f"serve model='{new.model.name}'{_stored_so(request, settings)}")
        elif new.encoding != request.encoding:
            if "QUANTIZATION" in settings and is_quantized_on_load(new):
                words.append(f"set QUANTIZATION={new.encoding}")
                continue
            stored = (c.repo for c in known if c.exists and c.stored == new.encoding)
            also = _stored_so(request, settings)
            words += [f"serve model='{repo}'{also}" for repo in stored][:1]
        elif new.hardware != request.hardware:
            places.append(change.removeprefix("hardware="))
    if places:
        words.append(f"take a rig on {', '.join(places[:3])}")
    tries = " or ".join(words or ["serve a smaller model"])
    soft = "" if plan.verdict.arithmetic else "; override=true tries it all the same"
    return f"{tries}{soft}; plan_deployment() shows more"


def _stored_so(request: FitRequest, settings: Collection[str]) -> str:
    """What else has to be set for weights that are served as they are stored."""
    return (
        " and leave QUANTIZATION empty"
        if "QUANTIZATION" in settings and is_quantized_on_load(request)
        else ""
    )
