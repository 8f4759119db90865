"""The probes: asks a served model what a 200 can hide, from a process of its own.

    python3 probe.py FOLDER     carry out FOLDER/plan.json, append each event to it

probe_capabilities starts it. It knows one address: that of the plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge.parts.ground.errors import RigError
from forge.parts.toolsets.probe_run import run_probe_folder


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="probe.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where plan.json lies")
    arguments = parser.parse_args(argv)
    try:
        return run_probe_folder(arguments.folder)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
