"""A tiny random Gemma 4 checkpoint, made on the spot: every feature of E2B in 2.4 MB.

Per-layer embeddings, sliding and full attention, shared keys and values, double-wide MLPs, logit
soft-capping; an own small tokenizer with Gemma's turn tokens and an own chat template in Gemma 4's
turn format. Its answers are nonsense, but each rule of the architecture moves them.

    python3 -m tests.tiny_gemma4 FOLDER [--wrapped]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
_PLAIN_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
TURN_OPEN, TURN_CLOSE = "<|turn>", "<turn|>"
_GEMMA_SPECIALS = (
    *(TURN_OPEN, TURN_CLOSE, "<|channel>", "<channel|>", "<|think|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|image|>", "<|audio|>", "<|video|>"),
)
# What the tokenizer learns its merges from; any plain English would do.
_LEARN_FROM = (
    "The rig starts a model server on this computer and waits until it has said its first word.",
    "What is the capital of France? Answer with the name of the city only. Say hello.",
    "Tokens per second, time to the first token, a log, a job, a journal, a port and a pid.",
    "user system model 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ ,.:;!?()[]{}<>|_-+*/=\"'\n",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def _tokenizer() -> Any:
    """A byte-level-safe BPE of VOCABULARY entries: what is no word is spelt in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    spelling = [f"<0x{value:02X}>" for value in range(256)]
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    room = VOCABULARY - len(_GEMMA_SPECIALS) - len(spelling)
    learner.train_from_iterator(
        _LEARN_FROM,
        trainers.BpeTrainer(
            vocab_size=room, special_tokens=list(_PLAIN_SPECIALS), show_progress=False
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    words: dict[str, int] = dict(learnt["vocab"])
    for piece in (*spelling, *_GEMMA_SPECIALS):
        words[piece] = len(words)
    for number in range(VOCABULARY - len(words)):
        words[f"<unused{number}>"] = len(words)
    merges = [tuple(merge) for merge in learnt["merges"]]
    final = Tokenizer(
        models.BPE(vocab=words, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    final.normalizer = learner.normalizer
    final.pre_tokenizer = learner.pre_tokenizer
    final.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=final,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        additional_special_tokens=list(_GEMMA_SPECIALS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _text_config() -> Any:
    """E2B's features at a hundredth of its size: 8 layers, the last 3 share keys and values."""
    from transformers import Gemma4TextConfig

    sliding, full = "sliding_attention", "full_attention"
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=128,
        use_double_wide_mlp=True,
        num_hidden_layers=8,
        layer_types=[sliding, sliding, full, sliding, full, sliding, sliding, full],
        num_kv_shared_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=8,
        max_position_embeddings=1024,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        dtype="float32",
    )


def _shaken(model: Any, seed: int) -> None:
    """Random values for all that starts as one or zero, so that leaving a rule out is seen."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4.0)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def make_tiny_gemma4(folder: Path, *, wrapped: bool = False, seed: int = 4) -> Path:
    """Write the checkpoint into `folder` and return it. The same seed gives the same bytes.

    wrapped: as Gemma4ForConditionalGeneration without towers, as the published releases are, whose
    tensors carry the prefix ``model.language_model.``.
    """
    import torch
    from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    config = _text_config()
    model: Any = Gemma4ForCausalLM(config).eval()
    _shaken(model, seed + 1)
    if wrapped:
        outer = Gemma4Config(
            text_config=config, vision_config=None, audio_config=None, tie_word_embeddings=True
        )
        whole: Any = Gemma4ForConditionalGeneration(outer).eval()
        whole.model.language_model.load_state_dict(model.model.state_dict(), strict=True)
        whole.tie_weights()
        model = whole
    tokenizer = _tokenizer()
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_CLOSE)]
    # Random weights love bytes that make no character, and a stream of those cannot be decoded.
    unsaid = [i for piece, i in tokenizer.get_vocab().items() if piece[0] == "<" and i not in stops]
    model.generation_config.update(
        bos_token_id=2, pad_token_id=0, eos_token_id=stops, suppress_tokens=sorted(unsaid)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if wrapped:
        _ask_for_a_processor(folder)
    return folder


def _ask_for_a_processor(folder: Path) -> None:
    """As published releases do: name a processor for pictures and sound in three files."""
    named = {"processor_class": "Gemma4Processor"}
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps(named), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | named), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrapped", action="store_true")
    given = parser.parse_args()
    print(make_tiny_gemma4(given.folder, wrapped=given.wrapped))
