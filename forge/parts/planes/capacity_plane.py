"""What a plane that rents machines is to the toolsets: offers, quota, create, list, destroy.

Such a plane knows no runtime and judges no ownership: it reports labels as the provider has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import BaseModel, Field

from forge.parts.ground.names import slug_of
from forge.parts.ground.settings import RigSettings

MANAGED_BY = "gemma4-rigs"
_NAME_LIMIT = 63  # characters: the shortest limit of the providers (Compute Engine, RFC 1035)

RentalState = Literal["pending", "running", "stopping", "stopped", "failed"]
RentalMarket = Literal["flex-start", "spot", "on-demand", "reserved"]


class CapacitySettings(RigSettings):
    """The keys of every plane that rents. What to rent and where, a plane's own class adds."""

    zones: str = Field(
        default="",
        max_length=1000,
        pattern=r"^[a-z0-9, -]*$",
        description="Zones to look in, by comma, the preferred one first; empty: all that have it.",
    )
    markets: str = Field(
        default="",
        max_length=100,
        pattern=r"^[a-z, -]*$",
        description="Ways of renting, by comma, the preferred one first.",
    )
    budget_usd: float = Field(
        ge=0, le=10_000, description="Most that one machine may cost until its hard stop, in USD."
    )
    max_hours: float = Field(
        default=4.0, ge=0.25, le=168, description="Longest life of a machine, in hours."
    )
    unknown_price_ok: bool = Field(
        default=False, description="1 creates a machine although nobody knows its price."
    )
    no_hard_stop_ok: bool = Field(
        default=False, description="1 creates a machine that the provider will never end by itself."
    )
    destroy_asks_user: bool = Field(
        default=True,
        description="0 takes plan_destroy's token as enough where the client could ask its user.",
    )


@dataclass(frozen=True)
class Offer:
    """A place that has the machine on its list. `how_known` says what `available` rests on."""

    zone: str
    market: RentalMarket
    price_per_hour_usd: float | None
    price_source: str
    available: Literal["yes", "no", "unknown"]
    how_known: str


@dataclass(frozen=True)
class Quota:
    """How many machines of this rig's kind the account may have where a zone is, by market: spot
    and flex-start draw on another quota than on-demand."""

    name: str
    limit: int
    used: int


@dataclass(frozen=True)
class Order:
    """One machine to create. All of it goes out with the create call itself, the labels too.

    `intent` is this call's id, for the provider's own idempotency key where it has one.
    `life_s` is when the provider must end the machine, in seconds after it began to run; `valid_s`
    how long the order may wait for capacity before, where it can wait.
    """

    name: str
    zone: str
    intent: str
    labels: Mapping[str, str]
    life_s: int
    market: RentalMarket = "on-demand"
    valid_s: int = 0


class Rental(BaseModel):
    """Something that is rented, as the provider reports it now. All five of kind, project, zone,
    name and provider_id together with created_at make it that very thing and no namesake."""

    kind: str = Field(default="machine", description="machine, disk, address, request.")
    name: str
    zone: str
    project: str = Field(description="The project or account that pays.")
    provider_id: str
    created_at: str = Field(description="As the provider wrote it.")
    created_unix: float
    state: RentalState
    labels: dict[str, str] = Field(default_factory=dict)
    price_per_hour_usd: float | None = None
    market: str = Field(default="", description="How it is rented: spot, flex-start and so on.")


@dataclass(frozen=True)
class Census:
    """Everything of the project in all places, also what is not ours; and what was not readable.

    With anything in `unread` nothing can be said to be absent.
    """

    rentals: Sequence[Rental]
    unread: Sequence[str] = field(default_factory=tuple)


class CapacityPlane(Protocol):
    """The verbs of a plane that rents. Reads return or raise within 5 s, `create` and `destroy`
    within 20 s, so that no tool outlasts a client's patience; a longer act is the provider's own.

    `create` sends all of the order in one call. `destroy` ends that very thing, by its
    `provider_id` where the provider takes one. `census` looks in all places, not in the current.

    Refusals are RigErrors: CAPACITY (stockout: another zone may do), QUOTA (another region may do),
    DENIED (a permission or a usage rule: stop), AUTH (no valid credentials: stop), INVALID, EXISTS.
    `create` and `destroy` raise UNKNOWN, never TIMEOUT or UNREACHABLE, when the call was sent and
    its fate is not known. Reads raise NOT_FOUND only when the provider itself said so; what cannot
    be read or parsed is UNKNOWN or UNREACHABLE, and never an empty list.

    `hard_stop` says how the provider ends a machine at the end of its life, empty where it cannot.
    `read_back_s` is how long an accepted change may take to be seen, `settle_s` after how long a
    create of unknown fate that still cannot be seen will never be: seconds, the first at most 10.
    """

    vocabulary: Mapping[str, str]
    hard_stop: str
    read_back_s: float
    settle_s: float

    async def offers(self) -> Sequence[Offer]: ...
    async def quota(self, zone: str, market: RentalMarket) -> Quota: ...
    async def create(self, order: Order) -> None: ...
    async def census(self) -> Census: ...
    async def describe(self, name: str, zone: str) -> Rental: ...
    async def destroy(self, rental: Rental) -> None: ...


def listed(text: str) -> list[str]:
    """The words of a setting that is a list by comma, in order, each once."""
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def rental_name(rig: str, owner: str) -> str:
    """The one name of this installation's machine: the rig's slug and a mark of the owner.

    Deterministic, so that a repeated create meets the provider's own refusal of a second namesake.
    """
    mark = hashlib.sha256(f"{rig}\n{owner}".encode()).hexdigest()[:6]
    return f"{slug_of(rig)[: _NAME_LIMIT - len(mark) - 1].rstrip('-')}-{mark}"


def rental_labels(rig: str, owner: str, intent: str, expires_unix: int) -> dict[str, str]:
    """The labels that a rented thing carries from its create call on.

    Values stay within lower-case letters, digits, dash and underscore, 63 at most.
    """
    return {
        "managed-by": MANAGED_BY,
        "rig": rig,
        "owner": owner,
        "intent": intent,
        "expires": str(expires_unix),
    }


def shown_order(
    rig: str, owner: str, zone: str, market: RentalMarket, hours: float, valid_s: int
) -> Order:
    """An order as it would go out, for showing: its intent and its end are made at the call."""
    life = round(hours * 3600)
    labels = rental_labels(rig, owner, "made-at-the-call", 0) | {"expires": "made-at-the-call"}
    return Order(rental_name(rig, owner), zone, "", labels, life, market, valid_s)


def is_ours(labels: Mapping[str, str], rig: str, owner: str) -> bool:
    """Whether all three marks are there, letter by letter. Never a prefix: `a` is not `a-q4_0`."""
    wanted = {"managed-by": MANAGED_BY, "rig": rig, "owner": owner}
    return bool(rig and owner) and all(labels.get(key) == mark for key, mark in wanted.items())


def expiry_of(labels: Mapping[str, str]) -> float | None:
    """When the thing should be gone, in Unix seconds; None without a readable mark."""
    text = labels.get("expires", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 11 else None
