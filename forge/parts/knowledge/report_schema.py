"""What a benchmark report is: closed records, so that a typing error is refused, not stored.

Knows no folder, no chip's peak and no model's shape; times are in ms, rates per second.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CELLS = 2000  # of one report

# p99 of fewer samples is close to their maximum and says nothing about the hundredth request.
P99_LEAST_SAMPLES = 100
# Beyond these the load generator measured itself (facts: a saturated client reports no errors).
CLIENT_CPU_LIMIT = 0.70  # share of one core
CLIENT_LAG_LIMIT_MS = 20.0  # p99 of the event loop's lag
CLIENT_COALESCED_LIMIT = 0.05  # share of chunks that arrived in one read with an earlier one

ReportKind = Literal["measured", "imported", "derived"]
CellStatus = Literal["ok", "failed", "infeasible", "interrupted", "not_run"]
LoadMode = Literal["closed", "open"]
TokenSource = Literal["usage", "client-tokenizer", "chunks", "estimated", "unknown"]
KvEvidence = Literal["allocator", "engine-report", "flag", "assumed", "unknown"]

ReportWord = Annotated[str, Field(max_length=120)]
ReportText = Annotated[str, Field(max_length=2000)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
DayText = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Sha256Text = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

RUN_ID_PATTERN = (
    r"\d{4}-\d{2}-\d{2}"  # day
    r"-[a-z0-9][a-z0-9.]{0,23}(?:-[a-z0-9_.]{1,16}){0,3}"  # model, and its encoding
    r"-[a-z0-9]{2,16}-[a-z0-9]{2,16}"  # engine, hardware
    r"(?:--r(?:[2-9]|[1-9]\d{1,2}))?"  # repeat of the day; the first has none
)


class ClosedRecord(BaseModel):
    """Base of every record: unknown keys, NaN and infinities are refused."""

    # Built when first used: a server that is asked for no report does not wait for its schema.
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )


class Distribution(ClosedRecord):
    """A sample in five figures. The unit stands in the name of the field that holds it.

    n: how many samples; None where an imported source does not say. p99 needs n >= 100.
    """

    n: int | None = Field(default=None, ge=1)
    mean: float | None = Field(default=None, ge=0)
    median: float | None = Field(default=None, ge=0)
    p90: float | None = Field(default=None, ge=0)
    p99: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Distribution:
        if self.mean is None and self.median is None:
            raise ValueError("a distribution needs a mean or a median")
        if self.p99 is not None and (self.n is None or self.n < P99_LEAST_SAMPLES):
            raise ValueError(f"p99 of fewer than {P99_LEAST_SAMPLES} samples (n={self.n})")
        known = [value for value in (self.median, self.p90, self.p99) if value is not None]
        if known != sorted(known):
            raise ValueError("median, p90 and p99 do not rise")
        return self


class ClientHealth(ClosedRecord):
    """Whether the load generator could keep up; without it no latency is believed."""

    cpu_share: NonNegative = Field(description="CPU time over wall time, of one core.")
    loop_lag_p99_ms: NonNegative
    coalesced_share: Share = Field(description="Chunks that came in one read with an earlier one.")
    trustworthy: bool

    @model_validator(mode="after")
    def _may_be_trusted(self) -> ClientHealth:
        faults = self.faults()
        if self.trustworthy and faults:
            raise ValueError(f"marked trustworthy, but {'; '.join(faults)}")
        return self

    def faults(self) -> list[str]:
        """The limits that the client broke, in words; empty for a client that kept up."""
        found = []
        if self.cpu_share > CLIENT_CPU_LIMIT:
            found.append(f"client used {self.cpu_share:.0%} of a core")
        if self.loop_lag_p99_ms > CLIENT_LAG_LIMIT_MS:
            found.append(f"client's loop lagged {self.loop_lag_p99_ms:.0f} ms (p99)")
        if self.coalesced_share > CLIENT_COALESCED_LIMIT:
            found.append(f"{self.coalesced_share:.0%} of the chunks arrived together")
        return found


class CellMetrics(ClosedRecord):
    """What one cell gave. Only requests that completed count; None is 'not measured', never 0.

    ttft: request sent to first content. tpot: (last - first content) / (output tokens - 1), per
    request. icl: gaps between content chunks, pooled. e2e: sent to last content. The two
    from_schedule forms start when an open loop should have sent. Rates are over duration_s.
    """

    duration_s: float | None = Field(default=None, gt=0)
    requests_sent: int | None = Field(default=None, ge=1)
    requests_completed: int | None = Field(default=None, ge=0)
    errors: dict[ReportWord, int] = Field(default_factory=dict, max_length=20)
    request_rps: float | None = Field(default=None, ge=0)
    output_tps: float | None = Field(default=None, ge=0)
    total_tps: float | None = Field(default=None, ge=0, description="Prompt and output tokens.")
    per_stream_tps: float | None = Field(default=None, ge=0, description="Median 1000/tpot.")
    achieved_concurrency: float | None = Field(default=None, ge=0)
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    icl_ms: Distribution | None = None
    e2e_ms: Distribution | None = None
    ttft_from_schedule_ms: Distribution | None = None
    e2e_from_schedule_ms: Distribution | None = None
    goodput_rps: float | None = Field(default=None, ge=0)
    prompt_tokens: Distribution | None = Field(default=None, description="As the server counted.")
    completion_tokens: Distribution | None = Field(default=None, description="As it counted.")
    cached_tokens: int | None = Field(default=None, ge=0, description="From the prefix cache.")
    short_outputs: int | None = Field(default=None, ge=0, description="Ended before the target.")

    @model_validator(mode="after")
    def _adds_up(self) -> CellMetrics:
        sent, completed = self.requests_sent, self.requests_completed
        if sent is not None and completed is not None and completed > sent:
            raise ValueError(f"{completed} requests completed of {sent} sent")
        if self.request_rps is None and self.output_tps is None:
            raise ValueError("metrics without a request rate and without an output rate")
        return self

    @property
    def success_rate(self) -> float | None:
        """Completed over sent, 0 to 1; None where either is unknown."""
        if self.requests_sent is None or self.requests_completed is None:
            return None
        return self.requests_completed / self.requests_sent


class ImpliedWork(ClosedRecord):
    """What the chip must have done for a cell's figures, as shares of its peak; above 1: no."""

    flops_share: float | None = Field(default=None, ge=0)
    bytes_share: float | None = Field(default=None, ge=0)
    checks: list[ReportText] = Field(default_factory=list, max_length=10)


class BenchCell(ClosedRecord):
    """One point of a grid: a load, a prompt length, an output length, and what came of it.

    `id` is `cell_id_of` of the same four values. status other than ok needs a reason and has no
    metrics: a failed cell is never a zero. cv: standard deviation over mean of the main rate
    (output_tps, else request_rps) over `repeats` runs of this cell.
    """

    id: ReportWord
    mode: LoadMode = "closed"
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    rate_rps: float | None = Field(default=None, gt=0)
    input_tokens: int = Field(ge=1, description="Prompt length asked for.")
    output_tokens: int | None = Field(default=None, ge=1, description="Asked for; None: unknown.")
    status: CellStatus
    reason: ReportText = ""
    metrics: CellMetrics | None = None
    client: ClientHealth | None = None
    repeats: int = Field(default=1, ge=1)
    cv: float | None = Field(default=None, ge=0)
    short_sample: bool = Field(default=False, description="Fewer requests than the rule asks.")
    marks: list[ReportText] = Field(default_factory=list, max_length=10)
    implied: ImpliedWork | None = None

    @model_validator(mode="after")
    def _is_honest(self) -> BenchCell:
        if (self.concurrency is None) == (self.mode == "closed"):
            raise ValueError("a closed loop has a concurrency, an open one has none")
        if (self.rate_rps is None) == (self.mode == "open"):
            raise ValueError("an open loop has a rate, a closed one has none")
        wanted = cell_id_of(
            self.concurrency, self.input_tokens, self.output_tokens, rate_rps=self.rate_rps
        )
        if self.id != wanted:
            raise ValueError(f"the cell's id must be {wanted}")
        if self.status == "ok" and self.metrics is None:
            raise ValueError("an ok cell needs metrics")
        if self.status != "ok" and self.metrics is not None:
            raise ValueError(f"a cell that is {self.status} has no metrics")
        if self.status != "ok" and not self.reason.strip():
            raise ValueError(f"a cell that is {self.status} needs a reason")
        if self.cv is not None and self.repeats < 2:
            raise ValueError("a variation needs at least two repeats")
        return self

    @property
    def trusted(self) -> bool:
        """False when the client was the bottleneck; imported cells have no client to judge."""
        return self.client is None or self.client.trustworthy


class GoodputLimits(ClosedRecord):
    """What a request must keep to count as good; None: no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)


class Workload(ClosedRecord):
    """How the load was made: the same in every cell of a report. `name` is compared."""

    name: ReportWord = Field(description="Kind of prompts, such as 'distinct-words'.")
    tool: ReportWord = Field(description="What sent the requests, such as 'vllm bench serve'.")
    tool_version: ReportWord = ""
    api: Literal["chat", "completions", "unknown"] = "unknown"
    prompts: Literal["distinct", "repeated", "unknown"] = Field(
        default="unknown", description="Repeated prompts are answered from a prefix cache."
    )
    ignore_eos: bool | None = None
    temperature: float | None = Field(default=None, ge=0)
    seed: int | None = None
    warmups_per_shape: int | None = Field(default=None, ge=0)
    vantage: Literal["same host", "same network", "tunnel", "internet", "unknown"] = "unknown"
    rtt_ms: float | None = Field(default=None, ge=0)
    goodput_limits: GoodputLimits | None = None


class KvDtype(ClosedRecord):
    """The type of the cache and how it is known: a flag or a log line is not the allocator."""

    value: ReportWord = "unknown"
    evidence: KvEvidence = "unknown"


class TokenWork(ClosedRecord):
    """What one token costs, where the model is not in the house's table: for the gate.

    flops: of one forward token (2 x active weights). step_bytes: weights read by one decode step.
    """

    flops: float = Field(gt=0)
    step_bytes: float = Field(gt=0)


class Subject(ClosedRecord):
    """What was served. `short` is the model's part of the run id, `size` a key of GEMMA4 or ''."""

    model: ReportWord = Field(description="Repository id, or 'embedded'; never a path.")
    short: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.]{0,23}(?:-[a-z0-9_.]{1,16}){0,3}$")]
    size: Literal["", "E2B", "E4B", "12B", "26B-A4B", "31B"] = ""
    encoding: ReportWord = Field(description="Of the weights in memory, such as bf16 or w4a16.")
    revision: ReportWord = ""
    kv_dtype: KvDtype = Field(default_factory=KvDtype)
    max_model_len: int | None = Field(default=None, ge=1)
    work: TokenWork | None = None


class HardwareFact(ClosedRecord):
    """One property of the machine: read from it (probed), or taken from a table (declared)."""

    value: float | int | ReportWord
    unit: ReportWord = ""
    how: Literal["probed", "declared"]
    source: ReportText = ""


class BenchHardware(ClosedRecord):
    """What was measured on, in the words of the hardware slot. No host name, no address, no zone
    of a project: facts about the machine only."""

    slot: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")]
    chip: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")]
    devices: int = Field(default=1, ge=1, le=4096)
    machine_type: HardwareFact | None = None
    region: HardwareFact | None = None
    host_cpu: HardwareFact | None = None
    host_cores: HardwareFact | None = None
    host_memory_gib: HardwareFact | None = None
    visible_memory_gib: HardwareFact | None = None
    bandwidth_gbs: HardwareFact | None = None
    compute_tflops: HardwareFact | None = None
    driver: HardwareFact | None = None
    power_limit_w: HardwareFact | None = None


class BenchEngine(ClosedRecord):
    """What served. argv as started (scrubbed), resolved as the engine itself reported.

    server: version and hash of server.py; engine_sha256: of an engine file that the rig carries.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")] = Field(description="Runtime slot.")
    version: ReportWord = ""
    argv: list[ReportText] = Field(default_factory=list, max_length=100)
    resolved: dict[ReportWord, str | int | float | bool | None] = Field(
        default_factory=dict, max_length=100
    )
    image_digest: ReportWord = ""
    server: ReportWord = ""
    engine_sha256: Sha256Text | None = None


class ReportPrice(ClosedRecord):
    """What the machine cost, with the day and the place where the price was read."""

    usd_per_hour: NonNegative
    provisioning: ReportWord = ""
    region: ReportWord = ""
    as_of: Annotated[str, Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")]
    source: ReportText


class RawData(ClosedRecord):
    """Evidence behind the figures: a path relative to the benchmarks folder, and its hash."""

    path: Annotated[str, Field(pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99}/){0,4}[A-Za-z0-9]")]
    sha256: Sha256Text
    size: int = Field(ge=0, description="Bytes.")

    @model_validator(mode="after")
    def _stays_inside(self) -> RawData:
        if any(not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", p) for p in self.path.split("/")):
            raise ValueError("raw path must be relative, of plain names")
        return self


class BenchRun(ClosedRecord):
    """Which run this is. id is the file's stem; origin says where imported figures come from."""

    id: Annotated[str, Field(pattern=f"^{RUN_ID_PATTERN}$")]
    date: DayText
    kind: ReportKind
    rig: ReportWord = ""
    origin: ReportText = ""
    corrections: list[ReportText] = Field(default_factory=list, max_length=20)
    retracted: ReportText = Field(default="", description="Why, where it must not be used.")
    supersedes: ReportWord = ""
    started: ReportWord = ""
    duration_s: float | None = Field(default=None, ge=0)


class BenchReport(ClosedRecord):
    """One benchmark. `planned_cells` may exceed the cells that are here: then it was cut short."""

    schema_version: Literal["2.0"] = "2.0"
    run: BenchRun
    subject: Subject
    hardware: BenchHardware
    engine: BenchEngine
    workload: Workload
    token_source: TokenSource
    planned_cells: int = Field(ge=1, le=MOST_CELLS)
    cells: list[BenchCell] = Field(min_length=1, max_length=MOST_CELLS)
    raw: list[RawData] = Field(default_factory=list, max_length=100)
    price: ReportPrice | None = None
    notes: list[ReportText] = Field(default_factory=list, max_length=40)

    @model_validator(mode="after")
    def _hangs_together(self) -> BenchReport:
        counts = Counter(cell.id for cell in self.cells)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"cells of one id: {', '.join(twice[:5])}")
        if len(self.cells) > self.planned_cells:
            raise ValueError(f"{len(self.cells)} cells of {self.planned_cells} planned")
        if self.run.kind != "measured" and not self.run.origin:
            raise ValueError(f"a report that is {self.run.kind} needs its origin")
        if self.run.kind == "measured":
            blind = [c.id for c in self.cells if c.status == "ok" and c.client is None]
            if blind:
                raise ValueError(f"measured without client health: {', '.join(blind[:5])}")
        first = run_id_of(self.run.date, self.subject.short, self.engine.name, self.hardware.slot)
        if self.run.id.partition("--")[0] != first:
            raise ValueError(f"the run's id must be {first}, with --rN for a repeat")
        return self


def cell_id_of(
    concurrency: int | None,
    input_tokens: int,
    output_tokens: int | None,
    *,
    rate_rps: float | None = None,
) -> str:
    """The id of a cell: c8-i1024-o128 closed, r2.5-i1024-o128 open, o- where output is unknown."""
    load = f"c{concurrency}" if rate_rps is None else f"r{rate_rps:g}"
    return f"{load}-i{input_tokens}-o{'-' if output_tokens is None else output_tokens}"


def run_id_of(date: str, short: str, engine: str, hardware: str, repeat: int = 1) -> str:
    """The name of a run after NAMING.md; repeat 1 has no mark, 2 is --r2."""
    mark = f"--r{repeat}" if repeat > 1 else ""
    return f"{date}-{short}-{engine}-{hardware}{mark}"


def distribution_of(samples: Sequence[float]) -> Distribution | None:
    """Mean, median, p90 and, from 100 samples on, p99 (linear between ranks); None of nothing."""
    if not samples:
        return None
    ordered = sorted(samples)
    n = len(ordered)
    return Distribution(
        n=n,
        mean=math.fsum(ordered) / n,
        median=quantile_of(ordered, 0.5),
        p90=quantile_of(ordered, 0.9),
        p99=quantile_of(ordered, 0.99) if n >= P99_LEAST_SAMPLES else None,
    )


def quantile_of(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted samples, linear between the two nearest ranks."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def health_of_client(cpu_share: float, loop_lag_p99_ms: float, coalesced: float) -> ClientHealth:
    """The client's block, marked untrustworthy where it broke a limit."""
    health = ClientHealth(
        cpu_share=cpu_share,
        loop_lag_p99_ms=loop_lag_p99_ms,
        coalesced_share=coalesced,
        trustworthy=False,
    )
    return health.model_copy(update={"trustworthy": not health.faults()})
