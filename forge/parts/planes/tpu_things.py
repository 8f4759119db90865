"""Reads the Cloud TPU API's queued resources and nodes in a plane's words.

Pure functions over gcloud's JSON. Knows no command and no runtime, and judges no ownership.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from forge.parts.boundaries.gcloud_answers import field_labels, field_text
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.planes.capacity_plane import Rental, RentalMarket, RentalState
from forge.parts.planes.sweep_plane import SweepLook, SweepState
from forge.parts.planes.tpu_catalogue import (
    PREEMPTIBLE_MARKETS,
    tpu_chips,
    tpu_family,
    tpu_price,
)

# The states of a queued resource and of a node are those of the API, v2 and v2alpha1, as gcloud
# 528's messages list them: what each means to a plane, and to whoever waits for a machine.
_QUEUED_STATES: dict[str, tuple[RentalState, SweepState]] = {
    "CREATING": ("pending", "queued"),
    "ACCEPTED": ("pending", "queued"),
    "WAITING_FOR_RESOURCES": ("pending", "queued"),
    "PROVISIONING": ("pending", "starting"),
    "ACTIVE": ("pending", "starting"),  # until its node can be read, which then decides
    "FAILED": ("failed", "refused"),
    "SUSPENDING": ("stopping", "refused"),
    "SUSPENDED": ("stopped", "refused"),
    "DELETING": ("stopping", "refused"),
}
_NODE_STATES: dict[str, tuple[RentalState, SweepState]] = {
    "CREATING": ("pending", "starting"),
    "STARTING": ("pending", "starting"),
    "UNHIDING": ("pending", "starting"),
    "READY": ("running", "granted"),
    "RESTARTING": ("running", "starting"),
    "REIMAGING": ("running", "starting"),
    "REPAIRING": ("running", "starting"),
    "STOPPING": ("stopping", "refused"),
    "DELETING": ("stopping", "refused"),
    "HIDING": ("stopping", "refused"),
    "STOPPED": ("stopped", "refused"),
    "HIDDEN": ("stopped", "refused"),
    "PREEMPTED": ("stopped", "refused"),
    "TERMINATED": ("stopped", "refused"),
    "UNKNOWN": ("failed", "refused"),
}
_WITHOUT_NODE = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED")
_DEAD_STATES = ("FAILED", "SUSPENDED")
_ENDING_STATES = ("SUSPENDING", "SUSPENDED", "DELETING", "FAILED")
_TPU_PATH = re.compile(r"projects/[^/]+/locations/([^/]+)/(?:queuedResources|nodes)/([^/]+)")


@dataclass(frozen=True)
class TpuThing:
    """What the API has under one name in one zone: a queued resource, its node, or both.

    `queued` and `node` are the API's objects as gcloud prints them; never both None.
    """

    zone: str
    name: str
    queued: Mapping[str, Any] | None
    node: Mapping[str, Any] | None

    @property
    def queued_state(self) -> str:
        """The queued resource's state; empty without one. Raises UNKNOWN for one not known here."""
        if self.queued is None:
            return ""
        return _known_state("queued resource", self.queued, _QUEUED_STATES, "state", "state")

    @property
    def node_state(self) -> str:
        """The same of the node."""
        return "" if self.node is None else _known_state("node", self.node, _NODE_STATES, "state")

    @property
    def states(self) -> tuple[RentalState, SweepState]:
        """What it is now. A node decides, unless its request takes it away already."""
        queued, node = self.queued_state, self.node_state
        if node and queued not in ("SUSPENDING", "DELETING"):
            return _NODE_STATES[node]
        return _QUEUED_STATES[queued]

    @property
    def holds_node(self) -> bool:
        """Whether a machine is there, or will be or was this moment: PROVISIONING to SUSPENDING."""
        return self.node is not None or self.queued_state not in _WITHOUT_NODE

    @property
    def dead(self) -> bool:
        """Whether the request will never be granted any more. It holds its quota all the same."""
        return self.node is None and self.queued_state in _DEAD_STATES

    @property
    def labels(self) -> dict[str, str]:
        """The labels. They are the node's: a queued resource has none but those it gives it."""
        if self.node is not None:
            return field_labels(self.node, "labels")
        return field_labels(self.queued, "tpu", "nodeSpec", 0, "node", "labels")

    @property
    def accelerator(self) -> str:
        """The accelerator type, such as v5litepod-1; empty where the API does not tell it."""
        if self.node is not None:
            return field_text(self.node, "acceleratorType")
        return field_text(self.queued, "tpu", "nodeSpec", 0, "node", "acceleratorType")

    @property
    def market(self) -> RentalMarket:
        """How it is rented. Of a flex-start only the alpha command's answer tells it."""
        queued, rules = self.queued or {}, (self.node or {}).get("schedulingConfig") or {}
        model = str(queued.get("provisioningModel") or "")
        spot = "spot" in queued or bool(rules.get("spot") or rules.get("preemptible"))
        # First the tier: gcloud 528's alpha --spot says STANDARD beside it.
        if spot or model == "SPOT":
            return "spot"
        if model == "FLEX_START":
            return "flex-start"
        guaranteed = queued.get("guaranteed") or {}
        reserved = "reservationName" in queued or bool(guaranteed.get("reserved"))
        return "reserved" if reserved or rules.get("reserved") else "on-demand"

    @property
    def provider_id(self) -> str:
        """The node's number; of a request without a node, which has none, its whole name."""
        number = "" if self.node is None else field_text(self.node, "id")
        return number or field_text(self.queued or self.node, "name")

    @property
    def created_at(self) -> str:
        """When the node was created, or else the request, as Google wrote it."""
        return field_text(self.node if self.node is not None else self.queued, "createTime")


def tpu_things(queued: Iterable[Any], nodes: Iterable[Any]) -> list[TpuThing]:
    """The things of one zone, each queued resource with its node. Raises UNKNOWN for an object
    without a readable name: nothing could be said of it."""
    left = {tpu_place(node): node for node in nodes}
    found = []
    for one in queued:
        zone, name = tpu_place(one)
        held = next((at for at, node in left.items() if is_node_of(node, name)), None)
        found.append(TpuThing(zone, name, one, None if held is None else left.pop(held)))
    return [*found, *(TpuThing(*place, None, node) for place, node in left.items())]


def tpu_place(thing: Any) -> tuple[str, str]:
    """(zone, name) of a node or a queued resource. Raises UNKNOWN."""
    matched = _TPU_PATH.fullmatch(field_text(thing, "name"))
    if matched is None:
        raise RigError("UNKNOWN", "a thing in gcloud's answer has no name that can be read")
    return matched[1], matched[2]


def is_node_of(node: Any, request: str) -> bool:
    """Whether a node came of the request of that name; where it does not tell, by its own name."""
    link = field_text(node, "queuedResource")
    return (link.rsplit("/", 1)[-1] if link else tpu_place(node)[1]) == request


def tpu_rental(thing: TpuThing, project: str, chip: str, accelerator: str) -> Rental:
    """The thing as something rented. Its price is told for `accelerator` of `chip` alone; what
    holds no node costs nothing. Raises UNKNOWN for a state or a time that cannot be read."""
    price: float | None = None
    if tpu_family(thing.accelerator) == tpu_family(accelerator):
        price = tpu_price(chip, thing.accelerator, thing.zone, thing.market)[0]
    return Rental(
        kind="machine" if thing.holds_node else "request",
        name=thing.name,
        zone=thing.zone,
        project=project,
        provider_id=thing.provider_id,
        created_at=thing.created_at,
        created_unix=tpu_unix(thing.created_at),
        state=thing.states[0],
        labels=thing.labels,
        price_per_hour_usd=price if thing.holds_node else 0.0,
        market=thing.market,
    )


def tpu_look(thing: TpuThing | None) -> SweepLook:
    """What the thing means to a sweep; None is gone. Raises UNKNOWN as `tpu_rental` does."""
    if thing is None:
        return SweepLook("gone")
    state = thing.states[1]
    return SweepLook(
        state,
        said=_refused_words(thing) if state == "refused" else "",
        provider_id=thing.provider_id,
        created_at=thing.created_at,
        details={"market": thing.market, "accelerator": thing.accelerator},
    )


def tpu_ended(thing: TpuThing | None, provider_id: str, now: float) -> str:
    """In one line what became of the machine of that id; empty while it is there and runs, and
    where nothing tells. `now`: Unix seconds."""
    if thing is None:
        return (
            "its queued resource was deleted, which the provider never does by itself: somebody of "
            "the project did it, or the machine itself"
        )
    # An id with slashes is that of the request, noted before there was a node.
    other = provider_id not in ("", thing.provider_id) and "/" not in provider_id
    if thing.node is not None and other:
        return "another machine has its name now"
    if thing.states[1] != "refused":
        return ""
    if thing.node is not None and thing.queued_state not in _ENDING_STATES:
        return _node_end(thing.node_state)
    if thing.queued_state == "FAILED":
        return f"its request failed: {failed_words(thing)}"
    if thing.queued_state == "DELETING":
        return "it is being deleted"
    return _suspended_words(thing, now)


def failed_words(thing: TpuThing) -> str:
    """The provider's words for a request that failed, redacted, one line."""
    return clean(field_text(thing.queued, "state", "failedData", "error", "message"), 500)


def _refused_words(thing: TpuThing) -> str:
    if thing.node is not None and thing.queued_state not in _ENDING_STATES:
        return f"node state: {thing.node_state}"
    # Told by whom in words of our own: the sweep reads them as any other refusal.
    told = failed_words(thing) if thing.queued_state == "FAILED" else ""
    by = field_text(thing.queued, "state", "stateInitiator").lower()
    return told or f"queued resource state: {thing.queued_state}{f' (by: {by})' if by else ''}"


def _node_end(state: str) -> str:
    words = {
        "PREEMPTED": "the provider took it back (preempted)",
        "TERMINATED": "the provider ended it: maintenance, or the end of its time",
        "STOPPED": "it was stopped, and its disk is still there",
        "STOPPING": "it is being stopped",
        "DELETING": "it is being deleted",
    }
    return words.get(state, f"the provider says {state}")


def _suspended_words(thing: TpuThing, now: float) -> str:
    by = field_text(thing.queued, "state", "stateInitiator")
    if by == "USER":
        return "its node was deleted by somebody of the project, or by the machine itself"
    if thing.market == "spot":
        return "the provider took it back (preempted)"
    over = field_text(thing.queued, "runDuration", "terminationTime")
    if over:
        early = tpu_unix(over) > now
        return "the provider took it back before its time" if early else f"its time ended at {over}"
    return "the provider ended it: its time was over, or it was taken back"


def tpu_holders(
    things: Sequence[TpuThing], accelerator: str, market: RentalMarket
) -> list[TpuThing]:
    """The things that draw on the same quota as a machine of that type and market, dead ones too:
    of the same family, and all of them preemptible or none."""
    taken_back = market in PREEMPTIBLE_MARKETS
    return [
        thing
        for thing in things
        if tpu_family(thing.accelerator) == tpu_family(accelerator)
        and (thing.market in PREEMPTIBLE_MARKETS) == taken_back
    ]


def tpu_machines(holders: Sequence[TpuThing], accelerator: str) -> int:
    """How many machines of that type fit into the chips that `holders` hold, rounded up."""
    return math.ceil(sum(tpu_chips(one.accelerator) for one in holders) / tpu_chips(accelerator))


def tpu_unix(stamp: str) -> float:
    """A moment as Google writes it (RFC 3339) in Unix seconds. Raises UNKNOWN for anything else."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise RigError("UNKNOWN", f"a time in the API's answer cannot be read: {stamp[:40]!r}")
    return moment.timestamp()


def _known_state(what: str, thing: Mapping[str, Any], known: Mapping[str, Any], *path: str) -> str:
    state = field_text(thing, *path)
    if state not in known:
        raise RigError("UNKNOWN", f"a {what} has the state {state[:40]!r}, not known here")
    return state
