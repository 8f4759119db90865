"""What a place costs while it is there: the optional verb of planes that are billed, its answer.

Knows no provider. A plane that rents nothing has no such verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RunningCost:
    """What is billed now. Money in USD, times in hours and Unix seconds; None: nobody knows it."""

    what: str
    hours: float
    usd_per_hour: float | None = None
    usd: float | None = None
    expires_unix: float | None = None


class BilledPlane(Protocol):
    """The verb. It reads the provider's own books, and gives None where nothing is rented now."""

    async def cost_so_far(self) -> RunningCost | None: ...


def cost_since(
    what: str,
    created_unix: float,
    usd_per_hour: float | None,
    expires_unix: float | None,
    now_unix: float,
) -> RunningCost:
    """The cost of something billed by the hour since its creation: age by price.

    What an invoice adds (disk, traffic, minimum times) is not in it.
    """
    hours = max(0.0, now_unix - created_unix) / 3600
    usd = None if usd_per_hour is None else hours * usd_per_hour
    return RunningCost(what, hours, usd_per_hour, usd, expires_unix)
