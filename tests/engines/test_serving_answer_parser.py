"""Answers taken apart: thoughts, calls and words by their tokens, whatever the cuts between."""

from __future__ import annotations

import json
import random
import unittest
from collections.abc import Sequence
from typing import Any

from forge.engines.serving.answer_parser import AnswerMarks, AnswerParser, AnswerParts
from forge.engines.serving.answer_shape import CallsWanted
from forge.engines.serving.token_text import TokenText
from tests.engines.serving_folder import CALL_CONTROL, CONTROL, small_tokenizer
from tests.engines.test_serving_call_syntax import as_the_template_writes, drawn_fields

TOKENIZER = small_tokenizer(CALL_CONTROL)
PIECES = TokenText.of(TOKENIZER)
MARKS = AnswerMarks.of(TOKENIZER)
WORDS = TOKENIZER.get_vocab()
SPECIAL = (*CONTROL, *CALL_CONTROL)


def tokens_of(text: str, chance: random.Random | None = None) -> list[int]:
    """`text` in tokens, control tokens as such; with `chance`, now in bytes and now in pieces."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if chance is None:
        return list(ids)
    cut: list[int] = []
    for token in ids:
        piece = PIECES.piece(token)
        if piece is None or chance.random() < 0.5:
            cut.append(token)
        else:
            cut += [WORDS[f"<0x{value:02X}>"] for value in piece]
    return cut


def letters_of(text: str) -> list[int]:
    """`text` in bytes, so that none of it is a control token."""
    return [WORDS[f"<0x{value:02X}>"] for value in text.encode()]


def quoted(source: str) -> str:
    """A call that is written with plain quotes, with Gemma 4's."""
    return source.replace('"', '<|"|>')


def call_of(source: str) -> str:
    return f"<|tool_call>call:{quoted(source)}<tool_call|>"


class Answer:
    """What an answer of `tokens` comes to, taken token by token."""

    def __init__(
        self,
        tokens: Sequence[int],
        calls: CallsWanted = "many",
        stops: Sequence[str] = (),
        begun: Sequence[int] | None = None,
    ) -> None:
        parser = AnswerParser(PIECES, stops, MARKS, calls=calls, thought_begun=begun)
        self.each: list[AnswerParts] = []
        self.taken = 0
        for token in tokens:
            parser.take(token)
            self.taken += 1
            self.each.append(parser.parts())
            if parser.over:
                break
        parser.finish()
        self.each.append(parser.parts())
        self.content = "".join(parts.content for parts in self.each)
        self.thought = "".join(parts.thought for parts in self.each)
        made = [call for parts in self.each for call in parts.calls]
        self.calls = [(call.name, json.loads(call.arguments)) for call in made]
        self.broken = sum(parts.broken for parts in self.each)
        self.thought_tokens = parser.thought_tokens
        self.over = parser.over

    @property
    def told(self) -> tuple[str, str, list[tuple[str, Any]], int]:
        return self.content, self.thought, self.calls, self.broken


def answer(text: str, calls: CallsWanted = "many", **options: Any) -> Answer:
    return Answer(tokens_of(text), calls, **options)


THOUGHT = "<|channel>thought\n{}<channel|>"


class Thoughts(unittest.TestCase):
    def test_a_thought_and_what_is_said(self) -> None:
        told = answer(THOUGHT.format("so, hm.\n") + "hello")
        self.assertEqual(told.told, ("hello", "so, hm.\n", [], 0))

    def test_its_tokens_are_counted_without_the_marks(self) -> None:
        inside = tokens_of("thought\nso, hm.")
        tokens = [MARKS.thought_open, *inside, MARKS.thought_close, *tokens_of("hello")]
        told = Answer([token for token in tokens if token is not None])
        self.assertEqual(told.thought_tokens, len(inside))

    def test_an_empty_thought(self) -> None:
        for text in (THOUGHT.format(""), "<|channel><channel|>", "<|channel>thought<channel|>"):
            self.assertEqual(answer(text + "x").told, ("x", "", [], 0))

    def test_several_thoughts(self) -> None:
        told = answer(THOUGHT.format("a") + "b" + THOUGHT.format("c") + "d")
        self.assertEqual(told.told, ("bd", "ac", [], 0))

    def test_a_channel_of_another_name_is_thought_with_its_name(self) -> None:
        for inside in ("thoughts\nx", "x", "though", "thought x", "\nthought\n", "Thought\nx"):
            self.assertEqual(answer(f"<|channel>{inside}<channel|>y").told, ("y", inside, [], 0))

    def test_a_thought_that_is_cut_off(self) -> None:
        self.assertEqual(answer("<|channel>thought\nso").told, ("", "so", [], 0))
        self.assertEqual(answer("<|channel>thought\n").told, ("", "", [], 0))
        self.assertEqual(answer("<|channel>").told, ("", "", [], 0))

    def test_a_thought_that_the_prompt_has_begun(self) -> None:
        for begun in ("", "thought\n", "thought", "thought\nI had "):
            rest = "thought\n"[len(begun) :] if len(begun) < len("thought\n") else ""
            told = answer(f"{rest}so<channel|>x", begun=tokens_of(begun))
            self.assertEqual(told.told, ("x", "so", [], 0), begun)
        self.assertEqual(answer("x").told, ("x", "", [], 0))

    def test_where_a_prompt_ends(self) -> None:
        for prompt, begun in (
            ("<bos><|turn>user\na<turn|>\n<|turn>model\n", None),
            ("<|turn>model\n<|channel>thought\n<channel|>", None),
            ("<|turn>model\n<|channel>thought\n", "thought\n"),
            ("<|turn>model\n<|channel>", ""),
            ("<|channel>thought\nx<channel|>y<|channel>", ""),
            ("<|channel>x<|turn>model\n", None),
            ("", None),
        ):
            expected = None if begun is None else tuple(tokens_of(begun))
            self.assertEqual(MARKS.opened_thought(tokens_of(prompt)), expected, prompt)

    def test_a_close_without_an_open_is_nothing(self) -> None:
        self.assertEqual(answer("a<channel|>b").told, ("ab", "", [], 0))

    def test_stop_texts_do_not_look_at_thoughts(self) -> None:
        told = answer(THOUGHT.format("a STOP b") + "c STOP d", stops=["STOP"])
        self.assertEqual(told.told, ("c ", "a STOP b", [], 0))
        self.assertTrue(told.over)

    def test_thoughts_go_out_as_they_come(self) -> None:
        tokens = tokens_of("<|channel>thought\nhello world")
        told = Answer(tokens)
        before = "".join(parts.thought for parts in told.each[:-2])
        self.assertEqual(before, "hello world"[: len(before)])
        self.assertGreater(len(before), 5)


class Calls(unittest.TestCase):
    def test_one_call(self) -> None:
        told = answer(call_of('look{city:"Oslo",n:2}'))
        self.assertEqual(told.told, ("", "", [("look", {"city": "Oslo", "n": 2})], 0))

    def test_several_calls_and_words_around_them(self) -> None:
        told = answer("a" + call_of("f{}") + call_of("g{x:1}") + "b" + call_of("f{}"))
        self.assertEqual(told.told, ("ab", "", [("f", {}), ("g", {"x": 1}), ("f", {})], 0))

    def test_a_call_behind_a_thought_closed_or_not(self) -> None:
        for close in ("<channel|>", ""):
            told = answer(f"<|channel>thought\nso{close}" + call_of("f{}"))
            self.assertEqual(told.told, ("", "so", [("f", {})], 0))

    def test_a_call_that_another_token_ends(self) -> None:
        """It is whole, and the model has gone on: vLLM 0.32 takes a turn's end for a call's."""
        for end in ("", "<turn|>", "<eos>", "<|channel>x<channel|>", call_of("f{}")):
            told = answer(quoted('<|tool_call>call:look{city:"Oslo"}') + end)
            self.assertEqual(told.calls[0], ("look", {"city": "Oslo"}))
            self.assertEqual((told.content, told.broken), ("", 0))

    def test_one_call_ends_the_answer_where_one_is_wanted(self) -> None:
        text = "a" + call_of("f{}") + call_of("g{}") + "b"
        told = answer(text, "one")
        self.assertEqual(told.told, ("a", "", [("f", {})], 0))
        self.assertEqual(told.taken, len(tokens_of("a" + call_of("f{}"))))
        open_ended = text.replace("<tool_call|>", "")
        self.assertEqual(answer(open_ended, "one").told, ("a", "", [("f", {})], 0))

    def test_what_was_held_back_for_a_stop_text_is_said_when_one_call_ends_the_answer(self) -> None:
        told = answer("a ST" + call_of("f{}"), "one", stops=["STOP"])
        self.assertEqual(told.told, ("a ST", "", [("f", {})], 0))

    def test_without_tools_a_call_is_text_and_its_marks_are_not(self) -> None:
        told = answer("a" + call_of('f{x:"y"}') + "b", "none")
        self.assertEqual(told.told, ("acall:f{x:y}b", "", [], 0))

    def test_a_broken_call_is_said_to_the_letter(self) -> None:
        for inside in (
            "look{city:Oslo",
            'look{city:"Oslo}',
            'look{city:"Oslo" days:2}',
            "look(city)",
            '{"name": "look"}',
            'look{city:"Oslo"}}',
        ):
            text = "a" + call_of(inside) + "b"
            self.assertEqual(answer(text).told, (text, "", [], 1), inside)

    def test_a_call_that_is_cut_off_is_said_to_the_letter(self) -> None:
        text = "a" + call_of('look{city:"Oslo",days:[1,2]}')
        tokens = tokens_of(text)
        for end in range(2, len(tokens) - 2):
            told = Answer(tokens[:end])
            spelt = TOKENIZER.decode(tokens[:end], skip_special_tokens=False)
            self.assertEqual(told.told, (spelt, "", [], 1))

    def test_a_call_that_another_token_breaks_is_said_to_the_letter(self) -> None:
        begun = quoted('<|tool_call>call:look{city:"Os')
        for breaks, content in (
            ("<turn|>x", f"{begun}x"),
            ("<|tool_response>", begun),
            ("<|channel>thought\nx<channel|>y", f"{begun}y"),
        ):
            told = answer(begun + breaks)
            self.assertEqual((told.content, told.calls, told.broken), (content, [], 1))
        told = answer(begun + call_of("f{}"))
        self.assertEqual(told.told, (begun, "", [("f", {})], 1))

    def test_a_stop_text_does_not_look_into_calls_but_into_what_is_none(self) -> None:
        whole = answer(call_of('f{x:"a STOP b"}') + "c", stops=["STOP"])
        self.assertEqual(whole.told, ("c", "", [("f", {"x": "a STOP b"})], 0))
        broken = answer(call_of('f{x:"a STOP b"') + "c", stops=["STOP"])
        self.assertEqual(broken.content, quoted('<|tool_call>call:f{x:"a '))
        self.assertTrue(broken.over)

    def test_letters_that_spell_a_mark_are_letters(self) -> None:
        for text in (*CALL_CONTROL, call_of('f{x:"y"}'), THOUGHT.format("x")):
            self.assertEqual(Answer(letters_of(text)).told, (text, "", [], 0), text)
        spelt = "<tool_call|><|channel>"
        tokens = tokens_of(quoted('<|tool_call>call:f{x:"')) + letters_of(spelt)
        told = Answer([*tokens, *letters_of('<|"|>'), *tokens_of(quoted('"}<tool_call|>'))])
        self.assertEqual(told.calls, [("f", {"x": spelt + '<|"|>'})])

    def test_half_a_character_before_a_mark_is_one_replacement(self) -> None:
        half = letters_of("é")[:1]
        mark = tokens_of("<|tool_call>")
        quote = tokens_of('<|"|>')
        call = [*mark, *tokens_of("call:f{x:"), *quote, *half, *quote, *tokens_of("}<tool_call|>")]
        self.assertEqual(Answer(call).calls, [("f", {"x": "\ufffd"})])
        cut = [*half, *mark, *letters_of("é")[1:]]
        self.assertEqual(Answer(cut).content, "\ufffd<|tool_call>\ufffd")

    def test_a_model_without_marks_has_only_content(self) -> None:
        plain = AnswerMarks.of(small_tokenizer())
        self.assertEqual(plain.call_open, None)
        parser = AnswerParser(PIECES, (), plain, calls="many")
        for token in tokens_of("a" + call_of("f{}") + THOUGHT.format("b")):
            parser.take(token)
        parser.finish()
        self.assertEqual(parser.parts().content, "acall:f{}thought\nb")


class Cuts(unittest.TestCase):
    """The same answer in other tokens comes to the same, and nothing of it is lost."""

    def test_random_answers_in_random_tokens(self) -> None:
        chance = random.Random(3)
        for _ in range(300):
            content, thought, calls, text = "", "", [], ""
            for _ in range(chance.randrange(1, 6)):
                kind = chance.randrange(3)
                if kind == 0:
                    said = "".join(chance.choice("ab é字<|>:{}\n") for _ in range(8))
                    content, text = content + said, text + said
                elif kind == 1:
                    inside = "".join(chance.choice("ab é字<|>\n") for _ in range(6))
                    thought, text = thought + inside, text + THOUGHT.format(inside)
                else:
                    arguments = drawn_fields(chance)
                    calls.append(("f", arguments))
                    written = as_the_template_writes(arguments).replace("\udc00", '<|"|>')
                    text += f"<|tool_call>call:f{written}<tool_call|>"
            for cut in (None, chance, chance):
                told = Answer(tokens_of(text, cut))
                self.assertEqual(told.told, (content, thought, calls, 0), text)

    def test_whatever_tokens_come_every_letter_is_somewhere(self) -> None:
        """A thousand answers of random tokens: no fault, and as many letters as the tokens have."""
        chance = random.Random(4)
        sayable = [WORDS[f"<0x{value:02X}>"] for value in b"ab:{},call"]
        control = [WORDS[word] for word in CALL_CONTROL]
        for _ in range(1000):
            tokens = [
                chance.choice(control if chance.random() < 0.3 else sayable) for _ in range(40)
            ]
            told = Answer(tokens)
            spelt = b"".join(PIECES.piece(token) or b"" for token in tokens).decode()
            inside = "".join(
                f"call:{name}{as_the_template_writes(arguments)}" for name, arguments in told.calls
            )
            plain = told.content
            for word in CALL_CONTROL:
                plain = plain.replace(word, "")
            letters = sorted(plain + told.thought + inside.replace("\udc00", ""))
            if not any(arguments for _, arguments in told.calls):
                self.assertEqual(letters, sorted(spelt), tokens)


if __name__ == "__main__":
    unittest.main()
