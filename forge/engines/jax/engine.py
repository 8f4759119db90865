"""The engine itself: a loaded Gemma 4 that answers several conversations, one dispatch at a time.

Knows no text, no requests and no queue; what it computes is in the programs it has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge.engines.gemma4.config_reader import read_config
from forge.engines.gemma4.packed_tensors import PackedMatrix
from forge.engines.gemma4.refusal import ModelRefused
from forge.engines.gemma4.weight_files import open_weights
from forge.engines.gemma4.weight_forms import weight_forms
from forge.engines.jax.batch import BatchMasks, ToldTokens, sampling_rows
from forge.engines.jax.cache import EngineState, empty_state, kv_bytes, state_shapes
from forge.engines.jax.compiled import CompileCounter, compiled_programs, use_compile_cache
from forge.engines.jax.mesh import DeviceGroup
from forge.engines.jax.model import Params
from forge.engines.jax.params import place_params
from forge.engines.jax.prefix_cache import PrefixCache
from forge.engines.jax.prefix_store import prefix_names
from forge.engines.jax.rows import RowMap
from forge.engines.jax.steps import batch_sizes, chunk_buckets, engine_programs
from forge.engines.serving.slot_engine import (
    EngineFault,
    EngineLimits,
    LoadReport,
    Sampling,
    StepToken,
    TokenMask,
)

ENGINE_DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}
KV_DTYPES = {"auto": None, "int8": jnp.dtype(jnp.int8)}  # auto: as the weights
_ENGINE_WEIGHTS_SHARE = 0.4  # of the progress; the rest is compiling


@dataclass
class _Conversation:
    """What one slot is about. `taken`: prompt tokens in the caches; `last`, once it answers.

    `names`: of the prompt's whole chunks, where prefixes are kept.
    """

    prompt: Sequence[int]
    sampling: Sampling
    names: Sequence[bytes] = ()
    taken: int = 0
    total: int = 0
    last: int | None = None


def _first_line(error: Exception) -> str:
    """What an error of JAX says before it says where."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class JaxEngine:
    """A SlotEngine for a Hugging Face folder with a Gemma 4 of any size.

    context: tokens of one conversation, its answer included. dtype: "f32" or "bf16", of weights
    and, where kv_dtype is "auto", of keys and values; those may be "int8". chunk: most prompt
    tokens of one dispatch. steps: most tokens of one decode. quantization, unpack: in which form
    weights are served, as `weight_forms` takes them. compile_cache: a folder that keeps
    compiled programs for the next start. prefix_cache_gb: of the host's memory, for the beginnings
    of prompts; 0 keeps none. group: the devices that it runs on, JAX's default one where None.
    original: an engine of the same folder, dtype and forms that is loaded before this one, which
    then copies its weights and reads no file.
    Raises ModelRefused where the folder's config is not understood or its weights cannot be
    quantised, EngineFault where the model has not so many positions, or prefixes have no room.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        context: int,
        dtype: str,
        chunk: int = 256,
        steps: int = 1,
        quantization: str = "none",
        unpack: str = "step",
        kv_dtype: str = "auto",
        compile_cache: Path | None = None,
        prefix_cache_gb: float = 0.0,
        group: DeviceGroup | None = None,
        original: JaxEngine | None = None,
    ) -> None:
        self._folder = folder
        self._group, self._original = group, original
        self._config = read_config(folder)
        self._quantization, self._unpack = quantization, unpack
        # Refuses what cannot be quantised; which tensors are packed, the weights' files say.
        self._forms = weight_forms(self._config, (), quantization)
        if context > self._config.positions:
            raise EngineFault(
                f"a context of {context} tokens: the model has {self._config.positions} positions"
            )
        self._dtype = ENGINE_DTYPES[dtype]
        self._limits = EngineLimits(
            slots, context, self._config.vocabulary, min(chunk, context), steps
        )
        self._compile_cache = compile_cache
        self._kv_dtype = KV_DTYPES[kv_dtype] or self._dtype
        self._shapes = state_shapes(self._config, slots, context, self._kv_dtype)
        self._prefixes: PrefixCache | None = None
        if prefix_cache_gb:
            room = prefix_cache_gb * 1e9
            self._prefixes = PrefixCache(self._shapes, self._limits.chunk, room, self._call)
        self._rows = RowMap(batch_sizes(slots))
        self._conversations: dict[int, _Conversation] = {}

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def load(self, report: LoadReport) -> None:
        """Place the weights and compile every program. Raises EngineFault."""
        if self._compile_cache is not None:
            use_compile_cache(self._compile_cache)
        limits = self._limits

        def placed(share: float) -> None:
            report(share * _ENGINE_WEIGHTS_SHARE, "placing weights")

        def compiling(share: float, what: str) -> None:
            report(_ENGINE_WEIGHTS_SHARE + share * (1 - _ENGINE_WEIGHTS_SHARE), what)

        try:
            self._params = self._placed_params(placed)
            programs = engine_programs(
                self._config,
                slots=limits.slots,
                context=limits.context,
                dtype=self._dtype,
                chunk=limits.chunk,
                steps=limits.steps,
                kv_dtype=self._kv_dtype,
                keeps_prefixes=self._prefixes is not None,
                forms=self._forms,
            )
            self._programs = compiled_programs(programs, compiling, self._group)
            self._state: EngineState = (
                empty_state(self._shapes)
                if self._group is None
                else self._group.zeros(self._shapes)
            )
        except ModelRefused as refusal:
            raise EngineFault(str(refusal)) from None
        except jax.errors.JaxRuntimeError as error:  # most often: the device's memory is too small
            raise EngineFault(_first_line(error)) from error
        sizes = (1, *batch_sizes(limits.slots))
        self._masks = BatchMasks(limits.vocabulary, sizes, self._group)
        self._counter = CompileCounter()
        report(1.0, "loaded")

    def begin(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, cache_salt: str = ""
    ) -> int:
        """Give the free `slot` a conversation; how many tokens of its prompt need not be read.

        Raises ValueError for what cannot be one.
        """
        if slot in self._conversations or not 0 <= slot < self._limits.slots:
            raise ValueError(f"slot {slot} is not free")
        if not 0 < len(prompt) < self._limits.context:
            context = self._limits.context
            raise ValueError(f"a prompt of {len(prompt)} tokens in a context of {context}")
        if not all(0 <= token < self._limits.vocabulary for token in prompt):
            raise ValueError(f"a token beyond the vocabulary of {self._limits.vocabulary}")
        talk = self._conversations[slot] = _Conversation(tuple(prompt), sampling)
        self._rows.give(slot)
        if self._prefixes is not None:
            talk.names = prefix_names(talk.prompt, self._limits.chunk, cache_salt)
            self._state, talk.taken = self._prefixes.begin(
                self._state, self._rows[slot], talk.prompt, talk.names
            )
        return talk.taken

    def prefill(self, slot: int, mask: TokenMask | None = None) -> StepToken | None:
        """Take the prompt's next chunk; the first token of the answer once the prompt is whole."""
        talk = self._conversations[slot]
        limits = self._limits
        if talk.last is not None:
            raise ValueError(f"the prompt of slot {slot} has been read")
        piece = talk.prompt[talk.taken : talk.taken + limits.chunk]
        bucket = next(size for size in chunk_buckets(limits.chunk) if size >= len(piece))
        ids = np.zeros(bucket, np.int32)
        ids[: len(piece)] = piece
        row = np.int32(self._rows[slot])
        stream = self._run(
            f"prefill of {bucket}", row, ids, np.int32(talk.taken), np.int32(len(piece))
        )
        talk.taken += len(piece)
        if self._prefixes is not None:
            self._prefixes.keep(self._state, self._rows[slot], talk.names, talk.taken)
        if talk.taken < len(talk.prompt):
            return None
        last = np.int32(piece[-1]), np.int32(talk.taken - 1)
        settings = sampling_rows([talk.sampling])
        masks = self._masks.of(1, {} if mask is None else {0: mask})
        chosen = self._run("first token", row, stream, *last, settings, masks)
        token = ToldTokens(chosen).token((0,), talk.sampling)
        talk.last, talk.total = token.token, talk.taken + 1
        return token

    def decode(
        self, slots: Sequence[int], steps: int, masks: Mapping[int, TokenMask] | None = None
    ) -> Mapping[int, Sequence[StepToken]]:
        """Up to `steps` further tokens for each of `slots`; none where the context is full."""
        masks = masks or {}
        steps = 1 if masks else max(1, min(steps, self._limits.steps))
        talks = {
            slot: self._conversations[slot]
            for slot in slots
            if self._conversations[slot].total < self._limits.context
        }
        told: dict[int, Sequence[StepToken]] = {slot: () for slot in slots}
        if not talks:
            return told
        for source, target in self._rows.pack(list(talks)):
            rows = np.int32(source), np.int32(target)
            self._state = self._call("moving a row", self._state, *rows)
        batch = self._rows.batch_of(list(talks))
        tokens, positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        active = np.zeros(batch, np.bool_)
        settings = [Sampling(temperature=0.0)] * batch
        for slot, talk in talks.items():
            row = self._rows[slot]
            if talk.last is None:
                raise ValueError(f"slot {slot} has not been prefilled")
            tokens[row], positions[row], active[row] = talk.last, talk.total - 1, True
            settings[row] = talk.sampling
        by_row = {self._rows[slot]: mask for slot, mask in masks.items() if slot in talks}
        allowed = self._masks.of(batch, by_row)
        inputs = (tokens, positions, active, sampling_rows(settings), allowed, np.int32(steps))
        chosen = ToldTokens(self._run(f"decode of {batch}", *inputs))
        for slot, talk in talks.items():
            many = min(steps, self._limits.context - talk.total)
            row = self._rows[slot]
            told[slot] = [chosen.token((step, row), talk.sampling) for step in range(many)]
            talk.last, talk.total = told[slot][-1].token, talk.total + many
        return told

    def end(self, slot: int) -> None:
        """Free the slot; whatever it held can be overwritten."""
        if self._conversations.pop(slot, None) is not None:
            self._rows.take(slot)

    def counters(self) -> Mapping[str, float]:
        """compiled_shapes; compiles_after_start, in the whole process; kv_bytes of all slots;
        where prefixes are kept, what PrefixCache counts."""
        return {
            "compiled_shapes": len(self._programs),
            "compiles_after_start": self._counter.compilations,
            "kv_bytes": kv_bytes(self._shapes),
            **(self._prefixes.counters() if self._prefixes is not None else {}),
        }

    def _placed_params(self, placed: Callable[[float], None]) -> Params:
        if self._original is not None and self._group is not None:
            self._forms = self._original._forms
            copied: Params = self._group.placed(self._original._params)
            placed(1.0)
            return copied
        weights = open_weights(self._folder, self._config)
        packed = [name for name, view in weights.items() if isinstance(view, PackedMatrix)]
        self._forms = weight_forms(self._config, packed, self._quantization, self._unpack)
        return place_params(weights, self._dtype, placed, self._forms, self._group)

    def _run(self, name: str, *arguments: Any) -> Any:
        """Run a program on weights and state, which it replaces."""
        self._state, result = self._call(name, self._params, self._state, *arguments)
        return result

    def _call(self, name: str, *arguments: Any) -> Any:
        """Run a program. Raises EngineFault; a state that was given is lost then."""
        try:
            return self._programs[name](*arguments)
        except jax.errors.JaxRuntimeError as error:
            raise EngineFault(f"{name}: {_first_line(error)}") from error
