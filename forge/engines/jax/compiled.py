"""Compiles an engine's programs ahead of time, keeps them on disk, and counts every compilation.

Knows nothing of what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from forge.engines.jax.mesh import DeviceGroup
from forge.engines.jax.steps import EngineProgram

# JAX records it around every compilation by the backend, or its retrieval from the disk cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts what this process compiles from its making on, whoever asks for it."""

    def __init__(self) -> None:
        self.compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.compilations += 1


def use_compile_cache(folder: Path) -> None:
    """From now on this process keeps what it compiles in `folder`, however small or quick."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, str | float] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def lowered_program(program: EngineProgram, group: DeviceGroup | None = None) -> Any:
    """The program as XLA's compiler is given it: for `group`, else for the default device."""
    if group is None:
        wrapped = jax.jit(program.function, donate_argnums=program.donated)
        return wrapped.lower(*program.arguments)
    with group.scope():
        results = jax.eval_shape(program.function, *program.arguments)
        wrapped = jax.jit(
            program.function,
            donate_argnums=program.donated,
            in_shardings=group.shardings(program.arguments),
            out_shardings=group.shardings(results),
        )
        return wrapped.lower(*program.arguments)


def compiled_programs(
    programs: Iterable[EngineProgram],
    report: Callable[[float, str], None],
    group: DeviceGroup | None = None,
) -> dict[str, Callable[..., Any]]:
    """Every program by its name, compiled for `group`, or for the default device.

    What is called afterwards is the executable itself: with arguments of another shape or dtype it
    raises TypeError instead of compiling anew.
    """
    listed = list(programs)
    ready: dict[str, Callable[..., Any]] = {}
    for number, program in enumerate(listed):
        report(number / len(listed), f"compiling {program.name}")
        ready[program.name] = lowered_program(program, group).compile()
    return ready
