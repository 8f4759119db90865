"""Holds an answer to its shape: which tokens may come next, after a thought that is free.

The work is llguidance's: grammars compiled, and a mask over the vocabulary made of where the answer
stands. Knows no request, no engine and no HTTP.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from forge.engines.serving.answer_parser import MARK_WORDS
from forge.engines.serving.answer_shape import AnswerShape
from forge.engines.serving.call_grammar import CallTokens, call_grammar
from forge.engines.serving.call_texts import CallGrammarRefused
from forge.engines.serving.refusal import ApiRefusal, invalid_field
from forge.engines.serving.slot_engine import TokenConstraint, TokenMask

_SHAPE_CHARACTERS = 200_000  # of one grammar
_SHAPES_KEPT = 32
_SHAPE_REFUSAL_CHARACTERS = 500
_SHAPE_CALL_WORDS = ("<|tool_call>", "<tool_call|>", '<|"|>')
_SHAPE_THOUGHT_OPEN, _SHAPE_THOUGHT_CLOSE = "<|channel>", "<channel|>"
# What a JSON answer looks like. Every option is named, for a schema could bring its own in
# "x-guidance". Blanks are bounded, or a model could go on with them for ever; \u escapes are left
# out, or a key could be spelt past the schema that its plain form has.
_SHAPE_JSON_FORM: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{1,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
    "coerce_one_of": False,
    "lenient": False,
}


class ConstraintBroken(Exception):
    """An answer cannot be held to its shape any further; the message says why."""


class Constraints:
    """Makes the constraints of one model's answers, which `stop_ids` may end. Any thread may ask.

    The vocabulary is prepared when the first one is asked for: 200 MB for Gemma's 262,144 tokens
    and 2.5 s on 2 quiet cores of an AMD EPYC (Zen 4), 6.6 s on busy ones, which a server without
    constraints does not pay. After that a constraint takes milliseconds and a mask 7 to 300 µs on
    the busy ones; a text whose length is bounded took 2.7 ms for one.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self._stops = sorted(token for token in stop_ids if token < size)
        self._lock = threading.Lock()  # guards all that follows
        self._prepared: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def begin(
        self,
        shape: AnswerShape,
        thinking: bool,
        *,
        in_thought: bool = False,
        place: str = "response_format",
    ) -> TokenConstraint:
        """What holds one answer to `shape`, which stands in the request at `place`; of one with
        `said`, that stands there, and its tools at "tools".

        thinking: a thought may come first, and is free; in_thought: the prompt has opened it.
        Takes a while (see above), so not for an event loop. Raises ApiRefusal 400 that names what
        of the shape cannot be kept to: nothing of it is passed over.
        """
        if not self._stops:
            raise ApiRefusal(400, "the model names no token that ends an answer")
        with self._lock:
            try:
                if shape.said is not None:
                    self._matcher(self._grammar(shape.said))  # so what fails now is at its place
                    place = "tools"
                body = self._matcher(self._grammar(shape))
                answer = _ShapedAnswer(body, self._stops)
                opened = self._tokenizer.token_to_id(_SHAPE_THOUGHT_OPEN)
                closed = self._tokenizer.token_to_id(_SHAPE_THOUGHT_CLOSE)
                if not (thinking or in_thought) or opened is None or closed is None:
                    return answer
                thought = "" if in_thought else r'"thought\n"'
                free = self._matcher(_shape_lark(f"start: {thought} /(?s:.*)/ <[{closed}]>"))
            except (ConstraintBroken, CallGrammarRefused) as error:
                raise invalid_field(place, str(error)[:_SHAPE_REFUSAL_CHARACTERS]) from None
            return _ThoughtFirst(answer, free, opened, closed, in_thought)

    def _grammar(self, shape: AnswerShape) -> str:
        """`shape` as llguidance takes it: JSON with the one grammar, behind which that of what is
        `said` may stand. Raises ConstraintBroken and CallGrammarRefused."""
        from llguidance import LLMatcher

        if shape.kind == "json_object":
            return _shape_json({"type": "object"})
        if shape.kind == "json_schema":
            return _shape_json(shape.schema or {})
        if shape.kind == "regex":
            return str(LLMatcher.grammar_from_regex(shape.text))
        lark = shape.text
        if shape.kind == "choice":
            lark = "start: " + " | ".join(json.dumps(choice) for choice in shape.choices)
        if shape.kind == "calls":
            found = [self._tokenizer.token_to_id(word) for word in _SHAPE_CALL_WORDS]
            tokens = [token for token in found if token is not None]
            if len(tokens) < len(found):
                raise ConstraintBroken("the model has no tokens for calls")
            lark = call_grammar(shape, CallTokens(*tokens))
        return _shape_lark(lark, "" if shape.said is None else self._grammar(shape.said))

    def _matcher(self, grammar: str) -> Any:
        """A matcher at the begin of `grammar`. Raises ConstraintBroken."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if len(grammar) > _SHAPE_CHARACTERS:
            raise ConstraintBroken(f"has more than {_SHAPE_CHARACTERS} characters")
        if self._prepared is None:
            text = _with_special_marks(self._tokenizer).to_str()
            self._prepared = LLTokenizer(text, eos_token=self._stops)
        if grammar not in self._kept:
            limits = LLParserLimits(
                initial_lexer_fuel=200_000,
                max_lexer_states=50_000,
                max_grammar_size=200_000,
                verbose_errors=False,
            )
            made = LLMatcher(self._prepared, grammar, log_level=0, limits=limits)
            # A first token shows what compiling alone does not: a pattern that grows too large.
            allowed = int.from_bytes(_shape_mask(made), "little")
            trial = made.deep_copy()
            trial.consume_token((allowed & -allowed).bit_length() - 1)
            _shape_mask(trial)
            self._kept[grammar] = made
        self._kept.move_to_end(grammar)
        while len(self._kept) > _SHAPES_KEPT:
            self._kept.popitem(last=False)
        return self._kept[grammar].deep_copy()


class _ShapedAnswer:
    """An answer from its first token to the one that ends it."""

    def __init__(self, matcher: Any, stops: list[int]) -> None:
        self._matcher = matcher
        self._stops = stops
        self._ended = False
        self._mask: bytes | None = None

    def mask(self) -> TokenMask:
        if self._mask is None:
            self._mask = _shape_mask(self._matcher)
        return self._mask

    def take(self, token: int) -> None:
        if token in self._stops and self._matcher.is_accepting():
            self._ended = True  # with ignore_eos others of its kind follow
        elif self._ended or not self._matcher.consume_token(token):
            why = self._matcher.get_error() or "the answer is complete"
            raise ConstraintBroken(f"token {token} is not allowed here: {why}")
        else:
            self._mask = None


class _ThoughtFirst:
    """A thought, of text and nothing else, and then the answer; or the answer at once."""

    def __init__(
        self, answer: _ShapedAnswer, free: Any, opened: int, closed: int, inside: bool
    ) -> None:
        self._answer = answer
        self._free = free
        self._opened, self._closed = opened, closed
        self._place = "thought" if inside else "begin"
        self._mask: bytes | None = None

    def mask(self) -> TokenMask:
        if self._place == "answer":
            return self._answer.mask()
        if self._mask is None:
            if self._place == "thought":
                self._mask = _shape_mask(self._free)
            else:
                either = bytearray(self._answer.mask())
                either[self._opened // 8] |= 1 << self._opened % 8
                self._mask = bytes(either)
        return self._mask

    def take(self, token: int) -> None:
        if self._place == "answer" or (self._place == "begin" and token != self._opened):
            self._place = "answer"
            self._answer.take(token)
        elif self._place == "begin":
            self._place = "thought"
        elif not self._free.consume_token(token):
            raise ConstraintBroken(f"token {token} is not allowed in a thought")
        elif token == self._closed:
            self._place = "answer"
        self._mask = None


def _with_special_marks(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer`, or a copy of it, in which all of the model's marks are special: then no text can
    be spelt with them."""
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    marks = {word for word in MARK_WORDS if tokenizer.token_to_id(word) is not None}
    if marks <= special:
        return tokenizer
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.add_special_tokens([AddedToken(word, special=True) for word in sorted(marks)])
    return copied


def _shape_mask(matcher: Any) -> bytes:
    """Which tokens may come next. Raises ConstraintBroken for none, or if the matcher gave up."""
    mask: bytes = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        words = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise ConstraintBroken(words or "no token is allowed")
    return mask


def _shape_lark(text: str, said: str = "") -> str:
    """The grammar `text`, in which @said is the one of `said`."""
    others = [part | {"name": "said"} for part in json.loads(said)["grammars"]] if said else []
    return json.dumps({"grammars": [{"lark_grammar": text}, *others]})


def _shape_json(schema: Mapping[str, Any]) -> str:
    """JSON that `schema` allows. Raises ConstraintBroken for what llguidance would not hold to."""
    from llguidance import LLMatcher

    try:
        form: Any = _SHAPE_JSON_FORM
        text = json.dumps(schema, allow_nan=False)
        for part in _shape_parts(schema):
            _check_shape_keys(part)
        return str(LLMatcher.grammar_from_json_schema(text, overrides=form))
    except RecursionError:
        raise ConstraintBroken("the schema is nested too deeply") from None
    except ValueError as error:
        raise ConstraintBroken(str(error)) from None


def _shape_parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """`schema` and every object within it that may be one; values that it names are none."""
    if isinstance(schema, Mapping):
        yield schema
    for name, part in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if isinstance(part, Mapping | list) and name not in (
            "const",
            "enum",
            "default",
            "examples",
        ):
            yield from _shape_parts(part)


def _check_shape_keys(schema: Mapping[str, Any]) -> None:
    """Keys that no name is given for may come twice, and a reader keeps one of them."""
    least, named = schema.get("minProperties"), schema.get("required")
    known = len(named) if isinstance(named, list) else 0
    if isinstance(least, int) and least > max(1, known):
        raise ConstraintBroken(f"minProperties: {least} keys of any name cannot be told apart")
