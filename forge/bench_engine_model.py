"""The model of `make bench-engine`: a random Gemma 4 of 300 million parameters, made on the spot.

In E2B's proportions: half its width, 15 of its 35 layers, the last 10 with shared keys and values,
per-layer embeddings, one full layer in five, an eighth of its vocabulary. Knows no engine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from forge.parts.runtimes.random_tokenizer import random_pieces, random_tokenizer_files

BENCH_VOCABULARY = 32_768
BENCH_LAYERS, BENCH_SHARED = 15, 10
_BENCH_SEED = 20_261_130
_BENCH_KINDS = [
    "full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(BENCH_LAYERS)
]


def bench_text_config() -> Any:
    """transformers' config of it."""
    from transformers import Gemma4TextConfig

    fields: dict[str, Any] = dict(
        vocab_size=BENCH_VOCABULARY,
        vocab_size_per_layer_input=BENCH_VOCABULARY,
        hidden_size=768,
        hidden_size_per_layer_input=128,
        intermediate_size=3072,
        use_double_wide_mlp=True,
        num_hidden_layers=BENCH_LAYERS,
        layer_types=_BENCH_KINDS,
        num_kv_shared_layers=BENCH_SHARED,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        max_position_embeddings=8192,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        dtype="float32",
    )
    return Gemma4TextConfig(**fields)


def make_bench_model(folder: Path) -> Path:
    """Write the checkpoint in float32, 1.15 GB, into `folder` and return it.

    All engines read the same numbers, so none pays for converting what another gets for nothing.
    """
    import torch
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(_BENCH_SEED)
    model: Any = Gemma4ForCausalLM(bench_text_config())
    model.generation_config.update(bos_token_id=2, pad_token_id=0, eos_token_id=[1])
    model.save_pretrained(folder)
    for name, text in bench_tokenizer_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def bench_tokenizer_files() -> dict[str, str]:
    """The random Gemma 4's tokenizer, with as many further pieces as the vocabulary has ids."""
    files = random_tokenizer_files()
    whole = json.loads(files["tokenizer.json"])
    pieces = random_pieces(files["tokenizer.json"])
    for number in range(len(pieces), BENCH_VOCABULARY):
        pieces[f"<unused{number}>"] = number
    whole["model"]["vocab"] = pieces
    return files | {"tokenizer.json": json.dumps(whole)}


def bench_prompts(count: int, tokens: int) -> list[list[int]]:
    """`count` different prompts of `tokens` ids each, the same in every run; no special ids."""
    draw = random.Random(_BENCH_SEED)
    return [[draw.randrange(1000, 3000) for _ in range(tokens)] for _ in range(count)]
