"""Compiles the JAX engine's programs for one chip that is not here, from shapes alone.

Knows no installation and no table: the chip's compiler has to be in the environment already.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge.aot_chips import CHIPS
from forge.engines.gemma4.config import Gemma4Config, LayerConfig, PackedRule
from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.sizes import marks_bytes
from forge.engines.gemma4.tensor_names import model_tensors
from forge.engines.gemma4.weight_forms import WeightForm, is_int8_tensor, weight_forms
from forge.parts.knowledge.cache_bytes import kv_bytes
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.geometry_config import geometry_from_config
from forge.parts.knowledge.memory import weight_bytes
from forge.parts.knowledge.models import GEMMA4

DTYPE = "bf16"
FORMS = (DTYPE, "w4a16", "int8")  # of the matrices; all else is bf16
KV_FORMS = {DTYPE: 2, "int8": 1}  # bytes of an element; int8 has scales beside them
STEPS = 4  # tokens of a dispatch, as jax_server.py has it unless told otherwise


@dataclass(frozen=True)
class AotCase:
    """One model on one chip. model: a name of GEMMA4, or a folder with a config.json.

    form: of FORMS. What is packed or quantised is what the planner's encoding of that name takes.
    kv: of KV_FORMS, how keys and values are kept.
    """

    model: str
    chip: str
    slots: int = 4
    context: int = 4096
    chunk: int = 256
    every: bool = False
    form: str = DTYPE
    kv: str = DTYPE

    @property
    def title(self) -> str:
        """The model's name for people, with what is not bf16 of it."""
        name = self.model if self.model in GEMMA4 else Path(self.model).name
        if self.form != DTYPE:
            name += f" {self.form}"
        return name if self.kv == DTYPE else f"{name}, {self.kv} KV"


@dataclass(frozen=True)
class AotProgram:
    """What the compiler says of one program: seconds, and bytes; `refusal` where it says no.

    arguments: what it is given, without what it never reads. temporaries: what it needs for itself.
    peak: all of it at once, the results among them.
    """

    name: str
    seconds: float
    arguments: int = 0
    temporaries: int = 0
    code: int = 0
    peak: int = 0
    refusal: str = ""


def config_of_geometry(geometry: Geometry) -> Gemma4Config:
    """The engine's config for a shape that the planner knows; what moves no size is E2B's."""
    layers = []
    for index, kind in enumerate(geometry.layer_types):
        owner = index < geometry.owners
        full = geometry.is_full(index)
        same = [i for i in range(geometry.owners) if geometry.layer_types[i] == kind]
        layers.append(
            LayerConfig(
                index=index,
                sliding=not full,
                source=index if owner else same[-1],
                heads=geometry.heads,
                kv_heads=geometry.global_kv_heads if full else geometry.kv_heads,
                head_dim=geometry.head_width(index),
                intermediate=geometry.mlp_width(index),
                k_is_v=owner and full and geometry.k_eq_v,
            )
        )
    return Gemma4Config(
        hidden=geometry.hidden,
        vocabulary=geometry.vocab,
        layers=tuple(layers),
        window=geometry.window or 1,
        positions=131_072,
        norm_eps=1e-6,
        softcap=30.0,
        sliding_theta=1e4,
        full_theta=1e6,
        full_rotated=0.25,
        per_layer=geometry.ple_dim,
        per_layer_vocabulary=geometry.ple_vocab,
        experts=geometry.experts,
        experts_used=geometry.top_k,
        expert_intermediate=geometry.expert_width,
        stored_dtype="bfloat16",
        bos=2,
        eos=(1,),
        pad=0,
    )


def model_of(case: AotCase) -> tuple[Geometry, Gemma4Config]:
    """The planner's and the engine's view of the case's model."""
    if case.model in GEMMA4:
        geometry = GEMMA4[case.model].geometry
        return geometry, config_of_geometry(geometry)
    folder = Path(case.model)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return geometry_from_config(stated), read_config(folder)


def planned_bytes(case: AotCase) -> int:
    """Weights and caches as the planner reckons them for the JAX engine, and sampling's marks.

    The planner leaves the scales of int8 keys and values out: 0.9 % of them in E2B.
    """
    geometry, config = model_of(case)
    cached = kv_bytes(geometry, case.context, case.slots, KV_FORMS[case.kv], "ring")
    return weight_bytes(geometry, case.form) + cached + marks_bytes(config, case.slots)


def formed(case: AotCase) -> tuple[Gemma4Config, dict[str, WeightForm]]:
    """The engine's config of the case's model, and the form of each of its tensors."""
    config = model_of(case)[1]
    if case.form != "w4a16":
        return config, weight_forms(config, (), "none" if case.form == DTYPE else case.form)
    config = replace(config, packed=config.packed or PackedRule(32, ("Linear",), ()))
    return config, weight_forms(
        config, [name for name in model_tensors(config) if is_int8_tensor(name)]
    )


def compile_case(case: AotCase) -> Iterator[AotProgram]:
    """Compile the case's programs here, one after the other; its compiler has to be found."""
    import jax
    import jax.numpy as jnp

    from forge.engines.jax.steps import batch_sizes, chunk_buckets, engine_programs

    there = jax.sharding.SingleDeviceSharding(CHIPS[case.chip].description().devices[0])

    def placed(shape: Any) -> Any:
        struct: Any = jax.ShapeDtypeStruct  # it has no types
        return struct(shape.shape, shape.dtype, sharding=there)

    chunk = min(case.chunk, case.context)
    most_tokens, most_rows = chunk_buckets(chunk)[-1], batch_sizes(case.slots)[-1]
    largest = (f"prefill of {most_tokens}", "first token", f"decode of {most_rows}")
    config, forms = formed(case)
    for program in engine_programs(
        config,
        slots=case.slots,
        context=case.context,
        dtype=jnp.dtype(jnp.bfloat16),
        chunk=chunk,
        steps=STEPS,
        kv_dtype=jnp.dtype(jnp.int8) if case.kv == "int8" else None,
        forms=forms,
    ):
        if not case.every and program.name not in largest:
            continue
        begun = time.perf_counter()
        wrapped = jax.jit(program.function, donate_argnums=program.donated)
        try:
            compiled: Any = wrapped.lower(*jax.tree.map(placed, program.arguments)).compile()
        except jax.errors.JaxRuntimeError as error:
            said = str(error).strip()
            if "RESOURCE_EXHAUSTED" not in said and "Ran out of memory" not in said:
                raise
            refusal = said.splitlines()[0][:300]
            yield AotProgram(program.name, time.perf_counter() - begun, refusal=refusal)
            continue
        memory = compiled.memory_analysis()
        yield AotProgram(
            program.name,
            time.perf_counter() - begun,
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
            memory.peak_memory_in_bytes,
        )
