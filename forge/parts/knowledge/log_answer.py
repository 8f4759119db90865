"""What the failure bank answers about a log: the forms that triage.py prints and the server reads.

Knows no log, no signature and no program.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LOG_BYTES = 32_000_000  # of one log; beyond it a quarter from the head and the rest from the tail
NO_FAILURE = "no failure found"

FailureStage = Literal[
    "capacity",
    "quota",
    "permission",
    "boot",
    "image",
    "download",
    "load",
    "compile",
    "memory",
    "serve",
    "client",
]
FailureCertainty = Literal["certain", "likely", "possible"]
FailureChangeKind = Literal["flag", "setting", "package", "place", "grant", "run", "act"]


@dataclass(frozen=True, slots=True)
class FailureChange:
    """One change as data: what, from what, to what. `argv` where it is a command, never run here.

    `kind` is flag (of the engine), setting (an environment variable or a field), package, place
    (zone, region, machine), grant (a role), run (a command) or act (a person's decision).
    """

    kind: FailureChangeKind
    name: str
    old: str = ""
    new: str = ""
    argv: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.argv:
            return f"run: {shlex.join(self.argv)}"
        if not self.new:
            return self.name
        return f"{self.name}: {self.old or 'as it is'} -> {self.new}"


@dataclass(frozen=True)
class FailureAnswer:
    """One fault that a log reports. `line` is quoted from the log (`line_number` from 1): data.

    `numbers` are what was read from the line, `futile` what would not help.
    """

    kind: str
    stage: FailureStage
    certainty: FailureCertainty
    line: str
    line_number: int
    cause: str
    changes: tuple[FailureChange, ...]
    futile: tuple[str, ...]
    numbers: Mapping[str, str]
    upstream: str


@dataclass(frozen=True)
class LogAnswer:
    """What a log of `lines` rows says: its failures, the one that explains most first.

    Where there is none, `unexplained` quotes the last rows that report an error all the same
    (`unexplained_count` are there), and `excerpt` has them among their neighbours: both redacted.
    """

    lines: int
    failures: tuple[FailureAnswer, ...] = ()
    unexplained: tuple[str, ...] = ()
    unexplained_count: int = 0
    excerpt: str = ""

    @property
    def summary(self) -> str:
        """One line for people: the first failure, or NO_FAILURE, or that errors are unexplained."""
        if self.failures:
            first = self.failures[0]
            return f"{first.kind} ({first.stage}, {first.certainty}): {first.cause}"
        if self.unexplained_count:
            count = self.unexplained_count
            return f"No known failure; {count} lines report errors that nothing explains."
        return NO_FAILURE
