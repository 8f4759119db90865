"""The failure bank's cases, and the three forms in which each is tried: alone, buried, nested.

A case stands in tests/failure_cases/<stage>.txt: ``== kind | words; that; must``, then the log, its
deciding line behind ``> ``. Words are joined with | where one of them is enough.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CASES = Path(__file__).parent / "failure_cases"
STAGES = tuple(sorted(path.stem for path in CASES.glob("*.txt") if path.stem != "healthy"))
FORMS = ("alone", "buried", "nested")

# What servers, containers and machines write in health, some of it with alarming words.
_ORDINARY = (
    "INFO {d} [loggers.py:118] Engine 000: Avg prompt throughput: {n}.1 tokens/s, Waiting: {s}",
    'INFO:     127.0.0.1:{p} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    'INFO:     127.0.0.1:{p} - "GET /health HTTP/1.1" 200 OK',
    "INFO {d} [gpu_model_runner.py:2653] Model loading took {s}.{n} GiB and {n}.2 seconds",
    "INFO {d} [config.py:840] error budget 0.1 %, max_errors=10, on_failure=report",
    '{d} dockerd[611]: time="2026-10-01T10:00:00Z" level=info msg="Loading containers: done."',
    "{d} systemd[1]: Started Session {n} of User dev.",
    "Loading safetensors checkpoint shards:  {n}% Completed | {s}/10 [00:0{s}<00:03,  1.20it/s]",
    "INFO {d} [scheduler.py:88] preempted=0 killed=0 exhausted=0 waiting={s}",
    "DEBUG {d} [cache.py:51] evicted {n} blocks of request chatcmpl-{h}",
    "llama_model_loader: - kv  {s}: general.architecture str = llama",
    '[GIN] 2026/10/01 - 10:00:{s} | 200 |  {n}.4ms | 127.0.0.1 | POST "/api/chat"',
)
_WRAPPERS = (
    ("vllm/entrypoints/openai/api_server.py", "run_server", "RuntimeError: server start aborted"),
    ("vllm/v1/engine/async_llm.py", "from_vllm_config", "RuntimeError: engine was not created"),
    (
        "vllm/v1/engine/core_client.py",
        "wait_for_engine_startup",
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}",
    ),
)


@dataclass(frozen=True)
class FailureCase:
    """A log, the kind that is right for it, its deciding line, and what the answer has to name."""

    stage: str
    kind: str
    must: tuple[str, ...]
    text: str
    line: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.line[:60]}"


def read_cases(stage: str) -> list[FailureCase]:
    """The cases of one stage, or of ``healthy``, in the file's order."""
    found = []
    text = (CASES / f"{stage}.txt").read_text(encoding="utf-8")
    blocks = re.split(r"^== ", text, flags=re.M)[1:]
    for block in blocks:
        head, _, body = block.partition("\n")
        kind, _, must = head.partition(" | ")
        lines = body.strip("\n").split("\n")
        deciding = [line[2:] for line in lines if line.startswith("> ")]
        plain = "\n".join(line[2:] if line.startswith("> ") else line for line in lines)
        words = tuple(word.strip() for word in must.split(";") if word.strip())
        line = deciding[0].strip() if deciding else ""
        found.append(FailureCase(stage, kind.strip(), words, plain, line))
    return found


def all_cases() -> list[FailureCase]:
    """Every case but the healthy ones."""
    return [case for stage in STAGES for case in read_cases(stage)]


def ordinary_lines(count: int, seed: int = 1) -> Iterator[str]:
    """`count` lines of ordinary log, the same for the same seed."""
    source = random.Random(seed)
    for _ in range(count):
        yield source.choice(_ORDINARY).format(
            d=f"11-0{source.randint(1, 9)} 10:{source.randint(10, 59)}:{source.randint(10, 59)}",
            n=source.randint(10, 99),
            s=source.randint(1, 9),
            p=source.randint(30_000, 60_000),
            h=f"{source.getrandbits(128):032x}",
        )


def in_form(text: str, form: str) -> str:
    """`text` alone, in the midst of 300 ordinary lines, or repeated under nested tracebacks."""
    if form == "alone":
        return text
    if form == "buried":
        lines = list(ordinary_lines(300, seed=len(text)))
        return "\n".join([*lines[:170], text, *lines[170:]])
    parts = [text]
    for path, function, words in _WRAPPERS:
        parts += [
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            f'  File "/opt/venv/lib/python3.12/site-packages/{path}", line 214, in {function}',
            "    raise error",
            words,
        ]
    return "\n".join(["Traceback (most recent call last):", *parts, "", text, *parts[-4:]])
