"""The bodies of /v1/chat/completions and /v1/completions, read strictly into what is to be done.

Every field of OpenAI's API and of vLLM's is honoured or refused by name: none is passed over in
silence. Knows no tokenizer, no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from forge.engines.serving.answer_shape import CallsWanted, ToolSpec
from forge.engines.serving.refusal import ApiRefusal, invalid_field
from forge.engines.serving.request_messages import ChatMessage, read_messages
from forge.engines.serving.request_tools import (
    ShapeOrder,
    ToolOrder,
    read_shape_order,
    read_tool_order,
)
from forge.engines.serving.slot_engine import MOST_LOGPROBS, Sampling

# vLLM takes smaller temperatures for greedy too: a division by them overflows.
_GREEDY_BELOW = 1e-5
_COMPLETION_TOKENS = 16  # of OpenAI's API, where a text completion names no limit
_MOST_STOPS, _STOP_CHARACTERS = 16, 1_000

# Fields that this server does not carry out, each with the values at which they ask for nothing.
# What the one endpoint carries out, the other may still take where it asks for nothing.
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
}

_Unit = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_TRIED_TYPES = ("str", "list[str]", "bool", "int", "float")
_Scalar = bool | int | float | str
_Body = TypeVar("_Body", bound=BaseModel)
_Value = TypeVar("_Value")


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _SharedBody(BaseModel):
    """What both endpoints take. None: not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: _Count | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: _Unit | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[_Token] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    cache_salt: str = Field(default="", min_length=1, max_length=1_000)
    user: str | None = None  # who asks, for the caller's own books: it changes nothing
    response_format: Any = None
    structured_outputs: Any = None


class _ChatBody(_SharedBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, _Scalar | None] = {}
    tools: Any = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True


class _CompletionBody(_SharedBody):
    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that does not say: OpenAI's defaults, or those of the model's makers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class GenerationOrder:
    """What is to be generated, whatever the endpoint. max_tokens None: as many as there is room.

    `seeded` false: the caller gave no seed, and one is to be drawn. `stops` end the answer before
    themselves, `stop_ids` are tokens that end it. `tokens_as_ids` tells tokens as "token_id:N".
    `shape` is what the answer must be, as its `place` in the request says. `thinking`: the model
    may think first, and the shape holds for what comes after that.
    Kept prefixes are shared with requests of the same `cache_salt` alone.
    """

    model: str
    max_tokens: int | None
    sampling: Sampling
    seeded: bool
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    tokens_as_ids: bool
    shape: ShapeOrder | None = None
    thinking: bool = False
    cache_salt: str = ""


@dataclass(frozen=True)
class ChatOrder:
    """A conversation to answer. `tools` are those that the model is told of, `calls` how many its
    answer may have. `tells_thought` false: the model's thought is left out of the answer."""

    generation: GenerationOrder
    messages: tuple[ChatMessage, ...]
    template_flags: Mapping[str, _Scalar | None]
    tools: tuple[ToolSpec, ...] = ()
    calls: CallsWanted = "none"
    tells_thought: bool = True


@dataclass(frozen=True)
class CompletionOrder:
    """A text to continue, or the tokens of one."""

    generation: GenerationOrder
    prompt: str | tuple[int, ...]


def read_chat_order(data: bytes, defaults: SamplingDefaults) -> ChatOrder:
    """The body of a chat completion. Raises ApiRefusal 400 with the field's name."""
    body = _checked_body(_ChatBody, data)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        if body.max_tokens != body.max_completion_tokens:
            raise invalid_field("max_tokens", "differs from max_completion_tokens: give one")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    if body.logprobs and not body.include_reasoning:
        raise invalid_field(
            "include_reasoning", "must be true with logprobs, which tell the tokens"
        )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = read_tool_order(body.tools, body.tool_choice, body.parallel_tool_calls)
    flags = _template_flags(body)
    generation = _generation(body, limit, logprobs, defaults, tools)
    return ChatOrder(
        generation=replace(generation, thinking=flags.get("enable_thinking") is True),
        messages=read_messages(body.messages),
        template_flags=flags,
        tools=tools.tools,
        calls=tools.calls,
        tells_thought=body.include_reasoning,
    )


def _template_flags(body: _ChatBody) -> dict[str, _Scalar | None]:
    """chat_template_kwargs, and what reasoning_effort says of thinking.

    Gemma 4 has one switch and no grades: "none" is off and all else is on, as in vLLM 0.32.
    """
    flags = dict(body.chat_template_kwargs)
    switch = flags.get("enable_thinking", False)
    if not isinstance(switch, bool):
        raise invalid_field("chat_template_kwargs.enable_thinking", "must be true or false")
    if body.reasoning_effort is not None:
        wanted = body.reasoning_effort != "none"
        if flags.get("enable_thinking", wanted) != wanted:
            words = "says the opposite of chat_template_kwargs.enable_thinking"
            raise invalid_field("reasoning_effort", words)
        flags["enable_thinking"] = wanted
    return flags


def read_completion_order(data: bytes, defaults: SamplingDefaults) -> CompletionOrder:
    """The body of a text completion. Raises ApiRefusal 400 with the field's name."""
    body = _checked_body(_CompletionBody, data)
    logprobs = -1 if body.logprobs is None else body.logprobs
    limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return CompletionOrder(
        generation=_generation(body, limit, logprobs, defaults), prompt=_prompt(body.prompt)
    )


def _checked_body(model: type[_Body], data: bytes) -> _Body:
    """`data` as one of the bodies above, without the fields that ask for nothing."""
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiRefusal(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiRefusal(400, "the body is not a JSON object", code="invalid_json")
    # A null is what OpenAI's client sends for what its user left out.
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, harmless in _ASKS_NOTHING.items():
        if name in fields and name not in model.model_fields:
            if not any(_same(fields[name], value) for value in harmless):
                raise invalid_field(name, "is not supported by this server", "unsupported")
            del fields[name]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _field_refusal(error) from None


def _same(value: Any, other: Any) -> bool:
    """Equal, and not only because Python holds True and 1 for equal."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _field_refusal(error: ValidationError) -> ApiRefusal:
    """The first fault that pydantic found, with the field's place in the body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Behind a field with several types stands the type that was tried: that is no place.
    place = [part for part in first["loc"] if part not in _TRIED_TYPES]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        return invalid_field(param, "is not supported by this server", "unsupported")
    if first["type"] == "missing":
        return invalid_field(param, "is missing", "missing")
    return invalid_field(param, first["msg"][:1].lower() + first["msg"][1:])


def _generation(
    body: _SharedBody,
    limit: int | None,
    logprobs: int,
    defaults: SamplingDefaults,
    tools: ToolOrder | None = None,
) -> GenerationOrder:
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "needs stream: true")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MOST_STOPS:
        raise invalid_field("stop", f"has more than {_MOST_STOPS} texts")
    if any(not 0 < len(stop) <= _STOP_CHARACTERS for stop in stops):
        raise invalid_field("stop", f"each text has 1 to {_STOP_CHARACTERS} characters")
    temperature = _given(body.temperature, defaults.temperature)
    return GenerationOrder(
        model=body.model,
        max_tokens=limit,
        sampling=Sampling(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=max(0, _given(body.top_k, defaults.top_k)),
            top_p=_given(body.top_p, defaults.top_p),
            min_p=_given(body.min_p, defaults.min_p),
            repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=body.seed or 0,
            logprobs=logprobs,
        ),
        seeded=body.seed is not None,
        stops=tuple(dict.fromkeys(stops)),
        stop_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tokens_as_ids=body.return_tokens_as_token_ids,
        shape=read_shape_order(body.response_format, body.structured_outputs, tools or ToolOrder()),
        cache_salt=body.cache_salt,
    )


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """A text, a list of token ids, or a list with one of these in it."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise invalid_field("prompt", "must be a text or a list of token ids")
    if any(isinstance(item, (str, list)) for item in prompt):
        raise invalid_field("prompt", "several prompts in one request are not supported")
    for item in prompt:
        if type(item) is not int or not 0 <= item < 2**31:
            raise invalid_field("prompt", "must be a text or a list of token ids")
    return tuple(prompt)
