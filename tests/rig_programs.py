"""The programs beside a server.py that a test has written: what the built ones are bundled from."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """\
import sys
sys.path.insert(0, {root!r})
from forge.programs.{name} import main
sys.exit(main())
"""
# A judge.py that still knows subjects and breaks over the first report.
_BROKEN_GATE = """\
import io, sys
sys.path.insert(0, {root!r})
data = sys.stdin.buffer.read()
if data.startswith(b'{{"report"'):
    sys.exit("the gate is out of order")
sys.stdin = io.TextIOWrapper(io.BytesIO(data))
from forge.programs.judge import main
sys.exit(main())
"""


def write_programs(folder: Path) -> None:
    """Write the programs beside a server into `folder`, each running its source in the forge."""
    root = str(Path(__file__).resolve().parents[1])
    for name in ("loadgen", "triage", "probe", "plan", "judge"):
        (folder / f"{name}.py").write_text(PROGRAM.format(root=root, name=name))


def write_broken_gate(folder: Path) -> None:
    """Write into `folder` a judge.py that lets a load begin and cannot judge its report."""
    root = str(Path(__file__).resolve().parents[1])
    (folder / "judge.py").write_text(_BROKEN_GATE.format(root=root))
