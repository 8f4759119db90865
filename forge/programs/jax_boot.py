#!/usr/bin/env python3
"""Boots a TPU machine that serves one Gemma 4 with the JAX engine, and ends it when nobody uses it.

    jax_boot.py           at each start of the machine, by its start-up agent, as root
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    over ssh, with this file as the input. ACT: boot_log status logs start
                          stop restart deploy rollback verify. DATA: a JSON object in URL-safe
                          base64. `deploy` finds what it deploys in GEMMA4_DELIVERY beside this text

What differs between machines, and the engine itself, come from the metadata server; nothing is
filled into this text. Steps are marked on the console, and one that fails says why. Python 3.10, no
package, no shell. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

from __future__ import annotations

import sys

from forge.machine.acts import main
from forge.machine.google import Google, metadata
from forge.machine.jax import JAX_FIRST, JaxServing
from forge.machine.machine import Machine

if __name__ == "__main__":
    cloud = Google()
    engine = JaxServing(
        cloud,
        lambda: metadata("attributes/gemma4-engine"),
        str(globals().get("GEMMA4_DELIVERY", "")),
    )
    sys.exit(main(sys.argv[1:], Machine(cloud, engine, first=JAX_FIRST)))
