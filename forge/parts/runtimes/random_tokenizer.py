"""The tokenizer of the random Gemma 4: a small BPE with Gemma 4's special tokens and turn format.

Learns its pieces from a list of English words on the spot, so that nothing has to be downloaded.
Knows no weights and no model server.
"""

from __future__ import annotations

import json
from typing import Any

_MOST_PIECES = 4096
# In this order they get the ids 0 to 4, as in Gemma 4's own tokenizer.
_PLAIN_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_TURN_OPEN, _TURN_CLOSE = "<|turn>", "<turn|>"
# Gemma 4's own spellings: the template google-gemma-4-31B-it.jinja in llama.cpp b11434, 2026-11-29.
_TURN_SPECIALS = (
    *(_TURN_OPEN, _TURN_CLOSE, "<|channel>", "<channel|>", "<|think|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|image|>", "<|audio|>", "<|video|>"),
)
_RANDOM_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
# What the pieces are learnt from: each stem with each ending. Any plain English would do; the words
# of the load generator's prompts are here, so that each is one token, as it is to a real tokenizer.
_STEMS = (
    "the a an and or not but of to in on at by for from with without into over under again is are "
    "was were be been has have had do does did can could will would may must shall should what "
    "who when where why how which that this these those here there one two three four five six "
    "seven eight nine ten first last next other same new old small large long short good right "
    "wrong fast slow hot cold red green blue white black high low near far early late open close "
    "begin end start stop wait ask answer say tell call name word letter line page book list "
    "number count add take give make find keep hold turn move run walk look see hear read write "
    "think know learn teach help need want like love work play rest sleep day night hour minute "
    "second year time week light dark water wind rain snow sky sun moon star sea river hill tree "
    "leaf flower bird fish horse dog cat house door window road city land country king queen man "
    "woman child friend mother father brother sister hand head heart eye ear foot bread milk salt "
    "sugar apple table chair paper stone wood iron gold silver glass fire smoke colour sound "
    "voice song capital hello sentence model token server memory system user machine all more "
    "some any than also people years most only after many between through world being both used "
    "part while during against state school well until place point around often group family "
    "later local little town music story field north south winter summer morning evening garden "
    "village mountain forest island market question reason moment picture bridge street weather "
    "journey captain doctor teacher farmer children animal metal copper engine circle corner "
    "centre border season history science nature power travel carry follow listen remember build "
    "speak grow change go length"
).split()
_ENDINGS = ("s", "ed", "er", "ing", "ly")
_SPELT = "0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz ,.:;!?()[]{}<>|_-+*/='\n"
# Gemma 4's turns, thoughts, declarations, calls and results, in its own spelling (the same source);
# a plain talk is turns alone. Arguments and schemas are written as in a call.
RANDOM_CHAT_TEMPLATE = (
    "{% macro words(content) %}"
    "{% if content is string %}{{ content }}"
    "{% else %}{% for part in content or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endmacro %}"
    "{% macro written(value) %}"
    "{% if value is string %}{{ '<|\"|>' + value + '<|\"|>' }}"
    "{% elif value is boolean %}{{ 'true' if value else 'false' }}"
    "{% elif value is none %}null"
    "{% elif value is mapping %}{{ '{' }}"
    "{% for name, held in value | dictsort %}{{ name }}:{{ written(held) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif value is iterable %}[{% for held in value %}{{ written(held) }}"
    "{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ value }}{% endif %}"
    "{% endmacro %}"
    "{{ bos_token }}"
    "{% set talk = namespace(left=messages) %}"
    "{% if tools or enable_thinking %}"
    "{{ '<|turn>system\n' }}{% if enable_thinking %}{{ '<|think|>\n' }}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ words(messages[0]['content']) }}{% set talk.left = messages[1:] %}{% endif %}"
    "{% for tool in tools or [] %}{% set function = tool['function'] %}"
    "{{ '<|tool>declaration:' + function['name'] + '{description:' }}"
    "{{ written(function['description'] or '') }},parameters:"
    "{{ written(function['parameters'] or {}) }}{{ '}<tool|>' }}{% endfor %}"
    "{{ '<turn|>\n' }}"
    "{% endif %}"
    "{% for message in talk.left %}"
    "{% set role = message['role'] %}{% set calls = message['tool_calls'] or [] %}"
    "{% set after = (loop.nextitem or {})['role'] %}"
    "{% set before = (loop.previtem or {})['role'] %}"
    "{% if role == 'tool' %}"
    "{{ '<|tool_response>response:' + (message['name'] or 'unknown') + '{value:' }}"
    "{{ written(words(message['content'])) }}{{ '}<tool_response|>' }}"
    "{% if after and after not in ('tool', 'assistant') %}{{ '<turn|>\n' }}{% endif %}"
    "{% else %}"
    "{% if not (role == 'assistant' and before == 'tool') %}"
    "{{ '<|turn>' + ('model' if role == 'assistant' else role) + '\n' }}{% endif %}"
    "{% if calls and message['reasoning'] %}"
    "{{ '<|channel>thought\n' + message['reasoning'] + '<channel|>' }}{% endif %}"
    "{{ words(message['content']) }}"
    "{% for call in calls %}{{ '<|tool_call>call:' + call['function']['name'] }}"
    "{{ written(call['function']['arguments']) }}{{ '<tool_call|>' }}{% endfor %}"
    "{% if not (calls and after == 'tool') %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}"
    "{{ '<|turn>model\n' }}{% endif %}"
)


def random_tokenizer_files() -> dict[str, str]:
    """The tokenizer's files by name. The same release of `tokenizers` makes the same text.

    Pieces are learnt within a word and the blank before it, which is written ▁; what has no piece
    is spelt in bytes.
    """
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
        "additional_special_tokens": list(_TURN_SPECIALS),
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": _random_tokenizer().to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "chat_template.jinja": RANDOM_CHAT_TEMPLATE,
    }


def random_stop_tokens(pieces: dict[str, int]) -> list[int]:
    """The ids that end an answer: the end of the text, and the end of a turn."""
    return [pieces["<eos>"], pieces[_TURN_CLOSE]]


def random_pieces(tokenizer_json: str) -> dict[str, int]:
    """Every piece of a tokenizer.json with its id."""
    pieces: dict[str, int] = json.loads(tokenizer_json)["model"]["vocab"]
    return pieces


def sayable_tokens(pieces: dict[str, int]) -> list[int]:
    """The ids that spell text of their own: no special token, no single byte.

    Bytes are left out because a random sequence of them is no character.
    """
    kept = {"<", "<|"}  # text that only looks like one of the others
    return [number for piece, number in pieces.items() if piece in kept or piece[:1] != "<"]


def _random_tokenizer() -> Any:
    """A `tokenizers.Tokenizer` of _MOST_PIECES pieces at most."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = BpeTrainer(
        vocab_size=_MOST_PIECES - len(_TURN_SPECIALS) - len(_RANDOM_BYTES),
        min_frequency=2,
        initial_alphabet=list(_SPELT),
        special_tokens=list(_PLAIN_SPECIALS),
        show_progress=False,
    )
    # Twice by itself and once with each ending: stems become pieces, and so do endings.
    words = (f" {stem}{ending}" for stem in _STEMS for ending in ("", "", *_ENDINGS))
    learner.train_from_iterator(words, trainer)
    learnt = json.loads(learner.to_str())["model"]
    pieces: dict[str, int] = dict(learnt["vocab"])
    for piece in (*_RANDOM_BYTES, *_TURN_SPECIALS):
        pieces[piece] = len(pieces)
    merges = [tuple(merge) for merge in learnt["merges"]]
    whole = Tokenizer(
        models.BPE(
            vocab=pieces, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    whole.normalizer = learner.normalizer
    whole.pre_tokenizer = learner.pre_tokenizer
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    specials = (*_PLAIN_SPECIALS, *_TURN_SPECIALS)
    whole.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return whole
