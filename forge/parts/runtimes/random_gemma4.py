"""The embedded model of the JAX rig: a small Gemma 4 of random numbers, made on this computer.

Every feature of E2B in 14 million parameters, so that the engine has all of its work to do; what it
answers means nothing. Knows no model server, and needs neither network nor PyTorch.
"""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.ground.locks import held_lock
from forge.parts.ground.state import private_folder
from forge.parts.planes.plane import Room
from forge.parts.runtimes.random_tokenizer import (
    random_pieces,
    random_stop_tokens,
    random_tokenizer_files,
    sayable_tokens,
)
from forge.parts.runtimes.runtime import PhaseReport

RANDOM_SERVED_NAME = "random-gemma-4"
MEANS_NOTHING = "its weights are random numbers: its answers mean nothing"
_RECIPE = 2  # counts up when the files come out differently, so that an older folder is not served
_RANDOM_SEED = 20_261_130
_RANDOM_DISK = 200_000_000  # bytes: twice the folder, which is written beside and then renamed
# E2B at a sixth of its width, 10 of its 35 layers: the shared ones, the double width of their MLP,
# the per-layer embeddings and one full layer in five are its own. Names: transformers 5.24.
_HIDDEN, _INTERMEDIATE, _PER_LAYER = 256, 1024, 32
_LAYERS, _SHARED, _FULL_EVERY = 10, 5, 5
_HEADS, _HEAD_DIM, _FULL_HEAD_DIM, _WINDOW = 8, 32, 64, 128
_LAYER_KINDS = tuple(
    "full_attention" if (layer + 1) % _FULL_EVERY == 0 else "sliding_attention"
    for layer in range(_LAYERS)
)
# What the last norm multiplies by: it spreads the logits, as training would.
_RANDOM_SPREAD = 4.0


def random_gemma4_folder(cache: Path) -> Path:
    """Where the random Gemma 4 lies once it is made."""
    return cache / "models" / f"{RANDOM_SERVED_NAME}-{_RECIPE}"


async def make_random_gemma4(cache: Path, room: Room, report: PhaseReport) -> Path:
    """The folder of the random Gemma 4, made where it is not there yet, all or nothing.

    Raises RigError CAPACITY where the disk has no room for it.
    """
    target = random_gemma4_folder(cache)
    partial = target.parent / f".{target.name}.partial"
    async with held_lock(private_folder(target.parent), RANDOM_SERVED_NAME, wait_s=300):
        if target.is_dir():
            return target
        if room.disk_free < _RANDOM_DISK:
            raise _no_room(f"{room.disk_free / 1e9:.1f} GB of disk are free under {cache}")
        report(0.1, "making the random Gemma 4, once")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            await asyncio.to_thread(write_random_gemma4, partial)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _no_room(f"the disk was full before all of {target} was written") from None
            raise
        partial.rename(target)
    return target


def write_random_gemma4(folder: Path) -> None:
    """Write config, tokenizer and weights (bf16, as E2B is published) into the new `folder`.

    The same releases of numpy and tokenizers write the same bytes. Raises OSError.
    """
    files = random_tokenizer_files()
    pieces = random_pieces(files["tokenizer.json"])
    stops = random_stop_tokens(pieces)
    files["config.json"] = json.dumps(_random_config(len(pieces)), indent=1)
    files["generation_config.json"] = json.dumps(
        {"bos_token_id": pieces["<bos>"], "pad_token_id": pieces["<pad>"], "eos_token_id": stops}
    )
    files["README.md"] = f"{RANDOM_SERVED_NAME}: {MEANS_NOTHING}.\n"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_tensors(folder / "model.safetensors", len(pieces), sayable_tokens(pieces))


def _no_room(what: str) -> RigError:
    return RigError(
        "CAPACITY",
        f"the embedded model takes {_RANDOM_DISK / 1e9:.1f} GB of disk while it is made: {what}",
        "free some disk space, or set XDG_CACHE_HOME to a larger disk",
    )


def _random_config(vocabulary: int) -> dict[str, Any]:
    """config.json, in the words that transformers 5.24 writes for Gemma4ForCausalLM."""
    full = [layer for layer, kind in enumerate(_LAYER_KINDS) if kind == "full_attention"]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "hidden_size": _HIDDEN,
        "hidden_size_per_layer_input": _PER_LAYER,
        "intermediate_size": _INTERMEDIATE,
        "use_double_wide_mlp": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": _LAYERS,
        "num_kv_shared_layers": _SHARED,
        "layer_types": list(_LAYER_KINDS),
        "sliding_window": _WINDOW,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "per_layer_config": {str(layer): {"head_dim": _FULL_HEAD_DIM} for layer in full},
        "attention_k_eq_v": False,
        "attention_bias": False,
        "enable_moe_block": False,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def _random_shapes(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, as Gemma4ForCausalLM of transformers 5.24 saves them."""
    table = _LAYERS * _PER_LAYER
    yield "embed_tokens.weight", (vocabulary, _HIDDEN)
    yield "embed_tokens_per_layer.weight", (vocabulary, table)
    yield "per_layer_model_projection.weight", (table, _HIDDEN)
    yield "per_layer_projection_norm.weight", (_PER_LAYER,)
    yield "norm.weight", (_HIDDEN,)
    for layer, kind in enumerate(_LAYER_KINDS):
        owner = layer < _LAYERS - _SHARED
        width = _INTERMEDIATE if owner else 2 * _INTERMEDIATE
        head = _FULL_HEAD_DIM if kind == "full_attention" else _HEAD_DIM
        shapes: dict[str, tuple[int, ...]] = {
            "layer_scalar": (1,),
            "per_layer_input_gate.weight": (_PER_LAYER, _HIDDEN),
            "per_layer_projection.weight": (_HIDDEN, _PER_LAYER),
            "mlp.gate_proj.weight": (width, _HIDDEN),
            "mlp.up_proj.weight": (width, _HIDDEN),
            "mlp.down_proj.weight": (_HIDDEN, width),
            "self_attn.q_proj.weight": (_HEADS * head, _HIDDEN),
            "self_attn.o_proj.weight": (_HIDDEN, _HEADS * head),
            "self_attn.q_norm.weight": (head,),
        }
        if owner:
            shapes["self_attn.k_proj.weight"] = (head, _HIDDEN)
            shapes["self_attn.v_proj.weight"] = (head, _HIDDEN)
            shapes["self_attn.k_norm.weight"] = (head,)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{norm}_layernorm.weight"] = (_HIDDEN,)
        shapes["post_per_layer_input_norm.weight"] = (_HIDDEN,)
        for name, shape in shapes.items():
            yield f"layers.{layer}.{name}", shape


def _random_tensor(number: int, name: str, shape: tuple[int, ...], sayable: list[int]) -> Any:
    """The `number`-th tensor as float32 of numpy.

    Matrices keep a vector's length on average (deviation 1 / sqrt(columns)), norms lie around 1, so
    that no layer drowns another. Tokens that spell no text get embeddings of zero: their logit is
    0, and with hundreds of others around it, it is not the highest.
    """
    import numpy as np

    draw = np.random.Generator(np.random.PCG64([_RANDOM_SEED, number]))
    if name.endswith("layer_scalar"):
        return draw.uniform(0.8, 1.0, shape).astype(np.float32)
    values = draw.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return (1 + 0.1 * values) * (_RANDOM_SPREAD if name == "norm.weight" else 1.0)
    if name == "embed_tokens_per_layer.weight":
        return values * _PER_LAYER**-0.5
    values *= shape[1] ** -0.5
    if name == "embed_tokens.weight":
        silent = np.ones(shape[0], dtype=bool)
        silent[sayable] = False
        values[silent] = 0
    return values


def _write_tensors(path: Path, vocabulary: int, sayable: list[int]) -> None:
    """The safetensors file: length of the header, header, numbers. Raises OSError.

    Form: https://github.com/huggingface/safetensors, "Format".
    """
    import ml_dtypes

    tensors = list(_random_shapes(vocabulary))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        size = 2
        for extent in shape:
            size *= extent
        entry = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        header[f"model.{name}"], end = entry, end + size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, shape) in enumerate(tensors):
            numbers = _random_tensor(number, name, shape, sayable)
            file.write(numbers.astype(ml_dtypes.bfloat16).tobytes())
