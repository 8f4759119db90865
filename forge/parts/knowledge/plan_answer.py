"""What is asked of the planner and what it answers: the forms that plan.py and the server share.

Knows no table, no arithmetic and no program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge.parts.ground.errors import ErrorClass
from forge.parts.knowledge.figures import Figure
from forge.parts.knowledge.geometry import Geometry

MAX_PLANNED_CONTEXT = 262_144  # tokens; the longest context of any Gemma 4
_FLASH_LITE = (
    "Gemini 2.5 Flash-Lite list price, as quoted by dev.to, Self-Hosted Gemma 4 on TPU v6e"
)
# The API that a deployment is compared with, unless the question names other prices.
API_OUTPUT_PRICE = Figure(0.40, "USD/M tokens", _FLASH_LITE, "2026-07-25")
API_INPUT_PRICE = Figure(
    0.10, "USD/M tokens", "Gemini 2.5 Flash-Lite list price, as stored pages quote it", "2026"
)
PlanVerdict = Literal["fits", "refused by arithmetic", "refused by an estimate"]
PlanRenting = Literal["on-demand", "spot", "flex-start"]


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model that is in no table, whose weights lie on this computer.

    `stored` is how the file holds them; what is no key of WEIGHT_ENCODINGS counts as bf16.
    """

    geometry: Geometry
    stored: str


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """One deployment to be planned. Zero, empty and None mean: the tables' or the engine's own.

    model: a size, a slot, a repository, or any name if `own` has its shape. hardware, engine: slots
    of a rig's name, or a chip. context: tokens of one stream, `output` of them answered. streams:
    at once. utilization: share of memory that the engine takes. batched_tokens: of vLLM.
    memory_gib: memory of one device that is free, physical_gib: that it has.
    usd_per_hour: of all devices. api_input, api_output: USD per million tokens of an API.
    cold_start_s: seconds that this rig's own starts took, as of cold_start_day.
    settings: the keys that the asking rig has, in which a refusal can then speak.
    """

    model: str
    hardware: str
    engine: str
    own: OwnModel | None = None
    encoding: str = ""
    context: int = 4096
    streams: int = 1
    kv_dtype: str = "auto"
    utilization: float = 0.0
    batched_tokens: int = 0
    memory_gib: float = 0.0
    physical_gib: float = 0.0
    output: int = 128
    usd_per_hour: float | None = None
    provisioning: PlanRenting = "on-demand"
    api_input: float = float(API_INPUT_PRICE.known("input"))
    api_output: float = float(API_OUTPUT_PRICE.known("output"))
    cold_start_s: float | None = None
    cold_start_day: str = ""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """One change that would make it fit, in words, and the question that it leads to."""

    words: str
    model: str
    encoding: str
    hardware: str
    engine: str
    context: int
    streams: int
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A deployment on paper. Sizes are bytes on one device, rates are output tokens a second.

    memory_bytes has every summand and the sums, tokens_per_s the roofline and the estimate by
    operating point, usd what is known of money by name. cold_start_s and break_even_tokens_per_s
    are None where nobody knows. assumptions: what the figures rest on, one sentence each.
    """

    summary: str
    fits: bool
    verdict: PlanVerdict
    reasons: tuple[str, ...]
    changes: tuple[PlannedChange, ...]
    devices: int
    memory_bytes: Mapping[str, int]
    resident_kv_tokens: int
    kv_layout: str
    streams_at_context: float
    tokens_per_s: Mapping[str, float]
    cold_start_s: float | None
    usd: Mapping[str, float]
    break_even_tokens_per_s: float | None
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """Why a deployment is refused, with the whole sum, and what would fit.

    hard: by arithmetic, which nobody may override.
    """

    what: str
    next_step: str
    hard: bool


@dataclass(frozen=True, slots=True)
class PlanFault:
    """Why a question has no answer: the parts of the error that a client is shown."""

    error_class: ErrorClass
    what: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Either a plan, with a refusal where it does not fit, or the fault of the question."""

    plan: PlannedDeployment | None = None
    refusal: PlanRefusal | None = None
    fault: PlanFault | None = None


def question_of(data: Mapping[str, Any]) -> PlanQuestion:
    """The question that was written as a JSON object. Raises TypeError or ValueError for another
    form: it names an unknown key, a missing one, or a shape that no model can have."""
    values = dict(data)
    own = values.get("own")
    if own is not None:
        shape = dict(own["geometry"])
        shape["layer_types"] = tuple(shape["layer_types"])
        values["own"] = OwnModel(Geometry(**shape), str(own["stored"]))
    return PlanQuestion(**values | {"settings": tuple(values.get("settings", ()))})
