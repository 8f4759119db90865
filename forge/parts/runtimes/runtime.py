"""What a runtime is to the toolsets: it checks its environment, gets weights, plans a launch.

Runtimes know no plane: they never start a process that is to stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.knowledge.geometry import Geometry
from forge.parts.planes.plane import Launch, Room

# Told with a fraction (0 to 1) of the phase and a few words.
PhaseReport = Callable[[float, str], None]


@dataclass(frozen=True)
class Need:
    """One thing that a runtime needs and whether it is there; `remedy` says how to get it.

    `only_for` names the case that needs it; empty when every start does. Only the latter refuse.
    """

    name: str
    present: bool
    detail: str
    remedy: str = ""
    only_for: str = ""


@dataclass(frozen=True)
class ServedModel:
    """Weights that are ready to be served: where they lie and what serving them takes, in bytes.

    `geometry` is their shape, None where it is not understood; `encoding` how the file holds them,
    where that is not the settings' choice; `context` the tokens that one conversation may have.
    """

    name: str
    folder: Path
    architecture: str
    size_on_disk: int
    memory_needed: Mapping[str, int]
    beside: str = ""
    geometry: Geometry | None = None
    encoding: str = ""
    context: int = 0

    @property
    def memory_total(self) -> int:
        return sum(self.memory_needed.values())


MetricUse = Literal[
    "running",
    "waiting",
    "kv_used_share",
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
]


class Runtime(Protocol):
    """The verbs of a runtime.

    `phases` are its own names for the four steps of a start, in this order: environment, weights,
    load, first token. `metric_names` has the engine's own name on /metrics for what it is used as;
    empty where the engine has no /metrics. `resolved` has the values that the engine itself reports
    once it is up, on its own pages or in the log of its start, by its own names.
    """

    vocabulary: Mapping[str, str]
    phases: Sequence[str]
    metric_names: Mapping[MetricUse, str]

    def api_key(self) -> str: ...

    async def needs(self) -> Sequence[Need]: ...
    def local_model(self, name: str) -> ServedModel | None: ...
    async def fetch_model(self, name: str, room: Room, report: PhaseReport) -> ServedModel: ...
    def launch(self, model: ServedModel) -> Launch: ...
    def loading_step(self, log: str) -> str: ...
    def loading_fault(self, log: str) -> str: ...
    async def resolved(self, client: ChatClient, log: str) -> Mapping[str, str]: ...
