"""Rules for the text of files: what no committed file may say, and what a rig may not point at.

Knows shapes only; it lists no name of any person, machine or project.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from forge.build import shipped_files
from forge.bundle import statements_within
from forge.pins import RUNTIME_IMPORTS, SERVER_PINS, SUITE_PINS

# What it is -> its shape. Written so that no expression matches its own text.
_NOBODY = r"(?!(?:you|user|somebody|ada)\b)"  # whom documents and tests speak of
_SHAPES = {
    "a path of somebody's machine": (
        rf"(?<![\w.])/(?:root/|(?:home)/{_NOBODY}\w+|Users/{_NOBODY}\w+/)|[A-Z]:\\{{1,2}}Users\\"
    ),
    "a package registry's host": r"\b(?:pypi[.]org|pythonhosted[.]org|npmjs[.]org)\b",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Google access token": r"\bya29[.][\w.-]{20,}",
    "a Google API key": r"\bAIza[\w-]{35}\b",
    "a DigitalOcean token": r"\bdop_v1_[a-f0-9]{40,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{30,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+\S{40}",
}
FORBIDDEN = {what: re.compile(shape) for what, shape in _SHAPES.items()}
# What a test makes up says so, or counts.
_MADE_UP = re.compile("canary|example|fake|other|0123456789|abcdefgh", re.I)
_UPWARDS = re.compile(r"(?:\./)?(?:\.\./)+[\w.-]*")
_FORGE_PATH = re.compile(r"(?<![\w/.-])(?:forge|tests)/\w")
_SOURCE_LINE = re.compile(r"^# (?:Built from|Ejected from the forge: .*) forge/.*$", re.M)


def committed_files(root: Path) -> list[Path]:
    """What git has or would take below `root`; without git, every file that no tool left there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return list(shipped_files(root))
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    return [path for path in (root / name for name in names) if path.is_file()]


def forbidden_faults(files: Iterable[Path], root: Path) -> Iterator[str]:
    """Each place that says something which no committed file may say. The text is not repeated."""
    for path in files:
        for line, what in _forbidden_places(_text(path)):
            yield f"{path.relative_to(root).as_posix()}:{line}: holds {what}: take it out"


@functools.cache  # a rig's skill is a copy of the rig, and most programs are the same in every rig
def _forbidden_places(text: str) -> list[tuple[int, str]]:
    """Line and kind of each such thing in a text."""
    return [
        (text.count("\n", 0, match.start()) + 1, what)
        for what, shape in FORBIDDEN.items()
        for match in shape.finditer(text)
        if not _MADE_UP.search(match[0])
    ]


def outside_faults(folder: Path, siblings: Sequence[str]) -> Iterator[str]:
    """Places where a rig's files point out of the rig's folder, by path in it."""
    sibling = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}/" for name in siblings) or r"(?!)")
    home = folder.resolve()
    for path in shipped_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield f"{name}: is a link: put the file itself there"
        text = _SOURCE_LINE.sub("", _text(path))
        for match in _UPWARDS.finditer(text):
            target = (path.parent / match[0]).resolve()
            # Beyond the repository too, it is no pointer: attack strings of a suite look like that.
            if target.is_relative_to(home.parent) and not target.is_relative_to(home):
                yield f"{name}: points at {match[0]}, outside the rig: take it out"
        for shape in (_FORGE_PATH, sibling):
            for match in shape.finditer(text):
                yield f"{name}: points at {match[0]}…, outside the rig: take it out"


def import_faults(folder: Path) -> Iterator[str]:
    """Imports in a rig's Python files of what is neither standard, pinned, nor beside the file."""
    carried = sys.stdlib_module_names | SERVER_PINS.keys() | RUNTIME_IMPORTS | {"__future__"}
    for path in shipped_files(folder):
        if path.suffix != ".py":
            continue
        # What the suite alone imports, requirements-test.txt brings.
        known = carried | SUITE_PINS.keys() if path.name == "test_server.py" else carried
        name = path.relative_to(folder).as_posix()
        beside = {other.stem for other in path.parent.glob("*.py")}
        try:
            imported = _imported_modules(_text(path))
        except SyntaxError as error:
            yield f"{name}:{error.lineno}: is no Python: restore it"
            continue
        for line, module in imported:
            if module.partition(".")[0] not in known | beside:
                yield f"{name}:{line}: imports {module}, which no rig carries: drop it"


@functools.cache
def _imported_modules(text: str) -> list[tuple[int, str]]:
    """Line and name of each module that a text imports absolutely. Raises SyntaxError."""
    found: list[tuple[int, str]] = []
    for node in statements_within(ast.parse(text, feature_version=(3, 11)).body):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node.lineno, node.module or ""))
    return found


def lint_faults(folder: Path) -> Iterator[str]:
    """What ruff says of a rig's Python files, by the rules of its own `make lint`."""
    base = [sys.executable, "-P", "-m", "ruff"]
    rules = ["--isolated", "--no-cache", "--line-length", "100", "--target-version", "py311"]
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("*.py"))]
    for words in (
        ["check", "--select", "E,F,I,UP,B", "--output-format", "concise", "--quiet"],
        ["format", "--check"],
    ):
        command = [*base, words[0], *rules, *words[1:], *files]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if ".py" in line]
            yield from (f"{line}: mend its source" for line in said or [done.stderr.strip()])


def _text(path: Path) -> str:
    """The text of a file; empty for what is no text."""
    data = path.read_bytes()
    return "" if b"\0" in data[:8192] else data.decode(errors="replace")
