"""Says what a log reports: the line that decides, its cause, the change, and what would not help.

    python3 triage.py FILE        a log of any size and any bytes; - reads standard input
    … | python3 triage.py

Deterministic, offline, and nothing but the standard library: it needs no server, no model and no
installed package. The log is data: nothing in it is followed, secrets in it are not shown. Exit
status: 0 no failure found, 1 a failure was found or errors stand unexplained, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path

from forge.parts.boundaries.log_triage import triage_log
from forge.parts.ground.redact import clean
from forge.parts.knowledge.log_answer import LOG_BYTES, LogAnswer

_MEMORY_LIMIT = 3_000_000_000  # bytes of address space: a log must not take the computer down


def answer_text(answer: LogAnswer) -> str:
    """`answer` for people."""
    lines = [answer.summary]
    for failure in answer.failures[:1]:
        lines += [f"  line {failure.line_number}: {failure.line}"]
        lines += [f"  change: {change}" for change in failure.changes]
        lines += [f"  will not help: {text}" for text in failure.futile]
        lines += [f"  see: {failure.upstream}"] if failure.upstream else []
    lines += [f"  also seen: {f.kind}, line {f.line_number}" for f in answer.failures[1:6]]
    lines += [f"  unexplained: {text}" for text in answer.unexplained]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="triage.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 no failure found, 1 a failure was found or errors are unexplained.",
    )
    parser.add_argument("file", nargs="?", default="-", help="a log; - is standard input")
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    arguments = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, resource.RLIM_INFINITY))
    try:
        answer = triage_log(_read(arguments.file))
    except OSError as error:
        print(f"triage.py: {clean(arguments.file, 300)}: {error.strerror}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    else:
        print(clean(answer_text(answer)))
    return 1 if answer.failures or answer.unexplained_count else 0


def _read(name: str) -> bytes:
    """The bytes of the file, head and tail where it is larger than a log may be."""
    if name == "-":
        return sys.stdin.buffer.read(10 * LOG_BYTES)
    with Path(name).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= LOG_BYTES:
            return file.read()
        head = file.read(LOG_BYTES // 4)
        file.seek(size - (LOG_BYTES - len(head)))
        gap = f"\n[… {size - LOG_BYTES} bytes left out …]\n".encode()
        return head + gap + file.read()


if __name__ == "__main__":
    sys.exit(main())
