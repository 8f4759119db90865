"""Carries out a plan of probes in probe.py's process: case after case, each told as it happens.

Reads a plan, appends events to a file, and ends when its parent is gone. Knows no rig, no report
and no folder but the one that it was given.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.probe_client import ProbeClient
from forge.parts.boundaries.probe_plan import (
    PROBE_EVENTS_FILE,
    PROBE_PLAN_FILE,
    ProbeEvent,
    ProbeEventKind,
    ProbePlan,
)
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.probe_report import ProbeExchange
from forge.parts.toolsets.probe_asking import Judgement, ProbeAsker, barred_judgement
from forge.parts.toolsets.probe_context import probe_context_limit
from forge.parts.toolsets.probe_greedy import GREEDY_SET, probe_greedy
from forge.parts.toolsets.probe_schema import probe_schema
from forge.parts.toolsets.probe_tool_calls import TOOL_SCENARIOS, probe_tool_scenario
from forge.parts.toolsets.probe_vision import probe_picture

# Every case by name. None of them raises over what a server answers.
PROBE_RUNS: dict[str, Callable[[ProbeAsker], Awaitable[Judgement]]] = {
    **{s.case: partial(probe_tool_scenario, scenario=s) for s in TOOL_SCENARIOS},
    "schema_thinking_off": partial(probe_schema, thinking=False),
    "schema_thinking_on": partial(probe_schema, thinking=True),
    "vision_picture": probe_picture,
    "greedy_repeats": probe_greedy,
    "context_at_limit": partial(probe_context_limit, above=False),
    "context_above_limit": partial(probe_context_limit, above=True),
}
_PARENT_SEEN_EVERY_S = 1.0


class ProbeRun:
    """One plan under way; `tell` gets each event as it happens."""

    def __init__(self, plan: ProbePlan, tell: Callable[[ProbeEvent], None]) -> None:
        key = os.environ.get(plan.api_key_variable, "") if plan.api_key_variable else ""
        client = ProbeClient(plan.base_url, key)
        self._plan, self._tell = plan, tell
        self._asker = ProbeAsker(client, plan.model, plan.timeout_s, plan.facts)
        self._asker.tell = lambda what: self._say("asking", what=what)
        self._asker.keep = self._kept
        self._begun: float | None = None
        self._case = ""
        self._greedy_told = 0

    async def run(self) -> None:
        """Ask a plain question, then every case of the plan."""
        plain = barred_judgement(await self._asker.ask("a plain question", "Say hello.", 8))
        if plain is not None:
            self._say("barred", detail=plain.detail)
            return
        self._begun = time.monotonic()
        for case in self._plan.cases:
            self._case, self._asker.exchanges, begun = case, [], time.monotonic()
            self._say("begun")
            judged = await PROBE_RUNS[case](self._asker)
            self._say(
                "judged",
                verdict=judged.verdict,
                detail=judged.detail[:1900],
                seconds=round(time.monotonic() - begun, 3),
            )
        self._case = ""
        self._say("end")

    def _kept(self, exchange: ProbeExchange) -> None:
        self._say("answered", exchange=exchange)

    def _say(self, event: ProbeEventKind, **fields: Any) -> None:
        texts = self._asker.greedy[self._greedy_told :]
        self._greedy_told += len(texts)
        if texts:
            fields |= {"greedy": texts, "greedy_set": GREEDY_SET}
        at = 0.0 if self._begun is None else round(time.monotonic() - self._begun, 3)
        self._tell(ProbeEvent(event=event, at_s=at, case=self._case, **fields))


async def _while_parent_lives(work: Coroutine[Any, Any, None], parent: int) -> None:
    """Run `work` until it ends, or until nobody is left to read what it tells."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if os.getppid() != parent:
            task.cancel()
            await asyncio.wait({task})
            raise RigError("CANCELLED", "the process that asked for the probes is gone")
        await asyncio.wait({task}, timeout=_PARENT_SEEN_EVERY_S)
    await task


def run_probe_folder(folder: Path) -> int:
    """Carry out the plan in `folder`, append events beside it; returns 0 when all was asked.

    Raises RigError INVALID for a plan that is none or names a case that is none.
    """
    try:
        plan = ProbePlan.model_validate_json((folder / PROBE_PLAN_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise RigError("INVALID", f"{folder} holds no plan: {type(error).__name__}") from None
    if unknown := [case for case in plan.cases if case not in PROBE_RUNS]:
        raise RigError("INVALID", f"there is no probe {unknown[0][:60]}")
    with (folder / PROBE_EVENTS_FILE).open("a", buffering=1, encoding="utf-8") as file:

        def tell(event: ProbeEvent) -> None:
            file.write(event.model_dump_json(exclude_defaults=True) + "\n")

        run = ProbeRun(plan, tell).run()
        asyncio.run(_while_parent_lives(run, plan.parent_pid or os.getppid()))
    return 0
