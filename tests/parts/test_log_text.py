"""Logs as rows: any bytes, any length, and files that are the rig's own or none."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path

from forge.parts.boundaries.log_files import read_log_file
from forge.parts.boundaries.log_text import log_lines
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.log_answer import LOG_BYTES


class TestRows(unittest.TestCase):
    def test_line_ends_of_every_kind(self) -> None:
        rows = log_lines("a\r\nb\rc\nd").rows
        self.assertEqual([row for row in rows if row], [b"a", b"b", b"c", b"d"])

    def test_terminal_sequences_and_unseen_marks_are_taken_out(self) -> None:
        text = (
            "\x1b[1;31mred\x1b[0m \x1b]0;title\x07x \u202eback\u202c \u200bzero\ufeff \u2066i\u2069"
        )
        (row,) = log_lines(text).rows
        self.assertEqual(row.decode(), "red x back zero i")

    def test_letters_of_every_alphabet_stay(self) -> None:
        text = "Grüße █▒ 日本語 мир … “q”"
        self.assertEqual(log_lines(text).text(0), text)

    def test_every_byte_and_a_text_in_utf_16(self) -> None:
        log = log_lines(bytes(range(256)) * 3 + b"\nneedle\n")
        self.assertIn(b"needle", log.rows)
        for row in range(len(log.rows)):
            log.text(row).encode("utf-8")
        self.assertIn("needle", log_lines("x needle".encode("utf-16")).text(0))

    def test_a_line_written_as_json_is_cut_at_its_line_ends(self) -> None:
        body = "\\n".join(f"frame {n} {'x' * 40}" for n in range(60))
        rows = log_lines('{"textPayload": "' + body + '\\nValueError: odd"}').rows
        self.assertGreater(len(rows), 50)
        self.assertTrue(rows[-1].startswith(b"ValueError: odd"))

    def test_a_line_of_ten_megabytes_comes_in_pieces_that_overlap(self) -> None:
        data = b"word " * 2_000_000 + b"NEEDLE IN HAY" + b" word" * 1000
        rows = log_lines(data).rows
        self.assertLessEqual(max(map(len, rows)), 4_000)
        self.assertTrue(any(b"NEEDLE IN HAY" in row for row in rows))
        for cut in range(3_900, 4_100):
            rows = log_lines(b"w " * (cut // 2) + b"NEEDLE IN HAY" + b" w" * 3000).rows
            self.assertTrue(any(b"NEEDLE IN HAY" in row for row in rows), cut)

    def test_more_than_the_limit_keeps_head_and_tail_and_says_so(self) -> None:
        log = log_lines(b"first\n" + b"middle\n" * (LOG_BYTES // 6) + b"last")
        self.assertEqual((log.rows[0], log.rows[-1]), (b"first", b"last"))
        self.assertEqual(sum(b"bytes left out" in row for row in log.rows), 1)
        self.assertLess(sum(map(len, log.rows)), LOG_BYTES)

    def test_rows_that_differ_in_ids_and_numbers_only_are_alike(self) -> None:
        log = log_lines("\n".join(f"request {n:032x} took {n} ms" for n in range(1000)) + "\nother")
        forms = log.alike()
        self.assertEqual(len(forms), 2)
        self.assertIn((0, 999), forms.values())

    def test_nothing_is_one_empty_row(self) -> None:
        self.assertEqual(list(log_lines("").rows), [b""])
        self.assertEqual(list(log_lines(b"").alike().values()), [(0, 0)])


class TestFiles(unittest.TestCase):
    def setUp(self) -> None:
        self.place = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name in ("logs", "jobs", "out", "logs-evil"):
            (self.place / name).mkdir()
            (self.place / name / "a.log").write_text(name)
        self.folders = {"logs": self.place / "logs", "jobs": self.place / "jobs"}

    def read(self, name: str) -> bytes:
        return read_log_file(self.folders, "file", name)

    def fault(self, name: str) -> str:
        with self.assertRaises(RigError) as caught:
            self.read(name)
        return str(caught.exception)

    def test_by_name_by_folder_and_by_the_exact_path(self) -> None:
        self.assertEqual(self.read("a.log"), b"logs")
        self.assertEqual(self.read("jobs/a.log"), b"jobs")
        self.assertEqual(self.read(f"{self.place}/jobs/a.log"), b"jobs")
        (self.place / "jobs" / "b.log").write_text("b")
        self.assertEqual(self.read("b.log"), b"b")

    def test_whatever_leads_out_is_refused_by_the_parameter(self) -> None:
        (self.place / "logs" / "link.log").symlink_to(self.place / "out" / "a.log")
        (self.place / "logs" / "sub").mkdir()
        os.mkfifo(self.place / "logs" / "pipe.log")
        for name in (
            "link.log", "pipe.log", "sub", "../out/a.log", f"{self.place}/out/a.log", "out/a.log",
            f"{self.place}/logs-evil/a.log", "logs/../out/a.log", "/etc/passwd", "", ".", "..",
            "-a", "a\n", "a\0", "logs//a.log", "x" * 300, "ａ.log",
        ):  # fmt: skip
            with self.subTest(name):
                self.assertTrue(self.fault(name).startswith("INVALID file: "))

    def test_a_missing_file_is_another_answer(self) -> None:
        self.assertTrue(self.fault("none.log").startswith("NOT_FOUND"))

    def test_a_folder_that_is_a_link_is_not_followed(self) -> None:
        folders = {"logs": self.place / "linked"}
        (self.place / "linked").symlink_to(self.place / "out")
        with self.assertRaises(RigError):
            read_log_file(folders, "file", "a.log")

    def test_a_file_beyond_the_limit_gives_head_and_tail(self) -> None:
        with (self.place / "logs" / "big.log").open("wb") as file:
            file.write(b"first\n")
            file.truncate(LOG_BYTES * 3)
            file.seek(LOG_BYTES * 3)
            file.write(b"\nlast")
        data = self.read("big.log")
        self.assertTrue(data.startswith(b"first"))
        self.assertTrue(data.endswith(b"last"))
        self.assertLess(len(data), LOG_BYTES + 200)
        self.assertEqual(data.count(b"bytes left out"), 1)


if __name__ == "__main__":
    unittest.main()
