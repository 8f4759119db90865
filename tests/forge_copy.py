"""Copies of this repository's files in temporary folders, for tests that build, break and check.

Programs are run there as a user would run them, with the packages of the running Python and with
no way back to this repository.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge.text_checks import committed_files

ROOT = Path(__file__).resolve().parent.parent
RIGS = sorted(path.parent.name for path in ROOT.glob("*/tpu.env"))
FIRST_RIG = "local-pytorch-cpu-2b"
PATIENCE_S = 900.0  # only so that a hang ends


def package_folders() -> list[str]:
    """The folders on this Python's path that hold installed packages."""
    return [path for path in sys.path if path and any(Path(path).glob("*.dist-info"))]


def packages_in_one_folder() -> str:
    """The folder that has what a server needs, as RIG_PACKAGES wants it."""
    import mcp

    return str(Path(mcp.__file__).resolve().parent.parent)


def program_environment(home: Path, **more: str) -> dict[str, str]:
    """PATH, packages and folders below `home` for a program; nothing else of this process's."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(package_folders()),
        "HOME": str(home / "home"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "LANG": "C.UTF-8",
        **more,
    }


def run_program(
    folder: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """A program's run in `folder`, its two streams joined in stdout."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )


class TemporaryFolderCase(unittest.TestCase):
    """A test with a temporary folder of its own, made once for the class."""

    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.folder = Path(tempfile.mkdtemp(prefix="forge-copy-")).resolve()
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)

    @classmethod
    def environment(cls, **more: str) -> dict[str, str]:
        """`program_environment` with this class's folder as home."""
        return program_environment(cls.folder, **more)

    @classmethod
    def run_in(
        cls, folder: Path, *command: str | Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`run_program` with this class's environment, if no other is given."""
        return run_program(folder, command, environment or cls.environment())


@functools.cache
def _copies() -> Path:
    """Where built copies lie: in the folder of the whole run, if there is one (tests/run.py sets
    it), so that each is built once for all modules of tests; else in one of this process."""
    shared = os.environ.get("FORGE_COPIES", "")
    if shared:
        return Path(shared)
    home = Path(tempfile.mkdtemp(prefix="forge-built-")).resolve()
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@contextlib.contextmanager
def _alone_at(name: str) -> Iterator[None]:
    """One process at a time; a killed one holds up nobody."""
    with (_copies() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def built_repository() -> tuple[Path, str]:
    """A copy of this repository without its tests, built once a run, and what the build printed.
    Nobody changes it. Raises AssertionError with that where it failed.
    """
    with _alone_at("built"):
        told = _copies() / "built.txt"
        if not told.exists():
            printed = _build_repository(_copies())
            told.write_text(printed, encoding="utf-8")
        return _copies() / "repository", told.read_text(encoding="utf-8")


def _build_repository(home: Path) -> str:
    folder = home / "repository"
    shutil.rmtree(folder, ignore_errors=True)
    for path in committed_files(ROOT):
        if path.is_relative_to(ROOT / "tests"):
            continue
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    command = (sys.executable, "-m", "forge.build")
    built = run_program(folder, command, program_environment(home))
    if built.returncode:
        raise AssertionError(f"the repository cannot be built:\n{built.stdout}")
    return built.stdout


@functools.cache
def small_repository() -> Path:
    """A built copy of this repository that has the first rig alone, made once a run.

    How the forge builds and checks does not depend on how many rigs there are, but its time does.
    """
    built_repository()
    with _alone_at("small"):
        folder, done = _copies() / "small", _copies() / "small.done"
        if not done.exists():
            _build_small(folder)
            done.touch()
        return folder


def _build_small(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(built_repository()[0], folder)
    for rig in RIGS:
        if rig != FIRST_RIG:
            shutil.rmtree(folder / rig)
            for kind in ("rigs", "suites"):
                (folder / "forge" / kind / f"{rig.replace('-', '_')}.py").unlink()
    command = (sys.executable, "-m", "forge.build")
    built = run_program(folder, command, program_environment(folder.parent))
    if built.returncode:
        raise AssertionError(f"the first rig alone cannot be built:\n{built.stdout}")
    return folder


class ForgeCopyCase(TemporaryFolderCase):
    """A test over a built copy of this repository with one rig in `root`, made for the class."""

    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.root = cls.folder / "repository"
        shutil.copytree(small_repository(), cls.root)

    @classmethod
    def forge(cls, module: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`python -m forge.<module>` in the copy; `more` goes into its environment."""
        environment = cls.environment(**more)
        return cls.run_in(
            cls.root, sys.executable, "-m", f"forge.{module}", *arguments, environment=environment
        )

    def edit(self, name: str, text: str | bytes | None) -> None:
        """Replace a file of the copy (None: delete it) until the end of the test."""
        path = self.root / name
        before = path.read_bytes() if path.exists() else None
        self.addCleanup(_put, path, before)
        _put(path, text.encode() if isinstance(text, str) else text)

    def read(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def contents(self) -> dict[str, bytes]:
        """Every file of the copy but bytecode, by path."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
