"""What a probe report is: closed records of what a served model can do, each with its evidence.

Knows no request and no server; subject, machine and engine are those of a benchmark's report.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from forge.parts.knowledge.report_schema import (
    RUN_ID_PATTERN,
    BenchEngine,
    BenchHardware,
    ClosedRecord,
    DayText,
    NonNegative,
    ReportText,
    ReportWord,
    Sha256Text,
    Subject,
    run_id_of,
)

# pass: it works. fail: it was tried and does not. silent: a 200 that hides that the wish was
# ignored. unsupported: an honest refusal. untested: nothing can be said, and why.
ProbeVerdict = Literal["pass", "fail", "silent", "unsupported", "untested"]
ProbeGroup = Literal["tools", "schema", "vision", "determinism", "context"]
PROBE_VERDICTS: tuple[ProbeVerdict, ...] = ("pass", "fail", "silent", "unsupported", "untested")
MOST_EXCHANGES = 40  # of one case

_ProbeCount = Annotated[int | None, Field(ge=0)]


class ProbeExchange(ClosedRecord):
    """One request and what came back, both as bounded text. status 0: nothing came back."""

    what: ReportWord
    request: ReportText
    status: int = Field(ge=0, le=999)
    answer: ReportText
    prompt_tokens: _ProbeCount = None
    completion_tokens: _ProbeCount = None
    seconds: NonNegative


class ProbeFinding(ClosedRecord):
    """What one case showed. Only an untested one may be without evidence; `greedy_baseline` has
    its own in the report's `greedy`."""

    case: Annotated[str, Field(pattern=r"^[a-z_]{3,40}$")]
    group: ProbeGroup
    verdict: ProbeVerdict
    detail: Annotated[str, Field(min_length=1, max_length=2000)]
    seconds: NonNegative = 0.0
    evidence: list[ProbeExchange] = Field(default_factory=list, max_length=MOST_EXCHANGES)

    @model_validator(mode="after")
    def _has_evidence(self) -> ProbeFinding:
        if self.verdict != "untested" and not self.evidence and self.case != "greedy_baseline":
            raise ValueError(f"{self.case} is {self.verdict} without evidence")
        return self


class GreedyText(ClosedRecord):
    """One greedy answer. sha256, size: of the raw bytes (reasoning, a zero byte, content), which
    decide; `text` has been cleaned and is for people. repeats: the second run gave the same."""

    prompt: ReportWord
    sha256: Sha256Text
    size: int = Field(ge=0, description="Bytes.")
    text: ReportText
    finish_reason: ReportWord = ""
    repeats: bool


class ProbeRunFacts(ClosedRecord):
    """Which run this is. id is the file's stem; a run that was cut short says so in `state`."""

    id: Annotated[str, Field(pattern=f"^{RUN_ID_PATTERN}$")]
    date: DayText
    rig: ReportWord = ""
    started: ReportWord = ""
    duration_s: NonNegative = 0.0
    state: Literal["complete", "cancelled", "killed"] = "complete"


class ProbeReport(ClosedRecord):
    """What one served model could do. context_limit: tokens of one conversation, and whose word
    that is. greedy_set: which prompts and lengths `greedy` was made with; others do not compare."""

    schema_version: Literal["1.0"] = "1.0"
    run: ProbeRunFacts
    subject: Subject
    hardware: BenchHardware
    engine: BenchEngine
    settings: dict[ReportWord, ReportWord] = Field(default_factory=dict, max_length=60)
    context_limit: int | None = Field(default=None, ge=1)
    limit_source: ReportWord = ""
    findings: list[ProbeFinding] = Field(min_length=1, max_length=40)
    greedy_set: ReportWord = ""
    greedy: list[GreedyText] = Field(default_factory=list, max_length=20)
    baseline: ReportWord = ""

    @model_validator(mode="after")
    def _hangs_together(self) -> ProbeReport:
        names = [finding.case for finding in self.findings]
        if len(set(names)) < len(names):
            raise ValueError("a case stands twice")
        first = run_id_of(self.run.date, self.subject.short, self.engine.name, self.hardware.slot)
        if self.run.id.partition("--")[0] != first:
            raise ValueError(f"the run's id must be {first}, with --rN for a repeat")
        return self


def probe_table(findings: list[ProbeFinding]) -> list[str]:
    """The findings as aligned lines: case, verdict, what was seen."""
    if not findings:
        return []
    width = max(len(finding.case) for finding in findings)
    return [f"{f.case:{width}}  {f.verdict:11}  {f.detail[:400]}" for f in findings]


def compared_greedy(now: ProbeReport, then: ProbeReport) -> tuple[ProbeVerdict, str]:
    """Whether the greedy answers of two reports are byte for byte the same, and what else differs.

    A prompt whose answer one of the two did not repeat by itself cannot tell the two apart.
    """
    if now.subject.model != then.subject.model:
        return "untested", f"{then.run.id} is of another model, {then.subject.model}"
    if not then.greedy or now.greedy_set != then.greedy_set:
        return ("untested", f"{then.run.id} holds no answers to these prompts at this length")
    differs = differing_probe_facts(now, then)
    beside = f"; differs: {', '.join(differs)}" if differs else "; nothing else differs"
    theirs = {text.prompt: text for text in then.greedy}
    changed, unsteady, same = [], [], 0
    for mine in now.greedy:
        other = theirs.get(mine.prompt)
        if other is not None and other.sha256 == mine.sha256:
            same += 1
        elif other is None or not (mine.repeats and other.repeats):
            unsteady.append(mine.prompt)
        else:
            changed.append(f"{mine.prompt} from {_first_difference(mine.text, other.text)}")
    head = f"{same} of {len(now.greedy)} answers are byte for byte those of {then.run.id}"
    if changed:
        return "fail", f"{head}; changed: {', '.join(changed)}{beside}"
    if unsteady:
        why = "cannot tell, one of the two runs did not repeat itself"
        return "untested", f"{head}; {', '.join(unsteady)}: {why}{beside}"
    return "pass", f"{head}{beside}"


def differing_probe_facts(now: ProbeReport, then: ProbeReport) -> list[str]:
    """What is not the same about two runs, each as 'what: earlier, then now'."""
    pairs: list[tuple[str, object, object]] = [
        ("encoding", then.subject.encoding, now.subject.encoding),
        ("KV type", then.subject.kv_dtype.value, now.subject.kv_dtype.value),
        ("engine", then.engine.name, now.engine.name),
        ("engine version", then.engine.version, now.engine.version),
        ("argv", _words_beside(then, now), _words_beside(now, then)),
        ("image", then.engine.image_digest, now.engine.image_digest),
        ("server build", then.engine.server, now.engine.server),
        ("hardware", then.hardware.slot, now.hardware.slot),
    ]
    for key in sorted(now.settings.keys() | then.settings.keys()):
        pairs.append((key, then.settings.get(key, "-"), now.settings.get(key, "-")))
    return [f"{what} {str(a)[:80]!r} then {str(b)[:80]!r}" for what, a, b in pairs if a != b]


def _words_beside(report: ProbeReport, other: ProbeReport) -> str:
    """The options of the engine's argument list, each with its value, that the other's lacks. The
    port says nothing about what is answered."""
    theirs = _argv_options(other.engine.argv)
    return " ".join(o for o in _argv_options(report.engine.argv) if o not in theirs)


def _argv_options(argv: list[str]) -> list[str]:
    options: list[str] = []
    for word in argv:
        if options and options[-1].startswith("--") and " " not in options[-1] and word[:1] != "-":
            options[-1] += f" {word}"
        else:
            options.append(word)
    return [option for option in options if not option.startswith("--port")]


def _first_difference(one: str, two: str) -> str:
    """Where two texts part, in words."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    return f"character {same}"
