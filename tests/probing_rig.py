"""A rig with the probes toolset alone, over a scripted model: real jobs, a fake edge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import Rig
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.work import JobsToolset
from tests.rig_programs import PROGRAM
from tests.scripted_rig import ScriptedRuntime, scripted_rig

KEY_SOURCE = "PROBING_RIG_KEY"  # where a test leaves the model server's key, if it has one
PROBING_SERVER = """\
import sys
from pathlib import Path
from tests.probing_rig import run_probing_rig
sys.exit(run_probing_rig(Path(__file__), sys.argv[1:]))
"""


class KeyedRuntime(ScriptedRuntime):
    """The scripted runtime, with a key for as long as a test wants one."""

    def api_key(self) -> str:
        return os.environ.get(KEY_SOURCE, "")


def probing_rig() -> Rig:
    """The rig, under the name of the first real one."""
    return replace(
        scripted_rig(),
        make_runtime=lambda load, paths: KeyedRuntime(""),  # type: ignore[arg-type]
        toolsets=(ProbingToolset, JobsToolset),
    )


def write_probe_program(folder: Path) -> None:
    """Write probe.py into `folder`, as it lies beside a built server.py."""
    root = str(Path(__file__).resolve().parents[1])
    (folder / "probe.py").write_text(PROGRAM.format(root=root, name="probe"))


def run_probing_rig(server_file: Path, argv: Sequence[str]) -> int:
    """What the folder's server.py does."""
    return run_rig(probing_rig(), server_file, argv)
