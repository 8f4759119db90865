#!/usr/bin/env python3
"""The test runner behind `make test`: static checks, the tests here, every rig's own suite.

    python3 tests/run.py                   everything but the tests with real engines
    python3 tests/run.py real              those: real llama.cpp and vLLM, built or installed first
    python3 tests/run.py rigs              every rig's suite, whole
    python3 tests/run.py WORD…             some of it: lint, typecheck, check, a module of tests
                                           (tests.test_launch), or a rig's name for its whole suite
    python3 tests/run.py --python ARG…     Python with the packages of all of it
    python3 tests/run.py --format          bring all Python files into form

A suite that stands to the letter in several rigs of a platform tests a part that all of them carry
to the letter: without a word it runs in one of them. `make test` in a rig's folder runs all of it.

Gets what it needs into the user's cache by the launcher's own functions. Three things run at a
time, each in a process group of its own: most of them wait for processes for half of their time.
The last line is `N passed, N failed, N skipped`, where a static check counts as one test. Only the
standard library is used here: it runs before anything is there.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from forge import launch  # noqa: E402

RUFF = ("--isolated", "--line-length", "100", "--target-version", "py311")
STATIC = {
    "lint": ("-m", "ruff", "check", *RUFF, "--select", "E,F,I,UP,B", "."),
    "format": ("-m", "ruff", "format", *RUFF, "--check", "."),
    "typecheck": ("-m", "mypy", "--strict", "forge"),
    "check": ("-m", "forge.check"),
}
NEWEST_MINOR, OLDEST_MINOR = 14, 11
AT_A_TIME = 3
PATIENCE_S = 2400
REAL_PATIENCE_S = 2400  # a first run builds llama.cpp, or installs 3.5 GB of vLLM
REAL = "tests.real."
# One engine at a time: they would measure and starve each other.
MEASURING = ("tests.real.test_llama_real", "tests.real.test_vllm_real")
# These take far longer than any other, so they begin first and nothing waits for them at the end.
SLOW = ("tests.test_isolation",)
FIRST_RIG = "local-pytorch-cpu-2b"
# What meets the language, its library and its packages most: on the other Pythons that suffices,
# since all of it runs on this one.
ON_OTHER_PYTHONS = ("CatalogueSuite", "ServingSuite", "CommandLineSuite", "FolderSuite")
# What walks a rig's own tools and settings runs in each, though it stands there to the letter.
OF_EACH_RIG = (
    *("CatalogueSuite", "BadInputSuite", "ReadOnlySuite", "SettingsSuite", "UnloadableSuite"),
)
INSTALL_AND_TELL = (
    "import sys; from pathlib import Path; from forge.launch import install; "
    "print(install([Path(path) for path in sys.argv[1:]]))"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one test or check: passed, failed or skipped, after how many seconds."""

    name: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


class Runner:
    """Runs programs in groups of their own, so that an interrupt can end all that they started."""

    def __init__(self, scratch: Path, packages: Path) -> None:
        self._scratch = scratch
        (scratch / "home").mkdir()
        (scratch / "bin").mkdir()
        (scratch / "copies").mkdir()
        self.pythons = interpreters()
        self.packages = packages
        self._live: set[int] = set()
        self._talk = threading.Lock()
        self._stopping = False

    def environment(self, packages: Path | None = None) -> dict[str, str]:
        """For every test: the packages, and a home, state and cache that nobody misses.

        TMPDIR marks whatever the tests start: it is how a process left behind is found again.
        """
        folder = str(packages or self.packages)
        left_out = ("PYTHONDONTWRITEBYTECODE", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        home = self._scratch / "home"
        own = {"HOME": home, "XDG_STATE_HOME": home / "state", "XDG_CACHE_HOME": home / "cache"}
        return {
            **kept,
            **{name: str(path) for name, path in own.items()},
            "TMPDIR": str(self._scratch),
            "PATH": f"{self._scratch / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "RIG_PACKAGES": folder,
            "FORGE_COPIES": str(self._scratch / "copies"),
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]),
        }

    def run(
        self, argv: Sequence[str], folder: Path, environment: dict[str, str] | None = None
    ) -> tuple[int, str, float]:
        """Status (-9 when the patience was over), output and seconds of one program."""
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            with self._talk:
                if self._stopping:
                    return -2, "interrupted", 0.0
                program = subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=environment or self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._live.add(program.pid)
            patience = (
                REAL_PATIENCE_S if any(word.startswith(REAL) for word in argv) else PATIENCE_S
            )
            try:
                status = program.wait(patience)
            except subprocess.TimeoutExpired:
                end_group(program.pid)
                status = program.wait()
                log.write(f"\nended after {patience} s\n")
            self._live.discard(program.pid)
            log.seek(0)
            return status, log.read(), time.monotonic() - begun

    def stop(self) -> None:
        """Start nothing more and end what runs."""
        self._stopping = True
        for group in list(self._live):
            end_group(group)

    def tell(self, label: str, outcomes: Sequence[Outcome], output: str, seconds: float) -> None:
        """One line on what has ended; its output as well where something failed."""
        failed = [outcome for outcome in outcomes if outcome.outcome == "failed"]
        mark = "FAIL" if failed else "ok  "
        with self._talk:
            print(f"{mark} {label}: {len(outcomes)} in {seconds:.1f} s", flush=True)
            if failed or label in STATIC:
                print("\n".join(f"     {line}" for line in output.splitlines()[-400:]), flush=True)

    def static_check(self, name: str) -> list[Outcome]:
        """One static check over the whole repository."""
        status, output, seconds = self.run([sys.executable, *STATIC[name]], ROOT)
        outcomes = [Outcome(name, "failed" if status else "passed", seconds)]
        self.tell(name, outcomes, output, seconds)
        return outcomes

    def module(
        self,
        label: str,
        launcher: Sequence[str],
        module: str,
        folder: Path,
        packages: Path,
        surroundings: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """All tests of one module, run by the Python `launcher` in `folder`."""
        results = Path(tempfile.mkdtemp(dir=self._scratch)) / "results.json"
        argv = [*launcher, str(ROOT / "tests/one_module.py"), module, str(results)]
        environment = surroundings or self.environment(packages)
        status, output, seconds = self.run(argv, folder, environment)
        try:
            records = json.loads(results.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            records = {}
        prefix = "" if label == module else f"{label}: "
        outcomes = [Outcome(f"{prefix}{name}", **record) for name, record in records.items()]
        if not any(outcome.outcome == "failed" for outcome in outcomes) and (status or not records):
            why = "it holds no test" if not (status or records) else f"it ended with {status}"
            outcomes.append(Outcome(label, "failed", seconds, why))
        self.tell(label, outcomes, output, seconds)
        return outcomes

    def server_packages(self, rig: Path, minor: int) -> Path | None:
        """Where a rig's server packages lie for Python 3.`minor`; None if pip cannot get them."""
        if minor == sys.version_info[1]:
            return self.packages
        argv = [self.pythons[minor], "-c", INSTALL_AND_TELL, str(rig / "requirements.txt")]
        status, output, _ = self.run(argv, ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
        return None if status else Path(output.splitlines()[-1])

    def offer_pythons(self, rig: Path) -> None:
        """Put every Python, with the packages, onto the tests' PATH: some ask for another one."""
        for minor in self.pythons.keys() - {sys.version_info[1]}:
            folder = self.server_packages(rig, minor)
            if folder is not None:
                # What is no server package (ruff) comes from this Python's folder.
                path = f"{folder}${{PYTHONPATH:+:$PYTHONPATH}}:{self.packages}"
                program = f'PYTHONPATH="{path}" exec {self.pythons[minor]} "$@"'
                wrapper = self._scratch / "bin" / f"python3.{minor}"
                wrapper.write_text(f"#!/bin/sh\n{program}\n")
                wrapper.chmod(0o755)

    def rig_suite(self, rig: Path, minor: int, suites: Sequence[str]) -> list[Outcome]:
        """A rig's own suite (of it `suites`, all if there are none), on Python 3.`minor` with the
        server's packages and no more.

        It runs in a copy of the rig that lies alone: what it needs, it has.
        """
        label = f"{rig.name} on Python 3.{minor}"
        packages = self.server_packages(rig, minor)
        if packages is None:
            return [Outcome(label, "skipped", reason="pip cannot install its packages there")]
        alone = Path(tempfile.mkdtemp(prefix="alone-", dir=self._scratch)) / rig.name
        shutil.copytree(rig, alone, ignore=shutil.ignore_patterns("__pycache__", "dist"))
        surroundings = self.environment(packages) | {"PYTHONPATH": str(packages)}
        tests = ",".join(f"test_server.{suite}" for suite in suites) or "test_server"
        python = [self.pythons[minor]]
        return self.module(label, python, tests, alone, packages, surroundings)

    def leftovers(self) -> list[Outcome]:
        """Whether all that the tests started is gone; what is not is named and ended."""
        left: list[str] = []
        for _ in range(5):  # what is being started right now shows itself only afterwards
            left += self._marked()
        name = "no process is left behind"
        outcomes = [Outcome(name, "failed" if left else "passed", reason="; ".join(left))]
        self.tell(name, outcomes, "\n".join(left), 0)
        return outcomes

    def _marked(self) -> list[str]:
        """Kill every process whose TMPDIR lies in this run's folder; returns their commands."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR", "").startswith(str(self._scratch)):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                    process.kill()
                    process.wait(5)
            except psutil.Error:
                continue
        return found


def end_group(group: int) -> None:
    """Kill the process group of a child; nothing happens where it has ended."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def rigs() -> list[Path]:
    """The folders of all rigs."""
    return sorted(path.parent for path in ROOT.glob("*/tpu.env"))


def shared_out(rigs: Sequence[Path]) -> dict[Path, list[str]]:
    """Which suites of each rig run: of those that stand to the letter in several rigs of one
    platform (a name's first word), the first rig's."""
    seen: set[tuple[str, str]] = set()
    chosen: dict[Path, list[str]] = {}
    for rig in sorted(rigs, key=lambda rig: (rig.name != FIRST_RIG, rig.name)):
        platform, texts = rig.name.partition("-")[0], suites_of(rig)
        kept = [
            name
            for name, text in texts.items()
            if name.endswith(OF_EACH_RIG) or (platform, text) not in seen
        ]
        seen |= {(platform, text) for text in texts.values()}
        chosen[rig] = kept
    return chosen


def suites_of(rig: Path) -> dict[str, str]:
    """The classes that a rig's test_server.py names in SUITES, each with its text."""
    text = (rig / "test_server.py").read_text(encoding="utf-8")
    lines, body = text.split("\n"), ast.parse(text).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    (named,) = (
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUITES"
    )
    return {
        name.id: "\n".join(lines[classes[name.id].lineno - 1 : classes[name.id].end_lineno])
        for name in ast.walk(named)
        if isinstance(name, ast.Name)
    }


def requirement_files() -> list[Path]:
    """Everything that building, checking and testing needs, for one call of pip."""
    found = [path for rig in rigs() for path in sorted(rig.glob("requirements*.txt"))]
    unique = {path.read_bytes(): path for path in found}
    return [*unique.values(), ROOT / "tests/requirements.txt"]


def interpreters() -> dict[int, str]:
    """One working Python for each supported minor version that this machine has; this one first."""
    found = {sys.version_info[1]: sys.executable}
    for minor in range(OLDEST_MINOR, NEWEST_MINOR + 1):
        for candidate in _candidates(f"python3.{minor}"):
            if minor not in found and _is_version(candidate, minor):
                found[minor] = str(candidate)
    return found


def _candidates(name: str) -> Iterator[Path]:
    for folder in map(Path, os.get_exec_path()):
        yield folder / name
        if folder.name == "shims":  # pyenv's: they run only the versions that are switched on
            yield from sorted((folder.parent / "versions").glob(f"*/bin/{name}"))


def _is_version(candidate: Path, minor: int) -> bool:
    program = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
    try:
        return not subprocess.run([candidate, "-c", program], capture_output=True).returncode
    except OSError:
        return False


def test_modules() -> list[str]:
    """The modules of tests/, by their dotted names."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def main(words: list[str]) -> int:
    """Run what `words` choose; 0 if nothing failed and something ran."""
    packages = launch.install(requirement_files())
    if words[:1] == ["--python"]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *words[1:]], environment)
    if words == ["--format"]:
        fix = [sys.executable, "-m", "ruff"]
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        flags = [*RUFF, "."]
        subprocess.run([*fix, "check", "--select", "I", "--fix", *flags], cwd=ROOT, env=environment)
        return subprocess.run([*fix, "format", *flags], cwd=ROOT, env=environment).returncode
    sys.path.insert(1, str(packages))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # A shell's background job ignores it, and so would everything that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A short path: sockets are made in it, and their names may have 100 characters.
    with tempfile.TemporaryDirectory(prefix="rigs-", ignore_cleanup_errors=True) as scratch:
        runner = Runner(Path(scratch).resolve(), packages)
        rounds = real_rounds() if words == ["real"] else [(AT_A_TIME, words)]
        outcomes: list[Outcome] = []
        with contextlib.ExitStack() as ending:
            try:
                for at_a_time, chosen in rounds:
                    pool = ending.enter_context(ThreadPoolExecutor(at_a_time))
                    jobs = start(runner, pool, chosen)
                    outcomes += [done for job in jobs for done in job.result()]
                outcomes += runner.leftovers()
            except BaseException:
                runner.stop()
                runner.leftovers()
                raise
    return report(outcomes)


def real_rounds() -> list[tuple[int, list[str]]]:
    """The tests with real engines: how many at a time, and which. Those that measure come last."""
    modules = [name for name in test_modules() if name.startswith(REAL)]
    assert set(MEASURING) < set(modules), "a module that measures has another name now"
    return [
        (2, [name for name in modules if name not in MEASURING]),
        (1, list(MEASURING)),
    ]


def start(
    runner: Runner, pool: ThreadPoolExecutor, words: Sequence[str]
) -> list[Future[list[Outcome]]]:
    """Hand everything that `words` choose (all, if there are none) to the pool, slow things first.

    Raises SystemExit for a word that chooses nothing.
    """
    suites = {rig.name: rig for rig in rigs() if (rig / "test_server.py").exists()}
    modules = test_modules()
    whole = bool(words)
    if words == ["rigs"]:
        words = list(suites)
    elif not words:
        modules = [name for name in modules if not name.startswith(REAL)]
    unknown = [word for word in words if word not in (*STATIC, *suites, *modules)]
    if unknown:
        raise SystemExit(f"there is no {', '.join(unknown)} to run")
    chosen = [name for name in (*STATIC, *SLOW, *suites, *modules) if not words or name in words]
    jobs = []
    share = shared_out(list(suites.values()))
    runner.offer_pythons(rigs()[0])
    for name in dict.fromkeys(chosen):
        if name in STATIC:
            jobs.append(pool.submit(runner.static_check, name))
        elif name in suites:
            # What may differ between Pythons is the same in every rig: one of them tries others.
            this = [sys.version_info[1]]
            for minor in list(runner.pythons) if name == FIRST_RIG else this:
                part = [] if whole else share[suites[name]]
                if minor not in this:
                    part = list(ON_OTHER_PYTHONS)
                jobs.append(pool.submit(runner.rig_suite, suites[name], minor, part))
        else:
            python = [sys.executable]
            jobs.append(pool.submit(runner.module, name, python, name, ROOT, runner.packages))
    return jobs


def report(outcomes: Sequence[Outcome]) -> int:
    """Print the slowest, the skipped and the failed, then the one line; returns the exit status."""
    print("\nSlowest:")
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[:15]:
        print(f"{outcome.seconds:8.1f} s  {outcome.name}")
    counts = {}
    for kind in ("skipped", "failed"):
        chosen = [outcome for outcome in outcomes if outcome.outcome == kind]
        counts[kind] = len(chosen)
        for outcome in chosen:
            print(f"{kind}: {outcome.name}{': ' + outcome.reason if outcome.reason else ''}")
    passed = len(outcomes) - sum(counts.values())
    print(f"{passed} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return 1 if counts["failed"] or not passed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        launch.say("interrupted; what was started has been ended")
        sys.exit(128 + signal.SIGINT)
