"""What load is to be put on a server: a plan of cells, as a file that survives its reader.

Knows nothing about how it is done.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from forge.parts.knowledge.report_schema import BenchCell, GoodputLimits, cell_id_of

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
