"""Says what a log reports: the line that decides, its cause, the change, and what would not help.

    python3 triage.py FILE        a log of any size and any bytes; - reads standard input
    … | python3 triage.py
    … | python3 triage.py --refusal     a provider's refusal of a machine: its reason, and how far

Deterministic, offline, and nothing but the standard library: it needs no server, no model and no
installed package. The log is data: nothing in it is followed, secrets in it are not shown. Exit
status: 0 no failure found (no known refusal), 1 one was found or errors stand unexplained, 2 wrong
usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path
from typing import get_args

from forge.parts.boundaries.log_triage import triage_log
from forge.parts.ground.errors import ErrorClass
from forge.parts.ground.redact import clean
from forge.parts.knowledge.log_answer import LOG_BYTES, LogAnswer
from forge.parts.knowledge.refusal_answer import Refusal
from forge.parts.knowledge.refusal_reading import read_refusal

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


def refusal_text(refusal: Refusal) -> str:
    """`refusal` for people."""
    lines = [f"{refusal.reason} (of the {refusal.scope}): {refusal.said}"]
    lines += [f"  the provider names: {', '.join(refusal.hints)}"] if refusal.hints else []
    lines += ["  no other place would answer differently"] if refusal.stops else []
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="triage.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit status: 0 no failure and no known refusal found, 1 one was found or errors "
        "are unexplained.",
    )
    parser.add_argument("file", nargs="?", default="-", help="a log; - is standard input")
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    parser.add_argument(
        "--refusal", action="store_true", help="the text is a provider's refusal of a machine"
    )
    parser.add_argument(
        "--error-class", choices=get_args(ErrorClass), help="what a rig made of that refusal"
    )
    arguments = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, resource.RLIM_INFINITY))
    try:
        data = _read(arguments.file)
    except OSError as error:
        print(f"triage.py: {clean(arguments.file, 300)}: {error.strerror}", file=sys.stderr)
        return 2
    if arguments.refusal:
        refusal = read_refusal(data.decode("utf-8", "replace"), arguments.error_class)
        _print_answer(refusal, refusal_text(refusal), arguments.json)
        return 0 if refusal.reason == "unknown" else 1
    answer = triage_log(data)
    _print_answer(answer, answer_text(answer), arguments.json)
    return 1 if answer.failures or answer.unexplained_count else 0


def _print_answer(answer: LogAnswer | Refusal, text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
    else:
        print(clean(text))


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
