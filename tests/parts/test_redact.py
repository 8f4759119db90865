"""What goes out: no secret, no control character, no flood, and ordinary words untouched."""

from __future__ import annotations

import json
import os
import random
import string
import time
import unittest
from typing import Any
from unittest import mock

from forge.parts.ground.redact import (
    TEXT_LIMIT,
    clean,
    clean_value,
    clip,
    printable,
    redact,
    secret_values,
)

GONE = "[redacted]"
# Made up on the spot; no such credential exists anywhere.
MADE_UP_KEY = "\n".join(
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        *["b64+/" * 12] * 5,
        "-----END OPENSSH PRIVATE KEY-----",
    ]
)


def random_text(source: random.Random, alphabet: str, most: int) -> str:
    return "".join(source.choices(alphabet, k=source.randrange(most)))


class ShapesTest(unittest.TestCase):
    def setUp(self) -> None:
        # No secret of the machine that runs the tests may decide anything here.
        patch = mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def test_each_shape_goes_and_its_surroundings_stay(self) -> None:
        for secret in (
            "hf_" + "aB3" * 11,
            "hf_CANARY00",
            "ya29.a0Ab-Cd_Ef.gh",
            "AKIAABCDEFGHIJKLMNOP",
            "ASIA0123456789ABCDEF",
            "dop_v1_" + "0f" * 32,
            "sk-proj-" + "aB-_9" * 6,
            "AIza" + "Sy-_9" * 7,
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl-_x",
            "Bearer abc.def-ghi+jkl/mno==",
            "bearer\tabcdefgh",
            "BEARER  01234567",
            MADE_UP_KEY,
            MADE_UP_KEY.replace("OPENSSH ", ""),
            MADE_UP_KEY.replace("OPENSSH", "RSA").replace("\n", "\r\n"),
        ):
            for before, after in (
                ("", ""),
                ("see ", " there"),
                ("\n", "\n"),
                ("'", "'"),
                ("=", ";"),
            ):
                with self.subTest(secret=secret[:20], before=before):
                    self.assertEqual(redact(before + secret + after), before + GONE + after)

    def test_two_secrets_are_two_gaps(self) -> None:
        self.assertEqual(
            redact("hf_AAAAAAAA1 and hf_BBBBBBBB2, AKIAABCDEFGHIJKLMNOP"),
            f"{GONE} and {GONE}, {GONE}",
        )

    def test_what_only_looks_like_one_stays(self) -> None:
        for words in (
            "No module named 'hf_transfer'",
            "hf_overrides={} hf_tokenizer hf_processor hf_quantizer",
            "/data/hf_checkpoints/gemma-4",
            "hf_hub_download",
            "hf_Short1",
            "HF_HUB_ENABLE_HF_TRANSFER=1",
            "task-force-of-many-people-in-one-room",
            "disk-0123456789-0123456789",
            "MALAYSIA ASIA AKIA",
            "asia-northeast1-docker.pkg.dev",
            "AKIAabcdefghijklmnop",
            "the bearer of this note",
            "bearer token",
            "dop_v1_short",
            "sk-learn",
            "-----BEGIN CERTIFICATE-----",
            "-----BEGIN PUBLIC KEY-----",
            "http://127.0.0.1:8017/v1",
            "https://host.example/a:b@c",
            "max_tokens=256, prompt_tokens: 12345678",
        ):
            with self.subTest(words=words):
                self.assertEqual(redact(words), words)

    def test_user_and_password_in_an_address(self) -> None:
        self.assertEqual(
            redact("GET https://user:pa55@host.example/x failed"),
            f"GET https://{GONE}@host.example/x failed",
        )

    def test_a_key_whose_end_was_cut_off_goes_to_the_last_character(self) -> None:
        for cut in range(40, len(MADE_UP_KEY) - 40, 17):
            self.assertEqual(redact("a " + MADE_UP_KEY[:cut]), f"a {GONE}")

    def test_a_secret_in_pieces_is_put_together_before_it_is_looked_for(self) -> None:
        for secret in (
            "hf_AAAA\x00AAAA1",
            "hf_AAAA\u200bAAAA1",
            "hf_AA\u202eAA\u2066AAA1",
            "\x1b[31mhf_AAAA\x1b[0mAAAA1\x1b[0m",
            "hf_AAAA\ud800AAAA1",
            "hf_AAAA\U000e0041AAAA1",
        ):
            with self.subTest(secret=ascii(secret)):
                self.assertEqual(clean(secret), GONE)

    def test_random_text_of_harmless_letters_is_never_touched(self) -> None:
        source = random.Random(1)
        for _ in range(500):
            text = random_text(source, "abcdefg -/.,:;()[]0123\n", 200)
            self.assertEqual(redact(text), text)

    def test_a_secret_is_found_wherever_it_stands(self) -> None:
        source = random.Random(2)
        for _ in range(500):
            body = "".join(source.choices(string.ascii_letters + string.digits, k=34))
            secret = f"hf_Z{body}"
            before = random_text(source, "abc \n\"'=:/{}", 50)
            after = random.Random(3).choice([" ", "\n", '"', ",", "}", "é"])
            self.assertNotIn(body, clean(before + secret + after))

    def test_hostile_text_takes_no_longer_than_other_text(self) -> None:
        """A quadratic expression would need minutes for these."""
        begun = time.monotonic()
        for piece in (
            "eyJ-",
            "hf_",
            "sk-",
            "bearer ",
            "://a:",
            "-----BEGIN ",
            "\x1b]",
            "\x1b[",
            "AKIA",
        ):
            redact(printable(piece * (250_000 // len(piece))))
        redact("hf_" + "a" * 250_000)
        redact("-----BEGIN " + "A " * 125_000)
        redact("://" + "a" * 250_000)
        redact("bearer" + " " * 250_000)
        self.assertLess(time.monotonic() - begun, 20)


class EnvironmentTest(unittest.TestCase):
    def test_names_that_speak_of_secrets(self) -> None:
        environment = {
            "HF_TOKEN": "value-one",
            "AWS_SECRET_ACCESS_KEY": "value-number-two",
            "DB_PASSWORD": "value-three",
            "my_api_key": "value-four",
            "OPENAI_APIKEY": "value-five",
            "GIT_CREDENTIAL": " value-six\n",
            "PATH": "/usr/bin:/bin",
            "HOME": "/home/somebody",
            "SHORT_TOKEN": "seven77",
            "EMPTY_SECRET": "",
        }
        self.assertEqual(
            secret_values(environment),
            ("value-number-two", *sorted(secret_values(environment)[1:], key=len, reverse=True)),
        )
        self.assertEqual(
            set(secret_values(environment)),
            {
                "value-one",
                "value-number-two",
                "value-three",
                "value-four",
                "value-five",
                "value-six",
            },
        )

    def test_the_values_themselves_never_go_out(self) -> None:
        with mock.patch.dict(os.environ, {"X_TOKEN": "plain words", "Y_TOKEN": "plain words more"}):
            self.assertEqual(redact("a plain words more b plain words"), f"a {GONE} b {GONE}")
        self.assertEqual(redact("a plain words b"), "a plain words b")

    def test_a_value_with_a_line_break_at_its_end_is_still_found(self) -> None:
        with mock.patch.dict(os.environ, {"X_TOKEN": "opaque-value-1\n"}):
            self.assertEqual(redact("it was 'opaque-value-1'"), f"it was '{GONE}'")

    def test_a_value_is_no_expression(self) -> None:
        with mock.patch.dict(os.environ, {"X_TOKEN": "a.b*c(d[e"}):
            self.assertEqual(redact("aXb*c(d[e a.b*c(d[e"), f"aXb*c(d[e {GONE}")


class PrintableTest(unittest.TestCase):
    def test_terminal_sequences_go_whole(self) -> None:
        for text in (
            "\x1b[31mred\x1b[0m",
            "\x1b[1;38;5;208mred\x1b[m",
            "\x1b[2K\x1b[1Gred",
            "\x1b]0;title\x07red",
            "\x1b]8;;http://x\x1b\\red\x1b]8;;\x1b\\",
            "\x1bMred",
            "r\x1b[?25led",
        ):
            with self.subTest(text=ascii(text)):
                self.assertEqual(printable(text), "red")

    def test_a_broken_sequence_loses_its_escape_at_least(self) -> None:
        for text in ("\x1b", "\x1b[", "\x1b[31", "\x1b]0;never ended"):
            self.assertNotIn("\x1b", printable(text))

    def test_every_character_there_is(self) -> None:
        """All of Unicode: what may go through is exactly what has no hidden effect."""
        hidden = set(range(0x20)) - {0x09, 0x0A} | set(range(0x7F, 0xA0))
        hidden |= {0x061C, 0xFEFF} | set(range(0x200B, 0x2010)) | set(range(0x2028, 0x202F))
        hidden |= set(range(0x2060, 0x206A)) | set(range(0xFFF9, 0xFFFC))
        hidden |= set(range(0xD800, 0xE000)) | set(range(0xE0000, 0xE01F0))
        everything = map(chr, range(0x110000))
        through = set(map(ord, printable("".join(c for c in everything if c != "\x1b"))))
        self.assertEqual(set(range(0x110000)) - through, hidden)

    def test_line_ends(self) -> None:
        self.assertEqual(printable("a\r\nb\nc\rd\te"), "a\nb\ncd\te")

    def test_nothing_that_comes_out_breaks_json_or_utf8(self) -> None:
        source = random.Random(5)
        for _ in range(300):
            text = "".join(chr(source.randrange(0x110000)) for _ in range(50))
            out = clean(text)
            self.assertEqual(json.loads(json.dumps(out).encode()), out)
            out.encode()


class ClipTest(unittest.TestCase):
    def test_up_to_the_limit_nothing_changes(self) -> None:
        for size in (0, 1, 299, 300):
            self.assertEqual(clip("a" * size, 300), "a" * size)

    def test_beyond_it_both_ends_stay_and_the_gap_is_told(self) -> None:
        text = "".join(f"{number:06}" for number in range(1000))
        out = clip(text, 300)
        head, gap, tail = out.split("\n")
        self.assertEqual((head, tail), (text[:100], text[-200:]))
        self.assertIn(" 5700 ", gap)

    def test_30_mb_go_through_quickly_and_keep_their_last_line(self) -> None:
        begun = time.monotonic()
        out = clean("first\n" + "x" * 30_000_000 + "\nlast: hf_AAAAAAAAAA1")
        self.assertLess(time.monotonic() - begun, 10)
        self.assertTrue(out.startswith("first\n") and out.endswith(f"last: {GONE}"))
        self.assertLess(len(out), TEXT_LIMIT + 200)

    def test_no_half_secret_stays_at_a_cut(self) -> None:
        """Wherever a cut falls, no larger part of a secret than its kind's name goes out."""
        secret = "hf_" + "Zz9" * 11
        for size in range(240, 400):
            for limit in (60, 90):
                out = clean("a" * size + secret + "b" * (500 - size), limit)
                self.assertNotIn("Zz9Zz9", out)

    def test_a_cut_inside_a_private_key_shows_none_of_it(self) -> None:
        for before in range(0, 600, 40):
            out = clean("x" * before + MADE_UP_KEY + "y" * 900, 120)
            self.assertNotIn("b64+/b64", out)


class ValueTest(unittest.TestCase):
    def test_every_string_and_key_and_nothing_else(self) -> None:
        value = {
            "a\x00": "b\x1b[31m",
            "n": [1, 2.5, True, None, ("hf_AAAAAAAA1",)],
            7: {"bearer abcdefgh": ""},
        }
        self.assertEqual(
            clean_value(value),
            {"a": "b", "n": [1, 2.5, True, None, [GONE]], "7": {GONE: ""}},
        )

    def test_json_values_that_are_clean_stay_the_same(self) -> None:
        source = random.Random(6)

        def value(depth: int) -> Any:
            kind = source.randrange(7 if depth < 4 else 5)
            if kind < 5:
                return [source.randrange(99), 0.5, None, False, random_text(source, "abc é\n", 9)][
                    kind
                ]
            if kind == 5:
                return [value(depth + 1) for _ in range(source.randrange(5))]
            return {random_text(source, "abc", 5): value(depth + 1) for _ in range(4)}

        for _ in range(300):
            made = value(0)
            self.assertEqual(clean_value(made), made)
            self.assertEqual(clean_value(clean_value(made)), clean_value(made))

    def test_floods_are_bounded_in_every_direction(self) -> None:
        deep: Any = "bottom"
        for _ in range(5000):
            deep = {"d": [deep]}
        for flood in (
            "x" * 30_000_000,
            ["x"] * 1_000_000,
            {str(n): "x" for n in range(200_000)},
            {"k" * 1_000_000: 1},
            [["x" * 1000] * 1000] * 1000,
            deep,
        ):
            text = json.dumps(clean_value(flood, 1000))
            self.assertLess(len(text), 5_000_000)

    def test_of_a_long_list_both_ends_stay_and_the_gap_is_told(self) -> None:
        out = clean_value([f"line {n}" for n in range(10_000)], 1600)
        self.assertEqual((out[0], out[-1]), ("line 0", "line 9999"))
        self.assertEqual(len(out), 101)
        self.assertEqual([x for x in out if "9900 items left out" in x], [out[33]])
        numbers = clean_value(list(range(10_000)), 1600)
        self.assertEqual((len(numbers), numbers[0], numbers[-1]), (100, 0, 9999))

    def test_of_a_large_mapping_both_ends_stay(self) -> None:
        out = clean_value({str(n): "x" for n in range(10_000)}, 1600)
        self.assertEqual((next(iter(out)), list(out)[-1], len(out)), ("0", "9999", 101))


if __name__ == "__main__":
    unittest.main()
