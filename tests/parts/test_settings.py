"""The rig's values: who wins, what is refused, and that each fault names its key and the way out.

Every file here is a real tpu.env, read by the part as a rig's is.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Literal
from unittest import mock

from pydantic import BaseModel, Field

from forge.parts.ground.errors import RigError
from forge.parts.ground.settings import (
    RigSettings,
    load_settings,
    origin_of_settings,
    settings_as_shell,
)


class Cell(BaseModel):
    inputs: int
    outputs: int


class Example(RigSettings):
    model_name: str = Field(description="needed")
    port: int = Field(default=8017, ge=1024, le=65535)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    limits: dict[str, int] = Field(default_factory=dict)
    cells: list[Cell] = Field(default_factory=list)
    note: str = ""
    budget: float | None = None


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        patch = mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def load(self, text: str | bytes, **environment: str) -> Example:
        data = text.encode() if isinstance(text, str) else text
        (self.folder / "tpu.env").write_bytes(data)
        with mock.patch.dict(os.environ, environment):
            return load_settings(Example, self.folder)

    def refused(self, text: str | bytes, **environment: str) -> str:
        with self.assertRaises(RigError) as caught:
            self.load(text, **environment)
        self.assertEqual(caught.exception.error_class, "INVALID")
        return str(caught.exception)


class PrecedenceTest(Case):
    def test_environment_over_file_over_default(self) -> None:
        self.assertEqual(self.load("MODEL_NAME=a").port, 8017)
        self.assertEqual(self.load("MODEL_NAME=a\nPORT=2000").port, 2000)
        self.assertEqual(self.load("MODEL_NAME=a\nPORT=2000", PORT="3000").port, 3000)
        self.assertEqual(self.load("MODEL_NAME=a", PORT="3000").port, 3000)
        self.assertEqual(self.load("", MODEL_NAME="b").model_name, "b")

    def test_an_empty_variable_does_not_beat_the_file(self) -> None:
        self.assertEqual(self.load("MODEL_NAME=a\nPORT=2000", PORT="", MODEL_NAME="").port, 2000)

    def test_a_variables_case_does_not_count(self) -> None:
        self.assertEqual(self.load("MODEL_NAME=a\nPORT=2000", port="3000").port, 3000)

    def test_unrelated_variables_are_nobodys_business(self) -> None:
        settings = self.load("MODEL_NAME=a", ZONE="us-east5-b", PROJECT_ID="x", XPORT="7")
        self.assertEqual(settings.port, 8017)

    def test_each_value_knows_where_it_came_from(self) -> None:
        (self.folder / "tpu.env").write_text("MODEL_NAME=a\nPORT=2000\nDTYPE=float32\nNOTE=")
        with mock.patch.dict(os.environ, {"PORT": "3000", "dtype": "bfloat16", "MODEL_NAME": ""}):
            origins = origin_of_settings(load_settings(Example, self.folder))
        self.assertEqual(origins["port"], "environment")
        self.assertEqual(origins["dtype"], "environment")
        self.assertEqual(origins["model_name"], "tpu.env")
        self.assertEqual(origins["note"], "default")
        self.assertEqual(origins["rig_read_only"], "default")
        self.assertEqual(set(origins), set(Example.model_fields))

    def test_the_keys_that_every_rig_has(self) -> None:
        settings = self.load("MODEL_NAME=a")
        self.assertEqual(
            (settings.rig_read_only, settings.rig_toolsets, settings.mcp_server_name),
            (False, "default", ""),
        )
        for text, value in (("1", True), ("true", True), ("0", False), ("no", False)):
            self.assertIs(self.load("MODEL_NAME=a", RIG_READ_ONLY=text).rig_read_only, value)


class FormTest(Case):
    """What the lines of the file may look like, and what value each has."""

    def test_what_a_line_means(self) -> None:
        for line, value in (
            ("NOTE=plain", "plain"),
            ("NOTE=two words", "two words"),
            ("NOTE=two   words   ", "two   words"),
            ("  NOTE=x", "x"),
            ("NOTE=x # a comment", "x"),
            ("NOTE=x\t# a $comment", "x"),
            ("NOTE=x#y", "x#y"),
            ("NOTE=http://h/p#f=1", "http://h/p#f=1"),
            ('NOTE="quoted # no comment" # a comment', "quoted # no comment"),
            ("NOTE='single \"double\" inside'", 'single "double" inside'),
            ('NOTE="a=b=c"', "a=b=c"),
            ("NOTE=a=b=c", "a=b=c"),
            ("NOTE=it's", "it's"),
            ("NOTE=C:\\new", "C:\\new"),
            ("NOTE=Grüße", "Grüße"),
            ("NOTE=", ""),
            ("NOTE=''", ""),
            ("# NOTE=no", ""),
            ("\r\nNOTE=windows\r\n", "windows"),
        ):
            with self.subTest(line=line):
                self.assertEqual(self.load(f"MODEL_NAME=a\n{line}\n").note, value)

    def test_what_no_reader_should_have_to_guess_is_refused_with_its_line(self) -> None:
        for line in (
            "NOTE",
            "garbage",
            "NOTE = x",
            "NOTE =x",
            "NOTE= x",
            "NOTE= # a comment",
            "export NOTE=x",
            "note=x",
            "Note=x",
            "2NOTE=x",
            "'NOTE'=x",
            'NOTE="x',
            "NOTE='x",
            'NOTE="x" y',
            'NOTE="x"y',
            'NOTE="a\\nb"',
            "NOTE='a\\'b'",
            "NOTE: x",
            "[section]",
            "NOTE=a\x0bPORT=2000",
            "NOTE=a\u2028PORT=2000",
        ):
            with self.subTest(line=ascii(line)):
                text = self.refused(f"MODEL_NAME=a\n\n{line}\n")
                self.assertIn("tpu.env line 3 is not KEY=value", text)

    def test_values_are_never_interpolated(self) -> None:
        for line in ("NOTE=${HOME}", "NOTE=$HOME", "NOTE='${HOME}'", "NOTE=a#${HOME}", 'NOTE="a$"'):
            with self.subTest(line=line):
                text = self.refused(f"MODEL_NAME=a\n{line}", HOME="/secret/home")
                self.assertIn("line 2: NOTE holds a '$'", text)
                self.assertNotIn("/secret/home", text)

    def test_a_key_that_stands_twice_is_refused(self) -> None:
        text = self.refused("MODEL_NAME=a\nPORT=2000\n# x\nPORT=2000\n")
        self.assertIn("line 4: PORT stands in line 2 already", text)

    def test_json_values_come_through_bare_and_quoted(self) -> None:
        for line in ('LIMITS={"image": 4, "audio":0}', 'LIMITS=\'{"image": 4, "audio":0}\''):
            self.assertEqual(self.load(f"MODEL_NAME=a\n{line}").limits, {"image": 4, "audio": 0})
        cells = self.load('MODEL_NAME=a\nCELLS=[{"inputs": 1, "outputs": 2}]').cells
        self.assertEqual(cells, [Cell(inputs=1, outputs=2)])

    def test_bad_json_names_the_key(self) -> None:
        self.assertIn("limits", self.refused("MODEL_NAME=a\nLIMITS={image:4}").lower())
        self.assertIn("limits", self.refused("MODEL_NAME=a", LIMITS="{image:4}").lower())
        self.assertIn("LIMITS", self.refused('MODEL_NAME=a\nLIMITS={"image":"many"}'))

    def test_whatever_is_taken_has_the_one_reading_that_the_line_shows(self) -> None:
        """Random lines: either refused, or the value is what a person reads there."""
        source = random.Random(9)
        pieces = ["a", "b", " ", "  ", "\t", "#", '"', "'", "\\", "\\n", "=", "{", "}", "é", "N=1"]
        taken = 0
        for _ in range(500):
            raw = "".join(source.choices(pieces, k=source.randrange(1, 7)))
            try:
                note = self.load(f"MODEL_NAME=m\nNOTE={raw}\nDTYPE=float32\n").note
            except RigError:
                continue
            taken += 1
            text = raw.strip()
            if text[:1] in ("'", '"'):
                expected = text[1 : text.index(text[0], 1)]
            else:
                cuts = [text.find(blank + "#") for blank in " \t" if blank + "#" in text]
                expected = text[: min(cuts, default=len(text))].rstrip()
            self.assertEqual(note, expected, ascii(raw))
        self.assertGreater(taken, 100)


class FaultTest(Case):
    def test_a_missing_key_says_what_to_write(self) -> None:
        text = self.refused("PORT=2000")
        self.assertEqual(
            text,
            "INVALID tpu.env: MODEL_NAME is missing: write MODEL_NAME=… or set it in the "
            "environment.",
        )
        self.assertIn("MODEL_NAME is missing", self.refused("MODEL_NAME=\n"))

    def test_an_unknown_key_is_named_with_the_known_ones(self) -> None:
        text = self.refused("MODEL_NAME=a\nZONEE=us-east5-b")
        self.assertIn("ZONEE is not a key of this rig", text)
        self.assertIn("MODEL_NAME", text)
        self.assertNotIn("us-east5-b", text)

    def test_a_wrong_value_is_named_and_not_repeated(self) -> None:
        text = self.refused("MODEL_NAME=a\nPORT=S3CRET")
        self.assertIn("PORT (from tpu.env)", text)
        self.assertNotIn("S3CRET", text)
        for name in ("PORT", "port"):
            text = self.refused("MODEL_NAME=a\nPORT=2000", **{name: "S3CRET"})
            self.assertIn("PORT (from the environment)", text)
            self.assertNotIn("S3CRET", text)

    def test_bounds_and_choices(self) -> None:
        for line in ("PORT=80", "PORT=70000", "PORT=80.5", "DTYPE=float16", "RIG_READ_ONLY=maybe"):
            with self.subTest(line=line):
                key = line.partition("=")[0]
                self.assertIn(key, self.refused(f"MODEL_NAME=a\n{line}"))

    def test_several_faults_are_told_at_once(self) -> None:
        text = self.refused("PORT=80\nDTYPE=x\nWHAT=1")
        for key in ("MODEL_NAME", "PORT", "DTYPE", "WHAT"):
            self.assertIn(key, text)

    def test_no_file_is_a_fault_although_the_environment_has_everything(self) -> None:
        with (
            mock.patch.dict(os.environ, {"MODEL_NAME": "a"}),
            self.assertRaises(RigError) as caught,
        ):
            load_settings(Example, self.folder)
        self.assertEqual(caught.exception.error_class, "INVALID")
        self.assertIn("tpu.env cannot be read", caught.exception.what)
        self.assertIn("restore", caught.exception.next_step)

    def test_a_folder_in_its_place(self) -> None:
        (self.folder / "tpu.env").mkdir()
        with self.assertRaises(RigError) as caught:
            load_settings(Example, self.folder)
        self.assertIn("cannot be read", caught.exception.what)

    def test_bytes_that_are_no_text(self) -> None:
        self.assertIn("UTF-8", self.refused(b"MODEL_NAME=a\nNOTE=\xff\xfe"))
        self.assertIn("UTF-8", self.refused("MODEL_NAME=a\n".encode("utf-16")))


class ShellTest(Case):
    def test_a_shell_reads_back_what_the_rig_read(self) -> None:
        settings = self.load(
            "MODEL_NAME=google/gemma-4-E2B-it\nRIG_READ_ONLY=1\n"
            'NOTE="a b; touch P `x` \'q\'"\nLIMITS={"image": 4}\nCELLS=[{"inputs":1,"outputs":2}]\n'
        )
        script = f"{settings_as_shell(settings)}\nenv -0"
        done = subprocess.run(
            ["/bin/sh", "-c", script], cwd=self.folder, capture_output=True, check=True
        )
        environment = dict(
            entry.split("=", 1) for entry in done.stdout.decode().split("\0") if "=" in entry
        )
        self.assertEqual([p.name for p in self.folder.iterdir()], ["tpu.env"])
        self.assertEqual(environment["RIG_READ_ONLY"], "1")
        self.assertEqual(environment["NOTE"], settings.note)
        self.assertEqual(json.loads(environment["LIMITS"]), {"image": 4})
        self.assertNotIn("BUDGET", environment, "what has no value must not become a text")
        # The strictest reader there is: the rig itself, from the environment alone.
        again = self.load("", **environment)
        self.assertEqual(again, settings)

    def test_every_key_is_exported_and_nothing_else(self) -> None:
        lines = settings_as_shell(self.load("MODEL_NAME=a\nBUDGET=2.5")).split("\n")
        self.assertEqual(
            [line.partition("=")[0] for line in lines],
            [f"export {name.upper()}" for name in Example.model_fields],
        )


if __name__ == "__main__":
    unittest.main()
