"""Planning for a rig whose JAX engine may unpack its weights when it loads them."""

from __future__ import annotations

import dataclasses
from typing import Any

from forge.parts.toolsets.planning import PlanDefaults, PlanningToolset, plan_defaults


class JaxPlanningToolset(PlanningToolset):
    """Plan. Weights that are unpacked at load take what bfloat16 takes."""

    def rig_defaults(self) -> PlanDefaults:
        settings: Any = self.context.settings
        own = plan_defaults(self.context)
        return dataclasses.replace(own, encoding="bf16") if settings.unpack == "load" else own
