"""A model folder without weights: a small tokenizer of Gemma's kind, its template, its configs.

Made with `tokenizers` alone, in milliseconds: words of a few letters, all bytes, control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>")
# What a model has that was taught to call tools and to think.
CALL_CONTROL = (
    *("<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz▁\n.,<>|:"
TEMPLATE = (
    "{{ bos_token }}{% if enable_thinking %}{{ '<|think|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{{ '<|turn>' + message['role'] + '\n' + message['content'] + '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def small_tokenizer(more: Sequence[str] = ()) -> Tokenizer:
    """300 tokens: control tokens, letters, "he", "ll", "hell", "▁w", and the 256 bytes; `more` are
    further control tokens."""
    words = {word: n for n, word in enumerate(CONTROL)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "w")]
    for word in (*LETTERS, *("".join(pair) for pair in merges)):
        words[word] = len(words)
    for byte in range(256):
        words[f"<0x{byte:02X}>"] = len(words)
    for word in more:
        words[word] = len(words)
    tokenizer = Tokenizer(
        models.BPE(vocab=words, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*CONTROL, *more)])
    return tokenizer


def make_serving_folder(folder: Path, more: Sequence[str] = (), **files: Any) -> Path:
    """Write the folder and return it. `more` are further control tokens. `files`: JSON by name
    without its end, to add or to replace; `template` is the template's text, None for a model
    without one."""
    folder.mkdir(parents=True, exist_ok=True)
    small_tokenizer(more).save(str(folder / "tokenizer.json"))
    template = files.pop("template", TEMPLATE)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    told: dict[str, Any] = {
        "tokenizer_config": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}},
        "config": {"eos_token_id": 1},
        **files,
    }
    for name, value in told.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
