"""What a machine's program is made of: marks on the console, its files, programs, answers.

What has to stay secret belongs into `seen_secrets`. ROOT is a sandbox in tests, and MINUTE_S a
shorter minute. Knows no cloud and no model server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

ROOT = Path(os.environ.get("GEMMA4_ROOT", "/"))
MINUTE_S = float(os.environ.get("GEMMA4_MINUTE_S", "60"))
HOME = ROOT / "var/lib/gemma4"
LOG, PROGRAM = HOME / "boot.log", HOME / "boot.py"
NOTHING, PIPE, BOTH = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
READY = ("ready", "done")  # the mark of a boot that has succeeded
SECRET_SHAPES = re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|ya29\.[\w.-]{8,})|Bearer\s+\S{8,}", re.I)
MARK = re.compile(r"GEMMA4-BOOT (\w+) (begin|done|failed|note) (\d+) ?(.*)")
Result = TypeVar("Result")
seen_secrets: set[str] = set()


class Failure(Exception):
    """What could not be done, in words for the console. `code` is HTTP's, 0 without an answer."""

    def __init__(self, words: str, code: int = -1) -> None:
        super().__init__(words)
        self.code = code


class Progress:
    """The phase that a boot is in, so that whatever fails is marked there."""

    def __init__(self, first: str) -> None:
        """A boot begins with the mark that its first phase begins."""
        self.phase = self._begun = ""
        self.begin(first)

    def begin(self, phase: str, words: str = "") -> None:
        """Marks that a phase begins, once."""
        self.phase = phase
        if phase != self._begun:
            mark(phase, "begin", words)
        self._begun = phase

    def tell(self, state: str, words: str = "") -> None:
        mark(self.phase, state, words)


def shown(text: str) -> str:
    """`text` without control characters and without what is, or looks like, a credential."""
    for secret in seen_secrets:
        text = text.replace(secret, "[redacted]")
    text = SECRET_SHAPES.sub("[redacted]", text)
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def clean(text: str, limit: int = 500) -> str:
    """The same in one line."""
    return " ".join(shown(text[:60_000]).split())[:limit]


def mark(phase: str, state: str, words: str = "") -> None:
    """One line in boot.log, on the console, and for whoever runs this; a full disk is no matter."""
    line = f"GEMMA4-BOOT {phase} {state} {int(time.time())} {clean(words)}".rstrip()
    line = line.encode("ascii", "replace").decode() + "\n"  # whatever the console can show
    for path, flags in ((LOG, os.O_CREAT), (ROOT / "dev/console", os.O_NOCTTY | os.O_NONBLOCK)):
        with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_APPEND | flags), "w") as file:
            file.write(line)
    with suppress(OSError):
        print(line, end="", flush=True)


def latest_boot(first: str) -> list[dict[str, Any]]:
    """The marks since the last boot began, with its phase `first`; oldest first."""
    marks: list[dict[str, Any]] = []
    lines = LOG.read_text(errors="replace").splitlines() if LOG.exists() else []
    for found in filter(None, map(MARK.fullmatch, lines)):
        phase, state, at, words = found.groups()
        marks = [] if (phase, state) == (first, "begin") else marks
        marks.append({"phase": phase, "state": state, "at": int(at), "words": words})
    return marks


def stored(path: Path, default: Any) -> Any:
    """The JSON that a file of this program holds; `default` where it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def run(*argv: str, minutes: float = 2, complaints: int = PIPE) -> str:
    """What a program printed; with `complaints` set to BOTH its two streams in their order.

    Raises Failure with the last line of what it complained of.
    """
    called = " ".join(argv[:2])
    try:
        done = subprocess.run(
            argv, stdin=NOTHING, stdout=PIPE, stderr=complaints, timeout=minutes * max(MINUTE_S, 5)
        )
    except FileNotFoundError:
        raise Failure(f"{argv[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{called} took more than {minutes} minutes") from None
    if done.returncode:
        text = (done.stderr or done.stdout).decode("utf-8", "replace")
        # docker's own last line only points to its help.
        lines = [line for line in text.split("\n") if line.strip() and "--help'" not in line]
        raise Failure(f"{called}: {lines[-1] if lines else done.returncode}")
    return done.stdout.decode("utf-8", "replace").strip()


def in_background(*act: str) -> None:
    """The installed program as a process of its own, which outlives whoever asked for it."""
    argv = [sys.executable, str(PROGRAM), *act]
    subprocess.Popen(argv, stdin=NOTHING, stdout=NOTHING, stderr=NOTHING, start_new_session=True)


def ask(url: str, method: str = "GET", **headers: str) -> str:
    """The body of an answer. Raises Failure with the reason that the server gives.

    Knows no proxy and no redirection: what is sent along reaches this host and no other.
    """
    parts = urlsplit(url)
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with closing(connect(parts.netloc, timeout=10)) as link:
            link.request(method, urlunsplit(("", "", *parts[2:])), headers=headers)
            answer = link.getresponse()
            text = answer.read(4_000_000).decode("utf-8", "replace")
    except (OSError, HTTPException, OverflowError) as error:
        raise Failure(f"no answer from {parts.netloc}: {error}", 0) from None
    if answer.status != 200:
        with suppress(ValueError, TypeError, LookupError):
            text = json.loads(text)["error"]["message"]
        raise Failure(f"HTTP {answer.status}: {clean(str(text))}", answer.status)
    return text


def tried(times: int, step: Callable[[], Result], passes: Callable[[Failure], bool]) -> Result:
    """What `step` returns; a failure that `passes` by itself is met by another try."""
    for left in reversed(range(times)):
        try:
            return step()
        except Failure as failure:
            if not left or not passes(failure):
                raise
        time.sleep(MINUTE_S / 6)
    raise ValueError("no try was allowed")


def transient(failure: Failure) -> bool:
    """Whether a request failed for the network or for a server in trouble."""
    return failure.code in (0, 429) or failure.code >= 500


def healthy(document: dict[str, Any]) -> bool:
    """Whether the model server says that it can answer."""
    with suppress(Failure):
        return bool(ask(document["health"]) or True)  # vLLM's answer is empty
    return False
