"""What probe.py has told so far: the cases that were judged, and the one that it is at.

Reads the events of a run that goes on, ended, was cancelled or was killed alike; a torn last line
harms nothing. Knows no process and no report's frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.parts.boundaries.probe_plan import PROBE_EVENTS_FILE, ProbeEvent
from forge.parts.knowledge.probe_report import (
    PROBE_VERDICTS,
    GreedyText,
    ProbeExchange,
    ProbeFinding,
    probe_table,
)
from forge.parts.toolsets.probe_cases import PROBE_BY_NAME, ProbeCase


@dataclass
class ProbeFound:
    """What the events in `folder` say; `news` takes in what was added since.

    case: the one under way. barred: why not even a plain question was answered. ended: whether
    everything was asked. seconds: how long the cases took until the last event.
    """

    folder: Path
    findings: list[ProbeFinding] = field(default_factory=list)
    greedy: list[GreedyText] = field(default_factory=list)
    greedy_set: str = ""
    case: ProbeCase | None = None
    barred: str = ""
    ended: bool = False
    seconds: float = 0.0
    _evidence: list[ProbeExchange] = field(default_factory=list)
    _offset: int = 0

    def news(self) -> list[ProbeEvent]:
        """Take in every whole line that was not read yet; returns their events."""
        try:
            with (self.folder / PROBE_EVENTS_FILE).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            try:
                event = ProbeEvent.model_validate_json(line)
                self._take(event)
            except ValidationError:
                continue
            events.append(event)
        return events

    def _take(self, event: ProbeEvent) -> None:
        self.seconds = event.at_s
        self.greedy += event.greedy
        self.greedy_set = event.greedy_set or self.greedy_set
        match event.event:
            case "begun":
                self.case, self._evidence = PROBE_BY_NAME.get(event.case), []
            case "answered" if event.exchange is not None:
                self._evidence.append(event.exchange)
            case "judged" if self.case is not None:
                case, self.case = self.case, None
                self.findings.append(
                    ProbeFinding(
                        case=case.name,
                        group=case.group,
                        verdict=event.verdict or "untested",
                        detail=event.detail,
                        seconds=event.seconds,
                        evidence=self._evidence,
                    )
                )
            case "barred":
                self.barred = event.detail
            case "end":
                self.ended = True

    def cut_short(self, state: str) -> None:
        """Make the case under way a finding: untested, with the evidence that there is."""
        if self.case is None:
            return
        self.findings.append(
            ProbeFinding(
                case=self.case.name,
                group=self.case.group,
                verdict="untested",
                detail=f"the probe was {state} in the middle of it",
                evidence=self._evidence,
            )
        )
        self.case = None

    @property
    def worth_keeping(self) -> bool:
        """Whether anything was asked and answered."""
        under_way = self.case is not None and bool(self._evidence)
        return under_way or any(finding.evidence for finding in self.findings)


def found_so_far(findings: Sequence[ProbeFinding]) -> dict[str, Any]:
    """A job's result: the table, each case's verdict, and how often each verdict was given."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "table": probe_table(list(findings)),
        "verdicts": {finding.case: finding.verdict for finding in findings},
        "counts": {verdict: counts[verdict] for verdict in PROBE_VERDICTS if counts[verdict]},
    }
