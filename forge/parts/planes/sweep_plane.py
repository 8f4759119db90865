"""What a sweep needs of a provider: to ask for a machine, to look at the request, to cancel it.

Knows no sweep. Time is a port as well, so that hours of waiting can be simulated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from forge.parts.knowledge.sweep_plan import SweepRequest

SweepState = Literal["queued", "starting", "granted", "refused", "gone"]


class SweepClock(Protocol):
    """Time, as a port: the present in Unix seconds, and waiting."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The real time."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class SweepLook:
    """What the provider says of one request now.

    queued: waits for capacity. starting: capacity is assigned. granted: the machine runs. refused:
    it will never be granted, and is still there. gone: the provider itself said that nothing of
    that name exists, neither request nor machine. `said` is why a request was refused or vanished.
    """

    state: SweepState
    said: str = ""
    provider_id: str = ""
    created_at: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


class SweepPlane(Protocol):
    """The verbs of a provider that a sweep needs. A queued resource fits, and so does a machine
    that is created at once and may wait in a state of its own.

    `ask` sends all of the request in one call and returns once the provider took it; it does not
    wait for the machine. It raises RigError with the provider's text: the classes of CapacityPlane,
    UNKNOWN where the call's fate is not known. `look` covers everything that the request made: gone
    means that neither the request nor a machine of that name exists in its zone; what cannot be
    read raises. `cancel` ends both, whatever state they are in; that there is nothing is no error.

    `look_every_s`: seconds between two looks. `settle_s`: a request that cannot be seen so many
    seconds after its call ended will never be. `gone_s`: how long an accepted cancel may take to
    be seen. `queue_is_free`: whether a request costs nothing until it is granted. A plane may have
    `asks_in_one_call`: an ask is one request to the provider, so that one which it refused made
    nothing.
    """

    look_every_s: float
    settle_s: float
    gone_s: float
    queue_is_free: bool

    async def ask(self, request: SweepRequest) -> None: ...
    async def look(self, request: SweepRequest) -> SweepLook: ...
    async def cancel(self, request: SweepRequest) -> None: ...
