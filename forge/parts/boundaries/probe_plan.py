"""What probe.py is to ask, and what it tells as it goes: files that outlive both processes.

The server writes the plan and reads the events, the program the other way round. Knows no case.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from forge.parts.knowledge.probe_report import GreedyText, ProbeExchange, ProbeVerdict
from forge.parts.knowledge.report_schema import ClosedRecord

PROBE_PROGRAM = "probe.py"
PROBE_PLAN_FILE = "plan.json"
PROBE_EVENTS_FILE = "events.jsonl"

# asking: a request goes out. answered: what came back. barred: not even a plain question is
# answered, and nothing else was asked. begun, judged: a case. end: everything was asked.
ProbeEventKind = Literal["asking", "answered", "barred", "begun", "judged", "end"]


class ProbeFacts(BaseModel):
    """What is known of the served model before it is asked. None: nobody says."""

    model_config = ConfigDict(extra="forbid")

    context_limit: int | None = None
    limit_source: str = ""
    vision: bool | None = None
    vision_source: str = ""


class ProbePlan(BaseModel):
    """Which cases to put to which server, in this order. timeout_s: longest wait for one answer, in
    seconds. `api_key_variable` names an environment variable: a key stands in no file and in no
    argument list. parent_pid: whose end ends the probes; 0: whoever starts the program."""

    model_config = ConfigDict(extra="forbid")

    base_url: str
    model: str
    cases: list[str] = Field(min_length=1)
    timeout_s: float = Field(gt=0)
    facts: ProbeFacts = Field(default_factory=ProbeFacts)
    api_key_variable: str = ""
    parent_pid: int = Field(default=0, ge=0)


class ProbeEvent(ClosedRecord):
    """One line of the events. at_s: seconds since the plain question was answered; before that 0.
    case: the one under way. greedy: the texts that came since the last event, of the prompts that
    `greedy_set` names."""

    event: ProbeEventKind
    at_s: float = Field(default=0.0, ge=0)
    case: str = ""
    what: str = ""
    exchange: ProbeExchange | None = None
    verdict: ProbeVerdict | None = None
    detail: str = ""
    seconds: float = Field(default=0.0, ge=0)
    greedy: list[GreedyText] = Field(default_factory=list)
    greedy_set: str = ""
