"""A rig as somebody has just got it: its folder, copied, with a fake engine on the path.

For tests of what stands around a server: make targets, the demo. The copy lies in a folder with a
blank in its name; all that it writes goes into temporary folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path

import psutil

from forge.suites.fake_engine import FakeEngine, write_tiny_folder
from forge.suites.rig_case import free_port, rig_processes

ROOT = Path(__file__).resolve().parent.parent
RIG = "local-pytorch-cpu-2b"
PATIENCE_S = 120
# What the copy has to be able to do without: nothing of the repository but the packages.
_KEPT = ("PATH", "LANG", "LC_ALL", "OPENBLAS_CORETYPE")


class FreshRigCase(unittest.TestCase):
    """A copy of the rig for each class, a state of its own for each test.

    What a test leaves running is killed.
    """

    place: Path
    rig: Path
    state: Path
    engine: FakeEngine
    environment: dict[str, str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory(prefix="fresh-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name).resolve()
        cls.rig = cls.place / "a rig"
        shutil.copytree(ROOT / RIG, cls.rig, ignore=shutil.ignore_patterns("__pycache__", "dist"))
        cls.engine = FakeEngine(cls.place / "fake")
        cls.engine.install()
        # Where the embedded model lies once it has been converted.
        models = cls.place / "cache/gemma4-rigs/models"
        write_tiny_folder(models / "SmolLM2-135M-Instruct")
        (cls.place / "home").mkdir()
        (cls.place / "tmp").mkdir()
        packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        cls.environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
            "HOME": str(cls.place / "home"),
            "TMPDIR": str(cls.place / "tmp"),
            "XDG_CACHE_HOME": str(cls.place / "cache"),
            "PYTHONPATH": os.pathsep.join([str(cls.engine.folder), *filter(None, packages)]),
            "MODEL_NAME": "embedded",
            "PORT": str(free_port()),
        }

    def setUp(self) -> None:
        self.engine.script()
        self.state = Path(tempfile.mkdtemp(prefix="state-", dir=self.place))
        self.environment = {**self.environment, "XDG_STATE_HOME": str(self.state)}
        self.addCleanup(self.end_everything)

    def end_everything(self) -> None:
        """Kill what a failed test left, by the process table's own list."""
        for pid in rig_processes(self.state):
            try:
                psutil.Process(pid).kill()
                psutil.Process(pid).wait(10)
            except psutil.Error:
                continue

    def run_in_rig(
        self, *argv: str, changes: Mapping[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the rig's folder, without a terminal unless `stdin` is one."""
        return subprocess.run(
            argv,
            cwd=self.rig,
            env={**self.environment, **(changes or {})},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
