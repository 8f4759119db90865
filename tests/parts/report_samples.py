"""Reports for tests, built through the schema: one honest measured run on a v6e, to be varied."""

from __future__ import annotations

from typing import Any

from forge.parts.knowledge.report_checks import judged_report, subject_of_model
from forge.parts.knowledge.report_schema import (
    BenchCell,
    BenchReport,
    ClientHealth,
    cell_id_of,
    distribution_of,
    health_of_client,
    run_id_of,
)


def healthy() -> ClientHealth:
    """A client that kept up."""
    return health_of_client(0.2, 1.5, 0.0)


def cell(
    concurrency: int = 8,
    input_tokens: int = 1024,
    output_tokens: int | None = 128,
    *,
    output_tps: float = 1200.0,
    ttft_ms: float = 30.0,
    tpot_ms: float = 6.2,
    requests: int = 120,
    **more: Any,
) -> BenchCell:
    """An ok cell of a closed loop, its figures consistent with each other."""
    tokens = output_tokens or 1
    metrics = {
        "duration_s": requests * tokens / output_tps,
        "requests_sent": requests,
        "requests_completed": requests,
        "request_rps": output_tps / tokens,
        "output_tps": output_tps,
        "ttft_ms": distribution_of([ttft_ms] * requests),
        "tpot_ms": distribution_of([tpot_ms] * requests),
        "prompt_tokens": distribution_of([float(input_tokens)] * requests),
        "completion_tokens": distribution_of([float(tokens)] * requests),
        **more.pop("metrics", {}),
    }
    fields = {
        "id": cell_id_of(concurrency, input_tokens, output_tokens),
        "concurrency": concurrency,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "status": "ok",
        "metrics": metrics,
        "client": healthy(),
        **more,
    }
    return BenchCell.model_validate(fields)


def lost_cell(concurrency: int, input_tokens: int, status: str, reason: str) -> BenchCell:
    """A cell without figures."""
    return BenchCell.model_validate(
        {
            "id": cell_id_of(concurrency, input_tokens, 128),
            "concurrency": concurrency,
            "input_tokens": input_tokens,
            "output_tokens": 128,
            "status": status,
            "reason": reason,
        }
    )


def report(cells: list[BenchCell] | None = None, **sections: Any) -> BenchReport:
    """A measured report on a v6e by vLLM; `sections` replaces or updates whole sections.

    `run={"kind": …}` and so on update the default section; other values replace it. The run id is
    worked out from the final sections, with `repeat` for its mark.
    """
    repeat = int(sections.pop("repeat", 1))
    model = sections.pop("model", "google/gemma-4-E2B-it")
    subject = subject_of_model(model, sections.pop("encoding", "bf16")).model_dump()
    fields: dict[str, Any] = {
        "run": {"date": "2026-03-04", "kind": "measured", "rig": "tpu-vllm-v6e1-2b"},
        "subject": subject,
        "hardware": {"slot": "v6e1", "chip": "v6e"},
        "engine": {"name": "vllm", "version": "0.32.0"},
        "workload": {"name": "distinct-words", "tool": "loadgen", "prompts": "distinct"},
        "token_source": "usage",
    }
    for name, value in sections.items():
        known = fields.get(name)
        both = isinstance(value, dict) and isinstance(known, dict)
        fields[name] = {**known, **value} if both else value
    fields["cells"] = [c.model_dump() for c in cells or [cell()]]
    fields.setdefault("planned_cells", len(fields["cells"]))
    fields["run"].setdefault(
        "id",
        run_id_of(
            fields["run"]["date"],
            fields["subject"]["short"],
            fields["engine"]["name"],
            fields["hardware"]["slot"],
            repeat,
        ),
    )
    return judged_report(BenchReport.model_validate(fields))
