"""A folder that holds what a rig's own folder holds, for a test that assembles a rig in process.

State and caches are the test's; nothing of a user's is read. Knows no tool.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.ground.jobs import JobRecord, JobStore
from forge.parts.ground.process import LABEL_VARIABLE
from forge.suites.witness import free_port


class RigFolderCase(unittest.IsolatedAsyncioTestCase):
    """A fresh folder and a fresh state for every test."""

    settings: ClassVar[Mapping[str, str]] = {"MODEL_NAME": "embedded"}

    async def asyncSetUp(self) -> None:
        # unittest runs the loop in debug mode, which reports every slow step on standard error.
        asyncio.get_running_loop().slow_callback_duration = 60

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        homes = {f"XDG_{kind}_HOME": str(self.folder / kind) for kind in ("STATE", "CACHE")}
        environment = mock.patch.dict(os.environ, homes | {"HF_HUB_OFFLINE": "1"})
        environment.start()
        self.addCleanup(environment.stop)
        (self.folder / "server.py").write_text("# stands for the built server\n")
        self.write_settings({"PORT": str(free_port()), **self.settings})

    def write_settings(self, values: Mapping[str, str]) -> None:
        """The whole of the rig's tpu.env."""
        (self.folder / "tpu.env").write_text("".join(f"{k}={v}\n" for k, v in values.items()))

    def assembled(self, rig: Rig) -> AssembledRig:
        """`rig` in this test's folder."""
        return AssembledRig(rig, self.folder / "server.py")

    def job_under_way(
        self, jobs: JobStore, kind: str, arguments: dict[str, Any], phases: Sequence[str]
    ) -> JobRecord:
        """A running job whose worker lives, under its label, until the test ends."""
        job = jobs.new(kind, arguments, phases)
        worker = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            env={**os.environ, LABEL_VARIABLE: jobs.label(job.id)},
        )
        assert worker.stdin is not None
        self.addCleanup(worker.stdin.close)
        self.addCleanup(worker.wait)
        self.addCleanup(worker.kill)
        jobs.write(job.model_copy(update={"state": "running", "worker_pid": worker.pid}))
        return jobs.read(job.id)
