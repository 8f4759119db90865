"""The chip as JAX sees it from an environment of its own: what it is, and how fast it multiplies.

A process that serves holds the chip, so this is done before it starts, and what was seen is kept.
Knows no cloud and no service.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from forge.machine.console import HOME, Failure, clean, run

DEVICE = HOME / "device.json"  # what was seen last, and when
# A product of bf16 matrices, ten in a row, the best of five times: 2 n^3 floating-point operations
# each. The values stay 1, whatever the rounding. JAX must find a TPU: it is told to, or it would
# go on with the processor.
PROBE_PROGRAM = """
import json, os, time
from importlib.metadata import PackageNotFoundError, version
os.environ.setdefault("JAX_PLATFORMS", "tpu")
import jax
import jax.numpy as jnp
devices = jax.devices()
first = devices[0]
size = 8192 if first.platform == "tpu" else 256
left = jnp.ones((size, size), jnp.bfloat16)
right = jnp.full((size, size), 1 / size, jnp.bfloat16)
def ten(x, y):
    for _ in range(10):
        x = x @ y
    return x
multiply = jax.jit(ten)
multiply(left, right).block_until_ready()
best = float("inf")
for _ in range(5):
    begun = time.perf_counter()
    last = multiply(left, right).block_until_ready()
    best = min(best, time.perf_counter() - begun)
told = {
    "platform": first.platform, "kind": first.device_kind, "count": len(devices),
    "memory_bytes": int((first.memory_stats() or {}).get("bytes_limit", 0)),
    "matrix": size, "tflops": round(20 * size**3 / best / 1e12, 3),
    "right": bool((last == 1).all()), "jax": jax.__version__,
}
try:
    told["libtpu"] = version("libtpu")
except PackageNotFoundError:
    told["libtpu"] = ""
print(json.dumps(told))
"""


def see_device(python: Path) -> dict[str, Any]:
    """What the probe tells, kept with its time. Raises Failure where JAX finds no TPU, or one that
    reckons wrong."""
    said = run(str(python), "-c", PROBE_PROGRAM, minutes=5).splitlines()
    try:
        told = dict(json.loads(said[-1]))
    except (ValueError, IndexError, TypeError):
        raise Failure(f"the probe's answer cannot be read: {clean(' '.join(said), 200)}") from None
    if told.get("platform") != "tpu":
        raise Failure(f"JAX sees {clean(str(told.get('kind')), 60)} and no TPU")
    if told.get("right") is not True:
        raise Failure("the chip's matrix product is wrong: take another machine")
    told["at"] = int(time.time())
    DEVICE.write_text(json.dumps(told))
    return told


def device_words(told: dict[str, Any]) -> str:
    memory = told["memory_bytes"] / 2**30
    return f"{told['count']} x {told['kind']}, {memory:.2f} GiB, {told['tflops']:g} TFLOP/s in bf16"
