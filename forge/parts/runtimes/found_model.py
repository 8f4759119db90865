"""What a runtime that loads Hugging Face folders finds on this computer: weights, and packages.

Knows no model server: how a folder is measured is the caller's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.ground.names import checked_name
from forge.parts.ground.process import run_program
from forge.parts.runtimes.embedded_model import EMBEDDED_MODEL
from forge.parts.runtimes.hub_snapshot import cached_snapshot
from forge.parts.runtimes.runtime import ServedModel

PACKAGES_REMEDY = (
    "run `python3 launch.py install` in the rig's folder and start this MCP server anew"
)


def found_model(
    name: str, embedded: Path, measured: Callable[[str, Path], ServedModel]
) -> ServedModel | None:
    """The model `name` if its weights lie on this computer already; None if they must be got.

    `embedded` is where the embedded model's folder lies once it is made. Raises RigError INVALID or
    DENIED when what lies there is unsafe, damaged, unfinished or refused by `measured`.
    """
    checked_name("model", "model", name)
    if name == EMBEDDED_MODEL:
        return measured(name, embedded) if embedded.is_dir() else None
    if name.startswith("/"):
        return measured(name, Path(name))
    snapshot = cached_snapshot(name)
    try:
        return None if snapshot is None else measured(name, snapshot)
    except RigError as error:
        # Unfinished: fetching goes on where it stopped. Unsafe stays refused.
        if error.error_class == "INVALID":
            return None
        raise


async def installed_versions(
    packages: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The release of each package, as this Python sees them; empty for one that is not there."""
    script = (
        "import importlib.metadata as m, json\n"
        "def v(n):\n"
        " try: return m.version(n)\n"
        " except m.PackageNotFoundError: return ''\n"
        f"print(json.dumps({{n: v(n) for n in {tuple(packages)!r}}}))"
    )
    done = await run_program(
        [sys.executable, "-c", script], timeout_s=60, environment=dict(environment)
    )
    try:
        versions: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        why = done.stderr.strip()[-400:]
        raise RigError("INTERNAL", f"Python cannot list its packages: {why}") from None
    return versions
