"""tpu-vllm-imaginary-2b: a rig of a cloud that does not exist, from the parts of those that do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from forge.parts.assembly.command_line import run_rig
from forge.parts.assembly.rig import Rig
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.toolsets.capacity import CapacityToolset
from forge.parts.toolsets.metrics import MetricsToolset
from forge.parts.toolsets.model import ModelToolset
from forge.parts.toolsets.serving import ServingToolset
from forge.parts.toolsets.work import JobsToolset
from tests.imaginary.plane import ImaginaryPlane, ImaginarySettings
from tests.imaginary.runtime import ImaginaryVllm, ImaginaryVllmSettings


class ImaginaryRigSettings(ImaginarySettings, ImaginaryVllmSettings):
    """Every key that this rig's tpu.env may hold."""


def imaginary_runtime(load: Callable[[], RigSettings], paths: RigPaths) -> ImaginaryVllm:
    """The runtime over this rig's own settings."""

    def settings() -> ImaginaryRigSettings:
        return cast(ImaginaryRigSettings, load())

    return ImaginaryVllm(settings, lambda: settings().port)


RIG = Rig(
    name="tpu-vllm-imaginary-2b",
    about="Serves Gemma 4 E2B with vLLM on a rented TPU machine that is billed by the hour.",
    order=(
        "Usual order: find_tpu, create_tpu, serve_model, wait_for_vllm_ready, query_gemma4, "
        "plan_destroy, destroy_tpu."
    ),
    settings=ImaginaryRigSettings,
    plane_words={},
    make_plane=ImaginaryPlane,
    make_runtime=imaginary_runtime,
    toolsets=(CapacityToolset, ServingToolset, ModelToolset, MetricsToolset, JobsToolset),
)


if __name__ == "__main__":
    sys.exit(run_rig(RIG, Path(__file__)))
