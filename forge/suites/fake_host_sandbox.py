"""A fake machine's folder on this computer: its /, its programs, its docker, and all it runs.

Every process of a machine carries a mark and ends with it. Knows no cloud, and not how it boots.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.suites.fake_host_programs import TPU_ENGINE_WORDS, write_fake_engine
from forge.suites.fake_host_servers import end_marked
from forge.suites.witness import free_port


class FakeSandbox:
    """One machine's folder. `root` is its /, `place` docker's folder, `bin` all of its PATH.

    `engine` is the scripted vLLM that its containers run, `journal` where each program notes its
    argument list, `port` this computer's for the port that the machine's model is served on.
    """

    journal: Path

    def __init__(self, folder: Path, words: Mapping[str, Sequence[str]] = TPU_ENGINE_WORDS) -> None:
        """`words` are what its engine's log says, as `write_fake_engine` has them."""
        self.folder = folder
        self.root, self.place, self.bin = folder / "root", folder / "docker", folder / "bin"
        for path in ("dev", "var/lib/gemma4", "run", "root"):
            (self.root / path).mkdir(parents=True, exist_ok=True)
        self.place.mkdir()
        (self.root / "dev" / "console").touch()
        self.orders: dict[str, Any] = {}
        self.engine = write_fake_engine(self.place, folder / "engine", words)
        self.port = free_port()
        self._seen = 0  # characters of the console that were passed on

    def obey(self, orders: dict[str, Any], told: dict[str, Any]) -> None:
        """From now on these are its faults; `told` is what its programs read of them."""
        self.orders = orders
        fresh = self.folder / "control.new"
        fresh.write_text(json.dumps(told))
        fresh.replace(self.place / "control.json")

    def environment(self) -> dict[str, str]:
        """What every process on the machine has in its environment."""
        return {
            "PATH": str(self.bin),
            "LANG": "C.UTF-8",
            "GEMMA4_ROOT": str(self.root),
            "FAKE_MACHINE": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Runs a program on the machine."""
        return subprocess.run(
            [str(self.bin / argv[0]), *argv[1:]],
            env=self.environment(),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def begin(self, program: Path) -> subprocess.Popen[bytes]:
        """Starts one of its scripts as root does; both of its streams in one."""
        return subprocess.Popen(
            [str(program)],
            env={**self.environment(), "HOME": str(self.root / "root")},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def switch_on(self) -> None:
        """Its services and its containers begin, as far as they are meant to."""
        (self.place / "on").write_text(str(os.getpid()))
        for enabled in self.place.glob("*.enabled"):
            self.run("systemctl", "start", enabled.stem)
        for wanted in self.place.glob("*.wanted"):
            if "running" in wanted.read_text():
                self.run("docker", "start", wanted.stem)

    def switch_off(self) -> None:
        """Every process of it ends, its disk stays."""
        (self.place / "on").unlink(missing_ok=True)
        end_marked("FAKE_MACHINE", str(self.folder))
        end_marked("GEMMA4_ROOT", str(self.root))  # of tools that get no more than they need
        for unit in self.place.glob("*.on"):
            unit.unlink()
        for container in self.place.glob("*.wanted"):
            path = self.place / f"{container.stem}.json"
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_text())
                found["State"].update(Status="exited", Running=False, Pid=0, ExitCode=137)
                path.write_text(json.dumps(found))

    def fresh_console(self) -> str:
        """What was written to /dev/console since the last time."""
        text = (self.root / "dev" / "console").read_text(errors="replace")
        fresh, self._seen = text[self._seen :], max(self._seen, len(text))
        return fresh

    # -- what a test looks at

    def container(self, name: str = "vllm") -> dict[str, Any]:
        """The container as docker knows it; empty where there is none."""
        try:
            return dict(json.loads((self.place / f"{name}.json").read_text()))
        except FileNotFoundError:
            return {}

    def programs(self) -> list[list[str]]:
        """The argument lists of every program that was run on it, oldest first."""
        lines = self.journal.read_text().splitlines()
        called = [[Path(words[0]).name, *words[1:]] for words in map(json.loads, lines)]
        return [words for words in called if "--keep" not in words]  # those keep others going


def write_startable(path: Path, text: bytes) -> Path:
    """Writes a program that is started at once, and returns its path.

    By a process of its own: what another thread starts in that moment would inherit the open file,
    and the kernel refuses to run what somebody may still write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["/bin/sh", "-c", 'cat >"$0"', str(path)], input=text, check=True)
    path.chmod(0o700)
    return path
