"""The JAX engine against transformers over every size's shape, length, chunk and dtype.

What tests/engines does with one engine is done here with all of them; with every broken rule, a
window longer than a block of keys, the compile cache on disk, and the memory that loading takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forge.engines.jax.attention import KEY_BLOCK
from forge.engines.jax.engine import JaxEngine
from forge.engines.serving.slot_engine import StepToken
from tests.engines.jax_compare import (
    BF16,
    GREEDY,
    NEAR,
    answer,
    log_probabilities,
    logits_at_once,
    opened,
    read,
    worst_difference,
)
from tests.engines.jax_faults import DENSE_FAULTS, SPARSE_FAULTS, check_faults
from tests.engines.tiny import SHAPES, WINDOW, Reference, make_checkpoint, some_prompt
from tests.forge_copy import package_folders

ROOT = Path(__file__).resolve().parents[2]
ALIKE = 1e-4
LONG = KEY_BLOCK + KEY_BLOCK // 2  # a window of two blocks
SLOTS, CONTEXT, STEPS = 4, 3 * KEY_BLOCK, 4


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def loaded(folder: Path, **settings: Any) -> JaxEngine:
    given: dict[str, Any] = {"slots": 1, "context": CONTEXT, "dtype": "f32", "steps": STEPS}
    engine = JaxEngine(folder, **(given | settings))
    engine.load(lambda share, doing: None)
    return engine


class EveryShapeTest(unittest.TestCase):
    """Prompts of every edge, in one piece and in many, alone and in company."""

    def check(self, shape: str, **changes: Any) -> None:
        with scratch() as folder:
            make_checkpoint(folder, shape, **changes)
            reference = Reference(folder)
            window = changes.get("sliding_window", WINDOW)
            whole = some_prompt(CONTEXT - 1)
            want = reference.logits(whole)
            edges = {1, CONTEXT - 1}
            for edge in (window, 2 * window, 16, 64, 256, 256 + window, 2 * KEY_BLOCK):
                edges |= {edge - 1, edge, edge + 1}
            at_once = loaded(folder, slots=SLOTS, chunk=CONTEXT)
            pieces = loaded(folder, chunk=16)
            compiled = [engine.counters()["compiles_after_start"] for engine in (at_once, pieces)]
            for length in sorted(edge for edge in edges if 0 < edge < CONTEXT):
                with self.subTest(shape=shape, length=length):
                    prompt = whole[:length]
                    told = [answer(engine, prompt, 6) for engine in (at_once, pieces)]
                    self.assert_alike(*told)
                    for one in told:
                        self.assertLess(worst_difference(one[:1], want[length - 1 : length]), NEAR)
                    tokens = [step.token for step in told[0]]
                    last = reference.logits(prompt + tokens[:-1])[-len(told[0]) :]
                    self.assertLess(worst_difference(told[0], last), NEAR)
                    self.assertEqual(tokens, last.argmax(axis=-1).tolist())
            self.check_company(at_once)
            after = [engine.counters()["compiles_after_start"] for engine in (at_once, pieces)]
            self.assertEqual(after, compiled)

    def check_company(self, engine: JaxEngine) -> None:
        """Four at once nearly as alone, and to the last bit as in another order."""
        prompts = [some_prompt(length, seed=length) for length in (2, 40, 300, 500)]
        alone = [answer(engine, prompt, 41) for prompt in prompts]
        first: list[list[StepToken]] = []
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
            told = {
                slot: [read(engine, slot, prompts[who], GREEDY)] for slot, who in enumerate(order)
            }
            for _ in range(10):
                for slot, more in engine.decode(list(told), STEPS).items():
                    told[slot] += more
            for slot in told:
                engine.end(slot)
            mine = [told[order.index(who)] for who in range(4)]
            for one, other in zip(mine, alone, strict=True):
                self.assert_alike(one, other)
            first = first or mine
            self.assertEqual(mine, first)

    def assert_alike(self, told: list[StepToken], other: list[StepToken]) -> None:
        self.assertEqual([step.token for step in told], [step.token for step in other])
        for one, two in zip(told, other, strict=True):
            self.assertLess(abs((one.logprob or 0.0) - (two.logprob or 0.0)), ALIKE)

    def test_e2b(self) -> None:
        self.check("e2b")

    def test_e2b_with_a_window_of_two_blocks(self) -> None:
        self.check("e2b", sliding_window=LONG)

    def test_e4b(self) -> None:
        self.check("e4b")

    def test_12b(self) -> None:
        self.check("12b")

    def test_moe(self) -> None:
        self.check("moe")


class EveryFaultTest(unittest.TestCase):
    def test_dense(self) -> None:
        with scratch() as folder:
            check_faults(self, "e2b", folder, DENSE_FAULTS)

    def test_sparse(self) -> None:
        with scratch() as folder:
            check_faults(self, "moe", folder, SPARSE_FAULTS)


class Bf16Test(unittest.TestCase):
    def test_every_shape_is_nearer_to_f32_than_transformers_in_bf16(self) -> None:
        """On the average over all logits of a prompt; and the engine serves what that says."""
        for shape in SHAPES:
            with self.subTest(shape=shape), scratch() as folder:
                make_checkpoint(folder, shape)
                prompt = some_prompt(40)
                exact = Reference(folder).logits(prompt)
                theirs = np.abs(Reference(folder, "bfloat16").logits(prompt) - exact).mean()
                ours = logits_at_once(*opened(folder, BF16), prompt)
                self.assertLess(np.abs(ours - exact).mean(), theirs)
                engine = loaded(folder, dtype="bf16", chunk=16, context=64)
                told = answer(engine, prompt, 8)
                self.assertEqual(len(told), 8)
                at_once = log_probabilities(ours[-1])
                apart = [abs(at_once[token] - value) for token, value in told[0].top]
                self.assertLess(float(np.mean(apart)), 2 * theirs)


class CompileCacheTest(unittest.TestCase):
    def test_the_second_start_compiles_nothing_new_and_answers_the_same(self) -> None:
        """In processes of their own, for the cache's folder is a setting of the whole process."""
        with scratch() as folder:
            make_checkpoint(folder / "model", "12b")
            told = [self.answer_of(folder) for _ in range(2)]
            self.assertEqual(told[0]["tokens"], told[1]["tokens"])
            self.assertGreaterEqual(told[0]["files"], told[0]["programs"])
            self.assertEqual(told[1]["files"], told[0]["files"])
            self.assertGreaterEqual(told[1]["hits"] - told[0]["hits"], told[1]["programs"])

    def answer_of(self, folder: Path) -> Any:
        code = """
            import json, sys
            from pathlib import Path
            import jax
            from forge.engines.jax.engine import JaxEngine
            from tests.engines.jax_compare import answer
            from tests.engines.tiny import some_prompt
            hits = []
            jax.monitoring.register_event_listener(
                lambda event, **known: hits.append(event) if event.endswith("/cache_hits") else None
            )
            folder = Path(sys.argv[1])
            engine = JaxEngine(folder / "model", slots=2, context=64, dtype="f32", chunk=16,
                               compile_cache=folder / "cache")
            engine.load(lambda share, doing: None)
            tokens = [step.token for step in answer(engine, some_prompt(20), 9)]
            told = {"tokens": tokens, "hits": len(hits)}
            told["files"] = len(list((folder / "cache").iterdir()))
            told["programs"] = engine.counters()["compiled_shapes"]
            print(json.dumps(told))
        """
        return json.loads(run_python(code, str(folder)).splitlines()[-1])


class MemoryTest(unittest.TestCase):
    def test_placing_takes_no_second_copy(self) -> None:
        """Peak memory of a process that places 170 MB of f32 weights, as they are and as bf16: at
        most a tenth and the largest tensor above what it keeps."""
        with scratch() as folder:
            sizes = {"vocab_size": 32768, "vocab_size_per_layer_input": 32768}
            make_checkpoint(folder, "e2b", hidden_size=512, intermediate_size=2048, **sizes)
            for dtype in ("float32", "bfloat16"):
                told = json.loads(run_python(self.CODE, str(folder), dtype).splitlines()[-1])
                with self.subTest(dtype=dtype, **told):
                    self.assertGreater(told["weights"], 80_000_000)
                    self.assertGreater(told["rise"], 0.5 * told["weights"])
                    allowed = 1.1 * told["weights"] + told["largest"]
                    self.assertLess(told["rise"], allowed)

    CODE = """
        import json, re, sys
        from pathlib import Path
        import jax.numpy as jnp
        from forge.engines.gemma4.config_reader import read_config
        from forge.engines.gemma4.weight_files import open_weights
        from forge.engines.jax.params import place_params
        def peak():  # not getrusage, which also knows the parent's
            status = Path("/proc/self/status").read_text()
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
        folder = Path(sys.argv[1])
        weights = open_weights(folder, read_config(folder))
        jnp.zeros(3).block_until_ready()
        before = peak()
        params = place_params(weights, jnp.dtype(sys.argv[2]), lambda share: None)
        sizes = [array.nbytes for array in params.values()]
        print(json.dumps(dict(rise=peak() - before, weights=sum(sizes), largest=max(sizes))))
    """


def run_python(code: str, *arguments: str) -> str:
    """What a fresh Python prints that runs `code` here."""
    lines = code.splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    plain = "\n".join(line[margin:] for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", plain, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*package_folders(), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    return done.stdout


if __name__ == "__main__":
    unittest.main()
