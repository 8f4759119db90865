#!/usr/bin/env python3
"""Starts server.py, the file beside this one, with the packages that it needs.

    python3 launch.py                       the MCP server over stdio, as clients start it
    python3 launch.py call TOOL key=value   any other command of server.py (--help lists them)
    python3 launch.py install               get the packages into the user's cache, once;
                                            --server-only leaves the inference engine out,
                                            --for-tests adds what only the rig's own tests need
    python3 launch.py python ARGUMENTS      run Python itself with these packages

The packages come from the first of these that has them: the folder that RIG_PACKAGES names, the
folder that `install` made, this Python as it is, uv. Nothing here writes to standard output: it
belongs to the MCP protocol. Only the standard library is used, in words that Python 3.8 can still
read, so that an old one can be told that it is old.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)
STAMP = "installed"  # written last; a folder without it does not count


def main(arguments: list[str]) -> int:
    """Do what the module's head says; returns the exit status. May be replaced by uv or Python."""
    if sys.version_info < OLDEST_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        uv_or_refusal(f"this is Python {have}, and the rig needs 3.11 or newer", arguments)
    server, engine = HERE / "requirements.txt", HERE / "requirements-runtime.txt"
    everything = [path for path in (server, engine) if path.exists()]
    tests = [path for path in (*everything, HERE / "requirements-test.txt") if path.exists()]
    choices = {"": everything, "--server-only": [server], "--for-tests": tests}
    try:
        if arguments[:1] == ["install"]:
            choice = " ".join(arguments[1:])
            if choice not in choices:
                say("usage: launch.py install [--server-only | --for-tests]")
                return 2
            install(choices[choice])
            return 0
        for_tests = arguments[:1] == ["python"] and (packages_folder(tests) / STAMP).exists()
        use_packages(server, tests if for_tests else everything, arguments)
    except OSError as error:
        raise SystemExit(f"{HERE.name}: {error}") from None
    if arguments[:1] == ["python"]:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *arguments[1:]])
    return run_server(arguments)


def use_packages(server: Path, everything: list[Path], arguments: list[str]) -> None:
    """Put the first place that has the packages on the path; if none has, uv or a refusal."""
    named = os.environ.get("RIG_PACKAGES", "")
    if named:
        missing = lacking(server, [named])
        if missing:
            raise SystemExit(f"RIG_PACKAGES={named} lacks {', '.join(missing)}")
        return use_folder(Path(named))
    whole, small = packages_folder(everything), packages_folder([server])
    # The folder stands before this Python's own packages: somebody asked for it, and it alone is
    # known to hold the engine too.
    if (whole / STAMP).exists():
        return use_folder(whole)
    missing = lacking(server, sys.path)
    if missing and (small / STAMP).exists():
        return use_folder(small)
    if missing:
        uv_or_refusal(f"{', '.join(missing)} is not installed (looked in {whole} too)", arguments)


def run_server(arguments: list[str]) -> int:
    """Import server.py and run it. As a module, because Python keeps no bytecode of scripts."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("server", HERE / "server.py")
    assert spec is not None and spec.loader is not None
    server = importlib.util.module_from_spec(spec)
    sys.modules["server"] = server
    spec.loader.exec_module(server)
    status: int = server.run_rig(server.RIG, HERE / "server.py", arguments)
    return status


def use_folder(folder: Path) -> None:
    """Make `folder` the first place for packages, here and in every Python started from here."""
    sys.path.insert(1, str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in known if path not in ("", str(folder))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *kept])


def packages_folder(requirements: list[Path]) -> Path:
    """Where the packages of these files lie: one folder for each Python, machine and content.

    All copies of a rig (checkout, plugin, skill) share it. Raises OSError for an unreadable file.
    """
    import hashlib

    content = hashlib.sha256(b"\0".join(path.read_bytes() for path in requirements)).hexdigest()
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
    return user_cache() / "gemma4-rigs/packages" / f"{python}-{os.uname().machine}-{content[:12]}"


def user_cache() -> Path:
    """The user's cache by the rules of platformdirs, which server.py follows."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    home = Path(os.path.expanduser("~"))
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def lacking(requirements: Path, places: list[str]) -> list[str]:
    """The lines of `requirements` that nothing in the folders `places` meets.

    Understands what a rig's file holds, `name>=1,<2` and `name==1.2`, and reads names and versions
    only: importing the packages to be sure would cost more than the server's own start.
    """
    import re
    from importlib import metadata

    missing = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        wanted = re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;#]*)", line.strip())
        if wanted is None:
            continue
        found = next(iter(metadata.distributions(name=wanted[1], path=places)), None)
        bounds = re.findall(r"(==|>=|<)\s*([\d.]+)", wanted[2])
        if found is None or not all(_meets(found.version, *bound) for bound in bounds):
            missing.append(line.strip())
    return missing


def _meets(version: str, comparison: str, bound: str) -> bool:
    have, want = _release(version), _release(bound)
    return have == want if comparison == "==" else (have < want) == (comparison == "<")


def _release(version: str) -> list[int]:
    """The numbers of a version, four of them: 2.13.0+cpu is [2, 13, 0, 0]."""
    import re

    numbers = [int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number]
    return (numbers + [0, 0, 0])[:4]


def install(requirements: list[Path]) -> Path:
    """Have pip install `requirements` into their `packages_folder`, all or nothing.

    One call of pip for all files: a second one would not see the pinned torch and get another.
    Raises SystemExit (one line on standard error) when pip is missing or fails.
    """
    import importlib.util
    import signal
    import subprocess
    import tempfile

    target = packages_folder(requirements)
    if (target / STAMP).exists():
        say(f"The packages are there already: {target}")
        return target
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(f"{sys.executable} has no pip. On Debian: apt install python3-pip")
    texts = [path.read_text(encoding="utf-8") for path in requirements]
    size = "about 0.3 GB"
    if any("torch" in text for text in texts):
        size = "about 1.4 GB, or 5 GB where pip is offered only torch's CUDA build"
    elif any("jax" in text for text in texts):
        size = "about 0.8 GB"
    say(f"Installing {', '.join(path.name for path in requirements)} into {target} ({size}) …")
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    # pip unpacks in TMPDIR first: beside the target, because /tmp may be small and in memory.
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    # Warnings about packages outside the folder concern nobody: those are not used from it.
    options = "--no-input --no-user --prefer-binary --no-warn-conflicts --root-user-action=ignore"
    command = [sys.executable, "-m", "pip", "install", *options.split()]
    command += ["--disable-pip-version-check", "--target", str(partial / "packages")]
    for path in requirements:
        command += ["--requirement", str(path)]
    environment = {**os.environ, "TMPDIR": str(partial), "PIP_REQUIRE_VIRTUALENV": "0"}
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        status = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
        if status:
            raise SystemExit("pip failed, as it says above; nothing was installed")
        stamp = "\n".join(texts)
        (partial / "packages" / STAMP).write_text(stamp, encoding="utf-8")
        _put_in_place(partial / "packages", target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
    say(f"Installed: {target}")
    return target


def _put_in_place(made: Path, target: Path) -> None:
    """Rename `made` to `target`. Where another install was faster, its folder stays."""
    if target.exists() and not (target / STAMP).exists():
        shutil.rmtree(target)  # was put there by hand, or is half deleted
    try:
        made.rename(target)
    except OSError:
        if not (target / STAMP).exists():
            raise


def _sweep(parent: Path) -> None:
    """Delete what installs that were killed left behind: partial folders older than a day."""
    import time

    for partial in parent.glob(".partial-*"):
        try:
            old = time.time() - partial.stat().st_mtime > 86_400
        except OSError:
            continue  # its own install has just finished
        if old:
            shutil.rmtree(partial, ignore_errors=True)


def uv_or_refusal(why: str, arguments: list[str]) -> NoReturn:
    """Become `uv run`, which gets the packages by itself; without uv, say what to do and leave."""
    uv = shutil.which("uv")
    if uv is not None and arguments[:1] not in (["install"], ["python"]):
        os.execv(uv, [uv, "run", "--script", str(HERE / "server.py"), *arguments])
    python = sys.executable if sys.version_info >= OLDEST_PYTHON else "python3.13"
    command = f"{shlex.quote(python)} {shlex.quote(str(HERE / 'launch.py'))} install"
    raise SystemExit(f"{HERE.name}: {why}. Run once: {command}")


def say(text: str) -> None:
    """One line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
