"""What is asked of the report gate and what it answers: the forms of judge.py and the server.

Knows no table, no arithmetic and no program.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.report_schema import (
    BenchReport,
    ClosedRecord,
    KvDtype,
    ReportWord,
    Subject,
)

JUDGE_BYTES = 16_000_000  # of a question or an answer: the longest report, with all that it hears


class SubjectQuestion(ClosedRecord):
    """What is served, before there is a report on it. Empty and None: nobody knows.

    model: a repository id, 'embedded', or a folder. encoding: of the weights in memory. geometry:
    of a model that the table lacks, so that it can be judged too. max_model_len: tokens of one
    conversation. slot: of the hardware, as in a rig's name.
    """

    model: str = Field(max_length=4096)
    encoding: ReportWord = "unknown"
    geometry: Geometry | None = None
    kv_dtype: KvDtype | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    slot: ReportWord = ""


class KnownSubject(ClosedRecord):
    """What the tables make of it. chip: the slot's; of a slot that is in no table, the slot."""

    subject: Subject
    chip: ReportWord

    @property
    def is_gemma4(self) -> bool:
        """Whether the model is a repository of the Gemma 4 table: those alone have a size in it."""
        return bool(self.subject.size)


class JudgeQuestion(ClosedRecord):
    """Either a subject to be named or a report to be judged."""

    subject: SubjectQuestion | None = None
    report: BenchReport | None = None

    @model_validator(mode="after")
    def _asks_one_thing(self) -> JudgeQuestion:
        if (self.subject is None) == (self.report is None):
            raise ValueError("asks for a subject or for a report, and for one of them")
        return self


class JudgeAnswer(ClosedRecord):
    """What was asked for: the subject, or the report with `implied` worked out in every cell."""

    subject: KnownSubject | None = None
    report: BenchReport | None = None
