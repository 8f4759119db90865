"""A log through triage.py in a process of its own: answers, limits, and a program that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from forge.parts.boundaries.log_text import log_lines
from forge.parts.boundaries.log_triage import log_excerpt, triage_log
from forge.parts.boundaries.triage_program import triaged_log
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.log_answer import LOG_BYTES, NO_FAILURE, FailureChange, LogAnswer
from tests.failure_forms import FORMS, all_cases, in_form, ordinary_lines, read_cases
from tests.rig_programs import write_programs

KV = (
    "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that "
    "can be stored in KV cache (20480)."
)
ODD = "Traceback (most recent call last):\nWidgetError: the flux is not coupled to the frame"


class ProgramCase(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_programs(self.folder)
        self.program = self.folder / "triage.py"

    async def refused(self, data: bytes | str = KV) -> RigError:
        with self.assertRaises(RigError) as caught:
            await triaged_log(self.program, data)
        return caught.exception


class TestAnswers(ProgramCase):
    async def test_the_process_says_what_the_function_says(self) -> None:
        logs = [in_form(all_cases()[n].text, form) for n in (0, 40, 90) for form in FORMS]
        logs += [case.text for case in read_cases("healthy")[:2]]
        for log in [*logs, ODD, "", "\x00", KV]:
            with self.subTest(log[:60]):
                self.assertEqual(await triaged_log(self.program, log), triage_log(log))

    async def test_an_answer_keeps_its_types_over_the_wire(self) -> None:
        answer = await triaged_log(self.program, KV)
        self.assertIsInstance(answer, LogAnswer)
        (failure, *_) = answer.failures
        self.assertIsInstance(failure.changes[0], FailureChange)
        self.assertEqual(str(failure.changes[0]), "--max-model-len: 65536 -> 20480")
        self.assertEqual(failure.line_number, 1)
        self.assertEqual(failure.numbers["asked"], "65536")

    async def test_errors_that_nothing_explains_come_with_their_neighbours(self) -> None:
        answer = await triaged_log(self.program, f"before it\n{ODD}\nafter it")
        self.assertEqual(answer.failures, ())
        self.assertEqual(answer.unexplained, (ODD.split("\n")[1],))
        for line in ("before it", "WidgetError", "after it"):
            self.assertIn(line, answer.excerpt)
        self.assertNotEqual(answer.summary, NO_FAILURE)

    async def test_any_bytes_come_back_as_text_that_json_can_hold(self) -> None:
        junk = bytes(range(256)) * 300
        answer = await triaged_log(self.program, junk + b"\n" + KV.encode() + b"\n" + junk)
        self.assertEqual(answer.failures[0].line, KV)
        answer = await triaged_log(self.program, "\ud800 lone\n" + KV)
        self.assertEqual(answer.failures[0].line_number, 2)

    async def test_the_end_of_a_log_beyond_the_limit_still_decides(self) -> None:
        lines = "\n".join(ordinary_lines(2_000))
        log = (lines + "\n") * (2 * LOG_BYTES // len(lines)) + KV
        answer = await triaged_log(self.program, log)
        self.assertEqual(answer.failures[0].line, KV)


class TestFaults(ProgramCase):
    async def test_a_missing_program_is_named(self) -> None:
        self.program.unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("triage.py", error.what)

    async def test_a_program_that_answers_nonsense_is_no_answer(self) -> None:
        for text in ("print('{}')", "print('[1]')", "import sys; sys.exit('broken in two')", ""):
            with self.subTest(text):
                self.program.write_text(text)
                error = await self.refused()
                self.assertEqual(error.error_class, "INTERNAL")
        self.program.write_text("import sys; sys.exit('broken in two')")
        self.assertIn("broken in two", (await self.refused()).what)

    async def test_a_secret_in_the_log_is_in_no_answer(self) -> None:
        secret = "hf_" + "Canary0123456789" * 2
        for log in (f"{KV} token={secret}", f"WidgetError: token {secret} refused"):
            answer = await triaged_log(self.program, log)
            self.assertNotIn(secret, repr(answer))


class TestCommand(ProgramCase):
    def run_it(self, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, str(self.program), *words], input=given, capture_output=True
        )

    def test_people_get_the_line_the_change_and_what_would_not_help(self) -> None:
        log = self.folder / "boot.log"
        log.write_text(in_form(KV, "buried"))
        done = self.run_it(str(log))
        told = done.stdout.decode()
        self.assertEqual(done.returncode, 1)
        for words in ("kv_cache_too_small", KV, "--max-model-len: 65536 -> 20480", "will not help"):
            self.assertIn(words, told)

    def test_the_status_says_it_without_words(self) -> None:
        self.assertEqual(self.run_it(given=b"all is well\n").returncode, 0)
        self.assertEqual(self.run_it(given=ODD.encode()).returncode, 1)
        self.assertEqual(self.run_it("--colour").returncode, 2)
        for name in ("absent.log", str(self.folder)):
            done = self.run_it(name)
            self.assertEqual((done.returncode, done.stdout), (2, b""))
            self.assertNotIn(b"Traceback", done.stderr)

    def test_a_file_beyond_the_limit_is_read_by_its_ends(self) -> None:
        log = self.folder / "huge.log"
        with log.open("wb") as file:
            file.truncate(20 * LOG_BYTES)  # a hole
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + KV.encode())
        done = self.run_it("--json", str(log))
        self.assertEqual(json.loads(done.stdout)["failures"][0]["kind"], "kv_cache_too_small")


class TestExcerpt(unittest.TestCase):
    def test_it_is_bounded_redacted_and_keeps_the_last(self) -> None:
        rows = [f"row {n} " + "word " * 20 for n in range(500)]
        rows[450] = "x" * 80  # one long word is a key or a file, not a message
        log = log_lines("\n".join(rows))
        text = log_excerpt(log, list(range(500)))
        self.assertLessEqual(len(text), 6_000)
        self.assertIn("row 499", text)
        self.assertNotIn("row 0 ", text)
        self.assertNotIn("x" * 80, text)


if __name__ == "__main__":
    unittest.main()
