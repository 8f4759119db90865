"""What the JSON of three other load generators means in our words, one function a tool.

That of vLLM is a part, because a rig reads it as well. Knows no command line and writes nothing;
each result has a note on what was taken for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forge.parts.boundaries.report_vllm import (
    ImportFacts,
    ReadResult,
    imported_cell,
    imported_sample,
    read_vllm,
)
from forge.parts.knowledge.report_schema import Distribution


def read_guidellm(data: dict[str, Any], facts: ImportFacts) -> ReadResult:
    """Each entry of a guidellm report's `benchmarks` is one cell; successful requests only."""
    cells = []
    usage = True
    for entry in _list(data, "benchmarks"):
        config, metrics = _dict(entry, "config"), _dict(entry, "metrics")
        usage = usage and bool(config.get("prefer_response_metrics"))
        strategy = _dict(config, "strategy")
        kind = strategy.get("type_")
        rate = strategy.get("rate") if kind in ("constant", "poisson") else None
        load: Any = 1 if kind == "synchronous" else strategy.get("streams")
        load = load or strategy.get("max_concurrency") or facts.concurrency
        if rate is None and load is None:
            raise ValueError(f"the load of a guidellm strategy {kind!r} is unknown: give it")
        totals = _dict(metrics, "request_totals")
        done, sent = int(totals.get("successful") or 0), int(totals.get("total") or 0)
        seen = _dict(entry, "scheduler_metrics")
        span = float(seen.get("measure_end_time", 0)) - float(seen.get("measure_start_time", 0))
        found = {
            "duration_s": span if span > 0 else None,
            "requests_sent": sent or None,
            "requests_completed": done,
            "errors": {k: int(totals[k]) for k in ("errored", "incomplete") if totals.get(k)},
            "request_rps": _guide_mean(metrics, "requests_per_second"),
            "output_tps": _guide_mean(metrics, "output_tokens_per_second"),
            "total_tps": _guide_mean(metrics, "tokens_per_second"),
            "achieved_concurrency": _guide_mean(metrics, "request_concurrency"),
            "prompt_tokens": _guide_times(metrics, "prompt_token_count"),
            "completion_tokens": _guide_times(metrics, "output_token_count"),
            "ttft_ms": _guide_times(metrics, "time_to_first_token_ms"),
            "tpot_ms": _guide_times(metrics, "inter_token_latency_ms"),
            "e2e_ms": _guide_times(metrics, "request_latency", 1000.0),
        }
        cells.append(
            imported_cell(
                facts,
                None if rate is not None else int(load),
                rate,
                _mean_of(found["prompt_tokens"]),
                _mean_of(found["completion_tokens"]),
                found,
                "no request succeeded" if not done else "",
            )
        )
    return ReadResult(
        tool="guidellm",
        tool_version=str(_dict(data, "metadata").get("guidellm_version", "")),
        date="",
        api="unknown",
        prompts="unknown",
        token_source="usage" if usage else "client-tokenizer",
        cells=cells,
        note="its inter-token latency is our tpot; its time per output token includes TTFT and was"
        " left out; rates are over the requests that succeeded",
    )


def read_aiperf(data: dict[str, Any], facts: ImportFacts) -> ReadResult:
    """One profile_export_aiperf.json is one cell."""
    phase = _aiperf_phase(data.get("input_config") or {})
    rate: Any = phase.get("rate") or phase.get("request_rate")
    load: Any = facts.concurrency or phase.get("concurrency")
    if rate is None and load is None:
        raise ValueError("the file says neither concurrency nor rate: give --concurrency")
    done = int(_aiperf_mean(data, "request_count") or 0)
    errors = int(_aiperf_mean(data, "error_request_count") or 0)
    metrics = {
        "duration_s": _aiperf_mean(data, "benchmark_duration"),
        "requests_sent": done + errors or None,
        "requests_completed": done,
        "errors": {"errored": errors} if errors else {},
        "request_rps": _aiperf_mean(data, "request_throughput"),
        "output_tps": _aiperf_mean(data, "output_token_throughput"),
        "goodput_rps": _aiperf_mean(data, "goodput"),
        "prompt_tokens": _aiperf_times(data, "input_sequence_length", done),
        "completion_tokens": _aiperf_times(data, "output_sequence_length", done),
        "ttft_ms": _aiperf_times(data, "time_to_first_token", done),
        "tpot_ms": _aiperf_times(data, "inter_token_latency", done),
        "icl_ms": _aiperf_times(data, "inter_chunk_latency", done),
        "e2e_ms": _aiperf_times(data, "request_latency", done),
    }
    broken = "no request completed" if not done else ""
    if data.get("was_cancelled") or data.get("is_complete") is False:
        broken = f"the run was cut off: {data.get('incomplete_reason') or 'cancelled'}"
    cell = imported_cell(
        facts,
        int(load) if load is not None else None,
        None if load is not None else float(rate),
        _mean_of(metrics["prompt_tokens"]),
        _mean_of(metrics["completion_tokens"]),
        metrics,
        broken,
    )
    return ReadResult(
        tool="aiperf",
        tool_version=str(data.get("aiperf_version", "")),
        date=str(data.get("start_time") or "")[:10],
        api="unknown",
        prompts="unknown",
        token_source="unknown",
        cells=[cell],
        note="its inter-token latency is our tpot, its inter-chunk latency our icl",
    )


def _mean_of(sample: object) -> float | None:
    return sample.mean or sample.median if isinstance(sample, Distribution) else None


def _guide_times(metrics: dict[str, Any], name: str, scale: float = 1.0) -> Distribution | None:
    good = _dict(_dict(metrics, name), "successful")
    spread = _dict(good, "percentiles")
    values = [good.get("mean"), good.get("median"), spread.get("p90"), spread.get("p99")]
    scaled = [value * scale if isinstance(value, int | float) else None for value in values]
    return imported_sample(int(good.get("count") or 0), *scaled)


def _guide_mean(metrics: dict[str, Any], name: str) -> float | None:
    value = _dict(_dict(metrics, name), "successful").get("mean")
    return float(value) if isinstance(value, int | float) else None


def _aiperf_times(data: dict[str, Any], name: str, n: int) -> Distribution | None:
    found = _dict(data, name)
    keys = ("avg", "p50", "p90", "p99")
    return imported_sample(int(found.get("count") or n), *(found.get(key) for key in keys))


def _aiperf_mean(data: dict[str, Any], name: str) -> float | None:
    value = _dict(data, name).get("avg")
    return float(value) if isinstance(value, int | float) else None


def _aiperf_phase(config: dict[str, Any]) -> dict[str, Any]:
    """The phase that was measured: the last one that is not a warm-up."""
    phases = config.get("phases") or config.get("profiling") or {}
    listed: Iterable[Any] = phases if isinstance(phases, list) else [phases]
    found = [p for p in listed if isinstance(p, dict) and p.get("name") != "warmup"]
    return found[-1] if found else {}


def _dict(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _list(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{key} is missing or empty: not this tool's file")
    return value


ADAPTERS: dict[str, Callable[[dict[str, Any], ImportFacts], ReadResult]] = {
    "vllm": read_vllm,
    "guidellm": read_guidellm,
    "aiperf": read_aiperf,
}
