"""What a result file of `vllm bench serve` means in a report's words; and how its texts stay out.

Knows no command line and no rig. Importers of other tools' files build their cells here as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from forge.parts.ground.schema_faults import schema_faults
from forge.parts.knowledge.report_schema import (
    P99_LEAST_SAMPLES,
    BenchCell,
    Distribution,
    cell_id_of,
)

# Texts of the prompts and of the answers: no figure needs them, and they may be anybody's.
_TEXTS_LEFT_OUT = frozenset({"generated_texts", "requests", "prompts"})


@dataclass(frozen=True)
class ImportFacts:
    """What the tools' files do not say and the importer must: what was measured, where, by whom.

    origin: the public source of the file. concurrency, input_tokens, output_tokens: targets, for
    files that lack them. token_source: '' takes what the file says, else 'unknown'.
    """

    model: str
    encoding: str
    hardware: str
    engine: str
    origin: str
    date: str = ""
    engine_version: str = ""
    concurrency: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    token_source: str = ""


@dataclass(frozen=True)
class ReadResult:
    """What an adapter found in one file: cells, and what is the same for all of them."""

    tool: str
    tool_version: str
    date: str
    api: str
    prompts: str
    token_source: str
    cells: list[BenchCell]
    note: str


def read_vllm(data: dict[str, Any], facts: ImportFacts) -> ReadResult:
    """One file of `vllm bench serve --save-result` is one cell.

    A finite request_rate is an open loop; else max_concurrency is the closed loop's, and without
    one every prompt was in flight at once. Goodput's limits are not in the file. Raises ValueError
    that says what is missing.
    """
    done = int(imported_number(data, "completed"))
    failed = data.get("failed", int(imported_number(data, "num_prompts")) - done)
    rate = data.get("request_rate", "inf")
    open_loop = isinstance(rate, int | float)
    load: Any = facts.concurrency or data.get("max_concurrency") or data.get("num_prompts")
    prompt, output = (
        imported_number(data, key) / done if done else None
        for key in ("total_input_tokens", "total_output_tokens")
    )
    metrics = {
        "duration_s": imported_number(data, "duration"),
        "requests_sent": done + failed,
        "requests_completed": done,
        "errors": {"failed": failed} if failed else {},
        "request_rps": data.get("request_throughput"),
        "output_tps": data.get("output_throughput"),
        "total_tps": data.get("total_token_throughput"),
        "goodput_rps": data.get("request_goodput"),
        "prompt_tokens": imported_sample(done, prompt, None, None, None),
        "completion_tokens": imported_sample(done, output, None, None, None),
        "ttft_ms": _vllm_times(data, "ttft", done),
        "tpot_ms": _vllm_times(data, "tpot", done),
        "icl_ms": _vllm_times(data, "itl", done),
        "e2e_ms": _vllm_times(data, "e2el", done),
    }
    cell = imported_cell(
        facts,
        None if open_loop else int(load),
        float(rate) if open_loop else None,
        prompt,
        output,
        metrics,
        "no request completed" if not done else "",
    )
    day = str(data.get("date", ""))
    backend = str(data.get("backend") or data.get("endpoint_type") or "")
    return ReadResult(
        tool="vllm bench serve",
        tool_version="",
        date=f"{day[:4]}-{day[4:6]}-{day[6:8]}" if len(day) >= 8 else "",
        api="chat" if "chat" in backend else "completions",
        prompts="unknown",
        token_source="unknown",
        cells=[cell],
        note="its TTFT ends at the first chunk that has choices, even an empty one; ITL is our icl",
    )


def imported_cell(
    facts: ImportFacts,
    concurrency: int | None,
    rate: float | None,
    prompt: float | None,
    output: float | None,
    metrics: dict[str, Any],
    broken: str,
) -> BenchCell:
    """A cell with targets from the facts, else from what went out on average (tokens).

    broken: why the cell failed, or ''. Raises ValueError for an unknown prompt length and for
    figures that no cell may have.
    """
    target = facts.input_tokens or (round(prompt) if prompt else None)
    if not target:
        raise ValueError("the prompts' length is unknown: give --input-tokens")
    length = facts.output_tokens or (round(output) if output else None)
    try:
        return BenchCell.model_validate(
            {
                "id": cell_id_of(concurrency, target, length, rate_rps=rate),
                "mode": "closed" if rate is None else "open",
                "concurrency": concurrency,
                "rate_rps": rate,
                "input_tokens": target,
                "output_tokens": length,
                "status": "failed" if broken else "ok",
                "reason": broken,
                "metrics": None if broken else metrics,
            }
        )
    except ValidationError as error:
        raise ValueError("; ".join(schema_faults(error))) from None


def imported_sample(n: int, mean: Any, median: Any, p90: Any, p99: Any) -> Distribution | None:
    """Five figures as a distribution; None where the tool wrote zeros for 'nothing'."""
    if not n or (not mean and not median):
        return None
    if n < P99_LEAST_SAMPLES:
        p99 = None
    return Distribution(n=n, mean=mean, median=median, p90=p90, p99=p99)


def imported_number(data: dict[str, Any], key: str) -> float:
    """The number that a file must have under `key`; ValueError where it has none."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is missing or no number: not this tool's file")
    return float(value)


def without_texts(value: Any) -> Any:
    """A result file's content without what was asked and answered, at any depth."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in _TEXTS_LEFT_OUT}
        return {key: without_texts(item) for key, item in kept.items()}
    return [without_texts(item) for item in value] if isinstance(value, list) else value


def _vllm_times(data: dict[str, Any], name: str, n: int) -> Distribution | None:
    keys = (f"mean_{name}_ms", f"median_{name}_ms", f"p90_{name}_ms", f"p99_{name}_ms")
    return imported_sample(n, *(data.get(key) for key in keys))
