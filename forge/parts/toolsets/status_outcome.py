"""What a rig's status is: its halves, the closed set of next steps, and the lines for people.

Reads nothing; knows no plane and no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field

from forge.parts.ground.results import Outcome
from forge.parts.toolsets.engine_load import EngineLoad

StatusState = Literal["stopped", "starting", "ready", "failed", "unknown"]
StatusSituation = Literal[
    "settings", "unread", "no machine", "over", "stopped", "starting", "half-started", "silent",
    "busy", "ready",
]  # fmt: skip
# Every next step that a status can name, by what there is. Words in braces are the rig's own.
STATUS_STEPS: Mapping[StatusSituation, str] = {
    "settings": "mend tpu.env as the note says, then get_system_status()",
    "unread": "get_system_status() again",
    "no machine": "find_{hardware}()",
    "over": "list_orphans()",
    "stopped": "serve_model()",
    "starting": "wait_for_{ready}_ready(wait_s=50)",
    "half-started": "stop_model()",
    "silent": "get_{logs}()",
    "busy": "get_job(job_id='{job}', wait_s=50)",
    "ready": "query_gemma4(prompt=…)",
}
_STATUS_BAR = 20  # characters


class MachineHalf(BaseModel):
    """The place where the model server runs. GB are 1e9 bytes; null: not known."""

    place: str
    memory_available_gb: float | None = None
    memory_total_gb: float | None = None
    disk_free_gb: float | None = None
    missing: str = ""


class CostHalf(BaseModel):
    """What the place costs. null: not known, and `missing` says why; age by price, no invoice."""

    billed: bool | None = Field(description="false: nothing is billed now.")
    what: str = Field(default="", description="What is billed.")
    hours: float | None = None
    usd_per_hour: float | None = None
    usd_so_far: float | None = None
    ends_at: str = Field(default="", description="UTC; empty: it carries no expiry.")
    life_used: float | None = Field(default=None, description="Part of its time, 0 to 1.")
    missing: str = ""


class LastRun(BaseModel):
    """The newest run of its kind that this installation made."""

    name: str
    date: str
    line: str


class StatusOutcome(Outcome):
    """The rig as it is now, read from the process table and the journal, not from memory."""

    summary: str = Field(description="One sentence, then bars of what is used up, if known.")
    rig: str
    state: StatusState
    model: str
    endpoint: str = ""
    pid: int | None = None
    started_at: str = ""
    machine: MachineHalf
    load: EngineLoad
    cost: CostHalf
    last_benchmark: LastRun | None = None
    last_probe: LastRun | None = None
    jobs: list[str] = Field(default_factory=list, description="Unfinished and recent jobs.")
    notes: list[str] = Field(default_factory=list)
    memory: str = Field(default="", description="Whether the model fits, with the sum.")
    settings: dict[str, str] = Field(
        default_factory=dict, description="Each value with where it came from."
    )


def status_step(situation: StatusSituation, words: Mapping[str, str], job_id: str = "") -> str:
    """The one next step, in the words of the rig's vocabulary."""
    return STATUS_STEPS[situation].format_map({**words, "job": job_id})


def status_lines(
    sentence: str, machine: MachineHalf, load: EngineLoad, cost: CostHalf
) -> list[str]:
    """The summary: a sentence, and a bar for each thing that can be used up and is known."""
    lines = [sentence]
    available, total = machine.memory_available_gb, machine.memory_total_gb
    if available is not None and total:
        disk = f", {machine.disk_free_gb} GB of disk free" if machine.disk_free_gb else ""
        words = f"{max(0.0, total - available):.1f} of {total:.1f} GB taken{disk}"
        lines.append(f"memory {_bar_of(1 - available / total)} {words}")
    if load.kv_used_share is not None:
        lines.append(f"cache  {_bar_of(load.kv_used_share)} {load.sentence}")
    elif load.sentence:
        lines.append(f"load   {load.sentence}")
    if cost.life_used is not None:
        lines.append(f"time   {_bar_of(cost.life_used)} {cost_words(cost)}")
    return lines


def cost_words(cost: CostHalf) -> str:
    """What is billed, in words; empty where nothing is or nobody knows."""
    if not cost.billed:
        return ""
    money = "at an unknown price" if cost.usd_so_far is None else f"{cost.usd_so_far:.2f} USD"
    ends = f", ends at {cost.ends_at}" if cost.ends_at else ", without an end"
    return f"{cost.hours or 0.0:.1f} h so far, {money}{ends}"


def age_words(seconds: float) -> str:
    """A duration for people: the two largest units."""
    minutes = int(max(0.0, seconds)) // 60
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(max(0.0, seconds))} s"


def _bar_of(share: float) -> str:
    filled = round(_STATUS_BAR * min(1.0, max(0.0, share)))
    return "█" * filled + "·" * (_STATUS_BAR - filled)
