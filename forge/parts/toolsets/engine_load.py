"""What the model server is doing now: requests, cache and token counters, from its /metrics.

The names are the runtime's own. A figure that the engine does not give is null, never 0.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from forge.parts.boundaries.metrics import MetricsClient, MetricsPage
from forge.parts.ground.errors import RigError
from forge.parts.runtimes.runtime import MetricUse
from forge.parts.toolsets.toolset import RigContext

_COUNTED: tuple[MetricUse, ...] = (
    "running",
    "waiting",
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
_SHARE: MetricUse = "kv_used_share"


class EngineLoad(BaseModel):
    """The engine's own figures; over several engines counts are added up. null: not known, and
    `missing` says why."""

    running: int | None = Field(default=None, description="Requests that are being answered.")
    waiting: int | None = Field(default=None, description="Requests that wait for room.")
    kv_used_share: float | None = Field(
        default=None, description="Part of the KV cache in use, 0 to 1; of several the fullest."
    )
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = Field(default=None, description="Since the engine started.")
    generation_tokens_total: int | None = None
    missing: list[str] = Field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The known figures in words; empty where none is known."""
        words = {
            "{} running": self.running,
            "{} waiting": self.waiting,
            "{:.0%} of the KV cache used": self.kv_used_share,
            "{} prompt tokens": self.prompt_tokens_total,
            "{} generated": self.generation_tokens_total,
            "{} preemptions": self.preemptions_total,
        }
        return ", ".join(form.format(value) for form, value in words.items() if value is not None)


async def metrics_of(context: RigContext, address: str, timeout_s: float) -> MetricsPage:
    """The /metrics of this rig's model server at `address`.

    Raises RigError NOT_FOUND where its engine has none, else as `MetricsClient.metrics` does.
    """
    if not context.runtime.metric_names:
        raise RigError("NOT_FOUND", f"{context.vocabulary['engine']} has no /metrics")
    return await MetricsClient(address, context.runtime.api_key()).metrics(timeout_s)


def load_of(context: RigContext, page: MetricsPage) -> EngineLoad:
    """The figures of `page` that this rig's runtime names."""
    names = context.runtime.metric_names
    missing = [why for use in names if (why := page.why_absent(names[use]))]
    unnamed = [use for use in (*_COUNTED, _SHARE) if use not in names]
    if unnamed:
        missing.append(f"{context.vocabulary['engine']} does not tell {', '.join(unnamed)}")
    share = page.largest(names.get(_SHARE, ""))
    if share is not None and not 0 <= share <= 1:
        missing.append(f"{names[_SHARE]} is no share: {share:g}")
        share = None
    counted = {use: page.total(names[use]) for use in _COUNTED if use in names}
    return EngineLoad(
        **{use: None if value is None else round(value) for use, value in counted.items()},
        kv_used_share=None if share is None else round(share, 4),
        missing=missing,
    )
