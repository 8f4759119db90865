"""A gcloud that goes wrong around a sound one: what it does is done, what it says is spoilt.

Stands in the sound program's place on PATH and starts it, so that every fault has its side effect.
Knows no command and no cloud.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

# While no fault is on order, the sound program is all that runs.
_GATE_SOURCE = """#!/bin/sh
if [ -s {here}/faults.json ]; then exec {here}/gcloud-spoilt "$@"; fi
exec {here}/gcloud-sound "$@"
"""
# A fault is asked for by the first words of a command. The sound program runs first, unless the
# fault is `instead`, so that a create that is answered badly was made all the same.
_SPOILT_SOURCE = """#!{python} -SE
import json, os, signal, subprocess, sys, time
given, here = sys.argv[1:], {here!r}
sound = os.path.join(here, "gcloud-sound")
with open(os.path.join(here, "faults.json")) as file:
    faults = json.load(file)
fault = next((one for one in faults if given[: len(one["words"])] == one["words"]), None)
if fault is None:
    os.execv(sound, [sound, *given])
with open(os.path.join(here, "faults.jsonl"), "a") as file:
    file.write(json.dumps([os.getpid(), *given]) + "\\n")
if fault.get("asks"):  # a prompt: it waits for a line that nobody types
    print("Do you want to continue (Y/n)?  ", end="", file=sys.stderr, flush=True)
    answered = sys.stdin.read()
    print("Aborted by user." if not answered else "Deleted.", file=sys.stderr)
out, err, status = b"", b"", 0
if not fault.get("instead"):
    ended = subprocess.run([sound, *given], stdin=subprocess.DEVNULL, capture_output=True)
    out, err, status = ended.stdout, ended.stderr, ended.returncode
if "cut" in fault:
    out = out[: fault["cut"]]
out = fault.get("before", "").encode() + out + bytes.fromhex(fault.get("after_hex", ""))
if "said" in fault:
    out = fault["said"].encode("utf-8", "surrogateescape")
err = fault.get("warned", "").encode() + err
sys.stdout.buffer.write(out)
sys.stderr.buffer.write(err)
sys.stdout.flush()
sys.stderr.flush()
if fault.get("hangs"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    time.sleep(600)
line = b"x" * 65536 + b"\\n"
while fault.get("endless"):
    sys.stdout.buffer.write(line)
sys.exit(fault.get("status", status))
"""


class SpoiltGcloud:
    """The gcloud of `folder`, from now on with faults on order; `fault` orders, `mend` ends all.

    `pids` are the processes that met a fault, so that a test can see that none is left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sound, program = folder / "gcloud-sound", folder / "gcloud"
        if not sound.exists():
            program.replace(sound)
        spoilt = _SPOILT_SOURCE.format(python=sys.executable, here=str(folder))
        self._written("gcloud-spoilt", spoilt)
        self.mend()
        self._written("gcloud", _GATE_SOURCE.format(here=shlex.quote(str(folder))))

    def fault(self, *words: str, **how: Any) -> None:
        """Every command that begins with `words` goes wrong: `instead` of being carried out or
        after it. `said` is its whole output, `cut` keeps so many bytes of it, `before` and
        `after_hex` stand around it, `warned` before its errors, `status` is its end; `hangs`,
        `endless` and `asks` are ways of not ending.
        """
        self._ordered.insert(0, {"words": list(words), **how})
        self._write()

    def mend(self) -> None:
        self._ordered: list[dict[str, Any]] = []
        self._write()
        self._met.write_text("")

    def pids(self) -> list[int]:
        return [int(json.loads(line)[0]) for line in self._met.read_text().splitlines()]

    @property
    def _met(self) -> Path:
        return self._folder / "faults.jsonl"

    def _write(self) -> None:
        self._written("faults.json", json.dumps(self._ordered) if self._ordered else "")

    def _written(self, name: str, text: str) -> None:
        fresh = self._folder / f"{name}.new"  # a rename, so that nobody reads half of it
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(self._folder / name)
