"""Tiny random Gemma 4 checkpoints of three kinds, with what transformers says to given prompts.

e2b has per-layer embeddings and shared keys; 12b takes values from keys in its full layers; moe has
experts beside its MLP. Each rule moves every token.

    python3 -m tests.real.tiny_variants FOLDER '["prompt", …]' NEW_TOKENS

Prints one line of JSON: for each kind and prompt [prompt's ids, greedy ids, gaps].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests import tiny_gemma4

VARIANTS = ("e2b", "12b", "moe")


def _config_of(variant: str) -> Any:
    """The text config of `variant`: of e2b's, without its tables and sharing for the others."""
    config = tiny_gemma4._text_config()
    if variant == "e2b":
        return config
    from transformers import Gemma4TextConfig

    plain: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("layer_types", "num_attention_heads", "sliding_window"),
            *("max_position_embeddings", "final_logit_softcapping", "tie_word_embeddings"),
            *("pad_token_id", "eos_token_id", "bos_token_id", "dtype"),
        )
    }
    plain |= {"num_key_value_heads": 2, "num_global_key_value_heads": 1}
    plain |= {"head_dim": 32, "global_head_dim": 64}
    plain |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    if variant == "moe":
        plain |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
        plain |= {"moe_intermediate_size": 32}
    return Gemma4TextConfig(**plain)


def make_variant(folder: Path, variant: str) -> Path:
    """Write the checkpoint of `variant` into `folder` and return it."""
    config = _config_of(variant)
    with mock.patch.object(tiny_gemma4, "_text_config", lambda: config):
        return tiny_gemma4.make_tiny_gemma4(folder)


def greedy_answers(folder: Path, prompts: list[str], limit: int) -> list[list[Any]]:
    """[prompt's ids, ids that transformers generates greedily, gaps] of each prompt.

    A gap is how far the chosen token's logit lies above the next one's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = loaded.eval()
    model.generation_config.suppress_tokens = None  # llama.cpp knows no such thing
    answers = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        given = inputs["input_ids"][0].tolist()
        with torch.no_grad():
            out = model.generate(
                **inputs,
                max_new_tokens=limit,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        highest = [scores[0].topk(2).values.tolist() for scores in out.scores]
        gaps = [first - second for first, second in highest]
        answers.append([given, out.sequences[0].tolist()[len(given) :], gaps])
    return answers


def main() -> None:
    folder, prompts, limit = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    told = {}
    for variant in VARIANTS:
        made = make_variant(folder / variant, variant)
        told[variant] = greedy_answers(made, prompts, limit)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
