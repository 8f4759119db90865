"""`server.py set-up`: what an AWS account needs once for a rig, shown, asked about and made.

With --undo it takes back what is marked as made so, which needs that nothing is rented. For people:
there is no tool for it. Knows no call of AWS.
"""

from __future__ import annotations

import sys
from typing import cast

from forge.parts.assembly.rig import AssembledRig, RigCommand
from forge.parts.boundaries.aws_clients import Aws
from forge.parts.ground.errors import RigError
from forge.parts.ground.names import slug_of
from forge.parts.ground.redact import clean
from forge.parts.planes.capacity_plane import MANAGED_BY, CapacityPlane
from forge.parts.planes.ec2_settings import Ec2Settings, ec2_home_region
from forge.parts.planes.ec2_setup import Ec2Setup
from forge.parts.planes.ec2_setup_acts import SetupLook, SetupWish


async def set_up_account(rig: AssembledRig, agreed: bool) -> int:
    """Make what the rig's account lacks; the exit status. Raises RigError, DENIED for read-only,
    for credentials of another account and where it could not ask."""
    setup, wish = _setup_of(rig)
    look = await setup.look()
    print(f"Account {wish.account}, for {rig.rig.name}.")
    if not await _shown_and_done(setup, look, "Make", agreed):
        return 1
    if not wish.secret:
        print("HF_SECRET is empty: machines fetch no token.")
    print(f"INSTANCE_PROFILE={wish.profile} is ready; a new one is known everywhere in a minute.")
    return 0


async def take_back_setup(rig: AssembledRig, agreed: bool) -> int:
    """Remove what is marked as made for the rigs; the exit status. Raises DENIED while anything
    with the mark is rented, and UNKNOWN where that cannot be read."""
    setup, wish = _setup_of(rig)
    await _refuse_while_rented(rig)
    look = await setup.look_back()
    print(f"Account {wish.account}, for {rig.rig.name}.")
    return 0 if await _shown_and_done(setup, look, "Remove", agreed) else 1


SET_UP_COMMAND = RigCommand(
    "make role, instance profile and bucket in the AWS account (asks first)",
    set_up_account,
    take_back_setup,
)


def _setup_of(rig: AssembledRig) -> tuple[Ec2Setup, SetupWish]:
    settings = cast(Ec2Settings, rig.context.settings)
    if settings.rig_read_only:
        raise RigError("DENIED", "RIG_READ_ONLY is set: nothing is changed", "set it to 0")
    wish = SetupWish(
        rig=slug_of(rig.rig.name),
        account=settings.aws_account,
        profile=settings.instance_profile,
        secret=str(getattr(settings, "hf_secret", "")),  # keys of the runtime
        bucket=str(getattr(settings, "cache_bucket", "")),
        region=ec2_home_region(settings),
    )
    return Ec2Setup(Aws(wish.account, settings.aws_profile), wish), wish


async def _shown_and_done(setup: Ec2Setup, look: SetupLook, verb: str, agreed: bool) -> bool:
    """Whether all of it is done. What is there is told first, then what would be done."""
    for words in look.there:
        print(f"  stays   {clean(words)}")
    for act in look.acts:
        print(f"  {verb.lower():7} {clean(act.words)}")
    if not look.acts:
        print("Nothing is to be done.")
        return True
    if not agreed and not _person_agrees(f"{verb} this?"):
        print("Nothing was changed.")
        return False
    await setup.do(look.acts, lambda words: print(f"  done    {clean(words)}", flush=True))
    return True


async def _refuse_while_rented(rig: AssembledRig) -> None:
    census = await cast(CapacityPlane, rig.context.plane).census()
    if census.unread:
        places = ", ".join(census.unread)
        raise RigError(
            "UNKNOWN", f"whether anything is rented could not be read: {places}", "repeat it"
        )
    held = [one.name for one in census.rentals if one.labels.get("managed-by") == MANAGED_BY]
    if held:
        raise RigError(
            "DENIED",
            f"the rigs still rent {', '.join(held)}; nothing was removed",
            "make destroy in the rig that rents it",
        )


def _person_agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise RigError(
            "DENIED", "nothing was done: there is no terminal to ask at", "--yes does not ask"
        )
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
