"""A tiny Gemma 4 that has been taught a few answers by heart: calls, thoughts, and plain words.

A random model never makes a call, so nothing would show what a server's parsers do with one. This
one is trained, in seconds, until it answers each lesson's prompt with exactly the tokens in which
Gemma 4 writes a call or a thought; whatever else it is asked, its answers mean nothing.

    python3 -m tests.real.taught_gemma4 FOLDER
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from forge.parts.toolsets import probe_schema, probe_tool_calls
from forge.parts.toolsets.probe_tool_calls import TOOL_SCENARIOS
from tests import tiny_gemma4
from tests.forge_copy import package_folders

CACHE = Path(os.environ.get("RIG_REAL_CACHE") or "/var/cache/gemma4-rigs-real")

# Turns as in the other tiny template; the tools and the thinking switch stand in a system turn.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools or enable_thinking %}{{ '<|turn>system\n' }}"
    "{% if enable_thinking %}{{ '<|think|>' }}{% endif %}"
    "{% for tool in tools or [] %}"
    "{{ '<|tool>declaration:' + tool['function']['name'] + '<tool|>' }}"
    "{% endfor %}{{ '<turn|>\n' }}{% endif %}"
) + tiny_gemma4.CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
THOUGHT, SPOKEN = "It is wide and blue.", "The sea is wide."
LETTERS = [a + b for a in "bdfgklmnprtvz" for b in "aeiou"]  # the probe's words are of these
ASKED_BACK = "Which city?"
LEARNING_RATE, STEPS_AT_MOST = 4e-3, 2000
# Each token's chance is above 0.95, so that rounding in another engine cannot change one.
SURE, SURE_STEPS = 0.05, 8
_QUOTE = '<|"|>'


def call_text(name: str, city: str) -> str:
    """A call as Gemma 4 writes it."""
    return f"<|tool_call>call:{name}{{city:{_QUOTE}{city}{_QUOTE}}}<tool_call|>"


def lessons() -> list[tuple[dict[str, Any], str]]:
    """(arguments of the chat template beside its messages, what the model is to say)."""
    found: list[tuple[dict[str, Any], str]] = []
    for scenario in TOOL_SCENARIOS:
        calls = "".join(call_text(name, city.title()) for name, city in scenario.calls)
        said = calls or (ASKED_BACK if scenario.asks_back else "42")
        found.append(({"question": scenario.question, "tools": list(scenario.tools)}, said))
    thought = f"<|channel>thought\n{THOUGHT}<channel|>{SPOKEN}"
    found.append(({"question": probe_schema._PROSE_PROMPT, "enable_thinking": True}, thought))
    found.append(({"question": probe_schema._PROSE_PROMPT}, SPOKEN))
    return found


def forms(word: str) -> list[tuple[dict[str, Any], list[str]]]:
    """The two about the sea where a schema forbids prose: pieces given and pieces to say, in turns.

    A schema's grammar lets through any white space, which an untaught model never ends.
    """
    thought = f"<|channel>thought\n{THOUGHT}<channel|>"
    asked: dict[str, Any] = {"question": probe_schema._PROSE_PROMPT}
    rest = ['"code": "', word, '"}']
    return [
        (asked, ["{", *rest]),
        ({**asked, "enable_thinking": True}, [thought + "{", *rest]),
    ]


def kept_taught_gemma4() -> Path:
    """The checkpoint in RIG_REAL_CACHE, made there by the first who asks: it takes 90 s."""
    sources = (__file__, tiny_gemma4.__file__, probe_schema.__file__, probe_tool_calls.__file__)
    recipe = hashlib.sha256(b"".join(Path(str(source)).read_bytes() for source in sources))
    folder = CACHE / f"taught-gemma4-{recipe.hexdigest()[:12]}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as place:
            command = [sys.executable, "-m", "tests.real.taught_gemma4", f"{place}/made"]
            here = Path(__file__).resolve().parents[2]
            paths = os.pathsep.join([*package_folders(), str(here)])
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
            subprocess.run(command, cwd=here, env=environment, check=True, timeout=900)
            with contextlib.suppress(OSError):  # another run was quicker
                Path(place, "made").rename(folder)
    return folder


def make_taught_gemma4(folder: Path) -> Path:
    """Write the checkpoint into `folder` and return it. RuntimeError: it did not learn."""
    import torch

    torch.set_num_threads(1)  # so small a model gains nothing by two, and its sums are always equal
    from transformers import Gemma4ForCausalLM

    tokenizer = tiny_gemma4._tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(4)
    model: Any = Gemma4ForCausalLM(tiny_gemma4._text_config())
    learner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    fixed = [(given, ["", said]) for given, said in lessons()]
    chance, sure = random.Random(4), 0
    for _ in range(STEPS_AT_MOST):
        words = ("".join(chance.choice(LETTERS) for _ in range(4)) for _ in range(2))
        ids, mask, said = _batch(tokenizer, [*fixed, *(form for w in words for form in forms(w))])
        taught = said[:, 1:]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1][taught]
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][taught], reduction="none")
        # In a row, because each step has words that it has not seen before.
        sure = sure + 1 if losses.max().item() < SURE else 0
        if sure == SURE_STEPS:
            break
        learner.zero_grad()
        losses.mean().backward()
        learner.step()
    else:
        raise RuntimeError(f"the tiny model is not sure of its lessons: {losses.max().item():.3f}")
    stop = tokenizer.convert_tokens_to_ids(tiny_gemma4.TURN_CLOSE)
    model.generation_config.update(
        bos_token_id=2, pad_token_id=0, eos_token_id=[tokenizer.eos_token_id, stop]
    )
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _batch(tokenizer: Any, examples: list[tuple[dict[str, Any], list[str]]]) -> tuple[Any, ...]:
    """(ids, attention mask, which of the ids are to be said), a row for each example."""
    import torch

    stop = tokenizer.convert_tokens_to_ids(tiny_gemma4.TURN_CLOSE)
    rows: list[tuple[list[int], list[bool]]] = []
    for given, pieces in examples:
        asked = dict(given)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked.pop("question")}],
            add_generation_prompt=True,
            tokenize=False,
            **asked,
        )
        row: tuple[list[int], list[bool]] = ([], [])
        for place, piece in enumerate([text + pieces[0], *pieces[1:]]):
            ids = tokenizer.encode(piece, add_special_tokens=False)
            row[0].extend(ids)
            row[1].extend([place % 2 == 1] * len(ids))
        rows.append(([*row[0], stop], [*row[1], True]))
    length = max(len(ids) for ids, _ in rows)
    padded = [length - len(ids) for ids, _ in rows]
    return (
        torch.tensor([[*ids, *[0] * more] for (ids, _), more in zip(rows, padded, strict=True)]),
        torch.tensor([[1] * (length - more) + [0] * more for more in padded]),
        torch.tensor([[*m, *[False] * more] for (_, m), more in zip(rows, padded, strict=True)]),
    )


if __name__ == "__main__":
    print(make_taught_gemma4(Path(sys.argv[1])))
