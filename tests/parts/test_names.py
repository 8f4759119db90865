"""The grammars: what they take, what they refuse, and that a refusal never repeats a value."""

from __future__ import annotations

import random
import string
import unittest

from forge.parts.ground.errors import RigError
from forge.parts.ground.jobs import JobStore
from forge.parts.ground.names import checked_name, checked_text, slug_of

# What an agent, or a text that it has read, may put where a name belongs.
HOSTILE = (
    "; touch P #",
    "$(touch P)",
    "`touch P`",
    "a\nb",
    "a\n",
    "\na",
    "a\rb",
    "a\x00b",
    "--help",
    "-x",
    "-",
    "--flags-file=/etc/passwd",
    "projects/o/zones/z/instances/i",
    "https://www.googleapis.com/compute/v1/projects/o/zones/z/instances/i",
    "user@host",
    "../../etc/passwd",
    "/..",
    "/a/../b",
    "..",
    ".",
    "/",
    "//a",
    "~/x",
    "a,startup-script=x",
    "x OR name~.*",
    "ＡＢＣ",
    "а",  # Cyrillic
    "a\u202eb",
    "a\u200bb",
    "a" * 10_000,
    "/" + "a" * 10_000,
    "",
    " ",
    "%0a",
    "{0.__class__}",
    "{{x}}",
    "'\"\\",
    "\ud800",
    "a\udcffb",
    "٣",  # a digit, though not of ASCII
)
GOOD = {
    "resource": ("a", "a1", "my-rig-2", "a" * 63, "a-" + "b" * 60 + "1"),
    "zone": (
        "us-east5-b",
        "us-west1-c",
        "europe-west4-a",
        "us-east-1a",
        "us-gov-west-1a",
        "northamerica-northeast1-a",
    ),
    "job": ("serve-20260131-120000-1a2b3c", "abc-00000000-000000-ffffff"),
    "token": ("0123456789abcdef" * 2,),
    "model": (
        "embedded",
        "google/gemma-4-E2B-it",
        "a/b",
        "A" * 96 + "/" + "B" * 96,
        "/models/tiny",
        "/a b/c",
        "/x/.cache/models--a--b",
        "/" + "/".join(["d" * 201] * 20),
    ),
}
BAD = {
    "resource": ("A", "1a", "a_b", "a-", "a" * 64, "a.b", "a/b"),
    "zone": ("us", "us-east5", "us-east5-b-c", "US-EAST5-B", "us-east555-b"),
    "job": (
        "serve-2026013-120000-1a2b3c",
        "serve-20260131-120000-1A2B3C",
        "serve-20260131-120000-1a2b3c.json",
        "../serve-20260131-120000-1a2b3c",
        "SERVE-20260131-120000-1a2b3c",
    ),
    "token": ("0123456789abcdef", "0123456789ABCDEF" * 2, "0" * 33),
    "model": (
        "gemma",
        "a/b/c",
        "a/",
        "/b/",
        "a/b@c",
        "embedded ",
        "models/../x",
        "/a/b..c",
        "a/" + "b" * 97,
        "/" + "/".join(["d"] * 21),
        "/" + "d" * 202,
        "http://x/y",
    ),
}


class NamesTest(unittest.TestCase):
    def refused(self, kind: str, value: str) -> RigError:
        with self.assertRaises(RigError, msg=ascii(value)[:80]) as caught:
            checked_name(kind, "the_parameter", value)
        return caught.exception

    def test_good_names_come_back_as_they_are(self) -> None:
        for kind, names in GOOD.items():
            for name in names:
                with self.subTest(kind=kind, name=name[:40]):
                    self.assertEqual(checked_name(kind, "x", name), name)

    def test_bad_names_are_refused_by_the_parameters_name(self) -> None:
        for kind in GOOD:
            for value in (*BAD[kind], *HOSTILE):
                with self.subTest(kind=kind, value=ascii(value)[:40]):
                    error = self.refused(kind, value)
                    self.assertEqual(error.error_class, "INVALID")
                    self.assertTrue(str(error).startswith("INVALID the_parameter: must be "))
                    self.assertIn("nothing was started", str(error))

    def test_a_refusal_never_repeats_the_value(self) -> None:
        for kind in GOOD:
            text = str(self.refused(kind, "S3CRET value"))
            self.assertNotIn("S3CRET", text)
            self.assertLess(len(text), 200)

    def test_no_name_of_any_kind_can_be_an_option_or_leave_its_folder(self) -> None:
        """Random strings near the grammars: whatever is taken is harmless in an argument list."""
        source = random.Random(7)
        alphabet = "abzAZ059-_./:@= \n\t\x00é"
        taken = 0
        for _ in range(20_000):
            start = source.choice(["", "embedded", "/", "a/", "us-east5-", "-", "--", "."])
            value = start + "".join(source.choices(alphabet, k=source.randrange(6)))
            for kind in GOOD:
                try:
                    checked_name(kind, "x", value)
                except RigError:
                    continue
                taken += 1
                self.assertFalse(value.startswith("-"), value)
                self.assertNotIn("..", value)
                self.assertTrue(value.isascii() and value.isprintable(), ascii(value))
                self.assertFalse(set(value) & set(":\n\t\x00;|&$`'\"\\*?<>(){}"), ascii(value))
        self.assertGreater(taken, 100, "the random strings were all refused: they prove nothing")

    def test_a_jobs_own_ids_match_the_grammar(self) -> None:
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            job = JobStore(Path(folder), "x").new("serve", {}, [])
        self.assertEqual(checked_name("job", "job_id", job.id), job.id)


class TextTest(unittest.TestCase):
    def test_free_text_is_taken_as_it_is(self) -> None:
        for text in ("a", "Grüße\n\tこんにちは 🙂", "; rm -rf / #", "--help", "x" * 100, " a "):
            self.assertEqual(checked_text("prompt", text, 100), text)

    def test_emptiness(self) -> None:
        for text in ("", " ", "\n\t "):
            with self.assertRaises(RigError) as caught:
                checked_text("prompt", text, 100)
            self.assertEqual(str(caught.exception).split(":")[0], "INVALID prompt")
        self.assertEqual(checked_text("system", "", 100, empty_ok=True), "")
        with self.assertRaises(RigError):
            checked_text("system", "  ", 100, empty_ok=True)

    def test_too_long_says_how_long(self) -> None:
        with self.assertRaises(RigError) as caught:
            checked_text("prompt", "x" * 101, 100)
        self.assertIn("at most 100 characters, this has 101", str(caught.exception))

    def test_control_characters_and_half_surrogates(self) -> None:
        forbidden = [*range(0x20), 0x7F, 0xD800, 0xDBFF, 0xDC00, 0xDFFF]
        for number in forbidden:
            if chr(number) in "\t\n":
                continue
            with self.subTest(number=number), self.assertRaises(RigError) as caught:
                checked_text("prompt", f"a{chr(number)}b", 100)
            self.assertTrue(str(caught.exception).startswith("INVALID prompt: "))

    def test_whatever_is_taken_can_be_sent(self) -> None:
        source = random.Random(8)
        for _ in range(2000):
            text = "".join(chr(source.randrange(0x110000)) for _ in range(4))
            try:
                checked_text("prompt", text, 100)
            except RigError:
                continue
            text.encode()


class SlugTest(unittest.TestCase):
    def test_underscores_become_dashes(self) -> None:
        self.assertEqual(slug_of("gpu-llamacpp-l4-12b-q4_0"), "gpu-llamacpp-l4-12b-q4-0")

    def test_a_slug_is_its_own_slug(self) -> None:
        for name in ("a-b", "a_b_c", "_"):
            self.assertEqual(slug_of(slug_of(name)), slug_of(name))
            self.assertFalse(set(slug_of(name)) - set(string.ascii_lowercase + "-"))


if __name__ == "__main__":
    unittest.main()
