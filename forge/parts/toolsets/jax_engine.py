"""The tools about the JAX engine on a rented TPU machine: another release of it, and its chip.

Knows the plane, the runtime and the machine's fixed program by their verbs alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, cast

from pydantic import Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.results import Outcome
from forge.parts.toolsets.rental_book import utc_stamp
from forge.parts.toolsets.starts import refuse_planned
from forge.parts.toolsets.toolset import Toolset, rig_tool

_DELIVER_S = 50.0  # a few hundred kB through ssh, and the stop of what serves
_DEVICE_S = 55.0  # JAX's own start on a TPU is most of it
# bf16 TFLOP/s by JAX's name of a chip. The same figure, with its source: HARDWARE.md.
_PEAK_TFLOPS = {"TPU v5 lite": 197.0}


class DeployedOutcome(Outcome):
    """The engine's release that the machine has been told to serve."""

    rollback: bool
    sha256: str = Field(description="Of the jax_server.py that was sent; empty for a rollback.")
    said: str = Field(description="The machine's own words.")


class DeviceOutcome(Outcome):
    """The chip as JAX sees it there, and how fast it multiplies."""

    fits: bool = Field(description="JAX sees a TPU, and its product was right.")
    kind: str
    count: int
    memory_gib: float
    tflops: float = Field(description="bf16, the best of five times ten products.")
    share_of_peak: float | None = Field(description="Of the chip's own bf16; null: not known.")
    matrix: int = Field(description="Rows and columns of what was multiplied.")
    jax: str
    libtpu: str
    measured_at: str = Field(description="UTC.")
    serving: bool = Field(description="The engine holds the chip: this is from before its start.")


class EngineRuntime(Protocol):
    """The verb of a runtime that a machine gets its engine from."""

    def release(self) -> dict[str, Any]: ...


class EnginePlane(Protocol):
    """The verbs of a plane that brings an engine to its machine."""

    async def deliver(self, release: Mapping[str, Any], timeout_s: float) -> str: ...
    async def act_on_host(
        self, act: str, timeout_s: float, **arguments: str | int | bool
    ) -> str: ...
    def mark_unready(self, note: str = "") -> None: ...


class JaxEngineToolset(Toolset):
    """Bring an engine, look at the chip."""

    toolset_name = "engine"

    @property
    def _plane(self) -> EnginePlane:
        return cast(EnginePlane, self.context.plane)

    @rig_tool(title="Bring the engine to the machine", effect="destroys")
    async def deploy_jax_server(
        self,
        rollback: Annotated[
            bool, Field(description="Go back to the release before; nothing is sent.")
        ] = False,
    ) -> DeployedOutcome:
        """Send this rig's own jax_server.py, its pinned packages and the settings of tpu.env to
        {place} and have them served: answers under way are broken off, weights and packages that
        are there stay. A new machine has them from its boot, so this is for a changed file or
        setting. What serves already by hash is left alone. The release before is kept for
        rollback. Takes 10 to 50 seconds; then wait_for_{ready}_ready."""
        if rollback:
            self._plane.mark_unready()
            return self._told(await self._plane.act_on_host("rollback", _DELIVER_S), "")
        model = str(getattr(self.context.settings, "model_name", ""))
        await refuse_planned(self.context, model, False)
        release = cast(EngineRuntime, self.context.runtime).release()
        self._plane.mark_unready()
        said = await self._plane.deliver(release, _DELIVER_S)
        return self._told(said, str(release["sha256"]))

    def _told(self, said: str, sha256: str) -> DeployedOutcome:
        words = said.strip()[-300:]
        self.context.journal.append("engine deployed", sha256=sha256, said=words)
        return DeployedOutcome(
            summary=f"{words[:1].upper()}{words[1:]}.",
            next_step=f"wait_for_{self.context.vocabulary['ready']}_ready(wait_s=50)",
            rollback=not sha256,
            sha256=sha256,
            said=words,
        )

    @rig_tool(title="Does JAX see the TPU", effect="reads")
    async def verify_jax_tpu(self) -> DeviceOutcome:
        """The chip of {place} as JAX sees it, its memory, and the rate of a bf16 matrix product
        beside the chip's own. A serving engine holds the chip: then this tells what the boot
        measured before it started. Takes 5 to 50 seconds, changes and costs nothing."""
        text = await self._plane.act_on_host("verify", _DEVICE_S)
        return self._judged(device_facts(text))

    def _judged(self, told: Mapping[str, Any]) -> DeviceOutcome:
        kind, tflops = str(told["kind"]), float(told["tflops"])
        peak, ready = _PEAK_TFLOPS.get(kind), self.context.vocabulary["ready"]
        fits = told["platform"] == "tpu" and told["right"] is True
        share = round(tflops / peak, 3) if peak else None
        of_peak = f", {share:.0%} of the chip's {peak:g}" if share is not None else ""
        when = " (measured before the engine took the chip)" if told["serving"] else ""
        manage = f"manage_{self.context.vocabulary['docker']}(action='start')"
        return DeviceOutcome(
            summary=f"JAX {told['jax']} sees {told['count']} x {kind} with "
            f"{told['memory_bytes'] / 2**30:.2f} GiB: {tflops:g} TFLOP/s in bf16{of_peak}{when}.",
            next_step=f"wait_for_{ready}_ready(wait_s=50)" if told["serving"] else manage,
            fits=fits,
            kind=kind,
            count=int(told["count"]),
            memory_gib=round(told["memory_bytes"] / 2**30, 2),
            tflops=tflops,
            share_of_peak=share,
            matrix=int(told["matrix"]),
            jax=str(told["jax"]),
            libtpu=str(told["libtpu"]),
            measured_at=utc_stamp(told["at"]),
            serving=bool(told["serving"]),
        )


def device_facts(text: str) -> dict[str, Any]:
    """What the machine told of its chip. Raises RigError UNKNOWN for what cannot be read, BUSY
    where an engine serves that started before anything was measured."""
    numbers = {"count", "memory_bytes", "matrix", "tflops", "at"}
    try:
        told = dict(json.loads(text.strip().splitlines()[-1]))
        if set(told) == {"serving"}:
            why = "the engine holds the chip, and nothing was measured before it started"
            raise RigError("BUSY", why, "manage_jax_server(action='stop'), then ask again")
        for key in numbers:
            told[key] = float(told[key])
        for key in ("platform", "kind", "jax", "libtpu", "right", "serving"):
            told[key]
    except (ValueError, IndexError, TypeError, KeyError):
        what = f"the machine's answer cannot be read: {text[-300:]}"
        raise RigError("UNKNOWN", what, "call it again") from None
    return told | {"count": int(told["count"])}
