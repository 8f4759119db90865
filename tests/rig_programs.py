"""The programs beside a server.py that a test has written: what the built ones are bundled from."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """\
import sys
sys.path.insert(0, {root!r})
from forge.programs.{name} import main
sys.exit(main())
"""


def write_programs(folder: Path) -> None:
    """Write the programs beside a server into `folder`, each running its source in the forge."""
    root = str(Path(__file__).resolve().parents[1])
    for name in ("loadgen", "triage", "probe", "plan"):
        (folder / f"{name}.py").write_text(PROGRAM.format(root=root, name=name))
