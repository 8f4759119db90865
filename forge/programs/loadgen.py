"""The load generator: measures a served model from a process of its own.

    python3 loadgen.py FOLDER     carry out FOLDER/plan.json, append each result to it

run_benchmark starts it. It runs on asyncio streams, with uvloop where that is installed, and knows
one address: that of the plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge.parts.boundaries.load_generator import run_load_folder
from forge.parts.ground.errors import RigError


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="loadgen.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where plan.json lies")
    arguments = parser.parse_args(argv)
    try:
        return run_load_folder(arguments.folder)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
