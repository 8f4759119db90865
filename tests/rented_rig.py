"""A rig that rents from Google, put together from the forge's parts, in a folder of its own.

Behind the stand-in gcloud stands a Google on loopback; nothing boots on its machines. A worker is a
process of the same parts, with the patience that the test gives it. Knows no tool and no fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import site
import tempfile
import time
import unittest
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig, Rig
from forge.rigs.tpu_vllm_v6e1_2b import RIG as COMPUTE_RIG
from forge.suites.fake_gcloud import fake_gcloud
from forge.suites.fake_gcloud_faults import SpoiltGcloud
from forge.suites.fake_google import FakeGoogle
from forge.suites.witness import free_port, rig_processes
from tests.boot_sandbox import program_text
from tests.imaginary_case import Caller
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "fake-proj"
PATIENCE_S = 40.0  # for what takes a second or two: a busy machine is no failure
SERVER = """\
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from forge.parts.assembly.command_line import run_rig
from forge.parts.planes.cloud_tpu import CloudTpu
from forge.parts.planes.compute_engine import ComputeEngine
from forge.rigs.{module} import RIG

for plane in (CloudTpu, ComputeEngine):
    plane.look_every_s, plane.settle_s, plane.gone_s = 0.1, {settle_s}, 1.0
{more}
sys.exit(run_rig(RIG, Path(__file__), sys.argv[1:]))
"""


class RentedRigCase(unittest.IsolatedAsyncioTestCase):
    """A fresh project, a fresh folder and a fresh state for every test."""

    rig: ClassVar[Rig] = COMPUTE_RIG
    worker: ClassVar[str] = ""  # what a worker's program does besides, before it begins
    settle_s: ClassVar[float] = 1.0
    settings: ClassVar[dict[str, str]] = {}

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="rented-rig-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        for name in ("rig", "home", "bin"):
            (self.place / name).mkdir()
        self.rig_folder, self.state = self.place / "rig", self.place / "state"
        self.google = self.enterContext(FakeGoogle(PROJECT))
        self.argv_file = fake_gcloud(self.place / "bin")
        self.gcloud = SpoiltGcloud(self.place / "bin")
        module = self.rig.name.replace("-", "_")
        words = {"root": str(ROOT), "module": module, "settle_s": self.settle_s}
        (self.rig_folder / "server.py").write_text(SERVER.format(**words, more=self.worker))
        write_programs(self.rig_folder)
        (self.rig_folder / "boot.py").write_text(program_text("boot"))
        self.write_settings()
        self.enterContext(mock.patch.dict(os.environ, self.surroundings(), clear=True))
        for plane in self.rig.make_plane.__mro__:  # type: ignore[attr-defined]
            if "settle_s" in vars(plane):
                shorter = {"look_every_s": 0.1, "settle_s": self.settle_s, "gone_s": 1.0}
                for name, seconds in {**shorter, "read_back_s": 1.0}.items():
                    self.enterContext(mock.patch.object(plane, name, seconds))
        self.addCleanup(self.end_everything)

    def surroundings(self) -> dict[str, str]:
        """This environment without a user's login and without a rig's values."""
        keys = {name.upper() for name in self.rig.settings.model_fields}
        given = self.google.environment(self.place / "home", path=str(self.place / "bin"))
        gone = ("XDG_", "HF_", "GEMMA4_", "RIG_")
        kept = {k: v for k, v in given.items() if k not in keys and not k.startswith(gone)}
        return kept | {
            "GEMMA4_GOOGLE_ENDPOINT": self.google.base,
            # Nobody listens there: an image that cannot be resolved passes with a note.
            "IMAGE_REGISTRY": f"http://127.0.0.1:{free_port()}",
            "NO_GCE_CHECK": "true",
            "PYTHONUSERBASE": site.getuserbase(),
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(self.place / "cache"),
        }

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)
        logging.getLogger("asyncio").setLevel(logging.ERROR)

    def tearDown(self) -> None:
        self.assertEqual(self.google.escapes, [], "a request left this computer's Google")

    def end_everything(self) -> None:
        """Kill what a failed test left, by the process table's own list."""
        left = []
        for pid in rig_processes(self.state):
            with contextlib.suppress(psutil.Error):
                left.append(psutil.Process(pid))
                left[-1].kill()
        psutil.wait_procs(left, timeout=10)

    def write_settings(self, **values: str) -> None:
        """The rig's own tpu.env, with these keys changed."""
        path = self.rig_folder / "tpu.env"
        lines = (ROOT / self.rig.name / "tpu.env").read_text().splitlines()
        given = {"PROJECT": PROJECT, "PORT": str(free_port()), **self.settings, **values}
        kept = [line for line in lines if line.partition("=")[0] not in given]
        path.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in given.items())]) + "\n")
        stamp = time.time_ns()
        os.utime(path, ns=(stamp, stamp))

    # Clients

    def assembled(self) -> AssembledRig:
        with contextlib.redirect_stderr(io.StringIO()):
            return AssembledRig(self.rig, self.rig_folder / "server.py")

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[Caller]:
        """A client of a server in this process; all toolsets are loaded."""
        rig = self.assembled()
        rig.every_toolset = True
        with contextlib.redirect_stderr(io.StringIO()):
            server = rig.server()
        async with Client(server) as client:
            failure = None
            try:
                yield Caller(client, self)
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    # Witnesses

    @property
    def rig_state(self) -> Path:
        return self.assembled().context.paths.state

    def journal(self, event: str = "") -> list[dict[str, Any]]:
        """The journal's entries of that kind, from the file."""
        path = self.rig_state / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if event in ("", entry["event"])]

    def called(self, *words: str) -> list[list[str]]:
        """The argument lists with which gcloud was started that begin with `words`."""
        lines = self.argv_file.read_text().splitlines() if self.argv_file.exists() else []
        given = [json.loads(line)[1:] for line in lines]
        return [line for line in given if line[: len(words)] == list(words)]

    async def until(self, what: Callable[[], Any], why: str) -> Any:
        """Poll `what` until it is true; fail with `why` when it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := what()):
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.05)
        return value
