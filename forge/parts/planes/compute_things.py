"""What Compute Engine answers, in a plane's words: machines, disks, operations.

Pure functions over gcloud's JSON. Knows no command and no runtime, and judges no ownership.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from forge.parts.boundaries.gcloud_answers import field_labels, field_text
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.planes.capacity_plane import Rental, RentalMarket, RentalState
from forge.parts.planes.compute_catalogue import compute_price
from forge.parts.planes.sweep_plane import SweepLook, SweepState

# The ways of renting in Compute Engine's own words (gcloud compute instances create --help, 2026).
COMPUTE_MODELS: dict[RentalMarket, str] = {
    "flex-start": "FLEX_START",
    "spot": "SPOT",
    "on-demand": "STANDARD",
    "reserved": "RESERVATION_BOUND",
}
# What a machine's status means to a plane, and to whoever waits for it. The statuses are those of
# the API's Instance (compute v1).
_MACHINE_STATES: dict[str, tuple[RentalState, SweepState]] = {
    "PENDING": ("pending", "queued"),
    "PROVISIONING": ("pending", "starting"),
    "STAGING": ("pending", "starting"),
    "REPAIRING": ("pending", "starting"),
    "RUNNING": ("running", "granted"),
    "PENDING_STOP": ("stopping", "refused"),
    "STOPPING": ("stopping", "refused"),
    "SUSPENDING": ("stopping", "refused"),
    "DEPROVISIONING": ("stopping", "refused"),
    "STOPPED": ("stopped", "refused"),
    "SUSPENDED": ("stopped", "refused"),
    "TERMINATED": ("stopped", "refused"),
}
_DISK_STATES: dict[str, RentalState] = {
    "CREATING": "pending",
    "RESTORING": "pending",
    "FAILED": "failed",
    "DELETING": "stopping",
}
# Operations that the provider makes on its own, by their type, and what each means. The types are
# those of the audit log's system events, as public programs that watch for them name them (2026).
_SYSTEM_ENDS = {
    "compute.instances.preempted": "the provider took it back (preempted)",
    "compute.instances.guestTerminate": "it was shut down from within",
    "compute.instances.hostError": "the provider's host failed under it",
    "compute.instances.terminateOnHostMaintenance": "the provider ended it for maintenance",
}
# What the provider calls the end at --max-run-duration was not found in any source, so the type is
# read by its words; one that is read wrongly is still told in the provider's own.
_TIME_OVER = re.compile(
    r"automatic\w*terminat|max\w*run\w*dur|schedul\w*(?:terminat|delet|stop)", re.I
)
_ENDS = re.compile(r"delet|stop|suspend|terminat|preempt|hostError", re.I)
_SERVICE_ACCOUNT = re.compile(r"@[\w.-]*gserviceaccount\.com$")
_ZONE_NAMED = re.compile(r"\bzones/([a-z0-9-]+)")
_MARK_SEPARATOR = "/"


def machine_rental(thing: Any, project: str, machine_type: str, chip: str) -> Rental:
    """A machine as `instances list` and `instances describe` show it.

    The price is told for machines of `machine_type`'s own family alone. A flex-start costs nothing
    while it waits, and its time counts from its start. Raises UNKNOWN for what cannot be read.
    """
    zone, kind = link_end(thing, "zone"), link_end(thing, "machineType")
    market = _market_of(thing)
    price: float | None = None
    status = field_text(thing, "status")
    if kind.split("-")[0] == machine_type.split("-")[0]:
        price = compute_price(chip, kind, zone, market)[0]
    created = field_text(thing, "creationTimestamp")
    since = field_text(thing, "lastStartTimestamp") if market == "flex-start" else ""
    return Rental(
        kind="machine",
        name=_told(thing, "name"),
        zone=zone,
        project=project,
        provider_id=_told(thing, "id"),
        created_at=created,
        created_unix=unix_of(since or created),
        state=_machine_state(status)[0],
        labels=field_labels(thing, "labels"),
        price_per_hour_usd=0.0 if status == "PENDING" and price is not None else price,
        market=market,
    )


def disk_rental(thing: Any, project: str) -> Rental:
    """A disk. One that hangs on no machine counts as stopped: it is there, billed and unused.

    Its labels are its own or, on a disk that has none, those of its description (`disk_mark`).
    """
    state = _DISK_STATES.get(field_text(thing, "status"))
    created = field_text(thing, "creationTimestamp")
    return Rental(
        kind="disk",
        name=_told(thing, "name"),
        zone=link_end(thing, "zone"),
        project=project,
        provider_id=_told(thing, "id"),
        created_at=created,
        created_unix=unix_of(created),
        state=state or ("running" if disk_users(thing) else "stopped"),
        labels=field_labels(thing, "labels") or marked_labels(field_text(thing, "description")),
    )


def disk_mark(labels: Mapping[str, str]) -> str:
    """Labels as the description of a boot disk: `managed-by:gemma4-rigs/rig:…`.

    The released `instances create` (528) can label the machine and not its disk; a description is
    the one word of ours that a disk can carry from the create call on.
    """
    return _MARK_SEPARATOR.join(f"{key}:{value}" for key, value in labels.items())


def marked_labels(description: str) -> dict[str, str]:
    """The labels in a description of `disk_mark`'s form; none in any other text."""
    parts = [part.partition(":") for part in description.split(_MARK_SEPARATOR)]
    if not all(re.fullmatch(r"[a-z][a-z0-9_-]*", key) and colon for key, colon, _ in parts):
        return {}
    return {key: value for key, _, value in parts}


def disk_users(thing: Any) -> set[str]:
    """The names of the machines on which a disk hangs."""
    users = thing.get("users") if isinstance(thing, dict) else None
    return {str(user).rsplit("/", 1)[-1] for user in users} if isinstance(users, list) else set()


def machine_look(thing: Any) -> SweepLook:
    """What a machine's status means to a sweep. Raises UNKNOWN for a status that is not known."""
    status = field_text(thing, "status")
    state = _machine_state(status)[1]
    return SweepLook(
        state,
        said=f"the machine is {status}" if state == "refused" else "",
        provider_id=field_text(thing, "id"),
        created_at=field_text(thing, "creationTimestamp"),
    )


def operations_on(operations: Sequence[Any], name: str, provider_id: str = "") -> list[Any]:
    """The operations on the machine of that name, the oldest first; with an id, on that very one
    and on no namesake."""
    found = [
        one
        for one in operations
        if field_text(one, "targetLink").split("/")[-2:] == ["instances", name]
        and provider_id in ("", field_text(one, "targetId"))
    ]
    return sorted(found, key=lambda one: field_text(one, "insertTime"))


def create_error(operations: Sequence[Any], operation: str = "") -> tuple[bool, Any]:
    """Of operations on one machine: whether its last create still runs, and the error it ended
    with (as the API has it, None without). `operation` is the name of the create that is meant:
    of one name there may have been more."""
    for one in reversed(operations):
        if _is_insert(one) and operation in ("", field_text(one, "name")):
            return field_text(one, "status") != "DONE", one.get("error")
    return False, None


def operation_words(error: Any) -> str:
    """An operation's error in the provider's own words, with the zones that it names."""
    found = error.get("errors") if isinstance(error, dict) else None
    texts = []
    for one in found if isinstance(found, list) else []:
        words = f"code: {field_text(one, 'code')} message: {field_text(one, 'message')}"
        texts.append(words)
    return clean(" ".join(texts), 2000)


def ended_words(operations: Sequence[Any], account: str = "") -> str:
    """In one line what became of a machine, from the operations on it; empty where none tells.

    `account` is the service account that the rig's machines run as. No address of a person is in
    it, only whether it was one.
    """
    for one in reversed(operations):
        kind, at = field_text(one, "operationType"), field_text(one, "insertTime")
        if _is_insert(one) and one.get("error"):
            return f"the create was refused at {at}: {operation_words(one['error'])}"
        if not _ENDS.search(kind) or one.get("error"):
            continue
        why = _SYSTEM_ENDS.get(kind)
        if why is None and _TIME_OVER.search(kind):
            why = "its time was over (--max-run-duration)"
        if why is None and field_text(one, "user") in ("", "system"):
            why = f"the provider ended it ({kind})"
        if why is None:
            act = {"delete": "deleted", "stop": "stopped", "suspend": "suspended"}.get(kind, kind)
            why = f"it was {act} by {_actor(field_text(one, 'user'), account)}"
        said = field_text(one, "statusMessage")
        return clean(f"{why} at {at}{f': {said}' if said else ''}", 400)
    return ""


def unread_places(warnings: Sequence[str]) -> list[str]:
    """The zones that a list's warnings name as not read; a warning without one as it is."""
    places: list[str] = []
    for warning in warnings:
        places += _ZONE_NAMED.findall(warning) or [warning]
    return list(dict.fromkeys(places))


def unix_of(stamp: str) -> float:
    """A moment as Google writes it (RFC 3339) in Unix seconds. Raises UNKNOWN for anything else."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise RigError("UNKNOWN", f"a time in gcloud's answer cannot be read: {stamp[:40]!r}")
    return moment.timestamp()


def link_end(thing: Any, *path: str | int) -> str:
    """The last part of the link at `path`: the zone of a machine, its machine type."""
    return field_text(thing, *path).rsplit("/", 1)[-1]


def _told(thing: Any, key: str) -> str:
    value = field_text(thing, key)
    if not value:
        raise RigError("UNKNOWN", f"a thing in gcloud's answer has no {key}")
    return value


def _machine_state(status: str) -> tuple[RentalState, SweepState]:
    if status not in _MACHINE_STATES:
        raise RigError("UNKNOWN", f"a machine has the status {status[:40]!r}, not known here")
    return _MACHINE_STATES[status]


def _market_of(thing: Any) -> RentalMarket:
    model = field_text(thing, "scheduling", "provisioningModel")
    for market, name in COMPUTE_MODELS.items():
        if name == model:
            return market
    return "on-demand"


def _is_insert(operation: Any) -> bool:
    return field_text(operation, "operationType") in ("insert", "compute.instances.insert")


def _actor(user: str, account: str) -> str:
    if account and user == account:
        return "the machine itself (its own service account)"
    return "a service account" if _SERVICE_ACCOUNT.search(user) else "a user"
