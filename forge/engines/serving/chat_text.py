"""A model folder's tokenizer and chat template: conversations and texts into tokens.

Reads tokenizer.json and the small configs beside it. Knows no request, no engine and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forge.engines.serving.answer_parser import MARK_WORDS, AnswerMarks
from forge.engines.serving.answer_shape import ToolSpec
from forge.engines.serving.chat_template import ChatTemplate, TemplateFault, template_fields
from forge.engines.serving.control_text import ControlBreaker, new_mark
from forge.engines.serving.refusal import ApiRefusal, invalid_field
from forge.engines.serving.request_messages import ChatMessage
from forge.engines.serving.requests import SamplingDefaults
from forge.engines.serving.token_text import TokenText

_CONFIG_BYTES = 16_000_000  # a larger config is none
# Where a file of a folder lies; None where there is none. May refuse, by whatever it raises.
FileFinder = Callable[[Path, str], Path | None]
# Gemma 4 ends a turn with the first token, and waits for the results of its calls with the second,
# after which its template writes them; but some releases' generation_config lists <eos> alone.
_TURN_ENDS = ("<turn|>", "<|tool_response>")


class ModelTextError(Exception):
    """The folder's tokenizer or template cannot be used; the message says which file and why."""


@dataclass(frozen=True)
class ModelText:
    """What stands between texts and tokens for one model.

    `stop_ids` end an answer unless ignore_eos is asked for. `template` is None for a model that was
    never taught to chat. `control` knows the texts of tokens with a meaning of their own; `marks`
    are those by which thoughts and calls are told from what is said.
    """

    tokenizer: Tokenizer
    token_text: TokenText
    stop_ids: frozenset[int]
    defaults: SamplingDefaults
    control: ControlBreaker
    marks: AnswerMarks
    template: ChatTemplate | None

    def text_ids(self, text: str) -> tuple[int, ...]:
        """`text` as it stands, its control tokens taken as such: whoever writes a raw prompt writes
        them by hand. A beginning token comes before it where the tokenizer says so."""
        return tuple(self.tokenizer.encode(text).ids)

    def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        flags: Mapping[str, Any],
        tools: Sequence[ToolSpec] = (),
    ) -> tuple[int, ...]:
        """The conversation through the model's template, with the model's turn opened.

        Only the template's own control tokens are control tokens. One that stands in a text of the
        request (a message, the result of a tool, the description of one) is encoded as the letters
        it is written in: else a user, or a page that an agent reads, could close the turn and speak
        for the system. vLLM 0.32 and transformers' default take it for the token; transformers 5.24
        has this as sanitize_control_tokens. Everything else is encoded as both do it. Raises
        ApiRefusal 400 for what the template does not take.
        """
        if self.template is None:
            raise ApiRefusal(
                400,
                "the model has no chat template: ask /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        self._check_taken(self.template, messages, flags, tools)
        mark = new_mark()
        fields = self.control.broken(template_fields(messages, tools, flags), mark)
        pieces = self.template.render(fields).split(mark)
        encoded = [self.tokenizer.encode(p, add_special_tokens=False).ids for p in pieces]
        return tuple(token for ids in encoded for token in ids)

    def _check_taken(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        flags: Mapping[str, Any],
        tools: Sequence[ToolSpec],
    ) -> None:
        """Refuse what the template would pass over in silence, and what no parser would find."""
        for name, value in flags.items():
            # Thinking that is switched off is what a template without it does anyway.
            if name not in template.variables and (value or name != "enable_thinking"):
                place = f"chat_template_kwargs.{name}"
                raise invalid_field(place, "is nothing that the model's template knows")
        if tools and not (template.takes_tools and self.marks.call_open is not None):
            raise invalid_field("tools", "are nothing that the model was taught", "unsupported")
        for number, message in enumerate(messages):
            if message.calls and not template.takes_calls:
                words = "are nothing that the model's template knows"
                raise invalid_field(f"messages[{number}].tool_calls", words, "unsupported")


def plain_file(folder: Path, name: str) -> Path | None:
    """The usual FileFinder."""
    return folder / name if (folder / name).is_file() else None


def read_model_text(folder: Path, find: FileFinder = plain_file) -> ModelText:
    """The tokenizer, template and stop tokens of the model in `folder`. Raises ModelTextError."""
    path = find(folder, "tokenizer.json")
    if path is None:
        raise ModelTextError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelTextError(f"{path} is no tokenizer: {error}") from None
    try:
        token_text = TokenText.of(tokenizer, MARK_WORDS)
    except ValueError as error:
        raise ModelTextError(f"{path}: {error}") from None
    config, model, generation = (
        _folder_json(folder, name, find)
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    source = _template_source(folder, config, find)
    try:
        template = None if source is None else ChatTemplate(source, _named_specials(config))
    except TemplateFault as error:
        raise ModelTextError(f"{folder}: {error}") from None
    return ModelText(
        tokenizer=tokenizer,
        token_text=token_text,
        stop_ids=_stop_ids(tokenizer, config, model, generation),
        defaults=_sampling_defaults(generation),
        control=ControlBreaker(token_text.names.values()),
        marks=AnswerMarks.of(tokenizer),
        template=template,
    )


def _folder_json(folder: Path, name: str, find: FileFinder) -> dict[str, Any]:
    """The JSON object in a file of the folder; empty where there is no such file."""
    path = find(folder, name)
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_CONFIG_BYTES))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ModelTextError(f"{path} is no JSON object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any], find: FileFinder) -> str | None:
    """The template's own file, else what tokenizer_config.json has, its "default" among several."""
    path = find(folder, "chat_template.jinja")
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except ValueError:
            raise ModelTextError(f"{path} is no UTF-8") from None
    told = config.get("chat_template")
    if isinstance(told, list):
        named = {item.get("name"): item.get("template") for item in told if isinstance(item, dict)}
        told = named.get("default")
    return told if isinstance(told, str) else None


def _token_words(value: Any) -> str | None:
    """A token's text as configs spell it: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_specials(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like by name, those of the model's own kind included."""
    further = config.get("extra_special_tokens")
    told = {**config, **(further if isinstance(further, dict) else {})}
    found = {name: _token_words(value) for name, value in told.items() if name.endswith("_token")}
    return {name: words for name, words in found.items() if words is not None}


def _stop_ids(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> frozenset[int]:
    """All that end an answer: of both configs, of the tokenizer, and Gemma 4's ends of a turn."""
    inner = model.get("text_config")
    found: set[int] = set()
    for place in (model, inner if isinstance(inner, dict) else {}, generation):
        told = place.get("eos_token_id")
        found.update(n for n in (told if isinstance(told, list) else [told]) if type(n) is int)
    for words in (_token_words(config.get("eos_token")), *_TURN_ENDS):
        token = tokenizer.token_to_id(words) if words else None
        if token is not None:
            found.add(token)
    return frozenset(found)


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """What the model's makers recommend in generation_config.json, as vLLM takes it too."""
    usual = SamplingDefaults()

    def number(name: str, default: float) -> float:
        value = generation.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return default
        return float(value)

    return SamplingDefaults(
        temperature=number("temperature", usual.temperature),
        top_k=int(number("top_k", usual.top_k)),
        top_p=number("top_p", usual.top_p) or usual.top_p,
        min_p=number("min_p", usual.min_p),
        repetition_penalty=number("repetition_penalty", 1.0) or usual.repetition_penalty,
    )
