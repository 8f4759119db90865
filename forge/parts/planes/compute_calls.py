"""The commands of `gcloud compute` that a plane needs beside the create: reads and deletes.

Knows what each asks and when its answer means that nothing is there; what things are, others read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from forge.parts.boundaries.gcloud import Gcloud, GcloudCall, GcloudFlag
from forge.parts.boundaries.gcloud_answers import GcloudAnswer, field_text
from forge.parts.ground.errors import RigError
from forge.parts.planes.compute_catalogue import CHIP_QUOTA_FAMILY, quota_limit
from forge.parts.planes.compute_things import operations_on

ComputeKind = Literal["instances", "disks"]

_BOOT_TEXT = 200_000  # bytes of a boot's console, the newest

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


class ComputeCalls:
    """`gcloud compute` for one project. Raises what Gcloud raises, unless it says otherwise."""

    def __init__(self, gcloud: Gcloud) -> None:
        self._gcloud = gcloud

    @property
    def project(self) -> str:
        return self._gcloud.project

    async def all_things(self) -> tuple[GcloudAnswer, GcloudAnswer]:
        """The machines and the disks of all zones."""
        return await both_answers(
            self._gcloud.read(GcloudCall(("compute", "instances", "list"))),
            self._gcloud.read(GcloudCall(("compute", "disks", "list"))),
        )

    async def machines(self) -> list[dict[str, Any]]:
        """The machines of all zones. UNREACHABLE where one of them does not answer."""
        return await self._whole(GcloudCall(("compute", "instances", "list")))

    async def has_type(self, machine_type: str, zone: str) -> bool:
        """Whether a zone has a machine type on its list. Asked zone by zone: the command that
        lists fetches all types of all zones, whatever it is asked for (gcloud 528).

        Raises INVALID where there is no such zone.
        """
        call = GcloudCall(("compute", "machine-types", "describe"), machine_type, {"zone": zone})
        try:
            await self._gcloud.read(call)
        except RigError as error:
            if error.error_class in ("CAPACITY", "NOT_FOUND"):
                return False
            raise
        return True

    async def quota(self, name: str, region: str) -> int:
        """A quota's limit in chips; -1 for none. UNKNOWN where the region's is not told."""
        flags: dict[str, GcloudFlag] = {"service": "compute.googleapis.com"}
        call = GcloudCall(("beta", "quotas", "info", "describe"), name, flags)
        return quota_limit((await self._gcloud.read(call)).thing(), region, CHIP_QUOTA_FAMILY)

    async def thing(self, kind: ComputeKind, name: str, zone: str) -> Any:
        """The machine or the disk of that name; None where the provider says that there is none."""
        try:
            call = GcloudCall(("compute", kind, "describe"), name, {"zone": zone})
            return (await self._gcloud.read(call)).thing()
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return None
            raise

    async def operations(self, name: str, zone: str, provider_id: str = "") -> list[Any]:
        """The operations on the machine of that name, the oldest first, as far back as the
        provider keeps them: about two weeks."""
        call = GcloudCall(("compute", "operations", "list"), "", {"zones": [zone]})
        return operations_on(await self._whole(call), name, provider_id)

    async def console(self, name: str, zone: str) -> str:
        """The newest 200 kB of the first serial port. UNREACHABLE while there is nothing."""
        flags: dict[str, GcloudFlag] = {"zone": zone, "port": 1}
        call = GcloudCall(("compute", "instances", "get-serial-port-output"), name, flags)
        text = ""
        try:
            text = field_text((await self._gcloud.read(call)).thing(), "contents")
        except RigError as error:
            if "not ready" not in error.what:  # the API's word for a machine that only waits
                raise
        if not text.strip():
            raise RigError(
                "UNREACHABLE",
                f"{name} in {zone} has written nothing to its console yet",
                "ask again in a minute",
            )
        return text.encode()[-_BOOT_TEXT:].decode("utf-8", "ignore")

    async def delete(self, kind: ComputeKind, name: str, zone: str, timeout_s: float) -> None:
        """Delete, and return once it is gone or going. gcloud waits for the end, which is minutes
        away; a call that gave no answer is settled by a look."""
        call = GcloudCall(("compute", kind, "delete"), name, {"zone": zone})
        try:
            await self._gcloud.change(call, timeout_s)
        except RigError as error:
            if error.error_class == "NOT_FOUND":
                return
            if error.error_class != "UNKNOWN" or not await self._going(kind, name, zone):
                raise

    async def _whole(self, call: GcloudCall) -> list[dict[str, Any]]:
        """A list that must be whole: gcloud ends with success also where a part is missing."""
        answer = await self._gcloud.read(call)
        if answer.unread:
            raise RigError("UNREACHABLE", f"a list is not whole: {'; '.join(answer.unread)}")
        return answer.things()

    async def _going(self, kind: ComputeKind, name: str, zone: str) -> bool:
        try:
            left = await self.thing(kind, name, zone)
        except RigError:
            return False
        return left is None or field_text(left, "status") in ("STOPPING", "DELETING")


async def both_answers(
    first: Coroutine[Any, Any, FirstT], second: Coroutine[Any, Any, SecondT]
) -> tuple[FirstT, SecondT]:
    """Two reads at once, within the time of one; when one fails, the other is ended."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
