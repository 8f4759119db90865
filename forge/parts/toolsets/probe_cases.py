"""Every probe by name: its group, its title, and the function that asks and judges.

What is asked and how an answer is read stands in one module for each group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from forge.parts.knowledge.probe_report import ProbeGroup
from forge.parts.toolsets.probe_asking import Judgement, ProbeAsker
from forge.parts.toolsets.probe_context import probe_context_limit
from forge.parts.toolsets.probe_greedy import probe_greedy
from forge.parts.toolsets.probe_schema import probe_schema
from forge.parts.toolsets.probe_tool_calls import TOOL_SCENARIOS, probe_tool_scenario
from forge.parts.toolsets.probe_vision import probe_picture

# The order of a run: what may bring a server down, or take minutes, comes last.
PROBE_GROUPS: tuple[ProbeGroup, ...] = ("tools", "schema", "vision", "determinism", "context")


@dataclass(frozen=True)
class ProbeCase:
    """One capability. `run` never raises over what a server answers."""

    name: str
    group: ProbeGroup
    title: str
    run: Callable[[ProbeAsker], Awaitable[Judgement]]


PROBE_CASES: tuple[ProbeCase, ...] = (
    *(
        ProbeCase(s.case, "tools", s.title, partial(probe_tool_scenario, scenario=s))
        for s in TOOL_SCENARIOS
    ),
    ProbeCase(
        "schema_thinking_off",
        "schema",
        "a JSON schema with thinking off",
        partial(probe_schema, thinking=False),
    ),
    ProbeCase(
        "schema_thinking_on",
        "schema",
        "a JSON schema with thinking on",
        partial(probe_schema, thinking=True),
    ),
    ProbeCase("vision_picture", "vision", "one picture as a data URI", probe_picture),
    ProbeCase("greedy_repeats", "determinism", "six greedy prompts, asked twice", probe_greedy),
    ProbeCase(
        "context_at_limit",
        "context",
        "a conversation that fills the limit",
        partial(probe_context_limit, above=False),
    ),
    ProbeCase(
        "context_above_limit",
        "context",
        "a conversation one token too long",
        partial(probe_context_limit, above=True),
    ),
)
GREEDY_BASELINE_CASE = "greedy_baseline"  # no request of its own: two reports are compared


def planned_probes(groups: Sequence[str]) -> list[ProbeCase]:
    """The cases of these groups, in the order of a run."""
    return [case for group in PROBE_GROUPS if group in groups for case in _cases_of(group)]


def _cases_of(group: ProbeGroup) -> list[ProbeCase]:
    return [case for case in PROBE_CASES if case.group == group]
