# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic>=2.14,<3",
#     "uvloop>=0.22,<1; sys_platform != 'win32'",
# ]
# ///
# Built from forge/programs/loadgen.py by `python3 -m forge.build`: edit it there.

"""The load generator: measures a served model from a process of its own.

    python3 loadgen.py FOLDER     carry out FOLDER/plan.json, append each result to it

run_benchmark starts it. It runs on asyncio streams, with uvloop where that is installed, and knows
one address: that of the plan.
"""

# Contents, by line:
#    57 ground / errors: The one exception that a tool raises on purpose, and the closed set of …
#   103 knowledge / report_schema: What a benchmark report is: closed records, so that a typing …
#   532 knowledge / token_fit: How many words of a prompt make how many tokens, as one server …
#   562 boundaries / load_events: What a load request leaves behind, and what one event of a chat …
#   673 boundaries / load_http: One streamed chat request over HTTP/1.1, as lean as the standard …
#   970 boundaries / load_client: Where load goes: the target's address, a pool of connections, …
#  1139 boundaries / load_plan: What load is to be put on a server: a plan of cells, as a file …
#  1212 boundaries / load_figures: The figures of one cell, from the records of its requests: …
#  1377 boundaries / load_prompts: Prompts of a wanted number of tokens, made of plain words, …
#  1458 boundaries / load_cell: One cell of a benchmark: calibrate once, warm up, put the load on, …
#  1726 boundaries / load_generator: Load on one server, cell by cell, in a process of its own: …
#  1812 programs / loadgen: The load generator: measures a served model from a process of its own.

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import platform
import random
import re
import resource
import ssl
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# ── ground / errors ───────────────────────────────────────────────────────────────────────────────
# The one exception that a tool raises on purpose, and the closed set of its classes.
#
# Knows nothing about MCP: the guarded tool of the assembly turns it into the client's error text.

ErrorClass = Literal[
    "INVALID",
    "DENIED",
    "NOT_FOUND",
    "EXISTS",
    "QUOTA",
    "CAPACITY",
    "AUTH",
    "UNKNOWN",
    "TIMEOUT",
    "UNREACHABLE",
    "PARTIAL",
    "BUSY",
    "CANCELLED",
    "INTERNAL",
]


class RigError(Exception):
    """An anticipated failure: its class, what happened and why, and the next step.

    `str()` gives the text that a client sees: ``CLASS what. Next: step``. The class is always the
    first word, so that an agent can branch on it without reading prose.
    """

    def __init__(self, error_class: ErrorClass, what: str, next_step: str = "") -> None:
        super().__init__(error_class, what, next_step)
        self.error_class: ErrorClass = error_class
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"{self.error_class} {self.what.rstrip('.')}."
        return f"{text} Next: {self.next_step}" if self.next_step else text


def invalid_parameter(parameter: str, why: str) -> RigError:
    """The refusal of one argument, by its name. The value is never repeated: it may be a secret."""
    return RigError("INVALID", f"{parameter}: {why}; nothing was started")


# ── knowledge / report_schema ─────────────────────────────────────────────────────────────────────
# What a benchmark report is: closed records, so that a typing error is refused, not stored.
#
# Knows no folder, no chip's peak and no model's shape; times are in ms, rates per second.

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


# ── knowledge / token_fit ─────────────────────────────────────────────────────────────────────────
# How many words of a prompt make how many tokens, as one server counts them.
#
# Knows no server and no tokenizer: whoever sends a prompt says how many tokens were counted.


@dataclass(frozen=True)
class TokenFit:
    """tokens = template + per_word * words, as one server counts them."""

    template: float
    per_word: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> TokenFit:
        """The line through two (words, tokens); ValueError where more words are not more tokens."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            raise ValueError("the server's prompt token count does not grow with the prompt")
        return cls(few[1] - per_word * few[0], per_word)

    def moved_through(self, words: int, tokens: float) -> TokenFit:
        """The same slope through a point measured near the target, where it matters."""
        return TokenFit(tokens - self.per_word * words, self.per_word)

    def words_for(self, tokens: int) -> int:
        """How many words give `tokens`; 0 where the chat template alone takes as many."""
        return max(0, round((tokens - self.template) / self.per_word))


# ── boundaries / load_events ──────────────────────────────────────────────────────────────────────
# What a load request leaves behind, and what one event of a chat stream means.
#
# Knows no connection: the caller says when each event came.


@dataclass(slots=True)
class StreamRecord:
    """What one request gave. Times are seconds of `time.perf_counter`; tokens are from usage.

    `arrivals` holds one time per content chunk; chunks without text (the role, usage, the finish)
    are not in it. `fault` is empty only for a request that completed: status 200, an event stream
    with a finish reason, usage and content. `coalesced` counts chunks that came in one read with an
    earlier one, without being in the same HTTP chunk: the server sent them apart.
    """

    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    coalesced: int = 0
    http_status: int = 0
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    fault: str = ""

    @property
    def completed(self) -> bool:
        return not self.fault


def is_plain_text_event(payload: bytes) -> bool:
    """Whether an event is surely a content chunk and nothing else, told without parsing it.

    False means only: parse it. A quote within a JSON string is escaped, so ``"content":`` is always
    a key; anything that may be an error, a finish or usage goes the long way.
    """
    place = payload.find(b'"content":')
    if place < 0:
        return False
    place += 10
    if payload.startswith(b" ", place):
        place += 1
    return (
        payload.startswith(b'"', place)
        and not payload.startswith(b'""', place)
        and (b'"finish_reason":null' in payload or b'"finish_reason": null' in payload)
        and b'_tokens"' not in payload
        and b'"error"' not in payload
        and payload.endswith(b"}")
    )


def take_load_event(record: StreamRecord, payload: bytes) -> bool:
    """Read one event into `record`; returns whether it carries generated text.

    An error inside a 200 and an event that is no JSON become the record's fault.
    """
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        record.fault = "the server sent an event that is no JSON"
        return False
    if not isinstance(event, dict):
        record.fault = "the server sent an event that is no object"
        return False
    if event.get("error"):
        record.fault = f"the server reported an error in the stream: {str(event['error'])[:200]}"
        return False
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.prompt_tokens = _usage_count(usage.get("prompt_tokens"), record.prompt_tokens)
        record.completion_tokens = _usage_count(
            usage.get("completion_tokens"), record.completion_tokens
        )
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = _usage_count(details.get("cached_tokens"), record.cached_tokens)
    text = False
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        if isinstance(delta, dict):
            # A thought is generated text too; the role alone is not, and must not stop the clock.
            text = text or any(
                delta.get(key) for key in ("content", "reasoning_content", "reasoning")
            )
        if choice.get("finish_reason"):
            record.finish_reason = str(choice["finish_reason"])[:40]
    return text


def _usage_count(value: object, known: int | None) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good and isinstance(value, int) else known


def stream_fault(record: StreamRecord) -> str:
    """Why a stream that ended in order still did not complete; empty when it did."""
    if not record.finish_reason:
        return "the stream ended without a finish reason"
    if record.completion_tokens is None or record.prompt_tokens is None:
        return "the server gave no usage, so tokens cannot be counted"
    if not record.arrivals or record.completion_tokens == 0:
        return "the answer has no content"
    return ""


# ── boundaries / load_http ────────────────────────────────────────────────────────────────────────
# One streamed chat request over HTTP/1.1, as lean as the standard library allows: for load only.
#
# Works on asyncio's transports with times taken in the read callback: one layer below its streams,
# whose task switch for every chunk costs more than all that is done here. Knows no load pattern, no
# statistics and no address.

LOAD_EVENT_LIMIT = 8_000_000  # bytes of one event or HTTP chunk; larger ones end the request
CLOSED_EARLY = "the connection closed before an answer"
_ANSWER_HEAD_LIMIT = 65_536
_STRAY_WORDS_KEPT = 2_000  # bytes kept of a body that is no event stream

# How the body that is being read is framed.
_HEAD, _CHUNKED, _TRAILER, _LENGTH, _UNTIL_CLOSE, _IDLE = range(6)


class StreamConnection(asyncio.Protocol):
    """One connection, one request at a time. `free` says whether it may carry the next one."""

    def __init__(self, read_json: bool = False) -> None:
        self.free = False
        self.over = False  # whether [DONE] has come
        self.seen = 0.0  # when the last byte came, or the request went
        self.record = StreamRecord()
        self._read_json = read_json  # parse every event: only to show what that would cost
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[StreamRecord] | None = None
        self._state = _IDLE
        self._rest = bytearray()  # unframed bytes
        self._need = 0  # bytes that `_rest` must have before it is worth a look
        self._left = 0  # bytes of a body with a length
        self._closes = False
        self._is_stream = False
        self._words = bytearray()
        self._line = bytearray()  # the unfinished line of the event stream
        self._data: list[bytes] = []  # the data lines of the unfinished event
        self._same_chunk = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.free = True

    def begin(self, request: bytes) -> asyncio.Future[StreamRecord]:
        """Send `request`; the future gives the record, also of a request that failed."""
        assert self._transport is not None and self.free
        self.free = False
        self.record = StreamRecord()
        self._done = asyncio.get_running_loop().create_future()
        self._state, self._need, self._closes, self.over = _HEAD, 0, False, False
        self._words.clear()
        self._line.clear()
        self._data.clear()
        self._same_chunk = 0
        self.record.sent = self.seen = time.perf_counter()
        self._transport.write(request)
        return self._done

    def fail(self, fault: str) -> None:
        """End the request with `fault` and the connection with it."""
        if self._state != _IDLE:
            self.record.fault = self.record.fault or fault
            self.finish()

    def finish(self) -> None:
        """End the request as it stands and give the connection up."""
        self._closes = True
        self._conclude()

    def close(self) -> None:
        """Drop the connection; a request that is under way fails."""
        self.fail("the client closed the connection")
        self.free = False
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.free = False
        if self._state == _IDLE:
            return
        if self._state == _UNTIL_CLOSE and exc is None:
            self.finish()
        elif self._state == _HEAD:
            self.fail(CLOSED_EARLY)
        else:
            self.fail(f"the connection broke {self.progress}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.seen = now
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest.clear()
        if self._state == _CHUNKED:
            self._chunks(data, now)
        elif self._state == _HEAD:
            self._head(data, now)
        elif self._state == _TRAILER:
            self._trailer(data)
        elif self._state == _IDLE:
            self.close()  # bytes that nobody asked for
        else:
            self._unchunked(data, now)

    @property
    def progress(self) -> str:
        """How far the request has come, without a number: faults are counted by their words."""
        return "in mid-stream" if self.record.arrivals else "before any content"

    def _head(self, data: bytes, now: float) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _ANSWER_HEAD_LIMIT:
                self.fail("the answer's head is beyond all bounds")
            elif not b"HTTP/1.".startswith(data[:7]) and not data.startswith(b"HTTP/1."):
                self.fail("the server does not speak HTTP/1.1")
            else:
                self._rest += data
            return
        lines = data[:end].decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            self.fail("the server does not speak HTTP/1.1")
            return
        self.record.http_status = int(words[1])
        rest = data[end + 4 :]
        if 100 <= self.record.http_status < 200:  # an interim answer; the real one follows
            self._head(rest, now) if rest else None
            return
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        self._frame(headers, words[0])
        kind = headers.get("content-type", "text/event-stream")
        self._is_stream = self.record.http_status == 200 and kind.startswith("text/event-stream")
        if not self._is_stream:
            self.record.fault = f"status {self.record.http_status}, {kind.partition(';')[0]}"
        if self._state == _CHUNKED:
            self._chunks(rest, now)
        else:
            self._unchunked(rest, now)

    def _frame(self, headers: Mapping[str, str], version: str) -> None:
        connection = headers.get("connection", "")
        self._closes = "close" in connection or (version == "HTTP/1.0" and "keep" not in connection)
        length = headers.get("content-length", "")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._state = _CHUNKED
        elif length.isdecimal():
            self._state, self._left = _LENGTH, int(length)
        else:
            self._state, self._closes = _UNTIL_CLOSE, True

    def _chunks(self, data: bytes, now: float) -> None:
        """Take every whole HTTP chunk out of `data`; what is left waits in `_rest`."""
        place, size = 0, len(data)
        while place < size:
            eol = data.find(b"\r\n", place, place + 256)
            if eol < 0:
                if size - place >= 256:
                    self.fail("the body is not chunked as announced")
                    return
                break
            try:
                length = int(data[place:eol].partition(b";")[0], 16)
            except ValueError:
                length = -1
            if not 0 <= length <= LOAD_EVENT_LIMIT:
                beyond = "the server sent an event beyond all bounds"
                self.fail(beyond if length > 0 else "the body is not chunked as announced")
                return
            if length == 0:
                self._state = _TRAILER
                self._trailer(data[eol:])
                return
            end = eol + 2 + length
            if size < end + 2:
                self._need = end + 2 - place
                break
            self._body(data[eol + 2 : end], now)
            if self._state != _CHUNKED:  # the body made the request fail
                return
            place = end + 2
        if place < size:
            self._rest += data[place:]

    def _trailer(self, data: bytes) -> None:
        """After the last chunk, from the line end of its header: lines, then an empty one."""
        if data.find(b"\r\n\r\n") >= 0:
            self._conclude()
        elif len(data) > _ANSWER_HEAD_LIMIT:
            self.fail("the answer's trailer is beyond all bounds")
        else:
            self._rest += data
            self._need = 0

    def _unchunked(self, data: bytes, now: float) -> None:
        if self._state == _LENGTH:
            data = data[: self._left]
            self._left -= len(data)
        if data:
            self._body(data, now)
        if self._state == _LENGTH and self._left == 0:
            self._conclude()

    def _body(self, body: bytes, now: float) -> None:
        if not self._is_stream:
            self._words += body[: max(0, _STRAY_WORDS_KEPT - len(self._words))]
            if len(self._words) >= _STRAY_WORDS_KEPT:
                self.fail(self.record.fault)
            return
        # Nearly always: one event of one line, whole, in a chunk of its own.
        if (
            body.endswith(b"\n\n")
            and body.startswith(b"data:")
            and body.find(b"\n") == len(body) - 2
            and not self._line
            and not self._data
        ):
            self._event(body[5:-2], now)
            return
        before = len(self.record.arrivals)
        self._lines(body, now)
        if self._state == _CHUNKED:
            self._same_chunk += max(0, len(self.record.arrivals) - before - 1)

    def _lines(self, body: bytes, now: float) -> None:
        *lines, last = body.split(b"\n")
        for line in lines:
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            self._take_line(line.removesuffix(b"\r"), now)
            if self._state == _IDLE:
                return
        self._line += last
        if len(self._line) > LOAD_EVENT_LIMIT:
            self.fail("the server sent an event beyond all bounds")

    def _take_line(self, line: bytes, now: float) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:])
        elif not line and self._data:
            payload = b"\n".join(self._data)
            self._data.clear()
            self._event(payload, now)

    def _event(self, payload: bytes, now: float) -> None:
        if is_plain_text_event(payload) and not self._read_json:
            self.record.arrivals.append(now)
            return
        payload = payload.strip()
        if payload == b"[DONE]":
            self.over = True
            if self._state == _UNTIL_CLOSE:
                self.finish()
            return
        if not payload:
            return
        if take_load_event(self.record, payload):
            self.record.arrivals.append(now)
        if self.record.fault:
            self.fail(self.record.fault)

    def _conclude(self) -> None:
        """The request is over: judge it, hand it out, and keep the connection if it is clean."""
        if self._state == _IDLE:
            return
        if self._data and not self.record.fault:  # the last event lacked its empty line
            payload = b"\n".join(self._data)
            self._data.clear()
            self._event(payload, self.seen)
            if self._state == _IDLE:
                return
        record, self._state = self.record, _IDLE
        record.ended = time.perf_counter()
        if record.fault and self._words:
            words = " ".join(bytes(self._words).decode("utf-8", "replace").split())
            record.fault = f"{record.fault}: {words[:300]}"
        record.fault = record.fault or stream_fault(record)
        times = record.arrivals
        together = sum(1 for a, b in zip(times, times[1:], strict=False) if a == b)
        record.coalesced = max(0, together - self._same_chunk)
        self._rest.clear()
        assert self._transport is not None
        if self._closes or self._transport.is_closing():
            self._transport.abort()
        else:
            self.free = True
        if self._done is not None and not self._done.done():
            self._done.set_result(record)


# ── boundaries / load_client ──────────────────────────────────────────────────────────────────────
# Where load goes: the target's address, a pool of connections, the watch over silent requests.
#
# Knows one request after the other, and no load pattern. Follows no redirect and uses no proxy.

_CONNECT_PATIENCE_S = 10.0
_WATCH_EVERY_S = 0.2
_CROSSING_S = 0.1  # a close that was on its way when the request went is here by then
_DONE_PATIENCE_S = 1.0  # after [DONE], for the body's proper end


@dataclass(frozen=True)
class LoadTarget:
    """Where the requests go: host and port, TLS or not, and the path of the chat completions."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def from_url(cls, base_url: str) -> LoadTarget:
        """From ``http://HOST:PORT`` or ``https://…``, with or without ``/v1``.

        RigError INVALID for another scheme, for credentials, a query or a fragment in it.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise invalid_parameter("base_url", "is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise invalid_parameter("base_url", "must begin with http:// or https:// and a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise invalid_parameter("base_url", "holds credentials, a query or a fragment")
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)

    def head(self, headers: Mapping[str, str]) -> bytes:
        """The request's head up to the value of Content-Length, which comes last."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode("latin-1")


class LoadClient:
    """A pool of connections to one target, and the watch over requests that stand still.

    stall_s: longest silence within a request; total_s: longest request. Both make its record fail;
    nothing here raises for what a server does.
    """

    def __init__(
        self,
        target: LoadTarget,
        *,
        headers: Mapping[str, str] | None = None,
        stall_s: float = 60.0,
        total_s: float = 600.0,
        read_json: bool = False,
    ) -> None:
        self._target = target
        self._head = target.head(headers or {})
        self._stall_s = stall_s
        self._total_s = total_s
        self._read_json = read_json
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[StreamConnection] = []
        self._busy: set[StreamConnection] = set()
        self._watch: asyncio.TimerHandle | None = None
        self.resent = 0  # requests that went again, see `ask`
        self.connect_s: list[float] = []  # how long each connection took: the round trip's measure

    async def connect(self, count: int) -> None:
        """Have `count` idle connections ready, so that no handshake is taken for latency."""
        missing = max(0, count - len(self._idle))
        for start in range(0, missing, 64):
            wanted = range(min(64, missing - start))
            opened = await asyncio.gather(*(self._open() for _ in wanted), return_exceptions=True)
            self._idle += [item for item in opened if isinstance(item, StreamConnection)]

    async def ask(self, body: bytes) -> StreamRecord:
        """Send one chat request with this JSON body and return its record when it is over."""
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while True:
            connection = self._take_idle()
            kept = connection is not None
            if connection is None:
                begun = time.perf_counter()
                try:
                    connection = await self._open()
                except (OSError, TimeoutError) as error:
                    why = type(error).__name__
                    if isinstance(error, OSError) and error.strerror:
                        why = error.strerror
                    now = time.perf_counter()
                    return StreamRecord(sent=begun, ended=now, fault=f"cannot connect: {why}")
            record = await self._carry(connection, request)
            crossed = record.fault == CLOSED_EARLY and record.ended - record.sent < _CROSSING_S
            if not (kept and crossed):
                return record
            # The server had closed the kept connection meanwhile and never saw the request.
            self.resent += 1

    def close(self) -> None:
        """Drop every connection."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()

    async def _carry(self, connection: StreamConnection, request: bytes) -> StreamRecord:
        self._busy.add(connection)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_EVERY_S, self._look)
        try:
            return await connection.begin(request)
        finally:
            self._busy.discard(connection)
            if connection.free:
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.free:
                return connection
        return None

    async def _open(self) -> StreamConnection:
        begun = time.perf_counter()
        async with asyncio.timeout(_CONNECT_PATIENCE_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: StreamConnection(self._read_json),
                self._target.host,
                self._target.port,
                ssl=self._tls,
            )
        self.connect_s.append(time.perf_counter() - begun)
        return connection

    def _look(self) -> None:
        """One timer for all requests: a timer for each would cost more than the requests."""
        self._watch = None
        now = time.perf_counter()
        for connection in list(self._busy):
            if connection.over and now - connection.seen > _DONE_PATIENCE_S:
                connection.finish()
            elif now - connection.seen > self._stall_s:
                connection.fail(f"no byte for {self._stall_s:g} s {connection.progress}")
            elif now - connection.record.sent > self._total_s:
                connection.fail(f"no end within {self._total_s:g} s")
        if self._busy:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_EVERY_S, self._look)


# ── boundaries / load_plan ────────────────────────────────────────────────────────────────────────
# What load is to be put on a server: a plan of cells, as a file that survives its reader.
#
# Knows nothing about how it is done.

LOAD_PLAN_FILE = "plan.json"
LOAD_RESULTS_FILE = "results.jsonl"
LEAST_SECONDS = 60.0  # a cell that ran as long is sound, however few its requests


class LoadCellPlan(BaseModel):
    """One cell to be measured: `concurrency` for a closed loop or `rate_rps` for an open one.

    No request is begun after `requests` of them or after `seconds`, whichever comes first.
    """

    model_config = ConfigDict(extra="forbid")

    concurrency: int | None = Field(default=None, ge=1, le=1024)
    rate_rps: float | None = Field(default=None, gt=0, le=1000)
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    requests: int = Field(ge=1)
    seconds: float = Field(gt=0)

    @property
    def least(self) -> int:
        """How many requests a sound cell has, unless it runs for `LEAST_SECONDS`."""
        return least_requests(self.concurrency or 1)

    @property
    def cell_id(self) -> str:
        return cell_id_of(
            self.concurrency, self.input_tokens, self.output_tokens, rate_rps=self.rate_rps
        )

    def cell(self, **more: Any) -> BenchCell:
        """The report's cell of this plan."""
        return BenchCell(
            id=self.cell_id,
            mode="open" if self.concurrency is None else "closed",
            concurrency=self.concurrency,
            rate_rps=self.rate_rps,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            **more,
        )


class LoadPlan(BaseModel):
    """What to send where. `api_key_variable` names an environment variable: a key stands in no
    file and in no argument list. `stall_s`, `request_timeout_s`: longest silence, longest request.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: str
    model: str
    cells: list[LoadCellPlan] = Field(min_length=1)
    seed: int = 0
    temperature: float = 0.0
    warmups: int = Field(default=3, ge=1)
    limits: GoodputLimits = Field(default_factory=GoodputLimits)
    stall_s: float = Field(default=60.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    api_key_variable: str = ""


def least_requests(concurrency: int) -> int:
    """How many requests a cell needs: below eight waves, ramp and drain rule it."""
    return max(50, 8 * concurrency)


# ── boundaries / load_figures ─────────────────────────────────────────────────────────────────────
# The figures of one cell, from the records of its requests: facts in, a report's cell out.
#
# Only requests that completed count. Knows neither connections nor clocks.

PROMPT_TOLERANCE = 0.05  # of the mean prompt length, against what was asked for
LEAST_SUCCESS = 0.5  # below it a cell has failed, whatever the survivors' latencies are
_ERROR_KINDS = 20


@dataclass
class MeasuredLoad:
    """What a cell's load left. Times are seconds of one clock.

    `window` is the span for which rates are given: in a closed loop from the moment when all
    streams ran to the moment when the first of them found no request left, in an open one the whole
    run. Requests begun before it (the ramp) count for rates within it and for no latency.
    `scheduled` has one entry a record: when an open loop should have sent it.
    """

    records: list[StreamRecord] = field(default_factory=list)
    scheduled: list[float | None] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)
    whole_run: bool = False  # the window had to be the whole run, ramp and drain included
    marks: list[str] = field(default_factory=list)

    def counted(self) -> list[tuple[float | None, StreamRecord]]:
        """The requests begun within or after the window's start, with their schedule."""
        pairs = zip(self.scheduled, self.records, strict=True)
        return [pair for pair in pairs if pair[1].sent >= self.window[0]]


def cell_of_load(
    plan: LoadCellPlan, load: MeasuredLoad, client: ClientHealth, limits: GoodputLimits
) -> BenchCell:
    """The cell that `load` amounts to: ok with metrics, or failed with the reason."""
    counted = load.counted()
    done = [(due, r) for due, r in counted if r.completed]
    errors = Counter(r.fault[:120] for _, r in counted if not r.completed)
    reason = _cell_failure(plan, [r for _, r in counted], [r for _, r in done], errors)
    if reason:
        return plan.cell(status="failed", reason=reason[:2000], client=client)
    metrics = _cell_metrics(plan, load, counted, done, limits)
    metrics = metrics.model_copy(update={"errors": dict(errors.most_common(_ERROR_KINDS))})
    marks = [*load.marks, *_cell_marks(metrics, client)]
    if load.whole_run:
        marks.append("rates are over the whole run, ramp and drain included")
    # A window that ends because the time is over ends a little early or late.
    short = len(counted) < plan.least and load.window[1] - load.window[0] < 0.98 * LEAST_SECONDS
    return plan.cell(
        status="ok", metrics=metrics, client=client, marks=marks[:10], short_sample=short
    )


def _cell_failure(
    plan: LoadCellPlan,
    counted: Sequence[StreamRecord],
    done: Sequence[StreamRecord],
    errors: Counter[str],
) -> str:
    if len(done) < LEAST_SUCCESS * len(counted) or not done:
        listed = "; ".join(f"{count} x {fault}" for fault, count in errors.most_common(3))
        return f"{len(done)} of {len(counted)} requests completed: {listed or 'none was sent'}"
    lengths = [r.prompt_tokens for r in done if r.prompt_tokens is not None]
    mean = statistics.fmean(lengths)
    off = mean / plan.input_tokens - 1
    if abs(off) > PROMPT_TOLERANCE:
        return (
            f"the prompts had {mean:.0f} tokens by the server's count, {off:+.0%} off the "
            f"{plan.input_tokens} asked for"
        )
    return ""


def _cell_marks(metrics: CellMetrics, client: ClientHealth) -> list[str]:
    marks = list(client.faults())
    sent, done = metrics.requests_sent or 0, metrics.requests_completed or 0
    if done < sent:
        marks.append(f"{sent - done} of {sent} requests failed; latencies are of the others")
    if metrics.short_outputs:
        marks.append(f"{metrics.short_outputs} of {done} outputs ended before the length asked for")
    if metrics.cached_tokens:
        marks.append(f"the server took {metrics.cached_tokens} prompt tokens from its cache")
    return marks


def _cell_metrics(
    plan: LoadCellPlan,
    load: MeasuredLoad,
    counted: Sequence[tuple[float | None, StreamRecord]],
    done: Sequence[tuple[float | None, StreamRecord]],
    limits: GoodputLimits,
) -> CellMetrics:
    records = [r for _, r in done]
    ttft = [1000 * (r.arrivals[0] - r.sent) for r in records]
    tpot = [1000 * value for value in map(time_per_token, records) if value is not None]
    gaps = [
        1000 * (b - a) for r in records for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)
    ]
    due_done = [(due, r) for due, r in done if due is not None]
    start, end = load.window
    seconds = max(end - start, 1e-9)
    # All that completed, the ramp's requests too: their tokens were made within the window.
    completed = [r for r in load.records if r.completed]
    shares = [_share_within(r, start, end) for r in completed]
    requests = sum(shares)
    output = sum(s * (r.completion_tokens or 0) for s, r in zip(shares, completed, strict=True))
    prompt = sum(s * (r.prompt_tokens or 0) for s, r in zip(shares, completed, strict=True))
    busy = sum(max(0.0, min(r.ended, end) - max(r.sent, start)) for r in load.records)
    good = sum(within_limits(r, limits) for r in records)
    cached = [r.cached_tokens for r in records if r.cached_tokens is not None]
    tpot_ms = distribution_of(tpot)
    return CellMetrics(
        duration_s=seconds,
        requests_sent=len(counted),
        requests_completed=len(records),
        request_rps=requests / seconds,
        output_tps=output / seconds,
        total_tps=(output + prompt) / seconds,
        per_stream_tps=1000 / tpot_ms.median if tpot_ms and tpot_ms.median else None,
        achieved_concurrency=busy / seconds,
        ttft_ms=distribution_of(ttft),
        tpot_ms=tpot_ms,
        icl_ms=distribution_of(gaps),
        e2e_ms=distribution_of([1000 * (r.arrivals[-1] - r.sent) for r in records]),
        ttft_from_schedule_ms=distribution_of([1000 * (r.arrivals[0] - d) for d, r in due_done]),
        e2e_from_schedule_ms=distribution_of([1000 * (r.arrivals[-1] - d) for d, r in due_done]),
        goodput_rps=good / len(records) * requests / seconds,
        prompt_tokens=distribution_of([float(r.prompt_tokens or 0) for r in records]),
        completion_tokens=distribution_of([float(r.completion_tokens or 0) for r in records]),
        cached_tokens=sum(cached) if cached else None,
        short_outputs=sum((r.completion_tokens or 0) < plan.output_tokens for r in records),
    )


def time_per_token(record: StreamRecord) -> float | None:
    """Seconds per output token after the first: (last - first content) / (tokens - 1).

    None for a single token. Chunks are not counted: one may hold several tokens.
    """
    tokens = record.completion_tokens or 0
    if tokens < 2 or not record.arrivals:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (tokens - 1)


def within_limits(record: StreamRecord, limits: GoodputLimits) -> bool:
    """Whether a completed request kept every limit that is set."""
    tpot = time_per_token(record)
    measured = (
        (limits.ttft_ms, 1000 * (record.arrivals[0] - record.sent)),
        (limits.tpot_ms, None if tpot is None else 1000 * tpot),
        (limits.e2e_ms, 1000 * (record.arrivals[-1] - record.sent)),
    )
    return all(value is None or limit is None or value <= limit for limit, value in measured)


def _share_within(record: StreamRecord, start: float, end: float) -> float:
    """Which share of a request's output came within a span, 0 to 1."""
    times = record.arrivals
    if start <= times[0] and times[-1] <= end:
        return 1.0
    return sum(start <= at <= end for at in times) / len(times)


# ── boundaries / load_prompts ─────────────────────────────────────────────────────────────────────
# Prompts of a wanted number of tokens, made of plain words, without a tokenizer.
#
# Knows no server: whoever sends a prompt counts its tokens with `TokenFit`.

_PROMPT_WORDS = (
    "the of and to in is was for on that by this with from at which are have been other were there "
    "can all one time more when some any would will than also first people two new years over most "
    "into only where after many between through world being these three both under used number "
    "same part while system during against state school well until early large place water book "
    "without house point around small second often group family long line land open light "
    "later local little river town music story paper field stone table north south green white "
    "black winter summer morning evening garden window village mountain forest island market "
    "letter question answer reason moment picture bridge street machine weather journey captain "
    "doctor teacher farmer brother sister mother father children animal flower metal glass wood "
    "silver copper engine circle corner centre border season minute history science nature power "
    "travel carry follow listen remember build write speak learn grow turn begin change move"
).split()
_HEAD_WORDS = 12  # as many random words make 80 bits: no two prompts share a prefix
_SLACK_WORDS = 2048  # so many different slices of a cell's pool
_ENDING = " Go on at length."  # at the end, where no prefix cache sees that all prompts share it


class PromptMaker:
    """Distinct prompts of `words` words each for one cell; the same seed gives the same prompts.

    Each begins with its own random words, so that a prefix cache finds nothing from the first block
    on; the rest is a slice of the cell's pool, because drawing 100,000 words for each request would
    hold up the very loop that takes the times.
    """

    def __init__(self, seed: str, words: int) -> None:
        self._seed = seed
        self.words = max(1, words)
        source = random.Random(seed)
        pool = source.choices(_PROMPT_WORDS, k=self.words + _SLACK_WORDS)
        self._pool = " ".join(pool).encode()
        self._starts = [0]
        for word in pool:
            self._starts.append(self._starts[-1] + len(word) + 1)

    def text(self, index: int) -> bytes:
        """Prompt number `index`: letters, blanks and full stops, so it stands in JSON as it is."""
        source = random.Random(f"{self._seed}/{index}")
        head = min(self.words, _HEAD_WORDS)
        first = " ".join(source.choices(_PROMPT_WORDS, k=head)).encode()
        start, rest = source.randrange(_SLACK_WORDS), self.words - head
        body = self._pool[self._starts[start] : self._starts[start + rest]]
        return b"%b %b%b" % (first, body.rstrip(), _ENDING.encode())


@dataclass(frozen=True)
class RequestForm:
    """All of a request but the prompt. Servers differ in what they let through."""

    model: str
    temperature: float
    ignore_eos: bool = True  # an extension; where it is refused, outputs may be short
    ask_usage: bool = True

    def body(self, prompt: bytes, max_tokens: int) -> bytes:
        """The request's JSON. `prompt` must be plain enough to need no escapes."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.ask_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        rest = json.dumps(fields).encode()
        return b'{"messages": [{"role": "user", "content": "%b"}], %b' % (prompt, rest[1:])

    def plainer_forms(self) -> list[RequestForm]:
        """What to try when a server refuses this form, in order."""
        without = RequestForm(self.model, self.temperature, ignore_eos=False)
        return [without, RequestForm(self.model, self.temperature, False, False)]


# ── boundaries / load_cell ────────────────────────────────────────────────────────────────────────
# One cell of a benchmark: calibrate once, warm up, put the load on, and say what came of it.
#
# Knows no file and no process; every event goes to whoever listens.

_RAMP_LIMIT_S = 10.0
_WARM_UP_TOKENS = 16
_LAG_TICK_S = 0.01
_IN_FLIGHT_LIMIT = 1024  # of an open loop; beyond it requests wait, and their schedule tells
_PROBE_TRIES = 3

LoadTell = Callable[[dict[str, Any]], None]


class ClientGauge:
    """How well this process kept up: share of a core, lag of the loop, chunks read together."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._begun = time.perf_counter()
        self._cpu = time.process_time()
        self._arm()

    def _arm(self) -> None:
        self._due = time.perf_counter() + _LAG_TICK_S
        self._timer = asyncio.get_running_loop().call_later(_LAG_TICK_S, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(0.0, time.perf_counter() - self._due))
        self._arm()

    def stop(self, records: list[StreamRecord]) -> ClientHealth:
        """Health since the gauge was made, over `records`."""
        self._timer.cancel()
        wall = max(time.perf_counter() - self._begun, 1e-9)
        self._lags.append(max(0.0, time.perf_counter() - self._due))
        gaps = sum(max(0, len(r.arrivals) - 1) for r in records)
        return health_of_client(
            cpu_share=(time.process_time() - self._cpu) / wall,
            loop_lag_p99_ms=1000 * quantile_of(sorted(self._lags), 0.99),
            coalesced=sum(r.coalesced for r in records) / gaps if gaps else 0.0,
        )


class Calibration:
    """What was learnt of the server: the form of request it takes, and words to tokens."""

    def __init__(self, plan: LoadPlan, client: LoadClient) -> None:
        self.form = RequestForm(plan.model, plan.temperature)
        self.fit: TokenFit | None = None
        self._client = client
        self._seed = f"{plan.seed}/calibration"

    async def learn(self) -> str:
        """Ask twice, with few and with many words; returns what went wrong, or nothing."""
        points: list[tuple[int, float]] = []
        for words in (16, 160):
            record = await self._ask(words)
            if record.fault:
                return f"the first requests failed: {record.fault}"
            points.append((words, float(record.prompt_tokens or 0)))
        try:
            self.fit = TokenFit.through(points[0], points[1])
        except ValueError as error:
            return str(error)
        return ""

    async def _ask(self, words: int) -> StreamRecord:
        prompt = PromptMaker(self._seed, words).text(0)
        for _ in range(_PROBE_TRIES):
            record = await self._client.ask(self.form.body(prompt, 4))
            if record.http_status in (400, 422):
                for form in self.form.plainer_forms():
                    again = await self._client.ask(form.body(prompt, 4))
                    if again.completed:
                        self.form = form
                        return again
                return record
            if record.completed:
                break
        return record


class CellLoad:
    """Cell `number` of a plan: warm up, load, and say what came of it. Never raises for what a
    server does."""

    def __init__(self, plan: LoadPlan, number: int, client: LoadClient, tell: LoadTell) -> None:
        self._plan, self._cell = plan, plan.cells[number]
        self._client, self._tell = client, tell
        # The number, because a repeat of the cell must not find its prompts in a cache.
        self._seed = f"{plan.seed}/{number}/{self._cell.cell_id}"
        self._load = MeasuredLoad()
        self._count = 0  # requests of this cell, warm-ups included: the number of the next prompt
        self._begun = 0  # requests within the window
        self._started = 0
        self._window_from: float | None = None
        self._window_to: float | None = None
        self._faults_in_row = 0

    async def run(self, calibration: Calibration) -> BenchCell:
        """The finished cell, ok or failed with its reason."""
        fault = "" if calibration.fit is not None else await calibration.learn()
        if fault or calibration.fit is None:
            return self._cell.cell(status="failed", reason=fault)
        self._form = calibration.form
        words = calibration.fit.words_for(self._cell.input_tokens)
        if words < 1:
            least = f"{calibration.fit.template:.0f}"
            reason = f"the chat template and the prompt's frame take {least} tokens already"
            return self._cell.cell(status="infeasible", reason=reason)
        self._prompts = PromptMaker(self._seed, words)
        warm = await self._warm_up()
        good = [record for record in warm if record.completed]
        if not good:
            return self._cell.cell(status="failed", reason=f"every warm-up failed: {warm[0].fault}")
        seen = statistics.fmean(float(record.prompt_tokens or 0) for record in good)
        fit = calibration.fit.moved_through(words, seen)
        self._prompts = PromptMaker(self._seed, fit.words_for(self._cell.input_tokens))
        resent = self._client.resent
        gauge = ClientGauge()
        await (self._closed(_ramp_of(good, self._cell)) if self._cell.concurrency else self._open())
        health = gauge.stop(self._load.records)
        if self._client.resent > resent:
            again = self._client.resent - resent
            told = "requests went again: the server had closed a kept connection"
            self._load.marks.append(f"{again} {told}")
        if not calibration.form.ignore_eos:
            self._load.marks.append("the server refuses ignore_eos: outputs end when they end")
        return cell_of_load(self._cell, self._load, health, self._plan.limits)

    async def _warm_up(self) -> list[StreamRecord]:
        """At least three requests of this cell's shape, as many at once as the cell will have."""
        streams = self._cell.concurrency or 1
        wanted = max(self._plan.warmups, streams)
        tokens = min(self._cell.output_tokens, _WARM_UP_TOKENS)
        await self._client.connect(streams)
        records: list[StreamRecord] = []

        async def stream() -> None:
            while self._count < wanted and not _warm_up_failed(records):
                body = self._next_body(tokens)
                record = await self._client.ask(body)
                records.append(record)
                self._tell_request("warm-up", None, record)

        await asyncio.gather(*(stream() for _ in range(streams)))
        return records

    def _next_body(self, tokens: int) -> bytes:
        self._count += 1
        return self._form.body(self._prompts.text(self._count), tokens)

    async def _one(self, due: float | None) -> None:
        record = await self._client.ask(self._next_body(self._cell.output_tokens))
        self._load.records.append(record)
        self._load.scheduled.append(due)
        ramp = self._window_from is None or record.sent < self._window_from
        self._tell_request("ramp" if ramp else "measured", due, record)
        if record.completed:
            self._faults_in_row = 0
        else:
            self._faults_in_row += 1
            await asyncio.sleep(min(1.0, 0.02 * self._faults_in_row))  # a dead server stays alone

    def _given_up(self) -> bool:
        return self._faults_in_row >= max(10, 2 * (self._cell.concurrency or 1))

    async def _closed(self, ramp_s: float) -> None:
        """`concurrency` streams, each sending its next request when the last one is answered."""
        streams = self._cell.concurrency or 1

        async def stream(number: int) -> None:
            await asyncio.sleep(ramp_s * number / streams)
            self._started += 1
            if self._started == streams:
                self._window_from = time.perf_counter()
            while self._another():
                await self._one(None)

        await asyncio.gather(*(stream(number) for number in range(streams)))
        start = self._window_from or 0.0
        end = self._window_to or start
        last = max((record.ended for record in self._load.records), default=end)
        if end - start < 0.5 * (last - start):
            # So few requests that there was no span of full load: then the drain counts too.
            end, self._load.whole_run = last, True
        self._load.window = (start, end)

    def _another(self) -> bool:
        """Whether a stream may begin another request; the first refusal closes the window."""
        now = time.perf_counter()
        if self._window_to is None and self._window_from is not None:
            late = now - self._window_from >= self._cell.seconds
            if late or self._begun >= self._cell.requests or self._given_up():
                self._window_to = now
            else:
                self._begun += 1
        return self._window_to is None and not self._given_up()

    async def _open(self) -> None:
        """Requests at seeded random (Poisson) moments, whether or not the earlier ones are done."""
        rate = self._cell.rate_rps or 1.0
        source = random.Random(f"{self._seed}/arrivals")
        slots = asyncio.Semaphore(_IN_FLIGHT_LIMIT)
        tasks: set[asyncio.Task[None]] = set()
        start = due = time.perf_counter() + 0.05 + source.expovariate(rate)
        self._window_from = start

        async def request(at: float) -> None:
            async with slots:
                await self._one(at)

        for _ in range(self._cell.requests):
            if due - start > self._cell.seconds or self._given_up():
                break
            while (left := due - time.perf_counter()) > 0:  # a loop's timer may be a little early
                await asyncio.sleep(left)
            task = asyncio.create_task(request(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += source.expovariate(rate)
        backlog = len(tasks)
        await asyncio.gather(*tasks)
        last = max((record.ended for record in self._load.records), default=start)
        self._load.window = (start, max(last, start))
        sent = len(self._load.records)
        if backlog > 0.5 * sent:
            self._load.marks.append(
                f"no steady state: {backlog} of {sent} requests were open when the last one went"
            )

    def _tell_request(self, phase: str, due: float | None, record: StreamRecord) -> None:
        """One line of raw data: everything that the figures are made of."""
        times = record.arrivals
        line: dict[str, Any] = {
            "event": "request",
            "phase": phase,
            "sent": round(record.sent, 6),
            "ended": round(record.ended, 6),
            "first": round(times[0], 6) if times else None,
            "gaps_us": [round(1e6 * (b - a)) for a, b in zip(times, times[1:], strict=False)],
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "coalesced": record.coalesced,
            "finish": record.finish_reason,
        }
        if due is not None:
            line["due"] = round(due, 6)
        if record.fault:
            line["fault"] = record.fault[:500]
        self._tell(line)


def _warm_up_failed(records: list[StreamRecord]) -> bool:
    """Whether it is clear that no warm-up will succeed: two failures and nothing else."""
    return len(records) >= 2 and not any(record.completed for record in records)


def _ramp_of(warm: list[StreamRecord], cell: LoadCellPlan) -> float:
    """Seconds over which the streams start: one answer's length, so that their phases spread."""
    first = statistics.median(record.arrivals[0] - record.sent for record in warm)
    steps = [step for step in map(time_per_token, warm) if step is not None]
    whole = first + (statistics.median(steps) if steps else 0.0) * cell.output_tokens
    return min(_RAMP_LIMIT_S, whole) if (cell.concurrency or 1) > 1 else 0.0


# ── boundaries / load_generator ───────────────────────────────────────────────────────────────────
# Load on one server, cell by cell, in a process of its own: closed loop or open loop.
#
# Reads a plan, appends JSON lines to a results file as it goes, and ends when its parent is gone.
# Knows neither rigs nor reports' folders.


async def run_load(plan: LoadPlan, tell: LoadTell) -> None:
    """Measure every cell of `plan`; `tell` gets each event as it happens."""
    key = os.environ.get(plan.api_key_variable, "") if plan.api_key_variable else ""
    client = LoadClient(
        LoadTarget.from_url(plan.base_url),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        stall_s=plan.stall_s,
        total_s=plan.request_timeout_s,
    )
    calibration = Calibration(plan, client)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    tell({"event": "begin", "loop": loop, "python": platform.python_version()})
    try:
        for number, cell in enumerate(plan.cells):
            begun = time.perf_counter()
            tell({"event": "cell begins", "cell": number, "id": cell.cell_id})
            result = await CellLoad(plan, number, client, tell).run(calibration)
            seconds = round(time.perf_counter() - begun, 3)
            tell(
                {
                    "event": "cell",
                    "cell": number,
                    "seconds": seconds,
                    "result": result.model_dump(mode="json"),
                }
            )
        handshakes = [round(1000 * value, 3) for value in client.connect_s]
        rtt = statistics.median(handshakes) if handshakes else None
        tell({"event": "end", "ignore_eos": calibration.form.ignore_eos, "connect_ms": rtt})
    finally:
        client.close()


async def _until_orphaned(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` while the parent lives: load that nobody waits for must not go on."""
    parent = os.getppid()
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=1.0)
        if os.getppid() != parent:
            task.cancel()
            await asyncio.wait({task})
            raise RigError("CANCELLED", "the process that asked for the load is gone")
    await task


def run_load_folder(folder: Path) -> int:
    """Measure the plan in `folder`, append results beside it.

    Returns 0 when all cells were tried. Raises RigError INVALID for a plan that is none.
    """
    try:
        plan = LoadPlan.model_validate_json((folder / LOAD_PLAN_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise RigError("INVALID", f"{folder} holds no plan: {type(error).__name__}") from None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    # What is loaded already is not searched again and again while times are taken.
    gc.collect()
    gc.freeze()
    with (folder / LOAD_RESULTS_FILE).open("a", buffering=1, encoding="utf-8") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")

        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            runner.run(_until_orphaned(run_load(plan, tell)))
    return 0


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where uvloop is installed: it halves the client's cost; else the default."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# ── programs / loadgen ────────────────────────────────────────────────────────────────────────────


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="loadgen.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where plan.json lies")
    arguments = parser.parse_args(argv)
    try:
        return run_load_folder(arguments.folder)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
