"""Every probe by name: its group and its title, for whoever plans one, asks it or tells of it.

Knows no request; what is asked and how an answer is read stands in the modules that probe.py has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.parts.knowledge.probe_report import ProbeGroup

# The order of a run: what may bring a server down, or take minutes, comes last.
PROBE_GROUPS: tuple[ProbeGroup, ...] = ("tools", "schema", "vision", "determinism", "context")


@dataclass(frozen=True)
class ProbeCase:
    """One capability that is asked for."""

    name: str
    group: ProbeGroup
    title: str


PROBE_CASES: tuple[ProbeCase, ...] = (
    ProbeCase("tool_one_call", "tools", "one tool, one call"),
    ProbeCase("tool_right_of_two", "tools", "the right one of two tools"),
    ProbeCase("tool_none_needed", "tools", "no tool needed"),
    ProbeCase("tool_two_parallel", "tools", "two calls in one answer"),
    ProbeCase("tool_missing_argument", "tools", "a missing argument is asked for"),
    ProbeCase("schema_thinking_off", "schema", "a JSON schema with thinking off"),
    ProbeCase("schema_thinking_on", "schema", "a JSON schema with thinking on"),
    ProbeCase("vision_picture", "vision", "one picture as a data URI"),
    ProbeCase("greedy_repeats", "determinism", "six greedy prompts, asked twice"),
    ProbeCase("context_at_limit", "context", "a conversation that fills the limit"),
    ProbeCase("context_above_limit", "context", "a conversation one token too long"),
)
PROBE_BY_NAME = {case.name: case for case in PROBE_CASES}
GREEDY_BASELINE_CASE = "greedy_baseline"  # no request of its own: two reports are compared


def planned_probes(groups: Sequence[str]) -> list[ProbeCase]:
    """The cases of these groups, in the order of a run."""
    return [case for group in PROBE_GROUPS if group in groups for case in _cases_of(group)]


def _cases_of(group: ProbeGroup) -> list[ProbeCase]:
    return [case for case in PROBE_CASES if case.group == group]
