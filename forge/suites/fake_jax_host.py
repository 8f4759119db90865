"""A fake TPU machine without docker: systemd, pip, uv, and environments whose Python is a stand-in.

What such a Python is asked, it knows: the chip, a checkpoint from the Hub, and to run the engine's
file, in whose place the scripted one starts, or the real one on this computer's processor. Knows no
rig and no boot program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.suites.fake_aws_host_systemd import FakeSystemd
from forge.suites.fake_aws_host_units import FakeUnitKeeper
from forge.suites.fake_host import FakeHost, FakeHosts
from forge.suites.fake_host_programs import FakeMachineProgram, write_fake_program
from forge.suites.fake_jax_server import FakeJax

FAKE_CHIP = {
    "platform": "tpu",
    "kind": "TPU v5 lite",
    "count": 1,
    "memory_bytes": 16_911_433_728,
    "matrix": 8192,
    "tflops": 151.3,
    "right": True,
    "jax": "0.10.2",
    "libtpu": "0.0.42.1",
}
FAKE_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_JAX_PROGRAM_END = """
program = FakeJaxProgram({place!r}, {root!r}, {port!r}, {alias!r})
program.engine, program.chip, program.commit = {engine!r}, {chip!r}, {commit!r}
sys.exit(program.call(sys.argv))
"""


class FakeJaxProgram(FakeMachineProgram):
    """One call of such a machine's program, by the name that it was called with."""

    engine: str
    chip: dict[str, Any]
    commit: str

    def do_systemctl(self, argv: list[str]) -> int:
        if self.fault("systemd"):
            return self.failed(str(self.fault("systemd")))
        return FakeSystemd(self.place, self.root).systemctl(argv)

    def do_journalctl(self, argv: list[str]) -> int:
        return FakeSystemd(self.place, self.root).journalctl(argv)

    def keep(self, unit: str) -> int:
        return FakeSystemd(self.place, self.root).keep(unit)

    def made(self, path: str) -> int:
        """This very program under another name: what it then does, the name says."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy(sys.argv[0], path)
        return 0

    def do_pip3(self, argv: list[str]) -> int:
        if self.fault("pip"):
            return self.failed(str(self.fault("pip")))
        if argv[0] != "install" or not argv[-1].startswith("uv=="):
            return self.failed("ERROR: this machine's pip installs uv alone")
        return self.made(os.path.join(argv[argv.index("--target") + 1], "bin", "uv"))

    def do_uv(self, argv: list[str]) -> int:
        if self.fault("packages"):
            return self.failed(str(self.fault("packages")))
        if argv[0] == "venv":
            return self.made(os.path.join(argv[-1], "bin", "python"))
        with open(argv[argv.index("--requirement") + 1], encoding="utf-8") as file:
            return 0 if "jax==" in file.read() else self.failed("error: no jax was asked for")

    def do_python(self, argv: list[str]) -> int:
        if argv[0] != "-c":
            return self.run_engine(argv)
        if "snapshot_download" in argv[1]:
            return self.download(argv[2], argv[3])
        print(json.dumps({**self.chip, **(self.fault("chip") or {})}))
        return 0

    def download(self, repository: str, revision: str) -> int:
        if self.fault("hub"):
            return self.failed(f"huggingface_hub.errors.HfHubHTTPError: {self.fault('hub')}")
        name = "models--" + repository.replace("/", "--")
        commit = revision or self.commit
        folder = os.path.join(os.environ["HF_HOME"], "hub", name, "snapshots", commit)
        if self.fault("checkpoint"):
            shutil.copytree(self.fault("checkpoint"), folder, dirs_exist_ok=True)
        os.makedirs(folder, exist_ok=True)
        print(folder)
        return 0

    def run_engine(self, argv: list[str]) -> int:
        if self.fault("real_engine"):
            os.environ.update(JAX_PLATFORMS="cpu", PYTHONPATH=self.fault("real_engine"))
            os.execv(sys.executable, [sys.executable, *argv])
        os.execv(sys.executable, [sys.executable, self.engine, *argv[1:]])
        return 1


class FakeJaxHost(FakeHost):
    """Such a machine. `script` takes these faults beside: `pip`, `packages`, `hub` (the words of
    what fails), `chip` (facts that differ), `checkpoint` (a folder that the Hub gives),
    `real_engine` (the engine's own file runs, on this PYTHONPATH)."""

    jax: FakeJax

    def __init__(self, hosts: FakeHosts, alias: str, name: str, folder: Path) -> None:
        super().__init__(hosts, alias, name, folder)
        self.jax = FakeJax(folder / "jax")
        self.jax.install()
        end = _JAX_PROGRAM_END.format(
            place=str(self.place),
            root=str(self.root),
            port=hosts.control_port,
            alias=alias,
            engine=str(folder / "jax" / "fake_jax.py"),
            chip=FAKE_CHIP,
            commit=FAKE_COMMIT,
        )
        parts: Sequence[type] = (FakeMachineProgram, FakeUnitKeeper, FakeSystemd, FakeJaxProgram)
        for program in ("systemctl", "journalctl", "pip3"):
            write_fake_program(self.bin / program, self.journal, parts, end)

    def start(self) -> None:
        shutil.rmtree(self.place / "units", ignore_errors=True)  # what ran before is forgotten
        super().start()
