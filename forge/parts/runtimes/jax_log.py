"""What the JAX server's log says of a start: how far it is.

Knows the engine's lines and nothing of who reads them.
"""

from __future__ import annotations

import re

# One line for each step: `jax_server:  40% compiling …`.
_JAX_STEP = re.compile(r"^jax_server: +(?P<share>\d{1,3})% (?P<what>.+)$", re.M)
_JAX_STEP_SHOWN = 160  # characters


def jax_loading_step(log: str) -> str:
    """The last step that `log` tells, for people; its first line is the plane's own."""
    steps = list(_JAX_STEP.finditer(log.partition("\n")[2]))
    if not steps:
        return "importing JAX"
    return f"{steps[-1]['what'].strip()[:_JAX_STEP_SHOWN]} ({steps[-1]['share']} %)"
