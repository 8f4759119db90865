"""What EC2 answers, in a plane's words: machines, volumes, and why a machine ended.

Pure functions over boto3's answers. Knows no call and no runtime; of whom a thing is, it reads the
marks alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean
from forge.parts.planes.capacity_plane import MANAGED_BY, Rental, RentalState
from forge.parts.planes.sweep_plane import SweepLook, SweepState

EC2_ENDED = ("shutting-down", "terminated")  # nothing brings such a machine back
EC2_ID = re.compile(r"(?:i|vol)-[0-9a-f]{8,17}")
# What a machine's state means to a plane, and to whoever waits for it. The states are those of the
# API's InstanceStateName (2016-11-15). One that shuts down is there until it is terminated.
_EC2_STATES: dict[str, tuple[RentalState, SweepState]] = {
    "pending": ("pending", "starting"),
    "running": ("running", "granted"),
    "shutting-down": ("stopping", "refused"),
    "stopping": ("stopping", "refused"),
    "stopped": ("stopped", "refused"),
    "terminated": ("stopping", "gone"),
}
# The API's VolumeState. One that hangs on no machine is there, billed and unused.
_VOLUME_STATES: dict[str, RentalState] = {
    "creating": "pending",
    "available": "stopped",
    "in-use": "running",
    "deleting": "stopping",
    "error": "failed",
}
# Why a machine changed its state: the codes are those of the API's StateReason (2016-11-15).
_EC2_ENDS = {
    "Server.SpotInstanceTermination": "EC2 took the spot machine back",
    "Server.SpotInstanceShutdown": "EC2 took the spot machine back and stopped it",
    "Server.InsufficientInstanceCapacity": "EC2 had no capacity to start it",
    "Server.InternalError": "EC2 failed while it started it",
    "Server.ScheduledStop": "EC2 stopped it, because its host is to be retired",
    "Client.InstanceInitiatedShutdown": (
        "it shut itself down: its time was over, nobody used it, or somebody did it on the machine"
    ),
    "Client.InstanceTerminated": "it was ended while an image was made of it",
    "Client.InternalError": (
        "EC2 could not start it; a key of the disk's encryption that may not be used is one reason"
    ),
    "Client.InvalidSnapshot.NotFound": "the snapshot of its image is not there",
    "Client.UserInitiatedHibernate": "it was put to sleep through EC2's API, not by this rig",
    "Client.UserInitiatedShutdown": "it was ended or stopped through EC2's API",
    "Client.VolumeLimitExceeded": "the account's limit of volumes or of their size was reached",
}
_EC2_TIME = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def ec2_tags(thing: Any) -> dict[str, str]:
    """The tags of a machine, a volume or a security group, whatever their case and form."""
    tags = thing.get("Tags") if isinstance(thing, Mapping) else None
    pairs = [tag for tag in tags if isinstance(tag, Mapping)] if isinstance(tags, list) else []
    return {str(tag.get("Key", "")): str(tag.get("Value", "")) for tag in pairs}


def ec2_state(instance: Any) -> str:
    """A machine's state by EC2's own word; empty where none is told."""
    state = instance.get("State") if isinstance(instance, Mapping) else None
    return str(state.get("Name", "")) if isinstance(state, Mapping) else ""


def ec2_market(instance: Any) -> str:
    """How a machine is rented: spot, else on-demand."""
    return "spot" if instance.get("InstanceLifecycle") == "spot" else "on-demand"


def instance_zone(instance: Any) -> str:
    """The availability zone of a machine; empty where none is told."""
    placement = instance.get("Placement") if isinstance(instance, Mapping) else None
    return str(placement.get("AvailabilityZone", "")) if isinstance(placement, Mapping) else ""


def instance_moments(instance: Any) -> tuple[str, str]:
    """(when it was made, when it was last started), ISO 8601 in UTC.

    EC2 keeps no moment of the making: the start's moves whenever a stopped machine is started, that
    at which the root disk was attached does not. A machine without a disk yet, or without one any
    more, has its start alone. Raises UNKNOWN where that is missing.
    """
    started = _moment(instance.get("LaunchTime"))
    if not started:
        raise RigError("UNKNOWN", f"EC2 tells no start of {_id_of(instance)}")
    root, found = instance.get("RootDeviceName"), instance.get("BlockDeviceMappings")
    for one in found if isinstance(found, list) else []:
        if one.get("DeviceName") == root and _moment((one.get("Ebs") or {}).get("AttachTime")):
            return _moment(one["Ebs"]["AttachTime"]), started
    return started, started


def instance_rental(instance: Any, account: str, price: float | None, name: str = "") -> Rental:
    """A machine as `describe_instances` has it; `name` is its name where it was asked for by
    another than its tag.

    `price` is that of a running one: of a stopped one only the disk is billed, and of that no price
    is known here. Raises UNKNOWN for what cannot be read.
    """
    tags, (created, started) = ec2_tags(instance), instance_moments(instance)
    state = _machine_meaning(instance)[0]
    return Rental(
        kind="machine",
        name=name or tags.get("Name") or _id_of(instance),
        zone=_told_zone(instance, instance_zone(instance)),
        project=account,
        provider_id=_id_of(instance),
        created_at=created,
        created_unix=datetime.fromisoformat(started).timestamp(),
        state=state,
        labels=_labels_of(tags),
        price_per_hour_usd=price if state in ("pending", "running") else None,
        market=ec2_market(instance),
    )


def volume_rental(volume: Any, account: str, name: str = "") -> Rental:
    """A volume as `describe_volumes` has it. Its price is not known here."""
    tags, state = ec2_tags(volume), str(volume.get("State", ""))
    created = _moment(volume.get("CreateTime"))
    if not created or state not in _VOLUME_STATES:
        raise RigError("UNKNOWN", f"the volume {_id_of(volume)} has a state or time not known here")
    return Rental(
        kind="disk",
        name=name or tags.get("Name") or _id_of(volume),
        zone=_told_zone(volume, str(volume.get("AvailabilityZone", ""))),
        project=account,
        provider_id=_id_of(volume),
        created_at=created,
        created_unix=datetime.fromisoformat(created).timestamp(),
        state=_VOLUME_STATES[state],
        labels=_labels_of(tags),
    )


def volume_users(volume: Any) -> set[str]:
    """The ids of the machines on which a volume hangs."""
    found = volume.get("Attachments")
    return (
        {str(one.get("InstanceId")) for one in found if one.get("State") not in ("detached", None)}
        if isinstance(found, list)
        else set()
    )


def the_one_of(things: Sequence[Any], name: str, zone: str) -> Any:
    """The thing of that name among `things`, None for none.

    Names are not unique on EC2: of several the one with our mark counts, of machines those that
    still cost before those that end. Raises UNKNOWN with the ids of two that are alike.
    """
    ours = [one for one in things if ec2_tags(one).get("managed-by") == MANAGED_BY] or things
    live = [one for one in ours if ec2_state(one) != "shutting-down"]
    if len(live) > 1:
        ids = sorted(_id_of(one) for one in live)
        raise RigError(
            "UNKNOWN",
            f"in {zone} there are {len(live)} things named {name}: {', '.join(ids)}",
            f"each goes by its id: plan_destroy(name='{ids[0]}', zone='{zone}')",
        )
    return next(iter(live or ours), None)


def request_look(machines: Sequence[Any], volumes: Sequence[Any]) -> SweepLook:
    """What is to be seen of one request: of its machines in any state, and of the volumes that hang
    on none. Raises UNKNOWN where there is more than one machine, or a state that is not known."""
    live = [one for one in machines if ec2_state(one) != "terminated"]
    if len(live) > 1:
        ids = ", ".join(sorted(_id_of(one) for one in live))
        raise RigError("UNKNOWN", f"one request has more than one machine: {ids}")
    if live:
        state, said = _machine_meaning(live[0])[1], ""
        if state == "refused":
            said = instance_ended(live[0]) or f"the machine is {ec2_state(live[0])}"
        return SweepLook(state, said, _id_of(live[0]), instance_moments(live[0])[0])
    said = next((why for one in machines if (why := instance_ended(one))), "")
    left = [one for one in volumes if one.get("State") != "deleted"]
    if not machines and any(map(volume_users, left)):
        return SweepLook("starting", "its disk hangs on a machine that is not to be seen yet")
    return SweepLook("refused" if left else "gone", said or ("a volume is left" if left else ""))


def instance_ended(instance: Any) -> str:
    """In one line why a machine runs no more; empty while it runs, and where EC2 tells nothing."""
    if ec2_state(instance) not in (*EC2_ENDED, "stopping", "stopped"):
        return ""
    reason = instance.get("StateReason")
    code = str(reason.get("Code", "")) if isinstance(reason, Mapping) else ""
    said = str(reason.get("Message", "")) if isinstance(reason, Mapping) else ""
    changed = str(instance.get("StateTransitionReason", ""))
    found = _EC2_TIME.search(changed)
    at = f" at {found[1]} UTC" if found else ""
    if not code:
        return clean(f"EC2 says: {changed}", 400) if changed else ""
    # EC2's own words stay beside ours: what a refusal means is read from them.
    said = said.removeprefix(f"{code}: ")
    return clean(f"{_EC2_ENDS.get(code, 'EC2 ended it')}{at} ({code}) {said}".strip(), 400)


def marked_as(thing: Any, labels: Mapping[str, str]) -> bool:
    """Whether a thing carries our mark, and the rig's and the owner's that `labels` have."""
    tags = ec2_tags(thing)
    marks = {"managed-by": MANAGED_BY, "rig": labels.get("rig"), "owner": labels.get("owner")}
    return all(mark and tags.get(key) == mark for key, mark in marks.items())


def same_instance(instance: Any, rental: Rental) -> bool:
    """Whether it is that very machine, with our marks and those that it was read with.

    An id is given once. A machine that was read before its disk hung on it was known by its start.
    """
    return (
        _id_of(instance) == rental.provider_id
        and rental.created_at in instance_moments(instance)
        and marked_as(instance, rental.labels)
    )


def same_volume(volume: Any, rental: Rental) -> bool:
    """Whether it is that very volume, with our marks and those that it was read with."""
    made = _moment(volume.get("CreateTime"))
    same = (_id_of(volume), made) == (rental.provider_id, rental.created_at)
    return same and marked_as(volume, rental.labels)


def _labels_of(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags without the name, and without those of AWS's own services."""
    return {k: v for k, v in tags.items() if k != "Name" and not k.startswith("aws:")}


def _id_of(thing: Any) -> str:
    found = thing.get("InstanceId") or thing.get("VolumeId") if isinstance(thing, Mapping) else ""
    if not found:
        raise RigError("UNKNOWN", "a thing in EC2's answer has no id")
    return str(found)


def _told_zone(thing: Any, zone: str) -> str:
    if not zone:
        raise RigError("UNKNOWN", f"EC2 tells no zone of {_id_of(thing)}")
    return zone


def _machine_meaning(instance: Any) -> tuple[RentalState, SweepState]:
    state = ec2_state(instance)
    if state not in _EC2_STATES:
        raise RigError("UNKNOWN", f"{_id_of(instance)} is {state[:40]!r}, a state not known here")
    return _EC2_STATES[state]


def _moment(value: Any) -> str:
    """A moment of boto3's in ISO 8601 in UTC; empty for anything else."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return ""
    return value.astimezone(UTC).isoformat()
