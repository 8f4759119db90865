"""Tokens into text: never half a character, never a text that changes, stop texts cut anywhere."""

from __future__ import annotations

import json
import random
import unittest
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

from forge.engines.serving.token_text import TextStream, TokenText
from tests.engines.serving_folder import CONTROL, small_tokenizer

HARD_TEXTS = (
    "hello world",
    "käse, naïve, ﬁ, ẞ",
    "👋🏽 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "e\u0301 a\u030a\u0323 नमस्ते ข้าว",
    "日本語 \u200d\u200b\ufeff \U0010ffff",
    "line\nend\r\n\ttab \x00\x7f",
    "\ufffd is a character as well as any other \ufffd",
    "   three   blanks   ",
)


def streamed(text: TextStream, tokens: Sequence[int]) -> list[str]:
    """What came out for each token, and what came at the end."""
    return [*(text.take(token) for token in tokens), text.finish()]


class TokenTextCase(unittest.TestCase):
    tokenizer: Tokenizer
    token_text: TokenText

    @classmethod
    def setUpClass(cls) -> None:
        cls.tokenizer = small_tokenizer()
        cls.token_text = TokenText.of(cls.tokenizer)

    def byte(self, value: int) -> int:
        found = self.tokenizer.token_to_id(f"<0x{value:02X}>")
        assert found is not None
        return found

    def bytes_of(self, text: str) -> list[int]:
        """`text` spelt in byte tokens alone."""
        return [self.byte(value) for value in text.encode()]


class Pieces(TokenTextCase):
    def test_every_token_has_its_bytes(self) -> None:
        words = self.tokenizer.get_vocab()
        self.assertEqual(self.token_text.piece(words["hell"]), b"hell")
        self.assertEqual(self.token_text.piece(words["▁w"]), b" w")
        self.assertEqual(self.token_text.piece(words["<0xF0>"]), b"\xf0")
        for word in CONTROL:
            self.assertIsNone(self.token_text.piece(words[word]))
            self.assertEqual(self.token_text.name(words[word]), word)
        self.assertIsNone(self.token_text.piece(10**6))
        self.assertEqual(self.token_text.name(10**6), "")
        self.assertEqual(self.token_text.name(words["<0xF0>"]), "\ufffd")
        self.assertEqual(self.token_text.name(words["▁w"]), " w")

    def test_the_text_is_the_tokenizer_s_own(self) -> None:
        for text in HARD_TEXTS:
            with self.subTest(text=text):
                ids = self.tokenizer.encode(text).ids
                self.assertEqual("".join(streamed(TextStream(self.token_text), ids)), text)
                self.assertEqual(self.tokenizer.decode(ids), text)

    def test_byte_by_byte_each_piece_is_whole_characters(self) -> None:
        for text in HARD_TEXTS:
            with self.subTest(text=text):
                pieces = streamed(TextStream(self.token_text), self.bytes_of(text))
                self.assertEqual("".join(pieces), text)
                self.assertEqual([piece for piece in pieces if piece], list(text))

    def test_control_tokens_and_unknown_ones_give_no_text(self) -> None:
        words = self.tokenizer.get_vocab()
        ids = [words["<bos>"], words["hell"], words["<|turn>"], 5_000, words["<turn|>"]]
        self.assertEqual("".join(streamed(TextStream(self.token_text), ids)), "hell")

    def test_broken_bytes_are_told_once_and_change_nothing_before_them(self) -> None:
        """tokenizers itself would take back the euro sign when the broken byte comes."""
        euro = self.bytes_of("€")
        pieces = streamed(TextStream(self.token_text), [*euro, self.byte(0xFF), *euro])
        self.assertEqual(pieces, ["", "", "€", "\ufffd", "", "", "€", ""])
        self.assertEqual(self.tokenizer.decode([*euro, self.byte(0xFF)]), "\ufffd" * 4)

    def test_half_a_character_at_the_end_is_one_replacement(self) -> None:
        half = self.bytes_of("👋")[:3]
        self.assertEqual(streamed(TextStream(self.token_text), half), ["", "", "", "\ufffd"])

    def test_half_a_character_before_a_word_is_one_replacement(self) -> None:
        ids = [*self.bytes_of("👋")[:2], self.tokenizer.get_vocab()["hell"]]
        self.assertEqual("".join(streamed(TextStream(self.token_text), ids)), "\ufffdhell")

    def test_any_tokens_give_what_their_bytes_give(self) -> None:
        chance = random.Random(1)
        for _ in range(300):
            ids = [chance.randrange(300) for _ in range(chance.randint(0, 30))]
            whole = b"".join(self.token_text.piece(token) or b"" for token in ids)
            stream = TextStream(self.token_text)
            self.assertEqual("".join(streamed(stream, ids)), whole.decode("utf-8", "replace"))
            self.assertEqual(stream.characters, len(whole.decode("utf-8", "replace")))

    def test_a_decoder_of_another_kind_is_refused(self) -> None:
        for decoder, named in (
            (decoders.ByteLevel(), "ByteLevel"),
            (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "Strip"),
            (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), "Fuse"),
        ):
            tokenizer = small_tokenizer()
            tokenizer.decoder = decoder
            with self.assertRaisesRegex(ValueError, named):
                TokenText.of(tokenizer)
        spelt = json.loads(small_tokenizer().to_str()) | {"decoder": None}
        with self.assertRaisesRegex(ValueError, "None"):
            TokenText.of(Tokenizer.from_str(json.dumps(spelt)))


class Stops(TokenTextCase):
    """Each stop text is tried on every way to cut the answer into tokens of one byte or more."""

    def run_of(self, answer: str, stops: Sequence[str]) -> tuple[list[str], str | None]:
        stream = TextStream(self.token_text, stops)
        pieces = streamed(stream, self.bytes_of(answer))
        return pieces, stream.stopped_by

    def test_the_answer_ends_before_the_stop_text(self) -> None:
        for stops, answer, text, by in (
            (["STOP"], "go on STOP here", "go on ", "STOP"),
            (["STOP"], "STOP", "", "STOP"),
            (["STOP"], "STO", "STO", None),
            (["STOP"], "STSTOP", "ST", "STOP"),
            (["aab"], "aaaab", "aa", "aab"),
            (["\n\n"], "a\n\nb", "a", "\n\n"),
            (["👋"], "hi 👋🏽", "hi ", "👋"),
            (["abcd", "bc"], "xabcd", "xa", "bc"),
            (["bc", "abc"], "xabcd", "x", "abc"),
            (["abc", "bc"], "xabcd", "x", "abc"),
            (["b", "abc"], "abc", "a", "b"),
            ([], "STOP", "STOP", None),
        ):
            with self.subTest(stops=stops, answer=answer):
                pieces, stopped_by = self.run_of(answer, stops)
                self.assertEqual(("".join(pieces), stopped_by), (text, by))

    def test_nothing_comes_after_the_stop_text(self) -> None:
        stream = TextStream(self.token_text, ["l"])
        words = self.tokenizer.get_vocab()
        self.assertEqual(stream.take(words["hell"]), "he")
        self.assertEqual(stream.take(words["hell"]), "")
        self.assertEqual(stream.finish(), "")

    def test_what_may_become_a_stop_text_is_held_back_and_no_more(self) -> None:
        pieces, _ = self.run_of("ab ST STX y", ["STOP"])
        self.assertEqual(pieces, ["a", "b", " ", "", "", "ST ", "", "", "STX", " ", "y", ""])

    def test_what_is_held_back_comes_at_the_end(self) -> None:
        stream = TextStream(self.token_text, ["STOP"])
        self.assertEqual([stream.take(token) for token in self.bytes_of("ST")], ["", ""])
        self.assertEqual(stream.finish(), "ST")

    def test_a_stop_text_of_a_replacement_character_is_found_at_the_end_too(self) -> None:
        stream = TextStream(self.token_text, ["a\ufffd"])
        tokens = [*self.bytes_of("ba"), self.byte(0xF0)]
        self.assertEqual("".join(streamed(stream, tokens)), "b")
        self.assertEqual(stream.stopped_by, "a\ufffd")

    def test_the_text_does_not_depend_on_how_it_was_cut(self) -> None:
        """Random answers of few letters, random stop texts: token by token as all at once, and as a
        reading of the definition says: the first to be complete, of those the longest."""
        chance = random.Random(7)
        ids = {word: number for word, number in self.tokenizer.get_vocab().items()}
        found = 0
        for _ in range(3000):
            stops = ["".join(chance.choices("hel", k=chance.randint(1, 5))) for _ in range(3)]
            words = chance.choices(("h", "e", "l", "he", "ll", "hell"), k=chance.randint(0, 12))
            whole = "".join(words)
            stream = TextStream(self.token_text, stops)
            pieces = streamed(stream, [ids[word] for word in words])
            ends = [
                (end, -len(stop))
                for end in range(len(whole) + 1)
                for stop in stops
                if whole[:end].endswith(stop)
            ]
            if ends:
                end, length = min(ends)
                self.assertEqual("".join(pieces), whole[: end + length], (stops, words))
                found += 1
            else:
                self.assertEqual("".join(pieces), whole, (stops, words))
            self.assertEqual(stream.stopped_by is not None, bool(ends))
        self.assertGreater(found, 500)


if __name__ == "__main__":
    unittest.main()
