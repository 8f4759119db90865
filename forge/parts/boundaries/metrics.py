"""A model server's /metrics: the Prometheus text format, read in bounds, by exact names.

A name that is not there, or whose value is no number, is absent and never 0. Knows no engine.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx2

from forge.parts.boundaries.chat_client import ChatClient
from forge.parts.ground.errors import RigError

METRICS_BYTES = 2_000_000  # of one page; what is beyond is not fetched
METRICS_SAMPLES = 20_000  # of one page
_LINE_BYTES = 8_000  # a longer line is no sample
# name{label="value",...} value [milliseconds]; a label's value escapes \\, \" and \n.
# https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
# Every quantifier is possessive: nothing is tried twice, whatever the line.
_SAMPLE = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*+)[ \t]*+"
    r'(?P<labels>\{[ \t]*+(?:[A-Za-z_]\w*+[ \t]*+=[ \t]*+"(?:[^"\\]|\\.)*+"[ \t]*+'
    r"(?:,[ \t]*+|(?=\})))*+\})?+"
    r"[ \t]*+(?P<value>[^\s{}]++)(?:[ \t]++-?\d++)?+[ \t]*+",
    re.ASCII,
)
_LABEL = re.compile(r'([A-Za-z_]\w*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"', re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class MetricsPage:
    """What a page holds: for each name its finite values, by labels as written in one order.

    `not_numbers` are names with a value that is NaN or infinite; `contradicted` those that gave one
    series two values. Such names are in `series` no longer: whoever asks for them finds nothing.
    `odd_lines` counts what is neither sample nor comment; `cut` says that the page went on.
    """

    series: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    not_numbers: frozenset[str] = frozenset()
    contradicted: frozenset[str] = frozenset()
    odd_lines: int = 0
    cut: bool = False

    def total(self, name: str) -> float | None:
        """The sum over all series of `name` (engines, models); None where there is none."""
        found = self.series.get(name)
        return math.fsum(found.values()) if found else None

    def largest(self, name: str) -> float | None:
        """The largest over all series of `name`; None where there is none."""
        return max(self.series.get(name, {}).values(), default=None)

    def why_absent(self, name: str) -> str:
        """Why `name` has no value here; empty where it has one."""
        if name in self.series:
            return ""
        if name in self.not_numbers:
            return f"{name} is no finite number"
        if name in self.contradicted:
            return f"{name} gives one series two values"
        return f"{name} is not on the page" + (", which was cut off" if self.cut else "")


def metrics_page(body: bytes) -> MetricsPage:
    """`body` as samples, of its first METRICS_BYTES. Never raises: what is no sample is counted."""
    cut = len(body) > METRICS_BYTES
    lines = body[:METRICS_BYTES].split(b"\n")
    if cut:
        lines.pop()  # half a line may be another number
    series: dict[str, dict[str, float]] = {}
    not_numbers: set[str] = set()
    contradicted: set[str] = set()
    odd = taken = 0
    for raw in lines:
        line = raw.strip()
        if not line or line.startswith(b"#"):
            continue
        whole = len(line) <= _LINE_BYTES
        found = _SAMPLE.fullmatch(line.decode("utf-8", "replace")) if whole else None
        value = None if found is None else _value_of(found["value"])
        if found is None or value is None:
            odd += 1
            continue
        if taken == METRICS_SAMPLES:
            cut = True
            break
        taken += 1
        name, labels = found["name"], _labels_in_order(found["labels"] or "")
        if not math.isfinite(value):
            not_numbers.add(name)
        elif series.setdefault(name, {}).setdefault(labels, value) != value:
            contradicted.add(name)
    kept = {n: v for n, v in series.items() if n not in not_numbers | contradicted}
    return MetricsPage(kept, frozenset(not_numbers), frozenset(contradicted), odd, cut)


def _value_of(text: str) -> float | None:
    """A value as the format writes it; None where it is none (Python would read 1_000 and ٣)."""
    if text.lstrip("+-").lower() in ("nan", "inf", "infinity"):
        return float(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _labels_in_order(text: str) -> str:
    return ",".join(f'{name}="{value}"' for name, value in sorted(_LABEL.findall(text)))


class MetricsClient(ChatClient):
    """The client of a model server, and its /metrics."""

    async def metrics(self, timeout_s: float) -> MetricsPage:
        """The page at /metrics. RigError NOT_FOUND (the server has none), AUTH, UNREACHABLE,
        TIMEOUT after `timeout_s` seconds, or DENIED where what answers is no such page."""
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                async with http.stream("GET", "/metrics") as response:
                    status, body = response.status_code, bytearray()
                    # Raw: a compressed page could unfold to any size before it is measured.
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > METRICS_BYTES:
                            break
        except (TimeoutError, httpx2.TimeoutException):
            raise RigError("TIMEOUT", f"/metrics did not answer in {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise RigError(
                "UNREACHABLE", f"/metrics does not answer: {type(error).__name__}"
            ) from None
        if status == 404:
            raise RigError("NOT_FOUND", "the model server has no /metrics (404)")
        if status in (401, 403):
            raise RigError("AUTH", f"the model server refused the key for /metrics ({status})")
        if status != 200:
            raise RigError("UNREACHABLE", f"/metrics answered {status}")
        page = await asyncio.to_thread(metrics_page, bytes(body))
        if body.strip() and not page.series and page.odd_lines:
            raise RigError("DENIED", "/metrics did not answer in the Prometheus text format")
        return page
