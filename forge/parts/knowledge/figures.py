"""A number that carries its unit, source and date, or says that nobody has measured it.

Knows nothing about what the numbers are about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FigureKind = Literal["measured", "imported", "derived"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it comes from.

    value: in `unit`; None means unmeasured: nobody that we can cite has given it.
    source: a public document, a program with its version, or the sum that gave the number.
    date: of the source (ISO, or a year or month); the day it was read where it bears none.
    kind: measured by this project, imported from others, or derived by arithmetic.
    note: what a reader must know before using it, for example a figure that disagrees.

    Raises ValueError for a value without source or date: an unsourced number is not a figure.
    """

    value: int | float | None
    unit: str
    source: str = ""
    date: str = ""
    kind: FigureKind = "imported"
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is not None and not (self.source and self.date):
            raise ValueError(f"a figure of {self.value} {self.unit} needs a source and a date")

    def known(self, what: str) -> int | float:
        """The value; ValueError that names `what` when it is unmeasured."""
        if self.value is None:
            raise ValueError(f"{what} is unmeasured")
        return self.value


@dataclass(frozen=True, slots=True)
class SourcedFact:
    """One sentence about something that is no number, with its source and date."""

    text: str
    source: str
    date: str


def unmeasured_figure(unit: str, note: str = "") -> Figure:
    """A figure that nobody has given yet; `note` says what stands in the way."""
    return Figure(None, unit, note=note)
