"""One cell of `make bench-engine`: streams that begin together, followed to their last token.

Knows OpenAI's HTTP interface and how a server is started and ended; knows no engine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STREAMS = (1, 4, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
_START_PATIENCE_S = 1800.0
_ANSWER_PATIENCE_S = 600.0
_END_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Answer:
    """When, in seconds since the round began, the first and the last token of an answer came."""

    first: float
    last: float
    tokens: int


@dataclass(frozen=True)
class BenchServer:
    """An engine behind OpenAI's HTTP interface: how it is started, and as what it serves."""

    name: str
    version: str
    argv: list[str]
    port: int
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)


def cell_of(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of one round of streams that began together.

    output_tps: all their tokens over the time until the last one came, prompts included. ttft_ms:
    median time to the first token. tpot_ms: median time between the tokens of one stream.
    """
    between = [(one.last - one.first) / (one.tokens - 1) for one in answers]
    return {
        "output_tps": sum(one.tokens for one in answers) / max(one.last for one in answers),
        "ttft_ms": 1000 * statistics.median(one.first for one in answers),
        "tpot_ms": 1000 * statistics.median(between),
    }


def middle_cell(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The round whose tokens a second are the median, with the spread of all beside it."""
    ordered = sorted(cells, key=lambda cell: cell["output_tps"])
    rates = [cell["output_tps"] for cell in ordered]
    spread = (rates[-1] - rates[0]) / (2 * statistics.mean(rates))
    return dict(ordered[(len(ordered) - 1) // 2]) | {"spread": round(spread, 3)}


def all_cells(
    one_round: Callable[[Sequence[Sequence[int]]], dict[str, float]],
    prompts: Sequence[Sequence[int]],
    repeats: int,
) -> dict[str, dict[str, float]]:
    """The figures by streams: a round to warm up, then `repeats` that count."""
    cells = {}
    for streams in STREAMS:
        one_round(prompts[:streams])
        rounds = [one_round(prompts[:streams]) for _ in range(repeats)]
        cells[str(streams)] = middle_cell(rounds)
    return cells


def streamed_answer(server: BenchServer, prompt: Sequence[int], begun: float) -> Answer:
    """Ask for exactly OUTPUT_TOKENS tokens after `prompt`, and follow the stream.

    Raises RuntimeError where the answer is another one than was asked for.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_ANSWER_PATIENCE_S)
    body = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{server.name}: HTTP {response.status}: {response.read(500)!r}")
    first = last = 0.0
    tokens = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter() - begun
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        if event.get("choices"):
            first, last = first or now, now
    connection.close()
    if tokens != OUTPUT_TOKENS:
        raise RuntimeError(f"{server.name}: {tokens} tokens instead of {OUTPUT_TOKENS}")
    return Answer(first, last, tokens)


def server_round(server: BenchServer, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """One stream for each prompt, all at once. Raises RuntimeError where one of them failed."""
    answers: list[Answer] = []
    failures: list[str] = []
    begun = time.perf_counter()

    def ask(prompt: Sequence[int]) -> None:
        try:
            answers.append(streamed_answer(server, prompt, begun))
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            failures.append(str(error) or type(error).__name__)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(failures[0])
    return cell_of(answers)


@contextlib.contextmanager
def running(server: BenchServer, log: Path) -> Iterator[None]:
    """The server, from its /health saying 200 until it has ended. Raises RuntimeError."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            server.argv,
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_healthy(server, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(server: BenchServer, process: subprocess.Popen[bytes], log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < _START_PATIENCE_S:
        if process.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
            raise RuntimeError(f"{server.name} ended with {process.returncode}: {' '.join(last)}")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.5)
    raise RuntimeError(f"{server.name} does not come up")
