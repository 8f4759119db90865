"""A rig whose model server is the scripted one: real toolsets, jobs and processes over a fake edge.

Its server.py in a folder of its own is three lines, because a job starts its worker from
it, and the programs of the rig lie beside it. Knows no test.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import Field

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import Rig
from forge.parts.ground.settings import RigSettings
from forge.parts.planes.plane import Finding, Instance, Room
from forge.parts.runtimes.runtime import MetricUse, Need, ServedModel
from forge.parts.toolsets.benchmark import BenchmarkToolset
from forge.parts.toolsets.reports import ReportsToolset
from forge.parts.toolsets.work import JobsToolset

SERVER = """\
import sys
from pathlib import Path
from tests.scripted_rig import run_scripted_rig
sys.exit(run_scripted_rig(Path(__file__), sys.argv[1:]))
"""


class ScriptedSettings(RigSettings):
    """Where the scripted server listens (0: nothing is served), and what it claims to serve."""

    engine_port: int = Field(ge=0)
    max_model_len: int = 4096
    dtype: str = "bfloat16"


class ScriptedPlane:
    """A plane that has found one ready server: what listens on ENGINE_PORT."""

    vocabulary = {"place": "this computer", "machine": "process", "cost": "It costs nothing"}

    def __init__(self, settings: ScriptedSettings) -> None:
        self._port = settings.engine_port

    async def find(self) -> Finding:
        if not self._port:
            return Finding(None)
        return Finding(
            Instance(
                serve_id="serve-1",
                job_id="",
                state="ready",
                model="embedded",
                served_name="scripted",
                port=self._port,
            )
        )

    async def endpoint(self, instance: Instance) -> str:
        return f"http://127.0.0.1:{instance.port}"

    async def room(self, disk_folder: Path) -> Room:
        return Room(0, 0, 0)


class ScriptedRuntime:
    """A runtime whose weights are nowhere; `bench` is its word in the name of the tool."""

    phases: Sequence[str] = ()
    metric_names: Mapping[MetricUse, str] = {}
    key = ""  # what the scripted server would ask for

    def api_key(self) -> str:
        return self.key

    def __init__(self, bench: str) -> None:
        self.vocabulary = {"engine": "scripted engine", "ready": "model", "server": "server"}
        self.vocabulary |= {"logs": "server_logs", "endpoint": "endpoint"}
        if bench:
            self.vocabulary["bench"] = bench

    async def needs(self) -> Sequence[Need]:
        return [Need("package scripted", True, "1.2.3")]

    def local_model(self, name: str) -> ServedModel | None:
        return None


def scripted_rig(bench: str = "") -> Rig:
    """The rig, under the name of the first real one; `bench` as a vLLM runtime would have it."""
    return Rig(
        name="local-pytorch-cpu-2b",
        about="Talks to a scripted server.",
        order="None.",
        settings=ScriptedSettings,
        plane_words={},
        make_plane=lambda paths, label, journal, load: ScriptedPlane(  # type: ignore[arg-type]
            cast(ScriptedSettings, load())
        ),
        make_runtime=lambda load, paths: ScriptedRuntime(bench),  # type: ignore[arg-type]
        toolsets=(BenchmarkToolset, ReportsToolset, JobsToolset),
    )


def run_scripted_rig(server_file: Path, argv: Sequence[str]) -> int:
    """What the folder's server.py does."""
    return run_rig(scripted_rig(), server_file, argv)


if __name__ == "__main__":
    sys.exit("start the server.py that a test has written")
