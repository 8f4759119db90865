"""What is compiled ahead: each shape once, told as it goes on, and never silently another one."""

from __future__ import annotations

import unittest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.jax.cache import stand_in
from forge.engines.jax.compiled import CompileCounter, compiled_programs
from forge.engines.jax.steps import EngineProgram


def doubled(x: Any) -> Any:
    return x * 2


class CompiledProgramsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.told: list[tuple[float, str]] = []
        shapes = [stand_in((size,), jnp.float32) for size in (2, 3)]
        cls.counter = CompileCounter()
        cls.programs = compiled_programs(
            [EngineProgram(f"of {s.shape[0]}", doubled, (s,), (0,)) for s in shapes],
            lambda share, doing: cls.told.append((share, doing)),
        )

    def test_each_is_told_before_it_is_compiled(self) -> None:
        self.assertEqual(self.told, [(0.0, "compiling of 2"), (0.5, "compiling of 3")])

    def test_each_runs_its_shape_and_refuses_every_other(self) -> None:
        given = np.arange(2, dtype=np.float32)
        self.assertEqual(np.asarray(self.programs["of 2"](given)).tolist(), [0.0, 2.0])
        for other in (np.zeros(3, np.float32), np.zeros(2, np.int32)):
            with self.assertRaises(TypeError):
                self.programs["of 2"](other)

    def test_donated_memory_is_taken_over(self) -> None:
        given = jax.device_put(np.ones(3, np.float32))
        self.programs["of 3"](given)
        self.assertTrue(given.is_deleted())

    def test_compilations_are_counted_and_calls_are_not(self) -> None:
        self.assertEqual(self.counter.compilations, 2)
        fresh = CompileCounter()
        self.programs["of 2"](np.zeros(2, np.float32))
        self.assertEqual(fresh.compilations, 0)
        jax.jit(lambda x: x * 3 + 1)(np.zeros(5, np.float32))
        self.assertEqual(fresh.compilations, 1)


if __name__ == "__main__":
    unittest.main()
