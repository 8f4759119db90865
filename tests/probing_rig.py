"""A rig with the probes toolset alone, over a scripted model: real jobs, a fake edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import Rig
from forge.parts.toolsets.probing import ProbingToolset
from forge.parts.toolsets.work import JobsToolset
from tests.scripted_rig import scripted_rig

PROBING_SERVER = """\
import sys
from pathlib import Path
from tests.probing_rig import run_probing_rig
sys.exit(run_probing_rig(Path(__file__), sys.argv[1:]))
"""


def probing_rig() -> Rig:
    """The rig, under the name of the first real one."""
    return replace(scripted_rig(), toolsets=(ProbingToolset, JobsToolset))


def run_probing_rig(server_file: Path, argv: Sequence[str]) -> int:
    """What the folder's server.py does."""
    return run_rig(probing_rig(), server_file, argv)
