"""What an AWS account needs once for a rig, made or taken back, in the order of a look at it.

Knows no kind of thing by itself. Rents nothing, asks nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.planes.ec2_setup_acts import SetupAct, SetupCall, SetupLook, SetupWish
from forge.parts.planes.ec2_setup_role import SetupRole
from forge.parts.planes.ec2_setup_store import SetupStore

_SETUP_CALL_S = 20.0
_SETUP_TRIES = 6  # of a call about a role that was made a moment ago and is not known everywhere
_UNDOING = ("delete_", "remove_", "detach_")


class Ec2Setup:
    """Looks at an account and does what a look found. `pause_s`: between tries of one call."""

    pause_s = 2.0

    def __init__(self, aws: Aws, wish: SetupWish) -> None:
        self._aws = aws
        self._wish = wish

    async def look(self) -> SetupLook:
        """What is there of what the rig wants, and what would be made. Raises DENIED where
        something of such a name is somebody else's, or is not as it is made here."""
        await self._aws.check_account()
        found = SetupLook()
        await SetupRole(self._aws, self._wish).look(found)
        if self._wish.bucket:
            await SetupStore(self._aws, self._wish).look(found)
        return found

    async def look_back(self) -> SetupLook:
        """What would be taken back: what carries the mark, and of it no other rig's part."""
        await self._aws.check_account()
        found = SetupLook()
        await SetupRole(self._aws, self._wish).look_back(found)
        await SetupStore(self._aws, self._wish).look_back(found)
        return found

    async def do(self, acts: Sequence[SetupAct], tell: Callable[[str], None]) -> None:
        """Do what a look found, and `tell` each that is done. It may be done again after a failure:
        another look begins where it ended."""
        for act in acts:
            for call in act.calls:
                await self._change(call)
            tell(act.words)

    async def _change(self, call: SetupCall) -> None:
        for left in reversed(range(_SETUP_TRIES)):
            try:
                await self._aws.change(
                    *(call.service, call.region, call.operation, _SETUP_CALL_S),
                    **dict(call.parameters),
                )
                return
            except RigError as error:
                if error.error_class != "NOT_FOUND":
                    raise
                if call.operation.startswith(_UNDOING):
                    return
                if not left:
                    raise
            await asyncio.sleep(self.pause_s)
