"""`server.py take-down`: everything that a rig rents, shown, asked about and destroyed, for people.

Goes through the same tools as a client does: plan, token, destroy. Knows no provider.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from forge.parts.assembly.rig import AssembledRig
from forge.parts.ground.errors import RigError
from forge.parts.ground.redact import clean


async def take_down(rig: AssembledRig, agreed: bool) -> int:
    """Plan and destroy what this rig rents, one after the other; the exit status.

    Asks at the terminal for each, unless `agreed`. Raises RigError DENIED where it could not ask.
    """
    from mcp import Client

    refused: RigError | None = None
    searches = [job.id for job in rig.context.jobs.all() if not job.finished]
    async with Client(rig.server()) as client:
        try:
            for job_id in searches:  # one that goes on would rent again
                print((await _called(client, "cancel_job", job_id=job_id))["summary"])
            whole = await _each_taken_down(client, rig.context.vocabulary, agreed)
        except RigError as error:
            refused = error  # raised outside, where no task group wraps it
    if refused is not None:
        raise refused
    return 0 if whole else 1


async def _each_taken_down(client: Any, words: Mapping[str, str], agreed: bool) -> bool:
    """Whether everything could be read, and everything that was agreed to is gone."""
    listing = await _called(client, f"list_{words['rental']}s")
    print(listing["summary"])
    for place in listing["unread"]:
        print(f"NOT READ: {place}; what is there is not known")
    whole = not listing["unread"]
    for one in listing["rentals"]:
        where = {"name": one["name"], "zone": one["zone"]}
        try:
            plan = await _called(client, "plan_destroy", **where)
        except RigError as error:
            print(clean(str(error)), file=sys.stderr)
            whole = False
            continue
        print(plan["summary"])
        if not agreed and not _asked(f"Destroy {one['name']}?"):
            print("Left as it is.")
            continue
        name = f"{words['destroy']}_{words['rental']}"
        try:
            done = await _called(client, name, **where, token=plan["token"])
            print(done["summary"])
        except RigError as error:
            print(clean(str(error)), file=sys.stderr)
            whole = False
    return whole


def _asked(question: str) -> bool:
    if not sys.stdin.isatty():
        raise RigError(
            "DENIED", "nothing was done: there is no terminal to ask at", "YES=1 does not ask"
        )
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


async def _called(client: Any, tool: str, **arguments: str) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    if result.is_error:
        text = "".join(item.text for item in result.content if item.type == "text")
        error_class, _, rest = text.partition(" ")
        what, _, step = rest.partition(" Next: ")
        raise RigError(error_class, what, step)  # type: ignore[arg-type]  # as the tool wrote it
    return dict(result.structured_content or {})
