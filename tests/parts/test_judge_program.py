"""judge.py as the process that it is: its answers, its command line, and programs that fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pydantic
from pydantic import ValidationError

from forge.build import load_rig
from forge.bundle import bundle
from forge.parts.boundaries import judge_program as part
from forge.parts.boundaries.judge_program import asked_judgement, asked_subject
from forge.parts.ground.errors import RigError
from forge.parts.knowledge.geometry import Geometry
from forge.parts.knowledge.hardware import HARDWARE_SLOTS
from forge.parts.knowledge.judge_answer import (
    JUDGE_BYTES,
    JudgeAnswer,
    JudgeQuestion,
    SubjectQuestion,
)
from forge.parts.knowledge.models import GEMMA4
from forge.parts.knowledge.report_checks import (
    implied_work,
    judged_report,
    peak_of_hardware,
    refusal_of_report,
    subject_of_model,
)
from forge.parts.knowledge.report_schema import MOST_CELLS, BenchCell, BenchReport, KvDtype
from forge.programs.judge import judge_answer, judgement_text
from tests.parts.report_samples import cell, lost_cell, report
from tests.rig_programs import write_programs

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = {"run": {"kind": "imported", "origin": "a page"}}
SMALL = Geometry(
    layer_types=("sliding_attention", "full_attention"),
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    global_kv_heads=2,
    head_dim=16,
    global_head_dim=16,
    vocab=1000,
    window=8,
)
RIGS = tuple(sorted(path.stem for path in (ROOT / "forge" / "rigs").glob("[a-z]*.py")))
# One of each kind: a bundle takes seconds.
BUNDLED = ("local_pytorch_cpu_2b", "local_vllm_cpu_2b", "tpu_vllm_v6e1_2b")


def impossible(concurrency: int = 8) -> BenchCell:
    """A cell whose figures agree with each other and with no chip."""
    return cell(concurrency, output_tps=1e6, ttft_ms=0.5, tpot_ms=concurrency / 1e3)


def raw_report(cells: list[BenchCell], **sections: Any) -> BenchReport:
    """A report with these cells as they were measured, before any gate."""
    made = report([cell()], planned_cells=len(cells), **sections)
    return made.model_copy(update={"cells": cells})


class ProgramCase(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_programs(self.folder)
        self.program = self.folder / "judge.py"

    async def asyncSetUp(self) -> None:
        # unittest runs the loop in debug mode, which reports every slow step on standard error.
        asyncio.get_running_loop().slow_callback_duration = 60

    async def refused(self, made: BenchReport | None = None) -> RigError:
        with self.assertRaises(RigError) as caught:
            await asked_judgement(self.program, made or report())
        return caught.exception


class TestSubjects(ProgramCase):
    async def test_the_process_says_what_the_function_says(self) -> None:
        kv = KvDtype(value="fp8", evidence="flag")
        for question in (
            SubjectQuestion(model="google/gemma-4-E2B-it", encoding="bf16", slot="v6e1"),
            SubjectQuestion(
                model="google/gemma-4-12B-it-qat-w4a16-ct",
                encoding="w4a16",
                kv_dtype=kv,
                max_model_len=4096,
                slot="g6",
            ),
            SubjectQuestion(model="embedded", encoding="f32", geometry=SMALL, slot="cpu"),
            SubjectQuestion(model="/models/of mine/tiny", encoding="odd", geometry=SMALL),
        ):
            with self.subTest(question.model):
                known = await asked_subject(self.program, question)
                subject = subject_of_model(
                    question.model,
                    question.encoding,
                    question.geometry,
                    kv_dtype=question.kv_dtype,
                    max_model_len=question.max_model_len,
                )
                self.assertEqual(known.subject, subject)
                self.assertEqual(known.is_gemma4, question.model.startswith("google/"))

    def test_every_slot_has_its_chip_and_another_is_its_own(self) -> None:
        for slot, chip in [(name, s.chip) for name, s in HARDWARE_SLOTS.items()] + [
            ("moon", "moon")
        ]:
            question = JudgeQuestion(subject=SubjectQuestion(model="embedded", slot=slot))
            known = judge_answer(question).subject
            assert known is not None
            self.assertEqual(known.chip, chip)

    def test_the_releases_are_known_and_nothing_like_them(self) -> None:
        repos = [c.repo for model in GEMMA4.values() for c in model.checkpoints]
        others = ["google/gemma-4-E3B-it", "embedded", "/models/gemma-4-E2B-it", repos[0] + "x"]
        for repo in (*repos, *others):
            known = judge_answer(JudgeQuestion(subject=SubjectQuestion(model=repo))).subject
            assert known is not None
            self.assertEqual(known.is_gemma4, repo in repos, repo)

    def test_a_question_asks_for_one_thing(self) -> None:
        subject = SubjectQuestion(model="embedded")
        for fields in ({}, {"subject": subject, "report": report()}, {"gpu": 1}):
            with self.subTest(fields), self.assertRaises(ValidationError):
                JudgeQuestion.model_validate(fields)
        for subject_fields in (
            {"model": "m", "slots": "x"},
            {"model": "m", "max_model_len": 0},
            {"model": "m" * 5000},
            {"model": "m", "geometry": {"layer_types": ["odd"]}},
            {"encoding": "bf16"},
        ):
            with self.subTest(subject_fields), self.assertRaises(ValidationError):
                SubjectQuestion.model_validate(subject_fields)

    async def test_what_no_report_may_hold_is_refused_before_the_load(self) -> None:
        question = SubjectQuestion(model="m" * 4000)  # longer than a report's subject may be
        with self.assertRaises(RigError) as caught:
            await asked_subject(self.program, question)
        self.assertEqual(caught.exception.error_class, "INTERNAL")
        self.assertIn("no question", caught.exception.what)
        self.assertNotIn("mmmm", caught.exception.what)


class TestJudgements(ProgramCase):
    async def test_the_process_says_what_the_function_says(self) -> None:
        lost = lost_cell(64, 1024, "failed", "out of memory: \u201cno\u201d \U0001f4a5")
        resolved = {
            "a": None,
            "b": 1,
            "c": 1.0,
            "d": True,
            "e": "1",
            "kv_sharing_fast_prefill": True,
        }
        hardware = {
            "slot": "cpu",
            "chip": "cpu",
            "bandwidth_gbs": {"value": 50, "how": "declared"},
            "host_cores": {"value": 2, "unit": "threads", "how": "probed"},
        }
        for made in (
            raw_report([cell()]),
            raw_report([cell(1), impossible(), lost]),
            raw_report([impossible(), cell(16)], **IMPORTED),
            raw_report([cell()], engine={"resolved": resolved}, notes=["\u2028 a line"]),
            raw_report([cell()], hardware=hardware, model="embedded", encoding="f32"),
        ):
            judged = await asked_judgement(self.program, made)
            self.assertEqual(judged, judged_report(made))
            self.assertEqual(judged.model_dump_json(), judged_report(made).model_dump_json())

    async def test_the_locale_changes_no_letter(self) -> None:
        made = raw_report([cell()], notes=["10 \u00b5s, \u201cdistinct\u201d"])
        with mock.patch.dict(os.environ, {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}):
            judged = await asked_judgement(self.program, made)
        self.assertEqual(judged.notes, made.notes)

    async def test_a_measured_lie_fails_and_a_printed_one_is_marked(self) -> None:
        measured = await asked_judgement(self.program, raw_report([impossible(), cell(16)]))
        self.assertEqual([c.status for c in measured.cells], ["failed", "ok"])
        self.assertIn("implausible: ", measured.cells[0].reason)
        self.assertIsNone(measured.cells[0].metrics)
        printed = await asked_judgement(self.program, raw_report([impossible()], **IMPORTED))
        self.assertEqual(printed.cells[0].status, "ok")
        assert printed.cells[0].implied is not None
        self.assertTrue(printed.cells[0].implied.checks)

    async def test_what_the_report_said_of_its_gate_itself_does_not_count(self) -> None:
        flattering = judged_report(raw_report([cell()])).cells[0].implied
        lie = impossible().model_copy(update={"implied": flattering})
        judged = await asked_judgement(self.program, raw_report([lie]))
        self.assertEqual(judged.cells[0].status, "failed")

    async def test_the_longest_report_passes_also_where_every_cell_is_a_lie(self) -> None:
        grid = [(c, i) for c in range(1, 51) for i in range(1000, 1000 + MOST_CELLS // 50)]
        cells = [
            impossible(c).model_copy(
                update={"id": f"c{c}-i{i}-o128", "input_tokens": i, "marks": ["m" * 200] * 3}
            )
            for c, i in grid
        ]
        made = raw_report(cells, **IMPORTED)
        judged = await asked_judgement(self.program, made)
        self.assertEqual(len(judged.cells), MOST_CELLS)
        self.assertTrue(all(c.implied and c.implied.checks for c in judged.cells))
        self.assertLess(len(JudgeAnswer(report=judged).model_dump_json()), JUDGE_BYTES)


class TestFaults(ProgramCase):
    async def test_a_missing_program_is_named(self) -> None:
        self.program.unlink()
        error = await self.refused()
        self.assertEqual(error.error_class, "NOT_FOUND")
        self.assertIn("judge.py is not beside server.py", error.what)
        self.assertIn("restore", error.next_step)
        with self.assertRaises(RigError) as caught:
            await asked_subject(self.program, SubjectQuestion(model="embedded"))
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")

    async def test_a_program_that_answers_nonsense_is_no_answer(self) -> None:
        good = JudgeAnswer(report=judged_report(report())).model_dump(mode="json")
        subject = {"subject": {"subject": good["report"]["subject"], "chip": "v6e"}}
        for text in (
            "",
            "print('{}')",
            "print('[1]')",
            "print('{' * 100_000)",
            "print('x' * 40_000_000)",
            f"print({json.dumps(subject)!r})",
            f"print({json.dumps({**good, 'more': 1})!r})",
            f"print({json.dumps({'report': {**good['report'], 'cells': []}})!r})",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "import sys; sys.exit('broken in two')",
        ):
            with self.subTest(text[:60]):
                self.program.write_text(text)
                error = await self.refused()
                self.assertEqual(error.error_class, "INTERNAL")
                self.assertIn("judge.py gave no answer", error.what)
        self.assertIn("broken in two", error.what)

    async def test_one_that_gives_another_report_back_has_judged_nothing(self) -> None:
        asked = report([cell(8), cell(16)])
        for other in (
            report([cell(8), cell(16)], engine={"version": "0.33.0"}),
            report([cell(8), cell(16)], repeat=2),
            report([cell(16), cell(8)]),
            report([cell(8)], planned_cells=2),
        ):
            answer = JudgeAnswer(report=judged_report(other)).model_dump_json(exclude_none=True)
            self.program.write_text(f"print({answer!r})\n")
            error = await self.refused(asked)
            self.assertEqual(error.error_class, "INTERNAL")
            self.assertIn("another report", error.what)

    async def test_one_that_does_not_end_is_ended(self) -> None:
        pid_file = self.folder / "pid"
        self.program.write_text(
            "import os, pathlib, time\n"
            f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        with mock.patch.object(part, "_JUDGE_PATIENCE_S", 3.0):
            error = await self.refused()
        self.assertEqual(error.error_class, "TIMEOUT")
        pid = int(pid_file.read_text())
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)

    async def test_what_is_asked_stands_in_no_argument(self) -> None:
        told = self.folder / "argv"
        answer = JudgeAnswer(report=judged_report(report())).model_dump_json(exclude_none=True)
        self.program.write_text(
            "import pathlib, sys\n"
            f"pathlib.Path({str(told)!r}).write_text(repr(sys.argv[1:]))\n"
            f"print({answer!r})\n"
        )
        await asked_judgement(self.program, report())
        self.assertEqual(told.read_text(), "['--question']")


class TestCommand(unittest.TestCase):
    """The bundled file, alone in a folder, with pydantic and nothing else to import."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        source = bundle("forge.programs.judge", ROOT)
        assert source.third_party == ("pydantic",), source.third_party
        (cls.folder / "judge.py").write_text(source.render("# built for a test\n"))

    def run_it(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        packages = str(Path(pydantic.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "judge.py", *words],
            cwd=self.folder,
            input=given,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": packages, "LC_ALL": "C.UTF-8"},
        )
        self.assertNotIn("Traceback", done.stderr)
        return done

    def write(self, made: BenchReport, name: str = "report.json") -> str:
        (self.folder / name).write_text(made.model_dump_json(exclude_none=True))
        return name

    def test_the_status_says_whether_it_can_be_true(self) -> None:
        lost = lost_cell(64, 1024, "failed", "out of memory")
        for made, status in (
            (raw_report([cell(), lost]), 0),
            (raw_report([lost]), 0),
            (raw_report([cell(), impossible(16)]), 1),
            (raw_report([*(cell(c) for c in range(8, 27)), impossible(30)], **IMPORTED), 1),
            (judged_report(raw_report([cell(), impossible(16)])), 0),  # it claims that no more
        ):
            done = self.run_it(self.write(made))
            self.assertEqual(done.returncode, status, done.stdout + done.stderr)
            text, plausible = judgement_text(made)
            self.assertEqual((done.stdout, plausible), (text + "\n", not status))
            self.assertEqual(done.stderr, "")

    def test_people_get_every_share_every_contradiction_and_the_verdict(self) -> None:
        lost = lost_cell(64, 1024, "failed", "out of memory")
        made = raw_report([cell(), impossible(16), lost], **IMPORTED)
        told = self.run_it(self.write(made)).stdout
        peak = peak_of_hardware(made.hardware, made.subject.encoding)
        self.assertIn(f"peak: {peak.tflops:,.0f} TFLOP/s, {peak.gbs:,.0f} GB/s\n", told)
        self.assertIn("imported, google/gemma-4-E2B-it (bf16) by vllm on 1 x v6e\n", told)
        for one in made.cells[:2]:
            implied = implied_work(made, one)
            assert implied is not None and implied.flops_share and implied.bytes_share
            shares = f"{implied.flops_share:.1%} of the compute, {implied.bytes_share:.1%} of the"
            self.assertRegex(told, rf"(?m)^  {one.id} +{shares} bandwidth$")
            for check in implied.checks:
                self.assertIn(f"    cannot be: {check}\n", told)
        self.assertIn("cannot be", told)
        self.assertRegex(told, r"(?m)^  c64-i1024-o128 +failed: out of memory$")
        self.assertTrue(told.endswith(f"no evidence: {refusal_of_report(made)}\n"), told)

    def test_the_verdict_in_each_case(self) -> None:
        many = [cell(c) for c in range(8, 27)]
        lost = lost_cell(64, 1024, "not_run", "it was ended")
        for cells, words in (
            (many, "plausible: nothing speaks against the 19 cells that have figures"),
            ([*many, impossible(30)], "1 of 20 cells cannot be true; the others stand"),
            ([impossible(30)], "no evidence: 1 of 1 cells are impossible"),
            ([lost], "nothing to judge: no cell has figures"),
        ):
            last = self.run_it(self.write(raw_report(cells, **IMPORTED))).stdout.splitlines()[-1]
            self.assertTrue(last.startswith(words), last)

    def test_what_is_not_known_is_said(self) -> None:
        hardware = {"slot": "cpu", "chip": "cpu"}
        told = self.run_it(self.write(raw_report([cell()], hardware=hardware, model="embedded")))
        self.assertIn("peak: unknown", told.stdout)
        self.assertIn("the model is in no table", told.stdout)
        self.assertRegex(told.stdout, r"(?m)^  c8-i1024-o128 +no share is known$")
        self.assertEqual(told.returncode, 0)

    def test_a_report_s_text_moves_no_terminal_and_gives_no_secret_away(self) -> None:
        token = "hf_" + "CANARYcanary" * 2
        lost = lost_cell(64, 1024, "failed", f"\x1b[2J\x1b]0;title\x07 {token} \u202e")
        told = self.run_it(self.write(raw_report([lost]))).stdout
        self.assertIn("failed", told)
        for text in ("\x1b", "\x07", "\u202e", token):
            self.assertNotIn(text, told)

    def test_the_question_is_answered_as_the_server_reads_it(self) -> None:
        made = raw_report([cell(), impossible(16)])
        for question in (
            JudgeQuestion(report=made),
            JudgeQuestion(subject=SubjectQuestion(model="google/gemma-4-E4B-it", slot="l4")),
        ):
            done = self.run_it("--question", given=question.model_dump_json())
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(JudgeAnswer.model_validate_json(done.stdout), judge_answer(question))

    def test_what_is_no_question_is_refused(self) -> None:
        good = json.loads(JudgeQuestion(report=report()).model_dump_json())
        for given in (
            "",
            "null",
            "[]",
            "{}",
            "{" * 100_000,
            '{"subject": {}}',
            '{"subject": {"model": "x", "canary": "SECRET-canary"}}',
            json.dumps({**good, "subject": {"model": "embedded"}}),
            json.dumps({"report": {**good["report"], "cells": []}}),
            " " * (JUDGE_BYTES + 1),
        ):
            with self.subTest(given[:50]):
                done = self.run_it("--question", given=given)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertTrue(done.stderr.startswith("judge.py: standard input"), done.stderr)
                self.assertNotIn("SECRET", done.stderr)

    def test_wrong_usage_is_status_2_and_says_what(self) -> None:
        good = self.write(report())
        (self.folder / "other.json").write_text('{"schema_version": "1.0"}')
        (self.folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
        with (self.folder / "large.json").open("wb") as file:
            file.truncate(JUDGE_BYTES + 1)
        for words, said in (
            ([], "give a report's file, or --question"),
            ([good, "--question"], "give a report's file, or --question"),
            ([good, "--colour"], "--colour"),
            ([good, good], "unrecognized"),
            (["nowhere.json"], "nowhere.json: No such file"),
            (["."], ".: Is a directory"),
            (["other.json"], "other.json is no report: schema_version"),
            (["bytes.json"], "bytes.json is no report"),
            (["large.json"], f"large.json: above {JUDGE_BYTES:,} bytes"),
        ):
            with self.subTest(words):
                done = self.run_it(*words)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn(said, done.stderr)

    def test_the_help_says_what_the_status_means(self) -> None:
        done = self.run_it("--help")
        self.assertEqual(done.returncode, 0)
        told = " ".join(done.stdout.split())
        self.assertIn("0 plausible, 1 a cell cannot be true, 2 wrong usage", told)


class TestTheCut(unittest.TestCase):
    """The gate and its tables stand in judge.py and in no server."""

    def test_no_server_has_the_gate_in_it(self) -> None:
        program = bundle("forge.programs.judge", ROOT)
        gate = {
            f"forge.parts.knowledge.{name}"
            for name in ("report_checks", "hardware", "models", "memory")
        }
        self.assertLessEqual(gate, set(program.modules))
        for rig in BUNDLED:
            server = bundle(f"forge.rigs.{rig}", ROOT)
            self.assertFalse(gate & set(server.modules), rig)
            self.assertIn("forge.parts.boundaries.judge_program", server.modules)

    def test_every_rig_lays_it_beside_its_server(self) -> None:
        self.assertGreater(len(RIGS), 6)
        for rig in RIGS:
            self.assertIn("judge", load_rig(rig).programs, rig)


if __name__ == "__main__":
    unittest.main()
