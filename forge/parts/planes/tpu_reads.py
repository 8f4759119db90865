"""Reads the Cloud TPU API through gcloud: one request with its node, many lists at once; deletes.

Knows the commands and no plane's verb: what an answer means is read in tpu_things.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, GcloudFlag
from forge.parts.boundaries.gcloud_answers import GcloudAnswer, field_text
from forge.parts.ground.errors import RigError
from forge.parts.planes.tpu_catalogue import lacks_zone
from forge.parts.planes.tpu_order import QUEUED_RESOURCES
from forge.parts.planes.tpu_things import TpuThing, is_node_of

TPU_NODES = ("compute", "tpus", "tpu-vm")
# Seconds for one list of many, and for all of them. Each is a gcloud of its own, and that is 1.2 s
# of a core (528, 2026-11-30).
_TPU_LIST_S, _TPU_LISTS_S = 10.0, 40.0


async def read_tpu(gcloud: Gcloud, name: str, zone: str) -> TpuThing | None:
    """The request of that name and its node, read side by side; None where the provider says that
    there is neither. Raises what kept either from being read."""
    flags: dict[str, GcloudFlag] = {"zone": zone}
    # The alpha command, because only its answer tells a flex-start from the rest.
    request = GcloudCall(("alpha", *QUEUED_RESOURCES, "describe"), name, flags)
    node = GcloudCall((*TPU_NODES, "describe"), name, flags)
    answers = await _all_answers([gcloud.read(request), gcloud.read(node)])
    found, held = (_thing_or_none(answer) for answer in answers)
    if held is not None and not is_node_of(held, name):
        held = None  # another request's node, which only has the name
    return None if found is None and held is None else TpuThing(zone, name, found, held)


def tpu_zone_lists(zone: str) -> list[GcloudCall]:
    """What lists a zone: its queued resources, its nodes."""
    flags: dict[str, GcloudFlag] = {"zone": zone}
    return [
        GcloudCall(("alpha", *QUEUED_RESOURCES, "list"), "", flags),
        GcloudCall((*TPU_NODES, "list"), "", flags),
    ]


async def read_tpu_lists(
    gcloud: Gcloud, calls: Sequence[GcloudCall]
) -> list[GcloudAnswer | RigError]:
    """The answers and refusals of many reads, in order, as many at a time as there are cores; what
    the time did not suffice for is UNREACHABLE."""
    gate = asyncio.Semaphore(max(2, os.cpu_count() or 2))
    until = time.monotonic() + _TPU_LISTS_S

    async def answered(call: GcloudCall) -> GcloudAnswer:
        async with gate:
            left = until - time.monotonic()
            if left <= 0:
                raise RigError("UNREACHABLE", "the time was over before it could be read")
            return await gcloud.read(call, min(_TPU_LIST_S, left))

    return await _all_answers([answered(call) for call in calls])


async def delete_tpu(gcloud: Gcloud, thing: TpuThing, timeout_s: float) -> None:
    """Delete the request and with it its node, whatever their state; a node without a request by
    itself. What is being deleted already is left to that, and what is gone is no error.

    Returns once the provider took the order. Raises UNKNOWN where that is not known.
    """
    flags: dict[str, GcloudFlag] = {"zone": thing.zone, "async": True}
    if thing.queued is not None:
        state = field_text(thing.queued, "state", "state")
        # Without --force a request that has a node is refused.
        call = GcloudCall((*QUEUED_RESOURCES, "delete"), thing.name, {**flags, "force": True})
    else:
        state = field_text(thing.node, "state")
        call = GcloudCall((*TPU_NODES, "delete"), thing.name, flags)
    if state == "DELETING":
        return
    try:
        await gcloud.change(call, timeout_s)
    except RigError as error:
        if error.error_class != "NOT_FOUND":
            raise


def got_answer(answer: GcloudAnswer | RigError) -> GcloudAnswer:
    """The answer, or its refusal raised."""
    if isinstance(answer, RigError):
        raise answer
    return answer


def listed_items(answer: GcloudAnswer | RigError) -> list[dict[str, Any]]:
    """A list's objects; none of a zone that the API does not have for this project."""
    if isinstance(answer, RigError) and lacks_zone(answer):
        return []
    return got_answer(answer).things()


def refuse_for_all(answers: Sequence[GcloudAnswer | RigError]) -> None:
    """Raise what speaks for all places: a login that is over, or that no one was read."""
    refused = [answer for answer in answers if isinstance(answer, RigError)]
    without_login = [error for error in refused if error.error_class == "AUTH"]
    if without_login or len(refused) == len(answers):
        raise (without_login or refused)[0]


async def _all_answers(
    reads: Sequence[Coroutine[Any, Any, GcloudAnswer]],
) -> list[GcloudAnswer | RigError]:
    """Every answer or refusal, in order; what is neither is raised."""
    found = await asyncio.gather(*reads, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, RigError):
            raise one
    return cast(list[GcloudAnswer | RigError], found)


def _thing_or_none(answer: GcloudAnswer | RigError) -> dict[str, Any] | None:
    if isinstance(answer, RigError) and answer.error_class == "NOT_FOUND":
        return None
    return got_answer(answer).thing()
