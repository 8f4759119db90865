"""What the engine says on eight virtual devices: run in a process of its own, with that many CPUs.

    python3 -m tests.engines.many_devices FOLDER '[[tensor parallel, data parallel], …]'

Prints a line of JSON: for one device and for each of these what it answers to some prompts, alone
and in company, what lies on each device, and which collectives are in the programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# Machine code that is not optimised is compiled in half the time; the programs are the same.
EIGHT = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
CONTEXT, CHUNK, COUNT = 48, 16, 9
LENGTHS = (1, 7, 17, 30)  # of prompts: within a window of 8 and a chunk, and beyond
_COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-\w+|reduce-scatter)"
    r"(-start)?\("
)


def asked_on_eight(folder: Path, ways: Sequence[tuple[int, int]], slots: int = 1) -> list[Any]:
    """`told_of` each of `ways`, one device first, by a child process."""
    environment = {**os.environ, "XLA_FLAGS": EIGHT, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.engines.many_devices", str(folder), str(slots)]
    command.append(json.dumps(ways))
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise AssertionError(ended.stderr[-3000:])
    told: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def told_of(folder: Path, tensor: int, data: int, slots: int) -> dict[str, Any]:
    """An engine on so many devices: its answers, its bytes, its collectives."""
    from forge.engines.jax.engine import JaxEngine
    from forge.engines.jax.parallel import engine_on_devices
    from tests.engines.jax_compare import GREEDY, answer, read
    from tests.engines.tiny import some_prompt

    engine = engine_on_devices(
        folder, tensor, data, slots=slots, context=CONTEXT, dtype="f32", chunk=CHUNK, steps=2
    )
    engine.load(lambda share, doing: None)
    prompts = [some_prompt(length, seed=length) for length in LENGTHS]
    alone = [answer(engine, prompt, COUNT) for prompt in prompts]
    taken = range(min(len(prompts), engine.limits.slots))
    together = [[read(engine, slot, prompts[slot], GREEDY)] for slot in taken]
    while len(together[0]) < COUNT:
        for slot, more in engine.decode(list(taken), 2).items():
            together[slot] += more
    for slot in taken:
        engine.end(slot)
    engine.begin(0, prompts[0], GREEDY)
    masked = [engine.prefill(0, (1 << 7).to_bytes(64, "little"))]
    masked += engine.decode([0], 2, {0: (1 << 9).to_bytes(64, "little")})[0]
    engine.end(0)
    replicas: Any = [engine] if isinstance(engine, JaxEngine) else vars(engine)["_replicas"]
    return {
        "alone": [[(step.token, step.top) for step in told] for told in alone],
        "together": [[(step.token, step.top) for step in told] for told in together],
        "masked": [step.token for step in masked if step is not None],
        "counters": dict(engine.counters()),
        "weights": [_bytes_on_each(replica._params) for replica in replicas],
        "caches": [_bytes_on_each(replica._state.caches) for replica in replicas],
        "collectives": {
            name: collectives_of(program.as_text())
            for name, program in replicas[0]._programs.items()
        },
    }


def _bytes_on_each(tree: Any) -> dict[str, int]:
    """Bytes of the tree's leaves on each device that has any."""
    import jax

    held: Counter[str] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[str(shard.device.id)] += shard.data.nbytes
    return dict(held)


def collectives_of(text: str) -> list[tuple[str, list[int]]]:
    """Of each collective its kind and the shape of every result; one that is fused has several."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            for dims in re.findall(r"\w+\[([\d,]*)\]", match["results"]):
                found.append((match["kind"], [int(n) for n in dims.split(",") if n]))
    return found


def main() -> None:
    folder, slots, ways = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    told = [told_of(folder, tensor, data, slots) for tensor, data in ((1, 1), *ways)]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
