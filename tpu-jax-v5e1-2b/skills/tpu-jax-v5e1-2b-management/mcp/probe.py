# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "httpx2>=2.16,<3",
#     "platformdirs>=4.3,<5",
#     "pydantic>=2.14,<3",
# ]
# ///
# Built from forge/programs/probe.py by `python3 -m forge.build`: edit it there.

"""The probes: asks a served model what a 200 can hide, from a process of its own.

    python3 probe.py FOLDER     carry out FOLDER/plan.json, append each event to it

probe_capabilities starts it. It knows one address: that of the plan.
"""

# Contents, by line:
#    68 ground / errors: The one exception that a tool raises on purpose, and the closed set of …
#   114 ground / redact: Everything that leaves the rig passes here: secrets out, control …
#   228 ground / state: Where a rig keeps what must outlive it: state, cache and logs in the …
#   366 knowledge / report_schema: What a benchmark report is: closed records, so that a typing …
#   795 knowledge / probe_report: What a probe report is: closed records of what a served model …
#   972 knowledge / token_fit: How many words of a prompt make how many tokens, as one server …
#  1002 boundaries / chat_client: An OpenAI-style client for a served model: health, model list, …
#  1237 boundaries / probe_client: One whole chat completion with whatever fields a probe wants, …
#  1340 boundaries / probe_plan: What probe.py is to ask, and what it tells as it goes: files that …
#  1398 toolsets / probe_asking: How a probe asks: every request and answer is kept as evidence, …
#  1528 toolsets / probe_cases: Every probe by name: its group and its title, for whoever plans …
#  1572 toolsets / probe_context: A conversation that fills the configured limit to the token, and …
#  1716 toolsets / probe_greedy: Six greedy prompts, each asked twice: whether the server repeats …
#  1792 toolsets / probe_schema: Whether a JSON schema is enforced by a grammar, merely obeyed, or …
#  1906 toolsets / probe_tool_calls: The five tool-calling scenarios as data, and how an answer to …
#  2093 toolsets / probe_vision: Whether the model sees: two halves of random colours, drawn here, …
#  2184 toolsets / probe_run: Carries out a plan of probes in probe.py's process: case after case, …
#  2282 programs / probe: The probes: asks a served model what a 200 can hide, from a process of …

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import math
import os
import random
import re
import secrets
import ssl
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import platformdirs
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


# ── ground / redact ───────────────────────────────────────────────────────────────────────────────
# Everything that leaves the rig passes here: secrets out, control characters out, bounded.
#
# Knows the shapes of secrets and the values in this process's environment; knows no tool.

TEXT_LIMIT = 32_000  # characters of one result; a client's own limit is about 25,000 tokens

# Shapes of credentials that may stand in logs. Sources: the providers' own token formats. One
# expression each: with its fixed beginning it is searched for ten times faster than as a branch.
_SECRET_SHAPES = (
    re.compile(r"hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"),  # not hf_transfer or hf_overrides
    re.compile(r"ya29\.[A-Za-z0-9_.\-]{8,}"),
    re.compile(r"AKIA[A-Z0-9]{12,}"),
    re.compile(r"ASIA[A-Z0-9]{12,}"),
    re.compile(r"dop_v1_[a-f0-9]{16,}"),
    re.compile(r"sk-(?<![A-Za-z0-9]sk-)[A-Za-z0-9_\-]{16,}"),
    re.compile(r"AIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"eyJ[A-Za-z0-9_\-.]{20,}"),  # a JSON web token
    re.compile(r"bearer\s+[A-Za-z0-9._~+/\-]{8,}=*", re.I),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
)
_ADDRESS_LOGIN = re.compile(r"://[^\s/@:]+:[^\s/@]+@")
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.I)
# C0 and C1 but newline and tab, DEL, bidirectional and zero-width marks, lone surrogates, tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of environment variables whose names speak of secrets, longest first.

    Values under 8 characters are left out: they would black out ordinary words.
    """
    source = os.environ if environment is None else environment
    found = {v.strip() for k, v in source.items() if _SECRET_NAMES.search(k)}
    return tuple(sorted((v for v in found if len(v) >= 8), key=len, reverse=True))


def redact(text: str, values: Sequence[str] | None = None) -> str:
    """`text` with known secret values and credential shapes replaced by ``[redacted]``.

    `values` are those of `secret_values()`, where the caller has many texts and reads them once.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, "[redacted]")
    for shape in _SECRET_SHAPES:
        text = shape.sub("[redacted]", text)
    return _ADDRESS_LOGIN.sub("://[redacted]@", text)


def printable(text: str) -> str:
    """`text` without terminal sequences, control and bidirectional characters and surrogates."""
    return _UNPRINTABLE.sub("", _ANSI_SEQUENCE.sub("", text.replace("\r\n", "\n")))


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` in at most about `limit` characters: a third from its head, the rest from its tail.

    What was cut is named, because the end of a log is where the error stands and its beginning is
    where the version stands.
    """
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"


def clean(text: str, limit: int = TEXT_LIMIT, values: Sequence[str] | None = None) -> str:
    """Redacted, printable and clipped: the form in which any text goes out."""
    # Clipped generously first, so that 30 MB of log never go through the expressions.
    return clip(redact(printable(clip(text, 8 * limit)), values), limit)


def clean_value(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """`clean` over every string (keys too) of a JSON value; other scalars pass through.

    Bounded in every direction: a list or mapping keeps limit/16 items, a quarter of that with each
    level down, but 10 at least; and what is nested more than 20 deep becomes a remark.
    """
    return _clean_value(value, limit, 0, secret_values())


def _clean_value(value: Any, limit: int, depth: int, values: Sequence[str]) -> Any:
    if isinstance(value, str):
        return clean(value, limit, values)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth > 20:
        return "[… nested too deep …]"
    room = max(10, limit >> (4 + 2 * depth))
    if isinstance(value, Mapping):
        pairs = _fewer(list(value.items()), room, lambda left: ("…", left))
        return {
            clean(str(k), 200, values): _clean_value(v, limit, depth + 1, values) for k, v in pairs
        }
    return [_clean_value(v, limit, depth + 1, values) for v in _fewer(list(value), room, str)]


def _fewer(items: list[Any], room: int, remark: Callable[[str], Any]) -> list[Any]:
    """At most `room` of `items`, a third from the head; among texts a remark tells the gap."""
    if len(items) <= room:
        return items
    head, tail = items[: room // 3], items[room // 3 - room :]
    texts = all(isinstance(i[-1] if isinstance(i, tuple) else i, str) for i in head)
    left_out = [remark(f"[… {len(items) - room} items left out …]")] if texts else []
    return [*head, *left_out, *tail]


# ── ground / state ────────────────────────────────────────────────────────────────────────────────
# Where a rig keeps what must outlive it: state, cache and logs in the user's folders, by rig.
#
# A plugin's own folder is replaced on update, so nothing of value is kept beside server.py.

APPLICATION = "gemma4-rigs"


@dataclass(frozen=True)
class RigPaths:
    """The folders of one rig. `state` is the truth of this installation, `cache` can be deleted,
    `programs` is where server.py and the programs beside it lie."""

    state: Path
    cache: Path
    programs: Path = Path()

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def rig_paths(rig: str, programs: Path = Path()) -> RigPaths:
    """The rig's folders after the platform's rules (``XDG_STATE_HOME`` and so on), not yet made."""
    state = Path(platformdirs.user_state_dir(APPLICATION, appauthor=False))
    cache = Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))
    return RigPaths(state=state / rig, cache=cache, programs=programs)


def private_folder(path: Path) -> Path:
    """`path` as an existing folder; what of it is missing is made for this user alone (0700).

    Raises RigError DENIED where it cannot be made or written (read-only home, full disk): a rig
    that cannot write down what it starts does not start it.
    """
    try:
        # One by one: with parents=True the mode would hold for the last one only.
        for folder in (*reversed(path.parents), path):
            folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise RigError(
            "DENIED",
            f"the folder {path} cannot be made: {error.strerror}",
            "make its parent writable, or set XDG_STATE_HOME and XDG_CACHE_HOME",
        ) from error
    return path


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: temporary file (0600), fsync, rename.

    Raises RigError DENIED with the reason when the disk is full or read-only.
    """
    private_folder(path.parent)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RigError(
            "DENIED",
            f"{path} cannot be written: {error.strerror}",
            "free some disk space or make the folder writable, then call again",
        ) from error


def write_json(path: Path, value: Any) -> None:
    """`write_private` of `value` as JSON."""
    write_private(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is; None where it is none, broken, or nested beyond reading."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where it is absent or damaged (damage is renamed aside).

    Raises RigError DENIED where it is there and cannot be read: that says nothing about what it
    holds, and a record must not be lost over it.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RigError("DENIED", f"{path} cannot be read: {error.strerror}") from error
    value = json_object(data)
    if value is None:
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
    return value


def installation_id(paths: RigPaths) -> str:
    """This installation's random id (16 hex digits), made once: the `owner` label.

    Two servers that start at once agree: the file is linked into place, and the first one wins.
    """
    path = paths.state.parent / "installation"
    if not _known_id(path):
        candidate = path.with_name(f".installation.{secrets.token_hex(8)}")
        write_private(candidate, secrets.token_hex(8))
        try:
            os.link(candidate, path)
        except OSError:
            # Another server was first; or the file is damaged, or this disk knows no links.
            if not _known_id(path):
                candidate.replace(path)
        finally:
            candidate.unlink(missing_ok=True)
    return _known_id(path)


def _known_id(path: Path) -> str:
    """The id in `path`; empty where there is none that could be one."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch("[0-9a-f]{16}", text) else ""


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


# ── knowledge / probe_report ──────────────────────────────────────────────────────────────────────
# What a probe report is: closed records of what a served model can do, each with its evidence.
#
# Knows no request and no server; subject, machine and engine are those of a benchmark's report.

# pass: it works. fail: it was tried and does not. silent: a 200 that hides that the wish was
# ignored. unsupported: an honest refusal. untested: nothing can be said, and why.
ProbeVerdict = Literal["pass", "fail", "silent", "unsupported", "untested"]
ProbeGroup = Literal["tools", "schema", "vision", "determinism", "context"]
PROBE_VERDICTS: tuple[ProbeVerdict, ...] = ("pass", "fail", "silent", "unsupported", "untested")
MOST_EXCHANGES = 40  # of one case

_ProbeCount = Annotated[int | None, Field(ge=0)]


class ProbeExchange(ClosedRecord):
    """One request and what came back, both as bounded text. status 0: nothing came back."""

    what: ReportWord
    request: ReportText
    status: int = Field(ge=0, le=999)
    answer: ReportText
    prompt_tokens: _ProbeCount = None
    completion_tokens: _ProbeCount = None
    seconds: NonNegative


class ProbeFinding(ClosedRecord):
    """What one case showed. Only an untested one may be without evidence; `greedy_baseline` has
    its own in the report's `greedy`."""

    case: Annotated[str, Field(pattern=r"^[a-z_]{3,40}$")]
    group: ProbeGroup
    verdict: ProbeVerdict
    detail: Annotated[str, Field(min_length=1, max_length=2000)]
    seconds: NonNegative = 0.0
    evidence: list[ProbeExchange] = Field(default_factory=list, max_length=MOST_EXCHANGES)

    @model_validator(mode="after")
    def _has_evidence(self) -> ProbeFinding:
        if self.verdict != "untested" and not self.evidence and self.case != "greedy_baseline":
            raise ValueError(f"{self.case} is {self.verdict} without evidence")
        return self


class GreedyText(ClosedRecord):
    """One greedy answer. sha256, size: of the raw bytes (reasoning, a zero byte, content), which
    decide; `text` has been cleaned and is for people. repeats: the second run gave the same."""

    prompt: ReportWord
    sha256: Sha256Text
    size: int = Field(ge=0, description="Bytes.")
    text: ReportText
    finish_reason: ReportWord = ""
    repeats: bool


class ProbeRunFacts(ClosedRecord):
    """Which run this is. id is the file's stem; a run that was cut short says so in `state`."""

    id: Annotated[str, Field(pattern=f"^{RUN_ID_PATTERN}$")]
    date: DayText
    rig: ReportWord = ""
    started: ReportWord = ""
    duration_s: NonNegative = 0.0
    state: Literal["complete", "cancelled", "killed"] = "complete"


class ProbeReport(ClosedRecord):
    """What one served model could do. context_limit: tokens of one conversation, and whose word
    that is. greedy_set: which prompts and lengths `greedy` was made with; others do not compare."""

    schema_version: Literal["1.0"] = "1.0"
    run: ProbeRunFacts
    subject: Subject
    hardware: BenchHardware
    engine: BenchEngine
    settings: dict[ReportWord, ReportWord] = Field(default_factory=dict, max_length=60)
    context_limit: int | None = Field(default=None, ge=1)
    limit_source: ReportWord = ""
    findings: list[ProbeFinding] = Field(min_length=1, max_length=40)
    greedy_set: ReportWord = ""
    greedy: list[GreedyText] = Field(default_factory=list, max_length=20)
    baseline: ReportWord = ""

    @model_validator(mode="after")
    def _hangs_together(self) -> ProbeReport:
        names = [finding.case for finding in self.findings]
        if len(set(names)) < len(names):
            raise ValueError("a case stands twice")
        first = run_id_of(self.run.date, self.subject.short, self.engine.name, self.hardware.slot)
        if self.run.id.partition("--")[0] != first:
            raise ValueError(f"the run's id must be {first}, with --rN for a repeat")
        return self


def probe_table(findings: list[ProbeFinding]) -> list[str]:
    """The findings as aligned lines: case, verdict, what was seen."""
    if not findings:
        return []
    width = max(len(finding.case) for finding in findings)
    return [f"{f.case:{width}}  {f.verdict:11}  {f.detail[:400]}" for f in findings]


def compared_greedy(now: ProbeReport, then: ProbeReport) -> tuple[ProbeVerdict, str]:
    """Whether the greedy answers of two reports are byte for byte the same, and what else differs.

    A prompt whose answer one of the two did not repeat by itself cannot tell the two apart.
    """
    if now.subject.model != then.subject.model:
        return "untested", f"{then.run.id} is of another model, {then.subject.model}"
    if not then.greedy or now.greedy_set != then.greedy_set:
        return ("untested", f"{then.run.id} holds no answers to these prompts at this length")
    differs = differing_probe_facts(now, then)
    beside = f"; differs: {', '.join(differs)}" if differs else "; nothing else differs"
    theirs = {text.prompt: text for text in then.greedy}
    changed, unsteady, same = [], [], 0
    for mine in now.greedy:
        other = theirs.get(mine.prompt)
        if other is not None and other.sha256 == mine.sha256:
            same += 1
        elif other is None or not (mine.repeats and other.repeats):
            unsteady.append(mine.prompt)
        else:
            changed.append(f"{mine.prompt} from {_first_difference(mine.text, other.text)}")
    head = f"{same} of {len(now.greedy)} answers are byte for byte those of {then.run.id}"
    if changed:
        return "fail", f"{head}; changed: {', '.join(changed)}{beside}"
    if unsteady:
        why = "cannot tell, one of the two runs did not repeat itself"
        return "untested", f"{head}; {', '.join(unsteady)}: {why}{beside}"
    return "pass", f"{head}{beside}"


def differing_probe_facts(now: ProbeReport, then: ProbeReport) -> list[str]:
    """What is not the same about two runs, each as 'what: earlier, then now'."""
    pairs: list[tuple[str, object, object]] = [
        ("encoding", then.subject.encoding, now.subject.encoding),
        ("KV type", then.subject.kv_dtype.value, now.subject.kv_dtype.value),
        ("engine", then.engine.name, now.engine.name),
        ("engine version", then.engine.version, now.engine.version),
        ("argv", _words_beside(then, now), _words_beside(now, then)),
        ("image", then.engine.image_digest, now.engine.image_digest),
        ("server build", then.engine.server, now.engine.server),
        ("hardware", then.hardware.slot, now.hardware.slot),
    ]
    for key in sorted(now.settings.keys() | then.settings.keys()):
        pairs.append((key, then.settings.get(key, "-"), now.settings.get(key, "-")))
    return [f"{what} {str(a)[:80]!r} then {str(b)[:80]!r}" for what, a, b in pairs if a != b]


def _words_beside(report: ProbeReport, other: ProbeReport) -> str:
    """The options of the engine's argument list, each with its value, that the other's lacks. The
    port says nothing about what is answered."""
    theirs = _argv_options(other.engine.argv)
    return " ".join(o for o in _argv_options(report.engine.argv) if o not in theirs)


def _argv_options(argv: list[str]) -> list[str]:
    options: list[str] = []
    for word in argv:
        if options and options[-1].startswith("--") and " " not in options[-1] and word[:1] != "-":
            options[-1] += f" {word}"
        else:
            options.append(word)
    return [option for option in options if not option.startswith("--port")]


def _first_difference(one: str, two: str) -> str:
    """Where two texts part, in words."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    return f"character {same}"


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


# ── boundaries / chat_client ──────────────────────────────────────────────────────────────────────
# An OpenAI-style client for a served model: health, model list, one streamed chat completion.
#
# Talks to one address that a plane has proven to be this rig's own; follows no redirect, uses no
# proxy, and bounds every read in bytes and time.

_LINE_LIMIT = 8_000_000  # bytes of one event; larger ones are refused, not buffered
_ANSWER_LIMIT = 4_000_000  # characters of one answer; then the stream is left
_BODY_LIMIT = 1_000_000  # bytes read of any other answer


@dataclass
class ChatAnswer:
    """One streamed answer. Times in seconds from the request's start; counts from usage.

    `complete` is true only when the server said why it stopped; else `broke_off` says why not.
    """

    text: str = ""
    reasoning: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    broke_off: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.finish_reason) and not self.broke_off


async def _bounded_body(response: httpx2.Response) -> bytes:
    """The first _BODY_LIMIT bytes of an answer; what is beyond them is not even fetched."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= _BODY_LIMIT:
            break
    return bytes(body[:_BODY_LIMIT])


async def _event_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The `data:` payloads of an event stream, whole, whatever the chunks are cut into.

    One payload a line: model servers write an event's JSON on one line, some without the blank line
    that the standard asks for between two events.
    """
    buffer = bytearray()
    async for chunk in response.aiter_bytes():
        buffer += chunk
        if len(buffer) > _LINE_LIMIT:
            raise RigError("PARTIAL", "the server sent an event beyond all bounds")
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())
    if buffer.startswith(b"data:"):
        yield bytes(buffer[5:].strip())


def _take_chat_event(answer: ChatAnswer, payload: bytes, begun: float) -> None:
    """Add one event to `answer`; RigError PARTIAL when the server reports an error in it."""
    now = time.monotonic() - begun
    event = json_object(payload.decode("utf-8", "replace"))
    if event is None:
        raise RigError("PARTIAL", "the server sent an event that is no JSON object")
    if event.get("error"):
        raise RigError("PARTIAL", f"the server reported an error: {str(event['error'])[:300]}")
    answer.model = str(event.get("model") or answer.model)
    usage = _mapping(event.get("usage"))
    answer.prompt_tokens = _count(usage.get("prompt_tokens"), answer.prompt_tokens)
    answer.completion_tokens = _count(usage.get("completion_tokens"), answer.completion_tokens)
    choices = event.get("choices")
    for choice in map(_mapping, choices if isinstance(choices, list) else []):
        delta = _mapping(choice.get("delta"))
        piece = str(delta.get("content") or "")
        thought = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        # The first chunk carries the role alone: it is no token, and must not stop the clock.
        if piece or thought:
            answer.arrivals.append(now)
            if answer.ttft_s is None:
                answer.ttft_s = now
            answer.text += piece
            answer.reasoning += thought
            if len(answer.text) + len(answer.reasoning) > _ANSWER_LIMIT:
                raise RigError("PARTIAL", "the server sent an answer beyond all bounds")
        answer.finish_reason = str(choice.get("finish_reason") or answer.finish_reason)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any, known: int | None) -> int | None:
    """A token count as the server gave it; what cannot be one leaves the known count."""
    return value if type(value) is int and value >= 0 else known


class ChatClient:
    """A client of the server at `base_url` (``http://127.0.0.1:PORT``), one connection a call.

    `key` goes out as a bearer token and nowhere else; empty sends none.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        self.base_url = base_url
        self._key = key

    def _http(self, total_s: float) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.base_url,
            trust_env=False,
            follow_redirects=False,
            # Loopback speaks no TLS: a trust store would be 50 ms of every call, and of every TTFT.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A compressed answer could unfold to any size before it is measured.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx2.Timeout(total_s, connect=min(5.0, total_s)),
        )

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and bounded body of GET `path`. Raises RigError UNREACHABLE or TIMEOUT."""
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("GET", path) as response:
                    return response.status_code, await _bounded_body(response)
        except (TimeoutError, httpx2.TimeoutException):
            raise RigError("TIMEOUT", f"{path} did not answer in {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise RigError("UNREACHABLE", f"nothing answers: {type(error).__name__}") from None

    async def get_json(self, path: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """GET `path` as a JSON object. RigError UNREACHABLE, TIMEOUT, or DENIED (no JSON)."""
        status, body = await self._get(path, timeout_s)
        if status != 200:
            raise RigError("UNREACHABLE", f"{path} answered {status}")
        value = json_object(body)
        if value is None:
            raise RigError("DENIED", f"{path} did not answer as a model server does")
        return value

    async def healthy(self, path: str = "/health", timeout_s: float = 2.0) -> bool:
        """Whether `path` answers 200 now; some servers say it with an empty body."""
        try:
            status, _ = await self._get(path, timeout_s)
        except RigError:
            return False
        return status == 200

    async def chat(
        self,
        model: str,
        prompt: str,
        *,
        system: str = "",
        max_tokens: int,
        temperature: float,
        timeout_s: float,
    ) -> ChatAnswer:
        """One chat completion, streamed; whatever came before a break is kept and marked.

        Raises RigError when no answer began: UNREACHABLE, TIMEOUT, or after the server's status
        AUTH, BUSY, INVALID, DENIED (a redirect, no chat completion) or INTERNAL, with its words.
        """
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "model": model,
            "messages": [*messages, {"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, begun = ChatAnswer(), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise _status_fault(response.status_code, await _bounded_body(response))
                    events = 0
                    async for payload in _event_lines(response):
                        if payload == b"[DONE]":
                            break
                        if payload:
                            events += 1
                            _take_chat_event(answer, payload, begun)
                    if not events:
                        raise RigError("DENIED", "what answers there streams no chat completion")
        except RigError as error:
            if error.error_class != "PARTIAL":
                raise
            answer.broke_off = error.what
        except (TimeoutError, httpx2.TimeoutException):
            answer.broke_off = f"no end within {timeout_s:g} s"
            if not answer.arrivals:
                raise RigError(
                    "TIMEOUT",
                    f"the model gave no token within {timeout_s:g} s",
                    "ask for fewer max_tokens, or raise QUERY_TIMEOUT_S",
                ) from None
        except httpx2.HTTPError as error:
            answer.broke_off = f"the connection broke ({type(error).__name__})"
            if not answer.arrivals:
                raise RigError(
                    "UNREACHABLE", f"the model server does not answer: {type(error).__name__}"
                ) from None
        answer.total_s = time.monotonic() - begun
        if not answer.complete and not answer.broke_off:
            answer.broke_off = "the stream ended without a finish reason"
        return answer


def _status_fault(status: int, body: bytes) -> RigError:
    """The refusal that an HTTP status means, with the server's own words, bounded."""
    words = body[:2000].decode("utf-8", "replace")
    if status in (401, 403):
        return RigError("AUTH", f"the model server refused the credentials ({status})")
    if status in (429, 503):
        return RigError("BUSY", f"the model server is overloaded ({status}): {words}")
    if status < 400:
        return RigError("DENIED", f"a redirect or no answer ({status}) came back; not followed")
    if status < 500:
        return RigError("INVALID", f"the model server refused the request ({status}): {words}")
    return RigError(
        "INTERNAL",
        f"the model server failed ({status}): {words}",
        "read the model server's log",
    )


# ── boundaries / probe_client ─────────────────────────────────────────────────────────────────────
# One whole chat completion with whatever fields a probe wants, and exactly what came back.
#
# A refusal, an empty body and a broken connection are findings here, so none of them is raised.

_PROBE_BODY_LIMIT = 4_000_000  # bytes; no probe asks for an answer near it


@dataclass(frozen=True)
class ProbeAnswer:
    """What came back. status 0: nothing did, and `fault` says why. The properties read a chat
    completion and are empty or None where the body holds none."""

    status: int
    text: str = ""
    seconds: float = 0.0
    fault: str = ""
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any] | None:
        """The first choice's message; None where there is no such thing."""
        choices = self.body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        return message if isinstance(message, dict) else None

    @property
    def content(self) -> str:
        content = (self.message or {}).get("content")
        return content if isinstance(content, str) else ""

    @property
    def reasoning(self) -> str:
        message = self.message or {}
        return str(message.get("reasoning_content") or message.get("reasoning") or "")

    @property
    def tool_calls(self) -> list[Any]:
        calls = (self.message or {}).get("tool_calls")
        return calls if isinstance(calls, list) else []

    @property
    def finish_reason(self) -> str:
        choices = self.body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        return str(first.get("finish_reason") or "") if isinstance(first, dict) else ""

    @property
    def prompt_tokens(self) -> int | None:
        return self._counted("prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        return self._counted("completion_tokens")

    @property
    def error_words(self) -> str:
        """What the server says went wrong: an error in the body, else the body of a refusal."""
        error = self.body.get("error")
        if self.status != 200:
            error = error or self.body.get("detail") or self.body.get("message") or self.text
        if isinstance(error, dict):
            error = error.get("message") or error
        return str(error or "")

    def _counted(self, name: str) -> int | None:
        usage = self.body.get("usage")
        count = usage.get(name) if isinstance(usage, dict) else None
        return count if type(count) is int and count >= 0 else None


class ProbeClient(ChatClient):
    """A chat client that tells what came back, whatever it was."""

    async def post_chat(self, fields: Mapping[str, Any], timeout_s: float) -> ProbeAnswer:
        """POST `fields` as one request and read the whole answer, bounded in bytes and seconds."""
        begun = time.monotonic()
        data, status, fault = bytearray(), 0, ""
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                path = "/v1/chat/completions"
                async with http.stream("POST", path, json=dict(fields)) as response:
                    status = response.status_code
                    async for chunk in response.aiter_bytes():
                        data += chunk
                        if len(data) > _PROBE_BODY_LIMIT:
                            fault = f"the answer is longer than {_PROBE_BODY_LIMIT:,} bytes"
                            break
        except (TimeoutError, httpx2.TimeoutException):
            fault = f"no whole answer within {timeout_s:g} s"
        except httpx2.HTTPError as error:
            fault = f"the connection broke ({type(error).__name__})"
        text = data[:_PROBE_BODY_LIMIT].decode("utf-8", "replace")
        return ProbeAnswer(
            status=0 if fault else status,
            text=text,
            seconds=time.monotonic() - begun,
            fault=fault,
            body=(json_object(text) or {}) if not fault else {},
        )


# ── boundaries / probe_plan ───────────────────────────────────────────────────────────────────────
# What probe.py is to ask, and what it tells as it goes: files that outlive both processes.
#
# The server writes the plan and reads the events, the program the other way round. Knows no case.

PROBE_PROGRAM = "probe.py"
PROBE_PLAN_FILE = "plan.json"
PROBE_EVENTS_FILE = "events.jsonl"

# asking: a request goes out. answered: what came back. barred: not even a plain question is
# answered, and nothing else was asked. begun, judged: a case. end: everything was asked.
ProbeEventKind = Literal["asking", "answered", "barred", "begun", "judged", "end"]


class ProbeFacts(BaseModel):
    """What is known of the served model before it is asked. None: nobody says."""

    model_config = ConfigDict(extra="forbid")

    context_limit: int | None = None
    limit_source: str = ""
    vision: bool | None = None
    vision_source: str = ""


class ProbePlan(BaseModel):
    """Which cases to put to which server, in this order. timeout_s: longest wait for one answer, in
    seconds. `api_key_variable` names an environment variable: a key stands in no file and in no
    argument list. parent_pid: whose end ends the probes; 0: whoever starts the program."""

    model_config = ConfigDict(extra="forbid")

    base_url: str
    model: str
    cases: list[str] = Field(min_length=1)
    timeout_s: float = Field(gt=0)
    facts: ProbeFacts = Field(default_factory=ProbeFacts)
    api_key_variable: str = ""
    parent_pid: int = Field(default=0, ge=0)


class ProbeEvent(ClosedRecord):
    """One line of the events. at_s: seconds since the plain question was answered; before that 0.
    case: the one under way. greedy: the texts that came since the last event, of the prompts that
    `greedy_set` names."""

    event: ProbeEventKind
    at_s: float = Field(default=0.0, ge=0)
    case: str = ""
    what: str = ""
    exchange: ProbeExchange | None = None
    verdict: ProbeVerdict | None = None
    detail: str = ""
    seconds: float = Field(default=0.0, ge=0)
    greedy: list[GreedyText] = Field(default_factory=list)
    greedy_set: str = ""


# ── toolsets / probe_asking ───────────────────────────────────────────────────────────────────────
# How a probe asks: every request and answer is kept as evidence, and refusals are told apart.
#
# Knows no case. A 200 is judged by the case that asked; everything else is judged here.

_EVIDENCE_LIMIT = 1700  # characters of a request or an answer; a report's text holds 2000
_QUOTE_LIMIT = 160
_NO_SUCH_THING = re.compile(
    r"not (?:yet |currently )?(?:be )?(?:supported|implemented|available|enabled|allowed|permitted)"
    r"|unsupported|unknown (?:field|parameter|argument)|unrecogni[sz]ed|unexpected field"
    r"|(?:does not|doesn't|cannot|can't) (?:support|accept|handle|process)",
    re.I,
)


@dataclass(frozen=True)
class Judgement:
    """A verdict and what was seen, in a sentence."""

    verdict: ProbeVerdict
    detail: str


class ProbeAsker:
    """Sends requests to the served model, one at a time.

    exchanges: the evidence of the case that runs. greedy: the answers that other runs compare with.
    tell: hears what is asked now, for whoever waits. keep: hears each exchange as it is made.
    """

    def __init__(
        self, client: ProbeClient, model: str, timeout_s: float, facts: ProbeFacts
    ) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s
        self.facts = facts
        self.exchanges: list[ProbeExchange] = []
        self.greedy: list[GreedyText] = []
        self.tell: Callable[[str], None] = lambda what: None
        self.keep: Callable[[ProbeExchange], None] = lambda exchange: None

    async def ask(
        self, what: str, content: str | list[dict[str, Any]], max_tokens: int, **fields: Any
    ) -> ProbeAnswer:
        """One greedy, unstreamed request with the user's `content` and further `fields`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": False,
            **fields,
        }
        self.tell(what)
        answer = await self._client.post_chat(body, self._timeout_s)
        self.exchanges.append(exchange_of(what, body, answer))
        self.keep(self.exchanges[-1])
        return answer


def exchange_of(what: str, body: dict[str, Any], answer: ProbeAnswer) -> ProbeExchange:
    """A request and its answer as bounded, clean text."""
    # Long strings are clipped one by one first, so that a prompt does not push the fields out.
    request = json.dumps(clean_value(body, 400), ensure_ascii=False)
    return ProbeExchange(
        what=what,
        request=clean(request, _EVIDENCE_LIMIT),
        status=answer.status,
        answer=clean(answer.fault or answer.text, _EVIDENCE_LIMIT),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        seconds=round(answer.seconds, 3),
    )


def barred_judgement(answer: ProbeAnswer) -> Judgement | None:
    """The judgement of an answer that is no chat completion; None of one that is."""
    words, status = quoted_answer(answer.error_words), answer.status
    if answer.fault:
        return Judgement("untested", answer.fault)
    if status in (401, 403):
        return Judgement("untested", f"the server refused the credentials ({status})")
    if status in (408, 429, 503):
        return Judgement("untested", f"the server was too busy ({status}): {words}")
    if status == 501 or 400 <= status < 500:
        return Judgement("unsupported", f"refused with {status}: {words}")
    if status != 200 or words:
        verdict: ProbeVerdict = "unsupported" if _NO_SUCH_THING.search(words) else "fail"
        return Judgement(verdict, f"an error with {status}: {words}")
    if answer.message is None:
        return Judgement("fail", f"a 200 that is no chat completion: {quoted_answer(answer.text)}")
    return None


def cut_off_judgement(answer: ProbeAnswer) -> Judgement | None:
    """'untested' where the tokens ran out before the answer began, as long thoughts do."""
    if answer.finish_reason == "length" and not answer.content.strip() and not answer.tool_calls:
        what = "while it was thinking" if answer.reasoning else "before its first word"
        return Judgement("untested", f"cut off {what}, after {answer.completion_tokens} tokens")
    return None


def prompt_growth(answer: ProbeAnswer, without: ProbeAnswer) -> int | None:
    """How many prompt tokens a feature added; None where the server counts none."""
    if answer.prompt_tokens is None or without.prompt_tokens is None:
        return None
    return answer.prompt_tokens - without.prompt_tokens


def quoted_answer(text: str) -> str:
    """The beginning of a text on one line, for a sentence."""
    line = " ".join(clean(text, 4 * _QUOTE_LIMIT).split())
    return line if len(line) <= _QUOTE_LIMIT else line[: _QUOTE_LIMIT - 1] + "…"


def made_up_words(count: int) -> list[str]:
    """Different random words of four syllables, which no text holds by chance."""
    found: set[str] = set()
    while len(found) < count:
        found.add(
            "".join(_random_letter("bdfgklmnprtvz") + _random_letter("aeiou") for _ in range(4))
        )
    return sorted(found)


def _random_letter(letters: Sequence[str]) -> str:
    return secrets.choice(letters)


# ── toolsets / probe_cases ────────────────────────────────────────────────────────────────────────
# Every probe by name: its group and its title, for whoever plans one, asks it or tells of it.
#
# Knows no request; what is asked and how an answer is read stands in the modules that probe.py has.

# The order of a run: what may bring a server down, or take minutes, comes last.
PROBE_GROUPS: tuple[ProbeGroup, ...] = ("tools", "schema", "vision", "determinism", "context")


@dataclass(frozen=True)
class ProbeCase:
    """One capability that is asked for."""

    name: str
    group: ProbeGroup
    title: str


PROBE_CASES: tuple[ProbeCase, ...] = (
    ProbeCase("tool_one_call", "tools", "one tool, one call"),
    ProbeCase("tool_right_of_two", "tools", "the right one of two tools"),
    ProbeCase("tool_none_needed", "tools", "no tool needed"),
    ProbeCase("tool_two_parallel", "tools", "two calls in one answer"),
    ProbeCase("tool_missing_argument", "tools", "a missing argument is asked for"),
    ProbeCase("schema_thinking_off", "schema", "a JSON schema with thinking off"),
    ProbeCase("schema_thinking_on", "schema", "a JSON schema with thinking on"),
    ProbeCase("vision_picture", "vision", "one picture as a data URI"),
    ProbeCase("greedy_repeats", "determinism", "six greedy prompts, asked twice"),
    ProbeCase("context_at_limit", "context", "a conversation that fills the limit"),
    ProbeCase("context_above_limit", "context", "a conversation one token too long"),
)
PROBE_BY_NAME = {case.name: case for case in PROBE_CASES}
GREEDY_BASELINE_CASE = "greedy_baseline"  # no request of its own: two reports are compared


def planned_probes(groups: Sequence[str]) -> list[ProbeCase]:
    """The cases of these groups, in the order of a run."""
    return [case for group in PROBE_GROUPS if group in groups for case in _cases_of(group)]


def _cases_of(group: ProbeGroup) -> list[ProbeCase]:
    return [case for case in PROBE_CASES if case.group == group]


# ── toolsets / probe_context ──────────────────────────────────────────────────────────────────────
# A conversation that fills the configured limit to the token, and one that is a token too long.
#
# The prompt is made of words that are one token each, which short prompts prove first: so every
# length can be reached without knowing the tokenizer, and without sending a long prompt twice.

# What fills the prompt, the likeliest to read like language first: one word over and over sends a
# small model astray. Each set has at most as many words as the longest short prompt.
_PROBE_FILLERS = (
    "the of and to in is was for on that by this with from at are have been other were there can",
    "the of and to in is a for on that",
    "the",
    "a",
    "x",
    ".",
)
_FIT_POINTS = (8, 16, 32)  # words; three, so that a bend is seen
_ANSWER_ROOM = 16  # tokens left for the answer of the conversation that just fits
_MOST_CORRECTIONS = 2
_SPEAKS_OF_LENGTH = re.compile(
    r"length|context|token|too long|too large|exceed|maximum|limit", re.I
)


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that grows by one token a word, with a made-up word at its beginning to recall."""

    secret: str
    fillers: tuple[str, ...]
    fit: TokenFit

    def text(self, tokens: int) -> str:
        """The prompt that the server counts as `tokens`."""
        return _long_text(self.secret, self.fillers, self.fit.words_for(tokens))


async def probe_context_limit(asker: ProbeAsker, above: bool) -> Judgement:
    """Ask at the limit, or one token above it. Prompt and answer together count."""
    limit = asker.facts.context_limit
    if limit is None:
        return Judgement("untested", "neither the settings nor the server name a context limit")
    prompt = await _fitted_prompt(asker, limit)
    if isinstance(prompt, Judgement):
        return prompt
    room = 1 if above else _ANSWER_ROOM
    wanted = limit + 1 - room if above else limit - room
    what = "one token above the limit" if above else "exactly at the limit"
    answer = await asker.ask(what, prompt.text(wanted), room)
    # A fit may be some tokens off; a server that cuts the prompt is off by more, or stays off.
    for _ in range(_MOST_CORRECTIONS):
        counted = answer.prompt_tokens
        if answer.status != 200 or counted is None or counted == wanted:
            break
        if abs(counted - wanted) > max(4, wanted // 100):
            break
        fit = prompt.fit.moved_through(prompt.fit.words_for(wanted), counted)
        prompt = LongPrompt(prompt.secret, prompt.fillers, fit)
        again = await asker.ask(f"{what}, corrected", prompt.text(wanted), room)
        if not above and again.status != 200:
            break  # what was read before is the finding: less than was sent
        answer = again
    if above:
        return judged_above_limit(answer, limit, wanted)
    return judged_at_limit(answer, limit, wanted, prompt.secret)


def judged_at_limit(answer: ProbeAnswer, limit: int, wanted: int, secret: str) -> Judgement:
    """The verdict on a prompt of `wanted` tokens that, with its answer, just fits."""
    early = barred_judgement(answer)
    if early is not None:
        if early.verdict == "unsupported":
            return Judgement("fail", f"{limit} tokens are the limit, and they were {early.detail}")
        return early
    counted = answer.prompt_tokens
    if counted is None:
        return Judgement("untested", "the server counts no prompt tokens")
    if counted != wanted:
        return Judgement("silent", f"{wanted} prompt tokens were sent and {counted} were read")
    if not (answer.content or answer.reasoning) or not answer.completion_tokens:
        ended = f"{answer.finish_reason or 'no finish reason'}, {answer.completion_tokens} tokens"
        return Judgement("fail", f"{counted} tokens were read, and no word came back ({ended})")
    recalled = secret in answer.content.casefold()
    word = "its first word was recalled" if recalled else "its first word was not recalled"
    return Judgement("pass", f"{counted} + {answer.completion_tokens} of {limit} tokens; {word}")


def judged_above_limit(answer: ProbeAnswer, limit: int, wanted: int) -> Judgement:
    """The verdict on a prompt that leaves no room for a single token: it must be refused."""
    early = barred_judgement(answer)
    if early is not None:
        if early.verdict != "unsupported" and answer.status != 200:
            return early
        if _SPEAKS_OF_LENGTH.search(answer.error_words):
            return Judgement("pass", f"{limit + 1} tokens were {early.detail}")
        return Judgement("fail", f"{limit + 1} tokens were {early.detail}, with no word on length")
    counted = answer.prompt_tokens
    if counted is not None and counted < wanted:
        return Judgement("silent", f"of {wanted} prompt tokens {counted} were read, with a 200")
    if not answer.completion_tokens and not answer.content:
        return Judgement("silent", f"{limit + 1} tokens gave an empty answer with a 200")
    return Judgement(
        "silent",
        f"{limit + 1} tokens were taken with a 200: the server keeps another limit than the "
        f"configured {limit}, or none",
    )


async def _fitted_prompt(asker: ProbeAsker, limit: int) -> LongPrompt | Judgement:
    """A prompt whose filler is one token each, tried on short prompts; else why there is none."""
    secret = made_up_words(1)[0]
    for text in _PROBE_FILLERS:
        fillers = tuple(text.split())
        counts: list[tuple[int, int]] = []
        for words in _FIT_POINTS:
            short = _long_text(secret, fillers, words)
            answer = await asker.ask(f"{words} filler words, for their length", short, 1)
            refusal = barred_judgement(answer)
            if refusal is not None:
                return Judgement("untested", f"a short prompt failed: {refusal.detail}")
            if answer.prompt_tokens is None:
                return Judgement("untested", "the server counts no prompt tokens")
            counts.append((words, answer.prompt_tokens))
        steps = {b[1] - a[1] - (b[0] - a[0]) for a, b in zip(counts, counts[1:], strict=False)}
        if steps == {0}:
            fit = TokenFit.through(counts[0], counts[-1])
            if fit.words_for(limit - _ANSWER_ROOM) < 1:
                return Judgement("untested", f"a limit of {limit} tokens leaves no room to fill")
            return LongPrompt(secret, fillers, fit)
    return Judgement("untested", "no filler word is one token each on this server")


def _long_text(secret: str, fillers: tuple[str, ...], words: int) -> str:
    """The same `secret` and more words: the same text, longer. Each round of words is shuffled."""
    source = random.Random(secret)
    filling: list[str] = []
    while len(filling) < words:
        filling += source.sample(fillers, len(fillers))
    return (
        f"The code word is {secret}. What follows means nothing: {' '.join(filling[:words])}\n"
        "What is the code word? Answer with that word alone."
    )


# ── toolsets / probe_greedy ───────────────────────────────────────────────────────────────────────
# Six greedy prompts, each asked twice: whether the server repeats itself byte for byte.
#
# Knows no other run; `compared_greedy` of the knowledge section sets two reports side by side.

GREEDY_PROMPTS: dict[str, str] = {
    "explanation": "Explain in a few sentences why the sky is blue during the day and red at dusk.",
    "code": "Write a Python function that tells whether a text reads the same backwards.",
    "listing": "List eight things to check before a long journey by bicycle.",
    "translation": (
        "Translate into French: The last train leaves at nine, so we should not be late tonight."
    ),
    "arithmetic": "A baker sells 17 loaves at 3 coins each and pays 12 coins for flour. How many "
    "coins are left? Show the steps.",
    "summary": (
        "Summarise in one sentence: The lighthouse was built of grey stone, stood empty for forty "
        "years, and was bought by two sisters who turned it into a small library for sailors."
    ),
}
GREEDY_TOKENS = 128
# Reports compare only where prompts and length are these.
GREEDY_SET = hashlib.sha256(json.dumps([GREEDY_PROMPTS, GREEDY_TOKENS]).encode()).hexdigest()[:16]
_GREEDY_TEXT_LIMIT = 1700


async def probe_greedy(asker: ProbeAsker) -> Judgement:
    """Ask all six, then all six again; the answers are left in the asker's `greedy`."""
    first: dict[str, ProbeAnswer] = {}
    for name, prompt in GREEDY_PROMPTS.items():
        answer = await asker.ask(f"{name}, first time", prompt, GREEDY_TOKENS)
        refusal = barred_judgement(answer)
        if refusal is not None:
            return refusal
        first[name] = answer
    for name, prompt in GREEDY_PROMPTS.items():
        again = await asker.ask(f"{name}, second time", prompt, GREEDY_TOKENS)
        refusal = barred_judgement(again)
        if refusal is not None:
            return refusal
        asker.greedy.append(greedy_text(name, first[name], again))
    return judged_greedy(asker.greedy)


def greedy_text(name: str, answer: ProbeAnswer, again: ProbeAnswer) -> GreedyText:
    """The record of one prompt's two answers; the first one is kept."""
    data = _greedy_bytes(answer)
    return GreedyText(
        prompt=name,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        text=clean(f"{answer.reasoning}{answer.content}", _GREEDY_TEXT_LIMIT),
        finish_reason=answer.finish_reason[:120],
        repeats=data == _greedy_bytes(again),
    )


def judged_greedy(texts: list[GreedyText]) -> Judgement:
    """The verdict on six prompts. An empty answer repeats itself too, and shows nothing."""
    # One byte is the zero between reasoning and content.
    empty = [text.prompt for text in texts if text.size <= 1]
    if empty:
        return Judgement("fail", f"no text to compare for {', '.join(empty)}")
    changed = [text.prompt for text in texts if not text.repeats]
    if changed:
        return Judgement(
            "fail",
            f"{len(texts) - len(changed)} of {len(texts)} repeated byte for byte at temperature 0; "
            f"not {', '.join(changed)}",
        )
    return Judgement("pass", f"{len(texts)} of {len(texts)} repeated byte for byte")


def _greedy_bytes(answer: ProbeAnswer) -> bytes:
    return f"{answer.reasoning}\0{answer.content}".encode("utf-8", "surrogatepass")


# ── toolsets / probe_schema ───────────────────────────────────────────────────────────────────────
# Whether a JSON schema is enforced by a grammar, merely obeyed, or dropped without a word.
#
# The deciding request asks for prose and wants one of a few random words by schema: only a grammar
# gives that. Where it fails, a request that any willing model can follow tells obeyed from dropped.

_PROSE_PROMPT = "Write one short English sentence about the sea, in plain prose: no JSON, no code."
_JSON_PROMPT = (
    "What is the capital of France, and on which river does it lie? Answer with one JSON object "
    'and nothing else, of exactly the keys "city" and "river", both texts.'
)
_PLAIN_TOKENS = 96
_THINKING_TOKENS = 640  # thoughts come out of the same budget


def _json_format(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


async def probe_schema(asker: ProbeAsker, thinking: bool) -> Judgement:
    """Ask with the thinking switch on or off. A server without the switch is asked once more
    without it, so that its refusal of the one is not taken for a refusal of the other."""
    words = made_up_words(3)
    form = _json_format({"code": {"type": "string", "enum": words}})
    tokens = _THINKING_TOKENS if thinking else _PLAIN_TOKENS
    switch: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answer = await asker.ask(
        "a schema that the prompt contradicts",
        _PROSE_PROMPT,
        tokens,
        response_format=form,
        **switch,
    )
    refusal, note = barred_judgement(answer), ""
    if refusal is not None and refusal.verdict == "unsupported":
        bare = await asker.ask(
            "the same without the thinking switch", _PROSE_PROMPT, tokens, response_format=form
        )
        if barred_judgement(bare) is None:
            if thinking:
                return Judgement("unsupported", f"no thinking switch: {refusal.detail}")
            answer, refusal, switch, note = (bare, None, {}, "; the server has no thinking switch")
    early = refusal or cut_off_judgement(answer)
    if early is not None:
        return early
    if fits_code_schema(answer, words):
        return await _enforced(asker, answer, switch, thinking, note)
    if answer.finish_reason == "length" and answer.content.lstrip().startswith("{"):
        begun = quoted_answer(answer.content)
        return Judgement("fail", f"JSON was begun and cut off: {begun}{note}")
    return await _not_enforced(asker, answer, tokens, switch, note)


async def _enforced(
    asker: ProbeAsker, answer: ProbeAnswer, switch: dict[str, Any], thinking: bool, note: str
) -> Judgement:
    """The answer fits. Whether the grammar did that, and whether the model thought at all."""
    plain = await asker.ask("the prompt alone, for its length", _PROSE_PROMPT, 1, **switch)
    added = prompt_growth(answer, plain)
    if added is not None and added > 0:
        return Judgement(
            "untested",
            f"it fits, but the server put the schema into the prompt as well (+{added} tokens), so "
            f"that obeying explains it too{note}",
        )
    if thinking and not answer.reasoning.strip():
        off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        still = await asker.ask("the prompt with thinking off", _PROSE_PROMPT, 1, **off)
        if prompt_growth(plain, still) in (0, None):
            return Judgement(
                "untested",
                "the schema is enforced, but nothing shows that the model thinks: no reasoning "
                "came, and the switch did not change the prompt",
            )
    return Judgement("pass", f"enforced against the prompt: {quoted_answer(answer.content)}{note}")


async def _not_enforced(
    asker: ProbeAsker, answer: ProbeAnswer, tokens: int, switch: dict[str, Any], note: str
) -> Judgement:
    """A 200 that does not fit. Whether the model obeys when the prompt asks for the JSON."""
    form = _json_format({"city": {"type": "string"}, "river": {"type": "string"}})
    willing = await asker.ask(
        "a schema that the prompt asks for", _JSON_PROMPT, tokens, response_format=form, **switch
    )
    found = json_object(willing.content)
    fits = found is not None and set(found) == {"city", "river"}
    fits = fits and all(isinstance(value, str) for value in (found or {}).values())
    how = (
        "merely obeyed where the prompt asks for the JSON"
        if fits
        else "dropped: not even the JSON that the prompt asks for came out"
    )
    return Judgement(
        "silent",
        f"not enforced, {how}; against the prompt came {quoted_answer(answer.content)!r}{note}",
    )


def fits_code_schema(answer: ProbeAnswer, words: list[str]) -> bool:
    """Whether the content is the wanted object and no word beside it."""
    found = json_object(answer.content)
    return found is not None and set(found) == {"code"} and found["code"] in words


# ── toolsets / probe_tool_calls ───────────────────────────────────────────────────────────────────
# The five tool-calling scenarios as data, and how an answer to one is judged.
#
# An answer without a call says nothing unless the tools are known to have reached the model: a
# server
# that drops them answers the scenarios that need no call quite well.

_TOOL_TOKENS = 256
_ASKS_BACK = re.compile(
    r"\?|\b(?:which|what|where|please|provide|specify|tell me|let me know|need to know)\b", re.I
)
# How calls look that a parser should have taken out of the text, in several models' spelling.
_CALL_MARKUP = re.compile(r"<\|?tool_call|\[TOOL_CALLS\]|<function=|```tool_code")


def _city_tool(name: str, description: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city."}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_WEATHER_TOOL = _city_tool("get_weather", "The weather in a city at this moment.")
_TIME_TOOL = _city_tool("get_local_time", "The time of day in a city at this moment.")


@dataclass(frozen=True)
class ToolScenario:
    """A question, the tools offered, and the calls that are right as (tool, city in it).

    No right call: the model must answer by itself, or, where `asks_back`, ask for what is missing.
    """

    case: str
    question: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[tuple[str, str], ...] = ()
    asks_back: bool = False

    @property
    def title(self) -> str:
        return PROBE_BY_NAME[self.case].title


TOOL_SCENARIOS = (
    ToolScenario(
        "tool_one_call",
        "What is the weather in Oslo right now?",
        (_WEATHER_TOOL,),
        (("get_weather", "oslo"),),
    ),
    ToolScenario(
        "tool_right_of_two",
        "What time is it in Tokyo right now?",
        (_WEATHER_TOOL, _TIME_TOOL),
        (("get_local_time", "tokyo"),),
    ),
    ToolScenario(
        "tool_none_needed",
        "How much is 6 times 7? Answer with the number.",
        (_WEATHER_TOOL, _TIME_TOOL),
    ),
    ToolScenario(
        "tool_two_parallel",
        "What is the weather in Oslo and in Lima right now? Look both up at once.",
        (_WEATHER_TOOL, _TIME_TOOL),
        (("get_weather", "lima"), ("get_weather", "oslo")),
    ),
    ToolScenario(
        "tool_missing_argument",
        "What is the weather like right now?",
        (_WEATHER_TOOL,),
        asks_back=True,
    ),
)


async def probe_tool_scenario(asker: ProbeAsker, scenario: ToolScenario) -> Judgement:
    """Ask one scenario; where no call comes back, ask again without tools to see what they did."""
    tools = list(scenario.tools)
    answer = await asker.ask(
        scenario.title, scenario.question, _TOOL_TOKENS, tools=tools, tool_choice="auto"
    )
    added = None
    if not answer.tool_calls and not (barred_judgement(answer) or cut_off_judgement(answer)):
        without = await asker.ask("the same without tools, for its length", scenario.question, 1)
        added = prompt_growth(answer, without)
    return judged_tool_answer(scenario, answer, added)


def judged_tool_answer(
    scenario: ToolScenario, answer: ProbeAnswer, tool_tokens: int | None
) -> Judgement:
    """The verdict on an answer. tool_tokens: prompt tokens that the tools added; None: unknown."""
    early = barred_judgement(answer) or cut_off_judgement(answer)
    if early is not None:
        return early
    if answer.tool_calls:
        return _judged_calls(scenario, answer)
    if _call_in_text(scenario, answer.content):
        return Judgement(
            "silent", f"the call stands in the text, unparsed: {quoted_answer(answer.content)}"
        )
    if tool_tokens is not None and tool_tokens <= 0:
        return Judgement(
            "silent",
            "the prompt has as many tokens without the tools: they never reached the model, which "
            f"answered {quoted_answer(answer.content)!r}",
        )
    if scenario.calls:
        return Judgement("fail", f"no call; it answered {quoted_answer(answer.content)!r}")
    if tool_tokens is None:
        return Judgement(
            "untested",
            "the server counts no prompt tokens, so a model that needs no tool looks like a server "
            "that drops them",
        )
    if not answer.content.strip():
        return Judgement("fail", f"neither a call nor a word ({answer.finish_reason})")
    if scenario.asks_back and not _ASKS_BACK.search(answer.content):
        return Judgement("fail", f"it did not ask for the city: {quoted_answer(answer.content)!r}")
    how = "asked back" if scenario.asks_back else "answered by itself"
    return Judgement("pass", f"no call, it {how}: {quoted_answer(answer.content)!r}")


def _judged_calls(scenario: ToolScenario, answer: ProbeAnswer) -> Judgement:
    """The verdict on an answer that holds calls."""
    offered = {tool["function"]["name"] for tool in scenario.tools}
    made: list[tuple[str, str]] = []
    for call in answer.tool_calls:
        name, city, fault = _read_call(call, offered)
        if fault:
            return Judgement(
                "fail", f"a malformed call, {fault}: {quoted_answer(json.dumps(call))}"
            )
        made.append((name, city))
    shown = ", ".join(f"{name}(city={city!r})" for name, city in made)
    if not scenario.calls:
        why = "invented what it should have asked for" if scenario.asks_back else "needed no tool"
        return Judgement("fail", f"it {why}, and called {shown}")
    left = list(made)
    for name, wanted in scenario.calls:
        fitting = [c for c in left if c[0] == name and wanted in c[1].casefold()]
        if not fitting:
            return Judgement("fail", f"{name} for {wanted.title()} is missing; it called {shown}")
        left.remove(fitting[0])
    if left:
        return Judgement("fail", f"{len(left)} calls too many: {shown}")
    beside = "" if answer.finish_reason == "tool_calls" else f" ({answer.finish_reason!r} at end)"
    return Judgement("pass", f"it called {shown}{beside}")


def _read_call(call: Any, offered: set[str]) -> tuple[str, str, str]:
    """(tool, city, what is wrong with the call); a client needs every one of these fields."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", "", "no function in it"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in offered:
        return "", "", "of a tool that was not offered"
    if not isinstance(call.get("id"), str) or not call["id"]:
        return "", "", "without an id"
    if not isinstance(arguments, str):
        return "", "", "whose arguments are no JSON text"
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return "", "", "whose arguments are no JSON"
    if not isinstance(values, dict) or set(values) != {"city"}:
        return "", "", "whose arguments do not fit its schema"
    if not isinstance(values["city"], str):
        return "", "", "whose city is no text"
    return name, values["city"], ""


def _call_in_text(scenario: ToolScenario, content: str) -> bool:
    """Whether the text holds a call that nobody parsed."""
    if _CALL_MARKUP.search(content):
        return True
    names = "|".join(re.escape(tool["function"]["name"]) for tool in scenario.tools)
    return bool(re.search(rf'(?:{names})\s*\(|"name"\s*:\s*"(?:{names})"', content))


# ── toolsets / probe_vision ───────────────────────────────────────────────────────────────────────
# Whether the model sees: two halves of random colours, drawn here, sent as a data URI.
#
# One right answer in thirty is luck. A wrong one is told from a dropped picture by the prompt's
# length, which a picture that was looked at has raised.

PROBE_COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 20, 30),
    "green": (20, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (250, 220, 30),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
_PICTURE_SIDE = 96  # pixels; two patches of the coarsest encoder
_PICTURE_TOKENS = 256
_PICTURE_PROMPT = (
    "The picture has an upper and a lower half, each of one plain colour. Name the two colours, "
    "the upper one first. Answer with two words out of: red, green, blue, yellow, black, white."
)


async def probe_picture(asker: ProbeAsker) -> Judgement:
    """Show one picture; a first 422 is tried once more, as an image processor that warms up."""
    if asker.facts.vision is False:
        return Judgement("untested", f"the model claims no vision ({asker.facts.vision_source})")
    upper, lower = secrets.SystemRandom().sample(sorted(PROBE_COLOURS), 2)
    address = "data:image/png;base64," + base64.b64encode(two_halves_png(upper, lower)).decode()
    text = {"type": "text", "text": _PICTURE_PROMPT}
    picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": address}}
    content: list[dict[str, Any]] = [picture, text]
    answer = await asker.ask(f"{upper} above {lower}", content, _PICTURE_TOKENS)
    note = ""
    if answer.status == 422:
        answer = await asker.ask("the same once more after a 422", content, _PICTURE_TOKENS)
        note = "; the first request was refused with 422"
    added = None
    if barred_judgement(answer) is None and not shows_colours(answer.content, upper, lower):
        blind: list[dict[str, Any]] = [text]
        added = prompt_growth(
            answer, await asker.ask("without the picture, for its length", blind, 1)
        )
    judged = judged_picture_answer(answer, upper, lower, added)
    return Judgement(judged.verdict, judged.detail + note)


def judged_picture_answer(
    answer: ProbeAnswer, upper: str, lower: str, picture_tokens: int | None
) -> Judgement:
    """The verdict. picture_tokens: prompt tokens that the picture added; None: unknown."""
    early = barred_judgement(answer)
    if early is not None:
        return early
    if shows_colours(answer.content, upper, lower):
        return Judgement(
            "pass", f"{upper} above {lower} was seen: {quoted_answer(answer.content)!r}"
        )
    said = quoted_answer(answer.content)
    if picture_tokens is not None and picture_tokens <= 0:
        return Judgement(
            "silent",
            "the prompt has as many tokens without the picture: it never reached the model, which "
            f"answered {said!r}",
        )
    return cut_off_judgement(answer) or Judgement(
        "fail", f"{upper} above {lower} was described as {said!r}"
    )


def shows_colours(text: str, upper: str, lower: str) -> bool:
    """Whether the first two colours named are the right ones, in order."""
    named = re.findall(rf"\b(?:{'|'.join(PROBE_COLOURS)})\b", text.casefold())
    return named[:2] == [upper, lower]


def two_halves_png(upper: str, lower: str) -> bytes:
    """A square PNG of 8-bit RGB, its halves in two of PROBE_COLOURS."""
    half = _PICTURE_SIDE // 2
    rows = [b"\0" + bytes(PROBE_COLOURS[c]) * _PICTURE_SIDE for c in (upper, lower)]
    header = struct.pack(">IIBBBBB", _PICTURE_SIDE, _PICTURE_SIDE, 8, 2, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"IDAT", zlib.compress(rows[0] * half + rows[1] * half, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


# ── toolsets / probe_run ──────────────────────────────────────────────────────────────────────────
# Carries out a plan of probes in probe.py's process: case after case, each told as it happens.
#
# Reads a plan, appends events to a file, and ends when its parent is gone. Knows no rig, no report
# and no folder but the one that it was given.

# Every case by name. None of them raises over what a server answers.
PROBE_RUNS: dict[str, Callable[[ProbeAsker], Awaitable[Judgement]]] = {
    **{s.case: partial(probe_tool_scenario, scenario=s) for s in TOOL_SCENARIOS},
    "schema_thinking_off": partial(probe_schema, thinking=False),
    "schema_thinking_on": partial(probe_schema, thinking=True),
    "vision_picture": probe_picture,
    "greedy_repeats": probe_greedy,
    "context_at_limit": partial(probe_context_limit, above=False),
    "context_above_limit": partial(probe_context_limit, above=True),
}
_PARENT_SEEN_EVERY_S = 1.0


class ProbeRun:
    """One plan under way; `tell` gets each event as it happens."""

    def __init__(self, plan: ProbePlan, tell: Callable[[ProbeEvent], None]) -> None:
        key = os.environ.get(plan.api_key_variable, "") if plan.api_key_variable else ""
        client = ProbeClient(plan.base_url, key)
        self._plan, self._tell = plan, tell
        self._asker = ProbeAsker(client, plan.model, plan.timeout_s, plan.facts)
        self._asker.tell = lambda what: self._say("asking", what=what)
        self._asker.keep = self._kept
        self._begun: float | None = None
        self._case = ""
        self._greedy_told = 0

    async def run(self) -> None:
        """Ask a plain question, then every case of the plan."""
        plain = barred_judgement(await self._asker.ask("a plain question", "Say hello.", 8))
        if plain is not None:
            self._say("barred", detail=plain.detail)
            return
        self._begun = time.monotonic()
        for case in self._plan.cases:
            self._case, self._asker.exchanges, begun = case, [], time.monotonic()
            self._say("begun")
            judged = await PROBE_RUNS[case](self._asker)
            self._say(
                "judged",
                verdict=judged.verdict,
                detail=judged.detail[:1900],
                seconds=round(time.monotonic() - begun, 3),
            )
        self._case = ""
        self._say("end")

    def _kept(self, exchange: ProbeExchange) -> None:
        self._say("answered", exchange=exchange)

    def _say(self, event: ProbeEventKind, **fields: Any) -> None:
        texts = self._asker.greedy[self._greedy_told :]
        self._greedy_told += len(texts)
        if texts:
            fields |= {"greedy": texts, "greedy_set": GREEDY_SET}
        at = 0.0 if self._begun is None else round(time.monotonic() - self._begun, 3)
        self._tell(ProbeEvent(event=event, at_s=at, case=self._case, **fields))


async def _while_parent_lives(work: Coroutine[Any, Any, None], parent: int) -> None:
    """Run `work` until it ends, or until nobody is left to read what it tells."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if os.getppid() != parent:
            task.cancel()
            await asyncio.wait({task})
            raise RigError("CANCELLED", "the process that asked for the probes is gone")
        await asyncio.wait({task}, timeout=_PARENT_SEEN_EVERY_S)
    await task


def run_probe_folder(folder: Path) -> int:
    """Carry out the plan in `folder`, append events beside it; returns 0 when all was asked.

    Raises RigError INVALID for a plan that is none or names a case that is none.
    """
    try:
        plan = ProbePlan.model_validate_json((folder / PROBE_PLAN_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise RigError("INVALID", f"{folder} holds no plan: {type(error).__name__}") from None
    if unknown := [case for case in plan.cases if case not in PROBE_RUNS]:
        raise RigError("INVALID", f"there is no probe {unknown[0][:60]}")
    with (folder / PROBE_EVENTS_FILE).open("a", buffering=1, encoding="utf-8") as file:

        def tell(event: ProbeEvent) -> None:
            file.write(event.model_dump_json(exclude_defaults=True) + "\n")

        run = ProbeRun(plan, tell).run()
        asyncio.run(_while_parent_lives(run, plan.parent_pid or os.getppid()))
    return 0


# ── programs / probe ──────────────────────────────────────────────────────────────────────────────


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="probe.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where plan.json lies")
    arguments = parser.parse_args(argv)
    try:
        return run_probe_folder(arguments.folder)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
