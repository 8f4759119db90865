"""Which collectives the TPU's compiler puts into the engine's programs for four v5e chips.

    python3 -m tests.real.tpu_collectives FOLDER

FOLDER has a config.json; libtpu has to be found. Prints a line of JSON, collectives by program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import jax.numpy as jnp
    from jax.experimental import topologies

    from forge.engines.gemma4.config_reader import read_config
    from forge.engines.jax.compiled import lowered_program
    from forge.engines.jax.mesh import DeviceGroup
    from forge.engines.jax.steps import engine_programs
    from tests.engines.many_devices import collectives_of

    four = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=[2, 2, 1]
    )
    config = read_config(Path(sys.argv[1]))
    group = DeviceGroup(config, four.devices)
    programs = engine_programs(
        config, slots=4, context=1024, dtype=jnp.dtype(jnp.bfloat16), chunk=16, steps=4
    )
    told = {
        program.name: collectives_of(lowered_program(program, group).compile().as_text())
        for program in programs
        if program.name in ("prefill of 16", "decode of 4")
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
