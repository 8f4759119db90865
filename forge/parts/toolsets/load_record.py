"""What this rig's own boots showed of loading: kept, and shown beside what others saw.

Knows no engine: whoever watches a boot writes down how it ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, Field

from forge.parts.ground.journal import utc_now
from forge.parts.ground.redact import clean
from forge.parts.ground.results import Outcome
from forge.parts.ground.state import json_object, private_folder
from forge.parts.knowledge.load_matrix import LOAD_MATRIX
from forge.parts.toolsets.toolset import RigContext, Toolset, rig_tool

_LOADS_FILE = "loads.jsonl"
_LOADS_SHOWN = 30


class LoadRow(BaseModel):
    """One trial of loading weights."""

    weights: str
    engine: str
    chip: str
    how: str = ""
    loads: bool
    cause: str = ""
    upstream: str = ""
    source: str
    date: str
    kind: str = Field(description="imported: others tried it; measured: this rig did.")


class LoadMatrixOutcome(Outcome):
    """Which weights load here and which do not."""

    rows: list[LoadRow]


class LoadRecord:
    """The rig's own trials, a line each in a file of its state folder."""

    def __init__(self, context: RigContext) -> None:
        self._context = context

    @property
    def path(self) -> Path:
        return self._context.paths.state / _LOADS_FILE

    def add(self, model: str, image: str, loads: bool, cause: str) -> None:
        """Note how a boot ended. Raises OSError, RigError."""
        row = LoadRow(
            weights=model,
            engine=self._context.vocabulary["engine"],
            chip=str(getattr(self._context.settings, "chip", "")),
            how=image,
            loads=loads,
            cause=clean(cause, 600),
            source=f"{self._context.rig} {self._context.version}",
            date=utc_now()[:10],
            kind="measured",
        )
        private_folder(self.path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, flags, 0o600), "a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")

    def rows(self) -> list[LoadRow]:
        """The trials on record, the newest last; lines that cannot be read are left out."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines[-_LOADS_SHOWN:]:
            try:
                found.append(LoadRow.model_validate(json_object(line)))
            except ValueError:
                continue
        return found


class LoadMatrixToolset(Toolset):
    """The matrix."""

    toolset_name = "loads"

    @rig_tool(title="What loads here", effect="reads")
    async def get_load_matrix(self) -> LoadMatrixOutcome:
        """Which weights load on {engine} and which do not, with cause and upstream issue: what
        others tried, with its source, and what this rig's own boots showed. Changes nothing."""
        return self._shown(LoadRecord(self.context).rows())

    def _shown(self, own: list[LoadRow]) -> LoadMatrixOutcome:
        chip = str(getattr(self.context.settings, "chip", ""))
        known = [
            LoadRow(
                weights=one.weights,
                engine=one.engine,
                chip=chip if chip in one.chips else ", ".join(one.chips),
                how=one.how,
                loads=one.loads,
                cause=one.cause,
                upstream=one.upstream,
                source=one.source,
                date=one.date,
                kind="imported",
            )
            for one in LOAD_MATRIX
            if one.engine == self.context.vocabulary["engine"]
        ]
        return LoadMatrixOutcome(
            summary=f"{len(own)} trials of this rig, {len(known)} of others.",
            next_step="plan_deployment()",
            rows=[*known, *own],
        )
